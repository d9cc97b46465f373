/* SPDX-License-Identifier: Apache-2.0 */
/* ATTN_LOCK: the choice that is bound is one of the file's records, or nothing is bound. */
#include "fake_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "host/lock_text.h"

struct locked {
    struct fixture fixture;
    char folder[32], path[64], setting[80];
};

static void lock_init_fixture(struct locked *l)
{
    strcpy(l->folder, "/tmp/attn-lock-XXXXXX");
    fake_init(&l->fixture);
    assert_non_null(mkdtemp(l->folder));
    snprintf(l->path, sizeof l->path, "%s/lock", l->folder);
    snprintf(l->setting, sizeof l->setting, "write:%s", l->path);
}

static void lock_finish_fixture(struct locked *l)
{
    unlink(l->path);
    assert_int_equal(rmdir(l->folder), 0); /* nothing else was left there */
    fixture_finish(&l->fixture);
}

static attn_status bind(struct locked *l, bool writes, const char *name, struct attn_error *error)
{
    struct attn_layer_desc layers[2] = {fake_layer("a"), fake_layer(name)};
    *error = (struct attn_error)ATTN_ERROR_INIT;
    l->fixture.runtime.settings.lock = writes ? l->setting : l->path;
    attn_model *model = fake_model(&l->fixture, layers, 2, error);
    model_destroy(model);
    return model != NULL ? ATTN_OK : error->status;
}

static size_t read_lock(struct locked *l, char *text, size_t size)
{
    FILE *file = fopen(l->path, "r");
    assert_non_null(file);
    const size_t length = fread(text, 1, size - 1, file);
    text[length] = '\0';
    fclose(file);
    return length;
}

static void write_file(struct locked *l, const char *text, size_t size)
{
    FILE *file = fopen(l->path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, size, file), size);
    assert_int_equal(fclose(file), 0);
}

TEST(the_same_choice_is_bound_and_any_other_refused)
{
    static char newer[] = "2.0";
    struct locked l;
    struct attn_error error;
    lock_init_fixture(&l);
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_IO); /* no file */
    assert_ok(bind(&l, true, "b", &error));
    assert_ok(bind(&l, false, "b", &error));
    REFUSED_AS(ATTN_ERROR_REFUSED, &error, "ATTN_LOCK", bind(&l, false, "other model", &error));
    assert_non_null(strstr(error.message, "layer 1: name=b in the lock, name=other model in this"));
    strcpy(l.fixture.names[0], "fakf");
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "decode=fake in the lock, decode=fakf in this choice"));
    strcpy(l.fixture.names[0], "fake");
    l.fixture.plugins[0].version = newer;
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "2.0 in this choice"));
    assert_int_equal(fake_calls.creates, 2);
    l.fixture.plugins[0].version = l.fixture.runtime.settings.backend;
    lock_finish_fixture(&l);
}

/* Two ranks whose measured times differ: the first one's choice is written, the other takes it. */
TEST(a_rank_takes_the_choice_of_another)
{
    struct locked l;
    struct attn_error error;
    attn_assignment *a = NULL;
    char take[80];
    static char other[] = "2.0";
    struct attn_layer_desc layers[2] = {fake_layer("a"), fake_layer("b")};
    lock_init_fixture(&l);
    struct attn_backend_caps *second = fixture_add(&l.fixture, "other", "", 0);
    *second = l.fixture.backends[0].caps;
    second->name = "other";
    assert_ok(bind(&l, true, "b", &error)); /* by "fake" */
    second->rank[0] = second->rank[1] = 1 + l.fixture.backends[0].caps.rank[1];
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_REFUSED);
    assert_non_null(strstr(error.message, "decode=fake in the lock, decode=other in this choice"));
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
    lock_finish_fixture(&l);
}

/* A plugin's file counts, and the one that has taken its place under the same name and version. */
TEST(another_file_is_another_choice)
{
    char plugin[80];
    struct locked l;
    struct attn_error error;
    lock_init_fixture(&l);
    snprintf(plugin, sizeof plugin, "%s/attn_fake.so", l.folder);
    for (int32_t i = 0; i < 2; i++) {
        FILE *file = fopen(plugin, "w");
        assert_non_null(file);
        fprintf(file, "%d", i);
        fclose(file);
        l.fixture.plugins[0].file = plugin;
        assert_int_equal(bind(&l, i == 0, "b", &error), i == 0 ? ATTN_OK : ATTN_ERROR_REFUSED);
    }
    assert_non_null(strstr(error.message, " holds another choice: plugin fake: file="));
    assert_null(strstr(error.message, ";")); /* nothing else differs */
    unlink(plugin);
    lock_finish_fixture(&l);
}

TEST(a_file_holds_each_model_once)
{
    static char text[8192];
    struct locked l;
    struct attn_error error;
    lock_init_fixture(&l);
    assert_ok(bind(&l, true, "b", &error));
    assert_ok(bind(&l, true, "draft", &error));
    const size_t length = read_lock(&l, text, sizeof text);
    assert_ok(bind(&l, true, "b", &error));
    assert_ok(bind(&l, true, "draft", &error));
    assert_int_equal(read_lock(&l, text, sizeof text), length);
    assert_ok(bind(&l, false, "b", &error));
    assert_ok(bind(&l, false, "draft", &error));
    assert_int_equal(bind(&l, false, "c", &error), ATTN_ERROR_REFUSED);
    lock_finish_fixture(&l);
}

TEST(what_is_no_lock_is_neither_read_nor_written_over)
{
    static char text[8192], large[LOCK_MOST + 2];
    struct locked l;
    struct attn_error error;
    lock_init_fixture(&l);
    assert_ok(bind(&l, true, "b", &error));
    const size_t length = read_lock(&l, text, sizeof text);
    memset(large, 'x', sizeof large);
    for (size_t cut = 0; cut < length; cut += 1 + cut / 25) {
        write_file(&l, text, cut);
        REFUSED_AS(ATTN_ERROR_IO, &error, "ATTN_LOCK", bind(&l, false, "b", &error));
        if (cut > 0) {
            assert_int_equal(bind(&l, true, "b", &error), ATTN_ERROR_IO);
        }
    }
    write_file(&l, "ELF\n", 4);
    assert_int_equal(bind(&l, true, "b", &error), ATTN_ERROR_IO);
    assert_non_null(strstr(error.message, "is no lock"));
    write_file(&l, large, sizeof large);
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_IO);
    assert_non_null(strstr(error.message, "larger than 1 MiB"));
    text[length / 2] = '\0';
    write_file(&l, text, length);
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_IO);
    unlink(l.path);
    assert_int_equal(symlink("/dev/zero", l.path), 0);
    assert_int_equal(bind(&l, false, "b", &error), ATTN_ERROR_IO);
    assert_non_null(strstr(error.message, "regular file"));
    lock_finish_fixture(&l);
}

/* A disk that is full leaves what the file was. */
TEST(a_full_disk)
{
    static char text[8192], after[8192];
    struct rlimit before;
    struct locked l;
    struct attn_error error;
    lock_init_fixture(&l);
    assert_ok(bind(&l, true, "b", &error));
    const size_t length = read_lock(&l, text, sizeof text);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    const struct rlimit full = {length + 20, before.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &full), 0);
    const attn_status status = bind(&l, true, "draft", &error);
    setrlimit(RLIMIT_FSIZE, &before);
    assert_int_equal(status, ATTN_ERROR_IO);
    assert_string_equal(error.field, "ATTN_LOCK");
    read_lock(&l, after, sizeof after);
    assert_string_equal(text, after);
    lock_finish_fixture(&l);
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
