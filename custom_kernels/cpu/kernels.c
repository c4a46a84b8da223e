/* The products, once for each instruction set: K3_ISA_* says which vec_*.h gives the vectors.
 *
 * The order of every sum is fixed: lane l of a row's accumulator adds its products in rising unit order by fused
 * multiply-add, the lanes are added at the end. A tile for one token and a tile for many do the same, so that the
 * bits of an element depend neither on threads nor on how many tokens are computed together. */
#include "k3cpu.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

INLINE float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
INLINE uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
INLINE uint16_t load_u16(const uint8_t *p) {
    uint16_t value;
    memcpy(&value, p, sizeof value);
    return value;
}
/* IEEE half to float: subnormals through an exact product with 2^-24. */
INLINE float float_of_half(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    uint32_t normal = (exponent + (exponent == 31 ? 224 : 112)) << 23 | mantissa << 13;
    uint32_t small = bits_of_float((float)(int32_t)mantissa * 0x1p-24f);
    return float_of_bits(sign | (exponent ? normal : small));
}

/* The statements for index = 0..count-1, count a constant of at most 8, written out: every index is a constant, which
 * lets any compiler keep arrays of vectors in registers. */
#if defined(K3_ISA_AVX512) || defined(K3_ISA_AVX2) || defined(K3_ISA_NEON)
#define TIMES(index, count, ...)                                                                                   \
    do {                                                                                                           \
        TIME(0, index, count, __VA_ARGS__)                                                                         \
        TIME(1, index, count, __VA_ARGS__)                                                                         \
        TIME(2, index, count, __VA_ARGS__)                                                                         \
        TIME(3, index, count, __VA_ARGS__)                                                                         \
        TIME(4, index, count, __VA_ARGS__)                                                                         \
        TIME(5, index, count, __VA_ARGS__)                                                                         \
        TIME(6, index, count, __VA_ARGS__)                                                                         \
        TIME(7, index, count, __VA_ARGS__)                                                                         \
    } while (0)
#define TIME(value, index, count, ...)                                                                             \
    if (value < (count)) {                                                                                         \
        enum { index = value };                                                                                    \
        __VA_ARGS__                                                                                                \
    }
#else /* more registers than portable code can count on: a loop is as fast and compiles sooner */
#define TIMES(index, count, ...)                                                                                   \
    for (int index = 0; index < (count); index++) {                                                                \
        __VA_ARGS__                                                                                                \
    }
#endif

#if defined(K3_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(K3_ISA_AVX2)
#include "vec_avx2.h"
#elif defined(K3_ISA_NEON)
#include "vec_neon.h"
#else
#include "vec_portable.h"
#endif

#include "situ.h"

/* Weights are decoded into registers for up to FEW tokens at a time, and at most FEW_ROUNDS times. */
enum { FEW = 4, FEW_ROUNDS = 4 };
enum { UNIT_VECTORS = UNIT / VL, GROUPS = K3_DEPTH / 32, ONE_DEPTH = 4096, ONE_GROUPS = ONE_DEPTH / 32 };
enum { TILE_ROWS = (K3_ROWS + MR - 1) / MR * MR }; /* rows of the decoded tile; those beyond K3_ROWS are zero */

/* Twice the e2m1 values: integers, and with scales of 2^(s - 130) no decoded weight leaves the range of float32 at
 * either end. The product is multiplied by MXFP4_FACTOR when it is stored. */
static const float mxfp4_codes[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
static const float integers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define MXFP4_FACTOR 4.0f

/* Bits of a weight; a unit has UNIT * bits / 8 bytes. */
INLINE int weight_bits(const int format) {
    return format <= K3_Q4 ? 4 : format == K3_Q8 ? 8 : format == K3_F32 ? 32 : 16;
}

INLINE int group_shift(const int format, const k3_matrix *m) {
    return format == K3_MXFP4 || m->group == 32 ? 5 : m->group == 64 ? 6 : 7;
}

/* Scales first..first+count-1 of a row as floats. */
INLINE void widen(const int format, int type, const uint8_t *row, int64_t first, int64_t count, float *out) {
    if (format == K3_MXFP4) {
        const uint8_t *p = row + first;
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = (uint32_t)p[i] << 23;
            bits |= p[i] == 0 || p[i] == 255 ? 0x00400000u : 0; /* the subnormal 2^-127 and NaN */
            out[i] = float_of_bits(bits) * 0.125f;
        }
    } else if (type == K3_SCALE_F32) {
        memcpy(out, row + 4 * first, (size_t)(4 * count));
    } else {
        const uint8_t *p = row + 2 * first;
        if (type == K3_SCALE_BF16)
            for (int64_t i = 0; i < count; i++) out[i] = float_of_bits((uint32_t)load_u16(p + 2 * i) << 16);
        else
            for (int64_t i = 0; i < count; i++) out[i] = float_of_half(load_u16(p + 2 * i));
    }
}

