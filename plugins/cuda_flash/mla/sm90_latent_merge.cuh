/* SPDX-License-Identifier: Apache-2.0 */
/* Merges the parts of cut items into the output. */
#ifndef CUDA_FLASH_SM90_LATENT_MERGE_CUH
#define CUDA_FLASH_SM90_LATENT_MERGE_CUH

#include "sm90_latent_shared.cuh"

#define MERGE_THREADS 1024
#define MERGE_WARPS (MERGE_THREADS / 32)
#define MERGE_STEP 3   /* parts that a warp reads at once; its first round has one more */
#define MERGE_CUTS 256 /* segments examined at once */

/* The parts of a cut item: the first, and where the others are. */
struct latent_cut {
    int32_t rows, first_row, query_start, first, second, step, count;
};

/* The cut that segment i starts; count is 0 if it starts none. */
GPU_INLINE latent_cut cut_of(const gpu_schedule &plan, int32_t i)
{
    /* the first part of an item begins inside its share; parallel shares belong to other items */
    const bool shares = plan.by_item == 2;
    const int32_t apart = shares ? plan.concurrent : 1;
    const gpu_segment &s = plan.segments[i];
    bool is = shares ? s.begin > s.row_tile.start && s.first == i - apart
                     : s.first == s.index && s.last > s.first;
    latent_cut cut;
    cut.rows = s.row_tile.num_rows;
    cut.first_row = s.row_tile.first_row;
    cut.query_start = s.row_tile.query_start;
    cut.step = shares ? 2 * apart : 1;
    cut.count = is ? (s.last - s.first) / apart + 1 : 0;
    cut.first = shares ? 2 * s.first + 1 : s.first;
    cut.second = shares ? 2 * (s.first + apart) : s.first + 1;
    return cut;
}

/* The number of warps for each piece, a power of two: as many as exist for all pieces, unless a
 * warp would have fewer than MERGE_STEP of the longest cut's `count` parts. Batch-invariant items
 * have one. */
GPU_INLINE int32_t shares_of(int32_t pieces, int32_t count)
{
    static_assert(2 * MERGE_STEP > GPU_INVARIANT_CUTS,
                  "batch-invariant items have one warp a piece");
    int32_t shares = 1;
    while (shares < MERGE_WARPS && 2 * shares * MERGE_STEP <= count &&
           2 * shares * pieces <= (int32_t)gridDim.x * MERGE_WARPS) {
        shares *= 2;
    }
    return shares;
}

/* A lane's elements of a piece, 512 bytes twice, and row_max and row_sum of its two rows. */
struct merged_piece {
    float4 acc_o[2];
    float2 row_max, row_sum;
};

/* Adds a part's elements times `factor`, which has one for each row. BY_ROWS: elements 0 and 1
 * belong to the first row; else 0 and 2. */
template <bool BY_ROWS> GPU_INLINE void add_numbers(float4 &to, float4 acc_o, float2 factor)
{
    to.x = fmaf(factor.x, acc_o.x, to.x);
    to.y = fmaf(BY_ROWS ? factor.x : factor.y, acc_o.y, to.y);
    to.z = fmaf(BY_ROWS ? factor.y : factor.x, acc_o.z, to.z);
    to.w = fmaf(factor.y, acc_o.w, to.w);
}

/* Rescales a piece to a new row_max. */
template <bool BY_ROWS> GPU_INLINE float2 rescale_piece(merged_piece &x, float2 row_max)
{
    const float2 base = {softmax_base(row_max.x), softmax_base(row_max.y)};
    const float2 scores_scale = {exp2f(x.row_max.x - base.x), exp2f(x.row_max.y - base.y)};
    x.row_max = row_max;
    x.row_sum.x *= scores_scale.x, x.row_sum.y *= scores_scale.y;
#pragma unroll
    for (int d = 0; d < 2; d++) {
        x.acc_o[d].x *= scores_scale.x, x.acc_o[d].y *= BY_ROWS ? scores_scale.x : scores_scale.y;
        x.acc_o[d].z *= BY_ROWS ? scores_scale.y : scores_scale.x, x.acc_o[d].w *= scores_scale.y;
    }
    return base;
}

/* Adds pieces, each relative to its own row_max. */
template <bool BY_ROWS, int COUNT>
GPU_INLINE void add_pieces(merged_piece &x, const merged_piece (&others)[COUNT])
{
    float2 row_max = x.row_max;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        row_max.x = fmaxf(row_max.x, others[i].row_max.x);
        row_max.y = fmaxf(row_max.y, others[i].row_max.y);
    }
    const float2 base = rescale_piece<BY_ROWS>(x, row_max);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const merged_piece &other = others[i];
        const float2 scores_scale = {exp2f(other.row_max.x - base.x),
                                     exp2f(other.row_max.y - base.y)};
        x.row_sum.x = fmaf(scores_scale.x, other.row_sum.x, x.row_sum.x);
        x.row_sum.y = fmaf(scores_scale.y, other.row_sum.y, x.row_sum.y);
        add_numbers<BY_ROWS>(x.acc_o[0], other.acc_o[0], scores_scale);
        add_numbers<BY_ROWS>(x.acc_o[1], other.acc_o[1], scores_scale);
    }
}

GPU_INLINE merged_piece empty_piece()
{
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return {{zeros, zeros}, make_float2(-INFINITY, -INFINITY), make_float2(0.0f, 0.0f)};
}

