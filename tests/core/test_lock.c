/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOCK: the choice that is bound is one of the file's records, or nothing is bound. */
#include "fake_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "host/lock_text.h"

/* What every CASE begins with. */
static struct locked {
    struct fixture fixture;
    char folder[32], path[64], setting[80];
} l;
static struct attn_error error;

static int begin(void **state)
{
    strcpy(l.folder, "/tmp/attn-lock-XXXXXX");
    fake_init(&l.fixture);
    assert_non_null(mkdtemp(l.folder));
    snprintf(l.path, sizeof l.path, "%s/lock", l.folder);
    snprintf(l.setting, sizeof l.setting, "write:%s", l.path);
    return 0;
}

static int end(void **state)
{
    unlink(l.path);
    assert_int_equal(rmdir(l.folder), 0); /* nothing else was left there */
    fixture_finish(&l.fixture);
    return 0;
}

#define CASE(name) TEST_AROUND(name, begin, end)

static attn_status bind(bool writes, const char *name)
{
    struct attn_layer_desc layers[2] = {fake_layer("a"), fake_layer(name)};
    error = (struct attn_error)ATTN_ERROR_INIT;
    l.fixture.runtime.settings.lock = writes ? l.setting : l.path;
    attn_model *model = fake_model(&l.fixture, layers, 2, &error);
    model_destroy(model);
    return model != NULL ? ATTN_OK : error.status;
}

/* Binding as the file has it fails, with this text. */
static void refused(const char *name, attn_status status, const char *text)
{
    assert_int_equal(bind(false, name), status);
    assert_non_null(strstr(error.message, text));
}

static size_t read_lock(char *text, size_t size)
{
    FILE *file = fopen(l.path, "r");
    assert_non_null(file);
    const size_t length = fread(text, 1, size - 1, file);
    text[length] = '\0';
    fclose(file);
    return length;
}

