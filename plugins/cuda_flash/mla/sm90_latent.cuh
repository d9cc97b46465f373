/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a. A CTA has 64 rows of queries in shared memory (heads of one query or all
 * heads of several) and two buffers of 64 latent rows, 72 KiB each. Tiles come in pairs: each of
 * two consumer warp groups makes P of one tile and adds P V of both tiles in its half of the 512
 * dims, so that one uses the tensor cores during the other's softmax. P reaches the other warp
 * group through the tile's rope columns, which values do not have. A tile has 64 x 1152 bytes and
 * 8.9 MFLOP: 2176 clocks of the tensor cores, and 2300 of shared memory reads. */
#ifndef CUDA_FLASH_SM90_LATENT_CUH
#define CUDA_FLASH_SM90_LATENT_CUH

#include "gpu/cuda/launch.cuh"
#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_latent_cluster.cuh"
#include "sm90_latent_producer.cuh"

#define MAX_PROB_SUM 1e12f /* bf16: a lane's sum of P in a tile from which on row_max is raised */
#define BARRIER_CLEAR 1    /* and 2, one for each warp group: masked values are cleared */
#define BARRIER_KEYS 3     /* and 4, one for each warp group: its Q K^T has read the tile */

/* Who copies keys: TMA, where scores have no terms; four warps by cp.async; or eight warps that
 * convert 8-bit rows to f16. */
enum latent_producer { LATENT_BY_BOXES, LATENT_BY_ROWS, LATENT_BY_CODES };

/* Starts acc_s = Q K^T with half of the columns of buffer B, each as soon as it has arrived. The
 * first half is the one that is released first, B; the rope column belongs to the second. */
template <int KIND, bool BOXES, bool ROPE, int B, bool SECOND>
GPU_INLINE void start_qk(latent_shared &smem, int phase, float (&acc_s)[32])
{
    constexpr int FIRST = (B ^ SECOND) * 4, COUNT = SECOND && ROPE ? 5 : 4;
    uint64_t q = descriptor_at(shared_address(smem.q), 0, 1024);
    uint64_t k = descriptor_at(shared_address(smem.k[B]), 0, 1024);
    if (!SECOND) { /* the second half accumulates to the first */
        pin(acc_s);
    }
    if (!BOXES) {
        barrier_wait(shared_address(&smem.full[B][SECOND]), phase);
        fence_async_proxy(); /* wgmma reads what other threads wrote */
        wgmma_begin();
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const int c = n < 4 ? FIRST + n : LATENT_ROPE;
        if (BOXES) {
            barrier_wait(shared_address(&smem.full[B][c]), phase);
            wgmma_begin();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t at = c * (LATENT_COLUMN_BYTES / 16) + i * 2;
            wgmma_ss<KIND, 64>(acc_s, q + at, k + at, SECOND || n > 0 || i > 0);
        }
    }
    wgmma_commit();
}

/* Starts acc_o += P V of this warp group's P and buffer b in its half of the dims, COLUMNS at a
 * time. */
template <int KIND, int COLUMNS>
GPU_INLINE void start_pv_own(latent_shared &smem, int b, int half, const uint32_t (&probs)[4][4],
                             float (&acc_o)[128])
{
    uint64_t v = descriptor_at(shared_address(smem.k[b][half * 4]), LATENT_COLUMN_BYTES, 1024);
    pin(acc_o);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < 256 / COLUMNS; n++) {
        auto &sums = (float(&)[COLUMNS / 2]) acc_o[n * (COLUMNS / 2)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_rs<KIND, COLUMNS>(sums, probs[i],
                                    v + n * (COLUMNS / 64 * LATENT_COLUMN_BYTES / 16) + i * 128);
        }
    }
    wgmma_commit();
}

