/* SPDX-License-Identifier: Apache-2.0 */
/* V's scales per (head, channel) over several batches: by the formula in float64, from slices of
 * fused rows, and in the steps of two levels of int8 that then run by them. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "history.h"
#include "support/random.h"
#include "support/test.h"

enum {
    BATCHES = 4,
    ROWS = 23,
    CHANNELS = H_HK * H_D,
    /* q, k and v of a token side by side, v's heads further apart than their size */
    HEAD_STRIDE = H_D + 8,
    ROW_STRIDE = (H_HQ + H_HK) * H_D + H_HK * HEAD_STRIDE
};
enum { CALIBRATED, OTHER_LAYER, PLAIN, LAYERS };

static const struct attn_layer_desc layers[LAYERS] = {
    [CALIBRATED] = {.kind = ATTN_LAYER_DECODER, .kv_dtype = ATTN_KV_INT8_KV},
    [OTHER_LAYER] = {.kind = ATTN_LAYER_DECODER, .kv_dtype = ATTN_KV_INT8_KV},
    [PLAIN] = {.kind = ATTN_LAYER_DECODER, .kv_dtype = ATTN_KV_INT8_KV, .skip_kv_quantization = 1},
};

struct batch {
    float rows[ROWS * ROW_STRIDE];
    int64_t shape[3], strides[3];
    struct attn_tensor v;
    struct attn_step_io io;
};

static uint64_t random_state;

/* Each channel has a width of its own, and its largest value in one of the batches; the last
 * channel of all has none, the one before it next to none. Whatever is next to v is larger than all
 * of it. */
static void fill(struct batch *b, int32_t index, bool fused)
{
    int64_t head = fused ? HEAD_STRIDE : H_D, row = fused ? ROW_STRIDE : CHANNELS;
    float *v = b->rows + (fused ? (H_HQ + H_HK) * H_D : 0);
    memset(b, 0, sizeof *b);
    for (int32_t i = 0; i < ROWS * ROW_STRIDE; i++) {
        b->rows[i] = 1e6f;
    }
    for (int32_t i = 0; i < ROWS * CHANNELS; i++) {
        int32_t c = i % CHANNELS;
        double width = 0.05 + 0.02 * (c % 13);
        width = c == CHANNELS - 1 ? 0 : c == CHANNELS - 2 ? 1e-42 : width;
        width *= (c + index) % BATCHES == 0 ? 2 : 1;
        v[i / CHANNELS * row + c / H_D * head + c % H_D] =
            (float)random_within(&random_state, width);
    }
    b->shape[0] = ROWS, b->shape[1] = H_HK, b->shape[2] = H_D;
    b->strides[0] = row, b->strides[1] = head, b->strides[2] = 1;
    b->v = (struct attn_tensor){.data = b->rows,
                                .device = {ATTN_DEVICE_CPU, 0},
                                .ndim = 3,
                                .dtype = {ATTN_CODE_FLOAT, 32, 1},
                                .shape = b->shape,
                                .strides = fused ? b->strides : NULL,
                                .byte_offset = (uint64_t)((char *)v - (char *)b->rows)};
    b->io = (struct attn_step_io){.struct_size = sizeof b->io, .v = &b->v};
}

/* What the values so far ask for. */
static void widen(const struct batch *b, double *amax)
{
    const float *v = (const float *)((const char *)b->v.data + b->v.byte_offset);
    int64_t row = b->v.strides != NULL ? b->strides[0] : CHANNELS;
    int64_t head = b->v.strides != NULL ? b->strides[1] : H_D;
    for (int32_t c = 0; c < CHANNELS; c++) {
        for (int32_t t = 0; t < ROWS; t++) {
            amax[c] = fmax(amax[c], fabs((double)v[t * row + c / H_D * head + c % H_D]));
        }
    }
}

static attn_status calibrate(struct history *h, int32_t layer, const struct batch *b, float range,
                             float *amax)
{
    const struct attn_calibration channels = {.struct_size = sizeof channels,
                                              .io = &b->io,
                                              .amax = amax,
                                              .v_channel_scale = h->layers[layer].v_channel_scale,
                                              .range = range};
    return h->api->layer_calibrate_v_scales(h->api->model_layer(h->model, layer), &channels,
                                            &h->error);
}

