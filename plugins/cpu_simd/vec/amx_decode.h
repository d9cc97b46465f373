/* SPDX-License-Identifier: Apache-2.0 */
/* Decode of 5 to 16 rows on AMX, keys and values read in place: MLA's heads, and the heads of
 * several queries over one key head.
 *
 * Scores: 16 keys of a tile, in place, are the left operand and queries the right one. 128 keys of
 * 576 dims: 144 tdpbf16ps (2304 cycles), with queries transposed once an item. Values are the right
 * operand, as pairs of rows made by vectors between the products: 128 keys of 512 columns are 128
 * tdpbf16ps (2048 cycles) and 2048 shuffles, and need no copies where rows are apart. Probabilities
 * of 128 keys stay in registers. */
#ifndef CPU_SIMD_AMX_DECODE_H
#define CPU_SIMD_AMX_DECODE_H

#include "amx_chain.h"
#include "bf16_decode.h"

enum { AMX_LEAST_ROWS = 5, TILE_ROWS = 16, MOST_GROUPS = DECODE_MAX_KEYS / TILE_ROWS };

/* The next lines, into L2, evenly over the steps of a call: L1 and the buffers of its misses are
 * for what tiles load. */
struct lines {
    const char *at;
    const char *row_end;
    const char *const *row;
    int64_t offset;
    int64_t row_bytes;
    int32_t left;
    int32_t share; /* keys of a step */
};

INLINE struct lines lines_begin(const struct decode_args *args, int32_t steps)
{
    struct lines lines = {.row = args->next_rows,
                          .offset = args->next_offset,
                          .row_bytes = 64 * (int64_t)args->next_lines,
                          .left = args->next_keys * args->next_lines};
    lines.share = (lines.left + steps - 1) / steps;
    if (lines.left > 0) {
        lines.at = *lines.row + lines.offset;
        lines.row_end = lines.at + lines.row_bytes;
    }
    return lines;
}

INLINE void lines_step(struct lines *lines)
{
    int32_t n = lines->share < lines->left ? lines->share : lines->left;
    lines->left -= n;
    for (; n > 0; n--) {
        __builtin_prefetch(lines->at, 0, 2);
        lines->at += 64;
        if (lines->at == lines->row_end && lines->left + n > 1) {
            lines->at = *++lines->row + lines->offset;
            lines->row_end = lines->at + lines->row_bytes;
        }
    }
}

/* Rows as right operands, one unit of 64 bytes of all rows after the other: each unit is [16][rows]
 * of 4 bytes, which for fewer than 16 rows are read as overlapping rows of a tile. */
static void amx_pack_rows(void *q, void *memory, int32_t rows, int32_t depth)
{
    const __mmask16 some = (__mmask16)((1u << rows) - 1u);
    float *out = q;
    memcpy(memory, q, (size_t)rows * (size_t)depth * 2);
    for (const uint16_t *from = memory; from < (uint16_t *)memory + depth; from += 32) {
        __m512 block[TILE_ROWS];
#pragma GCC unroll 16
        for (int32_t i = 0; i < TILE_ROWS; i++) {
            block[i] = i < rows ? _mm512_loadu_ps(from + (int64_t)i * depth) : _mm512_setzero_ps();
        }
        vf_transpose(block);
#pragma GCC unroll 16
        for (int32_t i = 0; i < TILE_ROWS; i++, out += rows) {
            _mm512_mask_storeu_ps(out, some, block[i]);
        }
    }
}

static void amx_decode_pack(void *q, void *memory, int32_t rows, int32_t depth)
{
    if (rows >= AMX_LEAST_ROWS) {
        amx_pack_rows(q, memory, rows, depth);
    }
}

/* Keys by groups of 16, a tile's: where they lie, if they are equally far from each other. */
struct groups {
    const struct decode_args *args;
    int32_t count;
    const char *at[MOST_GROUPS]; /* NULL: apart, or fewer than 16 */
    int64_t stride[MOST_GROUPS];
    const char *
        rows[DECODE_MAX_KEYS]; /* number of such rows; past the last key the last one is repeated */
};

