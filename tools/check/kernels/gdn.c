/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers: the outputs of one step, the states that it leaves and the rolled windows. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/names.h"
#include "support/client.h"
#include "support/number.h"
#include "cases/kernel_test.h"
#include "cases/problem_copy.h"
#include "kernels/gdn_case.h"
#include "kernels/kernels.h"
#include "harness/planned.h"

/* One request of the step alone, or one half of its tokens. */
static attn_status call_part(struct gdn_step *s, const struct gdn_case *c,
                             const struct kernel_call *call, const struct attn_limits *limits,
                             struct attn_error *error)
{
    struct attn_batch_recurrent *states = &s->states;
    struct batch_part part;
    batch_part_init(&part, &s->batch, call->part, c->v.invariant >= 2);
    const int32_t r = part.request;
    const uint8_t has_state = part.starts[0] > c->starts[r] ? 1 : c->has_state[r];
    uint8_t *of_request = (uint8_t *)call_array(call, GDN_HAS_STATE) + r;
    if (part.starts[0] == part.starts[1] && c->v.invariant >= 2) {
        return ATTN_OK;
    }
    s->batch = part.batch;
    s->batch.max_seq_len = part.length;
    states->state_slots += r * states->state_slots_stride;
    states->has_initial_state += states->has_initial_state != NULL ? r : 0;
    states->num_accepted_tokens += states->num_accepted_tokens != NULL ? r : 0;
    states->initial_slots += states->initial_slots != NULL ? r * states->initial_slots_stride : 0;
    states->checkpoint_slots +=
        states->checkpoint_slots != NULL ? r * states->checkpoint_slots_stride : 0;
    s->replay.ring_tokens += r;
    if (!batch_put_lengths(call->device, &part.batch, part.starts, &part.length) ||
        !device_write(call->device, of_request, &has_state, 1)) {
        return ATTN_ERROR_DEVICE;
    }
    attn_status status = planned_call(call->backend, call->device, limits, &s->attend,
                                      call->backend->kernels.recurrent, error);
    const bool restored =
        batch_put_lengths(call->device, &part.batch, c->starts + r, c->lengths + r) &&
        device_write(call->device, of_request, &c->has_state[r], 1);
    return restored || status != ATTN_OK ? status : ATTN_ERROR_DEVICE;
}

/* A part is a request of the step; where prefixes do not count either, half of one. */
static attn_status call_gdn(struct kernel_call *call, const void *context, struct attn_error *error)
{
    const struct gdn_case *c = context;
    struct gdn_step s;
    gdn_case_bind(c, &s, call);
    const struct attn_limits limits =
        client_limits(GDN_REQS, c->num_rows, s.batch.max_query_len, s.batch.max_seq_len, 0);
    return call->part >= 0 ? call_part(&s, c, call, &limits, error)
                           : planned_call(call->backend, call->device, &limits, &s.attend,
                                          call->backend->kernels.recurrent, error);
}

/* The mean square of all requests' outputs. A row o = S q may cancel, where k and q are nearly
 * orthogonal (a request's first token has no other term), and a kernel that multiplies in 16 bits
 * is as good as that of products of usual size: some 3e-4 of them in the mean, ten times as much in
 * the worst of a million elements. CANCELLED of the usual bound allows 5e-3. With a ring twice as
 * much: other backends than the reference may take k and u of a token before they are rounded. */
#define CANCELLED(c) ((c)->v.replay > 0 ? 0.5 : 0.25)
static double mean_square(const uint8_t *out, const struct gdn_case *c, const uint8_t *rows)
{
    int64_t row = (int64_t)c->v.num_v_heads * c->v.head_size_v, count = 0;
    double sum = 0;
    for (int64_t i = 0; i < c->num_rows * row; i++) {
        double x = rows[i / row] ? number_load(out, i, c->v.dtype) : 0;
        bool counts = rows[i / row] &&
                      !(c->v.odd == GDN_NAN ? isnan(x) : c->v.odd == GDN_INFINITE && !isfinite(x));
        sum += counts ? x * x : 0;
        count += counts;
    }
    return count > 0 ? sum / (double)count : 0;
}

/* The reference's replace numbers that a chunk's products may make of what was planted (struct
 * gdn_planted). */
#define PLANTED_CHUNK 64
static void forgive(const struct gdn_case *c, const uint8_t *expected, uint8_t *found,
                    int64_t first, int64_t count, int32_t dtype)
{
    const bool infinite = c->v.odd == GDN_INFINITE;
    for (int64_t i = first; i < first + count; i++) {
        const double want = number_load(expected, i, dtype), have = number_load(found, i, dtype);
        if ((c->spreads && isnan(have)) ||
            (infinite && !isfinite(have) && (c->spreads || !isfinite(want)))) {
            number_store(found, i, dtype, want);
        }
    }
}

static void forgive_outputs(struct kernel_test *test, const struct gdn_case *c)
{
    const int64_t heads = c->v.num_v_heads, size = c->v.head_size_v;
    for (int32_t i = 0; i < GDN_PLANTED && c->v.odd != GDN_USUAL; i++) {
        const struct gdn_planted *odd = &c->planted[i];
        const int32_t from = odd->token / PLANTED_CHUNK * PLANTED_CHUNK;
        for (int32_t t = from; t < c->tokens[odd->request]; t++) {
            forgive(c, test_expected(test, GDN_OUT), test_found(test, GDN_OUT),
                    ((c->starts[odd->request] + t) * heads + odd->first_head) * size,
                    odd->num_heads * size, c->v.dtype);
        }
    }
}

