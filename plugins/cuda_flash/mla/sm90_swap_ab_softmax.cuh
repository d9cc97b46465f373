/* SPDX-License-Identifier: Apache-2.0 */
/* The consumer warp group of attend_latent_swap_ab that makes S^T and P^T. */
#ifndef CUDA_FLASH_SM90_SWAP_AB_SOFTMAX_CUH
#define CUDA_FLASH_SM90_SWAP_AB_SOFTMAX_CUH

#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_swap_ab_producer.cuh"

#define SWAP_AB_BARRIER 1 /* named barrier of the warp group */

/* A lane's sum of P in a tile from which on row_max is raised. bf16 has the range of float32. */
template <int KIND> constexpr float max_prob_sum = KIND == KIND_BF16 ? 1e12f : 4096.0f;

/* A softmax thread's state of a run. Its scores belong to keys 16 warp + lane / 4 and that + 8, and
 * to rows 8 i + 2 (lane & 3) + e: score 4 i + 2 h + e, row 2 i + e. */
template <int ROWS> struct softmax_state {
    gpu_row_tile item;
    item_queries queries;
    int32_t first, last; /* keys that all rows see */
    uint32_t real;       /* bit i: the thread's row i exists */
    float row_max[ROWS / 4], row_sum[ROWS / 4];
};

template <int ROWS>
GPU_INLINE void begin_run(const gpu_problem &p, swap_ab_shared<ROWS> &smem,
                          const gpu_row_tile &item, softmax_state<ROWS> &r)
{
    const gpu_request request = request_of_row_tile(item);
    r.item = item;
    r.queries = queries_of(p, item);
    if ((threadIdx.x & 127) < ROWS) {
        smem.query_of[threadIdx.x & 127] = query_of_row(p, r.queries, threadIdx.x & 127);
    }
    /* Bounds never decrease from one query to the next. */
    r.first = interval_of(p, request, r.queries.first + r.queries.count - 1).first;
    r.last = interval_of(p, request, r.queries.first).last;
    if (p.tree != nullptr) {
        r.last = min(r.last, item.length - item.query_len - 1);
    }
    r.real = 0;
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int row = (i >> 1) * 8 + (threadIdx.x & 3) * 2 + (i & 1);
        r.real |= (uint32_t)(row < item.num_rows) << i;
        r.row_max[i] = -INFINITY;
        r.row_sum[i] = 0.0f;
    }
}

/* Applies terms and masks to a tile, and clears values that may meet P of 0: values of keys that no
 * query sees, and non-finite values of keys that some queries do not see. Rows that see such a key
 * get NaN through their scores, or P of 0. */
template <int KIND, int ROWS>
GPU_INLINE void apply_mask(const gpu_problem &p, swap_ab_shared<ROWS> &smem,
                           const softmax_state<ROWS> &r, int32_t first,
                           const ring_state<swap_ab_shared<ROWS>::SLOTS> &place,
                           float (&acc_s)[ROWS / 2])
{
    const gpu_request request = request_of_row_tile(r.item);
    const int thread = threadIdx.x & 127;
#pragma unroll 1
    for (int i = thread; i < r.queries.count * GPU_TILE; i += 128) {
        const int32_t index = r.queries.first + i / GPU_TILE, j = first + i % GPU_TILE;
        const gpu_interval seen = interval_of(p, request, index);
        bool sees = j >= max(seen.first, 0) && j <= seen.last && j < r.item.length;
        float term = 0.0f;
        const int32_t column = j - (r.item.length - r.item.query_len);
        if (p.tree != nullptr && column >= 0 && sees) {
            const int64_t at = r.item.request * p.tree_request + index * p.tree_row;
            if (p.tree_mask == ATTN_TREE_BITS) {
                sees = ((const uint32_t *)p.tree)[at + column / 32] >> (column % 32) & 1;
            } else if (column < r.item.query_len) {
                term = ((const float *)p.tree)[at + column] * LOG2E;
            }
        }
        smem.term[i / GPU_TILE][i % GPU_TILE] = sees ? term : -INFINITY;
    }
    /* all terms are written, and Q K^T has finished reading the tile */
    barrier_group(SWAP_AB_BARRIER);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int key = (thread >> 5) * 16 + ((thread & 31) >> 2) + (i & 2) * 4;
        const int row = (i >> 2) * 8 + (thread & 3) * 2 + (i & 1);
        const float term = smem.term[smem.query_of[row]][key];
        acc_s[i] = term == -INFINITY ? -INFINITY : acc_s[i] + term;
    }
    const int lane = thread & 31;
    /* keys that no query or only some queries see; a lane has one of each 32 keys */
    uint32_t none[2], part[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t see = 0;
#pragma unroll 1
        for (int n = 0; n < r.queries.count; n++) {
            see += smem.term[n][32 * h + lane] != -INFINITY;
        }
        none[h] = __ballot_sync(0xffffffffu, see == 0);
        part[h] = __ballot_sync(0xffffffffu, see > 0 && see < r.queries.count);
    }
