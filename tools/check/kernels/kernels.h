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

/* Calls through the vendor's table without the core, whose answers the ABI prescribes: structs of a
 * newer core and unknown extensions (version.h), no memory (host.h, plugin.h, kernels.h), unknown
 * versions. What the core enforces for every backend has no case here. */

/* What the vendor is handed, and has to serve all the same. */
enum call_change {
    CALL_GROWN,    /* an unknown tail that is not zero */
    CALL_EXTENDED, /* an unknown extension in front of the chain */
    CALL_CHANGE_COUNT
};

extern const char *const call_change_names[CALL_CHANGE_COUNT];

/* A kernel whose calls can be changed. */
struct call_target {
    const char *name; /* as in attn_kernels */
    uint64_t kernel;  /* ATTN_KERNEL_* */
    size_t slot;      /* offset in attn_kernels */
    const struct call_args *args;
};

/* A target for every kernel that capabilities can declare. */
enum { NUM_CALLS = 15 };
extern const struct call_target call_targets[NUM_CALLS];
/* The struct at `from`, changed, in `to` of `size` + CALL_TAIL bytes. */
#define CALL_TAIL 32
void call_change_struct(int32_t change, const void *from, size_t size, void *to,
                        struct attn_ext *ext);

void call_cases(const struct kernel_sink *sink);
/* call_plugin.c: entry, create and prepare, destroy and release. */
void call_plugin_cases(const struct kernel_sink *sink);

#endif
