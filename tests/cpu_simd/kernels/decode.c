/* SPDX-License-Identifier: Apache-2.0 */
/* The decode path of a compute type: keys and values read in place, in the compute type or as
 * codes of a quantized cache. */
#include "kernels_test.h"

#include <stdio.h>

enum { TIMES = 30 };

static struct {
    _Alignas(64) uint8_t rows[DECODE_MAX_KEYS][4 * MAX_SIZE];
    _Alignas(64) uint8_t zero[4 * MAX_SIZE];
    _Alignas(64) uint8_t q[DECODE_ROWS * MAX_SIZE * 4];
    _Alignas(64) uint8_t packing[DECODE_ROWS * MAX_SIZE * 4];
    _Alignas(64) float scores[DECODE_ROWS * SCORE_STRIDE];
    _Alignas(64) float acc[DECODE_ROWS * MAX_SIZE];
    double a[DECODE_ROWS][MAX_SIZE];
    double b[DECODE_MAX_KEYS][MAX_SIZE];
    double old[DECODE_ROWS][MAX_SIZE];
    float q_scale[DECODE_ROWS];
    int32_t zeros[DECODE_MAX_KEYS + 3];
    const char *pointers[DECODE_MAX_KEYS];
    bool has_nan;
} it;

/* What a row of the cache holds. */
struct codes {
    const struct decode_kernels *decode;
    int32_t element;  /* enum element_type; ELEMENT_COUNT: int4 */
    int32_t multiple; /* head sizes are multiples of it */
    bool in_fours;    /* rows are blocks of 4 */
    const char *name;
};

/* One element becomes a NaN, which every way of reading e4m3 and e5m2 has to find. */
static void put_nan(const struct codes *codes, int32_t keys, int32_t size)
{
    int32_t j = (int32_t)draw((uint32_t)keys), d = (int32_t)draw((uint32_t)size);
    uint8_t *row = (uint8_t *)(uintptr_t)it.pointers[j];
    if (codes->element == kernels->element) {
        put_element(row, d, NAN);
    } else {
        row[d] = draw(2) ? 0xff : 0x7f;
    }
    it.b[j][d] = NAN;
}

static bool many_rows(const struct codes *codes, int32_t rows)
{
    return codes->decode->many_rows > 0 && rows >= codes->decode->many_rows;
}

static void fill_keys(const struct codes *codes, int32_t keys, int32_t size)
{
    bool in_order = draw(2); /* or no two next to each other */
    for (int32_t j = 0; j < keys; j++) {
        it.pointers[j] = (const char *)it.rows[in_order ? j : j * 37 % DECODE_MAX_KEYS];
        it.zeros[j] = (int32_t)draw(16);
        for (int32_t d = 0; d < size; d++) {
            uint32_t code = draw(256);
            if (codes->element == kernels->element) {
                it.b[j][d] = put_element((void *)(uintptr_t)it.pointers[j], d, draw_number(1.0f));
            } else if (codes->element == ELEMENT_COUNT) {
                uint8_t *pair = (uint8_t *)(uintptr_t)it.pointers[j] + d / 2;
                *pair = (uint8_t)(d % 2 == 0 ? code & 15 : (*pair & 15) | (code & 15) << 4);
                it.b[j][d] = (double)(code & 15) - it.zeros[j];
            } else {
                while (!isfinite(code_value(codes->element, code))) {
                    code = draw(256);
                }
                ((uint8_t *)(uintptr_t)it.pointers[j])[d] = (uint8_t)code;
                it.b[j][d] = code_value(codes->element, code);
            }
        }
    }
    bool whole = codes->element == ELEMENT_INT8 || codes->element == ELEMENT_COUNT;
    it.has_nan = !whole && draw(4) == 0;
    if (it.has_nan) {
        put_nan(codes, keys, size);
    }
}

/* Queries of `size` dims; int4's arrive as two parts that add up, each of half the row. */
static void fill_queries(const struct codes *codes, int32_t rows, int32_t size)
{
    bool two = codes->element == ELEMENT_COUNT;
    int32_t length = two ? 2 * size : size;
    for (int32_t r = 0; r < rows; r++) {
        uint8_t *row = it.q + (int64_t)r * length * kernels->element_bytes;
        for (int32_t d = 0; d < size; d++) {
            it.a[r][d] = put_element(row, d, draw_number(1.0f));
            if (two) {
                it.a[r][d] += put_element(row, size + d, draw_number(0.004f));
            }
        }
        it.q_scale[r] = 1.0f;
        if (codes->decode->order != NULL) {
            it.q_scale[r] = codes->decode->order(row, length);
        }
    }
    if (codes->decode->pack != NULL) {
        codes->decode->pack(it.q, it.packing, rows, length);
    }
}

/* Times scores or values of these rows. */
static void bench_decode(const struct codes *codes, const struct decode_args *args,
                         const char *what)
{
    char name[64];
    snprintf(name, sizeof name, "%s %s, %d x %d x %d", codes->name, what, args->rows, args->keys,
             args->depth);
    if (what[0] == 's') {
        BENCH(name, codes->decode->scores(it.scores, it.q, args))
    } else {
        BENCH(name, codes->decode->values(it.acc, it.scores, args))
    }
}

