/* SPDX-License-Identifier: Apache-2.0 */
/* Conversion of 8-bit rows to f16 in a tile. Elements are exact; products with scales of fp8_ds_mla
 * are rounded, those with fp8_ds_v4's only below 2^-14. */
#ifndef CUDA_FLASH_SM90_LATENT_CONVERT_CUH
#define CUDA_FLASH_SM90_LATENT_CONVERT_CUH

#include "sm90_latent_shared.cuh"

GPU_INLINE void arrive_warp(uint64_t &barrier)
{
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
        barrier_arrive(shared_address(&barrier));
    }
}

/* Converts two bf16 to f16; values out of range become the largest of f16. */
GPU_INLINE uint32_t clamped_halves(uint32_t two)
{
    float low = __uint_as_float(two << 16), high = __uint_as_float(two & 0xffff0000u);
    low = isfinite(low) ? fminf(fmaxf(low, -65504.0f), 65504.0f) : low;
    high = isfinite(high) ? fminf(fmaxf(high, -65504.0f), 65504.0f) : high;
    return pack2<KIND_F16>(low, high);
}

/* Rarely called: inlined, each pair of a chunk would have a branch. */
static __device__ __noinline__ uint4 clamped_chunk(uint4 x)
{
    return make_uint4(clamped_halves(x.x), clamped_halves(x.y), clamped_halves(x.z),
                      clamped_halves(x.w));
}

/* Whether numbers out of range are clamped by a call; otherwise each pair has a branch, which the
 * kernel of both caches, whose time with the call is not known, keeps. */
#ifndef LATENT_CALLS_CLAMP
#define LATENT_CALLS_CLAMP true
#endif

