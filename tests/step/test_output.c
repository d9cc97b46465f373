/* SPDX-License-Identifier: Apache-2.0 */
/* Quantized outputs, composed by the core of an attend and the backend's quantize: which runs are
 * refused, and which rows are written; what is written holds attn-check (engine_output). */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

enum { TOKENS = 31, HEADS = 4, SIZE = 32, ROW = HEADS * SIZE };

/* The step's last two requests alone leave in their rows what they left in the whole step, and the
 * rows before theirs as they are. Rows of out lie one after the other, scales apart. */
static void check_rows_of_others(struct fixture *f, uint8_t *codes, int64_t row, uint8_t *scales,
                                 int64_t scale, int64_t groups, bool column_major)
{
    static uint8_t whole[TOKENS * ROW], whole_scales[TOKENS * ROW / 16 * sizeof(float)];
    const int32_t first = f->query_start_loc[2];
    memcpy(whole, codes, (size_t)(TOKENS * row));
    memcpy(whole_scales, scales, (size_t)(TOKENS * groups * scale));
    memset(codes, 0x55, (size_t)(TOKENS * row));
    memset(scales, 0x55, (size_t)(TOKENS * groups * scale));
    f->batch.num_reqs = 2;
    f->batch.query_start_loc += 2;
    f->batch.query_start_loc_host += 2;
    f->batch.seq_lens += 2;
    f->batch.seq_lens_host += 2;
    f->batch.block_table += 2 * f->batch.block_table_stride;
    fixture_step(f);
    for (int64_t i = 0; i < TOKENS * row; i++) {
        assert_int_equal(codes[i], i < first * row ? 0x55 : whole[i]);
    }
    for (int64_t i = 0; i < TOKENS * groups * scale; i++) {
        const int64_t at = i / scale, token = column_major ? at % TOKENS : at / groups;
        assert_int_equal(scales[i], token < first ? 0x55 : whole_scales[i]);
    }
}

