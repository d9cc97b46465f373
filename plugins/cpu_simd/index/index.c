/* SPDX-License-Identifier: Apache-2.0 */
/* Indexers. An item is a chunk of a request's queries over a part of its rows, in tiles of
 * TILE_KEYS rows: a tile is packed once, its products with the queries of a few tokens at a time
 * are summed over their heads, and the sums that may be among the best are kept. A kernel that sums
 * at once has only queries packed and sums for all tokens of the chunk. One tile's products or sums
 * are in memory. With few items rows are cut into parts, whose candidates are merged.
 *
 * Per tile and query row, D 128: 32 KFLOP. A tile's rows are 32 KiB in bf16. */
#include "index.h"

#define PRODUCT_ROWS 64       /* query rows of one product: 32 KiB of float32 */
#define CHUNK_ROWS 2048       /* query rows of a chunk: 512 KiB of bf16 at D 128 */
#define CHUNK_TOKENS 256      /* most tokens of a chunk */
#define CHUNK_BYTES (2 << 20) /* candidates of a chunk, unless one token's are more */
#define PART_ROWS 1024        /* least rows of a part */
#define ALIGNMENT 64

/* A worker's memory. */
struct index_scratch {
    char *q, *keys, *staged;
    float *products, *weights, *factors, *q_scale;
    int32_t *sums; /* [TILE_KEYS]; at once [tokens, G, TILE_KEYS] */
    const void **rows, **scales;
    struct best *lists; /* [tokens, G] */
    int32_t *memory;    /* the lists' candidates */
};

struct index_loop {
    struct attend_problem problem;
    const struct attn_attend_args *args;
    const struct attn_indexer_desc *desc;
    const struct attn_io_indexer *io; /* or NULL */
    char *scratch;                    /* worker 0's */
    size_t scratch_bytes;
    int32_t *partials; /* for each token, part and list: a count, then scores and entries */
    int32_t most_tokens, tokens; /* tokens of a chunk: most, in this run */
    int32_t parts;
};

/* A chunk: tokens first .. first + count - 1 of the run, which are the request's last but some. */
struct index_chunk {
    int32_t request, first, count;
    int32_t position; /* position of the first token */
    int32_t few_rows; /* query rows of the request, padded, that are read in place; 0: packed */
};

static int32_t most_chunk_tokens(const struct layer_shape *shape, const struct attn_indexer_desc *x)
{
    const int64_t bytes = 8 * (int64_t)best_capacity(x->topk) * x->num_groups;
    int64_t tokens = CHUNK_ROWS / shape->group;
    tokens = tokens < CHUNK_BYTES / bytes ? tokens : CHUNK_BYTES / bytes;
    return (int32_t)(tokens < 1 ? 1 : tokens < CHUNK_TOKENS ? tokens : CHUNK_TOKENS);
}

/* Tokens of one product. */
static int32_t product_tokens(const struct layer_shape *shape)
{
    return max_i32(1, PRODUCT_ROWS / shape->group);
}

