/* SPDX-License-Identifier: Apache-2.0 */
#include "step/parallel.h"

#include <string.h>

#include "util/error.h"
#include "util/structs.h"

#define ALIGNMENT 256

/* Sizes of one layer's exchange. Heads of all ranks stand as [Hk, n, g]: each rank's group beside
 * the others' over the key head that they have in common. */
struct exchange {
    const struct attn_collectives *ranks;
    int64_t n, tokens, q_heads, kv_heads, group; /* of one rank */
    int64_t q_row, out_row;                      /* bytes of one head */
    int64_t part;                                /* bytes of one rank's output and lse, out first */
    struct attn_dtype dtype;
};

static int64_t aligned(int64_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void exchange_init(struct exchange *x, const struct step *step, int64_t tokens)
{
    struct attn_tensor kind = {0};
    tensor_set_kind(&kind, step->out.kind);
    int64_t element = kind.dtype.bits / 8;
    *x = (struct exchange){.ranks = step->layer->layer.cp->decode,
                           .n = step->layer->layer.cp->decode->world_size,
                           .tokens = tokens,
                           .q_heads = step->q.heads,
                           .kv_heads = step->k.heads,
                           .group = step->q.heads / step->k.heads,
                           .q_row = step->q.head_size * element,
                           .out_row = step->out.head_size * element,
                           .dtype = kind.dtype};
    x->part = aligned(tokens * x->q_heads * x->out_row) + aligned(tokens * x->q_heads * 4);
}

size_t parallel_lay_out(attn_plan *plan, size_t at)
{
    struct scratch *s = &plan->scratch;
    size_t q = 0, out = 0, parts = 0, lse = 0;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        struct exchange x;
        if (!layer_is_spread(plan->steps[i].layer)) {
            continue;
        }
        exchange_init(&x, &plan->steps[i], plan->limits.max_num_tokens);
        size_t sizes[] = {(size_t)aligned(x.n * x.tokens * x.q_heads * x.q_row),
                          (size_t)aligned(x.n * x.tokens * x.q_heads * x.out_row),
                          (size_t)(x.n * x.part), (size_t)aligned(x.n * x.tokens * x.q_heads * 4)};
        size_t *most[] = {&q, &out, &parts, &lse};
        for (int32_t j = 0; j < 4; j++) {
            *most[j] = sizes[j] > *most[j] ? sizes[j] : *most[j];
        }
        plan->parallel.world_size =
            (int32_t)x.n > plan->parallel.world_size ? (int32_t)x.n : plan->parallel.world_size;
    }
    const struct {
        size_t *place;
        size_t bytes;
    } areas[] = {{&s->parallel.packed, q},
                 {&s->parallel.gathered, q},
                 {&s->parallel.q, q},
                 {&s->parallel.out, out},
                 {&s->parallel.lse, lse},
                 {&s->parallel.send, parts},
                 {&s->parallel.received, parts},
                 {&s->parallel.zeros, out},
                 {&s->parallel.all_lse, lse * (size_t)(plan->parallel.world_size)},
                 {&s->parallel.other_lse, lse}};
    for (size_t i = 0; i < sizeof areas / sizeof *areas; i++) {
        *areas[i].place = at;
        at += areas[i].bytes;
    }
    return at;
}

/* Rows are copied by pairs (t, t); one pair (0, 0) copies a whole area. */
attn_status parallel_init(attn_plan *plan, struct attn_error *error)
{
    int32_t tokens = plan->limits.max_num_tokens;
    bool any = false;
    for (int32_t i = 0; i < plan->num_steps; i++) {
        any |= layer_is_spread(plan->steps[i].layer);
    }
    if (!any) {
        return ATTN_OK;
    }
    plan->parallel.pairs =
        runtime_alloc(plan->model->runtime, 2 * (size_t)tokens * sizeof(int64_t));
    if (plan->parallel.pairs == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plan", "no memory for %d pairs", tokens);
    }
    for (int64_t t = 0; t < tokens; t++) {
        plan->parallel.pairs[2 * t] = plan->parallel.pairs[2 * t + 1] = t;
    }
    return ATTN_OK;
}

void parallel_finish(attn_plan *plan)
{
    runtime_free(plan->model->runtime, plan->parallel.pairs,
                 2 * (size_t)plan->limits.max_num_tokens * sizeof(int64_t));
}