static void forgive_states(struct kernel_test *test, const struct gdn_case *c)
{
    const int64_t size = (int64_t)c->v.head_size_v * c->v.head_size_k;
    for (int32_t i = 0; i < GDN_PLANTED && c->v.odd != GDN_USUAL; i++) {
        const struct gdn_planted *odd = &c->planted[i];
        if (odd->in_state) {
            forgive(c, test_expected(test, GDN_STATE), test_found(test, GDN_STATE),
                    c->slots[odd->request][0] * c->state_stride + odd->first_head * size,
                    odd->num_heads * size, c->v.state_dtype);
        }
    }
}

/* The bound follows the coarser of the two dtypes, activations or states. */
static struct bound bound_of(const struct gdn_case *c)
{
    const struct bound rows = bound_of_dtype(c->v.dtype), states = bound_of_dtype(c->v.state_dtype);
    return rows.absolute > states.absolute ? rows : states;
}

static enum trial_result verify_out(struct kernel_test *test, const struct gdn_case *c)
{
    uint8_t rows[GDN_FIRST_ROW + GDN_MAX_TOKENS + GDN_PADDING] = {0};
    for (int32_t r = 0; r < GDN_REQS; r++) {
        memset(rows + c->starts[r], gdn_case_active(c, r), (size_t)c->tokens[r]);
    }
    double mean = mean_square(test_expected(test, GDN_OUT), c, rows);
    if (!isfinite(mean)) { /* NaN would agree with NaN */
        return trial_say(test->trial, TRIAL_FAILED, "the reference's outputs are not finite");
    }
    forgive_outputs(test, c);
    struct bound bound = bound_of(c);
    bound.least = CANCELLED(c) * bound.absolute * sqrt(mean);
    return kernel_test_compare(test, GDN_OUT, rows, bound);
}

/* Which request's step leaves something in a slot: its last state, or all that it keeps, and
 * checkpoints; -1: none. */
static void find_owners(const struct gdn_case *c, bool all_states, int32_t *owner)
{
    memset(owner, -1, GDN_MAX_SLOTS * sizeof *owner);
    for (int32_t r = 0; r < GDN_REQS; r++) {
        const bool ring = c->v.replay > 0, left = ring && gdn_case_written(c, r) == 0;
        const int32_t states = !all_states                         ? 1
                               : ring || !gdn_case_keeps_all(c, r) ? !left
                                                                   : c->tokens[r];
        for (int32_t i = 0; i < states && gdn_case_active(c, r); i++) {
            if (c->slots[r][i] >= 0) {
                owner[c->slots[r][i]] = r;
            }
        }
        int32_t kept[GDN_MAX_KEPT], count = gdn_case_checkpoints(c, r, kept);
        for (int32_t i = 0; i < count; i++) {
            owner[kept[i]] = r;
        }
    }
}

/* A unit of the largest element of these slots. Where a step rounds states of 16 bits at several
 * tokens, an element may be rounded to the other side at one, and become small at a later one. */
static double largest_unit(const uint8_t *states, const struct gdn_case *c, const uint8_t *slots)
{
    const int64_t count = (int64_t)c->v.num_v_heads * c->v.head_size_v * c->v.head_size_k;
    const int32_t dtype = c->v.state_dtype;
    double largest = 0;
    for (int64_t i = 0; i < c->num_slots * count && dtype != ATTN_DTYPE_F32; i++) {
        const int64_t at = i / count * c->state_stride + i % count;
        const double x = slots[i / count] ? number_load(states, at, dtype) : 0;
        largest = isfinite(x) ? fmax(largest, fabs(x)) : largest;
    }
    return largest * (dtype == ATTN_DTYPE_BF16 ? 0x1p-7 : 0x1p-10);
}

/* States that the step leaves are held to the reference's; every other byte stays. A kernel may
 * multiply in the layer's dtype, and the bound follows it. */
static enum trial_result verify_states(struct kernel_test *test, const struct gdn_case *c)
{
    int64_t size = (int64_t)c->v.head_size_v * c->v.head_size_k;
    uint8_t left[GDN_MAX_SLOTS] = {0};
    const struct compared state = {
        "state", c->v.state_dtype, c->v.num_v_heads, size, c->state_stride, size, c->num_slots,
        left};
    const size_t e = number_bytes(c->v.state_dtype);
    int32_t owner[GDN_MAX_SLOTS];
    find_owners(c, true, owner);
    for (int32_t slot = 0; slot < c->num_slots; slot++) {
        left[slot] = owner[slot] >= 0;
    }
    forgive_states(test, c);
    const uint8_t *expected = test_expected(test, GDN_STATE);
    struct bound bound = bound_of(c);
    bound.least = c->v.shape != GDN_STEPS || c->v.philox > 0 ? largest_unit(expected, c, left) : 0;
    const double equal =
        c->v.philox > 0 ? gdn_case_equal(c, expected, test_found(test, GDN_STATE), left) : 1;
    TRIAL_FAIL_IF(test->trial, !(equal >= ROUNDED_ALIKE(c)),
                  "%.3f of the states' numbers are the reference's: other random bits", equal);
    TRIAL_TRY(compare_rows(test->trial, &state, expected, test_found(test, GDN_STATE), bound));
    for (int32_t slot = 0; slot < c->num_slots; slot++) {
        test_take(test, GDN_STATE, (size_t)(slot * c->state_stride) * e,
                  left[slot] ? (size_t)(c->v.num_v_heads * size) * e : 0);
    }
    return kernel_test_rest(test, GDN_STATE);
}

