/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/index_lists.h>
#include <attn/draft/mm_encoder.h>

#include "select/layer_ext.h"

#include <string.h>

#include "select/composition.h"
#include "select/names.h"
#include "util/structs.h"
#include "util/counts.h"

int32_t layer_vendor_ids(const struct attn_ext *next, uint32_t ids[MAX_VENDOR_EXTENSIONS])
{
    int32_t count = 0;
    for (int32_t i = 0; next != NULL && i < MAX_CHAIN && count < MAX_VENDOR_EXTENSIONS;
         i++, next = next->next) {
        if (ext_is_handed_on(next->id)) {
            ids[count++] = next->id;
        }
    }
    return count;
}

/* The core's, in the order of the table, then vendors' in theirs. */
static attn_status copy_chain(struct arena *arena, const struct attn_ext *given,
                              const struct attn_ext **last)
{
    *last = NULL;
    for (int32_t i = ABI_FIRST_EXT; i <= NUM_ABI; i++) {
        const struct abi_struct *row = i < NUM_ABI ? &abi_structs[i] : NULL;
        for (const struct attn_ext *ext = given; ext != NULL; ext = ext->next) {
            if (row != NULL ? ext->id != row->ext_id || row->on != ABI_LAYER_DESC
                            : !ext_is_handed_on(ext->id)) {
                continue;
            }
            const size_t size = row != NULL ? row->size : ext->struct_size;
            struct attn_ext *copy = arena_alloc(arena, size);
            if (copy == NULL) {
                return ATTN_ERROR_OUT_OF_MEMORY;
            }
            ext_copy(copy, ext, size);
            *last = copy;
            last = &copy->next;
        }
    }
    return ATTN_OK;
}

bool declares_extension(const struct attn_backend_caps *caps, uint32_t id)
{
    for (int32_t i = 0; i < caps->num_extensions; i++) {
        if (caps->extensions[i] == id) {
            return true;
        }
    }
    return !ext_is_handed_on(id);
}

void layer_drop_undeclared(struct layer *layer, const struct attn_backend_caps *caps)
{
    const struct attn_ext **at = &layer->desc.next; /* all of them copies in the arena */
    while (*at != NULL) {
        struct attn_ext *ext = (struct attn_ext *)*at;
        if (declares_extension(caps, ext->id)) {
            at = &ext->next;
        } else {
            *at = ext->next;
        }
    }
}

static attn_status check_cache(const struct layer *layer, const struct attn_cache_desc *caches,
                               int32_t index, struct attn_error *error)
{
    const struct attn_cache_desc *c = &caches[index];
    TRY(struct_check(c, ABI_CACHE_DESC, layer->desc.name, error));
    if (c->of < 0 || c->of > 1 + index) {
        return BAD("of", "layer '%s': of is %d; allowed are 0 to %d", layer->desc.name, c->of,
                   1 + index);
    }
    for (int32_t i = 0; i < index; i++) {
        if (c->table > 0 && caches[i].table == c->table &&
            (caches[i].block_size != c->block_size ||
             caches[i].tokens_per_row != c->tokens_per_row)) {
            return BAD("table",
                       "layer '%s': caches[%d] has blocks of %d rows of %d tokens and caches[%d] "
                       "of %d of %d; those of one table (%d) have the same",
                       layer->desc.name, i, caches[i].block_size, caches[i].tokens_per_row, index,
                       c->block_size, c->tokens_per_row, c->table);
        }
    }
    return ATTN_OK;
}

/* Replaces the array of the copied attn_layer_caches by one of today's elements in the arena,
 * defaults of tokens_per_row filled in; each is checked by itself. */
