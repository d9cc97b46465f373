/* SPDX-License-Identifier: Apache-2.0 */
/* MLA in a run: the projections around attend_mla, prefill per head, and what a run must bring.
 * Sources: DeepSeek-V2 (arXiv 2405.04434), section 2.1; vLLM v1, attention/backends/mla/common.py
 * for the order of the chunks. */
#include "ranks.h"
#include "mla.h"

/* What the calls of one run share. */
struct mla_call {
    attn_plan *plan;
    const struct mla_plan *p;
    const struct mla_weights *weights;
    struct step *step;
    const struct attn_step_io *io;
    const struct attn_io_mla *mla;
    const struct attn_mla_desc *desc;
    struct attn_tensor like; /* the activations' dtype and device */
    int64_t heads;
    int64_t first, end; /* rows of q, k, v and out */
    struct attn_error *error;
};

/* The call's rows of [T, heads, size] (columns at .. at+size-1) as [heads, rows, size]; of [T,
 * size] as the same rows for every head. */
static const struct attn_tensor *by_head(const struct mla_call *run, struct own_tensor *box,
                                         const struct attn_tensor *rows, int64_t at, int64_t size)
{
    int64_t head = rows->ndim == 3 ? tensor_stride(rows, 1) : 0;
    return tensor_set(box, rows, tensor_element(rows, run->first, 0, at), run->heads,
                      run->end - run->first, size, head, tensor_stride(rows, 0), 1);
}

/* Compact rows [heads, size] in the workspace of which the call's first is the first; nothing
 * before it is touched. */
static const struct attn_tensor *in_scratch(const struct mla_call *run, struct own_tensor *box,
                                            size_t place, int64_t heads, int64_t size)
{
    int64_t row = heads * size;
    uintptr_t data = (uintptr_t)(run->plan->scratch + place) -
                     (uintptr_t)(run->first * row * (run->like.dtype.bits / 8));
    return tensor_set(box, &run->like, (void *)data, run->end, heads, size, row, size, 1);
}

/* A tensor [heads, rows, columns] of weights or of their block scales, or transposed per head. */
static const struct attn_tensor *turned(struct own_tensor *box, const struct attn_tensor *w,
                                        bool transposed)
{
    int32_t i = transposed ? 2 : 1, j = transposed ? 1 : 2;
    return tensor_set(box, w, tensor_data(w), w->shape[0], w->shape[i], w->shape[j], w->strides[0],
                      w->strides[i], w->strides[j]);
}

/* a W or a W^T per head. */
static attn_status project(const struct mla_call *run, const struct instance *instance,
                           const struct attn_tensor *a, const struct head_weights *w,
                           bool transposed, const struct attn_tensor *out)
{
    struct own_tensor weights, scales;
    struct attn_batched_gemm_args args = KERNEL_ARGS(
        instance, run->io->stream, .a = a, .w = turned(&weights, &w->own.tensor, transposed),
        .w_scale = w->scale, .w_scale_count = w->num_scales, .out = out);
    if (w->block_scale.tensor.data != NULL) {
        args.w_block_scale = turned(&scales, &w->block_scale.tensor, transposed);
    }
    return operation("project", instance->kernels.batched_gemm(&args, run->error), run->error);
}

/* Rows of `size` dims to other strides: a product with the same identity for every head. */
static attn_status copy_by_gemm(const struct mla_call *run, const struct attn_tensor *from,
                                int64_t size, const struct attn_tensor *to)
{
    struct head_weights identity = {.scale = NULL};
    tensor_set(&identity.own, &run->like, (void *)(uintptr_t)run->p->identity, run->heads, size,
               size, 0, run->p->identity_size, 1);
    return project(run, step_instance(run->step), from, &identity, false, to);
}

