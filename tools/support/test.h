/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka with what its header needs, and calls of the library that have to succeed or to fail. */
#ifndef SUPPORT_TEST_H
#define SUPPORT_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* `call` has to return ATTN_OK; `owner` points to a struct whose `error` has the text otherwise. */
#define CHECK(owner, call)                                                                         \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("%s: %s: %s", #call, (owner)->error.field, (owner)->error.message);           \
        }                                                                                          \
    } while (0)

/* `call` has to fail as `expected` and name `field_` in *error. */
#define REFUSED_AS(expected, error, field_, call)                                                  \
    do {                                                                                           \
        const attn_status status_ = (call);                                                        \
        if (status_ != (expected) || strcmp((error)->field, field_) != 0) {                        \
            fail_msg("%s: status %d, field '%s'", #call, (int)status_, (error)->field);            \
        }                                                                                          \
    } while (0)

/* The same with any status but ATTN_OK. */
#define REFUSED(error, field_, call)                                                               \
    do {                                                                                           \
        const attn_status any_ = (call);                                                           \
        assert_int_not_equal(any_, ATTN_OK);                                                       \
        REFUSED_AS(any_, error, field_, any_);                                                     \
    } while (0)

#endif