INLINE void find_group(struct groups *groups, int32_t g)
{
    const struct decode_args *args = groups->args;
    const char *const *rows = args->key_rows + (int64_t)TILE_ROWS * g;
    groups->at[g] = NULL;
    if (TILE_ROWS * (g + 1) <= args->keys) {
        const __m512i stride = _mm512_set1_epi64(rows[1] - rows[0]);
        __m512i low = _mm512_sub_epi64(_mm512_loadu_si512(rows + 1), _mm512_loadu_si512(rows));
        __m512i high = _mm512_sub_epi64(_mm512_loadu_si512(rows + 8), _mm512_loadu_si512(rows + 7));
        if ((_mm512_cmpneq_epi64_mask(low, stride) | _mm512_cmpneq_epi64_mask(high, stride)) == 0) {
            groups->at[g] = rows[0] + args->offset;
            groups->stride[g] = rows[1] - rows[0];
            return;
        }
    }
    for (int32_t j = TILE_ROWS * g; j < TILE_ROWS * (g + 1); j++) {
        groups->rows[j] = (const char *)key_row(args, j);
    }
}

INLINE struct groups find_groups(const struct decode_args *args)
{
    struct groups groups;
    groups.args = args;
    groups.count = (args->keys + TILE_ROWS - 1) / TILE_ROWS;
    for (int32_t g = 0; g < groups.count; g++) {
        find_group(&groups, g);
    }
    return groups;
}

/* `count` groups from `first` on are where tiles are read. */
INLINE bool in_place(const struct groups *groups, int32_t first, int32_t count)
{
    bool all = true;
    for (int32_t g = first; g < first + count; g++) {
        all = all && groups->at[g] != NULL;
    }
    return all;
}

/* 64 bytes from `byte` on of a group's rows as a tile. */
INLINE const void *gather(uint16_t *copy, const struct groups *groups, int32_t g, int64_t byte)
{
#pragma GCC unroll 16
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        const char *row = groups->rows[TILE_ROWS * g + i];
        _mm512_store_si512(copy + 32 * i, _mm512_loadu_si512(row + byte));
    }
    tiles_and_memory();
    return copy;
}

/* As above, into a register; `whole`: the rows are read in place, with a hint that they are not
 * read again soon. */
#define LOAD_GROUP(tile, g, byte, whole)                                                           \
    if ((whole) || groups->at[g] != NULL) {                                                        \
        _tile_stream_loadd(tile, groups->at[g] + (byte), groups->stride[g]);                       \
    } else {                                                                                       \
        _tile_loadd(tile, gather(copy[(tile) % 4], groups, g, byte), 64);                          \
    }

/* Stores a group's scores, [16 keys][16 rows], by row. */
INLINE void amx_store_scores(float *scores, const float *sums, int32_t rows)
{
    __m512 block[TILE_ROWS];
#pragma GCC unroll 16
    for (int32_t i = 0; i < TILE_ROWS; i++) {
        block[i] = _mm512_load_ps(sums + TILE_ROWS * i);
    }
    vf_transpose(block);
#pragma GCC unroll 16
    for (int32_t r = 0; r < TILE_ROWS; r++) {
        if (r < rows) {
            _mm512_storeu_ps(scores + (int64_t)r * SCORE_STRIDE, block[r]);
        }
    }
}

#define SCORE_GROUP(i, tile)                                                                       \
    if ((i) < count) {                                                                             \
        LOAD_GROUP(tile, first + (i), c, whole)                                                    \
        lines_step(lines);                                                                         \
        _tile_dpbf16ps(i, tile, 4);                                                                \
        lines_step(lines);                                                                         \
    }

