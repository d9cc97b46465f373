/* SPDX-License-Identifier: Apache-2.0 */
/* A device of its own memory, on any CPU: cpu_ref's kernels on pages that nothing may touch but
 * while one of them runs. Whoever reads or writes device memory on the host is killed by SIGSEGV,
 * and a kernel that is handed the host's memory, or a tensor that names another device, fails, as
 * on a GPU. What is left allocated when the process ends is reported on stderr.
 *
 * FAKE_DEVICE_BYTES: how much memory it has. FAKE_DEVICE_FAILS=N: the N-th attend answers ATTN_OK,
 * and everything after it fails, as work of a GPU does that has been enqueued and went wrong.
 * FAKE_DEVICE_LAYERS=MASK: the kinds that it serves, bits 1 << enum attn_layer_kind.
 * FAKE_DEVICE_WITHOUT=BITS: ATTN_FEATURE_* that it does not declare.
 * FAKE_DEVICE_BLOCK=SLOTS: the one block size that it takes. */
#include "fake_device.h"

#include <attn/draft/index_write.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define RESERVED ((size_t)32 << 30) /* addresses; pages come when they are touched */
#define MAX_BLOCKS 65536
#define PAGE 4096
#define POISONED 65536 /* bytes at the beginning of a fresh allocation */

struct block {
    size_t at, bytes; /* in the arena, of whole pages */
    bool used;
};

static const struct attn_plugin *real;
static struct attn_plugin mine;
static struct attn_kernels real_kernels;
static const struct attn_probe_sink *outer; /* while a probe runs */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint8_t *arena;
static size_t capacity, top, taken;
static struct block blocks[MAX_BLOCKS];
static int32_t num_blocks, inside, attends_left, num_streams, num_hosts;
static bool failed;

static attn_status fail(struct attn_error *error, attn_status status, const char *field,
                        const char *what)
{
    if (error != NULL) {
        error->status = status;
        snprintf(error->field, sizeof error->field, "%s", field);
        snprintf(error->message, sizeof error->message, "fake_device: %s", what);
    }
    return status;
}

static long number_of(const char *variable, long otherwise)
{
    const char *text = getenv(variable);
    return text != NULL && text[0] != '\0' ? strtol(text, NULL, 0) : otherwise;
}

static bool open_arena(void)
{
    pthread_mutex_lock(&lock);
    if (arena == NULL) {
        void *pages =
            mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        arena = pages != MAP_FAILED ? pages : NULL;
        /* fewer pages to protect around each kernel */
        (void)madvise(pages, RESERVED, MADV_HUGEPAGE);
        capacity = (size_t)number_of("FAKE_DEVICE_BYTES", (long)RESERVED);
        capacity = capacity < RESERVED ? capacity : RESERVED;
        attends_left = (int32_t)number_of("FAKE_DEVICE_FAILS", 0);
    }
    pthread_mutex_unlock(&lock);
    return arena != NULL;
}

bool fake_device_owns(const void *address)
{
    return arena != NULL && (const uint8_t *)address >= arena &&
           (const uint8_t *)address < arena + RESERVED;
}

/* A kernel begins, or ends: the pages are there as long as one runs. */
static void enter(void)
{
    pthread_mutex_lock(&lock);
    if (inside++ == 0 && top > 0 && mprotect(arena, top, PROT_READ | PROT_WRITE) != 0) {
        abort();
    }
    pthread_mutex_unlock(&lock);
}

static void leave(void)
{
    pthread_mutex_lock(&lock);
    if (--inside == 0 && top > 0 && mprotect(arena, top, PROT_NONE) != 0) {
        abort();
    }
    pthread_mutex_unlock(&lock);
}

static attn_status broken(struct attn_error *error)
{
    return failed ? fail(error, ATTN_ERROR_DEVICE, "attend",
                         "an illegal memory access was encountered")
                  : ATTN_OK;
}

/* Blocks stand in the order of their addresses and fill the arena up to `top`. */
static void insert_block(int32_t at, struct block block)
{
    memmove(&blocks[at + 1], &blocks[at], (size_t)(num_blocks - at) * sizeof *blocks);
    blocks[at] = block;
    num_blocks++;
}

static void remove_block(int32_t at)
{
    num_blocks--;
    memmove(&blocks[at], &blocks[at + 1], (size_t)(num_blocks - at) * sizeof *blocks);
}

