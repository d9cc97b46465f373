/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan holds. Everything is sized at creation; a step only fills it. */
#ifndef CORE_STEP_SCHEDULE_H
#define CORE_STEP_SCHEDULE_H

#include <string.h>

#include "bind/bound.h"
#include "step/plan.h"

/* Views of the step's batch. */
enum view {
    VIEW_WHOLE,
    VIEW_DECODE,  /* the leading requests of few queries */
    VIEW_PREFILL, /* the rest */
    VIEW_PREFIX,  /* cascade: all tokens as one request over the common prefix */
    VIEW_SUFFIX,  /* cascade: the requests over the keys behind it */
    VIEW_SINK,    /* static sink: all tokens as one request over the fixed keys */
    VIEW_NEW,     /* MLA's prefill over its own keys: contiguous, rows as queries */
    VIEW_CONTEXT, /* likewise over the first chunk of its context */
    VIEW_COUNT
};

/* One vendor plan: of a plan group, for one part of a composed step. */
struct schedule {
    int32_t plan_group;
    int32_t phase;
    int32_t part;
    int32_t view;                  /* of the last plan; -1: not needed by it */
    struct attn_attend_args *args; /* of the first layer: what plan() gets */
    const struct instance *instance;
    size_t host_bytes;
    size_t device_bytes;
    void *host;
    size_t device_offset; /* in the workspace */
};

typedef attn_status step_kernel(const struct attn_attend_args *args, struct attn_error *error);

/* One prepared call: attend of one part of one layer in one phase. */
struct launch {
    step_kernel *kernel;
    struct attn_attend_args args;
    struct schedule *schedule;
};

struct step;
typedef attn_status step_program(attn_plan *plan, struct step *step, const struct attn_step_io *io,
                                 struct attn_error *error);

/* Tensors that come in extensions; `writes` and `attends`: whether this run will. */
typedef attn_status step_check(const attn_plan *plan, const struct step *step,
                               const struct attn_step_io *io, bool writes, bool attends,
                               struct attn_error *error);

/* What a tensor [rows, heads, head_size] of a step must be. */
struct rows {
    uint64_t kind; /* ndim and dtype, the eight bytes that lie side by side in attn_tensor */
    int64_t heads;
    int64_t head_size;
};

static inline uint64_t tensor_kind(const struct attn_tensor *tensor)
{
    uint64_t kind;
    memcpy(&kind, (const char *)tensor + offsetof(struct attn_tensor, ndim), sizeof kind);
    return kind;
}

static inline void tensor_set_kind(struct attn_tensor *tensor, uint64_t kind)
{
    memcpy((char *)tensor + offsetof(struct attn_tensor, ndim), &kind, sizeof kind);
}

static inline bool tensor_is_rows(const struct attn_tensor *t, const struct rows *wanted,
                                  int64_t rows)
{
    return tensor_kind(t) == wanted->kind && t->shape != NULL && t->shape[0] >= rows &&
           t->shape[1] == wanted->heads && t->shape[2] == wanted->head_size &&
           (t->strides == NULL || t->strides[2] == 1);
}

/* One layer in a plan. */
struct step {
    step_program *enter;   /* what run() calls: by the last plan */
    step_program *program; /* the attends alone, likewise */
    attn_layer *layer;
    struct rows q, k, v, out;
    bool writes; /* this layer's own cache is filled by runs */
    /* q, k, v, out are [T, heads, D]; MLA and GDN bring extensions, see check_io */
    bool plain_checks;
    step_check *check_io;
    bool fused_write;     /* attends write k and v themselves */
    bool fused_decode;    /* likewise where one attend of decodes is the whole step */
    bool fuses;           /* by the last plan */
    bool keys_are_inputs; /* no cache: k and v are read by attend */
    bool quantizes;       /* output form through `quantize` */
    struct launch launches[ATTN_PHASE_COUNT][PART_COUNT];
    struct launch *main[2]; /* by the last plan: attends of the part itself; NULL: none */
    struct attn_write_kv_args write;
    attn_status (*write_kv)(const struct attn_write_kv_args *args, struct attn_error *error);
    attn_status (*merge)(const struct attn_merge_states_args *args, struct attn_error *error);
};

