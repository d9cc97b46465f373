/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers. A request has a state in a slot instead of keys in blocks; a step is one call
 * of the kernel `recurrent`, which knows the layer's rule. */
#include <attn/draft/recurrent.h>
#include <math.h>
#include <string.h>

#include "compositions.h"
#include "select/names.h"
#include "step/plan_state.h"

/* Checks the draft extension for rules other than gated delta: refuses values that contradict each
 * other. */
static attn_status check_rule(const char *name, const struct attn_recurrent_rule *r,
                              struct attn_error *error)
{
    const bool step = r->write_gate == ATTN_WRITE_GATE_STEP;
    const bool steps = r->gate == ATTN_GATE_SOFTPLUS, bounded = r->gate == ATTN_GATE_BOUNDED;
    BAD_IF(r->gate == ATTN_GATE_CONSTANT && r->gate_per_channel, "gate_per_channel",
           "layer '%s': gate_per_channel is 1; 0 with a constant gate", name);
    BAD_IF(step && (!steps || r->gate_per_channel), "write_gate",
           "layer '%s': write_gate is the step of a softplus gate per head; gate is %d, "
           "gate_per_channel %d",
           name, r->gate, r->gate_per_channel);
    BAD_IF(bounded ? !(r->gate_bound < 0) || !isfinite(r->gate_bound) : r->gate_bound != 0,
           "gate_bound", "layer '%s': gate_bound is %g; below 0 with a bounded gate, else 0", name,
           r->gate_bound);
    BAD_IF(!(r->dt_min >= 0) || !isfinite(r->dt_min) || !(r->dt_max >= 0) ||
               (r->dt_max > 0 && r->dt_max < r->dt_min) ||
               (!steps && (r->dt_min > 0 || r->dt_max > 0)),
           "dt_min",
           "layer '%s': dt_min is %g, dt_max %g; 0 or above, dt_max from dt_min on or 0, of a "
           "softplus gate",
           name, r->dt_min, r->dt_max);
    return ATTN_OK;
}

static attn_status check_norm(const char *name, const struct attn_recurrent_norm *norm,
                              int32_t num_v_heads, struct attn_error *error)
{
    BAD_IF(norm->num_groups > 0 && num_v_heads % norm->num_groups != 0, "num_groups",
           "layer '%s': num_groups %d does not divide num_v_heads %d", name, norm->num_groups,
           num_v_heads);
    BAD_IF(!(norm->epsilon > 0) || !isfinite(norm->epsilon), "epsilon",
           "layer '%s': epsilon is %g; above 0", name, norm->epsilon);
    return ATTN_OK;
}

/* Channels of the convolution: q, k and v of a token. */
static int64_t num_channels(const struct attn_recurrent_desc *g)
{
    return 2 * (int64_t)g->num_k_heads * g->head_size_k + (int64_t)g->num_v_heads * g->head_size_v;
}

/* A slot's bytes: S [Hv, Dv, Dk], and the convolution's window. */
static int64_t state_bytes(const struct attn_layer_desc *l, const struct attn_recurrent_desc *g)
{
    int64_t state = (int64_t)g->num_v_heads * g->head_size_v * g->head_size_k *
                    (g->state_dtype == ATTN_DTYPE_F32 ? 4 : 2);
    int64_t width = g->conv_width > 0 ? g->conv_width - 1 + g->num_speculative_tokens : 0;
    return state + num_channels(g) * width * (l->dtype == ATTN_DTYPE_F32 ? 4 : 2);
}

