/* SPDX-License-Identifier: Apache-2.0 */
/* Latent rows, queries and lists of an MLA case in poisoned memory, and what they are as numbers.
 */
#ifndef TESTS_CPU_REF_LATENT_H
#define TESTS_CPU_REF_LATENT_H

#include <attn/mla.h>
#include <stdbool.h>

#include "harness.h"

#define MAX_REQS 6

struct mla_case {
    const char *name;
    int32_t dtype, kv_dtype; /* kv_dtype 0: as dtype */
    int32_t heads, rank, rope, block_size;
    int32_t num_reqs, query_lens[MAX_REQS], seq_lens[MAX_REQS];
    int32_t topk;   /* sparse */
    int32_t joined; /* q and k as one tensor each */
    int32_t has_sinks, window;
    float soft_cap;
    int32_t not_causal;
    int32_t first_row, padding;
    int32_t table_rows; /* block_table_row into a larger table */
    int32_t fp8_query;
    float k_scale;
    int32_t nan_key; /* a visible NaN, in each request's last key */
};

struct latent {
    const struct mla_case *c;
    int32_t size, row_bytes, kv_dtype, num_rows, num_keys, stride, q_dtype;
    int32_t query_start[MAX_REQS + 1], key_start[MAX_REQS + 1], table_row[MAX_REQS];
    int32_t *table, *topk;
    int64_t num_blocks, cache_bytes, *slots;
    double *given, *keys, *q; /* [keys, size] before and behind the cache; [rows, heads, size] */
    uint8_t *cache, *expected, *q_memory, *q_pe_memory, *k_memory, *k_pe_memory, *out;
    float *lse, sinks[64], q_scale;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_mla_desc mla;
    struct attn_batch batch;
    struct attn_kv_view view;
    struct attn_io_mla io;
    struct test_tensor q_tensor, q_pe, kv_c, k_pe, k_joined, out_tensor, lse_tensor;
};

struct latent *latent_create(const struct mla_case *c);
void latent_destroy(struct latent *p);
int64_t slot_of(const struct latent *p, int32_t r, int32_t j);
/* the list of query i of request r */
int32_t *topk_of(const struct latent *p, int32_t r, int32_t i);
/* May query i of request r look at key j, a list aside? */
bool sees(const struct mla_case *c, int32_t r, int32_t i, int32_t j);

#endif
