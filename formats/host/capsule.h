/* SPDX-License-Identifier: Apache-2.0 */
/* A capsule: one step of one layer in a file, which attn-run --capsule runs again. Its head is
 * text, a line `name value` for each field in a fixed order, and ends with the line `end`; float32
 * stand there as their bits. With `contents real` the tensors follow, of the layer's dtype and
 * compact: q [tokens, num_q_heads, head_size], the keys and values of each request in order of
 * their positions, the step's own included [keys, num_kv_heads, head_size or head_size_v], and out
 * [tokens, num_q_heads, head_size_v]. An MLA layer (kv_lora_rank above 0) has its queries [nope,
 * rope], its latent rows in the place of keys, and kv_b_proj in that of values. Else the head has
 * for each of their heads a mean and a standard deviation, of which random contents are made. This
 * header is all that attn-run, which reads capsules, shares with the core, which writes them. */
#ifndef CORE_HOST_CAPSULE_H
#define CORE_HOST_CAPSULE_H

#include <attn/tensor.h>
#include <attn/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define CAPSULE_HEAD "attn-capsule 2"
#define CAPSULE_NAME 160
/* What a capsule may have. */
#define CAPSULE_REQUESTS 1024
#define CAPSULE_HEADS 1024
#define CAPSULE_HEAD_SIZE 1024
#define CAPSULE_BYTES ((int64_t)256 << 20) /* for all tensors, stored or to be made */
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
    int32_t kv_lora_rank, qk_nope_head_dim; /* an MLA layer's, else 0 */
    /* the cache's views, in bytes: between slots, between heads */
    int32_t k_stride_slot, k_stride_head, v_stride_slot, v_stride_head;
    int32_t not_finite[CAPSULE_TENSORS]; /* numbers that were NaN or infinite */
    int32_t num_reqs;
    int32_t query_lens[CAPSULE_REQUESTS], seq_lens[CAPSULE_REQUESTS];
    /* each head's mean and standard deviation of what was finite */
    float statistics[CAPSULE_TENSORS][CAPSULE_HEADS][2];
    float sinks[CAPSULE_HEADS], slopes[CAPSULE_HEADS]; /* where the layer has them */
};

/* Lines with one value: a text, or a number from `least` to `most`, or a float32's bits. */
static const struct capsule_field {
    const char *name;
    size_t at;
    enum { CAPSULE_TEXT, CAPSULE_INTEGER, CAPSULE_FLOAT } kind;
    int32_t least, most;
} capsule_fields[] = {
#define AT(member) #member, offsetof(struct capsule, member)
    {AT(library), CAPSULE_TEXT, 0, 0},
    {AT(layer), CAPSULE_TEXT, 0, 0},
    {AT(prefill), CAPSULE_TEXT, 0, 0},
    {AT(decode), CAPSULE_TEXT, 0, 0},
    {AT(step), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(real), CAPSULE_INTEGER, 0, 1},
    {AT(dtype), CAPSULE_INTEGER, ATTN_DTYPE_F16, ATTN_DTYPE_F32},
    {AT(num_q_heads), CAPSULE_INTEGER, 1, CAPSULE_HEADS},
    {AT(num_kv_heads), CAPSULE_INTEGER, 1, CAPSULE_HEADS},
    {AT(head_size), CAPSULE_INTEGER, 8, CAPSULE_HEAD_SIZE},
    {AT(head_size_v), CAPSULE_INTEGER, 8, CAPSULE_HEAD_SIZE},
    {AT(scale), CAPSULE_FLOAT, 0, 0},
    {AT(causal), CAPSULE_INTEGER, ATTN_CAUSAL_YES, ATTN_CAUSAL_NO},
    {AT(has_window), CAPSULE_INTEGER, 0, 1},
    {AT(window_left), CAPSULE_INTEGER, -1, INT32_MAX},
    {AT(window_right), CAPSULE_INTEGER, -1, INT32_MAX},
    {AT(chunk_size), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(chunk_lookback), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(soft_cap), CAPSULE_FLOAT, 0, 0},
    {AT(alibi), CAPSULE_INTEGER, ATTN_ALIBI_NONE, ATTN_ALIBI_SQRT},
    {AT(has_sinks), CAPSULE_INTEGER, 0, 1},
    {AT(block_size), CAPSULE_INTEGER, 1, 65536},
    {AT(kv_lora_rank), CAPSULE_INTEGER, 0, CAPSULE_HEAD_SIZE},
    {AT(qk_nope_head_dim), CAPSULE_INTEGER, 0, CAPSULE_HEAD_SIZE},
    {AT(k_stride_slot), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(k_stride_head), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(v_stride_slot), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(v_stride_head), CAPSULE_INTEGER, 0, INT32_MAX},
    {"not_finite_q", offsetof(struct capsule, not_finite[0]), CAPSULE_INTEGER, 0, INT32_MAX},
    {"not_finite_k", offsetof(struct capsule, not_finite[1]), CAPSULE_INTEGER, 0, INT32_MAX},
    {"not_finite_v", offsetof(struct capsule, not_finite[2]), CAPSULE_INTEGER, 0, INT32_MAX},
    {"not_finite_out", offsetof(struct capsule, not_finite[3]), CAPSULE_INTEGER, 0, INT32_MAX},
    {AT(num_reqs), CAPSULE_INTEGER, 1, CAPSULE_REQUESTS},
#undef AT
};
#define CAPSULE_FIELDS (sizeof capsule_fields / sizeof *capsule_fields)

