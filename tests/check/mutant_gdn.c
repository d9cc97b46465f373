/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of recurrent layers: of gated delta, and, mutant_rule_*, of other rules. */
#include <attn/draft/recurrent.h>
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"
#include "mutants.h"

#define MAX_STATES 8 /* slots between a request's */

/* A call of the kernel whose arguments may be changed. */
struct gdn_copy {
    struct attn_attend_args args;
    struct attn_layer_desc layer;
    struct attn_recurrent_desc desc;
    struct attn_recurrent_rule rule;
    struct attn_layer_params params;
    struct attn_recurrent_weights weights;
    struct attn_batch batch;
    struct attn_batch_recurrent states;
    struct attn_kv_view window;
    float floats[MAX_HEADS];
    int32_t numbers[MAX_REQS * MAX_STATES];
    uint8_t flags[MAX_REQS];
};

static void copy_gdn(struct gdn_copy *copy, const struct attn_attend_args *args)
{
    memset(copy, 0, sizeof *copy);
    copy->args = *args;
    copy->layer = *args->layer;
    copy->desc = *(const struct attn_recurrent_desc *)args->layer->next;
    copy->params = *args->params;
    copy->weights = *(const struct attn_recurrent_weights *)args->params->next;
    copy->batch = *args->batch;
    copy->states = *(const struct attn_batch_recurrent *)args->batch->next;
    copy->layer.next = &copy->desc.ext;
    if (copy->desc.ext.next != NULL) {
        copy->rule = *(const struct attn_recurrent_rule *)copy->desc.ext.next;
        copy->desc.ext.next = &copy->rule.ext;
    }
    copy->params.next = &copy->weights.ext;
    copy->batch.next = &copy->states.ext;
    copy->args.layer = &copy->layer;
    copy->args.params = &copy->params;
    copy->args.batch = &copy->batch;
    if (args->v_cache != NULL) {
        copy->window = *args->v_cache;
        copy->args.v_cache = &copy->window;
    }
}

static void initial_slots_ignored(struct gdn_copy *c)
{
    c->states.initial_slots = NULL;
}

static void checkpoints_missing(struct gdn_copy *c)
{
    c->states.checkpoint_slots = NULL;
}

/* One token too many, as a kernel would that counts from 1. */
static void checkpoints_late(struct gdn_copy *c)
{
    c->desc.checkpoint_interval += c->desc.checkpoint_interval > 1;
}

/* Counted from the step's first token. */
static void checkpoints_of_the_step(struct gdn_copy *c)
{
    const struct attn_batch *b = &c->batch;
    if (c->desc.checkpoint_interval > 0 && c->states.has_initial_state != NULL) {
        for (int32_t r = 0; r < b->num_reqs && b->num_reqs <= MAX_REQS; r++) {
            c->numbers[r] =
                b->seq_lens[r] > 0 ? b->query_start_loc[r + 1] - b->query_start_loc[r] : 0;
        }
        c->batch.seq_lens = c->numbers;
    }
}

static void norm_missing(struct gdn_copy *c)
{
    c->desc.qk_l2norm = 0;
}

static void silu_missing(struct gdn_copy *c)
{
    c->desc.conv_silu = 0;
}

static void bias_missing(struct gdn_copy *c)
{
    c->weights.conv_bias = NULL;
}

static void scale_missing(struct gdn_copy *c)
{
    c->layer.scale = 1;
}

/* A decay of 1: the plain delta rule. */
static void gate_missing(struct gdn_copy *c)
{
    for (int32_t h = 0; h < c->desc.num_v_heads; h++) {
        c->floats[h] = -200;
    }
    c->weights.a_log = c->floats;
}

static void dt_bias_missing(struct gdn_copy *c)
{
    c->weights.dt_bias = c->floats;
}

static void rule_additive(struct gdn_copy *c)
{
    c->rule.rule = ATTN_RULE_ADDITIVE;
}

static void rule_delta(struct gdn_copy *c)
{
    c->rule.rule = ATTN_RULE_GATED_DELTA;
}

static void channels_ignored(struct gdn_copy *c)
{
    c->rule.gate_per_channel = 0;
}

static void bound_ignored(struct gdn_copy *c)
{
    c->rule.gate = c->rule.gate == ATTN_GATE_BOUNDED ? ATTN_GATE_SOFTPLUS : c->rule.gate;
}

static void bound_halved(struct gdn_copy *c)
{
    c->rule.gate_bound /= 2;
}

