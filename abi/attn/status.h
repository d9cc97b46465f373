/* SPDX-License-Identifier: Apache-2.0 */
/* Status codes, and the storage that a caller owns for the text of an error. */
#ifndef ATTN_STATUS_H
#define ATTN_STATUS_H

#include "version.h"

/* X(name, value, what a person reads). Zero succeeds; the values never change. */
#define ATTN_STATUS_LIST(X)                                                                        \
    X(ATTN_OK, 0, "ok")                                                                            \
    X(ATTN_ERROR_INVALID_ARGUMENT, 1, "invalid argument")                                          \
    X(ATTN_ERROR_UNSUPPORTED, 2, "unsupported")                                                    \
    X(ATTN_ERROR_OUT_OF_MEMORY, 3, "out of memory")                                                \
    X(ATTN_ERROR_ABI_VERSION, 4, "no common ABI version")                                          \
    X(ATTN_ERROR_STRUCT_SIZE, 5, "struct of an unknown size")                                      \
    X(ATTN_ERROR_EXTENSION, 6, "unknown extension")                                                \
    X(ATTN_ERROR_NOT_FOUND, 7, "not found")                                                        \
    X(ATTN_ERROR_NO_BACKEND, 8, "no backend can serve the layer")                                  \
    X(ATTN_ERROR_REFUSED, 9, "an ordered backend cannot be used")                                  \
    X(ATTN_ERROR_SYNTAX, 10, "syntax error")                                                       \
    X(ATTN_ERROR_PLUGIN, 11, "broken plugin")                                                      \
    X(ATTN_ERROR_DEVICE, 12, "device error")                                                       \
    X(ATTN_ERROR_ABSENT, 13, "hardware or driver absent")                                          \
    X(ATTN_ERROR_WORKSPACE, 14, "workspace too small")                                             \
    X(ATTN_ERROR_ORDER, 15, "call out of order")                                                   \
    X(ATTN_ERROR_LIMIT, 16, "over a limit given at creation")                                      \
    X(ATTN_ERROR_IO, 17, "input or output failed")                                                 \
    X(ATTN_ERROR_TIMEOUT, 18, "deadline passed")                                                   \
    X(ATTN_ERROR_NAN, 19, "NaN found by validation")                                               \
    X(ATTN_ERROR_INTERNAL, 20, "internal error")

enum attn_status_code {
#define ATTN_STATUS_ENUM(name, value, text) name = value,
    ATTN_STATUS_LIST(ATTN_STATUS_ENUM)
#undef ATTN_STATUS_ENUM
        ATTN_STATUS_FORCE_INT32 = 0x7fffffff
};
typedef int32_t attn_status;

#define ATTN_ERROR_FIELD_SIZE 64
#define ATTN_ERROR_MESSAGE_SIZE 944

/* Storage for one error, owned by the caller, who sets struct_size and may keep it on the stack.
 * Whoever detects the error writes it once: the field (`num_kv_heads`), and a line with the value
 * and what was allowed. Every function that takes a `struct attn_error *` accepts NULL (no text is
 * then written). It is written on failure only. A step formats no string: where a run fails,
 * `message` is copied from prepared text. */
struct attn_error {
    size_t struct_size;
    attn_status status;
    int32_t reserved;
    /* NUL-terminated; empty if no single field is at fault */
    char field[ATTN_ERROR_FIELD_SIZE];
    /* NUL-terminated UTF-8, cut at a character's end if too long */
    char message[ATTN_ERROR_MESSAGE_SIZE];
};

ATTN_STATIC_ASSERT(sizeof(struct attn_error) == 1024, "attn_error is frozen");

#define ATTN_ERROR_INIT                                                                            \
    {                                                                                              \
        sizeof(struct attn_error), ATTN_OK, 0, {0},                                                \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }

#endif