static attn_status launch_mla(const struct mla_call *run, struct launch *launch,
                              const struct attn_io_mla *mla, const struct attn_tensor *out,
                              const struct attn_tensor *lse)
{
    const struct attn_step_io attend = {
        .next = &mla->ext, .stream = run->io->stream, .out = out, .lse = lse};
    return launch_run(launch, &attend, run->error);
}

/* Plain lists become the layer's top k, others go to the kernel as they came. */
static void hand_lists(const struct mla_call *run, struct attn_io_mla *mla,
                       struct attn_io_index_lists *lists)
{
    const struct layer *layer = run->step->layer->selected;
    mla->ext.next = NULL;
    if (layer->lists == NULL) {
        return;
    }
    ext_copy(&lists->ext, ext_find(run->io->next, ATTN_EXT_DRAFT_IO_INDEX_LISTS), sizeof *lists);
    if (lists_are_plain(layer)) {
        mla->topk_indices = lists->indices;
        mla->topk_stride = lists->token_stride;
    } else {
        mla->ext.next = &lists->ext;
    }
}

/* [Hq, T] of the part to the engine's strides. */
static attn_status copy_lse(const struct exchange_run *run, const struct own_tensor *part,
                            const struct attn_tensor *to)
{
    const struct grid here = {part->tensor.data, 0, 4, run->x.tokens * 4};
    const struct grid there = {tensor_data(to), 0, tensor_stride(to, 1) * 4,
                               tensor_stride(to, 0) * 4};
    return copy_grid(run, &there, &here, 4, 1, run->x.tokens, run->x.q_heads);
}

/* The absorbed queries of all ranks' heads against the rows that are here, reduced by log-sum-exp:
 * the tensor of the latent outputs of this rank's own heads. */
static attn_status attend_spread(const struct mla_call *run, struct launch *launch,
                                 const struct attn_io_mla *mla, struct own_tensor *out)
{
    const bool two = run->desc->qk_rope_head_dim > 0;
    const struct attn_tensor *own[] = {mla->q_nope, mla->q_pe}, *lse = run->io->lse;
    struct exchange_run exchange =
        exchange_begin(run->plan, run->step, run->io, run->end, run->error);
    struct attn_io_mla all = *mla;
    struct all_heads heads;
    struct own_tensor part_lse;
    TRY(heads_gather(&exchange, own, two ? 2 : 1, &heads));
    all.q_nope = &heads.q[0].tensor;
    all.q_pe = two ? &heads.q[1].tensor : all.q_pe;
    TRY(launch_mla(run, launch, &all, &heads.out.tensor, &heads.lse.tensor));
    part_tensors(&exchange, exchange.received, out, &part_lse);
    if (exchange_is_small(&exchange.x)) {
        return heads_merge_small(&exchange, &heads, (struct part_result){NULL},
                                 (struct part_result){&out->tensor, lse});
    }
    TRY(heads_reduce(&exchange));
    return lse != NULL ? copy_lse(&exchange, &part_lse, lse) : ATTN_OK;
}

/* The call's rows: q_nope W_UK next to q_pe against latent rows, the output through W_UV. */
static attn_status run_latent(const struct mla_call *run, struct launch *launch)
{
    const attn_layer *layer = run->step->layer;
    const struct instance *instance = layer->served[launch->args.phase].instance;
    const struct attn_mla_desc *m = run->desc;
    struct attn_io_mla mla;
    struct attn_io_index_lists lists;
    struct own_tensor q, out, a, b;
    int64_t padded = mla_padded_heads(layer);
    ext_copy(&mla.ext, &run->mla->ext, sizeof mla);
    hand_lists(run, &mla, &lists);
    if (!m->absorb_in_core) {
        return launch_mla(run, launch, &mla, run->io->out, run->io->lse);
    }
    const struct attn_tensor *latent_q =
        in_scratch(run, &q, run->p->at.latent_q, padded, m->kv_lora_rank);
    const struct attn_tensor *latent_out =
        in_scratch(run, &out, run->p->at.latent_out, padded, m->kv_lora_rank);
    TRY(project(run, instance, by_head(run, &a, mla.q_nope, 0, m->qk_nope_head_dim),
                &run->weights->uk, false, by_head(run, &b, latent_q, 0, m->kv_lora_rank)));
    mla.q_nope = latent_q;
    struct own_tensor reduced;
    if (layer_is_spread(layer)) {
        TRY(attend_spread(run, launch, &mla, &reduced));
        latent_out = &reduced.tensor;
    } else {
        TRY(launch_mla(run, launch, &mla, latent_out, run->io->lse));
    }
    return project(run, instance, by_head(run, &a, latent_out, 0, m->kv_lora_rank),
                   &run->weights->uv, false, by_head(run, &b, run->io->out, 0, m->v_head_dim));
}

