/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers against the recurrence, a token at a time, from the states and windows as they
 * lay before the call: outputs, every state and window that has to be left, checkpoints. */
#include <attn/draft/recurrent.h>
#include <math.h>
#include <string.h>

#include "checked.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/oracle.h"

#define BOUND 2e-6 /* relative to an element plus its row's root mean square */
#define MAX_HEAD_SIZE 512

/* One request of a call, as recurrent.h says what becomes of it. */
struct sequence {
    const struct attn_attend_args *args;
    const struct attn_recurrent_desc *desc;
    const struct attn_recurrent_rule *rule; /* or NULL */
    const struct attn_recurrent_weights *weights;
    const struct attn_batch_recurrent *states;
    const struct attn_io_recurrent *io;
    int32_t request, tokens;
    int64_t first, channels;
    const int32_t *slots;
    bool keeps_all;
    const struct attn_kv_view *ring;        /* that replay reads, or NULL */
    int32_t written;                        /* with a ring: tokens in the state that it leaves */
    double *state;                          /* [Hv, Dv, Dk] before the call */
    double *window;                         /* [channels, conv_width - 1] */
    const struct attn_recurrent_norm *norm; /* or NULL */
    double *o; /* where there is a norm, what it takes: [tokens, Hv, Dv], in out's dtype */
};

static double number_at(const struct attn_tensor *tensor, int64_t i, int64_t j)
{
    double x;
    tensor_load(tensor, i, 0, j, 1, &x);
    return x;
}

/* False: the request is left alone. */
static bool sequence_of(const struct attn_attend_args *args, int32_t r, struct sequence *s)
{
    const struct attn_batch *batch = args->batch;
    *s = (struct sequence){.args = args,
                           .desc = extension(args->layer->next, ATTN_EXT_RECURRENT_DESC),
                           .rule = extension(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_RULE),
                           .weights = extension(args->params->next, ATTN_EXT_RECURRENT_WEIGHTS),
                           .states = extension(batch->next, ATTN_EXT_BATCH_RECURRENT),
                           .io = extension(args->next, ATTN_EXT_IO_RECURRENT),
                           .norm = extension(args->layer->next, ATTN_EXT_DRAFT_RECURRENT_NORM),
                           .ring = args->num_caches > 0 ? args->caches[0].view : NULL,
                           .request = r,
                           .first = batch->query_start_loc[r],
                           .tokens = batch->query_start_loc[r + 1] - batch->query_start_loc[r]};
    int64_t stride = s->states->state_slots_stride > 0 ? s->states->state_slots_stride : 1;
    s->slots = s->states->state_slots + r * stride;
    s->channels = 2 * (int64_t)s->desc->num_k_heads * s->desc->head_size_k +
                  (int64_t)s->desc->num_v_heads * s->desc->head_size_v;
    s->keeps_all =
        s->states->num_accepted_tokens != NULL && s->tokens <= 1 + s->desc->num_speculative_tokens;
    return s->tokens > 0 && s->slots[0] >= 0 && batch->seq_lens[r] > 0;
}

static double state_element(const struct sequence *s, int32_t slot, int64_t head, int64_t i)
{
    const int32_t dtype = s->desc->state_dtype;
    return number_load(view_element(s->args->k_cache, slot, 0, head, i, dtype), 0, dtype);
}

/* Element `i` of what the ring has of a token, by its position: k, then u of the heads over k's, or
 * a gate, which is float32. */
static double ring_element(const struct sequence *s, int32_t slot, int64_t position, int32_t head,
                           int64_t i, bool gate)
{
    const struct attn_recurrent_desc *desc = s->desc;
    const int32_t group = desc->num_v_heads / desc->num_k_heads, dtype = s->args->layer->dtype;
    const int64_t inputs = desc->head_size_k + (int64_t)group * desc->head_size_v;
    const uint8_t *row = view_element(s->ring, slot, position % s->ring->block_size, head / group,
                                      gate ? inputs + inputs % 2 : 0, dtype);
    return number_load(row, i, gate ? ATTN_DTYPE_F32 : dtype);
}

