/* SPDX-License-Identifier: Apache-2.0 */
/* Queries to all ranks, partial results back: first over those that split the heads, then over
 * those that split the queries. */
#include "ranks.h"

enum { MOST_COPIES = 16 }; /* in one call */

/* All of a step's tensors are of the layer's own dtype here. */
void exchange_init(struct exchange *x, const struct step *step, int64_t tokens)
{
    const struct attn_layer_desc *layer = step->layer->desc;
    const struct attn_context_parallel *cp = step->layer->selected->cp;
    const struct attn_tensor kind = tensor_of_kind(step->k.kind);
    const int64_t element = kind.dtype.bits / 8;
    *x = (struct exchange){.ranks = cp->decode,
                           .rows = layer_splits_queries(step->layer) ? cp->prefill : NULL,
                           .n = ranks_count(cp->decode),
                           .tokens = tokens,
                           .q_heads = layer->num_q_heads,
                           .kv_heads = step->k.heads,
                           .group = layer->num_q_heads / step->k.heads,
                           .out_size = step->layer->parts[PART_MAIN].head_size_v,
                           .dtype = kind.dtype,
                           .reduce = cp->reduce,
                           .invariant = layer->batch_invariant != 0};
    x->q_row = layer->head_size * element;
    x->out_row = x->out_size * element;
}

struct exchange_run exchange_begin(attn_plan *plan, struct step *step,
                                   const struct attn_step_io *io, int64_t tokens,
                                   struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    struct exchange_run run = {.plan = plan,
                               .p = p,
                               .step = step,
                               .io = io,
                               .error = error,
                               .out = plan->scratch + p->at.out,
                               .received = plan->scratch + p->at.received,
                               .lse = (float *)(plan->scratch + p->at.lse),
                               .own_lse = (float *)(plan->scratch + p->at.own_lse)};
    exchange_init(&run.x, step, tokens);
    return run;
}

int64_t exchange_part(const struct exchange *x, int64_t tokens)
{
    return plan_aligned(tokens * x->q_heads * x->out_row) + plan_aligned(tokens * x->q_heads * 4);
}

/* The pairs (0, 0) .. (count - 1, count - 1) of every copy. */
static attn_status copy_all(const struct exchange_run *run, const struct attn_block_copy *copies,
                            int32_t num_copies, int64_t count)
{
    const struct instance *instance = step_instance(run->step);
    const struct attn_copy_blocks_args args =
        KERNEL_ARGS(instance, run->io->stream, .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                    .num_copies = num_copies, .copies = copies, .pairs = run->p->pairs,
                    .num_pairs = count, .copy_stride = (int32_t)sizeof *copies);
    if (count <= 0 || num_copies <= 0) {
        return ATTN_OK;
    }
    return operation("copy", instance->kernels.copy_blocks(&args, run->error), run->error);
}

attn_status copy_bytes(const struct exchange_run *run, void *to, const void *from, int64_t bytes)
{
    const struct attn_block_copy copy = {from, to, 0, 0, bytes};
    return copy_all(run, &copy, 1, bytes > 0);
}

attn_status copy_grid(const struct exchange_run *run, const struct grid *to,
                      const struct grid *from, int64_t bytes, int64_t parts, int64_t rows,
                      int64_t heads)
{
    const bool by_row = rows < heads;
    const int64_t outer = parts * (by_row ? rows : heads), inner = by_row ? heads : rows;
    struct attn_block_copy copies[MOST_COPIES];
    for (int64_t i = 0, n = 0; i < outer; i++) {
        const int64_t part = i % parts, at = i / parts;
        copies[n++] = (struct attn_block_copy){
            from->data + part * from->part + at * (by_row ? from->row : from->head),
            to->data + part * to->part + at * (by_row ? to->row : to->head),
            by_row ? from->head : from->row, by_row ? to->head : to->row, bytes};
        if (n == MOST_COPIES || i + 1 == outer) {
            TRY(copy_all(run, copies, (int32_t)n, inner));
            n = 0;
        }
    }
    return ATTN_OK;
}

