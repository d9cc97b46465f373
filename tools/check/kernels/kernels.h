/* SPDX-License-Identifier: Apache-2.0 */
/* Cases of the kernels around attend. Each file names its own to a sink, which runs those that are
 * wanted. */
#ifndef CHECK_KERNELS_H
#define CHECK_KERNELS_H

#include "harness/trial.h"

/* `variant` is what the file gave the sink; `seed` draws the inputs. */
typedef enum trial_result kernel_run(struct trial *trial, const void *variant, uint64_t seed);

struct kernel_sink {
    void *user;
    const struct attn_backend_caps *caps;
    const struct case_space *space;
    void (*try)(void *user, const char *name, kernel_run *run, const void *variant);
    bool full; /* cases that fill a GPU, too */
};

void merge_cases(const struct kernel_sink *sink);      /* merge.c */
void quantize_cases(const struct kernel_sink *sink);   /* quantize.c: quantize, amax */
void gemm_cases(const struct kernel_sink *sink);       /* gemm.c */
void copy_cases(const struct kernel_sink *sink);       /* copy.c: copy_blocks, copy, fill */
void table_cases(const struct kernel_sink *sink);      /* table.c: make_block_table */
void rope_cases(const struct kernel_sink *sink);       /* rope.c */
void mla_cases(const struct kernel_sink *sink);        /* mla.c */
void gdn_cases(const struct kernel_sink *sink);        /* gdn.c */
void index_cases(const struct kernel_sink *sink);      /* index.c: indexers */
void gather_cases(const struct kernel_sink *sink);     /* gather.c */
void fp8_inputs_cases(const struct kernel_sink *sink); /* fp8_inputs.c */

#endif