static int64_t round_up(int64_t count, int64_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* The ring of replay: rows of k, u and gates; see draft/recurrent.h. */
static attn_status check_ring(const struct layer *layer, struct attn_error *error)
{
    const struct attn_layer_desc *l = &layer->desc;
    const struct attn_recurrent_desc *g = layer->gdn;
    const struct attn_cache_desc *ring = layer->caches->caches;
    const int64_t group = g->num_v_heads / g->num_k_heads;
    const bool channels = layer->rule != NULL && layer->rule->gate_per_channel;
    const int64_t gates = group * (channels ? g->head_size_k : 1);
    const int64_t inputs = round_up(g->head_size_k + group * g->head_size_v, 2);
    const int64_t row = round_up(inputs + gates * (l->dtype == ATTN_DTYPE_F32 ? 1 : 2), 8);
    BAD_IF(layer->caches->num_caches != 1 || ring->table != 0 || ring->kv_dtype != l->dtype ||
               ring->num_heads != g->num_k_heads || ring->head_size != row ||
               ring->tokens_per_row != 1 || ring->block_size <= 2 * g->num_speculative_tokens,
           "caches",
           "layer '%s': %d caches, table %d, kv_dtype %s, %d heads of %d, block_size %d, "
           "tokens_per_row %d; a ring for replay is the only one, table 0, kv_dtype %s, %d heads "
           "of %lld, block_size above 2 num_speculative_tokens (%d), tokens_per_row 1",
           l->name, layer->caches->num_caches, ring->table,
           code_text(ATTN_NAMES_KV_DTYPE, ring->kv_dtype).text, ring->num_heads, ring->head_size,
           ring->block_size, ring->tokens_per_row, code_text(ATTN_NAMES_KV_DTYPE, l->dtype).text,
           g->num_k_heads, (long long)row, 2 * g->num_speculative_tokens);
    BAD_IF(l->batch_invariant >= 2, "batch_invariant",
           "layer '%s': batch_invariant is %d with a ring for replay; 0 or 1, since tokens enter "
           "the state as the ring has rounded them",
           l->name, l->batch_invariant);
    return ATTN_OK;
}

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    layer->has_states = true;
    layer->kernel = ATTN_KERNEL_RECURRENT;
    if (layer->caches != NULL) { /* a ring: its counts come with batches, its rows with no run */
        layer->reads ^= ABI_READS(IO_CACHES) | ABI_READS(DRAFT_BATCH_REPLAY);
    }
    const struct attn_layer_desc *l = &layer->desc;
    struct attn_recurrent_desc *g = layer->gdn;
    BAD_IF(g->num_v_heads % g->num_k_heads != 0, "num_v_heads",
           "layer '%s': num_v_heads %d is not a multiple of num_k_heads %d", l->name,
           g->num_v_heads, g->num_k_heads);
    BAD_IF(l->num_q_heads != g->num_k_heads || l->num_kv_heads != g->num_k_heads ||
               l->head_size != g->head_size_k ||
               (l->head_size_v != 0 && l->head_size_v != g->head_size_v),
           "head_size",
           "layer '%s': num_q_heads %d, num_kv_heads %d, head_size %d, head_size_v %d; of a "
           "recurrent layer they are num_k_heads %d, twice, head_size_k %d and 0 or head_size_v %d",
           l->name, l->num_q_heads, l->num_kv_heads, l->head_size, l->head_size_v, g->num_k_heads,
           g->head_size_k, g->head_size_v);
    BAD_IF(g->conv_silu && g->conv_width == 0, "conv_silu",
           "layer '%s': conv_silu is 1, which needs a conv_width", l->name);
    layer->desc.head_size_v = g->head_size_v;
    g->state_dtype = g->state_dtype == ATTN_DTYPE_DEFAULT ? ATTN_DTYPE_F32 : g->state_dtype;
    TRY_IF(layer->rule != NULL, check_rule(l->name, layer->rule, error));
    TRY_IF(layer->norm != NULL, check_norm(l->name, layer->norm, g->num_v_heads, error));
    TRY_IF(layer->caches != NULL, check_ring(layer, error));
    if (layer->rounding != NULL) {
        int32_t *rounds = &layer->rounding->philox_rounds;
        BAD_IF(g->state_dtype == ATTN_DTYPE_F32, "attn_recurrent_rounding",
               "layer '%s': state_dtype is f32; states of 16 bits are rounded by a seed", l->name);
        *rounds = *rounds == 0 ? 10 : *rounds;
    }
    layer->state_bytes = state_bytes(l, g);
    /* what a batch brings, and what is checked of it, is one for all layers of a plan */
    const int32_t rest[] = {layer->caches != NULL ? layer->caches->caches->block_size : 0,
                            layer->rounding != NULL};
    const size_t bytes = sizeof *g - sizeof g->ext;
    _Static_assert(sizeof *g - sizeof g->ext + sizeof rest <= MAX_BATCH_KEY, "room for both");
    memcpy(layer->batch_key, (const char *)g + sizeof g->ext, bytes);
    memcpy(layer->batch_key + bytes, rest, sizeof rest);
    return ATTN_OK;
}

