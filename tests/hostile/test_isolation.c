/* SPDX-License-Identifier: Apache-2.0 */
/* Plugins that misbehave in constructors, entry and probe cost themselves, with the cause, and nothing else. Through the
 * shared library, as an engine has it: arguments are libattn.so.1 and attn-scan. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <attn/api.h>
#include <cmocka.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PLUGIN(name) HOSTILE_DIR "/attn_" name ".so"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

struct meter {
    long calls, fail_at, alive;
    char log[8192];
};

static const struct attn_api *api;
static const char *core_file, *scan_file;

static void keep_log(void *user, int32_t level, const char *who, const char *message)
{
    struct meter *meter = user;
    const size_t used = strlen(meter->log);

    (void)who;
    snprintf(meter->log + used, sizeof meter->log - used, "%d %s\n", level, message);
}

static void *allocate(void *user, size_t size, size_t alignment)
{
    struct meter *meter = user;

    if (++meter->calls == meter->fail_at) {
        return NULL;
    }
    meter->alive++;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t size)
{
    struct meter *meter = user;

    (void)size;
    meter->alive -= memory != NULL;
    free(memory);
}

/* `meter` may be NULL. */
static attn_runtime *create_by(const struct attn_api *table, const char *path, int32_t isolation,
                               int32_t deadline, struct meter *meter, attn_status expected)
{
    const struct attn_host host = {.struct_size = sizeof host,
                                   .user = meter,
                                   .log = keep_log,
                                   .allocate = allocate,
                                   .release = release};
    const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                 .host = meter != NULL ? &host : NULL,
                                                 .backend = "",
                                                 .plugin_path = path,
                                                 .cache_dir = "",
                                                 .num_threads = 1,
                                                 .log_level =
                                                     1 + (meter ? ATTN_LOG_INFO : ATTN_LOG_ERROR),
                                                 .ignore_environment = 1,
                                                 .no_default_plugins = 1,
                                                 .isolation = isolation,
                                                 .probe_deadline_ms = deadline};
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    const attn_status status = table->runtime_create(&options, &runtime, &error);

    if (status != expected) {
        fail_msg("%s: status %d, %s: %s", path, status, error.field, error.message);
    }
    return runtime;
}

static attn_runtime *create(const char *path, int32_t deadline)
{
    return create_by(api, path, 0, deadline, NULL, ATTN_OK);
}

static struct attn_plugin_info info_of(const struct attn_api *table, const attn_runtime *runtime,
                                       int32_t index)
{
    struct attn_plugin_info info = {.struct_size = sizeof info};

    assert_int_equal(table->plugin_info(runtime, index, &info), ATTN_OK);
    return info;
}

static bool is_mapped(const char *file)
{
    char line[1024];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        found |= strstr(line, file) != NULL;
    }
    fclose(maps);
    return found;
}

static int count_descriptors(void)
{
    DIR *directory = opendir("/proc/self/fd");
    int count = 0;

    while (readdir(directory) != NULL) {
        count++;
    }
    closedir(directory);
    return count;
}

struct defect {
    const char *name;
    attn_status status;
    const char *reason;
};

#define CRASHED "its process was ended by signal 11 (SIGSEGV)"
#define ABORTED "its process was ended by signal 6 (SIGABRT)"
#define LATE "did not end within 1000 ms"
#define EXITED "ended its process with exit status 7"