static size_t round_up_size(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void *take(char *memory, size_t *used, size_t bytes)
{
    void *taken = memory != NULL ? memory + *used : NULL;
    *used += round_up_size(bytes);
    return taken;
}

/* Whether a tile's scores are summed as soon as they are there, by kernels that read keys where
 * they lie. */
static bool sums_at_once(const struct layer_shape *shape, const struct attn_indexer_desc *x)
{
    return shape->kernels->index_scores != NULL && shape->group % x->num_groups == 0 &&
           shape->group / x->num_groups % INDEX_HEADS == 0;
}

/* Places a worker's memory; returns its bytes. */
static size_t scratch_place(const struct layer_shape *shape, const struct attn_indexer_desc *x,
                            char *memory, struct index_scratch *s)
{
    const size_t tokens = (size_t)most_chunk_tokens(shape, x), heads = (size_t)shape->group;
    const size_t row = (size_t)shape->depth_padded * (size_t)shape->kernels->element_bytes;
    const size_t lists = tokens * (size_t)x->num_groups;
    const bool at_once = sums_at_once(shape, x);
    const size_t rows = at_once ? 0 : (size_t)product_tokens(shape) * heads + ROW_MULTIPLE;
    size_t used = 0;
    s->q = take(memory, &used, (tokens * heads + ROW_MULTIPLE) * row);
    s->keys = take(memory, &used, TILE_KEYS * row);
    s->staged = take(memory, &used, TILE_KEYS * row);
    s->products = take(memory, &used, rows * TILE_KEYS * sizeof(float));
    s->weights = take(memory, &used, tokens * heads * sizeof(float));
    s->factors = take(memory, &used, TILE_KEYS * sizeof(float));
    s->sums = take(memory, &used, (at_once ? lists : 1) * TILE_KEYS * sizeof(int32_t));
    s->q_scale = take(memory, &used, DECODE_ROWS * sizeof(float));
    s->rows = take(memory, &used, 2 * TILE_KEYS * sizeof(void *));
    s->scales = take(memory, &used, 2 * TILE_KEYS * sizeof(void *));
    s->lists = take(memory, &used, lists * sizeof *s->lists);
    s->memory = take(memory, &used, 8 * lists * (size_t)best_capacity(x->topk));
    return used;
}

/* int32 of a list's candidates in a part. */
static size_t partial_size(const struct attn_indexer_desc *x)
{
    return 1 + 2 * (size_t)x->topk;
}

/* Bytes of all candidates of parts, which come before the workers' memory. */
static size_t partials_bytes(const struct attn_indexer_desc *x, int32_t num_threads)
{
    const size_t lists = 4 * (size_t)num_threads * (size_t)x->num_groups;
    return round_up_size(lists * partial_size(x) * sizeof(int32_t));
}

size_t index_workspace_bytes(const struct layer_shape *shape, const struct attn_indexer_desc *x,
                             int32_t num_threads)
{
    struct index_scratch s;
    return partials_bytes(x, num_threads) + (size_t)num_threads * scratch_place(shape, x, NULL, &s);
}

/* Entries that a query sees, and those of them that are listed for their score: low .. high - 1. */
struct index_reach {
    int32_t rows, entries, low, high;
    bool tail;
};

static struct index_reach reach_of(const struct attn_indexer_desc *x, int32_t position)
{
    const int32_t tokens = max_i32(position + 1, 0);
    struct index_reach r = {.rows = tokens / x->tokens_per_row};
    r.entries = r.rows / x->rows_per_entry + (r.rows % x->rows_per_entry != 0);
    r.low = min_i32(x->first_entries, r.entries);
    r.high = max_i32(r.low, r.entries - x->last_entries);
    r.tail = x->tail && tokens % x->tokens_per_row != 0;
    return r;
}

/* How many entries may be listed for their score. */
static int32_t room_of(const struct attn_indexer_desc *x, const struct index_reach *r)
{
    return x->topk - (x->forced_on_top ? 0 : r->low + r->entries - r->high + r->tail);
}

static void load_tokens(const struct index_loop *loop, const struct index_chunk *chunk,
                        struct index_scratch *s)
{
    const struct attn_attend_args *args = loop->args;
    const struct layer_shape *shape = &loop->problem.shape;
    const struct tile_kernels *kernels = shape->kernels;
    const int32_t heads = args->layer->num_q_heads, capacity = best_capacity(loop->desc->topk);
    const size_t element = (size_t)kernels->element_bytes,
                 row = (size_t)shape->depth_padded * element, used = (size_t)shape->depth * element;
    const struct attn_tensor *w = loop->desc->has_weights ? loop->io->weights : NULL;
    const bool at_once = sums_at_once(shape, loop->desc);
    for (int32_t i = 0; i < chunk->count * heads; i++) {
        const int64_t token = chunk->first + i / heads, head = i % heads;
        char *to = at_once ? s->keys + (size_t)(i % INDEX_HEADS) * row : s->q + (size_t)i * row;
        kernels->unpack[loop->problem.q_element](to, tensor_row(args->q, token, head),
                                                 shape->depth);
        memset(to + used, 0, row - used);
        if (at_once) {
            s->rows[i % INDEX_HEADS] = to;
            if ((i + 1) % INDEX_HEADS == 0) {
                kernels->flash->pack_keys(s->q + (size_t)(i + 1 - INDEX_HEADS) * row, s->rows,
                                          INDEX_HEADS, INDEX_HEADS, shape->depth_padded);
            }
        }
        s->weights[i] = 1.0f;
        if (w != NULL) {
            args->instance->variant->f32->unpack[element_of_any(w)](&s->weights[i],
                                                                    tensor_row(w, token, head), 1);
        }
    }
    memset(s->q + (size_t)(chunk->count * heads) * row, 0, ROW_MULTIPLE * row);
    const struct decode_kernels *decode = loop->problem.keys.decode;
    for (int32_t i = 0; i < chunk->few_rows; i++) {
        s->q_scale[i] = decode->order != NULL
                            ? decode->order(s->q + (size_t)i * row, shape->depth_padded)
                            : 0.0f;
    }
    if (chunk->few_rows > 0 && decode->pack != NULL) {
        decode->pack(s->q, s->keys, chunk->few_rows, shape->depth_padded);
    }
    for (int32_t i = 0; i < chunk->count * loop->desc->num_groups; i++) {
        int32_t *memory = s->memory + 2 * (int64_t)i * capacity;
        s->lists[i] = (struct best){memory, memory + capacity, 0, INT32_MIN, INT32_MIN};
    }
}

/* Rows first .. first + n - 1 of a request, packed unless they are read in place, and the factors
 * of their products; the first `found` are those that the tile before found ahead. `ahead` rows are
 * only found, to be prefetched. */
static void load_tile(const struct index_loop *loop, const struct index_chunk *chunk, int32_t first,
                      int32_t n, int32_t found, int32_t ahead, struct index_scratch *s)
{
    const struct attend_problem *problem = &loop->problem;
    const struct layer_shape *shape = &problem->shape;
    const float factor = key_factor(problem, 0);
    memcpy(s->rows, s->rows + TILE_KEYS, (size_t)found * sizeof *s->rows);
    memcpy(s->scales, s->scales + TILE_KEYS, (size_t)found * sizeof *s->scales);
    find_rows(problem, &problem->keys, chunk->request, 0, first + found, n + ahead - found,
              s->rows + found, s->scales + found);
    if (problem->keys.stage && !(chunk->few_rows > 0 && problem->keys.decode_codes)) {
        const struct stage stage = {.problem = problem,
                                    .source = &problem->keys,
                                    .memory = s->staged,
                                    .padded = shape->depth_padded,
                                    .n = n,
                                    .first = first,
                                    .rows = s->rows,
                                    .scale_rows = s->scales,
                                    .scales = s->factors};
        stage_rows(&stage);
    }
    if (chunk->few_rows == 0 && !sums_at_once(shape, loop->desc)) {
        shape->kernels->pack_keys(s->keys, s->rows, n, TILE_KEYS, shape->depth_padded);
    }
    for (int32_t i = 0; i < TILE_KEYS; i++) {
        s->factors[i] = factor;
    }
    if (has_float_scales(&problem->keys)) {
        load_scales(s->scales, 0, n, s->factors);
        for (int32_t i = 0; i < n; i++) {
            s->factors[i] *= factor;
        }
    }
}

/* Scores of all tokens of the chunk with n rows. */
static void sum_at_once(const struct index_loop *loop, const struct index_chunk *chunk, int32_t n,
                        int32_t ahead, const struct index_scratch *s)
{
    const struct layer_shape *shape = &loop->problem.shape;
    const struct attn_indexer_desc *x = loop->desc;
    const float factor = key_factor(&loop->problem, 0);
    const struct index_args args = {
        .keys = {.keys = n,
                 .depth = shape->depth_padded,
                 .key_rows = (const char *const *)s->rows,
                 .next_rows = (const char *const *)(s->rows + n),
                 .next_keys = ahead,
                 .next_lines = (loop->problem.keys.row_bytes + 63) / 64},
        .staged = s->staged,
        .q = s->q,
        .out = s->sums,
        .factors = s->factors,
        .weights = s->weights,
        .lists = chunk->count * x->num_groups,
        .heads = shape->group / x->num_groups,
        .relu = x->activation == ATTN_INDEXER_RELU,
        .scaled = has_float_scales(&loop->problem.keys) || !(factor > 0 && factor < INFINITY),
    };
    shape->kernels->index_scores(&args);
}

/* Products of few rows with n rows of the cache where they lie. */
static void multiply_in_place(const struct index_loop *loop, const struct index_chunk *chunk,
                              int32_t n, int32_t ahead, const struct index_scratch *s)
{
    const struct row_source *keys = &loop->problem.keys;
    for (int32_t from = 0; from < n; from += DECODE_KEYS) {
        const int32_t next = min_i32(n + ahead, from + 2 * DECODE_KEYS) - from - DECODE_KEYS;
        const struct decode_args args = {.keys = min_i32(DECODE_KEYS, n - from),
                                         .rows = chunk->few_rows,
                                         .q_scale = s->q_scale,
                                         .depth = loop->problem.shape.depth_padded,
                                         .key_rows = (const char *const *)(s->rows + from),
                                         .zero_row = s->staged,
                                         .next_rows =
                                             (const char *const *)(s->rows + from + DECODE_KEYS),
                                         .next_keys = max_i32(next, 0),
                                         .next_lines = (keys->row_bytes + 63) / 64,
                                         .element = keys->element};
        keys->decode->scores(s->products + from, s->q, &args);
    }
}

/* Rows first .. end - 1 of a query, of which it sees no more. */
static void add_scores(const struct variant *variant, const struct attn_indexer_desc *x,
                       const struct index_reach *r, const int32_t *scores, int32_t first,
                       int32_t end, struct best *best)
{
    const int32_t pool = x->rows_per_entry, threshold = best->threshold;
    int32_t count = best->count;
    if (pool == 1) {
        const int32_t low = max_i32(first, r->low);
        const struct keep_args keep = {.from = scores + low - first,
                                       .to = best->scores + count,
                                       .to_entries = best->entries + count,
                                       .n = min_i32(end, r->high) - low,
                                       .first = low,
                                       .least = threshold};
        best->count += variant->keep_above(&keep);
        return;
    }
    for (int32_t j = first; j < end;) {
        const int32_t entry = j / pool, next = j + min_i32(end - j, pool - j % pool);
        const int32_t before = j == entry * pool ? INT32_MIN : best->open;
        const int32_t score = max_i32(before, variant->highest(scores + j - first, next - j));
        j = next;
        const bool whole = j == r->rows || j % pool == 0;
        best->open = score;
        best->scores[count] = score;
        best->entries[count] = entry;
        count += whole && score > threshold && entry >= r->low && entry < r->high;
    }
    best->count = count;
}

/* Scores of a tile's rows for tokens begin .. end - 1 of the chunk. */
static void score_tokens(const struct index_loop *loop, const struct index_chunk *chunk,
                         int32_t begin, int32_t end, int32_t first, int32_t n,
                         const struct index_scratch *s)
{
    const struct attn_indexer_desc *x = loop->desc;
    const struct variant *variant = loop->args->instance->variant;
    const struct layer_shape *shape = &loop->problem.shape;
    const int32_t heads = loop->args->layer->num_q_heads, of_list = heads / x->num_groups;
    const int64_t row = (int64_t)shape->depth_padded * shape->kernels->element_bytes;
    const bool at_once = sums_at_once(shape, x);
    if (chunk->few_rows == 0 && !at_once) {
        shape->kernels->gemm(s->products, TILE_KEYS, s->q + begin * heads * row,
                             shape->depth_padded, s->keys, TILE_KEYS,
                             round_up((end - begin) * heads, ROW_MULTIPLE), TILE_KEYS,
                             shape->depth_padded, 0);
    }
    for (int32_t t = begin; t < end; t++) {
        const struct index_reach r = reach_of(x, chunk->position + t);
        const int32_t most = room_of(x, &r);
        for (int32_t g = 0; g < x->num_groups && r.rows > first && most > 0; g++) {
            struct best *best = &s->lists[t * x->num_groups + g];
            const int64_t head = t * heads + g * of_list;
            const struct head_sum_args sum = {.out = s->sums,
                                              .scores =
                                                  s->products + (head - begin * heads) * TILE_KEYS,
                                              .factors = s->factors,
                                              .weights = s->weights + head,
                                              .heads = of_list,
                                              .relu = x->activation == ATTN_INDEXER_RELU};
            const int32_t *sums = s->sums;
            if (at_once) {
                sums += (t * x->num_groups + g) * TILE_KEYS;
            } else {
                variant->sum_heads(&sum);
            }
            best_make_room(variant, best, most);
            add_scores(variant, x, &r, sums, first, min_i32(first + n, r.rows), best);
        }
    }
}

/* The list of a query from the best of its candidates. */
static void write_list(const struct index_loop *loop, int64_t token, int32_t group,
                       const struct index_reach *r, struct best *best)
{
    const struct attn_attend_args *args = loop->args;
    int32_t *list = tensor_row(args->out, token, group), count = 0;
    best_keep(args->instance->variant, best, max_i32(room_of(loop->desc, r), 0));
    for (int32_t e = 0; e < r->low; e++) {
        list[count++] = e;
    }
    memcpy(list + count, best->entries, (size_t)best->count * sizeof *list);
    count += best->count;
    for (int32_t e = r->high; e < r->entries; e++) {
        list[count++] = e;
    }
    if (r->tail) {
        list[count++] = r->rows;
    }
    if (loop->io != NULL && loop->io->lengths != NULL) {
        loop->io->lengths[token * loop->desc->num_groups + group] = count;
    }
    for (int64_t i = count; i < args->out->shape[2]; i++) {
        list[i] = -1;
    }
}

/* Candidates of a list in a part of the request's rows. */
static int32_t *partial_of(const struct index_loop *loop, int64_t token, int32_t part,
                           int32_t group)
{
    const int64_t row = token - loop->args->batch->query_start_loc[0];
    return loop->partials + ((row * loop->parts + part) * loop->desc->num_groups + group) *
                                (int64_t)partial_size(loop->desc);
}

static void finish_part(const struct index_loop *loop, const struct index_chunk *chunk,
                        int32_t part, struct index_scratch *s)
{
    const struct attn_indexer_desc *x = loop->desc;
    for (int32_t i = 0; i < chunk->count * x->num_groups; i++) {
        const int32_t t = i / x->num_groups, g = i % x->num_groups;
        const struct index_reach r = reach_of(x, chunk->position + t);
        struct best *best = &s->lists[i];
        if (loop->parts == 1) {
            write_list(loop, chunk->first + t, g, &r, best);
            continue;
        }
        int32_t *partial = partial_of(loop, chunk->first + t, part, g);
        best_keep(loop->args->instance->variant, best, max_i32(room_of(x, &r), 0));
        partial[0] = best->count;
        memcpy(partial + 1, best->scores, (size_t)best->count * sizeof *partial);
        memcpy(partial + 1 + x->topk, best->entries, (size_t)best->count * sizeof *partial);
    }
}

/* Rows that the parts of a chunk are made of: multiples of tiles and entries. */
static int32_t part_unit(const struct attn_indexer_desc *x)
{
    int32_t unit = TILE_KEYS;
    while (unit % x->rows_per_entry != 0) {
        unit += TILE_KEYS;
    }
    return unit;
}

static void run_chunk(const struct index_loop *loop, const struct index_chunk *chunk, int32_t part,
                      struct index_scratch *s)
{
    const int32_t rows = (chunk->position + chunk->count) / loop->desc->tokens_per_row;
    const int32_t unit = part_unit(loop->desc), together = product_tokens(&loop->problem.shape);
    const int64_t units = ((int64_t)rows + unit - 1) / unit;
    const int64_t stop = units * (part + 1) / loop->parts * unit;
    const int32_t begin = (int32_t)(units * part / loop->parts) * unit;
    const int32_t end = stop < rows ? (int32_t)stop : rows;
    const bool at_once = sums_at_once(&loop->problem.shape, loop->desc);
    load_tokens(loop, chunk, s);
    for (int32_t first = begin, found = 0, n; first < end; first += n) {
        n = min_i32(TILE_KEYS, end - first);
        const int32_t ahead = min_i32(at_once ? TILE_KEYS : DECODE_KEYS, end - first - n);
        load_tile(loop, chunk, first, n, found, ahead, s);
        found = ahead;
        if (chunk->few_rows > 0) {
            multiply_in_place(loop, chunk, n, ahead, s);
        } else if (at_once) {
            sum_at_once(loop, chunk, n, ahead, s);
        }
        for (int32_t t = 0; t < chunk->count; t += together) {
            score_tokens(loop, chunk, t, min_i32(t + together, chunk->count), first, n, s);
        }
    }
    finish_part(loop, chunk, part, s);
}

static int32_t request_tokens(const struct attn_batch *batch, int32_t r)
{
    return max_i32(0, min_i32(batch->query_start_loc[r + 1], batch->num_actual_tokens) -
                          batch->query_start_loc[r]);
}

/* Query rows of a request that the decode kernels take, padded; 0: keys are packed. A row's bits
 * depend on it, so it depends on nothing but the request, which is then one chunk. */
static int32_t few_rows(const struct index_loop *loop, int32_t r)
{
    const struct layer_shape *shape = &loop->problem.shape;
    const int32_t *start = loop->args->batch->query_start_loc;
    const int64_t tokens = start[r + 1] - start[r], rows = tokens * shape->group;
    const bool few = rows <= DECODE_ROWS && tokens <= loop->most_tokens && !shape->any_prefix;
    return few && loop->problem.keys.decode != NULL ? round_up((int32_t)rows, 4) : 0;
}

static int32_t chunks_of(const struct index_loop *loop, int32_t r)
{
    const int32_t count = request_tokens(loop->args->batch, r);
    return few_rows(loop, r) > 0 ? count > 0 : (count + loop->tokens - 1) / loop->tokens;
}

/* Chunk `index` of the run, from the last one on: a prompt's last queries see the most. */
static struct index_chunk find_chunk(const struct index_loop *loop, int64_t index)
{
    const struct attn_batch *batch = loop->args->batch;
    int32_t r = batch->num_reqs - 1, chunks;
    for (; (chunks = chunks_of(loop, r)) <= index; r--) {
        index -= chunks;
    }
    const int32_t few = few_rows(loop, r), count = request_tokens(batch, r);
    const int32_t each = few > 0 ? count : loop->tokens;
    const int32_t first = (chunks - 1 - (int32_t)index) * each;
    const int32_t start = batch->query_start_loc[r], end = batch->query_start_loc[r + 1];
    return (struct index_chunk){.request = r,
                                .first = start + first,
                                .count = min_i32(each, count - first),
                                .position = batch->seq_lens[r] - (end - start) + first,
                                .few_rows = few};
}

static void worker_begin(const struct index_loop *loop, int32_t worker, struct index_scratch *s)
{
    scratch_place(&loop->problem.shape, loop->desc,
                  loop->scratch + (size_t)worker * loop->scratch_bytes, s);
}

/* Items are (chunk, part). */
static void chunk_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct index_loop *loop = argument;
    const struct variant *variant = loop->args->instance->variant;
    struct index_scratch s;
    worker_begin(loop, worker, &s);
    enter_variant(variant);
    for (int64_t item = begin; item < end; item++) {
        const struct index_chunk chunk = find_chunk(loop, item / loop->parts);
        run_chunk(loop, &chunk, (int32_t)(item % loop->parts), &s);
    }
    leave_variant(variant);
}

