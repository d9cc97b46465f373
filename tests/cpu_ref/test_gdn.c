/* SPDX-License-Identifier: Apache-2.0 */
/* gated_delta against the recurrence in float64, token by token, over sequences that the kernel
 * sees in steps. Usage: test_gdn FILE.so */
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "delta.h"
#include "formats.h"
#include "problem.h"
#include "support/test.h"

#define SEED 53
#define COUNT(array) ((int32_t)(sizeof(array) / sizeof *(array)))

/* dtype, Hk, Hv, Dk, Dv; convolution's width, SiLU, bias; norm, chunk_size, drafted; requests;
 * steps */
/* clang-format off */
static const struct gdn_case cases[] = {
    {"one token",
     ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 0, 1, 0, 0, 3, {{1, 1, 1}, {1, 1, 1}, {1, 0, 1}}},
    {"chunk edges",
     ATTN_DTYPE_F32, 2, 4, 16, 40, 4, 1, 1, 1, 0, 0, 6,
     {{1, 63, 64, 65, 128, 130}, {64, 1, 2, 1, 70, 1}}, .first_row = 2},
    {"Qwen3-Next",
     ATTN_DTYPE_BF16, 2, 4, 128, 128, 4, 1, 0, 1, 64, 0, 3, {{40, 70, 5}, {1, 1, 30}}},
    {"Dk larger, f16",
     ATTN_DTYPE_F16, 1, 3, 64, 8, 4, 1, 1, 1, 16, 0, 3, {{33, 16, 17}, {1, 2, 3}}, .by_length = 1},
    {"no convolution",
     ATTN_DTYPE_F32, 2, 2, 16, 24, 0, 0, 0, 1, 7, 0, 3, {{20, 1, 8}, {3, 1, 1}}},
    {"width 2, no SiLU, no norm",
     ATTN_DTYPE_F32, 1, 2, 16, 8, 2, 0, 0, 0, 5, 0, 2, {{11, 1}, {1, 12}}},
    {"width 1",
     ATTN_DTYPE_F32, 1, 2, 16, 8, 1, 1, 0, 1, 0, 0, 2, {{11, 1}, {1, 12}}},
    {"skipped and empty",
     ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 0, 1, 0, 0, 5,
     {{5, -1, 0, 70, -1}, {1, -1, 1, 1, 3}}, .first_row = 1},
    {"drafts",
     ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 0, 1, 0, 3, 4,
     {{4, 1, 9, 2}, {4, 4, 1, 3}, {1, 2, 4, 4}},
     {{1, 1, 1, 1}, {3, 1, 1, 2}, {4, 2, 1, 1}}},
    {"one draft, bf16",
     ATTN_DTYPE_BF16, 1, 2, 32, 16, 4, 1, 0, 1, 0, 1, 3,
     {{2, 70, 2}, {2, 2, 1}, {1, 2, 2}},
     {{1, 1, 1}, {2, 1, 1}, {1, 2, 1}}},
    {"decays of 0",
     ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 0, 1, 0, 0, 2, {{70, 20}, {5, 1}}, .strong = 1},
    {"largest",
     ATTN_DTYPE_F32, 1, 1, 512, 512, 4, 1, 0, 1, 0, 0, 1, {{9}, {1}}},
};
/* clang-format on */

static void expect(const struct gdn_case *c, double got, double want, double bound, double rms,
                   const char *what, int64_t at)
{
    if (!(fabs(got - want) <= bound * (fabs(want) + rms))) {
        fail_msg("%s: %s, element %lld: %.9g, not %.9g", c->name, what, (long long)at, got, want);
    }
}

static double rms_of(const double *row, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += row[i] * row[i];
    }
    return sqrt(sum / count);
}

static void compare_state(const struct delta *p, int32_t slot, int32_t h, const double *want)
{
    int32_t count = p->c->dv * p->c->dk;
    const float *got = p->states + ((int64_t)slot * p->c->hv + h) * count;
    double rms = rms_of(want, count);
    for (int32_t i = 0; i < count; i++) {
        expect(p->c, got[i], want[i], 2e-6, rms, "state", i);
    }
}

