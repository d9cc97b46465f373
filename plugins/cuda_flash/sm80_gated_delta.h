/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule in chunks of 64 tokens on tensor cores: what host and kernels share. */
#ifndef CUDA_FLASH_SM80_GATED_DELTA_H
#define CUDA_FLASH_SM80_GATED_DELTA_H

#include "gpu/delta.h"
#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CHUNK 64       /* tokens */
#define CHUNK_DIMS 128 /* of a key, padded */
#define CHUNK_TAPS 4   /* of the convolution, at most */
#define GROUP_ROWS 16  /* of the state, of a warp */

/* What the first kernel leaves of a chunk for the second. Rows are f16, in 16 bytes that stand at
 * (number ^ row % 8): q and k of a key head, then of each value head */
struct chunk_keys {
    uint16_t k[CHUNK][CHUNK_DIMS], q[CHUNK][CHUNK_DIMS];
};

struct chunk_head {
    uint16_t inverse[CHUNK][CHUNK]; /* (I + A)^-1, transposed */
    uint16_t scores[CHUNK][CHUNK];  /* q k with decays, causal */
    float beta[CHUNK];
    float from_start[CHUNK]; /* decay from before the chunk, the token's own included */
    float to_end[CHUNK];     /* decay behind the token up to the end */
};

struct sm80_delta_params {
    struct gpu_delta_params p;
    char
        *memory; /* of num_chunks chunks: chunk_keys of each key head, chunk_head of each value's */
    int64_t chunk_bytes;
    /* The chunks of request r begin with number query_start[r] / tokens_apart + r * requests_apart
     */
    int32_t num_chunks, tokens_apart, requests_apart;
    int32_t wide_keys;      /* 1: four numbers of a key's row can be read at a time */
    int32_t wide_values;    /* 1: two of a value's */
    int32_t wide_out;       /* 1: two of out's can be written */
    int32_t stages, slices; /* set by the launch */
};

/* params NULL: only makes the kernels ready on the current device. NULL or the cause of a failure.
 */
const char *sm80_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);
/* The same for requests of one token, on sm_90 alone. */
const char *sm90_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);

#ifdef __cplusplus
}
#endif
#endif
