/* NEON (AArch64): 4 lanes; two table look-ups give the upper two bytes of the floats of 4-bit codes. */
#include <arm_neon.h>

#define ISA_SYMBOL k3_isa_neon
#define ISA_NAME "neon"
enum { VL = 4, ACCUMULATORS = 4, MR = 4, NT = 5, UNIT = 32, FEW = 4, FEW_TOKENS = 16, REORDERS = 1, REGISTERS = 32 };
#define FEW_ROWS(tokens) ((tokens) == 1 ? 4 : (tokens) == 2 ? 2 : 1)
typedef float32x4_t vf;
typedef struct {
    uint8x16_t upper, lower; /* the bytes 3 and 2 of the code's float; the others are zero */
} vtable;

INLINE vf v_zero(void) { return vdupq_n_f32(0); }
INLINE vf v_all(float a) { return vdupq_n_f32(a); }
INLINE vf v_load(const float *p) { return vld1q_f32(p); }
INLINE void v_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf v_add(vf a, vf b) { return vaddq_f32(a, b); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE float v_sum(vf a) { return vaddvq_f32(a); }

INLINE vtable v_table(const float *codes) {
    uint8_t upper[16], lower[16];
    for (int i = 0; i < 16; i++) {
        upper[i] = (uint8_t)(bits_of_float(codes[i]) >> 24);
        lower[i] = (uint8_t)(bits_of_float(codes[i]) >> 16);
    }
    return (vtable){vld1q_u8(upper), vld1q_u8(lower)};
}

/* A unit of 32 columns is 16 bytes: the low nibbles, even columns, make four vectors, the high ones the other four. */
INLINE int64_t v_position(int64_t c) { return (c & ~31) + (c & 1) * 16 + (c >> 1 & 15); }

INLINE void floats16(uint8x16_t codes, vtable table, vf *w) {
    uint8x16_t upper = vqtbl1q_u8(table.upper, codes), lower = vqtbl1q_u8(table.lower, codes);
    uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper));
    uint16x8_t last = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
    const uint16x8_t zero = vdupq_n_u16(0);
    w[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, first));
    w[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, first));
    w[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, last));
    w[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, last));
}

INLINE void codes32(const uint8_t *p, vtable table, vf *w) {
    uint8x16_t d = vld1q_u8(p);
    floats16(vandq_u8(d, vdupq_n_u8(15)), table, w);
    floats16(vshrq_n_u8(d, 4), table, w + 4);
}

INLINE void v_mxfp4(const uint8_t *p, uint8_t scale, vf *w) {
    const k3_mxfp4_bytes *values = &k3_mxfp4_halves[scale];
    codes32(p, (vtable){vld1q_u8(values->upper), vld1q_u8(values->lower)}, w);
}

INLINE void v_q4(const uint8_t *p, float s, float b, vtable table, vf *w) {
    codes32(p, table, w);
    vf bias = vdupq_n_f32(b);
    for (int t = 0; t < 8; t++) w[t] = vfmaq_n_f32(bias, w[t], s);
}

INLINE void v_q8(const uint8_t *p, float s, float b, vf *w) {
    vf bias = vdupq_n_f32(b);
    for (int t = 0; t < 4; t++) {
        uint16x8_t q = vmovl_u8(vld1_u8(p + 8 * t));
        w[2 * t] = vfmaq_n_f32(bias, vcvtq_f32_u32(vmovl_u16(vget_low_u16(q))), s);
        w[2 * t + 1] = vfmaq_n_f32(bias, vcvtq_f32_u32(vmovl_high_u16(q)), s);
    }
}

INLINE vf v_f32(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

INLINE vf v_bf16(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vreinterpret_u16_u8(vld1_u8(p))), 16));
}

INLINE vf v_f16(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
