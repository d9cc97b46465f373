/* SPDX-License-Identifier: Apache-2.0 */
/* Where the rows and scales of a case's cache lie. */
#ifndef CHECK_VIEWS_H
#define CHECK_VIEWS_H

#include "cases/cases.h"
#include "support/kv_format.h"

/* Bytes of both caches, and of the scales that stand apart. */
int64_t views_cache_bytes(const struct factor_value *v, int64_t num_blocks);
int64_t views_scales_bytes(const struct factor_value *v, int64_t num_blocks);
/* K's view or V's over `cache`, scales inline or in `scales`. */
void views_make(const struct factor_value *v, bool value, int64_t num_blocks, uint8_t *cache,
                uint8_t *scales, struct attn_kv_view *view);
/* Whether every stride is a multiple of `alignment`. */
bool views_aligned(const struct factor_value *v, int32_t alignment);

#endif
