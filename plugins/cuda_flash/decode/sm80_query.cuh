/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that a warp holds whole: Hadamard's matrix, and queries as kinds of codes take them. */
#ifndef CUDA_FLASH_SM80_QUERY_CUH
#define CUDA_FLASH_SM80_QUERY_CUH

#include "sm80_producer.cuh"

#define QUERY_LARGEST 12 /* a row's largest element: 2^12 to 2^13 */

/* Dims of a lane that has lane * own .. lane * own + own - 1. D 64: half of the lanes have some. */
template <int D> constexpr int own_dims = D > 128 ? D / 32 : 4;

/* Sylvester's matrix, not normalised, times a row. Renaming the bits of all indices alike changes
 * nothing, so dims may stand in any such order. */
template <int D> static __device__ __forceinline__ void turn_row(float (&x)[own_dims<D>], int lane)
{
    constexpr int own = own_dims<D>;
#pragma unroll
    for (int span = 1; span < own; span <<= 1) {
#pragma unroll
        for (int e = 0; e < own; e++) {
            if ((e & span) == 0) {
                float a = x[e], b = x[e + span];
                x[e] = a + b;
                x[e + span] = a - b;
            }
        }
    }
#pragma unroll
    for (int span = 1; span < D / own; span <<= 1) {
#pragma unroll
        for (int e = 0; e < own; e++) {
            float other = __shfl_xor_sync(0xffffffffu, x[e], span);
            x[e] = (lane & span) != 0 ? other - x[e] : x[e] + other;
        }
    }
}

/* Place of dim d of 8 among the query's 16 bytes that meet a word of 8 codes: words are widened to
 * pairs (0, 4), (1, 5), (2, 6), (3, 7), those of levels to neighbours. */
template <int KIND> static __device__ __forceinline__ int place_in_chunk(int d)
{
    return KIND == KIND_INT4 || KIND == KIND_NVFP4 ? (d & 3) * 2 + (d >> 2) : d;
}

static __device__ __forceinline__ float clamp_half(float x)
{
    return x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f);
}

/* A row's power of two that brings its largest element to 2^12 .. 2^13; 1 where there is none. */
static __device__ __forceinline__ float query_factor(float largest)
{
    int exponent = (int)(float_bits(largest) >> 23);
    bool usual = exponent > 20 && exponent < 235;
    return usual ? bits_float((uint32_t)(127 + 127 + QUERY_LARGEST - exponent) << 23) : 1.0f;
}

/* Queries of a run in place: turned where keys are, as f16 in the order of the codes, odd codes of
 * int4 against 1/16; what rounding turned rows leaves goes to `rest` (NULL: nowhere). terms[row]: a
 * score's factor of its raw product, terms[ROWS + row]: what a zero point of 1 takes off the score.
 * Codes are multiplied as f16 without an exponent: 2^-24. */
