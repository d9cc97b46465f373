/* SPDX-License-Identifier: Apache-2.0 */
#include "cases.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "number.h"
#include "random.h"

#define COVER_CANDIDATES 24 /* random completions tried for each row of the array */

static const int32_t model_head_sizes[] = {24,  32,  40,  64,  72,  80,  96,  112,
                                           120, 128, 160, 192, 224, 256, 512};
static const int32_t usual_block_sizes[] = {1, 8, 16, 32, 64, 128, 256};
static const struct factor_value usual_heads[] = {{4, 4}, {8, 2}, {9, 3}, {8, 1}, {5, 1}, {16, 1}};

static bool add(struct factor *factor, int32_t a, int32_t b)
{
    struct factor_value *larger =
        realloc(factor->values, sizeof *larger * (size_t)(factor->count + 1));
    if (larger == NULL) {
        return false;
    }
    factor->values = larger;
    larger[factor->count++] = (struct factor_value){a, b};
    return true;
}

static bool in_range(const struct attn_range *range, int32_t value)
{
    int32_t multiple = range->multiple > 0 ? range->multiple : 1;
    return value >= range->min && value <= range->max && (value - range->min) % multiple == 0;
}

static bool add_head_sizes(struct factor *factor, const struct attn_backend_caps *caps)
{
    bool ok = true;
    const int32_t count = sizeof model_head_sizes / sizeof *model_head_sizes;
    for (int32_t d = 0; d < count; d++) {
        for (int32_t v = 0; v < count; v++) {
            bool declared = false;
            for (int32_t i = 0; i < caps->num_head_sizes && !declared; i++) {
                const struct attn_head_size_range *r = &caps->head_sizes[i];
                declared = in_range(&r->qk, model_head_sizes[d]) &&
                           (r->same ? d == v : in_range(&r->v, model_head_sizes[v]));
            }
            /* Of the pairs D != Dv the few that models have. */
            bool wanted = d == v || (model_head_sizes[d] == 192 && model_head_sizes[v] == 128) ||
                          (model_head_sizes[d] == 64 && model_head_sizes[v] == 128) ||
                          (model_head_sizes[d] == 128 && model_head_sizes[v] == 72);
            if (declared && wanted) {
                ok = ok && add(factor, model_head_sizes[d], model_head_sizes[v]);
            }
        }
    }
    return ok;
}

static bool add_cache_factors(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = true;
    for (int32_t i = ATTN_KV_AUTO + 1; i <= ATTN_KV_FP8_E5M2; i++) {
        if (caps->kv_dtypes >> i & 1) {
            ok = ok && add(&f[FACTOR_KV_DTYPE], i, 0);
        }
    }
    for (size_t i = 0; i < sizeof usual_block_sizes / sizeof *usual_block_sizes; i++) {
        for (int32_t j = 0; j < caps->num_block_sizes; j++) {
            if (in_range(&caps->block_sizes[j], usual_block_sizes[i])) {
                ok = ok && add(&f[FACTOR_BLOCK_SIZE], usual_block_sizes[i], 0);
                break;
            }
        }
    }
    for (int32_t i = 0; i <= ATTN_KV_LAYOUT_PACKED_K; i++) {
        if (caps->layouts >> i & 1) {
            ok = ok && add(&f[FACTOR_LAYOUT], i, 0);
        }
    }
    for (int32_t form = ATTN_SCALE_PER_TENSOR; form <= ATTN_SCALE_PER_HEAD; form++) {
        if (caps->k_scale_forms & caps->v_scale_forms & (UINT64_C(1) << form)) {
            ok = ok && add(&f[FACTOR_SCALES], form, 0);
        }
    }
    return ok && (f[FACTOR_SCALES].count > 0 || add(&f[FACTOR_SCALES], ATTN_SCALE_NONE, 0));
}

/* A factor that is off, and on with value `a` if the terms are declared. */
static bool add_switch(struct factor *factor, const struct attn_backend_caps *caps, uint64_t term,
                       int32_t a, int32_t b)
{
    bool ok = factor->count > 0 || add(factor, 0, 0);
    return ok && ((caps->terms & term) != term || add(factor, a, b));
}

