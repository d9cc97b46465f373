/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of queries, keys and values: drawn or recorded, and outputs against the oracle. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define LOGIT_DEVIATION 4.0
#define NEEDLE_LOGIT 13.0

size_t element_bytes(const struct run_layer *layer)
{
    return layer->terms.number == ORACLE_F32 ? 4 : 2;
}

static struct attn_dtype tensor_dtype(const struct run_layer *layer)
{
    static const struct attn_dtype dtypes[] = {
        {ATTN_CODE_FLOAT, 16, 1}, {ATTN_CODE_BFLOAT, 16, 1}, {ATTN_CODE_FLOAT, 32, 1}};
    return dtypes[layer->terms.number];
}

struct attn_tensor tensor_of(const struct engine *engine, const struct run_layer *layer, void *data,
                             int32_t ndim, int64_t *shape, int64_t *strides)
{
    return (struct attn_tensor){
        data, engine->device.device, ndim, tensor_dtype(layer), shape, strides, 0};
}

void rows_init(struct rows *rows, const struct run_layer *layer, int64_t count, int32_t heads,
               int32_t dims, bool poison)
{
    *rows = (struct rows){.shape = {count, heads, dims}};
    rows->bytes = (size_t)count * (size_t)heads * (size_t)dims * element_bytes(layer);
    rows->host = malloc(rows->bytes + 1);
    if (rows->host != NULL && poison) {
        memset(rows->host, 0xff, rows->bytes);
    }
}

attn_status rows_send(struct engine *engine, const struct run_layer *layer, struct rows *rows)
{
    void *memory = pool_send(engine, &engine->rows, rows->host, rows->bytes);
    rows->tensor = tensor_of(engine, layer, memory, 3, rows->shape, NULL);
    return memory != NULL ? ATTN_OK : engine->error.status;
}

const float *recorded_row(const struct engine *engine, const struct run_layer *layer, int32_t which,
                          int32_t r, int64_t row)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t width = which == 0 || which == 3 ? (int64_t)t->num_q_heads * t->head_size
                                             : (int64_t)t->num_kv_heads * t->head_size;
    return layer->recorded[which] != NULL
               ? layer->recorded[which] + (engine->requests[r].first_row + row) * width
               : NULL;
}

attn_status add_keys(struct engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                     int32_t end, int32_t capacity)
{
    const struct oracle_terms *t = &layer->terms;
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
            oracle_write(*histories[i], at, t->number,
                         recorded != NULL ? (double)*recorded++ : random_normal(&engine->random));
        }
    }
    return ATTN_OK;
}

/* A query that looks for one key that it can see, with noise of the other logits' deviation. */
static void draw_query(struct engine *engine, const struct run_layer *layer, int32_t r,
                       int64_t position, int64_t length, uint8_t *row)
{
    const struct oracle_terms *t = &layer->terms;
    int64_t reach = position + 1 < length ? position + 1 : length;
    int64_t window =
        t->has_window && t->window_left >= 0 && t->window_left < reach ? t->window_left + 1 : reach;
    int64_t j = t->causal ? reach - 1 - random_below(&engine->random, (int32_t)window)
                          : random_below(&engine->random, (int32_t)length);
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        int64_t key = (j * t->num_kv_heads + h / (t->num_q_heads / t->num_kv_heads)) * t->head_size;
        double norm = 0, deviation = LOGIT_DEVIATION / (t->scale * sqrt(t->head_size));
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = oracle_read(layer->k_history[r], key + d, t->number);
            norm += x * x;
        }
        for (int32_t d = 0; d < t->head_size; d++) {
            double x = oracle_read(layer->k_history[r], key + d, t->number);
            oracle_write(row, (int64_t)h * t->head_size + d, t->number,
                         NEEDLE_LOGIT / (t->scale * norm) * x +
                             deviation * random_normal(&engine->random));
        }
    }
}

void make_query(struct engine *engine, const struct run_layer *layer, int32_t r, int64_t position,
                int64_t length, uint8_t *row)
{
    const float *recorded = recorded_row(engine, layer, 0, r, position);
    if (recorded != NULL) {
        memcpy(row, recorded,
               (size_t)(layer->terms.num_q_heads * layer->terms.head_size) * sizeof *recorded);
    } else {
        draw_query(engine, layer, r, position, length, row);
    }
}

static double bound_ratio(int32_t number, double rms, double expected, double found)
{
    /* |error| <= a RMS of the row + b |expected|: probabilities and outputs rounded to the format.
     */
    static const double a[] = {3e-3, 2e-2, 4e-5}, b[] = {2e-3, 1.2e-2, 2e-5};
    double ratio = fabs(found - expected) / (a[number] * rms + b[number] * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

/* The recording is a float32 computation itself. */
static double recording_ratio(double rms, double expected, double found)
{
    double ratio = fabs(found - expected) / (2e-5 * rms + 1e-5 * fabs(expected) + 1e-30);
    return isnan(ratio) ? INFINITY : ratio;
}

void compare_row(const struct run_layer *layer, const double *expected, const void *out, int64_t at,
                 int32_t count, struct tally *tally)
{
    double sum = 0;
    for (int32_t d = 0; d < count; d++) {
        sum += expected[d] * expected[d];
    }
    for (int32_t d = 0; d < count; d++) {
        double ratio = bound_ratio(layer->terms.number, sqrt(sum / count), expected[d],
                                   oracle_read(out, at + d, layer->terms.number));
        ratio /= layer->roundings > 0 ? layer->roundings : 1;
        tally->max_error = ratio > tally->max_error ? ratio : tally->max_error;
        tally->compared++;
    }
}

/* `recorded` is the row's recorded output, or NULL. */
void verify_row(struct run_layer *layer, const void *q, int32_t r, int64_t length, int64_t position,
                const uint8_t *out, const float *recorded)
{
    const struct oracle_terms *t = &layer->terms;
    double expected[1024];
    for (int32_t h = 0; h < t->num_q_heads; h++) {
        double sum = 0;
        oracle_attend(t, q, layer->k_history[r], layer->v_history[r], length, position, h,
                      expected);
        for (int32_t d = 0; d < t->head_size_v; d++) {
            sum += expected[d] * expected[d];
        }
        for (int32_t d = 0; d < t->head_size_v; d++) {
            int64_t at = (int64_t)h * t->head_size_v + d;
            double found = oracle_read(out, at, t->number), rms = sqrt(sum / t->head_size_v);
            double ratio = bound_ratio(t->number, rms, expected[d], found);
            if (recorded != NULL) {
                ratio = fmax(ratio, recording_ratio(rms, (double)recorded[at], found));
            }
            layer->max_error = ratio > layer->max_error ? ratio : layer->max_error;
            layer->compared++;
        }
    }
}
