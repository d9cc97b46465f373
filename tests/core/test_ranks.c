/* SPDX-License-Identifier: Apache-2.0 */
/* The cache folder's checks, and the measured ranks in it: what others could have written steers no
 * selection, and nothing that lies there stops a process. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host/cache_file.h"
#include "host/conformance.h"
#include "host/measurement.h"
#include "select_fixture.h"
#include "support/client.h"
#include "support/test.h"
#include "util/hash.h"

#define NOBODY 65534

struct rank_files {
    char folder[64], ranks[96];
};

static int set_up(void **state)
{
    struct rank_files *files = calloc(1, sizeof *files);
    snprintf(files->folder, sizeof files->folder, "/tmp/attn-ranks-XXXXXX");
    assert_non_null(mkdtemp(files->folder));
    snprintf(files->ranks, sizeof files->ranks, "%s/ranks", files->folder);
    *state = files;
    return 0;
}

static int tear_down(void **state)
{
    struct rank_files *files = *state;
    unlink(files->ranks);
    assert_int_equal(rmdir(files->folder), 0);
    free(files);
    return 0;
}

static void write_ranks(const struct rank_files *files, mode_t mode)
{
    static const struct fixture_time time = {"32/8x128x128.bf16.bf16", "decode", "1x512", "alpha",
                                             4500};
    struct fixture f;
    FILE *file = fopen(files->ranks, "w");
    assert_non_null(file);
    fixture_init(&f);
    fixture_write_time(&f, file, &time);
    fixture_finish(&f);
    fclose(file);
    assert_int_equal(chmod(files->ranks, mode), 0);
}

/* The backend that decode gets, and what the log says of it (or NULL); "beta" is the plugin's
 * estimate, "alpha" the measurement's. */
static const char *chosen_for(const struct rank_files *files, int32_t kv_dtype_v, char log[8192])
{
    static char name[64];
    struct attn_layer_desc layer = fixture_layer("l");
    struct attn_error error;
    struct fixture f;
    attn_assignment *a = NULL;
    fixture_init(&f);
    fixture_add(&f, "alpha", "", 1);
    fixture_add(&f, "beta", "", 50);
    layer.kv_dtype_v = kv_dtype_v;
    f.backends[0].caps.features |= ATTN_FEATURE_KV_DTYPE_V;
    f.backends[1].caps.features |= ATTN_FEATURE_KV_DTYPE_V;
    f.runtime.settings.cache_dir = (char *)(uintptr_t)files->folder;
    alarm(20); /* a select that hangs ends the test */
    assert_ok(fixture_select(&f, "", &layer, 1, &a, &error));
    alarm(0);
    snprintf(name, sizeof name, "%s", fixture_chosen(a, 0, ATTN_PHASE_DECODE));
    if (log != NULL) {
        memcpy(log, f.log, sizeof f.log);
    }
    assignment_destroy(a);
    fixture_finish(&f);
    return name;
}

static const char *chosen(const struct rank_files *files)
{
    return chosen_for(files, 0, NULL);
}

#define CASE(name) TEST_WITH(struct rank_files, files, name, set_up, tear_down)

CASE(own_file_is_read)
{
    assert_string_equal(chosen(files), "beta");
    write_ranks(files, 0644);
    assert_string_equal(chosen(files), "alpha");
    assert_string_equal(chosen_for(files, ATTN_KV_BF16, NULL), "alpha");
    assert_string_equal(chosen_for(files, ATTN_KV_F16, NULL),
                        "beta"); /* measured with other values */
}

CASE(foreign_files_steer_nothing)
{
    char elsewhere[128];
    write_ranks(files, 0666);
    assert_string_equal(chosen(files), "beta");
    write_ranks(files, 0620);
    assert_string_equal(chosen(files), "beta");
    if (geteuid() == 0) {
        write_ranks(files, 0644);
        assert_int_equal(chown(files->ranks, NOBODY, NOBODY), 0);
        assert_string_equal(chosen(files), "beta");
    }
    unlink(files->ranks);
    write_ranks(files, 0600);
    snprintf(elsewhere, sizeof elsewhere, "%s/elsewhere", files->folder);
    assert_int_equal(rename(files->ranks, elsewhere), 0);
    assert_int_equal(symlink(elsewhere, files->ranks), 0);
    assert_string_equal(chosen(files), "beta");
    unlink(elsewhere);
    unlink(files->ranks);
    assert_int_equal(mkfifo(files->ranks, 0600), 0);
    assert_string_equal(chosen(files), "beta");
}

