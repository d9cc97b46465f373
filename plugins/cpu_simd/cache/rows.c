/* SPDX-License-Identifier: Apache-2.0 */
/* How each kv_dtype stores rows, one row of a cache in and out, and rows of a tile in the compute
 * type. Divisions are in double, so that scales and codes are those of exact arithmetic. */
#include "cpu_simd/internal.h"

#define INT8_LARGEST 127.0

#define ACTIVATION ELEMENT_COUNT /* the element of the activations */
#define NOT_SERVED (-1)

static const struct row_form forms[] = {
    [ATTN_KV_AUTO] = {ACTIVATION},
    [ATTN_KV_F16] = {ELEMENT_F16},
    [ATTN_KV_BF16] = {ELEMENT_BF16},
    [ATTN_KV_F32] = {ELEMENT_F32},
    [ATTN_KV_FP8_E4M3] = {ELEMENT_E4M3, .head_scale = true},
    [ATTN_KV_FP8_E5M2] = {ELEMENT_E5M2, .head_scale = true},
    [ATTN_KV_FP8_E4M3FNUZ] = {NOT_SERVED},
    [ATTN_KV_FP8_PER_TOKEN_HEAD] = {ELEMENT_E4M3, .row_scale = true},
    [ATTN_KV_INT8_PER_TOKEN_HEAD] = {ELEMENT_INT8, .row_scale = true},
    [ATTN_KV_INT4_PER_TOKEN_HEAD] = {ELEMENT_INT8, .nibbles = true, .row_scale = true},
    [ATTN_KV_INT8_KV] = {ELEMENT_INT8, .row_scale = true},
    [ATTN_KV_INT8_K] = {ELEMENT_INT8, .row_scale = true},
    [ATTN_KV_NVFP4] = {ELEMENT_INT8, .coding = CODING_NVFP4, .head_scale = true},
    [ATTN_KV_FP8_DS_MLA] = {ELEMENT_E4M3, .coding = CODING_DS_MLA},
    [ATTN_KV_TURBOQUANT_K8V4] = {ELEMENT_E4M3},
    [ATTN_KV_TURBOQUANT_4BIT_NC] = {ELEMENT_INT8, CODING_LEVELS, 4, .row_scale = true},
    [ATTN_KV_TURBOQUANT_K3V4_NC] = {ELEMENT_INT8, CODING_LEVELS, 3, .row_scale = true},
    [ATTN_KV_TURBOQUANT_3BIT_NC] = {ELEMENT_INT8, CODING_LEVELS, 3, .row_scale = true},
    [ATTN_KV_Q8_0] = {ELEMENT_INT8, CODING_BLOCKS, 8},
    [ATTN_KV_Q4_0] = {ELEMENT_INT8, CODING_BLOCKS, 4},
    [ATTN_KV_OPAQUE] = {NOT_SERVED},
    [ATTN_KV_FP8_DS_V4] = {ELEMENT_E4M3, .coding = CODING_DS_V4},
    [ATTN_KV_MXFP4] = {ELEMENT_INT8, .coding = CODING_MXFP4},
};

/* Values that are stored otherwise than their keys; element 0: they are not. */
static const struct row_form value_forms[sizeof forms / sizeof *forms] = {
    [ATTN_KV_INT8_KV] = {ELEMENT_INT8, .channel_scale = true},
    [ATTN_KV_INT8_K] = {ACTIVATION},
    [ATTN_KV_TURBOQUANT_K8V4] = {ELEMENT_INT8, CODING_STEPS, 4},
    [ATTN_KV_TURBOQUANT_4BIT_NC] = {ELEMENT_INT8, CODING_STEPS, 4},
    [ATTN_KV_TURBOQUANT_K3V4_NC] = {ELEMENT_INT8, CODING_STEPS, 4},
    [ATTN_KV_TURBOQUANT_3BIT_NC] = {ELEMENT_INT8, CODING_STEPS, 3},
};

struct row_form row_form_of(int32_t kv_dtype, int32_t activation, bool is_v)
{
    if (kv_dtype < 0 || (size_t)kv_dtype >= sizeof forms / sizeof *forms) {
        return (struct row_form){NOT_SERVED};
    }
    const bool apart = is_v && value_forms[kv_dtype].element != 0;
    struct row_form form = apart ? value_forms[kv_dtype] : forms[kv_dtype];
    form.element = form.element == ACTIVATION ? activation : form.element;
    return form;
}

static const struct attn_kv_quant_params *quant_params(const struct attn_layer_params *params)
{
    return ext_of(params->next, ATTN_EXT_KV_QUANT_PARAMS);
}

