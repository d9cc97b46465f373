/* SPDX-License-Identifier: Apache-2.0 */
#include "peer_memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "table.h"

enum { PATIENCE_SECONDS = 600, HOST_SIZE = 40 };

/* What a rank tells the others. */
struct card {
    cudaIpcMemHandle_t memory;
    char host[HOST_SIZE]; /* the kernel's name of this boot of it */
    int32_t ready;
};

/* The caller's current device comes back. */
static int enter(int device)
{
    int before = device;
    if (cudaGetDevice(&before) == cudaSuccess && before != device) {
        cudaSetDevice(device);
    }
    return before;
}

static void leave(int before, int device)
{
    if (before != device) {
        cudaSetDevice(before);
    }
}

static bool name_host(char *name)
{
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "r");
    bool read = file != NULL && fgets(name, HOST_SIZE, file) != NULL;
    if (file != NULL) {
        fclose(file);
    }
    return read;
}

/* This rank's window, cleared. */
static bool make_buffer(struct peer_memory *w, cudaStream_t stream)
{
    const size_t bytes = exchange_window_bytes(w->kernel.ranks);
    const size_t counters = EXCHANGE_BLOCKS * sizeof *w->kernel.done;
    void **own = &w->kernel.of_rank[w->kernel.rank];
    int major = 0;
    if (cudaMalloc(own, bytes) != cudaSuccess ||
        cudaMalloc((void **)&w->kernel.done, counters) != cudaSuccess ||
        cudaHostAlloc((void **)&w->kernel.missing, sizeof *w->kernel.missing,
                      cudaHostAllocMapped | cudaHostAllocPortable) != cudaSuccess) {
        return false;
    }
    *w->kernel.missing = 0;
    w->kernel.overlaps = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor,
                                                w->device) == cudaSuccess &&
                         major >= 9;
    return exchange_load() == cudaSuccess &&
           cudaMemsetAsync(*own, 0, bytes, stream) == cudaSuccess &&
           cudaMemsetAsync(w->kernel.done, 0, counters, stream) == cudaSuccess &&
           cudaStreamSynchronize(stream) == cudaSuccess;
}

/* The cards of all ranks, through device memory at `staged`. */
static bool show_cards(struct card *cards, struct card *staged, int rank, int size, ncclComm_t comm,
                       cudaStream_t stream)
{
    return cudaMemcpyAsync(staged + rank, cards + rank, sizeof *cards, cudaMemcpyHostToDevice,
                           stream) == cudaSuccess &&
           ncclAllGather(staged + rank, staged, sizeof *cards, ncclUint8, comm, stream) ==
               ncclSuccess &&
           cudaMemcpyAsync(cards, staged, (size_t)size * sizeof *cards, cudaMemcpyDeviceToHost,
                           stream) == cudaSuccess &&
           cudaStreamSynchronize(stream) == cudaSuccess;
}

static bool all_ready(const struct card *cards, int rank, int size)
{
    bool ready = true;
    for (int i = 0; i < size; i++) {
        ready &= cards[i].ready && strcmp(cards[i].host, cards[rank].host) == 0;
    }
    return ready;
}