static bool add_terms(struct factor *f, const struct attn_backend_caps *caps)
{
    bool ok = true;
    ok = ok && (!(caps->terms & ATTN_TERM_CAUSAL) || add(&f[FACTOR_CAUSAL], CAUSAL_YES, 0));
    ok = ok && (!(caps->terms & ATTN_TERM_BIDIRECTIONAL) || add(&f[FACTOR_CAUSAL], CAUSAL_NO, 0));
    ok = ok && (!(caps->terms & ATTN_TERM_CAUSAL_PER_REQUEST) ||
                add(&f[FACTOR_CAUSAL], CAUSAL_PER_REQUEST, 0));
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SLIDING_WINDOW, 20, 0);
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SLIDING_WINDOW, 1, 0);
    ok = ok && add_switch(&f[FACTOR_WINDOW], caps, ATTN_TERM_SYMMETRIC_WINDOW, 12, 1);
    ok = ok && add_switch(&f[FACTOR_CHUNK], caps, ATTN_TERM_CHUNKED_LOCAL, 16, 0);
    ok = ok && add_switch(&f[FACTOR_CHUNK], caps, ATTN_TERM_CHUNKED_LOCAL, 24, 1);
    ok = ok && add_switch(&f[FACTOR_SOFT_CAP], caps, ATTN_TERM_SOFT_CAP, 8, 0);
    ok = ok && add_switch(&f[FACTOR_ALIBI], caps, ATTN_TERM_ALIBI, ATTN_ALIBI_LINEAR, 0);
    ok = ok && add_switch(&f[FACTOR_ALIBI], caps, ATTN_TERM_ALIBI_SQRT, ATTN_ALIBI_SQRT, 0);
    ok = ok && add_switch(&f[FACTOR_SINKS], caps, ATTN_TERM_SINKS, 1, 0);
    ok = ok && add_switch(&f[FACTOR_STATIC_SINK], caps, ATTN_TERM_STATIC_SINK, 5, 0);
    ok = ok && add_switch(&f[FACTOR_SPANS], caps, ATTN_TERM_PREFIX_LM, 1, 0);
    ok = ok && add_switch(&f[FACTOR_SPANS], caps, ATTN_TERM_PREFIX_LM, 1, 7);
    ok = ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BITS, ATTN_TREE_BITS, 0);
    ok = ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BITS, ATTN_TREE_BITS, 1);
    ok = ok && add_switch(&f[FACTOR_TREE], caps, ATTN_TERM_TREE_BIAS, ATTN_TREE_BIAS, 0);
    return ok;
}

bool case_space_init(struct case_space *space, const struct attn_backend_caps *caps)
{
    struct factor *f = space->factors;
    bool paged = (caps->features & ATTN_FEATURE_PAGED_KV) != 0;
    bool contiguous = (caps->features & ATTN_FEATURE_CONTIGUOUS_KV) != 0;
    bool ok = true;
    memset(space, 0, sizeof *space);
    space->caps = *caps;
    for (int32_t shape = 0; shape < SHAPE_COUNT; shape++) {
        bool decode = shape == SHAPE_DECODE || shape == SHAPE_SPECULATIVE;
        bool phase = caps->phases >> (decode ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL) & 1;
        bool keys = shape >= SHAPE_CONTIGUOUS ? contiguous : paged;
        if (phase && keys) {
            ok = ok && add(&f[FACTOR_SHAPE], shape, 0);
        }
    }
    for (int32_t i = ATTN_DTYPE_F16; i <= ATTN_DTYPE_F32; i++) {
        ok = ok && (!(caps->dtypes >> i & 1) || add(&f[FACTOR_DTYPE], i, 0));
    }
    for (size_t i = 0; i < sizeof usual_heads / sizeof *usual_heads; i++) {
        int32_t group = usual_heads[i].a / usual_heads[i].b;
        if (caps->max_group == 0 || group <= caps->max_group) {
            ok = ok && add(&f[FACTOR_HEADS], usual_heads[i].a, usual_heads[i].b);
        }
    }
    ok = ok && add_head_sizes(&f[FACTOR_HEAD_SIZE], caps) && add_cache_factors(f, caps);
    ok = ok && add_terms(f, caps);
    ok = ok && add(&f[FACTOR_TABLE_ROW], 0, 0);
    ok = ok && (!(caps->features & ATTN_FEATURE_BLOCK_TABLE_ROW) || add(&f[FACTOR_TABLE_ROW], 1, 0));
    ok = ok && add(&f[FACTOR_LSE], 0, 0);
    ok = ok && (!(caps->features & ATTN_FEATURE_LSE) ||
                (add(&f[FACTOR_LSE], 1, 0) && add(&f[FACTOR_LSE], 2, 0)));
    ok = ok && add(&f[FACTOR_STRIDES], 0, 0) && add(&f[FACTOR_STRIDES], 1, 0);
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        ok = ok && f[i].count > 0;
    }
    if (!ok) {
        case_space_finish(space);
    }
    return ok;
}

