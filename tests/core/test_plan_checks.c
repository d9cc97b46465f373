/* SPDX-License-Identifier: Apache-2.0 */
/* core/step: what a batch must hold and what a run checks. */
#include "support/client.h"
#include "plan_fixture.h"

#include "bind/address_check.h"

#define BATCH_REFUSED(status, field, count, change)                                                \
    do {                                                                                           \
        set_batch(b, queries, count);                                                              \
        change;                                                                                    \
        REFUSED_AS(status, &b->error, field, step(b));                                             \
    } while (0)
#define BATCH_INVALID(field, change) BATCH_REFUSED(ATTN_ERROR_INVALID_ARGUMENT, field, 2, change)

TEST(wrong_batches_are_refused)
{
    static const int32_t queries[] = {1, 5};
    const struct attn_ext unknown = {0xfff, 0, sizeof unknown, NULL};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), false);
    BATCH_INVALID("query_start_loc", b->start[1] = 9);
    BATCH_INVALID("query_start_loc", b->batch.query_start_loc_host = NULL);
    BATCH_INVALID("seq_lens", b->lens[1] = 4);
    BATCH_INVALID("seq_lens", b->lens[0] = -3);
    BATCH_INVALID("block_table_rows", b->batch.block_table_rows = 1);
    BATCH_INVALID("block_table_stride", b->batch.block_table_stride = 0);
    BATCH_REFUSED(ATTN_ERROR_INVALID_ARGUMENT, "block_table_stride", 1, /* one row */
                  b->batch.block_table_stride = 0);
    BATCH_INVALID("block_table", b->batch.block_table = NULL);
    BATCH_INVALID("slot_mapping", b->batch.slot_mapping = NULL);
    BATCH_REFUSED(ATTN_ERROR_LIMIT, "num_reqs", 2, b->batch.num_reqs = 9);
    BATCH_REFUSED(ATTN_ERROR_LIMIT, "num_tokens", 2, b->batch.num_tokens = 1 << 20);
    BATCH_REFUSED(ATTN_ERROR_EXTENSION, "attn_batch", 2, b->batch.next = &unknown);
    BATCH_REFUSED(ATTN_ERROR_STRUCT_SIZE, "attn_batch", 2, b->batch.struct_size = 8);
    BATCH_INVALID("mode", b->batch.mode = 77);
    BATCH_INVALID("max_query_len", b->batch.max_query_len = 4);
    BATCH_INVALID("max_seq_len", b->batch.max_seq_len = 4);
    BATCH_INVALID("spans", b->batch.spans = b->lens); /* the layer has none */
    BATCH_INVALID("flags", b->batch.flags = ATTN_BATCH_HOST_BOUNDS);
    BATCH_INVALID("num_actual_tokens", b->batch.num_actual_tokens = 7);
    assert_int_equal(fake_calls.attends, 0);
    assert_int_equal(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error),
                     ATTN_ERROR_ORDER);
}

static void quantize_queries(struct fixture *fixture)
{
    struct attn_backend_caps *caps = &fixture->backends[0].caps;
    caps->features |= ATTN_FEATURE_QUANTIZED_QUERY;
    caps->q_dtypes = UINT64_C(1) << ATTN_DTYPE_FP8_E4M3;
}

/* A query of a dtype of its own; values of another head size than the keys. */
TEST(tensors_have_their_own_forms)
{
    static const int32_t queries[] = {5};
    struct attn_layer_desc quantized = fake_layer("a"), narrow = quantized;
    quantized.q_dtype = ATTN_DTYPE_FP8_E4M3;
    quantized.q_scale_form = ATTN_SCALE_PER_TENSOR;
    narrow.head_size = 192;
    narrow.head_size_v = 128;
    struct planned *b = planned_of(quantized, false, quantize_queries);
    set_batch(b, queries, 1);
    INVALID(&b->error, "q", step(b));
    assert_non_null(strstr(b->error.message, "] float8_e4m3fn, the last"));
    planned_destroy(b);
    b = planned_create(narrow, false);
    set_batch(b, queries, 1);
    b->q.shape[2] = b->k.shape[2] = b->v.shape[2] = 192;
    b->out.shape[2] = 128;
    INVALID(&b->error, "v", step(b));
    b->v.shape[2] = 128;
    assert_ok(step(b));
    planned_destroy(b);
}

/* One fault of a tensor, `how` from 0 on; false: there are no more. */
static bool spoil(struct attn_tensor *t, int32_t how)
{
    static int64_t strides[] = {4 * FAKE_HEAD_SIZE, FAKE_HEAD_SIZE, 2};
    t->ndim = how == 0 ? 2 : t->ndim;
    t->dtype.code = how == 1 ? ATTN_CODE_INT : t->dtype.code;
    t->dtype.bits = how == 2 ? 16 : t->dtype.bits;
    t->device.type = how == 3 ? ATTN_DEVICE_CUDA : t->device.type;
    t->shape[0] = how == 5 ? 4 : t->shape[0]; /* one less than 5 */
    t->shape[1] -= how == 6;
    t->shape[2] -= how == 7;
    t->shape = how == 4 ? NULL : t->shape;
    t->strides = how == 8 ? strides : t->strides;
    t->data = how == 9 ? NULL : t->data;
    return how < 10;
}

