/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of ggml's blocks: codes byte for byte as its float32 arithmetic gives them, steps as the
 * nearest float16, and what is read as the product of both. */
#include "kernels_test.h"
#include "support/number.h"

enum { TIMES = 200, MAX_BYTES = MAX_SIZE / BLOCK_ELEMENTS * BLOCK_BYTES_8 };

static double half_value(const uint8_t *block)
{
    uint16_t bits; /* at any address */
    memcpy(&bits, block, sizeof bits);
    return number_load(&bits, 0, ATTN_DTYPE_F16);
}

/* A row with blocks of every size, some of zeros, beyond float16 or not finite. */
static void fill_blocks(float *x, int32_t n)
{
    for (int32_t d = 0; d < n; d += BLOCK_ELEMENTS) {
        float size = ldexpf(1.0f, (int)draw(36) - 18);
        uint32_t kind = draw(12);
        for (int32_t i = 0; i < BLOCK_ELEMENTS; i++) {
            x[d + i] = kind == 0 ? 0.0f : kind == 1 ? draw_number(1e8f) : draw_number(size);
        }
        if (kind == 2) {
            x[d + (int32_t)draw(BLOCK_ELEMENTS)] = draw(2) ? NAN : -INFINITY;
        } else if (kind == 3) { /* two of the largest magnitude: the first one's sign counts */
            x[d + 9] = 2 * size;
            x[d + 20] = -2 * size;
        }
    }
}

/* The element of the largest magnitude, the first of equals; NaN if one is not finite. */
static float extreme_of(const float *x)
{
    float found = 0;
    for (int32_t i = 0; i < BLOCK_ELEMENTS; i++) {
        if (!isfinite(x[i])) {
            return NAN;
        }
        found = fabsf(x[i]) > fabsf(found) ? x[i] : found;
    }
    return found;
}

static int32_t wanted_code(float x, float inverse, bool eight)
{
    float q = x * inverse;
    float shifted = q + 8.5f;
    return eight ? (int32_t)fmaxf(-127, fminf(127, roundf(q)))
                 : (int32_t)fmaxf(0, fminf(15, floorf(shifted))) - 8;
}

static void check_block(const float *x, const uint8_t *block, const float *read, bool eight)
{
    float extreme = extreme_of(x), step = eight ? fabsf(extreme) / 127 : extreme / -8;
    float inverse = step != 0 ? 1 / step : 0;
    double found = half_value(block), held = fmax(-65504, fmin(65504, (double)step));
    check_near(found, isnan(step) ? NAN : held, fabs(held) * 0x1p-11 + 0x1p-25, "block step", 0, 0);
    for (int32_t i = 0; i < BLOCK_ELEMENTS; i++) {
        int32_t byte = block[2 + (eight ? i : i % 16)];
        int32_t code = eight ? (int8_t)byte : (byte >> i / 16 * 4 & 15) - 8;
        int32_t wanted = isnan(step) ? 0 : wanted_code(x[i], inverse, eight);
        check_near(code, wanted, 0, "block code", i, 0);
        check_near((double)read[i], code * found, 0, "block element", i, 0);
    }
}

void test_blocks(void **state)
{
    static float x[MAX_SIZE], read[MAX_SIZE];
    static uint8_t row[MAX_BYTES];
    for (int32_t time = 0; time < TIMES; time++) {
        bool eight = time % 2 != 0;
        int32_t bytes = eight ? BLOCK_BYTES_8 : BLOCK_BYTES_4;
        int32_t n = BLOCK_ELEMENTS * (1 + (int32_t)draw(MAX_SIZE / BLOCK_ELEMENTS));
        fill_blocks(x, n);
        variant->blocks[eight].write(row, x, n);
        variant->blocks[eight].read(read, row, n);
        for (int32_t b = 0; b < n / BLOCK_ELEMENTS; b++) {
            check_block(x + (ptrdiff_t)b * BLOCK_ELEMENTS, row + (ptrdiff_t)b * bytes,
                        read + (ptrdiff_t)b * BLOCK_ELEMENTS, eight);
        }
    }
    BENCH("q8_0 read, 128", variant->blocks[1].read(read, row, 128))
    BENCH("q4_0 read, 128", variant->blocks[0].read(read, row, 128))
    BENCH("q8_0 write, 128", variant->blocks[1].write(row, x, 128))
    BENCH("q4_0 write, 128", variant->blocks[0].write(row, x, 128))
}
