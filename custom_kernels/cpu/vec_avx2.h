/* AVX2 with FMA and F16C: 8 lanes; 4-bit codes become bytes by a shuffle, then floats. */
#include <immintrin.h>

#define ISA_SYMBOL k3_isa_avx2
#define ISA_NAME "avx2"
#define UNROLL _Pragma("GCC unroll 8")
enum { VL = 8, MR = 3, NT = 4, MR1 = 4, UNIT = 32, REORDERS = 0 };
typedef __m256 vf;
typedef __m128i vtable;

INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float v_sum(vf a) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE vtable v_table(const float *codes) {
    int8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (int8_t)codes[i];
    return _mm_loadu_si128((const __m128i *)bytes);
}

INLINE int64_t v_position(int64_t c) { return c; }

/* 32 codes in column order, as floats. */
INLINE void codes32(const uint8_t *p, vtable table, vf *w) {
    const __m128i nibble = _mm_set1_epi8(15);
    __m128i d = _mm_loadu_si128((const __m128i *)p);
    __m128i even = _mm_shuffle_epi8(table, _mm_and_si128(d, nibble));
    __m128i odd = _mm_shuffle_epi8(table, _mm_and_si128(_mm_srli_epi16(d, 4), nibble));
    __m128i low = _mm_unpacklo_epi8(even, odd), high = _mm_unpackhi_epi8(even, odd);
    w[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low));
    w[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(low, 8)));
    w[2] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high));
    w[3] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(high, 8)));
}

INLINE void v_mxfp4(const uint8_t *p, const float *s, vtable table, vf *w) {
    codes32(p, table, w);
    vf scale = _mm256_set1_ps(s[0]);
    for (int t = 0; t < 4; t++) w[t] = _mm256_mul_ps(w[t], scale);
}

INLINE void v_q4(const uint8_t *p, const float *s, const float *b, int shift, vtable table, vf *w) {
    (void)shift; /* a unit lies in one group */
    codes32(p, table, w);
    vf scale = _mm256_set1_ps(s[0]), bias = _mm256_set1_ps(b[0]);
    for (int t = 0; t < 4; t++) w[t] = _mm256_fmadd_ps(w[t], scale, bias);
}

INLINE void v_q8(const uint8_t *p, const float *s, const float *b, int shift, vf *w) {
    (void)shift;
    vf scale = _mm256_set1_ps(s[0]), bias = _mm256_set1_ps(b[0]);
    for (int t = 0; t < 4; t++) {
        __m256i q = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8 * t)));
        w[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), scale, bias);
    }
}

INLINE vf v_f32(const uint8_t *p) { return _mm256_loadu_ps((const float *)p); }

INLINE vf v_bf16(const uint8_t *p) {
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}

INLINE vf v_f16(const uint8_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
