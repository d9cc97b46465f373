/* SPDX-License-Identifier: Apache-2.0 */
/* Two caches, row by row through their views. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "support/number.h"
#include "cases/problem_copy.h"

#define SCALE_TOLERANCE 1e-6 /* relative: a reciprocal instead of a division */
#define ZERO_POINT_MASK 15u
#define POISONED_WORD 0xffffffffu
#define NVFP4_BLOCK 16
#define ANY (1 << 16) /* any number of steps between two codes */

/* K's or V's rows in both images, and in a copy of the found one in which what may differ is
 * replaced by what was expected. */
struct rows {
    int32_t kv_dtype;
    int32_t number; /* enum attn_dtype_id of plain elements */
    int32_t bits;
    bool value;
    struct attn_kv_view expected, found, patched;
    int32_t zero_points[2]; /* int4: of the row's expected and found scale */
    int64_t num_off;        /* codes that lie one step off */
    int64_t num_codes;
};

struct place {
    int64_t block, slot, head;
};

static uint8_t *element(const struct attn_kv_view *view, struct place at, int32_t d, int32_t bits)
{
    int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    return (uint8_t *)view->data + at.block * view->stride_block + at.slot * view->stride_slot +
           at.head * view->stride_head + d / pack * view->stride_pack + d % pack * bits / 8;
}

static uint8_t *scale_of(const struct attn_kv_view *view, struct place at)
{
    return (uint8_t *)view->scale + at.block * view->scale_stride_block +
           at.slot * view->scale_stride_slot + at.head * view->scale_stride_head;
}

/* Codes of 3 bits cross bytes. */
static int32_t code_of_three(const uint8_t *memory, int32_t d)
{
    int32_t shift = d * 3 % 8;
    int32_t two = memory[0] | (shift > 5 ? memory[1] << 8 : 0);
    return two >> shift & 7;
}

/* A code as its place in the order of the format's values: whole numbers, or a sign and a size. */
static int32_t ordinal(const struct rows *rows, const uint8_t *memory, int32_t d)
{
    const int32_t code = rows->bits == 3   ? code_of_three(memory, d)
                         : rows->bits == 4 ? *memory >> (d % 2 * 4) & 15
                                           : *memory;
    const int32_t sign = rows->kv_dtype == ATTN_KV_NVFP4 ? 8 : rows->bits == 8 ? 0x80 : 0;
    return sign == 0x80 && rows->number == ATTN_DTYPE_INT8 ? (int8_t)code
           : code & sign                                   ? -(code & (sign - 1))
                                                           : code;
}

/* Elements d .. end-1 of a row may differ: the patched copy has them as they were expected. */
static void patch(const struct rows *rows, struct place at, int32_t d, int32_t end)
{
    const struct attn_kv_view *view = &rows->expected;
    const int32_t pack = view->pack > 0 ? view->pack : view->head_size;
    for (; d < end; d += pack) {
        const int32_t count = end - d < pack ? end - d : pack;
        memcpy(element(&rows->patched, at, d, rows->bits), element(view, at, d, rows->bits),
               (size_t)(count * rows->bits + 7) / 8);
    }
}

/* Codes d .. end-1 of a row may lie `most` steps off. */
static bool codes_agree(struct rows *rows, struct place at, int32_t d, int32_t end, int32_t most)
{
    for (; d < end; d++) {
        int32_t want =
            ordinal(rows, element(&rows->expected, at, d, rows->bits), d) - rows->zero_points[0];
        int32_t have =
            ordinal(rows, element(&rows->found, at, d, rows->bits), d) - rows->zero_points[1];
        if (abs(want - have) > most) {
            return false;
        }
        rows->num_off += want != have;
    }
    return true;
}

/* The same of codes with a scale; after a NaN they mean nothing. */
static bool scaled_codes_agree(struct rows *rows, struct place at, int32_t d, int32_t end, bool nan,
                               int32_t most)
{
    const int64_t num_off = rows->num_off;
    const bool held = codes_agree(rows, at, d, end, nan ? ANY : most);
    rows->num_off = nan ? num_off : rows->num_off;
    patch(rows, at, d, end);
    return held;
}

static bool power_of_two(float x)
{
    int exponent;
    return frexpf(x, &exponent) == 0.5f;
}

