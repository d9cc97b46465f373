/* SPDX-License-Identifier: Apache-2.0 */
/* batched_gemm: out[b] = a[b] w[b] w_scale[b] through tile_kernels' gemm. A block of w, 256 rows by
 * 128 columns, is packed once for 48 rows of a: 32 KiB and 0.8 MFLOP in float32, 1.6 in bf16; half
 * as many rows where rows are staged too. Sums are float32. A block is on the stack, of which
 * host.h grants 64 KiB. */
#include "cpu_simd/internal.h"

#define BLOCK_ROWS 48
#define BLOCK_DEPTH_BYTES 256
#define BLOCK_COLUMNS TILE_KEYS

struct gemm_loop {
    const struct attn_batched_gemm_args *args;
    const struct tile_kernels *kernels;
    int32_t a_element; /* enum element_type */
    int32_t w_element; /* enum element_type of w, or ELEMENT_COUNT for mxfp4 */
    int32_t out_element;
    int64_t row_blocks;
    int64_t column_blocks;
    int32_t depth; /* elements of a block */
};

/* Operands of one block in the compute type: w packed, and in the second half rows that pack cannot
 * take as they lie, and after them those of a that gemm cannot. */
struct gemm_block {
    _Alignas(64) char packed[BLOCK_DEPTH_BYTES * BLOCK_COLUMNS];
    _Alignas(64) float sum[BLOCK_ROWS * BLOCK_COLUMNS];
    const void *rows[BLOCK_COLUMNS];
};

static char *stage_of(struct gemm_block *block)
{
    return block->packed + sizeof block->packed / 2;
}

/* `count` elements, `stride` elements apart, to the compute type; zeros up to `padded`. */
static void stage_row(const struct tile_kernels *kernels, int32_t element, char *out,
                      const char *in, int64_t stride, int32_t count, int32_t padded)
{
    int64_t bytes = kernels->element_bytes;
    if (stride == 1) {
        kernels->unpack[element](out, in, count);
    }
    for (int32_t i = 0; i < count && stride != 1; i++) {
        kernels->unpack[element](out + i * bytes, in + i * stride * element_bytes[element], 1);
    }
    memset(out + count * bytes, 0, (size_t)((padded - count) * bytes));
}

/* Can gemm read rows of a where they lie? Their stride is of whole pairs. */
static bool left_in_place(const struct gemm_loop *loop)
{
    const struct attn_tensor *a = loop->args->a;
    return loop->a_element == loop->kernels->element && tensor_stride(a, 2) == 1 &&
           tensor_stride(a, 1) % 2 == 0;
}

/* Rows i .. i+rows-1 and columns p .. p+deep-1 of a[b]: as they lie, or staged. */
static const char *load_left(const struct gemm_loop *loop, struct gemm_block *block, int64_t b,
                             int64_t i, int32_t rows, int64_t p, int32_t deep, int64_t *lda)
{
    const struct attn_tensor *a = loop->args->a;
    const struct tile_kernels *kernels = loop->kernels;
    int64_t stride = tensor_stride(a, 2), bytes = element_bytes[loop->a_element];
    int32_t padded = round_up(deep, DEPTH_MULTIPLE);
    if (padded == deep && left_in_place(loop)) {
        *lda = tensor_stride(a, 1);
        return (const char *)tensor_row(a, b, i) + p * bytes;
    }
    *lda = padded;
    for (int32_t r = 0; r < rows; r++) {
        stage_row(kernels, loop->a_element,
                  stage_of(block) + (int64_t)r * padded * kernels->element_bytes,
                  (const char *)tensor_row(a, b, i + r) + p * stride * bytes, stride, deep, padded);
    }
    return stage_of(block);
}

/* Loads `count` elements of mxfp4 from (i, j) of w[b] on, along its rows or down its columns. An
 * e2m1 is at its offset in elements, two in a byte; its block's scale is at the same position of a
 * tensor with one dimension 32 times shorter. */
