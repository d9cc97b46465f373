/* SPDX-License-Identifier: Apache-2.0 */
/* Rules with a gate per head in chunks, on the transpose of the state: with walk kernels by groups
 * of tokens (gdn_walk.c), else by products. The products of a chunk of C tokens and a head, Dk = Dv
 * = D, are 6 C D^2 FLOPs with the state and 3 C^2 D between tokens, by split_products where
 * activations have 16 bits, and 2 C^2 D / heads over one key head. With operands rounded to bf16
 * each of these products fails the error bound of some layer.
 *
 * One chunk, with D[t][j] the decay from after token j to token t, E[t] that from the chunk's
 * beginning, and S the state before it:
 *
 *   r_t = beta_t (v_t - E[t] S k_t - sum_{j<t} D[t][j] (k_j k_t) r_j)
 *   o_t = E[t] S q_t + sum_{j<=t} D[t][j] (k_j q_t) r_j
 *   S  <- E[C-1] S + sum_j D[C-1][j] r_j k_j^T
 *
 * The sums over j < t are a unit lower triangular system, solved forwards: the WY form. Rules
 * without a delta have r_t = beta_t v_t, and some add a multiple of v_t to o_t. Decays are
 * products, not differences of sums, so that a decay of 0 stays one. */
#include <math.h>

#include "gdn.h"

#define TRIANGLE_ROWS 32 /* size of the blocks on the diagonal, which are computed whole */

static const struct product_kernels *products_of(const struct gdn *gdn)
{
    const struct variant *variant = gdn_variant(gdn);
    bool rounded =
        element_of_dtype(gdn->args->layer->dtype) != ELEMENT_F32 && variant->split_products != NULL;
    return rounded ? variant->split_products : variant->products;
}

/* kk and qk. The output of a request's first token is its value times one product of a key and its
 * query; where they are nearly orthogonal, nothing compensates an error of the product. So a
 * token's product with itself has float32's precision. */
static void multiply_keys(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const struct product_kernels *products = products_of(gdn);
    struct product_args args = {
        .stride = GDN_CHUNK, .right = &s->kt_right, .by = s->ones, .k = s->depth};
    for (args.first = 0; args.first < count; args.first += TRIANGLE_ROWS) {
        args.m = min_i32(TRIANGLE_ROWS, count - args.first);
        args.n = args.first + TRIANGLE_ROWS;
        args.out = s->kk;
        args.left = &s->k_left;
        products->multiply(&args);
        args.out = s->qk;
        args.left = &s->q_left;
        products->multiply(&args);
    }
    for (int32_t t = 0; t < count; t++) {
        const int64_t row = (int64_t)t * s->depth;
        s->qk[t * GDN_CHUNK + t] = gdn_variant(gdn)->delta->dot(s->k + row, s->q + row, s->depth);
    }
}

static void pack_keys(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const struct tile_kernels *plain = gdn_variant(gdn)->f32;
    const void *keys[GDN_CHUNK];
    for (int32_t t = 0; t < count; t++) {
        keys[t] = s->k + (int64_t)t * s->depth;
    }
    int32_t padded = round_up(count, COLUMN_MULTIPLE);
    plain->pack_keys(s->kt, keys, count, padded, s->depth);
    const struct product_kernels *products = products_of(gdn);
    products->left(&s->q_left, s->q, s->depth, count, s->depth, NULL);
    products->left(&s->k_left, s->k, s->depth, count, s->depth, NULL);
    products->right(&s->kt_right, s->kt, TILE_KEYS, 0, s->depth, padded);
    multiply_keys(gdn, count, s);
}

static void find_decays(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const struct decays_args args = {.stride = GDN_CHUNK,
                                     .count = count,
                                     .decay = s->decay,
                                     .beta = s->beta,
                                     .kk = s->kk,
                                     .qk = s->qk,
                                     .d = s->d,
                                     .by_r = s->by_r,
                                     .by_q = s->by_q};
    memset(s->d, 0, GDN_CHUNK * sizeof(float));
    gdn_variant(gdn)->delta->decays(&args);
    for (int32_t t = 0; t < count; t++) {
        s->e[t] = t > 0 ? s->e[t - 1] * s->decay[t] : s->decay[t];
    }
}

/* r, whose rows are those of a triangular system, as a right operand: a block of rows at a time,
 * from which what the blocks before it add is taken by products. */
