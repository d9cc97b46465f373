/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/gdn_case.h"

#include <math.h>
#include <string.h>

#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"

const char *const gdn_shape_names[GDN_SHAPE_COUNT] = {"steps", "chunks", "mixed", "drafts"};

const struct gdn_rule gdn_rules[GDN_RULE_COUNT] = {
    [GDN_GATED_DELTA] = {"gated_delta", {.rule = ATTN_RULE_GATED_DELTA}},
    [GDN_KDA] = {"recurrent.kda", {.gate_per_channel = 1}},
    [GDN_BOUNDED] = {"recurrent.bounded", {.gate = ATTN_GATE_BOUNDED, .gate_bound = -2}},
    [GDN_KDA_BOUNDED] = {"recurrent.kda_bounded",
                         {.gate_per_channel = 1, .gate = ATTN_GATE_BOUNDED, .gate_bound = -5}},
    [GDN_KDA_GIVEN] = {"recurrent.kda_given", {.gate_per_channel = 1, .gate = ATTN_GATE_GIVEN}},
    [GDN_MAMBA2] = {"recurrent.mamba2",
                    {.rule = ATTN_RULE_ADDITIVE,
                     .write_gate = ATTN_WRITE_GATE_STEP,
                     .values_first = 1,
                     .has_skip = 1}},
    [GDN_MAMBA2_LIMITS] = {"recurrent.mamba2_limits",
                           {.rule = ATTN_RULE_ADDITIVE,
                            .write_gate = ATTN_WRITE_GATE_STEP,
                            .values_first = 1,
                            .dt_min = 0.5f,
                            .dt_max = 1.5f}},
    [GDN_LIGHTNING] = {"recurrent.lightning",
                       {.rule = ATTN_RULE_ADDITIVE,
                        .gate = ATTN_GATE_CONSTANT,
                        .write_gate = ATTN_WRITE_GATE_NONE}}};

/* Epsilons are large, or a norm would show how outputs that cancel are rounded. */
const struct attn_recurrent_norm gdn_norms[GDN_NUM_NORMS] = {
    [1] = {.gate_activation = ATTN_OUTPUT_GATE_SILU, .epsilon = 0.1f},
    [2] = {.gate_activation = ATTN_OUTPUT_GATE_SIGMOID, .num_groups = 2, .epsilon = 0.05f},
    [3] = {.gate_activation = ATTN_OUTPUT_GATE_SILU,
           .gate_first = 1,
           .num_groups = 1,
           .epsilon = 0.2f}};

static const struct attn_recurrent_rule *rule_of(const struct gdn_case *c)
{
    return &gdn_rules[c->v.rule].rule;
}

/* The request whose slots are negative. */
enum { SKIPPED_REQUEST = 4 };
/* One of a shape that keeps all of its drafts, or has tokens enough for a checkpoint. */
static const int32_t requests_with_room[GDN_SHAPE_COUNT] = {0, 4, 5, 5};

bool gdn_case_active(const struct gdn_case *c, int32_t r)
{
    return c->tokens[r] > 0 && c->slots[r][0] >= 0 && c->lengths[r] > 0;
}

bool gdn_case_keeps_all(const struct gdn_case *c, int32_t r)
{
    return c->v.drafted > 0 && c->tokens[r] <= 1 + c->v.drafted;
}

int32_t gdn_case_checkpoints(const struct gdn_case *c, int32_t r, int32_t *slots)
{
    const int32_t n = c->v.kept, before = c->lengths[r] - c->tokens[r];
    int32_t count = 0;
    for (int32_t i = 0; n > 0 && i < c->lengths[r] / n - before / n; i++) {
        if (gdn_case_active(c, r) && c->kept[r][i] >= 0) {
            slots[count++] = c->kept[r][i];
        }
    }
    return count;
}

/* Where slot 0, which is easily taken for none, stands in the order of slots: as a checkpoint's,
 * else as one to read from, else as a drafted state's. */
