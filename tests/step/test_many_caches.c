/* SPDX-License-Identifier: Apache-2.0 */
/* Layers that no shipped backend has, through a test's plugin: five caches in two tables. */
#include <attn/api.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "opened.h"

enum { HEADS = 2, D = 8, BLOCK = 16, REQS = 3, BLOCKS = 12, TOKENS = 64, ROWS = 4, GROUP = 4 };
enum {
    FURTHER = 3,
    OTHER_BLOCK = 8,
    OTHER_BLOCKS = 16,
    PER_ROW = 2,
};

struct opened {
    OPENED;
    void *memory;
};

static struct opened *open_runtime(void)
{
    struct opened *t = calloc(1, sizeof *t);
    assert_non_null(t);
    OPEN_RUNTIME(t, 1);
    return t;
}

static void close_all(struct opened *t)
{
    free(t->memory);
    CLOSE(t);
}

/* -------- five caches in two tables -------- */

/* What a writer of a later ABI would hand in: elements that are longer, their tails zero. */
struct later_cache {
    struct attn_cache_desc known;
    int64_t unknown;
};
struct later_table {
    struct attn_batch_table known;
    int64_t unknown;
};

static const struct attn_kv_view *const none[5];

static struct later_cache described[FURTHER] = {{{.role = ATTN_CACHE_SCALE,
                                                  .of = 1,
                                                  .kv_dtype = ATTN_KV_F32,
                                                  .num_heads = HEADS,
                                                  .head_size = D,
                                                  .tokens_per_row = GROUP},
                                                 0},
                                                {{.role = ATTN_CACHE_INDEX_K,
                                                  .table = 1,
                                                  .kv_dtype = ATTN_KV_F32,
                                                  .num_heads = 1,
                                                  .head_size = 4,
                                                  .block_size = OTHER_BLOCK,
                                                  .tokens_per_row = PER_ROW},
                                                 0},
                                                {{.role = ATTN_CACHE_COMPRESSED,
                                                  .table = 1,
                                                  .kv_dtype = ATTN_KV_F32,
                                                  .num_heads = HEADS,
                                                  .head_size = D,
                                                  .block_size = OTHER_BLOCK,
                                                  .tokens_per_row = PER_ROW},
                                                 0}};
static struct attn_layer_caches caches = {.ext = {ATTN_EXT_LAYER_CACHES, 0, sizeof caches, NULL},
                                          .caches = &described[0].known,
                                          .num_caches = FURTHER,
                                          .cache_stride = sizeof *described};
static struct attn_layer_desc many = {.struct_size = sizeof many,
                                      .next = &caches.ext,
                                      .name = "many",
                                      .dtype = ATTN_DTYPE_F32,
                                      .num_q_heads = HEADS,
                                      .num_kv_heads = HEADS,
                                      .head_size = D,
                                      .scale = 1,
                                      .causal = 1,
                                      .block_size = BLOCK};

/* The value of cache c, request r, row, head, dim: exact in sums of five. */
static float value(int32_t c, int32_t r, int64_t row, int32_t head, int32_t d)
{
    return (float)(((c * 131 + r * 37 + (int32_t)row * 11 + head * 5 + d) % 997) * (c + 1));
}

static int32_t kernel_block(struct opened *t, int32_t index)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    CHECK(t, t->api->layer_cache_spec(t->layer, index, &spec, &t->error));
    return spec.kernel_block_size;
}

