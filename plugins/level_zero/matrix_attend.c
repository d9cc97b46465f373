/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units, host side. What they do not serve (gpu_loads_wide, head sizes over
 * 128) is the portable kernel's. */
#include "gpu/host/schedule.h"
#include "loaded.h"

static int32_t tile_of(const struct attn_prepared *prepared, bool cached, int32_t tile_rows)
{
    return LEVEL_ZERO_TILE;
}

/* A group has 8 subgroups with 256 registers each: half of what an Xe core holds. */
static int32_t groups_of_core(const struct attn_attend_args *args)
{
    return args->prepared->padded_size > 128 ? 1 : 2;
}

static bool serves(const struct attn_attend_args *args, const struct gpu_params *p)
{
    return gpu_loads_wide(args, p) && p->q.dtype < ATTN_DTYPE_FP8_E4M3 &&
           level_zero_attend(p->k.dtype, args->prepared->padded_size, p->schedule.tile_rows) >= 0;
}

static const char *attend(const struct attn_attend_args *args, const struct gpu_params *p,
                          bool shared)
{
    (void)shared; /* they have no prefill */
    int32_t kernel =
        level_zero_attend(p->k.dtype, args->prepared->padded_size, p->schedule.tile_rows);
    return level_zero_launch(&args->instance->device, kernel, p->schedule.ctas, p, args->stream);
}

const struct gpu_matrix_kernels level_zero_matrix = {
    .choose_rows = gpu_choose_rows,
    .tile = tile_of,
    .groups_of_sm = groups_of_core,
    .serves = serves,
    .attend = attend,
};
