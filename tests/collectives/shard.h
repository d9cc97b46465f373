/* SPDX-License-Identifier: Apache-2.0 */
/* A fixture's layer again, with its cache spread over ranks: this rank's model, plan and shard, in
 * which the context's rows that are this rank's stand and all else is NaN. */
#ifndef COLLECTIVES_SHARD_H
#define COLLECTIVES_SHARD_H

#include "fixture.h"
#include "support/test.h"

#define BLOCK 16 /* tokens of a cache block */

struct shard {
    attn_model *model;
    attn_plan *plan;
    void *cache, *workspace;
    int32_t table[MAX_REQS * MAX_BLOCKS]; /* the fixture's requests', backwards */
    int32_t rank, num_ranks, interleave;
};

/* Rank `rank` of `num_ranks` that share the cache. A failure ends the test. */
void shard_init(struct shard *s, struct fixture *f, const struct attn_context_parallel *cp,
                int32_t rank, int32_t num_ranks);
void shard_finish(struct shard *s, const struct fixture *f);
/* This rank's slots of positions first .. first + count - 1 of request r, -1 where another's. */
void shard_slots(const struct shard *s, const struct fixture *f, int32_t r, int32_t first,
                 int32_t count, int64_t *slots);

#endif
