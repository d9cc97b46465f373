/* SPDX-License-Identifier: Apache-2.0 */
/* Compressors, and rotations of rows. */
#include "oracle.h"

#include <math.h>
#include <stddef.h>

#include "number.h"

static double angle_of(int32_t position, int32_t d, int32_t rotary)
{
    return position * pow(1e4, -2.0 * d / rotary);
}

void oracle_angles(float *cos_sin, int32_t positions, int32_t rotary)
{
    for (int32_t p = 0; p < positions; p++) {
        for (int32_t d = 0; d < rotary / 2; d++) {
            float *row = cos_sin + (int64_t)p * rotary + d;
            row[0] = (float)cos(angle_of(p, d, rotary));
            row[rotary / 2] = (float)sin(angle_of(p, d, rotary));
        }
    }
}

void oracle_rotate(double *row, int32_t size, int32_t rotary, bool neox, int32_t position,
                   double sign)
{
    double *x = row + size - rotary;
    for (int32_t d = 0; d < rotary / 2; d++) {
        const int32_t i = neox ? d : 2 * d, j = neox ? d + rotary / 2 : 2 * d + 1;
        const double c = cos(angle_of(position, d, rotary)), a = x[i], b = x[j];
        const double s = sign * sin(angle_of(position, d, rotary));
        x[i] = a * c - b * s;
        x[j] = b * c + a * s;
    }
}

/* One channel, before norm and rotation. */
static double pool(const struct oracle_compressor *x, const void *states, const int32_t *tokens,
                   int32_t position, int32_t d)
{
    const int32_t parts = 1 + x->overlaps, own = position + 1 - x->tokens_per_row;
    const int32_t before = x->overlaps ? own - x->tokens_per_row : own;
    double weighted = 0, sum = 0;
    for (int32_t p = before > 0 ? before : 0; p <= position; p++) {
        const int32_t part = p >= own ? parts - 1 : 0;
        const int64_t token = (int64_t)(tokens != NULL ? tokens[p] : p) * 2 * parts;
        double gate = number_load(states, (token + parts + part) * x->size + d, x->dtype);
        if (x->bias != NULL) {
            gate +=
                (double)x->bias[((int64_t)(p % x->tokens_per_row) * parts + part) * x->size + d];
        }
        sum += exp(gate);
        weighted += exp(gate) * number_load(states, (token + part) * x->size + d, x->dtype);
    }
    return weighted / sum;
}

void oracle_compressor(const struct oracle_compressor *x, const void *states, const int32_t *tokens,
                       int32_t position, double *row)
{
    double square = 0;
    for (int32_t d = 0; d < x->size; d++) {
        row[d] = pool(x, states, tokens, position, d);
        square += row[d] * row[d] / x->size;
    }
    for (int32_t d = 0; d < x->size && x->norm != NULL; d++) {
        row[d] *= number_load(x->norm, d, x->dtype) / sqrt(square + x->norm_eps);
    }
    oracle_rotate(row, x->size, x->rotary, x->neox, position + 1 - x->tokens_per_row, 1);
}
