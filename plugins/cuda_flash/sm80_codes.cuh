/* SPDX-License-Identifier: Apache-2.0 */
/* One tile of 4-bit codes in one warp: products of raw codes, widened on the way into the matrix
 * units. A word is 8 codes; as pairs (n, n + 4) of them, four registers of two f16:
 *   int4:  a code's bits are an f16 without exponent: code x 2^-24, or x 2^-20 for odd n.
 *   nvfp4: an element's bits lie at the seam of f16's exponent and fraction: x 2^-14; with its
 *          block's scale x 2^7 an exact f16, x 2^-7. */
#ifndef CUDA_FLASH_SM80_CODES_CUH
#define CUDA_FLASH_SM80_CODES_CUH

#include "sm80_query.cuh"

template <int KIND>
static __device__ __forceinline__ void widen_codes(uint32_t word, uint32_t (&pairs)[4])
{
    if constexpr (KIND == KIND_INT4) {
        uint32_t above = word >> 8;
        pairs[0] = word & 0x000f000fu;
        pairs[1] = word & 0x00f000f0u;
        pairs[2] = above & 0x000f000fu;
        pairs[3] = above & 0x00f000f0u;
    } else { /* bytes of f16's upper half first */
        uint32_t odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
        uint32_t even = (word << 4 & 0x80808080u) | (word << 1 & 0x0e0e0e0eu);
        pairs[0] = even << 8 & 0xff00ff00u;
        pairs[1] = odd << 8 & 0xff00ff00u;
        pairs[2] = even & 0xff00ff00u;
        pairs[3] = odd & 0xff00ff00u;
    }
}

/* N words from an address that is a multiple of ALIGN. */
template <int N, int ALIGN>
static __device__ __forceinline__ void load_words(const char *from, uint32_t *words)
{
    constexpr int step = N * 4 < ALIGN ? N : ALIGN / 4;
#pragma unroll
    for (int i = 0; i < N; i += step) {
        if constexpr (step == 4) {
            uint4 x = *(const uint4 *)(from + i * 4);
            words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
        } else if constexpr (step == 2) {
            uint2 x = *(const uint2 *)(from + i * 4);
            words[i] = x.x, words[i + 1] = x.y;
        } else {
            words[i] = *(const uint32_t *)(from + i * 4);
        }
    }
}

/* Rows of nvfp4 may be followed by their scales: D / 2 + D / 16 bytes apart. */
template <int KIND, int D> constexpr int row_align = KIND == KIND_NVFP4 &&D < 256 ? D / 16 : 16;

/* Two e4m3 scales, in bits 0 .. 15, x 2^7. */
static __device__ __forceinline__ uint32_t block_scales(uint32_t two)
{
    return multiply_halves(widen<KIND_E4M3>(two), 0x58005800u);
}

/* The chunk of a query row that meets a word of codes. */
template <int D>
static __device__ __forceinline__ uint4 query_chunk(const char *sq, int row, int chunk)
{
    return *(const uint4 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16);
}

/* A word of 8 codes of each key, of 16 keys those of 0 - 7 and of 8 - 15, times the queries'
 * chunk. */
template <int D, bool FEW>
static __device__ __forceinline__ void multiply_words(const char *sq, int row, int chunk,
                                                      bool high_rows, const uint32_t (&pairs)[2][4],
                                                      float (*s)[4])
{
    uint4 low = query_chunk<D>(sq, row, chunk), high = make_uint4(0, 0, 0, 0);
    if (!FEW && high_rows) {
        high = query_chunk<D>(sq, row + 8, chunk);
    }
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    const uint32_t(&x)[4] = pairs[0], (&y)[4] = pairs[1];
    const uint32_t b[2][4] = {{x[0], x[1], y[0], y[1]}, {x[2], x[3], y[2], y[3]}};
    multiply_keys<FEW>(s, a[0], b[0]);
    multiply_keys<FEW>(s, a[1], b[1]);
}