/* The engine's own counts of this rank's keys. What the host can see of them has to be a part of
 * each request's context. */
static attn_status take_local(const attn_plan *plan,
                              const struct attn_batch_context_parallel *given,
                              struct attn_batch *context, struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    const bool validate = plan->validate && plan->model->device.type == ATTN_DEVICE_CPU;
    const int32_t *start = whole->query_start_loc_host, *lens = given->local_seq_lens_host;
    int32_t most = whole->max_seq_len;
    if (given->max_local_seq_len < 0 || given->max_local_seq_len > most) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "max_local_seq_len",
                         "max_local_seq_len is %d; 0 to max_seq_len, %d", given->max_local_seq_len,
                         most);
    }
    most = given->max_local_seq_len > 0 ? given->max_local_seq_len : most;
    for (int32_t r = 0; lens != NULL && r < whole->num_reqs; r++) {
        int32_t length = whole->seq_lens_host != NULL ? whole->seq_lens_host[r] : most;
        int32_t queries = whole->seq_lens_host != NULL ? start[r + 1] - start[r] : 0;
        int32_t limit = length - queries > 0 ? length - queries : 0;
        limit = limit < most ? limit : most;
        if (lens[r] < 0 || lens[r] > limit) {
            return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "local_seq_lens",
                             "local_seq_lens[%d] is %d; 0 to %d, the request's context and "
                             "max_local_seq_len",
                             r, lens[r], limit);
        }
        if (validate && given->local_seq_lens[r] != lens[r]) {
            return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "local_seq_lens",
                             "local_seq_lens[%d] is %d on the device and %d on the host", r,
                             given->local_seq_lens[r], lens[r]);
        }
    }
    context->seq_lens = given->local_seq_lens;
    context->seq_lens_host = lens;
    context->max_seq_len = most;
    return ATTN_OK;
}

attn_status parallel_make_views(attn_plan *plan, struct attn_error *error)
{
    const struct attn_context_parallel *cp = plan->steps[0].layer->layer.cp;
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *context = &plan->views[VIEW_CONTEXT], *fresh = &plan->views[VIEW_NEW];
    const struct attn_batch_context_parallel *given =
        (const struct attn_batch_context_parallel *)ext_find(whole->next, ATTN_EXT_BATCH_CONTEXT,
                                                             sizeof *given);
    int32_t interleave = cp->interleave > 0 ? cp->interleave : 1, longest = 0;
    if (whole->seq_lens_host == NULL && (given == NULL || given->local_seq_lens == NULL)) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, "local_seq_lens",
                         "context parallelism needs seq_lens_host, or local_seq_lens of "
                         "attn_batch_context_parallel");
    }
    *fresh = *whole;
    fresh->seq_lens = fresh->seq_lens_host = NULL;
    fresh->block_table = fresh->block_table_row = NULL;
    fresh->key_start_loc = fresh->key_start_loc_host = NULL;
    fresh->max_seq_len = whole->max_query_len;
    *context = *whole;
    context->causal = -1; /* the part's layer is not causal */
    context->causal_per_request = NULL;
    context->slot_mapping = NULL;
    context->num_slots = 0;
    context->tree = NULL;
    if (given != NULL && given->local_seq_lens != NULL) {
        return take_local(plan, given, context, error);
    }
    int32_t *local = compose_take(plan, whole->num_reqs);
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        int32_t queries = whole->query_start_loc_host[r + 1] - whole->query_start_loc_host[r];
        int32_t length = whole->seq_lens_host[r] > queries ? whole->seq_lens_host[r] - queries : 0;
        local[r] =
            context_parallel_length(length, cp->decode->rank, cp->decode->world_size, interleave);
        longest = local[r] > longest ? local[r] : longest;
    }
    context->seq_lens_host = local;
    context->seq_lens = compose_on_device(plan, local);
    context->max_seq_len = longest;
    return ATTN_OK;
}

void parallel_choose_calls(attn_plan *plan, struct step *step)
{
    int32_t phase = plan->split.num_prefills == 0 ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
    step->main[0] = &step->launches[phase][PART_NEW];
    step->main[1] = &step->launches[phase][PART_CONTEXT];
    step->main[0]->schedule->view = VIEW_NEW;
    step->main[0]->args.batch = &plan->views[VIEW_NEW];
    step->main[1]->schedule->view = VIEW_CONTEXT;
    step->main[1]->args.batch = &plan->views[VIEW_CONTEXT];
    step->program = run_parallel;
}

