/* SPDX-License-Identifier: Apache-2.0 */
/* The table of a mutant: cpu_ref's kernels behind its mistake. */
#include <string.h>

#include "common/tensors.h"
#include "mutants.h"

#define PLAN_BYTES sizeof(struct kept)
#define STATE_BYTES 64

struct struct_header {
    size_t struct_size;
    const struct attn_ext *next;
};

/* What the mutant makes of a struct's header. */
static attn_status judge(const struct mutant *mutant, const void *given, size_t size)
{
    const struct struct_header *header = given;
    if (mutant->structs == STRUCTS_GROWN_REFUSED && header->struct_size != size) {
        return ATTN_ERROR_STRUCT_SIZE;
    }
    return mutant->structs == STRUCTS_EXTENSION_REFUSED && header->next != NULL &&
                   header->next->id > ATTN_EXT_DRAFT_INDEX_LISTS_CAPS
               ? ATTN_ERROR_EXTENSION
               : ATTN_OK;
}

/* A copy of a struct that was let in is of this file's size, and what is unknown is not passed on.
 */
static void tidy(void *copy, size_t size)
{
    struct struct_header *header = copy;
    header->struct_size = size;
    if (header->next != NULL && header->next->id > ATTN_EXT_DRAFT_INDEX_LISTS_CAPS) {
        header->next = header->next->next;
    }
}

/* The arguments in `m`, or the mutant's refusal. */
static attn_status take_args(struct mutable_args *m, const struct attn_attend_args *args)
{
    const struct attn_instance *me = args->instance;
    attn_status status = judge(me->mutant, args, sizeof *args);
    status = status ? status : judge(me->mutant, args->layer, sizeof *args->layer);
    status = status ? status : judge(me->mutant, args->params, sizeof *args->params);
    status = status ? status : judge(me->mutant, args->batch, sizeof *args->batch);
    if (status != ATTN_OK) {
        return status;
    }
    m->args = *args;
    m->args.instance = me->real;
    m->layer = *args->layer;
    m->params = *args->params;
    m->batch = *args->batch;
    tidy(&m->args, sizeof m->args);
    tidy(&m->layer, sizeof m->layer);
    tidy(&m->params, sizeof m->params);
    tidy(&m->batch, sizeof m->batch);
    return ATTN_OK;
}

/* Apart, so that the other mutants' frames stay small. */
__attribute__((noinline)) static void use_much_stack(void)
{
    volatile char much[ATTN_STEP_STACK_BYTES + 4096]; /* the measure begins a few frames below */
    for (size_t i = 0; i < sizeof much; i += 64) {
        much[i] = 1;
    }
}

static attn_status mutant_attend(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    const struct mutant *mutant = me->mutant;
    static _Thread_local struct mutable_args m;
    attn_status taken = take_args(&m, args);
    if (taken != ATTN_OK) {
        return taken;
    }
    if (mutant->before != NULL) {
        mutant->before(&m);
    }
    if (mutant->planned != NULL) {
        mutant->planned(&m, args->schedule_host);
    }
    if (mutant->deep) {
        use_much_stack();
    }
    if (mutant->allocates) {
        me->host->release(me->host->user, me->host->allocate(me->host->user, 64, 64), 64);
    }
    m.args.layer = &m.layer;
    m.args.params = &m.params;
    m.args.batch = &m.batch;
    /* cpu_ref's attend writes in decodes of few caches only */
    m.args.flags |= mutant->features & ATTN_FEATURE_FUSED_WRITE ? ATTN_RUN_NO_WRITE : 0;
    bool writes = mutant->fused && !(args->flags & ATTN_RUN_NO_WRITE) && args->k != NULL;
    if (writes && args->k_cache != NULL) { /* a cross layer brings its keys once */
        struct attn_write_kv_args write = write_of_attend(args);
        write.instance = me->real;
        attn_status status = me->kernels->write_kv(&write, error);
        if (status != ATTN_OK) {
            return status;
        }
    }
    attn_status status = m.layer.output_form != ATTN_OUTPUT_PLAIN && mutant->codes != NULL
                             ? mutant_attend_codes(me->kernels, mutant, &m, error)
                             : me->kernels->attend(&m.args, error);
    if (status == ATTN_OK && mutant->after != NULL) {
        mutant->after(args);
    }
    if (mutant->needs_error) {
        (void)*(volatile int32_t *)&error->reserved;
    }
    if (status == ATTN_OK && mutant->writes_error && error != NULL) {
        error->status = ATTN_OK;
        error->message[0] = '\0';
    }
    return status;
}

