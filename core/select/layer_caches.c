/* SPDX-License-Identifier: Apache-2.0 */
#include "select/layer_caches.h"

#include <stdio.h>
#include <string.h>

#include "select/layer_check.h"
#include "select/layer_ext.h"
#include "select/names.h"

#define MIN_CACHE_DESC 32 /* size in ABI 0.2 */
#define MAX_CACHE_DESC 4096
#define MAX_ROW 65536
#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

/* One element of an array whose writer may be older or newer. */
static attn_status read_cache(const struct layer *layer, const struct attn_layer_caches *given,
                              int32_t index, struct attn_cache_desc *cache,
                              struct attn_error *error)
{
    const size_t size = (size_t)given->cache_bytes;
    const unsigned char *source = (const unsigned char *)given->caches + (size_t)index * size;
    memcpy(cache, source, size < sizeof *cache ? size : sizeof *cache);
    for (size_t at = sizeof *cache; at < size; at++) {
        if (source[at] != 0) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, "attn_cache_desc",
                             "layer '%s': cache_bytes is %d and byte %zu of caches[%d] is not 0; "
                             "this library knows %zu bytes, and an unknown tail has to be all zero",
                             layer->desc.name, given->cache_bytes, at, index, sizeof *cache);
        }
    }
    cache->tokens_per_row = cache->tokens_per_row > 0 ? cache->tokens_per_row : 1;
    return ATTN_OK;
}

static attn_status check_cache(const struct layer *layer, const struct attn_cache_desc *caches,
                               int32_t index, struct attn_error *error)
{
    const struct attn_cache_desc *c = &caches[index];
    const struct ranged ranges[] = {
        {"role", c->role, ATTN_CACHE_INDEX_K, ATTN_CACHE_ROLE_COUNT - 1},
        {"of", c->of, 0, 1 + index},
        {"table", c->table, 0, ATTN_MAX_TABLES},
        {"kv_dtype", c->kv_dtype, 1, ATTN_KV_DTYPE_COUNT - 1},
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

attn_status layer_copy_caches(struct arena *arena, struct layer *layer, struct attn_error *error)
{
    struct attn_layer_caches *given = layer->caches;
    const char *name = layer->desc.name;
    if (given == NULL) {
        return ATTN_OK;
    }
    if (given->caches == NULL || given->num_caches < 1 || given->num_caches > ATTN_MAX_CACHES ||
        given->cache_bytes < MIN_CACHE_DESC || given->cache_bytes > MAX_CACHE_DESC) {
        return BAD("caches", "layer '%s': %d caches of %d bytes at %p; 1 to %d of %d to %d bytes",
                   name, given->num_caches, given->cache_bytes, (const void *)given->caches,
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
        status = read_cache(layer, given, i, &caches[i], error);
        status = status == ATTN_OK ? check_cache(layer, caches, i, error) : status;
    }
    given->caches = caches;
    given->cache_bytes = (int32_t)sizeof *caches;
    return status;
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

bool layer_same_caches(const struct layer *a, const struct layer *b)
{
    const struct attn_layer_caches *x = a->caches, *y = b->caches;
    if (x == NULL || y == NULL) {
        return x == y;
    }
    return x->num_caches == y->num_caches &&
           memcmp(x->caches, y->caches, (size_t)x->num_caches * sizeof *x->caches) == 0;
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
    const uint32_t composable = ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_MLA | ATTN_COMPOSE_CASCADE;
    if (own == NULL) {
        return;
    }
    for (int32_t i = 0; i < own->num_caches; i++) {
        check_code(check, "caches", own->caches[i].role, check->caps->cache_roles,
                   ATTN_CACHE_ROLE_COUNT, name_of_cache_role);
        check_own_blocks(check, &own->caches[i]);
    }
    int32_t tables = layer_num_tables(check->whole);
    if (tables > check->caps->max_tables) {
        check_refuse_limit(check, "tables", tables, check->caps->max_tables);
    }
    check->match->composed &= ~ATTN_COMPOSE_CASCADE;
    if (check->match->composed & ~composable) {
        reasons_add(check->reasons, "caches", "in a step that the core composes of others", "no");
    }
}
