/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks of a group's layers that move: inside of the caches, to the host's memory and back. */
#include "bind/bound.h"

/* rows of K and V, and their scales where these stand apart; the same of further caches */
#define MAX_PLANES (2 * (2 + ATTN_MAX_CACHES))

/* What a layer keeps of a block in one piece: block b lies at base + b stride. */
struct plane {
    uint8_t *base;
    int64_t stride;
    int64_t bytes;
};

struct planes {
    struct plane planes[MAX_PLANES];
    int32_t count;
};

/* Joins a plane to one that it touches or lies in: K and V in one page, scales after their rows.
 * What stands between the rows of a block goes with them. */
static void add_plane(struct planes *all, struct plane plane)
{
    for (int32_t i = 0; i < all->count; i++) {
        struct plane *p = &all->planes[i];
        bool apart = plane.base > p->base + p->bytes || p->base > plane.base + plane.bytes;
        if (p->stride == plane.stride && !apart) {
            uint8_t *end = p->base + p->bytes;
            end = plane.base + plane.bytes > end ? plane.base + plane.bytes : end;
            p->base = plane.base < p->base ? plane.base : p->base;
            p->bytes = end - p->base;
            return;
        }
    }
    all->planes[all->count++] = plane;
}

static void add_cache(struct planes *all, const attn_layer *layer, const struct cache *cache)
{
    const struct attn_kv_view *view = cache->view;
    const int64_t parts = layer_parts(layer, cache->spec.table), last = parts - 1;
    const int64_t slots = view->block_size - 1, heads = view->num_heads - 1;
    int64_t row = cache->row.data;
    if (layer_has_vendor_pages(layer) && cache < layer->all + layer->num_own) {
        row = layer->spec.page_bytes / parts; /* its strides of slots and heads are 0 */
    } else if (view->pack > 0 && view->pack < view->head_size) {
        int64_t pieces = view->head_size / view->pack;
        row = (pieces - 1) * view->stride_pack + row / pieces;
    }
    add_plane(all, (struct plane){view->data, parts * view->stride_block,
                                  last * view->stride_block + slots * view->stride_slot +
                                      heads * view->stride_head + row});
    if (cache->row.scale > 0 && view->scale != NULL) {
        add_plane(all,
                  (struct plane){view->scale, parts * view->scale_stride_block,
                                 last * view->scale_stride_block + slots * view->scale_stride_slot +
                                     heads * view->scale_stride_head + cache->row.scale});
    }
}

/* Copies of one layer's blocks in a table. In the other memory the planes of a block follow one
 * another. */
static attn_status add_copies(attn_layer *layer, int32_t kind, int32_t table,
                              const struct attn_block_memory *other, struct attn_block_copy *copies,
                              int32_t *count, struct attn_error *error)
{
    struct planes all = {.count = 0};
    int64_t bytes = 0, stride = layer->spec.padded_page_bytes;
    bool out = kind == ATTN_COPY_DEVICE_TO_HOST;
    for (int32_t i = 0; i < layer_num_caches(layer); i++) {
        if (layer->all[i].spec.table == table) {
            add_cache(&all, layer, &layer->all[i]);
            stride += table == 0 && i >= layer->num_own ? layer->all[i].spec.page_bytes : 0;
        }
    }
    for (int32_t i = 0; i < all.count && table > 0; i++) {
        stride = (i > 0 ? stride : 0) + all.planes[i].bytes;
    }
    if (other != NULL && other->stride > 0) {
        stride = other->stride;
    }
    for (int32_t i = 0; i < all.count; i++) {
        const struct plane *mine = &all.planes[i];
        uint8_t *theirs = other == NULL         ? mine->base
                          : other->base != NULL ? (uint8_t *)other->base + bytes
                                                : NULL; /* refused below */
        int64_t their_stride = other != NULL ? stride : mine->stride;
        copies[i] = out ? (struct attn_block_copy){mine->base, theirs, mine->stride, their_stride,
                                                   mine->bytes}
                        : (struct attn_block_copy){theirs, mine->base, their_stride, mine->stride,
                                                   mine->bytes};
        bytes += mine->bytes;
    }
    *count = all.count;
    BAD_IF(other != NULL && (other->base == NULL || other->stride < 0 || bytes > stride), "other",
           "layer '%s': a block takes %lld bytes; the other memory is at %p, %lld bytes from block "
           "to block",
           layer->desc->name, (long long)bytes, other->base,
           (long long)(other->stride != 0 ? other->stride : stride));
    return ATTN_OK;
}

