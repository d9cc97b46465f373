/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/load.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <elf.h>
#include <stdint.h>

#include "util/hash.h"
#include "util/structs.h"
#include "util/text.h"

#define MAX_LABEL 127
#define REFUSE(field, ...) error_set(error, ATTN_ERROR_PLUGIN, field, __VA_ARGS__)

/* Files that this process has loaded. The dynamic linker knows a file by its path, and nothing is
 * unloaded: for a file that has replaced a loaded one it would return the old code. */
static struct {
    _Atomic uint64_t path; /* its hash; 0: free or being written */
    uint64_t device, inode, size;
} loaded[256];
static atomic_size_t num_loaded;

static uint64_t path_hash(const char *path)
{
    return hash_string(HASH_INIT, path) | 1;
}

static void remember(const char *path, const struct file_id *file)
{
    size_t at = atomic_fetch_add(&num_loaded, 1);
    if (at < sizeof loaded / sizeof *loaded) {
        loaded[at].device = file->device;
        loaded[at].inode = file->inode;
        loaded[at].size = file->size;
        atomic_store_explicit(&loaded[at].path, path_hash(path), memory_order_release);
    }
}

static bool is_known(const char *path, const struct file_id *file, bool *other)
{
    const uint64_t hash = path_hash(path);
    *other = false;
    for (size_t i = 0; i < sizeof loaded / sizeof *loaded; i++) {
        if (atomic_load_explicit(&loaded[i].path, memory_order_acquire) == hash) {
            *other = loaded[i].device != file->device || loaded[i].inode != file->inode ||
                     loaded[i].size != file->size;
            return true;
        }
    }
    return false;
}

static uint64_t nanoseconds(const struct timespec *time)
{
    return (uint64_t)time->tv_sec * 1000000000u + (uint64_t)time->tv_nsec;
}

void file_id_set(struct file_id *id, const struct stat *info)
{
    *id = (struct file_id){.device = info->st_dev,
                           .inode = info->st_ino,
                           .size = (uint64_t)info->st_size,
                           .modified = nanoseconds(&info->st_mtim),
                           .changed = nanoseconds(&info->st_ctim)};
}

bool file_id_same(const struct file_id *a, const struct file_id *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size &&
           a->modified == b->modified && a->changed == b->changed;
}

/* A user who can write a plugin's folder can replace the plugin, unless the folder is sticky. Root
 * runs only code that belongs to root or to the owner of this library. */
attn_status plugin_check_place(const char *file, struct attn_error *error)
{
    char folder[PATH_MAX], core[PATH_MAX];
    struct stat of_file, of_folder, of_core;
    bool build_tree;
    if (snprintf(folder, sizeof folder, "%s", file) >= (int)sizeof folder ||
        strrchr(folder, '/') == NULL) {
        return ATTN_OK; /* it cannot be opened either */
    }
    char *last = strrchr(folder, '/');
    last[last == folder] = '\0';
    if (stat(folder, &of_folder) != 0 || stat(file, &of_file) != 0) {
        return ATTN_OK;
    }
    REFUSE_IF(of_folder.st_mode & S_IWOTH && !(of_folder.st_mode & S_ISVTX), "file",
              "lies in %s, which every user can write (mode %o)", folder,
              of_folder.st_mode & 07777);
    if (geteuid() != 0) {
        return ATTN_OK;
    }
    const bool known = core_place(core, &build_tree) && stat(core, &of_core) == 0;
    const uid_t own = known ? of_core.st_uid : 0;
    const bool is_file = of_file.st_uid != 0 && of_file.st_uid != own;
    REFUSE_IF(is_file || (of_folder.st_uid != 0 && of_folder.st_uid != own), "file",
              "%s of user %u; root loads plugins of its own and of user %u, to whom libattn "
              "belongs",
              is_file ? "is" : "lies in a folder", is_file ? of_file.st_uid : of_folder.st_uid,
              own);
    return ATTN_OK;
}

#define MAX_SEGMENTS 128

#if defined(__x86_64__)
#define OWN_MACHINE EM_X86_64
#elif defined(__aarch64__)
#define OWN_MACHINE EM_AARCH64
#else
#define OWN_MACHINE EM_NONE /* left to the loader */
#endif
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define OWN_ORDER ELFDATA2LSB
#else
#define OWN_ORDER ELFDATA2MSB
#endif

