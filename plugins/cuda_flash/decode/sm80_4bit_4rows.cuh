/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of 4-bit caches for items of up to 4 rows: one query of 4 heads a KV head. A product
 * of 32 keys and 8 columns then has scores in half of its lanes, so that each gives the scores of
 * 16 keys to the lane that has none: softmax takes half of the operations. */
#ifndef CUDA_FLASH_SM80_4BIT_4ROWS_CUH
#define CUDA_FLASH_SM80_4BIT_4ROWS_CUH

#include "sm80_int4_scores.cuh"

/* Queries of a run in a warp. */
template <int KIND, int D> struct four_queries {
    lane_queries<D, SM80_FEW> queries;
    row_terms terms;
};

template <int D> struct four_queries<KIND_INT4, D> {
    digit_queries<D> queries;
};

/* Raw scores of the rows against the warp's 32 keys. `codes`: the lane's of the first. */
template <int KIND, int D>
static __device__ __forceinline__ void
score_four(const sm80_params &a, const char *stage, const char *codes, const sm80_plane &plane,
           const char *sq, const char *rest, bool has_rest, const four_queries<KIND, D> &q,
           int first, int lane, float (&s)[1][4])
{
    const bool second = (lane & 2) != 0; /* takes keys 16 - 31 */
    float both[2][4] = {}, factors[2][2];
    if constexpr (KIND == KIND_LEVELS) {
        dot_levels<D, SM80_FEW, 2>(stage, plane, a.p.k.bits, sq, rest, has_rest, q.queries, first,
                                   lane, true, both, factors);
    } else {
        dot_codes<KIND, D, SM80_FEW, 2>(stage, codes, plane, sq, rest, has_rest, q.queries, first,
                                        lane, true, both);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float got = __shfl_xor_sync(0xffffffffu, both[1][e], 2);
        s[0][e] = second ? got : both[0][e];
    }
    close_scores<KIND, SM80_FOUR>(q.terms, nullptr, s);
    if constexpr (KIND == KIND_LEVELS) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            s[0][e] *= second ? factors[1][e >> 1] : factors[0][e >> 1];
        }
    }
}

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