/* Entries of the window that the step of request `r` leaves; the bits are inputs' own. What lies
 * after them in the request's own window is read by no kernel until a later step. */
static int32_t window_entries(const struct gdn_case *c, int32_t r)
{
    int32_t history = c->v.conv_width - 1;
    return gdn_case_keeps_all(c, r) ? history - 1 + c->tokens[r] : history;
}

/* Compares bits, but takes any NaN as equal to any other. */
static bool same_entries(const uint8_t *expected, const uint8_t *found, size_t count, int32_t dtype)
{
    const size_t e = number_bytes(dtype);
    for (size_t i = 0; i < count; i++) {
        bool nan = isnan(number_load(expected, (int64_t)i, dtype));
        if (nan ? !isnan(number_load(found, (int64_t)i, dtype))
                : memcmp(expected + i * e, found + i * e, e) != 0) {
            return false;
        }
    }
    return true;
}

static enum trial_result verify_windows(struct kernel_test *test, const struct gdn_case *c)
{
    const size_t e = number_bytes(c->v.dtype);
    const uint8_t *expected = test_expected(test, GDN_WINDOW),
                  *found = test_found(test, GDN_WINDOW);
    int32_t owner[GDN_MAX_SLOTS];
    find_owners(c, false, owner);
    for (int64_t row = 0; row < c->num_slots * (int64_t)c->channels && c->window > 0; row++) {
        const int32_t slot = (int32_t)(row / c->channels), r = owner[slot];
        const size_t at = (size_t)(row * c->channel_stride) * e;
        if (r >= 0) {
            TRIAL_FAIL_IF(
                test->trial,
                !same_entries(expected + at, found + at, (size_t)window_entries(c, r), c->v.dtype),
                "the window of channel %lld in slot %d does not hold the step's last "
                "inputs",
                (long long)(row % c->channels), slot);
            test_take(test, GDN_WINDOW, at, (size_t)c->window * e);
        }
    }
    return kernel_test_rest(test, GDN_WINDOW);
}

/* Rows of the ring that the step leaves are held to the reference's; every other byte stays. */
static enum trial_result verify_ring(struct kernel_test *test, const struct gdn_case *c)
{
    const struct gdn_variant *v = &c->v;
    const size_t e = number_bytes(v->dtype);
    const int64_t inputs = v->head_size_k + v->num_v_heads / v->num_k_heads * v->head_size_v;
    const int64_t gates = c->gates / v->num_k_heads;
    const struct {
        struct compared numbers;
        int64_t first;
        struct bound bound;
    } parts[] = {{{"ring", v->dtype, 1, inputs, .num_rows = 1}, 0, bound_of(c)},
                 {{"gates of the ring", ATTN_DTYPE_F32, 1, gates, .num_rows = 1},
                  c->ring_gates,
                  bound_of_dtype(ATTN_DTYPE_F32)}};
    const uint8_t *expected = test_expected(test, GDN_RING), *found = test_found(test, GDN_RING);
    for (int32_t r = 0; r < GDN_REQS && v->replay > 0; r++) {
        for (int32_t t = gdn_case_written(c, r); t < c->tokens[r] && gdn_case_active(c, r); t++) {
            for (int32_t i = 0; i < 2 * v->num_k_heads; i++) {
                const int64_t row = gdn_case_ring_row(c, c->slots[r][0], r, t, i / 2);
                const size_t at = (size_t)(row + parts[i % 2].first) * e;
                const struct compared *numbers = &parts[i % 2].numbers;
                TRIAL_TRY(compare_rows(test->trial, numbers, expected + at, found + at,
                                       parts[i % 2].bound));
                test_take(test, GDN_RING, at, (size_t)numbers->dims * number_bytes(numbers->dtype));
            }
        }
    }
    return kernel_test_rest(test, GDN_RING);
}

static enum trial_result run_gdn(struct trial *trial, const void *variant, uint64_t seed)
{
    struct gdn_case c;
    OWNED(kernel_test_finish) struct kernel_test test;
    struct kernel_call call;
    struct gdn_step s;
    gdn_case_init(&c, variant, &seed);
    gdn_case_place(&c, &test, trial, &seed);
    call_bind(&call, &test, trial->reference, &device_host, test.image.bytes);
    gdn_case_bind(&c, &s, &call);
    enum trial_result result = trial_supports(trial, trial->tested, &s.layer, s.attend.phase)
                                   ? kernel_test_run(&test, call_gdn, &c)
                                   : TRIAL_SKIPPED;
    TRIAL_TRY(c.v.state_dtype != ATTN_DTYPE_F32 ? result : trial_of_layer(trial, &s.layer, result));
    TRIAL_TRY(verify_out(&test, &c));
    if (c.v.invariant > 0) {
        TRIAL_TRY(
            kernel_test_parts(&test, call_gdn, &c, c.v.invariant >= 2 ? 2 * GDN_REQS : GDN_REQS));
    }
    TRIAL_TRY(verify_states(&test, &c));
    TRIAL_TRY(verify_windows(&test, &c));
    return verify_ring(&test, &c);
}

