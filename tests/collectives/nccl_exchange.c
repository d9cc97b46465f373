/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of libattn_nccl's windows, with all ranks on one GPU, each on a stream of its own:
 * heads gathered and merged next to the definition, over and over through the same windows, and
 * what a rank that stays away does. Ends with 77 where there is no GPU. */
#include "../../collectives/exchange.h"
#include "support/number.h"
#include "support/random.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { RANKS = 8, EXIT_ABSENT = 77, REPEATS = 40, TIMED = 100 };

static struct exchange_window windows[RANKS];
static cudaStream_t streams[RANKS];
static int checks, failures;

#define HOLD(condition, ...)                                                                       \
    do {                                                                                           \
        checks++;                                                                                  \
        if (!(condition)) {                                                                        \
            failures++;                                                                            \
            printf("%s:%d: ", __FILE__, __LINE__);                                                 \
            printf(__VA_ARGS__);                                                                   \
            printf("\n");                                                                          \
        }                                                                                          \
    } while (0)

static void *device(const void *bytes, size_t size)
{
    void *memory = NULL;
    if (cudaMalloc(&memory, size) != cudaSuccess ||
        (bytes != NULL ? cudaMemcpy(memory, bytes, size, cudaMemcpyHostToDevice)
                       : cudaMemset(memory, 0xff, size)) != cudaSuccess) {
        printf("no device memory for %zu bytes\n", size);
        exit(2);
    }
    return memory;
}

static void open_windows(int32_t ranks, uint64_t patience)
{
    int32_t *missing = NULL;
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
    cudaHostAlloc((void **)&missing, sizeof *missing, cudaHostAllocMapped);
    *missing = 0;
    for (int32_t r = 0; r < ranks; r++) {
        size_t counters = EXCHANGE_BLOCKS * sizeof *windows[r].done;
        windows[0].of_rank[r] = device(NULL, exchange_window_bytes(ranks));
        cudaMemset(windows[0].of_rank[r], 0, exchange_window_bytes(ranks));
        windows[r].done = device(NULL, counters);
        cudaMemset(windows[r].done, 0, counters);
        windows[r].missing = missing;
        windows[r].patience = patience;
        windows[r].rank = r;
        windows[r].ranks = ranks;
        windows[r].overlaps = major >= 9;
        cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking);
    }
    for (int32_t r = 1; r < ranks; r++) {
        memcpy(windows[r].of_rank, windows[0].of_rank, sizeof windows[r].of_rank);
    }
    cudaDeviceSynchronize();
}

static void close_windows(int32_t ranks)
{
    for (int32_t r = 0; r < ranks; r++) {
        cudaFree(windows[0].of_rank[r]);
        cudaFree(windows[r].done);
        cudaStreamDestroy(streams[r]);
    }
    cudaFreeHost(windows[0].missing);
}

static uint64_t state = 1;

static float random_value(void)
{
    return (float)random_within(&state, 0.5);
}

static const int32_t dtypes[EXCHANGE_KINDS] = {[EXCHANGE_F32] = ATTN_DTYPE_F32,
                                               [EXCHANGE_BF16] = ATTN_DTYPE_BF16,
                                               [EXCHANGE_F16] = ATTN_DTYPE_F16};

static int32_t element_of(int32_t kind)
{
    return (int32_t)number_bytes(dtypes[kind]);
}

/* Elements at any address. */
static void put(uint8_t *at, int32_t kind, float value)
{
    float element;
    number_store(&element, 0, dtypes[kind], (double)value);
    memcpy(at, &element, number_bytes(dtypes[kind]));
}

static float get(const uint8_t *at, int32_t kind)
{
    float element;
    memcpy(&element, at, number_bytes(dtypes[kind]));
    return (float)number_load(&element, 0, dtypes[kind]);
}

struct shape {
    int32_t ranks, kind, tokens, hk, group;
    int32_t d[2];
    int32_t pad; /* elements after a head of the rows that have strides */
    bool own;
};

static struct exchange_sizes sizes_of(const struct shape *s)
{
    const int32_t element = element_of(s->kind), odd = s->pad * element % EXCHANGE_UNIT != 0;
    return (struct exchange_sizes){
        .tokens = s->tokens,
        .heads = s->hk * s->group,
        .group = s->group,
        .units = {s->d[0] * element / EXCHANGE_UNIT, s->d[1] * element / EXCHANGE_UNIT},
        .element = element,
        .unaligned = {odd, odd}};
}

static int64_t among_all(const struct shape *s, int64_t head, int64_t rank)
{
    return (head / s->group * s->ranks + rank) * s->group + head % s->group;
}