/* A layer without the draft extension has the gated delta rule. */
static const struct attn_recurrent_rule *rule_of(const struct layer *layer)
{
    static const struct attn_recurrent_rule gated_delta;
    return layer->rule != NULL ? layer->rule : &gated_delta;
}

static void need_switch(struct check *check, const char *field, int32_t asked, int32_t declared)
{
    if (asked && !declared) {
        check_refuse_number(check, field, asked, "no");
    }
}

/* An empty mask stands for code 0: a backend without the draft extension has the gated delta rule
 * alone. */
static void match_rule(struct check *check, const struct layer *layer)
{
    static const struct attn_recurrent_rule_caps none;
    const struct attn_recurrent_rule *r = rule_of(layer);
    const struct attn_recurrent_rule_caps *caps =
        ext_find(check->caps->next, ATTN_EXT_DRAFT_RECURRENT_CAPS);
    caps = caps != NULL ? caps : &none;
    CHECK_DRAFT_CODE(check, "rule", r->rule, caps->rules, "gated_delta", "additive");
    CHECK_DRAFT_CODE(check, "gate", r->gate, caps->gates, "softplus", "bounded", "given",
                     "constant");
    CHECK_DRAFT_CODE(check, "write_gate", r->write_gate, caps->write_gates, "sigmoid", "none",
                     "step");
    need_switch(check, "gate_per_channel", r->gate_per_channel, caps->gate_per_channel);
    need_switch(check, "values_first", r->values_first, caps->values_first);
    need_switch(check, "has_skip", r->has_skip, caps->skip);
    need_switch(check, "attn_recurrent_norm", layer->norm != NULL, caps->norm);
    need_switch(check, "attn_recurrent_rounding", layer->rounding != NULL,
                caps->stochastic_rounding == 1);
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_recurrent_desc *gdn = check->whole->gdn;
    const struct attn_recurrent_caps *caps = ext_find(check->caps->next, ATTN_EXT_CAPS_RECURRENT);
    if (caps == NULL) {
        if (check->caps->kernels & ATTN_KERNEL_RECURRENT) {
            reasons_add(check->reasons, "attn_recurrent_caps", "limits of recurrent layers",
                        "not declared");
        }
        return;
    }
    match_rule(check, check->whole);
    need_switch(check, "has_initial_slots", gdn->has_initial_slots, caps->initial_slots);
    need_switch(check, "checkpoint_interval", gdn->checkpoint_interval, caps->checkpoints);
    check_code(check, "state_dtype", ATTN_NAMES_DTYPE, gdn->state_dtype,
               caps->state_dtypes != 0 ? caps->state_dtypes : 1u << ATTN_DTYPE_F32);
    CHECK_LIMITS(
        check, {"head_size_k", gdn->head_size_k, caps->head_size_k_max},
        {"head_size_v", gdn->head_size_v, caps->head_size_v_max},
        {"conv_width", gdn->conv_width, caps->conv_width_max},
        {"num_speculative_tokens", gdn->num_speculative_tokens, caps->max_speculative_tokens});
}

