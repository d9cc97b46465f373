/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with a ring of inputs: the rows of the state in shared memory, read by a step and, where
 * the state is due, made into the new state. */
#ifndef CUDA_FLASH_SM90_DELTA_RING_ROWS_CUH
#define CUDA_FLASH_SM90_DELTA_RING_ROWS_CUH

#include "gpu/device/ring.h"
#include "sm90_delta_step.cuh"

struct ring_product {
    float k, q, decay; /* <k_j, e_j k>, <k_j, e_j q>; e_j of a gate per head */
};

template <int STATE, int ROWS> struct ring_memory : step_memory<STATE, ROWS> {
    float gates[CHUNK_DIMS];          /* g of the token; `decay` has e */
    ring_product products[RING_MOST]; /* the newest token first */
    union alignas(16) {
        struct {
            float parts[8][CHUNK_DIMS]; /* e k and e q, each in three tf32 parts and zeros */
            float2 replayed[ROWS];      /* sums over j of the products with k and with q */
        } read;
        uint16_t changes[RING_MOST][ROWS + 8]; /* u_j, where the state is due */
    };
};

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

    __device__ __forceinline__ void add_gates(int32_t age, int32_t d, float (&sum)[4]) const
    {
        const float4 g = *(const float4 *)(gates_of(age) + d);
        sum[0] += g.x, sum[1] += g.y, sum[2] += g.z, sum[3] += g.w;
    }

    /* With a gate per head: e_j of the token whose age is the lane; e in lane `count`. */
    __device__ __forceinline__ float decay_of_lane(float own) const
    {
        const int32_t lane = lane_index();
        float sum = lane == 0 ? own : lane <= count ? *gates_of(lane - 1) : 0.0f;
#pragma unroll
        for (int distance = 1; distance < RING_MOST; distance *= 2) {
            const float before = lane_up(sum, distance);
            sum += lane >= distance ? before : 0.0f;
        }
        return expf(sum);
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

GPU_INLINE void write_parts(float (*parts)[CHUNK_DIMS], float x)
{
    const int32_t thread = (int32_t)thread_index();
    const float high = high_part(x), middle = high_part(x - high);
    parts[0][thread] = high;
    parts[1][thread] = middle;
    parts[2][thread] = x - high - middle;
    parts[3][thread] = 0.0f;
}

/* Multiplies the rows of S_0 with the parts of k and q, 16 rows of a warp at a time, and makes the
 * outputs and u, which takes v's place. States of 16 bits are tf32, float32 is split in two. The
 * order of columns is that of the lanes' loads. */
template <int STATE, int ROWS>
GPU_INLINE void read_rows(ring_memory<STATE, ROWS> &m, const step_token &token, bool has_state)
{
    typedef step_pieces<STATE> pieces;
    constexpr int numbers = pieces::numbers, loads = pieces::of_row / 4;
    const int32_t of_eight = lane_index() / 4, of_four = lane_index() % 4;
#pragma unroll 1
    for (int32_t first = warp_index() * 16; first < ROWS; first += STEP_WARPS * 16) {
        float acc[2][4] = {};
#pragma unroll
        for (int j = 0; j < loads; j++) {
            float x[numbers], y[numbers], part[numbers];
#pragma unroll
            for (int i = 0; i < numbers; i += 4) {
                load_four<KIND_F32>(&m.read.parts[of_eight][(of_four + 4 * j) * numbers + i],
                                    part + i);
            }
            pieces::unpack(m.state[first + of_eight][of_four + 4 * j], x);
            pieces::unpack(m.state[first + of_eight + 8][of_four + 4 * j], y);
#pragma unroll
            for (int i = 0; i < numbers; i += 2) {
                multiply_tf32(acc[0], x[i], y[i], x[i + 1], y[i + 1], part[i], part[i + 1]);
                if constexpr (STATE == KIND_F32) {
                    multiply_tf32(acc[1], x[i] - high_part(x[i]), y[i] - high_part(y[i]),
                                  x[i + 1] - high_part(x[i + 1]), y[i + 1] - high_part(y[i + 1]),
                                  part[i], part[i + 1]);
                }
            }
        }
        float up = acc[0][0] + acc[0][1] + (acc[1][0] + acc[1][1]);
        float down = acc[0][2] + acc[0][3] + (acc[1][2] + acc[1][3]);
        up += lane_xor(up, 1), down += lane_xor(down, 1);
        /* lanes 0 and 1 of four have the products with k, 2 and 3 those with q */
        const float up_q = lane_xor(up, 2), down_q = lane_xor(down, 2);
        if (of_four < 2) {
            const int32_t row = first + of_eight + 8 * of_four;
            const float2 replayed = m.read.replayed[row];
            const float a = has_state ? of_four == 0 ? up : down : 0.0f;
            const float b = has_state ? of_four == 0 ? up_q : down_q : 0.0f;
            const float v = m.v[row];
            const float u = token.beta * (v - token.read_factor * (a + replayed.x));
            m.out[row] = token.q_factor * (b + replayed.y) + u * token.kq + token.skip * v;
            m.v[row] = u;
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

/* Makes the right operands of 16 tokens by 8 columns: e_j k_j in parts of bf16. The lane has one
 * column and tokens 2 (lane % 4) + {0, 1, 8, 9}; missing tokens are 0. */
template <int PARTS, class MEMORY>
GPU_INLINE void make_right(const MEMORY &m, const ring_tokens &ring, int32_t column,
                           uint32_t (&right)[PARTS][2])
{
    float x[4], e[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t age = lane_index() % 4 * 2 + i % 2 + i / 2 * 8;
        const bool is_there = age < ring.count;
        const char *row = ring.of(is_there ? age : 0);
        x[i] = is_there ? float_of_bf16(((const uint16_t *)row)[column]) : 0.0f;
        if (ring.by_channel) {
            e[i] = is_there ? ((const float *)(row + ring.gates))[column] : 0.0f;
        } else {
            e[i] = is_there ? m.products[age].decay : 0.0f;
        }
    }
    if (ring.by_channel) {
        float young, old;
        const float low = m.gates[column] + sum_before(e[0] + e[1], young);
        const float high = m.gates[column] + young + sum_before(e[2] + e[3], old);
        e[1] = expf(low + e[0]), e[0] = expf(low);
        e[3] = expf(high + e[2]), e[2] = expf(high);
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

/* Writes S. A warp has 32 columns, in an order in which a lane has four neighbours of each 16, and
 * takes 16 rows at a time: the ring's u (e_j k_j)^T by mma.sync, with e_j k_j in two or three
 * parts, to which it adds u k^T and S_0 e. These are not the accumulators: tensor cores truncate
 * sums, which would shrink S from one due state to the next. A non-finite u makes its whole row
 * NaN, since low parts of e_j k_j may be 0. The rows are a multiple of 8. */
template <int STATE, int ROWS>
GPU_INLINE void write_rows(const ring_memory<STATE, ROWS> &m, const ring_tokens &ring,
                           float k_factor, bool has_state, int32_t rows, char *to)
{
    constexpr int bytes = STATE == KIND_F32 ? 4 : 2, parts = STATE == KIND_F32 ? 3 : 2;
    const int32_t lane = lane_index(), of_eight = lane / 4, warp_column = warp_index() * 32;
    uint32_t right[4][parts][2];
    float k[2][4], e[2][4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
        make_right<parts>(m, ring,
                          warp_column + n / 2 * 16 + of_eight / 2 * 4 + n % 2 * 2 + of_eight % 2,
                          right[n]);
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
        uint32_t left[4];
        float acc[4][4] = {};
        load4_transposed(left, changes + first * 2);
#pragma unroll
        for (int part = parts - 1; part >= 0; part--) {
#pragma unroll
            for (int n = 0; n < 4; n++) {
                multiply<KIND_BF16>(acc[n], left, right[n][part][0], right[n][part][1]);
            }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t row = first + of_eight + i % 2 * 8;
            const int32_t at = (row * CHUNK_DIMS + warp_column + lane % 4 * 4 + i / 2 * 16) * bytes;
            const float u = m.v[row] * k_factor;
            float s[4];
            load_four<STATE>((const char *)m.state + at, s);
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const float sum = acc[i / 2 * 2 + c / 2][i % 2 * 2 + c % 2];
                s[c] = fmaf(has_state ? s[c] : 0.0f, e[i / 2][c], fmaf(u, k[i / 2][c], sum));
            }
            if (first + i % 2 * 8 < rows) {
                store_four<STATE>(to + at, s);
            }
        }
    }
}

#endif
