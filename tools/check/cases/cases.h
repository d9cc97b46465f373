/* SPDX-License-Identifier: Apache-2.0 */
/* Which attends are tried: a covering array over what a backend declares, so that every pair of
 * values of every two factors that may stand together stands in some case. */
#ifndef CHECK_CASES_H
#define CHECK_CASES_H

#include <attn/capability.h>
#include <attn/layer.h>
#include <stdbool.h>

#include "support/kv_format.h"

/* How the requests of a batch look. */
enum case_shape {
    SHAPE_DECODE,      /* one query each, ragged keys, perhaps a padding request without keys */
    SHAPE_SPECULATIVE, /* 1 + 3 queries each on the decode way */
    SHAPE_LONG_DECODE, /* few requests of many keys: split over the keys where a backend splits */
    SHAPE_PREFILL,     /* keys are the queries */
    SHAPE_EXTEND,      /* queries after a context */
    SHAPE_MIXED,       /* decodes first, then extends; an empty request between */
    SHAPE_LONG_EXTEND, /* few queries after a long context */
    SHAPE_SHARED,      /* requests whose first keys lie in the same blocks: a cascade, if it pays */
    SHAPE_CROSS,       /* every key in the cache already, as many as an encoder had tokens */
    SHAPE_CONTIGUOUS,  /* no cache: keys are k and v of the step */
    SHAPE_CROSS_KEYS,  /* no cache, keys of their own lengths */
    SHAPE_COUNT
};

#define CASE_NAME_SIZE 320

/* The factors of a case. Each is an index into that factor's list of values. */
enum case_factor {
    FACTOR_SHAPE,
    FACTOR_ENCODER, /* enum attn_encoder of layers without a cache */
    FACTOR_DTYPE,
    FACTOR_KV_DTYPE,
    FACTOR_HEAD_SIZE, /* D, Dv */
    FACTOR_HEADS,     /* Hq, Hk */
    FACTOR_BLOCK_SIZE,
    FACTOR_LAYOUT,
    FACTOR_SCALES,      /* attn_scale_form of k, of v */
    FACTOR_SCALE_PLACE, /* enum scale_place */
    /* scales per tensor: 0: device floats, 1: the host's, 2: neither, which reads as 1 */
    FACTOR_SCALE_SOURCE,
    FACTOR_CAUSAL,
    FACTOR_WINDOW, /* tokens; 1: on both sides */
    FACTOR_CHUNK,  /* size, lookback */
    FACTOR_SOFT_CAP,
    FACTOR_ALIBI,
    FACTOR_SINKS,
    FACTOR_STATIC_SINK, /* length */
    FACTOR_SPANS,       /* 1, prefix_lm_window */
    FACTOR_TREE,        /* enum attn_tree_mask, 1: one for the whole batch */
    FACTOR_QUERY,       /* dtype of a quantized query, its scale form; 0: plain */
    FACTOR_P_SCALE,
    FACTOR_NAN,  /* 1: a key and a value carry one */
    FACTOR_HUGE, /* enum huge_value; of backends on a CPU */
    FACTOR_FAST_PREFILL,
    FACTOR_LENGTHS,   /* enum lengths_value */
    FACTOR_FIRST_ROW, /* query_start_loc[0] */
    FACTOR_TABLE_ROW,
    FACTOR_WRITE, /* 1: attend writes the step's keys itself */
    FACTOR_LSE,   /* 0: not asked for, 1: heads outside, 2: tokens outside, with a gap */
    FACTOR_STRIDES,
    FACTOR_COUNT
};
#define FACTOR_FIRST_SWITCH FACTOR_WINDOW /* these have "off" as their first value */
#define FACTOR_LAST_SWITCH FACTOR_FAST_PREFILL

enum causal_value {
    CAUSAL_YES,
    CAUSAL_NO,
    CAUSAL_PER_REQUEST,
    CAUSAL_OVERRIDDEN /* a causal layer in a batch that says it is not */
};
enum lengths_value {
    LENGTHS_EXACT,
    LENGTHS_BOUNDS,
    LENGTHS_DEVICE,
    LENGTHS_HOST_BOUNDS /* per request, see problem_copy_loosen */
};
enum huge_value {
    HUGE_NONE,
    HUGE_SCORES, /* needles score 1e10 */
    HUGE_VALUES  /* whose sum is no float32 although their mean is */
};
enum scale_place { SCALES_INLINE, SCALES_APART };

struct factor_value {
    int32_t a;
    int32_t b;
};

struct factor {
    struct factor_value *values;
    int32_t count;
};

/* What scores of needles are multiplied with. */
static inline double case_score_times(const struct factor_value *v)
{
    return v[FACTOR_HUGE].a == HUGE_SCORES ? 1e9 : 1;
}

struct case_space {
    struct attn_backend_caps caps; /* borrowed */
    struct factor factors[FACTOR_COUNT];
    /* What no list can say: whether the backend and the reference serve the case's layer. */
    bool (*serves)(void *user, const struct factor_value *v);
    void *user;
    int32_t num_covering; /* cases of the array, before the random ones */
};

/* What an attend writes in place of numbers; form 0: numbers. */
struct case_output {
    int32_t form; /* enum attn_output_form */
    int32_t pow2, column_major;
};

/* Which keys a query may see, of attends over lists. */
struct case_lists {
    int32_t granularity; /* 0: no lists */
    int32_t groups;      /* enum attn_list_groups */
    int32_t physical_slots, has_lengths;
    int32_t prompts; /* 1: requests of some hundred queries, whose neighbours share blocks */
    int32_t many;    /* entries of a list, whose requests are long; 0: by granularity */
};