static attn_status copy_caches(struct arena *arena, struct layer *layer, struct attn_error *error)
{
    struct attn_layer_caches *given = layer->caches;
    const char *name = layer->desc.name;
    if (given == NULL) {
        return ATTN_OK;
    }
    if (given->caches == NULL || given->num_caches < 1 || given->num_caches > ATTN_MAX_CACHES ||
        !element_stride_is_good(ABI_CACHE_DESC, given->cache_stride)) {
        return BAD("caches", "layer '%s': %d caches of %d bytes at %p; 1 to %d of %zu to %d bytes",
                   name, given->num_caches, given->cache_stride, (const void *)given->caches,
                   ATTN_MAX_CACHES, abi_structs[ABI_CACHE_DESC].minimum, MAX_ELEMENT);
    }
    if (!layer_has_cache(&layer->desc) || layer->desc.kv_sharing_target != NULL ||
        layer->gdn != NULL || layer->indexer != NULL) {
        return BAD("caches",
                   "layer '%s' (%s) describes %d caches; a layer that has no keys of its own, or "
                   "states or index keys instead, takes none",
                   name, name_of_kind(layer->desc.kind), given->num_caches);
    }
    struct attn_cache_desc *caches = arena_array(arena, (size_t)given->num_caches, sizeof *caches);
    if (caches == NULL) {
        return NO_MEMORY("layers", "a layer");
    }
    for (int32_t i = 0; i < given->num_caches; i++) {
        TRY(element_read(&caches[i], ABI_CACHE_DESC, given->caches, given->cache_stride, i, error));
        TRY(check_cache(layer, caches, i, error));
        caches[i].tokens_per_row = caches[i].tokens_per_row > 0 ? caches[i].tokens_per_row : 1;
    }
    given->caches = caches;
    given->cache_stride = (int32_t)sizeof *caches;
    return ATTN_OK;
}

attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error)
{
    uint32_t vendors[MAX_VENDOR_EXTENSIONS];
    const int32_t num_vendors = layer_vendor_ids(next, vendors);
    TRY(ext_check(next, ABI_LAYER_DESC, vendors, num_vendors, error));
    if (copy_chain(arena, next, &layer->desc.next) != ATTN_OK) {
        return NO_MEMORY("layers", "a layer");
    }
    const struct {
        uint32_t id;
        void *pointer;
    } own[] = {{ATTN_EXT_MLA_DESC, &layer->mla},
               {ATTN_EXT_RECURRENT_DESC, &layer->gdn},
               {ATTN_EXT_DRAFT_RECURRENT_RULE, &layer->rule},
               {ATTN_EXT_DRAFT_INDEXER_DESC, &layer->indexer},
               {ATTN_EXT_CONTEXT_PARALLEL, &layer->cp},
               {ATTN_EXT_DRAFT_MM_ENCODER, &layer->mm_quant},
               {ATTN_EXT_DRAFT_INDEX_LISTS, &layer->lists},
               {ATTN_EXT_LAYER_CACHES, &layer->caches}};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        const void *copy = ext_find(layer->desc.next, own[i].id);
        memcpy(own[i].pointer, &copy, sizeof copy);
    }
    for (const struct attn_ext *ext = layer->desc.next; ext != NULL; ext = ext->next) {
        const struct abi_struct *row = abi_find(ext->id, ABI_LAYER_DESC);
        if (row != NULL) {
            TRY(struct_check(ext, (enum abi_id)(row - abi_structs), layer->desc.name, error));
        }
    }
    return copy_caches(arena, layer, error);
}

attn_status layer_check_extensions(struct layer *layer, struct attn_error *error)
{
    layer->kernel = ATTN_KERNEL_ATTEND;
    layer->attend_size = layer->desc.head_size;
    layer->tokens_per_row = 1;
    layer->reads = (layer->desc.rope != ATTN_ROPE_NONE ? ABI_READS(IO_ROPE) : 0) |
                   (layer->caches != NULL ? ABI_READS(IO_CACHES) : 0) |
                   (layer->lists != NULL ? ABI_READS(DRAFT_IO_INDEX_LISTS) : 0) |
                   (layer->desc.output_form != ATTN_OUTPUT_PLAIN ? ABI_READS(IO_OUTPUT_QUANT) : 0);
    for (int32_t i = 0; compositions[i] != NULL; i++) {
        if (compositions[i]->resolve != NULL) {
            TRY(compositions[i]->resolve(layer, error));
        }
    }
    return ATTN_OK;
}

attn_status layer_refuse_extension(const struct layer *layer, const char *extension, bool needed,
                                   struct attn_error *error)
{
    return BAD(extension, "layer '%s' of kind %s %s %s", layer->desc.name,
               name_of_kind(layer->desc.kind), needed ? "needs" : "takes no", extension);
}
