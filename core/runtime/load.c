/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/load.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "util/error.h"
#include "util/structs.h"
#include "util/text.h"

#define MIN_PLUGIN 80 /* size in ABI 0.1 */
#define MAX_LABEL 127
#define REFUSE(field, ...) error_set(error, ATTN_ERROR_PLUGIN, field, __VA_ARGS__)

/* What can be told without running any of the file's code. */
static attn_status check_file(const char *file, struct attn_error *error)
{
    unsigned char ident[EI_NIDENT];
    struct stat info;
    int descriptor = open(file, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
        return error_set(error, ATTN_ERROR_IO, "file", "cannot be opened: %s", strerror(errno));
    }
    bool known = fstat(descriptor, &info) == 0;
    ssize_t size = known && S_ISREG(info.st_mode) ? read(descriptor, ident, sizeof ident) : -1;
    close(descriptor);
    if (!known || !S_ISREG(info.st_mode)) {
        return REFUSE("file", "is not a regular file");
    }
    if (info.st_mode & S_IWOTH) {
        return REFUSE("file", "is writable for everybody (mode %o)", info.st_mode & 07777);
    }
    if (size < (ssize_t)sizeof ident || memcmp(ident, ELFMAG, SELFMAG) != 0) {
        return REFUSE("file", "is not an ELF file");
    }
    if (ident[EI_CLASS] != ELFCLASS64) {
        return REFUSE("file", "has ELF class %d; %d (64 bits) is needed", ident[EI_CLASS], ELFCLASS64);
    }
    return ATTN_OK;
}

static attn_status check_table(const struct attn_plugin *table, struct attn_error *error)
{
    if (table->abi_version < ATTN_ABI_VERSION_MIN || table->abi_version > ATTN_ABI_VERSION) {
        return error_set(error, ATTN_ERROR_ABI_VERSION, "abi_version",
                         "the plugin chose ABI %u.%u; %u.%u to %u.%u were offered",
                         ATTN_VERSION_MAJOR(table->abi_version), ATTN_VERSION_MINOR(table->abi_version),
                         ATTN_VERSION_MAJOR(ATTN_ABI_VERSION_MIN), ATTN_VERSION_MINOR(ATTN_ABI_VERSION_MIN),
                         ATTN_VERSION_MAJOR(ATTN_ABI_VERSION), ATTN_VERSION_MINOR(ATTN_ABI_VERSION));
    }
    if (!text_is_name(table->name)) {
        return REFUSE("name", "the plugin's name is not [a-z][a-z0-9_]* of at most 63 bytes");
    }
    if (!text_is_clean(table->version, MAX_LABEL) || !text_is_clean(table->vendor, MAX_LABEL)) {
        return REFUSE("version", "version or vendor is not clean UTF-8 text of at most %d bytes",
                      MAX_LABEL);
    }
    if (table->probe == NULL || table->create == NULL || table->destroy == NULL) {
        return REFUSE("probe", "a required slot is NULL: probe %s, create %s, destroy %s",
                      table->probe != NULL ? "there" : "NULL", table->create != NULL ? "there" : "NULL",
                      table->destroy != NULL ? "there" : "NULL");
    }
    return ATTN_OK;
}

static attn_status call_entry(struct plugin *plugin, void *library, struct attn_error *error)
{
    const struct attn_plugin *table = NULL;
    attn_plugin_entry_fn *entry;
    void *symbol = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    if (symbol == NULL) {
        dlclose(library); /* nothing of it but constructors has run */
        return REFUSE("symbol", "does not export %s", ATTN_PLUGIN_ENTRY_SYMBOL);
    }
    memcpy(&entry, &symbol, sizeof entry);
    attn_status status = entry(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &table, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (table == NULL) {
        return REFUSE("entry", "answered ATTN_OK without a table");
    }
    status = struct_read(&plugin->table_copy, sizeof plugin->table_copy, MIN_PLUGIN, table,
                         "attn_plugin", error);
    return status == ATTN_OK ? check_table(&plugin->table_copy, error) : status;
}

attn_status plugin_load(attn_runtime *runtime, struct plugin *plugin, struct attn_error *error)
{
    if (plugin->table != NULL) {
        return ATTN_OK;
    }
    attn_status status = check_file(plugin->file, error);
    if (status != ATTN_OK) {
        return status;
    }
    void *library = dlopen(plugin->file, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        return REFUSE("dlopen", "%s", why != NULL ? why : "failed without a reason");
    }
    status = call_entry(plugin, library, error);
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_plugin *table = &plugin->table_copy;
    plugin->name = arena_string(&runtime->arena, table->name);
    plugin->version = arena_string(&runtime->arena, table->version);
    plugin->vendor = arena_string(&runtime->arena, table->vendor);
    if (plugin->name == NULL || plugin->version == NULL || plugin->vendor == NULL) {
        return error_set(error, ATTN_ERROR_OUT_OF_MEMORY, "plugin", "no memory for its names");
    }
    plugin->table = table;
    return ATTN_OK;
}
