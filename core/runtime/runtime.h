/* SPDX-License-Identifier: Apache-2.0 */
/* What a runtime holds once it is created: settings, host services, plugins, devices, backends.
 * Immutable after creation but for `lock`-guarded instances, so that every other room reads it
 * without a lock. */
#ifndef CORE_RUNTIME_RUNTIME_H
#define CORE_RUNTIME_RUNTIME_H

#include <attn/plugin.h>
#include <stdbool.h>

#include "host/host.h"
#include "util/lock.h"
#include "util/slots.h"

/* Ends the function with a plugin's fault. */
#define REFUSE_IF(broken, ...) ERROR_IF(broken, ATTN_ERROR_PLUGIN, __VA_ARGS__)

/* A file as it was when it was probed; zeroed: not known. */
struct file_id {
    uint64_t device;
    uint64_t inode;
    uint64_t size;
    uint64_t modified; /* ns */
    uint64_t changed;  /* ns: permissions and owner, too */
};

/* One plugin file. `table` is NULL until plugin_load: a warm cache leaves others unloaded. */
struct plugin {
    char *file;
    char *name;
    char *version;
    char *vendor;
    char *reason;
    attn_status status;
    /* the core's zero-extended copy; guarded by attn_runtime.lock */
    const struct attn_plugin *table;
    struct attn_plugin table_copy;
    int32_t num_backends;
    uint32_t abi_version; /* that its table has; 0: not known */
    struct file_id probed;
};

/* One backend on one device in one variant. */
struct backend {
    struct attn_backend_caps caps; /* deep copy, text and arrays owned, extensions copied */
    int32_t plugin;                /* index */
    const char *device_namespace;  /* for caps.device; "" where drivers number devices */
    char *full_name;               /* "cpu_simd@avx2" or "cpu_ref" */
};

struct settings {
    char *backend;        /* selection text; never NULL */
    char *plugin_path;    /* never NULL */
    char *cache_dir;      /* never NULL; empty: no cache */
    char *lock;           /* ATTN_LOCK; NULL or empty: none */
    const char *no_cache; /* why there is no default one, or NULL */
    int32_t num_threads;
    int32_t log_level; /* enum attn_log_level */
    bool validate;
    int32_t isolation;
    int32_t probe_deadline_ms;
    bool no_default_plugins;
};

struct found;

/* How it becomes known what a plugin offers: without its code in this process, where that can be,
 * and from answers on file. The room isolation/ is such a table; the core knows no more of it. */
struct isolation {
    /* Before the first of runtime->plugins is examined, and after the last. */
    attn_status (*begin)(attn_runtime *runtime, struct attn_error *error);
    void (*end)(attn_runtime *runtime);
    /* Fills the plugin's names and `found`, or says why the plugin is refused. The plugin is loaded
     * only if there is no other way. arena.failed: the lack of memory is ours, not a plugin's. */
    attn_status (*examine)(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why);
    /* What is on file of a plugin does not hold any more. */
    void (*forget)(const attn_runtime *runtime, const char *file);
};
extern const struct isolation isolation;

struct attn_runtime {
    struct settings settings;
    struct host_services services;
    struct attn_host host; /* every slot filled */
    struct arena arena;    /* text and arrays of everything below */
    struct plugin *plugins;
    int32_t num_plugins;
    struct attn_device_info *devices; /* text owned, device_namespace never NULL; unique, sorted */
    int32_t num_devices;
    struct backend *backends; /* sorted by full_name, then device */
    int32_t num_backends;
    char searched[768]; /* the folders that discovery looked at, each with what it gave */
    struct lock lock;
    const struct isolation *isolation;
    void *isolated;                      /* its own */
    struct observers *observers;         /* see observers/; NULL: it has no observer */
    void (*on_stage)(const char *stage); /* the scanner's */
};

/* *info: the device with this type and id; device_namespace NULL: whichever namespace has it. NULL
 * if there is none or more than one; the error then lists the reported devices. */
attn_status runtime_find_device(const attn_runtime *runtime, struct attn_device device,
                                const char *device_namespace, const struct attn_device_info **info,
                                struct attn_error *error);
bool backend_is_on(const struct backend *backend, const struct attn_device_info *device);

/* load.c: makes sure that the plugin's code is loaded and its table is there (thread-safe,
 * idempotent). */
attn_status runtime_plugin_table(attn_runtime *runtime, int32_t plugin,
                                 const struct attn_plugin **table, struct attn_error *error);

/* Logs the stage (a plugin's constructor, entry or probe) at debug before it runs for the first
 * time, so that the log names the culprit of a crash. */
void runtime_stage(const attn_runtime *runtime, const char *file, const char *stage);

/* Logs through the runtime's host if `level` is on. */
void runtime_log(const attn_runtime *runtime, int32_t level, const char *format, ...)
#if defined(__GNUC__)
    __attribute__((format(printf, 3, 4)))
#endif
    ;

/* Memory of the core itself, through the host; zeroed. `size` 0 gives NULL. */
void *runtime_alloc(const attn_runtime *runtime, size_t size);
void runtime_free(const attn_runtime *runtime, void *memory, size_t size);

#endif
