/* SPDX-License-Identifier: Apache-2.0 */
/* Layers that ranks share, and what a plan keeps for them. context_parallel.c composes their steps,
 * exchange.c moves rows and partial results, split_queries.c cuts queries; mla_spread.c is of MLA.
 */
#ifndef COMPOSITIONS_RANKS_H
#define COMPOSITIONS_RANKS_H

#include "compositions.h"
#include "step/plan_state.h"

/* Moments of a run: see plan_area. Of a step over ranks: keys are brought together, then queries;
 * the context is attended, reduced, and merged with the rest. Of MLA: decodes, which may be a step
 * over ranks, then chunks of context are gathered, projected and attended. */
enum moment {
    KEYS = 1,
    QUERIES = 2,
    CONTEXT = 4,
    REDUCE = 8,
    MERGE = 16,
    LATENT = QUERIES | CONTEXT | REDUCE | MERGE,
    GATHER = 32,
    PROJECT = 64,
    ATTEND = 128,
    PER_HEAD = GATHER | PROJECT | ATTEND
};

/* Rows that are copied in one piece. */
struct row_run {
    int64_t from, to, rows;
};

/* Keys of all ranks as the k and v of an io; the tensors live as long as this. */
struct all_keys {
    struct own_tensor k, v;
    struct attn_step_io io;
};

/* What a plan keeps. */
struct parallel_plan {
    int64_t *pairs;                      /* (t, t) of every row */
    struct attn_batch context, own_keys; /* by the last plan: views of the two attends */
    bool counts_own;                     /* by the last plan: the context has the own keys */
    enum { OWN_UNKNOWN, OWN_APART, OWN_COUNTED } captured_own; /* in the plan's graph */
    /* by the last plan: are the queries split, and how */
    bool split;
    int32_t widest;       /* most rows of a rank */
    int32_t num_keys;     /* new ones, of all ranks */
    struct row_run *runs; /* keys into their order, then into that of the slices */
    int32_t num_runs, num_slice_runs;
    const int32_t *key_start; /* host, of the slices' keys; [num_reqs + 1] of the split batch */
    struct all_keys ordered;  /* by the last run */
    struct {                  /* places in the workspace */
        size_t packed, gathered, q; /* queries of a rank, of all by rank, of all by key head */
        size_t out, lse;            /* [T, Hk n g, Dv] and [Hk n g, T]: the context that is here */
        size_t send, received;      /* [n] parts of a rank: [T, Hq, Dv], then [Hq, T] float32 */
        size_t zeros, all_lse, other_lse;
        size_t rows; /* [P, widest, Hq, D]: queries of the ranks that split them */
        size_t rows_send, rows_received; /* [P] parts of [widest, Hq, Dv] */
        /* k and v: this rank's, all ranks', in the order of requests, and again per slice */
        size_t keys[2][4];
    } at;
};

static inline struct parallel_plan *parallel_plan(const attn_plan *plan)
{
    return plan->data[COMPOSITION_CONTEXT_PARALLEL];
}

/* 1 where there are none. */
static inline int32_t ranks_count(const struct attn_collectives *ranks)
{
    return ranks != NULL ? ranks->world_size : 1;
}
/* Ranks that hold a part of the cache each: of several a block of the table holds so many tokens
 * over all of them. */
int32_t context_cache_ranks(const struct attn_context_parallel *cp);
static inline int32_t layer_cache_ranks(const attn_layer *layer)
{
    return context_cache_ranks(layer->selected->cp);
}
static inline bool layer_is_spread(const attn_layer *layer)
{
    return layer_cache_ranks(layer) > 1;
}
/* This one, among those of a spread cache. */
int32_t layer_cache_rank(const attn_layer *layer);
/* Have the ranks of `prefill` a slice each of a request's queries? */
static inline bool layer_splits_queries(const attn_layer *layer)
{
    return layer->selected->cp != NULL && ranks_count(layer->selected->cp->prefill) > 1;
}
/* Keys of `context` on a rank of those that spread the cache. */
int32_t parallel_local_length(const attn_layer *layer, int32_t context, int32_t rank);

/* Layers whose queries are split over ranks. A rank's slice of a request is to its kernels a
 * request of its own, whose keys end with the slice, so that every term goes by absolute positions.
 * The step's new keys are gathered from all ranks before they are written. */
/* Slices that a rank has of one request: 1, or 2 in zig-zag order. */
int32_t queries_slices(const attn_layer *layer);
/* Integers that a plan needs more. */
int64_t queries_max_integers(const attn_plan *plan);
attn_status queries_init(attn_plan *plan, struct attn_error *error);
void queries_add_areas(attn_plan *plan, const struct step *step);
/* Turns plan->given into this rank's slices, where the batch brings one rank's queries of requests
 * that have more. */
attn_status queries_split(attn_plan *plan, struct attn_error *error);
/* Rows of rank `rank`, one request's or all before it. */
int32_t queries_of(const attn_layer *layer, int32_t queries, int32_t rank);

/* The keys of all ranks in the order of requests, see step.bring_keys. */
attn_status queries_gather_keys(attn_plan *plan, struct step *step, const struct attn_step_io **io,
                                struct attn_error *error);
/* The same again, each slice's keys after those of the slice before. */
attn_status queries_slice_keys(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                               struct all_keys *slices, struct attn_error *error);

#endif
