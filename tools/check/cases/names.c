/* SPDX-License-Identifier: Apache-2.0 */
/* What cases are called. */
#include <stdio.h>
#include <string.h>

#include "cases/cases.h"
#include "common/names.h"

static const char *const shapes[] = {"decode", "speculative", "long_decode", "prefill",
                                     "extend", "mixed",       "long_extend", "shared",
                                     "cross",  "contiguous",  "cross_keys"};
static const char *const encoders[] = {"encoder.", "", "mm_encoder."}; /* "": paged, too */
static const char *const causal[] = {"causal", "bidirectional", "causal_per_request",
                                     "causal_overridden"};
/* Names of the switches, in the order of the factors. */
static const char *const switches[] = {"window",      "chunk", "soft_cap",    "alibi", "sinks",
                                       "static_sink", "spans", "tree",        "query", "p_scale",
                                       "nan",         "huge",  "fast_prefill"};
_Static_assert(sizeof switches / sizeof *switches == FACTOR_LAST_SWITCH - FACTOR_FIRST_SWITCH + 1,
               "a name for every switch");

void case_name(const struct case_space *space, const struct attend_case *c, char *name, size_t size)
{
    struct factor_value v[FACTOR_COUNT];
    case_values(space, c, v);
    const int32_t kv_v = v[FACTOR_KV_DTYPE].b;
    int used = snprintf(name, size, "attend.%s%s.%s.%s%s%s.d%dx%d.h%d-%d.b%d.%s.%s",
                        encoders[v[FACTOR_ENCODER].a], shapes[v[FACTOR_SHAPE].a],
                        dtype_name(v[FACTOR_DTYPE].a), kv_dtype_name(v[FACTOR_KV_DTYPE].a),
                        kv_v != 0 ? "-" : "", kv_v != 0 ? kv_dtype_name(kv_v) : "",
                        v[FACTOR_HEAD_SIZE].a, v[FACTOR_HEAD_SIZE].b, v[FACTOR_HEADS].a,
                        v[FACTOR_HEADS].b, v[FACTOR_BLOCK_SIZE].a, layout_name(v[FACTOR_LAYOUT].a),
                        causal[v[FACTOR_CAUSAL].a]);
    for (int32_t i = FACTOR_FIRST_SWITCH; i <= FACTOR_LAST_SWITCH; i++) {
        if (v[i].a != 0 && used > 0 && (size_t)used < size) {
            used += snprintf(name + used, size - (size_t)used, "+%s%lld",
                             switches[i - FACTOR_FIRST_SWITCH],
                             (long long)v[i].a + 100 * (long long)v[i].b);
        }
    }
    if (used > 0 && (size_t)used < size) {
        snprintf(name + used, size - (size_t)used, ".s%d%d%d%d.r%d.n%d.f%d.w%d.l%d.q%d",
                 v[FACTOR_SCALES].a, v[FACTOR_SCALES].b, v[FACTOR_SCALE_PLACE].a,
                 v[FACTOR_SCALE_SOURCE].a, v[FACTOR_TABLE_ROW].a, v[FACTOR_LENGTHS].a,
                 v[FACTOR_FIRST_ROW].a, v[FACTOR_WRITE].a, v[FACTOR_LSE].a, v[FACTOR_STRIDES].a);
    }
}

static size_t common_prefix(const struct case_space *space, const struct attend_case *c,
                            const char *wanted)
{
    char name[CASE_NAME_SIZE];
    size_t same = 0;
    case_name(space, c, name, sizeof name);
    while (name[same] != '\0' && name[same] == wanted[same]) {
        same++;
    }
    return same;
}

/* A switch is on if its part is in the name. */
static void find_switch(const struct case_space *space, const char *wanted, int32_t factor,
                        struct attend_case *c)
{
    char part[64];
    for (int32_t i = 0; i < space->factors[factor].count; i++) {
        struct factor_value v = space->factors[factor].values[i];
        int length = snprintf(part, sizeof part, "+%s%d", switches[factor - FACTOR_FIRST_SWITCH],
                              v.a + 100 * v.b);
        const char *at = v.a != 0 ? strstr(wanted, part) : NULL;
        if (at != NULL && (at[length] == '+' || at[length] == '.')) {
            c->index[factor] = i;
            return;
        }
    }
}

bool case_of_name(const struct case_space *space, const char *wanted, struct attend_case *c)
{
    /* in the order of the name; the encoder with the shape, in one place */
    static const int32_t order[] = {FACTOR_SHAPE,       FACTOR_DTYPE,        FACTOR_KV_DTYPE,
                                    FACTOR_HEAD_SIZE,   FACTOR_HEADS,        FACTOR_BLOCK_SIZE,
                                    FACTOR_LAYOUT,      FACTOR_CAUSAL,       FACTOR_SCALES,
                                    FACTOR_SCALE_PLACE, FACTOR_SCALE_SOURCE, FACTOR_TABLE_ROW,
                                    FACTOR_LENGTHS,     FACTOR_FIRST_ROW,    FACTOR_WRITE,
                                    FACTOR_LSE,         FACTOR_STRIDES};
    char name[CASE_NAME_SIZE];
    *c = (struct attend_case){{0}};
    for (int32_t i = FACTOR_FIRST_SWITCH; i <= FACTOR_LAST_SWITCH; i++) {
        find_switch(space, wanted, i, c);
    }
    for (size_t o = 0; o < sizeof order / sizeof *order; o++) {
        struct attend_case best = *c, now = *c;
        int32_t i = order[o];
        size_t most = 0;
        for (int32_t k = 0; k < space->factors[i].count; k++) {
            int32_t encoders_too = i == FACTOR_SHAPE ? space->factors[FACTOR_ENCODER].count : 1;
            for (int32_t e = 0; e < encoders_too; e++) {
                now.index[i] = k;
                now.index[FACTOR_ENCODER] = i == FACTOR_SHAPE ? e : c->index[FACTOR_ENCODER];
                size_t same = common_prefix(space, &now, wanted);
                best = same > most ? now : best;
                most = same > most ? same : most;
            }
        }
        *c = best;
    }
    case_name(space, c, name, sizeof name);
    return strcmp(name, wanted) == 0;
}