/* Gates that are given are taken for inputs of a softplus. */
static void given_computed(struct gdn_copy *c)
{
    static const float zeros[MAX_HEADS * MAX_DIMS];
    if (c->rule.gate == ATTN_GATE_GIVEN) {
        c->rule.gate = ATTN_GATE_SOFTPLUS;
        c->weights.a_log = c->weights.dt_bias = zeros;
    }
}

static void constant_of_one_head(struct gdn_copy *c)
{
    for (int32_t h = 0; h < c->desc.num_v_heads && c->rule.gate == ATTN_GATE_CONSTANT; h++) {
        c->floats[h] = c->weights.a_log[0];
        c->weights.a_log = h + 1 == c->desc.num_v_heads ? c->floats : c->weights.a_log;
    }
}

static void least_step_ignored(struct gdn_copy *c)
{
    c->rule.dt_min = 0;
}

static void largest_step_ignored(struct gdn_copy *c)
{
    c->rule.dt_max = 0;
}

static void step_not_written(struct gdn_copy *c)
{
    c->rule.write_gate =
        c->rule.write_gate == ATTN_WRITE_GATE_STEP ? ATTN_WRITE_GATE_NONE : c->rule.write_gate;
}

static void values_last(struct gdn_copy *c)
{
    c->rule.values_first = 0;
}

static void skip_missing(struct gdn_copy *c)
{
    c->weights.ext.next = NULL;
}

/* f16 for bf16, and the other way round. */
static void state_of_other_format(struct gdn_copy *c)
{
    c->desc.state_dtype = c->desc.state_dtype == ATTN_DTYPE_F16    ? ATTN_DTYPE_BF16
                          : c->desc.state_dtype == ATTN_DTYPE_BF16 ? ATTN_DTYPE_F16
                                                                   : c->desc.state_dtype;
}

static void past_forgotten(struct gdn_copy *c)
{
    c->states.has_initial_state = c->flags;
}

static void garbage_for_a_past(struct gdn_copy *c)
{
    memset(c->flags, 1, sizeof c->flags);
    c->states.has_initial_state = c->flags;
}

/* The state that is started from is the first, however many tokens were accepted. */
static void acceptance_ignored(struct gdn_copy *c)
{
    for (int32_t r = 0; r < c->batch.num_reqs; r++) {
        c->numbers[r] = 1;
    }
    c->states.num_accepted_tokens = c->states.num_accepted_tokens != NULL ? c->numbers : NULL;
}

/* Drafted tokens leave the last state only. */
static void drafts_leave_one_state(struct gdn_copy *c)
{
    c->states.num_accepted_tokens = NULL;
}

/* A negative slot is taken for slot 0. */
static void skips_ignored(struct gdn_copy *c)
{
    int64_t stride = c->states.state_slots_stride;
    for (int64_t i = 0; stride <= MAX_STATES && i < c->batch.num_reqs * stride; i++) {
        int32_t slot = c->states.state_slots[i];
        c->numbers[i] = slot < 0 ? 0 : slot;
    }
    c->states.state_slots = stride <= MAX_STATES ? c->numbers : c->states.state_slots;
}

/* Requests of no length move their state. */
static void idle_moves(struct gdn_copy *c)
{
    for (int32_t r = 0; r < c->batch.num_reqs; r++) {
        c->numbers[r] = c->batch.seq_lens[r] > 0 ? c->batch.seq_lens[r] : 1;
    }
    c->batch.seq_lens = c->numbers;
}

static void first_row_ignored(struct gdn_copy *c)
{
    for (int32_t r = 0; r <= c->batch.num_reqs; r++) {
        c->numbers[r] = c->batch.query_start_loc[r] - c->batch.query_start_loc[0];
    }
    c->batch.query_start_loc = c->numbers;
}

/* The last token of the batch is taken for padding. */
static void last_row_dropped(struct gdn_copy *c)
{
    c->batch.num_actual_tokens--;
}

/* What a view's memory held before, put back behind: what was to be left is lost. */
static uint8_t kept[1 << 22]; /* a step that allocates would be caught for that */

static size_t bytes_of(const struct attn_kv_view *view)
{
    size_t bytes = view != NULL ? (size_t)(view->num_blocks * view->stride_block) : 0;
    return bytes <= sizeof kept ? bytes : 0;
}

static void keep_state(struct gdn_copy *c)
{
    memcpy(kept, c->args.k_cache->data, bytes_of(c->args.k_cache));
}

static void state_not_left(const struct attn_attend_args *args)
{
    memcpy(args->k_cache->data, kept, bytes_of(args->k_cache));
}

static void keep_window(struct gdn_copy *c)
{
    if (c->args.v_cache != NULL) {
        memcpy(kept, c->args.v_cache->data, bytes_of(c->args.v_cache));
    }
}

