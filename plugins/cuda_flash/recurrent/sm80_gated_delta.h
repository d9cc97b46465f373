/* SPDX-License-Identifier: Apache-2.0 */
/* The gated delta rule in chunks of 64 tokens on tensor cores: what host and kernels share. */
#ifndef CUDA_FLASH_SM80_GATED_DELTA_H
#define CUDA_FLASH_SM80_GATED_DELTA_H

#include "gpu/delta.h"
#include "gpu/params.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CHUNK DELTA_CHUNK /* tokens of a chunk */
#define CHUNK_DIMS 128    /* dims of a key, padded */
#define CHUNK_TAPS 4      /* taps of the convolution, at most */
#define SPARE_CHUNKS 26   /* see num_chunks */
#define GROUP_ROWS 16     /* rows of the state that a warp has */

/* A chunk's intermediates, which the prepare kernel writes and the state kernel reads: tiles of 64
 * rows of 64 f16, in 16-byte chunks at (number ^ row % 8). chunk_keys has k and q of a key head,
 * each in two tiles; chunk_head belongs to a value head. */
struct chunk_keys {
    uint16_t k[CHUNK][CHUNK_DIMS], q[CHUNK][CHUNK_DIMS];
};

struct chunk_head {
    union {
        uint16_t inverse[CHUNK][CHUNK]; /* (I + A)^-1 beta, transposed */
        struct {                        /* rules without a delta: factors of tokens */
            float value[CHUNK], query[CHUNK];
            float most[4]; /* [0]: bound of a value's factor times an element of its key; four
                            * for copies of 16 bytes */
        } factors;
    };
    uint16_t scores[CHUNK][CHUNK]; /* q k^T with decays, causal */
    float from_start[CHUNK];       /* decay from the chunk's start up to and including the token */
    float to_end[CHUNK];           /* decay after the token up to the chunk's end */
};

/* Keys and queries of a value head with gates per channel, in place of chunk_keys: k and q with the
 * decay from the chunk's start up to and including the token, k with the decay after the token up
 * to the chunk's end, and the chunk's decay. from_start and to_end are 1 then. */
struct chunk_channels {
    struct chunk_keys keys;
    uint16_t ends[CHUNK][CHUNK_DIMS];
    float past[CHUNK_DIMS];
};

/* Flags that follow them where both kernels overlap: whether a key head's part of the chunk is
 * prepared. */
static inline int64_t sm80_delta_flag_bytes(int32_t num_k_heads)
{
    return (num_k_heads * (int64_t)sizeof(uint32_t) + 127) / 128 * 128;
}

#define WIDE_OUT_FOUR 4

struct sm80_delta_params {
    struct gpu_delta_params p;
    /* num_chunks chunks: chunk_keys of each key head or chunk_channels of each value head, then
     * chunk_head of each value head */
    char *memory;
    int64_t chunk_bytes, heads_at; /* heads_at: bytes from a chunk's start to its chunk_head */
    /* The first chunk of request r is number query_start[r] / tokens_apart + r * requests_apart. */
    int32_t num_chunks, tokens_apart, requests_apart;
    int32_t group;          /* value heads of a key head */
    int32_t wide_keys;      /* 1: 16 bytes of a key's row can be read at a time */
    int32_t wide_values;    /* 1: two elements of a value's row can be read at a time */
    int32_t wide_out;       /* elements of out that can be written at a time: 1 or WIDE_OUT_FOUR */
    int32_t usual_gates;    /* 1: gates of the gated delta rule (usual_gates) */
    int32_t stages, slices; /* set by the launch */
    /* 1: sm90_delta_state updates the state, sm80_delta_launch only prepares */
    int32_t state_on_sm90;
    /* CTAs that prepare concurrently with the state kernel; 0: all chunks are prepared before it */
    int32_t prepare_ctas;
    int32_t first_part, end_part; /* (chunk, key head) pairs that a launch prepares */
    /* Segments of few long requests (sm90_delta_segments.cuh), 0: requests are walked whole; pieces
     * of a segment, and of the first one. launched: parts of all requests in a launch; joined: 1 in
     * the second one. */
    int32_t segments, pieces, first_pieces, launched, joined;
    char *segment_ends;
};

#define RING_MOST 16    /* tokens of a ring, at most */
#define RING_DRAFTED 24 /* the same where tokens are drafted, */
#define RING_TOKENS 4   /* up to so many tokens of a step */

struct sm90_ring_params {
    struct gpu_ring_params ring;
    int32_t slices; /* set by the launch */
};

/* The largest number of requests with enough tokens for chunks. */
static inline int64_t sm80_delta_most_requests(const struct sm80_delta_params *a)
{
    int64_t reqs = a->p.num_tokens / a->p.chunked_from;
    return reqs < a->p.num_reqs ? reqs : a->p.num_reqs;
}

/* With params NULL, only loads the kernels on the current device. Returns NULL or the cause of a
 * failure. */
const char *sm80_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);
/* As sm80_delta_launch, with the state kernels of sm_90, by wgmma; gates may be per channel. */
const char *sm90_delta_state(const struct gpu_device *device, struct sm80_delta_params *params,
                             void *stream);
/* As sm80_delta_launch, for requests of one token, on sm_90; of a layer with a ring also what comes
 * before the chunks of longer ones. */
const char *sm90_delta_launch(const struct gpu_device *device, struct sm80_delta_params *params,
                              void *stream);
const char *sm90_ring_launch(const struct gpu_device *device, struct sm90_ring_params *params,
                             void *stream);

#ifdef __cplusplus
}
#endif
#endif