/* k, u and e^g of a token as the ring has them. */
static void take_change(const struct sequence *s, int32_t slot, int64_t position, int32_t head,
                        double *k, double *u, double *decay)
{
    const struct attn_recurrent_desc *desc = s->desc;
    const int32_t member = head % (desc->num_v_heads / desc->num_k_heads);
    const bool channels = s->rule != NULL && s->rule->gate_per_channel;
    for (int32_t i = 0; i < desc->head_size_k; i++) {
        k[i] = ring_element(s, slot, position, head, i, false);
        decay[i] =
            exp(ring_element(s, slot, position, head,
                             channels ? member * (int64_t)desc->head_size_k + i : member, true));
    }
    for (int32_t d = 0; d < desc->head_size_v; d++) {
        u[d] = ring_element(s, slot, position, head,
                            desc->head_size_k + (int64_t)member * desc->head_size_v + d, false);
    }
}

/* S <- e^g S + u k^T */
static void change_state(const struct sequence *s, const double *k, const double *u,
                         const double *decay, double *state)
{
    const int32_t dk = s->desc->head_size_k;
    for (int64_t i = 0; i < (int64_t)s->desc->head_size_v * dk; i++) {
        state[i] = decay[i % dk] * state[i] + u[i / dk] * k[i % dk];
    }
}

/* How much of the request is in the state that the step leaves; the ring's tokens enter the state
 * from which it starts. */
static void take_ring(struct sequence *s, bool past, int32_t slot)
{
    static double k[MAX_HEAD_SIZE], u[MAX_HEAD_SIZE], decay[MAX_HEAD_SIZE];
    const struct attn_batch_replay *replay =
        extension(s->args->batch->next, ATTN_EXT_DRAFT_BATCH_REPLAY);
    const int32_t count = past ? replay->ring_tokens[s->request] : 0;
    const int32_t drafted = s->states->num_accepted_tokens ? s->desc->num_speculative_tokens : 0;
    const int32_t most = s->ring->block_size - 2 * s->desc->num_speculative_tokens;
    const int64_t size = (int64_t)s->desc->head_size_v * s->desc->head_size_k;
    s->written = 0;
    if (!past || slot != s->slots[0] || count + 1 >= most) {
        s->written = 1;
    }
    if (s->tokens > 1 + drafted) {
        s->written = s->tokens;
    }
    for (int32_t i = count; i > 0; i--) {
        const int64_t position = s->args->batch->seq_lens[s->request] - s->tokens - i;
        for (int32_t h = 0; h < s->desc->num_v_heads; h++) {
            take_change(s, slot, position, h, k, u, decay);
            change_state(s, k, u, decay, s->state + h * size);
        }
    }
}

/* What the request starts from; a request without a past starts from zeros. */
static bool take_past(struct sequence *s)
{
    const struct attn_recurrent_desc *desc = s->desc;
    const struct attn_batch_recurrent *states = s->states;
    int64_t size = (int64_t)desc->head_size_v * desc->head_size_k, history = desc->conv_width - 1;
    int32_t from = states->num_accepted_tokens ? states->num_accepted_tokens[s->request] - 1 : 0;
    bool past = states->has_initial_state ? states->has_initial_state[s->request]
                                          : s->args->batch->seq_lens[s->request] > s->tokens;
    if (from < 0 || from > desc->num_speculative_tokens) {
        return false; /* cpu_ref refuses the call */
    }
    int64_t stride = states->initial_slots_stride > 0 ? states->initial_slots_stride : 1;
    const int32_t *row =
        states->initial_slots ? states->initial_slots + s->request * stride : s->slots;
    int32_t slot = row[s->ring != NULL ? 0 : from], window_slot = row[0];
    s->state = checked_memory(desc->num_v_heads * size);
    s->window = checked_memory(history > 0 ? s->channels * history : 0);
    s->o = checked_memory(s->norm ? s->tokens * (int64_t)desc->num_v_heads * desc->head_size_v : 0);
    for (int64_t i = 0; i < desc->num_v_heads * size && past && slot >= 0; i++) {
        s->state[i] = state_element(s, slot, i / size, i % size);
    }
    if (s->ring != NULL && slot >= 0) {
        take_ring(s, past, slot);
    }
    for (int64_t i = 0; i < s->channels * history && past && slot >= 0; i++) {
        int32_t dtype = s->args->layer->dtype;
        s->window[i] = number_load(
            view_element(s->args->v_cache, window_slot, 0, i / history, from + i % history, dtype),
            0, dtype);
    }
    return slot >= 0 && window_slot >= 0;
}