/* Weights are borrowed, and handed to kernels as they came. */
static attn_status bind(attn_layer *layer, struct attn_error *error)
{
    const struct attn_recurrent_desc *g = layer->selected->gdn;
    const struct attn_ext *given = layer->part_params[PART_MAIN].next;
    const struct attn_recurrent_weights *weights = ext_find(given, ATTN_EXT_RECURRENT_WEIGHTS);
    const char *name = layer->desc->name;
    const int64_t channels = num_channels(g);
    const int32_t gate = rule_of(layer->selected)->gate;
    const bool a_log = gate != ATTN_GATE_GIVEN, dt_bias = a_log && gate != ATTN_GATE_CONSTANT;
    layer->needed_params = "weights";
    if (layer->params == NULL) {
        return ATTN_OK;
    }
    const struct attn_recurrent_skip *skip = ext_find(given, ATTN_EXT_DRAFT_RECURRENT_SKIP);
    const bool has_skip = rule_of(layer->selected)->has_skip;
    BAD_IF(weights == NULL || (weights->a_log != NULL) != a_log ||
               (weights->dt_bias != NULL) != dt_bias,
           "attn_recurrent_weights",
           "layer '%s': the parameters bring no attn_recurrent_weights, or not what its gate "
           "takes: a_log %p (%s), dt_bias %p (%s)",
           name, weights != NULL ? (const void *)weights->a_log : NULL, a_log ? "an array" : "NULL",
           weights != NULL ? (const void *)weights->dt_bias : NULL, dt_bias ? "an array" : "NULL");
    BAD_IF((skip != NULL && skip->skip != NULL) != has_skip, "skip",
           "layer '%s': has_skip is %d and skip is %p", name, has_skip,
           skip != NULL ? (const void *)skip->skip : NULL);
    const struct attn_recurrent_norm *norm = layer->selected->norm;
    const struct attn_recurrent_norm_weight *scaled =
        ext_find(given, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT);
    const int64_t scales =
        (int64_t)g->head_size_v * (norm != NULL && norm->num_groups > 0 ? g->num_v_heads : 1);
    const struct attn_tensor *conv = weights->conv_weight, *bias = weights->conv_bias;
    const struct attn_dtype dtype = dtype_of_id(layer->desc->dtype);
    CHECK_TENSOR_IF(norm != NULL, scaled != NULL ? scaled->weight : NULL, name,
                    "attn_recurrent_norm_weight", 1, {scales});
    CHECK_TENSOR_IF(g->conv_width > 0, conv, name, "conv_weight", 2, {channels, g->conv_width}, 0,
                    dtype, true);
    CHECK_TENSOR_IF(g->conv_width > 0 && bias != NULL, bias, name, "conv_bias", 1, {channels},
                    .strided = true);
    return ATTN_OK;
}

/* By the last plan: what a view carries. */
struct recurrent_view {
    struct attn_batch_recurrent states;
    struct attn_batch_replay ring; /* chained to it where the layer has one */
};
struct recurrent_views {
    struct recurrent_view whole, decode, prefill;
};

/* Tokens of request r by the device's array, which a host that validates can read: the host's copy
 * may be a bound. */
static int32_t num_tokens(const struct attn_batch *b, int32_t r)
{
    return b->query_start_loc[r + 1] - b->query_start_loc[r];
}

/* Does the step leave request r, its rows of out and its states, as they are? What the step brings
 * for it may be anything. */
static bool is_left_alone(const struct attn_batch *b, const struct attn_batch_recurrent *states,
                          int32_t r)
{
    const int32_t *initial = MOVED(states->initial_slots, r * states->initial_slots_stride);
    return num_tokens(b, r) == 0 || states->state_slots[r * states->state_slots_stride] < 0 ||
           (initial != NULL && *initial < 0) || (b->seq_lens != NULL && b->seq_lens[r] == 0);
}

/* NaN in what the requests of a step bring. */
static attn_status validate_inputs(const attn_plan *plan, const struct attn_step_io *io,
                                   const struct attn_io_recurrent *gdn,
                                   const struct attn_tensor *gate, struct attn_error *error)
{
    const struct recurrent_views *views = plan->data[COMPOSITION_RECURRENT];
    const struct {
        const char *name;
        const struct attn_tensor *tensor;
    } inputs[] = {{"mixed_qkv", gdn->mixed_qkv},
                  {"q", io->q},
                  {"k", io->k},
                  {"v", io->v},
                  {"a", gdn->a},
                  {"b", gdn->b},
                  {"gate", gate}};
    const int32_t *starts = plan->given.query_start_loc;
    for (int32_t r = 0; plan->looks && r < plan->given.num_reqs; r++) {
        const bool reads = !is_left_alone(&plan->given, &views->whole.states, r);
        for (size_t i = 0; reads && i < sizeof inputs / sizeof *inputs; i++) {
            TRY(validate_rows(plan, inputs[i].tensor, starts[r], starts[r + 1], inputs[i].name,
                              error));
        }
    }
    return ATTN_OK;
}

