/* SPDX-License-Identifier: Apache-2.0 */
/* Entry, discovery, loading and probing: through the table, over the plugins of tests/hostile. */
#include <attn/api.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/runtime.h"
#include "support/client.h"
#include "support/services.h"
#include "support/test.h"

/* HOSTILE_DIR: where the plugins of tests/hostile were built, as attn_NAME.so. */
#if !defined(HOSTILE_DIR)
#error "the build has to define HOSTILE_DIR"
#endif
#define PLUGIN(name) HOSTILE_DIR "/attn_" name ".so"

static const struct attn_api *api;

static attn_runtime *create_with(const char *path, const struct attn_host *host,
                                 attn_status expected)
{
    struct attn_runtime_options options = client_options(path);
    options.host = host;
    options.num_threads = 2;
    options.log_level = 1 + ATTN_LOG_ERROR;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    const attn_status status = api->runtime_create(&options, &runtime, &error);
    if (status != expected) {
        fail_msg("%s: status %d, %s: %s", path, status, error.field, error.message);
    }
    assert_int_equal(runtime != NULL, status == ATTN_OK);
    return runtime;
}

static struct attn_plugin_info info_of(const attn_runtime *runtime, int32_t index)
{
    struct attn_plugin_info info = {.struct_size = sizeof info};
    assert_ok(api->plugin_info(runtime, index, &info));
    return info;
}

TEST(negotiates)
{
    const struct attn_api *table = (const struct attn_api *)&state;
    struct attn_error error = ATTN_ERROR_INIT;
    assert_ok(attn_get_api(0, UINT32_MAX, &table, NULL));
    assert_int_equal(table->abi_version, ATTN_ABI_VERSION);
    assert_int_equal(table->struct_size, sizeof *table);
    assert_int_equal(attn_get_api(ATTN_ABI_VERSION + 1, UINT32_MAX, &table, &error),
                     ATTN_ERROR_ABI_VERSION);
    assert_null(table);
    assert_non_null(strstr(error.message, "0.1"));
    assert_int_equal(attn_get_api(0, ATTN_MAKE_VERSION(0, 2), &table, &error),
                     ATTN_ERROR_ABI_VERSION);
    assert_non_null(strstr(error.message, "0.0 to 0.2; libattn"));
    assert_int_equal(attn_get_api(2, 1, &table, NULL), ATTN_ERROR_ABI_VERSION);
    assert_int_equal(attn_get_api(0, UINT32_MAX, NULL, NULL), ATTN_ERROR_INVALID_ARGUMENT);
}

/* Every slot between status_text and the end is there. */
TEST(table_is_full)
{
    const char *bytes = (const char *)api;
    for (size_t at = offsetof(struct attn_api, version); at < sizeof *api; at += sizeof(void *)) {
        void *slot = NULL;
        memcpy(&slot, bytes + at, sizeof slot);
        if (slot == NULL) {
            fail_msg("the slot at byte %zu is NULL", at);
        }
    }
}

TEST(sound_plugin_is_taken)
{
    attn_runtime *runtime = create_with(PLUGIN("none"), NULL, ATTN_OK);
    struct attn_backend_info backend = {.struct_size = sizeof backend};
    struct attn_device_info device = {.struct_size = sizeof device};
    assert_int_equal(api->plugin_count(runtime), 1);
    assert_ok(info_of(runtime, 0).status);
    assert_string_equal(info_of(runtime, 0).name, "sound");
    assert_string_equal(info_of(runtime, 0).reason, "");
    assert_int_equal(info_of(runtime, 0).num_backends, 1);
    assert_int_equal(api->backend_count(runtime), 1);
    assert_ok(api->backend_info(runtime, 0, &backend));
    assert_string_equal(backend.caps->name, "sound");
    assert_int_equal(backend.caps->block_sizes[0].max, 256);
    assert_int_equal(backend.caps->head_sizes[0].qk.multiple, 64);
    assert_int_equal(api->backend_info(runtime, 1, &backend), ATTN_ERROR_NOT_FOUND);
    assert_int_equal(api->backend_info(runtime, -1, &backend), ATTN_ERROR_NOT_FOUND);
    assert_int_equal(api->device_count(runtime), 1);
    assert_ok(api->device_info(runtime, 0, &device));
    assert_string_equal(device.name, "test CPU");
    api->runtime_destroy(runtime);
    api->runtime_destroy(NULL);
}

struct defect {
    const char *name;
    attn_status status;
    const char *says;
};

/* The whole reason, or its beginning up to a star: lists that grow with the ABI, and text without
 * end. */
