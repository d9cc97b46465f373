/* SPDX-License-Identifier: Apache-2.0 */
/* Layers of one model over requests that grow step by step. Keys and values are kept next to the
 * caches, unpaged and in float64, so that every output of every step is held to a formula. */
#ifndef STEP_HISTORY_H
#define STEP_HISTORY_H

#include <attn/api.h>
#include <stdbool.h>

enum {
    H_REQS = 4,
    H_KEYS = 96, /* the most of a request */
    H_LAYERS = 6,
    H_HQ = 4,
    H_HK = 2,
    H_D = 32,
    H_BLOCK = 8,
    H_BLOCKS = H_KEYS / H_BLOCK,
    H_POOL = 53, /* blocks of a group: more than H_REQS * H_BLOCKS, and prime */
    H_PADDING = 3,
    H_TOKENS = 128
};

typedef double h_keys[H_REQS][H_KEYS][H_HK][H_D];

struct history_layer {
    struct attn_layer_desc desc; /* bf16 activations */
    int32_t owner;               /* index of the layer whose cache this one reads */
    int32_t group;
    struct attn_cache_spec spec;
    uint8_t *cache;
    size_t cache_bytes;
    float scale, v_channel_scale[H_HK * H_D];
    h_keys k, v; /* as a reader of the cache is to find them */
};

struct history {
    const struct attn_api *api;
    attn_runtime *runtime;
    attn_model *model;
    int32_t num_layers, num_groups;
    struct history_layer layers[H_LAYERS];
    attn_plan *plans[H_LAYERS];
    void *workspaces[H_LAYERS];
    int32_t lens[H_REQS];
    uint64_t random;
    struct attn_error error;
};

enum history_way {
    HISTORY_ONE_RUN,
    HISTORY_APART /* a run that only writes, then one that only attends */
};

/* Selects `backend` for all layers, binds caches of poison. The caller frees what it has made by
 * calloc; `layers` need kind, kv_dtype and what is special about them. */
void history_init(struct history *h, const char *backend, const struct attn_layer_desc *layers,
                  int32_t num_layers);
void history_finish(struct history *h);
/* One step of all layers, query_lens [H_REQS] with decodes first, each output held to the formula.
 */
void history_step(struct history *h, const int32_t *query_lens, enum history_way way);

/* unpaged.c. A row as it was given becomes the row that the cache's dtype keeps of it. */
void unpaged_store(const struct history_layer *owner, bool value, int32_t head, double *row);
/* One query row q [H_HQ, H_D] of request r at position p, by the formulas of the
 * features document in float64. */
void unpaged_attend(const struct history_layer *layer, const struct history_layer *owner, int32_t r,
                    int32_t p, const double *q, double *out);

#endif