/* A record of `beta`, whose file is the record's or another one. */
static void write_record(const struct rank_files *files, const char *file, int32_t changed,
                         int32_t failed)
{
    struct conformance record = {.backend = "beta",
                                 .device = {ATTN_DEVICE_CPU, 0},
                                 .drivers = drivers_hash(HASH_INIT) + (changed == 2),
                                 .version = "0.1.0",
                                 .mode = "quick",
                                 .seed = 1,
                                 .passed = 3,
                                 .failed = failed};
    char path[128], line[256];
    assert_true(file_hash(file, &record.file));
    record.file += changed == 1;
    assert_true(conformance_text(&record, line, sizeof line));
    snprintf(path, sizeof path, "%s/" CONFORMANCE_FILE, files->folder);
    FILE *out = fopen(path, "a");
    assert_non_null(out);
    fprintf(out, "# a comment\nno record\n%s", line);
    fclose(out);
    assert_int_equal(chmod(path, 0600), 0);
}

/* The backend that decode gets of those with records, or why "beta" is not conformant. */
static const char *chosen_conformant(const struct rank_files *files, char *file)
{
    static char text[128];
    struct attn_layer_desc layer = fixture_layer("l");
    const struct attn_layer_desc *layers[] = {&layer};
    const struct attn_select_options options =
        SIZED(attn_select_options, .backend = "conformant", .flags = ATTN_SELECT_KEEP_UNSERVED);
    struct attn_error error = ATTN_ERROR_INIT;
    struct attn_reason reason = {.struct_size = sizeof reason};
    struct fixture f;
    attn_assignment *a = NULL;
    fixture_init(&f);
    fixture_add(&f, "alpha", "", 50);
    fixture_add(&f, "beta", "", 1);
    f.plugins[0].file = file;
    f.runtime.settings.cache_dir = (char *)(uintptr_t)files->folder;
    assert_ok(select_layers(&f.runtime, &options, layers, 1, &a, &error));
    snprintf(text, sizeof text, "%s", fixture_chosen(a, 0, ATTN_PHASE_DECODE));
    if (text[0] == '\0') {
        assert_ok(assignment_reason(a, 0, ATTN_PHASE_DECODE, 1, 0, &reason));
        assert_string_equal(reason.field, "conformance");
        snprintf(text, sizeof text, "%s", reason.supported);
    }
    assignment_destroy(a);
    fixture_finish(&f);
    return text;
}

/* A record counts for the file and the drivers that it was made with, and the last one counts. */
CASE(only_conformant_ones)
{
    char file[128], records[128];
    snprintf(file, sizeof file, "%s/plugin.so", files->folder);
    snprintf(records, sizeof records, "%s/" CONFORMANCE_FILE, files->folder);
    write_ranks(files, 0600);
    assert_int_equal(rename(files->ranks, file), 0); /* any file will do */
    assert_string_equal(chosen_conformant(files, file), "no record");
    write_record(files, file, 0, 0);
    assert_string_equal(chosen_conformant(files, file), "beta");
    write_record(files, file, 1, 0);
    assert_string_equal(chosen_conformant(files, file), "a record of another plugin file");
    write_record(files, file, 2, 0);
    assert_string_equal(chosen_conformant(files, file), "a record with other drivers");
    write_record(files, file, 0, 1);
    assert_string_equal(chosen_conformant(files, file), "a record with failed cases");
    write_record(files, file, 0, 0);
    assert_string_equal(chosen_conformant(files, file), "beta");
    assert_int_equal(chmod(records, 0622), 0); /* others could have written it */
    assert_string_equal(chosen_conformant(files, file), "no record");
    unlink(records);
    unlink(file);
}

