/* The functions that k3mlx/kernels/cpu.py calls: choice of the instruction set, products, the mixture of experts.
 * Owns the division of work into tiles and the buffers of a call; tiles are in kernels.c, threads in pool.c. */
#include "k3cpu.h"

#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#ifndef K3_SOURCE_ID
#define K3_SOURCE_ID "unknown"
#endif

/* Digest of the sources this library was built from, for the loader to compare. */
K3_EXPORT const char *k3_source_id(void) { return K3_SOURCE_ID; }

/* Size of k3_matrix, for the loader to compare. */
K3_EXPORT int k3_matrix_size(void) { return (int)sizeof(k3_matrix); }

#if defined(__x86_64__)
static int has_f16c(void) { /* a name that not every compiler's __builtin_cpu_supports knows */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}
#endif

/* The instruction set of that name, or NULL where it was not built or this CPU lacks it. */
K3_EXPORT const k3_isa *k3_isa_named(const char *name) {
    if (!strcmp(name, "portable")) return &k3_isa_portable;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c() ? &k3_isa_avx2 : NULL;
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx512")) return avx512 ? &k3_isa_avx512 : NULL;
    if (!strcmp(name, "avx512vnni")) return avx512 && __builtin_cpu_supports("avx512vnni") ? &k3_isa_avx512vnni : NULL;
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) return &k3_isa_neon;
#endif
    return NULL;
}

/* A buffer that grows and is kept from call to call; guarded by the ownership of the pool. */
typedef struct {
    uint8_t *data;
    size_t size;
} buffer;

enum { KEEP_BYTES = 8 << 20 }; /* larger buffers are given back at the end of a call */

static buffer scratch[K3_MAX_THREADS], packed_buffer[2], pointer_buffer[2], fixed_buffer, inner_buffer, pair_buffer,
    progress_buffer;

static void release(buffer *b) {
    free(b->data);
    b->data = NULL;
    b->size = 0;
}

static void *reserve(buffer *b, size_t size) {
    if (b->size >= size) return b->data;
    release(b);
    size = (size + K3_ALIGN - 1) / K3_ALIGN * K3_ALIGN;
    if (posix_memalign((void **)&b->data, K3_ALIGN, size)) {
        b->data = NULL;
        return NULL;
    }
    b->size = size;
    return b->data;
}

/* Enter the pool with scratch memory for every thread. Returns 0 or -1 (no memory; the pool is left). */
static int enter(const k3_isa *isa, int threads) {
    int count = k3_pool_enter(threads);
    size_t tiles = 2 * K3_TOKENS * K3_ROWS * sizeof(float);
    for (int i = 0; i < count; i++)
        if (!reserve(&scratch[i], tiles + (size_t)isa->scratch_bytes)) {
            k3_pool_leave();
            return -1;
        }
    return 0;
}

static int leave(int result) {
    buffer *buffers[] = {&packed_buffer[0], &packed_buffer[1], &pointer_buffer[0], &pointer_buffer[1],
                         &fixed_buffer,     &inner_buffer,     &pair_buffer,       &progress_buffer};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++)
        if (buffers[i]->size > KEEP_BYTES) release(buffers[i]);
    k3_pool_leave();
    return result;
}

static float *tile_buffer(int thread, int which) {
    return (float *)scratch[thread].data + which * K3_TOKENS * K3_ROWS;
}
static uint8_t *tile_scratch(int thread) { return (uint8_t *)tile_buffer(thread, 2); }

static int64_t at_most(int64_t value, int64_t limit) { return value < limit ? value : limit; }
static int64_t blocks_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

/* -- packing ---------------------------------------------------------------------------------------------------- */

/* Floats from a packed token to the next: a cache line more than it has, since lengths are often multiples of what the
 * first cache holds in a way, and tokens are read side by side. */
static int64_t packed_stride(int64_t cols) { return k3_padded(cols) + K3_ALIGN / (int64_t)sizeof(float); }

typedef struct {
    const k3_isa *isa;
    int format;
    const float *x;
    int64_t cols, x_stride;
    float *packed; /* [tokens, packed_stride(cols)] */
} pack_job;

static void pack_token(void *context, int64_t token, int thread) {
    const pack_job *job = context;
    (void)thread;
    job->isa->pack(job->format, job->x + token * job->x_stride, job->cols, job->packed + token * packed_stride(job->cols));
}

/* x [tokens, cols] in the order of `format`, and a pointer to each row; NULL without memory. Formats of the two orders,
 * that of 4-bit codes and that of the others, do not share the memory. */
