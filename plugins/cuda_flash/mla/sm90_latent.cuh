/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a. A CTA has 64 rows in shared memory, heads of a query or all heads of
 * several queries, and two buffers of 64 latent rows, 72 KiB each. Of each pair of tiles one warp
 * group makes the first one's weights, the other the second one's; each adds both tiles' values in
 * its half of the 512 dims, so that one multiplies while the other has its softmax. Weights reach
 * the other warp group in the tile's rope columns, which values do not have. A tile: 64 x 1152
 * bytes, 8.9 MFLOP in 2176 clocks of the tensor cores, and reads of shared memory for 2300. */
#ifndef CUDA_FLASH_SM90_LATENT_CUH
#define CUDA_FLASH_SM90_LATENT_CUH

#include "cuda_flash/ptx/sm90_wgmma.cuh"
#include "sm90_latent_merge.cuh"
#include "sm90_latent_producer.cuh"

#define MOST_WEIGHT                                                                                \
    1e12f               /* in bf16: a base moves where a lane's weights of a tile add up to more */
#define BARRIER_CLEAR 1 /* and 2, of each warp group: values that are not there are zero */
#define BARRIER_KEYS 3  /* and 4, likewise: a tile's products with the queries are done */

/* s = queries x keys of buffer B, one half of the columns, each as soon as it is there. First comes
 * the half that is given back first, B; with the second one the rope column. */
template <int KIND, bool BOXES, int B, bool SECOND>
static __device__ __forceinline__ void multiply_keys(latent_shared &mine, int phase, float (&s)[32])
{
    constexpr int FIRST = (B ^ SECOND) * 4, COUNT = SECOND ? 5 : 4;
    uint64_t q = matrix_at(shared_address(mine.q), 0, 1024);
    uint64_t k = matrix_at(shared_address(mine.k[B]), 0, 1024);
    if (!SECOND) { /* later columns add to what is on its way */
        pin(s);
    }
    if (!BOXES) {
        barrier_wait(shared_address(&mine.full[B][SECOND]), phase);
        fence_for_boxes(); /* others wrote what wgmma reads */
        wgmma_begin();
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        const int c = n < 4 ? FIRST + n : LATENT_ROPE;
        if (BOXES) {
            barrier_wait(shared_address(&mine.full[B][c]), phase);
            wgmma_begin();
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t at = c * (LATENT_COLUMN_BYTES / 16) + i * 2;
            wgmma_rows<KIND, 64>(s, q + at, k + at, SECOND || n > 0 || i > 0);
        }
    }
    wgmma_commit();
}

/* o += weights of this warp group x values of buffer b in its half of the dims, COLUMNS at a time.
 */
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void multiply_own(latent_shared &mine, int b, int half,
                                                    const uint32_t (&w)[4][4], float (&o)[128])
{
    uint64_t v = matrix_at(shared_address(mine.k[b][half * 4]), LATENT_COLUMN_BYTES, 1024);
    pin(o);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < 256 / COLUMNS; n++) {
        auto &sums = (float(&)[COLUMNS / 2]) o[n * (COLUMNS / 2)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_weights<KIND, COLUMNS>(
                sums, w[i], v + n * (COLUMNS / 64 * LATENT_COLUMN_BYTES / 16) + i * 128);
        }
    }
    wgmma_commit();
}

/* The same with the other's weights. */
template <int KIND, int COLUMNS>
static __device__ __forceinline__ void multiply_other(latent_shared &mine, int b, int half,
                                                      float (&o)[128])
{
    uint64_t v = matrix_at(shared_address(mine.k[b][half * 4]), LATENT_COLUMN_BYTES, 1024);
    uint64_t w = matrix_at(shared_address(mine.k[b][LATENT_ROPE]), 0, 1024);
    pin(o);
    wgmma_begin();
#pragma unroll
    for (int n = 0; n < 256 / COLUMNS; n++) {
        auto &sums = (float(&)[COLUMNS / 2]) o[n * (COLUMNS / 2)];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_stored<KIND, COLUMNS>(
                sums, w + i * 2, v + n * (COLUMNS / 64 * LATENT_COLUMN_BYTES / 16) + i * 128);
        }
    }
    wgmma_commit();
}