/* k = [c W_UK^T | k_pe], v = c W_UV of the call's rows of c and k_pe, to those of k and v. */
static attn_status project_keys(const struct mla_call *run, const struct attn_tensor *c,
                                const struct attn_tensor *k_pe, int64_t pe_at,
                                const struct attn_tensor *k, const struct attn_tensor *v)
{
    const attn_layer *layer = run->step->layer;
    const struct instance *instance = layer->served[ATTN_PHASE_PREFILL].instance;
    const struct attn_mla_desc *m = run->desc;
    struct own_tensor a, b;
    TRY(project(run, instance, by_head(run, &a, c, 0, m->kv_lora_rank), &run->weights->uk, true,
                by_head(run, &b, k, 0, m->qk_nope_head_dim)));
    TRY_IF(m->qk_rope_head_dim > 0,
           copy_by_gemm(run, by_head(run, &a, k_pe, pe_at, m->qk_rope_head_dim),
                        m->qk_rope_head_dim,
                        by_head(run, &b, k, m->qk_nope_head_dim, m->qk_rope_head_dim)));
    return project(run, instance, by_head(run, &a, c, 0, m->kv_lora_rank), &run->weights->uv, false,
                   by_head(run, &b, v, 0, m->v_head_dim));
}

/* Both parts of the query as one row: as they lie if they are slices of one, else copied. */
static attn_status join_query(const struct mla_call *run, struct own_tensor *q)
{
    const struct attn_tensor *nope = run->mla->q_nope, *pe = run->mla->q_pe;
    const struct attn_mla_desc *m = run->desc;
    int64_t size = m->qk_nope_head_dim + m->qk_rope_head_dim;
    struct own_tensor a, b;
    if (m->qk_rope_head_dim == 0 ||
        (tensor_element(nope, 0, 0, m->qk_nope_head_dim) == tensor_data(pe) &&
         tensor_stride(nope, 0) == tensor_stride(pe, 0) &&
         tensor_stride(nope, 1) == tensor_stride(pe, 1))) {
        tensor_set(q, nope, tensor_data(nope), nope->shape[0], run->heads, size,
                   tensor_stride(nope, 0), tensor_stride(nope, 1), 1);
        return ATTN_OK;
    }
    struct mla_call of_query = *run;
    of_query.like = *nope; /* which may be quantized */
    in_scratch(&of_query, q, run->p->at.q, run->heads, size);
    TRY(copy_by_gemm(run, by_head(run, &a, nope, 0, m->qk_nope_head_dim), m->qk_nope_head_dim,
                     by_head(run, &b, &q->tensor, 0, m->qk_nope_head_dim)));
    return copy_by_gemm(run, by_head(run, &a, pe, 0, m->qk_rope_head_dim), m->qk_rope_head_dim,
                        by_head(run, &b, &q->tensor, m->qk_nope_head_dim, m->qk_rope_head_dim));
}

static attn_status attend_keys(const struct mla_call *run, struct launch *launch,
                               const struct attn_tensor *q, const struct attn_tensor *k,
                               const struct attn_tensor *v, struct part_result to)
{
    const struct attn_step_io attend = {
        .stream = run->io->stream, .q = q, .k = k, .v = v, .out = to.out, .lse = to.lse};
    return launch_run(launch, &attend, run->error);
}

