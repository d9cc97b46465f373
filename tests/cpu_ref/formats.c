/* SPDX-License-Identifier: Apache-2.0 */
#include "formats.h"

#include <math.h>
#include <string.h>

struct format {
    int32_t exponent_bits;
    int32_t mantissa_bits;
    int32_t bias;
    uint32_t largest; /* code of the largest finite value */
    int32_t saturates;
    int32_t bytes;
    struct attn_dtype dtype;
};

static const struct format formats[] = {
    [ATTN_DTYPE_F16] = {5, 10, 15, 0x7bff, 0, 2, {ATTN_CODE_FLOAT, 16, 1}},
    [ATTN_DTYPE_BF16] = {8, 7, 127, 0x7f7f, 0, 2, {ATTN_CODE_BFLOAT, 16, 1}},
    [ATTN_DTYPE_F32] = {8, 23, 127, 0x7f7fffff, 0, 4, {ATTN_CODE_FLOAT, 32, 1}},
    [ATTN_DTYPE_FP8_E4M3] = {4, 3, 7, 0x7e, 1, 1, {ATTN_CODE_FLOAT8_E4M3FN, 8, 1}},
    [ATTN_DTYPE_FP8_E5M2] = {5, 2, 15, 0x7b, 1, 1, {ATTN_CODE_FLOAT8_E5M2, 8, 1}},
    [ATTN_DTYPE_FP8_E4M3FNUZ] = {4, 3, 8, 0x7f, 1, 1, {ATTN_CODE_FLOAT8_E4M3FNUZ, 8, 1}},
    [ATTN_DTYPE_INT8] = {0, 0, 0, 127, 1, 1, {ATTN_CODE_INT, 8, 1}},
};
static const struct format e2m1 = {2, 1, 1, 7, 1, 1, {ATTN_CODE_FLOAT4_E2M1FN, 4, 1}};

static const struct format *format_of(int32_t name)
{
    return name == FORMAT_E2M1 ? &e2m1 : &formats[name];
}

static double magnitude_of(const struct format *f, uint32_t code)
{
    uint32_t exponent = code >> f->mantissa_bits;
    double fraction = (double)(code & ((1u << f->mantissa_bits) - 1));
    if (exponent == 0) {
        return ldexp(fraction, 1 - f->bias - f->mantissa_bits);
    }
    return ldexp(fraction + ldexp(1, f->mantissa_bits),
                 (int32_t)exponent - f->bias - f->mantissa_bits);
}

static uint32_t sign_bit(const struct format *f)
{
    return 1u << (f->exponent_bits + f->mantissa_bits);
}

double format_decode(int32_t name, uint32_t code)
{
    const struct format *f = format_of(name);
    if (name == ATTN_DTYPE_F32) { /* the compiler's own, for speed */
        float value;
        memcpy(&value, &code, sizeof value);
        return value;
    }
    if (name == ATTN_DTYPE_INT8) {
        return code < 128 ? (double)code : (double)code - 256;
    }
    uint32_t magnitude = code & (sign_bit(f) - 1);
    double sign = code & sign_bit(f) ? -1 : 1;
    if (name == ATTN_DTYPE_FP8_E4M3FNUZ && code == 0x80) {
        return NAN;
    }
    if (magnitude > f->largest) {
        int32_t infinite = name != ATTN_DTYPE_FP8_E4M3 && magnitude == f->largest + 1;
        return infinite ? sign * INFINITY : NAN;
    }
    return sign * magnitude_of(f, magnitude);
}

uint32_t format_encode(int32_t name, double value)
{
    const struct format *f = format_of(name);
    if (name == ATTN_DTYPE_F32) {
        float rounded = (float)value;
        uint32_t code;
        memcpy(&code, &rounded, sizeof code);
        return code;
    }
    if (name == ATTN_DTYPE_INT8) {
        double rounded = nearbyint(value);
        return (uint32_t)(int32_t)(rounded > 127 ? 127 : rounded < -128 ? -128 : rounded) & 255;
    }
    double a = fabs(value);
    uint32_t low = 0, high = f->largest;
    while (low < high) { /* the largest code that is not above a */
        uint32_t middle = low + (high - low + 1) / 2;
        if (magnitude_of(f, middle) <= a) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    if (low < f->largest || !f->saturates) {
        double below = a - magnitude_of(f, low), above = magnitude_of(f, low + 1) - a;
        low += above < below || (above == below && (low & 1)) || isinf(a) ? 1 : 0;
    }
    uint32_t sign = signbit(value) ? sign_bit(f) : 0;
    return name == ATTN_DTYPE_FP8_E4M3FNUZ && low == 0 ? 0 : sign | low;
}

int32_t format_bytes(int32_t name)
{
    return format_of(name)->bytes;
}

double format_half_step(int32_t name)
{
    return ldexp(1, -format_of(name)->mantissa_bits - 1);
}

double format_smallest(int32_t name)
{
    const struct format *f = format_of(name);
    return ldexp(1, 1 - f->bias - f->mantissa_bits);
}

struct attn_dtype format_dtype(int32_t name)
{
    return format_of(name)->dtype;
}

double format_load(const void *memory, int64_t at, int32_t name)
{
    const uint8_t *bytes = (const uint8_t *)memory + at * format_bytes(name);
    uint32_t code = 0;
    memcpy(&code, bytes, (size_t)format_bytes(name)); /* little-endian, as libattn's machines are */
    return format_decode(name, code);
}

void format_store(void *memory, int64_t at, int32_t name, double value)
{
    uint8_t *bytes = (uint8_t *)memory + at * format_bytes(name);
    uint32_t code = format_encode(name, value);
    memcpy(bytes, &code, (size_t)format_bytes(name));
}

double format_round(int32_t name, double value)
{
    return format_decode(name, format_encode(name, value));
}
