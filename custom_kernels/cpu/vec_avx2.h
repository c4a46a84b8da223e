/* AVX2 with FMA and F16C: 8 lanes; two shuffles look up the upper two bytes of the floats of 4-bit codes. */
#include <immintrin.h>

#define ISA_SYMBOL k3_isa_avx2
#define ISA_NAME "avx2"
enum { VL = 8, ACCUMULATORS = 2, MR = 3, NT = 4, UNIT = 32, FEW = 4, FEW_TOKENS = 4, REORDERS = 1, REGISTERS = 16 };
#define FEW_ROWS(tokens) ((tokens) <= 2 ? 2 : 1)
typedef __m256 vf;
typedef struct {
    __m256i upper, lower; /* the bytes 3 and 2 of the code's float; the others are zero */
} vtable;

INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
INLINE vf v_all(float a) { return _mm256_set1_ps(a); }
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE float v_sum(vf a) {
    __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    q = _mm_add_ps(q, _mm_movehl_ps(q, q));
    return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

INLINE __m256i both_halves(const uint8_t *p) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}

INLINE vtable v_table(const float *codes) {
    uint8_t upper[16], lower[16];
    for (int i = 0; i < 16; i++) {
        upper[i] = (uint8_t)(bits_of_float(codes[i]) >> 24);
        lower[i] = (uint8_t)(bits_of_float(codes[i]) >> 16);
    }
    return (vtable){both_halves(upper), both_halves(lower)};
}

/* A unit of 32 columns is 16 bytes. The low nibbles, the even columns, give the lower halves of the vectors, the high
 * ones the upper halves; of every eight bytes the even ones give one vector and the odd ones the next. */
INLINE int64_t v_position(int64_t c) {
    return (c & ~31) + (c >> 4 & 1) * 16 + (c >> 1 & 1) * 8 + (c & 1) * 4 + (c >> 2 & 3);
}

INLINE void halves16(__m256i halves, vf *w) { /* the upper 16 bits of two times 8 floats */
    w[0] = _mm256_castsi256_ps(_mm256_slli_epi32(halves, 16));
    w[1] = _mm256_castsi256_ps(_mm256_and_si256(halves, _mm256_set1_epi32((int)0xFFFF0000)));
}

INLINE void codes32(const uint8_t *p, vtable table, vf *w) {
    __m256i d = _mm256_srlv_epi64(both_halves(p), _mm256_setr_epi64x(0, 0, 4, 4));
    d = _mm256_and_si256(d, _mm256_set1_epi8(15));
    __m256i upper = _mm256_shuffle_epi8(table.upper, d), lower = _mm256_shuffle_epi8(table.lower, d);
    halves16(_mm256_unpacklo_epi8(lower, upper), w);
    halves16(_mm256_unpackhi_epi8(lower, upper), w + 2);
}

INLINE void v_mxfp4(const uint8_t *p, uint8_t scale, vf *w) {
    const k3_mxfp4_bytes *values = &k3_mxfp4_halves[scale];
    codes32(p, (vtable){both_halves(values->upper), both_halves(values->lower)}, w);
}

INLINE void v_q4(const uint8_t *p, float s, float b, vtable table, vf *w) {
    codes32(p, table, w);
    vf scale = _mm256_set1_ps(s), bias = _mm256_set1_ps(b);
    for (int t = 0; t < 4; t++) w[t] = _mm256_fmadd_ps(w[t], scale, bias);
}

INLINE void v_q8(const uint8_t *p, float s, float b, vf *w) {
    vf scale = _mm256_set1_ps(s), bias = _mm256_set1_ps(b);
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
