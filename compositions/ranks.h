/* SPDX-License-Identifier: Apache-2.0 */
/* Layers that ranks share, and what a plan keeps for them: context_parallel.c composes their steps,
 * exchange.c moves rows and partial results, of MLA, too, and split_queries.c cuts queries. */
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
        size_t own_lse;             /* [Hq, T]: the step's own keys */
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
/* Ranks that have a slice each of a request's queries; 1: they are not split. */
static inline int32_t layer_query_ranks(const attn_layer *layer)
{
    return layer->selected->cp != NULL ? ranks_count(layer->selected->cp->prefill) : 1;
}
static inline bool layer_splits_queries(const attn_layer *layer)
{
    return layer_query_ranks(layer) > 1;
}
/* Keys of `context` on a rank of those that spread the cache; all of them where none do. */
int32_t parallel_local_length(const attn_layer *layer, int32_t context, int32_t rank);

/* Layers whose queries are split over ranks. A rank's slice of a request is to its kernels a
 * request of its own, whose keys end with the slice, so that every term goes by absolute positions.
 * The step's new keys are gathered from all ranks before they are written. */
/* Slices that a rank has of one request: 1, or 2 in zig-zag order. */
int32_t queries_slices(const attn_layer *layer);
/* Counts the plan's integers and requests for the slices of all, and makes room for their runs. */
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

/* exchange.c: one exchange of a spread layer's step under way: where its areas lie, and what passes
 * between the ranks that split the heads (decode) and those that split the queries (prefill). */
/* Sizes of one layer's exchange. Heads of all ranks stand as [Hk, n, g]: each rank's group next to
 * the others' over the key head that they have in common. */
struct exchange {
    const struct attn_collectives *ranks, *rows; /* rows NULL: queries are one rank's */
    int64_t n, tokens, q_heads, kv_heads, group; /* one rank's */
    int64_t q_row, out_row;                      /* bytes of one head */
    int64_t out_size;                            /* dims of one: Dv, or the latent rank of MLA */
    struct attn_dtype dtype;
    int32_t reduce; /* enum attn_cp_reduce */
    bool invariant; /* results may not depend on how many rows there are */
};

struct exchange_run {
    attn_plan *plan;
    struct parallel_plan *p;
    struct step *step;
    const struct attn_step_io *io;
    struct attn_error *error;
    struct exchange x;
    uint8_t *out, *received;
    float *lse, *own_lse;
};

void exchange_init(struct exchange *x, const struct step *step, int64_t tokens);
/* The exchange of a step over `tokens` queries, with its areas of the plan's workspace. */
struct exchange_run exchange_begin(attn_plan *plan, struct step *step,
                                   const struct attn_step_io *io, int64_t tokens,
                                   struct attn_error *error);
/* Bytes of one rank's output and lse over its own heads, out first. */
int64_t exchange_part(const struct exchange *x, int64_t tokens);
void over_lse(struct own_tensor *over, const struct exchange_run *run, float *data, int64_t heads);
/* Queries, of MLA in two parts, outputs and log-sum-exps of all ranks' heads. */
struct all_heads {
    struct own_tensor q[2], out, lse;
};
/* Parts of a rank in `area`: its output rows, then its lse. */
void part_tensors(const struct exchange_run *run, uint8_t *area, struct own_tensor *out,
                  struct own_tensor *lse);

attn_status copy_bytes(const struct exchange_run *run, void *to, const void *from, int64_t bytes);
/* Places [parts, rows, heads] in memory, with the bytes from each to the next. */
struct grid {
    uint8_t *data;
    int64_t part, row, head;
};
/* Copies `bytes` at each of them, in as few copies as the smaller of rows and heads allows. */
attn_status copy_grid(const struct exchange_run *run, const struct grid *to,
                      const struct grid *from, int64_t bytes, int64_t parts, int64_t rows,
                      int64_t heads);
/* The rows of a tensor [count, heads, D] one after the other; `row` bytes a head. */
attn_status pack_rows(const struct exchange_run *run, void *to, const struct attn_tensor *from,
                      int64_t heads, int64_t row, int64_t count);
typedef attn_status collective(const struct attn_collective_args *args, struct attn_error *error);

/* A collective of the engine; where it brings no text, the core's. */
attn_status collective_run(const struct exchange_run *run, const struct attn_collectives *ranks,
                           collective *call, const void *send, void *receive, int64_t count);
attn_status merge_parts(const struct exchange_run *run, struct part_result a, struct part_result b,
                        struct part_result to);

/* The queries of all ranks' heads from `count` tensors of this rank's, [T, Hq, size], and where
 * their outputs go. */
attn_status heads_gather(const struct exchange_run *run, const struct attn_tensor *const *own,
                         int32_t count, struct all_heads *all);
/* out and lse of all heads to this rank's part in run->received. */
attn_status heads_reduce(const struct exchange_run *run);
/* Does the ranks' own table gather and merge heads of this exchange? Sizes alone decide, so that
 * all ranks do the same. */
bool exchange_is_small(const struct exchange *x);
/* In place of heads_reduce then; `own`, which may be missing, is merged, too. */
attn_status heads_merge_small(const struct exchange_run *run, const struct all_heads *all,
                              struct part_result own, struct part_result to);
/* The same as heads_reduce over the ranks that split the queries, after it. */
attn_status rows_reduce(struct exchange_run *run);

#endif
