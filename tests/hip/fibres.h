/* SPDX-License-Identifier: Apache-2.0 */
/* The attends on matrix units as fibres of the CPU (gpu/device/target_host.h): what their source
 * takes from AMD's compiler. Included before each of plugins/hip/attend_*.cpp, compiled for the
 * layouts of __gfx950__, __GFX11__ or __GFX12__. A product takes its elements from where the
 * calculator's tables have them (matrix_places.h), which do not depend on the kernels. It ends the
 * process if a wave's lanes do not reach it together. */
#ifndef HIP_FIBRES_H
#define HIP_FIBRES_H

#include "gpu/device/target.h"
#include "matrix_places.h"

#define PRODUCT_WORDS 8 /* a lane has at most so many in A and in B */

#if defined(__gfx950__)
static const matrix_places *const product_places = &cdna_places;
static const code_places *const product_codes = &cdna3_codes;
#elif defined(__GFX11__)
static const matrix_places *const product_places = &rdna3_places;
static const code_places *const product_codes = nullptr;
#elif defined(__GFX12__)
static const matrix_places *const product_places = &rdna4_places;
static const code_places *const product_codes = &rdna4_codes;
#else
#error "matrix_places.h has tables for __gfx950__, __GFX11__ and __GFX12__"
#endif

enum product_kind { PRODUCT_F16, PRODUCT_BF16, PRODUCT_E4M3 };

/* What the lanes of a wave bring to a product. */
inline struct product_input {
    uint32_t a[GPU_LANES][PRODUCT_WORDS], b[GPU_LANES][PRODUCT_WORDS];
} product_inputs[GPU_HOST_THREADS / GPU_LANES];

/* The element at a table's place: of 16 bits register * 256 + lane * 2 + half, of codes
 * register * 256 + lane * 4 + byte. */
static inline float product_element(const uint32_t (*words)[PRODUCT_WORDS], int place,
                                    product_kind kind)
{
    const int of_word = kind == PRODUCT_E4M3 ? 4 : 2, bits = 32 / of_word;
    uint32_t word = words[place % 256 / of_word][place / 256];
    uint32_t x = word >> place % of_word * bits & ((1u << bits) - 1);
    return kind == PRODUCT_F16    ? float_of_half_bits((uint16_t)x)
           : kind == PRODUCT_BF16 ? bits_float(x << 16)
                                  : float_of_fp8(false, (uint8_t)x);
}

/* Row and column of D in a lane's register. */
static inline void find_sum(int place, int &row, int &column)
{
    static struct {
        bool known;
        uint8_t row, column;
    } found[PRODUCT_WORDS * 256];
    if (!found[place].known) {
        for (int i = 0; i < 256; i++) {
            found[product_places->d[i / 16][i % 16]] = {true, (uint8_t)(i / 16), (uint8_t)(i % 16)};
        }
    }
    row = found[place].row;
    column = found[place].column;
}

/* D = A B + C, this lane's part of it. The integers are MFMA's, which kernels leave 0. */
template <class PART, class SUM>
static inline SUM fibre_product(product_kind kind, const PART &a, const PART &b, SUM c, int = 0,
                                int = 0, int = 0, const char *file = __builtin_FILE(),
                                int line = __builtin_LINE())
{
    product_input &in = product_inputs[thread_index() / GPU_LANES];
    const bool codes = kind == PRODUCT_E4M3;
    static_assert(sizeof a <= sizeof in.a[0], "room for a lane's part");
    memcpy(in.a[own_lane()], &a, sizeof a);
    memcpy(in.b[own_lane()], &b, sizeof b);
    sync_lanes(file, line);
    for (int e = 0; e < (int)(sizeof c / sizeof(float)); e++) {
        int i, j;
        find_sum(e * 256 + own_lane() * 2, i, j);
        double sum = c[e];
        for (int k = 0; k < (codes ? product_codes->depth : 16); k++) {
            float x = product_element(
                in.a, codes ? product_codes->a[i][k] : product_places->a[i][k], kind);
            float y = product_element(
                in.b, codes ? product_codes->b[j][k] : product_places->b[k][j], kind);
            sum += (double)x * y;
        }
        c[e] = (float)sum;
    }
    sync_lanes(file, line);
    return c;
}

/* v_perm_b32: a byte of the result for each byte of `selector`, of low (0 to 3), high (4 to 7), or
 * 0 (12). */
static inline uint32_t fibre_permute(uint32_t high, uint32_t low, uint32_t selector)
{
    const uint64_t both = (uint64_t)high << 32 | low;
    uint32_t to = 0;
    for (int i = 0; i < 4; i++) {
        uint32_t from = selector >> 8 * i & 0xff;
        to |= (from < 8 ? (uint32_t)(both >> 8 * from) & 0xff : 0) << 8 * i;
    }
    return to;
}

#define __builtin_amdgcn_mfma_f32_16x16x16f16(...) fibre_product(PRODUCT_F16, __VA_ARGS__)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(...) fibre_product(PRODUCT_BF16, __VA_ARGS__)
#define __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(...) fibre_product(PRODUCT_E4M3, __VA_ARGS__)
#define __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(...) fibre_product(PRODUCT_F16, __VA_ARGS__)
#define __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(...) fibre_product(PRODUCT_BF16, __VA_ARGS__)
#define __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(...)                                      \
    fibre_product(PRODUCT_F16, __VA_ARGS__)
#define __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(...)                                     \
    fibre_product(PRODUCT_BF16, __VA_ARGS__)
#define __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(...)                                  \
    fibre_product(PRODUCT_E4M3, __VA_ARGS__)

#define __builtin_amdgcn_perm(high, low, selector) fibre_permute(high, low, selector)
/* With the kernels' selectors: the same lane of the other row of 16. */
#define __builtin_amdgcn_permlanex16(x, ...) lane_xor(x, 16)
#define __builtin_amdgcn_readlane(x, lane) lane_read(x, lane)
#define __builtin_amdgcn_readfirstlane(x) lane_read(x, 0)
#define __builtin_amdgcn_exp2f(x) exp2f(x)
#define __builtin_amdgcn_sched_barrier(x) (void)0

#define HIP_ATTEND_KERNEL(kind, KIND, size, rows)                                                  \
    extern "C" void kernel_attend_##kind##_##size##_##rows(const gpu_params &p)                    \
    {                                                                                              \
        using S = shape<KIND_##KIND, size, (rows) / 16, HIP_ATTEND_WARPS(rows)>;                   \
        GPU_SHARED attend_memory<S> memory;                                                        \
        attend<S>(p, memory);                                                                      \
    }

#endif
