/* SPDX-License-Identifier: Apache-2.0 */
/* Context parallelism of a layer whose cache is spread over ranks: every rank attends the context
 * that it holds with the queries of all ranks' heads, the partial results are exchanged and merged
 * by log-sum-exp, and the step's own keys, which every rank has, are attended apart. Where ranks
 * split the queries of a request, see split_queries.c. */
#include <string.h>

#include "ranks.h"

#define MIN_COLLECTIVES 64 /* size in ABI 0.3 */
#define MAX_RANKS 4096     /* times MAX_HEADS, which a spread step's heads are, far from overflow */

/* The engine's table of collectives, which is used from every step. */
static attn_status check_ranks(const char *name, const char *field,
                               const struct attn_collectives *ranks, struct attn_error *error)
{
    if (ranks == NULL) {
        return ATTN_OK;
    }
    BAD_IF(ranks->struct_size < MIN_COLLECTIVES || ranks->world_size < 1 ||
               ranks->world_size > MAX_RANKS || ranks->rank < 0 || ranks->rank >= ranks->world_size,
           field,
           "layer '%s': %s has struct_size %zu, rank %d of %d; at least %d, and a rank from 0 "
           "below the number of ranks, which is at most %d",
           name, field, ranks->struct_size, ranks->rank, ranks->world_size, MIN_COLLECTIVES,
           MAX_RANKS);
    BAD_IF(ranks->all_gather == NULL || ranks->all_to_all == NULL ||
               ranks->reduce_scatter_f32 == NULL,
           field, "layer '%s': %s lacks all_gather, all_to_all or reduce_scatter_f32", name, field);
    BAD_IF(ranks->struct_size >= sizeof *ranks &&
               (ranks->gather_heads == NULL) != (ranks->merge_heads == NULL),
           field, "layer '%s': %s has one of gather_heads and merge_heads; both or neither", name,
           field);
    return ATTN_OK;
}

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const int32_t interleave = layer->cp->interleave += layer->cp->interleave == 0; /* 0: 1 */
    TRY(check_ranks(l->name, "decode", layer->cp->decode, error));
    TRY(check_ranks(l->name, "prefill", layer->cp->prefill, error));
    BAD_IF(interleave < 0 || (l->block_size > 0 && l->block_size % interleave != 0), "interleave",
           "layer '%s': interleave %d must divide block_size %d", l->name, interleave,
           l->block_size);
    if (l->dtype != ATTN_DTYPE_F32) {
        layer->cp->reduce = ATTN_CP_ALL_TO_ALL; /* sums over ranks are of float32 */
    }
    layer->out_apart |= context_cache_ranks(layer->cp) > 1;
    const struct {
        const void *ranks[2];
        int32_t interleave, order;
    } key = {{layer->cp->decode, layer->cp->prefill}, interleave, layer->cp->order};
    memcpy(layer->batch_key, &key, sizeof key);
    return ATTN_OK;
}

/* A cache spread over ranks: what the exchange is made of, and the terms whose keys it would lose
 * the positions of. */
static void check_spread_cache(struct check *check)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    int32_t n = cp->decode->world_size;
    bool positions = l->has_window || l->chunk_size > 0 || l->alibi || l->prefix_lm ||
                     l->tree_mask || l->causal_per_request || l->sink_len > 0;
    CHECK_NEEDS(
        check, "context_parallel",
        {!positions,
         "a window, chunks, ALiBi, spans, trees, a static sink or causality per request",
         "plain causal layers"},
        {l->q_scale_form == ATTN_SCALE_NONE, "quantized queries",
         "queries of the activation dtype"},
        {caps->features & ATTN_FEATURE_LSE, "log-sum-exp"},
        {caps->features & ATTN_FEATURE_CONTIGUOUS_KV, "contiguous keys"},
        {caps->terms & ATTN_TERM_BIDIRECTIONAL, "a context that all queries see (bidirectional)"},
        {caps->kernels & ATTN_KERNEL_MERGE_STATES, "merge_states of the ranks' parts"},
        {check->whole->is_latent || caps->max_group == 0 ||
             l->num_q_heads / l->num_kv_heads * n <= caps->max_group,
         "the query heads of all ranks over a key head", "a smaller group"},
        {caps->max_num_q_heads == 0 || l->num_q_heads * n <= caps->max_num_q_heads,
         "the query heads of all ranks", "fewer"});
}

