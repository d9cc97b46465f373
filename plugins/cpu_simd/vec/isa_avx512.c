/* SPDX-License-Identifier: Apache-2.0 */
#include "vec/vec_avx512.h"

#include "vec/f32_direct.h"

static const struct engine engine_f32 = F32_ENGINE;

const struct variant variant_avx512 = {.name = "avx512", .f32 = &engine_f32, ROW_OPERATIONS};
