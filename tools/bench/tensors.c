/* SPDX-License-Identifier: Apache-2.0 */
/* The batch of a shape, and the tensors that each layer's run reads and writes. */
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/client.h"
#include "support/number.h"
#include "support/random.h"
#include "measured.h"

/* Logits of this standard deviation: real weights are far from uniform. */
#define LOGIT_DEVIATION 4.0

void measured_rows(struct measured *measured, struct memory *memory, struct layer_io *io,
                   enum layer_role role, int64_t tokens)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    const struct layer_rows rows = layer_rows(desc, role);
    const int64_t count = tokens * layer_row_size(rows);
    if (rows.dims == 0) {
        return;
    }
    const bool logits = role == ROLE_Q && desc->kind == ATTN_LAYER_DECODER;
    void *data = role == ROLE_OUT ? memory_take(memory, (size_t)count * number_bytes(rows.dtype))
                                  : memory_normal(memory, rows.dtype, count,
                                                  logits ? LOGIT_DEVIATION : 1, &measured->random);
    layer_io_set(io, role, rows, tokens, measured->session->device.device, data, 0);
}

/* Everything that a run of the layer reads and writes; keys and values if the run writes them. */
static void step_tensors(struct measured *measured, struct layer_io *io, bool writes)
{
    const bool recurrent = measured->layer.desc.kind == ATTN_LAYER_RECURRENT;
    const bool attends = measured->shape.kind != SHAPE_WRITE;
    layer_io_init(io, &measured->layer.desc, measured->session->stream);
    for (enum layer_role role = 0; role < LAYER_ROLES; role++) {
        const bool new_keys = role == ROLE_K || role == ROLE_V;
        if (recurrent || (new_keys ? writes : attends)) {
            measured_rows(measured, &measured->memory, io, role, measured->requests.num_tokens);
        }
    }
    io->io.flags =
        (recurrent || writes ? 0 : ATTN_RUN_NO_WRITE) | (attends ? 0 : ATTN_RUN_NO_ATTEND);
}

/* topk different entries, of `grain` positions each, of each token's request, [T, lists, topk]; -1
 * where the request has fewer. */
static int32_t *draw_lists(struct measured *measured, int32_t topk, int32_t grain, int32_t lists)
{
    const int32_t share = shape_int(&measured->shape, PARAMETER_SHARE);
    const struct requests *requests = &measured->requests;
    int32_t *indices =
        malloc((size_t)requests->num_tokens * (size_t)lists * (size_t)topk * sizeof *indices);
    int32_t *order = command_calloc((size_t)requests->max_seq_len, sizeof *order);
    int32_t *at = indices;
    for (int32_t r = 0; indices != NULL && r < requests->count; r++) {
        int32_t keys = requests->seq_lens[r];
        for (int32_t i = 0; i < keys; i++) {
            order[i] = i;
        }
        for (int32_t n = 0; n < requests->query_lens[r] * lists; n++, at += topk) {
            /* Only what the token may see is moved, so that is what stands in front. */
            if (share > 1 && n / lists % share != 0) {
                memcpy(at, at - (ptrdiff_t)topk * lists, (size_t)topk * sizeof *at);
                continue;
            }
            int32_t seen = (keys - requests->query_lens[r] + n / lists) / grain + 1;
            for (int32_t i = 0; i < topk; i++) {
                int32_t other = i < seen ? i + random_below(&measured->random, seen - i) : -1;
                at[i] = other >= 0 ? order[other] : -1;
                if (other >= 0) {
                    order[other] = order[i];
                    order[i] = at[i];
                }
            }
        }
    }
    free(order);
    return indices;
}

/* slots[t] of the step's own rows: the last query_len positions of each request. */
static void own_slots(const struct measured *measured, int64_t *slots)
{
    const struct requests *requests = &measured->requests;
    int32_t block_size = measured_block(measured);
    for (int32_t r = 0; r < requests->count; r++) {
        const int32_t *row = measured->table + r * measured->table_stride;
        int32_t keys = requests->seq_lens[r];
        for (int32_t p = keys - requests->query_lens[r]; p < keys; p++) {
            *slots++ = (int64_t)row[p / block_size] * block_size + p % block_size;
        }
    }
}

static void shuffle_slots(struct measured *measured, int64_t *slots)
{
    for (int64_t i = measured->requests.num_tokens - 1; i > 0; i--) {
        int64_t other = random_below(&measured->random, (int32_t)(i + 1));
        int64_t kept = slots[i];
        slots[i] = slots[other];
        slots[other] = kept;
    }
}

void measured_rows_table(struct measured *measured, struct attn_batch *batch)
{
    if (measured->layer.cache.tokens_per_row > 0) {
        measured->rows = (struct attn_batch_table){.block_table = batch->block_table,
                                                   .block_table_stride = batch->block_table_stride,
                                                   .seq_lens = batch->seq_lens,
                                                   .seq_lens_host = batch->seq_lens_host};
        batch->tables = &measured->rows;
        batch->num_tables = 1;
        batch->table_stride = sizeof measured->rows;
    }
}