/* Queries split over ranks: slices are requests of their own over one table, and keys pass through
 * the ranks before they are written. */
static void check_split_queries(struct check *check)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    bool shares_rows = cp->order == ATTN_CP_ZIGZAG || context_cache_ranks(cp) > 1;
    CHECK_NEEDS(
        check, "context_parallel",
        {!l->prefix_lm && !l->tree_mask && !l->causal_per_request && l->sink_len == 0,
         "queries split over ranks with spans, trees, a static sink or causality per request",
         "causal layers, windows, chunks, ALiBi, sinks"},
        {!l->rope && !l->qk_norm, "queries split over ranks with RoPE or norm in the write",
         "rotated keys"},
        {!l->device_seq_lens_only, "queries split over ranks without seq_lens_host",
         "lengths on the host"},
        {!l->fast_prefill, "queries split over ranks with fast prefill", "either"},
        {!shares_rows || !l->needs_block_table_row,
         "queries split over ranks with the engine's block_table_row",
         "contiguous order and a whole cache"},
        {!shares_rows || caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW,
         "slices of a request over one row of the block table (block_table_row)"},
        {l->output_form == ATTN_OUTPUT_PLAIN, "queries split over ranks with quantized outputs",
         "plain outputs"},
        {check->whole->sharing_target >= 0 || caps->kernels & ATTN_KERNEL_WRITE_KV,
         "write_kv of all ranks' keys"});
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_context_parallel *cp = check->whole->cp;
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    bool splits = ranks_count(cp->prefill) > 1;
    if (context_cache_ranks(cp) == 1 && !splits) {
        return;
    }
    bool mla = check->whole->mla != NULL && check->whole->mla->topk == 0 && !splits;
    bool decoder = l->kind == ATTN_LAYER_DECODER && l->sink_len == 0;
    CHECK_NEEDS(check, "context_parallel",
                {(decoder || mla) && l->causal == ATTN_CAUSAL_YES, "a layer of this kind",
                 splits ? "causal decoder layers" : "causal decoder and MLA layers"},
                {!l->host_bounds, "a step over ranks with bounds in place of host lengths",
                 "exact host lengths"},
                {caps->device.type == ATTN_DEVICE_CPU || caps->kernels & ATTN_KERNEL_COPY_BLOCKS,
                 "copy_blocks, which orders rows and heads by rank"});
    if (context_cache_ranks(cp) > 1) {
        check_spread_cache(check);
    }
    if (splits) {
        check_split_queries(check);
    }
    /* the host places the slices, and so only batches without a split are captured (with MLA only
     * decodes, by ATTN_COMPOSE_MLA_PREFILL) */
    check_compose(check, ATTN_COMPOSE_CONTEXT_PARALLEL, ATTN_GRAPH_ALWAYS);
}

/* The context is attended by the heads of all ranks. Sinks' logits stay with the new keys: in one
 * part, on the rank that owns the heads. */
static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    layer->tokens_per_block *= layer_cache_ranks(layer);
    if (!layer_is_spread(layer)) {
        return ATTN_OK;
    }
    struct attn_layer_desc *fresh = &layer->parts[PART_NEW];
    *fresh = layer->parts[PART_MAIN];
    fresh->output_form = ATTN_OUTPUT_PLAIN;
    fresh->needs_lse = 1;
    layer->part_params[PART_NEW] = layer->part_params[PART_MAIN];
    layer->parts[PART_CONTEXT].num_q_heads *= layer->selected->cp->decode->world_size;
    return ATTN_OK;
}

