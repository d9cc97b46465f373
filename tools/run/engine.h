/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that attn-run is: layers with caches and histories, requests, and the steps over them.
 */
#ifndef RUN_ENGINE_H
#define RUN_ENGINE_H

#include <attn/api.h>
#include <stdbool.h>

#include "common/device.h"
#include "common/model_config.h"
#include "support/random.h"

#define MAX_REQUESTS 64
#define BLOCK_SIZE 16 /* slots, or as many tokens as a row of a cache stands for */
#define BACKENDS 160  /* bytes of their names in both phases */
#define MAX_ROWS 4096 /* of a step */
/* of GDN layers: more than requests, a prime, so that 5 r + 2 visits all */
#define NUM_STATE_SLOTS 71

struct settings {
    const char *model, *qkv, *requests;
    const char *capsule, *backend; /* see capsule.h */
    int32_t layers, steps;
    double scale;
    uint64_t seed;
    bool verify, json;
};

/* A layer's rows and the terms of its scores. */
struct row_terms {
    int32_t dtype; /* enum attn_dtype_id of q, k and v */
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    double scale;
    int32_t causal;
    int32_t has_window, window_left, window_right; /* -1: open */
    int32_t chunk_size, chunk_lookback;
    double soft_cap;
    const float *alibi_slopes; /* [num_q_heads] or NULL */
    const float *sinks;        /* [num_q_heads] or NULL */
};

/* Number of rows compared with the oracle, and the largest error. */
struct tally {
    double max_error; /* over its bound */
    int64_t compared; /* elements */
};

/* One request's life. */
struct request {
    int32_t arrival;    /* step */
    int32_t prompt;     /* tokens; all but the last few are only written, not attended */
    int32_t output;     /* tokens, then it leaves */
    int32_t preempt_at; /* step at whose end it is swapped out for one step; -1: never */
    int32_t encoder;    /* keys of cross layers */
    /* an earlier request with which the first `shared` tokens are common; -1: none */
    int32_t shares;
    int32_t shared;
    int32_t length; /* keys so far */
    int32_t drawn;  /* tokens whose inputs came with its arrival */
    int32_t produced;
    int32_t first_row; /* of its rows in a recording */
    bool arrived, running, swapped, left;
};

/* A layer's cache memory, and what was written for each request, unpaged: the oracle's input. */
struct run_layer {
    struct model_layer *source;
    attn_layer *handle;
    struct attn_cache_spec spec;
    int32_t group;
    void *cache;           /* the device's */
    void *row_cache;       /* of rows of several tokens, next to it; its blocks have its numbers */
    int64_t row_page;      /* bytes of such a block */
    void *swap;            /* page-locked memory for swapped blocks; NULL: nothing was swapped */
    float *sinks, *slopes; /* and of these, as of `weights` and `gates`, the device's copies: */
    void *device_params[2];
    uint8_t *k_history[MAX_REQUESTS], *v_history[MAX_REQUESTS];
    /* q, k, v, out of a recording [T, heads, head_size]; NULL: inputs are drawn */
    const float *recorded[4];
    uint8_t *weights; /* MLA: kv_b_proj; recurrent: the convolution's, of the activations' dtype */
    float *gates;     /* recurrent: a_log, skip [Hv], then dt_bias */
    int32_t *lists;   /* indexers: of the step that ran last, for sparse layers after it */
    void *windows;    /* GDN: of the convolution, next to the states in `cache`; the device's */
    double *oracle_states[MAX_REQUESTS]; /* recurrent: [Hv, Dv, Dk] after the tokens so far */
    struct row_terms terms;
    /* of the bound: how often values are rounded to the activations' dtype from input to output; 0
     * reads as 1 */
    int32_t roundings;
    struct tally tally;
    char backend[BACKENDS];
};

/* A block-table group: its allocator, table and plan. */
struct run_group {
    bool has_cache, cross;
    bool recurrent;         /* GDN: a state slot for each request in place of blocks */
    int32_t tokens_per_row; /* of row_cache; 0: no layer has one */
    int32_t slot[MAX_REQUESTS];
    int32_t block_size;
    int64_t num_blocks;
    int32_t *free_blocks;
    int32_t num_free;
    int32_t *references; /* requests that hold a block */
    int32_t *table;      /* [MAX_REQUESTS, stride] */
    int32_t stride;
    int32_t held[MAX_REQUESTS];    /* blocks in the table's row */
    int32_t swapped[MAX_REQUESTS]; /* first block in the swap space; -1 */
    attn_plan *plan;
    void *workspace; /* the device's */
};

/* Memory of the device that is taken in turn and given back at once. */
#define POOL_BLOCKS 24
struct pool {
    void *blocks[POOL_BLOCKS]; /* the last one is in use, of `size` bytes */
    int32_t count;
    size_t size, used;
};