/* Merges every `shares`-th of `count` parts. PIECES describes the layout of a part: ROWS of a part;
 * COUNT pieces, whose second 512 bytes are half a part after the first; APART, the distance of a
 * lane's two rows; BY_ROWS. */
template <class PIECES>
GPU_INLINE merged_piece merge_parts(const gpu_schedule &plan, const latent_cut &cut, int32_t count,
                                    int piece, int32_t share, int32_t shares)
{
    const int row = PIECES::row(piece), lane = threadIdx.x & 31;
    auto load = [&](int32_t k) {
        merged_piece part = empty_piece();
        if (k < count) {
            const int64_t at = k == 0 ? cut.first : cut.second + (k - 1) * cut.step;
            const float *from = plan.parts + at * (PIECES::ROWS * (LATENT_MAX_RANK + 2));
            const float *bases = from + PIECES::ROWS * LATENT_MAX_RANK + row;
            part.acc_o[0] = ((const float4 *)from)[piece * 32 + lane];
            part.acc_o[1] = ((const float4 *)from)[(PIECES::COUNT + piece) * 32 + lane];
            part.row_max = make_float2(bases[0], bases[PIECES::APART]);
            part.row_sum = make_float2(bases[PIECES::ROWS], bases[PIECES::ROWS + PIECES::APART]);
        }
        return part;
    };
    merged_piece x = load(share); /* read with the next ones */
    int32_t n = share + shares;
    do {
        merged_piece parts[MERGE_STEP];
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            parts[i] = load(n + i * shares);
        }
        add_pieces<PIECES::BY_ROWS>(x, parts);
        n += MERGE_STEP * shares;
    } while (n < count);
    return x;
}

/* Adds the results of a piece's warps in a tree; the first warp gets the sum. */
template <class PIECES>
GPU_INLINE void add_shares(merged_piece &x, merged_piece (*others)[32], int32_t share,
                           int32_t shares)
{
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) / shares * (shares / 2);
    for (int32_t half = shares / 2; half > 0; half /= 2) {
        if (share >= half && share < 2 * half) {
            others[first + share - half][lane] = x;
        }
        __syncthreads(); /* the addends are written */
        if (share < half) {
            const merged_piece other[1] = {others[first + share][lane]};
            add_pieces<PIECES::BY_ROWS>(x, other);
        }
        __syncthreads(); /* the addends have been read */
    }
}

/* Merges the parts of all cut items. */
template <class PIECES> GPU_INLINE void merge_cuts(const sm90_latent_params &a)
{
    __shared__ latent_cut cuts[MERGE_CUTS];
    __shared__ int32_t found[MERGE_CUTS / 32], longest[MERGE_CUTS / 32];
    __shared__ merged_piece others[MERGE_WARPS / 2][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const gpu_schedule &plan = a.p.attend.schedule;
    volatile float &untouched = others[0][lane].row_sum.x; /* keeps the reads */
    if (warp == MERGE_WARPS - 1) {
        untouched = __uint_as_float(touch_params(a));
    }
    /* The schedule exists already: the attend kernel has started this one. */
    const int32_t segments = plan.header->segments;
    for (int32_t from = 0; from == 0 || from < segments; from += MERGE_CUTS) {
        latent_cut cut = {};
        if (threadIdx.x < MERGE_CUTS && from + (int32_t)threadIdx.x < segments) {
            cut = cut_of(plan, from + (int32_t)threadIdx.x);
        }
        const uint32_t are = __ballot_sync(0xffffffffu, cut.count > 0);
        const int32_t most = __reduce_max_sync(0xffffffffu, cut.count);
        if (warp < MERGE_CUTS / 32) {
            found[warp] = __popc(are);
            longest[warp] = most;
        }
        __syncthreads(); /* all warps have counted their cuts */
        int32_t at = __popc(are & ((1u << lane) - 1)), count = 0, parts = 0;
        for (int i = 0; i < MERGE_CUTS / 32; i++) {
            at += i < warp ? found[i] : 0;
            count += found[i];
            parts = max(parts, longest[i]);
        }
        if (cut.count > 0) {
            cuts[at] = cut;
        }
        const int32_t pieces = count * PIECES::COUNT, shares = shares_of(pieces, parts);
        const int32_t share = warp & (shares - 1);
        __syncthreads(); /* the cuts are written */
        if (from == 0) {
            wait_for_earlier_kernels();
            let_later_kernels_begin();
        }
        /* A CTA's pieces are far apart, so that few pieces are spread over all CTAs. */
        for (int32_t first = (int32_t)blockIdx.x; first < pieces;
             first += (int32_t)gridDim.x * (MERGE_WARPS / shares)) {
            const int32_t n = first + (int32_t)gridDim.x * (warp / shares);
            const latent_cut &of = cuts[min(n / PIECES::COUNT, count - 1)];
            const int piece = n % PIECES::COUNT;
            /* rows out of range were not written */
            const bool real = n < pieces && PIECES::first_row(piece) < of.rows;
            merged_piece x =
                merge_parts<PIECES>(plan, of, real ? of.count : 0, piece, share, shares);
            add_shares<PIECES>(x, others, share, shares);
            if (real && share == 0) {
                gpu_row_tile item = {};
                item.first_row = of.first_row;
                item.num_rows = of.rows;
                item.query_start = of.query_start;
                PIECES::store(a, item, piece, x);
            }
        }
        __syncthreads(); /* the cuts have been read */
    }
}

#endif
