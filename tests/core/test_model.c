/* SPDX-License-Identifier: Apache-2.0 */
/* core/bind: what a model is made of: its backends, what is kept and prepared of its layers, and
 * where memory may lie and comes from. */
#include "support/client.h"
#include "bind_case.h"

#include "bind/bound.h"
#include "bind/address_check.h"

CASE(backends_are_created_once)
{
    const struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    fake_init(&fixture);
    attn_model *model = fake_model_of(&fixture, layers, 2);
    assert_int_equal(fake_calls.creates, 1);
    model_destroy(model);
    assert_int_equal(fake_calls.destroys, 1);
}

/* A backend whose table is refused is destroyed. */
TEST(unfit_kernels_are_refused)
{
    const struct attn_layer_desc layer = fake_layer("a");
    for (int32_t i = 0; i < 2; i++) {
        struct attn_error error = ATTN_ERROR_INIT;
        OWNED(fixture_finish) struct fixture fixture;
        fake_init(&fixture);
        if (i == 0) {
            fake_kernels.struct_size = 8;
        } else {
            fake_kernels.release = NULL; /* releases what is prepared */
        }
        assert_null(fake_model(&fixture, &layer, 1, &error));
        assert_int_equal(error.status, i == 0 ? ATTN_ERROR_STRUCT_SIZE : ATTN_ERROR_PLUGIN);
        assert_string_equal(error.field, i == 0 ? "attn_kernels" : "release");
        assert_int_equal(fake_calls.creates, 1);
        assert_int_equal(fake_calls.destroys, 1);
    }
}

/* A backend gets its own options, and not those of one whose name begins with its name. */
CASE(options_go_to_their_backend)
{
    const char *list[] = {"fork.a=1", "fake.b=2", "fake.c=3"};
    const struct attn_model_options options =
        SIZED(attn_model_options, .backend_options = list, .num_backend_options = 3);
    const struct attn_layer_desc layer = fake_layer("a");
    attn_assignment *assignment;
    attn_model *model;
    fake_init(&fixture);
    fixture_add(&fixture, "fork", "", 5);
    assert_ok(fixture_select(&fixture, "fake", &layer, 1, &assignment, &error));
    assert_ok(model_create(&fixture.runtime, assignment, &options, &model, &error));
    assert_int_equal(fake_calls.num_options, 2);
    model_destroy(model);
    list[0] = "fort.a=1"; /* no backend has this name */
    INVALID(&error, "backend_options",
            model_create(&fixture.runtime, assignment, &options, &model, &error));
    list[0] = "fake.a"; /* without a value */
    INVALID(&error, "backend_options",
            model_create(&fixture.runtime, assignment, &options, &model, &error));
    assignment_destroy(assignment);
}

TEST(assignments_are_whole_and_of_their_runtime)
{
    struct attn_layer_desc layer = fake_layer("a");
    const struct attn_layer_desc *const layers[] = {&layer};
    const struct attn_select_options keep =
        SIZED(attn_select_options, .flags = ATTN_SELECT_KEEP_UNSERVED);
    struct attn_error error = ATTN_ERROR_INIT;
    OWNED(fixture_finish) struct fixture fixture, other;
    attn_assignment *assignment;
    attn_model *model;
    fake_init(&fixture);
    fixture_init(&other);
    assert_ok(fixture_select(&fixture, "", &layer, 1, &assignment, &error));
    INVALID(&error, "assignment", model_create(&other.runtime, assignment, NULL, &model, &error));
    assignment_destroy(assignment);
    layer.soft_cap = 50; /* which the fake has not */
    assert_ok(select_layers(&fixture.runtime, &keep, layers, 1, &assignment, &error));
    REFUSED_AS(ATTN_ERROR_ORDER, &error, "assignment",
               model_create(&fixture.runtime, assignment, NULL, &model, &error));
    assignment_destroy(assignment);
}

/* Sinks count once, and a window is of keys that have positions. */
CASE(parts_leave_terms_to_the_layer_itself)
{
    static const float sinks[4];
    const struct attn_layer_params params = SIZED(attn_layer_params, .sinks = sinks);
    struct attn_layer_desc layer = fake_layer("a");
    fake_init(&fixture)->terms |= ATTN_TERM_SINKS;
    layer.has_window = layer.has_sinks = 1;
    layer.window_left = 7;
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, &layer, 1);
    attn_layer *bound = model_layer(model, 0);
    assert_ok(layer_bind_params(bound, &params, &error));
    for (int32_t part = 0; part < PART_COUNT; part++) {
        const bool itself = part == PART_MAIN;
        assert_ptr_equal(bound->part_params[part].sinks, itself ? sinks : NULL);
        assert_int_equal(bound->parts[part].has_sinks, itself);
        assert_int_equal(bound->parts[part].has_window, itself);
        assert_int_equal(bound->parts[part].window_left, itself ? 7 : -1);
    }
}

