/* SPDX-License-Identifier: Apache-2.0 */
/* What enters the gated delta rule: the causal convolution over the mixed row and its rolling
 * window, norms, gates (Yang, Kautz, Hatamizadeh 2024; Qwen3-Next). */
#include "convert.h"
#include "gdn.h"

#define L2_EPSILON 1e-6f
#define SOFTPLUS_THRESHOLD 20

static float load_element(const void *memory, int32_t element, int64_t i)
{
    return element == ELEMENT_F32   ? ((const float *)memory)[i]
           : element == ELEMENT_F16 ? f16_to_f32(((const uint16_t *)memory)[i])
                                    : bf16_to_f32(((const uint16_t *)memory)[i]);
}

static void store_element(void *memory, int32_t element, int64_t i, float x)
{
    if (element == ELEMENT_F32) {
        ((float *)memory)[i] = x;
    } else {
        ((uint16_t *)memory)[i] = element == ELEMENT_F16 ? f32_to_f16(x) : f32_to_bf16(x);
    }
}

static float tensor_element(const struct attn_tensor *tensor, int64_t i, int64_t j)
{
    const void *row = tensor->ndim > 1 ? tensor_row(tensor, i, 0) : tensor_data(tensor);
    return load_element(row, element_of_any(tensor), j * tensor_stride(tensor, tensor->ndim - 1));
}

static void *window_of(const struct gdn *gdn, const struct gdn_request *request, int64_t channel)
{
    return view_row(gdn->args->v_cache, request->slots[0], 0, channel);
}

/* Entry of the window that holds token t < 0: the oldest of conv_width - 1 is at request->from. */
static int64_t window_entry(const struct gdn *gdn, const struct gdn_request *request, int64_t t)
{
    return request->from + gdn->desc->conv_width - 1 + t;
}

/* Inputs of the channels at tokens first .. first+rows-1; those before the step come out of the
 * window. */
static void load_raw(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                     int32_t rows, int64_t channel, int32_t count, int64_t stride, float *raw)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    int32_t element = element_of_any(mixed);
    int32_t before = first < 0 ? (int32_t)(-first < rows ? -first : rows) : 0;
    memset(raw, 0, (size_t)rows * (size_t)stride * sizeof(float));
    for (int32_t c = 0; c < count && before > 0 && request->has_state; c++) {
        const void *window = window_of(gdn, request, channel + c);
        for (int32_t i = 0; i < before; i++) {
            int64_t entry = window_entry(gdn, request, first + i);
            raw[i * stride + c] = load_element(window, gdn_activation(gdn), entry);
        }
    }
    for (int32_t i = before; i < rows; i++) {
        const char *row = tensor_row(mixed, request->first_row + first + i, 0);
        gdn_variant(gdn)->f32->unpack[element](raw + i * stride,
                                               row + channel * element_bytes[element], count);
    }
}

static void load_taps(const struct gdn *gdn, int64_t channel, int32_t count, int64_t stride,
                      float *taps)
{
    const struct attn_tensor *weight = gdn->weights->conv_weight;
    const struct attn_tensor *bias = gdn->weights->conv_bias;
    int32_t element = element_of_any(weight), width = gdn->desc->conv_width;
    int64_t tap = tensor_stride(weight, 1);
    memset(taps, 0, (size_t)(width + 1) * (size_t)stride * sizeof(float));
    for (int32_t c = 0; c < count; c++) {
        const void *row = tensor_row(weight, channel + c, 0);
        for (int32_t i = 0; i < width; i++) {
            taps[i * stride + c] = load_element(row, element, i * tap);
        }
        if (bias != NULL) {
            taps[width * stride + c] = tensor_element(bias, 0, channel + c);
        }
    }
}

