/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with a ring of inputs: the rows of the state in shared memory, read by a step and, where
 * the state is due, made into the new state. */
#ifndef CUDA_FLASH_SM90_DELTA_RING_ROWS_CUH
#define CUDA_FLASH_SM90_DELTA_RING_ROWS_CUH

#include "gpu/device/ring.h"
#include "sm90_delta_step.cuh"

/* A step of up to TOKENS tokens. */
template <int TOKENS> struct ring_step {
    static constexpr int most = TOKENS == 1 ? RING_MOST : RING_DRAFTED; /* tokens of the ring */
    static constexpr int depths = (most + 15) / 16;                     /* MMA depths */
    static constexpr int tiles = (TOKENS + 1) / 2;                      /* MMA tiles of columns */
    static constexpr int columns = 2 * TOKENS; /* products with k and q of each token */
    /* Places of sums over channels: q q, k k, k_s q_t for s <= t and k_s k_t for s < t. */
    static constexpr int sums = TOKENS == 1 ? 4 : 32;

    GPU_INLINE constexpr int of_q(int t)
    {
        return t;
    }

    GPU_INLINE constexpr int of_k(int t)
    {
        return TOKENS + t;
    }

    GPU_INLINE constexpr int of_kq(int t, int s)
    {
        return 2 * TOKENS + t * (t + 1) / 2 + s;
    }

    GPU_INLINE constexpr int of_kk(int t, int s)
    {
        return of_kq(TOKENS, 0) + t * (t - 1) / 2 + s;
    }
};

/* Rows of parts have 16 numbers more, so that neighbours are in different banks. */
template <int STATE, int ROWS, int TOKENS> struct ring_memory {
    typedef ring_step<TOKENS> step;
    static constexpr int ctas = STATE == KIND_F32    ? TOKENS == 1 ? 3 : 2
                                : TOKENS > 1         ? 3
                                : ROWS == CHUNK_DIMS ? 5
                                                     : 4; /* resident CTAs */
    uint4 state[ROWS][step_pieces<STATE>::of_row];
    float parts[4 * TOKENS][CHUNK_DIMS + 16];      /* k and q of each token in two tf32 parts */
    uint16_t changes[16 * step::depths][ROWS + 8]; /* u_j */
    float rows[step::columns][ROWS + 8]; /* S_0 k and S_0 q of each token, then the first one's u */
    float products[step::most][step::columns]; /* with k_j, the newest token first */
    float sums[STEP_WARPS][step::sums], totals[step::sums], betas[TOKENS];
    float ring_sums[STEP_WARPS][step::most][step::columns];
    /* where the state is due: k, g and e of the first token, and e_j of a gate per head */
    alignas(16) float k[CHUNK_DIMS], gates[CHUNK_DIMS], decay[CHUNK_DIMS],
        decays[16 * step::depths];
    uint64_t full;

    __device__ __forceinline__ float k_factor(int t, bool l2norm) const
    {
        return l2norm ? rsqrtf(totals[step::of_k(t)] + L2_EPSILON) : 1.0f;
    }
};

/* The first of the four rows of u that a lane has, of every fourth token. */
GPU_INLINE int32_t row_of_lane()
{
    return warp_index() * GPU_LANES + lane_index() % 8 * 4;
}

/* The first of the eight channels of its warp that a lane has. */
GPU_INLINE int32_t column_of_lane()
{
    return warp_index() * GPU_LANES + lane_index() % 4 * 8;
}

/* A head's tokens in the ring by their age; 0 is the newest. */
struct ring_tokens {
    const char *rows;
    int32_t row; /* bytes */
    int32_t newest, num_rows, count;
    int32_t u, gates; /* bytes from a row's start */
    bool by_channel;

