/* SPDX-License-Identifier: Apache-2.0 */
/* A variant's operations on single rows: score terms, scaling, rotation, conversion, the gated
 * delta rule's inner loops, and the codes of quantized rows. */
#include "kernels_test.h"

enum { TIMES = 40 };

static _Alignas(64) float row[2 * MAX_SIZE], other[2 * MAX_SIZE];
static double wanted[2 * MAX_SIZE];

static void fill(float *x, int32_t n, float size)
{
    for (int32_t i = 0; i < n; i++) {
        x[i] = draw_number(size);
    }
}

static void check_row(int32_t n, double relative, double absolute, const char *what)
{
    for (int32_t i = 0; i < n; i++) {
        check_near(row[i], wanted[i], relative * fabs(wanted[i]) + absolute, what, i, 0);
    }
}

/* The soft cap keeps relative precision at scores far below it. */
void test_terms(void **state)
{
    for (int32_t time = 0; time < 4 * TIMES; time++) {
        int32_t n = 32 * (1 + (int32_t)draw(TILE_KEYS / 32));
        static const float caps[] = {0, 1, 50, 1e6f};
        struct score_terms terms = {.scale = 0.125f,
                                    .soft_cap = caps[draw(4)],
                                    .key_scale = draw(2) ? other : NULL,
                                    .alibi = (int32_t)draw(3),
                                    .slope = 0.25f,
                                    .distance = (float)draw(300) - 50};
        fill(row, n, ldexpf(1.0f, (int)draw(24) - 12));
        fill(other, n, 2.0f);
        double most = 0;
        for (int32_t j = 0; j < n; j++) {
            double s = (double)row[j] * terms.scale * (terms.key_scale != NULL ? other[j] : 1);
            double cap = terms.soft_cap, distance = terms.distance - (float)j;
            s = cap > 0 ? cap * tanh(s / cap) : s;
            double bias = terms.alibi == ALIBI_LINEAR ? fabs(distance)
                          : terms.alibi == ALIBI_SQRT ? sqrt(distance > 0 ? distance : 0)
                                                      : 0;
            wanted[j] = s - terms.slope * bias;
            most = fmax(most, terms.slope * bias);
        }
        variant->terms(row, n, &terms);
        check_row(n, 6e-7, 1e-6 * most, "terms");
    }
    struct score_terms terms = {.scale = 0.125f, .soft_cap = 50};
    BENCH("terms: soft cap, 128", variant->terms(row, 128, &terms))
}

void test_rows(void **state)
{
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t n = 32 * (1 + (int32_t)draw(MAX_SIZE / 32));
        float by = draw_number(3.0f);
        fill(row, n, 5.0f);
        fill(other, n, 5.0f);
        for (int32_t i = 0; i < n; i++) {
            wanted[i] = row[i] + (double)by * other[i];
        }
        variant->add_scaled(row, other, by, n);
        check_row(n, 1e-7, 2e-6, "add_scaled");
        for (int32_t i = 0; i < n; i++) {
            wanted[i] = (double)row[i] * by;
        }
        variant->scale_row(row, by, n);
        check_row(n, 1e-7, 0, "scale_row");
        n = 1 << draw(10);
        fill(row, n, 1.0f);
        for (int32_t i = 0; i < n; i++) {
            wanted[i] = 0;
            for (int32_t j = 0; j < n; j++) {
                wanted[i] += __builtin_parity((unsigned)(i & j)) ? -row[j] : row[j];
            }
        }
        variant->hadamard(row, n);
        check_row(n, 0, 1e-6 * n, "hadamard");
    }
    BENCH("hadamard, 128", variant->hadamard(row, 128))
}

void test_store(void **state)
{
    static uint8_t out[4 * MAX_SIZE + 8];
    static const int32_t formats[] = {ELEMENT_F32, ELEMENT_F16, ELEMENT_BF16};
    for (int32_t time = 0; time < TIMES; time++) {
        for (int32_t f = 0; f < 3; f++) {
            int32_t n = 1 + (int32_t)draw(MAX_SIZE), bytes = f == 0 ? 4 : 2;
            fill(row, n, ldexpf(1.0f, (int)draw(20) - 10));
            memset(out, 0xee, sizeof out);
            variant->store[f](out, row, 0.75f, n);
            for (int32_t i = 0; i < n; i++) {
                float x = 0.75f * row[i];
                double found = x;
                uint16_t code;
                memcpy(&code, out + 2 * i, sizeof code);
                if (f > 0) {
                    found = code_value(formats[f], code);
                } else {
                    memcpy(&x, out + 4 * i, sizeof x);
                    check_near(x, found, 0, "store", f, i);
                }
                double step = f == 0 ? 0 : f == 1 ? 0x1p-11 : 0x1p-8;
                check_near(found, 0.75 * row[i], step * fabs(x) + 0x1p-24 * fabs(x) + 0x1p-25,
                           "store", f, i);
            }
            assert_int_equal(out[n * bytes], 0xee);
        }
    }
}

