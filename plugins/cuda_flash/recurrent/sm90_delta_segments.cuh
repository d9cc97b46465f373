/* SPDX-License-Identifier: Apache-2.0 */
/* Segments of few long requests, walked at once. A segment maps the state before it to S M + B, row
 * by row: B is what a walk from S = 0 leaves, M what one from S = 1 without values leaves. The
 * first launch walks the first segment, with its outputs, and both of all further segments but the
 * last, and leaves both after each piece of them; delta_join computes the states at these ends; the
 * second launch walks the pieces from them, and the last segment, which has one piece. Where the
 * first launch has CTAs for several waves, its first segment is as long as they take. */
#ifndef CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH
#define CUDA_FLASH_SM90_DELTA_SEGMENTS_CUH

#include "sm80_delta_state.cuh"

#define PIECE_CHUNKS 3 /* chunks of a piece, at least */
#define JOIN_ROWS 8    /* rows of S of a CTA */
#define JOIN_THREADS 512

typedef float segment_state[CHUNK_DIMS][CHUNK_DIMS];

/* Pieces of a request, and ends of those between the first and the last segment. */
static inline __host__ __device__ int32_t pieces_of(const sm80_delta_params &a)
{
    return a.first_pieces + (a.segments - 2) * a.pieces + 1;
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

static inline __host__ __device__ bool is_cut(const sm80_delta_params &a, int32_t num_chunks)
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
    int32_t length = a.joined ? 1 : part == 0 ? a.first_pieces : a.pieces;
    int32_t before = a.joined ? part : (segment - 1) * a.pieces; /* after the first segment */
    item.first_piece = a.joined || part > 0 ? a.first_pieces + before : 0;
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
        item.to = &segment_end(a, number, item.head, before + 1, item.is_map);
    }
    return true;
}

/* The states at all ends between: JOIN_ROWS rows of a value head a CTA. A thread has two columns of
 * one part of the sums. */
static __global__ void __launch_bounds__(JOIN_THREADS)
    delta_join(const __grid_constant__ sm80_delta_params a)
{
    constexpr int slices = CHUNK_DIMS / JOIN_ROWS, pairs = CHUNK_DIMS / 2;
    constexpr int parts = JOIN_THREADS / pairs, depths = CHUNK_DIMS / parts;
    constexpr int own_rows = JOIN_ROWS * CHUNK_DIMS / JOIN_THREADS; /* a thread ends these sums */
    __shared__ float4 state[CHUNK_DIMS][JOIN_ROWS / 4];
    __shared__ float2 sums[parts][JOIN_ROWS][pairs];
    int32_t thread = (int32_t)thread_index(), pair = thread % pairs, part = thread / pairs;
    int32_t column = thread % CHUNK_DIMS, own_row = thread / CHUNK_DIMS * own_rows;
    int32_t item = (int32_t)blockIdx.x / slices, first = (int32_t)blockIdx.x % slices * JOIN_ROWS;
    int32_t number = item / a.p.num_v_heads, head = item % a.p.num_v_heads;
    let_later_kernels_begin();
    wait_for_earlier_kernels();
    float own[own_rows];
#pragma unroll
    for (int i = 0; i < own_rows; i++) {
        own[i] = segment_end(a, number, head, 0, false)[first + own_row + i][column];
    }
    for (int32_t end = 1; end <= ends_between(a); end++) {
        segment_state &to = segment_end(a, number, head, end, false);
        const segment_state &from = segment_end(a, number, head, end, true);
        float2 map[depths], x[JOIN_ROWS] = {};
#pragma unroll
        for (int k = 0; k < depths; k++) {
            map[k] = ((const float2 *)from[part * depths + k])[pair];
        }
#pragma unroll
        for (int i = 0; i < own_rows && end % a.pieces == 1 % a.pieces; i++) {
            ((float *)state[column])[own_row + i] = own[i]; /* at a segment's start */
        }
#pragma unroll
        for (int i = 0; i < own_rows; i++) {
            own[i] = to[first + own_row + i][column];
        }
        sync_group(); /* the state is written, and the last sums are read */
#pragma unroll
        for (int k = 0; k < depths; k++) {
#pragma unroll
            for (int i = 0; i < JOIN_ROWS; i++) {
                float s = ((const float *)state[part * depths + k])[i];
                x[i].x = fmaf(s, map[k].x, x[i].x), x[i].y = fmaf(s, map[k].y, x[i].y);
            }
        }
#pragma unroll
        for (int i = 0; i < JOIN_ROWS; i++) {
            sums[part][i][pair] = x[i];
        }
        sync_group(); /* the sums are written, and the state is read */
#pragma unroll
        for (int i = 0; i < own_rows; i++) {
#pragma unroll
            for (int j = 0; j < parts; j++) {
                own[i] += ((const float *)sums[j][own_row + i])[column];
            }
            to[first + own_row + i][column] = own[i];
        }
    }
}

#endif
