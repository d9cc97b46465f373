/* SPDX-License-Identifier: Apache-2.0 */
/* What hip finds in a topology of the kernel driver that the test writes: a CPU, an MI300X, a
 * Radeon that has no kernels and an RX 7900. Nothing of the runtime may be called.
 * usage: test_probe PLUGIN.so, with emulators/sysfs.c preloaded and hip_runtime.c's library in the
 * path */
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "../gpu/found.h"

static const struct attn_plugin *plugin;
static char folder[128];

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
    set_variable("ROCR_VISIBLE_DEVICES", rocr);
    set_variable("HIP_VISIBLE_DEVICES", hip);
    set_variable("CUDA_VISIBLE_DEVICES", NULL);
    expect_found(plugin, devices, backends, field);
}

TEST(test_topology)
{
    probe(NULL, NULL, "0:gfx942/304 1:gfx906/60 2:gfx1100/96 ", "0 2 ", NULL);
}

TEST(test_visible)
{
    probe("2,0", NULL, "0:gfx1100/96 1:gfx942/304 ", "0 1 ", NULL);
    probe("2,0", "1", "0:gfx942/304 ", "0 ", NULL);
    probe("GPU-00000000000000ab", NULL, "0:gfx942/304 ", "0 ", NULL);
    probe(NULL, "0,7,2", "0:gfx942/304 ", "0 ", NULL); /* up to the first that is not there */
    probe(NULL, "1", "0:gfx906/60 ", "", "arch");
    probe(NULL, "-1", "", "", "device");
    probe("", NULL, "", "", "device");
}

TEST(test_absent)
{
    set_variable("ATTN_TEST_KFD", "/nowhere");
    probe(NULL, NULL, "", "", "device");
    set_variable("ATTN_TEST_KFD", folder);
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
    plugin = plugin_of_argument(argc, argv);
    snprintf(folder, sizeof folder, "/tmp/attn-kfd-XXXXXX");
    if (plugin == NULL || mkdtemp(folder) == NULL) {
        return 2;
    }
    write_topology();
    set_variable("ATTN_TEST_KFD", folder);
    int failed = test_run(NULL, NULL);
    char command[160];
    snprintf(command, sizeof command, "rm -r %s", folder);
    return system(command) != 0 ? 2 : failed;
}