/* `in_first`: of the first further cache, which lies in the layer's own table. */
static void bind_blocks(struct opened *t, int64_t in_first)
{
    static const int32_t roles[] = {ATTN_CACHE_K, ATTN_CACHE_V, ATTN_CACHE_SCALE,
                                    ATTN_CACHE_INDEX_K, ATTN_CACHE_COMPRESSED};
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    void *further[FURTHER];
    int64_t blocks[FURTHER] = {in_first, OTHER_BLOCKS, OTHER_BLOCKS};
    assert_int_equal(t->api->layer_num_caches(t->layer), 2 + FURTHER);
    CHECK(t, t->api->layer_cache_spec(t->layer, 0, &spec, &t->error));
    const struct attn_cache_spec own = spec;
    size_t bytes = (size_t)spec.padded_page_bytes * BLOCKS, at[FURTHER];
    for (int32_t i = 0; i < 2 + FURTHER; i++) {
        struct attn_cache_spec cache = {.struct_size = sizeof cache};
        CHECK(t, t->api->layer_cache_spec(t->layer, i, &cache, &t->error));
        assert_int_equal(cache.role, roles[i]);
        assert_int_equal(cache.block_size, i < 2 ? BLOCK : i == 2 ? BLOCK / GROUP : OTHER_BLOCK);
        assert_int_equal(cache.kernel_block_size,
                         cache.table == 0 ? cache.block_size / (BLOCK / own.kernel_block_size)
                                          : OTHER_BLOCK);
        if (i >= 2) {
            at[i - 2] = bytes;
            bytes += ((size_t)(cache.page_bytes * blocks[i - 2]) + 255) / 256 * 256;
        } else {
            assert_int_equal(cache.page_bytes_alone, BLOCK * HEADS * D * 4);
            assert_int_equal(cache.page_bytes, 2 * cache.page_bytes_alone);
        }
    }
    t->memory = aligned_alloc(256, bytes);
    memset(t->memory, 0, bytes);
    for (int32_t i = 0; i < FURTHER; i++) {
        further[i] = (char *)t->memory + at[i];
    }
    struct attn_cache_memory memory = SIZED(
        attn_cache_memory, .base = t->memory, .num_blocks = BLOCKS, .further = further,
        .further_num_blocks = blocks, .num_further = FURTHER - 1, .device = {ATTN_DEVICE_CPU, 0});
    REFUSED(&t->error, "further", t->api->layer_bind_memory(t->layer, &memory, &t->error));
    struct attn_kv_view k = {.struct_size = sizeof k}, v = k;
    REFUSED_AS(ATTN_ERROR_ORDER, &t->error, "layer_bind_caches",
               t->api->layer_cache_view(t->layer, 0, &k, &t->error));
    assert_int_not_equal(client_bind(t->api, t->layer, &k, &v, &t->error), ATTN_OK);
    REFUSED(&t->error, "num_views", t->api->layer_bind_caches(t->layer, none, 2, &t->error));
    memory.num_further = FURTHER;
    memory.reserved = 1;
    REFUSED(&t->error, "reserved", t->api->layer_bind_memory(t->layer, &memory, &t->error));
    memory.reserved = 0;
    CHECK(t, t->api->layer_bind_memory(t->layer, &memory, &t->error));
}

/* The same memory by views of the engine's blocks, which are cut where the kernel's are smaller. */
static void bind_own_views(struct opened *t)
{
    struct attn_kv_view views[2 + FURTHER] = {{0}};
    const struct attn_kv_view *list[2 + FURTHER];
    char *memory = t->memory;
    for (int32_t i = 0; i < 2 + FURTHER; i++) {
        struct attn_cache_spec s = {.struct_size = sizeof s};
        CHECK(t, t->api->layer_cache_spec(t->layer, i, &s, &t->error));
        const int64_t blocks = s.table == 0 ? BLOCKS : OTHER_BLOCKS;
        views[i] = client_view(memory, blocks, s.block_size, s.num_heads, s.head_size, 4);
        memory += (s.page_bytes_alone * blocks + 255) / 256 * 256;
        list[i] = &views[i];
    }
    views[2].stride_block += 4; /* a gap: of rows that are one block for the kernel, no matter */
    const bool cut = views[2].num_blocks > 0 && kernel_block(t, 2) != views[2].block_size;
    assert_int_equal(cut,
                     t->api->layer_bind_caches(t->layer, list, 2 + FURTHER, &t->error) != ATTN_OK);
    assert_true(!cut || strcmp(t->error.field, "block_size") == 0);
    views[2].stride_block -= 4;
    CHECK(t, t->api->layer_bind_caches(t->layer, list, 2 + FURTHER, &t->error));
}

