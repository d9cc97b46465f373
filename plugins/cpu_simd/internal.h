/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by the files of this plugin. */
#ifndef CPU_SIMD_INTERNAL_H
#define CPU_SIMD_INTERNAL_H

#include <math.h>
#include <stdbool.h>
#include <string.h>

#include <attn/draft/index_lists.h>
#include <attn/indexer.h>
#include <attn/recurrent.h>
#include <attn/mla.h>
#include <attn/plugin.h>

#include "common/number.h"
#include "common/tensors.h"
#include "cpu_simd/kernels.h"

#define E4M3_LARGEST 448.0
#define LN_2 0.69314718055994530942f

#define ITEM_ROWS 768         /* query rows of one work item at head size 128 */
#define ROW_MULTIPLE 16       /* rows of a gemm that all kernels compute alike */
#define DECODE_SCORE_ROWS 128 /* most query rows whose scores the decode path holds at once */
#define SPLIT_KEYS 256        /* a split part has at least so many */

struct attn_instance {
    const struct attn_host *host;
    const struct variant *variant;
};

/* Rows of codes that only staging can read; see codes.c. Those of nvfp4 are exact in bf16. */
enum row_coding {
    CODING_NONE = 0,
    CODING_NVFP4 = 1,
    CODING_LEVELS = 2, /* TurboQuant's rotated keys */
    CODING_STEPS = 3,  /* and its values */
    /* q8_0 and q4_0, ggml's blocks of 32 elements. Their steps lie inside the rows, so that rows
     * are staged in float32; a code times its step has more bits than bf16. */
    CODING_BLOCKS = 4,
    CODING_DS_MLA = 5, /* fp8_ds_mla's latent rows */
    CODING_DS_V4 = 6,  /* fp8_ds_v4's, exact in bf16 */
    CODING_MXFP4 = 7   /* indexers' keys in mxfp4, exact in bf16 */
};

/* How the rows of a cache's keys, or of its values, are stored. */
struct row_form {
    int32_t element;    /* enum element_type of a number or code */
    int32_t coding;     /* enum row_coding */
    int32_t bits;       /* bits of a code of TurboQuant or of ggml's blocks */
    bool nibbles;       /* int4: two codes in a byte, of rotated rows */
    bool head_scale;    /* fp8: a scale per tensor or head */
    bool row_scale;     /* a float32 next to each row */
    bool channel_scale; /* a float32 per head and channel */
};

/* Sizes that follow from a layer alone. */
struct layer_shape {
    const struct tile_kernels *kernels;
    int32_t num_heads; /* KV heads */
    int32_t group;
    int32_t depth;       /* head_size */
    int32_t width;       /* head_size_v */
    int32_t query_parts; /* 2: a query is followed by what rounding it to bf16 lost, a key by a copy
                            of itself */
    int32_t depth_padded; /* head_size of all query parts, padded */
    int32_t width_padded;
    int32_t item_rows; /* most rows of one item */
    bool batch_invariant;
    struct row_form keys;
    struct row_form values;
    int32_t activation; /* enum element_type of q */
    /* A row's bits do not depend on how many of its request's rows are computed with it: all go the
     * packed way, in whole tiles of columns and blocks of rows. */
    bool any_prefix;
    bool rounds; /* probabilities are rounded to fp8, relative to the row's largest */
    /* Places in a query's list, of the keys of all entries; 0: every key. */
    int32_t topk;
    int32_t entry_shift; /* keys of an entry: 1 << entry_shift */
    bool lists_per_head; /* each KV head has a list of its own */
    int32_t sink_len;
};

struct attn_prepared {
    struct layer_shape shape;
    struct attn_recurrent_desc gdn; /* a gated delta layer, which has no shape */
    bool is_gdn;
    bool compresses;                  /* a compressor, which has no shape either */
    struct attn_indexer_desc indexer; /* topk 0: another layer */
};

