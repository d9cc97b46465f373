/* SPDX-License-Identifier: Apache-2.0 */
/* What the chunks of gated delta need of each other's past nothing for: q and k behind convolution
 * and norm, decays, scores and the inverse. With g the sums of the gates' logarithms in a chunk,
 *     A_ij = beta_i e^(g_i - g_j) k_i k_j   for j < i
 *     R = (I + A)^-1 beta (V - e^g K S^T)   what each token adds, S + R^T (decays) K
 * A group of four warps has a chunk of a key head, and its value heads in pairs. */
#ifndef CUDA_FLASH_SM80_DELTA_PREPARE_CUH
#define CUDA_FLASH_SM80_DELTA_PREPARE_CUH

#include "sm80_delta_inputs.cuh"

#define PREPARE_THREADS 128
#define PREPARE_TOKENS 16 /* of a warp */
#define BLOCK 16          /* of the inverse: rows and columns */
/* Of A's rows: what a warp reads of eight rows at a time lies in different banks. */
#define A_STRIDE (CHUNK + 8)
#define LEAST_LOG_DECAY -1e4f /* e^ it is 0, and sums of it stay finite */

struct prepare_memory {
    union {
        struct chunk_keys keys;
        float a[2][CHUNK][A_STRIDE];
    };
    float high[2][CHUNK], low[2][CHUNK], beta[2][CHUNK]; /* high + low: sums of logarithms */
};

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

/* Keys or queries of BATCH tokens, the first of which has row `row` of the chunk; num_real of their
 * inputs' channels are there, and num_tokens of the tokens. */
template <int BATCH, bool ARE_USUAL>
static __device__ __forceinline__ void
make_batch(const delta_taps<4> &taps, const uint32_t (&raw)[BATCH + CHUNK_TAPS - 1][2],
           int32_t num_real, int32_t num_tokens, int32_t row, int32_t d, char *const (&tiles)[2])
{
    float y[BATCH][4], squares[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        squares[i] = 0.0f;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            float x[CHUNK_TAPS];
#pragma unroll
            for (int j = 0; j < CHUNK_TAPS; j++) {
                float2 two = two_floats<KIND_BF16>(raw[i + j][c / 2]);
                x[j] = c % 2 ? two.y : two.x;
            }
            float value = taps.of<ARE_USUAL>(x, c);
            y[i][c] = i < num_tokens && c < num_real ? value : 0.0f;
            squares[i] = fmaf(y[i][c], y[i][c], squares[i]);
        }
    }
#pragma unroll
    for (int distance = GPU_LANES / 2; distance > 0; distance >>= 1) {
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            squares[i] += lane_xor(squares[i], distance);
        }
    }
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
        float factor = rsqrtf(squares[i] + L2_EPSILON);
        uint2 out = make_uint2(pack2<KIND_F16>(y[i][0] * factor, y[i][1] * factor),
                               pack2<KIND_F16>(y[i][2] * factor, y[i][3] * factor));
        uint32_t at = place16<CHUNK_DIMS / 8>(row + i, d / 8) + (d & 4) * 2;
        *(uint2 *)(tiles[0] + at) = out;
        *(uint2 *)(tiles[1] + at) = out;
    }
}

/* k, then q, of the warp's tokens of the chunk, behind convolution and norm, to shared and to
 * device memory. The loop stays one: code that runs once is fetched once for each warp. */
static __device__ __forceinline__ void make_keys(const sm80_delta_params &a,
                                                 const delta_request &request, int32_t first,
                                                 int32_t key_head, chunk_keys &tile, chunk_keys &to)
{
    constexpr int batch = 4, loads = batch + CHUNK_TAPS - 1;
    const gpu_delta_params &p = a.p;
    int32_t d = lane_index() * 4, row = warp_index() * PREPARE_TOKENS;
    int64_t channel = (int64_t)key_head * p.head_size_k;
    int64_t keys = (int64_t)p.num_k_heads * p.head_size_k;
#pragma unroll 1
    for (int32_t is_q = 0; is_q < 2; is_q++) {
        const gpu_tensor plain = is_q ? p.q : p.k;
        delta_source<4> source(p, request, plain, key_head, is_q ? channel : keys + channel,
                               p.head_size_k, d);
        char *tiles[2] = {(char *)(is_q ? tile.q : tile.k), (char *)(is_q ? to.q : to.k)};
        delta_taps<4> taps;
        uint32_t raw[loads][2], next[loads][2];
        source.load<loads>(first + row - (CHUNK_TAPS - 1), a.wide_keys, next);
        taps.load(p, source);
#pragma unroll 1
        for (int32_t part = 0; part < PREPARE_TOKENS; part += batch) {
#pragma unroll
            for (int i = 0; i < loads; i++) {
                raw[i][0] = next[i][0], raw[i][1] = next[i][1];
            }
            if (part + batch < PREPARE_TOKENS) {
                source.load<loads>(first + row + part + batch - (CHUNK_TAPS - 1), a.wide_keys,
                                   next);
            }
            int32_t tokens = request.num_tokens - (first + row + part);
            if (taps.are_usual()) {
                make_batch<batch, true>(taps, raw, source.real, tokens, row + part, d, tiles);
            } else {
                make_batch<batch, false>(taps, raw, source.real, tokens, row + part, d, tiles);
            }
        }
    }
}

