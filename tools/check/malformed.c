/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed arguments, one at a time, where everything else is right: an error that names the
 * field, and afterwards the step as it should be. */
#include <stdio.h>
#include <string.h>

#include "engine.h"
#include "hold.h"
#include "negative.h"

/* The arguments of one step, to be spoilt. */
struct spoilt {
    struct engine *engine;
    const struct problem *problem;
    struct side *side;
    struct attn_step_io io;
    struct attn_tensor tensor;
    int64_t shape[3], strides[3];
    struct attn_error error;
};

typedef attn_status spoil(struct spoilt *s);

/* A copy of a tensor that may be changed. */
static struct attn_tensor *copy_of(struct spoilt *s, const struct attn_tensor *tensor)
{
    memcpy(s->shape, tensor->shape, (size_t)tensor->ndim * sizeof *s->shape);
    memcpy(s->strides, tensor->strides, (size_t)tensor->ndim * sizeof *s->strides);
    s->tensor = *tensor;
    s->tensor.shape = s->shape;
    s->tensor.strides = s->strides;
    return &s->tensor;
}

static attn_status run(struct spoilt *s)
{
    const struct engine *e = s->engine;
    return e->core->api->run(e->plans[0].plan, e->layer, &s->io, &s->error);
}

static attn_status q_null(struct spoilt *s)
{
    s->io.q = NULL;
    return run(s);
}

static attn_status q_heads(struct spoilt *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->shape[1]++;
    s->io.q = q;
    return run(s);
}

static attn_status q_dtype(struct spoilt *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->dtype = (struct attn_dtype){ATTN_CODE_BOOL, 8, 1};
    s->io.q = q;
    return run(s);
}

static attn_status q_rows(struct spoilt *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->shape[0] = s->problem->num_actual_tokens - 1;
    s->io.q = q;
    return run(s);
}

static attn_status q_stride(struct spoilt *s)
{
    struct attn_tensor *q = copy_of(s, s->io.q);
    q->strides[2] = 2;
    s->io.q = q;
    return run(s);
}

static attn_status k_null(struct spoilt *s)
{
    s->io.k = NULL;
    return run(s);
}

static attn_status v_size(struct spoilt *s)
{
    struct attn_tensor *v = copy_of(s, s->io.v);
    v->shape[2] += 8;
    s->io.v = v;
    return run(s);
}

static attn_status out_null(struct spoilt *s)
{
    s->io.out = NULL;
    return run(s);
}

static attn_status out_dims(struct spoilt *s)
{
    struct attn_tensor *out = copy_of(s, s->io.out);
    out->ndim = 2;
    s->io.out = out;
    return run(s);
}

static attn_status lse_shape(struct spoilt *s)
{
    struct attn_tensor *lse = copy_of(s, &s->side->binding.lse);
    lse->shape[0]--;
    s->io.lse = lse;
    return run(s);
}

static attn_status io_size(struct spoilt *s)
{
    s->io.struct_size = 8;
    return run(s);
}

static attn_status plan(struct spoilt *s, const struct attn_batch *batch)
{
    const struct engine *e = s->engine;
    return e->core->api->plan(e->plans[0].plan, batch, s->side->stream, &s->error);
}

static attn_status starts_null(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.query_start_loc_host = NULL;
    return plan(s, &batch);
}

static attn_status starts_decrease(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    int32_t starts[PROBLEM_MAX_REQS + 1];
    memcpy(starts, batch.query_start_loc_host, (size_t)(batch.num_reqs + 1) * sizeof *starts);
    starts[1] = starts[2] + 1;
    batch.query_start_loc_host = starts;
    return plan(s, &batch);
}

static attn_status table_null(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.block_table = NULL;
    return plan(s, &batch);
}

static attn_status slots_null(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.slot_mapping = NULL;
    return plan(s, &batch);
}

static attn_status lens_short(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    int32_t lens[PROBLEM_MAX_REQS];
    memcpy(lens, batch.seq_lens_host, (size_t)batch.num_reqs * sizeof *lens);
    lens[batch.num_reqs - 1] = -3;
    batch.seq_lens_host = lens;
    return plan(s, &batch);
}

static attn_status reqs_over(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.num_reqs = 1000;
    return plan(s, &batch);
}

static attn_status tokens_over(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.num_tokens = 1 << 20;
    return plan(s, &batch);
}

