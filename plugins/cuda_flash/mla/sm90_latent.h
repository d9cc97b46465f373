/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a: up to 64 rows (query, head) against tiles of 64 latent rows of 512 + 64
 * numbers of 16 bits, or of 8 bits that are converted, or of 512 in bf16 or fp8_ds_v4. The rows
 * belong to one query, or are all heads of several. */
#ifndef CUDA_FLASH_SM90_LATENT_H
#define CUDA_FLASH_SM90_LATENT_H

#include "cuda_flash/tensor_map.h"
#include "gpu/latent.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SM90_LATENT_ROWS 64
#define SWAP_AB_ROWS 32   /* rows of an item in the swap-AB kernel (sm90_swap_ab.cuh) */
#define SWAP_AB_QUERIES 8 /* queries of such an item */

/* The form of cache rows: numbers of the queries' type, 8 bits with a single scale, fp8_ds_mla's,
 * or fp8_ds_v4's. */
enum latent_form {
    LATENT_FORM_OWN,
    LATENT_FORM_E4M3,
    LATENT_FORM_E5M2,
    LATENT_FORM_DS,
    LATENT_FORM_V4
};

/* A second cache under the same softmax (attn/draft/compressed.h). */
struct sm90_second_cache {
    struct gpu_cache k;
    const int32_t *block_table, *block_table_row; /* the latter may be NULL */
    int64_t block_table_stride;
    int32_t block_size, block_shift; /* as below */
    int32_t tokens_per_row;
};

struct sm90_latent_params {
    struct tensor_map k_map;     /* (dim, slot, 1, block), if `mapped` */
    struct tensor_map q_maps[2]; /* latent and rope part: (dim, head, token, 1), if `q_mapped` */
    int32_t q_mapped;
    int32_t swap_ab, q_rows;  /* swap_ab: runs that kernel; q_rows: rows of a box of queries */
    int32_t mapped, box_rows; /* TMA copies 64 dims of box_rows slots of a block at a time */
    int32_t block_shift;      /* log2 of the block size; -1 if that is no power of two */
    struct gpu_latent_params p;
    int32_t form;                    /* enum latent_form */
    int32_t row_bytes;               /* bytes of a row of the cache */
    int32_t wide_keys, wide_queries; /* 1: rows can be read 16 bytes at a time */
    int32_t wide_out;                /* elements of out that can be written at a time: 8, 2, 1 */
    struct sm90_second_cache second;
};

/* Launches the swap-AB kernel on the current device. Returns a cudaError_t. */
int sm90_swap_ab_launch(const struct sm90_latent_params *params, int32_t num_sms, void *stream);

/* With params NULL, only loads the kernels on the current device. Returns NULL or the cause of a
 * failure. */
const char *sm90_latent_launch(const struct gpu_device *device,
                               const struct sm90_latent_params *params, void *stream);

/* The same for an attend to both caches. Of the schedule it reads tile_rows, and in `concurrent`
 * the number of items of a token. `items`: at most so many, each of `tiles` tiles or fewer. */
const char *sm90_latent_both_launch(const struct gpu_device *device,
                                    const struct sm90_latent_params *params, int64_t items,
                                    int32_t tiles, void *stream);

#ifdef __cplusplus
}
#endif
#endif