static enum trial_result limits_missing(struct trial *trial, const void *variant, uint64_t seed)
{
    return trial_say(trial, TRIAL_FAILED,
                     "the kernel recurrent is declared without attn_recurrent_caps: the core "
                     "refuses every layer");
}

/* clang-format off */
/* A rule's cases: steps; chunks, whole, with checkpoints and forks; a mixed batch without a
 * convolution; drafts; and chunks with NaN, and with infinities. `norm`: of q and k. */
#define RULE(code, norm)                                                                           \
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, norm, .strided = true, .rule = code},        \
    {GDN_CHUNKS, 0, 1, 3, 24, 32, 4, 64, 0, true, false, norm, .strong = true, .rule = code},      \
    {GDN_CHUNKS, 0, 2, 4, 16, 24, 3, 64, 0, true, true, norm, .by_length = true, .initial = true,  \
     .kept = 24, .rule = code},                                                                    \
    {GDN_MIXED, 0, 2, 2, 24, 16, 0, 0, 0, false, false, norm, .strided = true, .rule = code},      \
    {GDN_DRAFTS, 0, 2, 4, 16, 24, 4, 0, 3, true, false, norm, .initial = true, .kept = 4,          \
     .rule = code},                                                                                \
    {GDN_CHUNKS, 0, 2, 4, 24, 16, 4, 0, 0, true, false, norm, .odd = GDN_NAN, .rule = code},       \
    {GDN_CHUNKS, 0, 2, 4, 24, 16, 4, 0, 0, true, false, norm, .odd = GDN_INFINITE, .rule = code}
#define STATES16(code, dtype, norm)                                                                \
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, norm, .strided = true, .rule = code,         \
     .state_dtype = dtype},                                                                        \
    {GDN_CHUNKS, 0, 1, 2, 32, 24, 4, 64, 0, true, false, norm, .initial = true, .kept = 64,        \
     .rule = code, .state_dtype = dtype},                                                          \
    {GDN_MIXED, 0, 1, 2, 16, 24, 0, 0, 0, false, false, norm, .rule = code, .state_dtype = dtype}, \
    {GDN_DRAFTS, 0, 2, 4, 16, 24, 4, 0, 3, true, false, norm, .kept = 4, .rule = code,             \
     .state_dtype = dtype}
#define REPLAY(code, dtype, norm)                                                                  \
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, norm, .strided = true, .rule = code,         \
     .state_dtype = dtype, .replay = 16},                                                          \
    {GDN_MIXED, 0, 1, 3, 24, 16, 0, 0, 0, false, false, norm, .by_length = true, .rule = code,     \
     .state_dtype = dtype, .replay = 8},                                                           \
    {GDN_CHUNKS, 0, 1, 2, 16, 24, 4, 64, 0, true, false, norm, .initial = true, .kept = 24,        \
     .rule = code, .state_dtype = dtype, .replay = 16},                                            \
    {GDN_DRAFTS, 0, 2, 4, 16, 24, 4, 0, 3, true, false, norm, .kept = 3, .rule = code,             \
     .state_dtype = dtype, .replay = 7},                                                           \
    {GDN_DRAFTS, 0, 1, 2, 24, 16, 4, 0, 5, true, false, norm, .strided = true, .initial = true,    \
     .rule = code, .state_dtype = dtype, .replay = 16}
