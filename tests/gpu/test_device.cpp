/* SPDX-License-Identifier: Apache-2.0 */
/* The headers of gpu/device compiled for the host, a warp of fibres where they exchange values,
 * held to plain C in float64. Run with warps of 32 and of 64. Argument: a seed. */
#include <algorithm>
#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <random>
#include <vector>

#include <attn/kv_cache.h>
#include <cmath>
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu/device/rows.h"
#include "gpu/device/search.h"
#include "gpu/device/visible.h"

namespace plain
{
#include "common/number.h"
}

static std::mt19937_64 generator;
static int failures, checks;

static int below(int n)
{
    return (int)(generator() % (unsigned)n);
}

static double gaussian()
{
    static std::normal_distribution<double> normal;
    return normal(generator);
}

__attribute__((format(printf, 2, 3))) static void check(bool holds, const char *format, ...)
{
    checks++;
    if (!holds && failures++ < 20) {
        va_list arguments;
        va_start(arguments, format);
        vprintf(format, arguments);
        va_end(arguments);
        printf("\n");
    }
}

/* f(lane) in each lane of a warp. */
template <class F> static void in_warp(F f)
{
    host_run_group(
        GPU_LANES, 0, 1, [](void *argument) { (*(F *)argument)(lane_index()); }, &f);
}

static bool same(double a, double b)
{
    return (isnan(a) && isnan(b)) || (a == b && signbit(a) == signbit(b));
}

static const int32_t dtypes[] = {ATTN_DTYPE_F16,      ATTN_DTYPE_BF16,     ATTN_DTYPE_F32,
                                 ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2, ATTN_DTYPE_INT8};

static double load_plainly(const void *memory, int32_t dtype)
{
    double x;
    plain::number_load_row(&x, memory, dtype, 1);
    return x;
}

/* Every pattern of 8 and 16 bits. */
static void test_loads()
{
    for (int32_t dtype : dtypes) {
        int bytes = number_bytes_of(dtype);
        for (uint32_t i = 0; i < (bytes == 1 ? 256u : 65536u); i++) {
            uint32_t bits = bytes == 4 ? (uint32_t)generator() : i;
            double x = number_load((const char *)&bits, dtype, 0), y = load_plainly(&bits, dtype);
            check(same(x, y) || (isnan(x) && isnan(y)), "load of dtype %d, %#x: %g, not %g", dtype,
                  bits, x, y);
        }
    }
}

/* Numbers of all sizes, those between two neighbours of the format, and the ends. */
static float number_to_store(int32_t dtype)
{
    static const float ends[] = {0.0f,    -0.0f,    INFINITY, -INFINITY, 448.0f,   464.0f,
                                 480.0f,  57344.0f, 65504.0f, 65519.9f,  65520.0f, 1e30f,
                                 0x1p-9f, 0x1p-10f, 0x1p-24f, 0x1p-25f,  -127.5f,  127.5f};
    int kind = below(4);
    if (kind == 0) {
        return ends[below((int)(sizeof ends / sizeof *ends))];
    }
    if (kind == 1) {
        return (float)ldexp(gaussian(), below(60) - 30);
    }
    uint32_t bits = (uint32_t)generator(), next;
    int bytes = number_bytes_of(dtype);
    if (bytes == 4) {
        return bits_float(bits);
    }
    bits &= bytes == 1 ? 0x7f : 0x7fff;
    next = bits + 1;
    double middle = (load_plainly(&bits, dtype) + load_plainly(&next, dtype)) / 2;
    float x = (float)middle;
    return kind == 2 ? x : bits_float(float_bits(x) + (uint32_t)below(3) - 1);
}

static void test_stores()
{
    for (int32_t dtype : dtypes) {
        int bytes = number_bytes_of(dtype);
        for (int i = 0; i < 200000; i++) {
            float x = number_to_store(dtype);
            double y = x;
            uint32_t here = 0, there = 0;
            if (isnan(x)) {
                continue;
            }
            number_store((char *)&here, dtype, 0, x);
            plain::number_store_row(&there, &y, dtype, 1);
            check(here == there, "store of dtype %d, %a: %#x, not %#x", dtype, x, here, there);
            if (bytes == 1 && dtype != ATTN_DTYPE_INT8) {
                float other = number_to_store(dtype);
                bool e5m2 = dtype == ATTN_DTYPE_FP8_E5M2;
                uint32_t two = fp8_pair_of(e5m2, x, x);
                check(isnan(other) || two == (here | here << 8), "fp8_pair_of %a: %#x", x, two);
            }
        }
    }
}

