/* SPDX-License-Identifier: Apache-2.0 */
/* Vector operations. A table row has what one lane does; everything that operations share (EXEC,
 * modifiers, DPP, SDWA, what is known) is in run_lanes. Source: AMD's "RDNA3" and "CDNA3
 * Instruction Set Architecture" reference guides, "Vector ALU Operations" and "Instructions". */
#include <math.h>
#include <string.h>

#include "isa.h"

#define WORD2 LANES /* distance of a 64-bit value's words */

/* ---- conversions ---- */

/* Towards zero. */
static uint16_t float_to_half_rtz(float number)
{
    uint32_t size = as_bits(number) & 0x7fffffff;
    if (size >= 0x7f800000) {
        return float_to_half(number);
    }
    uint16_t near = float_to_half(number);
    if (fabsf(half_to_float(near)) > as_float(size)) {
        near--;
    }
    return near;
}

static float h(uint32_t word)
{
    return half_to_float((uint16_t)word);
}

static float flushed(float x)
{
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

/* The manual promises 1 ulp of these. Half of the inexact results are the neighbour on the other
 * side of the true value, so that code which leans on more shows. */
static float rough(double exact, float from)
{
    float near = (float)exact;
    uint32_t bits = as_bits(near), seed = as_bits(from) * 2654435761u >> 31;
    if (seed == 0 || near == 0.0f || !isfinite(near) || (double)near == exact) {
        return flushed(near);
    }
    bool outwards = fabs((double)near) < fabs(exact);
    return flushed(as_float(outwards ? bits + 1 : bits - 1));
}

/* ---- one lane ---- */

/* Lanes do not depend on each other, also where the result takes a source's place. */
#define LANES_OF(NAME, BODY)                                                                       \
    static void NAME(uint32_t *d, const uint32_t *a, const uint32_t *b, const uint32_t *c,         \
                     unsigned n)                                                                   \
    {                                                                                              \
        (void)b, (void)c;                                                                          \
        if (n == LANES) {                                                                          \
            _Pragma("GCC ivdep") for (unsigned l = 0; l < LANES; l++)                              \
            {                                                                                      \
                BODY                                                                               \
            }                                                                                      \
            return;                                                                                \
        }                                                                                          \
        _Pragma("GCC ivdep") for (unsigned l = 0; l < LANES / 2; l++)                              \
        {                                                                                          \
            BODY                                                                                   \
        }                                                                                          \
    }
#define U(NAME, VALUE) LANES_OF(NAME, d[l] = (uint32_t)(VALUE);)
#define F(NAME, VALUE) LANES_OF(NAME, d[l] = as_bits(VALUE);)
#define H(NAME, VALUE) LANES_OF(NAME, d[l] = float_to_half(VALUE);)
#define L(NAME, VALUE)                                                                             \
    LANES_OF(NAME, const uint64_t r = (uint64_t)(VALUE); d[l] = (uint32_t)r;                       \
             d[l + WORD2] = (uint32_t)(r >> 32);)
#define D(NAME, VALUE) L(NAME, as_bits64(VALUE))
#define P(NAME, LOW, HIGH) LANES_OF(NAME, d[l] = (uint32_t)(LOW) | (uint32_t)(HIGH) << 16;)
#define Q(NAME, LOW, HIGH)                                                                         \
    LANES_OF(NAME, const uint32_t low = as_bits(LOW); d[l + WORD2] = as_bits(HIGH); d[l] = low;)

#define FA as_float(a[l])
#define FB as_float(b[l])
#define FC as_float(c[l])
#define FA2 as_float(a[l + WORD2])
#define FB2 as_float(b[l + WORD2])
#define FC2 as_float(c[l + WORD2])
#define IA (int32_t) a[l]
#define IB (int32_t) b[l]
#define IC (int32_t) c[l]
#define HA h(a[l])
#define HB h(b[l])
#define HC h(c[l])
#define HA2 h(a[l] >> 16)
#define HB2 h(b[l] >> 16)
#define HC2 h(c[l] >> 16)
#define LA (a[l] | (uint64_t)a[l + WORD2] << 32)
#define LB (b[l] | (uint64_t)b[l + WORD2] << 32)
#define LC (c[l] | (uint64_t)c[l + WORD2] << 32)
#define DA as_double(LA)
#define DB as_double(LB)
#define DC as_double(LC)

static inline float max2(float x, float y)
{
    return x > y ? x : x < y ? y : x != x ? y : y != y ? x : as_float(as_bits(x) & as_bits(y));
}

static inline float min2(float x, float y)
{
    return x < y ? x : x > y ? y : x != x ? y : y != y ? x : as_float(as_bits(x) | as_bits(y));
}

static double max2d(double x, double y)
{
    return x > y ? x : x < y ? y : x != x ? y : y != y ? x : signbit(x) ? y : x;
}

static double min2d(double x, double y)
{
    return x < y ? x : x > y ? y : x != x ? y : y != y ? x : signbit(x) ? x : y;
}

static uint32_t max_u(uint32_t x, uint32_t y)
{
    return x > y ? x : y;
}

static uint32_t min_u(uint32_t x, uint32_t y)
{
    return x < y ? x : y;
}

static int32_t max_i(int32_t x, int32_t y)
{
    return x > y ? x : y;
}

static int32_t min_i(int32_t x, int32_t y)
{
    return x < y ? x : y;
}

static float med3(float x, float y, float z)
{
    if (x != x || y != y || z != z) {
        return min2(min2(x, y), z);
    }
    return max2(min2(x, y), min2(max2(x, y), z));
}

static float multiply_legacy(float x, float y)
{
    return x == 0.0f || y == 0.0f ? 0.0f : x * y;
}

static int32_t exponent_of(double x)
{
    int e = (int)(as_bits64(x) >> 52 & 0x7ff);
    if (e == 0) { /* 0 or a denormal */
        frexp(x, &e);
        return e;
    }
    return e == 0x7ff ? 0 : e - 1022;
}

static uint32_t bit_field_i(uint32_t x, uint32_t offset, uint32_t width)
{
    offset &= 31;
    width &= 31;
    if (width == 0) {
        return 0;
    }
    uint32_t d = x >> offset & ((1u << width) - 1);
    return offset + width < 32 ? (uint32_t)((int32_t)(d << (32 - width)) >> (32 - width))
                               : (uint32_t)((int32_t)x >> offset);
}

/* Bytes 0 .. 3 of b, 4 .. 7 of a; 8 .. 11 signs, 12 zero, more 0xff. */
static uint32_t permuted(uint32_t high, uint32_t low, uint32_t select)
{
    uint64_t both = (uint64_t)high << 32 | low;
    uint32_t d = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t s = select >> (8 * n) & 255;
        uint32_t byte = s < 8     ? (uint32_t)(both >> (8 * s)) & 255
                        : s < 12  ? ((both >> (16 * (s - 8) + 15) & 1) ? 255 : 0)
                        : s == 12 ? 0
                                  : 255;
        d |= byte << (8 * n);
    }
    return d;
}