static attn_status check_elf_header(const Elf64_Ehdr *header, ssize_t got, struct attn_error *error)
{
    const unsigned char *ident = header->e_ident;
    REFUSE_IF(got < EI_NIDENT || memcmp(ident, ELFMAG, SELFMAG) != 0, "file", "is not an ELF file");
    REFUSE_IF(ident[EI_CLASS] != ELFCLASS64, "file", "has ELF class %d; %d (64 bits) is needed",
              ident[EI_CLASS], ELFCLASS64);
    REFUSE_IF(ident[EI_DATA] != OWN_ORDER, "file", "has ELF byte order %d; %d is this machine's",
              ident[EI_DATA], OWN_ORDER);
    REFUSE_IF(got < (ssize_t)sizeof *header, "file",
              "is truncated: %zd bytes, and an ELF header has %zu", got, sizeof *header);
    REFUSE_IF(OWN_MACHINE != EM_NONE && header->e_machine != OWN_MACHINE, "file",
              "is for ELF machine %d; this is %d", header->e_machine, OWN_MACHINE);
    REFUSE_IF(header->e_type != ET_DYN, "file", "has ELF type %d; %d (a shared library) is needed",
              header->e_type, ET_DYN);
    REFUSE_IF(header->e_phentsize != sizeof(Elf64_Phdr) || header->e_phnum < 1 ||
                  header->e_phnum > MAX_SEGMENTS,
              "file", "has %d segments of %d bytes; 1 to %d of %zu", header->e_phnum,
              header->e_phentsize, MAX_SEGMENTS, sizeof(Elf64_Phdr));
    return ATTN_OK;
}

/* A whole shared library for this machine, known without running any of its code. The loader maps a
 * truncated one, too, and touches what is not there. */
static attn_status elf_check(int descriptor, off_t size, struct attn_error *error)
{
    Elf64_Ehdr header = {.e_type = ET_NONE};
    TRY(check_elf_header(&header, pread(descriptor, &header, sizeof header, 0), error));
    for (int i = 0; i < header.e_phnum; i++) {
        Elf64_Phdr segment;
        const uint64_t at = header.e_phoff + (uint64_t)i * sizeof segment;
        REFUSE_IF(at > (uint64_t)size ||
                      pread(descriptor, &segment, sizeof segment, (off_t)at) != sizeof segment,
                  "file", "is truncated: its table of segments is not in its %lld bytes",
                  (long long)size);
        REFUSE_IF(segment.p_type == PT_LOAD &&
                      (segment.p_filesz > (uint64_t)size ||
                       segment.p_offset > (uint64_t)size - segment.p_filesz),
                  "file", "is truncated: segment %d ends at byte %llu of %lld", i,
                  (unsigned long long)(segment.p_offset + segment.p_filesz), (long long)size);
    }
    return ATTN_OK;
}

/* A regular file that not every user can write, still the one that was probed, and a library for
 * this machine. */
static attn_status check_opened(const struct plugin *plugin, int descriptor, struct file_id *now,
                                struct attn_error *error)
{
    struct stat info;
    REFUSE_IF(fstat(descriptor, &info) != 0 || !S_ISREG(info.st_mode), "file",
              "is not a regular file");
    REFUSE_IF(info.st_mode & S_IWOTH, "file", "is writable for every user (mode %o)",
              info.st_mode & 07777);
    file_id_set(now, &info);
    TRY(elf_check(descriptor, info.st_size, error));
    REFUSE_IF(plugin->probed.inode != 0 && !file_id_same(&plugin->probed, now), "file",
              "has changed since it was probed; a new runtime will probe it again");
    return ATTN_OK;
}

