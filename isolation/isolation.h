/* SPDX-License-Identifier: Apache-2.0 */
/* What a plugin declares, asked so that its crash or hang costs no engine: each file is probed
 * once, in a process of its own (attn-scan) with a deadline, and its answer is kept on file until
 * the file or the machine changes.
 *
 *     examine.c      from a file to what it offers: the cache, else the scanner, else this process
 *     scan.c         the scanner's process and the file that it fills
 *     record.c       an answer as bytes, on file and from the scanner
 *     probe_cache.c  answers on file
 *     key.c          on what an answer depends */
#ifndef ISOLATION_ISOLATION_H
#define ISOLATION_ISOLATION_H

#include <attn/capability.h>
#include <attn/status.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#include "runtime/runtime.h"
#include "util/arena.h"
#include "util/text.h"

struct cache_file;

/* What belongs to another user, host, boot, libattn or choice of devices has another name and lies
 * side by side; what replaced an earlier state under the same name has another state. */
struct machine {
    uint64_t name; /* user, host, boot, path of libattn, the vendors' visibility variables */
    /* drivers, device nodes, CPU, installed libraries, version of libattn and of its ABI, the files
     * of libattn and attn-scan */
    uint64_t state;
};

/* Looks at the machine. Allocates nothing through a host and never fails; missing items are hashed
 * as absent. */
struct machine machine_read(void);

/* One plugin file as it was when it was probed, and the machine. */
struct probe_key {
    uint64_t state; /* struct machine's */
    struct file_id file;
};

/* One scanner's process while it runs; zeroed: none. */
struct scan {
    bool running; /* begun, and not yet finished or abandoned */
    int pid, file;
    int64_t deadline; /* ms */
};

/* Ends it, if it runs; its answer is lost. */
void scan_abandon(struct scan *scan);

/* attn_runtime.isolated, in its arena. */
struct isolated {
    struct machine machine; /* if there is a cache of probes */
    bool cache_pruned;      /* records unused for long are gone */
    struct scan scans[];    /* one for each of runtime->plugins, zeroed or running */
};

/* What is on file of a plugin does not hold any more. */
void cache_forget(const attn_runtime *runtime, const char *file);

/* What the probe of one file came to, as bytes: the cache keeps them, the scanner leaves
 * them.
 *
 *     "ATTNPROB"  uint64 format  uint64 payload size  uint64 FNV-1a of the payload
 *     payload: key, file, outcome, identity, devices, backends with their extensions
 *
 * Integers are this machine's, text is its length and its bytes with the NUL, a device or backend
 * its struct, of this ABI, with the texts and arrays that it points at after it. Readers trust
 * nothing: sizes are checked here, and what the items say passes the same checks as a plugin's own
 * report. */
#define RECORD_FORMAT 10
#define RECORD_MAX_SIZE ((size_t)4 << 20)

struct record {
    struct probe_key key;
    const char *file;
    int32_t deadline_ms; /* that the probe had; 0 in the scanner's answer */
    attn_status status;  /* that of loading and probing; no items unless ATTN_OK */
    const char *field;   /* why not, or why an item was left out; clean text */
    const char *message;
    uint32_t abi_version; /* 0 and empty names: refused before they were known */
    const char *name;
    const char *version;
    const char *vendor;
    const unsigned char *items; /* in a record that was read */
    size_t items_size;
};

/* Appends a record; `found` gives the items. out->failed: no memory. */
void record_write(struct text *out, const struct record *record, const struct found *found);

/* Text and items of `record` point into `bytes`. NULL, or what is wrong with the bytes. */
const char *record_read(struct record *record, const unsigned char *bytes, size_t size);

/* Hands the items to a sink, as the plugin's probe would. False: the bytes are wrong, or `arrays`,
 * which holds arrays until the sink returns, found no memory (arrays->failed). */
bool record_report(const struct record *record, const struct attn_probe_sink *sink,
                   struct arena *arrays);

/* A record with the bytes that its text and items point into. */
struct answer {
    struct record record;
    unsigned char *bytes;
    size_t size;
    time_t age; /* s, of one on file */
};

/* Reads the rest of an open file, and closes it. *wrong: NULL, or what is wrong with its bytes.
 * ATTN_ERROR_OUT_OF_MEMORY is our own lack of it (arena.failed). */
attn_status answer_read(attn_runtime *runtime, struct cache_file *file, struct answer *answer,
                        const char **wrong);
void answer_finish(const attn_runtime *runtime, struct answer *answer);

/* Probing in a process of its own: attn-scan is exec'd with an anonymous file as its standard
 * output, loads the plugin and fills the file with this head, which it keeps up to date, and at
 * last a record. Whatever else happens costs the plugin and not the engine. */
struct scan_head {
    char version[40]; /* before it is there, what goes wrong is the scanner's fault */
    char stage[24];   /* what of the plugin was entered last: runtime_stage's; "": nothing */
};

#define SCAN_HELLO "attn-scan "
/* Who has another one is no scanner of ours. */
#define SCAN_TEXT(number) #number
#define SCAN_FORMAT(number) SCAN_TEXT(number)
#define SCAN_VERSION SCAN_HELLO ATTN_LIBRARY_VERSION "/" SCAN_FORMAT(RECORD_FORMAT)
#define SCAN_MAX_SIZE (sizeof(struct scan_head) + RECORD_MAX_SIZE)
/* Exit statuses of attn-scan other than 0 and 2 (usage), unlikely ones, since a plugin may exit
 * with any. */
#define SCAN_EXIT_NO_MEMORY 113
#define SCAN_EXIT_NO_FILE 114

/* attn-scan next to the core: in a build tree, or installed. False if it is missing. */
bool scanner_path(char path[PATH_MAX]);

/* ATTN_ERROR_NOT_FOUND: there is no scanner that can be started, with the cause. ATTN_ERROR_IO:
 * there is, and this process or the machine has no descriptor or process left for it. */
attn_status scan_begin(const attn_runtime *runtime, const char *file, struct scan *scan,
                       struct attn_error *why);

/* By the thread that began it. ATTN_ERROR_NOT_FOUND: the scanner does not run, with the cause.
 * ATTN_ERROR_IO: it ran and was ended by others, or is of another version: nothing is known of the
 * plugin. Else as answer_read, or why the plugin is refused. */
attn_status scan_finish(attn_runtime *runtime, struct scan *scan, struct answer *answer,
                        struct attn_error *why);

/* Answers of probes on file, `<cache_dir>/probe-<hash>`, one for each plugin file: read at every
 * start, written next to and renamed, so that many processes may do so at once. What cannot be
 * trusted is passed over with a warning and written again; a cache never fails anything but for
 * want of memory.
 *
 * A refusal, or that there is no such hardware, is trusted for so long: a library that has arrived
 * leaves no trace on the plugin's file. */
#define CACHE_REFUSAL_SECONDS 600
/* A deadline that has passed says as much of the machine, and nothing of a longer one. */
#define CACHE_TIMEOUT_SECONDS 60
/* A record not rewritten for so long belongs to a boot or a choice of devices that is gone. */
#define CACHE_MAX_AGE_SECONDS ((time_t)30 * 24 * 3600)

/* ATTN_OK, ATTN_ERROR_NOT_FOUND (silent where nothing is on file), or ATTN_ERROR_OUT_OF_MEMORY. */
attn_status cache_read(attn_runtime *runtime, const char *file, const struct probe_key *key,
                       struct answer *answer);

/* Failures are logged and that is all. */
void cache_write(attn_runtime *runtime, const char *file, const void *record, size_t size);

#endif
