/* SPDX-License-Identifier: Apache-2.0 */
/* What a model is once it is bound: instances of backends, layers with their caches and parameters,
 * groups. */
#ifndef CORE_BIND_BOUND_H
#define CORE_BIND_BOUND_H

#include "select/assignment.h"
#include "select/composition.h"
#include "util/structs.h"
#include "util/tensor.h"

#define LAYER_PARAMS_MAX_TENSORS 16

/* A layer's parameters as the core keeps them: the structs that the engine filled, its extensions
 * and tensors' shapes are copied, so that only the memory they point at is borrowed. Must not move
 * while `params` is used. */
struct layer_params_copy {
    struct attn_layer_params params; /* points into this struct only, and at the engine's memory */
    struct ext_room extensions;
    struct own_tensor tensors[LAYER_PARAMS_MAX_TENSORS];
    int32_t num_tensors;
};

/* `given` is zero-extended, its extensions checked. A tensor that cannot be one is refused under
 * its name. */
attn_status layer_params_copy_take(struct layer_params_copy *own,
                                   const struct attn_layer_params *given, struct attn_error *error);

/* A backend, created on its device. */
struct instance {
    int32_t backend; /* index in the runtime */
    const struct attn_backend_caps *caps;
    const struct attn_plugin *plugin;
    attn_instance *handle;
    struct attn_kernels kernels; /* a copy: slots that the plugin's version lacks are NULL */
};

/* ABI_ARGS of a kernel's call on an instance, in a stream. */
#define KERNEL_ARGS(on, on_stream, ...)                                                            \
    ABI_ARGS(.instance = (on)->handle, .stream = (on_stream), __VA_ARGS__)

/* A composed step is made of parts; each is an attend of its own with a rewritten layer. */
enum part {
    PART_MAIN,   /* the layer itself, or what is left of it next to the others */
    PART_PREFIX, /* cascade: the common prefix, not causal, without the sinks' logits */
    PART_REST,   /* cascade: PART_MAIN with a plain output, where the layer's is quantized */
    PART_SINK,   /* static sink: contiguous fixed keys */
    /* the step's own keys, contiguous: of a spread cache, or MLA's, projected per head */
    PART_NEW,
    /* the context before them, all visible: this rank's shard, or MLA's, gathered and projected */
    PART_CONTEXT,
    PART_COMPRESSED, /* rows of a second cache, all visible */
    PART_COUNT
};

/* What serves a layer in one phase. */
struct served {
    struct instance *instance;
    uint32_t composed; /* ATTN_COMPOSE_* */
    int32_t graph_level;
    int32_t schedule_group;
    attn_prepared *prepared[PART_COUNT];
    bool is_prepared[PART_COUNT];
};

/* Bytes of one slot and head: of its row with the scales that stand in it, and without; of all its
 * scales, and of those that stand apart, by default after the rows of a block. */
struct kv_row {
    int64_t bytes, data, scale, apart;
};
/* head_size counts bytes where rows are opaque. Scales: float32, a byte per 16 dims of nvfp4,
 * TurboQuant's one or two float16. */
struct kv_row kv_row(int32_t kv_dtype, int32_t head_size, bool value);
/* That of a layer's K or V, which may be opaque. */
struct kv_row layer_row(const struct attn_layer_desc *l, bool value);

/* One of a layer's caches. */
struct cache {
    struct attn_cache_spec spec;
    struct kv_row row;
    struct attn_kv_view *view; /* attn_layer's k_cache, v_cache or further; data NULL: not bound */
    char name[16];             /* "k", "cache 3", in errors */
};

struct attn_layer {
    attn_model *model;
    int32_t index;
    int32_t group;           /* block-table group */
    int32_t slot;            /* index among the layers of its group */
    const attn_layer *table; /* the group's first layer: one pointer that names model and group */
    const struct layer *selected;       /* the assignment's, which the model keeps alive */
    const struct attn_layer_desc *desc; /* selected's, completed */
    attn_layer *owner; /* whose cache this one reads: itself, or its sharing target */
    struct served served[NUM_PHASES];
    uint32_t composed_by;         /* compositions that serve the layer, a bit each by id */
    void *data[MAX_COMPOSITIONS]; /* by id: layer_bytes of memory of its own */
    struct attn_layer_desc parts[PART_COUNT];         /* the layer as kernels see each part */
    struct attn_layer_params part_params[PART_COUNT]; /* and its parameters */
    const char *needed_params; /* what it cannot run without, in words; NULL: nothing */
    /* K's, or the only cache of its kind: memory in the layout that its backend would like */
    struct attn_cache_spec spec;
    struct attn_kv_view k_cache, v_cache;
    struct cache *all;               /* those of its kind, then those of attn_layer_caches */
    int32_t num_own, num_further;    /* how many of either */
    struct attn_kv_view *further;    /* their views */
    struct attn_layer_cache *caches; /* the same in the form that kernels get */
    /* tokens of one entry of the block table, over all ranks that share the cache */
    int64_t tokens_per_block;
    struct layer_params_copy params_copies[2]; /* one is in use, the other takes the next bind */
    struct layer_params_copy *params;          /* the one in use; NULL: none bound */
    /* plans whose calls hold its cache or parameters; guarded by attn_model.lock */
    int32_t num_plans;
};

