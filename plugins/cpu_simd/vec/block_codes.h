/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's rows of blocks, a float16 step followed by 32 codes, read and written. Reading takes two
 * operations and a conversion for each vector of floats. Writing uses ggml's arithmetic, float32
 * with a product by 1/step, so that the bytes are the same. */
#ifndef CPU_SIMD_BLOCK_CODES_H
#define CPU_SIMD_BLOCK_CODES_H

#include "codes_write.h"

#define LARGEST_F16 65504.0f

INLINE vf block_step(const uint8_t *block)
{
    uint16_t half;
    memcpy(&half, block, sizeof half);
    return vf_set1(number_from_f16(half));
}

static void blocks_of_8_read(float *out, const uint8_t *row, int32_t n)
{
    for (int32_t d = 0; d < n; d += BLOCK_ELEMENTS, row += BLOCK_BYTES_8) {
        vf step = block_step(row);
        for (int32_t i = 0; i < BLOCK_ELEMENTS; i += VF_WIDTH) {
            vf codes = vf_load_int8((const int8_t *)row + BLOCK_STEP_BYTES + i);
            vf_store(out + d + i, vf_mul(codes, step));
        }
    }
}

/* 16 bytes of the baseline ISA: a compiler's loop writes halves, which loads of 16 then wait for.
 */
typedef uint8_t block_bytes __attribute__((vector_size(16)));

static void blocks_of_4_read(float *out, const uint8_t *row, int32_t n)
{
    for (int32_t d = 0; d < n; d += BLOCK_ELEMENTS, row += BLOCK_BYTES_4) {
        int8_t codes[BLOCK_ELEMENTS];
        block_bytes pairs, low, high;
        vf step = block_step(row);
        memcpy(&pairs, row + BLOCK_STEP_BYTES, sizeof pairs);
        low = (pairs & 15) - 8;
        high = (pairs >> 4) - 8;
        memcpy(codes, &low, sizeof low);
        memcpy(codes + sizeof low, &high, sizeof high);
        for (int32_t i = 0; i < BLOCK_ELEMENTS; i += VF_WIDTH) {
            vf_store(out + d + i, vf_mul(vf_load_int8(codes + i), step));
        }
    }
}

/* The largest magnitude of a block; NaN if an element is not finite. */
INLINE float block_largest(const float *x)
{
    float largest = codes_largest(x, BLOCK_ELEMENTS);
    return largest < INFINITY ? largest : NAN;
}

/* The first element that has it. */
INLINE float block_extreme(const float *x)
{
    float largest = block_largest(x);
    uint32_t bits = number_bits(largest);
    int32_t first = BLOCK_ELEMENTS;
    for (int32_t i = 0; i < BLOCK_ELEMENTS; i++) {
        int32_t at = (number_bits(x[i]) & 0x7fffffffu) == bits ? i : BLOCK_ELEMENTS;
        first = at < first ? at : first;
    }
    return largest > 0 ? x[first] : largest;
}

INLINE void put_block_step(uint8_t *block, float step)
{
    float held = step > LARGEST_F16 ? LARGEST_F16 : step < -LARGEST_F16 ? -LARGEST_F16 : step;
    uint16_t half = f32_to_f16(held);
    memcpy(block, &half, sizeof half);
}

/* x inverse + add, held between least and most; NaN, whose codes do not count, becomes most. */
INLINE void block_scaled(float *to, const float *x, float inverse, float add, float least,
                         float most)
{
    for (int32_t i = 0; i < BLOCK_ELEMENTS; i += VF_WIDTH) {
        vf q = vf_mul(vf_load(x + i), vf_set1(inverse)); /* rounded before the sum, as ggml's */
        q = vf_min(vf_add(q, vf_set1(add)), vf_set1(most));
        vf_store(to + i, vf_max(q, vf_set1(least)));
    }
}

static void blocks_of_8_write(uint8_t *restrict row, const float *restrict x, int32_t n)
{
    for (int32_t d = 0; d < n; d += BLOCK_ELEMENTS, row += BLOCK_BYTES_8) {
        float scaled[BLOCK_ELEMENTS], step = block_largest(x + d) / 127.0f;
        int8_t *codes = (int8_t *)row + BLOCK_STEP_BYTES;
        put_block_step(row, step);
        block_scaled(scaled, x + d, step > 0 ? 1.0f / step : 0, 0, -127, 127);
        for (int32_t i = 0; i < BLOCK_ELEMENTS; i++) {
            int32_t whole = (int32_t)scaled[i]; /* halves away from zero */
            float part = scaled[i] - (float)whole;
            codes[i] = (int8_t)(whole + (int32_t)(part + part));
        }
        if (step != step) {
            memset(codes, 0, BLOCK_ELEMENTS);
        }
    }
}

/* The extreme becomes code 0, which is -8. */
static void blocks_of_4_write(uint8_t *restrict row, const float *restrict x, int32_t n)
{
    for (int32_t d = 0; d < n; d += BLOCK_ELEMENTS, row += BLOCK_BYTES_4) {
        float scaled[BLOCK_ELEMENTS], step = block_extreme(x + d) / -8.0f;
        uint8_t *codes = row + BLOCK_STEP_BYTES;
        put_block_step(row, step);
        block_scaled(scaled, x + d, step != 0 && step == step ? 1.0f / step : 0, 8.5f, 0, 15);
        for (int32_t i = 0; i < BLOCK_ELEMENTS / 2; i++) {
            int32_t low = (int32_t)scaled[i], high = (int32_t)scaled[i + BLOCK_ELEMENTS / 2];
            codes[i] = (uint8_t)(low | high << 4);
        }
        if (step != step) {
            memset(codes, 0x88, BLOCK_ELEMENTS / 2);
        }
    }
}

static const struct block_kernels block_operations[2] = {
    {.read = blocks_of_4_read, .write = blocks_of_4_write},
    {.read = blocks_of_8_read, .write = blocks_of_8_write}};

#endif
