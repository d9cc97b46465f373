/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors and extensions of one run. */
#include "io.h"

#include <math.h>

#include "support/client.h"

#define MOST_POSITIONS 96 /* rows of a table of cosines and sines */

static const struct attn_dtype float32 = {ATTN_CODE_FLOAT, 32, 1}, int32 = {ATTN_CODE_INT, 32, 1},
                               e4m3 = {ATTN_CODE_FLOAT8_E4M3FN, 8, 1};

/* A sound tensor [a, b, c] of a dtype; 0: it has no such dimension. */
static struct attn_tensor *make_tensor(struct blocks *blocks, struct io *io,
                                       struct attn_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    int64_t *shape = io->shapes[io->count];
    struct attn_tensor *t = &io->tensors[io->count];
    FUZZ_CHECK(io->count < MOST_IO_TENSORS);
    io->count++;
    shape[0] = a;
    shape[1] = b > 0 ? b : 1;
    shape[2] = c > 0 ? c : 1;
    *t = (struct attn_tensor){
        blocks_add(blocks, (size_t)(a * shape[1] * shape[2]) * (dtype.bits / 8u)),
        {ATTN_DEVICE_CPU, 0},
        1 + (b > 0) + (c > 0),
        dtype,
        shape,
        NULL,
        0};
    return t;
}

/* A tensor other than it has to be: its memory is as long as it says. */
static void spoil(struct blocks *blocks, struct input *input, struct attn_tensor *t)
{
    int64_t *strides = blocks_add(blocks, 3 * sizeof *strides);
    switch (input_byte(input) % 8) {
    case 0:
        t->data = NULL;
        break;
    case 1:
        t->ndim = input_int(input);
        break;
    case 2:
        t->dtype = (struct attn_dtype){input_byte(input), input_byte(input), input_byte(input)};
        break;
    case 3:
        t->device = (struct attn_device){input_int(input), input_int(input)};
        break;
    case 4:
        t->shape = NULL;
        break;
    default:
        strides[2] = input_byte(input) < 128 ? 1 : input_int(input);
        strides[1] = t->shape[2] * (input_byte(input) % 2); /* 0: heads in one place */
        strides[0] = t->shape[2] * (input_byte(input) % 2 ? t->shape[1] : 1);
        if (t->shape[0] <= 1 && input_byte(input) == 1) { /* which no row is at */
            strides[0] = input_int64(input);
        }
        t->strides = strides;
    }
}

/* NaN, infinite, negative, the largest. */
static float odd_float(struct input *input, float usual)
{
    static const float odd[] = {NAN, INFINITY, -INFINITY, -1, 0, 3.4e38f};
    const uint8_t tag = input_byte(input);
    return tag >= 1 && tag <= 6 ? odd[tag - 1] : usual;
}

/* An extension in memory of its own, in front of the chain. It may be missing. */
static void bring(struct blocks *blocks, struct input *input, struct io *io, struct attn_ext *ext,
                  size_t size)
{
    const uint8_t tag = input_byte(input);
    struct attn_ext *copy = blocks_add(blocks, size);
    ext->next = io->run.next;
    memcpy(copy, ext, size);
    copy->flags = tag == 2 ? ATTN_EXT_OPTIONAL : tag == 3 ? 2 : 0;
    io->run.next = tag == 1 ? io->run.next : copy;
}
#define BRING(type, id, ...)                                                                       \
    do {                                                                                           \
        struct type made = EXTENSION(type, id, NULL, __VA_ARGS__);                                 \
        bring(blocks, input, io, &made.ext, sizeof made);                                          \
    } while (0)

/* Positions within a table, of which some are any. */
static int64_t *positions(struct blocks *blocks, struct input *input, int64_t count)
{
    int64_t *at = blocks_add(blocks, (size_t)count * sizeof *at);
    for (int64_t i = 0; i < count; i++) {
        at[i] = i % MOST_POSITIONS;
    }
    if (count > 0 && input_byte(input) == 1) {
        at[input_byte(input) % count] = input_int64(input);
    }
    return input_byte(input) == 1 ? NULL : at;
}

