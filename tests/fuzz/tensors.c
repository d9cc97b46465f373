/* SPDX-License-Identifier: Apache-2.0 */
/* A safetensors file: its header, and every tensor that it names, read to its last byte. The first
 * 8 bytes are set to the header's length, up to the first NUL, unless the first of them is 255: a
 * random length would stop nearly all inputs. */
#include <cjson/cJSON.h>
#include <string.h>

#include "fuzz.h"
#include "run/tensors_file.h"

static void read_tensor(const struct tensors_file *file, const char *name)
{
    static const char *const dtypes[] = {"F32", "I32"};
    for (int32_t i = 0; i < 8; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        int64_t shape[4] = {1, 1, 1, 1};
        volatile uint8_t sum = 0;
        const uint8_t *data = tensors_find(file, name, dtypes[i / 4], i % 4 + 1, shape, &error);
        if (data == NULL) {
            fuzz_check_error(error.status, &error);
            FUZZ_CHECK(error.status != ATTN_OK);
            continue;
        }
        FUZZ_CHECK((uintptr_t)data % 4 == 0);
        for (int64_t j = 0; j < 4 * shape[0] * shape[1] * shape[2] * shape[3]; j++) {
            sum = (uint8_t)(sum + data[j]);
        }
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct tensors_file file;
    struct attn_error error = ATTN_ERROR_INIT;
    struct blocks blocks = {.count = 0};
    uint8_t *copy = blocks_add(&blocks, size);
    memcpy(copy, bytes, size);
    if (size >= 8 && copy[0] != 255) {
        const uint8_t *end = memchr(copy + 8, '\0', size - 8);
        uint64_t length = end != NULL ? (uint64_t)(end - copy - 8) : size - 8;
        memcpy(copy, &length, sizeof length);
    }
    attn_status status = tensors_open(&file, fuzz_file(copy, size), &error);
    fuzz_check_error(status, &error);
    if (status == ATTN_OK) {
        const cJSON *item = NULL;
        cJSON_ArrayForEach(item, file.header)
        {
            read_tensor(&file, item->string);
        }
        const char *text = tensors_metadata(&file, "format");
        FUZZ_CHECK(text == NULL || strlen(text) <= size);
        tensors_close(&file);
    }
    FUZZ_CHECK(file.bytes == NULL && file.header == NULL);
    blocks_free(&blocks);
    return 0;
}