/* Scores of the rows against 16 keys from `first` on, raw. Lane (g, c) has of key g the words
 * from c D / 32 on. `rest`: of the queries, NULL: none. */
template <int KIND, int D, bool FEW>
static __device__ __forceinline__ void dot_codes(const char *stage, const sm80_plane &plane,
                                                 const char *sq, const char *rest, int first,
                                                 int lane, bool high_rows, float (*s)[4])
{
    constexpr int words = D / 32, blocks = (words + 1) / 2;
    const int g = lane >> 2, c = lane & 3;
    uint32_t x[2][words], scales[2][(blocks + 1) / 2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int key = first + n * 8 + g;
        load_words<words, row_align<KIND, D>>(stage + plane.at + key * plane.pitch + c * words * 4,
                                              x[n]);
        if constexpr (KIND == KIND_NVFP4) {
            const char *at = stage + plane.scale_at + key * plane.scale_pitch + c * blocks;
            if constexpr (blocks == 4) {
                uint32_t four = *(const uint32_t *)at;
                scales[n][0] = block_scales(four & 0xffff);
                scales[n][1] = block_scales(four >> 16);
            } else {
                scales[n][0] =
                    block_scales(blocks == 2 ? *(const uint16_t *)at : *(const uint8_t *)at);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < words; j++) {
        uint32_t pairs[2][4];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            widen_codes<KIND>(x[n][j], pairs[n]);
            if constexpr (KIND == KIND_NVFP4) {
                uint32_t scale =
                    __byte_perm(scales[n][j / 4], 0, (j / 2 & 1) != 0 ? 0x3232 : 0x1010);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    pairs[n][i] = multiply_halves(pairs[n][i], scale);
                }
            }
        }
        multiply_words<D, FEW>(sq, g, c * words + j, high_rows, pairs, s);
        if (KIND == KIND_INT4 && rest != nullptr) {
            multiply_words<D, FEW>(rest, g, c * words + j, high_rows, pairs, s);
        }
    }
}

/* The zero point of a row's scale. */
static __device__ __forceinline__ float zero_point(float scale)
{
    return bits_float((float_bits(scale) & ZERO_POINT_MASK) | 0x4b000000u) - 8388608.0f;
}

/* Raw scores less the keys' zero points, times their scales; `scales`: of int4's keys from the
 * lane's first on. */
template <int KIND, bool FEW, int N>
static __device__ __forceinline__ void close_scores(const row_terms &terms, const float *scales,
                                                    float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float unit = terms.unit[sums_at<FEW>::which(e)];
            float zero = terms.zero[sums_at<FEW>::which(e)];
            if constexpr (KIND == KIND_INT4) {
                float both = scales[sums_at<FEW>::key(n, e)];
                float scale = bits_float(float_bits(both) & ~ZERO_POINT_MASK);
                s[n][e] = fmaf(-zero, zero_point(both), s[n][e] * unit) * scale;
            } else {
                s[n][e] = KIND == KIND_INT8 ? fmaf(s[n][e], 0x1p24f, -zero) : s[n][e] * unit;
            }
        }
    }
}

/* Where the scale of a slot's block lies in a stage: as block_scale_at has it. */
template <int D>
static __device__ __forceinline__ const char *
value_scale_at(const char *stage, const sm80_plane &plane, int key, int block)
{
    constexpr int quarter = D / 64;
    return stage + plane.scale_at + ((key & ~3) + block / quarter) * plane.scale_pitch +
           block % quarter * 4 + (key & 3);
}

/* o += weights x values of 16 keys, raw; z: the weights' sums with zero points, which are read from
 * `scales`, those of the lane's keys. Lane (g, c) has of keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 the
 * words from g D / 64 on; odd c takes neighbouring keys in the other order, since those of even
 * rows share their banks. */