/* A quotient rounded to odd and then to a smaller format is the true quotient rounded once; past
 * 60000 only fp8 asks, which saturates. */
static void test_quotients()
{
    static const int32_t small[] = {ATTN_DTYPE_F16, ATTN_DTYPE_FP8_E4M3, ATTN_DTYPE_FP8_E5M2};
    for (int i = 0; i < 400000; i++) {
        int32_t dtype = small[i % 3];
        float scale = (float)exp(gaussian() * 3) * (below(8) == 0 ? -1.0f : 1.0f);
        float x = number_to_store(dtype) * (below(2) ? scale : 1.0f);
        if (isnan(x) || isinf(x)) {
            continue;
        }
        /* in long double: a tie of the format is not missed, nor made */
        double quotient = (double)((long double)x / (long double)scale);
        long double rest = (long double)x - (long double)quotient * (long double)scale;
        if (rest != 0 && (rest > 0) == (scale > 0)) {
            quotient = nextafter(quotient, INFINITY);
        } else if (rest != 0) {
            quotient = nextafter(quotient, -INFINITY);
        }
        if (fabs(quotient) >= 60000.0 && number_bytes_of(dtype) == 2) {
            continue;
        }
        uint32_t here = 0, there = 0;
        number_store((char *)&here, dtype, 0, divide_odd(x, divisor_of(scale)));
        plain::number_store_row(&there, &quotient, dtype, 1);
        check(here == there, "%a / %a to dtype %d: %#x, not %#x", x, scale, dtype, here, there);
    }
}

static void test_small_codes()
{
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int i = 0; i < 100000; i++) {
        double x = below(3) == 0 ? (below(29) - 14) * 0.25 : gaussian() * 3;
        uint32_t code = e2m1_of(x), nearest = 0;
        for (uint32_t c = 1; c < 8; c++) {
            double old = fabs(e2m1[nearest] - fabs(x)), now = fabs(e2m1[c] - fabs(x));
            nearest = now < old || (now == old && c % 2 == 0) ? c : nearest;
        }
        check(code == (nearest | (signbit(x) ? 8u : 0u)), "e2m1_of %g: %u, not %u", x, code,
              nearest);
        check(same(e2m1_number(code), signbit(x) ? -e2m1[nearest] : e2m1[nearest]),
              "e2m1_number %u", code);
        float y = (float)(gaussian() * 90);
        double r = round((double)y);
        check(number_to_int8(y) == (int)std::max(-127.0, std::min(127.0, r)), "number_to_int8 %g",
              y);
        double z = ldexp(gaussian(), below(200) - 100);
        float odd = odd_float(z);
        bool brackets = fabs((double)odd - z) <= fabs(ldexp(z, -22)) || fabs(z) < 0x1p-120;
        check(brackets && ((double)odd == z || (float_bits(odd) & 1) != 0 || fabs(z) < 0x1p-120),
              "odd_float %a: %a", z, odd);
    }
    check(number_to_int8(NAN) == 0, "number_to_int8 of NaN");
}

static void test_sums_of_lanes()
{
    for (int i = 0; i < 200; i++) {
        float x[GPU_LANES];
        double sum = 0, largest = 0;
        for (float &v : x) {
            v = (float)gaussian();
            sum += v;
            largest = std::max(largest, (double)fabsf(v));
        }
        int nan_lane = below(4) == 0 ? below(GPU_LANES) : -1;
        in_warp([&](int32_t lane) {
            float mine = warp_sum(x[lane]), size = fabsf(x[lane]);
            float kept = warp_largest(lane == nan_lane ? NAN : size, true);
            float left = warp_largest(lane == nan_lane ? NAN : size, false);
            check(fabs(mine - sum) < 1e-5 * GPU_LANES, "warp_sum %g, not %g", mine, sum);
            check(nan_lane >= 0 ? isnan(kept) : (double)kept == largest, "warp_largest %g", kept);
            check(!isnan(left) && (double)left <= largest, "warp_largest without NaN %g", left);
            check(any_lane(lane == nan_lane) == (nan_lane >= 0), "any_lane");
            check(lane_up(lane, 3) == (lane < 3 ? lane : lane - 3), "lane_up");
            check(lane_down(lane, 5) == (lane + 5 < GPU_LANES ? lane + 5 : lane), "lane_down");
        });
    }
}

