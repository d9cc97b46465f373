/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of gated_delta: the call and a worker's memory. */
#ifndef CPU_SIMD_GDN_H
#define CPU_SIMD_GDN_H

#include "common/recurrent.h"
#include "cpu_simd/internal.h"

static inline const struct variant *gdn_variant(const struct gdn *gdn)
{
    return gdn->args->instance->variant;
}

/* Value heads over one key head that an item takes together: q, k and their products are the same.
 */
#define GDN_TOGETHER 4

/* A row of the output that is still in floats. */
struct gdn_pending {
    const float *o; /* NULL: none */
    int64_t row;
    int32_t head;
};

/* A worker's memory: rows are padded to COLUMN_MULTIPLE floats, with zeros. */
struct gdn_scratch {
    int32_t depth; /* padded Dk */
    int32_t width; /* padded Dv */
    float *q;      /* [C, depth], scaled */
    float *k;      /* [C, depth] */
    float *v;      /* [C, width]; r of the chunk replaces it */
    float *o;      /* [C, width] */
    float *kt;     /* [depth, TILE_KEYS]: k transposed */
    float *kk;     /* [C, C]: k k^T */
    float *qk;     /* [C, C]: q k^T */
    float *by_r;   /* [C, C]: kk as the triangular system takes it, with a value head's decays */
    float *by_q;   /* [C, C]: qk with the decays */
    float *d;      /* [C]: the decay from after token j to the chunk's end */
    struct product_operand q_left, k_left;            /* [C, depth], whole */
    struct product_operand kt_right;                  /* [depth, C], whole */
    struct product_operand kt_left;                   /* [depth, C] */
    struct product_operand state_right[GDN_TOGETHER]; /* [depth, width], for each head of an item */
    struct product_operand by_q_left;                 /* [C, C] */
    struct product_operand by_r_left;                 /* [C, C], a block of rows at a time */
    struct product_operand r_right;                   /* [C, width] */
    float (*group_kk)[WALK_TOKENS]; /* [C]: of a token's k with those of its group */
    float (*group_qk)[WALK_TOKENS]; /* [C]: products of a token's q with the k of its group */
    /* For chunks: S transposed for each head of an item, [depth, columns] for each `columns` value
     * dims. For steps: S itself */
    float *states;
    float *packed_states; /* memory of state_right */
    int32_t columns;
    struct gdn_pending pending;
    float *raw; /* [conv_width - 1 + C, wider of both]: inputs of the convolution; a part of a state
                   on the way to its slot */
    const float *taps; /* for all heads of the mixed row [conv_width + 1, depth or width]: weights,
                          then the bias */
    float ones[MAX_HEAD_SIZE];
    float decay[GDN_CHUNK];
    float beta[GDN_CHUNK];
    float e[GDN_CHUNK]; /* decay from the chunk's beginning through token t */
};

static inline void *gdn_state(const struct gdn *gdn, int64_t slot, int32_t head)
{
    return view_row(gdn->args->k_cache, slot, 0, head);
}

static inline int32_t gdn_key_head(const struct attn_recurrent_desc *desc, int32_t head)
{
    return head / (desc->num_v_heads / desc->num_k_heads);
}

/* gdn_chunk.c: a request's tokens for num_heads value heads over one key head. */
void gdn_run_chunks(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                    int32_t num_heads, struct gdn_scratch *s);

/* gdn_walk.c: gdn_walks() says whether chunks run as groups of tokens over parts of WALK_COLUMNS
 * value dims; gdn_walk_keys() makes what the heads over a key head share; gdn_walk() a head's
 * outputs of the tokens from `first` on, and its state after them */
bool gdn_walks(const struct gdn *gdn);
void gdn_walk_keys(const struct gdn *gdn, int32_t count, struct gdn_scratch *s);
void gdn_walk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
              int32_t count, int32_t head, float *state, struct gdn_scratch *s);

/* gdn_inputs.c: weights of the convolution of one of the 2 Hk + Hv heads of q, k and v */
size_t gdn_taps_floats(const struct attn_recurrent_desc *desc);
void gdn_load_taps(const struct gdn *gdn, int32_t head, float *taps);
/* Rows of `count` tokens from `first` on, as the delta rule takes them. */
void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                 int32_t count, int32_t key_head, struct gdn_scratch *scratch);
void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                int32_t count, int32_t head, struct gdn_scratch *scratch);
void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                    int32_t count, int32_t head, struct gdn_scratch *scratch);
/* One token's gates by any rule: decays [depth], 1 where a column is padded, and, unless NULL, the
 * gates themselves; returns beta. */
float gdn_load_any_gates(const struct gdn *gdn, int64_t row, int32_t head, int32_t depth,
                         float *decays, float *logs);
/* Updates the windows of channels .. end - 1 to the end of the step, and stores those at
 * checkpoints. */
void gdn_roll_windows(const struct gdn *gdn, const struct gdn_request *request, int64_t channel,
                      int64_t end);

/* gdn_inputs.c, too: row `row` of a head's state after `tokens` tokens of the request, as a slot
 * holds it */
void gdn_store_state(const struct gdn *gdn, int32_t head, int32_t row, int64_t tokens,
                     const float *from, void *to);

/* gdn_norm.c: the norm and the gate of a token's outputs of heads with one mean, in place */
void gdn_norm_heads(const struct gdn *gdn, int64_t row, int32_t first_head, int32_t num_heads);

/* `count` rows of the output, from `row` on, from floats, rows of which are `stride` apart */
void gdn_store_rows(const struct gdn *gdn, int64_t row, int32_t count, int32_t head, const float *o,
                    int64_t stride);

#endif