static attn_status check_io(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, bool writes, bool attends,
                            struct attn_error *error)
{
    const struct attn_io_recurrent *gdn = ext_find(io->next, ATTN_EXT_IO_RECURRENT);
    const struct attn_recurrent_desc *g = step->layer->selected->gdn;
    const int64_t rows = plan->num_tokens;
    BAD_IF((io->flags & (ATTN_RUN_NO_WRITE | ATTN_RUN_NO_ATTEND)) != 0, "flags",
           "%s: each run of a recurrent layer moves its state; allowed are hints (the upper half)",
           attends ? "ATTN_RUN_NO_WRITE" : "ATTN_RUN_NO_ATTEND");
    BAD_IF(gdn == NULL || io->lse != NULL, "attn_io_recurrent",
           "a run of a recurrent layer needs attn_io_recurrent and has no lse");
    const struct attn_recurrent_rule *r = rule_of(step->layer->selected);
    int64_t gates = (int64_t)g->num_v_heads * (r->gate_per_channel ? g->head_size_k : 1);
    const bool a = r->gate != ATTN_GATE_CONSTANT, b = r->write_gate == ATTN_WRITE_GATE_SIGMOID;
    BAD_IF((!a && gdn->a != NULL) || (!b && gdn->b != NULL), !a && gdn->a != NULL ? "a" : "b",
           "is not NULL; a constant gate has no a, and without a sigmoid write gate there is no "
           "b");
    CHECK_TENSOR_IF(a, gdn->a, NULL, "a", 2, {rows, gates}, 1, .strided = true);
    CHECK_TENSOR_IF(b, gdn->b, NULL, "b", 2, {rows, g->num_v_heads}, 1, .strided = true);
    /* A window keeps inputs in the layer's dtype: a cut must not round what a step reads whole. */
    const struct attn_layer_desc *l = step->layer->desc;
    const bool as_kept = l->batch_invariant >= 2 && g->conv_width > 1;
    CHECK_TENSOR_IF(g->conv_width > 0, gdn->mixed_qkv, NULL, "mixed_qkv", 2,
                    {rows, num_channels(g)}, 1,
                    as_kept ? dtype_of_id(l->dtype) : (struct attn_dtype){0});
    BAD_IF(g->conv_width > 0 ? (io->q != NULL || io->k != NULL || io->v != NULL)
                             : gdn->mixed_qkv != NULL,
           g->conv_width == 0 ? "mixed_qkv"
           : io->q != NULL    ? "q"
           : io->k != NULL    ? "k"
                              : "v",
           "is not NULL; a layer with conv_width %d takes %s", g->conv_width,
           g->conv_width > 0 ? "mixed_qkv alone" : "q, k and v");
    if (g->conv_width == 0) {
        TRY(check_rows("q", io->q, &step->q, rows, error));
        TRY(check_rows("k", io->k, &step->k, rows, error));
        TRY(check_rows("v", io->v, &step->v, rows, error));
    }
    const struct attn_io_recurrent_gate *gate =
        ext_find(io->next, ATTN_EXT_DRAFT_IO_RECURRENT_GATE);
    const bool norm = step->layer->selected->norm != NULL;
    CHECK_TENSOR_IF(norm, gate != NULL ? gate->gate : NULL, NULL, "attn_io_recurrent_gate", 3,
                    {rows, g->num_v_heads, g->head_size_v}, 1);
    TRY(validate_inputs(plan, io, gdn, norm ? gate->gate : NULL, error));
    return step_check_out(plan, step, io, error);
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_RECURRENT) {
        const struct attn_recurrent_desc *g = step->layer->selected->gdn;
        step->writes = step->fused_write = step->fused_decode = false;
        step->check_io = check_io;
        step->q.heads = step->k.heads = g->num_k_heads;
        step->q.head_size = step->k.head_size = g->head_size_k;
        step->v.heads = step->out.heads = g->num_v_heads;
        step->v.head_size = step->out.head_size = g->head_size_v;
        for (int32_t phase = 0; phase < NUM_PHASES; phase++) {
            const struct instance *instance = step->layer->served[phase].instance;
            step->launches[phase][PART_MAIN].kernel = instance->kernels.recurrent;
        }
    }
    return ATTN_OK;
}