/* The core's text for a call that brings none. */
static attn_status report(const struct exchange_run *run, attn_status status,
                          const struct attn_error *why)
{
    return status == ATTN_OK || why->message[0] != '\0'
               ? error_relay(run->error, status, why)
               : error_set_text(run->error, status, "collectives",
                                "a collective of the engine failed");
}

/* No more of it is written than has to be. */
static inline void begin_error(struct attn_error *why)
{
    why->struct_size = sizeof *why;
    why->status = why->reserved = 0;
    why->field[0] = why->message[0] = '\0';
}

attn_status collective_run(const struct exchange_run *run, const struct attn_collectives *ranks,
                           collective *call, const void *send, void *receive, int64_t count)
{
    const struct attn_collective_args args =
        ABI_ARGS(.user = ranks->user, .send = send, .receive = receive, .count = (size_t)count,
                 .stream = run->io->stream);
    struct attn_error why;
    begin_error(&why);
    const int64_t begin = observe_operation("collective");
    const attn_status status = call(&args, &why);
    observe_operation_end("collective", begin);
    return operation("collective", report(run, status, &why), run->error);
}

attn_status pack_rows(const struct exchange_run *run, void *to, const struct attn_tensor *from,
                      int64_t heads, int64_t row, int64_t count)
{
    const int64_t element = from->dtype.bits / 8, all = heads * row;
    const int64_t stride = tensor_stride(from, 0) * element,
                  head = tensor_stride(from, 1) * element;
    const struct grid rows = {tensor_data(from), 0, stride, head};
    const bool compact = head == row;
    return copy_grid(run, &(const struct grid){to, 0, all, row}, &rows, compact ? all : row, 1,
                     count, compact ? 1 : heads);
}

static void over_rows(struct own_tensor *over, const struct exchange_run *run, void *data,
                      int64_t heads, int64_t head_size)
{
    const struct attn_tensor like = {.device = run->plan->model->device, .dtype = run->x.dtype};
    tensor_set_rows(over, &like, data, run->x.tokens, heads, head_size);
}

void over_lse(struct own_tensor *over, const struct exchange_run *run, float *data, int64_t heads)
{
    const struct attn_tensor like = {.device = run->plan->model->device};
    tensor_set_lse(over, &like, data, heads, run->x.tokens);
}

attn_status merge_parts(const struct exchange_run *run, struct part_result a, struct part_result b,
                        struct part_result to)
{
    return step_merge(run->step, a, b, to, (struct merge_rows){0, run->x.tokens, run->x.tokens},
                      run->io->stream, run->error);
}

void part_tensors(const struct exchange_run *run, uint8_t *area, struct own_tensor *out,
                  struct own_tensor *lse)
{
    const struct exchange *x = &run->x;
    over_rows(out, run, area, x->q_heads, run->x.out_size);
    over_lse(lse, run, (float *)(area + plan_aligned(x->tokens * x->q_heads * x->out_row)),
             x->q_heads);
}

/* Heads of `ranks` ranks from `first` on, between rows of all ranks' heads at `all`, [T, Hk, n, g],
 * and each rank's own rows [T, Hk, g], `part_stride` bytes from rank to rank at `parts`; `head`
 * bytes each. */
static attn_status order_heads(const struct exchange_run *run, uint8_t *all, uint8_t *parts,
                               int64_t part_stride, int64_t head, int64_t first, int64_t ranks,
                               bool to_parts)
{
    const struct exchange *x = &run->x;
    const int64_t group = x->group * head, row = x->q_heads * head;
    const struct grid own = {parts, part_stride, row, group};
    const struct grid whole = {all + first * group, group, x->n * row, x->n * group};
    return copy_grid(run, to_parts ? &own : &whole, to_parts ? &whole : &own, group, ranks,
                     x->tokens, x->kv_heads);
}