/* Places in the workspace for what the core itself needs. */
struct scratch {
    size_t integers; /* lengths and rows of views that the core makes */
    size_t out;      /* one side of a merge: [T, Hq, Dv] */
    size_t plain;    /* what is to be quantized: [T, Hq, Dv] */
    size_t lse[2];   /* [Hq, T] float32 */
    struct {
        size_t latent_q, latent_out; /* [decode tokens, Hq, kv_lora_rank] */
        size_t q;               /* [T, Hq, nope + rope], where its parts are not side by side */
        size_t rows;            /* [context rows, kv_lora_rank + rope] */
        size_t local, gathered; /* the same rows of this rank and of all: spread caches */
        size_t k, v;            /* [T or context rows, Hq, nope + rope or v] */
    } mla;
    struct {
        size_t packed, gathered, q; /* queries of a rank, of all by rank, of all by key head */
        size_t out, lse;            /* [T, Hk n g, Dv] and [Hk n g, T]: the context that is here */
        size_t send, received;      /* [n] parts of a rank: [T, Hq, Dv], then [Hq, T] float32 */
        size_t zeros, all_lse, other_lse;
        size_t rows; /* [P, widest, Hq, D]: queries of the ranks that split them */
        size_t rows_send, rows_received; /* [P] parts of [widest, Hq, Dv] */
        /* k and v: this rank's, all ranks', in the order of requests, and again per slice */
        size_t keys[2][4];
    } parallel;
    size_t encoder[3]; /* q, k, v quantized: [T, heads, head size] e4m3 */
    size_t bytes;
};

/* Rows of context that MLA's prefill gathers and projects at a time, by the last plan. */
struct context_chunk {
    int32_t first_req, num_reqs; /* of the prefill view */
    int32_t num_rows;
    int32_t first_row, end_row; /* of q and out */
    const int32_t *first_key;   /* host, [num_reqs] */
    const int32_t *start;       /* host, [num_reqs + 1]: rows that are gathered, on each rank */
    /* the keys that these are, of all ranks: as start, but in a spread cache */
    const int32_t *key_start;
    const int32_t *rank_rows; /* host, [num_reqs, n]: spread caches */
};

/* Rows up to end_row, from where the run before ended. */
struct merge_run {
    int32_t end_row;
    int32_t with_prefix; /* 1: both parts; 0: the suffix as it is */
};

/* Rows that are copied in one piece. */
struct row_run {
    int64_t from, to, rows;
};

/* Counts of the last capture, which its replays must have. */
struct captured {
    bool there;
    int32_t num_reqs, num_decodes, num_tokens;
};

