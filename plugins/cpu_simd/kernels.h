/* SPDX-License-Identifier: Apache-2.0 */
/* What one ISA level provides: the inner loops of a tile in one compute type, and conversions of
 * elements. Baseline code (attend/, mla/, recurrent/, cache/) calls them through these tables only.
 */
#ifndef CPU_SIMD_KERNELS_H
#define CPU_SIMD_KERNELS_H

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
#define LEAST_ROW_SCALE 1e-6 /* lower bound of a row's own scale */
#define MAX_HEAD_SIZE 1024
#define TILE_KEYS 128                     /* keys of one packed tile */
#define DECODE_KEYS 64                    /* keys of one tile of the decode path, */
#define DECODE_MAX_KEYS (2 * DECODE_KEYS) /* and of the largest */
#define DECODE_ROWS 16 /* most query rows of one head that the decode path takes */
#define ROW_BLOCK_MAX 32
#define FLASH_ROWS 32 /* rows of a block */
#define FLASH_KEYS                                                                                 \
    512 /* keys of a tile: the tile's acc_o goes from L1 to L2 and back once a tile */
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

/* Online softmax of `rows` rows of scores, in place: probabilities replace scores in the compute
 * type, beginning at the row's first byte. Row r sees columns low[r] .. high[r]-1; other columns of
 * begin .. end-1 become 0. State in units of log2: row_max[r], which may lag the true maximum by
 * RESCALE_THRESHOLD, and row_sum[r]. */
struct softmax_args {
    float *scores;
    int32_t rows;  /* at most ROW_BLOCK_MAX */
    int32_t begin; /* a multiple of 16 */
    int32_t end;   /* a multiple of 32 above begin, or of 16 */
    const int32_t *low;
    const int32_t *high;
    float softmax_scale_log2; /* scores times this are exponents of 2 */
    float *row_max;
    float *row_sum;
    float *scores_scale;      /* [rows] out: factor for acc_o, 1 where row_max did not change */
    const float *value_scale; /* [TILE_KEYS] of the tile, multiplied into probabilities, or NULL */
};

/* How far a score may pass row_max before acc_o is rescaled: a factor of 2^8. */
#define RESCALE_THRESHOLD 8.0f

struct decode_args {
    int32_t keys;
    int32_t rows;         /* query rows, at most DECODE_ROWS */
    const float *q_scale; /* [rows], of `order` */
    const int32_t *zeros; /* [keys + 3] zero points of int4 rows */
    int32_t depth;        /* padded head_size (scores) or head_size_v (values) */
    const char *const *key_rows;
    int64_t offset;       /* bytes from key_rows[j] to this head's row */
    const void *zero_row; /* paired with the last row of an odd number of rows */
    /* What to prefetch during the loop: next_lines lines of 64 bytes at each of next_rows[] +
     * next_offset, spread evenly, since the hardware has few line buffers. */
    const char *const *next_rows;
    int64_t next_offset;
    int32_t next_keys;
    int32_t next_lines;
    int32_t element; /* enum element_type of the rows, for fp8 */
    int32_t column;  /* first column of a block; set and read by kernels only */
};

/* Kernels of the decode path for one kind of rows. */
struct decode_kernels {
    /* scores[row][key] = q[row] . key, q padded to args->rows rows of `depth` */
    void (*scores)(float *scores, const void *q, const struct decode_args *args);
    /* acc[row] += p[row] V, with columns in the kernels' own order */
    void (*values)(float *acc, const void *p, const struct decode_args *args);
    /* puts a head's acc_o into plain order, in place. Returns false where non-finite values may be
     * in wrong columns, which only the packed path gets right. NULL: it is in plain order */
    bool (*finish)(float *sums, int32_t rows, int32_t width);
    /* from so many rows on arithmetic is the limit and acc_o comes from L2 for each call: tiles of
     * twice the keys are faster, and heads are computed one after the other; 0: never */
    int32_t many_rows;
    /* many rows run on AMX tiles: the softmax should prefetch, too, and tiles of twice the keys pay
     * also for rows of a list */
    bool tiles;
    /* puts a row of q into the order and form that scores() reads, and returns its scale; NULL: q
     * is read as it is */
    float (*order)(void *q, int32_t n);
    /* then packs all rows of a head for scores(), using memory of their size; NULL: not packed */
    void (*pack)(void *q, void *memory, int32_t rows, int32_t depth);
};

/* The columns of a tile that a block of FLASH_ROWS rows of an item sees. */
struct flash_block {
    int32_t begin; /* columns that any row sees, multiples of 32; begin == end: no row sees any */
    int32_t end;
    int32_t masked;     /* 0: all rows see all of them, and low and high are not read */
    int32_t first_tile; /* 1: the first tile of these rows: acc_o holds nothing yet */
};