/* Every tensor of the parameters, with the strides that it has or would have. */
TEST(tensors_are_kept)
{
    static float numbers[2 * 3 * 4];
    static const int64_t dense_strides[] = {12, 4, 1};
    static int64_t shape[] = {2, 3, 4}, apart[] = {40, 8, 1};
    const struct attn_device cpu = {ATTN_DEVICE_CPU, 0};
    const struct attn_dtype f32 = {ATTN_CODE_FLOAT, 32, 1};
    const struct attn_tensor dense = {numbers, cpu, 3, f32, shape, NULL, 0},
                             strided = {numbers, cpu, 3, f32, shape, apart, 0};
    for (int32_t i = 0; i < 2; i++) {
        const struct attn_tensor *given = i == 0 ? &dense : &strided;
        const struct attn_recurrent_weights recurrent =
            EXTENSION(attn_recurrent_weights, ATTN_EXT_RECURRENT_WEIGHTS, NULL,
                      .conv_weight = given, .conv_bias = given);
        const struct attn_mla_weights mla =
            EXTENSION(attn_mla_weights, ATTN_EXT_MLA_WEIGHTS, &recurrent.ext, .kv_b_proj = given,
                      .w_uk = given, .w_uv = given, .w_uk_scale = given, .w_uv_scale = given);
        const struct attn_layer_params params =
            SIZED(attn_layer_params, .next = &mla.ext, .sink_k = given, .sink_v = given);
        static struct layer_params_copy kept;
        assert_ok(layer_params_copy_take(&kept, &params, NULL));
        const struct attn_mla_weights *own = ext_find(kept.params.next, ATTN_EXT_MLA_WEIGHTS);
        const struct attn_recurrent_weights *gdn =
            ext_find(kept.params.next, ATTN_EXT_RECURRENT_WEIGHTS);
        const struct attn_tensor *const all[] = {
            kept.params.sink_k, kept.params.sink_v, own->kv_b_proj,   own->w_uk,     own->w_uv,
            own->w_uk_scale,    own->w_uv_scale,    gdn->conv_weight, gdn->conv_bias};
        for (size_t t = 0; t < sizeof all / sizeof *all; t++) {
            assert_ptr_not_equal(all[t], given);
            assert_ptr_not_equal(all[t]->shape, shape);
            assert_memory_equal(all[t]->shape, shape, sizeof shape);
            assert_memory_equal(all[t]->strides, i == 0 ? dense_strides : apart, sizeof apart);
        }
    }
}

/* What kernels made of a layer lasts until its parameters, or the cache that it reads, are bound
 * again. */
CASE(layers_are_prepared_anew)
{
    enum { NOTHING, PARAMS, CACHE };
    static _Alignas(256) uint8_t cache[FAKE_BLOCK_SIZE * 2 * 2 * FAKE_HEAD_SIZE * 4];
    static const int32_t layers_anew[] = {[NOTHING] = 0, [PARAMS] = 1, [CACHE] = 2};
    const struct attn_layer_params params = {.struct_size = sizeof params};
    const struct attn_plan_options *options = CLIENT_LIMITS(1, 1, 0);
    struct attn_layer_desc layers[] = {fake_layer("a"), fake_layer("b")};
    struct attn_kv_view k = {.struct_size = sizeof k}, v = {.struct_size = sizeof v};
    attn_plan *plan;
    fake_init(&fixture);
    layers[1].kv_sharing_target = "a";
    OWNED(model_end) attn_model *model = fake_model_of(&fixture, layers, 2);
    attn_layer *layer = model_layer(model, 0);
    assert_ok(layer_kv_views(layer, cache, 1, &k, &v, &error));
    assert_ok(bind_kv(layer, &k, &v, &error));
    assert_ok(plan_create(model, 0, options, &plan, &error));
    plan_destroy(plan);
    assert_int_equal(fake_calls.prepares, 2 * NUM_PHASES);
    for (int32_t anew = NOTHING; anew <= CACHE; anew++) {
        fake_reset();
        if (anew == PARAMS) {
            assert_ok(layer_bind_params(layer, &params, &error));
        }
        if (anew == CACHE) {
            assert_ok(bind_kv(layer, &k, &v, &error));
        }
        assert_ok(plan_create(model, 0, options, &plan, &error));
        plan_destroy(plan);
        assert_int_equal(fake_calls.releases, layers_anew[anew] * NUM_PHASES);
        assert_int_equal(fake_calls.prepares, layers_anew[anew] * NUM_PHASES);
    }
}

