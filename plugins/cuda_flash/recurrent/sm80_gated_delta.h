/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule in chunks of 64 tokens on tensor cores: what host and kernels share. */
#ifndef CUDA_FLASH_SM80_GATED_DELTA_H
#define CUDA_FLASH_SM80_GATED_DELTA_H

#include "gpu/delta.h"
#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CHUNK DELTA_CHUNK /* tokens */
#define CHUNK_DIMS 128    /* of a key, padded */
#define CHUNK_TAPS 4      /* of the convolution, at most */
#define GROUP_ROWS 16     /* of the state, of a warp */

/* What the first kernel leaves of a chunk for the second: tiles of 64 rows by 64 f16, in 16 bytes
 * that stand at (number ^ row % 8); k and q of a key head, each in two tiles, then of each value
 * head */
struct chunk_keys {
    uint16_t k[CHUNK][CHUNK_DIMS], q[CHUNK][CHUNK_DIMS];
};

struct chunk_head {
    uint16_t inverse[CHUNK][CHUNK]; /* (I + A)^-1 beta, transposed */
    uint16_t scores[CHUNK][CHUNK];  /* q k with decays, causal */
    float from_start[CHUNK];        /* decay from before the chunk, the token's own included */
    float to_end[CHUNK];            /* decay behind the token up to the end */
};

/* Behind them, where chunks are prepared next to the walk: for each key head whether its part of
 * the chunk is there. */
static inline int64_t sm80_delta_flag_bytes(int32_t num_k_heads)
{
    return (num_k_heads * (int64_t)sizeof(uint32_t) + 127) / 128 * 128;
}

#define WIDE_OUT_FOUR 4

struct sm80_delta_params {
    struct gpu_delta_params p;
    char
        *memory; /* of num_chunks chunks: chunk_keys of each key head, chunk_head of each value's */
    int64_t chunk_bytes;
    /* The chunks of request r begin with number query_start[r] / tokens_apart + r * requests_apart
     */
    int32_t num_chunks, tokens_apart, requests_apart;
    int32_t group;       /* value heads of a key head */
    int32_t wide_keys;   /* 1: 16 bytes of a key's row can be read at a time */
    int32_t wide_values; /* 1: two of a value's */
    int32_t wide_out;    /* numbers of out that can be written at a time: 1, 2 or WIDE_OUT_FOUR */
    int32_t stages, slices; /* set by the launch */
    int32_t walks_apart;    /* 1: sm90_delta_walk walks, sm80_delta_launch only prepares */
    int32_t preparers; /* CTAs that prepare next to those that walk; 0: all is prepared before */
    int32_t first_part, end_part; /* chunks' key heads that a launch prepares */
};

/* Requests that can have enough tokens. */
static inline int64_t sm80_delta_most_requests(const struct sm80_delta_params *a)
{
    int64_t reqs = a->p.num_tokens / a->p.chunked_from;
    return reqs < a->p.num_reqs ? reqs : a->p.num_reqs;
}

/* params NULL: only makes the kernels ready on the current device. NULL or the cause of a failure.
 */
const char *sm80_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);
/* The same with the walk by wgmma, on sm_90 alone. */
const char *sm90_delta_walk(const struct gpu_device *device, struct sm80_delta_params *params,
                            void *stream);
/* The same for requests of one token, on sm_90 alone. */
const char *sm90_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);

#ifdef __cplusplus
}
#endif
#endif