static void add_mla(struct blocks *blocks, struct input *input, const struct sampled *s,
                    struct io_rows rows, struct io *io)
{
    const struct attn_mla_desc *m = &s->mla;
    const int64_t heads = s->desc.num_q_heads, pe = m->qk_rope_head_dim;
    const int64_t nope = m->absorb_in_core ? m->qk_nope_head_dim : m->kv_lora_rank;
    const int64_t v = m->absorb_in_core ? m->v_head_dim : m->kv_lora_rank;
    struct attn_tensor *q_nope = make_tensor(blocks, io, float32, rows.tokens, heads, nope),
                       *q_pe = make_tensor(blocks, io, float32, rows.tokens, heads, pe),
                       *kv_c = make_tensor(blocks, io, float32, rows.keys, m->kv_lora_rank, 0),
                       *k_pe = make_tensor(blocks, io, float32, rows.keys, pe > 0 ? pe : 1, 0);
    int32_t *topk = blocks_add(blocks, (size_t)(rows.tokens * m->topk) * sizeof *topk);
    const uint8_t tag = input_byte(input);
    io->run.out = make_tensor(blocks, io, float32, rows.tokens, heads, v);
    io->run.q = io->run.k = io->run.v = NULL;
    if (sample_has(s, &s->caches.ext)) {
        io->rows[0] = make_tensor(blocks, io, float32, rows.further, 1, s->cache.head_size);
        io->rows[0] = tag == 4 ? NULL : io->rows[0];
        BRING(attn_io_caches, ATTN_EXT_IO_CACHES, .rows = tag == 5 ? NULL : io->rows,
              .num_rows = tag == 6 ? input_int(input) : 1);
    }
    BRING(attn_io_mla, ATTN_EXT_IO_MLA, .q_nope = q_nope, .q_pe = pe > 0 ? q_pe : NULL,
          .kv_c = tag == 1 ? NULL : kv_c, .k_pe = pe > 0 ? k_pe : NULL,
          .topk_indices = m->topk > 0 && tag != 2 ? topk : NULL,
          .topk_stride = tag == 3 ? input_byte(input) % (m->topk + 1) : m->topk);
}

static void add_recurrent(struct blocks *blocks, struct input *input, const struct sampled *s,
                          struct io_rows rows, struct io *io)
{
    const struct attn_recurrent_desc *g = &s->gdn;
    const int64_t heads = g->num_v_heads, size = g->head_size_v;
    const int64_t gates = sample_has(s, &s->rule.ext) ? heads * g->head_size_k : heads;
    const int64_t channels = 2 * g->num_k_heads * g->head_size_k + heads * size;
    const uint8_t tag = input_byte(input);
    struct attn_tensor *qkv = make_tensor(blocks, io, float32, rows.tokens, channels, 0),
                       *a = make_tensor(blocks, io, float32, rows.tokens, gates, 0),
                       *b = make_tensor(blocks, io, float32, rows.tokens, heads, 0);
    io->run.out = make_tensor(blocks, io, float32, rows.tokens, heads, size);
    io->run.q = io->run.k = io->run.v = NULL;
    if (sample_has(s, &s->norm.ext)) {
        BRING(attn_io_recurrent_gate, ATTN_EXT_DRAFT_IO_RECURRENT_GATE,
              .gate = tag == 1 ? NULL : make_tensor(blocks, io, float32, rows.tokens, heads, size));
    }
    BRING(attn_io_recurrent, ATTN_EXT_IO_RECURRENT, .mixed_qkv = tag == 2 ? NULL : qkv,
          .a = tag == 3 ? NULL : a, .b = tag == 4 ? NULL : b);
}

static void add_indexer(struct blocks *blocks, struct input *input, const struct sampled *s,
                        struct io_rows rows, struct io *io)
{
    const struct attn_indexer_desc *x = &s->indexer;
    const struct attn_index_write *w = &s->index_write;
    const int64_t heads = s->desc.num_q_heads, size = s->desc.head_size;
    const int64_t room = x->topk + x->first_entries + x->last_entries + x->tail;
    const uint8_t tag = input_byte(input);
    int32_t *lengths = blocks_add(blocks, (size_t)(rows.tokens * x->num_groups) * sizeof *lengths);
    struct attn_tensor *cos_sin =
                           make_tensor(blocks, io, float32, MOST_POSITIONS, w->rotary_dim, 0),
                       *weight = make_tensor(blocks, io, float32, size, 0, 0),
                       *bias = make_tensor(blocks, io, float32, size, 0, 0);
    io->run.q = make_tensor(blocks, io, float32, rows.tokens, heads, size);
    io->run.k = make_tensor(blocks, io, float32, rows.keys, 1, size);
    io->run.out = make_tensor(blocks, io, int32, rows.tokens, x->num_groups, room);
    io->run.v = NULL;
    BRING(attn_io_indexer, ATTN_EXT_IO_INDEXER,
          .weights = tag == 1 ? NULL : make_tensor(blocks, io, float32, rows.tokens, heads, 0),
          .lengths = tag == 2 ? NULL : lengths);
    BRING(attn_io_index_write, ATTN_EXT_DRAFT_IO_INDEX_WRITE,
          .positions = positions(blocks, input, rows.keys), .cos_sin = cos_sin,
          .norm_weight = weight, .norm_bias = tag == 3 ? NULL : bias,
          .norm_eps = odd_float(input, 1e-6f), .reserved = tag == 4);
}

