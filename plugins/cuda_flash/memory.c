/* SPDX-License-Identifier: Apache-2.0 */
/* The slots that move memory: the KV write, merge, copies and fills. */
#include "instance.h"

attn_status cuda_write_kv(const struct attn_write_kv_args *args, struct attn_error *error)
{
    if (args->k == NULL || args->v == NULL || args->k_cache == NULL || args->v_cache == NULL ||
        args->params == NULL || (args->slot_mapping == NULL && args->num_slots > 0)) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "write_kv",
                            "k, v, both caches, params and slot_mapping are needed; one is NULL");
    }
    if (number_of_kv(args->layer->kv_dtype) < 0) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "kv_dtype",
                            "kv_dtype %d; f16, bf16, f32, fp8_e4m3 and fp8_e5m2 are served",
                            args->layer->kv_dtype);
    }
    return device_status(flash_write(&args->instance->device, args, args->stream), "write_kv",
                         error);
}

attn_status cuda_merge_states(const struct attn_merge_states_args *args, struct attn_error *error)
{
    if (args->prefix_out == NULL || args->suffix_out == NULL || args->out == NULL ||
        args->prefix_lse == NULL || args->suffix_lse == NULL) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "merge_states",
                            "both outputs, both lse and out are needed; one is NULL");
    }
    if (args->next != NULL) {
        return plugin_error(error, ATTN_ERROR_UNSUPPORTED, "next",
                            "quantized merge output is not served");
    }
    return device_status(flash_merge(&args->instance->device, args), "merge_states", error);
}

attn_status cuda_copy(attn_instance *instance, void *destination, const void *source, size_t bytes,
                      int32_t kind, void *stream, struct attn_error *error)
{
    if (kind < ATTN_COPY_HOST_TO_DEVICE || kind > ATTN_COPY_DEVICE_TO_DEVICE) {
        return plugin_error(error, ATTN_ERROR_INVALID_ARGUMENT, "kind", "%d; 1 to 3 is allowed",
                            kind);
    }
    return device_status(flash_copy(&instance->device, destination, source, bytes, kind, stream),
                         "copy", error);
}

attn_status cuda_fill(attn_instance *instance, void *destination, int32_t value, size_t row_bytes,
                      size_t stride, int64_t rows, void *stream, struct attn_error *error)
{
    return device_status(
        flash_fill(&instance->device, destination, value, row_bytes, stride, rows, stream), "fill",
        error);
}

attn_status cuda_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    for (int32_t i = 0; i < args->num_copies; i++) {
        const struct attn_block_copy *copy = &args->copies[i];
        for (int64_t j = 0; j < args->num_pairs; j++) {
            attn_status status =
                cuda_copy(args->instance,
                          (char *)copy->destination + args->pairs[2 * j + 1] * copy->destination_stride,
                          (const char *)copy->source + args->pairs[2 * j] * copy->source_stride,
                          (size_t)copy->bytes, args->kind, args->stream, error);
            if (status != ATTN_OK) {
                return status;
            }
        }
    }
    return ATTN_OK;
}
