/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka with what its header needs, tests that enter themselves into their program's list, and
 * calls of the library that have to succeed or to fail. */
#ifndef SUPPORT_TEST_H
#define SUPPORT_TEST_H

#include <stdbool.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "owned.h"

/* TEST(name) { ... } is a test of its program; `state` is what a set-up made. */
#define TEST(name) TEST_AROUND(name, NULL, NULL)

/* The same with a set-up and a tear-down of its own. */
#define TEST_AROUND(name, set_up, tear_down)                                                       \
    static void name(void **state);                                                                \
    __attribute__((constructor)) static void name##_is_listed(void)                                \
    {                                                                                              \
        static struct test test = {.line = __LINE__};                                              \
        test.unit = (struct CMUnitTest){#name, name, set_up, tear_down, NULL};                     \
        test_add(&test);                                                                           \
    }                                                                                              \
    static void name(__attribute__((unused)) void **state)

/* The same, with what the set-up made as `variable`, a pointer to `type`. */
#define TEST_WITH(type, variable, name, set_up, tear_down)                                         \
    static void name##_with(type *variable);                                                       \
    TEST_AROUND(name, set_up, tear_down)                                                           \
    {                                                                                              \
        name##_with(*state);                                                                       \
    }                                                                                              \
    static void name##_with(type *variable)

struct test {
    struct CMUnitTest unit;
    int line;
    struct test *next;
};

/* Enters a test, which the list keeps. */
void test_add(struct test *test);
/* Runs the program's tests in the order in which their file has them, between a set-up and a
 * tear-down of all (or NULL), and returns how many failed. A program without a main of its own
 * (test_main.c) runs them with neither. */
int test_run(CMFixtureFunction set_up, CMFixtureFunction tear_down);

/* `call` has to return ATTN_OK; `owner` points to a struct whose `error` has the text otherwise. */
#define CHECK(owner, call)                                                                         \
    do {                                                                                           \
        if ((call) != ATTN_OK) {                                                                   \
            fail_msg("%s: %s: %s", #call, (owner)->error.field, (owner)->error.message);           \
        }                                                                                          \
    } while (0)

/* The same without a text. */
#define assert_ok(call) assert_int_equal(call, 0)

/* `call` has to fail as `expected` and name `field_` in *error. */
#define REFUSED_AS(expected, error, field_, call)                                                  \
    do {                                                                                           \
        const attn_status status_ = (call);                                                        \
        if (status_ != (expected) || strcmp((error)->field, field_) != 0) {                        \
            fail_msg("%s: status %d, field '%s'", #call, (int)status_, (error)->field);            \
        }                                                                                          \
    } while (0)

/* As what callers get wrong most: an argument. */
#define INVALID(error, field_, call) REFUSED_AS(ATTN_ERROR_INVALID_ARGUMENT, error, field_, call)

/* The same with any status but ATTN_OK. */
#define REFUSED(error, field_, call)                                                               \
    do {                                                                                           \
        const attn_status any_ = (call);                                                           \
        assert_int_not_equal(any_, ATTN_OK);                                                       \
        REFUSED_AS(any_, error, field_, any_);                                                     \
    } while (0)

/* The error that `owner` points to has the text. */
#define SAYS(owner, text)                                                                          \
    do {                                                                                           \
        if (strstr((owner)->error.message, text) == NULL) {                                        \
            fail_msg("no '%s' in: %s", text, (owner)->error.message);                              \
        }                                                                                          \
    } while (0)

/* Runs `check` after `change` and then restores `object`. */
#define WITH(object, change, check)                                                                \
    do {                                                                                           \
        __typeof__(object) kept_ = (object);                                                       \
        change;                                                                                    \
        check;                                                                                     \
        (object) = kept_;                                                                          \
    } while (0)

/* Goes on as true in a child process, whose block ends with _exit(0) within a minute, and then as
 * false in this one. */
bool test_apart(void);

/* Whether this process has mapped a file of that name. */
bool test_maps(const char *file);

#endif
