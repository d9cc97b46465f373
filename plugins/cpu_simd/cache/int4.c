/* SPDX-License-Identifier: Apache-2.0 */
/* int4 per token and head. A row x is stored as t = H (s x), with signs s and Sylvester's Hadamard
 * matrix H: codes of 4 bits, value (code - zero) scale, the zero point in the scale's low mantissa
 * bits. H H = D, so q x = (H (s q) / D) t, and a weighted sum of values is the weighted sum of
 * their t, rotated back once. codes - zero are integers up to 15, which every compute type holds.
 */
#include "cpu_simd/internal.h"

const float *int4_signs(const struct attn_layer_params *params, bool is_v)
{
    const struct attn_kv_quant_params *quant = ext_of(params->next, ATTN_EXT_KV_QUANT_PARAMS);
    return quant == NULL ? NULL : is_v ? quant->hadamard_signs_v : quant->hadamard_signs_k;
}

void int4_rotate_query(const struct variant *variant, const float *signs, float *row, int32_t n)
{
    float factor = 1.0f / (float)n;
    for (int32_t d = 0; d < n && signs != NULL; d++) {
        row[d] *= signs[d] * factor;
    }
    variant->hadamard(row, n);
}

void int4_rotate_back(const struct variant *variant, const float *signs, float *row, int32_t n)
{
    float factor = 1.0f / (float)n;
    variant->hadamard(row, n);
    for (int32_t d = 0; d < n; d++) {
        row[d] *= signs[d] * factor;
    }
}

void int4_codes(const struct variant *variant, int8_t *codes, const char *row, int32_t n,
                int32_t pack, int64_t stride_pack, int32_t zero)
{
    for (int32_t d = 0; d < n; d += pack, row += stride_pack) {
        if (pack > 1) {
            variant->nibbles(codes + d, (const uint8_t *)row, zero, pack);
        } else { /* odd elements lie in the high nibble of bytes of their own */
            codes[d] = (int8_t)((*(const uint8_t *)row >> d % 2 * 4 & 15) - zero);
        }
    }
}

void nibbles_write(const struct attn_kv_view *view, char *memory, const uint8_t *codes)
{
    int32_t n = view->head_size, pack = view->pack > 0 ? view->pack : n;
    for (int32_t d = 0; d < n; d += pack, memory += view->stride_pack) {
        if (pack > 1) {
            memcpy(memory, codes + d / 2, (size_t)pack / 2);
        } else { /* odd elements lie in the high nibble of bytes of their own */
            uint8_t code = codes[d / 2] >> d % 2 * 4 & 15, *byte = (uint8_t *)memory;
            *byte = (uint8_t)(d % 2 ? (*byte & 15u) | code << 4 : (*byte & 0xf0u) | code);
        }
    }
}

float int4_write(const struct variant *variant, const struct attn_kv_view *view, char *memory,
                 const float *values, const float *signs)
{
    int32_t n = view->head_size;
    uint8_t codes[MAX_HEAD_SIZE / 2];
    float scale;
    int32_t zero = variant->codes->encode_int4(codes, values, signs, n, &scale);
    if (isnan(scale)) {
        return NAN; /* the same bits on every level; codes are not read */
    }
    nibbles_write(view, memory, codes);
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits & ~INT4_ZERO_MASK) | (uint32_t)zero;
    memcpy(&scale, &bits, sizeof bits);
    return scale;
}