/* One exchange under way: where its areas lie, and who copies. */
struct run {
    attn_plan *plan;
    struct step *step;
    const struct attn_step_io *io;
    const struct instance *instance;
    struct exchange x;
    uint8_t *packed, *gathered, *q, *out, *send, *received;
    float *lse;
};

/* Copies `bytes` at each of `count` strided places. */
static attn_status copy_rows(const struct run *run, void *to, int64_t to_stride, const void *from,
                             int64_t from_stride, int64_t bytes, int64_t count,
                             struct attn_error *error)
{
    const struct attn_block_copy copy = {(void *)(uintptr_t)from, to, from_stride, to_stride,
                                         bytes};
    const struct attn_copy_blocks_args args = {.struct_size = sizeof args,
                                               .instance = run->instance->handle,
                                               .stream = run->io->stream,
                                               .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                                               .num_copies = 1,
                                               .copies = &copy,
                                               .pairs = run->plan->parallel.pairs,
                                               .num_pairs = count};
    if (run->instance->kernels.copy_blocks != NULL) {
        return run->instance->kernels.copy_blocks(&args, error);
    }
    for (int64_t i = 0; i < count; i++) {
        memcpy((uint8_t *)to + i * to_stride, (const uint8_t *)from + i * from_stride,
               (size_t)bytes);
    }
    return ATTN_OK;
}

/* The engine's collectives bring no text. */
static attn_status told(attn_status status, struct attn_error *error)
{
    return status == ATTN_OK
               ? status
               : error_set_text(error, status, "collectives", "a collective of the engine failed");
}

/* This rank's queries side by side, then those of all ranks as [T, Hk, n, g, D]. */
static attn_status gather_queries(const struct run *run, struct attn_error *error)
{
    const struct exchange *x = &run->x;
    const struct attn_tensor *q = run->io->q;
    int64_t element = x->dtype.bits / 8, row = x->q_heads * x->q_row, group = x->group * x->q_row;
    int64_t stride = q->strides != NULL ? q->strides[0] * element : row;
    int64_t head = q->strides != NULL ? q->strides[1] * element : x->q_row;
    const uint8_t *rows = (const uint8_t *)q->data + q->byte_offset;
    attn_status status = ATTN_OK;
    bool compact = head == x->q_row;
    for (int64_t h = 0; h < (compact ? 1 : x->q_heads) && status == ATTN_OK; h++) {
        status = copy_rows(run, run->packed + h * x->q_row, row, rows + h * head, stride,
                           compact ? row : x->q_row, x->tokens, error);
    }
    if (status == ATTN_OK) {
        status = told(x->ranks->all_gather(x->ranks->user, run->packed, run->gathered,
                                           (size_t)(x->tokens * row), run->io->stream),
                      error);
    }
    for (int64_t i = 0; i < x->n * x->kv_heads && status == ATTN_OK; i++) {
        int64_t rank = i % x->n, kv = i / x->n;
        status = copy_rows(run, run->q + i * group, x->n * row,
                           run->gathered + rank * x->tokens * row + kv * group, row, group,
                           x->tokens, error);
    }
    return status;
}

/* Compact tensors over the workspace. */
struct over {
    struct attn_tensor tensor;
    int64_t shape[3], strides[3];
};

static void over_rows(struct over *over, const struct run *run, void *data, int64_t heads,
                      int64_t head_size)
{
    *over = (struct over){.shape = {run->x.tokens, heads, head_size},
                          .strides = {heads * head_size, head_size, 1}};
    over->tensor = (struct attn_tensor){
        data, run->plan->model->device, 3, run->x.dtype, over->shape, over->strides, 0};
}

static void over_lse(struct over *over, const struct run *run, float *data, int64_t heads)
{
    *over = (struct over){.shape = {heads, run->x.tokens}, .strides = {run->x.tokens, 1}};
    over->tensor = (struct attn_tensor){
        data, run->plan->model->device, 2, {ATTN_CODE_FLOAT, 32, 1}, over->shape, over->strides, 0};
}

