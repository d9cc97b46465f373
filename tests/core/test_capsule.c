/* SPDX-License-Identifier: Apache-2.0 */
/* core/host and tools: a capsule's head is read as it was written, and nothing else is one. */
#include "common/capsule_read.h"

#include <attn/tensor.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support/test.h"

static char text[1 << 16];

static void add_line(void *user, const char *line)
{
    strcat(user, line);
}

/* Two requests, 4 query heads on 2, sinks and no slopes. */
static struct capsule *make(void)
{
    struct capsule *c = calloc(1, sizeof *c);
    assert_non_null(c);
    strcpy(c->library, "0.1.0");
    strcpy(c->layer, "model layers.3");
    strcpy(c->prefill, "cpu_ref");
    strcpy(c->decode, "cpu_simd@avx2");
    c->step = 17;
    c->dtype = ATTN_DTYPE_BF16;
    c->num_q_heads = 4;
    c->num_kv_heads = 2;
    c->head_size = c->head_size_v = 64;
    c->scale = 0.125f;
    c->causal = c->has_sinks = 1;
    c->window_left = c->window_right = -1;
    c->block_size = 16;
    c->num_reqs = 2;
    c->query_lens[0] = 1;
    c->query_lens[1] = 5;
    c->seq_lens[0] = 70;
    c->seq_lens[1] = 5;
    for (int32_t h = 0; h < 4; h++) {
        c->statistics[0][h][0] = -0.5f * (float)h;
        c->statistics[3][h][1] = 1e-30f;
        c->sinks[h] = 6.5f;
    }
    return c;
}

static size_t write_text(const struct capsule *c)
{
    text[0] = '\0';
    capsule_write(c, add_line, text);
    return strlen(text);
}

static const char *read_text(struct capsule *c, size_t length)
{
    static char why[512];
    const char *data;
    char *exact = malloc(length > 0 ? length : 1); /* nothing after it may be read */
    assert_non_null(exact);
    memcpy(exact, text, length);
    why[0] = '\0';
    const char *wrong = capsule_read(c, exact, length, &data, why, sizeof why);
    assert_true(wrong == NULL || (wrong == why && why[0] != '\0'));
    free(exact);
    return wrong;
}

TEST(is_read_as_written)
{
    OWNED(memory_end) struct capsule *c = make(), *read = make();
    const size_t length = write_text(c);
    memset(read, 0xff, sizeof *read);
    assert_null(read_text(read, length));
    assert_memory_equal(c, read, sizeof *c);
    assert_int_equal(capsule_bytes(c), 2 * 64 * (6 * 4 * 2 + 75 * 2 * 2));
    c->real = 1;
    const size_t head = write_text(c);
    memset(text + head, 'x', (size_t)capsule_bytes(c));
    assert_null(read_text(read, head + (size_t)capsule_bytes(c)));
    assert_non_null(read_text(read, head + (size_t)capsule_bytes(c) - 1));
    assert_non_null(read_text(read, head + (size_t)capsule_bytes(c) + 1));
}

TEST(an_mla_layer_has_latent_rows_and_weights)
{
    OWNED(memory_end) struct capsule *c = make(), *read = make();
    c->num_kv_heads = 1;
    c->kv_lora_rank = 48;
    c->qk_nope_head_dim = 32;
    c->head_size_v = 24;
    c->statistics[2][0][1] = 0.25f;
    assert_null(read_text(read, write_text(c)));
    assert_memory_equal(c, read, sizeof *c);
    /* q, out; latent rows; kv_b_proj */
    assert_int_equal(capsule_bytes(c),
                     2 * (6 * 4 * (32 + 16) + 6 * 4 * 24 + 75 * 64 + 4 * (32 + 24) * 48));
    c->head_size = 48;
    const char *why = read_text(read, write_text(c));
    assert_non_null(why);
    assert_non_null(strstr(why, "kv_lora_rank is '48'; less than head_size"));
}

TEST(cut_or_changed_it_is_none)
{
    OWNED(memory_end) struct capsule *c = make(), *read = make();
    const size_t length = write_text(c);
    for (size_t cut = 0; cut < length; cut++) {
        assert_non_null(read_text(read, cut));
    }
    for (size_t i = 0; i < length; i++) { /* a NUL has no place in it */
        const char was = text[i];
        text[i] = '\0';
        assert_non_null(read_text(read, length));
        text[i] = was;
    }
}

TEST(values_out_of_range_are_named)
{
    const struct {
        const char *from, *to, *named;
    } changes[] = {
        {"dtype 2", "dtype 4", "dtype is '4'; 1 to 3 is allowed"},
        {"num_q_heads 4", "num_q_heads 3", "num_q_heads is '3'; a multiple"},
        {"num_kv_heads 2", "num_kv_heads 0", "num_kv_heads is '0'; 1 to 1024"},
        {"head_size 64", "head_size 2048", "head_size is '2048'"},
        {"scale 3e000000", "scale 7fc00000", "scale is '7fc00000'; a finite"},
        {"scale 3e000000", "scale be000000", "scale above 0"},
        {"kv_lora_rank 0", "kv_lora_rank 32",
         "kv_lora_rank is '32'; less than head_size, with one"},
        {"qk_nope_head_dim 0", "qk_nope_head_dim 16", "kv_lora_rank is '0'; both"},
        {"num_reqs 2", "num_reqs 1025", "num_reqs is '1025'"},
        {"num_reqs 2", "num_reqs 3", "query_lens is "},
        {"query_lens 1 5", "query_lens 1 6", "query_lens is '6'; up to the request's"},
        {"query_lens 1 5", "query_lens 0 5", "query_lens is '0'; 1 to 2^24"},
        {"seq_lens 70 5", "seq_lens 16777216 5", "up to 256 MiB"},
        {"seq_lens 70 5", "seq_lens 99999999999999999999 5", "seq_lens is "},
        {"layer model layers.3", "layer \033[2J", "layer is '?[2J'; clean text"},
        {"real 0", "real 1", "data is '0 bytes'"},
        {"causal 1", "causal  1", "causal is"},
        {"step 17", "step 17 8", "step is '17 8'"},
        {"step 17\n", "", "step is 'missing'"},
    };
    static char whole[sizeof text];
    OWNED(memory_end) struct capsule *c = make(), *read = make();
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        write_text(c);
        char *at = strstr(text, changes[i].from);
        assert_non_null(at);
        snprintf(whole, sizeof whole, "%.*s%s%s", (int)(at - text), text, changes[i].to,
                 at + strlen(changes[i].from));
        strcpy(text, whole);
        const char *why = read_text(read, strlen(text));
        if (why == NULL || strstr(why, changes[i].named) == NULL) {
            fail_msg("'%s' gave '%s'", changes[i].to, why != NULL ? why : "nothing");
        }
    }
}
