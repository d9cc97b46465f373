/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of the keys that a step's queries may see: those that an indexer has chosen, or drawn ones.
 */
#include <string.h>

#include "engine.h"

/* The indexer whose lists the layer attends by, or NULL: the last one before it, which has run. */
static const struct run_layer *indexer_of(const struct run_engine *engine,
                                          const struct run_layer *layer)
{
    while (layer > engine->layers && layer->source->desc.kind != ATTN_LAYER_INDEXER) {
        layer--;
    }
    return layer->source->desc.kind == ATTN_LAYER_INDEXER ? layer : NULL;
}

/* Some entries that a query sees, its last one among them, and what lists nothing: -1 and entries
 * past the end. */
static void draw_list(struct run_engine *engine, const struct attn_index_lists *form,
                      int32_t position, int32_t *list)
{
    const int32_t last = position / form->granularity;
    int32_t count = 0;
    list[count++] = last;
    for (int32_t n = 0; n < last && count < form->max_entries; n++) {
        if (random_below(&engine->random, 3) > 0) {
            list[count++] = n;
        }
    }
    for (int32_t n = count; n < form->max_entries; n++) {
        list[n] = n % 2 == 0 ? -1 : last + 1 + (1 << 20);
    }
    for (int32_t n = 0; n < form->max_entries; n++) {
        const int32_t other = random_below(&engine->random, n + 1), kept = list[n];
        list[n] = list[other];
        list[other] = kept;
    }
}

void lists_of_step(struct run_engine *engine, const struct run_layer *layer,
                   const struct batch *batch, struct step_lists *lists)
{
    const struct run_layer *indexer = indexer_of(engine, layer);
    *lists = (struct step_lists){.form = &layer->source->lists, .per_token = 1};
    const int32_t entries = lists->form->max_entries;
    if (entries == 0) {
        return;
    }
    if (lists->form->groups == ATTN_LISTS_PER_KV_HEAD) {
        lists->per_token = layer->source->desc.num_kv_heads;
    }
    lists->bytes = (size_t)batch->query_start_loc[batch->num_reqs] * (size_t)lists->per_token *
                   (size_t)entries * sizeof *lists->entries;
    lists->entries = command_calloc(1, lists->bytes);
    if (indexer != NULL) {
        memcpy(lists->entries, indexer->lists, lists->bytes);
        return;
    }
    for (int32_t i = 0; i < batch->num_reqs; i++) {
        const int32_t first = batch->query_start_loc[i], end = batch->query_start_loc[i + 1];
        for (int32_t n = first * lists->per_token; n < end * lists->per_token; n++) {
            const int32_t position = batch->seq_lens[i] - end + n / lists->per_token;
            draw_list(engine, lists->form, position, lists->entries + (int64_t)n * entries);
        }
    }
}

int32_t list_keys(const struct step_lists *lists, int32_t token, int32_t group, int32_t position,
                  int32_t *keys)
{
    const int32_t size = lists->form->granularity, entries = lists->form->max_entries;
    const int32_t *list = lists->entries + ((int64_t)token * lists->per_token + group) * entries;
    int32_t count = 0;
    for (int32_t n = 0; n < entries; n++) {
        for (int32_t j = 0; list[n] >= 0 && list[n] <= position / size && j < size; j++) {
            if (list[n] * size + j <= position) {
                keys[count++] = list[n] * size + j;
            }
        }
    }
    return count;
}
