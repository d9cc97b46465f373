/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of queries, keys and values: drawn or recorded, and outputs against the oracle. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/bound.h"
#include "engine.h"
#include "support/number.h"
#include "support/oracle.h"

#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 13.0

size_t element_bytes(const struct run_layer *layer)
{
    return number_bytes(layer->terms.dtype);
}

struct attn_tensor tensor_of(const struct run_engine *engine, const struct run_layer *layer,
                             void *data, int32_t ndim, int64_t *shape, int64_t *strides)
{
    return (struct attn_tensor){
        data, engine->device.device, ndim, number_dtype(layer->terms.dtype), shape, strides, 0};
}

void rows_init(struct row_tensor *rows, const struct run_layer *layer, int64_t count, int32_t heads,
               int32_t dims, bool poison)
{
    *rows = (struct row_tensor){.shape = {count, heads, dims}};
    rows->bytes = (size_t)count * (size_t)heads * (size_t)dims * element_bytes(layer);
    rows->host = malloc(rows->bytes + 1);
    if (rows->host != NULL && poison) {
        memset(rows->host, 0xff, rows->bytes);
    }
}

attn_status rows_send(struct run_engine *engine, const struct run_layer *layer,
                      struct row_tensor *rows)
{
    void *memory = pool_send(engine, &engine->rows, rows->host, rows->bytes);
    rows->tensor = tensor_of(engine, layer, memory, 3, rows->shape, NULL);
    return memory != NULL ? ATTN_OK : engine->error.status;
}

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

attn_status add_keys(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                     int32_t end, int32_t capacity)
{
    const struct row_terms *t = &layer->terms;
    uint8_t **histories[2] = {&layer->k_history[r], &layer->v_history[r]};
    int64_t widths[2] = {(int64_t)t->num_kv_heads * t->head_size,
                         (int64_t)t->num_kv_heads * t->head_size_v};
    for (int32_t i = 0; i < 2; i++) {
        if (*histories[i] == NULL) {
            *histories[i] = malloc((size_t)(capacity * widths[i]) * element_bytes(layer));
        }
        if (*histories[i] == NULL) {
            return engine_fail(engine, ATTN_ERROR_OUT_OF_MEMORY, "history",
                               "no memory; try --scale");
        }
        const float *recorded = recorded_row(engine, layer, 1 + i, r, first);
        for (int64_t at = first * widths[i]; at < end * widths[i]; at++) {
            number_store(*histories[i], at, t->dtype,
                         recorded != NULL ? (double)*recorded++
                                          : random_almost_normal(&engine->random));
        }
    }
    return ATTN_OK;
}

/* A query that looks for one key that it can see, with noise of the other logits' deviation. */
static void draw_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t position, int64_t length, uint8_t *row)
{
    const struct row_terms *t = &layer->terms;
    int64_t reach = position + 1 < length ? position + 1 : length;
    int64_t window =
        t->has_window && t->window_left >= 0 && t->window_left < reach ? t->window_left + 1 : reach;
    int64_t j = t->causal ? reach - 1 - random_below(&engine->random, (int32_t)window)
                          : random_below(&engine->random, (int32_t)length);
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        int64_t key = (j * t->num_kv_heads + h / (t->num_q_heads / t->num_kv_heads)) * t->head_size;
        double norm = 0, deviation = LOGIT_DEVIATION / (t->scale * sqrt(t->head_size));
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = number_load(layer->k_history[r], key + d, t->dtype);
            norm += x * x;
        }
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = number_load(layer->k_history[r], key + d, t->dtype);
            number_store(row, (int64_t)h * t->head_size + d, t->dtype,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_almost_normal(&engine->random));
        }
    }
}

void make_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                int64_t position, int64_t length, uint8_t *row)
{
    const float *recorded = recorded_row(engine, layer, 0, r, position);
    if (recorded != NULL) {
        memcpy(row, recorded,
               (size_t)(layer->terms.num_q_heads * layer->terms.head_size) * sizeof *recorded);
    } else {
        draw_query(engine, layer, r, position, length, row);
    }
}

