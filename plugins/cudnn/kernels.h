/* SPDX-License-Identifier: Apache-2.0 */
/* The plugin's own kernels: what cuDNN reads in place of a batch, before its attends, and what is
 * made of its output afterwards. */
#ifndef CUDNN_KERNELS_H
#define CUDNN_KERNELS_H

#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A batch as cuDNN takes it: arrays for num_slots requests, of which those from num_reqs on are
 * empty. Rows of q, k, v, out and the log-sum-exp are counted from the tensors' first (`_start`)
 * or, for copies, from the batch's first (`_copy_start`). Keys in pages have a table, others
 * starts. */
struct cudnn_lengths {
    int32_t *query_lens, *key_lens; /* [num_slots] */
    int64_t *q_start, *out_start;   /* [num_slots + 1], in elements */
    int64_t *q_copy_start, *out_copy_start, *lse_copy_start;
    int64_t *k_start, *v_start, *k_copy_start, *v_copy_start; /* NULL: pages */
    int32_t *table; /* [num_slots, num_columns]; NULL: rows */
};

struct cudnn_lengths_params {
    struct gpu_problem problem; /* the batch, and the layer's sizes */
    struct cudnn_lengths to;
    int32_t num_slots, num_columns, num_blocks;
};

/* Rows of a batch that are copied to compact memory: row first_rows[0] + i to row i. */
struct cudnn_rows_params {
    struct gpu_tensor from;
    char *to;
    int64_t row_bytes;         /* one head's row */
    const int32_t *first_rows; /* [num_reqs + 1] */
    int32_t num_reqs, heads;
};

/* cuDNN's output and log-sum-exp of a batch's rows, and where they go. */
struct cudnn_finish_params {
    struct gpu_tensor out;
    struct gpu_lse lse; /* data NULL: not asked for */
    const char *copied; /* compact rows of the output, to be copied to out; NULL: out has them */
    const float *log_sum_exp; /* [rows, heads] */
    const int32_t *query_start, *key_lens;
    /* [rows]: the row of out where it has to be computed by another kernel, else -1 */
    int32_t *unfinished;
    int32_t num_reqs, num_rows, heads, head_size;
    int32_t all_unfinished; /* 1: every row is */
};

/* Each launches a kernel, and returns NULL or the cause of a failure. */
const char *cudnn_launch_lengths(const struct gpu_device *device,
                                 const struct cudnn_lengths_params *params, void *stream);
const char *cudnn_launch_copy(const struct gpu_device *device,
                              const struct cudnn_rows_params *params, void *stream);
const char *cudnn_launch_finish(const struct gpu_device *device,
                                const struct cudnn_finish_params *params, void *stream);
/* Loads the kernels, so that no step does. */
const char *cudnn_load_kernels(const struct gpu_device *device);
/* Makes the device's context current for cuDNN; cudnn_leave restores the caller's. */
void cudnn_enter(const struct gpu_device *device);
void cudnn_leave(const struct gpu_device *device);

#ifdef __cplusplus
}
#endif
#endif
