/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX engine's flash, on emulated tiles, against sums in double: masks, padding, rows
 * whose row_max is raised in the middle of a tile. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "cpu_simd/kernels.h"
#include "support/number.h"
#include "support/random.h"
#include "support/test.h"

enum { MAX_ROWS = 96, MAX_TILES = 2, MAX_KEYS = MAX_TILES * FLASH_KEYS, MAX_SIZE = 160 };

enum mask { MASK_NONE, MASK_CAUSAL, MASK_RANDOM };

static struct {
    _Alignas(64) uint16_t q[MAX_ROWS * MAX_SIZE];
    _Alignas(64) uint16_t k[MAX_KEYS][MAX_SIZE];
    _Alignas(64) uint16_t v[MAX_KEYS][MAX_SIZE];
    _Alignas(64) uint16_t keys[MAX_TILES][FLASH_KEYS * MAX_SIZE];
    _Alignas(64) uint16_t values[MAX_TILES][FLASH_KEYS * MAX_SIZE];
    _Alignas(64) float out[MAX_ROWS * MAX_SIZE];
    float row_max[MAX_ROWS];
    float row_sum[MAX_ROWS];
    int32_t low[MAX_ROWS]; /* first visible key, counted over all tiles */
    int32_t high[MAX_ROWS];
    int32_t tile_low[MAX_TILES][MAX_ROWS];
    int32_t tile_high[MAX_TILES][MAX_ROWS];
    struct flash_block blocks[MAX_TILES][MAX_ROWS / FLASH_ROWS];
} it;

static uint64_t random_state = 20261121;

static double value_of(uint16_t x)
{
    return number_load(&x, 0, ATTN_DTYPE_BF16);
}

static uint16_t draw_value(float size)
{
    uint16_t x;
    number_store(&x, 0, ATTN_DTYPE_BF16, random_within(&random_state, (double)size));
    return x;
}

struct shape {
    int32_t rows, keys, depth, width;
    enum mask mask;
    float growth; /* later keys are larger by it, so that references are raised */
};

static int32_t in_tile(int32_t key, int32_t tile)
{
    int32_t column = key - tile * FLASH_KEYS;
    return column < 0 ? 0 : column > FLASH_KEYS ? FLASH_KEYS : column;
}

static void fill(const struct shape *shape)
{
    memset(&it, 0, sizeof it);
    for (int32_t i = 0; i < shape->rows * shape->depth; i++) {
        it.q[i] = draw_value(1.0f);
    }
    for (int32_t j = 0; j < shape->keys; j++) {
        float size = 1.0f + shape->growth * (float)j / (float)shape->keys;
        for (int32_t d = 0; d < shape->depth; d++) {
            it.k[j][d] = draw_value(size);
        }
        for (int32_t d = 0; d < shape->width; d++) {
            it.v[j][d] = draw_value(1.0f);
        }
    }
    for (int32_t r = 0; r < shape->rows; r++) {
        it.high[r] = shape->keys;
        if (shape->mask == MASK_CAUSAL) {
            it.high[r] = shape->keys - (shape->rows - 1 - r) / 2;
        } else if (shape->mask == MASK_RANDOM) {
            it.low[r] = random_below(&random_state, shape->keys);
            it.high[r] = random_below(&random_state, shape->keys + 1);
        }
    }
}

/* What of the tile each block sees, as the plugin finds it. */
static void find_blocks(const struct shape *shape, int32_t tile, bool *seen)
{
    int32_t padded = (shape->rows + FLASH_ROWS - 1) / FLASH_ROWS * FLASH_ROWS;
    for (int32_t r = 0; r < shape->rows; r++) {
        it.tile_low[tile][r] = in_tile(it.low[r], tile);
        it.tile_high[tile][r] = in_tile(it.high[r], tile);
    }
    for (int32_t first = 0; first < padded; first += FLASH_ROWS) {
        int32_t low = FLASH_KEYS, high = 0;
        struct flash_block *block = &it.blocks[tile][first / FLASH_ROWS];
        for (int32_t r = first; r < first + FLASH_ROWS && r < shape->rows; r++) {
            if (it.tile_high[tile][r] > it.tile_low[tile][r]) {
                low = it.tile_low[tile][r] < low ? it.tile_low[tile][r] : low;
                high = it.tile_high[tile][r] > high ? it.tile_high[tile][r] : high;
            }
        }
        if (high > low) {
            *block = (struct flash_block){low / 32 * 32, (high + 31) / 32 * 32, 0,
                                          !seen[first / FLASH_ROWS]};
            seen[first / FLASH_ROWS] = true;
        }
        for (int32_t r = first; r < first + FLASH_ROWS && r < shape->rows; r++) {
            block->masked |= it.tile_low[tile][r] > block->begin;
            block->masked |= it.tile_high[tile][r] < block->end;
        }
    }
}

static void attend(const struct flash_kernels *flash, const struct shape *shape, int32_t tile)
{
    const struct flash_args args = {.keys = it.keys[tile],
                                    .values = it.values[tile],
                                    .blocks = it.blocks[tile],
                                    .low = it.tile_low[tile],
                                    .high = it.tile_high[tile],
                                    .q = it.q,
                                    .acc_o = it.out,
                                    .depth = shape->depth,
                                    .width = shape->width,
                                    .num_blocks = (shape->rows + FLASH_ROWS - 1) / FLASH_ROWS,
                                    .softmax_scale_log2 =
                                        1.44269504f / sqrtf((float)shape->depth) * 4.0f,
                                    .row_max = it.row_max,
                                    .row_sum = it.row_sum};
    flash->attend(&args);
}

