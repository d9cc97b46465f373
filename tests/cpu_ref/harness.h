/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin under test, opened by its file, with a serial and a threaded host; random numbers. */
#ifndef TESTS_CPU_REF_HARNESS_H
#define TESTS_CPU_REF_HARNESS_H

#include <attn/plugin.h>
#include <stddef.h>

struct reference {
    const struct attn_plugin *plugin;
    const struct attn_kernels *kernels;
    attn_instance *instance;
};

extern struct reference serial, threaded;

struct CMUnitTest;

/* A test's main: opens the plugin that its one argument names, runs the cases, closes it. Random
 * numbers begin with `seed`, which is printed. */
int harness_main(int argc, char **argv, uint64_t seed, const struct CMUnitTest *tests,
                 size_t count);

/* Fails where `got` is off by more than bound * (1 + |want|); NaN and infinities have to be the
 * same. */
void expect_near(double got, double want, double bound, const char *what, int64_t at);

#define POISON 0xff /* NaN in every float format here */
/* `count` items, each byte set; a test without memory has no result and ends. */
void *filled_memory(int64_t count, size_t size, int32_t byte);

void random_seed(uint64_t seed);
uint64_t random_bits(void);
int32_t random_below(int32_t bound);
double random_normal(void);
void random_permutation(int32_t *items, int32_t count);

/* Compact row-major tensor of up to 4 dimensions over borrowed shape and stride storage. */
struct test_tensor {
    struct attn_tensor tensor;
    int64_t shape[4], strides[4];
};
struct attn_tensor *tensor_set(struct test_tensor *tensor, void *data, int32_t dtype, int32_t ndim,
                               const int64_t *shape, const int64_t *strides);

#endif