/* A tile of keys for all rows of an item: scores, softmax, values. Rows and state are padded to
 * whole blocks; padding sees nothing or has queries of zero. */
struct flash_args {
    const void *keys;
    const void *values;
    const struct flash_block *blocks;
    const int32_t *low; /* [rows], as in softmax_args; read for masked blocks only */
    const int32_t *high;
    const void *q; /* [rows][depth] */
    float *acc_o;  /* [rows][width] */
    int32_t depth;
    int32_t width;
    int32_t num_blocks;
    float softmax_scale_log2;
    float *row_max;
    float *row_sum;
};

/* The packed path's tile of FLASH_KEYS in one call, for layers whose scores need a scale and a mask
 * only. */
struct flash_kernels {
    /* as in tile_kernels, in an order of their own; columns are multiples of 32 */
    void (*pack_keys)(void *packed, const void *const *rows, int32_t n, int32_t columns,
                      int32_t depth);
    int (*pack_values)(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                       int32_t width);
    void (*attend)(const struct flash_args *args);
};

#define INDEX_HEADS 32 /* heads of a list of index_args are a multiple */

/* An indexer's scores of a tile of keys for lists of `heads` query rows each, summed over them as
 * by head_sum_args. */
struct index_args {
    struct decode_args keys; /* up to TILE_KEYS, of the compute type, and what to prefetch */
    char *staged;            /* memory for TILE_KEYS rows, which may be those of `keys` */
    const void *q;           /* [lists * heads][depth], by flash_kernels.pack_keys */
    int32_t *out;            /* [lists][TILE_KEYS] */
    const float *factors;    /* [TILE_KEYS] */
    const float *weights;    /* [lists][heads] */
    int32_t lists;
    int32_t heads;
    bool relu;
    /* factors may be 0, negative or not finite. It is the layer's: a key's factor may not choose
     * the arithmetic of other keys. */
    bool scaled;
};

struct tile_kernels {
    int32_t element_bytes; /* bytes of the compute type: 4 or 2 */
    int32_t element;       /* enum element_type of the compute type */
    int32_t row_block;     /* query rows for which gemm is fastest */
    int32_t decode_rows;   /* with more rows of one head the packed path is faster */
    /* converts n elements to the compute type */
    void (*unpack[ELEMENT_COUNT])(void *destination, const void *source, int64_t n);
    /* packs n key rows of `depth` compute elements into the layout of gemm's b, TILE_KEYS columns
     * wide; columns n .. columns-1 become zero */
    void (*pack_keys)(void *packed, const void *const *rows, int32_t n, int32_t columns,
                      int32_t depth);
    /* packs value rows, `width` columns wide; rows n .. n_padded-1 become zero. Returns 1 if any
     * value is NaN or infinite. */
    int (*pack_values)(void *packed, const void *const *rows, int32_t n, int32_t n_padded,
                       int32_t width);
    /* c[m, n] (+)= a[m, k] b[k, n]; strides in elements, lda even; b's rows hold ldb columns. k and
     * n are multiples of 32 (k: 2 suffices where a is probabilities). */
    void (*gemm)(float *c, int64_t ldc, const void *a, int64_t lda, const void *b, int64_t ldb,
                 int32_t m, int32_t n, int32_t k, int accumulate);
    void (*softmax)(const struct softmax_args *args);
    const struct flash_kernels *flash;                   /* NULL: none */
    void (*index_scores)(const struct index_args *args); /* NULL: by gemm and sum_heads */
    const struct decode_kernels *decode; /* rows in the compute type; NULL: no decode path */
    /* kernels that read rows of e4m3 or e5m2, of int8, or of int4 (rows of a multiple of 64 up to
     * 512) in place; NULL: such rows are staged */
    const struct decode_kernels *decode_fp8;
    const struct decode_kernels *decode_int8;
    const struct decode_kernels *decode_int4;
};

/* One token of a recurrent rule on rows of a state. */
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
    /* read by `rule` alone, which takes depths of COLUMN_MULTIPLE */
    const float *decays; /* [depth]: e^g of each column, in place of decay */
    bool additive;       /* S <- G S + beta v k^T */
    float skip;          /* o <- o + skip v */
    float *changes;      /* NULL, or r [rows] */
};

