/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of nvfp4, mxfp4, TurboQuant, fp8_ds_mla and fp8_ds_v4. Values of nvfp4, 2 bits times the 4
 * of a scale, and of mxfp4, whose scales are powers of two, are exact in bf16. TurboQuant's rows
 * are computed in float32: a key stays rotated by Hadamard's matrix H, as its query is, and equals
 * levels times norm / sqrt(D sum of their squares); a value is code step + zero. */
#include <float.h>
#include <math.h>

#include "common/turboquant.h"
#include "cpu_simd/internal.h"

#define NVFP4_BLOCK 16
#define NVFP4_LARGEST 6
#define DS_LATENT 512 /* fp8_ds_mla: e4m3 in tiles of 128, a float32 scale for each, then bf16 */
#define DS_TILE 128
#define DS_ROPE 64
#define DS_ROPE_AT 528
#define V4_LATENT 448 /* fp8_ds_v4: e4m3 in tiles of 64, bf16; scales of e8m0 apart */
#define V4_TILE 64
#define V4_LEAST 1e-4
#define MXFP4_BLOCK 32 /* scales of e8m0 apart */
#define MXFP4_LEAST (6 * (double)FLT_MIN)

#define LEVELS_OF(...)                                                                             \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
static const float levels_3[] = LEVELS_OF(TURBOQUANT_LEVELS_3);
static const float levels_4[] = LEVELS_OF(TURBOQUANT_LEVELS_4);

/* The level of each code, those below 0 too. */
static void find_levels(int32_t bits, float *levels)
{
    const float *above = bits == 3 ? levels_3 : levels_4;
    int32_t half = 1 << (bits - 1);
    for (int32_t i = 0; i < half; i++) {
        levels[half + i] = above[i];
        levels[half - 1 - i] = -above[i];
    }
}

int32_t code_row_bytes(const struct row_form *form, int32_t n)
{
    switch (form->coding) {
    case CODING_LEVELS:
    case CODING_STEPS:
        return (n * form->bits + 7) / 8;
    case CODING_NVFP4:
    case CODING_MXFP4:
        return n / 2;
    case CODING_BLOCKS:
        return n / BLOCK_ELEMENTS * (form->bits == 8 ? BLOCK_BYTES_8 : BLOCK_BYTES_4);
    case CODING_DS_V4:
        return V4_LATENT + 2 * DS_ROPE;
    default:
        return form->nibbles ? (n + 1) / 2 : n * element_bytes[form->element];
    }
}

static float load_f16(const struct variant *variant, const uint8_t *memory)
{
    uint16_t half;
    float value;
    memcpy(&half, memory, sizeof half);
    variant->f32->unpack[ELEMENT_F16](&value, &half, 1);
    return value;
}

static void store_f16(uint8_t *memory, double x)
{
    const double most = TURBOQUANT_LARGEST;
    uint16_t half = number_to_f16(isnan(x) ? x : fmax(-most, fmin(most, x)));
    memcpy(memory, &half, sizeof half);
}

/* Address of block scale s of a row: keys' scales are in order, values' are swizzled within groups
 * of 4 slots. */
static int64_t nvfp4_scale_at(bool is_v, int32_t n, int32_t slot, int32_t s, int64_t stride_slot)
{
    int32_t quarter = n / NVFP4_BLOCK / 4;
    return is_v ? (s / quarter - slot) * stride_slot + s % quarter * 4 + slot : s;
}

static void load_nvfp4(const struct variant *variant, const struct coded_row *row,
                       const int8_t *codes, float *out)
{
    uint8_t packed[MAX_HEAD_SIZE / NVFP4_BLOCK];
    float scales[MAX_HEAD_SIZE / NVFP4_BLOCK];
    int32_t count = row->n / NVFP4_BLOCK;
    for (int32_t s = 0; s < count; s++) {
        packed[s] = row->kept[nvfp4_scale_at(row->is_v, row->n, row->slot, s, row->stride_slot)];
    }
    variant->f32->unpack[ELEMENT_E4M3](scales, packed, count);
    variant->codes->e2m1(out, codes, scales, NVFP4_BLOCK, row->n);
}

