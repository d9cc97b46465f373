/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>

#include "number.h"

#define MAX_HEAD_SIZE 512

/* The causal convolution over channel c at token t, then x sigmoid(x); without one, x. */
static double convolve(const struct oracle_gdn *layer, const void *mixed, int64_t channels,
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

static void unit_row(const struct oracle_gdn *layer, const void *mixed, int64_t channels, int64_t t,
                     int64_t first, double *row)
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

/* S <- e^g S; S <- S + beta (v - S k) k^T; o = S q / sqrt(Dk); g = -e^A softplus(a + dt), beta =
 * sigmoid(b). */
void oracle_gdn(const struct oracle_gdn *layer, const void *mixed, const void *gates, int64_t t,
                double *state, double *out)
{
    double q[MAX_HEAD_SIZE], k[MAX_HEAD_SIZE];
    int32_t dk = layer->head_size_k, dv = layer->head_size_v, hv = layer->num_v_heads;
    int64_t keys = (int64_t)layer->num_k_heads * dk, channels = 2 * keys + (int64_t)hv * dv;
    for (int32_t h = 0; h < hv; h++) {
        int64_t head = h / (hv / layer->num_k_heads);
        double x = number_load(gates, t * 2 * hv + h, layer->dtype) + layer->dt_bias[h];
        double decay = exp(-exp(layer->a_log[h]) * (x > 20 ? x : log(1 + exp(x))));
        double beta = 1 / (1 + exp(-number_load(gates, t * 2 * hv + hv + h, layer->dtype)));
        unit_row(layer, mixed, channels, t, head * dk, q);
        unit_row(layer, mixed, channels, t, keys + head * dk, k);
        for (int32_t d = 0; d < dv; d++) {
            double *s = state + ((int64_t)h * dv + d) * dk, seen = 0, o = 0;
            for (int32_t i = 0; i < dk; i++) {
                s[i] *= decay;
                seen += s[i] * k[i];
            }
            double r =
                beta * (convolve(layer, mixed, channels, t, 2 * keys + (int64_t)h * dv + d) - seen);
            for (int32_t i = 0; i < dk; i++) {
                s[i] += r * k[i];
                o += s[i] * q[i];
            }
            out[h * dv + d] = o / sqrt(dk);
        }
    }
}