void test_nibbles(void **state)
{
    static uint8_t packed[MAX_SIZE];
    static int8_t codes[2 * MAX_SIZE];
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t n = 2 * (1 + (int32_t)draw(MAX_SIZE)), zero = (int32_t)draw(16);
        for (int32_t i = 0; i < n / 2; i++) {
            packed[i] = (uint8_t)draw(256);
        }
        variant->nibbles(codes, packed, zero, n);
        for (int32_t i = 0; i < n; i++) {
            assert_int_equal(codes[i], (packed[i / 2] >> 4 * (i % 2) & 15) - zero);
        }
    }
}

void test_delta(void **state)
{
    enum { ROWS = 48, DEPTH = 200 };
    static float before[ROWS * DEPTH], after[ROWS * DEPTH], q[DEPTH], k[DEPTH], v[ROWS], out[ROWS];
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t rows = 1 + (int32_t)draw(ROWS), depth = 8 * (1 + (int32_t)draw(DEPTH / 8));
        float decay = 0.9f, beta = 0.7f;
        double kq = 0;
        fill(before, rows * depth, 1.0f);
        fill(q, depth, 0.3f);
        fill(k, depth, 0.3f);
        fill(v, rows, 1.0f);
        for (int32_t i = 0; i < depth; i++) {
            kq += (double)k[i] * q[i];
        }
        bool in_place = draw(2);
        memcpy(after, before, sizeof after);
        struct delta_args args = {.to = after,
                                  .from = in_place ? after : before,
                                  .rows = rows,
                                  .depth = depth,
                                  .q = q,
                                  .k = k,
                                  .v = v,
                                  .out = out,
                                  .decay = decay,
                                  .beta = beta,
                                  .kq = (float)kq};
        variant->delta->step(&args);
        for (int32_t d = 0; d < rows; d++) {
            double by_k = 0, o = 0;
            for (int32_t i = 0; i < depth; i++) {
                by_k += decay * (double)before[d * depth + i] * k[i];
            }
            double r = beta * (v[d] - by_k);
            for (int32_t i = 0; i < depth; i++) {
                double s = decay * (double)before[d * depth + i] + r * k[i];
                check_near(after[d * depth + i], s, 1e-5, "state", d, i);
                o += s * q[i];
            }
            check_near(out[d], o, 3e-5, "out of a step", d, 0);
        }
    }
    int32_t n = 96;
    double dot = 0;
    fill(row, n, 1.0f);
    fill(other, n, 1.0f);
    for (int32_t i = 0; i < n; i++) {
        dot += (double)row[i] * other[i];
    }
    check_near(variant->delta->dot(row, other, n), dot, 1e-5, "dot", 0, 0);
    struct delta_args args = {.to = after,
                              .from = after,
                              .rows = 48,
                              .depth = 128,
                              .q = q,
                              .k = k,
                              .v = v,
                              .out = out,
                              .decay = 0.5f,
                              .beta = 0.5f};
    BENCH("delta step 48 x 128", variant->delta->step(&args))
}

/* What memory holds of a state, and what passes over it; a value column a pass, in double. */
static void walk_plainly(const struct walk_args *args, double *memory, int32_t column, double *out)
{
    const int32_t depth = args->depth;
    for (int32_t g = 0; g < args->count; g++) {
        const struct walk_group *group = &args->groups[g];
        const float *k = args->k + g * WALK_TOKENS * depth, *q = args->q + g * WALK_TOKENS * depth;
        double r[WALK_TOKENS] = {0};
        for (int32_t t = 0; t < group->tokens; t++) {
            int32_t row = g * WALK_TOKENS + t;
            double by_k = 0, by_q = 0;
            for (int32_t i = 0; i < depth; i++) {
                by_k += memory[i] * k[t * depth + i];
                by_q += memory[i] * q[t * depth + i];
            }
            double o = group->e[t] * by_q;
            r[t] = group->beta[t] * args->v[row * args->stride + column];
            r[t] += group->by_state[t] * by_k;
            for (int32_t j = 0; j < t; j++) {
                r[t] += group->by_r[t][j] * r[j];
            }
            for (int32_t j = 0; j <= t; j++) {
                o += group->by_q[t][j] * r[j];
            }
            out[row] = o;
        }
        for (int32_t i = 0; i < depth; i++) {
            memory[i] *= group->keep;
            for (int32_t t = 0; t < group->tokens; t++) {
                memory[i] += group->left[t] * r[t] * k[t * depth + i];
            }
        }
    }
}

