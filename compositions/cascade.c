/* SPDX-License-Identifier: Apache-2.0 */
/* Cascade: a prefix that all requests of a batch have in common, attended once for all of them. */
#include "compositions.h"
#include "merged.h"

#define CASCADE_MIN_PREFIX 256
#define CASCADE_MIN_REQS 8
/* Tokens of a step: with more, arithmetic is the limit and not the reads of the prefix's keys, and
 * partial results would take most of a large plan's workspace. */
#define CASCADE_MAX_TOKENS 2048
#define CASCADE_TILE 128 /* query rows and keys of a tile in the cost estimate */

/* All tokens over the common prefix; the requests over the keys after it. */
struct views {
    struct attn_batch prefix, suffix;
    int32_t prefix_len; /* usable common prefix of the last batch; 0: none */
    size_t numbers;     /* place in the workspace of what is merged where outputs are codes */
};

/* Does the layer's attend write codes itself? Those cannot be merged: both parts then are numbers,
 * and their merge is quantized. */
static bool writes_codes(const attn_layer *layer)
{
    return layer->parts[PART_MAIN].output_form != ATTN_OUTPUT_PLAIN;
}

/* A step may attend to a shared prefix apart if the backend has its attend, log-sum-exp and merge.
 */
static void match(struct check *check, int32_t phase)
{
    const struct attn_layer_desc *l = check->layer;
    bool numbers =
        l->output_form == ATTN_OUTPUT_PLAIN || check->caps->kernels & ATTN_KERNEL_QUANTIZE;
    const uint64_t features = ATTN_FEATURE_LSE | ATTN_FEATURE_PAGED_KV;
    bool plain = l->kind == ATTN_LAYER_DECODER && l->causal == ATTN_CAUSAL_YES && !l->has_window &&
                 numbers && l->chunk_size == 0 && l->sink_len == 0 && !l->alibi && !l->prefix_lm &&
                 check->whole->cp == NULL;
    if (plain && (check->caps->features & features) == features &&
        check->caps->terms & ATTN_TERM_BIDIRECTIONAL &&
        check->caps->kernels & ATTN_KERNEL_MERGE_STATES) {
        check->match->composed |= ATTN_COMPOSE_CASCADE; /* never in a capture: no graph level */
    }
}

static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    layer->parts[PART_REST] = layer->parts[PART_MAIN];
    layer->parts[PART_REST].output_form = ATTN_OUTPUT_PLAIN;
    layer->part_params[PART_REST] = layer->part_params[PART_MAIN];
    return ATTN_OK;
}

/* Limits that no cascade fits into leave it, and its partial results in the workspace, out. */
static attn_status build(attn_plan *plan, struct attn_error *error)
{
    struct views *views = plan->data[COMPOSITION_CASCADE];
    struct attn_limits *limits = plan->part_limits;
    if (plan->limits.max_num_reqs < CASCADE_MIN_REQS ||
        (plan->limits.max_seq_len > 0 && plan->limits.max_seq_len <= CASCADE_MIN_PREFIX)) {
        return ATTN_OK;
    }
    merged_limit(&limits[PART_PREFIX], CASCADE_MAX_TOKENS);
    const int32_t rows = limits[PART_REST].max_num_tokens = limits[PART_PREFIX].max_num_tokens;
    plan->num_host_ints +=
        3 + (int64_t)plan->limits.max_num_reqs; /* the prefix's, lengths of the suffixes */
    FOR_SERVED(step, plan, COMPOSITION_CASCADE) {
        if (!(step->layer->served[ATTN_PHASE_PREFILL].composed & ATTN_COMPOSE_CASCADE)) {
            continue;
        }
        plan_area_of_merge(plan, step, rows, ALWAYS);
        step->parts[ATTN_PHASE_PREFILL] |= 1u << PART_PREFIX;
        if (writes_codes(step->layer)) {
            step->parts[ATTN_PHASE_PREFILL] |= 1u << PART_REST;
            step->parts[ATTN_PHASE_DECODE] |= 1u << PART_REST;
            plan_area(plan, &views->numbers, rows * step_row_bytes(step), ALWAYS);
        }
    }
    return ATTN_OK;
}

/* The engine's prefix, cut to whole blocks before every request's queries; 0: no cascade. */
static int32_t usable_prefix(const attn_plan *plan)
{
    const struct attn_batch *b = &plan->given;
    int32_t block = plan->steps[0].layer->desc->block_size;
    int32_t prefix = b->common_prefix_len;
    if (b->seq_lens_host == NULL || b->num_reqs < CASCADE_MIN_REQS || block <= 0) {
        return 0;
    }
    for (int32_t r = 0; r < b->num_reqs; r++) {
        const int32_t context = b->seq_lens_host[r] - num_queries(b, r);
        prefix = context < prefix ? context : prefix;
    }
    prefix = prefix / block * block;
    return prefix >= CASCADE_MIN_PREFIX ? prefix : 0;
}

