/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin declares, asked so that its crash or hang costs no engine: each file is probed
 * once, in a process of its own (attn-scan) with a deadline, and its answer is kept on file until
 * the file or the machine changes. This header is all that the rest of the core sees of it.
 *
 *     examine.c      from a file to what it offers: the cache, else the scanner, else this process
 *     scan.c         the scanner's process and the pipe to it
 *     record.c       an answer as bytes, in the cache and in the pipe
 *     probe_cache.c  answers on file
 *     key.c          on what an answer depends */
#ifndef CORE_RUNTIME_ISOLATION_ISOLATION_H
#define CORE_RUNTIME_ISOLATION_ISOLATION_H

#include <attn/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct attn_runtime attn_runtime;
struct found;
struct plugin;
struct stat;

/* What belongs to another user, host, boot or choice of devices has another name and lies side by
 * side; what replaced an earlier state under the same name has another state. */
struct machine {
    uint64_t name; /* user, host, boot, the vendors' visibility variables */
    /* drivers, device nodes, CPU, installed libraries, version of libattn and of its ABI */
    uint64_t state;
};

/* Looks at the machine. Allocates nothing through a host and never fails; missing items are hashed
 * as absent. */
struct machine machine_read(void);

/* One plugin file as it was when it was probed. */
struct probe_key {
    uint64_t state; /* struct machine's */
    uint64_t device;
    uint64_t inode;
    uint64_t size;
    uint64_t modified; /* ns */
    uint64_t changed;  /* ns: permissions and owner, too */
};

void probe_key_set(struct probe_key *key, const struct machine *machine, const struct stat *info);
/* The same file, whatever the machine. */
bool probe_key_same_file(const struct probe_key *a, const struct probe_key *b);

/* One scanner's process while it runs; zeroed: none. Everything but `running` is scan.c's. */
struct scan {
    bool running; /* begun, and not yet finished or abandoned */
    bool open;    /* the pipe's other end */
    bool ended;   /* and not yet reaped */
    bool lost; /* reaped by others, as where SIGCHLD is ignored: its pid may be another process's */
    bool late, too_much;
    int pid, pipe;
    int code, value;  /* CLD_EXITED or CLD_KILLED, status or signal */
    int64_t deadline; /* ms */
};

/* Ends it, if it runs; its answer is lost. */
void scan_abandon(struct scan *scan);

/* Fills the plugin's names and `found`, or says why the plugin is refused. The plugin is loaded
 * only if nothing on file answers for it. arena.failed: the lack of memory is ours and not a
 * plugin's. */
attn_status plugin_examine(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why);

/* What is on file of a plugin does not hold any more. */
void cache_forget(const attn_runtime *runtime, const char *file);

#endif