/* Drafted tokens after each of which a request has a state of its own. */
static int32_t drafted_states(const struct layer *layer)
{
    return layer->caches != NULL ? 0 : layer->gdn->num_speculative_tokens;
}

/* Multiples of the interval in (seq_len - query_len, seq_len]. */
static int32_t num_checkpoints(const struct attn_batch *b,
                               const struct attn_batch_recurrent *states, int32_t interval,
                               int32_t r)
{
    return states->checkpoint_slots == NULL
               ? 0
               : b->seq_lens[r] / interval - (b->seq_lens[r] - num_tokens(b, r)) / interval;
}

/* Does request r begin with a state? */
static bool has_initial_state(const struct attn_batch *b, const struct attn_batch_recurrent *states,
                              int32_t r)
{
    return states->has_initial_state != NULL ? states->has_initial_state[r] != 0
                                             : b->seq_lens[r] > num_tokens(b, r);
}

/* A slot that a request reads or writes in a batch; neither: it is not followed. */
struct slot_use {
    const char *array;
    int32_t slot;
    bool reads, writes;
};

/* The n-th of request r: what its state is read from, where its states go, its checkpoints. false:
 * it has no more. */
static bool slot_use_of(const attn_plan *plan, const struct attn_batch_recurrent *states, int32_t r,
                        int64_t n, struct slot_use *use)
{
    const struct attn_batch *b = &plan->given;
    const struct attn_recurrent_desc *g = plan->steps[0].layer->selected->gdn;
    const int32_t *accepted = states->num_accepted_tokens;
    const int32_t *row = states->state_slots + r * states->state_slots_stride;
    const int32_t queries = num_tokens(b, r);
    const int32_t drafted = drafted_states(plan->steps[0].layer->selected);
    const bool all = accepted != NULL && queries <= 1 + drafted;
    const int32_t kept = all ? queries : 1;
    if (is_left_alone(b, states, r)) {
        return false;
    }
    if (n < 2) { /* the window's, the state's */
        const int32_t at = n == 1 && accepted != NULL && drafted > 0 ? accepted[r] - 1 : 0;
        const int32_t *own = MOVED(states->initial_slots, r * states->initial_slots_stride);
        *use = (struct slot_use){own != NULL ? "initial_slots" : "state_slots",
                                 own != NULL ? own[at] : row[at], has_initial_state(b, states, r),
                                 false};
        return true;
    }
    if (n < 2 + kept) {
        *use = (struct slot_use){"state_slots", row[n - 2], false, row[n - 2] >= 0};
        return true;
    }
    const int64_t checkpoint = n - 2 - kept;
    if (checkpoint >= num_checkpoints(b, states, g->checkpoint_interval, r)) {
        return false;
    }
    const int32_t slot = states->checkpoint_slots[r * states->checkpoint_slots_stride + checkpoint];
    *use = (struct slot_use){"checkpoint_slots", slot, false, slot >= 0};
    return true;
}

/* May these two be one slot? Several may read it; a request's state goes to where it came from. */
static bool share_slot(const struct slot_use *a, const struct slot_use *b, bool one_request)
{
    const bool to_its_own = one_request && a->writes != b->writes &&
                            strcmp(a->writes ? a->array : b->array, "state_slots") == 0;
    const bool followed = (a->reads || a->writes) && (b->reads || b->writes);
    return !followed || a->slot != b->slot || (!a->writes && !b->writes) || to_its_own;
}

