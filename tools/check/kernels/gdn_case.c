/* SPDX-License-Identifier: Apache-2.0 */
#include "kernels/gdn_case.h"

#include <math.h>
#include <string.h>

#include "support/client.h"
#include "support/layer.h"
#include "support/number.h"
#include "support/random.h"

const char *const gdn_shape_names[GDN_SHAPE_COUNT] = {"steps", "chunks", "mixed", "drafts", "long"};

/* clang-format off */
const struct gdn_rule gdn_rules[GDN_RULE_COUNT] = {
    [GDN_GATED_DELTA] = {"gated_delta", {.rule = ATTN_RULE_GATED_DELTA}},
    [GDN_KDA] = {"recurrent.kda", {.gate_per_channel = 1}},
    [GDN_BOUNDED] = {"recurrent.bounded", {.gate = ATTN_GATE_BOUNDED, .gate_bound = -2}},
    [GDN_KDA_BOUNDED] = {"recurrent.kda_bounded", {.gate_per_channel = 1, .gate = ATTN_GATE_BOUNDED, .gate_bound = -5}},
    [GDN_KDA_GIVEN] = {"recurrent.kda_given", {.gate_per_channel = 1, .gate = ATTN_GATE_GIVEN}},
    [GDN_MAMBA2] = {"recurrent.mamba2", {.rule = ATTN_RULE_ADDITIVE, .write_gate = ATTN_WRITE_GATE_STEP, .values_first = 1, .has_skip = 1}},
    [GDN_MAMBA2_LIMITS] = {"recurrent.mamba2_limits", {.rule = ATTN_RULE_ADDITIVE, .write_gate = ATTN_WRITE_GATE_STEP, .values_first = 1, .dt_min = 0.5f, .dt_max = 1.5f}},
    [GDN_LIGHTNING] = {"recurrent.lightning", {.rule = ATTN_RULE_ADDITIVE, .gate = ATTN_GATE_CONSTANT, .write_gate = ATTN_WRITE_GATE_NONE}},
    /* parts of the rules above in other pairs: each is declared by itself */
    [GDN_DELTA_SKIP] = {"recurrent.delta_skip", {.gate = ATTN_GATE_GIVEN, .write_gate = ATTN_WRITE_GATE_NONE, .values_first = 1, .has_skip = 1}},
    [GDN_DELTA_STEP] = {"recurrent.delta_step", {.write_gate = ATTN_WRITE_GATE_STEP, .dt_min = 0.5f, .dt_max = 1.5f}},
    [GDN_ADDITIVE_CHANNELS] = {"recurrent.additive_channels", {.rule = ATTN_RULE_ADDITIVE, .gate_per_channel = 1, .gate = ATTN_GATE_BOUNDED, .gate_bound = -2}},
};
/* clang-format on */

