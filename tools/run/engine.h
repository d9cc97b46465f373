/* SPDX-License-Identifier: Apache-2.0 */
/* The engine that attn-run is: layers with caches and histories, requests, and the steps over them. */
#ifndef RUN_ENGINE_H
#define RUN_ENGINE_H

#include <attn/api.h>
#include <stdbool.h>

#include "common/model_config.h"
#include "oracle.h"

#define MAX_REQUESTS 64
#define BLOCK_SIZE 16 /* slots */

struct settings {
    const char *model, *qkv, *requests;
    int32_t layers, steps;
    double scale;
    uint64_t seed;
    bool verify, json;
};

/* One request's life. */
struct request {
    int32_t arrival;    /* step */
    int32_t prompt;     /* tokens; all but the last few are only written, not attended */
    int32_t output;     /* tokens, then it leaves */
    int32_t preempt_at; /* step at whose end it is swapped out for one step; -1: never */
    int32_t encoder;    /* keys of cross layers */
    int32_t shares;     /* an earlier request with which the first `shared` tokens are common; -1: none */
    int32_t shared;
    int32_t length;     /* keys so far */
    int32_t produced;
    int32_t first_row; /* of its rows in a recording */
    bool arrived, running, swapped, left;
    bool encoder_written;
};

/* A layer's cache memory, and what was written for each request, unpaged: the oracle's input. */
struct run_layer {
    struct model_layer *source;
    attn_layer *handle;
    struct attn_kv_spec spec;
    int32_t group;
    void *cache;
    void *swap; /* host memory for swapped blocks */
    float *sinks, *slopes;
    uint8_t *k_history[MAX_REQUESTS], *v_history[MAX_REQUESTS];
    /* q, k, v, out of a recording [T, heads, head_size]; NULL: inputs are drawn */
    const float *recorded[4];
    struct oracle_terms terms;
    double max_error; /* over its bound */
    int64_t compared;
    char backend[160];
};

/* A block-table group: its allocator, table and plan. */
struct run_group {
    bool has_cache, cross;
    int32_t block_size;
    int64_t num_blocks;
    int32_t *free_blocks;
    int32_t num_free;
    int32_t *references; /* requests that hold a block */
    int32_t *table; /* [MAX_REQUESTS, stride] */
    int32_t stride;
    int32_t held[MAX_REQUESTS];  /* blocks in the table's row */
    int32_t swapped[MAX_REQUESTS]; /* first block in the swap space; -1 */
    int32_t num_swapped;         /* of the swap space, in use */
    attn_plan *plan;
    void *workspace;
};

struct engine {
    const struct attn_api *api;
    const struct settings *settings;
    attn_runtime *runtime;
    attn_model *model;
    struct model_config config;
    struct run_layer *layers;
    int32_t num_layers;
    struct run_group *groups;
    int32_t num_groups;
    struct request requests[MAX_REQUESTS];
    int32_t num_requests;
    int32_t steps;
    int32_t longest; /* keys of the longest request at its end */
    int64_t tokens;
    uint64_t random;
    struct attn_error error;
    attn_status status;
};

/* setup.c */
attn_status engine_setup(struct engine *engine);
/* Selects and binds the layers that are described. */
attn_status engine_bind(struct engine *engine);
void engine_finish(struct engine *engine);
/* requests.c */
attn_status requests_read(struct engine *engine);
/* blocks.c: space for `length` keys of request r in a group; swapping */
attn_status blocks_reserve(struct engine *engine, struct run_group *group, int32_t r, int32_t length);
void blocks_free(struct run_group *group, int32_t r);
/* Request r, which has none yet, begins with the first `count` blocks of another. */
void blocks_share(struct run_group *group, int32_t r, int32_t other, int32_t count);
attn_status blocks_swap(struct engine *engine, int32_t r, bool out);
/* step.c */
attn_status engine_run(struct engine *engine);
/* replay.c: --qkv from beginning to end, over engine_run */
attn_status engine_replay(struct engine *engine);
attn_status engine_fail(struct engine *engine, attn_status status, const char *field, const char *what);

double random_normal(uint64_t *state);
int32_t random_below(uint64_t *state, int32_t count);

#endif
