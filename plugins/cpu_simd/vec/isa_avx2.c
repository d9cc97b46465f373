/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_avx2.h"

#include "f32_decode.h"

const struct variant variant_avx2 = {
    .name = "avx2", .rank = 40, .f32 = &f32_kernels, ROW_OPERATIONS};
