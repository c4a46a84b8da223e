/* AVX-512 (F, BW, VL, DQ): 16 lanes; 4-bit codes are looked up in a register of 16 floats. */
#include <immintrin.h>

#define ISA_SYMBOL k3_isa_avx512
#define ISA_NAME "avx512"
enum { VL = 16, MR = 4, NT = 6, MR1 = 4, UNIT = 32, REORDERS = 1 };
typedef __m512 vf;
typedef __m512 vtable;

INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float v_sum(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE vtable v_table(const float *codes) { return _mm512_loadu_ps(codes); }

/* A unit of 32 columns is 16 bytes: the low nibbles, even columns, go to the first vector, the high ones to the
 * second. A look-up heeds only the low four bits of an index. */
INLINE int64_t v_position(int64_t c) { return (c & ~31) + (c & 1) * 16 + (c >> 1 & 15); }

INLINE void codes32(const uint8_t *p, vtable table, vf *w) {
    __m512i d = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
    w[0] = _mm512_permutexvar_ps(d, table);
    w[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(d, 4), table);
}

INLINE void v_mxfp4(const uint8_t *p, const float *s, vtable table, vf *w) {
    codes32(p, _mm512_mul_ps(table, _mm512_set1_ps(s[0])), w);
}

INLINE void v_q4(const uint8_t *p, const float *s, const float *b, int shift, vtable table, vf *w) {
    (void)shift; /* a unit lies in one group */
    codes32(p, _mm512_fmadd_ps(table, _mm512_set1_ps(s[0]), _mm512_set1_ps(b[0])), w);
}

INLINE void v_q8(const uint8_t *p, const float *s, const float *b, int shift, vf *w) {
    (void)shift;
    vf scale = _mm512_set1_ps(s[0]), bias = _mm512_set1_ps(b[0]);
    for (int t = 0; t < 2; t++) {
        vf q = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p + 16 * t))));
        w[t] = _mm512_fmadd_ps(q, scale, bias);
    }
}

INLINE vf v_f32(const uint8_t *p) { return _mm512_loadu_ps(p); }

INLINE vf v_bf16(const uint8_t *p) {
    __m512i u = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(u, 16));
}

INLINE vf v_f16(const uint8_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
