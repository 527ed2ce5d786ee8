/* Threads that run lists of calls. Knows nothing of what a call computes.
 *
 * A run is a list of calls in order. Each call's items are dealt out in one range a thread; a thread that has emptied its own range takes
 * from the others, and a call is over when all its items are done, not when all threads have arrived: a worker that the operating
 * system has put aside holds nobody up unless it sits on an item. Between runs workers spin shortly, then yield, then sleep, so an idle
 * pool costs nothing. The calling thread is thread 0 and can do all the work alone.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ts.h"

#if defined(__x86_64__) || defined(__i386__)
#define ts_pause() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define ts_pause() __asm__ volatile("yield")
#else
#define ts_pause() ((void)0)
#endif

enum {
    LINE = 64,
    SPINS_BEFORE_YIELD = 2000,  /* in a run: about 50 to 200 us */
    IDLE_SPINS = 500,           /* between runs: tens of us, then yield */
    IDLE_YIELDS = 200,          /* then sleep */
    PREFETCH_BYTES = 96 * 1024, /* of the next weights, while waiting */
};

typedef struct {
    _Alignas(LINE) atomic_long value;
} counter;

typedef struct {
    ts_thread view;
    pthread_t handle;
    struct ts_pool *pool;
    _Alignas(LINE) atomic_int inside; /* 1 while the worker may touch the run */
} worker;

typedef struct ts_pool {
    int count;
    worker *workers;
    pthread_mutex_t owner; /* one run at a time */
    pthread_mutex_t sleep_lock;
    pthread_cond_t wake;
    /* The run. `door` is odd while a run is open; workers may read the rest only then. */
    const ts_call *calls;
    long num_calls;
    counter *counters; /* per call: items done, then one `next item` a thread */
    long counters_len;
    char *shared;
    size_t shared_bytes;
    _Alignas(LINE) atomic_long door;
    _Alignas(LINE) atomic_long progress; /* a late worker starts at the call in progress */
    _Alignas(LINE) atomic_int sleepers;
    atomic_int stop;
} ts_pool;

static const ts_op *const operations[TS_NUM_OPS] = {
    &ts_embedding, &ts_rms_norm, &ts_add_rms_norm, &ts_qkv_rope_cache, &ts_attention, &ts_silu_and_mul, &ts_linear, &ts_block_linear,
};

static void *aligned(size_t bytes) {
    void *memory = NULL;
    if (posix_memalign(&memory, LINE, bytes ? bytes : LINE)) abort(); /* out of memory: nothing sensible is left to do */
    return memory;
}

void *ts_scratch(ts_thread *thread, size_t bytes) {
    if (bytes > thread->scratch_bytes) {
        free(thread->scratch);
        thread->scratch = aligned(bytes);
        thread->scratch_bytes = bytes;
    }
    return thread->scratch;
}

/* While others finish: pull the next call's first weights towards this core. `fetched` counts bytes. */
static void warm_next(const ts_pool *pool, long next, ts_thread *thread, size_t *fetched) {
    if (next >= pool->num_calls || *fetched >= PREFETCH_BYTES) return;
    const ts_call *call = &pool->calls[next];
    const ts_op *op = operations[call->op];
    if (!op->weight_span) {
        if (*fetched == 0) warm_next(pool, next + 1, thread, fetched);
        return;
    }
    long items = op->items(call), first = items * thread->index / thread->count, last = items * (thread->index + 1) / thread->count;
    const char *start;
    size_t item_bytes = op->weight_span(call, first, &start);
    size_t limit = (size_t)(last - first) * item_bytes;
    for (int i = 0; i < 8 && *fetched < limit; i++, *fetched += LINE) __builtin_prefetch(start + *fetched, 0, 2);
}

static void run_calls(ts_pool *pool, ts_thread *thread, long from) {
    long stride = thread->count + 1;
    for (long i = from; i < pool->num_calls; i++) {
        const ts_call *call = &pool->calls[i];
        const ts_op *op = operations[call->op];
        counter *counters = pool->counters + i * stride;
        long items = op->items(call), grain = op->grain(call), finished = 0;
        for (int turn = 0; turn < thread->count; turn++) {
            int owner = (thread->index + turn) % thread->count;
            long begin = items * owner / thread->count, end = items * (owner + 1) / thread->count;
            atomic_long *next = &counters[1 + owner].value;
            while (begin + atomic_load_explicit(next, memory_order_relaxed) < end) {
                long at = begin + atomic_fetch_add_explicit(next, grain, memory_order_relaxed);
                if (at >= end) break;
                long stop = ts_min(at + grain, end);
                op->run(call, at, stop, thread);
                finished += stop - at;
            }
        }
        if (finished) atomic_fetch_add_explicit(&counters[0].value, finished, memory_order_acq_rel);
        size_t fetched = 0;
        for (long spins = 0; atomic_load_explicit(&counters[0].value, memory_order_acquire) < items; spins++) {
            warm_next(pool, i + 1, thread, &fetched);
            if (spins < SPINS_BEFORE_YIELD)
                ts_pause();
            else
                sched_yield();
        }
        if (thread->index == 0) atomic_store_explicit(&pool->progress, i + 1, memory_order_relaxed);
    }
}

