/* SPDX-License-Identifier: Apache-2.0 */
/* GDN layers through the public table: states by slot over several steps, drafts, one backend or
 * one a phase, against the recurrence in float64; refused batches, runs and weights. */
#include <attn/draft/recurrent.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opened.h"
#include "support/layer.h"
#include "support/oracle.h"
#include "support/random.h"
#include "support/tensor.h"

enum {
    HK = 2,
    HV = 4,
    DK = 16,
    DV = 24,
    WIDTH = 4,
    REQS = 5,
    LENGTH = 120,
    SLOTS = 64,
    DRAFTS = 2,
    KEPT = 2
};
enum { REPLAY = 5, RING = REPLAY + 2 * DRAFTS, RING_ROW = DK + HV / HK * DV + 8 };
enum { KEYS = HK * DK, CHANNELS = 2 * KEYS + HV * DV, WINDOW = WIDTH - 1 + DRAFTS };

struct gdn {
    OPENED;
    int32_t width, drafted, interval, invariant;
    bool moves; /* each step leaves its states in other slots, and checkpoints */
    bool turned;
    bool trusted; /* the core does not look at what a step reads */
    bool replays; /* with a ring of inputs, from which the state is written once in REPLAY tokens */
    bool paged;   /* a window lies after its state, in memory of this fixture's */
    bool norms;   /* the layer has a norm and a gate of its output */
    bool bounds;  /* the host's lengths are bounds: of each request one token more */
    void *memory;
    struct attn_layer_desc described;
    struct attn_recurrent_desc desc;
    float conv[CHANNELS][WIDTH], a_log[HV], dt_bias[HV], scales[DV];
    float mixed[REQS][LENGTH][CHANNELS], gates[REQS][LENGTH][2][HV];
    double state[REQS][HV][DV][DK];
    float states[SLOTS][HV][DV][DK], windows[SLOTS][CHANNELS][WINDOW];
    float ring[SLOTS][RING][HK][RING_ROW];
    int32_t ring_tokens[REQS];
    struct attn_cache_desc cache;
    struct attn_layer_caches caches;
    struct attn_batch_replay replay;
    struct attn_recurrent_norm norm;
    struct attn_io_recurrent_gate gate;
    const int32_t *initial, *checkpoint; /* slots of each request in the next steps, or NULL */
    int32_t length[REQS], starts[REQS + 1], lens[REQS], slots[REQS][1 + DRAFTS], accepted[REQS];
    int32_t from[REQS][1 + DRAFTS], kept[REQS][KEPT], most_starts[REQS + 1], most_lens[REQS];
    float rows[REQS * LENGTH][CHANNELS], a[REQS * LENGTH][HV], b[REQS * LENGTH][HV],
        out[REQS * LENGTH][HV][DV], z[REQS * LENGTH][HV][DV];
    struct shaped tensors[9];
    struct attn_batch batch;
    struct attn_batch_recurrent ext;
    struct attn_io_recurrent io_ext;
    struct attn_step_io io;
};

static const struct attn_tensor *tensor(struct gdn *g, int32_t which, void *data, int32_t ndim,
                                        int64_t a, int64_t b, int64_t c, int64_t sa, int64_t sb)
{
    const int64_t strides[] = {ndim > 1 ? sa : 1, ndim > 2 ? sb : 1, 1};
    return shaped_set(&g->tensors[which], data, ATTN_DTYPE_F32, ndim, (int64_t[]){a, b, c},
                      strides);
}

static void describe(struct gdn *g)
{
    g->desc = (struct attn_recurrent_desc){.num_k_heads = HK,
                                           .num_v_heads = HV,
                                           .head_size_k = DK,
                                           .head_size_v = DV,
                                           .conv_width = g->width,
                                           .conv_silu = g->width > 0,
                                           .qk_l2norm = 1,
                                           .num_speculative_tokens = g->drafted,
                                           .has_initial_slots = g->interval > 0,
                                           .checkpoint_interval = g->interval};
    g->described = SIZED(attn_layer_desc, .name = "gdn", .dtype = ATTN_DTYPE_F32, .window_left = -1,
                         .window_right = -1, .batch_invariant = g->invariant,
                         .num_speculative_tokens = g->drafted, .host_bounds = g->bounds);
    g->cache = layer_ring(&g->desc, ATTN_DTYPE_F32, HV, REPLAY);
    g->caches = layer_caches(&g->cache, 1, NULL);
    g->norm = EXTENSION(attn_recurrent_norm, ATTN_EXT_DRAFT_RECURRENT_NORM, NULL, .epsilon = 1e-5f);
    g->desc.ext.next = g->replays ? &g->caches.ext : g->norms ? &g->norm.ext : NULL;
    layer_set_recurrent(&g->described, &g->desc);
}

