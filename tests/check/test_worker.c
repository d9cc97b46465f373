/* SPDX-License-Identifier: Apache-2.0 */
/* Workers that end before their cases do: what the report says, and after how many ends no further
 * worker is started. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "common/command.h"
#include "harness/worker.h"
#include "support/test.h"

#define NUM_CASES 110 /* more than the crashes after which no case is run */

static void end_for_lack_of_memory(void)
{
    free(command_calloc(SIZE_MAX / 4, 2));
}

static void end_by_signal(void)
{
    raise(SIGKILL);
}

/* All cases but the last end their worker. */
static int run_cases(void *user, const struct outlet *outlet, int32_t skip)
{
    void (**end)(void) = user;
    for (int32_t i = skip; i < NUM_CASES; i++) {
        outlet_put(outlet, OUTLET_CASE, 0, "case", "");
        if (i < NUM_CASES - 1) {
            (*end)();
        }
        outlet_put(outlet, OUTLET_RESULT, TRIAL_PASSED, "case", "");
    }
    return EXIT_SUCCESS;
}

static void check_ends(void (*end)(void), int32_t passed, int32_t failed, const char *message)
{
    struct report report = {.backend = NULL};
    const int code = workers_run(&report, run_cases, &end, 60, false);
    assert_int_equal(code == EXIT_SUCCESS, passed > 0);
    assert_int_equal(report.counts[TRIAL_PASSED], passed);
    assert_int_equal(report.counts[TRIAL_FAILED], failed);
    assert_string_equal(report.lines[0].name, "case");
    assert_non_null(strstr(report.lines[0].message, message));
    report_finish(&report);
}

static void lack_of_memory_is_no_crash(void **state)
{
    (void)state;
    check_ends(end_for_lack_of_memory, 1, NUM_CASES - 1, "no memory for ");
}

static void crashes_have_an_end(void **state)
{
    (void)state;
    check_ends(end_by_signal, 0, 101, "the process was ended by signal 9");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(lack_of_memory_is_no_crash),
                                       cmocka_unit_test(crashes_have_an_end)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
