/* SPDX-License-Identifier: Apache-2.0 */
#include "test.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

static struct test *first;
static size_t count;

void test_add(struct test *test)
{
    struct test **place = &first;
    while (*place != NULL && (*place)->line < test->line) {
        place = &(*place)->next;
    }
    test->next = *place;
    *place = test;
    count++;
}

int test_run(CMFixtureFunction set_up, CMFixtureFunction tear_down)
{
    if (count == 0) {
        print_error("no test has been linked\n");
        return 1;
    }
    struct CMUnitTest tests[count];
    size_t i = 0;
    for (const struct test *test = first; test != NULL; test = test->next) {
        tests[i++] = test->unit;
    }
    return cmocka_run_group_tests(tests, set_up, tear_down);
}

bool test_apart(void)
{
    int status = -1;
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(60);
        return true;
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    return false;
}

bool test_maps(const char *file)
{
    char line[1024];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof line, maps) != NULL) {
        found |= strstr(line, file) != NULL;
    }
    fclose(maps);
    return found;
}
