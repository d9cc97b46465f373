/* SPDX-License-Identifier: Apache-2.0 */
/* attend: turns arguments into gpu_params and chooses the kernels that serve them. */
#include <attn/draft/compressor.h>
#include <attn/indexer.h>

#include "gpu/host/schedule.h"

static void set_tensors(struct gpu_params *p, const struct attn_attend_args *args)
{
    const struct attn_layer_params *params = args->params;
    p->q = gpu_tensor_of(args->q);
    p->out = gpu_output_rows(args);
    p->lse = gpu_lse_of(args->lse);
    set_query_scale(p, args);
    p->p_dtype = -1;
    if (args->layer->p_scale_form != ATTN_SCALE_NONE) {
        bool e5m2 = args->layer->kv_dtype == ATTN_KV_FP8_E5M2;
        p->p_dtype = e5m2 ? ATTN_DTYPE_FP8_E5M2 : ATTN_DTYPE_FP8_E4M3;
        p->p_scale = params->p_scale;
        p->p_scale_host = params->p_scale_host != 0 ? params->p_scale_host : 1;
    }
    if (args->k_cache == NULL) {
        p->k = gpu_cache_of_tensor(args->layer, params, args->k, false);
        p->v = gpu_cache_of_tensor(args->layer, params, args->v, true);
    } else {
        p->k = gpu_cache_of(args->layer, params, args->k_cache, false);
        p->v = gpu_cache_of(args->layer, params, args->v_cache, true);
    }
}

/* Places quantized queries, converted to `dtype` for matrix kernels, in the scratch. False if
 * queries are not quantized or there is no room. */
static bool widened_query(const struct gpu_params *p, const struct attn_attend_args *args,
                          int32_t dtype, struct gpu_widen_params *w)
{
    const struct schedule_host *plan = args->schedule_host;
    const struct attn_prepared *prepared = args->prepared;
    if (p->q.dtype < ATTN_DTYPE_FP8_E4M3 || prepared->query_bytes == 0 ||
        args->batch->num_actual_tokens > plan->num_rows) {
        return false;
    }
    *w = (struct gpu_widen_params){
        .from = p->q,
        .to = {(char *)args->scratch + layout_of_plan(args).query, prepared->query_bytes,
               (int64_t)p->problem.head_size * 2, dtype},
        .query_start = p->problem.query_start,
        .num_reqs = p->problem.num_reqs,
        .num_rows = plan->num_rows,
        .heads = p->problem.num_q_heads,
        .dims = p->problem.head_size,
    };
    return true;
}

typedef const char *attend_way(const struct attn_attend_args *args, const struct gpu_params *p);

/* Runs a kernel without quantized outputs: numbers go to the scratch and are quantized
 * afterwards. */
static const char *attend_numbers(const struct attn_attend_args *args, const struct gpu_params *p,
                                  attend_way *way)
{
    struct attn_layer_desc layer = *args->layer;
    struct attn_attend_args numbers = *args;
    struct gpu_params mine = *p;
    layer.output_form = ATTN_OUTPUT_PLAIN;
    numbers.layer = &layer;
    mine.out = gpu_output_numbers(args);
    const char *cause = way(&numbers, &mine);
    return cause == NULL ? gpu_quantize_output(args) : cause;
}

static const char *launch_plain(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_device *device = &args->instance->device;
    bool nibbles = p->k.form >= GPU_ROW_INT4 || p->v.form >= GPU_ROW_INT4;
    return gpu_device_launch(device, nibbles ? GPU_KERNEL_plain_nibbles : GPU_KERNEL_plain,
                             (int64_t)device->num_sms * 8, p, args->stream);
}

/* Runs the plain kernel, which serves everything, row by row. */
static const char *attend_plainly(const struct attn_attend_args *args, const struct gpu_params *p)
{
    bool codes = args->layer->output_form != ATTN_OUTPUT_PLAIN;
    return codes ? attend_numbers(args, p, launch_plain) : launch_plain(args, p);
}

static const char *widen_query(const struct attn_attend_args *args,
                               const struct gpu_widen_params *w)
{
    const struct gpu_device *device = &args->instance->device;
    return gpu_device_launch(device, GPU_KERNEL_widen, (int64_t)device->num_sms * 16, w,
                             args->stream);
}

/* Runs the plugin's prefill for requests of many rows; *taken says whether it served them. shared:
 * see gpu_prefill. */
static const char *attend_many(const struct attn_attend_args *args, const struct gpu_params *p,
                               bool shared, bool *taken)
{
    struct gpu_params many = *p;
    struct gpu_widen_params widen;
    const struct gpu_prefill *prefill = args->instance->prefill;
    const char *cause = NULL;
    const bool takes = prefill->takes_query != NULL && prefill->takes_query(p);
    if (!takes && widened_query(p, args, p->out.dtype, &widen)) {
        cause = widen_query(args, &widen);
        many.q = widen.to;
    }
    *taken = cause == NULL && prefill->attend(args, &many, prefill_memory(args), shared, &cause);
    return cause;
}

