/* SPDX-License-Identifier: Apache-2.0 */
/* One layer in a runtime, a model and a plan of its own, as members of a test's own struct: `t`
 * points at one that begins with OPENED, and has `batch` and `io` for a step. */
#ifndef STEP_OPENED_H
#define STEP_OPENED_H

#include <attn/api.h>
#include <stdlib.h>

#include "support/client.h"
#include "support/test.h"

#define OPENED                                                                                     \
    const struct attn_api *api;                                                                    \
    attn_runtime *runtime;                                                                         \
    attn_model *model;                                                                             \
    attn_layer *layer;                                                                             \
    attn_plan *plan;                                                                               \
    void *workspace;                                                                               \
    struct attn_error error

/* A runtime of the test's plugins, probed in this process: under valgrind another sees another
 * processor. */
#define OPEN_RUNTIME(t, validates)                                                                 \
    do {                                                                                           \
        struct attn_runtime_options options = client_options(PLUGINS);                             \
        options.validate = (validates);                                                            \
        options.isolation = -1;                                                                    \
        options.num_threads = 2;                                                                   \
        (t)->error = (struct attn_error)ATTN_ERROR_INIT;                                           \
        CHECK(t, client_open(CORE_FILE, &options, &(t)->api, &(t)->runtime, &(t)->error));         \
    } while (0)
#define OPEN_LAYER(t, order, desc)                                                                 \
    do {                                                                                           \
        CHECK(t, client_model((t)->api, (t)->runtime, CLIENT_ORDER(order),                         \
                              (const struct attn_layer_desc *const[]){desc}, 1, &(t)->model,       \
                              &(t)->error));                                                       \
        (t)->layer = (t)->api->model_layer((t)->model, 0);                                         \
    } while (0)
#define OPEN_PLAN(t, num_reqs, num_tokens, seq_len)                                                \
    CHECK(t, client_plan((t)->api, (t)->model, 0, CLIENT_LIMITS(num_reqs, num_tokens, seq_len),    \
                         &(t)->plan, &(t)->workspace, &(t)->error))
#define PLAN(t) CHECK(t, (t)->api->plan_batch((t)->plan, &(t)->batch, NULL, &(t)->error))
#define RUN(t) CHECK(t, (t)->api->run((t)->plan, (t)->layer, &(t)->io, &(t)->error))
/* All of it, and the test's struct. */
#define CLOSE(t)                                                                                   \
    do {                                                                                           \
        (t)->api->plan_destroy((t)->plan);                                                         \
        (t)->api->model_destroy((t)->model);                                                       \
        (t)->api->runtime_destroy((t)->runtime);                                                   \
        free((t)->workspace);                                                                      \
        free(t);                                                                                   \
    } while (0)

/* Selecting the layer that the test describes, with a change, fails with an error that names the
 * field and has the text. */
#define LAYER_REFUSED(t, name, text, change)                                                       \
    do {                                                                                           \
        attn_assignment *made = NULL;                                                              \
        describe(t);                                                                               \
        change;                                                                                    \
        INVALID(&(t)->error, name,                                                                 \
                (t)->api->select((t)->runtime, CLIENT_ORDER(""),                                   \
                                 (const struct attn_layer_desc *const[]){&(t)->described}, 1,      \
                                 &made, &(t)->error));                                             \
        SAYS(t, text);                                                                             \
    } while (0)

#endif
