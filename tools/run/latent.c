/* SPDX-License-Identifier: Apache-2.0 */
/* Layers whose rows are key and value, and rows of several tokens each in a cache of their own: the
 * row that a token finishes is a compressor's or, without one, the value that is drawn for it.
 * Blocks of both caches hold the same tokens under the same number. */
#include <stdlib.h>
#include <string.h>

#include "engine.h"
#include "support/client.h"
#include "support/number.h"
#include "support/oracle.h"

static bool rotates(const struct run_engine *engine, const struct run_layer *layer)
{
    return engine->config.rotates && layer->source->output_rope.rotary_dim > 0;
}

static attn_status bind(struct run_engine *engine, struct run_layer *layer)
{
    layer->roundings = 1 + rotates(engine, layer); /* an output is rotated as it was rounded */
    return attention_bind(engine, layer);
}

static void bring(struct run_engine *engine, const struct run_layer *layer,
                  const struct batch *batch, int64_t tokens, void *rows, struct layer_io *io,
                  struct more_io *more)
{
    const struct row_terms *t = &layer->terms;
    const int32_t rotary = layer->source->output_rope.rotary_dim;
    if (layer->source->cache.tokens_per_row > 0) {
        more->further[0] = device_tensor(engine, &more->rows, rows, t->dtype, 3,
                                         (int64_t[]){tokens, t->num_kv_heads, t->head_size_v});
        more->caches = EXTENSION(attn_io_caches, ATTN_EXT_IO_CACHES, NULL, .rows = more->further,
                                 .num_rows = 1);
        io->mla.ext.next = &more->caches.ext;
    }
    if (io->io.flags & ATTN_RUN_NO_ATTEND || !rotates(engine, layer)) {
        return;
    }
    more->rotation =
        EXTENSION(attn_io_output_rope, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE, io->mla.ext.next,
                  .positions = memory_upload(&engine->rows, batch->positions,
                                             (size_t)tokens * sizeof *batch->positions),
                  .cos_sin = angles(engine, rotary, &more->cos_sin));
    io->mla.ext.next = &more->rotation.ext;
}

void latent_table(const struct run_group *group, struct attn_batch *batch, int32_t *blocks,
                  struct latent_table *rows)
{
    const int32_t tokens = group->tokens_per_row;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        rows->lens[r] = batch->seq_lens_host[r] / tokens;
        memcpy(blocks + (int64_t)r * group->stride,
               group->table + (int64_t)batch->block_table_row[r] * group->stride,
               (size_t)group->stride * sizeof *blocks);
    }
    for (int64_t i = 0; i < batch->num_slots; i++) { /* blocks hold whole rows */
        const int64_t slot = batch->slot_mapping[i];
        rows->slots[i] = slot % tokens == tokens - 1 ? slot / tokens : -1;
    }
    rows->table = (struct attn_batch_table){.block_table = blocks,
                                            .block_table_stride = group->stride,
                                            .seq_lens = rows->lens,
                                            .seq_lens_host = rows->lens,
                                            .slot_mapping = rows->slots,
                                            .num_slots = batch->num_slots};
    batch->tables = &rows->table;
    batch->num_tables = 1;
    batch->table_stride = sizeof rows->table;
}

/* What a token at `position` sees of `length` own rows and the finished ones after them. */
static int32_t seen_rows(const struct run_layer *layer, const struct step_lists *lists,
                         int32_t token, int32_t position, int32_t length, int32_t *seen)
{
    const int32_t tokens = layer->source->cache.tokens_per_row;
    const int32_t finished = tokens > 0 ? (position + 1) / tokens : 0;
    const int32_t entries = lists->entries != NULL ? lists->form->max_entries : finished;
    int32_t count = 0, first = position - layer->source->desc.window_left;
    for (int32_t j = first > 0 ? first : 0; j <= position; j++) {
        seen[count++] = j;
    }
    for (int32_t i = 0; i < entries; i++) {
        const int32_t row =
            lists->entries != NULL ? lists->entries[(int64_t)token * entries + i] : i;
        if (row >= 0 && row < finished) {
            seen[count++] = length + row;
        }
    }
    return count;
}

static void verify(const struct run_step *step, int32_t request, struct tally *tally)
{
    const struct run_layer *layer = step->layer;
    const struct row_terms *t = &layer->terms;
    const struct step_lists *lists = &step->lists;
    const int32_t r = step->batch->request[request], length = step->batch->seq_lens[request];
    const int32_t first = step->batch->query_start_loc[request];
    const int32_t count = step->batch->query_start_loc[request + 1] - first;
    const int64_t at = (int64_t)first * t->num_q_heads;
    const int32_t d = t->head_size, tokens = layer->source->cache.tokens_per_row;
    const int32_t rows = length + (tokens > 0 ? length / tokens : 0);
    double *keys = command_calloc((size_t)rows * (size_t)(d + 1) + 2 * (size_t)d + 1, sizeof *keys);
    int32_t *seen = command_calloc((size_t)rows, sizeof *seen);
    double *scores = keys + (int64_t)rows * d, *query = scores + rows, *expected = query + d;
    for (int64_t i = 0; i < (int64_t)rows * d; i++) {
        const int64_t row = i / d - length; /* a finished one: its last token's value */
        keys[i] = row < 0 ? number_load(layer->k_history[r], i, t->dtype)
                          : number_load(layer->v_history[r], ((row + 1) * tokens - 1) * d + i % d,
                                        t->dtype);
    }
    for (int64_t i = 0; i < (int64_t)count * t->num_q_heads; i++) {
        const int32_t token = (int32_t)(i / t->num_q_heads);
        const double sink = (double)layer->sinks[i % t->num_q_heads];
        const struct oracle_mla head = {d, 0, d, d, t->scale, NULL, &sink};
        const int32_t n =
            seen_rows(layer, lists, first + token, length - count + token, length, seen);
        for (int32_t e = 0; e < d; e++) {
            query[e] = number_load(step->rows[STEP_Q], (at + i) * d + e, t->dtype);
        }
        oracle_mla(&head, query, keys, seen, n, scores, expected);
        if (rotates(step->engine, layer)) {
            oracle_rotate(expected, d, layer->source->output_rope.rotary_dim, false,
                          length - count + token, -1);
        }
        compare_row(layer, expected, 0, step->rows[STEP_OUT], (at + i) * d, d, NULL, tally);
    }
    free(keys);
    free(seen);
}

const struct run_kind run_latent_kind = {
    .bind = bind, .make_query = attention_query, .verify = verify, .bring = bring};