/* Quotients: v_div_fixup repairs what the refined reciprocal cannot have right. */
static float div_fixup(float q, float y, float x)
{
    bool negative = signbit(x) != signbit(y);
    if (x != x || y != y) {
        return as_float(as_bits(x != x ? x : y) | 0x400000);
    }
    if ((x == 0.0f && y == 0.0f) || (isinf(x) && isinf(y))) {
        return as_float(0xffc00000);
    }
    if (isinf(x) || y == 0.0f) {
        return negative ? -INFINITY : INFINITY;
    }
    if (isinf(y) || x == 0.0f) {
        return negative ? -0.0f : 0.0f;
    }
    int ex = exponent_of((double)x), ey = exponent_of((double)y);
    if (ex - ey < -150) {
        return negative ? -0.0f : 0.0f;
    }
    return negative ? -fabsf(q) : fabsf(q);
}

static double div_fixup64(double q, double y, double x)
{
    bool negative = signbit(x) != signbit(y);
    if (x != x || y != y) {
        return x != x ? x : y;
    }
    if ((x == 0.0 && y == 0.0) || (isinf(x) && isinf(y))) {
        return as_double(UINT64_C(0xfff8000000000000));
    }
    if (isinf(x) || y == 0.0) {
        return negative ? -INFINITY : INFINITY;
    }
    if (isinf(y) || x == 0.0) {
        return negative ? -0.0 : 0.0;
    }
    return negative ? -fabs(q) : fabs(q);
}

/* One bit a class: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, and the positive ones
 * upwards. */
static uint32_t class_of(uint64_t bits, int exponent_bits, int mantissa_bits)
{
    uint64_t mantissa = bits & ((UINT64_C(1) << mantissa_bits) - 1);
    uint64_t most = (UINT64_C(1) << exponent_bits) - 1, exponent = bits >> mantissa_bits & most;
    bool negative = bits >> (exponent_bits + mantissa_bits) & 1;
    if (exponent == most && mantissa != 0) {
        return mantissa >> (mantissa_bits - 1) ? 2 : 1;
    }
    if (exponent == most) {
        return negative ? 4 : 512;
    }
    if (exponent != 0) {
        return negative ? 8 : 256;
    }
    return mantissa != 0 ? (negative ? 16 : 128) : negative ? 32 : 64;
}

#define COMPARE_ALL(TYPE, LETTERS, X, Y)                                                           \
    COMPARISON(eq, TYPE, LETTERS, X == Y)                                                          \
    COMPARISON(ne, TYPE, LETTERS, X != Y)                                                          \
    COMPARISON(lt, TYPE, LETTERS, X < Y)                                                           \
    COMPARISON(le, TYPE, LETTERS, X <= Y)                                                          \
    COMPARISON(gt, TYPE, LETTERS, X > Y)                                                           \
    COMPARISON(ge, TYPE, LETTERS, X >= Y)
#define COMPARE_FLOATS(TYPE, LETTERS, X, Y)                                                        \
    COMPARE_ALL(TYPE, LETTERS, X, Y)                                                               \
    COMPARISON(neq, TYPE, LETTERS, X != Y)                                                         \
    COMPARISON(lg, TYPE, LETTERS, X<Y || X> Y)                                                     \
    COMPARISON(o, TYPE, LETTERS, X == X && Y == Y)                                                 \
    COMPARISON(u, TYPE, LETTERS, X != X || Y != Y)                                                 \
    COMPARISON(nge, TYPE, LETTERS, !(X >= Y))                                                      \
    COMPARISON(nlg, TYPE, LETTERS, !(X < Y || X > Y))                                              \
    COMPARISON(ngt, TYPE, LETTERS, !(X > Y))                                                       \
    COMPARISON(nle, TYPE, LETTERS, !(X <= Y))                                                      \
    COMPARISON(nlt, TYPE, LETTERS, !(X < Y))

#define OP(FORM, NAME, TYPES, ...) FORM(NAME, __VA_ARGS__)
#define SLOW OP
#define FLAGGED(FLAGS, ...) OP(__VA_ARGS__)
#define SAME(NAME, TYPES, OPERATION)
#define SLOW_SAME(NAME, TYPES, OPERATION)
#define ACCUMULATES(NAME, TYPES, OPERATION)
#define COMPARISON(NAME, TYPE, LETTERS, VALUE) U(v_cmp_##NAME##_##TYPE, VALUE) /* 0 or 1 a lane */
#include "vector_list.h"

/* ---- what they share ---- */