static void window_not_rolled(const struct attn_attend_args *args)
{
    if (args->v_cache != NULL) {
        memcpy(args->v_cache->data, kept, bytes_of(args->v_cache));
    }
}

/* Square states come out as [Dk, Dv]. */
static void state_transposed(const struct attn_attend_args *args)
{
    const struct attn_recurrent_desc *g = (const struct attn_recurrent_desc *)args->layer->next;
    const struct attn_batch_recurrent *states =
        (const struct attn_batch_recurrent *)args->batch->next;
    int32_t n =
        g->head_size_v == g->head_size_k && g->state_dtype == ATTN_DTYPE_F32 ? g->head_size_k : 0;
    float *s = (float *)((uint8_t *)args->k_cache->data +
                         states->state_slots[0] * args->k_cache->stride_block);
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            float upper = s[i * n + j];
            s[i * n + j] = s[j * n + i];
            s[j * n + i] = upper;
        }
    }
}

/* Value head h takes key head h mod Hk: seen from outside, outputs of groups in another order. */
static void groups_interleaved(const struct attn_attend_args *args)
{
    const struct attn_recurrent_desc *g = (const struct attn_recurrent_desc *)args->layer->next;
    size_t bytes = (size_t)args->out->shape[2] * args->out->dtype.bits / 8;
    if (g->num_k_heads < 2 || g->num_v_heads == g->num_k_heads) {
        return;
    }
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        uint8_t first[4096], *row = (uint8_t *)args->out->data +
                                    (size_t)(t * args->out->strides[0]) * args->out->dtype.bits / 8;
        uint8_t *other = row + bytes * (size_t)(g->num_v_heads / g->num_k_heads);
        if (bytes <= sizeof first) {
            memcpy(first, row, bytes);
            memcpy(row, other, bytes);
            memcpy(other, first, bytes);
        }
    }
}

/* A row of out, and whether some of it is no number; rows that are none at all are poison. */
static bool has_nan(const struct attn_attend_args *args, int64_t t, int64_t h, double *row)
{
    int64_t count = 0, dims = args->out->shape[2];
    number_load_row(row, tensor_row(args->out, t, h), number_dtype_name(args->out->dtype), dims);
    for (int64_t d = 0; d < dims; d++) {
        count += isnan(row[d]);
    }
    return count > 0 && count < dims;
}

static void nan_to_zero(const struct attn_attend_args *args)
{
    double row[MAX_DIMS];
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        for (int64_t h = 0; h < args->out->shape[1]; h++) {
            if (!has_nan(args, t, h, row)) {
                continue;
            }
            for (int64_t d = 0; d < args->out->shape[2]; d++) {
                row[d] = isnan(row[d]) ? 0 : row[d];
            }
            number_store_row(tensor_row(args->out, t, h), row, number_dtype_name(args->out->dtype),
                             args->out->shape[2]);
        }
    }
}

/* As tiles of channels across heads would. */
static void nan_across_heads(const struct attn_attend_args *args)
{
    const double nan = NAN;
    double row[MAX_DIMS];
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        for (int64_t h = args->out->shape[1] - 1; h > 0; h--) {
            if (has_nan(args, t, h - 1, row)) {
                number_store_row(tensor_row(args->out, t, h), &nan,
                                 number_dtype_name(args->out->dtype), 1);
            }
        }
    }
}

/* Drafted states in slot 0 are taken for none; that of the first token names the request's. */
static void slot_0_holds_no_draft(struct gdn_copy *c)
{
    int64_t stride = c->states.state_slots_stride;
    for (int64_t i = 0; stride <= MAX_STATES && i < c->batch.num_reqs * stride; i++) {
        int32_t slot = c->states.state_slots[i];
        c->numbers[i] = slot == 0 && i % stride > 0 ? -1 : slot;
    }
    c->states.state_slots = stride <= MAX_STATES ? c->numbers : c->states.state_slots;
}

/* Checkpoints likewise. */
static void slot_0_holds_no_checkpoint(struct gdn_copy *c)
{
    int64_t count = c->batch.num_reqs * c->states.checkpoint_slots_stride;
    for (int64_t i = 0; i < count && count <= MAX_REQS * MAX_STATES; i++) {
        int32_t slot = c->states.checkpoint_slots[i];
        c->numbers[i] = slot == 0 ? -1 : slot;
    }
    c->states.checkpoint_slots =
        count <= MAX_REQS * MAX_STATES ? c->numbers : c->states.checkpoint_slots;
}

