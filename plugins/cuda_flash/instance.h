/* SPDX-License-Identifier: Apache-2.0 */
/* An instance, what is prepared per layer, and the slots of the kernel table. */
#ifndef CUDA_FLASH_INSTANCE_H
#define CUDA_FLASH_INSTANCE_H

#include "common/number.h"
#include "common/tensors.h"
#include "flash.h"

struct attn_instance {
    const struct attn_host *host;
    struct flash_device device;
};

struct attn_state {
    int32_t num_kv_heads, group, padded_size;
};

attn_status cuda_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status cuda_prepare(attn_instance *instance, const struct attn_layer_desc *layer,
                         const struct attn_layer_params *params, int32_t phase, attn_state **state,
                         struct attn_error *error);
void cuda_release(attn_instance *instance, attn_state *state);
attn_status cuda_plan_size(attn_instance *instance, attn_state *state,
                           const struct attn_limits *limits, struct attn_plan_size *size,
                           struct attn_error *error);
attn_status cuda_plan(const struct attn_attend_args *args, int32_t mode, struct attn_error *error);
attn_status cuda_update_block_table(const struct attn_attend_args *args, struct attn_error *error);

attn_status cuda_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status cuda_merge_states(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status cuda_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status cuda_copy(attn_instance *instance, void *destination, const void *source, size_t bytes,
                      int32_t kind, void *stream, struct attn_error *error);
attn_status cuda_fill(attn_instance *instance, void *destination, int32_t value, size_t row_bytes,
                      size_t stride, int64_t rows, void *stream, struct attn_error *error);

static inline attn_status device_status(const char *cause, const char *what,
                                        struct attn_error *error)
{
    return cause == NULL ? ATTN_OK : plugin_error(error, ATTN_ERROR_DEVICE, what, "%s", cause);
}

#endif
