/* SPDX-License-Identifier: Apache-2.0 */
/* The rooms of the reference backend. The core has held every call to the layer, the caches, the
 * batch and its tensors' shapes before a kernel sees it; nothing of that is checked again here. */
#ifndef CPU_REF_REFERENCE_H
#define CPU_REF_REFERENCE_H

#include <attn/draft/index_lists.h>
#include <attn/plugin.h>
#include <stdbool.h>

#define REF_MAX_HEAD_SIZE 576
#define REF_MAX_LOOP_ROWS 4 /* query heads that share one reading of a key */
#define REF_MAX_TOPK 2048   /* an indexer's lists, on the stack of a loop's body */
#define REF_MAX_FORCED 64
/* Caches whose decodes write the step's keys in the attend: the two levels of int8. */
#define REF_DECODE_WRITES (UINT64_C(1) << ATTN_KV_INT8_KV | UINT64_C(1) << ATTN_KV_INT8_K)

struct attn_instance {
    const struct attn_host *host;
};

/* The keys that a query and its heads may see, see attn/draft/index_lists.h. */
struct key_list {
    const int32_t *entries; /* NULL: every key */
    int32_t count;
    int32_t granularity;
    bool physical_slots;
};

/* One query token of a request, and everything that decides what it sees. */
struct query {
    const struct attn_layer_desc *layer;
    const struct attn_batch *batch;
    int32_t request;
    int64_t index;    /* i, in the request */
    int64_t length;   /* L */
    int64_t own;      /* L - query_len: position of the request's first query */
    int64_t position; /* p = own + i */
    bool causal;
    const struct attn_kv_view *k_cache; /* NULL: keys are contiguous */
    struct key_list list;
};

/* visible.c. Where keys are looked for: positions, outside of which no key is visible (blocks
 * there are never touched), or places in the query's list. */
void query_candidates(const struct query *query, int64_t *first, int64_t *end);
/* The position of a candidate, or -1 where it is no key that the query sees. */
int64_t query_key(const struct query *query, int64_t candidate);
/* The block of the cache that has key j. */
int64_t query_block(const struct query *query, int64_t j);
/* What is added to the score of a visible key: ALiBi and the tree's bias. */
double query_bias(const struct query *query, double slope, int64_t j);
double alibi_bias(int32_t alibi, double slope, int64_t position, int64_t j);

double dot(const double *a, const double *b, int32_t count); /* attend.c */

/* Up to REF_MAX_LOOP_ROWS query heads of one token that share a KV head: queries, running maximum,
 * denominator and weighted sum of values, as in the online form of softmax (Milakov,
 * Gimelshein 2018). */
struct softmax_rows {
    int32_t count;
    int32_t first_head;
    int32_t head_size_v;
    double q[REF_MAX_LOOP_ROWS][REF_MAX_HEAD_SIZE];
    double slope[REF_MAX_LOOP_ROWS];
    double row_max[REF_MAX_LOOP_ROWS];
    double row_sum[REF_MAX_LOOP_ROWS];
    double acc_o[REF_MAX_LOOP_ROWS][REF_MAX_HEAD_SIZE];
};

/* attend.c. How many query heads may share one reading of a key: those of one list. The list that
 * query head `head` has at a token row; without lists entries is NULL. */
int32_t list_heads(const struct attn_layer_desc *layer);
struct key_list list_of(const struct attn_attend_args *args, int64_t token, int32_t head);
/* The query at a token row; s = scale q.k, capped; one key more; out and lse. */
struct query query_of(const struct attn_attend_args *args, int64_t token);
void rows_start(const struct attn_attend_args *args, int32_t first_head, int32_t count,
                int32_t head_size_v, struct softmax_rows *rows);
double rows_score(const struct attn_layer_desc *layer, const double *q, const double *k);
void rows_add_key(const struct attn_attend_args *args, struct softmax_rows *rows, int32_t row,
                  double s, const double *v);
void rows_write(const struct attn_attend_args *args, int64_t token, struct softmax_rows *rows);

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

/* rows.c */
enum row_form {
    ROW_UNKNOWN,
    ROW_NUMBERS, /* plain, with a scale per tensor or head */
    ROW_FP8_SCALED,
    ROW_INT8_SCALED,
    ROW_INT8_CHANNEL,
    ROW_INT4_HADAMARD,
    ROW_NVFP4,
    ROW_MXFP4,
    ROW_DS_MLA,
    ROW_DS_V4,
    ROW_TURBOQUANT,
    ROW_BLOCKS
};
enum row_form row_form(const struct attn_layer_desc *layer, bool is_v);
void row_load(const struct cache_place *at, double *row);
void row_store(const struct cache_place *at, const double *row);

/* blocks.c. Rows of Q8_0 and Q4_0; a block with a NaN or an infinity reads as NaN. */
#define REF_BLOCK 32
void blocks_load(const struct cache_place *at, double *row);
void blocks_store(const struct cache_place *at, const double *row);

/* turboquant.c. Sylvester's matrix, not normalised: applied twice it multiplies by count, a power
 * of two. */
void hadamard(double *row, int32_t count);
/* A row as its true values, and back; a row with a NaN or an infinity reads as NaN.
 */
void turboquant_load(const struct cache_place *at, double *row);
void turboquant_store(const struct cache_place *at, const double *row);

/* latent.c. Rows [c : kv_lora_rank | k_pe : rope] of MLA, as one tensor or as two. */
struct latent_rows {
    const struct attn_tensor *joined; /* NULL: the two parts */
    const struct attn_tensor *latent;
    const struct attn_tensor *rope;
    int32_t rank;
    int32_t rope_size;
    int32_t heads; /* 0: the parts are [T, size] */
};
struct latent_rows latent_queries(const struct attn_attend_args *args);
struct latent_rows latent_keys(const struct attn_write_kv_args *args);
void latent_load(const struct latent_rows *rows, int64_t token, int64_t head, double *row);

attn_status ref_attend(const struct attn_attend_args *args, struct attn_error *error);
/* index.c: attend of an indexer. */
attn_status ref_index(const struct attn_attend_args *args, struct attn_error *error);
attn_status ref_attend_mla(const struct attn_attend_args *args, struct attn_error *error);
attn_status ref_attend_mla_sparse(const struct attn_attend_args *args, struct attn_error *error);
attn_status ref_recurrent(const struct attn_attend_args *args, struct attn_error *error);
attn_status ref_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status ref_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status ref_merge_states(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status ref_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error);
attn_status ref_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error);
attn_status ref_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status ref_amax(const struct attn_amax_args *args, struct attn_error *error);
attn_status ref_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status ref_copy(const struct attn_copy_args *args, struct attn_error *error);
attn_status ref_fill(const struct attn_fill_args *args, struct attn_error *error);
attn_status ref_update_block_table(const struct attn_attend_args *args, struct attn_error *error);

#endif
