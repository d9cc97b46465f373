/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's rows: blocks of 32 elements after a float16 step, in ggml's arithmetic (float32), so that
 * the bytes are its own. */
#include <math.h>
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

#define LARGEST_STEP 65504.0f /* the largest float16 */

static void store_step(uint8_t *block, float step)
{
    uint16_t half =
        number_to_f16(isnan(step) ? step : fmaxf(-LARGEST_STEP, fminf(LARGEST_STEP, step)));
    memcpy(block, &half, sizeof half);
}

/* The element of the largest magnitude, the first of equals; NaN if one is not finite. */
static float extreme(const double *x)
{
    float found = 0;
    for (int32_t i = 0; i < REF_BLOCK; i++) {
        if (!isfinite((float)x[i])) {
            return NAN;
        }
        found = fabsf((float)x[i]) > fabsf(found) ? (float)x[i] : found;
    }
    return found;
}

static void store_8(uint8_t *block, const double *x)
{
    float step = fabsf(extreme(x)) / 127.0f, inverse = step > 0 ? 1.0f / step : 0;
    store_step(block, step);
    for (int32_t i = 0; i < REF_BLOCK; i++) {
        float code = isnan(step) ? 0 : roundf((float)x[i] * inverse);
        block[2 + i] = (uint8_t)(int8_t)fmaxf(-127, fminf(127, code));
    }
}

/* The extreme becomes code 0, which is -8. */
static void store_4(uint8_t *block, const double *x)
{
    float step = extreme(x) / -8.0f, inverse = step != 0 && !isnan(step) ? 1.0f / step : 0;
    uint8_t codes[REF_BLOCK];
    store_step(block, step);
    for (int32_t i = 0; i < REF_BLOCK; i++) {
        float code = isnan(step) ? 8 : (float)x[i] * inverse + 8.5f;
        codes[i] = (uint8_t)fmaxf(0, fminf(15, floorf(code)));
    }
    for (int32_t i = 0; i < REF_BLOCK / 2; i++) {
        block[2 + i] = (uint8_t)(codes[i] | codes[i + REF_BLOCK / 2] << 4);
    }
}

void blocks_store(const struct cache_place *at, const double *row)
{
    uint8_t *memory = view_row(at->view, at->block, at->slot, at->head);
    bool eight = layer_kv_dtype(at->layer, at->is_v) == ATTN_KV_Q8_0;
    for (int32_t d = 0; d < at->view->head_size; d += REF_BLOCK) {
        if (eight) {
            store_8(memory, row + d);
        } else {
            store_4(memory, row + d);
        }
        memory += eight ? 2 + REF_BLOCK : 2 + REF_BLOCK / 2;
    }
}

void blocks_load(const struct cache_place *at, double *row)
{
    const uint8_t *memory = view_row(at->view, at->block, at->slot, at->head);
    bool eight = layer_kv_dtype(at->layer, at->is_v) == ATTN_KV_Q8_0;
    for (int32_t d = 0; d < at->view->head_size; d += REF_BLOCK) {
        uint16_t half;
        memcpy(&half, memory, sizeof half);
        double step = number_from_f16(half);
        for (int32_t i = 0; i < REF_BLOCK; i++) {
            uint8_t byte = memory[2 + (eight ? i : i % (REF_BLOCK / 2))];
            int32_t code = eight               ? (int8_t)byte
                           : i < REF_BLOCK / 2 ? (byte & 15) - 8
                                               : (byte >> 4) - 8;
            row[d + i] = code * step;
        }
        memory += eight ? 2 + REF_BLOCK : 2 + REF_BLOCK / 2;
    }
}