/* The step's batch: requests in the order decode, then prefill. */
struct batch {
    int32_t num_reqs;
    int32_t request[MAX_REQUESTS];
    int32_t query_start_loc[MAX_REQUESTS + 1];
    int32_t seq_lens[MAX_REQUESTS];
    int32_t encoder_lens[MAX_REQUESTS];
    int32_t rows[MAX_REQUESTS];
    int64_t slots[MAX_ROWS];
};

struct run_engine {
    const struct attn_api *api;
    const struct settings *settings;
    attn_runtime *runtime;
    attn_model *model;
    struct device device; /* that the layers run on */
    void *stream;
    struct pool batches, rows; /* of a group's plan, of a layer's run */
    struct model_config config;
    struct run_layer *layers;
    int32_t num_layers;
    struct run_group *groups;
    int32_t num_groups;
    struct request requests[MAX_REQUESTS];
    int32_t num_requests;
    int32_t steps;
    int32_t longest;    /* keys of the longest request at its end */
    int32_t block_size; /* of every layer with a cache */
    int64_t tokens;
    uint64_t random;
    struct attn_error error;
    attn_status status;
};

#define CHUNK 24 /* prompt tokens that one request attends in a step */

/* setup.c */
attn_status engine_setup(struct run_engine *engine);
/* Selects and binds the layers that are described. */
attn_status engine_bind(struct run_engine *engine);
void engine_finish(struct run_engine *engine);
/* "A", or "A/B" where prefill and decode have two. */
void name_backends(const struct attn_api *api, const attn_assignment *assignment, int32_t layer,
                   char text[BACKENDS]);
/* requests.c */
attn_status requests_read(struct run_engine *engine);
/* blocks.c: space for `length` keys of request r in a group; swapping */
attn_status blocks_reserve(struct run_engine *engine, struct run_group *group, int32_t r,
                           int32_t length);
void blocks_free(struct run_group *group, int32_t r);
/* Request r, which has none yet, begins with the first `count` blocks of another. */
void blocks_share(struct run_group *group, int32_t r, int32_t other, int32_t count);
attn_status blocks_swap(struct run_engine *engine, int32_t r, bool out);
/* step.c */
attn_status engine_run(struct run_engine *engine);
/* memory.c: memory of the device (`host`: page-locked) that stays, `what` being the words for it
 * where it is not there; the pools' */
attn_status engine_take(struct run_engine *engine, bool host, size_t bytes, const char *what,
                        void **memory);
/* A copy on the device; NULL with the engine's error. */
void *pool_send(struct run_engine *engine, struct pool *pool, const void *source, size_t bytes);
/* For everything that is on the device, so that pools may be reset. */
attn_status engine_wait(struct run_engine *engine);
void pool_reset(struct run_engine *engine, struct pool *pool);
void pool_finish(struct run_engine *engine, struct pool *pool);
/* admit.c: a request comes; a group's batch on the device, planned; slots of keys first .. end-1 */
attn_status admit(struct run_engine *engine, int32_t r);
void fill_batch(const struct run_group *group, struct batch *batch, struct attn_batch *out);
/* `states` NULL: not recurrent */
attn_status plan_batch(struct run_engine *engine, struct run_group *group, struct attn_batch *batch,
                       struct attn_batch_recurrent *states);
void slots_of(const struct run_group *group, int32_t r, int32_t first, int32_t end, int64_t *slots);
/* Lists of a step [T, per_token, max_entries]; `entries` NULL: none, every key is seen. */
struct step_lists {
    const struct attn_index_lists *form;
    int32_t *entries; /* the caller's to free */
    int32_t per_token;
    size_t bytes;
};

/* lists.c: those of a layer in a step; the keys of a token's list up to `position`, in `keys` of
 * position + 1 places, and how many; the extension of a run */
attn_status lists_of_step(struct run_engine *engine, const struct run_layer *layer,
                          const struct batch *batch, struct step_lists *lists);
int32_t list_keys(const struct step_lists *lists, int32_t token, int32_t group, int32_t position,
                  int32_t *keys);
attn_status lists_send(struct run_engine *engine, const struct step_lists *lists,
                       struct attn_io_index_lists *io);
/* rows.c */
size_t element_bytes(const struct run_layer *layer);
/* A tensor in the device's memory. */
struct attn_tensor tensor_of(const struct run_engine *engine, const struct run_layer *layer,
                             void *data, int32_t ndim, int64_t *shape, int64_t *strides);
/* New keys of request r come into the history, first .. end-1: recorded or drawn. */
attn_status add_keys(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                     int32_t end, int32_t capacity);
/* A compact tensor [rows, heads, dims]: memory of the host's own, NULL without memory, and once it
 * was sent the device's from the pool of rows. */