/* Rows of a causal convolution; those of floats are `stride` apart. */
struct convolve_args {
    float *y;             /* [rows] */
    const void *x;        /* [width - 1 + rows + rows_after] of `element`, x_bytes apart */
    const float *weights; /* [width] */
    const float *bias;
    int64_t stride;
    int64_t x_bytes;
    int32_t element; /* enum element_type: f32, f16 or bf16 */
    int32_t
        rows_after; /* rows of x that follow and will be wanted soon; 0 also where x is cached */
    int32_t width;
    int32_t rows;
    int32_t n; /* a multiple of COLUMN_MULTIPLE */
    int with_silu;
};

/* Decays between the tokens of a chunk, and their products with the chunk's k k^T and q k^T; rows
 * are `stride` floats apart. Above the diagonal by_r and by_q stay zero. */
struct decays_args {
    int64_t stride;
    int32_t count;
    const float *decay; /* by token */
    const float *beta;
    const float *kk;
    const float *qk;
    float *by_r; /* -beta[t] d[t][j] kk[t][j], j < t; d is the decay from after j to t */
    float *by_q; /* d[t][j] qk[t][j], j <= t */
    float *d;    /* d[count - 1] */
};

/* An operand of a product, in the layout of the kernels that made it. */
struct product_operand {
    void *memory;     /* 4 bytes for each element, aligned to 64 */
    const void *data; /* set by the kernels: `memory`, or the rows themselves */
    int64_t stride;   /* elements from a row, or block of rows, of data to the next */
    int32_t
        block; /* elements from a block of 32 of k to the next, for kernels that have such blocks */
};

/* out[i][j] = keep[i] out[i][j] + by[i] sum over p of left[i][p] right[p][j] */
struct product_args {
    float *out;
    int64_t stride;
    const struct product_operand *left;
    const struct product_operand *right;
    const float *keep; /* NULL: out is overwritten, not read */
    const float *by;
    int32_t first; /* row of left, out, keep and by; the left's memory has whole blocks of 32 */
    int32_t m;     /* rows */
    int32_t n;     /* n and k are multiples of 32; both operands may have more */
    int32_t k;
    struct product_operand *packed; /* NULL, or a right operand that is made of out; first is 0 */
};

/* Products of rows of floats, whose operands are used more than once. */
struct product_kernels {
    /* column p times by[p]; NULL: as they are */
    void (*left)(struct product_operand *operand, const float *rows, int64_t stride, int32_t m,
                 int32_t k, const float *by);
    /* adds rows first .. k - 1; those before them, with the same n, are already there */
    void (*right)(struct product_operand *operand, const float *rows, int64_t stride, int32_t first,
                  int32_t k, int32_t n);
    void (*multiply)(const struct product_args *args);
};

/* Inputs of a head's gates, by token; arrays hold whole vectors. */
struct gates_args {
    const float *a;
    const float *b;
    float rate; /* -exp(A_log) */
    float bias;
    int32_t count;
};

/* Tokens of a group, which pass over a state together, and the value dims of the part of the state
 * that stays in L1. */
#define WALK_TOKENS 4
#define WALK_COLUMNS 32

/* How a group of tokens updates the state S of a head. Between groups memory holds S / g; E[t] is g
 * times the decay from the group's beginning through token t. */
struct walk_group {
    int32_t tokens;
    float e[WALK_TOKENS];
    float beta[WALK_TOKENS];
    float by_state[WALK_TOKENS];          /* -beta[t] E[t] */
    float by_r[WALK_TOKENS][WALK_TOKENS]; /* as in decays_args */
    float by_q[WALK_TOKENS][WALK_TOKENS];
    float left[WALK_TOKENS]; /* factor of r in memory after the group */
    float keep;              /* factor of what memory held before the group */
};

/* WALK_COLUMNS value dims of a state and the groups that pass over them. k and q have rows for
 * whole groups; a padding token has r of 0 and no row of o. */
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
    bool additive; /* r is beta v: by_state and by_r are not read */
    const struct walk_group *groups;
};

struct delta_kernels {
    void (*convolve)(const struct convolve_args *args);
    void (*decays)(const struct decays_args *args);
    /* x[t] += sum over j < t of by[t][j] x[j], for rows 1 .. count-1 in their order; x has rows of
     * n floats, of COLUMN_MULTIPLE, by rows of `stride` */
    void (*solve)(float *x, int32_t n, const float *by, int64_t stride, int32_t count);
    float (*dot)(const float *a, const float *b, int32_t n); /* n of COLUMN_MULTIPLE */
    /* each of `rows` rows of n floats (of COLUMN_MULTIPLE) times by / its norm */
    void (*normalize)(float *x, int32_t rows, int32_t n, float by);
    /* decay = e^(rate log(1 + e^(a + bias))), beta = 1 / (1 + e^-b) */
    void (*gates)(float *decay, float *beta, const struct gates_args *args);
    void (*activate)(float *z, int32_t n, bool sigmoid); /* SiLU, or the logistic function */
    void (*multiply)(float *x, const float *y, float by, int32_t n); /* x <- x y by */
    void (*step)(const struct delta_args *args); /* the gated delta rule, a gate per head */
    void (*rule)(const struct delta_args *args);
    /* to[j][i] = from[i][j]; rows and columns of COLUMN_MULTIPLE */
    void (*transpose)(float *to, int64_t to_stride, const float *from, int64_t from_stride,
                      int32_t rows, int32_t columns);
    void (*walk)(const struct walk_args *args); /* NULL: chunks go by products */
    /* out[t][j] = a[t] b[j], rows of n floats, of COLUMN_MULTIPLE */
    void (*group_products)(float (*out)[WALK_TOKENS], const float *a, const float *b, int32_t n);
};

