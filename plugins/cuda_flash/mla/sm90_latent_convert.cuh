/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion of 8-bit rows to f16 in a tile. Elements are exact; only products with scales of
 * fp8_ds_mla are rounded. */
#ifndef CUDA_FLASH_SM90_LATENT_CONVERT_CUH
#define CUDA_FLASH_SM90_LATENT_CONVERT_CUH

#include "sm90_latent_shared.cuh"

/* Converts two bf16 to f16; values out of range become the largest of f16. */
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

/* A scale as a product of two f16 factors, each stored twice. e4m3 times the first is at most 896.
 */
struct latent_factors {
    uint32_t first, second;
};

static __device__ __forceinline__ latent_factors factors_of(float scale)
{
    scale = fminf(fmaxf(scale, 0x1p-24f), 146.0f); /* 448 x 146 is the largest product in f16 */
    uint32_t bits = __float_as_uint(scale), power = bits & 0x7f800000u;
    __half2 second = __float2half2_rn(__uint_as_float(power));
    __half2 first = __float2half2_rn(__uint_as_float((bits & 0x007fffffu) | 0x3f800000u));
    return {*(uint32_t *)&first, *(uint32_t *)&second};
}

/* Converts two 8-bit elements to f16. */
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

/* Reads chunk `chunk` of column c of a row of any form and alignment, converted as in a tile. */
static __device__ __noinline__ uint4 read_chunk_slowly(const char *row, int form, int c, int chunk)
{
    const bool wide = form == LATENT_FORM_OWN, is_ds = form == LATENT_FORM_DS;
    if (wide || (is_ds && c == LATENT_ROPE)) {
        uint4 x = read_bytes(row + (wide ? c * 128 : DS_MLA_ROPE_AT) + chunk * 16);
        return wide ? x : halves_of_bf16(x);
    }
    latent_factors f = {0, 0};
    if (is_ds) {
        f = factors_of(__uint_as_float(read_bytes(row + DS_MLA_SCALES_AT + (c >> 1) * 4).x));
    }
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint8_t *x = (const uint8_t *)row + c * 64 + chunk * 8 + i * 2;
        uint32_t two = x[0] | (uint32_t)x[1] << 8;
        w[i] = form == LATENT_FORM_E5M2 ? widen<KIND_E5M2>(two)
               : is_ds                  ? widen_number<KIND_E4M3, true>(two, f)
                                        : widen_number<KIND_E4M3, false>(two, f);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* The conversion of a tile of 8-bit rows, in steps of one row for each thread and 128 bytes: two
 * rows of four pairs of columns, starting with the half that is released first, and the rope
 * column. Each step stores one row and reads the row of three steps later, across tiles. */
#define CONVERT_STEPS 10
#define CONVERT_AHEAD 3

struct latent_narrow {
    const char *row[2]; /* rows of the tile being read */
    uint4 x[CONVERT_AHEAD + 1];
    float scale[CONVERT_AHEAD + 1];
};

static_assert(2 * CONVERT_STEPS % (CONVERT_AHEAD + 1) == 0,
              "each pair of tiles begins with the same registers");

/* The register that holds a step of buffer b. */
static __device__ __forceinline__ constexpr int register_of_step(int b, int step)
{
    return (b * CONVERT_STEPS + step) % (CONVERT_AHEAD + 1);
}

/* The columns of a step: pair 0 .. 3, 4: rope. */
static __device__ __forceinline__ int pair_of_step(int b, int step)
{
    return step >= 8 ? 4 : (step >> 1) ^ b * 2;
}

/* b is t & 1, as a constant. */
template <bool DS>
static __device__ __forceinline__ void read_step(const latent_shared &smem, int b, int32_t t,
                                                 int step, latent_narrow &n)
{
    const int part = threadIdx.x & 7, pair = pair_of_step(b, step);
    const int at = pair < 4 ? pair * 128 + part * 16
                   : DS     ? DS_MLA_ROPE_AT + part * 16
                            : LATENT_MAX_RANK + (part >> 1) * 16;
    if (step < 2) {
        n.row[step] = row_of_thread<LATENT_CONVERT_WARPS>(smem, t, step);
    }
    const char *row = n.row[step & 1];
    uint4 x = make_uint4(0, 0, 0, 0);
    float scale = 1.0f;
    if (row != nullptr) {
        x = __ldg((const uint4 *)(row + at));
        if (DS && step < 8) {
            scale = __ldg((const float *)(row + DS_MLA_SCALES_AT) + pair);
        }
    }
    n.x[register_of_step(b, step)] = x;
    n.scale[register_of_step(b, step)] = scale;
}

/* Converts a row of a pair of columns: 8 threads have 16 of 128 elements each. Threads of the
 * second column store their chunks in the other order, since both columns share banks. In the rope
 * column a thread has 8 elements; without DS, two threads have read the same 16. */
template <int FROM, bool DS>
static __device__ __forceinline__ void store_step(latent_shared &smem, int b, int step,
                                                  const latent_narrow &n)
{
    const int part = threadIdx.x & 7, second = part >> 2, chunk = (part & 3) * 2;
    const int row = copied_row<LATENT_CONVERT_WARPS>(0);
    const uint32_t further = (step & 1) * (LATENT_CONVERT_WARPS * 4) * 128;
    const uint4 x = n.x[register_of_step(b, step)];
    if (step >= 8) {
        const bool upper = (part & 1) != 0;
        uint4 y = DS ? halves_of_bf16(x)
                     : widen_numbers<FROM, false>(upper ? x.z : x.x, upper ? x.w : x.y, {});
        store16(shared_address(smem.k[b][LATENT_ROPE]) + further + place_in_column(row, part), y);
        return;
    }
    latent_factors f = {0, 0};
    if (DS) {
        f = factors_of(n.scale[register_of_step(b, step)]);
    }
    const uint32_t to = shared_address(smem.k[b][2 * pair_of_step(b, step) + second]) + further;
    uint4 low = widen_numbers<FROM, DS>(x.x, x.y, f);
    uint4 high = widen_numbers<FROM, DS>(x.z, x.w, f);
    store16(to + place_in_column(row, chunk + second), second ? high : low);
    store16(to + place_in_column(row, chunk + 1 - second), second ? low : high);
}

/* Reads ahead for a run's first tile. */
template <bool DS>
static __device__ __forceinline__ void begin_convert(const latent_shared &smem, latent_narrow &n)
{
#pragma unroll
    for (int step = 0; step < CONVERT_AHEAD; step++) {
        read_step<DS>(smem, 0, 0, step, n);
    }
}

/* Converts tile t into its buffer. `more`: there is a next tile whose rows are known. */
template <int FROM, bool DS>
static __device__ __forceinline__ void convert_tile(latent_shared &smem, int b, int phase,
                                                    int32_t t, bool more, latent_narrow &n)
{
    barrier_wait(shared_address(&smem.empty[b][b]), phase);
#pragma unroll
    for (int step = 0; step < CONVERT_STEPS; step++) {
        if (step + CONVERT_AHEAD < CONVERT_STEPS) {
            read_step<DS>(smem, b, t, step + CONVERT_AHEAD, n);
        } else if (more) {
            read_step<DS>(smem, b ^ 1, t + 1, step + CONVERT_AHEAD - CONVERT_STEPS, n);
        }
        if (step == 4) {
            fence_async_proxy();
            barrier_arrive(shared_address(&smem.full[b][0]));
            barrier_wait(shared_address(&smem.empty[b][b ^ 1]), phase);
        }
        store_step<FROM, DS>(smem, b, step, n);
    }
    fence_async_proxy();
    barrier_arrive(shared_address(&smem.full[b][1]));
}

#endif
