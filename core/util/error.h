/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a caller's attn_error. The function that detects a fault writes it, once: the field, its
 * value and what is allowed. */
#ifndef CORE_UTIL_ERROR_H
#define CORE_UTIL_ERROR_H

#include <attn/status.h>
#include <stdbool.h>

#if defined(__GNUC__)
#define CORE_PRINTF(format_index, first) __attribute__((format(printf, format_index, first)))
#else
#define CORE_PRINTF(format_index, first)
#endif

/* Returns `status`, so that `return error_set(error, ATTN_ERROR_..., "field", "...")` reads well.
 * `error` may be NULL; at most error->struct_size bytes are written. `field` may be NULL. Not for
 * the path of a successful step. */
attn_status error_set(struct attn_error *error, attn_status status, const char *field,
                      const char *format, ...) CORE_PRINTF(4, 5);

/* Copies ready text. */
attn_status error_set_text(struct attn_error *error, attn_status status, const char *field,
                           const char *message);

/* Passes on a plugin's failure, or ATTN_OK: a number that is no status becomes ATTN_ERROR_PLUGIN,
 * and the text in `from`, which may be open, empty or anything, becomes clean text. `from` may be
 * `error` itself, which may be NULL. */
attn_status error_relay(struct attn_error *error, attn_status status,
                        const struct attn_error *from);

bool status_is_known(attn_status status);

const char *status_text(attn_status status);

/* What a caller handed in is refused in `error`, or there is no memory for something. */
#define BAD(field, ...) error_set(error, ATTN_ERROR_INVALID_ARGUMENT, field, __VA_ARGS__)
#define NO_MEMORY(field, ...)                                                                      \
    error_set(error, ATTN_ERROR_OUT_OF_MEMORY, field, "no memory for " __VA_ARGS__)

/* Ends the function with the status of a call that fails; the second makes the call where
 * `condition` holds. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const attn_status tried = (call);                                                          \
        if (tried != ATTN_OK) {                                                                    \
            return tried;                                                                          \
        }                                                                                          \
    } while (0)
#define TRY_IF(condition, call)                                                                    \
    do {                                                                                           \
        if (condition) {                                                                           \
            TRY(call);                                                                             \
        }                                                                                          \
    } while (0)

/* Ends the function with `refusal` where a rule is broken. */
#define REFUSE_WHERE(broken, refusal)                                                              \
    do {                                                                                           \
        if (broken) {                                                                              \
            return refusal;                                                                        \
        }                                                                                          \
    } while (0)
#define ERROR_IF(broken, status, field, ...)                                                       \
    REFUSE_WHERE(broken, error_set(error, status, field, __VA_ARGS__))
#define BAD_IF(broken, field, ...) REFUSE_WHERE(broken, BAD(field, __VA_ARGS__))
#define NO_MEMORY_IF(broken, field, ...) REFUSE_WHERE(broken, NO_MEMORY(field, __VA_ARGS__))

#endif
