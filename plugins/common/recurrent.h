/* SPDX-License-Identifier: Apache-2.0 */
/* One call of the kernel `recurrent` as every plugin reads it: its parts, a request's place in
 * them, and the check of the slots. */
#ifndef PLUGINS_COMMON_RECURRENT_H
#define PLUGINS_COMMON_RECURRENT_H

#include <attn/draft/recurrent.h>

#include "common/tensors.h"

#define GDN_MAX_HEAD_SIZE 512
#define GDN_MAX_CONV_WIDTH 64
#define GDN_MAX_DRAFTED 1024
#define GDN_CHUNK 64 /* tokens of a chunk at most; a larger chunk_size is run in pieces */

#define GDN_BAD(field, ...) plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)

/* One call's parts. */
struct gdn {
    const struct attn_attend_args *args;
    const struct attn_recurrent_desc *desc;
    const struct attn_recurrent_rule *rule; /* never NULL; zeros are the gated delta rule */
    const struct attn_recurrent_weights *weights;
    const float *skip; /* [Hv] or NULL */
    const struct attn_batch_recurrent *states;
    const struct attn_io_recurrent *io;
    const struct attn_recurrent_norm *norm; /* what follows the rule, or NULL; so the next two */
    const struct attn_tensor *norm_weight, *output_gate;
    const struct attn_recurrent_rounding *rounding; /* NULL: states are rounded to nearest */
    const struct attn_kv_view *ring;                /* that replay reads, or NULL; so the next */
    const int32_t *ring_tokens;
    int64_t num_channels;              /* 2 Hk Dk + Hv Dv */
    int64_t first_q, first_k, first_v; /* channels */
};

/* One request of a step. */
struct gdn_request {
    int32_t index;
    int64_t first_row;
    int64_t num_tokens;
    int64_t context;      /* tokens before the step; 0 where no lengths are given */
    const int32_t *slots; /* slots of its states */
    int32_t from;         /* the number of the state that it starts from */
    int32_t state_from;   /* the slot of that state; negative: the request is left alone */
    int32_t window_from;  /* the slot of the window before the step */
    bool has_state;       /* else it starts from zeros */
    bool keeps_all;       /* speculative: a state per token, or, with a ring, a window */
    int32_t replayed;     /* tokens of the ring that are not in the state that it starts from */
    int64_t written; /* with a ring: tokens in the state that the step writes; 0: it writes none */
};