/* Epsilons are large, or a norm would show how outputs that cancel are rounded. */
static const struct attn_recurrent_norm gdn_norms[GDN_NUM_NORMS] = {
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
static const int32_t requests_with_room[GDN_SHAPE_COUNT] = {0, 4, 5, 5, 2};

bool gdn_case_active(const struct gdn_case *c, int32_t r)
{
    return c->tokens[r] > 0 && c->slots[r][0] >= 0 && c->lengths[r] > 0;
}

bool gdn_case_keeps_all(const struct gdn_case *c, int32_t r)
{
    return c->v.drafted > 0 && c->tokens[r] <= 1 + c->v.drafted;
}

int32_t gdn_case_written(const struct gdn_case *c, int32_t r)
{
    const bool moves = c->v.initial || !c->has_state[r] || c->ring_tokens[r] >= c->v.replay - 1;
    return c->tokens[r] > 1 + c->v.drafted ? c->tokens[r] : moves;
}

int64_t gdn_case_ring_row(const struct gdn_case *c, int32_t slot, int32_t r, int32_t t,
                          int32_t head)
{
    const int32_t row = (c->lengths[r] - c->tokens[r] + t) % c->ring.block_size;
    return slot * c->ring_stride + (int64_t)(row * c->ring.num_heads + head) * c->ring.head_size;
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
    random_order(random, order, c->num_slots, 0);
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
    const int32_t tokens[GDN_SHAPE_COUNT][GDN_REQS] = {
        {1, 1, 1, 1, 1, 1},
        {1, 63, 64, 65, 130, 0},
        {1, 7, 33, 1, 2, 70},
        {1 + n, 1, n, v->replay > 0 && v->kept == 0 ? 70 : 3 + 2 * n, 1 + n, 1 + n},
        {1, 63, v->num_v_heads > 1 ? 2500 : 8000, 65, 0, 130}};
    const int32_t in_ring[GDN_REQS] = {v->replay - 1 + random_below(random, 1 + n),
                                       -9,
                                       v->replay > 1 ? v->replay - 2 : 0,
                                       0,
                                       v->replay / 2,
                                       99};
    *c = (struct gdn_case){.v = *v, .num_states = v->replay > 0 ? 1 : 1 + n};
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
    c->gate_stride = c->gates + v->num_v_heads;
    c->gate_stride += v->strided ? 5 : 7 - (c->gate_stride + 7) % 8; /* aligned rows or not */
    c->state_stride =
        (int64_t)v->num_v_heads * v->head_size_v * v->head_size_k + (v->strided ? 64 : 0);
    c->channel_stride = c->window + (v->strided ? 3 : 0);
    const struct attn_recurrent_desc sizes = {.num_k_heads = v->num_k_heads,
                                              .num_v_heads = v->num_v_heads,
                                              .head_size_k = v->head_size_k,
                                              .head_size_v = v->head_size_v,
                                              .num_speculative_tokens = n};
    c->ring = layer_ring(&sizes, v->dtype, c->gates, v->replay);
    c->ring_stride =
        (int64_t)c->ring.block_size * c->ring.num_heads * c->ring.head_size + (v->strided ? 24 : 0);
    c->ring_gates = layer_ring_gates(&sizes);
    memcpy(c->ring_tokens, in_ring, sizeof in_ring);
    draw_slots(c, random);
    c->starts[0] = GDN_FIRST_ROW;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        c->tokens[r] = tokens[v->shape][r];
        c->starts[r + 1] = c->starts[r] + c->tokens[r];
        c->has_state[r] = r != 1 && r != 5;
        /* checkpoints within chunks, and, of every other request, after whole ones */
        const bool whole = v->kept > 0 && v->kept % 64 == 0 && r % 2 == 0;
        const int32_t past =
            whole ? (c->tokens[r] == 1 ? 127 : 128) : (v->replay > 0 ? v->replay + n : 17) + r;
        c->lengths[r] = c->tokens[r] + (c->has_state[r] ? past : 0);
        /* What the step before accepted. Without a ring, a request of more than 1 + n tokens had
         * left one state. */
        c->accepted[r] =
            c->has_state[r] && (r != 3 || v->replay > 0) ? 1 + random_below(random, 1 + n) : 1;
    }
    if (v->shape == GDN_STEPS) {
        c->lengths[5] = 0;
    }
    if (v->shape == GDN_DRAFTS && n > 1 && v->replay == 0) {
        c->slots[0][n] = -3; /* that state is not kept */
        c->accepted[0] = c->accepted[0] < n ? c->accepted[0] : n;
    }
    c->num_actual_rows = c->starts[GDN_REQS];
    c->num_rows = c->num_actual_rows + GDN_PADDING;
}

/* Keys of layers without a norm stay short, or the recurrence grows without bound. Gates that are
 * given are at most 0. */
