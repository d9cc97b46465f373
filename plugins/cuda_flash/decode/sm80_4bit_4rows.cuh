/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer of 4-bit caches for items of up to 4 rows: one query with 4 heads for each KV head.
 * S^T of 32 keys fills 8 columns only half, so each lane gives the scores of 16 keys to a lane
 * without scores, which halves the work of the softmax. */
#ifndef CUDA_FLASH_SM80_4BIT_4ROWS_CUH
#define CUDA_FLASH_SM80_4BIT_4ROWS_CUH

#include "sm80_int4_scores.cuh"

/* The queries of a run in a warp. */
template <int KIND, int D> struct queries_4rows {
    lane_queries<D, SM80_SWAP8> queries;
    row_terms terms;
};

template <int D> struct queries_4rows<KIND_INT4, D> {
    digit_queries<D> queries;
};

/* Raw scores against the warp's 32 keys. `codes` is the lane's address of the first. */
template <int KIND, int D>
GPU_INLINE void scores_4rows(const sm80_params &a, const char *stage, uint32_t table,
                             const char *codes, const sm80_plane &plane, const char *sq,
                             const char *rest, bool has_rest, const queries_4rows<KIND, D> &q,
                             int first, int lane, float (&acc_s)[1][4])
{
    const bool second = (lane & 2) != 0; /* this lane takes keys 16 - 31 */
    float both[2][4] = {}, factors[2][2];
    if constexpr (KIND == KIND_LEVELS) {
        dot_levels<D, SM80_SWAP8, 2>(stage, table, plane, a.p.k.bits, sq, rest, has_rest, q.queries,
                                     first, lane, true, both, factors);
    } else {
        dot_codes<KIND, D, SM80_SWAP8, 2>(stage, codes, plane, sq, rest, has_rest, q.queries, first,
                                          lane, true, both);
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        float got = __shfl_xor_sync(0xffffffffu, both[1][e], 2);
        acc_s[0][e] = second ? got : both[0][e];
    }
    scale_scores<KIND, SM80_SWAP4>(q.terms, nullptr, acc_s);
    if constexpr (KIND == KIND_LEVELS) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc_s[0][e] *= second ? factors[1][e >> 1] : factors[0][e >> 1];
        }
    }
}

/* P of the warp's keys 0 - 15 and 16 - 31 as right operands. Rows are columns: columns 0 - 3 have
 * keys 0 - 15, columns 4 - 7 keys 16 - 31. With the halves exchanged (`far`) they meet the values
 * of keys 16 - 31. Sums in columns 4 - 7 are not used. */
struct probs_4rows {
    uint32_t near[2], far[2];

    __device__ __forceinline__ probs_4rows(const uint32_t (&two)[2])
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            near[i] = transpose(two[i]);
            far[i] = __shfl_xor_sync(0xffffffffu, near[i], 16);
        }
    }
};

/* acc_o += P x codes of the warp's 32 values, in f16; zero_sum += P x zero points. `row` is the
 * shared address of value `lane`. Column tiles 2 j, 2 j + 1 have dims 32 j + 4 g + 0 .. 3. */
template <int D>
GPU_INLINE void add_values_int4(uint32_t row, const float *scales, const float (&acc_s)[1][4],
                                float (&acc_o)[D / 16][4], float (&zero_sum)[4])
{
    uint32_t two[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        two[i] = pack2<KIND_F16>(acc_s[0][2 * i], acc_s[0][2 * i + 1]);
        const float2 rounded = __half22float2(*(const __half2 *)&two[i]);
        const float zero = (float)(int32_t)(float_bits(scales[8 * i]) & ZERO_POINT_MASK);
        zero_sum[0] = fmaf(rounded.x, zero, zero_sum[0]);
        zero_sum[1] = fmaf(rounded.y, zero, zero_sum[1]);
    }
    const probs_4rows probs(two);
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
            multiply<KIND_F16>(acc_o[2 * j + n], a, probs.near[0], probs.near[1]);
            multiply<KIND_F16>(acc_o[2 * j + n], b, probs.far[0], probs.far[1]);
            x[0] >>= 8, x[1] >>= 8, x[2] >>= 8, x[3] >>= 8;
        }
    }
}