/* The input of a channel at token t; below 0 the window's. */
static double input(const struct sequence *s, int64_t t, int64_t channel)
{
    int64_t history = s->desc->conv_width - 1;
    return t < 0 ? s->window[channel * history + history + t]
                 : number_at(s->io->mixed_qkv, s->first + t, channel);
}

/* Channels `channel` on, after the causal convolution and x sigmoid(x); without a convolution the
 * engine's own rows of a head. */
static void load(const struct sequence *s, const struct attn_tensor *plain, int32_t head, int64_t t,
                 int64_t channel, int32_t count, double *row)
{
    int32_t width = s->desc->conv_width;
    if (width == 0) {
        tensor_load(plain, s->first + t, head, 0, count, row);
        return;
    }
    for (int32_t c = 0; c < count; c++) {
        double y = s->weights->conv_bias ? number_at(s->weights->conv_bias, 0, channel + c) : 0;
        for (int32_t i = 0; i < width; i++) {
            y += number_at(s->weights->conv_weight, channel + c, i) *
                 input(s, t - width + 1 + i, channel + c);
        }
        row[c] = s->desc->conv_silu ? y * 0.5 * (1 + tanh(y / 2)) : y;
    }
}

static void normalize(const struct sequence *s, double *row)
{
    double sum = 1e-6;
    for (int32_t i = 0; i < s->desc->head_size_k; i++) {
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < s->desc->head_size_k && s->desc->qk_l2norm; i++) {
        row[i] /= sqrt(sum);
    }
}

static void take_gates(const struct sequence *s, const struct oracle_rule *rule, int64_t t,
                       int32_t head, double *decay, double *beta)
{
    static double a[MAX_HEAD_SIZE], dt_bias[MAX_HEAD_SIZE];
    const struct attn_recurrent_weights *w = s->weights;
    for (int32_t i = 0; i < rule->num_gates; i++) {
        const int64_t at = (int64_t)head * rule->num_gates + i;
        a[i] = rule->gate != ORACLE_GATE_CONSTANT ? number_at(s->io->a, s->first + t, at) : 0;
        dt_bias[i] = w->dt_bias != NULL ? w->dt_bias[at] : 0;
    }
    double b =
        rule->write_gate == ORACLE_WRITE_SIGMOID ? number_at(s->io->b, s->first + t, head) : 0;
    oracle_gates(rule, w->a_log != NULL ? w->a_log[head] : 0, a, dt_bias, b, decay, beta);
}

/* A token that the ring takes: what it holds, and the recurrence goes on from that. */
static attn_status verify_change(const struct sequence *s, int64_t t, int32_t head, bool additive,
                                 const struct oracle_token *token, double *state, double *o,
                                 struct attn_error *error)
{
    static double k[MAX_HEAD_SIZE], u[MAX_HEAD_SIZE], decay[MAX_HEAD_SIZE];
    const int32_t dk = token->head_size_k, dtype = s->args->layer->dtype;
    const int64_t position = s->args->batch->seq_lens[s->request] - s->tokens + t;
    take_change(s, s->slots[0], position, head, k, u, decay);
    const double rms = checked_rms(token->k, dk);
    for (int32_t i = 0; i < dk; i++) {
        if (!checked_near(k[i], token->k[i], BOUND * (fabs(token->k[i]) + rms), dtype)) {
            return checked_wrong(error, "ring's k", position, head, i, k[i], token->k[i]);
        }
        if (!checked_near(decay[i], token->decay[i], BOUND, ATTN_DTYPE_F32)) {
            return checked_wrong(error, "ring's gate", position, head, i, decay[i],
                                 token->decay[i]);
        }
    }
    for (int32_t d = 0; d < token->head_size_v; d++) {
        double sk = 0, kk = 0;
        for (int32_t i = 0; i < dk && !additive; i++) {
            sk += decay[i] * state[d * (int64_t)dk + i] * k[i];
            kk += fabs(decay[i] * state[d * (int64_t)dk + i] * k[i]);
        }
        const double wanted = token->beta * (token->v[d] - sk);
        if (!checked_near(u[d], wanted, BOUND * (fabs(token->v[d]) + kk), dtype)) {
            return checked_wrong(error, "ring's u", position, head, d, u[d], wanted);
        }
    }
    change_state(s, k, u, decay, state);
    for (int32_t d = 0; d < token->head_size_v; d++) {
        o[d] = token->skip * token->v[d];
        for (int32_t i = 0; i < dk; i++) {
            o[d] += token->scale * state[d * (int64_t)dk + i] * token->q[i];
        }
    }
    return ATTN_OK;
}