static bool map_peers(struct peer_memory *w, const struct card *cards)
{
    bool mapped = true;
    for (int i = 0; i < w->kernel.ranks && mapped; i++) {
        mapped = i == w->kernel.rank ||
                 cudaIpcOpenMemHandle(&w->kernel.of_rank[i], cards[i].memory,
                                      cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    }
    return mapped;
}

/* Whatever a rank lacks, it takes part to the end, and the others learn of it. */
static bool open_all(struct peer_memory *w, struct card *cards, struct card *staged,
                     ncclComm_t comm, cudaStream_t stream)
{
    const int rank = w->kernel.rank, size = w->kernel.ranks;
    struct card *own = &cards[rank];
    own->ready = make_buffer(w, stream) && name_host(own->host) &&
                 cudaIpcGetMemHandle(&own->memory, w->kernel.of_rank[rank]) == cudaSuccess;
    if (!show_cards(cards, staged, rank, size, comm, stream)) {
        return false;
    }
    own->ready = all_ready(cards, rank, size) && map_peers(w, cards);
    return show_cards(cards, staged, rank, size, comm, stream) && all_ready(cards, rank, size);
}

bool peer_memory_open(struct peer_memory *w, ncclComm_t comm, int rank, int size)
{
    struct card *cards = NULL, *staged = NULL;
    cudaStream_t stream = NULL;
    bool opened = false;
    if (size < 2 || size > EXCHANGE_MAX_RANKS ||
        ncclCommCuDevice(comm, &w->device) != ncclSuccess) {
        return false;
    }
    const int before = enter(w->device);
    w->kernel.rank = rank;
    w->kernel.ranks = size;
    w->kernel.patience = PATIENCE_SECONDS * UINT64_C(1000000000);
    cards = calloc((size_t)size, sizeof *cards);
    if (cards != NULL && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaMalloc((void **)&staged, (size_t)size * sizeof *staged) == cudaSuccess) {
        opened = open_all(w, cards, staged, comm, stream);
    }
    cudaFree(staged);
    if (stream != NULL) {
        cudaStreamDestroy(stream);
    }
    free(cards);
    if (!opened) {
        peer_memory_close(w);
        cudaGetLastError(); /* a refusal here is no error of a later call */
    }
    leave(before, w->device);
    return opened;
}

void peer_memory_close(struct peer_memory *w)
{
    if (w->kernel.ranks == 0) {
        return;
    }
    const int before = enter(w->device);
    cudaDeviceSynchronize();
    for (int i = 0; i < w->kernel.ranks; i++) {
        if (i != w->kernel.rank && w->kernel.of_rank[i] != NULL) {
            cudaIpcCloseMemHandle(w->kernel.of_rank[i]);
        }
    }
    cudaFree(w->kernel.of_rank[w->kernel.rank]);
    cudaFree(w->kernel.done);
    cudaFreeHost(w->kernel.missing);
    w->kernel.ranks = 0;
    leave(before, w->device);
}

static attn_status launched(const struct peer_memory *w, cudaError_t result,
                            struct attn_error *error)
{
    char text[96];
    if (*(volatile int32_t *)w->kernel.missing != 0) {
        snprintf(text, sizeof text, "rank %" PRId32 " did not come to an exchange within %d s",
                 *(volatile int32_t *)w->kernel.missing - 1, PATIENCE_SECONDS);
        return table_refuse(error, ATTN_ERROR_DEVICE, "collectives", text);
    }
    return result == cudaSuccess
               ? ATTN_OK
               : table_refuse(error, ATTN_ERROR_DEVICE, "collectives", cudaGetErrorString(result));
}

static uint8_t *data_of(const struct attn_tensor *tensor)
{
    return (uint8_t *)tensor->data + tensor->byte_offset;
}

/* [T, heads, D]; says whether a unit of it may lie at no multiple of its size. */
static int32_t rows_of(struct exchange_rows *rows, const struct attn_tensor *tensor)
{
    const int64_t element = tensor->dtype.bits / 8, *strides = tensor->strides;
    *rows = (struct exchange_rows){
        data_of(tensor),
        element * (strides != NULL ? strides[0] : tensor->shape[1] * tensor->shape[2]),
        element * (strides != NULL ? strides[1] : tensor->shape[2])};
    return ((uintptr_t)rows->data | (uint64_t)rows->row | (uint64_t)rows->head) % EXCHANGE_UNIT !=
           0;
}

static struct exchange_lse lse_of(const struct attn_tensor *tensor)
{
    return (struct exchange_lse){(float *)data_of(tensor),
                                 tensor->strides != NULL ? tensor->strides[0] : tensor->shape[1],
                                 tensor->strides != NULL ? tensor->strides[1] : 1};
}

/* Sizes of this rank's rows [T, Hq, .] next to `all` [T, n Hq, D]; too large ones are refused. */
static attn_status size_up(struct exchange_sizes *s, const struct peer_memory *w,
                           const struct attn_tensor *const *all, int32_t count,
                           int32_t num_kv_heads, struct attn_error *error)
{
    int64_t bytes = EXCHANGE_UNIT, units[2] = {0, 0};
    const int64_t tokens = all[0]->shape[0], heads = all[0]->shape[1] / w->kernel.ranks;
    for (int32_t i = 0; i < count; i++) {
        units[i] = all[i]->shape[2] * (all[i]->dtype.bits / 8) / EXCHANGE_UNIT;
        bytes += units[i] * EXCHANGE_UNIT;
        s->units[i] = (int32_t)units[i];
    }
    if (bytes > EXCHANGE_MAX_BYTES || tokens * heads > EXCHANGE_MAX_BYTES / bytes) {
        return table_refuse(error, ATTN_ERROR_LIMIT, "collectives",
                            "more rows than max_exchange_bytes");
    }
    s->tokens = (int32_t)tokens;
    s->heads = (int32_t)heads;
    s->group = (int32_t)heads / num_kv_heads;
    s->element = all[0]->dtype.bits / 8;
    return ATTN_OK;
}

attn_status peer_memory_gather(const struct peer_memory *w,
                               const struct attn_gather_heads_args *args, struct attn_error *error)
{
    struct exchange_gather a = {.window = w->kernel};
    attn_status status = size_up(&a.sizes, w, args->all, args->count, args->num_kv_heads, error);
    if (status != ATTN_OK) {
        return status;
    }
    for (int32_t i = 0; i < args->count; i++) {
        a.sizes.unaligned[i] = rows_of(&a.own[i], args->own[i]);
        a.all[i] = data_of(args->all[i]);
    }
    const int before = enter(w->device);
    cudaError_t result = exchange_launch_gather(&a, (cudaStream_t)args->stream);
    leave(before, w->device);
    return launched(w, result, error);
}

/* A value of enum exchange_kind, or -1. */
static int32_t kind_of(const struct attn_tensor *tensor)
{
    const struct attn_dtype dtype = tensor->dtype;
    if (dtype.code == ATTN_CODE_FLOAT) {
        return dtype.bits == 32 ? EXCHANGE_F32 : dtype.bits == 16 ? EXCHANGE_F16 : -1;
    }
    return dtype.code == ATTN_CODE_BFLOAT && dtype.bits == 16 ? EXCHANGE_BF16 : -1;
}

attn_status peer_memory_merge(const struct peer_memory *w, const struct attn_merge_heads_args *args,
                              struct attn_error *error)
{
    struct exchange_merge a = {.window = w->kernel,
                               .all = data_of(args->all_out),
                               .all_lse = (const float *)data_of(args->all_lse),
                               .kind = kind_of(args->all_out)};
    attn_status status = size_up(&a.sizes, w, &args->all_out, 1, args->num_kv_heads, error);
    if (status == ATTN_OK && a.kind < 0) {
        status =
            table_refuse(error, ATTN_ERROR_UNSUPPORTED, "collectives", "rows of no float's dtype");
    }
    if (status != ATTN_OK) {
        return status;
    }
    if (args->own_out != NULL) {
        a.sizes.unaligned[0] = rows_of(&a.own, args->own_out);
        a.own_lse = lse_of(args->own_lse);
    }
    a.sizes.unaligned[1] = rows_of(&a.out, args->out);
    if (args->lse != NULL) {
        a.lse = lse_of(args->lse);
    }
    const int before = enter(w->device);
    cudaError_t result = exchange_launch_merge(&a, (cudaStream_t)args->stream);
    leave(before, w->device);
    return launched(w, result, error);
}
