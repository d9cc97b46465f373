/* SPDX-License-Identifier: Apache-2.0 */
/* How a cache's elements reach the matrix units; attends are compiled for each. */
#ifndef CUDA_FLASH_KINDS_H
#define CUDA_FLASH_KINDS_H

enum gpu_kind {
    KIND_F32, /* multiplied as two tf32 each; up to 8 rows on the FMA units */
    KIND_BF16,
    KIND_F16,
    KIND_E4M3, /* from here on 8 bits, multiplied in f16 */
    KIND_E5M2,
    KIND_INT8,
    KIND_INT4, /* from here on 4 bits, likewise */
    KIND_NVFP4,
    KIND_LEVELS, /* TurboQuant's keys and values, of 4 or 3 bits each */
    KIND_K8V4,   /* its keys in e4m3 and values of 4 bits */
    KIND_COUNT
};

#endif
