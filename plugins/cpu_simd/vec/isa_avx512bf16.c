/* SPDX-License-Identifier: Apache-2.0 */
#include "vec/vec_avx512.h"

#include "vec/f32_direct.h"

#include "vec/bf16_engine.h"
#include "vec/bf16_gemm.h"
#include "vec/bf16_unpack.h"

#include "vec/whole_direct.h"

static const struct engine engine_f32 = F32_ENGINE;

static const struct engine engine_bf16 = {
    .element_bytes = 2,
    .element = ELEMENT_BF16,
    .row_block = 24,
    .direct_rows = DIRECT_ROWS,
    .unpack = {bf16_from_f32, bf16_from_f16, bf16_from_bf16, bf16_from_e4m3, bf16_from_e5m2,
               bf16_from_int8},
    .pack_keys = bf16_pack_keys,
    .pack_values = bf16_pack_values,
    .gemm = bf16_gemm,
    .softmax = bf16_softmax,
    .direct = &bf16_direct,
    .direct_fp8 = &fp8_direct,
    .direct_int8 = &int8_direct,
    .direct_int4 = &int4_direct,
};

const struct variant variant_avx512bf16 = {
    .name = "avx512bf16", .f32 = &engine_f32, .bf16 = &engine_bf16, ROW_OPERATIONS};