static const struct gdn_variant variants[] = {
    /* shape, dtype, Hk, Hv, Dk, Dv, width, chunk, drafted, silu, bias, l2norm, by_length, strong,
     * strided, initial, kept, odd */
    {GDN_STEPS, 0, 2, 4, 32, 32, 4, 0, 0, true, false, true, false, false, false},
    {GDN_STEPS, 0, 1, 3, 64, 24, 4, 0, 0, true, true, true, true, true, true},
    {GDN_STEPS, 0, 2, 2, 16, 40, 0, 0, 0, false, false, false, false, false, true},
    {GDN_STEPS, 0, 1, 2, 128, 128, 4, 64, 0, true, false, true, false, false, false},
    {GDN_CHUNKS, 0, 2, 4, 32, 48, 4, 64, 0, true, true, true, false, false, true},
    {GDN_CHUNKS, 0, 1, 2, 48, 32, 4, 0, 0, true, false, true, true, true, false},
    {GDN_CHUNKS, 0, 1, 1, 128, 128, 4, 64, 0, true, false, true, false, false, false},
    {GDN_CHUNKS, 0, 1, 3, 24, 16, 0, 16, 0, false, false, true, false, true, true},
    {GDN_MIXED, 0, 2, 4, 32, 32, 4, 64, 0, true, false, true, false, false, false},
    {GDN_MIXED, 0, 1, 2, 64, 16, 2, 7, 0, false, true, false, true, false, true},
    {GDN_MIXED, 0, 2, 2, 16, 32, 1, 0, 0, true, false, true, false, false, false},
    {GDN_MIXED, 0, 1, 2, 16, 72, 0, 32, 0, false, false, false, true, true, false},
    {GDN_DRAFTS, 0, 2, 4, 32, 24, 4, 0, 3, true, false, true, false, false, false},
    {GDN_DRAFTS, 0, 1, 2, 64, 64, 4, 64, 1, true, true, true, true, true, true},
    {GDN_DRAFTS, 0, 1, 3, 16, 40, 0, 0, 5, false, false, true, false, false, true},
    {GDN_DRAFTS, 0, 2, 2, 24, 32, 3, 0, 2, false, true, false, false, false, false},
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, false, true, false, false, true, true, 1},
    {GDN_CHUNKS, 0, 1, 2, 32, 32, 4, 64, 0, true, true, true, false, false, false, false, 24},
    {GDN_CHUNKS, 0, 1, 2, 48, 24, 4, 64, 0, true, false, true, true, false, true, true, 64},
    {GDN_MIXED, 0, 1, 2, 16, 32, 0, 0, 0, false, false, true, false, false, false, true, 0},
    {GDN_MIXED, 0, 2, 2, 24, 16, 3, 0, 0, true, true, true, false, true, false, true, 33},
    {GDN_DRAFTS, 0, 2, 4, 32, 24, 4, 0, 3, true, false, true, false, false, true, true, 4},
    {GDN_DRAFTS, 0, 1, 2, 24, 16, 0, 0, 5, false, false, true, true, false, false, false, 3},
    {GDN_STEPS, 0, 2, 4, 24, 32, 4, 0, 0, true, false, true, false, false, false, false, 0, GDN_NAN},
    {GDN_CHUNKS, 0, 2, 4, 24, 32, 4, 64, 0, true, false, true, false, false, false, false, 0, GDN_NAN},
    {GDN_MIXED, 0, 1, 2, 32, 40, 0, 0, 0, false, false, true, false, false, false, false, 0, GDN_NAN},
    STATES16(GDN_GATED_DELTA, ATTN_DTYPE_BF16, true),
    STATES16(GDN_GATED_DELTA, ATTN_DTYPE_F16, true),
    RULE(GDN_KDA, true),
    RULE(GDN_BOUNDED, true),
    RULE(GDN_KDA_BOUNDED, true),
    RULE(GDN_KDA_GIVEN, true),
    RULE(GDN_MAMBA2, false),
    RULE(GDN_MAMBA2_LIMITS, false),
    RULE(GDN_LIGHTNING, false),
    STATES16(GDN_KDA, ATTN_DTYPE_BF16, true),
    STATES16(GDN_MAMBA2, ATTN_DTYPE_F16, false),
    /* a norm and a gate of the output */
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, true, .strided = true, .norm = 1},
    {GDN_CHUNKS, 0, 1, 4, 24, 32, 4, 64, 0, true, false, true, .rule = GDN_KDA, .norm = 2},
    {GDN_MIXED, 0, 2, 6, 16, 40, 4, 0, 0, true, true, false, .strided = true, .rule = GDN_MAMBA2, .norm = 3},
    {GDN_DRAFTS, 0, 2, 4, 16, 24, 4, 0, 3, true, false, true, .norm = 2},
    /* numbers whose squares are no float32, and infinities under a norm */
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, true, .odd = GDN_INFINITE},
    {GDN_CHUNKS, 0, 2, 4, 32, 24, 4, 0, 0, false, true, true, .odd = GDN_INFINITE, .norm = 1},
    {GDN_MIXED, 0, 2, 4, 16, 24, 0, 0, 0, false, false, true, .rule = GDN_KDA, .odd = GDN_INFINITE, .norm = 2},
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, false, true, .odd = GDN_INFINITE, .norm = 3},
    {GDN_CHUNKS, 0, 2, 4, 24, 16, 4, 0, 0, false, false, true, .odd = GDN_HUGE, .norm = 1},
    {GDN_STEPS, 0, 2, 4, 24, 16, 0, 0, 0, false, false, true, .rule = GDN_KDA, .odd = GDN_HUGE, .norm = 2},
    /* a ring of inputs: steps; requests of many tokens; drafts; forks; checkpoints between writes */
    REPLAY(GDN_GATED_DELTA, 0, true),
    REPLAY(GDN_KDA, ATTN_DTYPE_BF16, true),
    REPLAY(GDN_KDA_BOUNDED, 0, true),
    REPLAY(GDN_KDA_GIVEN, ATTN_DTYPE_F16, true),
    REPLAY(GDN_MAMBA2, 0, false),
    REPLAY(GDN_LIGHTNING, ATTN_DTYPE_BF16, false),
    {GDN_STEPS, 0, 1, 2, 24, 16, 4, 0, 0, true, true, true, .replay = 1},
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, true, .replay = 16, .odd = GDN_NAN},
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, true, .replay = 16, .norm = 1},
    {GDN_STEPS, 0, 1, 3, 200, 33, 0, 0, 0, false, false, true, .strided = true, .replay = 4},
    /* states rounded by a seed */
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, true, true, .strided = true, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_MIXED, 0, 1, 2, 16, 24, 0, 0, 0, false, false, true, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_CHUNKS, 0, 1, 3, 24, 32, 4, 64, 0, true, false, true, .kept = 24, .state_dtype = ATTN_DTYPE_BF16, .philox = 7},
    {GDN_MIXED, 0, 2, 4, 20, 24, 0, 0, 0, false, false, false, .initial = true, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_F16, .philox = 10},
    {GDN_DRAFTS, 0, 2, 4, 32, 24, 4, 0, 3, true, false, true, .kept = 4, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_F16, .philox = 10},
    {GDN_DRAFTS, 0, 1, 2, 24, 16, 0, 0, 2, false, false, true, .kept = 4, .state_dtype = ATTN_DTYPE_BF16, .replay = 8, .philox = 1},
    {GDN_STEPS, 0, 2, 4, 32, 24, 4, 0, 0, true, false, true, .state_dtype = ATTN_DTYPE_F16, .odd = GDN_NAN, .philox = 16},
    /* heads for which backends have other kernels */
    {GDN_MIXED, 0, 1, 1, 512, 16, 0, 64, 0, false, false, true, false, false, false},
    {GDN_MIXED, 0, 1, 2, 256, 64, 4, 0, 0, true, true, false, false, false, false, true, 24, GDN_USUAL, 0, GDN_MAMBA2},
    {GDN_DRAFTS, 0, 1, 1, 200, 24, 4, 0, 3, true, false, true, false, false, true, true, 4, GDN_USUAL, 0, GDN_KDA, ATTN_DTYPE_BF16},
    RULE(GDN_DELTA_SKIP, true),
    RULE(GDN_DELTA_STEP, true),
    RULE(GDN_ADDITIVE_CHANNELS, false),
};
/* Batches that fill a GPU: heads walked whole, with checkpoints and without; heads that are too many
 * to be walked in quarters and too few to be walked whole; heads of the usual sizes for each rule. */
