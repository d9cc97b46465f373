/* SPDX-License-Identifier: Apache-2.0 */
#include "select/layer_ext.h"

#include <string.h>

#include "compose/composition.h"
#include "select/layer_caches.h"
#include "select/names.h"
#include "util/structs.h"

#define MAX_CHAIN 64
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
        if (next->id >= ATTN_EXT_VENDOR) {
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
        if (next->id >= ATTN_EXT_VENDOR) {
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

attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error)
{
    uint32_t known[5 + MAX_VENDOR_EXTENSIONS] = {ATTN_EXT_MLA_DESC, ATTN_EXT_RECURRENT_DESC,
                                                 ATTN_EXT_CONTEXT_PARALLEL, ATTN_EXT_MM_ENCODER,
                                                 ATTN_EXT_LAYER_CACHES};
    bool failed = false;
    attn_status status =
        ext_check(next, known, layer_vendor_ids(next, known, 5), "attn_layer_desc", error);
    if (status != ATTN_OK) {
        return status;
    }
    layer->mla = copy_ext(arena, next, ATTN_EXT_MLA_DESC, sizeof *layer->mla, &failed);
    layer->gdn = copy_ext(arena, next, ATTN_EXT_RECURRENT_DESC, sizeof *layer->gdn, &failed);
    layer->cp = copy_ext(arena, next, ATTN_EXT_CONTEXT_PARALLEL, sizeof *layer->cp, &failed);
    layer->mm_quant = copy_ext(arena, next, ATTN_EXT_MM_ENCODER, sizeof *layer->mm_quant, &failed);
    layer->caches = copy_ext(arena, next, ATTN_EXT_LAYER_CACHES, sizeof *layer->caches, &failed);
    layer->desc.next = NULL;
    copy_vendors(arena, layer, next, &failed);
    chain(&layer->desc.next, layer->caches);
    chain(&layer->desc.next, layer->mm_quant);
    chain(&layer->desc.next, layer->cp);
    chain(&layer->desc.next, layer->gdn);
    chain(&layer->desc.next, layer->mla);
    return failed ? error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "layers", "no memory for a layer")
                  : layer_copy_caches(arena, layer, error);
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