#pragma unroll 1
    for (int row = thread >> 5; row < GPU_TILE; row += 4) {
        const uint32_t bit = 1u << (row & 31);
        const bool clears = ((row < 32 ? none[0] : none[1]) & bit) != 0;
        if (!clears && ((row < 32 ? part[0] : part[1]) & bit) == 0) {
            continue;
        }
#pragma unroll
        for (int chunk = lane; chunk < LATENT_MAX_RANK / 8; chunk += 32) {
            const uint32_t at = shared_address(smem.k[place.slot_of(1 + (chunk >> 3))]) +
                                place_in_column(row, chunk);
            store16(at, clears ? make_uint4(0, 0, 0, 0) : finite_halves<KIND>(load16(at)));
        }
    }
}

/* Computes P of a tile, two rows in a register, and its sums. */
template <int KIND, int ROWS>
GPU_INLINE void exp_scores(const float (&acc_s)[ROWS / 2], uint32_t (&probs)[ROWS / 16][4],
                           float (&sum)[ROWS / 4])
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        const float x[4] = {fast_exp2(acc_s[4 * i]), fast_exp2(acc_s[4 * i + 1]),
                            fast_exp2(acc_s[4 * i + 2]), fast_exp2(acc_s[4 * i + 3])};
        sum[2 * i] = x[0] + x[2];
        sum[2 * i + 1] = x[1] + x[3];
        probs[i >> 1][(i & 1) * 2] = pack2<KIND>(x[0], x[1]);
        probs[i >> 1][(i & 1) * 2 + 1] = pack2<KIND>(x[2], x[3]);
    }
}

/* Raises row_max of rows whose scores exceed it by more than the threshold, or that have none yet,
 * to the tile's maximum, and rescales scores and row_sum. All threads of the warp group get the
 * same result. */
template <int ROWS>
GPU_INLINE void update_row_max(swap_ab_shared<ROWS> &smem, softmax_state<ROWS> &r,
                               float (&acc_s)[ROWS / 2])
{
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    float new_max[ROWS / 4];
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int at = (i >> 1) * 4 + (i & 1);
        new_max[i] = fmaxf(fmaxf(-INFINITY, acc_s[at]), acc_s[at + 2]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(0xffffffffu, new_max[i], d));
        }
        if (lane < 4) {
            smem.tile_max[warp][(i >> 1) * 8 + lane * 2 + (i & 1)] = new_max[i];
        }
    }
    barrier_group(SWAP_AB_BARRIER); /* all warps have written their maximum */
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int row = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1), at = (i >> 1) * 4 + (i & 1);
        const float by = fmaxf(fmaxf(smem.tile_max[0][row], smem.tile_max[1][row]),
                               fmaxf(smem.tile_max[2][row], smem.tile_max[3][row]));
        if (by > RESCALE_THRESHOLD || (r.row_max[i] == -INFINITY && by > -INFINITY)) {
            const float to = softmax_base(r.row_max[i]) + by;
            r.row_sum[i] *= fast_exp2(r.row_max[i] - to);
            r.row_max[i] = to;
            acc_s[at] -= by;
            acc_s[at + 2] -= by;
        }
    }
}