float number_of_e8m0(uint8_t code)
{
    return code == 255 ? NAN : ldexpf(1, code - 127);
}

static void load_mxfp4(const struct variant *variant, const struct coded_row *row,
                       const int8_t *codes, float *out)
{
    float scales[MAX_HEAD_SIZE / MXFP4_BLOCK];
    for (int32_t s = 0; s < row->n / MXFP4_BLOCK; s++) {
        scales[s] = number_of_e8m0(row->kept[s]);
    }
    variant->codes->e2m1(out, codes, scales, MXFP4_BLOCK, row->n);
}

/* The first `count` elements, up to 512 or all. */
static void ds_mla_load(const struct variant *variant, const char *memory, float *row,
                        int32_t count)
{
    for (int32_t d = 0; d < count && d < DS_LATENT; d += DS_TILE) {
        float scale;
        memcpy(&scale, memory + DS_LATENT + d / DS_TILE * (int32_t)sizeof scale, sizeof scale);
        variant->f32->unpack[ELEMENT_E4M3](row + d, memory + d, DS_TILE);
        variant->scale_row(row + d, scale, DS_TILE);
    }
    if (count > DS_LATENT) {
        variant->f32->unpack[ELEMENT_BF16](row + DS_LATENT, memory + DS_ROPE_AT, count - DS_LATENT);
    }
}

static void ds_v4_load(const struct variant *variant, const char *memory, const uint8_t *scales,
                       float *row)
{
    for (int32_t d = 0; d < V4_LATENT; d += V4_TILE) {
        variant->f32->unpack[ELEMENT_E4M3](row + d, memory + d, V4_TILE);
        variant->scale_row(row + d, number_of_e8m0(scales[d / V4_TILE]), V4_TILE);
    }
    variant->f32->unpack[ELEMENT_BF16](row + V4_LATENT, memory + V4_LATENT, DS_ROPE);
}

float coded_row_load(const struct variant *variant, const struct coded_row *row, float *out)
{
    int8_t codes[MAX_HEAD_SIZE];
    float levels[16];
    if (row->coding == CODING_DS_MLA) {
        ds_mla_load(variant, row->codes, out, row->n);
        return 1.0f;
    }
    if (row->coding == CODING_DS_V4) {
        ds_v4_load(variant, row->codes, row->kept, out);
        return 1.0f;
    }
    if (row->bits != 3) {
        int4_codes(variant, codes, row->codes, row->n, row->pack, row->stride_pack, 0);
    } else {
        variant->codes->threes(codes, (const uint8_t *)row->codes, row->n);
    }
    if (row->coding == CODING_NVFP4) {
        load_nvfp4(variant, row, codes, out);
        return 1.0f;
    }
    if (row->coding == CODING_MXFP4) {
        load_mxfp4(variant, row, codes, out);
        return 1.0f;
    }
    if (row->coding == CODING_STEPS) {
        variant->codes->steps(out, codes, load_f16(variant, row->kept),
                              load_f16(variant, row->kept + 2), row->n);
        return 1.0f;
    }
    find_levels(row->bits, levels);
    float squares = variant->codes->levels(out, codes, levels, row->n);
    return load_f16(variant, row->kept) / sqrtf(squares * (float)row->n);
}

void coded_row_read(const struct row_place *at, float *values)
{
    const struct attn_kv_view *view = at->view;
    const struct coded_row row = {
        .coding = at->form->coding,
        .bits = at->form->bits,
        .is_v = at->is_v,
        .n = view->head_size,
        .pack = view->pack > 0 ? view->pack : view->head_size,
        .stride_pack = view->stride_pack,
        .codes = view_row(view, at->block, at->slot, at->head),
        .kept = (const uint8_t *)view_scale(view, at->block, at->slot, at->head),
        .stride_slot = view->scale_stride_slot,
        .slot = (int32_t)(at->slot % 4)};
    float scale = coded_row_load(at->variant, &row, values);
    if (row.coding == CODING_LEVELS) {
        at->variant->hadamard(values, row.n);
        for (int32_t d = 0; d < row.n; d++) {
            values[d] *= scale;
        }
    }
}

