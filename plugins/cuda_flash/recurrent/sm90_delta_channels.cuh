/* SPDX-License-Identifier: Apache-2.0 */
/* The prepare kernel for gates per channel (KDA). With D_ijd the decay of channel d after token j
 * up to and including token i,
 *     A_ij = beta_i sum_d D_ijd k_id k_jd for j < i; scores: sum_d D_ijd q_id k_jd for j <= i
 * Each D_ij is split at a token: its factors are applied to rows of k and q, which tensor cores
 * multiply. Pairs of different blocks are split at the ends of blocks, and pairs of different
 * halves of a block at its middle, so that both factors are at most 1. Pairs of one half of a block
 * are split at the half's fourth token, where a factor may be 2^96: they are tf32 numbers. A warp
 * has a block's tokens, a lane rows and columns of them as mma's sums have. */
#ifndef CUDA_FLASH_SM90_DELTA_CHANNELS_CUH
#define CUDA_FLASH_SM90_DELTA_CHANNELS_CUH

#include "cuda_flash/ptx/sm90_copy.cuh"
#include "sm80_delta_prepare.cuh"

/* log2 of a token's decay is at least this: four tokens' factors are then far from the limits of
 * tf32, and a smaller decay rounds to 0 in f16. */
#define LEAST_LOG2_DECAY -24.0f

/* Gates' inputs and, in their place, rows of k by decays follow the inputs of q in memory. */
#define TILE_BYTES ((int)sizeof(prepare_memory::q))
#define FACTORS_AT ((int)sizeof(prepare_memory::inputs))
struct alignas(256) channel_memory : prepare_memory {
    char rest_of_factors[FACTORS_AT + TILE_BYTES - sizeof(prepare_memory::a)];
};
static_assert(offsetof(prepare_memory, a) + sizeof(prepare_memory::a) == sizeof(prepare_memory),
              "factors follow q");

/* Whether gates' inputs are copied to shared memory 16 bytes at a time. */
GPU_INLINE bool gates_are_wide(const gpu_delta_params &p)
{
    return p.a.dtype == ATTN_DTYPE_BF16 && p.a.column == 1 && p.a.row % 8 == 0 &&
           p.rule.gates == CHUNK_DIMS && (uint64_t)p.a.data % 16 == 0 &&
           p.rule.gate != ATTN_GATE_CONSTANT;
}

/* Starts the copy of the gates' inputs to `factors`, zeros past the last token. */
GPU_INLINE void fetch_gates(const gpu_delta_params &p, const prepare_item &item, int32_t head,
                            char *factors)
{
    int32_t thread = prepare_warp() * GPU_LANES + lane_index(), piece = thread % 16;
    int32_t row = thread / 16, tokens = item.request.num_tokens - item.first;
    const char *from = p.a.data + ((item.request.first_row + item.first + (int64_t)row) * p.a.row +
                                   (int64_t)head * CHUNK_DIMS + piece * 8) *
                                      2;
    uint32_t to = shared_address(factors) + place16<CHUNK_DIMS / 8>(row, piece);
#pragma unroll
    for (int i = 0; i < CHUNK; i += 8) {
        bool is_there = row + i < tokens;
        copy16(to + i * 128, is_there ? from + i * p.a.row * 2 : p.a.data, is_there ? 16 : 0);
    }
}

