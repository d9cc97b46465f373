/* SPDX-License-Identifier: Apache-2.0 */
/* One step's batch. The engine fills it for plan_batch; kernels get the same struct, or views of it
 * made by the core (the decode part, the prefill part, a cascade's prefix), so query_start_loc[0]
 * may be above 0: it is always a row of the step's q and out. */
#ifndef ATTN_BATCH_H
#define ATTN_BATCH_H

#include "types.h"

enum attn_batch_mode {
    ATTN_BATCH_AUTO = 0,   /* extend, decode or mixed, by the query lengths; drafts too */
    ATTN_BATCH_IDLE = 1,   /* out becomes zero, lse is left as it is, nothing is computed */
    ATTN_BATCH_PROFILE = 2 /* no requests: output zero, all of the workspace is touched; num_tokens,
                            * as of an idle batch, is 0 to the plan's max_num_tokens */
};

#define ATTN_BATCH_NO_CASCADE 1u
/* a graph is being captured: cascade and host-built tables are off */
#define ATTN_BATCH_IN_CAPTURE 2u
/* query_start_loc_host and seq_lens_host say no fewer queries and keys of a request than it
 * has, but maybe more; a block table is as wide as the bounds. The device's arrays are the truth: q
 * and out lie as they say, rows past query_start_loc[R] are padding, in which a composed output
 * form leaves codes that mean nothing. For host_bounds layers */
#define ATTN_BATCH_HOST_BOUNDS 4u
#define ATTN_BATCH_FAST_BUILD 0x10000u /* a hint to kernels: a quick plan rather than the best */

/* One more table of a batch, of caches that its own fields do not address (attn_cache_desc.table):
 * an element of attn_batch.tables. Fields as in attn_batch, in rows of those caches. */
struct attn_batch_table {
    const int32_t *block_table; /* device [rows, blocks] */
    int64_t block_table_stride;
    int64_t block_table_rows;       /* 0 reads as R */
    const int32_t *block_table_row; /* device [R]; NULL: row r */
    const int64_t *slot_mapping;    /* device [num_slots], negative: padding */
    int64_t num_slots;
    /* device [R]: rows of each request, the step's own included */
    const int32_t *seq_lens;
    const int32_t *seq_lens_host; /* host [R] or NULL */
    int32_t max_seq_len;          /* may be a bound; 0: by seq_lens_host */
    int32_t reserved;
    /* page lists in place of block_table, as those of attn_batch; last_page_len counts rows, and
     * no request has more of them than max_seq_len tokens of the plan's limits take */
    const int32_t *page_indices;
    const int32_t *page_start_loc;
    const int32_t *last_page_len;
    const int32_t *page_start_loc_host;
    const int32_t *last_page_len_host;
    int64_t num_pages;
};

/* R requests, T = num_tokens rows. On a CPU device pointers are host pointers. Every pointer is
 * borrowed until the last run of the plan has finished on its stream; host copies until plan_batch
 * returns, and, where another plan takes the batch over, until its plan_update_block_table does. */
