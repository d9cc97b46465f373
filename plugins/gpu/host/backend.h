/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin on gpu/host hands to the core: a plugin adds its name, device and probe. */
#ifndef GPU_HOST_BACKEND_H
#define GPU_HOST_BACKEND_H

#include <attn/plugin.h>

extern const struct attn_backend_caps gpu_caps; /* without name and device */
extern const struct attn_kernels gpu_kernels;
/* Adds the reasons that the masks cannot say; a plugin's `supports`. */
attn_status gpu_supports(const struct attn_backend_caps *backend,
                         const struct attn_layer_desc *layer, int32_t phase,
                         const struct attn_reason_sink *reasons, struct attn_error *error);

#endif
