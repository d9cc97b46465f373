/* SPDX-License-Identifier: Apache-2.0 */
#include "history.h"

#include <math.h>

#include "support/number.h"
#include "support/oracle.h"

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
    double scores[H_KEYS], lse[H_HQ];
    const struct oracle_request request = {.num_q_heads = H_HQ,
                                           .num_kv_heads = H_HK,
                                           .head_size = H_D,
                                           .head_size_v = H_D,
                                           .num_queries = 1,
                                           .num_keys = p + 1,
                                           .q = q,
                                           .k = owner->k[r][0][0],
                                           .v = owner->v[r][0][0],
                                           .scale = layer->desc.scale,
                                           .causal = 1,
                                           .left = layer->desc.has_window ? layer->desc.window_left
                                                                          : -1,
                                           .right = -1,
                                           .out = out,
                                           .lse = lse};
    oracle_attend(&request, scores);
}