static attn_status check_file(const struct plugin *plugin, struct file_id *now,
                              struct attn_error *error)
{
    TRY(plugin_check_place(plugin->file, error));
    /* a pipe may lie there */
    const int descriptor = open(plugin->file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ERROR_IF(descriptor < 0, ATTN_ERROR_IO, "file", "cannot be opened: %s", strerror(errno));
    const attn_status status = check_opened(plugin, descriptor, now, error);
    close(descriptor);
    return status;
}

static attn_status check_table(const struct attn_plugin *table, struct attn_error *error)
{
    ERROR_IF(!ATTN_VERSION_ACCEPTS(table->abi_version), ATTN_ERROR_ABI_VERSION, "abi_version",
             "the plugin was built for ABI %u.%u; %u.%u and later ones of that major are served",
             ATTN_VERSION_MAJOR(table->abi_version), ATTN_VERSION_MINOR(table->abi_version),
             ATTN_VERSION_MAJOR(ATTN_ABI_VERSION_MIN), ATTN_VERSION_MINOR(ATTN_ABI_VERSION_MIN));
    REFUSE_IF(!text_is_name(table->name), "name",
              "the plugin's name is not [a-z][a-z0-9_]* of at most 63 bytes");
    REFUSE_IF(!text_is_clean(table->version, MAX_LABEL) || !text_is_clean(table->vendor, MAX_LABEL),
              "version", "version or vendor is not clean UTF-8 text of at most %d bytes",
              MAX_LABEL);
    return ATTN_OK;
}

static attn_status check_slots(const struct attn_plugin *table, struct attn_error *error)
{
    REFUSE_IF(table->probe == NULL || table->create == NULL || table->destroy == NULL, "probe",
              "a required slot is NULL: probe %s, create %s, destroy %s",
              table->probe != NULL ? "there" : "NULL", table->create != NULL ? "there" : "NULL",
              table->destroy != NULL ? "there" : "NULL");
    return ATTN_OK;
}

attn_status plugin_identify(attn_runtime *runtime, struct plugin *plugin,
                            const struct attn_plugin *table, struct attn_error *error)
{
    TRY(check_table(table, error));
    char *name = arena_string(&runtime->arena, table->name);
    char *version = arena_string(&runtime->arena, table->version);
    char *vendor = arena_string(&runtime->arena, table->vendor);
    NO_MEMORY_IF(name == NULL || version == NULL || vendor == NULL, "plugin", "its names");
    plugin->name = name;
    plugin->version = version;
    plugin->vendor = vendor;
    plugin->abi_version = table->abi_version;
    return ATTN_OK;
}

/* Its backends were taken from what this name and version had declared. */
static attn_status check_agreement(const struct plugin *plugin, const struct attn_plugin *table,
                                   struct attn_error *error)
{
    TRY(check_table(table, error));
    REFUSE_IF(table->abi_version != plugin->abi_version || strcmp(table->name, plugin->name) != 0 ||
                  strcmp(table->version, plugin->version) != 0 ||
                  strcmp(table->vendor, plugin->vendor) != 0,
              "name", "is %s %s of %s now; it was %s %s of %s when it was probed", table->name,
              table->version, table->vendor, plugin->name, plugin->version, plugin->vendor);
    return ATTN_OK;
}

static attn_status call_entry(struct plugin *plugin, void *symbol, struct attn_error *error)
{
    const struct attn_plugin *table = NULL;
    attn_plugin_entry_fn *entry;
    memcpy(&entry, &symbol, sizeof entry);
    struct attn_error why = ATTN_ERROR_INIT;
    TRY(error_relay(error, entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &table, &why), &why));
    REFUSE_IF(table == NULL, "entry", "answered ATTN_OK without a table");
    return struct_read(&plugin->table_copy, ABI_PLUGIN, table, error);
}

attn_status plugin_load(attn_runtime *runtime, struct plugin *plugin, struct attn_error *error)
{
    if (plugin->table != NULL) {
        return ATTN_OK;
    }
    struct file_id now = {.inode = 0};
    bool other;
    TRY(check_file(plugin, &now, error));
    const bool again = is_known(plugin->file, &now, &other);
    ERROR_IF(other, ATTN_ERROR_IO, "file",
             "has taken the place of one that this process has loaded; only a new process can load "
             "it");
    runtime_stage(runtime, plugin->file, "constructor");
    void *library = dlopen(plugin->file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return REFUSE("dlopen", "%s", why != NULL ? why : "failed without a reason");
    }
    void *symbol = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    if (symbol == NULL) {
        dlclose(library); /* nothing of it but constructors has run */
        return REFUSE("symbol", "does not export %s", ATTN_PLUGIN_ENTRY_SYMBOL);
    }
    if (!again) {
        remember(plugin->file, &now);
    }
    const struct attn_plugin *table = &plugin->table_copy;
    const bool known = plugin->name[0] != '\0';
    runtime_stage(runtime, plugin->file, "entry");
    attn_status status = call_entry(plugin, symbol, error);
    if (status == ATTN_OK) {
        status = known ? check_agreement(plugin, table, error)
                       : plugin_identify(runtime, plugin, table, error);
    }
    status = status ? status : check_slots(table, error);
    plugin->table = status == ATTN_OK ? table : NULL;
    return status;
}

attn_status runtime_plugin_table(attn_runtime *runtime, int32_t plugin,
                                 const struct attn_plugin **table, struct attn_error *error)
{
    struct plugin *found = &runtime->plugins[plugin];
    if (!lock_take(&runtime->lock)) {
        *table = NULL;
        return error_set(error, ATTN_ERROR_ORDER, "log",
                         "called while this thread loads a plugin for the same runtime, as from "
                         "its log: %s cannot be loaded there",
                         found->file);
    }
    const bool fresh = found->table == NULL;
    attn_status status = plugin_load(runtime, found, error);
    if (status != ATTN_OK && fresh) {
        runtime->isolation->forget(runtime, found->file); /* its record no longer holds */
    }
    *table = status == ATTN_OK ? found->table : NULL;
    lock_give(&runtime->lock);
    return status;
}
