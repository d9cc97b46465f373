/* SPDX-License-Identifier: Apache-2.0 */
/* The scheduler's helpers against their definitions, counted out position by position. */

#include "fixture.h"
#include "support/test.h"

enum { BLOCK = 16, POSITIONS = 300 };

static const struct attn_api *api;

static int open_api(void **state)
{
    static struct fixture f;
    static const int32_t one = 1;
    fixture_init(&f, "cpu_ref", &(struct attn_layer_desc)DECODER(), &one, &one, 1, 0, NULL, false);
    api = f.api; /* lives as long as the library is loaded */
    fixture_finish(&f);
    return 0;
}

/* A position belongs to rank floor(offset / I) mod n and stands after those of its rank before it.
 */
TEST(test_context_parallel)
{
    static const int32_t worlds[] = {1, 2, 3, 4, 8}, interleaves[] = {1, 2, 4, 8, 16};
    static int32_t row[POSITIONS];
    int64_t positions[POSITIONS], slots[POSITIONS];
    for (int32_t i = 0; i < POSITIONS; i++) {
        positions[i] = i;
        row[i] = 1000 - 7 * i;
    }
    for (size_t w = 0; w < 5; w++) {
        for (size_t l = 0; l < 5; l++) {
            int32_t world = worlds[w], interleave = interleaves[l];
            int32_t mine[8] = {0};
            /* local lengths count out what lies before p */
            for (int32_t p = 0; p <= POSITIONS; p++) {
                for (int32_t rank = 0; rank < world; rank++) {
                    const struct attn_rank_keys keys = {sizeof keys, NULL, rank, world,
                                                        interleave > 1 ? interleave : 0};
                    int32_t local = -1;
                    assert_ok(api->context_parallel_length(&keys, p, &local, NULL));
                    assert_int_equal(local, mine[rank]);
                }
                mine[p / interleave % world]++;
            }
            for (int32_t rank = 0; rank < world; rank++) {
                int32_t count = 0;
                const struct attn_rank_keys keys = {
                    sizeof keys, NULL, rank, world, interleave, BLOCK, positions, POSITIONS, row};
                assert_ok(api->context_parallel_slots(&keys, slots, NULL));
                for (int32_t p = 0; p < POSITIONS; p++) {
                    bool ours = p / interleave % world == rank;
                    int64_t slot = (int64_t)row[count / BLOCK] * BLOCK + count % BLOCK;
                    assert_true(slots[p] == (ours ? slot : -1));
                    count += ours;
                }
            }
        }
    }
}

TEST(test_context_parallel_refusals)
{
    struct attn_error error = ATTN_ERROR_INIT;
    const int64_t position = 3;
    const int32_t row = 0;
    int64_t slot = 77;
    int32_t local = 88;
    struct attn_rank_keys keys = {sizeof keys, NULL, 2, 2, 1, 16, &position, 1, &row};
    REFUSED(&error, "rank", api->context_parallel_length(&keys, 5, &local, &error));
    REFUSED(&error, "rank", api->context_parallel_slots(&keys, &slot, &error));
    keys.rank = 0;
    REFUSED(&error, "length", api->context_parallel_length(&keys, -1, &local, &error));
    keys.interleave = -1;
    REFUSED(&error, "rank", api->context_parallel_length(&keys, 5, &local, &error));
    keys.interleave = 3;
    REFUSED(&error, "interleave", api->context_parallel_slots(&keys, &slot, &error));
    keys.struct_size = 8;
    REFUSED(&error, "attn_rank_keys", api->context_parallel_slots(&keys, &slot, &error));
    assert_true(slot == 77 && local == 88);
}

static void check_order(const int32_t *queries, const int32_t *lens, int32_t count,
                        const int32_t *wanted, int32_t moves)
{
    int32_t order[16], moved = -1;
    const struct attn_batch_order requests = {sizeof requests, NULL, queries, lens, NULL,
                                              count,           2,    8};
    assert_ok(api->batch_order(&requests, order, &moved, NULL));
    assert_int_equal(moved, moves);
    assert_memory_equal(order, wanted, (size_t)count * sizeof *order);
}

TEST(test_batch_order)
{
    /* prefill, decode, long extend, short extend, decode of two, prefill as short as a decode,
     * short extend */
    static const int32_t queries[] = {20, 1, 9, 8, 2, 2, 3}, lens[] = {20, 50, 30, 40, 9, 2, 4};
    static const int32_t sorted[] = {1, 4, 5, 3, 6, 2, 0}, same[] = {0, 1, 2, 3};
    static const int32_t in_order[] = {1, 2, 5, 7}, their_lens[] = {9, 9, 9, 7};
    struct attn_error error = ATTN_ERROR_INIT;
    int32_t order[4], moved;
    check_order(queries, lens, 7, sorted, 1);
    check_order(in_order, their_lens, 4, same, 0);
    check_order(in_order, their_lens, 0, same, 0);
    /* lengths without a meaning: no keys before the step */
    check_order((const int32_t[]){4, 9}, (const int32_t[]){INT32_MIN, 30}, 2,
                (const int32_t[]){1, 0}, 1);
    static const char *const fields[] = {"attn_batch_order", "num_reqs", "reserved"};
    struct attn_batch_order bad[] = {{sizeof *bad, NULL, queries, NULL, NULL, 4, 1, 8},
                                     {sizeof *bad, NULL, queries, lens, NULL, -1, 1, 8},
                                     {sizeof *bad, NULL, queries, lens, NULL, 4, 1, 8, 1}};
    for (int32_t i = 0; i < 3; i++) {
        REFUSED(&error, fields[i], api->batch_order(&bad[i], order, &moved, &error));
    }
}

