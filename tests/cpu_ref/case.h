/* SPDX-License-Identifier: Apache-2.0 */
/* One attend as data: a case is built into poisoned memory, written and attended by the plugin, and
 * every byte and element of what it leaves is compared. */
#ifndef TESTS_CPU_REF_CASE_H
#define TESTS_CPU_REF_CASE_H

#include "harness.h"

#define CASE_MAX_REQUESTS 32

enum case_layout {                         /* beyond enum attn_kv_layout */
                   CASE_LAYOUT_LAYERS = 6, /* [N, 3 layers, 2, B, Hk, D], the middle layer */
                   CASE_LAYOUT_COUNT = 7
};

/* 0 is the plain choice everywhere: f32, causal, a paged NHD cache of the activation dtype. */
struct attend_case {
    const char *name;
    int32_t dtype;    /* enum attn_dtype_id */
    int32_t kv_dtype; /* enum attn_kv_dtype; 0: as dtype */
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    int32_t block_size; /* 0: contiguous keys */
    int32_t layout;
    int32_t num_reqs;
    int32_t query_lens[CASE_MAX_REQUESTS];
    int32_t seq_lens[CASE_MAX_REQUESTS];
    int32_t not_causal;
    int32_t batch_causal; /* enum attn_batch_causal */
    int32_t causal_per_request;
    int32_t has_window, left, right;
    int32_t chunk, lookback;
    float soft_cap;
    int32_t alibi;
    int32_t has_sinks;
    int32_t sink_len;
    int32_t num_spans; /* per request */
    int32_t span_window;
    int32_t tree;     /* enum attn_tree_mask */
    int32_t one_tree; /* for the whole batch */
    int32_t k_scale_form, v_scale_form, q_scale_form, p_scale_form;
    int32_t q_dtype;        /* with q_scale_form */
    int32_t host_scales;    /* per-tensor scales as host floats */
    int32_t small_scales;   /* so that fp8 saturates */
    int32_t table_rows;     /* block_table_row into a larger table */
    int32_t shared;         /* keys in the leading blocks that all requests share */
    int32_t ordered_blocks; /* 0 shuffled, 1 ascending, 2 descending, 3 interleaved */
    int32_t first_row;      /* query_start_loc[0] */
    int32_t padding;        /* rows of q and out behind the last request's */
    int32_t fused;          /* q, k, v and out are slices of wider rows */
    int32_t lse_by_token;   /* [T, Hq] seen as [Hq, T] */
    int32_t no_lse;
    int32_t fast_prefill; /* only each request's last row, padded by repetition */
    int32_t nan_key;      /* a visible NaN: 1 in k, 2 in v, of each request's own first key */
};

/* Fails the cmocka test, naming case and element, if anything differs. */
void case_check(const struct attend_case *c, const struct reference *reference, uint64_t seed);

#endif