static void bind(struct gdn *g, const char *backend)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    OPEN_LAYER(g, backend, &g->described);
    attn_layer *layer = g->layer;
    CHECK(g, g->api->layer_cache_spec(layer, 0, &spec, &g->error));
    int64_t window = g->width > 0 ? g->width - 1 + g->drafted : 0;
    assert_int_equal(spec.kind, ATTN_KV_SPEC_STATE);
    assert_int_equal(spec.page_bytes, 4 * (HV * DV * DK + CHANNELS * window));
    struct attn_kv_view state = client_view(g->states, SLOTS, 1, HV, DV * DK, 4);
    struct attn_kv_view inputs = client_view(g->windows, SLOTS, 1, CHANNELS, WINDOW, 4);
    state.stride_slot -= 4; /* no matter: a slot has one row */
    inputs.head_size = (int32_t)window;
    memset(g->states, 0xff, sizeof g->states);
    memset(g->windows, 0xff, sizeof g->windows);
    const struct attn_kv_view *second = g->width > 0 ? &inputs : NULL;
    struct attn_kv_view apart = state, close = state; /* gaps between heads, and none for a slot */
    apart.stride_head += 4;
    apart.stride_block *= 2;
    close.stride_block -= 4;
    if (!g->replays) {
        INVALID(&g->error, "stride_head", client_bind(g->api, layer, &apart, second, &g->error));
        INVALID(&g->error, "stride_slot", client_bind(g->api, layer, &close, second, &g->error));
    }
    if (g->paged) {
        const size_t bytes = ((size_t)spec.padded_page_bytes * SLOTS + 255) / 256 * 256;
        const struct attn_cache_memory pages = SIZED(
            attn_cache_memory, .base = g->memory = aligned_alloc(256, bytes), .num_blocks = SLOTS);
        memset(g->memory, 0xff, bytes);
        CHECK(g, g->api->layer_bind_memory(layer, &pages, &g->error));
    } else if (g->replays) {
        struct attn_kv_view ring = layer_ring_view(&g->cache, SLOTS);
        const struct attn_kv_view *views[] = {&state, &inputs, &ring};
        assert_int_equal(sizeof g->ring[0], ring.stride_block);
        ring.data = memset(g->ring, 0xff, sizeof g->ring);
        ring.stride_head += 2; /* float32 gates at odd places */
        ring.stride_slot += 2 * HK;
        ring.stride_block += 2 * HK * RING;
        INVALID(&g->error, "data", g->api->layer_bind_caches(layer, views, 3, &g->error));
        ring = layer_ring_view(&g->cache, SLOTS);
        ring.data = g->ring;
        CHECK(g, g->api->layer_bind_caches(layer, views, 3, &g->error));
    } else {
        CHECK(g, client_bind(g->api, layer, &state, second, &g->error));
    }
    const struct attn_recurrent_norm_weight scales =
        EXTENSION(attn_recurrent_norm_weight, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT, NULL,
                  .weight = tensor(g, 1, g->scales, 1, DV, 0, 0, 1, 0));
    struct attn_recurrent_weights weights =
        EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, g->norms ? &scales.ext : NULL,
                  .a_log = g->a_log, .dt_bias = g->dt_bias);
    struct attn_layer_params params = SIZED(attn_layer_params, .next = &weights.ext);
    if (g->width > 0) {
        weights.conv_weight = tensor(g, 0, g->conv, 2, CHANNELS, WIDTH, 0, WIDTH, 1);
    }
    CHECK(g, g->api->layer_bind_params(layer, &params, &g->error));
    OPEN_PLAN(g, REQS, REQS * LENGTH, LENGTH);
}

static int32_t slot_number(int32_t i)
{
    return (i * 7 + 3) % SLOTS;
}

/* With the fields that are set in `given`. */
static struct gdn *gdn_open(const char *backend, const struct gdn *given)
{
    struct gdn *g = malloc(sizeof *g);
    uint64_t random = 5;
    *g = *given;
    random_floats(&random, &g->conv[0][0], CHANNELS * WIDTH, 1);
    random_floats(&random, g->a_log, HV, 1);
    random_floats(&random, g->dt_bias, HV, 1);
    random_floats(&random, &g->mixed[0][0][0], REQS * LENGTH * CHANNELS, 2);
    random_floats(&random, &g->gates[0][0][0][0], REQS * LENGTH * 2 * HV, 2);
    for (int32_t i = 0; i < REQS * (1 + DRAFTS); i++) {
        g->slots[i / (1 + DRAFTS)][i % (1 + DRAFTS)] = slot_number(i);
    }
    OPEN_RUNTIME(g, !g->trusted);
    describe(g);
    bind(g, backend);
    return g;
}

static struct gdn *gdn_create(const char *backend, int32_t width, int32_t drafted)
{
    static struct gdn given;
    given.width = width;
    given.drafted = drafted;
    return gdn_open(backend, &given);
}

static void gdn_end(struct gdn **g)
{
    free((*g)->memory);
    CLOSE(*g);
}