static const float **pack_all(const k3_isa *isa, int format, const float *x, int64_t x_stride, int64_t tokens,
                              int64_t cols) {
    const int order = format <= K3_Q4;
    float *packed = reserve(&packed_buffer[order], (size_t)(tokens * packed_stride(cols)) * sizeof(float));
    const float **rows = reserve(&pointer_buffer[order], (size_t)tokens * sizeof(float *));
    if (!packed || !rows) return NULL;
    pack_job job = {isa, format, x, cols, x_stride, packed};
    if (tokens < 8)
        for (int64_t t = 0; t < tokens; t++) pack_token(&job, t, 0);
    else
        k3_run(pack_token, &job, tokens);
    for (int64_t t = 0; t < tokens; t++) rows[t] = packed + t * packed_stride(cols);
    return rows;
}

enum { FIXED_GROUP = 32 };

/* Whether a call is computed in integers where it can be: a single token, by an instruction set that has them. */
static int in_integers(const k3_isa *isa, int format, int64_t tokens) {
    return tokens == 1 && format <= K3_Q4 && isa->fix != NULL;
}

/* Groups first.. of x [cols] as integers, up to the padded length. */
static void fix_from(const k3_isa *isa, const float *x, int64_t first, int64_t cols, uint8_t *fixed) {
    for (int64_t group = first; group < k3_padded(cols) / FIXED_GROUP; group++) {
        int64_t left = cols - group * FIXED_GROUP;
        isa->fix(x + group * FIXED_GROUP, left < 0 ? 0 : (int)at_most(left, FIXED_GROUP), cols, group, fixed);
    }
}

/* -- matrices --------------------------------------------------------------------------------------------------- */

typedef struct {
    const k3_matrix *m;
    const float *const *x; /* packed for the format */
    const uint8_t *fixed;  /* the only token in integers, or NULL */
    float *out;
    int64_t first, row_blocks; /* its items, of which there is one for a tile, begin at `first` */
} product;

typedef struct {
    const k3_isa *isa;
    int64_t count, tokens;
    product products[K3_MANY];
} product_job;

static void product_tile(void *context, int64_t item, int thread) {
    const product_job *job = context;
    const product *p = job->products;
    while (p + 1 < job->products + job->count && p[1].first <= item) p++;
    item -= p->first;
    int64_t t0 = item / p->row_blocks * K3_TOKENS, row0 = item % p->row_blocks * K3_ROWS;
    int tokens = (int)at_most(job->tokens - t0, K3_TOKENS), rows = (int)at_most(p->m->rows - row0, K3_ROWS);
    float *y = tile_buffer(thread, 0);
    if (p->fixed)
        job->isa->tile_fixed(p->m, row0, rows, p->fixed, p->x[0], y);
    else
        job->isa->tile(p->m, row0, rows, p->x + t0, tokens, y, tile_scratch(thread));
    for (int t = 0; t < tokens; t++)
        memcpy(p->out + (t0 + t) * p->m->rows + row0, y + t * K3_ROWS, (size_t)rows * sizeof(float));
}

/* out[i][t] = m[i] x[t] for `count` matrices of as many columns: x [tokens, cols] with a stride in floats, out[i]
 * C-contiguous [tokens, m[i]->rows]. Returns 0, or -1 without memory. */
K3_EXPORT int k3_matmul(const k3_isa *isa, int threads, const k3_matrix *const *m, int64_t count, const float *x,
                        int64_t x_stride, int64_t tokens, float *const *out) {
    const int64_t cols = m[0]->cols;
    product_job job = {.isa = isa, .count = count, .tokens = tokens};
    const float **packed[2] = {NULL, NULL};
    uint8_t *fixed = NULL;
    int64_t items = 0;
    if (enter(isa, threads)) return -1;
    for (int64_t i = 0; i < count; i++) {
        const float ***mine = &packed[m[i]->format <= K3_Q4];
        const int integers = in_integers(isa, m[i]->format, tokens);
        if (!*mine) *mine = pack_all(isa, m[i]->format, x, x_stride, tokens, cols);
        if (!*mine) return leave(-1);
        if (integers && !fixed) {
            fixed = reserve(&fixed_buffer, (size_t)isa->fixed_bytes(cols));
            if (!fixed) return leave(-1);
            fix_from(isa, x, 0, cols, fixed);
        }
        job.products[i] = (product){m[i], *mine, integers ? fixed : NULL, out[i], items, blocks_of(m[i]->rows, K3_ROWS)};
        items += job.products[i].row_blocks * blocks_of(tokens, K3_TOKENS);
    }
    k3_run(product_tile, &job, items);
    return leave(0);
}

/* -- experts ---------------------------------------------------------------------------------------------------- */