/* A cache of one block with rows of a form, and what a test writes into it. */
struct small_cache {
    gpu_cache c = {};
    std::vector<char> data, scales;
    std::vector<float> signs, channel;
    float scale = 1.0f;
    std::vector<float> row;

    small_cache(int32_t form, int32_t dtype, int32_t size, int slots)
        : data((size_t)slots * 512 * 4, 0x55), scales((size_t)slots * 64, 0x55), row(size)
    {
        c.data = data.data();
        c.slot = 512 * 4;
        c.dtype = dtype;
        c.form = form;
        c.head_size = size;
        c.scale_host = scale = (float)exp(gaussian());
        c.row_scale = scales.data();
        c.row_scale_slot = form == GPU_ROW_NVFP4 ? size / 16 : 4;
        for (int d = 0; d < size; d++) {
            signs.push_back(below(2) ? 1.0f : -1.0f);
            channel.push_back((float)exp(gaussian()) * 0.05f);
            row[(size_t)d] = (float)(gaussian() * 3);
        }
        c.signs = signs.data();
        c.channel = channel.data();
    }
};

/* The rotated row of int4, by the matrix itself. */
static std::vector<double> rotate(const std::vector<double> &x)
{
    std::vector<double> y(x.size());
    for (size_t i = 0; i < x.size(); i++) {
        for (size_t j = 0; j < x.size(); j++) {
            y[i] += __builtin_parityll(i & j) ? -x[j] : x[j];
        }
    }
    return y;
}

/* Half a step of the form at this element, with what float arithmetic adds. */
static void check_row(const small_cache &m, const std::vector<double> &read, int slot)
{
    const gpu_cache &c = m.c;
    double largest = 0;
    for (float x : m.row) {
        largest = std::max(largest, fabs((double)x));
    }
    for (int d = 0; d < c.head_size; d++) {
        double x = m.row[(size_t)d], step = 0;
        double bound = c.scale_host * (c.dtype == ATTN_DTYPE_FP8_E5M2 ? 0x1p-17 : 0x1p-10);
        switch (c.form) {
        case GPU_ROW_NUMBERS:
            if (m.c.dtype == ATTN_DTYPE_FP8_E4M3 && fabs(x) > 448.0 * m.c.scale_host) {
                continue; /* saturated */
            }
            step = c.dtype == ATTN_DTYPE_FP8_E4M3   ? 0x1p-4
                   : c.dtype == ATTN_DTYPE_FP8_E5M2 ? 0x1p-3
                   : c.dtype == ATTN_DTYPE_F16      ? 0x1p-11
                   : c.dtype == ATTN_DTYPE_BF16     ? 0x1p-8
                                                    : 0;
            bound += fabs(x) * step;
            break;
        case GPU_ROW_SCALED:
            bound = c.dtype == ATTN_DTYPE_INT8 ? largest / 254
                                               : fabs(x) * 0x1p-4 + largest / 448 * 0x1p-10;
            break;
        case GPU_ROW_CHANNEL:
            bound = c.channel[d] / 2;
            if (fabs(x) > 127.5 * c.channel[d]) {
                continue; /* saturated */
            }
            break;
        case GPU_ROW_NVFP4:
            bound = largest / 6 * 1.13; /* the widest step, and its scale's rounding */
            break;
        case GPU_ROW_STEPS: /* half a step; step and zero in float16 */
            bound = largest * (1.0 / ((1 << c.bits) - 1) + 0x1p-9);
            break;
        default:
            continue; /* by the rotated row */
        }
        check(fabs(read[(size_t)d] - x) <= bound * 1.0001 + 1e-6,
              "row of form %d, dtype %d, slot %d, dim %d: %g, not %g", c.form, c.dtype, slot, d,
              read[(size_t)d], x);
    }
}