/* Rows that this rank may attend the context for. MLA exchanges those of decodes alone, of which
 * each has one query. */
static int64_t max_rows(const attn_plan *plan, const attn_layer *layer)
{
    const int64_t reqs = plan->limits.max_num_reqs, tokens = plan->limits.max_num_tokens;
    if (layer->selected->mla != NULL) {
        return reqs < tokens ? reqs : tokens;
    }
    return layer_query_ranks(layer) * tokens;
}

static void limit(attn_plan *plan)
{
    const attn_layer *layer = plan->steps[0].layer;
    for (int32_t part = 0; part < PART_COUNT && layer_splits_queries(layer); part++) {
        struct attn_limits *limits = &plan->part_limits[part];
        int64_t reqs = (int64_t)limits->max_num_reqs * queries_slices(layer),
                tokens = max_rows(plan, layer);
        if (part == PART_CONTEXT) {
            reqs = layer_query_ranks(layer) * ((int64_t)limits->max_num_reqs + 1);
            limits->max_num_tokens = (int32_t)(tokens < INT32_MAX ? tokens : INT32_MAX);
            limits->max_query_len = limits->max_query_len > limits->max_num_tokens
                                        ? limits->max_query_len
                                        : limits->max_num_tokens;
        }
        limits->max_num_reqs = (int32_t)(reqs < INT32_MAX ? reqs : INT32_MAX);
    }
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Areas of the exchange. */
static void add_areas(attn_plan *plan, const struct step *step)
{
    struct parallel_plan *p = parallel_plan(plan);
    struct exchange x;
    exchange_init(&x, step, max_rows(plan, step->layer));
    const int64_t own = x.tokens * x.q_heads, heads = x.n * own;
    const int64_t parts = x.n * exchange_part(&x, x.tokens);
    /* the two parts of an MLA query begin aligned */
    const int64_t q = 2 * plan_aligned(1) + plan_aligned(heads * x.q_row);
    /* without other heads the queries are attended where they are packed */
    const uint32_t packed = x.n > 1 ? QUERIES : QUERIES | CONTEXT;
    plan_area(plan, &p->at.packed, own * x.q_row, packed);
    plan_area(plan, &p->at.out, heads * x.out_row, CONTEXT | REDUCE);
    plan_area(plan, &p->at.lse, heads * 4, CONTEXT | REDUCE);
    plan_area(plan, &p->at.own_lse, own * 4, ALWAYS); /* in a small exchange before queries */
    plan_area(plan, &p->at.received, parts, REDUCE | MERGE);
    if (x.n > 1) {
        plan_area(plan, &p->at.gathered, q, QUERIES);
        plan_area(plan, &p->at.q, q, QUERIES | CONTEXT);
        plan_area(plan, &p->at.send, parts, REDUCE);
    }
    if (x.n > 1 && x.reduce != ATTN_CP_ALL_TO_ALL) {
        plan_area(plan, &p->at.zeros, heads * x.out_row, REDUCE);
        plan_area(plan, &p->at.all_lse, x.n * plan_aligned(heads * 4), REDUCE);
        plan_area(plan, &p->at.other_lse, heads * 4, REDUCE);
    }
    if (x.rows != NULL) {
        const int64_t rows = x.rows->world_size * exchange_part(&x, plan->limits.max_num_tokens);
        plan_area(plan, &p->at.rows, own * x.q_row, packed);
        plan_area(plan, &p->at.rows_send, rows, MERGE);
        plan_area(plan, &p->at.rows_received, rows, MERGE);
    }
}

/* Rows are copied by pairs (t, t); one pair (0, 0) copies a whole area. */
static attn_status make_pairs(attn_plan *plan, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    int64_t rows = 0;
    FOR_SERVED(step, plan, COMPOSITION_CONTEXT_PARALLEL) {
        rows = larger(rows, larger(max_rows(plan, step->layer), step->q.heads));
    }
    ERROR_IF(rows > INT32_MAX, ATTN_ERROR_LIMIT, "max_num_tokens",
             "%d tokens on each rank are %lld rows of all ranks; at most %d",
             plan->limits.max_num_tokens, (long long)rows, INT32_MAX);
    p->pairs = arena_array(&plan->arena, 2 * (size_t)rows, sizeof *p->pairs);
    NO_MEMORY_IF(p->pairs == NULL, "plan", "%lld pairs", (long long)rows);
    for (int64_t t = 0; t < rows; t++) {
        p->pairs[2 * t] = p->pairs[2 * t + 1] = t;
    }
    return ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    const bool splits = layer_splits_queries(plan->steps[0].layer);
    TRY_IF(splits, queries_init(plan, error));
    plan->takes.all_queries = splits;
    TRY(make_pairs(plan, error));
    FOR_SERVED(step, plan, COMPOSITION_CONTEXT_PARALLEL) {
        const attn_layer *layer = step->layer;
        const double n = layer_cache_ranks(layer);
        const double split = layer_query_ranks(layer);
        /* rows are written apart: keys are attended next to the cache, or pass through the ranks */
        step->fused_write = step->fused_decode = false;
        TRY(plan_check_area(plan, step, n * split, n * n * split, error));
        if (splits) {
            queries_add_areas(plan, step);
        }
        if (layer_is_spread(layer)) {
            add_areas(plan, step);
            step->keys_are_inputs = true;
            step->parts[0] = step->parts[1] = 1u << PART_NEW | 1u << PART_CONTEXT;
        }
    }
    limit(plan);
    plan->num_host_ints += plan->limits.max_num_reqs;
    return ATTN_OK;
}

/* On this rank. */
static int32_t local_length(const attn_layer *layer, int32_t context)
{
    return parallel_local_length(layer, context, layer_cache_rank(layer));
}

/* The context for the queries of all ranks that split them: each rank's requests, and a request
 * without keys over the padding after its rows. */
static void make_context_of_all(attn_plan *plan, struct attn_batch *context)
{
    struct parallel_plan *p = parallel_plan(plan);
    const attn_layer *layer = plan->steps[0].layer;
    const int32_t *lens = plan->all_query_lens;
    int32_t ranks = layer_query_ranks(layer), num_reqs = plan->received.num_reqs;
    struct view_requests of_all = view_begin(plan, (int64_t)ranks * (num_reqs + 1), 0);
    for (int32_t rank = 0; rank < ranks; rank++) {
        int32_t end = rank * p->widest;
        for (int32_t r = 0; r < num_reqs; r++) {
            end += queries_of(layer, lens[r], rank);
            view_add(&of_all, end, local_length(layer, plan->received.seq_lens_host[r] - lens[r]),
                     r);
        }
        view_add(&of_all, (rank + 1) * p->widest, 0, 0);
    }
    context->num_tokens = context->num_actual_tokens = ranks * p->widest;
    context->max_query_len = p->widest;
    view_end(plan, &of_all, true, context);
}

/* The engine's own counts of this rank's keys. What the host can see of them has to be a part of
 * each request's context. */
static attn_status take_local(const attn_plan *plan,
                              const struct attn_batch_context_parallel *given,
                              struct attn_batch *context, struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    const int32_t *lens = given->local_seq_lens_host;
    int32_t most = whole->max_seq_len;
    BAD_IF(given->max_local_seq_len < 0 || given->max_local_seq_len > most, "max_local_seq_len",
           "max_local_seq_len is %d; 0 to max_seq_len, %d", given->max_local_seq_len, most);
    most = given->max_local_seq_len > 0 ? given->max_local_seq_len : most;
    for (int32_t r = 0; lens != NULL && r < whole->num_reqs; r++) {
        int32_t length = whole->seq_lens_host != NULL ? whole->seq_lens_host[r] : most;
        int32_t queries = whole->seq_lens_host != NULL ? num_queries(whole, r) : 0;
        int32_t limit = length - queries > 0 ? length - queries : 0;
        limit = limit < most ? limit : most;
        BAD_IF(lens[r] < 0 || lens[r] > limit, "local_seq_lens",
               "local_seq_lens[%d] is %d; 0 to %d, the request's context and max_local_seq_len", r,
               lens[r], limit);
    }
    TRY(validate_copy("local_seq_lens", plan->looks ? given->local_seq_lens : NULL, lens,
                      whole->num_reqs, false, error));
    context->seq_lens = given->local_seq_lens;
    context->seq_lens_host = lens;
    context->max_seq_len = most;
    return ATTN_OK;
}

static attn_status make_context(attn_plan *plan, struct attn_batch *context,
                                struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    const struct attn_batch_context_parallel *given = ext_find(whole->next, ATTN_EXT_BATCH_CONTEXT);
    BAD_IF(whole->seq_lens_host == NULL && (given == NULL || given->local_seq_lens == NULL),
           "local_seq_lens",
           "context parallelism needs seq_lens_host, or local_seq_lens of "
           "attn_batch_context_parallel");
    if (given != NULL && given->local_seq_lens != NULL) {
        return take_local(plan, given, context, error);
    }
    int32_t *local = plan_take(plan, whole->num_reqs);
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        int32_t apart = parallel_plan(plan)->counts_own ? 0 : num_queries(whole, r);
        local[r] = local_length(plan->steps[0].layer, whole->seq_lens_host[r] - apart);
    }
    view_lens(plan, context, local);
    return ATTN_OK;
}

