/* SPDX-License-Identifier: Apache-2.0 */
/* Queries of quantized kinds: the Hadamard transform of rows that a warp holds, the order of dims,
 * terms; and the register layout of accumulators and probabilities. */
#ifndef CUDA_FLASH_SM80_QUERY_CUH
#define CUDA_FLASH_SM80_QUERY_CUH

#include "sm80_producer.cuh"

#define QUERY_LARGEST 12 /* the largest element of a row is scaled to 2^12 .. 2^13 */

/* Dims of a lane: lane * own .. lane * own + own - 1. With D 64, half of the lanes have dims. */
template <int D> constexpr int own_dims = D > 128 ? D / 32 : 4;

/* The unnormalized Hadamard transform (Sylvester's matrix) of a row. It commutes with permutations
 * of index bits, so the dims may be in any such order. */
template <int D> GPU_INLINE void hadamard_row(float (&x)[own_dims<D>], int lane)
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

/* The place of dim d (0 to 7) in the 16 bytes of the query that match a word of 8 codes. Words
 * expand to the pairs (0, 4), (1, 5), (2, 6), (3, 7), words of TurboQuant to neighbours. */
template <int KIND> GPU_INLINE int place_in_chunk(int d)
{
    return KIND == KIND_INT4 || KIND == KIND_NVFP4 ? (d & 3) * 2 + (d >> 2) : d;
}

GPU_INLINE float clamp_half(float x)
{
    return x != x ? x : fminf(fmaxf(x, -65504.0f), 65504.0f);
}

/* The power of two that scales a row's largest element to 2^12 .. 2^13; 1 for zero and extreme
 * rows. */
GPU_INLINE float query_factor(float largest)
{
    int exponent = (int)(float_bits(largest) >> 23);
    bool usual = exponent > 20 && exponent < 235;
    return usual ? bits_float((uint32_t)(127 + 127 + QUERY_LARGEST - exponent) << 23) : 1.0f;
}

/* Prepares the queries of a run in place: Hadamard transform where keys have it, conversion to f16,
 * dims in the order of the codes; for odd codes of int4, multiplied by 1/16. `rest` (unless NULL)
 * gets the rounding error of transformed rows. terms[row] is the factor of a raw score,
 * terms[SM80_ROWS + row] what a zero point of 1 subtracts from the score. Codes are multiplied as
 * subnormal f16, that is, times 2^-24. */
template <int KIND, int D>
static __device__ __noinline__ void prepare_query(const gpu_params &p, const gpu_run &run, char *sq,
                                                  char *rest, float *terms)
{
    constexpr int own = own_dims<D>;
    const int lane = threadIdx.x & 31;
    const bool has_dims = lane * own < D;
#pragma unroll 1
    for (int row = threadIdx.x >> 5; row < SM80_ROWS; row += 4) {
        if (row >= run.row_tile.num_rows) { /* the row is zero in sq */
            if (lane == 0) {
                terms[row] = terms[SM80_ROWS + row] = 0.0f;
            }
            for (int i = lane; i < D / 8 && rest != nullptr; i += 32) {
                *(uint4 *)(rest + (row * (D / 8) + i) * 16) = make_uint4(0, 0, 0, 0);
            }
            continue;
        }
        char *chunk =
            sq + (row * (D / 8) + swizzle<D / 8>(row, has_dims ? lane * own / 8 : 0)) * 16;
        int first = lane * own % 8; /* in the chunk of 8 dims */
        float x[own], largest = 0.0f, sum = 0.0f;
#pragma unroll
        for (int e = 0; e < own; e++) {
            x[e] = has_dims ? number_load(chunk, p.q.dtype, first + e) : 0.0f;
            if (KIND == KIND_INT4 && has_dims) {
                x[e] *= p.k.signs[lane * own + e];
            }
        }
        if constexpr (decode_shape<KIND, D>::hadamard) {
            hadamard_row<D>(x, lane);
        }
#pragma unroll
        for (int e = 0; e < own; e++) {
            largest = fmaxf(largest, fabsf(x[e]));
        }
        float factor = KIND >= KIND_INT4 ? query_factor(warp_largest(largest, false)) : 1.0f;
        __syncwarp(); /* all lanes have read the row */
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
            terms[SM80_ROWS + row] = (KIND == KIND_INT8 ? 128.0f : 1.0f) * sum * back;
        }
    }
    barrier_consumers(); /* all rows are prepared */
}

/* The register layout of acc_s. SM80_NO_SWAP: S = Q K^T, element e of tile n of 8 keys. SM80_SWAP8:
 * S^T = K Q^T, tile n of 16 keys. SM80_SWAP4: S^T as well, but pairs of lanes share two rows, and
 * each lane of a pair has 16 of 32 keys. A lane has two rows. */
