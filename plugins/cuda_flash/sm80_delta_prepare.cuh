/* SPDX-License-Identifier: Apache-2.0 */
/* What the chunks of gated delta need of each other's past nothing for: q and k behind convolution
 * and norm, decays, scores and the inverse. With g the sums of the gates' logarithms in a chunk,
 *     A_ij = beta_i e^(g_i - g_j) k_i k_j   for j < i
 *     R = (I + A)^-1 beta (V - e^g K S^T)   what each token adds, S + R^T (decays) K
 * A group of four warps has a chunk of a key head, and its value heads in pairs. */
#ifndef CUDA_FLASH_SM80_DELTA_PREPARE_CUH
#define CUDA_FLASH_SM80_DELTA_PREPARE_CUH

#include "sm80_delta_keys.cuh"

#define LOG2_OF_E 1.4426950408889634
#define LEAST_LOG_DECAY -1e4f /* e^ it is 0, and sums of it stay finite */

/* Finds the request and the token that chunk `index` begins with; false: it is none. All lanes of a
 * warp take part. */
static __device__ bool find_chunk(const sm80_delta_params &a, int32_t index, delta_request &request,
                                  int32_t &first)
{
    const gpu_delta_params &p = a.p;
    int32_t low = 0, high = p.num_reqs; /* the last request that begins at or before it */
    while (high - low > 1) {
        int32_t step = (high - low + GPU_LANES - 1) / GPU_LANES, r = low + lane_index() * step;
        bool before = r < high && p.query_start[r] / a.tokens_apart + r * a.requests_apart <= index;
        int32_t count = __popc(__ballot_sync(GPU_ALL_LANES, before));
        if (count == 0) {
            return false;
        }
        low += (count - 1) * step;
        high = min(high, low + step);
    }
    int32_t number = index - p.query_start[low] / a.tokens_apart - low * a.requests_apart;
    first = number * CHUNK;
    return number >= 0 && enter_request(p, low, request) && goes_in_chunks(p, request) &&
           first < request.num_tokens;
}

/* Rows i of the warp times k_j of blocks: sums 2 b and 2 b + 1 are of the block b before the
 * warp's own. */
static __device__ __forceinline__ void multiply_rows(uint32_t rows, uint32_t keys,
                                                     float (&sums)[CHUNK / 8][4])
{
    int32_t lane = lane_again(), warp = prepare_warp();
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[n][i] = 0.0f;
        }
    }
    uint32_t left_at = rows + place16<CHUNK_DIMS / 8>(warp * BLOCK + (lane & 15), lane >> 4);
    uint32_t right_at =
        keys + place16<CHUNK_DIMS / 8>(warp * BLOCK + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
    for (int step = 0; step < CHUNK_DIMS / 16; step++) {
        uint32_t left[4], further = step / 4 * CHUNK * 128, turned = step % 4 * 32;
        load4(left, (left_at ^ turned) + further);
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            if (block <= warp) {
                uint32_t right[4];
                load4(right, (right_at ^ turned) + further - block * BLOCK * 128);
                multiply<KIND_F16>(sums[2 * block], left, right[0], right[1]);
                multiply<KIND_F16>(sums[2 * block + 1], left, right[2], right[3]);
            }
        }
    }
}

/* Zeros where the transposed inverse and the scores have none but zeros, in 16 bytes by the group:
 * blocks off the diagonal that nothing else writes. */
static __device__ __forceinline__ void clear_blocks(chunk_head &to)
{
    constexpr int per_block = BLOCK / 8, side = BLOCKS;
    int32_t thread = prepare_warp() * GPU_LANES + lane_index();
    for (int32_t i = thread; i < CHUNK * per_block * (side - 1); i += PREPARE_THREADS) {
        int32_t row = i / (per_block * (side - 1)), column = i % (per_block * (side - 1));
        int32_t before = row / BLOCK * per_block; /* pieces of the blocks left of the diagonal */
        bool is_left = column < before;
        char *tile = (char *)(is_left ? to.inverse : to.scores);
        int32_t at = is_left ? column : column + per_block;
        *(uint4 *)(tile + place16<CHUNK / 8>(row, at)) = make_uint4(0, 0, 0, 0);
    }
}

/* a and b of tokens t and t + 1, of those behind the last the last's; all loads before the first
 * use. */
