/* SPDX-License-Identifier: Apache-2.0 */
/* Where the elements of matrices lie in lanes and registers. Sources: AMD's "CDNA3 Instruction Set
 * Architecture" reference guide, "Matrix Arithmetic Instructions", and "RDNA3 Instruction Set
 * Architecture" reference guide, "Wave Matrix Multiply Accumulate"; the examples of "AMD matrix
 * cores" (GPUOpen) and of "How to accelerate AI applications on RDNA 3 using WMMA" agree.
 *
 * D = A B + C, A of rows x depth, B of depth x columns; `groups` of `rows` lanes make a wave.
 * - A(i, k): lane i + rows * (k / run % groups), element k % run + run * (k / (run * groups)),
 *   counted from the low bits of its registers
 * - B(k, j): lane j + columns * (k / run % groups), the same element
 * - D(i, j), CDNA, 4 registers at a time: lane j + columns * (i / 4 % groups), register
 *   i % 4 + 4 * (i / (4 * groups))
 * - D(i, j), RDNA3: lane j + 16 * (i % 2), register i / 2; lanes 16 .. 31 hold A and B again
 * - D(i, j), RDNA4: lane j + 16 * (i / 8), register i % 8
 */
#ifndef AMD_MATRIX_LAYOUTS_H
#define AMD_MATRIX_LAYOUTS_H

#include <stdint.h>

enum matrix_format {
    MATRIX_F32,
    MATRIX_F16,
    MATRIX_BF16,
    MATRIX_I8,
    MATRIX_E4M3_FNUZ, /* on gfx942: bias 8, 0x80 is the NaN; on gfx950 OCP's */
    MATRIX_E5M2_FNUZ, /* bias 16 */
    MATRIX_E4M3,      /* on gfx12, OCP's: bias 7, 0x7f and 0xff are NaN */
    MATRIX_E5M2       /* OCP's: bias 15, infinities and NaN as IEEE has them */
};

struct matrix_layout {
    const char *name;
    uint8_t a, b; /* enum matrix_format */
    uint8_t rows, columns, depth;
    uint8_t run;  /* elements of a lane that lie together along the depth */
    uint8_t rdna; /* 3, 4: whose form of D; 0: CDNA's */
};

static const struct matrix_layout matrix_layouts[] = {
    {"v_mfma_f32_16x16x4_f32", MATRIX_F32, MATRIX_F32, 16, 16, 4, 1, 0},
    {"v_mfma_f32_32x32x2_f32", MATRIX_F32, MATRIX_F32, 32, 32, 2, 1, 0},
    {"v_mfma_f32_16x16x4f32", MATRIX_F32, MATRIX_F32, 16, 16, 4, 1, 0},
    {"v_mfma_f32_32x32x2f32", MATRIX_F32, MATRIX_F32, 32, 32, 2, 1, 0},
    {"v_mfma_f32_16x16x16_f16", MATRIX_F16, MATRIX_F16, 16, 16, 16, 4, 0},
    {"v_mfma_f32_32x32x8_f16", MATRIX_F16, MATRIX_F16, 32, 32, 8, 4, 0},
    {"v_mfma_f32_16x16x16f16", MATRIX_F16, MATRIX_F16, 16, 16, 16, 4, 0},
    {"v_mfma_f32_32x32x8f16", MATRIX_F16, MATRIX_F16, 32, 32, 8, 4, 0},
    {"v_mfma_f32_16x16x16_bf16", MATRIX_BF16, MATRIX_BF16, 16, 16, 16, 4, 0},
    {"v_mfma_f32_32x32x8_bf16", MATRIX_BF16, MATRIX_BF16, 32, 32, 8, 4, 0},
    {"v_mfma_f32_16x16x16bf16_1k", MATRIX_BF16, MATRIX_BF16, 16, 16, 16, 4, 0},
    {"v_mfma_f32_32x32x8bf16_1k", MATRIX_BF16, MATRIX_BF16, 32, 32, 8, 4, 0},
    {"v_mfma_f32_16x16x32_fp8_fp8", MATRIX_E4M3_FNUZ, MATRIX_E4M3_FNUZ, 16, 16, 32, 8, 0},
    {"v_mfma_f32_16x16x32_bf8_bf8", MATRIX_E5M2_FNUZ, MATRIX_E5M2_FNUZ, 16, 16, 32, 8, 0},
    {"v_mfma_f32_32x32x16_fp8_fp8", MATRIX_E4M3_FNUZ, MATRIX_E4M3_FNUZ, 32, 32, 16, 8, 0},
    {"v_mfma_f32_32x32x16_bf8_bf8", MATRIX_E5M2_FNUZ, MATRIX_E5M2_FNUZ, 32, 32, 16, 8, 0},
    {"v_wmma_f32_16x16x16_f16", MATRIX_F16, MATRIX_F16, 16, 16, 16, 16, 3},
    {"v_wmma_f32_16x16x16_bf16", MATRIX_BF16, MATRIX_BF16, 16, 16, 16, 16, 3},
    {"v_wmma_f32_16x16x16_f16", MATRIX_F16, MATRIX_F16, 16, 16, 16, 4, 4},
    {"v_wmma_f32_16x16x16_bf16", MATRIX_BF16, MATRIX_BF16, 16, 16, 16, 4, 4},
    {"v_wmma_f32_16x16x16_fp8_fp8", MATRIX_E4M3, MATRIX_E4M3, 16, 16, 16, 8, 4},
    {"v_wmma_f32_16x16x16_bf8_bf8", MATRIX_E5M2, MATRIX_E5M2, 16, 16, 16, 8, 4},
};

#endif
