/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of the keys that each token sees. They are the kernels' to follow: here a layer's lists are
 * checked, those of a run, and what a backend declares of them. */
#include <stdio.h>

#include "mla.h"

#define GRANULARITIES (1 | 4 | 16 | 64 | 128) /* powers of two, of which a mask is the sum */

bool lists_are_plain(const struct layer *layer)
{
    const struct attn_index_lists *l = layer->lists;
    return l != NULL && layer->mla != NULL && l->granularity == 1 &&
           l->groups == ATTN_LISTS_SHARED && !l->physical_slots && !l->has_lengths;
}

/* How many lists a token has. */
static int32_t lists_per_token(const struct layer *layer)
{
    return layer->lists->groups == ATTN_LISTS_SHARED        ? 1
           : layer->lists->groups == ATTN_LISTS_PER_KV_HEAD ? layer->desc.num_kv_heads
                                                            : layer->desc.num_q_heads;
}

/* Takes an extension out of a chain of copies that has it. */
static void unchain(const struct attn_ext **at, const struct attn_ext *ext)
{
    while (*at != ext) {
        at = &((struct attn_ext *)*at)->next;
    }
    *at = ext->next;
}

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    struct attn_index_lists *l = layer->lists;
    const struct attn_layer_desc *d = &layer->desc;
    l->granularity = l->granularity != 0 ? l->granularity : 1;
    BAD_IF(l->granularity < 0 || (l->granularity & (l->granularity - 1)) != 0 ||
               !(l->granularity & GRANULARITIES),
           "granularity", "layer '%s': granularity is %d; allowed are 1, 4, 16, 64, 128", d->name,
           l->granularity);
    /* the least number of lists that says the same */
    if (l->groups == ATTN_LISTS_PER_Q_HEAD && d->num_q_heads == d->num_kv_heads) {
        l->groups = ATTN_LISTS_PER_KV_HEAD;
    }
    if (lists_per_token(layer) == 1) {
        l->groups = ATTN_LISTS_SHARED;
    }
    if (lists_are_plain(layer)) {
        unchain(&layer->desc.next, &l->ext);
    }
    return ATTN_OK;
}

static void check_declared(struct check *check, const struct attn_index_lists_caps *caps)
{
    const struct attn_index_lists *l = check->whole->lists;
    const bool latent = check->whole->mla != NULL;
    CHECK_NEEDS(check, "attn_index_lists",
                {latent ? caps->attend_mla_sparse : caps->attend,
                 latent ? "of attend_mla_sparse" : "of attend", "not declared"});
    if (!(caps->granularities & (uint32_t)l->granularity)) {
        char supported[48];
        snprintf(supported, sizeof supported, "of 1, 4, 16, 64, 128 those in %u",
                 caps->granularities);
        check_refuse_number(check, "granularity", l->granularity, supported);
    }
    CHECK_DRAFT_CODE(check, "groups", l->groups, caps->groups, "shared", "per_kv_head",
                     "per_q_head");
    CHECK_NEEDS(check, "physical_slots", {!l->physical_slots || caps->physical_slots, "yes"});
    CHECK_LIMITS(check, {"max_entries", l->max_entries, MOST(caps->max_entries)});
    check_multiple(check, "max_entries", l->max_entries, caps->entries_multiple);
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_ext *caps = ext_find(check->caps->next, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS);
    check_alone(check, "attn_index_lists"); /* a part's keys have other positions */
    if (lists_are_plain(check->whole)) {
        return; /* the layer's topk is what backends declare */
    }
    if (caps == NULL) {
        reasons_add(check->reasons, "attn_index_lists", "keys chosen by lists", "not declared");
    } else {
        check_declared(check, (const struct attn_index_lists_caps *)caps);
    }
}

/* On a CPU: each list's length, and that no entry stands in it twice. */
static attn_status validate_lists(const attn_plan *plan, const struct step *step,
                                  const struct attn_io_index_lists *lists, struct attn_error *error)
{
    const struct layer *layer = step->layer->selected;
    const struct attn_index_lists *l = layer->lists;
    const struct attn_kv_view *view = &step->layer->owner->k_cache;
    const int64_t end = (view->num_blocks * view->block_size - 1) / l->granularity + 1;
    const int32_t groups = lists_per_token(layer);
    const int64_t end_row = validate_end_row(plan);
    for (int64_t i = (int64_t)plan->first_row * groups; i < end_row * groups; i++) {
        const int64_t t = i / groups, group = i % groups;
        const int32_t *list =
            lists->indices + t * lists->token_stride + group * lists->group_stride;
        const int32_t count =
            l->has_lengths ? lists->lengths[t * lists->length_stride + group] : l->max_entries;
        BAD_IF(count < 0 || count > l->max_entries, "lengths",
               "layer '%s': lengths[%lld, %lld] is %d; 0 to max_entries, %d", layer->desc.name,
               (long long)t, (long long)group, count, l->max_entries);
        const int64_t second = find_second(list, sizeof *list, count, 0, end);
        BAD_IF(second >= 0, "indices",
               "layer '%s': indices[%lld, %lld, %lld] is %d, which stands in the list before; "
               "entries are unique",
               layer->desc.name, (long long)t, (long long)group, (long long)second, list[second]);
    }
    return ATTN_OK;
}

static attn_status check_run(const attn_plan *plan, const struct step *step,
                             const struct attn_step_io *io, bool writes, bool attends,
                             struct attn_error *error)
{
    const struct layer *layer = step->layer->selected;
    const struct attn_io_index_lists *given = ext_find(io->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS);
    const int64_t entries = layer->lists->max_entries, groups = lists_per_token(layer);
    BAD_IF(given == NULL, "attn_io_index_lists",
           "the layer's attn_index_lists needs attn_io_index_lists on the run");
    BAD_IF(given->indices == NULL && plan->num_tokens > 0, "indices",
           "indices of attn_io_index_lists is NULL");
    BAD_IF(given->lengths == NULL && layer->lists->has_lengths && plan->num_tokens > 0, "lengths",
           "lengths is NULL, and the layer says has_lengths");
    BAD_IF(given->lengths != NULL && !layer->lists->has_lengths, "lengths",
           "lengths is given, and the layer does not say has_lengths");
    const struct {
        const char *field;
        bool is_read;
        int64_t found, least;
    } strides[] = {{"token_stride", true, given->token_stride, entries},
                   {"group_stride", groups > 1, given->group_stride, entries},
                   {"length_stride", given->lengths != NULL, given->length_stride, groups}};
    for (size_t i = 0; i < sizeof strides / sizeof *strides; i++) {
        BAD_IF(strides[i].is_read && strides[i].found < strides[i].least, strides[i].field,
               "%s is %lld; %lld or more elements", strides[i].field, (long long)strides[i].found,
               (long long)strides[i].least);
    }
    return plan->looks ? validate_lists(plan, step, given, error) : ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_LISTS) {
        step->check_more = check_run;
    }
    return ATTN_OK;
}

const struct composition composition_lists = {
    .extension = offsetof(struct layer, lists),
    .resolve = resolve,
    .match = match,
    .build = build,
};