static int32_t place_of_slot_0(const struct gdn_case *c, int32_t initial, int32_t kept)
{
    int32_t r = requests_with_room[c->v.shape];
    return c->v.kept > 0      ? kept + r * GDN_MAX_KEPT
           : c->v.initial     ? initial + r * c->num_states
           : c->v.drafted > 0 ? r * c->num_states + 1
                              : r * c->num_states;
}

/* Slots of states first, then those that are read from and those of checkpoints, of which some are
 * not written. */
static void draw_slots(struct gdn_case *c, uint64_t *random)
{
    int32_t order[GDN_MAX_SLOTS], count = GDN_REQS * c->num_states;
    int32_t kept = count + (c->v.initial ? count : 0);
    c->num_slots = kept + (c->v.kept > 0 ? GDN_REQS * GDN_MAX_KEPT : 0) + 3;
    for (int32_t i = 0; i < c->num_slots; i++) { /* shuffled */
        int32_t other = random_below(random, i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    int32_t at = place_of_slot_0(c, count, kept), found = 0;
    while (order[found] != 0) {
        found++;
    }
    order[found] = order[at];
    order[at] = 0;
    for (int32_t i = 0; i < count; i++) {
        bool skipped = i / c->num_states == SKIPPED_REQUEST && c->v.shape != GDN_CHUNKS;
        c->slots[i / c->num_states][i % c->num_states] = skipped ? -1 - i : order[i];
    }
    for (int32_t r = 0; r < GDN_REQS; r++) {
        for (int32_t i = 0; i < c->num_states; i++) {
            c->initial[r][i] = c->v.initial ? order[count + r * c->num_states + i] : -1;
        }
        for (int32_t i = 0; i < GDN_MAX_KEPT && c->v.kept > 0; i++) {
            c->kept[r][i] = (r + i) % 4 == 3 ? -2 : order[kept + r * GDN_MAX_KEPT + i];
        }
    }
}

void gdn_case_init(struct gdn_case *c, const struct gdn_variant *v, uint64_t *random)
{
    const int32_t n = v->drafted;
    const int32_t tokens[GDN_SHAPE_COUNT][GDN_REQS] = {{1, 1, 1, 1, 1, 1},
                                                       {1, 63, 64, 65, 130, 0},
                                                       {1, 7, 33, 1, 2, 70},
                                                       {1 + n, 1, n, 3 + 2 * n, 1 + n, 1 + n}};
    *c = (struct gdn_case){.v = *v, .num_states = 1 + n};
    c->channels = 2 * v->num_k_heads * v->head_size_k + v->num_v_heads * v->head_size_v;
    const int64_t keys = (int64_t)v->num_k_heads * v->head_size_k;
    const int64_t values = (int64_t)v->num_v_heads * v->head_size_v;
    c->first_q = rule_of(c)->values_first ? values + keys : 0;
    c->first_k = rule_of(c)->values_first ? values : keys;
    c->first_v = rule_of(c)->values_first ? 0 : 2 * keys;
    c->gates = v->num_v_heads * (rule_of(c)->gate_per_channel ? v->head_size_k : 1);
    c->v.state_dtype = v->state_dtype != 0 ? v->state_dtype : ATTN_DTYPE_F32;
    c->window = v->conv_width > 0 ? v->conv_width - 1 + n : 0;
    c->row_stride = c->channels + (v->strided ? 8 : 0);
    c->gate_stride = c->gates + v->num_v_heads + (v->strided ? 5 : 0);
    c->state_stride =
        (int64_t)v->num_v_heads * v->head_size_v * v->head_size_k + (v->strided ? 64 : 0);
    c->channel_stride = c->window + (v->strided ? 3 : 0);
    c->norm_size = v->norm > 0 ? v->num_v_heads * v->head_size_v : 0;
    c->gate_row = c->norm_size + (v->strided && v->norm > 0 ? 16 : 0);
    draw_slots(c, random);
    c->starts[0] = GDN_FIRST_ROW;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        c->tokens[r] = tokens[v->shape][r];
        c->starts[r + 1] = c->starts[r] + c->tokens[r];
        c->has_state[r] = r != 1 && r != 5;
        /* checkpoints within chunks, and, of every other request, after whole ones */
        const int32_t past = v->kept % 64 == 0 && v->kept > 0 && r % 2 == 0 ? 128 : 17 + r;
        c->lengths[r] = c->tokens[r] + (c->has_state[r] ? past : 0);
        /* what the step before accepted; a request of more than 1 + n tokens had left one state */
        c->accepted[r] = c->has_state[r] && r != 3 ? 1 + random_below(random, 1 + n) : 1;
    }
    if (v->shape == GDN_STEPS) {
        c->lengths[5] = 0;
    }
    if (v->shape == GDN_DRAFTS && n > 1) {
        c->slots[0][n] = -3; /* that state is not kept */
        c->accepted[0] = c->accepted[0] < n ? c->accepted[0] : n;
    }
    c->num_actual_rows = c->starts[GDN_REQS];
    c->num_rows = c->num_actual_rows + GDN_PADDING;
}

/* Keys of layers without a norm stay short, or the recurrence grows without bound. Gates that are
 * given are at most 0. */
static void fill_rows(const struct gdn_case *c, uint8_t *base, uint64_t *random)
{
    int64_t keys = 2 * (int64_t)c->v.num_k_heads * c->v.head_size_k;
    double key_deviation = c->v.l2norm ? 1 : 0.5 / sqrt(c->v.head_size_k);
    int32_t heads = c->v.num_v_heads, dtype = c->v.dtype;
    for (int64_t t = GDN_FIRST_ROW; t < c->num_actual_rows; t++) {
        uint8_t *mixed = base + c->at[GDN_MIXED_ROWS], *gates = base + c->at[GDN_GATES];
        const int64_t first_key = c->first_q < c->first_k ? c->first_q : c->first_k;
        number_fill_normal(mixed, t * c->row_stride + first_key, keys, dtype, key_deviation,
                           random);
        number_fill_normal(mixed, t * c->row_stride + c->first_v, c->channels - keys, dtype, 1,
                           random);
        number_fill_normal(gates, t * c->gate_stride, c->gates, dtype, 1, random);
        number_fill_normal(base + c->at[GDN_OUTPUT_GATE], t * c->gate_row, c->norm_size, dtype, 1,
                           random);
        number_fill_normal(gates, t * c->gate_stride + c->gates, heads, dtype, 2, random);
        const bool given = rule_of(c)->gate == ATTN_GATE_GIVEN;
        for (int64_t i = t * c->gate_stride; i < t * c->gate_stride + c->gates && given; i++) {
            number_store(gates, i, dtype, -0.5 * fabs(number_load(gates, i, dtype)));
        }
        if (c->v.strong && t % 5 == 0) {
            number_store(gates, t * c->gate_stride + t % c->gates, dtype, given ? -5000 : 5000);
        }
    }
}

/* What the step before has left: the state that is started from, and the whole window. */
static void fill_past(const struct gdn_case *c, uint8_t *base, uint64_t *random)
{
    int64_t size = (int64_t)c->v.num_v_heads * c->v.head_size_v * c->v.head_size_k;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        const int32_t *row = c->v.initial ? c->initial[r] : c->slots[r];
        int32_t from = row[c->accepted[r] - 1], window = row[0];
        if (!gdn_case_active(c, r) || !c->has_state[r]) {
            continue;
        }
        number_fill_normal(base + c->at[GDN_STATE], from * c->state_stride, size, c->v.state_dtype,
                           0.5, random);
        for (int64_t i = 0; i < c->channels && c->window > 0; i++) {
            int64_t row = (window * (int64_t)c->channels + i) * c->channel_stride;
            number_fill_normal(base + c->at[GDN_WINDOW], row, c->window, c->v.dtype, 0.5, random);
        }
    }
}

