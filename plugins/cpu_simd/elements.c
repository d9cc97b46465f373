/* SPDX-License-Identifier: Apache-2.0 */
/* Types of elements: their bytes, and those of tensors. */
#include "cpu_simd/internal.h"

const int32_t element_bytes[ELEMENT_COUNT] = {4, 2, 2, 1, 1, 1};

int32_t element_of_any(const struct attn_tensor *tensor)
{
    static const struct {
        uint8_t code, bits;
        int32_t element;
    } known[] = {
        {ATTN_CODE_FLOAT, 32, ELEMENT_F32},       {ATTN_CODE_FLOAT, 16, ELEMENT_F16},
        {ATTN_CODE_BFLOAT, 16, ELEMENT_BF16},     {ATTN_CODE_FLOAT8_E4M3FN, 8, ELEMENT_E4M3},
        {ATTN_CODE_FLOAT8_E5M2, 8, ELEMENT_E5M2}, {ATTN_CODE_INT, 8, ELEMENT_INT8}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (tensor->dtype.code == known[i].code && tensor->dtype.bits == known[i].bits) {
            return known[i].element;
        }
    }
    return -1;
}

int32_t element_of_dtype(int32_t dtype)
{
    static const int32_t dtypes[ELEMENT_COUNT] = {ATTN_DTYPE_F32,      ATTN_DTYPE_F16,
                                                  ATTN_DTYPE_BF16,     ATTN_DTYPE_FP8_E4M3,
                                                  ATTN_DTYPE_FP8_E5M2, ATTN_DTYPE_INT8};
    int32_t element = ELEMENT_COUNT - 1;
    while (element >= 0 && dtypes[element] != dtype) {
        element--;
    }
    return element;
}
