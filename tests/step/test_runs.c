/* SPDX-License-Identifier: Apache-2.0 */
/* run() by each way in: the plain one, the general one, and what both refuse alike. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "fixture.h"
#include "support/test.h"
#include "support/client.h"

static const struct attn_layer_desc decoder = DECODER();
static const size_t out_bytes = 31 * 4 * 32 * sizeof(float);

static attn_status run(struct fixture *f, const struct attn_step_io *io)
{
    f->error = (struct attn_error)ATTN_ERROR_INIT;
    return f->api->run(f->plan, f->bound, io, &f->error);
}

/* With an lse a run goes the general way, without one the plain way. */
static void check_ways_equal(const char *backend)
{
    OWNED(fixture_finish) struct fixture f;
    OWNED(memory_end) float *general = malloc(out_bytes);
    fixture_mixed(&f, backend, &decoder, false);
    fixture_step(&f);
    memcpy(general, f.out, out_bytes);
    const struct attn_step_io with_lse = f.io;
    f.io.lse = NULL;
    for (uint32_t flags = 0; flags <= ATTN_RUN_NO_WRITE; flags++) {
        memset(f.out, 0xff, out_bytes);
        f.lse[0] = 7;
        f.io.flags = flags;
        assert_ok(run(&f, &f.io));
        assert_memory_equal(f.out, general, out_bytes);
        assert_true(f.lse[0] == 7);
        /* A general run leaves nothing in the prepared calls. */
        assert_ok(run(&f, &with_lse));
    }
    f.batch.num_slots = 0; /* the keys are there: the plain way without a write */
    memset(f.out, 0xff, out_bytes);
    f.io.flags = ATTN_RUN_NO_WRITE;
    fixture_step(&f);
    assert_memory_equal(f.out, general, out_bytes);
    /* keys that no slot takes would be lost, and the attend read what was there before */
    f.io.flags = 0;
    assert_int_equal(run(&f, &f.io), ATTN_ERROR_INVALID_ARGUMENT);
    f.io.k = f.io.v = NULL;
    assert_ok(run(&f, &f.io));
}

TEST(test_ways_are_equal)
{
    check_ways_equal("cpu_ref");
    check_ways_equal("example");
}

static void refuse(struct fixture *f, const struct attn_step_io *io, const char *field)
{
    memset(f->out, 0x55, out_bytes);
    INVALID(&f->error, field, run(f, io));
    for (size_t i = 0; i < out_bytes; i++) {
        assert_int_equal(((unsigned char *)f->out)[i], 0x55);
    }
}

static struct fixture f;

CASE(test_bad_lse, fixture_mixed(&f, "cpu_ref", &decoder, false))
{
    fixture_step(&f);
    struct attn_step_io io = f.io;
    io.lse = io.q;
    refuse(&f, &io, "lse");
    for (int32_t i = 0; i < 2; i++) { /* one head or token less */
        int64_t few[] = {f.io.lse->shape[0] - (i == 0), f.io.lse->shape[1] - (i == 1)};
        struct attn_tensor bad = *f.io.lse;
        bad.shape = few;
        io.lse = &bad;
        refuse(&f, &io, "lse");
    }
}

/* Structs and shapes handed to layer_bind_params are the engine's to forget. */
TEST(test_parameters_are_kept)
{
    struct attn_layer_desc layer = DECODER(.sink_len = 16, .has_sinks = 1);
    OWNED(fixture_finish) struct fixture f;
    float right[31 * 4 * 32];
    fixture_mixed(&f, "cpu_ref", &layer, false);
    fixture_step(&f);
    memcpy(right, f.out, sizeof right);
    memset(f.shapes[5], 0x7f, sizeof f.shapes[5]); /* sink_k's, sink_v's */
    memset(f.shapes[6], 0x7f, sizeof f.shapes[6]);
    memset(&f.tensors[5], 0x7f, 2 * sizeof f.tensors[5]);
    fixture_step(&f);
    assert_memory_equal(f.out, right, sizeof right);
}

CASE(test_extensions, fixture_mixed(&f, "cpu_ref", &decoder, false))
{
    struct attn_ext unknown = {.id = 0x1345, .struct_size = sizeof unknown};
    fixture_step(&f);
    struct attn_step_io io = f.io;
    io.next = &unknown;
    for (int32_t way = 0; way < 2; way++) {
        io.lse = way == 0 ? NULL : f.io.lse;
        unknown.flags = 0;
        assert_int_equal(run(&f, &io), ATTN_ERROR_EXTENSION);
        unknown.flags = ATTN_EXT_OPTIONAL;
        assert_ok(run(&f, &io));
    }
}

struct grown_io {
    struct attn_step_io io;
    uint64_t tail;
};

CASE(test_older_and_newer_io, fixture_mixed(&f, "cpu_ref", &decoder, false))
{
    fixture_step(&f);
    struct grown_io grown = {f.io, 0};
    grown.io.struct_size = sizeof grown;
    assert_ok(run(&f, &grown.io));
    grown.tail = 1;
    assert_int_equal(run(&f, &grown.io), ATTN_ERROR_STRUCT_SIZE);
    grown.io.struct_size = 16;
    assert_int_equal(run(&f, &grown.io), ATTN_ERROR_STRUCT_SIZE);
}

TEST(test_order_and_owner)
{
    OWNED(fixture_finish) struct fixture f, other;
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    fixture_mixed(&other, "cpu_ref", &decoder, false);
    fixture_step(&f);
    INVALID(&f.error, "layer",
            f.api->run(f.plan, f.api->model_layer(other.model, 0), &f.io, &f.error));
    INVALID(&f.error, "plan", f.api->run(NULL, f.bound, &f.io, &f.error));
    f.batch.num_reqs = -1; /* a plan that failed leaves no batch */
    assert_int_not_equal(f.api->plan_batch(f.plan, &f.batch, NULL, NULL), ATTN_OK);
    REFUSED_AS(ATTN_ERROR_ORDER, &f.error, "plan", run(&f, &f.io));
}

/* Outputs are to be equal to the bit, of any type. */
static bool same_bits(const void *a, const void *b)
{
    return memcmp(a, b, out_bytes) == 0;
}

static int child_agrees(struct fixture *f, const float *right)
{
    memset(f->out, 0xff, out_bytes);
    if (f->api->plan_batch(f->plan, &f->batch, NULL, NULL) != ATTN_OK ||
        run(f, &f->io) != ATTN_OK) {
        return 1;
    }
    return !same_bits(f->out, right);
}

/* An engine's workers are forked with everything bound, or bind for themselves; threads of the pool
 * do not survive. */
TEST(test_forks)
{
    struct fixture f, own;
    OWNED(memory_end) float *right = malloc(out_bytes);
    fixture_mixed(&f, "cpu_ref", &decoder, false);
    fixture_step(&f);
    memcpy(right, f.out, out_bytes);
    for (int32_t way = 0; way < 2; way++) {
        if (test_apart()) {
            if (way == 1) {
                fixture_mixed(&own, "cpu_ref", &decoder, false);
            }
            _exit(child_agrees(way == 1 ? &own : &f, right));
        }
    }
    assert_int_equal(child_agrees(&f, right), 0); /* the parent goes on */
    fixture_finish(&f);
}

int main(void)
{
    fixture_own_runtimes(); /* workers open their own */
    return test_run(NULL, NULL);
}
