/* SPDX-License-Identifier: Apache-2.0 */
#include "step/trace.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "bind/model.h"
#include "select/select.h"
#include "step/plan.h"
#include "step/plan_state.h"
#include "util/device.h"

#define ARGS 1024
#define MOST_TRACED 64   /* instances at a time in a process; further ones have host spans alone */
#define MOST_PENDING 256 /* operations whose device times have not been read */
#define ANCHOR_NS INT64_C(1000000000) /* a float of milliseconds is exact to 60 ns for so long */

/* An instance of a model whose runtime has a trace. */
struct traced {
    _Atomic(const struct instance *) owner; /* NULL: free. Two may have one handle */
    _Atomic(attn_instance *) handle;
    struct attn_kernels kernels; /* the plugin's own */
    const char *backend;
    attn_runtime *runtime;
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

/* The plan of which this thread runs a traced step, `traced_step`, or NULL while it plans. A key,
 * not a thread's variable: the leak checker of GCC 12 fails in a process that opens a library with
 * one. */
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

/* An operation under way. */
struct span {
    struct traced *traced;
    struct pending *pending; /* NULL: no events */
    const char *name;
    int64_t begin;
};

/* JSON of an object, as it grows. */
struct object {
    char text[ARGS];
    size_t length;
};

static void add(struct object *object, const char *format, ...) CORE_PRINTF(2, 3);
static void add(struct object *object, const char *format, ...)
{
    va_list values;
    const size_t room = sizeof object->text - object->length;
    object->text[0] = '{';
    object->length += object->length == 0;
    va_start(values, format);
    const int length = vsnprintf(object->text + object->length, room - 1, format, values);
    va_end(values);
    if (length >= 0 && (size_t)length < room - 2) { /* else what there was stays as it was */
        object->length += (size_t)length;
    }
}

static const char *finish(struct object *object)
{
    add(object, "%s", "");
    memcpy(object->text + object->length, "}", 2);
    return object->text;
}

/* ---- device times ---- */

static struct attn_event_args event_args(const struct traced *t, void *event, void *other)
{
    return (struct attn_event_args){.struct_size = sizeof(struct attn_event_args),
                                    .instance = atomic_load(&t->handle),
                                    .event = event,
                                    .since = other};
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
        const int64_t end = elapsed(t, p->events[0], p->events[1]);
        const int64_t begin = elapsed(t, t->anchor, p->events[0]);
        if (begin >= 0 && end >= 0) {
            struct object args = {.length = 0};
            add(&args, "\"layer\":%d", p->layer);
            trace_span(t->runtime, p->name, t->anchored + begin, end,
                       TRACE_DEVICES + (int32_t)(t - all), finish(&args));
        }
    }
    t->num_pending = 0;
}

static void drain_model(const attn_model *model)
{
    for (int32_t i = 0; i < MOST_TRACED; i++) {
        for (int32_t n = 0; n < model->num_instances; n++) {
            if (atomic_load(&all[i].owner) == &model->instances[n] && lock_take(&all[i].lock)) {
                drain(&all[i]);
                lock_give(&all[i].lock);
            }
        }
    }
}

/* Under the lock. NULL: this operation has no events. */
static struct pending *take_pending(struct traced *t, void *stream)
{
    if (t->num_pending == MOST_PENDING) {
        drain(t);
    }
    const int64_t time = trace_clock();
    if (t->num_pending == 0 && (t->anchor == NULL || time - t->anchored > ANCHOR_NS)) {
        if (!record(t, &t->anchor, stream) || elapsed(t, t->anchor, t->anchor) < 0) {
            return NULL;
        }
        t->anchored = trace_clock();
    }
    struct pending *p = &t->pending[t->num_pending];
    return record(t, &p->events[0], stream) ? p : NULL;
}

/* ---- operations ---- */

static struct traced *find(const attn_instance *handle)
{
    int32_t i = 0;
    while (i < MOST_TRACED && atomic_load(&all[i].handle) != handle) {
        i++;
    }
    return i < MOST_TRACED ? &all[i] : NULL;
}

/* The prepared call of the running step that has these arguments. */
static const struct launch *find_launch(const void *args)
{
    const struct step *step = running_plan()->traced_step;
    const struct launch *first = step != NULL ? &step->launches[0][0] : NULL;
    for (int32_t i = 0; first != NULL && i < NUM_PHASES * PART_COUNT; i++) {
        if (&first[i].args == args) {
            return &first[i];
        }
    }
    return NULL;
}

