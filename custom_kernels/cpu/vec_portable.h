/* Plain C: 4 lanes that a compiler may or may not put into one register; products are rounded before they are
 * added, which is the one difference in arithmetic from the other instruction sets. */
#define ISA_SYMBOL k3_isa_portable
#define ISA_NAME "portable"
enum { VL = 4, MR = 2, NT = 4, MR1 = 4, UNIT = 32, REORDERS = 0 };
typedef struct {
    float lane[4];
} vf;
typedef struct {
    float code[16];
} vtable;

INLINE vf v_zero(void) { return (vf){{0, 0, 0, 0}}; }
INLINE vf v_load(const float *p) { return (vf){{p[0], p[1], p[2], p[3]}}; }
INLINE void v_store(float *p, vf a) {
    for (int i = 0; i < 4; i++) p[i] = a.lane[i];
}
INLINE vf v_fma(vf a, vf b, vf c) {
    for (int i = 0; i < 4; i++) c.lane[i] += a.lane[i] * b.lane[i];
    return c;
}
INLINE float v_sum(vf a) { return (a.lane[0] + a.lane[2]) + (a.lane[1] + a.lane[3]); }

INLINE vtable v_table(const float *codes) {
    vtable table;
    for (int i = 0; i < 16; i++) table.code[i] = codes[i];
    return table;
}

INLINE int64_t v_position(int64_t c) { return c; }

INLINE int code(const uint8_t *p, int c) { return p[c / 2] >> (c % 2 * 4) & 15; }
INLINE float nibble(const uint8_t *p, int c) { return (float)code(p, c); }

INLINE void v_mxfp4(const uint8_t *p, const float *s, vtable table, vf *w) {
    for (int c = 0; c < 32; c++) w[c / 4].lane[c % 4] = table.code[code(p, c)] * s[0];
}

/* Rounded once, as a fused multiply-add would: the product is exact in double. */
INLINE float affine(float q, float s, float b) { return (float)((double)q * s + b); }

INLINE void v_q4(const uint8_t *p, const float *s, const float *b, int shift, vtable table, vf *w) {
    (void)shift; /* a unit lies in one group */
    (void)table;
    for (int c = 0; c < 32; c++) w[c / 4].lane[c % 4] = affine(nibble(p, c), s[0], b[0]);
}

INLINE void v_q8(const uint8_t *p, const float *s, const float *b, int shift, vf *w) {
    (void)shift;
    for (int c = 0; c < 32; c++) w[c / 4].lane[c % 4] = affine((float)p[c], s[0], b[0]);
}

INLINE vf v_f32(const uint8_t *p) {
    vf a;
    memcpy(&a, p, sizeof a);
    return a;
}

INLINE vf v_bf16(const uint8_t *p) {
    vf a;
    for (int i = 0; i < 4; i++) a.lane[i] = float_of_bits((uint32_t)load_u16(p + 2 * i) << 16);
    return a;
}

INLINE vf v_f16(const uint8_t *p) {
    vf a;
    for (int i = 0; i < 4; i++) a.lane[i] = float_of_half(load_u16(p + 2 * i));
    return a;
}
