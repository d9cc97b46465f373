/* SPDX-License-Identifier: Apache-2.0 */
/* One tile of 4-bit codes in one warp: codes expand to f16 on the way into mma.sync, and their
 * offsets and scales are applied to the sums. A word has 8 codes and expands to the pairs (n, n +
 * 4), four registers of two f16:
 *   int4:  a code is a subnormal f16: code x 2^-24, or x 2^-20 for odd n.
 *   nvfp4: an element's bits straddle f16's exponent and fraction: x 2^-14. Times its block's scale
 * it is still an exact f16, a multiple of 2^-24 with up to 6 bits.
 * Keys of TurboQuant are in sm80_turboquant.cuh; its values are handled like int4's. */
#ifndef CUDA_FLASH_SM80_4BIT_CUH
#define CUDA_FLASH_SM80_4BIT_CUH

#include "sm80_query.cuh"

/* Hides a value from the compiler, which would otherwise recompute it in each tile or move it
 * before a branch. */
GPU_INLINE int32_t opaque(int32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}

/* The bits of x where the mask has ones, else those of y. The compiler would take two instructions.
 */
GPU_INLINE uint32_t select_bits(uint32_t mask, uint32_t x, uint32_t y)
{
    uint32_t z;
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(z) : "r"(x), "r"(y), "r"(mask));
    return z;
}

template <int KIND> GPU_INLINE void widen_codes(uint32_t word, uint32_t (&pairs)[4])
{
    if constexpr (KIND != KIND_NVFP4) {
        uint32_t above = word >> 8;
        pairs[0] = word & 0x000f000fu;
        pairs[1] = word & 0x00f000f0u;
        pairs[2] = above & 0x000f000fu;
        pairs[3] = above & 0x00f000f0u;
    } else { /* sign, exponent and fraction in a byte, with other bits between them */
        const uint32_t even = select_bits(0x80808080u, word << 4, word << 1);
        const uint32_t odd = select_bits(0x80808080u, word, word >> 3);
        pairs[0] = even << 8 & 0x8e008e00u;
        pairs[1] = odd << 8 & 0x8e008e00u;
        pairs[2] = even & 0x8e008e00u;
        pairs[3] = odd & 0x8e008e00u;
    }
}

/* Loads N words from an address that is a multiple of ALIGN. */
template <int N, int ALIGN> GPU_INLINE void load_words(const char *from, uint32_t *words)
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

/* Rows of nvfp4 may be followed by their scales; then rows are D / 2 + D / 16 bytes apart. */
template <int KIND, int D> constexpr int row_align = KIND == KIND_NVFP4 &&D < 256 ? D / 16 : 16;

/* The first 4 of 8 codes of 3 bits, which are the low 24 bits of x, in the lower half of a word,
 * the others in the upper one. Bits above them may have any value. */
GPU_INLINE uint32_t split_codes(uint32_t x)
{
    return select_bits(0x0000ffffu, x, x << 4);
}

/* Spreads the 8 codes to 4 bits each, of which the uppermost may have any value. */
GPU_INLINE uint32_t spread_codes(uint32_t x)
{
    x = split_codes(x);
    x = select_bits(0x00ff00ffu, x, x << 2);
    return select_bits(0x0f0f0f0fu, x, x << 1);
}

/* Expands 4 codes of 3 bits in each half of a word to subnormal f16: code x 2^-24, 2^-21, 2^-18 and
 * 2^-24. */
GPU_INLINE void widen_halves(uint32_t word, uint32_t (&pairs)[4])
{
    pairs[0] = word & 0x00070007u;
    pairs[1] = word & 0x00380038u;
    pairs[2] = word & 0x01c001c0u;
    pairs[3] = word >> 9 & 0x00070007u;
}

/* Codes of TurboQuant at any byte of a stage: the address of their first whole word and the bits
 * before them in it. Rows 8 apart have the same shift. */
struct code_place {
    const char *from;
    int shift;
};

GPU_INLINE code_place place_of_codes(const char *stage, int at)
{
    return {stage + (at & ~3), (at & 3) * 8};
}

/* Loads N words of 8 codes of BITS in the low bits, `bytes` (whole words) after a place. */
template <int BITS, int N>
GPU_INLINE void load_codes(const code_place &place, int bytes, uint32_t (&x)[N])
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
        x[i] = BITS == 4 ? packed[i] : __funnelshift_r(packed[word], packed[word + 1], shift);
    }
}

/* The chunk of a query row that matches a word of codes. */
template <int D> GPU_INLINE uint4 query_chunk(const char *sq, int row, int chunk)
{
    return *(const uint4 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16);
}

/* acc_s += Q K^T for one word of 8 codes of 16 keys (0 - 7 and 8 - 15). low and high are the
 * queries' chunks of rows 0 - 7 and 8 - 15. */
template <int SWAP>
GPU_INLINE void mma_words(const uint4 &low, const uint4 &high, const uint32_t (&pairs)[2][4],
                          float (*acc_s)[4])
{
    const uint32_t a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
    const uint32_t(&x)[4] = pairs[0], (&y)[4] = pairs[1];
    const uint32_t b[2][4] = {{x[0], x[1], y[0], y[1]}, {x[2], x[3], y[2], y[3]}};
    mma_qk<SWAP>(acc_s, a[0], b[0]);
    mma_qk<SWAP>(acc_s, a[1], b[1]);
}