/* Values after a group's last token are NaN and must not reach the state. */
static void check_walk(int32_t depth, int32_t count, int32_t element, bool bench)
{
    enum { TOKENS = 64, DEPTH = 160, STRIDE = WALK_COLUMNS + 8 };
    static float state[DEPTH * WALK_COLUMNS], before[DEPTH * WALK_COLUMNS];
    static float q[TOKENS * DEPTH], k[TOKENS * DEPTH], v[TOKENS * STRIDE], o[TOKENS * STRIDE];
    static uint8_t stored[TOKENS * STRIDE * 4];
    static const double rounding[] = {0, 1.0 / 2048, 1.0 / 256};
    struct walk_group groups[TOKENS / WALK_TOKENS];
    const struct walk_args args = {.state = state,
                                   .q = q,
                                   .k = k,
                                   .v = v,
                                   .o = stored,
                                   .stride = STRIDE,
                                   .o_bytes = STRIDE * (element == ELEMENT_F32 ? 4 : 2),
                                   .element = element,
                                   .depth = depth,
                                   .count = count,
                                   .groups = groups};
    fill(before, DEPTH * WALK_COLUMNS, 1.0f);
    fill(q, TOKENS * DEPTH, 0.1f);
    fill(k, TOKENS * DEPTH, 0.1f);
    fill(v, TOKENS * STRIDE, 1.0f);
    for (int32_t g = 0; g < count; g++) {
        fill((float *)&groups[g].e,
             (int32_t)((sizeof *groups - offsetof(struct walk_group, e)) / 4), 1.0f);
        groups[g].tokens = g + 1 < count ? WALK_TOKENS : 1 + (int32_t)draw(WALK_TOKENS);
        groups[g].keep = draw(2) ? 1.0f : draw(4) ? 0.25f : 0.0f;
        for (int32_t t = groups[g].tokens; t < WALK_TOKENS; t++) {
            v[(g * WALK_TOKENS + t) * STRIDE + 3] = NAN;
        }
    }
    memcpy(state, before, sizeof state);
    memset(stored, 0xa5, sizeof stored);
    variant->delta->walk(&args);
    variant->f32->unpack[element](o, stored, TOKENS * STRIDE);
    int32_t tokens = (count - 1) * WALK_TOKENS + groups[count - 1].tokens;
    for (int64_t i = tokens * args.o_bytes; i < TOKENS * args.o_bytes; i++) {
        assert_int_equal(stored[i], 0xa5);
    }
    for (int32_t c = 0; c < WALK_COLUMNS; c++) {
        double memory[DEPTH], out[TOKENS];
        for (int32_t i = 0; i < depth; i++) {
            memory[i] = before[i * WALK_COLUMNS + c];
        }
        walk_plainly(&args, memory, c, out);
        for (int32_t i = 0; i < depth; i++) {
            check_near(state[i * WALK_COLUMNS + c], memory[i], 1e-4, "walked state", i, c);
        }
        for (int32_t t = 0; t < tokens; t++) {
            check_near(o[t * STRIDE + c], out[t], 1e-4 + rounding[element] * fabs(out[t]),
                       "out of a walk", t, c);
        }
    }
    if (bench) {
        BENCH("walk of 64 tokens, 128 x 32", variant->delta->walk(&args))
    }
}

void test_walk(void **state)
{
    enum { DEPTH = 160 };
    static float a[WALK_TOKENS * DEPTH], b[WALK_TOKENS * DEPTH];
    if (variant->delta->walk == NULL) {
        return;
    }
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t n = COLUMN_MULTIPLE * (1 + (int32_t)draw(DEPTH / COLUMN_MULTIPLE));
        float out[WALK_TOKENS][WALK_TOKENS];
        check_walk(n, 1 + (int32_t)draw(16), (int32_t)draw(3), false);
        fill(a, WALK_TOKENS * DEPTH, 1.0f);
        fill(b, WALK_TOKENS * DEPTH, 1.0f);
        variant->delta->group_products(out, a, b, n);
        for (int32_t t = 0; t < WALK_TOKENS; t++) {
            for (int32_t j = 0; j < WALK_TOKENS; j++) {
                double sum = 0;
                for (int32_t i = 0; i < n; i++) {
                    sum += (double)a[t * n + i] * b[j * n + i];
                }
                check_near(out[t][j], sum, 1e-5, "product of a group", t, j);
            }
        }
    }
    check_walk(128, 16, ELEMENT_BF16, true);
}

