/* SPDX-License-Identifier: Apache-2.0 */
/* The cache of probes: what is on file is the plugin's answer, or is not believed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <attn/api.h>
#include <cmocka.h>
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "runtime/probe_cache.h"
#include "runtime/runtime.h"

#define PLUGIN(name) HOSTILE_DIR "/attn_" name ".so"
#define MAX_BYTES 65536

/* A folder with one plugin file and one cache; `log` has what the core warned of. */
struct place {
    char folder[64];
    char plugin[96];
    char cache[128];
    char log[4096];
    long allocations;
    long fail_at;
    long alive;
};

static const struct attn_api *api;

static void keep_log(void *user, int32_t level, const char *who, const char *message)
{
    struct place *place = user;
    const size_t used = strlen(place->log);

    (void)who;
    if (level <= ATTN_LOG_WARN) {
        snprintf(place->log + used, sizeof place->log - used, "%s\n", message);
    }
}

static void *allocate(void *user, size_t size, size_t alignment)
{
    struct place *place = user;

    if (++place->allocations == place->fail_at) {
        return NULL;
    }
    place->alive++;
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t size)
{
    struct place *place = user;

    (void)size;
    place->alive -= memory != NULL;
    free(memory);
}

static attn_runtime *create(struct place *place, const char *path, attn_status expected)
{
    const struct attn_host host = {.struct_size = sizeof host,
                                   .user = place,
                                   .log = keep_log,
                                   .allocate = allocate,
                                   .release = release};
    const struct attn_runtime_options options = {.struct_size = sizeof options,
                                                 .host = &host,
                                                 .backend = "",
                                                 .plugin_path = path,
                                                 .cache_dir = place->cache,
                                                 .num_threads = 1,
                                                 .log_level = 1 + ATTN_LOG_WARN,
                                                 .ignore_environment = 1,
                                                 .no_default_plugins = 1,
                                                 .isolation = -1};
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;
    const attn_status status = api->runtime_create(&options, &runtime, &error);

    place->log[place->fail_at > 0 ? 0 : strlen(place->log)] = '\0';
    if (status != expected) {
        fail_msg("status %d, %s: %s", status, error.field, error.message);
    }
    return runtime;
}

static void copy_file(const char *from, const char *to)
{
    char bytes[MAX_BYTES];
    char beside[128];
    size_t size = 0;
    FILE *in = fopen(from, "rb");
    FILE *out = NULL;

    snprintf(beside, sizeof beside, "%s.new", to);
    out = fopen(beside, "wb");
    assert_non_null(in);
    assert_non_null(out);
    while ((size = fread(bytes, 1, sizeof bytes, in)) > 0) {
        assert_int_equal(fwrite(bytes, 1, size, out), size);
    }
    fclose(in);
    assert_int_equal(fclose(out), 0);
    assert_int_equal(rename(beside, to), 0);
}

static int setup(void **state)
{
    struct place *place = calloc(1, sizeof *place);

    snprintf(place->folder, sizeof place->folder, "/tmp/attn_cache_XXXXXX");
    assert_non_null(mkdtemp(place->folder));
    snprintf(place->plugin, sizeof place->plugin, "%s/attn_x.so", place->folder);
    snprintf(place->cache, sizeof place->cache, "%s/deep/cache", place->folder);
    copy_file(PLUGIN("rich"), place->plugin);
    *state = place;
    return 0;
}

/* Calls `each` with every probe file; returns how many there are. */
static int entries(const struct place *place, void (*each)(const char *path))
{
    DIR *directory = opendir(place->cache);
    const struct dirent *entry = NULL;
    int count = 0;

    while (directory != NULL && (entry = readdir(directory)) != NULL) {
        char path[512];

        if (strncmp(entry->d_name, "probe-", 6) == 0) {
            assert_int_equal(strlen(entry->d_name), 22); /* nothing half-written stays */
            snprintf(path, sizeof path, "%s/%s", place->cache, entry->d_name);
            count++;
            if (each != NULL) {
                each(path);
            }
        }
    }
    if (directory != NULL) {
        closedir(directory);
    }
    return count;
}

static void drop(const char *path)
{
    assert_int_equal(unlink(path), 0);
}

static int teardown(void **state)
{
    struct place *place = *state;
    char path[128];

    entries(place, drop);
    rmdir(place->cache);
    snprintf(path, sizeof path, "%s/deep", place->folder);
    rmdir(path);
    unlink(place->plugin);
    assert_int_equal(rmdir(place->folder), 0);
    free(place);
    return 0;
}