static void add_compressor(struct blocks *blocks, struct input *input, const struct sampled *s,
                           struct io_rows rows, struct io *io)
{
    const struct attn_compressor_desc *x = &s->compressor;
    const int64_t size = s->desc.head_size;
    const uint8_t tag = input_byte(input);
    struct attn_tensor *bias = make_tensor(blocks, io, float32, x->tokens_per_row, 2 * size, 0),
                       *weight = make_tensor(blocks, io, float32, size, 0, 0);
    io->run.k = make_tensor(blocks, io, float32, rows.keys, s->desc.num_kv_heads, size);
    io->run.out = make_tensor(blocks, io, float32, rows.tokens, 1, size);
    io->run.q = io->run.v = NULL;
    BRING(attn_io_compressor, ATTN_EXT_DRAFT_IO_COMPRESSOR, .position_bias = tag == 1 ? NULL : bias,
          .norm_weight = tag == 2 ? NULL : weight,
          .cos_sin = make_tensor(blocks, io, float32, MOST_POSITIONS, x->rotary_dim, 0),
          .norm_eps = odd_float(input, 1e-6f), .reserved = tag == 3);
}

static void add_rope(struct blocks *blocks, struct input *input, const struct sampled *s,
                     struct io_rows rows, struct io *io)
{
    const int64_t size = s->desc.head_size;
    const uint8_t tag = input_byte(input);
    const int64_t most = rows.tokens > rows.keys ? rows.tokens : rows.keys;
    struct attn_tensor *cos_sin = make_tensor(blocks, io, float32, MOST_POSITIONS, size, 0);
    BRING(attn_io_rope, ATTN_EXT_IO_ROPE, .form = tag == 1 ? input_int(input) : s->desc.rope,
          .rotary_dim = tag == 2 ? input_int(input) : 0,
          .positions = positions(blocks, input, most), .cos_sin = tag == 3 ? NULL : cos_sin,
          .q_norm_weight = tag == 4 ? NULL : make_tensor(blocks, io, float32, size, 0, 0),
          .k_norm_weight = tag == 5 ? NULL : make_tensor(blocks, io, float32, size, 0, 0),
          .norm_eps = odd_float(input, 1e-6f), .reserved = tag == 6);
}

static void add_codes(struct blocks *blocks, struct input *input, const struct sampled *s,
                      struct io_rows rows, struct io *io)
{
    const int64_t heads = s->desc.num_q_heads, size = s->desc.head_size;
    const uint8_t tag = input_byte(input);
    io->run.out = make_tensor(blocks, io, e4m3, rows.tokens, heads, size);
    BRING(attn_io_output_quant, ATTN_EXT_IO_OUTPUT_QUANT, .scale = NULL,
          .block_scales =
              tag == 1 ? NULL
                       : make_tensor(blocks, io, float32, rows.tokens, heads * size / 64, 0));
}

static void add_output_rope(struct blocks *blocks, struct input *input, const struct sampled *s,
                            struct io_rows rows, struct io *io)
{
    const uint8_t tag = input_byte(input);
    struct attn_tensor *cos_sin =
        make_tensor(blocks, io, float32, MOST_POSITIONS, s->output_rope.rotary_dim, 0);
    BRING(attn_io_output_rope, ATTN_EXT_DRAFT_IO_OUTPUT_ROPE,
          .positions = positions(blocks, input, rows.tokens), .cos_sin = tag == 1 ? NULL : cos_sin);
}

static void add_sort(struct blocks *blocks, struct input *input, const struct sampled *s,
                     struct io_rows rows, struct io *io)
{
    const struct {
        bool has;
        void (*add)(struct blocks *blocks, struct input *input, const struct sampled *s,
                    struct io_rows rows, struct io *io);
    } sorts[] = {{sample_has(s, &s->mla.ext), add_mla},
                 {sample_has(s, &s->gdn.ext), add_recurrent},
                 {sample_has(s, &s->indexer.ext), add_indexer},
                 {sample_has(s, &s->compressor.ext), add_compressor},
                 {sample_has(s, &s->output_rope.ext), add_output_rope},
                 {s->desc.rope != ATTN_ROPE_NONE, add_rope},
                 {s->desc.output_form != ATTN_OUTPUT_PLAIN, add_codes}};
    const int32_t plain = io->count;
    for (size_t i = 0; i < sizeof sorts / sizeof *sorts; i++) {
        if (sorts[i].has && input_byte(input) != 1) {
            sorts[i].add(blocks, input, s, rows, io);
        }
    }
    const uint8_t tag = io->count > plain ? input_byte(input) : 0;
    struct attn_tensor *t = &io->tensors[plain + (tag & 15) % (io->count - plain + 1)];
    int64_t *shape = io->shapes[t - io->tensors];
    if (t == &io->tensors[io->count] || tag < 128) {
        return;
    }
    if (tag < 160) { /* smaller, or below 0 */
        const int32_t size = input_int(input), at = input_byte(input) % 3;
        shape[at] = size < shape[at] ? size : shape[at];
    } else {
        spoil(blocks, input, t);
    }
}