static void write_file(const char *text, size_t size)
{
    FILE *file = fopen(l.path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

CASE(the_same_choice_is_bound_and_any_other_refused)
{
    static char newer[] = "2.0";
    assert_int_equal(bind(false, "b"), ATTN_ERROR_IO); /* no file */
    assert_ok(bind(true, "b"));
    assert_ok(bind(false, "b"));
    refused("other model", ATTN_ERROR_REFUSED,
            "layer 1: name=b in the lock, name=other model in this");
    assert_string_equal(error.field, "ATTN_LOCK");
    strcpy(l.fixture.names[0], "fakf");
    refused("b", ATTN_ERROR_REFUSED, "decode=fake in the lock, decode=fakf in this choice");
    strcpy(l.fixture.names[0], "fake");
    l.fixture.plugins[0].version = newer;
    refused("b", ATTN_ERROR_REFUSED, "2.0 in this choice");
    assert_int_equal(fake_calls.creates, 2);
    l.fixture.plugins[0].version = l.fixture.runtime.settings.backend;
}

/* Two ranks whose measured times differ: the first one's choice is written, the other takes it. */
CASE(a_rank_takes_the_choice_of_another)
{
    attn_assignment *a = NULL;
    char take[80];
    static char other[] = "2.0";
    struct attn_layer_desc layers[2] = {fake_layer("a"), fake_layer("b")};
    struct attn_backend_caps *second = fixture_add(&l.fixture, "other", "", 0);
    *second = l.fixture.backends[0].caps;
    second->name = "other";
    assert_ok(bind(true, "b")); /* by "fake" */
    second->rank[0] = second->rank[1] = 1 + l.fixture.backends[0].caps.rank[1];
    refused("b", ATTN_ERROR_REFUSED, "decode=fake in the lock, decode=other in this choice");
    snprintf(take, sizeof take, "take:%s", l.path);
    l.fixture.runtime.settings.lock = take;
    assert_ok(fixture_select(&l.fixture, "", layers, 2, &a, &error));
    assert_string_equal(fixture_chosen(a, 0, ATTN_PHASE_DECODE), "fake");
    assert_string_equal(fixture_chosen(a, 1, ATTN_PHASE_PREFILL), "fake");
    assignment_destroy(a);
    attn_model *model = fake_model(&l.fixture, layers, 2, &error);
    assert_non_null(model);
    model_destroy(model);
    /* Another version is refused, and so are layers that the file does not have. */
    l.fixture.plugins[0].version = other;
    assert_null(fake_model(&l.fixture, layers, 2, &error));
    assert_non_null(strstr(error.message, "2.0 in this choice"));
    l.fixture.plugins[0].version = l.fixture.runtime.settings.backend;
    layers[1].name = "c";
    assert_null(fake_model(&l.fixture, layers, 2, &error));
    assert_non_null(strstr(error.message, "layer 1: name=b in the lock, name=c in this"));
    /* A backend that this rank lacks. */
    layers[1].name = "b";
    l.fixture.runtime.num_backends = 1;
    strcpy(l.fixture.names[0], "other");
    assert_int_equal(fixture_select(&l.fixture, "", layers, 2, &a, &error), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "fake"));
    unlink(l.path);
    assert_int_equal(fixture_select(&l.fixture, "", layers, 2, &a, &error), ATTN_ERROR_IO);
}

/* A plugin's file counts, and the one that has taken its place under the same name and version. */
CASE(another_file_is_another_choice)
{
    char plugin[80];
    snprintf(plugin, sizeof plugin, "%s/attn_fake.so", l.folder);
    for (int32_t i = 0; i < 2; i++) {
        FILE *file = fopen(plugin, "w");
        assert_non_null(file);
        fprintf(file, "%d", i);
        fclose(file);
        l.fixture.plugins[0].file = plugin;
        assert_int_equal(bind(i == 0, "b"), i == 0 ? ATTN_OK : ATTN_ERROR_REFUSED);
    }
    assert_non_null(strstr(error.message, " holds another choice: plugin fake: file="));
    assert_null(strstr(error.message, ";")); /* nothing else differs */
    unlink(plugin);
}

CASE(a_file_holds_each_model_once)
{
    static char text[8192];
    assert_ok(bind(true, "b"));
    assert_ok(bind(true, "draft"));
    const size_t length = read_lock(text, sizeof text);
    assert_ok(bind(true, "b"));
    assert_ok(bind(true, "draft"));
    assert_int_equal(read_lock(text, sizeof text), length);
    assert_ok(bind(false, "b"));
    assert_ok(bind(false, "draft"));
    assert_int_equal(bind(false, "c"), ATTN_ERROR_REFUSED);
}

CASE(what_is_no_lock_is_neither_read_nor_written_over)
{
    static char text[8192], large[LOCK_MOST + 2];
    assert_ok(bind(true, "b"));
    const size_t length = read_lock(text, sizeof text);
    memset(large, 'x', sizeof large);
    for (size_t cut = 0; cut < length; cut += 1 + cut / 25) {
        write_file(text, cut);
        REFUSED_AS(ATTN_ERROR_IO, &error, "ATTN_LOCK", bind(false, "b"));
        if (cut > 0) {
            assert_int_equal(bind(true, "b"), ATTN_ERROR_IO);
        }
    }
    write_file("ELF\n", 4);
    assert_int_equal(bind(true, "b"), ATTN_ERROR_IO);
    assert_non_null(strstr(error.message, "is no lock"));
    write_file(large, sizeof large);
    refused("b", ATTN_ERROR_IO, "larger than 1 MiB");
    text[length / 2] = '\0';
    write_file(text, length);
    assert_int_equal(bind(false, "b"), ATTN_ERROR_IO);
    unlink(l.path);
    assert_int_equal(symlink("/dev/zero", l.path), 0);
    refused("b", ATTN_ERROR_IO, "regular file");
}

/* A disk that is full leaves what the file was. */
CASE(a_full_disk)
{
    static char text[8192], after[8192];
    struct rlimit before;
    assert_ok(bind(true, "b"));
    const size_t length = read_lock(text, sizeof text);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit full = {length + 20, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    const attn_status status = bind(true, "draft");
    setrlimit(RLIMIT_FSIZE, &before);
    assert_int_equal(status, ATTN_ERROR_IO);
    assert_string_equal(error.field, "ATTN_LOCK");
    read_lock(after, sizeof after);
    assert_string_equal(text, after);
}

/* The reason of a choice may change, not the choice. */
TEST(compared_texts)
{
    static const char text[] = LOCK_HEAD "layer 0 decode=a name=x y\nranks declared\n" LOCK_END;
    static const char *const others[] = {
        LOCK_HEAD "layer 0 decode=a name=x y\nranks measured=1\n" LOCK_END,
        LOCK_HEAD "layer 0 decode=a name=x  y\nranks declared\n" LOCK_END,
        LOCK_HEAD "layer 0 decode=a\nranks declared\n" LOCK_END,
        LOCK_HEAD "layer 0 decode=a name=x y\nlayer 0 decode=a name=x y\nranks declared\n" LOCK_END,
        LOCK_HEAD "layer 00 decode=a name=x y\nranks declared\n" LOCK_END,
        LOCK_HEAD "layer 0 decode=a name=x y\nlayer 1 decode=a name=z\nranks declared\n" LOCK_END,
        LOCK_HEAD "ranks declared\n" LOCK_END,
        LOCK_HEAD LOCK_HEAD LOCK_END,
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        const int32_t one = lock_compare(text, others[i], "a", "b", NULL, NULL);
        const int32_t other = lock_compare(others[i], text, "a", "b", NULL, NULL);
        assert_int_equal(one == 0, i == 0);
        assert_int_equal(other == 0, i == 0);
        assert_null(lock_check(others[i], strlen(others[i])));
    }
}
