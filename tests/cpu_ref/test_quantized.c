/* SPDX-License-Identifier: Apache-2.0 */
/* Caches whose rows carry scales: every byte that write_kv leaves and the attend over them, against
 * the formulas. Usage: test_quantized FILE.so */
#include <math.h>
#include <string.h>

#include "formats.h"
#include "harness.h"
#include "support/oracle.h"
#include "support/test.h"

#define SEED 99
#define BLOCKS 7
#define SLOTS 8
#define HEADS 2
#define QUERY_HEADS 4
#define DIMS 64
#define KEYS 21
#define QUERIES 6
#define ROW_BYTES (2 * DIMS + 8) /* the largest row and what may stand behind it */

static float v_channel[HEADS * DIMS], signs[2][DIMS];
static const float tensor_scale[2] = {0.02f, 0.035f};

/* What one row becomes: bytes of data, bytes of scale, and the values that a reader gets. */
struct quantized {
    uint8_t data[2 * DIMS];
    uint8_t scale[DIMS / 16 > 4 ? DIMS / 16 : 4];
    int32_t data_bytes, scale_bytes;
    double values[DIMS];
};

static double largest_of(const double *x, int32_t count)
{
    double largest = 0;
    for (int32_t d = 0; d < count; d++) {
        largest = fabs(x[d]) > largest ? fabs(x[d]) : largest;
    }
    return largest;
}

static double half_away(double x)
{
    return x < 0 ? -floor(0.5 - x) : floor(x + 0.5);
}

static void set_float_scale(struct quantized *row, float scale)
{
    memcpy(row->scale, &scale, 4);
    row->scale_bytes = 4;
}

static void quantize_int8(struct quantized *row, const double *x, const float *scales)
{
    float scale = (float)fmax(largest_of(x, DIMS) / 127, 1e-6);
    if (scales == NULL) {
        set_float_scale(row, scale);
    }
    for (int32_t d = 0; d < DIMS; d++) {
        double own = scales ? scales[d] : scale;
        double code = fmax(-127, fmin(127, half_away(x[d] / own)));
        row->data[d] = (uint8_t)(int8_t)code;
        row->values[d] = code * own;
    }
}

static void quantize_fp8(struct quantized *row, const double *x)
{
    float scale = (float)fmax(largest_of(x, DIMS) / 448, 1e-6);
    set_float_scale(row, scale);
    for (int32_t d = 0; d < DIMS; d++) {
        row->data[d] = (uint8_t)format_encode(ATTN_DTYPE_FP8_E4M3, x[d] / scale);
        row->values[d] = format_decode(ATTN_DTYPE_FP8_E4M3, row->data[d]) * scale;
    }
}

/* Element (i, j) of Sylvester's matrix. */
static int32_t sylvester(int32_t i, int32_t j)
{
    int32_t sign = 1;
    for (int32_t bits = i & j; bits; bits &= bits - 1) {
        sign = -sign;
    }
    return sign;
}

static void quantize_int4(struct quantized *row, const double *x, const float *sign)
{
    double turned[DIMS], low = 1e300, high = -1e300;
    int32_t codes[DIMS];
    for (int32_t i = 0; i < DIMS; i++) {
        turned[i] = 0;
        for (int32_t j = 0; j < DIMS; j++) {
            turned[i] += sylvester(i, j) * x[j] * sign[j];
        }
        low = fmin(low, turned[i]);
        high = fmax(high, turned[i]);
    }
    float scale = (float)fmax((high - low) / 15, 1e-6);
    int32_t zero = (int32_t)fmax(0, fmin(15, half_away(-low / scale)));
    uint32_t bits;
    float kept;
    memcpy(&bits, &scale, 4);
    bits &= ~15u;
    memcpy(&kept, &bits, 4);
    bits |= (uint32_t)zero;
    memcpy(row->scale, &bits, 4);
    row->scale_bytes = 4;
    row->data_bytes = DIMS / 2;
    for (int32_t i = 0; i < DIMS; i++) {
        codes[i] = (int32_t)fmax(0, fmin(15, half_away(turned[i] / scale) + zero));
        row->data[i / 2] = (uint8_t)(i % 2 ? row->data[i / 2] | codes[i] << 4 : codes[i]);
    }
    for (int32_t j = 0; j < DIMS; j++) {
        row->values[j] = 0;
        for (int32_t i = 0; i < DIMS; i++) {
            row->values[j] += sylvester(i, j) * (codes[i] - zero) * (double)kept * sign[j] / DIMS;
        }
    }
}

