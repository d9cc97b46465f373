/* SPDX-License-Identifier: Apache-2.0 */
/* One name for the layout of a layer's caches: a hash of its description in words. */
#include "caches.h"

#include <attn/draft/recurrent.h>
#include <inttypes.h>
#include <stdarg.h>
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

/* false: there is no room. */
static bool write_text(const struct attn_layer_desc *layer, const struct caches *caches, char *text)
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
        snprintf(text, ATTN_LAYOUT_TEXT_SIZE, "attn-layout 1 rope=%d drafts=%d checkpoints=%d%s\n",
                 layer->rope, drafts, checkpoints, values_first ? " values_first=1" : "");
    for (int32_t i = 0; i < caches->count; i++) {
        char line[512]; /* which no numbers exceed */
        const int count =
            add_cache(&caches->specs[i], &caches->views[i], &caches->views[0], line, sizeof line);
        if (length + count >= ATTN_LAYOUT_TEXT_SIZE) {
            return false;
        }
        memcpy(text + length, line, (size_t)count + 1);
        length += count;
    }
    return true;
}

attn_status layout_refuse(struct attn_error *error, attn_status status, const char *field,
                          const char *format, ...)
{
    if (error != NULL && error->struct_size >= sizeof *error) {
        va_list values;
        error->status = status;
        snprintf(error->field, sizeof error->field, "%s", field);
        va_start(values, format);
        vsnprintf(error->message, sizeof error->message, format, values);
        va_end(values);
    }
    return status;
}

attn_status caches_read(const struct attn_api *api, const struct attn_layout_side *side,
                        struct caches *caches, struct attn_error *error)
{
    static const struct attn_layout_side none;
    side = side != NULL ? side : &none;
    if (api == NULL || side->struct_size < sizeof *side || side->layer == NULL ||
        side->desc == NULL) {
        return layout_refuse(
            error, ATTN_ERROR_INVALID_ARGUMENT, "layer",
            "api %p, a struct of %zu bytes, layer %p, desc %p; %zu bytes and all three are needed",
            (const void *)api, side->struct_size, (void *)side->layer, (const void *)side->desc,
            sizeof *side);
    }
    attn_status status = ATTN_OK;
    caches->count = api->layer_num_caches(side->layer);
    if (caches->count < 0 || caches->count > MAX_LAYER_CACHES) {
        return layout_refuse(error, ATTN_ERROR_LIMIT, "caches", "the layer has %d; %d at most",
                             caches->count, MAX_LAYER_CACHES);
    }
    for (int32_t i = 0; i < caches->count && status == ATTN_OK; i++) {
        caches->specs[i] = (struct attn_cache_spec){.struct_size = sizeof caches->specs[i]};
        caches->views[i] = (struct attn_kv_view){.struct_size = sizeof caches->views[i]};
        status = api->layer_cache_spec(side->layer, i, &caches->specs[i], error);
        if (status == ATTN_OK) {
            status = api->layer_cache_view(side->layer, i, &caches->views[i], error);
        }
    }
    return status;
}

attn_status attn_layout_id(const struct attn_api *api, const struct attn_layout_side *layer,
                           char *id, char *text, struct attn_error *error)
{
    struct caches caches;
    const attn_status status = caches_read(api, layer, &caches, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (id == NULL || text == NULL) {
        return layout_refuse(error, ATTN_ERROR_INVALID_ARGUMENT, id == NULL ? "id" : "text",
                             "is NULL; id and text are needed");
    }
    if (!write_text(layer->desc, &caches, text)) {
        text[0] = '\0';
        return layout_refuse(error, ATTN_ERROR_LIMIT, "text",
                             "%d caches take more than ATTN_LAYOUT_TEXT_SIZE, %d bytes",
                             caches.count, ATTN_LAYOUT_TEXT_SIZE);
    }
    const uint64_t once = hash_bytes(HASH_INIT, text, strlen(text));
    snprintf(id, ATTN_LAYOUT_ID_SIZE, "%016" PRIx64 "%016" PRIx64, once,
             hash_bytes(once, text, strlen(text)));
    return ATTN_OK;
}
