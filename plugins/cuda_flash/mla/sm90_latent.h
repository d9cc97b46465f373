/* SPDX-License-Identifier: Apache-2.0 */
/* attend_mla on sm_90a: up to 64 rows (query, head) against tiles of 64 latent rows of 512 + 64
 * numbers, which come in 16 bits or become such. The rows are of one query, or all heads of
 * several.
 */
#ifndef CUDA_FLASH_SM90_LATENT_H
#define CUDA_FLASH_SM90_LATENT_H

#include "cuda_flash/tensor_map.h"
#include "gpu/latent.h"

#ifdef __cplusplus
extern "C" {
#endif

#define SM90_LATENT_ROWS 64
#define FEW_ROWS 32   /* of an item of the kernel for few, see sm90_swap_ab.cuh */
#define FEW_QUERIES 8 /* of such an item */

/* What rows of the cache are: numbers of the queries' type, one scale for all in 8 bits, or
 * fp8_ds_mla's. */
enum latent_form { LATENT_FORM_OWN, LATENT_FORM_E4M3, LATENT_FORM_E5M2, LATENT_FORM_DS };

struct sm90_latent_params {
    struct tensor_map k_map;     /* (dim, slot, 1, block), if `mapped` */
    struct tensor_map q_maps[2]; /* latent and rope part: (dim, head, token, 1), if `q_mapped` */
    int32_t q_mapped;
    int32_t few, q_rows;      /* few: its kernel; q_rows: of a box of queries */
    int32_t mapped, box_rows; /* TMA brings 64 dims of so many slots of a block at a time */
    int32_t block_shift;      /* of a block size that is a power of two; -1: it is none */
    struct gpu_latent_params p;
    int32_t form;                    /* enum latent_form */
    int32_t row_bytes;               /* of the cache */
    int32_t wide_keys, wide_queries; /* 1: rows can be read 16 bytes at a time */
    int32_t wide_out;                /* numbers of out that can be written at a time: 8, 2, 1 */
};

/* The kernel for items of few rows, on the current device: a cudaError_t. */
int sm90_latent_few_launch(const struct sm90_latent_params *params, int32_t num_sms, void *stream);

/* params NULL: only makes the kernels ready on the current device. NULL or the cause of a failure.
 */
const char *sm90_latent_launch(const struct gpu_device *device,
                               const struct sm90_latent_params *params, void *stream);

#ifdef __cplusplus
}
#endif
#endif