/* Where block scales lie, from the definition: K's in order; V's over the 4 slots of a group. */
static void check_block_scales(const small_cache &m, int slot)
{
    int blocks = m.c.head_size / 16;
    for (int i = 0; i < blocks; i++) {
        double largest = 0;
        for (int d = 16 * i; d < 16 * i + 16; d++) {
            largest = std::max(largest, fabs((double)m.row[(size_t)d]));
        }
        uint8_t code = plain::number_to_e4m3(largest / 6 / (double)m.c.scale_host);
        int quarter = blocks / 4, at = slot * blocks + i;
        if (m.c.swizzled) {
            at = (slot / 4 * 4 + i / quarter) * blocks + i % quarter * 4 + slot % 4;
        }
        int found = (uint8_t)m.scales[(size_t)at];
        check(abs(found - code) <= 1, "scale of block %d, slot %d: %#x, not %#x", i, slot, found,
              code);
    }
}

static void check_int4(const small_cache &m, const std::vector<double> &read, int slot)
{
    std::vector<double> signed_row(m.row.size()), difference(m.row.size());
    for (size_t d = 0; d < m.row.size(); d++) {
        signed_row[d] = (double)m.row[d] * m.signs[d];
        difference[d] = (read[d] - (double)m.row[d]) * m.signs[d];
    }
    std::vector<double> turned = rotate(signed_row), error = rotate(difference);
    auto [low, high] = std::minmax_element(turned.begin(), turned.end());
    double step = (*high - *low) / 15;
    for (size_t d = 0; d < m.row.size(); d++) {
        /* codes end at 0 and 15: where 0 is not between them, they do not reach the row */
        bool reached = *low <= 0 && *high >= 0;
        check(!reached || fabs(error[d]) <= step * 1.01 + 1e-4,
              "int4, slot %d, rotated dim %zu: off by %g, a step is %g", slot, d, error[d], step);
    }
}

/* The length is kept in float16; each rotated coordinate lies between the middles of its level. */
static void check_levels(const small_cache &m, const std::vector<double> &read, int slot)
{
    size_t size = m.row.size();
    double length = 0, kept = 0, together = 0;
    for (size_t d = 0; d < size; d++) {
        length += (double)m.row[d] * (double)m.row[d];
        kept += read[d] * read[d];
        together += read[d] * (double)m.row[d];
    }
    check(fabs(sqrt(kept / length) - 1) < 0x1p-10, "levels, slot %d: length %g, not %g", slot,
          sqrt(kept), sqrt(length));
    /* 0.99 and 0.965 of a normal row on average; a row of 64 has less of an average */
    double least = m.c.bits == 4 ? 0.97 : 0.93;
    check(together / sqrt(kept * length) > least, "levels of %d bits, slot %d: cosine %g", m.c.bits,
          slot, together / sqrt(kept * length));
    std::vector<double> row(m.row.begin(), m.row.end()), turned = rotate(row), back = rotate(read);
    for (size_t d = 0; d < size; d++) { /* signs survive, and order up to a cell */
        check(turned[d] * back[d] >= 0 || fabs(turned[d]) < 1e-6 * sqrt(length),
              "levels, slot %d, rotated dim %zu: %g, not %g", slot, d, back[d], turned[d]);
    }
}