/* What a thread has of its rows, row and row + 8 of the tile. */
struct latent_rows {
    int32_t row, first, last; /* first, last: keys that all real rows see */
    int32_t base, count;      /* of the run's tiles */
    float m[2], l[2];
};

/* Values of a tile that not all rows see whole, since 0 x NaN is NaN: zero where no row sees the
 * key, where boxes brought or left something, and where one that is not finite is seen by some rows
 * alone, which have a NaN or no weight for it. */
template <int KIND>
static __device__ __forceinline__ void clear_values(latent_shared &mine, int b,
                                                    const latent_rows &r, int32_t t, int half)
{
    const int32_t first = r.base + t * GPU_TILE;
    if (first >= r.first && first + GPU_TILE - 1 <= r.last) {
        return;
    }
    barrier_group(BARRIER_CLEAR + half); /* the limits of all rows are there */
    /* by load16: a load that ptxas sees to be the same in all threads spoils its view of the loop,
     * and wgmma's descriptors come from registers one by one */
    const int32_t low = (int32_t)load16(shared_address(mine.seen[half])).x;
    const int32_t high = (int32_t)load16(shared_address(&mine.seen[half][SM90_LATENT_ROWS - 2])).w;
#pragma unroll 1
    for (int i = threadIdx.x & 127; i < GPU_TILE * (LATENT_MAX_RANK / 8); i += 128) {
        const int row = i / (LATENT_MAX_RANK / 8), chunk = i % (LATENT_MAX_RANK / 8);
        const uint32_t at = shared_address(mine.k[b][chunk >> 3]) + place_in_column(row, chunk);
        const int32_t key = first + row;
        if (key < low || key > high) {
            store16(at, make_uint4(0, 0, 0, 0));
        } else if (key < r.first || key > r.last) {
            store16(at, finite_halves<KIND>(load16(at)));
        }
    }
    fence_for_boxes();
    barrier_group(BARRIER_CLEAR + half); /* all of it is zero */
}

/* What products are multiplied by to be scores, in base 2 where there is no soft cap. */
static __device__ __forceinline__ float score_scale(const gpu_params &p)
{
    float scale = p.problem.scale * value_scale(p.k);
    return p.problem.soft_cap > 0.0f ? scale : scale * LOG2E;
}

/* Products become scores in base 2, with the terms of their keys, less the rows' bases. */
static __device__ __forceinline__ void add_terms(const gpu_problem &p, const float *terms,
                                                 float scale, const float (&base)[2],
                                                 float (&s)[32])
{
    if (p.soft_cap > 0.0f) {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = cap_score(s[i] * scale, p.soft_cap) * LOG2E;
        }
        scale = 1.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        float2 term = *(const float2 *)&terms[i * 8 + (threadIdx.x & 3) * 2];
#pragma unroll
        for (int e = 0; e < 4; e++) { /* a product of what nobody sees is 0 */
            s[4 * i + e] = fmaf(s[4 * i + e], scale, e & 1 ? term.y : term.x) - base[e >> 1];
        }
    }
}

/* The rows' bases move to the largest scores of the tile where one is far above them, or where
 * there is no base yet. Scores count from the bases. */
static __device__ __forceinline__ void move_bases(float (&m)[2], float (&s)[32])
{
    float high[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < 32; i++) {
        high[(i >> 1) & 1] = fmaxf(high[(i >> 1) & 1], s[i]);
    }
    bool far = fmaxf(high[0], high[1]) > BASE_ROOM || fminf(m[0], m[1]) == -INFINITY;
    if (!__any_sync(0xffffffffu, far)) {
        return;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float by = fmaxf(high[h], __shfl_xor_sync(0xffffffffu, high[h], 1));
        by = fmaxf(by, __shfl_xor_sync(0xffffffffu, by, 2));
        if (by > BASE_ROOM || (m[h] == -INFINITY && by > -INFINITY)) {
            m[h] = softmax_base(m[h]) + by;
#pragma unroll
            for (int i = 0; i < 16; i++) {
                s[(i >> 1) * 4 + h * 2 + (i & 1)] -= by;
            }
        }
    }
}

