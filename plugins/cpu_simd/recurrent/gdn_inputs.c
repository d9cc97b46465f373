/* SPDX-License-Identifier: Apache-2.0 */
/* Inputs and outputs of the gated delta rule: the causal convolution over the mixed row and its
 * rolling window, norms, gates (Yang, Kautz, Hatamizadeh 2024; Qwen3-Next). */
#include "cpu_simd/convert.h"
#include "gdn.h"

#define SOFTPLUS_LINEAR 20.0f

static float load_element(const void *memory, int32_t element, int64_t i)
{
    return element == ELEMENT_F32   ? ((const float *)memory)[i]
           : element == ELEMENT_F16 ? number_from_f16(((const uint16_t *)memory)[i])
                                    : number_from_bf16(((const uint16_t *)memory)[i]);
}

/* Numbers that lie [column][place] in memory, columns `bytes` and places `step` elements apart. */
struct columns {
    const char *first;
    int64_t bytes, step;
    int32_t element;
};

/* rows[i][c] = columns[c][i]; rows lie `stride` floats apart. */
static void transpose(const struct columns *columns, int32_t num_columns, int32_t places,
                      float *rows, int64_t stride)
{
    const char *from = columns->first;
    int64_t bytes = columns->bytes, step = columns->step;
#define EACH(type, number)                                                                         \
    for (int32_t i = 0; i < places; i++) {                                                         \
        _Pragma("GCC unroll 8") for (int32_t c = 0; c < num_columns; c++)                          \
        {                                                                                          \
            rows[i * stride + c] = number(((const type *)(from + c * bytes))[i * step]);           \
        }                                                                                          \
    }
    if (columns->element == ELEMENT_F32) {
        EACH(float, )
    } else if (columns->element == ELEMENT_F16) {
        EACH(uint16_t, number_from_f16)
    } else {
        EACH(uint16_t, number_from_bf16)
    }
#undef EACH
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

static void *window_of(const struct gdn *gdn, int32_t slot, int64_t channel)
{
    return view_row(gdn->args->v_cache, slot, 0, channel);
}

/* Entry of the window that holds token t < 0: the oldest of conv_width - 1 is at request->from. */
static int64_t window_entry(const struct gdn *gdn, const struct gdn_request *request, int64_t t)
{
    return request->from + gdn->desc->conv_width - 1 + t;
}

/* A head's channels of the mixed row. Heads are counted in the order q, k, v. */
struct head_channels {
    int64_t first; /* set by channels_in */
    int32_t size, padded;
    size_t taps; /* floats before its own */
};

static struct head_channels channels_of(const struct attn_recurrent_desc *desc, int32_t head)
{
    int32_t keys = 2 * desc->num_k_heads, before = head < keys ? head : keys;
    size_t rows = (size_t)desc->conv_width + 1;
    size_t depth = (size_t)round_up(desc->head_size_k, COLUMN_MULTIPLE);
    size_t width = (size_t)round_up(desc->head_size_v, COLUMN_MULTIPLE);
    return (struct head_channels){
        .size = head < keys ? desc->head_size_k : desc->head_size_v,
        .padded = (int32_t)(head < keys ? depth : width),
        .taps = rows * ((size_t)before * depth + (size_t)(head - before) * width)};
}

static struct head_channels channels_in(const struct gdn *gdn, int32_t head)
{
    const int32_t hk = gdn->desc->num_k_heads;
    struct head_channels channels = channels_of(gdn->desc, head);
    channels.first = head < hk       ? gdn->first_q + (int64_t)head * channels.size
                     : head < 2 * hk ? gdn->first_k + (int64_t)(head - hk) * channels.size
                                     : gdn->first_v + (int64_t)(head - 2 * hk) * channels.size;
    return channels;
}

size_t gdn_taps_floats(const struct attn_recurrent_desc *desc)
{
    return desc->conv_width > 0 ? channels_of(desc, 2 * desc->num_k_heads + desc->num_v_heads).taps
                                : 0;
}

void gdn_load_taps(const struct gdn *gdn, int32_t head, float *taps)
{
    const struct attn_tensor *weight = gdn->weights->conv_weight;
    const struct attn_tensor *bias = gdn->weights->conv_bias;
    const struct head_channels channels = channels_in(gdn, head);
    int32_t width = gdn->desc->conv_width;
    float *rows = taps + channels.taps;
    const struct columns weights = {.first = tensor_row(weight, channels.first, 0),
                                    .bytes = tensor_stride(weight, 0) * (weight->dtype.bits / 8),
                                    .step = tensor_stride(weight, 1),
                                    .element = element_of_any(weight)};
    memset(rows, 0, (size_t)(width + 1) * (size_t)channels.padded * sizeof(float));
    transpose(&weights, channels.size, width, rows, channels.padded);
    for (int32_t c = 0; c < channels.size && bias != NULL; c++) {
        rows[(int64_t)width * channels.padded + c] = tensor_element(bias, 0, channels.first + c);
    }
}

/* Inputs of the channels at tokens first .. first+rows-1; those before the step come out of the
 * window. */
static void load_raw(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                     int32_t rows, const struct head_channels *channels, float *raw)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    int32_t element = element_of_any(mixed), stride = channels->padded;
    int32_t before = first < 0 ? (int32_t)(-first < rows ? -first : rows) : 0;
    if (before > 0 && (!request->has_state || channels->size < stride)) {
        memset(raw, 0, (size_t)before * (size_t)stride * sizeof(float));
    }
    if (before > 0 && request->has_state) {
        const int32_t stored = element_of_dtype(gdn->args->layer->dtype);
        const struct columns window = {
            .first = (const char *)window_of(gdn, request->window_from, channels->first) +
                     window_entry(gdn, request, first) * element_bytes[stored],
            .bytes = gdn->args->v_cache->stride_head,
            .step = 1,
            .element = stored};
        transpose(&window, channels->size, before, raw, stride);
    }
    for (int32_t i = before; i < rows; i++) {
        const char *row = tensor_row(mixed, request->first_row + first + i, 0);
        float *to = raw + (int64_t)i * stride;
        gdn_variant(gdn)->f32->unpack[element](to, row + channels->first * element_bytes[element],
                                               channels->size);
        memset(to + channels->size, 0, (size_t)(stride - channels->size) * sizeof(float));
    }
}