static void solve_triangle(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const struct product_kernels *products = products_of(gdn);
    const int32_t width = s->width, padded = round_up(count, COLUMN_MULTIPLE);
    memset(s->v + (int64_t)count * width, 0, (size_t)((padded - count) * width) * sizeof(float));
    for (int32_t first = 0; first < count; first += TRIANGLE_ROWS) {
        const int32_t rows = min_i32(TRIANGLE_ROWS, count - first);
        const float *by = s->by_r + (int64_t)first * GDN_CHUNK;
        float *r = s->v + (int64_t)first * width;
        if (first > 0) {
            products->left(&s->by_r_left, by, GDN_CHUNK, rows, first, NULL);
            const struct product_args args = {.out = r,
                                              .stride = width,
                                              .left = &s->by_r_left,
                                              .right = &s->r_right,
                                              .keep = s->ones,
                                              .by = s->ones,
                                              .m = rows,
                                              .n = width,
                                              .k = first};
            products->multiply(&args);
        }
        gdn_variant(gdn)->delta->solve(r, width, by + first, GDN_CHUNK, rows);
        products->right(&s->r_right, s->v, width, first, min_i32(first + TRIANGLE_ROWS, padded),
                        width);
    }
}

/* As solve_chunk, for rules without a delta. */
static void scale_values(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const int32_t width = s->width, padded = round_up(count, COLUMN_MULTIPLE);
    memset(s->v + (int64_t)count * width, 0, (size_t)((padded - count) * width) * sizeof(float));
    for (int32_t t = 0; t < count; t++) {
        gdn_variant(gdn)->scale_row(s->v + (int64_t)t * width, s->beta[t], width);
    }
    products_of(gdn)->right(&s->r_right, s->v, width, 0, padded, width);
}

/* Prefetches the lines of rows first .. end - 1 of the chunk's outputs, while tiles compute: stores
 * to lines in memory would wait for them. */
static void prefetch_out(const struct gdn *gdn, int64_t row, int32_t first, int32_t end,
                         int32_t head)
{
    const struct attn_tensor *out = gdn->args->out;
    const int64_t bytes = gdn->desc->head_size_v * (int64_t)element_bytes[element_of_any(out)];
    for (int32_t t = first; t < end; t++) {
        const char *line = tensor_row(out, row + t, head);
        for (int64_t i = 0; i < bytes; i += 64) {
            __builtin_prefetch(line + i, 1);
        }
    }
}

/* v becomes r. */
static void solve_chunk(const struct gdn *gdn, int32_t count, const struct product_operand *state,
                        struct gdn_scratch *s)
{
    int32_t width = s->width;
    float by[GDN_CHUNK];
    for (int32_t t = 0; t < count; t++) {
        by[t] = -s->beta[t] * s->e[t];
    }
    const struct product_args args = {.out = s->v,
                                      .stride = width,
                                      .left = &s->k_left,
                                      .right = state,
                                      .keep = s->beta,
                                      .by = by,
                                      .m = count,
                                      .n = width,
                                      .k = s->depth};
    products_of(gdn)->multiply(&args);
    solve_triangle(gdn, count, s);
}

/* Whether r is finite. With a delta, the last row has a multiple of every other one in its sum. */
static bool is_finite(const struct gdn *gdn, int32_t count, const struct gdn_scratch *s)
{
    bool finite = true;
    for (int32_t t = gdn->rule->rule == ATTN_RULE_ADDITIVE ? 0 : count - 1; t < count; t++) {
        const float *r = s->v + (int64_t)t * s->width;
        finite = finite && isfinite(gdn_variant(gdn)->delta->dot(r, s->ones, s->width));
    }
    return finite;
}

/* What a block on the diagonal adds to the outputs, without the zeros above the diagonal: a zero
 * times an r of a later token that is not finite would be NaN. */
static void add_triangle(const struct gdn *gdn, int32_t first, int32_t rows, struct gdn_scratch *s)
{
    for (int32_t t = first; t < first + rows; t++) {
        for (int32_t j = first; j <= t; j++) {
            gdn_variant(gdn)->add_scaled(s->o + (int64_t)t * s->width, s->v + (int64_t)j * s->width,
                                         s->by_q[t * GDN_CHUNK + j], s->width);
        }
    }
}

/* Computes the outputs, into o or, with a skip, added to o, and the state after the chunk, also as
 * an operand if another chunk follows. */
