/* SPDX-License-Identifier: Apache-2.0 */
/* What a model is once it is bound: instances of backends, layers with their caches and parameters,
 * groups. */
#ifndef CORE_BIND_BOUND_H
#define CORE_BIND_BOUND_H

#include <attn/api.h>
#include <pthread.h>

#include "bind/kept.h"
#include "select/assignment.h"

/* A backend, created on its device. */
struct instance {
    int32_t backend; /* index in the runtime */
    const struct attn_backend_caps *caps;
    const struct attn_plugin *plugin;
    attn_instance *handle;
    struct attn_kernels kernels; /* zero behind what the plugin knows */
};

/* A composed step is made of parts; each is an attend of its own with a rewritten layer. */
enum part {
    PART_MAIN,   /* the layer itself, or what is left of it beside the others */
    PART_PREFIX, /* cascade: the common prefix, not causal, without the sinks' logits */
    PART_SINK,   /* static sink: contiguous fixed keys */
    /* the step's own keys, contiguous: of a spread cache, or MLA's, projected per head */
    PART_NEW,
    /* the context before them, all visible: this rank's shard, or MLA's, gathered and projected */
    PART_CONTEXT,
    PART_COUNT
};

/* What serves a layer in one phase. */
struct served {
    struct instance *instance;
    uint32_t composed; /* ATTN_COMPOSE_* */
    int32_t graph_level;
    int32_t plan_group;
    attn_state *states[PART_COUNT];
    bool prepared[PART_COUNT];
};

/* One projection of MLA, [Hq, rows, columns], over the engine's memory. */
struct head_weights {
    struct attn_tensor tensor; /* its shape and strides are these */
    int64_t shape[3], strides[3];
    const float *scale; /* or NULL */
    int64_t num_scales;
    struct attn_tensor block_scale; /* mxfp4: data is not NULL */
    int64_t block_shape[3], block_strides[3];
};

struct attn_layer {
    attn_model *model;
    int32_t index;
    int32_t group;           /* block-table group */
    int32_t slot;            /* place among the layers of its group */
    const attn_layer *table; /* the group's first layer: one pointer that names model and group */
    const struct layer *selected;       /* of the assignment, which the model keeps */
    const struct attn_layer_desc *desc; /* its description */
    attn_layer *owner; /* whose cache this one reads: itself, or its sharing target */
    struct served served[ATTN_PHASE_COUNT];
    struct attn_layer_desc parts[PART_COUNT];         /* as kernels see them */
    struct attn_layer_params part_params[PART_COUNT]; /* likewise */
    struct attn_kv_spec spec;
    struct attn_kv_view k_cache, v_cache; /* data NULL: not bound */
    bool has_v_cache;
    struct kept_params kept[2]; /* one is in use, the other takes what is bound next */
    struct kept_params *params; /* the one in use; NULL: none bound */
    /* that hold calls prepared with its cache or parameters; guarded by attn_model.lock */
    int32_t num_plans;
    struct head_weights mla_uk, mla_uv; /* [Hq, nope, kv_lora_rank], [Hq, kv_lora_rank, v] */
};

struct attn_model {
    attn_runtime *runtime;
    attn_assignment *assignment; /* its layers' descriptions */
    struct attn_device device;
    struct attn_model_options options;
    struct arena arena;
    struct instance *instances;
    int32_t num_instances;
    attn_layer *layers;
    int32_t num_layers;
    int32_t num_groups;
    int32_t num_plan_groups;
    pthread_mutex_t lock; /* of states[] and num_plans */
};

/* Rewrites the layer for each part, after binding anything that changes them. */
void layer_rewrite_parts(attn_layer *layer);

/* Prepares a part for a phase, once; not a step. */
attn_status layer_prepare(attn_layer *layer, int32_t phase, int32_t part, struct attn_error *error);
void layer_release_states(attn_layer *layer);

/* mla.c, gdn.c: what the parameters of such layers must bring; the layer as its kernels see it. */
attn_status mla_bind_weights(attn_layer *layer, const struct attn_layer_params *params,
                             struct attn_error *error);
void mla_rewrite_parts(attn_layer *layer);
int32_t mla_padded_heads(const attn_layer *layer);
/* What scales are calculated from: of q, k and v the query's first part and the latent rows;
 * returns its second part. */
struct head_rows {
    struct attn_tensor tensor;
    int64_t shape[3], strides[3];
};
const struct attn_tensor *mla_scale_inputs(const struct attn_step_io *io, struct head_rows *latent,
                                           const struct attn_tensor *tensors[3]);
attn_status gdn_check_weights(const attn_layer *layer, const struct attn_layer_params *params,
                              struct attn_error *error);

/* parallel.c: is the cache spread over ranks? Then a block of the table holds so many tokens over
 * all of them. */
bool layer_is_spread(const attn_layer *layer);
int32_t layer_cache_ranks(const attn_layer *layer); /* n */
int32_t layer_cache_rank(const attn_layer *layer);  /* of a spread one */
/* Have the ranks of `prefill` a slice each of a request's queries? */
bool layer_splits_queries(const attn_layer *layer);
bool layer_same_ranks(const attn_layer *a, const attn_layer *b);
int64_t layer_tokens_per_block(const attn_layer *layer);
void parallel_rewrite_parts(attn_layer *layer);

/* encoder.c: a multimodal encoder in fp8, and the memory of its scales among its parameters (NULL:
 * not there). */
bool layer_is_quantized_encoder(const attn_layer *layer);
const struct attn_mm_encoder_state *encoder_state(const struct attn_layer_params *params);
attn_status encoder_check_state(const attn_layer *layer, const struct attn_layer_params *params,
                                struct attn_error *error);
void encoder_rewrite_parts(attn_layer *layer);

/* A cache ends at most so far behind its beginning, which is more than a machine addresses, so that
 * sums of several stay far from overflow. */
#define MAX_CACHE_BITS 56
#define MAX_CACHE ((int64_t)1 << MAX_CACHE_BITS)

/* kv_spec.c */
void layer_make_spec(attn_layer *layer, int32_t layout);
/* groups.c */
void model_make_groups(attn_model *model);
/* instance.c: a backend created on its device; the model's own, made once */
attn_status instance_create(attn_runtime *runtime, int32_t backend, struct instance *instance,
                            struct attn_error *error);
attn_status model_make_instance(attn_model *model, int32_t backend, struct instance **instance,
                                struct attn_error *error);
void instance_finish(struct instance *instance);

/* Bytes of one element, or of half of one in 4-bit caches times two; see kv_row_bytes for whole
 * rows. */
int64_t kv_row_bytes(int32_t kv_dtype, int32_t head_size, bool value);
/* Bytes of the scales of one slot and head: float32, or a byte per 16 dims of nvfp4. */
int64_t kv_scale_bytes(int32_t kv_dtype, int32_t head_size, bool value);

#endif
