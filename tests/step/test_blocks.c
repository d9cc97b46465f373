/* SPDX-License-Identifier: Apache-2.0 */
/* Block tables that kernels do not take as they are: entries that are several of their blocks, and
 * page lists with offsets. Each step is a plain one's. */
#include <stdlib.h>
#include <string.h>

#include "fixture.h"
#include "backend_recording.h"
#include "support/client.h"
#include "support/test.h"

enum { BLOCK = 16, NARROW = 4, FEW = 4, MANY = 9, SHARED = 320 };

static const int32_t queries[FEW] = {3, 1, 0, 20}, lens[FEW] = {3, 65, 0, 80};
static const int32_t many_queries[MANY] = {1, 1, 1, 1, 1, 1, 2, 1, 1},
                     many_lens[MANY] = {400, 333, 350, 401, 380, 352, 399, 336, 330};

static const struct shape {
    struct attn_layer_desc layer;
    bool shared; /* a prefix, which the core takes apart */
} shapes[] = {
    {DECODER(), false},
    {DECODER(.has_window = 1, .window_left = 20), false},
    {DECODER(.chunk_size = 32), false},
    {DECODER(.sink_len = 5), false},
    {{.kind = ATTN_LAYER_CROSS}, false},
    {DECODER(.kv_dtype = ATTN_KV_INT8_PER_TOKEN_HEAD), false},
    {DECODER(.kv_dtype = ATTN_KV_NVFP4, .head_size = 64), false},
    {DECODER(.padded_page_bytes = 16384), false},
    {DECODER(.padded_page_bytes = 16384 + 4 * 4), false},
    {DECODER(.num_kv_heads = 1), true},
};

static void init(struct fixture *f, const char *backend, const struct shape *shape, bool lists)
{
    struct attn_layer_desc layer = shape->layer;
    layer.needs_page_lists = lists;
    fixture_init(f, backend, &layer, shape->shared ? many_queries : queries,
                 shape->shared ? many_lens : lens, shape->shared ? MANY : FEW,
                 shape->shared ? SHARED : 0, NULL, true);
}

static void same_outputs(const struct fixture *a, const struct fixture *b)
{
    const bool merged = a->layer.sink_len > 0 || a->batch.common_prefix_len > 0;
    assert_true(fixture_difference(a, b) <= (merged ? 1e-5 : 0));
}

/* What the engine sees of the blocks is its own; what kernels see is theirs. */
static void check_spec(const struct fixture *f, int32_t kernel)
{
    struct attn_cache_spec spec = {.struct_size = sizeof spec};
    assert_ok(f->api->layer_cache_spec(f->bound, 0, &spec, NULL));
    assert_int_equal(spec.block_size, BLOCK);
    assert_int_equal(spec.kernel_block_size, kernel);
    assert_int_equal(recorded_by_core()->block_size, kernel);
}

/* Rows in another order, as an engine's persistent table has them. */
TEST(test_rows)
{
    static const int32_t row[FEW] = {3, 0, 1, 2};
    OWNED(fixture_finish) struct fixture plain, split;
    OWNED(memory_end) int32_t *table = malloc(sizeof plain.block_table);
    init(&plain, "recording", &shapes[0], false);
    init(&split, "recording_narrow", &shapes[0], false);
    for (int32_t r = 0; r < FEW; r++) {
        memcpy(table + (int64_t)row[r] * MAX_BLOCKS, split.block_table + r * MAX_BLOCKS,
               MAX_BLOCKS * sizeof *table);
    }
    split.batch.block_table = table;
    split.batch.block_table_row = row;
    fixture_step(&plain);
    fixture_step(&split);
    same_outputs(&plain, &split);
}