/* As add_values_int4, for other kinds. */
template <int KIND, int D>
GPU_INLINE void add_values_4rows(const sm80_params &a, const char *stage, const char *codes,
                                 const sm80_plane &plane, int first, int lane,
                                 const float (&acc_s)[1][4], float (&acc_o)[D / 16][4],
                                 float (&zero_sum)[4])
{
    const uint32_t two[2] = {pack2<KIND_F16>(acc_s[0][0], acc_s[0][1]),
                             pack2<KIND_F16>(acc_s[0][2], acc_s[0][3])};
    const probs_4rows probs(two);
    add_codes<KIND, D, SM80_SWAP4>(stage, codes, plane, a.p.v.bits, first, lane, probs.near, acc_o,
                                   zero_sum);
    add_codes<KIND, D, SM80_SWAP4>(stage, codes + 16 * plane.pitch, plane, a.p.v.bits, first + 16,
                                   lane, probs.far, acc_o, zero_sum);
}

template <int KIND, int D>
GPU_INLINE void consumer_4rows(const sm80_params &a, shared_storage<KIND, D> &smem)
{
    const gpu_params &p = a.p;
    using S = decode_shape<KIND, D>;
    using A = acc_layout<SM80_SWAP4>;
    static_assert(S::tile == 128, "32 keys a warp");
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = warp * 32;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    const int32_t unusual = opaque(slow || p.problem.soft_cap > 0.0f);
    /* int4: offsets of the lane's first of each in a stage */
    int32_t key_at = 0, value_at = 0, scale_at = 0;
    if constexpr (KIND == KIND_INT4) {
        key_at = opaque((first + (lane >> 2)) * (D / 2) + (lane & 3) * (D / 8));
        value_at = opaque(S::half + (first + lane) * (D / 2));
        scale_at = opaque(2 * S::half + (first + A::first_key(lane)) * 4);
    }
    /* KIND_LEVELS: the rounding error of f16 queries; int4: the digits. */
    const bool has_rest = KIND == KIND_LEVELS && p.q.dtype == ATTN_DTYPE_F16;
    char *rest = (char *)terms_of(smem) + SM80_TERMS_SMEM;
    lane_codes codes = find_codes<D>(a.planes, first, lane);
    if constexpr (KIND == KIND_NVFP4) {
        codes = {opaque(codes.key), opaque(codes.value)};
    }
    queries_4rows<KIND, D> q;
    float acc_o[D / 16][4], row_max[2], row_sum[2];
    value_scaling sums = {};
    int2 all; /* keys that all rows see */
    pipeline_state place;
    int32_t before[2] = {}; /* plane_at_offset's `before` for rows of K and V in this run */
    int32_t left = 0;       /* remaining tiles of the run */
    int32_t tile_base = 0;  /* the warp's first key of the tile */
    const gpu_run *run = nullptr;
    char *sq = smem.q[0];
    clear_acc(row_max, row_sum, acc_o);
    if constexpr (S::table) {
        write_levels_of(p.k.bits, levels_at(smem));
    }
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&smem.full[place.stage]), place.phase);
        if (left == 0) {
            int32_t slot = smem.run_of_stage[place.stage];
            if (slot == NO_RUN) {
                break;
            }
            run = &smem.runs[slot];
            left = run->count;
            tile_base = (run->row_tile.k0 & ~(S::tile - 1)) + run->tile * S::tile + first;
            load_row_bounds(p, *run, A::row(lane, 0), 1, smem.all_see[warp]);
            all = smem.all_see[warp];
            float scale =
                p.problem.scale * (p.k.form == GPU_ROW_NVFP4 ? cache_scale(p.k, run->head) : 1.0f);
            scale *= query_scale(p, run->head);
            scale *= p.problem.soft_cap > 0.0f ? 1.0f : LOG2E;
            if constexpr (KIND == KIND_LEVELS) {
                before[0] = opaque(bytes_of_head<KIND>(a, 0, run->head));
                before[1] = opaque(bytes_of_head<KIND>(a, 1, run->head));
            }
            sq = smem.q[place.q_slot];
            if constexpr (KIND == KIND_INT4) {
                prepare_digits<D>(p, *run, sq, rest, terms_of(smem));
                q.queries.load(rest, terms_of(smem), lane, scale);
            } else {
                prepare_query<KIND, D>(p, *run, sq, has_rest ? rest : nullptr, terms_of(smem));
                q.terms = load_terms(terms_of(smem), A::row(lane, 0), A::row(lane, 1), scale);
                q.queries.load(sq, lane);
            }
        }
        char *at = stage_at(smem, place.stage);
        const float *k_scales = (const float *)(at + scale_at), *v_scales = k_scales + S::tile;
        float acc_s[1][4];
        const sm80_plane v_plane = plane_at_offset(a, 1, before[1]);
        if constexpr (KIND == KIND_INT4) {
            score_digits<D>(at + key_at, k_scales, q.queries, lane, acc_s);
        } else {
            scores_4rows<KIND, D>(a, at, levels_at(smem), at + codes.key,
                                  plane_at_offset(a, 0, before[0]), sq, rest, has_rest, q, first,
                                  lane, acc_s);
        }
        bool apart = false;
        if (unusual != 0 || tile_base < all.x || tile_base + 31 > all.y) {
            int2 same; /* equals `all` */
            const row_bounds rows = load_row_bounds(p, *run, A::row(lane, 0), 1, same);
            int view = view_of_tile(p, *run, rows, all, tile_base, tile_base + 31);
            apart = view == SEES_APART;
            int32_t begin = tile_base - first; /* first key of the tile */
            if (view != SEES_ALL &&
                (begin < run->row_tile.k0 || begin + S::tile > run->row_tile.k1)) {
                clear_scales<KIND, D>(at, v_plane, first, 32, run->row_tile.k0 - begin,
                                      run->row_tile.k1 - begin, lane);
                __syncwarp(); /* the warp reads only its own keys */
            }
            score_tile<false, true, SM80_SWAP4>(p, *run, rows, A::row(lane, 0), 1.0f, slow, true,
                                                view == SEES_ALL, tile_base + A::first_key(lane),
                                                acc_s);
        }
        online_softmax<SM80_SWAP4>(true, acc_s, row_max, row_sum, sums.zero_sum, acc_o);
        if constexpr (KIND != KIND_NVFP4) {
            float scales[1][2];
            load_value_scales<KIND, SM80_SWAP4>(at, v_scales, v_plane, first, lane, apart, acc_s,
                                                sums.zero_sum, scales);
            scale_probs<KIND, SM80_SWAP4>(scales, apart, acc_s, sums, acc_o);
        }
        if (KIND == KIND_NVFP4 && apart && has_nan_scales<D>(at, v_plane, first, 32, lane)) {
            add_exactly<KIND, D, SM80_SWAP4, S::tile>(at, v_plane, first, 0, lane, acc_s, acc_o);
        } else if constexpr (KIND == KIND_INT4) {
            add_values_int4<D>(shared_address(at) + value_at, v_scales, acc_s, acc_o,
                               sums.zero_sum);
        } else {
            add_values_4rows<KIND, D>(a, at, at + codes.value, v_plane, first, lane, acc_s, acc_o,
                                      sums.zero_sum);
        }
        tile_base += S::tile;
        left--;
        if (KIND == KIND_INT4 && left == 0) {
            sums.zero_sum[0] =
                A::sum(sums.zero_sum[0]) * 0x1p-24f; /* in the unit of products with codes */
            sums.zero_sum[1] = A::sum(sums.zero_sum[1]) * 0x1p-24f;
        }
        end_tile<KIND, D, SM80_SWAP4>(a, smem, *run, left == 0, KIND != KIND_NVFP4, place, row_max,
                                      row_sum, sums, acc_o);
    }
}

#endif