static void quantize_nvfp4(struct quantized *row, const double *x, double k_scale)
{
    row->data_bytes = DIMS / 2;
    row->scale_bytes = DIMS / 16;
    for (int32_t d = 0; d < DIMS; d++) {
        uint32_t block =
            format_encode(ATTN_DTYPE_FP8_E4M3, 1 / k_scale * largest_of(x + d / 16 * 16, 16) / 6);
        double scale = format_decode(ATTN_DTYPE_FP8_E4M3, block);
        uint32_t code = scale == 0 ? 0 : format_encode(FORMAT_E2M1, x[d] * (1 / k_scale) / scale);
        row->scale[d / 16] = (uint8_t)block;
        row->data[d / 2] = (uint8_t)(d % 2 ? row->data[d / 2] | code << 4 : code);
        row->values[d] = format_decode(FORMAT_E2M1, code) * scale * k_scale;
    }
}

/* Integrals of g and x g, g the normal density, over a .. b by 200 trapezoids. */
static void trapezoids(double a, double b, double *mass, double *moment)
{
    *mass = *moment = 0;
    for (int32_t i = 0; i <= 200; i++) {
        double x = a + (b - a) * i / 200, g = exp(-x * x / 2) * (i % 200 ? 1 : 0.5);
        *mass += g;
        *moment += x * g;
    }
}

/* Levels of a normal distribution by Lloyd's iteration: each the mean of what is nearest to it. */
static const double *lloyd_levels(int32_t bits)
{
    static const double published[2][8] = {
        {0.2451, 0.7560, 1.344, 2.152}, /* Max 1960 */
        {0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733}};
    static double levels[2][16];
    double *c = levels[bits - 3];
    int32_t count = 1 << bits;
    for (int32_t i = 0; i < count && c[count - 1] == 0; i++) {
        c[i] = -3.5 + 7 * (i + 0.5) / count;
    }
    for (int32_t round = 0; round < 200; round++) {
        double next[16], mass, moment;
        for (int32_t i = 0; i < count; i++) {
            trapezoids(i == 0 ? -10.5 : (c[i - 1] + c[i]) / 2,
                       i == count - 1 ? 10.5 : (c[i] + c[i + 1]) / 2, &mass, &moment);
            next[i] = moment / mass;
        }
        memcpy(c, next, sizeof *c * (size_t)count);
    }
    for (int32_t i = 0; i < count; i++) {
        c[i] = (float)c[i];
    }
    for (int32_t i = 0; i < count / 2; i++) {
        assert_true(fabs(c[count / 2 + i] / published[bits - 3][i] - 1) < 2e-3);
    }
    return c;
}

/* Codes of a row as one string of bits, the lowest first. */
static void set_codes(struct quantized *row, const int32_t *codes, int32_t bits)
{
    row->data_bytes = DIMS * bits / 8;
    for (int32_t i = 0; i < DIMS * bits; i++) {
        int32_t bit = codes[i / bits] >> i % bits & 1;
        row->data[i / 8] = (uint8_t)(row->data[i / 8] | bit << i % 8);
    }
}

static double set_half(uint8_t *to, double x)
{
    format_store(to, 0, ATTN_DTYPE_F16, x);
    return format_round(ATTN_DTYPE_F16, x);
}

