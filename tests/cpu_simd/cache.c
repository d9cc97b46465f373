/* SPDX-License-Identifier: Apache-2.0 */
/* Caches of batches: every layout and kv_dtype, NaN in every byte that nobody writes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

/* Bits of an element of keys or values. */
static int32_t slot_bits(const struct test_case *test, bool is_v)
{
    switch (test->kv_dtype) {
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        return 4;
    case ATTN_KV_INT8_K:
        return is_v ? 8 * dtype_bytes(test->dtype) : 8;
    case ATTN_KV_AUTO:
        return 8 * dtype_bytes(test->dtype);
    case ATTN_KV_F32:
        return 32;
    case ATTN_KV_F16:
    case ATTN_KV_BF16:
        return 16;
    default:
        return 8;
    }
}

static void make_view(struct attn_kv_view *view, const struct test_case *test, char *base,
                      int64_t blocks, int32_t size, int32_t bits)
{
    int64_t heads = test->kv_heads;
    int64_t slots = test->block_size;
    bool head_major = test->layout == ATTN_KV_LAYOUT_HND;
    *view = (struct attn_kv_view){.struct_size = sizeof(*view),
                                  .data = base,
                                  .num_blocks = blocks,
                                  .block_size = test->block_size,
                                  .num_heads = test->kv_heads,
                                  .head_size = size,
                                  .stride_block = heads * slots * size * bits / 8};
    view->stride_slot = (head_major ? size : heads * size) * bits / 8;
    view->stride_head = (head_major ? slots * size : size) * bits / 8;
    if (test->pack > 0) { /* [N, Hk, D/x, B, x] */
        view->pack = test->pack;
        view->stride_slot = (test->pack * bits + 7) / 8;
        view->stride_pack = slots * view->stride_slot;
        view->stride_head = size / test->pack * view->stride_pack;
        view->stride_block = heads * view->stride_head;
    }
}

static bool has_row_scales(int32_t kv_dtype, bool is_v)
{
    bool both = kv_dtype >= ATTN_KV_FP8_PER_TOKEN_HEAD && kv_dtype <= ATTN_KV_INT4_PER_TOKEN_HEAD;
    return both || (!is_v && (kv_dtype == ATTN_KV_INT8_KV || kv_dtype == ATTN_KV_INT8_K));
}

/* Scales in a plane of their own: [N, Hk, B]. */
static void add_scales(struct attn_kv_view *view, char *plane)
{
    view->scale = plane;
    view->scale_stride_slot = sizeof(float);
    view->scale_stride_head = view->block_size * view->scale_stride_slot;
    view->scale_stride_block = view->num_heads * view->scale_stride_head;
}

/* Blocks are shuffled, block 0 belongs to nobody, table entries past a request's end are wild. */
void make_cache(struct test_data *data)
{
    const struct test_case *test = data->test;
    int32_t columns = 1;
    for (int32_t r = 0; r < test->num_reqs; r++) {
        int32_t blocks = (data->lengths[r] + test->block_size - 1) / test->block_size + 1;
        columns = blocks > columns ? blocks : columns;
    }
    int32_t rows = test->num_reqs + (test->table_rows ? 4 : 0);
    int32_t blocks = 1 + test->num_reqs * columns;
    int32_t *order = filled((size_t)blocks * sizeof(*order), 0);
    for (int32_t i = 0; i < blocks; i++) {
        order[i] = i;
    }
    for (int32_t i = blocks - 1; i > 1; i--) {
        int32_t other = random_int(1, i);
        int32_t kept = order[i];
        order[i] = order[other];
        order[other] = kept;
    }
    data->table = filled((size_t)(rows * columns) * sizeof(int32_t), 0x6f);
    data->num_slots = data->num_keys + 1;
    data->slots = filled((size_t)data->num_slots * sizeof(int64_t), 0);
    int64_t rows_of_side = (int64_t)blocks * test->block_size * test->kv_heads;
    int32_t k_bits = slot_bits(test, false), v_bits = slot_bits(test, true);
    int64_t width = data->layer.head_size_v;
    bool halves = test->pack == 1 && k_bits == 4; /* a byte each */
    int64_t k_bytes = rows_of_side * test->depth * (halves ? 8 : k_bits) / 8;
    int64_t v_bytes = rows_of_side * width * (halves ? 8 : v_bits) / 8;
    int64_t scale_bytes = rows_of_side * (int64_t)sizeof(float);
    data->row_bytes = (size_t)(k_bytes + v_bytes);
    data->cache_bytes = (size_t)(k_bytes + v_bytes + 2 * scale_bytes);
    data->cache = filled(data->cache_bytes, 0xff);
    char *values = (char *)data->cache + k_bytes;
    make_view(&data->k_view, test, data->cache, blocks, test->depth, k_bits);
    make_view(&data->v_view, test, values, blocks, (int32_t)width, v_bits);
    if (has_row_scales(test->kv_dtype, false)) {
        add_scales(&data->k_view, values + v_bytes);
    }
    if (has_row_scales(test->kv_dtype, true)) {
        add_scales(&data->v_view, values + v_bytes + scale_bytes);
    }
    int64_t slot = 0;
    for (int32_t r = 0, next = 1; r < test->num_reqs; r++) {
        data->table_row[r] = test->table_rows ? rows - 1 - r : r;
        int32_t *row = data->table + (int64_t)data->table_row[r] * columns;
        for (int32_t j = 0; j < data->lengths[r]; j++) {
            if (j % test->block_size == 0) {
                row[j / test->block_size] = order[next++];
            }
            data->slots[slot++] =
                (int64_t)row[j / test->block_size] * test->block_size + j % test->block_size;
        }
    }
    data->slots[slot] = -1; /* a row to skip: its k and v are NaN */
    free(order);
    data->batch.block_table = data->table;
    data->batch.block_table_stride = columns;
    data->batch.block_table_rows = rows;
    data->batch.block_table_row = test->table_rows ? data->table_row : NULL;
}

void write_cache(struct test_data *data, const struct backend *writer)
{
    struct attn_write_kv_args write = {.struct_size = sizeof(write),
                                       .instance = writer->instance,
                                       .layer = &data->layer,
                                       .params = &data->params,
                                       .k_cache = &data->k_view,
                                       .v_cache = &data->v_view,
                                       .slot_mapping = data->slots,
                                       .num_slots = data->num_slots,
                                       .k = &data->k,
                                       .v = &data->v};
    struct attn_error error = ATTN_ERROR_INIT;
    if (writer->kernels->write_kv(&write, &error) != ATTN_OK) {
        fprintf(stderr, "write_kv of %s: %s: %s\n", data->test->name, error.field, error.message);
        abort();
    }
    for (size_t i = 0; i < data->row_bytes && data->test->least_code; i++) {
        uint8_t *byte = (uint8_t *)data->cache + i;
        *byte = *byte == 0x81 ? 0x80 : *byte; /* -127 */
    }
}
