/* SPDX-License-Identifier: Apache-2.0 */
/* gather_heads and merge_heads of float32 in host memory, plainly, over another table's
 * collectives. */
#ifndef COLLECTIVES_HEADS_H
#define COLLECTIVES_HEADS_H

#include <attn/collectives.h>

enum { HEADS_MAX_RANKS = 16 };

/* The table `ranks` with both; one at a time. */
const struct attn_collectives *heads_over(const struct attn_collectives *ranks);
/* Merges so far. */
int64_t heads_merges(void);

#endif