static __device__ __forceinline__ void load_gates(const gpu_delta_params &p,
                                                  const delta_request &request, int32_t t,
                                                  int32_t head, float (&inputs)[2][2])
{
    int64_t rows[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        rows[i] = request.first_row + min(t + i, request.num_tokens - 1);
    }
    if (p.a.dtype == ATTN_DTYPE_BF16 && p.b.dtype == ATTN_DTYPE_BF16) {
        uint32_t bits[2][2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bits[i][0] = ((const uint16_t *)p.a.data)[rows[i] * p.a.row + head * p.a.column];
            bits[i][1] = ((const uint16_t *)p.b.data)[rows[i] * p.b.row + head * p.b.column];
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            inputs[i][0] = two_floats<KIND_BF16>(bits[i][0]).x;
            inputs[i][1] = two_floats<KIND_BF16>(bits[i][1]).x;
        }
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        int64_t row = i == 0 ? rows[0] : rows[1];
        float a = matrix_number(p.a, row, head), b = matrix_number(p.b, row, head);
        inputs[0][0] = i == 0 ? a : inputs[0][0], inputs[0][1] = i == 0 ? b : inputs[0][1];
        inputs[1][0] = a, inputs[1][1] = b;
    }
}

/* Gates of a value head and their sums, by one warp; a lane has two tokens. */
static __device__ __noinline__ void make_gates(const gpu_delta_params &p,
                                               const delta_request &request, int32_t first,
                                               int32_t head, prepare_gates &gates, chunk_head &to)
{
    int32_t lane = lane_index();
    float beta[2], inputs[2][2], factor = -expf(p.a_log[head]), bias = p.dt_bias[head];
    double log_decay[2];
    load_gates(p, request, first + 2 * lane, head, inputs);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool is_there = first + 2 * lane + i < request.num_tokens;
        float g = factor * softplus(inputs[i][0] + bias);
        log_decay[i] = is_there ? (g < LEAST_LOG_DECAY ? LEAST_LOG_DECAY : g) * LOG2_OF_E : 0.0;
        beta[i] = is_there ? 1.0f / (1.0f + expf(-inputs[i][1])) : 0.0f;
    }
    double sum = log_decay[0] + log_decay[1];
#pragma unroll
    for (int distance = 1; distance < GPU_LANES; distance *= 2) {
        double before = lane_up(sum, distance);
        sum += lane >= distance ? before : 0.0;
    }
    constexpr int lanes = BLOCK / 2; /* of a block */
    double ends[BLOCKS], own_end = lane_read(sum, lane | (lanes - 1));
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        ends[block] = lane_read(sum, block * lanes + lanes - 1);
    }
    double sums[2] = {sum - log_decay[1], sum};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t row = 2 * lane + i;
        float high = (float)sums[i];
        gates.high[row] = high;
        gates.low[row] = (float)(sums[i] - (double)high);
        gates.beta[row] = beta[i];
        gates.to_block_end[row] = fast_exp2((float)(own_end - sums[i]));
#pragma unroll
        for (int block = 0; block < BLOCKS - 1; block++) {
            gates.from_block[block][row] = fast_exp2((float)fmin(sums[i] - ends[block], 0.0));
        }
        to.from_start[row] = fast_exp2(high);
        to.to_end[row] = fast_exp2((float)(ends[BLOCKS - 1] - sums[i]));
    }
}

/* Decays of two rows, 8 apart from `of_block` of the warp's block on, by two pairs of columns of
 * block `column`, 8 apart from j of it on. */
static __device__ __forceinline__ void find_decays(const prepare_gates &gates, bool is_diagonal,
                                                   int32_t warp, int32_t column, int32_t of_block,
                                                   int32_t j, float2 (&decays)[2][2])
{
    int32_t i = warp * BLOCK + of_block, first = column * BLOCK + j;
    if (is_diagonal) {
        float high[2] = {gates.high[i], gates.high[i + 8]};
        float low[2] = {gates.low[i], gates.low[i + 8]};
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 highs = *(const float2 *)&gates.high[first + n * 8];
            float2 lows = *(const float2 *)&gates.low[first + n * 8];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                decays[half][n].x = fast_exp2((high[half] - highs.x) + (low[half] - lows.x));
                decays[half][n].y = fast_exp2((high[half] - highs.y) + (low[half] - lows.y));
            }
        }
        return;
    }
    const float *of_rows = &gates.from_block[column][i];
    float rows[2] = {of_rows[0], of_rows[8]};
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 columns = *(const float2 *)&gates.to_block_end[first + n * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            decays[half][n] = make_float2(rows[half] * columns.x, rows[half] * columns.y);
        }
    }
}

