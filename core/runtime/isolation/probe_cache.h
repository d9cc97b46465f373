/* SPDX-License-Identifier: Apache-2.0 */
/* Answers of probes on file, `<cache_dir>/probe-<hash>`, one for each plugin file: read at every
 * start, written next to and renamed, so that many processes may do so at once. What cannot be
 * trusted is passed over with a warning and written anew; a cache never fails anything but for want
 * of memory. */
#ifndef CORE_RUNTIME_ISOLATION_PROBE_CACHE_H
#define CORE_RUNTIME_ISOLATION_PROBE_CACHE_H

#include <time.h>

#include "runtime/isolation/record.h"
#include "runtime/runtime.h"

/* A refusal, or that there is no such hardware, is trusted for so long: a library that has arrived
 * leaves no trace on the plugin's file. */
#define CACHE_REFUSAL_SECONDS 600
/* A deadline that has passed says as much of the machine, and nothing of a longer one. */
#define CACHE_TIMEOUT_SECONDS 60
/* A record not rewritten for so long belongs to a boot or a choice of devices that is gone. */
#define CACHE_MAX_AGE_SECONDS ((time_t)30 * 24 * 3600)

struct cache_entry {
    struct record record; /* text and items in `bytes` */
    unsigned char *bytes;
    size_t size;
    time_t age; /* s */
};

/* ATTN_OK, ATTN_ERROR_NOT_FOUND (silent where nothing is on file), or ATTN_ERROR_OUT_OF_MEMORY. */
attn_status cache_read(const attn_runtime *runtime, const char *file, const struct probe_key *key,
                       struct cache_entry *entry);
void cache_entry_finish(const attn_runtime *runtime, struct cache_entry *entry);

/* Failures are logged and that is all. */
void cache_write(attn_runtime *runtime, const char *file, const void *record, size_t size);

#endif