static void test_rows()
{
    static const int32_t forms[][2] = {
        {GPU_ROW_NUMBERS, ATTN_DTYPE_F16},      {GPU_ROW_NUMBERS, ATTN_DTYPE_BF16},
        {GPU_ROW_NUMBERS, ATTN_DTYPE_F32},      {GPU_ROW_NUMBERS, ATTN_DTYPE_FP8_E4M3},
        {GPU_ROW_NUMBERS, ATTN_DTYPE_FP8_E5M2}, {GPU_ROW_SCALED, ATTN_DTYPE_FP8_E4M3},
        {GPU_ROW_SCALED, ATTN_DTYPE_INT8},      {GPU_ROW_CHANNEL, ATTN_DTYPE_INT8},
        {GPU_ROW_INT4, ATTN_DTYPE_INT8},        {GPU_ROW_NVFP4, ATTN_DTYPE_INT8},
        {GPU_ROW_LEVELS, ATTN_DTYPE_INT8},      {GPU_ROW_STEPS, ATTN_DTYPE_INT8}};
    for (int i = 0; i < 480; i++) {
        const int32_t *form = forms[i % 12];
        int32_t size = 64 << below(4), slot = below(8);
        small_cache m(form[0], form[1], size, 8);
        bool scaled = m.c.dtype >= ATTN_DTYPE_FP8_E4M3;
        m.c.scale_host = scaled ? m.c.scale_host : 1.0f;
        m.c.swizzled = m.c.form == GPU_ROW_NVFP4 && below(2);
        m.c.bits = 3 + below(2);
        std::vector<double> read((size_t)size);
        in_warp([&](int32_t lane) {
            row_store(m.c, 0, slot, 0, (const char *)m.row.data(), ATTN_DTYPE_F32, lane);
            sync_lanes();
            float x[LANE_DIMS], squares = 0.0f;
            bool nibbles = m.c.form >= GPU_ROW_INT4;
            gpu_cache_row row =
                nibbles ? enter_row<true>(m.c, 0, slot, 0) : enter_row<false>(m.c, 0, slot, 0);
            for (int n = 0; n < LANE_DIMS; n++) {
                int32_t d = n * GPU_LANES + lane;
                x[n] = d >= size ? 0.0f
                       : nibbles ? row_element<true>(m.c, row, 0, d)
                                 : row_element<false>(m.c, row, 0, d);
                squares += x[n] * x[n];
            }
            if (is_turned(m.c)) {
                turn_back(m.c, x, lane);
            }
            float scale = nibbles ? row_scale<true>(m.c, row) : row_scale<false>(m.c, row);
            squares = warp_sum(squares);
            scale = m.c.form == GPU_ROW_LEVELS ? scale / sqrtf(squares) : scale;
            for (int n = 0; n < LANE_DIMS; n++) {
                if (n * GPU_LANES + lane < size) {
                    read[(size_t)(n * GPU_LANES + lane)] = (double)x[n] * scale;
                }
            }
        });
        check_row(m, read, slot);
        if (m.c.form == GPU_ROW_INT4) {
            check_int4(m, read, slot);
        } else if (m.c.form == GPU_ROW_LEVELS) {
            check_levels(m, read, slot);
        } else if (m.c.form == GPU_ROW_NVFP4) {
            check_block_scales(m, slot);
        }
    }
}

/* A random mask; sees_plainly is its definition. */
struct mask {
    gpu_problem p = {};
    gpu_request q = {};
    std::vector<int32_t> spans, span_start;
    std::vector<uint32_t> tree;
};

static mask random_mask()
{
    mask m;
    gpu_problem &p = m.p;
    m.q.length = below(200);
    m.q.query_len = std::min(m.q.length, 1 + below(40));
    m.q.causal = below(2);
    p.group = 1 + below(8);
    p.window_left = below(3) == 0 ? below(60) : -1;
    p.window_right = below(3) == 0 ? below(5) ? below(60) : INT32_MAX : -1;
    p.chunk_size = below(3) == 0 ? 1 + below(50) : 0;
    p.chunk_lookback = below(3) ? below(2) : INT32_MAX - below(2);
    for (int i = below(3); i > 0; i--) {
        int first = below(200);
        m.spans.push_back(first);
        m.spans.push_back(below(4) ? first + below(30) : INT32_MAX);
    }
    m.span_start = {0, (int32_t)m.spans.size() / 2};
    p.spans = m.spans.empty() ? nullptr : m.spans.data();
    p.span_start = m.span_start.data();
    p.prefix_lm_window = below(2) ? 1 + below(20) : 0;
    if (below(3) == 0) {
        p.tree_mask = ATTN_TREE_BITS;
        for (int i = 0; i < 80; i++) {
            m.tree.push_back((uint32_t)generator());
        }
        p.tree = m.tree.data();
        p.tree_row = 2;
    }
    return m;
}