static void set_step(struct gdn *g, const int32_t *queries, bool by_length)
{
    static uint8_t started[REQS];
    g->starts[0] = 0;
    for (int32_t r = 0; r < REQS; r++) {
        g->starts[r + 1] = g->starts[r] + queries[r];
        g->lens[r] = g->length[r] + queries[r];
        started[r] = g->length[r] > 0;
        for (int32_t i = 0; i < queries[r]; i++) {
            int32_t row = g->starts[r] + i, t = g->length[r] + i;
            memcpy(g->rows[row], g->mixed[r][t], sizeof g->rows[row]);
            memcpy(g->a[row], g->gates[r][t][0], sizeof g->a[row]);
            memcpy(g->b[row], g->gates[r][t][1], sizeof g->b[row]);
        }
    }
    int64_t tokens = g->starts[REQS];
    g->ext =
        EXTENSION(attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT, NULL, .state_slots = g->slots[0],
                  .state_slots_stride = 1 + DRAFTS, .has_initial_state = by_length ? NULL : started,
                  .num_accepted_tokens = g->drafted > 0 ? g->accepted : NULL,
                  .initial_slots = g->initial, .checkpoint_slots = g->checkpoint,
                  .checkpoint_slots_stride = g->checkpoint != NULL ? 1 : 0);
    if (g->moves) {
        const int32_t states = REQS * (1 + DRAFTS);
        memcpy(g->from, g->slots, sizeof g->from);
        g->turned = !g->turned;
        for (int32_t r = 0; r < REQS; r++) {
            for (int32_t i = 0; i <= DRAFTS; i++) {
                g->slots[r][i] = slot_number(r * (1 + DRAFTS) + i + (g->turned ? states : 0));
            }
            for (int32_t i = 0; i < KEPT; i++) {
                g->kept[r][i] = slot_number(r * KEPT + i + 2 * states);
            }
        }
        g->ext.initial_slots = g->from[0];
        g->ext.initial_slots_stride = 1 + DRAFTS;
        g->ext.checkpoint_slots = g->kept[0];
        g->ext.checkpoint_slots_stride = KEPT;
    }
    for (int32_t r = 0; r < REQS && g->replays; r++) { /* one slot each, and no more is read */
        for (int32_t i = 1; i <= DRAFTS; i++) {
            g->slots[r][i] = g->from[r][i] = SLOTS;
        }
    }
    g->batch = client_batch(REQS, g->starts, g->lens);
    g->batch.next = &g->ext.ext;
    for (int32_t r = 0; r < REQS && g->bounds; r++) {
        g->most_starts[r + 1] = g->starts[r + 1] + r + 1;
        g->most_lens[r] = g->lens[r] + 1;
    }
    if (g->bounds) {
        tokens = g->most_starts[REQS];
        g->batch.flags = ATTN_BATCH_HOST_BOUNDS;
        g->batch.num_tokens = g->batch.num_actual_tokens = (int32_t)tokens;
        g->batch.query_start_loc_host = g->most_starts;
        g->batch.seq_lens_host = g->most_lens;
    }
    g->replay = EXTENSION(attn_batch_replay, ATTN_EXT_DRAFT_BATCH_REPLAY, NULL,
                          .ring_tokens = g->ring_tokens);
    g->ext.ext.next = g->replays ? &g->replay.ext : NULL;
    g->gate = EXTENSION(attn_io_recurrent_gate, ATTN_EXT_DRAFT_IO_RECURRENT_GATE, NULL,
                        .gate = tensor(g, 8, g->z, 3, tokens, HV, DV, HV * DV, DV));
    g->io_ext =
        EXTENSION(attn_io_recurrent, ATTN_EXT_IO_RECURRENT, g->norms ? &g->gate.ext : NULL, );
    g->io = SIZED(attn_step_io, .next = &g->io_ext.ext);
    if (g->width > 0) {
        g->io_ext.mixed_qkv = tensor(g, 1, g->rows, 2, tokens, CHANNELS, 0, CHANNELS, 1);
    } else {
        g->io.q = tensor(g, 2, g->rows, 3, tokens, HK, DK, CHANNELS, DK);
        g->io.k = tensor(g, 3, &g->rows[0][KEYS], 3, tokens, HK, DK, CHANNELS, DK);
        g->io.v = tensor(g, 4, &g->rows[0][2 * KEYS], 3, tokens, HV, DV, CHANNELS, DV);
    }
    g->io_ext.a = tensor(g, 5, g->a, 2, tokens, HV, 0, HV, 1);
    g->io_ext.b = tensor(g, 6, g->b, 2, tokens, HV, 0, HV, 1);
    g->io.out = tensor(g, 7, g->out, 3, tokens, HV, DV, HV * DV, DV);
    memset(g->out, 0xff, sizeof g->out);
}