void mla_chunk_view(const attn_plan *plan, const struct context_chunk *chunk,
                    struct attn_batch *view)
{
    struct mla_plan *p = mla_plan(plan);
    int32_t first = chunk->first_req;
    batch_cut(&p->context, first, first + chunk->num_reqs, view);
    view->max_query_len = p->context.max_query_len;
    view->key_start_loc_host = chunk->key_start; /* once they are gathered */
    view->key_start_loc = plan_on_device(plan, chunk->key_start);
    view->max_seq_len = p->chunk_rows;
    view_sees_all(view);
}

static attn_status gather(const struct mla_call *run, const struct context_chunk *chunk,
                          const struct attn_batch *view, const struct attn_tensor *rows)
{
    attn_layer *layer = run->step->layer;
    const struct instance *instance = layer->served[ATTN_PHASE_PREFILL].instance;
    struct attn_gather_kv_args args =
        KERNEL_ARGS(instance, run->io->stream, .layer = &layer->parts[PART_MAIN],
                    .params = &layer->part_params[PART_MAIN], .cache = &layer->owner->k_cache,
                    .batch = view, .first_key = plan_on_device(run->plan, chunk->first_key),
                    .out_start_loc = plan_on_device(run->plan, chunk->start), .out = rows);
    return operation("gather", instance->kernels.gather_kv(&args, run->error), run->error);
}

/* A chunk's rows of this rank to those of all ranks, by request. All of them are visible, so that
 * their order within a request is free. */
static attn_status gather_spread(const struct mla_call *run, const struct context_chunk *chunk)
{
    const attn_layer *layer = run->step->layer;
    const struct attn_collectives *ranks = layer->selected->cp->decode;
    const struct exchange_run exchange =
        exchange_begin(run->plan, run->step, run->io, chunk->num_rows, run->error);
    const int64_t row = layer->desc->head_size * (int64_t)(run->like.dtype.bits / 8);
    uint8_t *gathered = run->plan->scratch + run->p->at.gathered;
    uint8_t *rows = run->plan->scratch + run->p->at.rows;
    TRY(collective_run(&exchange, ranks, ranks->all_gather, run->plan->scratch + run->p->at.local,
                       gathered, chunk->num_rows * row));
    for (int32_t i = 0; i < chunk->num_reqs * ranks->world_size; i++) {
        int64_t rank = i % ranks->world_size, count = chunk->rank_rows[i];
        int64_t from = rank * chunk->num_rows + chunk->start[i / ranks->world_size];
        TRY(copy_bytes(&exchange, rows, gathered + from * row, count * row));
        rows += count * row;
    }
    return ATTN_OK;
}

/* One chunk: gathered once, projected, attended by its requests' queries, and merged into what they
 * have so far. */
