/* SPDX-License-Identifier: Apache-2.0 */
/* Head sizes, block sizes and numbers of heads against the ranges that a backend declares. */
#include <stdio.h>

#include "select/layer.h"

static void add_range(struct text *text, const struct attn_range *range)
{
    if (range->min == range->max) {
        text_add(text, "%d", range->min);
    } else if (range->multiple > 1) {
        text_add(text, "%d..%d in steps of %d", range->min, range->max, range->multiple);
    } else {
        text_add(text, "%d..%d", range->min, range->max);
    }
}

bool holds_head_sizes(const struct attn_backend_caps *caps, int32_t qk, int32_t v, bool *qk_found)
{
    *qk_found = false;
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        const struct attn_head_size_range *range = &caps->head_sizes[i];
        if (range_holds(&range->qk, 1, qk)) {
            *qk_found = true;
            if (range->same ? v == qk : range_holds(&range->v, 1, v)) {
                return true;
            }
        }
    }
    return false;
}

void check_head_size(struct check *check)
{
    const struct attn_backend_caps *caps = check->caps;
    int32_t qk = check->whole->attend_size, v = check->layer->head_size_v;
    bool qk_found;
    struct text supported;
    char asked[48];
    if (holds_head_sizes(caps, qk, v, &qk_found)) {
        return;
    }
    text_init(&supported, check->reasons->host);
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        text_add(&supported, "%s", i > 0 ? ", " : "");
        add_range(&supported, &caps->head_sizes[i].qk);
        if (!caps->head_sizes[i].same) {
            text_add(&supported, " with head_size_v ");
            add_range(&supported, &caps->head_sizes[i].v);
        }
    }
    if (qk_found) {
        snprintf(asked, sizeof asked, "%d with head_size %d", v, qk);
    } else {
        snprintf(asked, sizeof asked, "%d", qk);
    }
    reasons_add_list(check->reasons, qk_found ? "head_size_v" : "head_size", asked, &supported);
}

/* Bytes at which every part of a page has to lie. */
static int64_t part_alignment(const struct attn_backend_caps *caps, int32_t kv_dtype)
{
    const bool halves = kv_dtype == ATTN_KV_F16 || kv_dtype == ATTN_KV_BF16;
    const bool bytes = kv_is_fp8(kv_dtype) || kv_dtype == ATTN_KV_NVFP4 ||
                       kv_dtype == ATTN_KV_Q8_0 || kv_dtype == ATTN_KV_Q4_0 ||
                       kv_dtype == ATTN_KV_MXFP4;
    const int64_t element = bytes ? 1 : halves ? 2 : 4; /* float32 scales, too */
    return caps->kv_alignment > element ? caps->kv_alignment : element;
}

/* Why the kernel's blocks cannot be parts of the engine's. */
struct uncut {
    const char *field; /* NULL: they can */
    char asked[96], supported[96];
};

#define UNCUT(uncut, name, ...)                                                                    \
    ((uncut)->field = (name), snprintf((uncut)->asked, sizeof(uncut)->asked, __VA_ARGS__))

/* A block of a view lies at a multiple of one stride, so the parts of a page are equally far apart,
 * each with as many of its bytes; and rows of several tokens are not cut. */
static struct uncut try_cut(const struct attn_backend_caps *caps, const struct layer *layer,
                            int32_t block_size, int32_t kernel)
{
    struct uncut uncut = {NULL, "", "no"};
    const int64_t padded = layer->desc.padded_page_bytes, parts = block_size / kernel;
    const int64_t of_k = part_alignment(caps, layer->desc.kv_dtype);
    const int64_t of_v = part_alignment(caps, kv_dtype_of(&layer->desc, true));
    const int64_t alignment = of_k > of_v ? of_k : of_v; /* powers of two */
    const int32_t interleave = layer->cp != NULL ? layer->cp->interleave : 1;
    if (caps->device.type != ATTN_DEVICE_CPU && !(caps->kernels & ATTN_KERNEL_MAKE_BLOCK_TABLE)) {
        UNCUT(&uncut, "make_block_table", "blocks of %d as %lld of %d", block_size,
              (long long)parts, kernel);
    } else if (kernel % interleave != 0) {
        UNCUT(&uncut, "interleave", "%d in blocks of %d", interleave, kernel);
        snprintf(uncut.supported, sizeof uncut.supported, "divisors of the kernel's block");
    } else if (padded % (parts * alignment) != 0) {
        UNCUT(&uncut, "padded_page_bytes", "%lld in %lld parts", (long long)padded,
              (long long)parts);
        snprintf(uncut.supported, sizeof uncut.supported, "multiples of %lld x %lld bytes",
                 (long long)parts, (long long)alignment);
    }
    if (kernel % layer->tokens_per_row != 0) {
        UNCUT(&uncut, "tokens_per_row", "%d in blocks of %d", layer->tokens_per_row, kernel);
        snprintf(uncut.supported, sizeof uncut.supported, "divisors of the kernel's block");
    }
    for (int32_t i = 0; layer->caches != NULL && i < layer->caches->num_caches; i++) {
        const struct attn_cache_desc *c = &layer->caches->caches[i];
        if (c->table == 0 && kernel % c->tokens_per_row != 0) {
            UNCUT(&uncut, "caches", "rows of %d tokens in blocks of %d", c->tokens_per_row, kernel);
            snprintf(uncut.supported, sizeof uncut.supported, "rows that a kernel's block holds");
        }
    }
    return uncut;
}

