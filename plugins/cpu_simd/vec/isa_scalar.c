/* SPDX-License-Identifier: Apache-2.0 */
#include "vec_scalar.h"

#include "f32_decode.h"

const struct variant variant_scalar = {
    .name = "scalar", .rank = 10, .f32 = &f32_kernels, ROW_OPERATIONS};
