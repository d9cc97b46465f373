/* SPDX-License-Identifier: Apache-2.0 */
/* TurboQuant's keys in one warp: codes become f16 levels by byte permutations, and a key's own
 * products give its length. */
#ifndef CUDA_FLASH_SM80_LEVELS_CUH
#define CUDA_FLASH_SM80_LEVELS_CUH

#include "sm80_codes.cuh"

/* Levels above 0 by the distance of their code from the middle: low and high bytes of f16. They are
 * TURBOQUANT_LEVELS_4 x 1.73358225 and TURBOQUANT_LEVELS_3 x 1.26067825, twice; of all factors
 * these leave the least to rounding, 7.4e-5 and 2.5e-5. A key is divided by its length, and the
 * factor with it. */
struct level_table {
    uint32_t low[2], high[2];
};

static __device__ __forceinline__ level_table levels_of(int bits)
{
    return bits == 4 ? level_table{{0x898e6220u, 0xbc2c9c5bu}, {0x3e3c3933u, 0x44434140u}}
                     : level_table{{0x6cc69ff1u, 0x6cc69ff1u}, {0x413e3b34u, 0x413e3b34u}};
}

/* A byte for each of 4 selectors: the upper bit of one gives the byte's sign 8 times. */
static __device__ __forceinline__ uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which)
{
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
    return y;
}

/* A word of 8 codes, those of 3 bits with the upper one moved up by 1, as 4 pairs of neighbours. */
static __device__ __forceinline__ void widen_levels(const level_table &t, uint32_t word,
                                                    uint32_t (&pairs)[4])
{
    uint32_t below = ~word & 0x88888888u; /* codes of levels below 0, which count downwards */
    uint32_t index = (word ^ (below - (below >> 3))) & 0x77777777u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t which = index >> 16 * i;
        uint32_t low = pick_bytes(t.low[0], t.low[1], which);
        uint32_t high = pick_bytes(t.high[0], t.high[1], which);
        high += 2 * pick_bytes(0x40404040u, 0x40404040u, word >> 16 * i); /* the sign */
        pairs[2 * i] = pick_bytes(low, high, 0x5140);
        pairs[2 * i + 1] = pick_bytes(low, high, 0x7362);
    }
}

/* squares += the diagonal of 16 keys times themselves, 16 dims of each: of key g in elements 0 and
 * 1 of the first, of key g + 8 in elements 2 and 3 of the last, as column g has it. FEW: the left
 * side is the one that queries meet, in registers that stand there. */
template <int FEW>
static __device__ __forceinline__ void add_squares(float (&squares)[FEW ? 2 : 1][4], uint32_t x0,
                                                   uint32_t x1, uint32_t y0, uint32_t y1)
{
    const uint32_t low[4] = {x0, FEW ? y0 : 0, x1, FEW ? y1 : 0};
    const uint32_t high[4] = {FEW ? x0 : 0, y0, FEW ? x1 : 0, y1};
    multiply<KIND_F16>(squares[0], low, x0, x1);
    multiply<KIND_F16>(squares[FEW ? 1 : 0], high, y0, y1);
}

/* Raw scores of the rows against 16 keys from `first` on, and what those of the lane's keys are
 * multiplied by: the key's norm over its levels' length. */
