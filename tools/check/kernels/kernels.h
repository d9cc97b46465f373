/* SPDX-License-Identifier: Apache-2.0 */
/* Cases of the kernels around attend. Each file names its own to a sink, which runs those that are
 * wanted. */
#ifndef CHECK_KERNELS_H
#define CHECK_KERNELS_H

#include "cases/cases.h"
#include "harness/trial.h"

/* `variant` is what the file gave the sink; `seed` draws the inputs. */
typedef enum trial_result kernel_run(struct trial *trial, const void *variant, uint64_t seed);

struct kernel_sink {
    void *user;
    const struct attn_backend_caps *caps;
    const struct case_space *space;
    void (*try)(void *user, const char *name, kernel_run *run, const void *variant);
    struct core *core; /* for cases that go through it */
    bool full;         /* cases that fill a GPU, too */
};

/* kernel_test.c. A case, by its name as printf makes it. */
__attribute__((format(printf, 4, 5))) void kernel_try(const struct kernel_sink *sink,
                                                      kernel_run *run, const void *variant,
                                                      const char *format, ...);

/* An attend of a plain cache. */
struct attend_variant {
    const struct case_space *space;
    struct attend_case attend_case;
};

/* Each in the file of its name. */
void merge_cases(const struct kernel_sink *sink);
void quantize_cases(const struct kernel_sink *sink); /* amax, too */
void gemm_cases(const struct kernel_sink *sink);
void copy_cases(const struct kernel_sink *sink);  /* copy_blocks, copy, fill */
void table_cases(const struct kernel_sink *sink); /* make_block_table */
void rope_cases(const struct kernel_sink *sink);
void gather_cases(const struct kernel_sink *sink);
void fp8_inputs_cases(const struct kernel_sink *sink);
void mla_cases(const struct kernel_sink *sink);
void gdn_cases(const struct kernel_sink *sink);
void index_cases(const struct kernel_sink *sink);
void index_write_cases(const struct kernel_sink *sink);

/* call_cases.c. All of them, with the ATTN_KERNEL_* one of which a backend declares that has such
 * cases; 0: a file asks itself. */
enum { NUM_KERNEL_FILES = 12 };
struct kernel_file {
    uint64_t kernels;
    void (*cases)(const struct kernel_sink *sink);
};
extern const struct kernel_file kernel_files[NUM_KERNEL_FILES];

#endif
