/* SPDX-License-Identifier: Apache-2.0 */
/* Probing in a process of its own: attn-scan is exec'd, loads the plugin, and sends through a pipe
 *
 *     "ATTNSCAN"   once it runs: what goes wrong before is the scanner's fault, not the plugin's
 *     C, E, P      a letter before it enters the plugin's constructors, its entry and its probe
 *     a record     as in record.h
 *
 * and nothing else. Whatever else happens costs the plugin and not the engine. */
#ifndef CORE_RUNTIME_SCAN_H
#define CORE_RUNTIME_SCAN_H

#include "runtime/runtime.h"
#include "util/text.h"

#define SCAN_HELLO "ATTNSCAN"
#define SCAN_STAGES "CEP"
/* Exit statuses of attn-scan beside 0 and 2 (usage), unlikely ones, since a plugin may exit with
 * any. */
#define SCAN_EXIT_NO_MEMORY 113
#define SCAN_EXIT_NO_PIPE 114

/* ATTN_OK: `answer` has the record's bytes from *record on. ATTN_ERROR_NOT_FOUND: there is no
 * scanner that runs, with the cause. With answer->failed: our own lack of memory. Else why the
 * plugin is refused. */
attn_status scan_plugin(const attn_runtime *runtime, const char *file, struct text *answer,
                        size_t *record, struct attn_error *why);

#endif
