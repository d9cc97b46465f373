/* SPDX-License-Identifier: Apache-2.0 */
/* A runtime filled by hand, for white-box tests of core/select: no loader, no file. */
#ifndef TESTS_CORE_SELECT_FIXTURE_H
#define TESTS_CORE_SELECT_FIXTURE_H

/* clang-format off */
/* clang-format on */
#include <attn/collectives.h>
#include <stdio.h>

#include "select/steering.h"
#include "support/test.h"

#define MAX_BACKENDS 32

struct fixture {
    struct attn_runtime runtime;
    struct plugin plugins[1];
    struct attn_plugin table;
    struct backend backends[MAX_BACKENDS];
    char names[MAX_BACKENDS][64];
    struct attn_device_info devices[2];
    char log[8192]; /* all lines at info and above */
};

/* The first of two ranks, whose collectives fail: for what is asked of a layer before a step. */
extern const struct attn_collectives fixture_ranks;

/* No backend yet; one CPU device, selection text "". */
void fixture_init(struct fixture *fixture);
void fixture_finish(struct fixture *fixture);
/* A backend that can serve any decoder, encoder or cross layer; the test takes abilities away.
 * Add in the order of full names. */
struct attn_backend_caps *fixture_add(struct fixture *fixture, const char *name,
                                      const char *variant, int32_t rank);
/* 32/8 heads of 128, bf16, causal, blocks of 16. */
struct attn_layer_desc fixture_layer(const char *name);
attn_status fixture_select_by(struct fixture *fixture, const struct attn_select_options *options,
                              const struct attn_layer_desc *layers, int32_t count,
                              attn_assignment **assignment, struct attn_error *error);
/* In the order of a selection text. */
attn_status fixture_select(struct fixture *fixture, const char *text,
                           const struct attn_layer_desc *layers, int32_t count,
                           attn_assignment **assignment, struct attn_error *error);
/* A line of measured times, as of this runtime's device, plugin file and drivers. */
struct fixture_time {
    const char *shape, *phase, *bucket, *backend;
    int64_t nanoseconds;
};
void fixture_write_time(const struct fixture *fixture, FILE *file, const struct fixture_time *time);
static inline void assignment_end(attn_assignment **assignment)
{
    assignment_destroy(*assignment);
}
/* The chosen backend's name. */
const char *fixture_chosen(const attn_assignment *assignment, int32_t layer, int32_t phase);

#endif
