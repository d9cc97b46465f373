/* SPDX-License-Identifier: Apache-2.0 */
/* Tests of core/bind: a fixture and an error that each begins with, and that end with it. */
#ifndef TEST_BIND_CASE_H
#define TEST_BIND_CASE_H

#include "fake_backend.h"

static struct fixture fixture;
static struct attn_error error;

static int begin(void **state)
{
    error = (struct attn_error)ATTN_ERROR_INIT;
    return 0;
}

static int end(void **state)
{
    fixture_finish(&fixture);
    return 0;
}

#define CASE(name) TEST_AROUND(name, begin, end)

#endif