/* One request: outputs, and the states that have to be left, against the recurrence. */
static void compare_request(struct delta *p, const struct step *s, int32_t step, int32_t r)
{
    const struct gdn_case *c = p->c;
    int32_t tokens = c->steps[step][r], size = c->dv * c->dk;
    bool all = c->drafted > 0 && tokens <= 1 + c->drafted;
    double bound = 1.01 * format_half_step(c->dtype) + 2e-6, o[512];
    /* how many of them the next step accepts; the oracle's own state goes no further */
    int32_t kept =
        all && step < 2 && c->accepted[step + 1][r] > 0 ? c->accepted[step + 1][r] : tokens;
    double *ahead = problem_memory(size, sizeof *ahead, 0);
    for (int32_t h = 0; h < c->hv; h++) {
        double *state = p->state + ((int64_t)r * c->hv + h) * size;
        memcpy(ahead, state, (size_t)size * sizeof *ahead);
        for (int32_t t = 0; t < tokens; t++) {
            delta_recur(p, r, p->length[r] + t, h, ahead, o);
            int64_t at = ((int64_t)(s->query_start[r] + t) * c->hv + h) * c->dv;
            double rms = rms_of(o, c->dv);
            for (int32_t d = 0; d < c->dv; d++) {
                expect(c, format_load(p->out_rows, at + d, c->dtype), o[d], bound, rms, "out",
                       at + d);
            }
            if (all) {
                compare_state(p, p->slots[r][t], h, ahead);
            }
            if (t + 1 == kept) {
                memcpy(state, ahead, (size_t)size * sizeof *ahead);
            }
        }
        if (!all) {
            compare_state(p, p->slots[r][0], h, ahead);
        }
    }
    free(ahead);
    p->length[r] += kept;
}

/* The window begins at the tokens before the accepted ones. */
static void compare_window(const struct delta *p, int32_t step, int32_t r, int32_t before)
{
    const struct gdn_case *c = p->c;
    int32_t tokens = c->steps[step][r];
    bool all = c->drafted > 0 && tokens <= 1 + c->drafted;
    int32_t first = before + (all ? 1 : tokens) - (c->conv_width - 1);
    for (int32_t channel = 0; channel < p->channels; channel++) {
        int64_t at = ((int64_t)p->slots[r][0] * p->channels + channel) * (p->window + 1);
        for (int32_t i = 0; i < c->conv_width - 1 + (all ? tokens - 1 : 0); i++) {
            double want =
                first + i < 0
                    ? 0
                    : p->mixed[((int64_t)r * MAX_SEQUENCE + first + i) * p->channels + channel];
            expect(c, format_load(p->windows, at + i, c->dtype), want, 0, 0, "window", at + i);
        }
    }
}

static bool slot_used(const struct delta *p, int32_t step, int32_t slot)
{
    for (int32_t i = 0; i < p->c->num_reqs * 4; i++) {
        int32_t tokens = p->c->steps[step][i / 4];
        bool all = p->c->drafted > 0 && tokens <= 1 + p->c->drafted;
        if (p->slots[i / 4][i % 4] == slot && i % 4 < (all ? tokens : tokens > 0)) {
            return true;
        }
    }
    return false;
}