/* Each fault of each tensor, by its name, where one run of many is fast: over keys that are there,
 * and with keys that are written. The others have no strides, or some. */
TEST(every_fault_of_every_tensor_is_named)
{
    static const char *const names[] = {"q", "k", "v", "out"};
    static const int32_t queries[] = {5};
    static int64_t dense[4][3];
    struct planned *b = planned_create(fake_layer("a"), false);
    struct attn_tensor *const tensors[] = {&b->q, &b->k, &b->v, &b->out};
    const struct attn_tensor **const fields[] = {&b->io.q, &b->io.k, &b->io.v, &b->io.out};
    for (int32_t i = 0; i < 4 * 4; i++) {
        const int32_t t = i / 4;
        const bool writes = i & 1, strided = i & 2;
        set_batch(b, queries, 1);
        b->batch.num_slots = writes ? b->batch.num_slots : 0;
        b->io.flags = writes ? 0 : ATTN_RUN_NO_WRITE;
        for (int32_t j = 0; j < 4; j++) {
            const int64_t *shape = tensors[j]->shape;
            dense[j][0] = shape[1] * shape[2], dense[j][1] = shape[2], dense[j][2] = 1;
            tensors[j]->strides = strided ? dense[j] : NULL;
        }
        if (!writes && (t == 1 || t == 2)) {
            continue;
        }
        const struct attn_tensor right = *tensors[t];
        int64_t shape[3] = {right.shape[0], right.shape[1], right.shape[2]};
        assert_ok(step(b));
        fake_calls.attends = fake_calls.writes = 0;
        *fields[t] = NULL;
        assert_int_equal(step(b), ATTN_ERROR_INVALID_ARGUMENT);
        *fields[t] = tensors[t];
        assert_string_equal(b->error.field, names[t]);
        for (int32_t how = 0; spoil(tensors[t], how); how++) {
            INVALID(&b->error, names[t], step(b));
            *tensors[t] = right;
            memcpy(right.shape, shape, sizeof shape);
        }
        assert_int_equal(fake_calls.attends + fake_calls.writes, 0);
    }
    planned_destroy(b);
}

TEST(encoder_needs_a_row_per_key)
{
    static const int32_t queries[] = {3, 2};
    struct attn_layer_desc layer = fake_layer("a");
    layer.kind = ATTN_LAYER_ENCODER;
    layer.causal = layer.block_size = 0;
    OWNED(planned_end) struct planned *b = planned_create(layer, false);
    set_batch(b, queries, 2);
    b->k.shape[0] = 4;
    INVALID(&b->error, "k", step(b));
    b->k.shape[0] = 5;
    assert_ok(step(b));
    b->batch.key_start_loc = b->batch.key_start_loc_host = (const int32_t[]){0, 4, 6};
    INVALID(&b->error, "k", step(b));
    b->k.shape[0] = 6;
    assert_ok(step(b));
    assert_int_equal(fake_calls.writes, 0);
}

TEST(validation_names_request_and_index)
{
    static const int32_t queries[] = {1, 20};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), true);
    set_batch(b, queries, 2); /* entries past the end are -99 and never looked at */
    assert_ok(step(b));
    b->table[4] = BLOCKS;
    INVALID(&b->error, "block_table", step(b));
    assert_non_null(strstr(b->error.message, "request 1, position 16 (entry 1): block 8"));
    set_batch(b, queries, 2);
    b->slots[3] = BLOCKS * FAKE_BLOCK_SIZE;
    INVALID(&b->error, "slot_mapping", step(b));
    assert_non_null(strstr(b->error.message, "request 1, token 3: slot 128"));
    set_batch(b, queries, 2);
    b->data[0][(2 * 4 + 1) * FAKE_HEAD_SIZE + 5] = NAN;
    assert_int_equal(step(b), ATTN_ERROR_NAN);
    assert_non_null(strstr(b->error.message, "q[2, 1, 5]"));
}