/* Rows of random numbers, `pad` elements after each head. */
static uint8_t *random_rows(int64_t rows, int32_t d, int32_t pad, int32_t kind)
{
    uint8_t *host = calloc((size_t)(rows * (d + pad) + 1), 4);
    for (int64_t i = 0; i < rows * (d + pad); i++) {
        put(host + i * element_of(kind), kind, random_value());
    }
    return host;
}

static struct exchange_rows strided(void *data, const struct shape *s, int32_t d)
{
    const int64_t head = (int64_t)(d + s->pad) * element_of(s->kind);
    return (struct exchange_rows){data, head * s->hk * s->group, head};
}

static void check_gather(const struct shape *s)
{
    const int64_t heads = s->hk * s->group, rows = s->tokens * heads, all = rows * s->ranks;
    const int32_t element = element_of(s->kind);
    struct exchange_gather a[RANKS] = {0};
    uint8_t *own[RANKS][2];
    for (int32_t r = 0; r < s->ranks; r++) {
        a[r].window = windows[r];
        a[r].sizes = sizes_of(s);
        for (int32_t i = 0; i < 2 && s->d[i] > 0; i++) {
            size_t bytes = (size_t)(rows * (s->d[i] + s->pad) * element);
            own[r][i] = random_rows(rows, s->d[i], s->pad, s->kind);
            a[r].own[i] = strided(device(own[r][i], bytes), s, s->d[i]);
            a[r].all[i] = device(NULL, (size_t)(all * s->d[i] * element));
        }
    }
    cudaDeviceSynchronize(); /* what fills memory is no part of these streams */
    for (int32_t r = 0; r < s->ranks; r++) {
        HOLD(exchange_launch_gather(&a[r], streams[r]) == cudaSuccess, "no launch");
    }
    cudaError_t ended = cudaDeviceSynchronize();
    HOLD(ended == cudaSuccess, "gather: %s", cudaGetErrorString(ended));
    for (int32_t r = 0; r < s->ranks; r++) {
        for (int32_t i = 0; i < 2 && s->d[i] > 0; i++) {
            const size_t row = (size_t)s->d[i] * (size_t)element;
            uint8_t *got = malloc((size_t)all * row);
            int64_t wrong = 0;
            cudaMemcpy(got, a[r].all[i], (size_t)all * row, cudaMemcpyDeviceToHost);
            for (int64_t j = 0; j < all; j++) {
                const int64_t from = j / rows, t = j % rows / heads, head = j % heads;
                wrong +=
                    memcmp(got + (t * heads * s->ranks + among_all(s, head, from)) * (int64_t)row,
                           own[from][i] + (t * heads + head) * (s->d[i] + s->pad) * element,
                           row) != 0;
            }
            HOLD(wrong == 0, "gather, %d ranks, kind %d, %d tokens, rank %d: %lld rows differ",
                 s->ranks, s->kind, s->tokens, r, (long long)wrong);
            free(got);
        }
    }
    for (int32_t r = 0; r < s->ranks; r++) {
        for (int32_t i = 0; i < 2 && s->d[i] > 0; i++) {
            cudaFree(a[r].own[i].data);
            cudaFree(a[r].all[i]);
            free(own[r][i]);
        }
    }
}

/* Most parts are there; some are empty, by either infinity. */
static float random_lse(void)
{
    const float x = random_value();
    return x > 0.4f ? -INFINITY : x > 0.3f ? INFINITY : 8 * x;
}

struct merge_part {
    uint8_t *out, *own;
    float *lse, *own_lse;
};

