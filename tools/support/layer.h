/* SPDX-License-Identifier: Apache-2.0 */
/* Layers with an extension, as engines describe them. */
#ifndef SUPPORT_LAYER_H
#define SUPPORT_LAYER_H

#include <attn/layer.h>
#include <attn/mla.h>
#include <attn/recurrent.h>

/* Makes `layer` causal MLA, or a gated delta layer, of the extension's sizes: kind, heads, head
 * sizes and the usual scale. Sets the id and size of the extension,
 * float32 for a state dtype of 0, and links it, with what it links; `layer` has its dtype and,
 * for MLA, its query heads. */
void layer_set_mla(struct attn_layer_desc *layer, struct attn_mla_desc *mla);
void layer_set_recurrent(struct attn_layer_desc *layer, struct attn_recurrent_desc *recurrent);

#endif
