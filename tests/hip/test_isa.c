/* SPDX-License-Identifier: Apache-2.0 */
/* The interpreter: right results where they are known exactly, and defects that it has to catch.
 * usage: test_isa CODE_OBJECT WITH_SCRATCH, of defects.hip for one target */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amd/isa.h"
#include "support/test.h"

#define COUNT 2048
#define RESULTS 6

struct params {
    const float *a, *b;
    float *out;
    int count;
};

static struct code *code;
static float a[COUNT], b[COUNT], out[RESULTS * COUNT];
static const char *file;

static struct code *load(const char *path, char *error, size_t room)
{
    static char image[1 << 20];
    FILE *opened = fopen(path, "rb");
    assert_non_null(opened);
    size_t bytes = fread(image, 1, sizeof image, opened);
    fclose(opened);
    struct code *loaded = code_load(image, bytes, error, room);
    if (loaded != NULL && !code_read(loaded, error, room)) {
        code_free(loaded);
        loaded = NULL;
    }
    return loaded;
}

static bool launch(struct machine *m, const char *name, uint32_t groups, size_t out_bytes,
                   int count)
{
    struct params p = {a, b, out, count};
    struct launch l = {.kernel = code_kernel(code, name),
                       .grid = {groups, 1, 1},
                       .block = {128, 1, 1},
                       .args = &p,
                       .arg_bytes = sizeof p};
    memset(m, 0, sizeof *m);
    assert_non_null(l.kernel);
    assert_true(machine_allow(m, a, sizeof a, false));
    assert_true(machine_allow(m, b, sizeof b, false));
    assert_true(machine_allow(m, out, out_bytes, true));
    bool ok = machine_launch(m, code, &l);
    free(m->regions);
    return ok;
}

static void runs(struct machine *m, const char *name, int count)
{
    if (!launch(m, name, (uint32_t)count / 128, sizeof out, count)) {
        fail_msg("%s", m->error);
    }
}

static void fill(void)
{
    srand(7);
    for (int i = 0; i < COUNT; i++) {
        a[i] = ldexpf((float)(rand() % 65536 - 32768) / 32768.0f, rand() % 12 - 6);
        b[i] = ldexpf((float)(rand() % 65536 + 1) / 32768.0f, rand() % 40 - 20);
    }
    const float odd[] = {0.0f,   -0.0f,           INFINITY, -INFINITY, 3e38f,
                         1e-39f, 1.17549435e-38f, 1e-45f,   2.0f};
    for (int i = 0; i < 81; i++) {
        a[i] = odd[i / 9];
        b[i] = fabsf(odd[i % 9]);
    }
    for (int i = 0; i < 81; i++) { /* what is converted to integers stays in their range */
        if (!(fabsf(a[i]) < 1000.0f)) {
            a[i] = 3.0f;
        }
    }
}

static bool same(float x, float y)
{
    return x == y || (x != x && y != y);
}

TEST(test_arithmetic)
{
    struct machine m;
    fill();
    runs(&m, "divide", COUNT);
    for (int i = 0; i < COUNT; i++) {
        const float expected[RESULTS] = {a[i] / b[i],
                                         (float)((double)a[i] / (double)b[i]),
                                         sqrtf(b[i]),
                                         (float)((long)(a[i] * 1e6f) / (long)(i + 1)),
                                         (float)((int)(a[i] * 1e6f) % (i + 1)),
                                         half_to_float(float_to_half(a[i]))};
        for (int r = 0; r < RESULTS; r++) {
            if (!same(out[r * COUNT + i], expected[r])) {
                fail_msg("result %d of %g and %g is %g, not %g", r, (double)a[i], (double)b[i],
                         (double)out[r * COUNT + i], (double)expected[r]);
            }
        }
    }
    assert_true(m.insns > 0 && m.counts[CLASS_TRANSCENDENTAL] > 0);
}

TEST(test_exchange)
{
    struct machine m;
    float sums[128];
    for (int i = 0; i < 128; i++) {
        a[i] = (float)(i * i % 37);
        b[i] = (float)i;
    }
    for (int i = 0; i < 128; i++) {
        sums[i] = 0;
        for (int j = i & ~31; j < (i & ~31) + 32; j++) {
            sums[i] += a[j];
        }
    }
    runs(&m, "exchange", 128);
    for (int i = 0; i < 128; i++) {
        assert_true(out[i] == sums[127 - i] + b[i]);
    }
}

TEST(test_literals)
{
    struct machine m;
    bool flushes = strcmp(code->target, "gfx90a") == 0;
    for (int i = 0; i < 128; i++) {
        a[i] = (float)(i - 50);
        b[i] = (float)(i % 7) + 0.5f;
    }
    a[7] = 0x1p-130f;
    b[7] = 0.0f;
    runs(&m, "literals", 128);
    for (int i = 0; i < 128; i++) {
        assert_true(out[i] == (i == 7 && flushes ? 0.0f : 3.0f * a[i] + b[i]));
        assert_true(out[128 + i] == a[i] * b[i] + 3.0f);
    }
}

TEST(test_words)
{
    struct machine m;
    if (code_kernel(code, "words") == NULL) { /* CDNA's alone */
        return;
    }
    for (int i = 0; i < 128; i++) {
        a[i] = (float)i;
        b[i] = (float)(1000 + i);
    }
    runs(&m, "words", 128);
    for (int i = 0; i < 128; i++) {
        assert_true(out[i] == b[i] && out[128 + i] == a[i] + 1.0f);
        assert_true(out[256 + i] == a[i] && out[384 + i] == b[i] + 1.0f);
    }
}

static void refuses(const char *name, size_t out_bytes, int count, const char *cause)
{
    struct machine m;
    if (launch(&m, name, 1, out_bytes, count)) {
        fail_msg("%s: nothing was found", name);
    }
    if (strstr(m.error, cause) == NULL) {
        fail_msg("%s: \"%s\" does not say \"%s\"", name, m.error, cause);
    }
}

TEST(test_defects)
{
    refuses("out_of_bounds", 128 * sizeof(float), 128, "writes 4 bytes");
    refuses("race", sizeof out, 128, "since the last barrier");
    refuses("never_written", sizeof out, 128, "stores what was never written");
    refuses("beyond_lds", sizeof out, 1, "bytes of LDS at 512; it has 512");
    refuses("reads_out_of_bounds", sizeof out, 128, "reads 4 bytes");
    refuses("writes_to_read_only", sizeof out, 128, "to read only");
    refuses("race_of_writes", sizeof out, 128, "wrote since the last barrier");
    refuses("unset_value", sizeof out, 128, "stores what was never written");
    refuses("unset_address", sizeof out, 128, "an address of what was never written");
    refuses("unset_condition", sizeof out, 128, "a branch on what was never written");
    refuses("unset_lanes", sizeof out, 128, "EXEC from what was never written");
}

/* Scratch memory: some of its instructions are unknown on purpose; else the launch is refused. */
TEST(test_scratch)
{
    char error[4096];
    struct code *held = code;
    code = load(file, error, sizeof error);
    if (code != NULL) {
        refuses("scratch", sizeof out, 128, "asks for scratch memory");
        code_free(code);
    } else {
        assert_non_null(strstr(error, "scratch"));
    }
    code = held;
}

int main(int argc, char **argv)
{
    char error[4096];
    if (argc != 3) {
        return 2;
    }
    code = load(argv[1], error, sizeof error);
    file = argv[2];
    if (code == NULL) {
        fprintf(stderr, "%s\n", error);
        return 1;
    }
    int failed = test_run(NULL, NULL);
    code_free(code);
    return failed;
}
