/* SPDX-License-Identifier: Apache-2.0 */
/* What the checks on several GPUs share: one process a GPU, which gets its rank and the paths. */
#ifndef COLLECTIVES_NCCL_RANKS_H
#define COLLECTIVES_NCCL_RANKS_H

#include <attn/api.h>
#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdio.h>

struct rank {
    const char *core, *plugins;
    const struct attn_collectives *ranks;
    cudaStream_t stream;
    int32_t checks, failures;
};

/* Counts what does not hold, and says so. */
#define HOLD(of, condition, ...)                                                                   \
    do {                                                                                           \
        (of)->checks++;                                                                            \
        if (!(condition)) {                                                                        \
            (of)->failures++;                                                                      \
            printf("rank %d, %s:%d: ", (of)->ranks != NULL ? (of)->ranks->rank : -1, __FILE__,     \
                   __LINE__);                                                                      \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

/* Device memory with these bytes, or poisoned. NULL: none to be had. */
void *device_copy(const void *bytes, size_t size);
/* Does the table gather and merge heads itself? */
bool has_windows(const struct attn_collectives *ranks);
/* The same table, as it was before there were such slots. */
struct attn_collectives without_windows(const struct attn_collectives *ranks);
/* The entries of a table by themselves. */
void check_table(struct rank *rank);
/* Layers with their cache spread over the ranks, next to the same layers on this GPU alone. */
void check_spread(struct rank *rank);
/* How long a decode of one long request takes, on this GPU alone and spread. */
void time_spread(struct rank *rank);

#endif