template <int KIND, int D, int ROWS>
static __device__ __noinline__ void prepare_query(const gpu_params &p, const gpu_run &run, char *sq,
                                                  char *rest, float *terms)
{
    constexpr int own = own_dims<D>;
    const int lane = threadIdx.x & 31;
    const bool has_dims = lane * own < D;
#pragma unroll 1
    for (int row = threadIdx.x >> 5; row < ROWS; row += 4) {
        if (row >= run.row_tile.num_rows) { /* zero in sq */
            if (lane == 0) {
                terms[row] = terms[ROWS + row] = 0.0f;
            }
            for (int i = lane; i < D / 8 && rest != nullptr; i += 32) {
                *(uint4 *)(rest + (row * (D / 8) + i) * 16) = make_uint4(0, 0, 0, 0);
            }
            continue;
        }
        char *chunk =
            sq + (row * (D / 8) + swizzle<D / 8>(row, has_dims ? lane * own / 8 : 0)) * 16;
        int first = lane * own % 8; /* of the chunk's 8 dims */
        float x[own], largest = 0.0f, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < own; e++) {
            x[e] = has_dims ? number_load(chunk, p.q.dtype, first + e) : 0.0f;
            if (KIND == KIND_INT4 && has_dims) {
                x[e] *= p.k.signs[lane * own + e];
            }
        }
        if constexpr (shape<KIND, D, true>::turned) {
            turn_row<D>(x, lane);
        }
#pragma unroll
        for (int e = 0; e < own; e++) {
            largest = fmaxf(largest, fabsf(x[e]));
        }
        float factor = KIND >= KIND_INT4 ? query_factor(warp_largest(largest, false)) : 1.0f;
        __syncwarp(); /* all of the row is read */
#pragma unroll
        for (int e = 0; e < own && has_dims; e++) {
            int d = first + e, place = place_in_chunk<KIND>(d);
            float scaled = KIND >= KIND_INT4 ? x[e] * factor : clamp_half(x[e]);
            __half rounded = __float2half_rn(scaled), less = __float2half_rn(0.0f);
            sum += __half2float(rounded);
            if (rest != nullptr) {
                less = __float2half_rn(scaled - __half2float(rounded));
                sum += __half2float(less);
            }
            if (KIND == KIND_INT4 && (d & 1) != 0) {
                rounded = __hmul(rounded, __ushort_as_half(0x2c00)); /* 2^-4 */
                less = __hmul(less, __ushort_as_half(0x2c00));
            }
            ((__half *)chunk)[place] = rounded;
            if (rest != nullptr) {
                ((__half *)(rest + (chunk - sq)))[place] = less;
            }
        }
        sum = warp_sum(sum);
        if (lane == 0) {
            float back = KIND == KIND_INT4     ? 1.0f / (factor * (float)D)
                         : KIND == KIND_LEVELS ? 1.0f / (factor * sqrtf((float)D))
                                               : 1.0f / factor;
            terms[row] = back * (KIND == KIND_NVFP4    ? 0x1p14f
                                 : KIND >= KIND_LEVELS ? 1.0f
                                                       : 0x1p24f);
            terms[ROWS + row] = (KIND == KIND_INT8 ? 128.0f : 1.0f) * sum * back;
        }
    }
    barrier_consumers(); /* all rows are there */
}

/* Where sums of rows and keys stand. Rows of 16: a product of queries and keys, element e of tile n
 * of 8 keys. SM80_FEW: of keys and queries, tile n of 16 keys. SM80_FOUR: likewise, but pairs of
 * lanes share two rows, and each has 16 keys of 32. A lane has two rows. */
template <int FEW> struct sums_at {
    static __device__ __forceinline__ int row(int lane, int i)
    {
        return FEW == SM80_FOUR ? (lane & 1) * 2 + i
               : FEW            ? (lane & 3) * 2 + i
                                : (lane >> 2) + 8 * i;
    }
    static __device__ __forceinline__ int first_key(int lane)
    {
        return FEW == SM80_FOUR ? (lane >> 2) + (lane & 2) * 8 : FEW ? lane >> 2 : (lane & 3) * 2;
    }
    /* From the lane's first on. */
    static __device__ __forceinline__ constexpr int key(int n, int e)
    {
        return FEW ? n * 16 + (e >> 1) * 8 : n * 8 + (e & 1);
    }
    static __device__ __forceinline__ constexpr int which(int e) /* of the lane's rows */
    {
        return FEW ? e & 1 : e >> 1;
    }
    /* Sums of values: the tile of 8 columns, and the lane's column in it. */
    static __device__ __forceinline__ constexpr int tile(int n, int e)
    {
        return FEW ? 2 * n + (e >> 1) : n;
    }
    static __device__ __forceinline__ int column(int lane, int e)
    {
        return FEW ? lane >> 2 : (lane & 3) * 2 + (e & 1);
    }
    /* Lanes that share a row. */
    static __device__ __forceinline__ float largest(float x)
    {
#pragma unroll
        for (int span = FEW == SM80_FOUR ? 2 : FEW ? 4 : 1; span < (FEW ? 32 : 4); span <<= 1) {
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, span));
        }
        return x;
    }
    static __device__ __forceinline__ float sum(float x)
    {
#pragma unroll
        for (int span = FEW == SM80_FOUR ? 2 : FEW ? 4 : 1; span < (FEW ? 32 : 4); span <<= 1) {
            x += __shfl_xor_sync(0xffffffffu, x, span);
        }
        return x;
    }
};

