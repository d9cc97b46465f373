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

/* Windows that reach past every position, whose sums exceed 32 bits, hide nothing. Other masks, and
 * rows of every form, are attn-check's. */
static void test_visible()
{
    for (int i = 0; i < 3000; i++) {
        gpu_problem p = {};
        gpu_request q = {};
        q.length = 1 + below(200);
        q.query_len = 1 + below(std::min(q.length, 40));
        p.window_left = p.window_right = INT32_MAX - below(2);
        gpu_interval range = interval_of(p, q, below(q.query_len));
        check(range.first <= 0 && range.last == q.length - 1, "open window: keys %d .. %d of %d",
              range.first, range.last, q.length);
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
    test_visible();
    test_search();
    test_divergence();
    printf("%d of %d checks failed, seed %" PRIu64 "\n", failures, checks, seed);
    return failures != 0;
}
