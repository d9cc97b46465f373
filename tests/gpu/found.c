/* SPDX-License-Identifier: Apache-2.0 */
#include "found.h"

#include <stdio.h>
#include <stdlib.h>

#include "support/client.h"

struct found {
    char devices[256], backends[64];
};

static attn_status take_device(void *user, const struct attn_device_info *device,
                               struct attn_error *why)
{
    struct found *f = user;
    size_t at = strlen(f->devices);
    snprintf(f->devices + at, sizeof f->devices - at, "%d:%s/%d ", device->device.id, device->arch,
             device->num_multiprocessors);
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps,
                                struct attn_error *why)
{
    struct found *f = user;
    size_t at = strlen(f->backends);
    snprintf(f->backends + at, sizeof f->backends - at, "%d ", caps->device.id);
    return ATTN_OK;
}

void set_variable(const char *name, const char *value)
{
    if (value != NULL) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
}

void expect_found(const struct attn_plugin *plugin, const char *devices, const char *backends,
                  const char *field)
{
    const struct attn_host host = {.struct_size = sizeof host};
    struct attn_error error = ATTN_ERROR_INIT;
    struct found f = {"", ""};
    const struct attn_probe_sink sink = {sizeof sink, NULL, &f, take_device, take_backend};
    attn_status status = plugin->probe(&host, &sink, &error);
    assert_string_equal(f.devices, devices);
    assert_string_equal(f.backends, backends);
    assert_int_equal(status, backends[0] != '\0' ? ATTN_OK : ATTN_ERROR_ABSENT);
    if (status != ATTN_OK) {
        assert_true(error.message[0] != '\0');
        assert_string_equal(error.field, field != NULL ? field : error.field);
    }
}

const struct attn_plugin *plugin_of_argument(int argc, char **argv)
{
    const struct attn_plugin *plugin = NULL;
    struct attn_error error = {.message = "takes a PLUGIN.so"};
    if (argc < 2 ||
        client_plugin(argv[1], ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, &error) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", argv[0], error.message);
    }
    return plugin;
}