/* Rows whose weight underflows to 0, and lengths that are no multiple of a vector's. */
void test_merge(void **state)
{
    enum { ROWS = 32, LONGEST = 200 };
    static const double steps[] = {1e-6, 0x1p-11, 0x1p-8}; /* relative steps of f32, f16, bf16 */
    float a[ROWS], b[ROWS], by_a[ROWS], by_b[ROWS], both[ROWS];
    const struct merge_weights weights = {a, b, by_a, by_b, both};
    float x[LONGEST], y[LONGEST], back[LONGEST];
    uint32_t left[LONGEST], right[LONGEST], out[LONGEST]; /* elements of any of the three */
    for (int32_t time = 0; time < TIMES; time++) {
        fill(a, ROWS, 100.0f);
        fill(b, ROWS, draw(2) ? 100.0f : 1.0f);
        a[3] = -1e30f;
        b[5] = -1e30f;
        b[7] = a[7];
        a[9] = a[11] = NAN;
        b[11] = -1e30f;
        variant->merge_weights(&weights, ROWS);
        for (int32_t i = 0; i < ROWS; i++) {
            double top = fmax(a[i], b[i]), low = fmin(a[i], b[i]);
            double sum = 1 + exp(low - top), nan = isnan(a[i]) ? NAN : 0;
            check_near(by_a[i], exp(a[i] - top) / sum + nan, 1e-6, "weight", i, 0);
            check_near(by_b[i], exp(b[i] - top) / sum + nan, 1e-6, "weight", i, 1);
            assert_true(i != 3 || by_b[i] == 1); /* rows next to nothing stay as they are */
            assert_true(i != 5 || by_a[i] == 1);
            check_near(both[i], top + log(sum) + nan, 1e-6 * (1 + fabs(top)), "of both", i, 0);
        }
        int32_t n = 1 + (int32_t)draw(LONGEST), element = (int32_t)draw(3);
        fill(x, n, 1.0f);
        fill(y, n, 1.0f);
        variant->store[element](left, x, 1.0f, n);
        variant->store[element](right, y, 1.0f, n);
        variant->f32->unpack[element](x, left, n);
        variant->f32->unpack[element](y, right, n);
        variant->blend[element](out, left, right, 0.25f, -0.5f, n);
        variant->f32->unpack[element](back, out, n);
        for (int32_t i = 0; i < n; i++) {
            double sum = 0.25 * x[i] - 0.5 * y[i];
            check_near(back[i], sum, steps[element] * fabs(sum) + 1e-7, "blend", i, element);
        }
    }
    BENCH("blend of bf16, 128", variant->blend[2](out, left, right, 0.25f, 0.5f, 128))
}

/* Nothing is written after element n - 1. */
static void check_keep_above(const int32_t *x, int32_t n, int32_t least)
{
    enum { GUARD = 0x5a5a5a5a };
    int32_t to[TILE_KEYS + 1], entries[TILE_KEYS + 1], equals = (int32_t)draw(4), wanted = 0;
    const int32_t end = n > 0 ? n : 0;
    struct keep_args keep = {.from = x,
                             .to = to,
                             .to_entries = entries,
                             .n = n,
                             .first = 7,
                             .least = least,
                             .equals = equals};
    if (draw(2)) { /* in place */
        memcpy(to, x, TILE_KEYS * sizeof *to);
        for (int32_t i = 0; i < n; i++) {
            entries[i] = 7 + i;
        }
        keep.from = to;
        keep.entries = entries;
    }
    to[end] = entries[end] = GUARD;
    const int32_t kept = variant->keep_above(&keep);
    assert_true(to[end] == GUARD && entries[end] == GUARD);
    for (int32_t i = 0; i < n; i++) {
        if (x[i] > least || (x[i] == least && equals-- > 0)) {
            assert_true(wanted < kept && to[wanted] == x[i] && entries[wanted] == 7 + i);
            wanted++;
        }
    }
    assert_int_equal(kept, wanted);
}

/* Whole numbers have one right sum; -0 and 0 are equal, and a NaN is above every number. */
void test_head_sums(void **state)
{
    enum { HEADS = 9 };
    static float scores[HEADS * TILE_KEYS], factors[TILE_KEYS], weights[HEADS];
    int32_t out[TILE_KEYS];
    for (int32_t time = 0; time < TIMES; time++) {
        struct head_sum_args args = {
            out, scores, factors, weights, 1 + (int32_t)draw(HEADS), draw(2) == 1};
        double sums[TILE_KEYS] = {0};
        for (int32_t h = 0; h < args.heads; h++) {
            weights[h] = (float)draw(5) - 2;
            for (int32_t j = 0; j < TILE_KEYS; j++) {
                factors[j] = j % 7 == 0 ? 0.25f : 0.5f;
                scores[h * TILE_KEYS + j] = h == 0 && j == 9 ? NAN : (float)draw(9) - 4;
                double score = (double)factors[j] * scores[h * TILE_KEYS + j];
                sums[j] += (double)weights[h] * (args.relu && score < 0 ? 0 : score);
            }
        }
        variant->sum_heads(&args);
        for (int32_t j = 0; j < TILE_KEYS; j++) {
            const int32_t other = (int32_t)draw(TILE_KEYS);
            assert_int_equal(out[j] == INT32_MAX, isnan(sums[j]));
            assert_int_equal(out[j] > out[other],
                             sums[j] > sums[other] || (isnan(sums[j]) && !isnan(sums[other])));
            assert_int_equal(out[j] == out[other],
                             sums[j] == sums[other] || (isnan(sums[j]) && isnan(sums[other])));
        }
        const int32_t n = 1 + (int32_t)draw(TILE_KEYS), least = out[draw(TILE_KEYS)];
        int32_t above = 0, most = INT32_MIN;
        for (int32_t j = 0; j < n; j++) {
            above += out[j] > least;
            most = out[j] > most ? out[j] : most;
        }
        assert_int_equal(variant->count_above(out, n, least), above);
        assert_int_equal(variant->highest(out, n), most);
        check_keep_above(out, n, least);
        check_keep_above(out, -(int32_t)draw(2), least);
    }
    const struct head_sum_args args = {out, scores, factors, weights, HEADS, true};
    BENCH("sums of 9 heads", variant->sum_heads(&args))
}

