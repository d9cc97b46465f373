/* SPDX-License-Identifier: Apache-2.0 */
/* libattn_mpi: struct attn_collectives over an MPI communicator, in host memory. */
#include <limits.h>
#include <mpi.h>
#include <stdlib.h>

#include "table.h"

/* The table comes first, so that the one is the other's address. */
struct mpi_collectives {
    struct attn_collectives table;
    MPI_Comm comm; /* a duplicate, whose errors return */
};

/* The error has MPI's own text. */
static attn_status reported(int code, struct attn_error *error)
{
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    if (code == MPI_SUCCESS) {
        return ATTN_OK;
    }
    MPI_Error_string(code, text, &length);
    return table_refuse(error, ATTN_ERROR_DEVICE, "collectives", text);
}

static attn_status too_many(struct attn_error *error)
{
    return table_refuse(error, ATTN_ERROR_LIMIT, "count", "more than MPI counts in an int");
}

/* MPI counts in int. Larger pieces are counted in pages; what is neither is refused. */
static attn_status pieces(size_t bytes, int *count, MPI_Datatype *type, MPI_Datatype *page,
                          struct attn_error *error)
{
    enum { PAGE = 1 << 16 };
    *page = MPI_DATATYPE_NULL;
    if (bytes <= INT_MAX) {
        *count = (int)bytes;
        *type = MPI_BYTE;
        return ATTN_OK;
    }
    if (bytes % PAGE != 0 || bytes / PAGE > INT_MAX) {
        return too_many(error);
    }
    *count = (int)(bytes / PAGE);
    int code = MPI_Type_contiguous(PAGE, MPI_BYTE, page);
    code = code == MPI_SUCCESS ? MPI_Type_commit(page) : code;
    *type = *page;
    return reported(code, error);
}

typedef int exchange(const void *, int, MPI_Datatype, void *, int, MPI_Datatype, MPI_Comm);

static attn_status exchange_pieces(exchange *call, const struct attn_collective_args *a,
                                   struct attn_error *error)
{
    const struct mpi_collectives *c = a->user;
    MPI_Datatype type, page;
    int count;
    attn_status status = pieces(a->count, &count, &type, &page, error);
    if (status == ATTN_OK) {
        status = reported(call(a->send, count, type, a->receive, count, type, c->comm), error);
    }
    if (page != MPI_DATATYPE_NULL) {
        MPI_Type_free(&page);
    }
    return status;
}

static attn_status all_gather(const struct attn_collective_args *a, struct attn_error *error)
{
    return exchange_pieces(MPI_Allgather, a, error);
}

static attn_status all_to_all(const struct attn_collective_args *a, struct attn_error *error)
{
    return exchange_pieces(MPI_Alltoall, a, error);
}

static attn_status reduce_scatter_f32(const struct attn_collective_args *a,
                                      struct attn_error *error)
{
    const struct mpi_collectives *c = a->user;
    return a->count > INT_MAX
               ? too_many(error)
               : reported(MPI_Reduce_scatter_block(a->send, a->receive, (int)a->count, MPI_FLOAT,
                                                   MPI_SUM, c->comm),
                          error);
}

static attn_status all_reduce_max_f32(const struct attn_collective_args *a,
                                      struct attn_error *error)
{
    const struct mpi_collectives *c = a->user;
    return a->count > INT_MAX ? too_many(error)
                              : reported(MPI_Allreduce(a->send, a->receive, (int)a->count,
                                                       MPI_FLOAT, MPI_MAX, c->comm),
                                         error);
}

ATTN_EXPORT attn_mpi_collectives_create_fn attn_mpi_collectives_create;
ATTN_EXPORT attn_collectives_destroy_fn attn_mpi_collectives_destroy;

attn_status attn_mpi_collectives_create(int32_t communicator, struct attn_collectives **collectives,
                                        struct attn_error *error)
{
    int running = 0, rank = 0, size = 0;
    if (collectives == NULL) {
        return table_refuse(error, ATTN_ERROR_INVALID_ARGUMENT, "collectives",
                            "collectives is NULL");
    }
    *collectives = NULL;
    if (MPI_Initialized(&running) != MPI_SUCCESS || !running) {
        return table_refuse(error, ATTN_ERROR_ORDER, "communicator",
                            "MPI is not initialised; call MPI_Init first");
    }
    struct mpi_collectives *made = calloc(1, sizeof *made);
    if (made == NULL) {
        return table_refuse(error, ATTN_ERROR_OUT_OF_MEMORY, "collectives",
                            "no memory for the table");
    }
    if (MPI_Comm_dup(MPI_Comm_f2c((MPI_Fint)communicator), &made->comm) != MPI_SUCCESS) {
        free(made);
        return table_refuse(error, ATTN_ERROR_DEVICE, "communicator", "MPI_Comm_dup failed");
    }
    MPI_Comm_set_errhandler(made->comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(made->comm, &rank);
    MPI_Comm_size(made->comm, &size);
    made->table = (struct attn_collectives){.struct_size = sizeof made->table,
                                            .user = made,
                                            .rank = rank,
                                            .world_size = size,
                                            .all_gather = all_gather,
                                            .all_to_all = all_to_all,
                                            .reduce_scatter_f32 = reduce_scatter_f32,
                                            .all_reduce_max_f32 = all_reduce_max_f32};
    *collectives = &made->table;
    return ATTN_OK;
}

void attn_mpi_collectives_destroy(struct attn_collectives *collectives)
{
    if (collectives != NULL) {
        struct mpi_collectives *made = collectives->user;
        MPI_Comm_free(&made->comm);
        free(made);
    }
}
