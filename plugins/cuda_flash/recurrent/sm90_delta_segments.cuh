/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of few long requests, walked at once. A segment maps the state before it to S M + B, row
 * by row: B is what a walk from S = 0 leaves, M what one from S = 1 without values leaves. The
 * first launch walks the first segment, with its outputs, and both of all further segments but the
 * last; delta_join computes the states between; the second launch walks the further segments from
 * them. */
#ifndef CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH
#define CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH

#include "sm80_delta_state.cuh"

#define SEGMENT_CHUNKS 4 /* chunks of a segment, at least */
#define JOIN_ROWS 8      /* rows of S of a CTA, each thread has one column of them */

typedef float segment_state[CHUNK_DIMS][CHUNK_DIMS];

struct segment_item : state_item {
    int32_t begin; /* the first chunk, counted from the request's first */
    const segment_state *from;
    segment_state *to; /* NULL: the request's slot */
    bool is_map, has_outputs;
};

/* B of a segment of a value head of the `number`-th request in chunks, later the state at its end;
 * is_map: M, which the first segment does not have. */
GPU_INLINE segment_state &end_of_segment(const sm80_delta_params &a, int32_t number, int32_t head,
                                         int32_t segment, bool is_map)
{
    int64_t of_head = (int64_t)number * a.p.num_v_heads + head;
    return (
        (segment_state *)a.segment_ends)[of_head * SEGMENT_ENDS(a.segments) + 2 * segment - is_map];
}

GPU_INLINE bool is_cut(const sm80_delta_params &a, int32_t num_chunks)
{
    return num_chunks >= a.segments * SEGMENT_CHUNKS;
}

/* This CTA's part of the launch; false if it has none. */
static __device__ bool begin_segment(const sm80_delta_params &a, int32_t teams, segment_item &item)
{
    int32_t of_segment = (int32_t)gridDim.x / a.launched, part = (int32_t)blockIdx.x / of_segment;
    int32_t index = (int32_t)blockIdx.x % of_segment;
    item.begin = 0, item.from = nullptr, item.to = nullptr;
    item.is_map = false, item.has_outputs = true;
    if (!begin_item(a, index, teams, 0, item)) {
        return false;
    }
    if (a.segments == 0 || !is_cut(a, item.num_chunks)) {
        return part == 0 && !a.joined;
    }
    int32_t segment = a.joined ? part + 1 : (part + 1) / 2, count = item.num_chunks;
    int32_t number = index / a.slices / a.p.num_v_heads;
    item.begin = segment * count / a.segments;
    item.num_chunks = (segment + 1) * count / a.segments - item.begin;
    item.first_chunk += item.begin;
    if (a.joined) {
        item.from = &end_of_segment(a, number, item.head, segment - 1, false);
        if (segment + 1 < a.segments) { /* this end is known; M is no longer needed */
            item.to = &end_of_segment(a, number, item.head, segment, true);
        }
        return true;
    }
    item.is_map = part > 0 && part % 2 == 0;
    item.has_outputs = part == 0;
    item.request.has_state = item.request.has_state && part == 0;
    item.to = &end_of_segment(a, number, item.head, segment, item.is_map);
    return true;
}

/* The states at the ends of segments 1 to a.segments - 2: JOIN_ROWS rows of a value head a CTA. */
static __global__ void __launch_bounds__(CHUNK_DIMS)
    delta_join(const __grid_constant__ sm80_delta_params a)
{
    __shared__ float4 state[CHUNK_DIMS / 4][JOIN_ROWS];
    int32_t slices = CHUNK_DIMS / JOIN_ROWS, column = (int32_t)thread_index();
    int32_t first = (int32_t)blockIdx.x % slices * JOIN_ROWS, item = (int32_t)blockIdx.x / slices;
    int32_t number = item / a.p.num_v_heads, head = item % a.p.num_v_heads;
    let_later_kernels_begin();
    wait_for_earlier_kernels();
    float own[JOIN_ROWS];
#pragma unroll
    for (int i = 0; i < JOIN_ROWS; i++) {
        own[i] = end_of_segment(a, number, head, 0, false)[first + i][column];
    }
    for (int32_t segment = 1; segment < a.segments - 1; segment++) {
        segment_state &end = end_of_segment(a, number, head, segment, false);
        const segment_state &map = end_of_segment(a, number, head, segment, true);
        sync_group();
#pragma unroll
        for (int i = 0; i < JOIN_ROWS; i++) {
            ((float *)&state[column / 4][i])[column % 4] = own[i];
            own[i] = end[first + i][column];
        }
        sync_group();
#pragma unroll 4
        for (int k = 0; k < CHUNK_DIMS / 4; k++) {
            float by[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                by[j] = map[k * 4 + j][column];
            }
#pragma unroll
            for (int i = 0; i < JOIN_ROWS; i++) {
                float4 s = state[k][i];
                own[i] = fmaf(s.x, by[0], fmaf(s.y, by[1], own[i]));
                own[i] = fmaf(s.z, by[2], fmaf(s.w, by[3], own[i]));
            }
        }
#pragma unroll
        for (int i = 0; i < JOIN_ROWS; i++) {
            end[first + i][column] = own[i];
        }
    }
}

#endif
