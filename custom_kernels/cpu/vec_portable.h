/* Plain C over vectors of 4 that compilers lower to what the machine has; products are rounded before they are
 * added, which is the one difference in arithmetic from the other instruction sets. */
#define ISA_SYMBOL k3_isa_portable
#define ISA_NAME "portable"
enum { VL = 4, ACCUMULATORS = 4, MR = 2, NT = 4, UNIT = 32, FEW = 4, FEW_TOKENS = 16, REORDERS = 0, REGISTERS = 16 };
#define FEW_ROWS(tokens) 2
typedef float vf __attribute__((vector_size(16)));
typedef int vtable; /* codes are computed, not looked up */

INLINE vf v_zero(void) { return (vf){0, 0, 0, 0}; }
INLINE vf v_all(float a) { return (vf){a, a, a, a}; }
INLINE vf v_load(const float *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}
INLINE void v_store(float *p, vf a) { memcpy(p, &a, sizeof a); }
INLINE vf v_add(vf a, vf b) { return a + b; }
INLINE vf v_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE float v_sum(vf a) { return (a[0] + a[2]) + (a[1] + a[3]); }

INLINE vtable v_table(const float *codes) {
    (void)codes;
    return 0;
}

INLINE int64_t v_position(int64_t c) { return c; }

INLINE void v_mxfp4(const uint8_t *p, uint8_t scale, vf *w) {
    float values[32];
    for (int c = 0; c < 16; c++) {
        values[2 * c] = float_of_bits((uint32_t)k3_mxfp4_words[scale][p[c] & 15] << 16);
        values[2 * c + 1] = float_of_bits((uint32_t)k3_mxfp4_words[scale][p[c] >> 4] << 16);
    }
    memcpy(w, values, sizeof values);
}

/* Rounded once, as a fused multiply-add would: the product is exact in double. */
INLINE float affine(int q, float s, float b) { return (float)((double)q * s + b); }

INLINE void v_q4(const uint8_t *p, float s, float b, vtable table, vf *w) {
    float values[32];
    (void)table;
    for (int c = 0; c < 16; c++) {
        values[2 * c] = affine(p[c] & 15, s, b);
        values[2 * c + 1] = affine(p[c] >> 4, s, b);
    }
    memcpy(w, values, sizeof values);
}

INLINE void v_q8(const uint8_t *p, float s, float b, vf *w) {
    float values[32];
    for (int c = 0; c < 32; c++) values[c] = affine(p[c], s, b);
    memcpy(w, values, sizeof values);
}

INLINE vf v_f32(const uint8_t *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}

INLINE vf v_bf16(const uint8_t *p) {
    float values[4];
    for (int i = 0; i < 4; i++) values[i] = float_of_bits((uint32_t)load_u16(p + 2 * i) << 16);
    return v_load(values);
}

INLINE vf v_f16(const uint8_t *p) {
    float values[4];
    for (int i = 0; i < 4; i++) values[i] = float_of_half(load_u16(p + 2 * i));
    return v_load(values);
}