static void prefetch_lines(const char *first, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64) {
        __builtin_prefetch(first + i);
    }
}

/* Prefetches what the next head's convolution reads: too little in one place for the hardware's
 * prefetcher. */
static void prefetch_head(const struct gdn *gdn, const struct gdn_request *request, int32_t head)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    if (head >= 2 * gdn->desc->num_k_heads + gdn->desc->num_v_heads) {
        return;
    }
    const struct head_channels channels = channels_in(gdn, head);
    const int64_t bytes = element_bytes[element_of_any(mixed)];
    prefetch_lines(window_of(gdn, request->window_from, channels.first),
                   channels.size * gdn->args->v_cache->stride_head);
    prefetch_lines((const char *)tensor_row(mixed, request->first_row, 0) + channels.first * bytes,
                   channels.size * bytes);
}

/* Convolved rows of a head. Where they look into the window or are padded, their inputs are put
 * together as floats first. */
static void convolve_head(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                          int32_t count, int32_t head, struct gdn_scratch *scratch, float *rows)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    const struct head_channels channels = channels_in(gdn, head);
    const int32_t element = element_of_any(mixed), width = gdn->desc->conv_width;
    const int64_t history = width - 1;
    const float *taps = scratch->taps + channels.taps;
    int32_t put = first < history ? min_i32(count, (int32_t)(history - first)) : 0;
    if (channels.size < channels.padded) {
        put = count;
    }
    struct convolve_args args = {.y = rows,
                                 .x = scratch->raw,
                                 .weights = taps,
                                 .bias = taps + (int64_t)width * channels.padded,
                                 .stride = channels.padded,
                                 .x_bytes = channels.padded * (int64_t)sizeof(float),
                                 .element = ELEMENT_F32,
                                 .width = width,
                                 .rows = put,
                                 .n = channels.padded,
                                 .with_silu = gdn->desc->conv_silu};
    if (request->num_tokens == 1 && request->has_state && history > 0) {
        prefetch_head(gdn, request, head + 1);
    }
    if (put > 0) {
        load_raw(gdn, request, first - history, put + width - 1, &channels, scratch->raw);
        gdn_variant(gdn)->delta->convolve(&args);
    }
    if (put == count) {
        return;
    }
    const int64_t rows_after = request->num_tokens - first - count;
    args.y = rows + (int64_t)put * channels.padded;
    args.x = (const char *)tensor_row(mixed, request->first_row + first + put - history, 0) +
             channels.first * element_bytes[element];
    args.x_bytes = tensor_stride(mixed, 0) * element_bytes[element];
    args.element = element;
    args.rows_after = rows_after < GDN_CHUNK ? (int32_t)rows_after : GDN_CHUNK;
    args.rows = count - put;
    gdn_variant(gdn)->delta->convolve(&args);
}

