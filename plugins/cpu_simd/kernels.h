/* SPDX-License-Identifier: Apache-2.0 */
/* What one ISA level provides: engines, that is the inner loops of a tile in one compute type, and
 * element conversions. Baseline code (tile.c, direct.c, gdn.c) calls through these tables only. */
#ifndef CPU_SIMD_ENGINE_H
#define CPU_SIMD_ENGINE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Element types of rows in memory. */
enum element_type {
    ELEMENT_F32 = 0,
    ELEMENT_F16 = 1,
    ELEMENT_BF16 = 2,
    ELEMENT_E4M3 = 3,
    ELEMENT_E5M2 = 4,
    ELEMENT_INT8 = 5,
    ELEMENT_COUNT = 6
};

#define LOG2_E 1.44269504088896340736f
#define LEAST_ROW_SCALE 1e-6 /* of rows with a scale of their own */
#define MAX_HEAD_SIZE 1024
#define TILE_KEYS 128                      /* keys of one packed tile */
#define DIRECT_KEYS 64                     /* keys of one tile of the direct (decode) path, */
#define DIRECT_MOST_KEYS (2 * DIRECT_KEYS) /* and of the largest */
#define DIRECT_ROWS 16 /* most query rows of one head that the direct path takes */
#define ROW_BLOCK_MAX 32
#define FLASH_ROWS 32          /* of a block */
#define FLASH_KEYS 512         /* of a tile of flash: its sums go from L1 to L2 and back for each */
#define SCORE_STRIDE TILE_KEYS /* floats between rows of scores */
#define COLUMN_MULTIPLE 32     /* head_size_v and keys are padded to it in packed tiles */
#define DEPTH_MULTIPLE 32      /* head_size is padded to it */

enum alibi_form { ALIBI_NONE = 0, ALIBI_LINEAR = 1, ALIBI_SQRT = 2 };

/* Turns raw scores q k^T of one row into final ones, in natural units. */
struct score_terms {
    float scale;
    float soft_cap;         /* 0: none */
    const float *key_scale; /* [n] of this tile, or NULL */
    int32_t alibi;
    float slope;
    float distance; /* position of the query minus that of the tile's column 0 */
};

/* Online softmax of `rows` rows of scores, in place: probabilities replace scores in the engine's
 * compute type, beginning at the row's first byte. Row r sees columns low[r] .. high[r]-1; other
 * columns of begin .. end-1 become 0. Running state in units of log2: reference[r], sum[r]. */
struct softmax_args {
    float *scores;
    int32_t rows;  /* at most ROW_BLOCK_MAX */
    int32_t begin; /* a multiple of 16 */
    int32_t end;   /* a multiple of 32 above begin, or of 16 */
    const int32_t *low;
    const int32_t *high;
    float factor; /* scores times this are exponents of 2 */
    float *reference;
    float *sum;
    float *rescale;           /* [rows] out: factor for what was accumulated, mostly 1 */
    const float *value_scale; /* [TILE_KEYS] of the tile, multiplied into probabilities, or NULL */
};

/* How far a row's maximum may pass its reference before the accumulator is rescaled: 2^8. */
#define RESCALE_THRESHOLD 8.0f

struct direct_args {
    int32_t keys;
    int32_t rows;         /* query rows, at most DIRECT_ROWS */
    const float *q_scale; /* [rows], of `order` */
    const int32_t *zeros; /* [keys + 3] zero points of int4 rows */
    int32_t depth;        /* padded head_size (scores) or head_size_v (values) */
    const char *const *key_rows;
    int64_t offset;       /* bytes from key_rows[j] to this head's row */
    const void *zero_row; /* stands behind the last of an odd number of rows */
    /* What to prefetch meanwhile: next_lines lines of 64 bytes at each of next_rows[] +
     * next_offset, spread evenly over the loop, since only so many lines can be under way. */
    const char *const *next_rows;
    int64_t next_offset;
    int32_t next_keys;
    int32_t next_lines;
    int32_t element; /* enum element_type of the rows, for fp8 */
    int32_t column;  /* first column of a block, inside an engine */
};

