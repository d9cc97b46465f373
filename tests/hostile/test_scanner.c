/* SPDX-License-Identifier: Apache-2.0 */
/* The scanner's process among the engine's own: signals, children, threads, forks, closed streams,
 * and where attn-scan is looked for. Arguments are libattn.so.1 and attn-scan. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "fixture.h"
#include "support/client.h"
#include "support/test.h"

/* A child that is forked before anything was created creates its own; one that is forked later goes
 * on with its copy. */
TEST(forks)
{
    attn_runtime *runtime = NULL;
    for (int later = 0; later < 2; later++) {
        runtime = later ? create(PLUGIN("none"), 0) : NULL;
        if (test_apart()) {
            attn_runtime *own = create(PLUGIN("crash_in_entry") ":" PLUGIN("rich"), 0);
            const bool right =
                api->backend_count(own) == 2 && (!later || api->backend_count(runtime) == 1);
            api->runtime_destroy(own);
            api->runtime_destroy(runtime);
            _exit(right ? 0 : 1);
        }
        api->runtime_destroy(runtime);
    }
}

/* The engine may do with SIGCHLD what it likes, and its dispositions are as before. */
TEST(signals_are_the_engines)
{
    struct sigaction before[65] = {{.sa_flags = 0}};
    attn_runtime *runtime = NULL;
    signal(SIGCHLD, SIG_IGN);
    signal(SIGPIPE, SIG_DFL);
    for (int i = 1; i < 65; i++) {
        sigaction(i, NULL, &before[i]);
    }
    runtime = create(PLUGIN("none") ":" PLUGIN("exit_in_probe") ":" PLUGIN("crash_in_entry"), 0);
    assert_ok(info_of(api, runtime, 0).status);
    assert_string_equal(info_of(api, runtime, 1).reason,
                        "probe: its process ended without an answer");
    assert_string_equal(info_of(api, runtime, 2).reason,
                        "entry: its process ended without an answer");
    api->runtime_destroy(runtime);
    for (int i = 1; i < 65; i++) {
        struct sigaction after = {.sa_flags = 0};
        sigaction(i, NULL, &after);
        assert_ptr_equal(after.sa_handler, before[i].sa_handler);
    }
    signal(SIGCHLD, SIG_DFL);
}

/* A child of the engine that has ended is the engine's to reap. */
TEST(other_children_are_left_alone)
{
    int status = -1;
    const pid_t pid = fork();
    if (pid == 0) {
        _exit(5);
    }
    api->runtime_destroy(create(PLUGIN("none") ":" PLUGIN("crash_in_probe"), 0));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 5);
}

/* The engine's limit on the size of files: the scanner's answer has room, or nothing runs apart. */
TEST(limits_on_files_refuse_no_plugin)
{
    for (int hard = 0; hard < 2; hard++) {
        if (test_apart()) {
            const struct rlimit limit = {512, hard ? 512 : RLIM_INFINITY};
            attn_runtime *own = NULL;
            if (setrlimit(RLIMIT_FSIZE, &limit) == 0) {
                own =
                    create(hard ? PLUGIN("rich") : PLUGIN("rich") ":" PLUGIN("crash_in_probe"), 0);
            }
            const bool right = own != NULL && api->backend_count(own) == 2;
            api->runtime_destroy(own);
            _exit(right ? 0 : 1);
        }
    }
}

static void *one_engine(void *argument)
{
    for (int i = 0; i < 4; i++) {
        attn_runtime *runtime = create(PLUGIN("crash_in_probe") ":" PLUGIN("none"), 0);
        if (api->backend_count(runtime) != 1) {
            *(int *)argument = 1;
        }
        api->runtime_destroy(runtime);
    }
    return NULL;
}

