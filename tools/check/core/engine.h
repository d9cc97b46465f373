/* SPDX-License-Identifier: Apache-2.0 */
/* A case as an engine runs it: select, bind, plan and run through the core, with the backend under
 * test ordered. What the backend does not do itself the core composes. */
#ifndef CHECK_ENGINE_H
#define CHECK_ENGINE_H

#include <attn/api.h>

#include "cases/problem_copy.h"
#include "harness/trial.h"
#include "kernels/kernels.h"

/* The backend under test as an engine meets it: found, chosen and run by the core, through the
 * public table alone. */
struct core {
    const struct attn_api *api;
    attn_runtime *runtime;
    struct attn_host host;                /* counts; the rest is the core's own */
    const struct attn_backend_caps *caps; /* the core's copy */
    struct attn_device device;
    char order[160]; /* "name@variant" */
};

/* A runtime with two plugins, the tested one and cpu_ref, that reads nothing of the environment. */
attn_status core_open(struct core *core, const struct resolved *resolved,
                      const struct attn_backend_caps *tested, struct attn_error *error);
void core_close(struct core *core);
/* The same core with cpu_ref ordered instead; it ends with `core`. */
struct core core_of_reference(const struct core *core);
/* Options of a selection with the backend ordered; they borrow from `core`. */
struct attn_select_options core_options(const struct core *core);
/* Whether the core serves a layer with the ordered backend, by itself or as a composition. */
bool core_serves(const struct core *core, const struct attn_layer_desc *layer);

/* Ways of a step; all have to give what the reference gives. */
enum engine_way {
    ENGINE_PLAIN,
    ENGINE_REPLANNED,    /* the plan has served another batch before */
    ENGINE_TWO_PLANS,    /* two plans of one group, both planned before one runs */
    ENGINE_TABLE_UPDATE, /* another group's plan, made from the first by update_block_table */
    ENGINE_REPLAY,       /* CAPTURE and REPLAY */
    ENGINE_IN_GRAPH,     /* OUT_OF_GRAPH and IN_GRAPH */
    ENGINE_THREADS,      /* two plans run at once from two threads, on two streams */
    ENGINE_WAY_COUNT
};

extern const char *const engine_way_names[ENGINE_WAY_COUNT];

/* A plan with its workspace, exactly as large as asked for, after which a guard stands. */
struct engine_plan {
    attn_plan *plan;
    uint8_t *workspace;
    size_t bytes;
};

struct check_engine {
    struct core *core;
    const struct device *device;
    attn_model *model;
    attn_layer *layer;
    struct engine_plan plans[2];
};

/* engine.c. A model of one layer, with nothing bound; engine_finish is due even after a failure. */
attn_status engine_open(struct check_engine *engine, struct core *core, const struct device *device,
                        const struct attn_layer_desc *layer, struct attn_error *error);
/* Selects in the engine's core, binds the copy's caches and parameters; no plan yet. */
attn_status engine_bind(struct check_engine *engine, const struct problem_copy *copy,
                        struct attn_error *error);
attn_status engine_add_plan(struct check_engine *engine, int32_t index,
                            const struct problem_copy *copy, bool graph, struct attn_error *error);
/* A plan of these options and its workspace. */
attn_status engine_make_plan(struct check_engine *engine, int32_t index,
                             const struct attn_plan_options *options, struct attn_error *error);
void engine_finish(struct check_engine *engine);
/* What a run of the case takes. */
struct attn_step_io engine_io(const struct problem_copy *copy);
bool engine_guards_whole(const struct check_engine *engine);

/* engine_trial.c. `way` falls back to ENGINE_PLAIN where the layer does not promise it. */
enum trial_result engine_trial(struct trial *trial, const struct case_space *space,
                               const struct attend_case *attend_case, uint64_t seed, int32_t way);
/* The cases that an engine may bring: what the backend declares and what the core composes of it.
 */
void engine_space_init(struct case_space *space, struct trial *trial);

/* Cases next to the attends: steps without work and blocks that move, which give what cpu_ref gives
 * in the same core; composed steps; and what has to be refused, where the core checks for every
 * backend alike and a refusal names the field. */
void idle_cases(const struct kernel_sink *sink);          /* engine_idle.c */
void blocks_cases(const struct kernel_sink *sink);        /* engine_blocks.c */
void compressed_cases(const struct kernel_sink *sink);    /* engine_compressed.c */
void compressor_cases(const struct kernel_sink *sink);    /* engine_compressor.c */
void engine_output_cases(const struct kernel_sink *sink); /* engine_trial.c */
void undeclared_cases(const struct kernel_sink *sink);    /* undeclared.c */

#endif
