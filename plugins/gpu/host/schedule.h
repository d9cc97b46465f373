/* SPDX-License-Identifier: Apache-2.0 */
/* What a plan and the attends after it share on the host. */
#ifndef GPU_HOST_SCHEDULE_H
#define GPU_HOST_SCHEDULE_H

#include <attn/recurrent.h>

#include "gpu/delta.h"
#include "gpu/host/instance.h"
#include "gpu/latent.h"

#define GPU_FEW_ROWS 32 /* of a request, which memory limits on every GPU */
/* The same where the plugin's prefill has to copy narrow keys and values to 16 bits first. On an
 * H200 the bytes of that cost as much as mma.sync over some 70 rows. */
#define GPU_FEW_COPIED_ROWS 127

/* Host part of a plan: a replay keeps it, since captured launches were made for it. */
struct schedule_host {
    int32_t tile_rows;
    int32_t by_item;
    int32_t fast;     /* 1: the plugin's attend of latent rows */
    int32_t fast_few; /* 1: its way for few rows */
    int32_t num_reqs;
    int32_t num_rows;      /* of q, from its first */
    int64_t num_row_tiles; /* upper bound */
    int32_t num_tokens;    /* padding included */
    int32_t request_rows;  /* of a request at most: its queries times the group */
    /* Requests of more than few_rows rows go the plugin's prefill, the others the common way;
     * neither is launched where it would have none. */
    int32_t few_rows;
    int32_t has_many, has_few;
    int32_t prefill_sms;  /* multiprocessors of the plugin's prefill next to the common way's */
    int32_t part_tiles;   /* of its items, of which longer ones are cut into parts; 0: none is */
    int32_t prefill_rows; /* of its items, at most */
    int64_t copied_rows;  /* upper bound of the plugin's prefill, for a head */
    int32_t has_steps;    /* of gated delta: requests of one token, which are not among the few */
};

/* A plugin's matrix kernels, which work through segments of a schedule. Without them every attend
 * is that of gpu/kernels/plain.cpp, which needs no schedule. */
struct gpu_matrix_kernels {
    /* The rows of an item and whether a segment is of one item: sets tile_rows and by_item. */
    void (*choose_rows)(const struct attn_prepared *prepared, const struct attn_batch *batch,
                        struct schedule_host *plan);
    /* Keys of a tile, and groups of a multiprocessor, for items of such rows. */
    int32_t (*tile)(const struct attn_prepared *prepared, bool cached, int32_t tile_rows);
    int32_t (*groups_of_sm)(const struct attn_attend_args *args);
    /* Whether they take these arguments. */
    bool (*serves)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Whether the output's codes are written, too, where gpu_output_is_near; NULL: never. */
    bool (*writes_codes)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* Launches the attend of arguments that are served: gpu_output_of says what it writes.
     * shared: the launch before it is the plugin's prefill, of this attend, on its share of the
     * multiprocessors; both may run at the same time. NULL or the cause of a failure. */
    const char *(*attend)(const struct attn_attend_args *args, const struct gpu_params *p,
                          bool shared);
};

/* matrix.c: choose_rows of attends with rows of 16 and 64: a decode has a stream of rows of 16,
 * other batches one of rows of 64, which share a key's reading. */
void gpu_choose_rows(const struct attn_prepared *prepared, const struct attn_batch *batch,
                     struct schedule_host *plan);
/* Whether attends that load 16 bytes at a time, count rows' offsets in 16 bytes and 31 bits, and
 * know no ALiBi, spans, trees, float32, 4-bit rows, rounded probabilities and packed layouts can
 * take these arguments. Queries are of 16 bits, or in e4m3 as their cache is. */
bool gpu_loads_wide(const struct attn_attend_args *args, const struct gpu_params *p);

/* A faster way for requests of many rows (query, head of the group). What it computes of a request
 * depends on its own lengths, the layer and the tensors alone: batch-invariant layers take it. */