/* What the two rows of a lane have. */
struct row_terms {
    float unit[2], zero[2];
};

/* Weights of 16 keys as f16, from sums s0 and s1 of 8 keys or, FEW, s0 of 16. */
template <int FEW> struct packed_weights {
    uint32_t x[FEW ? 2 : 4];
    __device__ __forceinline__ packed_weights(const float (&s0)[4], const float (&s1)[4])
    {
        x[0] = pack2<KIND_F16>(s0[0], s0[1]);
        x[1] = pack2<KIND_F16>(s0[2], s0[3]);
        if constexpr (!FEW) {
            x[2] = pack2<KIND_F16>(s1[0], s1[1]);
            x[3] = pack2<KIND_F16>(s1[2], s1[3]);
        }
    }
    /* SM80_FOUR: their keys are the depth already. */
    __device__ __forceinline__ packed_weights(const uint32_t (&turned)[2])
    {
        x[0] = turned[0];
        x[1] = turned[1];
    }
    /* Keys become the depth of a product. `order`: of two neighbours, by __byte_perm. */
    __device__ __forceinline__ void arrange(uint32_t order)
    {
#pragma unroll
        for (int i = 0; i < (FEW ? 2 : 4); i++) {
            x[i] = FEW == SM80_FEW ? transpose(x[i]) : x[i];
            x[i] = __byte_perm(x[i], 0, order);
        }
    }
    /* z += weights x offsets of the codes of keys 0 - 7 and 8 - 15, in their order: the columns of
     * a tile are alike. */
    __device__ __forceinline__ void add_offsets(float (&z)[4], uint32_t low, uint32_t high) const
    {
        if constexpr (FEW) {
            const uint32_t a[4] = {low, low, high, high};
            multiply<KIND_F16>(z, a, x[0], x[1]);
        } else {
            multiply<KIND_F16>(z, x, low, high);
        }
    }
    /* o of two tiles of 8 values' columns += weights x values, keys 0 - 7 and 8 - 15. */
    __device__ __forceinline__ void add(float (*o)[4], const uint32_t (&even)[2],
                                        const uint32_t (&odd)[2]) const
    {
        if constexpr (FEW) {
            const uint32_t a[4] = {even[0], odd[0], even[1], odd[1]};
            multiply<KIND_F16>(o[0], a, x[0], x[1]);
        } else {
            multiply<KIND_F16>(o[0], x, even[0], even[1]);
            multiply<KIND_F16>(o[1], x, odd[0], odd[1]);
        }
    }
};

/* Scores of 16 keys += keys x queries, 16 dims: b are two registers of keys 0 - 7, then of 8 - 15.
 */
template <int FEW, int KIND = KIND_F16>
static __device__ __forceinline__ void multiply_keys(float (*s)[4], const uint32_t (&query)[4],
                                                     const uint32_t (&b)[4])
{
    if constexpr (FEW) {
        const uint32_t keys[4] = {b[0], b[2], b[1], b[3]};
        multiply<KIND>(s[0], keys, query[0], query[2]);
    } else {
        multiply<KIND>(s[0], query, b[0], b[1]);
        multiply<KIND>(s[1], query, b[2], b[3]);
    }
}

/* Times what all scores are multiplied by. */
template <int ROWS>
static __device__ __forceinline__ row_terms load_terms(const float *terms, int row0, int row1,
                                                       float scale)
{
    return {{terms[row0] * scale, terms[row1] * scale},
            {terms[ROWS + row0] * scale, terms[ROWS + row1] * scale}};
}

#endif