/* Decode for one kind of rows. */
struct direct_engine {
    /* scores[row][key] = q[row] . key, q padded to args->rows rows of `depth` */
    void (*scores)(float *scores, const void *q, const struct direct_args *args);
    /* acc[row] += p[row] V, with columns in the engine's own order */
    void (*values)(float *acc, const void *p, const struct direct_args *args);
    /* a head's sums into plain order, in place; false: non-finite ones may be in wrong columns, and
     * only the packed way has them right; NULL: it is */
    bool (*finish)(float *sums, int32_t rows, int32_t width);
    /* with so many arithmetic is the bound, and what they sum comes from L2 for each call: twice a
     * tile is better, and heads one after the other wherever they lie; 0: never */
    int32_t many_rows;
    /* many rows go by tiles, so fast that a softmax, too, has lines to ask for, and twice a tile is
     * better for rows of a list, too, behind a smaller one that nothing has asked for */
    bool tiles;
    /* brings a row of q into the order and form of scores, and returns its scale; NULL: it is */
    float (*order)(void *q, int32_t n);
    /* then all rows of a head into what scores takes, over memory of their size; NULL: they are */
    void (*pack)(void *q, void *memory, int32_t rows, int32_t depth);
};

/* What FLASH_ROWS rows of an item see of a tile. */
struct flash_block {
    int32_t begin; /* columns that any of them sees, multiples of 32; none: begin is end */
    int32_t end;
    int32_t masked; /* 0: all see all of them, low and high are not read */
    int32_t fresh;  /* 1: the accumulator holds nothing before this tile */
};

/* A tile of keys for all rows of an item: scores, softmax, values. Rows and state are padded to
 * whole blocks; padding sees nothing or has queries of zero. */
struct flash_args {
    const void *keys;
    const void *values;
    const struct flash_block *blocks;
    const int32_t *low; /* [rows], as softmax_args has them; read for blocks that are masked */
    const int32_t *high;
    const void *q;      /* [rows][depth] */
    float *accumulator; /* [rows][width] */
    int32_t depth;
    int32_t width;
    int32_t num_blocks;
    float factor;
    float *reference;
    float *sum;
};

/* The packed path's tile of FLASH_KEYS in one call, where scores need a factor and a mask only. */
struct flash_engine {
    /* as engine's, in an order of its own; columns are multiples of 32 */
    void (*pack_keys)(void *packed, const void *const *rows, int32_t n, int32_t columns,
                      int32_t depth);
    int (*pack_values)(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                       int32_t width);
    void (*attend)(const struct flash_args *args);
};

struct engine {
    int32_t element_bytes; /* of the compute type: 4 or 2 */
    int32_t element;       /* enum element_type of the compute type */
    int32_t row_block;     /* query rows that gemm likes at a time */
    int32_t direct_rows;   /* with more rows of one head decode is faster the packed way */
    /* n elements to the compute type */
    void (*unpack[ELEMENT_COUNT])(void *destination, const void *source, int64_t n);
    /* n key rows of `depth` compute elements into the layout of gemm's b, TILE_KEYS columns wide;
     * columns n .. columns-1 become zero */
    void (*pack_keys)(void *packed, const void *const *rows, int32_t n, int32_t columns,
                      int32_t depth);
    /* likewise value rows, `width` columns wide; rows n .. n_padded-1 become zero. Returns 1 if
     * any value is NaN or infinite. */
    int (*pack_values)(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                       int32_t width);
    /* c[m, n] (+)= a[m, k] b[k, n]; strides in elements; b's rows hold ldb columns. k and n are
     * multiples of 32 (k: 2 suffices where a is probabilities). */
    void (*gemm)(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                 int32_t m, int32_t n, int32_t k, int accumulate);
    void (*softmax)(const struct softmax_args *args);
    const struct flash_engine *flash;   /* NULL: none */
    const struct direct_engine *direct; /* rows in the compute type; NULL: no decode path */
    /* rows of e4m3 or e5m2, of int8, and of int4, a multiple of 64 up to 512 in a row; NULL: staged
     */
    const struct direct_engine *direct_fp8;
    const struct direct_engine *direct_int8;
    const struct direct_engine *direct_int4;
};

/* One token of the gated delta rule on rows of a state. */
struct delta_args {
    float *to;         /* [rows, depth] after the token; may be `from` */
    const float *from; /* before it */
    int32_t rows;
    int32_t depth;
    const float *q; /* scaled */
    const float *k;
    const float *v;
    float *out;
    float decay; /* e^g */
    float beta;
    float kq; /* k.q */
};

/* Rows of a causal convolution; those of floats are `stride` apart. */
struct convolve_args {
    float *y;             /* [rows] */
    const void *x;        /* [width - 1 + rows + behind] of `element`, x_bytes apart */
    const float *weights; /* [width] */
    const float *bias;
    int64_t stride;
    int64_t x_bytes;
    int32_t element; /* enum element_type: f32, f16 or bf16 */
    int32_t behind;  /* rows of x that follow and will be wanted soon; 0 also where x is cached */
    int32_t width;
    int32_t rows;
    int32_t n; /* of COLUMN_MULTIPLE */
    int with_silu;
};