template <int SWAP> struct acc_layout {
    GPU_INLINE int row(int lane, int i)
    {
        return SWAP == SM80_SWAP4 ? (lane & 1) * 2 + i
               : SWAP             ? (lane & 3) * 2 + i
                                  : (lane >> 2) + 8 * i;
    }
    GPU_INLINE int first_key(int lane)
    {
        return SWAP == SM80_SWAP4 ? (lane >> 2) + (lane & 2) * 8
               : SWAP             ? lane >> 2
                                  : (lane & 3) * 2;
    }
    /* counted from the lane's first key */
    GPU_INLINE constexpr int key(int n, int e)
    {
        return SWAP ? n * 16 + (e >> 1) * 8 : n * 8 + (e & 1);
    }
    GPU_INLINE constexpr int which(int e) /* index of the row */
    {
        return SWAP ? e & 1 : e >> 1;
    }
    /* The column tile (8 dims) of an element of acc_o, and the lane's column in it. */
    GPU_INLINE constexpr int tile(int n, int e)
    {
        return SWAP ? 2 * n + (e >> 1) : n;
    }
    GPU_INLINE int column(int lane, int e)
    {
        return SWAP ? lane >> 2 : (lane & 3) * 2 + (e & 1);
    }
    /* Reductions over the lanes that share a row. */
    GPU_INLINE float largest(float x)
    {
#pragma unroll
        for (int span = SWAP == SM80_SWAP4 ? 2 : SWAP ? 4 : 1; span < (SWAP ? 32 : 4); span <<= 1) {
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, span));
        }
        return x;
    }
    GPU_INLINE float sum(float x)
    {
#pragma unroll
        for (int span = SWAP == SM80_SWAP4 ? 2 : SWAP ? 4 : 1; span < (SWAP ? 32 : 4); span <<= 1) {
            x += __shfl_xor_sync(0xffffffffu, x, span);
        }
        return x;
    }
};

/* The terms of a lane's two rows. */
struct row_terms {
    float unit[2], zero[2];
};

/* P of 16 keys as f16, from p0 and p1 of 8 keys each or, with SWAP, from p0 of 16. */
template <int SWAP> struct packed_probs {
    uint32_t x[SWAP ? 2 : 4];
    __device__ __forceinline__ packed_probs(const float (&p0)[4], const float (&p1)[4])
    {
        x[0] = pack2<KIND_F16>(p0[0], p0[1]);
        x[1] = pack2<KIND_F16>(p0[2], p0[3]);
        if constexpr (!SWAP) {
            x[2] = pack2<KIND_F16>(p1[0], p1[1]);
            x[3] = pack2<KIND_F16>(p1[2], p1[3]);
        }
    }
    /* SM80_SWAP4: the keys are already the reduction dimension. */
    __device__ __forceinline__ packed_probs(const uint32_t (&hadamard)[2])
    {
        x[0] = hadamard[0];
        x[1] = hadamard[1];
    }
    /* Makes the keys the reduction dimension. `order` permutes two neighbours (__byte_perm). */
    __device__ __forceinline__ void arrange(uint32_t order)
    {
#pragma unroll
        for (int i = 0; i < (SWAP ? 2 : 4); i++) {
            x[i] = SWAP == SM80_SWAP8 ? transpose(x[i]) : x[i];
            x[i] = __byte_perm(x[i], 0, order);
        }
    }
    /* zero_sum += P x zero points of the codes of keys 0 - 7 and 8 - 15; all columns of the tile
     * are equal. */
    __device__ __forceinline__ void add_offsets(float (&zero_sum)[4], uint32_t low,
                                                uint32_t high) const
    {
        if constexpr (SWAP) {
            const uint32_t a[4] = {low, low, high, high};
            multiply<KIND_F16>(zero_sum, a, x[0], x[1]);
        } else {
            multiply<KIND_F16>(zero_sum, x, low, high);
        }
    }
    /* acc_o of two column tiles += P x values of keys 0 - 7 and 8 - 15. */
    __device__ __forceinline__ void add(float (*acc_o)[4], const uint32_t (&even)[2],
                                        const uint32_t (&odd)[2]) const
    {
        if constexpr (SWAP) {
            const uint32_t a[4] = {even[0], odd[0], even[1], odd[1]};
            multiply<KIND_F16>(acc_o[0], a, x[0], x[1]);
        } else {
            multiply<KIND_F16>(acc_o[0], x, even[0], even[1]);
            multiply<KIND_F16>(acc_o[1], x, odd[0], odd[1]);
        }
    }
};

/* acc_s of 16 keys += Q K^T over 16 dims. b has two registers of keys 0 - 7, then two of keys 8 -
 * 15. */
template <int SWAP, int KIND = KIND_F16>
GPU_INLINE void mma_qk(float (*acc_s)[4], const uint32_t (&query)[4], const uint32_t (&b)[4])
{
    if constexpr (SWAP) {
        const uint32_t keys[4] = {b[0], b[2], b[1], b[3]};
        multiply<KIND>(acc_s[0], keys, query[0], query[2]);
    } else {
        multiply<KIND>(acc_s[0], query, b[0], b[1]);
        multiply<KIND>(acc_s[1], query, b[2], b[3]);
    }
}

/* Loads the terms of two rows, multiplied by the scale of all scores. */
GPU_INLINE row_terms load_terms(const float *terms, int row0, int row1, float scale)
{
    return {{terms[row0] * scale, terms[row1] * scale},
            {terms[SM80_ROWS + row0] * scale, terms[SM80_ROWS + row1] * scale}};
}

#endif