static void plant_nans(struct gdn_case *c, uint8_t *base, uint64_t *random)
{
    const struct gdn_variant *v = &c->v;
    const int32_t keys = v->num_k_heads * v->head_size_k, group = v->num_v_heads / v->num_k_heads;
    const int32_t value = random_below(random, v->num_v_heads * v->head_size_v);
    const int32_t query = random_below(random, keys), r = requests_with_room[v->shape];
    c->nans[0] = (struct gdn_nan){r, 0, value / v->head_size_v, 1, true};
    c->nans[1] = (struct gdn_nan){r == 3 ? 2 : 3, 0, query / v->head_size_k * group, group, false};
    for (int32_t i = 0; i < GDN_NANS; i++) {
        struct gdn_nan *nan = &c->nans[i];
        nan->token = random_below(random, c->tokens[nan->request]);
        number_store(base + c->at[GDN_MIXED_ROWS],
                     (c->starts[nan->request] + nan->token) * c->row_stride +
                         (i == 0 ? c->first_v + value : c->first_q + query),
                     v->dtype, NAN);
    }
}

static void fill_weights(const struct gdn_case *c, uint8_t *base, uint64_t *random)
{
    number_fill_normal(base + c->at[GDN_CONV_WEIGHT], 0, (int64_t)c->channels * c->v.conv_width,
                       c->v.dtype, 0.5, random);
    /* a bias of keys would lengthen them */
    number_fill_normal(base + c->at[GDN_CONV_BIAS], 0, c->channels, c->v.dtype,
                       c->v.l2norm ? 0.3 : 0.02, random);
    number_fill_normal(base + c->at[GDN_NORM_WEIGHT], 0, c->norm_size, c->v.dtype, 1, random);
    float *a_log = (float *)(base + c->at[GDN_A_LOG]);
    float *dt_bias = (float *)(base + c->at[GDN_DT_BIAS]);
    float *skip = (float *)(base + c->at[GDN_SKIP]);
    for (int32_t h = 0; h < c->v.num_v_heads; h++) {
        a_log[h] = (float)(random_normal(random) - 1);
        skip[h] = (float)random_normal(random);
    }
    for (int32_t i = 0; i < c->gates; i++) {
        dt_bias[i] = (float)random_normal(random);
    }
}

