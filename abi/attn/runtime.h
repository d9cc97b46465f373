/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's side, 1: a runtime and what it found. */
#ifndef ATTN_RUNTIME_H
#define ATTN_RUNTIME_H

#include "capability.h"
#include "host.h"

typedef struct attn_runtime attn_runtime; /* thread-safe; holds plugins, devices and backends */
/* immutable: which backend serves which layer and phase */
typedef struct attn_assignment attn_assignment;
typedef struct attn_model attn_model; /* bound layers of one assignment */
typedef struct attn_layer attn_layer; /* one of a model's; lives as long as the model */
typedef struct attn_plan attn_plan;   /* one batch in flight of one block-table group */
/* a device's memory, streams and graphs; thread-safe */
typedef struct attn_open_device attn_open_device;

/* In place of the environment. NULL or 0: the variable's value, read once, at creation. */
struct attn_runtime_options {
    size_t struct_size;
    const struct attn_ext *next;
    /* NULL: the core's own services; copied, `user` borrowed for life */
    const struct attn_host *host;
    const char *backend; /* ATTN_BACKEND */
    /* ATTN_PLUGIN_PATH: absolute directories or files, ':' between; added to the installed
     * directory */
    const char *plugin_path;
    const char *cache_dir;      /* ATTN_CACHE_DIR */
    int32_t num_threads;        /* ATTN_NUM_THREADS */
    int32_t log_level;          /* 1 + enum attn_log_level; 0: ATTN_LOG */
    int32_t validate;           /* 1 on, -1 off, 0: ATTN_VALIDATE */
    int32_t ignore_environment; /* 1: no variable is read */
    int32_t no_default_plugins; /* 1: only plugin_path */
    /* Probing in another process (attn-scan, which lies next to the core): 1 always, -1 never, 0:
     * unknown or changed files, and in this process where attn-scan is not there. */
    int32_t isolation;
    int32_t probe_deadline_ms; /* for one plugin in another process; 0: 10 000 */
    int32_t reserved;
};

/* One file that was considered. Text lives as long as the runtime. */
struct attn_plugin_info {
    size_t struct_size;
    const struct attn_ext *next;
    const char *file;
    const char *name; /* empty if it was not read */
    const char *version;
    const char *vendor;
    attn_status status; /* ATTN_OK, ATTN_ERROR_ABSENT (hardware), or why it was refused */
    int32_t num_backends;
    /* why it was refused; with ATTN_OK empty, or why the first backend or device that it reported
     * was left out */
    const char *reason;
};

/* One backend on one device in one variant, from the core's own copy of its declaration. */
struct attn_backend_info {
    size_t struct_size;
    const struct attn_ext *next;
    const struct attn_backend_caps *caps; /* lives as long as the runtime */
    int32_t plugin;                       /* index of its attn_plugin_info */
    int32_t reserved;
};

ATTN_STATIC_ASSERT(sizeof(struct attn_runtime_options) == 80, "attn_runtime_options of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_plugin_info) == 64, "attn_plugin_info of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_backend_info) == 32, "attn_backend_info of ABI 0.3");

#endif
