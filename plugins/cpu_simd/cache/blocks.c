/* SPDX-License-Identifier: Apache-2.0 */
/* q8_0 and q4_0, ggml's rows: blocks of 32 elements in one piece. Their steps lie inside the rows,
 * so that rows are staged in float32; a code times its step has more bits than bf16. */
#include "cpu_simd/internal.h"

int32_t block_row_bytes(int32_t block_bits, int32_t n)
{
    return n / BLOCK_ELEMENTS * (block_bits == 8 ? BLOCK_BYTES_8 : BLOCK_BYTES_4);
}

void block_row_read(const struct variant *variant, int32_t block_bits, const char *row, float *out,
                    int32_t n)
{
    variant->blocks[block_bits == 8].read(out, (const uint8_t *)row, n);
}

void block_row_write(const struct variant *variant, int32_t block_bits, char *row,
                     const float *values, int32_t n)
{
    variant->blocks[block_bits == 8].write((uint8_t *)row, values, n);
}
