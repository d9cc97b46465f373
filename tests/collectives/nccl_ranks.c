/* SPDX-License-Identifier: Apache-2.0 */
/* On a machine with several GPUs: libattn_nccl's table by itself, then a layer spread over the GPUs
 * next to the same layer on one. One process a GPU. usage: nccl_ranks RANKS LIBATTN PLUGIN_PATH;
 * exit 77 where there are fewer GPUs */
#include <nccl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "nccl_ranks.h"

#define EXIT_ABSENT 77
#define MAX_RANKS 8
#define LARGEST ((size_t)1 << 20) /* float32 of a rank */

attn_nccl_collectives_create_fn attn_nccl_collectives_create;
attn_collectives_destroy_fn attn_nccl_collectives_destroy;

/* Before the fork, so that all ranks find one communicator. */
struct meeting {
    atomic_int ready;
    ncclUniqueId id;
};

void *device_copy(const void *bytes, size_t size)
{
    void *memory = NULL;
    size_t room = size > 0 ? size : 1;
    if (cudaMalloc(&memory, room) != cudaSuccess) {
        return NULL;
    }
    cudaError_t status = bytes != NULL ? cudaMemcpy(memory, bytes, size, cudaMemcpyHostToDevice)
                                       : cudaMemset(memory, 0xff, room);
    /* neither waits for the device, nor do the streams of the checks for either */
    status = status == cudaSuccess ? cudaDeviceSynchronize() : status;
    return status == cudaSuccess ? memory : NULL;
}

/* What rank `from` sends at element i of the part for rank `to`: whole numbers, so that sums are
 * exact in any order. */
static float element(int32_t from, int32_t to, size_t i)
{
    return (float)((from * 31 + to * 7 + (int32_t)(i % 1021) * 3) % 2039 - 1000);
}

enum entry { ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, ALL_REDUCE_MAX, ENTRIES };

static float expected(enum entry entry, int32_t rank, int32_t n, size_t count, size_t i)
{
    float value = entry == ALL_REDUCE_MAX ? -1e9f : 0;
    if (entry == ALL_GATHER) {
        return element((int32_t)(i / count), 0, i % count);
    }
    if (entry == ALL_TO_ALL) {
        return element((int32_t)(i / count), rank, i % count);
    }
    for (int32_t from = 0; from < n; from++) {
        float theirs = element(from, entry == REDUCE_SCATTER ? rank : 0, i);
        value = entry == REDUCE_SCATTER ? value + theirs : (theirs > value ? theirs : value);
    }
    return value;
}

static attn_status call(const struct attn_collectives *c, enum entry entry, const float *send,
                        float *receive, size_t count, void *stream)
{
    const bool bytes = entry == ALL_GATHER || entry == ALL_TO_ALL;
    const struct attn_collective_args args = {.struct_size = sizeof args,
                                              .user = c->user,
                                              .send = send,
                                              .receive = receive,
                                              .count = bytes ? count * sizeof *send : count,
                                              .stream = stream};
    switch (entry) {
    case ALL_GATHER:
        return c->all_gather(&args, NULL);
    case ALL_TO_ALL:
        return c->all_to_all(&args, NULL);
    case REDUCE_SCATTER:
        return c->reduce_scatter_f32(&args, NULL);
    default:
        return c->all_reduce_max_f32(&args, NULL);
    }
}

/* Everything on `stream`, none of it waited for: the send buffer is filled after a long memset, so
 * that a collective on another stream would send what was there before. */