/* A step's arrays. Blocks of each table are its own, shuffled. */
struct step {
    int32_t starts[REQS + 1], lens[REQS], rows[REQS];
    int32_t blocks[REQS][ROWS], other_blocks[REQS][ROWS];
    int64_t slots[TOKENS], other_slots[TOKENS];
    float k[TOKENS][HEADS][D], v[TOKENS][HEADS][D], scale[TOKENS][HEADS][D], index[TOKENS][1][4],
        compressed[TOKENS][HEADS][D], out[TOKENS][HEADS][D];
    int32_t num_tokens, num_rows;
};

/* A row of every cache for each new token, and one of the second table for each pair of them. */
static void fill_step(struct step *s, const int32_t *queries)
{
    s->num_tokens = s->num_rows = 0;
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t i = 0; i < ROWS; i++) {
            s->blocks[r][i] = (r * ROWS + i) * 5 % BLOCKS;
            s->other_blocks[r][i] = (r * ROWS + i) * 7 % OTHER_BLOCKS;
        }
        s->starts[r] = s->num_tokens;
        for (int32_t i = 0; i < queries[r]; i++) {
            int32_t position = s->lens[r]++, t = s->num_tokens++;
            s->slots[t] = (int64_t)s->blocks[r][position / BLOCK] * BLOCK + position % BLOCK;
            for (int32_t e = 0; e < HEADS * D; e++) {
                s->k[t][e / D][e % D] = value(0, r, position, e / D, e % D);
                s->v[t][e / D][e % D] = value(1, r, position, e / D, e % D);
                s->scale[t][e / D][e % D] = value(2, r, position / GROUP, e / D, e % D);
            }
            if ((position + 1) % PER_ROW == 0) {
                int32_t row = position / PER_ROW, n = s->num_rows++;
                s->other_slots[n] = (int64_t)s->other_blocks[r][row / OTHER_BLOCK] * OTHER_BLOCK +
                                    row % OTHER_BLOCK;
                for (int32_t e = 0; e < HEADS * D; e++) {
                    s->index[n][0][e % 4] = value(3, r, row, 0, e % 4);
                    s->compressed[n][e / D][e % D] = value(4, r, row, e / D, e % D);
                }
                s->rows[r] = row + 1;
            }
        }
    }
    s->starts[REQS] = s->num_tokens;
}

static void check_out(const struct step *s)
{
    for (int32_t r = 0; r < REQS; r++) {
        for (int32_t t = s->starts[r]; t < s->starts[r + 1]; t++) {
            int32_t position = s->lens[r] - s->starts[r + 1] + t, last = s->rows[r] - 1;
            for (int32_t e = 0; e < HEADS * D; e++) {
                int32_t h = e / D, d = e % D;
                float sum = value(0, r, position, h, d) + value(1, r, position, h, d);
                sum += (position + 1) % GROUP == 0 ? value(2, r, position / GROUP, h, d) : 0;
                sum += last >= 0 ? value(3, r, last, 0, d % 4) + value(4, r, last, h, d) : 0;
                assert_true(s->out[t][h][d] == sum);
            }
        }
    }
}

/* How a step's tables come. */
enum form { BLOCK_TABLES, PAGE_LISTS, LAST_PAGES };

/* A table's page lists, after a page of no request. */
struct lists {
    int32_t pages[1 + REQS * ROWS], starts[REQS + 1], last[REQS];
};

static void make_lists(struct lists *l, const int32_t *table, const int32_t *lens, int32_t in_block)
{
    int32_t count = 1;
    l->pages[0] = -7;
    for (int32_t r = 0; r < REQS; r++) {
        l->starts[r] = count;
        for (int32_t i = 0; i * in_block < lens[r]; i++) {
            l->pages[count++] = table[r * ROWS + i];
        }
        l->last[r] = lens[r] - (count - 1 - l->starts[r]) * in_block;
    }
    l->starts[REQS] = count;
}

