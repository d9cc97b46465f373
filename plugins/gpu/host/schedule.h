/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan and its attends share on the host. */
#ifndef GPU_HOST_SCHEDULE_H
#define GPU_HOST_SCHEDULE_H

#include <attn/recurrent.h>

#include "gpu/delta.h"
#include "gpu/host/instance.h"
#include "gpu/latent.h"

#define GPU_FEW_ROWS 32 /* rows of a request that is limited by memory on every GPU */
/* The same if the plugin's prefill must copy narrow keys and values to 16 bits first. On an H200
 * that costs as much as mma.sync over some 70 rows. */
#define GPU_FEW_COPIED_ROWS 127

/* The host part of a plan. A replay keeps it, since captured launches depend on it. */
struct schedule_host {
    int32_t tile_rows;
    int32_t by_item;
    int32_t fast;     /* 1: the plugin's kernel for latent rows */
    int32_t fast_few; /* 1: its kernel for few rows */
    int32_t num_reqs;
    int32_t num_rows;      /* rows of q, from its first */
    int64_t num_row_tiles; /* upper bound */
    int32_t num_tokens;    /* with padding */
    int32_t num_queries;   /* those of all requests, as far as the host knows */
    int32_t request_rows;  /* rows of a request, at most: its queries times the group */
    /* Requests of more than few_rows rows use the plugin's prefill, the others the common kernels;
     * a kernel without requests is not launched. */
    int32_t few_rows;
    int32_t has_many, has_few;
    /* multiprocessors of a prefill that runs concurrently with the common kernels */
    int32_t prefill_sms;
    /* tiles of prefill items from which on they may be cut into parts; 0: none is cut */
    int32_t part_tiles;
    int32_t prefill_rows; /* rows of prefill items, at most */
    int64_t copied_rows;  /* rows of copies for prefill, for each head, at most */
    int32_t max_seq_len;  /* indexers: the longest request */
    /* gated delta: requests of one token have their own kernel, and in layers with a ring those
     * whose others are drafts */
    int32_t has_steps, has_drafts;
};

/* A plugin's matrix kernels, which process segments of a schedule. Without them the plain kernel
 * serves every call, without a schedule. */
struct gpu_matrix_kernels {
    /* Chooses the rows of an item and whether a segment belongs to one item: sets tile_rows and
     * by_item. */
    void (*choose_rows)(const struct attn_prepared *prepared, const struct attn_batch *batch,
                        struct schedule_host *plan);
    /* Keys of a tile, and groups for each multiprocessor, for items of tile_rows rows. */
    int32_t (*tile)(const struct attn_prepared *prepared, bool cached, int32_t tile_rows);
    int32_t (*groups_of_sm)(const struct attn_attend_args *args);
    /* Whether the kernels serve these arguments. */
    bool (*serves)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Whether they also write quantized outputs where gpu_output_is_near; NULL: never. */
    bool (*writes_codes)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Whether `attend` reads lists of keys itself, whose units have not been made; NULL: never. */
    bool (*reads_lists)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Launches the attend of arguments that are served; gpu_output_of says what it writes. shared:
     * the previous launch is the plugin's prefill of the same attend, on its share of the
     * multiprocessors, and both may run concurrently. Returns NULL or the cause of a failure. */
    const char *(*attend)(const struct attn_attend_args *args, const struct gpu_params *p,
                          bool shared);
};

/* matrix.c: choose_rows for kernels with 16 and 64 rows: a decode is a stream with 16 rows, other
 * batches are one with 64 rows, which share the reading of keys. */
void gpu_choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                     struct schedule_host *plan);
/* Whether kernels can read keys and values that load 16 bytes at a time and count row offsets in 16
 * bytes and 31 bits. */
bool gpu_reads_wide(const struct attn_attend_args *args, const struct gpu_params *p);
/* The same, and for queries, if the kernels have no ALiBi, spans, trees, float32, 4-bit rows,
 * rounded probabilities or packed layouts. Queries have 16 bits, or e4m3 like their cache. */
bool gpu_loads_wide(const struct attn_attend_args *args, const struct gpu_params *p);

/* A faster kernel for requests of many rows (query, head of the group). Its results for a request
 * depend only on the request's lengths, the layer and the tensors, so batch-invariant layers use
 * it, too. */
