/* SPDX-License-Identifier: Apache-2.0 */
/* rope_write_kv: optional RMS norm of q and k, rotary embedding (Su et al. 2021), cache write. */
#include "common/rope.h"
#include "reference.h"

static void turn_rows(const struct attn_io_rope *rope, const struct attn_tensor *tensor,
                      const struct attn_tensor *weight, int64_t rows, int32_t head_size)
{
    double row[REF_MAX_HEAD_SIZE];
    int32_t dtype = number_dtype_name(tensor->dtype);
    for (int64_t t = 0; t < rows; t++) {
        for (int64_t h = 0; h < tensor->shape[1]; h++) {
            number_load_row(row, tensor_row(tensor, t, h), dtype, head_size);
            rope_norm_row(weight, (double)rope->norm_eps, row, head_size);
            rope_rotate_row(rope->form, rope->cos_sin, rope->positions[t], row,
                            rope->rotary_dim > 0 ? rope->rotary_dim : head_size);
            number_store_row(tensor_row(tensor, t, h), row, dtype, head_size);
        }
    }
}

/* k is rotated in place too, so that a step without a cache finds it rotated. */
attn_status ref_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    const struct attn_io_rope *rope = ext_of(args->next, ATTN_EXT_IO_ROPE);
    turn_rows(rope, args->q, rope->q_norm_weight, args->num_slots, args->layer->head_size);
    turn_rows(rope, args->k, rope->k_norm_weight, args->num_slots, args->layer->head_size);
    return ref_write_kv(args, error);
}
