/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of a case and the arguments that show it to the plugin. */
#ifndef TESTS_CPU_REF_PROBLEM_H
#define TESTS_CPU_REF_PROBLEM_H

#include "case.h"

#define POISON 0xff /* NaN in every float format here */

struct problem {
    const struct attend_case *c;
    int32_t dv, kv_number, q_number;
    int64_t num_rows; /* T */
    int64_t num_keys; /* of all requests */
    int32_t num_blocks, max_blocks;
    int32_t query_start[CASE_MAX_REQUESTS + 1], key_start[CASE_MAX_REQUESTS + 1];
    int32_t lens[CASE_MAX_REQUESTS]; /* seq_lens as the kernel reads them */
    int32_t table_row[CASE_MAX_REQUESTS], logits[2 * CASE_MAX_REQUESTS];
    int32_t span_start[CASE_MAX_REQUESTS + 1], *spans;
    uint8_t causal[CASE_MAX_REQUESTS];
    int32_t *table;
    int64_t table_stride, table_rows;
    int64_t *slots;
    void *tree;
    double *tree_bias; /* [request][query_len, query_len], at tree_start */
    int64_t tree_start[CASE_MAX_REQUESTS], tree_width;
    float sinks[64], slopes[64], q_scale[64], k_scale[64], v_scale[64], p_scale;
    /* values as the kernel should see them, float64 */
    double *q, *k, *v, *sink_k, *sink_v;
    double *k_given, *v_given; /* activations before the cache */
    uint8_t *cache, *cache_expected;
    int64_t cache_bytes;
    uint8_t *q_memory, *out_memory, *lse_memory, *k_memory, *v_memory;
    int64_t out_bytes, lse_bytes;
    int64_t q_stride, out_stride, k_stride, v_stride; /* elements between rows */
    struct test_tensor q_tensor, k_tensor, v_tensor, out_tensor, lse_tensor, sink_k_tensor,
        sink_v_tensor;
    uint8_t *sink_memory;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view k_view, v_view;
};

/* `count` items, each byte set; a test without memory has no result and ends. */
void *problem_memory(int64_t count, size_t size, int32_t byte);
/* terms.c */
void problem_build_spans(struct problem *p);
void problem_build_tree(struct problem *p);
int64_t problem_longest_query(const struct attend_case *c);

struct problem *problem_create(const struct attend_case *c, uint64_t seed);
void problem_destroy(struct problem *p);
/* Byte offset of an element of the cache by the layout's own index order. */
int64_t problem_cache_offset(const struct problem *p, int32_t is_v, int64_t block, int64_t slot,
                             int64_t head, int64_t dim);
int32_t problem_block(const struct problem *p, int32_t request, int64_t key);
int32_t problem_owner(const struct problem *p, int32_t request, int64_t key);
/* Writes all keys through write_kv, in a shuffled order with skipped rows among them. */
attn_status problem_write(struct problem *p, const struct reference *reference,
                          struct attn_error *error);
/* NaN into every key that no query of its request sees, garbage into tables of hidden blocks. */
void problem_hide(struct problem *p, int32_t request, int64_t key);
attn_status problem_attend(struct problem *p, const struct reference *reference,
                           struct attn_error *error);

#endif
