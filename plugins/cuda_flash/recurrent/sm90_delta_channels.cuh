/* SPDX-License-Identifier: Apache-2.0 */
/* The prepare kernel for gates per channel (KDA). With D_ijd the decay of channel d after token j
 * up to and including token i,
 *     A_ij = beta_i sum_d D_ijd k_id k_jd for j < i; scores: sum_d D_ijd q_id k_jd for j <= i
 * Each D_ij is split at a token between j and i: both factors are products of decays, so nothing
 * overflows, and they are applied to rows of k and q, which tensor cores multiply. Pairs of
 * different blocks are split at the ends of blocks. Pairs of one block are split at the middle of
 * the smallest aligned 2, 4, 8 or 16 tokens that have both; of each of these sizes, half of the
 * block's tokens are later and half earlier, and one product of 16 x 8 has q and k of the later
 * ones with k of the earlier ones. A warp has a block's tokens, a lane two channels of
 * each half of the key dims. */
#ifndef CUDA_FLASH_SM90_DELTA_CHANNELS_CUH
#define CUDA_FLASH_SM90_DELTA_CHANNELS_CUH

#include "sm80_delta_prepare.cuh"

/* Operands of blocks on the diagonal, later rows of k, follow q in memory. */
#define TILE_BYTES ((int)sizeof(prepare_memory::q))
struct alignas(256) channel_memory : prepare_memory {
    char rest_of_factors[2 * TILE_BYTES - sizeof(prepare_memory::a)];
};
static_assert(offsetof(prepare_memory, a) + sizeof(prepare_memory::a) == sizeof(prepare_memory),
              "factors follow q");

/* Decays of a block's tokens in the lane's two channels. */
typedef float block_decays[BLOCK][2];

/* The offset of the lane's two channels in a tile's row of the block's first token, and in that of
 * token t. */
GPU_INLINE uint32_t first_place(int32_t half)
{
    int32_t lane = lane_again();
    return place16<CHUNK_DIMS / 8>(prepare_warp() * BLOCK, half * 8 + (lane >> 2)) + (lane & 3) * 4;
}

GPU_INLINE uint32_t place_of_token(uint32_t first, int t)
{
    return (first ^ (t & 7) * 16) + t * 128;
}

/* Loads the gates' inputs; tokens past the end read the last. Types other than bf16 and float32
 * pass through the memory at `stage`, so that the code is there once. */
GPU_INLINE void load_decays(const gpu_delta_params &p, const prepare_item &item, int64_t at,
                            int32_t real, char *stage, block_decays &x)
{
    const gpu_matrix &m = p.a;
    int64_t first = item.request.first_row + item.first + prepare_warp() * BLOCK;
    int32_t last = item.request.first_row + item.request.num_tokens - 1 - (int32_t)first;
    bool wide = m.column == 1 && real == 2 && (m.row | at) % 2 == 0 && (uint64_t)m.data % 8 == 0;
    if (wide && m.dtype == ATTN_DTYPE_BF16) {
        uint32_t two[BLOCK];
#pragma unroll
        for (int t = 0; t < BLOCK; t++) {
            two[t] = *(const uint32_t *)(m.data + ((first + min(t, last)) * m.row + at) * 2);
        }
#pragma unroll
        for (int t = 0; t < BLOCK; t++) {
            *(float2 *)x[t] = two_floats<KIND_BF16>(two[t]);
        }
    } else if (wide && m.dtype == ATTN_DTYPE_F32) {
#pragma unroll
        for (int t = 0; t < BLOCK; t++) {
            *(float2 *)x[t] = *(const float2 *)(m.data + ((first + min(t, last)) * m.row + at) * 4);
        }
    } else {
        float2 *own = (float2 *)stage + lane_again();
#pragma unroll
        for (int t = 0; t < BLOCK; t += 8) {
#pragma unroll 1
            for (int i = 0; i < 8; i++) {
                int64_t row = first + min(t + i, last);
                own[i * GPU_LANES] = make_float2(real > 0 ? matrix_number(m, row, at) : 0.0f,
                                                 real > 1 ? matrix_number(m, row, at + 1) : 0.0f);
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                *(float2 *)x[t + i] = own[i * GPU_LANES];
            }
        }
    }
}

