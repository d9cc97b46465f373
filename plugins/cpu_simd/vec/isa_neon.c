/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_neon.h"

#include "f32_decode.h"

const struct variant variant_neon = {
    .name = "neon", .rank = 40, .f32 = &f32_kernels, ROW_OPERATIONS};
