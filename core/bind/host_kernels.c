/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels that need no backend where all memory is the host's. */
#include <stdlib.h>
#include <string.h>

#include "bind/bound.h"

#define ALIGNMENT 256

static attn_status allocate_memory(const struct attn_memory_args *args, void **memory,
                                   struct attn_error *error)
{
    const size_t rounded = args->bytes <= SIZE_MAX - ALIGNMENT
                               ? (args->bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT
                               : 0;
    *memory = rounded > 0 ? aligned_alloc(ALIGNMENT, rounded) : NULL;
    return *memory != NULL ? ATTN_OK
                           : error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "bytes",
                                       "%zu bytes of the host's memory are not free", args->bytes);
}

static attn_status free_memory(const struct attn_memory_args *args, struct attn_error *error)
{
    free(args->memory);
    return ATTN_OK;
}

static attn_status memory_device(const struct attn_memory_args *args, struct attn_device *device,
                                 struct attn_error *error)
{
    *device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    return ATTN_OK;
}

static attn_status copy(const struct attn_copy_args *args, struct attn_error *error)
{
    memcpy(args->destination, args->source, args->bytes);
    return ATTN_OK;
}

static attn_status fill(const struct attn_fill_args *args, struct attn_error *error)
{
    for (int64_t i = 0; i < args->rows; i++) {
        memset((uint8_t *)args->destination + (size_t)i * args->stride, args->value,
               args->row_bytes);
    }
    return ATTN_OK;
}

static attn_status copy_pairs(const struct attn_copy_blocks_args *args, struct attn_error *error)
{
    for (int32_t c = 0; c < args->num_copies; c++) {
        const struct attn_block_copy *copy = &args->copies[c];
        for (int64_t i = 0; i < args->num_pairs; i++) {
            const int64_t *pair = args->pairs + 2 * i;
            memmove((uint8_t *)copy->destination + pair[1] * copy->destination_stride,
                    (const uint8_t *)copy->source + pair[0] * copy->source_stride,
                    (size_t)copy->bytes);
        }
    }
    return ATTN_OK;
}

static attn_status create_stream(const struct attn_stream_args *args, void **stream,
                                 struct attn_error *error)
{
    *stream = NULL; /* every call is done when it returns */
    return ATTN_OK;
}

static attn_status wait_for_nothing(const struct attn_stream_args *args, struct attn_error *error)
{
    return ATTN_OK;
}

const struct attn_kernels host_kernels = {.struct_size = sizeof host_kernels,
                                          .allocate_memory = allocate_memory,
                                          .free_memory = free_memory,
                                          .memory_device = memory_device,
                                          .copy = copy,
                                          .fill = fill,
                                          .copy_blocks = copy_pairs,
                                          .create_stream = create_stream,
                                          .synchronize = wait_for_nothing};