static attn_status mode_unknown(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.mode = 77;
    return plan(s, &batch);
}

static attn_status causal_unknown(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    batch.causal = 5;
    return plan(s, &batch);
}

static attn_status extension_unknown(struct spoilt *s)
{
    struct attn_batch batch = s->side->binding.batch;
    const struct attn_ext unknown = {0xfff, 0, sizeof unknown, NULL};
    batch.next = &unknown;
    return plan(s, &batch);
}

static attn_status workspace_small(struct spoilt *s)
{
    const struct engine *e = s->engine;
    const struct engine_plan *p = &e->plans[0];
    return e->core->api->plan_bind_workspace(p->plan, p->workspace, p->bytes - 1, &s->error);
}

static attn_status workspace_null(struct spoilt *s)
{
    const struct engine *e = s->engine;
    return e->core->api->plan_bind_workspace(e->plans[0].plan, NULL, e->plans[0].bytes, &s->error);
}

static attn_status workspace_odd(struct spoilt *s)
{
    const struct engine *e = s->engine;
    const struct engine_plan *p = &e->plans[0];
    return e->core->api->plan_bind_workspace(p->plan, p->workspace + 8, p->bytes, &s->error);
}

static attn_status bind(struct spoilt *s, const struct attn_kv_view *k)
{
    const struct engine *e = s->engine;
    return e->core->api->layer_bind_kv(e->layer, k, &s->side->binding.v_cache, &s->error);
}

static attn_status view_null(struct spoilt *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.data = NULL;
    return bind(s, &k);
}

static attn_status view_heads(struct spoilt *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.num_heads++;
    return bind(s, &k);
}

static attn_status view_overlaps(struct spoilt *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.stride_slot = k.stride_head = 4;
    return bind(s, &k);
}

static attn_status view_pack(struct spoilt *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.pack = k.head_size - 1;
    return bind(s, &k);
}

static attn_status limits_zero(struct spoilt *s)
{
    const struct engine *e = s->engine;
    struct attn_plan_options options = {.struct_size = sizeof options};
    attn_plan *made = NULL;
    options.limits.struct_size = sizeof options.limits;
    return e->core->api->plan_create(e->model, 0, &options, &made, &s->error);
}

static attn_status select_layer(struct spoilt *s, const struct attn_layer_desc *layer)
{
    attn_assignment *assignment = NULL;
    attn_status status = core_select(s->engine->core, layer, &assignment, &s->error);
    s->engine->core->api->assignment_destroy(assignment);
    return status;
}

static attn_status heads_ragged(struct spoilt *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.num_kv_heads = layer.num_q_heads + 1;
    return select_layer(s, &layer);
}

static attn_status scale_zero(struct spoilt *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.scale = 0;
    return select_layer(s, &layer);
}

static attn_status kind_unknown(struct spoilt *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.kind = 99;
    return select_layer(s, &layer);
}

static attn_status name_empty(struct spoilt *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.name = "";
    return select_layer(s, &layer);
}

static const struct malformed {
    const char *name;
    spoil *spoil;
    const char *field;
} malformed[] = {
    {"q_null", q_null, "q"},
    {"q_heads", q_heads, "q"},
    {"q_dtype", q_dtype, "q"},
    {"q_rows", q_rows, "q"},
    {"q_stride", q_stride, "q"},
    {"k_null", k_null, "k"},
    {"v_head_size", v_size, "v"},
    {"out_null", out_null, "out"},
    {"out_dimensions", out_dims, "out"},
    {"lse_shape", lse_shape, "lse"},
    {"io_struct_size", io_size, "attn_step_io"},
    {"query_start_loc_null", starts_null, "query_start_loc"},
    {"query_start_loc_decreases", starts_decrease, "query_start_loc"},
    {"block_table_null", table_null, "block_table"},
    {"slot_mapping_null", slots_null, "slot_mapping"},
    {"seq_lens_negative", lens_short, "seq_lens"},
    {"num_reqs_over_limit", reqs_over, "num_reqs"},
    {"num_tokens_over_limit", tokens_over, "num_tokens"},
    {"mode_unknown", mode_unknown, "mode"},
    {"causal_unknown", causal_unknown, "causal"},
    {"extension_unknown", extension_unknown, "attn_batch"},
    {"workspace_too_small", workspace_small, "bytes"},
    {"workspace_null", workspace_null, "workspace"},
    {"workspace_misaligned", workspace_odd, "workspace"},
    {"view_null", view_null, "data"},
    {"view_heads", view_heads, "num_heads"},
    {"view_overlaps", view_overlaps, "stride_slot"},
    {"view_pack", view_pack, "pack"},
    {"limits_zero", limits_zero, "max_num_reqs"},
    {"heads_ragged", heads_ragged, "num_q_heads"},
    {"scale_zero", scale_zero, "scale"},
    {"kind_unknown", kind_unknown, "kind"},
    {"name_empty", name_empty, "name"},
};

