/* SPDX-License-Identifier: Apache-2.0 */
/* Where the ROCm matrix instruction calculator 1.3.2 places each element of 16 x 16 x 16 products,
 * taken neither from the interpreter's layouts nor from the kernels' (--register-layout of
 * v_mfma_f32_16x16x16_f16 on CDNA3, v_wmma_f32_16x16x16_f16 with 32 lanes on RDNA3 and RDNA4).
 * A place is register * 256 + lane * 2 + which half of the register; of RDNA3's A and B the lower
 * lane. In all of the calculator's tables each bit of the row and of the column adds a number of
 * its own to the place: these numbers stand here, the row's 1, 2, 4, 8 and the column's. */
#ifndef HIP_MATRIX_PLACES_H
#define HIP_MATRIX_PLACES_H

#include <stdint.h>

#define SUMS_2(at, one) (at), (at) + (one)
#define SUMS_4(at, one, two) SUMS_2(at, one), SUMS_2((at) + (two), one)
#define SUMS_8(at, one, two, four) SUMS_4(at, one, two), SUMS_4((at) + (four), one, two)
#define SUMS_16(at, one, two, four, eight)                                                         \
    SUMS_8(at, one, two, four), SUMS_8((at) + (eight), one, two, four)
#define SUMS_32(at, one, two, four, eight, sixteen)                                                \
    SUMS_16(at, one, two, four, eight), SUMS_16((at) + (sixteen), one, two, four, eight)
/* Rows of SUMS_16 or SUMS_32; the column's numbers are the last arguments. */
#define ROWS_2(SUMS, at, one, ...)                                                                 \
    {SUMS(at, __VA_ARGS__)},                                                                       \
    {                                                                                              \
        SUMS((at) + (one), __VA_ARGS__)                                                            \
    }
#define ROWS_4(SUMS, at, one, two, ...)                                                            \
    ROWS_2(SUMS, at, one, __VA_ARGS__), ROWS_2(SUMS, (at) + (two), one, __VA_ARGS__)
#define ROWS_8(SUMS, at, one, two, four, ...)                                                      \
    ROWS_4(SUMS, at, one, two, __VA_ARGS__), ROWS_4(SUMS, (at) + (four), one, two, __VA_ARGS__)
#define ROWS_16(SUMS, one, two, four, eight, ...)                                                  \
    ROWS_8(SUMS, 0, one, two, four, __VA_ARGS__), ROWS_8(SUMS, eight, one, two, four, __VA_ARGS__)
#define PLACES(...)                                                                                \
    {                                                                                              \
        ROWS_16(SUMS_16, __VA_ARGS__)                                                              \
    }
#define CODE_PLACES(...)                                                                           \
    {                                                                                              \
        ROWS_16(SUMS_32, __VA_ARGS__)                                                              \
    }

struct matrix_places {
    uint16_t a[16][16], b[16][16], d[16][16]; /* A[i][k], B[k][j], D[i][j] */
};

static const struct matrix_places cdna_places = {
    .a = PLACES(2, 4, 8, 16, 1, 256, 32, 64),
    .b = PLACES(1, 256, 32, 64, 2, 4, 8, 16),
    .d = PLACES(256, 512, 32, 64, 2, 4, 8, 16),
};

static const struct matrix_places rdna3_places = {
    .a = PLACES(2, 4, 8, 16, 1, 256, 512, 1024),
    .b = PLACES(1, 256, 512, 1024, 2, 4, 8, 16),
    .d = PLACES(32, 256, 512, 1024, 2, 4, 8, 16),
};

static const struct matrix_places rdna4_places = {
    .a = PLACES(2, 4, 8, 16, 1, 256, 32, 512),
    .b = PLACES(1, 256, 32, 512, 2, 4, 8, 16),
    .d = PLACES(256, 512, 1024, 32, 2, 4, 8, 16),
};

/* Places of 8-bit codes (v_mfma_f32_16x16x32_fp8_fp8 on CDNA3, v_wmma_f32_16x16x16_fp8_fp8 on
 * RDNA4): register * 256 + lane * 4 + which byte. The calculator has D as for 16-bit elements. */
struct code_places {
    int depth;
    uint16_t a[16][32], b[16][32]; /* A[i][k]; B[k][j] at b[j][k] */
    const uint16_t (*d)[16][16];
};

static const struct code_places cdna3_codes = {
    .depth = 32,
    .a = CODE_PLACES(4, 8, 16, 32, 1, 2, 256, 64, 128),
    .b = CODE_PLACES(4, 8, 16, 32, 1, 2, 256, 64, 128),
    .d = &cdna_places.d,
};

static const struct code_places rdna4_codes = {
    .depth = 16, /* columns from 16 on are not used */
    .a = CODE_PLACES(4, 8, 16, 32, 1, 2, 256, 64, 0),
    .b = CODE_PLACES(4, 8, 16, 32, 1, 2, 256, 64, 0),
    .d = &rdna4_places.d,
};

#endif
