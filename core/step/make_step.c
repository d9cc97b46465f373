/* SPDX-License-Identifier: Apache-2.0 */
/* Making one layer's step of a plan: all calls that it may need, prepared, and what its tensors
 * have to be. */
#include "select/names.h"
#include "step/plan_state.h"

/* bytes of one kernel; sums of them stay far from overflow */
#define MAX_SCHEDULE ((size_t)1 << 40)

/* The schedule of a layer's plan group for one part, made when its first layer comes. */
static attn_status find_schedule(attn_plan *plan, attn_layer *layer, int32_t phase, int32_t part,
                                 struct launch *launch, struct attn_error *error)
{
    const struct served *served = &layer->served[phase];
    for (int32_t i = 0; i < plan->num_schedules; i++) {
        struct plan_schedule *s = &plan->schedules[i];
        if (s->schedule_group == served->schedule_group && s->part == part) {
            launch->schedule = s;
            return ATTN_OK;
        }
    }
    struct plan_schedule *schedule = &plan->schedules[plan->num_schedules];
    *schedule = (struct plan_schedule){.schedule_group = served->schedule_group,
                                       .part = part,
                                       .args = &launch->args,
                                       .instance = served->instance,
                                       .size = {.struct_size = sizeof schedule->size}};
    struct attn_schedule_size *size = &schedule->size;
    plan->num_schedules++; /* from here on plan_destroy drops what it has */
    struct attn_schedule_size_args args =
        ABI_ARGS(.instance = served->instance->handle, .prepared = served->prepared[part],
                 .limits = &plan->part_limits[part]);
    struct attn_error why = ATTN_ERROR_INIT;
    if (served->instance->kernels.create_plan_state != NULL) {
        attn_status status =
            served->instance->kernels.create_plan_state(&args, &schedule->state, &why);
        if (status != ATTN_OK) {
            schedule->state = NULL;
            return error_relay(error, status, &why);
        }
        args.plan_state = schedule->state;
    }
    if (served->instance->kernels.schedule_size != NULL) {
        TRY(error_relay(error, served->instance->kernels.schedule_size(&args, size, &why), &why));
        ERROR_IF(size->host_bytes > MAX_SCHEDULE || size->device_bytes > MAX_SCHEDULE ||
                     size->scratch_bytes > MAX_SCHEDULE,
                 ATTN_ERROR_PLUGIN, "schedule_size",
                 "%s asks for %zu bytes on the host, %zu on the device and %zu of scratch; %zu are "
                 "the most",
                 served->instance->caps->name, size->host_bytes, size->device_bytes,
                 size->scratch_bytes, MAX_SCHEDULE);
    }
    schedule->host = runtime_alloc(plan->model->runtime, size->host_bytes);
    NO_MEMORY_IF(schedule->host == NULL && size->host_bytes > 0, "plan", "%zu bytes of schedule",
                 size->host_bytes);
    launch->schedule = schedule;
    return ATTN_OK;
}

/* The call as it is without a composition, but for its kernel. */
static void begin_launch(struct step *step, int32_t phase, int32_t part)
{
    attn_layer *layer = step->layer, *owner = layer->owner;
    struct attn_attend_args *args = &step->launches[phase][part].args;
    *args = (struct attn_attend_args){.struct_size = sizeof *args,
                                      .instance = layer->served[phase].instance->handle,
                                      .layer = &layer->parts[part],
                                      .params = &layer->part_params[part],
                                      .phase = phase};
    args->flags = ATTN_RUN_NO_WRITE; /* but where plan_batch finds that it writes */
    if (owner->k_cache.data != NULL && part != PART_NEW) {
        args->k_cache = &owner->k_cache;
        args->v_cache = owner->num_own == 2 ? &owner->v_cache : NULL;
        args->caches = owner->caches;
        args->num_caches = owner->num_further;
        args->cache_stride = owner->num_further > 0 ? (int32_t)sizeof *owner->caches : 0;
    }
}

static attn_status finish_launch(attn_plan *plan, struct step *step, int32_t phase, int32_t part,
                                 struct attn_error *error)
{
    attn_layer *layer = step->layer;
    struct served *served = &layer->served[phase];
    struct launch *launch = &step->launches[phase][part];
    launch->kernel = launch->kernel != NULL ? launch->kernel : served->instance->kernels.attend;
    TRY(layer_prepare(layer, part, &launch->args, error));
    launch->args.prepared = served->prepared[part];
    TRY(find_schedule(plan, layer, phase, part, launch, error));
    launch->args.schedule_host = launch->schedule->host;
    launch->args.limits = &plan->part_limits[part];
    launch->args.schedule_host_bytes = launch->schedule->size.host_bytes;
    launch->args.workspace_bytes = launch->schedule->size.device_bytes;
    launch->args.plan_state = launch->schedule->state;
    launch->args.scratch_bytes = launch->schedule->size.scratch_bytes;
    return ATTN_OK;
}