/* One step; of each request `kept` tokens are accepted (0: all). */
static void step(struct gdn *g, const int32_t *queries, const int32_t *kept, bool by_length)
{
    const struct oracle_recurrent rule = {ATTN_DTYPE_F32,
                                          HK,
                                          HV,
                                          DK,
                                          DV,
                                          g->width,
                                          g->conv,
                                          g->a_log,
                                          g->dt_bias,
                                          .rule = {.num_gates = 1},
                                          .scale = 1 / sqrt(DK),
                                          .unit_norm = true};
    double largest = 0;
    set_step(g, queries, by_length);
    PLAN(g);
    RUN(g);
    for (int32_t r = 0; r < REQS; r++) {
        int32_t accepted = kept != NULL && kept[r] > 0 ? kept[r] : queries[r];
        bool skipped = g->slots[r][0] < 0;
        double ahead[HV][DV][DK], o[HV * DV];
        memcpy(ahead, g->state[r], sizeof ahead);
        for (int32_t i = 0; i < queries[r]; i++) {
            const float *out = g->out[g->starts[r] + i][0];
            if (!skipped) {
                oracle_recurrent(&rule, g->mixed[r], g->gates[r], g->length[r] + i, ahead[0][0], o);
            }
            for (int32_t e = 0; e < HV * DV; e++) { /* where skipped, left as it was */
                double error = skipped ? (isnan(out[e]) ? 0 : INFINITY) : fabs(out[e] - o[e]);
                largest = error <= largest ? largest : isnan(error) ? INFINITY : error;
            }
            const int32_t done = g->length[r] + i + 1;
            if (g->moves && done % g->interval == 0) {
                const int32_t slot =
                    g->kept[r][done / g->interval - g->length[r] / g->interval - 1];
                const float *state = (const float *)g->states[slot];
                for (int32_t e = 0; e < HV * DV * DK; e++) {
                    assert_float_equal(state[e], ((const double *)ahead)[e], 5e-6);
                }
            }
            if (!skipped && i + 1 == accepted) {
                memcpy(g->state[r], ahead, sizeof ahead);
            }
        }
        const bool writes = g->length[r] == 0 || g->moves || g->ring_tokens[r] >= REPLAY - 1;
        g->ring_tokens[r] = queries[r] > 1 + g->drafted ? 0
                            : writes                    ? accepted - 1
                                                        : g->ring_tokens[r] + accepted;
        g->length[r] += skipped ? 0 : accepted;
        g->accepted[r] =
            g->drafted > 0 && queries[r] <= 1 + g->drafted && queries[r] > 0 ? accepted : 1;
    }
    print_message("largest error %.2g\n", largest);
    assert_true(largest < 5e-6);
}

TEST(test_steps)
{
    for (int32_t paged = 0; paged < 2; paged++) {
        static struct gdn given = {.width = WIDTH}; /* too large for the stack */
        given.paged = paged;
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &given);
        step(g, (const int32_t[]){1, 1, 70, 5, 2}, NULL, false);
        g->slots[1][0] = -1; /* padded */
        step(g, (const int32_t[]){1, 3, 1, 30, 0}, NULL, true);
        g->slots[1][0] = 10;
        step(g, (const int32_t[]){1, 0, 1, 1, 64}, NULL, false);
    }
}

/* Steps with drafts of which some are accepted; request 2 begins with a prompt of `prompt` tokens.
 */
static struct gdn *drafted(struct gdn *g, int32_t prompt)
{
    for (int32_t r = 0; r < REQS; r++) {
        g->accepted[r] = 1;
    }
    step(g, (const int32_t[]){3, 3, prompt, 1, 9}, (const int32_t[]){2, 1, 0, 0, 0}, false);
    step(g, (const int32_t[]){3, 3, 3, 3, 3}, (const int32_t[]){3, 2, 1, 3, 1}, false);
    step(g, (const int32_t[]){1, 3, 2, 3, 3}, NULL, true);
    step(g, (const int32_t[]){1, 1, 1, 1, 1}, NULL, false);
    return g;
}

TEST(test_drafts)
{
    for (int32_t bounds = 0; bounds < 2; bounds++) {
        static struct gdn given = {.width = WIDTH, .drafted = DRAFTS};
        given.bounds = bounds;
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &given);
        drafted(g, 20);
    }
}

/* Next to checkpoints, each step's states going elsewhere than it took them from. */
TEST(test_drafts_that_move)
{
    static struct gdn given = {.width = WIDTH, .drafted = DRAFTS, .interval = 5, .moves = true};
    given.bounds = true;
    gdn_end(&(struct gdn *){drafted(gdn_open("cpu_ref", &given), 8)});
    given.bounds = false;
    OWNED(gdn_end) struct gdn *g = drafted(gdn_open("cpu_ref", &given), 8);
    g->ext.initial_slots_stride = DRAFTS;
    REFUSED(&g->error, "initial_slots_stride",
            g->api->plan_batch(g->plan, &g->batch, NULL, &g->error));
    g->ext.initial_slots_stride = 1 + DRAFTS;
    g->ext.has_initial_state = (const uint8_t[]){1, 1, 1, 1, 1};
    g->batch.seq_lens = g->batch.seq_lens_host = NULL;
    REFUSED(&g->error, "seq_lens", g->api->plan_batch(g->plan, &g->batch, NULL, &g->error));
}

