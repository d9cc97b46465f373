/* SPDX-License-Identifier: Apache-2.0 */
/* RMS norm and rotary embedding (Su et al. 2021) of a row in double precision. */
#ifndef PLUGINS_COMMON_ROPE_H
#define PLUGINS_COMMON_ROPE_H

#include <attn/io.h>
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"

enum { ROPE_MAX_SIZE = 576 };

/* `weight` NULL: the row stays. */
static inline void rope_norm_row(const struct attn_tensor *weight, double epsilon, double *row,
                                 int32_t head_size)
{
    double weights[ROPE_MAX_SIZE], sum = 0;
    if (weight == NULL) {
        return;
    }
    number_load_row(weights, (const uint8_t *)weight->data + weight->byte_offset,
                    number_dtype_name(weight->dtype), head_size);
    for (int32_t d = 0; d < head_size; d++) {
        sum += row[d] * row[d];
    }
    const double factor = 1 / sqrt(sum / head_size + epsilon);
    for (int32_t d = 0; d < head_size; d++) {
        row[d] *= factor * weights[d];
    }
}

/* The first `rotary` dims: pairs (d, d + half) in the NeoX form, (2d, 2d + 1) in GPT-J's. */
static inline void rope_rotate_row(int32_t form, const struct attn_tensor *cos_sin,
                                   int64_t position, double *row, int32_t rotary)
{
    double table[ROPE_MAX_SIZE];
    const int32_t half = rotary / 2;
    number_load_row(table, tensor_row(cos_sin, position, 0), number_dtype_name(cos_sin->dtype),
                    rotary);
    for (int32_t d = 0; d < half; d++) {
        const int32_t first = form == ATTN_ROPE_NEOX ? d : 2 * d;
        const int32_t second = form == ATTN_ROPE_NEOX ? d + half : 2 * d + 1;
        const double c = table[d], s = table[half + d], x = row[first], y = row[second];
        row[first] = x * c - y * s;
        row[second] = y * c + x * s;
    }
}

#endif
