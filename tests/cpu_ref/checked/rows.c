/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of every cache from their formats' definitions: the bytes that a row of numbers becomes, and
 * the numbers that bytes read as. */
#include <float.h>
#include <math.h>
#include <string.h>

#include "checked.h"
#include "support/kv_format.h"
#include "support/number.h"

#define MAX_DIMS 576
#define LEAST_SCALE 1e-6

/* A row as it lies in memory, its pieces put together. */
struct bytes {
    _Alignas(8) uint8_t data[4 * MAX_DIMS];
    _Alignas(8) uint8_t scale[MAX_DIMS / 16];
};

static int32_t data_bytes(const struct cache_row *row)
{
    return (int32_t)kv_row_bytes(layer_dtype(row->layer, row->value), row->value,
                                 row->view->head_size);
}

static int32_t scale_bytes(const struct cache_row *row)
{
    return kv_scale_bytes(layer_dtype(row->layer, row->value), row->value, row->view->head_size);
}

static uint8_t *data_at(const struct cache_row *row, const struct kv_format *f, int32_t i)
{
    const struct attn_kv_view *view = row->view;
    int32_t pack = view->pack > 0 ? view->pack * f->bits / 8 : 1 << 30;
    return (uint8_t *)view->data + row->block * view->stride_block + row->slot * view->stride_slot +
           row->head * view->stride_head + i / pack * view->stride_pack + i % pack;
}

/* Block scales of nvfp4 values are swizzled within groups of 4 slots. */
static uint8_t *scale_at(const struct cache_row *row, const struct kv_format *f, int32_t i)
{
    const struct attn_kv_view *view = row->view;
    int64_t slot = row->slot;
    if (f->form == KV_FORM_NVFP4 && row->value) {
        int32_t quarter = view->head_size / 64;
        slot = row->slot / 4 * 4 + i / quarter;
        i = (int32_t)(i % quarter * 4 + row->slot % 4);
    }
    return (uint8_t *)view->scale + row->block * view->scale_stride_block +
           slot * view->scale_stride_slot + row->head * view->scale_stride_head + i;
}

static double largest_of(const double *x, int32_t count)
{
    double largest = 0;
    for (int32_t d = 0; d < count; d++) {
        largest = fmax(largest, fabs(x[d]));
    }
    return largest;
}

static double half_away(double x)
{
    return x < 0 ? -floor(0.5 - x) : floor(x + 0.5);
}

static double within(double x, double low, double high)
{
    return fmax(low, fmin(high, x));
}

