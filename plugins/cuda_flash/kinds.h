/* SPDX-License-Identifier: Apache-2.0 */
/* The element types of caches as the kernels see them; attention kernels are compiled for each. */
#ifndef CUDA_FLASH_KINDS_H
#define CUDA_FLASH_KINDS_H

enum gpu_kind {
    KIND_F32, /* two tf32 for each element; up to 8 rows on the FMA units */
    KIND_BF16,
    KIND_F16,
    KIND_E4M3, /* this and the following: 8 bits, multiplied in f16 */
    KIND_E5M2,
    KIND_INT8,
    KIND_INT4, /* this and the following: 4 bits, multiplied in f16 */
    KIND_NVFP4,
    KIND_LEVELS, /* TurboQuant, keys and values of 4 or 3 bits */
    KIND_K8V4,   /* TurboQuant with e4m3 keys and values of 4 bits */
    KIND_COUNT
};

#endif
