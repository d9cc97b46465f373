/* SPDX-License-Identifier: Apache-2.0 */
/* The interpreter's matrix instructions against tables of where each element lies. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "amd/isa.h"
#include "matrix_places.h"
#include "support/test.h"

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

/* Runs the operation on the registers, with a sum of 0. */
static void multiply(const char *name, int major, bool fnuz, unsigned depth)
{
    const struct op *op = op_find(name, strlen(name), major);
    const int lanes = major == 9 ? 64 : 32;
    struct machine machine = {0};
    struct code code = {.wave_size = lanes, .fnuz = fnuz};
    struct group group = {.machine = &machine, .code = &code};
    uint8_t words = (uint8_t)depth, sums = lanes == 64 ? 4 : 8;
    struct insn i = {.op = op,
                     .num_dst = 1,
                     .num_src = 3,
                     .dst = {{.kind = OPERAND_VECTOR, .words = sums, .reg = REG_D}},
                     .src = {{.kind = OPERAND_VECTOR, .words = words, .reg = REG_A},
                             {.kind = OPERAND_VECTOR, .words = words, .reg = REG_B},
                             {.kind = OPERAND_CONSTANT, .words = sums}}};
    assert_non_null(op);
    memset(wave->v_known, 0xff, sizeof wave->v_known);
    wave->group = &group;
    wave->code = &code;
    wave->lanes = (uint32_t)lanes;
    wave->s64[REG_EXEC / 2] = lanes == 64 ? ALL_LANES : UINT32_MAX;
    op->run(wave, &i);
    assert_false(machine.failed);
}

