/* SPDX-License-Identifier: Apache-2.0 */
/* gather_heads and merge_heads of libattn_nccl over peer memory: each rank of a host maps a window
 * of every other rank's memory. */
#ifndef COLLECTIVES_PEER_MEMORY_H
#define COLLECTIVES_PEER_MEMORY_H

#include <attn/collectives.h>
#include <nccl.h>
#include <stdbool.h>

#include "exchange.h"

struct peer_memory {
    struct exchange_window kernel; /* as the kernels get it */
    int device;
};

/* Collective over the ranks. All of them have windows afterwards, or none. */
bool peer_memory_open(struct peer_memory *memory, ncclComm_t comm, int rank, int size);
/* Also frees a memory whose opening failed. Waits for the device. */
void peer_memory_close(struct peer_memory *memory);
attn_status peer_memory_gather(const struct peer_memory *memory,
                               const struct attn_gather_heads_args *args, struct attn_error *error);
attn_status peer_memory_merge(const struct peer_memory *memory,
                              const struct attn_merge_heads_args *args, struct attn_error *error);

#endif