/* Both tables of the batch as lists; a fault of the second is refused by its number. */
static void give_lists(struct opened *t, struct step *s, struct attn_batch *batch,
                       struct attn_batch_table *table, bool last_pages)
{
    static struct lists own, other;
    make_lists(&own, &s->blocks[0][0], s->lens, BLOCK);
    make_lists(&other, &s->other_blocks[0][0], s->rows, OTHER_BLOCK);
    batch->block_table = table->block_table = NULL;
    batch->page_indices = own.pages, table->page_indices = other.pages;
    batch->page_start_loc = own.starts, table->page_start_loc = other.starts;
    batch->num_pages = own.starts[REQS], table->num_pages = other.starts[REQS];
    if (last_pages) {
        batch->seq_lens = batch->seq_lens_host = table->seq_lens = table->seq_lens_host = NULL;
        batch->last_page_len = own.last, table->last_page_len = other.last;
    }
    table->max_seq_len = TOKENS + 1;
    REFUSED(&t->error, "max_seq_len", t->api->plan_batch(t->plan, batch, NULL, &t->error));
    assert_non_null(strstr(t->error.message, "table 1"));
    table->max_seq_len = 0;
}

/* The last block of request 0 in each table is copied, in all caches of that table, and read where
 * it then lies. */
static void read_moved(struct opened *t, struct step *s, const struct attn_batch *batch,
                       const struct attn_step_io *io)
{
    int32_t *blocks = s->blocks[0];
    int32_t *others = s->other_blocks[0];
    const int32_t last = (s->lens[0] - 1) / BLOCK, last_row = (s->rows[0] - 1) / OTHER_BLOCK;
    const int64_t pair[] = {blocks[last], blocks[ROWS - 1]},
                  of_rows[] = {others[last_row], others[ROWS - 1]};
    struct attn_block_transfer move = SIZED(attn_block_transfer, .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                                            .pairs = pair, .num_pairs = 1);
    struct attn_step_io again = *io;
    again.flags = ATTN_RUN_NO_WRITE;
    CHECK(t, t->api->copy_blocks(t->model, &move, &t->error));
    blocks[last] = (int32_t)pair[1];
    move.table = 2;
    REFUSED(&t->error, "table", t->api->copy_blocks(t->model, &move, &t->error));
    move.table = 1;
    move.pairs = of_rows;
    CHECK(t, t->api->copy_blocks(t->model, &move, &t->error));
    others[last_row] = (int32_t)of_rows[1];
    CHECK(t, t->api->plan_batch(t->plan, batch, NULL, &t->error));
    memset(s->out, 0, sizeof s->out);
    CHECK(t, t->api->run(t->plan, t->layer, &again, &t->error));
    check_out(s);
    blocks[last] = (int32_t)pair[0];
    others[last_row] = (int32_t)of_rows[0];
}

#define BATCH_REFUSED(field, change)                                                               \
    WITH(batch, ,                                                                                  \
         WITH(table, change,                                                                       \
              REFUSED(&t->error, field, t->api->plan_batch(t->plan, &batch, NULL, &t->error))))
#define RUN_REFUSED(field, object, change)                                                         \
    WITH(object, change, REFUSED(&t->error, field, t->api->run(t->plan, t->layer, &io, &t->error)))

