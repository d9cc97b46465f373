/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers. The gated delta rule over float32 states: S <- e^g S; r = beta (v - S k);
 * S <- S + r k^T; o = S q, a token at a time on the state's own memory. Other rules and states of
 * 16 bits, or with a ring: a token at a time on a copy. Every rule with a gate per head: in
 * chunks on the transpose of the state (gdn_chunk.c). */
#include "gdn.h"

struct gdn_loop {
    struct gdn gdn;
    float *taps;
    char *scratch; /* memory of worker 0 */
    size_t scratch_bytes;
    int32_t together; /* value heads of an item */
    bool is_plain;    /* the gated delta rule over float32 states */
    bool in_chunks;   /* requests of several tokens */
};

static int32_t most_together(const struct attn_recurrent_desc *desc)
{
    int32_t group = desc->num_v_heads / desc->num_k_heads, count = min_i32(group, GDN_TOGETHER);
    while (group % count != 0) {
        count--;
    }
    return count;
}

/* Places in a worker's memory; with memory NULL only the bytes count. */
static size_t scratch_place(const struct attn_recurrent_desc *desc, char *memory,
                            struct gdn_scratch *s)
{
    size_t at = 0;
    size_t depth = (size_t)round_up(desc->head_size_k, COLUMN_MULTIPLE);
    size_t width = (size_t)round_up(desc->head_size_v, COLUMN_MULTIPLE);
    size_t wider = depth > width ? depth : width;
    size_t taps = (size_t)max_i32(1, desc->conv_width);
#define PLACE(field, floats)                                                                       \
    (s->field = memory != NULL ? (void *)(memory + at) : NULL,                                     \
     at += ((floats) * sizeof(float) + 63) / 64 * 64 + 64)
    s->depth = (int32_t)depth;
    s->width = (int32_t)width;
    PLACE(q, GDN_CHUNK * depth);
    PLACE(k, GDN_CHUNK * depth);
    PLACE(v, GDN_CHUNK * width);
    PLACE(o, GDN_CHUNK * width);
    PLACE(kt, wider * TILE_KEYS);
    PLACE(kk, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(qk, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(by_r, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(by_q, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(d, (size_t)GDN_CHUNK);
    PLACE(group_kk, (size_t)GDN_CHUNK * WALK_TOKENS);
    PLACE(group_qk, (size_t)GDN_CHUNK * WALK_TOKENS);
    PLACE(q_left.memory, GDN_CHUNK * depth);
    PLACE(k_left.memory, GDN_CHUNK * depth);
    PLACE(kt_right.memory, GDN_CHUNK * depth);
    PLACE(kt_left.memory, GDN_CHUNK * depth);
    PLACE(by_q_left.memory, GDN_CHUNK * GDN_CHUNK);
    PLACE(by_r_left.memory, GDN_CHUNK * GDN_CHUNK);
    PLACE(r_right.memory, GDN_CHUNK * width);
    PLACE(states, (size_t)most_together(desc) * depth * width);
    PLACE(packed_states, (size_t)most_together(desc) * depth * width);
    PLACE(raw, (taps - 1 + GDN_CHUNK) * wider);
#undef PLACE
    return (at + 4095) / 4096 * 4096 + 256;
}

static size_t taps_bytes(const struct attn_recurrent_desc *desc)
{
    return (gdn_taps_floats(desc) * sizeof(float) + 255) / 256 * 256;
}

size_t gdn_workspace_bytes(const struct attn_recurrent_desc *desc, int32_t num_threads)
{
    struct gdn_scratch scratch;
    return taps_bytes(desc) + scratch_place(desc, NULL, &scratch) * (size_t)num_threads;
}

/* Run one step late: the step's floats were stored one by one, and loading them as vectors would
 * wait for all those stores. */
static void store_pending(const struct gdn *gdn, struct gdn_scratch *s)
{
    if (s->pending.o != NULL) {
        gdn_store_rows(gdn, s->pending.row, 1, s->pending.head, s->pending.o, s->width);
        s->pending.o = NULL;
    }
}

/* The recurrence, token by token. A state that the cache does not store is in the scratch memory.
 */
static void run_steps(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                      bool new_keys, struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    struct delta_args step = {.rows = desc->head_size_v, .depth = desc->head_size_k};
    size_t bytes = (size_t)desc->head_size_v * (size_t)desc->head_size_k * sizeof(float);
    step.from = s->states;
    if (request->has_state) {
        step.from = gdn_state(gdn, request->state_from, head);
    } else {
        memset(s->states, 0, bytes);
    }
    for (int64_t t = 0; t < request->num_tokens; t++) {
        int32_t i = (int32_t)(t % GDN_CHUNK);
        if (i == 0) {
            int64_t left = request->num_tokens - t;
            int32_t count = left < GDN_CHUNK ? (int32_t)left : GDN_CHUNK;
            if (new_keys || request->num_tokens > GDN_CHUNK) {
                gdn_load_qk(gdn, request, t, count, gdn_key_head(desc, head), s);
            }
            gdn_load_v(gdn, request, t, count, head, s);
            gdn_load_gates(gdn, request, t, count, head, s);
        }
        int32_t slot = request->keeps_all ? request->slots[t] : request->slots[0];
        step.to = slot >= 0 ? gdn_state(gdn, slot, head) : s->states;
        step.q = s->q + (int64_t)i * s->depth;
        step.k = s->k + (int64_t)i * s->depth;
        step.v = s->v + (int64_t)i * s->width;
        step.out = s->pending.o == s->o ? s->o + s->width : s->o;
        step.decay = s->decay[i];
        step.beta = s->beta[i];
        step.kq = gdn_variant(gdn)->delta->dot(step.k, step.q, s->depth);
        gdn_variant(gdn)->delta->step(&step);
        store_pending(gdn, s);
        s->pending = (struct gdn_pending){step.out, request->first_row + t, head};
        step.from = step.to;
        int32_t checkpoint = gdn_checkpoint_slot(gdn, request, t + 1);
        if (checkpoint >= 0) {
            memmove(gdn_state(gdn, checkpoint, head), step.to, bytes);
        }
    }
}

static void load_rows(const struct gdn *gdn, int32_t slot, int32_t head, struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t dk = desc->head_size_k, element = element_of_dtype(desc->state_dtype);
    const char *from = gdn_state(gdn, slot, head);
    for (int32_t d = 0; d < desc->head_size_v; d++, from += dk * element_bytes[element]) {
        gdn_variant(gdn)->f32->unpack[element](s->states + (int64_t)d * s->depth, from, dk);
    }
}

/* If tokens follow, the state goes on as it was stored. */
static void store_rows(const struct gdn *gdn, int32_t slot, int32_t head, int64_t tokens, bool last,
                       struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t dk = desc->head_size_k, element = element_of_dtype(desc->state_dtype);
    char *to = gdn_state(gdn, slot, head);
    for (int32_t d = 0; d < desc->head_size_v; d++, to += dk * element_bytes[element]) {
        gdn_store_state(gdn, head, d, tokens, s->states + (int64_t)d * s->depth, to);
    }
    if (element != ELEMENT_F32 && !last) {
        load_rows(gdn, slot, head, s);
    }
}

/* The numbers that a slot would hold. */
static void round_rows(const struct gdn *gdn, int32_t head, int64_t tokens, struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t element = element_of_dtype(desc->state_dtype);
    float row[GDN_MAX_HEAD_SIZE]; /* the widest */
    for (int32_t d = 0; d < desc->head_size_v && element != ELEMENT_F32; d++) {
        float *state = s->states + (int64_t)d * s->depth;
        gdn_store_state(gdn, head, d, tokens, state, row);
        gdn_variant(gdn)->f32->unpack[element](state, row, desc->head_size_k);
    }
}

/* Stores a token's k in its row; the first head of a group does, and all use it as it is stored. */
static void store_key(const struct gdn *gdn, const struct gdn_ring_row *row, int32_t head, float *k)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t element = element_of_dtype(gdn->args->layer->dtype);
    float stored[GDN_MAX_HEAD_SIZE]; /* the widest */
    void *to = head % (desc->num_v_heads / desc->num_k_heads) == 0 ? (void *)row->k : stored;
    gdn_variant(gdn)->store[element](to, k, 1.0f, desc->head_size_k);
    gdn_variant(gdn)->f32->unpack[element](k, to, desc->head_size_k);
}

/* The tokens of the ring that the state misses, as an additive rule with u for v. */
static void replay(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                   struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const int32_t element = element_of_dtype(gdn->args->layer->dtype);
    const int32_t gates = gdn_num_gates(gdn);
    float decays[GDN_MAX_HEAD_SIZE + COLUMN_MULTIPLE];
    const struct delta_args step = {.to = s->states,
                                    .from = s->states,
                                    .rows = desc->head_size_v,
                                    .depth = s->depth,
                                    .q = s->k,
                                    .k = s->k,
                                    .v = s->v,
                                    .out = s->o,
                                    .beta = 1,
                                    .decays = decays,
                                    .additive = true};
    memset(s->k, 0, (size_t)s->depth * sizeof(float));
    for (int64_t t = -request->replayed; t < 0; t++) {
        const struct gdn_ring_row row = gdn_ring_row(gdn, request, request->state_from, t, head);
        gdn_variant(gdn)->f32->unpack[element](s->k, row.k, desc->head_size_k);
        gdn_variant(gdn)->f32->unpack[element](s->v, row.u, desc->head_size_v);
        for (int32_t i = 0; i < s->depth; i++) {
            decays[i] = i < gates               ? expf(((const float *)(const void *)row.g)[i])
                        : i < desc->head_size_k ? decays[0]
                                                : 1.0f;
        }
        gdn_variant(gdn)->delta->rule(&step);
    }
}

/* A step of one token over a ring, which leaves the state as it is, takes two products of S, to
 * which the ring's tokens j are not added: S x = S_0 (e x) + sum_j u_j <k_j, e_j x> with e the
 * decays of all tokens and e_j of those after j, the step's own included. */
static void run_ring_step(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                          struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const struct variant *variant = gdn_variant(gdn);
    const int32_t element = element_of_dtype(gdn->args->layer->dtype), dv = desc->head_size_v;
    const int32_t gates = gdn_num_gates(gdn);
    const bool additive = gdn->rule->rule == ATTN_RULE_ADDITIVE;
    const bool in_place = desc->state_dtype == ATTN_DTYPE_F32 && s->depth == desc->head_size_k;
    const float skip = gdn->skip != NULL ? gdn->skip[head] : 0;
    float decays[GDN_MAX_HEAD_SIZE + COLUMN_MULTIPLE];
    float k[GDN_MAX_HEAD_SIZE + COLUMN_MULTIPLE] = {0}, u[GDN_MAX_HEAD_SIZE];
    float added[GDN_MAX_HEAD_SIZE];
    gdn_load_qk(gdn, request, 0, 1, gdn_key_head(desc, head), s);
    gdn_load_v(gdn, request, 0, 1, head, s);
    const struct gdn_ring_row own = gdn_ring_row(gdn, request, request->slots[0], 0, head);
    store_key(gdn, &own, head, s->k);
    const float beta =
        gdn_load_any_gates(gdn, request->first_row, head, s->depth, decays, (float *)(void *)own.g);
    for (int32_t d = 0; d < dv; d++) {
        added[d] = skip * s->v[d];
    }
    for (int64_t t = -1; t >= -request->replayed; t--) {
        const struct gdn_ring_row row = gdn_ring_row(gdn, request, request->state_from, t, head);
        variant->f32->unpack[element](k, row.k, desc->head_size_k);
        variant->f32->unpack[element](u, row.u, dv);
        for (int32_t i = 0; i < desc->head_size_k; i++) {
            k[i] *= decays[i];
        }
        const float of_k = additive ? 0 : variant->delta->dot(k, s->k, s->depth);
        const float of_q = variant->delta->dot(k, s->q, s->depth);
        for (int32_t d = 0; d < dv; d++) {
            s->v[d] -= of_k * u[d];
            added[d] += of_q * u[d];
        }
        float decay = 0;
        for (int32_t i = 0; i < desc->head_size_k; i++) {
            decay = i < gates ? expf(((const float *)(const void *)row.g)[i]) : decay;
            decays[i] *= decay;
        }
    }
    if (!in_place) {
        memset(s->states, 0, (size_t)dv * (size_t)s->depth * sizeof(float));
        load_rows(gdn, request->state_from, head, s);
    }
    const struct delta_args step = {.to = s->states,
                                    .from = in_place ? gdn_state(gdn, request->state_from, head)
                                                     : s->states,
                                    .rows = dv,
                                    .depth = s->depth,
                                    .q = s->q,
                                    .k = s->k,
                                    .v = s->v,
                                    .out = s->o,
                                    .beta = beta,
                                    .kq = variant->delta->dot(s->k, s->q, s->depth),
                                    .decays = decays,
                                    .additive = additive,
                                    .changes = u};
    variant->delta->rule(&step);
    variant->store[element](own.u, u, 1.0f, dv);
    for (int32_t d = 0; d < dv; d++) {
        s->o[d] += added[d];
    }
    gdn_store_rows(gdn, request->first_row, 1, head, s->o, s->width);
}

/* Any rule, token by token, on rows padded to s->depth. */
static void run_rule(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                     struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const bool stored = gdn->args->layer->batch_invariant >= 2;
    const int32_t element = element_of_dtype(gdn->args->layer->dtype);
    float decays[GDN_MAX_HEAD_SIZE + COLUMN_MULTIPLE], changes[GDN_MAX_HEAD_SIZE];
    struct delta_args step = {.to = s->states,
                              .from = s->states,
                              .rows = desc->head_size_v,
                              .depth = s->depth,
                              .out = s->o,
                              .decays = decays,
                              .additive = gdn->rule->rule == ATTN_RULE_ADDITIVE,
                              .skip = gdn->skip != NULL ? gdn->skip[head] : 0};
    if (!request->has_state || s->depth > desc->head_size_k) {
        memset(s->states, 0, (size_t)desc->head_size_v * (size_t)s->depth * sizeof(float));
    }
    if (request->has_state) {
        load_rows(gdn, request->state_from, head, s);
    }
    replay(gdn, request, head, s);
    for (int64_t t = 0; t < request->num_tokens; t++) {
        const int32_t i = (int32_t)(t % GDN_CHUNK);
        const bool kept = gdn->ring != NULL && t >= request->written;
        struct gdn_ring_row row = {NULL, NULL, NULL};
        const int64_t left = request->num_tokens - t;
        if (i == 0) {
            const int32_t count = left < GDN_CHUNK ? (int32_t)left : GDN_CHUNK;
            gdn_load_qk(gdn, request, t, count, gdn_key_head(desc, head), s);
            gdn_load_v(gdn, request, t, count, head, s);
        }
        step.q = s->q + (int64_t)i * s->depth;
        step.k = s->k + (int64_t)i * s->depth;
        step.v = s->v + (int64_t)i * s->width;
        if (kept) {
            row = gdn_ring_row(gdn, request, request->slots[0], t, head);
            store_key(gdn, &row, head, s->k + (int64_t)i * s->depth);
        }
        step.changes = kept ? changes : NULL;
        step.beta = gdn_load_any_gates(gdn, request->first_row + t, head, s->depth, decays,
                                       (float *)(void *)row.g);
        step.kq = gdn_variant(gdn)->delta->dot(step.k, step.q, s->depth);
        gdn_variant(gdn)->delta->rule(&step);
        if (kept) {
            gdn_variant(gdn)->store[element](row.u, changes, 1.0f, desc->head_size_v);
        }
        gdn_store_rows(gdn, request->first_row + t, 1, head, s->o, s->width);
        const int32_t own = gdn_own_slot(gdn, request, t);
        const int32_t checkpoint = gdn_checkpoint_slot(gdn, request, t + 1);
        const int64_t tokens = request->context + t + 1;
        if (own >= 0) {
            store_rows(gdn, own, head, tokens, left == 1 && checkpoint < 0, s);
        }
        if (checkpoint >= 0) {
            store_rows(gdn, checkpoint, head, tokens, left == 1, s);
        }
        if (stored && own < 0 && checkpoint < 0) {
            round_rows(gdn, head, tokens, s);
        }
    }
}

/* Items are heads of the mixed row. */
static void taps_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    for (int64_t item = begin; item < end; item++) {
        gdn_load_taps(&loop->gdn, (int32_t)item, loop->taps);
    }
}

/* Items are (request, `together` value heads). */
static void delta_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    const struct gdn *gdn = &loop->gdn;
    const struct variant *variant = gdn_variant(gdn);
    int32_t parts = gdn->desc->num_v_heads / loop->together;
    struct gdn_request request;
    struct gdn_scratch scratch;
    scratch_place(gdn->desc, loop->scratch + (size_t)worker * loop->scratch_bytes, &scratch);
    scratch.taps = loop->taps;
    scratch.pending.o = NULL;
    enter_variant(variant);
    for (int64_t item = begin; item < end; item++) {
        int32_t head = (int32_t)(item % parts) * loop->together;
        if (!gdn_request_of(gdn, (int32_t)(item / parts), &request) || request.state_from < 0) {
            continue;
        }
        const bool fits = gdn->ring == NULL
                              ? !request.keeps_all
                              : request.replayed == 0 && request.written == request.num_tokens;
        if (loop->in_chunks && fits && request.num_tokens > 1) {
            store_pending(gdn, &scratch);
            gdn_run_chunks(gdn, &request, head, loop->together, &scratch);
            continue;
        }
        if (!loop->is_plain) {
            const bool stays = gdn->ring != NULL && request.num_tokens == 1 &&
                               request.written == 0 && gdn_checkpoint_slot(gdn, &request, 1) < 0;
            for (int32_t h = 0; h < loop->together; h++) {
                (stays ? run_ring_step : run_rule)(gdn, &request, head + h, &scratch);
            }
            continue;
        }
        for (int32_t h = 0; h < loop->together; h++) {
            run_steps(gdn, &request, head + h, h == 0, &scratch);
        }
    }
    store_pending(gdn, &scratch);
    leave_variant(variant);
}

/* Runs after the delta rule, since several value heads read one window. Items are (request,
 * channel). */
static void roll_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    int64_t channels = loop->gdn.num_channels;
    struct gdn_request request;
    while (begin < end) {
        int64_t index = begin / channels, channel = begin % channels;
        int64_t count = end - begin < channels - channel ? end - begin : channels - channel;
        if (gdn_request_of(&loop->gdn, (int32_t)index, &request) && request.state_from >= 0) {
            gdn_roll_windows(&loop->gdn, &request, channel, channel + count);
        }
        begin += count;
    }
}