    template <int ROWS>
    __device__ __forceinline__ ring_tokens(const gpu_ring_params &p, const delta_request &request,
                                           int32_t replayed, const step_place<ROWS> &at)
        : rows(p.ring + request.state_from * p.ring_slot + at.key_head * p.ring_head),
          row((int32_t)p.ring_row), newest((request.context - 1) % p.rows), num_rows(p.rows),
          count(replayed), u((CHUNK_DIMS + at.member * p.delta.head_size_v + at.first) * 2),
          gates((CHUNK_DIMS + at.group * p.delta.head_size_v) * 2 +
                at.member * p.delta.rule.gates * 4),
          by_channel(p.delta.rule.gates > 1)
    {
    }

    __device__ __forceinline__ const char *of(int32_t age) const
    {
        int32_t number = newest - age;
        return rows + (int64_t)(number + (number < 0 ? num_rows : 0)) * row;
    }

    __device__ __forceinline__ const float *gates_of(int32_t age) const
    {
        return (const float *)(of(age) + gates);
    }

    /* With a gate per head: e_j of the ring's token whose age is the lane, without the step's
     * tokens; past: the gate of the token before. Lane `count` has the whole ring's. */
    __device__ __forceinline__ float decay_of_lane(float past) const
    {
#pragma unroll
        for (int distance = 1; distance < GPU_LANES; distance *= 2) {
            const float before = lane_up(past, distance);
            past += lane_index() >= distance ? before : 0.0f;
        }
        return by_channel ? 1.0f : expf(past);
    }

    /* Multiplies eight channels of a key by their decays; ages are lane / 4 from one of lane 0 on,
     * past: sums of the channels' gates of tokens before those, to which these are added. */
    __device__ __forceinline__ void decay_key(int32_t age, int32_t column, float (&past)[8],
                                              float (&x)[8]) const
    {
        float g[8] = {};
        if (age < count) {
            *(float4 *)g = *(const float4 *)(gates_of(age) + column);
            *(float4 *)(g + 4) = *(const float4 *)(gates_of(age) + column + 4);
        }
#pragma unroll
        for (int c = 0; c < 8; c++) {
#pragma unroll
            for (int distance = 4; distance < GPU_LANES; distance *= 2) {
                const float before = lane_up(g[c], distance);
                g[c] += lane_index() >= distance ? before : 0.0f;
            }
            const float before = lane_up(g[c], 4);
            x[c] *= expf(past[c] + (lane_index() >= 4 ? before : 0.0f));
            past[c] += lane_read(g[c], GPU_LANES - 4 + lane_index() % 4);
        }
    }
};

template <int KIND> GPU_INLINE void load_four(const void *from, float *x)
{
    if constexpr (KIND == KIND_F32) {
        *(float4 *)x = *(const float4 *)from;
    } else {
        const uint2 words = *(const uint2 *)from;
        const float2 low = two_floats<KIND>(words.x), high = two_floats<KIND>(words.y);
        x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
    }
}

/* Global memory alone. */
template <int KIND> GPU_INLINE void store_four(void *to, const float *x)
{
    if constexpr (KIND == KIND_F32) {
        __stcs((float4 *)to, *(const float4 *)x);
    } else {
        __stcs((uint2 *)to, make_uint2(pack2<KIND>(x[0], x[1]), pack2<KIND>(x[2], x[3])));
    }
}

/* The high part of a float32 as tf32. */
GPU_INLINE float high_part(float x)
{
    return bits_float(float_bits(x) & 0xffffe000u);
}

/* Multiplies the rows of S_0 with all tokens' k and q, 16 rows of a warp at a time. States of 16
 * bits are tf32, float32 is split in two. The order of columns is that of the lanes' loads. */
