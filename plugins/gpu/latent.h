/* SPDX-License-Identifier: Apache-2.0 */
/* What the host side and the kernels of MLA share (attn/mla.h), and batched_gemm. */
#ifndef GPU_LATENT_H
#define GPU_LATENT_H

#include "gpu/params.h"

#define LATENT_ROWS 16      /* queries x heads of an item */
#define LATENT_MAX_RANK 512 /* of a row's latent part */
#define LATENT_MAX_SIZE 576 /* with its rope part */
#define DS_MLA_TILE 128     /* elements of a row of fp8_ds_mla that share a scale */
#define DS_MLA_ROW 656      /* bytes */
#define GEMM_ROWS 32        /* of out, of a group */
#define GEMM_COLUMNS 64
#define GEMM_FEW 4 /* rows of out that gemm_few makes at most */

/* attend: its q is the latent part, k the rows of the cache. */
struct gpu_latent_params {
    struct gpu_params attend;
    struct gpu_tensor q_rope;
    int32_t rank, rope;
    const int32_t *topk; /* [tokens, num_topk] positions of a sparse layer; NULL: dense */
    int64_t topk_stride;
    int32_t num_topk;
};

struct gpu_latent_write_params {
    struct gpu_tensor latent, rope; /* [T] rows, of a head at most */
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
    int32_t scale_rows, scale_columns;   /* elements of w that share one, in each direction */
    const float *scale;                  /* NULL: 1 */
    int32_t scale_per_batch;
    int32_t count, m, n, k; /* count: of the batch */
};

#ifndef __OPENCL_CPP_VERSION__ /* which has no pointers to functions */
/* A faster batched_gemm. A row's bits depend on its own numbers and the operands' strides alone. */
struct gpu_gemm {
    /* NULL or the cause of a failure. */
    const char *(*load)(const struct gpu_device *device);
    bool (*takes)(const struct gpu_gemm_params *p);
    const char *(*run)(const struct gpu_device *device, const struct gpu_gemm_params *p,
                       void *stream);
};
#endif

#endif
