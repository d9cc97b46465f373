/* SPDX-License-Identifier: Apache-2.0 */
/* One backend against one layer and phase: all reasons against it, and what the core composes. */
#ifndef CORE_SELECT_MATCH_H
#define CORE_SELECT_MATCH_H

#include "runtime/probe.h"
#include "select/assignment.h"
#include "util/text.h"

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

/* A list as what is supported, "none" where it is empty; finishes the text. */
void reasons_add_list(struct reasons *reasons, const char *field, const char *asked,
                      struct text *supported);

struct match {
    uint32_t composed;         /* ATTN_COMPOSE_* */
    int32_t graph_level;       /* the least level of the parts */
    int32_t block_size;        /* that this backend would take; 0: no cache */
    int32_t kernel_block_size; /* its kernels': block_size, or a divisor of it */
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

/* No kernel cuts such a row: view.pack is 0 or the head's size. */
static inline bool kv_rows_are_whole(int32_t kv_dtype)
{
    return kv_dtype >= ATTN_KV_TURBOQUANT_K8V4;
}

/* One comparison in the making. */
struct check {
    const struct attn_backend_caps *caps;
    const struct attn_layer_desc *layer;
    const struct layer *whole;
    struct reasons *reasons;
    struct match *match;
};

void check_refuse_number(struct check *check, const char *field, int64_t asked,
                         const char *supported);
/* A reason for each that asks for more than the most; MOST: of limits that 0 leaves open. */
struct limit {
    const char *field;
    int64_t asked, most;
};
void check_limits(struct check *check, const struct limit *limits, size_t count);
#define CHECK_LIMITS(check, ...)                                                                   \
    check_limits(check, (const struct limit[]){__VA_ARGS__},                                       \
                 sizeof(const struct limit[]){__VA_ARGS__} / sizeof(struct limit))
#define MOST(declared) ((declared) > 0 ? (declared) : INT32_MAX)
/* One for a number that is no multiple; 0 and 1: any is. */
void check_multiple(struct check *check, const char *field, int64_t asked, int64_t multiple);
/* A reason under `field` for each that is not there; NULL: nowhere. Are all there? */
struct need {
    bool there;
    const char *asked;
    const char *supported; /* NULL: "no" */
};
bool check_needs(struct check *check, const char *field, const struct need *needs, size_t count);
#define CHECK_NEEDS(check, field, ...)                                                             \
    check_needs(check, field, (const struct need[]){__VA_ARGS__},                                  \
                sizeof(const struct need[]){__VA_ARGS__} / sizeof(struct need))
/* One of ATTN_KERNEL_*; `what_for` is added to its name in the reason. */
void check_need_kernel(struct check *check, uint64_t kernel, const char *what_for);
/* A code of a list (enum attn_name_list) against a mask, and a vendor's against the backend's
 * vendor_codes, with the names of what is supported. */
void check_code(struct check *check, const char *field, int32_t list, int32_t code, uint64_t mask);
/* The same of a draft's codes, whose names follow in their order; a mask of 0 is of code 0. */
void check_draft_code(struct check *check, const char *field, int32_t code, uint32_t mask,
                      const char *const *names, int32_t count);
#define CHECK_DRAFT_CODE(check, field, code, mask, ...)                                            \
    check_draft_code(check, field, code, mask, (const char *const[]){__VA_ARGS__},                 \
                     (int32_t)(sizeof(const char *const[]){__VA_ARGS__} / sizeof(char *)))
void check_need_feature(const struct check *check, bool wanted, uint64_t feature, const char *field,
                        const char *asked);
/* The core does `what` itself; the layer is then captured at most at this level. */
void check_compose(struct check *check, uint32_t what, int32_t graph_level);

/* match_sizes.c */
void check_extensions(struct check *check); /* those that a layer brings for a vendor's kernels */
void check_heads(struct check *check);
void check_head_size(struct check *check);
/* Does a declared range hold both head sizes? *qk_found: one holds the first. */
bool holds_head_sizes(const struct attn_backend_caps *caps, int32_t qk, int32_t v, bool *qk_found);
/* the engine's candidates, or the layer's own block size; match->block_size becomes the choice */
void check_block_size(struct check *check, const int32_t *candidates, int32_t count);

#endif
