/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_avx512.h"

#include "f32_decode.h"

const struct variant variant_avx512 = {
    .name = "avx512", .rank = 60, .f32 = &f32_kernels, ROW_OPERATIONS};