struct attend_case {
    int32_t index[FACTOR_COUNT];
    struct case_lists lists;   /* nor are these a factor */
    struct case_output output; /* no factor: the covering array is of attends that write numbers */
    int32_t prompts; /* 1: SHAPE_LONG_EXTEND with prompts, whose keys backends may divide */
};

/* factors.c. The layer of a case. */
void case_layer(const struct factor_value *v, struct attn_layer_desc *layer);
int32_t case_phase(const struct factor_value *v);
/* Lists the declared values of each factor. False when a factor has none. */
bool case_space_init(struct case_space *space, const struct attn_backend_caps *caps);
void case_space_finish(struct case_space *space);
/* ATTN_TERM_* and ATTN_FEATURE_* of a case's values. */
void case_needs(const struct factor_value *v, uint64_t *terms, uint64_t *features);

/* conflicts.c. Sets a factor to its value with that `a`; false if it is not declared. */
bool case_set(const struct case_space *space, struct attend_case *c, int32_t factor, int32_t a);
/* Values that mean nothing together: the later factor falls back to its first value. */
void case_drop_conflicts(const struct case_space *space, struct attend_case *c);
/* Whether the backend declares that it cannot do the case. */
bool case_refused(const struct case_space *space, const struct attend_case *c);
/* A plain case of queries after a context over a cache of that dtype, for kernels next to attend.
 * False if the backend declares none. */
bool case_of_cache(const struct case_space *space, int32_t dtype, int32_t kv_dtype,
                   struct attend_case *c);
/* The same of the first cache of activations that there is. */
bool case_of_any_cache(const struct case_space *space, struct attend_case *c);

/* cover.c. */
struct attend_cases {
    const struct case_space *space;
    struct attend_case *cases; /* for free() */
    int32_t num_cases;
};
/* A covering array, and `extra` random cases after it. */
struct attend_cases case_space_cover(struct case_space *space, uint64_t seed, int32_t extra);
/* `count` random cases that are served; fewer if most draws are not. */
struct attend_cases case_space_draw(const struct case_space *space, uint64_t seed, int32_t count);

static inline struct factor_value case_value(const struct case_space *space,
                                             const struct attend_case *c, int32_t factor)
{
    return space->factors[factor].values[c->index[factor]];
}

static inline void case_values(const struct case_space *space, const struct attend_case *c,
                               struct factor_value *v)
{
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        v[i] = case_value(space, c, i);
    }
}

static inline bool range_has(const struct attn_range *range, int32_t value)
{
    const int32_t multiple = range->multiple > 0 ? range->multiple : 1;
    return value >= range->min && value <= range->max && (value - range->min) % multiple == 0;
}

static inline bool ranges_have(const struct attn_range *ranges, int32_t count, int32_t value)
{
    bool have = false;
    for (int32_t i = 0; i < count; i++) {
        have = have || range_has(&ranges[i], value);
    }
    return have;
}

static inline bool shape_is_paged(int32_t shape)
{
    return shape < SHAPE_CONTIGUOUS;
}

static inline bool shape_is_decode(int32_t shape)
{
    return shape <= SHAPE_LONG_DECODE;
}

static inline bool kv_is_turboquant(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_TURBOQUANT_K8V4 && kv_dtype <= ATTN_KV_TURBOQUANT_3BIT_NC;
}

/* ggml's: 32 codes after a float16 step, in one piece. */
static inline bool kv_is_blocks(int32_t kv_dtype)
{
    return kv_dtype == ATTN_KV_Q8_0 || kv_dtype == ATTN_KV_Q4_0;
}

/* Caches whose rows carry scales of their own (or of their blocks). */
static inline bool kv_has_row_scales(int32_t kv_dtype)
{
    return (kv_dtype >= ATTN_KV_FP8_PER_TOKEN_HEAD && kv_dtype <= ATTN_KV_NVFP4) ||
           kv_is_turboquant(kv_dtype);
}

static inline bool kv_is_fp8(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_FP8_E4M3 && kv_dtype <= ATTN_KV_FP8_E4M3FNUZ;
}

/* The dtype of K's or V's cache in a case. */
static inline int32_t case_kv(const struct factor_value *v, bool value)
{
    return value && v[FACTOR_KV_DTYPE].b != 0 ? v[FACTOR_KV_DTYPE].b : v[FACTOR_KV_DTYPE].a;
}

/* views.c. Bytes of both caches, and of the scales that stand apart. */
int64_t views_cache_bytes(const struct factor_value *v, int64_t num_blocks);
int64_t views_scales_bytes(const struct factor_value *v, int64_t num_blocks);
/* K's view or V's over `cache`, scales inline or in `scales`. */
void views_make(const struct factor_value *v, bool value, int64_t num_blocks, uint8_t *cache,
                uint8_t *scales, struct attn_kv_view *view);
/* Whether every stride is a multiple of `alignment`. */
bool views_aligned(const struct factor_value *v, int32_t alignment);

/* names.c. "attend.decode.bf16.fp8_e4m3.d128x128.h8-2.b16.…", at most `size` bytes. */
void case_name(const struct case_space *space, const struct attend_case *c, char *name,
               size_t size);
/* The case of such a name, whether or not it is in the covering array; false: no case of this
 * backend's has it. */
bool case_of_name(const struct case_space *space, const char *wanted, struct attend_case *c);

#endif