static attn_status run_chunk(const struct mla_call *run, int32_t index, const struct attn_tensor *q,
                             const struct attn_tensor *lse)
{
    attn_plan *plan = run->plan;
    const struct context_chunk *chunk = &run->p->chunks[index];
    struct launch *launch = &run->step->launches[ATTN_PHASE_PREFILL][PART_CONTEXT];
    const struct instance *instance = step_instance(run->step);
    const struct attn_mla_desc *m = run->desc;
    const int32_t head_size = run->step->layer->desc->head_size;
    struct own_tensor rows, local, k, v, out, partial_lse;
    struct attn_batch view;
    bool spread = layer_is_spread(run->step->layer);
    struct mla_call keys = *run;
    keys.first = 0;
    keys.end = chunk->num_rows;
    in_scratch(&keys, &local, run->p->at.local, 1, head_size);
    keys.end = chunk->key_start[chunk->num_reqs];
    in_scratch(&keys, &rows, run->p->at.rows, 1, head_size);
    in_scratch(&keys, &k, run->p->at.k, run->heads, m->qk_nope_head_dim + m->qk_rope_head_dim);
    in_scratch(&keys, &v, run->p->at.v, run->heads, m->v_head_dim);
    tensor_set_rows(&out, &run->like, plan->scratch + plan->layout.out, plan->num_tokens,
                    run->heads, m->v_head_dim);
    tensor_set_lse(&partial_lse, &run->like, plan->scratch + plan->layout.lse[0], run->heads,
                   plan->num_tokens);
    mla_chunk_view(plan, chunk, &view);
    TRY(gather(run, chunk, &view, spread ? &local.tensor : &rows.tensor));
    TRY_IF(spread, gather_spread(run, chunk));
    /* the gathered row is latent and rope part side by side, the same for all heads */
    rows.tensor.ndim = 2;
    rows.shape[1] = head_size;
    rows.strides[1] = 1;
    TRY(project_keys(&keys, &rows.tensor, &rows.tensor, m->kv_lora_rank, &k.tensor, &v.tensor));
    attn_status status = ATTN_OK;
    launch->args.batch = &view;
    if (run->p->num_chunks > 1 && instance->kernels.schedule != NULL) {
        launch->args.stream = run->io->stream; /* one schedule's memory serves all chunks in turn */
        launch->args.q = launch->args.k = launch->args.v = launch->args.out = NULL;
        status = instance->kernels.schedule(&launch->args, ATTN_PLAN_EAGER, run->error);
    }
    const struct part_result partial = {&out.tensor, &partial_lse.tensor};
    const struct part_result so_far = {run->io->out, lse};
    status = status ? status : attend_keys(run, launch, q, &k.tensor, &v.tensor, partial);
    launch->args.batch = &run->p->first_chunk;
    TRY(status);
    const int64_t first_row = view.query_start_loc_host[0]; /* in q and out */
    const int64_t count_rows = view.num_actual_tokens - first_row;
    return step_merge(run->step, partial, so_far, so_far,
                      (struct merge_rows){first_row, count_rows, count_rows}, run->io->stream,
                      run->error);
}

/* The call's rows, prefills: causal over their own keys, then chunk by chunk over what came
 * before. */
static attn_status run_per_head(const struct mla_call *run)
{
    attn_plan *plan = run->plan;
    const struct attn_mla_desc *m = run->desc;
    const struct attn_tensor *lse = run->io->lse;
    struct own_tensor q, k, v, own_lse;
    in_scratch(run, &k, run->p->at.k, run->heads, m->qk_nope_head_dim + m->qk_rope_head_dim);
    in_scratch(run, &v, run->p->at.v, run->heads, m->v_head_dim);
    if (lse == NULL && run->p->num_chunks > 0) {
        lse = tensor_set_lse(&own_lse, &run->like, plan->scratch + plan->layout.lse[1], run->heads,
                             plan->num_tokens);
    }
    TRY(join_query(run, &q));
    TRY(project_keys(run, run->mla->kv_c, run->mla->k_pe, 0, &k.tensor, &v.tensor));
    TRY(attend_keys(run, run->step->main[1], &q.tensor, &k.tensor, &v.tensor,
                    (struct part_result){run->io->out, lse}));
    for (int32_t i = 0; i < run->p->num_chunks; i++) {
        TRY(run_chunk(run, i, &q.tensor, lse));
    }
    return ATTN_OK;
}