void gdn_case_place(struct gdn_case *c, struct kernel_test *test, uint64_t *random)
{
    static const char *const names[GDN_BUFFER_COUNT] = {
        [GDN_MIXED_ROWS] = "mixed_qkv, or q, k or v",
        [GDN_GATES] = "a or b",
        [GDN_OUT] = "out",
        [GDN_CONV_WEIGHT] = "conv_weight",
        [GDN_CONV_BIAS] = "conv_bias",
        [GDN_A_LOG] = "a_log",
        [GDN_DT_BIAS] = "dt_bias",
        [GDN_SKIP] = "skip",
        [GDN_NORM_WEIGHT] = "weight of the norm",
        [GDN_OUTPUT_GATE] = "gate of the output",
        [GDN_STATE] = "k_cache, the states",
        [GDN_WINDOW] = "v_cache, the convolution's windows",
        [GDN_STARTS] = "query_start_loc",
        [GDN_LENGTHS] = "seq_lens",
        [GDN_SLOTS] = "state_slots",
        [GDN_HAS_STATE] = "has_initial_state",
        [GDN_ACCEPTED] = "num_accepted_tokens",
        [GDN_INITIAL] = "initial_slots",
        [GDN_KEPT] = "checkpoint_slots"};
    size_t e = number_bytes(c->v.dtype), slots = (size_t)c->num_slots;
    const size_t bytes[GDN_BUFFER_COUNT] = {
        [GDN_MIXED_ROWS] = (size_t)(c->num_rows * c->row_stride) * e,
        [GDN_GATES] = (size_t)(c->num_rows * c->gate_stride) * e,
        [GDN_OUT] = (size_t)(c->num_rows * c->v.num_v_heads * c->v.head_size_v) * e,
        [GDN_CONV_WEIGHT] = (size_t)(c->channels * c->v.conv_width) * e,
        [GDN_CONV_BIAS] = (size_t)c->channels * e,
        [GDN_A_LOG] = (size_t)c->v.num_v_heads * sizeof(float),
        [GDN_DT_BIAS] = (size_t)c->gates * sizeof(float),
        [GDN_SKIP] = (size_t)c->v.num_v_heads * sizeof(float),
        [GDN_NORM_WEIGHT] = (size_t)c->norm_size * e,
        [GDN_OUTPUT_GATE] = (size_t)(c->num_rows * c->gate_row) * e,
        [GDN_STATE] = slots * (size_t)c->state_stride * number_bytes(c->v.state_dtype),
        [GDN_WINDOW] = slots * (size_t)(c->channels * c->channel_stride) * e,
        [GDN_STARTS] = sizeof c->starts,
        [GDN_LENGTHS] = sizeof c->lengths,
        [GDN_SLOTS] = sizeof c->slots,
        [GDN_HAS_STATE] = sizeof c->has_state,
        [GDN_ACCEPTED] = sizeof c->accepted,
        [GDN_INITIAL] = sizeof c->initial,
        [GDN_KEPT] = sizeof c->kept};
    for (int32_t i = 0; i < GDN_BUFFER_COUNT; i++) {
        c->at[i] = kernel_test_add(test, names[i], bytes[i],
                                   i == GDN_OUT || i == GDN_STATE || i == GDN_WINDOW);
    }
    if (test->image.failed) {
        return; /* kernel_test_run says it */
    }
    uint8_t *base = test->image.bytes;
    memcpy(base + c->at[GDN_STARTS], c->starts, sizeof c->starts);
    memcpy(base + c->at[GDN_LENGTHS], c->lengths, sizeof c->lengths);
    memcpy(base + c->at[GDN_SLOTS], c->slots, sizeof c->slots);
    memcpy(base + c->at[GDN_HAS_STATE], c->has_state, sizeof c->has_state);
    memcpy(base + c->at[GDN_ACCEPTED], c->accepted, sizeof c->accepted);
    memcpy(base + c->at[GDN_INITIAL], c->initial, sizeof c->initial);
    memcpy(base + c->at[GDN_KEPT], c->kept, sizeof c->kept);
    fill_rows(c, base, random);
    fill_past(c, base, random);
    fill_weights(c, base, random);
    if (c->v.nan) {
        plant_nans(c, base, random);
    }
}

