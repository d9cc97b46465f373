/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of heads over 256 dims, where acc_o of 16 rows does not fit one warp. The warps split
 * a tile's keys for Q K^T, exchange all scores through shared memory and split V's dims for P V.
 * Each warp has row_max and row_sum of every row, so a run ends without combining warps. A tile of
 * n keys takes 4 n D bytes and 64 n D FLOPs: bound by memory. */
#ifndef CUDA_FLASH_SM80_HEAD512_CUH
#define CUDA_FLASH_SM80_HEAD512_CUH

#include "sm80_epilogue.cuh"
#include "sm80_launch.h"
#include "sm80_tile.cuh"

template <int KIND, int D> struct head512_shape : decode_shape<KIND, D> {
    using S = decode_shape<KIND, D>;
    static constexpr int own_keys = S::tile / 4, own_scores = own_keys / 8;
    static constexpr int scores = S::tile / 8, sums = D / 4 / 8; /* column tiles of a warp */
    static constexpr int own_chunks = S::chunks / 4;
    /* floats between rows of scores, without bank conflicts */
    static constexpr int pitch = S::tile + 8;
    static_assert(2 * 16 * pitch * 4 == SM80_SCORES_SMEM(S::tile), "two tiles' scores");
};

/* A warp's state of a run. */
struct head512_run {
    const gpu_run *run;
    row_bounds rows;
    float scale;
    int32_t left, tile_base; /* remaining tiles, and the first key of the current one */
    bool high_rows;
};

template <int KIND, int D>
GPU_INLINE head512_run begin_run_head512(const gpu_params &p, const gpu_run &run, char *sq,
                                         int lane, int2 &all_see)
{
    using S = head512_shape<KIND, D>;
    head512_run r;
    r.run = &run;
    r.left = run.count;
    r.tile_base = (run.row_tile.k0 & ~(S::tile - 1)) + run.tile * S::tile;
    r.rows = load_row_bounds(p, run, lane >> 2, 8, all_see);
    r.high_rows = run.row_tile.num_rows > 8;
    r.scale = score_scale(p, run.head);
    if (S::bytes && p.q.dtype == ATTN_DTYPE_BF16) {
        convert_query(sq, S::q_bytes);
    }
    return r;
}

/* Raw scores against the warp's keys from `first` on. Consecutive steps of 16 dims use different
 * accumulators, so that none waits for the previous one. */
template <int KIND, int D>
GPU_INLINE void dot_head512(const char *stage, const char *sq, int first, int lane,
                            float (&acc_s)[head512_shape<KIND, D>::own_scores][4])
{
    using S = head512_shape<KIND, D>;
    constexpr int chains = 4 / S::own_scores;
    float sums[chains][S::own_scores][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; kk += 2) {
        uint32_t query[2][4];
        load_query<KIND, D>(sq, kk, lane, query[0]);
        load_query<KIND, D>(sq, kk + 1, lane, query[1]);
        if constexpr (S::bytes) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                dot_step<KIND, D, S::tile, SM80_NO_SWAP>(stage, first, kk + i, lane, query[i],
                                                         sums[(kk + i) % chains]);
            }
        } else { /* 8 keys, 32 dims */
            uint32_t b[4];
            int key = first + (lane & 7), chunk = kk * 2 + (lane >> 3);
            load4(b, shared_address(stage) + place_of<S::chunks, S::tile>(key, chunk));
            multiply<KIND>(sums[kk % chains][0], query[0], b[0], b[1]);
            multiply<KIND>(sums[(kk + 1) % chains][0], query[1], b[2], b[3]);
        }
    }
#pragma unroll
    for (int n = 0; n < S::own_scores; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            acc_s[n][e] = sums[0][n][e];
#pragma unroll
            for (int i = 1; i < chains; i++) {
                acc_s[n][e] += sums[i][n][e];
            }
        }
    }
}

/* Writes the warp's scores of a tile, scaled and masked, to `scores_smem`. */
template <int KIND, int D>
GPU_INLINE void scores_head512(const gpu_params &p, const head512_run &r, const char *stage,
                               const char *sq, int view, int lane, float *scores_smem)
{
    using S = head512_shape<KIND, D>;
    const int first = (threadIdx.x >> 5) * S::own_keys, column = first + (lane & 3) * 2;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    float acc_s[S::own_scores][4];
    dot_head512<KIND, D>(stage, sq, first, lane, acc_s);
    if (S::bytes && p.k.form == GPU_ROW_SCALED) {
        const float *scales = (const float *)(stage + 2 * S::half) + column;
#pragma unroll
        for (int i = 0; i < S::own_scores * 4; i++) {
            acc_s[i / 4][i % 4] *= scales[acc_layout<SM80_NO_SWAP>::key(i / 4, i % 4)];
        }
    }
    score_tile<false, false, SM80_NO_SWAP>(p, *r.run, r.rows, lane >> 2, r.scale, slow, r.high_rows,
                                           view == SEES_ALL, r.tile_base + column, acc_s);
#pragma unroll
    for (int n = 0; n < S::own_scores; n++) {
        float *to = scores_smem + (lane >> 2) * S::pitch + column + n * 8;
        *(float2 *)to = make_float2(acc_s[n][0], acc_s[n][1]);
        *(float2 *)(to + 8 * S::pitch) = make_float2(acc_s[n][2], acc_s[n][3]);
    }
}

