/* SPDX-License-Identifier: Apache-2.0 */
/* The extensions of a layer's description, and its further caches. */
#include "select/layer.h"

#include <stdio.h>
#include <string.h>

#include "select/composition.h"
#include "select/names.h"
#include "util/structs.h"

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
    BAD_IF((c->role == ATTN_CACHE_REPLAY) != (layer->gdn != NULL), "role",
           "layer '%s' (%s): caches[%d] has role %s; replay (%d) %s", layer->desc.name,
           name_of(ATTN_NAMES_LAYER_KIND, layer->desc.kind), index,
           code_text(ATTN_NAMES_CACHE_ROLE, c->role).text, ATTN_CACHE_REPLAY,
           layer->gdn != NULL ? "alone" : "is of recurrent layers");
    BAD_IF(c->of < 0 || c->of > 1 + index, "of", "layer '%s': of is %d; allowed are 0 to %d",
           layer->desc.name, c->of, 1 + index);
    for (int32_t i = 0; i < index; i++) {
        BAD_IF(c->table > 0 && caches[i].table == c->table &&
                   (caches[i].block_size != c->block_size ||
                    caches[i].tokens_per_row != c->tokens_per_row),
               "table",
               "layer '%s': caches[%d] has blocks of %d rows of %d tokens and caches[%d] of %d of "
               "%d; those of one table (%d) have the same",
               layer->desc.name, i, caches[i].block_size, caches[i].tokens_per_row, index,
               c->block_size, c->tokens_per_row, c->table);
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
    BAD_IF(given->caches == NULL || given->num_caches < 1 || given->num_caches > ATTN_MAX_CACHES ||
               !element_stride_is_good(ABI_CACHE_DESC, given->cache_stride),
           "caches", "layer '%s': %d caches of %d bytes at %p; 1 to %d of %zu to %d bytes", name,
           given->num_caches, given->cache_stride, (const void *)given->caches, ATTN_MAX_CACHES,
           abi_structs[ABI_CACHE_DESC].minimum, MAX_ELEMENT);
    BAD_IF(!layer_has_cache(&layer->desc) || layer->desc.kv_sharing_target != NULL ||
               layer->indexer != NULL || layer->compressor != NULL,
           "caches",
           "layer '%s' (%s) describes %d caches; a layer that has no keys of its own, or index "
           "keys or a compressor's states instead, takes none",
           name, name_of(ATTN_NAMES_LAYER_KIND, layer->desc.kind), given->num_caches);
    struct attn_cache_desc *caches = arena_array(arena, (size_t)given->num_caches, sizeof *caches);
    NO_MEMORY_IF(caches == NULL, "layers", "a layer");
    for (int32_t i = 0; i < given->num_caches; i++) {
        TRY(element_read(&caches[i], ABI_CACHE_DESC, given->caches, given->cache_stride, i, error));
        TRY(check_cache(layer, caches, i, error));
        caches[i].tokens_per_row = caches[i].tokens_per_row > 0 ? caches[i].tokens_per_row : 1;
    }
    given->caches = caches;
    given->cache_stride = (int32_t)sizeof *caches;
    return ATTN_OK;
}

#define KIND(name) (1u << ATTN_LAYER_##name)

attn_status layer_copy_extensions(struct arena *arena, struct layer *layer,
                                  const struct attn_ext *next, struct attn_error *error)
{
    uint32_t vendors[MAX_VENDOR_EXTENSIONS];
    const int32_t num_vendors = layer_vendor_ids(next, vendors);
    TRY(ext_check(next, ABI_LAYER_DESC, vendors, num_vendors, error));
    layer->desc.next = ext_copy_chain(arena, next, ABI_LAYER_DESC, true);
    NO_MEMORY_IF(arena->failed, "layers", "a layer");
    const struct {
        enum abi_id id;
        void *pointer;
        uint32_t taken, needed; /* by layers of these kinds */
        uint64_t reads;         /* what else a layer with it reads */
    } own[] = {
        {ABI_MLA_DESC, &layer->mla, KIND(MLA), KIND(MLA),
         ABI_READS(MLA_WEIGHTS) | ABI_READS(IO_MLA)},
        {ABI_RECURRENT_DESC, &layer->gdn, KIND(RECURRENT), KIND(RECURRENT),
         ABI_READS(RECURRENT_WEIGHTS) | ABI_READS(BATCH_RECURRENT) | ABI_READS(IO_RECURRENT)},
        {ABI_DRAFT_RECURRENT_RULE, &layer->rule, KIND(RECURRENT), 0,
         ABI_READS(DRAFT_RECURRENT_SKIP)},
        {ABI_DRAFT_RECURRENT_NORM, &layer->norm, KIND(RECURRENT), 0,
         ABI_READS(DRAFT_RECURRENT_NORM_WEIGHT) | ABI_READS(DRAFT_IO_RECURRENT_GATE)},
        {ABI_DRAFT_RECURRENT_ROUNDING, &layer->rounding, KIND(RECURRENT)},
        {ABI_INDEXER_DESC, &layer->indexer, KIND(INDEXER), KIND(INDEXER), ABI_READS(IO_INDEXER)},
        {ABI_DRAFT_INDEX_WRITE, &layer->index_write, KIND(INDEXER), 0,
         ABI_READS(DRAFT_IO_INDEX_WRITE)},
        {ABI_CONTEXT_PARALLEL, &layer->cp, ~(KIND(INDEXER) | KIND(DRAFT_COMPRESSOR)), 0,
         ABI_READS(BATCH_CONTEXT)},
        {ABI_DRAFT_MM_ENCODER, &layer->mm_quant, ~0u, 0, ABI_READS(DRAFT_MM_ENCODER_STATE)},
        {ABI_DRAFT_INDEX_LISTS, &layer->lists, KIND(DECODER) | KIND(MLA), 0,
         ABI_READS(DRAFT_IO_INDEX_LISTS)},
        {ABI_DRAFT_COMPRESSED_ROWS, &layer->compressed, KIND(MLA)},
        {ABI_DRAFT_COMPRESSOR_DESC, &layer->compressor, KIND(DRAFT_COMPRESSOR),
         KIND(DRAFT_COMPRESSOR), ABI_READS(DRAFT_IO_COMPRESSOR)},
        {ABI_DRAFT_OUTPUT_ROPE, &layer->output_rope, KIND(DECODER) | KIND(MLA), 0,
         ABI_READS(DRAFT_IO_OUTPUT_ROPE)},
        {ABI_LAYER_CACHES, &layer->caches, ~0u, 0, ABI_READS(IO_CACHES)}};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        const struct abi_struct *row = &abi_structs[own[i].id];
        const void *copy = ext_find(layer->desc.next, row->ext_id);
        memcpy(own[i].pointer, &copy, sizeof copy);
        if (!((copy != NULL ? own[i].taken : ~own[i].needed) >> layer->desc.kind & 1)) {
            return layer_refuse_extension(layer, row->name, copy == NULL, error);
        }
        TRY_IF(copy != NULL, struct_check(copy, own[i].id, layer->desc.name, error));
        layer->reads |= copy != NULL ? own[i].reads : 0;
    }
    return copy_caches(arena, layer, error);
}

