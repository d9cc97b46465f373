/* SPDX-License-Identifier: Apache-2.0 */
/* The attend of heads over 256 dims, whose sums of 16 rows do not fit one warp. The warps share out
 * a tile's keys for the scores, show each other all scores in shared memory, and share out the
 * values' dims: each has every row's largest score and sum, and a run ends without joining them.
 * Per tile of n keys 4 n D bytes and 64 n D FLOPs: bound by memory. */
#ifndef CUDA_FLASH_SM80_HEAD512_CUH
#define CUDA_FLASH_SM80_HEAD512_CUH

#include "sm80_epilogue.cuh"
#include "sm80_launch.h"
#include "sm80_tile.cuh"

template <int KIND, int D> struct wide_shape : shape<KIND, D, true> {
    using S = shape<KIND, D, true>;
    static constexpr int own_keys = S::tile / 4, own_scores = own_keys / 8;
    static constexpr int scores = S::tile / 8, sums = D / 4 / 8; /* column tiles of a warp */
    static constexpr int own_chunks = S::chunks / 4;
    static constexpr int pitch = S::tile + 8; /* of rows of scores, in floats: no bank twice */
    static_assert(2 * 16 * pitch * 4 == SM80_SCORES_SMEM(S::tile), "two tiles' scores");
};

/* What one run has in each warp. */
struct wide_run {
    const gpu_run *run;
    lane_rows rows;
    float scale;
    int32_t left, tile_base; /* tiles that are not done, the first key of this one */
    bool high_rows;
};

template <int KIND, int D>
static __device__ __forceinline__ wide_run enter_wide_run(const gpu_params &p, const gpu_run &run,
                                                          char *sq, int lane, int2 &all_see)
{
    using S = wide_shape<KIND, D>;
    wide_run r;
    r.run = &run;
    r.left = run.count;
    r.tile_base = (run.row_tile.k0 & ~(S::tile - 1)) + run.tile * S::tile;
    r.rows = enter_rows(p, run, lane >> 2, 8, all_see);
    r.high_rows = run.row_tile.num_rows > 8;
    r.scale = p.problem.scale * (p.k.form == GPU_ROW_NUMBERS ? cache_scale(p.k, run.head) : 1.0f);
    r.scale *= query_scale(p, run.head) * (p.problem.soft_cap > 0.0f ? 1.0f : LOG2E);
    if (S::bytes && p.q.dtype == ATTN_DTYPE_BF16) {
        convert_query(sq, S::q_bytes);
    }
    return r;
}

/* Raw scores of the rows against the warp's keys, from `first` on. Neighbouring steps of 16 dims
 * add to other sums, so that none waits for the one before. */
template <int KIND, int D>
static __device__ __forceinline__ void dot_wide(const char *stage, const char *sq, int first,
                                                int lane,
                                                float (&s)[wide_shape<KIND, D>::own_scores][4])
{
    using S = wide_shape<KIND, D>;
    constexpr int chains = 4 / S::own_scores;
    float sums[chains][S::own_scores][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 16; kk += 2) {
        uint32_t query[2][4];
        load_query<KIND, D>(sq, 0, kk, lane, query[0]);
        load_query<KIND, D>(sq, 0, kk + 1, lane, query[1]);
        if constexpr (S::bytes) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                dot_step<KIND, D, S::tile, SM80_MANY>(stage, first, kk + i, lane, query[i],
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
            s[n][e] = sums[0][n][e];
#pragma unroll
            for (int i = 1; i < chains; i++) {
                s[n][e] += sums[i][n][e];
            }
        }
    }
}

/* The warp's scores of a tile, as its rows see them, to `shown`. */
template <int KIND, int D>
static __device__ __forceinline__ void score_wide(const gpu_params &p, const wide_run &r,
                                                  const char *stage, const char *sq, int view,
                                                  int lane, float *shown)
{
    using S = wide_shape<KIND, D>;
    const int first = (threadIdx.x >> 5) * S::own_keys, column = first + (lane & 3) * 2;
    const bool slow =
        p.problem.spans != nullptr || p.problem.tree != nullptr || p.problem.alibi != 0;
    float s[S::own_scores][4];
    dot_wide<KIND, D>(stage, sq, first, lane, s);
    if (S::bytes && p.k.form == GPU_ROW_SCALED) {
        const float *scales = (const float *)(stage + 2 * S::half) + column;
#pragma unroll
        for (int i = 0; i < S::own_scores * 4; i++) {
            s[i / 4][i % 4] *= scales[sums_at<SM80_MANY>::key(i / 4, i % 4)];
        }
    }
    score_tile<false, false, SM80_MANY>(p, *r.run, r.rows, lane >> 2, r.scale, slow, r.high_rows,
                                        view == SEES_ALL, r.tile_base + column, s);
#pragma unroll
    for (int n = 0; n < S::own_scores; n++) {
        float *to = shown + (lane >> 2) * S::pitch + column + n * 8;
        *(float2 *)to = make_float2(s[n][0], s[n][1]);
        *(float2 *)(to + 8 * S::pitch) = make_float2(s[n][2], s[n][3]);
    }
}