/* An engine's own views of its blocks, cut by the core where slots lie one after the other. */
TEST(test_own_views)
{
    OWNED(fixture_finish) struct fixture plain, split;
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    init(&plain, "recording", &shapes[0], false);
    init(&split, "recording_narrow", &shapes[0], false);
    fixture_step(&plain);
    CHECK(&split, client_views(split.api, split.bound, split.cache, split.num_blocks, &k, &v,
                               &split.error));
    assert_int_equal(k.block_size, NARROW);
    assert_int_equal(k.num_blocks, split.num_blocks * BLOCK / NARROW);
    assert_int_equal(k.stride_block, NARROW * k.stride_slot);
    k.block_size = v.block_size = BLOCK;
    k.num_blocks = v.num_blocks = split.num_blocks;
    k.stride_block *= BLOCK / NARROW;
    v.stride_block *= BLOCK / NARROW;
    split.api->plan_destroy(split.plan);
    free(split.workspace);
    CHECK(&split, client_bind(split.api, split.bound, &k, &v, &split.error));
    fixture_plan(&split);
    fixture_step(&split);
    same_outputs(&plain, &split);
    split.api->plan_destroy(split.plan);
    split.plan = NULL;
    k.stride_block += k.stride_slot; /* a gap after each block: no view of parts has it */
    INVALID(&split.error, "block_size", client_bind(split.api, split.bound, &k, &v, &split.error));
}

/* Copies, and a new table for a plan that stands, are in the engine's blocks. */
static void move_a_block(struct fixture *f)
{
    const int32_t entry = 3 * MAX_BLOCKS + (f->seq_lens[3] - 1) / BLOCK; /* not shared */
    const int64_t from = f->block_table[entry], to = f->num_blocks - 1;
    const int64_t pair[] = {from, to}, outside[] = {f->num_blocks, 0};
    struct attn_block_transfer move = SIZED(attn_block_transfer, .kind = ATTN_COPY_DEVICE_TO_DEVICE,
                                            .pairs = pair, .num_pairs = 1);
    CHECK(f, f->api->copy_blocks(f->model, &move, &f->error));
    move.pairs = outside;
    assert_int_equal(f->api->copy_blocks(f->model, &move, &f->error), ATTN_ERROR_INVALID_ARGUMENT);
    f->block_table[entry] = (int32_t)to;
}

/* As they lie, and where one has moved. */
TEST(test_entries_of_several_blocks)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        OWNED(fixture_finish) struct fixture plain, split;
        init(&plain, "recording", &shapes[i], false);
        init(&split, "recording_narrow", &shapes[i], false);
        fixture_step(&plain);
        check_spec(&plain, BLOCK);
        fixture_step(&split);
        check_spec(&split, NARROW);
        same_outputs(&plain, &split);
        move_a_block(&split);
        struct attn_batch tables =
            SIZED(attn_batch, .block_table = split.block_table, .block_table_stride = MAX_BLOCKS);
        CHECK(&split, split.api->plan_update_block_table(split.plan, split.plan, &tables, NULL,
                                                         &split.error));
        split.io.k = split.io.v = NULL; /* they are written */
        memset(split.out, 0xff, (size_t)split.batch.num_tokens * sizeof *split.out);
        CHECK(&split, fixture_run(&split));
        same_outputs(&plain, &split);
    }
}

/* The batch's tables as page lists: of each request its blocks, one after the other. */
struct lists {
    int32_t indices[MAX_REQS * MAX_BLOCKS], start[MAX_REQS + 1], last[MAX_REQS];
};

static void as_lists(struct fixture *f, struct lists *l, bool last_pages)
{
    int32_t count = 0;
    for (int32_t r = 0; r < f->batch.num_reqs; r++) {
        l->start[r] = count;
        for (int32_t i = 0; i * BLOCK < f->seq_lens[r]; i++) {
            l->indices[count++] = f->block_table[r * MAX_BLOCKS + i];
            l->last[r] = f->seq_lens[r] - i * BLOCK;
        }
    }
    l->start[f->batch.num_reqs] = count;
    f->batch.block_table = NULL;
    f->batch.block_table_stride = 0;
    f->batch.page_indices = l->indices;
    f->batch.page_start_loc = l->start;
    f->batch.num_pages = count;
    if (last_pages) {
        f->batch.seq_lens = f->batch.seq_lens_host = NULL;
        f->batch.last_page_len = l->last;
    }
}

