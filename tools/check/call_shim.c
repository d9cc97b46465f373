/* SPDX-License-Identifier: Apache-2.0 */
/* A backend's table with one struct of its calls changed on the way in. */
#include <stdio.h>
#include <string.h>

#include "calls.h"

#define MAX_STRUCT 256     /* no struct of a call is larger */
#define UNKNOWN_EXT 0xfffu /* the last id of the project's own, given to nothing */
#define ERROR_PATTERN 0x5a

const char *const call_change_names[CALL_CHANGE_COUNT] = {
    "smaller than that of ABI 0.1", "with an unknown tail of zeros",
    "with an unknown tail that is not zero", "with an unknown extension",
    "with an unknown extension that is optional"};

attn_status call_expected(int32_t change)
{
    static const attn_status expected[CALL_CHANGE_COUNT] = {
        ATTN_ERROR_STRUCT_SIZE, ATTN_OK, ATTN_ERROR_STRUCT_SIZE, ATTN_ERROR_EXTENSION, ATTN_OK};
    return expected[change];
}

/* Sizes of ABI 0.1, under which none may be. */
enum {
    LEAST_ATTEND = 144,
    LEAST_WRITE = 104,
    LEAST_GATHER = 88,
    LEAST_MERGE = 104,
    LEAST_GEMM = 72,
    LEAST_QUANTIZE = 80,
    LEAST_AMAX = 56,
    LEAST_COPY = 64,
    LEAST_LAYER = 224,
    LEAST_PARAMS = 96,
    LEAST_BATCH = 232,
    LEAST_VIEW = 112,
    LEAST_LIMITS = 40
};
#define PLACE_OF(type, label, which, member, least)                                                \
    {                                                                                              \
        label, which, offsetof(struct type, member), sizeof *((struct type *)NULL)->member, least  \
    }
#define ATTEND_PLACES                                                                              \
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_attend_args), LEAST_ATTEND},                 \
        PLACE_OF(attn_attend_args, "layer", CALL_LAYER, layer, LEAST_LAYER),                       \
        PLACE_OF(attn_attend_args, "params", CALL_PARAMS, params, LEAST_PARAMS),                   \
        PLACE_OF(attn_attend_args, "batch", CALL_BATCH, batch, LEAST_BATCH),                       \
        PLACE_OF(attn_attend_args, "k_cache", CALL_K_CACHE, k_cache, LEAST_VIEW)
static const struct call_place attend_places[] = {
    ATTEND_PLACES,
    PLACE_OF(attn_attend_args, "v_cache", CALL_V_CACHE, v_cache, LEAST_VIEW),
    {"limits", CALL_LIMITS, CALL_NOT_THERE, sizeof(struct attn_limits), LEAST_LIMITS}};
static const struct call_place latent_places[] = {ATTEND_PLACES};
static const struct call_place write_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_write_kv_args), LEAST_WRITE},
    PLACE_OF(attn_write_kv_args, "layer", CALL_LAYER, layer, LEAST_LAYER),
    PLACE_OF(attn_write_kv_args, "params", CALL_PARAMS, params, LEAST_PARAMS),
    PLACE_OF(attn_write_kv_args, "k_cache", CALL_K_CACHE, k_cache, LEAST_VIEW),
    PLACE_OF(attn_write_kv_args, "v_cache", CALL_V_CACHE, v_cache, LEAST_VIEW)};
static const struct call_place gather_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_gather_kv_args), LEAST_GATHER},
    PLACE_OF(attn_gather_kv_args, "layer", CALL_LAYER, layer, LEAST_LAYER),
    PLACE_OF(attn_gather_kv_args, "params", CALL_PARAMS, params, LEAST_PARAMS),
    PLACE_OF(attn_gather_kv_args, "cache", CALL_K_CACHE, cache, LEAST_VIEW),
    PLACE_OF(attn_gather_kv_args, "batch", CALL_BATCH, batch, LEAST_BATCH)};
static const struct call_place merge_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_merge_states_args), LEAST_MERGE}};
static const struct call_place gemm_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_batched_gemm_args), LEAST_GEMM}};
static const struct call_place quantize_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_quantize_args), LEAST_QUANTIZE}};
static const struct call_place amax_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_amax_args), LEAST_AMAX}};
static const struct call_place copy_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_copy_blocks_args), LEAST_COPY}};

