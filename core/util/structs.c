/* SPDX-License-Identifier: Apache-2.0 */
#include "util/structs.h"

#include <string.h>

/* No struct of any ABI is larger; a larger struct_size is garbage, and its tail may not be read. */
#define MAX_STRUCT_SIZE 65536
#define MAX_CHAIN 64
#define HEADER_SIZE (sizeof(size_t) + sizeof(void *))

attn_status struct_read(void *copy, size_t size, size_t minimum, const void *source,
                        const char *name, struct attn_error *error)
{
    const unsigned char *bytes = source;
    size_t given = 0;

    memset(copy, 0, size);
    if (source == NULL) {
        return error_set(error, ATTN_ERROR_INVALID_ARGUMENT, name,
                         "%s is NULL; a struct is required", name);
    }
    memcpy(&given, source, sizeof given);
    if (given < minimum || given > MAX_STRUCT_SIZE) {
        return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                         "%s.struct_size is %zu; allowed are %zu to %d", name, given, minimum,
                         MAX_STRUCT_SIZE);
    }
    for (size_t at = size; at < given; at++) {
        if (bytes[at] != 0) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                             "%s.struct_size is %zu and byte %zu is not 0; this library knows "
                             "%zu bytes, and an unknown tail has to be all zero",
                             name, given, at, size);
        }
    }
    memcpy(copy, source, given < size ? given : size);
    memcpy(copy, &size, sizeof size);
    return ATTN_OK;
}

attn_status struct_write(void *destination, const void *source, size_t size, size_t minimum)
{
    unsigned char *to = destination;
    size_t given = 0;
    size_t known = 0;

    if (destination == NULL) {
        return ATTN_ERROR_INVALID_ARGUMENT;
    }
    memcpy(&given, destination, sizeof given);
    if (given < minimum || given < HEADER_SIZE || given > MAX_STRUCT_SIZE) {
        return ATTN_ERROR_STRUCT_SIZE;
    }
    known = given < size ? given : size;
    memcpy(to + HEADER_SIZE, (const unsigned char *)source + HEADER_SIZE, known - HEADER_SIZE);
    memset(to + known, 0, given - known);
    return ATTN_OK;
}

const struct attn_ext *ext_find(const struct attn_ext *next, uint32_t id, size_t minimum)
{
    for (int32_t i = 0; next != NULL && i < MAX_CHAIN; i++) {
        if (next->id == id) {
            return next->struct_size >= minimum ? next : NULL;
        }
        next = next->next;
    }
    return NULL;
}

static int32_t is_known(uint32_t id, const uint32_t *known, int32_t num_known)
{
    for (int32_t i = 0; i < num_known; i++) {
        if (known[i] == id) {
            return 1;
        }
    }
    return 0;
}

attn_status ext_check(const struct attn_ext *next, const uint32_t *known, int32_t num_known,
                      const char *name, struct attn_error *error)
{
    int32_t length = 0;

    for (; next != NULL; next = next->next) {
        if (++length > MAX_CHAIN) {
            return error_set(error, ATTN_ERROR_EXTENSION, name,
                             "the extension chain of %s is longer than %d", name, MAX_CHAIN);
        }
        if (next->struct_size < sizeof(struct attn_ext) || next->struct_size > MAX_STRUCT_SIZE) {
            return error_set(error, ATTN_ERROR_STRUCT_SIZE, name,
                             "extension %u of %s has struct_size %zu; allowed are %zu to %d",
                             next->id, name, next->struct_size, sizeof(struct attn_ext),
                             MAX_STRUCT_SIZE);
        }
        if ((next->flags & ATTN_EXT_OPTIONAL) == 0 && !is_known(next->id, known, num_known)) {
            return error_set(error, ATTN_ERROR_EXTENSION, name,
                             "extension %u of %s is not known here and not marked optional",
                             next->id, name);
        }
    }
    return ATTN_OK;
}