/* Weights of a tile's scores, and what they add up to. */
template <int KIND>
static __device__ __forceinline__ void weigh(const float (&s)[32], uint32_t (&w)[4][4],
                                             float (&sum)[2])
{
    sum[0] = sum[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float x = fast_exp2(s[2 * i]), y = fast_exp2(s[2 * i + 1]);
        sum[i & 1] += x + y;
        w[i >> 2][i & 3] = pack2<KIND>(x, y);
    }
}

/* Scores of a tile become weights: w for the matrix product, the same in the tile's rope columns. m
 * becomes the base that they count from, sum what they add up to. */
template <int KIND, bool BOXES>
static __device__ __forceinline__ void
soften(const gpu_problem &p, latent_shared &mine, int b, int turn, int32_t t, float scale,
       const latent_rows &r, float (&m)[2], float (&s)[32], uint32_t (&w)[4][4], float (&sum)[2])
{
    const int lane = threadIdx.x & 31;
    const int32_t first = r.base + t * GPU_TILE;
    const float base[2] = {softmax_base(m[0]), softmax_base(m[1])};
    bool odd = false;
    if (!BOXES) {
        const uint2 by_warp = load8(shared_address(mine.odd[turn][t & 7]));
        odd = __any_sync(0xffffffffu, (by_warp.x | by_warp.y) != 0);
    }
    if (odd) {
        add_terms(p, mine.term[turn][t & 7], scale, base, s);
    } else {
#pragma unroll
        for (int i = 0; i < 32; i++) {
            s[i] = fmaf(s[i], scale, -base[(i >> 1) & 1]);
        }
    }
    if (BOXES && (first < r.first || first + GPU_TILE - 1 > r.last)) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int2 seen = mine.seen[b][r.row + 8 * h];
#pragma unroll
            for (int i = 0; i < 16; i++) {
                const int at = (i >> 1) * 4 + h * 2 + (i & 1);
                const int32_t j = first + (i >> 1) * 8 + (lane & 3) * 2 + (i & 1);
                s[at] = j >= seen.x && j <= seen.y ? s[at] : -INFINITY;
            }
        }
    }
    if (KIND == KIND_BF16) { /* which holds what float32 does: sums tell of weights too large */
        weigh<KIND>(s, w, sum);
        bool far = !(fmaxf(sum[0], sum[1]) < MOST_WEIGHT) || fminf(m[0], m[1]) == -INFINITY;
        if (__any_sync(0xffffffffu, far)) {
            move_bases(m, s);
            weigh<KIND>(s, w, sum);
        }
    } else {
        move_bases(m, s);
        weigh<KIND>(s, w, sum);
    }
    int row = (threadIdx.x & 96) / 2 + (lane & 15);
    barrier_group(BARRIER_KEYS + b); /* no warp's product reads the rope columns any more */
    uint32_t to = shared_address(mine.k[b][LATENT_ROPE]) + place_in_column(row, lane >> 4);
    asm volatile("mov.b32 %0, %0;" : "+r"(to)); /* addresses in registers over the loop: spills */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        store4(to ^ i * 32, w[i]);
    }
    if ((lane & 3) == 0) {
        mine.base[b][r.row] = m[0];
        mine.base[b][r.row + 8] = m[1];
    }
    fence_for_boxes(); /* wgmma reads the weights */
}

/* The rows' sums count from other bases, if those are others. */
static __device__ __forceinline__ void follow_bases(const float (&to)[2], latent_rows &r,
                                                    float (&o)[128])
{
    if (!__any_sync(0xffffffffu, to[0] != r.m[0] || to[1] != r.m[1])) {
        return;
    }
    float f[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        f[h] = fast_exp2(r.m[h] - softmax_base(to[h]));
        r.m[h] = to[h];
        r.l[h] *= f[h];
    }
#pragma unroll
    for (int i = 0; i < 128; i++) {
        o[i] *= f[(i >> 1) & 1];
    }
}