/* Rows of a head, counted as in channels_of: of `plain`, or convolved from the mixed row. */
static void load_rows(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                      int32_t count, const struct attn_tensor *plain, int64_t plain_head,
                      int32_t head, struct gdn_scratch *scratch, float *rows)
{
    const struct head_channels channels = channels_of(gdn->desc, head);
    int32_t padded = channels.padded;
    if (gdn->desc->conv_width > 0) {
        convolve_head(gdn, request, first, count, head, scratch, rows);
        return;
    }
    for (int32_t t = 0; t < count; t++) {
        float *row = rows + (int64_t)t * padded;
        gdn_variant(gdn)->f32->unpack[element_of_any(plain)](
            row, tensor_row(plain, request->first_row + first + t, plain_head), channels.size);
        memset(row + channels.size, 0, (size_t)(padded - channels.size) * sizeof(float));
    }
}

void gdn_load_qk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                 int32_t count, int32_t key_head, struct gdn_scratch *scratch)
{
    const struct attn_recurrent_desc *desc = gdn->desc;
    const struct variant *variant = gdn_variant(gdn);
    load_rows(gdn, request, first, count, gdn->args->q, key_head, key_head, scratch, scratch->q);
    load_rows(gdn, request, first, count, gdn->args->k, key_head, desc->num_k_heads + key_head,
              scratch, scratch->k);
    const float scale = gdn->args->layer->scale;
    if (desc->qk_l2norm) {
        variant->delta->normalize(scratch->q, count, scratch->depth, scale);
        variant->delta->normalize(scratch->k, count, scratch->depth, 1.0f);
    } else {
        variant->scale_row(scratch->q, scale, count * scratch->depth);
    }
}

void gdn_load_v(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                int32_t count, int32_t head, struct gdn_scratch *scratch)
{
    load_rows(gdn, request, first, count, gdn->args->v, head, 2 * gdn->desc->num_k_heads + head,
              scratch, scratch->v);
}

/* A head's column of rows first .. first+count-1. */
static void load_column(const struct attn_tensor *tensor, int64_t first, int32_t count,
                        int32_t head, float *out)
{
    int32_t element = element_of_any(tensor);
    const char *from = tensor_row(tensor, first, 0);
    const int64_t step = tensor_stride(tensor, 0) * element_bytes[element];
    from += head * tensor_stride(tensor, 1) * element_bytes[element];
    for (int32_t t = 0; t < count; t++) {
        out[t] = load_element(from + t * step, element, 0);
    }
}

/* g = -exp(A_log) softplus(a + dt_bias); beta = sigmoid(b). */
static void load_plain_gates(const struct gdn *gdn, const struct gdn_request *request,
                             int64_t first, int32_t count, int32_t head,
                             struct gdn_scratch *scratch)
{
    float a[GDN_CHUNK] = {0}, b[GDN_CHUNK] = {0};
    load_column(gdn->io->a, request->first_row + first, count, head, a);
    load_column(gdn->io->b, request->first_row + first, count, head, b);
    const struct gates_args args = {.a = a,
                                    .b = b,
                                    .rate = -expf(gdn->weights->a_log[head]),
                                    .bias = gdn->weights->dt_bias[head],
                                    .count = count};
    gdn_variant(gdn)->delta->gates(scratch->decay, scratch->beta, &args);
}

static float sigmoid(float x)
{
    return 1.0f / (1.0f + expf(-x));
}

/* g of one gate: element `at` of a and of dt_bias; *step is its dt, where the gate has one. NaN
 * passes dt's limits. */