/* Decays between the tokens of a chunk, and with them the products of its keys and queries; rows
 * are `stride` floats apart. Above the diagonal all but kk and qk stay zero. */
struct decays_args {
    int64_t stride;
    const float *decay; /* by token */
    const float *beta;
    const float *kk;
    const float *qk;
    float *d;    /* d[t][j]: from behind token j to token t; before row 0 there is one of zeros */
    float *by_r; /* -beta[t] d[t][j] kk[t][j], j < t */
    float *by_q; /* d[t][j] qk[t][j], j <= t */
};

/* An operand of a product, as its engine holds it. */
struct product_operand {
    void *memory;     /* 4 bytes for each element, 6 for whole_products, aligned to 64 */
    const void *data; /* the engine's: where it is, `memory` or what it was made of */
    int64_t stride;   /* of data's rows or blocks of rows, in its elements */
    int32_t block;    /* likewise of 32 of k, where an engine has blocks */
};

/* out[i][j] = keep[i] out[i][j] + by[i] sum over p of left[i][p] right[p][j] */
struct product_args {
    float *out;
    int64_t stride;
    const struct product_operand *left;
    const struct product_operand *right;
    const float *keep; /* NULL: nothing is kept, nor read */
    const float *by;
    int32_t first; /* row of left, out, keep and by; the left's memory has whole blocks of 32 */
    int32_t m;     /* rows */
    int32_t n;     /* n and k are multiples of 32; both operands may have more */
    int32_t k;
};

/* Products of rows of floats, whose operands are used more than once. */
struct product_engine {
    void (*left)(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                 int32_t k);
    /* rows first .. k - 1; those before them, of the same n, are there */
    void (*right)(struct product_operand *operand, const float *rows, int64_t stride, int32_t first,
                  int32_t k, int32_t n);
    void (*multiply)(const struct product_args *args);
};

/* What a head's gates are made of, by token; arrays hold whole vectors. */
struct gates_args {
    const float *a;
    const float *b;
    float rate; /* -exp(A_log) */
    float bias;
    int32_t count;
};

/* Tokens that pass over a state together, and the value dims of a part of it that stays in L1. */
#define WALK_TOKENS 4
#define WALK_COLUMNS 32

/* What a group of tokens is to the state S of a head, of which memory holds S / g from group to
 * group; E[t] is g and the decay from the group's beginning through token t. */
struct walk_group {
    int32_t tokens;
    float e[WALK_TOKENS];
    float beta[WALK_TOKENS];
    float by_state[WALK_TOKENS];          /* -beta[t] E[t] */
    float by_r[WALK_TOKENS][WALK_TOKENS]; /* as decays_args has it */
    float by_q[WALK_TOKENS][WALK_TOKENS];
    float left[WALK_TOKENS]; /* of r in memory behind the group */
    float keep;              /* likewise of memory */
};

/* WALK_COLUMNS value dims of a state and the groups that pass over them, of which k and q have
 * whole ones; a token that is none has r of 0 and no row of o. */
struct walk_args {
    float *state;   /* [depth][WALK_COLUMNS] */
    const float *q; /* [tokens][depth], scaled */
    const float *k;
    const float *v; /* rows `stride` floats apart */
    void *o;        /* rows of `element`, o_bytes apart */
    int64_t stride;
    int64_t o_bytes;
    int32_t element; /* enum element_type: f32, f16 or bf16 */
    int32_t depth;
    int32_t count;
    const struct walk_group *groups;
};

struct delta_engine {
    void (*convolve)(const struct convolve_args *args);
    void (*decays)(const struct decays_args *args, int32_t t); /* row t, after the row before it */
    /* x[t] += sum over j < t of by[t][j] x[j], for rows 1 .. count-1 in their order; x has rows of
     * n floats, of COLUMN_MULTIPLE, by rows of `stride` */
    void (*solve)(float *x, int32_t n, const float *by, int64_t stride, int32_t count);
    float (*dot)(const float *a, const float *b, int32_t n); /* n of COLUMN_MULTIPLE */
    /* each of `rows` rows of n floats (of COLUMN_MULTIPLE) times by / its norm */
    void (*normalize)(float *x, int32_t rows, int32_t n, float by);
    /* decay = e^(rate log(1 + e^(a + bias))), beta = 1 / (1 + e^-b) */
    void (*gates)(float *decay, float *beta, const struct gates_args *args);
    void (*step)(const struct delta_args *args);
    void (*walk)(const struct walk_args *args); /* NULL: chunks go by products */
    /* out[t][j] = a[t] b[j], rows of n floats, of COLUMN_MULTIPLE */
    void (*group_products)(float (*out)[WALK_TOKENS], const float *a, const float *b, int32_t n);
};

