/* SPDX-License-Identifier: Apache-2.0 */
/* MLA at plan_create and plan: scratch memory, chunks of context, and which calls a batch takes. */
#include "ranks.h"
#include "mla.h"

#define DEFAULT_CHUNK_ROWS 1024
#define MAX_CHUNKS (1 << 20)

static void describe(struct step *step)
{
    const struct attn_mla_desc *m = step->layer->selected->mla;
    const bool per_head = mla_per_head(step->layer);
    step->keys_are_inputs = false;
    step->check_io = mla_check_io;
    if (!m->absorb_in_core) {
        step->out.head_size = m->kv_lora_rank;
        step->out.heads = mla_padded_heads(step->layer);
    }
    for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
        const struct attn_kernels *kernels = &step->layer->served[phase].instance->kernels;
        struct launch *launches = step->launches[phase];
        if (phase == ATTN_PHASE_PREFILL && per_head) {
            step->parts[phase] = 1u << PART_NEW | 1u << PART_CONTEXT;
            /* gathered and projected */
            launches[PART_CONTEXT].args.k_cache = launches[PART_CONTEXT].args.v_cache = NULL;
        } else {
            step->parts[phase] = 1u << PART_MAIN;
            launches[PART_MAIN].kernel =
                m->topk > 0 ? kernels->attend_mla_sparse : kernels->attend_mla;
        }
    }
}

/* Keys that a request can have; lengths are int32_t. */
static int64_t longest_context(const attn_plan *plan)
{
    const attn_layer *owner = plan->steps[0].layer->owner;
    int64_t slots = owner->k_cache.num_blocks * (int64_t)owner->k_cache.block_size;
    slots = slots < INT32_MAX ? slots : INT32_MAX;
    return plan->limits.max_seq_len > 0 && plan->limits.max_seq_len < slots
               ? plan->limits.max_seq_len
               : slots;
}

/* Room for chunks of context, if a layer's prefill is per head: as large as the smallest workspace
 * that a layer asks for; else a default, or all of the context if that is less. A layer whose bits
 * must not depend on a request's neighbours has them cut a context by its own length alone. */
static attn_status make_room_for_chunks(attn_plan *plan, struct attn_error *error)
{
    struct mla_plan *p = mla_plan(plan);
    const int64_t context = longest_context(plan) * plan->limits.max_num_reqs;
    const int32_t ranks = layer_cache_ranks(plan->steps[0].layer);
    bool per_head = false, invariant = false;
    int64_t rows = 0;
    int32_t identity = 0;
    FOR_SERVED(step, plan, COMPOSITION_MLA) {
        const struct attn_mla_desc *m = step->layer->selected->mla;
        const int64_t asked = m->context_workspace_tokens;
        per_head |= mla_per_head(step->layer);
        invariant |= step->layer->desc->batch_invariant != 0;
        rows = asked > 0 && (rows == 0 || asked < rows) ? asked : rows;
        identity = m->qk_nope_head_dim > identity ? m->qk_nope_head_dim : identity;
        identity = m->qk_rope_head_dim > identity ? m->qk_rope_head_dim : identity;
    }
    if (!per_head) {
        return ATTN_OK;
    }
    rows = rows > 0 ? rows : DEFAULT_CHUNK_ROWS;
    rows = (rows < context ? rows : context) / ranks;
    p->invariant = invariant;
    p->identity_size = identity;
    p->gather_rows = rows > 0 ? (int32_t)rows : 1;
    p->chunk_rows = p->gather_rows * ranks;
    int64_t chunks = (context + p->gather_rows - 1) / p->gather_rows;
    chunks += p->invariant ? plan->limits.max_num_reqs : 0; /* each may end one early */
    ERROR_IF(chunks > MAX_CHUNKS, ATTN_ERROR_LIMIT, "max_seq_len",
             "%d requests of %lld keys are %lld chunks of %d context rows; at most %d: limit "
             "max_seq_len, or give more context_workspace_tokens",
             plan->limits.max_num_reqs, (long long)longest_context(plan), (long long)chunks,
             p->chunk_rows, MAX_CHUNKS);
    p->max_chunks = (int32_t)chunks;
    p->chunks = arena_array(&plan->arena, (size_t)chunks, sizeof *p->chunks);
    return p->chunks != NULL ? ATTN_OK
                             : NO_MEMORY("plan", "%lld chunks of context", (long long)chunks);
}