static void spread_exec(struct wave *w)
{
    uint64_t exec = exec_of(w);
    if (w->spread_of != exec) {
        spread_mask(exec, w->spread, UINT32_MAX);
        w->spread_of = exec;
    }
}

void write_lanes(struct wave *w, const struct operand *dst, int word, const uint32_t *from,
                 uint64_t known, uint64_t lanes)
{
    uint32_t *restrict to = w->v[dst->reg + word];
    uint64_t *to_known = &w->v_known[dst->reg + word];
    if ((lanes & all_lanes(w)) == all_lanes(w)) {
        memcpy(to, from, w->lanes * sizeof *to);
    } else if (lanes == exec_of(w)) {
        spread_exec(w);
        for (unsigned l = 0; l < w->lanes; l++) {
            to[l] = (from[l] & w->spread[l]) | (to[l] & ~w->spread[l]);
        }
    } else {
        for (unsigned l = 0; l < w->lanes; l++) {
            to[l] = lanes >> l & 1 ? from[l] : to[l];
        }
    }
    *to_known = (*to_known & ~lanes) | (known & lanes);
}

static void fill_lanes(uint32_t *to, uint32_t value)
{
    for (int l = 0; l < LANES; l++) {
        to[l] = value;
    }
}

static void modify(const struct operand *o, uint32_t *lanes, int words)
{
    uint32_t *top = lanes + (words - 1) * LANES;
    uint32_t sign = o->type == 'H' ? 0x8000 : 0x80000000;
    for (int l = 0; l < LANES; l++) {
        if (o->mods & MOD_ABS) {
            top[l] &= ~sign;
        }
        if (o->mods & MOD_NEG) {
            top[l] ^= sign;
        }
    }
}

const uint32_t *source_lanes(struct wave *w, const struct insn *i, int which,
                             uint32_t room[2 * LANES], uint64_t *known)
{
    const struct operand *o = &i->src[which];
    int words = words_of_type(o->type);
    const uint32_t *lanes;
    if (o->type == 'M') {
        uint64_t mask = mask_get(w, o, known);
        spread_mask(mask, room, 1);
        return room;
    }
    if (o->kind == OPERAND_VECTOR) {
        lanes = w->v[o->reg];
        *known = w->v_known[o->reg];
        if (words == 2) {
            *known &= w->v_known[o->reg + 1];
        }
    } else if (o->kind == OPERAND_CONSTANT) {
        lanes = o->lanes;
        *known = ALL_LANES;
    } else {
        uint64_t bits, value = scalar_get(w, o, &bits);
        bool all = words == 2 ? bits == UINT64_MAX : (uint32_t)bits == UINT32_MAX;
        *known = all ? ALL_LANES : 0;
        fill_lanes(room, (uint32_t)value);
        if (words == 2) {
            fill_lanes(room + LANES, (uint32_t)(value >> 32));
        }
        lanes = room;
    }
    if (o->mods & (MOD_NEG | MOD_ABS)) {
        if (lanes != room) {
            memcpy(room, lanes, (size_t)words * LANES * sizeof *room);
        }
        modify(o, room, words);
        return room;
    }
    return lanes;
}

/* The lane that lane l reads; -1: no lane. */
static int dpp_source(const struct insn *i, int l)
{
    int row = l & ~15, at = l & 15, arg = i->dpp_arg;
    switch (i->dpp) {
    case DPP_QUAD_PERM:
        return (l & ~3) | i->perm[l & 3];
    case DPP_DPP8:
        return (l & ~7) | i->perm[l & 7];
    case DPP_ROW_SHL:
        return at + arg < 16 ? l + arg : -1;
    case DPP_ROW_SHR:
        return at - arg >= 0 ? l - arg : -1;
    case DPP_ROW_ROR:
        return row | ((at - arg) & 15);
    case DPP_ROW_MIRROR:
        return row | (15 - at);
    case DPP_ROW_HALF_MIRROR:
        return row | (at & 8) | (7 - (at & 7));
    case DPP_ROW_SHARE:
    case DPP_ROW_NEWBCAST:
        return row | arg;
    case DPP_ROW_XMASK:
        return row | (at ^ arg);
    case DPP_ROW_BCAST:
        return arg == 15 ? (row > 0 ? row - 1 : -1) : (l >= 32 ? 31 : -1);
    default:
        return l - arg;
    }
}

/* Source 0 from other lanes; returns the lanes that the operation writes. */
static uint64_t apply_dpp(struct wave *w, const struct insn *i, const uint32_t *from,
                          uint64_t from_known, uint32_t *to, uint64_t *to_known)
{
    uint64_t exec = exec_of(w), lanes = 0, known = 0;
    for (int l = 0; l < (int)w->lanes; l++) {
        int source = dpp_source(i, l);
        bool enabled = i->dpp == DPP_DPP8 || ((i->row_mask >> (l / 16 & 3) & 1) != 0 &&
                                              (i->bank_mask >> (l / 4 & 3) & 1) != 0);
        bool valid = source >= 0 && (exec >> source & 1);
        to[l] = valid ? from[source] : 0;
        known |= (uint64_t)(valid ? from_known >> source & 1 : 1) << l;
        if (enabled && (valid || (i->flags & INSN_BOUND_CTRL))) {
            lanes |= UINT64_C(1) << l;
        }
    }
    *to_known = known;
    return lanes & exec;
}

static uint32_t selected(uint32_t word, uint8_t select, bool is_signed)
{
    if (select == SEL_DWORD) {
        return word;
    }
    int bits = select < SEL_WORD_0 ? 8 : 16;
    int shift = select < SEL_WORD_0 ? 8 * select : 16 * (select - SEL_WORD_0);
    uint32_t part = word >> shift & ((1u << bits) - 1);
    return is_signed ? (uint32_t)((int32_t)(part << (32 - bits)) >> (32 - bits)) : part;
}

