/* SPDX-License-Identifier: Apache-2.0 */
/* Parts of items become their output. */
#ifndef CUDA_FLASH_SM90_LATENT_MERGE_CUH
#define CUDA_FLASH_SM90_LATENT_MERGE_CUH

#include "sm90_latent_shared.cuh"

#define MERGE_THREADS 1024
#define MERGE_WARPS (MERGE_THREADS / 32)
#define MERGE_STEP 3   /* parts that a warp reads together */
#define MERGE_CUTS 256 /* segments looked at together */

/* The parts of an item that was cut: the first one, and the others by number. */
struct latent_cut {
    int32_t segment, rows, first, second, step, count;
};

/* Segment i, if an item is first cut at its beginning; count 0: none is. */
static __device__ __forceinline__ latent_cut cut_of(const gpu_schedule &plan, int32_t i)
{
    /* of shares' parts, the first begins inside its share; shares abreast are others' */
    const bool shares = plan.by_item == 2;
    const int32_t apart = shares ? plan.abreast : 1;
    const gpu_segment &s = plan.segments[i];
    bool is = shares ? s.begin > s.row_tile.start && s.first == i - apart
                     : s.first == s.index && s.last > s.first;
    latent_cut cut;
    cut.segment = i;
    cut.rows = s.row_tile.num_rows;
    cut.step = shares ? 2 * apart : 1;
    cut.count = is ? (s.last - s.first) / apart + 1 : 0;
    cut.first = shares ? 2 * s.first + 1 : s.first;
    cut.second = shares ? 2 * (s.first + apart) : s.first + 1;
    return cut;
}

/* Warps that share a piece's parts, the longest cut's `count`: as many as there are for all pieces,
 * and none with fewer parts than it reads together. Batch-invariant items have one. */
static __device__ __forceinline__ int32_t shares_of(int32_t pieces, int32_t count)
{
    int32_t shares = 1;
    while (shares < MERGE_WARPS && 2 * shares * MERGE_STEP <= count &&
           2 * shares * pieces <= (int32_t)gridDim.x * MERGE_WARPS) {
        shares *= 2;
    }
    return shares;
}

/* A lane's numbers of a piece, two times 512 bytes of a part, and largest exponents and sums of
 * weights of the two rows that they are of. */
struct merged_piece {
    float4 o[2];
    float2 high, sum;
};

/* factor: of the first row and of the second. BY_ROWS: numbers 0 and 1 are the first row's; else 0
 * and 2. */
template <bool BY_ROWS>
static __device__ __forceinline__ void add_numbers(float4 &to, float4 o, float2 factor)
{
    to.x = fmaf(factor.x, o.x, to.x);
    to.y = fmaf(BY_ROWS ? factor.x : factor.y, o.y, to.y);
    to.z = fmaf(BY_ROWS ? factor.y : factor.x, o.z, to.z);
    to.w = fmaf(factor.y, o.w, to.w);
}

/* Sums count from other exponents, 2^base. */
template <bool BY_ROWS>
static __device__ __forceinline__ float2 raise_piece(merged_piece &x, float2 high)
{
    const float2 base = {softmax_base(high.x), softmax_base(high.y)};
    const float2 f = {exp2f(x.high.x - base.x), exp2f(x.high.y - base.y)};
    x.high = high;
    x.sum.x *= f.x, x.sum.y *= f.y;
#pragma unroll
    for (int d = 0; d < 2; d++) {
        x.o[d].x *= f.x, x.o[d].y *= BY_ROWS ? f.x : f.y;
        x.o[d].z *= BY_ROWS ? f.y : f.x, x.o[d].w *= f.y;
    }
    return base;
}

/* others[i]: counted from its own exponents. */
template <bool BY_ROWS, int COUNT>
static __device__ __forceinline__ void add_pieces(merged_piece &x,
                                                  const merged_piece (&others)[COUNT])
{
    float2 high = x.high;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        high.x = fmaxf(high.x, others[i].high.x);
        high.y = fmaxf(high.y, others[i].high.y);
    }
    const float2 base = raise_piece<BY_ROWS>(x, high);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const merged_piece &other = others[i];
        const float2 f = {exp2f(other.high.x - base.x), exp2f(other.high.y - base.y)};
        x.sum.x = fmaf(f.x, other.sum.x, x.sum.x);
        x.sum.y = fmaf(f.y, other.sum.y, x.sum.y);
        add_numbers<BY_ROWS>(x.o[0], other.o[0], f);
        add_numbers<BY_ROWS>(x.o[1], other.o[1], f);
    }
}

