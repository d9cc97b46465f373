/* SPDX-License-Identifier: Apache-2.0 */
/* attn-scan FILE: loads one plugin, probes it, and writes the record into the file that its
 * standard output is. The core execs it, so that a plugin which crashes, hangs or misbehaves does
 * so here. It is the core's other half and is made of its objects; what it writes stands in
 * isolation/isolation.h. */
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "common/conduct.h"
#include "runtime/load.h"
#include "runtime/probe.h"
#include "isolation.h"
#include "util/error.h"

/* What a probe may need: management libraries of drivers, no model. */
#define MAX_DATA ((rlim_t)2 << 30)
#define MAX_STACK ((rlim_t)64 << 20)
#define LONGEST_LIFE 660 /* s: the longest deadline and a minute */
#define ANSWER 3
#define EXIT_USAGE 2

static void put(const void *bytes, size_t size, size_t at)
{
    if (pwrite(ANSWER, bytes, size, (off_t)at) != (ssize_t)size) {
        _exit(SCAN_EXIT_NO_FILE);
    }
}

static void put_stage(const char *stage)
{
    struct scan_head head = {.version = SCAN_VERSION};
    snprintf(head.stage, sizeof head.stage, "%s", stage);
    put(&head, sizeof head, 0);
}

/* Closes the engine's open files, which the plugin must not have. */
static void close_others(void)
{
    DIR *directory = opendir("/proc/self/fd");
    const struct dirent *entry;
    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        int descriptor = atoi(entry->d_name);
        if (descriptor > ANSWER && descriptor != dirfd(directory)) {
            close(descriptor);
        }
    }
    if (directory != NULL) {
        closedir(directory);
    }
}

/* The file at its place, nothing on 0, 1 and 2. What a plugin writes there leaves the head. */
static int arrange_descriptors(void)
{
    /* Above the places that are filled below, whichever of them the engine had closed. */
    int opened = open("/dev/null", O_RDWR);
    int nothing = opened < 0 ? -1 : fcntl(opened, F_DUPFD, ANSWER + 1);
    if (nothing < 0 || dup2(STDOUT_FILENO, ANSWER) != ANSWER ||
        fcntl(ANSWER, F_SETFD, FD_CLOEXEC) != 0 ||
        lseek(ANSWER, sizeof(struct scan_head), SEEK_SET) < 0) {
        return -1;
    }
    for (int i = 0; i <= 2; i++) {
        if (dup2(nothing, i) != i) {
            return -1;
        }
    }
    close_others();
    return 0;
}

/* A limit on the size of files holds for the answer's, too. */
static bool has_room(void)
{
    struct rlimit now;
    if (getrlimit(RLIMIT_FSIZE, &now) != 0 || now.rlim_max < SCAN_MAX_SIZE) {
        return false;
    }
    now.rlim_cur = now.rlim_cur > SCAN_MAX_SIZE ? now.rlim_cur : SCAN_MAX_SIZE;
    return setrlimit(RLIMIT_FSIZE, &now) == 0;
}

static void limit(int resource, rlim_t most)
{
    struct rlimit now;
    if (getrlimit(resource, &now) == 0 && (now.rlim_cur == RLIM_INFINITY || now.rlim_cur > most)) {
        now.rlim_cur = most;
        (void)setrlimit(resource, &now);
    }
}

/* A sanitizer's shadow counts as data, and a plugin built with one may be tried in an engine
 * without (LD_PRELOAD). */
static bool is_sanitized(void)
{
    void *self = dlopen(NULL, RTLD_LAZY);
    return self != NULL &&
           (dlsym(self, "__asan_init") != NULL || dlsym(self, "__tsan_init") != NULL);
}

/* Ends with its engine, leaves no core file, and is the first to go where memory is short. */
static void be_modest(void)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)prctl(PR_SET_CHILD_SUBREAPER, 1); /* what leaves its parent comes to us */
    (void)alarm(LONGEST_LIFE);              /* should the engine have died before that call */
    limit(RLIMIT_CORE, 0);
    limit(RLIMIT_STACK, MAX_STACK);
    if (!is_sanitized()) {
        limit(RLIMIT_DATA, MAX_DATA);
    }
    int descriptor = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        (void)!write(descriptor, "1000", 4);
        close(descriptor);
    }
}

