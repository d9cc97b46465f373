/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of a shape, and how many keys their queries see. */
#include <math.h>
#include <stdlib.h>

#include "common/command.h"
#include "support/random.h"
#include "measured.h"

#define VARLEN_RATIO 16.0
#define SKEW 64

static int32_t count_of(const struct bench_shape *shape)
{
    int32_t prefills = shape->kind == SHAPE_MIXED ? shape_int(shape, PARAMETER_PREFILLS) : 0;
    return shape_int(shape, PARAMETER_R) + prefills;
}

static void set_lengths(struct requests *requests, const struct bench_shape *shape, int32_t r,
                        uint64_t *random)
{
    int32_t s = shape_int(shape, PARAMETER_S), l = shape_int(shape, PARAMETER_L);
    int32_t query = s, keys = l > 0 ? l : s;
    if (shape->kind == SHAPE_MIXED) { /* decodes stand first, as the core wants them */
        bool decode = r < shape_int(shape, PARAMETER_R);
        query = decode ? 1 : s;
        keys = decode ? l : s;
    } else if (shape->kind == SHAPE_VARLEN) {
        /* uniform in the logarithm; the first is the longest */
        double part = r == 0 ? 1 : pow(VARLEN_RATIO, -random_unit(random));
        query = (int32_t)ceil(s * part);
        keys = query;
    }
    if (shape->kind == SHAPE_GDN) { /* a token before them, which has left a state, or a ring's */
        const int32_t replay = shape_int(shape, PARAMETER_REPLAY);
        keys = s + (replay > 0 ? replay + shape_int(shape, PARAMETER_DRAFTS) : 1);
    }
    if (shape_int(shape, PARAMETER_SKEW)) {
        int32_t count = shape_int(shape, PARAMETER_R);
        int32_t other = (int32_t)((int64_t)keys * count / (count + SKEW - 1));
        other = other > query ? other : query;
        keys = r == count / 2 ? other * SKEW : other;
    }
    requests->query_lens[r] = query;
    requests->seq_lens[r] = keys;
}

bool requests_init(struct requests *requests, const struct bench_shape *shape, uint64_t *random)
{
    int32_t count = count_of(shape);
    *requests = (struct requests){.count = count,
                                  .query_lens = command_calloc((size_t)count, sizeof(int32_t)),
                                  .seq_lens = command_calloc((size_t)count, sizeof(int32_t))};
    for (int32_t r = 0; r < count; r++) {
        set_lengths(requests, shape, r, random);
        int32_t query = requests->query_lens[r], keys = requests->seq_lens[r];
        requests->num_tokens += query;
        requests->num_keys += keys;
        requests->max_query_len = query > requests->max_query_len ? query : requests->max_query_len;
        requests->max_seq_len = keys > requests->max_seq_len ? keys : requests->max_seq_len;
    }
    return requests->num_keys < INT32_MAX / 2 && requests->num_tokens < INT32_MAX / 2;
}

void requests_finish(struct requests *requests)
{
    free(requests->query_lens);
    free(requests->seq_lens);
    *requests = (struct requests){0};
}

struct visible requests_visible(const struct requests *requests, const struct bench_shape *shape)
{
    int32_t window = shape_int(shape, PARAMETER_WINDOW), chunk = shape_int(shape, PARAMETER_CHUNK);
    bool causal = shape->kind != SHAPE_PREFILL || shape->value[PARAMETER_CAUSAL] != 0;
    struct visible visible = {0, 0};
    for (int32_t r = 0; r < requests->count; r++) {
        int64_t keys = requests->seq_lens[r], queries = requests->query_lens[r];
        int64_t lowest = keys;
        for (int64_t p = keys - queries; p < keys; p++) {
            int64_t first = window > 0 && p >= window ? p - window + 1 : 0;
            int64_t in_chunk = chunk > 0 ? p / chunk * chunk : 0;
            first = first > in_chunk ? first : in_chunk;
            int64_t end = causal ? p + 1 : keys;
            visible.pairs += (double)(end - first);
            lowest = first < lowest ? first : lowest;
        }
        visible.rows += (double)(keys - lowest);
    }
    return visible;
}