static void stage_mxfp4(const struct gemm_loop *loop, char *out, int64_t b, int64_t i, int64_t j,
                        bool down, int32_t count, int32_t padded)
{
    const struct attn_tensor *w = loop->args->w, *scales = loop->args->w_block_scale;
    const struct tile_kernels *kernels = loop->kernels;
    const struct variant *variant = loop->args->instance->variant;
    int32_t row_block = (int32_t)(w->shape[1] / scales->shape[1]);
    int32_t column_block = (int32_t)(w->shape[2] / scales->shape[2]);
    int64_t stride = tensor_stride(w, down ? 1 : 2);
    int64_t at = b * tensor_stride(w, 0) + i * tensor_stride(w, 1) + j * tensor_stride(w, 2);
    const uint8_t *memory = (const uint8_t *)tensor_data(w);
    int8_t codes[BLOCK_COLUMNS];
    float scale[BLOCK_COLUMNS], values[BLOCK_COLUMNS];
    if (stride == 1 && at % 2 == 0) {
        variant->nibbles(codes, memory + at / 2, 0, count);
    }
    for (int32_t n = 0; n < count && (stride != 1 || at % 2 != 0); n++) {
        int64_t element = at + n * stride;
        codes[n] = (int8_t)(memory[element / 2] >> element % 2 * 4 & 15);
    }
    int32_t run = down ? row_block : column_block; /* blocks of w begin at multiples of it */
    for (int32_t n = 0; n < count; n += run) {
        int64_t row = down ? i + n : i, column = down ? j : j + n;
        scale[n / run] = number_of_e8m0(*((const uint8_t *)tensor_row(scales, b, row / row_block) +
                                          column / column_block * tensor_stride(scales, 2)));
    }
    variant->codes->e2m1(values, codes, scale, run, count);
    kernels->unpack[ELEMENT_F32](out, values, count);
    memset(out + count * kernels->element_bytes, 0,
           (size_t)((padded - count) * kernels->element_bytes));
}

/* Rows p .. p+deep-1 and columns j .. j+columns-1 of w[b] as gemm's right operand, of rows *ldb
 * wide. Transposed memory is packed as keys are, else as values. */
static void load_right(const struct gemm_loop *loop, struct gemm_block *block, int64_t b, int64_t p,
                       int32_t deep, int64_t j, int32_t columns, int64_t *ldb)
{
    const struct attn_tensor *w = loop->args->w;
    const struct tile_kernels *kernels = loop->kernels;
    int64_t down = tensor_stride(w, 1), across = tensor_stride(w, 2);
    bool mxfp4 = loop->w_element == ELEMENT_COUNT;
    int64_t bytes = mxfp4 ? 0 : element_bytes[loop->w_element];
    bool transposed = across != 1 && down == 1;
    int32_t count = transposed ? columns : deep, length = transposed ? deep : columns;
    int32_t padded = round_up(length, DEPTH_MULTIPLE);
    bool in_place =
        padded == length && (transposed || across == 1) && loop->w_element == kernels->element;
    const char *first = (const char *)tensor_row(w, b, p) + j * across * bytes;
    for (int32_t r = 0; r < count && mxfp4; r++) {
        block->rows[r] = stage_of(block) + (int64_t)r * padded * kernels->element_bytes;
        stage_mxfp4(loop, (char *)(uintptr_t)block->rows[r], b, transposed ? p : p + r,
                    transposed ? j + r : j, transposed, length, padded);
    }
    for (int32_t r = 0; r < count && !mxfp4; r++) {
        const char *row = first + r * (transposed ? across : down) * bytes;
        char *staged = stage_of(block) + (int64_t)r * padded * kernels->element_bytes;
        if (!in_place) {
            stage_row(kernels, loop->w_element, staged, row, transposed ? down : across, length,
                      padded);
        }
        block->rows[r] = in_place ? row : staged;
    }
    if (transposed) {
        *ldb = TILE_KEYS;
        kernels->pack_keys(block->packed, block->rows, count, round_up(count, COLUMN_MULTIPLE),
                           padded);
        return;
    }
    *ldb = padded;
    kernels->pack_values(block->packed, block->rows, count, round_up(count, DEPTH_MULTIPLE),
                         padded);
}

static void store_rows(const struct gemm_loop *loop, const struct gemm_block *block, int64_t b,
                       int64_t i, int32_t rows, int64_t j, int32_t columns)
{
    const struct attn_batched_gemm_args *args = loop->args;
    const struct variant *variant = args->instance->variant;
    int64_t stride = tensor_stride(args->out, 2), bytes = element_bytes[loop->out_element];
    float scale = args->w_scale == NULL ? 1.0f : args->w_scale[args->w_scale_count > 1 ? b : 0];
    for (int32_t r = 0; r < rows; r++) {
        char *out = (char *)tensor_row(args->out, b, i + r) + j * stride * bytes;
        const float *sum = block->sum + (int64_t)r * BLOCK_COLUMNS;
        if (stride == 1) {
            variant->store[loop->out_element](out, sum, scale, columns);
        }
        for (int32_t c = 0; c < columns && stride != 1; c++) {
            variant->store[loop->out_element](out + c * stride * bytes, sum + c, scale, 1);
        }
    }
}

