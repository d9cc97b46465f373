/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the comparison share: reasons, and how they are worded. */
#include <stdio.h>
#include <string.h>

#include "select/match.h"
#include "select/names.h"

void reasons_add(struct reasons *reasons, const char *field, const char *asked,
                 const char *supported)
{
    if (reasons->count == reasons->capacity) {
        int32_t capacity = reasons->capacity > 0 ? 2 * reasons->capacity : 4;
        struct attn_reason *items = arena_array(reasons->arena, (size_t)capacity, sizeof *items);
        if (items == NULL) {
            reasons->failed = true;
            return;
        }
        if (reasons->count > 0) {
            memcpy(items, reasons->items, sizeof *items * (size_t)reasons->count);
        }
        reasons->items = items;
        reasons->capacity = capacity;
    }
    struct attn_reason *reason = &reasons->items[reasons->count];
    *reason = (struct attn_reason){sizeof *reason, NULL, arena_string(reasons->arena, field),
                                   arena_string(reasons->arena, asked),
                                   arena_string(reasons->arena, supported)};
    if (reason->field == NULL || reason->asked == NULL || reason->supported == NULL) {
        reasons->failed = true;
        return;
    }
    reasons->count++;
}

void check_refuse_number(struct check *check, const char *field, int64_t asked,
                         const char *supported)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)asked);
    reasons_add(check->reasons, field, text, supported);
}

void reasons_add_list(struct reasons *reasons, const char *field, const char *asked,
                      struct text *supported)
{
    reasons_add(reasons, field, asked, supported->length > 0 ? text_get(supported) : "none");
    reasons->failed |= supported->failed;
    text_finish(supported);
}

void check_limits(struct check *check, const struct limit *limits, size_t count)
{
    char supported[48];
    for (size_t i = 0; i < count; i++) {
        snprintf(supported, sizeof supported, "at most %lld", (long long)limits[i].most);
        if (limits[i].asked > limits[i].most) {
            check_refuse_number(check, limits[i].field, limits[i].asked, supported);
        }
    }
}

void check_multiple(struct check *check, const char *field, int64_t asked, int64_t multiple)
{
    char supported[48];
    snprintf(supported, sizeof supported, "multiples of %lld", (long long)multiple);
    if (multiple > 1 && asked % multiple != 0) {
        check_refuse_number(check, field, asked, supported);
    }
}

bool check_needs(struct check *check, const char *field, const struct need *needs, size_t count)
{
    bool all = true;
    for (size_t i = 0; i < count; i++) {
        all &= needs[i].there;
        if (!needs[i].there && field != NULL) {
            reasons_add(check->reasons, field, needs[i].asked,
                        needs[i].supported != NULL ? needs[i].supported : "no");
        }
    }
    return all;
}

void check_need_kernel(struct check *check, uint64_t kernel, const char *what_for)
{
    char asked[64];
    for (int32_t i = 0; !(check->caps->kernels & kernel) && i < NUM_KERNELS; i++) {
        if (kernel >> i & 1) {
            snprintf(asked, sizeof asked, "%s%s", code_name(ATTN_NAMES_KERNEL, i), what_for);
            reasons_add(check->reasons, "kernel", asked, "not in the backend's table");
        }
    }
}

void check_draft_code(struct check *check, const char *field, int32_t code, uint32_t mask,
                      const char *const *names, int32_t count)
{
    struct text supported;
    mask = mask != 0 ? mask : 1;
    if (mask >> code & 1) {
        return;
    }
    text_init(&supported, check->reasons->host);
    for (int32_t c = 0; c < count; c++) {
        if (mask >> c & 1) {
            text_add(&supported, "%s%s", supported.length > 0 ? ", " : "", names[c]);
        }
    }
    reasons_add_list(check->reasons, field, code < count ? names[code] : "unknown", &supported);
}

void check_code(struct check *check, const char *field, int32_t list, int32_t code, uint64_t mask)
{
    struct text supported;
    if (!declares_code(check->caps, list, mask, code)) {
        text_init(&supported, check->reasons->host);
        name_codes(&supported, check->caps, list, mask);
        reasons_add_list(check->reasons, field, code_text(list, code).text, &supported);
    }
}

void check_need_feature(const struct check *check, bool wanted, uint64_t feature, const char *field,
                        const char *asked)
{
    if (wanted && !(check->caps->features & feature)) {
        reasons_add(check->reasons, field, asked, "no");
    }
}

void check_compose(struct check *check, uint32_t what, int32_t graph_level)
{
    check->match->composed |= what;
    if (graph_level < check->match->graph_level) {
        check->match->graph_level = graph_level;
    }
}