static float log_decay(const struct gdn *gdn, int64_t row, int32_t head, int64_t at, float *step)
{
    const struct attn_recurrent_rule *rule = gdn->rule;
    if (rule->gate == ATTN_GATE_GIVEN) {
        return tensor_element(gdn->io->a, row, at);
    }
    const float rate = expf(gdn->weights->a_log[head]);
    if (rule->gate == ATTN_GATE_CONSTANT) {
        return -rate;
    }
    const float x = tensor_element(gdn->io->a, row, at) + gdn->weights->dt_bias[at];
    if (rule->gate == ATTN_GATE_BOUNDED) {
        return rule->gate_bound * sigmoid(rate * x);
    }
    *step = x > SOFTPLUS_LINEAR ? x : log1pf(expf(x));
    *step = *step < rule->dt_min ? rule->dt_min : *step;
    *step = rule->dt_max > 0 && *step > rule->dt_max ? rule->dt_max : *step;
    return -rate * *step;
}

float gdn_load_any_gates(const struct gdn *gdn, int64_t row, int32_t head, int32_t depth,
                         float *decays, float *logs)
{
    const struct attn_recurrent_rule *rule = gdn->rule;
    const int32_t dk = gdn->desc->head_size_k, count = rule->gate_per_channel ? dk : 1;
    float step = 0;
    for (int32_t i = 0; i < count; i++) {
        const float g = log_decay(gdn, row, head, (int64_t)head * count + i, &step);
        decays[i] = expf(g);
        if (logs != NULL) {
            logs[i] = g;
        }
    }
    for (int32_t i = count; i < depth; i++) {
        decays[i] = i < dk ? decays[0] : 1.0f;
    }
    return rule->write_gate == ATTN_WRITE_GATE_SIGMOID
               ? sigmoid(tensor_element(gdn->io->b, row, head))
           : rule->write_gate == ATTN_WRITE_GATE_STEP ? step
                                                      : 1.0f;
}

void gdn_load_gates(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
                    int32_t count, int32_t head, struct gdn_scratch *scratch)
{
    if (gdn_is_plain(gdn->args->layer)) {
        load_plain_gates(gdn, request, first, count, head, scratch);
        return;
    }
    for (int32_t t = 0; t < count; t++) {
        scratch->beta[t] = gdn_load_any_gates(gdn, request->first_row + first + t, head, 1,
                                              &scratch->decay[t], NULL);
    }
}

void gdn_store_rows(const struct gdn *gdn, int64_t row, int32_t count, int32_t head, const float *o,
                    int64_t stride)
{
    const struct attn_tensor *out = gdn->args->out;
    const int32_t element = element_of_any(out), n = gdn->desc->head_size_v;
    const int64_t row_bytes = tensor_stride(out, 0) * element_bytes[element];
    char *to = tensor_row(out, row, head);
    for (int32_t t = 0; t < count; t++, to += row_bytes, o += stride) {
        gdn_variant(gdn)->store[element](to, o, 1.0f, n);
    }
}

/* Entries of channels in a window, which lie `stride` bytes apart. */
struct entries {
    char *first;
    int64_t stride;
    int64_t channels;
    int32_t element;
};

/* Sets the first `kept` entries of each channel to those at `before`; NULL: zeros. */
static void keep_entries(const struct entries *to, const char *before, int64_t kept)
{
#define KEEP(type)                                                                                 \
    for (int64_t c = 0; c < to->channels; c++) {                                                   \
        type *entry = (type *)(void *)(to->first + c * to->stride);                                \
        for (int64_t i = 0; i < kept; i++) {                                                       \
            entry[i] = before != NULL ? ((const type *)(before + c * to->stride))[i] : 0;          \
        }                                                                                          \
    }
    if (to->element == ELEMENT_F32) {
        KEEP(float)
    } else {
        KEEP(uint16_t)
    }
#undef KEEP
}

/* An entry of each channel, of a row of inputs. */
static void fill_entries(const struct entries *to, const char *row, int32_t given)
{
    if (to->element == given && given != ELEMENT_F32) {
        const uint16_t *x = (const uint16_t *)(const void *)row;
        for (int64_t c = 0; c < to->channels; c++) {
            *(uint16_t *)(void *)(to->first + c * to->stride) = x[c];
        }
        return;
    }
    for (int64_t c = 0; c < to->channels; c++) {
        store_element(to->first + c * to->stride, to->element, 0, load_element(row, given, c));
    }
}