/* Weights of the unit at p; s and b point at the scales of the unit's first group. */
INLINE void decode_unit(const int format, const uint8_t *p, const float *s, const float *b, int shift, vtable table,
                        vf *w) {
    if (format == K3_MXFP4) v_mxfp4(p, s, table, w);
    if (format == K3_Q4) v_q4(p, s, b, shift, table, w);
    if (format == K3_Q8) v_q8(p, s, b, shift, w);
    for (int i = 0; i < UNIT_VECTORS; i++) {
        if (format == K3_BF16) w[i] = v_bf16(p + 2 * VL * i);
        if (format == K3_F16) w[i] = v_f16(p + 2 * VL * i);
        if (format == K3_F32) w[i] = v_f32(p + 4 * VL * i);
    }
}

/* The last unit of a row where the row ends inside it: its bytes, then zeros. */
INLINE const uint8_t *last_unit(const int format, const uint8_t *p, int64_t columns, uint8_t *copy) {
    memset(copy, 0, UNIT * 4);
    memcpy(copy, p, (size_t)(columns * weight_bits(format) / 8));
    return copy;
}

/* sum[t] += the unit at p, which holds columns c.. of a row, times x[t]. */
INLINE void add_unit(const int format, const int N, const uint8_t *p, const float *s, const float *b, int64_t c,
                     int shift, vtable table, const float *const *x, vf *sum) {
    vf w[UNIT_VECTORS];
    decode_unit(format, p, s + (c >> shift), b + (c >> shift), shift, table, w);
    TIMES(i, UNIT_VECTORS, TIMES(t, N, sum[t] = v_fma(w[i], v_load(x[t] + c + VL * i), sum[t]);););
}

/* R rows times N tokens, decoded into registers. The rows that come next are fetched from memory meanwhile: a CPU's
 * own prefetching stops at the end of each short row. */
INLINE void rows_few(const int format, const int R, const int N, const k3_matrix *m, int64_t row0,
                     const float *const *x, float *y) {
    const int bytes = UNIT * weight_bits(format) / 8, scaled = format <= K3_Q8, shift = group_shift(format, m);
    const int line = bytes < 64 ? 64 / bytes : 1; /* units of a cache line */
    const int64_t ahead = MR1 * m->row_bytes;
    const vtable table = v_table(format == K3_MXFP4 ? mxfp4_codes : integers);
    float s[MR1][ONE_GROUPS], b[MR1][ONE_GROUPS];
    uint8_t copy[UNIT * 4];
    vf sum[MR1][FEW];
    TIMES(r, R, TIMES(t, N, sum[r][t] = v_zero();););
    for (int64_t c0 = 0; c0 < m->cols; c0 += ONE_DEPTH) {
        int64_t columns = m->cols - c0 < ONE_DEPTH ? m->cols - c0 : ONE_DEPTH, full = columns / UNIT;
        const uint8_t *p[MR1];
        const float *xc[FEW];
        for (int t = 0; t < N; t++) xc[t] = x[t] + c0;
        for (int r = 0; r < R; r++) {
            p[r] = m->weight + (row0 + r) * m->row_bytes + c0 * weight_bits(format) / 8;
            if (!scaled) continue;
            int64_t groups = columns >> shift;
            widen(format, m->scale_type, m->scale + (row0 + r) * m->scale_bytes, c0 >> shift, groups, s[r]);
            if (format != K3_MXFP4)
                widen(format, m->scale_type, m->bias + (row0 + r) * m->scale_bytes, c0 >> shift, groups, b[r]);
        }
        int64_t u = 0;
        for (; u + line <= full; u += line)
            TIMES(r, R, {
                __builtin_prefetch(p[r] + u * bytes + ahead);
                if (bytes > 64) __builtin_prefetch(p[r] + u * bytes + ahead + 64);
                TIMES(i, line, {
                    add_unit(format, N, p[r] + (u + i) * bytes, s[r], b[r], (u + i) * UNIT, shift, table, xc, sum[r]);
                });
            });
        for (; u < full; u++)
            TIMES(r, R, {
                add_unit(format, N, p[r] + u * bytes, s[r], b[r], u * UNIT, shift, table, xc, sum[r]);
            });
        if (columns % UNIT)
            TIMES(r, R, {
                const uint8_t *last = last_unit(format, p[r] + full * bytes, columns % UNIT, copy);
                add_unit(format, N, last, s[r], b[r], full * UNIT, shift, table, xc, sum[r]);
            });
    }
    TIMES(r, R, TIMES(t, N, y[t * K3_ROWS + r] = v_sum(sum[r][t]);););
}

