/* The products, once for each instruction set: K3_ISA_* says which vec_*.h gives the vectors.
 *
 * The order of every sum is fixed: lane l of a row's LANES partial sums adds its products in rising unit order by
 * fused multiply-add, the lanes are added at the end. A tile for one token and a tile for many do the same, so that the
 * bits of an element depend neither on threads nor on how many tokens are computed together. */
#include "k3cpu.h"

#include <float.h>
#include <math.h>
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

/* The statements for index = 0..count-1, count a constant, written out: arrays of vectors stay in registers. */
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif
#define TIMES(index, count, ...)                                                                                   \
    UNROLL for (int index = 0; index < (count); index++) { __VA_ARGS__ }

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

/* Up to FEW_TOKENS tokens, weights are decoded into registers for up to FEW at a time, FEW_BLOCK rows in turn. */
enum { FEW_BLOCK = 4 };
enum { LANES = VL * ACCUMULATORS }; /* a sum is kept in so many parts, enough to hide the latency of an addition */
enum { UNIT_VECTORS = UNIT / VL, GROUPS = K3_DEPTH / 32, ONE_DEPTH = 4096, ONE_GROUPS = ONE_DEPTH / 32 };
enum { TILE_ROWS = (K3_ROWS + MR - 1) / MR * MR }; /* rows of the decoded tile; those beyond K3_ROWS are zero */
enum { AHEAD = 3 << 12 };                          /* least distance in bytes at which rows are fetched ahead */

static const float integers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The scales of a row's groups: the stored bytes of MXFP4, numbers of the affine formats. */
typedef struct {
    const uint8_t *code;
    const float *scale, *bias;
} row_scales;

/* Bits of a weight; a unit has UNIT * bits / 8 bytes. */
INLINE int weight_bits(const int format) {
    return format <= K3_Q4 ? 4 : format == K3_Q8 ? 8 : format == K3_F32 ? 32 : 16;
}

/* `count` scales or biases of an affine row, from number `first` on, as floats. A call, as it is large and seldom run. */
static __attribute__((noinline)) void widen(int type, const uint8_t *row, int64_t first, int64_t count, float *out) {
    const uint8_t *p = row + 2 * first;
    int64_t i = 0;
    if (type == K3_SCALE_F32) {
        memcpy(out, row + 4 * first, (size_t)(4 * count));
    } else if (type == K3_SCALE_BF16) {
        for (; i + VL <= count; i += VL) v_store(out + i, v_bf16(p + 2 * i));
        for (; i < count; i++) out[i] = float_of_bits((uint32_t)load_u16(p + 2 * i) << 16);
    } else {
        for (; i + VL <= count; i += VL) v_store(out + i, v_f16(p + 2 * i));
        for (; i < count; i++) out[i] = float_of_half(load_u16(p + 2 * i));
    }
}

/* The scales of `columns` columns of a row from c0 on, which starts a group; s and b are room for numbers. */
INLINE row_scales scales_of(const int format, const int shift, const k3_matrix *m, int64_t row, int64_t c0,
                            int64_t columns, float *s, float *b) {
    const uint8_t *scale = m->scale + row * m->scale_bytes, *bias = m->bias + row * m->scale_bytes;
    if (format == K3_MXFP4) return (row_scales){scale + (c0 >> shift), s, b};
    if (format <= K3_Q8) {
        widen(m->scale_type, scale, c0 >> shift, columns >> shift, s);
        widen(m->scale_type, bias, c0 >> shift, columns >> shift, b);
    }
    return (row_scales){NULL, s, b};
}