const float *channel_scales(const struct layer_shape *shape, const struct attn_layer_params *params)
{
    return shape->values.channel_scale ? quant_params(params)->v_channel_scale : NULL;
}

/* nvfp4 has a scale per tensor, whether the layer says so or not. */
int32_t scale_form_of(const struct attn_layer_desc *layer, bool is_v)
{
    int32_t form = is_v ? layer->v_scale_form : layer->k_scale_form;
    return layer_kv_dtype(layer, is_v) == ATTN_KV_NVFP4 ? ATTN_SCALE_PER_TENSOR : form;
}

static float head_scale(const struct row_place *at)
{
    const struct attn_layer_params *params = at->params;
    int32_t form = scale_form_of(at->layer, at->is_v);
    return (float)(at->is_v ? scale_of_head(params->v_scale, params->v_scale_host, form, at->head)
                            : scale_of_head(params->k_scale, params->k_scale_host, form, at->head));
}

/* The float32 next to the row. */
static void *scale_place(const struct row_place *at)
{
    return view_scale(at->view, at->block, at->slot, at->head);
}

static char *memory_of(const struct row_place *at)
{
    return view_row(at->view, at->block, at->slot, at->head);
}

static int32_t pack_of(const struct attn_kv_view *view)
{
    return view->pack > 0 && view->pack < view->head_size ? view->pack : view->head_size;
}

/* A row's scale by its own largest element. A NaN in the row is in the scale too: an int8 has none.
 */
static float scale_of_values(const struct row_place *at, const float *values)
{
    float largest = at->variant->codes->largest(values, at->view->head_size);
    double exact = largest / (at->form->element == ELEMENT_INT8 ? INT8_LARGEST : E4M3_LARGEST);
    return exact < LEAST_ROW_SCALE ? (float)LEAST_ROW_SCALE : (float)exact;
}

void row_write(const struct row_place *at, const char *source, int32_t activation)
{
    int32_t size = at->view->head_size, pack = pack_of(at->view);
    int32_t element = at->form->element, bytes = element_bytes[element];
    char *row = memory_of(at);
    float values[MAX_HEAD_SIZE], scale = 1.0f;
    if (element == activation) {
        for (int32_t d = 0; d < size; d += pack, row += at->view->stride_pack) {
            memcpy(row, source + (int64_t)d * bytes, (size_t)pack * (size_t)bytes);
        }
        return;
    }
    at->variant->f32->unpack[activation](values, source, size);
    if (at->form->coding == CODING_BLOCKS) {
        at->variant->blocks[at->form->bits == 8].write((uint8_t *)row, values, size);
        return;
    }
    if (at->form->coding != CODING_NONE) {
        coded_row_write(at, values);
        return;
    }
    if (at->form->nibbles) {
        scale = int4_write(at->variant, at->view, row, values, int4_signs(at->params, at->is_v));
        memcpy(scale_place(at), &scale, sizeof scale);
        return;
    }
    if (at->form->row_scale) {
        scale = scale_of_values(at, values);
        memcpy(scale_place(at), &scale, sizeof scale);
    } else if (at->form->head_scale) {
        scale = head_scale(at);
    }
    const float *channels = at->form->channel_scale
                                ? quant_params(at->params)->v_channel_scale + at->head * size
                                : NULL;
    if (element <= ELEMENT_BF16) {
        for (int32_t d = 0; d < size; d += pack, row += at->view->stride_pack) {
            at->variant->store[element](row, values + d, 1.0f, pack);
        }
        return;
    }
    for (int32_t d = 0; d < size; d += pack, row += at->view->stride_pack) {
        at->variant->codes->encode[element](row, values + d, scale,
                                            channels != NULL ? channels + d : NULL, pack);
    }
}

static void read_int4(const struct row_place *at, float *values)
{
    int8_t codes[MAX_HEAD_SIZE];
    float scale;
    int32_t size = at->view->head_size;
    memcpy(&scale, scale_place(at), sizeof scale);
    int32_t zero = int4_zero(&scale);
    int4_codes(at->variant, codes, memory_of(at), size, pack_of(at->view), at->view->stride_pack,
               zero);
    at->variant->f32->unpack[ELEMENT_INT8](values, codes, size);
    for (int32_t d = 0; d < size; d++) {
        values[d] *= scale;
    }
    int4_rotate_back(at->variant, int4_signs(at->params, at->is_v), values, size);
}