template <class F> GPU_INLINE void apply_to_decays(block_decays &x, const F &function)
{
#pragma unroll
    for (int t = 0; t < BLOCK; t++) {
        x[t][0] = function(x[t][0], 0);
        x[t][1] = function(x[t][1], 1);
    }
}

/* The decays of the warp's block, as log_decay has their logarithms: of tokens and channels that
 * do not exist, 1. */
GPU_INLINE void make_decays(const gpu_delta_params &p, const prepare_item &item, int32_t head,
                            int32_t half, char *factors, block_decays &x)
{
    const gpu_delta_rule &rule = p.rule;
    constexpr float log2_of_e = LOG2_OF_E;
    int32_t d = half * (CHUNK_DIMS / 2) + lane_again() * 2, real = min(max(rule.gates - d, 0), 2);
    int64_t at = (int64_t)head * rule.gates + (real > 0 ? d : 0);
    int32_t tokens = item.request.num_tokens - item.first - prepare_warp() * BLOCK;
    float rate = 0.0f, bias[2] = {0.0f, 0.0f};
    if (rule.gate != ATTN_GATE_GIVEN) {
        rate = expf(p.a_log[head]) * log2_of_e;
    }
    if (rule.gate == ATTN_GATE_CONSTANT) {
        apply_to_decays(x, [=](float, int) { return fast_exp2(-rate); });
    } else {
        load_decays(p, item, at, real, factors + tile_at<16>(prepare_warp() * BLOCK, half * 8), x);
    }
    if (rule.gate == ATTN_GATE_SOFTPLUS || rule.gate == ATTN_GATE_BOUNDED) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            bias[i] = i < real ? p.dt_bias[at + i] : 0.0f;
        }
    }
    if (rule.gate == ATTN_GATE_GIVEN) {
        apply_to_decays(x, [=](float g, int) { return fast_exp2(g * log2_of_e); });
    } else if (rule.gate == ATTN_GATE_BOUNDED) {
        float bound = rule.gate_bound * log2_of_e;
        apply_to_decays(x, [=](float a, int i) {
            float sigmoid = fast_reciprocal(1.0f + fast_exp2(-rate * (a + bias[i])));
            return fast_exp2(bound * sigmoid);
        });
    } else if (rule.gate == ATTN_GATE_SOFTPLUS) {
        float least = rule.dt_min, most = rule.dt_max > 0.0f ? rule.dt_max : bits_float(0x7f800000);
        apply_to_decays(x, [=](float a, int i) {
            float y = a + bias[i];
            float dt = 0.6931471805599453f * __log2f(1.0f + fast_exp2(y * log2_of_e));
            dt = y > SOFTPLUS_LINEAR ? y : dt;
            dt = dt < least ? least : dt > most ? most : dt;
            return fast_exp2(-rate * dt);
        });
    }
#pragma unroll
    for (int t = 0; t < BLOCK; t++) {
        x[t][0] = t < tokens && real > 0 ? x[t][0] : 1.0f;
        x[t][1] = t < tokens && real > 1 ? x[t][1] : 1.0f;
    }
}

GPU_INLINE void multiply_four(uint32_t (&x)[4], const uint32_t (&by)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = multiply_halves(x[i], by[i]);
    }
}

/* k of the block's tokens in the lane's two channels of a half of the key dims. */
typedef uint32_t block_keys[BLOCK];

/* Sums of q k^T and k k^T in the warp's block on the diagonal. */
#define SPLITS 4 /* 2, 4, 8 and 16 tokens */
struct diagonal_sums {
    float same[2][4]; /* 16 x 16; on its diagonal, products of a token's q with its own k */
    /* For pairs that are split at the middle of 2 HALF tokens, HALF = 1 << split, 8 x 8 each of q
     * and of k: rows are the tokens of later halves, columns those of earlier ones. */
    float split[SPLITS][4];