#define COUNT(array) (int32_t)(sizeof array / sizeof *array)
const struct call_target call_targets[] = {
    {"write_kv", ATTN_KERNEL_WRITE_KV, write_places, COUNT(write_places)},
    {"attend", ATTN_KERNEL_ATTEND, attend_places, COUNT(attend_places)},
    {"merge_states", ATTN_KERNEL_MERGE_STATES, merge_places, COUNT(merge_places)},
    {"rope_write_kv", ATTN_KERNEL_ROPE_WRITE_KV, write_places, COUNT(write_places)},
    {"attend_mla", ATTN_KERNEL_ATTEND_MLA, latent_places, COUNT(latent_places)},
    {"attend_mla_sparse", ATTN_KERNEL_ATTEND_MLA_SPARSE, latent_places, COUNT(latent_places)},
    {"gather_kv", ATTN_KERNEL_GATHER_KV, gather_places, COUNT(gather_places)},
    {"gated_delta", ATTN_KERNEL_GATED_DELTA, latent_places, COUNT(latent_places)},
    {"batched_gemm", ATTN_KERNEL_BATCHED_GEMM, gemm_places, COUNT(gemm_places)},
    {"quantize", ATTN_KERNEL_QUANTIZE, quantize_places, COUNT(quantize_places)},
    {"amax", ATTN_KERNEL_AMAX, amax_places, COUNT(amax_places)},
    {"copy_blocks", ATTN_KERNEL_COPY_BLOCKS, copy_places, COUNT(copy_places)},
};
const int32_t num_call_targets = COUNT(call_targets);

/* A changed call's structs, kept as long as the case: a plan may hold what it was given. */
struct changed {
    _Alignas(16) uint8_t self[MAX_STRUCT + CALL_TAIL];
    _Alignas(16) uint8_t inner[MAX_STRUCT + CALL_TAIL];
    struct attn_ext ext;
};

static _Thread_local struct shim {
    struct backend backend; /* the tested one with this file's table */
    struct attn_kernels real;
    const struct call_target *target;
    const struct call_place *place;
    int32_t change; /* CALL_GROWN or CALL_OPTIONAL, in which the call is served */
    struct changed in_kernel, in_plan, in_prepare;
    int32_t refused[CALL_CHANGE_COUNT];
    int32_t wrong_change; /* which gave .. */
    attn_status wrong;    /* .. a status that was not expected */
    bool scribbled;       /* a call that succeeded wrote its error */
} shim;

/* Calls that have to be refused come before the one that is served, once. */
static const int32_t refusals[] = {CALL_SMALL, CALL_GROWN_SET, CALL_UNKNOWN};

static int32_t num_refusals(void)
{
    return shim.change == CALL_GROWN ? COUNT(refusals) : 0;
}

void call_change_struct(int32_t change, const void *from, size_t size, size_t least, void *to,
                        struct attn_ext *ext)
{
    struct header {
        size_t struct_size;
        const struct attn_ext *next;
    } header;
    uint8_t *bytes = to;
    memcpy(bytes, from, size);
    memset(bytes + size, 0, CALL_TAIL);
    memcpy(&header, bytes, sizeof header);
    if (change == CALL_SMALL) {
        header.struct_size = least - sizeof(uint64_t);
    } else if (change == CALL_GROWN || change == CALL_GROWN_SET) {
        header.struct_size = size + CALL_TAIL;
        bytes[size + CALL_TAIL - 1] = change == CALL_GROWN_SET;
    } else {
        *ext = (struct attn_ext){UNKNOWN_EXT, change == CALL_OPTIONAL ? ATTN_EXT_OPTIONAL : 0,
                                 sizeof *ext, header.next};
        header.next = ext;
    }
    memcpy(bytes, &header, sizeof header);
}

/* The arguments with the struct changed; as they are if they have none. */
static const void *changed_args(struct changed *c, int32_t change, const void *args, size_t size)
{
    const struct call_place *place = shim.place;
    const void *inner;
    if (place->offset == CALL_NOT_THERE) {
        return args;
    }
    if (place->offset == CALL_SELF) {
        call_change_struct(change, args, place->size, shim.place->least, c->self, &c->ext);
        return c->self;
    }
    memcpy(c->self, args, size);
    memcpy(&inner, c->self + place->offset, sizeof inner);
    if (inner == NULL) {
        return args;
    }
    call_change_struct(change, inner, place->size, shim.place->least, c->inner, &c->ext);
    inner = c->inner;
    memcpy(c->self + place->offset, &inner, sizeof inner);
    return c->self;
}

