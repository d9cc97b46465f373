/* SPDX-License-Identifier: Apache-2.0 */
/* Plugins that misbehave in constructors, entry and probe cost themselves, with the cause, and
 * nothing else. Through the shared library, as an engine has it: arguments are libattn.so.1 and
 * attn-scan. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "support/test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

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
    {"terminates_in_probe", ATTN_ERROR_PLUGIN,
     "probe: its process was ended by signal 15 (SIGTERM)"},
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
    {"limits_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed a resource limit"},
    {"streams_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed where descriptor 2 leads"},
    {"flags_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the flags or mask of signal 17"},
    {"nice_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the niceness"},
    {"timer_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the timers"},
    {"daemon_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the processes: it left some"},
    {"leaves_child_in_probe", ATTN_ERROR_PLUGIN, "probe: ended its process with exit status 9"},
    {"thread_in_constructor", ATTN_ERROR_PLUGIN, "conduct: left a thread that runs"},
    {"thread_in_entry", ATTN_ERROR_PLUGIN, "conduct: left a thread that runs"},
    {"flush_in_entry", ATTN_ERROR_PLUGIN, "conduct: changed the floating-point control word"},
    {"altstack_in_probe", ATTN_ERROR_PLUGIN, "conduct: changed the stack of signal handlers"},
    {"talks_in_constructor", ATTN_ERROR_PLUGIN, "conduct: wrote on standard output: 'hello?'"},
    {"undefined_symbol", ATTN_ERROR_PLUGIN,
     "dlopen: " PLUGIN("undefined_symbol") ": undefined symbol: no_such_function"},
    {"missing_dependency", ATTN_ERROR_PLUGIN,
     "dlopen: libno_such_driver.so.7: cannot open shared object file: No such file or directory"},
    {"memory_in_probe", ATTN_ERROR_PLUGIN, "probe: " CRASHED},
};

/* Each with its cause; never mapped here; the sound one next to it serves. */
TEST(misdeeds_are_contained)
{
    const int before = count_descriptors();
    int tried = 0;
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
        assert_ok(info_of(api, runtime, 1).status);
        assert_int_equal(api->backend_count(runtime), 1);
        assert_false(test_maps(file));
        api->runtime_destroy(runtime);
        tried++;
    }
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1); /* no child is left, nor a dead one */
    assert_int_equal(errno, ECHILD);
    assert_int_equal(count_descriptors(), before);
    print_message("%d misdeeds contained\n", tried);
}

/* What a probe in another process says is what one in this process says. */
TEST(same_answer_apart)
{
    attn_runtime *apart = create(PLUGIN("rich"), 0);
    attn_runtime *here = create_by(api, PLUGIN("rich"), -1, 0, NULL, ATTN_OK);
    struct attn_backend_info a = {.struct_size = sizeof a};
    struct attn_backend_info b = {.struct_size = sizeof b};
    assert_int_equal(api->device_count(apart), 2);
    assert_int_equal(api->backend_count(apart), 2);
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(api->backend_info(apart, i, &a));
        assert_ok(api->backend_info(here, i, &b));
        assert_int_equal(a.caps->num_refused, 3);
        assert_string_equal(a.caps->refused[0].why, b.caps->refused[0].why);
        const size_t behind = offsetof(struct attn_refused_combination, dtypes);
        assert_memory_equal(&a.caps->refused[2].dtypes, &b.caps->refused[2].dtypes,
                            sizeof *a.caps->refused - behind);
        assert_int_equal(a.caps->num_extensions, 2);
        assert_memory_equal(a.caps->extensions, b.caps->extensions, 2 * sizeof(uint32_t));
        assert_memory_equal(&a.caps->device, &b.caps->device,
                            offsetof(struct attn_backend_caps, head_sizes) -
                                offsetof(struct attn_backend_caps, device));
        assert_int_equal(a.caps->next != NULL, b.caps->next != NULL);
    }
    api->runtime_destroy(apart);
    api->runtime_destroy(here);
}

/* Two versions of one backend: the one that is found first, whichever it is, and a reason for the
 * other. */
TEST(first_version_is_kept)
{
    static const char *const paths[] = {PLUGIN("none") ":" PLUGIN("second_version"),
                                        PLUGIN("second_version") ":" PLUGIN("none")};
    for (int i = 0; i < 2; i++) {
        attn_runtime *runtime = create(paths[i], 0);
        struct attn_backend_info backend = {.struct_size = sizeof backend};
        assert_int_equal(api->backend_count(runtime), 1);
        assert_ok(api->backend_info(runtime, 0, &backend));
        assert_string_equal(backend.caps->version, i == 0 ? "1.0" : "2.0");
        char reason[700]; /* with both files */
        snprintf(reason, sizeof reason,
                 "name: backend 'sound' is that of %s already; the first one found is kept",
                 info_of(api, runtime, 0).file);
        assert_string_equal(info_of(api, runtime, 1).reason, reason);
        api->runtime_destroy(runtime);
    }
}

TEST(options_are_checked)
{
    static const struct {
        int32_t isolation, deadline;
        const char *field;
    } bad[] = {{2, 0, "isolation"},
               {-2, 0, "isolation"},
               {0, -1, "probe_deadline_ms"},
               {0, 600001, "probe_deadline_ms"}};

    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct attn_runtime_options options =
            SIZED(attn_runtime_options, .ignore_environment = 1, .isolation = bad[i].isolation,
                  .probe_deadline_ms = bad[i].deadline);
        struct attn_error error = ATTN_ERROR_INIT;
        attn_runtime *runtime = NULL;
        INVALID(&error, bad[i].field, api->runtime_create(&options, &runtime, &error));
        assert_null(runtime);
    }
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(NULL, NULL);
}
