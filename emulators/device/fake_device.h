/* SPDX-License-Identifier: Apache-2.0 */
#ifndef DEVICE_FAKE_DEVICE_H
#define DEVICE_FAKE_DEVICE_H

#include <attn/plugin.h>
#include <stdbool.h>

#define FAKE_DEVICE                                                                                \
    {                                                                                              \
        ATTN_DEVICE_EXTENSION, 0                                                                   \
    }

bool fake_device_owns(const void *address);

/* check_arguments.c: everything that a kernel of the fake device would follow lies in the device's
 * memory, and tensors say so; what the host would follow does not. The error names the first that
 * is wrong. */
attn_status check_address(const void *address, const char *name, struct attn_error *error);
attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status check_write(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status check_gather(const struct attn_gather_kv_args *args, struct attn_error *error);
attn_status check_merge(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status check_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error);
attn_status check_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status check_amax(const struct attn_amax_args *args, struct attn_error *error);
attn_status check_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status check_table(const struct attn_block_table_args *args, struct attn_error *error);
attn_status check_copy(const void *destination, const void *source, int32_t kind,
                       struct attn_error *error);

#endif
