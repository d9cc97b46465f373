/* SPDX-License-Identifier: Apache-2.0 */
/* Starts with a cache of probes: nothing is loaded, what is loaded later has to be what was probed.
 */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cache_fixture.h"
#include "host/cache_file.h"
#include "isolation.h"
#include "runtime/load.h"
#include "runtime/runtime.h"
#include "support/client.h"
#include "support/layer.h"
#include "support/services.h"
#include "support/test.h"
#include "util/hash.h"

static void same_caps(const struct attn_backend_caps *a, const struct attn_backend_caps *b)
{
    const size_t masks = offsetof(struct attn_backend_caps, device);
    const size_t arrays = offsetof(struct attn_backend_caps, head_sizes);
    const size_t numbers = offsetof(struct attn_backend_caps, num_head_sizes);
    const struct attn_ext *x = a->next;
    const struct attn_ext *y = b->next;
    assert_string_equal(a->name, b->name);
    assert_string_equal(a->variant, b->variant);
    assert_string_equal(a->version, b->version);
    assert_string_equal(a->vendor, b->vendor);
    assert_memory_equal((const char *)a + masks, (const char *)b + masks, arrays - masks);
    const size_t ids = offsetof(struct attn_backend_caps, extensions);
    const size_t behind = ids + sizeof a->extensions;
    assert_memory_equal((const char *)a + numbers, (const char *)b + numbers, ids - numbers);
    assert_memory_equal((const char *)a + behind, (const char *)b + behind, sizeof *a - behind);
    assert_int_equal(a->num_extensions, 2);
    assert_memory_equal(a->extensions, b->extensions, 2 * sizeof *a->extensions);
    assert_memory_equal(a->head_sizes, b->head_sizes, 2 * sizeof *a->head_sizes);
    assert_memory_equal(a->block_sizes, b->block_sizes, 2 * sizeof *a->block_sizes);
    for (int i = 0; i < 3; i++) {
        const size_t of = offsetof(struct attn_refused_combination, dtypes);
        assert_memory_equal(&a->refused[i], &b->refused[i], 24);
        assert_memory_equal(&a->refused[i].dtypes, &b->refused[i].dtypes, sizeof *a->refused - of);
        assert_string_equal(a->refused[i].why, b->refused[i].why);
    }
    for (; x != NULL && y != NULL; x = x->next, y = y->next) {
        assert_int_equal(x->id, y->id);
        assert_int_equal(x->struct_size, y->struct_size);
        assert_memory_equal(x + 1, y + 1, x->struct_size - sizeof *x);
    }
    assert_ptr_equal(x, y);
}

/* Where the record of a plugin lies. */
static void entry_of(struct cache_home *home, const char *plugin, char path[512])
{
    const struct machine machine = machine_read();
    snprintf(path, 512, "%s/probe-%016llx", home->cache,
             (unsigned long long)hash_string(machine.name, plugin));
    assert_int_equal(access(path, R_OK), 0);
}

/* What a runtime found; both are of the same plugin. */
static void same_runtime(attn_runtime *a, attn_runtime *b)
{
    assert_int_equal(a->num_devices, 2);
    assert_int_equal(b->num_devices, 2);
    for (int32_t i = 0; i < 2; i++) {
        const size_t numbers = offsetof(struct attn_device_info, compute_capability_major);
        assert_int_equal(a->devices[i].device.id, b->devices[i].device.id);
        assert_string_equal(a->devices[i].name, b->devices[i].name);
        assert_string_equal(a->devices[i].arch, b->devices[i].arch);
        assert_string_equal(a->devices[i].isa, b->devices[i].isa);
        assert_string_equal(a->devices[i].device_namespace, b->devices[i].device_namespace);
        assert_string_equal(a->devices[i].uuid, "GPU-00ff");
        assert_string_equal(b->devices[i].uuid, "GPU-00ff");
        assert_memory_equal((char *)&a->devices[i] + numbers, (char *)&b->devices[i] + numbers,
                            offsetof(struct attn_device_info, device_namespace) - numbers);
    }
    assert_int_equal(a->num_backends, 2);
    assert_int_equal(b->num_backends, 2);
    for (int32_t i = 0; i < 2; i++) {
        assert_string_equal(a->backends[i].full_name, b->backends[i].full_name);
        same_caps(&a->backends[i].caps, &b->backends[i].caps);
    }
    assert_non_null(a->backends[1].caps.next);
    assert_string_equal(a->plugins[0].name, b->plugins[0].name);
    assert_string_equal(a->plugins[0].version, b->plugins[0].version);
    assert_string_equal(a->plugins[0].vendor, b->plugins[0].vendor);
}