/* Key or value rows, paged or contiguous. Strides in bytes. */
struct row_source {
    const char *data;
    int64_t stride_block;
    int64_t stride_slot;
    int64_t stride_head;
    int64_t stride_pack;
    int32_t block_size; /* 0: contiguous */
    int32_t pack;       /* elements; 0: a row's elements are contiguous */
    int32_t element;
    int32_t row_elements;
    int32_t row_bytes; /* bytes of a row's elements */
    int32_t coding;    /* enum row_coding */
    int32_t bits;
    bool is_v;
    bool nibbles;
    bool row_scale;  /* a float32 for each row, which scores or probabilities are multiplied with */
    bool head_scale; /* a scale per tensor or head, which scores or outputs are multiplied with */
    int32_t copies;  /* copies of a staged row, one for each part of the queries */
    bool stage;      /* rows cannot be read in place */
    /* kernels of the decode path: those that read codes in place, or those for rows in the compute
     * type */
    const struct decode_kernels *decode;
    bool decode_codes;
    const char *scale; /* data next to rows: float32 scales, or the coding's parameters */
    int64_t scale_stride_block;
    int64_t scale_stride_slot;
    int64_t scale_stride_head;
};

/* Arguments of an MLA attend beyond attend's. */
struct latent_parts {
    int32_t rank;
    int32_t rope;
    const struct attn_tensor *q_latent; /* [T, Hq, rank], where q is NULL */
    const struct attn_tensor *q_rope;
    const int32_t *topk_indices; /* [T, topk], in a sparse run */
    int64_t topk_stride;
};

/* Lists of a run, by token and KV head. */
struct key_lists {
    const int32_t *entries;
    const int32_t *lengths; /* NULL: all are whole */
    int64_t token_stride;
    int64_t head_stride;
    int64_t length_stride;
};

/* One attend or its plan, with the arguments checked and resolved. */
struct attend_problem {
    const struct attn_instance *instance;
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_batch *batch;
    struct layer_shape shape;
    struct row_source keys;
    struct row_source values;
    bool causal;
    bool causal_per_request;
    int32_t q_element; /* enum element_type of q */
    bool terms;        /* scores need more than a factor */
    bool paged;
    const struct latent_parts *latent; /* NULL: no MLA */
    struct key_lists lists;            /* where shape.topk is not 0 */
};

/* Keys that one query row sees: low .. high-1. */
struct interval {
    int32_t low;
    int32_t high;
};

/* Part of the attention of a few tokens of one request over some of their keys. */
struct work_item {
    int32_t request;
    int32_t head; /* first KV head */
    int32_t num_heads;
    int32_t token; /* first query of the request */
    int32_t num_tokens;
    int32_t key_begin;
    int32_t key_end;
    int32_t partial; /* first row of its partial result, or -1: the item writes the output */
    int32_t decode;  /* 1: decode path */
};

/* Results of all heads of a group for some tokens of a request: rows are token * group + head of
 * the group. */
struct row_block {
    int32_t request;
    int32_t head; /* KV head */
    int32_t token;
    int32_t num_tokens;
    float *acc_o; /* [rows, width_padded] */
    float *row_max;
    float *row_sum;
};

/* Rows of an item's output, each of as many partial results as the item has parts. */
struct merge_item {
    int32_t first;     /* row of the first part's partial result */
    int32_t part_rows; /* from a part's row to the next part's */
    int32_t count;     /* parts */
    int32_t request;
    int32_t head;
    int32_t num_heads;
    int32_t token;
    int32_t num_tokens;
};

/* Upper bounds for batches within a plan's limits. */
struct needs {
    int32_t rows;         /* rows of one item */
    int32_t partial_rows; /* rows of all partial results */
};