struct gpu_prefill {
    const char *(*load)(const struct gpu_device *device);
    /* Bytes of the copies in 16 bits that it makes of a key and its value of one KV head; 0: none
     */
    int64_t (*copy_bytes)(const struct attn_layer_desc *layer, const struct attn_kv_view *k_cache);
    /* Whether a plan may give it such requests of this layer and cache. */
    bool (*serves)(const struct attn_attend_args *args);
    /* Whether the workspace has room for this batch, whose numbers the plan has; sets copied_rows.
     */
    bool (*fits)(const struct attn_attend_args *args, int32_t mode);
    /* Whether such requests of this batch keep the device busy. */
    bool (*pays)(const struct attn_attend_args *args);
    /* Multiprocessors that such requests of this batch should have next to the others, which the
     * common way attends at the same time; 0: one after the other. */
    int32_t (*share)(const struct attn_attend_args *args);
    /* Tiles of keys that its items of this batch, which has no other requests, should have at most;
     * longer ones it cuts into parts. 0: as many as they have. */
    int32_t (*cut)(const struct attn_attend_args *args);
    /* Workspace behind the common schedule's. */
    size_t (*bytes)(const struct attn_prepared *prepared, const struct attn_limits *limits);
    /* Launches what makes its schedule. NULL or the cause of a failure. */
    const char *(*plan)(const struct attn_attend_args *args, const struct gpu_problem *problem,
                        char *memory);
    /* Whether it takes queries of 8 bits as they are; else they come widened. */
    bool (*takes_query)(const struct gpu_params *p);
    /* Whether it writes an output's codes, too, where gpu_output_is_near. */
    bool (*writes_codes)(const struct attn_attend_args *args, const struct gpu_params *p);
    /* False: it cannot take these tensors, and nothing was launched. It writes what gpu_output_of
     * says. shared: on its share of the multiprocessors, since the common way's launch follows. */
    bool (*attend)(const struct attn_attend_args *args, const struct gpu_params *p, char *memory,
                   bool shared, const char **cause);
};

/* A faster attend of latent rows. Without one it is that of gpu/kernels/latent.cpp. */
struct gpu_latent_kernel {
    int32_t rows; /* of an item at most */
    const char *(*load)(const struct gpu_device *device);
    /* Whether a plan may give it this layer and batch. */
    bool (*serves)(const struct attn_attend_args *args);
    /* Sets tile_rows, the rows of an item, and fast_few of such a plan. */
    void (*choose_rows)(const struct attn_attend_args *args, struct schedule_host *plan);
    /* Launches the attend of what was planned for it. NULL or the cause of a failure. */
    const char *(*attend)(const struct attn_attend_args *args, const struct gpu_latent_params *p);
};

/* A faster way for requests of many tokens of gated delta layers. Without one they go token by
 * token. What it computes of a request depends on its own length, the layer and the tensors alone.
 */
struct gpu_delta_chunks {
    int32_t tokens; /* the fewest of such a request */
    const char *(*load)(const struct gpu_device *device);
    /* Of scratch for a chunk of a layer; 0: it serves none of its requests. */
    int64_t (*chunk_bytes)(const struct gpu_device *device, const struct attn_recurrent_desc *desc,
                           int32_t dtype);
    /* Chunks that there is scratch for, for such a batch. */
    int64_t (*num_chunks)(int64_t reqs, int64_t tokens);
    /* Whether it takes these arguments. */
    bool (*takes)(const struct gpu_delta_params *p);
    /* Whether requests of one token have a kernel of their own for these arguments, which rolls
     * their windows, too, and its launch. */
    bool (*takes_steps)(const struct gpu_device *device, const struct gpu_delta_params *p);
    const char *(*run_steps)(const struct gpu_device *device, const struct gpu_delta_params *p,
                             void *stream);
    /* Whether it rolls the windows of its requests, too. */
    bool (*rolls)(const struct gpu_device *device);
    /* Launches what serves its requests; chunked_from is set. NULL or the cause of a failure. */
    const char *(*run)(const struct gpu_device *device, const struct gpu_delta_params *p,
                       int64_t chunk_bytes, char *memory, void *stream);
};

/* Rows of an item of that kernel, at most `most`: as many of a query's heads as divide them. */
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
/* What layer, parameters and batch say. */
void set_problem(struct gpu_problem *p, const struct attn_attend_args *args);
/* What the plan kernel and the attend kernels read alike. */
void set_schedule(struct gpu_schedule *s, const struct attn_attend_args *args);
/* The scale of quantized queries. */
void set_query_scale(struct gpu_params *p, const struct attn_attend_args *args);
/* Where the plugin's prefill has its part of a plan's workspace. */
char *prefill_memory(const struct attn_attend_args *args);

#endif