static void wait_for_run(ts_pool *pool, long last) {
    for (int i = 0; i < IDLE_SPINS + IDLE_YIELDS; i++) {
        long door = atomic_load(&pool->door);
        if ((door & 1 && door != last) || atomic_load(&pool->stop)) return;
        if (i < IDLE_SPINS)
            ts_pause();
        else
            sched_yield();
    }
    pthread_mutex_lock(&pool->sleep_lock);
    atomic_fetch_add(&pool->sleepers, 1);
    for (;;) {
        long door = atomic_load(&pool->door);
        if ((door & 1 && door != last) || atomic_load(&pool->stop)) break;
        pthread_cond_wait(&pool->wake, &pool->sleep_lock);
    }
    atomic_fetch_sub(&pool->sleepers, 1);
    pthread_mutex_unlock(&pool->sleep_lock);
}

static void *work(void *argument) {
    worker *self = argument;
    ts_pool *pool = self->pool;
    long last = 0;
    for (;;) {
        wait_for_run(pool, last);
        if (atomic_load(&pool->stop)) return NULL;
        long door = atomic_load(&pool->door);
        /* Announce first, then look again: the owner closes the door first, then looks for announcements. */
        atomic_store(&self->inside, 1);
        if (door & 1 && atomic_load(&pool->door) == door) {
            self->view.run = door;
            self->view.shared = pool->shared;
            run_calls(pool, &self->view, atomic_load(&pool->progress));
        }
        atomic_store(&self->inside, 0);
        last = door;
    }
}

static void reserve(ts_pool *pool, const ts_call *calls, long num_calls) {
    size_t shared = 0;
    for (long i = 0; i < num_calls; i++) {
        const ts_op *op = operations[calls[i].op];
        size_t need = op->shared_bytes ? op->shared_bytes(&calls[i]) : 0;
        if (need > shared) shared = need;
    }
    if (shared > pool->shared_bytes) {
        free(pool->shared);
        pool->shared = aligned(shared);
        memset(pool->shared, 0, shared);
        pool->shared_bytes = shared;
    }
    long len = num_calls * (pool->count + 1);
    if (len > pool->counters_len) {
        free(pool->counters);
        pool->counters = aligned((size_t)len * sizeof(counter));
        pool->counters_len = len;
    }
    memset(pool->counters, 0, (size_t)len * sizeof(counter));
}

void ts_run(ts_pool *pool, const ts_call *calls, long num_calls) {
    pthread_mutex_lock(&pool->owner);
    worker *self = &pool->workers[0];
    reserve(pool, calls, num_calls);
    pool->calls = calls;
    pool->num_calls = num_calls;
    atomic_store(&pool->progress, 0);
    long door = atomic_load(&pool->door) + 1;
    self->view.run = door;
    self->view.shared = pool->shared;
    /* One small call is done sooner alone than a worker is woken. */
    int alone = pool->count == 1 || (num_calls == 1 && operations[calls->op]->items(calls) <= operations[calls->op]->grain(calls));
    if (!alone) {
        atomic_store(&pool->door, door);
        if (atomic_load(&pool->sleepers)) {
            pthread_mutex_lock(&pool->sleep_lock);
            pthread_cond_broadcast(&pool->wake);
            pthread_mutex_unlock(&pool->sleep_lock);
        }
        run_calls(pool, &self->view, 0);
        atomic_store(&pool->door, door + 1);
        for (int t = 1; t < pool->count; t++)
            for (long spins = 0; atomic_load(&pool->workers[t].inside); spins++)
                if (spins < SPINS_BEFORE_YIELD)
                    ts_pause();
                else
                    sched_yield();
    } else {
        run_calls(pool, &self->view, 0);
        atomic_store(&pool->door, door + 1);
    }
    pthread_mutex_unlock(&pool->owner);
}

void ts_pool_free(ts_pool *pool) {
    atomic_store(&pool->stop, 1);
    pthread_mutex_lock(&pool->sleep_lock);
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->sleep_lock);
    for (int t = 0; t < pool->count; t++) {
        if (t) pthread_join(pool->workers[t].handle, NULL);
        free(pool->workers[t].view.scratch);
    }
    free(pool->workers);
    free(pool->counters);
    free(pool->shared);
    free(pool);
}

/* A pool of `count` threads, the caller's among them; fewer when the system gives no more. */
ts_pool *ts_pool_new(int count) {
    ts_pool *pool = aligned(sizeof *pool);
    memset(pool, 0, sizeof *pool);
    pool->workers = aligned((size_t)count * sizeof(worker));
    memset(pool->workers, 0, (size_t)count * sizeof(worker));
    pthread_mutex_init(&pool->owner, NULL);
    pthread_mutex_init(&pool->sleep_lock, NULL);
    pthread_cond_init(&pool->wake, NULL);
    pool->count = count;
    for (int t = 0; t < count; t++) {
        pool->workers[t].pool = pool;
        pool->workers[t].view.index = t;
        pool->workers[t].view.count = count;
    }
    for (int t = 1; t < count; t++)
        if (pthread_create(&pool->workers[t].handle, NULL, work, &pool->workers[t])) {
            pool->count = t;
            ts_pool_free(pool);
            return NULL;
        }
    return pool;
}

long ts_abi(void) { return (long)sizeof(ts_call); }