/* Rows of float32 to the codes of quantized caches, each rounded once, and some codes back. */
struct code_kernels {
    /* magnitude; NaN if any is */
    float (*largest)(const float *x, int32_t n);
    /* x / scale, or where `channels` is not NULL x[i] / channels[i], to e4m3, e5m2 or int8; NULL
     * for other elements */
    void (*encode[ELEMENT_COUNT])(void *codes, const float *x, float scale, const float *channels,
                                  int32_t n);
    /* Rotates the row by signs and Hadamard's matrix and writes two codes in a byte; returns their
     * zero point. A NaN in the row makes *scale NaN, and no code is written. */
    int32_t (*encode_int4)(uint8_t *codes, const float *x, const float *signs, int32_t n,
                           float *scale);
    /* TurboQuant's keys, one code in a byte: the nearest of 2^bits levels to the row rotated and
     * scaled to deviation 1; halfway[2^(bits-1) - 1] lies between the levels above 0. Returns the
     * row's norm; where that is not finite, NaN, and no code is written. */
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
struct block_kernels {
    void (*read)(float *out, const uint8_t *row, int32_t n);
    void (*write)(uint8_t *row, const float *x, int32_t n);
};

/* Log-sum-exps of two attends over disjoint keys, what their rows are multiplied with, and the
 * log-sum-exp of both; arrays hold whole vectors. */
struct merge_weights {
    const float *a, *b;
    float *by_a, *by_b, *both;
};

/* Sums over heads h of weights[h] act(factors[j] scores[h][j]), rows of TILE_KEYS; act is ReLU or
 * nothing. out[j] has the order of the sum as an integer: NaN is the highest, 0 has no sign. */
struct head_sum_args {
    int32_t *out;
    const float *scores;
    const float *factors;
    const float *weights;
    int32_t heads;
    bool relu;
};

/* Keeps what is above `least` in from[n], and the first `equals` that equal it, in their order.
 * `to` has room for n, and may be `from`. */
struct keep_args {
    const int32_t *from;
    const int32_t *entries; /* [n], or NULL: first, first + 1, ... */
    int32_t *to;
    int32_t *to_entries;
    int32_t n;
    int32_t first;
    int32_t least;
    int32_t equals;
};

struct variant {
    const char *name;
    int32_t rank; /* an estimate until attn-bench --tune has measured */
    const struct tile_kernels *f32;
    const struct tile_kernels *bf16; /* NULL: bf16 is computed in float32 */
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
    void (*sum_heads)(const struct head_sum_args *args);
    int32_t (*highest)(const int32_t *x, int32_t n); /* n above 0 */
    int32_t (*count_above)(const int32_t *x, int32_t n, int32_t least);
    int32_t (*keep_above)(const struct keep_args *args); /* returns their number */
    const struct delta_kernels *delta;
    const struct product_kernels *products;
    /* faster, with operands of 16 bits a number; NULL: none */
    const struct product_kernels *split_products;
    const struct code_kernels *codes;
    const struct block_kernels *blocks; /* [2]: of 4 bits, of 8 */
    int (*enter)(void); /* once per worker and call, before any other kernel; NULL: nothing to do */
    void (*leave)(void);
};

extern const struct variant variant_scalar;
extern const struct variant variant_avx2;
extern const struct variant variant_avx512;
extern const struct variant variant_avx512bf16;
extern const struct variant variant_amx;
extern const struct variant variant_neon;
extern const struct variant variant_neonbf16;

/* Fills in the variants that this machine runs, slowest first, and the names of its ISA extensions;
 * variant_by_name() returns NULL for a variant that this machine does not run. */
int32_t variants_of_machine(const struct variant **variants, int32_t capacity, char *isa,
                            size_t isa_bytes);
const struct variant *variant_by_name(const char *name);

#endif