static attn_status step(const struct sequence *s, int64_t t, int32_t head, double *state, double *o,
                        struct attn_error *error)
{
    static double q[MAX_HEAD_SIZE], k[MAX_HEAD_SIZE], v[MAX_HEAD_SIZE], decay[MAX_HEAD_SIZE];
    const struct attn_recurrent_desc *desc = s->desc;
    const struct attn_recurrent_rule *r = s->rule;
    const struct attn_recurrent_skip *skip =
        extension(s->args->params->next, ATTN_EXT_DRAFT_RECURRENT_SKIP);
    int32_t dk = desc->head_size_k, dv = desc->head_size_v;
    int32_t key_head = head / (desc->num_v_heads / desc->num_k_heads);
    int64_t keys = (int64_t)desc->num_k_heads * dk, values = (int64_t)desc->num_v_heads * dv;
    bool last = r != NULL && r->values_first; /* q and k after v, k first */
    const struct oracle_rule rule =
        layer_rule_oracle(r, r != NULL && r->gate_per_channel ? desc->head_size_k : 1);
    struct oracle_token token = {dk,
                                 dv,
                                 q,
                                 k,
                                 v,
                                 decay,
                                 .scale = s->args->layer->scale,
                                 .skip = skip != NULL ? skip->skip[head] : 0};
    load(s, s->args->q, key_head, t, (last ? values + keys : 0) + key_head * (int64_t)dk, dk, q);
    load(s, s->args->k, key_head, t, (last ? values : keys) + key_head * (int64_t)dk, dk, k);
    load(s, s->args->v, head, t, (last ? 0 : 2 * keys) + head * (int64_t)dv, dv, v);
    normalize(s, q);
    normalize(s, k);
    take_gates(s, &rule, t, head, decay, &token.beta);
    for (int32_t i = rule.num_gates; i < dk; i++) {
        decay[i] = decay[0];
    }
    if (s->ring != NULL && t >= s->written) {
        return verify_change(s, t, head, rule.additive, &token, state, o, error);
    }
    oracle_token(&rule, &token, state, o);
    return ATTN_OK;
}

/* r of element i of a head's state after `tokens` tokens, and x rounded by it. */
static double round_seeded(const struct sequence *s, const struct attn_recurrent_rounding *rounding,
                           double x, int32_t head, int64_t i, int64_t tokens)
{
    const bool f16 = s->desc->state_dtype == ATTN_DTYPE_F16;
    const int64_t dk = s->desc->head_size_k, column = i % dk;
    uint64_t c[4] = {(uint64_t)(column / 8),
                     (uint64_t)(head * (int64_t)s->desc->head_size_v + i / dk), (uint64_t)tokens,
                     0};
    for (uint64_t n = 0; n < (uint64_t)rounding->philox_rounds; n++) {
        const uint64_t k[2] = {rounding->seed + n * 0x9e3779b9,
                               (rounding->seed >> 32) + n * 0xbb67ae85};
        const uint64_t products[2] = {0xd2511f53 * c[0], 0xcd9e8d57 * c[2]};
        const uint64_t next[4] = {
            products[1] >> 32 ^ c[1] ^ (k[0] & UINT32_MAX), products[1] & UINT32_MAX,
            products[0] >> 32 ^ c[3] ^ (k[1] & UINT32_MAX), products[0] & UINT32_MAX};
        memcpy(c, next, sizeof c);
    }
    const double r = (double)(column % 2 ? c[column % 8 / 2] >> 16 : c[column % 8 / 2] & 0xffff);
    int exponent;
    frexp(x, &exponent); /* |x| < 2^exponent */
    exponent = exponent > (f16 ? -13 : -125) ? exponent : f16 ? -13 : -125;
    const double unit = ldexp(1, exponent - (f16 ? 11 : 8)), low = floor(fabs(x) / unit) * unit;
    if (!isfinite(x) || fabs(x) > (f16 ? 65504 : 0x1.fep127)) {
        return number_round(x, s->desc->state_dtype);
    }
    const bool up = floor(65536 * (fabs(x) - low) / unit) + r >= 65536;
    return copysign(up ? low + unit : low, x);
}

