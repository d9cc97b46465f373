/* SPDX-License-Identifier: Apache-2.0 */
/* Launches of the sm_80 attend and prefill kernels by kind, and tensor maps. */
#include "cuda_flash/decode/sm80_launch.h"
#include "cuda_flash/kinds.h"
#include "cuda_flash/prefill/sm80_prefill.h"
#include "gpu/cuda/launch.cuh"

/* By enum gpu_kind. */
static gpu_attend_launcher *const attends[KIND_COUNT] = {
    launch_f32,  launch_bf16, launch_f16,   launch_e4m3,   launch_e5m2,
    launch_int8, launch_int4, launch_nvfp4, launch_levels, launch_k8v4};

#ifndef CUDA_FLASH_SM90_ALONE
/* From KIND_BF16 on. */
static gpu_prefill_launcher *const prefills[] = {launch_sm80_prefill_bf16, launch_sm80_prefill_f16,
                                                 launch_sm80_prefill_e4m3,
                                                 launch_sm80_prefill_e5m2};

extern "C" const char *sm80_prefill_launch(const struct gpu_device *device, int32_t kind,
                                           const struct sm80_prefill_params *params, void *stream)
{
    device_scope inside(device);
    return cause_of(prefills[kind - KIND_BF16](params, (cudaStream_t)stream));
}
#endif

typedef CUresult CUDAAPI encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                   const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                   const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                   CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

extern "C" const char *sm80_launch(const struct gpu_device *device, int32_t kind,
                                   const struct sm80_params *params, void *stream)
{
    device_scope inside(device);
    return cause_of(attends[kind](params, (cudaStream_t)stream));
}

extern "C" bool tensor_map_encode(const struct gpu_device *device, const void *data,
                                  const struct map_shape *shape, struct tensor_map *map)
{
    const cuuint32_t ones[5] = {1, 1, 1, 1, 1};
    if (device->encode_map == NULL || device->major < 9) {
        return false;
    }
    device_scope inside(device); /* encoding needs a current context */
    return ((encode_fn *)device->encode_map)(
               (CUtensorMap *)map,
               shape->element == 1   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
               : shape->element == 2 ? CU_TENSOR_MAP_DATA_TYPE_UINT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
               (cuuint32_t)shape->rank, (void *)data, (const cuuint64_t *)shape->sizes,
               (const cuuint64_t *)shape->strides, shape->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
               shape->box[0] * (uint32_t)shape->element == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                                               : CU_TENSOR_MAP_SWIZZLE_64B,
               shape->fetched == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                                     : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}
