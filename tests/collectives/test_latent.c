/* SPDX-License-Identifier: Apache-2.0 */
/* MLA over a latent cache that the ranks of MPI share: every rank gets for its own heads what the
 * formula gives over all rows. Run under mpirun. Exit status 0 if every rank agrees. */
#include <string.h>

#include "heads.h"
#include "mla_fixture.h"
#include "ranks.h"
#include "support/client.h"
#include "support/test.h"

/* Decodes, of which the shortest leave ranks without rows; prefills with and without context, whose
 * chunks are small, large, and by default; both. */
static const struct setting settings[] = {
    CPU_REF(.heads = 4, .num_reqs = 5, .queries = {1, 1, 1, 1, 1}, .lens = {1, 2, 17, 40, 79}),
    CPU_REF(.heads = 2, .split = true, .apart = true, .num_reqs = 3, .chunk = 8,
            .queries = {9, 20, 3}, .lens = {9, 61, 78}),
    CPU_REF(.heads = 3, .chunk = 24, .num_reqs = 5, .queries = {1, 1, 5, 12, 2},
            .lens = {33, 80, 70, 12, 41}),
    CPU_REF(.heads = 4, .num_reqs = 4, .queries = {1, 30, 2, 7}, .no_lse = true,
            .lens = {3, 80, 50, 8}),
    CPU_REF(.heads = 2, .fp8 = ATTN_KV_FP8_E4M3, .num_reqs = 3, .queries = {1, 1, 6},
            .lens = {60, 13, 75}),
};

static bool decodes(const struct setting *s)
{
    bool any = false;
    for (int32_t i = 0; i < s->num_reqs; i++) {
        any |= s->queries[i] == 1;
    }
    return any;
}

TEST(test_equal_to_the_formula)
{
    static const int32_t interleaves[] = {1, 2, 8};
    for (size_t i = 0; i < sizeof settings / sizeof *settings; i++) {
        for (int32_t j = 0; j < 3; j++) {
            struct setting s = settings[i];
            s.ranks = ranks;
            s.interleave = interleaves[j];
            s.reduce = (int32_t)(i + (size_t)j) % 2;
            check(&s, true);
            const int64_t merges = heads_merges();
            s.ranks = heads_over(ranks);
            s.reduce = ATTN_CP_ALL_TO_ALL;
            check(&s, true);
            assert_true((heads_merges() > merges) == decodes(&s));
        }
    }
}

/* What the exchange does not know is refused with a reason each. */
TEST(test_refusals)
{
    struct setting s = settings[0];
    OWNED(mla_end) struct mla *m = mla_create(&s);
    const struct attn_layer_desc *layers[] = {&m->described};
    const struct attn_select_options options = SIZED(attn_select_options, .backend = "cpu_ref");
    for (int32_t i = 0; i < 4; i++) {
        attn_assignment *assignment = NULL;
        struct attn_error error = ATTN_ERROR_INIT;
        s.has_sinks = i == 0;
        s.drafted = i == 1;
        s.padded = i == 2 ? 8 : 0;
        s.window = i == 3 ? 9 : 0;
        s.ranks = ranks;
        s.interleave = 1;
        s.reduce = ATTN_CP_ALL_TO_ALL;
        describe(m);
        assert_int_not_equal(m->api->select(m->runtime, &options, layers, 1, &assignment, &error),
                             ATTN_OK);
        assert_non_null(strstr(error.message, "context_parallel"));
        assert_non_null(strstr(error.message, i == 3 ? "a window" : "MLA with sinks"));
    }
}

static int64_t scratch_of(struct mla *m, int32_t tokens)
{
    struct attn_workspace room = {.struct_size = sizeof room};
    attn_plan *plan = NULL;
    CHECK(m, m->api->plan_create(m->model, 0, CLIENT_LIMITS(MAX_REQS, tokens, MAX_LENGTH), &plan,
                                 &m->error));
    CHECK(m, m->api->plan_workspace(plan, &room, &m->error));
    m->api->plan_destroy(plan);
    return (int64_t)room.scratch_bytes;
}

/* Only decodes are exchanged: tokens of prefills take no more memory than on one rank. */
TEST(test_scratch)
{
    struct setting s = settings[0];
    OWNED(mla_end) struct mla *one = mla_create(&s);
    s.ranks = ranks;
    s.interleave = 1;
    s.reduce = ATTN_CP_ALL_TO_ALL;
    OWNED(mla_end) struct mla *of_all = mla_create(&s);
    assert_true(scratch_of(of_all, 4000) - scratch_of(of_all, 1000) <=
                scratch_of(one, 4000) - scratch_of(one, 1000));
}

int main(int argc, char **argv)
{
    ranks_begin(&argc, &argv);
    return ranks_end(test_run(NULL, NULL));
}
