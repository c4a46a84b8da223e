/* Entry points for what is computed between the large products: the two kinds of attention head by head, and the depth
 * mix token by token. k3mlx/kernels/cpu_parts.py calls them; the arithmetic is in kda_head.h, heads.h, depth_mix.h. */
#include "k3cpu.h"

typedef struct {
    const k3_isa *isa;
    const void *job;
} part_job;

static void kda_item(void *context, int64_t head, int thread) {
    const part_job *item = context;
    (void)thread;
    item->isa->kda_head(item->job, head);
}

static void heads_item(void *context, int64_t head, int thread) {
    const part_job *item = context;
    (void)thread;
    item->isa->head_product(item->job, head);
}

static void mix_item(void *context, int64_t token, int thread) {
    const part_job *item = context;
    (void)thread;
    item->isa->depth_mix(item->job, token);
}

static void for_each(const k3_isa *isa, int threads, k3_work work, const void *job, int64_t count) {
    part_job items = {isa, job};
    k3_pool_enter(threads);
    k3_run(work, &items, count);
    k3_pool_leave();
}

K3_EXPORT void k3_kda_step(const k3_isa *isa, int threads, const k3_kda *job) {
    for_each(isa, threads, kda_item, job, job->heads);
}

K3_EXPORT void k3_heads_product(const k3_isa *isa, int threads, const k3_heads *job) {
    for_each(isa, threads, heads_item, job, job->heads);
}

K3_EXPORT void k3_mix_depth(const k3_isa *isa, int threads, const k3_depth_mix *job) {
    for_each(isa, threads, mix_item, job, job->tokens);
}

/* For the loader to compare with its own descriptions. */
K3_EXPORT int k3_kda_size(void) { return (int)sizeof(k3_kda); }
K3_EXPORT int k3_heads_size(void) { return (int)sizeof(k3_heads); }
K3_EXPORT int k3_depth_mix_size(void) { return (int)sizeof(k3_depth_mix); }