typedef struct {
    const k3_isa *isa;
    const k3_matrix *matrices; /* [experts, 3]: w1 gate, w2 down, w3 up */
    int64_t experts, inner_tiles, outer_tiles; /* tiles of the rows of w1 and w3, and of those of w2 */
    const int64_t *start, *row; /* expert e has pairs start[e]..start[e + 1] - 1; each adds to a row of out */
    const float *weight;
    const float **x;     /* [pairs] packed inputs */
    const float **inner; /* [pairs] packed SiTU values, the inputs of w2 */
    uint8_t *fixed;       /* the only token in integers, or NULL */
    uint8_t *inner_fixed; /* [pairs] its SiTU values in integers, or NULL */
    int64_t inner_bytes;  /* of one of them */
    atomic_llong *computed; /* [experts] tiles of the inner values that are done */
    atomic_llong *added;    /* [outer_tiles] experts whose outputs have been added to the tile */
    float *out;
    int64_t out_stride;
    float beta, linear_beta;
} experts_job;

static void inner_tile(const experts_job *job, int64_t expert, int64_t row0, int thread) {
    const k3_matrix *w = job->matrices + 3 * expert;
    int rows = (int)at_most(w[0].rows - row0, K3_ROWS);
    float *gate = tile_buffer(thread, 0), *up = tile_buffer(thread, 1);
    for (int64_t pair = job->start[expert]; pair < job->start[expert + 1]; pair += K3_TOKENS) {
        int tokens = (int)at_most(job->start[expert + 1] - pair, K3_TOKENS);
        if (job->fixed) {
            job->isa->tile_fixed(&w[0], row0, rows, job->fixed, job->x[pair], gate);
            job->isa->tile_fixed(&w[2], row0, rows, job->fixed, job->x[pair], up);
        } else {
            job->isa->tile(&w[0], row0, rows, job->x + pair, tokens, gate, tile_scratch(thread));
            job->isa->tile(&w[2], row0, rows, job->x + pair, tokens, up, tile_scratch(thread));
        }
        for (int t = 0; t < tokens; t++) {
            float *inner = (float *)job->inner[pair + t];
            job->isa->situ(gate + t * K3_ROWS, up + t * K3_ROWS, rows, job->beta, job->linear_beta);
            if (job->inner_fixed) /* a tile is a group */
                job->isa->fix(gate, rows, w[1].cols, row0 / FIXED_GROUP, job->inner_fixed + pair * job->inner_bytes);
            for (int r = 0; r < rows; r++) {
                int64_t column = row0 + r, within = column % K3_PAD;
                inner[column - within + job->isa->position(w[1].format, within)] = gate[t * K3_ROWS + r];
            }
        }
    }
}

static void outer_tile(const experts_job *job, int64_t expert, int64_t row0, int thread) {
    const k3_matrix *w = job->matrices + 3 * expert + 1;
    int rows = (int)at_most(w->rows - row0, K3_ROWS);
    float *y = tile_buffer(thread, 0);
    for (int64_t pair = job->start[expert]; pair < job->start[expert + 1]; pair += K3_TOKENS) {
        int tokens = (int)at_most(job->start[expert + 1] - pair, K3_TOKENS);
        if (job->inner_fixed)
            job->isa->tile_fixed(w, row0, rows, job->inner_fixed + pair * job->inner_bytes, job->inner[pair], y);
        else
            job->isa->tile(w, row0, rows, job->inner + pair, tokens, y, tile_scratch(thread));
        for (int t = 0; t < tokens; t++) {
            float *out = job->out + job->row[pair + t] * job->out_stride + row0;
            for (int r = 0; r < rows; r++) out[r] += job->weight[pair + t] * y[t * K3_ROWS + r];
        }
    }
}

/* Items in the order in which they are handed out: the tiles of w1 and w3 of expert 0, those of expert 1, then of w2 of
 * expert 0, of w1 and w3 of expert 2, and so on. What a tile of w2 needs has been handed out long before, so that
 * threads hardly ever wait and each matrix is read from end to end; the tile handed out first never waits. */
static void expert_item(void *context, int64_t item, int thread) {
    const experts_job *job = context;
    int64_t tiles = job->inner_tiles + job->outer_tiles, stage = item / tiles, tile = item % tiles;
    if (tile < job->inner_tiles) {
        if (stage == job->experts) return;
        inner_tile(job, stage, tile * K3_ROWS, thread);
        atomic_fetch_add(&job->computed[stage], 1);
    } else if (stage > 0) {
        tile -= job->inner_tiles;
        k3_wait(&job->computed[stage - 1], job->inner_tiles);
        k3_wait(&job->added[tile], stage - 1);
        outer_tile(job, stage - 1, tile * K3_ROWS, thread);
        atomic_store(&job->added[tile], stage);
    }
}