struct attn_plan {
    attn_model *model;
    int32_t group;
    struct attn_limits limits;
    int32_t graph;
    struct step *steps; /* by attn_layer.slot */
    int32_t num_steps;
    bool counted; /* in its layers' num_plans */
    struct schedule *schedules;
    int32_t num_schedules;
    struct attn_batch views[VIEW_COUNT];
    struct attn_batch received; /* the engine's, zero-extended */
    struct attn_batch given;    /* the same, bounds and encoder lengths filled in */
    struct attn_batch_split split;
    int32_t num_tokens;      /* rows that tensors must have */
    int32_t num_key_rows;    /* likewise k and v where keys are contiguous */
    int32_t first_row;       /* query_start_loc_host[0]: host copies end with plan() */
    const attn_layer *table; /* of its block-table group, see attn_layer.table */
    const attn_layer *ready; /* = table once plan() succeeded, else NULL */
    uint64_t serial;         /* of the last plan() */
    /* whose batch the last plan took, see plan_update_block_table; never followed */
    const attn_plan *source;
    uint64_t source_serial;
    struct captured captured;
    uint8_t *workspace;
    size_t workspace_bytes;
    struct scratch scratch;
    int32_t *integers;    /* host copy of scratch.integers */
    int64_t num_integers; /* up to MAX_INTEGERS */
    int64_t used_integers;
    struct merge_run *merge_runs; /* host, among the integers; by the last plan */
    int32_t num_merge_runs;
    struct attn_batch_gdn states[VIEW_COUNT]; /* GDN: what the views carry */
    struct {
        struct context_chunk *chunks;
        int32_t max_chunks, num_chunks;
        bool invariant;      /* chunks cut each request by its own length alone */
        int32_t chunk_rows;  /* most rows of a chunk */
        int32_t gather_rows; /* of these, on each rank */
        /* [n, n] of the activations' dtype, which copies rows by batched_gemm */
        int32_t identity_size;
        const void *identity;      /* device; by the last plan */
        struct attn_batch context; /* the prefill view with host arrays of the plan's own */
    } mla;
    struct {
        int64_t *pairs; /* (t, t) of every row */
        int64_t num_pairs;
        int32_t world_size;
        /* by the last plan: are the queries split, and how */
        bool split;
        int32_t widest;       /* most rows of a rank */
        int32_t num_keys;     /* new ones, of all ranks */
        struct row_run *runs; /* keys into their order, then into that of the slices */
        int32_t max_runs, num_runs, num_slice_runs;
        const int32_t *key_start; /* host, of the slices' keys; [num_reqs + 1] of the split batch */
    } parallel;
    int32_t decode_threshold; /* most queries of a decode; by the last plan */
    int32_t num_multiprocessors;
    bool validate;
};

/* make.c */
attn_status step_make(attn_plan *plan, attn_layer *layer, struct attn_error *error);

/* views.c */
attn_status batch_read(attn_plan *plan, const struct attn_batch *batch, struct attn_error *error);
void batch_split(attn_plan *plan, const struct attn_batch *whole, int32_t threshold);

/* Most of a plan's own integers: places among them, and counts of what they describe, are int32_t.
 */
#define MAX_INTEGERS INT32_MAX

/* compose.c: views over arrays that the core makes */
attn_status compose_sink(attn_plan *plan, const struct attn_layer_desc *layer,
                         struct attn_error *error);
attn_status compose_cascade(attn_plan *plan, struct attn_error *error);
attn_status compose_chunks(attn_plan *plan, const struct attn_layer_desc *layer,
                           struct attn_error *error);
bool cascade_pays(const attn_plan *plan, const struct step *step);
/* Integers of the plan, and where they will lie on the device. */
int32_t *compose_take(attn_plan *plan, int64_t count);
const int32_t *compose_on_device(const attn_plan *plan, const int32_t *host);
/* Brings the integers that the views use to the device. */
attn_status compose_send(attn_plan *plan, void *stream, struct attn_error *error);
/* How many the worst batch within the limits takes; may be above MAX_INTEGERS. */
int64_t compose_max_integers(const attn_plan *plan);

/* entries.c: chooses what run() enters, after the program and its calls are chosen. */
void step_choose_entry(attn_plan *plan, struct step *step);
/* run.c */
extern step_program run_general;
/* out in the layer's output form */
attn_status step_check_out(const attn_plan *plan, const struct step *step,
                           const struct attn_tensor *out, struct attn_error *error);

/* programs.c */
extern step_program run_idle, run_attends, run_cascade, run_with_sink;
/* Sets rows of a tensor to zero on the plan's device. */
attn_status zero_tensor(attn_plan *plan, const struct step *step, const struct attn_tensor *tensor,
                        void *stream, struct attn_error *error);

/* validate.c */
attn_status validate_batch(const attn_plan *plan, struct attn_error *error);
attn_status validate_tensor(const attn_plan *plan, const struct attn_tensor *tensor,
                            const char *name, const char *layer, struct attn_error *error);

#endif