/* Up to four groups; `whole`, a constant: four that are in place. */
INLINE void amx_score_groups(float *scores, const char *q, const struct groups *groups,
                             int32_t first, const int whole, struct lines *lines)
{
    _Alignas(64) float sums[4][TILE_ROWS * TILE_ROWS];
    _Alignas(64) uint16_t copy[4][TILE_ELEMENTS];
    const int32_t count = whole ? 4 : groups->count - first < 4 ? groups->count - first : 4;
    const int64_t q_stride = 4 * (int64_t)groups->args->rows;
    const int64_t bytes = 2 * (int64_t)groups->args->depth;
    tiles_and_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t c = 0; c < bytes; c += 64, q += TILE_ROWS * q_stride) {
        _tile_loadd(4, q, q_stride);
        SCORE_GROUP(0, 5)
        SCORE_GROUP(1, 6)
        SCORE_GROUP(2, 7)
        SCORE_GROUP(3, 5)
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    _tile_stored(2, sums[2], 64);
    _tile_stored(3, sums[3], 64);
    tiles_and_memory();
    for (int32_t g = 0; g < count; g++) {
        amx_store_scores(scores + (int64_t)(first + g) * TILE_ROWS, sums[g], groups->args->rows);
    }
}

#undef SCORE_GROUP

static void amx_decode_scores(float *scores, const void *q, const struct decode_args *args)
{
    if (args->rows < AMX_LEAST_ROWS) {
        bf16_decode_scores(scores, q, args);
        return;
    }
    const struct groups groups = find_groups(args);
    struct lines lines = lines_begin(args, args->depth / 16 * groups.count);
    for (int32_t g = 0; g < groups.count; g += 4) {
        if (g + 4 <= groups.count && in_place(&groups, g, 4)) {
            amx_score_groups(scores, q, &groups, g, 1, &lines);
        } else {
            amx_score_groups(scores, q, &groups, g, 0, &lines);
        }
    }
}

/* Up to 32 keys' probabilities of 16 rows; memory past them is not read. */
INLINE void amx_load_probabilities(uint16_t *left, const uint16_t *p, int32_t rows, int32_t keys)
{
    __mmask32 some = keys >= 32 ? 0xffffffffu : (1u << keys) - 1u;
#pragma GCC unroll 16
    for (int32_t r = 0; r < TILE_ROWS; r++) {
        __m512i row = _mm512_setzero_si512();
        if (r < rows) {
            row = _mm512_maskz_loadu_epi16(some, p + (int64_t)r * 2 * SCORE_STRIDE);
        }
        _mm512_store_si512(left + 32 * r, row);
    }
}

/* 32 columns of value rows as right operands, [key / 32][2][16 pairs of keys][16 columns][2]; the
 * columns of both are those of unpacked words, which amx_decode_finish puts into order. */
struct pairs {
    const char *rows[DECODE_MAX_KEYS]; /* zeros past the last key */
    uint16_t *to;
    int64_t byte; /* the first column's */
};

/* Pairs `from` .. from + 7 of the keys. */
INLINE void amx_pair_values(const struct pairs *pairs, int32_t from, struct lines *lines)
{
    uint16_t *to = pairs->to + from / 16 * 2 * TILE_ELEMENTS + from % 16 * 32;
#pragma GCC unroll 8
    for (int32_t i = from; i < from + 8; i++, to += 32) {
        const __m512i even = _mm512_loadu_si512(pairs->rows[2 * i] + pairs->byte);
        const __m512i odd = _mm512_loadu_si512(pairs->rows[2 * i + 1] + pairs->byte);
        _mm512_store_si512(to, _mm512_unpacklo_epi16(even, odd));
        _mm512_store_si512(to + TILE_ELEMENTS, _mm512_unpackhi_epi16(even, odd));
        lines_step(lines);
    }
}

#define VALUES_PRODUCT(half, s, p, right)                                                          \
    if ((s) < steps) {                                                                             \
        _tile_loadd(right, from + (2 * (s) + (half)) * TILE_ELEMENTS, 64);                         \
        _tile_dpbf16ps(half, p, right);                                                            \
        tiles_and_memory();                                                                        \
        if (more) {                                                                                \
            amx_pair_values(next, 8 * ((half)*steps + (s)), lines);                                \
        }                                                                                          \
    }