/* The other warp group's weights of buffer b are there, and the rows count from their bases. */
static __device__ __forceinline__ void take_weights(latent_shared &mine, int b, int phase,
                                                    latent_rows &r, float (&o)[128])
{
    barrier_wait(shared_address(&mine.weights[b]), phase);
    const float to[2] = {mine.base[b][r.row], mine.base[b][r.row + 8]};
    follow_bases(to, r, o);
    fence_for_boxes();
}

/* A lane's numbers of dims 32 k .. 32 k + 31 of a row's half. */
template <int KIND, int H>
static __device__ __forceinline__ void pack_row(bool narrows, float factor, const float (&o)[128],
                                                int k, uint32_t (&x)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float first = o[(4 * k + i) * 4 + 2 * H] * factor;
        const float second = o[(4 * k + i) * 4 + 2 * H + 1] * factor;
        x[i] = pack2<KIND>(first, second);
        if (narrows) {
            x[i] = pack2<KIND_BF16>(first, second);
        }
    }
}

/* A row of a warp group's half of the dims, 16 bytes a lane or, where out is not aligned, less. */
template <int KIND, int H>
static __device__ __forceinline__ void write_row(const sm90_latent_params &a, char *to, bool real,
                                                 float factor, const float (&o)[128])
{
    const int part = threadIdx.x & 3;
    const bool narrows = KIND == KIND_F16 && a.p.attend.out.dtype == ATTN_DTYPE_BF16;
    uint32_t x[4];
    if (a.wide_out == 8) { /* one block of instructions, in which all shuffles are on their way */
#pragma unroll
        for (int k = 0; k < 8; k++) {
            pack_row<KIND, H>(narrows, factor, o, k, x);
            turn_square(x);
            if (real) {
                *(uint4 *)(to + (4 * k + part) * 16) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k++) {
        pack_row<KIND, H>(narrows, factor, o, k, x);
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

/* The rows' sums go out, each warp group's dims: the item's output, or a part of it. The next
 * segment is returned. */
template <int KIND>
static __device__ __forceinline__ int32_t finish_run(const sm90_latent_params &a,
                                                     latent_shared &mine, int32_t segment, int turn,
                                                     int half, latent_rows &r,
                                                     const float (&o)[128])
{
    const gpu_params &p = a.p.attend;
    latent_run run = enter_run(p.schedule, segment); /* again: no registers to keep it in */
    const int lane = threadIdx.x & 31;
    const bool tells = half == 0 && (lane & 3) == 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.l[h] += __shfl_xor_sync(0xffffffffu, r.l[h], 1);
        r.l[h] += __shfl_xor_sync(0xffffffffu, r.l[h], 2);
        if ((lane & 3) == 0) {
            mine.sum[turn][half][r.row + 8 * h] = r.l[h];
        }
    }
    barrier_arrive(shared_address(&mine.sums));
    barrier_wait(shared_address(&mine.sums), turn); /* both sums are there */
#pragma unroll
    for (int h = 0; h < 2; h++) {
        r.l[h] = mine.sum[turn][0][r.row + 8 * h] + mine.sum[turn][1][r.row + 8 * h];
    }
    if ((r.row & ~15) >= run.item.num_rows) { /* none of this warp's rows is real */
        return run.next;
    }
    if (run.part >= 0) { /* as threads have them: see merge_latent */
        float *part = p.schedule.parts + (int64_t)run.part * LATENT_PART;
        float4 *to = (float4 *)part + half * 32 * 128 + (threadIdx.x & 127);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            to[i * 128] = make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]);
        }
#pragma unroll
        for (int h = 0; h < 2 && tells; h++) {
            part[SM90_LATENT_ROWS * LATENT_MAX_RANK + r.row + 8 * h] = r.m[h];
            part[SM90_LATENT_ROWS * (LATENT_MAX_RANK + 1) + r.row + 8 * h] = r.l[h];
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
        float *lse = real && tells && p.lse.data != nullptr
                         ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                         : nullptr;
        float factor = softmax_close_base2(sink, r.m[h], r.l[h], lse) * value_scale(p.k);
        char *to = p.out.data + token * p.out.row + head * p.out.head + half * 512;
        if (h == 0) {
            write_row<KIND, 0>(a, to, real, factor, o);
        } else {
            write_row<KIND, 1>(a, to, real, factor, o);
        }
    }
    return run.next;
}

/* What rows see goes to shared memory: those that are not real see what the last one does. Later
 * queries see no key before those of earlier ones, and no fewer behind. */
template <bool BOXES>
static __device__ __forceinline__ latent_rows enter_rows(const gpu_params &p, latent_shared &mine,
                                                         int32_t segment, int half)
{
    latent_rows r;
    latent_run run = enter_run(p.schedule, segment);
    const gpu_row_tile &item = run.item;
    const gpu_request request = request_of_row_tile(item);
    r.base = run.base;
    r.count = run.count;
    r.row = ((threadIdx.x >> 5) & 3) * 16 + ((threadIdx.x & 31) >> 2);
    if (BOXES) {
        const int32_t end = item.first_row + item.num_rows - 1;
        r.first = interval_of(p.problem, request, end / p.problem.group).first;
        r.last = interval_of(p.problem, request, item.first_row / p.problem.group).last;
        for (int h = 0; h < 2; h++) {
            const int32_t row = min(item.first_row + r.row + 8 * h, end);
            const gpu_interval seen = interval_of(p.problem, request, row / p.problem.group);
            if ((threadIdx.x & 3) == 0) {
                mine.seen[half][r.row + 8 * h] = make_int2(seen.first, seen.last);
            }
        }
        __syncwarp(); /* each warp reads what it wrote; see clear_values */
    }
    r.m[0] = r.m[1] = -INFINITY;
    r.l[0] = r.l[1] = 0.0f;
    return r;
}

/* Makes the weights of first tiles of pairs; dims 0 .. 255. */
template <int KIND, bool BOXES, int COLUMNS>
static __device__ __forceinline__ void compute_first(const sm90_latent_params &a,
                                                     latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
    const float scale = score_scale(p);
    float o[128], s[32], m[2], sum[2];
    uint32_t w[4][4];
    int phase = 0, other_phase = 0, q_phase = 0, turn = 0;
#pragma unroll 1
    for (int32_t segment = first_segment(p.schedule); segment >= 0; turn ^= 1) {
        latent_rows r = enter_rows<BOXES>(p, mine, segment, 0);
        bool owes = false; /* buffer 1 is still read */
#pragma unroll
        for (int i = 0; i < 128; i++) {
            o[i] = 0.0f;
        }
        barrier_wait(shared_address(&mine.q_full), q_phase);
        q_phase ^= 1;
        fence_for_boxes();
#pragma unroll 1
        for (int32_t t = 0; t < r.count; t += 2) {
            multiply_keys<KIND, BOXES, 0, false>(mine, phase, s);
            if (owes) {
                wgmma_wait<1>();
                arrive_warp(mine.empty[1][0]);
            }
            multiply_keys<KIND, BOXES, 0, true>(mine, phase, s);
            phase ^= 1;
            wgmma_wait<0>();
            pin(s);
            pin(o);
            if (t + 2 >= r.count) {
                arrive_warp(mine.q_empty);
            }
            if (BOXES) {
                clear_values<KIND>(mine, 0, r, t, 0);
            }
            m[0] = r.m[0], m[1] = r.m[1];
            soften<KIND, BOXES>(p.problem, mine, 0, turn, t, scale, r, m, s, w, sum);
            barrier_arrive(shared_address(&mine.weights[0]));
            follow_bases(m, r, o);
            r.l[0] += sum[0], r.l[1] += sum[1];
            multiply_own<KIND, COLUMNS>(mine, 0, 0, w, o);
            wgmma_wait<0>();
            pin(o);
            arrive_warp(mine.empty[0][0]);
            owes = t + 1 < r.count;
            if (owes) {
                take_weights(mine, 1, other_phase, r, o);
                other_phase ^= 1;
                multiply_other<KIND, COLUMNS>(mine, 1, 0, o);
            }
        }
        wgmma_wait<0>();
        pin(o);
        if (owes) {
            arrive_warp(mine.empty[1][0]);
        }
        segment = finish_run<KIND>(a, mine, segment, turn, 0, r, o);
    }
}

/* Makes the weights of second tiles; dims 256 .. 511. Its scores are on their way before it waits
 * for the first tile's weights, and the product with those runs while it has its softmax. */
template <int KIND, bool BOXES, int COLUMNS>
static __device__ __forceinline__ void compute_second(const sm90_latent_params &a,
                                                      latent_shared &mine)
{
    const gpu_params &p = a.p.attend;
    const float scale = score_scale(p);
    float o[128], s[32], m[2], sum[2];
    uint32_t w[4][4];
    int phase = 0, other_phase = 0, q_phase = 0, turn = 0;
#pragma unroll 1
    for (int32_t segment = first_segment(p.schedule); segment >= 0; turn ^= 1) {
        latent_rows r = enter_rows<BOXES>(p, mine, segment, 1);
#pragma unroll
        for (int i = 0; i < 128; i++) {
            o[i] = 0.0f;
        }
        barrier_wait(shared_address(&mine.q_full), q_phase);
        q_phase ^= 1;
        fence_for_boxes();
        if (r.count == 1) { /* no tile of its own */
            arrive_warp(mine.q_empty);
        }
#pragma unroll 1
        for (int32_t t = 0; t + 1 < r.count; t += 2) {
            multiply_keys<KIND, BOXES, 1, false>(mine, phase, s);
            multiply_keys<KIND, BOXES, 1, true>(mine, phase, s);
            phase ^= 1;
            wgmma_wait<0>(); /* ptxas does not let sums be multiplied while others are made */
            pin(s);
            take_weights(mine, 0, other_phase, r, o);
            other_phase ^= 1;
            multiply_other<KIND, COLUMNS>(mine, 0, 1, o);
            if (t + 3 >= r.count) { /* the last tile of its own */
                arrive_warp(mine.q_empty);
            }
            if (BOXES) {
                clear_values<KIND>(mine, 1, r, t + 1, 1);
            }
            m[0] = r.m[0], m[1] = r.m[1];
            soften<KIND, BOXES>(p.problem, mine, 1, turn, t + 1, scale, r, m, s, w, sum);
            barrier_arrive(shared_address(&mine.weights[1]));
            wgmma_wait<0>();
            pin(o);
            arrive_warp(mine.empty[0][1]);
            follow_bases(m, r, o);
            r.l[0] += sum[0], r.l[1] += sum[1];
            multiply_own<KIND, COLUMNS>(mine, 1, 1, w, o);
            wgmma_wait<0>();
            pin(o);
            arrive_warp(mine.empty[1][1]);
        }
        if (r.count & 1) {
            take_weights(mine, 0, other_phase, r, o);
            other_phase ^= 1;
            multiply_other<KIND, COLUMNS>(mine, 0, 1, o);
            wgmma_wait<0>();
            pin(o);
            arrive_warp(mine.empty[0][1]);
        }
        segment = finish_run<KIND>(a, mine, segment, turn, 1, r, o);
    }
}

/* Who brings keys: TMA, and their scores have no terms; four warps that copy rows; eight that make
 * rows of 8 bits f16. */
enum latent_way { LATENT_BY_BOXES, LATENT_BY_ROWS, LATENT_BY_CODES };

template <int WAY>
static __device__ __forceinline__ void init_barriers(latent_shared &mine, bool q_boxes)
{
    constexpr bool BOXES = WAY == LATENT_BY_BOXES;
    constexpr int WARPS = BOXES                   ? 2
                          : WAY == LATENT_BY_ROWS ? LATENT_COPY_WARPS
                                                  : LATENT_CONVERT_WARPS;
    barrier_init(shared_address(&mine.q_full), q_boxes ? 1 : WARPS * 32);
    barrier_init(shared_address(&mine.q_empty), 8);
    for (int b = 0; b < 2; b++) {
        for (int c = 0; c < LATENT_COLUMNS; c++) { /* each copying warp tells its terms, too */
            int told = c == 1 ? WARPS : 0;
            barrier_init(shared_address(&mine.full[b][c]), BOXES ? 1 : WARPS * 32 + told);
        }
        barrier_init(shared_address(&mine.empty[b][0]), 4);
        barrier_init(shared_address(&mine.empty[b][1]), 4);
        barrier_init(shared_address(&mine.weights[b]), 128);
    }
    barrier_init(shared_address(&mine.sums), 256);
    fence_barriers();
}

/* Warp groups that copy, before the two that compute, and registers of their threads: TMA needs few
 * of them. */
template <int WAY> struct latent_crew {
    static constexpr int copying = WAY == LATENT_BY_CODES ? 2 : 1, threads = (copying + 2) * 128;
    static constexpr int compute = WAY == LATENT_BY_CODES   ? 192
                                   : WAY == LATENT_BY_BOXES ? 216
                                                            : 208;
    static constexpr int copy = (65536 / threads / 8 * 8 * (copying + 2) - 2 * compute) / copying;
};

template <int KIND, int WAY>
__global__ void __launch_bounds__(latent_crew<WAY>::threads, 1)
    attend_latent(const __grid_constant__ sm90_latent_params a)
{
    extern __shared__ __align__(1024) char memory[];
    latent_shared &mine = *(latent_shared *)memory;
    constexpr bool BOXES = WAY == LATENT_BY_BOXES;
    /* a product's sums are fewer than the registers that a thread begins with */
    constexpr int COLUMNS = WAY == LATENT_BY_CODES ? 128 : 256;
    const int group = (int)(threadIdx.x >> 7) - latent_crew<WAY>::copying;
    if (BOXES && a.q_mapped && a.q_rows < SM90_LATENT_ROWS) { /* rows that no box brings */
        for (int i = threadIdx.x; i < (int)sizeof mine.q / 16; i += (int)blockDim.x) {
            store16(shared_address(mine.q) + i * 16, make_uint4(0, 0, 0, 0));
        }
        fence_for_boxes();
    }
    if (!BOXES && threadIdx.x < sizeof mine.odd / 8) { /* of warps that there are not, too */
        ((uint64_t *)mine.odd)[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) {
        init_barriers<WAY>(mine, a.q_mapped);
        if (BOXES) {
            fetch_map(&a.k_map);
        }
    }
    __syncthreads(); /* the barriers are there, and zeros */
    wait_for_earlier_kernels();
    let_later_kernels_begin();
    if (group < 0) {
        give_registers<latent_crew<WAY>::copy>();
        if constexpr (WAY == LATENT_BY_CODES) {
            convert_rows(a, mine);
        } else if constexpr (!BOXES) {
            copy_rows<KIND>(a, mine);
        } else if (threadIdx.x >= 64) {
            copy_all_queries<KIND>(a, mine);
        } else {
            copy_boxes(a, mine, threadIdx.x >> 5);
        }
    } else if (group == 0) {
        take_registers<latent_crew<WAY>::compute>();
        compute_first<KIND, BOXES, COLUMNS>(a, mine);
    } else {
        take_registers<latent_crew<WAY>::compute>();
        compute_second<KIND, BOXES, COLUMNS>(a, mine);
    }
}

/* Parts as the two warp groups had them: a lane has dims d and d + 1 of rows r and r + 8 from
 * each. */
struct latent_pieces {
    static constexpr int ROWS = SM90_LATENT_ROWS, COUNT = ROWS * LATENT_MAX_RANK / 256, APART = 8;
    static constexpr bool BY_ROWS = true;

    static __device__ __forceinline__ int first_row(int piece)
    {
        return (piece & 3) * 16;
    }

    static __device__ __forceinline__ int row(int piece)
    {
        return first_row(piece) + ((threadIdx.x & 31) >> 2);
    }

    static __device__ __forceinline__ void
    store(const sm90_latent_params &a, const gpu_row_tile &item, int piece, const merged_piece &x)
    {
        const gpu_params &p = a.p.attend;
        const int dim = (piece >> 2) * 8 + (threadIdx.x & 3) * 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int32_t at_row = row(piece) + APART * h;
            if (at_row >= item.num_rows) {
                continue;
            }
            int32_t at = item.first_row + at_row, index = at / p.problem.group;
            int64_t token = item.query_start + index, head = at - index * p.problem.group;
            float sink = p.problem.sinks != nullptr ? p.problem.sinks[head] * LOG2E : -INFINITY;
            float *lse = dim == 0 && p.lse.data != nullptr
                             ? &p.lse.data[head * p.lse.head + token * p.lse.row]
                             : nullptr;
            float factor =
                softmax_close_base2(sink, h ? x.high.y : x.high.x, h ? x.sum.y : x.sum.x, lse) *
                value_scale(p.k);
            char *to = p.out.data + token * p.out.row + head * p.out.head;
#pragma unroll
            for (int d = 0; d < 2; d++) {
                const float4 &o = x.o[d];
                number_store(to, p.out.dtype, d * 256 + dim, (h ? o.z : o.x) * factor);
                number_store(to, p.out.dtype, d * 256 + dim + 1, (h ? o.w : o.y) * factor);
            }
        }
    }
};

static __global__ void __launch_bounds__(MERGE_THREADS, 1)
    merge_latent(const __grid_constant__ sm90_latent_params a)
{
    merge_cuts<latent_pieces>(a);
}

template <int KIND, int WAY> static cudaError_t allow_memory()
{
    return cudaFuncSetAttribute(attend_latent<KIND, WAY>,
                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                (int)sizeof(latent_shared));
}

template <int KIND> static cudaError_t make_ready()
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, merge_latent);
    error = error ? error : allow_memory<KIND, LATENT_BY_BOXES>();
    error = error ? error : allow_memory<KIND, LATENT_BY_ROWS>();
    if constexpr (KIND == KIND_F16) {
        error = error ? error : allow_memory<KIND, LATENT_BY_CODES>();
    }
    return error;
}

