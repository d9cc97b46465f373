/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of 8 bits become f16 in a tile: their numbers are exact, but for fp8_ds_mla's scales. */
#ifndef CUDA_FLASH_SM90_LATENT_CONVERT_CUH
#define CUDA_FLASH_SM90_LATENT_CONVERT_CUH

#include "sm90_latent_rows.cuh"

/* Two bf16 as f16; what f16 does not hold becomes its largest number. */
static __device__ __forceinline__ uint32_t half_of_bf16(uint32_t two)
{
    float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
    low = isfinite(low) ? fminf(fmaxf(low, -65504.0f), 65504.0f) : low;
    high = isfinite(high) ? fminf(fmaxf(high, -65504.0f), 65504.0f) : high;
    return pack2<KIND_F16>(low, high);
}

static __device__ __forceinline__ uint4 halves_of_bf16(uint4 x)
{
    return make_uint4(half_of_bf16(x.x), half_of_bf16(x.y), half_of_bf16(x.z), half_of_bf16(x.w));
}

/* A scale as two factors that f16 holds, twice each: e4m3 times the first is at most 896. */
struct latent_factors {
    uint32_t first, second;
};

static __device__ __forceinline__ latent_factors factors_of(float scale)
{
    scale = fminf(fmaxf(scale, 0x1p-24f), 146.0f); /* 448 x 146: the most that f16 holds */
    uint32_t bits = __float_as_uint(scale), power = bits & 0x7f800000u;
    __half2 second = __float2half2_rn(__uint_as_float(power));
    __half2 first = __float2half2_rn(__uint_as_float((bits & 0x007fffffu) | 0x3f800000u));
    return {*(uint32_t *)&first, *(uint32_t *)&second};
}

/* Two numbers in 8 bits as f16. */
template <int FROM, bool DS>
static __device__ __forceinline__ uint32_t widen_number(uint32_t two, const latent_factors &f)
{
    uint32_t x = widen<FROM>(two);
    return DS ? multiply_halves(multiply_halves(x, f.first), f.second) : x;
}

template <int FROM, bool DS>
static __device__ __forceinline__ uint4 widen_numbers(uint32_t x, uint32_t y,
                                                      const latent_factors &f)
{
    return make_uint4(widen_number<FROM, DS>(x & 0xffff, f), widen_number<FROM, DS>(x >> 16, f),
                      widen_number<FROM, DS>(y & 0xffff, f), widen_number<FROM, DS>(y >> 16, f));
}

/* 16 bytes; wide: at a multiple of 16. */
static __device__ __forceinline__ uint4 read_bytes(const char *from, bool wide)
{
    if (wide) {
        return __ldg((const uint4 *)from);
    }
    uint4 x = make_uint4(0, 0, 0, 0);
#pragma unroll 1
    for (int i = 15; i >= 0; i--) {
        x.w = __funnelshift_l(x.z, x.w, 8);
        x.z = __funnelshift_l(x.y, x.z, 8);
        x.y = __funnelshift_l(x.x, x.y, 8);
        x.x = x.x << 8 | (uint8_t)from[i];
    }
    return x;
}

/* 16 bytes of each of a thread's rows. */
static __device__ __forceinline__ void read_narrow(const latent_rows_of_thread &rows, bool wide,
                                                   int byte, uint4 (&x)[LATENT_COPY_ROWS])
{
#pragma unroll
    for (int i = 0; i < LATENT_COPY_ROWS; i++) {
        x[i] = make_uint4(0, 0, 0, 0);
        if (rows.from[i] != nullptr) {
            x[i] = read_bytes(rows.from[i] + byte, wide);
        }
    }
}

/* The scale of the 128 numbers of a pair of columns, of each of a thread's rows. */
static __device__ __forceinline__ void read_scales(const latent_rows_of_thread &rows, bool wide,
                                                   int pair, float (&scale)[LATENT_COPY_ROWS])
{
#pragma unroll
    for (int i = 0; i < LATENT_COPY_ROWS; i++) {
        scale[i] = 1.0f;
        if (rows.from[i] != nullptr && wide) {
            scale[i] = __ldg((const float *)(rows.from[i] + DS_MLA_SCALES_AT) + pair);
        } else if (rows.from[i] != nullptr) {
            uint4 x = read_bytes(rows.from[i] + DS_MLA_SCALES_AT, false);
            scale[i] = __uint_as_float(pair == 0 ? x.x : pair == 1 ? x.y : pair == 2 ? x.z : x.w);
        }
    }
}