template <int D, int FEW>
static __device__ __forceinline__ void
dot_levels(const char *stage, const sm80_plane &plane, int bits, const char *sq, const char *rest,
           bool has_rest, const lane_queries<D, FEW> &queries, int first, int lane, bool high_rows,
           float (*s)[4], float (*factors)[2])
{
    constexpr int words = D / 32, batch = words > 4 ? 4 : words; /* words loaded together */
    const int g = lane >> 2, c = lane & 3;
    const level_table table = levels_of(bits);
    float squares[FEW ? 2 : 1][4] = {};
#pragma unroll
    for (int from = 0; from < words; from += batch) {
        uint32_t x[2][batch];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int at = plane.at + (first + i * 8 + g) * plane.pitch + (c * words + from) * bits;
            load_codes<batch, true>(stage, at, bits, x[i]);
        }
#pragma unroll
        for (int j = 0; j < batch; j++) {
            uint32_t pairs[2][4];
            const uint32_t(&a)[4] = pairs[0], (&b)[4] = pairs[1];
            widen_levels(table, x[0][j], pairs[0]);
            widen_levels(table, x[1][j], pairs[1]);
            queries.multiply(sq, lane, from + j, high_rows, pairs, s);
            add_squares<FEW>(squares, a[0], a[1], b[0], b[1]);
            add_squares<FEW>(squares, a[2], a[3], b[2], b[3]);
            if (has_rest) {
                queries.from_memory(rest, lane, from + j, high_rows, pairs, s);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) { /* 8 keys each */
        const float(&of_keys)[4] = squares[FEW ? i : 0];
        float mine = (g & 1) != 0 ? of_keys[i * 2 + 1] : of_keys[i * 2];
#pragma unroll
        for (int own = 0; own < (FEW ? 1 : 2); own++) {
            int key = FEW ? g : 2 * c + own;
            float sum = __shfl_sync(0xffffffffu, mine, key * 4 + (key >> 1));
            const __half *norm = (const __half *)(stage + plane.scale_at +
                                                  (first + i * 8 + key) * plane.scale_pitch);
            factors[FEW ? 0 : i][FEW ? i : own] = __half2float(*norm) * rsqrtf(sum);
        }
    }
}

/* Raw scores of the rows against 16 SUBS keys of e4m3 from `first` on, rows of them 4 bytes apart
 * or more. */
template <int D, int FEW, int SUBS, int N>
static __device__ __forceinline__ void dot_e4m3_rows(const char *stage, const sm80_plane &plane,
                                                     const char *sq,
                                                     const lane_queries<D, FEW> &queries, int first,
                                                     int lane, bool high_rows, float (&s)[N][4])
{
    constexpr int chunks = D / 32, each = N / SUBS; /* of 8 dims, of a lane */
    const char *from =
        stage + plane.at + (first + (lane >> 2)) * plane.pitch + (lane & 3) * chunks * 8;
#pragma unroll
    for (int j = 0; j < chunks; j++) {
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            uint32_t pairs[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const uint32_t *x =
                    (const uint32_t *)(from + (sub * 16 + n * 8) * plane.pitch + j * 8);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    pairs[n][2 * i] = widen<KIND_E4M3>(x[i] & 0xffff);
                    pairs[n][2 * i + 1] = widen<KIND_E4M3>(x[i] >> 16);
                }
            }
            queries.multiply(sq, lane, j, high_rows, pairs, &s[sub * each]);
        }
    }
}

/* Where rows of K (index 0) or V of a head lie in a stage: TurboQuant's may begin inside a piece.
 */
template <int KIND>
static __device__ __forceinline__ sm80_plane plane_of_head(const sm80_params &a, int index,
                                                           int32_t head)
{
    sm80_plane plane = a.planes[index];
    if constexpr (KIND >= KIND_LEVELS) {
        int before = bytes_before(a, index == 0 || a.together ? a.p.k : a.p.v, head);
        plane.at += before;
        plane.scale_at += before;
    }
    return plane;
}

/* Steps and lowest values of the lane's keys, `first` the first of the warp's. */
template <int FEW, int N>
static __device__ __forceinline__ void load_steps(const char *stage, const sm80_plane &plane,
                                                  int first, int lane, float (&step)[N][2],
                                                  float (&lowest)[N][2])
{
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        int key = first + sums_at<FEW>::first_key(lane) +
                  sums_at<FEW>::key(i / 2, FEW ? i % 2 * 2 : i % 2);
        const __half *two = (const __half *)(stage + plane.scale_at + key * plane.scale_pitch);
        step[i / 2][i % 2] = __half2float(two[0]);
        lowest[i / 2][i % 2] = __half2float(two[1]);
    }
}

#endif
