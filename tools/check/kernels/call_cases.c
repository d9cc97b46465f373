/* SPDX-License-Identifier: Apache-2.0 */
/* Every kernel's first case with each struct of its calls changed in every way, by a backend's
 * table that does so on the way in. */
#include <string.h>

#include "cases/attend.h"
#include "kernels/kernels.h"

#define MAX_STRUCT 256     /* no struct of a call is larger */
#define UNKNOWN_EXT 0xfffu /* the last id of the project's own, given to nothing */
#define ERROR_PATTERN 0x5a

const char *const call_change_names[CALL_CHANGE_COUNT] = {"with an unknown tail",
                                                          "with an unknown extension"};
/* Which struct of a call is a newer core's. */
enum call_struct {
    CALL_ARGS,
    CALL_LAYER,
    CALL_PARAMS,
    CALL_CACHE, /* a gather's */
    CALL_BATCH,
    CALL_K_CACHE,
    CALL_V_CACHE,
    CALL_LIMITS,
    CALL_STRUCT_COUNT
};
static const char *const struct_names[CALL_STRUCT_COUNT] = {
    "args", "layer", "params", "cache", "batch", "k_cache", "v_cache", "limits"};
static const size_t struct_sizes[CALL_STRUCT_COUNT] = {
    [CALL_LAYER] = sizeof(struct attn_layer_desc), [CALL_PARAMS] = sizeof(struct attn_layer_params),
    [CALL_BATCH] = sizeof(struct attn_batch),      [CALL_K_CACHE] = sizeof(struct attn_kv_view),
    [CALL_V_CACHE] = sizeof(struct attn_kv_view),  [CALL_CACHE] = sizeof(struct attn_kv_view),
    [CALL_LIMITS] = sizeof(struct attn_limits)};

/* A type of arguments, and where its pointers to structs are; 0: it has none. */
struct call_args {
    size_t size, offsets[CALL_STRUCT_COUNT];
    bool limits; /* plans of its calls take them */
};
#define AT(which, type, member) [CALL_##which] = offsetof(struct type, member)
#define LAYER_AT(type) AT(LAYER, type, layer), AT(PARAMS, type, params)
#define CACHES_AT(type) AT(K_CACHE, type, k_cache), AT(V_CACHE, type, v_cache)
#define LATENT_AT(type) LAYER_AT(type), AT(K_CACHE, type, k_cache), AT(BATCH, type, batch)
static const struct call_args
    attend_args = {sizeof(struct attn_attend_args),
                   {LATENT_AT(attn_attend_args), AT(V_CACHE, attn_attend_args, v_cache)},
                   true},
    latent_args = {sizeof(struct attn_attend_args), {LATENT_AT(attn_attend_args)}},
    write_args = {sizeof(struct attn_write_kv_args),
                  {LAYER_AT(attn_write_kv_args), CACHES_AT(attn_write_kv_args)}},
    gather_args = {sizeof(struct attn_gather_kv_args),
                   {LAYER_AT(attn_gather_kv_args), AT(CACHE, attn_gather_kv_args, cache),
                    AT(BATCH, attn_gather_kv_args, batch)}},
    prepare_args = {sizeof(struct attn_prepare_args),
                    {LAYER_AT(attn_prepare_args), CACHES_AT(attn_prepare_args)}},
    size_args = {sizeof(struct attn_schedule_size_args),
                 {AT(LIMITS, attn_schedule_size_args, limits)}};

/* Whether calls of the target, or of its plan, bring such a struct. */
static bool brings(const struct call_target *target, int32_t which)
{
    return which == CALL_ARGS || target->args->offsets[which] > 0 ||
           (which == CALL_LIMITS && target->args->limits);
}