/* One row of rank r next to the definition: the largest difference. */
static double merge_difference(const struct shape *s, const struct merge_part *parts, int32_t r,
                               int64_t t, int64_t head, const uint8_t *out, float lse)
{
    const int64_t heads = s->hk * s->group, element = element_of(s->kind);
    double most = -INFINITY, sum = 0, worst = 0;
    const uint8_t *rows[RANKS + 1];
    float all_lse[RANKS + 1];
    int32_t count = 0;
    for (; count < s->ranks; count++) {
        const int64_t at = among_all(s, head, r);
        rows[count] = parts[count].out + (t * heads * s->ranks + at) * s->d[0] * element;
        all_lse[count] = parts[count].lse[at * s->tokens + t];
    }
    if (s->own) {
        rows[count] = parts[r].own + (t * heads + head) * (s->d[0] + s->pad) * element;
        all_lse[count++] = parts[r].own_lse[head * s->tokens + t];
    }
    for (int32_t i = 0; i < count; i++) {
        most = isinf(all_lse[i]) ? most : fmax(most, all_lse[i]);
    }
    for (int32_t i = 0; i < count; i++) {
        sum += isinf(all_lse[i]) ? 0 : exp(all_lse[i] - most);
    }
    for (int32_t j = 0; j < s->d[0]; j++) {
        double value = 0;
        for (int32_t i = 0; i < count; i++) {
            value += isinf(all_lse[i])
                         ? 0
                         : exp(all_lse[i] - most) / sum * get(rows[i] + j * element, s->kind);
        }
        double d = fabs(value - get(out + j * element, s->kind));
        worst = isnan(d) ? INFINITY : fmax(worst, d);
    }
    const double expected = sum == 0 ? -INFINITY : most + log(sum);
    return expected == lse ? worst : fmax(worst, 1e-2 * fabs(expected - lse));
}

static void check_merge(const struct shape *s)
{
    const int64_t heads = s->hk * s->group, rows = s->tokens * heads, all = rows * s->ranks;
    const int64_t element = element_of(s->kind),
                  strided_bytes = rows * (s->d[0] + s->pad) * element;
    struct exchange_merge a[RANKS] = {0};
    struct merge_part parts[RANKS] = {0};
    for (int32_t r = 0; r < s->ranks; r++) {
        parts[r] = (struct merge_part){random_rows(all, s->d[0], 0, s->kind),
                                       random_rows(rows, s->d[0], s->pad, s->kind),
                                       calloc((size_t)all, 4), calloc((size_t)rows, 4)};
        for (int64_t i = 0; i < all; i++) {
            parts[r].lse[i] = random_lse();
        }
        for (int64_t i = 0; i < rows; i++) {
            parts[r].own_lse[i] = random_lse();
        }
        a[r] = (struct exchange_merge){
            .window = windows[r],
            .sizes = sizes_of(s),
            .all = device(parts[r].out, (size_t)(all * s->d[0] * element)),
            .all_lse = device(parts[r].lse, (size_t)all * 4),
            .out = strided(device(parts[r].own, (size_t)strided_bytes), s, s->d[0]),
            .lse = {device(NULL, (size_t)rows * 4), s->tokens, 1},
            .own_lse = {device(parts[r].own_lse, (size_t)rows * 4), s->tokens, 1},
            .kind = s->kind};
        if (s->own) {
            a[r].own = a[r].out;
        }
    }
    cudaDeviceSynchronize();
    for (int32_t r = 0; r < s->ranks; r++) {
        HOLD(exchange_launch_merge(&a[r], streams[r]) == cudaSuccess, "no launch");
    }
    cudaError_t ended = cudaDeviceSynchronize();
    HOLD(ended == cudaSuccess, "merge: %s", cudaGetErrorString(ended));
    for (int32_t r = 0; r < s->ranks; r++) {
        uint8_t *out = malloc((size_t)strided_bytes);
        float *lse = malloc((size_t)rows * 4);
        double worst = 0;
        cudaMemcpy(out, a[r].out.data, (size_t)strided_bytes, cudaMemcpyDeviceToHost);
        cudaMemcpy(lse, a[r].lse.data, (size_t)rows * 4, cudaMemcpyDeviceToHost);
        for (int64_t i = 0; i < rows; i++) {
            const int64_t t = i / heads, head = i % heads;
            worst = fmax(worst,
                         merge_difference(s, parts, r, t, head,
                                          out + (t * heads + head) * (s->d[0] + s->pad) * element,
                                          lse[head * s->tokens + t]));
        }
        const double bound = s->kind == EXCHANGE_F32 ? 1e-6 : s->kind == EXCHANGE_F16 ? 3e-4 : 2e-3;
        HOLD(worst < bound, "merge, %d ranks, kind %d, %d tokens, rank %d: differs by %g", s->ranks,
             s->kind, s->tokens, r, worst);
        free(out);
        free(lse);
    }
    for (int32_t r = 0; r < s->ranks; r++) {
        cudaFree((void *)a[r].all);
        cudaFree((void *)a[r].all_lse);
        cudaFree(a[r].out.data);
        cudaFree(a[r].lse.data);
        cudaFree(a[r].own_lse.data);
        free(parts[r].out);
        free(parts[r].own);
        free(parts[r].lse);
        free(parts[r].own_lse);
    }
}

/* Few ranks and many, few rows and many, through the same windows; REPEATS times, so that halves
 * are written again and again. */
