/* SPDX-License-Identifier: Apache-2.0 */
/* Attends over lists of keys (attn/draft/index_lists.h): their forms, and random lists with entries
 * of -1, past the end, of other requests and of none. */
#ifndef CHECK_LISTS_H
#define CHECK_LISTS_H

#include <attn/draft/index_lists.h>

#include "cases/cases.h"

/* All forms of lists: each granularity with each grouping of heads, by keys and by slots. Every
 * other form has lengths. */
#define CASE_LISTS 30
struct case_lists case_lists_at(int32_t i);
/* "lists.g64.per_kv_head.slots.lengths", at most `size` bytes; "" where there are none. */
void case_lists_name(const struct case_lists *lists, char *name, size_t size);
/* Whether the backend declares them for attend, or for attend_mla_sparse. */
bool case_lists_declared(const struct attn_backend_caps *caps, const struct case_lists *lists,
                         bool latent);

/* Where lists [rows, G, k] and their lengths [rows, G] lie; elements between rows and lists are not
 * the least. */
struct lists_shape {
    int32_t entries, per_token;
    int64_t group_stride, token_stride;
};
struct lists_shape lists_shape(const struct attn_backend_caps *caps, const struct case_lists *lists,
                               int32_t num_q_heads, int32_t num_kv_heads);

/* A request whose keys are listed, by its entries of the block table. */
struct listed_request {
    int32_t seq_len, block_size;
    const int32_t *blocks;
    int64_t num_slots; /* that the cache has */
};
/* Lists of the tokens first .. end - 1, all of the request; none where granularity is 0. */
void lists_fill(const struct case_lists *lists, const struct lists_shape *shape,
                const struct listed_request *request, int64_t first, int64_t end, int32_t *indices,
                int32_t *lengths, uint64_t *random);

/* The layer's and the run's extensions over a copy of the lists. */
struct lists_binding {
    struct attn_index_lists layer;
    struct attn_io_index_lists io;
};
void lists_bind(const struct case_lists *lists, const struct lists_shape *shape,
                const int32_t *indices, const int32_t *lengths, struct lists_binding *b);

#endif