static attn_status attend_context(const struct run *run, struct attn_error *error)
{
    const struct exchange *x = &run->x;
    struct attn_attend_args *args = &run->step->main[1]->args;
    struct over q, out, lse;
    over_rows(&q, run, run->q, x->n * x->q_heads, run->step->q.head_size);
    over_rows(&out, run, run->out, x->n * x->q_heads, run->step->out.head_size);
    over_lse(&lse, run, run->lse, x->n * x->q_heads);
    args->next = NULL;
    args->stream = run->io->stream;
    args->q = &q.tensor;
    args->k = args->v = NULL;
    args->out = &out.tensor;
    args->lse = &lse.tensor;
    return run->step->main[1]->kernel(args, error);
}

static attn_status merge(const struct run *run, const struct attn_tensor *a,
                         const struct attn_tensor *a_lse, const struct attn_tensor *b,
                         const struct attn_tensor *b_lse, const struct attn_tensor *out,
                         const struct attn_tensor *lse, struct attn_error *error)
{
    const struct attn_merge_states_args args = {.struct_size = sizeof args,
                                                .instance = run->instance->handle,
                                                .stream = run->io->stream,
                                                .prefix_out = a,
                                                .prefix_lse = a_lse,
                                                .suffix_out = b,
                                                .suffix_lse = b_lse,
                                                .out = out,
                                                .lse = lse,
                                                .num_rows = run->x.tokens,
                                                .num_rows_with_prefix = run->x.tokens};
    return run->step->merge(&args, error);
}

/* Parts of a rank in `area`: its output rows, then its lse. */
static void part_tensors(const struct run *run, uint8_t *area, struct over *out, struct over *lse)
{
    const struct exchange *x = &run->x;
    over_rows(out, run, area, x->q_heads, run->step->out.head_size);
    over_lse(lse, run, (float *)(area + aligned(x->tokens * x->q_heads * x->out_row)), x->q_heads);
}

/* out and lse of the heads of `rank` into an area of their own. */
static attn_status pack_part(const struct run *run, int64_t rank, uint8_t *area, const float *lse,
                             struct attn_error *error)
{
    const struct exchange *x = &run->x;
    int64_t row = x->q_heads * x->out_row, group = x->group * x->out_row,
            lse_group = x->group * x->tokens * 4;
    uint8_t *lse_area = area + aligned(x->tokens * row);
    attn_status status = ATTN_OK;
    for (int64_t kv = 0; kv < x->kv_heads && status == ATTN_OK; kv++) {
        int64_t i = kv * x->n + rank;
        status = copy_rows(run, area + kv * group, row, run->out + i * group, x->n * row, group,
                           x->tokens, error);
        if (status == ATTN_OK) {
            status = copy_rows(run, lse_area + kv * lse_group, 0,
                               (const uint8_t *)lse + i * lse_group, 0, lse_group, 1, error);
        }
    }
    return status;
}

/* Every rank gets all partial results of its own heads, and merges them in the order of the ranks:
 * into the first area of `received`. */
static attn_status reduce_all_to_all(const struct run *run, struct attn_error *error)
{
    const struct exchange *x = &run->x;
    struct over out, lse, next_out, next_lse;
    attn_status status = ATTN_OK;
    for (int64_t rank = 0; rank < x->n && status == ATTN_OK; rank++) {
        status = pack_part(run, rank, run->send + rank * x->part, run->lse, error);
    }
    if (status == ATTN_OK) {
        status = told(x->ranks->all_to_all(x->ranks->user, run->send, run->received,
                                           (size_t)x->part, run->io->stream),
                      error);
    }
    part_tensors(run, run->received, &out, &lse);
    for (int64_t rank = 1; rank < x->n && status == ATTN_OK; rank++) {
        part_tensors(run, run->received + rank * x->part, &next_out, &next_lse);
        status = merge(run, &out.tensor, &lse.tensor, &next_out.tensor, &next_lse.tensor,
                       &out.tensor, &lse.tensor, error);
    }
    return status;
}

/* Every rank weighs its partial results by all ranks' log-sum-exp, and sums over the ranks bring
 * each its own heads. A merge with zeros under the others' log-sum-exp is that weighing. */