static void run_step(struct delta *p, int32_t step)
{
    const struct gdn_case *c = p->c;
    struct attn_error error = ATTN_ERROR_INIT;
    struct step s;
    step_create(p, &s, step);
    int64_t head = (int64_t)c->hv * c->dv * c->dk,
            row = (int64_t)c->hv * c->dv * format_bytes(c->dtype);
    float *before = problem_memory(NUM_SLOTS * head, sizeof *before, 0);
    memcpy(before, p->states, (size_t)(NUM_SLOTS * head) * sizeof *before);
    if (threaded.kernels->gated_delta(&s.args, &error) != ATTN_OK) {
        fail_msg("%s: %s: %s", c->name, error.field, error.message);
    }
    for (int32_t slot = 0; slot < NUM_SLOTS; slot++) {
        if (!slot_used(p, step, slot)) {
            assert_memory_equal(before + slot * head, p->states + slot * head, (size_t)head * 4);
        }
    }
    for (int64_t t = 0; t < s.rows + 2; t++) {
        bool written = false;
        for (int32_t r = 0; r < c->num_reqs; r++) {
            written |= c->steps[step][r] > 0 && t >= s.query_start[r] && t < s.query_start[r + 1];
        }
        for (int64_t i = 0; i < row && !written; i++) {
            assert_int_equal(p->out_rows[t * row + i], POISON);
        }
    }
    for (int32_t r = 0; r < c->num_reqs; r++) {
        if (c->steps[step][r] > 0) {
            int32_t length = p->length[r];
            compare_request(p, &s, step, r);
            compare_window(p, step, r, length);
        }
    }
    free(before);
    step_destroy(p);
}

static void test_cases(void **state)
{
    (void)state;
    for (int32_t i = 0; i < COUNT(cases); i++) {
        struct delta *p = delta_create(&cases[i]);
        for (int32_t step = 0; step < 3; step++) {
            int32_t tokens = 0;
            for (int32_t r = 0; r < cases[i].num_reqs; r++) {
                tokens += cases[i].steps[step][r] > 0;
            }
            if (tokens > 0) {
                run_step(p, step);
            }
        }
        delta_destroy(p);
    }
}

/* A prompt in one call, in chunks of any size, is what its tokens give one by one: 1e-5 of the
 * outputs' RMS, states being float32 between calls. */
static void test_chunks_are_steps(void **state)
{
    enum { LENGTH = 150 };
    static const struct gdn_case whole = {"whole", ATTN_DTYPE_F32, 2, 4, 32, 48, 4, 1, 0, 1, 0, 0,
                                          1,       {{LENGTH}}};
    (void)state;
    for (int32_t chunk = 0; chunk < 4; chunk++) {
        static const int32_t sizes[] = {0, 1, 17, 4096};
        struct gdn_case chunked = whole, single = whole;
        chunked.chunk_size = sizes[chunk];
        single.steps[0][0] = 1;
        random_seed(SEED);
        struct delta *p = delta_create(&chunked);
        random_seed(SEED);
        struct delta *one = delta_create(&single);
        struct step s;
        double sum = 0, largest = 0;
        step_create(p, &s, 0);
        assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
        float *out = problem_memory(LENGTH * 4 * 48, 4, 0);
        memcpy(out, p->out_rows, LENGTH * 4 * 48 * 4);
        step_destroy(p);
        for (int32_t t = 0; t < LENGTH; t++) {
            step_create(one, &s, 0);
            assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
            for (int32_t i = 0; i < 4 * 48; i++) {
                double got = ((float *)one->out_rows)[i], want = out[t * 4 * 48 + i];
                sum += want * want;
                largest = fmax(largest, fabs(got - want));
            }
            one->length[0]++;
            step_destroy(one);
        }
        print_message("chunk_size %d: %.2g of the RMS\n", sizes[chunk],
                      largest / sqrt(sum / (LENGTH * 4 * 48)));
        assert_true(largest <= 1e-5 * sqrt(sum / (LENGTH * 4 * 48)));
        free(out);
        delta_destroy(p);
        delta_destroy(one);
    }
}

/* From each checkpoint of a prompt on, read where it lies, the rest of the prompt gives the same
 * outputs, to 1e-5 of their RMS, and leaves the checkpoint as it was. */
