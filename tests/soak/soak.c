/* SPDX-License-Identifier: Apache-2.0 */
/* soak CORE PLUGIN-PATH FOLDER SEED ROUNDS: engines that live by random choices, one after the
 * other or two at once, in one process that has loaded the core and its plugins once. Everything
 * follows from a round's seed but the order of threads. */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "soak.h"
#include "support/client.h"
#include "support/random.h"

#define MOST_BYTES ((size_t)1 << 28) /* the largest allocation; the core zeroes what it gets */

atomic_long soak_refused, soak_compared;

uint64_t soak_random(struct round *round, uint64_t below)
{
    const uint64_t bits = random_bits(&round->state);
    return below > 0 ? bits % below : 0;
}

bool soak_chance(struct round *round, uint64_t one_in)
{
    return soak_random(round, one_in) == 0;
}

_Noreturn void soak_broken(const struct round *round, const char *format, ...)
{
    va_list arguments;
    fprintf(stderr, "soak: seed %llu: ", (unsigned long long)round->seed);
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    abort();
}

void soak_check_error(const struct round *round, attn_status status)
{
    if (status == ATTN_OK) {
        return;
    }
    if (strcmp(round->api->status_text(status), "unknown status") == 0 ||
        status == ATTN_ERROR_INTERNAL || round->error.status != status ||
        round->error.message[0] == '\0') {
        soak_broken(round, "status %d (%s), error of status %d: %s: %s", status,
                    round->api->status_text(status), round->error.status, round->error.field,
                    round->error.message);
    }
}

/* An engine's log may look at the runtime it belongs to. */
static void log_line(void *user, int32_t level, const char *who, const char *message)
{
    struct round *round = user;
    if (strlen(who) + strlen(message) == 0 || strpbrk(message, "\n\033") != NULL) {
        soak_broken(round, "a log line of %s: '%s'", who, message);
    }
    if (round->runtime != NULL) {
        (void)round->api->backend_count(round->runtime);
    }
}

static void *allocate(void *user, size_t size, size_t alignment)
{
    struct round *round = user;
    const long number = atomic_fetch_add(&round->allocations, 1) + 1;
    if (number == atomic_load(&round->fail_at) || size > MOST_BYTES) {
        return NULL;
    }
    void *memory = aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    atomic_fetch_add(&round->alive, memory != NULL);
    return memory;
}

static void release(void *user, void *memory, size_t size)
{
    struct round *round = user;
    if (memory != NULL) {
        atomic_fetch_sub(&round->alive, 1);
        free(memory);
    }
}

struct place {
    const struct attn_api *api;
    const char *plugins, *folder;
};

static attn_status open_runtime(struct round *round, const struct place *place)
{
    struct attn_runtime_options options = client_options(place->plugins);
    struct faults faults;
    options.host = &round->host;
    options.cache_dir = soak_chance(round, 5) ? "" : round->folder;
    options.num_threads = 1 + (int32_t)soak_random(round, 3);
    options.log_level = 1 + (int32_t)soak_random(round, 5);
    options.validate = soak_chance(round, 2) ? 1 : -1;
    options.isolation = (int32_t)soak_random(round, 3) - 1;
    options.probe_deadline_ms = soak_chance(round, 10) ? 1 : 60000;
    faults_begin(round, &faults);
    const attn_status status = round->api->runtime_create(&options, &round->runtime, &round->error);
    faults_end(&faults);
    return status;
}

static void play(const struct place *place, uint64_t seed, bool alone)
{
    struct round *round = calloc(1, sizeof *round);
    *round = (struct round){.seed = seed,
                            .state = seed,
                            .api = place->api,
                            .folder = place->folder,
                            .alone = alone,
                            .host = {.struct_size = sizeof round->host,
                                     .user = round,
                                     .log = log_line,
                                     .allocate = allocate,
                                     .release = release},
                            .error = ATTN_ERROR_INIT};
    if (soak_chance(round, 4)) {
        atomic_store(&round->fail_at, 1 + (long)soak_random(round, 400));
    }
    if (alone && soak_chance(round, 2)) {
        faults_spoil_cache(round);
    }
    faults_jump_clock(round);
    const attn_status status = open_runtime(round, place);
    soak_check_error(round, status);
    if (status == ATTN_OK) {
        steps_run(round);
        attn_runtime *runtime = round->runtime;
        round->runtime = NULL;
        round->api->runtime_destroy(runtime);
    }
    if (atomic_load(&round->alive) != 0) {
        soak_broken(round, "%ld allocations were not given back", atomic_load(&round->alive));
    }
    free(round);
}

struct thread_share {
    const struct place *place;
    uint64_t seed;
};

static void *play_second(void *argument)
{
    const struct thread_share *share = argument;
    play(share->place, share->seed, false);
    return NULL;
}

int main(int argc, char **argv)
{
    struct place place = {.plugins = argc > 2 ? argv[2] : "", .folder = argc > 3 ? argv[3] : ""};
    struct attn_error error = ATTN_ERROR_INIT;
    if (argc != 6) {
        fputs("usage: soak CORE PLUGIN-PATH FOLDER SEED ROUNDS\n", stderr);
        return 2;
    }
    if (client_load(argv[1], &place.api, &error) != ATTN_OK) {
        fprintf(stderr, "soak: %s: %s\n", error.field, error.message);
        return 1;
    }
    const uint64_t first = strtoull(argv[4], NULL, 10), rounds = strtoull(argv[5], NULL, 10);
    for (uint64_t seed = first; seed < first + rounds; seed++) {
        struct thread_share second = {&place, seed + (UINT64_C(1) << 40)};
        pthread_t thread;
        const bool two = seed % 3 == 0;
        if (two && pthread_create(&thread, NULL, play_second, &second) != 0) {
            return 1;
        }
        play(&place, seed, !two);
        if (two) {
            pthread_join(thread, NULL);
        }
    }
    printf("%llu rounds from seed %llu, %ld refused, %ld layers compared\n",
           (unsigned long long)rounds, (unsigned long long)first, atomic_load(&soak_refused),
           atomic_load(&soak_compared));
    return rounds >= 24 && atomic_load(&soak_compared) == 0;
}