GPU_INLINE float fast_log2(float x)
{
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The larger one, NaN if one is. */
GPU_INLINE float larger(float x, float y)
{
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

/* Gates' inputs of the warp's tokens in the 16 channels from `first` on, eight in a lane: element i
 * has channel first + lane / 4 + i / 4 * 8 and token_of_gate(i) of the block, as a right operand of
 * mma has columns and rows. Wide ones are in the tile at `at`. */
typedef float lane_gates[8];

GPU_INLINE int32_t token_of_gate(int i)
{
    return (i >> 1 & 1) * 8 + (lane_again() & 3) * 2 + (i & 1);
}

GPU_INLINE void load_gates(const gpu_delta_params &p, const prepare_item &item, int32_t head,
                           int32_t first, uint32_t at, lane_gates &x)
{
    if (gates_are_wide(p)) {
        uint32_t four[4];
        load4_transposed(four, at);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            *(float2 *)&x[2 * i] = two_floats<KIND_BF16>(four[i]);
        }
        return;
    }
    float y[8]; /* indexed at run time, so that the code is there once */
#pragma unroll 1
    for (int i = 0; i < 8; i++) {
        int32_t channel = first + (lane_again() >> 2) + (i >> 2) * 8;
        int32_t t = item.first + prepare_warp() * BLOCK + token_of_gate(i);
        bool is_there = channel < p.rule.gates && t < item.request.num_tokens;
        y[i] = is_there ? matrix_number(p.a, item.request.first_row + t,
                                        (int64_t)head * p.rule.gates + channel)
                        : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = y[i];
    }
}

/* Puts log2 of decays in place of gates' inputs. scales: scale_of_gates for the lane's tokens, 0
 * past the last token. */
GPU_INLINE void make_log_decays(const gpu_delta_rule &rule, float rate, const float *bias,
                                const float (&scales)[4], lane_gates &x)
{
    constexpr float log2_of_e = LOG2_OF_E;
    float of_piece[2] = {bias[lane_again() >> 2], bias[(lane_again() >> 2) + 8]};
    if (rule.gate == ATTN_GATE_SOFTPLUS) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float y = (x[i] + of_piece[i >> 2]) * log2_of_e;
            float softplus = fast_log2(1.0f + fast_exp2(y)); /* in units of log(2) */
            x[i] = y > SOFTPLUS_LINEAR * log2_of_e ? y : softplus;
        }
        if (rule.dt_min > 0.0f || rule.dt_max > 0.0f) {
            float most = rule.dt_max > 0.0f ? rule.dt_max * log2_of_e : bits_float(0x7f800000);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[i] = -larger(-larger(x[i], rule.dt_min * log2_of_e), -most);
            }
        }
    } else if (rule.gate == ATTN_GATE_BOUNDED) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = fast_reciprocal(1.0f + fast_exp2((x[i] + of_piece[i >> 2]) * -rate));
        }
    } else if (rule.gate == ATTN_GATE_CONSTANT) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] = 1.0f;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        x[i] = larger(x[i] * scales[i & 3], LEAST_LOG2_DECAY);
    }
}

/* Gives the factor from a gate's function to log2 of the decay; rate: the factor of a bounded
 * function's argument. */
GPU_INLINE float scale_of_gates(const gpu_delta_params &p, int32_t head, float *rate)
{
    constexpr float log2_of_e = LOG2_OF_E;
    if (p.rule.gate == ATTN_GATE_GIVEN) {
        return log2_of_e;
    }
    float e = expf(p.a_log[head]);
    *rate = e * log2_of_e;
    return p.rule.gate == ATTN_GATE_BOUNDED    ? p.rule.gate_bound * log2_of_e
           : p.rule.gate == ATTN_GATE_CONSTANT ? -*rate
                                               : -e;
}

/* Adds sums over the eight tokens of each half of a block, for the eight rows of that half. `row`
 * has the lane's two factors in the matrix of 8 x 8 that both halves share. */
GPU_INLINE void add_tokens(float (&sums)[4], uint32_t row, uint32_t first, uint32_t second)
{
    const uint32_t rows[4] = {row, 0, 0, row};
    multiply<KIND_F16>(sums, rows, first, second);
}

/* Sums of q k^T and k k^T in the warp's block on the diagonal, 8 x 8 each of q and of k: within the
 * first half of its tokens, within the second, and of the second with the first. */
struct diagonal_sums {
    float sums[3][4];

    __device__ __forceinline__ void add(int i, const float (&q)[2], const float (&k)[2],
                                        const float (&by)[2])
    {
        multiply_tf32(sums[i], q[0], k[0], q[1], k[1], by[0], by[1]);
    }

