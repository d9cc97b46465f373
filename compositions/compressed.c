/* SPDX-License-Identifier: Apache-2.0 */
/* Two caches under one softmax: the layer's own rows, as MLA, and rows that stand for several
 * tokens each. Backends that take the layer as a whole attend to both at once; for all others the
 * second cache is attended apart, by virtual requests of which each sees as many finished rows, and
 * merged by log-sum-exp. */
#include <attn/draft/compressed.h>

#include "merged.h"
#include "mla.h"
#include "select/names.h"

struct compressed_layer {
    bool whole; /* the backends of both phases take it so */
    struct attn_both_caches both;
    /* else what PART_MAIN has in place of its own description: the same without a list */
    struct attn_mla_desc window;
};

struct compressed {
    bool splits;            /* a layer of the plan is attended in two parts */
    struct attn_batch view; /* by the last plan */
};

static const struct attn_cache_desc *cache_of(const struct layer *layer)
{
    return &layer->caches->caches[0];
}

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    if (layer->cp != NULL || layer->lists != NULL) {
        const char *other = layer->cp != NULL ? "attn_context_parallel" : "attn_index_lists";
        return layer_refuse_extension(layer, other, false, error);
    }
    BAD_IF(layer->mla->absorb_in_core, "absorb_in_core",
           "layer '%s': absorb_in_core is 1 with attn_compressed_rows; 0: queries and output in "
           "latent space",
           l->name);
    BAD_IF(layer->caches == NULL || layer->caches->num_caches != 1, "caches",
           "layer '%s': %d further caches with attn_compressed_rows; 1", l->name,
           layer->caches != NULL ? layer->caches->num_caches : 0);
    const struct attn_cache_desc *c = cache_of(layer);
    const bool plain = l->kv_dtype == ATTN_KV_AUTO || l->skip_kv_quantization;
    const int32_t kv_dtype = plain ? l->dtype : l->kv_dtype;
    BAD_IF(c->role != ATTN_CACHE_COMPRESSED || c->table == 0 || c->num_heads != 1 ||
               c->head_size != l->head_size || c->kv_dtype != kv_dtype,
           "caches",
           "layer '%s': with attn_compressed_rows the further cache is role %d in table %d, %d "
           "heads of %d, kv_dtype %s; role compressed (%d), table 1 or above, 1 head of head_size "
           "%d, kv_dtype %s",
           l->name, c->role, c->table, c->num_heads, c->head_size,
           code_text(ATTN_NAMES_KV_DTYPE, c->kv_dtype).text, ATTN_CACHE_COMPRESSED, l->head_size,
           code_text(ATTN_NAMES_KV_DTYPE, kv_dtype).text);
    layer->kernel = ATTN_KERNEL_ATTEND_MLA;
    layer->out_apart = true;
    const uint32_t key = ATTN_EXT_DRAFT_COMPRESSED_ROWS; /* others' caches may look alike */
    memcpy(layer->batch_key, &key, sizeof key);
    return ATTN_OK;
}

/* Whether the backend attends to both caches of this layer at once. */
static bool takes_whole(const struct check *check, int32_t rows)
{
    const struct attn_compressed_caps *own =
        ext_find(check->caps->next, ATTN_EXT_DRAFT_COMPRESSED_CAPS);
    const struct attn_layer_desc *l = check->layer;
    const struct attn_cache_desc *cache = cache_of(check->whole);
    if (own == NULL || !(check->caps->features & ATTN_FEATURE_MIXED_BATCH)) {
        return false;
    }
    const struct kv_row form = kv_row(cache->kv_dtype, l->head_size, false);
    const int64_t row = form.bytes + form.apart;
    const int64_t alignment = own->kv_alignment > 0 ? own->kv_alignment : 1;
    return check->whole->mla->qk_rope_head_dim == 0 && l->p_scale_form == ATTN_SCALE_NONE &&
           l->q_scale_form == ATTN_SCALE_NONE && own->dtypes >> l->dtype & 1 &&
           cache->kv_dtype < ATTN_VENDOR_CODE && own->kv_dtypes >> cache->kv_dtype & 1 &&
           (own->head_size == 0 || own->head_size == l->head_size) &&
           (own->num_q_heads == 0 || l->num_q_heads <= own->num_q_heads ||
            l->num_q_heads % own->num_q_heads == 0) &&
           row * rows % alignment == 0 && row * check->match->kernel_block_size % alignment == 0;
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    const struct attn_backend_caps *caps = check->caps;
    const int32_t rows = cache_block_size(cache_of(check->whole), check->match->block_size);
    if (takes_whole(check, rows)) {
        check_compose(check, ATTN_COMPOSE_BOTH_CACHES, ATTN_GRAPH_ALWAYS);
    } else {
        check_compose(check, ATTN_COMPOSE_COMPRESSED, ATTN_GRAPH_NEVER);
    }
    if (check->whole->mla->topk > 0) {
        check_need_kernel(check, ATTN_KERNEL_ATTEND_MLA_SPARSE, " (listed compressed rows)");
    }
    /* the other phase's backend may attend in parts, and then both do */
    check_need_kernel(check, ATTN_KERNEL_MERGE_STATES, " (own and compressed rows)");
    CHECK_NEEDS(
        check, "attn_compressed_rows",
        {caps->features & ATTN_FEATURE_DRAFT_COMPRESSED_ROWS,
         "requests of some rows: compressed_rows"},
        {caps->features & ATTN_FEATURE_LSE, "log-sum-exp of both parts"},
        {caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW, "virtual requests: block_table_row"},
        {caps->terms & ATTN_TERM_BIDIRECTIONAL, "all rows of a virtual request"},
        {range_holds(caps->block_sizes, caps->num_block_sizes, rows), "blocks of so many rows"},
        {l->causal == ATTN_CAUSAL_YES && !l->causal_per_request, "not causal", "causal"},
        {l->chunk_size == 0 && !l->alibi && !l->prefix_lm && !l->tree_mask && l->sink_len == 0,
         "with chunks, ALiBi, spans, trees or static sinks", "window, sinks and soft cap"},
        {!l->device_seq_lens_only && !l->host_bounds, "with lengths on the device only",
         "host lengths"},
        {!l->fast_prefill && !l->batch_invariant, "fast_prefill or batch_invariant"});
}