/* What the log says, and the backend that decode gets where the line in the file is changed. */
static const char *stale_choice(const struct rank_files *files, int32_t changed, char log[8192])
{
    char line[1024], text[1024];
    struct measurement m;
    write_ranks(files, 0600);
    FILE *file = fopen(files->ranks, "r+");
    assert_non_null(file);
    assert_non_null(fgets(line, sizeof line, file));
    line[strcspn(line, "\n")] = '\0';
    assert_true(measurement_parse(&m, line));
    m.file += changed == 1;
    m.drivers += changed == 2;
    assert_true(measurement_text(&m, text, sizeof text));
    rewind(file);
    fputs(text, file);
    fclose(file);
    return chosen_for(files, 0, log);
}

/* A time counts for the file and the drivers that it was measured with; the log names what else. */
CASE(stale_times_decide_nothing)
{
    char log[8192];
    assert_string_equal(stale_choice(files, 0, log), "alpha");
    assert_null(strstr(log, "stale"));
    assert_string_equal(stale_choice(files, 1, log), "beta");
    assert_non_null(
        strstr(log, "the times of alpha on file were measured with another plugin file"));
    assert_string_equal(stale_choice(files, 2, log), "beta");
    assert_non_null(strstr(log, "measured with other drivers and are stale"));
}

CASE(written_for_the_user_alone)
{
    static const mode_t masks[] = {0, 077, 0777};
    struct stat info;
    for (size_t i = 0; i < sizeof masks / sizeof *masks; i++) {
        const mode_t before = umask(masks[i]);
        assert_true(cache_file_write(files->ranks, "text", 4));
        umask(before);
        assert_int_equal(lstat(files->ranks, &info), 0);
        assert_int_equal(info.st_mode & 07777, 0600);
        assert_int_equal(info.st_size, 4);
    }
}

/* A limit on the size of files is an error, and no SIGXFSZ that ends the engine. */
CASE(file_size_limit_ends_nothing)
{
    if (test_apart()) {
        const struct rlimit limit = {16, 16};
        sigset_t pending;
        setrlimit(RLIMIT_FSIZE, &limit);
        const bool written = cache_file_write(files->ranks, "more than sixteen", 17);
        const int why = errno;
        sigpending(&pending);
        _exit(written || why != EFBIG || sigismember(&pending, SIGXFSZ));
    }
    assert_int_equal(access(files->ranks, F_OK), -1); /* and half a file is left nowhere */
}

CASE(root_takes_no_other_home)
{
    char folder[256], below[96];
    const char *why = "";
    cache_folder_default(folder, sizeof folder, NULL, files->folder, &why);
    assert_null(why);
    assert_string_equal(folder + strlen(files->folder), "/.cache/libattn");
    cache_folder_default(folder, sizeof folder, NULL, NULL, &why);
    assert_string_equal(folder, "");
    assert_null(why);
    if (geteuid() != 0) {
        skip();
    }
    snprintf(below, sizeof below, "%s/not/there", files->folder);
    cache_folder_default(folder, sizeof folder, NULL, below, &why);
    assert_string_equal(folder, "");
    assert_string_equal(why, "HOME is not there");
    cache_folder_default(folder, sizeof folder, below, files->folder, &why);
    assert_string_equal(folder, "");
    assert_non_null(strstr(why, "not there"));
    snprintf(below, sizeof below, "%s/there", files->folder);
    cache_folder_default(folder, sizeof folder, below, NULL, &why);
    assert_null(why);
    assert_string_equal(folder + strlen(files->folder), "/there/libattn");
    assert_int_equal(chown(files->folder, NOBODY, NOBODY), 0);
    cache_folder_default(folder, sizeof folder, NULL, files->folder, &why);
    assert_string_equal(folder, "");
    assert_string_equal(why, "HOME belongs to another user");
    cache_folder_default(folder, sizeof folder, below, "/root", &why);
    assert_string_equal(folder, "");
    assert_non_null(strstr(why, "XDG_CACHE_HOME"));
}