void case_space_finish(struct case_space *space)
{
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        free(space->factors[i].values);
        space->factors[i] = (struct factor){NULL, 0};
    }
}

/* Values that mean nothing together: the later factor falls back to its first value, which is "off". */
static void settle(const struct case_space *space, struct attend_case *c)
{
    static const int32_t kv_of_dtype[] = {ATTN_KV_F16, ATTN_KV_BF16, ATTN_KV_F32};
    int32_t shape = case_value(space, c, FACTOR_SHAPE).a;
    bool causal = case_value(space, c, FACTOR_CAUSAL).a == CAUSAL_YES;
    int32_t dtype = case_value(space, c, FACTOR_DTYPE).a;
    int32_t kv = case_value(space, c, FACTOR_KV_DTYPE).a;
    /* A 16- or 32-bit cache is that of the activations; only quantized caches combine freely. */
    if (kv <= ATTN_KV_F32 && kv != kv_of_dtype[dtype]) {
        for (int32_t i = 0; i < space->factors[FACTOR_KV_DTYPE].count; i++) {
            if (space->factors[FACTOR_KV_DTYPE].values[i].a == kv_of_dtype[dtype]) {
                c->index[FACTOR_KV_DTYPE] = i;
            }
        }
    }
    if (shape >= SHAPE_CONTIGUOUS) {
        c->index[FACTOR_TABLE_ROW] = 0;
        c->index[FACTOR_BLOCK_SIZE] = 0;
        c->index[FACTOR_LAYOUT] = 0;
        for (int32_t i = 0; i < space->factors[FACTOR_KV_DTYPE].count; i++) {
            if (space->factors[FACTOR_KV_DTYPE].values[i].a == kv_of_dtype[dtype]) {
                c->index[FACTOR_KV_DTYPE] = i;
            }
        }
    }
    if (case_value(space, c, FACTOR_KV_DTYPE).a <= ATTN_KV_F32) {
        c->index[FACTOR_SCALES] = 0;
    }
    bool symmetric = case_value(space, c, FACTOR_WINDOW).b != 0;
    if (symmetric && case_value(space, c, FACTOR_CAUSAL).a != CAUSAL_NO) {
        c->index[FACTOR_WINDOW] = 0;
    }
    if (!causal || shape == SHAPE_CROSS_KEYS) {
        c->index[FACTOR_SPANS] = 0;
        c->index[FACTOR_TREE] = 0;
        c->index[FACTOR_CHUNK] = 0;
    }
    if (case_value(space, c, FACTOR_WINDOW).a != 0) {
        c->index[FACTOR_CHUNK] = 0;
    }
}