static int32_t identity_ints(const attn_plan *plan)
{
    struct mla_plan *p = mla_plan(plan);
    return p->identity_size * p->identity_size;
}

/* Two arrays for each chunk's requests, of which consecutive chunks share one at most;
 * query_start_loc; identity. */
static int64_t host_ints(const attn_plan *plan)
{
    struct mla_plan *p = mla_plan(plan);
    if (p->chunks == NULL) {
        return layer_is_spread(plan->steps[0].layer) ? plan->limits.max_num_reqs : 0;
    }
    int64_t requests = (int64_t)plan->limits.max_num_reqs + p->max_chunks;
    int64_t ranks = layer_cache_ranks(plan->steps[0].layer);
    int64_t spread =
        ranks > 1 ? (ranks + 1) * requests + p->max_chunks + 2 * (int64_t)plan->limits.max_num_reqs
                  : 0;
    return spread + 2 * requests + p->max_chunks + plan->limits.max_num_reqs + 1 +
           identity_ints(plan);
}

static void add_areas(attn_plan *plan, const struct step *step)
{
    struct mla_plan *p = mla_plan(plan);
    const struct attn_mla_desc *m = step->layer->selected->mla;
    const int64_t element = step->layer->desc->dtype == ATTN_DTYPE_F32 ? 4 : 2;
    const int64_t heads = mla_padded_heads(step->layer) * element, context = p->chunk_rows;
    const int64_t qk = (int64_t)m->qk_nope_head_dim + m->qk_rope_head_dim;
    const int64_t tokens = plan->limits.max_num_tokens, keys = tokens > context ? tokens : context;
    const int64_t decodes = (int64_t)plan->decode_threshold * plan->limits.max_num_reqs;
    const bool decodes_alone = mla_per_head(step->layer) && decodes < tokens;
    const int64_t latent = (decodes_alone ? decodes : tokens) * heads * m->kv_lora_rank;
    const int64_t rows = context * step->layer->desc->head_size * element;
    plan_area(plan, &p->at.latent_q, latent, LATENT);
    if (!layer_is_spread(step->layer)) {
        plan_area(plan, &p->at.latent_out, latent, LATENT);
    }
    if (!mla_per_head(step->layer)) {
        return;
    }
    plan_area(plan, &p->at.q, tokens * heads * qk, PER_HEAD);
    plan_area(plan, &plan->layout.lse[1], tokens * step->q.heads * 4, PER_HEAD);
    plan_area(plan, &p->at.rows, rows, GATHER | PROJECT);
    if (layer_is_spread(step->layer)) {
        plan_area(plan, &p->at.local, rows, GATHER);
        plan_area(plan, &p->at.gathered, rows, GATHER);
    }
    plan_area(plan, &p->at.k, keys * heads * qk, PROJECT | ATTEND);
    plan_area(plan, &p->at.v, keys * heads * m->v_head_dim, PROJECT | ATTEND);
    plan_area_of_merge(plan, step, tokens, ATTEND);
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_MLA) {
        describe(step);
    }
    if (layer_is_spread(plan->steps[0].layer)) {
        plan->decode_threshold = 1; /* more would be causal among keys that lie on several ranks */
    }
    TRY(make_room_for_chunks(plan, error));
    plan->num_host_ints += host_ints(plan);
    FOR_SERVED(step, plan, COMPOSITION_MLA) {
        if (step->layer->selected->mla->absorb_in_core) {
            add_areas(plan, step);
        }
    }
    return ATTN_OK;
}

/* 1 on the diagonal, in the activations' dtype: products with it are exact copies. */
static void make_identity(attn_plan *plan)
{
    struct mla_plan *p = mla_plan(plan);
    static const uint32_t ones[] = {
        [ATTN_DTYPE_F16] = 0x3c00, [ATTN_DTYPE_BF16] = 0x3f80, [ATTN_DTYPE_F32] = 0x3f800000};
    int32_t dtype = plan->steps[0].layer->desc->dtype, size = p->identity_size;
    int32_t *memory = plan_take(plan, identity_ints(plan));
    memset(memory, 0, (size_t)identity_ints(plan) * sizeof *memory);
    for (int32_t i = 0; i < size * size; i += size + 1) {
        if (dtype == ATTN_DTYPE_F32) {
            ((uint32_t *)memory)[i] = ones[dtype];
        } else {
            ((uint16_t *)memory)[i] = (uint16_t)ones[dtype];
        }
    }
    p->identity = plan_on_device(plan, memory);
}

