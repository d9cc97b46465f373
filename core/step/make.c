/* SPDX-License-Identifier: Apache-2.0 */
/* Making one layer's step of a plan: all calls that it may need, prepared, and what its tensors
 * have to be. */
#include "select/layer_check.h"
#include "step/gdn.h"
#include "step/mla.h"
#include "step/parallel.h"
#include "step/schedule.h"

/* bytes of one kernel; sums of them stay far from overflow */
#define MAX_SCHEDULE ((size_t)1 << 40)

static step_kernel *kernel_of(const struct instance *instance, int32_t kind)
{
    switch (kind) {
    case ATTN_LAYER_MLA:
        return instance->kernels.attend_mla;
    case ATTN_LAYER_MLA_SPARSE:
        return instance->kernels.attend_mla_sparse;
    case ATTN_LAYER_GDN:
        return instance->kernels.gated_delta;
    default:
        return instance->kernels.attend;
    }
}

/* Parts beside the layer itself run on prefill's backend: all tokens against a few fixed keys. */
static bool needs_part(const attn_layer *layer, int32_t phase, int32_t part)
{
    const struct attn_layer_desc *l = layer->desc;
    const struct instance *instance = layer->served[phase].instance;
    const uint64_t features = ATTN_FEATURE_LSE | ATTN_FEATURE_PAGED_KV;
    bool per_head = layer->served[ATTN_PHASE_PREFILL].composed & ATTN_COMPOSE_MLA_PREFILL;
    if (layer_is_spread(layer) && layer->selected->mla == NULL) {
        return part == PART_NEW || part == PART_CONTEXT;
    }
    if (part == PART_MAIN) {
        return phase == ATTN_PHASE_DECODE || !per_head;
    }
    if (phase != ATTN_PHASE_PREFILL) {
        return false;
    }
    if (part == PART_NEW || part == PART_CONTEXT) {
        return per_head;
    }
    if (part == PART_SINK) {
        return layer->served[phase].composed & ATTN_COMPOSE_STATIC_SINK;
    }
    return l->kind == ATTN_LAYER_DECODER && l->causal && !l->has_window && l->chunk_size == 0 &&
           instance->kernels.merge_states != NULL &&
           (instance->caps->features & features) == features &&
           instance->caps->terms & ATTN_TERM_BIDIRECTIONAL;
}

/* The schedule of a layer's plan group for one part, made when its first layer comes. */
static attn_status find_schedule(attn_plan *plan, attn_layer *layer, int32_t phase, int32_t part,
                                 struct launch *launch, struct attn_error *error)
{
    const struct served *served = &layer->served[phase];
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        struct schedule *s = &plan->schedules[i];
        if (s->plan_group == served->plan_group && s->phase == phase && s->part == part) {
            launch->schedule = s;
            return ATTN_OK;
        }
    }
    struct schedule *schedule = &plan->schedules[plan->num_schedules];
    *schedule = (struct schedule){.plan_group = served->plan_group,
                                  .phase = phase,
                                  .part = part,
                                  .view = -1,
                                  .args = &launch->args,
                                  .instance = served->instance};
    if (served->instance->kernels.plan_size != NULL) {
        struct attn_plan_size size = {.struct_size = sizeof size};
        struct attn_error why = ATTN_ERROR_INIT;
        const struct attn_limits limits = parallel_limits(plan, layer, part);
        attn_status status = served->instance->kernels.plan_size(
            served->instance->handle, served->states[part], &limits, &size, &why);
        if (status != ATTN_OK) {
            return error_relay(error, status, &why);
        }
        if (size.host_bytes > MAX_SCHEDULE || size.device_bytes > MAX_SCHEDULE) {
            return error_set(
                error, ATTN_ERROR_PLUGIN, "plan_size",
                "%s asks for %zu bytes on the host and %zu on the device; %zu are the most",
                served->instance->caps->name, size.host_bytes, size.device_bytes, MAX_SCHEDULE);
        }
        schedule->host_bytes = size.host_bytes;
        schedule->device_bytes = size.device_bytes;
    }
    if (schedule->host_bytes > 0) {
        schedule->host = runtime_alloc(plan->model->runtime, schedule->host_bytes);
        if (schedule->host == NULL) {
            return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan",
                             "no memory for %zu bytes of schedule", schedule->host_bytes);
        }
    }
    plan->num_schedules++;
    launch->schedule = schedule;
    return ATTN_OK;
}

static attn_status make_launch(attn_plan *plan, struct step *step, int32_t phase, int32_t part,
                               struct attn_error *error)
{
    attn_layer *layer = step->layer;
    struct served *served = &layer->served[phase];
    struct launch *launch = &step->launches[phase][part];
    attn_layer *owner = layer->owner;
    attn_status status = layer_prepare(layer, phase, part, error);
    if (status != ATTN_OK) {
        return status;
    }
    launch->kernel =
        kernel_of(served->instance, part == PART_MAIN ? layer->desc->kind : ATTN_LAYER_DECODER);
    launch->args = (struct attn_attend_args){.struct_size = sizeof launch->args,
                                             .instance = served->instance->handle,
                                             .state = served->states[part],
                                             .layer = &layer->parts[part],
                                             .params = &layer->part_params[part],
                                             .phase = phase};
    launch->args.flags = ATTN_RUN_NO_WRITE; /* but where plan() finds that it writes */
    bool gathered = layer->selected->mla != NULL && part == PART_CONTEXT;
    if (part == PART_SINK) {
        launch->args.k = layer->params->params.sink_k;
        launch->args.v = layer->params->params.sink_v;
    } else if (owner->k_cache.data != NULL && part != PART_NEW && !gathered) {
        launch->args.k_cache = &owner->k_cache;
        launch->args.v_cache = owner->has_v_cache ? &owner->v_cache : NULL;
    }
    status = find_schedule(plan, layer, phase, part, launch, error);
    if (status == ATTN_OK) {
        launch->args.plan_host = launch->schedule->host;
    }
    return status;
}

