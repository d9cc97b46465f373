/* SPDX-License-Identifier: Apache-2.0 */
/* An indexer's scores summed at once, of whole numbers, whose sums have one right value. */
#include "kernels_test.h"

enum { TIMES = 30, LISTS = 3, HEADS = 3 * INDEX_HEADS, MOST_DEPTH = 128 };

static struct {
    _Alignas(64) uint8_t rows[TILE_KEYS][4 * MOST_DEPTH];
    _Alignas(64) uint8_t staged[TILE_KEYS * 4 * MOST_DEPTH];
    _Alignas(64) uint8_t q[LISTS * HEADS * 4 * MOST_DEPTH];
    _Alignas(64) uint8_t packed[LISTS * HEADS * 4 * MOST_DEPTH];
    double a[LISTS * HEADS][MOST_DEPTH];
    double b[TILE_KEYS][MOST_DEPTH];
    float factors[TILE_KEYS], weights[LISTS * HEADS];
    int32_t out[LISTS * TILE_KEYS];
    const char *pointers[TILE_KEYS];
} it;

static void fill_index(const struct index_args *args, bool negative, bool nan)
{
    const int32_t depth = args->keys.depth, rows = args->lists * args->heads;
    const bool in_order = draw(2); /* or no two next to each other */
    const void *q[INDEX_HEADS];
    for (int32_t j = 0; j < args->keys.keys; j++) {
        it.pointers[j] = (const char *)it.rows[in_order ? j : j * 37 % TILE_KEYS];
        it.factors[j] = negative && draw(2) ? -0.5f : 0.25f;
        for (int32_t d = 0; d < depth; d++) {
            const float x = nan && j == 3 && d == 5 ? NAN : (float)draw(5) - 2;
            it.b[j][d] = put_element((void *)(uintptr_t)it.pointers[j], d, x);
        }
    }
    for (int32_t r = 0; r < rows; r++) {
        uint8_t *row = it.q + (int64_t)r * depth * kernels->element_bytes;
        it.weights[r] = (float)draw(5) - 2;
        q[r % INDEX_HEADS] = row;
        for (int32_t d = 0; d < depth; d++) {
            it.a[r][d] = put_element(row, d, (float)draw(5) - 2);
        }
        if (r % INDEX_HEADS == INDEX_HEADS - 1) {
            kernels->flash->pack_keys(it.packed + (int64_t)(r - r % INDEX_HEADS) * depth *
                                                      kernels->element_bytes,
                                      q, INDEX_HEADS, INDEX_HEADS, depth);
        }
    }
}

static double index_sum(const struct index_args *args, int32_t list, int32_t j)
{
    double sum = 0;
    for (int32_t r = list * args->heads; r < (list + 1) * args->heads; r++) {
        double score = 0;
        for (int32_t d = 0; d < args->keys.depth; d++) {
            score += it.a[r][d] * it.b[j][d];
        }
        score *= (double)it.factors[j];
        sum += (double)it.weights[r] * (args->relu && score < 0 ? 0 : score);
    }
    return sum;
}

void test_index_scores(void **state)
{
    for (int32_t time = 0; time < TIMES && kernels->index_scores != NULL; time++) {
        const bool negative = draw(2) == 1;
        const struct index_args args = {
            .keys = {.keys = 1 + (int32_t)draw(TILE_KEYS),
                     .depth = DEPTH_MULTIPLE * (1 + (int32_t)draw(MOST_DEPTH / DEPTH_MULTIPLE)),
                     .key_rows = it.pointers},
            .staged = (char *)it.staged,
            .q = it.packed,
            .out = it.out,
            .factors = it.factors,
            .weights = it.weights,
            .lists = 1 + (int32_t)draw(LISTS),
            .heads = INDEX_HEADS * (1 + (int32_t)draw(HEADS / INDEX_HEADS)),
            .relu = draw(2) == 1,
            .scaled = negative || draw(2) == 1};
        fill_index(&args, negative, draw(4) == 0);
        kernels->index_scores(&args);
        for (int32_t i = 0; i < args.lists * args.keys.keys; i++) {
            const int32_t list = i / args.keys.keys, j = i % args.keys.keys;
            const double sum = index_sum(&args, list, j);
            int32_t bits = it.out[list * TILE_KEYS + j];
            float found = NAN;
            if (bits != INT32_MAX) {
                bits ^= (bits >> 31) & INT32_MAX;
                memcpy(&found, &bits, sizeof found);
            }
            check_near((double)found, sum, 0, "sum", list, j);
        }
    }
    const struct index_args args = {
        .keys = {.keys = TILE_KEYS, .depth = MOST_DEPTH, .key_rows = it.pointers},
        .staged = (char *)it.staged,
        .q = it.packed,
        .out = it.out,
        .factors = it.factors,
        .weights = it.weights,
        .lists = 1,
        .heads = 2 * INDEX_HEADS};
    if (kernels->index_scores != NULL) {
        fill_index(&args, false, false);
        BENCH("an indexer's 64 x 128 x 128", kernels->index_scores(&args))
    }
}
