/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that attn-run is: layers with caches and histories, requests, and the steps over them.
 */
#ifndef RUN_ENGINE_H
#define RUN_ENGINE_H

#include <attn/api.h>
#include <pthread.h>
#include <stdbool.h>

#include "common/command.h"
#include "common/find.h"
#include "common/memory.h"
#include "common/model_config.h"
#include "support/layer_io.h"
#include "support/owned.h"
#include "support/random.h"
#include "support/tensor.h"

#define MAX_REQUESTS 64
#define BLOCK_SIZE 16 /* slots, or as many tokens as a row of a cache stands for */
#define MAX_ROWS 4096 /* rows of a step */
#define POISON 0xff   /* bytes of outputs before they are written */
/* slots of GDN layers: more than requests, a prime, so that 5 r + 2 visits all */
#define NUM_STATE_SLOTS 71

struct settings {
    const char *model, *qkv, *requests;
    const char *capsule, *backend; /* see capsule.h */
    int32_t layers, steps, replay;
    double scale;
    uint64_t seed;
    bool verify, json;
};

/* A layer's rows, as its histories and a step have them. */
struct row_terms {
    int32_t dtype; /* enum attn_dtype_id of q, k and v */
    int32_t num_q_heads, num_kv_heads, head_size, head_size_v;
    int32_t query_size;              /* elements of a head's query; 0: there are no queries */
    int32_t num_out_heads, out_size; /* outputs are [T, num_out_heads, out_size] */
    double scale;
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
    int32_t first_row; /* its first row in a recording */
    bool arrived, running, swapped;
};

/* A layer's cache memory, and what was written for each request, unpaged: the oracle's input. */
struct run_layer {
    struct model_layer *source;
    const struct run_kind *kind;
    attn_layer *handle;
    struct attn_cache_spec spec;
    int32_t group;
    void *cache;           /* the device's */
    void *row_cache;       /* rows of several tokens; its blocks have the numbers of cache's */
    int64_t row_page;      /* bytes of such a block */
    void *swap;            /* page-locked memory for swapped blocks; NULL: nothing was swapped */
    float *sinks, *slopes; /* and of these, as of `weights` and `gates`, the device's copies: */
    void *device_params[2];
    uint8_t *k_history[MAX_REQUESTS], *v_history[MAX_REQUESTS];
    /* whose rows, its v_history, are this layer's rows of several tokens; NULL: these are drawn */
    const struct run_layer *compressor;
    /* whose cache and histories this layer reads, without one of its own; NULL: it has one */
    const struct run_layer *owner;
    /* q, k, v, out of a recording [T, heads, head_size]; NULL: inputs are drawn */
    const float *recorded[4];
    /* kv_b_proj, the convolution's or a norm's, of the activations' dtype; an indexer's norm's bias
     * is after its weight */
    uint8_t *weights;
    float *gates;   /* recurrent: a_log, skip [Hv], then dt_bias; a compressor's position_bias */
    int32_t *lists; /* indexers: of the step that ran last, for sparse layers after it */
    void *windows;  /* GDN: of the convolution, next to the states in `cache`; the device's */
    void *ring;     /* GDN: of replay, or NULL; the device's */
    double *oracle_states[MAX_REQUESTS]; /* recurrent: [Hv, Dv, Dk] after the tokens so far */
    /* recurrent: the sum of squares of so many outputs of a request that were verified */
    double out_squares[MAX_REQUESTS];
    int64_t num_outs[MAX_REQUESTS];
    struct row_terms terms;
    /* for the bound: how often values are rounded to the activations' dtype from input to output; 0
     * reads as 1 */
    int32_t roundings;
    struct tally tally;
    char backend[BACKEND_SIZE];
};

/* A block-table group: its allocator, table and plan. */
struct run_group {
    bool has_cache, cross;
    bool recurrent;         /* GDN: a state slot for each request in place of blocks */
    int32_t tokens_per_row; /* row_cache's; 0: no layer has one */
    int32_t slot[MAX_REQUESTS];
    int32_t replay; /* GDN: tokens from one write of the state to the next; 0: no ring */
    int32_t ring_tokens[MAX_REQUESTS]; /* after what has been planned */
    int32_t block_size;
    int64_t num_blocks;
    int32_t *free_blocks;
    int32_t num_free;
    int32_t *references; /* requests that hold a block */
    int32_t *table;      /* [MAX_REQUESTS, stride] */
    int32_t stride;
    int32_t held[MAX_REQUESTS]; /* blocks in the table's row */
    attn_plan *plan;
};

