/* SPDX-License-Identifier: Apache-2.0 */
/* MLA over a latent cache that ranks share. Decode: absorbed queries of all ranks' heads against
 * the rows that are here, reduced by log-sum-exp. Prefill: rows of context gathered from all ranks;
 * they are all visible, so their order within a request is free. */
#include "exchange.h"
#include "mla.h"

/* The step's own rows are written before, so a decode counts all its keys. */
attn_status mla_localise(attn_plan *plan, struct attn_error *error)
{
    const attn_layer *layer = plan->steps[0].layer;
    struct attn_batch *view = &plan->decode;
    BAD_IF(plan->given.seq_lens_host == NULL, "seq_lens_host",
           "is NULL; MLA over a cache that ranks share needs it");
    BAD_IF(plan->first_row != 0, "query_start_loc",
           "query_start_loc[0] is %d; 0 for MLA over a cache that ranks share", plan->first_row);
    int32_t *local = plan_take(plan, view->num_reqs);
    for (int32_t r = 0; r < view->num_reqs; r++) {
        local[r] = parallel_local_length(layer, view->seq_lens_host[r], layer_cache_rank(layer));
    }
    view_lens(plan, view, local);
    return ATTN_OK;
}

/* [Hq, T] of the part to the engine's strides. */
static attn_status copy_lse(const struct exchange_run *run, const struct own_tensor *part,
                            const struct attn_tensor *to)
{
    const struct grid here = {part->tensor.data, 0, 4, run->x.tokens * 4};
    const struct grid there = {(uint8_t *)to->data + to->byte_offset, 0, tensor_stride(to, 1) * 4,
                               tensor_stride(to, 0) * 4};
    return copy_grid(run, &there, &here, 4, 1, run->x.tokens, run->x.q_heads);
}

attn_status mla_attend_spread(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct launch *launch, const struct attn_io_mla *mla, int64_t tokens,
                              struct own_tensor *out, struct attn_error *error)
{
    const bool two = step->layer->selected->mla->qk_rope_head_dim > 0;
    const struct attn_tensor *own[] = {mla->q_nope, mla->q_pe};
    struct exchange_run run = exchange_begin(plan, step, io, tokens, error);
    struct attn_io_mla all = *mla;
    struct all_heads heads;
    struct own_tensor part_lse;
    TRY(heads_gather(&run, own, two ? 2 : 1, &heads));
    all.q_nope = &heads.q[0].tensor;
    all.q_pe = two ? &heads.q[1].tensor : all.q_pe;
    const struct attn_step_io attend = {
        .next = &all.ext, .stream = io->stream, .out = &heads.out.tensor, .lse = &heads.lse.tensor};
    TRY(launch_run(launch, &attend, error));
    part_tensors(&run, run.received, out, &part_lse);
    if (exchange_is_small(&run.x)) {
        return heads_merge_small(&run, &heads, (struct part_result){NULL},
                                 (struct part_result){&out->tensor, io->lse});
    }
    TRY(heads_reduce(&run));
    return io->lse != NULL ? copy_lse(&run, &part_lse, io->lse) : ATTN_OK;
}

attn_status mla_gather_spread(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              const struct context_chunk *chunk, struct attn_error *error)
{
    const struct mla_plan *p = mla_plan(plan);
    const struct attn_collectives *ranks = step->layer->selected->cp->decode;
    struct exchange_run run = exchange_begin(plan, step, io, chunk->num_rows, error);
    int64_t element = run.x.dtype.bits / 8, at = 0;
    int64_t row = step->layer->desc->head_size * element;
    uint8_t *gathered = plan->scratch + p->at.gathered;
    uint8_t *rows = plan->scratch + p->at.rows;
    TRY(collective_run(&run, ranks, ranks->all_gather, plan->scratch + p->at.local, gathered,
                       chunk->num_rows * row));
    for (int32_t i = 0; i < chunk->num_reqs * ranks->world_size; i++) {
        int64_t rank = i % ranks->world_size, count = chunk->rank_rows[i];
        int64_t from = rank * chunk->num_rows + chunk->start[i / ranks->world_size];
        TRY(copy_bytes(&run, rows + at * row, gathered + from * row, count * row));
        at += count;
    }
    return ATTN_OK;
}