static const struct defect defects[] = {
    {"crash_in_constructor", ATTN_ERROR_PLUGIN, "constructor: " CRASHED},
    {"crash_in_entry", ATTN_ERROR_PLUGIN, "entry: " CRASHED},
    {"crash_in_probe", ATTN_ERROR_PLUGIN, "probe: " CRASHED},
    {"hang_in_constructor", ATTN_ERROR_TIMEOUT, "constructor: " LATE},
    {"hang_in_entry", ATTN_ERROR_TIMEOUT, "entry: " LATE},
    {"hang_in_probe", ATTN_ERROR_TIMEOUT, "probe: " LATE},
    {"exit_in_constructor", ATTN_ERROR_PLUGIN, "constructor: " EXITED},
    {"exit_in_entry", ATTN_ERROR_PLUGIN, "entry: " EXITED},
    {"exit_in_probe", ATTN_ERROR_PLUGIN, "probe: " EXITED},
    {"abort_in_constructor", ATTN_ERROR_PLUGIN, "constructor: " ABORTED},
    {"abort_in_entry", ATTN_ERROR_PLUGIN, "entry: " ABORTED},
    {"abort_in_probe", ATTN_ERROR_PLUGIN, "probe: " ABORTED},
    {"throw_in_constructor", ATTN_ERROR_PLUGIN, "constructor: " ABORTED},
    {"throw_in_entry", ATTN_ERROR_PLUGIN, "entry: " ABORTED},
    {"throw_in_probe", ATTN_ERROR_PLUGIN, "probe: " ABORTED},
    {"stack_in_probe", ATTN_ERROR_PLUGIN, "probe: " CRASHED},
    {"floods_stdout_in_probe", ATTN_ERROR_TIMEOUT, "probe: " LATE},
    {"floods_pipe_in_probe", ATTN_ERROR_PLUGIN,
     "probe: more than 4194304 bytes came out of its process"},
    {"terminates_in_probe", ATTN_ERROR_PLUGIN, "probe: its process was ended by signal 15 (SIGTERM)"},
    {"stops_in_probe", ATTN_ERROR_TIMEOUT, "probe: " LATE},
    {"divides_in_probe", ATTN_ERROR_PLUGIN, "probe: its process was ended by signal 8 (SIGFPE)"},
    {"illegal_in_constructor", ATTN_ERROR_PLUGIN,
     "constructor: its process was ended by signal 4 (SIGILL)"},
    {"closes_descriptors_in_probe", ATTN_ERROR_PLUGIN,
     "probe: closed a descriptor that is not its own"},
    {"handler_in_constructor", ATTN_ERROR_PLUGIN, "conduct: changed the handler of signal 11"},
    {"handler_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the handler of signal 11"},
    {"blocks_signal_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed whether signal 2 is blocked"},
    {"locale_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the locale"},
    {"rounding_in_entry", ATTN_ERROR_PLUGIN, "conduct: changed the rounding mode"},
    {"folder_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the working directory"},
    {"environment_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the environment"},
    {"mask_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the file mode mask"},
    {"leaves_child_in_probe", ATTN_ERROR_PLUGIN, "probe: ended its process with exit status 9"},
    {"undefined_symbol", ATTN_ERROR_PLUGIN,
     "dlopen: " PLUGIN("undefined_symbol") ": undefined symbol: no_such_function"},
    {"missing_dependency", ATTN_ERROR_PLUGIN,
     "dlopen: libno_such_driver.so.7: cannot open shared object file: No such file or directory"},
    {"memory_in_probe", ATTN_ERROR_PLUGIN, "probe: " CRASHED},
};

