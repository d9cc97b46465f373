/* SPDX-License-Identifier: Apache-2.0 */
/* The probe of plugins for NVIDIA GPUs. */
#ifndef GPU_CUDA_PROBE_H
#define GPU_CUDA_PROBE_H

#include <attn/plugin.h>

/* Reports every GPU that a CUDA program in this process would see and, on those of compute
 * capability 8.0 and later, the plugin's backend with these capabilities (gpu_report), on those of
 * 9.x with `hopper`. Starts no CUDA. ATTN_ERROR_ABSENT where no GPU is served. */
attn_status cuda_probe(const struct attn_probe_sink *sink, const struct attn_backend_caps *caps,
                       const struct attn_backend_caps *hopper, struct attn_error *error);

#endif
