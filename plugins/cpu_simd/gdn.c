/* SPDX-License-Identifier: Apache-2.0 */
/* gated_delta: S <- e^g S; r = beta (v - S k); S <- S + r k^T; o = S q. A token at a time on the
 * state's own memory, or in chunks through the float32 gemm on its transpose. Per chunk of C tokens
 * and head, Dk = Dv = D: 6 C D^2 + 6 C^2 D FLOPs for 2 D^2 floats of state per request. */
#include "gdn.h"

/* Value heads over one key head that an item takes together: q, k and their products are the same.
 */
#define GDN_TOGETHER 4

struct gdn_loop {
    struct gdn gdn;
    float *taps;
    char *scratch; /* of worker 0 */
    size_t scratch_bytes;
    int32_t together; /* value heads of an item */
};

static int32_t most_together(const struct attn_recurrent_desc *desc)
{
    int32_t group = desc->num_v_heads / desc->num_k_heads, count = at_most(group, GDN_TOGETHER);
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
    size_t taps = (size_t)at_least(1, desc->conv_width);
#define PLACE(field, floats)                                                                       \
    (s->field = memory != NULL ? (float *)(memory + at) : NULL,                                    \
     at += ((floats) * sizeof(float) + 63) / 64 * 64 + 64)
    s->depth = (int32_t)depth;
    s->width = (int32_t)width;
    PLACE(q, GDN_CHUNK * depth);
    PLACE(k, GDN_CHUNK * depth);
    PLACE(v, GDN_CHUNK * width);
    PLACE(o, GDN_CHUNK * width);
    PLACE(kt, depth * TILE_KEYS);
    PLACE(kk, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(qk, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(by_r, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(by_q, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(d, (size_t)GDN_CHUNK * GDN_CHUNK);
    PLACE(states, (size_t)most_together(desc) * depth * width);
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

static float *state_of(const struct gdn *gdn, int64_t slot, int32_t head)
{
    return view_row(gdn->args->k_cache, slot, 0, head);
}

static int32_t key_head_of(const struct attn_recurrent_desc *desc, int32_t head)
{
    return head / (desc->num_v_heads / desc->num_k_heads);
}

static void store_out(const struct gdn *gdn, const struct gdn_request *request, int64_t t,
                      int32_t head, const float *o)
{
    const struct attn_tensor *out = gdn->args->out;
    gdn_variant(gdn)->store[element_of_any(out)](tensor_row(out, request->first_row + t, head), o,
                                                 1.0f, gdn->desc->head_size_v);
}

/* The recurrence, token by token. A state that is not kept lives in the scratch. */
static void run_steps(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                      bool new_keys, struct gdn_scratch *s)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    struct delta_args step = {.rows = desc->head_size_v, .depth = desc->head_size_k};
    size_t bytes = (size_t)desc->head_size_v * (size_t)desc->head_size_k * sizeof(float);
    step.from = s->states;
    if (request->has_state) {
        step.from = state_of(gdn, request->slots[request->from], head);
    } else {
        memset(s->states, 0, bytes);
    }
    for (int64_t t = 0; t < request->num_tokens; t++) {
        int32_t i = (int32_t)(t % GDN_CHUNK);
        if (i == 0) {
            int64_t left = request->num_tokens - t;
            int32_t count = left < GDN_CHUNK ? (int32_t)left : GDN_CHUNK;
            if (new_keys || request->num_tokens > GDN_CHUNK) {
                gdn_load_qk(gdn, request, t, count, key_head_of(desc, head), s);
            }
            gdn_load_v(gdn, request, t, count, head, s);
            gdn_load_gates(gdn, request, t, count, head, s);
        }
        int32_t slot = request->keeps_all ? request->slots[t] : request->slots[0];
        step.to = slot >= 0 ? state_of(gdn, slot, head) : s->states;
        step.q = s->q + (int64_t)i * s->depth;
        step.k = s->k + (int64_t)i * s->depth;
        step.v = s->v + (int64_t)i * s->width;
        step.out = s->o;
        step.decay = s->decay[i];
        step.beta = s->beta[i];
        step.kq = gdn_variant(gdn)->delta->dot(step.k, step.q, s->depth);
        gdn_variant(gdn)->delta->step(&step);
        store_out(gdn, request, t, head, s->o);
        step.from = step.to;
    }
}

static void load_state(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                       const struct gdn_scratch *s, float *to)
{
    int32_t dk = gdn->desc->head_size_k;
    memset(to, 0, (size_t)s->depth * (size_t)s->width * sizeof(float));
    if (!request->has_state) {
        return;
    }
    const float *state = state_of(gdn, request->slots[request->from], head);
    for (int32_t d = 0; d < gdn->desc->head_size_v; d++) {
        for (int32_t i = 0; i < dk; i++) {
            to[(int64_t)i * s->width + d] = state[(int64_t)d * dk + i];
        }
    }
}

static void store_state(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                        const struct gdn_scratch *s, const float *from)
{
    int32_t dk = gdn->desc->head_size_k;
    float *state = state_of(gdn, request->slots[0], head);
    for (int32_t d = 0; d < gdn->desc->head_size_v; d++) {
        for (int32_t i = 0; i < dk; i++) {
            state[(int64_t)d * dk + i] = from[(int64_t)i * s->width + d];
        }
    }
}

/* What is above the diagonal is not computed but for whole blocks of this many tokens. */
#define TRIANGLE_ROWS 30

/* One chunk of C tokens. With D[t][j] the decay from behind token j to token t, E[t] that from the
 * chunk's beginning, and S its first state:
 *     r_t = beta_t (v_t - E[t] S k_t - sum_{j<t} D[t][j] (k_j k_t) r_j)
 *     o_t = E[t] S q_t + sum_{j<=t} D[t][j] (k_j q_t) r_j
 *     S  <- E[C-1] S + sum_j D[C-1][j] r_j k_j^T
 * The sums over j < t are a unit lower triangular system, solved forwards: the WY form. Decays are
 * products, not differences of sums, so that a decay of 0 stays one. */
static void load_keys(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                      int32_t count, int32_t key_head, struct gdn_scratch *s)
{
    const struct engine *engine = gdn_variant(gdn)->f32;
    gdn_load_qk(gdn, request, first, count, key_head, s);
    const void *keys[GDN_CHUNK];
    for (int32_t t = 0; t < count; t++) {
        keys[t] = s->k + (int64_t)t * s->depth;
    }
    engine->pack_keys(s->kt, keys, count, round_up(count, COLUMN_MULTIPLE), s->depth);
    for (int32_t t = 0; t < count; t += TRIANGLE_ROWS) {
        int32_t rows = at_most(TRIANGLE_ROWS, count - t);
        int32_t columns = round_up(t + rows, COLUMN_MULTIPLE);
        engine->gemm(s->kk + (int64_t)t * GDN_CHUNK, GDN_CHUNK, s->k + (int64_t)t * s->depth,
                     s->depth, s->kt, TILE_KEYS, rows, columns, s->depth, 0);
        engine->gemm(s->qk + (int64_t)t * GDN_CHUNK, GDN_CHUNK, s->q + (int64_t)t * s->depth,
                     s->depth, s->kt, TILE_KEYS, rows, columns, s->depth, 0);
    }
}

/* Row t of D, from the row before it, and the products with what k and q give. */
static void decay_row(float *restrict d, int32_t t, float decay, float minus_beta,
                      const float *restrict kk, const float *restrict qk, float *restrict by_r,
                      float *restrict by_q)
{
    for (int32_t j = 0; j < t; j++) {
        float by = d[j - GDN_CHUNK] * decay;
        d[j] = by;
        by_r[j] = minus_beta * by * kk[j];
        by_q[j] = by * qk[j];
    }
    d[t] = 1.0f;
    by_q[t] = qk[t];
    memset(by_q + t + 1, 0, (size_t)(GDN_CHUNK - 1 - t) * sizeof(float));
}

static void load_values(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                        int32_t count, int32_t head, struct gdn_scratch *s)
{
    gdn_load_v(gdn, request, first, count, head, s);
    gdn_load_gates(gdn, request, first, count, head, s);
    for (int32_t t = 0; t < count; t++) {
        int64_t row = (int64_t)t * GDN_CHUNK;
        decay_row(s->d + row, t, s->decay[t], -s->beta[t], s->kk + row, s->qk + row, s->by_r + row,
                  s->by_q + row);
        s->e[t] = t > 0 ? s->e[t - 1] * s->decay[t] : s->decay[t];
    }
}

#define SOLVE_ROWS 6 /* of the triangular system, taken through one gemm from what is solved */

/* v becomes r. */
static void solve_chunk(const struct gdn *gdn, int32_t count, const float *state,
                        struct gdn_scratch *s)
{
    const struct variant *variant = gdn_variant(gdn);
    int32_t width = s->width;
    variant->f32->gemm(s->o, width, s->k, s->depth, state, width, count, width, s->depth, 0);
    for (int32_t t = 0; t < count; t++) {
        float *r = s->v + (int64_t)t * width;
        variant->add_scaled(r, s->o + (int64_t)t * width, -s->e[t], width);
        variant->scale_row(r, s->beta[t], width);
    }
    for (int32_t first = 0; first < count; first += SOLVE_ROWS) {
        int32_t rows = at_most(SOLVE_ROWS, count - first);
        if (first > 0) {
            variant->f32->gemm(s->v + (int64_t)first * width, width,
                               s->by_r + (int64_t)first * GDN_CHUNK, GDN_CHUNK, s->v, width, rows,
                               width, first, 1);
        }
        for (int32_t t = first; t < first + rows; t++) {
            for (int32_t j = first; j < t; j++) {
                variant->add_scaled(s->v + (int64_t)t * width, s->v + (int64_t)j * width,
                                    s->by_r[(int64_t)t * GDN_CHUNK + j], width);
            }
        }
    }
}

static void write_chunk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                        int32_t count, int32_t head, float *state, struct gdn_scratch *s)
{
    const struct variant *variant = gdn_variant(gdn);
    int32_t width = s->width, last = count - 1;
    variant->f32->gemm(s->o, width, s->q, s->depth, state, width, count, width, s->depth, 0);
    for (int32_t t = 0; t < count; t++) {
        variant->scale_row(s->o + (int64_t)t * width, s->e[t], width);
    }
    for (int32_t t = 0; t < count; t += TRIANGLE_ROWS) {
        int32_t rows = at_most(TRIANGLE_ROWS, count - t);
        variant->f32->gemm(s->o + (int64_t)t * width, width, s->by_q + (int64_t)t * GDN_CHUNK,
                           GDN_CHUNK, s->v, width, rows, width, t + rows, 1);
    }
    for (int32_t t = 0; t < count; t++) {
        store_out(gdn, request, first + t, head, s->o + (int64_t)t * width);
    }
    for (int32_t t = 0; t < last; t++) { /* r as it is left at the chunk's end */
        variant->scale_row(s->v + (int64_t)t * width, s->d[(int64_t)last * GDN_CHUNK + t], width);
    }
    for (int32_t i = 0; i < s->depth; i++) {
        variant->scale_row(state + (int64_t)i * width, s->e[last], width);
    }
    variant->f32->gemm(state, width, s->kt, TILE_KEYS, s->v, width, s->depth, width, count, 1);
}

static void run_chunks(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                       int32_t num_heads, struct gdn_scratch *s)
{
    int64_t state_floats = (int64_t)s->depth * s->width;
    int32_t size = gdn->desc->chunk_size;
    size = size > 0 && size < GDN_CHUNK ? size : GDN_CHUNK;
    for (int32_t h = 0; h < num_heads; h++) {
        load_state(gdn, request, head + h, s, s->states + h * state_floats);
    }
    for (int64_t first = 0; first < request->num_tokens; first += size) {
        int64_t left = request->num_tokens - first;
        int32_t count = left < size ? (int32_t)left : size;
        load_keys(gdn, request, first, count, key_head_of(gdn->desc, head), s);
        for (int32_t h = 0; h < num_heads; h++) {
            float *state = s->states + h * state_floats;
            load_values(gdn, request, first, count, head + h, s);
            solve_chunk(gdn, count, state, s);
            write_chunk(gdn, request, first, count, head + h, state, s);
        }
    }
    for (int32_t h = 0; h < num_heads; h++) {
        store_state(gdn, request, head + h, s, s->states + h * state_floats);
    }
}

/* Items are heads of the mixed row. */
static void taps_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    (void)worker;
    for (int64_t item = begin; item < end; item++) {
        gdn_load_taps(&loop->gdn, (int32_t)item, loop->taps);
    }
}

/* Items are (request, `together` value heads). */
static void delta_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    const struct gdn *gdn = &loop->gdn;
    int32_t parts = gdn->desc->num_v_heads / loop->together;
    struct gdn_request request;
    struct gdn_scratch scratch;
    scratch_place(gdn->desc, loop->scratch + (size_t)worker * loop->scratch_bytes, &scratch);
    scratch.taps = loop->taps;
    for (int64_t item = begin; item < end; item++) {
        int32_t head = (int32_t)(item % parts) * loop->together;
        if (!gdn_request_of(gdn, (int32_t)(item / parts), &request) ||
            request.slots[request.from] < 0) {
            continue;
        }
        if (!request.keeps_all && request.num_tokens > 1) {
            run_chunks(gdn, &request, head, loop->together, &scratch);
            continue;
        }
        for (int32_t h = 0; h < loop->together; h++) {
            run_steps(gdn, &request, head + h, h == 0, &scratch);
        }
    }
}

/* Behind the delta rule, since several value heads read one window. Items are (request, channel).
 */
static void roll_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn_loop *loop = argument;
    int64_t channels = loop->gdn.num_channels;
    struct gdn_request request;
    (void)worker;
    while (begin < end) {
        int64_t index = begin / channels, channel = begin % channels;
        int64_t count = end - begin < channels - channel ? end - begin : channels - channel;
        if (gdn_request_of(&loop->gdn, (int32_t)index, &request) &&
            request.slots[request.from] >= 0) {
            gdn_roll_window(&loop->gdn, &request, channel, channel + count);
        }
        begin += count;
    }
}

