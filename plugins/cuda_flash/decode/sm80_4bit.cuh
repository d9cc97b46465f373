/* SPDX-License-Identifier: Apache-2.0 */
/* One tile of 4-bit codes in one warp: products of raw codes, widened on the way into the matrix
 * units. A word is 8 codes; as pairs (n, n + 4) of them, four registers of two f16:
 *   int4:  a code's bits are an f16 without exponent: code x 2^-24, or x 2^-20 for odd n.
 *   nvfp4: an element's bits lie at the seam of f16's exponent and fraction: x 2^-14, and times its
 *          block's scale an exact f16, too: a multiple of 2^-24 of up to 6 bits.
 * sm80_turboquant.cuh has the keys of TurboQuant, whose values are as int4's. */
#ifndef CUDA_FLASH_SM80_4BIT_CUH
#define CUDA_FLASH_SM80_4BIT_CUH

#include "sm80_query.cuh"

/* A number that is made once, and where it stands: the compiler would make it anew in each tile, or
 * ahead of a branch. */
static __device__ __forceinline__ int32_t kept(int32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

template <int KIND>
static __device__ __forceinline__ void widen_codes(uint32_t word, uint32_t (&pairs)[4])
{
    if constexpr (KIND != KIND_NVFP4) {
        uint32_t above = word >> 8;
        pairs[0] = word & 0x000f000fu;
        pairs[1] = word & 0x00f000f0u;
        pairs[2] = above & 0x000f000fu;
        pairs[3] = above & 0x00f000f0u;
    } else { /* bytes of f16's upper half first */
        uint32_t odd = (word & 0x80808080u) | (word >> 3 & 0x0e0e0e0eu);
        /* the sum carries an even code's sign to the top of its byte, and nothing else */
        uint32_t even = (word & 0x0f0f0f0fu) * 2 + 0x70707070u;
        pairs[0] = even << 8 & 0x8e008e00u;
        pairs[1] = __byte_perm(odd, 0, 0x2404);
        pairs[2] = even & 0x8e008e00u;
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

/* Codes of 3 bits, 8 of them in the low 24 of x, 4 bits apart. */
static __device__ __forceinline__ uint32_t spread_codes(uint32_t x)
{
    x = (x & 0x00000fffu) | (x << 4 & 0x0fff0000u);
    x = (x & 0x003f003fu) | (x << 2 & 0x3f003f00u);
    return (x & 0x07070707u) | (x << 1 & 0x70707070u);
}

/* Codes of TurboQuant from any byte of a stage on: whole words, and the bits of the first that are
 * not theirs. Rows 8 apart begin alike in their words. */
struct code_place {
    const char *from;
    int shift;
};

static __device__ __forceinline__ code_place place_of_codes(const char *stage, int at)
{
    return {stage + (at & ~3), (at & 3) * 8};
}

/* N words of 8 codes of BITS, 4 bits apart, `bytes` behind a place: whole words. */
template <int BITS, int N>
static __device__ __forceinline__ void load_codes(const code_place &place, int bytes,
                                                  uint32_t (&x)[N])
{
    constexpr int words = (N * BITS + 3) / 4;
    const uint32_t *from = (const uint32_t *)(place.from + bytes);
    uint32_t raw[words + 1], packed[words + 1];
#pragma unroll
    for (int i = 0; i <= words; i++) {
        raw[i] = from[i];
    }
#pragma unroll
    for (int i = 0; i < words; i++) {
        packed[i] = __funnelshift_r(raw[i], raw[i + 1], place.shift);
    }
    packed[words] = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int word = i * BITS / 4, shift = i * BITS * 8 % 32;
        x[i] = BITS == 4 ? packed[i]
                         : spread_codes(__funnelshift_r(packed[word], packed[word + 1], shift));
    }
}

/* The chunk of a query row that meets a word of codes. */
template <int D>
static __device__ __forceinline__ uint4 query_chunk(const char *sq, int row, int chunk)
{
    return *(const uint4 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16);
}

/* A word of 8 codes of each key, of 16 keys those of 0 - 7 and of 8 - 15, times the queries'
 * chunk: of rows 0 - 7, and of 8 - 15. */
template <int FEW>
static __device__ __forceinline__ void multiply_words(const uint4 &low, const uint4 &high,
                                                      const uint32_t (&pairs)[2][4], float (*s)[4])
{
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    const uint32_t(&x)[4] = pairs[0], (&y)[4] = pairs[1];
    const uint32_t b[2][4] = {{x[0], x[1], y[0], y[1]}, {x[2], x[3], y[2], y[3]}};
    multiply_keys<FEW>(s, a[0], b[0]);
    multiply_keys<FEW>(s, a[1], b[1]);
}

/* The queries of a lane's words of keys. Up to 8 rows of up to 128 dims stay in registers. */
template <int D, int FEW> struct lane_queries {
    static constexpr bool kept = FEW && D <= 128;
    uint4 chunks[kept ? D / 32 : 1];

    __device__ __forceinline__ void keep(const char *sq, int lane)
    {
#pragma unroll
        for (int j = 0; j < D / 32 && kept; j++) {
            chunks[j] = query_chunk<D>(sq, lane >> 2, (lane & 3) * (D / 32) + j);
        }
    }
    __device__ __forceinline__ void multiply(const char *sq, int lane, int j, bool high_rows,
                                             const uint32_t (&pairs)[2][4], float (*s)[4]) const
    {
        if constexpr (kept) {
            multiply_words<FEW>(chunks[j], make_uint4(0, 0, 0, 0), pairs, s);
        } else {
            from_memory(sq, lane, j, high_rows, pairs, s);
        }
    }
    static __device__ __forceinline__ void from_memory(const char *sq, int lane, int j,
                                                       bool high_rows,
                                                       const uint32_t (&pairs)[2][4], float (*s)[4])
    {
        const int row = lane >> 2, chunk = (lane & 3) * (D / 32) + j;
        uint4 low = query_chunk<D>(sq, row, chunk), high = make_uint4(0, 0, 0, 0);
        if (!FEW && high_rows) {
            high = query_chunk<D>(sq, row + 8, chunk);
        }
        multiply_words<FEW>(low, high, pairs, s);
    }
};

/* Bytes from a stage to the codes of the lane's first key and first value. Lane (g, c) has of key g
 * the words from c D / 32 on, and of the values of keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 those from
 * g D / 64 on; odd c takes neighbours in the other order, since those of even rows share their
 * banks. */
struct lane_codes {
    int32_t key, value;
};

template <int D>
static __device__ __forceinline__ lane_codes find_codes(const sm80_plane (&planes)[2], int first,
                                                        int lane)
{
    const int g = lane >> 2, c = lane & 3;
    return {planes[0].at + (first + g) * planes[0].pitch + c * (D / 32) * 4,
            planes[1].at + (first + 2 * c + (c & 1)) * planes[1].pitch + g * (D / 64) * 4};
}

/* Two e4m3 scales for each word of the lane's keys, first + g and first + 8 + g. */
template <int D>
static __device__ __forceinline__ void load_block_scales(const char *stage, const sm80_plane &plane,
                                                         int first, int lane,
                                                         uint32_t (&scales)[2][(D / 64 + 1) / 2])
{
    constexpr int blocks = (D / 32 + 1) / 2;
#pragma unroll
    for (int n = 0; n < 2; n++) {
        const char *at = stage + plane.scale_at +
                         (first + n * 8 + (lane >> 2)) * plane.scale_pitch + (lane & 3) * blocks;
        if constexpr (blocks == 4) {
            uint32_t four = *(const uint32_t *)at;
            scales[n][0] = widen<KIND_E4M3>(four & 0xffff);
            scales[n][1] = widen<KIND_E4M3>(four >> 16);
        } else {
            scales[n][0] =
                widen<KIND_E4M3>(blocks == 2 ? *(const uint16_t *)at : *(const uint8_t *)at);
        }
    }
}

/* Scores of the rows against 16 SUBS keys, `first` the first of them, raw; `codes`: the lane's of
 * that one. `rest`: of the queries, where has_rest. All keys' products of some words, so that none
 * waits for the one before. */
template <int KIND, int D, int FEW, int SUBS, int N>
static __device__ __forceinline__ void
dot_codes(const char *stage, const char *codes, const sm80_plane &plane, const char *sq,
          const char *rest, bool has_rest, const lane_queries<D, FEW> &queries, int first, int lane,
          bool high_rows, float (&s)[N][4])
{
    constexpr int words = D / 32, each = N / SUBS;
    constexpr int batch = FEW && words > 1 ? 2 : 1; /* words widened together */
    uint32_t x[SUBS][2][words], scales[SUBS][2][(D / 64 + 1) / 2];
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
#pragma unroll
        for (int n = 0; n < 2; n++) {
            load_words<words, row_align<KIND, D>>(codes + (sub * 16 + n * 8) * plane.pitch,
                                                  x[sub][n]);
        }
        if constexpr (KIND == KIND_NVFP4) {
            load_block_scales<D>(stage, plane, first + sub * 16, lane, scales[sub]);
        }
    }
#pragma unroll
    for (int from = 0; from < words; from += batch) {
        uint32_t pairs[batch][SUBS][2][4];
#pragma unroll
        for (int i = 0; i < batch * SUBS * 2; i++) {
            const int word = i / (SUBS * 2), sub = i / 2 % SUBS, n = i % 2, j = from + word;
            widen_codes<KIND>(x[sub][n][j], pairs[word][sub][n]);
            if constexpr (KIND == KIND_NVFP4) {
                uint32_t scale =
                    __byte_perm(scales[sub][n][j / 4], 0, (j / 2 & 1) != 0 ? 0x3232 : 0x1010);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    pairs[word][sub][n][k] = multiply_halves(pairs[word][sub][n][k], scale);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < batch * SUBS; i++) {
            const int word = i / SUBS, sub = i % SUBS;
            queries.multiply(sq, lane, from + word, high_rows, pairs[word][sub], &s[sub * each]);
        }
        if (KIND == KIND_INT4 && has_rest) {
#pragma unroll
            for (int i = 0; i < batch * SUBS; i++) {
                const int word = i / SUBS, sub = i % SUBS;
                queries.from_memory(rest, lane, from + word, high_rows, pairs[word][sub],
                                    &s[sub * each]);
            }
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
template <int KIND, int FEW, int N>
static __device__ __forceinline__ void close_scores(const row_terms &terms, const float *scales,
                                                    float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float unit = terms.unit[KIND == KIND_INT8 ? 0 : sums_at<FEW>::which(e)];
            float zero = terms.zero[sums_at<FEW>::which(e)];
            if constexpr (KIND == KIND_INT4) {
                float both = scales[sums_at<FEW>::key(n, e)];
                float scale = bits_float(float_bits(both) & ~ZERO_POINT_MASK);
                s[n][e] = fmaf(-zero, zero_point(both), s[n][e] * unit) * scale;
            } else {
                s[n][e] = KIND == KIND_INT8 ? fmaf(s[n][e], unit, -zero) : s[n][e] * unit;
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

/* o += weights x values of 16 keys from `first` on, raw; `codes`: the lane's of those, BITS each of
 * KIND_LEVELS; int4: z += weights x zero points. */
template <int KIND, int D, int FEW, int BITS>
static __device__ __forceinline__ void
add_codes_of(const char *stage, const char *codes, const sm80_plane &plane, int first, int lane,
             packed_weights<FEW> weights, float (&o)[FEW ? D / 16 : D / 8][4], float (&z)[4])
{
    constexpr int words = D / 64, align = row_align<KIND, D>;
    const int c = lane & 3, odd = KIND >= KIND_LEVELS ? 0 : c & 1, key = first + 2 * c;
    const uint32_t order = odd != 0 ? 0x1032 : 0x3210;
    weights.arrange(order);
    if constexpr (KIND == KIND_INT4) {
        uint32_t zeros[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint2 two = *(const uint2 *)(stage + plane.scale_at + (key + 8 * i) * 4);
            zeros[i] = __byte_perm(two.x, two.y, odd != 0 ? 0x1054 : 0x5410) & 0x000f000fu;
        }
        weights.add_offsets(z, zeros[0], zeros[1]);
    }
    uint32_t x[4][words], scale[2][(words + 1) / 2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND >= KIND_LEVELS) {
            const int at = plane.at + (key + (i & 1)) * plane.pitch + (lane >> 2) * words * BITS;
            load_codes<BITS>(place_of_codes(stage, at), (i >> 1) * 8 * plane.pitch, x[i]);
            continue;
        }
        int next = (i >> 1) * 8 * plane.pitch;
        if ((i & 1) != 0) {
            next += odd != 0 ? -plane.pitch : plane.pitch;
        }
        load_words < words, align<words * 4 ? align : words * 4>(codes + next, x[i]);
    }
    if constexpr (KIND == KIND_NVFP4) {
#pragma unroll
        for (int i = 0; i < 2 * ((words + 1) / 2); i++) {
            int block = (lane >> 2) * words / 2 + i / 2;
            const char *at = value_scale_at<D>(stage, plane, key + (i & 1) * 8, block);
            scale[i & 1][i / 2] = __byte_perm(widen<KIND_E4M3>(*(const uint16_t *)at), 0, order);
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

template <int KIND, int D, int FEW>
static __device__ __forceinline__ void add_codes(const char *stage, const char *codes,
                                                 const sm80_plane &plane, int bits, int first,
                                                 int lane, const packed_weights<FEW> &weights,
                                                 float (&o)[FEW ? D / 16 : D / 8][4], float (&z)[4])
{
    if (KIND < KIND_LEVELS || bits == 4) {
        add_codes_of<KIND, D, FEW, 4>(stage, codes, plane, first, lane, weights, o, z);
    } else {
        add_codes_of<KIND, D, FEW, 3>(stage, codes, plane, first, lane, weights, o, z);
    }
}

/* What raw sums of column tile n are multiplied by. */
template <int KIND> static __device__ __forceinline__ float unit_of_sum(int n)
{
    return KIND == KIND_INT8    ? 0x1p24f
           : KIND == KIND_NVFP4 ? 0x1p14f
           : KIND >= KIND_INT4  ? ((n & 1) != 0 ? 0x1p20f : 0x1p24f)
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
        } else if constexpr (KIND >= KIND_LEVELS) {
            uint16_t *step = (uint16_t *)(stage + plane.scale_at + key * plane.scale_pitch);
            step[0] = step[1] = 0;
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
