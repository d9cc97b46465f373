/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks that split the queries of a spread layer: rows to all of them, partial results back. */
#include "step/exchange.h"

/* This rank's queries side by side; where the queries are split, those of all ranks, each rank's in
 * as many rows as the widest has. */
attn_status rows_gather(const struct run *run, uint8_t **rows, struct attn_error *error)
{
    const struct exchange *x = &run->x;
    const attn_plan *plan = run->plan;
    int64_t row = x->q_heads * x->q_row;
    attn_status status = pack_rows(run, run->packed, run->io->q, x->q_heads, x->q_row,
                                   plan->given.num_actual_tokens, error);
    *rows = run->packed;
    if (status == ATTN_OK && plan->parallel.split) {
        *rows = plan->workspace + plan->scratch.parallel.rows;
        status = collective_told(x->rows->all_gather(x->rows->user, run->packed, *rows,
                                                     (size_t)(plan->parallel.widest * row),
                                                     run->io->stream),
                                 error);
    }
    return status;
}

/* Rows of rank `rank` out of the part at `from`, which has all ranks', as a part of their own. */
static attn_status pack_rank(const struct run *run, int64_t rank, uint8_t *from, uint8_t *area,
                             struct attn_error *error)
{
    const struct exchange *x = &run->x;
    int64_t widest = run->plan->parallel.widest, row = x->q_heads * x->out_row;
    const uint8_t *lse = from + exchange_aligned(x->tokens * row);
    attn_status status =
        copy_rows(run, area, 0, from + rank * widest * row, 0, widest * row, widest > 0, error);
    return status == ATTN_OK
               ? copy_rows(run, area + exchange_aligned(widest * row), widest * 4,
                           lse + rank * widest * 4, x->tokens * 4, widest * 4, x->q_heads, error)
               : status;
}

/* Each rank's own rows from all of them, merged in the order of the ranks. Where every rank has all
 * queries, their parts are merged likewise on each. Leaves the result in run->received, and the
 * number of its rows in run->x.tokens. */
attn_status rows_reduce(struct run *run, struct attn_error *error)
{
    struct exchange *x = &run->x;
    const attn_plan *plan = run->plan;
    uint8_t *send = plan->workspace + plan->scratch.parallel.rows_send;
    uint8_t *received = plan->workspace + plan->scratch.parallel.rows_received;
    struct over out, lse, next_out, next_lse;
    attn_status status = ATTN_OK;
    if (x->rows == NULL) {
        return ATTN_OK;
    }
    int64_t tokens = plan->parallel.split ? plan->parallel.widest : x->tokens;
    int64_t part = exchange_part(x, tokens);
    for (int64_t rank = 0; plan->parallel.split && rank < x->rows->world_size; rank++) {
        status = status ? status : pack_rank(run, rank, run->received, send + rank * part, error);
    }
    if (status == ATTN_OK) {
        status = collective_told(
            plan->parallel.split
                ? x->rows->all_to_all(x->rows->user, send, received, (size_t)part, run->io->stream)
                : x->rows->all_gather(x->rows->user, run->received, received, (size_t)part,
                                      run->io->stream),
            error);
    }
    x->tokens = tokens;
    run->received = received;
    part_tensors(run, received, &out, &lse);
    for (int64_t rank = 1; rank < x->rows->world_size && status == ATTN_OK; rank++) {
        part_tensors(run, received + rank * part, &next_out, &next_lse);
        status = merge_parts(run, &out.tensor, &lse.tensor, &next_out.tensor, &next_lse.tensor,
                             &out.tensor, &lse.tensor, error);
    }
    return status;
}
