/* SPDX-License-Identifier: Apache-2.0 */
/* What cases are called. */
#include <stdio.h>

#include "cases/cases.h"
#include "common/names.h"

static const char *const shapes[] = {"decode", "speculative", "long_decode", "prefill",
                                     "extend", "mixed",       "long_extend", "shared",
                                     "cross",  "contiguous",  "cross_keys"};
static const char *const encoders[] = {"encoder.", "", "mm_encoder."}; /* "": paged, too */
static const char *const causal[] = {"causal", "bidirectional", "causal_per_request",
                                     "causal_overridden"};
/* Of the switches, in the order of the factors. */
static const char *const switches[] = {"window", "chunk",       "soft_cap", "alibi",
                                       "sinks",  "static_sink", "spans",    "tree",
                                       "query",  "p_scale",     "nan",      "fast_prefill"};
_Static_assert(sizeof switches / sizeof *switches == FACTOR_LAST_SWITCH - FACTOR_FIRST_SWITCH + 1,
               "a name for every switch");

void case_name(const struct case_space *space, const struct attend_case *c, char *name, size_t size)
{
    struct factor_value v[FACTOR_COUNT];
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        v[i] = case_value(space, c, i);
    }
    int used = snprintf(name, size, "attend.%s%s.%s.%s.d%dx%d.h%d-%d.b%d.%s.%s",
                        encoders[v[FACTOR_ENCODER].a], shapes[v[FACTOR_SHAPE].a],
                        dtype_name(v[FACTOR_DTYPE].a), kv_dtype_name(v[FACTOR_KV_DTYPE].a),
                        v[FACTOR_HEAD_SIZE].a, v[FACTOR_HEAD_SIZE].b, v[FACTOR_HEADS].a,
                        v[FACTOR_HEADS].b, v[FACTOR_BLOCK_SIZE].a, layout_name(v[FACTOR_LAYOUT].a),
                        causal[v[FACTOR_CAUSAL].a]);
    for (int32_t i = FACTOR_FIRST_SWITCH; i <= FACTOR_LAST_SWITCH; i++) {
        if (v[i].a != 0 && used > 0 && (size_t)used < size) {
            used += snprintf(name + used, size - (size_t)used, "+%s%d",
                             switches[i - FACTOR_FIRST_SWITCH], v[i].a + 100 * v[i].b);
        }
    }
    if (used > 0 && (size_t)used < size) {
        snprintf(name + used, size - (size_t)used, ".s%d%d%d%d.r%d.n%d.f%d.w%d.l%d.q%d",
                 v[FACTOR_SCALES].a, v[FACTOR_SCALES].b, v[FACTOR_SCALE_PLACE].a,
                 v[FACTOR_SCALE_SOURCE].a, v[FACTOR_TABLE_ROW].a, v[FACTOR_LENGTHS].a,
                 v[FACTOR_FIRST_ROW].a, v[FACTOR_WRITE].a, v[FACTOR_LSE].a, v[FACTOR_STRIDES].a);
    }
}
