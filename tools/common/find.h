/* SPDX-License-Identifier: Apache-2.0 */
/* The core where a tool finds it, a backend of a runtime by its name or why it is not there, and
 * what was chosen for a layer. */
#ifndef TOOLS_COMMON_FIND_H
#define TOOLS_COMMON_FIND_H

#include <attn/api.h>
#include <stdbool.h>

#define BACKEND_SIZE 160 /* bytes of "name@variant", or of two names */

extern const char *const phase_names[]; /* by enum attn_phase */

/* Opens libattn.so.1 once: next to the tool in a build tree, else where it was installed, else by
 * soname. The table lives as long as the process. */
attn_status library_open(const struct attn_api **api, struct attn_error *error);

/* What backend `index` declares, and the file of its plugin; they live as long as the runtime. */
const struct attn_backend_caps *backend_caps(const struct attn_api *api,
                                             const attn_runtime *runtime, int32_t index);
const char *backend_file(const struct attn_api *api, const attn_runtime *runtime, int32_t index);
/* Does "name" or "name@variant" mean these caps? */
bool backend_is_named(const struct attn_backend_caps *caps, const char *name);
/* "name" or "name@variant". */
void backend_text(const struct attn_backend_caps *caps, char *text, size_t size);
/* The index of the first backend that fits; -1 with the error filled: ATTN_ERROR_ABSENT where its
 * hardware is missing, what is wrong with its plugin, or that no backend has the name. */
int32_t backend_find(const struct attn_api *api, const attn_runtime *runtime, const char *name,
                     struct attn_error *error);

/* What serves a layer in a phase. */
struct attn_choice choice_of(const struct attn_api *api, const attn_assignment *assignment,
                             int32_t layer, int32_t phase);
/* "A", or "A/B" where prefill and decode have two. */
void choice_text(const struct attn_api *api, const attn_assignment *assignment, int32_t layer,
                 char text[BACKEND_SIZE]);

#endif