int64_t step_row_bytes(const struct step *step)
{
    return step->out.heads * step->out.head_size *
           (step->layer->desc->dtype == ATTN_DTYPE_F32 ? 4 : 2);
}

/* [T, heads, head_size] of a dtype. */
static struct tensor_form rows_of(int32_t dtype, int32_t heads, int32_t head_size)
{
    const struct attn_tensor tensor = {.ndim = 3, .dtype = dtype_of_id(dtype)};
    return (struct tensor_form){tensor_kind(&tensor), heads, head_size};
}

/* A vendor's dtype is in no mask: FUSED_WRITE may say it. */
static bool writes_in_decodes(const struct attn_backend_caps *caps, int32_t kv_dtype)
{
    return kv_dtype < ATTN_VENDOR_CODE && caps->decode_write_kv_dtypes >> kv_dtype & 1;
}

static void describe_tensors(struct step *step)
{
    const struct attn_layer_desc *l = step->layer->desc;
    const struct instance *prefill = step->layer->served[ATTN_PHASE_PREFILL].instance;
    const struct instance *decode = step->layer->served[ATTN_PHASE_DECODE].instance;
    bool quantized_q = l->q_scale_form != ATTN_SCALE_NONE;
    step->q = rows_of(quantized_q ? l->q_dtype : l->dtype, l->num_q_heads, l->head_size);
    step->k = rows_of(l->dtype, l->num_kv_heads, l->head_size);
    step->v = rows_of(l->dtype, l->num_kv_heads, l->head_size_v);
    step->out = rows_of(l->dtype, l->num_q_heads, l->head_size_v);
    step->check_io = step_check_plain;
    step->checks_out = true;
    step->keys_are_inputs = !layer_has_cache(l);
    step->writes = layer_has_cache(l) && step->layer->owner == step->layer;
    const bool fuses = step->writes && !step->layer->selected->writes_apart;
    step->fused_write = fuses && prefill->caps->features & ATTN_FEATURE_FUSED_WRITE &&
                        decode->caps->features & ATTN_FEATURE_FUSED_WRITE;
    step->fused_decode = fuses && writes_in_decodes(decode->caps, l->kv_dtype) &&
                         writes_in_decodes(decode->caps, kv_dtype_of(l, true));
}

attn_status step_begin(attn_plan *plan, attn_layer *layer, struct attn_error *error)
{
    struct step *step = &plan->steps[layer->slot];
    attn_layer *owner = layer->owner;
    const struct attn_layer_desc *l = layer->desc;
    step->layer = layer;
    ERROR_IF(layer_has_cache(l) && owner->k_cache.data == NULL, ATTN_ERROR_ORDER,
             "layer_bind_caches", "layer '%s' has no %s bound", owner->desc->name,
             owner->spec.kind == ATTN_KV_SPEC_STATE ? "state" : "cache");
    ERROR_IF(layer->needed_params != NULL && layer->params == NULL, ATTN_ERROR_ORDER,
             "layer_bind_params", "layer '%s' has %s and no parameters bound", l->name,
             layer->needed_params);
    describe_tensors(step);
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        step->parts[phase] = 1u << PART_MAIN;
        for (int32_t part = 0; part < PART_COUNT; part++) {
            begin_launch(step, phase, part);
        }
    }
    return ATTN_OK;
}

attn_status step_finish(attn_plan *plan, struct step *step, struct attn_error *error)
{
    attn_layer *layer = step->layer;
    const struct attn_layer_desc *l = layer->desc;
    const struct instance *prefill = layer->served[ATTN_PHASE_PREFILL].instance;
    const int32_t group = output_group(l->output_form);
    BAD_IF((int64_t)step->out.heads * step->out.head_size % group != 0, "output_form",
           "layer '%s': %s has a scale for %d columns, and the output %lld heads of %lld", l->name,
           name_of(ATTN_NAMES_OUTPUT_FORM, l->output_form), group, (long long)step->out.heads,
           (long long)step->out.head_size);
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        for (int32_t part = 0; part < PART_COUNT; part++) {
            TRY_IF(step->parts[phase] >> part & 1, finish_launch(plan, step, phase, part, error));
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
                                    .v_cache = layer->num_own == 2 ? &layer->v_cache : NULL};
    if (layer->num_further > 0) {
        step->write.caches = layer->caches;
        step->write.num_caches = layer->num_further;
        step->write.cache_stride = (int32_t)sizeof *layer->caches;
        step->write.batch = &plan->given;
    }
    return ATTN_OK;
}