TEST(test_rings)
{
    for (int32_t moves = 0; moves < 2; moves++) {
        static struct gdn given = {.width = WIDTH, .drafted = DRAFTS, .replays = true};
        given.interval = moves ? 5 : 0;
        given.moves = moves;
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &given);
        drafted(g, moves ? 8 : 20);
        for (int32_t i = 0; i < 8; i++) {
            step(g, (const int32_t[]){3, 3, 3, 1, 2},
                 (const int32_t[]){1 + i % 3, 1 + i / 2 % 3, 1, 1, 2 - i % 2}, true);
        }
        int32_t own[REQS], from[REQS];
        for (int32_t r = 0; r < REQS; r++) {
            own[r] = g->slots[r][0];
            from[r] = g->from[r][0];
        }
        g->ext.state_slots = own; /* a stride of 0 reads as 1 */
        g->ext.initial_slots = moves ? from : NULL;
        g->ext.state_slots_stride = g->ext.initial_slots_stride = 0;
        g->ring_tokens[3] = RING - DRAFTS;
        g->ext.has_initial_state = (const uint8_t[]){1, 1, 1, 0, 1}; /* its cursor does not count */
        PLAN(g);
        g->ext.has_initial_state = (const uint8_t[]){1, 1, 1, 1, 1};
        REFUSED(&g->error, "ring_tokens", g->api->plan_batch(g->plan, &g->batch, NULL, &g->error));
        g->ext.ext.next = NULL;
        REFUSED(&g->error, "attn_batch_replay",
                g->api->plan_batch(g->plan, &g->batch, NULL, &g->error));
    }
}

/* States that move to other slots, and one that is kept on the way. */
static struct gdn *move_states(const char *backend)
{
    static const struct gdn kept = {.width = WIDTH, .interval = 3};
    static int32_t from[REQS], checkpoints[REQS];
    const int32_t used = REQS * (1 + DRAFTS);
    struct gdn *g = gdn_open(backend, &kept);
    step(g, (const int32_t[]){1, 1, 7, 5, 2}, NULL, false);
    for (int32_t r = 0; r < REQS; r++) {
        from[r] = g->slots[r][0];
        g->slots[r][0] = slot_number(used + r);
        checkpoints[r] = r == 2 || r == 3 ? slot_number(used + REQS + r) : -1;
    }
    g->initial = from;
    g->checkpoint = checkpoints;
    step(g, (const int32_t[]){1, 1, 4, 3, 2}, NULL, false);
    return g;
}

/* The prefills' own part of each array that a batch brings. */
TEST(test_parts_of_every_array)
{
    OWNED(gdn_end)
    struct gdn *whole = move_states("cpu_ref"), *cut = move_states("decode=cpu_ref;prefill=opaque");
    const float *a = &whole->states[0][0][0][0], *b = &cut->states[0][0][0][0];
    for (int32_t i = 0; i < SLOTS * HV * DV * DK; i++) {
        assert_true(isnan(a[i]) ? isnan(b[i]) : fabsf(a[i] - b[i]) < 1e-4f);
    }
    for (int32_t replays = 0; replays < 2; replays++) {
        static struct gdn given = {.width = WIDTH, .drafted = DRAFTS};
        given.replays = replays;
        OWNED(gdn_end) struct gdn *part = gdn_open("decode=cpu_ref;prefill=opaque", &given);
        for (int32_t r = 0; r < REQS; r++) {
            part->accepted[r] = 1;
        }
        step(part, (const int32_t[]){3, 3, 20, 0, 9}, (const int32_t[]){2, 1, 0, 0, 0}, false);
        step(part, (const int32_t[]){3, 3, 3, 0, 2}, NULL, false);
        step(part, (const int32_t[]){3, 3, 9, 5, 3}, NULL, false); /* the last is no decode */
    }
}

/* Layers share a plan only where all that a batch brings is one for both. */
TEST(test_groups)
{
    OWNED(gdn_end) struct gdn *g = gdn_create("cpu_ref", WIDTH, 0);
    struct attn_recurrent_desc other = g->desc;
    struct attn_layer_desc second = g->described;
    const struct attn_layer_desc *layers[] = {&g->described, &second};
    struct attn_recurrent_rounding rounding =
        EXTENSION(attn_recurrent_rounding, ATTN_EXT_DRAFT_RECURRENT_ROUNDING, NULL, .seed = 1);
    second.name = "second";
    second.next = &other.ext;
    for (int32_t i = 0; i < 4; i++) {
        attn_model *model;
        other.qk_l2norm = i != 1; /* the first layer's is 1 */
        g->desc.state_dtype = other.state_dtype = i < 2 ? ATTN_DTYPE_F32 : ATTN_DTYPE_BF16;
        other.ext.next = i == 3 ? &rounding.ext : NULL;
        CHECK(g, client_model(g->api, g->runtime, CLIENT_ORDER("cpu_ref"), layers, 2, &model,
                              &g->error));
        assert_int_equal(g->api->model_num_groups(model, ATTN_GROUP_BLOCK_TABLE), 1 + i % 2);
        g->api->model_destroy(model);
    }
}

