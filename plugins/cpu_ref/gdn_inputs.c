/* SPDX-License-Identifier: Apache-2.0 */
/* What enters the rule: the causal convolution over the mixed row and its rolling window, norms,
 * gates (Gated DeltaNet: Yang, Kautz, Hatamizadeh 2024; Mamba2: Dao, Gu 2024; Kimi Linear 2025). */
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "gdn.h"

#define L2_EPSILON 1e-6
#define SOFTPLUS_THRESHOLD 20

static uint8_t *window_of(const struct gdn *gdn, int64_t slot, int64_t channel)
{
    return view_row(gdn->args->v_cache, slot, 0, channel);
}

/* x of the mixed row's `count` channels at token t of the request. Tokens before the step come out
 * of the window, whose oldest of conv_width - 1 entries stands at request->from. */
static void load_mixed(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                       int64_t channel, int64_t count, double *x)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    if (t >= 0) {
        int64_t bytes = channel * (mixed->dtype.bits / 8);
        number_load_row(x, (uint8_t *)tensor_row(mixed, request->first_row + t, 0) + bytes,
                        number_dtype_name(mixed->dtype), count);
        return;
    }
    int64_t at = request->from + gdn->desc->conv_width - 1 + t;
    for (int64_t i = 0; i < count; i++) {
        x[i] = 0;
        if (request->has_state) {
            int32_t dtype = gdn->args->layer->dtype;
            const uint8_t *window = window_of(gdn, request->window_from, channel + i);
            number_load_row(&x[i], window + at * number_bytes(dtype), dtype, 1);
        }
    }
}

static double tensor_element(const struct attn_tensor *tensor, int64_t i, int64_t j)
{
    double value;
    int64_t bytes = j * tensor_stride(tensor, tensor->ndim - 1) * (tensor->dtype.bits / 8);
    number_load_row(&value, (uint8_t *)tensor_row(tensor, tensor->ndim > 1 ? i : 0, 0) + bytes,
                    number_dtype_name(tensor->dtype), 1);
    return value;
}

/* y_c = sum_i w_c,i x_c[t - (width - 1) + i] + bias_c, then SiLU. */
static void convolve(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                     int64_t channel, int64_t count, double *y)
{
    double x[GDN_MAX_HEAD_SIZE];
    const struct attn_recurrent_weights *weights = gdn->weights;
    int32_t width = gdn->desc->conv_width;
    for (int64_t c = 0; c < count; c++) {
        bool biased = weights->conv_bias != NULL;
        y[c] = biased ? tensor_element(weights->conv_bias, 0, channel + c) : 0;
    }
    for (int32_t i = 0; i < width; i++) {
        load_mixed(gdn, request, t - (width - 1) + i, channel, count, x);
        for (int64_t c = 0; c < count; c++) {
            y[c] += tensor_element(weights->conv_weight, channel + c, i) * x[c];
        }
    }
    for (int64_t c = 0; c < count && gdn->desc->conv_silu; c++) {
        y[c] = y[c] / (1 + exp(-y[c]));
    }
}

static void load_part(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                      const struct attn_tensor *plain, int64_t head, int64_t first_channel,
                      int64_t offset, int64_t count, double *row)
{
    if (gdn->desc->conv_width > 0) {
        convolve(gdn, request, t, first_channel + offset, count, row);
        return;
    }
    const uint8_t *memory = tensor_row(plain, request->first_row + t, head);
    number_load_row(row, memory + offset * (plain->dtype.bits / 8), number_dtype_name(plain->dtype),
                    count);
}

static void normalize(double *row, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < count; i++) {
        row[i] /= sqrt(sum + L2_EPSILON);
    }
}