/* Each with its cause; never mapped here; the sound one beside it serves. */
static void misdeeds_are_contained(void **state)
{
    const int before = count_descriptors();
    int tried = 0;

    (void)state;
    for (size_t i = 0; i < sizeof defects / sizeof *defects; i++) {
        const struct defect *defect = &defects[i];
        char file[4096], path[8400];
        attn_runtime *runtime = NULL;
        struct attn_plugin_info info;

        snprintf(file, sizeof file, "%s/attn_%s.so", HOSTILE_DIR, defect->name);
        if (access(file, F_OK) != 0 && strncmp(defect->name, "throw", 5) == 0) {
            print_message("%s: not built, there is no C++ compiler\n", defect->name);
            continue;
        }
        if (SANITIZED && strncmp(defect->name, "memory", 6) == 0) {
            continue; /* no limit of memory is set there */
        }
        snprintf(path, sizeof path, "%s:%s", file, PLUGIN("none"));
        /* A loaded machine may take its time to exhaust memory. */
        runtime = create(path, defect->status == ATTN_ERROR_TIMEOUT ? 1000 : 60000);
        info = info_of(api, runtime, 0);
        if (info.status != defect->status || strcmp(info.reason, defect->reason) != 0) {
            fail_msg("%s: status %d, '%s'", defect->name, info.status, info.reason);
        }
        assert_int_equal(info.num_backends, 0);
        assert_int_equal(info_of(api, runtime, 1).status, ATTN_OK);
        assert_int_equal(api->backend_count(runtime), 1);
        assert_false(is_mapped(file));
        api->runtime_destroy(runtime);
        tried++;
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left, nor a dead one */
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_descriptors(), before);
    print_message("%d misdeeds contained\n", tried);
}

/* What a probe in another process says is what one in this process says. */
static void same_answer_apart(void **state)
{
    attn_runtime *apart = create(PLUGIN("rich"), 0);
    attn_runtime *here = create_by(api, PLUGIN("rich"), -1, 0, NULL, ATTN_OK);
    struct attn_backend_info a = {.struct_size = sizeof a};
    struct attn_backend_info b = {.struct_size = sizeof b};

    (void)state;
    assert_int_equal(api->device_count(apart), 2);
    assert_int_equal(api->backend_count(apart), 2);
    for (int32_t i = 0; i < 2; i++) {
        assert_int_equal(api->backend_info(apart, i, &a), ATTN_OK);
        assert_int_equal(api->backend_info(here, i, &b), ATTN_OK);
        assert_string_equal(a.caps->refused[0].why, b.caps->refused[0].why);
        assert_memory_equal(&a.caps->device, &b.caps->device,
                            offsetof(struct attn_backend_caps, head_sizes) -
                                offsetof(struct attn_backend_caps, device));
        assert_int_equal(a.caps->next != NULL, b.caps->next != NULL);
    }
    api->runtime_destroy(apart);
    api->runtime_destroy(here);
}

/* Two versions of one backend: the one that is found first, whichever it is, and a reason for the other. */
static void first_version_is_kept(void **state)
{
    static const char *const paths[] = {PLUGIN("none") ":" PLUGIN("second_version"),
                                        PLUGIN("second_version") ":" PLUGIN("none")};

    (void)state;
    for (int i = 0; i < 2; i++) {
        attn_runtime *runtime = create(paths[i], 0);
        struct attn_backend_info backend = {.struct_size = sizeof backend};

        assert_int_equal(api->backend_count(runtime), 1);
        assert_int_equal(api->backend_info(runtime, 0, &backend), ATTN_OK);
        assert_string_equal(backend.caps->version, i == 0 ? "1.0" : "2.0");
        assert_string_equal(info_of(api, runtime, 1).reason,
                            "name: backend 'sound' is another plugin's already; the first one found "
                            "is kept");
        api->runtime_destroy(runtime);
    }
}