attn_status layer_check_extensions(struct layer *layer, struct attn_error *error)
{
    layer->kernel = ATTN_KERNEL_ATTEND;
    layer->attend_size = layer->desc.head_size;
    layer->tokens_per_row = 1;
    layer->read_by = 0;
    layer->reads |= (layer->desc.rope != ATTN_ROPE_NONE ? ABI_READS(IO_ROPE) : 0) |
                    (layer->desc.output_form != ATTN_OUTPUT_PLAIN ? ABI_READS(IO_OUTPUT_QUANT) : 0);
    for (int32_t i = 0; compositions[i] != NULL; i++) {
        const size_t at = compositions[i]->extension;
        const void *extension;
        memcpy(&extension, (const char *)layer + at, sizeof extension);
        layer->read_by |= at == 0 || extension != NULL ? 1u << i : 0;
    }
    FOR_COMPOSED(c, layer->read_by) {
        TRY_IF((*c)->resolve != NULL, (*c)->resolve(layer, error));
    }
    return ATTN_OK;
}

attn_status layer_refuse_extension(const struct layer *layer, const char *extension, bool needed,
                                   struct attn_error *error)
{
    return BAD(extension, "layer '%s' of kind %s %s %s", layer->desc.name,
               name_of(ATTN_NAMES_LAYER_KIND, layer->desc.kind), needed ? "needs" : "takes no",
               extension);
}

int32_t layer_num_tables(const struct layer *layer)
{
    int32_t tables = 0;
    for (int32_t i = 0; layer->caches != NULL && i < layer->caches->num_caches; i++) {
        int32_t table = layer->caches->caches[i].table;
        tables = table > tables ? table : tables;
    }
    return tables;
}

int32_t cache_block_size(const struct attn_cache_desc *cache, int32_t layer_block_size)
{
    if (cache->block_size > 0) {
        return cache->block_size;
    }
    return cache->table == 0 ? layer_block_size / cache->tokens_per_row : layer_block_size;
}

void check_alone(struct check *check, const char *field)
{
    check->match->composed &= ~ATTN_COMPOSE_CASCADE;
    if (check->match->composed &
        ~(ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_OUTPUT_ROPE | ATTN_COMPOSE_MLA)) {
        reasons_add(check->reasons, field, "in a step that the core composes of others", "no");
    }
}

/* Blocks of the batch's own table hold the layer's tokens: as many in each of its caches. */
static void check_own_blocks(struct check *check, const struct attn_cache_desc *cache)
{
    const int32_t block = check->match->block_size;
    const int32_t rows = cache_block_size(cache, block);
    char asked[96], allowed[64];
    if (cache->table == 0 && rows * (int64_t)cache->tokens_per_row != block) {
        snprintf(asked, sizeof asked, "%d rows of %d tokens in table 0", rows,
                 cache->tokens_per_row);
        snprintf(allowed, sizeof allowed, "blocks of %d tokens", block);
        reasons_add(check->reasons, "caches", asked, allowed);
    }
}

void check_caches(struct check *check)
{
    const struct attn_layer_caches *own = check->whole->caches;
    if (own == NULL || check->whole->compressed != NULL) { /* attn_compressed_caps says it */
        return;
    }
    for (int32_t i = 0; i < own->num_caches; i++) {
        check_code(check, "caches", ATTN_NAMES_CACHE_ROLE, own->caches[i].role,
                   check->caps->cache_roles);
        if (kv_is_opaque(own->caches[i].kv_dtype)) {
            check_code(check, "caches", ATTN_NAMES_KV_DTYPE, own->caches[i].kv_dtype,
                       check->caps->kv_dtypes);
        }
        if (!check->whole->has_states) { /* else blocks are slots */
            check_own_blocks(check, &own->caches[i]);
        }
    }
    CHECK_LIMITS(check, {"tables", layer_num_tables(check->whole), check->caps->max_tables});
    check_alone(check, "caches");
}
