/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin on gpu/host gives to the core: its name, its devices and, optionally, matrix
 * kernels. */
#ifndef GPU_HOST_BACKEND_H
#define GPU_HOST_BACKEND_H

#include <attn/plugin.h>
#include <stdbool.h>

#define GPU_MAX_FOUND 64

/* A GPU of the machine, by what can be read without its runtime. */
struct gpu_found {
    char name[96], arch[16], uuid[96]; /* arch: as compilers call it; uuid: empty if it has none */
    int32_t major, minor, num_sms;     /* 0: not known */
    int64_t memory_bytes;
    bool served; /* kernels run on it */
};

/* What a plugin defines. */
struct gpu_vendor {
    const char *name;
    int32_t device_type; /* type of all its devices */
    const struct attn_kernels *kernels;
    /* Adds the kernels that gpu/kernels lacks (`matrix`, `prefill`) to an instance whose device is
     * open; may be NULL. Returns NULL or the cause of a failure. */
    const char *(*add_kernels)(struct attn_instance *instance);
    /* Loads those that a layer may launch, so that no step does; NULL: all are loaded. Returns NULL
     * or the cause of a failure. */
    const char *(*load_kernels)(const struct attn_instance *instance,
                                const struct attn_layer_desc *layer,
                                const struct attn_prepared *prepared);
};

extern const struct gpu_vendor gpu_vendor;
extern const struct attn_backend_caps gpu_caps; /* without name and device */
extern const struct attn_kernels gpu_kernels;

/* The slots that all backends here have in common. */
#define GPU_COMMON_SLOTS                                                                           \
    .write_kv = gpu_write_kv, .merge_states = gpu_merge_states,                                    \
    .rope_write_kv = gpu_rope_write_kv, .quantize = gpu_quantize, .copy_blocks = gpu_copy_blocks,  \
    .copy = gpu_copy, .fill = gpu_fill, .allocate_memory = gpu_allocate_memory,                    \
    .free_memory = gpu_free_memory, .memory_device = gpu_memory_device,                            \
    .create_stream = gpu_create_stream, .destroy_stream = gpu_destroy_stream,                      \
    .synchronize = gpu_synchronize, .begin_capture = gpu_begin_capture,                            \
    .end_capture = gpu_end_capture, .launch_graph = gpu_launch_graph,                              \
    .destroy_graph = gpu_destroy_graph, .make_block_table = gpu_make_block_table,                  \
    .create_event = gpu_create_event, .record_event = gpu_record_event, .elapsed = gpu_elapsed,    \
    .destroy_event = gpu_destroy_event

/* Adds the reasons that masks cannot express; a plugin's `supports`. */
attn_status gpu_supports(const struct attn_supports_args *args,
                         const struct attn_reason_sink *reasons, struct attn_error *error);
/* Reports a device and, if it is served, the vendor's backend on it with gpu_caps or fewer. */
attn_status gpu_report(const struct attn_probe_sink *sink, const struct gpu_found *found,
                       int32_t id, const struct attn_backend_caps *caps);
/* A plugin's `create` and `destroy`. */
attn_status gpu_create(const struct attn_create_args *args, attn_instance **instance,
                       const struct attn_kernels **kernels, struct attn_error *error);
void gpu_destroy(attn_instance *instance);

#endif
