/* SPDX-License-Identifier: Apache-2.0 */
#include "vec/vec_neon.h"

#include "vec/f32_direct.h"

static const struct engine engine_f32 = F32_ENGINE;

const struct variant variant_neon = {.name = "neon", .f32 = &engine_f32, ROW_OPERATIONS};
