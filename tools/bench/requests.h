/* SPDX-License-Identifier: Apache-2.0 */
/* The requests of a shape, and how many keys their queries see. */
#ifndef BENCH_REQUESTS_H
#define BENCH_REQUESTS_H

#include "shapes.h"

struct requests {
    int32_t count;
    int32_t *query_lens;
    int32_t *seq_lens; /* keys, the step's own included */
    int64_t num_tokens;
    int64_t num_keys;
    int32_t max_query_len;
    int32_t max_seq_len;
};

/* False without memory, or where there are more rows than an int32 counts. */
bool requests_init(struct requests *requests, const struct shape *shape, uint64_t *random);
void requests_finish(struct requests *requests);

struct visible {
    double pairs; /* of a query and a key that it sees, over all requests */
    double rows;  /* keys that any query sees */
};
void requests_visible(const struct requests *requests, const struct shape *shape,
                      struct visible *visible);

#endif