/* The recording is a float32 computation itself. */
static double recording_ratio(double rms, double expected, double found)
{
    double ratio = fabs(found - expected) / (2e-5 * rms + 1e-5 * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

void compare_row(const struct run_layer *layer, const double *expected, const void *out, int64_t at,
                 int32_t count, const float *recorded, struct tally *tally)
{
    double sum = 0;
    for (int32_t d = 0; d < count; d++) {
        sum += expected[d] * expected[d];
    }
    const double rms = sqrt(sum / count);
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

/* `count` elements of a layer's rows as doubles, behind those that *at already has. */
static double *widen(double **at, const void *rows, int64_t count, int32_t dtype)
{
    double *first = *at;
    for (int64_t i = 0; i < count; i++) {
        first[i] = number_load(rows, i, dtype);
    }
    *at += count;
    return first;
}

static double *widen_floats(double **at, const float *values, int32_t count)
{
    return values != NULL ? widen(at, values, count, ATTN_DTYPE_F32) : NULL;
}

/* The lists of a request's tokens as the oracle has them, [per_token, count, length]; NULL: no
 * memory. */
static uint8_t *mask_of(const struct step_lists *lists, int32_t length, int32_t first,
                        int32_t count)
{
    uint8_t *mask = calloc((size_t)lists->per_token * (size_t)count, (size_t)length);
    int32_t *keys = malloc((size_t)length * sizeof *keys);
    for (int32_t n = 0; mask != NULL && keys != NULL && n < lists->per_token * count; n++) {
        const int32_t c = n % count, position = length - count + c;
        int32_t seen = list_keys(lists, first + c, n / count, position, keys);
        while (seen > 0) {
            mask[(int64_t)n * length + keys[--seen]] = 1;
        }
    }
    if (keys == NULL) {
        free(mask);
        mask = NULL;
    }
    free(keys);
    return mask;
}

bool verify_rows(struct run_layer *layer, const struct step_lists *lists, const void *q, int32_t r,
                 int32_t length, int32_t first, int32_t count, const uint8_t *out,
                 const float *recorded)
{
    const struct row_terms *t = &layer->terms;
    const int64_t heads = t->num_q_heads, kv_heads = t->num_kv_heads;
    const int64_t rows = count * heads;
    double *memory =
        malloc((size_t)(rows * (t->head_size + t->head_size_v + 1) +
                        length * (kv_heads * (t->head_size + t->head_size_v) + 1) + 2 * heads) *
               sizeof *memory);
    double *at = memory;
    const bool listed = lists->entries != NULL;
    uint8_t *mask = listed ? mask_of(lists, length, first, count) : NULL;
    if (memory == NULL || (listed && mask == NULL)) {
        free(memory);
        free(mask);
        return false;
    }
    struct oracle_request o = {
        .num_q_heads = t->num_q_heads,
        .num_kv_heads = t->num_kv_heads,
        .head_size = t->head_size,
        .head_size_v = t->head_size_v,
        .num_queries = count,
        .num_keys = length,
        .q = widen(&at, q, rows * t->head_size, t->dtype),
        .k = widen(&at, layer->k_history[r], length * kv_heads * t->head_size, t->dtype),
        .v = widen(&at, layer->v_history[r], length * kv_heads * t->head_size_v, t->dtype),
        .scale = t->scale,
        .soft_cap = t->soft_cap,
        .causal = t->causal,
        .left = t->has_window ? t->window_left : -1,
        .right = t->has_window ? t->window_right : -1,
        .chunk = t->chunk_size,
        .lookback = t->chunk_lookback,
        .alibi = t->alibi_slopes != NULL,
        .slopes = widen_floats(&at, t->alibi_slopes, t->num_q_heads),
        .sinks = widen_floats(&at, t->sinks, t->num_q_heads),
        .listed = mask,
        .num_lists = lists->per_token};
    o.out = at;
    o.lse = at + rows * t->head_size_v;
    oracle_attend(&o, o.lse + rows);
    for (int64_t i = 0; i < rows; i++) {
        compare_row(layer, o.out + i * t->head_size_v, out, i * t->head_size_v, t->head_size_v,
                    recorded, &layer->tally);
    }
    free(memory);
    free(mask);
    return true;
}