attn_status simd_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    attn_status status = check_gated_delta(args, error);
    if (status != ATTN_OK) {
        return status;
    }
    if (args->workspace == NULL) {
        return fail(error, ATTN_ERROR_ORDER, "workspace",
                    "NULL: gated_delta needs the memory that plan_size asks for");
    }
    struct gdn_scratch scratch;
    struct gdn_loop loop = {.gdn = gdn_of(args), .taps = args->workspace};
    const struct attn_recurrent_desc *desc = loop.gdn.desc;
    const struct attn_host *host = args->instance->host;
    int64_t requests = args->batch->num_reqs;
    loop.scratch = (char *)args->workspace + taps_bytes(desc);
    loop.scratch_bytes = scratch_place(desc, NULL, &scratch);
    /* together only where that leaves something to do for everybody */
    loop.together = requests * desc->num_k_heads >= host->num_threads ? most_together(desc) : 1;
    if (desc->conv_width > 0) {
        host->parallel_for(host->user, 2 * (int64_t)desc->num_k_heads + desc->num_v_heads, 8,
                           taps_items, &loop);
    }
    host->parallel_for(host->user, requests * (desc->num_v_heads / loop.together), 1, delta_items,
                       &loop);
    if (desc->conv_width > 1) {
        host->parallel_for(host->user, requests * loop.gdn.num_channels, 256, roll_items, &loop);
    }
    return ATTN_OK;
}
