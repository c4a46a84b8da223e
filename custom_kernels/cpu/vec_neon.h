/* NEON (AArch64): 4 lanes; 4-bit codes become bytes by a table look-up, then floats. */
#include <arm_neon.h>

#define ISA_SYMBOL k3_isa_neon
#define ISA_NAME "neon"
#define UNROLL _Pragma("GCC unroll 8")
enum { VL = 4, MR = 4, NT = 5, MR1 = 4, UNIT = 32, REORDERS = 0 };
typedef float32x4_t vf;
typedef int8x16_t vtable;

INLINE vf v_zero(void) { return vdupq_n_f32(0); }
INLINE vf v_load(const float *p) { return vld1q_f32(p); }
INLINE void v_store(float *p, vf a) { vst1q_f32(p, a); }
INLINE vf v_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }
INLINE float v_sum(vf a) { return vaddvq_f32(a); }

INLINE vtable v_table(const float *codes) {
    int8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (int8_t)codes[i];
    return vld1q_s8(bytes);
}

INLINE int64_t v_position(int64_t c) { return c; }

INLINE void floats16(int8x16_t codes, vf *w) {
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    w[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(low)));
    w[1] = vcvtq_f32_s32(vmovl_high_s16(low));
    w[2] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(high)));
    w[3] = vcvtq_f32_s32(vmovl_high_s16(high));
}

/* 32 codes in column order, as floats. */
INLINE void codes32(const uint8_t *p, vtable table, vf *w) {
    uint8x16_t d = vld1q_u8(p);
    int8x16_t even = vqtbl1q_s8(table, vandq_u8(d, vdupq_n_u8(15)));
    int8x16_t odd = vqtbl1q_s8(table, vshrq_n_u8(d, 4));
    floats16(vzip1q_s8(even, odd), w);
    floats16(vzip2q_s8(even, odd), w + 4);
}

INLINE void v_mxfp4(const uint8_t *p, const float *s, vtable table, vf *w) {
    codes32(p, table, w);
    for (int t = 0; t < 8; t++) w[t] = vmulq_n_f32(w[t], s[0]);
}

INLINE void v_q4(const uint8_t *p, const float *s, const float *b, int shift, vtable table, vf *w) {
    (void)shift; /* a unit lies in one group */
    codes32(p, table, w);
    vf bias = vdupq_n_f32(b[0]);
    for (int t = 0; t < 8; t++) w[t] = vfmaq_n_f32(bias, w[t], s[0]);
}

INLINE void v_q8(const uint8_t *p, const float *s, const float *b, int shift, vf *w) {
    (void)shift;
    vf bias = vdupq_n_f32(b[0]);
    for (int t = 0; t < 4; t++) {
        uint16x8_t q = vmovl_u8(vld1_u8(p + 8 * t));
        w[2 * t] = vfmaq_n_f32(bias, vcvtq_f32_u32(vmovl_u16(vget_low_u16(q))), s[0]);
        w[2 * t + 1] = vfmaq_n_f32(bias, vcvtq_f32_u32(vmovl_high_u16(q)), s[0]);
    }
}

INLINE vf v_f32(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }

INLINE vf v_bf16(const uint8_t *p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}

INLINE vf v_f16(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
