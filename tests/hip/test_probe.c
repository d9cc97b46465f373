/* SPDX-License-Identifier: Apache-2.0 */
/* What hip finds in a topology of the kernel driver that the test writes: a CPU, an MI300X, a
 * Radeon that has no kernels and an RX 7900. Nothing of the runtime may be called.
 * usage: test_probe PLUGIN.so, with fake_kfd.c preloaded and hip_runtime.c's library in the path */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include <attn/plugin.h>

static const struct attn_plugin *plugin;
static char folder[128];

struct found {
    char devices[256]; /* "id:arch/CUs " for each device */
    char backends[64]; /* "id " for each backend */
};

static attn_status take_device(void *user, const struct attn_device_info *device)
{
    struct found *f = user;
    size_t at = strlen(f->devices);
    snprintf(f->devices + at, sizeof f->devices - at, "%d:%s/%d ", device->device.id, device->arch,
             device->num_multiprocessors);
    assert_int_equal(device->device.type, ATTN_DEVICE_ROCM);
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps)
{
    struct found *f = user;
    size_t at = strlen(f->backends);
    snprintf(f->backends + at, sizeof f->backends - at, "%d ", caps->device.id);
    return ATTN_OK;
}

static void set(const char *name, const char *value)
{
    if (value != NULL) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
}

static void write_file(const char *path, const char *text)
{
    char whole[256];
    snprintf(whole, sizeof whole, "%s/%s", folder, path);
    for (char *slash = strchr(whole + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(whole, 0700);
        *slash = '/';
    }
    FILE *file = fopen(whole, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
}

static void probe(const char *rocr, const char *hip, const char *devices, const char *backends,
                  const char *field)
{
    struct attn_host host = {.struct_size = sizeof host};
    struct attn_error error = ATTN_ERROR_INIT;
    struct found f = {"", ""};
    const struct attn_probe_sink sink = {sizeof sink, NULL, &f, take_device, take_backend};
    set("ROCR_VISIBLE_DEVICES", rocr);
    set("HIP_VISIBLE_DEVICES", hip);
    unsetenv("CUDA_VISIBLE_DEVICES");
    attn_status status = plugin->probe(&host, &sink, &error);
    assert_string_equal(f.devices, devices);
    assert_string_equal(f.backends, backends);
    assert_int_equal(status, backends[0] != '\0' ? ATTN_OK : ATTN_ERROR_ABSENT);
    if (status != ATTN_OK) {
        assert_string_equal(error.field, field);
        assert_true(error.message[0] != '\0');
    }
}

static void test_topology(void **state)
{
    (void)state;
    probe(NULL, NULL, "0:gfx942/304 1:gfx906/60 2:gfx1100/96 ", "0 2 ", NULL);
}

static void test_visible(void **state)
{
    (void)state;
    probe("2,0", NULL, "0:gfx1100/96 1:gfx942/304 ", "0 1 ", NULL);
    probe("2,0", "1", "0:gfx942/304 ", "0 ", NULL);
    probe("GPU-00000000000000ab", NULL, "0:gfx942/304 ", "0 ", NULL);
    probe(NULL, "0,7,2", "0:gfx942/304 ", "0 ", NULL); /* up to the first that is not there */
    probe(NULL, "1", "0:gfx906/60 ", "", "arch");
    probe(NULL, "-1", "", "", "device");
    probe("", NULL, "", "", "device");
}

static void test_absent(void **state)
{
    (void)state;
    set("ATTN_TEST_KFD", "/nowhere");
    probe(NULL, NULL, "", "", "device");
    set("ATTN_TEST_KFD", folder);
}

static void write_topology(void)
{
    write_file("kfd/topology/nodes/0/properties", "cpu_cores_count 16\ngfx_target_version 0\n");
    write_file("kfd/topology/nodes/1/properties",
               "simd_count 1216\nsimd_per_cu 4\nlds_size_in_kb 64\ngfx_target_version 90402\n"
               "unique_id 171\n");
    write_file("kfd/topology/nodes/1/name", "ip discovery\n");
    write_file("kfd/topology/nodes/1/mem_banks/0/properties",
               "heap_type 1\nsize_in_bytes 206141652992\n");
    write_file("kfd/topology/nodes/2/properties",
               "simd_count 240\nsimd_per_cu 4\ngfx_target_version 90006\n");
    write_file("kfd/topology/nodes/3/properties", ""); /* not this process's */
    write_file("kfd/topology/nodes/10/properties",
               "simd_count 192\nsimd_per_cu 2\ngfx_target_version 110000\nunique_id 205\n");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_topology),
        cmocka_unit_test(test_visible),
        cmocka_unit_test(test_absent),
    };
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (library == NULL) {
        fprintf(stderr, "test_probe: %s\n", argc > 1 ? dlerror() : "usage: test_probe PLUGIN.so");
        return 2;
    }
    attn_plugin_entry_fn *entry;
    void *symbol = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    memcpy(&entry, &symbol, sizeof entry);
    snprintf(folder, sizeof folder, "/tmp/attn-kfd-XXXXXX");
    if (entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, NULL) != ATTN_OK ||
        mkdtemp(folder) == NULL) {
        return 2;
    }
    write_topology();
    set("ATTN_TEST_KFD", folder);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    char command[160];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) != 0 ? 2 : failed;
}
