/* SPDX-License-Identifier: Apache-2.0 */
/* A backend made of a library: decoder layers over pages, in float32 and bfloat16, by oneDNN's
 * matrix products. README.md, next to this file, says what each part shows. Needs oneDNN 3.
 *
 * The query heads that read one KV head, of as many tokens as fit, are the rows of a tile. Its keys
 * are gathered from their pages, TILE_KEYS at a time, and then
 *
 *     S [rows, keys] = Q [rows, D] K^T        oneDNN
 *     P = exp(S - row_max), row_sum           here: the online softmax
 *     O [rows, Dv] = O rescale_o + P V        oneDNN, with a sum as its post-op
 *
 * All tiles of a layer have one shape, so that prepare makes both primitives and no step does. */
#include <attn/plugin.h>
#include <math.h>
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#define TILE_KEYS 128
#define PREFILL_ROWS 64
/* Sums of so many values do not overflow: probabilities are divided by it, outputs multiplied. */
#define VALUE_HEADROOM 65536.0f

struct attn_instance {
    const struct attn_host *host;
    dnnl_engine_t engine;
};

/* One matrix product of a fixed shape. */
struct product {
    dnnl_primitive_t primitive;
    dnnl_primitive_desc_t desc;
    const_dnnl_memory_desc_t operand[4]; /* in the order of operand_ids; `desc` owns them */
};

static const int operand_ids[4] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST,
                                   DNNL_ARG_SCRATCHPAD};

/* One layer in one phase. */
struct attn_prepared {
    int32_t rows; /* rows of a tile */
    int32_t head_size;
    int32_t head_size_v;
    int is_bf16; /* q, k, v and p of a tile; else they are float32 */
    struct product scores;
    struct product values;
};

/* What one slice of the parallel loop works with. */
struct tile {
    const struct attn_attend_args *args;
    dnnl_stream_t stream;
    dnnl_exec_arg_t scores[4];
    dnnl_exec_arg_t values[4];
    void *q;     /* [rows, D] */
    void *k;     /* [TILE_KEYS, D] */
    void *v;     /* [TILE_KEYS, Dv]: rows that are not finite are 0 here */
    float *s;    /* [rows, TILE_KEYS] */
    void *p;     /* [rows, TILE_KEYS] */
    float *o;    /* [rows, Dv] */
    float *max;  /* [rows] */
    float *sum;  /* [rows] */
    void *extra; /* scratchpad of either product */
    int32_t num_bad;
    int32_t bad[TILE_KEYS]; /* keys of the tile whose value is not finite */
};

struct job {
    const struct attn_attend_args *args;
    int64_t tiles;     /* tiles of one KV head of the longest request */
    atomic_int status; /* dnnl_status_t */
};

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static attn_status fail(struct attn_error *error, attn_status status, const char *text)
{
    if (error != NULL) {
        error->status = status;
        snprintf(error->message, sizeof error->message, "%s", text);
    }
    return status;
}

