/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "delta.h"
#include "formats.h"
#include "problem.h"

static double decode_round(const struct gdn_case *c, double x)
{
    return format_round(c->dtype, x);
}

/* k of layers without a norm stays short, or the recurrence grows without bound. */
static double draw_mixed(const struct gdn_case *c, int32_t channel)
{
    bool value = channel >= 2 * c->hk * c->dk;
    return decode_round(c, random_normal() * (c->l2norm || value ? 1 : 0.15));
}

struct delta *delta_create(const struct gdn_case *c)
{
    struct delta *p = problem_memory(1, sizeof *p, 0);
    int64_t heads = (int64_t)c->hv * c->dv * c->dk;
    p->c = c;
    p->channels = 2 * c->hk * c->dk + c->hv * c->dv;
    p->window = c->conv_width > 0 ? c->conv_width - 1 + c->drafted : 0;
    p->mixed = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * p->channels, 8, 0);
    p->a = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * c->hv, 8, 0);
    p->b = problem_memory((int64_t)c->num_reqs * MAX_SEQUENCE * c->hv, 8, 0);
    for (int64_t i = 0; i < (int64_t)c->num_reqs * MAX_SEQUENCE * p->channels; i++) {
        p->mixed[i] = draw_mixed(c, (int32_t)(i % p->channels));
    }
    for (int64_t i = 0; i < (int64_t)c->num_reqs * MAX_SEQUENCE * c->hv; i++) {
        p->a[i] = decode_round(c, c->strong && i % 29 == 0 ? 5000 : random_normal());
        p->b[i] = decode_round(c, 2 * random_normal());
    }
    p->conv_weight = problem_memory((int64_t)p->channels * (c->conv_width + 1), 8, 0);
    p->conv_bias = problem_memory(p->channels, 8, 0);
    p->weight_rows = problem_memory((int64_t)p->channels * (c->conv_width + 1), 4, 0);
    p->bias_rows = problem_memory(p->channels, 4, 0);
    for (int32_t i = 0; i < p->channels * c->conv_width; i++) {
        p->conv_weight[i] = decode_round(c, 0.5 * random_normal());
        format_store(p->weight_rows, i, c->dtype, p->conv_weight[i]);
    }
    for (int32_t i = 0; i < p->channels; i++) {
        p->conv_bias[i] = c->bias ? decode_round(c, 0.3 * random_normal()) : 0;
        format_store(p->bias_rows, i, c->dtype, p->conv_bias[i]);
    }
    p->a_log = problem_memory(c->hv, 4, 0);
    p->dt_bias = problem_memory(c->hv, 4, 0);
    for (int32_t h = 0; h < c->hv; h++) {
        p->a_log[h] = (float)(random_normal() - 1);
        p->dt_bias[h] = (float)random_normal();
    }
    p->state = problem_memory(c->num_reqs * heads, 8, 0);
    p->out = problem_memory((int64_t)c->num_reqs * 160 * c->hv * c->dv, 8, 0);
    p->states = problem_memory(NUM_SLOTS * heads, 4, POISON);
    p->windows = problem_memory((int64_t)NUM_SLOTS * p->channels * (p->window + 1), 4, POISON);
    int32_t order[NUM_SLOTS];
    random_permutation(order, NUM_SLOTS);
    for (int32_t i = 0; i < MAX_REQS * 4; i++) {
        p->slots[i / 4][i % 4] = order[i];
    }
    return p;
}

void delta_destroy(struct delta *p)
{
    void *memory[] = {p->mixed,   p->a,           p->b,        p->conv_weight, p->conv_bias,
                      p->a_log,   p->dt_bias,     p->state,    p->out,         p->states,
                      p->windows, p->weight_rows, p->bias_rows};
    for (int32_t i = 0; i < (int32_t)(sizeof memory / sizeof *memory); i++) {
        free(memory[i]);
    }
    free(p);
}

static double convolved(const struct delta *p, int32_t r, int32_t t, int32_t channel)
{
    const struct gdn_case *c = p->c;
    const double *x = p->mixed + (int64_t)r * MAX_SEQUENCE * p->channels + channel;
    double y = p->conv_bias[channel];
    if (c->conv_width == 0) {
        return x[(int64_t)t * p->channels];
    }
    for (int32_t i = 0; i < c->conv_width; i++) {
        int32_t at = t - c->conv_width + 1 + i;
        y +=
            at < 0 ? 0 : p->conv_weight[channel * c->conv_width + i] * x[(int64_t)at * p->channels];
    }
    return c->silu ? y * 0.5 * (1 + tanh(y / 2)) : y; /* y sigmoid(y) */
}

static void key_row(const struct delta *p, int32_t r, int32_t t, int32_t first, double *row)
{
    double sum = 0;
    for (int32_t i = 0; i < p->c->dk; i++) {
        row[i] = convolved(p, r, t, first + i);
        sum += row[i] * row[i];
    }
    for (int32_t i = 0; i < p->c->dk && p->c->l2norm; i++) {
        row[i] /= sqrt(sum + 1e-6);
    }
}

void delta_recur(const struct delta *p, int32_t r, int32_t t, int32_t h, double *s, double *o)
{
    const struct gdn_case *c = p->c;
    double q[512], k[512];
    int32_t key_head = h * c->hk / c->hv;
    int64_t at = ((int64_t)r * MAX_SEQUENCE + t) * c->hv + h;
    double x = p->a[at] + p->dt_bias[h];
    double g = -exp(p->a_log[h]) * (x > 20 ? x : log(1 + exp(x)));
    double beta = 0.5 * (1 + tanh(p->b[at] / 2));
    key_row(p, r, t, key_head * c->dk, q);
    key_row(p, r, t, c->hk * c->dk + key_head * c->dk, k);
    for (int32_t d = 0; d < c->dv; d++) {
        double v = convolved(p, r, t, 2 * c->hk * c->dk + h * c->dv + d), sk = 0;
        for (int32_t i = 0; i < c->dk; i++) {
            s[d * c->dk + i] *= exp(g);
            sk += s[d * c->dk + i] * k[i];
        }
        o[d] = 0;
        for (int32_t i = 0; i < c->dk; i++) {
            s[d * c->dk + i] += beta * (v - sk) * k[i];
            o[d] += s[d * c->dk + i] * q[i] / sqrt(c->dk);
        }
    }
}