/* As start_pv_own, with the other warp group's P. */
template <int KIND, int COLUMNS>
GPU_INLINE void start_pv_other(latent_shared &smem, int b, int half, float (&acc_o)[128])
{
    uint64_t v = descriptor_at(shared_address(smem.k[b][half * 4]), LATENT_COLUMN_BYTES, 1024);
    uint64_t probs = descriptor_at(shared_address(smem.k[b][LATENT_ROPE]), 0, 1024);
    pin(acc_o);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < 256 / COLUMNS; n++) {
        auto &sums = (float(&)[COLUMNS / 2]) acc_o[n * (COLUMNS / 2)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_ss_bmn<KIND, COLUMNS>(
                sums, probs + i * 2, v + n * (COLUMNS / 64 * LATENT_COLUMN_BYTES / 16) + i * 128);
        }
    }
    wgmma_commit();
}

/* A thread's state of its rows, row and row + 8 of the tile. */
struct latent_rows {
    int32_t row, first, last; /* first, last: keys that all rows see */
    int32_t base, count;      /* the run's first key and number of tiles */
    float row_max[2], row_sum[2];
};

/* Clears values of a tile with masked keys, because 0 x NaN is NaN: values that no row sees become
 * zero, since boxes may have left anything there; values that only some rows see become zero where
 * they are not finite (rows that see them get NaN through their scores, or P of 0). */
template <int KIND>
GPU_INLINE void clear_values(latent_shared &smem, int b, const latent_rows &r, int32_t t, int half)
{
    const int32_t first = r.base + t * GPU_TILE;
    if (first >= r.first && first + GPU_TILE - 1 <= r.last) {
        return;
    }
    barrier_group(BARRIER_CLEAR + half); /* the bounds of all rows are written */
    /* load16 is opaque: if ptxas sees a load with the same result in all threads here, it passes
     * wgmma's descriptors through vector registers */
    const int32_t low = (int32_t)load16(shared_address(smem.seen[half])).x;
    const int32_t high = (int32_t)load16(shared_address(&smem.seen[half][SM90_LATENT_ROWS - 2])).w;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < GPU_TILE * (LATENT_MAX_RANK / 8); i += 128) {
        const int row = i / (LATENT_MAX_RANK / 8), chunk = i % (LATENT_MAX_RANK / 8);
        const uint32_t at = shared_address(smem.k[b][chunk >> 3]) + place_in_column(row, chunk);
        const int32_t key = first + row;
        if (key < low || key > high) {
            store16(at, make_uint4(0, 0, 0, 0));
        } else if (key < r.first || key > r.last) {
            store16(at, finite_halves<KIND>(load16(at)));
        }
    }
    fence_async_proxy();
    barrier_group(BARRIER_CLEAR + half); /* all threads have cleared their part */
}

/* The factor of Q K^T; in base 2 unless a soft cap follows. */
GPU_INLINE float score_scale(const gpu_params &p)
{
    float scale = p.problem.scale * value_scale(p.k);
    return p.problem.soft_cap > 0.0f ? scale : scale * LOG2E;
}

/* Turns Q K^T into scores in base 2, adds the keys' terms and subtracts row_max. */
GPU_INLINE void add_terms(const gpu_problem &p, const float *terms, float scale,
                          const float (&row_max)[2], float (&acc_s)[32])
{
    if (p.soft_cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            acc_s[i] = cap_score(acc_s[i] * scale, p.soft_cap) * LOG2E;
        }
        scale = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 term = *(const float2 *)&terms[i * 8 + (threadIdx.x & 3) * 2];
#pragma unroll
        for (int e = 0; e < 4; e++) { /* Q K^T of a masked key is 0 */
            acc_s[4 * i + e] =
                fmaf(acc_s[4 * i + e], scale, e & 1 ? term.y : term.x) - row_max[e >> 1];
        }
    }
}

/* Raises row_max to the tile's maximum if that exceeds it by more than the threshold, or if there
 * is no row_max yet. Scores are relative to row_max. */