static bool fits(const char *reason, const char *says)
{
    const size_t length = strlen(says);
    return says[length - 1] == '*' ? strncmp(reason, says, length - 1) == 0
                                   : strcmp(reason, says) == 0;
}

/* Each defect costs its own plugin, with its own reason, and not the sound one next to it. */
TEST(defects_are_refused)
{
    static const struct defect defects[] = {
        {"missing_symbol", ATTN_ERROR_PLUGIN, "symbol: does not export attn_plugin_entry"},
        {"null_slot", ATTN_ERROR_PLUGIN,
         "probe: a required slot is NULL: probe NULL, create there, destroy there"},
        {"table_size_small", ATTN_ERROR_STRUCT_SIZE,
         "attn_plugin: attn_plugin.struct_size is 8; allowed are 88 to 65536"},
        {"table_size_large", ATTN_ERROR_STRUCT_SIZE,
         "attn_plugin: attn_plugin.struct_size is 18446744073709551615; allowed are 88 to 65536"},
        {"abi_refused", ATTN_ERROR_ABI_VERSION, "speaks ABI 9.0 only"},
        {"abi_too_new", ATTN_ERROR_ABI_VERSION, "abi_version: the plugin was built for ABI 9.0; *"},
        {"bad_backend_name", ATTN_ERROR_PLUGIN,
         "name: a backend's name is not [a-z][a-z0-9_]* of at most 63 bytes"},
        {"missing_array", ATTN_ERROR_PLUGIN,
         "head_sizes: missing_array: 1 head_sizes at NULL; 0 to 256 in an array"},
        {"preferred_layout", ATTN_ERROR_PLUGIN,
         "preferred_layout: preferred_layout: preferred_layout 1 is not one of its layouts"},
        {"caps_size_lies", ATTN_ERROR_STRUCT_SIZE,
         "attn_backend_caps: attn_backend_caps.struct_size is 18446744073709551615; allowed are "
         "320 "
         "to 65536"},
        {"endless_text", ATTN_ERROR_DEVICE,
         "fffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff: mmmm*"},
        {"absent", ATTN_ERROR_ABSENT, "no such accelerator"},
        {"claims_no_memory", ATTN_ERROR_OUT_OF_MEMORY, "out of memory (status 3), without a text"},
    };

    for (size_t i = 0; i < sizeof defects / sizeof *defects; i++) {
        char path[2 * PATH_MAX];
        attn_runtime *runtime = NULL;
        struct attn_plugin_info info;
        snprintf(path, sizeof path, "%s/attn_%s.so:%s", HOSTILE_DIR, defects[i].name,
                 PLUGIN("none"));
        runtime = create_with(path, NULL, ATTN_OK);
        assert_int_equal(api->plugin_count(runtime), 2);
        info = info_of(runtime, 0);
        if (info.status != defects[i].status || !fits(info.reason, defects[i].says)) {
            fail_msg("%s: status %d, reason '%s'", defects[i].name, info.status, info.reason);
        }
        assert_int_equal(info.num_backends, 0);
        assert_ok(info_of(runtime, 1).status);
        assert_int_equal(api->backend_count(runtime), 1);
        api->runtime_destroy(runtime);
    }
}

/* Each required slot by its name. */
TEST(slots_are_all_there)
{
    static const char *const slots[] = {"probe", "create", "destroy"};
    for (size_t i = 0; i < 3; i++) {
        char says[16];
        assert_int_equal(setenv("HOSTILE_SLOT", slots[i], 1), 0);
        attn_runtime *runtime = create_with(PLUGIN("null_slot"), NULL, ATTN_OK);
        assert_int_equal(info_of(runtime, 0).status, ATTN_ERROR_PLUGIN);
        snprintf(says, sizeof says, "%s NULL", slots[i]);
        assert_non_null(strstr(info_of(runtime, 0).reason, says));
        api->runtime_destroy(runtime);
    }
    assert_int_equal(unsetenv("HOSTILE_SLOT"), 0);
}

/* If a device is reported twice, the report that knows its instruction sets counts. */
TEST(devices_are_merged)
{
    static const char *const paths[] = {PLUGIN("none") ":" PLUGIN("rich"),
                                        PLUGIN("rich") ":" PLUGIN("none")};
    for (size_t i = 0; i < 2; i++) {
        attn_runtime *runtime = create_with(paths[i], NULL, ATTN_OK);
        struct attn_device_info device = {.struct_size = sizeof device};
        assert_int_equal(api->device_count(runtime), 2);
        assert_ok(api->device_info(runtime, 0, &device));
        assert_string_equal(device.isa, "one,two");
        api->runtime_destroy(runtime);
    }
}

