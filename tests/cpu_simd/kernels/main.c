/* SPDX-License-Identifier: Apache-2.0 */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "kernels_test.h"

#include <stdio.h>
#include <time.h>

#include "support/number.h"

const struct variant *variant;
const struct tile_kernels *kernels;

static bool benching;
static uint64_t random_state;

uint32_t draw(uint32_t below)
{
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(((random_state >> 33) * below) >> 31);
}

float draw_number(float size)
{
    return ((float)draw(1u << 24) / (float)(1 << 23) - 1.0f) * size;
}

static const int32_t dtypes[] = {
    [ELEMENT_F32] = ATTN_DTYPE_F32,       [ELEMENT_F16] = ATTN_DTYPE_F16,
    [ELEMENT_BF16] = ATTN_DTYPE_BF16,     [ELEMENT_E4M3] = ATTN_DTYPE_FP8_E4M3,
    [ELEMENT_E5M2] = ATTN_DTYPE_FP8_E5M2, [ELEMENT_INT8] = ATTN_DTYPE_INT8};

double code_value(int32_t element, uint32_t code)
{
    return number_load(&code, 0, dtypes[element]);
}

double element_at(const void *elements, int64_t at)
{
    return number_load(elements, at, dtypes[kernels->element]);
}

double put_element(void *elements, int64_t at, float x)
{
    number_store(elements, at, dtypes[kernels->element], (double)x);
    return element_at(elements, at);
}

double element_step(void)
{
    return kernels->element == ELEMENT_F32 ? 0x1p-24 : 0x1p-8;
}

void check_near(double found, double wanted, double bound, const char *what, int32_t i, int32_t j)
{
    if (!(fabs(found - wanted) <= bound) && !(isnan(found) && isnan(wanted)) && found != wanted) {
        fail_msg("%s, %s: [%d][%d] is %.9g, not %.9g within %.3g", variant->name, what, i, j, found,
                 wanted, bound);
    }
}

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

#define BENCH_CALLS 32    /* calls in a batch: some microseconds to a millisecond */
#define BENCH_SECONDS 0.1 /* time for batches; the least counts, since others use the machine */

struct bench bench_begin(const char *name)
{
    double now = seconds();
    return (struct bench){name, 0, INFINITY, now, now};
}

bool bench_more(struct bench *bench)
{
    if (benching && bench->calls++ < BENCH_CALLS) {
        return true;
    }
    if (!benching) {
        return false;
    }
    double now = seconds();
    double elapsed = now - bench->begin;
    bench->least = elapsed < bench->least ? elapsed : bench->least;
    if (now - bench->first < BENCH_SECONDS) {
        bench->calls = 1;
        bench->begin = seconds();
        return true;
    }
    printf("%-11s %-4s %-28s %10.1f ns\n", variant->name,
           kernels->element == ELEMENT_F32 ? "f32" : "bf16", bench->name,
           1e9 * bench->least / BENCH_CALLS);
    return false;
}

static int enter(void **state)
{
    return variant->enter != NULL && variant->enter() != 0;
}

static int leave(void **state)
{
    if (variant->leave != NULL) {
        variant->leave();
    }
    return 0;
}

/* usage: test_kernels [--bench] */
int main(int argc, char **argv)
{
    const struct CMUnitTest of_compute_type[] = {
        cmocka_unit_test(test_unpack),       cmocka_unit_test(test_scores_gemm),
        cmocka_unit_test(test_values_gemm),  cmocka_unit_test(test_softmax),
        cmocka_unit_test(test_decode),       cmocka_unit_test(test_decode_codes),
        cmocka_unit_test(test_index_scores),
    };
    const struct CMUnitTest of_variant[] = {
        cmocka_unit_test(test_terms),     cmocka_unit_test(test_rows),
        cmocka_unit_test(test_store),     cmocka_unit_test(test_nibbles),
        cmocka_unit_test(test_delta),     cmocka_unit_test(test_convolve),
        cmocka_unit_test(test_normalize), cmocka_unit_test(test_gates),
        cmocka_unit_test(test_decays),    cmocka_unit_test(test_products),
        cmocka_unit_test(test_encode),    cmocka_unit_test(test_encode_int4),
        cmocka_unit_test(test_blocks),    cmocka_unit_test(test_walk),
        cmocka_unit_test(test_merge),     cmocka_unit_test(test_head_sums),
        cmocka_unit_test(test_transpose),
    };
    const struct variant *variants[8];
    char isa[128];
    int failed = 0;
    int32_t count = variants_of_machine(variants, 8, isa, sizeof isa);
#ifdef EMULATED_TILES /* the amx level alone, on any machine with the vectors next to its tiles */
    bool amx_vectors = false;
    for (int32_t i = 0; i < count; i++) {
        amx_vectors = amx_vectors || strcmp(variants[i]->name, "avx512bf16") == 0;
    }
    if (!amx_vectors) {
        return 77;
    }
    variants[0] = &variant_amx;
    count = 1;
#endif
    benching = argc > 1 && strcmp(argv[1], "--bench") == 0;
    random_state = 20261122;
    for (int32_t i = 0; i < count; i++) {
        variant = variants[i];
        printf("variant %s\n", variant->name);
        for (int32_t e = 0; e < 2; e++) {
            kernels = e == 0 ? variant->f32 : variant->bf16;
            if (kernels != NULL) {
                failed += cmocka_run_group_tests_name(e == 0 ? "f32" : "bf16", of_compute_type,
                                                      enter, leave);
            }
        }
        kernels = variant->f32;
        failed += cmocka_run_group_tests_name("rows", of_variant, enter, leave);
    }
    return failed;
}
