/* SPDX-License-Identifier: Apache-2.0 */
/* What is on file about a plugin is its answer, or is not believed and written again. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "cache_fixture.h"
#include "isolation.h"
#include "runtime/runtime.h"
#include "support/test.h"

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

/* The entry is not believed, is reported, and is right again afterwards. */
static void is_rebuilt(struct cache_home *home, const char *says)
{
    struct stat info;
    attn_runtime *runtime = NULL;
    home->meter.log[0] = '\0';
    runtime = home_create(home, home->plugin, ATTN_OK);
    if (strstr(home->meter.log, says) == NULL) {
        fail_msg("expected '%s', the log says '%s'", says, home->meter.log);
    }
    assert_int_equal(runtime->num_backends, 2);
    api->runtime_destroy(runtime);
    home->meter.log[0] = '\0';
    runtime = home_create(home, home->plugin, ATTN_OK);
    assert_null(runtime->plugins[0].table);
    assert_string_equal(home->meter.log, "");
    api->runtime_destroy(runtime);
    assert_int_equal(lstat(the_entry, &info), 0);
    assert_true(S_ISREG(info.st_mode));
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(info.st_uid, geteuid());
}

HOME_TEST(damage_is_noticed)
{
    unsigned char damaged[MAX_BYTES];
    home_warm_up(home);
    home_entries(home, remember);
    assert_in_range(size_on_file, 500, sizeof damaged - 1);
    for (size_t i = 0; i < size_on_file; i += 1 + i / 64) {
        memcpy(damaged, bytes_on_file, size_on_file);
        damaged[i] ^= (unsigned char)(1u << (i % 8));
        overwrite(damaged, size_on_file);
        is_rebuilt(home, i < 8    ? "no record"
                         : i < 16 ? "format"
                         : i < 24 ? "t" /* longer or shorter */
                                  : "checksum");
        overwrite(bytes_on_file, i);
        is_rebuilt(home, i == 0 ? "is empty" : i < 32 ? "no record" : "truncated");
    }
    memcpy(damaged, bytes_on_file, size_on_file);
    damaged[size_on_file] = 0;
    overwrite(damaged, size_on_file + 1);
    is_rebuilt(home, "longer than it says");
}

/* Sums that agree over contents that do not: what remains is the reader's care. */
HOME_TEST(lies_are_noticed)
{
    unsigned char lie[MAX_BYTES];
    long refused = 0;
    home_warm_up(home);
    home_entries(home, remember);
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
        home->meter.log[0] = '\0';
        runtime = home_create(home, home->plugin, ATTN_OK);
        refused += home->meter.log[0] != '\0';
        api->runtime_destroy(runtime);
    }
    assert_true(refused > 100);
    assert_int_equal(home->meter.alive, 0);
}

HOME_TEST(strangers_are_not_believed)
{
    char other[160];
    home_warm_up(home);
    home_entries(home, remember);
    assert_int_equal(chmod(the_entry, 0660), 0);
    is_rebuilt(home, "writable for others");
    assert_int_equal(chmod(the_entry, 0602), 0);
    is_rebuilt(home, "writable for others");
    snprintf(other, sizeof other, "%s/elsewhere", home->folder);
    assert_int_equal(rename(the_entry, other), 0);
    assert_int_equal(symlink(other, the_entry), 0);
    is_rebuilt(home, "symbolic link");
    assert_int_equal(unlink(other), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(the_entry, 65534, 65534), 0);
        is_rebuilt(home, "another user");
    } else {
        print_message("not root: no file of another user could be made\n");
    }
}

HOME_TEST(changed_plugin_is_probed_again)
{
    static const struct timespec times[2] = {{1000000000, 1}, {1000000000, 2}};
    home_warm_up(home);
    copy_file(PLUGIN("none"), home->plugin);
    home_start(home, ATTN_OK, "sound", true);
    home_start(home, ATTN_OK, "sound", false);
    copy_file(PLUGIN("rich"), home->plugin);
    home_warm_up(home);
    home_entries(home, remember);
    assert_int_equal(utimensat(AT_FDCWD, home->plugin, times, 0), 0);
    is_rebuilt(home, "older than the plugin file");
    assert_int_equal(chmod(home->plugin, 0640), 0);
    is_rebuilt(home, "older than the plugin file");
}

/* Broken, then mended under the same name: nothing has to be deleted. */
HOME_TEST(mended_plugin_is_taken_up)
{
    copy_file(PLUGIN("bad_backend_name"), home->plugin);
    home_start(home, ATTN_ERROR_PLUGIN, "name", true);
    home_start(home, ATTN_ERROR_PLUGIN, "name", false);
    copy_file(PLUGIN("rich"), home->plugin);
    home_start(home, ATTN_OK, "rich", true);
    home_start(home, ATTN_OK, "rich", false);
}

static void make_old(const char *path)
{
    const struct timespec now = {time(NULL) - CACHE_REFUSAL_SECONDS - 5, 0};
    const struct timespec times[2] = {now, now};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

HOME_TEST(refusals_expire)
{
    copy_file(PLUGIN("bad_backend_name"), home->plugin);
    home_start(home, ATTN_ERROR_PLUGIN, "name", true);
    home_entries(home, make_old);
    home_start(home, ATTN_ERROR_PLUGIN, "name", true);
    home_start(home, ATTN_ERROR_PLUGIN, "name", false);
    home_entries(home, drop_entry);
    copy_file(PLUGIN("absent"), home->plugin);
    home_start(home, ATTN_ERROR_ABSENT, "no such accelerator", true);
    home_entries(home, make_old);
    home_start(home, ATTN_ERROR_ABSENT, "no such accelerator", true); /* it may have come */
    home_start(home, ATTN_ERROR_ABSENT, "(of a probe ", false);
}

int main(void)
{
    return fixture_open() == ATTN_OK ? test_run(NULL, NULL) : 1;
}
