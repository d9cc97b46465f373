/* SPDX-License-Identifier: Apache-2.0 */
#include "util/device.h"

#include <string.h>

static size_t add_text(char *to, size_t at, const char *text)
{
    size_t length = strlen(text);
    memcpy(to + at, text, length + 1);
    return at + length;
}

static size_t add_number(char *to, size_t at, int64_t number)
{
    char digits[24];
    int32_t count = 0;
    if (number < 0) {
        to[at++] = '-';
        number = -number;
    }
    do {
        digits[count++] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    while (count > 0) {
        to[at++] = digits[--count];
    }
    return at;
}

const char *device_text(struct attn_device device, char *text)
{
    static const struct {
        int32_t type;
        const char *name;
    } names[] = {{0, "cpu"}, /* not stated */
                 {ATTN_DEVICE_CPU, "cpu"},
                 {ATTN_DEVICE_CUDA, "cuda"},
                 {ATTN_DEVICE_CUDA_HOST, "cuda_host"},
                 {ATTN_DEVICE_ROCM, "rocm"},
                 {ATTN_DEVICE_ROCM_HOST, "rocm_host"},
                 {ATTN_DEVICE_EXTENSION, "extension"},
                 {ATTN_DEVICE_CUDA_MANAGED, "cuda_managed"},
                 {ATTN_DEVICE_ONEAPI, "oneapi"}};
    size_t at = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names && at == 0; i++) {
        at = names[i].type == device.type ? add_text(text, 0, names[i].name) : 0;
    }
    if (at == 0) {
        at = add_number(text, add_text(text, 0, "type "), device.type);
    }
    text[at++] = ':';
    at = add_number(text, at, device.id);
    text[at] = '\0';
    return text;
}
