/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of few long requests, walked at once. A segment maps the state before it to S M + B, row
 * by row: B is what a walk from S = 0 leaves, M what one from S = 1 without values leaves. The
 * first launch walks the first segment, with its outputs, and both of all further segments but the
 * last, and leaves both after each piece of them; delta_join computes the states at these ends; the
 * second launch walks the pieces from them, and the last segment, which has one piece. With n
 * segments of k pieces a launch walks k and then 1 of the (n - 1) k + 1 pieces of a request. */
#ifndef CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH
#define CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH

#include "sm80_delta_state.cuh"

#define PIECE_CHUNKS 4 /* chunks of a piece, at least */
#define JOIN_ROWS 8    /* rows of S of a CTA */
#define JOIN_DEPTHS 4  /* parts of a sum, of the same threads' rows */

typedef float segment_state[CHUNK_DIMS][CHUNK_DIMS];

/* Pieces of a request, and ends of those between the first and the last segment. */
static inline __host__ __device__ int32_t pieces_of(const sm80_delta_params &a)
{
    return (a.segments - 1) * a.pieces + 1;
}

static inline __host__ __device__ int32_t ends_between(const sm80_delta_params &a)
{
    return (a.segments - 2) * a.pieces;
}

struct segment_item : state_item {
    int32_t begin; /* the first chunk, counted from the request's first */
    const segment_state *from;
    /* where the state goes after the first piece; after each further one, ENDS_APART on. NULL: the
     * request's slot */
    segment_state *to;
    int32_t first_piece, num_pieces, all_chunks; /* all_chunks: of the request */
    bool is_map, has_outputs;

    /* Chunks up to the end of piece i. */
    __device__ __forceinline__ int32_t end_of(const sm80_delta_params &a, int32_t i) const
    {
        return i + 1 == num_pieces ? num_chunks
                                   : (first_piece + i + 1) * all_chunks / pieces_of(a) - begin;
    }
};

/* B of the pieces of a segment up to the i-th end between, counted from 1, of a value head of the
 * `number`-th request in chunks, later the state at this end; is_map: M. End 0 is that of the first
 * segment, which has no M. */
#define ENDS_APART 2
GPU_INLINE segment_state &segment_end(const sm80_delta_params &a, int32_t number, int32_t head,
                                      int32_t i, bool is_map)
{
    int64_t of_head = (int64_t)number * a.p.num_v_heads + head;
    return (
        (segment_state *)
            a.segment_ends)[of_head * (ENDS_APART * ends_between(a) + 1) + ENDS_APART * i - is_map];
}

GPU_INLINE bool is_cut(const sm80_delta_params &a, int32_t num_chunks)
{
    return num_chunks >= pieces_of(a) * PIECE_CHUNKS;
}

/* This CTA's part of the launch; false if it has none. */
static __device__ bool begin_segment(const sm80_delta_params &a, int32_t teams, segment_item &item)
{
    int32_t of_segment = (int32_t)gridDim.x / a.launched, part = (int32_t)blockIdx.x / of_segment;
    int32_t index = (int32_t)blockIdx.x % of_segment;
    item.begin = 0, item.from = nullptr, item.to = nullptr, item.num_pieces = 1;
    item.is_map = false, item.has_outputs = true;
    if (!begin_item(a, index, teams, 0, item)) {
        return false;
    }
    if (a.segments == 0 || !is_cut(a, item.num_chunks)) {
        return part == 0 && !a.joined;
    }
    int32_t segment = (part + 1) / 2, number = index / a.slices / a.p.num_v_heads;
    int32_t length = a.joined ? 1 : a.pieces;
    item.first_piece = a.joined ? a.pieces + part : segment * a.pieces;
    item.all_chunks = item.num_chunks;
    item.begin = item.first_piece * item.all_chunks / pieces_of(a);
    item.num_chunks = (item.first_piece + length) * item.all_chunks / pieces_of(a) - item.begin;
    item.first_chunk += item.begin;
    if (a.joined) {
        item.from = &segment_end(a, number, item.head, part, false);
        if (part < ends_between(a)) { /* this end is known; M is no longer needed */
            item.to = &segment_end(a, number, item.head, part + 1, true);
        }
        return true;
    }
    item.is_map = part > 0 && part % 2 == 0;
    item.has_outputs = part == 0;
    item.request.has_state = item.request.has_state && part == 0;
    item.to = &segment_end(a, number, item.head, 0, false);
    if (part > 0) {
        item.num_pieces = a.pieces;
        item.to = &segment_end(a, number, item.head, (segment - 1) * a.pieces + 1, item.is_map);
    }
    return true;
}

