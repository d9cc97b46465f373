/* SPDX-License-Identifier: Apache-2.0 */
/* Files in a plugin directory that are no plugins, or not ones to be trusted: each with its status
 * and reason, next to a sound one. The argument is libattn.so.1. */
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "support/test.h"

#define MAX_BYTES (1 << 20)

static char folder[64], bad[96], good[96];
static unsigned char sound[MAX_BYTES];
static size_t sound_size;

static void write_bad(const void *bytes, size_t size, mode_t mode)
{
    const int out = open(bad, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(out >= 0);
    assert_int_equal(write(out, bytes, size), (ssize_t)size);
    assert_int_equal(fchmod(out, mode), 0);
    close(out);
}

static void write_changed(size_t at, unsigned char byte)
{
    const unsigned char kept = sound[at];
    sound[at] = byte;
    write_bad(sound, sound_size, 0644);
    sound[at] = kept;
}

/* The folder holds attn_bad.so and attn_good.so; the one costs itself. */
static void expect(attn_status status, const char *reason)
{
    for (int32_t isolation = -1; isolation <= 1; isolation += 2) {
        attn_runtime *runtime = create_by(api, folder, isolation, 0, NULL, ATTN_OK);
        const struct attn_plugin_info info = info_of(api, runtime, 0);
        assert_int_equal(api->plugin_count(runtime), 2);
        assert_string_equal(info.file, bad);
        if (info.status != status || strstr(info.reason, reason) != info.reason) {
            fail_msg("isolation %d: status %d, '%s'; expected %d, '%s'", isolation, info.status,
                     info.reason, status, reason);
        }
        assert_int_equal(api->backend_count(runtime), 1);
        api->runtime_destroy(runtime);
    }
    (void)remove(bad);
}

TEST(no_library)
{
    write_bad("", 0, 0644);
    expect(ATTN_ERROR_PLUGIN, "file: is not an ELF file");
    write_bad("#!/bin/sh\necho a script\n", 23, 0755);
    expect(ATTN_ERROR_PLUGIN, "file: is not an ELF file");
    write_changed(EI_CLASS, ELFCLASS32);
    expect(ATTN_ERROR_PLUGIN, "file: has ELF class 1; 2 (64 bits) is needed");
    write_changed(EI_DATA, sound[EI_DATA] == ELFDATA2LSB ? ELFDATA2MSB : ELFDATA2LSB);
    expect(ATTN_ERROR_PLUGIN, "file: has ELF byte order ");
    write_changed(offsetof(Elf64_Ehdr, e_machine), EM_S390);
    expect(ATTN_ERROR_PLUGIN, "file: is for ELF machine ");
    write_changed(offsetof(Elf64_Ehdr, e_type), ET_REL);
    expect(ATTN_ERROR_PLUGIN, "file: has ELF type 1; 3 (a shared library) is needed");
    write_changed(offsetof(Elf64_Ehdr, e_phnum), 0);
    expect(ATTN_ERROR_PLUGIN, "file: has 0 segments of 56 bytes");
    write_changed(offsetof(Elf64_Ehdr, e_phoff) + 6, 0x7f);
    expect(ATTN_ERROR_PLUGIN, "file: is truncated: its table of segments is not in its ");
}

/* Cut anywhere in what is loaded it is refused here; after that the loader says what it misses, or
 * misses nothing. */
TEST(truncated)
{
    Elf64_Ehdr header;
    size_t loaded = 0;
    memcpy(&header, sound, sizeof header);
    for (int i = 0; i < header.e_phnum; i++) {
        Elf64_Phdr segment;

        memcpy(&segment, sound + header.e_phoff + (size_t)i * sizeof segment, sizeof segment);
        if (segment.p_type == PT_LOAD && segment.p_offset + segment.p_filesz > loaded) {
            loaded = segment.p_offset + segment.p_filesz;
        }
    }
    write_bad(sound, 20, 0644);
    expect(ATTN_ERROR_PLUGIN, "file: is truncated: 20 bytes, and an ELF header has 64");
    for (size_t size = 64; size < loaded; size += loaded / 24) {
        write_bad(sound, size, 0644);
        expect(ATTN_ERROR_PLUGIN, "file: is truncated: ");
    }
    write_bad(sound, loaded - 1, 0644);
    expect(ATTN_ERROR_PLUGIN, "file: is truncated: segment ");
}

TEST(no_regular_file)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(mkdir(bad, 0755), 0);
    expect(ATTN_ERROR_PLUGIN, "file: is not a regular file");
    assert_int_equal(mkfifo(bad, 0644), 0);
    expect(ATTN_ERROR_PLUGIN, "file: is not a regular file");
    snprintf(address.sun_path, sizeof address.sun_path, "%s", bad);
    assert_int_equal(bind(listener, (const struct sockaddr *)&address, sizeof address), 0);
    expect(ATTN_ERROR_IO, "file: cannot be opened: ");
    close(listener);
    assert_int_equal(symlink("/no/such/plugin.so", bad), 0);
    expect(ATTN_ERROR_IO, "file: cannot be read: No such file or directory");
    assert_int_equal(symlink(bad, bad), 0);
    expect(ATTN_ERROR_IO, "file: cannot be read: Too many levels of symbolic links");
    assert_int_equal(symlink("/dev/zero", bad), 0);
    expect(ATTN_ERROR_PLUGIN, "file: is not a regular file");
}