static void test_checkpoints(void **state)
{
    enum { LENGTH = 150, INTERVAL = 48, KEPT = LENGTH / INTERVAL, WIDTH = 4 * 48 };
    const size_t size = 4 * 48 * 32 * sizeof(float);
    struct gdn_case c = {"checkpoints", ATTN_DTYPE_F32, 2, 4, 32, 48, 4, 1, 0, 1, 0, 0, 1,
                         {{LENGTH}}};
    static float out[LENGTH * WIDTH], kept[4 * 48 * 32];
    struct step s;
    (void)state;
    struct delta *p = delta_create(&c);
    const int32_t *slots = p->slots[1]; /* of a request that is not there */
    step_create(p, &s, 0);
    s.desc.checkpoint_interval = INTERVAL;
    s.states.checkpoint_slots = slots;
    s.states.checkpoint_slots_stride = 4;
    assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
    memcpy(out, p->out_rows, sizeof out);
    step_destroy(p);
    for (int32_t i = 0; i < KEPT; i++) {
        const uint8_t *checkpoint = (const uint8_t *)p->states + (size_t)slots[i] * size;
        double sum = 0, largest = 0;
        int32_t done = (i + 1) * INTERVAL;
        memcpy(kept, checkpoint, size);
        c.steps[0][0] = LENGTH - done;
        p->length[0] = done;
        step_create(p, &s, 0);
        s.desc.has_initial_slots = 1;
        s.states.initial_slots = &slots[i];
        assert_int_equal(threaded.kernels->gated_delta(&s.args, NULL), ATTN_OK);
        for (int32_t j = 0; j < (LENGTH - done) * WIDTH; j++) {
            double got = ((float *)p->out_rows)[j], want = out[done * WIDTH + j];
            sum += want * want;
            largest = fmax(largest, fabs(got - want));
        }
        step_destroy(p);
        assert_true(sum > 0 && largest <= 1e-5 * sqrt(sum / ((LENGTH - done) * WIDTH)));
        assert_memory_equal(kept, checkpoint, size);
    }
    delta_destroy(p);
}

/* Slots, which a step reads: one defect each, with the field that the answer names; nothing is
 * written. */
struct defect {
    const char *field;
    void (*apply)(struct step *s);
};
#define DEFECT(name, statement)                                                                    \
    static void name(struct step *s)                                                               \
    {                                                                                              \
        statement;                                                                                 \
    }
static const int32_t five[] = {1, 5}, none[] = {0, 1}, beyond[] = {0, NUM_SLOTS};
DEFECT(high_slot, s->slots[1][2] = NUM_SLOTS)
DEFECT(too_many_accepted, s->states.num_accepted_tokens = five)
DEFECT(none_accepted, s->states.num_accepted_tokens = none)
DEFECT(high_initial_slot, s->states.initial_slots = beyond)
DEFECT(high_checkpoint_slot, (s->desc.checkpoint_interval = 3, s->states.checkpoint_slots = beyond,
                              s->states.checkpoint_slots_stride = 1))

static const struct defect defects[] = {
    {"state_slots", high_slot},
    {"num_accepted_tokens", too_many_accepted},
    {"num_accepted_tokens", none_accepted},
    {"initial_slots", high_initial_slot},
    {"checkpoint_slots", high_checkpoint_slot},
};

static void test_defects(void **state)
{
    static const struct gdn_case drafts = {
        "defects", ATTN_DTYPE_F32, 2, 4, 16, 24, 4, 1, 1, 1, 0, 3, 2, {{4, 3}}, {{1, 1}}};
    (void)state;
    for (int32_t i = 0; i < COUNT(defects); i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        struct delta *p = delta_create(&drafts);
        struct step s;
        step_create(p, &s, 0);
        defects[i].apply(&s);
        attn_status status = serial.kernels->gated_delta(&s.args, &error);
        if (status == ATTN_OK || strcmp(error.field, defects[i].field) != 0 ||
            error.status != status || error.message[0] == '\0') {
            fail_msg("defect %d: status %d, field %s, not %s: %s", (int)i, status, error.field,
                     defects[i].field, error.message);
        }
        assert_int_equal(serial.kernels->gated_delta(&s.args, NULL), status);
        for (int32_t j = 0; j < 7 * 4 * 24 * 4; j++) {
            assert_int_equal(p->out_rows[j], POISON);
        }
        step_destroy(p);
        delta_destroy(p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_chunks_are_steps),
        cmocka_unit_test(test_checkpoints),
        cmocka_unit_test(test_defects),
    };
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
