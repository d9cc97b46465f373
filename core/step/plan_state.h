/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan holds. Everything is sized at creation; a step only fills it. */
#ifndef CORE_STEP_PLAN_STATE_H
#define CORE_STEP_PLAN_STATE_H

#include <string.h>

#include "bind/bound.h"
#include "select/layer.h"

#define WORKSPACE_ALIGNMENT 256

/* A backend's schedule for one schedule group and one part of a composed step. */
struct plan_schedule {
    int32_t schedule_group; /* within one phase */
    int32_t part;
    const struct attn_batch *batch; /* that plan_batch chose for it; NULL: not used in this step */
    struct attn_attend_args *args;  /* the first layer's: what `schedule` is called with */
    const struct instance *instance;
    struct attn_schedule_size size; /* from the vendor */
    void *host;
    attn_plan_state *state; /* the vendor's own of this plan; NULL: it has none */
    size_t device_offset;   /* in the workspace */
    int64_t num_keys;       /* an observer's: that layers see of the batch's requests */
};

typedef attn_status step_kernel(const struct attn_attend_args *args, struct attn_error *error);

/* One prepared call: attend of one part of one layer in one phase. */
struct launch {
    struct attn_attend_args args;
    step_kernel *kernel;
    struct plan_schedule *schedule;
};

/* What a tensor [rows, heads, head_size] of a step must be. */
struct tensor_form {
    uint64_t kind; /* ndim and dtype: eight neighbouring bytes of attn_tensor as one number */
    int64_t heads;
    int64_t head_size;
};

static inline uint64_t tensor_kind(const struct attn_tensor *tensor)
{
    uint64_t kind;
    memcpy(&kind, (const char *)tensor + offsetof(struct attn_tensor, ndim), sizeof kind);
    return kind;
}

/* A tensor of that kind, without data, shape and device. */
static inline struct attn_tensor tensor_of_kind(uint64_t kind)
{
    struct attn_tensor tensor = {.data = NULL};
    memcpy((char *)&tensor + offsetof(struct attn_tensor, ndim), &kind, sizeof kind);
    return tensor;
}

/* Rows up to end_row, from where the run before ended. */
struct merge_run {
    int32_t end_row;
    int32_t with_prefix; /* 1: both parts of a merge; 0: what is left, as it is */
};

/* One layer in a plan. "Chosen": plan_batch sets it for each batch. */
struct step {
    step_program *enter;   /* chosen: what run() calls; it names the layer in errors */
    step_program *program; /* chosen: the attends, which run_general enters after its checks */
    step_program *inner;   /* chosen: the program that output_quant's calls before it quantizes */
    struct launch *apart;  /* chosen: what merged_run attends before `rest` */
    step_program *rest;    /* chosen: and what it merges that with */
    const struct merge_run *merges; /* chosen: [num_merges]; NULL: all rows have both */
    int32_t num_merges;
    attn_layer *layer;
    struct tensor_form q, k, v, out;
    bool writes;            /* runs fill this layer's own cache */
    uint8_t idle_byte;      /* each of an output row where nothing is computed */
    step_check *check_io;   /* step_check_plain, or a composition's own */
    step_check *check_more; /* what else a run that attends brings; NULL: nothing */
    bool fused_write;       /* all attends write k and v themselves */
    bool fused_decode;      /* an attend of decodes does so where it is the whole step */
    bool fuses;             /* chosen: one of the two holds */
    bool drops_keys;        /* chosen: the cache is its own and gets no slots */
    bool plain_writes;      /* chosen: a run writes unless its flags say otherwise */
    bool keys_are_inputs;   /* no cache: k and v are read by attend */
    bool checks_out;        /* out is of the activations' dtype or the attend's own form */
    /* chosen: replaces *io, until the run ends, by one whose k and v are written and attended;
     * NULL: the run's own are */
    attn_status (*bring_keys)(attn_plan *plan, struct step *step, const struct attn_step_io **io,
                              struct attn_error *error);
    uint32_t parts[NUM_PHASES]; /* those that a phase may call within the plan's limits */
    struct launch launches[NUM_PHASES][PART_COUNT]; /* other parts have kernel NULL */
    struct launch *main[2];                         /* chosen: attends of PART_MAIN; NULL: none */
    struct attn_write_kv_args write;
    attn_status (*write_kv)(const struct attn_write_kv_args *args, struct attn_error *error);
    step_program *observed; /* what `enter` was chosen to be, where an observer stands before it */
};

