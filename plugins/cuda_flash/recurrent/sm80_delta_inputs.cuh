/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs of the gated delta kernels: q, k and v as 16-bit channels of tokens and of the convolution
 * window before them, and the convolution. */
#ifndef CUDA_FLASH_SM80_DELTA_INPUTS_CUH
#define CUDA_FLASH_SM80_DELTA_INPUTS_CUH

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/delta.h"
#include "sm80_gated_delta.h"

/* The lane's index, recomputed at the place of the call, so that addresses derived from it do not
 * occupy registers between uses. */
GPU_INLINE int32_t lane_again()
{
    int32_t lane = lane_index();
    asm volatile("mov.b32 %0, %0;" : "+r"(lane));
    return lane;
}

/* The offset of 16-byte column `column` of a row in chunk_keys and chunk_head: tiles of CHUNK rows
 * of 128 bytes, as wgmma reads them. tile_at omits the swizzle: */
template <int COLUMNS> GPU_INLINE uint32_t tile_at(int32_t row, int32_t column)
{
    static_assert(COLUMNS == 8 || COLUMNS == 16, "8 or 16 columns");
    return (uint32_t)((column >> 3) * CHUNK + row) * 128;
}

template <int COLUMNS> GPU_INLINE uint32_t place16(int32_t row, int32_t column)
{
    return tile_at<COLUMNS>(row, column) + (uint32_t)((column ^ row) & 7) * 16;
}

/* The flag of a key head's part of a chunk (sm80_delta_flag_bytes). */
GPU_INLINE uint32_t *flag_of(const sm80_delta_params &a, int32_t chunk, int32_t key_head)
{
    return (uint32_t *)(a.memory + chunk * a.chunk_bytes + a.heads_at +
                        a.p.num_v_heads * (int64_t)sizeof(chunk_head)) +
           key_head;
}

template <int KIND> GPU_INLINE float2 two_floats(uint32_t bits)
{
    if constexpr (KIND == KIND_BF16) {
        return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
    } else {
        return __half22float2(*(const __half2 *)&bits);
    }
}

/* Two numbers rounded by the halves of r (attn_recurrent_rounding). */
template <int KIND> GPU_INLINE uint32_t pack2_by(float x, float y, uint32_t r)
{
    constexpr bool f16 = KIND == KIND_F16;
    return round_by(f16, x, r & 0xffffu) | (uint32_t)round_by(f16, y, r >> 16) << 16;
}

/* A bf16 or f16. */
GPU_INLINE float narrow_number(uint16_t bits, int32_t dtype)
{
    return dtype == ATTN_DTYPE_BF16 ? float_of_bf16(bits) : float_of_half_bits(bits);
}

/* Row d of a head's state. */
GPU_INLINE char *state_bytes_at(const gpu_delta_params &p, int32_t slot, int32_t head, int32_t d)
{
    int64_t bytes = p.rule.state_dtype == ATTN_DTYPE_F32 ? 4 : 2;
    return p.state + slot * p.state_slot + head * p.state_head + d * p.head_size_k * bytes;
}

GPU_INLINE float load_state(const gpu_delta_params &p, const char *row, int32_t d)
{
    int32_t dtype = p.rule.state_dtype;
    return dtype == ATTN_DTYPE_F32 ? ((const float *)row)[d]
                                   : narrow_number(((const uint16_t *)row)[d], dtype);
}

/* Stores a number and returns it as it was stored. SEEDED: it may be rounded by a seed. head_row:
 * head Dv + row; tokens: of the request in the state. */
template <bool SEEDED>
GPU_INLINE float store_state(const gpu_delta_params &p, char *row, int32_t head_row, int32_t d,
                             int32_t tokens, float x)
{
    int32_t dtype = p.rule.state_dtype;
    if (dtype == ATTN_DTYPE_F32) {
        return ((float *)row)[d] = x;
    }
    const bool f16 = dtype == ATTN_DTYPE_F16;
    uint16_t bits = f16 ? half_of(x) : bf16_of(x);
    if (SEEDED && p.rule.rounds > 0) {
        bits = round_by(f16, x, random_of(p.rule, head_row, tokens, d));
    }
    ((uint16_t *)row)[d] = bits;
    return narrow_number(bits, dtype);
}

/* A power of two such that |x| <= `largest` is below 2^(bits + 1) of it, and its inverse. */
struct row_scale {
    float scale, inverse;
};

GPU_INLINE row_scale scale_of(float largest, int32_t bits)
{
    int32_t exponent = (int32_t)(float_bits(largest) >> 23) - bits;
    exponent = min(max(exponent, 20), 240);
    return {bits_float((uint32_t)exponent << 23), bits_float((uint32_t)(254 - exponent) << 23)};
}

/* The source of COUNT neighbouring channels of one head, starting with d: rows of tokens, and the
 * window before them. */
