/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzz targets share: reading numbers, texts and blocks of memory out of the fuzzer's
 * bytes, and checks that hold whatever the bytes are. Each target is one LLVMFuzzerTestOneInput; it
 * keeps nothing from one input to the next. */
#ifndef TESTS_FUZZ_FUZZ_H
#define TESTS_FUZZ_FUZZ_H

#include <attn/status.h>
#include <attn/version.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

/* A broken promise ends the run like a crash does. */
#define FUZZ_CHECK(condition)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fuzz_broken(__FILE__, __LINE__, #condition);                                           \
        }                                                                                          \
    } while (0)
void fuzz_broken(const char *file, int line, const char *condition);

struct input {
    const uint8_t *at;
    size_t left;
};

/* Past the end everything reads as 0. */
uint8_t input_byte(struct input *input);
/* One byte for 0 to 207; for others one byte chooses a number at an edge, or five give any. */
int32_t input_int(struct input *input);
int64_t input_int64(struct input *input);
/* Names as they are, and as they must not be: NULL, empty, long, control bytes, no UTF-8. `usual`
 * is the most frequent. */
const char *input_text(struct input *input, const char *usual);

/* Changes some of the 4-byte words of a struct from byte `from` to `end`. A chance of one half to
 * change none. */
void input_patch(struct input *input, void *bytes, size_t from, size_t end);

/* Memory of one input, so that reading past the end of a block is caught; freed together. */
struct blocks {
    void *all[256];
    int32_t count;
};
void *blocks_add(struct blocks *blocks, size_t size);
void *blocks_add_aligned(struct blocks *blocks, size_t size); /* to 256 bytes */
void blocks_free(struct blocks *blocks);
/* A copy that is exactly as large as its struct_size says, wherever memory of that size can be had:
 * up to 128 KiB. */
void *blocks_struct(struct blocks *blocks, struct input *input, const void *source, size_t size,
                    size_t says);
/* The struct_size that an extension or struct will say: its own, mostly. */
size_t input_struct_size(struct input *input, size_t size);

/* A failure names a known status and has a text that ends; a success has none. */
void fuzz_check_error(attn_status status, const struct attn_error *error);

/* A file with these bytes, in memory; one for each process. */
const char *fuzz_file(const uint8_t *bytes, size_t size);

#endif