/* Rows of a request's context that every rank has at most. */
static int32_t context_of(const attn_plan *plan, const struct attn_batch *view, int32_t r)
{
    const int32_t queries = num_queries(view, r), context = view->seq_lens_host[r] - queries;
    return queries > 0 ? parallel_local_length(plan->steps[0].layer, context, 0) : 0;
}

/* What each rank has of a chunk's rows. */
static void count_rank_rows(attn_plan *plan, const struct attn_batch *view,
                            struct context_chunk *chunk)
{
    const attn_layer *layer = plan->steps[0].layer;
    int32_t ranks = layer_cache_ranks(layer);
    int32_t *rows = plan_take(plan, (int64_t)chunk->num_reqs * ranks);
    int32_t *key_start = plan_take(plan, chunk->num_reqs + 1);
    key_start[0] = 0;
    for (int32_t i = 0; i < chunk->num_reqs; i++) {
        int32_t r = chunk->first_req + i, most = chunk->start[i + 1] - chunk->start[i];
        int32_t queries = num_queries(view, r);
        key_start[i + 1] = key_start[i];
        for (int32_t rank = 0; rank < ranks; rank++) {
            int32_t here = parallel_local_length(layer, view->seq_lens_host[r] - queries, rank) -
                           chunk->first_key[i];
            here = here > 0 ? here : 0;
            rows[i * ranks + rank] = here < most ? here : most;
            key_start[i + 1] += rows[i * ranks + rank];
        }
    }
    chunk->key_start = key_start;
    chunk->rank_rows = rows;
}

/* One chunk from request r's key `done` on: as many rows as fit, requests one after the other. Of
 * an invariant chunk only the first request may be cut. */
static void add_chunk(attn_plan *plan, const struct attn_batch *view, int32_t *r, int32_t *done)
{
    struct mla_plan *p = mla_plan(plan);
    struct context_chunk *chunk = &p->chunks[p->num_chunks++];
    int32_t *start = plan_take(plan, 1), count = 0, left = p->gather_rows, from = *done, last = 0;
    start[0] = 0;
    for (int32_t i = 0; *r + i < view->num_reqs && left > 0; i++, from = 0) {
        const int32_t missing = context_of(plan, view, *r + i) - from;
        const bool may_cut = !p->invariant || i == 0;
        const int32_t rows = missing <= left ? missing : may_cut ? left : 0;
        start[i + 1] = start[i] + rows;
        left = rows < missing ? 0 : left - rows;
        if (rows > 0) { /* requests without context end no chunk */
            count = i + 1;
            last = from + rows;
        }
    }
    plan_take(plan, count); /* the rest of start */
    int32_t *first_key = plan_take(plan, count);
    memset(first_key, 0, (size_t)count * sizeof *first_key);
    first_key[0] = *done;
    *chunk = (struct context_chunk){.first_req = *r,
                                    .num_reqs = count,
                                    .num_rows = start[count],
                                    .first_key = first_key,
                                    .start = start,
                                    .key_start = start};
    if (layer_is_spread(plan->steps[0].layer)) {
        count_rank_rows(plan, view, chunk);
    }
    *r += count - 1;
    *done = last;
    if (*done == context_of(plan, view, *r)) {
        ++*r;
        *done = 0;
    }
}

static void make_chunks(attn_plan *plan, const struct attn_batch *view)
{
    int32_t r = 0, done = 0;
    while (r < view->num_reqs) {
        if (context_of(plan, view, r) == 0) {
            r++;
        } else {
            add_chunk(plan, view, &r, &done);
        }
    }
}

