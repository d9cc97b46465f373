/* SPDX-License-Identifier: Apache-2.0 */
/* A capsule's head. What is taken is written again as the same bytes, and has tensors of a size
 * that can be allocated. */
#include <string.h>

#include "fuzz.h"
#include "common/capsule_read.h"

struct written {
    const uint8_t *bytes;
    size_t size, at;
};

static void check_line(void *user, const char *line)
{
    struct written *w = user;
    const size_t length = strlen(line);
    FUZZ_CHECK(length <= w->size - w->at && memcmp(w->bytes + w->at, line, length) == 0);
    w->at += length;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static struct capsule capsule;
    struct blocks blocks = {.count = 0};
    char why[512] = "";
    const char *data, *text = memcpy(blocks_add(&blocks, size + 1), bytes, size);
    if (capsule_read(&capsule, text, size, &data, why, sizeof why) == NULL) {
        struct written written = {bytes, size, 0};
        FUZZ_CHECK(why[0] == '\0');
        FUZZ_CHECK(capsule_bytes(&capsule) > 0 && capsule_bytes(&capsule) <= CAPSULE_BYTES);
        FUZZ_CHECK(data - text + (capsule.real ? capsule_bytes(&capsule) : 0) == (int64_t)size);
        capsule_write(&capsule, check_line, &written);
        FUZZ_CHECK(written.at == (size_t)(data - text));
    } else {
        FUZZ_CHECK(why[0] != '\0');
    }
    blocks_free(&blocks);
    return 0;
}
