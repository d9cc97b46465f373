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

/* Both parts of the queries of all ranks' heads, to the places of `heads` and `pe`. */
static attn_status gather_queries(struct exchange_run *run, const struct attn_mla_desc *m,
                                  const struct attn_io_mla *mla, struct all_heads *heads,
                                  struct own_tensor *pe)
{
    struct exchange *x = &run->x;
    const int64_t element = x->dtype.bits / 8, num_heads = x->n * x->q_heads;
    const bool small = exchange_is_small(x), two = m->qk_rope_head_dim > 0;
    x->q_size = m->kv_lora_rank;
    x->q_row = m->kv_lora_rank * element;
    uint8_t *pe_rows = run->q + plan_aligned(x->tokens * num_heads * x->q_row);
    over_all(heads, run);
    over_rows(pe, run, pe_rows, num_heads, m->qk_rope_head_dim);
    if (small) {
        const struct attn_tensor *own[] = {mla->q_nope, mla->q_pe},
                                 *all[] = {&heads->q.tensor, &pe->tensor};
        return heads_gather_small(run, own, all, two ? 2 : 1);
    }
    TRY(heads_gather(run, mla->q_nope->data));
    if (!two) {
        return ATTN_OK;
    }
    run->q = pe_rows;
    x->q_row = m->qk_rope_head_dim * element;
    TRY(pack_rows(run, run->packed, mla->q_pe, x->q_heads, x->q_row, x->tokens));
    return heads_gather(run, run->packed);
}

attn_status mla_attend_spread(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                              struct launch *launch, const struct attn_io_mla *mla, int64_t tokens,
                              struct own_tensor *out, struct attn_error *error)
{
    const struct attn_mla_desc *m = step->layer->selected->mla;
    struct exchange_run run = exchange_begin(plan, step, io, tokens, error);
    const bool small = exchange_is_small(&run.x);
    struct attn_io_mla all = *mla;
    struct all_heads heads;
    struct own_tensor pe, part_lse;
    TRY(gather_queries(&run, m, mla, &heads, &pe));
    all.q_nope = &heads.q.tensor;
    all.q_pe = m->qk_rope_head_dim > 0 ? &pe.tensor : all.q_pe;
    const struct attn_step_io attend = {
        .next = &all.ext, .stream = io->stream, .out = &heads.out.tensor, .lse = &heads.lse.tensor};
    TRY(launch_run(launch, &attend, error));
    part_tensors(&run, run.received, out, &part_lse);
    if (small) {
        const struct attn_merge_heads_args merge = {.all_out = &heads.out.tensor,
                                                    .all_lse = &heads.lse.tensor,
                                                    .out = &out->tensor,
                                                    .lse = io->lse};
        return heads_merge_small(&run, merge);
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
        TRY(copy_rows(&run, rows + at * row, 0, gathered + from * row, 0, count * row, count > 0));
        at += count;
    }
    return ATTN_OK;
}
