/* SPDX-License-Identifier: Apache-2.0 */
/* What attn-check found, on file: `<cache_dir>/conformance`, one line a backend and device:
 *
 *     BACKEND DEVICE FILE DRIVERS LIBRARY MODE SEED PASSED FAILED SKIPPED
 *     cpu_simd@avx2 1:0 9a3c04d1c2b8e6f7 5b1f0a9d3e7c2468 0.1.0 quick 1 1159 0 6
 *
 * DEVICE is type:id, FILE a hash of the plugin file, DRIVERS one of the versions that drivers give.
 * The last line of a backend and device counts, and none whose hashes are others today. Nothing but
 * libc is needed here: tools are built with this source too. */
#ifndef CORE_HOST_CONFORMANCE_H
#define CORE_HOST_CONFORMANCE_H

#include <attn/tensor.h>
#include <stdbool.h>
#include <stddef.h>

#define CONFORMANCE_FILE "conformance"

struct conformance {
    char backend[160]; /* "name" or "name@variant" */
    struct attn_device device;
    uint64_t file, drivers;
    char version[32], mode[16];
    uint64_t seed;
    int32_t passed, failed, skipped;
};

/* False: no such line. */
bool conformance_parse(struct conformance *record, const char *line);
/* With a newline; false: it does not fit. */
bool conformance_text(const struct conformance *record, char *text, size_t size);
/* Whose the line is: its backend's and device's. */
bool conformance_is_of(const struct conformance *record, const char *backend,
                       struct attn_device device);
/* NULL, or why the record says nothing for a plugin file and drivers of these hashes. */
const char *conformance_lacks(const struct conformance *record, uint64_t file, uint64_t drivers);

/* A file's content; false: it cannot be read. */
bool file_hash(const char *path, uint64_t *hash);
/* Into `hash`: the first bytes of a small file, or that it is not there. */
uint64_t file_hash_start(uint64_t hash, const char *path);
/* Into `hash`: the files in which GPUs' drivers give their versions. */
uint64_t drivers_hash(uint64_t hash);

#endif