/* SDWA's modifiers apply to the selected part. */
static const uint32_t *apply_select(const struct insn *i, int which, const uint32_t *from,
                                    uint32_t *to)
{
    uint8_t select = i->src_sel[which];
    if (select == SEL_DWORD) {
        return from;
    }
    bool is_signed = i->src[which].mods & MOD_SEXT;
    for (int l = 0; l < LANES; l++) {
        to[l] = selected(from[l], select, is_signed);
    }
    return to;
}

static void place_selected(struct wave *w, const struct insn *i, uint32_t *d)
{
    const uint32_t *old = w->v[i->dst[0].reg];
    if (i->dst_sel == SEL_DWORD) {
        return;
    }
    int bits = i->dst_sel < SEL_WORD_0 ? 8 : 16;
    int shift = i->dst_sel < SEL_WORD_0 ? 8 * i->dst_sel : 16 * (i->dst_sel - SEL_WORD_0);
    uint32_t mask = ((1u << bits) - 1) << shift;
    for (int l = 0; l < LANES; l++) {
        uint32_t part = d[l] << shift & mask;
        if (i->dst_unused == 2) {
            part |= old[l] & ~mask;
        } else if (i->dst_unused == 1 && (part >> (shift + bits - 1) & 1)) {
            part |= ~(mask | ((1u << shift) - 1));
        }
        d[l] = part;
    }
}

/* Halves of packed 16-bit sources, words of packed 32-bit ones. */
static const uint32_t *apply_op_sel(const struct insn *i, int which, const uint32_t *from,
                                    uint32_t *to)
{
    char type = i->src[which].type;
    unsigned low = i->op_sel >> which & 1, high = i->op_sel_hi >> which & 1;
    bool neg_low = i->neg_lo >> which & 1, neg_high = i->neg_hi >> which & 1;
    if (type == 'Q') {
        for (int l = 0; l < LANES; l++) {
            uint32_t x = from[low * LANES + l], y = from[high * LANES + l];
            to[l] = x ^ (uint32_t)neg_low << 31;
            to[LANES + l] = y ^ (uint32_t)neg_high << 31;
        }
        return to;
    }
    if (type == 'P' || type == 'p') {
        if (low == 0 && high == 1 && !neg_low && !neg_high) {
            return from;
        }
        for (int l = 0; l < LANES; l++) {
            uint32_t x = from[l] >> (16 * low) & 0xffff, y = from[l] >> (16 * high) & 0xffff;
            to[l] = (x ^ (uint32_t)neg_low << 15) | (y ^ (uint32_t)neg_high << 15) << 16;
        }
        return to;
    }
    if ((type == 'H' || type == 'W') && low != 0) {
        for (int l = 0; l < LANES; l++) {
            to[l] = from[l] >> 16;
        }
        return to;
    }
    return from;
}

static void clamp_lanes(const struct insn *i, uint32_t *d)
{
    static const float factors[] = {1.0f, 2.0f, 4.0f, 0.5f};
    char type = i->dst[0].type;
    int words = type == 'Q' ? 2 : 1;
    for (int l = 0; l < words * LANES && (type == 'F' || type == 'Q'); l++) {
        float x = as_float(d[l]) * factors[i->omod];
        d[l] = as_bits(i->flags & INSN_CLAMP ? max2(0.0f, min2(1.0f, x)) : x);
    }
    for (int l = 0; l < LANES && (type == 'H' || type == 'P'); l++) {
        for (int s = 0; s < (type == 'P' ? 32 : 16); s += 16) {
            float x = h(d[l] >> s) * factors[i->omod];
            x = i->flags & INSN_CLAMP ? max2(0.0f, min2(1.0f, x)) : x;
            d[l] = (d[l] & ~(0xffffu << s)) | (uint32_t)float_to_half(x) << s;
        }
    }
}

struct result {
    uint32_t d[2 * LANES];
    uint64_t known, lanes;
};

/* Lanes where the two words that a packed operation takes of a pair are known. */
static uint64_t known_words(struct wave *w, const struct operand *o, unsigned low, unsigned high)
{
    uint64_t bits = 0;
    if (o->kind == OPERAND_VECTOR) {
        return w->v_known[o->reg + low] & w->v_known[o->reg + high];
    }
    (void)scalar_get(w, o, &bits);
    return (uint32_t)(bits >> (32 * low)) == UINT32_MAX &&
                   (uint32_t)(bits >> (32 * high)) == UINT32_MAX
               ? ALL_LANES
               : 0;
}

static void compute_lanes(struct wave *w, const struct insn *i, struct result *r)
{
    _Alignas(64) uint32_t rooms[3][2 * LANES], other[3][2 * LANES];
    const uint32_t *x[3] = {NULL, NULL, NULL};
    uint64_t known[3] = {ALL_LANES, ALL_LANES, ALL_LANES};
    r->lanes = exec_of(w);
    for (int n = 0; n < i->num_src; n++) {
        if (n < 2 && (i->flags & INSN_SDWA) && i->src_sel[n] != SEL_DWORD) {
            struct insn bare = *i; /* modifiers act on the part */
            bare.src[n].mods = 0;
            x[n] = source_lanes(w, &bare, n, rooms[n], &known[n]);
            x[n] = apply_select(i, n, x[n], other[n]);
            modify(&i->src[n], other[n], 1);
        } else {
            x[n] = source_lanes(w, i, n, rooms[n], &known[n]);
        }
        if (n == 0 && (i->flags & INSN_DPP)) {
            r->lanes = apply_dpp(w, i, x[0], known[0], other[0], &known[0]);
            x[0] = other[0];
        } else if (i->op_sel != 0 || i->op_sel_hi != 0xff || (i->neg_lo | i->neg_hi) != 0) {
            x[n] = apply_op_sel(i, n, x[n], other[n]);
            if (i->src[n].type == 'Q' && i->src[n].kind != OPERAND_CONSTANT) {
                known[n] = known_words(w, &i->src[n], i->op_sel >> n & 1, i->op_sel_hi >> n & 1);
            }
        }
    }
    i->lanes(r->d, x[0], x[1], x[2], w->lanes);
    if (i->op->flags & OP_SELECTS) {
        uint64_t chosen = mask_of_lanes(x[2], w->lanes);
        r->known = known[2] & ((known[0] & ~chosen) | (known[1] & chosen));
    } else {
        r->known = known[0] & known[1] & known[2];
    }
    if ((i->flags & INSN_CLAMP) || i->omod != 0) {
        clamp_lanes(i, r->d);
    }
}

