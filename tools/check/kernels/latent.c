/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/latent.h"

#include <math.h>

#include "support/client.h"
#include "support/kv_format.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"

void latent_init(struct latent_batch *b)
{
    b->starts[0] = b->first_row;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        b->starts[r + 1] = b->starts[r] + b->queries[r];
        b->lens[r] = b->before[r] + b->queries[r];
        b->num_context += b->before[r];
    }
    b->num_actual_rows = b->starts[b->num_reqs];
    b->num_rows = b->num_actual_rows + b->padding;
    b->num_slots = b->num_actual_rows - b->first_row;
    b->longest = b->columns * LATENT_BLOCK;
}

int64_t latent_slot(const struct latent_batch *b, const int32_t *table, int32_t r, int64_t row)
{
    const int32_t in_block = latent_rows_in_block(b);
    return (int64_t)table[r * b->columns + row / in_block] * in_block + row % in_block;
}

static int64_t num_blocks(const struct latent_batch *b)
{
    return b->num_reqs * b->columns + b->spare_blocks;
}

void latent_operands(const struct latent_batch *b, int32_t dtype, int64_t heads, int64_t width,
                     size_t row_bytes, double deviation, struct operand *o)
{
    const size_t rows = (size_t)(num_blocks(b) * latent_rows_in_block(b));
    const struct operand mine[LATENT_OPERANDS] = {
        [LATENT_Q] = {"q", dtype, 3, {b->num_rows, heads, width}, .deviation = 2 * deviation},
        [LATENT_ROWS] = {"k", dtype, 3, {b->num_slots, 1, width}, .deviation = deviation},
        [LATENT_CONTEXT] =
            {"rows of earlier steps", dtype, 3, {b->num_context, 1, width}, .deviation = deviation},
        [LATENT_CACHE] = {"k_cache", .bytes = rows * row_bytes, .written = true},
        [LATENT_SEQ_LENS] = {"seq_lens", .bytes = sizeof b->lens, .from = b->lens},
        [LATENT_STARTS] = {"query_start_loc", .bytes = sizeof b->starts, .from = b->starts},
        [LATENT_TABLE] = {"block_table", .bytes = (size_t)(b->num_reqs * b->columns) * 4},
        [LATENT_SLOTS] = {"slot_mapping", .bytes = (size_t)b->num_slots * sizeof(int64_t)},
        [LATENT_CONTEXT_SLOTS] = {"slots of earlier steps",
                                  .bytes = (size_t)b->num_context * sizeof(int64_t)},
    };
    memcpy(o, mine, sizeof mine);
}

void latent_fill(const struct latent_batch *b, struct kernel_test *test, uint64_t *random)
{
    int32_t *table = test_input(test, LATENT_TABLE);
    int64_t *slots = test_input(test, LATENT_SLOTS);
    int64_t *earlier = test_input(test, LATENT_CONTEXT_SLOTS);
    random_order(random, table, b->num_reqs * b->columns, b->spare_blocks);
    for (int32_t r = 0; r < b->num_reqs; r++) {
        const int32_t *row = table + r * b->columns;
        for (int32_t j = 0; j < b->lens[r]; j++) {
            const int64_t slot = (int64_t)row[j / LATENT_BLOCK] * LATENT_BLOCK + j % LATENT_BLOCK;
            *(j < b->before[r] ? earlier++ : slots++) = slot;
        }
    }
}

void latent_bind(const struct latent_batch *b, struct kernel_call *call, struct latent_step *s)
{
    const int64_t in_block = latent_rows_in_block(b);
    const int64_t row =
        (int64_t)call->test->operands[LATENT_CACHE].bytes / num_blocks(b) / in_block;
    struct attn_tensor *t = call->tensors;
    int32_t queries = 0;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        queries = b->queries[r] > queries ? b->queries[r] : queries;
    }
    s->batch =
        SIZED(attn_batch, .num_reqs = b->num_reqs, .num_tokens = b->num_rows,
              .num_actual_tokens = b->num_actual_rows, .max_query_len = queries,
              .max_seq_len = b->longest + b->spare_len,
              .query_start_loc = call_array(call, LATENT_STARTS), .query_start_loc_host = b->starts,
              .seq_lens = call_array(call, LATENT_SEQ_LENS), .seq_lens_host = b->lens,
              .block_table = call_array(call, LATENT_TABLE), .block_table_stride = b->columns,
              .block_table_rows = b->num_reqs, .slot_mapping = call_array(call, LATENT_SLOTS),
              .num_slots = b->num_slots);
    s->view = SIZED(attn_kv_view, .data = call_array(call, LATENT_CACHE),
                    .num_blocks = num_blocks(b), .block_size = (int32_t)in_block, .num_heads = 1,
                    .head_size = (int32_t)call->shapes[LATENT_ROWS][2],
                    .stride_block = in_block * row, .stride_slot = row, .stride_head = row);
    s->write =
        SIZED(attn_write_kv_args, .instance = call->backend->instance, .layer = &s->layer,
              .params = &s->params, .k_cache = &s->view, .slot_mapping = s->batch.slot_mapping,
              .num_slots = b->num_slots, .stream = call->stream, .k = &t[LATENT_ROWS]);
    s->attend =
        SIZED(attn_attend_args, .layer = &s->layer, .params = &s->params, .batch = &s->batch,
              .k_cache = &s->view, .stream = call->stream, .flags = ATTN_RUN_NO_WRITE,
              .phase = ATTN_PHASE_DECODE, .q = &t[LATENT_Q], .out = &t[LATENT_OUT]);
}

