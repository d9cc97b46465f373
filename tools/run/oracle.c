/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include <math.h>
#include <string.h>

#define MAX_HEAD_SIZE 1024

/* f16: 1 sign, 5 exponent (bias 15), 10 mantissa bits; bf16: the upper half of binary32. */
double oracle_read(const void *memory, int64_t at, int32_t number)
{
    if (number == ORACLE_F32) {
        return ((const float *)memory)[at];
    }
    uint16_t bits = ((const uint16_t *)memory)[at];
    double sign = bits & 0x8000 ? -1 : 1;
    if (number == ORACLE_BF16) {
        uint32_t wide = (uint32_t)bits << 16;
        float value;
        memcpy(&value, &wide, sizeof value);
        return value;
    }
    int exponent = bits >> 10 & 0x1f, mantissa = bits & 0x3ff;
    if (exponent == 31) {
        return mantissa ? NAN : sign * INFINITY;
    }
    return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

void oracle_write(void *memory, int64_t at, int32_t number, double value)
{
    if (number == ORACLE_F32) {
        ((float *)memory)[at] = (float)value;
        return;
    }
    int mantissa_bits = number == ORACLE_BF16 ? 7 : 10, least = number == ORACLE_BF16 ? -126 : -14;
    int exponent = value != 0 ? ilogb(value) : least;
    exponent = exponent < least ? least : exponent;
    double rounded =
        ldexp(nearbyint(ldexp(value, mantissa_bits - exponent)), exponent - mantissa_bits);
    if (number == ORACLE_BF16) {
        float narrow = (float)rounded;
        uint32_t wide;
        memcpy(&wide, &narrow, sizeof wide);
        ((uint16_t *)memory)[at] = (uint16_t)(wide >> 16);
        return;
    }
    double magnitude = fabs(rounded);
    int e = magnitude != 0 ? ilogb(magnitude) : -15;
    uint16_t bits = e < -14 ? (uint16_t)ldexp(magnitude, 24)
                            : (uint16_t)((e + 15) << 10 | ((int)ldexp(magnitude, 10 - e) & 0x3ff));
    ((uint16_t *)memory)[at] = (uint16_t)(bits | (signbit(rounded) ? 0x8000 : 0));
}

static int visible(const struct oracle_terms *t, int64_t p, int64_t j)
{
    if (t->causal && j > p) {
        return 0;
    }
    if (t->has_window && ((t->window_left >= 0 && p - j > t->window_left) ||
                          (t->window_right >= 0 && j - p > t->window_right))) {
        return 0;
    }
    return t->chunk_size == 0 || p / t->chunk_size - j / t->chunk_size <= t->chunk_lookback;
}

static double score(const struct oracle_terms *t, const double *q, const void *k, int64_t p,
                    int64_t j, int32_t head)
{
    int64_t row = (j * t->num_kv_heads + head / (t->num_q_heads / t->num_kv_heads)) * t->head_size;
    double s = 0;
    for (int32_t d = 0; d < t->head_size; d++) {
        s += q[d] * oracle_read(k, row + d, t->number);
    }
    s *= t->scale;
    s = t->soft_cap > 0 ? t->soft_cap * tanh(s / t->soft_cap) : s;
    return t->alibi_slopes != NULL ? s - t->alibi_slopes[head] * fabs((double)(p - j)) : s;
}

/* Two passes: the largest score, then the weights. */
void oracle_attend(const struct oracle_terms *t, const void *q, const void *k, const void *v,
                   int64_t length, int64_t position, int32_t head, double *out)
{
    double query[MAX_HEAD_SIZE], m = -INFINITY, sum = 0;
    for (int32_t d = 0; d < t->head_size; d++) {
        query[d] = oracle_read(q, (int64_t)head * t->head_size + d, t->number);
    }
    for (int32_t d = 0; d < t->head_size_v; d++) {
        out[d] = 0;
    }
    if (t->sinks != NULL) {
        m = t->sinks[head];
    }
    for (int64_t j = 0; j < length; j++) {
        m = visible(t, position, j) ? fmax(m, score(t, query, k, position, j, head)) : m;
    }
    for (int64_t j = 0; j < length; j++) {
        if (!visible(t, position, j)) {
            continue;
        }
        double weight = exp(score(t, query, k, position, j, head) - m);
        int64_t row =
            (j * t->num_kv_heads + head / (t->num_q_heads / t->num_kv_heads)) * t->head_size_v;
        sum += weight;
        for (int32_t d = 0; d < t->head_size_v; d++) {
            out[d] += weight * oracle_read(v, row + d, t->number);
        }
    }
    if (t->sinks != NULL) {
        sum += exp(t->sinks[head] - m);
    }
    for (int32_t d = 0; d < t->head_size_v && sum > 0; d++) {
        out[d] /= sum;
    }
}