/* What the recurrence goes on from, where it is rounded by a seed. */
static void round_state(const struct sequence *s, int32_t head, int64_t tokens, double *state)
{
    const struct attn_recurrent_rounding *rounding =
        extension(s->args->layer->next, ATTN_EXT_DRAFT_RECURRENT_ROUNDING);
    const int64_t size = (int64_t)s->desc->head_size_v * s->desc->head_size_k;
    for (int64_t i = 0; i < size && rounding != NULL; i++) {
        state[i] = round_seeded(s, rounding, state[i], head, i, tokens);
    }
}

/* The recurrence goes on from what was written. */
static attn_status verify_state(const struct sequence *s, int32_t slot, int32_t head, double *state,
                                struct attn_error *error)
{
    int64_t size = (int64_t)s->desc->head_size_v * s->desc->head_size_k;
    double rms = checked_rms(state, size);
    for (int64_t i = 0; i < size; i++) {
        double found = state_element(s, slot, head, i);
        if (!checked_near(found, state[i], BOUND * (fabs(state[i]) + rms), s->desc->state_dtype)) {
            return checked_wrong(error, "state", slot, head, i, found, state[i]);
        }
        state[i] = found;
    }
    return ATTN_OK;
}

static attn_status verify_out(const struct sequence *s, int64_t t, int32_t head,
                              const double *wanted, struct attn_error *error)
{
    static double found[MAX_HEAD_SIZE];
    double rms = checked_rms(wanted, s->desc->head_size_v);
    tensor_load(s->args->out, s->first + t, head, 0, s->desc->head_size_v, found);
    for (int32_t d = 0; d < s->desc->head_size_v; d++) {
        if (!checked_near(found[d], wanted[d], BOUND * (fabs(wanted[d]) + rms),
                          tensor_dtype(s->args->out))) {
            return checked_wrong(error, "out", s->first + t, head, d, found[d], wanted[d]);
        }
    }
    return ATTN_OK;
}

static double output_gate(const struct sequence *s, int64_t t, int32_t head, int32_t d)
{
    const struct attn_io_recurrent_gate *io =
        extension(s->args->next, ATTN_EXT_DRAFT_IO_RECURRENT_GATE);
    double z;
    tensor_load(io->gate, s->first + t, head, d, 1, &z);
    const double sigmoid = 0.5 * (1 + tanh(z / 2));
    return s->norm->gate_activation == ATTN_OUTPUT_GATE_SILU ? z * sigmoid : sigmoid;
}

/* A token's outputs of all heads, w x / rms(x) by groups of heads: x is o, or o times the gate. By
 * an rms that is not finite all of them are NaN. */
static attn_status verify_norm(const struct sequence *s, int64_t t, struct attn_error *error)
{
    static double wanted[MAX_HEAD_SIZE];
    const struct attn_recurrent_norm *norm = s->norm;
    const struct attn_recurrent_norm_weight *w =
        extension(s->args->params->next, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT);
    const int32_t hv = s->desc->num_v_heads, dv = s->desc->head_size_v;
    const int32_t heads = norm->num_groups > 0 ? hv / norm->num_groups : 1;
    const double *o = s->o + t * hv * dv;
    attn_status status = ATTN_OK;
    for (int32_t h = 0; h < hv && status == ATTN_OK; h++) {
        double squares = 0;
        for (int32_t i = h / heads * heads * dv; i < (h / heads + 1) * heads * dv; i++) {
            squares += pow(o[i] * (norm->gate_first ? output_gate(s, t, i / dv, i % dv) : 1), 2);
        }
        const double mean = squares / (heads * dv);
        const double rms = isfinite(mean) ? sqrt(mean + norm->epsilon) : NAN;
        for (int32_t d = 0; d < dv; d++) {
            const double weight = number_at(w->weight, 0, norm->num_groups > 0 ? h * dv + d : d);
            wanted[d] = weight * o[h * dv + d] * output_gate(s, t, h, d) / rms;
        }
        status = verify_out(s, t, h, wanted, error);
    }
    return status;
}

/* The slot of the checkpoint after `done` tokens of the step; negative: none. */
static int32_t checkpoint(const struct sequence *s, int32_t done)
{
    const struct attn_batch_recurrent *states = s->states;
    int32_t interval = s->desc->checkpoint_interval, entry = -1;
    int32_t context = s->args->batch->seq_lens[s->request] - s->tokens;
    for (int32_t position = context + 1; interval > 0 && position <= context + done; position++) {
        entry += position % interval == 0;
    }
    return interval > 0 && states->checkpoint_slots != NULL && (context + done) % interval == 0
               ? states->checkpoint_slots[s->request * states->checkpoint_slots_stride + entry]
               : -1;
}