attn_status latent_call(const struct latent_batch *b, struct kernel_call *call,
                        struct latent_step *s, planned_kernel *kernel, struct attn_error *error)
{
    const struct attn_limits limits = client_limits(
        b->num_reqs, b->num_rows, s->batch.max_query_len, b->longest + b->spare_len, b->columns);
    attn_status status = call->backend->kernels.write_kv(&s->write, error);
    return status == ATTN_OK
               ? planned_call(call->backend, call->device, &limits, &s->attend, kernel, error)
               : status;
}

enum trial_result latent_run(const struct latent_batch *b, struct kernel_test *test,
                             struct kernel_call *call, struct latent_step *s, kernel_call_run *run,
                             const void *context)
{
    struct trial *trial = test->trial;
    struct attn_error error = ATTN_ERROR_INIT;
    s->write.next = NULL;
    s->write.k = &call->tensors[LATENT_CONTEXT];
    s->write.slot_mapping = call_array(call, LATENT_CONTEXT_SLOTS);
    s->write.num_slots = b->num_context;
    TRIAL_CALL(trial, "reference write_kv", trial->reference->kernels.write_kv(&s->write, &error),
               &error);
    return trial_of_layer(trial, &s->layer,
                          trial_supports(trial, trial->tested, &s->layer, s->attend.phase)
                              ? kernel_test_run(test, run, context)
                              : TRIAL_SKIPPED);
}

struct attn_layer_desc index_layer(int32_t dtype, int32_t kv_dtype, int32_t heads,
                                   int32_t head_size, struct attn_indexer_desc *desc)
{
    struct attn_layer_desc layer = SIZED(
        attn_layer_desc, .name = "indexer", .dtype = dtype, .kv_dtype = kv_dtype,
        .num_q_heads = heads, .head_size = head_size, .window_left = -1, .window_right = -1,
        .block_size = LATENT_BLOCK,
        .k_scale_form = kv_dtype == ATTN_KV_FP8_E4M3 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE);
    layer_set_indexer(&layer, desc);
    return layer;
}

struct attn_kv_view index_view(const struct attn_layer_desc *layer, int64_t num_blocks,
                               int32_t rows_in_block, void *rows, void *scales)
{
    const int64_t row = kv_row_bytes(layer->kv_dtype, false, layer->head_size);
    const int64_t scale = kv_scale_bytes(layer->kv_dtype, false, layer->head_size);
    return SIZED(attn_kv_view, .data = rows, .num_blocks = num_blocks, .block_size = rows_in_block,
                 .num_heads = 1, .head_size = layer->head_size, .stride_block = rows_in_block * row,
                 .stride_slot = row, .stride_head = row, .scale = scale > 0 ? scales : NULL,
                 .scale_stride_block = rows_in_block * scale, .scale_stride_slot = scale,
                 .scale_stride_head = scale);
}

int32_t index_load(const struct attn_layer_desc *layer, const void *rows, const void *row_scales,
                   int64_t at, double scale, double *values, double *scales)
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int32_t size = layer->head_size, kv_dtype = layer->kv_dtype;
    const bool mxfp4 = kv_dtype == ATTN_KV_MXFP4, scaled = kv_dtype == ATTN_KV_FP8_PER_TOKEN_HEAD;
    for (int32_t d = 0; d < size; d++) {
        const int64_t e = at * size + d;
        if (mxfp4) {
            const int32_t code = ((const uint8_t *)rows)[e / 2] >> (e % 2 * 4) & 15;
            const int32_t exponent = ((const uint8_t *)row_scales)[e / 32];
            scales[d] = exponent == 255 ? NAN : ldexp(1, exponent - 127);
            values[d] = scales[d] * (code < 8 ? e2m1[code] : -e2m1[code - 8]);
        } else {
            scales[d] = scaled ? (double)((const float *)row_scales)[at] : scale;
            values[d] = scales[d] * number_load(rows, e, scaled ? ATTN_DTYPE_FP8_E4M3 : kv_dtype);
        }
    }
    return mxfp4 ? 32 : scaled ? size : 1;
}
