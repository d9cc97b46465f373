/* SPDX-License-Identifier: Apache-2.0 */
/* One shape on a backend: equal layers of a model, each with its own cache and tensors, that share
 * one plan, as an engine would have them. A run of one layer after the other finds nothing in the
 * caches. */
#ifndef BENCH_MEASURED_H
#define BENCH_MEASURED_H

#include "common/find.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/model_config.h"
#include "support/layer.h"
#include "support/layer_io.h"
#include "session.h"
#include "timing.h"

#define MEASURED_NAME_SIZE 32

/* requests.c: the requests of a shape, and how many keys their queries see. */
struct requests {
    int32_t count;
    int32_t *query_lens;
    int32_t *seq_lens; /* keys, the step's own included */
    int64_t num_tokens;
    int64_t num_keys;
    int32_t max_query_len;
    int32_t max_seq_len;
};

/* False where there are more rows than an int32 counts. */
bool requests_init(struct requests *requests, const struct bench_shape *shape, uint64_t *random);
void requests_finish(struct requests *requests);

struct visible {
    double pairs; /* queries and keys that they see, over all requests */
    double rows;  /* keys that any query sees */
};
struct visible requests_visible(const struct requests *requests, const struct bench_shape *shape);

/* The cache and the tensors of one layer's run. */
struct measured_io {
    attn_layer *layer;
    struct layer_io step;
    struct attn_kv_view k_view, v_view;
};

struct measured {
    struct session *session;
    struct bench_shape shape;
    struct requests requests;
    uint64_t random;
    struct memory memory;
    struct model_layer
        layer; /* shared by all; lists.max_entries 0: no lists, indexer.topk 0: none */
    bool has_cache;
    struct attn_cache_spec spec;            /* after bind */
    const struct attn_layer_params *params; /* all layers' */
    int32_t num_layers;
    char (*names)[MEASURED_NAME_SIZE];
    struct attn_choice choice; /* the measured phase's; text is copied to `backend` */
    char backend[BACKEND_SIZE];
    int32_t phase;
    attn_assignment *assignment;
    attn_model *model;
    attn_plan *plan;
    int64_t num_blocks; /* blocks of one layer's cache */
    int64_t table_stride;
    int32_t *table; /* host [R, stride] */
    struct attn_batch batch;
    struct attn_batch_table rows; /* the last batch's, of the compressed rows */
    struct attn_batch_recurrent batch_gdn;
    struct attn_batch_replay batch_replay;
    struct measured_io *io; /* one for each layer */
    struct work work;
};

/* States that a request keeps, one for each draft unless it has a ring. */
static inline int32_t measured_states(const struct measured *measured)
{
    return measured->layer.cache.role == ATTN_CACHE_REPLAY
               ? 1
               : 1 + measured->layer.gdn.num_speculative_tokens;
}

/* Tokens in the ring of a request. */
static inline int32_t measured_ring_tokens(const struct measured *measured, int32_t r)
{
    const int32_t size = shape_int(&measured->shape, PARAMETER_REPLAY);
    const int32_t cursor = shape_int(&measured->shape, PARAMETER_CURSOR);
    const int32_t most = size - 1 + measured->layer.gdn.num_speculative_tokens;
    return size == 0 ? 0 : cursor < 0 ? r % size : cursor < most ? cursor : most;
}

/* Tokens in a block of the table. */
static inline int32_t measured_block(const struct measured *measured)
{
    return measured->spec.block_size * measured->spec.tokens_per_row;
}

/* Appends what was refused to `reasons` (an array, may be NULL). On failure nothing is left to
 * finish. */
attn_status measured_init(struct measured *measured, struct session *session,
                          const struct bench_shape *shape, const char *backend,
                          struct json *reasons, struct attn_error *error);
void measured_finish(struct measured *measured);
/* What `work`, over the tensors of `measured`, writes to the first layer's out: an array of
 * *count, the caller's to free. NULL: it fails, or nothing is attended. */
double *measured_output(const struct measured *measured, const struct work *work, int64_t *count);

/* layer.c: the description of the shape's layer. */
void measured_describe(struct measured *measured);
/* bind.c: parameters, caches filled by the backend's own write. */
attn_status measured_bind(struct measured *measured, struct attn_error *error);
/* tensors.c: batch and tensors of all layers. */
attn_status measured_tensors(struct measured *measured, struct attn_error *error);
/* Compressed rows are the first rows of each request's own. */
void measured_rows_table(struct measured *measured, struct attn_batch *batch);
/* The tensor of one role, if the layer has it: drawn, or empty where it is written. */
void measured_rows(struct measured *measured, struct memory *memory, struct layer_io *io,
                   enum layer_role role, int64_t tokens);
/* bind.c: a plan for such batches with its workspace in `memory`, made for this one; *plan is
 * due to plan_destroy even after a failure. */
attn_status measured_plan(struct measured *measured, struct memory *memory,
                          const struct attn_batch *batch, attn_plan **plan,
                          struct attn_error *error);
/* count.c: bytes and operations of one call. */
void measured_count(struct measured *measured);

#endif