/* Layout of schedule_host: header, items, their order, merges. */
struct attend_schedule {
    int32_t num_items;
    int32_t num_merges;
    int32_t max_items;
    int32_t max_merges;
    int32_t num_parts;        /* parts of items that were split */
    int32_t num_partial_rows; /* rows of their partial results */
    struct needs needs;
};

/* One worker's memory. */
struct attend_scratch {
    char *q, *keys, *values, *stage_keys, *stage_values, *zero_row;
    char *sink_q, *sink_rows; /* for layers with static sinks */
    float *acc_o, *scores, *row, *q_scale, *row_max, *row_sum, *scores_scale;
    float *key_scale, *value_scale;
    int32_t *low, *high; /* columns of the current tile that each row of the item sees */
    int32_t *token_low, *token_high; /* keys that each token of the item sees */
    int32_t *seen;                   /* [block of rows]: its acc_o has been written */
    int32_t *key_zero, *value_zero;
    struct flash_block *blocks; /* [blocks of rows] */
    const void **key_rows, **value_rows, **next_rows, **scale_rows;
};

/* elements.c */
extern const int32_t element_bytes[ELEMENT_COUNT];
int32_t element_of_any(const struct attn_tensor *tensor); /* -1: none of ours */
int32_t element_of_dtype(int32_t dtype);                  /* an ATTN_DTYPE_*'s; -1, too */

/* rows.c: rows of a cache in and out */
struct row_form row_form_of(int32_t kv_dtype, int32_t activation, bool is_v); /* element -1: none */
/* enum attn_scale_form of its K's or V's scales */
int32_t scale_form_of(const struct attn_layer_desc *layer, bool is_v);
/* [Hk, Dv], of int8_kv's values; NULL where the form has none */
const float *channel_scales(const struct layer_shape *shape,
                            const struct attn_layer_params *params);
/* Key or value of one slot and head, of whichever form; latent rows are written by latent.c. */
struct row_place {
    const struct variant *variant;
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_kv_view *view;
    const struct row_form *form;
    bool is_v;
    int64_t block;
    int64_t slot; /* slot within the block */
    int64_t head;
};
/* from and to `activation` elements, an enum element_type */
void row_write(const struct row_place *at, const char *source, int32_t activation);
void row_read(const struct row_place *at, char *out, int32_t activation);
/* Rows of a tile to be staged, and where to. */
struct stage {
    const struct attend_problem *problem;
    const struct row_source *source;
    char *memory;
    int32_t padded; /* elements of a staged row */
    int32_t n;
    int32_t first;                 /* key of the first row */
    const void **rows;             /* in: rows in the cache; out: staged rows */
    const void *const *scale_rows; /* scales of rows with data next to them */
    int64_t scale_offset;          /* bytes from scale_rows[i] */
    float *scales;                 /* scales of rows that have one each */
};
/* the rows' elements in the compute type, padded; the zero points of int4 leave their scales, and
 * those of TurboQuant's keys are written */
void stage_rows(const struct stage *stage);
/* whether its rows' scales are float32 next to them */
bool has_float_scales(const struct row_source *source);

/* codes.c: rows of nvfp4, TurboQuant, fp8_ds_mla and fp8_ds_v4 */
struct coded_row {
    int32_t coding;
    int32_t bits;
    bool is_v;
    int32_t n;
    int32_t pack;
    int64_t stride_pack;
    const char *codes;
    const uint8_t *kept; /* parameters of its slot and head */
    int64_t stride_slot; /* bytes from a slot's parameters to the next */
    int32_t slot;        /* mod 4 */
};
/* loads a row without its factor, and returns that: 1 but for TurboQuant's keys, which stay rotated
 */
float coded_row_load(const struct variant *variant, const struct coded_row *row, float *out);
void coded_row_write(const struct row_place *at, const float *values);
void coded_row_read(const struct row_place *at, float *values);
/* 16 values of nvfp4 in 8 bytes; returns the code of their scale */
uint8_t nvfp4_block(const float *x, double global, double largest, uint8_t *packed);
int32_t code_row_bytes(const struct row_form *form, int32_t n);
/* a power of two; 255: NaN */
float number_of_e8m0(uint8_t code);