/* Rows i of the warp times all k_j with j in or before their block, by (i, j). */
static __device__ __forceinline__ void multiply_rows(uint32_t rows, uint32_t keys,
                                                     float (&sums)[CHUNK / 8][4])
{
    int32_t lane = lane_index(), warp = warp_index();
#pragma unroll
    for (int n = 0; n < CHUNK / 8; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sums[n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int step = 0; step < CHUNK_DIMS / 16; step++) {
        uint32_t left[4];
        load4(left,
              rows + place16<CHUNK_DIMS / 8>(warp * BLOCK + (lane & 15), step * 2 + (lane >> 4)));
#pragma unroll
        for (int block = 0; block < CHUNK / BLOCK; block++) {
            if (block <= warp) {
                uint32_t right[4];
                load4(right,
                      keys + place16<CHUNK_DIMS / 8>(block * BLOCK + (lane & 7) + (lane >> 4) * 8,
                                                     step * 2 + (lane >> 3 & 1)));
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
    constexpr int per_block = BLOCK / 8, side = CHUNK / BLOCK;
    for (int32_t i = (int32_t)thread_index(); i < CHUNK * per_block * (side - 1);
         i += PREPARE_THREADS) {
        int32_t row = i / (per_block * (side - 1)), column = i % (per_block * (side - 1));
        int32_t before = row / BLOCK * per_block; /* pieces of the blocks left of the diagonal */
        bool is_left = column < before;
        char *tile = (char *)(is_left ? to.inverse : to.scores);
        int32_t at = is_left ? column : column + per_block;
        *(uint4 *)(tile + place16<CHUNK / 8>(row, at)) = make_uint4(0, 0, 0, 0);
    }
}

/* Gates of a value head and their sums, by one warp; a lane has two tokens. */
static __device__ void make_gates(const gpu_delta_params &p, const delta_request &request,
                                  int32_t first, int32_t head, int32_t of_pair, prepare_memory &m,
                                  chunk_head &to)
{
    int32_t lane = lane_index();
    float beta[2];
    double log_decay[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t t = first + 2 * lane + i;
        beta[i] = 0.0f, log_decay[i] = 0.0;
        if (t < request.num_tokens) {
            int64_t row = request.first_row + t;
            float g =
                -expf(p.a_log[head]) * softplus(matrix_number(p.a, row, head) + p.dt_bias[head]);
            log_decay[i] = g < LEAST_LOG_DECAY ? LEAST_LOG_DECAY : g;
            beta[i] = 1.0f / (1.0f + expf(-matrix_number(p.b, row, head)));
        }
    }
    double sum = log_decay[0] + log_decay[1];
#pragma unroll
    for (int distance = 1; distance < GPU_LANES; distance *= 2) {
        double before = lane_up(sum, distance);
        sum += lane >= distance ? before : 0.0;
    }
    double all = lane_read(sum, GPU_LANES - 1);
    double sums[2] = {sum - log_decay[1], sum};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t row = 2 * lane + i;
        float high = (float)sums[i];
        m.high[of_pair][row] = high;
        m.low[of_pair][row] = (float)(sums[i] - (double)high);
        m.beta[of_pair][row] = beta[i];
        to.from_start[row] = expf((float)sums[i]);
        to.to_end[row] = expf((float)(all - sums[i]));
    }
}

/* A and the decayed scores of a value head, of the warp's rows. */
static __device__ __forceinline__ void decay_rows(const prepare_memory &m, int32_t of_pair,
                                                  const float (&kk)[CHUNK / 8][4],
                                                  const float (&qk)[CHUNK / 8][4],
                                                  float (*a)[A_STRIDE], chunk_head &to)
{
    int32_t lane = lane_index(), warp = warp_index();
    int32_t row = warp * BLOCK + (lane >> 2);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int32_t i = row + half * 8;
        float high = m.high[of_pair][i], low = m.low[of_pair][i], beta = m.beta[of_pair][i];
#pragma unroll
        for (int n = 0; n < CHUNK / 8; n++) {
            if (n < 2 * (warp + 1)) {
                int32_t j = n * 8 + (lane & 3) * 2;
                float2 highs = *(const float2 *)&m.high[of_pair][j];
                float2 lows = *(const float2 *)&m.low[of_pair][j];
                float first = exp_fast((high - highs.x) + (low - lows.x));
                float second = exp_fast((high - highs.y) + (low - lows.y));
                float x = j <= i ? qk[n][2 * half] * first : 0.0f;
                float y = j + 1 <= i ? qk[n][2 * half + 1] * second : 0.0f;
                *(uint32_t *)((char *)to.scores + place16<CHUNK / 8>(i, n) + (lane & 3) * 4) =
                    pack2<KIND_F16>(x, y);
                *(float2 *)&a[i][j] =
                    make_float2(j < i ? beta * kk[n][2 * half] * first : 0.0f,
                                j + 1 < i ? beta * kk[n][2 * half + 1] * second : 0.0f);
            }
        }
    }
}

/* The inverse of the warp's block of I + A on the diagonal, in A's place; half a warp has a value
 * head, a lane a column. */
static __device__ __forceinline__ void invert_blocks(float (*a)[A_STRIDE], const float *beta,
                                                     bool real, chunk_head &to)
{
    int32_t column = lane_index() & 15, base = warp_index() * BLOCK;
    float x[BLOCK];
    if (real) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            x[i] = i == column ? 1.0f : 0.0f;
            float other = 0.0f;
            float row[BLOCK];
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                float4 four = *(const float4 *)&a[base + i][base + j];
                row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
            }
#pragma unroll
            for (int j = 0; j < i; j++) { /* two sums: what needs the newest x comes last */
                float &sum = j % 2 == i % 2 ? other : x[i];
                sum = fmaf(-row[j], x[j], sum);
            }
            x[i] += other;
        }
    }
    sync_lanes();
    if (real) {
#pragma unroll
        for (int i = 0; i < BLOCK; i++) {
            a[base + i][base + column] = x[i];
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
                       place16<CHUNK / 8>(base + column, warp_index() * 2 + part)) =
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

/* c += a b^T of blocks of 16 by 16: a as sums have it, rows of b in shared memory. The depth's
 * order is that of a's registers. */
static __device__ __forceinline__ void multiply_block(float (&c)[2][4], const float (&a)[2][4],
                                                      const float (*b)[A_STRIDE], int32_t row,
                                                      int32_t column)
{
    int32_t lane = lane_index();
#pragma unroll
    for (int step = 0; step < 2; step++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 pair =
                *(const float2 *)&b[row + n * 8 + (lane >> 2)][column + step * 8 + (lane & 3) * 2];
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
static __device__ __forceinline__ void invert_column(const float (*a)[A_STRIDE], const float *beta,
                                                     int32_t column, chunk_head &to)
{
    int32_t lane = lane_index(), row = column * BLOCK + (lane >> 2), pair = (lane & 3) * 2;
    float blocks[CHUNK / BLOCK][2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            blocks[0][n][i] = a[column * BLOCK + n * 8 + pair + (i & 1)][row + (i >> 1) * 8];
        }
    }
#pragma unroll
    for (int m = 1; m < CHUNK / BLOCK; m++) {
        int32_t at = (column + m) * BLOCK;
        if (at >= CHUNK) {
            continue;
        }
        float sum[2][4] = {};
#pragma unroll
        for (int k = 0; k < m; k++) {
            multiply_block(sum, blocks[k], a, at, (column + k) * BLOCK);
        }
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                blocks[m][n][i] = 0.0f;
                sum[n][i] = -sum[n][i];
            }
        }
        multiply_block(blocks[m], sum, a, at, at);
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

static __global__ void __launch_bounds__(PREPARE_THREADS, 4)
    delta_prepare(const __grid_constant__ sm80_delta_params a)
{
    extern __shared__ __align__(16) char memory[];
    prepare_memory &m = *(prepare_memory *)memory;
    const gpu_delta_params &p = a.p;
    int32_t index = (int32_t)blockIdx.x / p.num_k_heads;
    int32_t key_head = (int32_t)blockIdx.x % p.num_k_heads, first, warp = warp_index();
    delta_request request;
    let_later_kernels_begin();
    if (!find_chunk(a, index, request, first)) {
        return;
    }
    char *chunk = a.memory + index * a.chunk_bytes;
    chunk_keys &keys = ((chunk_keys *)chunk)[key_head];
    chunk_head *heads = (chunk_head *)(chunk + p.num_k_heads * (int64_t)sizeof(chunk_keys));
    make_keys(a, request, first, key_head, m.keys, keys);
    sync_group();
    float kk[CHUNK / 8][4], qk[CHUNK / 8][4];
    multiply_rows(shared_address(m.keys.k), shared_address(m.keys.k), kk);
    multiply_rows(shared_address(m.keys.q), shared_address(m.keys.k), qk);
    int32_t group = p.num_v_heads / p.num_k_heads, first_head = key_head * group;
    for (int32_t pair = 0; pair < group; pair += 2) {
        int32_t count = min(2, group - pair), head = first_head + pair;
        if (warp < count) {
            make_gates(p, request, first, head + warp, warp, m, heads[head + warp]);
        }
        sync_group(); /* the gates are there, and k and q or the pair before done with */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            clear_blocks(heads[head + i]);
            decay_rows(m, i, kk, qk, m.a[i], heads[head + i]);
        }
        sync_lanes();
        int32_t half = lane_index() / 16;
        invert_blocks(m.a[half], m.beta[half], half < count, heads[head + min(half, count - 1)]);
        sync_group(); /* all of A and the blocks on the diagonal are there */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            invert_column(m.a[i], m.beta[i], i == 0 ? warp : 3 - warp, heads[head + i]);
        }
        sync_group();
    }
}

#endif