TEST(test_page_lists)
{
    static const char *const backends[] = {"recording", "recording_narrow"};
    for (size_t i = 0; i < 4 * (sizeof shapes / sizeof *shapes); i++) {
        const struct shape *shape = &shapes[i / 4];
        const bool last_pages = i & 1 && shape->layer.kind != ATTN_LAYER_CROSS;
        OWNED(fixture_finish) struct fixture plain, paged;
        OWNED(memory_end) struct lists *l = calloc(2, sizeof *l);
        init(&plain, "recording", shape, false);
        init(&paged, backends[i >> 1 & 1], shape, true);
        as_lists(&paged, &l[0], last_pages);
        fixture_step(&plain);
        fixture_step(&paged);
        same_outputs(&plain, &paged);
        move_a_block(&paged); /* new lists for the plan that stands */
        memset(&l[0].indices, 0x7f, sizeof l[0].indices);
        as_lists(&paged, &l[1], last_pages);
        CHECK(&paged, paged.api->plan_update_block_table(paged.plan, paged.plan, &paged.batch, NULL,
                                                         &paged.error));
        memset(paged.out, 0xff, (size_t)paged.batch.num_tokens * sizeof *paged.out);
        CHECK(&paged, fixture_run(&paged));
        same_outputs(&plain, &paged);
    }
}

static void update(struct fixture *f, attn_plan *source, const struct attn_batch *tables)
{
    CHECK(f, f->api->plan_update_block_table(f->plan, source, tables, NULL, &f->error));
}

static void forget_calls(void)
{
    recorded_by_core()->schedules = recorded_by_core()->table_updates = 0;
}

/* Schedules and table updates that the recording backend has seen since the last call. */
static void check_calls(int32_t schedules, int32_t table_updates)
{
    assert_int_equal(recorded_by_core()->schedules, schedules);
    assert_int_equal(recorded_by_core()->table_updates, table_updates);
    forget_calls();
}

/* Last page lengths that come with the lists are new lengths: schedules are made of them. */
TEST(test_lists_bring_lengths)
{
    OWNED(fixture_finish) struct fixture f;
    OWNED(memory_end) struct lists *l = calloc(1, sizeof *l);
    init(&f, "recording", &shapes[0], true);
    const struct attn_batch table = f.batch;
    as_lists(&f, l, true);
    fixture_step(&f);
    forget_calls();
    l->last[3]--;
    f.slots[f.batch.num_tokens - 1] = -1;
    update(&f, f.plan, &f.batch);
    check_calls(1, 0);
    as_lists(&f, l, false); /* the same lists next to lengths that stay */
    f.batch.seq_lens = table.seq_lens;
    f.batch.seq_lens_host = table.seq_lens_host;
    f.batch.last_page_len = NULL;
    fixture_step(&f);
    check_calls(1, 0);
    update(&f, f.plan, &f.batch);
    check_calls(0, 1);
}

/* An allocator that gives the memory that was released last, if its size is asked for. */
static struct {
    void *memory;
    size_t size;
} last_released;

