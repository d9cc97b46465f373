/* SPDX-License-Identifier: Apache-2.0 */
/* What cuda_flash finds on a machine of three GPUs: the ids are those that CUDA would give.
 * usage: test_probe PLUGIN.so, with the libraries of fake_nvml.c and fake_cuda.c first in the
 * search path */
#include <stdlib.h>

#include "../gpu/found.h"
#include "support/services.h"

static const struct attn_plugin *plugin;

static void probe(const char *visible, const char *order, const char *devices, const char *backends)
{
    set_variable("CUDA_VISIBLE_DEVICES", visible);
    set_variable("CUDA_DEVICE_ORDER", order);
    expect_found(plugin, devices, backends, NULL);
}

/* A driver initialised before an engine forks would cost its workers their GPU. The first test:
 * what is loaded stays. */
TEST(test_driver)
{
    attn_instance *instance;
    const struct attn_kernels *table;
    struct attn_host host = {
        .struct_size = sizeof host, .allocate = services_allocate, .release = services_release};
    struct attn_error error = ATTN_ERROR_INIT;
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

TEST(test_order)
{
    probe(NULL, NULL, "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ");
    probe(NULL, "FASTEST_FIRST", "0:sm_90/132 1:sm_90/132 2:sm_75/20 ", "0 1 ");
    probe(NULL, "PCI_BUS_ID", "0:sm_75/20 1:sm_90/132 2:sm_90/132 ", "1 2 ");
}

TEST(test_visible)
{
    probe("1", "PCI_BUS_ID", "0:sm_90/132 ", "0 ");
    probe("2, 0", "PCI_BUS_ID", "0:sm_90/132 1:sm_75/20 ", "0 ");
    probe("2", NULL, "0:sm_75/20 ", "");
    probe("", NULL, "", "");
    probe("-1", NULL, "", "");
    probe("NoDevFiles", NULL, "", "");
    probe("1,7,2", "PCI_BUS_ID", "0:sm_90/132 ", "0 "); /* up to the first that is not there */
    probe("1,1", "PCI_BUS_ID", "", "");                 /* twice: none */
}

TEST(test_uuid)
{
    probe("GPU-2223", NULL, "0:sm_90/132 ", "0 ");
    probe("GPU-222", NULL, "", ""); /* two GPUs begin with it */
    probe("GPU-1111,GPU-2222", NULL, "0:sm_75/20 1:sm_90/132 ", "1 ");
    probe("MIG-33330000-0000", NULL, "0:sm_90/16 ", "0 ");
}

TEST(test_absent)
{
    set_variable("FAKE_NVML_GPUS", "0");
    probe(NULL, NULL, "", "");
    set_variable("FAKE_NVML_GPUS", "broken");
    probe(NULL, NULL, "", "");
    set_variable("FAKE_NVML_GPUS", "1");
    probe(NULL, NULL, "0:sm_75/20 ", "");
    set_variable("FAKE_NVML_GPUS", NULL);
}

int main(int argc, char **argv)
{
    plugin = plugin_of_argument(argc, argv);
    return plugin == NULL ? 2 : test_run(NULL, NULL);
}
