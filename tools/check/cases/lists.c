/* SPDX-License-Identifier: Apache-2.0 */
#include "cases/lists.h"

#include <stdio.h>

#include "harness/backend.h"
#include "support/client.h"
#include "support/random.h"

static const int32_t granularities[] = {1, 4, 16, 64, 128};
static const int32_t usual_entries[] = {40, 14, 8, 5, 3}; /* for each: some keys, or all of a few */

struct case_lists case_lists_at(int32_t i)
{
    return (struct case_lists){.granularity = granularities[i % 5],
                               .groups = i / 5 % 3,
                               .physical_slots = i / 15,
                               .has_lengths = i % 2};
}

void case_lists_name(const struct case_lists *lists, char *name, size_t size)
{
    static const char *const groups[] = {"shared", "per_kv_head", "per_q_head"};
    name[0] = '\0';
    if (lists->granularity == 0) {
        return;
    }
    snprintf(name, size, "lists.g%d.%s%s%s%s%s", lists->granularity, groups[lists->groups],
             lists->physical_slots ? ".slots" : "", lists->has_lengths ? ".lengths" : "",
             lists->prompts ? ".prompts" : "", lists->many > 0 ? ".many" : "");
}

static const struct attn_index_lists_caps *caps_of(const struct attn_backend_caps *caps)
{
    return backend_extension(caps, ATTN_EXT_DRAFT_INDEX_LISTS_CAPS,
                             sizeof(struct attn_index_lists_caps));
}

bool case_lists_declared(const struct attn_backend_caps *caps, const struct case_lists *lists,
                         bool latent)
{
    const struct attn_index_lists_caps *c = caps_of(caps);
    return c != NULL && (latent ? c->attend_mla_sparse : c->attend) &&
           c->granularities & (uint32_t)lists->granularity && c->groups >> lists->groups & 1 &&
           (c->physical_slots || !lists->physical_slots);
}

struct lists_shape lists_shape(const struct attn_backend_caps *caps, const struct case_lists *lists,
                               int32_t num_q_heads, int32_t num_kv_heads)
{
    const struct attn_index_lists_caps *c = caps_of(caps);
    const int32_t multiple = c != NULL && c->entries_multiple > 1 ? c->entries_multiple : 1;
    int32_t which = 0;
    if (lists->granularity == 0) {
        return (struct lists_shape){0};
    }
    while (granularities[which] != lists->granularity) {
        which++;
    }
    struct lists_shape shape = {.per_token = lists->groups == ATTN_LISTS_SHARED ? 1
                                             : lists->groups == ATTN_LISTS_PER_KV_HEAD
                                                 ? num_kv_heads
                                                 : num_q_heads};
    const int32_t entries = lists->many > 0 ? lists->many : usual_entries[which];
    shape.entries = (entries + multiple - 1) / multiple * multiple;
    shape.group_stride = shape.entries + 1;
    shape.token_stride = shape.per_token * shape.group_stride + 2;
    return shape;
}

static bool is_listed(const int32_t *list, int32_t count, int32_t entry)
{
    for (int32_t i = 0; i < count; i++) {
        if (list[i] == entry) {
            return true;
        }
    }
    return false;
}

/* An entry: of a key of the request, or past its last one; of a slot that is another's, now and
 * then. A table's entry may be garbage where no query can see. */
static int32_t draw_entry(const struct case_lists *lists, const struct listed_request *request,
                          uint64_t *random)
{
    const int32_t j = random_below(random, request->seq_len + 2 * lists->granularity);
    const bool other = random_below(random, 8) == 0;
    if (!lists->physical_slots) {
        return j / lists->granularity;
    }
    if (j >= request->seq_len || other) {
        return random_below(random, (int32_t)request->num_slots) / lists->granularity;
    }
    const int32_t block = request->blocks[j / request->block_size];
    const int64_t slot = block * (int64_t)request->block_size + j % request->block_size;
    return slot >= 0 && slot < request->num_slots ? (int32_t)(slot / lists->granularity) : -1;
}

static void fill_token(const struct case_lists *lists, const struct lists_shape *shape,
                       const struct listed_request *request, int32_t *indices, int32_t *lengths,
                       uint64_t *random)
{
    for (int32_t group = 0; group < shape->per_token; group++) {
        int32_t *list = indices + group * shape->group_stride;
        const bool empty = random_below(random, 10) == 0;
        for (int32_t i = 0; i < shape->entries; i++) {
            const int32_t entry = draw_entry(lists, request, random);
            const bool none = random_below(random, 7) == 0 || is_listed(list, i, entry);
            list[i] = none || (empty && !lists->has_lengths) ? -1 : entry;
        }
        lengths[group] = empty ? 0 : 1 + random_below(random, shape->entries);
    }
}

void lists_fill(const struct case_lists *lists, const struct lists_shape *shape,
                const struct listed_request *request, int64_t first, int64_t end, int32_t *indices,
                int32_t *lengths, uint64_t *random)
{
    for (int64_t t = first; t < end && lists->granularity > 0; t++) {
        fill_token(lists, shape, request, indices + t * shape->token_stride,
                   lengths + t * shape->per_token, random);
    }
}

void lists_bind(const struct case_lists *lists, const struct lists_shape *shape,
                const int32_t *indices, const int32_t *lengths, struct lists_binding *b)
{
    b->layer =
        EXTENSION(attn_index_lists, ATTN_EXT_DRAFT_INDEX_LISTS, NULL, .max_entries = shape->entries,
                  .granularity = lists->granularity, .groups = lists->groups,
                  .physical_slots = lists->physical_slots, .has_lengths = lists->has_lengths);
    b->io = EXTENSION(attn_io_index_lists, ATTN_EXT_DRAFT_IO_INDEX_LISTS, NULL, .indices = indices,
                      .token_stride = shape->token_stride, .group_stride = shape->group_stride,
                      .lengths = lists->has_lengths ? lengths : NULL,
                      .length_stride = shape->per_token);
}