/* int4.c */
const float *int4_signs(const struct attn_layer_params *params, bool is_v); /* NULL: none given */
/* signs NULL: all are 1, and the row is not divided by its size */
void int4_rotate_query(const struct variant *variant, const float *signs, float *row, int32_t n);
void int4_rotate_back(const struct variant *variant, const float *signs, float *row, int32_t n);
/* codes minus their zero point, n of them in pieces of `pack` */
void int4_codes(const struct variant *variant, int8_t *codes, const char *row, int32_t n,
                int32_t pack, int64_t stride_pack, int32_t zero);
/* two codes a byte into a row of the view */
void nibbles_write(const struct attn_kv_view *view, char *memory, const uint8_t *codes);
/* the row's scale, zero point included */
float int4_write(const struct variant *variant, const struct attn_kv_view *view, char *memory,
                 const float *values, const float *signs);

/* problem.c */
struct layer_shape shape_of_layer(const struct variant *variant,
                                  const struct attn_layer_desc *layer);
/* `tensors`: keys and values that are no cache are there, too. */
void problem_init(struct attend_problem *problem, const struct attn_attend_args *args,
                  const struct latent_parts *latent, bool tensors);
/* The keys that a token sees; in a sparse run entries of its list. */
struct interval row_interval(const struct attend_problem *problem, int32_t request, int32_t token);
/* query_factor: the layer's and queries' factor of a KV head's scores; key_factor: with that of
 * keys */
float query_factor(const struct attend_problem *problem, int32_t head);
float key_factor(const struct attend_problem *problem, int32_t head);
/* whether the caller wants a result of tokens token .. token+count-1 of the request */
bool rows_wanted(const struct attend_problem *problem, int32_t request, int32_t token,
                 int32_t count);
int32_t request_keys(const struct attend_problem *problem, int32_t request);
int32_t request_queries(const struct attend_problem *problem, int32_t request);
/* finds the addresses of rows first .. first+n-1 of a head, and of their scales if there are any */
void find_rows(const struct attend_problem *problem, const struct row_source *source,
               int32_t request, int32_t head, int32_t first, int32_t n, const void **rows,
               const void **scale_rows);
/* Finds the rows of places first .. first+n-1 of the item's list that its query sees, as find_rows;
 * returns their number. */
int32_t find_listed_rows(const struct attend_problem *problem, const struct row_source *source,
                         const struct work_item *item, int32_t first, int32_t n, const void **rows,
                         const void **scale_rows);
/* scales[i] = the float32 at scale_rows[i] + offset */
void load_scales(const void *const *scale_rows, int64_t offset, int32_t n, float *scales);

/* Applies the layer's terms to the scores of rows first_row .. first_row + rows - 1 of an item's
 * head, of keys first_key .. first_key + n - 1; `scale` turns them into natural units. */
void apply_score_terms(const struct attend_problem *problem, const struct work_item *item,
                       int32_t head, int32_t first_row, int32_t rows, int32_t first_key,
                       float scale, const float *key_scale, float *scores, int32_t n);
/* Multiplies rows of acc_o with what softmax_args.scores_scale says. */
void rescale_o(const struct attend_problem *problem, float *acc_o, const float *scores_scale,
               int32_t rows);

/* schedule.c */
size_t schedule_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                      int32_t num_threads);
size_t workspace_bytes(const struct layer_shape *shape, const struct attn_limits *limits,
                       int32_t num_threads);
attn_status schedule_make(const struct attend_problem *problem, const struct attn_limits *limits,
                          void *memory, int32_t num_threads, struct attn_error *error);
