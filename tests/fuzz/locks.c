/* SPDX-License-Identifier: Apache-2.0 */
/* The file of ATTN_LOCK. What passes as a lock falls into records; each is like itself, and unlike
 * one that has a line more. */
#include <string.h>

#include "fuzz.h"
#include "host/lock_text.h"

static void check_text(void *user, const char *difference)
{
    FUZZ_CHECK(strlen(difference) > 0);
    ++*(int32_t *)user;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct blocks blocks = {.count = 0};
    char *text = blocks_add(&blocks, size + 1), *rest = text, *record;
    memcpy(text, bytes, size);
    if (size <= 4096 && lock_check(text, size) == NULL) {
        while ((record = lock_next(&rest)) != NULL) {
            const size_t length = strlen(record);
            struct blocks copy = {.count = 0};
            char *more = blocks_add(&copy, length + 16);
            int32_t found = 0;
            memcpy(more, record, length);
            strcpy(more + length, "\nnever before\n");
            FUZZ_CHECK(lock_compare(record, record, "a", "a", check_text, &found) == 0);
            FUZZ_CHECK(found == 0);
            if (strstr(record, "never") == NULL) {
                FUZZ_CHECK(lock_compare(record, more, "a", "b", check_text, &found) > 0);
                FUZZ_CHECK(lock_compare(more, record, "a", "b", check_text, &found) > 0);
                FUZZ_CHECK(found >= 2);
            }
            blocks_free(&copy);
        }
    }
    blocks_free(&blocks);
    return 0;
}