/* [T, heads, head_size] of a dtype. */
static struct rows rows_of(int32_t dtype, int32_t heads, int32_t head_size)
{
    static const struct attn_dtype dtypes[ATTN_DTYPE_COUNT] = {
        {ATTN_CODE_FLOAT, 16, 1},      {ATTN_CODE_BFLOAT, 16, 1},
        {ATTN_CODE_FLOAT, 32, 1},      {ATTN_CODE_FLOAT8_E4M3FN, 8, 1},
        {ATTN_CODE_FLOAT8_E5M2, 8, 1}, {ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1},
        {ATTN_CODE_INT, 8, 1}};
    const struct attn_tensor tensor = {.ndim = 3, .dtype = dtypes[dtype]};
    return (struct rows){tensor_kind(&tensor), heads, head_size};
}

static void describe_tensors(struct step *step)
{
    const struct attn_layer_desc *l = step->layer->desc;
    const struct instance *prefill = step->layer->served[ATTN_PHASE_PREFILL].instance;
    const struct instance *decode = step->layer->served[ATTN_PHASE_DECODE].instance;
    bool quantized_q = l->q_scale_form != ATTN_SCALE_NONE;
    uint32_t composed = step->layer->served[0].composed | step->layer->served[1].composed;
    step->q = rows_of(quantized_q ? l->q_dtype : l->dtype, l->num_q_heads, l->head_size);
    step->k = rows_of(l->dtype, l->num_kv_heads, l->head_size);
    step->v = rows_of(l->dtype, l->num_kv_heads, l->head_size_v);
    step->out = rows_of(l->dtype, l->num_q_heads, l->head_size_v);
    step->quantizes = composed & ATTN_COMPOSE_OUTPUT_QUANT;
    step->plain_checks = step->layer->selected->mla == NULL && step->layer->selected->gdn == NULL;
    step->keys_are_inputs =
        !layer_has_cache(l) || (layer_is_spread(step->layer) && step->layer->selected->mla == NULL);
    step->writes = layer_has_cache(l) && step->layer->owner == step->layer &&
                   step->layer->selected->gdn == NULL;
    step->merge = prefill->kernels.merge_states;
    /* The prefill of MLA and that of a spread cache attend keys beside the cache: rows are written
     * apart. */
    bool may_fuse = step->writes && step->layer->selected->mla == NULL &&
                    !layer_is_spread(step->layer) && !layer_splits_queries(step->layer);
    step->fused_write = may_fuse && prefill->caps->features & ATTN_FEATURE_FUSED_WRITE &&
                        decode->caps->features & ATTN_FEATURE_FUSED_WRITE;
    step->fused_decode = may_fuse && decode->caps->decode_write_kv_dtypes >> l->kv_dtype & 1;
}

attn_status step_make(attn_plan *plan, attn_layer *layer, struct attn_error *error)
{
    struct step *step = &plan->steps[layer->slot];
    attn_layer *owner = layer->owner;
    const struct attn_layer_desc *l = layer->desc;
    const struct instance *prefill = layer->served[ATTN_PHASE_PREFILL].instance;
    attn_status status = ATTN_OK;
    step->layer = layer;
    if (layer_has_cache(l) && owner->k_cache.data == NULL) {
        return error_set(error, ATTN_ERROR_ORDER, "layer_bind_kv", "layer '%s' has no %s bound",
                         owner->desc->name, owner->selected->gdn != NULL ? "state" : "cache");
    }
    bool scales = layer_is_quantized_encoder(layer);
    bool weights = scales || layer->selected->gdn != NULL ||
                   (layer->selected->mla != NULL && layer->selected->mla->absorb_in_core);
    if ((l->has_sinks || l->alibi || l->sink_len > 0 || weights) && layer->params == NULL) {
        return error_set(error, ATTN_ERROR_ORDER, "layer_bind_params",
                         "layer '%s' has %s and no parameters bound", l->name,
                         scales    ? "scales of its inputs"
                         : weights ? "weights"
                                   : "sinks, ALiBi or a static sink");
    }
    describe_tensors(step);
    if (layer->selected->mla != NULL) {
        mla_describe(step);
    }
    if (layer->selected->gdn != NULL) {
        gdn_describe(step);
    }
    for (int32_t phase = 0; phase < ATTN_PHASE_COUNT && status == ATTN_OK; phase++) {
        for (int32_t part = 0; part < PART_COUNT && status == ATTN_OK; part++) {
            if (needs_part(layer, phase, part)) {
                status = make_launch(plan, step, phase, part, error);
            }
        }
    }
    if (step->writes) {
        step->write_kv = prefill->kernels.write_kv;
    }
    step->write =
        (struct attn_write_kv_args){.struct_size = sizeof step->write,
                                    .instance = prefill->handle,
                                    .layer = &layer->parts[PART_MAIN],
                                    .params = &layer->part_params[PART_MAIN],
                                    .k_cache = &layer->k_cache,
                                    .v_cache = layer->has_v_cache ? &layer->v_cache : NULL};
    return status;
}