    /* Stores the block of scores, and A in float32; q's sums go through the other head's memory. */
    __device__ __forceinline__ void store(const float *beta, prepare_a &a, chunk_head &to) const
    {
        int32_t lane = lane_again(), warp = prepare_warp(), row = lane >> 2,
                column = (lane & 3) * 2;
        auto &of_q = a.diagonal[1].blocks[warp], &of_k = a.diagonal[0].blocks[warp];
#pragma unroll
        for (int i = 0; i < 3; i++) {
            int32_t later = row + (i > 0) * 8, earlier = column + (i == 1) * 8;
            float write = beta[warp * BLOCK + later];
            *(float2 *)&of_q[later][earlier] = make_float2(sums[i][0], sums[i][1]);
            *(float2 *)&of_k[later][earlier] = make_float2(sums[i][2] * write, sums[i][3] * write);
        }
        sync_lanes();
        int32_t of_block = lane >> 1, first = (lane & 1) * 8;
        uint32_t bits[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int32_t j = first + 2 * i;
            float2 two = *(const float2 *)&of_q[of_block][j];
            bits[i] = pack2<KIND_F16>(j <= of_block ? two.x : 0.0f, j < of_block ? two.y : 0.0f);
        }
        *(uint4 *)((char *)to.scores +
                   place16<CHUNK / 8>(warp * BLOCK + of_block, warp * 2 + (lane & 1))) =
            make_uint4(bits[0], bits[1], bits[2], bits[3]);
    }
};

/* Eight channels of the block's tokens: from the logarithms of their decays, adds to the block's
 * sums and makes q and k (in place), by decays from the block's start, and k by decays up to the
 * block's end. Registers of q, k and ends: rows lane / 4, then those + 8. past: decays of the block
 * in channels 2 (lane % 4) and the next. */