/* Makes S^T and P^T of all tiles of all runs. */
template <int KIND, int ROWS>
GPU_INLINE void softmax_consumer(const sm90_latent_params &a, swap_ab_shared<ROWS> &smem)
{
    const gpu_params &p = a.p.attend;
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const float scale = p.problem.scale * LOG2E;
    const uint64_t q = descriptor_at(shared_address(smem.q), 0, 1024);
    const uint64_t ring = descriptor_at(shared_address(smem.k), 0, 1024);
    /* P of 8 rows and 8 keys: matrix lane / 8 of a store. */
    const uint32_t to = (lane >> 4) * 1024 + place_in_column(lane & 7, warp * 2 + (lane >> 3 & 1));
    ring_state<swap_ab_shared<ROWS>::SLOTS> place = {0, 0};
    softmax_state<ROWS> r;
    float acc_s[ROWS / 2], sum[ROWS / 4];
    uint32_t probs[ROWS / 16][4];
    int q_phase = 0, turn = 0; /* turn: counter of tiles, whose last two bits are used */
#pragma unroll 1
    for (run_iterator runs(p.schedule); runs.real; runs.advance(p.schedule)) {
        const latent_run &run = runs.run;
        begin_run<ROWS>(p.problem, smem, run.item, r);
        barrier_wait(shared_address(&smem.q_full), q_phase);
        q_phase ^= 1;
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++, turn++) {
            const int b = turn & 1;
            pin(acc_s);
#pragma unroll
            for (int n = 0; n < LATENT_COLUMNS; n++) {
                const int slot = place.slot_of(n);
                barrier_wait(shared_address(&smem.full[slot]), place.phase_of(n));
                wgmma_begin();
                const uint64_t k = ring + slot * (LATENT_COLUMN_BYTES / 16);
                const int column = column_of(n);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    wgmma_ss_small_n<KIND, ROWS, false>(
                        acc_s, k + i * 2, q + column * (ROWS * 8) + i * 2, n > 0 || i > 0);
                }
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(acc_s);
            arrive_warp(smem.empty[place.slot]);
            if (t + 1 == run.count) {
                arrive_warp(smem.q_empty);
            }
            const int32_t first = run.base + t * GPU_TILE;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                acc_s[i] = fmaf(acc_s[i], scale, -softmax_base(r.row_max[(i >> 2) * 2 + (i & 1)]));
            }
            if (first < r.first || first + GPU_TILE - 1 > r.last) {
                apply_mask<KIND, ROWS>(p.problem, smem, r, first, place, acc_s);
            }
            exp_scores<KIND, ROWS>(acc_s, probs, sum);
            bool far = false;
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                far |= (r.real >> i & 1) != 0 &&
                       (!(sum[i] < max_prob_sum<KIND>) || r.row_max[i] == -INFINITY);
            }
            const bool moves = barrier_group_any(SWAP_AB_BARRIER, far);
            if (moves) {
                update_row_max<ROWS>(smem, r, acc_s);
                exp_scores<KIND, ROWS>(acc_s, probs, sum);
            }
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                r.row_sum[i] += sum[i];
            }
            barrier_wait(shared_address(&smem.p_empty[b]), (turn >> 1 & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) {
                store4_transposed(shared_address(smem.p[b]) + i * 2048 + to, probs[i]);
            }
            if (moves && warp == 0 && lane < 4) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    smem.row_max[b][(i >> 1) * 8 + lane * 2 + (i & 1)] = r.row_max[i];
                }
            }
            if (warp == 0 && lane == 0) {
                smem.row_max_moved[b] = moves;
            }
            if (t + 1 == run.count) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
#pragma unroll
                    for (int d = 4; d < 32; d <<= 1) {
                        r.row_sum[i] += __shfl_xor_sync(0xffffffffu, r.row_sum[i], d);
                    }
                    if (lane < 4) {
                        smem.row_sum[b][warp][(i >> 1) * 8 + lane * 2 + (i & 1)] = r.row_sum[i];
                    }
                }
            }
            fence_async_proxy(); /* wgmma reads P and the cleared values */
            barrier_arrive(shared_address(&smem.p_full[b]));
            place.advance();
        }
    }
}

#endif