/* The queries that match a lane's words of keys. Up to 8 rows of up to 128 dims stay in registers.
 */
template <int D, int SWAP> struct lane_queries {
    static constexpr bool in_registers = SWAP && D <= 128;
    uint4 chunks[in_registers ? D / 32 : 1];

    __device__ __forceinline__ void load(const char *sq, int lane)
    {
#pragma unroll
        for (int j = 0; j < D / 32 && in_registers; j++) {
            chunks[j] = query_chunk<D>(sq, lane >> 2, (lane & 3) * (D / 32) + j);
        }
    }
    __device__ __forceinline__ void multiply(const char *sq, int lane, int j, bool high_rows,
                                             const uint32_t (&pairs)[2][4], float (*acc_s)[4]) const
    {
        if constexpr (in_registers) {
            mma_words<SWAP>(chunks[j], make_uint4(0, 0, 0, 0), pairs, acc_s);
        } else {
            from_memory(sq, lane, j, high_rows, pairs, acc_s);
        }
    }
    GPU_INLINE void from_memory(const char *sq, int lane, int j, bool high_rows,
                                const uint32_t (&pairs)[2][4], float (*acc_s)[4])
    {
        const int row = lane >> 2, chunk = (lane & 3) * (D / 32) + j;
        uint4 low = query_chunk<D>(sq, row, chunk), high = make_uint4(0, 0, 0, 0);
        if (!SWAP && high_rows) {
            high = query_chunk<D>(sq, row + 8, chunk);
        }
        mma_words<SWAP>(low, high, pairs, acc_s);
    }
};

/* Byte offsets in a stage of the lane's first key and first value. Lane (g, c) has the words of key
 * g from c D / 32 on, and of the values of keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 the words from g D /
 * 64 on. Odd c takes neighbouring keys in the other order, since even rows share banks. */
struct lane_codes {
    int32_t key, value;
};

template <int D>
GPU_INLINE lane_codes find_codes(const sm80_plane (&planes)[2], int first, int lane)
{
    const int g = lane >> 2, c = lane & 3;
    return {planes[0].at + (first + g) * planes[0].pitch + c * (D / 32) * 4,
            planes[1].at + (first + 2 * c + (c & 1)) * planes[1].pitch + g * (D / 64) * 4};
}

/* Loads two e4m3 scales for each word of the lane's keys, first + g and first + 8 + g. */
template <int D>
GPU_INLINE void load_block_scales(const char *stage, const sm80_plane &plane, int first, int lane,
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

/* Raw scores against 16 SUBS keys from `first` on. `codes` is the lane's address of the first;
 * `rest` has the queries' rounding errors, if has_rest. Products of all keys alternate, so that
 * none waits for the previous one. */
template <int KIND, int D, int SWAP, int SUBS, int N>
GPU_INLINE void dot_codes(const char *stage, const char *codes, const sm80_plane &plane,
                          const char *sq, const char *rest, bool has_rest,
                          const lane_queries<D, SWAP> &queries, int first, int lane, bool high_rows,
                          float (&acc_s)[N][4])
{
    constexpr int words = D / 32, each = N / SUBS;
    constexpr int batch = SWAP && words > 1 ? 2 : 1; /* words expanded together */
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
            queries.multiply(sq, lane, from + word, high_rows, pairs[word][sub],
                             &acc_s[sub * each]);
        }
        if (KIND == KIND_INT4 && has_rest) {
#pragma unroll
            for (int i = 0; i < batch * SUBS; i++) {
                const int word = i / SUBS, sub = i % SUBS;
                queries.from_memory(rest, lane, from + word, high_rows, pairs[word][sub],
                                    &acc_s[sub * each]);
            }
        }
    }
}

/* The zero point in the low bits of a row's scale. */
GPU_INLINE float zero_point(float scale)
{
    return bits_float((float_bits(scale) & ZERO_POINT_MASK) | 0x4b000000u) - 8388608.0f;
}

/* Applies zero points and scales to raw scores. `scales` is int4's, from the lane's first key on.
 */
template <int KIND, int SWAP, int N>
GPU_INLINE void scale_scores(const row_terms &terms, const float *scales, float (&acc_s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float unit = terms.unit[KIND == KIND_INT8 ? 0 : acc_layout<SWAP>::which(e)];
            float zero = terms.zero[acc_layout<SWAP>::which(e)];
            if constexpr (KIND == KIND_INT4) {
                float both = scales[acc_layout<SWAP>::key(n, e)];
                float scale = bits_float(float_bits(both) & ~ZERO_POINT_MASK);
                acc_s[n][e] = fmaf(-zero, zero_point(both), acc_s[n][e] * unit) * scale;
            } else {
                acc_s[n][e] =
                    KIND == KIND_INT8 ? fmaf(acc_s[n][e], unit, -zero) : acc_s[n][e] * unit;
            }
        }
    }
}

