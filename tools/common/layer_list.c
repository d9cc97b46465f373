/* SPDX-License-Identifier: Apache-2.0 */
#include "common/layer_list.h"

#include <stdbool.h>
#include <stdio.h>

#define LEAST_STEPS 4 /* indices with one distance that are shortened */

void layer_list(const int32_t *indices, int32_t count, char *text, size_t size)
{
    size_t used = 0;
    bool even = count >= LEAST_STEPS && indices[1] > indices[0] + 1;
    for (int32_t i = 2; i < count; i++) {
        even = even && indices[i] - indices[i - 1] == indices[1] - indices[0];
    }
    text[0] = '\0';
    if (even) {
        snprintf(text, size, "%d, %d ... %d", indices[0], indices[1], indices[count - 1]);
        return;
    }
    for (int32_t i = 0, end; i < count; i = end) {
        for (end = i + 1; end < count && indices[end] == indices[end - 1] + 1; end++) {
        }
        char range[32];
        if (end - i > 1) {
            snprintf(range, sizeof range, "%s%d-%d", i > 0 ? ", " : "", indices[i],
                     indices[end - 1]);
        } else {
            snprintf(range, sizeof range, "%s%d", i > 0 ? ", " : "", indices[i]);
        }
        bool fits = used + sizeof range + sizeof ", ..." < size;
        used += (size_t)snprintf(text + used, size - used, "%s", fits ? range : ", ...");
        if (!fits) {
            return;
        }
    }
}
