/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of gated_delta. */
#include <attn/recurrent.h>
#include <string.h>

#include "mutants.h"

#define MAX_STATES 8 /* slots between a request's */

/* A call of gated_delta whose arguments may be changed. */
struct gdn_copy {
    struct attn_attend_args args;
    struct attn_layer_desc layer;
    struct attn_recurrent_desc desc;
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

/* FUNCTION is gated_delta after `change`. */
#define GDN_BEFORE(function, change)                                                               \
    static attn_status function(const struct attn_kernels *kernels,                                \
                                const struct attn_attend_args *args, struct attn_error *error)     \
    {                                                                                              \
        struct gdn_copy c;                                                                         \
        copy_gdn(&c, args);                                                                        \
        change(&c);                                                                                \
        return kernels->gated_delta(&c.args, error);                                               \
    }

static void no_norm(struct gdn_copy *c)
{
    c->desc.qk_l2norm = 0;
}
GDN_BEFORE(gdn_norm_missing, no_norm)

static void no_silu(struct gdn_copy *c)
{
    c->desc.conv_silu = 0;
}
GDN_BEFORE(gdn_silu_missing, no_silu)

static void no_conv_bias(struct gdn_copy *c)
{
    c->weights.conv_bias = NULL;
}
GDN_BEFORE(gdn_bias_missing, no_conv_bias)

static void no_scale(struct gdn_copy *c)
{
    c->layer.scale = 1;
}
GDN_BEFORE(gdn_scale_missing, no_scale)

/* A decay of 1: the plain delta rule. */
static void no_gate(struct gdn_copy *c)
{
    for (int32_t h = 0; h < c->desc.num_v_heads; h++) {
        c->floats[h] = -200;
    }
    c->weights.a_log = c->floats;
}
GDN_BEFORE(gdn_gate_missing, no_gate)

static void no_dt_bias(struct gdn_copy *c)
{
    c->weights.dt_bias = c->floats;
}
GDN_BEFORE(gdn_dt_bias_missing, no_dt_bias)

static void no_past(struct gdn_copy *c)
{
    c->states.has_initial_state = c->flags;
}
GDN_BEFORE(gdn_past_forgotten, no_past)

static void always_past(struct gdn_copy *c)
{
    memset(c->flags, 1, sizeof c->flags);
    c->states.has_initial_state = c->flags;
}
GDN_BEFORE(gdn_garbage_for_a_past, always_past)

/* The state that is started from is the first, however many tokens were accepted. */
static void all_from_the_first(struct gdn_copy *c)
{
    for (int32_t r = 0; r < c->batch.num_reqs; r++) {
        c->numbers[r] = 1;
    }
    c->states.num_accepted_tokens = c->states.num_accepted_tokens != NULL ? c->numbers : NULL;
}
GDN_BEFORE(gdn_acceptance_ignored, all_from_the_first)

/* Drafted tokens leave the last state only. */
static void one_state(struct gdn_copy *c)
{
    c->states.num_accepted_tokens = NULL;
}
GDN_BEFORE(gdn_drafts_leave_one_state, one_state)

/* A negative slot is taken for slot 0. */
static void no_skips(struct gdn_copy *c)
{
    int64_t stride = c->states.state_slots_stride;
    for (int64_t i = 0; stride <= MAX_STATES && i < c->batch.num_reqs * stride; i++) {
        int32_t slot = c->states.state_slots[i];
        c->numbers[i] = slot < 0 ? 0 : slot;
    }
    c->states.state_slots = stride <= MAX_STATES ? c->numbers : c->states.state_slots;
}
GDN_BEFORE(gdn_skips_ignored, no_skips)

/* Requests of no length move their state. */
static void nobody_idle(struct gdn_copy *c)
{
    for (int32_t r = 0; r < c->batch.num_reqs; r++) {
        c->numbers[r] = c->batch.seq_lens[r] > 0 ? c->batch.seq_lens[r] : 1;
    }
    c->batch.seq_lens = c->numbers;
}
GDN_BEFORE(gdn_idle_moves, nobody_idle)

static void rows_from_zero(struct gdn_copy *c)
{
    for (int32_t r = 0; r <= c->batch.num_reqs; r++) {
        c->numbers[r] = c->batch.query_start_loc[r] - c->batch.query_start_loc[0];
    }
    c->batch.query_start_loc = c->numbers;
}
GDN_BEFORE(gdn_first_row_ignored, rows_from_zero)

/* The last token of the batch is taken for padding. */
static void one_row_less(struct gdn_copy *c)
{
    c->batch.num_actual_tokens--;
}
GDN_BEFORE(gdn_last_row_dropped, one_row_less)

/* Calls with a copy of `view` put back behind it: what was to be left is lost. */
static attn_status call_and_restore(const struct attn_kernels *kernels,
                                    const struct attn_attend_args *args,
                                    const struct attn_kv_view *view, struct attn_error *error)
{
    size_t bytes = view != NULL ? (size_t)(view->num_blocks * view->stride_block) : 0;
    static uint8_t kept[1 << 22]; /* a step that allocates would be caught for that */
    if (bytes > sizeof kept) {
        return ATTN_ERROR_OUT_OF_MEMORY;
    }
    if (bytes > 0) {
        memcpy(kept, view->data, bytes);
    }
    attn_status status = kernels->gated_delta(args, error);
    if (bytes > 0) {
        memcpy(view->data, kept, bytes);
    }
    return status;
}

static attn_status gdn_state_not_left(const struct attn_kernels *kernels,
                                      const struct attn_attend_args *args, struct attn_error *error)
{
    return call_and_restore(kernels, args, args->k_cache, error);
}

static attn_status gdn_window_not_rolled(const struct attn_kernels *kernels,
                                         const struct attn_attend_args *args,
                                         struct attn_error *error)
{
    return call_and_restore(kernels, args, args->v_cache, error);
}

/* Square states come out as [Dk, Dv]. */
static attn_status gdn_state_transposed(const struct attn_kernels *kernels,
                                        const struct attn_attend_args *args,
                                        struct attn_error *error)
{
    const struct attn_recurrent_desc *g = (const struct attn_recurrent_desc *)args->layer->next;
    const struct attn_batch_recurrent *states =
        (const struct attn_batch_recurrent *)args->batch->next;
    int32_t n = g->head_size_k;
    attn_status status = kernels->gated_delta(args, error);
    if (status != ATTN_OK || g->head_size_v != n) {
        return status;
    }
    float *s = (float *)((uint8_t *)args->k_cache->data +
                         states->state_slots[0] * args->k_cache->stride_block);
    for (int32_t i = 0; i < n; i++) {
        for (int32_t j = 0; j < i; j++) {
            float kept = s[i * n + j];
            s[i * n + j] = s[j * n + i];
            s[j * n + i] = kept;
        }
    }
    return status;
}

/* Value head h takes key head h mod Hk: seen from outside, outputs of groups in another order. */
static attn_status gdn_groups_interleaved(const struct attn_kernels *kernels,
                                          const struct attn_attend_args *args,
                                          struct attn_error *error)
{
    const struct attn_recurrent_desc *g = (const struct attn_recurrent_desc *)args->layer->next;
    attn_status status = kernels->gated_delta(args, error);
    if (status != ATTN_OK || g->num_k_heads < 2 || g->num_v_heads == g->num_k_heads) {
        return status;
    }
    size_t bytes = (size_t)args->out->shape[2] * args->out->dtype.bits / 8;
    for (int64_t t = args->batch->query_start_loc[0]; t < args->batch->num_actual_tokens; t++) {
        uint8_t kept[4096], *row = (uint8_t *)args->out->data +
                                   (size_t)(t * args->out->strides[0]) * args->out->dtype.bits / 8;
        uint8_t *other = row + bytes * (size_t)(g->num_v_heads / g->num_k_heads);
        if (bytes <= sizeof kept) {
            memcpy(kept, row, bytes);
            memcpy(row, other, bytes);
            memcpy(other, kept, bytes);
        }
    }
    return status;
}

static attn_status gdn_padding_cleared(const struct attn_kernels *kernels,
                                       const struct attn_attend_args *args,
                                       struct attn_error *error)
{
    attn_status status = kernels->gated_delta(args, error);
    size_t row = (size_t)args->out->strides[0] * args->out->dtype.bits / 8;
    memset((uint8_t *)args->out->data + (size_t)args->batch->num_actual_tokens * row, 0, row);
    return status;
}

static const struct mutant mutants[] = {
    {.name = "mutant_gdn_norm_missing", .gdn = gdn_norm_missing},
    {.name = "mutant_gdn_silu_missing", .gdn = gdn_silu_missing},
    {.name = "mutant_gdn_bias_missing", .gdn = gdn_bias_missing},
    {.name = "mutant_gdn_scale_missing", .gdn = gdn_scale_missing},
    {.name = "mutant_gdn_gate_missing", .gdn = gdn_gate_missing},
    {.name = "mutant_gdn_dt_bias_missing", .gdn = gdn_dt_bias_missing},
    {.name = "mutant_gdn_past_forgotten", .gdn = gdn_past_forgotten},
    {.name = "mutant_gdn_garbage_for_a_past", .gdn = gdn_garbage_for_a_past},
    {.name = "mutant_gdn_acceptance_ignored", .gdn = gdn_acceptance_ignored},
    {.name = "mutant_gdn_drafts_leave_one_state", .gdn = gdn_drafts_leave_one_state},
    {.name = "mutant_gdn_skips_ignored", .gdn = gdn_skips_ignored},
    {.name = "mutant_gdn_idle_moves", .gdn = gdn_idle_moves},
    {.name = "mutant_gdn_first_row_ignored", .gdn = gdn_first_row_ignored},
    {.name = "mutant_gdn_last_row_dropped", .gdn = gdn_last_row_dropped},
    {.name = "mutant_gdn_state_not_left", .gdn = gdn_state_not_left},
    {.name = "mutant_gdn_window_not_rolled", .gdn = gdn_window_not_rolled},
    {.name = "mutant_gdn_state_transposed", .gdn = gdn_state_transposed},
    {.name = "mutant_gdn_groups_interleaved", .gdn = gdn_groups_interleaved},
    {.name = "mutant_gdn_padding_cleared", .gdn = gdn_padding_cleared},
};
const struct mutant_list gdn_mutants = {mutants, sizeof mutants / sizeof *mutants};