static attn_status verify_head(const struct sequence *s, int32_t head, struct attn_error *error)
{
    static double o[MAX_HEAD_SIZE];
    const int64_t size = (int64_t)s->desc->head_size_v * s->desc->head_size_k;
    double *state = s->state + head * size;
    attn_status status = ATTN_OK;
    for (int32_t t = 0; t < s->tokens && status == ATTN_OK; t++) {
        bool all = s->keeps_all && s->ring == NULL;
        bool last = !all && t + 1 == (s->ring != NULL ? s->written : s->tokens);
        int32_t slot = all ? s->slots[t] : last ? s->slots[0] : -1;
        status = step(s, t, head, state, o, error);
        for (int32_t d = 0; d < s->desc->head_size_v && s->norm != NULL; d++) {
            s->o[(t * (int64_t)s->desc->num_v_heads + head) * s->desc->head_size_v + d] =
                number_round(o[d], tensor_dtype(s->args->out));
        }
        status = status != ATTN_OK || s->norm != NULL ? status : verify_out(s, t, head, o, error);
        const int64_t context = s->args->batch->seq_lens[s->request] - s->tokens;
        if (slot >= 0 || checkpoint(s, t + 1) >= 0 || s->args->layer->batch_invariant >= 2) {
            round_state(s, head, context + t + 1, state);
        }
        for (int64_t i = 0; i < size && s->args->layer->batch_invariant >= 2; i++) {
            state[i] = number_round(state[i], s->desc->state_dtype);
        }
        if (status == ATTN_OK && slot >= 0) {
            status = verify_state(s, slot, head, state, error);
        }
        if (status == ATTN_OK && checkpoint(s, t + 1) >= 0) {
            status = verify_state(s, checkpoint(s, t + 1), head, state, error);
        }
    }
    return status;
}

/* A slot's window: `count` inputs from token t on. */
static attn_status verify_window(const struct sequence *s, int32_t slot, int64_t t, int64_t count,
                                 struct attn_error *error)
{
    int32_t dtype = s->args->layer->dtype;
    for (int64_t i = 0; i < s->channels * count; i++) {
        const uint8_t *at = view_element(s->args->v_cache, slot, 0, i / count, i % count, dtype);
        double found = number_load(at, 0, dtype), wanted = input(s, t + i % count, i / count);
        if (!checked_near(found, wanted, 0, dtype)) {
            return checked_wrong(error, "window", slot, i / count, i % count, found, wanted);
        }
    }
    return ATTN_OK;
}

static attn_status verify_windows(const struct sequence *s, struct attn_error *error)
{
    int64_t history = s->desc->conv_width - 1, skipped = s->keeps_all ? 1 : s->tokens;
    attn_status status = ATTN_OK;
    if (history <= 0) {
        return ATTN_OK;
    }
    for (int32_t done = 1; done <= s->tokens && status == ATTN_OK; done++) {
        int32_t slot = checkpoint(s, done);
        status = slot >= 0 ? verify_window(s, slot, done - history, history, error) : ATTN_OK;
    }
    return status != ATTN_OK ? status
                             : verify_window(s, s->slots[0], skipped - history,
                                             history + s->tokens - skipped, error);
}

attn_status checked_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    static struct sequence sequences[64];
    checked_begin();
    for (int32_t r = 0; r < args->batch->num_reqs; r++) {
        bool taken = sequence_of(args, r, &sequences[r]) && take_past(&sequences[r]);
        sequences[r].tokens = taken ? sequences[r].tokens : 0;
    }
    attn_status status = cpu_ref_kernels->recurrent(args, error);
    for (int32_t r = 0; r < args->batch->num_reqs && status == ATTN_OK; r++) {
        const struct sequence *s = &sequences[r];
        for (int32_t h = 0; h < s->desc->num_v_heads && s->tokens > 0 && status == ATTN_OK; h++) {
            status = verify_head(s, h, error);
        }
        for (int32_t t = 0; t < s->tokens && s->norm != NULL && status == ATTN_OK; t++) {
            status = verify_norm(s, t, error);
        }
        status = status == ATTN_OK && s->tokens > 0 ? verify_windows(s, error) : status;
    }
    checked_end();
    return status;
}