static void write_mask(struct wave *w, const struct insn *i, const struct result *r)
{
    uint64_t mask = mask_of_lanes(r->d, w->lanes) & r->lanes;
    uint64_t known = r->known | ~r->lanes;
    if (i->op->flags & OP_TO_EXEC) {
        if ((known & all_lanes(w)) != all_lanes(w)) {
            wave_fail(w, "EXEC from what was never written");
        }
        if (i->num_dst > 0) { /* gfx9's writes both */
            mask_set(w, &i->dst[0], mask, known);
        }
        w->s64[REG_EXEC / 2] = mask;
        return;
    }
    mask_set(w, &i->dst[0], mask, known);
}

/* 16-bit results: gfx9 clears the other half, later ones keep it. */
static void place_half(struct wave *w, const struct insn *i, struct result *r)
{
    const uint32_t *old = w->v[i->dst[0].reg];
    bool high = (i->op->flags & OP_HIGH_HALF) || (i->op_sel >> 3 & 1);
    bool keeps = high || w->code->major >= 10;
    for (unsigned l = 0; l < w->lanes; l++) {
        uint32_t part = r->d[l] & 0xffff;
        r->d[l] = high    ? part << 16 | (old[l] & 0xffff)
                  : keeps ? part | (old[l] & 0xffff0000)
                          : part;
    }
}

static void commit_lanes(struct wave *w, const struct insn *i, struct result *r)
{
    char type = i->dst[0].type;
    if (i->op->flags & OP_COMPARES) {
        write_mask(w, i, r);
        return;
    }
    if ((type == 'H' || type == 'W') && !(i->flags & INSN_SDWA)) {
        place_half(w, i, r);
    } else if (i->flags & INSN_SDWA) {
        place_selected(w, i, r->d);
    }
    for (int word = 0; word < words_of_type(type); word++) {
        write_lanes(w, &i->dst[0], word, r->d + word * LANES, r->known, r->lanes);
    }
}

void run_lanes(struct wave *w, const struct insn *i)
{
    _Alignas(64) struct result r;
    compute_lanes(w, i, &r);
    commit_lanes(w, i, &r);
}

/* Both halves read before either writes. */
void run_dual(struct wave *w, const struct insn *i)
{
    _Alignas(64) struct result first, second;
    compute_lanes(w, i, &first);
    compute_lanes(w, i->second, &second);
    commit_lanes(w, i, &first);
    commit_lanes(w, i->second, &second);
}

/* ---- operations that are more than lanes ---- */

struct sources {
    _Alignas(64) uint32_t rooms[3][2 * LANES];
    const uint32_t *x[3];
    uint64_t known[3], all; /* lanes where one is known, and where all of them are */
};

static void take_sources(struct wave *w, const struct insn *i, struct sources *s)
{
    s->all = ALL_LANES;
    for (int n = 0; n < i->num_src; n++) {
        s->x[n] = source_lanes(w, i, n, s->rooms[n], &s->known[n]);
        s->all &= s->known[n];
    }
}

static uint64_t take64(const uint32_t *from, unsigned l)
{
    return from[l] | (uint64_t)from[l + WORD2] << 32;
}

static void put64(uint32_t *to, unsigned l, uint64_t value)
{
    to[l] = (uint32_t)value;
    to[l + WORD2] = (uint32_t)(value >> 32);
}

/* Sums with a carry: (sum, carry out) of sources, and of a mask as a third one. arg: bit 0
 * subtract, bit 1 the sources change places. */
static void run_carry(struct wave *w, const struct insn *i)
{
    static const uint32_t none[LANES];
    _Alignas(64) uint32_t d[LANES], out[LANES];
    struct sources s = {.x = {NULL, NULL, none}};
    take_sources(w, i, &s);
    const uint32_t *x = s.x[i->op->arg & 2 ? 1 : 0], *y = s.x[i->op->arg & 2 ? 0 : 1], *z = s.x[2];
    for (unsigned l = 0; l < w->lanes && i->op->arg & 1; l++) {
        uint32_t first = x[l] - y[l];
        d[l] = first - z[l];
        out[l] = (x[l] < y[l]) | (first < z[l]);
    }
    for (unsigned l = 0; l < w->lanes && !(i->op->arg & 1); l++) {
        uint32_t first = x[l] + y[l];
        d[l] = first + z[l];
        out[l] = (first < x[l]) | (d[l] < first);
    }
    uint64_t exec = exec_of(w), carries = mask_of_lanes(out, w->lanes);
    write_lanes(w, &i->dst[0], 0, d, s.all, exec);
    mask_set(w, &i->dst[1], carries & exec, s.all | ~exec);
}