/* Pair of columns: 8 threads have 16 numbers each of a row's 128. Those of the second column store
 * their chunks the other way round, since both columns lie in the same banks. */
template <int FROM, bool DS>
static __device__ __forceinline__ void store_pair(latent_shared &mine, int b, int pair,
                                                  const uint4 (&x)[LATENT_COPY_ROWS],
                                                  const float (&scale)[LATENT_COPY_ROWS])
{
    const int part = threadIdx.x & 7, second = part >> 2, chunk = (part & 3) * 2;
    uint32_t to = shared_address(mine.k[b][2 * pair + second]);
#pragma unroll
    for (int i = 0; i < LATENT_COPY_ROWS; i++) {
        int row = ((threadIdx.x & 127) >> 3) + i * (GPU_TILE / LATENT_COPY_ROWS);
        latent_factors f = {0, 0};
        if (DS) {
            f = factors_of(scale[i]);
        }
        uint4 low = widen_numbers<FROM, DS>(x[i].x, x[i].y, f);
        uint4 high = widen_numbers<FROM, DS>(x[i].z, x[i].w, f);
        store16(to + place_in_column(row, chunk + second), second ? high : low);
        store16(to + place_in_column(row, chunk + 1 - second), second ? low : high);
    }
    fence_for_boxes();
    barrier_arrive(shared_address(&mine.full[b][2 * pair]));
    barrier_arrive(shared_address(&mine.full[b][2 * pair + 1]));
}

/* The rope column: 8 of a row's 64 numbers a thread. fp8_ds_mla has them as bf16. */
template <int FROM, bool DS>
static __device__ __forceinline__ void store_rope(latent_shared &mine, int b,
                                                  const uint4 (&x)[LATENT_COPY_ROWS])
{
    const int chunk = threadIdx.x & 7;
    bool upper = (chunk & 1) != 0; /* without DS two threads have read the same 16 numbers */
#pragma unroll
    for (int i = 0; i < LATENT_COPY_ROWS; i++) {
        int row = ((threadIdx.x & 127) >> 3) + i * (GPU_TILE / LATENT_COPY_ROWS);
        uint4 y;
        if (DS) {
            y = halves_of_bf16(x[i]);
        } else {
            y = widen_numbers<FROM, false>(upper ? x[i].z : x[i].x, upper ? x[i].w : x[i].y, {});
        }
        store16(shared_address(mine.k[b][LATENT_ROPE]) + place_in_column(row, chunk), y);
    }
    fence_for_boxes();
    barrier_arrive(shared_address(&mine.full[b][LATENT_ROPE]));
}

/* A tile of 8-bit rows: of each pair of columns a row's 128 bytes, then the rope part. What comes
 * two steps later is read while one is stored. */
template <int FROM, bool DS>
static __device__ __forceinline__ void convert_tile(latent_shared &mine, int b, int phase,
                                                    bool wide, int32_t t)
{
    const int part = threadIdx.x & 7;
    const int rope = DS ? DS_MLA_ROPE_AT + part * 16 : LATENT_MAX_RANK + (part >> 1) * 16;
    uint4 x[3][LATENT_COPY_ROWS];
    float scale[3][LATENT_COPY_ROWS];
    auto read = [&](int step) {
        latent_rows_of_thread rows = rows_of_thread(mine, t);
        read_narrow(rows, wide, step < 4 ? step * 128 + part * 16 : rope, x[step % 3]);
        if (DS && step < 4) {
            read_scales(rows, wide, step, scale[step % 3]);
        }
    };
    read(0);
    read(1);
    barrier_wait(shared_address(&mine.empty[b][0]), phase);
#pragma unroll
    for (int pair = 0; pair < 4; pair++) {
        if (pair + 2 < 5) {
            read(pair + 2);
        }
        if (pair == 2) {
            barrier_wait(shared_address(&mine.empty[b][1]), phase);
        }
        store_pair<FROM, DS>(mine, b, pair, x[pair % 3], scale[pair % 3]);
    }
    store_rope<FROM, DS>(mine, b, x[4 % 3]);
}

#endif