static void run_many(struct opened *t, struct step *s, const int32_t *queries, enum form form,
                     bool refuses)
{
    fill_step(s, queries);
    int64_t of_tokens[] = {s->num_tokens, HEADS, D}, of_rows[] = {s->num_rows, HEADS, D},
            of_index[] = {s->num_rows, 1, 4};
    const struct attn_dtype f32 = {ATTN_CODE_FLOAT, 32, 1};
    const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_tensor q = {s->out, cpu, 3, f32, of_tokens, NULL, 0},
                             k = {s->k, cpu, 3, f32, of_tokens, NULL, 0},
                             v = {s->v, cpu, 3, f32, of_tokens, NULL, 0},
                             scale = {s->scale, cpu, 3, f32, of_tokens, NULL, 0},
                             index = {s->index, cpu, 3, f32, of_index, NULL, 0},
                             compressed = {s->compressed, cpu, 3, f32, of_rows, NULL, 0};
    const struct attn_tensor *rows[FURTHER] = {&scale, &index, &compressed};
    struct attn_io_caches io_caches =
        EXTENSION(attn_io_caches, ATTN_EXT_IO_CACHES, NULL, .rows = rows, .num_rows = FURTHER);
    const struct attn_step_io io =
        SIZED(attn_step_io, .next = &io_caches.ext, .q = &q, .k = &k, .v = &v, .out = &q);
    struct later_table table = {.known = {.block_table = &s->other_blocks[0][0],
                                          .block_table_stride = ROWS,
                                          .slot_mapping = s->other_slots,
                                          .num_slots = s->num_rows,
                                          .seq_lens = s->rows,
                                          .seq_lens_host = s->rows}};
    struct attn_batch batch = client_batch(REQS, s->starts, s->lens);
    client_blocks(&batch, &s->blocks[0][0], ROWS, s->slots);
    batch.tables = &table.known;
    batch.num_tables = 1;
    batch.table_stride = sizeof table;
    if (form != BLOCK_TABLES) {
        give_lists(t, s, &batch, &table.known, form == LAST_PAGES);
    }
    if (refuses) { /* each alone is refused by name */
        BATCH_REFUSED("tables", batch.num_tables = 0);
        BATCH_REFUSED("attn_batch_table", table.unknown = 1);
    }
    if (refuses && form == BLOCK_TABLES) {
        BATCH_REFUSED("tables", table.known.seq_lens = NULL);
        BATCH_REFUSED("tables", table.known.block_table_stride = 0);
        BATCH_REFUSED("tables", table.known.block_table_rows = 1);
        BATCH_REFUSED("tables", table.known.max_seq_len = 1);
        BATCH_REFUSED("reserved", table.known.reserved = 1);
        /* one after the last */
        WITH(s->other_blocks[0][0], s->other_blocks[0][0] = OTHER_BLOCKS,
             BATCH_REFUSED("tables", ));
        WITH(s->other_slots[0], s->other_slots[0] = OTHER_BLOCKS * OTHER_BLOCK,
             BATCH_REFUSED("tables", ));
    }
    if (form == BLOCK_TABLES) { /* planned over other blocks and slots, which are then replaced */
        static const int32_t blocks[REQS][ROWS];
        int64_t slots[TOKENS];
        memset(slots, 0xff, sizeof slots);
        struct attn_batch old = batch;
        struct later_table old_table = table;
        old.block_table = old_table.known.block_table = blocks[0];
        old.slot_mapping = old_table.known.slot_mapping = slots;
        old.tables = &old_table.known;
        CHECK(t, t->api->plan_batch(t->plan, &old, NULL, &t->error));
        CHECK(t, t->api->plan_update_block_table(t->plan, t->plan, &batch, NULL, &t->error));
    } else {
        CHECK(t, t->api->plan_batch(t->plan, &batch, NULL, &t->error));
    }
    if (refuses) {
        RUN_REFUSED("attn_io_caches", io_caches, io_caches.num_rows = 1);
        RUN_REFUSED("reserved", io_caches, io_caches.reserved = 1);
        RUN_REFUSED("attn_io_caches", of_index[0], of_index[0]--);
        RUN_REFUSED("attn_io_caches", of_rows[1], of_rows[1]--);
    }
    CHECK(t, t->api->run(t->plan, t->layer, &io, &t->error));
    check_out(s);
    if (form == BLOCK_TABLES) {
        read_moved(t, s, &batch, &io);
    }
}