/* A device that an engine has opened. */
struct attn_open_device {
    attn_runtime *runtime;
    struct attn_device device;
    struct instance instance; /* the host's: host_kernels, without a handle */
};

struct attn_model {
    attn_runtime *runtime;
    attn_assignment *assignment; /* kept alive: it has the layers' descriptions */
    struct attn_device device;
    struct attn_model_options options;
    struct arena arena;
    struct instance *instances;
    int32_t num_instances;
    /* its memory_device says where an address lies; NULL: no backend of the model can */
    const struct instance *asked;
    attn_layer *layers;
    int32_t num_layers;
    int32_t num_groups;
    int32_t num_schedule_groups;
    struct lock lock; /* guards prepared[] and num_plans of all layers */
};

/* layer.c */
/* Makes parts and part_params, after binding anything that changes them. Compositions may refuse
 * the parameters. */
attn_status layer_make_parts(attn_layer *layer, struct attn_error *error);

/* Calls the backend's `prepare` for a part, unless that was done. `call`: the arguments that its
 * attends will have, `prepared` but missing. Not in a step. */
attn_status layer_prepare(attn_layer *layer, int32_t part, const struct attn_attend_args *call,
                          struct attn_error *error);
void layer_release_states(attn_layer *layer);
/* The same for all layers that read the cache of `owner`, itself included: it is bound again. */
void layer_release_readers(attn_layer *owner);

/* How many of the kernels' blocks make one of the engine's, in caches of table `table`. */
static inline int32_t layer_parts(const attn_layer *layer, int32_t table)
{
    return table == 0 ? layer->selected->blocks_per_entry : 1;
}
/* How many of the kernels' blocks every cache in table `table` has: the least of them. INT64_MAX:
 * the table has no cache. */
int64_t layer_num_blocks(const attn_layer *layer, int32_t table);

/* view_check.c: refuses while a plan holds the layer: sizes, views and what kernels made of the
 * parameters. `call` names who asks. */
attn_status layer_check_unplanned(attn_layer *layer, const char *call, struct attn_error *error);

/* A cache is at most so long, which is more than a machine addresses: sums of several stay far from
 * overflow. */
#define MAX_CACHE_BITS 56
#define MAX_CACHE ((int64_t)1 << MAX_CACHE_BITS)

/* cache_spec.c: the plugin says the bytes of a block in a layout of its vendor's */
attn_status layer_make_spec(attn_layer *layer, int32_t layout, struct attn_error *error);
/* groups.c */
void model_make_groups(attn_model *model);
/* instance.c: a backend created on its device; the model's own, made once */
attn_status instance_create(attn_runtime *runtime, int32_t backend,
                            const struct attn_model_options *options, struct instance *instance,
                            struct attn_error *error);
attn_status model_make_instance(attn_model *model, int32_t backend, struct instance **instance,
                                struct attn_error *error);
void instance_finish(struct instance *instance);
/* host_kernels.c: memory, streams, copies and fills of the host. Instances on a CPU have these
 * copies and fills where their backends have none. */
extern const struct attn_kernels host_kernels;

/* Whether reading the layer's cache needs arrays of attn_kv_quant_params. */
static inline bool layer_needs_quant_params(const struct attn_layer_desc *l)
{
    return (l->kind == ATTN_LAYER_DECODER || l->kind == ATTN_LAYER_CROSS) &&
           (l->kv_dtype == ATTN_KV_INT8_KV || l->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD ||
            l->kv_dtype_v == ATTN_KV_INT4_PER_TOKEN_HEAD);
}
/* Are blocks of the layer's K and V pages of bytes, which only its backends can read? */
static inline bool layer_has_vendor_pages(const attn_layer *layer)
{
    return layer->spec.layout >= ATTN_VENDOR_CODE;
}

/* view_check.c: a view as the engine gave it, checked and cut into the kernel's blocks. */
attn_status cache_read_view(const attn_layer *layer, const struct cache *cache,
                            const struct attn_kv_view *given, struct attn_kv_view *view,
                            struct attn_error *error);
/* view_check.c: K's and V's views, each read, next to each other */
attn_status cache_check_pair(const attn_layer *layer, const struct attn_kv_view views[2],
                             struct attn_error *error);

/* cache_spec.c: a view's scales, within its rows or, where these stand apart, at `apart` in blocks
 * `stride` bytes from each other */
void view_set_scales(struct attn_kv_view *view, const struct kv_row *row, uint8_t *apart,
                     int64_t stride);
/* cache_spec.c: views of num_blocks blocks at base, in the layout of the layer's page. Of latent
 * rows v is NULL. */
attn_status layer_kv_views(const attn_layer *layer, void *base, int64_t num_blocks,
                           struct attn_kv_view *k, struct attn_kv_view *v,
                           struct attn_error *error);

/* Describes all caches of a layer with a spec, none of them bound. */
attn_status layer_make_caches(attn_layer *layer, struct attn_error *error);

#endif
