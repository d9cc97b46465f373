/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: Linux's include/uapi/linux/kfd_sysfs.h and drivers/gpu/drm/amd/amdkfd/kfd_topology.c;
 * "GPU isolation techniques" in ROCm's documentation for the variables. */
#include "kfd.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NODES "/sys/class/kfd/kfd/topology/nodes"

/* The value of a line "name number" of a properties file; `missing` if it is not there. */
static uint64_t property(const char *text, const char *name, uint64_t missing)
{
    size_t length = strlen(name);
    for (const char *line = text; line != NULL && *line != '\0'; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, length) == 0 && line[length] == ' ') {
            return strtoull(line + length + 1, NULL, 10);
        }
    }
    return missing;
}

/* A whole small file; its length, 0 where it cannot be read. */
static size_t read_file(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "r");
    size_t length = file != NULL ? fread(text, 1, room - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[length] = '\0';
    return length;
}

/* Memory banks of the device itself: heap types 1 and 2 are frame buffers. */
static int64_t memory_of(int node)
{
    int64_t bytes = 0;
    for (int bank = 0; bank < 16; bank++) {
        char path[128], text[1024];
        snprintf(path, sizeof path, NODES "/%d/mem_banks/%d/properties", node, bank);
        if (read_file(path, text, sizeof text) == 0) {
            break;
        }
        uint64_t heap = property(text, "heap_type", 0);
        if (heap == 1 || heap == 2) {
            bytes += (int64_t)property(text, "size_in_bytes", 0);
        }
    }
    return bytes;
}

static int is_served(const char *arch)
{
    const char *list = HIP_TARGETS;
    size_t length = strlen(arch);
    for (const char *at = strstr(list, arch); at != NULL; at = strstr(at + 1, arch)) {
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == '\0')) {
            return 1;
        }
    }
    return 0;
}

/* Node `node` if it is a GPU that this process may use; its properties cannot be read otherwise. */
static int read_node(int node, struct gpu_found *device)
{
    char path[128], text[8192];
    memset(device, 0, sizeof *device);
    snprintf(path, sizeof path, NODES "/%d/properties", node);
    if (read_file(path, text, sizeof text) == 0) {
        return 0;
    }
    uint64_t target = property(text, "gfx_target_version", 0);
    uint64_t simds = property(text, "simd_count", 0), per_cu = property(text, "simd_per_cu", 4);
    if (target == 0 || simds == 0 || per_cu == 0) {
        return 0;
    }
    device->major = (int32_t)(target / 10000);
    device->minor = (int32_t)(target / 100 % 100);
    snprintf(device->arch, sizeof device->arch, "gfx%d%x%x", device->major, (unsigned)device->minor,
             (unsigned)(target % 100));
    device->num_sms = (int32_t)(simds / per_cu);
    device->memory_bytes = memory_of(node);
    device->served = is_served(device->arch);
    uint64_t id = property(text, "unique_id", 0);
    if (id != 0) {
        snprintf(device->uuid, sizeof device->uuid, "GPU-%016" PRIx64, id);
    }
    snprintf(path, sizeof path, NODES "/%d/name", node);
    size_t length = read_file(path, text, sizeof text);
    length = strcspn(text, "\n") < length ? strcspn(text, "\n") : length;
    snprintf(device->name, sizeof device->name, "AMD %s%s%.*s%s", device->arch,
             length > 0 ? " (" : "", (int)(length < 40 ? length : 40), text, length > 0 ? ")" : "");
    return 1;
}

/* Entries of a variable, indices or, where UUIDs are allowed, the beginning of one: those devices
 * in that order, up to the first entry that names none. */
static int32_t select_devices(const char *text, struct gpu_found *devices, int32_t count)
{
    struct gpu_found all[GPU_MAX_FOUND];
    int32_t found = 0;
    memcpy(all, devices, (size_t)count * sizeof *all);
    while (*text != '\0' && found < count) {
        size_t length = strcspn(text, ",");
        char *end;
        long index = strtol(text, &end, 10);
        if (strncmp(text, "GPU-", 4) == 0 || strncmp(text, "0x", 2) == 0) {
            for (index = 0; index < count; index++) {
                if (all[index].uuid[0] != '\0' && strncmp(all[index].uuid, text, length) == 0) {
                    break;
                }
            }
            end = (char *)text + length;
        }
        if (end != text + length || length == 0 || index < 0 || index >= count) {
            break;
        }
        devices[found++] = all[index];
        text += length + (text[length] == ',');
    }
    return found;
}

int32_t kfd_devices(struct gpu_found *devices, int32_t room, const char **cause)
{
    /* The driver's runtime filters first, then HIP, which takes either of two names. */
    static const char *const variables[] = {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES",
                                            "CUDA_VISIBLE_DEVICES"};
    DIR *folder = opendir(NODES);
    int32_t count = 0;
    int last = -1;
    if (folder == NULL) {
        *cause = "no AMD GPU driver: " NODES " is not there";
        return 0;
    }
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        int node = atoi(entry->d_name);
        last = entry->d_name[0] >= '0' && entry->d_name[0] <= '9' && node > last ? node : last;
    }
    closedir(folder);
    for (int node = 0; node <= last && count < room && count < GPU_MAX_FOUND; node++) {
        count += read_node(node, &devices[count]);
    }
    *cause = "no AMD GPU that this process may use in " NODES;
    for (int v = 0; v < 3 && count > 0; v++) {
        const char *text = getenv(variables[v]);
        if (text == NULL || (v == 2 && getenv(variables[1]) != NULL)) {
            continue;
        }
        count = select_devices(text, devices, count);
        *cause = v == 0   ? "ROCR_VISIBLE_DEVICES hides every AMD GPU"
                 : v == 1 ? "HIP_VISIBLE_DEVICES hides every AMD GPU"
                          : "CUDA_VISIBLE_DEVICES, which HIP reads, hides every AMD GPU";
    }
    return count;
}