struct gpu_prefill {
    /* Takes the place of GPU_FEW_ROWS for heads of up to 256 dims whose cache is not copied, but in
     * batches of few keys or, where lengths are unknown, few items; 0: GPU_FEW_ROWS. */
    int32_t few_rows;
    /* Loads the kernels that a layer may launch. Returns NULL or the cause of a failure. */
    const char *(*load)(const struct gpu_device *device, const struct attn_layer_desc *layer,
                        const struct attn_prepared *prepared);
    /* Bytes of its 16-bit copies of a key and its value of one KV head; 0, or NULL: it makes none.
     */
    int64_t (*copy_bytes)(const struct attn_layer_desc *layer, const struct attn_kv_view *k_cache);
    /* Whether it ever serves the layer; NULL: always. What it refuses needs no memory here. */
    bool (*may_serve)(const struct attn_prepare_args *args, const struct attn_prepared *prepared);
    /* Whether a plan may give it requests of this layer and cache; NULL: always. */
    bool (*serves)(const struct attn_attend_args *args);
    /* Whether the workspace has room for this batch, whose numbers the plan has; sets copied_rows.
     */
    bool (*fits)(const struct attn_attend_args *args, int32_t mode);
    /* Whether its requests of this batch keep the device busy. */
    bool (*pays)(const struct attn_attend_args *args);
    /* The multiprocessors that it should have while the common kernels run concurrently on the
     * others; 0, or NULL: one after the other. */
    int32_t (*share)(const struct attn_attend_args *args);
    /* The most tiles of an item for a batch without other requests; longer items are cut into
     * parts. 0: items are not cut; NULL: `fits` sets part_tiles. */
    int32_t (*cut)(const struct attn_attend_args *args);
    /* Its workspace, after the common schedule's, and its scratch, after the common kernels'. */
    void (*bytes)(const struct attn_instance *instance, const struct attn_prepared *prepared,
                  const struct attn_limits *limits, size_t *workspace, size_t *scratch);
    /* Launches the kernel that makes its schedule. Returns NULL or the cause of a failure. */
    const char *(*plan)(const struct attn_attend_args *args, const struct gpu_problem *problem,
                        char *memory);
    /* Whether it takes 8-bit queries directly; otherwise, or NULL, they are converted. */
    bool (*takes_query)(const struct gpu_params *p);
    /* Whether it writes quantized outputs where gpu_output_is_near; NULL: never. */
    bool (*writes_codes)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Returns false, without a launch, if it cannot serve these tensors. It writes what
     * gpu_output_of says. shared: runs on its share of the multiprocessors, since the common
     * kernels are launched next. */
    bool (*attend)(const struct attn_attend_args *args, const struct gpu_params *p, char *memory,
                   bool shared, const char **cause);
};

/* A faster kernel for latent rows. Without one, gpu/kernels/latent.cpp serves them. */
struct gpu_latent_kernel {
    int32_t rows; /* rows of an item, at most */
    const char *(*load)(const struct gpu_device *device);
    /* Whether a plan may give it this layer and batch. */
    bool (*serves)(const struct attn_attend_args *args);
    /* Sets tile_rows, the rows of an item, and fast_few of such a plan. */
    void (*choose_rows)(const struct attn_attend_args *args, struct schedule_host *plan);
    /* Launches a planned attend. Returns NULL or the cause of a failure. */
    const char *(*attend)(const struct attn_attend_args *args, const struct gpu_latent_params *p);
    /* The same for layers with attn_both_caches, whose second cache is `second` and addressed by
     * `table`: without a plan. takes_both: NULL, or why it does not take such views. */
    const char *(*load_both)(const struct gpu_device *device);
    const char *(*takes_both)(const struct attn_kv_view *view);
    const char *(*attend_both)(const struct attn_attend_args *args,
                               const struct gpu_latent_params *p, const struct gpu_cache *second,
                               const struct attn_batch_table *table);
};

/* Faster kernels for requests of many tokens of recurrent layers. Without them requests go token
 * by token. The results for a request depend only on its own length, the layer and the tensors. */