static struct span begin_operation(struct traced *t, const char *name, const void *args,
                                   void *stream)
{
    const struct launch *launch = find_launch(args);
    const bool is_part = launch != NULL && launch->schedule->part != PART_MAIN;
    const attn_plan *plan = running_plan();
    struct span span = {.traced = t, .name = is_part ? launch_name(launch) : name};
    if (t->kernels.record_event != NULL && !plan->capturing && lock_take(&t->lock)) {
        span.pending = take_pending(t, stream);
        if (span.pending == NULL) {
            lock_give(&t->lock);
        }
    }
    span.begin = trace_begin(&plan->model->runtime->settings.trace, span.name);
    return span;
}

/* The lock is held from an operation's first event to its last. */
static void end_operation(const struct span *span, struct object *args, void *stream)
{
    struct traced *t = span->traced;
    const attn_plan *plan = running_plan();
    if (span->pending != NULL) {
        t->num_pending += record(t, &span->pending->events[1], stream);
        span->pending->layer = plan->traced_step != NULL ? plan->traced_step->layer->index : -1;
        snprintf(span->pending->name, sizeof span->pending->name, "%s", span->name);
        lock_give(&t->lock);
    }
    trace_end(plan->model->runtime, span->name, span->begin, finish(args));
}

/* Tensors of an operation: names, shapes and, of all together, bytes. */
struct named_tensor {
    const char *name;
    const struct attn_tensor *tensor;
};

static void add_tensors(struct object *args, const struct named_tensor *tensors, int32_t count,
                        int64_t bytes)
{
    add(args, ",\"shape\":\"");
    for (int32_t i = 0; i < count; i++) {
        const struct attn_tensor *t = tensors[i].tensor;
        int64_t elements = t != NULL;
        for (int32_t d = 0; t != NULL && d < t->ndim; d++) {
            add(args, "%s%" PRId64, d > 0 ? "," : tensors[i].name, t->shape[d]);
            elements *= t->shape[d];
        }
        add(args, "%s", t != NULL ? "] " : "");
        bytes += t != NULL ? elements * t->dtype.bits * t->dtype.lanes / 8 : 0;
    }
    add(args, "\",\"bytes\":%" PRId64, bytes);
}

/* An attend's, and the keys and values that it reads. */
static int64_t add_attend(struct object *object, const struct attn_attend_args *args)
{
    const struct launch *launch = find_launch(args);
    const struct attn_batch *batch = args->batch;
    const int64_t keys = launch != NULL ? launch->schedule->num_keys : 0;
    if (batch != NULL) {
        add(object, ",\"phase\":\"%s\",\"requests\":%d,\"keys\":%" PRId64,
            args->phase == ATTN_PHASE_DECODE ? "decode" : "prefill", batch->num_reqs, keys);
    }
    const int64_t row = args->k_cache != NULL ? layer_row_bytes(args->layer, false) : 0;
    const int64_t row_v = args->v_cache != NULL ? layer_row_bytes(args->layer, true) : 0;
    return keys * args->layer->num_kv_heads * (row + row_v);
}

/* Rows of a write, and their bytes in the cache; an MLA layer brings them in its own extension. */
static int64_t add_rows(struct object *object, const struct attn_write_kv_args *args)
{
    add(object, ",\"rows\":%" PRId64, args->num_slots);
    const int64_t row = layer_row_bytes(args->layer, false);
    const int64_t row_v = args->v_cache != NULL ? layer_row_bytes(args->layer, true) : 0;
    return args->num_slots * args->layer->num_kv_heads * (row + row_v);
}

static int64_t copied(const struct attn_copy_blocks_args *args)
{
    int64_t bytes = 0;
    for (int32_t i = 0; i < args->num_copies; i++) {
        bytes += ((const struct attn_block_copy *)((const char *)args->copies +
                                                   (size_t)i * (size_t)args->copy_stride))
                     ->bytes;
    }
    return 2 * bytes * args->num_pairs;
}