static attn_status check_pairs(attn_model *model, const struct attn_block_transfer *t,
                               struct attn_error *error)
{
    int64_t blocks = INT64_MAX;
    for (int32_t i = 0; i < model->num_layers; i++) {
        attn_layer *layer = &model->layers[i];
        if (layer->group == t->group && layer->owner == layer) {
            ERROR_IF(layer->k_cache.data == NULL, ATTN_ERROR_ORDER, "layer_bind_caches",
                     "layer '%s' has no cache bound", layer->desc->name);
            int64_t own = layer_num_blocks(layer, t->table) / layer_parts(layer, t->table);
            blocks = own < blocks ? own : blocks;
        }
    }
    BAD_IF(blocks == INT64_MAX, "table", "table is %d; no cache of group %d lies in it", t->table,
           t->group);
    for (int64_t i = 0; i < t->num_pairs; i++) {
        bool source_ours = t->kind != ATTN_COPY_HOST_TO_DEVICE,
             target_ours = t->kind != ATTN_COPY_DEVICE_TO_HOST;
        int64_t source = t->pairs[2 * i], target = t->pairs[2 * i + 1];
        BAD_IF(source < 0 || target < 0 || (source_ours && source >= blocks) ||
                   (target_ours && target >= blocks),
               "pairs", "pair %lld is (%lld, %lld); the cache has blocks 0 to %lld", (long long)i,
               (long long)source, (long long)target, (long long)blocks - 1);
    }
    BAD_IF((t->other != NULL) != (t->kind != ATTN_COPY_DEVICE_TO_DEVICE), "other",
           "kind %d %s memory of the other side", t->kind, t->other != NULL ? "takes no" : "needs");
    return ATTN_OK;
}

static attn_status read_transfer(const attn_model *model,
                                 const struct attn_block_transfer *transfer,
                                 struct attn_block_transfer *t, struct attn_error *error)
{
    TRY(struct_read(t, ABI_BLOCK_TRANSFER, transfer, error));
    BAD_IF(model == NULL || t->group < 0 || t->group >= model->num_groups || t->num_pairs < 0 ||
               (t->num_pairs > 0 && t->pairs == NULL),
           "group",
           "model %p, group %d, %lld pairs at %p; a group of the model and an array of pairs",
           (const void *)model, t->group, (long long)t->num_pairs, (const void *)t->pairs);
    return t->other == NULL || element_stride_is_good(ABI_BLOCK_MEMORY, t->other_stride)
               ? ATTN_OK
               : BAD("other_stride", "other_stride is %d; %zu to %d with other", t->other_stride,
                     sizeof *t->other, MAX_ELEMENT);
}

attn_status copy_blocks(attn_model *model, const struct attn_block_transfer *transfer,
                        struct attn_error *error)
{
    struct attn_block_transfer t;
    TRY(read_transfer(model, transfer, &t, error));
    TRY(check_pairs(model, &t, error));
    for (int32_t i = 0; i < model->num_layers; i++) {
        attn_layer *layer = &model->layers[i];
        struct attn_block_copy copies[MAX_PLANES];
        int32_t count = 0;
        const struct instance *instance = layer->served[ATTN_PHASE_DECODE].instance;
        struct attn_block_memory memory;
        if (layer->group != t.group || layer->owner != layer ||
            layer_num_blocks(layer, t.table) == INT64_MAX) {
            continue;
        }
        ERROR_IF(instance->kernels.copy_blocks == NULL, ATTN_ERROR_UNSUPPORTED, "copy_blocks",
                 "%s has no copy_blocks kernel", instance->caps->name);
        TRY_IF(t.other != NULL, element_read(&memory, ABI_BLOCK_MEMORY, t.other, t.other_stride,
                                             layer->slot, error));
        TRY(add_copies(layer, t.kind, t.table, t.other != NULL ? &memory : NULL, copies, &count,
                       error));
        struct attn_copy_blocks_args args = KERNEL_ARGS(
            instance, t.stream, .kind = t.kind, .num_copies = count, .copies = copies,
            .pairs = t.pairs, .num_pairs = t.num_pairs, .copy_stride = (int32_t)sizeof *copies);
        TRY(instance->kernels.copy_blocks(&args, error));
    }
    return ATTN_OK;
}
