/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_TRACE: what happens in a model as spans. Its instances get a table whose kernels are timed,
 * and a step that is traced another entry to its runs: without a trace nothing of this is on their
 * way. */
#include "observers.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "step/plan_state.h"
#include "util/device.h"

#define MOST_TRACED 64   /* instances at a time in a process; further ones have host spans alone */
#define MOST_PENDING 256 /* operations whose device times have not been read */
#define ANCHOR_NS INT64_C(1000000000) /* a float of milliseconds is exact to 60 ns for so long */

/* An instance of a model whose runtime has a trace. */
struct traced {
    _Atomic(const attn_model *) owner; /* NULL: free */
    _Atomic(attn_instance *) handle;   /* models may share one */
    struct attn_kernels kernels;       /* the plugin's own */
    const char *backend;
    struct trace_file *file;
    struct lock lock; /* guards what follows */
    void *anchor;     /* an event, which the device met at the host's time `anchored` */
    int64_t anchored;
    int32_t num_pending;
    struct pending {
        void *events[2]; /* kept for the next operation */
        char name[24];
        int32_t layer; /* -1: of the plan */
    } pending[MOST_PENDING];
};

static struct traced all[MOST_TRACED];

/* The plan of which this thread runs a traced step, `observed_step`, or NULL while it plans. A key,
 * not a thread's variable: the leak checker of GCC 12 fails in a process that opens a library with
 * one. Made before the first instance is traced. */
static pthread_key_t running;
static pthread_once_t running_once = PTHREAD_ONCE_INIT;
static atomic_bool has_running;

static void make_running(void)
{
    atomic_store(&has_running, pthread_key_create(&running, NULL) == 0);
}

static attn_plan *running_plan(void)
{
    return atomic_load(&has_running) ? pthread_getspecific(running) : NULL;
}

static void set_running(attn_plan *plan)
{
    if (atomic_load(&has_running)) {
        pthread_setspecific(running, plan);
    }
}

/* ---- device times ---- */

static struct attn_event_args event_args(const struct traced *t, void *event, void *since)
{
    return (struct attn_event_args){.struct_size = sizeof(struct attn_event_args),
                                    .instance = atomic_load(&t->handle),
                                    .event = event,
                                    .since = since};
}

static bool record(const struct traced *t, void **event, void *stream)
{
    struct attn_event_args args = event_args(t, NULL, NULL);
    if (*event == NULL && t->kernels.create_event(&args, event, NULL) != ATTN_OK) {
        *event = NULL;
        return false;
    }
    args.event = *event;
    args.stream = stream;
    return t->kernels.record_event(&args, NULL) == ATTN_OK;
}

/* Waits for both events; -1: it failed. */
static int64_t elapsed(const struct traced *t, void *since, void *event)
{
    const struct attn_event_args args = event_args(t, event, since);
    int64_t nanoseconds = 0;
    return t->kernels.elapsed(&args, &nanoseconds, NULL) == ATTN_OK ? nanoseconds : -1;
}

/* Waits for the last operations, and writes when the device ran them. */
static void drain(struct traced *t)
{
    for (int32_t i = 0; i < t->num_pending; i++) {
        const struct pending *p = &t->pending[i];
        const int64_t length = elapsed(t, p->events[0], p->events[1]);
        const int64_t begin = elapsed(t, t->anchor, p->events[0]);
        char args[32];
        snprintf(args, sizeof args, "\"layer\":%d", p->layer);
        if (begin >= 0 && length >= 0) {
            trace_span(t->file, p->name, t->anchored + begin, length,
                       TRACE_DEVICES + (int32_t)(t - all), args);
        }
    }
    t->num_pending = 0;
}

static void drain_model(const attn_model *model)
{
    for (struct traced *t = all; t < all + MOST_TRACED; t++) {
        if (atomic_load(&t->owner) == model && lock_take(&t->lock)) {
            drain(t);
            lock_give(&t->lock);
        }
    }
}

/* Under the lock. NULL: this operation has no events. */
static struct pending *take_pending(struct traced *t, void *stream)
{
    if (t->num_pending == MOST_PENDING) {
        drain(t);
    }
    if (t->num_pending == 0 && (t->anchor == NULL || trace_clock() - t->anchored > ANCHOR_NS)) {
        if (!record(t, &t->anchor, stream) || elapsed(t, t->anchor, t->anchor) < 0) {
            return NULL;
        }
        t->anchored = trace_clock();
    }
    struct pending *p = &t->pending[t->num_pending];
    return record(t, &p->events[0], stream) ? p : NULL;
}