/* A kernel between two readings of the clocks. `bytes`: those of no tensor. */
#define TRACED_AS(slot, params, values, bytes, ...)                                                \
    static attn_status traced_##slot params                                                        \
    {                                                                                              \
        struct traced *t = find(args->instance);                                                   \
        if (t == NULL || running_plan() == NULL) {                                                 \
            return t != NULL ? t->kernels.slot values                                              \
                             : error_set_text(error, ATTN_ERROR_ORDER, "instance",                 \
                                              "the instance's model is gone");                     \
        }                                                                                          \
        const struct named_tensor tensors[] = {__VA_ARGS__};                                       \
        struct object object = {.length = 0};                                                      \
        const struct span span = begin_operation(t, #slot, args, args->stream);                    \
        const attn_status status = t->kernels.slot values;                                         \
        add(&object, "\"backend\":\"%s\"", t->backend);                                            \
        add_tensors(&object, tensors, (int32_t)(sizeof tensors / sizeof *tensors), bytes);         \
        end_operation(&span, &object, args->stream);                                               \
        return status;                                                                             \
    }
#define TRACED(slot, type, bytes, ...)                                                             \
    TRACED_AS(slot, (const struct type *args, struct attn_error *error), (args, error), bytes,     \
              __VA_ARGS__)
#define ATTEND(slot)                                                                               \
    TRACED(slot, attn_attend_args, add_attend(&object, args), {"q[", args->q}, {"k[", args->k},    \
           {"v[", args->v}, {"out[", args->out}, {"lse[", args->lse})
ATTEND(attend)
ATTEND(attend_mla)
ATTEND(attend_mla_sparse)
ATTEND(recurrent)
ATTEND(update_block_table)
TRACED_AS(schedule, (const struct attn_attend_args *args, int32_t mode, struct attn_error *error),
          (args, mode, error), add_attend(&object, args), {"", NULL})
TRACED(write_kv, attn_write_kv_args, add_rows(&object, args), {"k[", args->k}, {"v[", args->v})
TRACED(rope_write_kv, attn_write_kv_args, add_rows(&object, args), {"q[", args->q}, {"k[", args->k},
       {"v[", args->v})
TRACED(merge_states, attn_merge_states_args, 0, {"prefix[", args->prefix_out},
       {"suffix[", args->suffix_out}, {"out[", args->out})
TRACED(gather_kv, attn_gather_kv_args, 0, {"out[", args->out})
TRACED(batched_gemm, attn_batched_gemm_args, 0, {"a[", args->a}, {"w[", args->w},
       {"out[", args->out})
TRACED(quantize, attn_quantize_args, 0, {"x[", args->x}, {"out[", args->out})
TRACED(amax, attn_amax_args, 0, {"x[", args->x})
TRACED(copy, attn_copy_args, 2 * (int64_t)args->bytes, {"", NULL})
TRACED(fill, attn_fill_args, args->rows *(int64_t)args->row_bytes, {"", NULL})
TRACED(copy_blocks, attn_copy_blocks_args, copied(args), {"", NULL})
TRACED(make_block_table, attn_block_table_args, 0, {"", NULL})

static void take_instance(attn_runtime *runtime, struct instance *instance)
{
    struct attn_kernels *k = &instance->kernels;
    int32_t i = 0;
    const struct instance *none = NULL;
    pthread_once(&running_once, make_running);
    while (i < MOST_TRACED && !atomic_compare_exchange_strong(&all[i].owner, &none, instance)) {
        none = NULL;
        i++;
    }
    if (i == MOST_TRACED) {
        return;
    }
    struct traced *t = &all[i];
    char name[256], device[DEVICE_TEXT_SIZE];
    lock_init(&t->lock);
    t->kernels = *k;
    t->runtime = runtime;
    t->backend = runtime->backends[instance->backend].full_name;
    t->num_pending = 0;
    t->anchor = NULL;
    memset(t->pending, 0, sizeof t->pending);
    atomic_store(&t->handle, instance->handle);
    if (k->record_event != NULL) {
        snprintf(name, sizeof name, "%s on %s", t->backend,
                 device_text(instance->caps->device, device));
        trace_name_track(runtime, TRACE_DEVICES + i, name);
    }
#define TAKE(slot) k->slot = k->slot != NULL ? traced_##slot : NULL
    TAKE(attend);
    TAKE(attend_mla);
    TAKE(attend_mla_sparse);
    TAKE(recurrent);
    TAKE(schedule);
    TAKE(update_block_table);
    TAKE(write_kv);
    TAKE(rope_write_kv);
    TAKE(merge_states);
    TAKE(gather_kv);
    TAKE(batched_gemm);
    TAKE(quantize);
    TAKE(amax);
    TAKE(copy);
    TAKE(fill);
    TAKE(copy_blocks);
    TAKE(make_block_table);
#undef TAKE
}

static void give_event(const struct traced *t, void *event)
{
    const struct attn_event_args args = event_args(t, event, NULL);
    if (event != NULL) {
        t->kernels.destroy_event(&args, NULL);
    }
}

static void give_instances(const attn_model *model)
{
    for (int32_t i = 0; i < MOST_TRACED; i++) {
        for (int32_t n = 0; n < model->num_instances; n++) {
            struct traced *t = &all[i];
            if (atomic_load(&t->owner) != &model->instances[n]) {
                continue;
            }
            for (int32_t e = 0; e < MOST_PENDING; e++) {
                give_event(t, t->pending[e].events[0]);
                give_event(t, t->pending[e].events[1]);
            }
            give_event(t, t->anchor);
            atomic_store(&t->handle, NULL);
            lock_finish(&t->lock);
            atomic_store(&t->owner, NULL);
        }
    }
}

int64_t trace_operation(const char *name)
{
    const attn_plan *plan = running_plan();
    return plan != NULL ? trace_begin(&plan->model->runtime->settings.trace, name) : 0;
}

void trace_operation_end(const char *name, int64_t begin)
{
    if (begin != 0) {
        trace_end(running_plan()->model->runtime, name, begin, "{}");
    }
}

/* ---- the calls of an engine ---- */

static bool is_traced(const attn_runtime *runtime)
{
    return runtime != NULL && runtime->settings.trace.path != NULL;
}

static attn_status run_traced(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct attn_error *error)
{
    attn_runtime *runtime = plan->model->runtime;
    const attn_layer *layer = step->layer;
    const struct assignment_phase *phases = plan->model->assignment->layers[layer->index].phases;
    struct object args = {.length = 0};
    char name[256];
    plan->traced_step = step;
    set_running(plan);
    const int64_t begin = trace_begin(&runtime->settings.trace, "run");
    const attn_status status = step->untraced(plan, step, io, error);
    add(&args, "\"layer\":\"%s\",\"index\":%d,\"step\":%" PRIu64 ",\"tokens\":%d,\"status\":%d",
        trace_quote(name, sizeof name, layer->desc->name), layer->index, plan->serial,
        plan->num_tokens, status);
    add(&args, ",\"prefill\":\"%s\",\"decode\":\"%s\",\"captured\":%s",
        phases[ATTN_PHASE_PREFILL].choice.name, phases[ATTN_PHASE_DECODE].choice.name,
        plan->capturing ? "true" : "false");
    trace_end(runtime, "run", begin, finish(&args));
    plan->traced_step = NULL;
    set_running(NULL);
    return status;
}

/* Keys of a schedule's requests that its layers see; host copies end with plan_batch. */
static void count_keys(struct schedule *schedule)
{
    const struct attn_batch *b = schedule->batch;
    const struct attn_layer_desc *layer = schedule->args->layer;
    schedule->num_keys = 0;
    for (int32_t r = 0; b != NULL && b->seq_lens_host != NULL && r < b->num_reqs; r++) {
        const int64_t queries =
            b->query_start_loc_host[r + 1] - (int64_t)b->query_start_loc_host[r];
        const int64_t seen =
            layer->has_window && layer->window_left >= 0 ? layer->window_left + queries : INT64_MAX;
        schedule->num_keys += queries == 0                 ? 0
                              : b->seq_lens_host[r] < seen ? b->seq_lens_host[r]
                                                           : seen;
    }
}

/* Begins a plan that is traced; 0: it is not. */
static int64_t begin_plan(attn_plan *plan, bool captures, const char *name)
{
    const attn_runtime *runtime = plan != NULL ? plan->model->runtime : NULL;
    if (!is_traced(runtime)) {
        return 0;
    }
    if (!captures) {
        drain_model(plan->model);
    }
    if (plan->num_traced++ % runtime->settings.trace.every != 0) {
        return 0;
    }
    set_running(plan);
    return trace_begin(&runtime->settings.trace, name);
}

static attn_status end_plan(attn_plan *plan, const char *name, int64_t begin, attn_status status)
{
    struct object args = {.length = 0};
    set_running(NULL);
    if (begin == 0) {
        return status;
    }
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        count_keys(&plan->schedules[i]);
    }
    for (int32_t i = 0; i < plan->num_steps; i++) {
        struct step *step = &plan->steps[i];
        step->untraced = step->enter != run_traced ? step->enter : step->untraced;
        step->enter = run_traced;
    }
    add(&args, "\"step\":%" PRIu64 ",\"requests\":%d,\"decodes\":%d,\"tokens\":%d,\"status\":%d",
        plan->serial, plan->given.num_reqs, plan->split.num_decodes, plan->num_tokens, status);
    trace_end(plan->model->runtime, name, begin, finish(&args));
    return status;
}