static bool sees_plainly(const mask &m, int index, int j)
{
    const gpu_problem &p = m.p;
    int position = m.q.length - m.q.query_len + index, column = j - (m.q.length - m.q.query_len);
    bool sees = j >= 0 && j < m.q.length;
    bool by_terms = !m.q.causal || j <= position;
    by_terms = by_terms && (p.window_left < 0 || position - j <= p.window_left);
    by_terms = by_terms && (p.window_right < 0 || j - position <= p.window_right);
    by_terms = by_terms && (p.chunk_size <= 0 ||
                            j / p.chunk_size >= position / p.chunk_size - p.chunk_lookback);
    bool by_span = false;
    for (size_t s = 0; s + 1 < m.spans.size(); s += 2) {
        bool both = position >= m.spans[s] && position <= m.spans[s + 1] && j >= m.spans[s] &&
                    j <= m.spans[s + 1];
        by_span =
            by_span || (both && (p.prefix_lm_window == 0 || position - j < p.prefix_lm_window));
    }
    bool by_tree = p.tree == nullptr || column < 0 ||
                   (m.tree[(size_t)(index * 2 + column / 32)] >> (column % 32) & 1);
    return sees && (by_terms || by_span) && by_tree;
}

static void test_visible()
{
    for (int i = 0; i < 3000; i++) {
        mask m = random_mask();
        for (int index = 0; index < m.q.query_len; index++) {
            gpu_interval range = interval_of(m.p, m.q, index);
            int32_t k0, k1;
            key_range(m.p, m.q, index * m.p.group, (index + 1) * m.p.group, &k0, &k1);
            for (int j = -2; j < m.q.length + 3; j++) {
                bool sees = sees_slow(m.p, m.q, index, range.position, j,
                                      j >= range.first && j <= range.last);
                bool truth = sees_plainly(m, index, j);
                check(sees == truth, "mask %d, query %d, key %d: %d", i, index, j, sees);
                check(!truth || (j >= k0 && j < k1), "mask %d, query %d: key %d not in %d .. %d", i,
                      index, j, k0, k1);
            }
        }
        float score = (float)gaussian() * 40, cap = 5 + (float)below(50);
        double capped = cap * tanh((double)score / cap);
        check(fabs(cap_score(score, cap) - capped) < 2e-5 * cap, "cap_score %g of %g: %g", score,
              cap, cap_score(score, cap));
    }
}

static void test_search()
{
    for (int i = 0; i < 5000; i++) {
        std::vector<int32_t> starts(1 + (size_t)below(40));
        int32_t sum = below(3);
        for (int32_t &start : starts) {
            start = sum;
            sum += below(4) == 0 ? 0 : below(9);
        }
        int32_t x = starts[0] + below(sum - starts[0] + 3), last = 0;
        for (size_t k = 0; k < starts.size(); k++) {
            last = starts[k] <= x ? (int32_t)k : last;
        }
        int32_t found = find_last(starts.data(), (int32_t)starts.size(), x);
        check(found == last, "find_last: %d, not %d", found, last);
    }
}

/* Kernels whose threads part at barriers. */
static void leave_early(void *)
{
    if (thread_index() >= GPU_LANES) {
        sync_group();
    }
}

static void part_at_barriers(void *)
{
    if (thread_index() % 2 == 0) {
        sync_group();
    } else {
        sync_group();
    }
}

static void exchange_with_none(void *)
{
    if (own_lane() > 0) {
        lane_xor(1, 1);
    }
}

/* They end the process that runs them, and say why. */
static void check_defect(void (*kernel)(void *), const char *cause)
{
    int ends[2], status = 0;
    char said[512] = "";
    check(pipe(ends) == 0, "no pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        alarm(20); /* without the check they wait for ever */
        host_run_group(2 * GPU_LANES, 0, 1, kernel, nullptr);
        _exit(0);
    }
    close(ends[1]);
    ssize_t length = read(ends[0], said, sizeof said - 1);
    close(ends[0]);
    waitpid(child, &status, 0);
    check(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT && length > 0 &&
              strstr(said, cause) != nullptr,
          "\"%s\", not \"%s\"", said, cause);
}

static void test_divergence()
{
    check_defect(leave_early, "some threads never reach");
    check_defect(part_at_barriers, "others wait at another one");
    check_defect(exchange_with_none, "some threads never reach");
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], nullptr, 0) : 1;
    generator.seed(seed);
    test_loads();
    test_stores();
    test_quotients();
    test_small_codes();
    test_sums_of_lanes();
    test_rows();
    test_visible();
    test_search();
    test_divergence();
    printf("%d of %d checks failed, seed %" PRIu64 "\n", failures, checks, seed);
    return failures != 0;
}
