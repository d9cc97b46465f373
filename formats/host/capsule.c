/* SPDX-License-Identifier: Apache-2.0 */
#include "host/capsule.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#define LINE 256 /* bytes of one with a single value */

static uint32_t bits_of(const void *number)
{
    uint32_t bits;
    memcpy(&bits, number, sizeof bits);
    return bits;
}

void capsule_write(const struct capsule *c, void (*put)(void *user, const char *line), void *user)
{
    char line[LINE];
    put(user, CAPSULE_HEAD "\n");
    for (size_t i = 0; i < CAPSULE_FIELDS; i++) {
        const char *value = (const char *)c + capsule_fields[i].at;
        if (capsule_fields[i].kind == CAPSULE_TEXT) {
            snprintf(line, sizeof line, "%s %s\n", capsule_fields[i].name, value);
        } else if (capsule_fields[i].kind == CAPSULE_INTEGER) {
            snprintf(line, sizeof line, "%s %" PRId32 "\n", capsule_fields[i].name,
                     (int32_t)bits_of(value));
        } else {
            snprintf(line, sizeof line, "%s %08" PRIx32 "\n", capsule_fields[i].name,
                     bits_of(value));
        }
        put(user, line);
    }
    for (size_t i = 0; i < CAPSULE_LISTS; i++) {
        put(user, capsule_lists[i].name);
        for (int32_t n = 0; n < capsule_list_length(c, i); n++) {
            const uint32_t bits = bits_of((const char *)c + capsule_lists[i].at + 4 * (size_t)n);
            snprintf(line, sizeof line, capsule_lists[i].integers ? " %" PRId32 : " %08" PRIx32,
                     bits);
            put(user, line);
        }
        put(user, "\n");
    }
    put(user, "end\n");
}