    /* Adds products of the block's rows in half of the key dims. */
    __device__ __forceinline__ void add_same(const prepare_memory &m, int32_t half)
    {
        int32_t lane = lane_again();
        uint32_t tile = prepare_warp() * BLOCK * 128 + half * CHUNK * 128;
        uint32_t row = tile + place16<CHUNK_DIMS / 8>(lane & 15, lane >> 4);
        uint32_t column =
            tile + place16<CHUNK_DIMS / 8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
#pragma unroll 1
        for (int step = 0; step < CHUNK_DIMS / 32; step++) {
            uint32_t left[4], right[4];
            load4(left, shared_address(m.q) + (row ^ step * 32));
            load4(right, shared_address(m.k) + (column ^ step * 32));
            multiply<KIND_F16>(same[0], left, right[0], right[1]);
            multiply<KIND_F16>(same[1], left, right[2], right[3]);
        }
    }

    /* Adds pairs that are split at the middle of 2 HALF tokens. Rows of later halves, of q then of
     * k, get the decay from the middle up to and including the token, in the block's rows of
     * `left`; rows of k of earlier halves get that after the token up to the middle, in place of
     * eight rows of m.k. */
    template <int HALF>
    __device__ __forceinline__ void add(prepare_memory &m, const block_decays &x,
                                        const block_keys &keys, int32_t half, char *left,
                                        float (&sums)[4])
    {
        uint32_t first = first_place(half);
        char *right = (char *)m.k;
        sync_lanes(); /* rows have been read */
#pragma unroll
        for (int middle = HALF; middle < BLOCK; middle += 2 * HALF) {
            float later[2] = {1.0f, 1.0f}, earlier[2] = {1.0f, 1.0f};
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                int after = middle + i, before = middle - 1 - i;
                int row = (middle - HALF) / 2 + i; /* among tokens of later halves */
                int column = (middle - HALF) / 2 + HALF - 1 - i;
                later[0] *= x[after][0], later[1] *= x[after][1];
                uint32_t by = pack2<KIND_F16>(later[0], later[1]);
                uint32_t q = *(const uint32_t *)((char *)m.q + place_of_token(first, after));
                *(uint32_t *)(left + place_of_token(first, row)) = multiply_halves(q, by);
                *(uint32_t *)(left + place_of_token(first, row + 8)) =
                    multiply_halves(keys[after], by);
                by = pack2<KIND_F16>(earlier[0], earlier[1]);
                *(uint32_t *)(right + place_of_token(first, column)) =
                    i == 0 ? keys[before] : multiply_halves(keys[before], by);
                earlier[0] *= x[before][0], earlier[1] *= x[before][1];
            }
        }
        sync_lanes();
        int32_t lane = lane_again();
        uint32_t tile = prepare_warp() * BLOCK * 128 + half * CHUNK * 128;
        uint32_t of_left =
            shared_address(left) + tile + place16<CHUNK_DIMS / 8>(lane & 15, lane >> 4);
        uint32_t of_right =
            shared_address(right) + tile + place16<CHUNK_DIMS / 8>(lane & 7, lane >> 3);
#pragma unroll 1
        for (int steps = 0; steps < CHUNK_DIMS / 64; steps++) {
            uint32_t four[4], near[4], far[4];
            load4(four, of_right ^ steps * 64);
            load4(near, of_left ^ steps * 64);
            load4(far, of_left ^ steps * 64 ^ 32);
            multiply<KIND_F16>(sums, near, four[0], four[1]);
            multiply<KIND_F16>(sums, far, four[2], four[3]);
        }
    }

    /* Stores the block of scores, and A in float32; q's sums go through the other head's memory. */
    __device__ __forceinline__ void store(const float *beta, prepare_a &a, chunk_head &to) const
    {
        int32_t lane = lane_again(), warp = prepare_warp(), row = lane >> 2,
                column = (lane & 3) * 2;
        auto &of_q = a.diagonal[1].blocks[warp], &of_k = a.diagonal[0].blocks[warp];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (row == column + i) {
                of_q[row][row] = same[0][i];
                of_q[row + 8][row + 8] = same[1][2 + i];
            }
#pragma unroll
            for (int split = 0; split < SPLITS; split++) {
                int half = 1 << split;
                int32_t later = (row & -half) * 2 + half + (row & (half - 1));
                int32_t earlier = (column + i & -half) * 2 + (column + i & (half - 1));
                if ((row ^ (column + i)) < half) {
                    of_q[later][earlier] = this->split[split][i];
                    of_k[later][earlier] = this->split[split][2 + i] * beta[warp * BLOCK + later];
                }
            }
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

/* Stores the lane's channels of the block's rows: q and, in place of factors, k by the decay from
 * the block's start, k by the decay up to its end. */
GPU_INLINE void decay_rows(prepare_memory &m, const block_decays &x, const block_keys &keys,
                           int32_t half, char *factors)
{
    uint32_t first = first_place(half);
    float past[2] = {1.0f, 1.0f}, after[2] = {1.0f, 1.0f};
#pragma unroll
    for (int t = 0; t < BLOCK; t++) {
        uint32_t at = place_of_token(first, t);
        past[0] *= x[t][0], past[1] *= x[t][1];
        uint32_t by = pack2<KIND_F16>(past[0], past[1]);
        uint32_t &q = *(uint32_t *)((char *)m.q + at);
        *(uint32_t *)(factors + at) = multiply_halves(keys[t], by);
        q = multiply_halves(q, by);
    }
#pragma unroll
    for (int t = BLOCK - 1; t >= 0; t--) {
        *(uint32_t *)((char *)m.k + place_of_token(first, t)) =
            multiply_halves(keys[t], pack2<KIND_F16>(after[0], after[1]));
        after[0] *= x[t][0], after[1] *= x[t][1];
    }
    *(float2 *)&m.channels.past[prepare_warp()][half * (CHUNK_DIMS / 2) + lane_again() * 2] =
        make_float2(past[0], past[1]);
}

/* Stores rows to global memory, times the decays of the blocks before theirs, or after theirs with
 * `backwards`; to_past: gets the decay of the chunk. */
GPU_INLINE void store_decayed(const channel_gates &gates, const void *from, void *to,
                              bool backwards, float *to_past)
{
    int32_t thread = prepare_warp() * GPU_LANES + lane_again();
    int32_t column = thread % 16, row = thread / 16;
    float past[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        int32_t block = backwards ? BLOCKS - 1 - i : i;
        uint32_t by[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            by[k] = pack2<KIND_F16>(past[2 * k], past[2 * k + 1]);
        }
#pragma unroll
        for (int k = 0; k < 2; k++) {
            uint32_t at = place16<CHUNK_DIMS / 8>(block * BLOCK + row + k * 8, column);
            uint4 four = *(const uint4 *)((const char *)from + at);
            uint32_t x[4] = {four.x, four.y, four.z, four.w};
            multiply_four(x, by);
            *(uint4 *)((char *)to + at) = make_uint4(x[0], x[1], x[2], x[3]);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            past[k] *= gates.past[block][column * 8 + k];
        }
    }
    if (to_past != nullptr && row == 0) {
#pragma unroll
        for (int k = 0; k < 8; k++) {
            to_past[column * 8 + k] = past[k];
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
    char *factors = (char *)m.q + TILE_BYTES;
    block_decays decays;
    block_keys keys;
    diagonal_sums diagonal = {};
    lower_sums lower;
    fetch_keys(a, m);
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
    wait_for_copies();
    sync_preparers(); /* all inputs are written */
    make_keys<GATES_OF_CHANNELS>(a, m);
    sync_preparers(); /* keys and the write gates are written, and inputs beyond q read */
#pragma unroll 1
    for (int32_t half = 0; half < 2; half++) {
        make_decays(p, m.item, head, half, factors, decays);
        diagonal.add_same(m, half);
#pragma unroll
        for (int t = 0; t < BLOCK; t++) {
            keys[t] = *(const uint32_t *)((char *)m.k + place_of_token(first_place(half), t));
        }
        diagonal.add<1>(m, decays, keys, half, factors, diagonal.split[0]);
        diagonal.add<2>(m, decays, keys, half, factors, diagonal.split[1]);
        diagonal.add<4>(m, decays, keys, half, factors, diagonal.split[2]);
        diagonal.add<8>(m, decays, keys, half, factors, diagonal.split[3]);
        sync_lanes(); /* operands have been read */
        decay_rows(m, decays, keys, half, factors);
    }
    sync_preparers(); /* all rows have their decays */
    chunk_channels &to = ((chunk_channels *)m.item.chunk)[head];
    store_decayed(m.channels, factors, to.keys.k, false, to.past);
    store_decayed(m.channels, m.q, to.keys.q, false, nullptr);
    store_decayed(m.channels, m.k, to.ends, true, nullptr);
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