/* Places in the workspace for what the core itself needs. */
struct workspace_layout {
    size_t own_bytes;     /* the plan's own part, which begins with the copy of host_ints */
    size_t scratch_bytes; /* the scratch, which all of the following lies in */
    size_t out;           /* one side of a merge: [T, Hq, Dv] */
    size_t lse[2];        /* [Hq, T] float32 */
    size_t of_kernels;    /* schedules' scratch */
};

/* A part of the scratch. */
struct area {
    struct area *next;
    size_t *place; /* where its offset goes */
    size_t bytes;
    uint32_t uses;
};

/* Counts of the last capture, which its replays must have. */
struct captured {
    bool there;
    int32_t num_reqs, num_decodes, num_tokens;
    int32_t first_row, num_actual_tokens; /* rows of out that launches have; no more in a replay */
    bool idle;                            /* no kernel attends */
};

/* The block table that plan_batch makes where the engine's is no kernel's, see block_table.c. */
struct made_table {
    int32_t columns;        /* 0: none is made */
    int32_t parts;          /* kernels' blocks in one of the engine's */
    int64_t rows_per_entry; /* rows of the caches in one of the engine's blocks, or pages */
    int32_t tokens_per_row; /* in those caches */
    bool takes_lists;       /* a layer says needs_page_lists */
    size_t table_at;        /* offset in the workspace: [max_num_reqs, columns] */
    size_t lens_at;         /* offset of lengths [max_num_reqs], where lists are taken */
    int32_t *lens_host;     /* those on the host */
};

/* What the plan's layers read of a batch. */
struct batch_takes {
    uint32_t kinds;                         /* bits of enum attn_layer_kind */
    uint32_t trees;                         /* bits of enum attn_tree_mask */
    uint64_t reads;                         /* extensions: bits of ABI_READS */
    bool causal_per_request, spans, logits; /* a layer does */
    bool all_queries;                       /* those of ranks that split the queries of a request */
    bool rows, bounds;                      /* all layers do */
    const char *no_other[2]; /* why layers that are not causal, and those that are, stay so */
};

struct attn_plan {
    attn_model *model;
    int32_t group;
    struct attn_limits limits;
    /* those that schedules of a part are made for: the plan's, which compositions change */
    struct attn_limits part_limits[PART_COUNT];
    int64_t max_reqs; /* most requests of `whole`: above the limits' where compositions cut them */
    int32_t graph;
    struct arena arena; /* all of the plan's memory but the schedules' host memory */
    struct step *steps; /* by attn_layer.slot */
    struct step **step_of_slot;
    int32_t num_steps;
    bool counted; /* its layers' num_plans count this plan */
    struct plan_schedule *schedules;
    int32_t num_schedules;
    uint32_t composed_by;         /* compositions that serve a layer of it, a bit each by id */
    void *data[MAX_COMPOSITIONS]; /* by id: plan_bytes of memory of its own */
    struct attn_batch received;   /* the engine's batch, zero-extended */
    struct attn_batch given;      /* `received` with bounds and encoder lengths filled in */
    struct attn_batch whole;      /* `given` as compositions have cut its requests */
    /* the leading requests of `whole` with up to decode_threshold queries, and the rest */
    struct attn_batch decode, prefill;
    /* attn_batch.tables of `whole`, `decode` and `prefill` */
    struct attn_batch_table *tables[3];
    int32_t num_tables; /* how many the layers need */
    /* 0: in place of the batch's own fields, n: of tables[n - 1] */
    struct made_table made[1 + ATTN_MAX_TABLES];
    struct attn_batch_split split;
    /* in `given`: queries of each request over all ranks that split them, which then all run, even
     * those without queries of their own; NULL: they are not split */
    const int32_t *all_query_lens;
    int32_t num_tokens;      /* rows that a run's tensors must have */
    int32_t num_key_rows;    /* rows of k and v, where keys are contiguous */
    int32_t first_row;       /* query_start_loc_host[0]: host copies end with plan_batch */
    int32_t first_key_row;   /* the same of k and v */
    const attn_layer *table; /* names the block-table group, see attn_layer.table */
    const attn_layer *ready; /* = table once plan_batch succeeded, else NULL */
    uint64_t serial;         /* number of the last plan_batch */
    /* the plan whose batch plan_update_block_table took last: compared, never dereferenced */
    const attn_plan *source;
    uint64_t source_serial;
    struct captured captured;
    uint8_t *workspace; /* its own part */
    uint8_t *scratch;   /* attn_workspace.scratch, or after the own part */
    struct workspace_layout layout;
    struct area *areas;
    int32_t *host_ints;    /* lengths and rows of views that the core makes; see plan_take */
    int64_t num_host_ints; /* up to MAX_HOST_INTS */
    int64_t used_host_ints;
    int32_t decode_threshold; /* most queries of a decode */
    bool validate, looks;     /* ATTN_VALIDATE=1; and the host can read what it validates */
    uint32_t vendor_ids[MAX_VENDOR_EXTENSIONS]; /* vendors' extensions that all its layers have */
    int32_t num_vendor_ids;
    struct batch_takes takes;
    bool asked;                       /* the driver was asked where a batch's arrays lie */
    bool asked_tables;                /* and where those of its tables do */
    int32_t mode;                     /* enum attn_plan_mode of the plan_batch under way */
    void *stream;                     /* that of the last plan_batch, and so of its runs */
    bool capturing;                   /* runs are being recorded, and nothing may wait for them */
    struct ext_room batch_extensions; /* for a batch that brings unknown ones, too */
    /* an observer's: the step that it watches, how many plan_batches it has seen */
    const struct step *observed_step;
    int64_t num_observed;
};