template <int COUNT> struct delta_source {
    const char *rows; /* the request's first token */
    int64_t row;      /* bytes */
    const char *window;
    int64_t channel; /* bytes from one channel of the window to the next */
    int32_t oldest;  /* token of the window's first entry, below 0; 0 if the window is not read */
    int32_t entry;   /* index in the window of token 0 */
    int32_t first_channel, num_tokens;
    int32_t real; /* channels that exist; the others read a duplicate */

    __device__ delta_source(const gpu_delta_params &p, const delta_request &request,
                            const gpu_tensor &plain, int32_t head, int64_t first, int32_t dims,
                            int32_t d)
    {
        bool mixed = p.conv_width > 0;
        real = min(max(dims - d, 0), COUNT);
        d = real > 0 ? d : 0;
        row = mixed ? p.mixed.row : plain.row;
        rows = (mixed ? p.mixed.data + first * 2 : plain.data + head * plain.head) + d * 2 +
               (int64_t)request.first_row * row;
        first_channel = (int32_t)first + d;
        oldest = p.conv_width > 1 && request.has_state ? 1 - p.conv_width : 0;
        window = p.window + request.window_from * p.window_slot + first_channel * p.window_channel;
        channel = p.window_channel;
        entry = request.from + p.conv_width - 1;
        num_tokens = request.num_tokens;
    }
};

GPU_INLINE float fast_silu(float y)
{
    return y * fast_reciprocal(1.0f + fast_exp2(y * -1.4426950408889634f));
}

/* The convolution of a layer: any, four taps and SiLU, none. */
enum { TAPS_ANY, TAPS_USUAL, TAPS_NONE };

/* The convolution of COUNT neighbouring channels. */
template <int COUNT> struct delta_taps {
    float weight[CHUNK_TAPS][COUNT], bias[COUNT];
    int32_t first; /* the first tap that exists */
    bool silu, convolves;

    __device__ __forceinline__ void load(const gpu_delta_params &p, const delta_source<COUNT> &s)
    {
        convolves = p.conv_width > 0;
        first = convolves ? CHUNK_TAPS - p.conv_width : CHUNK_TAPS - 1;
        silu = convolves && p.conv_silu;
        bool whole = p.conv_width == CHUNK_TAPS && p.conv_weight.row == CHUNK_TAPS &&
                     p.conv_weight.column == 1 && (uint64_t)p.conv_weight.data % 8 == 0;
        uint32_t bits[CHUNK_TAPS][COUNT], of_bias[COUNT];
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            int64_t channel = s.first_channel + (c < s.real ? c : 0);
            const uint16_t *row =
                (const uint16_t *)p.conv_weight.data + channel * p.conv_weight.row;
            const uint16_t *one = (const uint16_t *)p.conv_bias.data;
            of_bias[c] = one != nullptr && convolves ? one[channel * p.conv_bias.column] : 0;
            if (whole) {
                uint2 four = *(const uint2 *)row;
                bits[0][c] = four.x & 0xffff, bits[1][c] = four.x >> 16;
                bits[2][c] = four.y & 0xffff, bits[3][c] = four.y >> 16;
                continue;
            }
#pragma unroll
            for (int i = 0; i < CHUNK_TAPS; i++) {
                bits[i][c] = convolves && i >= first ? row[(i - first) * p.conv_weight.column]
                                                     : 0x3f80; /* 1.0 in bf16 */
            }
        }
#pragma unroll
        for (int c = 0; c < COUNT; c++) {
            bias[c] = two_floats<KIND_BF16>(of_bias[c]).x;
#pragma unroll
            for (int i = 0; i < CHUNK_TAPS; i++) {
                weight[i][c] = two_floats<KIND_BF16>(bits[i][c]).x;
            }
        }
    }

    /* Whether the layer has four taps and SiLU. */
    __device__ __forceinline__ bool are_usual() const
    {
        return first == 0 && silu;
    }

    /* Convolves one channel; x has the inputs up to the token, the oldest first. */
    template <int TAPS>
    __device__ __forceinline__ float of(const float (&x)[CHUNK_TAPS], int c) const
    {
        float y = bias[c];
        if constexpr (TAPS == TAPS_NONE) {
            return x[CHUNK_TAPS - 1];
        } else if constexpr (TAPS == TAPS_USUAL) {
#pragma unroll
            for (int i = 0; i < CHUNK_TAPS; i++) {
                y = fmaf(weight[i][c], x[i], y);
            }
            return fast_silu(y);
        } else {
#pragma unroll
            for (int i = 0; i < CHUNK_TAPS; i++) {
                if (i >= first) {
                    y = fmaf(weight[i][c], x[i], y);
                }
            }
            return silu ? divide_fast(y, 1.0f + exp_fast(-y)) : y;
        }
    }
};

#endif