/* The same of other kinds. */
template <int KIND, int D>
static __device__ __forceinline__ void
add_four(const sm80_params &a, const char *stage, const char *codes, const sm80_plane &plane,
         int first, int lane, const float (&s)[1][4], float (&o)[D / 16][4], float (&z)[4])
{
    const uint32_t two[2] = {pack2<KIND_F16>(s[0][0], s[0][1]), pack2<KIND_F16>(s[0][2], s[0][3])};
    const four_weights weights(two);
    add_codes<KIND, D, SM80_FOUR>(stage, codes, plane, a.p.v.bits, first, lane, weights.near, o, z);
    add_codes<KIND, D, SM80_FOUR>(stage, codes + 16 * plane.pitch, plane, a.p.v.bits, first + 16,
                                  lane, weights.far, o, z);
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
    int32_t key_at = 0, value_at = 0, scale_at = 0; /* int4: the lane's first of each in a stage */
    if constexpr (KIND == KIND_INT4) {
        key_at = kept((first + (lane >> 2)) * (D / 2) + (lane & 3) * (D / 8));
        value_at = kept(S::half + (first + lane) * (D / 2));
        scale_at = kept(2 * S::half + (first + A::first_key(lane)) * 4);
    }
    /* What float16 wants of a turned query beyond it; int4's digits. */
    const bool has_rest = KIND == KIND_LEVELS && p.q.dtype == ATTN_DTYPE_F16;
    char *rest = (char *)terms_of(mine) + SM80_TERMS_SMEM;
    lane_codes codes = find_codes<D>(a.planes, first, lane);
    if constexpr (KIND == KIND_NVFP4) {
        codes = {kept(codes.key), kept(codes.value)};
    }
    four_queries<KIND, D> q;
    float o[D / 16][4], m[2], l[2];
    value_sums sums = {};
    int2 all; /* keys that all rows see */
    ring_place place;
    int32_t before[2] = {}; /* of a run's rows of K and V: plane_behind */
    int32_t left = 0;       /* tiles of the run that are not done */
    int32_t tile_base = 0;  /* the warp's first key of the tile */
    const gpu_run *run = nullptr;
    char *sq = mine.q[0];
    clear_rows(m, l, o);
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&mine.full[place.stage]), place.phase);
        if (left == 0) {
            int32_t slot = mine.run_of_stage[place.stage];
            if (slot == NO_RUN) {
                break;
            }
            run = &mine.runs[slot];
            left = run->count;
            tile_base = (run->row_tile.k0 & ~(S::tile - 1)) + run->tile * S::tile + first;
            enter_rows(p, *run, A::row(lane, 0), 1, mine.all_see[warp]);
            all = mine.all_see[warp];
            float scale =
                p.problem.scale * (p.k.form == GPU_ROW_NVFP4 ? cache_scale(p.k, run->head) : 1.0f);
            scale *= query_scale(p, run->head);
            scale *= p.problem.soft_cap > 0.0f ? 1.0f : LOG2E;
            if constexpr (KIND == KIND_LEVELS) {
                before[0] = kept(bytes_of_head<KIND>(a, 0, run->head));
                before[1] = kept(bytes_of_head<KIND>(a, 1, run->head));
            }
            sq = mine.q[place.q_slot];
            if constexpr (KIND == KIND_INT4) {
                prepare_digits<D>(p, *run, sq, rest, terms_of(mine));
                q.queries.keep(rest, terms_of(mine), lane, scale);
            } else {
                prepare_query<KIND, D, 16>(p, *run, sq, has_rest ? rest : nullptr, terms_of(mine));
                q.terms = load_terms<16>(terms_of(mine), A::row(lane, 0), A::row(lane, 1), scale);
                q.queries.keep(sq, lane);
            }
        }
        char *at = stage_at(mine, place.stage);
        const float *k_scales = (const float *)(at + scale_at), *v_scales = k_scales + S::tile;
        float s[1][4];
        const sm80_plane v_plane = plane_behind(a, 1, before[1]);
        if constexpr (KIND == KIND_INT4) {
            score_digits<D>(at + key_at, k_scales, q.queries, lane, s);
        } else {
            score_four<KIND, D>(a, at, at + codes.key, plane_behind(a, 0, before[0]), sq, rest,
                                has_rest, q, first, lane, s);
        }
        bool apart = false;
        if (unusual != 0 || tile_base < all.x || tile_base + 31 > all.y) {
            int2 same; /* what `all` has */
            const lane_rows rows = enter_rows(p, *run, A::row(lane, 0), 1, same);
            int view = view_of_tile(p, *run, rows, all, tile_base, tile_base + 31);
            apart = view == SEES_APART;
            int32_t begin = tile_base - first; /* of the tile */
            if (view != SEES_ALL &&
                (begin < run->row_tile.k0 || begin + S::tile > run->row_tile.k1)) {
                clear_scales<KIND, D>(at, v_plane, first, 32, run->row_tile.k0 - begin,
                                      run->row_tile.k1 - begin, lane);
                __syncwarp(); /* the warp's own keys are clean */
            }
            score_tile<false, true, SM80_FOUR>(p, *run, rows, A::row(lane, 0), 1.0f, slow, true,
                                               view == SEES_ALL, tile_base + A::first_key(lane), s);
        }
        soften<SM80_FOUR>(true, s, m, l, sums.z, o);
        if constexpr (KIND != KIND_NVFP4) {
            float scales[1][2];
            load_value_scales<KIND, SM80_FOUR>(at, v_scales, v_plane, first, lane, apart, s, sums.z,
                                               scales);
            scale_weights<KIND, SM80_FOUR>(scales, apart, s, sums, o);
        }
        if (KIND == KIND_NVFP4 && apart && scales_odd<D>(at, v_plane, first, 32, lane)) {
            add_exactly<KIND, D, SM80_FOUR, S::tile>(at, v_plane, first, 0, lane, s, o);
        } else if constexpr (KIND == KIND_INT4) {
            add_wide_codes<D>(shared_address(at) + value_at, v_scales, s, o, sums.z);
        } else {
            add_four<KIND, D>(a, at, at + codes.value, v_plane, first, lane, s, o, sums.z);
        }
        tile_base += S::tile;
        left--;
        if (KIND == KIND_INT4 && left == 0) {
            sums.z[0] = A::sum(sums.z[0]) * 0x1p-24f; /* as products of codes have it */
            sums.z[1] = A::sum(sums.z[1]) * 0x1p-24f;
        }
        end_tile<KIND, D, true, SM80_FOUR>(a, mine, *run, left == 0, KIND != KIND_NVFP4, place, m,
                                           l, sums, o);
    }
}

#endif