/* a * b + c in 64 bits; signed: arg. */
static void run_mad64(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t d[2 * LANES], out[LANES];
    struct sources s;
    uint64_t exec = exec_of(w), is_signed = i->op->arg ? ALL_LANES : 0;
    take_sources(w, i, &s);
    for (unsigned l = 0; l < w->lanes; l++) {
        uint64_t c = take64(s.x[2], l), a = s.x[0][l], b = s.x[1][l];
        uint64_t over = (a >> 31 ? b : 0) + (b >> 31 ? a : 0); /* what signs take off the top */
        uint64_t sum = a * b - (over << 32 & is_signed) + c;
        put64(d, l, sum);
        out[l] = sum < c;
    }
    uint64_t carries = mask_of_lanes(out, w->lanes), low = s.all;
    if (i->src[2].kind == OPERAND_VECTOR) { /* the low word takes nothing from c's high one */
        low = s.known[0] & s.known[1] & w->v_known[i->src[2].reg];
    }
    write_lanes(w, &i->dst[0], 0, d, low, exec);
    write_lanes(w, &i->dst[0], 1, d + WORD2, s.all, exec);
    mask_set(w, &i->dst[1], carries & exec, s.all | ~exec);
}

/* Scales an operand of a quotient so that the steps to it neither overflow nor lose bits; the mask
 * says where v_div_fmas has to scale back. */
static void run_div_scale(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t d[2 * LANES];
    struct sources s;
    uint64_t scaled = 0, exec = exec_of(w);
    bool wide = i->op->arg;
    int most = wide ? 1023 : 127, far = wide ? 768 : 96, step = wide ? 128 : 64;
    take_sources(w, i, &s);
    for (unsigned l = 0; l < w->lanes; l++) {
        double v[3];
        for (int n = 0; n < 3; n++) {
            v[n] = wide ? as_double(take64(s.x[n], l)) : (double)as_float(s.x[n][l]);
        }
        double value = v[0], divisor = v[1], dividend = v[2];
        bool same = wide ? as_bits64(value) == as_bits64(divisor) : v[0] == v[1];
        int en = exponent_of(dividend) - 1, ed = exponent_of(divisor) - 1;
        bool vcc = false;
        int scale = 0;
        if (divisor == 0.0 || dividend == 0.0) {
            value = NAN;
        } else if (en - ed >= far) {
            vcc = true;
            scale = same ? step : 0;
        } else if (ed < -most + 1) { /* a denormal divisor */
            scale = step;
        } else if (-ed < -most + 1 && en - ed < -most + 1) {
            vcc = true; /* the manual's +64 would overflow and contradict v_div_fmas */
            scale = same ? -step : 0;
        } else if (-ed < -most + 1) {
            scale = -step;
        } else if (en - ed < -most + 1) {
            vcc = true;
            scale = !same ? step : 0;
        } else if (en <= -most + (wide ? 53 : 23)) {
            scale = step;
        }
        value = scale != 0 ? ldexp(value, scale) : value;
        put64(d, l, wide ? as_bits64(value) : as_bits((float)value));
        scaled |= (uint64_t)vcc << l;
    }
    for (int word = 0; word <= wide; word++) {
        write_lanes(w, &i->dst[0], word, d + word * WORD2, s.all, exec);
    }
    mask_set(w, &i->dst[1], scaled & exec, s.all | ~exec);
}

static void run_div_fmas(struct wave *w, const struct insn *i)
{
    static const struct operand vcc = {.kind = OPERAND_SCALAR, .reg = REG_VCC, .words = 2};
    _Alignas(64) uint32_t d[2 * LANES];
    struct sources s;
    uint64_t vcc_known, scaled = mask_get(w, &vcc, &vcc_known);
    take_sources(w, i, &s);
    for (unsigned l = 0; l < w->lanes; l++) {
        bool is = scaled >> l & 1;
        if (i->op->arg) {
            double z = as_double(take64(s.x[2], l));
            double r = fma(as_double(take64(s.x[0], l)), as_double(take64(s.x[1], l)), z);
            put64(d, l, as_bits64(is ? ldexp(r, exponent_of(z) > 0 ? 128 : -128) : r));
        } else {
            float z = as_float(s.x[2][l]), r = fmaf(as_float(s.x[0][l]), as_float(s.x[1][l]), z);
            d[l] = as_bits(is ? ldexpf(r, exponent_of((double)z) > 0 ? 64 : -64) : r);
        }
    }
    for (int word = 0; word <= i->op->arg; word++) {
        write_lanes(w, &i->dst[0], word, d + word * WORD2, s.all & vcc_known, exec_of(w));
    }
}

/* gfx12's: a scalar register's result of a unit that works on lanes. */
static void run_one(struct wave *w, const struct insn *i)
{
    _Alignas(64) struct result r;
    compute_lanes(w, i, &r);
    scalar_set(w, &i->dst[0], r.d[0], r.known & 1 ? UINT64_MAX : 0);
}

static unsigned first_lane(const struct wave *w)
{
    uint64_t exec = exec_of(w);
    return exec != 0 ? (unsigned)__builtin_ctzll(exec) : 0;
}

/* arg 1: the first active lane. */
static void run_readlane(struct wave *w, const struct insn *i)
{
    uint64_t known = UINT64_MAX, lane = first_lane(w);
    if (!i->op->arg) {
        lane = scalar_get(w, &i->src[1], &known);
        lane &= w->lanes - 1;
    }
    if ((uint32_t)known != UINT32_MAX) {
        wave_fail(w, "a lane's number from what was never written");
    }
    const struct operand *o = &i->src[0];
    if (o->kind != OPERAND_VECTOR) {
        uint64_t value = scalar_get(w, o, &known);
        scalar_set(w, &i->dst[0], value, known);
        return;
    }
    known = w->v_known[o->reg] >> lane & 1 ? UINT64_MAX : 0;
    scalar_set(w, &i->dst[0], w->v[o->reg][lane], known);
}