static void refuse_runs(int32_t form, int32_t pow2, int32_t column_major)
{
    static uint8_t codes[TOKENS * ROW];
    static float numbers[TOKENS * ROW / 16], global = 0.002f; /* groups; nvfp4: bytes in here */
    struct attn_layer_desc layer = DECODER();
    OWNED(fixture_finish) struct fixture f;
    layer.output_form = form;
    layer.output_scale_pow2 = pow2;
    layer.output_scale_column_major = column_major;
    fixture_mixed(&f, "cpu_ref", &layer, false);
    int32_t group = form == ATTN_OUTPUT_FP8_GROUP_64 ? 64 : form == ATTN_OUTPUT_NVFP4 ? 16 : 128;
    int64_t groups = ROW / group,
            shape[3] = {TOKENS, HEADS, form == ATTN_OUTPUT_NVFP4 ? SIZE / 2 : SIZE};
    int64_t scale_shape[2] = {column_major ? groups : TOKENS, column_major ? TOKENS : groups};
    struct attn_tensor out = {
        codes, {ATTN_DEVICE_CPU, 0}, 3, {ATTN_CODE_FLOAT8_E4M3FN, 8, 1}, shape, NULL, 0};
    struct attn_tensor scales = {
        numbers, {ATTN_DEVICE_CPU, 0}, 2, {ATTN_CODE_FLOAT, 32, 1}, scale_shape, NULL, 0};
    struct attn_io_output_quant quant =
        EXTENSION(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL, .scale = &global,
                  .block_scales = form == ATTN_OUTPUT_FP8_STATIC ? NULL : &scales);
    if (form == ATTN_OUTPUT_NVFP4) {
        out.dtype = (struct attn_dtype){ATTN_CODE_UINT, 8, 1};
        scales.dtype = (struct attn_dtype){ATTN_CODE_FLOAT8_E4M3FN, 8, 1};
    }
    f.io.out = &out;
    f.io.lse = NULL;
    /* Without the extension there is no place for the scales; a float output has not the form's
     * dtype. */
    CHECK(&f, fixture_batch(&f));
    fixture_refuse_run(&f, "attn_io_output_quant");
    f.io.next = &quant.ext;
    quant.scale = NULL;
    quant.block_scales = NULL;
    fixture_refuse_run(&f, form == ATTN_OUTPUT_FP8_STATIC || form == ATTN_OUTPUT_NVFP4
                               ? "attn_io_output_quant"
                               : "block_scales");
    quant.scale = &global;
    quant.block_scales = form == ATTN_OUTPUT_FP8_STATIC ? NULL : &scales;
    for (int32_t i = 0; i < 6 && form != ATTN_OUTPUT_FP8_STATIC; i++) { /* each alone */
        const struct attn_tensor good = scales;
        int64_t strides[2] = {scale_shape[1], 2};
        scales.ndim -= i == 0;
        scale_shape[0] -= i == 1;
        scale_shape[1] -= i == 2;
        scales.dtype.bits = i == 3 ? 16 : scales.dtype.bits;
        scales.data = i == 4 ? NULL : scales.data;
        scales.strides = i == 5 ? strides : NULL;
        if (i < 5 || form == ATTN_OUTPUT_NVFP4) {
            fixture_refuse_run(&f, "block_scales");
        }
        scales = good;
        scale_shape[0] += i == 1;
        scale_shape[1] += i == 2;
    }
    f.io.out = &f.tensors[3];
    fixture_refuse_run(&f, "out");
    f.io.out = &out;
    shape[0] -= 1; /* a row less than the batch has */
    fixture_refuse_run(&f, "out");
    shape[0] += 1;
    if (form == ATTN_OUTPUT_NVFP4) {
        int64_t gaps[3] = {ROW, SIZE, 1};
        out.strides = gaps; /* heads lie apart: a row is one piece */
        fixture_refuse_run(&f, "out");
        out.strides = NULL;
        quant.scale = NULL;
        fixture_refuse_run(&f, "attn_io_output_quant");
        quant.scale = &global;
    }
    fixture_step(&f);
    check_rows_of_others(&f, codes, form == ATTN_OUTPUT_NVFP4 ? ROW / 2 : ROW, (uint8_t *)numbers,
                         scales.dtype.bits / 8, form == ATTN_OUTPUT_FP8_STATIC ? 0 : groups,
                         column_major);
}

TEST(test_refused_runs)
{
    for (int32_t form = ATTN_OUTPUT_FP8_STATIC; form <= ATTN_OUTPUT_NVFP4; form++) {
        const bool groups = form == ATTN_OUTPUT_FP8_GROUP_64 || form == ATTN_OUTPUT_FP8_GROUP_128;
        for (int32_t way = 0; way < (groups ? 4 : 1); way++) {
            refuse_runs(form, way & 1, way >> 1);
        }
    }
}

/* 4 heads of 24 are no whole groups of 64 columns. */
TEST(test_columns)
{
    struct attn_layer_desc layer = DECODER(.head_size = 24);
    const struct attn_layer_desc *layers[] = {&layer};
    OWNED(fixture_finish) struct fixture f;
    attn_model *model;
    attn_plan *plan = NULL;
    void *cache, *workspace;
    fixture_mixed(&f, "cpu_ref", &layer, false);
    layer = f.layer;
    layer.output_form = ATTN_OUTPUT_FP8_GROUP_64;
    CHECK(&f, client_model(f.api, f.runtime, CLIENT_ORDER("cpu_ref"), layers, 1, &model, &f.error));
    CHECK(&f, client_cache(f.api, f.api->model_layer(model, 0), 2, NULL, &cache, &f.error));
    INVALID(&f.error, "output_form",
            client_plan(f.api, model, 0, CLIENT_LIMITS(1, 8, 16), &plan, &workspace, &f.error));
    f.api->model_destroy(model);
    free(cache);
}