GPU_INLINE void update_row_max(float (&row_max)[2], float (&acc_s)[32])
{
    float tile_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        tile_max[(i >> 1) & 1] = fmaxf(tile_max[(i >> 1) & 1], acc_s[i]);
    }
    bool far = fmaxf(tile_max[0], tile_max[1]) > RESCALE_THRESHOLD ||
               fminf(row_max[0], row_max[1]) == -INFINITY;
    if (!__any_sync(0xffffffffu, far)) {
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float raise = fmaxf(tile_max[h], __shfl_xor_sync(0xffffffffu, tile_max[h], 1));
        raise = fmaxf(raise, __shfl_xor_sync(0xffffffffu, raise, 2));
        if (raise > RESCALE_THRESHOLD || (row_max[h] == -INFINITY && raise > -INFINITY)) {
            row_max[h] = softmax_base(row_max[h]) + raise;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                acc_s[(i >> 1) * 4 + h * 2 + (i & 1)] -= raise;
            }
        }
    }
}

/* Computes P of a tile and its sums. */
template <int KIND>
GPU_INLINE void exp_scores(const float (&acc_s)[32], uint32_t (&probs)[4][4], float (&sum)[2])
{
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float x = fast_exp2(acc_s[2 * i]), y = fast_exp2(acc_s[2 * i + 1]);
        sum[i & 1] += x + y;
        probs[i >> 2][i & 3] = pack2<KIND>(x, y);
    }
}

/* Softmax of a tile: P goes to `probs` for this warp group and to the tile's rope columns for the
 * other. row_max is updated; `sum` gets the sums of P. */
template <int KIND, bool BOXES, bool ROPE>
GPU_INLINE void softmax_tile(const gpu_problem &p, latent_shared &smem, int b, int turn, int32_t t,
                             float scale, const latent_rows &r, float (&row_max)[2],
                             float (&acc_s)[32], uint32_t (&probs)[4][4], float (&sum)[2])
{
    const int lane = threadIdx.x & 31;
    const int32_t first = r.base + t * GPU_TILE;
    const float prev_max[2] = {softmax_base(row_max[0]), softmax_base(row_max[1])};
    bool has_terms = false;
    if (!BOXES) {
        const uint2 by_warp = load8(shared_address(smem.has_terms[turn][t & 7]));
        has_terms = __any_sync(0xffffffffu, (by_warp.x | by_warp.y) != 0);
    }
    if (has_terms) {
        add_terms(p, smem.term[turn][t & 7], scale, prev_max, acc_s);
    } else {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            acc_s[i] = fmaf(acc_s[i], scale, -prev_max[(i >> 1) & 1]);
        }
    }
    if (BOXES && (first < r.first || first + GPU_TILE - 1 > r.last)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int2 seen = smem.seen[b][r.row + 8 * h];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int at = (i >> 1) * 4 + h * 2 + (i & 1);
                const int32_t j = first + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
                acc_s[at] = j >= seen.x && j <= seen.y ? acc_s[at] : -INFINITY;
            }
        }
    }
    /* bf16 has the range of float32, so the sum shows whether P is too large */
    if (KIND == KIND_BF16) {
        exp_scores<KIND>(acc_s, probs, sum);
        bool far =
            !(fmaxf(sum[0], sum[1]) < MAX_PROB_SUM) || fminf(row_max[0], row_max[1]) == -INFINITY;
        if (__any_sync(0xffffffffu, far)) {
            update_row_max(row_max, acc_s);
            exp_scores<KIND>(acc_s, probs, sum);
        }
    } else {
        update_row_max(row_max, acc_s);
        exp_scores<KIND>(acc_s, probs, sum);
    }
    int row = (threadIdx.x & 96) / 2 + (lane & 15);
    if (ROPE) {
        barrier_group(BARRIER_KEYS + b); /* all warps have finished reading the rope columns */
    }
    uint32_t to = shared_address(smem.k[b][LATENT_ROPE]) + place_in_column(row, lane >> 4);
    /* hides the address from the compiler, which would keep it over the loop and spill */
    asm volatile("mov.b32 %0, %0;" : "+r"(to));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store4(to ^ i * 32, probs[i]);
    }
    if ((lane & 3) == 0) {
        smem.row_max[b][r.row] = row_max[0];
        smem.row_max[b][r.row + 8] = row_max[1];
    }
    fence_async_proxy(); /* wgmma reads P */
}

