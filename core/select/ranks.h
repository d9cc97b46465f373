/* SPDX-License-Identifier: Apache-2.0 */
/* The files of the cache folder that steer selections. Measurements, `<cache_dir>/ranks`, one line
 * each:
 *
 *     ARCH SHAPE PHASE BACKEND TIME_US
 *     x86-64 32/8x128x128.bf16.bf16 decode cpu_simd@avx512bf16 4.81
 *
 * SHAPE is num_q_heads/num_kv_heads x head_size x head_size_v . dtype . kv_dtype. Later lines win.
 */
#ifndef CORE_SELECT_RANKS_H
#define CORE_SELECT_RANKS_H

#include "select/assignment.h"

#define RANKS_FILE "ranks"

struct measurement {
    const char *arch;
    const char *shape;
    int32_t phase;
    const char *backend;
    double time_us;
};

struct ranks {
    struct measurement *items;
    int32_t count;
};

/* A missing file has no measurements, nor has one that others could have written (with a warning);
 * broken lines are passed over with a warning. False without
 * memory. */
bool ranks_read(struct ranks *ranks, const attn_runtime *runtime, struct arena *arena);
/* Time in microseconds, or 0 where nothing was measured. */
double ranks_find(const struct ranks *ranks, const char *arch, const struct attn_layer_desc *layer,
                  int32_t phase, const char *backend);

/* Backends that attn-check has found without a failure on this machine, by host/conformance.h. */
struct conformant {
    const char **lacks; /* [num_backends]: NULL: conformant; or the reason why not */
};

/* Hashes the plugins' files. False without memory. */
bool conformant_read(struct conformant *conformant, const attn_runtime *runtime,
                     struct arena *arena);

#endif