/* ---- operations ---- */

/* One under way: a call of a kernel. */
struct span {
    struct traced *traced;
    const attn_plan *plan;
    const struct launch *launch; /* NULL: it is no prepared call of the running step */
    struct pending *pending;     /* NULL: no events */
    const char *name;
    int64_t begin, bytes;
    size_t length;
    char text[1024]; /* fields of a JSON object */
};

static void add(struct span *span, const char *format, ...) CORE_PRINTF(2, 3);
static void add(struct span *span, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (span->length < sizeof span->text) {
        span->length += (size_t)vsnprintf(span->text + span->length,
                                          sizeof span->text - span->length, format, values);
    }
    va_end(values);
}

static void add_tensor(struct span *span, const char *name, const struct attn_tensor *t)
{
    int64_t elements = t != NULL;
    for (int32_t d = 0; t != NULL && d < t->ndim; d++) {
        add(span, "%s%" PRId64, d > 0 ? "," : name, t->shape[d]);
        elements *= t->shape[d];
    }
    if (t != NULL) {
        add(span, "] ");
        span->bytes += elements * t->dtype.bits * t->dtype.lanes / 8;
    }
}

static int64_t row_bytes(const struct attn_layer_desc *layer, const struct attn_kv_view *k,
                         const struct attn_kv_view *v)
{
    return layer->num_kv_heads * ((k != NULL ? layer_row(layer, false).bytes : 0) +
                                  (v != NULL ? layer_row(layer, true).bytes : 0));
}

static void add_attend(struct span *span, const struct attn_attend_args *args)
{
    const int64_t keys = span->launch != NULL ? span->launch->schedule->num_keys : 0;
    if (args->batch != NULL) {
        add(span, ",\"phase\":\"%s\",\"requests\":%d,\"keys\":%" PRId64,
            args->phase == ATTN_PHASE_DECODE ? "decode" : "prefill", args->batch->num_reqs, keys);
    }
    span->bytes = keys * row_bytes(args->layer, args->k_cache, args->v_cache);
}

static void add_write(struct span *span, const struct attn_write_kv_args *args)
{
    static const struct attn_kv_view k; /* an MLA layer's rows come in its own extension */
    add(span, ",\"rows\":%" PRId64, args->num_slots);
    span->bytes = args->num_slots * row_bytes(args->layer, &k, args->v_cache);
}

static void add_copies(struct span *span, const struct attn_copy_blocks_args *args)
{
    for (int32_t i = 0; i < args->num_copies; i++) {
        const char *copy = (const char *)args->copies + (size_t)i * (size_t)args->copy_stride;
        span->bytes += 2 * args->num_pairs * ((const struct attn_block_copy *)copy)->bytes;
    }
}

static struct traced *find(const attn_instance *handle)
{
    struct traced *t = all;
    while (t < all + MOST_TRACED && atomic_load(&t->handle) != handle) {
        t++;
    }
    return t < all + MOST_TRACED ? t : NULL;
}

static void begin_operation(struct span *span, const char *name, const void *args, void *stream)
{
    struct traced *t = span->traced;
    const struct step *step = span->plan->observed_step;
    for (int32_t i = 0; step != NULL && i < NUM_PHASES * PART_COUNT; i++) {
        const struct launch *launch = &step->launches[i / PART_COUNT][i % PART_COUNT];
        span->launch = &launch->args == args ? launch : span->launch;
    }
    const bool is_part = span->launch != NULL && span->launch->schedule->part != PART_MAIN;
    span->name = is_part ? launch_name(span->launch) : name;
    add(span, "\"backend\":\"%s\"", t->backend);
    if (t->kernels.record_event != NULL && !span->plan->capturing && lock_take(&t->lock)) {
        span->pending = take_pending(t, stream);
        if (span->pending == NULL) {
            lock_give(&t->lock);
        }
    }
    span->begin = trace_begin(t->file, span->name);
}

/* The lock is held from an operation's first event to its last. */
static void end_operation(struct span *span, void *stream)
{
    struct traced *t = span->traced;
    const struct step *step = span->plan->observed_step;
    if (span->pending != NULL) {
        t->num_pending += record(t, &span->pending->events[1], stream);
        span->pending->layer = step != NULL ? step->layer->index : -1;
        snprintf(span->pending->name, sizeof span->pending->name, "%s", span->name);
        lock_give(&t->lock);
    }
    add(span, "\",\"bytes\":%" PRId64, span->bytes);
    trace_end(t->file, span->name, span->begin, "%s",
              span->length < sizeof span->text ? span->text : "");
}