static void run_in_caller(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                          void *argument)
{
    body(argument, 0, count, 0);
}

/* An engine's own loops run in as many threads as it says, or as the options say. */
TEST(threads_of_an_engine)
{
    const int32_t threads[] = {3, 0};
    for (size_t i = 0; i < 2; i++) {
        const struct attn_host host =
            SIZED(attn_host, .parallel_for = run_in_caller, .num_threads = threads[i]);
        attn_runtime *runtime = create_with("", &host, ATTN_OK);
        assert_int_equal(runtime->host.num_threads, threads[i] > 0 ? threads[i] : 2);
        api->runtime_destroy(runtime);
    }
}

TEST(second_of_one_name_is_refused)
{
    attn_runtime *runtime = create_with(PLUGIN("none") ":" PLUGIN("duplicate_name"), NULL, ATTN_OK);
    assert_ok(info_of(runtime, 0).status);
    assert_int_equal(info_of(runtime, 1).status, ATTN_ERROR_PLUGIN);
    assert_non_null(strstr(info_of(runtime, 1).reason, "sound"));
    assert_int_equal(api->backend_count(runtime), 1);
    api->runtime_destroy(runtime);
}

TEST(paths_are_absolute)
{
    char here[PATH_MAX];
    attn_runtime *runtime = NULL;
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(chdir(HOSTILE_DIR), 0);
    runtime = create_with("attn_none.so:.:/no/such/place:" PLUGIN("none") ":" PLUGIN("none"), NULL,
                          ATTN_OK); /* one that stands twice is one */
    assert_int_equal(chdir(here), 0);
    assert_int_equal(api->plugin_count(runtime), 4);
    assert_int_equal(info_of(runtime, 0).status, ATTN_ERROR_INVALID_ARGUMENT);
    assert_non_null(strstr(info_of(runtime, 0).reason, "absolute"));
    assert_int_equal(info_of(runtime, 1).status, ATTN_ERROR_INVALID_ARGUMENT);
    assert_int_equal(info_of(runtime, 2).status, ATTN_ERROR_NOT_FOUND);
    assert_ok(info_of(runtime, 3).status);
    api->runtime_destroy(runtime);
}

/* A directory gives its attn_*.so in the order of their names, and nothing else of it. */
TEST(directory_is_read)
{
    char folder[] = "/tmp/attn_test_XXXXXX";
    char path[4][64];
    attn_runtime *runtime = NULL;
    FILE *file = NULL;
    assert_non_null(mkdtemp(folder));
    snprintf(path[0], sizeof path[0], "%s/attn_b.so", folder);
    snprintf(path[1], sizeof path[1], "%s/attn_a.so", folder);
    snprintf(path[2], sizeof path[2], "%s/other.so", folder);
    snprintf(path[3], sizeof path[3], "%s/attn_c.txt", folder);
    for (int i = 1; i < 4; i++) {
        file = fopen(path[i], "w");
        assert_non_null(file);
        fputs("this is text, and longer than the head of an ELF file", file);
        fclose(file);
    }
    assert_int_equal(symlink(PLUGIN("none"), path[0]), 0);
    runtime = create_with(folder, NULL, ATTN_OK);
    assert_int_equal(api->plugin_count(runtime), 2);
    assert_string_equal(info_of(runtime, 0).file, path[1]);
    assert_int_equal(info_of(runtime, 0).status, ATTN_ERROR_PLUGIN);
    assert_non_null(strstr(info_of(runtime, 0).reason, "ELF"));
    assert_ok(info_of(runtime, 1).status);
    api->runtime_destroy(runtime);
    for (int i = 0; i < 4; i++) {
        unlink(path[i]);
    }
    rmdir(folder);
}