static inline struct gdn gdn_of(const struct attn_attend_args *args)
{
    static const struct attn_recurrent_rule gated_delta;
    const struct attn_recurrent_skip *skip =
        ext_of(args->params->next, ATTN_EXT_DRAFT_RECURRENT_SKIP);
    const struct attn_recurrent_norm_weight *weight =
        ext_of(args->params->next, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT);
    const struct attn_io_recurrent_gate *gate =
        ext_of(args->next, ATTN_EXT_DRAFT_IO_RECURRENT_GATE);
    const struct attn_batch_replay *replay = ext_of(args->batch->next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    struct gdn gdn = {.args = args,
                      .ring = args->num_caches > 0 ? args->caches[0].view : NULL,
                      .ring_tokens = replay != NULL ? replay->ring_tokens : NULL,
                      .norm = ext_of(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_NORM),
                      .rounding = ext_of(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_ROUNDING),
                      .norm_weight = weight != NULL ? weight->weight : NULL,
                      .output_gate = gate != NULL ? gate->gate : NULL,
                      .rule = ext_of(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_RULE),
                      .skip = skip != NULL ? skip->skip : NULL,
                      .desc = ext_of(args->layer->next, ATTN_EXT_RECURRENT_DESC),
                      .weights = ext_of(args->params->next, ATTN_EXT_RECURRENT_WEIGHTS),
                      .states = ext_of(args->batch->next, ATTN_EXT_BATCH_RECURRENT),
                      .io = ext_of(args->next, ATTN_EXT_IO_RECURRENT)};
    gdn.rule = gdn.rule != NULL ? gdn.rule : &gated_delta;
    if (gdn.desc != NULL) {
        const int64_t keys = (int64_t)gdn.desc->num_k_heads * gdn.desc->head_size_k;
        const int64_t values = (int64_t)gdn.desc->num_v_heads * gdn.desc->head_size_v;
        gdn.num_channels = 2 * keys + values;
        gdn.first_q = gdn.rule->values_first ? values + keys : 0;
        gdn.first_k = gdn.rule->values_first ? values : keys;
        gdn.first_v = gdn.rule->values_first ? 0 : 2 * keys;
    }
    return gdn;
}

/* Gates of a token and value head. */
static inline int32_t gdn_num_gates(const struct gdn *gdn)
{
    return gdn->rule->gate_per_channel ? gdn->desc->head_size_k : 1;
}

/* r of eight columns from `column`, a multiple of 8, on, of row `row` of a head's state after
 * `tokens` tokens of the request (attn_recurrent_rounding). */
static inline void gdn_random(const struct gdn *gdn, int32_t head, int32_t row, int64_t tokens,
                              int32_t column, uint32_t r[8])
{
    uint32_t k0 = (uint32_t)gdn->rounding->seed, k1 = (uint32_t)(gdn->rounding->seed >> 32);
    uint32_t x[4] = {(uint32_t)column / 8, (uint32_t)(head * gdn->desc->head_size_v + row),
                     (uint32_t)tokens, 0};
    for (int32_t i = 0; i < gdn->rounding->philox_rounds; i++) {
        const uint64_t a = UINT64_C(0xd2511f53) * x[0], b = UINT64_C(0xcd9e8d57) * x[2];
        x[0] = (uint32_t)(b >> 32) ^ x[1] ^ k0;
        x[1] = (uint32_t)b;
        x[2] = (uint32_t)(a >> 32) ^ x[3] ^ k1;
        x[3] = (uint32_t)a;
        k0 += 0x9e3779b9;
        k1 += 0xbb67ae85;
    }
    for (int32_t i = 0; i < 8; i++) {
        r[i] = x[i / 2] >> 16 * (i % 2) & 0xffff;
    }
}

/* Tokens of a layer with a ring from one write of the state to the next. */
static inline int32_t gdn_replay(const struct gdn *gdn)
{
    return gdn->ring->block_size - 2 * gdn->desc->num_speculative_tokens;
}

/* Heads of the output over which a norm has one mean. */
static inline int32_t gdn_norm_size(const struct gdn *gdn)
{
    return gdn->norm->num_groups > 0 ? gdn->desc->num_v_heads / gdn->norm->num_groups : 1;
}

/* The norm's weights of a head. */
static inline const void *gdn_norm_weight(const struct gdn *gdn, int32_t head)
{
    const struct attn_tensor *weight = gdn->norm_weight;
    const int64_t first = gdn->norm->num_groups > 0 ? head * (int64_t)gdn->desc->head_size_v : 0;
    return (const char *)weight->data + weight->byte_offset + first * (weight->dtype.bits / 8);
}

/* Whether it is the gated delta rule over float32 states, for which backends have fast kernels. */
static inline bool gdn_is_plain(const struct attn_layer_desc *layer)
{
    const struct attn_recurrent_desc *desc = ext_of(layer->next, ATTN_EXT_RECURRENT_DESC);
    const struct attn_recurrent_rule *rule = ext_of(layer->next, ATTN_EXT_DRAFT_RECURRENT_RULE);
    return desc->state_dtype == ATTN_DTYPE_F32 &&
           (rule == NULL ||
            (rule->rule == ATTN_RULE_GATED_DELTA && rule->gate == ATTN_GATE_SOFTPLUS &&
             rule->write_gate == ATTN_WRITE_GATE_SIGMOID && !rule->gate_per_channel &&
             !rule->values_first && !rule->has_skip && rule->dt_min == 0 && rule->dt_max == 0));
}

/* false: nothing is to be done for it */
static inline bool gdn_request_of(const struct gdn *gdn, int32_t index, struct gdn_request *request)
{
    const struct attn_batch *batch = gdn->args->batch;
    const struct attn_batch_recurrent *states = gdn->states;
    int64_t stride = states->state_slots_stride > 0 ? states->state_slots_stride : 1;
    const int32_t *accepted = states->num_accepted_tokens;
    int64_t first = batch->query_start_loc[index], end = batch->query_start_loc[index + 1];
    const int64_t context = batch->seq_lens != NULL ? batch->seq_lens[index] - (end - first) : 0;
    end = end < batch->num_actual_tokens ? end : batch->num_actual_tokens;
    *request = (struct gdn_request){.index = index,
                                    .first_row = first,
                                    .num_tokens = end - first,
                                    .context = context,
                                    .slots = states->state_slots + index * stride};
    if (request->num_tokens <= 0 || request->slots[0] < 0 ||
        (batch->seq_lens != NULL && batch->seq_lens[index] == 0)) {
        return false;
    }
    request->from = accepted != NULL ? accepted[index] - 1 : 0;
    request->keeps_all =
        accepted != NULL && request->num_tokens <= 1 + gdn->desc->num_speculative_tokens;
    request->has_state = states->has_initial_state != NULL
                             ? states->has_initial_state[index] != 0
                             : batch->seq_lens[index] > request->num_tokens;
    bool is_one = request->from >= 0 && request->from <= gdn->desc->num_speculative_tokens;
    const int32_t *row = request->slots;
    if (states->initial_slots != NULL) {
        stride = states->initial_slots_stride > 0 ? states->initial_slots_stride : 1;
        row = states->initial_slots + index * stride;
    }
    request->state_from = is_one && row[0] >= 0 ? row[gdn->ring != NULL ? 0 : request->from] : -1;
    request->window_from = row[0];
    if (gdn->ring != NULL) {
        const int32_t drafted = accepted != NULL ? gdn->desc->num_speculative_tokens : 0;
        request->replayed = request->has_state ? gdn->ring_tokens[index] : 0;
        request->written = request->num_tokens > 1 + drafted ? request->num_tokens
                           : !request->has_state || request->state_from != request->slots[0] ||
                                   request->replayed >= gdn_replay(gdn) - 1
                               ? 1
                               : 0;
    }
    return true;
}

/* A value head's part of a row of a ring: k and u in the layer's dtype, g float32. */
struct gdn_ring_row {
    uint8_t *k, *u, *g;
};

/* The row of token t of the step; t below 0: of a token before it. */
static inline struct gdn_ring_row gdn_ring_row(const struct gdn *gdn,
                                               const struct gdn_request *request, int64_t slot,
                                               int64_t t, int32_t head)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t group = desc->num_v_heads / desc->num_k_heads, member = head % group;
    const int64_t bytes = gdn->args->layer->dtype == ATTN_DTYPE_F32 ? 4 : 2;
    const int64_t inputs = desc->head_size_k + (int64_t)group * desc->head_size_v;
    uint8_t *row = (uint8_t *)view_row(
        gdn->ring, slot, (request->context + t) % gdn->ring->block_size, head / group);
    return (struct gdn_ring_row){
        row, row + (desc->head_size_k + (int64_t)member * desc->head_size_v) * bytes,
        row + (inputs + inputs % 2) * bytes +
            (int64_t)member * gdn_num_gates(gdn) * (int64_t)sizeof(float)};
}

