/* SPDX-License-Identifier: Apache-2.0 */
/* An instance, what is prepared for a layer, and the slots of the kernel table. */
#ifndef GPU_HOST_INSTANCE_H
#define GPU_HOST_INSTANCE_H

#include "common/number.h"
#include "common/tensors.h"
#include "gpu/output.h"
#include "gpu/params.h"

struct gpu_matrix_kernels;
struct gpu_prefill;
struct gpu_latent_kernel;
struct gpu_delta_chunks;
struct gpu_gemm;
struct gpu_index_scores;
struct gpu_list_kernel;

struct attn_instance {
    const struct attn_host *host;
    const struct attn_kernels *kernels; /* gpu_vendor's, unless add_kernels sets another */
    struct gpu_device device;
    const struct gpu_matrix_kernels *matrix; /* NULL: the plain kernel serves everything */
    const struct gpu_prefill *prefill; /* NULL: no kernel of its own for requests of many rows */
    const struct gpu_latent_kernel *latent;      /* NULL: no kernel of its own for latent rows */
    const struct gpu_delta_chunks *chunks;       /* NULL: no kernels of its own for gated delta */
    const struct gpu_gemm *gemm;                 /* NULL: the FMA kernels serve everything */
    const struct gpu_index_scores *index_scores; /* NULL: the same */
    const struct gpu_list_kernel *lists;         /* NULL: lists are always made units of slots */
    void *vendor;                                /* the plugin's own */
};

/* The slot that a state belongs to. */
enum gpu_way {
    GPU_WAY_ATTEND,
    GPU_WAY_LATENT,
    GPU_WAY_BOTH_CACHES,
    GPU_WAY_CHUNKS,
    GPU_WAY_INDEX,
    GPU_WAY_WITHOUT_PLAN
};

struct attn_prepared {
    int32_t way; /* enum gpu_way */
    int32_t num_kv_heads, group, padded_size;
    int32_t topk;      /* keys of a sparse layer's lists */
    int32_t invariant; /* batch_invariant of the layer */
    int32_t plain;     /* 1: the plain kernel only */
    int32_t narrow;    /* 1: the cache's elements have 8 bits or less */
    int32_t packed;    /* 1: 4 bits or less, int4, nvfp4 or TurboQuant */
    /* 1: of those, kernels of up to 8 rows run with three CTAs on a multiprocessor */
    int32_t dense;
    /* Bytes of a token's queries converted to 16 bits, if they come in 8; else 0. */
    int32_t query_bytes;
    int64_t out_bytes;      /* bytes of a token's output as numbers, if it is quantized; else 0 */
    int64_t copy_bytes;     /* what gpu_prefill copies, for the plugin's prefill */
    int32_t prefills;       /* 1: the plugin's prefill may serve the layer */
    int32_t few_rows;       /* rows of a request up to which it does not use the plugin's prefill */
    int32_t tokens_per_row; /* indexers: tokens of a row of the cache */
    int32_t lists;          /* lists of a token: an indexer's, or those attended over */
    int32_t listed;         /* keys of a list that is attended to; 0: there are none */
    int64_t unit_stride;    /* numbers that a list takes in the scratch */
    int64_t chunk_bytes;    /* scratch for a chunk of gated delta; 0: requests go token by token */
};

/* output.c: quantized outputs. */
/* Strides of rows of out in bytes; the dtype is that of numbers before quantization. */
struct gpu_tensor gpu_output_rows(const struct attn_attend_args *args);
struct gpu_output gpu_output_of(const struct attn_attend_args *args);
/* Whether kernels may write codes directly: groups are within heads, and codes of 4 dims are
 * aligned words. */
bool gpu_output_is_near(const struct attn_attend_args *args);
/* Where numbers are kept in the scratch until gpu_quantize_output writes their codes to out.
 * Returns NULL or the cause of a failure. */
struct gpu_tensor gpu_output_numbers(const struct attn_attend_args *args);
const char *gpu_quantize_output(const struct attn_attend_args *args);
/* numeric.c */
int32_t gpu_output_group(int32_t form); /* columns that share a scale; 0: not a form with groups */
const char *gpu_launch_quantize(const struct gpu_device *device,
                                const struct gpu_quantize_params *p, void *stream);

attn_status gpu_attend(const struct attn_attend_args *args, struct attn_error *error);
/* attend_mla, and attend_mla_sparse of layers with a topk. */
attn_status gpu_attend_mla(const struct attn_attend_args *args, struct attn_error *error);
attn_status gpu_recurrent(const struct attn_attend_args *args, struct attn_error *error);
attn_status gpu_index(const struct attn_attend_args *args, struct attn_error *error);
attn_status gpu_write_index(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status gpu_compress(const struct attn_attend_args *args, struct attn_error *error);
attn_status gpu_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                        struct attn_error *error);
void gpu_release(attn_instance *instance, attn_prepared *prepared);
attn_status gpu_schedule_size(const struct attn_schedule_size_args *args,
                              struct attn_schedule_size *size, struct attn_error *error);
attn_status gpu_make_schedule(const struct attn_attend_args *args, int32_t mode,
                              struct attn_error *error);
attn_status gpu_update_block_table(const struct attn_attend_args *args, struct attn_error *error);