static void quantize_turboquant_key(struct quantized *row, const double *x, int32_t bits)
{
    static const double *levels[5];
    int32_t codes[DIMS], count = 1 << bits;
    double norm = 0, length = 0;
    levels[bits] = levels[bits] ? levels[bits] : lloyd_levels(bits);
    for (int32_t d = 0; d < DIMS; d++) {
        norm += x[d] * x[d];
    }
    norm = sqrt(norm);
    for (int32_t i = 0; i < DIMS; i++) {
        double turned = 0;
        for (int32_t j = 0; j < DIMS; j++) {
            turned += sylvester(i, j) * x[j] / sqrt(DIMS) / (norm + 1e-8);
        }
        codes[i] = 0;
        for (int32_t c = 1; c < count; c++) { /* in units of N(0, 1 / D) */
            codes[i] += turned * sqrt(DIMS) >= (levels[bits][c - 1] + levels[bits][c]) / 2 - 1e-12;
        }
        length += levels[bits][codes[i]] * levels[bits][codes[i]];
    }
    set_codes(row, codes, bits);
    norm = set_half(row->scale, norm);
    row->scale_bytes = 2;
    for (int32_t j = 0; j < DIMS; j++) {
        row->values[j] = 0;
        for (int32_t i = 0; i < DIMS; i++) {
            row->values[j] +=
                sylvester(i, j) * levels[bits][codes[i]] / sqrt(length) / sqrt(DIMS) * norm;
        }
    }
}

static void quantize_turboquant_value(struct quantized *row, const double *x, int32_t bits)
{
    int32_t codes[DIMS], most = (1 << bits) - 1;
    double low = x[0], high = x[0];
    for (int32_t d = 0; d < DIMS; d++) {
        low = fmin(low, x[d]);
        high = fmax(high, x[d]);
    }
    double step = fmax((high - low) / most, 1e-8);
    double kept_step = set_half(row->scale, step),
           kept_low = set_half(row->scale + 2, low + 0.0); /* no -0 */
    row->scale_bytes = 4;
    for (int32_t d = 0; d < DIMS; d++) {
        codes[d] = (int32_t)fmin(floor((x[d] - low) / step + 0.5), most);
        row->values[d] = codes[d] * kept_step + kept_low;
    }
    set_codes(row, codes, bits);
}

/* Bits of a TurboQuant code: K's, V's. 8: an e4m3 number. */
static int32_t turboquant_code(int32_t kv_dtype, int32_t is_v)
{
    static const int32_t bits[][2] = {{8, 4}, {4, 4}, {3, 4}, {3, 3}};
    return kv_dtype < ATTN_KV_TURBOQUANT_K8V4 || kv_dtype > ATTN_KV_TURBOQUANT_3BIT_NC
               ? 0
               : bits[kv_dtype - ATTN_KV_TURBOQUANT_K8V4][is_v];
}

static void quantize_turboquant(struct quantized *row, int32_t bits, int32_t is_v, const double *x)
{
    if (is_v) {
        quantize_turboquant_value(row, x, bits);
        return;
    }
    if (bits < 8) {
        quantize_turboquant_key(row, x, bits);
        return;
    }
    for (int32_t d = 0; d < DIMS; d++) {
        row->data[d] = (uint8_t)format_encode(ATTN_DTYPE_FP8_E4M3, x[d]);
        row->values[d] = format_decode(ATTN_DTYPE_FP8_E4M3, row->data[d]);
    }
}

/* ggml's blocks of 32: a step, then codes; float32 throughout, as there. */
static void quantize_blocks(struct quantized *row, const double *x, int32_t bits)
{
    uint8_t *to = row->data;
    for (const double *b = x; b < x + DIMS; b += 32) {
        float largest = 0;
        for (int32_t i = 0; i < 32; i++) {
            largest = fabs(b[i]) > fabs(largest) ? (float)b[i] : largest;
        }
        float step = bits == 8 ? fabsf(largest) / 127 : largest / -8;
        float inverse = step != 0 ? 1 / step : 0;
        double kept = set_half(to, step);
        for (int32_t i = 0; i < 32; i++) {
            float scaled = (float)b[i] * inverse;
            int32_t code = bits == 8            ? (int32_t)lroundf(scaled)
                           : scaled + 8.5f < 15 ? (int32_t)(scaled + 8.5f)
                                                : 15;
            row->values[b - x + i] = (bits == 8 ? code : code - 8) * kept;
            if (bits == 8) {
                to[2 + i] = (uint8_t)code;
            } else {
                to[2 + i % 16] = (uint8_t)(to[2 + i % 16] | code << i / 16 * 4);
            }
        }
        to += 2 + 4 * bits;
    }
    row->data_bytes = (int32_t)(to - row->data);
}