/* Runs the plugin's prefill and matrix kernels, each for its requests. If one of them refuses the
 * tensors, the plain kernel writes all rows before the other one writes its own: the kernel of a
 * request depends on its rows and the tensors only, whatever else is in the batch. */
static const char *attend_by_rows(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_matrix_kernels *matrix = args->instance->matrix;
    const struct schedule_host *plan = args->schedule_host;
    const bool as_keys = p->k.dtype == ATTN_DTYPE_BF16 || p->k.dtype == ATTN_DTYPE_F16;
    struct gpu_widen_params widen;
    struct gpu_params matrix_params = *p;
    const bool may = plan->has_few && !args->prepared->plain;
    bool few = may && matrix->serves(args, p);
    bool widens =
        may && !few && widened_query(p, args, as_keys ? p->k.dtype : ATTN_DTYPE_F16, &widen);
    if (widens) {
        matrix_params.q = widen.to;
        few = matrix->serves(args, &matrix_params);
    }
    bool plain = plan->has_few && !few;
    if (p->problem.listed > 0 && p->problem.units == NULL && (plain || plan->has_many)) {
        return "the kernels of this batch need units of its lists, which have not been made";
    }
    const char *cause = plain ? attend_plainly(args, p) : NULL;
    bool shared = few && !widens && plan->has_many && plan->prefill_sms > 0;
    bool many = false;
    if (cause == NULL && plan->has_many) {
        cause = attend_many(args, p, shared, &many);
    }
    if (cause == NULL && plan->has_many && !many && !plain) {
        cause = attend_plainly(args, p);
    }
    if (cause == NULL && few && widens) {
        cause = widen_query(args, &widen);
    }
    return cause == NULL && few ? matrix->attend(args, &matrix_params, shared && many) : cause;
}

static const char *attend_planned(const struct attn_attend_args *args, struct gpu_params *p)
{
    const struct gpu_matrix_kernels *matrix = args->instance->matrix;
    const struct schedule_host *plan = args->schedule_host;
    set_schedule(&p->schedule, args);
    const struct gpu_prefill *prefill = args->instance->prefill;
    /* Codes of an epilogue may lie one step from the quantize kernel's, so that in a
     * batch-invariant layer the kernels of one batch may not decide. */
    bool few = plan->has_few || args->prepared->invariant;
    bool many = plan->has_many || (args->prepared->invariant && prefill != NULL);
    bool codes = args->layer->output_form != ATTN_OUTPUT_PLAIN;
    bool writes = codes && gpu_output_is_near(args);
    writes = writes && (!few || (matrix->writes_codes != NULL && matrix->writes_codes(args, p)));
    writes = writes && (!many || (prefill->writes_codes != NULL && prefill->writes_codes(args, p)));
    return codes && !writes ? attend_numbers(args, p, attend_by_rows) : attend_by_rows(args, p);
}

/* The units of lists come last in the scratch. */
static char *list_memory(const struct attn_attend_args *args)
{
    int64_t bytes;
    return args->prepared->way == GPU_WAY_WITHOUT_PLAN ? args->scratch
                                                       : prefill_scratch(args, &bytes);
}

attn_status gpu_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gpu_params p = {0};
    if (args->layer->kind == ATTN_LAYER_INDEXER) {
        return gpu_index(args, error);
    }
    if (args->layer->kind == ATTN_LAYER_DRAFT_COMPRESSOR) {
        return gpu_compress(args, error);
    }
    if (args->batch->num_reqs == 0) {
        return ATTN_OK;
    }
    set_problem(&p.problem, args);
    set_tensors(&p, args);
    bool planned = args->prepared->way != GPU_WAY_WITHOUT_PLAN;
    const char *cause = NULL;
    if (args->prepared->listed > 0 && gpu_attend_lists(args, &p, &cause)) {
        return device_status(cause, "attend", error);
    }
    if (args->prepared->listed > 0) {
        /* other lists and keys are the plain kernel's */
        planned = planned && p.problem.paged && args->prepared->lists <= p.problem.num_kv_heads;
        if (planned) { /* by which matrix kernels decide whether they read the lists */
            set_schedule(&p.schedule, args);
        }
        cause = gpu_make_lists(args, list_memory(args), planned, &p);
    }
    cause = cause != NULL ? cause : planned ? attend_planned(args, &p) : attend_plainly(args, &p);
    return device_status(cause, "attend", error);
}