/* Lines with many values: lengths as integers, the others as float32. */
static const struct capsule_list {
    const char *name;
    size_t at;
    bool integers;
} capsule_lists[] = {
    {"query_lens", offsetof(struct capsule, query_lens), true},
    {"seq_lens", offsetof(struct capsule, seq_lens), true},
    {"q_statistics", offsetof(struct capsule, statistics[0]), false},
    {"k_statistics", offsetof(struct capsule, statistics[1]), false},
    {"v_statistics", offsetof(struct capsule, statistics[2]), false},
    {"out_statistics", offsetof(struct capsule, statistics[3]), false},
    {"sinks", offsetof(struct capsule, sinks), false},
    {"slopes", offsetof(struct capsule, slopes), false},
};
#define CAPSULE_LISTS (sizeof capsule_lists / sizeof *capsule_lists)

/* The tensor's rows, heads and elements of a head. */
static inline int32_t capsule_heads(const struct capsule *c, int32_t tensor)
{
    return tensor == 0 || tensor == 3           ? c->num_q_heads
           : tensor == 2 && c->kv_lora_rank > 0 ? 1
                                                : c->num_kv_heads;
}

static inline int32_t capsule_dims(const struct capsule *c, int32_t tensor)
{
    return c->kv_lora_rank > 0 && tensor == 0 ? c->qk_nope_head_dim + c->head_size - c->kv_lora_rank
           : c->kv_lora_rank > 0 && tensor == 2 ? c->kv_lora_rank
           : tensor < 2                         ? c->head_size
                                                : c->head_size_v;
}

static inline int64_t capsule_rows(const struct capsule *c, int32_t tensor)
{
    const int32_t *lens = tensor == 0 || tensor == 3 ? c->query_lens : c->seq_lens;
    if (tensor == 2 && c->kv_lora_rank > 0) {
        return c->num_q_heads * ((int64_t)c->qk_nope_head_dim + c->head_size_v);
    }
    int64_t rows = 0;
    for (int32_t r = 0; r < c->num_reqs; r++) {
        rows += lens[r];
    }
    return rows;
}

static inline int64_t capsule_element(const struct capsule *c)
{
    return c->dtype == ATTN_DTYPE_F32 ? 4 : 2;
}

/* Up to 2^34 rows of up to 2^22 bytes. */
static inline int64_t capsule_tensor_bytes(const struct capsule *c, int32_t tensor)
{
    return capsule_rows(c, tensor) * capsule_heads(c, tensor) * capsule_dims(c, tensor) *
           capsule_element(c);
}

/* Bytes of all tensors; -1: more than CAPSULE_BYTES. */
static inline int64_t capsule_bytes(const struct capsule *c)
{
    int64_t bytes = 0;
    for (int32_t t = 0; t < CAPSULE_TENSORS; t++) {
        bytes += capsule_tensor_bytes(c, t);
        if (bytes > CAPSULE_BYTES) {
            return -1;
        }
    }
    return bytes;
}

/* Values in a line of capsule_lists. */
static inline int32_t capsule_list_length(const struct capsule *c, size_t list)
{
    return list < 2       ? c->num_reqs
           : list < 6     ? 2 * capsule_heads(c, (int32_t)list - 2)
           : list == 6    ? c->has_sinks * c->num_q_heads
           : c->alibi > 0 ? c->num_q_heads
                          : 0;
}

/* Hands the head out, line by line. */
void capsule_write(const struct capsule *capsule, void (*put)(void *user, const char *line),
                   void *user);

#endif
