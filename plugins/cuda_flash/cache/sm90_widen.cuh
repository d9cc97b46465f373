/* SPDX-License-Identifier: Apache-2.0 */
/* Copies keys and values of 8 and 4 bits to contiguous rows of 16 bits for prefill. Keys stay
 * unscaled, which is exact, and their scales are stored next to them; values are scaled. A warp has
 * 32 keys of a head at a time, a lane 16 elements of a row. The limit is memory bandwidth. */
#ifndef CUDA_FLASH_SM90_WIDEN_CUH
#define CUDA_FLASH_SM90_WIDEN_CUH

#include "cuda_flash/prefill/sm90_prefill.h"
#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/rows.h"
#include "gpu/device/search.h"
#include "gpu/device/visible.h"

#define WIDEN_THREADS 256
#define WIDEN_ROWS 4 /* rows of a lane in flight together */

/* The storage of a row's 16 elements. */
enum widen_form {
    WIDEN_E4M3,
    WIDEN_E5M2,
    WIDEN_INT8,
    WIDEN_CHANNEL, /* int8 with a scale for each dim */
    WIDEN_INT4,
    WIDEN_NVFP4,
    WIDEN_NUMBERS, /* 16 bits already; only gathered */
    WIDEN_NOTHING  /* 8 bits that stay 8 bits */
};

/* 16 stored elements, and the e4m3 scale of an nvfp4 block. */
struct widen_codes {
    uint4 x, y;
    uint32_t scale;
};

template <int FORM>
GPU_INLINE widen_codes load_codes(const gpu_cache &c, const char *row, uint8_t *blocks, int32_t d)
{
    widen_codes v = {};
    if constexpr (FORM == WIDEN_NUMBERS) {
        v.x = __ldg((const uint4 *)(row + 2 * d));
        v.y = __ldg((const uint4 *)(row + 2 * d) + 1);
    } else if constexpr (FORM == WIDEN_INT4 || FORM == WIDEN_NVFP4) {
        const uint32_t *at = (const uint32_t *)(row + d / 2);
        v.x.x = __ldg(at);
        v.x.y = __ldg(at + 1);
        v.scale = FORM == WIDEN_NVFP4 ? *block_scale_at(c, blocks, d / NVFP4_BLOCK) : 0;
    } else {
        v.x = __ldg((const uint4 *)(row + d));
    }
    return v;
}

/* Converts 16 elements to float32. INT4: without the zero point, still Hadamard-transformed. */
template <int FORM> GPU_INLINE void enter_codes(const widen_codes &v, float (&x)[16])
{
    const uint32_t words[4] = {v.x.x, v.x.y, v.x.z, v.x.w};
    float block = 1.0f;
    if (FORM == WIDEN_NVFP4) {
        block = float_of_fp8(false, (uint8_t)v.scale);
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        uint32_t byte = words[i / 4] >> i % 4 * 8 & 255, code = words[i / 8] >> i % 8 * 4 & 15;
        if (FORM == WIDEN_E4M3 || FORM == WIDEN_E5M2) {
            constexpr int kind = FORM == WIDEN_E5M2 ? KIND_E5M2 : KIND_E4M3;
            uint32_t two = widen<kind>(words[i / 4] >> (i & 2) * 8 & 0xffff);
            x[i] = float_of_half_bits((uint16_t)(i & 1 ? two >> 16 : two));
        } else if (FORM == WIDEN_INT4) {
            x[i] = (float)code;
        } else if (FORM == WIDEN_NVFP4) {
            x[i] = e2m1_number(code) * block;
        } else {
            x[i] = (float)(int8_t)byte;
        }
    }
}

/* Undoes the Hadamard transform of a row, which `lanes` neighbouring lanes hold. */
GPU_INLINE void unturn_codes(const gpu_cache &c, int32_t d, int32_t lanes, float (&x)[16])
{
#pragma unroll
    for (int span = 1; span < 16; span <<= 1) {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            if ((i & span) == 0) {
                float a = x[i], b = x[i + span];
                x[i] = a + b;
                x[i + span] = a - b;
            }
        }
    }
    for (int32_t span = 1; span < lanes; span <<= 1) {
        const bool second = (d / 16 & span) != 0;
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float other = __shfl_xor_sync(0xffffffffu, x[i], span);
            x[i] = second ? other - x[i] : x[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < 16; i++) {
        x[i] *= turn_factor(c, d + i);
    }
}

/* What a lane knows about one of the warp's 32 keys. */
struct widen_key {
    unsigned long long row, blocks; /* addresses; row 0: nothing to read, the copy becomes zero */
    uint32_t scale;                 /* from enter_row */
    bool wanted;                    /* its row is written */
};

/* Looks up key number `at` of all requests' copies. */
template <bool NIBBLES>
GPU_INLINE widen_key enter_key(const prefill_params &a, const gpu_cache &c, int32_t at,
                               int32_t head)
{
    const gpu_problem &p = a.p.problem;
    widen_key v = {};
    int32_t r = find_last(a.key_sum, p.num_reqs, at), j = at - a.key_sum[r], k0, k1;
    gpu_request request = load_request(p, r);
    key_range(p, request, 0, 1, &k0, &k1);
    v.wanted = j >= (k0 & ~(PREFILL_COPY_ROWS - 1));
    v.scale = float_bits(0.0f);
    if (j >= k0 && j < request.length) { /* the block table has no other blocks */
        int64_t table = p.block_table_row != nullptr ? p.block_table_row[r] : r;
        int32_t index = j / p.block_size;
        int64_t block = p.block_table[table * p.block_table_stride + index];
        gpu_cache_row row = enter_row<NIBBLES>(c, block, j - index * p.block_size, head);
        v.row = (unsigned long long)row.data;
        v.blocks = (unsigned long long)row.blocks;
        v.scale = row.scale_bits;
    }
    return v;
}

