/* SPDX-License-Identifier: Apache-2.0 */
/* rope_write_kv: optional RMS norm of q and k, rotary embedding (Su et al. 2021), cache write. */
#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

static const struct attn_io_rope *find_rope(const struct attn_ext *ext)
{
    while (ext != NULL && ext->id != ATTN_EXT_IO_ROPE) {
        ext = ext->next;
    }
    return (const struct attn_io_rope *)ext;
}

static void norm_row(const struct attn_io_rope *rope, const struct attn_tensor *weight, double *row,
                     int32_t head_size)
{
    double weights[REF_MAX_HEAD_SIZE], sum = 0;
    if (weight == NULL) {
        return;
    }
    number_load_row(weights, (const uint8_t *)weight->data + weight->byte_offset,
                    number_dtype_name(weight->dtype), head_size);
    for (int32_t d = 0; d < head_size; d++) {
        sum += row[d] * row[d];
    }
    double factor = 1 / sqrt(sum / head_size + rope->norm_eps);
    for (int32_t d = 0; d < head_size; d++) {
        row[d] *= factor * weights[d];
    }
}

/* Pairs (d, d + half) in the NeoX form, (2d, 2d + 1) in GPT-J's. */
static void rotate_row(const struct attn_io_rope *rope, int64_t position, double *row,
                       int32_t head_size)
{
    double table[REF_MAX_HEAD_SIZE];
    int32_t rotary = rope->rotary_dim > 0 ? rope->rotary_dim : head_size;
    int32_t half = rotary / 2;
    number_load_row(table, tensor_row(rope->cos_sin, position, 0),
                    number_dtype_name(rope->cos_sin->dtype), rotary);
    for (int32_t d = 0; d < half; d++) {
        int32_t first = rope->form == ATTN_ROPE_NEOX ? d : 2 * d;
        int32_t second = rope->form == ATTN_ROPE_NEOX ? d + half : 2 * d + 1;
        double c = table[d], s = table[half + d];
        double x = row[first], y = row[second];
        row[first] = x * c - y * s;
        row[second] = y * c + x * s;
    }
}

static void turn_rows(const struct attn_io_rope *rope, const struct attn_tensor *tensor,
                      const struct attn_tensor *weight, int64_t rows, int32_t head_size)
{
    double row[REF_MAX_HEAD_SIZE];
    int32_t dtype = number_dtype_name(tensor->dtype);
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t h = 0; h < tensor->shape[1]; h++) {
            number_load_row(row, tensor_row(tensor, t, h), dtype, head_size);
            norm_row(rope, weight, row, head_size);
            rotate_row(rope, rope->positions[t], row, head_size);
            number_store_row(tensor_row(tensor, t, h), row, dtype, head_size);
        }
    }
}

/* k is rotated in place too, so that a step without a cache finds it rotated. */
attn_status ref_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_io_rope *rope = find_rope(args->next);
    turn_rows(rope, args->q, rope->q_norm_weight, args->num_slots, args->layer->head_size);
    turn_rows(rope, args->k, rope->k_norm_weight, args->num_slots, args->layer->head_size);
    return ref_write_kv(args, error);
}
