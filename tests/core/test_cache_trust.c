/* SPDX-License-Identifier: Apache-2.0 */
/* What is on file about a plugin is its answer, or is not believed and written again. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
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
static void is_rebuilt(struct place *place, const char *says)
{
    struct stat info;
    attn_runtime *runtime = NULL;
    place->meter.log[0] = '\0';
    runtime = place_create(place, place->plugin, ATTN_OK);
    if (strstr(place->meter.log, says) == NULL) {
        fail_msg("expected '%s', the log says '%s'", says, place->meter.log);
    }
    assert_int_equal(runtime->num_backends, 2);
    api->runtime_destroy(runtime);
    place->meter.log[0] = '\0';
    runtime = place_create(place, place->plugin, ATTN_OK);
    assert_null(runtime->plugins[0].table);
    assert_string_equal(place->meter.log, "");
    api->runtime_destroy(runtime);
    assert_int_equal(lstat(the_entry, &info), 0);
    assert_true(S_ISREG(info.st_mode));
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(info.st_uid, geteuid());
}

PLACE_TEST(damage_is_noticed)
{
    unsigned char damaged[MAX_BYTES];
    place_warm_up(place);
    place_entries(place, remember);
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
PLACE_TEST(lies_are_noticed)
{
    unsigned char lie[MAX_BYTES];
    long refused = 0;
    place_warm_up(place);
    place_entries(place, remember);
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
        place->meter.log[0] = '\0';
        runtime = place_create(place, place->plugin, ATTN_OK);
        refused += place->meter.log[0] != '\0';
        api->runtime_destroy(runtime);
    }
    assert_true(refused > 100);
    assert_int_equal(place->meter.alive, 0);
}

PLACE_TEST(strangers_are_not_believed)
{
    char other[160];
    place_warm_up(place);
    place_entries(place, remember);
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

PLACE_TEST(changed_plugin_is_probed_again)
{
    static const struct timespec times[2] = {{1000000000, 1}, {1000000000, 2}};
    place_warm_up(place);
    copy_file(PLUGIN("none"), place->plugin);
    place_start(place, ATTN_OK, "sound", true);
    place_start(place, ATTN_OK, "sound", false);
    copy_file(PLUGIN("rich"), place->plugin);
    place_warm_up(place);
    place_entries(place, remember);
    assert_int_equal(utimensat(AT_FDCWD, place->plugin, times, 0), 0);
    is_rebuilt(place, "older than the plugin file");
    assert_int_equal(chmod(place->plugin, 0640), 0);
    is_rebuilt(place, "older than the plugin file");
}

/* Broken, then mended under the same name: nothing has to be deleted. */
PLACE_TEST(mended_plugin_is_taken_up)
{
    copy_file(PLUGIN("bad_backend_name"), place->plugin);
    place_start(place, ATTN_ERROR_PLUGIN, "name", true);
    place_start(place, ATTN_ERROR_PLUGIN, "name", false);
    copy_file(PLUGIN("rich"), place->plugin);
    place_start(place, ATTN_OK, "rich", true);
    place_start(place, ATTN_OK, "rich", false);
}

static void make_old(const char *path)
{
    const struct timespec now = {time(NULL) - CACHE_REFUSAL_SECONDS - 5, 0};
    const struct timespec times[2] = {now, now};
    assert_int_equal(utimensat(AT_FDCWD, path, times, 0), 0);
}

PLACE_TEST(refusals_expire)
{
    copy_file(PLUGIN("bad_backend_name"), place->plugin);
    place_start(place, ATTN_ERROR_PLUGIN, "name", true);
    place_entries(place, make_old);
    place_start(place, ATTN_ERROR_PLUGIN, "name", true);
    place_start(place, ATTN_ERROR_PLUGIN, "name", false);
    place_entries(place, drop_entry);
    copy_file(PLUGIN("absent"), place->plugin);
    place_start(place, ATTN_ERROR_ABSENT, "no such accelerator", true);
    place_entries(place, make_old);
    place_start(place, ATTN_ERROR_ABSENT, "no such accelerator", true); /* it may have come */
    place_start(place, ATTN_ERROR_ABSENT, "(of a probe ", false);
}

int main(void)
{
    return fixture_open() == ATTN_OK ? test_run(NULL, NULL) : 1;
}
