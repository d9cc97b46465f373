/* SPDX-License-Identifier: Apache-2.0 */
/* index_top_k and index_top_k_short on the CPU, a fibre for each of their threads, against a sort:
 * rows that are short, long enough for a sample, or for several groups, and too long for marks;
 * scores for which the sample is right, and others. */
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "gpu/kernels/top_k.cpp"
#include "gpu/kernels/top_k_short.cpp"

enum draw { NORMAL, WHOLE, ZEROS, RARE, TINY, LEAST, NANS, RISING, CLUSTER, DRAWS };

static std::mt19937 generator(1);

static float score_of(int draw, int i, int n)
{
    static std::normal_distribution<float> normal;
    const float x = normal(generator);
    switch (draw) {
    case WHOLE:
        return std::round(x * 2);
    case ZEROS:
        return i % 2 != 0 ? 0.0f : -0.0f;
    case RARE: /* as by a ReLU: few positive ones, then ties */
        return i / 64 % 7 == 0 ? std::max(x, 0.0f) : 0.0f;
    case TINY:
        return -std::fabs(x) * 1e-30f;
    case LEAST: /* denormal numbers */
        return x * 1e-39f;
    case NANS:
        return i % 97 == 0 ? NAN : i % 89 == 0 ? INFINITY : x;
    case RISING:
        return (float)i / (float)n + 0.01f * x;
    case CLUSTER: /* the best in one place */
        return i > n / 3 && i < n / 3 + 6000 ? x + 9 : x;
    default:
        return x;
    }
}

/* Runs a group of a kernel. */
static void run_group(const gpu_index_params &p, bool is_short, int group, int groups)
{
    void (*const takes_all)(void *) = [](void *q) {
        kernel_index_top_k(*(const gpu_index_params *)q);
    };
    void (*const takes_short)(void *) = [](void *q) {
        kernel_index_top_k_short(*(const gpu_index_params *)q);
    };
    if (!is_short) {
        host_run_group(TOP_K_THREADS, (uint32_t)group, (uint32_t)groups, takes_all, (void *)&p);
    } else {
        host_run_group(GPU_THREADS_index_top_k_short, (uint32_t)group, (uint32_t)groups,
                       takes_short, (void *)&p);
    }
}

/* Whether the list, of so many groups, is the `topk` best entries in ascending order, then -1. */
static bool is_right(int n, int topk, int draw, int forced, int parts)
{
    enum { SPARE = 8 };
    std::vector<float> scores((size_t)(n + 63) / 64 * 64, NAN);
    for (int i = 0; i < n; i++) {
        scores[(size_t)i] = score_of(draw, i, n);
    }
    std::vector<int32_t> best((size_t)n), found((size_t)topk + SPARE, -7);
    std::vector<float> order = scores; /* a NaN and forced entries above all */
    for (int i = 0; i < n; i++) {
        best[(size_t)i] = i;
        float &x = order[(size_t)i];
        const bool first = i < forced || i >= n - 2 * forced;
        x = first ? INFINITY : std::isnan(x) ? 3e38f : std::isinf(x) ? 2e38f : x;
    }
    std::stable_sort(best.begin(), best.end(),
                     [&](int32_t a, int32_t b) { return order[(size_t)a] > order[(size_t)b]; });
    best.resize((size_t)topk);
    std::sort(best.begin(), best.end());
    best.resize((size_t)topk + SPARE, -1);
    int32_t query_start[2] = {0, 1}, length = 0;
    gpu_index_params p = {};
    p.query_start = query_start, p.seq_lens = &n, p.num_reqs = p.num_tokens = 1;
    p.heads = p.groups = p.tokens_per_row = p.rows_per_entry = p.rows_per_score = 1;
    p.max_rows = n, p.scores = scores.data(), p.score_stride = (int64_t)scores.size();
    p.topk = topk, p.first_entries = forced, p.last_entries = 2 * forced;
    p.out = found.data(), p.out_token = p.out_group = p.room = topk + SPARE, p.lengths = &length;
    std::vector<int32_t> kept((size_t)parts * 2 * INDEX_KEPT), counts((size_t)parts);
    int32_t arrived = 0;
    p.parts = parts, p.arrived = &arrived, p.kept = kept.data(), p.kept_count = counts.data();
    for (int group = parts - 1; group >= 0; group--) {
        run_group(p, n <= INDEX_SHORT, group, parts);
    }
    return length == topk && found == best;
}

/* Whether 8 queries of a request without keys have empty lists, and leave that of the query before
 * them, of 64 keys, as it is. */
static bool padding_is_empty(bool is_short, int tokens_per_row, int tail)
{
    enum { TOPK = 8, LISTS = 9 };
    std::vector<float> scores(LISTS * 64, 0.0f);
    std::vector<int32_t> found((size_t)LISTS * TOPK, -7);
    int32_t query_start[3] = {0, 1, LISTS}, lens[2] = {64, 0}, lengths[LISTS] = {0};
    gpu_index_params p = {};
    p.query_start = query_start, p.seq_lens = lens, p.num_reqs = 2, p.num_tokens = LISTS;
    p.heads = p.groups = p.rows_per_entry = p.rows_per_score = p.parts = 1;
    p.tokens_per_row = tokens_per_row, p.tail = tail;
    p.max_rows = 64, p.scores = scores.data(), p.score_stride = 64, p.topk = TOPK;
    p.out = found.data(), p.out_token = p.out_group = p.room = TOPK, p.lengths = lengths;
    for (int list = LISTS - 1; list >= 0; list--) { /* the list before it is written later */
        run_group(p, is_short, list, LISTS);
    }
    for (int list = 1; list < LISTS; list++) {
        run_group(p, is_short, list, LISTS);
    }
    bool right = lengths[0] == TOPK;
    for (int i = 0; i < LISTS * TOPK; i++) {
        right = right && found[(size_t)i] == (i < TOPK ? i : -1) &&
                lengths[i / TOPK] == (i < TOPK ? TOPK : 0);
    }
    return right;
}

int main()
{
    int failures = 0;
    for (int tokens_per_row : {1, 4}) {
        for (int tail = 0; tail < (tokens_per_row > 1 ? 2 : 1); tail++) {
            for (int is_short = 0; is_short < 2; is_short++) {
                if (!padding_is_empty(is_short != 0, tokens_per_row, tail)) {
                    failures++;
                    printf("queries without keys, rows of %d, tail %d: lists are not empty\n",
                           tokens_per_row, tail);
                }
            }
        }
    }
    for (int n : {31, 512, 1001, 2048, 2049, 8192, 8193, 16385, 65536, 131072, 131073}) {
        for (int topk : {1, 48, 2048, 5000}) {
            for (int draw = 0; draw < DRAWS; draw++) {
                const int forced = (draw + topk) % 2 * 3;
                const int parts = n < 2 * INDEX_PART_ROWS ? 1 : 1 + (draw * 5 + topk) % INDEX_PARTS;
                for (int turn = 0; topk < n && turn < (parts > 1 ? 2 : 1); turn++) {
                    if (!is_right(n, topk, draw, forced, turn == 0 ? parts : 1)) {
                        failures++;
                        printf("%d of %d entries, scores %d, %d forced, %d parts: another list\n",
                               topk, n, draw, 3 * forced, turn == 0 ? parts : 1);
                    }
                }
            }
        }
    }
    return failures != 0;
}
