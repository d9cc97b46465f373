/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/latent.h"

#include "support/client.h"
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