GPU_INLINE void decay_channels(const float *logs, diagonal_sums &diagonal, uint32_t *q, uint32_t *k,
                               uint32_t *ends, float (&past)[2])
{
    int32_t row = lane_again() >> 2, column = (lane_again() & 3) * 2;
    /* log2 of decays since the half's fourth token, and of those of its first four tokens */
    float since[4] = {}, first_four[4] = {}, in_first = column < 4 ? 1.0f : 0.0f;
    uint32_t first = pack2<KIND_F16>(logs[0], logs[1]), second = pack2<KIND_F16>(logs[2], logs[3]);
    add_tokens(since, pack2<KIND_F16>((column <= row) - in_first, (column < row) - in_first), first,
               second);
    add_tokens(first_four, pack2<KIND_F16>(in_first, in_first), first, second);
    float rows[3][2][2];          /* q, k, and k by the inverse of the decay, in each half */
    float four[2][2], last[2][2]; /* decays of the first and last four tokens of each half */
    float later_q[2], later_k[2], earlier_k[2], of_first[2], of_second[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float2 of_q = two_floats<KIND_F16>(q[half]), of_k = two_floats<KIND_F16>(k[half]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = since[2 * half + i], decay = fast_exp2(x);
            rows[0][half][i] = (i == 0 ? of_q.x : of_q.y) * decay;
            rows[1][half][i] = (i == 0 ? of_k.x : of_k.y) * decay;
            rows[2][half][i] = (i == 0 ? of_k.x : of_k.y) * fast_exp2(-x);
            four[half][i] = fast_exp2(first_four[2 * half + i]);
            last[half][i] = lane_read(decay, 7 * 4 + (lane_again() & 3));
        }
        diagonal.add(half, rows[0][half], rows[1][half], rows[2][half]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        later_q[i] = rows[0][1][i] * four[1][i], later_k[i] = rows[1][1][i] * four[1][i];
        earlier_k[i] = rows[2][0][i] * last[0][i];
        of_first[i] = four[0][i] * last[0][i], of_second[i] = four[1][i] * last[1][i];
        past[i] = of_first[i] * of_second[i];
    }
    diagonal.add(2, later_q, later_k, earlier_k);
    q[0] = pack2<KIND_F16>(rows[0][0][0] * four[0][0], rows[0][0][1] * four[0][1]);
    k[0] = pack2<KIND_F16>(rows[1][0][0] * four[0][0], rows[1][0][1] * four[0][1]);
    q[1] = pack2<KIND_F16>(later_q[0] * of_first[0], later_q[1] * of_first[1]);
    k[1] = pack2<KIND_F16>(later_k[0] * of_first[0], later_k[1] * of_first[1]);
    ends[0] = pack2<KIND_F16>(earlier_k[0] * of_second[0], earlier_k[1] * of_second[1]);
    ends[1] = pack2<KIND_F16>(rows[2][1][0] * last[1][0], rows[2][1][1] * last[1][1]);
}

/* Makes the warp's block on the diagonal. Rows of q get the decays from the block's start, so do
 * rows of k in place of gates' inputs at `factors`; rows of m.k get the decays up to its end. */
GPU_INLINE void decay_block(const gpu_delta_params &p, prepare_memory &m, int32_t head,
                            char *factors, diagonal_sums &diagonal)
{
    int32_t lane = lane_index(), warp = prepare_warp();
    int32_t tokens = m.item.request.num_tokens - m.item.first - warp * BLOCK;
    uint32_t first = place16<CHUNK_DIMS / 8>(warp * BLOCK + (lane & 15), lane >> 4);
    float rate = 0.0f, scale = scale_of_gates(p, head, &rate), scales[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        scales[i] = token_of_gate(i) < tokens ? scale : 0.0f;
    }
#pragma unroll 1
    for (int32_t step = 0; step < CHUNK_DIMS / 16; step++) {
        uint32_t at = (first ^ step % 4 * 32) + step / 4 * CHUNK * 128, q[4], k[4], ends[4];
        lane_gates logs;
        if (p.rule.gate != ATTN_GATE_CONSTANT) {
            load_gates(p, m.item, head, step * 16, shared_address(factors) + at, logs);
        }
        load4(q, shared_address(m.q) + at);
        load4(k, shared_address(m.k) + at);
        make_log_decays(p.rule, rate, m.channels.bias + step * 16, scales, logs);
#pragma unroll
        for (int piece = 0; piece < 2; piece++) {
            float past[2];
            decay_channels(logs + piece * 4, diagonal, q + piece * 2, k + piece * 2,
                           ends + piece * 2, past);
            if (lane < 4) {
                *(float2 *)&m.channels.past[warp][step * 16 + piece * 8 + lane * 2] =
                    make_float2(past[0], past[1]);
            }
        }
        sync_lanes(); /* all lanes have read */
        store4(shared_address(m.q) + at, q);
        store4(shared_address(factors) + at, k);
        store4(shared_address(m.k) + at, ends);
    }
}

GPU_INLINE void multiply_four(uint32_t (&x)[4], const uint32_t (&by)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = multiply_halves(x[i], by[i]);
    }
}

/* Stores COUNT tiles to global memory: rows times the decays of the blocks before theirs, or after
 * theirs if BACKWARDS. `past` becomes the decay of the chunk in the eight channels of the thread's
 * column. */
template <bool BACKWARDS, int COUNT>
GPU_INLINE void store_decayed(const channel_gates &gates, const void *const (&from)[COUNT],
                              void *const (&to)[COUNT], float (&past)[8])
{
    int32_t thread = prepare_warp() * GPU_LANES + lane_again();
    int32_t column = thread % 16, row = thread / 16;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int32_t block = BACKWARDS ? BLOCKS - 1 - i : i;
        uint32_t by[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            by[k] = i > 0 ? pack2<KIND_F16>(past[2 * k], past[2 * k + 1]) : 0;
        }
#pragma unroll
        for (int k = 0; k < 2 * COUNT; k++) {
            uint32_t at = place16<CHUNK_DIMS / 8>(block * BLOCK + row + k % 2 * 8, column);
            uint4 four = *(const uint4 *)((const char *)from[k / 2] + at);
            uint32_t x[4] = {four.x, four.y, four.z, four.w};
            if (i > 0) {
                multiply_four(x, by);
            }
            *(uint4 *)((char *)to[k / 2] + at) = make_uint4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float of_block = gates.past[block][column * 8 + k];
            past[k] = i > 0 ? past[k] * of_block : of_block;
        }
    }
}