void test_normalize(void **state)
{
    enum { ROWS = 7, MOST = 160 };
    static float x[ROWS * MOST], given[ROWS * MOST], alone[MOST];
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t rows = 1 + (int32_t)draw(ROWS), n = 32 * (1 + (int32_t)draw(MOST / 32));
        fill(given, rows * n, ldexpf(1.0f, (int)draw(24) - 12));
        memcpy(x, given, sizeof x);
        variant->delta->normalize(x, rows, n, 0.7f);
        for (int32_t r = 0; r < rows; r++) {
            double sum = 1e-6;
            for (int32_t i = 0; i < n; i++) {
                sum += (double)given[r * n + i] * given[r * n + i];
            }
            for (int32_t i = 0; i < n; i++) {
                double expected = given[r * n + i] * (double)0.7f / sqrt(sum);
                check_near(x[r * n + i], expected, 1e-6 * fabs(expected), "normalize", r, i);
            }
            memcpy(alone, given + r * n, (size_t)n * sizeof(float));
            variant->delta->normalize(alone, 1, n, 0.7f);
            assert_memory_equal(alone, x + r * n, (size_t)n * sizeof(float));
        }
    }
    BENCH("normalize 7 x 128", variant->delta->normalize(x, 7, 128, 0.7f))
}

void test_transpose(void **state)
{
    enum { MOST = 128 };
    static float from[MOST * MOST], to[MOST * MOST];
    for (int32_t time = 0; time < TIMES; time++) {
        const int32_t rows = COLUMN_MULTIPLE * (1 + (int32_t)draw(MOST / COLUMN_MULTIPLE));
        const int32_t columns = COLUMN_MULTIPLE * (1 + (int32_t)draw(MOST / COLUMN_MULTIPLE));
        fill(from, MOST * MOST, 1.0f);
        memset(to, 0, sizeof to);
        variant->delta->transpose(to, MOST, from, MOST, rows, columns);
        for (int32_t i = 0; i < MOST * MOST; i++) {
            const int32_t row = i / MOST, column = i % MOST;
            const bool inside = row < columns && column < rows;
            const float expected = inside ? from[column * MOST + row] : 0.0f;
            check_near(to[i], expected, 0, "transpose", row, column);
        }
    }
    BENCH("transpose 128 x 32", variant->delta->transpose(to, 32, from, MOST, 32, MOST))
}

void test_gates(void **state)
{
    enum { TOKENS = 64 };
    static float a[TOKENS], b[TOKENS], decay[TOKENS], beta[TOKENS];
    struct gates_args args = {.a = a, .b = b, .bias = 0.5f};
    for (int32_t time = 0; time < TIMES; time++) {
        args.rate = -ldexpf(1.0f, (int)draw(10) - 5);
        args.count = 1 + (int32_t)draw(TOKENS);
        fill(a, TOKENS, ldexpf(1.0f, (int)draw(9) - 2));
        fill(b, TOKENS, ldexpf(1.0f, (int)draw(9) - 2));
        a[3] = time == 0 ? NAN : a[3];
        b[5] = time == 0 ? NAN : b[5];
        variant->delta->gates(decay, beta, &args);
        for (int32_t t = 0; t < args.count; t++) {
            double x = a[t] + 0.5, softplus = (x > 0 ? x : 0) + log1p(exp(-fabs(x)));
            double power = args.rate * softplus;
            check_near(decay[t], exp(power), (2e-7 - 4e-7 * power) * exp(power) + 1e-36, "decay", t,
                       0);
            check_near(beta[t], 1 / (1 + exp(-(double)b[t])),
                       1e-36 + 4e-7 * (1 + fabs(b[t])) / (1 + exp(-(double)b[t])), "beta", t, 0);
        }
    }
    args.count = TOKENS;
    BENCH("gates of 64 tokens", variant->delta->gates(decay, beta, &args))
}