static void check_entry(struct rank *rank, enum entry entry, size_t count, cudaStream_t stream)
{
    static const char *names[] = {"all_gather", "all_to_all", "reduce_scatter_f32",
                                  "all_reduce_max_f32"};
    int32_t n = rank->ranks->world_size, me = rank->ranks->rank;
    size_t sent = count * (entry == ALL_TO_ALL || entry == REDUCE_SCATTER ? (size_t)n : 1);
    size_t received = count * (entry == ALL_GATHER || entry == ALL_TO_ALL ? (size_t)n : 1);
    size_t bytes = sent * sizeof(float), wrong = 0, busy = (size_t)256 << 20;
    float *host = malloc(bytes + 1), *got = malloc((received + 1) * sizeof *got);
    for (size_t i = 0; i < sent; i++) {
        host[i] = element(me, count > 0 ? (int32_t)(i / count) : 0, i % (count > 0 ? count : 1));
    }
    float *staged = device_copy(host, bytes), *send = device_copy(NULL, bytes);
    float *receive = device_copy(NULL, (received + 1) * sizeof *got);
    void *room = device_copy(NULL, busy);
    bool memory = staged != NULL && send != NULL && receive != NULL && room != NULL;
    HOLD(rank, memory, "no device memory");
    if (memory) {
        cudaDeviceSynchronize();
        cudaMemsetAsync(room, 0, busy, stream);
        cudaMemcpyAsync(send, staged, bytes, cudaMemcpyDeviceToDevice, stream);
        attn_status status = call(rank->ranks, entry, send, receive, count, stream);
        HOLD(rank, status == ATTN_OK, "%s of %zu: status %d", names[entry], count, status);
        cudaMemsetAsync(send, 0xff, bytes, stream); /* not before the collective has read it */
        cudaStreamSynchronize(stream);
        cudaMemcpy(got, receive, (received + 1) * sizeof *got, cudaMemcpyDeviceToHost);
        for (size_t i = 0; i < received; i++) {
            wrong += got[i] != expected(entry, me, n, count, i);
        }
        HOLD(rank, wrong == 0, "%s of %zu: %zu elements differ", names[entry], count, wrong);
        HOLD(rank, got[received] != got[received], "%s of %zu wrote past its end", names[entry],
             count);
    }
    cudaFree(room);
    cudaFree(receive);
    cudaFree(send);
    cudaFree(staged);
    free(got);
    free(host);
}

/* Bytes that are no whole float32, at an odd address. */
static void check_odd_bytes(struct rank *rank, size_t bytes)
{
    int32_t n = rank->ranks->world_size;
    uint8_t *host = malloc(bytes), *got = malloc(bytes * (size_t)n);
    memset(host, 17 + rank->ranks->rank, bytes);
    uint8_t *send = device_copy(NULL, bytes + 1), *receive = device_copy(NULL, bytes * (size_t)n);
    cudaMemcpy(send + 1, host, bytes, cudaMemcpyHostToDevice);
    const struct attn_collective_args args = {.struct_size = sizeof args,
                                              .user = rank->ranks->user,
                                              .send = send + 1,
                                              .receive = receive,
                                              .count = bytes,
                                              .stream = rank->stream};
    attn_status status = rank->ranks->all_gather(&args, NULL);
    cudaStreamSynchronize(rank->stream);
    cudaMemcpy(got, receive, bytes * (size_t)n, cudaMemcpyDeviceToHost);
    size_t wrong = 0;
    for (size_t i = 0; i < bytes * (size_t)n; i++) {
        wrong += got[i] != 17 + i / bytes;
    }
    HOLD(rank, status == ATTN_OK && wrong == 0, "all_gather of %zu bytes: status %d, %zu differ",
         bytes, status, wrong);
    cudaFree(send);
    cudaFree(receive);
    free(host);
    free(got);
}

/* Refusals of create, and a call that NCCL refuses on every rank alike. */
static void check_errors(struct rank *rank, ncclComm_t comm)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_collectives *made = (struct attn_collectives *)rank;
    void *no_communicator = calloc(1, (size_t)1 << 22);
    attn_status status = attn_nccl_collectives_create(NULL, &made, &error);
    HOLD(rank, status == ATTN_ERROR_INVALID_ARGUMENT && strcmp(error.field, "communicator") == 0,
         "create without a communicator: %d, %s", status, error.field);
    status = attn_nccl_collectives_create(comm, NULL, &error);
    HOLD(rank, status == ATTN_ERROR_INVALID_ARGUMENT && strcmp(error.field, "collectives") == 0,
         "create without a place: %d, %s", status, error.field);
    status = attn_nccl_collectives_create(no_communicator, &made, &error);
    HOLD(rank, status == ATTN_ERROR_DEVICE && made == NULL && error.message[0] != '\0',
         "create on what is no communicator: %d, %s", status, error.message);
    free(no_communicator);
    attn_nccl_collectives_destroy(NULL);
    float on_host[2 * MAX_RANKS] = {0}; /* NCCL_CHECK_POINTERS is set: see main */
    for (int32_t entry = 0; entry < ENTRIES; entry++) {
        status = call(rank->ranks, entry, NULL, on_host, 1, rank->stream);
        HOLD(rank, status == ATTN_ERROR_DEVICE, "entry %d with no send buffer: status %d", entry,
             status);
    }
    cudaGetLastError();
}