static void norm_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    gdn_each_norm(&((const struct gdn_loop *)argument)->gdn, begin, end, gdn_norm_heads);
}

attn_status simd_recurrent(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gdn_scratch scratch;
    struct gdn_loop loop = {
        .gdn = gdn_of(args), .taps = args->scratch, .is_plain = gdn_is_plain(args->layer)};
    loop.is_plain = loop.is_plain && loop.gdn.ring == NULL;
    attn_status status = gdn_check_slots(&loop.gdn, error); /* read when the step runs */
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_recurrent_desc *desc = loop.gdn.desc;
    const struct attn_host *host = args->instance->host;
    int64_t requests = args->batch->num_reqs;
    /* where a prompt is cut must not show, and chunks begin where a step does */
    const bool token_by_token = args->layer->batch_invariant >= 2;
    loop.in_chunks = !loop.gdn.rule->gate_per_channel && !token_by_token;
    loop.scratch = (char *)args->scratch + taps_bytes(desc);
    loop.scratch_bytes = scratch_place(desc, NULL, &scratch);
    /* together only where that leaves something to do for everybody */
    loop.together = requests * desc->num_k_heads >= host->num_threads ? most_together(desc) : 1;
    if (desc->conv_width > 0) {
        run_parallel(args->instance, 2 * (int64_t)desc->num_k_heads + desc->num_v_heads, 8,
                     taps_items, &loop);
    }
    run_parallel(args->instance, requests * (desc->num_v_heads / loop.together), 1, delta_items,
                 &loop);
    if (desc->conv_width > 1) {
        run_parallel(args->instance, requests * loop.gdn.num_channels, 256, roll_items, &loop);
    }
    if (loop.gdn.norm != NULL) {
        run_parallel(args->instance, requests * (desc->num_v_heads / gdn_norm_size(&loop.gdn)), 1,
                     norm_items, &loop);
    }
    return ATTN_OK;
}