/* Items are chunks. */
static void merge_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct index_loop *loop = argument;
    const struct attn_indexer_desc *x = loop->desc;
    const struct variant *variant = loop->args->instance->variant;
    struct index_scratch s;
    worker_begin(loop, worker, &s);
    for (int64_t item = begin; item < end; item++) {
        const struct index_chunk chunk = find_chunk(loop, item);
        for (int32_t i = 0; i < chunk.count * x->num_groups; i++) {
            const int32_t t = i / x->num_groups, g = i % x->num_groups;
            const struct index_reach r = reach_of(x, chunk.position + t);
            struct best best = {s.memory, s.memory + best_capacity(x->topk), 0, INT32_MIN,
                                INT32_MIN};
            for (int32_t part = 0; part < loop->parts; part++) {
                best_add_part(variant, partial_of(loop, chunk.first + t, part, g), x->topk,
                              max_i32(room_of(x, &r), 0), &best);
            }
            write_list(loop, chunk.first + t, g, &r, &best);
        }
    }
}

/* Chunks that leave something to do for each thread, and parts where tokens are too few. */
static int64_t divide(struct index_loop *loop, int32_t threads)
{
    const struct attn_batch *batch = loop->args->batch;
    const int64_t wanted = 2 * (int64_t)threads;
    int64_t tokens = 0, longest = 0;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        tokens += request_tokens(batch, r);
        longest = batch->seq_lens[r] > longest ? batch->seq_lens[r] : longest;
    }
    const int64_t each = (tokens + wanted - 1) / wanted;
    loop->tokens = max_i32(1, (int32_t)(each < loop->most_tokens ? each : loop->most_tokens));
    int64_t chunks = 0;
    for (int32_t r = 0; r < batch->num_reqs; r++) {
        chunks += chunks_of(loop, r);
    }
    const int64_t least =
        longest / loop->desc->tokens_per_row / max_i32(PART_ROWS, part_unit(loop->desc));
    int64_t parts =
        threads > 1 && chunks > 0 && chunks < wanted ? (wanted + chunks - 1) / chunks : 1;
    parts = parts < least ? parts : least;
    parts = parts * tokens <= 4 * (int64_t)threads ? parts : 1;
    loop->parts = (int32_t)(parts > 1 ? parts : 1);
    return chunks;
}

attn_status simd_index(const struct attn_attend_args *args, struct attn_error *error)
{
    const struct attn_host *host = args->instance->host;
    struct attn_attend_args given = *args;
    struct index_loop loop = {.args = args,
                              .desc = indexer_of(args->layer),
                              .io = ext_of(args->next, ATTN_EXT_IO_INDEXER)};
    struct index_scratch s;
    given.v_cache = args->k_cache;
    problem_init(&loop.problem, &given, NULL, false);
    loop.most_tokens = most_chunk_tokens(&loop.problem.shape, loop.desc);
    loop.scratch_bytes = scratch_place(&loop.problem.shape, loop.desc, NULL, &s);
    loop.partials = args->scratch;
    loop.scratch = (char *)args->scratch + partials_bytes(loop.desc, host->num_threads);
    const int64_t chunks = divide(&loop, host->num_threads);
    run_parallel(args->instance, chunks * loop.parts, 1, chunk_items, &loop);
    return loop.parts > 1 ? run_parallel(args->instance, chunks, 1, merge_items, &loop) : ATTN_OK;
}