/* Takes the first free block that is large enough, or new pages. NULL: none are left. */
static void *take_pages(size_t bytes)
{
    size_t rounded = (bytes + PAGE - 1) / PAGE * PAGE;
    int32_t at = 0;
    while (at < num_blocks && (blocks[at].used || blocks[at].bytes < rounded)) {
        at++;
    }
    if (rounded > capacity - taken || num_blocks == MAX_BLOCKS ||
        (at == num_blocks && rounded > RESERVED - top)) {
        return NULL;
    }
    if (at == num_blocks) {
        if (inside > 0 && mprotect(arena + top, rounded, PROT_READ | PROT_WRITE) != 0) {
            abort();
        }
        insert_block(at, (struct block){top, rounded, false});
        top += rounded;
    } else if (blocks[at].bytes > rounded) {
        insert_block(at + 1,
                     (struct block){blocks[at].at + rounded, blocks[at].bytes - rounded, false});
        blocks[at].bytes = rounded;
    }
    blocks[at].used = true;
    taken += rounded;
    return arena + blocks[at].at;
}

/* False: no block begins there. */
static bool give_pages(const void *memory)
{
    int32_t at = 0;
    while (at < num_blocks && (!blocks[at].used || arena + blocks[at].at != memory)) {
        at++;
    }
    if (at == num_blocks) {
        return false;
    }
    blocks[at].used = false;
    taken -= blocks[at].bytes;
    if (at + 1 < num_blocks && !blocks[at + 1].used) {
        blocks[at].bytes += blocks[at + 1].bytes;
        remove_block(at + 1);
    }
    if (at > 0 && !blocks[at - 1].used) {
        blocks[at - 1].bytes += blocks[at].bytes;
        remove_block(at);
    }
    return true;
}

static attn_status allocate_memory(const struct attn_memory_args *args, void **memory,
                                   struct attn_error *error)
{
    char what[160];
    *memory = NULL;
    attn_status status = broken(error);
    if (status != ATTN_OK) {
        return status;
    }
    if (args->kind == ATTN_MEMORY_HOST) {
        *memory = aligned_alloc(256, (args->bytes + 255) / 256 * 256);
        num_hosts += *memory != NULL;
        return *memory != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&lock);
    *memory = take_pages(args->bytes);
    size_t left = capacity - taken;
    pthread_mutex_unlock(&lock);
    if (*memory == NULL) {
        snprintf(what, sizeof what, "%zu bytes; %zu of its %zu are free", args->bytes, left,
                 capacity);
        return fail(error, ATTN_ERROR_OUT_OF_MEMORY, "bytes", what);
    }
    enter();
    memset(*memory, 0xff, args->bytes < POISONED ? args->bytes : POISONED);
    leave();
    return ATTN_OK;
}

static attn_status free_memory(const struct attn_memory_args *args, struct attn_error *error)
{
    bool found = args->memory == NULL;
    if (args->kind == ATTN_MEMORY_HOST) {
        num_hosts -= args->memory != NULL;
        free(args->memory);
        return ATTN_OK;
    }
    pthread_mutex_lock(&lock);
    found = found || give_pages(args->memory);
    pthread_mutex_unlock(&lock);
    return found ? ATTN_OK : fail(error, ATTN_ERROR_INVALID_ARGUMENT, "memory", "not its own");
}

static attn_status memory_device(const struct attn_memory_args *args, struct attn_device *device,
                                 struct attn_error *error)
{
    *device = fake_device_owns(args->memory) ? (struct attn_device)FAKE_DEVICE
                                             : (struct attn_device){ATTN_DEVICE_CPU, 0};
    return ATTN_OK;
}

static attn_status create_stream(const struct attn_stream_args *args, void **stream,
                                 struct attn_error *error)
{
    *stream = calloc(1, 1);
    num_streams += *stream != NULL;
    return *stream != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
}

static attn_status destroy_stream(const struct attn_stream_args *args, struct attn_error *error)
{
    num_streams--;
    free(args->stream);
    return ATTN_OK;
}

static attn_status synchronize(const struct attn_stream_args *args, struct attn_error *error)
{
    return broken(error);
}

/* ---- events: work has been done when it is enqueued ---- */

static attn_status create_event(const struct attn_event_args *args, void **event,
                                struct attn_error *error)
{
    *event = calloc(1, sizeof(struct timespec));
    return *event != NULL ? ATTN_OK : ATTN_ERROR_OUT_OF_MEMORY;
}

static attn_status record_event(const struct attn_event_args *args, struct attn_error *error)
{
    clock_gettime(CLOCK_MONOTONIC, args->event);
    return broken(error);
}