/* Weights of the unit at p, whose scales have number g. */
INLINE void decode_unit(const int format, const uint8_t *p, row_scales scales, int64_t g, vtable table, vf *w) {
    if (format == K3_MXFP4) v_mxfp4(p, scales.code[g], w);
    if (format == K3_Q4) v_q4(p, scales.scale[g], scales.bias[g], table, w);
    if (format == K3_Q8) v_q8(p, scales.scale[g], scales.bias[g], w);
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

/* The parts of a sum, added in pairs. */
INLINE float sum_of(const vf *parts) {
    if (ACCUMULATORS == 1) return v_sum(parts[0]);
    if (ACCUMULATORS == 2) return v_sum(v_add(parts[0], parts[1]));
    return v_sum(v_add(v_add(parts[0], parts[1]), v_add(parts[2], parts[3])));
}

/* sum[t] += the unit at p, which holds columns c.. of a row, times x[t]. */
INLINE void add_unit(const int format, const int N, const uint8_t *p, row_scales scales, int64_t g, int64_t c,
                     vtable table, const float *const *x, vf sum[][ACCUMULATORS]) {
    vf w[UNIT_VECTORS];
    decode_unit(format, p, scales, g, table, w);
    TIMES(i, UNIT_VECTORS, TIMES(t, N, {
              vf *part = &sum[t][i % ACCUMULATORS];
              *part = v_fma(w[i], v_load(x[t] + c + VL * i), *part);
          }););
}

/* While R rows are multiplied those that come next are fetched, as a CPU's own fetching stops at the end of each short
 * row: into the second cache, since the first can wait for few lines at a time. The distance, for rows of so many bytes
 * together, and their scales, which are fetched at once. */
INLINE int64_t fetch_distance(int64_t block) { return block < AHEAD ? AHEAD / block * block + block : block; }
INLINE void fetch_scales(const int format, const int R, const k3_matrix *m, int64_t row0) {
    for (int64_t i = 0; format <= K3_Q8 && i < R * m->scale_bytes; i += 64) {
        __builtin_prefetch(m->scale + (row0 + R) * m->scale_bytes + i);
        if (format != K3_MXFP4) __builtin_prefetch(m->bias + (row0 + R) * m->scale_bytes + i);
    }
}

/* R rows times N tokens, decoded into registers. */
INLINE void rows_few(const int format, const int shift, const int R, const int N, const k3_matrix *m, int64_t row0,
                     const float *const *x, float *y) {
    const int bytes = UNIT * weight_bits(format) / 8;
    const int line = bytes < 64 ? 64 / bytes : 1; /* units of a cache line: a whole group or part of one */
    const int64_t ahead = fetch_distance(R * m->row_bytes);
    const vtable table = v_table(integers);
    float s[FEW_BLOCK][ONE_GROUPS], b[FEW_BLOCK][ONE_GROUPS];
    uint8_t copy[UNIT * 4];
    vf sum[FEW_BLOCK][FEW][ACCUMULATORS];
    TIMES(r, R, TIMES(t, N, TIMES(a, ACCUMULATORS, sum[r][t][a] = v_zero(););););
    fetch_scales(format, R, m, row0);
    for (int64_t c0 = 0; c0 < m->cols; c0 += ONE_DEPTH) {
        int64_t columns = m->cols - c0 < ONE_DEPTH ? m->cols - c0 : ONE_DEPTH, full = columns / UNIT;
        const uint8_t *p[FEW_BLOCK];
        const float *xc[FEW];
        row_scales scales[FEW_BLOCK];
        for (int t = 0; t < N; t++) xc[t] = x[t] + c0;
        for (int r = 0; r < R; r++) {
            p[r] = m->weight + (row0 + r) * m->row_bytes + c0 * weight_bits(format) / 8;
            scales[r] = scales_of(format, shift, m, row0 + r, c0, columns, s[r], b[r]);
        }
        int64_t u = 0;
        for (; u + line <= full; u += line) {
            const int64_t g = u * UNIT >> shift;
            TIMES(r, R, {
                __builtin_prefetch(p[r] + u * bytes + ahead, 0, 2);
                if (bytes > 64) __builtin_prefetch(p[r] + u * bytes + ahead + 64, 0, 2);
            });
            TIMES(i, line, TIMES(r, R, {
                      add_unit(format, N, p[r] + (u + i) * bytes, scales[r], g + (i * UNIT >> shift), (u + i) * UNIT,
                               table, xc, sum[r]);
                  }););
        }
        for (; u < full; u++)
            TIMES(r, R, {
                add_unit(format, N, p[r] + u * bytes, scales[r], u * UNIT >> shift, u * UNIT, table, xc, sum[r]);
            });
        if (format > K3_Q8 && columns % UNIT)
            TIMES(r, R, {
                const uint8_t *last = last_unit(format, p[r] + full * bytes, columns % UNIT, copy);
                add_unit(format, N, last, scales[r], full * UNIT >> shift, full * UNIT, table, xc, sum[r]);
            });
    }
    TIMES(r, R, TIMES(t, N, y[t * K3_ROWS + r] = sum_of(sum[r][t]);););
}

/* FEW_BLOCK rows times N tokens. */
INLINE void block_few(const int format, const int shift, const int N, const k3_matrix *m, int64_t row0,
                      const float *const *x, float *y) {
    const int R = FEW_ROWS(N);
    if (N > FEW) return; /* not asked for, and not compiled */
    for (int r = 0; r < FEW_BLOCK; r += R) rows_few(format, shift, R, N, m, row0 + r, x, y + r);
}

/* The tokens in as few passes over the weights as there can be, of about as many tokens each. */
INLINE void tile_few(const int format, const int shift, const k3_matrix *m, int64_t row0, int rows,
                     const float *const *x, int tokens, float *y) {
    const int passes = (tokens + FEW - 1) / FEW;
    int r = 0;
    for (; r + FEW_BLOCK <= rows; r += FEW_BLOCK)
        for (int pass = 0; pass < passes; pass++) {
            const int t = tokens * pass / passes, count = tokens * (pass + 1) / passes - t;
            const float *const *xt = x + t;
            float *yt = y + t * K3_ROWS + r;
            switch (count) {
                case 1: block_few(format, shift, 1, m, row0 + r, xt, yt); break;
                case 2: block_few(format, shift, 2, m, row0 + r, xt, yt); break;
                case 3: block_few(format, shift, 3, m, row0 + r, xt, yt); break;
                case 4: block_few(format, shift, 4, m, row0 + r, xt, yt); break;
                default: block_few(format, shift, 5, m, row0 + r, xt, yt);
            }
        }
    for (; r < rows; r++)
        for (int t = 0; t < tokens; t++) rows_few(format, shift, 1, 1, m, row0 + r, x + t, y + t * K3_ROWS + r);
}

/* Columns c0..c0+columns-1 of a row as floats, zeros up to a whole unit. */
INLINE void decode_row(const int format, const int shift, const k3_matrix *m, int64_t row, int64_t c0,
                       int64_t columns, float *out) {
    const int bytes = UNIT * weight_bits(format) / 8;
    const vtable table = v_table(integers);
    float s[GROUPS], b[GROUPS];
    uint8_t copy[UNIT * 4];
    const row_scales scales = scales_of(format, shift, m, row, c0, columns, s, b);
    const uint8_t *p = m->weight + row * m->row_bytes + c0 * weight_bits(format) / 8;
    for (int64_t c = 0; c < columns; c += UNIT, p += bytes, out += UNIT) {
        vf w[UNIT_VECTORS];
        const uint8_t *from = columns - c < UNIT ? last_unit(format, p, columns - c, copy) : p;
        decode_unit(format, from, scales, c >> shift, table, w);
        for (int i = 0; i < UNIT_VECTORS; i++) v_store(out + VL * i, w[i]);
    }
}

/* sum[t][r] += w[r] . x[t] over `columns` columns; MR decoded rows, N tokens, all sums of one part in registers. */
INLINE void block(const int N, const float *w, const float *const *x, int64_t c0, int64_t columns, float *sums) {
    for (int part = 0; part < LANES; part += VL) {
        vf sum[NT][MR];
        TIMES(t, N, TIMES(r, MR, sum[t][r] = v_load(sums + (t * TILE_ROWS + r) * LANES + part);););
        for (int64_t c = part; c < columns; c += LANES) {
            vf wr[MR];
            TIMES(r, MR, wr[r] = v_load(w + r * K3_DEPTH + c););
            TIMES(t, N, {
                vf xv = v_load(x[t] + c0 + c);
                TIMES(r, MR, sum[t][r] = v_fma(wr[r], xv, sum[t][r]););
            });
        }
        TIMES(t, N, TIMES(r, MR, v_store(sums + (t * TILE_ROWS + r) * LANES + part, sum[t][r]);););
    }
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

INLINE void tile_many(const int format, const int shift, const k3_matrix *m, int64_t row0, int rows,
                      const float *const *x, int tokens, float *y, uint8_t *scratch) {
    float *w = (float *)scratch;            /* [TILE_ROWS, K3_DEPTH] */
    float *sums = w + TILE_ROWS * K3_DEPTH; /* [K3_TOKENS, TILE_ROWS, LANES] */
    int row_blocks = (rows + MR - 1) / MR, panels = (tokens + NT - 1) / NT;
    memset(sums, 0, (size_t)tokens * TILE_ROWS * LANES * sizeof(float));
    for (int r = rows; r < row_blocks * MR; r++) memset(w + r * K3_DEPTH, 0, K3_DEPTH * sizeof(float));
    for (int64_t c0 = 0; c0 < m->cols; c0 += K3_DEPTH) {
        int64_t columns = m->cols - c0 < K3_DEPTH ? m->cols - c0 : K3_DEPTH;
        for (int r = 0; r < rows; r++) decode_row(format, shift, m, row0 + r, c0, columns, w + r * K3_DEPTH);
        columns = (columns + UNIT - 1) / UNIT * UNIT;
        for (int panel = 0; panel < panels; panel++) {
            int t0 = tokens * panel / panels, t1 = tokens * (panel + 1) / panels;
            for (int r = 0; r < row_blocks; r++)
                blocks[t1 - t0 - 1](w + r * MR * K3_DEPTH, x + t0, c0, columns, sums + (t0 * TILE_ROWS + r * MR) * LANES);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int r = 0; r < rows; r++) {
            const float *lanes = sums + (t * TILE_ROWS + r) * LANES;
            vf parts[ACCUMULATORS];
            TIMES(a, ACCUMULATORS, parts[a] = v_load(lanes + a * VL););
            y[t * K3_ROWS + r] = sum_of(parts);
        }
}

INLINE void tile_format(const int format, const int shift, const k3_matrix *m, int64_t row0, int rows,
                        const float *const *x, int tokens, float *y, uint8_t *scratch) {
    if (tokens <= FEW_TOKENS)
        tile_few(format, shift, m, row0, rows, x, tokens, y);
    else
        tile_many(format, shift, m, row0, rows, x, tokens, y, scratch);
    if (format == K3_MXFP4)
        for (int t = 0; t < tokens; t++)
            for (int r = 0; r < rows; r++) y[t * K3_ROWS + r] *= K3_MXFP4_FACTOR;
}

/* A tile's function for a format, with the group size where there are groups: 1 << shift columns. */
#define TILE(name, format, shift)                                                                                  \
    static __attribute__((noinline)) void name(const k3_matrix *m, int64_t row0, int rows, const float *const *x,   \
                                               int tokens, float *y, uint8_t *scratch) {                           \
        tile_format(format, shift, m, row0, rows, x, tokens, y, scratch);                                          \
    }
TILE(tile_mxfp4, K3_MXFP4, 5)
TILE(tile_q4_32, K3_Q4, 5)
TILE(tile_q4_64, K3_Q4, 6)
TILE(tile_q4_128, K3_Q4, 7)
TILE(tile_q8_32, K3_Q8, 5)
TILE(tile_q8_64, K3_Q8, 6)
TILE(tile_q8_128, K3_Q8, 7)
TILE(tile_bf16, K3_BF16, 5)
TILE(tile_f16, K3_F16, 5)
TILE(tile_f32, K3_F32, 5)

typedef void (*tile_function)(const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens, float *y,
                              uint8_t *scratch);

static void tile(const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens, float *y,
                 uint8_t *scratch) {
    static const tile_function q4[] = {tile_q4_32, tile_q4_64, tile_q4_128};
    static const tile_function q8[] = {tile_q8_32, tile_q8_64, tile_q8_128};
    static const tile_function others[] = {[K3_MXFP4] = tile_mxfp4, [K3_BF16] = tile_bf16, [K3_F16] = tile_f16,
                                           [K3_F32] = tile_f32};
    const int group = m->group == 32 ? 0 : m->group == 64 ? 1 : 2;
    const tile_function function = m->format == K3_Q4 ? q4[group] : m->format == K3_Q8 ? q8[group] : others[m->format];
    function(m, row0, rows, x, tokens, y, scratch);
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

#include "kda_head.h"

#include "attention.h"

#include "depth_mix.h"

#include "route.h"

#define PROVIDED                                                                                                   \
    (TILE_ROWS * K3_DEPTH + K3_TOKENS * TILE_ROWS * LANES) * (int64_t)sizeof(float), pack, position, tile, situ,   \
        read_all, kda_head, attention_query, attention_chunk, attention_result, depth_mix, norm, gate, route

const k3_isa ISA_SYMBOL = {ISA_NAME, PROVIDED, NULL, NULL, NULL};

#if defined(K3_ISA_AVX512)
#include "fixed_avx512vnni.h"
const k3_isa k3_isa_avx512vnni = {"avx512vnni", PROVIDED, fixed_bytes, fix, tile_fixed};
#endif