/* The first NaN of each dtype, after its last number. */
TEST(validation_knows_each_dtypes_nan)
{
    static const struct {
        struct attn_dtype dtype;
        uint32_t number, nan;
    } cases[] = {{{ATTN_CODE_FLOAT, 16, 1}, 0x7c00, 0x7c01},
                 {{ATTN_CODE_BFLOAT, 16, 1}, 0x7f80, 0x7f81},
                 {{ATTN_CODE_FLOAT, 32, 1}, 0x7f800000, 0x7f800001},
                 {{ATTN_CODE_FLOAT8_E4M3FN, 8, 1}, 0x7e, 0x7f},
                 {{ATTN_CODE_FLOAT8_E5M2, 8, 1}, 0x7c, 0x7d},
                 {{ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1}, 0x7f, 0x80}};
    static const int32_t queries[] = {1};
    int64_t shape[] = {1, 1};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), true);
    set_batch(b, queries, 1);
    assert_ok(step(b));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t bits = cases[i].number;
        const struct attn_tensor one = {&bits, {ATTN_DEVICE_CPU, 0}, 2, cases[i].dtype, shape, NULL,
                                        0};
        assert_ok(validate_tensor(b->plan, &one, "one", &b->error));
        bits = cases[i].nan;
        assert_int_equal(validate_tensor(b->plan, &one, "one", &b->error), ATTN_ERROR_NAN);
    }
}

static attn_status late;
static int32_t waits;

static attn_status wait_for_stream(const struct attn_stream_args *args, struct attn_error *error)
{
    waits++;
    return late;
}

/* Validation waits for the stream, and finds what failed there, but never while it is captured. */
TEST(validation_waits_for_the_stream)
{
    static const int32_t queries[] = {1, 1};
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), true);
    b->model->instances[0].kernels.synchronize = wait_for_stream;
    remake_plan(b, CLIENT_PLAN(1, 8, TOKENS, 0));
    set_batch(b, queries, 2);
    late = ATTN_OK, waits = 0;
    assert_ok(step(b));
    assert_int_equal(waits, 2);
    assert_ok(plan_graph(b->plan, ATTN_PLAN_CAPTURE, &b->batch, NULL, &b->error));
    assert_ok(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error));
    assert_int_equal(waits, 2);
    assert_ok(plan_batch(b->plan, &b->batch, NULL, &b->error));
    late = ATTN_ERROR_DEVICE;
    assert_int_equal(plan_run(b->plan, model_layer(b->model, 0), &b->io, &b->error), late);
    assert_int_equal(plan_batch(b->plan, &b->batch, NULL, &b->error), late);
}

static const int32_t elsewhere[1]; /* what the driver calls a GPU's */

static attn_status find_owner(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error)
{
    *device =
        (struct attn_device){args->memory == elsewhere ? ATTN_DEVICE_CUDA : ATTN_DEVICE_CPU, 0};
    return ATTN_OK;
}

#define TABLE(field) offsetof(struct attn_batch_table, field)

/* What a batch's tables are asked. */
static attn_status check_table(struct planned *b, const struct attn_batch_table *table)
{
    return address_check_all(b->plan->model, table, ABI_BATCH_TABLE, NULL, "tables", true,
                             &b->error);
}

/* Each array of a further table, and what extensions of a run point at. */
TEST(validation_asks_where_arrays_lie)
{
    static const size_t fields[] = {TABLE(block_table),         TABLE(block_table_row),
                                    TABLE(slot_mapping),        TABLE(seq_lens),
                                    TABLE(page_indices),        TABLE(page_start_loc),
                                    TABLE(last_page_len),       TABLE(seq_lens_host),
                                    TABLE(page_start_loc_host), TABLE(last_page_len_host)};
    const struct attn_io_mla mla =
        EXTENSION(attn_io_mla, ATTN_EXT_IO_MLA, NULL, .topk_indices = elsewhere);
    const struct attn_io_output_quant quant =
        EXTENSION(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, NULL,
                  .scale = (const float *)(const void *)elsewhere);
    const struct attn_io_rope rope =
        EXTENSION(attn_io_rope, ATTN_EXT_IO_ROPE, NULL,
                  .positions = (const int64_t *)(const void *)elsewhere);
    const struct attn_io_index_lists lists = EXTENSION(attn_io_index_lists,
                                                       ATTN_EXT_DRAFT_IO_INDEX_LISTS, NULL,
                                                       .indices = elsewhere),
                                     lengths = {.ext = lists.ext, .lengths = elsewhere};
    const struct {
        const char *name;
        const struct attn_ext *ext;
    } runs[] = {{"topk_indices", &mla.ext},
                {"scale", &quant.ext},
                {"positions", &rope.ext},
                {"indices", &lists.ext},
                {"lengths", &lengths.ext}};
    const void *address = elsewhere;
    OWNED(planned_end) struct planned *b = planned_create(fake_layer("a"), true);
    b->model->asked = &b->model->instances[0];
    b->model->instances[0].kernels.memory_device = find_owner;
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        struct attn_batch_table table = {.num_slots = 0};
        assert_ok(check_table(b, &table));
        memcpy((char *)&table + fields[i], &address, sizeof address);
        INVALID(&b->error, "tables", check_table(b, &table));
    }
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        b->io.next = runs[i].ext;
        INVALID(&b->error, runs[i].name,
                address_check_all(b->plan->model, &b->io, ABI_STEP_IO, b->io.next, NULL,
                                  b->plan->validate, &b->error));
    }
}
