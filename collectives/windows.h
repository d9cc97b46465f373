/* SPDX-License-Identifier: Apache-2.0 */
/* gather_heads and merge_heads of libattn_nccl, through windows that the ranks of one host have
 * into each other's memory. */
#ifndef COLLECTIVES_WINDOWS_H
#define COLLECTIVES_WINDOWS_H

#include <attn/collectives.h>
#include <nccl.h>
#include <stdbool.h>

#include "exchange.h"

struct windows {
    struct exchange_window kernel; /* as the kernels get it */
    int device;
};

/* Collective over the ranks. All of them have windows afterwards, or none. */
bool windows_open(struct windows *windows, ncclComm_t comm, int rank, int size);
/* Of none, too. Waits for the device. */
void windows_close(struct windows *windows);
attn_status windows_gather(const struct windows *windows, const struct attn_gather_heads_args *args,
                           struct attn_error *error);
attn_status windows_merge(const struct windows *windows, const struct attn_merge_heads_args *args,
                          struct attn_error *error);

#endif
