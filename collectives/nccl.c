/* SPDX-License-Identifier: Apache-2.0 */
/* libattn_nccl: struct attn_collectives over an NCCL communicator, in device memory, on the
 * caller's streams. */
#include <nccl.h>
#include <stdint.h>
#include <stdlib.h>

#include "table.h"
#ifdef COLLECTIVES_PEER_MEMORY
#include "peer_memory.h"
#endif

/* The table comes first, so that the one is the other's address. */
struct nccl_collectives {
    struct attn_collectives table;
    ncclComm_t comm; /* the caller's */
#ifdef COLLECTIVES_PEER_MEMORY
    struct peer_memory peer_memory;
#endif
};

static attn_status reported(ncclResult_t result, struct attn_error *error)
{
    return result == ncclSuccess
               ? ATTN_OK
               : table_refuse(error, ATTN_ERROR_DEVICE, "collectives", ncclGetErrorString(result));
}

static attn_status all_gather(const struct attn_collective_args *a, struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    return reported(
        ncclAllGather(a->send, a->receive, a->count, ncclUint8, c->comm, (cudaStream_t)a->stream),
        error);
}

/* A send to and a receive from every rank, as one group. */
static attn_status all_to_all(const struct attn_collective_args *a, struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    ncclResult_t result = ncclGroupStart();
    for (int32_t rank = 0; rank < c->table.world_size && result == ncclSuccess; rank++) {
        size_t at = (size_t)rank * a->count;
        result = ncclSend((const uint8_t *)a->send + at, a->count, ncclUint8, rank, c->comm,
                          (cudaStream_t)a->stream);
        if (result == ncclSuccess) {
            result = ncclRecv((uint8_t *)a->receive + at, a->count, ncclUint8, rank, c->comm,
                              (cudaStream_t)a->stream);
        }
    }
    ncclResult_t ended = ncclGroupEnd(); /* also after a failure: the group must not stay open */
    return reported(result != ncclSuccess ? result : ended, error);
}

static attn_status reduce_scatter_f32(const struct attn_collective_args *a,
                                      struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    return reported(ncclReduceScatter(a->send, a->receive, a->count, ncclFloat32, ncclSum, c->comm,
                                      (cudaStream_t)a->stream),
                    error);
}

static attn_status all_reduce_max_f32(const struct attn_collective_args *a,
                                      struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    return reported(ncclAllReduce(a->send, a->receive, a->count, ncclFloat32, ncclMax, c->comm,
                                  (cudaStream_t)a->stream),
                    error);
}

#ifdef COLLECTIVES_PEER_MEMORY
static attn_status gather_heads(const struct attn_gather_heads_args *a, struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    return peer_memory_gather(&c->peer_memory, a, error);
}

static attn_status merge_heads(const struct attn_merge_heads_args *a, struct attn_error *error)
{
    const struct nccl_collectives *c = a->user;
    return peer_memory_merge(&c->peer_memory, a, error);
}

static void add_windows(struct nccl_collectives *c)
{
    struct attn_collectives *table = &c->table;
    if (peer_memory_open(&c->peer_memory, c->comm, table->rank, table->world_size)) {
        table->gather_heads = gather_heads;
        table->merge_heads = merge_heads;
        table->max_exchange_bytes = EXCHANGE_MAX_BYTES;
    }
}

static void remove_windows(struct nccl_collectives *c)
{
    peer_memory_close(&c->peer_memory);
}
#else
static void add_windows(struct nccl_collectives *c)
{
}

static void remove_windows(struct nccl_collectives *c)
{
}
#endif

ATTN_EXPORT attn_nccl_collectives_create_fn attn_nccl_collectives_create;
ATTN_EXPORT attn_collectives_destroy_fn attn_nccl_collectives_destroy;

attn_status attn_nccl_collectives_create(void *communicator, struct attn_collectives **collectives,
                                         struct attn_error *error)
{
    int rank = 0, size = 0;
    if (collectives == NULL || communicator == NULL) {
        return table_refuse(error, ATTN_ERROR_INVALID_ARGUMENT,
                            communicator == NULL ? "communicator" : "collectives",
                            "neither communicator nor collectives may be NULL");
    }
    *collectives = NULL;
    ncclResult_t result = ncclCommUserRank((ncclComm_t)communicator, &rank);
    result = result == ncclSuccess ? ncclCommCount((ncclComm_t)communicator, &size) : result;
    if (result != ncclSuccess) {
        return table_refuse(error, ATTN_ERROR_DEVICE, "communicator", ncclGetErrorString(result));
    }
    struct nccl_collectives *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return table_refuse(error, ATTN_ERROR_OUT_OF_MEMORY, "collectives",
                            "no memory for the table");
    }
    made->comm = (ncclComm_t)communicator;
    made->table = (struct attn_collectives){.struct_size = sizeof made->table,
                                            .user = made,
                                            .rank = rank,
                                            .world_size = size,
                                            .all_gather = all_gather,
                                            .all_to_all = all_to_all,
                                            .reduce_scatter_f32 = reduce_scatter_f32,
                                            .all_reduce_max_f32 = all_reduce_max_f32};
    add_windows(made);
    *collectives = &made->table;
    return ATTN_OK;
}

void attn_nccl_collectives_destroy(struct attn_collectives *collectives)
{
    if (collectives != NULL) {
        remove_windows(collectives->user);
        free(collectives->user);
    }
}