/* A row with one float32 scale, int4's with its zero point. */
static bool verify_scaled_row(struct rows *rows, struct place at)
{
    uint32_t want_bits, have_bits;
    float want, have;
    int32_t most = 1;
    memcpy(&want_bits, scale_of(&rows->expected, at), sizeof want_bits);
    memcpy(&have_bits, scale_of(&rows->found, at), sizeof have_bits);
    if (want_bits == POISONED_WORD) {
        return true; /* never written: compared with the rest, bit for bit */
    }
    if (rows->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD) {
        rows->zero_points[0] = (int32_t)(want_bits & ZERO_POINT_MASK);
        rows->zero_points[1] = (int32_t)(have_bits & ZERO_POINT_MASK);
        want_bits &= ~ZERO_POINT_MASK;
        have_bits &= ~ZERO_POINT_MASK;
    }
    memcpy(&want, &want_bits, sizeof want);
    memcpy(&have, &have_bits, sizeof have);
    bool same = isnan(want) ? isnan(have) : fabsf(want - have) <= SCALE_TOLERANCE * want;
    if (rows->kv_dtype == ATTN_KV_INT8_PER_TOKEN_HEAD || rows->kv_dtype == ATTN_KV_INT8_KV ||
        rows->kv_dtype == ATTN_KV_INT8_K) {
        most = power_of_two(want) ? 0 : 1; /* the quotients are exact */
    }
    memcpy(scale_of(&rows->patched, at), scale_of(&rows->expected, at), sizeof want);
    return same && scaled_codes_agree(rows, at, 0, rows->expected.head_size, isnan(want), most);
}

/* A norm, or a step and a zero, in float16: the neighbour at most, NaN both, or never written. */
static bool verify_turboquant_row(struct rows *rows, struct place at)
{
    uint16_t want[2], have[2];
    size_t count = rows->value ? 2 : 1, bytes = count * sizeof *want;
    memcpy(want, scale_of(&rows->expected, at), bytes);
    memcpy(have, scale_of(&rows->found, at), bytes);
    bool nan = false;
    for (size_t i = 0; i < count; i++) {
        if (want[i] == (uint16_t)POISONED_WORD) {
            return true;
        }
        nan = nan || isnan(number_load(&want[i], 0, ATTN_DTYPE_F16));
        if (nan ? !isnan(number_load(&have[i], 0, ATTN_DTYPE_F16)) : abs(want[i] - have[i]) > 1) {
            return false;
        }
    }
    memcpy(scale_of(&rows->patched, at), want, bytes);
    return scaled_codes_agree(rows, at, 0, rows->expected.head_size, nan, 1);
}

/* Element i of a block, whose codes stand after its step. */
static int32_t code_of_block(const struct rows *rows, const uint8_t *block, int32_t i)
{
    if (rows->bits == 8) {
        return (int8_t)block[2 + i];
    }
    return block[2 + i % (KV_BLOCK / 2)] >> (i < KV_BLOCK / 2 ? 0 : 4) & 15;
}

/* Steps in float16: the neighbour at most, NaN both, or never written. Q4_0's sign follows the
 * largest element, so its neighbours are those of the bits, too. */
static bool verify_block_row(struct rows *rows, struct place at)
{
    size_t bytes = 2 + (size_t)rows->bits * KV_BLOCK / 8;
    for (int32_t b = 0; b < rows->expected.head_size / KV_BLOCK; b++) {
        const uint8_t *want = element(&rows->expected, at, 0, 8) + (size_t)b * bytes;
        const uint8_t *have = element(&rows->found, at, 0, 8) + (size_t)b * bytes;
        uint16_t steps[2];
        memcpy(&steps[0], want, sizeof steps[0]);
        memcpy(&steps[1], have, sizeof steps[1]);
        if (steps[0] == (uint16_t)POISONED_WORD) {
            continue;
        }
        bool nan = isnan(number_load(&steps[0], 0, ATTN_DTYPE_F16));
        if (nan ? !isnan(number_load(&steps[1], 0, ATTN_DTYPE_F16))
                : abs(steps[0] - steps[1]) > 1) {
            return false;
        }
        for (int32_t i = 0; i < KV_BLOCK && !nan; i++) {
            int32_t off = abs(code_of_block(rows, want, i) - code_of_block(rows, have, i));
            if (off > 1) {
                return false;
            }
            rows->num_off += off;
        }
        memcpy(element(&rows->patched, at, 0, 8) + (size_t)b * bytes, want, bytes);
    }
    return true;
}

static bool verify_nvfp4_row(struct rows *rows, struct place at)
{
    int32_t blocks = rows->expected.head_size / NVFP4_BLOCK;
    for (int32_t i = 0; i < blocks; i++) {
        /* V's scales are swizzled within groups of 4 slots. */
        struct place there = at;
        int32_t index = i;
        if (rows->value) {
            there.slot = at.slot / 4 * 4 + i / (blocks / 4);
            index = (int32_t)(i % (blocks / 4) * 4 + at.slot % 4);
        }
        uint8_t want = scale_of(&rows->expected, there)[index];
        uint8_t have = scale_of(&rows->found, there)[index];
        bool nan = (want & 0x7f) == 0x7f && (have & 0x7f) == 0x7f;
        if (want == IMAGE_POISON) {
            continue;
        }
        scale_of(&rows->patched, there)[index] = want;
        if ((!nan && abs(want - have) > 1) ||
            !scaled_codes_agree(rows, at, i * NVFP4_BLOCK, (i + 1) * NVFP4_BLOCK, nan, 1)) {
            return false;
        }
    }
    return true;
}

