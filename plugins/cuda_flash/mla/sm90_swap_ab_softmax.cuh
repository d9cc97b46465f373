/* SPDX-License-Identifier: Apache-2.0 */
/* The warp group of attend_latent_few that makes scores and weights. */
#ifndef CUDA_FLASH_SM90_SWAP_AB_SOFTMAX_CUH
#define CUDA_FLASH_SM90_SWAP_AB_SOFTMAX_CUH

#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_swap_ab_producer.cuh"

#define FEW_BARRIER 1 /* of the warp group */

/* A lane's sum of weights of a tile from which on bases move: bf16 holds what float32 does. */
template <int KIND> constexpr float few_most_weight = KIND == KIND_BF16 ? 1e12f : 4096.0f;

/* What a thread that makes weights has of a run. Its scores are of keys 16 warp + lane / 4 and 8
 * behind it, and of rows 8 i + 2 (lane & 3) + e: score 4 i + 2 h + e, row 2 i + e. */
template <int ROWS> struct few_scores {
    gpu_row_tile item;
    few_queries queries;
    int32_t first, last; /* keys that all rows see */
    uint32_t real;       /* bit i: row i of the thread's is real */
    float m[ROWS / 4], l[ROWS / 4];
};

template <int ROWS>
static __device__ __forceinline__ void enter_scores(const gpu_problem &p, few_shared<ROWS> &mine,
                                                    const gpu_row_tile &item, few_scores<ROWS> &r)
{
    const gpu_request request = request_of_row_tile(item);
    r.item = item;
    r.queries = queries_of(p, item);
    if ((threadIdx.x & 127) < ROWS) {
        mine.query_of[threadIdx.x & 127] = query_of_row(p, r.queries, threadIdx.x & 127);
    }
    /* later queries see no key before those of earlier ones, nor fewer behind */
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
        r.m[i] = -INFINITY;
        r.l[i] = 0.0f;
    }
}

/* A tile that not all rows see whole. Its terms go to the scores, and values get what they may be
 * multiplied by 0 with: nothing of a key that no row sees, nothing that is not finite of one that
 * some do not see. Rows that see such a key have a NaN or no weight for it. */
template <int KIND, int ROWS>
static __device__ __forceinline__ void
mask_tile(const gpu_problem &p, few_shared<ROWS> &mine, const few_scores<ROWS> &r, int32_t first,
          const few_place<few_shared<ROWS>::SLOTS> &place, float (&s)[ROWS / 2])
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
        mine.term[i / GPU_TILE][i % GPU_TILE] = sees ? term : -INFINITY;
    }
    barrier_group(FEW_BARRIER); /* terms are there, and nobody multiplies the keys any more */
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int key = (thread >> 5) * 16 + ((thread & 31) >> 2) + (i & 2) * 4;
        const int row = (i >> 2) * 8 + (thread & 3) * 2 + (i & 1);
        const float term = mine.term[mine.query_of[row]][key];
        s[i] = term == -INFINITY ? -INFINITY : s[i] + term;
    }
    const int lane = thread & 31;
    uint32_t none[2], part[2]; /* keys that no query sees, and that some see: one a lane */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int32_t see = 0;
#pragma unroll 1
        for (int n = 0; n < r.queries.count; n++) {
            see += mine.term[n][32 * h + lane] != -INFINITY;
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
            const uint32_t at = shared_address(mine.k[place.slot_of(1 + (chunk >> 3))]) +
                                place_in_column(row, chunk);
            store16(at, clears ? make_uint4(0, 0, 0, 0) : finite_halves<KIND>(load16(at)));
        }
    }
}

/* Weights of a tile's scores, two rows in a register, and what they add up to. */
template <int KIND, int ROWS>
static __device__ __forceinline__ void
weigh_few(const float (&s)[ROWS / 2], uint32_t (&w)[ROWS / 16][4], float (&sum)[ROWS / 4])
{
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) {
        const float x[4] = {fast_exp2(s[4 * i]), fast_exp2(s[4 * i + 1]), fast_exp2(s[4 * i + 2]),
                            fast_exp2(s[4 * i + 3])};
        sum[2 * i] = x[0] + x[2];
        sum[2 * i + 1] = x[1] + x[3];
        w[i >> 1][(i & 1) * 2] = pack2<KIND>(x[0], x[1]);
        w[i >> 1][(i & 1) * 2 + 1] = pack2<KIND>(x[2], x[3]);
    }
}

/* The bases of rows with scores far above them, or of rows without one, move to the largest score
 * of the tile; scores and sums count from them. All threads of the warp group find the same. */
template <int ROWS>
static __device__ __forceinline__ void move_few_bases(few_shared<ROWS> &mine, few_scores<ROWS> &r,
                                                      float (&s)[ROWS / 2])
{
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    float high[ROWS / 4];
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int at = (i >> 1) * 4 + (i & 1);
        high[i] = fmaxf(fmaxf(-INFINITY, s[at]), s[at + 2]);
#pragma unroll
        for (int d = 4; d < 32; d <<= 1) {
            high[i] = fmaxf(high[i], __shfl_xor_sync(0xffffffffu, high[i], d));
        }
        if (lane < 4) {
            mine.high[warp][(i >> 1) * 8 + lane * 2 + (i & 1)] = high[i];
        }
    }
    barrier_group(FEW_BARRIER); /* each warp's are there */