static void paged_batch(struct measured *measured, bool writes)
{
    const struct requests *requests = &measured->requests;
    struct attn_batch *batch = &measured->batch;
    struct memory *memory = &measured->memory;
    size_t entries = (size_t)(requests->count * measured->table_stride);
    batch->block_table = memory_upload(memory, measured->table, entries * sizeof *measured->table);
    batch->block_table_stride = measured->table_stride;
    measured_rows_table(measured, batch);
    if (writes) {
        int64_t *slots = malloc((size_t)requests->num_tokens * sizeof *slots);
        if (slots != NULL) {
            own_slots(measured, slots);
            if (measured->shape.kind == SHAPE_WRITE &&
                measured->shape.value[PARAMETER_SHUFFLE] != 0) {
                shuffle_slots(measured, slots);
            }
        }
        batch->slot_mapping =
            memory_upload(memory, slots, (size_t)requests->num_tokens * sizeof *slots);
        batch->num_slots = requests->num_tokens;
        free(slots);
    }
}

static void gdn_batch(struct measured *measured)
{
    const int32_t count = measured->requests.count, states = measured_states(measured);
    int32_t *numbers = command_calloc((size_t)count * (size_t)states, sizeof *numbers);
    const size_t bytes = (size_t)count * sizeof *numbers;
    for (int32_t i = 0; i < count * states; i++) {
        numbers[i] = i;
    }
    measured->batch_gdn =
        EXTENSION(attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT, NULL,
                  .state_slots = memory_upload(&measured->memory, numbers, bytes * (size_t)states),
                  .state_slots_stride = states);
    measured->batch.next = &measured->batch_gdn.ext;
    for (int32_t r = 0; r < count; r++) {
        numbers[r] = 1;
    }
    if (measured->layer.gdn.num_speculative_tokens > 0) {
        measured->batch_gdn.num_accepted_tokens = memory_upload(&measured->memory, numbers, bytes);
    }
    for (int32_t r = 0; r < count; r++) {
        numbers[r] = measured_ring_tokens(measured, r);
    }
    if (measured->layer.cache.role == ATTN_CACHE_REPLAY) {
        measured->batch_replay =
            EXTENSION(attn_batch_replay, ATTN_EXT_DRAFT_BATCH_REPLAY, NULL,
                      .ring_tokens = memory_upload(&measured->memory, numbers, bytes));
        measured->batch_gdn.ext.next = &measured->batch_replay.ext;
    }
    free(numbers);
}

/* One tree for all requests: draft i sees the first and, of those up to itself, every second. */
static void make_tree(struct measured *measured)
{
    const int32_t drafts = measured->requests.max_query_len;
    const size_t words = ((size_t)drafts + 31) / 32, bytes = (size_t)drafts * words * 4;
    uint32_t *bits = command_calloc((size_t)drafts * words, sizeof *bits);
    for (int32_t i = 0; i < drafts; i++) {
        bits[(size_t)i * words] |= 1;
        for (int32_t j = i; j >= 0; j -= 2) {
            bits[(size_t)i * words + (size_t)j / 32] |= 1u << j % 32;
        }
    }
    measured->batch.tree = memory_upload(&measured->memory, bits, bytes);
    measured->batch.tree_stride_row = (int64_t)words;
    free(bits);
}

static void make_batch(struct measured *measured, bool writes)
{
    const struct requests *requests = &measured->requests;
    size_t count = (size_t)requests->count;
    int32_t *starts = command_calloc(count + 1, sizeof *starts);
    for (size_t r = 0; r < count; r++) {
        starts[r + 1] = starts[r] + requests->query_lens[r];
    }
    struct attn_batch *batch = &measured->batch;
    *batch = client_batch(requests->count, starts, requests->seq_lens); /* due to measured_finish */
    batch->max_query_len = requests->max_query_len;
    batch->max_seq_len = requests->max_seq_len;
    batch->query_start_loc = memory_upload(&measured->memory, starts, (count + 1) * sizeof *starts);
    batch->seq_lens = memory_upload(&measured->memory, requests->seq_lens, count * sizeof(int32_t));
    if (measured->layer.desc.tree_mask != ATTN_TREE_NONE) {
        make_tree(measured);
    }
    if (measured->has_cache) {
        paged_batch(measured, writes);
    } else {
        gdn_batch(measured);
    }
}

attn_status measured_tensors(struct measured *measured, struct attn_error *error)
{
    bool writes =
        measured->shape.kind == SHAPE_WRITE || measured->shape.value[PARAMETER_WRITE] != 0;
    const bool lists = measured->layer.lists.max_entries > 0;
    const int32_t entries = lists ? measured->layer.lists.max_entries : measured->layer.mla.topk;
    const int32_t per_token = lists ? shape_int(&measured->shape, PARAMETER_LISTS) : 1;
    const int32_t *indices = NULL;
    make_batch(measured, writes);
    if (entries > 0) {
        int32_t *host = draw_lists(measured, entries,
                                   lists ? measured->layer.lists.granularity
                                   : measured->layer.cache.tokens_per_row > 0
                                       ? measured->layer.cache.tokens_per_row
                                       : 1,
                                   per_token);
        indices = memory_upload(&measured->memory, host,
                                (size_t)measured->requests.num_tokens * (size_t)per_token *
                                    (size_t)entries * sizeof *host);
        free(host);
    }
    for (int32_t i = 0; i < measured->num_layers; i++) {
        struct layer_io *io = &measured->io[i].step;
        step_tensors(measured, io, writes);
        io->mla.topk_indices = lists ? NULL : indices;
        io->mla.topk_stride = measured->layer.mla.topk;
        if (lists) {
            layer_io_lists(io, indices, per_token, entries);
        }
    }
    return measured->memory.failed ? memory_refused(error) : ATTN_OK;
}
