/* SPDX-License-Identifier: Apache-2.0 */
/* The norm and the gate of a recurrent layer's outputs (attn_recurrent_norm), in place. */
#include <math.h>

#include "cpu_simd/convert.h"
#include "gdn.h"

/* Rows of a head in floats, padded with zeros. */
struct norm_rows {
    float x[GDN_MAX_HEAD_SIZE], gate[GDN_MAX_HEAD_SIZE], weight[GDN_MAX_HEAD_SIZE];
};

static void load_floats(const struct gdn *gdn, const struct attn_tensor *tensor, const void *from,
                        float *to, int32_t width)
{
    const int32_t dv = gdn->desc->head_size_v;
    gdn_variant(gdn)->f32->unpack[element_of_any(tensor)](to, from, dv);
    memset(to + dv, 0, (size_t)(width - dv) * sizeof(float));
}

/* x as the norm takes it, and the activated gate. */
static void load_head(const struct gdn *gdn, int64_t row, int32_t head, int32_t width,
                      struct norm_rows *rows)
{
    const struct attn_tensor *out = gdn->args->out, *gate = gdn->output_gate;
    load_floats(gdn, out, tensor_row(out, row, head), rows->x, width);
    load_floats(gdn, gate, tensor_row(gate, row, head), rows->gate, width);
    gdn_variant(gdn)->delta->activate(rows->gate, width,
                                      gdn->norm->gate_activation == ATTN_OUTPUT_GATE_SIGMOID);
    if (gdn->norm->gate_first) {
        gdn_variant(gdn)->delta->multiply(rows->x, rows->gate, 1.0f, width);
    }
}

void gdn_norm_heads(const struct gdn *gdn, int64_t row, int32_t first_head, int32_t num_heads)
{
    const struct delta_kernels *kernels = gdn_variant(gdn)->delta;
    const struct attn_recurrent_norm *norm = gdn->norm;
    const struct attn_tensor *weight = gdn->norm_weight;
    const int32_t dv = gdn->desc->head_size_v, width = (int32_t)round_up(dv, COLUMN_MULTIPLE);
    struct norm_rows rows;
    double sum = 0;
    for (int32_t h = first_head; h < first_head + num_heads; h++) {
        load_head(gdn, row, h, width, &rows);
        const float squares = kernels->dot(rows.x, rows.x, width);
        sum += isfinite(squares) ? (double)squares : sum_of_squares(rows.x, width);
    }
    const double mean = sum / ((double)num_heads * dv);
    /* divided by infinity, the other outputs would be zeros */
    const float factor = isfinite(mean) ? (float)(1 / sqrt(mean + (double)norm->epsilon)) : NAN;
    for (int32_t h = first_head; h < first_head + num_heads; h++) {
        if (num_heads > 1) {
            load_head(gdn, row, h, width, &rows);
        }
        load_floats(gdn, weight, gdn_norm_weight(gdn, h), rows.weight, width);
        kernels->multiply(rows.x, rows.weight, factor, width);
        if (!norm->gate_first) {
            kernels->multiply(rows.x, rows.gate, 1.0f, width);
        }
        gdn_store_rows(gdn, row, 1, h, rows.x, width);
    }
}