static void quantize_row(int32_t kv_dtype, int32_t is_v, int32_t head, const double *x,
                         struct quantized *row)
{
    memset(row, 0, sizeof *row);
    row->data_bytes = DIMS;
    if (kv_dtype == ATTN_KV_Q8_0 || kv_dtype == ATTN_KV_Q4_0) {
        quantize_blocks(row, x, kv_dtype == ATTN_KV_Q8_0 ? 8 : 4);
        return;
    }
    if (turboquant_code(kv_dtype, is_v) > 0) {
        quantize_turboquant(row, turboquant_code(kv_dtype, is_v), is_v, x);
        return;
    }
    switch (kv_dtype) {
    case ATTN_KV_FP8_PER_TOKEN_HEAD:
        quantize_fp8(row, x);
        break;
    case ATTN_KV_INT8_PER_TOKEN_HEAD:
        quantize_int8(row, x, NULL);
        break;
    case ATTN_KV_INT4_PER_TOKEN_HEAD:
        quantize_int4(row, x, signs[is_v]);
        break;
    case ATTN_KV_INT8_KV:
        quantize_int8(row, x, is_v ? v_channel + head * DIMS : NULL);
        break;
    case ATTN_KV_INT8_K:
        if (!is_v) {
            quantize_int8(row, x, NULL);
            break;
        }
        row->data_bytes = 2 * DIMS;
        for (int32_t d = 0; d < DIMS; d++) {
            format_store(row->data, d, ATTN_DTYPE_BF16, x[d]);
            row->values[d] = x[d];
        }
        break;
    default:
        quantize_nvfp4(row, x, tensor_scale[is_v]);
    }
}

static const int32_t table[] = {4, 1, 6, 0x7ffffff0};

struct memory {
    uint8_t got[2][BLOCKS][SLOTS][HEADS][ROW_BYTES];
    uint8_t want[2][BLOCKS][SLOTS][HEADS][ROW_BYTES];
    double k[KEYS][HEADS][DIMS], v[KEYS][HEADS][DIMS]; /* as read back */
};

/* nvfp4 values keep the scales of 4 slots together: t' = 4 (t / 4) + s / (S / 4),
 * s' = (s mod S/4) 4 + t mod 4. */
static uint8_t *want_scale(struct memory *m, int32_t swizzled, int32_t is_v, int32_t key,
                           int32_t head, int32_t s, int32_t data_bytes)
{
    int32_t t = key % SLOTS, quarter = DIMS / 16 / 4, slot = t, index = s;
    if (swizzled) {
        slot = 4 * (t / 4) + s / quarter;
        index = s % quarter * 4 + t % 4;
    }
    return &m->want[is_v][table[key / SLOTS]][slot][head][data_bytes + index];
}

static void expect_rows(struct memory *m, int32_t kv_dtype, int32_t is_v, int32_t key, int32_t head,
                        const double *x)
{
    struct quantized row;
    quantize_row(kv_dtype, is_v, head, x, &row);
    memcpy(m->want[is_v][table[key / SLOTS]][key % SLOTS][head], row.data, (size_t)row.data_bytes);
    for (int32_t s = 0; s < row.scale_bytes; s++) {
        *want_scale(m, kv_dtype == ATTN_KV_NVFP4 && is_v, is_v, key, head, s, row.data_bytes) =
            row.scale[s];
    }
    memcpy(is_v ? m->v[key][head] : m->k[key][head], row.values, sizeof row.values);
}

static struct attn_kv_view view_of(struct memory *m, int32_t kv_dtype, int32_t is_v)
{
    int32_t bits = turboquant_code(kv_dtype, is_v);
    bits = bits                                                                   ? bits
           : kv_dtype == ATTN_KV_NVFP4 || kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD ? 4
                                                                                  : 8;
    int32_t numbers = is_v && kv_dtype == ATTN_KV_INT8_K;
    return (struct attn_kv_view){.struct_size = sizeof(struct attn_kv_view),
                                 .data = m->got[is_v],
                                 .num_blocks = BLOCKS,
                                 .block_size = SLOTS,
                                 .num_heads = HEADS,
                                 .head_size = DIMS,
                                 .stride_block = sizeof m->got[0][0],
                                 .stride_slot = sizeof m->got[0][0][0],
                                 .stride_head = ROW_BYTES,
                                 .scale = numbers ? NULL : &m->got[is_v][0][0][0][DIMS * bits / 8],
                                 .scale_stride_block = sizeof m->got[0][0],
                                 .scale_stride_slot = sizeof m->got[0][0][0],
                                 .scale_stride_head = ROW_BYTES};
}