/* The decayed scores of a value head, or its A, of the warp's rows. */
template <bool ARE_SCORES>
static __device__ __forceinline__ void decay_rows(const prepare_gates &gates,
                                                  const float (&products)[CHUNK / 8][4],
                                                  char *scores, prepare_a *a)
{
    int32_t lane = lane_again(), warp = prepare_warp(), of_block = lane >> 2, j = (lane & 3) * 2;
    float beta[2] = {gates.beta[warp * BLOCK + of_block], gates.beta[warp * BLOCK + of_block + 8]};
    float *rows[2];
    if constexpr (ARE_SCORES) {
        scores += (warp * BLOCK + of_block) * 128 + j * 2;
    } else {
        rows[0] = a->row(warp, of_block) + j, rows[1] = a->row(warp, of_block + 8) + j;
    }
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        if (block > warp) {
            break;
        }
        int32_t column = warp - block;
        uint32_t turned = (uint32_t)(column * 2 ^ of_block) * 16; /* as place16 has it */
        float2 decays[2][2];
        find_decays(gates, block == 0, warp, column, of_block, j, decays);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float x = products[2 * block + n][2 * half] * decays[half][n].x;
                float y = products[2 * block + n][2 * half + 1] * decays[half][n].y;
                if (block == 0) {
                    int32_t before = of_block + half * 8 - (j + n * 8) + ARE_SCORES;
                    x = before > 0 ? x : 0.0f, y = before > 1 ? y : 0.0f;
                }
                if constexpr (ARE_SCORES) {
                    *(uint32_t *)(scores + (turned ^ n * 16) + half * 8 * 128) =
                        pack2<KIND_F16>(x, y);
                } else {
                    *(float2 *)(rows[half] + column * BLOCK + n * 8) =
                        make_float2(beta[half] * x, beta[half] * y);
                }
            }
        }
    }
}

/* The inverse of the warp's block of I + A on the diagonal, in A's place; half a warp has a value
 * head, a lane a column; of one that is not real, the other's, and it stores nothing. */
static __device__ __forceinline__ void invert_blocks(prepare_a &a, const float *beta, bool real,
                                                     chunk_head &to)
{
    int32_t column = lane_again() & 15, block = prepare_warp(), base = block * BLOCK;
    float x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        x[i] = i == column ? 1.0f : 0.0f;
        float other = 0.0f;
        float row[BLOCK];
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float4 four = *(const float4 *)&a.row(block, i)[base + j];
            row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < i; j++) { /* two sums: what needs the newest x comes last */
            float &sum = j % 2 == i % 2 ? other : x[i];
            sum = fmaf(-row[j], x[j], sum);
        }
        x[i] += other;
    }
    sync_lanes();
    if (real) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            a.row(block, i)[base + column] = x[i];
        }
#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint32_t out[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[i] = pack2<KIND_F16>(x[part * 8 + 2 * i] * beta[base + column],
                                         x[part * 8 + 2 * i + 1] * beta[base + column]);
            }
            *(uint4 *)((char *)to.inverse +
                       place16<CHUNK / 8>(base + column, prepare_warp() * 2 + part)) =
                make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

/* To tf32, to nearest. */
static __device__ __forceinline__ uint32_t tf32_of(float x)
{
    uint32_t bits;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
    return bits;
}

/* c += a b^T of blocks of 16 by 16: a as sums have it, b block (row, column) of those in shared
 * memory. The depth's order is that of a's registers. */
static __device__ __forceinline__ void multiply_block(float (&c)[2][4], const float (&a)[2][4],
                                                      const prepare_a &b, int32_t row,
                                                      int32_t column, int32_t lane)
{
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 pair = *(const float2 *)&b.row(
                row, n * 8 + (lane >> 2))[column * BLOCK + step * 8 + (lane & 3) * 2];
            asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, "
                         "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                         : "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
                         : "r"(tf32_of(a[step][0])), "r"(tf32_of(a[step][2])),
                           "r"(tf32_of(a[step][1])), "r"(tf32_of(a[step][3])), "r"(tf32_of(pair.x)),
                           "r"(tf32_of(pair.y)));
        }
    }
}

/* The blocks of the inverse T below the one on the diagonal, in a column of blocks, transposed:
 * T_ij = -T_ii sum_k A_ik T_kj. */
static __device__ __forceinline__ void invert_column(const prepare_a &a, const float *beta,
                                                     int32_t column, chunk_head &to)
{
    int32_t lane = lane_again(), row = column * BLOCK + (lane >> 2), pair = (lane & 3) * 2;
    float blocks[BLOCKS][2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            blocks[0][n][i] = a.row(column, n * 8 + pair + (i & 1))[row + (i >> 1) * 8];
        }
    }