struct work_item *schedule_items(const struct attend_schedule *schedule);
int32_t *schedule_order(const struct attend_schedule *schedule);
struct merge_item *schedule_merges(const struct attend_schedule *schedule);
/* Places a worker's memory; returns its bytes. With memory NULL only these count. */
size_t place_scratch(struct attend_scratch *scratch, char *memory, const struct layer_shape *shape,
                     int32_t item_rows);
/* bytes of a tile's packed keys, or of its values */
size_t packed_bytes(const struct layer_shape *shape, bool keys);

/* finish.c: queries and results of both paths */
struct attend_run {
    struct attend_problem problem;
    const struct attn_attend_args *args;
    const struct attend_schedule *schedule;
    char *scratch;        /* memory of worker 0 */
    size_t scratch_bytes; /* one worker's */
    float *partials;      /* [partial_rows][width_padded], then row_max, then row_sum */
};
void load_queries(const struct attend_run *run, const struct work_item *item, int32_t head, char *q,
                  int32_t rows_padded);
/* row_max of rows that have been written or have nothing to write. */
#define ROW_IS_DONE INFINITY
/* Writes the results of one KV head of an item to the output or to its partial result, and
 * overwrites them. */
void finish_item(const struct attend_run *run, const struct work_item *item,
                 const struct row_block *rows, const struct attend_scratch *scratch);
void merge_partials(const struct attend_run *run, const struct merge_item *item,
                    const struct attend_scratch *scratch);

/* static_sink.c: attends to the layer's sinks; acc_o has to be as if the values had been float32 */
void add_static_sinks(const struct attend_run *run, const struct row_block *rows,
                      const struct attend_scratch *scratch);

/* recompute.c: a second softmax for rows that the kernels' softmax cannot hold */
/* The exponents of recomputed rows are lowered by this, so that sums of 2^32 values do not
 * overflow. It has bits below those of every row_max from 2^20 on: added to equal exponents it is
 * rounded alike, and to neighbours by as much. */
#define EXPONENT_SHIFT 40.015625f
/* Sets out_of_range[row] for each row; returns whether any is. */
bool find_rows_out_of_range(const struct attend_problem *problem, int32_t count,
                            const struct row_block *rows, int32_t *out_of_range);
/* Whether one of the first n scores of a row, in natural units, is too large for `softmax`. */
bool has_large_scores(const struct variant *variant, const float *scores, int32_t rows, int32_t n);
/* tile_kernels' softmax, with every exponent rounded alike and probabilities times
 * 2^-exponent_shift. */
void recompute_softmax(const struct tile_kernels *kernels, const struct softmax_args *args,
                       float exponent_shift);

/* tile.c, decode.c */
void run_packed(const struct attend_run *run, const struct work_item *item,
                const struct attend_scratch *scratch);
void run_decode(const struct attend_run *run, const struct work_item *item,
                const struct attend_scratch *scratch);
/* Recomputes rows of one KV head that the kernels could not hold, then writes the results. */
void finish_head_rows(const struct attend_run *run, const struct work_item *item,
                      const struct row_block *rows, const struct attend_scratch *scratch);
/* The packed path over some keys for one head of an item, added to the rows' results so far;
 * `recompute`: with recompute_softmax. */
void run_keys(const struct attend_run *run, const struct work_item *item,
              const struct row_block *rows, struct interval keys, bool recompute,
              const struct attend_scratch *scratch);

/* tree.c */
bool tree_row_visible(const struct attend_problem *problem, int32_t request, int32_t token,
                      int32_t key);
void tree_apply(const struct attend_problem *problem, int32_t request, int32_t token, int32_t first,
                int32_t begin, int32_t end, float *scores);

