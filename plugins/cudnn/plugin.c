/* SPDX-License-Identifier: Apache-2.0 */
/* cudnn: decoder layers on NVIDIA GPUs through cuDNN's attention. The plugin's entry, probe and
 * instances. Caches are written, and states merged, by the kernels of gpu/kernels. */
#include "common/entry.h"
#include "cudnn/ask.h"
#include "cudnn/attend.h"
#include "cudnn/kernels.h"
#include "cudnn/library.h"
#include "gpu/cuda/probe.h"
#include "gpu/host/backend.h"

#define NAME "cudnn"
#define ALIGNMENT 16 /* bytes, of rows and caches */

static const struct attn_head_size_range head_sizes[] = {{{8, 512, 8}, {8, 512, 8}, 0}};
/* powers of two */
static const struct attn_range block_sizes[] = {{1, 1, 1},   {2, 2, 1},     {4, 4, 1},
                                                {8, 8, 1},   {16, 16, 1},   {32, 32, 1},
                                                {64, 64, 1}, {128, 128, 1}, {256, 256, 1}};

/* Probabilities have the activations' dtype: next to a sink with nearly all of the weight, those of
 * f16 are subnormal. */
static const struct attn_refused_combination refused[] = {
    {.terms = ATTN_TERM_SINKS,
     .dtypes = BIT(ATTN_DTYPE_F16),
     .why = "cuDNN rounds probabilities to f16, which is too coarse next to a sink"}};

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    struct cudnn_library library;
    char cause[CUDNN_CAUSE_BYTES], version[32];
    (void)host;
    if (!cudnn_open(&library, cause)) {
        return plugin_error(error, ATTN_ERROR_ABSENT, "library", "%s", cause);
    }
    snprintf(version, sizeof version, "%d.%d.%d", library.version / 10000,
             library.version / 100 % 100, library.version % 100);
    const struct attn_backend_caps caps = {
        .struct_size = sizeof caps,
        .variant = "",
        .version = version, /* the library's, whose kernels these are */
        .vendor = "NVIDIA",
        .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV | ATTN_KERNEL_ROPE_WRITE_KV |
                   ATTN_KERNEL_MERGE_STATES | ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_COPY_BLOCKS |
                   ATTN_KERNEL_COPY | ATTN_KERNEL_FILL | ATTN_KERNEL_MAKE_BLOCK_TABLE,
        .layer_kinds = BIT(ATTN_LAYER_DECODER) | BIT(ATTN_LAYER_ENCODER) | BIT(ATTN_LAYER_CROSS),
        .phases = BIT(ATTN_PHASE_PREFILL) | BIT(ATTN_PHASE_DECODE),
        .dtypes = BIT(ATTN_DTYPE_F16) | BIT(ATTN_DTYPE_BF16),
        .kv_dtypes = BIT(ATTN_KV_AUTO) | BIT(ATTN_KV_F16) | BIT(ATTN_KV_BF16),
        .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL | ATTN_TERM_SLIDING_WINDOW |
                 ATTN_TERM_SYMMETRIC_WINDOW | ATTN_TERM_SOFT_CAP | ATTN_TERM_SINKS,
        .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_CONTIGUOUS_KV | ATTN_FEATURE_LSE |
                    ATTN_FEATURE_BLOCK_TABLE_ROW | ATTN_FEATURE_UPDATE_BLOCK_TABLE |
                    ATTN_FEATURE_DEVICE_SEQ_LENS | ATTN_FEATURE_HOST_BOUNDS |
                    ATTN_FEATURE_FUSED_ROPE | ATTN_FEATURE_FUSED_ROPE_NORM |
                    ATTN_FEATURE_STEP_ALLOCATES,
        .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_SEPARATE_STRIDES,
        .layouts = BIT(ATTN_KV_LAYOUT_NHD) | BIT(ATTN_KV_LAYOUT_HND) |
                   BIT(ATTN_KV_LAYOUT_NHD_INNER) | BIT(ATTN_KV_LAYOUT_HND_INNER) |
                   BIT(ATTN_KV_LAYOUT_HND_ROWS),
        .k_scale_forms = BIT(ATTN_SCALE_NONE),
        .v_scale_forms = BIT(ATTN_SCALE_NONE),
        .p_scale_forms = BIT(ATTN_SCALE_NONE),
        .output_forms = BIT(ATTN_OUTPUT_PLAIN),
        .head_sizes = head_sizes,
        .num_head_sizes = 1,
        .block_sizes = block_sizes,
        .num_block_sizes = sizeof block_sizes / sizeof *block_sizes,
        .refused = refused,
        .num_refused = 1,
        .refused_stride = sizeof *refused,
        .preferred_layout = ATTN_KV_LAYOUT_HND,
        .preferred_block_size = 64,
        .graph_level = ATTN_GRAPH_ALWAYS,
        .graph_fill_seq_len = 1,
        .reorder_threshold = 1,
        .kv_alignment = ALIGNMENT,
        .io_alignment = ALIGNMENT,
        .rank = {40, 40},
    };
    return cuda_probe(sink, &caps, &caps, error);
}

