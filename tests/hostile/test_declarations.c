/* SPDX-License-Identifier: Apache-2.0 */
/* Declarations that are unknown, impossible or contradict each other: the same status and reason
 * whether the plugin is probed in this process or in its own. The argument is libattn.so.1. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "support/test.h"

#define DECLARES(name, status, reason, ...) {#name, status, reason},
static const struct {
    const char *name;
    attn_status status;
    const char *reason;
} cases[] = {
    {"", ATTN_OK, ""},
#include "declarations.h"
};

static void check_case(size_t i, bool two)
{
    const attn_status expected = two ? ATTN_OK : cases[i].status;
    const int32_t backends = (cases[i].status == ATTN_OK) + two;
    assert_int_equal(setenv("HOSTILE_CASE", cases[i].name, 1), 0);
    assert_int_equal(setenv("HOSTILE_SECOND", two ? "1" : "", 1), 0);
    for (int32_t isolation = -1; isolation <= 1; isolation += 2) {
        attn_runtime *runtime =
            create_by(api, PLUGIN("declares") ":" PLUGIN("none"), isolation, 0, NULL, ATTN_OK);
        const struct attn_plugin_info info = info_of(api, runtime, 0);
        if (info.status != expected || strcmp(info.reason, cases[i].reason) != 0) {
            fail_msg("%s, isolation %d: status %d, '%s'", cases[i].name, isolation, info.status,
                     info.reason);
        }
        assert_int_equal(info.num_backends, backends);
        assert_int_equal(api->backend_count(runtime), 1 + backends);
        api->runtime_destroy(runtime);
    }
}

/* Each alone, and next to a sound backend of the same plugin, which is not refused with it. */
TEST(each_is_refused)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        /* a device that is left out takes all backends on it along */
        bool sound = strncmp(cases[i].name, "device_", 7) != 0 ||
                     strcmp(cases[i].name, "device_was_not_reported") == 0;
        sound = sound && strcmp(cases[i].name, "nothing") != 0;
        check_case(i, false);
        if (sound) {
            check_case(i, true);
        }
    }
    print_message("%zu declarations refused\n", sizeof cases / sizeof *cases - 1);
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(NULL, NULL);
}