void test_convolve(void **state)
{
    enum { CHANNELS = 160, ROWS = 5 };
    static float x[(ROWS + 3) * CHANNELS], y[ROWS * CHANNELS], weights[4 * CHANNELS],
        bias[CHANNELS];
    static uint8_t given[sizeof x];
    for (int32_t time = 0; time < TIMES; time++) {
        const int32_t element = (int32_t)draw(3);
        struct convolve_args args = {.y = y,
                                     .x = given,
                                     .weights = weights,
                                     .bias = bias,
                                     .stride = CHANNELS,
                                     .x_bytes = CHANNELS * (element == ELEMENT_F32 ? 4 : 2),
                                     .element = element,
                                     .width = 1 + (int32_t)draw(4),
                                     .rows = 1 + (int32_t)draw(ROWS),
                                     .n = 32 * (1 + (int32_t)draw(CHANNELS / 32)),
                                     .with_silu = (int)draw(2)};
        fill(x, (ROWS + 3) * CHANNELS, 6.0f);
        variant->store[element](given, x, 1.0f, (ROWS + 3) * CHANNELS);
        variant->f32->unpack[element](x, given, (ROWS + 3) * CHANNELS);
        fill(weights, args.width * CHANNELS, 3.0f);
        fill(bias, args.n, 40.0f);
        variant->delta->convolve(&args);
        for (int32_t t = 0; t < args.rows; t++) {
            for (int32_t c = 0; c < args.n; c++) {
                double sum = bias[c];
                for (int32_t i = 0; i < args.width; i++) {
                    sum += (double)weights[i * CHANNELS + c] * x[(t + i) * CHANNELS + c];
                }
                wanted[c] = args.with_silu ? sum / (1 + exp(-sum)) : sum;
            }
            memcpy(row, y + t * CHANNELS, (size_t)args.n * sizeof(float));
            check_row(args.n, 1e-6, 3e-5, "convolution");
        }
    }
    static uint16_t many[67 * 128];
    static float taps[4 * 128], out[64 * 128];
    const struct convolve_args args = {.y = out,
                                       .x = many,
                                       .weights = taps,
                                       .bias = bias,
                                       .stride = 128,
                                       .x_bytes = 256,
                                       .element = ELEMENT_BF16,
                                       .width = 4,
                                       .rows = 64,
                                       .n = 128,
                                       .with_silu = 1};
    BENCH("convolution 64 x 128", variant->delta->convolve(&args))
}

/* What is above the diagonal is NaN where it must not be read, and zero where it is written. */
void test_decays(void **state)
{
    enum { TOKENS = 64 };
    static float decay[TOKENS], beta[TOKENS], kk[TOKENS * TOKENS], qk[TOKENS * TOKENS];
    static float d[(1 + TOKENS) * TOKENS], by_r[TOKENS * TOKENS], by_q[TOKENS * TOKENS];
    const struct decays_args args = {TOKENS, decay, beta, kk, qk, d + TOKENS, by_r, by_q};
    for (int32_t t = 0; t < TOKENS; t++) {
        decay[t] = t == 40 ? 0.0f : 1 - fabsf(draw_number(0.3f));
        beta[t] = fabsf(draw_number(1.0f));
        fill(kk + t * TOKENS, TOKENS, 1.0f);
        fill(qk + t * TOKENS, TOKENS, 1.0f);
        for (int32_t j = t + 1; j < TOKENS; j++) {
            kk[t * TOKENS + j] = qk[t * TOKENS + j] = NAN;
        }
    }
    for (int32_t t = 0; t < TOKENS; t++) {
        variant->delta->decays(&args, t);
        for (int32_t j = 0; j < TOKENS; j++) {
            double by = j <= t;
            for (int32_t i = j + 1; i <= t; i++) {
                by *= decay[i];
            }
            int32_t at = t * TOKENS + j;
            check_near(args.d[at], by, 1e-6, "decay", t, j);
            check_near(by_r[at], j < t ? -beta[t] * by * kk[at] : 0, 1e-6, "by_r", t, j);
            check_near(by_q[at], j <= t ? by * qk[at] : 0, 1e-6, "by_q", t, j);
        }
    }
}

