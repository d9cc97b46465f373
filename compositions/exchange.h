/* SPDX-License-Identifier: Apache-2.0 */
/* One exchange of a spread layer's step under way: where its areas lie, and what passes between the
 * ranks that split the heads (decode) and those that split the queries (prefill). */
#ifndef COMPOSITIONS_EXCHANGE_H
#define COMPOSITIONS_EXCHANGE_H

#include "ranks.h"

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
    const struct instance *instance;
    struct attn_error *error;
    struct exchange x;
    uint8_t *out, *received;
    float *lse;
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
