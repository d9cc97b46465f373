/* SPDX-License-Identifier: Apache-2.0 */
/* A GPU of compute capability 9.0 or later that runs kernels of sm_80's code, which neither copy in
 * bulk nor wait for earlier kernels: what the host then asks of the attend and of the prefill. No
 * GPU is needed: their launches are the test's. */
#include "cuda_flash/decode/sm80_attend.h"
#include "cuda_flash/prefill/sm80_prefill.h"
#include "gpu/cuda/code.h"
#include "gpu/host/backend.h"
#include "gpu/host/schedule.h"
#include "gpu/lists.h"
#include "support/test.h"

extern const struct gpu_matrix_kernels sm80_matrix;
extern const struct gpu_prefill sm80_prefill;

const struct gpu_vendor gpu_vendor = {.name = "test"};

static bool is_sm90;
static struct sm80_params launched;
static struct sm80_prefill_params prefilled;

bool cuda_runs_sm90(const struct gpu_device *device)
{
    return is_sm90;
}

const char *sm80_launch(const struct gpu_device *device, int32_t kind,
                        const struct sm80_params *params, void *stream)
{
    launched = *params;
    return NULL;
}

const char *sm80_prefill_launch(const struct gpu_device *device, int32_t kind,
                                const struct sm80_prefill_params *params, void *stream)
{
    prefilled = *params;
    return NULL;
}

bool tensor_map_encode(const struct gpu_device *device, const void *data,
                       const struct map_shape *shape, struct tensor_map *map)
{
    return true;
}

/* An H200, and one request of 64 keys in one page of bf16, nvfp4 or TurboQuant. */
struct call {
    struct attn_instance instance;
    struct attn_prepared prepared;
    struct schedule_host plan;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view view;
    struct attn_attend_args args;
    struct gpu_params p;
    char memory[64] __attribute__((aligned(64)));
};

static void make_call(struct call *c, int32_t form, int32_t form_v, int32_t slot_bytes)
{
    *c = (struct call){
        .instance.device = {.major = 9,
                            .num_sms = 132,
                            .lanes = 32,
                            .smem_of_sm = 228 << 10,
                            .smem_of_cta = 227 << 10},
        .prepared = {.num_kv_heads = 1, .group = 8, .padded_size = 128, .few_rows = 32},
        .plan = {.tile_rows = 16, .num_reqs = 1, .request_rows = 8},
        .layer = {.dtype = ATTN_DTYPE_BF16, .num_q_heads = 8, .num_kv_heads = 1},
        .view = {.num_blocks = 1, .block_size = 64},
        .p = {
            .p_dtype = -1,
            .q = {c->memory, 2048, 256, ATTN_DTYPE_BF16},
            .out = {c->memory, 2048, 256, ATTN_DTYPE_BF16},
            .schedule = {.tile = form == GPU_ROW_NUMBERS ? 64 : 128, .tile_rows = 16, .ctas = 132},
            .problem = {.num_kv_heads = 1,
                        .group = 8,
                        .head_size = 128,
                        .head_size_v = 128,
                        .paged = 1,
                        .block_size = 64}}};
    c->p.k = (struct gpu_cache){.data = c->memory,
                                .block = 64 * slot_bytes,
                                .slot = slot_bytes,
                                .head = 64 * slot_bytes,
                                .head_size = 128,
                                .form = form,
                                .bits = 4};
    c->p.k.dtype = form == GPU_ROW_NUMBERS ? ATTN_DTYPE_BF16 : ATTN_DTYPE_INT8;
    c->p.k.row_scale = c->p.k.data + 64;
    c->p.k.row_scale_block = c->p.k.block;
    c->p.k.row_scale_slot = c->p.k.slot;
    c->p.k.row_scale_head = c->p.k.head;
    c->p.v = c->p.k;
    c->p.v.form = form_v;
    c->args = (struct attn_attend_args){.instance = &c->instance,
                                        .prepared = &c->prepared,
                                        .layer = &c->layer,
                                        .params = &c->params,
                                        .batch = &c->batch,
                                        .k_cache = &c->view,
                                        .v_cache = &c->view,
                                        .schedule_host = &c->plan};
}

static void attend_with(int32_t form, int32_t form_v, int32_t slot_bytes)
{
    struct call c;
    make_call(&c, form, form_v, slot_bytes);
    if (form == GPU_ROW_LEVELS) { /* a slot's value follows its key */
        c.p.k.row_scale = c.p.k.data + 64;
        c.p.v.data = c.p.k.data + 66;
        c.p.v.row_scale = c.p.v.data + 64;
    }
    for (int32_t i = 0; i < 2; i++) {
        is_sm90 = i == 1;
        assert_null(sm80_matrix.attend(&c.args, &c.p, false));
        assert_int_equal(launched.mapped, is_sm90);
        assert_int_equal(launched.overlaps, is_sm90);
        assert_true(is_sm90 || !launched.scale_spans || form == GPU_ROW_LEVELS);
    }
}

TEST(test_attend)
{
    attend_with(GPU_ROW_NUMBERS, GPU_ROW_NUMBERS, 256);
    attend_with(GPU_ROW_NVFP4, GPU_ROW_NVFP4, 72);
    attend_with(GPU_ROW_LEVELS, GPU_ROW_STEPS, 134);
}

TEST(test_prefill)
{
    struct call c;
    const char *cause = NULL;
    make_call(&c, GPU_ROW_NUMBERS, GPU_ROW_NUMBERS, 256);
    c.args.k_cache = &c.view;
    for (int32_t i = 0; i < 2; i++) {
        is_sm90 = i == 1;
        c.plan.num_tokens = i == 0 ? 2112 : 2113; /* items of 128 rows: 132, 133 */
        assert_true(sm80_prefill.attend(&c.args, &c.p, c.memory, false, &cause));
        assert_int_equal(prefilled.overlaps, is_sm90);
        assert_int_equal(prefilled.p.schedule.tile_rows, i == 0 ? 64 : 128);
        assert_true(prefilled.has_stretches);
    }
}