/* The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, halves to even codes; NaN to 6. */
static uint8_t e2m1_of(double x)
{
    double size = fabs(x);
    int32_t below = (size <= 0.25) + (size < 0.75) + (size <= 1.25) + (size < 1.75) +
                    (size <= 2.5) + (size < 3.5) + (size <= 5);
    return (uint8_t)((7 - below) | (signbit(x) ? 8 : 0));
}

uint8_t nvfp4_block(const float *x, double global, double largest, uint8_t *packed)
{
    uint8_t code = number_to_e4m3(global * largest / NVFP4_LARGEST);
    double scale = (double)number_from_e4m3(code);
    bool none = scale == 0 || isnan(scale);
    for (int32_t i = 0; i < NVFP4_BLOCK; i += 2) {
        double low = none ? 0 : (double)x[i] * global / scale;
        double high = none ? 0 : (double)x[i + 1] * global / scale;
        packed[i / 2] = (uint8_t)(e2m1_of(low) | e2m1_of(high) << 4);
    }
    return code;
}

static void write_nvfp4(const struct row_place *at, const float *values, char *memory,
                        uint8_t *kept)
{
    const struct attn_kv_view *view = at->view;
    const struct attn_layer_params *p = at->params;
    uint8_t codes[MAX_HEAD_SIZE / 2];
    double scale = at->is_v ? scale_of_head(p->v_scale, p->v_scale_host, ATTN_SCALE_PER_TENSOR, 0)
                            : scale_of_head(p->k_scale, p->k_scale_host, ATTN_SCALE_PER_TENSOR, 0);
    for (int32_t s = 0; s < view->head_size / NVFP4_BLOCK; s++) {
        const float *x = values + s * NVFP4_BLOCK;
        double largest = (double)at->variant->codes->largest(x, NVFP4_BLOCK);
        uint8_t code = nvfp4_block(x, 1 / scale, largest, codes + s * NVFP4_BLOCK / 2);
        kept[nvfp4_scale_at(at->is_v, view->head_size, (int32_t)(at->slot % 4), s,
                            view->scale_stride_slot)] = code;
    }
    nibbles_write(view, memory, codes);
}

/* The least power of two in e8m0 with magnitudes of `largest` up to `limit`; 255 of NaN. */
static uint8_t e8m0_of(double largest, double limit)
{
    int exponent;
    const double mantissa = frexp(largest / limit, &exponent);
    return isnan(largest)   ? 255
           : isinf(largest) ? 254
                            : (uint8_t)(exponent - (mantissa == 0.5) + 127);
}

static void write_mxfp4(const struct row_place *at, const float *values, char *memory,
                        uint8_t *kept)
{
    uint8_t codes[MAX_HEAD_SIZE / 2];
    for (int32_t first = 0; first < at->view->head_size; first += MXFP4_BLOCK) {
        const double largest = (double)at->variant->codes->largest(values + first, MXFP4_BLOCK);
        const uint8_t code = e8m0_of(largest < MXFP4_LEAST ? MXFP4_LEAST : largest, 6);
        kept[first / MXFP4_BLOCK] = code;
        for (int32_t d = first; d < first + MXFP4_BLOCK; d += 2) {
            const double scale = ldexp(1, code - 127);
            codes[d / 2] = code == 255 ? 0
                                       : (uint8_t)(e2m1_of((double)values[d] / scale) |
                                                   e2m1_of((double)values[d + 1] / scale) << 4);
        }
    }
    nibbles_write(at->view, memory, codes);
}

/* A code a byte to `bits` a code. */
static void pack_codes(const uint8_t *codes, int32_t bits, int32_t n, uint8_t *packed)
{
    for (int32_t i = 0; i < n / 8; i++, packed += bits) {
        uint64_t all = 0;
        for (int32_t d = 0; d < 8; d++) {
            all |= (uint64_t)codes[8 * i + d] << d * bits;
        }
        memcpy(packed, &all, (size_t)bits); /* little-endian, as all that we run on */
    }
}