/* Rescales acc_o and row_sum to a new row_max. */
GPU_INLINE void rescale_o(const float (&new_max)[2], latent_rows &r, float (&acc_o)[128])
{
    if (!__any_sync(0xffffffffu, new_max[0] != r.row_max[0] || new_max[1] != r.row_max[1])) {
        return;
    }
    float scores_scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        scores_scale[h] = fast_exp2(r.row_max[h] - softmax_base(new_max[h]));
        r.row_max[h] = new_max[h];
        r.row_sum[h] *= scores_scale[h];
    }
#pragma unroll
    for (int i = 0; i < 128; i++) {
        acc_o[i] *= scores_scale[(i >> 1) & 1];
    }
}

/* Waits for the other warp group's P of buffer b and rescales to its row_max. */
GPU_INLINE void wait_for_p(latent_shared &smem, int b, int phase, latent_rows &r,
                           float (&acc_o)[128])
{
    barrier_wait(shared_address(&smem.p_full[b]), phase);
    const float new_max[2] = {smem.row_max[b][r.row], smem.row_max[b][r.row + 8]};
    rescale_o(new_max, r, acc_o);
    fence_async_proxy();
}

/* A lane's elements of dims 32 k .. 32 k + 31 of its half of a row. */
template <int KIND, int H>
GPU_INLINE void pack_row(bool narrows, float factor, const float (&acc_o)[128], int k,
                         uint32_t (&x)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float first = acc_o[(4 * k + i) * 4 + 2 * H] * factor;
        const float second = acc_o[(4 * k + i) * 4 + 2 * H + 1] * factor;
        x[i] = pack2<KIND>(first, second);
        if (narrows) {
            x[i] = pack2<KIND_BF16>(first, second);
        }
    }
}

/* Writes a row in the warp group's half of the dims, 16 bytes a lane or less where out is not
 * aligned. */
template <int KIND, int H>
GPU_INLINE void write_row(const sm90_latent_params &a, char *to, bool real, float factor,
                          const float (&acc_o)[128])
{
    const int part = threadIdx.x & 3;
    const bool narrows = KIND == KIND_F16 && a.p.attend.out.dtype == ATTN_DTYPE_BF16;
    uint32_t x[4];
    if (a.wide_out == 8) { /* one basic block, so that all shuffles overlap */
#pragma unroll
        for (int k = 0; k < 8; k++) {
            pack_row<KIND, H>(narrows, factor, acc_o, k, x);
            transpose_4x4(x);
            if (real) {
                *(uint4 *)(to + (4 * k + part) * 16) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        pack_row<KIND, H>(narrows, factor, acc_o, k, x);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint16_t *at = (uint16_t *)(to + (4 * k + i) * 16 + part * 4);
            if (real && a.wide_out == 2) {
                *(uint32_t *)at = x[i];
            } else if (real) {
                at[0] = (uint16_t)x[i];
                at[1] = (uint16_t)(x[i] >> 16);
            }
        }
    }
}

/* Writes acc_o of a run in the warp group's dims, to the output or to a part of the item. Returns
 * the next segment. */
template <int KIND, bool BOTH>
GPU_INLINE int32_t epilogue(const sm90_latent_params &a, latent_shared &smem, int32_t segment,
                            int turn, int half, latent_rows &r, float (&acc_o)[128])
{
    const gpu_params &p = a.p.attend;
    latent_run run = {}; /* loaded again to save registers */
    if constexpr (!BOTH) {
        run = load_run(p.schedule, segment);
    }
    if (BOTH && cluster_size() > 1) {
        end_tiles(smem);
    }
    const int lane = threadIdx.x & 31;
    const bool writes_lse = half == 0 && (lane & 3) == 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.row_sum[h] += __shfl_xor_sync(0xffffffffu, r.row_sum[h], 1);
        r.row_sum[h] += __shfl_xor_sync(0xffffffffu, r.row_sum[h], 2);
        if ((lane & 3) == 0) {
            smem.row_sum[turn][half][r.row + 8 * h] = r.row_sum[h];
        }
    }
    barrier_arrive(shared_address(&smem.sums_full));
    barrier_wait(shared_address(&smem.sums_full), turn); /* both row_sum are written */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.row_sum[h] = smem.row_sum[turn][0][r.row + 8 * h] + smem.row_sum[turn][1][r.row + 8 * h];
    }
    if constexpr (BOTH) {
        const int32_t next = smem.items[turn].next;
        write_item(a, smem, turn, half, r, acc_o);
        return next;
    }
    if ((r.row & ~15) >= run.item.num_rows) { /* all of this warp's rows are out of range */
        return run.next;
    }
    if (run.part >= 0) { /* in the layout of the threads, see merge_latent */
        float *part = p.schedule.parts + (int64_t)run.part * LATENT_PART;
        float4 *to = (float4 *)part + half * 32 * 128 + (threadIdx.x & 127);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            to[i * 128] =
                make_float4(acc_o[4 * i], acc_o[4 * i + 1], acc_o[4 * i + 2], acc_o[4 * i + 3]);
        }
