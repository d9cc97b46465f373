/* SPDX-License-Identifier: Apache-2.0 */
#include <attn/draft/mm_encoder.h>

#include "select/layer_ext.h"

#include <string.h>

#include "select/composition.h"
#include "select/names.h"
#include "util/structs.h"
#include "util/counts.h"

#define MAX_CHAIN 64
#define MIN_CACHE_DESC 32 /* size in ABI 0.3 */
#define MAX_CACHE_DESC 4096
#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

attn_status layer_ranges(const char *name, const struct ranged *ranges, size_t count,
                         struct attn_error *error)
{
    for (size_t i = 0; i < count; i++) {
        if (ranges[i].value < ranges[i].min || ranges[i].value > ranges[i].max) {
            return BAD(ranges[i].field, "layer '%s': %s is %d; allowed are %d to %d", name,
                       ranges[i].field, ranges[i].value, ranges[i].min, ranges[i].max);
        }
    }
    return ATTN_OK;
}

/* Copies an extension, cut or zero-filled to `size`; NULL if it is not there. */
static void *copy_ext(struct arena *arena, const struct attn_ext *next, uint32_t id, size_t size,
                      bool *failed)
{
    const struct attn_ext *ext = ext_find(next, id);
    struct attn_ext *copy;
    if (ext == NULL) {
        return NULL;
    }
    copy = arena_alloc(arena, size);
    if (copy == NULL) {
        *failed = true;
        return NULL;
    }
    memcpy(copy, ext, ext->struct_size < size ? ext->struct_size : size);
    copy->struct_size = size;
    copy->next = NULL;
    return copy;
}

static void chain(const struct attn_ext **next, void *ext)
{
    if (ext != NULL) {
        ((struct attn_ext *)ext)->next = *next;
        *next = ext;
    }
}

int32_t layer_vendor_ids(const struct attn_ext *next, uint32_t *ids, int32_t count)
{
    const int32_t most = count + MAX_VENDOR_EXTENSIONS;
    for (int32_t i = 0; next != NULL && i < MAX_CHAIN && count < most; i++, next = next->next) {
        if (ext_is_handed_on(next->id)) {
            ids[count++] = next->id;
        }
    }
    return count;
}

/* In the order in which they stand, behind what is known. */
static void copy_vendors(struct arena *arena, struct layer *layer, const struct attn_ext *next,
                         bool *failed)
{
    const struct attn_ext **last = &layer->desc.next;
    for (; next != NULL && !*failed; next = next->next) {
        if (ext_is_handed_on(next->id)) {
            struct attn_ext *copy = arena_alloc(arena, next->struct_size);
            *failed = copy == NULL;
            if (copy != NULL) {
                memcpy(copy, next, next->struct_size);
                copy->next = NULL;
                *last = copy;
                last = &copy->next;
            }
        }
    }
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

/* A vendor's code is as good as `like`, which is a known one. */
static int32_t known_part(int32_t code, int32_t like)
{
    return code >= ATTN_VENDOR_CODE ? like : code;
}

static attn_status check_cache(const struct layer *layer, const struct attn_cache_desc *caches,
                               int32_t index, struct attn_error *error)
{
    const struct attn_cache_desc *c = &caches[index];
    const struct ranged ranges[] = {
        {"role", known_part(c->role, ATTN_CACHE_EXTRA), ATTN_CACHE_INDEX_K, NUM_CACHE_ROLES - 1},
        {"of", c->of, 0, 1 + index},
        {"table", c->table, 0, ATTN_MAX_TABLES},
        {"kv_dtype", known_part(c->kv_dtype, ATTN_KV_OPAQUE), 1, NUM_KV_DTYPES - 1},
        {"num_heads", c->num_heads, 1, MAX_HEADS},
        {"head_size", c->head_size, 1, MAX_ROW},
        {"block_size", c->block_size, 0, MAX_ROW},
        {"tokens_per_row", c->tokens_per_row, 1, MAX_ROW}};
    attn_status status =
        layer_ranges(layer->desc.name, ranges, sizeof ranges / sizeof *ranges, error);
    for (int32_t i = 0; i < index && status == ATTN_OK; i++) {
        if (c->table > 0 && caches[i].table == c->table &&
            (caches[i].block_size != c->block_size ||
             caches[i].tokens_per_row != c->tokens_per_row)) {
            status = BAD("table",
                         "layer '%s': caches[%d] has blocks of %d rows of %d tokens and caches[%d] "
                         "of %d of %d; those of one table (%d) have the same",
                         layer->desc.name, i, caches[i].block_size, caches[i].tokens_per_row, index,
                         c->block_size, c->tokens_per_row, c->table);
        }
    }
    return status;
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
        given->cache_stride < MIN_CACHE_DESC || given->cache_stride > MAX_CACHE_DESC) {
        return BAD("caches", "layer '%s': %d caches of %d bytes at %p; 1 to %d of %d to %d bytes",
                   name, given->num_caches, given->cache_stride, (const void *)given->caches,
                   ATTN_MAX_CACHES, MIN_CACHE_DESC, MAX_CACHE_DESC);
    }
    if (!layer_has_cache(&layer->desc) || layer->desc.kv_sharing_target != NULL ||
        layer->gdn != NULL) {
        return BAD("caches",
                   "layer '%s' (%s) describes %d caches; a layer that has no keys of its own, or "
                   "states instead, takes none",
                   name, name_of_kind(layer->desc.kind), given->num_caches);
    }
    struct attn_cache_desc *caches = arena_array(arena, (size_t)given->num_caches, sizeof *caches);
    if (caches == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "layers", "no memory for a layer");
    }
    attn_status status = ATTN_OK;
    for (int32_t i = 0; i < given->num_caches && status == ATTN_OK; i++) {
        struct attn_cache_desc *cache = &caches[i];
        status = element_read(cache, sizeof *cache, given->caches, (size_t)given->cache_stride, i,
                              "attn_cache_desc", error);
        cache->tokens_per_row = cache->tokens_per_row > 0 ? cache->tokens_per_row : 1;
        status = status == ATTN_OK ? check_cache(layer, caches, i, error) : status;
    }
    given->caches = caches;
    given->cache_stride = (int32_t)sizeof *caches;
    return status;
}

attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error)
{
    uint32_t known[6 + MAX_VENDOR_EXTENSIONS] = {
        ATTN_EXT_MLA_DESC,         ATTN_EXT_RECURRENT_DESC,   ATTN_EXT_DRAFT_RECURRENT_RULE,
        ATTN_EXT_CONTEXT_PARALLEL, ATTN_EXT_DRAFT_MM_ENCODER, ATTN_EXT_LAYER_CACHES};
    bool failed = false;
    attn_status status =
        ext_check(next, known, layer_vendor_ids(next, known, 6), "attn_layer_desc", error);
    if (status != ATTN_OK) {
        return status;
    }
    layer->mla = copy_ext(arena, next, ATTN_EXT_MLA_DESC, sizeof *layer->mla, &failed);
    layer->gdn = copy_ext(arena, next, ATTN_EXT_RECURRENT_DESC, sizeof *layer->gdn, &failed);
    layer->rule =
        copy_ext(arena, next, ATTN_EXT_DRAFT_RECURRENT_RULE, sizeof *layer->rule, &failed);
    layer->cp = copy_ext(arena, next, ATTN_EXT_CONTEXT_PARALLEL, sizeof *layer->cp, &failed);
    layer->mm_quant =
        copy_ext(arena, next, ATTN_EXT_DRAFT_MM_ENCODER, sizeof *layer->mm_quant, &failed);
    layer->caches = copy_ext(arena, next, ATTN_EXT_LAYER_CACHES, sizeof *layer->caches, &failed);
    layer->desc.next = NULL;
    copy_vendors(arena, layer, next, &failed);
    chain(&layer->desc.next, layer->caches);
    chain(&layer->desc.next, layer->mm_quant);
    chain(&layer->desc.next, layer->cp);
    chain(&layer->desc.next, layer->rule);
    chain(&layer->desc.next, layer->gdn);
    chain(&layer->desc.next, layer->mla);
    return failed ? error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "layers", "no memory for a layer")
                  : copy_caches(arena, layer, error);
}

attn_status layer_check_extensions(struct layer *layer, struct attn_error *error)
{
    attn_status status = ATTN_OK;
    layer->kernel = ATTN_KERNEL_ATTEND;
    layer->attend_size = layer->desc.head_size;
    for (int32_t i = 0; compositions[i] != NULL && status == ATTN_OK; i++) {
        status = compositions[i]->resolve != NULL ? compositions[i]->resolve(layer, error) : status;
    }
    return status;
}

attn_status layer_refuse_extension(const struct layer *layer, const char *extension, bool needed,
                                   struct attn_error *error)
{
    return BAD(extension, "layer '%s' of kind %s %s %s", layer->desc.name,
               name_of_kind(layer->desc.kind), needed ? "needs" : "takes no", extension);
}
