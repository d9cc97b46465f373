/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers. A request has a state in a slot instead of keys in blocks; a step is one call
 * of the kernel `recurrent`, which knows the layer's rule. */
#include <math.h>
#include <string.h>

#include "compositions.h"
#include "bind/model.h"
#include "select/layer.h"
#include "select/match.h"
#include "select/names.h"
#include "step/plan_state.h"
#include "util/structs.h"
#include "util/tensor.h"
#include "util/counts.h"

/* The draft extension that says another rule than gated delta; values that do not go together. */
static attn_status check_rule(const char *name, const struct attn_recurrent_rule *r,
                              struct attn_error *error)
{
    const bool step = r->write_gate == ATTN_WRITE_GATE_STEP;
    const bool steps = r->gate == ATTN_GATE_SOFTPLUS, bounded = r->gate == ATTN_GATE_BOUNDED;
    if (r->gate == ATTN_GATE_CONSTANT && r->gate_per_channel) {
        return BAD("gate_per_channel", "layer '%s': gate_per_channel is 1; 0 with a constant gate",
                   name);
    }
    if (step && (!steps || r->gate_per_channel)) {
        return BAD("write_gate",
                   "layer '%s': write_gate is the step of a softplus gate per head; gate is %d, "
                   "gate_per_channel %d",
                   name, r->gate, r->gate_per_channel);
    }
    if (bounded ? !(r->gate_bound < 0) || !isfinite(r->gate_bound) : r->gate_bound != 0) {
        return BAD("gate_bound",
                   "layer '%s': gate_bound is %g; below 0 with a bounded gate, else 0", name,
                   r->gate_bound);
    }
    if (!(r->dt_min >= 0) || !isfinite(r->dt_min) || !(r->dt_max >= 0) ||
        (r->dt_max > 0 && r->dt_max < r->dt_min) || (!steps && (r->dt_min > 0 || r->dt_max > 0))) {
        return BAD("dt_min",
                   "layer '%s': dt_min is %g, dt_max %g; 0 or above, dt_max from dt_min on or 0, "
                   "of a softplus gate",
                   name, r->dt_min, r->dt_max);
    }
    return ATTN_OK;
}

