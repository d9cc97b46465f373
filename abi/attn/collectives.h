/* SPDX-License-Identifier: Apache-2.0 */
/* Context parallelism: the collectives that an engine passes, and what a layer and a batch then
 * carry. */
#ifndef ATTN_COLLECTIVES_H
#define ATTN_COLLECTIVES_H

#include "status.h"
#include "tensor.h"

/* What one rank brings to a collective. */
struct attn_collective_args {
    size_t struct_size;
    const struct attn_ext *next;
    void *user; /* the table's */
    const void *send;
    void *receive;
    /* per rank: bytes of all_gather and all_to_all, float32 of the other two */
    size_t count;
    void *stream;
};

/* The query heads of all ranks stand as [Hk, n, g]: over each key head every rank's g = Hq / Hk.
 * Rows that this rank has of its own heads, to all ranks, each in its place. */
struct attn_gather_heads_args {
    size_t struct_size;
    const struct attn_ext *next;
    void *user; /* the table's */
    void *stream;
    /* arrays of `count`: [T, Hq, D], strided but for D, and [T, n Hq, D], compact */
    const struct attn_tensor *const *own;
    const struct attn_tensor *const *all;
    int32_t count; /* 1 or 2 */
    int32_t num_kv_heads;
};

/* Partial results of all ranks' heads to the rank that owns them, which merges its own heads', with
 * the weights of attn_merge_states_args: of all ranks, in their order, and last `own`. */
struct attn_merge_heads_args {
    size_t struct_size;
    const struct attn_ext *next;
    void *user; /* the table's */
    void *stream;
    const struct attn_tensor *all_out; /* [T, n Hq, Dv], compact */
    const struct attn_tensor *all_lse; /* [n Hq, T] float32, compact */
    const struct attn_tensor *own_out; /* [T, Hq, Dv]; NULL: there is no such part */
    const struct attn_tensor *own_lse; /* [Hq, T] */
    const struct attn_tensor *out;     /* [T, Hq, Dv]; may be own_out */
    const struct attn_tensor *lse;     /* [Hq, T]; NULL: not asked for */
    int32_t num_kv_heads;
    int32_t reserved;
};

/* Collectives over the ranks of one group, enqueued on `stream` (a CPU engine: done on return). The
 * table and `user` outlive the model. All slots may be called from the thread that runs a step;
 * none may allocate. `error` may be NULL; a failure without a text is reported with the core's. */
struct attn_collectives {
    size_t struct_size;
    const struct attn_ext *next;
    void *user;
    int32_t rank;
    int32_t world_size;
    attn_status (*all_gather)(const struct attn_collective_args *args, struct attn_error *error);
    attn_status (*all_to_all)(const struct attn_collective_args *args, struct attn_error *error);
    attn_status (*reduce_scatter_f32)(const struct attn_collective_args *args,
                                      struct attn_error *error);
    attn_status (*all_reduce_max_f32)(const struct attn_collective_args *args,
                                      struct attn_error *error);
    /* Both or neither: the exchange of a small step, in place of collectives, copies and merges,
     * where `reduce` is ATTN_CP_ALL_TO_ALL. The same on all ranks. Rows are of 16-bit floats or
     * float32 and a multiple of 8 bytes. */
    attn_status (*gather_heads)(const struct attn_gather_heads_args *args,
                                struct attn_error *error);
    attn_status (*merge_heads)(const struct attn_merge_heads_args *args, struct attn_error *error);
    /* most that they take: T Hq times the bytes of its rows, D of both tensors or Dv, and 8 */
    size_t max_exchange_bytes;
};

/* Sums over ranks are of float32: 16-bit activations always go all to all. */
enum attn_cp_reduce { ATTN_CP_ALL_GATHER_REDUCE_SCATTER = 0, ATTN_CP_ALL_TO_ALL = 1 };
enum attn_cp_order { ATTN_CP_CONTIGUOUS = 0, ATTN_CP_ZIGZAG = 1 };

/* On attn_layer_desc. rank = pcp_rank * dcp_world + dcp_rank; interleave divides block_size. A
 * request of L keys has local(L) = floor(L / (n I)) I + clamp(L - floor(L / (n I)) n I - r I, 0, I)
 * of them on rank r of world n = pcp_world * dcp_world. With `decode` NULL every rank of `prefill`
 * has the whole cache.
 *
 * Of a request's Q queries, rank p of P = pcp_world has, in CONTIGUOUS order, those from p S to
 * (p + 1) S - 1, S = ceil(Q / P), and in ZIGZAG, S = ceil(Q / 2P), those of the slices p and
 * 2P - 1 - p of S queries each, in this order; slices past Q hold no query. */