static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    struct compressed_layer *own = layer->data[COMPOSITION_COMPRESSED];
    const struct attn_cache_desc *cache = cache_of(layer->selected);
    struct attn_layer_desc *main = &layer->parts[PART_MAIN];
    struct attn_layer_desc *part = &layer->parts[PART_COMPRESSED];
    const struct attn_layer_desc terms = *part;
    *part = *main;
    part->output_form = main->output_form = ATTN_OUTPUT_PLAIN;
    part->needs_lse = main->needs_lse = 1;
    part->has_sinks = 0;
    part->causal = terms.causal;
    part->has_window = 0;
    part->window_left = terms.window_left;
    part->window_right = terms.window_right;
    part->block_size = cache_block_size(cache, layer->desc->block_size);
    own->whole = layer->served[ATTN_PHASE_DECODE].composed &
                 layer->served[ATTN_PHASE_PREFILL].composed & ATTN_COMPOSE_BOTH_CACHES;
    for (int32_t phase = 0; phase < NUM_PHASES && !own->whole; phase++) {
        struct served *served = &layer->served[phase];
        served->graph_level = ATTN_GRAPH_NEVER;
        served->composed &= ~ATTN_COMPOSE_BOTH_CACHES;
        served->composed |= ATTN_COMPOSE_COMPRESSED;
    }
    own->both.ext = (struct attn_ext){ATTN_EXT_DRAFT_BOTH_CACHES, 0, sizeof own->both, main->next};
    own->window = *layer->selected->mla;
    own->window.topk = 0;
    main->next = own->whole ? &own->both.ext : &own->window.ext;
    return ATTN_OK;
}

/* The step's first layer of those: all layers of the group have such a cache. */
static const struct attn_cache_desc *cache_of_plan(const attn_plan *plan)
{
    return cache_of(plan->steps[0].layer->selected);
}

static bool is_whole(const struct step *step)
{
    return ((const struct compressed_layer *)step->layer->data[COMPOSITION_COMPRESSED])->whole;
}

static int32_t most_requests(const attn_plan *plan)
{
    return view_pieces(plan, cache_of_plan(plan)->tokens_per_row);
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    struct compressed *made = plan->data[COMPOSITION_COMPRESSED];
    struct attn_limits *limits = &plan->part_limits[PART_COMPRESSED];
    const int32_t tokens = cache_of_plan(plan)->tokens_per_row;
    limits->max_num_reqs = most_requests(plan);
    limits->max_query_len = limits->max_query_len < tokens ? limits->max_query_len : tokens;
    limits->max_seq_len =
        limits->max_seq_len / tokens + (limits->max_seq_len % tokens != 0); /* 0: unknown */
    limits->max_blocks_per_req = 0;
    FOR_SERVED(step, plan, COMPOSITION_COMPRESSED) {
        if (is_whole(step)) {
            continue;
        }
        made->splits = true;
        const struct attn_kernels *kernels = &step_instance(step)->kernels;
        struct launch *rows = &step->launches[ATTN_PHASE_PREFILL][PART_COMPRESSED];
        step->parts[ATTN_PHASE_PREFILL] |= 1u << PART_COMPRESSED;
        rows->kernel =
            step->layer->selected->mla->topk > 0 ? kernels->attend_mla_sparse : kernels->attend_mla;
        rows->args.k_cache = &step->layer->further[0];
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            step->launches[phase][PART_MAIN].kernel =
                step->layer->served[phase].instance->kernels.attend_mla;
        }
        plan_area_of_merge(plan, step, plan->limits.max_num_tokens, ALWAYS);
    }
    plan->num_host_ints += made->splits ? 3 * (int64_t)limits->max_num_reqs + 1 : 0;
    return ATTN_OK;
}

