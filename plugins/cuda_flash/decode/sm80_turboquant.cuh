/* SPDX-License-Identifier: Apache-2.0 */
/* TurboQuant's keys in one warp: codes become f16 levels by a table of pairs or, over 128 dims,
 * byte permutations. The levels' squares give a key's length. */
#ifndef CUDA_FLASH_SM80_TURBOQUANT_CUH
#define CUDA_FLASH_SM80_TURBOQUANT_CUH

#include "sm80_4bit.cuh"

/* Low and high bytes of f16 levels; of 4-bit codes by the distance from the middle and without a
 * sign, of 3-bit codes by code. They are TURBOQUANT_LEVELS_4 x 1.73358225 and TURBOQUANT_LEVELS_3 x
 * 1.26067825, the factors with the smallest rounding errors, 7.4e-5 and 2.5e-5. Dividing a key by
 * its length cancels the factor. */
template <int BITS>
constexpr uint32_t level_bytes[4] = {
    BITS == 4 ? 0x898e6220u : 0xf19fc66cu, BITS == 4 ? 0xbc2c9c5bu : 0x6cc69ff1u,
    BITS == 4 ? 0x3e3c3933u : 0xb4bbbec1u, BITS == 4 ? 0x44434140u : 0x413e3b34u};

/* Selects a byte for each of 4 selectors (prmt); with a selector's upper bit, the byte is its sign
 * repeated 8 times. */
GPU_INLINE uint32_t pick_bytes(uint32_t low, uint32_t high, uint32_t which)
{
    uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(low), "r"(high), "r"(which));
    return y;
}

/* Expands a word of 8 codes to 4 pairs of neighbours. */
template <int BITS> GPU_INLINE void widen_levels(uint32_t word, uint32_t (&pairs)[4])
{
    uint32_t below = ~word & 0x88888888u; /* codes of negative levels, which count downwards */
    uint32_t index = (BITS == 4 ? word ^ (below - (below >> 3)) : spread_codes(word)) & 0x77777777u;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t which = index >> 16 * i;
        uint32_t low = pick_bytes(level_bytes<BITS>[0], level_bytes<BITS>[1], which);
        uint32_t high = pick_bytes(level_bytes<BITS>[2], level_bytes<BITS>[3], which);
        if (BITS == 4) {
            high += 2 * pick_bytes(0x40404040u, 0x40404040u, word >> 16 * i); /* the sign */
        }
        pairs[2 * i] = pick_bytes(low, high, 0x5140);
        pairs[2 * i + 1] = pick_bytes(low, high, 0x7362);
    }
}

/* A table in shared memory has the levels of all pairs of codes, in copies for so many lanes each,
 * whose words are in different banks. Its place is a multiple of its size. */
template <int BITS> constexpr int LEVEL_LANES = BITS == 4 ? 16 : 32;
template <int BITS> constexpr int LEVEL_TABLE = (1 << 2 * BITS) * LEVEL_LANES<BITS> * 4; /* bytes */
static_assert(LEVEL_TABLE<4> <= SM80_LEVELS_TABLE && LEVEL_TABLE<3> <= SM80_LEVELS_TABLE,
              "room for them");

/* Writes the table; all consumers call. */
template <int BITS> GPU_INLINE void write_levels(uint32_t table)
{
#pragma unroll 1
    for (int i = threadIdx.x; i < LEVEL_TABLE<BITS> / 4; i += 128) {
        uint32_t pairs[4];
        widen_levels<BITS>(i / LEVEL_LANES<BITS>, pairs);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(table + i * 4), "r"(pairs[0]) : "memory");
    }
}

GPU_INLINE void write_levels_of(int bits, uint32_t table)
{
    if (table % SM80_LEVELS_TABLE != 0) {
        __trap(); /* the system keeps another number of bytes */
    }
    if (bits == 4) {
        write_levels<4>(table);
    } else {
        write_levels<3>(table);
    }
    barrier_consumers(); /* the table is written */
}

/* As widen_levels. `own` is the lane's place in the table's entry 0. */
template <int BITS> GPU_INLINE void find_levels(uint32_t own, uint32_t word, uint32_t (&pairs)[4])
{
    constexpr int at = BITS == 4 ? 6 : 7; /* log2 of an entry's bytes */
    static_assert(LEVEL_LANES<BITS> * 4 == 1 << at, "an entry's bytes");
    constexpr uint32_t mask = ((1 << 2 * BITS) - 1) << at;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int shift = 2 * BITS * i - at;
        const uint32_t entry = (shift < 0 ? word << -shift : word >> shift) & mask;
        asm("ld.shared.b32 %0, [%1];" : "=r"(pairs[i]) : "r"(entry | own));
    }
}

