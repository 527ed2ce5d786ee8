/* The native kernels' own boundary: one struct for every call, a thread's view of a run, and a table of operations.
 * Python sees ts_pool_new, ts_pool_free, ts_run, ts_abi and ts_pack; nothing here knows of torch. */
#ifndef TS_H
#define TS_H

#include <stddef.h>
#include <stdint.h>

enum { TS_EMBEDDING, TS_RMS_NORM, TS_ADD_RMS_NORM, TS_QKV_ROPE_CACHE, TS_ATTENTION, TS_SILU_AND_MUL, TS_LINEAR, TS_BLOCK_LINEAR, TS_NUM_OPS };

/* One operation with its arguments; each kernel names its fields beside its code. Pointers stay valid as long as the tape. */
typedef struct {
    int32_t op;
    int32_t flags;
    int64_t n[12];
    float f[2];
    void *p[12];
} ts_call;

typedef struct ts_thread {
    int index, count;     /* this thread, threads of the pool */
    void *scratch;        /* this thread's own memory */
    size_t scratch_bytes;
    const ts_call *ready; /* the call whose preparation lies in scratch */
    long run;             /* number of the run that `ready` belongs to */
    long ready_run;
    char *shared;         /* one memory for the run, as large as the largest shared_bytes of its calls; zeroed by whoever needs it */
} ts_thread;

/* An operation: `items` independent pieces of work, handed out `grain` at a time. An item's result must not depend on who runs it
 * or on how items are grouped: that is what makes results equal for any number of threads. */
typedef struct {
    const char *name;
    long (*items)(const ts_call *call);
    long (*grain)(const ts_call *call);
    void (*run)(const ts_call *call, long begin, long end, ts_thread *thread);
    size_t (*shared_bytes)(const ts_call *call);                     /* or NULL */
    size_t (*weight_span)(const ts_call *call, long item, const char **start); /* bytes of weights that an item reads, or NULL */
} ts_op;

extern const ts_op ts_embedding, ts_rms_norm, ts_add_rms_norm, ts_qkv_rope_cache, ts_attention, ts_silu_and_mul, ts_linear, ts_block_linear;

/* This thread's scratch, at least `bytes` long, 64-byte aligned; contents survive until the next call with another size or op. */
void *ts_scratch(ts_thread *thread, size_t bytes);

/* True exactly once per call, run and thread: prepare what the items share. */
static inline int ts_first_item(ts_thread *thread, const ts_call *call) {
    if (thread->ready == call && thread->ready_run == thread->run) return 0;
    thread->ready = call;
    thread->ready_run = thread->run;
    return 1;
}

static inline long ts_min(long a, long b) { return a < b ? a : b; }
static inline long ts_max(long a, long b) { return a > b ? a : b; }
static inline long ts_ceil_div(long a, long b) { return (a + b - 1) / b; }

#endif