static const struct gdn_variant large_variants[] = {
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 12, 128, 128, 4, 64, 0, true, true, true, false, false, false, false, 0},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 4, 12, 128, 128, 4, 64, 0, true, false, true, false, false, true, true, 64},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 4, 12, 128, 128, 0, 64, 0, false, false, true, false, false, false, true, 0},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 4, 8, 128, 128, 4, 64, 0, true, true, true, false, false, false, false, 0},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 8, 96, 104, 4, 64, 0, true, false, true, false, false, true, true, 64},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 0, true, true, false, false, false, true, false, 0, GDN_USUAL, 0, GDN_MAMBA2},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 32, 96, 80, 4, 64, 0, true, false, false, true, true, true, true, 64, GDN_USUAL, 0, GDN_MAMBA2_LIMITS},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 64, 4, 64, 0, true, false, false, false, false, false, true, 64, GDN_USUAL, 0, GDN_MAMBA2, ATTN_DTYPE_F16},
    {GDN_MIXED, ATTN_DTYPE_BF16, 2, 2, 128, 128, 0, 64, 0, false, false, false, false, true, false, false, 0, GDN_USUAL, 0, GDN_LIGHTNING},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 3, 3, 64, 40, 0, 64, 0, false, false, true, false, false, false, false, 0, GDN_NAN, 0, GDN_LIGHTNING, ATTN_DTYPE_BF16},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 6, 128, 128, 4, 64, 0, true, false, true, false, false, true, false, 0, GDN_USUAL, 0, GDN_BOUNDED},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, false, true, false, true, 64, GDN_USUAL, 0, GDN_GATED_DELTA, ATTN_DTYPE_BF16},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 2, 128, 128, 4, 64, 0, true, true, true, false, true, true, false, 0, GDN_USUAL, 0, GDN_KDA},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 1, 3, 96, 80, 4, 64, 0, true, false, true, true, false, true, true, 64, GDN_USUAL, 0, GDN_KDA_BOUNDED, ATTN_DTYPE_BF16},
    {GDN_MIXED, ATTN_DTYPE_BF16, 2, 2, 128, 128, 0, 64, 0, false, false, true, false, true, false, false, 0, GDN_USUAL, 0, GDN_KDA_GIVEN},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 64, 40, 4, 64, 0, true, false, true, false, false, false, false, 0, GDN_NAN, 0, GDN_KDA},
    {GDN_STEPS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, false, false, true, true, 0, GDN_USUAL, 0, GDN_GATED_DELTA, ATTN_DTYPE_BF16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 3, 3, 128, 128, 4, 64, 0, true, false, true, false, true, false, false, 0, GDN_USUAL, 0, GDN_KDA},
    {GDN_STEPS, ATTN_DTYPE_BF16, 2, 2, 128, 72, 4, 64, 0, true, false, true, false, false, true, false, 0, GDN_USUAL, 0, GDN_KDA_BOUNDED, ATTN_DTYPE_F16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 0, true, true, false, false, false, false, false, 0, GDN_USUAL, 0, GDN_MAMBA2, ATTN_DTYPE_F16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, .strided = true, .initial = true, .kept = 64},
    {GDN_STEPS, ATTN_DTYPE_BF16, 3, 3, 128, 72, 4, 64, 0, true, false, true, .kept = 64, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 0, true, true, false, .initial = true, .kept = 64, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_F16},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, false, true, .rule = GDN_DELTA_SKIP},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 64, 0, 64, 0, false, false, true, .strided = true, .rule = GDN_DELTA_STEP},
    {GDN_MIXED, ATTN_DTYPE_BF16, 2, 4, 128, 64, 4, 64, 0, true, true, true, .rule = GDN_ADDITIVE_CHANNELS},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 4, 12, 128, 128, 4, 64, 0, true, true, true, .invariant = 1},
    /* states rounded by a seed */
    {GDN_STEPS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_STEPS, ATTN_DTYPE_BF16, 96, 96, 128, 128, 4, 64, 0, true, true, true, .state_dtype = ATTN_DTYPE_F16, .philox = 10},
    {GDN_STEPS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 0, true, true, false, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_F16, .philox = 7},
    {GDN_STEPS, ATTN_DTYPE_BF16, 3, 3, 128, 72, 4, 64, 0, true, false, true, .kept = 64, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_STEPS, ATTN_DTYPE_BF16, 3, 3, 128, 128, 4, 64, 0, true, false, true, .strided = true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16, .philox = 10},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, .initial = true, .kept = 64, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 4, 12, 128, 128, 4, 64, 0, true, true, true, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 64, 4, 64, 0, true, false, false, .kept = 64, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 2, 128, 128, 4, 64, 0, true, false, true, .initial = true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16, .philox = 10},
    {GDN_LONG, ATTN_DTYPE_BF16, 1, 1, 128, 128, 4, 64, 0, true, false, true, .state_dtype = ATTN_DTYPE_BF16, .philox = 10},
    /* a ring of inputs: steps, forks, prompts with tokens in the ring, drafts */
    {GDN_STEPS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, .replay = 16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 3, 3, 128, 128, 4, 64, 0, true, false, true, .strided = true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16},
    {GDN_STEPS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 0, true, true, false, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_F16, .replay = 8},
    {GDN_MIXED, ATTN_DTYPE_BF16, 2, 4, 128, 72, 4, 64, 0, true, false, true, .initial = true, .rule = GDN_KDA_BOUNDED, .replay = 16},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 0, true, true, true, .strided = true, .kept = 64, .replay = 16},
    {GDN_CHUNKS, ATTN_DTYPE_BF16, 2, 2, 128, 128, 4, 64, 0, true, false, true, .initial = true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16},
    {GDN_DRAFTS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 3, true, false, true, .initial = true, .replay = 16},
    {GDN_DRAFTS, ATTN_DTYPE_BF16, 3, 3, 128, 128, 4, 64, 3, true, true, true, .strided = true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16, .norm = 1},
    {GDN_DRAFTS, ATTN_DTYPE_BF16, 3, 3, 128, 128, 4, 64, 3, true, false, true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16, .replay = 16, .philox = 10},
    {GDN_DRAFTS, ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 64, 7, true, false, true, .replay = 16},
    {GDN_DRAFTS, ATTN_DTYPE_BF16, 1, 8, 128, 64, 4, 64, 2, true, false, false, .kept = 3, .rule = GDN_MAMBA2, .state_dtype = ATTN_DTYPE_F16, .replay = 8},
    /* so many heads that a group of threads may have all 128 rows of one */
    {GDN_STEPS, ATTN_DTYPE_BF16, 96, 96, 128, 128, 4, 64, 0, true, true, true, .replay = 4},
    /* many chunks of few rows, which may be prepared while earlier ones are walked */
    {GDN_LONG, ATTN_DTYPE_BF16, 12, 12, 128, 32, 4, 64, 0, true, true, true},
    {GDN_LONG, ATTN_DTYPE_BF16, 12, 12, 128, 32, 4, 64, 0, true, false, true, .rule = GDN_KDA},
    {GDN_LONG, ATTN_DTYPE_BF16, 12, 12, 128, 32, 4, 64, 0, true, true, false, .rule = GDN_MAMBA2},
    {GDN_LONG, ATTN_DTYPE_BF16, 12, 12, 96, 24, 4, 64, 0, true, false, true, .strided = true, .rule = GDN_KDA_BOUNDED, .state_dtype = ATTN_DTYPE_BF16},
    /* one head, which may be walked in segments */
    {GDN_LONG, ATTN_DTYPE_BF16, 1, 1, 128, 128, 4, 64, 0, true, true, true, .initial = true},
    {GDN_LONG, ATTN_DTYPE_BF16, 1, 1, 128, 128, 0, 64, 0, false, false, true, .strided = true},
    {GDN_LONG, ATTN_DTYPE_BF16, 1, 1, 128, 128, 4, 64, 0, true, false, true, .rule = GDN_KDA, .state_dtype = ATTN_DTYPE_BF16},
};
/* clang-format on */