void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                 double *q, double *k)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    int64_t key_head = head / (desc->num_v_heads / desc->num_k_heads);
    int64_t at = key_head * desc->head_size_k;
    load_part(gdn, request, t, gdn->args->q, key_head, gdn->first_q + at, 0, desc->head_size_k, q);
    load_part(gdn, request, t, gdn->args->k, key_head, gdn->first_k + at, 0, desc->head_size_k, k);
    if (desc->qk_l2norm) {
        normalize(q, desc->head_size_k);
        normalize(k, desc->head_size_k);
    }
    for (int32_t i = 0; i < desc->head_size_k; i++) {
        q[i] *= gdn->args->layer->scale;
    }
}

void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t t, int32_t head,
                int32_t first_row, int32_t count, double *v)
{
    int64_t first_channel = gdn->first_v + (int64_t)head * gdn->desc->head_size_v;
    load_part(gdn, request, t, gdn->args->v, head, first_channel, first_row, count, v);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* g of one gate: element `at` of a and of dt_bias; *step is its dt, where the gate has one. */
static double log_decay(const struct gdn *gdn, int64_t row, int32_t head, int64_t at, double *step)
{
    const struct attn_recurrent_rule *rule = gdn->rule;
    const struct attn_recurrent_weights *weights = gdn->weights;
    if (rule->gate == ATTN_GATE_GIVEN) {
        return tensor_element(gdn->io->a, row, at);
    }
    const double rate = exp(weights->a_log[head]);
    if (rule->gate == ATTN_GATE_CONSTANT) {
        return -rate;
    }
    const double x = tensor_element(gdn->io->a, row, at) + weights->dt_bias[at];
    if (rule->gate == ATTN_GATE_BOUNDED) {
        return rule->gate_bound * sigmoid(rate * x);
    }
    *step = x > SOFTPLUS_THRESHOLD ? x : log1p(exp(x)); /* NaN passes the limits */
    *step = *step < rule->dt_min ? rule->dt_min : *step;
    *step = rule->dt_max > 0 && *step > rule->dt_max ? rule->dt_max : *step;
    return -rate * *step;
}

void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                    int32_t head, double *g, double *beta)
{
    const int64_t row = request->first_row + t;
    const int32_t count = gdn_num_gates(gdn);
    double step = 0;
    for (int32_t i = 0; i < count; i++) {
        g[i] = log_decay(gdn, row, head, (int64_t)head * count + i, &step);
    }
    *beta = gdn->rule->write_gate == ATTN_WRITE_GATE_SIGMOID
                ? sigmoid(tensor_element(gdn->io->b, row, head))
            : gdn->rule->write_gate == ATTN_WRITE_GATE_STEP ? step
                                                            : 1;
}

/* `count` inputs of a channel, from token t on. */
static void load_window(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                        int64_t channel, int64_t count, double *row)
{
    for (int64_t i = 0; i < count; i++) {
        load_mixed(gdn, request, t + i, channel, 1, &row[i]);
    }
}

/* With h the conv_width - 1 inputs before the step and x its own, the window becomes the last
 * conv_width - 1 of (h, x); a speculative step keeps (h, x) without its first, so that the window
 * after token i begins at entry i. */
void gdn_roll_window(const struct gdn *gdn, const struct gdn_request *request, int64_t channel)
{
    double row[GDN_MAX_CONV_WIDTH + GDN_MAX_DRAFTED];
    int64_t history = gdn->desc->conv_width - 1, tokens = request->num_tokens;
    int64_t skipped = request->keeps_all ? 1 : tokens;
    int64_t count = history + tokens - skipped;
    /* first: they may need the old window */
    for (int64_t done = gdn_first_checkpoint(gdn, request); done <= tokens;
         done += gdn->desc->checkpoint_interval) {
        int32_t slot = gdn_checkpoint_slot(gdn, request, done);
        if (slot >= 0) {
            load_window(gdn, request, done - history, channel, history, row);
            number_store_row(window_of(gdn, slot, channel), row, gdn->args->layer->dtype, history);
        }
    }
    load_window(gdn, request, skipped - history, channel, count, row);
    number_store_row(window_of(gdn, request->slots[0], channel), row, gdn->args->layer->dtype,
                     count);
}
