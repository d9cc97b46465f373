/* SPDX-License-Identifier: Apache-2.0 */
/* A backend for GDN in float32, with the least that one can have: the recurrence of cpu_ref without
 * a convolution, no drafts. It counts requests. */
#include <attn/recurrent.h>

#include "cpu_ref_backend.h"

ATTN_EXPORT int32_t seen_delta_requests; /* seen so far */

static attn_status gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    seen_delta_requests += args->batch->num_reqs;
    return real_kernels.recurrent(args, error);
}

static attn_status declare_backends(const struct attn_probe_sink *sink,
                                    const struct attn_backend_caps *cpu_ref,
                                    struct attn_error *error)
{
    const struct attn_recurrent_caps gdn = {.ext = {ATTN_EXT_CAPS_RECURRENT, 0, sizeof gdn, NULL},
                                            .head_size_k_max = 64,
                                            .head_size_v_max = 64};
    const struct attn_backend_caps caps = {.struct_size = sizeof caps,
                                           .next = &gdn.ext,
                                           .name = "gdn_without_fusion",
                                           .variant = "",
                                           .version = "0.1.0",
                                           .vendor = "you",
                                           .device = {ATTN_DEVICE_CPU, 0},
                                           .kernels = ATTN_KERNEL_RECURRENT,
                                           .layer_kinds = 1 << ATTN_LAYER_RECURRENT,
                                           .phases = 3,
                                           .dtypes = 1 << ATTN_DTYPE_F32,
                                           .terms = ATTN_TERM_CAUSAL,
                                           .output_forms = 1,
                                           .rank = {-1, -1}};
    return sink->backend(sink->user, &caps, error);
}

static void change_kernels(struct attn_kernels *kernels)
{
    *kernels = (struct attn_kernels){.struct_size = sizeof *kernels, .recurrent = gated_delta};
}

CPU_REF_BACKEND("gdn_without_fusion", create, NULL)
