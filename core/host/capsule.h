/* SPDX-License-Identifier: Apache-2.0 */
/* A capsule: one step of one layer in a file, which attn-run --capsule runs again. Its head is
 * text, a line `name value` for each field in a fixed order, and ends with the line `end`; float32
 * stand there as their bits. With `contents real` the tensors follow, of the layer's dtype and
 * compact: q [tokens, num_q_heads, head_size], the keys and values of each request in order of
 * their positions, the step's own included [keys, num_kv_heads, head_size or head_size_v], and out
 * [tokens, num_q_heads, head_size_v]. Else the head has for each of their heads a mean and a
 * standard deviation, of which random contents are made. Nothing but libc is needed here: attn-run
 * is built with this source too. */
#ifndef CORE_HOST_CAPSULE_H
#define CORE_HOST_CAPSULE_H

#include <stddef.h>
#include <stdint.h>

#define CAPSULE_NAME 160
/* What a capsule may have. */
#define CAPSULE_REQUESTS 1024
#define CAPSULE_HEADS 1024
#define CAPSULE_HEAD_SIZE 1024
#define CAPSULE_BYTES ((int64_t)256 << 20) /* of all tensors, stored or to be made */
#define CAPSULE_TENSORS 4                  /* q, k, v, out */

struct capsule {
    char library[CAPSULE_NAME], layer[CAPSULE_NAME], prefill[CAPSULE_NAME], decode[CAPSULE_NAME];
    int32_t step; /* runs of the layer that attended before this one */
    int32_t real; /* 1: the tensors follow; 0: random ones are made */
    int32_t dtype, num_q_heads, num_kv_heads, head_size, head_size_v;
    float scale;
    int32_t causal, has_window, window_left, window_right, chunk_size, chunk_lookback;
    float soft_cap;
    int32_t alibi, has_sinks, block_size;
    /* of the cache's views, in bytes: between slots, between heads */
    int32_t k_stride_slot, k_stride_head, v_stride_slot, v_stride_head;
    int32_t not_finite[CAPSULE_TENSORS]; /* numbers that were NaN or infinite */
    int32_t num_reqs;
    int32_t query_lens[CAPSULE_REQUESTS], seq_lens[CAPSULE_REQUESTS];
    /* of each head: mean and standard deviation of what was finite */
    float statistics[CAPSULE_TENSORS][CAPSULE_HEADS][2];
    float sinks[CAPSULE_HEADS], slopes[CAPSULE_HEADS]; /* where the layer has them */
};

/* The tensor's rows, heads and elements of a head. */
int64_t capsule_rows(const struct capsule *capsule, int32_t tensor);
int32_t capsule_heads(const struct capsule *capsule, int32_t tensor);
int32_t capsule_dims(const struct capsule *capsule, int32_t tensor);
/* Bytes of all tensors; -1: more than CAPSULE_BYTES. */
int64_t capsule_bytes(const struct capsule *capsule);

/* Hands the head out, line by line. */
void capsule_write(const struct capsule *capsule, void (*put)(void *user, const char *line),
                   void *user);
/* Reads a file's bytes. NULL, with *data where the tensors begin, or why it is no capsule: then
 * `why`, of `size` bytes, names the line, its value and what was allowed. */
const char *capsule_read(struct capsule *capsule, const char *bytes, size_t length,
                         const char **data, char *why, size_t size);

#endif
