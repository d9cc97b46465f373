/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens of one cache copied into another of a different layout, on their device: block sizes,
 * order of rows and heads, places of the planes and dtype may differ. It uses the public table
 * alone: an engine in C may be built with this source and common/device.c. `layout_convert` of the
 * Python package does the same. */
#ifndef TOOLS_COMMON_LAYOUT_CONVERT_H
#define TOOLS_COMMON_LAYOUT_CONVERT_H

#include <attn/api.h>

/* A bound layer: its description, its parameters (NULL: none), and what layer_cache_spec and
 * layer_cache_view gave. */
struct layout_side {
    const struct attn_layer_desc *layer;
    const struct attn_layer_params *params;
    const struct attn_cache_spec *specs;
    const struct attn_kv_view *views;
    int32_t num_caches;
};

/* Tokens 0 to num_tokens - 1 of one request: its rows of the two block tables, in host memory. No
 * block of the source stands there twice. */
struct layout_tokens {
    const int32_t *source_blocks;
    const int32_t *target_blocks;
    int64_t num_tokens;
};

/* Copies K and V of these tokens. Between caches of one dtype, f32, f16, bf16 or fp8 of equal
 * scales, all bits arrive. Any other number is rounded to the target's dtype; one of a quantized
 * source is first read in the activations' dtype (exact where its scale is a power of two), a -0
 * then as 0, and a token with a NaN as NaN.
 *
 * Both caches lie on `device` and share no memory, and no work on them is in flight; the copy is
 * done on return. Scratch is at most 512 KiB and 1,024 tokens' K, V and q. The runtime's selection
 * text chooses the backend. Refused by name: layers that are not K and V alone (MLA, recurrent
 * layers), other heads or head sizes, another `rope`, sources in packs, and sources of 4 bits or of
 * a dtype whose K and V differ in form. */
attn_status layout_convert(const struct attn_api *api, attn_runtime *runtime,
                           struct attn_device device, const struct layout_side *source,
                           const struct layout_side *target, const struct layout_tokens *tokens,
                           struct attn_error *error);

#endif
