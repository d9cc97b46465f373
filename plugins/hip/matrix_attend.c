/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units, host side: which arguments they walk, and how they divide them. What
 * they do not serve is the portable kernel's: ALiBi, spans, trees, head sizes over 128, float32,
 * 4-bit rows, rounded probabilities, packed layouts. */
#include "device.h"

#include "gpu/host/schedule.h"

#define LEAST_PARTS 8 /* of an item, whose groups have a compute unit each */

/* Decodes: a stream of rows of 16. Else one of rows of 64, which share a key's reading; where a
 * request must give the same bits in any batch, items. */
static void choose_rows(const struct attn_state *state, const struct attn_batch *batch,
                        struct plan_host *plan)
{
    bool decode = (int64_t)batch->max_query_len * state->group <= GPU_FEW_ROWS;
    plan->by_item = state->invariant;
    plan->tile_rows = decode || plan->by_item || state->padded_size > 128 ? 16 : 64;
}

static int32_t tile_of(const struct attn_state *state, bool cached, int32_t tile_rows)
{
    return state->narrow && cached && tile_rows == 16 ? HIP_NARROW_TILE : HIP_TILE;
}

/* One where a single request makes so few items that two would leave twice as many parts of each to
 * be merged. */
static int32_t groups_of_unit(const struct attn_attend_args *args)
{
    const struct attn_state *state = args->state;
    const struct plan_host *plan = args->plan_host;
    bool few =
        plan->num_reqs == 1 && state->num_kv_heads * LEAST_PARTS <= args->instance->device.num_sms;
    return state->padded_size > 128 || (few && plan->tile_rows == 16 && !plan->by_item) ? 1 : 2;
}

static uint64_t bits_of(const struct gpu_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* They load 16 bytes at a time, and count rows' offsets in 16 bytes and 31 bits. */
static bool serves(const struct attn_attend_args *args, const struct gpu_params *p)
{
    const struct gpu_problem *problem = &p->problem;
    bool narrow = p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
    int32_t multiple = narrow ? 16 : 8;
    if (problem->spans != NULL || problem->tree != NULL || problem->alibi != ATTN_ALIBI_NONE ||
        problem->wanted_rows != NULL || p->p_dtype >= 0) {
        return false;
    }
    if ((p->q.dtype != ATTN_DTYPE_BF16 && p->q.dtype != ATTN_DTYPE_F16) ||
        p->k.dtype == ATTN_DTYPE_F32 || p->k.dtype != p->v.dtype ||
        (!narrow && p->k.dtype != p->q.dtype) || p->k.form >= GPU_ROW_INT4 ||
        p->v.form >= GPU_ROW_INT4 || p->k.pack != 0 || p->v.pack != 0) {
        return false;
    }
    if (problem->head_size % multiple != 0 || problem->head_size_v % multiple != 0) {
        return false;
    }
    uint64_t q = (uint64_t)(uintptr_t)p->q.data | (uint64_t)p->q.row | (uint64_t)p->q.head;
    int64_t rows = args->k_cache != NULL ? args->k_cache->num_blocks : args->k->shape[0];
    if ((bits_of(&p->k) | bits_of(&p->v) | q) % 16 != 0 || rows * p->k.block / 16 >= INT32_MAX ||
        rows * p->v.block / 16 >= INT32_MAX ||
        p->schedule.tile != tile_of(args->state, narrow, p->schedule.tile_rows)) {
        return false;
    }
    return hip_has_attend(&args->instance->device, p->k.dtype, args->state->padded_size,
                          p->schedule.tile_rows);
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_params *p)
{
    return hip_launch_attend(&args->instance->device, p->k.dtype, args->state->padded_size, p,
                             args->stream);
}

const struct gpu_matrix_kernels hip_matrix = {
    .choose_rows = choose_rows,
    .tile = tile_of,
    .groups_of_sm = groups_of_unit,
    .serves = serves,
    .attend = attend,
};
