/* SPDX-License-Identifier: Apache-2.0 */
/* What the host sides of plugins' matrix kernels share. */
#include "gpu/host/schedule.h"

/* For bits that do not depend on the batch, a segment belongs to one item. */
void gpu_choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                     struct schedule_host *plan)
{
    bool decode = (int64_t)batch->max_query_len * prepared->group <= GPU_FEW_ROWS;
    plan->by_item = prepared->invariant != 0;
    plan->tile_rows = decode || plan->by_item || prepared->padded_size > 128 ? 16 : 64;
}

bool gpu_reads_wide(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    return (gpu_cache_bits(&p->k) | gpu_cache_bits(&p->v)) % 16 == 0 &&
           rows * p->k.block / 16 < INT32_MAX && rows * p->v.block / 16 < INT32_MAX;
}

bool gpu_loads_wide(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    bool narrow = p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
    bool codes = p->q.dtype == ATTN_DTYPE_FP8_E4M3 && p->q.dtype == p->k.dtype;
    int32_t multiple = narrow ? 16 : 8;
    if (problem->spans != NULL || problem->tree != NULL || problem->alibi != ATTN_ALIBI_NONE ||
        problem->wanted_rows != NULL || p->p_dtype >= 0) {
        return false;
    }
    if ((p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16 && !codes) ||
        p->k.dtype == ATTN_DTYPE_F32 || p->k.dtype != p->v.dtype ||
        (!narrow && p->k.dtype != p->q.dtype) || p->k.form >= GPU_ROW_INT4 ||
        p->v.form >= GPU_ROW_INT4 || p->k.pack != 0 || p->v.pack != 0) {
        return false;
    }
    if (problem->head_size % multiple != 0 || problem->head_size_v % multiple != 0) {
        return false;
    }
    return gpu_tensor_bits(&p->q) % 16 == 0 && gpu_reads_wide(args, p);
}
