/* SPDX-License-Identifier: Apache-2.0 */
#include "select/index_lists.h"

#include <stdio.h>
#include <string.h>

#include "select/layer_ext.h"
#include "select/names.h"
#include "util/counts.h"
#include "util/structs.h"

#define GRANULARITIES (1 | 4 | 16 | 64 | 128) /* powers of two, of which a mask is the sum */

bool lists_are_plain(const struct layer *layer)
{
    const struct attn_index_lists *l = layer->lists;
    return l != NULL && layer->mla != NULL && l->granularity == 1 &&
           l->groups == ATTN_LISTS_SHARED && !l->physical_slots && !l->has_lengths;
}

int32_t lists_per_token(const struct layer *layer)
{
    return layer->lists->groups == ATTN_LISTS_SHARED        ? 1
           : layer->lists->groups == ATTN_LISTS_PER_KV_HEAD ? layer->desc.num_kv_heads
                                                            : layer->desc.num_q_heads;
}

bool lists_same(const struct layer *a, const struct layer *b)
{
    const struct attn_index_lists *x = a->lists, *y = b->lists;
    if (x == NULL || y == NULL) {
        return x == y;
    }
    return memcmp(&x->max_entries, &y->max_entries, sizeof *x - sizeof x->ext) == 0;
}

/* Takes an extension out of a chain of copies that has it. */
static void unchain(const struct attn_ext **at, const struct attn_ext *ext)
{
    while (*at != ext) {
        at = &((struct attn_ext *)*at)->next;
    }
    *at = ext->next;
}

attn_status lists_resolve(struct layer *layer, struct attn_error *error)
{
    struct attn_index_lists *l = layer->lists;
    const struct attn_layer_desc *d = &layer->desc;
    if (l == NULL) {
        return ATTN_OK;
    }
    if (d->kind != ATTN_LAYER_DECODER && d->kind != ATTN_LAYER_MLA) {
        return layer_refuse_extension(layer, "attn_index_lists", false, error);
    }
    l->granularity = l->granularity != 0 ? l->granularity : 1;
    if (l->granularity < 0 || (l->granularity & (l->granularity - 1)) != 0 ||
        !(l->granularity & GRANULARITIES)) {
        return BAD("granularity", "layer '%s': granularity is %d; allowed are 1, 4, 16, 64, 128",
                   d->name, l->granularity);
    }
    /* the least number of lists that says the same */
    if (l->groups == ATTN_LISTS_PER_Q_HEAD && d->num_q_heads == d->num_kv_heads) {
        l->groups = ATTN_LISTS_PER_KV_HEAD;
    }
    if (lists_per_token(layer) == 1) {
        l->groups = ATTN_LISTS_SHARED;
    }
    if (layer->mla != NULL) {
        if (layer->mla->topk != 0) {
            return BAD("topk", "layer '%s': topk is %d next to attn_index_lists; 0", d->name,
                       layer->mla->topk);
        }
        layer->mla->topk = l->max_entries;
    }
    if (lists_are_plain(layer)) {
        unchain(&layer->desc.next, &l->ext);
    }
    return ATTN_OK;
}

static void check_declared(struct check *check, const struct attn_index_lists_caps *caps)
{
    static const char *const groups[NUM_LIST_GROUPS] = {"shared", "per_kv_head", "per_q_head"};
    const struct attn_index_lists *l = check->whole->lists;
    const bool latent = check->whole->mla != NULL;
    if (!(latent ? caps->attend_mla_sparse : caps->attend)) {
        reasons_add(check->reasons, "attn_index_lists",
                    latent ? "of attend_mla_sparse" : "of attend", "not declared");
    }
    if (!(caps->granularities & (uint32_t)l->granularity)) {
        char supported[48];
        snprintf(supported, sizeof supported, "of 1, 4, 16, 64, 128 those in %u",
                 caps->granularities);
        check_refuse_number(check, "granularity", l->granularity, supported);
    }
    check_draft_code(check, "groups", groups, NUM_LIST_GROUPS, l->groups, caps->groups);
    CHECK_NEEDS(check, "physical_slots", {!l->physical_slots || caps->physical_slots, "yes"});
    CHECK_LIMITS(check, {"max_entries", l->max_entries, MOST(caps->max_entries)});
    check_multiple(check, "max_entries", l->max_entries, caps->entries_multiple);
}

void check_lists(struct check *check)
{
    const uint32_t composable = ATTN_COMPOSE_OUTPUT_QUANT | ATTN_COMPOSE_MLA;
    const struct attn_ext *caps = ext_find(check->caps->next, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS);
    if (check->whole->lists == NULL) {
        return;
    }
    check->match->composed &= ~ATTN_COMPOSE_CASCADE; /* a part's keys have other positions */
    if (check->match->composed & ~composable) {
        reasons_add(check->reasons, "attn_index_lists",
                    "in a step that the core composes of others", "no");
    }
    if (lists_are_plain(check->whole)) {
        return; /* the layer's topk is what backends declare */
    }
    if (caps == NULL) {
        reasons_add(check->reasons, "attn_index_lists", "keys chosen by lists", "not declared");
    } else {
        check_declared(check, (const struct attn_index_lists_caps *)caps);
    }
}