struct attn_batch {
    size_t struct_size;
    /* attn_batch_recurrent, attn_batch_context_parallel, vendors' (version.h) */
    const struct attn_ext *next;
    int32_t mode;       /* enum attn_batch_mode */
    uint32_t flags;     /* ATTN_BATCH_* */
    int32_t num_reqs;   /* R; padding rows have query_len 0 (or seq_len 0) */
    int32_t num_tokens; /* T, padding included */
    /* rows that are computed; the rest of out is left as it is */
    int32_t num_actual_tokens;
    int32_t max_query_len; /* may be a bound */
    int32_t max_seq_len;   /* may be a bound */
    /* enum attn_causal; NO: not of layers with chunks, prefix_lm or states */
    int32_t causal;
    const int32_t *query_start_loc;      /* device [R+1], not decreasing */
    const int32_t *query_start_loc_host; /* host [R+1], required */
    /* device [R]: keys, the step's own included; required with a cache */
    const int32_t *seq_lens;
    const int32_t *seq_lens_host; /* host [R]; NULL: plan from the bounds */
    /* device [R+1]: contiguous keys longer than the queries; NULL: as queries */
    const int32_t *key_start_loc;
    const int32_t *key_start_loc_host; /* host [R+1] */
    /* device [rows, blocks]; entries past ceil(L/B), or outside the window, are undefined and never
     * dereferenced */
    const int32_t *block_table;
    /* elements between rows, and of a single row: no fewer than the longest request's blocks */
    int64_t block_table_stride;
    int64_t block_table_rows; /* 0 reads as R */
    /* device [R]: the table's row of each request; NULL: row r */
    const int32_t *block_table_row;
    /* device [num_slots]: block * B + offset; negative: padding, any number, not written */
    const int64_t *slot_mapping;
    int64_t num_slots; /* rows of k and v with padding; neither T nor the plan's limits bound it */
    const uint8_t *causal_per_request; /* device [R]; NULL: all as `causal` */
    const int32_t *encoder_seq_lens;   /* device [R]: cross layers' keys */
    const int32_t *encoder_seq_lens_host;
    int32_t max_encoder_seq_len;
    /* keys that all requests share in the same leading blocks; 0: none */
    int32_t common_prefix_len;
    /* device [num_logits_indices]: fast prefill computes these rows only */
    const int32_t *logits_indices;
    int32_t num_logits_indices;
    int32_t num_spans;    /* prefix-LM spans of all requests */
    const int32_t *spans; /* device [num_spans, 2]: first and last position, inclusive */
    /* device [R+1]: request r has spans span_start_loc[r] .. [r+1]-1 */
    const int32_t *span_start_loc;
    /* Tree between the step's own tokens; row i, column j of a request's queries. BITS: uint32
     * words, bit j mod 32 of word j / 32 set where visible. BIAS: float32 added to the score, -inf
     * hides. The context before is visible. */
    const void *tree;            /* device; NULL: none */
    int64_t tree_stride_request; /* words or floats; 0: one tree for the whole batch */
    int64_t tree_stride_row;     /* words or floats */
    /* tables 1 to num_tables; 0 is the fields above, and all that plain layers need */
    const struct attn_batch_table *tables;
    int32_t num_tables;
    int32_t table_stride; /* sizeof(struct attn_batch_table) of the writer; kernels get their own */
    /* Page lists in place of block_table, which is then NULL: request r's blocks are
     * page_indices[i] for i in page_start_loc[r] .. page_start_loc[r + 1] - 1. For layers that say
     * needs_page_lists, in any of the batch's tables; kernels get the block table that is made of
     * them. */
    const int32_t *page_indices;   /* device [num_pages] */
    const int32_t *page_start_loc; /* device [R+1], not decreasing */
    /* device [R]: keys in each request's last block, 1 to its size; or NULL, and seq_lens says the
     * lengths. Given, seq_lens and seq_lens_host are NULL */
    const int32_t *last_page_len;
    /* host copies, [R+1] and [R], from which the lengths are planned; NULL: from the bounds. Not
     * read on a CPU */
    const int32_t *page_start_loc_host;
    const int32_t *last_page_len_host;
    int64_t num_pages;
};

/* What plan_batch made of a batch: counts of its decode part, which stands first, and of its
 * prefill part. */
struct attn_batch_split {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t num_decodes;
    int32_t num_prefills;
    int32_t num_decode_tokens;
    int32_t num_prefill_tokens;
};

/* Requests that batch_order brings into an order. */
struct attn_batch_order {
    size_t struct_size;
    const struct attn_ext *next;
    const int32_t *query_lens; /* host [num_reqs] */
    const int32_t *seq_lens;   /* host [num_reqs], the step's own keys included */
    /* host [num_reqs]: a request that has not yet read its whole prompt before this step is no
     * decode, however short. NULL: lengths alone decide */
    const int32_t *prompt_lens;
    int32_t num_reqs;
    int32_t threshold;    /* query_len <= this is a decode */
    int32_t short_extend; /* query_len <= this is a short extend */
    int32_t reserved;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_batch) == 296, "attn_batch of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_batch_table) == 120, "attn_batch_table of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_batch_split) == 32, "attn_batch_split of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_batch_order) == 56, "attn_batch_order of ABI 0.3");

#endif