static void *allocate(void *user, size_t size, size_t alignment)
{
    void *memory = last_released.memory;
    if (memory != NULL && last_released.size == size) {
        last_released.memory = NULL;
        return memory;
    }
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void release(void *user, void *memory, size_t size)
{
    if (memory != NULL) {
        free(last_released.memory);
        last_released.memory = memory;
        last_released.size = size;
    }
}

static attn_plan *source_of(struct fixture *f, void **workspace)
{
    attn_plan *source;
    CHECK(f,
          client_plan(f->api, f->model, 0, CLIENT_LIMITS(MAX_REQS, MAX_TOKENS, MAX_BLOCKS * BLOCK),
                      &source, workspace, &f->error));
    CHECK(f, f->api->plan_batch(source, &f->batch, NULL, &f->error));
    return source;
}

/* A source at the address of one that is gone, planned as often: no schedule of the old one holds.
 */
TEST(test_source_at_the_same_address)
{
    const struct attn_host host = SIZED(attn_host, .allocate = allocate, .release = release);
    struct fixture f;
    void *workspace;
    fixture_init(&f, "recording", &shapes[0].layer, queries, lens, FEW, 0, &host, true);
    attn_plan *source = source_of(&f, &workspace);
    const uintptr_t address = (uintptr_t)source;
    forget_calls();
    update(&f, source, &f.batch);
    check_calls(1, 0);
    update(&f, source, &f.batch);
    check_calls(0, 1);
    f.api->plan_destroy(source);
    free(workspace);
    source = source_of(&f, &workspace);
    assert_true((uintptr_t)source == address);
    check_calls(1, 0);
    update(&f, source, &f.batch);
    check_calls(1, 0);
    f.api->plan_destroy(source);
    free(workspace);
    fixture_finish(&f);
    free(last_released.memory);
}

#define LISTS_REFUSED(field, change)                                                               \
    WITH(f.batch, , WITH(*l, change, fixture_refuse_plan(&f, field)))

TEST(test_wrong_lists)
{
    OWNED(fixture_finish) struct fixture f, without;
    OWNED(memory_end) struct lists *l = calloc(1, sizeof *l);
    init(&f, "recording_narrow", &shapes[0], true);
    init(&without, "recording_narrow", &shapes[0], false);
    as_lists(&without, l, false);
    fixture_refuse_plan(&without, "page_indices"); /* the layer does not say that they come */
    as_lists(&f, l, true);
    struct attn_batch *b = &f.batch;
    LISTS_REFUSED("page_indices", b->block_table = f.block_table); /* one of the two */
    LISTS_REFUSED("page_indices", b->page_start_loc = NULL);
    LISTS_REFUSED("last_page_len", b->seq_lens = f.seq_lens);
    LISTS_REFUSED("page_start_loc", b->num_pages--);
    LISTS_REFUSED("last_page_len", l->last[1] = BLOCK + 1);
    LISTS_REFUSED("last_page_len", l->last[1] = 0);
    LISTS_REFUSED("page_start_loc", l->start[2] = l->start[1] - 1);
    /* validated in the engine's blocks */
    LISTS_REFUSED("block_table", l->indices[2] = (int32_t)f.num_blocks);
    f.batch.last_page_len = NULL;
    f.batch.seq_lens = f.batch.seq_lens_host = f.seq_lens;
    f.seq_lens[1] = 6 * BLOCK; /* in five pages */
    fixture_refuse_plan(&f, "page_start_loc");
    f.batch.seq_lens_host = NULL; /* and where the device alone knows the lengths */
    fixture_refuse_plan(&f, "page_start_loc");
}

/* What the host knows of the lists is read without validation, too. */
TEST(test_short_lists_of_trusted_batches)
{
    struct attn_layer_desc layer = shapes[0].layer;
    OWNED(fixture_finish) struct fixture f;
    OWNED(memory_end) struct lists *l = calloc(1, sizeof *l);
    layer.needs_page_lists = 1;
    fixture_init(&f, "recording_narrow", &layer, queries, lens, FEW, 0, NULL, false);
    as_lists(&f, l, false);
    f.seq_lens[1] = 6 * BLOCK; /* in five pages */
    fixture_refuse_plan(&f, "page_start_loc");
}

/* Limits that leave the size of a made table open. */
TEST(test_open_limits)
{
    OWNED(fixture_finish) struct fixture f;
    struct attn_limits limits = SIZED(attn_limits, .max_num_reqs = 2, .max_num_tokens = 8);
    const struct attn_plan_options plan = SIZED(attn_plan_options, .limits = &limits);
    attn_plan *made;
    init(&f, "recording_narrow", &shapes[0], false);
    REFUSED_AS(ATTN_ERROR_LIMIT, &f.error, "max_seq_len",
               f.api->plan_create(f.model, 0, &plan, &made, &f.error));
    limits.max_blocks_per_req = 3;
    CHECK(&f, f.api->plan_create(f.model, 0, &plan, &made, &f.error));
    f.api->plan_destroy(made);
}