/* Masks of a declaration: 0 is code 0 alone. */
static bool declared(uint32_t mask, int32_t code)
{
    return (mask != 0 ? mask : 1) >> code & 1;
}

static bool takes_rule(const struct attn_backend_caps *caps, const struct gdn_variant *v)
{
    static const struct attn_recurrent_rule_caps gated_delta;
    const struct attn_recurrent_rule *r = &gdn_rules[v->rule].rule;
    const struct attn_recurrent_rule_caps *c =
        backend_extension(caps, ATTN_EXT_DRAFT_RECURRENT_CAPS, sizeof *c);
    c = c != NULL ? c : &gated_delta;
    return declared(c->rules, r->rule) && declared(c->gates, r->gate) &&
           declared(c->write_gates, r->write_gate) && r->gate_per_channel <= c->gate_per_channel &&
           r->values_first <= c->values_first && r->has_skip <= c->skip &&
           (v->norm > 0) <= c->norm && (v->philox > 0) <= c->stochastic_rounding;
}

static bool within(const struct attn_recurrent_caps *caps, const struct gdn_variant *v)
{
    const uint32_t states = caps->state_dtypes != 0 ? caps->state_dtypes : 1u << ATTN_DTYPE_F32;
    return (states >> (v->state_dtype != 0 ? v->state_dtype : ATTN_DTYPE_F32) & 1) &&
           v->head_size_k <= caps->head_size_k_max && v->head_size_v <= caps->head_size_v_max &&
           v->conv_width <= caps->conv_width_max && v->drafted <= caps->max_speculative_tokens &&
           v->initial <= caps->initial_slots && (v->kept > 0) <= caps->checkpoints;
}