attn_status gpu_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status gpu_rope_write_kv(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status gpu_gather_kv(const struct attn_gather_kv_args *args, struct attn_error *error);
/* latent.c: write_kv and gather_kv of MLA layers; `gather` comes without the cache.
 * gpu_latent_parts: the rows of a write as a head's key, the latent part, and its value, the rope
 * part. */
attn_status gpu_latent_parts(const struct attn_write_kv_args *args, struct gpu_write_params *p,
                             struct attn_error *error);
attn_status gpu_write_latent(const struct attn_write_kv_args *args, struct attn_error *error);
attn_status gpu_gather_latent(const struct attn_gather_kv_args *args,
                              const struct gpu_gather_params *gather, struct attn_error *error);
attn_status gpu_batched_gemm(const struct attn_batched_gemm_args *args, struct attn_error *error);
attn_status gpu_merge_states(const struct attn_merge_states_args *args, struct attn_error *error);
attn_status gpu_quantize(const struct attn_quantize_args *args, struct attn_error *error);
attn_status gpu_amax(const struct attn_amax_args *args, struct attn_error *error);
attn_status gpu_copy_blocks(const struct attn_copy_blocks_args *args, struct attn_error *error);
attn_status gpu_copy(const struct attn_copy_args *args, struct attn_error *error);
attn_status gpu_fill(const struct attn_fill_args *args, struct attn_error *error);
attn_status gpu_make_block_table(const struct attn_block_table_args *args,
                                 struct attn_error *error);

/* services.c: for engines without device memory of their own */
attn_status gpu_allocate_memory(const struct attn_memory_args *args, void **memory,
                                struct attn_error *error);
attn_status gpu_free_memory(const struct attn_memory_args *args, struct attn_error *error);
attn_status gpu_memory_device(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error);
attn_status gpu_create_stream(const struct attn_stream_args *args, void **stream,
                              struct attn_error *error);
attn_status gpu_create_event(const struct attn_event_args *args, void **event,
                             struct attn_error *error);
attn_status gpu_record_event(const struct attn_event_args *args, struct attn_error *error);
attn_status gpu_elapsed(const struct attn_event_args *args, int64_t *nanoseconds,
                        struct attn_error *error);
attn_status gpu_destroy_event(const struct attn_event_args *args, struct attn_error *error);
attn_status gpu_destroy_stream(const struct attn_stream_args *args, struct attn_error *error);
attn_status gpu_synchronize(const struct attn_stream_args *args, struct attn_error *error);
attn_status gpu_begin_capture(const struct attn_stream_args *args, struct attn_error *error);
attn_status gpu_end_capture(const struct attn_stream_args *args, void **graph,
                            struct attn_error *error);
attn_status gpu_launch_graph(const struct attn_stream_args *args, struct attn_error *error);
attn_status gpu_destroy_graph(const struct attn_stream_args *args, struct attn_error *error);

/* Tensors and views as kernel parameters. */
struct gpu_tensor gpu_tensor_of(const struct attn_tensor *tensor);
struct gpu_lse gpu_lse_of(const struct attn_tensor *tensor); /* NULL: none */
/* The scale of quantized queries. */
void set_query_scale(struct gpu_params *p, const struct attn_attend_args *args);
/* The storage of a row of K or V, form and element type; -1 if the kv_dtype is not served. */
int32_t gpu_stored_as(const struct attn_layer_desc *layer, bool is_v, int32_t *form);
struct gpu_cache gpu_cache_of(const struct attn_layer_desc *layer,
                              const struct attn_layer_params *params,
                              const struct attn_kv_view *view, bool is_v);
/* Contiguous keys or values [Tk, Hk, D]; the scale is of those in 8 bits. */
struct gpu_cache gpu_cache_of_tensor(const struct attn_layer_desc *layer,
                                     const struct attn_layer_params *params,
                                     const struct attn_tensor *tensor, bool is_v);
/* Bytes up to a multiple of 256, where parts of a workspace begin. */
static inline size_t gpu_round_up(size_t bytes)
{
    return (bytes + 255) & ~(size_t)255;
}

/* The bits of an address and its strides together: a multiple of what all of them are. */
static inline uint64_t gpu_tensor_bits(const struct gpu_tensor *t)
{
    return (uint64_t)(uintptr_t)t->data | (uint64_t)t->row | (uint64_t)t->head;
}

static inline uint64_t gpu_cache_bits(const struct gpu_cache *c)
{
    return (uint64_t)(uintptr_t)c->data | (uint64_t)c->block | (uint64_t)c->slot |
           (uint64_t)c->head;
}

/* Groups of `per` items each, at most `most`. */
static inline int64_t gpu_groups(int64_t items, int64_t per, int64_t most)
{
    int64_t groups = (items + per - 1) / per;
    return groups < 1 ? 1 : groups < most ? groups : most;
}

/* Groups of a kernel whose warps have one item each, limited for each multiprocessor. */
static inline int64_t gpu_warp_groups(const struct gpu_device *device, int32_t threads,
                                      int64_t items, int64_t most)
{
    return gpu_groups(items, threads / device->lanes, device->num_sms * most);
}

static inline attn_status device_status(const char *cause, const char *what,
                                        struct attn_error *error)
{
    return cause == NULL ? ATTN_OK : plugin_error(error, ATTN_ERROR_DEVICE, what, "%s", cause);
}

/* A slot that is the launch of one kernel, unless it has no items. */
static inline attn_status gpu_run(const struct attn_instance *instance, enum gpu_kernel kernel,
                                  int64_t items, int64_t groups, const void *params, void *stream,
                                  const char *slot, struct attn_error *error)
{
    const struct gpu_device *device = &instance->device;
    const char *cause =
        items > 0 ? gpu_device_launch(device, kernel, groups, params, stream) : NULL;
    return device_status(cause, slot, error);
}

#endif