static void check_cache(int32_t kv_dtype, const struct reference *reference)
{
    static struct memory m;
    static uint8_t k[KEYS][HEADS][DIMS][2], v[KEYS][HEADS][DIMS][2];
    static uint8_t q[QUERIES][QUERY_HEADS][DIMS][2];
    static double q_values[QUERIES][QUERY_HEADS][DIMS], want[QUERIES][QUERY_HEADS][DIMS];
    static float out[QUERIES][QUERY_HEADS][DIMS], lse[QUERY_HEADS][QUERIES];
    double want_lse[QUERIES][QUERY_HEADS], scores[KEYS];
    int64_t slots[KEYS];
    const int32_t starts[] = {0, QUERIES}, lens[] = {KEYS};
    struct test_tensor tq, tk, tv, to, tl;
    memset(m.got, POISON, sizeof m.got);
    memset(m.want, POISON, sizeof m.want);
    for (int32_t i = 0; i < KEYS * HEADS * 2; i++) {
        int32_t key = i / 2 / HEADS, head = i / 2 % HEADS, is_v = i % 2;
        double x[DIMS], size = key == 3 ? 0 : exp(random_normal()); /* one row of zeros */
        for (int32_t d = 0; d < DIMS; d++) {
            x[d] = format_round(ATTN_DTYPE_BF16, size * random_normal());
            format_store(is_v ? v[key][head] : k[key][head], d, ATTN_DTYPE_BF16, x[d]);
        }
        slots[key] = table[key / SLOTS] * SLOTS + key % SLOTS;
        expect_rows(&m, kv_dtype, is_v, key, head, x);
    }
    for (int32_t i = 0; i < QUERIES * QUERY_HEADS * DIMS; i++) {
        double x = format_round(ATTN_DTYPE_BF16, 3 * random_normal());
        format_store(q, i, ATTN_DTYPE_BF16, x);
        (&q_values[0][0][0])[i] = x;
    }
    struct attn_layer_desc layer = {.struct_size = sizeof layer,
                                    .dtype = ATTN_DTYPE_BF16,
                                    .kv_dtype = kv_dtype,
                                    .num_q_heads = QUERY_HEADS,
                                    .num_kv_heads = HEADS,
                                    .head_size = DIMS,
                                    .head_size_v = DIMS,
                                    .scale = 0.125f,
                                    .causal = 1,
                                    .block_size = SLOTS};
    struct attn_kv_quant_params quant = {
        .ext = {.id = ATTN_EXT_KV_QUANT_PARAMS, .struct_size = sizeof quant},
        .hadamard_signs_k = signs[0],
        .hadamard_signs_v = signs[1],
        .v_channel_scale = v_channel};
    struct attn_layer_params params = {.struct_size = sizeof params,
                                       .next = &quant.ext,
                                       .k_scale = &tensor_scale[0],
                                       .v_scale = &tensor_scale[1]};
    struct attn_kv_view k_view = view_of(&m, kv_dtype, 0), v_view = view_of(&m, kv_dtype, 1);
    struct attn_write_kv_args write = {
        .struct_size = sizeof write,
        .instance = reference->instance,
        .layer = &layer,
        .params = &params,
        .k_cache = &k_view,
        .v_cache = &v_view,
        .slot_mapping = slots,
        .num_slots = KEYS,
        .k = tensor_set(&tk, k, ATTN_DTYPE_BF16, 3, (int64_t[]){KEYS, HEADS, DIMS}, NULL),
        .v = tensor_set(&tv, v, ATTN_DTYPE_BF16, 3, (int64_t[]){KEYS, HEADS, DIMS}, NULL)};
    assert_int_equal(reference->kernels->write_kv(&write, NULL), ATTN_OK);
    for (size_t i = 0; i < sizeof m.got; i++) {
        if (((uint8_t *)m.got)[i] != ((uint8_t *)m.want)[i]) {
            fail_msg("kv_dtype %d: byte %d of the cache is %02x, not %02x", kv_dtype, (int)i,
                     ((uint8_t *)m.got)[i], ((uint8_t *)m.want)[i]);
        }
    }
    struct attn_batch batch = {.struct_size = sizeof batch,
                               .num_reqs = 1,
                               .num_tokens = QUERIES,
                               .num_actual_tokens = QUERIES,
                               .query_start_loc = starts,
                               .query_start_loc_host = starts,
                               .seq_lens = lens,
                               .block_table = table,
                               .block_table_stride = 4};
    struct attn_attend_args args = {
        .struct_size = sizeof args,
        .instance = reference->instance,
        .layer = &layer,
        .params = &params,
        .batch = &batch,
        .k_cache = &k_view,
        .v_cache = &v_view,
        .flags = ATTN_RUN_NO_WRITE,
        .q = tensor_set(&tq, q, ATTN_DTYPE_BF16, 3, (int64_t[]){QUERIES, QUERY_HEADS, DIMS}, NULL),
        .out =
            tensor_set(&to, out, ATTN_DTYPE_F32, 3, (int64_t[]){QUERIES, QUERY_HEADS, DIMS}, NULL),
        .lse = tensor_set(&tl, lse, ATTN_DTYPE_F32, 2, (int64_t[]){QUERY_HEADS, QUERIES}, NULL)};
    assert_int_equal(reference->kernels->attend(&args, NULL), ATTN_OK);
    struct oracle_request o = {.num_q_heads = QUERY_HEADS,
                               .num_kv_heads = HEADS,
                               .head_size = DIMS,
                               .head_size_v = DIMS,
                               .num_queries = QUERIES,
                               .num_keys = KEYS,
                               .q = &q_values[0][0][0],
                               .k = &m.k[0][0][0],
                               .v = &m.v[0][0][0],
                               .scale = layer.scale,
                               .causal = 1,
                               .left = -1,
                               .right = -1,
                               .out = &want[0][0][0],
                               .lse = &want_lse[0][0]};
    oracle_attend(&o, scores);
    for (int32_t i = 0; i < QUERIES * QUERY_HEADS * DIMS; i++) {
        double got = (&out[0][0][0])[i], expected = (&want[0][0][0])[i];
        if (!(fabs(got - expected) <= 2e-6 * (1 + fabs(expected)))) {
            fail_msg("kv_dtype %d: element %d: %.9g, not %.9g", kv_dtype, i, got, expected);
        }
    }
    for (int32_t i = 0; i < QUERIES * QUERY_HEADS; i++) {
        double expected = want_lse[i % QUERIES][i / QUERIES];
        assert_true(fabs((&lse[0][0])[i] - expected) <= 2e-6 * (1 + fabs(expected)));
    }
}