TEST(many_threads_at_once)
{
    pthread_t threads[6];
    int failed = 0;
    for (int i = 0; i < 6; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, one_engine, &failed), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(failed, 0);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

TEST(every_allocation_fails_in_turn)
{
    const char *path = PLUGIN("rich") ":" PLUGIN("crash_in_probe");
    struct meter meter = {0};
    long calls = 0;
    api->runtime_destroy(create_by(api, path, 0, 0, &meter, ATTN_OK));
    calls = meter.calls;
    assert_int_equal(meter.alive, 0);
    for (long i = 1; i <= calls; i++) {
        meter = (struct meter){.fail_at = i};
        api->runtime_destroy(create_by(api, path, 0, 0, &meter, ATTN_ERROR_OUT_OF_MEMORY));
        assert_int_equal(meter.alive, 0);
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

/* An engine that has closed its standard streams, as daemons do. */
TEST(closed_streams)
{
    if (test_apart()) {
        for (int i = 0; i < 256; i++) {
            close(i);
        }
        attn_runtime *runtime = create(PLUGIN("none") ":" PLUGIN("crash_in_probe"), 0);
        const bool right = api->backend_count(runtime) == 1 &&
                           strcmp(info_of(api, runtime, 1).reason, "probe: " CRASHED) == 0;
        api->runtime_destroy(runtime);
        _exit(right ? 0 : 1);
    }
}

static void copy_file(const char *from, const char *to)
{
    static char bytes[1 << 16];
    ssize_t size = 0;
    const int in = open(from, O_RDONLY | O_CLOEXEC);
    const int out = open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
    assert_true(in >= 0 && out >= 0);
    while ((size = read(in, bytes, sizeof bytes)) > 0) {
        assert_int_equal(write(out, bytes, (size_t)size), size);
    }
    close(in);
    assert_int_equal(close(out), 0);
}

static void write_script(const char *path, const char *text)
{
    const int out = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0755);
    assert_int_equal(write(out, text, strlen(text)), (ssize_t)strlen(text));
    assert_int_equal(close(out), 0);
}

/* An installed core: <libdir>/libattn.so.1 and <libdir>/attn/attn-scan; without the scanner, and
 * with one that fails. */
TEST(scanner_of_an_installed_core)
{
    char folder[64] = "/tmp/attn_isolation_XXXXXX";
    char core[128], plugins[128], scanner[160];
    const struct attn_api *other = NULL;
    struct attn_error error = ATTN_ERROR_INIT;
    struct meter meter = {0};
    attn_runtime *runtime = NULL;
    assert_non_null(mkdtemp(folder));
    snprintf(core, sizeof core, "%s/libattn.so.1", folder);
    snprintf(plugins, sizeof plugins, "%s/attn", folder);
    snprintf(scanner, sizeof scanner, "%s/attn-scan", plugins);
    assert_int_equal(mkdir(plugins, 0755), 0);
    copy_file(core_file, core);
    assert_ok(client_load(core, &other, &error));

    runtime = create_by(other, PLUGIN("none"), 0, 0, &meter, ATTN_OK);
    assert_int_equal(other->backend_count(runtime), 1);
    assert_non_null(strstr(meter.log, "2 " PLUGIN("none") " is probed in this process: there is no "
                                                          "attn-scan next to the core\n"));
    other->runtime_destroy(runtime);
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_int_equal(info_of(other, runtime, 0).status, ATTN_ERROR_IO);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "isolation: ordered, and there is no attn-scan next to the core");
    other->runtime_destroy(runtime);

    write_script(scanner, "#!/bin/sh\nexit 5\n");
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "isolation: ordered, and attn-scan does not run: exit status 5");
    other->runtime_destroy(runtime);
    write_script(scanner, "#!/bin/sh\necho 'attn-scan 0.0.1/1 and a record in another format'\n");
    runtime = create_by(other, PLUGIN("crash_in_entry"), 0, 0, NULL, ATTN_OK);
    assert_int_equal(info_of(other, runtime, 0).status, ATTN_ERROR_IO);
    assert_non_null(strstr(info_of(other, runtime, 0).reason, "of another version than the core"));
    other->runtime_destroy(runtime);
    write_script(scanner, "#!/bin/sh\nprintf attn-scan\nkill -9 $$\n");
    runtime = create_by(other, PLUGIN("crash_in_entry"), 0, 0, NULL, ATTN_OK);
    assert_int_equal(info_of(other, runtime, 0).status, ATTN_ERROR_IO);
    assert_non_null(strstr(info_of(other, runtime, 0).reason, "SIGKILL"));
    other->runtime_destroy(runtime);
    char script[512];
    snprintf(script, sizeof script,
             "#!/bin/sh\n'%s' \"$1\"\nprintf ATTNPROBnonsense-and-more-of-it\n", scan_file);
    write_script(scanner, script);
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "scan: what its process left has another format");
    other->runtime_destroy(runtime);

    copy_file(scan_file, scanner);
    runtime = create_by(other, PLUGIN("none") ":" PLUGIN("crash_in_entry"), 1, 0, NULL, ATTN_OK);
    assert_ok(info_of(other, runtime, 0).status);
    assert_string_equal(info_of(other, runtime, 1).reason, "entry: " CRASHED);
    other->runtime_destroy(runtime);
    assert_int_equal(unlink(scanner), 0);
    assert_int_equal(unlink(core), 0);
    assert_int_equal(rmdir(plugins), 0);
    assert_int_equal(rmdir(folder), 0);
}