static void fill_rows(const struct gdn_case *c, struct kernel_test *test, uint64_t *random)
{
    int64_t keys = 2 * (int64_t)c->v.num_k_heads * c->v.head_size_k;
    double key_deviation = c->v.l2norm ? 1 : 0.5 / sqrt(c->v.head_size_k);
    int32_t heads = c->v.num_v_heads, dtype = c->v.dtype;
    for (int64_t t = GDN_FIRST_ROW; t < c->num_actual_rows; t++) {
        uint8_t *mixed = test_input(test, GDN_ROWS), *gates = test_input(test, GDN_A);
        const int64_t first_key = c->first_q < c->first_k ? c->first_q : c->first_k;
        number_fill_normal(mixed, t * c->row_stride + first_key, keys, dtype, key_deviation,
                           random);
        number_fill_normal(mixed, t * c->row_stride + c->first_v, c->channels - keys, dtype, 1,
                           random);
        number_fill_normal(gates, t * c->gate_stride, c->gates, dtype, 1, random);
        number_fill_normal(gates, t * c->gate_stride + c->gates, heads, dtype, 2, random);
        const struct operand *gate = &c->operands[GDN_OUTPUT_GATE];
        if (c->v.norm > 0) {
            number_fill_normal(test_input(test, GDN_OUTPUT_GATE), t * gate->strides[0],
                               gate->shape[1] * gate->shape[2], dtype, 1, random);
        }
        const bool given = rule_of(c)->gate == ATTN_GATE_GIVEN;
        for (int64_t i = t * c->gate_stride; i < t * c->gate_stride + c->gates && given; i++) {
            number_store(gates, i, dtype, -0.5 * fabs(number_load(gates, i, dtype)));
        }
        if (c->v.strong && t % 5 == 0) {
            number_store(gates, t * c->gate_stride + t % c->gates, dtype, given ? -5000 : 5000);
        }
    }
}

/* What an earlier token has left in the ring; gates are at most 0. */
static void fill_ring(const struct gdn_case *c, struct kernel_test *test, int32_t slot, int32_t r,
                      int32_t t, uint64_t *random)
{
    const struct gdn_variant *v = &c->v;
    const int32_t group = v->num_v_heads / v->num_k_heads, gates = c->gates / v->num_k_heads;
    for (int32_t h = 0; h < v->num_k_heads; h++) {
        const int64_t at = gdn_case_ring_row(c, slot, r, t, h);
        uint8_t *ring = test_input(test, GDN_RING);
        number_fill_normal(ring, at, v->head_size_k, v->dtype, 1 / sqrt(v->head_size_k), random);
        number_fill_normal(ring, at + v->head_size_k, group * v->head_size_v, v->dtype, 0.5,
                           random);
        float *g = (float *)(ring + (size_t)(at + c->ring_gates) * number_bytes(v->dtype));
        for (int32_t i = 0; i < gates; i++) {
            g[i] = (float)(-0.3 * fabs(random_normal(random)));
        }
    }
}

/* What the step before has left: the state that is started from, and the whole window. */
static void fill_past(const struct gdn_case *c, struct kernel_test *test, uint64_t *random)
{
    int64_t size = (int64_t)c->v.num_v_heads * c->v.head_size_v * c->v.head_size_k;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        const int32_t *row = c->v.initial ? c->initial[r] : c->slots[r];
        int32_t from = row[c->v.replay > 0 ? 0 : c->accepted[r] - 1], window = row[0];
        if (!gdn_case_active(c, r) || !c->has_state[r]) {
            continue;
        }
        number_fill_normal(test_input(test, GDN_STATE), from * c->state_stride, size,
                           c->v.state_dtype, 0.5, random);
        for (int32_t t = -c->ring_tokens[r]; t < 0 && c->v.replay > 0; t++) {
            fill_ring(c, test, from, r, t, random);
        }
        for (int64_t i = 0; i < c->channels && c->window > 0; i++) {
            int64_t row = (window * (int64_t)c->channels + i) * c->channel_stride;
            number_fill_normal(test_input(test, GDN_WINDOW), row, c->window, c->v.dtype, 0.5,
                               random);
        }
    }
}

/* An element of a key, a gate or a beta that the rule has, of a key if it shall be huge; the value
 * head of it. */
static int64_t draw_key_or_gate(const struct gdn_case *c, int32_t *head, bool *is_gate,
                                uint64_t *random)
{
    const struct gdn_variant *v = &c->v;
    const int32_t kind = v->odd == GDN_HUGE ? 0 : random_below(random, 3);
    const int32_t beta = random_below(random, v->num_v_heads);
    const int32_t key = random_below(random, v->num_k_heads * v->head_size_k);
    const int32_t gate = random_below(random, c->gates);
    *is_gate = true;
    if (kind == 1 && rule_of(c)->gate != ATTN_GATE_CONSTANT) {
        *head = gate / (c->gates / v->num_v_heads);
        return gate;
    }
    if (kind == 2 && rule_of(c)->write_gate == ATTN_WRITE_GATE_SIGMOID) {
        *head = beta;
        return c->gates + beta;
    }
    *is_gate = false;
    *head = key / v->head_size_k * (v->num_v_heads / v->num_k_heads);
    return c->first_k + key;
}