/* Products against sums in double: by `step` of the norms of a row and a column. */
static void check_products(const struct product_kernels *products, double step, const char *name)
{
    enum { ROWS = 75, COLUMNS = 160, DEPTH = 128 };
    static float left[ROWS * DEPTH], right[DEPTH * COLUMNS], out[ROWS * COLUMNS];
    static float old[ROWS * COLUMNS], keep[ROWS], by[ROWS];
    static float factors[DEPTH], scaled[DEPTH * COLUMNS];
    static _Alignas(64) float left_memory[96 * DEPTH], packed_memory[96 * COLUMNS],
        again_memory[96 * COLUMNS], right_memory[DEPTH * COLUMNS];
    for (int32_t time = 0; time < 12; time++) {
        struct product_operand a = {.memory = left_memory}, b = {.memory = right_memory};
        struct product_operand packed = {.memory = packed_memory}, again = {.memory = again_memory};
        int32_t m = draw(2) ? 64 : 1 + (int32_t)draw(ROWS),
                n = 32 * (1 + (int32_t)draw(COLUMNS / 32));
        int32_t k = 32 * (1 + (int32_t)draw(DEPTH / 32));
        int32_t first = m > 40 && draw(2) ? 32 : 0, deep = k > 64 && draw(2) ? 64 : k;
        struct product_args args = {.out = out,
                                    .stride = COLUMNS,
                                    .left = &a,
                                    .right = &b,
                                    .keep = draw(2) ? keep : NULL,
                                    .by = by,
                                    .first = first,
                                    .m = m - first,
                                    .n = n,
                                    .k = deep};
        for (int32_t i = 0; i < m; i++) {
            fill(left + i * DEPTH, k, ldexpf(1.0f, (int)draw(20) - 10));
        }
        fill(right, k * COLUMNS, 1.0f);
        for (int32_t p = 0; p < k && time % 3 == 0; p++) {
            left[p] = p == 5 ? 1.0f : 0.0f; /* the largest that a norm allows */
            left[DEPTH + p] = 0.0f;
            right[p * COLUMNS + 3] = p == 5 ? -2.0f : 0.0f;
            right[p * COLUMNS + 4] = 0.0f;
        }
        fill(old, ROWS * COLUMNS, 1.0f);
        memcpy(out, old, sizeof out);
        fill(keep, m, 1.0f);
        fill(by, m, 2.0f);
        right[7] = time == 11 && deep == k ? NAN : right[7];
        products->left(&a, left, DEPTH, m, k);
        fill(factors, k, 1.0f);
        const float *by_row = draw(2) ? factors : NULL;
        for (int32_t i = 0; i < k * COLUMNS; i++) {
            scaled[i] = by_row != NULL ? factors[i / COLUMNS] * right[i] : right[i];
        }
        products->right(&b, right, COLUMNS, 0, 32, n, by_row);
        products->right(&b, right, COLUMNS, 32, k, n, by_row);
        if (first == 0 && m % 32 == 0) {
            products->right(&packed, old, COLUMNS, 0, m, n, NULL);
            args.packed = &packed;
        }
        products->multiply(&args);
        if (args.packed != NULL) {
            products->right(&again, out, COLUMNS, 0, m, n, NULL);
            assert_memory_equal(packed.data, again.data, (size_t)(m * n) * sizeof(float));
        }
        for (int32_t i = 0; i < ROWS; i++) {
            for (int32_t j = 0; j < COLUMNS; j++) {
                double sum = 0, of_left = 0, of_right = 0, kept = old[i * COLUMNS + j];
                for (int32_t p = 0; p < k; p++) { /* norms are of whole rows */
                    double x = left[i * DEPTH + p], y = scaled[p * COLUMNS + j];
                    sum += p < deep ? x * y : 0;
                    of_left += x * x;
                    of_right += y * y;
                }
                bool written = i >= first && i < m && j < n;
                kept *= !written ? 1 : args.keep != NULL ? keep[i] : 0;
                double bound = step * sqrt(of_left) * sqrt(of_right) * fabs(by[i]);
                check_near(out[i * COLUMNS + j], kept + (written ? by[i] * sum : 0),
                           written ? bound + 1e-6 * fabs(kept) : 0, name, i, j);
            }
        }
    }
}

/* Times a chunk's products with a state: 64 x 128 x 128, and its right operand made. */
static void bench_products(const struct product_kernels *products, const char *name)
{
    enum { ROWS = 64, SIZE = 128 };
    static float left[ROWS * SIZE], right[SIZE * SIZE], out[ROWS * SIZE], ones[ROWS];
    static _Alignas(64) float left_memory[ROWS * SIZE], right_memory[SIZE * SIZE];
    struct product_operand a = {.memory = left_memory}, b = {.memory = right_memory};
    const struct product_args args = {.out = out,
                                      .stride = SIZE,
                                      .left = &a,
                                      .right = &b,
                                      .keep = ones,
                                      .by = ones,
                                      .m = ROWS,
                                      .n = SIZE,
                                      .k = SIZE};
    fill(left, ROWS * SIZE, 1.0f);
    fill(right, SIZE * SIZE, 1.0f);
    products->left(&a, left, SIZE, ROWS, SIZE);
    BENCH(name, products->right(&b, right, SIZE, 0, SIZE, SIZE, NULL); products->multiply(&args))
}

/* Rows against a solution in double, over what the triangle above the diagonal must not add. */
static void check_solve(void)
{
    enum { ROWS = 64, COLUMNS = 160 };
    static float x[ROWS * COLUMNS], by[ROWS * ROWS];
    static double exact[ROWS * COLUMNS];
    int32_t count = 1 + (int32_t)draw(ROWS), n = COLUMN_MULTIPLE * (1 + (int32_t)draw(5));
    fill(x, ROWS * COLUMNS, 1.0f);
    fill(by, ROWS * ROWS, 0.2f);
    for (int32_t t = 0; t < count; t++) {
        for (int32_t j = t; j < ROWS; j++) {
            by[t * ROWS + j] = NAN;
        }
        for (int32_t c = 0; c < n; c++) {
            exact[t * n + c] = x[t * n + c];
            for (int32_t j = 0; j < t; j++) {
                exact[t * n + c] += (double)by[t * ROWS + j] * exact[j * n + c];
            }
        }
    }
    variant->delta->solve(x, n, by, ROWS, count);
    for (int32_t t = 0; t < count; t++) {
        for (int32_t c = 0; c < n; c++) {
            check_near(x[t * n + c], exact[t * n + c], 2e-5, "solution", t, c);
        }
    }
}

