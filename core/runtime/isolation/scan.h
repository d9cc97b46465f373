/* SPDX-License-Identifier: Apache-2.0 */
/* Probing in a process of its own: attn-scan is exec'd, loads the plugin, and sends through a pipe
 *
 *     "ATTNSCAN"   and the version, once it runs: what goes wrong before is the scanner's fault,
 *                  not the plugin's
 *     C, E, P      a letter before it enters the plugin's constructors, its entry and its probe
 *     a record     as in record.h
 *
 * and nothing else. Whatever else happens costs the plugin and not the engine. */
#ifndef CORE_RUNTIME_ISOLATION_SCAN_H
#define CORE_RUNTIME_ISOLATION_SCAN_H

#include "runtime/isolation/isolation.h"
#include "util/text.h"

#define SCAN_HELLO "ATTNSCAN"
/* Behind it: who speaks another version of this protocol is no scanner of ours. */
#define SCAN_TEXT(number) #number
#define SCAN_FORMAT(number) SCAN_TEXT(number)
#define SCAN_VERSION ATTN_LIBRARY_VERSION "/" SCAN_FORMAT(RECORD_FORMAT) "\n"
#define SCAN_STAGES "CEP"
/* Exit statuses of attn-scan other than 0 and 2 (usage), unlikely ones, since a plugin may exit
 * with any. */
#define SCAN_EXIT_NO_MEMORY 113
#define SCAN_EXIT_NO_PIPE 114

/* ATTN_ERROR_NOT_FOUND: there is no scanner that can be started, with the cause. ATTN_ERROR_IO:
 * there is, and this process or the machine has no descriptor or process left for it. */
attn_status scan_begin(const attn_runtime *runtime, const char *file, struct scan *scan,
                       struct attn_error *why);

/* By the thread that began it. ATTN_OK: `answer` has the record's bytes from *record on.
 * ATTN_ERROR_NOT_FOUND: the scanner does not run, with the cause. ATTN_ERROR_IO: it ran and was
 * ended by others, or is of another version: nothing is known of the plugin. With answer->failed:
 * our own lack of memory. Else why the plugin is refused. */
attn_status scan_finish(const attn_runtime *runtime, struct scan *scan, struct text *answer,
                        size_t *record, struct attn_error *why);

#endif