static bool takes_blocks(const struct attn_backend_caps *caps, int32_t size)
{
    return range_holds(caps->block_sizes, caps->num_block_sizes, size);
}

int32_t kernel_block_size(const struct attn_backend_caps *a, const struct attn_backend_caps *b,
                          const struct layer *layer, int32_t block_size)
{
    int32_t largest = 0;
    if (takes_blocks(a, block_size) && takes_blocks(b, block_size)) {
        return block_size;
    }
    for (int32_t size = 1; size < block_size; size++) {
        if (block_size % size == 0 && takes_blocks(a, size) && takes_blocks(b, size) &&
            try_cut(a, layer, block_size, size).field == NULL &&
            try_cut(b, layer, block_size, size).field == NULL) {
            largest = size;
            if (size == a->preferred_block_size) {
                break;
            }
        }
    }
    return largest;
}

/* Next to a block size that is refused: what keeps its largest part that the kernels take from
 * being theirs, if there is one. */
static void refuse_parts(struct check *check, int32_t block_size)
{
    for (int32_t size = block_size - 1; size > 0; size--) {
        if (block_size % size == 0 && takes_blocks(check->caps, size)) {
            const struct uncut uncut = try_cut(check->caps, check->whole, block_size, size);
            if (uncut.field != NULL) {
                reasons_add(check->reasons, uncut.field, uncut.asked, uncut.supported);
            }
            return;
        }
    }
}

/* The engine's block size, if the kernels take it or a divisor. */
static bool choose_blocks(struct check *check, int32_t block_size)
{
    const int32_t kernel = kernel_block_size(check->caps, check->caps, check->whole, block_size);
    check->match->block_size = block_size;
    check->match->kernel_block_size = kernel;
    return kernel > 0;
}

void check_block_size(struct check *check, const int32_t *candidates, int32_t count)
{
    const struct attn_backend_caps *caps = check->caps;
    const int32_t asked = check->layer->block_size;
    const int32_t preferred = takes_blocks(caps, caps->preferred_block_size)
                                  ? caps->preferred_block_size
                              : caps->num_block_sizes > 0 ? caps->block_sizes[0].min
                                                          : 0;
    /* the engine's size; without one and without candidates, the backend's own */
    const int32_t only = asked > 0 ? asked : preferred;
    struct text supported, offered;
    if (!layer_has_cache(check->layer) || check->whole->has_states) {
        return;
    }
    if (asked > 0 || count == 0) {
        candidates = &only;
        count = 1;
    }
    for (int32_t whole = 1; whole >= 0; whole--) { /* rather one that needs no cut */
        for (int32_t i = 0; i < count; i++) {
            if ((!whole || takes_blocks(caps, candidates[i])) &&
                choose_blocks(check, candidates[i])) {
                return;
            }
        }
    }
    text_init(&supported, check->reasons->host);
    text_init(&offered, check->reasons->host);
    for (int32_t i = 0; i < caps->num_block_sizes; i++) {
        text_add(&supported, "%s", i > 0 ? ", " : "");
        add_range(&supported, &caps->block_sizes[i]);
    }
    for (int32_t i = 0; i < count; i++) {
        text_add(&offered, "%s%d", i > 0 ? ", " : "", candidates[i]);
    }
    check->reasons->failed |= offered.failed;
    reasons_add_list(check->reasons, "block_size", text_get(&offered), &supported);
    text_finish(&offered);
    if (count == 1) {
        refuse_parts(check, candidates[0]);
    }
}

void check_extensions(struct check *check)
{
    const struct attn_backend_caps *caps = check->caps;
    for (const struct attn_ext *ext = check->layer->next; ext != NULL; ext = ext->next) {
        if (!declares_extension(caps, ext->id) && !(ext->flags & ATTN_EXT_OPTIONAL)) {
            char asked[16];
            struct text declared;
            snprintf(asked, sizeof asked, "%#x", ext->id);
            text_init(&declared, check->reasons->host);
            for (int32_t i = 0; i < caps->num_extensions; i++) {
                text_add(&declared, "%s%#x", i > 0 ? ", " : "", caps->extensions[i]);
            }
            reasons_add_list(check->reasons, "extension", asked, &declared);
        }
    }
}

void check_heads(struct check *check)
{
    const struct attn_layer_desc *l = check->layer;
    const int32_t group = check->whole->is_latent ? 0 : l->num_q_heads / l->num_kv_heads;
    CHECK_LIMITS(check, {"group (num_q_heads / num_kv_heads)", group, MOST(check->caps->max_group)},
                 {"num_q_heads", l->num_q_heads, MOST(check->caps->max_num_q_heads)});
}