static attn_status reduce_by_sum(const struct run *run, struct attn_error *error)
{
    const struct exchange *x = &run->x;
    const struct scratch *s = &run->plan->scratch;
    int64_t heads = x->n * x->q_heads, count = x->tokens * x->q_heads * (x->out_row / 4);
    uint8_t *base = run->plan->workspace;
    float *all = (float *)(base + s->parallel.all_lse),
          *other_lse = (float *)(base + s->parallel.other_lse);
    struct over out, lse, zeros, others, one;
    int32_t found = 0;
    over_rows(&out, run, run->out, heads, run->step->out.head_size);
    over_rows(&zeros, run, base + s->parallel.zeros, heads, run->step->out.head_size);
    over_lse(&lse, run, run->lse, heads);
    over_lse(&others, run, other_lse, heads);
    attn_status status = zero_tensor(run->plan, run->step, &zeros.tensor, run->io->stream, error);
    if (status == ATTN_OK) {
        status = told(x->ranks->all_gather(x->ranks->user, run->lse, all,
                                           (size_t)(heads * x->tokens * 4), run->io->stream),
                      error);
    }
    for (int64_t rank = 0; rank < x->n && status == ATTN_OK; rank++) {
        float *theirs = all + rank * heads * x->tokens;
        if (rank == x->ranks->rank) {
            continue;
        }
        if (found++ == 0) {
            status = copy_rows(run, other_lse, 0, theirs, 0, heads * x->tokens * 4, 1, error);
            continue;
        }
        over_lse(&one, run, theirs, heads);
        status = merge(run, &zeros.tensor, &others.tensor, &zeros.tensor, &one.tensor,
                       &zeros.tensor, &others.tensor, error);
    }
    if (status == ATTN_OK) {
        status = merge(run, &out.tensor, &lse.tensor, &zeros.tensor, &others.tensor, &out.tensor,
                       &lse.tensor, error);
    }
    for (int64_t rank = 0; rank < x->n && status == ATTN_OK; rank++) {
        int64_t row = x->q_heads * x->out_row, group = x->group * x->out_row;
        for (int64_t kv = 0; kv < x->kv_heads && status == ATTN_OK; kv++) {
            status = copy_rows(run, run->send + rank * count * 4 + kv * group, row,
                               run->out + (kv * x->n + rank) * group, x->n * row, group, x->tokens,
                               error);
        }
    }
    if (status == ATTN_OK) { /* the weighted lse of its own heads, beside where the sum goes */
        status = pack_part(run, x->ranks->rank, run->received, run->lse, error);
    }
    return status == ATTN_OK
               ? told(x->ranks->reduce_scatter_f32(x->ranks->user, (const float *)run->send,
                                                   (float *)run->received, (size_t)count,
                                                   run->io->stream),
                      error)
               : status;
}

static attn_status attend_new(const struct run *run, const struct attn_tensor *lse,
                              struct attn_error *error)
{
    struct attn_attend_args *args = &run->step->main[0]->args;
    args->next = NULL;
    args->stream = run->io->stream;
    args->q = run->io->q;
    args->k = run->io->k;
    args->v = run->io->v;
    args->out = run->io->out;
    args->lse = lse;
    return run->step->main[0]->kernel(args, error);
}

attn_status run_parallel(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                         struct attn_error *error)
{
    const struct scratch *s = &plan->scratch;
    uint8_t *base = plan->workspace;
    struct over out, lse, new_lse;
    struct run run = {.plan = plan,
                      .step = step,
                      .io = io,
                      .instance = step->layer->served[ATTN_PHASE_PREFILL].instance,
                      .packed = base + s->parallel.packed,
                      .gathered = base + s->parallel.gathered,
                      .q = base + s->parallel.q,
                      .out = base + s->parallel.out,
                      .send = base + s->parallel.send,
                      .received = base + s->parallel.received,
                      .lse = (float *)(base + s->parallel.lse)};
    exchange_init(&run.x, step, plan->given.num_actual_tokens);
    attn_status status = gather_queries(&run, error);
    status = status ? status : attend_context(&run, error);
    if (status == ATTN_OK) {
        status = step->layer->layer.cp->reduce == ATTN_CP_ALL_TO_ALL
                     ? reduce_all_to_all(&run, error)
                     : reduce_by_sum(&run, error);
    }
    part_tensors(&run, run.received, &out, &lse);
    over_lse(&new_lse, &run, run.lse, run.x.q_heads); /* the context's is used up */
    status = status ? status : attend_new(&run, &new_lse.tensor, error);
    return status == ATTN_OK ? merge(&run, &out.tensor, &lse.tensor, io->out, &new_lse.tensor,
                                     io->out, io->lse, error)
                             : status;
}
