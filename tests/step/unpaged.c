/* SPDX-License-Identifier: Apache-2.0 */
#include "history.h"

#include <math.h>

/* e4m3: 1 sign, 4 exponent bits of bias 7, 3 of mantissa; 448 is the largest. */
static double e4m3_value(int32_t code)
{
    int32_t exponent = code >> 3, mantissa = code & 7;
    return exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
}

/* The nearest of all 127 magnitudes; of two equally near the even one. */
static double to_e4m3(double x)
{
    int32_t best = 0;
    for (int32_t code = 1; code <= 126; code++) {
        double nearer = fabs(fabs(x) - e4m3_value(best)) - fabs(fabs(x) - e4m3_value(code));
        if (nearer > 0 || (nearer == 0 && code % 2 == 0)) {
            best = code;
        }
    }
    return x < 0 ? -e4m3_value(best) : e4m3_value(best);
}

static double to_int8(double x) /* half away from zero */
{
    double magnitude = floor(fabs(x) + 0.5);
    magnitude = magnitude > 127 ? 127 : magnitude;
    return x < 0 ? -magnitude : magnitude;
}

static double row_scale(const double *x)
{
    double largest = 0;
    for (int32_t d = 0; d < H_D; d++) {
        largest = fabs(x[d]) > largest ? fabs(x[d]) : largest;
    }
    largest /= 127;
    return (float)(largest > 1e-6 ? largest : 1e-6);
}

void unpaged_store(const struct history_layer *owner, bool value, int32_t head, double *row)
{
    int32_t kv = owner->spec.kv_dtype;
    bool dynamic = kv == ATTN_KV_INT8_PER_TOKEN_HEAD ||
                   (!value && (kv == ATTN_KV_INT8_KV || kv == ATTN_KV_INT8_K));
    double scale = dynamic ? row_scale(row) : 1;
    for (int32_t d = 0; d < H_D; d++) {
        if (dynamic) {
            row[d] = to_int8(row[d] / scale) * scale;
        } else if (kv == ATTN_KV_INT8_KV) {
            double channel = owner->v_channel_scale[head * H_D + d];
            row[d] = to_int8(row[d] / channel) * channel;
        } else if (kv == ATTN_KV_FP8_E4M3) {
            row[d] = to_e4m3(row[d] / (double)owner->scale) * (double)owner->scale;
        } /* else bf16, which the row came in */
    }
}

void unpaged_attend(const struct history_layer *layer, const struct history_layer *owner, int32_t r,
                    int32_t p, const double *q, double *out)
{
    const struct attn_layer_desc *l = &layer->desc;
    for (int32_t h = 0; h < H_HQ; h++) {
        int32_t head = h / (H_HQ / H_HK), first = l->has_window ? p - l->window_left : 0;
        double score[H_KEYS], sum = 0, m = -INFINITY, o[H_D] = {0};
        first = first > 0 ? first : 0;
        for (int32_t j = first; j <= p; j++) {
            const double *row = owner->k[r][j][head];
            score[j] = 0;
            for (int32_t d = 0; d < H_D; d++) {
                score[j] += (double)l->scale * q[h * H_D + d] * row[d];
            }
            m = score[j] > m ? score[j] : m;
        }
        for (int32_t j = first; j <= p; j++) {
            double w = exp(score[j] - m);
            const double *row = owner->v[r][j][head];
            sum += w;
            for (int32_t d = 0; d < H_D; d++) {
                o[d] += w * row[d];
            }
        }
        for (int32_t d = 0; d < H_D; d++) {
            out[h * H_D + d] = o[d] / sum;
        }
    }
}
