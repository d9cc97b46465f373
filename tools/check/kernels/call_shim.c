/* SPDX-License-Identifier: Apache-2.0 */
/* A backend's table with one struct of its calls changed on the way in. */
#include <stdio.h>
#include <string.h>

#include "kernels/calls.h"

#define MAX_STRUCT 256     /* no struct of a call is larger */
#define UNKNOWN_EXT 0xfffu /* the last id of the project's own, given to nothing */
#define ERROR_PATTERN 0x5a

const char *const call_change_names[CALL_CHANGE_COUNT] = {"with an unknown tail",
                                                          "with an unknown extension"};

#define SELF(type)                                                                                 \
    {                                                                                              \
        "args", CALL_ARGS, CALL_SELF, sizeof(struct type)                                          \
    }
#define PLACE_OF(type, label, which, member)                                                       \
    {                                                                                              \
        label, which, offsetof(struct type, member), sizeof *((struct type *)NULL)->member         \
    }
#define ATTEND_PLACES                                                                              \
    SELF(attn_attend_args), PLACE_OF(attn_attend_args, "layer", CALL_LAYER, layer),                \
        PLACE_OF(attn_attend_args, "params", CALL_PARAMS, params),                                 \
        PLACE_OF(attn_attend_args, "batch", CALL_BATCH, batch),                                    \
        PLACE_OF(attn_attend_args, "k_cache", CALL_K_CACHE, k_cache)
static const struct call_place attend_places[] = {
    ATTEND_PLACES,
    PLACE_OF(attn_attend_args, "v_cache", CALL_V_CACHE, v_cache),
    {"limits", CALL_LIMITS, CALL_NOT_THERE, sizeof(struct attn_limits)}};
static const struct call_place latent_places[] = {ATTEND_PLACES};
static const struct call_place write_places[] = {
    SELF(attn_write_kv_args), PLACE_OF(attn_write_kv_args, "layer", CALL_LAYER, layer),
    PLACE_OF(attn_write_kv_args, "params", CALL_PARAMS, params),
    PLACE_OF(attn_write_kv_args, "k_cache", CALL_K_CACHE, k_cache),
    PLACE_OF(attn_write_kv_args, "v_cache", CALL_V_CACHE, v_cache)};
static const struct call_place gather_places[] = {
    SELF(attn_gather_kv_args), PLACE_OF(attn_gather_kv_args, "layer", CALL_LAYER, layer),
    PLACE_OF(attn_gather_kv_args, "params", CALL_PARAMS, params),
    PLACE_OF(attn_gather_kv_args, "cache", CALL_K_CACHE, cache),
    PLACE_OF(attn_gather_kv_args, "batch", CALL_BATCH, batch)};

#define COUNT(array) (int32_t)(sizeof array / sizeof *array)
#define PLACES(places) places, COUNT(places)
#define ONLY(type) (const struct call_place[]){SELF(type)}, 1
/* Slot, its bit, its arguments and their structs. */
#define KERNELS(X)                                                                                 \
    X(attend, ATTEND, attn_attend_args, PLACES(attend_places))                                     \
    X(write_kv, WRITE_KV, attn_write_kv_args, PLACES(write_places))                                \
    X(merge_states, MERGE_STATES, attn_merge_states_args, ONLY(attn_merge_states_args))            \
    X(rope_write_kv, ROPE_WRITE_KV, attn_write_kv_args, PLACES(write_places))                      \
    X(attend_mla, ATTEND_MLA, attn_attend_args, PLACES(latent_places))                             \
    X(attend_mla_sparse, ATTEND_MLA_SPARSE, attn_attend_args, PLACES(latent_places))               \
    X(gather_kv, GATHER_KV, attn_gather_kv_args, PLACES(gather_places))                            \
    X(recurrent, RECURRENT, attn_attend_args, PLACES(latent_places))                               \
    X(batched_gemm, BATCHED_GEMM, attn_batched_gemm_args, ONLY(attn_batched_gemm_args))            \
    X(quantize, QUANTIZE, attn_quantize_args, ONLY(attn_quantize_args))                            \
    X(amax, AMAX, attn_amax_args, ONLY(attn_amax_args))                                            \
    X(copy_blocks, COPY_BLOCKS, attn_copy_blocks_args, ONLY(attn_copy_blocks_args))                \
    X(copy, COPY, attn_copy_args, ONLY(attn_copy_args))                                            \
    X(fill, FILL, attn_fill_args, ONLY(attn_fill_args))                                            \
    X(make_block_table, MAKE_BLOCK_TABLE, attn_block_table_args, ONLY(attn_block_table_args))

