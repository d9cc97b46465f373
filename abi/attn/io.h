/* SPDX-License-Identifier: Apache-2.0 */
/* What one run of one layer reads and writes. */
#ifndef ATTN_IO_H
#define ATTN_IO_H

#include "tensor.h"

/* Flags of a run. A recurrent layer takes neither: each of its runs moves the state. */
#define ATTN_RUN_NO_WRITE 1u  /* attend only: the cache has the keys already */
#define ATTN_RUN_NO_ATTEND 2u /* write only; out may be NULL */

enum attn_rope { ATTN_ROPE_NONE = 0, ATTN_ROPE_NEOX = 1, ATTN_ROPE_GPTJ = 2 };

/* Tensors are borrowed until the stream has run the step. q [T, Hq, D]; k [T, Hk, D]; v [T, Hk,
 * Dv]; out [T, Hq, Dv]: any strides with the last one 1 (slices of a fused qkv). k and v may be
 * NULL where nothing is written (a shared cache, a cross layer after its first step); without a
 * cache (encoders) they are the keys. lse: float32, logically [Hq, T], any strides; NULL: not asked
 * for. Rows past num_actual_tokens are not written. */
struct attn_step_io {
    size_t struct_size;
    /* attn_io_mla, attn_io_recurrent, attn_io_output_quant, attn_io_rope, attn_io_caches */
    const struct attn_ext *next;
    /* what the device orders its work by: the one that plan_batch was given. CUDA: cudaStream_t
     * (CUstream); ROCm: hipStream_t; oneAPI: ze_command_list_handle_t, an immediate one; CPU: NULL,
     * the work is done on return */
    void *stream;
    uint32_t flags; /* ATTN_RUN_* */
    uint32_t reserved;
    const struct attn_tensor *q;
    const struct attn_tensor *k;
    const struct attn_tensor *v;
    const struct attn_tensor *out;
    const struct attn_tensor *lse;
};

/* Where a quantized output's scales go. FP8_STATIC reads scale [1]; group forms write scales [T, Hq
 * Dv / G] (or [Hq Dv / G, T]) float32; NVFP4 reads the global scale [1] and writes e4m3 block
 * scales [T, Hq Dv / 16], the last stride 1. out is e4m3, of NVFP4 uint8 [T, Hq, Dv / 2] or [T, Hq
 * Dv / 2], each row in one piece. */
struct attn_io_output_quant {
    struct attn_ext ext; /* id ATTN_EXT_IO_OUTPUT_QUANT */
    const float *scale;
    const struct attn_tensor *block_scales;
};

/* Rotary embedding of q and k fused with the cache write. q is rotated in place. A run that writes
 * no keys (ATTN_RUN_NO_WRITE, no slots, a shared cache) is refused with it: its q comes rotated.
 * num_slots is then num_actual_tokens to num_tokens, and rows 0 to num_slots - 1 are rotated, those
 * before query_start_loc[0] and with negative slots, too: each needs a position. */
struct attn_io_rope {
    struct attn_ext ext;               /* id ATTN_EXT_IO_ROPE */
    int32_t form;                      /* enum attn_rope, the layer's */
    int32_t rotary_dim;                /* 0: head_size */
    const int64_t *positions;          /* device [T] */
    const struct attn_tensor *cos_sin; /* [max position, rotary_dim]: cos half, sin half */
    /* [D] or NULL: RMS norm of each head's row before the rotation; of layers that say qk_norm */
    const struct attn_tensor *q_norm_weight;
    const struct attn_tensor *k_norm_weight;
    float norm_eps; /* finite, 0 or above */
    int32_t reserved;
};

/* New rows of the caches of attn_layer_caches. */
struct attn_io_caches {
    struct attn_ext ext; /* id ATTN_EXT_IO_CACHES */
    /* [num_rows]: rows[i] of the i-th of them, [>= num_slots of its table, heads, head_size]; NULL:
     * none. In table 0 a row comes with each token's slot s: it is row s / tokens_per_row, and of
     * those tokens the last one's counts */
    const struct attn_tensor *const *rows;
    int32_t num_rows;
    int32_t reserved;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_step_io) == 72, "attn_step_io of ABI 0.3");

#endif
