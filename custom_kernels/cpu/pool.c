/* A small pool of threads that sleeps when there is no work. Owns threads and hand-out of items, knows no kernel.
 * Items are handed out by a counter: which thread computes an item never changes its bits. */
#define _GNU_SOURCE
#include "k3cpu.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { SPINS = 1000 };        /* some 10 us: bridges the gap between two phases of one call */

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* held by the caller that uses the pool */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards everything below that is not atomic */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, idle = PTHREAD_COND_INITIALIZER;
static pthread_t workers[K3_MAX_THREADS];
static int started; /* workers that exist, not counting callers */
static int stopping;
static pid_t owner; /* a forked child has none of the threads */

static k3_work job_work;
static void *job_context;
static int64_t job_items;
static int job_open;   /* whether a worker that wakes up may still join the job */
static int job_active; /* workers that have joined it and not finished */
static atomic_llong next_item;
static atomic_uint generation;

/* Subnormal weights and sums are exact only while the CPU does not flush them; another library may have said so. */
#if defined(__x86_64__)
static unsigned float_mode_set(void) {
    unsigned before = _mm_getcsr();
    _mm_setcsr(before & ~0x8040u);
    return before;
}
static void float_mode_restore(unsigned before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
static unsigned float_mode_set(void) {
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    uint64_t after = before & ~(1ull << 24);
    __asm__ volatile("msr fpcr, %0" : : "r"(after));
    return (unsigned)before;
}
static void float_mode_restore(unsigned before) {
    uint64_t value = before;
    __asm__ volatile("msr fpcr, %0" : : "r"(value));
}
#else
static unsigned float_mode_set(void) { return 0; }
static void float_mode_restore(unsigned before) { (void)before; }
#endif

/* Items that a thread takes at a time. Few threads gain by long runs, as what is fetched ahead at the end of one is
 * lost; with many a run delays those who wait for its items. Towards the end runs are a share of what is left. */
static int64_t run_length(int64_t left) {
    const int64_t threads = started + 1, longest = threads <= 2 ? 16 : threads <= 4 ? 8 : 4;
    const int64_t share = left / (threads * (threads <= 4 ? 2 : 4));
    return share < 1 ? 1 : share > longest ? longest : share;
}

static void work_through(k3_work work, void *context, int64_t items, int thread) {
    unsigned mode = float_mode_set();
    for (;;) {
        int64_t run = run_length(items - atomic_load(&next_item)), item = atomic_fetch_add(&next_item, run);
        if (item >= items) break;
        int64_t end = item + run < items ? item + run : items;
        for (; item < end; item++) work(context, item, thread);
    }
    float_mode_restore(mode);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

void k3_wait(const atomic_llong *counter, int64_t least) {
    for (int i = 0; atomic_load((atomic_llong *)counter) < least; i++)
        if (i < SPINS)
            pause_briefly();
        else
            sched_yield(); /* more threads than cores: whoever is waited for has none */
}

static void *worker(void *argument) {
    int thread = (int)(intptr_t)argument;
    unsigned seen = 0; /* the generation at the start of the pool */
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(&generation, memory_order_relaxed) == seen; i++)
            pause_briefly();
        pthread_mutex_lock(&lock);
        while (atomic_load(&generation) == seen && !stopping) pthread_cond_wait(&wake, &lock);
        if (stopping) break;
        seen = atomic_load(&generation);
        if (job_open) {
            k3_work work = job_work;
            void *context = job_context;
            int64_t items = job_items;
            job_active++;
            pthread_mutex_unlock(&lock);
            work_through(work, context, items, thread);
            pthread_mutex_lock(&lock);
            if (--job_active == 0) pthread_cond_signal(&idle);
        }
        pthread_mutex_unlock(&lock);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Bring the number of workers to `wanted`, or to as many as the system gives. `turn` is held. */
static void adjust_workers(int wanted) {
    if (owner != getpid()) {
        owner = getpid();
        started = 0;
        pthread_mutex_init(&lock, NULL);
        pthread_cond_init(&wake, NULL);
        pthread_cond_init(&idle, NULL);
    }
    if (started == wanted) return;
    pthread_mutex_lock(&lock);
    stopping = 1;
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < started; i++) pthread_join(workers[i], NULL);
    stopping = 0;
    atomic_store(&generation, 0);
    for (started = 0; started < wanted; started++)
        if (pthread_create(&workers[started], NULL, worker, (void *)(intptr_t)(started + 1))) break;
}

void k3_run(k3_work work, void *context, int64_t items) {
    if (items <= 0) return;
    atomic_store(&next_item, 0);
    if (started == 0 || items == 1) {
        work_through(work, context, items, 0);
        return;
    }
    pthread_mutex_lock(&lock);
    job_work = work;
    job_context = context;
    job_items = items;
    job_open = 1;
    atomic_fetch_add(&generation, 1);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);
    work_through(work, context, items, 0);
    pthread_mutex_lock(&lock);
    job_open = 0; /* nothing is left to hand out: whoever is still asleep is not waited for */
    while (job_active) pthread_cond_wait(&idle, &lock);
    pthread_mutex_unlock(&lock);
}

static void before_fork(void) { pthread_mutex_lock(&turn); }
static void after_fork(void) { pthread_mutex_unlock(&turn); }
static void register_fork(void) { pthread_atfork(before_fork, after_fork, after_fork); }

int k3_pool_enter(int threads) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, register_fork);
    pthread_mutex_lock(&turn);
    adjust_workers(threads < 1 ? 0 : threads > K3_MAX_THREADS ? K3_MAX_THREADS - 1 : threads - 1);
    return started + 1;
}

void k3_pool_leave(void) { pthread_mutex_unlock(&turn); }