INLINE void tile_few(const int format, const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens,
                     float *y) {
    int r = 0;
    for (; r + MR1 <= rows; r += MR1)
        for (int t = 0; t < tokens;) {
            int count = tokens - t < FEW ? tokens - t : FEW;
            if (count == FEW) rows_few(format, MR1, FEW, m, row0 + r, x + t, y + t * K3_ROWS + r);
            if (count == 3) rows_few(format, MR1, 3, m, row0 + r, x + t, y + t * K3_ROWS + r);
            if (count == 2) rows_few(format, MR1, 2, m, row0 + r, x + t, y + t * K3_ROWS + r);
            if (count == 1) rows_few(format, MR1, 1, m, row0 + r, x + t, y + t * K3_ROWS + r);
            t += count;
        }
    for (; r < rows; r++)
        for (int t = 0; t < tokens; t++) rows_few(format, 1, 1, m, row0 + r, x + t, y + t * K3_ROWS + r);
}

/* Columns c0..c0+columns-1 of a row as floats, zeros up to a whole unit. */
INLINE void decode_row(const int format, const k3_matrix *m, int64_t row, int64_t c0, int64_t columns, float *out) {
    const int bytes = UNIT * weight_bits(format) / 8, scaled = format <= K3_Q8, shift = group_shift(format, m);
    const vtable table = v_table(format == K3_MXFP4 ? mxfp4_codes : integers);
    float s[GROUPS], b[GROUPS];
    uint8_t copy[UNIT * 4];
    if (scaled) {
        widen(format, m->scale_type, m->scale + row * m->scale_bytes, c0 >> shift, columns >> shift, s);
        if (format != K3_MXFP4)
            widen(format, m->scale_type, m->bias + row * m->scale_bytes, c0 >> shift, columns >> shift, b);
    }
    const uint8_t *p = m->weight + row * m->row_bytes + c0 * weight_bits(format) / 8;
    for (int64_t c = 0; c < columns; c += UNIT, p += bytes, out += UNIT) {
        vf w[UNIT_VECTORS];
        const uint8_t *from = columns - c < UNIT ? last_unit(format, p, columns - c, copy) : p;
        decode_unit(format, from, s + (c >> shift), b + (c >> shift), shift, table, w);
        for (int i = 0; i < UNIT_VECTORS; i++) v_store(out + VL * i, w[i]);
    }
}

/* sum[t][r] += w[r] . x[t] over `columns` columns; MR decoded rows, N tokens, all sums in registers. */
INLINE void block(const int N, const float *w, const float *const *x, int64_t c0, int64_t columns, float *sums) {
    vf sum[NT][MR];
    TIMES(t, N, TIMES(r, MR, sum[t][r] = v_load(sums + (t * TILE_ROWS + r) * VL);););
    for (int64_t c = 0; c < columns; c += VL) {
        vf wr[MR];
        TIMES(r, MR, wr[r] = v_load(w + r * K3_DEPTH + c););
        TIMES(t, N, {
            vf xv = v_load(x[t] + c0 + c);
            TIMES(r, MR, sum[t][r] = v_fma(wr[r], xv, sum[t][r]););
        });
    }
    TIMES(t, N, TIMES(r, MR, v_store(sums + (t * TILE_ROWS + r) * VL, sum[t][r]);););
}

typedef void (*block_function)(const float *w, const float *const *x, int64_t c0, int64_t columns, float *sums);
#define BLOCK(N)                                                                                                   \
    static void block_##N(const float *w, const float *const *x, int64_t c0, int64_t columns, float *sums) {       \
        block(N, w, x, c0, columns, sums);                                                                         \
    }
BLOCK(1)
BLOCK(2)
BLOCK(3)
BLOCK(4)
#if defined(K3_ISA_AVX512) || defined(K3_ISA_NEON)
BLOCK(5)
#endif
#if defined(K3_ISA_AVX512)
BLOCK(6)
#endif
static const block_function blocks[] = {
    block_1, block_2, block_3, block_4,
#if defined(K3_ISA_AVX512) || defined(K3_ISA_NEON)
    block_5,
#endif
#if defined(K3_ISA_AVX512)
    block_6,
#endif
};

