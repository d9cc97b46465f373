/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters of the MLA kernels (attn/mla.h) and of batched_gemm, shared by host and device. */
#ifndef GPU_LATENT_H
#define GPU_LATENT_H

#include "gpu/params.h"

#define LATENT_ROWS 16      /* rows (query, head) of an item */
#define LATENT_MAX_RANK 512 /* dims of a row's latent part */
#define LATENT_MAX_SIZE 576 /* dims with the rope part */
#define DS_MLA_TILE 128     /* elements of a row of fp8_ds_mla that share a scale */
#define DS_MLA_ROW 656      /* bytes */
#define DS_V4_SIZE 512      /* dims of a row of fp8_ds_v4 */
#define DS_V4_CODES 448     /* the first ones, in e4m3 */
#define DS_V4_TILE 64       /* elements that share a scale */
#define GEMM_ROWS 32        /* rows of out of a group */
#define GEMM_COLUMNS 64
#define GEMM_FEW 4 /* rows of out that gemm_few computes, at most */

/* attend.q is the latent part of the queries, attend.k the rows of the cache. */
struct gpu_latent_params {
    struct gpu_params attend;
    struct gpu_tensor q_rope;
    int32_t rank, rope;
    /* A sparse layer's lists [tokens, lists, num_topk] of entries of entry_keys keys each, one list
     * for list_heads neighbouring heads, and lengths; NULL: dense, and all are num_topk long. */
    const int32_t *topk, *list_lengths;
    int64_t topk_stride, list_stride, length_stride; /* from token to token, list to list */
    int32_t num_topk, entry_keys, list_heads;
};

struct gpu_latent_write_params {
    struct gpu_tensor latent, rope; /* [T] rows, at most one head */
    struct gpu_cache to;
    const int64_t *slots;
    int64_t num_slots;
    int32_t rank, block_size;
};

struct gpu_latent_gather_params {
    struct gpu_gather_params gather;
    int32_t rank;
};

/* [batch, rows, columns], any strides. */
struct gpu_batch_matrix {
    char *data;
    int64_t batch, row, column; /* elements */
    int32_t dtype;              /* enum attn_dtype_id; -1: e2m1, two in a byte */
};

/* out[b] = a[b] w[b] scale[b]: [M, K] by [K, N]. */
struct gpu_gemm_params {
    struct gpu_batch_matrix a, w, out;
    struct gpu_batch_matrix block_scale; /* e8m0 bytes; data NULL: none */
    /* elements of w that share a block scale, in each direction */
    int32_t scale_rows, scale_columns;
    const float *scale; /* NULL: 1 */
    int32_t scale_per_batch;
    int32_t count, m, n, k; /* count: matrices of the batch */
};

#ifndef __OPENCL_CPP_VERSION__ /* OpenCL C++ has no pointers to functions */
/* A faster batched_gemm. The bits of a row depend only on its own elements and the operands'
 * strides. */
struct gpu_gemm {
    /* Returns NULL or the cause of a failure. */
    const char *(*load)(const struct gpu_device *device);
    bool (*takes)(const struct gpu_gemm_params *p);
    const char *(*run)(const struct gpu_device *device, const struct gpu_gemm_params *p,
                       void *stream);
};
#endif

#endif