bool has_windows(const struct attn_collectives *ranks)
{
    return ranks->struct_size >= sizeof *ranks && ranks->gather_heads != NULL;
}

struct attn_collectives without_windows(const struct attn_collectives *ranks)
{
    struct attn_collectives table = *ranks;
    table.struct_size = offsetof(struct attn_collectives, gather_heads);
    return table;
}

void check_table(struct rank *rank)
{
    static const size_t counts[] = {1, 2, 3, 255, 4096, 65537, LARGEST};
    cudaStream_t other;
    HOLD(rank, cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking) == cudaSuccess,
         "no stream");
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        for (int32_t entry = 0; entry < ENTRIES; entry++) {
            check_entry(rank, entry, counts[i], i % 2 ? other : rank->stream);
        }
    }
    check_odd_bytes(rank, 1);
    check_odd_bytes(rank, 4097);
    cudaStreamDestroy(other);
}

static int run_rank(struct rank *rank, int32_t me, int32_t n, struct meeting *meeting)
{
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_collectives *made = NULL;
    ncclComm_t comm;
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices < n) {
        printf("%d GPUs, %d ranks\n", devices, n);
        return EXIT_ABSENT;
    }
    if (me == 0 && ncclGetUniqueId(&meeting->id) == ncclSuccess) {
        atomic_store(&meeting->ready, 1);
    }
    for (int32_t i = 0; i < 60000 && atomic_load(&meeting->ready) == 0; i++) {
        usleep(1000);
    }
    cudaSetDevice(me);
    cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking);
    ncclResult_t result = ncclCommInitRank(&comm, n, meeting->id, me);
    if (result != ncclSuccess) {
        printf("ncclCommInitRank: %s\n", ncclGetErrorString(result));
        return 1;
    }
    if (attn_nccl_collectives_create(comm, &made, &error) != ATTN_OK) {
        printf("%s: %s\n", error.field, error.message);
        return 1;
    }
    rank->ranks = made;
    HOLD(rank, made->rank == me && made->world_size == n, "rank %d of %d", made->rank,
         made->world_size);
    printf("rank %d: %s windows\n", me, has_windows(made) ? "has" : "no");
    check_table(rank);
    check_spread(rank);
    if (rank->failures == 0) {
        time_spread(rank);
    }
    check_errors(rank, comm); /* last: NCCL may refuse more after what it refused once */
    printf("rank %d of %d: %d checks, %d failures\n", me, n, rank->checks, rank->failures);
    attn_nccl_collectives_destroy(made);
    ncclCommDestroy(comm);
    return rank->failures > 0;
}

int main(int argc, char **argv)
{
    int32_t n = argc == 4 ? (int32_t)strtol(argv[1], NULL, 10) : 0;
    struct rank rank = {.core = argv[2], .plugins = argv[3]};
    struct meeting *meeting =
        mmap(NULL, sizeof *meeting, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (n < 2 || n > MAX_RANKS || meeting == MAP_FAILED) {
        fprintf(stderr, "usage: nccl_ranks RANKS LIBATTN PLUGIN_PATH (2 to %d ranks)\n", MAX_RANKS);
        return 2;
    }
    setenv("NCCL_CHECK_POINTERS", "1", 0);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int32_t me = 0; me < n; me++) {
        pid_t child = fork(); /* before CUDA is touched */
        if (child == 0) {
            return run_rank(&rank, me, n, meeting);
        }
        if (child < 0) {
            fprintf(stderr, "fork failed\n");
            return 2;
        }
    }
    int worst = 0, status = 0;
    for (int32_t i = 0; i < n; i++) {
        wait(&status);
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
        worst = worst == 0 || (worst == EXIT_ABSENT && code != 0) ? code : worst;
    }
    return worst;
}