TEST(not_to_be_trusted)
{
    write_bad(sound, sound_size, 0666);
    expect(ATTN_ERROR_PLUGIN, "file: is writable for every user (mode 666)");
    write_bad(sound, sound_size, 0002);
    if (geteuid() == 0) { /* root reads it all the same */
        expect(ATTN_ERROR_PLUGIN, "file: is writable for every user (mode 2)");
    }
    (void)remove(bad);
}

/* A folder that every user can write, and files and folders of others, which root loads nothing
 * of. */
TEST(place_not_to_be_trusted)
{
    write_bad(sound, sound_size, 0644);
    assert_int_equal(chmod(folder, 0777), 0);
    for (int32_t isolation = -1; isolation <= 1; isolation += 2) {
        attn_runtime *runtime = create_by(api, folder, isolation, 0, NULL, ATTN_OK);
        for (int32_t i = 0; i < 2; i++) {
            assert_non_null(strstr(info_of(api, runtime, i).reason, "which every user can write"));
        }
        assert_int_equal(api->backend_count(runtime), 0);
        api->runtime_destroy(runtime);
    }
    assert_int_equal(chmod(folder, 0700), 0);
    if (geteuid() == 0) {
        assert_int_equal(chown(bad, 65534, 65534), 0);
        expect(ATTN_ERROR_PLUGIN, "file: is of user 65534; root loads plugins of its own");
    }
    (void)remove(bad);
}

/* In a child without root's rights, which would read everything. */
TEST(unreadable)
{
    int status = -1;
    pid_t pid = -1;
    write_bad(sound, sound_size, 0000);
    assert_int_equal(chmod(folder, 0755), 0);
    pid = fork();
    if (pid == 0) {
        struct attn_plugin_info info = {.struct_size = sizeof info};
        if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0)) {
            _exit(2);
        }
        attn_runtime *runtime = create_by(api, folder, -1, 0, NULL, ATTN_OK);
        api->plugin_info(runtime, 0, &info);
        const int right = info.status == ATTN_ERROR_IO &&
                          strcmp(info.reason, "file: cannot be opened: Permission denied") == 0;
        fprintf(stderr, "%s", right ? "" : info.reason);
        _exit(right ? 0 : 1);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (WEXITSTATUS(status) == 2) {
        print_message("could not give up root's rights: nothing unreadable could be made\n");
    } else {
        assert_int_equal(status, 0);
    }
    (void)remove(bad);
}

TEST(entry_is_too_long)
{
    static char path[3 * PATH_MAX];
    struct attn_plugin_info info;
    attn_runtime *runtime = NULL;
    memset(path, 'x', sizeof path - 1);
    path[0] = '/';
    snprintf(path + PATH_MAX + 10, sizeof path - PATH_MAX - 10, ":%s", good);
    runtime = create(path, 0);
    assert_int_equal(api->plugin_count(runtime), 2);
    info = info_of(api, runtime, 0);
    assert_int_equal(info.status, ATTN_ERROR_INVALID_ARGUMENT);
    assert_string_equal(info.reason,
                        "an entry of 4106 bytes in ATTN_PLUGIN_PATH; a path has at most 4095");
    assert_int_equal(strlen(info.file), 63);
    assert_ok(info_of(api, runtime, 1).status);
    api->runtime_destroy(runtime);
}

static int setup(void **state)
{
    FILE *file = fopen(HOSTILE_DIR "/attn_none.so", "rb");
    FILE *copy = NULL;
    snprintf(folder, sizeof folder, "/tmp/attn_files_XXXXXX");
    if (file == NULL || mkdtemp(folder) == NULL) {
        return 1;
    }
    snprintf(bad, sizeof bad, "%s/attn_bad.so", folder);
    snprintf(good, sizeof good, "%s/attn_good.so", folder);
    sound_size = fread(sound, 1, sizeof sound, file);
    fclose(file);
    copy = fopen(good, "wb");
    if (copy == NULL || fwrite(sound, 1, sound_size, copy) != sound_size) {
        return 1;
    }
    return fclose(copy);
}

static int teardown(void **state)
{
    (void)remove(bad);
    (void)remove(good);
    return rmdir(folder);
}

int main(int argc, char **argv)
{
    const int failed = fixture_open(argc, argv);
    return failed != 0 ? failed : test_run(setup, teardown);
}