static void run_writelane(struct wave *w, const struct insn *i)
{
    uint64_t known, lane_known, value = scalar_get(w, &i->src[0], &known);
    uint64_t lane = scalar_get(w, &i->src[1], &lane_known) & (w->lanes - 1);
    uint64_t bit = UINT64_C(1) << lane;
    w->v[i->dst[0].reg][lane] = (uint32_t)value;
    w->v_known[i->dst[0].reg] =
        (w->v_known[i->dst[0].reg] & ~bit) | ((uint32_t)known == UINT32_MAX ? bit : 0);
}

/* Bits of a mask below the lane, plus a source. arg 1: the high word. */
static void run_mbcnt(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t d[LANES];
    struct sources s;
    take_sources(w, i, &s);
    for (int l = 0; l < (int)w->lanes; l++) {
        int below = i->op->arg ? l - 32 : l;
        uint32_t bits = below <= 0 ? 0 : below >= 32 ? UINT32_MAX : (1u << below) - 1;
        d[l] = (uint32_t)__builtin_popcount(s.x[0][l] & bits) + s.x[1][l];
    }
    write_lanes(w, &i->dst[0], 0, d, s.all, exec_of(w));
}

/* v_permlane16, v_permlanex16 (arg 1: of the other row), v_permlane64 (arg 2). */
static void run_permlane(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t room[2 * LANES], d[LANES];
    uint64_t known, low_known = UINT64_MAX, high_known = UINT64_MAX, d_known = 0;
    const uint32_t *from = source_lanes(w, i, 0, room, &known);
    uint64_t select = 0, exec = exec_of(w), lanes = exec;
    if (i->op->arg < 2) {
        select = (uint32_t)scalar_get(w, &i->src[1], &low_known);
        select |= scalar_get(w, &i->src[2], &high_known) << 32;
    }
    for (int l = 0; l < (int)w->lanes; l++) {
        int row = l & ~15, at = (int)(select >> (4 * (l & 15)) & 15);
        int source = i->op->arg == 2 ? l ^ 32 : (i->op->arg == 1 ? row ^ 16 : row) | at;
        bool valid = (exec >> source & 1) || (i->op_sel & 1);
        d[l] = valid ? from[source] : 0;
        d_known |= (uint64_t)(valid ? known >> source & 1 : 1) << l;
        if (!valid && !(i->op_sel & 2)) {
            lanes &= ~(UINT64_C(1) << l);
        }
    }
    if ((uint32_t)(low_known & high_known) != UINT32_MAX) {
        d_known = 0;
    }
    write_lanes(w, &i->dst[0], 0, d, d_known, lanes);
}

/* v_fma_mix_f32, v_fma_mixlo_f16, v_fma_mixhi_f16: a source is f16 where op_sel_hi says so, from
 * the half that op_sel says. arg: 0 f32, 1 low, 2 high. */
static void run_mix(struct wave *w, const struct insn *i)
{
    _Alignas(64) uint32_t rooms[3][2 * LANES], d[LANES];
    uint64_t known[3];
    const uint32_t *x[3];
    uint8_t halves = i->op_sel_hi == 0xff ? 0 : i->op_sel_hi;
    for (int n = 0; n < 3; n++) {
        struct insn bare = *i;
        bare.src[n].mods = 0;
        x[n] = source_lanes(w, &bare, n, rooms[n], &known[n]);
    }
    const uint32_t *old = w->v[i->dst[0].reg];
    for (unsigned l = 0; l < w->lanes; l++) {
        float f[3];
        for (int n = 0; n < 3; n++) {
            uint32_t word = x[n][l];
            f[n] = halves >> n & 1 ? h(i->op_sel >> n & 1 ? word >> 16 : word) : as_float(word);
            f[n] = i->src[n].mods & MOD_ABS ? fabsf(f[n]) : f[n];
            f[n] = i->src[n].mods & MOD_NEG ? -f[n] : f[n];
        }
        float r = fmaf(f[0], f[1], f[2]);
        r = i->flags & INSN_CLAMP ? max2(0.0f, min2(1.0f, r)) : r;
        d[l] = i->op->arg == 0   ? as_bits(r)
               : i->op->arg == 1 ? float_to_half(r) | (old[l] & 0xffff0000)
                                 : (uint32_t)float_to_half(r) << 16 | (old[l] & 0xffff);
    }
    write_lanes(w, &i->dst[0], 0, d, known[0] & known[1] & known[2], exec_of(w));
}

/* Any function of three bits, by a table of its results for S0 S1 S2 from 000 to 111. */
static void run_bitop3(struct wave *w, const struct insn *i)
{
    _Alignas(64) struct result r;
    struct sources s;
    if (i->op_sel != 0) {
        wave_fail(w, "halves of v_bitop3_b16, which nothing here has read yet");
        return;
    }
    take_sources(w, i, &s);
    for (unsigned l = 0; l < w->lanes; l++) {
        const uint32_t x = s.x[0][l], y = s.x[1][l], z = s.x[2][l];
        r.d[l] = 0;
        for (int n = 0; n < 8; n++) {
            uint32_t here = (n & 4 ? x : ~x) & (n & 2 ? y : ~y) & (n & 1 ? z : ~z);
            r.d[l] |= i->offset >> n & 1 ? here : 0;
        }
    }
    r.known = s.all;
    r.lanes = exec_of(w);
    commit_lanes(w, i, &r);
}

static void run_swap(struct wave *w, const struct insn *i)
{
    const struct operand *a = &i->dst[0], *b = &i->src[0];
    _Alignas(64) uint32_t kept[LANES];
    uint64_t known = w->v_known[a->reg];
    memcpy(kept, w->v[a->reg], sizeof kept);
    write_lanes(w, a, 0, w->v[b->reg], w->v_known[b->reg], exec_of(w));
    write_lanes(w, b, 0, kept, known, exec_of(w));
}

