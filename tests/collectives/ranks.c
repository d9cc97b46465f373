/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ranks.h"

attn_mpi_collectives_create_fn attn_mpi_collectives_create;
attn_collectives_destroy_fn attn_mpi_collectives_destroy;

struct attn_collectives *ranks;

static attn_status (*all_gather)(const struct attn_collective_args *args, struct attn_error *error);
static struct {
    const void *user;
    size_t world_size;
} tables[8]; /* that were made */
static int num_tables;

/* What is sent lies apart from what is received; MPI does not have to detect it. */
static attn_status gather_apart(const struct attn_collective_args *args, struct attn_error *error)
{
    const char *send = args->send, *receive = args->receive;
    size_t received = args->count;
    for (int i = 0; i < num_tables; i++) {
        received = tables[i].user == args->user ? args->count * tables[i].world_size : received;
    }
    if (send < receive + received && receive < send + args->count) {
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
    if (num_tables < (int)(sizeof tables / sizeof *tables)) {
        tables[num_tables].user = made->user;
        tables[num_tables++].world_size = (size_t)made->world_size;
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