attn_status trace_plan_batch(attn_plan *plan, const struct attn_batch *batch, void *stream,
                             struct attn_error *error)
{
    const int64_t begin = begin_plan(plan, false, "plan_batch");
    return end_plan(plan, "plan_batch", begin, plan_batch(plan, batch, stream, error));
}

attn_status trace_plan_graph(attn_plan *plan, int32_t mode, const struct attn_batch *batch,
                             void *stream, struct attn_error *error)
{
    const bool captures = mode == ATTN_PLAN_CAPTURE || mode == ATTN_PLAN_IN_GRAPH;
    const int64_t begin = begin_plan(plan, captures, "plan_graph");
    return end_plan(plan, "plan_graph", begin, plan_graph(plan, mode, batch, stream, error));
}

attn_status trace_plan_update_block_table(attn_plan *plan, const attn_plan *source,
                                          const struct attn_batch *tables, void *stream,
                                          struct attn_error *error)
{
    const int64_t begin = begin_plan(plan, false, "plan_update_block_table");
    return end_plan(plan, "plan_update_block_table", begin,
                    plan_update_block_table(plan, source, tables, stream, error));
}

attn_status trace_plan_create(attn_model *model, int32_t group,
                              const struct attn_plan_options *options, attn_plan **plan,
                              struct attn_error *error)
{
    attn_runtime *runtime = model != NULL ? model->runtime : NULL;
    if (!is_traced(runtime)) {
        return plan_create(model, group, options, plan, error);
    }
    struct object args = {.length = 0};
    const int64_t begin = trace_begin(&runtime->settings.trace, "plan_create");
    const attn_status status = plan_create(model, group, options, plan, error);
    add(&args, "\"group\":%d,\"status\":%d", group, status);
    trace_end(runtime, "plan_create", begin, finish(&args));
    return status;
}

