/* SPDX-License-Identifier: Apache-2.0 */
/* TurboQuant's rows: rotated keys by the nearest of a few levels, values by equal steps. */
#include "common/turboquant.h"

#include <math.h>

#include "common/number.h"
#include "common/tensors.h"
#include "reference.h"

static const float levels_3[] = {TURBOQUANT_LEVELS_3};
static const float levels_4[] = {TURBOQUANT_LEVELS_4};

void hadamard(double *row, int32_t count)
{
    for (int32_t half = 1; half < count; half *= 2) {
        for (int32_t d = 0; d < count; d++) {
            if ((d & half) == 0) {
                double a = row[d], b = row[d + half];
                row[d] = a + b;
                row[d + half] = a - b;
            }
        }
    }
}

static uint32_t load_code(const uint8_t *row, int32_t d, int32_t bits)
{
    int32_t at = d * bits, end = at % 8 + bits;
    uint32_t two = row[at / 8] | (end > 8 ? (uint32_t)row[at / 8 + 1] << 8 : 0);
    return two >> at % 8 & ((1u << bits) - 1);
}

static void store_code(uint8_t *row, int32_t d, int32_t bits, uint32_t code)
{
    for (int32_t i = 0; i < bits; i++) {
        int32_t at = d * bits + i;
        uint32_t bit = 1u << at % 8;
        row[at / 8] = (uint8_t)(code >> i & 1 ? row[at / 8] | bit : row[at / 8] & ~bit);
    }
}

static void store_f16(uint8_t *memory, double x)
{
    uint16_t half =
        number_to_f16(isnan(x) ? x : fmax(-TURBOQUANT_LARGEST, fmin(TURBOQUANT_LARGEST, x)));
    memcpy(memory, &half, sizeof half);
}

static double load_f16(const uint8_t *memory)
{
    uint16_t half;
    memcpy(&half, memory, sizeof half);
    return number_from_f16(half);
}

/* The nearest level's code; a middle belongs to the upper one. */
static uint32_t nearest_level(double x, const float *levels, int32_t bits)
{
    uint32_t half = 1u << (bits - 1), away = 0;
    for (uint32_t i = 0; i + 1 < half; i++) {
        double middle = ((double)levels[i] + levels[i + 1]) / 2;
        away += x >= 0 ? x >= middle : x < -middle;
    }
    return x >= 0 ? half + away : half - 1 - away;
}

static double level_of(uint32_t code, const float *levels, int32_t bits)
{
    uint32_t half = 1u << (bits - 1);
    return code >= half ? (double)levels[code - half] : -(double)levels[half - 1 - code];
}

static void store_key(const struct attn_kv_view *view, uint8_t *memory, uint8_t *scale,
                      int32_t bits, const double *row)
{
    const float *levels = bits == 3 ? levels_3 : levels_4;
    double turned[REF_MAX_HEAD_SIZE], sum = 0;
    for (int32_t d = 0; d < view->head_size; d++) {
        turned[d] = row[d];
        sum += row[d] * row[d];
    }
    double norm = isfinite(sum) ? sqrt(sum) : NAN;
    store_f16(scale, norm);
    if (isnan(norm)) {
        return; /* codes after it mean nothing */
    }
    hadamard(turned, view->head_size);
    for (int32_t d = 0; d < view->head_size; d++) {
        /* a unit row rotated by the normalised matrix, times sqrt(D) */
        double x = turned[d] / (norm + TURBOQUANT_EPSILON);
        store_code(memory, d, bits, nearest_level(x, levels, bits));
    }
}

static void load_key(const struct attn_kv_view *view, const uint8_t *memory, const uint8_t *scale,
                     int32_t bits, double *row)
{
    const float *levels = bits == 3 ? levels_3 : levels_4;
    double sum = 0;
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] = level_of(load_code(memory, d, bits), levels, bits);
        sum += row[d] * row[d];
    }
    double factor = load_f16(scale) / sqrt(sum * view->head_size);
    hadamard(row, view->head_size);
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] *= factor;
    }
}

static void store_value(const struct attn_kv_view *view, uint8_t *memory, uint8_t *scale,
                        int32_t bits, const double *row)
{
    double low = row[0], high = row[0], largest = (1 << bits) - 1;
    bool finite = true;
    for (int32_t d = 0; d < view->head_size; d++) {
        low = fmin(low, row[d]);
        high = fmax(high, row[d]);
        finite = finite && isfinite(row[d]);
    }
    double step = fmax((high - low) / largest, TURBOQUANT_STEP);
    store_f16(scale, finite ? step : NAN);
    store_f16(scale + 2, finite ? low + 0.0 : NAN); /* no -0 */
    for (int32_t d = 0; d < view->head_size && finite; d++) {
        double code = fmin(floor((row[d] - low) / step + 0.5), largest);
        store_code(memory, d, bits, (uint32_t)code);
    }
}

static void load_value(const struct attn_kv_view *view, const uint8_t *memory, const uint8_t *scale,
                       int32_t bits, double *row)
{
    double step = load_f16(scale), low = load_f16(scale + 2);
    for (int32_t d = 0; d < view->head_size; d++) {
        row[d] = load_code(memory, d, bits) * step + low;
    }
}

void turboquant_store(const struct cache_place *at, const double *row)
{
    uint8_t *memory = view_row(at->view, at->block, at->slot, at->head);
    uint8_t *scale = (uint8_t *)view_scale(at->view, at->block, at->slot, at->head);
    int32_t bits = turboquant_bits(at->layer->kv_dtype, at->is_v);
    (at->is_v ? store_value : store_key)(at->view, memory, scale, bits, row);
}

void turboquant_load(const struct cache_place *at, double *row)
{
    const uint8_t *memory = view_row(at->view, at->block, at->slot, at->head);
    const uint8_t *scale = (const uint8_t *)view_scale(at->view, at->block, at->slot, at->head);
    int32_t bits = turboquant_bits(at->layer->kv_dtype, at->is_v);
    (at->is_v ? load_value : load_key)(at->view, memory, scale, bits, row);
}