template <int STATE, int ROWS, int TOKENS>
GPU_INLINE void read_rows(ring_memory<STATE, ROWS, TOKENS> &m)
{
    typedef step_pieces<STATE> pieces;
    constexpr int numbers = pieces::numbers, loads = pieces::of_row / 4;
    constexpr int tiles = ring_step<TOKENS>::tiles;
    const int32_t of_eight = lane_index() / 4, of_four = lane_index() % 4;
    const int32_t part_row = TOKENS == 1 ? of_eight % 4 : of_eight;
#pragma unroll 1
    for (int32_t first = warp_index() * 16; first < ROWS; first += STEP_WARPS * 16) {
        float acc[tiles][2][4] = {};
#pragma unroll
        for (int j = 0; j < loads; j++) {
            float x[numbers], y[numbers], part[tiles][numbers];
#pragma unroll
            for (int i = 0; i < tiles * numbers; i += 4) {
                load_four<KIND_F32>(&m.parts[8 * (i / numbers) + part_row]
                                            [(of_four + 4 * j) * numbers + i % numbers],
                                    &part[i / numbers][i % numbers]);
            }
            pieces::unpack(m.state[first + of_eight][of_four + 4 * j], x);
            pieces::unpack(m.state[first + of_eight + 8][of_four + 4 * j], y);
#pragma unroll
            for (int i = 0; i < numbers; i += 2) {
#pragma unroll
                for (int n = 0; n < tiles; n++) {
                    float(&sums)[4] = acc[n][i / 2 % 2];
                    multiply_tf32(sums, x[i], y[i], x[i + 1], y[i + 1], part[n][i], part[n][i + 1]);
                    if constexpr (STATE == KIND_F32) {
                        multiply_tf32(sums, x[i] - high_part(x[i]), y[i] - high_part(y[i]),
                                      x[i + 1] - high_part(x[i + 1]),
                                      y[i + 1] - high_part(y[i + 1]), part[n][i], part[n][i + 1]);
                    }
                }
            }
        }
#pragma unroll
        for (int n = 0; n < tiles && 4 * n + of_four < 2 * TOKENS; n++) {
            const float(&a)[4] = acc[n][0], (&b)[4] = acc[n][1];
            float *to = &m.rows[4 * n + of_four][first + of_eight];
            to[0] = a[0] + a[1] + (b[0] + b[1]);
            to[8] = a[2] + a[3] + (b[2] + b[3]);
        }
    }
}

/* The sum of x over the lanes before this one in its group of four; total: over all four. */
GPU_INLINE float sum_before(float x, float &total)
{
    const float other = lane_xor(x, 1), others = lane_xor(x + other, 2);
    total = x + other + others;
    return (lane_index() & 1 ? other : 0.0f) + (lane_index() & 2 ? others : 0.0f);
}

/* Makes the right operands of tokens `first` to first + 15 by 8 columns: e_j k_j in parts of bf16.
 * The lane has one column and tokens 2 (lane % 4) + {0, 1, 8, 9}; missing tokens are 0. sum: of
 * the column's gates after them. */
template <int PARTS, class MEMORY>
GPU_INLINE void make_right(const MEMORY &m, const ring_tokens &ring, int32_t first, int32_t column,
                           float &sum, uint32_t (&right)[PARTS][2])
{
    float x[4], e[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t age = first + lane_index() % 4 * 2 + i % 2 + i / 2 * 8;
        const bool is_there = age < ring.count;
        const char *row = ring.of(is_there ? age : 0);
        x[i] = is_there ? float_of_bf16(((const uint16_t *)row)[column]) : 0.0f;
        if (ring.by_channel) {
            e[i] = is_there ? ((const float *)(row + ring.gates))[column] : 0.0f;
        } else {
            e[i] = is_there ? m.decays[age] : 0.0f;
        }
    }
    if (ring.by_channel) {
        float young, old;
        const float low = sum + sum_before(e[0] + e[1], young);
        const float high = sum + young + sum_before(e[2] + e[3], old);
        e[1] = expf(low + e[0]), e[0] = expf(low);
        e[3] = expf(high + e[2]), e[2] = expf(high);
        sum += young + old;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float a = x[2 * half] * e[2 * half], b = x[2 * half + 1] * e[2 * half + 1];
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
            right[i][half] = pack2<KIND_BF16>(a, b);
            const float2 part = two_floats<KIND_BF16>(right[i][half]);
            a -= part.x, b -= part.y;
        }
    }
}

