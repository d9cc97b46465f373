/* SPDX-License-Identifier: Apache-2.0 */
/* One backend against one layer and phase: every reason why not, and what the core would compose.
 */
#ifndef CORE_SELECT_MATCH_H
#define CORE_SELECT_MATCH_H

#include "select/assignment.h"

/* Reasons as they are collected; text and array in the arena. */
struct reasons {
    struct arena *arena;
    const struct attn_host *host;
    struct attn_reason *items;
    int32_t count;
    int32_t capacity;
    bool failed; /* out of memory */
};

void reasons_add(struct reasons *reasons, const char *field, const char *asked,
                 const char *supported);

struct match {
    uint32_t composed;         /* ATTN_COMPOSE_* */
    int32_t graph_level;       /* the least level of the parts */
    int32_t block_size;        /* that this backend would take; 0: no cache */
    int32_t kernel_block_size; /* of its kernels: block_size, or a divisor of it */
};

/* Adds all failing reasons; none means that the backend can. `block_sizes` are the engine's
 * candidates for layers that leave it open. Does not ask the plugin's `supports`. */
void match_backend(const struct attn_backend_caps *caps, const struct layer *layer, int32_t phase,
                   const int32_t *block_sizes, int32_t num_block_sizes, struct match *match,
                   struct reasons *reasons);

/* What kernels of both backends take of an engine's blocks of `block_size`: that, or its largest
 * divisor that they declare (the preferred one, if it is one, first). 0: nothing. */
int32_t kernel_block_size(const struct attn_backend_caps *a, const struct attn_backend_caps *b,
                          const struct layer *layer, int32_t block_size);

bool range_holds(const struct attn_range *ranges, int32_t count, int32_t value);

/* No kernel cuts such a row: view.pack is 0 or the head's size. */
static inline bool kv_rows_are_whole(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_TURBOQUANT_K8V4;
}

#endif
