/* SPDX-License-Identifier: Apache-2.0 */
/* Random engines: what the parts of the soak share. */
#ifndef SOAK_H
#define SOAK_H

#include <attn/api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

/* One engine's life, all of it by its seed. */
struct round {
    uint64_t seed, state;
    const struct attn_api *api;
    const char *folder; /* folder of its cache of probes */
    bool alone;         /* no other engine runs in this process */
    struct attn_host host;
    atomic_long alive, fail_at, allocations; /* allocation number fail_at fails; 0: none */
    attn_runtime *runtime;
    struct attn_error error;
};

/* soak.c */
uint64_t soak_random(struct round *round, uint64_t below);
bool soak_chance(struct round *round, uint64_t one_in);
/* Ends the process with the seed; what must never be. */
_Noreturn void soak_broken(const struct round *round, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
/* An error of the library has a known status and text. */
void soak_check_error(const struct round *round, attn_status status);

/* faults.c: of the surroundings. Begun before a runtime is created and ended after. */
struct faults {
    bool killer, few_files, small_files;
    pthread_t thread;
    atomic_bool stop;
    uint64_t old_files, old_size;
};
void faults_begin(struct round *round, struct faults *faults);
void faults_end(struct faults *faults);
/* Damages what an earlier engine has left in the cache. */
void faults_spoil_cache(struct round *round);
/* The wall clock jumps by years, back and forth. */
void faults_jump_clock(struct round *round);

/* Engines that were refused or found a fault, and layers whose step was compared: a soak of neither
 * says nothing. */
extern atomic_long soak_refused, soak_compared;

/* steps.c: a model on the selected backends and the same on cpu_ref, run side by side. */
void steps_run(struct round *round);

#endif