/* A file that gets shorter while it is read was not read. */
TEST(cut_files_are_not_read)
{
    char path[] = "/tmp/attn-cut-XXXXXX", bytes[10] = {0};
    const int descriptor = mkstemp(path);
    assert_int_equal(write(descriptor, bytes, sizeof bytes), sizeof bytes);
    for (int32_t cut = 0; cut < 2; cut++) {
        struct cache_file file;
        assert_null(cache_file_open(&file, path, sizeof bytes));
        assert_int_equal(ftruncate(descriptor, cut ? 9 : 10), 0);
        assert_int_equal(cache_file_read(&file, bytes), !cut);
    }
    close(descriptor);
    unlink(path);
}

HOME_TEST(warm_start_loads_nothing)
{
    const struct attn_plugin *table = NULL;
    attn_runtime *warm = NULL;
    attn_runtime *live = NULL;
    home_warm_up(home);
    warm = home_create(home, home->plugin, ATTN_OK);
    assert_false(test_maps(home->plugin));
    assert_null(warm->plugins[0].table);
    live = home_create(home, PLUGIN("rich"), ATTN_OK); /* another path: probed here */
    assert_non_null(live->plugins[0].table);
    same_runtime(warm, live);
    assert_ok(runtime_plugin_table(warm, 0, &table, NULL));
    assert_string_equal(table->name, "rich");
    assert_true(test_maps(home->plugin));
    assert_string_equal(home->meter.log, "");
    api->runtime_destroy(warm);
    api->runtime_destroy(live);
}

/* An engine's log that selects as soon as it hears that a plugin's code is entered. */
struct selecting_log {
    attn_runtime *runtime;
    const struct attn_layer_desc *const *layers;
    int32_t calls;
    bool refused; /* for the plugin that is being loaded, with that as the reason */
};

static bool says_why(const attn_assignment *assignment)
{
    struct attn_reason reason = {.struct_size = sizeof reason};
    return assignment != NULL &&
           api->assignment_reason(assignment, 0, ATTN_PHASE_DECODE, 0, 0, &reason) == ATTN_OK &&
           strcmp(reason.field, "plugin") == 0 &&
           strstr(reason.supported, "called while this thread loads a plugin") != NULL;
}

static void select_from_log(void *user, int32_t level, const char *who, const char *message)
{
    struct selecting_log *log = user;
    const struct attn_select_options options =
        SIZED(attn_select_options, .flags = ATTN_SELECT_KEEP_UNSERVED);
    attn_assignment *assignment = NULL;
    if (log->runtime != NULL && strstr(message, "enters its entry") != NULL) {
        log->calls++;
        (void)api->select(log->runtime, &options, log->layers, 1, &assignment, NULL);
        log->refused = says_why(assignment);
        api->assignment_destroy(assignment);
    }
}

/* The inner selection gets the reason why it cannot have the plugin, and the outer one has it. */
HOME_TEST(log_may_select)
{
    const struct attn_layer_desc layer = layer_decoder("only", 2, 2, 64, 16);
    const struct attn_layer_desc *const layers[] = {&layer};
    struct selecting_log log = {.layers = layers};
    const struct attn_host host = SIZED(attn_host, .user = &log, .log = select_from_log);
    struct attn_runtime_options options = client_options(home->plugin);
    options.host = &host;
    options.cache_dir = home->cache;
    options.log_level = 1 + ATTN_LOG_DEBUG;
    options.isolation = -1;
    attn_assignment *assignment = NULL;
    home_warm_up(home);
    assert_ok(api->runtime_create(&options, &log.runtime, NULL));
    assert_ok(api->select(log.runtime, NULL, layers, 1, &assignment, NULL));
    assert_int_equal(log.calls, 1);
    assert_true(log.refused);
    api->assignment_destroy(assignment);
    api->runtime_destroy(log.runtime);
}

