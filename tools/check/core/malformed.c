/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed arguments, one at a time, where everything else is right: an error that names the
 * field, and afterwards the step as it should be. */
#include <stdio.h>
#include <string.h>

#include "cases/hold.h"
#include "core/core_cases.h"
#include "core/engine.h"
#include "support/client.h"
#include "support/tensor.h"

/* The arguments of every call, of which one field is made wrong. */
struct arguments {
    struct attn_step_io io;
    struct shaped q, k, v, out, lse;
    struct attn_batch batch;
    int32_t starts[PROBLEM_MAX_REQS + 1], lens[PROBLEM_MAX_REQS];
    struct attn_workspace workspace;
    struct attn_kv_view view; /* of K */
    struct attn_limits limits;
    struct attn_layer_desc layer;
};

struct malformed_step {
    struct engine *engine;
    const struct problem *problem;
    const struct side *side;
    struct arguments given;
    struct attn_error error;
};

enum call { CALL_RUN, CALL_PLAN, CALL_WORKSPACE, CALL_VIEW, CALL_LIMITS, CALL_SELECT };

struct malformed {
    const char *name;
    enum call call;
    size_t offset, size; /* of the field in struct arguments */
    int64_t value;
    const void *pointer; /* in place of the value, if not NULL */
    bool adds;           /* the value to what is there */
    const char *field;   /* that the error has to name */
};
#define FEWER_ROWS INT64_MIN /* one less than the step's tokens */
#define AT(member) offsetof(struct arguments, member), sizeof(((struct arguments *)0)->member)

static const struct attn_ext unknown = {0xfff, 0, sizeof unknown, NULL};
static const struct malformed malformed[] = {
    {"q_null", CALL_RUN, AT(io.q), .field = "q"},
    {"q_heads", CALL_RUN, AT(q.shape[1]), 1, .adds = true, .field = "q"},
    {"q_dtype", CALL_RUN, AT(q.tensor.dtype.code), ATTN_CODE_BOOL, .field = "q"},
    {"q_rows", CALL_RUN, AT(q.shape[0]), FEWER_ROWS, .field = "q"},
    {"q_stride", CALL_RUN, AT(q.strides[2]), 2, .field = "q"},
    {"k_null", CALL_RUN, AT(io.k), .field = "k"},
    {"v_head_size", CALL_RUN, AT(v.shape[2]), 8, .adds = true, .field = "v"},
    {"out_null", CALL_RUN, AT(io.out), .field = "out"},
    {"out_dimensions", CALL_RUN, AT(out.tensor.ndim), 2, .field = "out"},
    {"lse_shape", CALL_RUN, AT(lse.shape[0]), -1, .adds = true, .field = "lse"},
    {"io_struct_size", CALL_RUN, AT(io.struct_size), 8, .field = "attn_step_io"},
    {"query_start_loc_null", CALL_PLAN, AT(batch.query_start_loc_host), .field = "query_start_loc"},
    {"query_start_loc_decreases", CALL_PLAN, AT(starts[1]), 1000, .adds = true,
     .field = "query_start_loc"},
    {"block_table_null", CALL_PLAN, AT(batch.block_table), .field = "block_table"},
    {"slot_mapping_null", CALL_PLAN, AT(batch.slot_mapping), .field = "slot_mapping"},
    {"seq_lens_negative", CALL_PLAN, AT(lens[0]), -3, .field = "seq_lens"},
    {"num_reqs_over_limit", CALL_PLAN, AT(batch.num_reqs), 1000, .field = "num_reqs"},
    {"num_tokens_over_limit", CALL_PLAN, AT(batch.num_tokens), 1 << 20, .field = "num_tokens"},
    {"mode_unknown", CALL_PLAN, AT(batch.mode), 77, .field = "mode"},
    {"causal_unknown", CALL_PLAN, AT(batch.causal), 5, .field = "causal"},
    {"extension_unknown", CALL_PLAN, AT(batch.next), .pointer = &unknown, .field = "attn_batch"},
    {"workspace_too_small", CALL_WORKSPACE, AT(workspace.bytes), -1, .adds = true,
     .field = "bytes"},
    {"workspace_null", CALL_WORKSPACE, AT(workspace.memory), .field = "workspace"},
    {"workspace_misaligned", CALL_WORKSPACE, AT(workspace.memory), 8, .adds = true,
     .field = "workspace"},
    {"view_null", CALL_VIEW, AT(view.data), .field = "data"},
    {"view_heads", CALL_VIEW, AT(view.num_heads), 1, .adds = true, .field = "num_heads"},
    {"view_overlaps", CALL_VIEW, AT(view.stride_block), 4, .field = "stride_slot"},
    {"view_pack", CALL_VIEW, AT(view.pack), 511, .field = "pack"}, /* divides no head size */
    {"limits_zero", CALL_LIMITS, AT(limits.max_num_reqs), .field = "max_num_reqs"},
    {"heads_ragged", CALL_SELECT, AT(layer.num_kv_heads), 4099, .field = "num_q_heads"},
    {"scale_zero", CALL_SELECT, AT(layer.scale), .field = "scale"},
    {"kind_unknown", CALL_SELECT, AT(layer.kind), 99, .field = "kind"},
    {"name_empty", CALL_SELECT, AT(layer.name), .pointer = "", .field = "name"},
};

static const struct attn_tensor *copy_tensor(struct shaped *to, const struct attn_tensor *from)
{
    shaped_set(to, from->data, ATTN_DTYPE_F32, from->ndim, from->shape, from->strides);
    to->tensor.device = from->device;
    to->tensor.dtype = from->dtype;
    to->tensor.byte_offset = from->byte_offset;
    return &to->tensor;
}