#pragma unroll
        for (int h = 0; h < 2 && writes_lse; h++) {
            part[SM90_LATENT_ROWS * LATENT_MAX_RANK + r.row + 8 * h] = r.row_max[h];
            part[SM90_LATENT_ROWS * (LATENT_MAX_RANK + 1) + r.row + 8 * h] = r.row_sum[h];
        }
        return run.next;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int32_t row = r.row + 8 * h;
        const bool real = row < run.item.num_rows;
        int32_t at = run.item.first_row + row, index = at / p.problem.group;
        int64_t token = run.item.query_start + index, head = at - index * p.problem.group;
        float sink = real && p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
        float *lse = real && writes_lse && p.lse.data != nullptr
                         ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                         : nullptr;
        float factor =
            softmax_close_base2(sink, r.row_max[h], r.row_sum[h], lse) * value_scale(p.k);
        char *to = p.out.data + token * p.out.row + head * p.out.head + half * 512;
        if (h == 0) {
            write_row<KIND, 0>(a, to, real, factor, acc_o);
        } else {
            write_row<KIND, 1>(a, to, real, factor, acc_o);
        }
    }
    return run.next;
}

/* Starts a run and writes the rows' bounds to shared memory. Rows out of range get the bounds of
 * the last row. Bounds never decrease from one query to the next. */
template <bool BOXES, bool BOTH>
GPU_INLINE latent_rows begin_run(const sm90_latent_params &a, latent_shared &smem, int32_t segment,
                                 int turn, int half, gpu_row_tile &item)
{
    const gpu_params &p = a.p.attend;
    latent_rows r;
    if constexpr (BOTH) {
        barrier_wait(shared_address(&smem.item_full), turn);
        r.base = smem.items[turn].base;
        r.count = smem.items[turn].count;
        item = rows_of_item(a, smem.items[turn]);
    } else {
        const latent_run run = load_run(p.schedule, segment);
        r.base = run.base;
        r.count = run.count;
        item = run.item;
    }
    const gpu_request request = request_of_row_tile(item);
    r.row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
    if (BOXES) {
        const int32_t end = item.first_row + item.num_rows - 1;
        r.first = interval_of(p.problem, request, end / p.problem.group).first;
        r.last = interval_of(p.problem, request, item.first_row / p.problem.group).last;
        for (int h = 0; h < 2; h++) {
            const int32_t row = min(item.first_row + r.row + 8 * h, end);
            const gpu_interval seen = interval_of(p.problem, request, row / p.problem.group);
            if ((threadIdx.x & 3) == 0) {
                smem.seen[half][r.row + 8 * h] = make_int2(seen.first, seen.last);
            }
        }
        __syncwarp(); /* each warp reads its own bounds; see clear_values */
    }
    r.row_max[0] = r.row_max[1] = -INFINITY;
    r.row_sum[0] = r.row_sum[1] = 0.0f;
    return r;
}

