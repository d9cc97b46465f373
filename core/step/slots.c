/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_VALIDATE=1: slots that new rows of a cache go to. */
#include <stdio.h>

#include "step/plan_state.h"
#include "util/error.h"

/* Two of slots first .. first + SLOTS_AT_ONCE - 1 that are one, by a bit each. */
#define SLOTS_AT_ONCE 65536
static int64_t find_twice(const int64_t *slots, int64_t count, int64_t first)
{
    uint64_t seen[SLOTS_AT_ONCE / 64] = {0};
    for (int64_t t = 0; t < count; t++) {
        if (slots[t] < first || slots[t] - first >= SLOTS_AT_ONCE) {
            continue;
        }
        const int64_t at = slots[t] - first;
        if (seen[at / 64] >> (at % 64) & 1) {
            return t;
        }
        seen[at / 64] |= UINT64_C(1) << (at % 64);
    }
    return -1;
}

/* "request 1, token 3: slot 128"; of a further table "row 3: slot 128". */
static void name_slot(char *text, size_t size, const struct attn_batch *b, const int64_t *slots,
                      int64_t t)
{
    int32_t r = 0;
    while (b != NULL && r + 1 < b->num_reqs && b->query_start_loc_host[r + 1] <= t) {
        r++;
    }
    if (b != NULL) {
        snprintf(text, size, "request %d, token %lld: slot %lld", r, (long long)t,
                 (long long)slots[t]);
    } else {
        snprintf(text, size, "row %lld: slot %lld", (long long)t, (long long)slots[t]);
    }
}

attn_status validate_slot_list(const int64_t *slots, int64_t count, int64_t most, int64_t num_slots,
                               const struct attn_batch *batch, struct attn_error *error)
{
    const char *field = batch != NULL ? "slot_mapping" : "tables";
    int64_t low = num_slots, high = -1;
    char slot[80];
    if (count > most) {
        return BAD(field,
                   "%lld slots; the cache has %lld, and with padding a step has %lld at most",
                   (long long)count, (long long)num_slots, (long long)most);
    }
    for (int64_t t = 0; t < count; t++) {
        if (slots[t] >= num_slots) {
            name_slot(slot, sizeof slot, batch, slots, t);
            return BAD(field, "%s; the cache has slots 0 to %lld", slot, (long long)num_slots - 1);
        }
        low = slots[t] >= 0 && slots[t] < low ? slots[t] : low;
        high = slots[t] > high ? slots[t] : high;
    }
    for (int64_t first = low; first <= high; first += SLOTS_AT_ONCE) {
        const int64_t second = find_twice(slots, count, first);
        if (second >= 0) {
            name_slot(slot, sizeof slot, batch, slots, second);
            return BAD(field, "%s is that of an earlier token, too", slot);
        }
    }
    return ATTN_OK;
}