/* A slot, its arguments, what is said of them but tensors, and these. */
#define T(name) add_tensor(&span, #name "[", args->name)
#define ATTEND(X, slot)                                                                            \
    X(slot, attn_attend_args, add_attend(&span, args), T(q), T(k), T(v), T(out), T(lse))
#define SLOTS(X)                                                                                   \
    ATTEND(X, attend)                                                                              \
    ATTEND(X, attend_mla)                                                                          \
    ATTEND(X, attend_mla_sparse)                                                                   \
    ATTEND(X, recurrent)                                                                           \
    ATTEND(X, update_block_table)                                                                  \
    X(write_kv, attn_write_kv_args, add_write(&span, args), T(k), T(v))                            \
    X(rope_write_kv, attn_write_kv_args, add_write(&span, args), T(q), T(k), T(v))                 \
    X(merge_states, attn_merge_states_args, (void)0, T(prefix_out), T(suffix_out), T(out))         \
    X(gather_kv, attn_gather_kv_args, (void)0, T(out))                                             \
    X(batched_gemm, attn_batched_gemm_args, (void)0, T(a), T(w), T(out))                           \
    X(quantize, attn_quantize_args, (void)0, T(x), T(out))                                         \
    X(amax, attn_amax_args, (void)0, T(x))                                                         \
    X(copy, attn_copy_args, span.bytes = 2 * (int64_t)args->bytes, (void)0)                        \
    X(fill, attn_fill_args, span.bytes = args->rows * (int64_t)args->row_bytes, (void)0)           \
    X(copy_blocks, attn_copy_blocks_args, add_copies(&span, args), (void)0)                        \
    X(make_block_table, attn_block_table_args, (void)0, (void)0)