TEST(memory_that_a_device_reads)
{
    enum { CPU = ATTN_DEVICE_CPU, CUDA = ATTN_DEVICE_CUDA, ROCM = ATTN_DEVICE_ROCM };
    static const struct {
        struct attn_device own, memory;
        bool reads;
    } cases[] = {{{CPU, 0}, {CPU, 0}, true},
                 {{CPU, 0}, {CUDA, 0}, false},
                 {{CPU, 0}, {ATTN_DEVICE_CUDA_HOST, 0}, true},
                 {{CPU, 0}, {ATTN_DEVICE_CUDA_MANAGED, 0}, true},
                 {{CPU, 0}, {ATTN_DEVICE_ROCM_HOST, 0}, true},
                 {{CUDA, 0}, {CPU, 0}, false},
                 {{CUDA, 0}, {CUDA, 0}, true},
                 {{CUDA, 0}, {CUDA, 1}, false},
                 {{CUDA, 0}, {ATTN_DEVICE_CUDA_HOST, 0}, true},
                 {{CUDA, 0}, {ATTN_DEVICE_CUDA_MANAGED, 0}, true},
                 {{CUDA, 0}, {ATTN_DEVICE_ROCM_HOST, 0}, false},
                 {{ROCM, 0}, {ATTN_DEVICE_ROCM_HOST, 0}, true},
                 {{ROCM, 0}, {ATTN_DEVICE_CUDA_HOST, 0}, false}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct attn_model model = {.device = cases[i].own};
        struct attn_error error = ATTN_ERROR_INIT;
        assert_int_equal(address_check_device(&model, cases[i].memory, "memory", &error),
                         cases[i].reads ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
    }
}

static float elsewhere[1]; /* what the driver calls a GPU's */

static attn_status find_owner(const struct attn_memory_args *args, struct attn_device *device,
                              struct attn_error *error)
{
    *device =
        (struct attn_device){args->memory == elsewhere ? ATTN_DEVICE_CUDA : ATTN_DEVICE_CPU, 0};
    return ATTN_OK;
}

/* The driver is asked of a view's rows and of its scales. */
TEST(views_lie_where_they_are_read)
{
    const struct instance asked = {.kernels = {.memory_device = find_owner}};
    const struct attn_model model = {.device = {ATTN_DEVICE_CPU, 0}, .asked = &asked};
    struct attn_error error = ATTN_ERROR_INIT;
    float here[1];
    for (int32_t i = 0; i < 3; i++) {
        const struct attn_kv_view view = {.data = i == 1 ? elsewhere : here,
                                          .scale = i == 2 ? elsewhere : here};
        assert_int_equal(address_check_view(&model, &view, "k", &error),
                         i == 0 ? ATTN_OK : ATTN_ERROR_INVALID_ARGUMENT);
    }
}

static int32_t asked_kind;

static attn_status hand_out(const struct attn_memory_args *args, void **memory,
                            struct attn_error *error)
{
    asked_kind = args->kind;
    *memory = args->bytes > 1 ? elsewhere : NULL;
    return ATTN_OK;
}

static attn_status take_back(const struct attn_memory_args *args, struct attn_error *error)
{
    return ATTN_OK;
}

/* A device's memory is of the kind that was asked for, and there is some. */
CASE(memory_comes_from_the_device)
{
    attn_open_device *opened;
    void *memory;
    fake_init(&fixture)->device.type = ATTN_DEVICE_CUDA;
    fixture.devices[0].device.type = ATTN_DEVICE_CUDA;
    fake_kernels.allocate_memory = hand_out;
    fake_kernels.free_memory = take_back;
    assert_ok(device_open(&fixture.runtime, fixture.devices[0].device, &opened, &error));
    for (int32_t kind = ATTN_MEMORY_DEVICE; kind <= ATTN_MEMORY_HOST; kind++) {
        assert_ok(device_allocate(opened, kind, 8, &memory, &error));
        assert_int_equal(asked_kind, kind);
        assert_ptr_equal(memory, elsewhere);
    }
    REFUSED_AS(ATTN_ERROR_PLUGIN, &error, "allocate_memory",
               device_allocate(opened, ATTN_MEMORY_DEVICE, 1, &memory, &error));
    device_close(opened);
}

/* The host's memory: rows with gaps between them, which do not overlap. */
CASE(rows_are_filled)
{
    char bytes[] = "..........";
    struct attn_fill_args fill = SIZED(attn_fill_args, .destination = bytes, .row_bytes = 3,
                                       .stride = 5, .rows = 2, .value = 'x');
    attn_open_device *opened;
    fake_init(&fixture);
    assert_ok(
        device_open(&fixture.runtime, (struct attn_device){ATTN_DEVICE_CPU, 0}, &opened, &error));
    assert_ok(device_fill(opened, &fill, &error));
    assert_string_equal(bytes, "xxx..xxx..");
    fill.stride = 2;
    INVALID(&error, "stride", device_fill(opened, &fill, &error));
    device_close(opened);
}