/* A call that succeeds leaves this as it was. */
static void error_prepare(struct attn_error *error)
{
    memset(error, ERROR_PATTERN, sizeof *error);
    error->struct_size = sizeof *error;
}

static bool error_untouched(const struct attn_error *error)
{
    struct attn_error untouched;
    error_prepare(&untouched);
    return memcmp(error, &untouched, sizeof untouched) == 0;
}

/* Of a call that has to be refused. One that does not look refuses nothing: another may. */
static void settle(int32_t change, attn_status status, const struct attn_error *error)
{
    shim.scribbled |= status == ATTN_OK && !error_untouched(error);
    shim.refused[change] += status == call_expected(change);
    if (status != ATTN_OK && status != call_expected(change)) {
        shim.wrong_change = change;
        shim.wrong = status;
    }
}

/* Of the call that has to be served. */
static attn_status serve(attn_status status, const struct attn_error *mine,
                         struct attn_error *error)
{
    shim.scribbled |= status == ATTN_OK && !error_untouched(mine);
    if (status != ATTN_OK) {
        shim.wrong_change = shim.change;
        shim.wrong = status;
        *error = *mine;
    }
    return status;
}

/* CALL(given, its error) for every change. Errors may be NULL: an unknown extension is refused
 * without a text. */
#define EACH_CHANGE(memory, args, type, CALL)                                                      \
    struct attn_error mine;                                                                        \
    for (int32_t i = 0; i < num_refusals(); i++) {                                                 \
        const struct type *given = changed_args(memory, refusals[i], args, sizeof *(args));        \
        error_prepare(&mine);                                                                      \
        settle(refusals[i], CALL(given, refusals[i] == CALL_UNKNOWN ? NULL : &mine), &mine);       \
    }                                                                                              \
    const struct type *served = changed_args(memory, shim.change, args, sizeof *(args));           \
    error_prepare(&mine);                                                                          \
    return serve(CALL(served, &mine), &mine, error)

static bool is_changed(const char *slot, const void *args, size_t size)
{
    return strcmp(shim.target->name, slot) == 0 &&
           changed_args(&shim.in_kernel, shim.change, args, size) != args;
}

