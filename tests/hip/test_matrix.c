/* SPDX-License-Identifier: Apache-2.0 */
/* The interpreter's matrix instructions against tables of where each element lies. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "isa/isa.h"
#include "matrix_places.h"

#define REG_A 0
#define REG_B 8
#define REG_D 16

static struct wave *wave;

/* Small integers, which f16 and bf16 hold exactly. */
static uint16_t code_of(bool bf16, int x)
{
    return bf16 ? (uint16_t)(as_bits((float)x) >> 16) : float_to_half((float)x);
}

/* Into the table's lane, and into the one that holds the same on RDNA3. */
static void put(unsigned first, uint16_t place, uint16_t bits, bool twice)
{
    unsigned lane = place / 2 % 128, reg = first + place / 256, shift = 16 * (place & 1u);
    for (unsigned l = lane; l <= lane + (twice ? 16 : 0); l += 16) {
        wave->v[reg][l] = (wave->v[reg][l] & ~(0xffffu << shift)) | (uint32_t)bits << shift;
    }
}

static void fill(const struct matrix_places *places, bool bf16, bool twice, int (*a)[16],
                 int (*b)[16])
{
    srand(11);
    for (int r = 0; r < 16; r++) {
        for (int c = 0; c < 16; c++) {
            a[r][c] = rand() % 17 - 8;
            b[r][c] = rand() % 17 - 8;
            put(REG_A, places->a[r][c], code_of(bf16, a[r][c]), twice);
            put(REG_B, places->b[r][c], code_of(bf16, b[r][c]), twice);
        }
    }
}

static void check(const char *name, int major, const struct matrix_places *places, bool bf16)
{
    const struct op *op = op_find(name, strlen(name), major);
    const int lanes = major == 9 ? 64 : 32;
    struct machine machine = {0};
    struct code code = {.wave_size = lanes};
    struct group group = {.machine = &machine, .code = &code};
    uint8_t words = major == 9 ? 2 : major == 11 ? 8 : 4, sums = lanes == 64 ? 4 : 8;
    struct insn i = {.op = op,
                     .num_dst = 1,
                     .num_src = 3,
                     .dst = {{.kind = OPERAND_VECTOR, .words = sums, .reg = REG_D}},
                     .src = {{.kind = OPERAND_VECTOR, .words = words, .reg = REG_A},
                             {.kind = OPERAND_VECTOR, .words = words, .reg = REG_B},
                             {.kind = OPERAND_CONSTANT, .words = sums}}};
    int a[16][16], b[16][16];
    assert_non_null(op);
    memset(wave, 0, sizeof *wave);
    memset(wave->v_known, 0xff, sizeof wave->v_known);
    wave->group = &group;
    wave->code = &code;
    wave->lanes = (uint32_t)lanes;
    wave->s64[REG_EXEC / 2] = lanes == 64 ? ALL_LANES : UINT32_MAX;
    fill(places, bf16, major == 11, a, b);
    op->run(wave, &i);
    assert_false(machine.failed);
    for (int r = 0; r < 16; r++) {
        for (int c = 0; c < 16; c++) {
            int sum = 0;
            for (int k = 0; k < 16; k++) {
                sum += a[r][k] * b[k][c];
            }
            uint16_t place = places->d[r][c];
            float found = as_float(wave->v[REG_D + place / 256][place / 2 % 128]);
            if (found != (float)sum) {
                fail_msg("%s: D[%d][%d] is %g, not %d", name, r, c, (double)found, sum);
            }
        }
    }
}

static void test_cdna(void **state)
{
    (void)state;
    check("v_mfma_f32_16x16x16_f16", 9, &cdna_places, false);
    check("v_mfma_f32_16x16x16_bf16", 9, &cdna_places, true);
    check("v_mfma_f32_16x16x16f16", 9, &cdna_places, false);
    check("v_mfma_f32_16x16x16bf16_1k", 9, &cdna_places, true);
}

static void test_rdna3(void **state)
{
    (void)state;
    check("v_wmma_f32_16x16x16_f16", 11, &rdna3_places, false);
    check("v_wmma_f32_16x16x16_bf16", 11, &rdna3_places, true);
}

static void test_rdna4(void **state)
{
    (void)state;
    check("v_wmma_f32_16x16x16_f16", 12, &rdna4_places, false);
    check("v_wmma_f32_16x16x16_bf16", 12, &rdna4_places, true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_cdna), cmocka_unit_test(test_rdna3),
                                       cmocka_unit_test(test_rdna4)};
    wave = aligned_alloc(64, sizeof *wave);
    int failed = wave != NULL ? cmocka_run_group_tests(tests, NULL, NULL) : 1;
    free(wave);
    return failed;
}