#pragma unroll
    for (int i = 0; i < ROWS / 4; i++) {
        const int row = (i >> 1) * 8 + (lane & 3) * 2 + (i & 1), at = (i >> 1) * 4 + (i & 1);
        const float by = fmaxf(fmaxf(mine.high[0][row], mine.high[1][row]),
                               fmaxf(mine.high[2][row], mine.high[3][row]));
        if (by > BASE_ROOM || (r.m[i] == -INFINITY && by > -INFINITY)) {
            const float to = softmax_base(r.m[i]) + by;
            r.l[i] *= fast_exp2(r.m[i] - to);
            r.m[i] = to;
            s[at] -= by;
            s[at + 2] -= by;
        }
    }
}

/* Scores^T and weights of all tiles of all runs. */
template <int KIND, int ROWS>
static __device__ __forceinline__ void make_weights(const sm90_latent_params &a,
                                                    few_shared<ROWS> &mine)
{
    const gpu_params &p = a.p.attend;
    const int warp = threadIdx.x >> 5 & 3, lane = threadIdx.x & 31;
    const float scale = p.problem.scale * LOG2E;
    const uint64_t q = matrix_at(shared_address(mine.q), 0, 1024);
    const uint64_t ring = matrix_at(shared_address(mine.k), 0, 1024);
    /* weights of 8 rows by 8 keys: matrix lane / 8 of a store */
    const uint32_t to = (lane >> 4) * 1024 + place_in_column(lane & 7, warp * 2 + (lane >> 3 & 1));
    few_place<few_shared<ROWS>::SLOTS> place = {0, 0};
    few_scores<ROWS> r;
    float s[ROWS / 2], sum[ROWS / 4];
    uint32_t w[ROWS / 16][4];
    int q_phase = 0, turn = 0; /* turn: tiles, to the last two bits */
#pragma unroll 1
    for (few_runs runs(p.schedule); runs.real; runs.advance(p.schedule)) {
        const latent_run &run = runs.run;
        enter_scores<ROWS>(p.problem, mine, run.item, r);
        barrier_wait(shared_address(&mine.q_full), q_phase);
        q_phase ^= 1;
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++, turn++) {
            const int b = turn & 1;
            pin(s);
#pragma unroll
            for (int n = 0; n < LATENT_COLUMNS; n++) {
                const int slot = place.slot_of(n);
                barrier_wait(shared_address(&mine.full[slot]), place.phase_of(n));
                wgmma_begin();
                const uint64_t k = ring + slot * (LATENT_COLUMN_BYTES / 16);
                const int column = column_of(n);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    wgmma_few<KIND, ROWS, false>(s, k + i * 2, q + column * (ROWS * 8) + i * 2,
                                                 n > 0 || i > 0);
                }
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(s);
            arrive_warp(mine.empty[place.slot]);
            if (t + 1 == run.count) {
                arrive_warp(mine.q_empty);
            }
            const int32_t first = run.base + t * GPU_TILE;
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                s[i] = fmaf(s[i], scale, -softmax_base(r.m[(i >> 2) * 2 + (i & 1)]));
            }
            if (first < r.first || first + GPU_TILE - 1 > r.last) {
                mask_tile<KIND, ROWS>(p.problem, mine, r, first, place, s);
            }
            weigh_few<KIND, ROWS>(s, w, sum);
            bool far = false;
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                far |= (r.real >> i & 1) != 0 &&
                       (!(sum[i] < few_most_weight<KIND>) || r.m[i] == -INFINITY);
            }
            const bool moves = barrier_group_any(FEW_BARRIER, far);
            if (moves) {
                move_few_bases<ROWS>(mine, r, s);
                weigh_few<KIND, ROWS>(s, w, sum);
            }
#pragma unroll
            for (int i = 0; i < ROWS / 4; i++) {
                r.l[i] += sum[i];
            }
            barrier_wait(shared_address(&mine.weights_empty[b]), (turn >> 1 & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < ROWS / 16; i++) {
                store4_transposed(shared_address(mine.weights[b]) + i * 2048 + to, w[i]);
            }
            if (moves && warp == 0 && lane < 4) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
                    mine.base[b][(i >> 1) * 8 + lane * 2 + (i & 1)] = r.m[i];
                }
            }
            if (warp == 0 && lane == 0) {
                mine.moved[b] = moves;
            }
            if (t + 1 == run.count) {
#pragma unroll
                for (int i = 0; i < ROWS / 4; i++) {
#pragma unroll
                    for (int d = 4; d < 32; d <<= 1) {
                        r.l[i] += __shfl_xor_sync(0xffffffffu, r.l[i], d);
                    }
                    if (lane < 4) {
                        mine.sum[b][warp][(i >> 1) * 8 + lane * 2 + (i & 1)] = r.l[i];
                    }
                }
            }
            fence_for_boxes(); /* wgmma reads the weights, and values that were cleared */
            barrier_arrive(shared_address(&mine.weights_full[b]));
            place.advance();
        }
    }
}

#endif