attn_status trace_select(attn_runtime *runtime, const struct attn_select_options *options,
                         const struct attn_layer_desc *const *layers, int32_t num_layers,
                         attn_assignment **assignment, struct attn_error *error)
{
    if (!is_traced(runtime)) {
        return select_layers(runtime, options, layers, num_layers, assignment, error);
    }
    struct object args = {.length = 0};
    const int64_t begin = trace_begin(&runtime->settings.trace, "select");
    const attn_status status =
        select_layers(runtime, options, layers, num_layers, assignment, error);
    add(&args, "\"layers\":%d,\"status\":%d", num_layers, status);
    trace_end(runtime, "select", begin, finish(&args));
    return status;
}

attn_status trace_model_create(attn_runtime *runtime, const attn_assignment *assignment,
                               const struct attn_model_options *options, attn_model **model,
                               struct attn_error *error)
{
    if (!is_traced(runtime)) {
        return model_create(runtime, assignment, options, model, error);
    }
    struct object args = {.length = 0};
    const int64_t begin = trace_begin(&runtime->settings.trace, "bind");
    const attn_status status = model_create(runtime, assignment, options, model, error);
    for (int32_t i = 0; status == ATTN_OK && i < (*model)->num_instances; i++) {
        take_instance(runtime, &(*model)->instances[i]);
    }
    add(&args, "\"layers\":%d,\"status\":%d", status == ATTN_OK ? (*model)->num_layers : 0, status);
    trace_end(runtime, "bind", begin, finish(&args));
    return status;
}

void trace_model_destroy(attn_model *model)
{
    if (model != NULL && is_traced(model->runtime)) {
        drain_model(model);
        give_instances(model);
    }
    model_destroy(model);
}