static void describe_layer(const struct gdn_case *c, struct gdn_step *s)
{
    const struct gdn_variant *v = &c->v;
    s->desc = (struct attn_recurrent_desc){.num_k_heads = v->num_k_heads,
                                           .num_v_heads = v->num_v_heads,
                                           .head_size_k = v->head_size_k,
                                           .head_size_v = v->head_size_v,
                                           .conv_width = v->conv_width,
                                           .conv_silu = v->silu,
                                           .qk_l2norm = v->l2norm,
                                           .chunk_size = v->chunk_size,
                                           .num_speculative_tokens = v->drafted,
                                           .state_dtype = v->state_dtype,
                                           .has_initial_slots = v->initial,
                                           .checkpoint_interval = v->kept};
    s->rule = *rule_of(c);
    s->rule.ext = (struct attn_ext){ATTN_EXT_DRAFT_RECURRENT_RULE, 0, sizeof s->rule, NULL};
    s->norm = gdn_norms[v->norm];
    s->norm.ext = (struct attn_ext){ATTN_EXT_DRAFT_RECURRENT_NORM, 0, sizeof s->norm, NULL};
    s->rule.ext.next = v->norm > 0 ? &s->norm.ext : NULL;
    s->desc.ext.next = v->rule != GDN_GATED_DELTA ? &s->rule.ext : s->rule.ext.next;
    s->layer = (struct attn_layer_desc){.struct_size = sizeof s->layer,
                                        .name = "gdn",
                                        .dtype = v->dtype,
                                        .batch_invariant = v->invariant,
                                        .num_speculative_tokens = v->drafted};
    layer_set_recurrent(&s->layer, &s->desc);
}