INLINE void tile_many(const int format, const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens,
                      float *y, uint8_t *scratch) {
    float *w = (float *)scratch;            /* [TILE_ROWS, K3_DEPTH] */
    float *sums = w + TILE_ROWS * K3_DEPTH; /* [K3_TOKENS, TILE_ROWS, VL] */
    int row_blocks = (rows + MR - 1) / MR, panels = (tokens + NT - 1) / NT;
    memset(sums, 0, (size_t)tokens * TILE_ROWS * VL * sizeof(float));
    for (int r = rows; r < row_blocks * MR; r++) memset(w + r * K3_DEPTH, 0, K3_DEPTH * sizeof(float));
    for (int64_t c0 = 0; c0 < m->cols; c0 += K3_DEPTH) {
        int64_t columns = m->cols - c0 < K3_DEPTH ? m->cols - c0 : K3_DEPTH;
        for (int r = 0; r < rows; r++) decode_row(format, m, row0 + r, c0, columns, w + r * K3_DEPTH);
        columns = (columns + UNIT - 1) / UNIT * UNIT;
        for (int panel = 0; panel < panels; panel++) {
            int t0 = tokens * panel / panels, t1 = tokens * (panel + 1) / panels;
            for (int r = 0; r < row_blocks; r++)
                blocks[t1 - t0 - 1](w + r * MR * K3_DEPTH, x + t0, c0, columns, sums + (t0 * TILE_ROWS + r * MR) * VL);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) y[t * K3_ROWS + r] = v_sum(v_load(sums + (t * TILE_ROWS + r) * VL));
}

INLINE void tile_format(const int format, const k3_matrix *m, int64_t row0, int rows, const float *const *x,
                        int tokens, float *y, uint8_t *scratch) {
    if (tokens <= FEW_ROUNDS * FEW)
        tile_few(format, m, row0, rows, x, tokens, y);
    else
        tile_many(format, m, row0, rows, x, tokens, y, scratch);
    if (format == K3_MXFP4)
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < rows; r++) y[t * K3_ROWS + r] *= MXFP4_FACTOR;
}

#define TILE(name, format)                                                                                         \
    static __attribute__((noinline)) void name(const k3_matrix *m, int64_t row0, int rows, const float *const *x,   \
                                               int tokens, float *y, uint8_t *scratch) {                           \
        tile_format(format, m, row0, rows, x, tokens, y, scratch);                                                 \
    }
TILE(tile_mxfp4, K3_MXFP4)
TILE(tile_q4, K3_Q4)
TILE(tile_q8, K3_Q8)
TILE(tile_bf16, K3_BF16)
TILE(tile_f16, K3_F16)
TILE(tile_f32, K3_F32)

static void tile(const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens, float *y,
                 uint8_t *scratch) {
    switch (m->format) {
    case K3_MXFP4: tile_mxfp4(m, row0, rows, x, tokens, y, scratch); break;
    case K3_Q4: tile_q4(m, row0, rows, x, tokens, y, scratch); break;
    case K3_Q8: tile_q8(m, row0, rows, x, tokens, y, scratch); break;
    case K3_BF16: tile_bf16(m, row0, rows, x, tokens, y, scratch); break;
    case K3_F16: tile_f16(m, row0, rows, x, tokens, y, scratch); break;
    default: tile_f32(m, row0, rows, x, tokens, y, scratch);
    }
}

static int64_t position(int format, int64_t c) { return REORDERS && format <= K3_Q4 ? v_position(c) : c; }

static void pack(int format, const float *x, int64_t cols, float *packed) {
    int64_t padded = k3_padded(cols);
    if (!(REORDERS && format <= K3_Q4)) {
        memcpy(packed, x, (size_t)cols * sizeof(float));
        memset(packed + cols, 0, (size_t)(padded - cols) * sizeof(float));
        return;
    }
    for (int64_t c0 = 0; c0 < padded; c0 += K3_PAD)
        for (int64_t c = 0; c < K3_PAD; c++) packed[c0 + v_position(c)] = c0 + c < cols ? x[c0 + c] : 0;
}

static void situ(float *gate, const float *up, int64_t n, float beta, float linear_beta) {
    for (int64_t i = 0; i < n; i++) gate[i] = situ_one(gate[i], up[i], beta, linear_beta);
}

static uint64_t read_all(const uint8_t *p, int64_t bytes) {
    uint64_t words[32] = {0}, all = 0;
    for (; bytes >= (int64_t)sizeof words; p += sizeof words, bytes -= (int64_t)sizeof words)
        for (int i = 0; i < 32; i++) {
            uint64_t word;
            memcpy(&word, p + 8 * i, sizeof word);
            words[i] ^= word;
        }
    for (int i = 0; i < 32; i++) all ^= words[i];
    for (; bytes > 0; bytes--) all ^= *p++;
    return all;
}

const k3_isa ISA_SYMBOL = {
    ISA_NAME,
    (TILE_ROWS * K3_DEPTH + K3_TOKENS * TILE_ROWS * VL) * (int64_t)sizeof(float),
    pack, position, tile, situ, read_all,
};
