/* SPDX-License-Identifier: Apache-2.0 */
/* ggml's attention operator through libattn: what its tensors and mask mean (requests.c), and the
 * layers that serve them (layers.c). backend.c shows it to ggml as a device. */
#ifndef INTEGRATIONS_GGML_ATTENTION_H
#define INTEGRATIONS_GGML_ATTENTION_H

#include <attn/api.h>
#include <ggml.h>
#include <stdbool.h>

/* The rows of one operator as requests: runs of rows of which each sees one cell more than the row
 * before it
 * (`causal`), or all the same cells. Cells are numbered over the whole cache. */
struct requests {
    int32_t *query_start_loc; /* [count + 1] */
    int32_t *seq_lens;        /* [count] */
    int32_t *cells; /* [count, stride]: a request's cells, or blocks of them, in an order */
    int64_t stride;
    int32_t count, num_rows, max_seq_len;
    int32_t block_size; /* 1, or more where every request's cells lie in order */
    bool causal;
    size_t room[3]; /* bytes of the arrays */
};

/* Reads the mask (F16, 0 or minus infinity; NULL: every row sees every key) of `op`, whose stream s
 * has its first key in cell first_cell + s cells_per_stream of num_cells. False, with the cause in
 * `why`, where the mask is no such set of runs or memory is short. */
bool requests_read(struct requests *requests, const struct ggml_tensor *op, int64_t num_cells,
                   int64_t first_cell, int64_t cells_per_stream, const char **why);
void requests_finish(struct requests *requests);

/* What libattn has for one ggml backend. */
struct attention;

struct attention *attention_create(int32_t num_threads);
void attention_destroy(struct attention *attention);
/* Can libattn serve this operator? Where it cannot, the reasons are printed once per kind of layer.
 */
bool attention_serves(struct attention *attention, const struct ggml_tensor *op);
/* Computes it; false, with the cause on stderr. */
bool attention_run(struct attention *attention, const struct ggml_tensor *op);

#endif
