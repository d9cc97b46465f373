/* SPDX-License-Identifier: Apache-2.0 */
/* Cases of the kernels around attend: merge_states, quantize, amax, copies. */
#ifndef CHECK_KERNELS_H
#define CHECK_KERNELS_H

#include "trial.h"

/* One named case; `seed` draws its inputs. */
struct kernel_case {
    const char *name;
    uint64_t kernel; /* ATTN_KERNEL_*: skipped unless declared */
    enum trial_result (*run)(struct trial *trial, uint64_t seed);
};

extern const struct kernel_case kernel_cases[];
extern const int32_t num_kernel_cases;

#endif