struct attn_context_parallel {
    struct attn_ext ext; /* id ATTN_EXT_CONTEXT_PARALLEL */
    /* dcp: ranks that split the KV cache; NULL: none */
    const struct attn_collectives *decode;
    /* pcp: ranks that split a request's queries; NULL: none */
    const struct attn_collectives *prefill;
    int32_t interleave; /* I; 0 reads as 1 */
    int32_t reduce;     /* enum attn_cp_reduce */
    int32_t order;      /* enum attn_cp_order of a rank's prefill slices */
    int32_t reserved;
};

/* On attn_batch. */
struct attn_batch_context_parallel {
    struct attn_ext ext;                /* id ATTN_EXT_BATCH_CONTEXT */
    const int32_t *local_seq_lens;      /* device [R]: keys of the context on this rank */
    const int32_t *local_seq_lens_host; /* host [R], optional */
    int32_t max_local_seq_len;
    int32_t reserved;
    /* host [R]: queries of each request over all ranks of `prefill`; NULL: every rank has them all.
     * Such a batch has this rank's queries (in query_start_loc, num_tokens, and the rows of q, k, v
     * and out), the whole requests' seq_lens, and slots for the keys of all ranks, in the order of
     * requests and positions. */
    const int32_t *query_lens_host;
};

/* Which of one request's keys lie on a rank, see context_parallel_length and
 * context_parallel_slots. */
struct attn_rank_keys {
    size_t struct_size;
    const struct attn_ext *next;
    int32_t rank; /* as in attn_context_parallel */
    int32_t world_size;
    int32_t interleave; /* 0 reads as 1 */
    /* what follows is for slots alone */
    int32_t block_size;       /* a multiple of interleave */
    const int64_t *positions; /* host [num_positions] */
    int64_t num_positions;
    const int32_t *block_row; /* host: the request's row of this rank's block table */
};

/* Ready tables, each in a small library of its own, which an engine may link or open; the core
 * knows none. `create` is collective over the communicator, which stays the caller's; a failure of
 * a later call is ATTN_ERROR_DEVICE. destroy accepts NULL and is collective, too.
 *
 * libattn_mpi.so.0, attn_mpi_collectives_create: `communicator` is the Fortran handle of an MPI
 * communicator (MPI_Comm_c2f), so that no header of MPI is needed; host memory, `stream` ignored.
 *
 * libattn_nccl.so.0, attn_nccl_collectives_create: `communicator` is an ncclComm_t; device memory,
 * `stream` is a cudaStream_t (RCCL: hipStream_t). Where the ranks are processes of one host whose
 * GPUs reach each other's memory it has gather_heads and merge_heads, which are ordered as if on
 * one stream: an engine that runs steps side by side makes a table for each. Both give up, and the
 * process' CUDA context with them, when a rank has not come for 10 minutes. */
typedef attn_status attn_mpi_collectives_create_fn(int32_t communicator,
                                                   struct attn_collectives **collectives,
                                                   struct attn_error *error);
typedef attn_status attn_nccl_collectives_create_fn(void *communicator,
                                                    struct attn_collectives **collectives,
                                                    struct attn_error *error);
typedef void attn_collectives_destroy_fn(struct attn_collectives *collectives);
#define ATTN_MPI_COLLECTIVES_CREATE_SYMBOL "attn_mpi_collectives_create"
#define ATTN_MPI_COLLECTIVES_DESTROY_SYMBOL "attn_mpi_collectives_destroy"
#define ATTN_NCCL_COLLECTIVES_CREATE_SYMBOL "attn_nccl_collectives_create"
#define ATTN_NCCL_COLLECTIVES_DESTROY_SYMBOL "attn_nccl_collectives_destroy"

ATTN_STATIC_ASSERT(sizeof(struct attn_rank_keys) == 56, "attn_rank_keys of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_collective_args) == 56, "attn_collective_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_gather_heads_args) == 56,
                   "attn_gather_heads_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_merge_heads_args) == 88, "attn_merge_heads_args of ABI 0.3");
ATTN_STATIC_ASSERT(sizeof(struct attn_collectives) == 88, "attn_collectives of ABI 0.3");

#endif