/* The step's batch: requests in the order decode, then prefill. */
struct batch {
    int32_t num_reqs;
    int32_t request[MAX_REQUESTS];
    int32_t query_start_loc[MAX_REQUESTS + 1];
    int32_t seq_lens[MAX_REQUESTS];
    int32_t encoder_lens[MAX_REQUESTS];
    int64_t slots[MAX_ROWS], positions[MAX_ROWS];
};

struct run_engine {
    const struct attn_api *api;
    const struct settings *settings;
    attn_runtime *runtime;
    attn_model *model;
    struct device device; /* that the layers run on */
    void *stream;
    struct memory kept, batches, rows; /* the run's, a group's plan's, a layer's run's */
    void *angles;                      /* [longest, angles_dims] of rotations; the device's */
    int32_t angles_dims;
    struct model_config config;
    struct run_layer *layers;
    int32_t num_layers;
    struct run_group *groups;
    int32_t num_groups;
    struct request requests[MAX_REQUESTS];
    int32_t num_requests;
    int32_t steps;
    int32_t longest;    /* keys of the longest request at its end */
    int32_t block_size; /* every layer's with a cache */
    int64_t tokens;
    uint64_t random;
    struct attn_error error;
};

#define CHUNK 24 /* prompt tokens that one request attends in a step */

/* setup.c */
attn_status engine_setup(struct run_engine *engine);
/* Selects and binds the layers that are described. */
attn_status engine_bind(struct run_engine *engine);
void engine_finish(struct run_engine *engine);
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
 * where it is not there */
attn_status engine_take(struct run_engine *engine, bool host, size_t bytes, const char *what,
                        void **memory);
/* Takes memory of the device that is NaN in every dtype of a cache. */
attn_status engine_take_unwritten(struct run_engine *engine, size_t bytes, const char *what,
                                  void **memory);
/* The error of an allocation in `memory`, or of a copy to it, if one has failed. */
attn_status engine_sent(struct run_engine *engine, const struct memory *memory, const char *what);
/* For everything that is on the device, so that memory may be given back. */
attn_status engine_wait(struct run_engine *engine);
/* admit.c: a request comes; a group's batch on the device, planned */
attn_status admit(struct run_engine *engine, int32_t r);
void fill_batch(const struct run_group *group, struct batch *batch, struct attn_batch *out);
/* What a batch brings for recurrent layers. */
struct state_batch {
    struct attn_batch_recurrent ext;
    struct attn_batch_replay replay;
    int32_t slots[MAX_REQUESTS], ring_tokens[MAX_REQUESTS];
};

/* `states` NULL: not recurrent */
attn_status plan_batch(struct run_engine *engine, struct run_group *group, struct attn_batch *batch,
                       struct state_batch *states);
/* A batch of a group with a cache over its own table, planned. `writes`: its new keys get blocks
 * and slots. */
attn_status plan_group(struct run_engine *engine, struct run_group *group, struct batch *batch,
                       bool writes);
/* Lists of a step [T, per_token, max_entries]; `entries` NULL: none, every key is seen. */
struct step_lists {
    const struct attn_index_lists *form;
    int32_t *entries; /* the caller's to free */
    int32_t per_token;
    size_t bytes;
};

/* Rows of a step on the host, one for each token: queries, histories' new rows, outputs. */
enum step_rows { STEP_Q, STEP_K, STEP_V, STEP_WEIGHTS, STEP_OUT, STEP_ROWS };

/* A step of one layer, and its verification, whose parts threads share. */
struct run_step {
    struct run_engine *engine;
    struct run_layer *layer;
    const struct batch *batch;
    int64_t tokens;
    bool cross;
    uint8_t *rows[STEP_ROWS]; /* NULL: the layer has none */
    struct step_lists lists;
    double *keys[MAX_REQUESTS]; /* the keys' history of each request of the batch */
    int32_t next_part, num_parts;
    pthread_mutex_t lock;
};

/* Keys of the batch's request i. */
static inline int32_t step_keys(const struct run_step *step, int32_t i)
{
    return step->cross ? step->batch->encoder_lens[i] : step->batch->seq_lens[i];
}

/* What a run has more of layers with rows of several tokens, or that make these, and of index keys.
 * Must not move. */
struct more_io {
    struct attn_io_caches caches;
    struct attn_io_output_rope rotation;
    struct attn_io_compressor pooling;
    struct attn_io_index_write index_write;
    struct shaped rows, bias, norm, cos_sin;
    const struct attn_tensor *further[1];
};