static attn_status check_norm(const char *name, const struct attn_recurrent_norm *norm,
                              int32_t num_v_heads, struct attn_error *error)
{
    if (norm->num_groups > 0 && num_v_heads % norm->num_groups != 0) {
        return BAD("num_groups", "layer '%s': num_groups %d does not divide num_v_heads %d", name,
                   norm->num_groups, num_v_heads);
    }
    if (!(norm->epsilon > 0) || !isfinite(norm->epsilon)) {
        return BAD("epsilon", "layer '%s': epsilon is %g; above 0", name, norm->epsilon);
    }
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

static attn_status resolve(struct layer *layer, struct attn_error *error)
{
    layer->has_states = layer->gdn != NULL;
    if ((layer->desc.kind == ATTN_LAYER_RECURRENT) != layer->has_states) {
        return layer_refuse_extension(layer, "attn_recurrent_desc", !layer->has_states, error);
    }
    if (!layer->has_states) {
        return layer->rule == NULL && layer->norm == NULL
                   ? ATTN_OK
                   : layer_refuse_extension(
                         layer, layer->rule != NULL ? "attn_recurrent_rule" : "attn_recurrent_norm",
                         false, error);
    }
    layer->kernel = ATTN_KERNEL_RECURRENT;
    layer->reads |=
        ABI_READS(RECURRENT_WEIGHTS) | ABI_READS(BATCH_RECURRENT) | ABI_READS(IO_RECURRENT) |
        (layer->rule != NULL ? ABI_READS(DRAFT_RECURRENT_SKIP) : 0) |
        (layer->norm != NULL
             ? ABI_READS(DRAFT_RECURRENT_NORM_WEIGHT) | ABI_READS(DRAFT_IO_RECURRENT_GATE)
             : 0);
    const struct attn_layer_desc *l = &layer->desc;
    struct attn_recurrent_desc *g = layer->gdn;
    if (g->num_v_heads % g->num_k_heads != 0) {
        return BAD("num_v_heads", "layer '%s': num_v_heads %d is not a multiple of num_k_heads %d",
                   l->name, g->num_v_heads, g->num_k_heads);
    }
    if (l->num_q_heads != g->num_k_heads || l->num_kv_heads != g->num_k_heads ||
        l->head_size != g->head_size_k ||
        (l->head_size_v != 0 && l->head_size_v != g->head_size_v)) {
        return BAD("head_size",
                   "layer '%s': num_q_heads %d, num_kv_heads %d, head_size %d, head_size_v %d; "
                   "of a recurrent layer they are num_k_heads %d, twice, head_size_k %d and 0 or "
                   "head_size_v %d",
                   l->name, l->num_q_heads, l->num_kv_heads, l->head_size, l->head_size_v,
                   g->num_k_heads, g->head_size_k, g->head_size_v);
    }
    if (g->conv_silu && g->conv_width == 0) {
        return BAD("conv_silu", "layer '%s': conv_silu is 1, which needs a conv_width", l->name);
    }
    layer->desc.head_size_v = g->head_size_v;
    g->state_dtype = g->state_dtype == ATTN_DTYPE_DEFAULT ? ATTN_DTYPE_F32 : g->state_dtype;
    if (layer->rule != NULL) {
        TRY(check_rule(l->name, layer->rule, error));
    }
    if (layer->norm != NULL) {
        TRY(check_norm(l->name, layer->norm, g->num_v_heads, error));
    }
    layer->state_bytes = state_bytes(l, g);
    /* what a batch brings, and what is checked of it, is one for all layers of a plan */
    _Static_assert(sizeof *g - sizeof g->ext <= MAX_BATCH_KEY, "room for the description");
    memcpy(layer->batch_key, (const char *)g + sizeof g->ext, sizeof *g - sizeof g->ext);
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

/* A mask that says nothing is of code 0: a backend without the draft extension has the gated delta
 * rule alone. */
static void match_rule(struct check *check, const struct layer *layer)
{
    static const struct attn_recurrent_rule_caps none;
    const struct attn_recurrent_rule *r = rule_of(layer);
    const struct attn_recurrent_rule_caps *caps =
        ext_find(check->caps->next, ATTN_EXT_DRAFT_RECURRENT_CAPS);
    caps = caps != NULL ? caps : &none;
    static const char *const rules[] = {"gated_delta", "additive"},
                             *const gates[] = {"softplus", "bounded", "given", "constant"},
                             *const write_gates[] = {"sigmoid", "none", "step"};
    const struct {
        const char *field;
        int32_t code, count;
        uint32_t mask;
        const char *const *names;
    } codes[] = {{"rule", r->rule, NUM_RULES, caps->rules, rules},
                 {"gate", r->gate, NUM_GATES, caps->gates, gates},
                 {"write_gate", r->write_gate, NUM_WRITE_GATES, caps->write_gates, write_gates}};
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) {
        check_draft_code(check, codes[i].field, codes[i].names, codes[i].count, codes[i].code,
                         codes[i].mask);
    }
    need_switch(check, "gate_per_channel", r->gate_per_channel, caps->gate_per_channel);
    need_switch(check, "values_first", r->values_first, caps->values_first);
    need_switch(check, "has_skip", r->has_skip, caps->skip);
    need_switch(check, "attn_recurrent_norm", layer->norm != NULL, caps->norm);
}

static void match(struct check *check, int32_t phase)
{
    const struct attn_recurrent_desc *gdn = check->whole->gdn;
    const struct attn_recurrent_caps *caps = ext_find(check->caps->next, ATTN_EXT_CAPS_RECURRENT);
    if (gdn == NULL) {
        return;
    }
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
    if (weights == NULL || (weights->a_log != NULL) != a_log ||
        (weights->dt_bias != NULL) != dt_bias) {
        return BAD(
            "attn_recurrent_weights",
            "layer '%s': the parameters bring no attn_recurrent_weights, or not what its gate "
            "takes: a_log %p (%s), dt_bias %p (%s)",
            name, weights != NULL ? (const void *)weights->a_log : NULL,
            a_log ? "an array" : "NULL", weights != NULL ? (const void *)weights->dt_bias : NULL,
            dt_bias ? "an array" : "NULL");
    }
    if ((skip != NULL && skip->skip != NULL) != has_skip) {
        return BAD("skip", "layer '%s': has_skip is %d and skip is %p", name, has_skip,
                   skip != NULL ? (const void *)skip->skip : NULL);
    }
    const struct attn_recurrent_norm *norm = layer->selected->norm;
    const struct attn_recurrent_norm_weight *scaled =
        ext_find(given, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT);
    const int64_t scales =
        (int64_t)g->head_size_v * (norm != NULL && norm->num_groups > 0 ? g->num_v_heads : 1);
    const struct attn_tensor *conv = weights->conv_weight, *bias = weights->conv_bias;
    const struct attn_dtype dtype = dtype_of_id(layer->desc->dtype);
    const struct tensor_need norm_weight = {"attn_recurrent_norm_weight", 1, {scales}};
    const struct tensor_need conv_weight = {"conv_weight", 2,   {channels, g->conv_width}, 0,
                                            dtype,         true};
    const struct tensor_need conv_bias = {"conv_bias", 1, {channels}, .strided = true};
    TRY(norm != NULL
            ? tensor_check(scaled != NULL ? scaled->weight : NULL, &norm_weight, name, error)
            : ATTN_OK);
    TRY(g->conv_width > 0 ? tensor_check(conv, &conv_weight, name, error) : ATTN_OK);
    TRY(g->conv_width > 0 && bias != NULL ? tensor_check(bias, &conv_bias, name, error) : ATTN_OK);
    return ATTN_OK;
}

/* The row that request r starts from. */
static const int32_t *initial_row(const struct attn_batch_recurrent *states, int32_t r)
{
    const int64_t own = states->state_slots_stride > 0 ? states->state_slots_stride : 1;
    const int64_t other = states->initial_slots_stride > 0 ? states->initial_slots_stride : 1;
    return states->initial_slots != NULL ? states->initial_slots + r * other
                                         : states->state_slots + r * own;
}

/* Multiples of the interval in (seq_len - query_len, seq_len]. */
static int32_t num_checkpoints(const struct attn_batch *b,
                               const struct attn_batch_recurrent *states, int32_t interval,
                               int32_t r)
{
    const int32_t queries = b->query_start_loc_host[r + 1] - b->query_start_loc_host[r];
    return states->checkpoint_slots == NULL
               ? 0
               : b->seq_lens[r] / interval - (b->seq_lens[r] - queries) / interval;
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
    const int64_t stride = states->state_slots_stride > 0 ? states->state_slots_stride : 1;
    const int32_t *row = states->state_slots + r * stride;
    const int32_t queries = b->query_start_loc_host[r + 1] - b->query_start_loc_host[r];
    const bool all = accepted != NULL && queries <= 1 + g->num_speculative_tokens;
    const int32_t kept = all ? queries : 1;
    if (queries == 0 || row[0] < 0 || (b->seq_lens != NULL && b->seq_lens[r] == 0)) {
        return false;
    }
    if (n < 2) { /* the window's, the state's */
        const bool reads = states->has_initial_state != NULL ? states->has_initial_state[r] != 0
                                                             : b->seq_lens[r] > queries;
        const int32_t at = n == 1 && accepted != NULL ? accepted[r] - 1 : 0;
        *use = (struct slot_use){states->initial_slots != NULL ? "initial_slots" : "state_slots",
                                 initial_row(states, r)[at], reads, false};
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

/* Counts by which a request's slots are found. */
static attn_status check_counts(const attn_plan *plan, const struct attn_batch_recurrent *states,
                                int32_t r, struct attn_error *error)
{
    const struct attn_recurrent_desc *g = plan->steps[0].layer->selected->gdn;
    const int32_t drafted = g->num_speculative_tokens;
    const int32_t accepted =
        states->num_accepted_tokens != NULL ? states->num_accepted_tokens[r] : 1;
    const int32_t checkpoints = num_checkpoints(&plan->given, states, g->checkpoint_interval, r);
    if (accepted < 1 || accepted > 1 + drafted) {
        return BAD("num_accepted_tokens", "request %d: %d; 1 to %d", r, accepted, 1 + drafted);
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
    const int64_t stride = states->state_slots_stride > 0 ? states->state_slots_stride : 1;
    const int64_t slots = layer_num_blocks(plan_smallest(plan, 0), 0);
    const int32_t *start = plan->given.query_start_loc_host;
    struct slot_use use, other;
    for (int32_t r = 0; r < plan->given.num_reqs; r++) {
        if (start[r + 1] > start[r] && states->state_slots[r * stride] >= 0) {
            TRY(check_counts(plan, states, r, error));
        }
        for (int64_t n = 0; slot_use_of(plan, states, r, n, &use); n++) {
            if ((use.reads || use.writes) && (use.slot < 0 || use.slot >= slots)) {
                return BAD(use.array, "request %d %s slot %d; the layer has slots 0 to %lld", r,
                           use.writes ? "writes" : "reads", use.slot, (long long)slots - 1);
            }
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

/* What the views carry. */
struct states {
    struct attn_batch_recurrent whole, decode, prefill;
};

/* The extension of a part of the batch: its arrays begin at the part's first request. */
static void cut_states(const struct attn_batch_recurrent *whole, int32_t first,
                       struct attn_batch_recurrent *part, struct attn_batch *view)
{
    *part = *whole;
    part->state_slots += first * (whole->state_slots_stride > 0 ? whole->state_slots_stride : 1);
    part->has_initial_state =
        whole->has_initial_state != NULL ? whole->has_initial_state + first : NULL;
    part->num_accepted_tokens =
        whole->num_accepted_tokens != NULL ? whole->num_accepted_tokens + first : NULL;
    part->initial_slots = whole->initial_slots != NULL ? initial_row(whole, first) : NULL;
    part->checkpoint_slots = whole->checkpoint_slots != NULL
                                 ? whole->checkpoint_slots + first * whole->checkpoint_slots_stride
                                 : NULL;
    view->next = &part->ext;
}

static attn_status view_split(attn_plan *plan, struct attn_error *error)
{
    const struct attn_ext *ext = ext_find(plan->given.next, ATTN_EXT_BATCH_RECURRENT);
    const struct attn_recurrent_desc *g = plan->steps[0].layer->selected->gdn;
    if (ext == NULL) {
        return BAD("attn_batch_recurrent", "is not on the batch; layer '%s' needs its state_slots",
                   plan->steps[0].layer->desc->name);
    }
    struct states *parts = plan->data[COMPOSITION_RECURRENT];
    struct attn_batch_recurrent *states = &parts->whole;
    *states = *(const struct attn_batch_recurrent *)ext;
    states->ext.struct_size = sizeof *states;
    states->ext.next = NULL;
    if (states->state_slots == NULL || states->state_slots_stride < 0 ||
        (states->num_accepted_tokens != NULL &&
         states->state_slots_stride < 1 + g->num_speculative_tokens)) {
        return BAD(
            "state_slots",
            "%p, rows %lld apart; an array is needed, and rows of %d states where tokens are "
            "drafted",
            (const void *)states->state_slots, (long long)states->state_slots_stride,
            1 + g->num_speculative_tokens);
    }
    if (states->initial_slots != NULL &&
        (states->initial_slots_stride < 0 ||
         (states->num_accepted_tokens != NULL &&
          states->initial_slots_stride < 1 + g->num_speculative_tokens))) {
        return BAD("initial_slots_stride", "is %lld; rows of %d states where tokens are drafted",
                   (long long)states->initial_slots_stride, 1 + g->num_speculative_tokens);
    }
    if (states->checkpoint_slots != NULL && plan->given.seq_lens == NULL) {
        return BAD("seq_lens", "is NULL; checkpoint_slots need the requests' lengths");
    }
    if ((states->initial_slots != NULL && !g->has_initial_slots) ||
        (states->checkpoint_slots != NULL &&
         (g->checkpoint_interval == 0 || states->checkpoint_slots_stride < 0))) {
        return BAD("initial_slots",
                   "%p, checkpoint_slots %p, rows %lld apart; a layer that brings them says "
                   "has_initial_slots or checkpoint_interval",
                   (const void *)states->initial_slots, (const void *)states->checkpoint_slots,
                   (long long)states->checkpoint_slots_stride);
    }
    if (states->has_initial_state == NULL && plan->given.seq_lens == NULL) {
        return BAD("has_initial_state", "is NULL, and so is seq_lens, from which it would follow");
    }
    if (plan->validate && plan->model->device.type == ATTN_DEVICE_CPU) {
        TRY(validate_slots(plan, states, error));
    }
    plan->whole.next = &states->ext;
    cut_states(states, 0, &parts->decode, &plan->decode);
    cut_states(states, plan->split.num_decodes, &parts->prefill, &plan->prefill);
    return ATTN_OK;
}

static attn_status check_io(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, bool writes, bool attends,
                            struct attn_error *error)
{
    const struct attn_io_recurrent *gdn = ext_find(io->next, ATTN_EXT_IO_RECURRENT);
    const struct attn_recurrent_desc *g = step->layer->selected->gdn;
    const int64_t rows = plan->num_tokens;
    (void)writes; /* the state moves with the attend */
    if (!attends) {
        return ATTN_OK;
    }
    if (gdn == NULL || io->lse != NULL) {
        return FAIL("attn_io_recurrent",
                    "a run of a recurrent layer needs attn_io_recurrent and has no lse");
    }
    const struct attn_recurrent_rule *r = rule_of(step->layer->selected);
    int64_t gates = (int64_t)g->num_v_heads * (r->gate_per_channel ? g->head_size_k : 1);
    const bool a = r->gate != ATTN_GATE_CONSTANT, b = r->write_gate == ATTN_WRITE_GATE_SIGMOID;
    if ((!a && gdn->a != NULL) || (!b && gdn->b != NULL)) {
        return FAIL(a ? "b" : "a", "is not NULL; a constant gate has no a, and without a sigmoid "
                                   "write gate there is no b");
    }
    const struct tensor_need need_a = {"a", 2, {rows, gates}, 1, .strided = true},
                             need_b = {"b", 2, {rows, g->num_v_heads}, 1, .strided = true},
                             qkv = {"mixed_qkv", 2, {rows, num_channels(g)}, 1};
    TRY(a ? tensor_check(gdn->a, &need_a, NULL, error) : ATTN_OK);
    TRY(b ? tensor_check(gdn->b, &need_b, NULL, error) : ATTN_OK);
    TRY(g->conv_width > 0 ? tensor_check(gdn->mixed_qkv, &qkv, NULL, error) : ATTN_OK);
    if (g->conv_width == 0) {
        TRY(check_input(plan, "q", io->q, &step->q, rows, error));
        TRY(step_check_keys(plan, step, io, rows, error));
    }
    const struct attn_io_recurrent_gate *gate =
        ext_find(io->next, ATTN_EXT_DRAFT_IO_RECURRENT_GATE);
    const struct tensor_need need_gate = {
        "attn_io_recurrent_gate", 3, {rows, g->num_v_heads, g->head_size_v}, 1};
    TRY(step->layer->selected->norm != NULL
            ? tensor_check(gate != NULL ? gate->gate : NULL, &need_gate, NULL, error)
            : ATTN_OK);
    return step_check_out(plan, step, io, error);
}

static attn_status build(attn_plan *plan, struct attn_error *error)
{
    FOR_SERVED(step, plan, COMPOSITION_RECURRENT) {
        const struct attn_recurrent_desc *g = step->layer->selected->gdn;
        step->plain_checks = step->writes = step->fused_write = step->fused_decode = false;
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

const struct composition composition_recurrent = {
    .resolve = resolve,
    .match = match,
    .kinds = 1u << ATTN_LAYER_RECURRENT,
    .bind = bind,
    .plan_bytes = sizeof(struct states),
    .build = build,
    .view_split = view_split,
};