static attn_status mutant_mla(const struct attn_attend_args *args, bool sparse,
                              struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    static _Thread_local struct mutable_args m;
    if (me->mutant->mla_takes != NULL && me->mutant->mla_takes(args) != ATTN_OK) {
        return me->mutant->mla_takes(args);
    }
    attn_status taken = take_args(&m, args);
    if (taken != ATTN_OK) {
        return taken;
    }
    if (me->mutant->mla != NULL) {
        me->mutant->mla(&m);
    }
    m.args.layer = &m.layer;
    m.args.params = &m.params;
    m.args.batch = &m.batch;
    attn_status status = sparse ? me->kernels->attend_mla_sparse(&m.args, error)
                                : me->kernels->attend_mla(&m.args, error);
    if (status == ATTN_OK && me->mutant->mla_after != NULL) {
        me->mutant->mla_after(args);
    }
    return status;
}

static attn_status mutant_mla_dense(const struct attn_attend_args *args, struct attn_error *error)
{
    return mutant_mla(args, false, error);
}

static attn_status mutant_mla_sparse(const struct attn_attend_args *args, struct attn_error *error)
{
    return mutant_mla(args, true, error);
}

static attn_status mutant_schedule_size(const struct attn_schedule_size_args *args,
                                        struct attn_schedule_size *size, struct attn_error *error)
{
    attn_status status = judge(args->instance->mutant, args->limits, sizeof *args->limits);
    if (status != ATTN_OK) {
        return status;
    }
    size->host_bytes = PLAN_BYTES;
    size->device_bytes = 64;
    return ATTN_OK;
}

/* A state that is not read: it takes memory. */
static attn_status mutant_prepare(const struct attn_prepare_args *args, attn_prepared **prepared,
                                  struct attn_error *error)
{
    const struct attn_instance *me = args->instance;
    attn_prepared *made = me->host->allocate(me->host->user, STATE_BYTES, 16);
    if (made != NULL || !me->mutant->leaves_state) {
        *prepared = made;
    }
    return made != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
}

static void mutant_release(attn_instance *me, attn_prepared *prepared)
{
    me->host->release(me->host->user, prepared, STATE_BYTES);
}

static attn_status mutant_schedule(const struct attn_attend_args *args, int32_t mode,
                                   struct attn_error *error)
{
    const struct mutant *mutant = args->instance->mutant;
    if (mutant->plan != NULL) {
        mutant->plan(args, mode, args->schedule_host);
    }
    if (mutant->overruns_plan) {
        memset(args->workspace, 0, 64 + 1);
    }
    return ATTN_OK;
}

static attn_status mutant_update(const struct attn_attend_args *args, struct attn_error *error)
{
    return args->instance->mutant->ignores_updates ? ATTN_OK
                                                   : mutant_schedule(args, ATTN_PLAN_EAGER, error);
}

/* Every kernel is cpu_ref's, with the instance behind: CALL gets a copy of the arguments. */
#define FORWARD(function, type, CALL)                                                              \
    static attn_status function(const struct type *args, struct attn_error *error)                 \
    {                                                                                              \
        const struct attn_instance *me = args->instance;                                           \
        attn_status status = judge(me->mutant, args, sizeof *args);                                \
        if (status != ATTN_OK) {                                                                   \
            return status;                                                                         \
        }                                                                                          \
        struct type changed = *args;                                                               \
        tidy(&changed, sizeof changed);                                                            \
        changed.instance = me->real;                                                               \
        return CALL(me, &changed, error);                                                          \
    }

