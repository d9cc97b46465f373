/* SPDX-License-Identifier: Apache-2.0 */
/* A run of a kernel that walks the segments of a schedule, the scale of its scores, and where its
 * rows go. */
#ifndef GPU_DEVICE_RUN_H
#define GPU_DEVICE_RUN_H

#include "gpu/device/rows.h"
#include "gpu/device/softmax.h"

/* The tiles of one item in one segment, with all that its kernels need to know about them. */
struct gpu_run {
    gpu_row_tile row_tile;
    int32_t head, tile, count;    /* tiles tile .. tile + count - 1 of the item */
    int32_t segment, first, last; /* segments that share the item */
    int32_t item;                 /* row tile x KV heads + head */
};

/* What all scores of a run are multiplied by. */
GPU_INLINE float score_scale(const gpu_params &p, int32_t head)
{
    const bool scaled = p.k.form == GPU_ROW_NUMBERS || p.k.form == GPU_ROW_NVFP4;
    const float scale = p.problem.scale * (scaled ? cache_scale(p.k, head) : 1.0f);
    return scale * query_scale(p, head) * (p.problem.soft_cap > 0.0f ? 1.0f : LOG2E);
}

/* Where a row of an item goes. */
struct out_row {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
    int32_t token, head;
};

GPU_INLINE out_row out_row_of(const gpu_params &p, const gpu_run &r, int32_t row)
{
    int32_t at = r.row_tile.first_row + row, index = at / p.problem.group;
    int64_t token = r.row_tile.query_start + index;
    int32_t head = r.head * p.problem.group + at - index * p.problem.group;
    out_row v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse.data != nullptr ? p.lse.data + head * p.lse.head + token * p.lse.row : nullptr;
    v.sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
    v.token = (int32_t)token;
    v.head = head;
    return v;
}

/* The slot of a run's part: an item's first part has one of its own, if it begins inside its
 * segment. */
GPU_INLINE int32_t slot_of_run(const gpu_params &p, const gpu_run &r)
{
    return p.schedule.by_item ? r.segment : 2 * r.segment + (r.tile == 0);
}

#endif
