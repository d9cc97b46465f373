/* SPDX-License-Identifier: Apache-2.0 */
#include "host/conformance.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "util/hash.h"

static const char *const version_files[] = {
    "/proc/driver/nvidia/version", "/sys/module/nvidia/version",    "/sys/module/nvidia/srcversion",
    "/sys/module/amdgpu/version",  "/sys/module/amdgpu/srcversion", "/sys/module/i915/srcversion",
    "/sys/module/xe/srcversion",
};

bool conformance_parse(struct conformance *r, const char *line)
{
    int end = 0;
    return sscanf(line,
                  "%159s %" SCNd32 ":%" SCNd32 " %" SCNx64 " %" SCNx64 " %31s %15s %" SCNu64
                  " %" SCNd32 " %" SCNd32 " %" SCNd32 " %n",
                  r->backend, &r->device.type, &r->device.id, &r->file, &r->drivers, r->version,
                  r->mode, &r->seed, &r->passed, &r->failed, &r->skipped, &end) == 11 &&
           line[end] == '\0' && r->passed >= 0 && r->failed >= 0 && r->skipped >= 0;
}

bool conformance_text(const struct conformance *r, char *text, size_t size)
{
    return (size_t)snprintf(text, size,
                            "%s %" PRId32 ":%" PRId32 " %016" PRIx64 " %016" PRIx64
                            " %s %s %" PRIu64 " %" PRId32 " %" PRId32 " %" PRId32 "\n",
                            r->backend, r->device.type, r->device.id, r->file, r->drivers,
                            r->version, r->mode, r->seed, r->passed, r->failed, r->skipped) < size;
}

bool conformance_is_of(const struct conformance *record, const char *backend,
                       struct attn_device device)
{
    return strcmp(record->backend, backend) == 0 && record->device.type == device.type &&
           record->device.id == device.id;
}

const char *conformance_lacks(const struct conformance *record, uint64_t file, uint64_t drivers)
{
    return record->file != file         ? "a record of another plugin file"
           : record->drivers != drivers ? "a record with other drivers"
           : record->failed > 0         ? "a record with failed cases"
           : record->passed == 0        ? "a record without passed cases"
                                        : NULL;
}

bool file_hash(const char *path, uint64_t *hash)
{
    unsigned char bytes[65536];
    const int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t size = descriptor >= 0 ? 1 : -1;
    *hash = HASH_INIT;
    while (size > 0) {
        size = read(descriptor, bytes, sizeof bytes);
        *hash = size > 0 ? hash_bytes(*hash, bytes, (size_t)size) : *hash;
    }
    if (descriptor >= 0) {
        close(descriptor);
    }
    return size == 0;
}

uint64_t file_hash_start(uint64_t hash, const char *path)
{
    char content[512];
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t size = descriptor >= 0 ? read(descriptor, content, sizeof content) : -1;
    if (descriptor >= 0) {
        close(descriptor);
    }
    hash = hash_bytes(hash, &size, sizeof size);
    return size > 0 ? hash_bytes(hash, content, (size_t)size) : hash;
}

uint64_t drivers_hash(uint64_t hash)
{
    for (size_t i = 0; i < sizeof version_files / sizeof *version_files; i++) {
        hash = file_hash_start(hash, version_files[i]);
    }
    return hash;
}