/* The address of a block's scale in a stage; the layout of block_scale_at. */
template <int D>
GPU_INLINE const char *value_scale_at(const char *stage, const sm80_plane &plane, int key,
                                      int block)
{
    constexpr int quarter = D / 64;
    return stage + plane.scale_at + ((key & ~3) + block / quarter) * plane.scale_pitch +
           block % quarter * 4 + (key & 3);
}

/* acc_o += P x codes of 16 keys from `first` on. `codes` is the lane's address of them; BITS is for
 * KIND_LEVELS. For int4, zero_sum += P x zero points. */
template <int KIND, int D, int SWAP, int BITS>
GPU_INLINE void add_codes_of(const char *stage, const char *codes, const sm80_plane &plane,
                             int first, int lane, packed_probs<SWAP> probs,
                             float (&acc_o)[SWAP ? D / 16 : D / 8][4], float (&zero_sum)[4])
{
    constexpr int words = D / 64, align = row_align<KIND, D>;
    const int c = lane & 3, odd = KIND >= KIND_LEVELS ? 0 : c & 1, key = first + 2 * c;
    const uint32_t order = odd != 0 ? 0x1032 : 0x3210;
    probs.arrange(order);
    if constexpr (KIND == KIND_INT4) {
        uint32_t zeros[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint2 two = *(const uint2 *)(stage + plane.scale_at + (key + 8 * i) * 4);
            zeros[i] = __byte_perm(two.x, two.y, odd != 0 ? 0x1054 : 0x5410) & 0x000f000fu;
        }
        probs.add_offsets(zero_sum, zeros[0], zeros[1]);
    }
    uint32_t x[4][words], scale[2][(words + 1) / 2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND >= KIND_LEVELS) {
            const int at = plane.at + (key + (i & 1)) * plane.pitch + (lane >> 2) * words * BITS;
            load_codes<BITS>(place_of_codes(stage, at), (i >> 1) * 8 * plane.pitch, x[i]);
#pragma unroll
            for (int j = 0; j < words && BITS == 3; j++) {
                x[i][j] = split_codes(x[i][j]);
            }
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
    for (int j = 0; j < 2 * words; j++) { /* 4 codes of each of two keys */
        uint32_t b[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t both =
                __byte_perm(x[2 * i][j / 2], x[2 * i + 1][j / 2], (j & 1) != 0 ? 0x7632 : 0x5410);
            if constexpr (BITS == 3) {
                widen_halves(both, b[i]);
            } else {
                widen_codes<KIND>(both, b[i]);
            }
#pragma unroll
            for (int n = 0; n < 4 && KIND == KIND_NVFP4; n++) {
                b[i][n] = multiply_halves(b[i][n], scale[i][j / 4]);
            }
        }
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
            const uint32_t even[2] = {b[0][n], b[1][n]}, other[2] = {b[0][n + 1], b[1][n + 1]};
            probs.add(&acc_o[(4 * j + n) / (SWAP ? 2 : 1)], even, other);
        }
    }
}

template <int KIND, int D, int SWAP>
GPU_INLINE void add_codes(const char *stage, const char *codes, const sm80_plane &plane, int bits,
                          int first, int lane, const packed_probs<SWAP> &probs,
                          float (&acc_o)[SWAP ? D / 16 : D / 8][4], float (&zero_sum)[4])
{
    if (KIND < KIND_LEVELS || bits == 4) {
        add_codes_of<KIND, D, SWAP, 4>(stage, codes, plane, first, lane, probs, acc_o, zero_sum);
    } else {
        add_codes_of<KIND, D, SWAP, 3>(stage, codes, plane, first, lane, probs, acc_o, zero_sum);
    }
}

/* The factor of raw sums of column tile n. */
template <int KIND> GPU_INLINE float unit_of_sum(int n, int bits)
{
    if (KIND == KIND_LEVELS && bits == 3) {
        return (n & 3) == 1 ? 0x1p21f : (n & 3) == 2 ? 0x1p18f : 0x1p24f;
    }
    return KIND == KIND_INT8    ? 0x1p24f
           : KIND == KIND_NVFP4 ? 0x1p14f
           : KIND >= KIND_INT4  ? ((n & 1) != 0 ? 0x1p20f : 0x1p24f)
                                : 1.0f;
}

/* Clears scales of values outside keys low .. high - 1, which a box brought along. */
template <int KIND, int D>
GPU_INLINE void clear_scales(char *stage, const sm80_plane &plane, int first, int keys, int low,
                             int high, int lane)
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
    fence_async_proxy();
}

/* Whether one of nvfp4's block scales is a NaN. */
template <int D>
GPU_INLINE bool has_nan_scales(const char *stage, const sm80_plane &plane, int first, int keys,
                               int lane)
{
    bool odd = false;
    for (int i = lane; i < keys * (D / 16); i += 32) {
        odd |=
            (*value_scale_at<D>(stage, plane, first + i / (D / 16), i % (D / 16)) & 0x7f) == 0x7f;
    }
    return __any_sync(0xffffffffu, odd);
}

#endif