#define TARGET(slot, bit, type, ...)                                                               \
    {#slot, ATTN_KERNEL_##bit, offsetof(struct attn_kernels, slot), __VA_ARGS__},
const struct call_target call_targets[NUM_CALLS] = {KERNELS(TARGET)};

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
    int32_t change; /* enum call_change */
    struct changed in_kernel, in_plan, in_prepare;
    attn_status wrong; /* of a changed call: it has to be served */
    bool scribbled;    /* a call that succeeded wrote its error */
} shim;

void call_change_struct(int32_t change, const void *from, size_t size, void *to,
                        struct attn_ext *ext)
{
    struct header {
        size_t struct_size;
        const struct attn_ext *next;
    } header;
    uint8_t *bytes = to;
    memcpy(bytes, from, size);
    memset(bytes + size, 0xa5, CALL_TAIL);
    memcpy(&header, bytes, sizeof header);
    if (change == CALL_GROWN) {
        header.struct_size = size + CALL_TAIL;
    } else {
        *ext = (struct attn_ext){UNKNOWN_EXT, 0, sizeof *ext, header.next};
        header.next = ext;
    }
    memcpy(bytes, &header, sizeof header);
}

/* The arguments with the struct changed; as they are if they have none. */
static const void *changed_args(struct changed *c, const void *args, size_t size)
{
    const struct call_place *place = shim.place;
    const void *inner;
    if (place->offset == CALL_NOT_THERE) {
        return args;
    }
    if (place->offset == CALL_SELF) {
        call_change_struct(shim.change, args, place->size, c->self, &c->ext);
        return c->self;
    }
    memcpy(c->self, args, size);
    memcpy(&inner, c->self + place->offset, sizeof inner);
    if (inner == NULL) {
        return args;
    }
    call_change_struct(shim.change, inner, place->size, c->inner, &c->ext);
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

/* A caller may leave the error out. */
static struct attn_error *error_given(struct attn_error *mine)
{
    error_prepare(mine);
    return shim.change == CALL_EXTENDED ? NULL : mine;
}

/* The end of a changed call. */
static attn_status finish_call(attn_status status, const struct attn_error *mine,
                               struct attn_error *error)
{
    shim.scribbled |= status == ATTN_OK && !error_untouched(mine);
    if (status != ATTN_OK) {
        shim.wrong = status;
        *error = (struct attn_error)ATTN_ERROR_INIT;
        if (!error_untouched(mine)) {
            *error = *mine;
        }
    }
    return status;
}

#define SHIM(slot, bit, type, ...)                                                                 \
    static attn_status shim_##slot(const struct type *args, struct attn_error *error)              \
    {                                                                                              \
        struct attn_error mine;                                                                    \
        const struct type *given = strcmp(shim.target->name, #slot) == 0                           \
                                       ? changed_args(&shim.in_kernel, args, sizeof *args)         \
                                       : args;                                                     \
        if (given == args) {                                                                       \
            return shim.real.slot(args, error);                                                    \
        }                                                                                          \
        return finish_call(shim.real.slot(given, error_given(&mine)), &mine, error);               \
    }
KERNELS(SHIM)

/* prepare, schedule_size and plan are the target's too, if it is one that they serve. */
static bool is_planned(void)
{
    return shim.target->places == attend_places || shim.target->places == latent_places;
}

static attn_status shim_schedule(const struct attn_attend_args *args, int32_t mode,
                                 struct attn_error *error)
{
    struct attn_error mine;
    const struct attn_attend_args *given =
        is_planned() ? changed_args(&shim.in_plan, args, sizeof *args) : args;
    if (given == args) {
        return shim.real.schedule(args, mode, error);
    }
    return finish_call(shim.real.schedule(given, mode, error_given(&mine)), &mine, error);
}

/* The struct at `inner` of the arguments changed, or, CALL_ARGS, they themselves. */
static attn_status shim_schedule_size(const struct attn_schedule_size_args *args,
                                      struct attn_schedule_size *size, struct attn_error *error)
{
    struct attn_error mine;
    struct changed *c = &shim.in_plan;
    struct attn_schedule_size_args given = *args;
    const void *changed = c->inner;
    if (shim.place->which == CALL_LIMITS) {
        call_change_struct(shim.change, args->limits, shim.place->size, c->inner, &c->ext);
        given.limits = changed;
        changed = &given;
    } else if (shim.place->which == CALL_ARGS && is_planned()) {
        call_change_struct(shim.change, args, sizeof *args, c->inner, &c->ext);
    } else {
        return shim.real.schedule_size(args, size, error);
    }
    return finish_call(shim.real.schedule_size(changed, size, error_given(&mine)), &mine, error);
}

static attn_status shim_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                                struct attn_error *error)
{
    static const struct {
        int32_t which;
        size_t offset;
    } inner[] = {{CALL_LAYER, offsetof(struct attn_prepare_args, layer)},
                 {CALL_PARAMS, offsetof(struct attn_prepare_args, params)},
                 {CALL_K_CACHE, offsetof(struct attn_prepare_args, k_cache)},
                 {CALL_V_CACHE, offsetof(struct attn_prepare_args, v_cache)}};
    struct attn_error mine;
    struct changed *c = &shim.in_prepare;
    struct attn_prepare_args given = *args;
    const void *changed = NULL, *from;
    if (is_planned() && shim.place->which == CALL_ARGS) {
        call_change_struct(shim.change, args, sizeof *args, c->inner, &c->ext);
        changed = c->inner;
    }
    for (size_t i = 0; is_planned() && i < sizeof inner / sizeof *inner; i++) {
        memcpy(&from, (const uint8_t *)args + inner[i].offset, sizeof from);
        if (shim.place->which == inner[i].which && from != NULL) {
            call_change_struct(shim.change, from, shim.place->size, c->inner, &c->ext);
            from = c->inner;
            memcpy((uint8_t *)&given + inner[i].offset, &from, sizeof from);
            changed = &given;
        }
    }
    return changed == NULL ? shim.real.prepare(args, prepared, error)
                           : finish_call(shim.real.prepare(changed, prepared, error_given(&mine)),
                                         &mine, error);
}

#define PUT(slot, ...) k->slot = k->slot != NULL ? shim_##slot : NULL;
static void put_table(struct attn_kernels *k)
{
    KERNELS(PUT)
    PUT(prepare, 0)
    PUT(schedule_size, 0)
    PUT(schedule, 0)
}

enum trial_result call_run(struct trial *trial, const struct call_target *target,
                           const struct call_place *place, int32_t change, kernel_run *run,
                           const void *variant, uint64_t seed)
{
    struct trial changed = *trial;
    memset(&shim, 0, sizeof shim);
    shim.backend = *trial->tested;
    shim.real = trial->tested->kernels;
    shim.target = target;
    shim.place = place;
    shim.change = change;
    put_table(&shim.backend.kernels);
    changed.tested = &shim.backend;
    enum trial_result result = run(&changed, variant, seed);
    if (result == TRIAL_SKIPPED) {
        return trial_say(trial, result, "%.900s", changed.message);
    }
    if (shim.wrong != ATTN_OK) {
        return trial_say(trial, TRIAL_FAILED, "%s %s: status %d, not %d: %.800s", place->name,
                         call_change_names[change], shim.wrong, ATTN_OK, changed.message);
    }
    if (shim.scribbled) {
        return trial_say(trial, TRIAL_FAILED, "a call that succeeded wrote its error");
    }
    return result == TRIAL_PASSED ? result
                                  : trial_say(trial, result, "%s %s: %.900s", place->name,
                                              call_change_names[change], changed.message);
}
