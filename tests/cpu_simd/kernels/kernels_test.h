/* SPDX-License-Identifier: Apache-2.0 */
/* Every slot of every ISA level that this machine has, against plain C in double. With --bench the
 * same calls are timed. */
#ifndef TESTS_CPU_SIMD_KERNELS_TEST_H
#define TESTS_CPU_SIMD_KERNELS_TEST_H

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "cpu_simd/kernels.h"

enum { MAX_SIZE = 512 }; /* the largest head in these tests */

/* What is being tested: set by main for each variant and compute type. */
extern const struct variant *variant;
extern const struct tile_kernels *kernels; /* one of the variant's */

/* A whole number below `below`, a number in -size .. size, and one element of the compute type. */
uint32_t draw(uint32_t below);
float draw_number(float size);
/* Elements of the compute type: stores the nearest one, and gives it back. */
double put_element(void *elements, int64_t at, float x);
double element_at(const void *elements, int64_t at);
/* The number that a code stands for, by its definition. */
double code_value(int32_t element, uint32_t code);
/* Relative rounding of one element of the compute type. */
double element_step(void);

/* |found - wanted| <= bound, or both NaN; a failure names `what` and the place. */
void check_near(double found, double wanted, double bound, const char *what, int32_t i, int32_t j);

/* Times calls of a slot where --bench is given: CALL is repeated. */
#define BENCH(name, call)                                                                          \
    for (struct bench bench = bench_begin(name); bench_more(&bench);) {                            \
        call;                                                                                      \
    }
struct bench {
    const char *name;
    int64_t calls; /* calls in this batch */
    double least;  /* seconds of a batch */
    double begin;  /* when this batch began */
    double first;
};
struct bench bench_begin(const char *name);
bool bench_more(struct bench *bench);

void test_unpack(void **state);
void test_scores_gemm(void **state);
void test_values_gemm(void **state);
void test_softmax(void **state);
void test_decode(void **state);
void test_decode_codes(void **state);
void test_index_scores(void **state);
void test_terms(void **state);
void test_rows(void **state);
void test_store(void **state);
void test_nibbles(void **state);
void test_delta(void **state);
void test_walk(void **state);
void test_merge(void **state);
void test_convolve(void **state);
void test_head_sums(void **state);
void test_normalize(void **state);
void test_transpose(void **state);
void test_gates(void **state);
void test_decays(void **state);
void test_products(void **state);
void test_encode(void **state);
void test_encode_int4(void **state);
void test_blocks(void **state);

#endif