#define ONLY(type)                                                                                 \
    &(const struct call_args)                                                                      \
    {                                                                                              \
        sizeof(struct type),                                                                       \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
/* Slot, its bit, its arguments and their structs. */
#define KERNELS(X)                                                                                 \
    X(attend, ATTEND, attn_attend_args, &attend_args)                                              \
    X(write_kv, WRITE_KV, attn_write_kv_args, &write_args)                                         \
    X(merge_states, MERGE_STATES, attn_merge_states_args, ONLY(attn_merge_states_args))            \
    X(rope_write_kv, ROPE_WRITE_KV, attn_write_kv_args, &write_args)                               \
    X(attend_mla, ATTEND_MLA, attn_attend_args, &latent_args)                                      \
    X(attend_mla_sparse, ATTEND_MLA_SPARSE, attn_attend_args, &latent_args)                        \
    X(gather_kv, GATHER_KV, attn_gather_kv_args, &gather_args)                                     \
    X(recurrent, RECURRENT, attn_attend_args, &latent_args)                                        \
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
    int32_t which;  /* enum call_struct */
    int32_t change; /* enum call_change */
    struct changed in_kernel, in_plan, in_prepare;
    attn_status wrong; /* status of a changed call, which has to be served */
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

/* The arguments with the struct changed; as they are if they do not have it. */
static const void *changed_args(struct changed *c, const void *args, const struct call_args *type)
{
    const size_t offset = type->offsets[shim.which];
    const void *inner = NULL;
    if (shim.which == CALL_ARGS) {
        call_change_struct(shim.change, args, type->size, c->self, &c->ext);
        return c->self;
    }
    memcpy(c->self, args, type->size);
    if (offset > 0) {
        memcpy(&inner, c->self + offset, sizeof inner);
    }
    if (inner == NULL) {
        return args;
    }
    call_change_struct(shim.change, inner, struct_sizes[shim.which], c->inner, &c->ext);
    inner = c->inner;
    memcpy(c->self + offset, &inner, sizeof inner);
    return c->self;
}

/* Fills the error with a pattern that a successful call must not change. */
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

/* Calls `slot` with changed arguments, followed by the other arguments of the slot. */
#define CALL(changes, kept, type, slot, ...)                                                       \
    struct attn_error mine;                                                                        \
    const void *given = changes ? changed_args(&shim.kept, args, type) : args;                     \
    return given == args                                                                           \
               ? shim.real.slot(args, __VA_ARGS__ error)                                           \
               : finish_call(shim.real.slot(given, __VA_ARGS__ error_given(&mine)), &mine, error)
#define SHIM(slot, bit, type, ...)                                                                 \
    static attn_status shim_##slot(const struct type *args, struct attn_error *error)              \
    {                                                                                              \
        CALL(strcmp(shim.target->name, #slot) == 0, in_kernel, shim.target->args, slot, );         \
    }
KERNELS(SHIM)

/* prepare, schedule_size and schedule are the target's too, if it is one that they serve. */
static bool is_planned(void)
{
    return shim.target->args->size == sizeof(struct attn_attend_args);
}

static attn_status shim_schedule(const struct attn_attend_args *args, int32_t mode,
                                 struct attn_error *error)
{
    CALL(is_planned(), in_plan, &attend_args, schedule, mode, );
}

static attn_status shim_schedule_size(const struct attn_schedule_size_args *args,
                                      struct attn_schedule_size *size, struct attn_error *error)
{
    CALL(is_planned(), in_plan, &size_args, schedule_size, size, );
}

static attn_status shim_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                                struct attn_error *error)
{
    CALL(is_planned(), in_prepare, &prepare_args, prepare, prepared, );
}

#define PUT(slot, ...) k->slot = k->slot != NULL ? shim_##slot : NULL;
static void put_table(struct attn_kernels *k)
{
    KERNELS(PUT)
    PUT(prepare, 0)
    PUT(schedule_size, 0)
    PUT(schedule, 0)
}

struct call_case {
    const struct call_target *target;
    int32_t which; /* enum call_struct */
    kernel_run *run;
    const void *variant;
};

/* The case run with its struct of the target's calls changed. */
static enum trial_result run_change(struct trial *trial, const struct call_case *c, int32_t change,
                                    uint64_t seed)
{
    struct trial changed = *trial;
    changed.bench = false;
    memset(&shim, 0, sizeof shim);
    shim.backend = *trial->tested;
    shim.real = trial->tested->kernels;
    shim.target = c->target;
    shim.which = c->which;
    shim.change = change;
    put_table(&shim.backend.kernels);
    changed.tested = &shim.backend;
    enum trial_result result = c->run(&changed, c->variant, seed);
    if (result == TRIAL_SKIPPED) {
        return trial_say(trial, result, "%.900s", changed.message);
    }
    TRIAL_FAIL_IF(trial, shim.wrong != ATTN_OK, "%s %s: status %d, not %d: %.800s",
                  struct_names[c->which], call_change_names[change], shim.wrong, ATTN_OK,
                  changed.message);
    if (shim.scribbled) {
        return trial_say(trial, TRIAL_FAILED, "a call that succeeded wrote its error");
    }
    return result == TRIAL_PASSED
               ? result
               : trial_say(trial, result, "%s %s: %.900s", struct_names[c->which],
                           call_change_names[change], changed.message);
}

const struct kernel_file kernel_files[NUM_KERNEL_FILES] = {
    {ATTN_KERNEL_MERGE_STATES, merge_cases},
    {ATTN_KERNEL_QUANTIZE | ATTN_KERNEL_AMAX, quantize_cases},
    {ATTN_KERNEL_BATCHED_GEMM, gemm_cases},
    {ATTN_KERNEL_COPY_BLOCKS | ATTN_KERNEL_COPY | ATTN_KERNEL_FILL, copy_cases},
    {ATTN_KERNEL_MAKE_BLOCK_TABLE, table_cases},
    {ATTN_KERNEL_ROPE_WRITE_KV, rope_cases},
    {ATTN_KERNEL_GATHER_KV, gather_cases},
    {0, fp8_inputs_cases}, /* attends, whose calls attend's own cases have */
    {ATTN_KERNEL_ATTEND_MLA | ATTN_KERNEL_ATTEND_MLA_SPARSE, mla_cases},
    {ATTN_KERNEL_RECURRENT, gdn_cases},
    {0, index_cases},
    {0, index_write_cases},
};

static enum trial_result run_changes(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct call_case *c = variant;
    enum trial_result result = TRIAL_PASSED;
    if (c->which == CALL_LIMITS && trial->tested->kernels.schedule_size == NULL) {
        return trial_say(trial, TRIAL_SKIPPED,
                         "the backend has no schedule_size, which takes them");
    }
    for (int32_t change = 0; change < CALL_CHANGE_COUNT && result == TRIAL_PASSED; change++) {
        result = run_change(trial, c, change, seed);
    }
    return result;
}

static void try_case(const struct kernel_sink *sink, const struct call_case *c)
{
    kernel_try(sink, run_changes, c, "calls.%s.%s", c->target->name, struct_names[c->which]);
}

/* The first case of a kernel, out of a file's. */
struct first {
    const struct kernel_sink *sink;
    struct call_case of;
    bool found;
};

static void try_first(void *user, const char *name, kernel_run *run, const void *variant)
{
    struct first *first = user;
    size_t length = strlen(first->of.target->name);
    if (!first->found && strncmp(name, first->of.target->name, length) == 0 &&
        (name[length] == '.' || name[length] == '\0')) {
        first->found = true;
        first->of.run = run;
        first->of.variant = variant;
        try_case(first->sink, &first->of);
    }
}

static void try_kernel(const struct kernel_sink *sink, const struct call_target *target,
                       int32_t which)
{
    for (int32_t i = 0; i < NUM_KERNEL_FILES; i++) {
        if (kernel_files[i].kernels & target->kernel) {
            struct first first = {sink, {target, which, NULL, NULL}, false};
            const struct kernel_sink its = {&first, sink->caps, sink->space, try_first};
            kernel_files[i].cases(&its);
        }
    }
}

static enum trial_result run_attend(struct trial *trial, const void *variant, uint64_t seed)
{
    const struct attend_variant *v = variant;
    return trial_attend(trial, v->space, &v->attend_case, seed, TRIAL_PLAIN);
}

/* attend and write_kv come in one case. */
static void try_attend(const struct kernel_sink *sink, const struct call_target *target,
                       int32_t which)
{
    struct attend_variant v = {.space = sink->space};
    const struct call_case c = {target, which, run_attend, &v};
    if (case_of_any_cache(sink->space, &v.attend_case)) {
        try_case(sink, &c);
    }
}

void call_cases(const struct kernel_sink *sink)
{
    for (int32_t i = 0; i < NUM_CALLS; i++) {
        const struct call_target *target = &call_targets[i];
        bool attends = target->kernel & (ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV);
        for (int32_t which = 0; which < CALL_STRUCT_COUNT; which++) {
            if (sink->caps->kernels & target->kernel && brings(target, which)) {
                (attends ? try_attend : try_kernel)(sink, target, which);
            }
        }
    }
}