template <int KIND, int WAY>
static cudaError_t launch_way(const sm90_latent_params &a, cudaLaunchConfig_t &config)
{
    config.blockDim = dim3(latent_crew<WAY>::threads);
    return cudaLaunchKernelEx(&config, attend_latent<KIND, WAY>, a);
}

template <int KIND>
static cudaError_t launch_latent(const sm90_latent_params *a, int32_t num_sms, cudaStream_t stream)
{
    static_assert(sizeof(latent_shared) <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        return make_ready<KIND>();
    }
    const bool converts = KIND == KIND_F16 && a->form != LATENT_FORM_OWN && a->wide_keys;
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3((unsigned)num_sms);
    config.dynamicSmemBytes = sizeof(latent_shared);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    cudaError_t error = cudaSuccess;
    if (a->mapped) {
        error = launch_way<KIND, LATENT_BY_BOXES>(*a, config);
    } else if (!converts) {
        error = launch_way<KIND, LATENT_BY_ROWS>(*a, config);
    } else if constexpr (KIND == KIND_F16) {
        error = launch_way<KIND, LATENT_BY_CODES>(*a, config);
    }
    config.blockDim = dim3(MERGE_THREADS);
    config.dynamicSmemBytes = 0;
    return error ? error : cudaLaunchKernelEx(&config, merge_latent, *a);
}

#endif
