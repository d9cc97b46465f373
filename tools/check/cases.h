/* SPDX-License-Identifier: Apache-2.0 */
/* Which attends are tried: a covering array over what a backend declares, so that every pair of values of every two
 * factors that may stand together stands in some case. */
#ifndef CHECK_CASES_H
#define CHECK_CASES_H

#include <attn/capability.h>
#include <stdbool.h>

/* How the requests of a batch look. */
enum case_shape {
    SHAPE_DECODE,      /* one query each, ragged keys */
    SHAPE_SPECULATIVE, /* 1 + 3 queries each on the decode way */
    SHAPE_PREFILL,     /* keys are the queries */
    SHAPE_EXTEND,      /* queries behind a context */
    SHAPE_MIXED,       /* decodes first, then extends; an empty request between */
    SHAPE_CONTIGUOUS,  /* no cache: keys are k and v of the step */
    SHAPE_CROSS_KEYS,  /* no cache, keys of their own lengths */
    SHAPE_COUNT
};

/* The factors of a case. Each is an index into that factor's list of values. */
enum case_factor {
    FACTOR_SHAPE,
    FACTOR_DTYPE,
    FACTOR_KV_DTYPE,
    FACTOR_HEAD_SIZE,
    FACTOR_HEADS,
    FACTOR_BLOCK_SIZE,
    FACTOR_LAYOUT,
    FACTOR_SCALES,
    FACTOR_CAUSAL,
    FACTOR_WINDOW,
    FACTOR_CHUNK,
    FACTOR_SOFT_CAP,
    FACTOR_ALIBI,
    FACTOR_SINKS,
    FACTOR_STATIC_SINK,
    FACTOR_SPANS,
    FACTOR_TREE,
    FACTOR_TABLE_ROW,
    FACTOR_LSE,
    FACTOR_STRIDES,
    FACTOR_COUNT
};

struct factor_value {
    int32_t a;
    int32_t b;
};

struct factor {
    struct factor_value *values;
    int32_t count;
};

struct case_space {
    struct attn_backend_caps caps; /* borrowed */
    struct factor factors[FACTOR_COUNT];
};

struct attend_case {
    int32_t index[FACTOR_COUNT];
};

enum causal_value { CAUSAL_YES, CAUSAL_NO, CAUSAL_PER_REQUEST };

/* Lists the declared values of each factor. False when there is no memory. */
bool case_space_init(struct case_space *space, const struct attn_backend_caps *caps);
void case_space_finish(struct case_space *space);

/* A covering array; *cases is the caller's to free. `extra` random cases are added behind it. */
bool case_space_cover(const struct case_space *space, uint64_t seed, int32_t extra,
                      struct attend_case **cases, int32_t *num_cases);

static inline struct factor_value case_value(const struct case_space *space,
                                             const struct attend_case *c, int32_t factor)
{
    return space->factors[factor].values[c->index[factor]];
}

/* "decode,bf16,fp8_e4m3,d128,h8/2,b16,…", at most `size` bytes. */
void case_name(const struct case_space *space, const struct attend_case *c, char *name, size_t size);

#endif
