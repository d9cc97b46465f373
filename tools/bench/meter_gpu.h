/* SPDX-License-Identifier: Apache-2.0 */
/* What the meters of GPUs share: kernels of one module that walk one buffer of random numbers,
 * timed by events, over a small table of a vendor's calls. */
#ifndef BENCH_METER_GPU_H
#define BENCH_METER_GPU_H

#include "common/memory.h"
#include "ceilings.h"

enum gpu_kernel { KERNEL_READ, KERNEL_COPY, KERNEL_FMA, KERNEL_MATRIX, GPU_KERNELS };

/* Functions of the vendor's library: zero is success. */
struct gpu_calls {
    int (*memory_info)(size_t *available, size_t *total);
    int (*module_load)(void **module, const void *code);
    int (*module_unload)(void *module);
    int (*get_function)(void **function, void *module, const char *name);
    int (*launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned shared, void *stream, void **params, void **extra);
    int (*event_destroy)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_wait)(void *event);
    int (*event_time)(float *milliseconds, void *begin, void *end);
};
#define GPU_CALLS (sizeof(struct gpu_calls) / sizeof(void *))

struct gpu_meter {
    const struct gpu_driver *driver;
    const struct device *device;
    struct memory memory;
    char *buffer;
    size_t bytes; /* its bytes */
    int32_t num_units;
    void *library, *module, *begin, *end;
    void *functions[GPU_KERNELS]; /* NULL: the target has no such instructions */
    struct gpu_calls calls;
};

/* A vendor's part. */
struct gpu_driver {
    const char *libraries[4]; /* the newest first; ends with NULL */
    const char *calls[GPU_CALLS], *entries[GPU_KERNELS];
    const char *matrix; /* how KERNEL_MATRIX is reported */
    size_t size;        /* its meter's bytes, which begin with a struct gpu_meter */
    /* With library and calls found: makes the device current, module, begin and end. */
    bool (*open)(struct gpu_meter *meter);
    /* Queues one pass; `amount` are its bytes or operations. */
    bool (*launch)(struct gpu_meter *meter, int32_t code, double *amount);
    void (*close)(struct gpu_meter *meter); /* what open made but module and events */
};

/* Fills a function pointer; false if the library has no such symbol. */
bool gpu_find(void *library, const char *symbol, void *function);
/* As meter_type.create, with the kernels that the module has. */
attn_status gpu_meter_create(const struct gpu_driver *driver, void **state,
                             struct meter_kernel *kernels, int32_t *num_kernels,
                             const struct device *device, int32_t num_units,
                             struct attn_error *error);
/* meter_type.destroy and meter_type.run. */
void gpu_meter_destroy(void *state);
double gpu_meter_run(void *state, const struct meter_kernel *kernel);

#endif