/* Rows of float32 to the codes of quantized caches, each rounded once, and some codes back. */
struct code_engine {
    /* magnitude; NaN if any is */
    float (*largest)(const float *x, int32_t n);
    /* x / scale, or where `channels` is not NULL x[i] / channels[i], to e4m3, e5m2 or int8; NULL
     * for other elements */
    void (*encode[ELEMENT_COUNT])(void *codes, const float *x, float scale, const float *channels,
                                  int32_t n);
    /* The row turned by signs and Hadamard's matrix, two codes in a byte; returns their zero point.
     * A NaN in the row makes *scale NaN, and no code is written. */
    int32_t (*encode_int4)(uint8_t *codes, const float *x, const float *signs, int32_t n,
                           float *scale);
    /* TurboQuant's keys, a code a byte: the nearest of 2^bits levels of the row turned and brought
     * to deviation 1, halfway[2^(bits-1) - 1] between those above 0. Returns the row's norm; where
     * it is not finite NaN, and no code is written. */
    double (*encode_levels)(uint8_t *codes, const float *x, const double *halfway, int32_t bits,
                            int32_t n);
    /* out[d] = levels[codes[d]]; returns the sum of their squares */
    float (*levels)(float *out, const int8_t *codes, const float *levels, int32_t n);
    void (*steps)(float *out, const int8_t *codes, float step, float low, int32_t n);
    /* out[d] = scales[d / run] times the e2m1 in the low half of codes[d] */
    void (*e2m1)(float *out, const int8_t *codes, const float *scales, int32_t run, int32_t n);
    /* n codes of 3 bits, the lowest of the first byte first; n of 8 */
    void (*threes)(int8_t *codes, const uint8_t *packed, int32_t n);
};

/* ggml's blocks in a row: a float16 step, then codes of 8 or of 4 bits. */
#define BLOCK_ELEMENTS 32
#define BLOCK_STEP_BYTES 2
#define BLOCK_BYTES_8 34
#define BLOCK_BYTES_4 18

/* Rows of n elements, a multiple of BLOCK_ELEMENTS. */
struct block_engine {
    void (*read)(float *out, const uint8_t *row, int32_t n);
    void (*write)(uint8_t *row, const float *x, int32_t n);
};

/* Log-sum-exps of two attends over disjoint keys, what their rows are multiplied with, and the
 * log-sum-exp of both; arrays hold whole vectors. */
struct merge_weights {
    const float *a, *b;
    float *by_a, *by_b, *both;
};

struct variant {
    const char *name;
    const struct engine *f32;
    const struct engine *bf16; /* NULL: bf16 is computed in float32 */
    void (*terms)(float *scores, int32_t n, const struct score_terms *terms);
    void (*scale_row)(float *row, float factor, int32_t n);
    void (*hadamard)(float *row, int32_t n); /* Sylvester's, not normalised; n a power of two */
    /* n codes of 4 bits, the even ones in the low halves of bytes, less zero */
    void (*nibbles)(int8_t *codes, const uint8_t *packed, int32_t zero, int32_t n);
    /* row += factor * other */
    void (*add_scaled)(float *row, const float *other, float factor, int32_t n);
    /* float32 times factor to f32, f16 or bf16 */
    void (*store[3])(void *destination, const float *source, float factor, int64_t n);
    void (*merge_weights)(const struct merge_weights *weights, int32_t n);
    /* out = by_a a + by_b b, rows of n f32, f16 or bf16 */
    void (*blend[3])(void *out, const void *a, const void *b, float by_a, float by_b, int64_t n);
    const struct delta_engine *delta;
    const struct product_engine *products;
    /* faster ones, operands held to 16 bits of each number; NULL: none */
    const struct product_engine *split_products;
    /* as exact as `products`, whose left operands split_products take, too; NULL: none */
    const struct product_engine *whole_products;
    const struct code_engine *codes;
    const struct block_engine *blocks; /* [2]: of 4 bits, of 8 */
    int (*enter)(void); /* once per worker and call, before any engine call; NULL: nothing to do */
    void (*leave)(void);
};

extern const struct variant variant_scalar;
extern const struct variant variant_avx2;
extern const struct variant variant_avx512;
extern const struct variant variant_avx512bf16;
extern const struct variant variant_amx;
extern const struct variant variant_neon;
extern const struct variant variant_neonbf16;

/* The variants that this machine runs, the slowest first, and the names of its ISA extensions;
 * the variant of a name, or NULL if there is none here. */
int32_t variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                            size_t isa_bytes);
const struct variant *variant_by_name(const char *name);

#endif
