/* SPDX-License-Identifier: Apache-2.0 */
#include "model_reading.h"

#include <cjson/cJSON.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "util/safe_text.h"

void reading_fail(struct reading *r, const char *field, const char *format, ...)
{
    va_list arguments;
    if (r->status != ATTN_OK) {
        return; /* the first failure is reported */
    }
    r->status = r->error->status = ATTN_ERROR_INVALID_ARGUMENT;
    snprintf(r->error->field, sizeof r->error->field, "%s", field);
    va_start(arguments, format);
    vsnprintf(r->error->message, sizeof r->error->message, format, arguments);
    va_end(arguments);
    text_make_safe(r->error->message, false); /* it may quote the file */
}

int32_t read_int(struct reading *r, const cJSON *object, const char *name, int32_t otherwise,
                 int32_t min, int32_t max)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (item == NULL || cJSON_IsNull(item) || cJSON_IsFalse(item)) {
        return otherwise;
    }
    if (!cJSON_IsNumber(item) || item->valuedouble != floor(item->valuedouble) ||
        item->valuedouble < min || item->valuedouble > max) {
        reading_fail(r, name, "%g; a whole number from %d to %d is allowed",
                     cJSON_IsNumber(item) ? item->valuedouble : (double)NAN, min, max);
        return otherwise > 0 ? otherwise : min;
    }
    return (int32_t)item->valuedouble;
}

double read_number(struct reading *r, const cJSON *object, const char *name, double otherwise)
{
    const cJSON *item = cJSON_GetObjectItemCaseSensitive(object, name);
    if (item == NULL || cJSON_IsNull(item)) {
        return otherwise;
    }
    if (!cJSON_IsNumber(item) || !isfinite(item->valuedouble) || item->valuedouble < 0 ||
        item->valuedouble > 1e9) {
        reading_fail(r, name, "%g; a number from 0 to 1e9 is allowed",
                     cJSON_IsNumber(item) ? item->valuedouble : (double)NAN);
        return otherwise;
    }
    return item->valuedouble;
}

const char *read_text(const cJSON *object, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(object, name));
    return text != NULL ? text : "";
}