static void check_exchanges(int32_t ranks)
{
    open_windows(ranks, UINT64_C(20000000000));
    for (int32_t i = 0; i < REPEATS; i++) {
        const struct shape s = {ranks,     i % 3,         i % 7 == 0 ? 37 : 1 + i % 5,
                                1 + i % 4, 1 + i / 4 % 5, {i % 2 ? 512 : 128, i % 4 == 1 ? 64 : 0},
                                i % 5,     i % 3 != 1};
        check_gather(&s);
        check_merge(&s);
    }
    close_windows(ranks);
}

/* A rank alone: its kernel ends, and says who was missing. */
static void check_missing(void)
{
    const struct shape s = {2, EXCHANGE_BF16, 1, 1, 4, {128, 0}, 0, false};
    open_windows(2, UINT64_C(100000000));
    struct exchange_gather a = {.window = windows[0], .sizes = sizes_of(&s)};
    a.own[0] = strided(device(NULL, 4096), &s, 128);
    a.all[0] = device(NULL, 4096);
    exchange_launch_gather(&a, streams[0]);
    cudaError_t ended = cudaDeviceSynchronize();
    HOLD(ended != cudaSuccess && *windows[0].missing == 2, "alone: %s, missing %d",
         cudaGetErrorString(ended), *windows[0].missing);
}

/* A gather and a merge of a decode, both ranks on this GPU, out of graphs. */
static void time_exchange(const char *name, const struct shape *s)
{
    cudaGraphExec_t graphs[2];
    cudaEvent_t begin, ended;
    float ms = 0, best = INFINITY;
    const int64_t heads = s->hk * s->group;
    open_windows(2, UINT64_C(20000000000));
    for (int32_t r = 0; r < 2; r++) {
        cudaGraph_t captured;
        struct exchange_gather a = {.window = windows[r], .sizes = sizes_of(s)};
        struct exchange_merge b = {.window = windows[r], .sizes = a.sizes, .kind = s->kind};
        b.sizes.units[1] = 0;
        for (int32_t i = 0; i < 2; i++) {
            a.own[i] = strided(device(NULL, (size_t)(heads * s->d[i] * 2 + 8)), s, s->d[i]);
            a.all[i] = device(NULL, (size_t)(heads * s->d[i] * 4 + 8));
        }
        b.all = a.all[0];
        b.all_lse = device(NULL, (size_t)heads * 8);
        b.out = a.own[0];
        cudaStreamBeginCapture(streams[r], cudaStreamCaptureModeThreadLocal);
        for (int32_t i = 0; i < TIMED; i++) {
            exchange_launch_gather(&a, streams[r]);
            exchange_launch_merge(&b, streams[r]);
        }
        cudaStreamEndCapture(streams[r], &captured);
        HOLD(cudaGraphInstantiate(&graphs[r], captured, 0) == cudaSuccess, "no graph");
    }
    cudaEventCreate(&begin);
    cudaEventCreate(&ended);
    for (int32_t i = 0; i < 6; i++) {
        cudaEventRecord(begin, streams[0]);
        cudaGraphLaunch(graphs[0], streams[0]);
        cudaGraphLaunch(graphs[1], streams[1]);
        cudaEventRecord(ended, streams[0]);
        HOLD(cudaDeviceSynchronize() == cudaSuccess, "the graphs: %s",
             cudaGetErrorString(cudaGetLastError()));
        cudaEventElapsedTime(&ms, begin, ended);
        best = i > 0 ? fminf(best, ms) : best;
    }
    printf("%s: gather and merge %.2f us\n", name, best * 1e3 / TIMED);
    close_windows(2);
}

int main(void)
{
    static const struct shape decode = {2, EXCHANGE_BF16, 1, 8, 2, {128, 0}, 0, false};
    static const struct shape latent = {2, EXCHANGE_BF16, 1, 1, 64, {512, 64}, 0, false};
    int devices = 0, status = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    pid_t child = fork(); /* its context does not survive */
    if (child == 0) {
        check_missing();
        return failures > 0;
    }
    waitpid(child, &status, 0);
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        printf("no GPU\n");
        return EXIT_ABSENT;
    }
    HOLD(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a rank alone: status %d", status);
    HOLD(exchange_load() == cudaSuccess, "the kernels do not load");
    check_exchanges(2);
    check_exchanges(3);
    check_exchanges(RANKS);
    time_exchange("32/8 heads, D 128", &decode);
    time_exchange("MLA, 128 heads", &latent);
    printf("exchange: %d checks, %d failures\n", checks, failures);
    return failures > 0;
}