static void finish_chunk(const struct gdn *gdn, int32_t count, float *state,
                         struct product_operand *packed, bool follows, struct gdn_scratch *s)
{
    int32_t width = s->width, last = count - 1;
    struct product_args args = {.out = s->o,
                                .stride = width,
                                .left = &s->q_left,
                                .right = packed,
                                .keep = gdn->skip != NULL ? s->ones : NULL,
                                .by = s->e,
                                .m = count,
                                .n = width,
                                .k = s->depth};
    products_of(gdn)->multiply(&args);
    int32_t padded = round_up(count, COLUMN_MULTIPLE);
    products_of(gdn)->left(&s->by_q_left, s->by_q, GDN_CHUNK, count, padded, NULL);
    args.left = &s->by_q_left;
    args.right = &s->r_right;
    args.keep = args.by = s->ones;
    const bool whole = is_finite(gdn, count, s);
    for (args.first = 0; args.first < count; args.first += TRIANGLE_ROWS) {
        args.m = min_i32(TRIANGLE_ROWS, count - args.first);
        args.k = args.first + (whole ? TRIANGLE_ROWS : 0);
        if (args.k > 0) {
            products_of(gdn)->multiply(&args);
        }
        if (!whole) {
            add_triangle(gdn, args.first, args.m, s);
        }
    }
    float keep[MAX_HEAD_SIZE];
    for (int32_t i = 0; i < s->depth; i++) {
        keep[i] = s->e[last];
    }
    products_of(gdn)->left(&s->kt_left, s->kt, TILE_KEYS, s->depth, padded,
                           s->d); /* k as the chunk's end has it */
    args = (struct product_args){.out = state,
                                 .stride = width,
                                 .left = &s->kt_left,
                                 .right = &s->r_right,
                                 .keep = keep,
                                 .by = s->ones,
                                 .m = s->depth,
                                 .n = width,
                                 .k = padded,
                                 .packed = follows ? packed : NULL};
    products_of(gdn)->multiply(&args);
}

/* to[j][i] = from[i][j] for `count` rows of `length` floats, by pack_keys if they are no whole
 * blocks; rows of `from` are padded to COLUMN_MULTIPLE. */
static void transpose(const struct gdn *gdn, const struct gdn_scratch *s, const float *from,
                      int64_t from_stride, int32_t count, int32_t length, float *to,
                      int64_t to_stride)
{
    const void *rows[TILE_KEYS];
    if (count % COLUMN_MULTIPLE == 0 && length % COLUMN_MULTIPLE == 0) {
        gdn_variant(gdn)->delta->transpose(to, to_stride, from, from_stride, count, length);
        return;
    }
    for (int32_t first = 0; first < count; first += TILE_KEYS) {
        int32_t n = min_i32(TILE_KEYS, count - first);
        for (int32_t i = 0; i < n; i++) {
            rows[i] = from + (first + i) * from_stride;
        }
        gdn_variant(gdn)->f32->pack_keys(s->kt, rows, n, round_up(n, COLUMN_MULTIPLE),
                                         round_up(length, COLUMN_MULTIPLE));
        for (int32_t j = 0; j < length; j++) {
            memcpy(to + j * to_stride + first, s->kt + (int64_t)j * TILE_KEYS,
                   (size_t)n * sizeof(float));
        }
    }
}

static void load_state(const struct gdn *gdn, int32_t slot, int32_t head,
                       const struct gdn_scratch *s, float *to)
{
    const int32_t dk = gdn->desc->head_size_k, dv = gdn->desc->head_size_v;
    const int32_t element = element_of_dtype(gdn->desc->state_dtype);
    const int64_t row_bytes = dk * element_bytes[element];
    const char *state = gdn_state(gdn, slot, head);
    float row[GDN_MAX_HEAD_SIZE];
    for (int32_t first = 0; first < dv; first += s->columns) {
        const char *rows = state + first * row_bytes;
        float *part = to + (int64_t)first * s->depth;
        int32_t count = min_i32(s->columns, dv - first);
        if (dk == s->depth && element == ELEMENT_F32) {
            transpose(gdn, s, (const float *)rows, dk, count, dk, part, s->columns);
            continue;
        }
        for (int32_t d = 0; d < count; d++) {
            gdn_variant(gdn)->f32->unpack[element](row, rows + d * row_bytes, dk);
            for (int32_t i = 0; i < dk; i++) {
                part[(int64_t)i * s->columns + d] = row[i];
            }
        }
    }
}

/* The state of head h of an item as an operand of products. */
static void pack_state(const struct gdn *gdn, int32_t h, struct gdn_scratch *s)
{
    const int64_t floats = (int64_t)s->depth * s->width;
    s->state_right[h].memory = s->packed_states + h * floats;
    products_of(gdn)->right(&s->state_right[h], s->states + h * floats, s->width, 0, s->depth,
                            s->width);
}