template <int KIND, int D>
GPU_INLINE void load_scores(const float *scores_smem, int lane,
                            float (&acc_s)[head512_shape<KIND, D>::scores][4])
{
    using S = head512_shape<KIND, D>;
#pragma unroll
    for (int n = 0; n < S::scores; n++) {
        const float *from = scores_smem + (lane >> 2) * S::pitch + n * 8 + (lane & 3) * 2;
        float2 low = *(const float2 *)from, high = *(const float2 *)(from + 8 * S::pitch);
        acc_s[n][0] = low.x, acc_s[n][1] = low.y, acc_s[n][2] = high.x, acc_s[n][3] = high.y;
    }
}

/* Clears values of keys outside the item, in the warp's own dims. */
template <int KIND, int D>
GPU_INLINE void clear_values_head512(const sm80_params &a, const head512_run &r, int view,
                                     char *stage, int lane)
{
    using S = head512_shape<KIND, D>;
    const int32_t low = r.run->row_tile.k0 - r.tile_base, high = r.run->row_tile.k1 - r.tile_base;
    if (!a.mapped || view == SEES_ALL || (low <= 0 && high >= S::tile)) {
        return;
    }
    clear_values<KIND, D, S::tile, S::own_chunks>(stage + S::half, 0, S::tile, low, high, lane,
                                                  (threadIdx.x >> 5) * S::own_chunks);
    const int key = threadIdx.x; /* no warp has read its scale yet */
    if (S::bytes && a.p.v.form == GPU_ROW_SCALED && key < S::tile && (key < low || key >= high)) {
        ((float *)(stage + 2 * S::half))[S::tile + key] = 0.0f;
    }
    __syncwarp(); /* the warp reads only its own dims */
}

/* Softmax of a tile and acc_o += P V, in the warp's own dims. */
template <int KIND, int D>
GPU_INLINE void add_values_head512(const sm80_params &a, const head512_run &r, const char *stage,
                                   int view, int lane,
                                   float (&acc_s)[head512_shape<KIND, D>::scores][4],
                                   float (&row_max)[2], float (&row_sum)[2], value_scaling &sums,
                                   float (&acc_o)[head512_shape<KIND, D>::sums][4])
{
    using S = head512_shape<KIND, D>;
    const int warp = threadIdx.x >> 5;
    const bool apart = view == SEES_APART;
    online_softmax<SM80_NO_SWAP>(r.high_rows, acc_s, row_max, row_sum, sums.zero_sum, acc_o);
    if (S::bytes && a.p.v.form == GPU_ROW_SCALED) {
        const float *v_scales = (const float *)(stage + 2 * S::half) + S::tile + (lane & 3) * 2;
        float scales[S::scores][2];
        load_value_scales<KIND, SM80_NO_SWAP>(stage, v_scales, a.planes[1], 0, lane, apart, acc_s,
                                              sums.zero_sum, scales);
        scale_probs<KIND, SM80_NO_SWAP>(scales, apart, acc_s, sums, acc_o);
    }
    if (apart && has_nonfinite_values<KIND, D, S::tile>(stage + S::half, 0, S::tile, lane)) {
        add_exactly<KIND, D, SM80_NO_SWAP, S::tile>(stage, a.planes[1], 0, warp * S::sums * 8, lane,
                                                    acc_s, acc_o);
        return;
    }
#pragma unroll
    for (int n = 0; n < S::scores; n += 2) {
        if constexpr (S::bytes) {
            add_bytes<KIND, D, S::tile, SM80_NO_SWAP>(stage + S::half, n * 8, lane, acc_s[n],
                                                      acc_s[n + 1], acc_o, sums.zero_sum,
                                                      warp * S::own_chunks);
        } else {
            add_values<KIND, D, S::tile>(stage + S::half, n * 8, lane, acc_s[n], acc_s[n + 1],
                                         acc_o, warp * S::own_chunks);
        }
    }
}

template <int KIND, int D>
GPU_INLINE void consumer_head512(const sm80_params &a, shared_storage<KIND, D> &smem)
{
    using S = head512_shape<KIND, D>;
    const gpu_params &p = a.p;
    const int lane = threadIdx.x & 31;
    float *scores_smem =
        (float *)((char *)&smem + S::q_bytes + S::fixed - SM80_SCORES_SMEM(S::tile));
    float acc_o[S::sums][4], row_max[2], row_sum[2];
    value_scaling sums = {};
    head512_run r = {};
    pipeline_state place;
    int turn = 0;
    clear_acc(row_max, row_sum, acc_o);
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&smem.full[place.stage]), place.phase);
        if (r.left == 0) {
            int32_t slot = smem.run_of_stage[place.stage];
            if (slot == NO_RUN) {
                break;
            }
            r = begin_run_head512<KIND, D>(p, smem.runs[slot], smem.q[0], lane,
                                           smem.all_see[threadIdx.x >> 5]);
        }
        char *at = stage_at(smem, place.stage);
        int view = view_of_tile(p, *r.run, r.rows, smem.all_see[threadIdx.x >> 5], r.tile_base,
                                r.tile_base + S::tile - 1);
        scores_head512<KIND, D>(p, r, at, smem.q[0], view, lane,
                                scores_smem + turn * 16 * S::pitch);
        clear_values_head512<KIND, D>(a, r, view, at, lane);
        /* all scores are written, and those of the previous tile have been read */
        barrier_consumers();
        float acc_s[S::scores][4];
        load_scores<KIND, D>(scores_smem + turn * 16 * S::pitch, lane, acc_s);
        add_values_head512<KIND, D>(a, r, at, view, lane, acc_s, row_max, row_sum, sums, acc_o);
        turn ^= 1;
        r.tile_base += S::tile;
        r.left--;
        end_tile<KIND, D, SM80_NO_SWAP>(a, smem, *r.run, r.left == 0,
                                        S::bytes && p.v.form == GPU_ROW_SCALED, place, row_max,
                                        row_sum, sums, acc_o);
    }
}

#endif
