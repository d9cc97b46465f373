/* SPDX-License-Identifier: Apache-2.0 */
/* Largest magnitudes for scales. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

enum { TOKENS = 31, ROW = 4 * 32 };

/* The largest of a tensor, of each head and, as heads of one element, of each channel: of slices of
 * rows, and over several batches. Nothing else is touched. */
TEST(test_amax)
{
    enum { HEADS = 2, CHANNELS = ROW / 2 };
    const struct attn_layer_desc decoder = {.kind = ATTN_LAYER_DECODER, .causal = 1};
    float largest[CHANNELS + 1], before[CHANNELS + 1];
    OWNED(fixture_finish) struct fixture f;
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    attn_layer *layer = f.api->model_layer(f.model, 0);
    /* even rows of k: those between them, of larger numbers, do not count */
    int64_t strides[] = {ROW, 0, 1};
    struct attn_tensor x = {.data = f.k,
                            .device = {ATTN_DEVICE_CPU, 0},
                            .ndim = 3,
                            .dtype = {ATTN_CODE_FLOAT, 32, 1},
                            .shape = (int64_t[3]){0},
                            .strides = strides};
    struct attn_amax_args args = {.struct_size = sizeof args, .x = &x, .out = largest};
    for (int32_t i = 0; i < TOKENS * CHANNELS; i++) {
        f.k[i] *= i / CHANNELS % 2 ? 100 : 1;
    }
    f.k[2 * ROW + CHANNELS - 1] = -500;
    for (int32_t way = 0; way < 3; way++) { /* of all, of each head, of each channel */
        const int32_t parts = way == 0 ? 1 : way == 1 ? HEADS : CHANNELS;
        const int32_t heads = way == 2 ? CHANNELS : HEADS, size = CHANNELS / parts;
        x.shape[0] = (TOKENS + 1) / 2, x.shape[1] = heads, x.shape[2] = CHANNELS / heads;
        strides[1] = CHANNELS / heads;
        args.per_head = way > 0;
        for (args.accumulate = 0; args.accumulate <= 1; args.accumulate++) {
            for (int32_t i = 0; i <= CHANNELS; i++) {
                before[i] = largest[i] = i == 0 ? 7e4f : -1;
            }
            CHECK(&f, f.api->layer_amax(layer, &args, &f.error));
            for (int32_t i = 0; i < parts; i++) {
                float most = args.accumulate && before[i] > 0 ? before[i] : 0;
                for (int32_t t = 0; t < TOKENS; t += 2) {
                    for (int32_t e = 0; e < size; e++) {
                        most = fmaxf(most, fabsf(f.k[t * CHANNELS + i * size + e]));
                    }
                }
                assert_true(largest[i] == most);
            }
            assert_memory_equal(largest + parts, before + parts,
                                (size_t)(CHANNELS + 1 - parts) * sizeof *before);
        }
    }
    struct attn_tensor pairs = x; /* of numbers that are none of the ABI's */
    pairs.dtype.lanes = 2;
    const struct attn_amax_args good = args;
    struct attn_amax_args bad[7];
    static const char *const fields[] = {"x",        "x",          "out",        "out",
                                         "per_head", "accumulate", "history_len"};
    for (int32_t i = 0; i < 7; i++) {
        bad[i] = good;
        bad[i].accumulate = 0;
    }
    bad[0].x = NULL, bad[1].x = &pairs, bad[2].out = NULL;
    bad[3].instance = (attn_instance *)&x, bad[4].per_head = 2, bad[5].accumulate = -1;
    bad[6].history_len = 1;
    for (int32_t i = 0; i < 7; i++) {
        INVALID(&f.error, fields[i], f.api->layer_amax(layer, &bad[i], &f.error));
    }
}