/* The slot of the request that takes the state after token t of the step; negative: none. */
static inline int32_t gdn_own_slot(const struct gdn *gdn, const struct gdn_request *request,
                                   int64_t t)
{
    if (gdn->ring == NULL && request->keeps_all) {
        return request->slots[t];
    }
    return t + 1 == (gdn->ring != NULL ? request->written : request->num_tokens) ? request->slots[0]
                                                                                 : -1;
}

/* Tokens of the step up to its first checkpoint; more than it has, if it has no checkpoint. */
static inline int64_t gdn_first_checkpoint(const struct gdn *gdn, const struct gdn_request *request)
{
    const int32_t interval = gdn->desc->checkpoint_interval;
    return interval > 0 && gdn->states->checkpoint_slots != NULL
               ? interval - request->context % interval
               : request->num_tokens + 1;
}

/* The slot that takes the state after `done` tokens of the step, too; negative: none. */
static inline int32_t gdn_checkpoint_slot(const struct gdn *gdn, const struct gdn_request *request,
                                          int64_t done)
{
    const struct attn_batch_recurrent *states = gdn->states;
    const int64_t interval = gdn->desc->checkpoint_interval;
    if (interval <= 0 || states->checkpoint_slots == NULL ||
        (request->context + done) % interval != 0) {
        return -1;
    }
    const int64_t i = (request->context + done) / interval - request->context / interval - 1;
    return states->checkpoint_slots[request->index * states->checkpoint_slots_stride + i];
}