TEST(bad_options_are_refused)
{
    static const struct attn_host half[] = {
        {.struct_size = sizeof *half, .allocate = services_allocate},
        {.struct_size = sizeof *half, .release = services_release},
        {.struct_size = sizeof *half, .num_threads = -1}};
    static const struct attn_runtime_options bad[] = {
        {.struct_size = 8},
        {.struct_size = sizeof(struct attn_runtime_options), .host = &half[0]},
        {.struct_size = sizeof(struct attn_runtime_options), .host = &half[1]},
        {.struct_size = sizeof(struct attn_runtime_options), .host = &half[2]},
        {.struct_size = sizeof(struct attn_runtime_options), .reserved = 1},
        {.struct_size = sizeof(struct attn_runtime_options), .isolation = 2},
        {.struct_size = sizeof(struct attn_runtime_options), .probe_deadline_ms = -1},
        {.struct_size = sizeof(struct attn_runtime_options), .cache_dir = "here"},
        {.struct_size = sizeof(struct attn_runtime_options), .num_threads = -1},
        {.struct_size = sizeof(struct attn_runtime_options), .log_level = 99},
    };

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        attn_runtime *runtime = (attn_runtime *)&error;
        assert_int_not_equal(api->runtime_create(&bad[i], &runtime, &error), ATTN_OK);
        assert_null(runtime);
        assert_true(error.message[0] != '\0');
    }
    assert_int_equal(api->runtime_create(NULL, NULL, NULL), ATTN_ERROR_INVALID_ARGUMENT);
}

static attn_status create_in(const char *variable, const char *value, bool ignored,
                             const char *plugin_path, int32_t *num_plugins)
{
    const struct attn_runtime_options options = SIZED(
        attn_runtime_options, .plugin_path = plugin_path, .cache_dir = "",
        .log_level = 1 + ATTN_LOG_ERROR, .ignore_environment = ignored, .no_default_plugins = 1);
    attn_runtime *runtime = NULL;
    setenv(variable, value, 1);
    attn_status status = api->runtime_create(&options, &runtime, NULL);
    unsetenv(variable);
    *num_plugins = api->plugin_count(runtime);
    api->runtime_destroy(runtime);
    return status;
}

/* Options stand over the environment, which counts unless it is to be ignored. */
TEST(environment_is_read)
{
    int32_t plugins;
    assert_ok(create_in("ATTN_PLUGIN_PATH", PLUGIN("none"), false, NULL, &plugins));
    assert_int_equal(plugins, 1);
    assert_ok(create_in("ATTN_PLUGIN_PATH", PLUGIN("none"), true, NULL, &plugins));
    assert_int_equal(plugins, 0);
    assert_ok(
        create_in("ATTN_PLUGIN_PATH", PLUGIN("none") ":" PLUGIN("rich"), false, "", &plugins));
    assert_int_equal(plugins, 0);
    const char *const wrong[] = {"2x", "0", "-1", "4097", "two"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        assert_int_equal(create_in("ATTN_NUM_THREADS", wrong[i], false, "", &plugins),
                         ATTN_ERROR_INVALID_ARGUMENT);
        assert_ok(create_in("ATTN_NUM_THREADS", wrong[i], true, "", &plugins));
    }
    assert_ok(create_in("ATTN_NUM_THREADS", "2", false, "", &plugins));
    const char *const records[] = {"/a:layer=0,step=3",
                                   "/a:b:layer=12,step=0,contents=real",
                                   "/a:layer=1,step=2,contents=random",
                                   "a:layer=0,step=3",
                                   "/a",
                                   "/a:layer=0",
                                   "/a:layer=-1,step=0",
                                   "/a:layer=0,step=-1",
                                   "/a:layer=0,step=3x",
                                   "/a:layer=0,step=3,contents=",
                                   "/a:layer=0,step=3,contents=all",
                                   "/a:layer=0,step=3,contents=real,",
                                   "/a:step=3,layer=0",
                                   "/a:layer=0,step=99999999999"};
    for (size_t i = 0; i < sizeof records / sizeof *records; i++) {
        assert_int_equal(create_in("ATTN_RECORD", records[i], false, "", &plugins),
                         i < 3 ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
    }
    const char *const locks[] = {"/lock", "write:/lock", "lock", "write:lock", "write:"};
    for (size_t i = 0; i < sizeof locks / sizeof *locks; i++) {
        assert_int_equal(create_in("ATTN_LOCK", locks[i], false, "", &plugins),
                         i < 2 ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
        assert_ok(create_in("ATTN_LOCK", locks[i], true, "", &plugins));
    }
}

TEST(fork_after_creation)
{
    attn_runtime *runtime = create_with(PLUGIN("none"), NULL, ATTN_OK);
    if (test_apart()) {
        const int32_t count = api->backend_count(runtime);
        api->runtime_destroy(runtime);
        _exit(count == 1 ? 0 : 1);
    }
    assert_int_equal(api->backend_count(runtime), 1);
    api->runtime_destroy(runtime);
}

int main(void)
{
    if (attn_get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, NULL) != ATTN_OK) {
        return 1;
    }
    return test_run(NULL, NULL);
}