#define VALUES_HALF(half)                                                                          \
    _tile_loadd(half, out + 16 * (half), stride);                                                  \
    VALUES_PRODUCT(half, 0, 4, 2)                                                                  \
    VALUES_PRODUCT(half, 1, 5, 3)                                                                  \
    VALUES_PRODUCT(half, 2, 6, 2)                                                                  \
    VALUES_PRODUCT(half, 3, 7, 3)                                                                  \
    _tile_stored(half, out + 16 * (half), stride);                                                 \
    tiles_and_memory();

/* Adds the products of probabilities, in registers 4 .. 7, and of 32 columns to acc_o, while the
 * pairs of the next 32 are made. */
INLINE void amx_values_block(float *out, int64_t stride, const uint16_t *from, int32_t steps,
                             const struct pairs *next, const bool more, struct lines *lines)
{
    tiles_and_memory();
    VALUES_HALF(0)
    VALUES_HALF(1)
}
#undef VALUES_HALF
#undef VALUES_PRODUCT

static void amx_decode_values(float *acc, const void *p, const struct decode_args *args)
{
    enum { MOST_STEPS = DECODE_MAX_KEYS / 32 };
    if (args->rows < AMX_LEAST_ROWS) {
        bf16_decode_values(acc, p, args);
        return;
    }
    _Alignas(64) uint16_t left[MOST_STEPS][TILE_ELEMENTS];
    _Alignas(64) uint16_t memory[2][MOST_STEPS * 2 * TILE_ELEMENTS];
    const int32_t steps = (args->keys + 31) / 32;
    const int64_t stride = 4 * (int64_t)args->depth;
    struct lines lines = lines_begin(args, args->depth / 32 * steps * 16);
    struct pairs pairs = {.to = memory[0]};
    for (int32_t j = 0; j < 32 * steps; j++) {
        pairs.rows[j] = j < args->keys ? (const char *)key_row(args, j) : args->zero_row;
    }
    for (int32_t s = 0; s < steps; s++) {
        amx_load_probabilities(left[s], (const uint16_t *)p + 32 * s, args->rows,
                               args->keys - 32 * s);
    }
    for (int32_t i = 0; i < 16 * steps; i += 8) {
        amx_pair_values(&pairs, i, &lines);
    }
    tiles_and_memory();
    _tile_loadd(4, left[0], 64);
    if (steps > 1) {
        _tile_loadd(5, left[1], 64);
    }
    if (steps > 2) {
        _tile_loadd(6, left[2], 64);
    }
    if (steps > 3) {
        _tile_loadd(7, left[3], 64);
    }
    for (int32_t column = 0; column < args->depth; column += 32) {
        const uint16_t *from = pairs.to;
        pairs.to = memory[from == memory[0]];
        pairs.byte += 64;
        if (column + 32 < args->depth) {
            amx_values_block(acc + column, stride, from, steps, &pairs, true, &lines);
        } else {
            amx_values_block(acc + column, stride, from, steps, &pairs, false, &lines);
        }
    }
}
#undef LOAD_GROUP

/* Puts columns into plain order. A NaN may come from a probability of 0. */
static bool amx_decode_finish(float *sums, int32_t rows, int32_t depth)
{
    __mmask16 nan = 0;
    bf16_decode_finish(sums, rows, depth);
    for (int32_t d = 0; d < rows * depth && rows >= AMX_LEAST_ROWS; d += 16) {
        const __m512 x = _mm512_loadu_ps(sums + d);
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    }
    return nan == 0;
}

static const struct decode_kernels amx_decode = {.scores = amx_decode_scores,
                                                 .values = amx_decode_values,
                                                 .finish = amx_decode_finish,
                                                 .pack = amx_decode_pack,
                                                 .many_rows = AMX_LEAST_ROWS,
                                                 .tiles = true};

#endif
