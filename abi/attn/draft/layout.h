/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): what libattn_layout.so.0, a small library next to the core, does
 * with layouts of caches. It uses the core's public table alone. docs/operators.md has examples. */
#ifndef ATTN_DRAFT_LAYOUT_H
#define ATTN_DRAFT_LAYOUT_H

#include "../api.h"

#define ATTN_LAYOUT_ID_SIZE 33     /* 32 hexadecimal digits */
#define ATTN_LAYOUT_TEXT_SIZE 4096 /* the lines that an id is a hash of */

/* A layer whose caches are bound, and blocks of one request in them. Borrowed during a call. */
struct attn_layout_side {
    size_t struct_size;
    attn_layer *layer;
    const struct attn_layer_desc *desc;     /* that it was selected with */
    const struct attn_layer_params *params; /* that it was bound with; NULL: none */
    /* host [num_blocks]: the request's row of the block table, each block once */
    const int32_t *blocks;
    int64_t num_blocks;
};

/* One name for the layout of a layer's caches. Two layers of the same id hold the same bytes in a
 * block, so that one engine's blocks can be another's: what differs in dtype, sizes, order of rows,
 * scales, places of the planes, rotation of keys or drafted states differs in the id. Where the
 * memory lies, how many blocks it has and how far apart they are does not count. `text`
 * [ATTN_LAYOUT_TEXT_SIZE] gets what is hashed: a line for the layer and one for each cache; `id`
 * [ATTN_LAYOUT_ID_SIZE]. Ids are the same in every release. */
ATTN_EXPORT attn_status attn_layout_id(const struct attn_api *api,
                                       const struct attn_layout_side *layer, char *id, char *text,
                                       struct attn_error *error);

/* Copies K and V of tokens 0 to num_tokens - 1 of a request from one layer's cache into another's,
 * on the device that both lie on: block sizes, order of rows and heads, places of the planes and
 * dtype may differ. Between caches of one dtype, f32, f16, bf16 or fp8 of equal scales, all bits
 * arrive. Any other number is rounded to the target's dtype; one of a quantized source is first
 * read in the activations' dtype (exact where its scale is a power of two), a -0 then as 0, and a
 * token with a NaN as NaN.
 *
 * The caches share no memory, and no work on them is in flight; the copy is done on return. Scratch
 * is 8 bytes for each slot between the first and the last of the request's blocks, and of a
 * quantized source 1,024 tokens' K, V and q. The runtime's selection text chooses the backend.
 * Refused by name: layers that are not K and V alone (MLA, recurrent layers), other heads or head
 * sizes, another `rope`, sources in packs, and sources of 4 bits or of a dtype whose K and V differ
 * in form. */
ATTN_EXPORT attn_status attn_layout_convert(const struct attn_api *api, attn_runtime *runtime,
                                            const struct attn_layout_side *source,
                                            const struct attn_layout_side *target,
                                            int64_t num_tokens, struct attn_error *error);

#endif