TEST(test_five_caches)
{
    for (int32_t i = 0; i < 2 * (LAST_PAGES + 1); i++) {
        const int32_t form = i / 2;
        OWNED(memory_end) struct step *s = calloc(1, sizeof *s);
        struct opened *t = open_runtime();
        many.needs_page_lists = form != BLOCK_TABLES;
        /* narrow: blocks of 4 in those of 16 */
        OPEN_LAYER(t, i % 2 != 0 ? "many_caches_narrow" : "many_caches", &many);
        bind_blocks(t, BLOCKS);
        if (form == LAST_PAGES) {
            bind_own_views(t);
        }
        OPEN_PLAN(t, REQS, TOKENS, TOKENS);
        run_many(t, s, (const int32_t[]){21, 5, 7}, form, true);
        /* decodes, a prefill: two calls */
        run_many(t, s, (const int32_t[]){1, 1, 4}, form, false);
        run_many(t, s, (const int32_t[]){1, 1, 1}, form, false);
        many.needs_page_lists = 0;
        close_all(t);
    }
}

/* A decode of one key whose batch brings a second table. */
static void refuse_table(struct opened *t, const int32_t *block_table,
                         const struct attn_batch_table *table, const char *field)
{
    static const int32_t starts[] = {0, 1}, lens[] = {1};
    struct attn_batch batch = client_batch(1, starts, lens);
    batch.block_table = block_table;
    batch.block_table_stride = 1;
    batch.tables = table;
    batch.num_tables = 1;
    batch.table_stride = sizeof *table;
    REFUSED(&t->error, field, t->api->plan_batch(t->plan, &batch, NULL, &t->error));
    close_all(t);
}

/* A table is bounded by the one of its caches that has the fewest blocks. */
TEST(test_fewest_blocks)
{
    static const int32_t last[] = {BLOCKS - 1}, none[] = {0};
    struct opened *t = open_runtime();
    OPEN_LAYER(t, "many_caches", &many);
    bind_blocks(t, BLOCKS - 1);
    OPEN_PLAN(t, REQS, TOKENS, TOKENS);
    const struct attn_batch_table table = {
        .block_table = last, .block_table_stride = 1, .seq_lens = none, .seq_lens_host = none};
    refuse_table(t, last, &table, "block_table");
}

#define CACHES_REFUSED(field, object, change)                                                      \
    WITH(object, change,                                                                           \
         REFUSED(&t->error, field,                                                                 \
                 t->api->select(t->runtime, NULL, &(const struct attn_layer_desc *){&many}, 1,     \
                                &(attn_assignment *){NULL}, &t->error)))

/* How many reasons of this field refuse the backend for the decode phase. */
static int32_t refusals(struct opened *t, const char *backend, const char *field)
{
    return client_refuses(t->api, t->runtime, &many, ATTN_PHASE_DECODE, backend,
                          &(const struct attn_reason){.field = field});
}

/* Whoever has not declared such caches is refused with its reasons; a description that makes no
 * sense is by its field. */
TEST(test_refused_caches)
{
    struct opened *t = open_runtime();
    assert_true(refusals(t, "cpu_ref", "caches") > 0);
    assert_true(refusals(t, "cpu_ref", "tables") > 0);
    assert_int_equal(refusals(t, "many_caches", "caches"), 0);
    described[0].known.tokens_per_row = BLOCK; /* blocks of 8 hold no such row */
    assert_true(refusals(t, "many_caches_narrow", "caches") > 0);
    assert_int_equal(refusals(t, "many_caches", "caches"), 0);
    described[0].known.tokens_per_row = GROUP;
    /* table 1 then has rows of 4 and of 2 tokens */
    CACHES_REFUSED("table", described[1], described[1].known.tokens_per_row = 4);
    CACHES_REFUSED("attn_cache_desc", described[2], described[2].unknown = 1);
    CACHES_REFUSED("role", described[0], described[0].known.role = ATTN_CACHE_K);
    close_all(t);
}