static void describe_batch(const struct gdn_case *c, struct gdn_step *s, uint8_t *base)
{
    int32_t longest = 0, longest_seq = 0;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        longest = c->tokens[r] > longest ? c->tokens[r] : longest;
        longest_seq = c->lengths[r] > longest_seq ? c->lengths[r] : longest_seq;
    }
    s->states = (struct attn_batch_recurrent){
        .ext = {ATTN_EXT_BATCH_RECURRENT, 0, sizeof s->states, NULL},
        .state_slots = (const int32_t *)(base + c->at[GDN_SLOTS]),
        .state_slots_stride = GDN_MAX_STATES,
        .has_initial_state = c->v.by_length ? NULL : base + c->at[GDN_HAS_STATE],
        .num_accepted_tokens =
            c->v.drafted > 0 ? (const int32_t *)(base + c->at[GDN_ACCEPTED]) : NULL,
        .initial_slots = c->v.initial ? (const int32_t *)(base + c->at[GDN_INITIAL]) : NULL,
        .initial_slots_stride = GDN_MAX_STATES,
        .checkpoint_slots = c->v.kept > 0 ? (const int32_t *)(base + c->at[GDN_KEPT]) : NULL,
        .checkpoint_slots_stride = c->v.kept > 0 ? GDN_MAX_KEPT : 0};
    s->batch = (struct attn_batch){.struct_size = sizeof s->batch,
                                   .next = &s->states.ext,
                                   .num_reqs = GDN_REQS,
                                   .num_tokens = c->num_rows,
                                   .num_actual_tokens = c->num_actual_rows,
                                   .max_query_len = longest,
                                   .max_seq_len = longest_seq,
                                   .query_start_loc = (const int32_t *)(base + c->at[GDN_STARTS]),
                                   .query_start_loc_host = c->starts,
                                   .seq_lens = (const int32_t *)(base + c->at[GDN_LENGTHS]),
                                   .seq_lens_host = c->lengths};
}

static void describe_memory(const struct gdn_case *c, struct gdn_step *s, uint8_t *base)
{
    int64_t e = (int64_t)number_bytes(c->v.dtype),
            head = (int64_t)c->v.head_size_v * c->v.head_size_k;
    int64_t of_state = (int64_t)number_bytes(c->v.state_dtype);
    int64_t state = c->state_stride * of_state, channel = c->channel_stride * e;
    s->state = (struct attn_kv_view){.struct_size = sizeof s->state,
                                     .data = base + c->at[GDN_STATE],
                                     .num_blocks = c->num_slots,
                                     .block_size = 1,
                                     .num_heads = c->v.num_v_heads,
                                     .head_size = (int32_t)head,
                                     .stride_block = state,
                                     .stride_slot = state,
                                     .stride_head = head * of_state};
    s->window = (struct attn_kv_view){.struct_size = sizeof s->window,
                                      .data = base + c->at[GDN_WINDOW],
                                      .num_blocks = c->num_slots,
                                      .block_size = 1,
                                      .num_heads = c->channels,
                                      .head_size = c->window,
                                      .stride_block = c->channels * channel,
                                      .stride_slot = c->channels * channel,
                                      .stride_head = channel};
}

/* A tensor [rows, columns] or, with `heads`, [rows, heads, columns] of a layer's dtype. */
static struct attn_tensor *rows_of(const struct gdn_case *c, struct case_tensor *shaped,
                                   uint8_t *data, int64_t rows, int64_t stride, int64_t heads,
                                   int64_t columns, const struct device *device)
{
    *shaped = (struct case_tensor){.shape = {rows, heads > 0 ? heads : columns, columns},
                                   .strides = {stride, heads > 0 ? columns : 1, 1}};
    return case_bind(shaped, data, device, c->v.dtype, heads > 0 ? 3 : 2);
}