/* Plain numbers: the same bits, or NaN both. Where there was a division by a scale of the head's,
 * or the channel's, codes may lie one step off. */
static bool verify_number_row(struct rows *rows, struct place at)
{
    bool divided = rows->kv_dtype == ATTN_KV_INT8_KV || kv_is_fp8(rows->kv_dtype);
    for (int32_t d = 0; d < rows->expected.head_size; d++) {
        const uint8_t *want = element(&rows->expected, at, d, rows->bits);
        const uint8_t *have = element(&rows->found, at, d, rows->bits);
        bool nan =
            isnan(number_load(want, 0, rows->number)) && isnan(number_load(have, 0, rows->number));
        if (is_poison(want, rows->bits / 8)) {
            continue;
        }
        if (divided && !nan && !codes_agree(rows, at, d, d + 1, 1)) {
            return false;
        }
        if (divided || nan) {
            patch(rows, at, d, d + 1);
        }
    }
    return true;
}

static bool verify_rows(struct rows *rows)
{
    const struct attn_kv_view *view = &rows->expected;
    for (int64_t i = 0; i < view->num_blocks * view->block_size * view->num_heads; i++) {
        struct place at = {i / view->num_heads / view->block_size,
                           i / view->num_heads % view->block_size, i % view->num_heads};
        bool ok = rows->kv_dtype == ATTN_KV_NVFP4    ? verify_nvfp4_row(rows, at)
                  : kv_is_blocks(rows->kv_dtype)     ? verify_block_row(rows, at)
                  : view->scale == NULL              ? verify_number_row(rows, at)
                  : kv_is_turboquant(rows->kv_dtype) ? verify_turboquant_row(rows, at)
                                                     : verify_scaled_row(rows, at);
        rows->num_codes += view->head_size;
        if (!ok) {
            return false;
        }
    }
    return true;
}

enum trial_result verify_cache(struct trial *trial, const struct check_problem *p,
                               const uint8_t *expected, const uint8_t *found)
{
    size_t first = p->at.cache, bytes = p->at.cache_end - first;
    if (!p->paged || memcmp(expected + first, found + first, bytes) == 0) {
        return TRIAL_PASSED;
    }
    OWNED(memory_end)
    uint8_t *patched = memcpy(command_calloc(p->image.size, 1), found, p->image.size);
    for (int32_t i = 0; i < 2; i++) {
        struct rows rows = {.kv_dtype = case_kv(p->v, i == 1), .value = i == 1};
        uint8_t *bases[] = {(uint8_t *)(uintptr_t)expected, (uint8_t *)(uintptr_t)found, patched};
        struct attn_kv_view *views[] = {&rows.expected, &rows.found, &rows.patched};
        const struct kv_format *format = kv_format(rows.kv_dtype, rows.value);
        rows.number = format->number != 0 ? format->number : p->dtype;
        rows.bits = format->bits;
        for (int32_t j = 0; j < 3; j++) {
            views_make(p->v, rows.value, p->num_blocks, bases[j] + p->at.cache,
                       bases[j] + p->at.cache_scales, views[j]);
        }
        bool held = verify_rows(&rows);
        int64_t most = 2 + rows.num_codes / (kv_is_fp8(rows.kv_dtype) ? 5000 : 200);
        TRIAL_FAIL_IF(trial, !held || rows.num_off > most,
                      "the cache's %s differ from the reference's (%lld of %lld codes)",
                      i ? "values" : "keys", (long long)rows.num_off, (long long)rows.num_codes);
    }
    size_t i = 0;
    while (i < bytes && expected[first + i] == patched[first + i]) {
        i++;
    }
    char place[BUFFER_TEXT];
    TRIAL_FAIL_IF(trial, i < bytes,
                  "the cache's bytes differ from the reference's, from %s on: 0x%02x, not 0x%02x",
                  buffer_at_offset(&p->image, (int64_t)(first + i), place), patched[first + i],
                  expected[first + i]);
    return TRIAL_PASSED;
}

enum trial_result verify_written_keys(struct trial *trial, const struct problem_copy *reference,
                                      struct problem_copy *tested)
{
    const struct check_problem *problem = tested->problem;
    size_t first = problem->at.cache, bytes = problem->at.cache_end - first;
    OWNED(memory_end)
    uint8_t *found = trial_read(trial, tested->device, tested->memory, problem->image.size);
    TRIAL_TRY(found != NULL ? verify_cache(trial, problem, reference->memory, found)
                            : TRIAL_FAILED);
    TRIAL_FAIL_IF(
        trial,
        !device_write(tested->device, tested->memory + first, reference->memory + first, bytes),
        "the cache cannot be written");
    return TRIAL_PASSED;
}
