/* SPDX-License-Identifier: Apache-2.0 */
/* The ranks of MPI that a test runs on: started before its cases, ended after them. */
#ifndef COLLECTIVES_RANKS_H
#define COLLECTIVES_RANKS_H

#include <attn/collectives.h>
#include <mpi.h>

/* All of them, between ranks_begin and ranks_end. */
extern struct attn_collectives *ranks;

void ranks_begin(int *argc, char ***argv);
/* Some of them. Does not return on failure: a rank that is missing would leave the others waiting.
 */
struct attn_collectives *ranks_of(MPI_Comm comm);
/* Accepts NULL. */
void ranks_destroy(struct attn_collectives *some);
/* The exit status: 0 only if no rank counted a failed case. */
int ranks_end(int failed);

#endif