/* The warp group that makes P of the first tiles of pairs; it has dims 0 .. 255. */
template <int KIND, int PRODUCER, int COLUMNS, bool ROPE, bool BOTH>
GPU_INLINE void consumer_first(const sm90_latent_params &a, latent_shared &smem)
{
    constexpr bool BOXES = PRODUCER == LATENT_BY_BOXES;
    const gpu_params &p = a.p.attend;
    const float scale = score_scale(p);
    float acc_o[128], acc_s[32], row_max[2], sum[2];
    uint32_t probs[4][4];
    int phase = 0, other_phase = 0, q_phase = 0, turn = 0;
#pragma unroll 1
    for (int32_t segment = first_run<BOTH>(a); segment >= 0; turn ^= 1) {
        gpu_row_tile item;
        latent_rows r = begin_run<BOXES, BOTH>(a, smem, segment, turn, 0, item);
        bool pending_release = false; /* buffer 1 is still being read */
#pragma unroll
        for (int i = 0; i < 128; i++) {
            acc_o[i] = 0.0f;
        }
        if (PRODUCER == LATENT_BY_CODES) {
            copy_own_queries<ROPE>(a, smem, item, q_phase);
        }
        barrier_wait(shared_address(&smem.q_full), q_phase);
        q_phase ^= 1;
        fence_async_proxy();
#pragma unroll 1
        for (int32_t t = 0; t < r.count; t += 2) {
            /* If the tile has not arrived, buffer 1 is released before the wait, since the
             * producers may need it. All warps of the group agree, as wgmma_wait has to be the same
             * in them. */
            if (BOTH && pending_release &&
                barrier_group_any(BARRIER_KEYS,
                                  !barrier_has_passed(shared_address(&smem.full[0][0]), phase))) {
                wgmma_wait<0>();
                arrive_warp(smem.empty[1][0]);
                pending_release = false;
            }
            start_qk<KIND, BOXES, ROPE, 0, false>(smem, phase, acc_s);
            if (pending_release) {
                wgmma_wait<1>();
                arrive_warp(smem.empty[1][0]);
            }
            start_qk<KIND, BOXES, ROPE, 0, true>(smem, phase, acc_s);
            phase ^= 1;
            wgmma_wait<0>();
            pin(acc_s);
            pin(acc_o);
            if (t + 2 >= r.count) {
                arrive_warp(smem.q_empty);
            }
            if (BOXES) {
                clear_values<KIND>(smem, 0, r, t, 0);
            }
            row_max[0] = r.row_max[0], row_max[1] = r.row_max[1];
            softmax_tile<KIND, BOXES, ROPE>(p.problem, smem, 0, turn, t, scale, r, row_max, acc_s,
                                            probs, sum);
            barrier_arrive(shared_address(&smem.p_full[0]));
            rescale_o(row_max, r, acc_o);
            r.row_sum[0] += sum[0], r.row_sum[1] += sum[1];
            start_pv_own<KIND, COLUMNS>(smem, 0, 0, probs, acc_o);
            wgmma_wait<0>();
            pin(acc_o);
            arrive_warp(smem.empty[0][0]);
            pending_release = t + 1 < r.count;
            if (pending_release) {
                wait_for_p(smem, 1, other_phase, r, acc_o);
                other_phase ^= 1;
                start_pv_other<KIND, COLUMNS>(smem, 1, 0, acc_o);
            }
        }
        wgmma_wait<0>();
        pin(acc_o);
        if (pending_release) {
            arrive_warp(smem.empty[1][0]);
        }
        segment = epilogue<KIND, BOTH>(a, smem, segment, turn, 0, r, acc_o);
    }
}

/* The warp group that makes P of the second tiles; it has dims 256 .. 511. Its Q K^T starts before
 * it waits for P of the first tile, whose P V runs during its softmax. */