/* What layers of a kind do their own way. */
struct run_kind {
    /* Terms and parameters of a layer with its cache. */
    attn_status (*bind)(struct run_engine *engine, struct run_layer *layer);
    /* The query of token c of the batch's request i; NULL: there are none. */
    void (*make_query)(struct run_step *step, int32_t i, int32_t c);
    /* The part of the outputs with that index, a request of the batch or a head, against the
     * oracle. */
    void (*verify)(const struct run_step *step, int32_t part, struct tally *tally);
    /* Makes keys first .. end-1 of request r, in the history, of the values that were drawn. NULL:
     * keys are drawn, too. */
    void (*make_keys)(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
                      int32_t end);
    /* Links to the io of a run of `tokens` tokens what it has more; `rows` are the values of the
     * history that were sent. NULL: nothing. */
    void (*bring)(struct run_engine *engine, const struct run_layer *layer,
                  const struct batch *batch, int64_t tokens, void *rows, struct layer_io *io,
                  struct more_io *more);
    void (*keep)(const struct run_step *step); /* outputs, for layers after it; NULL: none are */
    bool is_run; /* a prompt's first tokens come in runs, too, not in writes alone */
    bool by_heads;
    bool wants_keys; /* step.keys is filled before verify */
};
extern const struct run_kind run_attention_kind, run_mla_kind, run_latent_kind, run_recurrent_kind,
    run_indexer_kind, run_compressor_kind;

/* lists.c: those of a layer in a step; the keys of a token's list up to `position`, in `keys` of
 * position + 1 places, and how many */
void lists_of_step(struct run_engine *engine, const struct run_layer *layer,
                   const struct batch *batch, struct step_lists *lists);
int32_t list_keys(const struct step_lists *lists, int32_t token, int32_t group, int32_t position,
                  int32_t *keys);
/* layer.c: a step of one layer; the keys of a batch of one request, written only */
attn_status layer_run(struct run_engine *engine, struct run_layer *layer,
                      const struct batch *batch);
attn_status layer_write(struct run_engine *engine, struct run_layer *layer,
                        const struct batch *batch);
/* attention.c: sinks and slopes, and the same terms for the oracle */
attn_status attention_bind(struct run_engine *engine, struct run_layer *layer);
void attention_query(struct run_step *step, int32_t i, int32_t c);
/* rows.c */
size_t element_bytes(const struct run_layer *layer);
/* Row `row` of request r in a recording of q, k, v or out (0 .. 3); NULL: none. */
const float *recorded_row(const struct run_engine *engine, const struct run_layer *layer,
                          int32_t which, int32_t r, int64_t row);
/* New keys of request r come into the history, first .. end-1: recorded or drawn. */
void add_keys(struct run_engine *engine, struct run_layer *layer, int32_t r, int32_t first,
              int32_t end, int32_t capacity);
/* `count` outputs from element `at` of `out` against what they should be, of root mean square
 * `least` at least, and against the recording's (NULL: none). */
void compare_row(const struct run_layer *layer, const double *expected, double least,
                 const void *out, int64_t at, int32_t count, const float *recorded,
                 struct tally *tally);
/* compressor.c: the one whose rows a layer takes, or NULL; the table of angles as a tensor */
const struct run_layer *compressor_of(const struct run_engine *engine,
                                      const struct run_layer *layer);
const struct attn_tensor *angles(struct run_engine *engine, int32_t rotary, struct shaped *to);
/* memory.c: a dense tensor of the device's memory */
struct attn_tensor *device_tensor(const struct run_engine *engine, struct shaped *to, void *data,
                                  int32_t dtype, int32_t ndim, const int64_t *shape);
/* Parameter `index` of the layer, copied to device_params[index]; and all of them, bound */
void params_send(struct run_engine *engine, struct run_layer *layer, int32_t index,
                 const void *source, size_t bytes);
attn_status params_bind(struct run_engine *engine, const struct run_layer *layer,
                        const struct attn_layer_params *params);
/* latent.c: the second table of a batch whose arrays are the host's; it has a row for each request
 * of the batch, in `blocks`. */
struct latent_table {
    struct attn_batch_table table;
    int32_t lens[MAX_REQUESTS];
    int64_t slots[MAX_ROWS];
};
void latent_table(const struct run_group *group, struct attn_batch *batch, int32_t *blocks,
                  struct latent_table *rows);
/* gdn.c: states of a batch; those of requests that are swapped, out of their slot and into another
 */
void gdn_states(struct run_group *group, const struct batch *batch, struct state_batch *states);
attn_status gdn_swap(struct run_engine *engine, int32_t g, int32_t r, bool out);
/* replay.c: --qkv from beginning to end, over engine_run */
attn_status engine_replay(struct run_engine *engine);

/* capsule.c: --capsule, one recorded step of one layer, run again on any backend and held to
 * cpu_ref. `backend` is a selection text as in ATTN_BACKEND; NULL: what would be chosen here.
 * Random contents are drawn from `seed`. Returns the exit status: 1 where a result is off. */
int capsule_replay(const char *file, const char *backend, uint64_t seed, bool as_json);

#endif