static void run_here(void *user, int64_t count, int64_t grain, attn_parallel_body *body,
                     void *argument)
{
    if (count > 0) {
        body(argument, 0, count, 0);
    }
}

static void say_nothing(void *user, int32_t level, const char *who, const char *message)
{
}

static attn_status examine(attn_runtime *runtime, struct plugin *plugin, struct found *found,
                           struct attn_error *why)
{
    struct conduct before;
    char text[160];
    attn_status status = found_init(found, &runtime->arena, why);
    conduct_read(&before, ANSWER, conduct_catch_output(), true);
    status = status ? status : plugin_load(runtime, plugin, why);
    if (status != ATTN_OK) {
        return status;
    }
    /* Threads that a constructor or the entry leave are the plugin's own; in a probe a driver's
     * management library may begin one. */
    const char *changed = conduct_difference(&before, text, sizeof text);
    before.threads = -1;
    if (changed == NULL) {
        runtime_stage(runtime, plugin->file, "probe");
        status = plugin_probe(&runtime->host, plugin->table, found, why);
        changed = conduct_difference(&before, text, sizeof text);
    }
    if (conduct_end_children() > 0 && changed == NULL) {
        changed = "changed the processes: it left some";
    }
    return changed == NULL ? status : error_set(why, ATTN_ERROR_PLUGIN, "conduct", "%s", changed);
}

/* As much of a runtime as loading and probing need. */
static void scan(const char *file)
{
    static char empty[] = "";
    attn_runtime runtime = {.services = {.log_level = -1}, .on_stage = put_stage};
    struct plugin plugin = {.name = empty, .version = empty, .vendor = empty, .reason = empty};
    struct attn_error why = ATTN_ERROR_INIT;
    struct found found = {.num_devices = 0};
    struct text bytes;
    runtime.settings.log_level = -1;
    runtime.services.engine.parallel_for = run_here;
    runtime.services.engine.log = say_nothing;
    host_init(&runtime.host, &runtime.services, 1);
    arena_init(&runtime.arena, &runtime.host);
    text_init(&bytes, &runtime.host);
    plugin.file = arena_string(&runtime.arena, file);
    if (plugin.file == NULL) {
        _exit(SCAN_EXIT_NO_MEMORY);
    }
    const attn_status status = examine(&runtime, &plugin, &found, &why);
    const struct record record = {.file = plugin.file,
                                  .status = status,
                                  .field = why.field,
                                  .message = why.message,
                                  .abi_version = plugin.abi_version,
                                  .name = plugin.name,
                                  .version = plugin.version,
                                  .vendor = plugin.vendor};
    record_write(&bytes, &record, &found);
    if (bytes.failed || runtime.arena.failed) {
        _exit(SCAN_EXIT_NO_MEMORY);
    }
    put(bytes.data, bytes.length, sizeof(struct scan_head));
    _exit(EXIT_SUCCESS); /* nothing that the plugin has left for the end runs */
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--version") == 0) {
        puts("attn-scan " ATTN_LIBRARY_VERSION);
        return EXIT_SUCCESS;
    }
    if (argc != 2 || argv[1][0] != '/' || isatty(STDOUT_FILENO)) {
        const int help = argc == 2 && strcmp(argv[1], "--help") == 0;
        fputs("usage: attn-scan /path/to/attn_NAME.so >record\n"
              "Probes a plugin in a process of its own. libattn runs it; attn-info shows the "
              "outcome.\n",
              help ? stdout : stderr);
        return help ? EXIT_SUCCESS : EXIT_USAGE;
    }
    if (arrange_descriptors() != 0 || !has_room()) {
        return SCAN_EXIT_NO_FILE;
    }
    be_modest();
    put_stage("");
    scan(argv[1]);
}
