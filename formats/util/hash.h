/* SPDX-License-Identifier: Apache-2.0 */
/* FNV-1a, 64 bits: distinguishes states and finds damaged files; no protection against who wants to
 * deceive. */
#ifndef CORE_UTIL_HASH_H
#define CORE_UTIL_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HASH_INIT UINT64_C(0xcbf29ce484222325)

static inline uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t size)
{
    const unsigned char *at = bytes;
    for (size_t i = 0; i < size; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* With its NUL, so that "ab" "c" and "a" "bc" differ; NULL differs from "". */
static inline uint64_t hash_string(uint64_t hash, const char *string)
{
    return string != NULL ? hash_bytes(hash, string, strlen(string) + 1)
                          : hash_bytes(hash, "\1", 1);
}

#endif