#define PLAN_REFUSED(field, change)                                                                \
    WITH(g->batch, ,                                                                               \
         WITH(g->ext, change,                                                                      \
              REFUSED(&g->error, field, g->api->plan_batch(g->plan, &g->batch, NULL, &g->error))))
#define RUN_REFUSED(field, change)                                                                 \
    WITH(g->io, ,                                                                                  \
         WITH(g->io_ext, change,                                                                   \
              REFUSED(&g->error, field, g->api->run(g->plan, g->layer, &g->io, &g->error))))

TEST(test_bad_steps)
{
    static const int32_t queries[] = {1, 1, 7, 5, 2};
    OWNED(gdn_end) struct gdn *g = gdn_create("cpu_ref", WIDTH, 0);
    set_step(g, queries, false);
    g->slots[2][0] = 4;
    PLAN_REFUSED("attn_batch_recurrent", g->batch.next = NULL);
    PLAN_REFUSED("state_slots", g->ext.state_slots = NULL);
    PLAN_REFUSED("state_slots", g->slots[2][0] = SLOTS);
    g->slots[2][0] = 4;
    PLAN_REFUSED("state_slots", g->ext.state_slots_stride = -1);
    const int32_t lens[] = {1, INT32_MIN, 7, 5, 2};
    PLAN_REFUSED("seq_lens", g->batch.seq_lens = g->batch.seq_lens_host = lens);
    PLAN_REFUSED("has_initial_state", (g->ext.has_initial_state = NULL, g->batch.seq_lens = NULL));
    PLAN(g);
    struct attn_tensor spread = *g->io_ext.mixed_qkv;
    spread.strides = (int64_t[]){2 * CHANNELS, 2};
    RUN_REFUSED("attn_io_recurrent", g->io.next = NULL);
    RUN_REFUSED("flags", g->io.flags = ATTN_RUN_NO_WRITE);
    RUN_REFUSED("flags", g->io.flags = ATTN_RUN_NO_ATTEND);
    RUN_REFUSED("mixed_qkv", g->io_ext.mixed_qkv = g->io_ext.a);
    RUN_REFUSED("b", g->io_ext.b = NULL);
    RUN_REFUSED("out", g->io.out = g->io_ext.mixed_qkv);
    RUN_REFUSED("mixed_qkv", g->io_ext.mixed_qkv = &spread);
    RUN_REFUSED("q", g->io.q = g->io.out);
    RUN_REFUSED("k", g->io.k = g->io.out);
    RUN_REFUSED("v", g->io.v = g->io.out);
    gdn_end(&g);
    g = gdn_create("cpu_ref", 0, 0);
    set_step(g, queries, false);
    PLAN(g);
    RUN_REFUSED("mixed_qkv", g->io_ext.mixed_qkv = g->io.q);
    gdn_end(&g);
    g = gdn_create("cpu_ref", WIDTH, DRAFTS);
    set_step(g, queries, false);
    PLAN_REFUSED("state_slots", g->ext.state_slots_stride = DRAFTS); /* drafts' states, and one */
    /* a state to go on from that lies nowhere */
    g->ext.has_initial_state = (const uint8_t[]){1, 1, 1, 1, 1};
    for (int32_t r = 0; r < REQS; r++) {
        g->accepted[r] = 2;
    }
    PLAN(g);
    PLAN_REFUSED("state_slots", g->slots[1][1] = -1);
}

/* Under validation each input is looked at for NaN, but for those of requests that are left alone
 * and of padding. */