static bool refused(const struct case_space *space, const struct attend_case *c)
{
    for (int32_t i = 0; i < space->caps.num_refused; i++) {
        const struct attn_refused_combination *r = &space->caps.refused[i];
        uint64_t terms = 0;
        terms |= case_value(space, c, FACTOR_CAUSAL).a == CAUSAL_YES ? ATTN_TERM_CAUSAL : 0;
        terms |= case_value(space, c, FACTOR_CAUSAL).a == CAUSAL_NO ? ATTN_TERM_BIDIRECTIONAL : 0;
        terms |= case_value(space, c, FACTOR_CAUSAL).a == CAUSAL_PER_REQUEST
                     ? ATTN_TERM_CAUSAL_PER_REQUEST
                     : 0;
        if (case_value(space, c, FACTOR_WINDOW).a) {
            terms |= case_value(space, c, FACTOR_WINDOW).b ? ATTN_TERM_SYMMETRIC_WINDOW
                                                           : ATTN_TERM_SLIDING_WINDOW;
        }
        terms |= case_value(space, c, FACTOR_CHUNK).a ? ATTN_TERM_CHUNKED_LOCAL : 0;
        terms |= case_value(space, c, FACTOR_SOFT_CAP).a ? ATTN_TERM_SOFT_CAP : 0;
        terms |= case_value(space, c, FACTOR_ALIBI).a == ATTN_ALIBI_LINEAR ? ATTN_TERM_ALIBI : 0;
        terms |= case_value(space, c, FACTOR_ALIBI).a == ATTN_ALIBI_SQRT ? ATTN_TERM_ALIBI_SQRT : 0;
        terms |= case_value(space, c, FACTOR_SINKS).a ? ATTN_TERM_SINKS : 0;
        terms |= case_value(space, c, FACTOR_STATIC_SINK).a ? ATTN_TERM_STATIC_SINK : 0;
        terms |= case_value(space, c, FACTOR_SPANS).a ? ATTN_TERM_PREFIX_LM : 0;
        terms |= case_value(space, c, FACTOR_TREE).a == ATTN_TREE_BITS ? ATTN_TERM_TREE_BITS : 0;
        terms |= case_value(space, c, FACTOR_TREE).a == ATTN_TREE_BIAS ? ATTN_TERM_TREE_BIAS : 0;
        uint64_t kv = UINT64_C(1) << case_value(space, c, FACTOR_KV_DTYPE).a;
        if ((terms & r->terms) == r->terms && (r->kv_dtypes == 0 || (r->kv_dtypes & kv)) &&
            r->features == 0) {
            return true;
        }
    }
    return false;
}

/* Which pairs are covered: one bit per (factor i value, factor j value), i < j, in a flat index of all values. */
struct coverage {
    int32_t first[FACTOR_COUNT + 1];
    uint8_t *seen; /* [values, values] */
};

static int32_t count_new(const struct coverage *cover, const struct attend_case *c, bool mark)
{
    int32_t total = cover->first[FACTOR_COUNT];
    int32_t fresh = 0;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        for (int32_t j = i + 1; j < FACTOR_COUNT; j++) {
            uint8_t *seen = &cover->seen[(cover->first[i] + c->index[i]) * total +
                                         cover->first[j] + c->index[j]];
            fresh += !*seen;
            *seen |= mark;
        }
    }
    return fresh;
}

static void draw(const struct case_space *space, uint64_t *random, struct attend_case *c)
{
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        c->index[i] = random_below(random, space->factors[i].count);
        /* Half of the switches stay off, or every case would be a crowd of terms. */
        if (i >= FACTOR_WINDOW && i <= FACTOR_TREE && random_below(random, 2)) {
            c->index[i] = 0;
        }
    }
}

static bool take(struct attend_case **cases, int32_t *count, const struct attend_case *c)
{
    struct attend_case *larger = realloc(*cases, sizeof *larger * (size_t)(*count + 1));
    if (larger == NULL) {
        return false;
    }
    *cases = larger;
    larger[(*count)++] = *c;
    return true;
}

/* For every pair of values: where it is not covered yet, the best of some random rows that hold it. Pairs that
 * settle() takes apart or that the backend refuses stay uncovered. */
