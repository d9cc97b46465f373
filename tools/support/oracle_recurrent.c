/* SPDX-License-Identifier: Apache-2.0 */
/* The recurrent layer's rule in float64, token by token. */
#include "oracle.h"

#include <math.h>

#include "number.h"

#define MAX_HEAD_SIZE 512

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

void oracle_gates(const struct oracle_rule *rule, double a_log, const double *a,
                  const double *dt_bias, double b, double *decay, double *beta)
{
    double rate = exp(a_log), dt = 0;
    for (int32_t i = 0; i < rule->num_gates; i++) {
        double x = a[i] + dt_bias[i];
        dt = x > 20 ? x : log(1 + exp(x));
        dt = rule->dt_max > 0 && dt > rule->dt_max ? rule->dt_max : dt;
        dt = dt < rule->dt_min ? rule->dt_min : dt;
        double g = rule->gate == ORACLE_GATE_SOFTPLUS  ? -rate * dt
                   : rule->gate == ORACLE_GATE_BOUNDED ? rule->gate_bound * sigmoid(rate * x)
                   : rule->gate == ORACLE_GATE_GIVEN   ? a[i]
                                                       : -rate;
        decay[i] = exp(g);
    }
    *beta = rule->write_gate == ORACLE_WRITE_SIGMOID ? sigmoid(b)
            : rule->write_gate == ORACLE_WRITE_NONE  ? 1
                                                     : dt;
}

void oracle_token(const struct oracle_rule *rule, const struct oracle_token *t, double *state,
                  double *out)
{
    for (int32_t d = 0; d < t->head_size_v; d++) {
        double *s = state + (int64_t)d * t->head_size_k, seen = 0, o = 0;
        for (int32_t i = 0; i < t->head_size_k; i++) {
            s[i] *= t->decay[rule->num_gates > 1 ? i : 0];
            seen += rule->additive ? 0 : s[i] * t->k[i];
        }
        const double u = t->beta * (t->v[d] - seen);
        for (int32_t i = 0; i < t->head_size_k; i++) {
            s[i] += (t->ring_dtype != 0 ? number_round(u, t->ring_dtype) : u) * t->k[i];
            o += s[i] * t->q[i];
        }
        out[d] = t->scale * o + t->skip * t->v[d];
    }
}

/* The causal convolution over channel c at token t, then x sigmoid(x); without one, x. */
static double convolve(const struct oracle_recurrent *layer, const void *mixed, int64_t channels,
                       int64_t t, int64_t c)
{
    double x = 0;
    if (layer->conv_width == 0) {
        return number_load(mixed, t * channels + c, layer->dtype);
    }
    for (int32_t i = 0; i < layer->conv_width; i++) {
        int64_t at = t - layer->conv_width + 1 + i;
        if (at >= 0) {
            x += number_load(layer->conv_weight, c * layer->conv_width + i, layer->dtype) *
                 number_load(mixed, at * channels + c, layer->dtype);
        }
    }
    return x / (1 + exp(-x));
}

static void load_row(const struct oracle_recurrent *layer, const void *mixed, int64_t channels,
                     int64_t t, int64_t first, int32_t count, double *row)
{
    for (int32_t i = 0; i < count; i++) {
        row[i] = convolve(layer, mixed, channels, t, first + i);
    }
}

static void normalize(double *row, int32_t count)
{
    double sum = 1e-6;
    for (int32_t i = 0; i < count; i++) {
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < count; i++) {
        row[i] /= sqrt(sum);
    }
}

void oracle_recurrent(const struct oracle_recurrent *layer, const void *mixed, const void *gates,
                      int64_t t, double *state, double *out)
{
    double q[MAX_HEAD_SIZE], k[MAX_HEAD_SIZE], v[MAX_HEAD_SIZE];
    double a[MAX_HEAD_SIZE], dt_bias[MAX_HEAD_SIZE], decay[MAX_HEAD_SIZE];
    int32_t dk = layer->head_size_k, dv = layer->head_size_v, hv = layer->num_v_heads;
    int32_t count = layer->rule.num_gates;
    int64_t keys = (int64_t)layer->num_k_heads * dk, values = (int64_t)hv * dv;
    int64_t channels = 2 * keys + values, row = (int64_t)hv * (count + 1);
    int64_t first_k = layer->values_first ? values : keys;
    int64_t first_q = layer->values_first ? values + keys : 0;
    int64_t first_v = layer->values_first ? 0 : 2 * keys;
    for (int32_t h = 0; h < hv; h++) {
        int64_t head = h / (hv / layer->num_k_heads);
        struct oracle_token token = {dk, dv, q, k, v, decay};
        load_row(layer, mixed, channels, t, first_q + head * dk, dk, q);
        load_row(layer, mixed, channels, t, first_k + head * dk, dk, k);
        load_row(layer, mixed, channels, t, first_v + (int64_t)h * dv, dv, v);
        if (layer->unit_norm) {
            normalize(q, dk);
            normalize(k, dk);
        }
        for (int32_t i = 0; i < count; i++) {
            a[i] = number_load(gates, t * row + (int64_t)h * count + i, layer->dtype);
            dt_bias[i] = layer->dt_bias[(int64_t)h * count + i];
        }
        oracle_gates(&layer->rule, layer->a_log[h], a, dt_bias,
                     number_load(gates, t * row + (int64_t)hv * count + h, layer->dtype), decay,
                     &token.beta);
        for (int32_t i = 0; i < dk && layer->ring_dtype != 0; i++) {
            k[i] = number_round(k[i], layer->ring_dtype);
        }
        token.ring_dtype = layer->ring_dtype;
        token.scale = layer->scale;
        token.skip = layer->skip != NULL ? layer->skip[h] : 0;
        oracle_token(&layer->rule, &token, state + (int64_t)h * dv * dk, out + (int64_t)h * dv);
    }
}