/* out[row] += weight * w2 SiTU(w1 x[token], w3 x[token]) for each pair (token, row, weight), experts in the given
 * order; an expert names a row once. All experts have the shapes and formats of the first. Returns 0, or -1 without memory
 * (out is untouched). */
K3_EXPORT int k3_experts_mix(const k3_isa *isa, int threads, const k3_matrix *matrices, int64_t experts,
                             const int64_t *start, const int64_t *token, const int64_t *row, const float *weight,
                             const float *x, int64_t x_stride, int64_t tokens, float beta, float linear_beta,
                             float *out, int64_t out_stride) {
    int64_t pairs = start[experts], cols = matrices[0].cols;
    int64_t inner_cols = matrices[1].cols, inner_padded = k3_padded(inner_cols);
    int64_t inner_tiles = blocks_of(inner_cols, K3_ROWS), outer_tiles = blocks_of(matrices[1].rows, K3_ROWS);
    if (pairs == 0) return 0;
    if (enter(isa, threads)) return -1;
    const float **pair_x = reserve(&pair_buffer, (size_t)(2 * pairs) * sizeof(float *)), **pair_inner = pair_x + pairs;
    const float **packed = pack_all(isa, matrices[0].format, x, x_stride, tokens, cols);
    float *inner = reserve(&inner_buffer, (size_t)(pairs * packed_stride(inner_cols)) * sizeof(float));
    atomic_llong *done = reserve(&progress_buffer, (size_t)(experts + outer_tiles) * sizeof(atomic_llong));
    int outer_too = in_integers(isa, matrices[1].format, tokens), inner_too = in_integers(isa, matrices[0].format, tokens);
    int64_t fixed_bytes = inner_too ? isa->fixed_bytes(cols) : 0, inner_bytes = outer_too ? isa->fixed_bytes(inner_cols) : 0;
    uint8_t *fixed = reserve(&fixed_buffer, (size_t)(fixed_bytes + pairs * inner_bytes));
    if (!pair_x || !packed || !inner || !done || ((inner_too || outer_too) && !fixed)) return leave(-1);
    if (inner_too) fix_from(isa, x, 0, cols, fixed);
    for (int64_t pair = 0; pair < pairs; pair++) {
        float *values = inner + pair * packed_stride(inner_cols);
        if (inner_padded > inner_cols) memset(values + inner_padded - K3_PAD, 0, K3_PAD * sizeof(float));
        if (outer_too) /* those that no tile writes */
            fix_from(isa, values, inner_tiles, inner_cols, fixed + fixed_bytes + pair * inner_bytes);
        pair_x[pair] = packed[token[pair]];
        pair_inner[pair] = values;
    }
    for (int64_t i = 0; i < experts + outer_tiles; i++) atomic_init(&done[i], 0);
    experts_job job = {
        .isa = isa, .matrices = matrices, .experts = experts, .inner_tiles = inner_tiles, .outer_tiles = outer_tiles,
        .start = start, .row = row, .weight = weight, .x = pair_x, .inner = pair_inner,
        .fixed = inner_too ? fixed : NULL, .inner_fixed = outer_too ? fixed + fixed_bytes : NULL,
        .inner_bytes = inner_bytes,
        .computed = done, .added = done + experts,
        .out = out, .out_stride = out_stride, .beta = beta, .linear_beta = linear_beta,
    };
    k3_run(expert_item, &job, (experts + 1) * (inner_tiles + outer_tiles));
    return leave(0);
}

/* -- reading ---------------------------------------------------------------------------------------------------- */

enum { READ_BYTES = 1 << 18 };

typedef struct {
    const k3_isa *isa;
    const uint8_t *data;
    int64_t bytes;
    uint64_t seen[K3_MAX_THREADS];
} read_job;

static void read_part(void *context, int64_t item, int thread) {
    read_job *job = context;
    int64_t first = item * READ_BYTES;
    job->seen[thread] ^= job->isa->read_all(job->data + first, at_most(job->bytes - first, READ_BYTES));
}

/* Read `bytes` on all threads and return what depends on all of them: the yardstick of the benchmark. */
K3_EXPORT uint64_t k3_read(const k3_isa *isa, int threads, const uint8_t *data, int64_t bytes) {
    read_job job = {isa, data, bytes, {0}};
    int count = k3_pool_enter(threads);
    k3_run(read_part, &job, blocks_of(bytes, READ_BYTES));
    uint64_t all = 0;
    for (int i = 0; i < count; i++) all ^= job.seen[i];
    return (uint64_t)leave((int)(all & 1));
}
