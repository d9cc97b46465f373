/* SPDX-License-Identifier: Apache-2.0 */
#include "oracle.h"

#include "number.h"

#include <math.h>

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