/* The mutant's change, then cpu_ref's kernel. */
#define FORWARD_CHANGED(slot, type, kernel)                                                        \
    static attn_status call_##slot(const struct attn_instance *me, struct type *args,              \
                                   struct attn_error *error)                                       \
    {                                                                                              \
        if (me->mutant->slot != NULL) {                                                            \
            me->mutant->slot(args);                                                                \
        }                                                                                          \
        return me->kernels->kernel(args, error);                                                   \
    }                                                                                              \
    FORWARD(mutant_##slot, type, call_##slot)

FORWARD_CHANGED(gather, attn_gather_kv_args, gather_kv)
FORWARD_CHANGED(gemm, attn_batched_gemm_args, batched_gemm)
FORWARD_CHANGED(quantize, attn_quantize_args, quantize)
FORWARD_CHANGED(amax, attn_amax_args, amax)
FORWARD_CHANGED(copy_blocks, attn_copy_blocks_args, copy_blocks)
FORWARD_CHANGED(fill, attn_fill_args, fill)

static attn_status call_write(const struct attn_instance *me, struct attn_write_kv_args *args,
                              struct attn_error *error)
{
    if (me->mutant->write != NULL) {
        me->mutant->write(args);
    }
    attn_status status = me->kernels->write_kv(args, error);
    for (int64_t t = 0; status == ATTN_OK && me->mutant->written && t < args->num_slots; t++) {
        for (int64_t h = 0; h < args->layer->num_kv_heads && args->slot_mapping[t] >= 0; h++) {
            me->mutant->written(args, t, args->slot_mapping[t], h);
        }
    }
    return status;
}
FORWARD(mutant_write, attn_write_kv_args, call_write)

static attn_status call_rope(const struct attn_instance *me, struct attn_write_kv_args *args,
                             struct attn_error *error)
{
    struct attn_io_rope rope;
    if (me->mutant->rope != NULL) {
        rope = *(const struct attn_io_rope *)args->next;
        me->mutant->rope(args, &rope);
        args->next = &rope.ext;
    }
    return me->kernels->rope_write_kv(args, error);
}
FORWARD(mutant_rope, attn_write_kv_args, call_rope)

static attn_status call_merge(const struct attn_instance *me, struct attn_merge_states_args *args,
                              struct attn_error *error)
{
    if (me->mutant->merge != NULL) {
        me->mutant->merge(args);
    }
    attn_status status = me->kernels->merge_states(args, error);
    if (status == ATTN_OK && me->mutant->merged != NULL) {
        me->mutant->merged(args);
    }
    return status;
}
FORWARD(mutant_merge, attn_merge_states_args, call_merge)
FORWARD(mutant_gdn, attn_attend_args, gdn_with_mistake)

static attn_status mutant_make_table(const struct attn_block_table_args *args,
                                     struct attn_error *error)
{
    const struct mutant *mutant = args->instance->mutant;
    attn_status status = judge(mutant, args, sizeof *args);
    if (status == ATTN_OK) {
        mutant->table(args, mutant->mistake);
    }
    return status;
}

const struct attn_kernels mutant_kernels = {
    .struct_size = sizeof mutant_kernels,
    .attend = mutant_attend,
    .attend_mla = mutant_mla_dense,
    .attend_mla_sparse = mutant_mla_sparse,
    .write_kv = mutant_write,
    .merge_states = mutant_merge,
    .rope_write_kv = mutant_rope,
    .gather_kv = mutant_gather,
    .recurrent = mutant_gdn,
    .batched_gemm = mutant_gemm,
    .quantize = mutant_quantize,
    .amax = mutant_amax,
    .copy_blocks = mutant_copy_blocks,
    .prepare = mutant_prepare,
    .release = mutant_release,
    .schedule_size = mutant_schedule_size,
    .schedule = mutant_schedule,
    .update_block_table = mutant_update,
    .fill = mutant_fill,
    .make_block_table = mutant_make_table,
};
