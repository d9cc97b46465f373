/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ranks.h"

attn_mpi_collectives_create_fn attn_mpi_collectives_create;
attn_collectives_destroy_fn attn_mpi_collectives_destroy;

struct attn_collectives *ranks;

static attn_status (*all_gather)(const struct attn_collective_args *args, struct attn_error *error);

/* What is sent lies apart from what is received: MPI need not find out. */
static attn_status gather_apart(const struct attn_collective_args *args, struct attn_error *error)
{
    const char *send = args->send, *receive = args->receive;
    if (send < receive + args->count && receive < send + args->count) {
        fprintf(stderr, "all_gather of %zu bytes from %p to %p\n", args->count, args->send,
                args->receive);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    return all_gather(args, error);
}

struct attn_collectives *ranks_of(MPI_Comm comm)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_collectives *made = NULL;
    if (attn_mpi_collectives_create(MPI_Comm_c2f(comm), &made, &error) != ATTN_OK) {
        fprintf(stderr, "%s: %s\n", error.field, error.message);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    all_gather = made->all_gather;
    made->all_gather = gather_apart;
    return made;
}

void ranks_destroy(struct attn_collectives *some)
{
    attn_mpi_collectives_destroy(some);
}

void ranks_begin(int *argc, char ***argv)
{
    MPI_Init(argc, argv);
    ranks = ranks_of(MPI_COMM_WORLD);
}

int ranks_end(int failed)
{
    int any = 0;
    MPI_Allreduce(&failed, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    ranks_destroy(ranks);
    MPI_Finalize();
    return any;
}