static attn_status supports(const struct attn_supports_args *args,
                            const struct attn_reason_sink *reasons, struct attn_error *error)
{
    const struct attn_layer_desc *layer = args->layer;
    char cause[GRAPH_CAUSE_BYTES];
    (void)error;
    if (layer->kv_dtype != ATTN_KV_AUTO && layer->kv_dtype != layer->dtype) {
        reasons->refuse(reasons->user, "kv_dtype", layer->kv_dtype == ATTN_KV_F16 ? "f16" : "bf16",
                        "the dtype of the activations");
    } else if (!cudnn_has_engine(args, cause)) {
        reasons->refuse(reasons->user, "layer", layer->name, cause);
    }
    return ATTN_OK;
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **kernels, struct attn_error *error)
{
    const struct attn_host *host = args->host;
    char cause[CUDNN_CAUSE_BYTES];
    attn_status status = gpu_create(args, instance, kernels, error);
    if (status != ATTN_OK) {
        return status;
    }
    struct cudnn_library *library = host->allocate(host->user, sizeof *library, 64);
    (*instance)->vendor = library;
    if (library == NULL) {
        status =
            plugin_error(error, ATTN_ERROR_OUT_OF_MEMORY, "instance", "%zu bytes", sizeof *library);
    } else if (!cudnn_open(library, cause)) {
        status = plugin_error(error, ATTN_ERROR_ABSENT, "library", "%s", cause);
    } else {
        status = device_status(cudnn_load_kernels(&(*instance)->device), "instance", error);
    }
    return status;
}

static void destroy(attn_instance *instance)
{
    if (instance != NULL && instance->vendor != NULL) {
        instance->host->release(instance->host->user, instance->vendor,
                                sizeof(struct cudnn_library));
    }
    gpu_destroy(instance);
}

static attn_status create_or_destroy(const struct attn_create_args *args, attn_instance **instance,
                                     const struct attn_kernels **kernels, struct attn_error *error)
{
    attn_status status = create(args, instance, kernels, error);
    if (status != ATTN_OK) {
        destroy(*instance);
        *instance = NULL;
        *kernels = NULL;
    }
    return status;
}

static const struct attn_kernels cudnn_kernels = {
    .struct_size = sizeof cudnn_kernels,
    GPU_COMMON_SLOTS,
    .attend = cudnn_attend,
    .prepare = cudnn_prepare,
    .release = cudnn_release,
    .create_plan_state = cudnn_create_plan_state,
    .destroy_plan_state = cudnn_destroy_plan_state,
    .schedule_size = cudnn_schedule_size,
    .schedule = cudnn_schedule,
    .update_block_table = cudnn_update_block_table,
};

const struct gpu_vendor gpu_vendor = {
    .name = NAME, .device_type = ATTN_DEVICE_CUDA, .kernels = &cudnn_kernels};

PLUGIN_ENTRY(NAME, probe, supports, create_or_destroy, destroy)
