/* SPDX-License-Identifier: Apache-2.0 */
/* Tensor maps for TMA. A map is a kernel parameter, aligned to 64 bytes. */
#ifndef CUDA_FLASH_TENSOR_MAP_H
#define CUDA_FLASH_TENSOR_MAP_H

#include "gpu/params.h"

#ifdef __cplusplus
#define MAP_ALIGN alignas(64)
extern "C" {
#else
#define MAP_ALIGN _Alignas(64)
#endif

struct tensor_map {
    MAP_ALIGN uint64_t words[16]; /* CUtensorMap */
};

/* A tensor of `rank` dimensions (at most 5); its elements of 1, 2 or 4 bytes are contiguous in the
 * first dimension. */
struct map_shape {
    int32_t rank, element; /* element: size in bytes */
    int32_t fetched;       /* bytes of an L2 fetch: 128 or 256 */
    uint64_t sizes[5];
    uint64_t strides[4]; /* bytes, from the second dimension on */
    uint32_t box[5];     /* rows of 64 or 128 bytes, swizzled */
};

/* Returns false if TMA cannot read the tensor or the device has no TMA. */
bool tensor_map_encode(const struct gpu_device *device, const void *data,
                       const struct map_shape *shape, struct tensor_map *map);

#ifdef __cplusplus
}
#endif
#endif