/* Calls `norm` for each token of items begin .. end - 1, which are (request, heads with one mean).
 */
static inline void gdn_each_norm(const struct gdn *gdn, int64_t begin, int64_t end,
                                 void (*norm)(const struct gdn *gdn, int64_t row,
                                              int32_t first_head, int32_t num_heads))
{
    const int32_t heads = gdn_norm_size(gdn), groups = gdn->desc->num_v_heads / heads;
    struct gdn_request request;
    for (int64_t item = begin; item < end; item++) {
        const bool active =
            gdn_request_of(gdn, (int32_t)(item / groups), &request) && request.state_from >= 0;
        for (int64_t t = 0; active && t < request.num_tokens; t++) {
            norm(gdn, request.first_row + t, (int32_t)(item % groups) * heads, heads);
        }
    }
}

/* Every index that will be followed: a step reads them, so the core looks only where it validates.
 */
static inline attn_status gdn_check_slots(const struct gdn *gdn, struct attn_error *error)
{
    const struct attn_batch *batch = gdn->args->batch;
    int32_t drafted = gdn->desc->num_speculative_tokens;
    const int32_t in_ring = gdn->ring != NULL ? gdn->ring->block_size - drafted - 1 : 0;
    int64_t num_slots = gdn->args->k_cache->num_blocks;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        struct gdn_request request;
        if (!gdn_request_of(gdn, r, &request)) {
            continue;
        }
        if (request.from < 0 || request.from > drafted) {
            return GDN_BAD("num_accepted_tokens", "request %d: %d; 1 to %d", r, request.from + 1,
                           1 + drafted);
        }
        if (request.state_from >= num_slots || request.window_from >= num_slots) {
            return GDN_BAD(gdn->states->initial_slots != NULL ? "initial_slots" : "state_slots",
                           "request %d: state %d in slot %d, window in slot %d; negative, or 0 to "
                           "%lld",
                           r, request.from, request.state_from, request.window_from,
                           (long long)num_slots - 1);
        }
        if (request.replayed < 0 || request.replayed > in_ring ||
            request.replayed > request.context) {
            return GDN_BAD("ring_tokens", "request %d: %d of %lld tokens; 0 to %d", r,
                           request.replayed, (long long)request.context, in_ring);
        }
        int32_t interval = gdn->desc->checkpoint_interval;
        for (int64_t i = gdn_first_checkpoint(gdn, &request); i <= request.num_tokens;
             i += interval) {
            int32_t slot = gdn_checkpoint_slot(gdn, &request, i);
            if (slot >= num_slots) {
                return GDN_BAD("checkpoint_slots",
                               "request %d, token %lld: slot %d; negative, or 0 to %lld", r,
                               (long long)i, slot, (long long)num_slots - 1);
            }
        }
        int64_t used = request.keeps_all && gdn->ring == NULL ? request.num_tokens : 1;
        for (int64_t i = 0; i < used; i++) {
            if (request.slots[i] >= num_slots) {
                return GDN_BAD("state_slots",
                               "request %d, state %lld: slot %d; negative, or 0 to %lld", r,
                               (long long)i, request.slots[i], (long long)num_slots - 1);
            }
        }
    }
    return ATTN_OK;
}

#undef GDN_BAD

#endif