/* plan.c */
/* Bytes of an area of the workspace, to where the next may begin. */
static inline int64_t plan_aligned(int64_t bytes)
{
    return (bytes + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT * WORKSPACE_ALIGNMENT;
}

/* Refuses limits under which the areas of a step that sees `ranks` times its heads and `parts` of
 * them may be larger than sizes can say. */
attn_status plan_check_area(const attn_plan *plan, const struct step *step, double ranks,
                            double parts, struct attn_error *error);

/* A part of the scratch of `bytes` or more, whose offset will be in *place, before plan_create
 * ends. `uses`: the moments of a run in which it holds something, a bit each; areas without a
 * common one may lie over each other. */
#define ALWAYS UINT32_MAX
void plan_area(attn_plan *plan, size_t *place, int64_t bytes, uint32_t uses);
/* layout.out and layout.lse, for a merge of so many rows. */
void plan_area_of_merge(attn_plan *plan, const struct step *step, int64_t rows, uint32_t uses);

/* Does a run bring keys that no slot takes? It would then attend to what the cache held before. */
static inline bool step_leaves_keys(const struct step *step, const struct attn_step_io *io)
{
    return step->drops_keys && io->k != NULL && !(io->flags & ATTN_RUN_NO_WRITE);
}

/* check_io.c: [rows or more, heads, head_size] of that form. */
attn_status check_rows(const char *field, const struct attn_tensor *found,
                       const struct tensor_form *wanted, int64_t rows, struct attn_error *error);
/* The same of what a run reads, and under validation no NaN. */
attn_status check_input(const attn_plan *plan, const char *field, const struct attn_tensor *found,
                        const struct tensor_form *wanted, int64_t rows, struct attn_error *error);
/* programs.c. A failed run: whatever a kernel has left becomes clean text after the layer's name
 * and its backends'. */
attn_status step_fail(const struct step *step, attn_status status, struct attn_error *error);
/* A failed operation of a run: its name stands before the text that the kernel has left. */
attn_status operation_failed(const char *name, attn_status status, struct attn_error *error);
static inline attn_status operation(const char *name, attn_status status, struct attn_error *error)
{
    return status == ATTN_OK ? status : operation_failed(name, status, error);
}

/* make_step.c */
/* The step of a plain layer. */
attn_status step_begin(attn_plan *plan, attn_layer *layer, struct attn_error *error);
/* Prepares the calls that the compositions have described. */
attn_status step_finish(attn_plan *plan, struct step *step, struct attn_error *error);
/* Bytes of a row of a step's output, before it is quantized. */
int64_t step_row_bytes(const struct step *step);

/* What runs all that a step has besides its attends. */
static inline const struct instance *step_instance(const struct step *step)
{
    return step->layer->served[ATTN_PHASE_PREFILL].instance;
}

/* The first step from `at` on of a layer that a composition serves, or NULL. */
static inline struct step *plan_served(const attn_plan *plan, int32_t composition, struct step *at)
{
    for (; at < plan->steps + plan->num_steps; at++) {
        if (at->layer->composed_by >> composition & 1) {
            return at;
        }
    }
    return NULL;
}

#define FOR_SERVED(step, plan, composition)                                                        \
    for (struct step *step = plan_served(plan, composition, (plan)->steps); step != NULL;          \
         step = plan_served(plan, composition, step + 1))

/* read_batch.c */
/* Queries of request r. */
static inline int32_t num_queries(const struct attn_batch *batch, int32_t r)
{
    return batch->query_start_loc_host[r + 1] - batch->query_start_loc_host[r];
}
/* An array from element `by` on; NULL stays. */
#define MOVED(array, by) ((array) != NULL ? (array) + (by) : NULL)
attn_status batch_read(attn_plan *plan, const struct attn_batch *batch, struct attn_error *error);
/* Requests first .. end-1 of a batch. Rows stay absolute: only arrays of requests move. */
void batch_cut(const struct attn_batch *whole, int32_t first, int32_t end, struct attn_batch *part);
/* Cuts plan->whole into its decodes and the rest. */
void batch_split(attn_plan *plan);

/* batch_fields.c */
void batch_fields_init(attn_plan *plan);
/* Refuses what no layer of the plan reads. */
attn_status batch_check_fields(const attn_plan *plan, const struct attn_batch *batch,
                               struct attn_error *error);

/* tables.c: tables of a batch next to its own fields */
attn_status tables_init(attn_plan *plan, struct attn_error *error);
/* Checks those that the plan's layers need, and points the batch at copies of our struct's size. */
attn_status tables_read(attn_plan *plan, struct attn_batch *batch, struct attn_error *error);
/* Checks table `number` and fills in what is left out. */
attn_status table_check(attn_plan *plan, const struct attn_batch *batch, int32_t number,
                        struct attn_batch_table *table, struct attn_error *error);
/* Makes plan->tables[part], 1 (decodes) or 2 (prefills), which begins with request `first`. */
void tables_cut(const attn_plan *plan, int32_t part, int32_t first, struct attn_batch *batch);
/* Rows that a run brings for caches beyond those of the layer's kind, if it brings any. */
attn_status tables_check_rows(const attn_plan *plan, const struct step *step,
                              const struct attn_ext *next, struct attn_error *error);

/* block_table.c: tables that are made for the kernels. Number 0 is the batch's own fields, n is
 * tables[n - 1] */
attn_status block_table_init(attn_plan *plan, struct attn_error *error);
/* Places made tables in the workspace from `at` on; returns where they end. */
size_t block_table_lay_out(attn_plan *plan, size_t at);
/* Where requests begin in an array: 0 or above, never decreasing, and up to `most`, which `end`
 * names; NULL: anywhere. */
struct starts {
    const char *where, *field, *end;
    int64_t most;
};
/* Those of `count` requests and their end, on the host; NULL: not known. */
attn_status check_starts(const struct starts *starts, const int32_t *start, int32_t count,
                         struct attn_error *error);
/* From 0 to a limit of the plan's, of which 0 is no limit. */
attn_status check_limit(const char *field, int64_t value, int64_t most, struct attn_error *error);
/* The batch's own fields as table 0, and back. */
struct attn_batch_table own_table(const struct attn_batch *batch);
void own_table_put(struct attn_batch *batch, const struct attn_batch_table *table);
/* From request `first` on. */
void table_cut(struct attn_batch_table *table, int32_t first);
/* Checks page lists and fills in what follows of them: lengths, sizes of the table to be made. */
attn_status page_lists_read(attn_plan *plan, int32_t number, int32_t num_reqs,
                            struct attn_batch_table *table, struct attn_error *error);
/* On a CPU: the entries of request r in the engine's table or list. */
const int32_t *table_entries(const attn_plan *plan, int32_t number,
                             const struct attn_batch_table *table, int32_t r, int64_t *count);
/* Makes the tables on the stream and puts them in the place of the engine's in plan->given. */
attn_status block_tables_make(attn_plan *plan, void *stream, struct attn_error *error);

/* Most of a plan's own integers: places among them and counts of them are int32_t. */
#define MAX_HOST_INTS INT32_MAX

/* The device of the plan and the dtype of rows, for tensors that the core makes. */
static inline struct attn_tensor tensor_like(const attn_plan *plan, const struct tensor_form *rows)
{
    struct attn_tensor like = tensor_of_kind(rows->kind);
    like.device = plan->model->device;
    return like;
}

/* plan_batch.c: arrays of a view, in host memory of the plan, which plan_batch sends */
/* `count` integers for arrays of a view; the plan has room for the worst case. */
static inline int32_t *plan_take(attn_plan *plan, int64_t count)
{
    int32_t *taken = plan->host_ints + plan->used_host_ints;
    plan->used_host_ints += count;
    return taken;
}

/* Where an array of plan_take will lie on the device. */
static inline const int32_t *plan_on_device(const attn_plan *plan, const int32_t *host)
{
    return (const int32_t *)plan->workspace + (host - plan->host_ints);
}

/* Requests of a view begin in rows `start`, an array of plan_take. */
void view_starts(const attn_plan *plan, struct attn_batch *view, const int32_t *start);
/* They have `lens` keys, an array of plan_take; the largest is the view's max_seq_len. */
void view_lens(const attn_plan *plan, struct attn_batch *view, const int32_t *lens);
/* Their keys are contiguous from `start` on, an array of plan_take; NULL: as the queries. */
void view_keys(const attn_plan *plan, struct attn_batch *view, const int32_t *start);
/* Requests of a view in the making, among the plan's integers. */
struct view_requests {
    int32_t *start, *lens, *table_rows;
    int32_t count;
};
/* The most pieces of all requests where each is cut every `tokens` tokens: two of each, and one
 * more for each `tokens` of its own. */
int32_t view_pieces(const attn_plan *plan, int32_t tokens);
/* Room for `most`, 3 most + 1 integers; the first begins in row `first_row`. */
struct view_requests view_begin(attn_plan *plan, int64_t most, int32_t first_row);
/* One more: up to row `end_row`, over so many keys, in that row of the block table. */
static inline void view_add(struct view_requests *requests, int32_t end_row, int32_t len,
                            int32_t table_row)
{
    requests->lens[requests->count] = len;
    requests->table_rows[requests->count++] = table_row;
    requests->start[requests->count] = end_row;
}
/* They become the view's; `rows`: with rows of their own in the block table. */
void view_end(const attn_plan *plan, const struct view_requests *requests, bool rows,
              struct attn_batch *view);
/* They see all of their keys, and write none: the layer of the part is not causal. */
void view_sees_all(struct attn_batch *view);

/* This step calls `launch`, over `batch`, which lives as long as the plan. */
static inline struct launch *launch_use(struct launch *launch, const struct attn_batch *batch)
{
    launch->schedule->batch = batch;
    launch->args.batch = batch;
    return launch;
}

/* run.c */
extern step_program run_general;
/* One attend of a plain run, with or without a write: it allocates, locks and formats nothing. */
extern step_program run_plain;
/* check_io.c: tensors of a run, each in every dimension, dtype and stride */
/* q, k, v and out that are [T, heads, D], and lse; of an idle step, too. */
extern step_check step_check_plain;
/* out in the layer's output form, and where its scales go */
attn_status step_check_out(const attn_plan *plan, const struct step *step,
                           const struct attn_step_io *io, struct attn_error *error);
/* k and v with so many rows */
attn_status step_check_keys(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, int64_t rows, struct attn_error *error);
/* attn_io_rope, which the run brings */
attn_status step_check_rope(const attn_plan *plan, const struct step *step,
                            const struct attn_step_io *io, struct attn_error *error);
/* [heads, rows or more] float32, or NULL */
attn_status step_check_lse(const struct attn_tensor *lse, int64_t heads, int64_t rows,
                           struct attn_error *error);
/* norm_eps, what a norm adds to a mean of squares: finite, 0 or above */
attn_status step_check_eps(float eps, struct attn_error *error);
/* Columns of an output that share a scale, by its form. */
int32_t output_group(int32_t form);

/* plan_batch.c: is a batch one call: of one backend for both phases that takes mixed batches, or
 * states, whole, or of a layer with one phase? */
bool step_takes_whole(const struct step *step);
/* The program of a step; the plain calls, if nothing else has been chosen. */
step_program *step_attends(attn_plan *plan, struct step *step);

/* scheduling_helpers.c: local(length), see struct attn_context_parallel */
int32_t local_keys(int32_t length, int32_t rank, int32_t world_size, int32_t interleave);

/* observers/: around an operation of a step that is no kernel of an instance. 0: this thread is in
 * no step that is watched. */
int64_t observe_operation(const char *name);
void observe_operation_end(const char *name, int64_t begin);

/* programs.c */
extern step_program run_idle, run_nothing, run_attends;
/* What it does, as errors name it: "attend prefix". */
const char *launch_name(const struct launch *launch);
/* One attend of `io`: its tensors, extensions and stream. */
attn_status launch_run(struct launch *launch, const struct attn_step_io *io,
                       struct attn_error *error);
/* Two parts of rows first .. first + count - 1 become one by log-sum-exp; of rows from
 * first + with_prefix on it is the suffix. */
struct part_result {
    const struct attn_tensor *out, *lse;
};
struct merge_rows {
    int64_t first, count, with_prefix;
};
attn_status step_merge(const struct step *step, struct part_result prefix,
                       struct part_result suffix, struct part_result to, struct merge_rows rows,
                       void *stream, struct attn_error *error);
/* Sets the bytes of a tensor's rows to the step's idle_byte on the plan's device. */
attn_status zero_tensor(attn_plan *plan, const struct step *step, const struct attn_tensor *tensor,
                        void *stream, struct attn_error *error);

/* validate.c */
/* Under validation: waits for what was enqueued, so that its error is reported by the call that
 * enqueued it, `status` being what the call would answer. Not while a capture goes on. */
attn_status wait_for_device_errors(const attn_plan *plan, void *stream, attn_status status,
                                   struct attn_error *error);
/* The host's copy of an array, against the device's, which it can read; `bound`: no less. */
attn_status validate_copy(const char *field, const int32_t *device, const int32_t *host,
                          int32_t count, bool bound, struct attn_error *error);
attn_status validate_batch(const attn_plan *plan, struct attn_error *error);
/* The one of the plan's layers, which share tables, with the fewest blocks in a table. */
const attn_layer *plan_smallest(const attn_plan *plan, int32_t table);
/* What the engine's parallel_for did wrong since the last call, if the runtime has watched it. */
attn_status validate_workers(const attn_plan *plan, struct attn_error *error);
/* The row after the batch's last, where the host can read the device's: what follows is padding. */
int64_t validate_end_row(const attn_plan *plan);
/* NaN in rows first .. end - 1 of a tensor; in all rows of the batch, and there in the first heads
 * alone; in those of k or v that have a slot. */
attn_status validate_rows(const attn_plan *plan, const struct attn_tensor *tensor, int64_t first,
                          int64_t end, const char *name, struct attn_error *error);
attn_status validate_tensor(const attn_plan *plan, const struct attn_tensor *tensor,
                            const char *name, struct attn_error *error);
attn_status validate_heads(const attn_plan *plan, const struct attn_tensor *tensor, int64_t heads,
                           const char *name, struct attn_error *error);
attn_status validate_written(const attn_plan *plan, const struct attn_tensor *tensor,
                             const char *name, struct attn_error *error);
/* The place of one of `count` numbers from `first` to end - 1, of `size` bytes each, that stands
 * before it, too, or -1. */
int64_t find_second(const void *numbers, size_t size, int64_t count, int64_t first, int64_t end);
/* What is written: no two elements in one place. NULL is. */
attn_status validate_apart(const struct attn_tensor *tensor, const char *name,
                           struct attn_error *error);

#endif