void gdn_case_bind(const struct gdn_case *c, struct gdn_step *s, uint8_t *base,
                   const struct device *device)
{
    const struct gdn_variant *v = &c->v;
    int64_t rows = c->num_rows, stride = c->row_stride, e = (int64_t)number_bytes(v->dtype);
    const struct attn_recurrent_rule *rule = rule_of(c);
    uint8_t *mixed = base + c->at[GDN_MIXED_ROWS], *gates = base + c->at[GDN_GATES];
    bool convolves = v->conv_width > 0;
    memset(s, 0, sizeof *s);
    describe_layer(c, s);
    describe_batch(c, s, base);
    describe_memory(c, s, base);
    const bool given = rule->gate == ATTN_GATE_GIVEN, constant = rule->gate == ATTN_GATE_CONSTANT;
    s->skip = (struct attn_recurrent_skip){
        .ext = {ATTN_EXT_DRAFT_RECURRENT_SKIP, 0, sizeof s->skip, NULL},
        .skip = (const float *)(base + c->at[GDN_SKIP])};
    s->weight = (struct case_tensor){
        .shape = {s->norm.num_groups > 0 ? c->norm_size : v->head_size_v}, .strides = {1}};
    s->norm_weight = (struct attn_recurrent_norm_weight){
        .ext = {ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT, 0, sizeof s->norm_weight,
                rule->has_skip ? &s->skip.ext : NULL},
        .weight = case_bind(&s->weight, base + c->at[GDN_NORM_WEIGHT], device, v->dtype, 1)};
    s->output_gate = (struct attn_io_recurrent_gate){
        .ext = {ATTN_EXT_DRAFT_IO_RECURRENT_GATE, 0, sizeof s->output_gate, NULL},
        .gate = rows_of(c, &s->gate, base + c->at[GDN_OUTPUT_GATE], rows, c->gate_row,
                        v->num_v_heads, v->head_size_v, device)};
    s->weights = (struct attn_recurrent_weights){
        .ext = {ATTN_EXT_RECURRENT_WEIGHTS, 0, sizeof s->weights,
                v->norm > 0 ? &s->norm_weight.ext : s->norm_weight.ext.next},
        .a_log = given ? NULL : (const float *)(base + c->at[GDN_A_LOG]),
        .dt_bias = given || constant ? NULL : (const float *)(base + c->at[GDN_DT_BIAS]),
        .conv_weight = rows_of(c, &s->conv_weight, base + c->at[GDN_CONV_WEIGHT], c->channels,
                               v->conv_width, 0, v->conv_width, device)};
    s->conv_bias = (struct case_tensor){.shape = {c->channels}, .strides = {1}};
    case_bind(&s->conv_bias, base + c->at[GDN_CONV_BIAS], device, v->dtype, 1);
    s->weights.conv_bias = v->bias ? &s->conv_bias.tensor : NULL;
    s->weights.conv_weight = convolves ? s->weights.conv_weight : NULL;
    s->params =
        (struct attn_layer_params){.struct_size = sizeof s->params, .next = &s->weights.ext};
    rows_of(c, &s->mixed, mixed, rows, stride, 0, c->channels, device);
    rows_of(c, &s->q, mixed + c->first_q * e, rows, stride, v->num_k_heads, v->head_size_k, device);
    rows_of(c, &s->k, mixed + c->first_k * e, rows, stride, v->num_k_heads, v->head_size_k, device);
    rows_of(c, &s->v, mixed + c->first_v * e, rows, stride, v->num_v_heads, v->head_size_v, device);
    s->io = (struct attn_io_recurrent){
        .ext = {ATTN_EXT_IO_RECURRENT, 0, sizeof s->io, v->norm > 0 ? &s->output_gate.ext : NULL},
        .mixed_qkv = convolves ? &s->mixed.tensor : NULL,
        .a = rows_of(c, &s->a, gates, rows, c->gate_stride, 0, c->gates, device),
        .b = rows_of(c, &s->b, gates + c->gates * e, rows, c->gate_stride, 0, v->num_v_heads,
                     device)};
    s->io.a = constant ? NULL : s->io.a;
    s->io.b = rule->write_gate == ATTN_WRITE_GATE_SIGMOID ? s->io.b : NULL;
    s->out = case_rows(rows, v->num_v_heads, v->head_size_v);
    s->attend = (struct attn_attend_args){
        .struct_size = sizeof s->attend,
        .next = &s->io.ext,
        .layer = &s->layer,
        .params = &s->params,
        .batch = &s->batch,
        .k_cache = &s->state,
        .v_cache = convolves ? &s->window : NULL,
        .flags = ATTN_RUN_NO_WRITE,
        .phase = s->batch.max_query_len <= 1 + v->drafted ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL,
        .q = convolves ? NULL : &s->q.tensor,
        .k = convolves ? NULL : &s->k.tensor,
        .v = convolves ? NULL : &s->v.tensor,
        .out = case_bind(&s->out, base + c->at[GDN_OUT], device, v->dtype, 3)};
}
