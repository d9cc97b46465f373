/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of int4 caches for items of up to 4 rows: one query of 4 heads a KV head. A product
 * of 32 keys and 8 columns then has scores in half of its lanes, so that each gives the scores of
 * 16 keys to the lane that has none: softmax takes half of the operations. */
#ifndef CUDA_FLASH_SM80_FOUR_CUH
#define CUDA_FLASH_SM80_FOUR_CUH

#include "sm80_digits.cuh"

/* Weights of the warp's keys 0 - 15 and 16 - 31 as the right sides of products. Rows become
 * columns: 0 - 3 have weights of keys 0 - 15, 4 - 7 those of the others. Turned round they meet
 * those others' values, so that what columns 4 - 7 sum up is of no use. */
struct four_weights {
    uint32_t near[2], far[2];

    __device__ __forceinline__ four_weights(const uint32_t (&two)[2])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            near[i] = transpose(two[i]);
            far[i] = __shfl_xor_sync(0xffffffffu, near[i], 16);
        }
    }
};

/* o += weights x codes of the warp's 32 values, in f16; z += weights x zero points. `row`: shared
 * address of value `lane` of those. Column tiles 2 j, 2 j + 1 have dims 32 j + 4 g + 0 .. 3. */
template <int D>
static __device__ __forceinline__ void add_wide_codes(uint32_t row, const float *scales,
                                                      const float (&s)[1][4], float (&o)[D / 16][4],
                                                      float (&z)[4])
{
    uint32_t two[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        two[i] = pack2<KIND_F16>(s[0][2 * i], s[0][2 * i + 1]);
        const float2 rounded = __half22float2(*(const __half2 *)&two[i]);
        const float zero = (float)(int32_t)(float_bits(scales[8 * i]) & ZERO_POINT_MASK);
        z[0] = fmaf(rounded.x, zero, z[0]);
        z[1] = fmaf(rounded.y, zero, z[1]);
    }
    const four_weights weights(two);
#pragma unroll
    for (int j = 0; j < D / 32; j++) {
        uint32_t x[4]; /* 4 dims of two keys */
        load4_transposed(x, row + j * 16);
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const uint32_t a[4] = {x[0] & 0x000f000fu, x[0] & 0x00f000f0u, x[1] & 0x000f000fu,
                                   x[1] & 0x00f000f0u};
            const uint32_t b[4] = {x[2] & 0x000f000fu, x[2] & 0x00f000f0u, x[3] & 0x000f000fu,
                                   x[3] & 0x00f000f0u};
            multiply<KIND_F16>(o[2 * j + n], a, weights.near[0], weights.near[1]);
            multiply<KIND_F16>(o[2 * j + n], b, weights.far[0], weights.far[1]);
            x[0] >>= 8, x[1] >>= 8, x[2] >>= 8, x[3] >>= 8;
        }
    }
}

/* A number that is made once: the compiler would make it anew in each tile. */
static __device__ __forceinline__ int32_t kept(int32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

template <int KIND, int D>
static __device__ __forceinline__ void compute_four(const sm80_params &a,
                                                    shared<KIND, D, true> &mine)
{
    const gpu_params &p = a.p;
    using S = shape<KIND, D, true>;
    using A = sums_at<SM80_FOUR>;
    static_assert(S::tile == 128, "32 keys a warp");
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * 32;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    const int32_t unusual = kept(slow || p.problem.soft_cap > 0.0f);
    /* the lane's first of each in a stage */
    const int32_t key_at = kept((first + (lane >> 2)) * (D / 2) + (lane & 3) * (D / 8));
    const int32_t value_at = kept(S::half + (first + lane) * (D / 2));
    const int32_t scale_at = kept(2 * S::half + (first + A::first_key(lane)) * 4);
    char *digits = (char *)terms_of(mine) + SM80_TERMS_SMEM;
    digit_queries<D> queries;
    float o[D / 16][4], m[2], l[2];
    value_sums sums = {};
    int2 all; /* keys that all rows see */
    int stage = 0, phase = 0, q_slot = 0;
    int32_t left = 0;      /* tiles of the run that are not done */
    int32_t tile_base = 0; /* the warp's first key of the tile */
    const gpu_run *run = nullptr;
    clear_rows(m, l, o);
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&mine.full[stage]), phase);
        if (left == 0) {
            int32_t slot = mine.run_of_stage[stage];
            if (slot == NO_RUN) {
                break;
            }
            run = &mine.runs[slot];
            left = run->count;
            tile_base = (run->row_tile.k0 & ~(S::tile - 1)) + run->tile * S::tile + first;
            enter_rows(p, *run, A::row(lane, 0), 1, mine.all_see[warp]);
            all = mine.all_see[warp];
            float scale = p.problem.scale * query_scale(p, run->head);
            scale *= p.problem.soft_cap > 0.0f ? 1.0f : LOG2E;
            prepare_digits<D>(p, *run, mine.q[q_slot], digits, terms_of(mine));
            queries.keep(digits, terms_of(mine), lane, scale);
        }
        char *at = stage_at(mine, stage);
        const float *k_scales = (const float *)(at + scale_at), *v_scales = k_scales + S::tile;
        float s[1][4];
        score_digits<D>(at + key_at, k_scales, queries, lane, s);
        bool apart = false;
        if (unusual != 0 || tile_base < all.x || tile_base + 31 > all.y) {
            int2 same; /* what `all` has */
            const lane_rows rows = enter_rows(p, *run, A::row(lane, 0), 1, same);
            int view = view_of_tile(p, *run, rows, all, tile_base, tile_base + 31);
            apart = view == SEES_APART;
            int32_t begin = tile_base - first; /* of the tile */
            if (view != SEES_ALL &&
                (begin < run->row_tile.k0 || begin + S::tile > run->row_tile.k1)) {
                clear_scales<KIND, D>(at, a.planes[1], first, 32, run->row_tile.k0 - begin,
                                      run->row_tile.k1 - begin, lane);
                __syncwarp(); /* the warp's own keys are clean */
            }
            score_tile<false, true, SM80_FOUR>(p, *run, rows, A::row(lane, 0), 1.0f, slow, true,
                                               view == SEES_ALL, tile_base + A::first_key(lane), s);
        }
        soften<SM80_FOUR>(true, s, m, l, sums.z, o);
        float scales[1][2];
        load_value_scales<KIND, SM80_FOUR>(at, v_scales, a.planes[1], first, lane, apart, s, sums.z,
                                           scales);
        scale_weights<KIND, SM80_FOUR>(scales, apart, s, sums, o);
        add_wide_codes<D>(shared_address(at) + value_at, v_scales, s, o, sums.z);
        tile_base += S::tile;
        left--;
        if (left == 0) {
            sums.z[0] = A::sum(sums.z[0]) * 0x1p-24f; /* as products of codes have it */
            sums.z[1] = A::sum(sums.z[1]) * 0x1p-24f;
            close_values<KIND, SM80_FOUR>(true, sums, o);
            finish_run<KIND, D, true, SM80_FOUR>(p, a.output, *run, at, &mine.last_one, m, l, o);
            clear_rows(m, l, o);
            sums = {};
            fence_for_boxes(); /* the stage was scratch memory */
            barrier_arrive(shared_address(&mine.q_empty[q_slot]));
            q_slot = q_slot + 1 == S::q_buffers ? 0 : q_slot + 1;
        }
        barrier_arrive(shared_address(&mine.empty[stage]));
        stage++;
        if (stage == a.stages) {
            stage = 0;
            phase ^= 1;
        }
    }
}

#endif