/* Terms under which the prefix can be attended apart, and then whether it is cheaper than split-KV
 * decode (the heuristic of vLLM's use_cascade_attention). */
static bool pays(const attn_plan *plan, const struct step *step)
{
    const struct attn_batch *b = &plan->given;
    const struct attn_layer_desc *l = step->layer->desc;
    const struct attn_device_info *device = plan->model->assignment->device;
    const struct views *views = plan->data[COMPOSITION_CASCADE];
    const int32_t prefix = views->prefix_len;
    /* match has refused a layer's other terms: it has no such part, then */
    bool excluded = l->causal_per_request || b->causal == ATTN_CAUSAL_NO || l->batch_invariant;
    bool flags =
        b->flags & (ATTN_BATCH_NO_CASCADE | ATTN_BATCH_IN_CAPTURE | ATTN_BATCH_HOST_BOUNDS);
    bool part = step->launches[ATTN_PHASE_PREFILL][PART_PREFIX].kernel != NULL;
    if (prefix == 0 || b->num_tokens > CASCADE_MAX_TOKENS || excluded || flags || !part) {
        return false;
    }
    int64_t g = l->num_q_heads / l->num_kv_heads, reqs = b->num_reqs;
    if (g == 1 || b->max_query_len > 1) {
        return true;
    }
    int64_t tiles = ((int64_t)prefix + CASCADE_TILE - 1) / CASCADE_TILE;
    int64_t sms =
        device != NULL && device->num_multiprocessors > 0 ? device->num_multiprocessors : 1;
    int64_t cascade_ctas = l->num_q_heads * ((reqs + CASCADE_TILE - 1) / CASCADE_TILE);
    int64_t cascade = (cascade_ctas + sms - 1) / sms * tiles;
    int64_t split_ctas = reqs * l->num_kv_heads * ((g + CASCADE_TILE - 1) / CASCADE_TILE) * tiles;
    return cascade < (split_ctas + sms - 1) / sms;
}

static attn_status view(attn_plan *plan, struct attn_error *error)
{
    const struct attn_batch *whole = &plan->given;
    struct views *views = plan->data[COMPOSITION_CASCADE];
    struct attn_batch *prefix = &views->prefix, *suffix = &views->suffix;
    bool any = false;
    const int32_t length = views->prefix_len = usable_prefix(plan);
    const int32_t block = plan->steps[0].layer->desc->block_size;
    for (int32_t i = 0; i < plan->num_steps && !any; i++) {
        any = pays(plan, &plan->steps[i]);
    }
    if (!any) {
        return ATTN_OK;
    }
    merged_view(plan, prefix);
    int32_t *prefix_len = plan_take(plan, 1);
    *prefix_len = length;
    view_lens(plan, prefix, prefix_len);

    int32_t *lens = plan_take(plan, whole->num_reqs);
    *suffix = *whole;
    for (int32_t r = 0; r < whole->num_reqs; r++) {
        lens[r] = whole->seq_lens_host[r] - length;
    }
    view_lens(plan, suffix, lens);
    suffix->block_table += length / block;
    return ATTN_OK;
}

/* Merged numbers become codes. */
static attn_status run_codes(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                             struct attn_error *error)
{
    const struct views *views = plan->data[COMPOSITION_CASCADE];
    return output_quantized(plan, step, io, views->numbers, merged_run, error);
}

static void choose(attn_plan *plan, struct step *step)
{
    struct views *views = plan->data[COMPOSITION_CASCADE];
    if (step->program != NULL || plan->given.num_actual_tokens == 0 || !pays(plan, step)) {
        return;
    }
    int32_t phase = plan->split.num_prefills == 0 ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL;
    int32_t rest = writes_codes(step->layer) ? PART_REST : PART_MAIN;
    merged_use(step, &step->launches[ATTN_PHASE_PREFILL][PART_PREFIX], &views->prefix, run_attends);
    step->main[0] = launch_use(&step->launches[phase][rest], &views->suffix);
    step->program = writes_codes(step->layer) ? run_codes : step->program;
}

const struct composition composition_cascade = {
    .match = match,
    .composed = ATTN_COMPOSE_CASCADE,
    .plan_bytes = sizeof(struct views),
    .bind = bind,
    .build = build,
    .view = view,
    .choose = choose,
};
