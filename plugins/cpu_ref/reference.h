/* SPDX-License-Identifier: Apache-2.0 */
/* The rooms of the reference backend. */
#ifndef CPU_REF_REFERENCE_H
#define CPU_REF_REFERENCE_H

#include <attn/plugin.h>
#include <stdbool.h>

#define REF_MAX_HEAD_SIZE 576
#define REF_MAX_LOOP_ROWS 8 /* query heads that share one reading of a key */

struct attn_instance {
    const struct attn_host *host;
};

/* One query token of a request, and everything that decides what it sees. */
struct query {
    const struct attn_layer_desc *layer;
    const struct attn_batch *batch;
    int32_t request;
    int64_t index;      /* i, in the request */
    int64_t length;     /* L */
    int64_t own;        /* L - query_len: position of the request's first query */
    int64_t position;   /* p = own + i */
    bool causal;
};

/* visible.c. Key position j is one of 0 .. length-1. */
bool query_sees(const struct query *query, int64_t j);
/* A range outside of which no key is visible: blocks outside it are never touched. */
void query_key_range(const struct query *query, int64_t *first, int64_t *end);
/* What is added to the score of a visible key: ALiBi and the tree's bias. */
double query_bias(const struct query *query, double slope, int64_t j);
double alibi_bias(int32_t alibi, double slope, int64_t position, int64_t j);

/* One row of a cache: key or value of one slot and head. */
struct cache_place {
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_kv_view *view;
    bool is_v;
    int64_t block;
    int64_t slot;
    int64_t head;
};

/* cache.c. A row as its true values. */
void cache_load(const struct cache_place *at, double *row);
void cache_store(const struct cache_place *at, const double *row);

/* rows.c */
enum row_form {
    ROW_UNKNOWN,
    ROW_NUMBERS, /* plain, with a scale per tensor or head */
    ROW_FP8_SCALED,
    ROW_INT8_SCALED,
    ROW_INT8_CHANNEL,
    ROW_INT4_HADAMARD,
    ROW_NVFP4
};
enum row_form row_form(const struct attn_layer_desc *layer, bool is_v);
void row_load(const struct cache_place *at, double *row);
void row_store(const struct cache_place *at, const double *row);
attn_status row_check(const struct attn_layer_desc *layer, const struct attn_layer_params *params,
                      const struct attn_kv_view *view, bool is_v, struct attn_error *error);

/* arguments.c */
attn_status check_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status check_write(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status check_tensor(const struct attn_tensor *tensor, const char *name, int32_t ndim,
                         int64_t heads, int64_t head_size, struct attn_error *error);
attn_status check_lse(const struct attn_tensor *lse, const char *name, struct attn_error *error);

attn_status ref_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status ref_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status ref_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status ref_merge_states(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status ref_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error);
attn_status ref_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error);
attn_status ref_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status ref_amax(const struct attn_amax_args *args, struct attn_error *error);
attn_status ref_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status ref_copy(attn_instance *instance, void *destination, const void *source, size_t bytes,
                     int32_t kind, void *stream, struct attn_error *error);
attn_status ref_fill(attn_instance *instance, void *destination, int32_t value, size_t row_bytes,
                     size_t stride, int64_t rows, void *stream, struct attn_error *error);
attn_status ref_update_block_table(const struct attn_attend_args *args, struct attn_error *error);

#endif