static bool cover_pairs(const struct case_space *space, struct coverage *cover, uint64_t *random,
                        struct attend_case **cases, int32_t *num_cases)
{
    int32_t total = cover->first[FACTOR_COUNT];
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        for (int32_t j = i + 1; j < FACTOR_COUNT; j++) {
            int32_t pairs = space->factors[i].count * space->factors[j].count;
            for (int32_t pair = 0; pair < pairs; pair++) {
                int32_t a = pair / space->factors[j].count;
                int32_t b = pair % space->factors[j].count;
                if (cover->seen[(cover->first[i] + a) * total + cover->first[j] + b]) {
                    continue;
                }
                struct attend_case best = {{0}};
                int32_t most = 0;
                for (int32_t k = 0; k < COVER_CANDIDATES; k++) {
                    struct attend_case c;
                    draw(space, random, &c);
                    c.index[i] = a;
                    c.index[j] = b;
                    settle(space, &c);
                    bool holds = c.index[i] == a && c.index[j] == b && !refused(space, &c);
                    int32_t fresh = holds ? count_new(cover, &c, false) : 0;
                    if (fresh > most) {
                        most = fresh;
                        best = c;
                    }
                }
                if (most > 0) {
                    count_new(cover, &best, true);
                    if (!take(cases, num_cases, &best)) {
                        return false;
                    }
                }
            }
        }
    }
    return true;
}

bool case_space_cover(const struct case_space *space, uint64_t seed, int32_t extra,
                      struct attend_case **cases, int32_t *num_cases)
{
    struct coverage cover = {{0}, NULL};
    uint64_t random = seed;
    bool ok;
    *cases = NULL;
    *num_cases = 0;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        cover.first[i + 1] = cover.first[i] + space->factors[i].count;
    }
    size_t total = (size_t)cover.first[FACTOR_COUNT];
    cover.seen = calloc(total, total);
    ok = cover.seen != NULL && cover_pairs(space, &cover, &random, cases, num_cases);
    for (int32_t i = 0; i < extra && ok; i++) {
        struct attend_case c;
        draw(space, &random, &c);
        settle(space, &c);
        ok = refused(space, &c) || take(cases, num_cases, &c);
    }
    free(cover.seen);
    if (!ok) {
        free(*cases);
        *cases = NULL;
        *num_cases = 0;
    }
    return ok;
}

void case_name(const struct case_space *space, const struct attend_case *c, char *name, size_t size)
{
    static const char *const shapes[] = {"decode", "speculative", "prefill",   "extend",
                                         "mixed",  "contiguous",  "cross_keys"};
    static const char *const kv[] = {"auto", "f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2"};
    static const char *const layouts[] = {"nhd",       "hnd",      "nhd_inner",
                                          "hnd_inner", "hnd_rows", "packed_k"};
    static const char *const causal[] = {"causal", "bidirectional", "causal_per_request"};
    static const char *const terms[] = {"window", "chunk",       "soft_cap", "alibi",
                                        "sinks",  "static_sink", "spans",    "tree"};
    struct factor_value v[FACTOR_COUNT];
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        v[i] = case_value(space, c, i);
    }
    int used = snprintf(name, size, "attend.%s.%s.%s.d%dx%d.h%d-%d.b%d.%s.%s", shapes[v[0].a],
                        number_name(v[FACTOR_DTYPE].a), kv[v[FACTOR_KV_DTYPE].a],
                        v[FACTOR_HEAD_SIZE].a, v[FACTOR_HEAD_SIZE].b, v[FACTOR_HEADS].a,
                        v[FACTOR_HEADS].b, v[FACTOR_BLOCK_SIZE].a, layouts[v[FACTOR_LAYOUT].a],
                        causal[v[FACTOR_CAUSAL].a]);
    for (int32_t i = FACTOR_WINDOW; i <= FACTOR_TREE; i++) {
        if (v[i].a != 0 && used > 0 && (size_t)used < size) {
            used += snprintf(name + used, size - (size_t)used, "+%s%d", terms[i - FACTOR_WINDOW],
                             v[i].a + 100 * v[i].b);
        }
    }
    if (used > 0 && (size_t)used < size) {
        snprintf(name + used, size - (size_t)used, ".s%d.r%d.l%d.q%d", v[FACTOR_SCALES].a,
                 v[FACTOR_TABLE_ROW].a, v[FACTOR_LSE].a, v[FACTOR_STRIDES].a);
    }
}
