/* The C interface of the CPU kernels, shared by api.c (entry points), pool.c (threads), tables.c and kernels.c, which
 * is compiled once for each instruction set. Launchers (k3mlx/kernels/cpu.py) validate; everything here assumes.
 * The Python side mirrors k3_matrix field by field. */
#ifndef K3CPU_H
#define K3CPU_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define K3_EXPORT __attribute__((visibility("default")))

enum k3_format { K3_MXFP4 = 0, K3_Q4 = 1, K3_Q8 = 2, K3_BF16 = 3, K3_F16 = 4, K3_F32 = 5 };
enum k3_scale { K3_SCALE_F32 = 0, K3_SCALE_BF16 = 1, K3_SCALE_F16 = 2 };

/* A matrix [rows, cols] as stored, multiplied as x W^T. Nothing is assumed aligned. */
typedef struct {
    const uint8_t *weight; /* row r starts at weight + r * row_bytes */
    const uint8_t *scale;  /* MXFP4: e8m0 bytes; Q4, Q8: numbers of scale_type; row r at scale + r * scale_bytes */
    const uint8_t *bias;   /* Q4, Q8: as scale */
    int64_t rows, cols;
    int64_t row_bytes, scale_bytes;
    int32_t format, group, scale_type, unused;
} k3_matrix;

enum {
    K3_ROWS = 32,   /* rows of a tile: the unit of work of a thread */
    K3_TOKENS = 48, /* tokens of a tile */
    K3_DEPTH = 512, /* columns decoded at a time for several tokens */
    K3_MANY = 8,    /* matrices that a call multiplies with at most */
    K3_PAD = 128,   /* packed activations are padded with zeros to a multiple of this */
    K3_ALIGN = 64
};

static inline int64_t k3_padded(int64_t cols) { return (cols + K3_PAD - 1) / K3_PAD * K3_PAD; }

/* The e2m1 values of every MXFP4 scale byte (tables.c): twice the code's value times 2^(s - 130), NaN for 255. With
 * that scale no weight leaves the range of float32 at either end; a product is multiplied by K3_MXFP4_FACTOR when it
 * is stored. All of them end in 16 zero bits, which are left out: `upper` and `lower` are the bytes 3 and 2. */
#define K3_MXFP4_FACTOR 4.0f
typedef struct {
    uint8_t upper[16], lower[16];
} k3_mxfp4_bytes;
extern uint16_t k3_mxfp4_words[256][32]; /* the 16 values, then the same again */
extern k3_mxfp4_bytes k3_mxfp4_halves[256];

/* A KDA layer between its input projections and its output projection for T tokens: model specification 2.3. All arrays
 * are C-contiguous float32; state and windows are read, the new ones written, none overlaps another. */
typedef struct {
    int64_t tokens, heads, width, taps;        /* width: a multiple of 16, at most K3_KDA_WIDTH; taps at most K3_KDA_TAPS */
    const float *x[3], *z, *gate;              /* q, k, v and the others before anything was applied: [T, heads * width] */
    const float *b;                            /* [T, heads] */
    const float *windows, *state;              /* [3, taps - 1, heads * width], [heads, width, width] */
    const float *tap, *A_log, *dt_bias, *o_norm; /* [3, heads * width, taps], [heads], [heads * width], [width] */
    float *y, *new_windows, *new_state;        /* y [T, heads * width] */
    double lower_bound, eps, l2_eps;
} k3_kda;
enum { K3_KDA_WIDTH = 256, K3_KDA_TAPS = 8 };

/* Latent attention of the last tokens of a cache over all before them, in the absorbed form of model specification 2.5:
 * every head's keys and values are the rows of the cache, of rank + ext floats, seen through the head's two maps. */
typedef struct {
    int64_t tokens, heads, nope, ext, rank, value, cached; /* rank: a multiple of 16; rank and ext together: also */
    const float *q;    /* [tokens, heads, nope + ext] */
    const float *rows; /* [cached, rank + ext], the tokens' own at the end */
    const float *maps; /* [heads, nope + value, rank] */
    float *out;        /* [tokens, heads, value] */
    double scale;
} k3_attention;
enum { K3_ATTENTION_WIDTH = 1024, K3_ATTENTION_CHUNKS = 64 }; /* rank + ext at most; pieces of the cache at most */

/* One token of it. The cache is cut into chunks, which are the items of work between the maps: all heads go through one. */
typedef struct {
    const k3_attention *job;
    int64_t token, seen, chunk, chunks; /* rows that it sees; rows of a chunk */
    float *q;       /* [heads, rank + ext] queries in the space of the cache, scaled */
    float *mixed;   /* [chunks, heads, rank] rows of a chunk, added with weights exp(score - largest) */
    float *largest; /* [chunks, heads] */
    float *total;   /* [chunks, heads] of the weights */
} k3_attention_token;

/* The depth mix of a token, model specification 2.2: out = the sources averaged by the softmax of their scores, which are
 * source . (norm * query) / sqrt(mean(source^2) + eps). Every array C-contiguous, width a multiple of 16. */
typedef struct {
    int64_t tokens, width, count; /* at most K3_SOURCES */
    const float *norm, *query;    /* [width] */
    float *out;                   /* [tokens, width] */
    double eps;
    const float *source[]; /* count times [tokens, width] */
} k3_depth_mix;
enum { K3_SOURCES = 64 };

/* For each token weight * x / sqrt(mean(x^2) + eps) of the first `width` of width + rest columns, and the rest as it is: x
 * and out [tokens, width + rest] C-contiguous. */
typedef struct {
    int64_t tokens, width, rest; /* width: a multiple of 16 */
    const float *x, *weight;
    float *out;
    double eps;
} k3_norm;