/* out and lse of the heads of `ranks` ranks from `first` on, each rank's into an area of its own,
 * exchange_part bytes from one to the next. */
static attn_status pack_parts(const struct exchange_run *run, int64_t first, int64_t ranks,
                              uint8_t *areas)
{
    const struct exchange *x = &run->x;
    const int64_t part = exchange_part(x, x->tokens), group = x->group * x->tokens * 4;
    const struct grid all = {(uint8_t *)run->lse + first * group, group, 0, x->n * group};
    const struct grid to = {areas + plan_aligned(x->tokens * x->q_heads * x->out_row), part, 0,
                            group};
    TRY(order_heads(run, run->out, areas, part, x->out_row, first, ranks, true));
    return copy_grid(run, &to, &all, group, ranks, 1, x->kv_heads);
}

/* The parts of `ranks` ranks in `areas`, merged in the order of the ranks into the first. */
static attn_status merge_ranks(const struct exchange_run *run, uint8_t *areas, int64_t ranks)
{
    const int64_t part = exchange_part(&run->x, run->x.tokens);
    struct own_tensor out, lse, next_out, next_lse;
    part_tensors(run, areas, &out, &lse);
    const struct part_result merged = {&out.tensor, &lse.tensor};
    const struct part_result next = {&next_out.tensor, &next_lse.tensor};
    for (int64_t rank = 1; rank < ranks; rank++) {
        part_tensors(run, areas + rank * part, &next_out, &next_lse);
        TRY(merge_parts(run, merged, next, merged));
    }
    return ATTN_OK;
}

/* Every rank gets all partial results of its own heads, and merges them into the first area of
 * `received`. */
static attn_status reduce_all_to_all(const struct exchange_run *run)
{
    const struct exchange *x = &run->x;
    uint8_t *send = run->plan->scratch + run->p->at.send;
    TRY(pack_parts(run, 0, x->n, send));
    TRY(collective_run(run, x->ranks, x->ranks->all_to_all, send, run->received,
                       exchange_part(x, x->tokens)));
    return merge_ranks(run, run->received, x->n);
}

/* Every rank weighs its partial results by all ranks' log-sum-exp, and sums over the ranks bring
 * each its own heads. A merge with zeros under the others' log-sum-exp is that weighing. */
static attn_status reduce_by_sum(const struct exchange_run *run)
{
    const struct exchange *x = &run->x;
    const struct parallel_plan *p = run->p;
    int64_t heads = x->n * x->q_heads, count = x->tokens * x->q_heads * (x->out_row / 4);
    uint8_t *base = run->plan->scratch, *send = base + p->at.send;
    float *all = (float *)(base + p->at.all_lse), *other_lse = (float *)(base + p->at.other_lse);
    struct own_tensor out, lse, zeros, others, one;
    int32_t found = 0;
    over_rows(&out, run, run->out, heads, run->x.out_size);
    over_rows(&zeros, run, base + p->at.zeros, heads, run->x.out_size);
    over_lse(&lse, run, run->lse, heads);
    over_lse(&others, run, other_lse, heads);
    const struct part_result all_heads = {&out.tensor, &lse.tensor};
    const struct part_result weighed = {&zeros.tensor, &others.tensor};
    TRY(zero_tensor(run->plan, run->step, &zeros.tensor, run->io->stream, run->error));
    TRY(collective_run(run, x->ranks, x->ranks->all_gather, run->lse, all, heads * x->tokens * 4));
    for (int64_t rank = 0; rank < x->n; rank++) {
        float *theirs = all + rank * heads * x->tokens;
        if (rank == x->ranks->rank) {
            continue;
        }
        if (found++ == 0) {
            TRY(copy_bytes(run, other_lse, theirs, heads * x->tokens * 4));
            continue;
        }
        over_lse(&one, run, theirs, heads);
        TRY(merge_parts(run, weighed, (struct part_result){&zeros.tensor, &one.tensor}, weighed));
    }
    TRY(merge_parts(run, all_heads, weighed, all_heads));
    TRY(order_heads(run, run->out, send, count * 4, x->out_row, 0, x->n, true));
    /* the weighted lse of its own heads, next to where the sum goes */
    TRY(pack_parts(run, x->ranks->rank, 1, run->received));
    return collective_run(run, x->ranks, x->ranks->reduce_scatter_f32, send, run->received, count);
}