static void plant(struct gdn_case *c, struct kernel_test *test, uint64_t *random)
{
    static const double numbers[GDN_ODD_COUNT] = {0, NAN, INFINITY, 1e25};
    const struct gdn_variant *v = &c->v;
    const int32_t keys = v->num_k_heads * v->head_size_k, group = v->num_v_heads / v->num_k_heads;
    const int32_t value = random_below(random, v->num_v_heads * v->head_size_v);
    const int32_t query = random_below(random, keys), r = requests_with_room[v->shape];
    const bool gated = v->norm > 0 && v->odd != GDN_HUGE; /* plants a gate in place of a query */
    const int32_t means = gdn_norms[v->norm].num_groups;
    const int32_t of_mean = means > 0 ? v->num_v_heads / means : 1;
    int32_t head;
    bool is_gate;
    const int64_t last = draw_key_or_gate(c, &head, &is_gate, random);
    const struct operand *z = &c->operands[GDN_OUTPUT_GATE];
    const int32_t of_z = value / v->head_size_v;
    const int64_t in_z = of_z * z->strides[1] + value % v->head_size_v;
    const struct {
        int32_t operand;
        int64_t element, stride;
    } at[GDN_PLANTED] = {
        {GDN_ROWS, c->first_v + value, c->row_stride},
        {gated ? GDN_OUTPUT_GATE : GDN_ROWS, gated ? in_z : c->first_q + query,
         gated ? z->strides[0] : c->row_stride},
        {is_gate ? GDN_A : GDN_ROWS, last, is_gate ? c->gate_stride : c->row_stride}};
    c->planted[0] = (struct gdn_planted){r, 0, value / v->head_size_v, 1, true};
    c->planted[1] = gated
                        ? (struct gdn_planted){3, 0, of_z, 1, false}
                        : (struct gdn_planted){3, 0, query / v->head_size_k * group, group, false};
    c->planted[2] = (struct gdn_planted){2, 0, head, is_gate ? 1 : group, true};
    c->spreads = test->trial->device->device.type != ATTN_DEVICE_CPU;
    for (int32_t i = 0; i < GDN_PLANTED; i++) {
        struct gdn_planted *to = &c->planted[i];
        const bool positive = random_below(random, 2) == 0 || at[i].operand == GDN_OUTPUT_GATE;
        to->token = random_below(random, c->tokens[to->request]);
        /* two of these have a norm that is no float32 either; a convolution might not hold them */
        const bool two = v->odd == GDN_HUGE && v->conv_width == 0 && i > 0;
        const double number = two ? 3e38 : numbers[v->odd];
        const int64_t row = (c->starts[to->request] + to->token) * at[i].stride;
        for (int32_t n = 0; n < 1 + two; n++) {
            number_store(test_input(test, at[i].operand), row + (at[i].element ^ n), v->dtype,
                         positive ? number : -number);
        }
        /* a mean takes it to all of its heads */
        const int32_t first = to->first_head / of_mean * of_mean;
        const int32_t end = (to->first_head + to->num_heads + of_mean - 1) / of_mean * of_mean;
        to->first_head = first;
        to->num_heads = end - first;
    }
}

static void fill_weights(const struct gdn_case *c, struct kernel_test *test, uint64_t *random)
{
    float *a_log = test_input(test, GDN_A_LOG);
    float *dt_bias = test_input(test, GDN_DT_BIAS);
    float *skip = test_input(test, GDN_SKIP);
    for (int32_t h = 0; h < c->v.num_v_heads; h++) {
        a_log[h] = (float)(random_normal(random) - 1);
        skip[h] = (float)random_normal(random);
    }
    for (int32_t i = 0; i < c->gates; i++) {
        dt_bias[i] = (float)random_normal(random);
    }
}