TEST(test_formula)
{
    static const float ranges[] = {0, 127, 64};
    struct history *h = calloc(1, sizeof *h);
    struct batch *b = malloc(sizeof *b);
    history_init(h, "cpu_ref", layers, LAYERS);
    for (int32_t way = 0; way < 6; way++) {
        float found[CHANNELS] = {0};
        double amax[CHANNELS] = {0}, range = way / 2 == 0 ? 100 : (double)ranges[way / 2];
        for (int32_t i = 0; i < BATCHES; i++) {
            fill(b, i, way % 2);
            widen(b, amax);
            assert_int_equal(calibrate(h, CALIBRATED, b, ranges[way / 2], found), ATTN_OK);
            for (int32_t c = 0; c < CHANNELS; c++) {
                double scale = c == CHANNELS - 1 ? 1 : fmax(amax[c] / range, FLT_MIN);
                double error = (double)h->layers[CALIBRATED].v_channel_scale[c] - scale;
                assert_true((double)found[c] == amax[c]);
                assert_true(fabs(error) <= scale * 6e-8); /* half of float32's last place */
            }
        }
    }
    free(b);
    history_finish(h);
    free(h);
}

/* Steps by the scales that a calibration left in the bound parameters, of each layer its own;
 * values beyond what was seen saturate, and a layer that skips the quantization has no scales. */
TEST(test_steps)
{
    static const int32_t steps[][H_REQS] = {{9, 5, 12, 20}, {1, 1, 1, 1}, {1, 1, 7, 30}};
    struct history *h = calloc(1, sizeof *h);
    struct batch *b = malloc(sizeof *b);
    float amax[2][CHANNELS] = {{0}};
    history_init(h, "cpu_ref", layers, LAYERS);
    for (int32_t i = 0; i < BATCHES; i++) {
        fill(b, i, true);
        assert_int_equal(calibrate(h, CALIBRATED, b, 0, amax[0]), ATTN_OK);
        fill(b, i + 1, false);
        assert_int_equal(calibrate(h, OTHER_LAYER, b, 127, amax[1]), ATTN_OK);
    }
    for (size_t s = 0; s < sizeof steps / sizeof *steps; s++) {
        history_step(h, steps[s], HISTORY_ONE_RUN);
    }
    free(b);
    history_finish(h);
    free(h);
}

/* What cannot be calibrated is reported, and leaves amax and scales as they are. */
TEST(test_refusals)
{
    static const struct {
        int32_t layer;
        float range;
        const char *field, *text;
    } wrong[] = {
        {PLAIN, 0, "kv_dtype", "layer 'c' has a cache of bf16"},
        {CALIBRATED, -1, "range", "-1"},
        {CALIBRATED, NAN, "range", "nan"},
        {CALIBRATED, INFINITY, "range", "inf"},
        {CALIBRATED, 0, "v", "not [rows, 2, 32]"},
        {CALIBRATED, 0, "v", "NULL"},
        {CALIBRATED, 0, "v", "head 1, channel 3 is inf"},
    };
    enum { HEADS = 4, NO_V, LARGE };
    struct history *h = calloc(1, sizeof *h);
    struct batch *b = malloc(sizeof *b);
    float amax[CHANNELS];
    history_init(h, "cpu_ref", layers, LAYERS);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        float before[CHANNELS];
        memcpy(before, h->layers[wrong[i].layer].v_channel_scale, sizeof before);
        fill(b, 0, true);
        b->shape[1] = i == HEADS ? 3 : H_HK;
        b->io.v = i == NO_V ? NULL : &b->v;
        b->rows[5 * ROW_STRIDE + (H_HQ + H_HK) * H_D + HEAD_STRIDE + 3] =
            i == LARGE ? -INFINITY : 0;
        memset(amax, 0, sizeof amax);
        REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, &h->error, wrong[i].field,
                   calibrate(h, wrong[i].layer, b, wrong[i].range, amax));
        if (strstr(h->error.message, wrong[i].text) == NULL) {
            fail_msg("%s", h->error.message);
        }
        assert_memory_equal(before, h->layers[wrong[i].layer].v_channel_scale, sizeof before);
        for (int32_t c = 0; c < CHANNELS; c++) {
            assert_true(amax[c] == 0);
        }
    }
    fill(b, 0, true);
    assert_int_equal(calibrate(h, CALIBRATED, b, 0, NULL), ATTN_ERROR_INVALID_ARGUMENT);
    free(b);
    history_finish(h);
    free(h);
}