attn_status heads_reduce(const struct exchange_run *run)
{
    if (run->x.n == 1) {
        return pack_parts(run, 0, 1, run->received);
    }
    return run->x.reduce == ATTN_CP_ALL_TO_ALL ? reduce_all_to_all(run) : reduce_by_sum(run);
}

bool exchange_is_small(const struct exchange *x)
{
    const struct attn_collectives *ranks = x->ranks;
    if (ranks->struct_size < sizeof *ranks || ranks->gather_heads == NULL || x->n == 1 ||
        x->rows != NULL || x->invariant || x->reduce != ATTN_CP_ALL_TO_ALL ||
        (x->q_row | x->out_row) % 8 != 0) {
        return false;
    }
    const int64_t row = 8 + (x->q_row > x->out_row ? x->q_row : x->out_row);
    return (uint64_t)(x->tokens * x->q_heads * row) <= ranks->max_exchange_bytes;
}

static attn_status gather_small(const struct exchange_run *run,
                                const struct attn_tensor *const *own,
                                const struct attn_tensor *const *all, int32_t count)
{
    const struct attn_collectives *ranks = run->x.ranks;
    const struct attn_gather_heads_args args =
        ABI_ARGS(.user = ranks->user, .stream = run->io->stream, .own = own, .all = all,
                 .count = count, .num_kv_heads = (int32_t)run->x.kv_heads);
    struct attn_error why;
    begin_error(&why);
    return report(run, ranks->gather_heads(&args, &why), &why);
}

attn_status heads_merge_small(const struct exchange_run *run, const struct all_heads *all,
                              struct part_result own, struct part_result to)
{
    const struct attn_collectives *ranks = run->x.ranks;
    const struct attn_merge_heads_args args =
        ABI_ARGS(.user = ranks->user, .stream = run->io->stream, .all_out = &all->out.tensor,
                 .all_lse = &all->lse.tensor, .own_out = own.out, .own_lse = own.lse, .out = to.out,
                 .lse = to.lse, .num_kv_heads = (int32_t)run->x.kv_heads);
    struct attn_error why;
    begin_error(&why);
    return report(run, ranks->merge_heads(&args, &why), &why);
}

/* A rank's rows side by side, where they lie or packed; where the queries are split, those of all
 * ranks that split them, each rank's in as many rows as the widest has. Then those of all ranks'
 * heads as [T, Hk, n, g, size], at all->tensor.data; without other heads they stay. */
static attn_status gather_rows(const struct exchange_run *run, const struct attn_tensor *own,
                               struct own_tensor *all)
{
    const struct exchange *x = &run->x;
    const bool split = run->p->split;
    const int64_t size = own->shape[2], head = size * (x->dtype.bits / 8), row = x->q_heads * head;
    uint8_t *rows = tensor_data(own);
    uint8_t *packed = run->plan->scratch + run->p->at.packed;
    uint8_t *gathered = run->plan->scratch + run->p->at.gathered;
    if (split || tensor_stride(own, 0) != x->q_heads * size || tensor_stride(own, 1) != size) {
        TRY(pack_rows(run, packed, own, x->q_heads, head,
                      split ? run->plan->given.num_actual_tokens : x->tokens));
        rows = packed;
    }
    if (split) {
        rows = run->plan->scratch + run->p->at.rows;
        TRY(collective_run(run, x->rows, x->rows->all_gather, packed, rows, run->p->widest * row));
    }
    if (x->n == 1) {
        all->tensor.data = rows;
        return ATTN_OK;
    }
    TRY(collective_run(run, x->ranks, x->ranks->all_gather, rows, gathered, x->tokens * row));
    return order_heads(run, all->tensor.data, gathered, x->tokens * row, head, 0, x->n, false);
}

