/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a layer: new keys and values, drawn or recorded, and outputs against what they should be.
 */
#include <math.h>

#include "common/bound.h"
#include "engine.h"
#include "support/number.h"

size_t element_bytes(const struct run_layer *layer)
{
    return number_bytes(layer->terms.dtype);
}

/* Row `row` of request r in a recording of q, k, v or out (0 .. 3); NULL: none. */
const float *recorded_row(const struct run_engine *engine, const struct run_layer *layer,
                          int32_t which, int32_t r, int64_t row)
{
    const struct row_terms *t = &layer->terms;
    int64_t width = which == 0 || which == 3 ? (int64_t)t->num_q_heads * t->head_size
                                             : (int64_t)t->num_kv_heads * t->head_size;
    return layer->recorded[which] != NULL
               ? layer->recorded[which] + (engine->requests[r].first_row + row) * width
               : NULL;
}

void add_keys(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
              int32_t end, int32_t capacity)
{
    const struct row_terms *t = &layer->terms;
    uint8_t **histories[2] = {&layer->k_history[r], &layer->v_history[r]};
    int64_t widths[2] = {(int64_t)t->num_kv_heads * t->head_size,
                         (int64_t)t->num_kv_heads * t->head_size_v};
    for (int32_t i = 0; i < 2; i++) {
        if (layer->compressor != NULL && i == (layer->source->desc.kind == ATTN_LAYER_MLA)) {
            *histories[i] = layer->compressor->v_history[r];
            continue;
        }
        if (*histories[i] == NULL) {
            *histories[i] = command_calloc((size_t)(capacity * widths[i]), element_bytes(layer));
        }
        const float *recorded = recorded_row(engine, layer, 1 + i, r, first);
        for (int64_t at = first * widths[i]; at < end * widths[i]; at++) {
            number_store(*histories[i], at, t->dtype,
                         recorded != NULL ? (double)*recorded++
                                          : random_almost_normal(&engine->random));
        }
    }
    if (layer->kind->make_keys != NULL) {
        layer->kind->make_keys(engine, layer, r, first, end);
    }
}

/* The recording is a float32 computation itself. */
static double recording_ratio(double rms, double expected, double found)
{
    double ratio = fabs(found - expected) / (2e-5 * rms + 1e-5 * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

void compare_row(const struct run_layer *layer, const double *expected, double least,
                 const void *out, int64_t at, int32_t count, const float *recorded,
                 struct tally *tally)
{
    double sum = 0;
    for (int32_t d = 0; d < count; d++) {
        sum += expected[d] * expected[d];
    }
    const double rms = fmax(sqrt(sum / count), least);
    for (int32_t d = 0; d < count; d++) {
        double found = number_load(out, at + d, layer->terms.dtype);
        double allowed =
            bound_allows(bound_of_dtype(layer->terms.dtype), rms, layer->terms.dtype, expected[d]);
        double ratio = bound_ratio(expected[d], found, allowed);
        ratio /= layer->roundings > 0 ? layer->roundings : 1;
        if (recorded != NULL) {
            ratio = fmax(ratio, recording_ratio(rms, (double)recorded[at + d], found));
        }
        tally->max_error = ratio > tally->max_error ? ratio : tally->max_error;
        tally->compared++;
    }
}
