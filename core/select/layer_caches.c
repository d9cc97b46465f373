/* SPDX-License-Identifier: Apache-2.0 */
#include "select/layer_caches.h"

#include <stdio.h>
#include <string.h>

#include "select/names.h"
#include "util/counts.h"

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
        check_code(check, "caches", ATTN_NAMES_CACHE_ROLE, own->caches[i].role,
                   check->caps->cache_roles);
        if (kv_is_opaque(own->caches[i].kv_dtype)) {
            check_code(check, "caches", ATTN_NAMES_KV_DTYPE, own->caches[i].kv_dtype,
                       check->caps->kv_dtypes);
        }
        check_own_blocks(check, &own->caches[i]);
    }
    CHECK_LIMITS(check, {"tables", layer_num_tables(check->whole), check->caps->max_tables});
    check->match->composed &= ~ATTN_COMPOSE_CASCADE;
    if (check->match->composed & ~composable) {
        reasons_add(check->reasons, "caches", "in a step that the core composes of others", "no");
    }
}