/* kernels */
attn_status simd_attend(const struct attn_attend_args *args, struct attn_error *error);
attn_status simd_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status simd_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status simd_merge_states(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status simd_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status simd_copy(const struct attn_copy_args *args, struct attn_error *error);
attn_status simd_fill(const struct attn_fill_args *args, struct attn_error *error);

/* attend.c, with the arguments of MLA already rewritten; parts NULL: no MLA. Lengths are readable
 * in every mode of a plan, so that each makes its schedule. */
attn_status run_attend(const struct attn_attend_args *args, const struct latent_parts *parts);
attn_status plan_attend(const struct attn_attend_args *args, const struct latent_parts *parts,
                        struct attn_error *error);

/* mla.c: attend_mla, and attend_mla_sparse of layers with a topk */
attn_status simd_attend_mla(const struct attn_attend_args *args, struct attn_error *error);
attn_status simd_plan_latent(const struct attn_attend_args *args, struct attn_error *error);

/* tile_prefetch.c: prefetches the rows of the next tile in shares between the gemms of this one,
 * since the hardware has few line buffers */
struct tile_prefetch {
    const void **rows; /* [TILE_KEYS] */
    int32_t lines;     /* lines of 64 bytes in a row */
    int32_t total;     /* lines in all; 0: no next tile */
    int32_t done;
    int32_t share;
};
void tile_prefetch_begin(struct tile_prefetch *prefetch, const struct attend_problem *problem,
                         const struct work_item *item, int32_t first, int32_t row_blocks);
void tile_prefetch_share(struct tile_prefetch *prefetch);
/* depth and columns of one gemm between two prefetches */
int32_t depth_step(const struct attend_problem *problem);
int32_t width_step(const struct attend_problem *problem);

/* latent.c */
attn_status simd_write_latent(const struct attn_write_kv_args *args);
attn_status simd_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error);

/* index.c */
attn_status simd_index(const struct attn_attend_args *args, struct attn_error *error);
size_t index_workspace_bytes(const struct layer_shape *shape, const struct attn_indexer_desc *x,
                             int32_t num_threads);
static inline const struct attn_indexer_desc *indexer_of(const struct attn_layer_desc *layer)
{
    return ext_of(layer->next, ATTN_EXT_INDEXER_DESC);
}

/* gdn.c */
attn_status simd_recurrent(const struct attn_attend_args *args, struct attn_error *error);
size_t gdn_workspace_bytes(const struct attn_recurrent_desc *desc, int32_t num_threads);

/* quantize.c */
attn_status simd_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status simd_amax(const struct attn_amax_args *args, struct attn_error *error);

attn_status simd_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error);

attn_status simd_probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                       struct attn_error *error);

/* supports.c */
attn_status simd_supports(const struct attn_supports_args *args,
                          const struct attn_reason_sink *reasons, struct attn_error *error);

#define INT4_ZERO_MASK 15u

/* splits the zero point off a scale */
static inline int32_t int4_zero(float *scale)
{
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    uint32_t kept = bits & ~INT4_ZERO_MASK;
    memcpy(scale, &kept, sizeof kept);
    return (int32_t)(bits & INT4_ZERO_MASK);
}

/* Calls `body` for items 0 .. count - 1, at least `grain` at a time. */
static inline attn_status run_parallel(const struct attn_instance *instance, int64_t count,
                                       int64_t grain,
                                       void (*body)(void *, int64_t, int64_t, int32_t),
                                       const void *argument)
{
    instance->host->parallel_for(instance->host->user, count, grain, body,
                                 (void *)(uintptr_t)argument);
    return ATTN_OK;
}

static inline void enter_variant(const struct variant *variant)
{
    if (variant->enter != NULL) {
        variant->enter();
    }
}

static inline void leave_variant(const struct variant *variant)
{
    if (variant->leave != NULL) {
        variant->leave();
    }
}

static inline int32_t round_up(int32_t x, int32_t multiple)
{
    return (x + multiple - 1) / multiple * multiple;
}

static inline int32_t max_i32(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static inline int32_t min_i32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static inline char *tensor_data(const struct attn_tensor *tensor)
{
    return (char *)tensor->data + tensor->byte_offset;
}

#endif
