/* SPDX-License-Identifier: Apache-2.0 */
/* The vendor's table: a dozen kernels on tensors. Every slot may be NULL, which means unsupported
 * and must agree with attn_backend_caps.kernels.
 *
 * Kernels are asynchronous on args->stream (a CPU backend is done on return), allocate nothing,
 * take no lock, and leave the caller's current device, locale and rounding mode as found. They may
 * be called from many threads at once, never with the same plan memory. `error` may be NULL; it is
 * written only on failure. */
#ifndef ATTN_KERNELS_H
#define ATTN_KERNELS_H

#include "cache_kernels.h"
#include "device_memory.h"
#include "numeric_kernels.h"
#include "status.h"

/* The table. prepare .. schedule serve attend, attend_mla, attend_mla_sparse and recurrent alike
 * and are optional: a backend without them is stateless. */
struct attn_kernels {
    size_t struct_size;
    const struct attn_ext *next;
    attn_status (*attend)(const struct attn_attend_args *args, struct attn_error *error);
    attn_status (*write_kv)(const struct attn_write_kv_args *args, struct attn_error *error);
    attn_status (*merge_states)(const struct attn_merge_states_args *args,
                                struct attn_error *error);
    attn_status (*rope_write_kv)(const struct attn_write_kv_args *args, struct attn_error *error);
    attn_status (*attend_mla)(const struct attn_attend_args *args, struct attn_error *error);
    attn_status (*attend_mla_sparse)(const struct attn_attend_args *args, struct attn_error *error);
    attn_status (*gather_kv)(const struct attn_gather_kv_args *args, struct attn_error *error);
    attn_status (*recurrent)(const struct attn_attend_args *args, struct attn_error *error);
    attn_status (*batched_gemm)(const struct attn_batched_gemm_args *args,
                                struct attn_error *error);
    attn_status (*quantize)(const struct attn_quantize_args *args, struct attn_error *error);
    attn_status (*amax)(const struct attn_amax_args *args, struct attn_error *error);
    attn_status (*copy_blocks)(const struct attn_copy_blocks_args *args, struct attn_error *error);
    /* bytes from source to destination on the stream. Host memory may be pageable and is read
     * before return. */
    attn_status (*copy)(const struct attn_copy_args *args, struct attn_error *error);
    /* rows of `row_bytes`, `stride` bytes apart, set to `value`. */
    attn_status (*fill)(const struct attn_fill_args *args, struct attn_error *error);
    /* Before a plan, once per layer, phase and part, and again after parameters or caches were
     * bound again: choose the kernel, load its module. Not a step: may allocate from the host. NULL
     * on failure. */
    attn_status (*prepare)(const struct attn_prepare_args *args, attn_prepared **prepared,
                           struct attn_error *error);
    void (*release)(attn_instance *instance, attn_prepared *prepared); /* accepts NULL */
    /* Worst case for any batch within the limits. Not a step. */
    attn_status (*schedule_size)(const struct attn_schedule_size_args *args,
                                 struct attn_schedule_size *size, struct attn_error *error);
    /* Once per batch and group of layers that share a schedule: q, k, v, out, lse are NULL. Fills
     * schedule_host and, on the stream, workspace. A step: no allocation. `mode` is an
     * attn_plan_mode. */
    attn_status (*schedule)(const struct attn_attend_args *args, int32_t mode,
                            struct attn_error *error);
    /* args->batch has another block_table, block_table_row and slot_mapping; everything else as in
     * the last schedule. */
    attn_status (*update_block_table)(const struct attn_attend_args *args,
                                      struct attn_error *error);

    /* The device's memory, streams and graphs, see device_memory.h. Of each of the three groups all
     * slots are there or none; memory_device may stand alone. Not of caps.kernels. */
    /* *memory: at a multiple of 256 bytes. ATTN_ERROR_OUT_OF_MEMORY says how much is free. */
    attn_status (*allocate_memory)(const struct attn_memory_args *args, void **memory,
                                   struct attn_error *error);
    attn_status (*free_memory)(const struct attn_memory_args *args, struct attn_error *error);
    /* Whose memory lies at the address: its device's type and id; ATTN_DEVICE_CPU for what the
     * driver does not know; ATTN_DEVICE_CUDA_MANAGED, of every vendor, for what both the host
     * and this device may touch. */
    attn_status (*memory_device)(const struct attn_memory_args *args, struct attn_device *device,
                                 struct attn_error *error);
    /* A stream that waits for no other. */
    attn_status (*create_stream)(const struct attn_stream_args *args, void **stream,
                                 struct attn_error *error);
    attn_status (*destroy_stream)(const struct attn_stream_args *args, struct attn_error *error);
    /* Returns when the stream's work is done, with the error that it has met. */
    attn_status (*synchronize)(const struct attn_stream_args *args, struct attn_error *error);
    /* Between these two, what this thread enqueues on the stream is recorded and not run. A failed
     * end_capture has ended the capture, too. */
    attn_status (*begin_capture)(const struct attn_stream_args *args, struct attn_error *error);
    attn_status (*end_capture)(const struct attn_stream_args *args, void **graph,
                               struct attn_error *error);
    attn_status (*launch_graph)(const struct attn_stream_args *args, struct attn_error *error);
    attn_status (*destroy_graph)(const struct attn_stream_args *args, struct attn_error *error);

    /* Before a plan's attends, on its stream. Of caps.kernels. Not asked of a CPU, where the core
     * does it itself. */
    attn_status (*make_block_table)(const struct attn_block_table_args *args,
                                    struct attn_error *error);

    /* Both or neither: what the vendor keeps for one plan, of the layers that share a schedule, a
     * phase and a part. Made when the plan is, before its schedule_size, with `plan_state` NULL in
     * the arguments; schedule, update_block_table and attend get it; dropped with the plan. Not a
     * step: may allocate from the host. NULL on failure. */
    attn_status (*create_plan_state)(const struct attn_schedule_size_args *args,
                                     attn_plan_state **state, struct attn_error *error);
    void (*destroy_plan_state)(attn_instance *instance, attn_plan_state *state); /* accepts NULL */

    /* All or none: moments of a stream, for traces (ATTN_TRACE). A backend of a CPU has none: its
     * kernels are done on return. Never recorded in a capture. */
    attn_status (*create_event)(const struct attn_event_args *args, void **event,
                                struct attn_error *error);
    /* The moment when what the stream holds by now is done. An event may be recorded again. */
    attn_status (*record_event)(const struct attn_event_args *args, struct attn_error *error);
    /* Waits for `event`; *nanoseconds from `since`, recorded before it on any stream. */
    attn_status (*elapsed)(const struct attn_event_args *args, int64_t *nanoseconds,
                           struct attn_error *error);
    attn_status (*destroy_event)(const struct attn_event_args *args, struct attn_error *error);
};

ATTN_STATIC_ASSERT(sizeof(struct attn_kernels) == 304, "attn_kernels of ABI 0.3");

#endif