static void write_levels(const struct row_place *at, const float *values, char *memory,
                         uint8_t *kept)
{
    int32_t n = at->view->head_size, bits = at->form->bits, half = 1 << (bits - 1);
    const float *above = bits == 3 ? levels_3 : levels_4;
    uint8_t codes[MAX_HEAD_SIZE];
    double halfway[8];
    for (int32_t i = 0; i + 1 < half; i++) {
        halfway[i] = ((double)above[i] + (double)above[i + 1]) / 2;
    }
    double norm = at->variant->codes->encode_levels(codes, values, halfway, bits, n);
    store_f16(kept, norm);
    if (!isnan(norm)) {
        pack_codes(codes, bits, n, (uint8_t *)memory);
    }
}

static void write_steps(const struct row_place *at, const float *values, char *memory,
                        uint8_t *kept)
{
    int32_t n = at->view->head_size, bits = at->form->bits;
    float low = values[0], high = values[0];
    uint8_t codes[MAX_HEAD_SIZE];
    for (int32_t d = 0; d < n; d++) {
        low = values[d] < low ? values[d] : low;
        high = values[d] > high ? values[d] : high;
    }
    bool finite = isfinite(at->variant->codes->largest(values, n));
    double most = (1 << bits) - 1;
    double step = fmax(((double)high - (double)low) / most, TURBOQUANT_STEP);
    store_f16(kept, finite ? step : NAN);
    store_f16(kept + 2, finite ? (double)low + 0.0 : NAN); /* no -0 */
    for (int32_t d = 0; d < n && finite; d++) {
        codes[d] = (uint8_t)fmin(((double)values[d] - (double)low) / step + 0.5, most);
    }
    if (finite) {
        pack_codes(codes, bits, n, (uint8_t *)memory);
    }
}

static void write_ds_mla(const struct row_place *at, const float *row, char *memory, uint8_t *kept)
{
    const struct variant *variant = at->variant;
    for (int32_t d = 0; d < DS_LATENT; d += DS_TILE) {
        double exact = variant->codes->largest(row + d, DS_TILE) / E4M3_LARGEST;
        float scale = exact < FLT_MIN ? FLT_MIN : (float)exact;
        memcpy(memory + DS_LATENT + d / DS_TILE * (int32_t)sizeof scale, &scale, sizeof scale);
        variant->codes->encode[ELEMENT_E4M3](memory + d, row + d, scale, NULL, DS_TILE);
    }
    variant->store[ELEMENT_BF16](memory + DS_ROPE_AT, row + DS_LATENT, 1.0f, DS_ROPE);
}

static void write_ds_v4(const struct row_place *at, const float *row, char *memory, uint8_t *kept)
{
    const struct variant *variant = at->variant;
    kept[V4_LATENT / V4_TILE] = 0;
    for (int32_t d = 0; d < V4_LATENT; d += V4_TILE) {
        const double largest = (double)variant->codes->largest(row + d, V4_TILE);
        const uint8_t code = e8m0_of(largest < V4_LEAST ? V4_LEAST : largest, E4M3_LARGEST);
        kept[d / V4_TILE] = code;
        variant->codes->encode[ELEMENT_E4M3](memory + d, row + d, ldexpf(1, code - 127), NULL,
                                             V4_TILE);
    }
    variant->store[ELEMENT_BF16](memory + V4_LATENT, row + V4_LATENT, 1.0f, DS_ROPE);
}

void coded_row_write(const struct row_place *at, const float *values)
{
    static void (*const writers[])(const struct row_place *, const float *, char *, uint8_t *) = {
        [CODING_NVFP4] = write_nvfp4, [CODING_LEVELS] = write_levels,
        [CODING_STEPS] = write_steps, [CODING_DS_MLA] = write_ds_mla,
        [CODING_DS_V4] = write_ds_v4, [CODING_MXFP4] = write_mxfp4};
    const struct attn_kv_view *view = at->view;
    writers[at->form->coding](at, values, view_row(view, at->block, at->slot, at->head),
                              (uint8_t *)view_scale(view, at->block, at->slot, at->head));
}
