/* SPDX-License-Identifier: Apache-2.0 */
/* A folder with one plugin file and one cache of probes: what the tests of the cache begin with. */
#ifndef CACHE_FIXTURE_H
#define CACHE_FIXTURE_H

#include <attn/api.h>
#include <stdbool.h>

#include "support/meter.h"

/* HOSTILE_DIR: where the plugins of tests/hostile were built, as attn_NAME.so. */
#define PLUGIN(name) HOSTILE_DIR "/attn_" name ".so"
#define MAX_BYTES 65536

/* The meter's log has what the core warned of. */
struct cache_home {
    char folder[64];
    char plugin[96];
    char cache[128];
    struct meter meter;
};

extern const struct attn_api *api;

/* Opens the api; for main. */
attn_status fixture_open(void);

/* Set-up and tear-down of each test: *state is a struct cache_home whose plugin file is a copy of
 * `rich`. */
int home_setup(void **state);
int home_teardown(void **state);
#define HOME_TEST(name) TEST_WITH(struct cache_home, home, name, home_setup, home_teardown)

/* A runtime with the plugins of `path`, probed in this process. */
attn_runtime *home_create(struct cache_home *home, const char *path, attn_status expected);

/* A start in another process, since this one keeps what it has loaded: the status that the plugin
 * has to get, a part of its reason or its name, and whether its code is asked. */
void home_start(struct cache_home *home, attn_status expected, const char *says, bool asked);
/* The same, of a plugin that is not in the cache yet. */
void home_warm_up(struct cache_home *home);

/* Replaces `to` by a copy, as an installer does. */
void copy_file(const char *from, const char *to);
/* Calls `each`, if not NULL, with every record on file; returns how many there are. */
int home_entries(const struct cache_home *home, void (*each)(const char *path));
void drop_entry(const char *path);

#endif