template <int KIND, int PRODUCER, int COLUMNS, bool ROPE, bool BOTH>
GPU_INLINE void consumer_second(const sm90_latent_params &a, latent_shared &smem)
{
    constexpr bool BOXES = PRODUCER == LATENT_BY_BOXES;
    const gpu_params &p = a.p.attend;
    const float scale = score_scale(p);
    float acc_o[128], acc_s[32], row_max[2], sum[2];
    uint32_t probs[4][4];
    int phase = 0, other_phase = 0, q_phase = 0, turn = 0;
#pragma unroll 1
    for (int32_t segment = first_run<BOTH>(a); segment >= 0; turn ^= 1) {
        gpu_row_tile item;
        latent_rows r = begin_run<BOXES, BOTH>(a, smem, segment, turn, 1, item);
#pragma unroll
        for (int i = 0; i < 128; i++) {
            acc_o[i] = 0.0f;
        }
        if (BOTH) {
            copy_mapped_queries(a, smem, item, q_phase);
        }
        if (PRODUCER == LATENT_BY_CODES) {
            copy_own_queries<ROPE>(a, smem, item, q_phase);
        }
        barrier_wait(shared_address(&smem.q_full), q_phase);
        q_phase ^= 1;
        fence_async_proxy();
        if (r.count == 1) { /* this warp group has no tile */
            arrive_warp(smem.q_empty);
        }
#pragma unroll 1
        for (int32_t t = 0; t + 1 < r.count; t += 2) {
            start_qk<KIND, BOXES, ROPE, 1, false>(smem, phase, acc_s);
            start_qk<KIND, BOXES, ROPE, 1, true>(smem, phase, acc_s);
            phase ^= 1;
            wgmma_wait<0>(); /* ptxas does not allow acc_o to be rescaled while acc_s is computed */
            pin(acc_s);
            wait_for_p(smem, 0, other_phase, r, acc_o);
            other_phase ^= 1;
            start_pv_other<KIND, COLUMNS>(smem, 0, 1, acc_o);
            if (t + 3 >= r.count) { /* the last tile of this warp group */
                arrive_warp(smem.q_empty);
            }
            if (BOXES) {
                clear_values<KIND>(smem, 1, r, t + 1, 1);
            }
            row_max[0] = r.row_max[0], row_max[1] = r.row_max[1];
            softmax_tile<KIND, BOXES, ROPE>(p.problem, smem, 1, turn, t + 1, scale, r, row_max,
                                            acc_s, probs, sum);
            barrier_arrive(shared_address(&smem.p_full[1]));
            wgmma_wait<0>();
            pin(acc_o);
            arrive_warp(smem.empty[0][1]);
            rescale_o(row_max, r, acc_o);
            r.row_sum[0] += sum[0], r.row_sum[1] += sum[1];
            start_pv_own<KIND, COLUMNS>(smem, 1, 1, probs, acc_o);
            wgmma_wait<0>();
            pin(acc_o);
            arrive_warp(smem.empty[1][1]);
        }
        if (r.count & 1) {
            wait_for_p(smem, 0, other_phase, r, acc_o);
            other_phase ^= 1;
            start_pv_other<KIND, COLUMNS>(smem, 0, 1, acc_o);
            wgmma_wait<0>();
            pin(acc_o);
            arrive_warp(smem.empty[0][1]);
        }
        segment = epilogue<KIND, BOTH>(a, smem, segment, turn, 1, r, acc_o);
    }
}

template <int PRODUCER> GPU_INLINE void init_barriers(latent_shared &smem, bool q_boxes)
{
    constexpr bool BOXES = PRODUCER == LATENT_BY_BOXES;
    constexpr int WARPS = BOXES                        ? 2
                          : PRODUCER == LATENT_BY_ROWS ? LATENT_COPY_WARPS
                                                       : LATENT_CONVERT_WARPS;
    barrier_init(shared_address(&smem.q_full), q_boxes ? 1 : WARPS * 32);
    barrier_init(shared_address(&smem.q_empty), 8);
    for (int b = 0; b < 2; b++) {
        /* copying threads arrive, and each producer warp for its terms; converting warps only so */
        for (int c = 0; c < LATENT_COLUMNS; c++) {
            int arrivals = PRODUCER == LATENT_BY_CODES ? WARPS : WARPS * 32 + (c == 1 ? WARPS : 0);
            barrier_init(shared_address(&smem.full[b][c]), BOXES ? 1 : arrivals);
        }
        barrier_init(shared_address(&smem.empty[b][0]), 4);
        barrier_init(shared_address(&smem.empty[b][1]), 4);
        barrier_init(shared_address(&smem.p_full[b]), 128);
    }
    barrier_init(shared_address(&smem.sums_full), 256);
    fence_barriers();
}

/* The number of producer warp groups, which precede the two consumers, and the registers of both.
 * TMA needs few registers. */
