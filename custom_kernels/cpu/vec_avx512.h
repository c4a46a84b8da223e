/* AVX-512 (F, BW, VL, DQ): 16 lanes; 4-bit codes are looked up in a register of 16 floats or of 32 upper halves. */
#include <immintrin.h>

#define ISA_SYMBOL k3_isa_avx512
#define ISA_NAME "avx512"
enum { VL = 16, ACCUMULATORS = 1, MR = 4, NT = 6, UNIT = 32, FEW = 5, FEW_TOKENS = 16, REORDERS = 1, REGISTERS = 32 };
#define FEW_ROWS(tokens) 4
typedef __m512 vf;
typedef __m512 vtable;

INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_all(float a) { return _mm512_set1_ps(a); }
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float v_sum(vf a) {
    __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE vtable v_table(const float *codes) { return _mm512_loadu_ps(codes); }

/* A unit of 32 columns is 16 bytes, four words of 8 codes. Four lanes hold each word, shifted by 0 to 3 codes for the
 * first vector and by 4 to 7 for the second: a look-up heeds only the low four bits of an index. */
INLINE int64_t v_position(int64_t c) { return (c & ~31) + (c & 4) * 4 + (c & 3) * 4 + (c >> 3 & 3); }

INLINE void codes32(const uint8_t *p, __m512 table, vf *w) {
    const __m512i first = _mm512_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
    const __m512i second = _mm512_setr_epi32(16, 16, 16, 16, 20, 20, 20, 20, 24, 24, 24, 24, 28, 28, 28, 28);
    __m512i d = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    w[0] = _mm512_permutexvar_ps(_mm512_srlv_epi32(d, first), table);
    w[1] = _mm512_permutexvar_ps(_mm512_srlv_epi32(d, second), table);
}

/* The same columns in the same lanes, with one shift and one look-up of the upper 16 bits of both vectors' values,
 * which are the odd and the even words. It heeds five bits of an index, of which the fifth belongs to the next code. */
INLINE void v_mxfp4(const uint8_t *p, uint8_t scale, vf *w) {
    const __m512i table = _mm512_load_si512(k3_mxfp4_words[scale]);
    const int64_t one = 0x0001000100010001;
    const __m512i shift = _mm512_setr_epi64(0, 0, 4 * one, 4 * one, 8 * one, 8 * one, 12 * one, 12 * one);
    __m512i d = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p));
    __m512i values = _mm512_permutexvar_epi16(_mm512_srlv_epi16(d, shift), table);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(values, 16));
    w[1] = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32((int)0xFFFF0000)));
}

INLINE void v_q4(const uint8_t *p, float s, float b, vtable table, vf *w) {
    codes32(p, _mm512_fmadd_ps(table, _mm512_set1_ps(s), _mm512_set1_ps(b)), w);
}

INLINE void v_q8(const uint8_t *p, float s, float b, vf *w) {
    vf scale = _mm512_set1_ps(s), bias = _mm512_set1_ps(b);
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
