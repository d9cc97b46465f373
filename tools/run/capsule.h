/* SPDX-License-Identifier: Apache-2.0 */
/* --capsule: one recorded step of one layer, run again on any backend and held to cpu_ref. */
#ifndef RUN_CAPSULE_H
#define RUN_CAPSULE_H

#include <stdbool.h>
#include <stdint.h>

/* `backend` is a selection text as in ATTN_BACKEND; NULL: what would be chosen here. Random
 * contents are drawn from `seed`. Returns the exit status: 1 where a result is off. */
int capsule_replay(const char *file, const char *backend, uint64_t seed, bool as_json);

#endif