template <int PRODUCER> struct latent_threads {
    static constexpr int producers = PRODUCER == LATENT_BY_CODES ? 2 : 1,
                         threads = (producers + 2) * 128;
    static constexpr int consumer_registers = PRODUCER == LATENT_BY_CODES   ? 192
                                              : PRODUCER == LATENT_BY_BOXES ? 216
                                                                            : 208;
    static constexpr int producer_registers =
        (65536 / threads / 8 * 8 * (producers + 2) - 2 * consumer_registers) / producers;
};

template <int KIND, int PRODUCER, bool ROPE, bool BOTH>
__global__ void __launch_bounds__(latent_threads<PRODUCER>::threads, 1)
    attend_latent(const __grid_constant__ sm90_latent_params a)
{
    extern __shared__ __align__(1024) char memory[];
    latent_shared &smem = *(latent_shared *)memory;
    constexpr bool BOXES = PRODUCER == LATENT_BY_BOXES;
    /* accumulators of one wgmma must fit the registers that a thread starts with */
    constexpr int COLUMNS = PRODUCER == LATENT_BY_CODES ? 128 : 256;
    const int group = (int)(threadIdx.x >> 7) - latent_threads<PRODUCER>::producers;
    if (BOXES && a.q_mapped && a.q_rows < SM90_LATENT_ROWS) { /* rows that no box writes */
        for (int i = threadIdx.x; i < (int)sizeof smem.q / 16; i += (int)blockDim.x) {
            store16(shared_address(smem.q) + i * 16, make_uint4(0, 0, 0, 0));
        }
        fence_async_proxy();
    }
    /* including those of warps that do not exist */
    if (!BOXES && threadIdx.x < sizeof smem.has_terms / 8) {
        ((uint64_t *)smem.has_terms)[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        init_barriers<PRODUCER>(smem, a.q_mapped);
        if constexpr (BOTH) {
            init_cluster_barriers(smem);
            fence_barriers();
        }
        if (BOXES) {
            fetch_map(&a.k_map);
        }
    }
    if (BOTH && cluster_size() > 1) {
        sync_cluster(); /* as well as all CTAs' barriers */
    } else {
        __syncthreads(); /* the barriers are initialized and the zeros written */
    }
    /* with lists the first read of each line of parameters would delay an item's start */
    const bool touches =
        (BOTH || a.p.topk != nullptr) && threadIdx.x >= latent_threads<PRODUCER>::threads - 32;
    volatile float &untouched = smem.row_sum[1][1][SM90_LATENT_ROWS - 1]; /* keeps the reads */
    if (touches) {
        untouched = __uint_as_float(touch_params(a));
        if (BOTH) {
            fetch_lookups(a);
        }
    }
    wait_for_earlier_kernels();
    if (BOTH && touches) {
        untouched = __uint_as_float(touch_lookups(a));
    }
    let_later_kernels_begin();
    if (group < 0) {
        dealloc_registers<latent_threads<PRODUCER>::producer_registers>();
        if constexpr (PRODUCER == LATENT_BY_CODES) {
            convert_rows<ROPE, BOTH>(a, smem);
        } else if constexpr (!BOXES) {
            copy_rows<KIND, ROPE, BOTH>(a, smem);
        } else if (threadIdx.x >= 64) {
            copy_all_queries<KIND, ROPE>(a, smem);
        } else {
            copy_boxes<ROPE>(a, smem, threadIdx.x >> 5);
        }
    } else if (group == 0) {
        alloc_registers<latent_threads<PRODUCER>::consumer_registers>();
        consumer_first<KIND, PRODUCER, COLUMNS, ROPE, BOTH>(a, smem);
    } else {
        alloc_registers<latent_threads<PRODUCER>::consumer_registers>();
        consumer_second<KIND, PRODUCER, COLUMNS, ROPE, BOTH>(a, smem);
    }
}

template <int KIND, int PRODUCER, bool ROPE, bool BOTH = false> static cudaError_t allow_memory()
{
    return cudaFuncSetAttribute(attend_latent<KIND, PRODUCER, ROPE, BOTH>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)sizeof(latent_shared));
}

#endif
