/* SPDX-License-Identifier: Apache-2.0 */
#include "history.h"

#include <math.h>

#include "support/number.h"

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
            row[d] = number_round(row[d] / (double)owner->scale, ATTN_DTYPE_FP8_E4M3) *
                     (double)owner->scale;
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