template <int KIND, int D>
static __device__ __forceinline__ void load_scores(const float *shown, int lane,
                                                   float (&s)[wide_shape<KIND, D>::scores][4])
{
    using S = wide_shape<KIND, D>;
#pragma unroll
    for (int n = 0; n < S::scores; n++) {
        const float *from = shown + (lane >> 2) * S::pitch + n * 8 + (lane & 3) * 2;
        float2 low = *(const float2 *)from, high = *(const float2 *)(from + 8 * S::pitch);
        s[n][0] = low.x, s[n][1] = low.y, s[n][2] = high.x, s[n][3] = high.y;
    }
}

/* Keys of the tile that are not the item's bring no values along, in the warp's own dims. */
template <int KIND, int D>
static __device__ __forceinline__ void clear_wide(const sm80_params &a, const wide_run &r, int view,
                                                  char *stage, int lane)
{
    using S = wide_shape<KIND, D>;
    const int32_t low = r.run->row_tile.k0 - r.tile_base, high = r.run->row_tile.k1 - r.tile_base;
    if (!a.mapped || view == SEES_ALL || (low <= 0 && high >= S::tile)) {
        return;
    }
    clear_values<KIND, D, S::tile, S::own_chunks>(stage + S::half, 0, S::tile, low, high, lane,
                                                  (threadIdx.x >> 5) * S::own_chunks);
    const int key = threadIdx.x; /* whose scale no warp has read yet */
    if (S::bytes && a.p.v.form == GPU_ROW_SCALED && key < S::tile && (key < low || key >= high)) {
        ((float *)(stage + 2 * S::half))[S::tile + key] = 0.0f;
    }
    __syncwarp(); /* what the warp reads is clean */
}

/* o += weights x values of a tile, in the warp's own dims. */
template <int KIND, int D>
static __device__ __forceinline__ void
add_wide(const sm80_params &a, const wide_run &r, const char *stage, int view, int lane,
         float (&s)[wide_shape<KIND, D>::scores][4], float (&m)[2], float (&l)[2], value_sums &sums,
         float (&o)[wide_shape<KIND, D>::sums][4])
{
    using S = wide_shape<KIND, D>;
    const int warp = threadIdx.x >> 5;
    const bool apart = view == SEES_APART;
    soften<SM80_MANY>(r.high_rows, s, m, l, sums.z, o);
    if (S::bytes && a.p.v.form == GPU_ROW_SCALED) {
        const float *v_scales = (const float *)(stage + 2 * S::half) + S::tile + (lane & 3) * 2;
        float scales[S::scores][2];
        load_value_scales<KIND, SM80_MANY>(stage, v_scales, a.planes[1], 0, lane, apart, s, sums.z,
                                           scales);
        scale_weights<KIND, SM80_MANY>(scales, apart, s, sums, o);
    }
    if (apart && values_odd<KIND, D, S::tile>(stage + S::half, 0, S::tile, lane)) {
        add_exactly<KIND, D, SM80_MANY, S::tile>(stage, a.planes[1], 0, warp * S::sums * 8, lane, s,
                                                 o);
        return;
    }
#pragma unroll
    for (int n = 0; n < S::scores; n += 2) {
        if constexpr (S::bytes) {
            add_bytes<KIND, D, S::tile, SM80_MANY>(stage + S::half, n * 8, lane, s[n], s[n + 1], o,
                                                   sums.z, warp * S::own_chunks);
        } else {
            add_values<KIND, D, S::tile>(stage + S::half, n * 8, lane, s[n], s[n + 1], o,
                                         warp * S::own_chunks);
        }
    }
}

template <int KIND, int D>
static __device__ __forceinline__ void compute_wide(const sm80_params &a,
                                                    shared<KIND, D, true> &mine)
{
    using S = wide_shape<KIND, D>;
    const gpu_params &p = a.p;
    const int lane = threadIdx.x & 31;
    float *shown = (float *)((char *)&mine + S::q_bytes + S::fixed - SM80_SCORES_SMEM(S::tile));
    float o[S::sums][4], m[2], l[2];
    value_sums sums = {};
    wide_run r = {};
    ring_place place;
    int turn = 0;
    clear_rows(m, l, o);
#pragma unroll 1
    for (;;) {
        barrier_wait(shared_address(&mine.full[place.stage]), place.phase);
        if (r.left == 0) {
            int32_t slot = mine.run_of_stage[place.stage];
            if (slot == NO_RUN) {
                break;
            }
            r = enter_wide_run<KIND, D>(p, mine.runs[slot], mine.q[0], lane,
                                        mine.all_see[threadIdx.x >> 5]);
        }
        char *at = stage_at(mine, place.stage);
        int view = view_of_tile(p, *r.run, r.rows, mine.all_see[threadIdx.x >> 5], r.tile_base,
                                r.tile_base + S::tile - 1);
        score_wide<KIND, D>(p, r, at, mine.q[0], view, lane, shown + turn * 16 * S::pitch);
        clear_wide<KIND, D>(a, r, view, at, lane);
        barrier_consumers(); /* all scores are there; those of the tile before have been read */
        float s[S::scores][4];
        load_scores<KIND, D>(shown + turn * 16 * S::pitch, lane, s);
        add_wide<KIND, D>(a, r, at, view, lane, s, m, l, sums, o);
        turn ^= 1;
        r.tile_base += S::tile;
        r.left--;
        end_tile<KIND, D, true, SM80_MANY>(a, mine, *r.run, r.left == 0,
                                           S::bytes && p.v.form == GPU_ROW_SCALED, place, m, l,
                                           sums, o);
    }
}

#endif
