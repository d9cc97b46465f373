/* SPDX-License-Identifier: Apache-2.0 */
/* On what the answer of a probe depends: the plugin's file, and the machine around it. */
#include <attn/version.h>
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <string.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "host/conformance.h"
#include "isolation.h"
#include "runtime/load.h"
#include "util/hash.h"

#if defined(__x86_64__)
#define LIBRARY_FOLDER "/usr/lib/x86_64-linux-gnu"
#else
#define LIBRARY_FOLDER "/usr/lib/aarch64-linux-gnu"
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif

/* Vendors read these themselves; here they only make keys differ. */
static const char *const visibility[] = {
    "CUDA_VISIBLE_DEVICES",     "CUDA_DEVICE_ORDER",      "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",      "ROCR_VISIBLE_DEVICES",   "GPU_DEVICE_ORDINAL",
    "HSA_OVERRIDE_GFX_VERSION", "ZE_AFFINITY_MASK",       "ZE_FLAT_DEVICE_HIERARCHY",
    "ZE_ENABLE_ALT_DRIVERS",    "ONEAPI_DEVICE_SELECTOR", "LD_LIBRARY_PATH",
};

/* Folders whose entries, of that beginning, are devices. */
static const struct {
    const char *folder, *beginning;
} nodes[] = {
    {"/dev", "nvidia"}, {"/dev", "kfd"},    {"/dev/nvidia-caps", ""},
    {"/dev/dri", ""},   {"/dev/accel", ""}, {"/proc/driver/nvidia/gpus", ""},
};

/* A directory has no order of its own: the entries are summed up. */
static uint64_t hash_nodes(uint64_t hash, const char *folder, const char *beginning)
{
    uint64_t sum = 0;
    DIR *directory = opendir(folder);
    const struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        struct stat info;
        if (strncmp(entry->d_name, beginning, strlen(beginning)) != 0 || entry->d_name[0] == '.') {
            continue;
        }
        uint64_t item = hash_string(HASH_INIT, entry->d_name);
        if (fstatat(dirfd(directory), entry->d_name, &info, 0) == 0) {
            /* A node that becomes ours to open is another state. */
            const uint64_t facts[] = {
                info.st_rdev, info.st_mode,
                (uint64_t)faccessat(dirfd(directory), entry->d_name, R_OK | W_OK, AT_EACCESS)};
            item = hash_bytes(item, facts, sizeof facts);
        }
        sum += item;
    }
    if (directory != NULL) {
        closedir(directory);
    }
    return hash_bytes(hash, &sum, sizeof sum);
}

static uint64_t nanoseconds(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

static uint64_t hash_file(uint64_t hash, const char *path)
{
    struct file_id id = {.inode = 0};
    struct stat info;
    if (stat(path, &info) == 0) {
        file_id_set(&id, &info);
    }
    return hash_bytes(hash, &id, sizeof id);
}

static uint64_t hash_folder(uint64_t hash, const char *folder, size_t length)
{
    char path[PATH_MAX];
    struct stat info;
    if (snprintf(path, sizeof path, "%.*s", (int)length, folder) >= (int)sizeof path ||
        stat(path, &info) != 0) {
        return hash_bytes(hash, &length, sizeof length);
    }
    const uint64_t facts[] = {info.st_dev, info.st_ino, nanoseconds(&info.st_mtim)};
    return hash_bytes(hash, facts, sizeof facts);
}

/* Without the leaves that differ between the cores of one machine. */
static uint64_t hash_cpu(uint64_t hash)
{
    const unsigned long words[] = {getauxval(AT_HWCAP), getauxval(AT_HWCAP2),
                                   (unsigned long)sysconf(_SC_NPROCESSORS_ONLN)};
    hash = hash_bytes(hash, words, sizeof words);
#if defined(__x86_64__)
    static const unsigned leaves[][2] = {{0, 0},           {7, 0},           {7, 1},
                                         {0x80000001u, 0}, {0x80000002u, 0}, {0x80000003u, 0},
                                         {0x80000004u, 0}};
    unsigned r[4] = {0};
    for (size_t i = 0; i < sizeof leaves / sizeof *leaves; i++) {
        if (__get_cpuid_count(leaves[i][0], leaves[i][1], &r[0], &r[1], &r[2], &r[3])) {
            hash = hash_bytes(hash, r, sizeof r);
        }
    }
    if (__get_cpuid(1, &r[0], &r[1], &r[2], &r[3])) {
        r[1] = 0; /* the core's own number */
        hash = hash_bytes(hash, r, sizeof r);
        if (r[2] & bit_OSXSAVE) {
            unsigned low, high;
            __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
            hash = hash_bytes(hash, &low, sizeof low);
        }
    }
#endif
    return hash;
}

static uint64_t read_name(void)
{
    char core[PATH_MAX];
    struct utsname host;
    const uint64_t user = geteuid();
    uint64_t hash = hash_bytes(HASH_INIT, &user, sizeof user);
    if (uname(&host) == 0) {
        hash = hash_string(hash, host.nodename);
    }
    hash = file_hash_start(hash, "/proc/sys/kernel/random/boot_id");
    hash = hash_string(hash, core_file(core) ? core : NULL);
    for (size_t i = 0; i < sizeof visibility / sizeof *visibility; i++) {
        hash = hash_string(hash, getenv(visibility[i]));
    }
    return hash;
}

/* Folders in which a vendor's library arrives: what was missing may be there. */
static uint64_t hash_libraries(uint64_t hash)
{
    static const char *const folders[] = {"/lib",           "/lib64",       "/usr/lib",
                                          "/usr/local/lib", LIBRARY_FOLDER, "/usr/local/cuda/lib64",
                                          "/opt/rocm/lib"};
    const char *path = secure_getenv("LD_LIBRARY_PATH");
    hash = hash_string(hash, path);
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) {
        hash = hash_folder(hash, folders[i], strlen(folders[i]));
    }
    for (size_t length; path != NULL && *path != '\0'; path += length + (path[length] == ':')) {
        length = strcspn(path, ":");
        hash = hash_folder(hash, path, length);
    }
    return hash;
}

static uint64_t read_state(void)
{
    const uint32_t versions[] = {ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION};
    char own[PATH_MAX];
    struct stat libraries;
    uint64_t hash = hash_string(HASH_INIT, ATTN_LIBRARY_VERSION);
    hash = hash_bytes(hash, versions, sizeof versions);
    /* Another build of one version may have other structs, which a record holds as bytes. */
    hash = hash_file(hash, core_file(own) ? own : "");
    hash = hash_file(hash, scanner_path(own) ? own : "");
    hash = drivers_hash(hash);
    for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
        hash = hash_nodes(hash, nodes[i].folder, nodes[i].beginning);
    }
    /* Package managers rewrite it with every library: what was missing yesterday may be there. */
    if (stat("/etc/ld.so.cache", &libraries) == 0) {
        const uint64_t facts[] = {libraries.st_ino, (uint64_t)libraries.st_size,
                                  nanoseconds(&libraries.st_mtim)};
        hash = hash_bytes(hash, facts, sizeof facts);
    }
    return hash_cpu(hash_libraries(hash));
}

struct machine machine_read(void)
{
    return (struct machine){.name = read_name(), .state = read_state()};
}