/* out = a + b, a sigmoid(b), or a; out may be one of them. */
typedef struct {
    int64_t count;
    const float *a, *b;
    float *out;
} k3_pairs;

/* The choice of experts for a token, model specification 2.6.2: ids of the largest sigmoid(logit) + bias, falling, of equal
 * ones the lower first, and their sigmoids as weights that add up to `scaling`. */
typedef struct {
    int64_t tokens, experts, chosen; /* at most K3_ROUTED experts */
    const float *logits, *bias; /* [tokens, experts], [experts] */
    int64_t *ids;               /* [tokens, chosen] */
    float *weights;             /* the same */
    double scaling;
} k3_route;
enum { K3_ROUTED = 1024 };

/* Arguments of k3_matmul; x is C-contiguous. */
typedef struct {
    int64_t count, tokens;
    const float *x;
    const void *matrix_and_out[]; /* count matrices, then as many results */
} k3_products;

/* out[t] = the sum over experts of weight * MLP(x[t]) as in k3_experts_mix: every expert has a pair with every token, in
 * their order. x and out [tokens, width] C-contiguous. *finite says whether the whole of out is. */
typedef struct {
    const k3_matrix *matrices;
    int64_t experts, tokens, width;
    const int64_t *start, *token;
    const float *weight, *x;
    float *out;
    int64_t *finite;
    double beta, linear_beta;
} k3_experts;

/* The jobs of a sequence (sequence.c). Their records consist of members of eight bytes. */
enum k3_kind {
    K3_DO_PRODUCTS, K3_DO_EXPERTS, K3_DO_KDA, K3_DO_ATTENTION, K3_DO_DEPTH_MIX, K3_DO_NORM, K3_DO_SUM, K3_DO_GATE,
    K3_DO_ROUTE, K3_DO_COPY, K3_KINDS
};

/* What one instruction set provides. */
typedef struct {
    const char *name;
    int64_t scratch_bytes; /* working memory of `tile`, per thread */
    /* x [cols] into the order in which `format` is decoded, zero up to the padded length */
    void (*pack)(int format, const float *x, int64_t cols, float *packed);
    /* packed position of column c, within its block of K3_PAD, for formats that reorder */
    int64_t (*position)(int format, int64_t c);
    /* y[t * K3_ROWS + i] = row (row0 + i) of m . x[t]; rows <= K3_ROWS, tokens <= K3_TOKENS, x packed.
     * The bits of an element depend on its row and its x only. */
    void (*tile)(const k3_matrix *m, int64_t row0, int rows, const float *const *x, int tokens, float *y,
                 uint8_t *scratch);
    /* gate[i] = SiTU(gate[i], up[i]), model specification 2.6.1 */
    void (*situ)(float *gate, const float *up, int64_t n, float beta, float linear_beta);
    /* the exclusive or of the bytes, some in words: work that is nothing but reading */
    uint64_t (*read_all)(const uint8_t *p, int64_t bytes);
    void (*kda_head)(const k3_kda *job, int64_t head);
    void (*attention_query)(const k3_attention_token *token, int64_t head);
    void (*attention_chunk)(const k3_attention_token *token, int64_t chunk);
    void (*attention_result)(const k3_attention_token *token, int64_t head);
    void (*depth_mix)(const k3_depth_mix *job, int64_t token);
    void (*norm)(const k3_norm *job, int64_t token);
    void (*gate)(const k3_pairs *job);
    void (*route)(const k3_route *job, int64_t token);
    /* One token in integers (fixed_avx512vnni.h), for MXFP4 and Q4; NULL where the set has no such way. `fix` writes
     * columns 32 group .. 32 group + columns - 1 of a token of `cols` columns, zeros up to 32, into its part of `fixed`,
     * which has fixed_bytes(cols); every group up to the padded length has to be written. */
    int64_t (*fixed_bytes)(int64_t cols);
    void (*fix)(const float *x, int columns, int64_t cols, int64_t group, uint8_t *fixed);
    /* y[i] = row (row0 + i) of m . x, which is given in both forms */
    void (*tile_fixed)(const k3_matrix *m, int64_t row0, int rows, const uint8_t *fixed, const float *packed, float *y);
} k3_isa;

/* Entry points that others use (api.c). */
int k3_matmul(const k3_isa *isa, int threads, const k3_matrix *const *m, int64_t count, const float *x, int64_t x_stride,
              int64_t tokens, float *const *out);
int k3_experts_mix(const k3_isa *isa, int threads, const k3_matrix *matrices, int64_t experts, const int64_t *start,
                   const int64_t *token, const int64_t *row, const float *weight, const float *x, int64_t x_stride,
                   int64_t tokens, float beta, float linear_beta, float *out, int64_t out_stride);

extern const k3_isa k3_isa_portable;
#if defined(__x86_64__)
extern const k3_isa k3_isa_avx2, k3_isa_avx512, k3_isa_avx512vnni;
#elif defined(__aarch64__)
extern const k3_isa k3_isa_neon;
#endif

/* The pool. Between enter and leave the caller owns it (other callers wait); enter makes it `threads` strong, the
 * caller included, and returns how many there are. k3_run calls work(context, item, thread) for every item in
 * 0..items-1, thread below that number, and returns when all are done. Items are handed out in
 * rising order, in runs of a few, so that what a thread fetches ahead at the end of one is of use to it in the next. */
enum { K3_MAX_THREADS = 256 };
typedef void (*k3_work)(void *context, int64_t item, int thread);
int k3_pool_enter(int threads);
void k3_run(k3_work work, void *context, int64_t items);
void k3_pool_leave(void);
/* Inside an item: until `counter` has reached `least`. */
void k3_wait(const atomic_llong *counter, int64_t least);

#endif