static void name_number(char part[24], const char *name, int32_t number)
{
    if (number > 0) {
        snprintf(part, 24, ".%s%d", name, number);
    }
}

static void try_gdn(const struct kernel_sink *sink, const struct attn_recurrent_caps *caps,
                    const struct gdn_variant *v)
{
    static const char *const odds[GDN_ODD_COUNT] = {"", ".nan", ".infinite", ".huge"};
    char kept[24] = "", invariant[24] = "", state[32] = "", norm[24] = "", replay[24] = "";
    if ((v->replay > 0 && !(sink->caps->cache_roles >> ATTN_CACHE_REPLAY & 1)) ||
        !(sink->caps->dtypes >> v->dtype & 1) || !within(caps, v) || !takes_rule(sink->caps, v)) {
        return;
    }
    name_number(kept, "kept", v->kept);
    name_number(invariant, "invariant", v->invariant);
    name_number(norm, "norm", v->norm);
    name_number(replay, "replay", v->replay);
    if (v->state_dtype != 0) {
        snprintf(state, sizeof state, v->philox > 0 ? ".state_%s.philox%d" : ".state_%s",
                 dtype_name(v->state_dtype), v->philox);
    }
    kernel_try(sink, run_gdn, v, "%s.%s.%s.hk%d.hv%d.dk%d.dv%d.w%d.c%d.n%d%s%s%s%s%s%s%s%s%s%s%s",
               gdn_rules[v->rule].name, dtype_name(v->dtype), gdn_shape_names[v->shape],
               v->num_k_heads, v->num_v_heads, v->head_size_k, v->head_size_v, v->conv_width,
               v->chunk_size, v->drafted, v->bias ? ".bias" : "", v->by_length ? ".by_length" : "",
               v->strong ? ".strong" : "", v->strided ? ".strided" : "",
               v->initial ? ".initial" : "", kept, odds[v->odd], invariant, state, norm, replay);
}

void gdn_cases(const struct kernel_sink *sink)
{
    const struct attn_recurrent_caps *caps =
        backend_extension(sink->caps, ATTN_EXT_CAPS_RECURRENT, sizeof *caps);
    if (caps == NULL) {
        kernel_try(sink, limits_missing, NULL, "gated_delta.limits");
        return;
    }
    for (int32_t dtype = ATTN_DTYPE_F16; dtype <= ATTN_DTYPE_F32; dtype++) {
        for (size_t i = 0; i < sizeof variants / sizeof *variants; i++) {
            struct gdn_variant v = variants[i];
            v.dtype = dtype;
            if (v.odd == GDN_HUGE &&
                (dtype == ATTN_DTYPE_F16 || sink->caps->device.type != ATTN_DEVICE_CPU)) {
                continue; /* GPUs add squares in float32 */
            }
            if (v.odd != GDN_HUGE &&
                (v.rule != GDN_GATED_DELTA || v.state_dtype != 0 || v.norm != 0 || v.replay != 0) &&
                dtype != ATTN_DTYPE_F16 + (int32_t)i % 3) {
                continue; /* one dtype each */
            }
            try_gdn(sink, caps, &v);
            /* one in four again, level 2 where a request can be cut or is a step */
            for (v.invariant = 1; v.invariant <= 2 && i % 4 == 0 && v.odd == GDN_USUAL;
                 v.invariant++) {
                const uint64_t needed = v.invariant == 1 ? ATTN_FEATURE_BATCH_INVARIANT
                                                         : ATTN_FEATURE_BATCH_INVARIANT_PREFIX;
                bool cut = v.drafted == 0 && !v.initial && v.kept == 0 && v.replay == 0;
                if (sink->caps->features & needed && (cut || v.invariant == 1)) {
                    try_gdn(sink, caps, &v);
                }
            }
        }
    }
    for (size_t i = 0; i < sizeof large_variants / sizeof *large_variants && sink->full; i++) {
        try_gdn(sink, caps, &large_variants[i]);
    }
}