struct malformed_case {
    struct core *core;
    const struct case_space *space;
    struct attend_case attend_case;
    const struct malformed *malformed;
};

/* Bound and planned; then the spoilt call; then the step itself. */
static enum trial_result spoil_step(struct trial *trial, const struct malformed_case *c,
                                    struct problem *problem, const struct side *reference,
                                    struct side *tested, struct engine *engine)
{
    struct spoilt s = {.engine = engine, .problem = problem, .side = tested};
    struct attn_error *error = &s.error;
    const struct attn_api *api = c->core->api;
    const struct binding *b = &tested->binding;
    *error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = engine_bind(engine, c->core, trial->device, b, error);
    status = status == ATTN_OK ? engine_add_plan(engine, 0, problem, b, false, error) : status;
    status = status == ATTN_OK ? plan(&s, &b->batch) : status;
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "the plan", status, error);
    }
    s.io = engine_io(problem, tested);
    status = c->malformed->spoil(&s);
    if (status == ATTN_OK) {
        return trial_say(trial, TRIAL_FAILED, "was not refused");
    }
    if (strcmp(error->field, c->malformed->field) != 0 || error->message[0] == '\0') {
        return trial_say(trial, TRIAL_FAILED, "names '%s', not '%s': %.600s", error->field,
                         c->malformed->field, error->message);
    }
    status = plan(&s, &b->batch);
    const struct attn_step_io io = engine_io(problem, tested);
    status =
        status == ATTN_OK ? api->run(engine->plans[0].plan, engine->layer, &io, error) : status;
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "the step afterwards", status, error);
    }
    return hold_step(trial, problem, reference, tested);
}

static enum trial_result run_malformed(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct malformed_case *c = variant;
    const struct device host = {.device = {ATTN_DEVICE_CPU, 0}};
    struct side reference = {.device = &host}, tested = {.device = trial->device};
    struct engine engine = {.core = c->core, .device = trial->device};
    struct attn_error error = ATTN_ERROR_INIT;
    struct problem problem;
    if (!problem_init(&problem, c->space, &c->attend_case, seed)) {
        return trial_say(trial, TRIAL_FAILED, "no memory for the case");
    }
    enum trial_result result = trial_say(trial, TRIAL_FAILED, "no memory for the case");
    if (side_write_context(trial->reference, &problem, &error) == ATTN_OK &&
        side_init(&reference, trial->reference, &host, &problem) &&
        side_init(&tested, trial->tested, trial->device, &problem) &&
        side_run_reference(&reference, &problem, &error) == ATTN_OK) {
        result = spoil_step(trial, c, &problem, &reference, &tested, &engine);
    }
    engine_finish(&engine);
    side_finish(&tested);
    side_finish(&reference);
    problem_finish(&problem);
    return result;
}

void malformed_cases(const struct negative_sink *sink)
{
    static const int32_t kv_of_dtype[] = {ATTN_KV_F16, ATTN_KV_BF16, ATTN_KV_F32};
    struct malformed_case c = {.core = sink->core, .space = sink->space};
    bool found = false;
    for (int32_t dtype = ATTN_DTYPE_F32; dtype >= ATTN_DTYPE_F16 && !found; dtype--) {
        found = case_of_cache(sink->space, dtype, kv_of_dtype[dtype], &c.attend_case);
    }
    for (size_t i = 0; found && i < sizeof malformed / sizeof *malformed; i++) {
        char name[96];
        c.malformed = &malformed[i];
        snprintf(name, sizeof name, "malformed.%s", malformed[i].name);
        sink->cases->try(sink->cases->user, name, run_malformed, &c);
    }
}