/* A child that is forked before anything was created creates its own; one that is forked later goes on with its copy. */
static void forks(void **state)
{
    attn_runtime *runtime = NULL;
    int status = -1;

    (void)state;
    for (int later = 0; later < 2; later++) {
        runtime = later ? create(PLUGIN("none"), 0) : NULL;
        const pid_t pid = fork();

        if (pid == 0) {
            attn_runtime *own = create(PLUGIN("crash_in_entry") ":" PLUGIN("rich"), 0);
            const bool right = api->backend_count(own) == 2 &&
                               (!later || api->backend_count(runtime) == 1);

            api->runtime_destroy(own);
            api->runtime_destroy(runtime);
            _exit(right ? 0 : 1);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_int_equal(status, 0);
        api->runtime_destroy(runtime);
    }
}

/* The engine may do with SIGCHLD what it likes, and its dispositions are as before. */
static void signals_are_the_engines(void **state)
{
    struct sigaction before[65] = {{.sa_flags = 0}};
    attn_runtime *runtime = NULL;

    (void)state;
    signal(SIGCHLD, SIG_IGN);
    signal(SIGPIPE, SIG_DFL);
    for (int i = 1; i < 65; i++) {
        sigaction(i, NULL, &before[i]);
    }
    runtime = create(PLUGIN("none") ":" PLUGIN("exit_in_probe") ":" PLUGIN("crash_in_entry"), 0);
    assert_int_equal(info_of(api, runtime, 0).status, ATTN_OK);
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
static void other_children_are_left_alone(void **state)
{
    int status = -1;
    const pid_t pid = fork();

    (void)state;
    if (pid == 0) {
        _exit(5);
    }
    api->runtime_destroy(create(PLUGIN("none") ":" PLUGIN("crash_in_probe"), 0));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(WEXITSTATUS(status), 5);
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

static void many_threads_at_once(void **state)
{
    pthread_t threads[6];
    int failed = 0;

    (void)state;
    for (int i = 0; i < 6; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, one_engine, &failed), 0);
    }
    for (int i = 0; i < 6; i++) {
        pthread_join(threads[i], NULL);
    }
    assert_int_equal(failed, 0);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

static void every_allocation_fails_in_turn(void **state)
{
    const char *path = PLUGIN("rich") ":" PLUGIN("crash_in_probe");
    struct meter meter = {0};
    long calls = 0;

    (void)state;
    api->runtime_destroy(create_by(api, path, 0, 0, &meter, ATTN_OK));
    calls = meter.calls;
    assert_int_equal(meter.alive, 0);
    for (long i = 1; i <= calls; i++) {
        meter = (struct meter){.fail_at = i};
        create_by(api, path, 0, 0, &meter, ATTN_ERROR_OUT_OF_MEMORY);
        assert_int_equal(meter.alive, 0);
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
}

/* An engine that has closed its standard streams, as daemons do. */
static void closed_streams(void **state)
{
    int status = -1;
    const pid_t pid = fork();

    (void)state;
    if (pid == 0) {
        for (int i = 0; i < 256; i++) {
            close(i);
        }
        attn_runtime *runtime = create(PLUGIN("none") ":" PLUGIN("crash_in_probe"), 0);
        const bool right = api->backend_count(runtime) == 1 &&
                           strcmp(info_of(api, runtime, 1).reason, "probe: " CRASHED) == 0;

        api->runtime_destroy(runtime);
        _exit(right ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
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

/* An installed core: <libdir>/libattn.so.1 and <libdir>/attn/attn-scan; without the scanner, and with one that fails. */
static void scanner_of_an_installed_core(void **state)
{
    char folder[64] = "/tmp/attn_isolation_XXXXXX";
    char core[128], plugins[128], scanner[160];
    const struct attn_api *other = NULL;
    attn_get_api_fn *get_api = NULL;
    struct meter meter = {0};
    attn_runtime *runtime = NULL;
    void *symbol = NULL;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(core, sizeof core, "%s/libattn.so.1", folder);
    snprintf(plugins, sizeof plugins, "%s/attn", folder);
    snprintf(scanner, sizeof scanner, "%s/attn-scan", plugins);
    assert_int_equal(mkdir(plugins, 0755), 0);
    copy_file(core_file, core);
    symbol = dlsym(dlopen(core, RTLD_NOW | RTLD_LOCAL), ATTN_GET_API_SYMBOL);
    memcpy(&get_api, &symbol, sizeof get_api);
    assert_int_equal(get_api(0, UINT32_MAX, &other, NULL), ATTN_OK);

    runtime = create_by(other, PLUGIN("none"), 0, 0, &meter, ATTN_OK);
    assert_int_equal(other->backend_count(runtime), 1);
    assert_non_null(strstr(meter.log, "2 " PLUGIN("none") " is probed in this process: there is no "
                                                          "attn-scan beside the core\n"));
    other->runtime_destroy(runtime);
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_int_equal(info_of(other, runtime, 0).status, ATTN_ERROR_IO);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "isolation: ordered, and there is no attn-scan beside the core");
    other->runtime_destroy(runtime);

    write_script(scanner, "#!/bin/sh\nexit 5\n");
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "isolation: ordered, and attn-scan does not run: exit status 5");
    other->runtime_destroy(runtime);
    write_script(scanner, "#!/bin/sh\nprintf ATTNSCANCEPATTNPROBnonsense\n");
    runtime = create_by(other, PLUGIN("none"), 1, 0, NULL, ATTN_OK);
    assert_string_equal(info_of(other, runtime, 0).reason,
                        "scan: what its process sent is no record of a probe");
    other->runtime_destroy(runtime);

    copy_file(scan_file, scanner);
    runtime = create_by(other, PLUGIN("none") ":" PLUGIN("crash_in_entry"), 1, 0, NULL, ATTN_OK);
    assert_int_equal(info_of(other, runtime, 0).status, ATTN_OK);
    assert_string_equal(info_of(other, runtime, 1).reason, "entry: " CRASHED);
    other->runtime_destroy(runtime);
    assert_int_equal(unlink(scanner), 0);
    assert_int_equal(unlink(core), 0);
    assert_int_equal(rmdir(plugins), 0);
    assert_int_equal(rmdir(folder), 0);
}

static void options_are_checked(void **state)
{
    static const struct {
        int32_t isolation, deadline;
        const char *field;
    } bad[] = {{2, 0, "isolation"},
               {-2, 0, "isolation"},
               {0, -1, "probe_deadline_ms"},
               {0, 600001, "probe_deadline_ms"}};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                     .ignore_environment = 1,
                                                     .isolation = bad[i].isolation,
                                                     .probe_deadline_ms = bad[i].deadline};
        struct attn_error error = ATTN_ERROR_INIT;
        attn_runtime *runtime = NULL;

        assert_int_equal(api->runtime_create(&options, &runtime, &error),
                         ATTN_ERROR_INVALID_ARGUMENT);
        assert_string_equal(error.field, bad[i].field);
        assert_null(runtime);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(misdeeds_are_contained),
        cmocka_unit_test(same_answer_apart),
        cmocka_unit_test(first_version_is_kept),
        cmocka_unit_test(forks),
        cmocka_unit_test(signals_are_the_engines),
        cmocka_unit_test(other_children_are_left_alone),
        cmocka_unit_test(many_threads_at_once),
        cmocka_unit_test(every_allocation_fails_in_turn),
        cmocka_unit_test(closed_streams),
        cmocka_unit_test(scanner_of_an_installed_core),
        cmocka_unit_test(options_are_checked),
    };
    attn_get_api_fn *get_api = NULL;
    void *symbol = NULL;

    if (argc != 3) {
        fprintf(stderr, "usage: test_isolation libattn.so.1 attn-scan\n");
        return 2;
    }
    core_file = argv[1];
    scan_file = argv[2];
    /* The scanner's signals are what is tested here, not a sanitizer's account of them. */
    setenv("ASAN_OPTIONS", "handle_segv=0:handle_abort=0:handle_sigill=0:handle_sigfpe=0", 1);
    setenv("TSAN_OPTIONS", "handle_segv=0:handle_abort=0:handle_sigill=0:handle_sigfpe=0", 1);
    symbol = dlsym(dlopen(core_file, RTLD_NOW | RTLD_LOCAL), ATTN_GET_API_SYMBOL);
    memcpy(&get_api, &symbol, sizeof get_api);
    if (symbol == NULL || get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, NULL) != ATTN_OK) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