struct gpu_delta_chunks {
    int32_t tokens; /* the fewest tokens of such a request */
    const char *(*load)(const struct gpu_device *device);
    /* Scratch for a chunk of a layer; 0: the layer is not served. */
    int64_t (*chunk_bytes)(const struct gpu_device *device, const struct attn_layer_desc *layer);
    /* The number of chunks for which a batch needs scratch. */
    int64_t (*num_chunks)(int64_t reqs, int64_t tokens);
    /* Whether the kernels serve these arguments. */
    bool (*takes)(const struct gpu_delta_params *p);
    /* Whether requests of one token have a kernel of their own for these arguments, which also
     * rolls their windows; and its launch. */
    bool (*takes_steps)(const struct gpu_device *device, const struct gpu_delta_params *p);
    const char *(*run_steps)(const struct gpu_device *device, const struct gpu_delta_params *p,
                             void *stream);
    /* The same for layers with a ring, with up to ring_tokens tokens of a request of which all but
     * the first are drafts. Before kernels of chunks, its launch adds the ring's tokens of their
     * requests to the states in state_slots, and copies windows there. */
    int32_t ring_tokens;
    bool (*takes_rings)(const struct gpu_device *device, const struct gpu_ring_params *p);
    const char *(*run_rings)(const struct gpu_device *device, const struct gpu_ring_params *p,
                             void *stream);
    /* Whether the kernels also roll the windows of their requests. */
    bool (*rolls)(const struct gpu_device *device);
    /* Launches the kernels; chunked_from is set. Returns NULL or the cause of a failure. */
    const char *(*run)(const struct gpu_device *device, const struct gpu_delta_params *p,
                       int64_t chunk_bytes, char *memory, void *stream);
};

/* Rows of an item, at most `most`: a divisor of a query's heads. */
int32_t gpu_latent_rows(int32_t most, int32_t group);

/* Bytes from the beginning of the workspace, which keeps a plan's schedule, and of the scratch,
 * which holds what one attend writes and reads. */
struct layout {
    size_t segments, row_tiles, row_tile_start, key_tile_start, arrived, end;
    size_t parts, query, out, scratch_end;
    int32_t max_segments;
};

struct layout layout_of(const struct attn_instance *instance, const struct attn_prepared *prepared,
                        int64_t reqs, int64_t row_tiles, int64_t rows, bool by_item);
struct layout layout_of_plan(const struct attn_attend_args *args);
/* Sets the capacity of a schedule and its places in a workspace at `memory`; parts lie elsewhere.
 */
void place_schedule(struct gpu_schedule *s, const struct layout *at, char *memory);
/* index.c: what is prepared for an indexer, and the bytes of its scores. */
void gpu_prepare_index(const struct attn_layer_desc *layer, struct attn_prepared *prepared);
size_t gpu_index_scratch(const struct attn_prepared *prepared, const struct attn_limits *limits);
/* lists.c: attends over lists of keys. What is prepared; the bytes of a plan's units and lengths;
 * how many there are; the launch that makes them, at `memory`, after which p says where, unless
 * the planned attend reads the lists itself; and the lists of a batch. */
void gpu_prepare_lists(const struct attn_prepare_args *args, struct attn_prepared *prepared);
void gpu_count_lists(const struct attn_attend_args *args, struct gpu_problem *p);
size_t gpu_list_bytes(const struct attn_prepared *prepared, int64_t tokens);
const char *gpu_make_lists(const struct attn_attend_args *args, char *memory, bool planned,
                           struct gpu_params *p);
struct gpu_list_entries gpu_entries_of(const struct attn_attend_args *args);
/* Attends by the plugin's own kernel, which reads the lists themselves; returns false, without a
 * launch, if it does not serve the batch. */
bool gpu_attend_lists(const struct attn_attend_args *args, const struct gpu_params *p,
                      const char **cause);
/* What layer, parameters and batch say. */
void set_problem(struct gpu_problem *p, const struct attn_attend_args *args);
/* What the plan kernel and the attention kernels share. */
void set_schedule(struct gpu_schedule *s, const struct attn_attend_args *args);
/* The plugin's prefill's parts of a plan's workspace and, with its bytes, of the scratch. */
char *prefill_memory(const struct attn_attend_args *args);
char *prefill_scratch(const struct attn_attend_args *args, int64_t *bytes);

#endif
