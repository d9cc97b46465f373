/* SPDX-License-Identifier: Apache-2.0 */
#include "cache_fixture.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/runtime.h"
#include "support/client.h"
#include "support/test.h"

const struct attn_api *api;

attn_status fixture_open(void)
{
    return attn_get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, NULL);
}

attn_runtime *home_create(struct cache_home *home, const char *path, attn_status expected)
{
    const struct attn_host host = meter_host(&home->meter);
    struct attn_runtime_options options = client_options(path);
    options.host = &host;
    options.cache_dir = home->cache;
    options.log_level = 1 + ATTN_LOG_WARN;
    options.isolation = -1;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    const attn_status status = api->runtime_create(&options, &runtime, &error);
    if (home->meter.fail_at > 0) {
        home->meter.log[0] = '\0';
    }
    if (status != expected) {
        fail_msg("status %d, %s: %s", status, error.field, error.message);
    }
    return runtime;
}

void copy_file(const char *from, const char *to)
{
    char bytes[MAX_BYTES];
    char temporary[128];
    size_t size = 0;
    FILE *in = fopen(from, "rb");
    FILE *out = NULL;
    snprintf(temporary, sizeof temporary, "%s.new", to);
    out = fopen(temporary, "wb");
    assert_non_null(in);
    assert_non_null(out);
    while ((size = fread(bytes, 1, sizeof bytes, in)) > 0) {
        assert_int_equal(fwrite(bytes, 1, size, out), size);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(rename(temporary, to), 0);
}

int home_setup(void **state)
{
    struct cache_home *home = calloc(1, sizeof *home);
    snprintf(home->folder, sizeof home->folder, "/tmp/attn_cache_XXXXXX");
    assert_non_null(mkdtemp(home->folder));
    snprintf(home->plugin, sizeof home->plugin, "%s/attn_x.so", home->folder);
    snprintf(home->cache, sizeof home->cache, "%s/deep/cache", home->folder);
    copy_file(PLUGIN("rich"), home->plugin);
    *state = home;
    return 0;
}

int home_entries(const struct cache_home *home, void (*each)(const char *path))
{
    DIR *directory = opendir(home->cache);
    const struct dirent *entry = NULL;
    int count = 0;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        char path[512];
        if (strncmp(entry->d_name, "probe-", 6) == 0) {
            assert_int_equal(strlen(entry->d_name), 22); /* nothing half-written stays */
            snprintf(path, sizeof path, "%s/%s", home->cache, entry->d_name);
            count++;
            if (each != NULL) {
                each(path);
            }
        }
    }
    if (directory != NULL) {
        closedir(directory);
    }
    return count;
}

void drop_entry(const char *path)
{
    assert_int_equal(unlink(path), 0);
}

int home_teardown(void **state)
{
    struct cache_home *home = *state;
    char path[128];
    home_entries(home, drop_entry);
    rmdir(home->cache);
    snprintf(path, sizeof path, "%s/deep", home->folder);
    rmdir(path);
    unlink(home->plugin);
    assert_int_equal(rmdir(home->folder), 0);
    free(home);
    return 0;
}

void home_start(struct cache_home *home, attn_status expected, const char *says, bool asked)
{
    if (test_apart()) {
        attn_runtime *runtime = home_create(home, home->plugin, ATTN_OK);
        const struct plugin *plugin = &runtime->plugins[0];
        if (plugin->status != expected || (plugin->table != NULL) != asked ||
            (strstr(plugin->reason, says) == NULL && strcmp(plugin->name, says) != 0)) {
            fprintf(stderr, "%s: status %d, '%s', %s\n", plugin->name, plugin->status,
                    plugin->reason, plugin->table != NULL ? "asked" : "not asked");
            _exit(1);
        }
        api->runtime_destroy(runtime);
        _exit(0);
    }
}

void home_warm_up(struct cache_home *home)
{
    home_start(home, ATTN_OK, "rich", true);
    assert_int_equal(home_entries(home, NULL), 1);
}
