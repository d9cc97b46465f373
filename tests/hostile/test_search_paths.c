/* SPDX-License-Identifier: Apache-2.0 */
/* Where plugins are looked for: a core that is opened by a relative name finds its own, and one
 * that finds none says where it has looked and why that gave nothing. The argument is libattn.so.1.
 */
#include <dlfcn.h>
#include <libgen.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/test.h"

static char core[PATH_MAX];
static char warnings[2048];

static void keep_warning(void *user, int32_t level, const char *who, const char *message)
{
    if (level == ATTN_LOG_WARN) {
        strncat(warnings, message, sizeof warnings - strlen(warnings) - 1);
    }
}

static const struct attn_host host = {.struct_size = sizeof host, .log = keep_warning};

static attn_runtime *open_core(const char *name, const char *path, const struct attn_api **api)
{
    struct attn_runtime_options options = client_options(path);
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime;
    options.host = &host;
    options.backend = "cpu_simd";
    options.log_level = 1 + ATTN_LOG_WARN;
    options.no_default_plugins = 0;
    if (client_open(name, &options, api, &runtime, &error) != ATTN_OK) {
        fail_msg("%s: %s", error.field, error.message);
    }
    return runtime;
}

/* In a process of its own, since a library is opened by its first name. */
TEST(test_relative_name)
{
    char folder[PATH_MAX], name[PATH_MAX + 2];
    const struct attn_api *api;
    snprintf(folder, sizeof folder, "%s", core);
    snprintf(name, sizeof name, "./%s", strrchr(core, '/') + 1);
    if (test_apart()) {
        assert_int_equal(chdir(dirname(folder)), 0);
        /* the directory that the name was relative to is left before anything is looked for */
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        assert_non_null(library);
        assert_int_equal(chdir("/"), 0);
        attn_runtime *runtime = open_core(core, "", &api);
        if (api->backend_count(runtime) < 1) {
            printf("no backends\n");
            _exit(1);
        }
        api->runtime_destroy(runtime);
        _exit(0);
    }
}

TEST(test_nothing_found)
{
    char folder[] = "/tmp/attn_places_XXXXXX", command[3 * PATH_MAX], copy[PATH_MAX],
         wanted[PATH_MAX];
    const struct attn_layer_desc layer = layer_decoder("layer", 1, 1, 64, 0);
    const struct attn_layer_desc *layers = &layer;
    const struct attn_api *api;
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment;
    assert_non_null(mkdtemp(folder));
    snprintf(copy, sizeof copy, "%s/libattn.so.1", folder);
    snprintf(command, sizeof command, "cp '%s' '%s'", core, copy);
    assert_int_equal(system(command), 0); /* NOLINT(cert-env33-c): paths of the build */
    attn_runtime *runtime = open_core(copy, "here/attn:/no/such/folder", &api);
    assert_int_equal(api->backend_count(runtime), 0);
    assert_non_null(strstr(warnings, "'here/attn' in ATTN_PLUGIN_PATH is not an absolute path"));
    assert_non_null(strstr(warnings, "'/no/such/folder' in ATTN_PLUGIN_PATH: No such file"));
    REFUSED_AS(ATTN_ERROR_NO_BACKEND, &error, "plugins",
               api->select(runtime, NULL, &layers, 1, &assignment, &error));
    snprintf(wanted, sizeof wanted, "%s/attn: No such file", folder);
    assert_non_null(strstr(error.message, wanted));
    assert_non_null(strstr(error.message, "/no/such/folder: No such file"));
    api->runtime_destroy(runtime);
    unlink(copy);
    rmdir(folder);
}

int main(int argc, char **argv)
{
    if (argc < 2 || realpath(argv[1], core) == NULL) {
        return 2;
    }
    return test_run(NULL, NULL);
}
