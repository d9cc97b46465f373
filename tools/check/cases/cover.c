/* SPDX-License-Identifier: Apache-2.0 */
/* The covering array. */
#include <stdlib.h>

#include "cases/cases.h"
#include "common/command.h"
#include "support/random.h"

#define COVER_CANDIDATES 24 /* random completions tried for each row of the array */

/* Which pairs are covered: one bit per (factor i value, factor j value), i < j, in a flat index of
 * all values. */
struct coverage {
    int32_t first[FACTOR_COUNT + 1];
    uint8_t *seen; /* [values, values] */
};

static int32_t count_new(const struct coverage *cover, const struct attend_case *c, bool mark)
{
    int32_t total = cover->first[FACTOR_COUNT];
    int32_t fresh = 0;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        for (int32_t j = i + 1; j < FACTOR_COUNT; j++) {
            uint8_t *seen = &cover->seen[(cover->first[i] + c->index[i]) * total + cover->first[j] +
                                         c->index[j]];
            fresh += !*seen;
            *seen |= mark;
        }
    }
    return fresh;
}

static void draw(const struct case_space *space, uint64_t *random, struct attend_case *c)
{
    c->output = (struct case_output){0};
    c->lists = (struct case_lists){0};
    c->prompts = 0;
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        c->index[i] = random_below(random, space->factors[i].count);
        /* Half of the switches stay off, or every case would be a crowd of terms. */
        if (i >= FACTOR_FIRST_SWITCH && i <= FACTOR_LAST_SWITCH && random_below(random, 2)) {
            c->index[i] = 0;
        }
    }
}

static void take(struct attend_cases *list, const struct attend_case *c)
{
    list->cases = command_realloc(list->cases, (size_t)list->num_cases + 1, sizeof *list->cases);
    list->cases[list->num_cases++] = *c;
}

/* A random case without conflicts is taken, if the backend does not refuse it. */
static void take_random(struct attend_cases *list, uint64_t *random)
{
    struct attend_case c;
    draw(list->space, random, &c);
    case_drop_conflicts(list->space, &c);
    if (!case_refused(list->space, &c)) {
        take(list, &c);
    }
}

/* For every pair of values: where it is not covered yet, the best of some random rows that hold it.
 * Pairs that case_drop_conflicts() takes apart or that the backend refuses stay uncovered. */
static void cover_pairs(struct attend_cases *list, struct coverage *cover, uint64_t *random)
{
    const struct case_space *space = list->space;
    int32_t total = cover->first[FACTOR_COUNT];
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        for (int32_t j = i + 1; j < FACTOR_COUNT; j++) {
            int32_t pairs = space->factors[i].count * space->factors[j].count;
            for (int32_t pair = 0; pair < pairs; pair++) {
                int32_t a = pair / space->factors[j].count;
                int32_t b = pair % space->factors[j].count;
                if (cover->seen[(cover->first[i] + a) * total + cover->first[j] + b]) {
                    continue;
                }
                struct attend_case best = {{0}};
                int32_t most = 0;
                for (int32_t k = 0; k < COVER_CANDIDATES; k++) {
                    struct attend_case c;
                    draw(space, random, &c);
                    c.index[i] = a;
                    c.index[j] = b;
                    case_drop_conflicts(space, &c);
                    bool holds = c.index[i] == a && c.index[j] == b;
                    int32_t fresh = holds ? count_new(cover, &c, false) : 0;
                    if (fresh > most && !case_refused(space, &c)) {
                        most = fresh;
                        best = c;
                    }
                }
                if (most > 0) {
                    count_new(cover, &best, true);
                    take(list, &best);
                }
            }
        }
    }
}

struct attend_cases case_space_cover(struct case_space *space, uint64_t seed, int32_t extra)
{
    struct coverage cover = {{0}, NULL};
    struct attend_cases list = {.space = space};
    for (int32_t i = 0; i < FACTOR_COUNT; i++) {
        cover.first[i + 1] = cover.first[i] + space->factors[i].count;
    }
    size_t total = (size_t)cover.first[FACTOR_COUNT];
    cover.seen = command_calloc(total, total);
    cover_pairs(&list, &cover, &seed);
    space->num_covering = list.num_cases;
    for (int32_t i = 0; i < extra; i++) {
        take_random(&list, &seed);
    }
    free(cover.seen);
    return list;
}

struct attend_cases case_space_draw(const struct case_space *space, uint64_t seed, int32_t count)
{
    struct attend_cases list = {.space = space};
    for (int32_t i = 0; i < 8 * count && list.num_cases < count; i++) {
        take_random(&list, &seed);
    }
    return list;
}