/* A kernel between two readings of the clocks. */
#define TRACED(slot, params, values, more, ...)                                                    \
    static attn_status traced_##slot params                                                        \
    {                                                                                              \
        struct span span = {.traced = find(args->instance), .plan = running_plan()};               \
        if (span.traced == NULL) {                                                                 \
            return error_set_text(error, ATTN_ERROR_ORDER, "instance",                             \
                                  "the instance's model is gone");                                 \
        }                                                                                          \
        if (span.plan == NULL) {                                                                   \
            return span.traced->kernels.slot values;                                               \
        }                                                                                          \
        begin_operation(&span, #slot, args, args->stream);                                         \
        const attn_status status = span.traced->kernels.slot values;                               \
        more;                                                                                      \
        add(&span, ",\"shape\":\"");                                                               \
        (void)(__VA_ARGS__);                                                                       \
        end_operation(&span, args->stream);                                                        \
        return status;                                                                             \
    }
#define TRACED_SLOT(slot, type, more, ...)                                                         \
    TRACED(slot, (const struct type *args, struct attn_error *error), (args, error), more,         \
           __VA_ARGS__)
SLOTS(TRACED_SLOT)
TRACED(schedule, (const struct attn_attend_args *args, int32_t mode, struct attn_error *error),
       (args, mode, error), add_attend(&span, args), (void)0)

static void take_instance(attn_model *model, struct instance *instance)
{
    struct attn_kernels *k = &instance->kernels;
    const attn_model *none = NULL;
    struct traced *t = all;
    while (t < all + MOST_TRACED && !atomic_compare_exchange_strong(&t->owner, &none, model)) {
        none = NULL;
        t++;
    }
    if (t == all + MOST_TRACED) {
        return;
    }
    lock_init(&t->lock);
    t->kernels = *k;
    t->file = trace_of(model->runtime);
    t->backend = model->runtime->backends[instance->backend].full_name;
    t->num_pending = 0;
    t->anchor = NULL;
    memset(t->pending, 0, sizeof t->pending);
    atomic_store(&t->handle, instance->handle);
    if (k->record_event != NULL) {
        char name[256], device[DEVICE_TEXT_SIZE];
        snprintf(name, sizeof name, "%s on %s", t->backend,
                 device_text(instance->caps->device, device));
        trace_name_track(t->file, TRACE_DEVICES + (int32_t)(t - all), name);
    }
#define TAKE(slot, type, ...) k->slot = k->slot != NULL ? traced_##slot : NULL;
    SLOTS(TAKE)
    TAKE(schedule, , )
}

void trace_model_begin(attn_model *model)
{
    pthread_once(&running_once, make_running);
    for (int32_t i = 0; i < model->num_instances; i++) {
        take_instance(model, &model->instances[i]);
    }
}

void trace_model_end(attn_model *model)
{
    drain_model(model);
    for (struct traced *t = all; t < all + MOST_TRACED; t++) {
        if (atomic_load(&t->owner) == model) {
            for (int32_t i = -1; i < 2 * MOST_PENDING; i++) {
                void *event = i < 0 ? t->anchor : t->pending[i / 2].events[i % 2];
                const struct attn_event_args args = event_args(t, event, NULL);
                if (event != NULL) {
                    t->kernels.destroy_event(&args, NULL);
                }
            }
            atomic_store(&t->handle, NULL);
            lock_finish(&t->lock);
            atomic_store(&t->owner, NULL);
        }
    }
}

int64_t observe_operation(const char *name)
{
    const attn_plan *plan = running_plan();
    return plan != NULL ? trace_begin(trace_of(plan->model->runtime), name) : 0;
}

void observe_operation_end(const char *name, int64_t begin)
{
    if (begin != 0) {
        trace_end(trace_of(running_plan()->model->runtime), name, begin, "%s", "");
    }
}

/* ---- plans and runs ---- */

static attn_status run_traced(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct attn_error *error)
{
    struct trace_file *file = trace_of(plan->model->runtime);
    const attn_layer *layer = step->layer;
    const struct assignment_phase *phases = plan->model->assignment->layers[layer->index].phases;
    char name[256];
    plan->observed_step = step;
    set_running(plan);
    const int64_t begin = trace_begin(file, "run");
    const attn_status status = step->observed(plan, step, io, error);
    trace_end(file, "run", begin,
              "\"layer\":\"%s\",\"index\":%d,\"step\":%" PRIu64 ",\"tokens\":%d,\"status\":%d,"
              "\"prefill\":\"%s\",\"decode\":\"%s\",\"captured\":%s",
              trace_quote(name, sizeof name, layer->desc->name), layer->index, plan->serial,
              plan->num_tokens, status, phases[ATTN_PHASE_PREFILL].choice.name,
              phases[ATTN_PHASE_DECODE].choice.name, plan->capturing ? "true" : "false");
    plan->observed_step = NULL;
    set_running(NULL);
    return status;
}

/* Keys of a schedule's requests that its layers see; host copies end with plan_batch. */
static void count_keys(struct plan_schedule *schedule)
{
    const struct attn_batch *b = schedule->batch;
    const struct attn_layer_desc *layer = schedule->args->layer;
    const bool is_open = !layer->has_window || layer->window_left < 0;
    schedule->num_keys = 0;
    for (int32_t r = 0; b != NULL && b->seq_lens_host != NULL && r < b->num_reqs; r++) {
        const int64_t keys = b->seq_lens_host[r];
        const int64_t queries = b->query_start_loc_host[r + 1] - b->query_start_loc_host[r];
        const int64_t seen = layer->window_left + queries;
        schedule->num_keys += queries == 0 ? 0 : is_open || keys < seen ? keys : seen;
    }
}

int64_t trace_plan_begin(attn_plan *plan, const char *name, bool captured)
{
    struct trace_file *file = trace_of(plan != NULL ? plan->model->runtime : NULL);
    if (file == NULL) {
        return 0;
    }
    if (!captured) {
        drain_model(plan->model);
    }
    if (plan->num_observed++ % file->every != 0) {
        return 0;
    }
    set_running(plan);
    return trace_begin(file, name);
}

void trace_plan_end(attn_plan *plan, const char *name, int64_t begin, bool brought,
                    attn_status status)
{
    if (begin == 0) {
        return;
    }
    set_running(NULL);
    /* after a failure schedules may still have the batch before, whose arrays are gone */
    for (int32_t i = 0; brought && status == ATTN_OK && i < plan->num_schedules; i++) {
        count_keys(&plan->schedules[i]);
    }
    for (int32_t i = 0; i < plan->num_steps; i++) {
        struct step *step = &plan->steps[i];
        step->observed = step->enter != run_traced ? step->enter : step->observed;
        step->enter = run_traced;
    }
    trace_end(trace_of(plan->model->runtime), name, begin,
              "\"step\":%" PRIu64 ",\"requests\":%d,\"decodes\":%d,\"tokens\":%d,\"status\":%d",
              plan->serial, plan->given.num_reqs, plan->split.num_decodes, plan->num_tokens,
              status);
}
