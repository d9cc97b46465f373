/* SPDX-License-Identifier: Apache-2.0 */
#include "fixture.h"

#include "support/client.h"
#include "support/test.h"

const struct attn_api *api;
const char *core_file, *scan_file;

attn_runtime *create_by(const struct attn_api *table, const char *path, int32_t isolation,
                        int32_t deadline, struct meter *meter, attn_status expected)
{
    const struct attn_host host = meter_host(meter);
    struct attn_runtime_options options = client_options(path);
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    options.host = meter != NULL ? &host : NULL;
    options.log_level = 1 + (meter != NULL ? ATTN_LOG_INFO : ATTN_LOG_ERROR);
    options.isolation = isolation;
    options.probe_deadline_ms = deadline;
    const attn_status status = table->runtime_create(&options, &runtime, &error);
    /* An answer that comes in fewer pieces grows its text in fewer steps. */
    if (meter != NULL && meter->fail_at > meter->calls) {
        expected = ATTN_OK;
    }
    if (status != expected) {
        fail_msg("%s: status %d, %s: %s", path, status, error.field, error.message);
    }
    return runtime;
}

attn_runtime *create(const char *path, int32_t deadline)
{
    return create_by(api, path, 0, deadline, NULL, ATTN_OK);
}

struct attn_plugin_info info_of(const struct attn_api *table, const attn_runtime *runtime,
                                int32_t index)
{
    struct attn_plugin_info info = {.struct_size = sizeof info};
    assert_ok(table->plugin_info(runtime, index, &info));
    return info;
}

int fixture_open(int argc, char **argv)
{
    struct attn_error error = ATTN_ERROR_INIT;
    if (argc != 3) {
        fprintf(stderr, "usage: %s libattn.so.1 attn-scan\n", argv[0]);
        return 2;
    }
    core_file = argv[1];
    scan_file = argv[2];
    /* The scanner's signals are what is tested here, not a sanitizer's account of them. */
    setenv("ASAN_OPTIONS", "handle_segv=0:handle_abort=0:handle_sigill=0:handle_sigfpe=0", 1);
    setenv("TSAN_OPTIONS", "handle_segv=0:handle_abort=0:handle_sigill=0:handle_sigfpe=0", 1);
    return client_load(core_file, &api, &error) != ATTN_OK;
}