TEST(test_nan_of_inputs)
{
    static const int32_t queries[] = {1, 3, 7, 0, 2};
    enum { LAST = 13, PADDED = 2 };
    static const struct {
        int32_t width;
        bool initial;   /* request 1 is left alone by the slot that it reads, not that it writes */
        int32_t length; /* its tokens before the step */
    } steps[] = {{WIDTH, false, 0}, {0, false, 0}, {WIDTH, true, 0}, {0, true, 3}};
    for (size_t n = 0; n < sizeof steps / sizeof *steps; n++) {
        static struct gdn given = {.norms = true};
        const int32_t width = given.width = steps[n].width;
        given.interval = steps[n].initial ? LENGTH : 0;
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &given);
        int32_t initial[REQS];
        const struct {
            const char *name, *says;
            float *row;
            int32_t last, size; /* the element, and elements of a row */
        } inputs[] = {
            {width > 0 ? "mixed_qkv" : "v", width > 0 ? "mixed_qkv[%d, 0, 159]" : "v[%d, 3, 23]",
             g->rows[0], CHANNELS - 1, CHANNELS},
            {width > 0 ? "mixed_qkv" : "q", width > 0 ? "mixed_qkv[%d, 0, 31]" : "q[%d, 1, 15]",
             g->rows[0], KEYS - 1, CHANNELS},
            {width > 0 ? "mixed_qkv" : "k", width > 0 ? "mixed_qkv[%d, 0, 32]" : "k[%d, 0, 0]",
             g->rows[0], KEYS, CHANNELS},
            {"a", "a[%d, 0, 3]", g->a[0], HV - 1, HV},
            {"b", "b[%d, 0, 3]", g->b[0], HV - 1, HV},
            {"gate", "gate[%d, 3, 23]", g->z[0][0], HV * DV - 1, HV * DV}};
        for (int32_t r = 0; r < REQS; r++) {
            initial[r] = g->slots[r][0];
        }
        *(steps[n].initial ? &initial[1] : &g->slots[1][0]) = -1;
        g->initial = steps[n].initial ? initial : NULL;
        g->length[1] = steps[n].length;
        set_step(g, queries, false);
        g->batch.num_tokens -= PADDED;
        g->batch.num_actual_tokens -= PADDED;
        g->batch.num_reqs -= 1;
        PLAN(g);
        for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
            for (int32_t t = 0; t < LAST; t++) {
                float *number = inputs[i].row + t * inputs[i].size + inputs[i].last, kept = *number;
                const bool reads = (t < 1 || t > 3) && t < LAST - PADDED;
                *number = NAN;
                attn_status status = g->api->run(g->plan, g->layer, &g->io, &g->error);
                assert_int_equal(status, reads ? ATTN_ERROR_NAN : ATTN_OK);
                if (reads) {
                    char says[64];
                    snprintf(says, sizeof says, inputs[i].says, t);
                    assert_string_equal(g->error.field, inputs[i].name);
                    assert_non_null(strstr(g->error.message, says));
                }
                *number = kept;
            }
        }
        assert_true(isfinite(g->out[0][0][0]) && isnan(g->out[1][0][0])); /* as set_step left it */
    }
}

/* A window in the layer's dtype rounds wider inputs, which a cut of a prompt must not show. */
TEST(test_inputs_of_windows)
{
    static const int32_t queries[] = {1, 1, 7, 5, 2};
    for (int32_t invariant = 1; invariant <= 2; invariant++) {
        static struct gdn given = {.width = WIDTH}; /* 2 MB: not on the stack */
        given.invariant = invariant;
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &given);
        set_step(g, queries, false);
        PLAN(g);
        struct attn_tensor other = *g->io_ext.mixed_qkv;
        other.dtype.bits = 16;
        other.data = g->z; /* zeros of any dtype */
        if (invariant == 2) {
            RUN_REFUSED("mixed_qkv", g->io_ext.mixed_qkv = &other);
        } else {
            WITH(g->io_ext, g->io_ext.mixed_qkv = &other, RUN(g));
        }
        RUN(g);
    }
}

/* Requests of a batch run at once: what one writes, no other reads or writes. */
TEST(test_aliases)
{
    static const int32_t queries[] = {1, 3, 3, 2, 1};
    static const struct gdn kept = {.width = WIDTH, .interval = 3};
    OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", &kept);
    int32_t from[REQS], checkpoints[REQS], own[REQS];
    const struct {
        const char *field, *says; /* NULL: allowed */
        int32_t *at, value;       /* value: slots[value][0], below 0 as it is */
        int32_t *also, second;
    } cases[] = {
        {NULL, NULL, &from[0], 0, &from[2], 2},
        {NULL, NULL, &from[0], -20, &from[2], -20}, /* two forks of one state */
        {"initial_slots", "request 1 writes it (state_slots), and request 2 reads", &from[2], 1,
         &from[1], 1},
        {"initial_slots", "request 0 reads it (initial_slots), and request 1 writes", &from[0], 1,
         &from[1], 1},
        {"state_slots", "request 0 writes it (state_slots), and request 4 writes", &g->slots[4][0],
         0, &from[0], -20},
        {"checkpoint_slots", "request 1 writes it (checkpoint_slots), and request 4 writes",
         &checkpoints[1], 4, &from[4], -20},
        {"checkpoint_slots", "request 1 writes it (state_slots), and request 1 writes",
         &checkpoints[1], 1, &from[1], -20},
        {"checkpoint_slots", "request 1 reads it (initial_slots), and request 1 writes",
         &checkpoints[1], -20, &from[1], -20},
        {"initial_slots", "request 1 writes it (checkpoint_slots), and request 2 reads",
         &checkpoints[1], -20, &from[2], -20},
        {NULL, NULL, &g->slots[4][0], -20, &checkpoints[4], 1}, /* no token of this step has it */
    };
    for (int32_t r = 0; r < REQS; r++) {
        g->length[r] = 1;
        own[r] = g->slots[r][0];
    }
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int32_t r = 0; r < REQS; r++) {
            g->slots[r][0] = from[r] = own[r];
            checkpoints[r] = -1;
        }
        set_step(g, queries, i % 2 == 0);
        g->ext.initial_slots = from;
        g->ext.checkpoint_slots = checkpoints;
        g->ext.checkpoint_slots_stride = 1;
        *cases[i].at = cases[i].value < 0 ? -cases[i].value : own[cases[i].value];
        *cases[i].also = cases[i].second < 0 ? -cases[i].second : own[cases[i].second];
        attn_status status = g->api->plan_batch(g->plan, &g->batch, NULL, &g->error);
        if ((status == ATTN_OK) != (cases[i].field == NULL) ||
            (cases[i].field != NULL && (strcmp(g->error.field, cases[i].field) != 0 ||
                                        strstr(g->error.message, cases[i].says) == NULL))) {
            fail_msg("case %zu: %d, %s: %s", i, status, g->error.field, g->error.message);
        }
    }
}

