/* A sequence of jobs in one call: what a layer computes between two points at which Python has to look. Between two calls
 * Python's own code and data have gone from the caches, so that a hundred lines of it take as long as a small product.
 * k3mlx/kernels/cpu_queue.py makes the sequences; the arithmetic is in api.c, kda_head.h, attention.h and depth_mix.h. */
#include "k3cpu.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    const k3_isa *isa;
    const void *job;
} part_job;

/* The function of the instruction set, for an item of its job: a head, a token, a chunk. */
#define ITEM(function)                                                     \
    static void function##_item(void *context, int64_t item, int thread) { \
        const part_job *part = context;                                    \
        (void)thread;                                                      \
        part->isa->function(part->job, item);                              \
    }
ITEM(kda_head)
ITEM(attention_query)
ITEM(attention_chunk)
ITEM(attention_result)
ITEM(depth_mix)
ITEM(norm)
ITEM(route)

static int for_each(const k3_isa *isa, int threads, k3_work work, const void *job, int64_t count) {
    part_job items = {isa, job};
    k3_pool_enter(threads);
    k3_run(work, &items, count);
    k3_pool_leave();
    return 0;
}

/* Token by token. How the cache is cut depends on its length alone, so that bits depend neither on threads nor on how many
 * tokens come together. */
static int attend(const k3_isa *isa, int threads, const k3_attention *job) {
    enum { ROWS = 128 }; /* of a chunk at least */
    const int64_t heads = job->heads, least = (job->cached + K3_ATTENTION_CHUNKS - 1) / K3_ATTENTION_CHUNKS;
    const int64_t most = least <= ROWS ? (job->cached + ROWS - 1) / ROWS : K3_ATTENTION_CHUNKS;
    const int64_t queries = heads * (job->rank + job->ext), mixed = most * heads * job->rank, numbers = most * heads;
    float *room = malloc((size_t)(queries + mixed + 2 * numbers) * sizeof(float));
    if (!room) return -1;
    for (int64_t token = 0; token < job->tokens; token++) {
        k3_attention_token t = {.job = job, .token = token, .seen = job->cached - job->tokens + token + 1, .q = room};
        t.chunk = ((t.seen + K3_ATTENTION_CHUNKS - 1) / K3_ATTENTION_CHUNKS + ROWS - 1) / ROWS * ROWS;
        t.chunks = (t.seen + t.chunk - 1) / t.chunk;
        t.mixed = t.q + queries;
        t.largest = t.mixed + mixed;
        t.total = t.largest + numbers;
        for_each(isa, threads, attention_query_item, &t, heads);
        for_each(isa, threads, attention_chunk_item, &t, t.chunks);
        for_each(isa, threads, attention_result_item, &t, heads);
    }
    free(room);
    return 0;
}

static int gate(const k3_isa *isa, const k3_pairs *job) {
    isa->gate(job);
    return 0;
}

static int copy(const k3_pairs *job) {
    memcpy(job->out, job->a, (size_t)job->count * sizeof(float));
    return 0;
}

static int sum(const k3_pairs *job) {
    for (int64_t i = 0; i < job->count; i++) job->out[i] = job->a[i] + job->b[i];
    return 0;
}

static int products(const k3_isa *isa, int threads, const k3_products *job) {
    const k3_matrix *const *m = (const k3_matrix *const *)job->matrix_and_out;
    float *const *out = (float *const *)(job->matrix_and_out + job->count);
    return k3_matmul(isa, threads, m, job->count, job->x, m[0]->cols, job->tokens, out);
}

static int experts(const k3_isa *isa, int threads, const k3_experts *job) {
    const int64_t width = job->width, size = job->tokens * width;
    memset(job->out, 0, (size_t)size * sizeof(float));
    const int status = k3_experts_mix(isa, threads, job->matrices, job->experts, job->start, job->token, job->token,
                                      job->weight, job->x, width, job->tokens, (float)job->beta, (float)job->linear_beta,
                                      job->out, width);
    float zero = 0; /* NaN where one of them is infinite or NaN */
    for (int64_t i = 0; i < size; i++) zero += job->out[i] * 0.0f;
    *job->finite = zero == 0;
    return status;
}

static int run(const k3_isa *isa, int threads, int64_t kind, const void *job) {
    switch (kind) {
        case K3_DO_PRODUCTS: return products(isa, threads, job);
        case K3_DO_EXPERTS: return experts(isa, threads, job);
        case K3_DO_KDA: return for_each(isa, threads, kda_head_item, job, ((const k3_kda *)job)->heads);
        case K3_DO_ATTENTION: return attend(isa, threads, job);
        case K3_DO_DEPTH_MIX: return for_each(isa, threads, depth_mix_item, job, ((const k3_depth_mix *)job)->tokens);
        case K3_DO_NORM: return for_each(isa, threads, norm_item, job, ((const k3_norm *)job)->tokens);
        case K3_DO_SUM: return sum(job);
        case K3_DO_GATE: return gate(isa, job);
        case K3_DO_ROUTE: return for_each(isa, threads, route_item, job, ((const k3_route *)job)->tokens);
        case K3_DO_COPY: return copy(job);
        default: return -1;
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* One after the other, `count` of them: for each the kind, the number of words in its record, and these. Its seconds are
 * written. Returns 0, or -1 without memory: those that follow are not run. */
K3_EXPORT int k3_sequence(const k3_isa *isa, int threads, const int64_t *words, int64_t count, double *seconds) {
    double before = now();
    for (int64_t i = 0; i < count; i++, words += 2 + words[1]) {
        if (run(isa, threads, words[0], words + 2)) return -1;
        const double after = now();
        seconds[i] = after - before;
        before = after;
    }
    return 0;
}

/* Size of the record of a kind of job, without the pointers at its end, for the loader to compare with its own. */
K3_EXPORT int k3_job_size(int kind) {
    static const int sizes[K3_KINDS] = {
        [K3_DO_PRODUCTS] = sizeof(k3_products),   [K3_DO_EXPERTS] = sizeof(k3_experts),
        [K3_DO_KDA] = sizeof(k3_kda),             [K3_DO_ATTENTION] = sizeof(k3_attention),
        [K3_DO_DEPTH_MIX] = sizeof(k3_depth_mix), [K3_DO_NORM] = sizeof(k3_norm),
        [K3_DO_SUM] = sizeof(k3_pairs),           [K3_DO_GATE] = sizeof(k3_pairs),
        [K3_DO_ROUTE] = sizeof(k3_route),
        [K3_DO_COPY] = sizeof(k3_pairs),
    };
    return kind >= 0 && kind < K3_KINDS ? sizes[kind] : 0;
}