static void test_caches(void **state)
{
    static const int32_t kv_dtypes[] = {ATTN_KV_FP8_PER_TOKEN_HEAD,
                                        ATTN_KV_INT8_PER_TOKEN_HEAD,
                                        ATTN_KV_INT4_PER_TOKEN_HEAD,
                                        ATTN_KV_INT8_KV,
                                        ATTN_KV_INT8_K,
                                        ATTN_KV_NVFP4,
                                        ATTN_KV_TURBOQUANT_K8V4,
                                        ATTN_KV_TURBOQUANT_4BIT_NC,
                                        ATTN_KV_TURBOQUANT_K3V4_NC,
                                        ATTN_KV_TURBOQUANT_3BIT_NC,
                                        ATTN_KV_Q8_0,
                                        ATTN_KV_Q4_0};
    (void)state;
    for (int32_t i = 0; i < HEADS * DIMS; i++) {
        v_channel[i] = (float)(0.01 + 0.001 * random_below(30)); /* some saturate */
    }
    for (int32_t i = 0; i < 2 * DIMS; i++) {
        signs[i / DIMS][i % DIMS] = random_below(2) ? 1 : -1;
    }
    for (size_t i = 0; i < 4 * sizeof kv_dtypes / sizeof *kv_dtypes; i++) {
        check_cache(kv_dtypes[i / 4], i % 2 ? &threaded : &serial);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_caches)};
    return harness_main(argc, argv, SEED, tests, sizeof tests / sizeof *tests);
}