/* Counts by which a request's slots are found, and rows of its ring. */
static attn_status check_counts(const attn_plan *plan, const struct attn_batch_recurrent *states,
                                int32_t r, struct attn_error *error)
{
    const struct layer *layer = plan->steps[0].layer->selected;
    const struct attn_recurrent_desc *g = layer->gdn;
    const struct attn_batch *b = &plan->given;
    const struct attn_batch_replay *replay =
        ext_find(states->ext.next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    const int32_t drafted = g->num_speculative_tokens;
    const int32_t accepted =
        states->num_accepted_tokens != NULL ? states->num_accepted_tokens[r] : 1;
    const int32_t checkpoints = num_checkpoints(&plan->given, states, g->checkpoint_interval, r);
    BAD_IF(accepted < 1 || accepted > 1 + drafted, "num_accepted_tokens", "request %d: %d; 1 to %d",
           r, accepted, 1 + drafted);
    if (replay != NULL && has_initial_state(b, states, r) && b->seq_lens[r] > 0) {
        const int32_t past = b->seq_lens[r] - num_tokens(b, r);
        const int32_t rows = layer->caches->caches->block_size - drafted;
        const int32_t most = past < rows ? past : rows - 1;
        BAD_IF(replay->ring_tokens[r] < 0 || replay->ring_tokens[r] > most, "ring_tokens",
               "request %d: %d; 0 to %d", r, replay->ring_tokens[r], most);
    }
    return checkpoints <= states->checkpoint_slots_stride
               ? ATTN_OK
               : BAD("checkpoint_slots", "request %d has %d checkpoints in a row of %lld", r,
                     checkpoints, (long long)states->checkpoint_slots_stride);
}

/* Every slot that a kernel will follow, where the host can read them: it is the layer's, and, since
 * requests of a batch run at once, no other's where one writes it. */
static attn_status validate_slots(const attn_plan *plan, const struct attn_batch_recurrent *states,
                                  struct attn_error *error)
{
    const int64_t slots = layer_num_blocks(plan_smallest(plan, 0), 0);
    struct slot_use use, other;
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        TRY_IF(!is_left_alone(&plan->given, states, r), check_counts(plan, states, r, error));
        for (int64_t n = 0; slot_use_of(plan, states, r, n, &use); n++) {
            BAD_IF((use.reads || use.writes) && (use.slot < 0 || use.slot >= slots), use.array,
                   "request %d %s slot %d; the layer has slots 0 to %lld", r,
                   use.writes ? "writes" : "reads", use.slot, (long long)slots - 1);
            for (int32_t s = 0; s <= r; s++) {
                for (int64_t m = 0; (s < r || m < n) && slot_use_of(plan, states, s, m, &other);
                     m++) {
                    if (!share_slot(&use, &other, s == r)) {
                        const bool state = strcmp(use.array, "state_slots") == 0;
                        return BAD(state ? other.array : use.array,
                                   "slot %d: request %d %s it (%s), and request %d %s it (%s) in "
                                   "the same batch; a slot that one writes is no other's, and is "
                                   "written once",
                                   use.slot, s, other.writes ? "writes" : "reads", other.array, r,
                                   use.writes ? "writes" : "reads", use.array);
                    }
                }
            }
        }
    }
    return ATTN_OK;
}

/* The extensions of a part of the batch: their arrays begin at the part's first request. */
static void cut_states(const struct recurrent_view *all, int32_t first, struct recurrent_view *part,
                       struct attn_batch *view)
{
    const struct attn_batch_recurrent *from = &all->states;
    struct attn_batch_recurrent *to = &part->states;
    *part = *all;
    part->ring.ring_tokens = MOVED(all->ring.ring_tokens, first);
    to->ext.next = from->ext.next != NULL ? &part->ring.ext : NULL;
    to->state_slots += first * from->state_slots_stride;
    to->has_initial_state = MOVED(from->has_initial_state, first);
    to->num_accepted_tokens = MOVED(from->num_accepted_tokens, first);
    to->initial_slots = MOVED(from->initial_slots, first * from->initial_slots_stride);
    to->checkpoint_slots = MOVED(from->checkpoint_slots, first * from->checkpoint_slots_stride);
    view->next = &to->ext;
}

