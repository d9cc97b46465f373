/* SPDX-License-Identifier: Apache-2.0 */
/* What is on file about a plugin, or is left by its scanner: the bytes are a record's
 * payload, its header is put right. What is taken over passes for a plugin's report, is written
 * again as the same bytes, and can be selected from. */
#include <string.h>

#include "backend.h"
#include "util/hash.h"
#include "runtime/probe.h"
#include "isolation.h"

#define HEADER 32

static void put(uint8_t *at, uint64_t value)
{
    for (int32_t i = 0; i < 8; i++) {
        at[i] = (uint8_t)(value >> (8 * i));
    }
}

/* The payload after a header that fits it. */
static uint8_t *with_header(struct blocks *blocks, const uint8_t *payload, size_t size)
{
    uint8_t *bytes = blocks_add(blocks, HEADER + size);
    memcpy(bytes, "ATTNPROB", 8);
    put(bytes + 8, RECORD_FORMAT);
    put(bytes + 16, size);
    put(bytes + 24, hash_bytes(HASH_INIT, payload, size));
    memcpy(bytes + HEADER, payload, size);
    return bytes;
}

static attn_status report(const struct record *record, struct found *found, struct fixture *fixture,
                          struct attn_error *error)
{
    struct arena scratch;
    const struct attn_probe_sink sink = found_sink(found);
    arena_init(&scratch, &fixture->runtime.host);
    const bool whole = record_report(record, &sink, &scratch);
    FUZZ_CHECK(!scratch.failed);
    arena_finish(&scratch);
    return whole ? found_status(found, error) : ATTN_ERROR_PLUGIN;
}

/* Both passes over what was found give the same record. */
static void check_again(const struct record *first, const struct found *found,
                        struct fixture *fixture)
{
    struct text once, twice;
    struct record again;
    struct arena arena;
    struct found same;
    struct attn_error error = ATTN_ERROR_INIT;
    text_init(&once, &fixture->runtime.host);
    text_init(&twice, &fixture->runtime.host);
    arena_init(&arena, &fixture->runtime.host);
    record_write(&once, first, found);
    FUZZ_CHECK(record_read(&again, (const uint8_t *)once.data, once.length) == NULL);
    FUZZ_CHECK(found_init(&same, &arena, &error) == ATTN_OK);
    FUZZ_CHECK(report(&again, &same, fixture, &error) == ATTN_OK);
    record_write(&twice, &again, &same);
    FUZZ_CHECK(once.length == twice.length && memcmp(once.data, twice.data, once.length) == 0);
    arena_finish(&arena);
    text_finish(&twice);
    text_finish(&once);
}

static void select_from(const struct found *found, struct fixture *fixture)
{
    struct attn_error error = ATTN_ERROR_INIT;
    attn_assignment *assignment = NULL;
    fixture->runtime.num_backends = 0;
    for (int32_t i = 0; i < found->num_backends && i < MAX_BACKENDS; i++) {
        fixture->backends[i] = found->backends[i];
        fixture->backends[i].plugin = 0;
        fixture->runtime.num_backends++;
    }
    for (int32_t sample = 0; sample < SAMPLE_COUNT; sample++) {
        struct sampled s;
        sample_layer(&s, sample);
        const attn_status status = fixture_select(fixture, "", &s.desc, 1, &assignment, &error);
        fuzz_check_error(status, &error);
        assignment_destroy(assignment);
        assignment = NULL;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    struct blocks blocks = {.count = 0};
    struct fixture fixture;
    struct arena arena;
    struct found found;
    struct record record;
    struct attn_error error = ATTN_ERROR_INIT;
    const uint8_t *whole = with_header(&blocks, bytes, size);
    fixture_init(&fixture);
    arena_init(&arena, &fixture.runtime.host);
    FUZZ_CHECK(found_init(&found, &arena, &error) == ATTN_OK);
    if (record_read(&record, whole, HEADER + size) == NULL) {
        const attn_status status = report(&record, &found, &fixture, &error);
        FUZZ_CHECK(status_is_known(status));
        if (status == ATTN_OK && record.status == ATTN_OK) {
            check_again(&record, &found, &fixture);
            select_from(&found, &fixture);
        }
    }
    arena_finish(&arena);
    fixture_finish(&fixture);
    blocks_free(&blocks);
    return 0;
}