static void padding_cleared(const struct attn_attend_args *args)
{
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    memset((uint8_t *)args->out->data + (size_t)args->batch->num_actual_tokens * row, 0, row);
}

attn_status gdn_with_mistake(const struct attn_instance *me, const struct attn_attend_args *args,
                             struct attn_error *error)
{
    struct gdn_copy copy;
    if (me->mutant->gdn != NULL) {
        copy_gdn(&copy, args);
        me->mutant->gdn(&copy);
        args = &copy.args;
    }
    attn_status status = me->kernels->recurrent(args, error);
    if (status == ATTN_OK && me->mutant->gdn_after != NULL) {
        me->mutant->gdn_after(args);
    }
    return status;
}

static const struct mutant mutants[] = {
    {.name = "mutant_gdn_initial_slots_ignored", .gdn = initial_slots_ignored},
    {.name = "mutant_gdn_checkpoints_missing", .gdn = checkpoints_missing},
    {.name = "mutant_gdn_checkpoints_late", .gdn = checkpoints_late},
    {.name = "mutant_gdn_checkpoints_of_the_step", .gdn = checkpoints_of_the_step},
    {.name = "mutant_gdn_norm_missing", .gdn = norm_missing},
    {.name = "mutant_gdn_silu_missing", .gdn = silu_missing},
    {.name = "mutant_gdn_bias_missing", .gdn = bias_missing},
    {.name = "mutant_gdn_scale_missing", .gdn = scale_missing},
    {.name = "mutant_gdn_gate_missing", .gdn = gate_missing},
    {.name = "mutant_gdn_dt_bias_missing", .gdn = dt_bias_missing},
    {.name = "mutant_gdn_past_forgotten", .gdn = past_forgotten},
    {.name = "mutant_gdn_garbage_for_a_past", .gdn = garbage_for_a_past},
    {.name = "mutant_gdn_acceptance_ignored", .gdn = acceptance_ignored},
    {.name = "mutant_gdn_drafts_leave_one_state", .gdn = drafts_leave_one_state},
    {.name = "mutant_gdn_skips_ignored", .gdn = skips_ignored},
    {.name = "mutant_gdn_idle_moves", .gdn = idle_moves},
    {.name = "mutant_gdn_first_row_ignored", .gdn = first_row_ignored},
    {.name = "mutant_gdn_last_row_dropped", .gdn = last_row_dropped},
    {.name = "mutant_gdn_state_not_left", .gdn = keep_state, .gdn_after = state_not_left},
    {.name = "mutant_gdn_window_not_rolled", .gdn = keep_window, .gdn_after = window_not_rolled},
    {.name = "mutant_gdn_state_transposed", .gdn_after = state_transposed},
    {.name = "mutant_gdn_groups_interleaved", .gdn_after = groups_interleaved},
    {.name = "mutant_gdn_bits_by_batch", .gdn_after = mutant_bits_by_batch},
    {.name = "mutant_gdn_padding_cleared", .gdn_after = padding_cleared},
    {.name = "mutant_gdn_nan_to_zero", .gdn_after = nan_to_zero},
    {.name = "mutant_gdn_nan_across_heads", .gdn_after = nan_across_heads},
    {.name = "mutant_gdn_no_draft_in_the_first_slot", .gdn = slot_0_holds_no_draft},
    {.name = "mutant_gdn_no_checkpoint_in_the_first_slot", .gdn = slot_0_holds_no_checkpoint},
    {.name = "mutant_gdn_state_of_other_format", .gdn = state_of_other_format},
    {.name = "mutant_rule_additive", .gdn = rule_additive},
    {.name = "mutant_rule_delta", .gdn = rule_delta},
    {.name = "mutant_rule_channels_ignored", .gdn = channels_ignored},
    {.name = "mutant_rule_bound_ignored", .gdn = bound_ignored},
    {.name = "mutant_rule_bound_halved", .gdn = bound_halved},
    {.name = "mutant_rule_given_computed", .gdn = given_computed},
    {.name = "mutant_rule_constant_of_one_head", .gdn = constant_of_one_head},
    {.name = "mutant_rule_least_step_ignored", .gdn = least_step_ignored},
    {.name = "mutant_rule_largest_step_ignored", .gdn = largest_step_ignored},
    {.name = "mutant_rule_step_not_written", .gdn = step_not_written},
    {.name = "mutant_rule_values_last", .gdn = values_last},
    {.name = "mutant_rule_skip_missing", .gdn = skip_missing},
};
const struct mutant_list gdn_mutants = {mutants, sizeof mutants / sizeof *mutants};