static struct operand array_of(const char *name, size_t bytes, const void *from)
{
    return (struct operand){name, .bytes = bytes, .from = from};
}

_Static_assert(GDN_OPERANDS <= MAX_OPERANDS, "room in a test");

static void describe_operands(struct gdn_case *c)
{
    const struct gdn_variant *v = &c->v;
    const size_t slots = (size_t)c->num_slots, e = number_bytes(v->dtype);
    const size_t heads = (size_t)v->num_v_heads * sizeof(float);
    const int32_t rows = c->num_rows, dk = v->head_size_k, dv = v->head_size_v;
    const int64_t hk = v->num_k_heads, hv = v->num_v_heads, stride = c->row_stride;
    struct operand *o = c->operands;
    o[GDN_ROWS] =
        operand_rows("mixed_qkv, or q, k or v", v->dtype, rows, stride, 0, 0, c->channels);
    o[GDN_Q] =
        operand_in(operand_rows("q", v->dtype, rows, stride, hk, dk, dk), GDN_ROWS, c->first_q);
    o[GDN_K] =
        operand_in(operand_rows("k", v->dtype, rows, stride, hk, dk, dk), GDN_ROWS, c->first_k);
    o[GDN_V] =
        operand_in(operand_rows("v", v->dtype, rows, stride, hv, dv, dv), GDN_ROWS, c->first_v);
    o[GDN_A] = operand_rows("a or b", v->dtype, rows, c->gate_stride, 0, 0, c->gates);
    o[GDN_A].bytes = (size_t)(rows * c->gate_stride) * e;
    o[GDN_B] =
        operand_in(operand_rows("b", v->dtype, rows, c->gate_stride, 0, 0, hv), GDN_A, c->gates);
    o[GDN_OUT] = operand_rows("out", v->dtype, rows, hv * dv, hv, dv, dv);
    o[GDN_CONV_WEIGHT] = (struct operand){
        "conv_weight", v->dtype, 2, {c->channels, v->conv_width}, .deviation = 0.5};
    /* a bias of keys would lengthen them */
    o[GDN_CONV_BIAS] = (struct operand){
        "conv_bias", v->dtype, 1, {c->channels}, .deviation = v->l2norm ? 0.3 : 0.02};
    const int64_t norm_size = gdn_norms[v->norm].num_groups > 0 ? hv * dv : dv;
    o[GDN_NORM_WEIGHT] =
        (struct operand){"weight of the norm", v->dtype, 1, {norm_size}, .deviation = 1};
    o[GDN_OUTPUT_GATE] = operand_rows("gate of the output", v->dtype, v->norm > 0 ? rows : 0,
                                      hv * dv + (v->strided ? 16 : 0), hv, dv, dv);
    o[GDN_A_LOG] = array_of("a_log", heads, NULL);
    o[GDN_DT_BIAS] = array_of("dt_bias", (size_t)c->gates * sizeof(float), NULL);
    o[GDN_SKIP] = array_of("skip", heads, NULL);
    o[GDN_STATE] = array_of("k_cache, the states",
                            slots * (size_t)c->state_stride * number_bytes(v->state_dtype), NULL);
    o[GDN_WINDOW] = array_of("v_cache, the convolution's windows",
                             slots * (size_t)(c->channels * c->channel_stride) * e, NULL);
    o[GDN_RING] =
        array_of("the ring", v->replay > 0 ? slots * (size_t)c->ring_stride * e : 0, NULL);
    o[GDN_RING_TOKENS] = array_of("ring_tokens", sizeof c->ring_tokens, c->ring_tokens);
    o[GDN_OUT].written = o[GDN_STATE].written = o[GDN_WINDOW].written = o[GDN_RING].written = true;
    o[GDN_STARTS] = array_of("query_start_loc", sizeof c->starts, c->starts);
    o[GDN_LENGTHS] = array_of("seq_lens", sizeof c->lengths, c->lengths);
    o[GDN_SLOTS] = array_of("state_slots", sizeof c->slots, c->slots);
    o[GDN_HAS_STATE] = array_of("has_initial_state", sizeof c->has_state, c->has_state);
    o[GDN_ACCEPTED] = array_of("num_accepted_tokens", sizeof c->accepted, c->accepted);
    o[GDN_INITIAL] = array_of("initial_slots", sizeof c->initial, c->initial);
    o[GDN_KEPT] = array_of("checkpoint_slots", sizeof c->kept, c->kept);
}