#pragma unroll
    for (int m = 1; m < BLOCKS; m++) {
        int32_t at = column + m;
#pragma unroll
        for (int i = 0; i < 8; i++) { /* also where unused, else it is live from the start */
            blocks[m][i / 4][i % 4] = 0.0f;
        }
        if (at >= BLOCKS) {
            continue;
        }
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < m; k++) {
            multiply_block(sum, blocks[k], a, at, column + k, lane);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sum[n][i] = -sum[n][i];
            }
        }
        multiply_block(blocks[m], sum, a, at, at, lane);
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *(uint32_t *)((char *)to.inverse +
                              place16<CHUNK / 8>(row + half * 8, (column + m) * 2 + n) + pair * 2) =
                    pack2<KIND_F16>(blocks[m][n][2 * half] * beta[row + half * 8],
                                    blocks[m][n][2 * half + 1] * beta[row + half * 8]);
            }
        }
    }
}

/* Of a value head, by number in the key head's group. */
static __device__ __forceinline__ chunk_head &head_of(const sm80_delta_params &a,
                                                      const prepare_item &item, int32_t number)
{
    char *heads =
        a.memory + item.index * a.chunk_bytes + a.p.num_k_heads * (int64_t)sizeof(chunk_keys);
    int32_t group = a.p.num_v_heads / a.p.num_k_heads;
    return ((chunk_head *)heads)[item.key_head * group + number];
}

/* The item that is number `number` of all, in the order of chunks, for the whole group; false:
 * there is none. */
static __device__ __forceinline__ bool enter_item(const sm80_delta_params &a, int32_t number,
                                                  prepare_memory &m)
{
    if (prepare_warp() == 0) {
        prepare_item item;
        item.index = number / a.p.num_k_heads, item.key_head = number % a.p.num_k_heads;
        item.is_there = find_chunk(a, item.index, item.request, item.first);
        if (lane_index() == 0) {
            m.item = item;
        }
    }
    sync_preparers();
    return m.item.is_there;
}

/* Gates of value heads `pair` and the next of a group, by a warp each. */
static __device__ __forceinline__ void make_pair(const sm80_delta_params &a, int32_t pair,
                                                 prepare_memory &m)
{
    int32_t group = a.p.num_v_heads / a.p.num_k_heads, number = pair + prepare_warp();
    if (number < min(pair + 2, group)) {
        make_gates(a.p, m.item.request, m.item.first, m.item.key_head * group + number,
                   m.gates[number - pair], head_of(a, m.item, number));
    }
}

/* All that the value heads of m.item need. All of the group's threads take part; the memory is free
 * once all of them are behind this. */
static __device__ __forceinline__ void prepare_chunk(const sm80_delta_params &a, prepare_memory &m)
{
    const prepare_item &item = m.item;
    int32_t group = a.p.num_v_heads / a.p.num_k_heads;
    float products[CHUNK / 8][4];
    fetch_keys(a, m);
    make_pair(a, 0, m);
    wait_for_copies();
    sync_preparers(); /* inputs are there */
    make_keys(a, m);
#pragma unroll 1
    for (int32_t pair = 0; pair < group; pair += 2) {
        if (pair > 0) {
            make_pair(a, pair, m);
        }
        sync_preparers(); /* gates and keys are there */
        if (pair == 0) {
            store_keys(a, m);
        }
        multiply_rows(shared_address(m.q), shared_address(m.k), products);
#pragma unroll 1
        for (int32_t i = 0; i < min(2, group - pair); i++) {
            chunk_head &head = head_of(a, item, pair + i);
            clear_blocks(head);
            decay_rows<true>(m.gates[i], products, (char *)head.scores, nullptr);
        }
        sync_preparers(); /* q is done with, and the gates where there are others */
    }
#pragma unroll 1
    for (int32_t pair = 0; pair < group; pair += 2) {
        if (group > 2) {
            make_pair(a, pair, m);
            sync_preparers();
        }
        int32_t count = min(2, group - pair);
        multiply_rows(shared_address(m.k), shared_address(m.k), products);
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            decay_rows<false>(m.gates[i], products, nullptr, &m.a[i]);
        }
        sync_lanes();
        int32_t half = lane_again() / 16, of_pair = min(half, count - 1);
        invert_blocks(m.a[of_pair], m.gates[of_pair].beta, half < count,
                      head_of(a, item, pair + of_pair));
        sync_preparers(); /* all of A and the blocks on the diagonal are there */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            int32_t warp = prepare_warp();
            invert_column(m.a[i], m.gates[i].beta, i == 0 ? warp : PREPARE_WARPS - 1 - warp,
                          head_of(a, item, pair + i));
        }
        sync_preparers();
    }
}

#endif