/* Writes the inputs after the first `skipped` ones of the window and the step's first `tokens`
 * tokens to a slot's window. No entry is written before it has been read. */
static void roll_window(const struct gdn *gdn, const struct gdn_request *request, int32_t slot,
                        int64_t tokens, int64_t skipped, int64_t channel, int64_t end)
{
    const struct attn_tensor *mixed = gdn->io->mixed_qkv;
    const int32_t given = element_of_any(mixed);
    const int64_t history = gdn->desc->conv_width - 1, from = request->from + skipped;
    const int64_t kept = history > skipped ? history - skipped : 0;
    const int64_t first_tile = tokens + history - skipped - kept;
    struct entries to = {.first = window_of(gdn, slot, channel),
                         .stride = gdn->args->v_cache->stride_head,
                         .channels = end - channel,
                         .element = element_of_dtype(gdn->args->layer->dtype)};
    const int64_t bytes = element_bytes[to.element];
    const char *before = window_of(gdn, request->window_from, channel);
    if (request->has_state && from == first_tile && to.stride == (kept + first_tile) * bytes) {
        /* one run of memory, of which all moves by as many places */
        memmove(to.first, before + from * bytes, (size_t)(to.channels * to.stride - from * bytes));
    } else {
        keep_entries(&to, request->has_state ? before + from * bytes : NULL, kept);
    }
    to.first += kept * bytes;
    for (int64_t i = 0; i < first_tile; i++, to.first += bytes) {
        const char *row = tensor_row(mixed, request->first_row + tokens - first_tile + i, 0);
        fill_entries(&to, row + channel * element_bytes[given], given);
    }
}

/* With h the conv_width - 1 inputs before the step and x its own, the window becomes the last
 * conv_width - 1 of (h, x); a speculative step keeps (h, x) without its first, so that the window
 * after token i begins at entry i. */
void gdn_roll_windows(const struct gdn *gdn, const struct gdn_request *request, int64_t channel,
                      int64_t end)
{
    int64_t tokens = request->num_tokens;
    int32_t interval = gdn->desc->checkpoint_interval;
    for (int64_t done = gdn_first_checkpoint(gdn, request); done <= tokens; done += interval) {
        int32_t slot = gdn_checkpoint_slot(gdn, request, done); /* first: of the window before */
        if (slot >= 0) {
            roll_window(gdn, request, slot, done, done, channel, end);
        }
    }
    int64_t skipped = request->keeps_all ? 1 : tokens;
    roll_window(gdn, request, request->slots[0], tokens, skipped, channel, end);
}

/* Bits of a number of 16 that x becomes by r (attn_recurrent_rounding). */
static uint16_t round_by(float x, int32_t element, uint32_t r)
{
    const bool f16 = element == ELEMENT_F16;
    const uint32_t bits = number_bits(x), size = bits & 0x7fffffff;
    if (size > (f16 ? 0x477fe000 : 0x7f7f0000)) { /* the largest finite number */
        return f16 ? number_to_f16(x) : number_to_bf16(x);
    }
    const uint32_t code = !f16                ? (size + r) >> 16
                          : size < 0x38800000 ? ((uint32_t)(fabsf(x) * 0x1p40f) + r) >> 16
                                              : ((size + (r >> 3)) >> 13) - (112 << 10);
    return (uint16_t)(code | (bits >> 16 & 0x8000));
}

void gdn_store_state(const struct gdn *gdn, int32_t head, int32_t row, int64_t tokens,
                     const float *from, void *to)
{
    const int32_t element = element_of_dtype(gdn->desc->state_dtype);
    uint32_t r[8];
    if (gdn->rounding == NULL) {
        gdn_variant(gdn)->store[element](to, from, 1.0f, gdn->desc->head_size_k);
        return;
    }
    for (int32_t i = 0; i < gdn->desc->head_size_k; i++) {
        if (i % 8 == 0) {
            gdn_random(gdn, head, row, tokens, i, r);
        }
        ((uint16_t *)to)[i] = round_by(from[i], element, r[i % 8]);
    }
}