/* The sum of 8 levels' squares, as two f16 that are still to be added. */
GPU_INLINE uint32_t squares_of(const uint32_t (&pairs)[4])
{
    uint32_t x = multiply_halves(pairs[0], pairs[0]);
    x = multiply_add_halves(pairs[1], pairs[1], x);
    x = multiply_add_halves(pairs[2], pairs[2], x);
    return multiply_add_halves(pairs[3], pairs[3], x);
}

/* lengths += the squares of two words of 16 keys, by a product with ones: those of key g in
 * elements 0 and 1, of key g + 8 in 2 and 3; without SWAP, of keys 2 c and 2 c + 1 in elements 0
 * and 1 of two tiles. */
template <int SWAP>
GPU_INLINE void add_squares(float (&lengths)[SWAP ? 1 : 2][4], const uint32_t (&low)[2],
                            const uint32_t (&high)[2])
{
    constexpr uint32_t one = 0x3c003c00u;
    if constexpr (SWAP) {
        const uint32_t a[4] = {low[0], high[0], low[1], high[1]};
        multiply<KIND_F16>(lengths[0], a, one, one);
    } else {
        const uint32_t a[4] = {one, one, one, one};
        multiply<KIND_F16>(lengths[0], a, low[0], low[1]);
        multiply<KIND_F16>(lengths[1], a, high[0], high[1]);
    }
}

/* 1 / sqrt(x); sums of squares of levels are never 0. */
GPU_INLINE float inverse_root(float x)
{
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The factors of scores of the lane's keys: a key's norm over its levels' length. */
template <int SWAP>
GPU_INLINE void length_factors(const char *stage, const sm80_plane &plane, int first, int lane,
                               const float (&lengths)[SWAP ? 1 : 2][4], float (*factors)[2])
{
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; i++) { /* 8 keys each */
#pragma unroll
        for (int own = 0; own < (SWAP ? 1 : 2); own++) {
            const int key = SWAP ? g : 2 * c + own;
            const float square = SWAP ? lengths[0][2 * i] : lengths[i][own];
            const __half *norm = (const __half *)(stage + plane.scale_at +
                                                  (first + i * 8 + key) * plane.scale_pitch);
            factors[SWAP ? 0 : i][SWAP ? i : own] = __half2float(*norm) * inverse_root(square);
        }
    }
}

/* Raw scores against 16 SUBS keys from `first` on, and their factors. Keys alternate, so that no
 * product waits for the previous one. */
template <int D, int SWAP, int BITS, bool HAS_REST, int SUBS>
GPU_INLINE void dot_levels_of(const char *stage, uint32_t table, const sm80_plane &plane,
                              const char *sq, const char *rest,
                              const lane_queries<D, SWAP> &queries, int first, int lane,
                              bool high_rows, float (*acc_s)[4], float (*factors)[2])
{
    constexpr int words = D / 32, each = SWAP ? 1 : 2;
    constexpr int batch = words > 4 ? 4 : words; /* words loaded together */
    const code_place place = place_of_codes(stage, plane.at + (first + (lane >> 2)) * plane.pitch +
                                                       (lane & 3) * words * BITS);
    const uint32_t own = table + lane % LEVEL_LANES<BITS> * 4;
    float lengths[SUBS][SWAP ? 1 : 2][4] = {};
    uint32_t squares[SUBS][2][2]; /* two words, keys 0 - 7 and 8 - 15 */
#pragma unroll
    for (int from = 0; from < words; from += batch) {
        uint32_t x[2 * SUBS][batch];
#pragma unroll
        for (int i = 0; i < 2 * SUBS; i++) {
            load_codes<BITS>(place, i * 8 * plane.pitch + from * BITS, x[i]);
        }
#pragma unroll
        for (int i = 0; i < batch * SUBS; i++) {
            const int j = i / SUBS, sub = i % SUBS;
            uint32_t pairs[2][4];
#pragma unroll
            for (int n = 0; n < 2; n++) {
                if constexpr (D == 128) {
                    find_levels<BITS>(own, x[2 * sub + n][j], pairs[n]);
                } else {
                    widen_levels<BITS>(x[2 * sub + n][j], pairs[n]);
                }
            }
            queries.multiply(sq, lane, from + j, high_rows, pairs, &acc_s[sub * each]);
            squares[sub][0][j % 2] = squares_of(pairs[0]);
            squares[sub][1][j % 2] = squares_of(pairs[1]);
            if (j % 2 != 0) {
                add_squares<SWAP>(lengths[sub], squares[sub][0], squares[sub][1]);
            }
            if (HAS_REST) {
                queries.from_memory(rest, lane, from + j, high_rows, pairs, &acc_s[sub * each]);
            }
        }
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        length_factors<SWAP>(stage, plane, first + sub * 16, lane, lengths[sub],
                             &factors[sub * each]);
    }
}