/* The states at all ends between: JOIN_ROWS rows of a value head a CTA. A thread adds a part of the
 * sums of a column. Maps are loaded one ahead, since the limit is their latency. */
static __global__ void __launch_bounds__(CHUNK_DIMS *JOIN_DEPTHS)
    delta_join(const __grid_constant__ sm80_delta_params a)
{
    constexpr int slices = CHUNK_DIMS / JOIN_ROWS, depths = CHUNK_DIMS / JOIN_DEPTHS;
    constexpr int own_rows = JOIN_ROWS / JOIN_DEPTHS; /* of which a thread ends the sums */
    __shared__ float4 state[CHUNK_DIMS][JOIN_ROWS / 4];
    __shared__ float sums[JOIN_DEPTHS][JOIN_ROWS][CHUNK_DIMS];
    int32_t column = (int32_t)thread_index() % CHUNK_DIMS;
    int32_t part = (int32_t)thread_index() / CHUNK_DIMS;
    int32_t item = (int32_t)blockIdx.x / slices, first = (int32_t)blockIdx.x % slices * JOIN_ROWS;
    int32_t number = item / a.p.num_v_heads, head = item % a.p.num_v_heads;
    let_later_kernels_begin();
    wait_for_earlier_kernels();
    float own[own_rows], map[depths], next[depths];
#pragma unroll
    for (int k = 0; k < depths; k++) {
        next[k] = segment_end(a, number, head, 1, true)[part * depths + k][column];
    }
#pragma unroll
    for (int i = 0; i < own_rows; i++) {
        own[i] = segment_end(a, number, head, 0, false)[first + part * own_rows + i][column];
    }
    for (int32_t end = 1; end <= ends_between(a); end++) {
        segment_state &to = segment_end(a, number, head, end, false);
        const segment_state &map_after =
            segment_end(a, number, head, min(end + 1, ends_between(a)), true);
        float x[JOIN_ROWS] = {};
#pragma unroll
        for (int k = 0; k < depths; k++) {
            map[k] = next[k];
            next[k] = map_after[part * depths + k][column];
        }
#pragma unroll
        for (int i = 0; i < own_rows && end % a.pieces == 1 % a.pieces; i++) {
            ((float *)state[column])[part * own_rows + i] = own[i]; /* at a segment's start */
        }
#pragma unroll
        for (int i = 0; i < own_rows; i++) {
            own[i] = to[first + part * own_rows + i][column];
        }
        sync_group();
#pragma unroll
        for (int k = 0; k < depths; k++) {
#pragma unroll
            for (int i = 0; i < JOIN_ROWS; i += 4) {
                const float4 s = state[part * depths + k][i / 4];
                x[i] = fmaf(s.x, map[k], x[i]), x[i + 1] = fmaf(s.y, map[k], x[i + 1]);
                x[i + 2] = fmaf(s.z, map[k], x[i + 2]), x[i + 3] = fmaf(s.w, map[k], x[i + 3]);
            }
        }
#pragma unroll
        for (int i = 0; i < JOIN_ROWS; i++) {
            sums[part][i][column] = x[i];
        }
        sync_group();
#pragma unroll
        for (int i = 0; i < own_rows; i++) {
            int32_t row = part * own_rows + i;
#pragma unroll
            for (int j = 0; j < JOIN_DEPTHS; j++) {
                own[i] += sums[j][row][column];
            }
            to[first + row][column] = own[i];
        }
    }
}

#endif
