/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors as TMA walks them: a map is a parameter of the kernel, 64-byte aligned there. */
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

/* A tensor of `rank` dimensions (at most 5), whose elements of 1, 2 or 4 bytes are contiguous in
 * the first one. */
struct map_shape {
    int32_t rank, element; /* element: bytes */
    int32_t fetched;       /* bytes that the L2 fetches together: 128 or 256 */
    uint64_t sizes[5];
    uint64_t strides[4]; /* bytes, from the second dimension on */
    uint32_t box[5];     /* its rows are 64 or 128 bytes, which are swizzled */
};

/* False: TMA cannot walk it, or the device has none. */
bool tensor_map_encode(const struct gpu_device *device, const void *data,
                       const struct map_shape *shape, struct tensor_map *map);

#ifdef __cplusplus
}
#endif
#endif
