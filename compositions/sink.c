/* SPDX-License-Identifier: Apache-2.0 */
/* Static sinks: fixed keys before every request's own, attended apart by all tokens. */
#include "compositions.h"
#include "merged.h"

/* By the last plan. */
struct sink {
    struct attn_batch view;
    struct merge_run *runs; /* host, among the plan's integers */
    int32_t num_runs;
};

static void match(struct check *check, int32_t phase)
{
    const struct attn_backend_caps *caps = check->caps;
    if (check->layer->sink_len == 0 || caps->terms & ATTN_TERM_STATIC_SINK) {
        return;
    }
    check_compose(check, ATTN_COMPOSE_STATIC_SINK, ATTN_GRAPH_UNIFORM_BATCH);
    CHECK_NEEDS(
        check, "static_sink",
        {caps->features & ATTN_FEATURE_LSE, "attend(sink) + attend(rest) + merge: log-sum-exp"},
        {caps->features & ATTN_FEATURE_CONTIGUOUS_KV,
         "attend(sink) + attend(rest) + merge: contiguous keys"},
        {caps->kernels & ATTN_KERNEL_MERGE_STATES,
         "attend(sink) + attend(rest) + merge: merge_states"},
        {!check->layer->host_bounds, "with bounds in place of host lengths", "only fused"},
        {check->layer->alibi == ATTN_ALIBI_NONE, "with ALiBi", "only fused"});
}

static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    layer->parts[PART_MAIN].kind = ATTN_LAYER_DECODER;
    layer->parts[PART_MAIN].sink_len = 0;
    layer->parts[PART_SINK].kind = ATTN_LAYER_ENCODER;
    return ATTN_OK;
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    merged_limit(&plan->part_limits[PART_SINK], plan->limits.max_num_tokens);
    plan->num_host_ints += 4 + 2 * (int64_t)plan->limits.max_num_reqs; /* 2 a run of rows */
    FOR_SERVED(step, plan, COMPOSITION_SINK) {
        struct attn_attend_args *args = &step->launches[ATTN_PHASE_PREFILL][PART_SINK].args;
        if (!(step->layer->served[ATTN_PHASE_PREFILL].composed & ATTN_COMPOSE_STATIC_SINK)) {
            continue;
        }
        step->parts[ATTN_PHASE_PREFILL] |= 1u << PART_SINK;
        args->k_cache = args->v_cache = NULL;
        args->k = step->layer->params->params.sink_k;
        args->v = step->layer->params->params.sink_v;
        plan_area_of_merge(plan, step, plan->limits.max_num_tokens, ALWAYS);
    }
    return ATTN_OK;
}

/* Rows of requests without keys see no sink either: their part of the merge has no prefix. */
static void find_merge_runs(attn_plan *plan, struct sink *sink)
{
    const struct attn_batch *b = &plan->given;
    int32_t *runs = plan_take(plan, 2 * (int64_t)b->num_reqs);
    sink->runs = (struct merge_run *)runs;
    sink->num_runs = 0;
    for (int32_t r = 0; r < b->num_reqs; r++) {
        bool keys = b->seq_lens_host == NULL || b->seq_lens_host[r] > 0;
        int32_t last = sink->num_runs - 1;
        if (last < 0 || sink->runs[last].with_prefix != keys) {
            sink->runs[++last].with_prefix = keys;
            sink->num_runs++;
        }
        sink->runs[last].end_row = b->query_start_loc_host[r + 1];
    }
}

static attn_status view(attn_plan *plan, struct attn_error *error)
{
    struct sink *sink = plan->data[COMPOSITION_SINK];
    int32_t length = plan->steps[0].layer->desc->sink_len;
    merged_view(plan, &sink->view);
    int32_t *keys = plan_take(plan, 2);
    keys[0] = 0;
    keys[1] = length;
    view_keys(plan, &sink->view, keys);
    sink->view.max_seq_len = length;
    find_merge_runs(plan, sink);
    return ATTN_OK;
}

static void choose(attn_plan *plan, struct step *step)
{
    struct sink *sink = plan->data[COMPOSITION_SINK];
    struct launch *launch = &step->launches[ATTN_PHASE_PREFILL][PART_SINK];
    if (launch->kernel != NULL && step_attends(plan, step) == run_attends) {
        merged_use(step, launch, &sink->view, run_attends);
        step->merges = sink->runs;
        step->num_merges = sink->num_runs;
    }
}

const struct composition composition_sink = {
    .match = match,
    .composed = ATTN_COMPOSE_STATIC_SINK,
    .bind = bind,
    .plan_bytes = sizeof(struct sink),
    .build = build,
    .view = view,
    .choose = choose,
};