template <int KIND, int D, bool FEW>
static __device__ __forceinline__ void add_codes(const char *stage, const sm80_plane &plane,
                                                 int first, int lane, const float *scales,
                                                 const float (&s0)[4], const float (&s1)[4],
                                                 float (&o)[FEW ? D / 16 : D / 8][4], float (&z)[2])
{
    constexpr int words = D / 64, align = row_align<KIND, D>;
    const int g = lane >> 2, c = lane & 3, odd = c & 1, key = first + 2 * c;
    const uint32_t order = odd != 0 ? 0x1032 : 0x3210;
    packed_weights<FEW> weights(s0, s1);
    if constexpr (KIND == KIND_INT4) {
        float offset[FEW ? 2 : 4];
#pragma unroll
        for (int i = 0; i < (FEW ? 2 : 4); i++) {
            offset[i] = zero_point(scales[FEW ? 8 * i : (i >> 1) * 8 + (i & 1)]);
        }
        weights.add_offsets(offset, z);
    }
    weights.arrange(order);
    uint32_t x[4][words], scale[2][(words + 1) / 2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int k = key + (i >> 1) * 8 + ((i & 1) ^ odd);
        load_words < words, align<words * 4 ? align : words * 4>(
                                stage + plane.at + k * plane.pitch + g * words * 4, x[i]);
    }
    if constexpr (KIND == KIND_NVFP4) {
#pragma unroll
        for (int i = 0; i < 2 * ((words + 1) / 2); i++) {
            int block = g * words / 2 + i / 2;
            const char *at = value_scale_at<D>(stage, plane, key + (i & 1) * 8, block);
            scale[i & 1][i / 2] = __byte_perm(block_scales(*(const uint16_t *)at), 0, order);
        }
    }
#pragma unroll
    for (int j = 0; j < 2 * words; j++) { /* 4 codes of two keys, each */
        uint32_t b[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            widen_codes<KIND>(
                __byte_perm(x[2 * i][j / 2], x[2 * i + 1][j / 2], (j & 1) != 0 ? 0x7632 : 0x5410),
                b[i]);
#pragma unroll
            for (int n = 0; n < 4 && KIND == KIND_NVFP4; n++) {
                b[i][n] = multiply_halves(b[i][n], scale[i][j / 4]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            const uint32_t even[2] = {b[0][n], b[1][n]}, other[2] = {b[0][n + 1], b[1][n + 1]};
            weights.add(&o[(4 * j + n) / (FEW ? 2 : 1)], even, other);
        }
    }
}

/* What raw sums of column tile n are multiplied by. */
template <int KIND> static __device__ __forceinline__ float unit_of_sum(int n)
{
    return KIND == KIND_INT8    ? 0x1p24f
           : KIND == KIND_INT4  ? ((n & 1) != 0 ? 0x1p20f : 0x1p24f)
           : KIND == KIND_NVFP4 ? 0x1p7f
                                : 1.0f;
}

/* Scales of values outside keys low .. high - 1 become zero: a box brought them along. */
template <int KIND, int D>
static __device__ __forceinline__ void clear_scales(char *stage, const sm80_plane &plane, int first,
                                                    int keys, int low, int high, int lane)
{
    for (int key = first + lane; key < first + keys; key += 32) {
        if (key >= low && key < high) {
            continue;
        }
        if constexpr (KIND == KIND_INT4) {
            *(float *)(stage + plane.scale_at + key * 4) = 0.0f;
        } else {
            for (int block = 0; block < D / 16; block++) {
                *(char *)value_scale_at<D>(stage, plane, key, block) = 0;
            }
        }
    }
    fence_for_boxes();
}

/* Whether one of nvfp4's block scales is a NaN. */
template <int D>
static __device__ __forceinline__ bool scales_odd(const char *stage, const sm80_plane &plane,
                                                  int first, int keys, int lane)
{
    bool odd = false;
    for (int i = lane; i < keys * (D / 16); i += 32) {
        odd |=
            (*value_scale_at<D>(stage, plane, first + i / (D / 16), i % (D / 16)) & 0x7f) == 0x7f;
    }
    return __any_sync(0xffffffffu, odd);
}

#endif
