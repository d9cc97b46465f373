/* SPDX-License-Identifier: Apache-2.0 */
/* Arguments of the kernels that move the KV cache: write_kv, rope_write_kv, gather_kv, copy_blocks,
 * copy, fill; and of make_block_table, which makes the table that they read. */
#ifndef ATTN_CACHE_KERNELS_H
#define ATTN_CACHE_KERNELS_H

#include "attend.h"

struct attn_write_kv_args {
    size_t struct_size;
    /* the run's; rope_write_kv: attn_io_rope, or a draft's attn_output_rope */
    const struct attn_ext *next;
    attn_instance *instance;
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_kv_view *k_cache;
    const struct attn_kv_view *v_cache;
    const int64_t *slot_mapping; /* device [num_slots]; negative: padding, not written */
    int64_t num_slots;
    void *stream;
    const struct attn_tensor *q; /* rope_write_kv only: rotated in place */
    const struct attn_tensor *k; /* [>= num_slots, Hk, D] */
    /* [>= num_slots, Hk, Dv]; MLA: NULL, k is the latent row */
    const struct attn_tensor *v;
    /* As in attn_attend_args. Rows that the step brings for them stand in attn_io_caches, and where
     * they go in the slot_mapping of their table: tables[table - 1] of the batch, or, table 0, the
     * one above. */
    const struct attn_layer_cache *caches;
    int32_t num_caches;
    int32_t cache_stride;
    const struct attn_batch *batch; /* with caches or attn_output_rope only, else NULL */
};

/* Reads rows through the block table into contiguous memory, dequantized: MLA context chunks,
 * prefill gathers. */
struct attn_gather_kv_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_kv_view *cache;
    const struct attn_batch *batch; /* block_table, block_table_row */
    /* device [R]: position of the first row of each request's chunk */
    const int32_t *first_key;
    const int32_t *out_start_loc; /* device [R+1]: rows of out */
    void *stream;
    const struct attn_tensor *out; /* [rows, heads, D] activation dtype */
};

/* One transfer of whole blocks of one view's memory, of `bytes` each; an element of an array, whose
 * owner says the element's size. */
struct attn_block_copy {
    const void *source;    /* base of the source cache */
    void *destination;     /* base of the destination cache */
    int64_t source_stride; /* bytes between blocks */
    int64_t destination_stride;
    int64_t bytes; /* size of one block */
};

enum attn_copy_kind {
    ATTN_COPY_HOST_TO_DEVICE = 1,
    ATTN_COPY_DEVICE_TO_HOST = 2,
    ATTN_COPY_DEVICE_TO_DEVICE = 3
};

/* pairs[i] = (source block, destination block), host int64 [num_pairs, 2], applied to every entry
 * of `copies` (all layers) in one call, in order: a destination may be the source of a later pair.
 * Entries of `copies` share no bytes. */
struct attn_copy_blocks_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    int32_t kind; /* enum attn_copy_kind */
    int32_t num_copies;
    const struct attn_block_copy *copies;
    const int64_t *pairs;
    int64_t num_pairs;
    int32_t copy_stride; /* from element to element of `copies` */
    int32_t reserved;
};

struct attn_copy_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    void *destination;
    const void *source;
    size_t bytes;
    int32_t kind; /* enum attn_copy_kind */
    int32_t reserved;
};

struct attn_fill_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    void *destination;
    size_t row_bytes;
    size_t stride; /* bytes between rows */
    int64_t rows;
    int32_t value; /* what each byte becomes */
    int32_t reserved;
};

/* The block table that kernels get, made of an engine's whose entries are blocks of another size,
 * or of its page lists. Request r has n entries: with a block table ceil(seq_lens[r] /
 * tokens_per_entry), with page lists page_start_loc[r + 1] - page_start_loc[r]. Entry i, block b,
 * fills m = blocks_per_entry places of out: out[r, i m + j] = b m + j for j in 0 .. m - 1, as far
 * as num_columns goes. Other places are left. Entries may hold anything: they are not followed. */
struct attn_block_table_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    void *stream;
    int32_t num_reqs; /* R */
    int32_t blocks_per_entry;
    int32_t tokens_per_entry;
    int32_t num_columns;        /* columns of out */
    const int32_t *block_table; /* device; NULL: page lists */
    int64_t block_table_stride;
    const int32_t *block_table_row; /* device [R]; NULL: row r */
    const int32_t *page_indices;    /* device; NULL: the block table */
    const int32_t *page_start_loc;  /* device [R+1] */
    /* device [R], with page lists: out_seq_lens[r] becomes (n - 1) tokens_per_entry +
     * last_page_len[r], 0 if n is 0. NULL: no lengths are wanted */
    const int32_t *last_page_len;
    const int32_t *seq_lens; /* device [R], with a block table */
    int32_t *out;            /* device [R, num_columns] */
    int32_t *out_seq_lens;   /* device [R] or NULL */
};

ATTN_STATIC_ASSERT(sizeof(struct attn_write_kv_args) == 128, "attn_write_kv_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_gather_kv_args) == 88, "attn_gather_kv_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_copy_blocks_args) == 72, "attn_copy_blocks_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_copy_args) == 64, "attn_copy_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_fill_args) == 72, "attn_fill_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_block_table_args) == 120, "attn_block_table_args of ABI 0.3");

#endif