struct row_tensor {
    struct attn_tensor tensor;
    int64_t shape[3];
    uint8_t *host;
    size_t bytes;
};

void rows_init(struct row_tensor *rows, const struct run_layer *layer, int64_t count, int32_t heads,
               int32_t dims, bool poison);
attn_status rows_send(struct run_engine *engine, const struct run_layer *layer,
                      struct row_tensor *rows);
/* `count` outputs from element `at` of `out` against what they should be, and against the
 * recording's (NULL: none). Not for two threads at once on one tally. */
void compare_row(const struct run_layer *layer, const double *expected, const void *out, int64_t at,
                 int32_t count, const float *recorded, struct tally *tally);
/* Row `row` of request r in a recording of q, k, v or out (0 .. 3); NULL: none. */
const float *recorded_row(const struct run_engine *engine, const struct run_layer *layer,
                          int32_t which, int32_t r, int64_t row);
/* All heads of the query at `position`, recorded or drawn. */
void make_query(struct run_engine *engine, const struct run_layer *layer, int32_t r,
                int64_t position, int64_t length, uint8_t *row);
/* Output rows of a request's last `count` of `length` keys, from token `first` of the step on,
 * against the oracle, and against the recording's rows from there on (NULL: none). False: no
 * memory. */
bool verify_rows(struct run_layer *layer, const struct step_lists *lists, const void *q, int32_t r,
                 int32_t length, int32_t first, int32_t count, const uint8_t *out,
                 const float *recorded);
/* memory.c: parameter `index` of the layer, copied to device_params[index] */
attn_status params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                        const void *source, size_t bytes);
/* mla.c: weights; keys first .. end-1 of a request, written only; a step of one layer */
/* A run's attn_io_mla over q [tokens, heads, nope + rope], or NULL, and rows [tokens, rank + rope],
 * of the dtype and the device of `like`. Must not move. */
struct mla_tensors {
    struct attn_tensor parts[4];
    int64_t shapes[4][3], strides[2][3];
    struct attn_io_mla io;
};
void mla_tensors_init(struct mla_tensors *tensors, const struct attn_mla_desc *layer,
                      const struct attn_tensor *like, int64_t tokens, int64_t heads, void *q,
                      void *rows);
attn_status mla_bind(struct run_engine *engine, struct run_layer *layer);
attn_status mla_write(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                      int32_t end);
attn_status mla_run(struct run_engine *engine, struct run_layer *layer, const struct batch *batch);
/* latent.c: layers whose rows are key and value, with a cache of rows of several tokens each or
 * without. */
static inline bool is_latent(const struct run_layer *layer)
{
    return layer->source->desc.kind == ATTN_LAYER_MLA && !layer->source->mla.absorb_in_core;
}
/* Must not move. */
struct latent_io {
    struct attn_io_mla mla;
    struct attn_io_caches caches;
    struct attn_tensor own;
    int64_t shape[2];
    const struct attn_tensor *rows[1];
};
/* A run's extensions in place of its q, k and v, which are queries, own rows, and for each token
 * the row that it may finish. `lists` NULL: none. */
attn_status latent_bring(struct run_engine *engine, const struct run_layer *layer,
                         const struct step_lists *lists, struct attn_step_io *io,
                         struct latent_io *latent);
/* The second table of a batch whose arrays are the host's. */
struct latent_table {
    struct attn_batch_table table;
    int32_t lens[MAX_REQUESTS];
    int64_t slots[MAX_ROWS];
};
void latent_table(const struct run_group *group, struct attn_batch *batch,
                  struct latent_table *rows);
/* As verify_rows. */
bool latent_verify(struct run_layer *layer, const struct step_lists *lists, const void *q,
                   int32_t r, int32_t length, int32_t first, int32_t count, const uint8_t *out);
/* indexer.c: a step of one layer, its lists verified. */
attn_status indexer_run(struct run_engine *engine, struct run_layer *layer,
                        const struct batch *batch);
/* gdn.c: weights and states; a step of one layer, `states` being on the planned batch; states of
 * requests that are swapped, out of their slot and into another */
attn_status gdn_bind(struct run_engine *engine, struct run_layer *layer);
attn_status gdn_run(struct run_engine *engine, struct run_layer *layer, const struct batch *batch);
void gdn_states(const struct run_group *group, const struct batch *batch, int32_t *slots,
                struct attn_batch_recurrent *states);
attn_status gdn_swap(struct run_engine *engine, int32_t g, int32_t r, bool out);
/* replay.c: --qkv from beginning to end, over engine_run */
attn_status engine_replay(struct run_engine *engine);
attn_status engine_fail(struct run_engine *engine, attn_status status, const char *field,
                        const char *what);

#endif