GPU_INLINE uint4 halves_of_bf16(uint4 x)
{
    uint32_t w[4] = {x.x, x.y, x.z, x.w}, far = 0; /* sign bits: numbers from 65536 on */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        far |= ((w[i] & 0x7fff7fffu) + 0x38803880u) & 0x80008000u;
    }
    if (LATENT_CALLS_CLAMP && far != 0) {
        return clamped_chunk(x);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (LATENT_CALLS_CLAMP || far == 0) {
            w[i] =
                pack2<KIND_F16>(__uint_as_float(w[i] << 16), __uint_as_float(w[i] & 0xffff0000u));
        } else {
            w[i] = clamped_halves(w[i]);
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* A scale as a product of two f16 factors: a power of two in the low half, and a number from 1 to 2
 * in the high half. e4m3 times the second is at most 896. */
GPU_INLINE uint32_t factors_of(float scale)
{
    scale = fminf(fmaxf(scale, 0x1p-24f), 146.0f); /* 448 x 146 is the largest product in f16 */
    const uint32_t bits = __float_as_uint(scale);
    return pack2<KIND_F16>(__uint_as_float(bits & 0x7f800000u),
                           __uint_as_float((bits & 0x007fffffu) | 0x3f800000u));
}

/* The scales of two columns of fp8_ds_v4 in f16, from two e8m0. */
GPU_INLINE uint32_t scales_of(uint32_t two)
{
    float scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t e = two >> 8 * i & 0xff;
        scale[i] = fminf(fmaxf(__uint_as_float(e << 23), 0x1p-24f), 0x1p7f); /* 448 x 2^7 is f16 */
        scale[i] = e == 0xff ? NAN : scale[i];
    }
    return pack2<KIND_F16>(scale[0], scale[1]);
}

/* Converts two 8-bit elements to f16. `factors`: those of a DS scale; or the V4 scale, twice. */
template <int FORM> GPU_INLINE uint32_t widen_number(uint32_t two, uint32_t factors)
{
    const uint32_t x = halves_of_fp8(FORM == LATENT_FORM_E5M2, (uint16_t)two);
    const __half2 both = *(const __half2 *)&factors;
    __half2 y = *(const __half2 *)&x;
    if (FORM == LATENT_FORM_DS) {
        y = __hmul2(__hmul2(y, __high2half2(both)), __low2half2(both));
    } else if (FORM == LATENT_FORM_V4) {
        y = __hmul2(y, both);
    }
    return *(const uint32_t *)&y;
}

template <int FORM> GPU_INLINE uint4 widen_numbers(uint32_t x, uint32_t y, uint32_t factors)
{
    return make_uint4(widen_number<FORM>(x & 0xffff, factors), widen_number<FORM>(x >> 16, factors),
                      widen_number<FORM>(y & 0xffff, factors),
                      widen_number<FORM>(y >> 16, factors));
}

/* Reads chunk `chunk` of column c of a row of any form and alignment, converted as in a tile. */
static __device__ __noinline__ uint4 read_chunk_slowly(const char *row, int form, int c, int chunk)
{
    const bool wide = form == LATENT_FORM_OWN, is_ds = form == LATENT_FORM_DS;
    if (wide || (is_ds && c == LATENT_ROPE)) {
        uint4 x = read_bytes(row + (wide ? c * 128 : DS_MLA_ROPE_AT) + chunk * 16);
        return wide ? x : halves_of_bf16(x);
    }
    uint32_t f = 0;
    if (is_ds) {
        f = factors_of(__uint_as_float(read_bytes(row + DS_MLA_SCALES_AT + (c >> 1) * 4).x));
    }
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint8_t *x = (const uint8_t *)row + c * 64 + chunk * 8 + i * 2;
        uint32_t two = x[0] | (uint32_t)x[1] << 8;
        w[i] = form == LATENT_FORM_E5M2 ? widen_number<LATENT_FORM_E5M2>(two, f)
               : is_ds                  ? widen_number<LATENT_FORM_DS>(two, f)
                                        : widen_number<LATENT_FORM_E4M3>(two, f);
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

/* The conversion of a tile of 8-bit rows. Four threads have a row; a step has 16 elements of each
 * thread, of one column; a column in bf16 takes two steps of 8: DS's rope column, which is last,
 * and V4's last column, after which an empty step follows. Each step stores one and reads the
 * elements of AHEAD steps later, across tiles, as far as registers allow. A tile starts with the
 * half that is released first. */
template <int FORM> struct latent_narrow {
    static constexpr bool IS_DS = FORM == LATENT_FORM_DS, IS_V4 = FORM == LATENT_FORM_V4,
                          HAS_SCALES = IS_DS || IS_V4;
    static constexpr int STEPS = HAS_SCALES ? 10 : 9, AHEAD = HAS_SCALES ? 5 : 3;
    static_assert(STEPS % AHEAD == 0, "each tile begins with the same registers");
    const char *from; /* this thread's first element of the row being read */
    uint4 x[AHEAD];
    /* The next tile's: thread i of a row has the float of dims 128 i and up, or both e8m0. */
    uint32_t scale;

    /* The first step of the half of buffer b that is released second. */
    static __device__ constexpr int second(int b)
    {
        return IS_V4 && b == 1 ? 5 : 4;
    }

    /* The column of a step; LATENT_COLUMNS: none. */
    static __device__ constexpr int column(int b, int step)
    {
        const int at = step < second(b) ? step : step - second(b);
        return !IS_V4                           ? (step < 8 ? step ^ b * 4 : LATENT_ROPE)
               : step == 9                      ? LATENT_COLUMNS
               : (b != 0) == (step < second(b)) ? (at < 3 ? 4 + at : 7)
                                                : at;
    }

    /* Whether a step has a half of a column in bf16, and which. */
    static __device__ constexpr bool is_wide(int b, int step)
    {
        return column(b, step) == (IS_DS ? LATENT_ROPE : IS_V4 ? V4_WIDE : LATENT_COLUMNS);
    }

    static __device__ constexpr int half(int b, int step)
    {
        return step > 0 && column(b, step - 1) == column(b, step);
    }
};

static __device__ const uint4 zero_row[DS_MLA_ROW / 16] = {}; /* the row of a hidden key */

/* The thread's index among those that convert, read again, since registers are few. */
GPU_INLINE uint32_t converting_thread()
{
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread & (LATENT_CONVERT_WARPS * 32 - 1);
}

/* Reads 16 bytes here: read earlier, they would need further registers. */
GPU_INLINE uint4 read_here(const char *from)
{
    uint4 x;
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

/* b is t & 1, as a constant. */
template <int FORM>
GPU_INLINE void read_step(const latent_shared &smem, int b, int32_t t, int step, uint32_t thread,
                          latent_narrow<FORM> &n)
{
    const uint32_t part = thread & 3;
    const int c = n.column(b, step);
    uint4 &x = n.x[step % n.AHEAD];
    if (step == 0) {
        const char *row = smem.from[t & 7][thread >> 2];
        const uint16_t *scales = n.IS_V4 ? scales_of_tile(smem, t)[thread >> 2] : nullptr;
        scales = scales != nullptr ? scales : (const uint16_t *)zero_row;
        row = row != nullptr ? row : (const char *)zero_row;
        n.from = row + part * 16;
        if (n.IS_DS) {
            n.scale = __ldg((const uint32_t *)(row + DS_MLA_SCALES_AT + part * 4));
        } else if (n.IS_V4) {
            n.scale = __ldg(scales + part);
        }
    }
    if (n.is_wide(b, step)) {
        x = read_here(n.from + (n.IS_DS ? DS_MLA_ROPE_AT : c * 64) + part * 16 +
                      n.half(b, step) * 16);
    } else if (c < LATENT_COLUMNS) {
        x = read_here(n.from + c * 64);
    }
}

/* Reads ahead for a run's first tile. */
template <int FORM> GPU_INLINE void begin_convert(const latent_shared &smem, latent_narrow<FORM> &n)
{
    const uint32_t thread = converting_thread();
#pragma unroll
    for (int step = 0; step < n.AHEAD; step++) {
        read_step<FORM>(smem, 0, 0, step, thread, n);
    }
}

/* Converts tile t into its buffer; the caller arrives at its last barrier, and consumers fence.
 * Rows of the next tile are known; after the last tile they are hidden. A step of 8 bits stores two
 * chunks, at `place` and place ^ 16 of a column. Eight threads, which store at once, have even
 * chunks of one row and odd chunks of the next, so they use all banks. */
template <int FORM>
GPU_INLINE void convert_tile(latent_shared &smem, int b, int phase, int32_t t,
                             latent_narrow<FORM> &n)
{
    const uint32_t thread = converting_thread();
    const uint32_t place = place_in_column(thread >> 2, (thread & 3) * 2);
    const uint32_t factors = n.IS_DS   ? factors_of(__uint_as_float(n.scale))
                             : n.IS_V4 ? scales_of(n.scale)
                                       : 0;
    uint32_t of_pair = 0;
    constexpr int STEPS = latent_narrow<FORM>::STEPS, AHEAD = latent_narrow<FORM>::AHEAD;
    barrier_wait(shared_address(&smem.empty[b][b]), phase);
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int c = n.column(b, step);
        const uint32_t to = shared_address(smem.k[b][c < LATENT_COLUMNS ? c : 0]);
        const uint4 x = n.x[step % AHEAD];
        if (step == n.second(b)) {
            arrive_warp(smem.full[b][0]);
            barrier_wait(shared_address(&smem.empty[b][b ^ 1]), phase);
        }
        if (n.HAS_SCALES && c < 8 && c % 2 == 0) {
            of_pair = __shfl_sync(0xffffffffu, factors, c >> 1, 4);
        }
        if (n.is_wide(b, step)) {
            store16(to + (place ^ n.half(b, step) * 16), halves_of_bf16(x));
        } else if (c < LATENT_COLUMNS) {
            const uint32_t by =
                n.IS_V4 ? __byte_perm(of_pair, 0, c % 2 == 0 ? 0x1010 : 0x3232) : of_pair;
            store16(to + place, widen_numbers<FORM>(x.x, x.y, by));
            store16(to + (place ^ 16), widen_numbers<FORM>(x.z, x.w, by));
        }
        if (step + AHEAD < STEPS) {
            read_step<FORM>(smem, b, t, step + AHEAD, thread, n);
        } else {
            read_step<FORM>(smem, b ^ 1, t + 1, step + AHEAD - STEPS, thread, n);
        }
    }
}

#endif