/* The prefill view for attends over keys that are no cache: its host arrays outlive plan_batch. */
static void make_context_view(attn_plan *plan, const struct attn_batch *prefill)
{
    struct mla_plan *p = mla_plan(plan);
    struct attn_batch *view = &p->context;
    int32_t *start = plan_take(plan, prefill->num_reqs + 1);
    memcpy(start, prefill->query_start_loc_host, (size_t)(prefill->num_reqs + 1) * sizeof *start);
    *view = *prefill;
    view->query_start_loc_host = start;
    view->seq_lens = view->seq_lens_host = NULL;
    view->key_start_loc = view->key_start_loc_host = NULL;
    view->slot_mapping = NULL;
    view->num_slots = 0;
    view->logits_indices = NULL;
    view->num_logits_indices = 0;
    view->max_seq_len = view->max_query_len;
}

/* A decode that follows a prefill would be computed per head, alone it goes the latent way. */
static attn_status check_order(const attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *prefill = &plan->prefill;
    for (int32_t r = 0; r < prefill->num_reqs; r++) {
        int32_t queries = num_queries(prefill, r);
        BAD_IF(queries > 0 && queries <= plan->decode_threshold, "query_start_loc",
               "request %d has %d queries, a decode, after request %d, a prefill; MLA with "
               "batch_invariant needs decodes first (batch_order)",
               plan->split.num_decodes + r, queries, plan->split.num_decodes);
    }
    return ATTN_OK;
}

/* The decode view's lengths become this rank's. The step's own rows are written before, so a decode
 * counts all its keys. */
static attn_status localise(attn_plan *plan, struct attn_error *error)
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

static attn_status view_split(attn_plan *plan, struct attn_error *error)
{
    struct mla_plan *p = mla_plan(plan);
    const struct attn_batch *prefill = &plan->prefill;
    p->num_chunks = 0;
    TRY_IF(p->invariant && plan->split.num_prefills > 0, check_order(plan, error));
    TRY_IF(layer_is_spread(plan->steps[0].layer), localise(plan, error));
    if (p->chunks == NULL || plan->split.num_prefill_tokens == 0) {
        return ATTN_OK;
    }
    BAD_IF(prefill->seq_lens_host == NULL, "seq_lens_host",
           "is NULL; the prefill of MLA takes its context in chunks and needs the lengths on the "
           "host (or device_seq_lens_only in the layer)");
    ERROR_IF(prefill->flags & ATTN_BATCH_IN_CAPTURE, ATTN_ERROR_UNSUPPORTED, "num_prefills",
             "%d prefills in a capture; MLA captures decodes only", plan->split.num_prefills);
    make_identity(plan);
    make_context_view(plan, prefill);
    make_chunks(plan, prefill);
    p->own_keys = p->context;
    p->own_keys.block_table = p->own_keys.block_table_row = NULL;
    if (p->num_chunks > 0) {
        mla_chunk_view(plan, &p->chunks[0], &p->first_chunk);
    }
    return ATTN_OK;
}

static void choose(attn_plan *plan, struct step *step)
{
    struct mla_plan *p = mla_plan(plan);
    struct launch *decode = &step->launches[ATTN_PHASE_DECODE][PART_MAIN];
    struct launch *prefill = step->launches[ATTN_PHASE_PREFILL];
    const bool per_head = mla_per_head(step->layer);
    if (step->program != NULL) {
        return;
    }
    step->program = mla_run;
    if (!per_head && step_takes_whole(step)) {
        struct launch *call = plan->split.num_prefills == 0 ? decode : &prefill[PART_MAIN];
        step->main[0] = launch_use(call, &plan->whole);
        return;
    }
    if (plan->split.num_decode_tokens > 0) {
        step->main[0] = launch_use(decode, &plan->decode);
    }
    if (plan->split.num_prefill_tokens > 0) {
        step->main[1] = per_head ? launch_use(&prefill[PART_NEW], &p->own_keys)
                                 : launch_use(&prefill[PART_MAIN], &plan->prefill);
    }
    if (p->num_chunks > 0) {
        launch_use(&prefill[PART_CONTEXT], &p->first_chunk);
    }
}

const struct composition composition_mla = {
    .extension = offsetof(struct layer, mla),
    .resolve = mla_resolve,
    .match = mla_match,
    .layer_bytes = sizeof(struct mla_weights),
    .bind = mla_bind,
    .plan_bytes = sizeof(struct mla_plan),
    .build = build,
    .view_split = view_split,
    .choose = choose,
};
