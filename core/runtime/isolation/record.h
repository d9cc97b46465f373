/* SPDX-License-Identifier: Apache-2.0 */
/* What the probe of one file came to, as bytes: the cache keeps them, the scanner sends them
 * through its pipe.
 *
 *     "ATTNPROB"  uint64 format  uint64 payload size  uint64 FNV-1a of the payload
 *     payload: key, file, outcome, identity, devices, backends with their extensions
 *
 * Integers are little-endian, text is its length and its bytes with the NUL, a device or backend
 * its struct, of this ABI, with the texts and arrays that it points at after it. Readers trust
 * nothing: sizes are checked here, and what the items say passes the same checks as a plugin's own
 * report. */
#ifndef CORE_RUNTIME_ISOLATION_RECORD_H
#define CORE_RUNTIME_ISOLATION_RECORD_H

#include <attn/capability.h>

#include "runtime/isolation/isolation.h"
#include "util/arena.h"
#include "util/text.h"

#define RECORD_FORMAT 10
#define RECORD_MAX_SIZE ((size_t)4 << 20)

struct found;

struct record {
    struct probe_key key;
    const char *file;
    int32_t deadline_ms; /* that the probe had; 0 in the scanner's answer */
    attn_status status;  /* of loading and probing; no items unless ATTN_OK */
    const char *field;   /* why not, or why an item was left out; clean text */
    const char *message;
    uint32_t abi_version; /* 0 and empty names: refused before they were known */
    const char *name;
    const char *version;
    const char *vendor;
    const unsigned char *items; /* of a record that was read */
    size_t items_size;
};

/* Appends a record; `found` gives the items. out->failed: no memory. */
void record_write(struct text *out, const struct record *record, const struct found *found);

/* Text and items of `record` point into `bytes`. NULL, or what is wrong with the bytes. */
const char *record_read(struct record *record, const unsigned char *bytes, size_t size);

/* Hands the items to a sink, as the plugin's probe would. False: the bytes are wrong, or `arrays`,
 * which holds arrays until the sink returns, found no memory (arrays->failed). */
bool record_report(const struct record *record, const struct attn_probe_sink *sink,
                   struct arena *arrays);

#endif
