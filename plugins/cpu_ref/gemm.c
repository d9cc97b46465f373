/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm: out[b] = a[b] w[b] w_scale[b], summed in double precision, k ascending. */
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

#define TILE_ROWS 16
#define TILE_COLUMNS 128
#define TILE_DEPTH 16
#define MX_BLOCK 32
#define E8M0_BIAS 127
#define E8M0_NAN 255

/* Elements (b, i .. i+rows-1, j .. j+columns-1) of a 3-D tensor. */
static void load_tile(const struct attn_tensor *tensor, int64_t b, int64_t i, int64_t rows,
                      int64_t j, int64_t columns, double *tile, int64_t tile_stride)
{
    int64_t stride = tensor_stride(tensor, 2), bytes = tensor->dtype.bits / 8;
    int32_t name = number_dtype_name(tensor->dtype);
    double column[TILE_COLUMNS];
    if (stride != 1 && tensor_stride(tensor, 1) == 1 && rows <= TILE_COLUMNS) { /* transposed */
        for (int64_t c = 0; c < columns; c++) {
            const uint8_t *memory = tensor_row(tensor, b, i);
            number_load_row(column, memory + (j + c) * stride * bytes, name, rows);
            for (int64_t r = 0; r < rows; r++) {
                tile[r * tile_stride + c] = column[r];
            }
        }
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const uint8_t *memory = tensor_row(tensor, b, i + r);
        for (int64_t c = 0; c < columns && stride != 1; c++) {
            number_load_row(tile + r * tile_stride + c, memory + (j + c) * stride * bytes, name, 1);
        }
        if (stride == 1) {
            number_load_row(tile + r * tile_stride, memory + j * bytes, name, columns);
        }
    }
}

/* As above for mxfp4: an e2m1 lies at its offset in elements, two a byte, and its block's scale at
 * the same place of a tensor with one dimension 32 times shorter. */
static void load_mxfp4_tile(const struct attn_batched_gemm_args *args, int64_t b, int64_t i,
                            int64_t rows, int64_t j, int64_t columns, double *tile)
{
    const struct attn_tensor *w = args->w, *scales = args->w_block_scale;
    int64_t row_block = w->shape[1] / scales->shape[1],
            column_block = w->shape[2] / scales->shape[2];
    const uint8_t *memory = (const uint8_t *)w->data + w->byte_offset;
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            int64_t at = b * tensor_stride(w, 0) + (i + r) * tensor_stride(w, 1) +
                         (j + c) * tensor_stride(w, 2);
            uint8_t pair = memory[at / 2];
            const uint8_t *scale = (const uint8_t *)tensor_row(scales, b, (i + r) / row_block) +
                                   (j + c) / column_block * tensor_stride(scales, 2);
            double power = *scale == E8M0_NAN ? NAN : ldexp(1, *scale - E8M0_BIAS);
            tile[r * TILE_COLUMNS + c] =
                number_from_e2m1((uint8_t)(at % 2 ? pair >> 4 : pair & 15)) * power;
        }
    }
}

static void store_tile(const struct attn_tensor *out, int64_t b, int64_t i, int64_t rows, int64_t j,
                       int64_t columns, const double *tile)
{
    int64_t stride = tensor_stride(out, 2), bytes = out->dtype.bits / 8;
    for (int64_t r = 0; r < rows; r++) {
        uint8_t *memory = tensor_row(out, b, i + r);
        for (int64_t c = 0; c < columns; c++) {
            number_store_row(memory + (j + c) * stride * bytes, tile + r * TILE_COLUMNS + c,
                             number_dtype_name(out->dtype), 1);
        }
    }
}

static int64_t at_most(int64_t value, int64_t most)
{
    return value < most ? value : most;
}

/* Rows i .. i+rows-1 and columns j .. j+columns-1 of out[b]. */
static void multiply(const struct attn_batched_gemm_args *args, int64_t b, int64_t i, int64_t rows,
                     int64_t j, int64_t columns)
{
    double a[TILE_ROWS * TILE_DEPTH], w[TILE_DEPTH * TILE_COLUMNS];
    double sum[TILE_ROWS * TILE_COLUMNS] = {0};
    int64_t depth = args->a->shape[2];
    double scale = args->w_scale == NULL ? 1 : args->w_scale[args->w_scale_count > 1 ? b : 0];
    for (int64_t k = 0; k < depth; k += TILE_DEPTH) {
        int64_t deep = at_most(depth - k, TILE_DEPTH);
        load_tile(args->a, b, i, rows, k, deep, a, TILE_DEPTH);
        if (args->w_block_scale != NULL) {
            load_mxfp4_tile(args, b, k, deep, j, columns, w);
        } else {
            load_tile(args->w, b, k, deep, j, columns, w, TILE_COLUMNS);
        }
        for (int64_t r = 0; r < rows; r++) {
            for (int64_t d = 0; d < deep; d++) {
                for (int64_t c = 0; c < columns; c++) {
                    sum[r * TILE_COLUMNS + c] += a[r * TILE_DEPTH + d] * w[d * TILE_COLUMNS + c];
                }
            }
        }
    }
    for (int64_t n = 0; n < rows * TILE_COLUMNS; n++) {
        sum[n] *= scale;
    }
    store_tile(args->out, b, i, rows, j, columns, sum);
}

/* Items are (b, block of rows). */
static void gemm_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct attn_batched_gemm_args *args = argument;
    int64_t height = args->out->shape[1], width = args->out->shape[2];
    int64_t blocks = (height + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t item = begin; item < end; item++) {
        int64_t b = item / blocks, i = item % blocks * TILE_ROWS;
        for (int64_t j = 0; j < width; j += TILE_COLUMNS) {
            multiply(args, b, i, at_most(height - i, TILE_ROWS), j,
                     at_most(width - j, TILE_COLUMNS));
        }
    }
}

attn_status ref_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    const struct attn_tensor *out = args->out;
    const struct attn_host *host = args->instance->host;
    int64_t blocks = (out->shape[1] + TILE_ROWS - 1) / TILE_ROWS;
    host->parallel_for(host->user, out->shape[0] * blocks, 1, gemm_items, (void *)(uintptr_t)args);
    return ATTN_OK;
}