static void multiply(const struct gemm_loop *loop, struct gemm_block *block, int64_t b, int64_t i,
                     int64_t j)
{
    const struct attn_batched_gemm_args *args = loop->args;
    int64_t depth = args->a->shape[2];
    int64_t rows_left = args->out->shape[1] - i, columns_left = args->out->shape[2] - j;
    int32_t rows = (int32_t)(rows_left < BLOCK_ROWS ? rows_left : BLOCK_ROWS);
    int32_t columns = (int32_t)(columns_left < BLOCK_COLUMNS ? columns_left : BLOCK_COLUMNS);
    memset(block->sum, 0, sizeof block->sum);
    for (int64_t p = 0; p < depth; p += loop->depth) {
        int32_t deep = (int32_t)(depth - p < loop->depth ? depth - p : loop->depth);
        int64_t lda, ldb;
        load_right(loop, block, b, p, deep, j, columns, &ldb);
        const char *a = load_left(loop, block, b, i, rows, p, deep, &lda);
        loop->kernels->gemm(block->sum, BLOCK_COLUMNS, a, lda, block->packed, ldb, rows,
                            round_up(columns, COLUMN_MULTIPLE), round_up(deep, DEPTH_MULTIPLE), 1);
    }
    store_rows(loop, block, b, i, rows, j, columns);
}

/* Items are (b, block of columns, block of rows). */
static void gemm_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gemm_loop *loop = argument;
    const struct variant *variant = loop->args->instance->variant;
    struct gemm_block block;
    enter_variant(variant);
    for (int64_t item = begin; item < end; item++) {
        int64_t i = item % loop->row_blocks;
        int64_t j = item / loop->row_blocks % loop->column_blocks;
        multiply(loop, &block, item / loop->row_blocks / loop->column_blocks, i * BLOCK_ROWS,
                 j * BLOCK_COLUMNS);
    }
    leave_variant(variant);
}

/* Are all rows of both operands as gemm and pack take them? */
static bool in_place(const struct gemm_loop *loop)
{
    const struct attn_tensor *w = loop->args->w;
    return left_in_place(loop) && loop->w_element == loop->kernels->element &&
           (tensor_stride(w, 1) == 1 || tensor_stride(w, 2) == 1) &&
           w->shape[1] % DEPTH_MULTIPLE == 0 && w->shape[2] % DEPTH_MULTIPLE == 0;
}

attn_status simd_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error)
{
    const struct attn_tensor *a = args->a, *w = args->w, *out = args->out;
    struct gemm_loop loop = {.args = args,
                             .a_element = element_of_any(a),
                             .w_element = args->w_block_scale != NULL ? ELEMENT_COUNT /* mxfp4 */
                                                                      : element_of_any(w),
                             .out_element = element_of_any(out)};
    if (loop.a_element < 0 || loop.w_element < 0 || loop.out_element < 0 ||
        loop.out_element > ELEMENT_BF16) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "dtype",
                            "a, w and out have dtype codes %d, %d and %d; a and w f16, bf16, f32, "
                            "fp8 or int8, w also mxfp4 with its block scales, out f16, bf16 or f32",
                            a->dtype.code, w->dtype.code, out->dtype.code);
    }
    /* products of what bf16 holds exactly */
    const struct variant *variant = args->instance->variant;
    bool exact = loop.a_element >= ELEMENT_BF16 && loop.w_element >= ELEMENT_BF16;
    loop.kernels = exact && variant->bf16 != NULL ? variant->bf16 : variant->f32;
    loop.depth = BLOCK_DEPTH_BYTES / loop.kernels->element_bytes / (in_place(&loop) ? 1 : 2);
    loop.row_blocks = (out->shape[1] + BLOCK_ROWS - 1) / BLOCK_ROWS;
    loop.column_blocks = (out->shape[2] + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    return run_parallel(args->instance, out->shape[0] * loop.row_blocks * loop.column_blocks, 1,
                        gemm_items, &loop);
}
