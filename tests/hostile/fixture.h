/* SPDX-License-Identifier: Apache-2.0 */
/* The core opened as an engine opens it, and runtimes over plugins of this folder. */
#ifndef HOSTILE_FIXTURE_H
#define HOSTILE_FIXTURE_H

#include <attn/api.h>

#include "support/meter.h"

#define PLUGIN(name) HOSTILE_DIR "/attn_" name ".so"
#define CRASHED "its process was ended by signal 11 (SIGSEGV)"

extern const struct attn_api *api;
extern const char *core_file, *scan_file;

/* From the arguments libattn.so.1 and attn-scan; 0, or main's exit status. */
int fixture_open(int argc, char **argv);

/* No cache, nothing from the environment. `meter` may be NULL; one whose fail_at was not reached
 * expects ATTN_OK. */
attn_runtime *create_by(const struct attn_api *table, const char *path, int32_t isolation,
                        int32_t deadline, struct meter *meter, attn_status expected);
/* With isolation 0. */
attn_runtime *create(const char *path, int32_t deadline);
struct attn_plugin_info info_of(const struct attn_api *table, const attn_runtime *runtime,
                                int32_t index);

#endif
