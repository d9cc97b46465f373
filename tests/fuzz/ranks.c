/* SPDX-License-Identifier: Apache-2.0 */
/* The file of measured times: whatever it holds, a start reads it, and what it finds is a time. The
 * same bytes as records of conformance, which are read as they were written. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "../core/select_fixture.h"
#include "fuzz.h"
#include "host/conformance.h"
#include "operators.h"

/* A folder in memory for this process; it goes with it. */
static const char *folder(void)
{
    static char path[64];
    if (path[0] == '\0') {
        snprintf(path, sizeof path, "/dev/shm/attn_fuzz_XXXXXX");
        FUZZ_CHECK(mkdtemp(path) != NULL);
    }
    return path;
}

static void clean_up(void)
{
    char path[96];
    snprintf(path, sizeof path, "%s/ranks", folder());
    unlink(path);
    rmdir(folder());
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static bool prepared;
    char path[96], directory[64];
    struct fixture fixture;
    struct arena arena;
    snprintf(directory, sizeof directory, "%s", folder());
    snprintf(path, sizeof path, "%s/ranks", directory);
    if (!prepared) {
        prepared = true;
        atexit(clean_up);
    }
    FILE *file = fopen(path, "wb");
    FUZZ_CHECK(file != NULL && fwrite(bytes, 1, size, file) == size && fclose(file) == 0);
    fixture_init(&fixture);
    fixture.runtime.settings.cache_dir = directory;
    arena_init(&arena, &fixture.runtime.host);
    struct known *known = known_read(&fixture.runtime, NULL, true, &arena);
    FUZZ_CHECK(known != NULL);
    const struct attn_layer_desc layer = fixture_layer("a");
    for (int32_t i = 0; i < known->count; i++) {
        struct measurement *m = &known->items[i], again;
        char own[1024];
        FUZZ_CHECK(m->nanoseconds > 0 && m->backend[0] != '\0');
        FUZZ_CHECK(measurement_text(m, own, sizeof own));
        own[strcspn(own, "\n")] = '\0';
        FUZZ_CHECK(measurement_parse(&again, own) && again.nanoseconds == m->nanoseconds);
        snprintf(known->device, sizeof known->device, "%s", m->device);
        const struct backend backend = {.full_name = m->backend};
        const struct rank rank = known_rank(known, &layer, ATTN_PHASE_DECODE, &backend);
        FUZZ_CHECK(rank.buckets >= 0 && rank.time > 0);
    }
    struct conformance record, again;
    char line[512], text[512];
    snprintf(line, sizeof line, "%.*s", (int)(size < 500 ? size : 500), (const char *)bytes);
    if (conformance_parse(&record, line)) {
        FUZZ_CHECK(conformance_text(&record, text, sizeof text));
        text[strcspn(text, "\n")] = '\0';
        FUZZ_CHECK(conformance_parse(&again, text));
        FUZZ_CHECK(conformance_is_of(&again, record.backend, record.device));
        FUZZ_CHECK(again.passed == record.passed && again.file == record.file);
    }
    arena_finish(&arena);
    fixture_finish(&fixture);
    return 0;
}