/* The cases of vLLM's own test of this order: per request the step's tokens, the keys before it and
 * its prompt; then the classes of the places in the order that vLLM leaves. vLLM swaps as few
 * requests as it can, this order is stable, so the classes are compared and not the requests. */
static const struct {
    int32_t threshold, count, moved;
    int32_t requests[9][3];
    const char *classes; /* d, s, l, p */
} their_cases[] = {
    {1, 3, 0, {{1, 10, 10}, {1, 20, 20}, {1, 30, 30}}, "ddd"},
    {1, 3, 0, {{100, 100, 100}, {200, 200, 200}, {300, 300, 300}}, "lll"},
    {1, 4, 1, {{100, 100, 100}, {1, 10, 10}, {200, 200, 200}, {1, 20, 20}}, "ddll"},
    {1, 4, 0, {{1, 10, 10}, {1, 20, 20}, {100, 100, 100}, {200, 0, 200}}, "ddlp"},
    {1, 1, 0, {{1, 10, 10}}, "d"},
    {4, 4, 0, {{2, 10, 10}, {3, 20, 20}, {5, 30, 30}, {6, 40, 40}}, "ddll"},
    {1, 4, 1, {{100, 100, 100}, {200, 200, 200}, {1, 10, 10}, {1, 20, 20}}, "ddll"},
    {1, 3, 1, {{100, 0, 100}, {10, 50, 50}, {1, 10, 10}}, "dlp"},
    {1, 4, 1, {{100, 0, 100}, {10, 50, 50}, {200, 0, 200}, {20, 75, 75}}, "llpp"},
    {1,
     9,
     1,
     {{1, 20, 20},
      {1, 50, 50},
      {374, 0, 374},
      {300, 20, 20},
      {1, 20, 20},
      {256, 0, 256},
      {1, 5, 5},
      {27, 0, 27},
      {1, 4, 4}},
     "dddddlppp"},
    {1, 4, 1, {{100, 0, 100}, {1, 0, 1}, {50, 100, 100}, {1, 10, 10}}, "dlpp"},
    {1, 4, 1, {{1, 0, 1}, {1, 0, 1}, {1, 50, 50}, {200, 0, 200}}, "dppp"},
    {1, 4, 0, {{1, 100, 100}, {1, 50, 100}, {10, 50, 100}, {100, 0, 100}}, "dslp"},
    {1, 4, 1, {{100, 0, 100}, {1, 50, 100}, {1, 100, 100}, {10, 50, 100}}, "dslp"},
    {2, 4, 1, {{2, 100, 100}, {2, 50, 200}, {2, 75, 150}, {2, 200, 200}}, "ddss"},
    {5, 4, 1, {{5, 100, 100}, {5, 50, 100}, {5, 0, 100}, {10, 50, 100}}, "dslp"},
};

static char class_there(const int32_t *request, int32_t threshold)
{
    if (request[1] == 0) {
        return 'p';
    }
    if (request[0] > threshold) {
        return 'l';
    }
    return request[1] < request[2] ? 's' : 'd';
}

TEST(test_prompt_lengths)
{
    for (size_t c = 0; c < sizeof their_cases / sizeof *their_cases; c++) {
        int32_t queries[9], lens[9], prompts[9], order[9], moved = -1, count = their_cases[c].count;
        for (int32_t r = 0; r < count; r++) {
            const int32_t *request = their_cases[c].requests[r];
            queries[r] = request[0];
            lens[r] = request[0] + request[1];
            prompts[r] = request[2];
        }
        int32_t threshold = their_cases[c].threshold, seen = 0;
        const struct attn_batch_order requests = {sizeof requests, NULL,  queries,   lens,
                                                  prompts,         count, threshold, threshold};
        assert_ok(api->batch_order(&requests, order, &moved, NULL));
        assert_int_equal(moved, their_cases[c].moved);
        for (int32_t i = 0; i < count; i++) {
            char found = class_there(their_cases[c].requests[order[i]], threshold);
            assert_int_equal(found, their_cases[c].classes[i]);
            seen |= 1 << order[i];
        }
        assert_int_equal(seen, (1 << count) - 1);
    }
}

int main(void)
{
    return test_run(open_api, NULL);
}
