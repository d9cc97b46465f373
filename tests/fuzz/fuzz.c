/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/error.h"

#define MOST_BYTES ((size_t)128 << 10)

void fuzz_broken(const char *file, int line, const char *condition)
{
    fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, condition);
    abort();
}

uint8_t input_byte(struct input *input)
{
    if (input->left == 0) {
        return 0;
    }
    input->left--;
    return *input->at++;
}

static uint64_t raw(struct input *input, int32_t bytes)
{
    uint64_t value = 0;
    for (int32_t i = 0; i < bytes; i++) {
        value |= (uint64_t)input_byte(input) << (8 * i);
    }
    return value;
}

int32_t input_int(struct input *input)
{
    static const int32_t edges[] = {
        -1,  -2,  INT32_MIN, INT32_MIN + 1, INT32_MAX, INT32_MAX - 1, 255,     256,
        257, 512, 1024,      4096,          65535,     65536,         1 << 20, 1 << 30};
    uint8_t tag = input_byte(input);
    if (tag < 208) {
        return tag;
    }
    return tag < 240 ? edges[tag % 16] : (int32_t)(uint32_t)raw(input, 4);
}

int64_t input_int64(struct input *input)
{
    static const int64_t edges[] = {
        INT64_MIN,           INT64_MAX, (int64_t)1 << 31, (int64_t)1 << 32, (int64_t)1 << 48,
        -((int64_t)1 << 32), -1,        INT64_MAX / 2};
    uint8_t tag = input_byte(input);
    if (tag < 208) {
        return tag;
    }
    return tag < 240 ? edges[tag % 8] : (int64_t)raw(input, 8);
}

const char *input_text(struct input *input, const char *usual)
{
    static char longest[5000];
    const char *const end = longest + sizeof longest - 1;
    const char *const texts[] = {usual,
                                 NULL,
                                 "",
                                 longest,
                                 end - 63,
                                 end - 64,
                                 "a\nb",
                                 "\xff\xfe",
                                 "\xe2\x82",
                                 "%s%n%d",
                                 "b",
                                 "Upper",
                                 "\xe2\x82\xac name=a b"};
    uint8_t tag = input_byte(input);
    memset(longest, 'a', sizeof longest - 1);
    return texts[tag < sizeof texts / sizeof *texts ? tag : 0];
}

void input_patch(struct input *input, void *bytes, size_t from, size_t end)
{
    size_t words = (end - from) / 4;
    int32_t count = input_byte(input) & 15;
    for (int32_t i = 0; i < count - 7 && words > 0; i++) {
        size_t at = from + input_byte(input) % words * 4;
        int32_t value = input_int(input);
        memcpy((uint8_t *)bytes + at, &value, sizeof value);
    }
}

void *blocks_add(struct blocks *blocks, size_t size)
{
    FUZZ_CHECK(blocks->count < (int32_t)(sizeof blocks->all / sizeof *blocks->all));
    void *block = calloc(1, size > 0 ? size : 1);
    FUZZ_CHECK(block != NULL);
    blocks->all[blocks->count++] = block;
    return block;
}

void *blocks_add_aligned(struct blocks *blocks, size_t size)
{
    const size_t rounded = (size + 255) / 256 * 256;
    void **place = &blocks->all[blocks->count];
    FUZZ_CHECK(blocks->count < (int32_t)(sizeof blocks->all / sizeof *blocks->all));
    *place = aligned_alloc(256, rounded > 0 ? rounded : 256);
    FUZZ_CHECK(*place != NULL);
    memset(*place, 0, rounded);
    blocks->count++;
    return *place;
}

void blocks_free(struct blocks *blocks)
{
    for (int32_t i = 0; i < blocks->count; i++) {
        free(blocks->all[i]);
    }
    blocks->count = 0;
}

size_t input_struct_size(struct input *input, size_t size)
{
    const size_t sizes[] = {size, 0, size - 1, size + 8, 24, 65536, 65537, SIZE_MAX};
    const uint8_t tag = input_byte(input);
    return tag < 8 ? sizes[tag] : tag == 8 ? (size_t)input_int64(input) : size;
}

void *blocks_struct(struct blocks *blocks, struct input *input, const void *source, size_t size,
                    size_t says)
{
    /* Every struct and extension has a header that its reader must see to learn the size. */
    size_t there = says < sizeof(struct attn_ext) ? sizeof(struct attn_ext)
                   : says > MOST_BYTES            ? size
                                                  : says;
    uint8_t *copy = blocks_add(blocks, there);
    memcpy(copy, source, there < size ? there : size);
    if (there > size && (input_byte(input) & 1)) {
        copy[size + input_byte(input) % (there - size)] = 1;
    }
    return copy;
}

void fuzz_check_error(attn_status status, const struct attn_error *error)
{
    FUZZ_CHECK(status_is_known(status));
    FUZZ_CHECK(memchr(error->field, '\0', sizeof error->field) != NULL);
    FUZZ_CHECK(memchr(error->message, '\0', sizeof error->message) != NULL);
    FUZZ_CHECK(error->struct_size == sizeof *error);
    FUZZ_CHECK(status == ATTN_OK || (error->status == status && error->message[0] != '\0'));
}

const char *fuzz_file(const uint8_t *bytes, size_t size)
{
    static char path[64];
    static int descriptor = -1;
    if (descriptor < 0) {
        descriptor = memfd_create("input", MFD_CLOEXEC);
        FUZZ_CHECK(descriptor >= 0);
        snprintf(path, sizeof path, "/proc/self/fd/%d", descriptor);
    }
    FUZZ_CHECK(ftruncate(descriptor, 0) == 0);
    FUZZ_CHECK(pwrite(descriptor, bytes, size, 0) == (ssize_t)size);
    return path;
}