attn_status mla_run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                    struct attn_error *error)
{
    struct mla_call run = {.plan = plan,
                           .p = mla_plan(plan),
                           .weights = step->layer->data[COMPOSITION_MLA],
                           .step = step,
                           .io = io,
                           .mla = ext_find(io->next, ATTN_EXT_IO_MLA),
                           .desc = step->layer->selected->mla,
                           .like = tensor_like(plan, &step->k),
                           .heads = step->layer->desc->num_q_heads,
                           .error = error};
    const int64_t decodes = plan->first_row + plan->split.num_decode_tokens;
    const int64_t last = decodes + plan->split.num_prefill_tokens;
    /* one call: decodes only, or all of a batch */
    const bool one = step->main[0] != NULL && step->main[1] == NULL;
    run.first = plan->first_row;
    run.end = one ? last : decodes;
    TRY_IF(step->main[0] != NULL, run_latent(&run, step->main[0]));
    if (one) {
        return ATTN_OK;
    }
    run.first = decodes;
    run.end = last;
    return mla_per_head(step->layer) ? run_per_head(&run) : run_latent(&run, step->main[1]);
}

static attn_status check_attend(const attn_plan *plan, const struct step *step,
                                const struct attn_step_io *io, const struct attn_io_mla *mla,
                                struct attn_error *error)
{
    const struct attn_mla_desc *m = step->layer->selected->mla;
    TRY(step_check_lse(io->lse, mla_padded_heads(step->layer), plan->num_tokens, error));
    if (step->layer->selected->lists != NULL) {
        BAD_IF(mla->topk_indices != NULL, "topk_indices",
               "is given next to the lists of attn_io_index_lists");
    } else if (m->topk > 0 && (mla->topk_indices == NULL || mla->topk_stride < m->topk)) {
        return BAD("topk_indices", "topk_indices is NULL, or topk_stride under the layer's topk");
    }
    return step_check_out(plan, step, io, error);
}

attn_status mla_check_io(const attn_plan *plan, const struct step *step,
                         const struct attn_step_io *io, bool writes, bool attends,
                         struct attn_error *error)
{
    const struct attn_io_mla *mla = ext_find(io->next, ATTN_EXT_IO_MLA);
    const struct attn_mla_desc *m = step->layer->selected->mla;
    const struct attn_layer_desc *l = step->layer->desc;
    BAD_IF(mla == NULL || io->q != NULL || io->k != NULL || io->v != NULL, "attn_io_mla",
           "a run of MLA brings its tensors in attn_io_mla, and q, k and v are NULL");
    bool projects = attends && mla_per_head(step->layer) && plan->split.num_prefill_tokens > 0;
    int64_t rows = writes ? plan->given.num_slots : 0;
    rows = projects && plan->num_tokens > rows ? plan->num_tokens : rows;
    const struct {
        const char *name;
        const struct attn_tensor *tensor;
        bool is_query;
        int32_t size;
    } tensors[] = {
        {"kv_c", mla->kv_c, false, m->kv_lora_rank},
        {"k_pe", mla->k_pe, false, m->qk_rope_head_dim},
        {"q_nope", mla->q_nope, true, m->absorb_in_core ? m->qk_nope_head_dim : m->kv_lora_rank},
        {"q_pe", mla->q_pe, true, m->qk_rope_head_dim}};
    for (int32_t i = 0; i < 4; i++) {
        const bool is_query = tensors[i].is_query;
        const char *name = tensors[i].name;
        const struct tensor_form query = {step->q.kind, mla_padded_heads(step->layer),
                                          tensors[i].size};
        const struct tensor_need flat = {
            name, 2, {rows, tensors[i].size}, 1, dtype_of_id(l->dtype)};
        if (tensors[i].size > 0 && (is_query ? attends : writes || projects)) {
            TRY(is_query ? check_rows(name, tensors[i].tensor, &query, plan->num_tokens, error)
                         : tensor_check(tensors[i].tensor, &flat, NULL, error));
            TRY_IF(!is_query && writes, validate_written(plan, tensors[i].tensor, name, error));
            /* heads that the engine pads to may hold anything */
            const int64_t heads = is_query ? l->num_q_heads : INT64_MAX;
            TRY_IF(is_query || projects,
                   validate_heads(plan, tensors[i].tensor, heads, name, error));
        }
    }
    return attends ? check_attend(plan, step, io, mla, error) : ATTN_OK;
}
