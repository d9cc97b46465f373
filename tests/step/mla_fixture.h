/* SPDX-License-Identifier: Apache-2.0 */
/* One MLA layer with its weights, cache and batch, bound as an engine binds it, and the output of
 * its step in float64. */
#ifndef STEP_MLA_FIXTURE_H
#define STEP_MLA_FIXTURE_H

#include <attn/api.h>
#include <attn/draft/index_lists.h>
#include <stdbool.h>

#include "opened.h"
#include "support/tensor.h"

enum { MAX_REQS = 5, MAX_LENGTH = 80, BLOCK = 8, MAX_BLOCKS = 12, MAX_HEADS = 8, NUM_BLOCKS = 64 };
#if defined(PUBLISHED_SIZES) /* what fp8_ds_mla rows are made for */
enum { NOPE = 128, ROPE = 64, V = 128, RANK = 512, ROW = RANK + ROPE };
#else
enum { NOPE = 16, ROPE = 8, V = 24, RANK = 32, ROW = RANK + ROPE };
#endif

struct setting {
    const char *backend;
    int32_t heads, padded;
    int32_t chunk; /* context_workspace_tokens */
    int32_t topk;  /* sparse */
    bool lists;    /* the top k as lists, ... */
    bool lengths;  /* ... which have lengths */
    bool split;    /* w_uk and w_uv instead of kv_b_proj */
    bool int8;     /* such w_uk and w_uv, a scale for each head */
    bool mxfp4;    /* with a scale for 32 of a row */
    bool apart;    /* q_nope and q_pe in tensors of their own */
    bool latent;   /* no absorption: the engine projects */
    int32_t fp8;   /* cache of that kv_dtype */
    bool ds_mla;   /* cache of fp8_ds_mla rows */
    bool fp8_out;
    bool fp8_query; /* apart */
    int32_t dtype;  /* the activations'; 0: float32, which all of the formulas are made for */
    bool moved;     /* q_pe stands after q_nope in the same rows, with a gap */
    bool tree;      /* which hides nothing */
    int32_t window;
    bool has_sinks;
    int32_t first_row; /* query_start_loc[0] */
    bool no_lse;
    int32_t drafted, invariant;
    int32_t num_reqs, queries[MAX_REQS], lens[MAX_REQS];
    /* that share the cache, each with heads of its own; NULL: one alone */
    const struct attn_collectives *ranks;
    int32_t interleave, reduce;
};

/* One of cpu_ref with these fields, in an initializer. */
#define CPU_REF(...)                                                                               \
    {                                                                                              \
        "cpu_ref", __VA_ARGS__                                                                     \
    }

struct mla {
    OPENED;
    const struct setting *s;
    struct attn_layer_desc described;
    struct attn_mla_desc desc;
    struct attn_context_parallel cp;
    float weights[MAX_HEADS * (NOPE + V) * RANK], uk[MAX_HEADS * NOPE * RANK],
        uv[MAX_HEADS * RANK * V];
    uint8_t codes[2][MAX_HEADS * V * RANK], block_scales[2][MAX_HEADS * V * RANK / 32];
    float head_scales[MAX_HEADS];
    struct attn_mla_weights given;
    struct shaped weight[4];               /* w_uk or kv_b_proj, w_uv, their scales */
    float rows[MAX_REQS][MAX_LENGTH][ROW]; /* as the engine has them */
    float q[MAX_REQS * 40][MAX_HEADS][RANK + ROPE];
    int32_t starts[MAX_REQS + 1], lens[MAX_REQS], table[MAX_REQS][MAX_BLOCKS],
        topk[MAX_REQS * 40][8];
    int64_t slots[MAX_REQS * MAX_LENGTH];
    float kv_c[MAX_REQS * MAX_LENGTH][RANK], k_pe[MAX_REQS * MAX_LENGTH][ROPE];
    float nope[MAX_REQS * 40 * MAX_HEADS * RANK], pe[MAX_REQS * 40 * MAX_HEADS * ROPE];
    float *out, *lse, k_scale;
    void *cache;
    struct attn_batch batch;
    struct shaped tensors[8];
    struct attn_io_mla ext;
    struct attn_index_lists lists;
    struct attn_io_index_lists lists_io;
    int32_t list_lengths[MAX_REQS * 40];
    struct attn_io_output_quant quant;
    float sinks[MAX_HEADS];
    struct attn_step_io io;
};

#define QUERY_SCALE 0.03f

/* Opens the core for *m, a runtime of this test's plugins. */
void open_core(struct mla *m);
void describe(struct mla *m);
/* The contexts are in the cache; the step's own keys are staged. */
struct mla *mla_create(const struct setting *s);
void mla_end(struct mla **m);
int32_t stage_keys(struct mla *m, bool context);
void set_io(struct mla *m, int32_t keys);
const struct attn_tensor *tensor(struct mla *m, int32_t which, void *data, int32_t ndim, int64_t a,
                                 int64_t b, int64_t c, int64_t sa, int64_t sb);
/* Query i of request r, head h: out, and the log-sum-exp. per_head: new keys as they came, not from
 * the cache. */
double formula(const struct mla *m, int32_t r, int32_t i, int32_t h, bool per_head, double *out);
void compare(const struct mla *m, bool prefill_per_head);
void step(struct mla *m);
/* Two steps of one setting. */
void check(const struct setting *s, bool per_head);

#endif