static bool is_mapped(const char *file)
{
    char line[1024];
    bool found = false;
    FILE *maps = fopen("/proc/self/maps", "r");

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        found |= strstr(line, file) != NULL;
    }
    if (maps != NULL) {
        fclose(maps);
    }
    return found;
}

/* A start in another process, since this one keeps what it has loaded: the status that the plugin has to get, a part of
 * its reason or its name, and whether its code is asked. */
static void start(struct place *place, attn_status expected, const char *says, bool asked)
{
    int status = -1;
    const pid_t pid = fork();

    if (pid == 0) {
        attn_runtime *runtime = create(place, place->plugin, ATTN_OK);
        const struct plugin *plugin = &runtime->plugins[0];

        if (plugin->status != expected || (plugin->table != NULL) != asked ||
            (strstr(plugin->reason, says) == NULL && strcmp(plugin->name, says) != 0)) {
            fprintf(stderr, "%s: status %d, '%s', %s\n", plugin->name, plugin->status, plugin->reason,
                    plugin->table != NULL ? "asked" : "not asked");
            _exit(1);
        }
        api->runtime_destroy(runtime);
        _exit(0);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void warm_up(struct place *place)
{
    start(place, ATTN_OK, "rich", true);
    assert_int_equal(entries(place, NULL), 1);
}

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
    assert_memory_equal((const char *)a + numbers, (const char *)b + numbers, sizeof *a - numbers);
    assert_memory_equal(a->head_sizes, b->head_sizes, 2 * sizeof *a->head_sizes);
    assert_memory_equal(a->block_sizes, b->block_sizes, 2 * sizeof *a->block_sizes);
    for (int i = 0; i < 2; i++) {
        assert_memory_equal(&a->refused[i], &b->refused[i], 24);
        assert_string_equal(a->refused[i].why, b->refused[i].why);
    }
    for (; x != NULL && y != NULL; x = x->next, y = y->next) {
        assert_int_equal(x->id, y->id);
        assert_int_equal(x->struct_size, y->struct_size);
        assert_memory_equal(x + 1, y + 1, x->struct_size - sizeof *x);
    }
    assert_ptr_equal(x, y);
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
        assert_memory_equal((char *)&a->devices[i] + numbers, (char *)&b->devices[i] + numbers,
                            sizeof *a->devices - numbers);
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

static void warm_start_loads_nothing(void **state)
{
    struct place *place = *state;
    const struct attn_plugin *table = NULL;
    attn_runtime *warm = NULL;
    attn_runtime *live = NULL;

    warm_up(place);
    warm = create(place, place->plugin, ATTN_OK);
    assert_false(is_mapped(place->plugin));
    assert_null(warm->plugins[0].table);
    live = create(place, PLUGIN("rich"), ATTN_OK); /* another path: probed here */
    assert_non_null(live->plugins[0].table);
    same_runtime(warm, live);
    assert_int_equal(runtime_plugin_table(warm, 0, &table, NULL), ATTN_OK);
    assert_string_equal(table->name, "rich");
    assert_true(is_mapped(place->plugin));
    assert_string_equal(place->log, "");
    api->runtime_destroy(warm);
    api->runtime_destroy(live);
}

static const char *the_entry;
static unsigned char bytes_on_file[MAX_BYTES];
static size_t size_on_file;

static void remember(const char *path)
{
    static char kept[512];
    FILE *file = fopen(path, "rb");

    snprintf(kept, sizeof kept, "%s", path);
    the_entry = kept;
    size_on_file = fread(bytes_on_file, 1, sizeof bytes_on_file, file);
    fclose(file);
}

static void overwrite(const void *bytes, size_t size)
{
    const int descriptor = open(the_entry, O_WRONLY | O_CREAT | O_TRUNC, 0600);

    assert_int_equal(write(descriptor, bytes, size), (ssize_t)size);
    close(descriptor);
}

/* The entry is not believed, is told of, and is right again afterwards. */
static void is_rebuilt(struct place *place, const char *says)
{
    struct stat info;
    attn_runtime *runtime = NULL;

    place->log[0] = '\0';
    runtime = create(place, place->plugin, ATTN_OK);
    if (strstr(place->log, says) == NULL) {
        fail_msg("expected '%s', the log says '%s'", says, place->log);
    }
    assert_int_equal(runtime->num_backends, 2);
    api->runtime_destroy(runtime);
    place->log[0] = '\0';
    runtime = create(place, place->plugin, ATTN_OK);
    assert_null(runtime->plugins[0].table);
    assert_string_equal(place->log, "");
    api->runtime_destroy(runtime);
    assert_int_equal(lstat(the_entry, &info), 0);
    assert_true(S_ISREG(info.st_mode));
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(info.st_uid, geteuid());
}

static void damage_is_noticed(void **state)
{
    struct place *place = *state;
    unsigned char damaged[MAX_BYTES];

    warm_up(place);
    entries(place, remember);
    assert_in_range(size_on_file, 500, sizeof damaged - 1);
    for (size_t i = 0; i < size_on_file; i += 1 + i / 64) {
        memcpy(damaged, bytes_on_file, size_on_file);
        damaged[i] ^= (unsigned char)(1u << (i % 8));
        overwrite(damaged, size_on_file);
        is_rebuilt(place, i < 8    ? "no record"
                          : i < 16 ? "format"
                          : i < 24 ? "t" /* longer or shorter */
                                   : "checksum");
        overwrite(bytes_on_file, i);
        is_rebuilt(place, i == 0 ? "is empty" : i < 32 ? "no record" : "truncated");
    }
    memcpy(damaged, bytes_on_file, size_on_file);
    damaged[size_on_file] = 0;
    overwrite(damaged, size_on_file + 1);
    is_rebuilt(place, "longer than it says");
}

/* Sums that agree over contents that do not: what remains is the reader's care. */
static void lies_are_noticed(void **state)
{
    struct place *place = *state;
    unsigned char lie[MAX_BYTES];
    long refused = 0;

    warm_up(place);
    entries(place, remember);
    for (size_t i = 32; i < size_on_file; i++) {
        attn_runtime *runtime = NULL;
        uint64_t sum = UINT64_C(0xcbf29ce484222325);

        memcpy(lie, bytes_on_file, size_on_file);
        lie[i] = lie[i] == 0xff ? 0x7f : 0xff;
        for (size_t j = 32; j < size_on_file; j++) {
            sum = (sum ^ lie[j]) * UINT64_C(0x100000001b3);
        }
        memcpy(lie + 24, &sum, sizeof sum);
        overwrite(lie, size_on_file);
        place->log[0] = '\0';
        runtime = create(place, place->plugin, ATTN_OK);
        refused += place->log[0] != '\0';
        api->runtime_destroy(runtime);
    }
    assert_true(refused > 100);
    assert_int_equal(place->alive, 0);
}

static void strangers_are_not_believed(void **state)
{
    struct place *place = *state;
    char other[160];

    warm_up(place);
    entries(place, remember);
    assert_int_equal(chmod(the_entry, 0660), 0);
    is_rebuilt(place, "writable for others");
    assert_int_equal(chmod(the_entry, 0602), 0);
    is_rebuilt(place, "writable for others");
    snprintf(other, sizeof other, "%s/elsewhere", place->folder);
    assert_int_equal(rename(the_entry, other), 0);
    assert_int_equal(symlink(other, the_entry), 0);
    is_rebuilt(place, "symbolic link");
    assert_int_equal(unlink(other), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(the_entry, 65534, 65534), 0);
        is_rebuilt(place, "another user");
    } else {
        print_message("not root: no file of another user could be made\n");
    }
}

static void changed_plugin_is_probed_again(void **state)
{
    static const struct timespec times[2] = {{1000000000, 1}, {1000000000, 2}};
    struct place *place = *state;

    warm_up(place);
    copy_file(PLUGIN("none"), place->plugin);
    start(place, ATTN_OK, "sound", true);
    start(place, ATTN_OK, "sound", false);
    copy_file(PLUGIN("rich"), place->plugin);
    warm_up(place);
    entries(place, remember);
    assert_int_equal(utimensat(AT_FDCWD, place->plugin, times, 0), 0);
    is_rebuilt(place, "older than the plugin file");
    assert_int_equal(chmod(place->plugin, 0640), 0);
    is_rebuilt(place, "older than the plugin file");
}

/* Broken, then mended under the same name: nobody has to delete anything. */
static void mended_plugin_is_taken_up(void **state)
{
    struct place *place = *state;

    copy_file(PLUGIN("unknown_bits"), place->plugin);
    start(place, ATTN_ERROR_PLUGIN, "terms", true);
    start(place, ATTN_ERROR_PLUGIN, "terms", false);
    copy_file(PLUGIN("rich"), place->plugin);
    start(place, ATTN_OK, "rich", true);
    start(place, ATTN_OK, "rich", false);
}

static void make_old(const char *path)
{
    const struct timespec now = {time(NULL) - CACHE_REFUSAL_SECONDS - 5, 0};
    const struct timespec times[2] = {now, now};

    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void make_ancient(const char *path)
{
    const struct timespec now = {time(NULL) - CACHE_MAX_AGE_SECONDS - 5, 0};
    const struct timespec times[2] = {now, now};

    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

static void refusals_expire(void **state)
{
    struct place *place = *state;

    copy_file(PLUGIN("unknown_bits"), place->plugin);
    start(place, ATTN_ERROR_PLUGIN, "terms", true);
    entries(place, make_old);
    start(place, ATTN_ERROR_PLUGIN, "terms", true);
    start(place, ATTN_ERROR_PLUGIN, "terms", false);
    entries(place, drop);
    copy_file(PLUGIN("absent"), place->plugin);
    start(place, ATTN_ERROR_ABSENT, "no such accelerator", true);
    entries(place, make_old);
    start(place, ATTN_ERROR_ABSENT, "no such accelerator", false); /* no refusal */
}

static void choices_of_devices_lie_side_by_side(void **state)
{
    struct place *place = *state;

    warm_up(place);
    assert_int_equal(setenv("CUDA_VISIBLE_DEVICES", "3", 1), 0);
    api->runtime_destroy(create(place, place->plugin, ATTN_OK));
    assert_int_equal(unsetenv("CUDA_VISIBLE_DEVICES"), 0);
    assert_int_equal(entries(place, NULL), 2);
    assert_string_equal(place->log, "");
    entries(place, make_ancient);
    assert_int_equal(chmod(place->plugin, 0600), 0);
    api->runtime_destroy(create(place, place->plugin, ATTN_OK));
    assert_int_equal(entries(place, NULL), 1); /* the other is of a time that is gone */
}

static void other_name_is_refused(void **state)
{
    struct place *place = *state;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_plugin *table = NULL;
    attn_runtime *runtime = NULL;

    copy_file(PLUGIN("changes_name"), place->plugin);
    start(place, ATTN_OK, "first_name", true);
    assert_int_equal(setenv("HOSTILE_SECOND", "1", 1), 0);
    runtime = create(place, place->plugin, ATTN_OK);
    assert_string_equal(runtime->plugins[0].name, "first_name");
    assert_int_equal(runtime_plugin_table(runtime, 0, &table, &error), ATTN_ERROR_PLUGIN);
    assert_null(table);
    assert_string_equal(error.field, "name");
    assert_string_equal(error.message, "is second_name 1.0 of tests now; it was first_name 1.0 of tests "
                                       "when it was probed");
    assert_int_equal(entries(place, NULL), 0); /* the next start asks it anew */
    api->runtime_destroy(runtime);
    runtime = create(place, place->plugin, ATTN_OK);
    assert_string_equal(runtime->plugins[0].name, "second_name");
    assert_int_equal(runtime_plugin_table(runtime, 0, &table, &error), ATTN_OK);
    api->runtime_destroy(runtime);
    assert_int_equal(unsetenv("HOSTILE_SECOND"), 0);
}

static void exchanged_file_is_refused(void **state)
{
    struct place *place = *state;
    struct attn_error error = ATTN_ERROR_INIT;
    const struct attn_plugin *table = NULL;
    attn_runtime *runtime = NULL;

    warm_up(place);
    runtime = create(place, place->plugin, ATTN_OK);
    copy_file(PLUGIN("none"), place->plugin);
    assert_int_equal(runtime_plugin_table(runtime, 0, &table, &error), ATTN_ERROR_PLUGIN);
    assert_string_equal(error.field, "file");
    assert_non_null(strstr(error.message, "has changed since it was probed"));
    assert_false(is_mapped(place->plugin));
    api->runtime_destroy(runtime);
}

/* The loader would answer with the old code, and the cache would keep that as the new file's. */
static void loaded_path_is_not_mistaken(void **state)
{
    struct place *place = *state;
    attn_runtime *runtime = create(place, place->plugin, ATTN_OK);

    api->runtime_destroy(runtime);
    copy_file(PLUGIN("none"), place->plugin);
    runtime = create(place, place->plugin, ATTN_OK);
    assert_int_equal(runtime->plugins[0].status, ATTN_ERROR_IO);
    assert_non_null(strstr(runtime->plugins[0].reason, "only a new process can load it"));
    api->runtime_destroy(runtime);
}

static void no_cache_is_no_fault(void **state)
{
    struct place *place = *state;
    struct place other = *place;
    const struct attn_runtime_options relative = {
        .struct_size = sizeof relative, .cache_dir = "cache", .ignore_environment = 1};
    struct attn_error error = ATTN_ERROR_INIT;
    attn_runtime *runtime = NULL;

    other.cache[0] = '\0';
    api->runtime_destroy(create(&other, place->plugin, ATTN_OK));
    snprintf(other.cache, sizeof other.cache, "%s/below", place->plugin); /* a file, no folder */
    runtime = create(&other, place->plugin, ATTN_OK);
    assert_int_equal(runtime->num_backends, 2);
    api->runtime_destroy(runtime);
    assert_string_equal(other.log, "");
    assert_int_equal(api->runtime_create(&relative, &runtime, &error), ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(error.field, "ATTN_CACHE_DIR");
    assert_non_null(strstr(error.message, "'cache'"));
}

/* Cold starts of many processes write over each other all the time; each sees whole files only. */
static void many_processes_at_once(void **state)
{
    struct place *place = *state;
    pid_t pids[8];
    int status = -1;

    for (int i = 0; i < 8; i++) {
        pids[i] = fork();
        if (pids[i] == 0) {
            for (int j = 0; j < 40; j++) {
                attn_runtime *runtime = create(place, place->plugin, ATTN_OK);

                if (runtime->num_backends != 2 || place->log[0] != '\0') {
                    _exit(1);
                }
                if (j % 4 == i % 4) {
                    cache_forget(runtime, place->plugin);
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

static double milliseconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* The time is told, not judged: the machine may be anybody's. What is judged is that no plugin's code is touched. */
static void sixteen_plugins(void **state)
{
    struct place *place = *state;
    char folder[96];
    double best = 1e9;
    double cold = 0;

    snprintf(folder, sizeof folder, "%s/many", place->folder);
    assert_int_equal(mkdir(folder, 0700), 0);
    for (int i = 0; i < 16; i++) {
        char path[128];

        snprintf(path, sizeof path, "%s/attn_n%02d.so", folder, i);
        copy_file(PLUGIN("named_by_file"), path);
    }
    cold = milliseconds();
    api->runtime_destroy(create(place, folder, ATTN_OK));
    cold = milliseconds() - cold;
    for (int i = 0; i < 20; i++) {
        const double start_time = milliseconds();
        attn_runtime *runtime = create(place, folder, ATTN_OK);
        const double took = milliseconds() - start_time;

        assert_int_equal(runtime->num_backends, 16);
        for (int32_t j = 0; j < 16; j++) {
            assert_null(runtime->plugins[j].table);
        }
        api->runtime_destroy(runtime);
        best = took < best ? took : best;
    }
    print_message("start with 16 plugins: %.2f ms cold in this process, %.2f ms warm\n", cold, best);
    for (int i = 0; i < 16; i++) {
        char path[128];

        snprintf(path, sizeof path, "%s/attn_n%02d.so", folder, i);
        assert_int_equal(unlink(path), 0);
    }
    assert_int_equal(rmdir(folder), 0);
}

static void every_allocation_fails_in_turn(void **state)
{
    struct place *place = *state;

    for (int warm = 0; warm < 2; warm++) {
        long calls = 0;

        entries(place, warm ? NULL : drop);
        place->allocations = place->fail_at = 0;
        api->runtime_destroy(create(place, place->plugin, ATTN_OK));
        calls = place->allocations;
        assert_int_equal(place->alive, 0);
        for (long i = 1; i <= calls; i++) {
            entries(place, warm ? NULL : drop);
            place->allocations = 0;
            place->fail_at = i;
            assert_null(create(place, place->plugin, ATTN_ERROR_OUT_OF_MEMORY));
            assert_int_equal(place->alive, 0);
        }
        place->fail_at = 0;
        api->runtime_destroy(create(place, place->plugin, ATTN_OK));
    }
}

int main(void)
{
#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        CASE(warm_start_loads_nothing),
        CASE(damage_is_noticed),
        CASE(lies_are_noticed),
        CASE(strangers_are_not_believed),
        CASE(changed_plugin_is_probed_again),
        CASE(mended_plugin_is_taken_up),
        CASE(refusals_expire),
        CASE(choices_of_devices_lie_side_by_side),
        CASE(other_name_is_refused),
        CASE(exchanged_file_is_refused),
        CASE(loaded_path_is_not_mistaken),
        CASE(no_cache_is_no_fault),
        CASE(many_processes_at_once),
        CASE(sixteen_plugins),
        CASE(every_allocation_fails_in_turn),
    };

    if (attn_get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, &api, NULL) != ATTN_OK) {
        return 1;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