void test_products(void **state)
{
    for (int32_t time = 0; time < 12; time++) {
        check_solve();
    }
    check_products(variant->products, 1e-6, "products");
    bench_products(variant->products, "products 64 x 128 x 128");
    if (variant->split_products != NULL) {
        check_products(variant->split_products, 4e-5, "split products");
        bench_products(variant->split_products, "split products 64 x 128 x 128");
    }
}

/* The nearest code of a format: two codes equally near are both right only if the even one is. */
static void check_code(int32_t element, uint32_t code, double x, int32_t at)
{
    double largest = element == ELEMENT_E4M3 ? 448 : element == ELEMENT_E5M2 ? 57344 : 127;
    double least = element == ELEMENT_INT8 ? -127 : -largest;
    double held = fmin(fmax(x, least), largest), found = code_value(element, code);
    for (uint32_t c = 0; c < 256; c++) {
        double value = code_value(element, c);
        if (!isfinite(value) || fabs(value) > largest || c == code) {
            continue;
        }
        bool nearer = fabs(value - held) < fabs(found - held);
        /* halves: to even codes; int8's away from zero */
        bool tie = fabs(value - held) == fabs(found - held) && value != found;
        bool wins = element == ELEMENT_INT8 ? fabs(value) > fabs(found) : c % 2 == 0;
        if (nearer || (tie && wins)) {
            fail_msg("%s, encode to %d: [%d] %.9g became %.9g, %.9g is nearer", variant->name,
                     element, at, x, found, value);
        }
    }
}

void test_encode(void **state)
{
    static const int32_t formats[] = {ELEMENT_E4M3, ELEMENT_E5M2, ELEMENT_INT8};
    static uint8_t codes[MAX_SIZE];
    for (int32_t time = 0; time < TIMES; time++) {
        for (int32_t f = 0; f < 3; f++) {
            int32_t n = 1 + (int32_t)draw(MAX_SIZE);
            float scale = draw(2) ? 1.0f : ldexpf(1.0f + (float)draw(100) / 100, (int)draw(8) - 4);
            fill(row, n, ldexpf(1.0f, (int)draw(22) - 8));
            for (int32_t i = 0; i < n; i += 3) { /* next to the middle of two codes */
                uint32_t code = draw(120);
                double middle =
                    (code_value(formats[f], code) + code_value(formats[f], code + 1)) / 2;
                row[i] = isfinite(middle) ? (float)(middle * scale) : 0.0f;
            }
            variant->codes->encode[formats[f]](codes, row, scale, NULL, n);
            double most = 0;
            for (int32_t i = 0; i < n; i++) {
                check_code(formats[f], codes[i], (double)row[i] / scale, i);
                most = fmax(most, fabs((double)row[i]));
            }
            assert_true(variant->codes->largest(row, n) == (float)most);
            fill(other, n, 1.0f);
            for (int32_t i = 0; i < n; i++) {
                other[i] += 1.5f;
            }
            variant->codes->encode[formats[f]](codes, row, scale, other, n);
            for (int32_t i = 0; i < n; i++) {
                check_code(formats[f], codes[i], (double)row[i] / other[i], i);
            }
        }
    }
    BENCH("encode e4m3, 128", variant->codes->encode[ELEMENT_E4M3](codes, row, 1.0f, NULL, 128))
}

void test_encode_int4(void **state)
{
    static uint8_t codes[MAX_SIZE];
    for (int32_t time = 0; time < TIMES; time++) {
        int32_t n = 2 << draw(9);
        float scale;
        fill(row, n, 3.0f);
        for (int32_t i = 0; i < n; i++) {
            other[i] = draw(2) ? 1.0f : -1.0f;
        }
        double low = INFINITY, high = -INFINITY;
        for (int32_t i = 0; i < n; i++) {
            wanted[i] = 0;
            for (int32_t j = 0; j < n; j++) {
                double x = (double)row[j] * other[j];
                wanted[i] += __builtin_parity((unsigned)(i & j)) ? -x : x;
            }
            low = fmin(low, wanted[i]);
            high = fmax(high, wanted[i]);
        }
        int32_t zero = variant->codes->encode_int4(codes, row, other, n, &scale);
        check_near(scale, fmax((high - low) / 15, 1e-6), 1e-6 * scale, "int4 scale", 0, 0);
        check_near(zero, fmin(fmax(-low / scale, 0), 15), 0.5 + 1e-5, "int4 zero point", 0, 0);
        for (int32_t i = 0; i < n; i++) {
            double code = codes[i / 2] >> 4 * (i % 2) & 15;
            check_near(code, fmin(fmax(wanted[i] / scale + zero, 0), 15), 0.5 + 1e-4, "int4 code",
                       i, 0);
        }
    }
    BENCH("encode int4, 128", {
        float scale;
        variant->codes->encode_int4(codes, row, other, 128, &scale);
    })
}