/* With no descriptor left a plugin is not examined, and not in the engine's own process either. */
TEST(no_descriptors)
{
    if (test_apart()) {
        while (dup(0) >= 0) {
        }
        attn_runtime *runtime = create_by(api, PLUGIN("crash_in_entry"), 0, 0, NULL, ATTN_OK);
        const struct attn_plugin_info info = info_of(api, runtime, 0);
        _exit(info.status != ATTN_ERROR_IO || strstr(info.reason, "no file for attn-scan") == NULL);
    }
}

/* Sixteen that hang cost two deadlines, since eight are waited for at once; each has its own
 * reason, and what stands after them is found. */
TEST(many_hang_at_once)
{
    enum { COUNT = 16, DEADLINE = 400 };
    char folder[] = "/tmp/attn_many_XXXXXX", path[COUNT * 64 + 4096], name[64];
    struct timespec begin, end;
    size_t used = 0;
    assert_non_null(mkdtemp(folder));
    for (int i = 0; i < COUNT; i++) { /* by name and by inode they are different files */
        const char *from = PLUGIN("hang_in_entry");
        char command[8192];
        snprintf(name, sizeof name, "%s/attn_hang%d.so", folder, i);
        snprintf(command, sizeof command, "cp %s %s", from, name);
        assert_int_equal(system(command), 0);
        used += (size_t)snprintf(path + used, sizeof path - used, "%s:", name);
    }
    snprintf(path + used, sizeof path - used, "%s", PLUGIN("none"));
    clock_gettime(CLOCK_MONOTONIC, &begin);
    attn_runtime *runtime = create(path, DEADLINE);
    clock_gettime(CLOCK_MONOTONIC, &end);
    for (int i = 0; i < COUNT; i++) {
        assert_string_equal(info_of(api, runtime, i).reason, "entry: did not end within 400 ms");
    }
    assert_ok(info_of(api, runtime, COUNT).status);
    api->runtime_destroy(runtime);
    const long took = (end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000;
    print_message("%d plugins that hang for %d ms took %ld ms\n", COUNT, DEADLINE, took);
    assert_true(took < COUNT / 2 * DEADLINE);
    for (int i = 0; i < COUNT; i++) {
        snprintf(name, sizeof name, "%s/attn_hang%d.so", folder, i);
        unlink(name);
    }
    rmdir(folder);
    errno = 0;
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
    assert_int_equal(errno, ECHILD);
}

/* Why the one plugin in `path` is not there, with `folder` as cache. */
static void refusal(const char *path, const char *folder, int32_t deadline, char *reason,
                    size_t size)
{
    struct attn_runtime_options options = client_options(path);
    attn_runtime *runtime = NULL;
    options.cache_dir = folder;
    options.log_level = 1 + ATTN_LOG_ERROR;
    options.probe_deadline_ms = deadline;
    assert_ok(api->runtime_create(&options, &runtime, NULL));
    assert_int_equal(info_of(api, runtime, 0).status, ATTN_ERROR_TIMEOUT);
    snprintf(reason, size, "%s", info_of(api, runtime, 0).reason);
    api->runtime_destroy(runtime);
}

/* A probe that was too slow once is not asked again at once with as little time, and is with more.
 */
TEST(longer_deadlines_ask_again)
{
    static const struct {
        int32_t deadline;
        const char *reason;
        bool remembered;
    } starts[] = {{200, "entry: did not end within 200 ms", false},
                  {200, "entry: did not end within 200 ms", true},
                  {400, "entry: did not end within 400 ms", false},
                  {300, "entry: did not end within 400 ms", true}};
    char folder[] = "/tmp/attn_late_XXXXXX", command[64], reason[256];
    assert_non_null(mkdtemp(folder));
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        refusal(PLUGIN("hang_in_entry"), folder, starts[i].deadline, reason, sizeof reason);
        assert_non_null(strstr(reason, starts[i].reason));
        assert_int_equal(strstr(reason, "(of a probe ") != NULL, starts[i].remembered);
    }
    snprintf(command, sizeof command, "rm -r %s", folder);
    assert_int_equal(system(command), 0);
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(NULL, NULL);
}
