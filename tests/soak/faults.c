/* SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "soak.h"

static atomic_llong offset; /* seconds that the wall clock is off */

/* In place of libc's, for all libraries of this process. */
int clock_gettime(clockid_t clock, struct timespec *now)
{
    const int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed == 0 && clock == CLOCK_REALTIME) {
        now->tv_sec += (time_t)atomic_load(&offset);
    }
    return failed;
}

time_t time(time_t *out)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    if (out != NULL) {
        *out = now.tv_sec;
    }
    return now.tv_sec;
}

void faults_jump_clock(struct round *round)
{
    static const long long jumps[] = {0, 1, -1, 61, 601, -7200, 40LL * 86400, -3000LL * 86400};
    atomic_store(&offset, jumps[soak_random(round, sizeof jumps / sizeof *jumps)]);
}

/* Is it attn-scan, and a child of ours? */
static bool is_scanner(const char *pid)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t size = file >= 0 ? read(file, line, sizeof line - 1) : -1;
    if (file >= 0) {
        close(file);
    }
    if (size <= 0) {
        return false;
    }
    line[size] = '\0';
    const char *behind = strrchr(line, ')');
    int parent = 0;
    return behind != NULL && strstr(line, "(attn-scan)") != NULL &&
           sscanf(behind + 1, " %*c %d", &parent) == 1 && parent == (int)getpid();
}

static void *kill_scanners(void *argument)
{
    struct faults *faults = argument;
    while (!atomic_load(&faults->stop)) {
        DIR *folder = opendir("/proc");
        const struct dirent *entry;
        while (folder != NULL && (entry = readdir(folder)) != NULL) {
            if (entry->d_name[0] >= '1' && entry->d_name[0] <= '9' && is_scanner(entry->d_name)) {
                kill((pid_t)atoi(entry->d_name), SIGKILL);
            }
        }
        if (folder != NULL) {
            closedir(folder);
        }
        usleep(500);
    }
    return NULL;
}

static uint64_t set_limit(int resource, uint64_t value)
{
    struct rlimit limit;
    getrlimit(resource, &limit);
    const uint64_t before = limit.rlim_cur;
    limit.rlim_cur = value;
    setrlimit(resource, &limit);
    return before;
}

void faults_begin(struct round *round, struct faults *faults)
{
    *faults = (struct faults){.killer = soak_chance(round, 6)};
    if (round->alone && soak_chance(round, 8)) {
        const int next = dup(0);
        close(next);
        faults->few_files = true;
        faults->old_files = set_limit(RLIMIT_NOFILE, (uint64_t)next + soak_random(round, 7));
    }
    if (round->alone && soak_chance(round, 8)) {
        faults->small_files = true;
        faults->old_size = set_limit(RLIMIT_FSIZE, soak_random(round, 2000));
    }
    if (faults->killer) {
        faults->killer = pthread_create(&faults->thread, NULL, kill_scanners, faults) == 0;
    }
}

void faults_end(struct faults *faults)
{
    if (faults->killer) {
        atomic_store(&faults->stop, true);
        pthread_join(faults->thread, NULL);
    }
    if (faults->few_files) {
        set_limit(RLIMIT_NOFILE, faults->old_files);
    }
    if (faults->small_files) {
        set_limit(RLIMIT_FSIZE, faults->old_size);
    }
}

static void spoil(struct round *round, const char *path)
{
    const int file = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    struct stat info;
    uint8_t byte = (uint8_t)soak_random(round, 256);
    switch (soak_random(round, 6)) {
    case 0:
        if (file >= 0 && fstat(file, &info) == 0 && info.st_size > 0) {
            (void)!pwrite(file, &byte, 1, (off_t)soak_random(round, (uint64_t)info.st_size));
        }
        break;
    case 1:
        if (file >= 0 && fstat(file, &info) == 0) {
            (void)!ftruncate(file, (off_t)soak_random(round, (uint64_t)info.st_size + 1));
        }
        break;
    case 2:
        chmod(path, 0666);
        break;
    case 3:
        unlink(path);
        (void)mkfifo(path, 0600);
        break;
    case 4:
        unlink(path);
        (void)!symlink("/dev/zero", path);
        break;
    default:
        unlink(path);
    }
    if (file >= 0) {
        close(file);
    }
}

void faults_spoil_cache(struct round *round)
{
    DIR *folder = opendir(round->folder);
    const struct dirent *entry;
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", round->folder, entry->d_name);
        if (entry->d_name[0] != '.' && soak_chance(round, 2)) {
            spoil(round, path);
        }
    }
    if (folder != NULL) {
        closedir(folder);
    }
    char ranks[512];
    snprintf(ranks, sizeof ranks, "%s/ranks", round->folder);
    if (soak_chance(round, 3)) {
        unlink(ranks); /* it may be a pipe by now */
        FILE *file = fopen(ranks, "we");
        if (file != NULL) {
            fprintf(file,
                    "x86-64:0 4/2x64x64.f32.f32 decode 1x8 cpu_ref %llu 1 2 3 0.1.0 x\nnonsense\n",
                    (unsigned long long)soak_random(round, 90));
            fclose(file);
        }
    }
}