/* Selects the code for the run-time condition has_rest, so that no branch separates products. With
 * rounding errors, registers do not suffice for alternating keys. */
template <int D, int SWAP, int BITS, int SUBS>
GPU_INLINE void dot_levels_by_rest(const char *stage, uint32_t table, const sm80_plane &plane,
                                   const char *sq, const char *rest, bool has_rest,
                                   const lane_queries<D, SWAP> &queries, int first, int lane,
                                   bool high_rows, float (*acc_s)[4], float (*factors)[2])
{
    if (!has_rest) {
        dot_levels_of<D, SWAP, BITS, false, SUBS>(stage, table, plane, sq, rest, queries, first,
                                                  lane, high_rows, acc_s, factors);
        return;
    }
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        const int at = sub * (SWAP ? 1 : 2);
        /* opaque: the address of the rest is not computed where it is not used */
        dot_levels_of<D, SWAP, BITS, true, 1>(stage, table, plane, sq, rest, queries,
                                              first + sub * 16, SUBS > 1 ? opaque(lane) : lane,
                                              high_rows, acc_s + at, factors + at);
    }
}

template <int D, int SWAP, int SUBS>
GPU_INLINE void dot_levels(const char *stage, uint32_t table, const sm80_plane &plane, int bits,
                           const char *sq, const char *rest, bool has_rest,
                           const lane_queries<D, SWAP> &queries, int first, int lane,
                           bool high_rows, float (*acc_s)[4], float (*factors)[2])
{
    if (bits == 4) {
        dot_levels_by_rest<D, SWAP, 4, SUBS>(stage, table, plane, sq, rest, has_rest, queries,
                                             first, lane, high_rows, acc_s, factors);
    } else {
        dot_levels_by_rest<D, SWAP, 3, SUBS>(stage, table, plane, sq, rest, has_rest, queries,
                                             first, lane, high_rows, acc_s, factors);
    }
}

/* Raw scores against 16 SUBS e4m3 keys from `first` on; rows are aligned to 4 bytes. */
template <int D, int SWAP, int SUBS, int N>
GPU_INLINE void dot_e4m3_rows(const char *stage, const sm80_plane &plane, const char *sq,
                              const lane_queries<D, SWAP> &queries, int first, int lane,
                              bool high_rows, float (&acc_s)[N][4])
{
    constexpr int chunks = D / 32, each = N / SUBS; /* chunks of 8 dims of a lane */
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
            queries.multiply(sq, lane, j, high_rows, pairs, &acc_s[sub * each]);
        }
    }
}

/* The layout of rows of K (index 0) or V in a stage, shifted by `before` bytes: TurboQuant's rows
 * may begin inside a piece (bytes_of_head). */
GPU_INLINE sm80_plane plane_at_offset(const sm80_params &a, int index, int32_t before)
{
    sm80_plane plane = a.planes[index];
    plane.at += before;
    plane.scale_at += before;
    return plane;
}

template <int KIND> GPU_INLINE int32_t bytes_of_head(const sm80_params &a, int index, int32_t head)
{
    return KIND >= KIND_LEVELS ? bytes_before(a, index == 0 || a.together ? a.p.k : a.p.v, head)
                               : 0;
}

template <int KIND>
GPU_INLINE sm80_plane plane_of_head(const sm80_params &a, int index, int32_t head)
{
    return plane_at_offset(a, index, bytes_of_head<KIND>(a, index, head));
}

/* Loads steps and lowest values of the lane's keys; `first` is the warp's first. */
template <int SWAP, int N>
GPU_INLINE void load_steps(const char *stage, const sm80_plane &plane, int first, int lane,
                           float (&step)[N][2], float (&lowest)[N][2])
{
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        int key = first + acc_layout<SWAP>::first_key(lane) +
                  acc_layout<SWAP>::key(i / 2, SWAP ? i % 2 * 2 : i % 2);
        const __half *two = (const __half *)(stage + plane.scale_at + key * plane.scale_pitch);
        step[i / 2][i % 2] = __half2float(two[0]);
        lowest[i / 2][i % 2] = __half2float(two[1]);
    }
}

#endif