/* A folder of LD_LIBRARY_PATH in which a library has arrived: what was on file may not hold. */
HOME_TEST(other_libraries_are_another_state)
{
    const struct timespec times[2] = {{1, 0}, {1, 0}};
    char folder[80];
    snprintf(folder, sizeof folder, "%s/lib", home->folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    assert_int_equal(setenv("LD_LIBRARY_PATH", folder, 1), 0);
    home_warm_up(home);
    home_start(home, ATTN_OK, "rich", false);
    assert_int_equal(utimensat(AT_FDCWD, folder, times, 0), 0);
    home_start(home, ATTN_OK, "rich", true);
    assert_int_equal(unsetenv("LD_LIBRARY_PATH"), 0);
    assert_int_equal(rmdir(folder), 0);
}

/* A build that replaced another one: its file's time of change differs. */
HOME_TEST(another_build_is_another_state)
{
    char own[PATH_MAX];
    struct stat info;
    assert_true(core_file(own));
    assert_int_equal(stat(own, &info), 0);
    home_warm_up(home);
    home_start(home, ATTN_OK, "rich", false);
    if (chmod(own, info.st_mode & 07777) != 0) {
        skip(); /* installed by another user */
    }
    home_start(home, ATTN_OK, "rich", true);
    assert_int_equal(home_entries(home, NULL), 1);
}

/* Two names of one file, each with the record of the other. */
HOME_TEST(records_are_of_their_file)
{
    struct cache_home other = *home;
    char paths[2][512];
    snprintf(other.plugin, sizeof other.plugin, "%s/attn_y.so", home->folder);
    assert_int_equal(link(home->plugin, other.plugin), 0);
    home_warm_up(home);
    entry_of(home, home->plugin, paths[0]);
    home_start(&other, ATTN_OK, "rich", true);
    entry_of(&other, other.plugin, paths[1]);
    home_start(&other, ATTN_OK, "rich", false);
    copy_file(paths[0], paths[1]);
    home_start(&other, ATTN_OK, "rich", true);
    assert_int_equal(unlink(other.plugin), 0);
}

/* A plugin whose isolation is ordered is probed in isolation or refused: neither a record nor this
 * process replaces it. There is no scanner next to a test. */
HOME_TEST(ordered_isolation_is_had)
{
    struct attn_runtime_options options = client_options(home->plugin);
    options.cache_dir = home->cache;
    options.log_level = 1 + ATTN_LOG_ERROR;
    options.isolation = 1;
    for (int32_t cold = 0; cold < 2; cold++) {
        attn_runtime *runtime = NULL;
        if (cold) {
            home_entries(home, drop_entry);
        } else {
            home_warm_up(home);
        }
        assert_ok(api->runtime_create(&options, &runtime, NULL));
        assert_int_equal(runtime->plugins[0].status, ATTN_ERROR_IO);
        assert_non_null(strstr(runtime->plugins[0].reason, "isolation: ordered, and"));
        api->runtime_destroy(runtime);
    }
}

/* A text of a record ends where it says, whatever its checksum is. */
TEST(texts_of_records_are_whole)
{
    const struct attn_host host =
        SIZED(attn_host, .allocate = services_allocate, .release = services_release);
    const struct record record = {.file = "/file.so",
                                  .status = ATTN_ERROR_PLUGIN,
                                  .field = "field",
                                  .message = "message",
                                  .name = "",
                                  .version = "",
                                  .vendor = ""};
    struct record read;
    struct text bytes;
    text_init(&bytes, &host);
    record_write(&bytes, &record, NULL);
    unsigned char *data = (unsigned char *)bytes.data;
    assert_null(record_read(&read, data, bytes.length));
    assert_string_equal(read.message, "message");
    for (size_t i = 32; i < bytes.length; i++) {
        if (memcmp(data + i, "message", 7) == 0) {
            data[i + 3] = '\0';
        }
    }
    const uint64_t sum = hash_bytes(HASH_INIT, data + 32, bytes.length - 32);
    for (size_t i = 0; i < 8; i++) {
        data[24 + i] = (unsigned char)(sum >> (8 * i));
    }
    assert_string_equal(record_read(&read, data, bytes.length), "is malformed");
    text_finish(&bytes);
}

static void make_ancient(const char *path)
{
    const struct timespec now = {time(NULL) - CACHE_MAX_AGE_SECONDS - 5, 0};
    const struct timespec times[2] = {now, now};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

HOME_TEST(choices_of_devices_lie_side_by_side)
{
    home_warm_up(home);
    assert_int_equal(setenv("CUDA_VISIBLE_DEVICES", "3", 1), 0);
    api->runtime_destroy(home_create(home, home->plugin, ATTN_OK));
    assert_int_equal(unsetenv("CUDA_VISIBLE_DEVICES"), 0);
    assert_int_equal(home_entries(home, NULL), 2);
    assert_string_equal(home->meter.log, "");
    home_entries(home, make_ancient);
    assert_int_equal(chmod(home->plugin, 0600), 0);
    api->runtime_destroy(home_create(home, home->plugin, ATTN_OK));
    assert_int_equal(home_entries(home, NULL), 1); /* the other one has expired */
}

HOME_TEST(other_name_is_refused)
{
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_plugin *table = NULL;
    attn_runtime *runtime = NULL;
    copy_file(PLUGIN("changes_name"), home->plugin);
    home_start(home, ATTN_OK, "first_name", true);
    assert_int_equal(setenv("HOSTILE_SECOND", "1", 1), 0);
    runtime = home_create(home, home->plugin, ATTN_OK);
    assert_string_equal(runtime->plugins[0].name, "first_name");
    assert_int_equal(runtime_plugin_table(runtime, 0, &table, &error), ATTN_ERROR_PLUGIN);
    assert_null(table);
    assert_string_equal(error.field, "name");
    assert_string_equal(error.message,
                        "is second_name 1.0 of tests now; it was first_name 1.0 of tests "
                        "when it was probed");
    assert_int_equal(home_entries(home, NULL), 0); /* the next start asks it again */
    api->runtime_destroy(runtime);
    runtime = home_create(home, home->plugin, ATTN_OK);
    assert_string_equal(runtime->plugins[0].name, "second_name");
    assert_ok(runtime_plugin_table(runtime, 0, &table, &error));
    api->runtime_destroy(runtime);
    assert_int_equal(unsetenv("HOSTILE_SECOND"), 0);
}

HOME_TEST(exchanged_file_is_refused)
{
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_plugin *table = NULL;
    attn_runtime *runtime = NULL;
    home_warm_up(home);
    runtime = home_create(home, home->plugin, ATTN_OK);
    copy_file(PLUGIN("none"), home->plugin);
    REFUSED_AS(ATTN_ERROR_PLUGIN, &error, "file", runtime_plugin_table(runtime, 0, &table, &error));
    assert_non_null(strstr(error.message, "has changed since it was probed"));
    assert_false(test_maps(home->plugin));
    api->runtime_destroy(runtime);
}

/* The loader would answer with the old code, and the cache would keep that as the new file's. */
HOME_TEST(loaded_path_is_not_mistaken)
{
    attn_runtime *runtime = home_create(home, home->plugin, ATTN_OK);
    api->runtime_destroy(runtime);
    copy_file(PLUGIN("none"), home->plugin);
    runtime = home_create(home, home->plugin, ATTN_OK);
    assert_int_equal(runtime->plugins[0].status, ATTN_ERROR_IO);
    assert_non_null(strstr(runtime->plugins[0].reason, "only a new process can load it"));
    api->runtime_destroy(runtime);
}

HOME_TEST(no_cache_is_no_fault)
{
    struct cache_home other = *home;
    const struct attn_runtime_options relative =
        SIZED(attn_runtime_options, .cache_dir = "cache", .ignore_environment = 1);
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    other.cache[0] = '\0';
    api->runtime_destroy(home_create(&other, home->plugin, ATTN_OK));
    snprintf(other.cache, sizeof other.cache, "%s/below", home->plugin); /* a file, no folder */
    runtime = home_create(&other, home->plugin, ATTN_OK);
    assert_int_equal(runtime->num_backends, 2);
    api->runtime_destroy(runtime);
    assert_string_equal(other.meter.log, "");
    INVALID(&error, "ATTN_CACHE_DIR", api->runtime_create(&relative, &runtime, &error));
    assert_non_null(strstr(error.message, "'cache'"));
}

/* Cold starts of many processes write over each other all the time; each sees whole files only. */
HOME_TEST(many_processes_at_once)
{
    pid_t pids[8];
    int status = -1;
    for (int i = 0; i < 8; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            for (int j = 0; j < 40; j++) {
                attn_runtime *runtime = home_create(home, home->plugin, ATTN_OK);
                if (runtime->num_backends != 2 || home->meter.log[0] != '\0') {
                    _exit(1);
                }
                if (j % 4 == i % 4) {
                    cache_forget(runtime, home->plugin);
                }
                api->runtime_destroy(runtime);
            }
            _exit(0);
        }
    }
    for (int i = 0; i < 8; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
}

HOME_TEST(every_allocation_fails_in_turn)
{
    for (int warm = 0; warm < 2; warm++) {
        long calls = 0;
        home_entries(home, warm ? NULL : drop_entry);
        home->meter.calls = home->meter.fail_at = 0;
        api->runtime_destroy(home_create(home, home->plugin, ATTN_OK));
        calls = home->meter.calls;
        assert_int_equal(home->meter.alive, 0);
        for (long i = 1; i <= calls; i++) {
            home_entries(home, warm ? NULL : drop_entry);
            home->meter.calls = 0;
            home->meter.fail_at = i;
            assert_null(home_create(home, home->plugin, ATTN_ERROR_OUT_OF_MEMORY));
            assert_int_equal(home->meter.alive, 0);
        }
        home->meter.fail_at = 0;
        api->runtime_destroy(home_create(home, home->plugin, ATTN_OK));
    }
}

int main(void)
{
    return fixture_open() == ATTN_OK ? test_run(NULL, NULL) : 1;
}
