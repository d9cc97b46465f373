/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>

#include "number.h"

#define MAX_HEAD_SIZE 512

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
    return x * oracle_sigmoid(x);
}

static void unit_row(const struct oracle_recurrent *layer, const void *mixed, int64_t channels,
                     int64_t t, int64_t first, double *row)
{
    double sum = 1e-6;
    for (int32_t i = 0; i < layer->head_size_k; i++) {
        row[i] = convolve(layer, mixed, channels, t, first + i);
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < layer->head_size_k; i++) {
        row[i] /= sqrt(sum);
    }
}

double oracle_decay(double a_log, double x)
{
    return exp(-exp(a_log) * (x > 20 ? x : log(1 + exp(x))));
}

double oracle_sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

void oracle_delta(const struct oracle_delta *token, double *state, double *out)
{
    int32_t dk = token->head_size_k;
    for (int32_t d = 0; d < token->head_size_v; d++) {
        double *s = state + (int64_t)d * dk, seen = 0, o = 0;
        for (int32_t i = 0; i < dk; i++) {
            s[i] *= token->decay[token->decay_per_channel ? i : 0];
            seen += s[i] * token->k[i];
        }
        for (int32_t i = 0; i < dk; i++) {
            s[i] += token->beta * (token->v[d] - seen) * token->k[i];
            o += s[i] * token->q[i];
        }
        out[d] = o * token->scale;
    }
}

void oracle_recurrent(const struct oracle_recurrent *layer, const void *mixed, const void *gates,
                      int64_t t, double *state, double *out)
{
    double q[MAX_HEAD_SIZE], k[MAX_HEAD_SIZE], v[MAX_HEAD_SIZE];
    int32_t dk = layer->head_size_k, dv = layer->head_size_v, hv = layer->num_v_heads;
    int64_t keys = (int64_t)layer->num_k_heads * dk, channels = 2 * keys + (int64_t)hv * dv;
    for (int32_t h = 0; h < hv; h++) {
        int64_t head = h / (hv / layer->num_k_heads);
        double decay = oracle_decay(
            layer->a_log[h], number_load(gates, t * 2 * hv + h, layer->dtype) + layer->dt_bias[h]);
        unit_row(layer, mixed, channels, t, head * dk, q);
        unit_row(layer, mixed, channels, t, keys + head * dk, k);
        for (int32_t d = 0; d < dv; d++) {
            v[d] = convolve(layer, mixed, channels, t, 2 * keys + (int64_t)h * dv + d);
        }
        const struct oracle_delta token = {
            .head_size_k = dk,
            .head_size_v = dv,
            .q = q,
            .k = k,
            .v = v,
            .decay = &decay,
            .beta = oracle_sigmoid(number_load(gates, t * 2 * hv + hv + h, layer->dtype)),
            .scale = 1 / sqrt(dk)};
        oracle_delta(&token, state + (int64_t)h * dv * dk, out + (int64_t)h * dv);
    }
}