/* Four numbers from `column` on rounded by a seed. */
template <int KIND>
GPU_INLINE void store_four_by(const gpu_delta_rule &rule, int32_t head_row, int32_t tokens,
                              int32_t column, void *to, const float *x)
{
    const state_random r = random_of_eight(rule, head_row, tokens, column);
    const bool high = column & 4;
    __stcs((uint2 *)to, make_uint2(pack2_by<KIND>(x[0], x[1], high ? r.x[2] : r.x[0]),
                                   pack2_by<KIND>(x[2], x[3], high ? r.x[3] : r.x[1])));
}

/* Writes S after the first token. A warp has 32 columns, in an order in which a lane has four
 * neighbours of each 16, and takes 16 rows at a time: the ring's u (e_j k_j)^T by mma.sync, with
 * e_j k_j in two or three parts, to which it adds u k^T and S_0 e. These are not the accumulators:
 * tensor cores truncate sums, which would shrink S from one due state to the next. A non-finite u
 * makes its whole row NaN, since low parts of e_j k_j may be 0. The rows are a multiple of 8. */
template <int STATE, int ROWS, int TOKENS>
GPU_INLINE void write_rows(const ring_memory<STATE, ROWS, TOKENS> &m, const ring_tokens &ring,
                           const gpu_delta_rule &rule, bool has_state, int32_t rows,
                           int32_t head_row, int32_t tokens, char *to)
{
    constexpr int bytes = STATE == KIND_F32 ? 4 : 2, parts = STATE == KIND_F32 ? 3 : 2;
    constexpr int depths = ring_step<TOKENS>::depths;
    const int32_t lane = lane_index(), of_eight = lane / 4, warp_column = warp_index() * 32;
    uint32_t right[4][depths][parts][2];
    float k[2][4], e[2][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        const int32_t column =
            warp_column + n / 2 * 16 + of_eight / 2 * 4 + n % 2 * 2 + of_eight % 2;
        float sum = m.gates[column];
#pragma unroll
        for (int depth = 0; depth < depths; depth++) {
            make_right<parts>(m, ring, 16 * depth, column, sum, right[n][depth]);
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t d = warp_column + i * 16 + lane % 4 * 4;
        load_four<KIND_F32>(&m.k[d], k[i]);
        load_four<KIND_F32>(&m.decay[d], e[i]);
    }
    const uint32_t changes =
        shared_address(m.changes[lane % 8 + lane / 16 * 8]) + lane / 8 % 2 * 16;
#pragma unroll 1
    for (int32_t first = 0; first < rows; first += 16) {
        float acc[4][4] = {};
#pragma unroll
        for (int depth = 0; depth < depths; depth++) {
            uint32_t left[4];
            load4_transposed(left, changes + (depth * 16 * (ROWS + 8) + first) * 2);
#pragma unroll
            for (int part = parts - 1; part >= 0; part--) {
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    multiply<KIND_BF16>(acc[n], left, right[n][depth][part][0],
                                        right[n][depth][part][1]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t row = first + of_eight + i % 2 * 8;
            const int32_t column = warp_column + lane % 4 * 4 + i / 2 * 16;
            const int32_t at = (row * CHUNK_DIMS + column) * bytes;
            const float u = m.rows[0][row];
            float s[4];
            load_four<STATE>((const char *)m.state + at, s);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float sum = acc[i / 2 * 2 + c / 2][i % 2 * 2 + c % 2];
                s[c] = fmaf(has_state ? s[c] : 0.0f, e[i / 2][c], fmaf(u, k[i / 2][c], sum));
            }
            if (first + i % 2 * 8 >= rows) {
                continue;
            }
            if (STATE != KIND_F32 && rule.rounds > 0) {
                store_four_by<STATE>(rule, head_row + row, tokens, column, to + at, s);
            } else {
                store_four<STATE>(to + at, s);
            }
        }
    }
}

#endif