void row_read(const struct row_place *at, char *out, int32_t activation)
{
    int32_t size = at->view->head_size, pack = pack_of(at->view);
    int32_t element = at->form->element, bytes = element_bytes[element];
    const char *row = memory_of(at);
    float values[MAX_HEAD_SIZE], scale = 1.0f;
    if (at->form->coding == CODING_BLOCKS) {
        at->variant->blocks[at->form->bits == 8].read(values, (const uint8_t *)row, size);
        at->variant->store[activation](out, values, 1.0f, size);
        return;
    }
    if (at->form->coding != CODING_NONE) {
        coded_row_read(at, values);
        scale = at->form->head_scale ? head_scale(at) : 1.0f;
        at->variant->store[activation](out, values, scale, size);
        return;
    }
    if (at->form->nibbles) {
        read_int4(at, values);
        at->variant->store[activation](out, values, 1.0f, size);
        return;
    }
    if (at->form->row_scale) {
        memcpy(&scale, scale_place(at), sizeof scale);
    } else if (at->form->head_scale) {
        scale = head_scale(at);
    }
    for (int32_t d = 0; d < size; d += pack, row += at->view->stride_pack) {
        if (element == activation) {
            memcpy(out + (int64_t)d * bytes, row, (size_t)pack * (size_t)bytes);
        } else {
            at->variant->f32->unpack[element](values + d, row, pack);
        }
    }
    if (element != activation) {
        at->variant->store[activation](out, values, scale, size);
    }
}

static void stage_nibbles(const struct stage *stage, int32_t i, char *out)
{
    int8_t codes[MAX_HEAD_SIZE];
    const struct row_source *source = stage->source;
    int32_t n = source->row_elements;
    int4_codes(stage->problem->instance->variant, codes, stage->rows[i], n,
               source->pack != 0 ? source->pack : n, source->stride_pack,
               int4_zero(&stage->scales[i]));
    stage->problem->shape.kernels->unpack[ELEMENT_INT8](out, codes, n);
}

static void stage_coded(const struct stage *stage, int32_t i, char *out)
{
    float values[MAX_HEAD_SIZE];
    const struct row_source *source = stage->source;
    const struct coded_row row = {
        .coding = source->coding,
        .bits = source->bits,
        .is_v = source->is_v,
        .n = source->row_elements,
        .pack = source->pack != 0 ? source->pack : source->row_elements,
        .stride_pack = source->stride_pack,
        .codes = stage->rows[i],
        .kept = source->scale != NULL ? (const uint8_t *)stage->scale_rows[i] + stage->scale_offset
                                      : NULL,
        .stride_slot = source->scale_stride_slot,
        .slot = (stage->first + i) % 4}; /* blocks have a multiple of 4 */
    float scale = coded_row_load(stage->problem->instance->variant, &row, values);
    if (source->row_scale) {
        stage->scales[i] = scale;
    }
    stage->problem->shape.kernels->unpack[ELEMENT_F32](out, values, row.n);
}

static void stage_blocks(const struct stage *stage, int32_t i, char *out)
{
    const struct row_source *source = stage->source;
    const struct variant *variant = stage->problem->instance->variant;
    variant->blocks[source->bits == 8].read((float *)(void *)out, stage->rows[i],
                                            source->row_elements);
}

static void stage_plain(const struct stage *stage, int32_t i, char *out)
{
    const struct tile_kernels *kernels = stage->problem->shape.kernels;
    const struct row_source *source = stage->source;
    const char *in = stage->rows[i];
    int32_t piece = source->pack != 0 ? source->pack : source->row_elements;
    for (int32_t d = 0; d < source->row_elements; d += piece, in += source->stride_pack) {
        kernels->unpack[source->element](out + (size_t)d * (size_t)kernels->element_bytes, in,
                                         min_i32(piece, source->row_elements - d));
    }
}

bool has_float_scales(const struct row_source *source)
{
    return source->row_scale && source->coding == CODING_NONE;
}

void stage_rows(const struct stage *stage)
{
    const struct tile_kernels *kernels = stage->problem->shape.kernels;
    const struct row_source *source = stage->source;
    size_t row_bytes = (size_t)stage->padded * (size_t)kernels->element_bytes;
    size_t part_bytes = row_bytes / (size_t)source->copies;
    size_t used_bytes = (size_t)source->row_elements * (size_t)kernels->element_bytes;
    void (*stage_row)(const struct stage *, int32_t, char *) =
        source->nibbles                   ? stage_nibbles
        : source->coding == CODING_NONE   ? stage_plain
        : source->coding == CODING_BLOCKS ? stage_blocks
                                          : stage_coded;
    for (int32_t i = 0; i < stage->n; i++) {
        char *out = stage->memory + (size_t)i * row_bytes;
        stage_row(stage, i, out);
        memset(out + used_bytes, 0, part_bytes - used_bytes);
        if (source->copies > 1) {
            memcpy(out + part_bytes, out, part_bytes);
        }
        stage->rows[i] = out;
    }
}