static __device__ __forceinline__ merged_piece empty_piece()
{
    const float4 zeros = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    return {{zeros, zeros}, make_float2(-INFINITY, -INFINITY), make_float2(0.0f, 0.0f)};
}

/* PIECES says where a part's numbers are: ROWS, of a part; COUNT, pieces of it, whose second 512
 * bytes are half a part behind the first; APART, from a lane's first row to its second one;
 * BY_ROWS. Each share has every `shares`th part of `count`. */
template <class PIECES>
static __device__ __forceinline__ merged_piece merge_parts(const gpu_schedule &plan,
                                                           const latent_cut &cut, int32_t count,
                                                           int piece, int32_t share, int32_t shares)
{
    const int row = PIECES::row(piece), lane = threadIdx.x & 31;
    merged_piece x = empty_piece();
#pragma unroll 1
    for (int32_t n = share; n < count; n += MERGE_STEP * shares) {
        merged_piece parts[MERGE_STEP];
#pragma unroll
        for (int i = 0; i < MERGE_STEP; i++) {
            const int32_t k = n + i * shares;
            const int64_t at = k == 0 ? cut.first : cut.second + (k - 1) * cut.step;
            const float *part = plan.parts + at * (PIECES::ROWS * (LATENT_MAX_RANK + 2));
            const float *bases = part + PIECES::ROWS * LATENT_MAX_RANK + row;
            parts[i] = empty_piece();
            if (k < count) {
                parts[i].o[0] = ((const float4 *)part)[piece * 32 + lane];
                parts[i].o[1] = ((const float4 *)part)[(PIECES::COUNT + piece) * 32 + lane];
                parts[i].high = make_float2(bases[0], bases[PIECES::APART]);
                parts[i].sum =
                    make_float2(bases[PIECES::ROWS], bases[PIECES::ROWS + PIECES::APART]);
            }
        }
        add_pieces<PIECES::BY_ROWS>(x, parts);
    }
    return x;
}

/* The first of a piece's warps gets what all have together. */
template <class PIECES>
static __device__ __forceinline__ void add_shares(merged_piece &x, merged_piece (*others)[32],
                                                  int32_t share, int32_t shares)
{
    const int lane = threadIdx.x & 31, first = (threadIdx.x >> 5) / shares * (shares / 2);
    for (int32_t half = shares / 2; half > 0; half /= 2) {
        if (share >= half && share < 2 * half) {
            others[first + share - half][lane] = x;
        }
        __syncthreads(); /* they are there */
        if (share < half) {
            const merged_piece other[1] = {others[first + share][lane]};
            add_pieces<PIECES::BY_ROWS>(x, other);
        }
        __syncthreads(); /* they have been read */
    }
}

/* The parts of items that were cut become their output. */
template <class PIECES>
static __device__ __forceinline__ void merge_cuts(const sm90_latent_params &a)
{
    __shared__ latent_cut cuts[MERGE_CUTS];
    __shared__ int32_t found[MERGE_CUTS / 32], longest[MERGE_CUTS / 32];
    __shared__ merged_piece others[MERGE_WARPS / 2][32];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const gpu_schedule &plan = a.p.attend.schedule;
    /* the schedule was there before the attend let this kernel begin */
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
        __syncthreads(); /* all warps have counted theirs */
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
        __syncthreads(); /* the cuts are there */
        if (from == 0) {
            wait_for_earlier_kernels();
            let_later_kernels_begin();
        }
        /* a CTA's pieces are far apart: few pieces are a few in each CTA */
        for (int32_t first = (int32_t)blockIdx.x; first < pieces;
             first += (int32_t)gridDim.x * (MERGE_WARPS / shares)) {
            const int32_t n = first + (int32_t)gridDim.x * (warp / shares);
            const latent_cut &of = cuts[min(n / PIECES::COUNT, count - 1)];
            const int piece = n % PIECES::COUNT;
            /* other rows have not been written */
            const bool real = n < pieces && PIECES::first_row(piece) < of.rows;
            merged_piece x =
                merge_parts<PIECES>(plan, of, real ? of.count : 0, piece, share, shares);
            add_shares<PIECES>(x, others, share, shares);
            if (real && share == 0) {
                PIECES::store(a, plan.segments[of.segment].row_tile, piece, x);
            }
        }
        __syncthreads(); /* they have been read */
    }
}

#endif