/* Element i of an array of bfloat16 or float32. */
static float load(const void *from, int is_bf16, int64_t i)
{
    float x;
    if (!is_bf16) {
        return ((const float *)from)[i];
    }
    uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static void store(void *to, int is_bf16, int64_t i, float x)
{
    uint32_t bits;
    if (!is_bf16) {
        ((float *)to)[i] = x;
        return;
    }
    memcpy(&bits, &x, sizeof bits);
    bits = isnan(x) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    ((uint16_t *)to)[i] = (uint16_t)(bits >> 16);
}

static void copy_row(void *to, int to_bf16, const void *from, int from_bf16, int64_t n)
{
    if (to_bf16 == from_bf16) {
        memcpy(to, from, (size_t)n * (to_bf16 ? 2 : 4));
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        store(to, to_bf16, i, load(from, from_bf16, i));
    }
}

static char *at(void *base, int is_bf16, int64_t i)
{
    return (char *)base + i * (is_bf16 ? 2 : 4);
}

/* Row (i, j) of a tensor of three dimensions, element (i, j) of one of two. */
static char *row(const struct attn_tensor *t, int64_t i, int64_t j)
{
    int64_t s0 = t->strides ? t->strides[0] : t->ndim > 2 ? t->shape[1] * t->shape[2] : t->shape[1];
    int64_t s1 = t->strides ? t->strides[1] : t->ndim > 2 ? t->shape[2] : 1;
    return (char *)t->data + t->byte_offset + (i * s0 + j * s1) * (t->dtype.bits / 8);
}

static char *slot(const struct attn_kv_view *view, int64_t block, int64_t offset, int64_t head)
{
    return (char *)view->data + block * view->stride_block + offset * view->stride_slot +
           head * view->stride_head;
}

/* Makes C [m, n] = A [m, k] B [k, n], or C += A B if `adds`; B lies as `b_order` says. The
 * scratchpad is the caller's: one that the library keeps would belong to the primitive and so to
 * one thread. */
static dnnl_status_t make_product(struct product *product, dnnl_engine_t engine,
                                  const int64_t mnk[3], dnnl_data_type_t type,
                                  dnnl_format_tag_t b_order, int adds)
{
    const dnnl_dims_t a_dims = {mnk[0], mnk[2]}, b_dims = {mnk[2], mnk[1]},
                      c_dims = {mnk[0], mnk[1]};
    dnnl_memory_desc_t a = NULL, b = NULL, c = NULL;
    dnnl_primitive_attr_t attributes = NULL;
    dnnl_post_ops_t post_ops = NULL;
    dnnl_status_t s = dnnl_memory_desc_create_with_tag(&a, 2, a_dims, type, dnnl_ab);
    s = s ? s : dnnl_memory_desc_create_with_tag(&b, 2, b_dims, type, b_order);
    s = s ? s : dnnl_memory_desc_create_with_tag(&c, 2, c_dims, dnnl_f32, dnnl_ab);
    s = s ? s : dnnl_primitive_attr_create(&attributes);
    s = s ? s : dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
    s = s ? s : dnnl_post_ops_create(&post_ops);
    if (adds) {
        s = s ? s : dnnl_post_ops_append_sum(post_ops, 1.0f, 0, dnnl_data_type_undef);
    }
    s = s ? s : dnnl_primitive_attr_set_post_ops(attributes, post_ops);
    s = s ? s
          : dnnl_matmul_primitive_desc_create(&product->desc, engine, a, b, NULL, c, attributes);
    s = s ? s : dnnl_primitive_create(&product->primitive, product->desc);
    for (int i = 0; i < 4 && s == dnnl_success; i++) {
        product->operand[i] =
            dnnl_primitive_desc_query_md(product->desc, dnnl_query_exec_arg_md, operand_ids[i]);
    }
    dnnl_post_ops_destroy(post_ops);
    dnnl_primitive_attr_destroy(attributes);
    dnnl_memory_desc_destroy(c);
    dnnl_memory_desc_destroy(b);
    dnnl_memory_desc_destroy(a);
    return s;
}

static void free_product(struct product *product)
{
    dnnl_primitive_destroy(product->primitive);
    dnnl_primitive_desc_destroy(product->desc);
    *product = (struct product){0};
}

/* Both products, made for one thread, which is all that a slice of parallel_for runs on. */
static dnnl_status_t make_products(attn_prepared *p, dnnl_engine_t engine, int is_bf16)
{
    const int64_t scores[3] = {p->rows, TILE_KEYS, p->head_size};
    const int64_t values[3] = {p->rows, p->head_size_v, TILE_KEYS};
    dnnl_data_type_t type = is_bf16 ? dnnl_bf16 : dnnl_f32;
    int threads = omp_get_max_threads();
    omp_set_num_threads(1);
    p->is_bf16 = is_bf16;
    dnnl_status_t s = make_product(&p->scores, engine, scores, type, dnnl_ba, 0);
    s = s ? s : make_product(&p->values, engine, values, type, dnnl_ab, 1);
    omp_set_num_threads(threads);
    return s;
}

static void release(attn_instance *instance, attn_prepared *p)
{
    if (p != NULL) {
        free_product(&p->values);
        free_product(&p->scores);
        instance->host->release(instance->host->user, p, sizeof *p);
    }
}

static attn_status prepare(const struct attn_prepare_args *a, attn_prepared **prepared,
                           struct attn_error *error)
{
    const struct attn_host *host = a->instance->host;
    const struct attn_layer_desc *l = a->layer;
    int32_t group = l->num_q_heads / l->num_kv_heads;
    *prepared = NULL;
    attn_prepared *p = host->allocate(host->user, sizeof *p, 16);
    if (p == NULL) {
        return fail(error, ATTN_ERROR_OUT_OF_MEMORY, "no memory for a layer");
    }
    *p = (struct attn_prepared){.rows = a->phase == ATTN_PHASE_DECODE ? group : PREFILL_ROWS,
                                .head_size = l->head_size,
                                .head_size_v = l->head_size_v};
    dnnl_status_t s = dnnl_unimplemented;
    if (l->dtype == ATTN_DTYPE_BF16 && l->kv_dtype == ATTN_KV_BF16) {
        s = make_products(p, a->instance->engine, 1);
    }
    if (s == dnnl_unimplemented) { /* or oneDNN has no bfloat16 on this processor */
        free_product(&p->scores);
        free_product(&p->values);
        s = make_products(p, a->instance->engine, 0);
    }
    if (s != dnnl_success) {
        release(a->instance, p);
        return fail(error, s == dnnl_out_of_memory ? ATTN_ERROR_OUT_OF_MEMORY : ATTN_ERROR_INTERNAL,
                    "oneDNN makes no matrix product of this layer's shape");
    }
    *prepared = p;
    return ATTN_OK;
}

static void *part(uintptr_t *next, size_t bytes)
{
    uintptr_t here = *next;
    *next += (bytes + 63) / 64 * 64;
    return (void *)here;
}

/* Lays a tile out from `base` on and returns its bytes. */
static size_t lay_out(struct tile *t, const attn_prepared *p, uintptr_t base)
{
    size_t size = p->is_bf16 ? 2 : 4, rows = (size_t)p->rows;
    uintptr_t next = base;
    t->q = part(&next, size * rows * (size_t)p->head_size);
    t->k = part(&next, size * TILE_KEYS * (size_t)p->head_size);
    t->v = part(&next, size * TILE_KEYS * (size_t)p->head_size_v);
    t->s = part(&next, 4 * rows * TILE_KEYS);
    t->p = part(&next, size * rows * TILE_KEYS);
    t->o = part(&next, 4 * rows * (size_t)p->head_size_v);
    t->max = part(&next, 4 * rows);
    t->sum = part(&next, 4 * rows);
    size_t scores = dnnl_memory_desc_get_size(p->scores.operand[3]);
    size_t values = dnnl_memory_desc_get_size(p->values.operand[3]);
    t->extra = part(&next, scores > values ? scores : values);
    return next - base;
}

/* A tile for each worker. The limits do not matter: a tile's size is the layer's. */
static attn_status schedule_size(const struct attn_schedule_size_args *a,
                                 struct attn_schedule_size *size, struct attn_error *error)
{
    struct tile tile;
    (void)error;
    size->host_bytes = 0;
    size->device_bytes = (size_t)a->instance->host->num_threads * lay_out(&tile, a->prepared, 0);
    return ATTN_OK;
}

/* oneDNN's objects for one slice: a few hundred bytes each, so the backend declares
 * STEP_ALLOCATES. */
static dnnl_status_t bind_product(dnnl_exec_arg_t bound[4], const struct product *product,
                                  dnnl_engine_t engine, void *const memory[4])
{
    dnnl_status_t s = dnnl_success;
    for (int i = 0; i < 4 && s == dnnl_success; i++) {
        bound[i].arg = operand_ids[i];
        s = dnnl_memory_create(&bound[i].memory, product->operand[i], engine, memory[i]);
    }
    return s;
}

static dnnl_status_t open_tile(struct tile *t, const struct attn_attend_args *a, int32_t worker)
{
    const attn_prepared *p = a->prepared;
    dnnl_engine_t engine = a->instance->engine;
    *t = (struct tile){.args = a};
    size_t bytes = lay_out(t, p, 0);
    lay_out(t, p, (uintptr_t)a->workspace + bytes * (size_t)worker);
    void *const scores[4] = {t->q, t->k, t->s, t->extra};
    void *const values[4] = {t->p, t->v, t->o, t->extra};
    dnnl_status_t s = dnnl_stream_create(&t->stream, engine, dnnl_stream_default_flags);
    s = s ? s : bind_product(t->scores, &p->scores, engine, scores);
    return s ? s : bind_product(t->values, &p->values, engine, values);
}

static void close_tile(struct tile *t)
{
    for (int i = 0; i < 4; i++) {
        dnnl_memory_destroy(t->scores[i].memory);
        dnnl_memory_destroy(t->values[i].memory);
    }
    dnnl_stream_destroy(t->stream);
}

/* How many of its first keys token `token` of request r sees. */
static int64_t visible(const struct attn_attend_args *a, int64_t r, int64_t token)
{
    const struct attn_batch *b = a->batch;
    int causal = (b->causal ? b->causal : a->layer->causal) == ATTN_CAUSAL_YES;
    int64_t count = b->query_start_loc[r + 1] - b->query_start_loc[r], length = b->seq_lens[r];
    return causal ? length - count + token + 1 : length;
}

/* The row of key (or value) `key` of request r in its page. */
static const char *cached(const struct attn_attend_args *a, const struct attn_kv_view *view,
                          int64_t r, int64_t key, int64_t head)
{
    const struct attn_batch *b = a->batch;
    int64_t table_row = b->block_table_row ? b->block_table_row[r] : r;
    int64_t page = b->block_table[table_row * b->block_table_stride + key / view->block_size];
    return slot(view, page, key % view->block_size, head);
}

/* Keys and values first .. first + count - 1 of request r, from their pages to the tile. A masked
 * value may be NaN, and 0 times NaN is NaN: such rows are added outside of the product. */
static void gather(struct tile *t, int64_t r, int64_t head, int64_t first, int64_t count)
{
    const struct attn_attend_args *a = t->args;
    const attn_prepared *p = a->prepared;
    int cache_bf16 = a->layer->kv_dtype == ATTN_KV_BF16;
    t->num_bad = 0;
    for (int64_t j = 0; j < TILE_KEYS; j++) {
        char *k = at(t->k, p->is_bf16, j * p->head_size),
             *v = at(t->v, p->is_bf16, j * p->head_size_v);
        int finite = j < count;
        if (finite) {
            copy_row(k, p->is_bf16, cached(a, a->k_cache, r, first + j, head), cache_bf16,
                     p->head_size);
            copy_row(v, p->is_bf16, cached(a, a->v_cache, r, first + j, head), cache_bf16,
                     p->head_size_v);
            for (int32_t d = 0; d < p->head_size_v; d++) {
                finite &= isfinite(load(v, p->is_bf16, d)) != 0;
            }
            if (!finite) {
                t->bad[t->num_bad++] = (int32_t)j;
            }
        }
        if (!finite) {
            memset(v, 0, (size_t)p->head_size_v * (p->is_bf16 ? 2 : 4));
        }
    }
}

/* The online softmax of row i over the tile's first `seen` keys. */
static void softmax_row(struct tile *t, int64_t i, int64_t seen)
{
    const attn_prepared *p = t->args->prepared;
    float *s = t->s + i * TILE_KEYS, *o = t->o + i * p->head_size_v, row_max = t->max[i];
    for (int64_t j = 0; j < seen; j++) {
        s[j] *= t->args->layer->scale;
        row_max = fmaxf(row_max, s[j]);
    }
    float rescale_o = row_max == t->max[i] ? 1 : expf(t->max[i] - row_max);
    t->max[i] = row_max;
    t->sum[i] *= rescale_o;
    for (int32_t d = 0; d < p->head_size_v; d++) {
        o[d] *= rescale_o;
    }
    for (int64_t j = 0; j < TILE_KEYS; j++) {
        float w = j < seen ? expf(s[j] - row_max) : 0;
        t->sum[i] += w;
        store(t->p, p->is_bf16, i * TILE_KEYS + j, w / VALUE_HEADROOM);
    }
}

/* Adds the values that gather has left out to row i, which sees the tile's first `seen` keys. */
static void add_bad_values(struct tile *t, int64_t r, int64_t head, int64_t first, int64_t i,
                           int64_t seen)
{
    const struct attn_attend_args *a = t->args;
    const attn_prepared *p = a->prepared;
    for (int32_t n = 0; n < t->num_bad && t->bad[n] < seen; n++) {
        int64_t j = t->bad[n];
        const char *v = cached(a, a->v_cache, r, first + j, head);
        float w = load(t->p, p->is_bf16, i * TILE_KEYS + j);
        for (int32_t d = 0; d < p->head_size_v; d++) {
            t->o[i * p->head_size_v + d] += w * load(v, a->layer->kv_dtype == ATTN_KV_BF16, d);
        }
    }
}

/* A tile of a request's rows over one KV head: row i is query head i % group of token i / group. */
static dnnl_status_t attend_tile(struct tile *t, int64_t r, int64_t head, int64_t first_row)
{
    const struct attn_attend_args *a = t->args;
    const struct attn_batch *b = a->batch;
    const attn_prepared *p = a->prepared;
    int64_t group = a->layer->num_q_heads / a->layer->num_kv_heads;
    int64_t start = b->query_start_loc[r], count = b->query_start_loc[r + 1] - start;
    int64_t rows = min64(p->rows, count * group - first_row);
    int io_bf16 = a->layer->dtype == ATTN_DTYPE_BF16;
    int64_t keys = visible(a, r, (first_row + rows - 1) / group); /* the last row sees most */
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = (first_row + i) / group, h = head * group + (first_row + i) % group;
        copy_row(at(t->q, p->is_bf16, i * p->head_size), p->is_bf16, row(a->q, start + token, h),
                 io_bf16, p->head_size);
        t->max[i] = -INFINITY;
        t->sum[i] = 0;
    }
    memset(t->o, 0, (size_t)p->rows * (size_t)p->head_size_v * 4);
    for (int64_t first = 0; first < keys; first += TILE_KEYS) {
        gather(t, r, head, first, min64(TILE_KEYS, keys - first));
        dnnl_status_t s = dnnl_primitive_execute(p->scores.primitive, t->stream, 4, t->scores);
        s = s ? s : dnnl_stream_wait(t->stream);
        for (int64_t i = 0; i < rows; i++) {
            softmax_row(t, i, min64(TILE_KEYS, visible(a, r, (first_row + i) / group) - first));
        }
        s = s ? s : dnnl_primitive_execute(p->values.primitive, t->stream, 4, t->values);
        s = s ? s : dnnl_stream_wait(t->stream);
        for (int64_t i = 0; i < rows; i++) {
            add_bad_values(t, r, head, first, i, visible(a, r, (first_row + i) / group) - first);
        }
        if (s != dnnl_success) {
            return s;
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        int64_t token = start + (first_row + i) / group;
        int64_t h = head * group + (first_row + i) % group;
        char *out = row(a->out, token, h);
        for (int64_t d = 0; d < p->head_size_v; d++) {
            float o = t->o[i * p->head_size_v + d];
            store(out, io_bf16, d, t->sum[i] != 0 ? o / t->sum[i] * VALUE_HEADROOM : 0);
        }
        if (a->lse != NULL) {
            float lse = t->sum[i] != 0 ? t->max[i] + logf(t->sum[i]) : -INFINITY;
            store(row(a->lse, h, token), 0, 0, lse);
        }
    }
    return dnnl_success;
}

static void attend_slice(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    struct job *job = argument;
    const struct attn_attend_args *a = job->args;
    const struct attn_batch *b = a->batch;
    const int64_t heads = a->layer->num_kv_heads, group = a->layer->num_q_heads / heads;
    struct tile tile;
    int threads = omp_get_max_threads(); /* this thread's, which is the engine's */
    omp_set_num_threads(1);
    dnnl_status_t s = open_tile(&tile, a, worker);
    for (int64_t i = begin; i < end && s == dnnl_success; i++) {
        int64_t r = i / job->tiles / heads, first_row = i % job->tiles * a->prepared->rows;
        if (first_row < (b->query_start_loc[r + 1] - b->query_start_loc[r]) * group) {
            s = attend_tile(&tile, r, i / job->tiles % heads, first_row);
        }
    }
    close_tile(&tile);
    omp_set_num_threads(threads);
    if (s != dnnl_success) {
        atomic_store(&job->status, (int)s);
    }
}

static attn_status attend(const struct attn_attend_args *a, struct attn_error *error)
{
    const struct attn_host *host = a->instance->host;
    const int64_t heads = a->layer->num_kv_heads, group = a->layer->num_q_heads / heads;
    struct job job = {.args = a};
    job.tiles = (a->batch->max_query_len * group + a->prepared->rows - 1) / a->prepared->rows;
    host->parallel_for(host->user, a->batch->num_reqs * heads * job.tiles, 1, attend_slice, &job);
    switch (atomic_load(&job.status)) {
    case dnnl_success:
        return ATTN_OK;
    case dnnl_out_of_memory:
        return fail(error, ATTN_ERROR_OUT_OF_MEMORY, "oneDNN has no memory");
    default:
        return fail(error, ATTN_ERROR_INTERNAL, "oneDNN's matrix product has failed");
    }
}

static attn_status write_kv(const struct attn_write_kv_args *a, struct attn_error *error)
{
    const struct attn_layer_desc *l = a->layer;
    int io_bf16 = l->dtype == ATTN_DTYPE_BF16, cache_bf16 = l->kv_dtype == ATTN_KV_BF16;
    (void)error;
    for (int64_t t = 0; t < a->num_slots; t++) {
        int64_t to = a->slot_mapping[t], size = a->k_cache->block_size;
        for (int64_t h = 0; to >= 0 && h < l->num_kv_heads; h++) {
            copy_row(slot(a->k_cache, to / size, to % size, h), cache_bf16, row(a->k, t, h),
                     io_bf16, l->head_size);
            copy_row(slot(a->v_cache, to / size, to % size, h), cache_bf16, row(a->v, t, h),
                     io_bf16, l->head_size_v);
        }
    }
    return ATTN_OK;
}

static const struct attn_kernels kernels = {.struct_size = sizeof kernels,
                                            .attend = attend,
                                            .write_kv = write_kv,
                                            .prepare = prepare,
                                            .release = release,
                                            .schedule_size = schedule_size};

static attn_status probe(const struct attn_host *host, const struct attn_probe_sink *sink,
                         struct attn_error *error)
{
    static const struct attn_head_size_range head_sizes[] = {{{8, 256, 8}, {8, 256, 8}, 0}};
    static const struct attn_range block_sizes[] = {{1, 256, 1}};
    const struct attn_device_info cpu = {.struct_size = sizeof cpu,
                                         .device = {ATTN_DEVICE_CPU, 0},
                                         .name = "CPU",
                                         .arch = "generic",
                                         .isa = ""};
    const struct attn_backend_caps caps = {
        .struct_size = sizeof caps,
        .name = "onednn",
        .variant = "",
        .version = "0.1.0",
        .vendor = "libattn's example",
        .device = {ATTN_DEVICE_CPU, 0},
        .kernels = ATTN_KERNEL_ATTEND | ATTN_KERNEL_WRITE_KV,
        .layer_kinds = 1 << ATTN_LAYER_DECODER,
        .phases = 1 << ATTN_PHASE_PREFILL | 1 << ATTN_PHASE_DECODE,
        .dtypes = 1 << ATTN_DTYPE_F32 | 1 << ATTN_DTYPE_BF16,
        .kv_dtypes = 1 << ATTN_KV_F32 | 1 << ATTN_KV_BF16,
        .terms = ATTN_TERM_CAUSAL | ATTN_TERM_BIDIRECTIONAL,
        .features = ATTN_FEATURE_PAGED_KV | ATTN_FEATURE_LSE | ATTN_FEATURE_BLOCK_TABLE_ROW |
                    ATTN_FEATURE_STEP_ALLOCATES,
        .view_forms = ATTN_VIEW_NHD | ATTN_VIEW_HND | ATTN_VIEW_SEPARATE_STRIDES,
        .layouts = 1 << ATTN_KV_LAYOUT_NHD | 1 << ATTN_KV_LAYOUT_HND,
        .k_scale_forms = 1 << ATTN_SCALE_NONE,
        .v_scale_forms = 1 << ATTN_SCALE_NONE,
        .p_scale_forms = 1 << ATTN_SCALE_NONE,
        .output_forms = 1 << ATTN_OUTPUT_PLAIN,
        .head_sizes = head_sizes,
        .block_sizes = block_sizes,
        .num_head_sizes = 1,
        .num_block_sizes = 1,
        .preferred_layout = ATTN_KV_LAYOUT_HND, /* a head's keys of a page side by side */
        .preferred_block_size = TILE_KEYS,
        .rank = {1, 1}};
    (void)host;
    attn_status status = sink->device(sink->user, &cpu, error);
    return status == ATTN_OK ? sink->backend(sink->user, &caps, error) : status;
}

static void destroy(attn_instance *instance)
{
    if (instance != NULL) {
        dnnl_engine_destroy(instance->engine);
        instance->host->release(instance->host->user, instance, sizeof *instance);
    }
}

static attn_status create(const struct attn_create_args *args, attn_instance **instance,
                          const struct attn_kernels **table, struct attn_error *error)
{
    *table = NULL;
    *instance = NULL;
    if (args->num_options != 0) {
        return fail(error, ATTN_ERROR_NOT_FOUND, "the backend onednn has no options");
    }
    attn_instance *made = args->host->allocate(args->host->user, sizeof *made, 16);
    if (made == NULL) {
        return fail(error, ATTN_ERROR_OUT_OF_MEMORY, "no memory for an instance");
    }
    *made = (struct attn_instance){.host = args->host};
    if (dnnl_engine_create(&made->engine, dnnl_cpu, 0) != dnnl_success) {
        destroy(made);
        return fail(error, ATTN_ERROR_DEVICE, "oneDNN has no engine for this CPU");
    }
    *instance = made;
    *table = &kernels;
    return ATTN_OK;
}

static const struct attn_plugin plugin = {.struct_size = sizeof plugin,
                                          .abi_version = ATTN_ABI_VERSION,
                                          .name = "onednn",
                                          .version = "0.1.0",
                                          .vendor = "libattn's example",
                                          .probe = probe,
                                          .create = create,
                                          .destroy = destroy};

attn_status attn_plugin_entry(uint32_t min, uint32_t max, const struct attn_plugin **out,
                              struct attn_error *error)
{
    int serves = ATTN_VERSION_SERVES(min, max);
    *out = serves ? &plugin : NULL;
    return serves ? ATTN_OK : fail(error, ATTN_ERROR_ABI_VERSION, "built for another ABI");
}