/* Does the context count the step's own keys, which are in the cache by then, so that no attend of
 * their own is needed? Where every request has one, of layers that merge with nothing else: sinks
 * would be counted on every rank. Alike on all ranks. */
static bool counts_own(const attn_plan *plan)
{
    const struct attn_batch *whole = &plan->given;
    bool counts = !parallel_plan(plan)->split && whole->seq_lens_host != NULL &&
                  ext_find(whole->next, ATTN_EXT_BATCH_CONTEXT) == NULL;
    for (int32_t r = 0; r < whole->num_reqs && counts; r++) {
        counts = num_queries(whole, r) <= 1;
    }
    for (int32_t i = 0; i < plan->num_steps && counts; i++) {
        const struct step *step = &plan->steps[i];
        struct exchange x;
        exchange_init(&x, step, whole->num_actual_tokens);
        counts = exchange_is_small(&x) && !step->layer->desc->has_sinks;
    }
    return counts;
}

/* What was captured stays as it is: later batches of its graph have to be like it. */
static attn_status choose_own(attn_plan *plan, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const bool graph = plan->mode != ATTN_PLAN_EAGER, counts = counts_own(plan);
    const bool first = plan->mode == ATTN_PLAN_CAPTURE || p->captured_own == OWN_UNKNOWN;
    p->counts_own = graph && !first ? p->captured_own == OWN_COUNTED : counts;
    if (graph && first) {
        p->captured_own = counts ? OWN_COUNTED : OWN_APART;
    }
    return p->counts_own && !counts
               ? BAD("query_start_loc", "captured was a step of one query a request; this one has "
                                        "more, or local_seq_lens")
               : ATTN_OK;
}