#define SHIM(slot, type)                                                                           \
    static attn_status shim_##slot(const struct type *args, struct attn_error *error)              \
    {                                                                                              \
        if (!is_changed(#slot, args, sizeof *args)) {                                              \
            return shim.real.slot(args, error);                                                    \
        }                                                                                          \
        EACH_CHANGE(&shim.in_kernel, args, type, shim.real.slot);                                  \
    }
SHIM(attend, attn_attend_args)
SHIM(write_kv, attn_write_kv_args)
SHIM(merge_states, attn_merge_states_args)
SHIM(rope_write_kv, attn_write_kv_args)
SHIM(attend_mla, attn_attend_args)
SHIM(attend_mla_sparse, attn_attend_args)
SHIM(gather_kv, attn_gather_kv_args)
SHIM(gated_delta, attn_attend_args)
SHIM(batched_gemm, attn_batched_gemm_args)
SHIM(quantize, attn_quantize_args)
SHIM(amax, attn_amax_args)
SHIM(copy_blocks, attn_copy_blocks_args)

/* prepare, plan_size and plan are the target's too, if it is one that they serve. */
static bool is_planned(void)
{
    return shim.target->places == attend_places || shim.target->places == latent_places;
}

static attn_status shim_plan(const struct attn_attend_args *args, int32_t mode,
                             struct attn_error *error)
{
    if (!is_planned() || changed_args(&shim.in_plan, shim.change, args, sizeof *args) == args) {
        return shim.real.plan(args, mode, error);
    }
#define PLAN(given, error) shim.real.plan(given, mode, error)
    EACH_CHANGE(&shim.in_plan, args, attn_attend_args, PLAN);
}

static attn_status plan_size(attn_instance *instance, attn_state *state, int32_t change,
                             const struct attn_limits *limits, struct attn_plan_size *size,
                             struct attn_error *error)
{
    struct changed *c = &shim.in_plan;
    call_change_struct(change, limits, shim.place->size, shim.place->least, c->inner, &c->ext);
    error_prepare(error);
    return shim.real.plan_size(instance, state, (const struct attn_limits *)(const void *)c->inner,
                               size, error);
}

static attn_status shim_plan_size(attn_instance *instance, attn_state *state,
                                  const struct attn_limits *limits, struct attn_plan_size *size,
                                  struct attn_error *error)
{
    struct attn_error mine;
    if (shim.place->which != CALL_LIMITS) {
        return shim.real.plan_size(instance, state, limits, size, error);
    }
    for (int32_t i = 0; i < num_refusals(); i++) {
        settle(refusals[i], plan_size(instance, state, refusals[i], limits, size, &mine), &mine);
    }
    return serve(plan_size(instance, state, shim.change, limits, size, &mine), &mine, error);
}

/* A layer and its parameters, of which the place is one. */
struct preparation {
    attn_instance *instance;
    const void *given[2];
    int32_t phase;
};

static attn_status prepare(const struct preparation *p, int32_t change, attn_state **state,
                           struct attn_error *error)
{
    struct changed *c = &shim.in_prepare;
    int32_t which = shim.place->which - CALL_LAYER;
    const void *given[2] = {p->given[0], p->given[1]};
    call_change_struct(change, given[which], shim.place->size, shim.place->least, c->inner,
                       &c->ext);
    given[which] = c->inner;
    *state = NULL;
    error_prepare(error);
    return shim.real.prepare(p->instance, given[0], given[1], p->phase, state, error);
}

static attn_status shim_prepare(attn_instance *instance, const struct attn_layer_desc *layer,
                                const struct attn_layer_params *params, int32_t phase,
                                attn_state **state, struct attn_error *error)
{
    const struct preparation p = {instance, {layer, params}, phase};
    struct attn_error mine;
    bool its = shim.place->which == CALL_LAYER || shim.place->which == CALL_PARAMS;
    if (!is_planned() || !its) {
        return shim.real.prepare(instance, layer, params, phase, state, error);
    }
    for (int32_t i = 0; i < num_refusals(); i++) {
        attn_status status = prepare(&p, refusals[i], state, &mine);
        settle(refusals[i], status, &mine);
        if (status == ATTN_OK && *state != NULL && shim.real.release != NULL) {
            shim.real.release(instance, *state);
        }
    }
    return serve(prepare(&p, shim.change, state, &mine), &mine, error);
}

#define PUT(slot) k->slot = k->slot != NULL ? shim_##slot : NULL
static void put_table(struct attn_kernels *k)
{
    PUT(attend);
    PUT(write_kv);
    PUT(merge_states);
    PUT(rope_write_kv);
    PUT(attend_mla);
    PUT(attend_mla_sparse);
    PUT(gather_kv);
    PUT(gated_delta);
    PUT(batched_gemm);
    PUT(quantize);
    PUT(amax);
    PUT(copy_blocks);
    PUT(prepare);
    PUT(plan_size);
    PUT(plan);
}

enum trial_result call_run(struct trial *trial, const struct call_target *target,
                           const struct call_place *place, int32_t served, kernel_run *run,
                           const void *variant, uint64_t seed)
{
    struct trial changed = *trial;
    memset(&shim, 0, sizeof shim);
    shim.backend = *trial->tested;
    shim.real = trial->tested->kernels;
    shim.target = target;
    shim.place = place;
    shim.change = served;
    put_table(&shim.backend.kernels);
    changed.tested = &shim.backend;
    changed.concurrent = true; /* more calls are made than one: what they take is not counted */
    enum trial_result result = run(&changed, variant, seed);
    if (result == TRIAL_SKIPPED) {
        return trial_say(trial, result, "%.900s", changed.message);
    }
    if (shim.wrong != ATTN_OK) {
        return trial_say(trial, TRIAL_FAILED, "%s %s: status %d, not %d", place->name,
                         call_change_names[shim.wrong_change], shim.wrong,
                         call_expected(shim.wrong_change));
    }
    for (int32_t i = 0; i < num_refusals(); i++) {
        if (shim.refused[refusals[i]] == 0) {
            return trial_say(trial, TRIAL_FAILED, "%s %s: no call refused it", place->name,
                             call_change_names[refusals[i]]);
        }
    }
    if (shim.scribbled) {
        return trial_say(trial, TRIAL_FAILED, "a call that succeeded wrote its error");
    }
    return result == TRIAL_PASSED ? result
                                  : trial_say(trial, result, "%s %s: %.900s", place->name,
                                              call_change_names[served], changed.message);
}
