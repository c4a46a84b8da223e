/* Entry points for what the two kinds of attention do head by head: k3mlx/kernels/cpu_attention.py calls them. A head is
 * an item of the pool; the arithmetic is in kda_head.h and heads.h. */
#include "k3cpu.h"

typedef struct {
    const k3_isa *isa;
    const void *job;
} head_job;

static void kda_item(void *context, int64_t head, int thread) {
    const head_job *item = context;
    (void)thread;
    item->isa->kda_head(item->job, head);
}

static void heads_item(void *context, int64_t head, int thread) {
    const head_job *item = context;
    (void)thread;
    item->isa->head_product(item->job, head);
}

static void for_heads(const k3_isa *isa, int threads, k3_work work, const void *job, int64_t heads) {
    head_job items = {isa, job};
    k3_pool_enter(threads);
    k3_run(work, &items, heads);
    k3_pool_leave();
}

K3_EXPORT void k3_kda_step(const k3_isa *isa, int threads, const k3_kda *job) {
    for_heads(isa, threads, kda_item, job, job->heads);
}

K3_EXPORT void k3_heads_product(const k3_isa *isa, int threads, const k3_heads *job) {
    for_heads(isa, threads, heads_item, job, job->heads);
}

/* For the loader to compare with its own descriptions. */
K3_EXPORT int k3_kda_size(void) { return (int)sizeof(k3_kda); }
K3_EXPORT int k3_heads_size(void) { return (int)sizeof(k3_heads); }
