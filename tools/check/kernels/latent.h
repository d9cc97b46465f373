/* SPDX-License-Identifier: Apache-2.0 */
/* Steps over a paged cache of one row for a token or for several, as MLA's and indexers' are: the
 * step's rows are written, then attended. */
#ifndef CHECK_LATENT_H
#define CHECK_LATENT_H

#include <attn/indexer.h>

#include "cases/kernel_test.h"
#include "harness/planned.h"

enum { LATENT_MAX_REQS = 5, LATENT_BLOCK = 64 };

/* The first operands of such a case; what is its own comes after them. */
enum {
    LATENT_Q,
    LATENT_ROWS,
    LATENT_CONTEXT, /* rows of earlier steps */
    LATENT_CACHE,
    LATENT_OUT,
    LATENT_SEQ_LENS,
    LATENT_STARTS,
    LATENT_TABLE,
    LATENT_SLOTS,
    LATENT_CONTEXT_SLOTS,
    LATENT_OPERANDS
};

/* Up to `padding` the case's to say; the rest is latent_init's. */
struct latent_batch {
    int32_t num_reqs, columns;                                 /* the block table's */
    int32_t before[LATENT_MAX_REQS], queries[LATENT_MAX_REQS]; /* tokens */
    int32_t tokens_per_row, spare_blocks;                      /* the first ones, never used */
    int32_t spare_len;                                         /* max_seq_len is so much above */
    int32_t first_row, padding;                                /* rows around the batch's */
    int32_t starts[LATENT_MAX_REQS + 1], lens[LATENT_MAX_REQS];
    int32_t num_actual_rows, num_rows, num_slots, num_context, longest;
};
void latent_init(struct latent_batch *batch);
static inline int32_t latent_rows_in_block(const struct latent_batch *batch)
{
    return LATENT_BLOCK / batch->tokens_per_row;
}
/* Where a request's row of the cache stands, by the table. */
int64_t latent_slot(const struct latent_batch *batch, const int32_t *table, int32_t r, int64_t row);

/* The operands above but for out; rows of `width` elements take `row_bytes` in the cache, and are
 * filled where `deviation` is not 0. */
void latent_operands(const struct latent_batch *batch, int32_t dtype, int64_t heads, int64_t width,
                     size_t row_bytes, double deviation, struct operand *operands);
/* A shuffled table, and the slots of all tokens. */
void latent_fill(const struct latent_batch *batch, struct kernel_test *test, uint64_t *random);

/* What the kernels of a step take; the layer and its parameters are the case's to say. */
struct latent_step {
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view view;
    struct attn_attend_args attend;
    struct attn_write_kv_args write;
};
void latent_bind(const struct latent_batch *batch, struct kernel_call *call,
                 struct latent_step *step);
attn_status latent_call(const struct latent_batch *batch, struct kernel_call *call,
                        struct latent_step *step, planned_kernel *kernel, struct attn_error *error);
/* The reference writes the earlier rows into the image, then both sides run, if the tested one
 * supports the layer. `call` and `step` are of the reference over the image itself. */
enum trial_result latent_run(const struct latent_batch *batch, struct kernel_test *test,
                             struct kernel_call *call, struct latent_step *step,
                             kernel_call_run *run, const void *context);

/* A layer whose keys are written into a cache of index rows, and the view of such a cache, with
 * scales where the format has some. */
struct attn_layer_desc index_layer(int32_t dtype, int32_t kv_dtype, int32_t heads,
                                   int32_t head_size, struct attn_indexer_desc *desc);
struct attn_kv_view index_view(const struct attn_layer_desc *layer, int64_t num_blocks,
                               int32_t rows_in_block, void *rows, void *scales);
/* Row `at` of such a cache as numbers, `scale` being that of its tensor, if it has one; `scales`
 * gets the scale of each. Returns how many numbers share one. */
int32_t index_load(const struct attn_layer_desc *layer, const void *rows, const void *row_scales,
                   int64_t at, double scale, double *values, double *scales);

#endif