static attn_status elapsed(const struct attn_event_args *args, int64_t *nanoseconds,
                           struct attn_error *error)
{
    const struct timespec *from = args->since, *to = args->event;
    *nanoseconds = (to->tv_sec - from->tv_sec) * INT64_C(1000000000) + to->tv_nsec - from->tv_nsec;
    return broken(error);
}

static attn_status destroy_event(const struct attn_event_args *args, struct attn_error *error)
{
    free(args->event);
    return ATTN_OK;
}

/* Runs the real kernel on open pages, once its arguments are all the device's. */
#define RUN(check, call)                                                                           \
    do {                                                                                           \
        attn_status status_ = broken(error);                                                       \
        status_ = status_ == ATTN_OK ? (check) : status_;                                          \
        if (status_ == ATTN_OK) {                                                                  \
            enter();                                                                               \
            status_ = (call);                                                                      \
            leave();                                                                               \
        }                                                                                          \
        return status_;                                                                            \
    } while (0)

static bool fails_late(void)
{
    bool late = attends_left == 1;
    attends_left -= attends_left > 0;
    return late;
}

#define ATTEND(slot)                                                                               \
    static attn_status slot(const struct attn_attend_args *args, struct attn_error *error)         \
    {                                                                                              \
        if (fails_late()) {                                                                        \
            failed = true;                                                                         \
            return ATTN_OK;                                                                        \
        }                                                                                          \
        RUN(check_attend(args, error), real_kernels.slot(args, error));                            \
    }
ATTEND(attend)
ATTEND(attend_mla)
ATTEND(attend_mla_sparse)
ATTEND(recurrent)

#define KERNEL(slot, type, check)                                                                  \
    static attn_status slot(const struct type *args, struct attn_error *error)                     \
    {                                                                                              \
        RUN(check(args, error), real_kernels.slot(args, error));                                   \
    }
KERNEL(write_kv, attn_write_kv_args, check_write)
KERNEL(rope_write_kv, attn_write_kv_args, check_write)
KERNEL(gather_kv, attn_gather_kv_args, check_gather)
KERNEL(merge_states, attn_merge_states_args, check_merge)
KERNEL(batched_gemm, attn_batched_gemm_args, check_gemm)
KERNEL(quantize, attn_quantize_args, check_quantize)
KERNEL(amax, attn_amax_args, check_amax)
KERNEL(copy_blocks, attn_copy_blocks_args, check_copy_blocks)

static attn_status update_block_table(const struct attn_attend_args *args, struct attn_error *error)
{
    RUN(check_attend(args, error), real_kernels.update_block_table(args, error));
}

static attn_status copy(const struct attn_copy_args *args, struct attn_error *error)
{
    RUN(check_copy(args->destination, args->source, args->kind, error),
        real_kernels.copy(args, error));
}

static attn_status fill(const struct attn_fill_args *args, struct attn_error *error)
{
    RUN(check_address(args->destination, "destination", error), real_kernels.fill(args, error));
}

/* What cpu_ref leaves to the core. */
static void make_row(const struct attn_block_table_args *a, int32_t r)
{
    const int32_t row = a->block_table_row != NULL ? a->block_table_row[r] : r;
    const bool lists = a->page_indices != NULL;
    const int32_t *entries = lists ? a->page_indices + a->page_start_loc[r]
                                   : a->block_table + row * a->block_table_stride;
    const int32_t count = lists ? a->page_start_loc[r + 1] - a->page_start_loc[r]
                                : (a->seq_lens[r] + a->tokens_per_entry - 1) / a->tokens_per_entry;
    for (int32_t i = 0; i < count * a->blocks_per_entry && i < a->num_columns; i++) {
        a->out[(int64_t)r * a->num_columns + i] =
            entries[i / a->blocks_per_entry] * a->blocks_per_entry + i % a->blocks_per_entry;
    }
    if (a->out_seq_lens != NULL) {
        a->out_seq_lens[r] =
            count > 0 ? (count - 1) * a->tokens_per_entry + a->last_page_len[r] : 0;
    }
}

static attn_status make_rows(const struct attn_block_table_args *args)
{
    for (int32_t r = 0; r < args->num_reqs; r++) {
        make_row(args, r);
    }
    return ATTN_OK;
}

static attn_status make_block_table(const struct attn_block_table_args *args,
                                    struct attn_error *error)
{
    RUN(check_table(args, error), make_rows(args));
}