/* Checks the batch's extensions and cuts them for its parts. */
static attn_status view_split(attn_plan *plan, struct attn_error *error)
{
    const struct attn_ext *ext = ext_find(plan->given.next, ATTN_EXT_BATCH_RECURRENT);
    const struct layer *layer = plan->steps[0].layer->selected;
    const struct attn_recurrent_desc *g = layer->gdn;
    const struct attn_batch_replay *replay =
        ext_find(plan->given.next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    BAD_IF(ext == NULL, "attn_batch_recurrent",
           "is not on the batch; layer '%s' needs its state_slots",
           plan->steps[0].layer->desc->name);
    struct recurrent_views *views = plan->data[COMPOSITION_RECURRENT];
    struct attn_batch_recurrent *states = &views->whole.states;
    ext_copy(&states->ext, ext, sizeof *states);
    states->state_slots_stride += states->state_slots_stride == 0; /* 0: 1 */
    states->initial_slots_stride += states->initial_slots_stride == 0;
    const int32_t most = 1 + drafted_states(layer);
    const int32_t row = states->num_accepted_tokens != NULL ? most : 1;
    if (layer->caches != NULL) {
        BAD_IF(replay == NULL || replay->ring_tokens == NULL || plan->given.seq_lens == NULL,
               "attn_batch_replay",
               "%p, ring_tokens %p, seq_lens %p; a layer with a ring needs all three",
               (const void *)replay, replay != NULL ? (const void *)replay->ring_tokens : NULL,
               (const void *)plan->given.seq_lens);
        ext_copy(&views->whole.ring.ext, &replay->ext, sizeof *replay);
        states->ext.next = &views->whole.ring.ext;
    }
    BAD_IF(states->state_slots == NULL || states->state_slots_stride < row, "state_slots",
           "%p, rows %lld apart; an array is needed, with rows of 1 or more states, where tokens "
           "are drafted of %d",
           (const void *)states->state_slots, (long long)states->state_slots_stride, most);
    BAD_IF(states->initial_slots != NULL && states->initial_slots_stride < row,
           "initial_slots_stride", "is %lld; 1 or more, where tokens are drafted %d",
           (long long)states->initial_slots_stride, most);
    BAD_IF(states->checkpoint_slots != NULL && plan->given.seq_lens == NULL, "seq_lens",
           "is NULL; checkpoint_slots need the requests' lengths");
    BAD_IF(layer->rounding != NULL && plan->given.seq_lens == NULL, "seq_lens",
           "is NULL; attn_recurrent_rounding needs the requests' lengths");
    BAD_IF((states->initial_slots != NULL && !g->has_initial_slots) ||
               (states->checkpoint_slots != NULL &&
                (g->checkpoint_interval == 0 || states->checkpoint_slots_stride < 0)),
           "initial_slots",
           "%p, checkpoint_slots %p, rows %lld apart; a layer that brings them says "
           "has_initial_slots or checkpoint_interval",
           (const void *)states->initial_slots, (const void *)states->checkpoint_slots,
           (long long)states->checkpoint_slots_stride);
    BAD_IF(states->has_initial_state == NULL && plan->given.seq_lens == NULL, "has_initial_state",
           "is NULL, and so is seq_lens, from which it would follow");
    TRY_IF(plan->looks, validate_slots(plan, states, error));
    plan->whole.next = &states->ext;
    cut_states(&views->whole, 0, &views->decode, &plan->decode);
    cut_states(&views->whole, plan->split.num_decodes, &views->prefill, &plan->prefill);
    return ATTN_OK;
}

const struct composition composition_recurrent = {
    .extension = offsetof(struct layer, gdn),
    .resolve = resolve,
    .match = match,
    .bind = bind,
    .plan_bytes = sizeof(struct recurrent_views),
    .build = build,
    .view_split = view_split,
};
