/* SPDX-License-Identifier: Apache-2.0 */
/* One name for the layout of a layer's caches. Two layers of the same id hold the same bytes in a
 * block, so that one engine's blocks can be another's: what differs in dtype, sizes, order of rows,
 * scales, places of the planes, rotation of keys or drafted states differs in the id. Where the
 * memory lies, how many blocks it has and how far apart they are does not count. Only the public
 * headers and util/hash.h are needed here: an engine in C may be built with this source.
 * `layout_id` of the Python package gives the same. */
#ifndef TOOLS_COMMON_LAYOUT_ID_H
#define TOOLS_COMMON_LAYOUT_ID_H

#include <attn/draft/recurrent.h>
#include <attn/kv_cache.h>

#include <attn/layer.h>

#define LAYOUT_ID_SIZE 33     /* 32 hexadecimal digits */
#define LAYOUT_TEXT_SIZE 4096 /* of what is hashed */

/* Writes the layout of a layer's bound caches, specs[i] and views[i] being what layer_cache_spec
 * and layer_cache_view gave, in words: a line for the layer and one for each cache. */
void layout_text(const struct attn_layer_desc *layer, const struct attn_cache_spec *specs,
                 const struct attn_kv_view *views, int32_t num_caches, char text[LAYOUT_TEXT_SIZE]);

/* The id of such a text. */
void layout_id(const char *text, char id[LAYOUT_ID_SIZE]);

#endif