/* What changes nothing of a recurrence is refused by name. */
TEST(test_fields_of_batches)
{
    static const int32_t queries[] = {1, 3, 3, 2, 1}, starts[REQS + 1] = {0};
    static const uint8_t flags[REQS] = {0};
    static const uint32_t bits[4] = {0};
    OWNED(gdn_end) struct gdn *g = gdn_create("cpu_ref", WIDTH, 0);
    set_step(g, queries, false);
    PLAN_REFUSED("causal", g->batch.causal = ATTN_CAUSAL_NO);
    PLAN_REFUSED("causal_per_request", g->batch.causal_per_request = flags);
    PLAN_REFUSED("tree", g->batch.tree = bits);
    PLAN_REFUSED("logits_indices", g->batch.logits_indices = starts);
    PLAN_REFUSED("spans", g->batch.spans = g->batch.span_start_loc = starts);
    PLAN_REFUSED("key_start_loc", g->batch.key_start_loc = g->batch.key_start_loc_host = starts);
    g->batch.causal = ATTN_CAUSAL_YES;
    PLAN(g);
}

/* Slots that only the step sees, since the core trusts them: cpu_ref refuses each and writes
 * nothing. */
TEST(test_bad_slots)
{
    static const int32_t queries[] = {1, 3, 3, 2, 1};
    static const struct gdn drafts = {.width = WIDTH, .drafted = DRAFTS, .trusted = true},
                            kept = {.width = WIDTH, .interval = 3, .trusted = true};
    int32_t first[] = {0, 1, 2, 3, 4}, checkpoints[] = {-1, 10, 11, -1, -1};
    for (int32_t i = 0; i < 5; i++) {
        OWNED(gdn_end) struct gdn *g = gdn_open("cpu_ref", i < 3 ? &drafts : &kept);
        const struct {
            const char *field;
            int32_t *at, value;
        } bad[] = {{"state_slots", &g->slots[1][2], SLOTS},
                   {"num_accepted_tokens", &g->accepted[1], 2 + DRAFTS},
                   {"num_accepted_tokens", &g->accepted[1], 0},
                   {"initial_slots", &first[1], SLOTS},
                   {"checkpoint_slots", &checkpoints[1], SLOTS}};
        for (int32_t r = 0; r < REQS; r++) {
            g->accepted[r] = 1;
        }
        set_step(g, queries, false);
        if (i >= 3) {
            g->ext.initial_slots = first;
            g->ext.checkpoint_slots = checkpoints;
            g->ext.checkpoint_slots_stride = 1;
        }
        PLAN(g);
        int32_t good = *bad[i].at;
        *bad[i].at = bad[i].value;
        REFUSED(&g->error, bad[i].field, g->api->run(g->plan, g->layer, &g->io, &g->error));
        for (int32_t j = 0; j < g->starts[REQS] * HV * DV; j++) {
            assert_true(isnan((&g->out[0][0][0])[j]));
        }
        *bad[i].at = good;
        RUN(g);
    }
}

TEST(test_bad_weights)
{
    OWNED(gdn_end) struct gdn *g = gdn_create("cpu_ref", WIDTH, 0);
    struct attn_recurrent_weights weights =
        EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, NULL, .a_log = g->a_log);
    struct attn_layer_params params = {.struct_size = sizeof params};
    attn_layer *layer = g->layer;
    g->api->plan_destroy(g->plan);
    g->plan = NULL;
    REFUSED(&g->error, "attn_recurrent_weights",
            g->api->layer_bind_params(layer, &params, &g->error));
    params.next = &weights.ext;
    REFUSED(&g->error, "attn_recurrent_weights",
            g->api->layer_bind_params(layer, &params, &g->error));
    weights.dt_bias = g->dt_bias;
    REFUSED(&g->error, "conv_weight", g->api->layer_bind_params(layer, &params, &g->error));
    weights.conv_weight = tensor(g, 0, g->conv, 2, CHANNELS, WIDTH, 0, WIDTH, 1);
    weights.conv_bias = tensor(g, 1, g->conv, 1, CHANNELS - 1, 0, 0, 1, 0);
    REFUSED(&g->error, "conv_bias", g->api->layer_bind_params(layer, &params, &g->error));
}