/* The two attends' views, of a cache that is attended here: MLA's is not. */
static attn_status view(attn_plan *plan, struct attn_error *error)
{
    struct parallel_plan *p = parallel_plan(plan);
    const struct attn_batch *whole = &plan->given;
    struct attn_batch *context = &p->context, *fresh = &p->own_keys;
    TRY(queries_split(plan, error));
    if (!plan->steps[0].keys_are_inputs) {
        return ATTN_OK;
    }
    BAD_IF(plan->first_row != 0, "query_start_loc",
           "query_start_loc[0] is %d; 0 for a cache that ranks share", plan->first_row);
    TRY(choose_own(plan, error));
    *fresh = *whole;
    view_keys(plan, fresh, p->split ? p->key_start : NULL);
    fresh->max_seq_len = p->split ? p->num_keys : whole->max_query_len;
    *context = *whole;
    view_sees_all(context);
    if (!p->split) {
        return make_context(plan, context, error);
    }
    make_context_of_all(plan, context);
    return ATTN_OK;
}

/* The step's own keys, to the run's out and to `lse`. */
static attn_status attend_own(const struct exchange_run *run, const struct attn_step_io *io,
                              const struct attn_tensor *lse)
{
    struct attn_step_io attend = *io;
    attend.next = NULL;
    attend.lse = lse;
    return launch_run(run->step->main[0], &attend, run->error);
}

