/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units, host side: which arguments they walk, and how they divide them. What
 * they do not serve is the portable kernel's: ALiBi, spans, trees, head sizes over 256, float32,
 * 4-bit rows, rounded probabilities, packed layouts. */
#include "device.h"

#include "gpu/host/schedule.h"

#define LEAST_PARTS 8 /* least parts of an item, whose groups have a compute unit each */

/* Heads of 256 have rows of 64, too. */
static void choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                        struct schedule_host *plan)
{
    bool many = (int64_t)batch->max_query_len * prepared->group > GPU_FEW_ROWS;
    gpu_choose_rows(prepared, batch, plan);
    plan->tile_rows = many && !plan->by_item ? 64 : plan->tile_rows;
}

static int32_t tile_of(const struct attn_prepared *prepared, bool cached, int32_t tile_rows)
{
    const bool narrow = prepared->narrow && cached;
    if (tile_rows > 16) {
        return HIP_STAGED_TILE(prepared->padded_size * (narrow ? 1 : 2));
    }
    return narrow ? HIP_NARROW_TILE : HIP_TILE;
}

/* One where a single request makes so few items that two would leave twice as many parts of each to
 * be merged. */
static int32_t groups_of_unit(const struct attn_attend_args *args)
{
    const struct attn_prepared *prepared = args->prepared;
    const struct schedule_host *plan = args->schedule_host;
    bool few = plan->num_reqs == 1 &&
               prepared->num_kv_heads * LEAST_PARTS <= args->instance->device.num_sms;
    return prepared->padded_size > 128 || (few && plan->tile_rows == 16 && !plan->by_item) ? 1 : 2;
}

/* Queries in e4m3 are multiplied with such caches as they are, where the target can; else they come
 * here again, widened. */
static bool serves(const struct attn_attend_args *args, const struct gpu_params *p)
{
    bool narrow = p->k.dtype >= ATTN_DTYPE_FP8_E4M3;
    return gpu_loads_wide(args, p) && p->problem.head_size <= args->prepared->padded_size &&
           p->problem.head_size_v <= args->prepared->padded_size &&
           p->schedule.tile == tile_of(args->prepared, narrow, p->schedule.tile_rows) &&
           hip_has_attend(&args->instance->device, p, args->prepared->padded_size);
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_params *p,
                          bool shared)
{
    (void)shared; /* they have no prefill */
    return hip_launch_attend(&args->instance->device, p, args->prepared->padded_size, args->stream);
}

const struct gpu_matrix_kernels hip_matrix = {
    .choose_rows = choose_rows,
    .tile = tile_of,
    .groups_of_sm = groups_of_unit,
    .serves = serves,
    .attend = attend,
};
