/* SPDX-License-Identifier: Apache-2.0 */
/* attn-check's --expect: a backend's declaration against a committed list. The one part of
 * attn-check that reads JSON. */
#include "common/declared.h"
#include "harness/backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if ATTN_HAS_CJSON
#include <cjson/cJSON.h>

#include "common/command.h"

#define MAX_FILE (1 << 20)

static const char *string_of(const cJSON *item)
{
    return cJSON_IsString(item) ? item->valuestring : "?";
}

static bool has_string(const struct json *names, const char *text)
{
    const struct json *name;
    JSON_EACH(name, names)
    {
        if (name->type == JSON_STRING && strcmp(name->text, text) == 0) {
            return true;
        }
    }
    return false;
}

/* Every name of every mask that the list has is declared, but for a hint that is no loss. */
static bool masks_hold(const struct json *declared, const cJSON *list, char *why, size_t size)
{
    const struct json *mask;
    const cJSON *name;
    JSON_EACH(mask, declared)
    {
        if (mask->type != JSON_ARRAY || strcmp(mask->name, "head_sizes") == 0 ||
            strcmp(mask->name, "block_sizes") == 0 || strcmp(mask->name, "refused") == 0) {
            continue;
        }
        cJSON_ArrayForEach(name, cJSON_GetObjectItemCaseSensitive(list, mask->name))
        {
            if (!has_string(mask, string_of(name)) &&
                strcmp(string_of(name), "step_allocates") != 0) {
                snprintf(why, size, "%s: '%s' is expected and not declared", mask->name,
                         string_of(name));
                return false;
            }
        }
    }
    return true;
}

/* Every value of `want` [min, max, multiple] lies in `have`. */
static bool range_within(const cJSON *want, const struct attn_range *have)
{
    const cJSON *first = cJSON_GetArrayItem(want, 0), *last = cJSON_GetArrayItem(want, 1);
    const cJSON *multiple = cJSON_GetArrayItem(want, 2);
    int32_t min = first != NULL ? first->valueint : 0, max = last != NULL ? last->valueint : 0;
    int32_t step = multiple != NULL ? multiple->valueint : 1;
    int32_t ours = have->multiple > 0 ? have->multiple : 1;
    return min >= have->min && max <= have->max && (min - have->min) % ours == 0 &&
           (min == max || step % ours == 0);
}

static bool has_head_sizes(const struct attn_backend_caps *caps, const cJSON *want)
{
    const cJSON *qk = cJSON_GetObjectItemCaseSensitive(want, "qk");
    const cJSON *v = cJSON_GetObjectItemCaseSensitive(want, "v");
    for (int32_t i = 0; i < caps->num_head_sizes; i++) {
        const struct attn_head_size_range *have = &caps->head_sizes[i];
        bool values = v == NULL || (!have->same && range_within(v, &have->v));
        if (range_within(qk, &have->qk) && values) {
            return true;
        }
    }
    return false;
}

static bool has_block_sizes(const struct attn_backend_caps *caps, const cJSON *want)
{
    for (int32_t i = 0; i < caps->num_block_sizes; i++) {
        if (range_within(want, &caps->block_sizes[i])) {
            return true;
        }
    }
    return false;
}

static bool sizes_hold(const struct attn_backend_caps *caps, const cJSON *list, char *why,
                       size_t size)
{
    const cJSON *want;
    cJSON_ArrayForEach(want, cJSON_GetObjectItemCaseSensitive(list, "head_sizes"))
    {
        if (!has_head_sizes(caps, want)) {
            snprintf(why, size, "head_sizes: a range that is expected is not declared");
            return false;
        }
    }
    cJSON_ArrayForEach(want, cJSON_GetObjectItemCaseSensitive(list, "block_sizes"))
    {
        if (!has_block_sizes(caps, want)) {
            snprintf(why, size, "block_sizes: a range that is expected is not declared");
            return false;
        }
    }
    return true;
}

/* A refusal that the list does not have is a lost combination. */
static bool refusals_hold(const struct json *declared, const cJSON *list, char *why, size_t size)
{
    const cJSON *known_refusals = cJSON_GetObjectItemCaseSensitive(list, "refused");
    const struct json *refusal;
    JSON_EACH(refusal, json_get(declared, "refused"))
    {
        const cJSON *known;
        bool expected = false;
        cJSON_ArrayForEach(known, known_refusals)
        {
            expected = expected || strcmp(string_of(known), refusal->text) == 0;
        }
        if (!expected) {
            snprintf(why, size, "refused: '%s' is declared and not expected", refusal->text);
            return false;
        }
    }
    return true;
}

/* Numbers may only grow; of a limit (max_) 0 means none, the largest. */
static bool numbers_hold(const struct json *declared, const cJSON *list, char *why, size_t size)
{
    const struct json *number;
    JSON_EACH(number, declared)
    {
        if (number->type != JSON_NUMBER) {
            continue;
        }
        const cJSON *item = cJSON_GetObjectItemCaseSensitive(list, number->name);
        bool limit = strncmp(number->name, "max_", 4) == 0;
        int32_t have = (int32_t)number->number, want = cJSON_IsNumber(item) ? item->valueint : 0;
        if (!(limit && have == 0) && (have < want || (limit && want == 0))) {
            snprintf(why, size, "%s: %d is declared, %d expected", number->name, have, want);
            return false;
        }
    }
    return true;
}

bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size)
{
    const char *unread;
    size_t bytes;
    char *text = read_whole_file(file, MAX_FILE, &bytes, &unread);
    cJSON *list = text != NULL ? cJSON_Parse(text) : NULL;
    struct json *declared = declared_json(caps);
    bool holds = false;
    if (!cJSON_IsObject(list)) {
        snprintf(why, size, "%s: %s", file, text == NULL ? unread : "is no JSON object");
    } else {
        holds = masks_hold(declared, list, why, size) && sizes_hold(caps, list, why, size) &&
                refusals_hold(declared, list, why, size) && numbers_hold(declared, list, why, size);
    }
    json_destroy(declared);
    cJSON_Delete(list);
    free(text);
    return holds;
}

#else

bool declared_holds(const struct attn_backend_caps *caps, const char *file, char *why, size_t size)
{
    snprintf(why, size, "%s: this attn-check was built without libcjson and reads no JSON", file);
    return false;
}

#endif