/* The row in double, against the result; the error is one of probabilities rounded to bf16. */
static void verify_row(const struct shape *shape, int32_t r)
{
    double factor = 1.44269504 / sqrt((double)shape->depth) * 4.0;
    static double score[MAX_KEYS];
    double most = -INFINITY, sum = 0;
    for (int32_t j = it.low[r]; j < it.high[r]; j++) {
        score[j] = 0;
        for (int32_t d = 0; d < shape->depth; d++) {
            score[j] += value_of(it.q[r * shape->depth + d]) * value_of(it.k[j][d]);
        }
        score[j] *= factor;
        most = score[j] > most ? score[j] : most;
    }
    for (int32_t j = it.low[r]; j < it.high[r]; j++) {
        sum += exp2(score[j] - most);
    }
    if (it.high[r] <= it.low[r]) {
        assert_true(it.row_sum[r] == 0.0f && it.row_max[r] == -INFINITY);
        return;
    }
    double log_sum = (double)it.row_max[r] + log2((double)it.row_sum[r]);
    /* the exponential is off by 7.5e-5; of rounded probabilities the sum would be by 2e-3 */
    assert_true(fabs(log_sum - (most + log2(sum))) < 2e-4);
    for (int32_t d = 0; d < shape->width; d++) {
        double exact = 0, size = 0;
        for (int32_t j = it.low[r]; j < it.high[r]; j++) {
            double term = exp2(score[j] - most) / sum * value_of(it.v[j][d]);
            exact += term;
            size += fabs(term);
        }
        double got = (double)it.out[r * shape->width + d] / (double)it.row_sum[r];
        if (!(fabs(got - exact) <= size / 128 + 1e-6)) {
            fail_msg("row %d, column %d is %g, not %g (%d rows, %d keys, %d x %d, mask %d)", r, d,
                     got, exact, shape->rows, shape->keys, shape->depth, shape->width,
                     (int)shape->mask);
        }
    }
}

static void hold(const struct shape *shape)
{
    const struct flash_kernels *flash = variant_amx.bf16->flash;
    int32_t tiles = (shape->keys + FLASH_KEYS - 1) / FLASH_KEYS;
    bool seen[MAX_ROWS / FLASH_ROWS] = {false};
    fill(shape);
    for (int32_t t = 0; t < tiles; t++) {
        const void *keys[FLASH_KEYS], *values[FLASH_KEYS];
        int32_t n = in_tile(shape->keys, t);
        for (int32_t j = 0; j < n; j++) {
            keys[j] = it.k[t * FLASH_KEYS + j];
            values[j] = it.v[t * FLASH_KEYS + j];
        }
        flash->pack_keys(it.keys[t], keys, n, (n + 31) / 32 * 32, shape->depth);
        assert_int_equal(
            flash->pack_values(it.values[t], values, n, (n + 31) / 32 * 32, shape->width), 0);
        find_blocks(shape, t, seen);
    }
    for (int32_t r = 0; r < MAX_ROWS; r++) {
        it.row_max[r] = -INFINITY;
    }
    for (int32_t t = 0; t < tiles; t++) {
        attend(flash, shape, t);
    }
    for (int32_t r = 0; r < shape->rows; r++) {
        verify_row(shape, r);
    }
}

TEST(test_rows_and_masks)
{
    for (int32_t i = 0; i < 90; i++) {
        struct shape shape = {.rows = 17 + random_below(&random_state, MAX_ROWS - 16),
                              .depth = 32 + 32 * random_below(&random_state, 5),
                              .width = 32 + 32 * random_below(&random_state, 5),
                              .mask = (enum mask)(i % 3),
                              .growth = i % 4 == 3 ? 8.0f : 0.0f};
        shape.keys = shape.rows + random_below(&random_state, MAX_KEYS + 1 - shape.rows);
        hold(&shape);
    }
}

TEST(test_what_is_not_finite)
{
    static const uint16_t non_finite[] = {0x7f80, 0xff80, 0x7fc0, 0xffff};
    const struct flash_kernels *flash = variant_amx.bf16->flash;
    const void *rows[FLASH_KEYS];
    memset(&it, 0, sizeof it);
    for (int32_t j = 0; j < FLASH_KEYS; j++) {
        rows[j] = it.v[j];
    }
    it.v[3][5] = 0xff7f; /* the largest that is */
    assert_int_equal(flash->pack_values(it.values[0], rows, 40, 64, 96), 0);
    for (size_t i = 0; i < sizeof non_finite / sizeof *non_finite; i++) {
        it.v[39][95] = non_finite[i];
        assert_int_equal(flash->pack_values(it.values[0], rows, 40, 64, 96), 1);
        assert_int_equal(flash->pack_values(it.values[0], rows, 39, 64, 96), 0);
    }
}

int main(void)
{
    if (!__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vbmi") || !__builtin_cpu_supports("avx512vnni")) {
        return 77;
    }
    return test_run(NULL, NULL);
}
