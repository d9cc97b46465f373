/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka with what its header needs, and calls of the library that have to succeed. */
#ifndef SUPPORT_TEST_H
#define SUPPORT_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* `call` has to return ATTN_OK; `owner` points to a struct whose `error` has the text otherwise. */
#define CHECK(owner, call)                                                                         \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("%s: %s: %s", #call, (owner)->error.field, (owner)->error.message);           \
        }                                                                                          \
    } while (0)

#endif
