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

#define PLACE_OF(type, label, which, member)                                                       \
    {                                                                                              \
        label, which, offsetof(struct type, member), sizeof *((struct type *)NULL)->member         \
    }
#define ATTEND_PLACES                                                                              \
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_attend_args)},                               \
        PLACE_OF(attn_attend_args, "layer", CALL_LAYER, layer),                                    \
        PLACE_OF(attn_attend_args, "params", CALL_PARAMS, params),                                 \
        PLACE_OF(attn_attend_args, "batch", CALL_BATCH, batch),                                    \
        PLACE_OF(attn_attend_args, "k_cache", CALL_K_CACHE, k_cache)
static const struct call_place attend_places[] = {
    ATTEND_PLACES,
    PLACE_OF(attn_attend_args, "v_cache", CALL_V_CACHE, v_cache),
    {"limits", CALL_LIMITS, CALL_NOT_THERE, sizeof(struct attn_limits)}};
static const struct call_place latent_places[] = {ATTEND_PLACES};
static const struct call_place write_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_write_kv_args)},
    PLACE_OF(attn_write_kv_args, "layer", CALL_LAYER, layer),
    PLACE_OF(attn_write_kv_args, "params", CALL_PARAMS, params),
    PLACE_OF(attn_write_kv_args, "k_cache", CALL_K_CACHE, k_cache),
    PLACE_OF(attn_write_kv_args, "v_cache", CALL_V_CACHE, v_cache)};
static const struct call_place gather_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_gather_kv_args)},
    PLACE_OF(attn_gather_kv_args, "layer", CALL_LAYER, layer),
    PLACE_OF(attn_gather_kv_args, "params", CALL_PARAMS, params),
    PLACE_OF(attn_gather_kv_args, "cache", CALL_K_CACHE, cache),
    PLACE_OF(attn_gather_kv_args, "batch", CALL_BATCH, batch)};
static const struct call_place merge_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_merge_states_args)}};
static const struct call_place gemm_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_batched_gemm_args)}};
static const struct call_place quantize_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_quantize_args)}};
static const struct call_place amax_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_amax_args)}};
static const struct call_place copy_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_copy_blocks_args)}};
static const struct call_place bytes_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_copy_args)}};
static const struct call_place fill_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_fill_args)}};

static const struct call_place table_places[] = {
    {"args", CALL_ARGS, CALL_SELF, sizeof(struct attn_block_table_args)}};

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
    {"copy", ATTN_KERNEL_COPY, bytes_places, COUNT(bytes_places)},
    {"fill", ATTN_KERNEL_FILL, fill_places, COUNT(fill_places)},
    {"make_block_table", ATTN_KERNEL_MAKE_BLOCK_TABLE, table_places, COUNT(table_places)},
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
static attn_status settle(attn_status status, const struct attn_error *mine,
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

#define SHIM(slot, type)                                                                           \
    static attn_status shim_##slot(const struct type *args, struct attn_error *error)              \
    {                                                                                              \
        struct attn_error mine;                                                                    \
        const struct type *given = strcmp(shim.target->name, #slot) == 0                           \
                                       ? changed_args(&shim.in_kernel, args, sizeof *args)         \
                                       : args;                                                     \
        if (given == args) {                                                                       \
            return shim.real.slot(args, error);                                                    \
        }                                                                                          \
        return settle(shim.real.slot(given, error_given(&mine)), &mine, error);                    \
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
SHIM(copy, attn_copy_args)
SHIM(fill, attn_fill_args)
SHIM(make_block_table, attn_block_table_args)

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
    return settle(shim.real.schedule(given, mode, error_given(&mine)), &mine, error);
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
    return settle(shim.real.schedule_size(changed, size, error_given(&mine)), &mine, error);
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
    return changed == NULL
               ? shim.real.prepare(args, prepared, error)
               : settle(shim.real.prepare(changed, prepared, error_given(&mine)), &mine, error);
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
    PUT(copy);
    PUT(fill);
    PUT(make_block_table);
    PUT(prepare);
    PUT(schedule_size);
    PUT(schedule);
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