/* Blocks off the diagonal: of q k^T in block row `warp` and of k k^T in block row BLOCKS - 1 -
 * warp. */
struct lower_sums {
    float sums[BLOCKS - 1][2][4];

    __device__ __forceinline__ void multiply_blocks(const prepare_memory &m, const char *factors)
    {
        int32_t lane = lane_again(), warp = prepare_warp();
        uint32_t row = place16<CHUNK_DIMS / 8>(lane & 15, lane >> 4);
        uint32_t column = place16<CHUNK_DIMS / 8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll
        for (int i = 0; i < BLOCKS - 1; i++) {
            bool scored = i < warp;
            int32_t of_left = scored ? warp : BLOCKS - 1 - warp, of_right = scored ? i : i - warp;
            uint32_t left_at = (scored ? shared_address(m.q) : shared_address(factors)) + row +
                               of_left * BLOCK * 128;
            uint32_t right_at = shared_address(m.k) + column + of_right * BLOCK * 128;
#pragma unroll
            for (int k = 0; k < 8; k++) {
                sums[i][k / 4][k % 4] = 0.0f;
            }
#pragma unroll 2
            for (int step = 0; step < CHUNK_DIMS / 16; step++) {
                uint32_t further = step / 4 * CHUNK * 128, swizzled = step % 4 * 32;
                uint32_t left[4], right[4];
                load4(left, (left_at ^ swizzled) + further);
                load4(right, (right_at ^ swizzled) + further);
                if (of_left - of_right > 1) { /* the decay of the blocks between */
                    const float *past = &m.channels.past[of_right + 1][step * 16 + (lane & 3) * 2];
                    float2 near = *(const float2 *)past, far = *(const float2 *)(past + 8);
                    if (of_left - of_right > 2) {
                        near.x *= past[CHUNK_DIMS], near.y *= past[CHUNK_DIMS + 1];
                        far.x *= past[CHUNK_DIMS + 8], far.y *= past[CHUNK_DIMS + 9];
                    }
                    uint32_t by = pack2<KIND_F16>(near.x, near.y);
                    uint32_t by_far = pack2<KIND_F16>(far.x, far.y);
                    const uint32_t all[4] = {by, by_far, by, by_far};
                    multiply_four(right, all);
                }
                multiply<KIND_F16>(sums[i][0], left, right[0], right[1]);
                multiply<KIND_F16>(sums[i][1], left, right[2], right[3]);
            }
        }
    }
};

/* Stores a block of scores or of A below the diagonal, of two rows and four columns a lane; beta
 * NULL: scores. */
GPU_INLINE void store_block(const float (&sums)[2][4], int32_t of_row, int32_t of_column,
                            const float *beta, prepare_a &a, chunk_head &to)
{
    int32_t lane = lane_again(), j = (lane & 3) * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int n = i >> 1, half = i & 1, row = (lane >> 2) + half * 8;
        float two[2] = {sums[n][2 * half], sums[n][2 * half + 1]};
        if (beta == nullptr) {
            char *at = (char *)to.scores + j * 2 +
                       place16<CHUNK / 8>(of_row * BLOCK + row, of_column * 2 + n);
            *(uint32_t *)at = pack2<KIND_F16>(two[0], two[1]);
            continue;
        }
        two[0] *= beta[of_row * BLOCK + row], two[1] *= beta[of_row * BLOCK + row];
        *(uint32_t *)((char *)a.blocks[0][number_of_block(of_row, of_column)] + j * 2 +
                      block_place(row, n)) = pack2<KIND_F16>(two[0], two[1]);
    }
}