/* Sylvester's matrix times x: H of twice the size is [H H; H -H]. */
static void turn(double *x, int32_t count)
{
    for (int32_t half = 1; half < count; half *= 2) {
        for (int32_t i = 0; i < count; i++) {
            if ((i & half) == 0) {
                double a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
        }
    }
}

/* Code d of `bits` in a string of bits, the lowest first. */
static uint32_t code_at(const uint8_t *data, int32_t d, int32_t bits)
{
    uint32_t code = 0;
    for (int32_t i = 0; i < bits; i++) {
        int32_t at = d * bits + i;
        code |= (uint32_t)(data[at / 8] >> at % 8 & 1) << i;
    }
    return code;
}

static void set_code(uint8_t *data, int32_t d, int32_t bits, uint32_t code)
{
    for (int32_t i = 0; i < bits; i++) {
        int32_t at = d * bits + i;
        data[at / 8] = (uint8_t)(data[at / 8] | (code >> i & 1) << at % 8);
    }
}

static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

double number_from_e2m1(uint32_t code)
{
    return code & 8 ? -e2m1[code & 7] : e2m1[code];
}

uint32_t number_to_e2m1(double x)
{
    uint32_t best = 0;
    for (uint32_t code = 1; code < 8; code++) {
        double away = fabs(fabs(x) - e2m1[code]) - fabs(fabs(x) - e2m1[best]);
        best = away < 0 || (away == 0 && code % 2 == 0) ? code : best;
    }
    return best | (signbit(x) ? 8u : 0);
}

/* Level of a code: those of a normal distribution by 200 rounds of Lloyd's iteration over 10.5
 * deviations, as caches in use have them (within 0.1 % of Max 1960), and their negatives below. */
static double level(uint32_t code, int32_t bits)
{
    static const float levels[2][8] = {{0.24498359f, 0.7556455f, 1.34318f, 2.15034954f},
                                       {0.12842766f, 0.38813779f, 0.65687992f, 0.94244824f,
                                        1.25625757f, 1.61788176f, 2.06844712f, 2.73092222f}};
    int32_t half = 1 << (bits - 1), i = (int32_t)code - half;
    return i >= 0 ? levels[bits - 3][i] : -levels[bits - 3][-1 - i];
}

static const struct attn_kv_quant_params *quant_of(const struct cache_row *row)
{
    return extension(row->params->next, ATTN_EXT_KV_QUANT_PARAMS);
}

static double tensor_scale(const struct cache_row *row, int32_t form)
{
    const struct attn_layer_params *p = row->params;
    return row->value ? head_scale(p->v_scale, p->v_scale_host, form, row->head)
                      : head_scale(p->k_scale, p->k_scale_host, form, row->head);
}

/* TurboQuant's and int8_k's plain rows have no scale. */
static double number_scale(const struct cache_row *row)
{
    bool scaled = layer_dtype(row->layer, row->value) <= ATTN_KV_FP8_E4M3FNUZ;
    return scaled
               ? tensor_scale(row, row->value ? row->layer->v_scale_form : row->layer->k_scale_form)
               : 1;
}

static double element_scale(const struct cache_row *row, const struct kv_format *f,
                            const struct bytes *b, int32_t d)
{
    float scale;
    memcpy(&scale, b->scale, sizeof scale);
    return f->form == KV_FORM_SCALED
               ? scale
               : quant_of(row)->v_channel_scale[row->head * row->view->head_size + d];
}

static void write_turned(const struct cache_row *row, const struct kv_format *f,
                         const double *given, struct bytes *b)
{
    int32_t dims = row->view->head_size;
    const struct attn_kv_quant_params *quant = quant_of(row);
    double x[MAX_DIMS], low = INFINITY, high = -INFINITY, norm = 0;
    for (int32_t d = 0; d < dims; d++) {
        x[d] = given[d];
        norm += x[d] * x[d];
        if (f->form == KV_FORM_HADAMARD) {
            x[d] *= (row->value ? quant->hadamard_signs_v : quant->hadamard_signs_k)[d];
        }
    }
    norm = sqrt(norm);
    turn(x, dims);
    for (int32_t d = 0; d < dims; d++) {
        low = fmin(low, x[d]);
        high = fmax(high, x[d]);
    }
    float scale = (float)fmax((high - low) / 15, LEAST_SCALE);
    uint32_t zero = (uint32_t)within(half_away(-low / scale), 0, 15), bits;
    memcpy(&bits, &scale, sizeof bits);
    bits = (bits & ~15u) | zero;
    if (f->form == KV_FORM_HADAMARD) {
        memcpy(b->scale, &bits, sizeof bits);
    } else {
        number_store(b->scale, 0, ATTN_DTYPE_F16, norm);
    }
    for (int32_t d = 0; d < dims; d++) {
        uint32_t code = (uint32_t)within(half_away(x[d] / scale) + zero, 0, 15);
        /* a unit row, rotated by H / sqrt(D), in units of 1 / sqrt(D) */
        if (f->form == KV_FORM_LEVELS) {
            code = 0;
            for (uint32_t c = 1; c < 1u << f->bits; c++) {
                code += x[d] / (norm + 1e-8) >= (level(c - 1, f->bits) + level(c, f->bits)) / 2;
            }
        }
        set_code(b->data, d, f->bits, code);
    }
}

static void write_steps(const struct cache_row *row, const struct kv_format *f, const double *x,
                        struct bytes *b)
{
    int32_t most = (1 << f->bits) - 1;
    double low = x[0], high = x[0];
    for (int32_t d = 0; d < row->view->head_size; d++) {
        low = fmin(low, x[d]);
        high = fmax(high, x[d]);
    }
    double step = fmax((high - low) / most, 1e-8);
    number_store(b->scale, 0, ATTN_DTYPE_F16, step);
    number_store(b->scale, 1, ATTN_DTYPE_F16, low + 0.0); /* no -0 */
    for (int32_t d = 0; d < row->view->head_size; d++) {
        set_code(b->data, d, f->bits, (uint32_t)fmin(floor((x[d] - low) / step + 0.5), most));
    }
}

/* A step, then codes; float32 throughout, as in ggml. */
static void write_blocks(const struct cache_row *row, const struct kv_format *f, const double *x,
                         struct bytes *b)
{
    uint8_t *to = b->data;
    for (int32_t d = 0; d < row->view->head_size; d += KV_BLOCK, to += 2 + 4 * f->bits) {
        float largest = 0;
        for (int32_t i = 0; i < KV_BLOCK; i++) {
            largest = fabs(x[d + i]) > fabs(largest) ? (float)x[d + i] : largest;
        }
        float step = f->bits == 8 ? fabsf(largest) / 127 : largest / -8;
        float inverse = step != 0 ? 1 / step : 0;
        number_store(to, 0, ATTN_DTYPE_F16, step);
        for (int32_t i = 0; i < KV_BLOCK; i++) {
            float scaled = (float)x[d + i] * inverse;
            if (f->bits == 8) {
                to[2 + i] = (uint8_t)(int8_t)lroundf(scaled);
            } else {
                int32_t code = (int32_t)within(floor(scaled + 8.5f), 0, 15);
                to[2 + i % 16] = (uint8_t)(to[2 + i % 16] | code << i / 16 * 4);
            }
        }
    }
}

/* 512 e4m3 in tiles of 128, whose scales make each tile's largest 448, and 64 bf16. */
static void write_ds_mla(const double *x, struct bytes *b)
{
    for (int32_t d = 0; d < 512; d++) {
        float scale = (float)fmax(largest_of(x + d / 128 * 128, 128) / 448, FLT_MIN);
        memcpy(b->data + 512 + d / 128 * 4, &scale, sizeof scale);
        number_store(b->data, d, ATTN_DTYPE_FP8_E4M3, x[d] / scale);
    }
    for (int32_t d = 0; d < 64; d++) {
        number_store(b->data + 528, d, ATTN_DTYPE_BF16, x[512 + d]);
    }
}

/* 448 e4m3 in tiles of 64, whose scales are the least powers of two under which a tile's largest is
 * no more than 448, and 64 bf16. */
static void write_ds_v4(const double *x, struct bytes *b)
{
    for (int32_t d = 0; d < 448; d++) {
        const double largest = fmax(largest_of(x + d / 64 * 64, 64), 1e-4);
        int32_t exponent = -127;
        while (largest > 448 * exp2(exponent)) {
            exponent++;
        }
        b->scale[d / 64] = (uint8_t)(exponent + 127);
        number_store(b->data, d, ATTN_DTYPE_FP8_E4M3, x[d] / exp2(exponent));
    }
    for (int32_t d = 0; d < 64; d++) {
        number_store(b->data + 448, d, ATTN_DTYPE_BF16, x[448 + d]);
    }
}

static void write_row(const struct cache_row *row, const struct kv_format *f, const double *x,
                      struct bytes *b)
{
    int32_t dims = row->view->head_size;
    double global = tensor_scale(row, ATTN_SCALE_PER_TENSOR);
    float scale =
        (float)fmax(largest_of(x, dims) / (f->number == ATTN_DTYPE_INT8 ? 127 : 448), LEAST_SCALE);
    memset(b, 0, sizeof *b);
    switch (f->form) {
    case KV_FORM_SCALED:
        memcpy(b->scale, &scale, sizeof scale);
        for (int32_t d = 0; d < dims && f->number == ATTN_DTYPE_FP8_E4M3; d++) {
            number_store(b->data, d, ATTN_DTYPE_FP8_E4M3, x[d] / scale);
        }
        if (f->number == ATTN_DTYPE_FP8_E4M3) {
            break;
        }
        /* fall through */
    case KV_FORM_CHANNELS:
        for (int32_t d = 0; d < dims; d++) {
            double code = half_away(x[d] / element_scale(row, f, b, d));
            b->data[d] = (uint8_t)(int8_t)within(code, -127, 127);
        }
        break;
    case KV_FORM_NVFP4:
        for (int32_t d = 0; d < dims; d++) {
            double block = largest_of(x + d / 16 * 16, 16) * (1 / global) / 6;
            number_store(b->scale, d / 16, ATTN_DTYPE_FP8_E4M3, block);
            block = number_round(block, ATTN_DTYPE_FP8_E4M3);
            set_code(b->data, d, 4, block == 0 ? 0 : number_to_e2m1(x[d] * (1 / global) / block));
        }
        break;
    case KV_FORM_DS_MLA:
        write_ds_mla(x, b);
        break;
    case KV_FORM_DS_V4:
        write_ds_v4(x, b);
        break;
    case KV_FORM_STEPS:
        write_steps(row, f, x, b);
        break;
    case KV_FORM_BLOCKS:
        write_blocks(row, f, x, b);
        break;
    default:
        write_turned(row, f, x, b);
    }
}

static void read_turned(const struct cache_row *row, const struct kv_format *f,
                        const struct bytes *b, double *x)
{
    int32_t dims = row->view->head_size;
    const struct attn_kv_quant_params *quant = quant_of(row);
    uint32_t bits;
    float scale;
    double length = 0;
    memcpy(&bits, b->scale, sizeof bits);
    int32_t zero = (int32_t)(bits & 15);
    bits &= ~15u;
    memcpy(&scale, &bits, sizeof scale);
    for (int32_t d = 0; d < dims; d++) {
        uint32_t code = code_at(b->data, d, f->bits);
        x[d] = f->form == KV_FORM_HADAMARD ? (double)scale * ((int32_t)code - zero)
                                           : level(code, f->bits);
        length += x[d] * x[d];
    }
    turn(x, dims);
    for (int32_t d = 0; d < dims; d++) {
        x[d] *= f->form == KV_FORM_HADAMARD
                    ? (row->value ? quant->hadamard_signs_v : quant->hadamard_signs_k)[d] / dims
                    : number_load(b->scale, 0, ATTN_DTYPE_F16) / sqrt(length) / sqrt(dims);
    }
}

static double read_element(const struct cache_row *row, const struct kv_format *f,
                           const struct bytes *b, int32_t d)
{
    const uint8_t *block = b->data + d / KV_BLOCK * (2 + 4 * f->bits);
    uint32_t code = f->bits < 8 ? code_at(b->data, d, f->bits) : b->data[d];
    switch (f->form) {
    case KV_FORM_SCALED:
        return number_load(b->data, d, f->number) * element_scale(row, f, b, d);
    case KV_FORM_CHANNELS:
        return (int8_t)code * element_scale(row, f, b, d);
    case KV_FORM_NVFP4:
        return number_from_e2m1(code) * number_load(b->scale, d / 16, ATTN_DTYPE_FP8_E4M3) *
               tensor_scale(row, ATTN_SCALE_PER_TENSOR);
    case KV_FORM_DS_MLA:
        return d < 512 ? number_load(b->data, d, ATTN_DTYPE_FP8_E4M3) *
                             number_load(b->data + 512, d / 128, ATTN_DTYPE_F32)
                       : number_load(b->data + 528, d - 512, ATTN_DTYPE_BF16);
    case KV_FORM_DS_V4:
        return d < 448
                   ? number_load(b->data, d, ATTN_DTYPE_FP8_E4M3) * ldexp(1, b->scale[d / 64] - 127)
                   : number_load(b->data + 448, d - 448, ATTN_DTYPE_BF16);
    case KV_FORM_STEPS:
        return code * number_load(b->scale, 0, ATTN_DTYPE_F16) +
               number_load(b->scale, 1, ATTN_DTYPE_F16);
    default: /* KV_FORM_BLOCKS */
        code = f->bits == 8 ? block[2 + d % KV_BLOCK]
                            : block[2 + d % 16] >> d % KV_BLOCK / 16 * 4 & 15;
        return (f->bits == 8 ? (int8_t)code : (int32_t)code - 8) *
               number_load(block, 0, ATTN_DTYPE_F16);
    }
}

static const struct kv_format *format_of(const struct cache_row *row, struct kv_format *own)
{
    *own = *kv_format(layer_dtype(row->layer, row->value), row->value);
    if (own->form == KV_FORM_NUMBERS && own->number == 0) {
        own->number = row->layer->dtype;
        own->bits = 8 * (int32_t)number_bytes(own->number);
    }
    return own;
}

void row_load(const struct cache_row *row, double *x)
{
    static struct bytes b;
    struct kv_format own;
    const struct kv_format *f = format_of(row, &own);
    const int32_t bytes = data_bytes(row), scales = scale_bytes(row);
    for (int32_t d = 0; d < row->view->head_size && f->form == KV_FORM_NUMBERS; d++) {
        x[d] = number_load(data_at(row, f, d * f->bits / 8), 0, f->number) * number_scale(row);
    }
    if (f->form == KV_FORM_NUMBERS) {
        return;
    }
    for (int32_t i = 0; i < bytes; i++) {
        b.data[i] = *data_at(row, f, i);
    }
    for (int32_t i = 0; i < scales; i++) {
        b.scale[i] = *scale_at(row, f, i);
    }
    if (f->form == KV_FORM_HADAMARD || f->form == KV_FORM_LEVELS) {
        read_turned(row, f, &b, x);
        return;
    }
    for (int32_t d = 0; d < row->view->head_size; d++) {
        x[d] = read_element(row, f, &b, d);
    }
}

attn_status row_hold(const struct cache_row *row, int64_t token, const double *given,
                     struct attn_error *error)
{
    static struct bytes b;
    static double found[MAX_DIMS];
    struct kv_format own;
    const struct kv_format *f = format_of(row, &own);
    const int32_t bytes = data_bytes(row), scales = scale_bytes(row), dims = row->view->head_size;
    bool nan = false;
    row_load(row, found);
    for (int32_t d = 0; d < dims; d++) { /* a NaN shows; the codes next to it mean nothing */
        nan = nan || isnan(given[d]);
        if (isnan(given[d]) && !isnan(found[d])) {
            return checked_wrong(error, "cache", token, row->head, d, found[d], given[d]);
        }
    }
    for (int32_t d = 0; d < dims && f->form == KV_FORM_NUMBERS; d++) {
        const uint8_t *at = data_at(row, f, d * f->bits / 8);
        number_store(b.data, 0, f->number, given[d] / number_scale(row));
        if (!isnan(given[d]) && memcmp(at, b.data, (size_t)f->bits / 8) != 0) {
            return checked_wrong(error, "cache", token, row->head, d, found[d], given[d]);
        }
    }
    if (f->form == KV_FORM_NUMBERS || nan) {
        return ATTN_OK;
    }
    write_row(row, f, given, &b);
    for (int32_t i = 0; i < bytes; i++) {
        if (*data_at(row, f, i) != b.data[i]) {
            return checked_wrong(error, "bytes of the cache", token, row->head, i,
                                 *data_at(row, f, i), b.data[i]);
        }
    }
    for (int32_t i = 0; i < scales; i++) {
        if (*scale_at(row, f, i) != b.scale[i]) {
            return checked_wrong(error, "bytes of the scale", token, row->head, i,
                                 *scale_at(row, f, i), b.scale[i]);
        }
    }
    return ATTN_OK;
}
