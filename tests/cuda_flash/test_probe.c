/* SPDX-License-Identifier: Apache-2.0 */
/* What cuda_flash finds on a machine of three GPUs: the ids are those that CUDA would give.
 * usage: test_probe PLUGIN.so, with the libraries of fake_nvml.c and fake_cuda.c first in the
 * search path */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <attn/plugin.h>

static const struct attn_plugin *plugin;

struct found {
    char devices[256]; /* "id:arch " for each device */
    char backends[64]; /* "id " for each backend */
};

static attn_status take_device(void *user, const struct attn_device_info *device)
{
    struct found *f = user;
    size_t at = strlen(f->devices);
    snprintf(f->devices + at, sizeof f->devices - at, "%d:%s/%d ", device->device.id, device->arch,
             device->num_multiprocessors);
    return ATTN_OK;
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps)
{
    struct found *f = user;
    size_t at = strlen(f->backends);
    snprintf(f->backends + at, sizeof f->backends - at, "%d ", caps->device.id);
    return ATTN_OK;
}

static void *allocate(void *user, size_t size, size_t alignment)
{
    (void)user;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t size)
{
    (void)user, (void)size;
    free(memory);
}

static void set(const char *name, const char *value)
{
    if (value != NULL) {
        setenv(name, value, 1);
    } else {
        unsetenv(name);
    }
}

static void probe(const char *visible, const char *order, const char *devices, const char *backends)
{
    struct attn_host host = {.struct_size = sizeof host};
    struct attn_error error = ATTN_ERROR_INIT;
    struct found f = {"", ""};
    const struct attn_probe_sink sink = {sizeof sink, NULL, &f, take_device, take_backend};
    set("CUDA_VISIBLE_DEVICES", visible);
    set("CUDA_DEVICE_ORDER", order);
    attn_status status = plugin->probe(&host, &sink, &error);
    assert_string_equal(f.devices, devices);
    assert_string_equal(f.backends, backends);
    assert_int_equal(status, backends[0] != '\0' ? ATTN_OK : ATTN_ERROR_ABSENT);
    assert_true(status == ATTN_OK || error.message[0] != '\0');
}

static void test_order(void **state)
{
    (void)state;
    probe(NULL, NULL, "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ");
    probe(NULL, "FASTEST_FIRST", "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ");
    probe(NULL, "PCI_BUS_ID", "0:sm_75/20 1:sm_90/132 2:sm_90/132 ", "1 2 ");
}

static void test_visible(void **state)
{
    (void)state;
    probe("1", "PCI_BUS_ID", "0:sm_90/132 ", "0 ");
    probe("2, 0", "PCI_BUS_ID", "0:sm_90/132 1:sm_75/20 ", "0 ");
    probe("2", NULL, "0:sm_75/20 ", "");
    probe("", NULL, "", "");
    probe("-1", NULL, "", "");
    probe("NoDevFiles", NULL, "", "");
    probe("1,7,2", "PCI_BUS_ID", "0:sm_90/132 ", "0 "); /* up to the first that is not there */
    probe("1,1", "PCI_BUS_ID", "", "");                 /* twice: none */
}

static void test_uuid(void **state)
{
    (void)state;
    probe("GPU-2223", NULL, "0:sm_90/132 ", "0 ");
    probe("GPU-222", NULL, "", ""); /* of two GPUs */
    probe("GPU-1111,GPU-2222", NULL, "0:sm_75/20 1:sm_90/132 ", "1 ");
    probe("MIG-33330000-0000", NULL, "0:sm_90/16 ", "0 ");
}

static void test_absent(void **state)
{
    (void)state;
    set("FAKE_NVML_GPUS", "0");
    probe(NULL, NULL, "", "");
    set("FAKE_NVML_GPUS", "broken");
    probe(NULL, NULL, "", "");
    set("FAKE_NVML_GPUS", "1");
    probe(NULL, NULL, "0:sm_75/20 ", "");
    set("FAKE_NVML_GPUS", NULL);
}

/* A driver initialised before an engine forks would cost its workers their GPU. */
static void test_driver(void **state)
{
    attn_instance *instance;
    const struct attn_kernels *table;
    struct attn_host host = {.struct_size = sizeof host, .allocate = allocate, .release = release};
    struct attn_error error = ATTN_ERROR_INIT;
    (void)state;
    probe(NULL, NULL, "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ");
    assert_null(getenv("FAKE_CUDA_OPENED"));
    /* an instance does open it, and says what it finds */
    assert_int_not_equal(
        plugin->create(&(struct attn_create_args){.struct_size = sizeof(struct attn_create_args),
                                                  .host = &host,
                                                  .backend = "cuda_flash",
                                                  .variant = "",
                                                  .device = {ATTN_DEVICE_CUDA, 0}},
                       &instance, &table, &error),
        ATTN_OK);
    assert_string_equal(error.field, "device");
    assert_null(instance);
    assert_non_null(getenv("FAKE_CUDA_OPENED"));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_driver), /* the first: what is loaded stays */
        cmocka_unit_test(test_order),  cmocka_unit_test(test_visible),
        cmocka_unit_test(test_uuid),   cmocka_unit_test(test_absent),
    };
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (library == NULL) {
        fprintf(stderr, "test_probe: %s\n", argc > 1 ? dlerror() : "usage: test_probe PLUGIN.so");
        return 2;
    }
    attn_plugin_entry_fn *entry;
    void *symbol = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    memcpy(&entry, &symbol, sizeof entry);
    if (entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, NULL) != ATTN_OK) {
        return 2;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
