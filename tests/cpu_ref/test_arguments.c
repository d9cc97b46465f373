/* SPDX-License-Identifier: Apache-2.0 */
/* What cpu_ref refuses. Usage: test_arguments FILE.so */
#include <string.h>

#include "harness.h"
#include "support/test.h"

static void test_create(void **state)
{
    static const struct {
        const char *backend, *variant;
        int32_t device;
    } wrong[] = {{"cpu_simd", "", ATTN_DEVICE_CPU},
                 {"cpu_ref", "avx2", ATTN_DEVICE_CPU},
                 {"cpu_ref", "", ATTN_DEVICE_CUDA}};
    (void)state;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        attn_instance *instance = serial.instance;
        const struct attn_kernels *kernels = serial.kernels;
        struct attn_device device = {wrong[i].device, 0};
        struct attn_host host = {.struct_size = sizeof host};
        const struct attn_create_args args = {.struct_size = sizeof(struct attn_create_args),
                                              .host = &host,
                                              .backend = wrong[i].backend,
                                              .variant = wrong[i].variant,
                                              .device = device};
        assert_int_equal(serial.plugin->create(&args, &instance, &kernels, &error),
                         ATTN_ERROR_NOT_FOUND);
        assert_null(instance);
        assert_null(kernels);
        assert_true(error.message[0] != '\0');
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_create),
    };
    return harness_main(argc, argv, 1, tests, sizeof tests / sizeof *tests);
}