/* Copies keys 32 x group .. + 31 of KV head `head`. PLANE: 0 keys, 1 values. */
template <int KIND, int FORM, int PLANE>
GPU_INLINE void widen_keys(const prefill_params &a, int32_t group, int32_t head)
{
    constexpr bool nibbles = FORM == WIDEN_INT4 || FORM == WIDEN_NVFP4;
    const gpu_cache &c = a.narrow[PLANE];
    const int32_t size = PLANE == 0 ? a.size : a.size_v, lanes = size / 16, rows = 32 / lanes;
    const int32_t lane = threadIdx.x & 31, d = lane % lanes * 16, first = group * 32;
    const int64_t head_row = (head - a.first_head) * a.copied_rows;
    widen_key key = enter_key<nibbles>(a, c, first + lane, head);
    if (PLANE == 0 && a.scales == PREFILL_BY_KEY && key.wanted) {
        float scale =
            __uint_as_float(FORM == WIDEN_INT4 ? key.scale & ~ZERO_POINT_MASK : key.scale);
        a.key_scale[head_row + first + lane] = scale * query_scale(a.p, head);
    }
#pragma unroll 1
    for (int32_t step = 0; step < lanes; step += WIDEN_ROWS) {
        widen_codes codes[WIDEN_ROWS];
        uint32_t scales[WIDEN_ROWS];
        int32_t row[WIDEN_ROWS];
#pragma unroll
        for (int i = 0; i < WIDEN_ROWS; i++) {
            int32_t from = (step + i) * rows + lane / lanes;
            const char *data = (const char *)__shfl_sync(0xffffffffu, key.row, from);
            uint8_t *blocks = (uint8_t *)__shfl_sync(0xffffffffu, key.blocks, from);
            bool wanted = __shfl_sync(0xffffffffu, (int)key.wanted, from) != 0;
            scales[i] = __shfl_sync(0xffffffffu, key.scale, from);
            row[i] = wanted ? first + from : -1;
            codes[i] = {};
            if (data != nullptr && d < c.head_size) {
                codes[i] = load_codes<FORM>(c, data, blocks, d);
            } else {
                scales[i] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < WIDEN_ROWS; i++) {
            uint32_t w[8] = {codes[i].x.x, codes[i].x.y, codes[i].x.z, codes[i].x.w,
                             codes[i].y.x, codes[i].y.y, codes[i].y.z, codes[i].y.w};
            if constexpr (FORM < WIDEN_NUMBERS) {
                float x[16], by = 1.0f;
                enter_codes<FORM>(codes[i], x);
                if (FORM == WIDEN_INT4) {
                    const float zero = (float)(scales[i] & ZERO_POINT_MASK);
#pragma unroll
                    for (int k = 0; k < 16; k++) {
                        x[k] -= zero;
                    }
                    unturn_codes(c, d, lanes, x);
                    scales[i] &= ~ZERO_POINT_MASK;
                }
                if (PLANE == 1 && FORM != WIDEN_CHANNEL) {
                    by = __uint_as_float(scales[i]);
                }
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    float low = x[2 * k] * by, high = x[2 * k + 1] * by;
                    if (FORM == WIDEN_CHANNEL && d < c.head_size) {
                        const float *channel = c.channel + (int64_t)head * c.head_size + d;
                        low *= channel[2 * k], high *= channel[2 * k + 1];
                    }
                    w[k] = pack2<KIND>(low, high);
                }
            }
            if (row[i] >= 0 && FORM == WIDEN_NOTHING) {
                *(uint4 *)(a.copied[PLANE] + (head_row + row[i]) * size + d) = codes[i].x;
            } else if (row[i] >= 0) {
                uint4 *to = (uint4 *)(a.copied[PLANE] + (head_row + row[i]) * size * 2 + d * 2);
                to[0] = make_uint4(w[0], w[1], w[2], w[3]);
                to[1] = make_uint4(w[4], w[5], w[6], w[7]);
            }
        }
    }
}

template <int KIND, int FORM, int PLANE> GPU_INLINE void widen_plane(const prefill_params &a)
{
    const int32_t heads = a.end_head - a.first_head;
    const int64_t rows = min((int64_t)a.key_sum[a.p.problem.num_reqs], a.copied_rows);
    const int64_t units = rows / 32 * heads, warps = (int64_t)gridDim.x * (WIDEN_THREADS / 32);
#pragma unroll 1
    for (int64_t i = blockIdx.x * (WIDEN_THREADS / 32) + (threadIdx.x >> 5); i < units;
         i += warps) {
        widen_keys<KIND, FORM, PLANE>(a, (int32_t)(i / heads), a.first_head + (int32_t)(i % heads));
    }
}

template <int KIND, int FORM, int PLANE>
__global__ void __launch_bounds__(WIDEN_THREADS)
    widen_rows(const __grid_constant__ prefill_params a)
{
    widen_plane<KIND, FORM, PLANE>(a);
}

#endif