/* Virtual requests of which each has the queries of one request that see as many rows. */
static void add_request(struct view_requests *to, const struct attn_batch *b, int32_t r,
                        int32_t tokens, int32_t table_row)
{
    int32_t row = b->query_start_loc_host[r], rows = 0;
    const int32_t end = b->query_start_loc_host[r + 1], length = b->seq_lens_host[r];
    while (row < end) {
        const int64_t position = (int64_t)length - (end - row);
        rows = position >= 0 ? (int32_t)((position + 1) / tokens) : 0; /* idle: no rows */
        const int64_t next = ((int64_t)rows + 1) * tokens - 1;         /* which sees a row more */
        const int64_t count = position >= 0 ? next - position : tokens;
        row = count < end - row ? row + (int32_t)count : end;
        view_add(to, row, rows, table_row);
    }
}

/* A table has the rows that the last query of a request sees. */
static attn_status check_table(const struct attn_batch *whole, const int32_t *rows_of,
                               const struct attn_cache_desc *cache, struct attn_error *error)
{
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        const int32_t length = num_queries(whole, r) > 0 ? whole->seq_lens_host[r] : 0;
        const int32_t rows = length / cache->tokens_per_row;
        BAD_IF(rows > rows_of[r], "tables",
               "table %d: request %d has %d compressed rows in seq_lens; its %d tokens finish %d "
               "rows of %d",
               cache->table, r, rows_of[r], length, rows, cache->tokens_per_row);
    }
    return ATTN_OK;
}

static attn_status view(attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    const struct attn_cache_desc *cache = cache_of_plan(plan);
    const struct attn_batch_table *table = &plan->tables[0][cache->table - 1];
    struct compressed *own = plan->data[COMPOSITION_COMPRESSED];
    struct attn_batch *cut = &own->view;
    const int32_t *rows_of = table->seq_lens_host;
    rows_of =
        rows_of == NULL && plan->model->device.type == ATTN_DEVICE_CPU ? table->seq_lens : rows_of;
    BAD_IF(whole->seq_lens_host == NULL || rows_of == NULL, "seq_lens_host",
           "compressed rows need the lengths of both tables on the host");
    TRY(check_table(whole, rows_of, cache, error));
    if (!own->splits) {
        return ATTN_OK;
    }
    ERROR_IF(table->block_table_row != NULL && plan->model->device.type != ATTN_DEVICE_CPU,
             ATTN_ERROR_UNSUPPORTED, "tables",
             "table %d has a block_table_row, which compressed rows take on a CPU alone",
             cache->table);
    struct view_requests to = view_begin(plan, most_requests(plan), whole->query_start_loc_host[0]);
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        add_request(&to, whole, r, cache->tokens_per_row,
                    table->block_table_row != NULL ? table->block_table_row[r] : r);
    }
    *cut = *whole;
    own_table_put(cut, table);
    view_end(plan, &to, true, cut);
    cut->max_query_len =
        cut->max_query_len < cache->tokens_per_row ? cut->max_query_len : cache->tokens_per_row;
    view_sees_all(cut);
    cut->tables = NULL;
    cut->num_tables = 0;
    return ATTN_OK;
}

/* Rows that the step finishes, before it attends. */
static attn_status write_rows(attn_plan *plan, struct step *step, const struct attn_step_io **io,
                              struct attn_error *error)
{
    const attn_layer *layer = step->layer;
    const struct attn_io_caches *given = ext_find((*io)->next, ATTN_EXT_IO_CACHES);
    const struct attn_batch_table *table = &plan->tables[0][layer->caches[0].table - 1];
    if (given == NULL || given->rows[0] == NULL || table->num_slots == 0) {
        return ATTN_OK;
    }
    const struct attn_write_kv_args args = KERNEL_ARGS(
        step_instance(step), (*io)->stream, .layer = &layer->parts[PART_COMPRESSED],
        .params = &layer->part_params[PART_COMPRESSED], .k_cache = &layer->further[0],
        .slot_mapping = table->slot_mapping, .num_slots = table->num_slots, .k = given->rows[0]);
    return operation("write compressed rows", step_instance(step)->kernels.write_kv(&args, error),
                     error);
}

static void choose(attn_plan *plan, struct step *step)
{
    struct compressed *own = plan->data[COMPOSITION_COMPRESSED];
    step->bring_keys = write_rows;
    if (step->program == mla_run && !is_whole(step)) {
        merged_use(step, &step->launches[ATTN_PHASE_PREFILL][PART_COMPRESSED], &own->view, mla_run);
    }
}

const struct composition composition_compressed = {
    .extension = offsetof(struct layer, compressed),
    .resolve = resolve,
    .match = match,
    .composed = ATTN_COMPOSE_COMPRESSED | ATTN_COMPOSE_BOTH_CACHES,
    .layer_bytes = sizeof(struct compressed_layer),
    .bind = bind,
    .plan_bytes = sizeof(struct compressed),
    .build = build,
    .view = view,
    .choose = choose,
};