/* What is right. */
static void fill(struct malformed_step *s)
{
    struct arguments *a = &s->given;
    const struct binding *b = &s->side->binding;
    const struct engine_plan *p = &s->engine->plans[0];
    const size_t reqs = (size_t)b->batch.num_reqs;
    *a = (struct arguments){.io = engine_io(s->problem, s->side),
                            .batch = b->batch,
                            .view = b->k_cache,
                            .layer = b->layer,
                            .workspace = {.struct_size = sizeof a->workspace,
                                          .memory = p->workspace,
                                          .bytes = p->bytes},
                            .limits = {.struct_size = sizeof a->limits,
                                       .max_num_reqs = b->batch.num_reqs,
                                       .max_num_tokens = b->batch.num_tokens}};
    a->io.q = copy_tensor(&a->q, a->io.q);
    a->io.k = copy_tensor(&a->k, a->io.k);
    a->io.v = copy_tensor(&a->v, a->io.v);
    a->io.out = copy_tensor(&a->out, a->io.out);
    (void)copy_tensor(&a->lse, &b->lse);
    memcpy(a->starts, b->batch.query_start_loc_host, (reqs + 1) * sizeof *a->starts);
    memcpy(a->lens, b->batch.seq_lens_host, reqs * sizeof *a->lens);
    a->batch.query_start_loc_host = a->starts;
    a->batch.seq_lens_host = a->lens;
}

static void make_wrong(struct malformed_step *s, const struct malformed *m)
{
    char *at = (char *)&s->given + m->offset;
    int64_t value = m->value == FEWER_ROWS ? s->problem->num_actual_tokens - 1 : m->value;
    int64_t there = 0;
    if (m->adds) { /* little-endian, as every machine that the tools run on */
        memcpy(&there, at, m->size);
        value += there;
    }
    memcpy(at, m->pointer != NULL ? (const void *)&m->pointer : &value, m->size);
    if (m->offset >= offsetof(struct arguments, lse) &&
        m->offset < offsetof(struct arguments, batch)) {
        s->given.io.lse = &s->given.lse.tensor;
    }
}

static attn_status call(struct malformed_step *s, enum call call)
{
    const struct engine *e = s->engine;
    const struct attn_api *api = e->core->api;
    const struct arguments *a = &s->given;
    attn_plan *plan = NULL;
    attn_assignment *assignment = NULL;
    attn_status status = ATTN_OK;
    switch (call) {
    case CALL_RUN:
        return api->run(e->plans[0].plan, e->layer, &a->io, &s->error);
    case CALL_PLAN:
        return api->plan_batch(e->plans[0].plan, &a->batch, s->side->stream, &s->error);
    case CALL_WORKSPACE:
        return api->plan_bind_workspace(e->plans[0].plan, &a->workspace, &s->error);
    case CALL_VIEW:
        return api->layer_bind_kv(e->layer, &a->view, &s->side->binding.v_cache, &s->error);
    case CALL_LIMITS:
        status = api->plan_create(
            e->model, 0,
            &(const struct attn_plan_options){.struct_size = sizeof(struct attn_plan_options),
                                              .limits = &a->limits},
            &plan, &s->error);
        api->plan_destroy(plan);
        return status;
    default:
        status = core_select(e->core, &a->layer, &assignment, &s->error);
        api->assignment_destroy(assignment);
        return status;
    }
}

struct malformed_case {
    struct core *core;
    const struct case_space *space;
    struct attend_case attend_case;
    const struct malformed *malformed;
};

/* Bound and planned; then the malformed call; then the step itself. */
static enum trial_result try_malformed(struct trial *trial, const struct malformed_case *c,
                                       struct problem *problem, const struct side *reference,
                                       struct side *tested, struct engine *engine)
{
    struct malformed_step s = {.engine = engine, .problem = problem, .side = tested};
    struct attn_error *error = &s.error;
    const struct binding *b = &tested->binding;
    *error = (struct attn_error)ATTN_ERROR_INIT;
    attn_status status = engine_bind(engine, c->core, trial->device, b, error);
    status = status == ATTN_OK ? engine_add_plan(engine, 0, problem, b, false, error) : status;
    fill(&s);
    status = status == ATTN_OK ? call(&s, CALL_PLAN) : status;
    if (status != ATTN_OK) {
        return trial_call_failed(trial, "the plan", status, error);
    }
    make_wrong(&s, c->malformed);
    status = call(&s, c->malformed->call);
    if (status == ATTN_OK) {
        return trial_say(trial, TRIAL_FAILED, "was not refused");
    }
    if (strcmp(error->field, c->malformed->field) != 0 || error->message[0] == '\0') {
        return trial_say(trial, TRIAL_FAILED, "names '%s', not '%s': %.600s", error->field,
                         c->malformed->field, error->message);
    }
    fill(&s);
    status = call(&s, CALL_PLAN);
    status = status == ATTN_OK ? call(&s, CALL_RUN) : status;
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
        result = try_malformed(trial, c, &problem, &reference, &tested, &engine);
    }
    engine_finish(&engine);
    side_finish(&tested);
    side_finish(&reference);
    problem_finish(&problem);
    return result;
}

void malformed_cases(const struct core_sink *sink)
{
    struct malformed_case c = {.core = sink->core, .space = sink->space};
    bool found = false;
    for (int32_t dtype = ATTN_DTYPE_F32; dtype >= ATTN_DTYPE_F16 && !found; dtype--) {
        found = case_of_cache(sink->space, dtype, dtype, &c.attend_case);
    }
    for (size_t i = 0; found && i < sizeof malformed / sizeof *malformed; i++) {
        char name[96];
        c.malformed = &malformed[i];
        snprintf(name, sizeof name, "malformed.%s", c.malformed->name);
        sink->cases->try(sink->cases->user, name, run_malformed, &c);
    }
}