static void store_state(const struct gdn *gdn, int32_t slot, int32_t head, int64_t tokens,
                        const struct gdn_scratch *s, const float *from)
{
    const int32_t dk = gdn->desc->head_size_k, dv = gdn->desc->head_size_v;
    const int32_t element = element_of_dtype(gdn->desc->state_dtype);
    const int64_t row_bytes = dk * element_bytes[element];
    char *state = gdn_state(gdn, slot, head);
    float row[GDN_MAX_HEAD_SIZE];
    for (int32_t first = 0; first < dv; first += s->columns) {
        const float *part = from + (int64_t)first * s->depth;
        const int32_t count = min_i32(s->columns, dv - first);
        char *rows = state + first * row_bytes;
        if (element == ELEMENT_F32) {
            /* lines that come from memory are stored to in their order */
            const bool fits = count <= WALK_COLUMNS;
            transpose(gdn, s, part, s->columns, dk, count, fits ? s->raw : (float *)rows, dk);
            if (fits) {
                memcpy(rows, s->raw, (size_t)(count * row_bytes));
            }
            continue;
        }
        for (int32_t d = 0; d < count; d++) {
            for (int32_t i = 0; i < dk; i++) {
                row[i] = part[(int64_t)i * s->columns + d];
            }
            gdn_store_state(gdn, head, first + d, tokens, row, rows + d * row_bytes);
        }
    }
}

/* Tokens of the chunk that begins at token `first`: it ends where a checkpoint is due. */
static int32_t chunk_tokens(const struct gdn *gdn, const struct gdn_request *request, int64_t first)
{
    int32_t size = gdn->desc->chunk_size;
    int64_t end = first + (size > 0 && size < GDN_CHUNK ? size : GDN_CHUNK);
    end = end < request->num_tokens ? end : request->num_tokens;
    for (int64_t done = gdn_first_checkpoint(gdn, request); done < end;
         done += gdn->desc->checkpoint_interval) {
        if (done > first && gdn_checkpoint_slot(gdn, request, done) >= 0) {
            end = done;
        }
    }
    return (int32_t)(end - first);
}

void gdn_run_chunks(const struct gdn *gdn, const struct gdn_request *request, int32_t head,
                    int32_t num_heads, struct gdn_scratch *s)
{
    const int64_t state_floats = (int64_t)s->depth * s->width;
    const bool walks = gdn_walks(gdn);
    s->columns = walks ? WALK_COLUMNS : s->width;
    for (int32_t i = 0; i < MAX_HEAD_SIZE; i++) {
        s->ones[i] = 1.0f;
    }
    memset(s->by_r, 0, GDN_CHUNK * GDN_CHUNK * sizeof(float));
    memset(s->by_q, 0, GDN_CHUNK * GDN_CHUNK * sizeof(float));
    for (int32_t h = 0; h < num_heads; h++) {
        float *state = s->states + h * state_floats;
        memset(state, 0, (size_t)state_floats * sizeof(float));
        if (request->has_state) {
            load_state(gdn, request->state_from, head + h, s, state);
        }
        if (!walks) {
            pack_state(gdn, h, s);
        }
    }
    for (int64_t first = 0; first < request->num_tokens;) {
        int32_t count = chunk_tokens(gdn, request, first);
        gdn_load_qk(gdn, request, first, count, gdn_key_head(gdn->desc, head), s);
        if (walks) {
            gdn_walk_keys(gdn, count, s);
        } else {
            pack_keys(gdn, count, s);
        }
        for (int32_t h = 0; h < num_heads; h++) {
            float *state = s->states + h * state_floats;
            gdn_load_v(gdn, request, first, count, head + h, s);
            gdn_load_gates(gdn, request, first, count, head + h, s);
            if (walks) {
                gdn_walk(gdn, request, first, count, head + h, state, s);
            } else {
                find_decays(gdn, count, s);
                for (int32_t i = 0; gdn->skip != NULL && i < count * s->width; i++) {
                    s->o[i] = gdn->skip[head + h] * s->v[i];
                }
                prefetch_out(gdn, request->first_row + first, 0, count / 2, head + h);
                if (gdn->rule->rule == ATTN_RULE_ADDITIVE) {
                    scale_values(gdn, count, s);
                } else {
                    solve_chunk(gdn, count, &s->state_right[h], s);
                }
                prefetch_out(gdn, request->first_row + first, count / 2, count, head + h);
                finish_chunk(gdn, count, state, &s->state_right[h],
                             first + count < request->num_tokens, s);
                gdn_store_rows(gdn, request->first_row + first, count, head + h, s->o, s->width);
            }
        }
        first += count;
        int32_t checkpoint = gdn_checkpoint_slot(gdn, request, first);
        for (int32_t h = 0; h < num_heads && checkpoint >= 0; h++) { /* whose keys are done with */
            float *state = s->states + h * state_floats;
            store_state(gdn, checkpoint, head + h, request->context + first, s, state);
            if (gdn->desc->state_dtype != ATTN_DTYPE_F32) { /* goes on as it was stored */
                load_state(gdn, checkpoint, head + h, s, state);
                if (!walks) {
                    pack_state(gdn, h, s);
                }
            }
        }
    }
    for (int32_t h = 0; h < num_heads; h++) {
        store_state(gdn, request->slots[0], head + h, request->context + request->num_tokens, s,
                    s->states + h * state_floats);
    }
}
