/* SPDX-License-Identifier: Apache-2.0 */
#include "common/layout_id.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "util/hash.h"

/* Not within a block: the distance depends on the number of blocks. */
#define OUTSIDE (-1)

/* A dimension of one element has no stride that counts. */
static int64_t within(const struct attn_kv_view *view, int64_t stride, int64_t count)
{
    return count <= 1 ? 0 : view->num_blocks > 1 && stride >= view->stride_block ? OUTSIDE : stride;
}

/* From the first cache's rows, or a row, to what lies in the same block. */
static int64_t distance(const struct attn_kv_view *view, const void *from, const void *to)
{
    const int64_t bytes = (int64_t)((uintptr_t)to - (uintptr_t)from);
    return bytes > -view->stride_block && bytes < view->stride_block ? bytes : OUTSIDE;
}

static int add_cache(const struct attn_cache_spec *spec, const struct attn_kv_view *view,
                     const struct attn_kv_view *first, char *text, size_t size)
{
    const int32_t pack = view->pack < view->head_size ? view->pack : 0;
    const bool together =
        spec->role <= ATTN_CACHE_CONV && view->stride_block == first->stride_block;
    int length =
        snprintf(text, size,
                 "role=%d dtype=%d heads=%d head_size=%d block=%d rows=%d tokens=%d table=%d of=%d "
                 "slot=%" PRId64 " head=%" PRId64 " pack=%d pack_stride=%" PRId64 " plane=%" PRId64,
                 spec->role, spec->kv_dtype, view->num_heads, view->head_size, spec->block_size,
                 view->block_size, spec->tokens_per_row, spec->table, spec->of,
                 within(view, view->stride_slot, view->block_size),
                 within(view, view->stride_head, view->num_heads), pack,
                 pack > 0 ? within(view, view->stride_pack, 2) : 0,
                 together ? distance(view, first->data, view->data) : OUTSIDE);
    if (view->scale != NULL) {
        length += snprintf(text + length, size - (size_t)length,
                           " scale=%" PRId64 " scale_slot=%" PRId64 " scale_head=%" PRId64,
                           view->scale_stride_block == view->stride_block
                               ? distance(view, view->data, view->scale)
                               : OUTSIDE,
                           within(view, view->scale_stride_slot, view->block_size),
                           within(view, view->scale_stride_head, view->num_heads));
    }
    return length + snprintf(text + length, size - (size_t)length, "\n");
}

void layout_text(const struct attn_layer_desc *layer, const struct attn_cache_spec *specs,
                 const struct attn_kv_view *views, int32_t num_caches, char text[LAYOUT_TEXT_SIZE])
{
    int32_t drafts = 0, checkpoints = 0, values_first = 0;
    for (const struct attn_ext *ext = layer->next; ext != NULL; ext = ext->next) {
        if (ext->id == ATTN_EXT_RECURRENT_DESC) {
            const struct attn_recurrent_desc *recurrent = (const void *)ext;
            drafts = recurrent->num_speculative_tokens;
            checkpoints = recurrent->checkpoint_interval;
        } else if (ext->id == ATTN_EXT_DRAFT_RECURRENT_RULE) {
            values_first = ((const struct attn_recurrent_rule *)(const void *)ext)->values_first;
        }
    }
    int length =
        snprintf(text, LAYOUT_TEXT_SIZE, "attn-layout 1 rope=%d drafts=%d checkpoints=%d%s\n",
                 layer->rope, drafts, checkpoints, values_first ? " values_first=1" : "");
    for (int32_t i = 0; i < num_caches && i < ATTN_MAX_CACHES; i++) {
        length += add_cache(&specs[i], &views[i], &views[0], text + length,
                            (size_t)(LAYOUT_TEXT_SIZE - length));
    }
}

void layout_id(const char *text, char id[LAYOUT_ID_SIZE])
{
    const uint64_t once = hash_bytes(HASH_INIT, text, strlen(text));
    snprintf(id, LAYOUT_ID_SIZE, "%016" PRIx64 "%016" PRIx64, once,
             hash_bytes(once, text, strlen(text)));
}