/* Lists of just the tokens that the batch has, whose numbers are any; each way of leaving them out
 * is an input of its own. */
static const struct attn_ext *add_lists(struct blocks *blocks, struct input *input,
                                        const struct sampled *s, int64_t tokens)
{
    const int64_t groups = s->desc.num_q_heads, entries = s->lists.max_entries;
    struct attn_io_index_lists *io = blocks_add(blocks, sizeof *io);
    const size_t bytes = (size_t)(tokens * groups * entries) * sizeof(int32_t);
    int32_t *indices = blocks_add(blocks, bytes);
    int32_t *lengths = blocks_add(blocks, (size_t)(tokens * groups) * sizeof(int32_t));
    const uint8_t tag = input_byte(input);
    if (!sample_has(s, &s->lists.ext)) {
        return NULL;
    }
    for (int64_t i = 0; i < tokens * groups * entries; i++) {
        indices[i] = (int32_t)(i % entries);
    }
    input_patch(input, indices, 0, bytes);
    input_patch(input, lengths, 0, (size_t)(tokens * groups) * sizeof *lengths);
    *io = (struct attn_io_index_lists){
        .ext = {ATTN_EXT_DRAFT_IO_INDEX_LISTS, 0, input_struct_size(input, sizeof *io), NULL},
        .indices = tag == 1 ? NULL : indices,
        .token_stride = tag == 2 ? input_byte(input) % (groups * entries) : groups * entries,
        .group_stride = tag == 3 ? input_byte(input) % entries : entries,
        .lengths = tag == 4 ? NULL : lengths,
        .length_stride = tag == 5 ? input_byte(input) % groups : groups};
    io->ext.struct_size = io->ext.struct_size < sizeof *io ? io->ext.struct_size : sizeof *io;
    return tag == 6 ? NULL : &io->ext;
}

/* Does each shape claim no more than there is? */
static bool shapes_hold(const struct io *io, const int64_t there[5])
{
    for (int32_t t = 0; t < 5; t++) {
        const int64_t *own = io->shapes[t], last = t < 4 ? own[2] : 1;
        if (own[0] < 0 || own[1] < 0 || last < 0 || own[0] > there[t] || own[1] > there[t] ||
            last > 1024 || own[0] * own[1] > there[t] || own[0] * own[1] * last > there[t]) {
            return false;
        }
    }
    return true;
}

bool io_draw(struct blocks *blocks, struct input *input, const struct sampled *s,
             struct io_rows rows, struct io *io)
{
    const struct attn_layer_desc *l = &s->desc;
    const int64_t q_heads = l->num_q_heads, k_heads = l->num_kv_heads, size = l->head_size;
    const int64_t there[5] = {rows.tokens * q_heads * size, rows.keys * k_heads * size,
                              rows.keys * k_heads * size, rows.tokens * q_heads * size,
                              rows.tokens * q_heads};
    *io = (struct io){.count = 0};
    const struct attn_tensor *q = make_tensor(blocks, io, float32, rows.tokens, q_heads, size),
                             *k = make_tensor(blocks, io, float32, rows.keys, k_heads, size),
                             *v = make_tensor(blocks, io, float32, rows.keys, k_heads, size),
                             *out = make_tensor(blocks, io, float32, rows.tokens, q_heads, size),
                             *lse = make_tensor(blocks, io, float32, q_heads, rows.tokens, 0);
    io->tensors[4].ndim = 2;
    io->shapes[4][1] = rows.tokens;
    input_patch(input, io->shapes, 0, 5 * sizeof io->shapes[0]);
    const uint8_t tag = input_byte(input);
    io->run = SIZED(attn_step_io, .next = add_lists(blocks, input, s, rows.tokens),
                    .flags = tag < 8 ? tag : 0, .q = tag == 8 ? NULL : q, .k = tag == 9 ? NULL : k,
                    .v = v, .out = tag == 10 ? NULL : out,
                    .lse = tag >= 192 && tag % 2 == 0 ? lse : NULL);
    if (!shapes_hold(io, there)) {
        return false;
    }
    if (tag >= 128 && tag < 192) {
        spoil(blocks, input, &io->tensors[tag % 5]);
    }
    add_sort(blocks, input, s, rows, io);
    if (tag == 11) { /* tensors that are not its sort's, too */
        io->run.q = q;
        io->run.k = k;
    }
    io->run.out = tag == 10 ? NULL : io->run.out;
    return true;
}