/* The step's own keys, and the merge with what the ranks have of the context. */
static attn_status attend_new(struct exchange_run *run)
{
    attn_plan *plan = run->plan;
    const struct attn_step_io *io = run->io;
    struct own_tensor out, lse, new_lse;
    struct all_keys slices;
    if (run->p->split) {
        TRY(queries_slice_keys(plan, run->step, io, &slices, run->error));
        io = &slices.io;
    }
    part_tensors(run, run->received, &out, &lse);
    run->x.tokens = plan->given.num_actual_tokens;
    over_lse(&new_lse, run, run->own_lse, run->x.q_heads);
    TRY(attend_own(run, io, &new_lse.tensor));
    return merge_parts(run, (struct part_result){&out.tensor, &lse.tensor},
                       (struct part_result){io->out, &new_lse.tensor},
                       (struct part_result){io->out, io->lse});
}

static attn_status run(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                       struct attn_error *error)
{
    const struct parallel_plan *p = parallel_plan(plan);
    const bool apart = step->main[0] != NULL;
    int64_t tokens = plan->given.num_actual_tokens;
    if (p->split) {
        tokens = (int64_t)p->widest * layer_query_ranks(step->layer);
    }
    struct exchange_run exchange = exchange_begin(plan, step, io, tokens, error);
    const bool small = exchange_is_small(&exchange.x);
    struct all_heads all;
    struct own_tensor lse;
    struct part_result own = {NULL};
    if (small && apart) { /* the own keys first, which wait for no rank */
        over_lse(&lse, &exchange, exchange.own_lse, exchange.x.q_heads);
        own = (struct part_result){io->out, &lse.tensor};
        TRY(attend_own(&exchange, io, own.lse));
    }
    TRY(heads_gather(&exchange, &io->q, 1, &all));
    const struct attn_step_io attend = {.stream = io->stream,
                                        .q = &all.q[0].tensor,
                                        .out = &all.out.tensor,
                                        .lse = &all.lse.tensor};
    TRY(launch_run(step->main[1], &attend, error));
    if (small) {
        return heads_merge_small(&exchange, &all, own, (struct part_result){io->out, io->lse});
    }
    TRY(heads_reduce(&exchange));
    TRY(rows_reduce(&exchange));
    return apart ? attend_new(&exchange) : ATTN_OK;
}

static void choose(attn_plan *plan, struct step *step)
{
    struct parallel_plan *p = parallel_plan(plan);
    int32_t phase = plan->split.num_prefills == 0 ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
    if (step->program != NULL) {
        return;
    }
    step->bring_keys = p->split ? queries_gather_keys : NULL;
    if (!step->keys_are_inputs) {
        return;
    }
    step->program = run;
    step->main[1] = launch_use(&step->launches[phase][PART_CONTEXT], &p->context);
    if (plan->given.num_actual_tokens > 0 && !p->counts_own) {
        step->main[0] = launch_use(&step->launches[phase][PART_NEW], &p->own_keys);
    }
}

const struct composition composition_context_parallel = {
    .extension = offsetof(struct layer, cp),
    .resolve = resolve,
    .match = match,
    .composed = ATTN_COMPOSE_CONTEXT_PARALLEL,
    .bind = bind,
    .plan_bytes = sizeof(struct parallel_plan),
    .build = build,
    .view = view,
    .choose = choose,
};
