/* SPDX-License-Identifier: Apache-2.0 */
/* gather_heads and merge_heads as one kernel each. Every rank has a window, memory that all others
 * map and write: two halves in turn, in each a part for every rank to write. What is sent are
 * packets of 8 bytes and the number of the exchange, stored whole: whoever finds the number has the
 * bytes, and nothing else has to be ordered or signalled. A half is written again when the exchange
 * between is done, which every rank took part in, and so had ended the one before. */
#ifndef COLLECTIVES_EXCHANGE_H
#define COLLECTIVES_EXCHANGE_H

#include <cuda_runtime_api.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EXCHANGE_MAX_RANKS = 16,
    EXCHANGE_BLOCKS = 32,
    EXCHANGE_THREADS = 256,
    EXCHANGE_UNIT = 8,           /* bytes of a packet's content */
    EXCHANGE_MAX_BYTES = 2 << 20 /* rows and log-sum-exps from one rank to another */
};

struct exchange_window {
    void *of_rank[EXCHANGE_MAX_RANKS]; /* as they are mapped here */
    unsigned long long *done;          /* [EXCHANGE_BLOCKS], each the exchanges so far */
    int32_t *missing;                  /* host memory: 1 + the rank that did not come */
    uint64_t patience;                 /* nanoseconds */
    int32_t rank, ranks;
    int32_t overlaps; /* may kernels begin before the one before has ended? */
};

/* [T, Hq, D] by bytes from row to row and from head to head. */
struct exchange_rows {
    uint8_t *data;
    int64_t row, head;
};

struct exchange_sizes {
    int32_t tokens, heads, group;
    int32_t units[2];     /* units in a row of each tensor */
    int32_t element;      /* bytes; a row is a multiple of EXCHANGE_UNIT */
    int32_t unaligned[2]; /* rows of `own` that are not at multiples of EXCHANGE_UNIT */
};

struct exchange_gather {
    struct exchange_window window;
    struct exchange_sizes sizes;
    struct exchange_rows own[2];
    uint8_t *all[2]; /* the second may be NULL, of 0 units */
};

enum exchange_kind { EXCHANGE_F32, EXCHANGE_BF16, EXCHANGE_F16, EXCHANGE_KINDS };

/* [Hq, T] by elements. */
struct exchange_lse {
    float *data;
    int64_t head, row;
};

struct exchange_merge {
    struct exchange_window window;
    struct exchange_sizes sizes;
    const uint8_t *all;
    const float *all_lse;
    struct exchange_rows own, out; /* own.data NULL: no such part */
    struct exchange_lse own_lse, lse;
    int32_t kind;
};

/* Bytes of a window. */
size_t exchange_window_bytes(int32_t ranks);
/* Loads the kernels of the current device. */
cudaError_t exchange_load(void);
cudaError_t exchange_launch_gather(const struct exchange_gather *a, cudaStream_t stream);
cudaError_t exchange_launch_merge(const struct exchange_merge *a, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