static void check_scores(const struct codes *codes, int32_t time, int32_t rows, int32_t keys,
                         int32_t size)
{
    bool whole = codes->element == ELEMENT_INT8 || codes->element == ELEMENT_COUNT;
    struct decode_args args = {.keys = keys,
                               .rows = rows,
                               .q_scale = it.q_scale,
                               .zeros = it.zeros,
                               .depth = codes->element == ELEMENT_COUNT ? 2 * size : size,
                               .key_rows = it.pointers,
                               .zero_row = it.zero,
                               .element = codes->element};
    fill_keys(codes, keys, size);
    fill_queries(codes, rows, size);
    codes->decode->scores(it.scores, it.q, &args);
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t j = 0; j < keys; j++) {
            double sum = 0, total = 0, sizes = 0;
            for (int32_t d = 0; d < size; d++) {
                sum += it.a[r][d] * it.b[j][d];
                total += fabs(it.a[r][d] * it.b[j][d]);
                sizes += fabs(it.b[j][d]);
            }
            /* q as 16-bit whole numbers is off by half a step of its largest */
            double bound = size * 0x1p-24 * total + (whole ? 0.51 * it.q_scale[r] * sizes : 0);
            check_near(it.scores[r * SCORE_STRIDE + j], sum, bound, codes->name, r, j);
        }
    }
    if (time == 0) {
        bench_decode(codes, &args, "scores");
    }
}

static void check_values(const struct codes *codes, int32_t time, int32_t rows, int32_t keys,
                         int32_t size)
{
    struct decode_args args = {.keys = keys,
                               .rows = rows,
                               .zeros = it.zeros,
                               .depth = size,
                               .key_rows = it.pointers,
                               .zero_row = it.zero,
                               .element = codes->element};
    double p[DECODE_ROWS][DECODE_MAX_KEYS];
    fill_keys(codes, keys, size);
    memset(it.scores, 0, sizeof it.scores);
    memset(it.acc, 0, sizeof it.acc);
    memset(it.old, 0, sizeof it.old);
    for (int32_t again = 0; again < 2; again++) { /* the second adds to the first */
        for (int32_t r = 0; r < rows; r++) {
            for (int32_t j = 0; j < keys; j++) {
                p[r][j] = put_element(it.scores + r * SCORE_STRIDE, j, draw_number(1.0f));
            }
            for (int32_t d = 0; d < size; d++) {
                for (int32_t j = 0; j < keys; j++) {
                    it.old[r][d] += p[r][j] * it.b[j][d];
                }
            }
        }
        codes->decode->values(it.acc, it.scores, &args);
    }
    if (codes->decode->finish != NULL && !codes->decode->finish(it.acc, rows, size)) {
        assert_true(it.has_nan);
        return;
    }
    for (int32_t r = 0; r < rows; r++) {
        for (int32_t d = 0; d < size; d++) {
            double total = 0;
            for (int32_t j = 0; j < keys; j++) {
                total += 2 * fabs(it.b[j][d]);
            }
            check_near(it.acc[r * size + d], it.old[r][d], keys * 0x1p-22 * total, codes->name, r,
                       d);
        }
    }
    if (time == 0) {
        bench_decode(codes, &args, "values");
    }
}

static void check_codes(const struct codes *codes)
{
    if (codes->decode == NULL) {
        return;
    }
    for (int32_t rows = 4; rows <= DECODE_ROWS; rows *= 2) { /* the cases that --bench times */
        check_scores(codes, 0, rows, 64, 128);
        check_values(codes, 0, rows, 64, 128);
    }
    for (int32_t time = 1; time < TIMES; time++) {
        int32_t fours = 4 * (1 + (int32_t)draw(DECODE_ROWS / 4));
        int32_t rows = !codes->in_fours && draw(3) == 0 ? 1 : fours;
        int32_t most = many_rows(codes, rows) ? DECODE_MAX_KEYS : DECODE_KEYS;
        int32_t keys = 1 + (int32_t)draw((uint32_t)most);
        int32_t size = codes->multiple * (1 + (int32_t)draw((uint32_t)(256 / codes->multiple)));
        check_scores(codes, time, rows, keys, size);
        check_values(codes, time, rows, keys, size);
    }
}

void test_decode(void **state)
{
    check_codes(&(struct codes){kernels->decode, kernels->element, 32, false, "decode"});
}

void test_decode_codes(void **state)
{
    check_codes(&(struct codes){kernels->decode_fp8, ELEMENT_E4M3, 64, true, "decode e4m3"});
    check_codes(&(struct codes){kernels->decode_fp8, ELEMENT_E5M2, 64, true, "decode e5m2"});
    check_codes(&(struct codes){kernels->decode_int8, ELEMENT_INT8, 64, true, "decode int8"});
    check_codes(&(struct codes){kernels->decode_int4, ELEMENT_COUNT, 64, true, "decode int4"});
}