/* Registers by M0. arg 0: of the source, 1: of the destination. */
static void run_movrel(struct wave *w, const struct insn *i)
{
    struct operand to = i->dst[0], from = i->src[0];
    uint32_t *moved = w->s_known[REG_M0] == UINT32_MAX ? &w->s[REG_M0] : NULL;
    if (moved == NULL || from.kind != OPERAND_VECTOR || *moved >= FIRST_AGPR ||
        (i->op->arg ? to.reg : from.reg) + *moved >= FIRST_AGPR) {
        wave_fail(w, "a register's number that is none");
        return;
    }
    to.reg = (uint16_t)(to.reg + (i->op->arg ? *moved : 0));
    from.reg = (uint16_t)(from.reg + (i->op->arg ? 0 : *moved));
    write_lanes(w, &to, 0, w->v[from.reg], w->v_known[from.reg], exec_of(w));
}

/* ---- the table ---- */

#define ROW(NAME, TYPES, OPERATION, FLAGS, UNIT)                                                   \
    {.name = NAME,                                                                                 \
     .types = TYPES,                                                                               \
     .run = run_lanes,                                                                             \
     .lanes = OPERATION,                                                                           \
     .flags = FLAGS,                                                                               \
     .unit = UNIT},
#define OP(FORM, NAME, TYPES, ...) ROW(#NAME, TYPES, NAME, 0, CLASS_VECTOR)
#define SLOW(FORM, NAME, TYPES, ...) ROW(#NAME, TYPES, NAME, 0, CLASS_TRANSCENDENTAL)
#define FLAGGED(FLAGS, FORM, NAME, TYPES, ...) ROW(#NAME, TYPES, NAME, FLAGS, CLASS_VECTOR)
#define SAME(NAME, TYPES, OPERATION) ROW(#NAME, TYPES, OPERATION, 0, CLASS_VECTOR)
#define SLOW_SAME(NAME, TYPES, OPERATION) ROW(#NAME, TYPES, OPERATION, 0, CLASS_TRANSCENDENTAL)
#define ACCUMULATES(NAME, TYPES, OPERATION)                                                        \
    ROW(#NAME, TYPES, OPERATION, OP_ACCUMULATES, CLASS_VECTOR)
#define COMPARISON(NAME, TYPE, LETTERS, VALUE)                                                     \
    ROW("v_cmp_" #NAME "_" #TYPE, "M=" LETTERS, v_cmp_##NAME##_##TYPE, OP_COMPARES, CLASS_VECTOR)  \
    ROW("v_cmpx_" #NAME "_" #TYPE, LETTERS, v_cmp_##NAME##_##TYPE, OP_COMPARES | OP_TO_EXEC,       \
        CLASS_VECTOR)
#define X(NAMES, TYPES, RUN, ARG)                                                                  \
    {                                                                                              \
        .name = NAMES, .types = TYPES, .run = RUN, .unit = CLASS_VECTOR, .arg = ARG                \
    }
#define ONE(NAME, OPERATION)                                                                       \
    {                                                                                              \
        .name = #NAME, .types = "S=F", .run = run_one, .lanes = OPERATION,                         \
        .unit = CLASS_TRANSCENDENTAL                                                               \
    }

static const struct op ops[] = {
#include "vector_list.h"
    X("v_add_co_u32", "UM=UU", run_carry, 0),
    X("v_sub_co_u32", "UM=UU", run_carry, 1),
    X("v_subrev_co_u32", "UM=UU", run_carry, 3),
    X("v_addc_co_u32 v_add_co_ci_u32", "UM=UUM", run_carry, 0),
    X("v_subb_co_u32 v_sub_co_ci_u32", "UM=UUM", run_carry, 1),
    X("v_subbrev_co_u32 v_subrev_co_ci_u32", "UM=UUM", run_carry, 3),
    X("v_mad_u64_u32", "LM=UUL", run_mad64, 0),
    X("v_mad_i64_i32", "LM=UUL", run_mad64, 1),
    X("v_div_scale_f32", "FM=FFF", run_div_scale, 0),
    X("v_div_scale_f64", "DM=DDD", run_div_scale, 1),
    X("v_div_fmas_f32", "F=FFF", run_div_fmas, 0),
    X("v_div_fmas_f64", "D=DDD", run_div_fmas, 1),
    ONE(v_s_rcp_f32, v_rcp_f32),
    ONE(v_s_rsq_f32, v_rsq_f32),
    ONE(v_s_sqrt_f32, v_sqrt_f32),
    ONE(v_s_exp_f32, v_exp_f32),
    ONE(v_s_log_f32, v_log_f32),
    X("v_readlane_b32", "S=US", run_readlane, 0),
    X("v_readfirstlane_b32", "S=U", run_readlane, 1),
    X("v_writelane_b32", "U=SS", run_writelane, 0),
    X("v_mbcnt_lo_u32_b32", "U=UU", run_mbcnt, 0),
    X("v_mbcnt_hi_u32_b32", "U=UU", run_mbcnt, 1),
    X("v_permlane16_b32", "U=USS", run_permlane, 0),
    X("v_permlanex16_b32", "U=USS", run_permlane, 1),
    X("v_permlane64_b32", "U=U", run_permlane, 2),
    X("v_fma_mix_f32", "F=FFF", run_mix, 0),
    X("v_fma_mixlo_f16", "U=FFF", run_mix, 1),
    X("v_fma_mixhi_f16", "U=FFF", run_mix, 2),
    X("v_bitop3_b32", "U=UUU", run_bitop3, 0),
    X("v_bitop3_b16", "W=WWW", run_bitop3, 0),
    X("v_swap_b32", "U=U", run_swap, 0),
    X("v_movrels_b32", "U=U", run_movrel, 0),
    X("v_movreld_b32", "U=U", run_movrel, 1),
    X("v_nop", "*", run_nothing, 0),
};

const struct op_table vector_ops = {ops, sizeof ops / sizeof *ops};