/* cpu_ref's own table with everything above in its place. */
static const struct attn_kernels kernels = {
    .struct_size = sizeof kernels,
    .attend = attend,
    .write_kv = write_kv,
    .merge_states = merge_states,
    .rope_write_kv = rope_write_kv,
    .attend_mla = attend_mla,
    .attend_mla_sparse = attend_mla_sparse,
    .gather_kv = gather_kv,
    .recurrent = recurrent,
    .batched_gemm = batched_gemm,
    .quantize = quantize,
    .amax = amax,
    .copy_blocks = copy_blocks,
    .copy = copy,
    .fill = fill,
    .make_block_table = make_block_table,
    .update_block_table = update_block_table,
    .allocate_memory = allocate_memory,
    .free_memory = free_memory,
    .memory_device = memory_device,
    .create_stream = create_stream,
    .destroy_stream = destroy_stream,
    .synchronize = synchronize,
    .create_event = create_event,
    .record_event = record_event,
    .elapsed = elapsed,
    .destroy_event = destroy_event,
};

static attn_status take_device(void *user, const struct attn_device_info *device,
                               struct attn_error *why)
{
    struct attn_device_info fake = *device;
    fake.device = (struct attn_device)FAKE_DEVICE;
    fake.name = "protected pages";
    fake.arch = "fake";
    return outer->device(outer->user, &fake, why);
}

static attn_status take_backend(void *user, const struct attn_backend_caps *caps,
                                struct attn_error *why)
{
    struct attn_backend_caps fake = *caps;
    fake.name = "fake_device";
    fake.device = (struct attn_device)FAKE_DEVICE;
    fake.kernels |= ATTN_KERNEL_MAKE_BLOCK_TABLE;
    const int32_t block = (int32_t)number_of("FAKE_DEVICE_BLOCK", 0);
    const struct attn_range blocks = {block, block, 1};
    if (block > 0) {
        fake.block_sizes = &blocks;
        fake.num_block_sizes = 1;
        fake.preferred_block_size = block;
    }
    fake.layer_kinds &= (uint64_t)number_of("FAKE_DEVICE_LAYERS", -1);
    fake.features &= ~(uint64_t)number_of("FAKE_DEVICE_WITHOUT", 0);
    if (!(fake.layer_kinds & 1u << ATTN_LAYER_INDEXER)) {
        fake.features &= ~ATTN_FEATURE_DRAFT_INDEX_WRITE;
    }
    fake.rank[0] = fake.rank[1] = 50;
    return outer->backend(outer->user, &fake, why);
}

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    const struct attn_probe_sink inner = {sizeof inner, NULL, NULL, take_device, take_backend};
    if (getenv("FAKE_DEVICE_ABSENT") != NULL) { /* a driver without a device */
        return fail(error, ATTN_ERROR_ABSENT, "device", "the driver is there and has no device");
    }
    outer = sink;
    return real->probe(host, &inner, error);
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **table, struct attn_error *error)
{
    if (!open_arena()) {
        return fail(error, ATTN_ERROR_DEVICE, "device", "no addresses for its memory");
    }
    struct attn_create_args of_real = *args;
    of_real.backend = "cpu_ref";
    of_real.device = (struct attn_device){ATTN_DEVICE_CPU, 0};
    attn_status status = real->create(&of_real, instance, table, error);
    if (status == ATTN_OK) {
        real_kernels = **table;
        *table = &kernels;
    }
    return status;
}

__attribute__((destructor)) static void tell_leaks(void)
{
    if (taken > 0 || num_streams != 0 || num_hosts != 0) {
        fprintf(stderr, "fake_device: LEAKED %zu bytes, %d streams, %d page-locked buffers\n",
                taken, num_streams, num_hosts);
    }
}

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    attn_plugin_entry_fn *entry = NULL;
    void *library = dlopen(CPU_REF_FILE, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library != NULL ? dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL) : NULL;
    *out = NULL;
    if (symbol == NULL) {
        return fail(error, ATTN_ERROR_ABSENT, "cpu_ref", "cannot be loaded");
    }
    memcpy(&entry, &symbol, sizeof entry);
    const struct attn_plugin *answer = NULL;
    attn_status status = entry(min, max, &answer, error);
    if (status == ATTN_OK) {
        real = answer;
        mine = *real;
        mine.name = "fake_device";
        mine.probe = probe;
        mine.create = create;
        *out = &mine;
    }
    return status;
}