/* Prepares a value head of m.item; the memory may be reused on return. */
GPU_INLINE void prepare_channels(const sm80_delta_params &a, int32_t of_group, int32_t next,
                                 prepare_memory &m)
{
    const gpu_delta_params &p = a.p;
    int32_t head = m.item.key_head * a.group + of_group, warp = prepare_warp();
    char *factors = (char *)m.q + FACTORS_AT;
    diagonal_sums diagonal = {};
    lower_sums lower;
    fetch_keys(a, m);
    if (gates_are_wide(p)) {
        fetch_gates(p, m.item, head, factors);
    }
    if (of_group == 0) {
        find_next(a, next, m);
    }
    int32_t t = m.item.first + warp * BLOCK + lane_index();
    if (lane_index() < BLOCK) {
        float step = 0.0f;
        bool is_there = t < m.item.request.num_tokens;
        int64_t row = m.item.request.first_row + t;
        if (is_there && p.rule.write_gate == ATTN_WRITE_GATE_STEP) {
            log_decay(p, row, head, head * p.rule.gates, &step);
        }
        m.channels.beta[warp * BLOCK + lane_index()] =
            is_there ? write_gate(p, row, head, step) : 0.0f;
    }
    int32_t channel = warp * GPU_LANES + lane_index();
    bool biased = p.rule.gate == ATTN_GATE_SOFTPLUS || p.rule.gate == ATTN_GATE_BOUNDED;
    m.channels.bias[channel] =
        biased && channel < p.rule.gates ? p.dt_bias[head * p.rule.gates + channel] : 0.0f;
    wait_for_copies();
    sync_preparers(); /* all inputs are written */
    make_keys<GATES_OF_CHANNELS>(a, m);
    sync_lanes(); /* the warp's rows of keys are written */
    decay_block(p, m, head, factors, diagonal);
    sync_preparers(); /* all rows have their decays */
    chunk_channels &to = ((chunk_channels *)m.item.chunk)[head];
    float past[8];
    store_decayed<true, 1>(m.channels, {m.k}, {to.ends}, past);
    store_decayed<false, 2>(m.channels, {factors, m.q}, {to.keys.k, to.keys.q}, past);
    if (warp == 0 && lane_again() < 16) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            to.past[lane_again() * 8 + k] = past[k];
        }
    }
    lower.multiply_blocks(m, factors);
    sync_preparers(); /* all warps have read q and factors */
    const float *beta = m.channels.beta;
    chunk_head &to_head = m.item.heads[of_group];
    clear_blocks<RIGHT_OF_DIAGONAL>(to_head.scores);
    clear_blocks<LEFT_OF_DIAGONAL>(to_head.inverse);
    (warp < 2 ? to_head.from_start : to_head.to_end)[warp % 2 * GPU_LANES + lane_index()] = 1.0f;
    diagonal.store(beta, m.a, to_head);
#pragma unroll
    for (int i = 0; i < BLOCKS - 1; i++) {
        bool scored = i < warp;
        store_block(lower.sums[i], scored ? warp : BLOCKS - 1 - warp, scored ? i : i - warp,
                    scored ? nullptr : beta, m.a, to_head);
    }
    sync_preparers(); /* A is written */
    invert_blocks(m.a, 0, lane_index() < GPU_LANES / 2);
    sync_preparers(); /* the blocks on the diagonal are written */
    invert_column(m.a, 0, beta, warp, to_head.inverse);
    sync_preparers(); /* all warps have read A */
}

template <>
__device__ __forceinline__ void prepare_chunk<GATES_OF_CHANNELS>(const sm80_delta_params &a,
                                                                 int32_t next, prepare_memory &m)
{
#pragma unroll 1
    for (int32_t i = 0; i < a.group; i++) {
        prepare_channels(a, i, next, m);
    }
}

#endif
