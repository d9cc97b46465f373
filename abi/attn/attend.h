/* SPDX-License-Identifier: Apache-2.0 */
/* One attend, its schedule and its memory: the arguments of attend, attend_mla, attend_mla_sparse
 * and recurrent. */
#ifndef ATTN_ATTEND_H
#define ATTN_ATTEND_H

#include "batch.h"
#include "io.h"
#include "layer.h"

typedef struct attn_instance attn_instance; /* the plugin's own: one device and variant */
typedef struct attn_prepared attn_prepared; /* the plugin's own: what prepare made for one layer */
typedef struct attn_plan_state attn_plan_state; /* what create_plan_state made for one plan */

/* Upper bounds of a plan. */
struct attn_limits {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t max_num_reqs;
    int32_t max_num_tokens;
    int32_t max_query_len;
    int32_t max_seq_len;
    int32_t max_blocks_per_req;
    int32_t reserved;
};

/* Memory of one plan: host memory that `schedule` fills and `attend` reads, device workspace, and
 * scratch. All keep their address as long as the plan lives. The host memory is pageable: what the
 * device needs of it is copied before `schedule` returns, so that the next may fill it again while
 * earlier attends still run. */
struct attn_schedule_size {
    size_t struct_size;
    const struct attn_ext *next;
    size_t host_bytes;
    size_t device_bytes; /* aligned to 256 */
    /* aligned to 256: device memory that holds nothing between one call of schedule or attend and
     * the next, and that other plans of the stream use in between */
    size_t scratch_bytes;
};

/* Arguments of prepare. Attends with what it makes get exactly these: views with their addresses,
 * and what layer and params point at, hold until release. The core's copies of layer and params may
 * move: they are borrowed until return. */
struct attn_prepare_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    const struct attn_layer_desc *layer; /* as those attends get it */
    const struct attn_layer_params *params;
    const struct attn_kv_view *k_cache; /* NULL: keys will be contiguous */
    const struct attn_kv_view *v_cache;
    const struct attn_layer_cache *caches;
    int32_t num_caches;
    int32_t cache_stride;
    int32_t phase; /* enum attn_phase */
    int32_t reserved;
};

/* Arguments of schedule_size and create_plan_state. */
struct attn_schedule_size_args {
    size_t struct_size;
    const struct attn_ext *next;
    attn_instance *instance;
    attn_prepared *prepared; /* NULL if prepare is NULL */
    const struct attn_limits *limits;
    attn_plan_state *plan_state; /* NULL if create_plan_state is NULL */
};

enum attn_plan_mode {
    ATTN_PLAN_EAGER = 0,
    /* worst case of `limits`; the following attends are being captured */
    ATTN_PLAN_CAPTURE = 1,
    /* new lengths and tables at the same addresses, before a replay */
    ATTN_PLAN_REPLAY = 2,
    ATTN_PLAN_OUT_OF_GRAPH = 3, /* host part of a step whose device part is captured */
    ATTN_PLAN_IN_GRAPH = 4      /* device part, being captured: no host data is read */
};

/* Everything that one attend (or its schedule) works on. The core prepares it per plan and layer,
 * and a run only sets the stream, flags and tensors. */
struct attn_attend_args {
    size_t struct_size;
    const struct attn_ext *next; /* the run's attn_step_io.next */
    attn_instance *instance;
    attn_prepared *prepared; /* from prepare; NULL if that slot is NULL */
    /* rewritten by the core for this part of a composed step */
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_batch *batch;
    const struct attn_kv_view *k_cache; /* NULL: keys are contiguous, in k and v */
    const struct attn_kv_view *v_cache;
    void *schedule_host; /* schedule_size.host_bytes */
    void *workspace;     /* schedule_size.device_bytes */
    void *stream;
    /* ATTN_RUN_*. NO_WRITE is set unless FUSED_WRITE was declared, or the step is of decodes only
     * and decode_write_kv_dtypes has the layer's kv_dtype: then all num_slots rows of k and v go to
     * slot_mapping before they are attended */
    uint32_t flags;
    int32_t phase;                 /* enum attn_phase */
    const struct attn_tensor *q;   /* [T, Hq, D] */
    const struct attn_tensor *k;   /* [Tk, Hk, D] or NULL */
    const struct attn_tensor *v;   /* [Tk, Hk, Dv] or NULL */
    const struct attn_tensor *out; /* [T, Hq, Dv] */
    const struct attn_tensor *lse; /* [Hq, T] float32, natural log; NULL: not asked for */
    /* what schedule_size was asked and, for schedule_host and workspace, answered */
    const struct attn_limits *limits;
    size_t schedule_host_bytes;
    size_t workspace_bytes;
    /* those of attn_layer_caches, in their order; the batch's tables address them */
    const struct attn_layer_cache *caches;
    int32_t num_caches;
    int32_t cache_stride;        /* from element to element */
    attn_plan_state *plan_state; /* NULL if create_plan_state is NULL */
    void *scratch;               /* schedule_size.scratch_bytes */
    size_t scratch_bytes;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_limits) == 40, "attn_limits of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_schedule_size) == 40, "attn_schedule_size of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_prepare_args) == 80, "attn_prepare_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_schedule_size_args) == 48,
                   "attn_schedule_size_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_attend_args) == 208, "attn_attend_args of ABI 0.3");

#endif