/* Rows of one head: of `plain`, or convolved from channels of the mixed row. */
static void load_rows(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                      int32_t count, const struct attn_tensor *plain, int64_t head, int64_t channel,
                      int32_t size, struct gdn_scratch *scratch, float *rows)
{
    int32_t padded = round_up(size, COLUMN_MULTIPLE);
    int32_t width = gdn->desc->conv_width;
    if (width > 0) {
        load_taps(gdn, channel, size, padded, scratch->taps);
        load_raw(gdn, request, first - (width - 1), count + width - 1, channel, size, padded,
                 scratch->raw);
        for (int32_t t = 0; t < count; t++) {
            gdn_variant(gdn)->delta->convolve(rows + (int64_t)t * padded,
                                              scratch->raw + (int64_t)t * padded, scratch->taps,
                                              scratch->taps + (int64_t)width * padded, padded,
                                              width, padded, gdn->desc->conv_silu);
        }
        return;
    }
    for (int32_t t = 0; t < count; t++) {
        float *row = rows + (int64_t)t * padded;
        gdn_variant(gdn)->f32->unpack[element_of_any(plain)](
            row, tensor_row(plain, request->first_row + first + t, head), size);
        memset(row + size, 0, (size_t)(padded - size) * sizeof(float));
    }
}

void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                 int32_t count, int32_t head, struct gdn_scratch *scratch)
{
    const struct attn_gdn_desc *desc = gdn->desc;
    const struct variant *variant = gdn_variant(gdn);
    int64_t key_head = head / (desc->num_v_heads / desc->num_k_heads);
    int64_t at = key_head * desc->head_size_k;
    int64_t keys = (int64_t)desc->num_k_heads * desc->head_size_k;
    load_rows(gdn, request, first, count, gdn->args->q, key_head, at, desc->head_size_k, scratch,
              scratch->q);
    load_rows(gdn, request, first, count, gdn->args->k, key_head, keys + at, desc->head_size_k,
              scratch, scratch->k);
    for (int32_t t = 0; t < count; t++) {
        float *q = scratch->q + (int64_t)t * scratch->depth;
        float *k = scratch->k + (int64_t)t * scratch->depth;
        float by = gdn->args->layer->scale;
        if (desc->qk_l2norm) {
            by /= sqrtf(variant->delta->square_sum(q, scratch->depth) + L2_EPSILON);
            float norm = sqrtf(variant->delta->square_sum(k, scratch->depth) + L2_EPSILON);
            variant->scale_row(k, 1.0f / norm, scratch->depth);
        }
        variant->scale_row(q, by, scratch->depth);
    }
}

void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                int32_t count, int32_t head, struct gdn_scratch *scratch)
{
    const struct attn_gdn_desc *desc = gdn->desc;
    int64_t channel =
        2 * (int64_t)desc->num_k_heads * desc->head_size_k + (int64_t)head * desc->head_size_v;
    load_rows(gdn, request, first, count, gdn->args->v, head, channel, desc->head_size_v, scratch,
              scratch->v);
}

/* g = -exp(A_log) softplus(a + dt_bias); beta = sigmoid(b). */
void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                    int32_t count, int32_t head, struct gdn_scratch *scratch)
{
    for (int32_t t = 0; t < count; t++) {
        int64_t row = request->first_row + first + t;
        double x = (double)tensor_element(gdn->io->a, row, head) + gdn->weights->dt_bias[head];
        double softplus = x > SOFTPLUS_THRESHOLD ? x : log1p(exp(x));
        scratch->decay[t] = (float)exp(-exp((double)gdn->weights->a_log[head]) * softplus);
        scratch->beta[t] = (float)(1 / (1 + exp(-(double)tensor_element(gdn->io->b, row, head))));
    }
}

/* With h the conv_width - 1 inputs before the step and x its own, the window becomes the last
 * conv_width - 1 of (h, x); a speculative step keeps (h, x) without its first, so that the window
 * after token i begins at entry i. Entries are read no earlier than they are written. */
void gdn_roll_window(const struct gdn *gdn, const struct gdn_request *request, int64_t channel)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    int64_t history = gdn->desc->conv_width - 1, tokens = request->num_tokens;
    int64_t skipped = request->keeps_all ? 1 : tokens;
    int64_t count = history + tokens - skipped;
    void *window = window_of(gdn, request, channel);
    for (int64_t i = 0; i < count; i++) {
        int64_t t = skipped + i - history;
        float x = 0.0f;
        if (t >= 0) {
            x = tensor_element(mixed, request->first_row + t, channel);
        } else if (request->has_state) {
            x = load_element(window, gdn_activation(gdn), window_entry(gdn, request, t));
        }
        store_element(window, gdn_activation(gdn), i, x);
    }
}
