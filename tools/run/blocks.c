/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of a group: handed out of a shuffled list, given back, swapped to host memory and in
 * again. */
#include "engine.h"
#include "support/client.h"

attn_status blocks_reserve(struct run_engine *engine, struct run_group *group, int32_t r,
                           int32_t length)
{
    int32_t needed = (length + group->block_size - 1) / group->block_size;
    while (group->held[r] < needed) {
        if (group->num_free == 0) {
            return command_error(&engine->error, ATTN_ERROR_LIMIT, "blocks",
                                 "the cache has no free block left");
        }
        int32_t block = group->free_blocks[--group->num_free];
        group->references[block] = 1;
        group->table[r * group->stride + group->held[r]++] = block;
    }
    return ATTN_OK;
}

void blocks_share(struct run_group *group, int32_t r, int32_t other, int32_t count)
{
    for (int32_t b = 0; b < count; b++) {
        int32_t block = group->table[other * group->stride + b];
        group->references[block]++;
        group->table[(size_t)r * (size_t)group->stride + (size_t)b] = block;
    }
    group->held[r] = count;
}

void blocks_free(struct run_group *group, int32_t r)
{
    while (group->held[r] > 0) {
        int32_t *entry = &group->table[r * group->stride + --group->held[r]];
        if (--group->references[*entry] == 0) {
            group->free_blocks[group->num_free++] = *entry;
        }
        *entry = INT32_MIN;
    }
}

/* Copies a request's blocks of one group between cache and swap space; in comes to other blocks
 * than it left. */
static attn_status swap_group(struct run_engine *engine, int32_t g, int32_t r, bool out)
{
    struct run_group *group = &engine->groups[g];
    OWNED(memory_end)
    struct attn_block_memory *others = command_calloc((size_t)engine->num_layers, sizeof *others);
    OWNED(memory_end) int64_t *pairs = command_calloc(2 * (size_t)group->stride, sizeof *pairs);
    int32_t count = group->held[r], members = 0;
    for (int32_t i = 0; i < engine->num_layers; i++) {
        struct run_layer *layer = &engine->layers[i];
        if (layer->group != g) {
            continue;
        }
        if (layer->swap == NULL && layer->owner == NULL) { /* room for any one request */
            size_t bytes =
                (size_t)group->stride * (size_t)(layer->spec.padded_page_bytes + layer->row_page);
            TRY(engine_take(engine, true, bytes, "swap space", &layer->swap));
        }
        others[members++].base = layer->swap;
    }
    const int32_t *row = group->table + (size_t)r * (size_t)group->stride;
    for (int64_t b = 0; b < count; b++) {
        int64_t block = row[b];
        pairs[2 * b] = out ? block : b;
        pairs[2 * b + 1] = out ? b : block;
    }
    for (int32_t table = 0; table < 1 + (group->tokens_per_row > 0); table++) {
        const struct attn_block_transfer move =
            SIZED(attn_block_transfer, .group = g, .table = table,
                  .kind = out ? ATTN_COPY_DEVICE_TO_HOST : ATTN_COPY_HOST_TO_DEVICE,
                  .other = others, .other_stride = sizeof *others, .pairs = pairs,
                  .num_pairs = count, .stream = engine->stream);
        TRY(engine->api->copy_blocks(engine->model, &move, &engine->error));
        for (int32_t i = 0, m = 0; i < engine->num_layers; i++) { /* those of the other table */
            const struct run_layer *layer = &engine->layers[i];
            if (layer->group == g) {
                others[m++].base = (uint8_t *)layer->swap +
                                   (size_t)group->stride * (size_t)layer->spec.padded_page_bytes;
            }
        }
    }
    return engine_wait(engine);
}

/* One request is out at a time, so each group's swap space holds it from its beginning. */
attn_status blocks_swap(struct run_engine *engine, int32_t r, bool out)
{
    for (int32_t g = 0; g < engine->num_groups; g++) {
        struct run_group *group = &engine->groups[g];
        const struct request *request = &engine->requests[r];
        if (!group->has_cache) {
            continue;
        }
        if (group->recurrent) {
            TRY(gdn_swap(engine, g, r, out));
            continue;
        }
        if (!out) {
            TRY(blocks_reserve(engine, group, r,
                               group->cross ? request->encoder : request->length));
        }
        TRY(swap_group(engine, g, r, out));
        if (out) {
            blocks_free(group, r);
        }
    }
    return ATTN_OK;
}
