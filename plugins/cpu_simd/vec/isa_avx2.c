/* SPDX-License-Identifier: Apache-2.0 */
#include "vec/vec_avx2.h"

#include "vec/f32_direct.h"

static const struct engine engine_f32 = F32_ENGINE;

const struct variant variant_avx2 = {.name = "avx2", .f32 = &engine_f32, ROW_OPERATIONS};