attn_status heads_gather(const struct exchange_run *run, const struct attn_tensor *const *own,
                         int32_t count, struct all_heads *all)
{
    const struct exchange *x = &run->x;
    const struct attn_tensor *queries[] = {&all->q[0].tensor, &all->q[1].tensor};
    const int64_t heads = x->n * x->q_heads, element = x->dtype.bits / 8;
    uint8_t *at = run->plan->scratch + run->p->at.q;
    over_rows(&all->out, run, run->out, heads, x->out_size);
    over_lse(&all->lse, run, run->lse, heads);
    for (int32_t i = 0; i < count; i++) {
        over_rows(&all->q[i], run, at, heads, own[i]->shape[2]);
        at += plan_aligned(x->tokens * heads * own[i]->shape[2] * element);
    }
    if (exchange_is_small(x)) {
        return gather_small(run, own, queries, count);
    }
    for (int32_t i = 0; i < count; i++) {
        TRY(gather_rows(run, own[i], &all->q[i]));
    }
    return ATTN_OK;
}

/* The rows of each rank out of the part at `from`, which has all ranks', as a part of their own. */
static attn_status pack_ranks(const struct exchange_run *run, uint8_t *from, uint8_t *areas)
{
    const struct exchange *x = &run->x;
    const int64_t ranks = x->rows->world_size, row = x->q_heads * x->out_row;
    const int64_t bytes = run->p->widest * row, lse = (int64_t)run->p->widest * 4;
    const int64_t part = exchange_part(x, run->p->widest);
    const struct grid out_to = {areas, part, 0, 0}, out_from = {from, bytes, 0, 0};
    const struct grid lse_to = {areas + plan_aligned(bytes), part, 0, lse};
    const struct grid lse_from = {from + plan_aligned(x->tokens * row), lse, 0, x->tokens * 4};
    TRY(copy_grid(run, &out_to, &out_from, bytes, ranks, 1, bytes > 0));
    return copy_grid(run, &lse_to, &lse_from, lse, ranks, 1, x->q_heads);
}

/* Each rank's own rows from all of them, merged in the order of the ranks. Where every rank has all
 * queries, their parts are merged in the same way on each. Leaves the result in run->received, and
 * the number of its rows in run->x.tokens. */
attn_status rows_reduce(struct exchange_run *run)
{
    struct exchange *x = &run->x;
    uint8_t *send = run->plan->scratch + run->p->at.rows_send;
    uint8_t *received = run->plan->scratch + run->p->at.rows_received;
    if (x->rows == NULL) {
        return ATTN_OK;
    }
    const bool split = run->p->split;
    int64_t tokens = split ? run->p->widest : x->tokens, part = exchange_part(x, tokens);
    TRY_IF(split, pack_ranks(run, run->received, send));
    TRY(collective_run(run, x->rows, split ? x->rows->all_to_all : x->rows->all_gather,
                       split ? send : run->received, received, part));
    x->tokens = tokens;
    run->received = received;
    return merge_ranks(run, received, x->rows->world_size);
}

int32_t context_cache_ranks(const struct attn_context_parallel *cp)
{
    return cp != NULL && cp->decode != NULL ? ranks_count(cp->decode) * ranks_count(cp->prefill)
                                            : 1;
}

int32_t layer_cache_rank(const attn_layer *layer)
{
    const struct attn_context_parallel *cp = layer->selected->cp;
    return (cp->prefill != NULL ? cp->prefill->rank : 0) * ranks_count(cp->decode) +
           cp->decode->rank;
}

int32_t parallel_local_length(const attn_layer *layer, int32_t context, int32_t rank)
{
    const int32_t keys = context > 0 ? context : 0, ranks = layer_cache_ranks(layer);
    return ranks > 1 ? local_keys(keys, rank, ranks, layer->selected->cp->interleave) : keys;
}