void gdn_case_place(struct gdn_case *c, struct kernel_test *test, struct trial *trial,
                    uint64_t *random)
{
    describe_operands(c);
    kernel_test_init(test, trial, c->operands, GDN_OPERANDS, random);
    fill_rows(c, test, random);
    fill_past(c, test, random);
    fill_weights(c, test, random);
    if (c->v.odd != GDN_USUAL) {
        plant(c, test, random);
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
    s->caches = layer_caches(&c->ring, 1, s->desc.ext.next);
    s->desc.ext.next = v->replay > 0 ? &s->caches.ext : s->desc.ext.next;
    s->rounding =
        EXTENSION(attn_recurrent_rounding, ATTN_EXT_DRAFT_RECURRENT_ROUNDING, s->desc.ext.next,
                  .seed = UINT64_C(0x0123456789abcdef), .philox_rounds = v->philox);
    s->desc.ext.next = v->philox > 0 ? &s->rounding.ext : s->desc.ext.next;
    s->layer = SIZED(attn_layer_desc, .name = "gdn", .dtype = v->dtype,
                     .batch_invariant = v->invariant, .num_speculative_tokens = v->drafted);
    layer_set_recurrent(&s->layer, &s->desc);
}

static void describe_batch(const struct gdn_case *c, struct gdn_step *s,
                           const struct kernel_call *call)
{
    int32_t longest = 0, longest_seq = 0;
    for (int32_t r = 0; r < GDN_REQS; r++) {
        longest = c->tokens[r] > longest ? c->tokens[r] : longest;
        longest_seq = c->lengths[r] > longest_seq ? c->lengths[r] : longest_seq;
    }
    s->replay = EXTENSION(attn_batch_replay, ATTN_EXT_DRAFT_BATCH_REPLAY, NULL,
                          .ring_tokens = call_array(call, GDN_RING_TOKENS));
    s->states = EXTENSION(
        attn_batch_recurrent, ATTN_EXT_BATCH_RECURRENT, c->v.replay > 0 ? &s->replay.ext : NULL,
        .state_slots = call_array(call, GDN_SLOTS), .state_slots_stride = GDN_MAX_STATES,
        .has_initial_state = c->v.by_length ? NULL : call_array(call, GDN_HAS_STATE),
        .num_accepted_tokens = c->v.drafted > 0 ? call_array(call, GDN_ACCEPTED) : NULL,
        .initial_slots = c->v.initial ? call_array(call, GDN_INITIAL) : NULL,
        .initial_slots_stride = GDN_MAX_STATES,
        .checkpoint_slots = c->v.kept > 0 ? call_array(call, GDN_KEPT) : NULL,
        .checkpoint_slots_stride = c->v.kept > 0 ? GDN_MAX_KEPT : 0);
    s->batch = client_batch(GDN_REQS, c->starts, c->lengths);
    s->batch.next = &s->states.ext;
    s->batch.num_tokens = c->num_rows;
    s->batch.max_query_len = longest;
    s->batch.max_seq_len = longest_seq;
    s->batch.query_start_loc = call_array(call, GDN_STARTS);
    s->batch.seq_lens = call_array(call, GDN_LENGTHS);
}

static void describe_memory(const struct gdn_case *c, struct gdn_step *s,
                            const struct kernel_call *call)
{
    const size_t e = number_bytes(c->v.dtype), of_state = number_bytes(c->v.state_dtype);
    layer_state_views(&s->desc, c->num_slots, of_state, e, &s->state, &s->window);
    s->state.data = call_array(call, GDN_STATE);
    s->state.stride_block = s->state.stride_slot = c->state_stride * (int64_t)of_state;
    s->ring = layer_ring_view(&c->ring, c->num_slots);
    s->ring.data = call_array(call, GDN_RING);
    s->ring.stride_block = c->ring_stride * (int64_t)e;
    s->cache = (struct attn_layer_cache){ATTN_CACHE_REPLAY, 0, 0, 1, &s->ring};
    s->window.data = call_array(call, GDN_WINDOW);
    s->window.stride_head = c->channel_stride * (int64_t)e;
    s->window.stride_block = s->window.stride_slot = c->channels * s->window.stride_head;
}

void gdn_case_bind(const struct gdn_case *c, struct gdn_step *s, struct kernel_call *call)
{
    const struct gdn_variant *v = &c->v;
    const struct attn_recurrent_rule *rule = rule_of(c);
    const bool convolves = v->conv_width > 0;
    const bool given = rule->gate == ATTN_GATE_GIVEN, constant = rule->gate == ATTN_GATE_CONSTANT;
    struct attn_tensor *t = call->tensors;
    memset(s, 0, sizeof *s);
    describe_layer(c, s);
    describe_batch(c, s, call);
    describe_memory(c, s, call);
    s->skip = EXTENSION(attn_recurrent_skip, ATTN_EXT_DRAFT_RECURRENT_SKIP, NULL,
                        .skip = call_array(call, GDN_SKIP));
    s->norm_weight = EXTENSION(attn_recurrent_norm_weight, ATTN_EXT_DRAFT_RECURRENT_NORM_WEIGHT,
                               rule->has_skip ? &s->skip.ext : NULL, .weight = &t[GDN_NORM_WEIGHT]);
    s->output_gate = EXTENSION(attn_io_recurrent_gate, ATTN_EXT_DRAFT_IO_RECURRENT_GATE, NULL,
                               .gate = &t[GDN_OUTPUT_GATE]);
    s->weights = EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS,
                           v->norm > 0 ? &s->norm_weight.ext : s->norm_weight.ext.next,
                           .a_log = given ? NULL : call_array(call, GDN_A_LOG),
                           .dt_bias = given || constant ? NULL : call_array(call, GDN_DT_BIAS),
                           .conv_weight = convolves ? &t[GDN_CONV_WEIGHT] : NULL,
                           .conv_bias = v->bias ? &t[GDN_CONV_BIAS] : NULL);
    s->params = SIZED(attn_layer_params, .next = &s->weights.ext);
    s->io = EXTENSION(
        attn_io_recurrent, ATTN_EXT_IO_RECURRENT, v->norm > 0 ? &s->output_gate.ext : NULL,
        .mixed_qkv = convolves ? &t[GDN_ROWS] : NULL, .a = constant ? NULL : &t[GDN_A],
        .b = rule->write_gate == ATTN_WRITE_GATE_SIGMOID ? &t[GDN_B] : NULL);
    s->attend = SIZED(
        attn_attend_args, .next = &s->io.ext, .layer = &s->layer, .params = &s->params,
        .batch = &s->batch, .k_cache = &s->state, .v_cache = convolves ? &s->window : NULL,
        .caches = &s->cache, .num_caches = v->replay > 0, .cache_stride = sizeof s->cache,
        .stream = call->stream, .flags = ATTN_RUN_NO_WRITE,
        .phase = s->batch.max_query_len <= 1 + v->drafted ? ATTN_PHASE_DECODE : ATTN_PHASE_PREFILL,
        .q = convolves ? NULL : &t[GDN_Q], .k = convolves ? NULL : &t[GDN_K],
        .v = convolves ? NULL : &t[GDN_V], .out = &t[GDN_OUT]);
}

double gdn_case_equal(const struct gdn_case *c, const uint8_t *a, const uint8_t *b,
                      const uint8_t *slots)
{
    const int64_t count = (int64_t)c->v.num_v_heads * c->v.head_size_v * c->v.head_size_k;
    int64_t all = 0, equal = 0;
    for (int64_t i = 0; i < c->num_slots * count; i++) {
        const int64_t at = i / count * c->state_stride + i % count;
        const double x = number_load(a, at, c->v.state_dtype);
        const double y = number_load(b, at, c->v.state_dtype);
        all += slots[i / count];
        equal += slots[i / count] && (x == y || (isnan(x) && isnan(y)));
    }
    return (double)equal / (double)all;
}