static void check(const char *name, int major, const struct matrix_places *places, bool bf16)
{
    int a[16][16], b[16][16];
    memset(wave, 0, sizeof *wave);
    fill(places, bf16, major == 11, a, b);
    multiply(name, major, false, major == 9 ? 2 : major == 11 ? 8 : 4);
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

/* A form of 8-bit codes: those of 0 to 8, and some with their numbers, by the manuals' tables of
 * "FP8" and "BF8". */
enum { SOME = 9 };
struct form {
    uint8_t integers[9], codes[SOME];
    float numbers[SOME];
};

static const struct form e4m3_fnuz = {
    {0x00, 0x40, 0x48, 0x4c, 0x50, 0x52, 0x54, 0x56, 0x58},
    {0x01, 0x07, 0x08, 0x3f, 0x7e, 0x7f, 0xff, 0x80, 0x81},
    {0x1p-10f, 0x1.cp-8f, 0x1p-7f, 0.9375f, 224.0f, 240.0f, -240.0f, NAN, -0x1p-10f}};
static const struct form e5m2_fnuz = {
    {0x00, 0x40, 0x44, 0x46, 0x48, 0x49, 0x4a, 0x4b, 0x4c},
    {0x01, 0x03, 0x04, 0x3f, 0x7c, 0x7f, 0xff, 0x80, 0x81},
    {0x1p-17f, 0x1.8p-16f, 0x1p-15f, 0.875f, 32768.0f, 57344.0f, -57344.0f, NAN, -0x1p-17f}};
static const struct form e4m3 = {
    {0x00, 0x38, 0x40, 0x44, 0x48, 0x4a, 0x4c, 0x4e, 0x50},
    {0x01, 0x07, 0x08, 0x3f, 0x7e, 0xfe, 0x7f, 0xff, 0x80},
    {0x1p-9f, 0x1.cp-7f, 0x1p-6f, 1.875f, 448.0f, -448.0f, NAN, NAN, -0.0f}};
static const struct form e5m2 = {
    {0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47, 0x48},
    {0x01, 0x03, 0x04, 0x7b, 0xfb, 0x7c, 0xfc, 0x7d, 0x80},
    {0x1p-16f, 0x1.8p-15f, 0x1p-14f, 57344.0f, -57344.0f, INFINITY, -INFINITY, NAN, -0.0f}};

static void put_code(unsigned first, uint16_t place, uint8_t code)
{
    unsigned shift = 8 * (place & 3u);
    uint32_t *word = &wave->v[first + place / 256][place / 4 % 64];
    *word = (*word & ~(0xffu << shift)) | (uint32_t)code << shift;
}

static float found_at(const struct code_places *places, int r, int c)
{
    uint16_t place = (*places->d)[r][c];
    return as_float(wave->v[REG_D + place / 256][place / 2 % 128]);
}

static void check_codes(const char *name, int major, const struct code_places *places,
                        const struct form *form)
{
    const bool fnuz = form == &e4m3_fnuz || form == &e5m2_fnuz;
    int a[16][32], b[16][32]; /* b by column */
    memset(wave, 0, sizeof *wave);
    srand(12);
    for (int r = 0; r < 16; r++) {
        for (int k = 0; k < places->depth; k++) {
            a[r][k] = rand() % 9;
            b[r][k] = rand() % 9;
            put_code(REG_A, places->a[r][k], form->integers[a[r][k]]);
            put_code(REG_B, places->b[r][k], form->integers[b[r][k]]);
        }
    }
    multiply(name, major, fnuz, 2);
    for (int r = 0; r < 16; r++) {
        for (int c = 0; c < 16; c++) {
            int sum = 0;
            for (int k = 0; k < places->depth; k++) {
                sum += a[r][k] * b[c][k];
            }
            if (found_at(places, r, c) != (float)sum) {
                fail_msg("%s: D[%d][%d] is %g, not %d", name, r, c, (double)found_at(places, r, c),
                         sum);
            }
        }
    }
    memset(wave, 0, sizeof *wave); /* row r times 1 at one depth */
    for (int r = 0; r < SOME; r++) {
        put_code(REG_A, places->a[r][r], form->codes[r]);
        put_code(REG_B, places->b[r][r], form->integers[1]);
    }
    multiply(name, major, fnuz, 2);
    for (int r = 0; r < SOME; r++) {
        float number = form->numbers[r], found = found_at(places, r, r);
        if (found != number && !(number != number && found != found)) {
            fail_msg("%s: code %#x is %g, not %g", name, form->codes[r], (double)found,
                     (double)number);
        }
    }
}

TEST(test_codes)
{
    check_codes("v_mfma_f32_16x16x32_fp8_fp8", 9, &cdna3_codes, &e4m3_fnuz);
    check_codes("v_mfma_f32_16x16x32_bf8_bf8", 9, &cdna3_codes, &e5m2_fnuz);
    check_codes("v_mfma_f32_16x16x32_fp8_fp8", 9, &cdna3_codes, &e4m3); /* gfx950 */
    check_codes("v_mfma_f32_16x16x32_bf8_bf8", 9, &cdna3_codes, &e5m2);
    check_codes("v_wmma_f32_16x16x16_fp8_fp8", 12, &rdna4_codes, &e4m3);
    check_codes("v_wmma_f32_16x16x16_bf8_bf8", 12, &rdna4_codes, &e5m2);
}

TEST(test_cdna)
{
    check("v_mfma_f32_16x16x16_f16", 9, &cdna_places, false);
    check("v_mfma_f32_16x16x16_bf16", 9, &cdna_places, true);
    check("v_mfma_f32_16x16x16f16", 9, &cdna_places, false);
    check("v_mfma_f32_16x16x16bf16_1k", 9, &cdna_places, true);
}

TEST(test_rdna3)
{
    check("v_wmma_f32_16x16x16_f16", 11, &rdna3_places, false);
    check("v_wmma_f32_16x16x16_bf16", 11, &rdna3_places, true);
}

TEST(test_rdna4)
{
    check("v_wmma_f32_16x16x16_f16", 12, &rdna4_places, false);
    check("v_wmma_f32_16x16x16_bf16", 12, &rdna4_places, true);
}

int main(void)
{
    wave = aligned_alloc(64, sizeof *wave);
    int failed = wave != NULL ? test_run(NULL, NULL) : 1;
    free(wave);
    return failed;
}
