/* SPDX-License-Identifier: Apache-2.0 */
/* Sources: Linux's Documentation/ABI/testing/sysfs-bus-pci and include/drm/intel/pciids.h; Level
 * Zero's programming guide for ZE_AFFINITY_MASK. */
#include "sysfs.h"

#include <dirent.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARDS "/sys/class/drm"
#define INTEL_VENDOR 0x8086

/* Ranges of PCI ids. Groups of 1024 threads and 256 registers are what the kernels need: Xe-HPG and
 * later have them. What is not known to have double is taken as without; matrix units count where
 * their subgroups have 16 lanes (dg2's have 8). */
static const struct family {
    uint32_t first, last;
    const char *arch, *name;
    bool has_double, has_matrix, discrete;
} families[] = {
    {0x0b60, 0x0bff, "pvc", "Data Center GPU Max", true, true, true},
    {0x4f80, 0x4f8f, "dg2", "Arc A-series", false, false, true},
    {0x5690, 0x56cf, "dg2", "Arc A-series or Data Center GPU Flex", false, false, true},
    {0x6420, 0x64bf, "lnl", "Lunar Lake", true, true, false},
    {0x7d40, 0x7dff, "mtl", "Meteor Lake or Arrow Lake", false, false, false},
    {0xe200, 0xe2ff, "bmg", "Arc B-series", true, true, true},
};

static bool read_file(const char *path, char *text, size_t room)
{
    FILE *file = fopen(path, "r");
    size_t length = file != NULL ? fread(text, 1, room - 1, file) : 0;
    if (file != NULL) {
        fclose(file);
    }
    text[length] = '\0';
    return length > 0;
}

static uint32_t read_number(int card, const char *name)
{
    char path[128], text[32];
    snprintf(path, sizeof path, CARDS "/card%d/device/%s", card, name);
    return read_file(path, text, sizeof text) ? (uint32_t)strtoul(text, NULL, 0) : 0;
}

/* The largest window into the device's memory: all of it where the BAR can be resized. A GPU that
 * shares the host's memory has only small ones. */
static int64_t memory_of(int card)
{
    char path[128], text[2048];
    uint64_t largest = 0, start, end, flags;
    int used;
    snprintf(path, sizeof path, CARDS "/card%d/device/resource", card);
    read_file(path, text, sizeof text);
    for (const char *line = text;
         sscanf(line, "%" SCNx64 " %" SCNx64 " %" SCNx64 "%n", &start, &end, &flags, &used) == 3;
         line += used) {
        largest = end - start > largest ? end - start : largest;
    }
    return largest > UINT64_C(256) << 20 ? (int64_t)largest + 1 : 0;
}

/* 0: the card is not Intel's, or its files cannot be read. */
static int read_card(int card, struct intel_device *device)
{
    char path[128], text[1024];
    memset(device, 0, sizeof *device);
    snprintf(path, sizeof path, CARDS "/card%d/device/uevent", card);
    if (read_number(card, "vendor") != INTEL_VENDOR || !read_file(path, text, sizeof text)) {
        return 0;
    }
    const char *place = strstr(text, "PCI_SLOT_NAME=");
    if (place == NULL || sscanf(place, "PCI_SLOT_NAME=%x:%x:%x.%x", &device->domain, &device->bus,
                                &device->slot, &device->function) != 4) {
        return 0;
    }
    uint32_t id = read_number(card, "device");
    struct gpu_found *found = &device->found;
    snprintf(found->arch, sizeof found->arch, "unknown");
    snprintf(found->name, sizeof found->name, "Intel GPU %04x", id);
    for (size_t i = 0; i < sizeof families / sizeof *families; i++) {
        const struct family *f = &families[i];
        if (id >= f->first && id <= f->last) {
            snprintf(found->arch, sizeof found->arch, "%s", f->arch);
            device->has_double = f->has_double;
            device->has_matrix = f->has_matrix;
            device->discrete = f->discrete;
            found->served = true;
            snprintf(found->name, sizeof found->name, "Intel %s (%04x)", f->name, id);
        }
    }
    found->memory_bytes = device->discrete ? memory_of(card) : 0;
    return 1;
}

static int compare(const void *a, const void *b)
{
    const struct intel_device *x = a, *y = b;
    const uint32_t one[] = {!x->discrete, x->domain, x->bus, x->slot, x->function};
    const uint32_t two[] = {!y->discrete, y->domain, y->bus, y->slot, y->function};
    for (int i = 0; i < 5; i++) {
        if (one[i] != two[i]) {
            return one[i] < two[i] ? -1 : 1;
        }
    }
    return 0;
}

/* The devices that a list of numbers, each perhaps with ".part", names. */
static int32_t select_devices(const char *text, struct intel_device *devices, int32_t count)
{
    int32_t kept = 0;
    for (int32_t i = 0; i < count; i++) {
        bool named = false;
        for (const char *at = text; at != NULL && *at != '\0'; at = strchr(at, ',')) {
            at += *at == ',';
            char *end;
            long number = strtol(at, &end, 10);
            named |= end != at && number == i;
        }
        if (named) {
            devices[kept++] = devices[i];
        }
    }
    return kept;
}

int32_t intel_devices(struct intel_device *devices, int32_t room, const char **cause)
{
    DIR *folder = opendir(CARDS);
    int32_t count = 0;
    if (folder == NULL) {
        *cause = "no graphics driver: " CARDS " is not there";
        return 0;
    }
    for (const struct dirent *entry; (entry = readdir(folder)) != NULL && count < room;) {
        int card, used = 0;
        if (sscanf(entry->d_name, "card%d%n", &card, &used) == 1 && entry->d_name[used] == '\0') {
            count += read_card(card, &devices[count]);
        }
    }
    closedir(folder);
    qsort(devices, (size_t)count, sizeof *devices, compare);
    *cause = "no Intel GPU in " CARDS;
    const char *mask = getenv("ZE_AFFINITY_MASK");
    if (count > 0 && mask != NULL && mask[0] != '\0') {
        count = select_devices(mask, devices, count);
        *cause = "ZE_AFFINITY_MASK hides every Intel GPU";
    }
    return count;
}
