/* SPDX-License-Identifier: Apache-2.0 */
/* One attend of a plugin over memory of the caller's, for prefill.py. Every field is 64 bits wide,
 * so that ctypes needs no rules of alignment. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include <attn/plugin.h>

struct cell {
    /* by the caller; fp8: of the cache, 2: of the queries, too */
    int64_t bf16, fp8, reqs, q_heads, kv_heads, size, size_v, page, nhd, blocks, keys;
    int64_t causal, window_left, window_right, chunk, alibi, invariant, max_query, max_keys;
    int64_t scratch_percent; /* how much of its scratch the plugin is given */
    double scale, soft_cap;
    int64_t *query_start_host; /* [R + 1] */
    int32_t *seq_lens_host;
    void *query_start, *key_start, *seq_lens, *table, *sinks, *slopes;
    int64_t table_stride;
    void *q, *k, *v, *out, *lse;
    /* by cell_open and cell_size */
    int64_t bytes;
    struct cell_made *made;
};

struct cell_made {
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_attend_args args;
    struct attn_limits limits;
    struct attn_kv_view k, v;
    struct attn_tensor tq, tk, tv, to, tl;
    int64_t shapes[5][3];
    int32_t starts[4097];
    struct attn_error error;
    void *plan;
};

static const struct attn_plugin *plugin;
static const struct attn_kernels *kernels;
static attn_instance *instance;

static void *host_allocate(void *user, size_t size, size_t alignment)
{
    return aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

static void host_release(void *user, void *memory, size_t size)
{
    free(memory);
}

static struct attn_host host = {.struct_size = sizeof host,
                                .allocate = host_allocate,
                                .release = host_release,
                                .num_threads = 1};

static int failed(const char *what, attn_status status, const struct attn_error *error)
{
    if (status != ATTN_OK) {
        fprintf(stderr, "%s: status %d: %s\n", what, (int)status, error->message);
    }
    return (int)status;
}

int cell_open(const char *path)
{
    struct attn_error error = ATTN_ERROR_INIT;
    void *library = dlopen(path, RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    attn_plugin_entry_fn *entry;
    *(void **)&entry = dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    attn_status status = entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, &error);
    if (status == ATTN_OK) {
        struct attn_create_args args = {.struct_size = sizeof args,
                                        .host = &host,
                                        .backend = "cuda_flash",
                                        .variant = "",
                                        .device = {ATTN_DEVICE_CUDA, 0}};
        status = plugin->create(&args, &instance, &kernels, &error);
    }
    return failed("open", status, &error);
}

static struct attn_tensor tensor_of(struct cell *c, int i, void *data, int64_t rows, int64_t heads,
                                    int64_t size)
{
    struct attn_tensor t = {.data = data, .ndim = 3};
    t.device.type = ATTN_DEVICE_CUDA;
    t.dtype.code = c->bf16 ? ATTN_CODE_BFLOAT : ATTN_CODE_FLOAT;
    t.dtype.bits = 16;
    t.dtype.lanes = 1;
    c->made->shapes[i][0] = rows;
    c->made->shapes[i][1] = heads;
    c->made->shapes[i][2] = size;
    t.shape = c->made->shapes[i];
    return t;
}

static struct attn_kv_view view_of(const struct cell *c, void *data, int64_t size)
{
    struct attn_kv_view v = {.struct_size = sizeof v, .data = data};
    int64_t row = size * (c->fp8 ? 1 : 2);
    v.num_blocks = c->blocks;
    v.block_size = (int32_t)c->page;
    v.num_heads = (int32_t)c->kv_heads;
    v.head_size = (int32_t)size;
    v.stride_slot = c->nhd ? row * c->kv_heads : row;
    v.stride_head = c->nhd ? row : row * c->page;
    v.stride_block = row * c->kv_heads * c->page;
    return v;
}

static void describe(struct cell *c)
{
    struct cell_made *m = c->made;
    struct attn_layer_desc *l = &m->layer;
    l->struct_size = sizeof *l;
    l->name = "prefill";
    l->dtype = c->bf16 ? ATTN_DTYPE_BF16 : ATTN_DTYPE_F16;
    l->kv_dtype = c->fp8 ? ATTN_KV_FP8_E4M3 : c->bf16 ? ATTN_KV_BF16 : ATTN_KV_F16;
    l->num_q_heads = (int32_t)c->q_heads;
    l->num_kv_heads = (int32_t)c->kv_heads;
    l->head_size = (int32_t)c->size;
    l->head_size_v = (int32_t)c->size_v;
    l->scale = (float)c->scale;
    l->soft_cap = (float)c->soft_cap;
    l->causal = c->causal ? ATTN_CAUSAL_YES : ATTN_CAUSAL_NO;
    l->has_window = c->window_left >= 0 || c->window_right >= 0;
    l->window_left = (int32_t)c->window_left;
    l->window_right = (int32_t)c->window_right;
    l->chunk_size = (int32_t)c->chunk;
    l->alibi = (int32_t)c->alibi;
    l->has_sinks = c->sinks != NULL;
    l->block_size = (int32_t)c->page;
    l->batch_invariant = (int32_t)c->invariant;
    l->q_scale_form = c->fp8 > 1 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
    l->q_dtype = ATTN_DTYPE_FP8_E4M3;
    m->params.struct_size = sizeof m->params;
    m->params.sinks = c->sinks;
    m->params.alibi_slopes = c->slopes;
}

/* Bytes of workspace and scratch that the plan wants, in c->bytes. */
int cell_size(struct cell *c)
{
    c->made = calloc(1, sizeof *c->made);
    struct cell_made *m = c->made;
    m->error = (struct attn_error)ATTN_ERROR_INIT;
    describe(c);
    struct attn_batch *b = &m->batch;
    b->struct_size = sizeof *b;
    for (int64_t r = 0; r <= c->reqs; r++) {
        m->starts[r] = (int32_t)c->query_start_host[r];
    }
    b->num_reqs = (int32_t)c->reqs;
    b->num_tokens = b->num_actual_tokens = m->starts[c->reqs];
    b->max_query_len = (int32_t)c->max_query;
    b->max_seq_len = (int32_t)c->max_keys;
    b->query_start_loc = c->query_start;
    b->query_start_loc_host = m->starts;
    b->key_start_loc = c->key_start;
    b->seq_lens = c->seq_lens;
    b->seq_lens_host = c->seq_lens_host;
    b->block_table = c->table;
    b->block_table_stride = c->table_stride;
    b->block_table_rows = c->reqs;
    struct attn_attend_args *a = &m->args;
    a->struct_size = sizeof *a;
    a->instance = instance;
    a->layer = &m->layer;
    a->params = &m->params;
    a->batch = b;
    m->tq = tensor_of(c, 0, c->q, b->num_tokens, c->q_heads, c->size);
    if (c->fp8 > 1) {
        m->tq.dtype.code = ATTN_CODE_FLOAT8_E4M3FN;
        m->tq.dtype.bits = 8;
    }
    m->to = tensor_of(c, 1, c->out, b->num_tokens, c->q_heads, c->size_v);
    a->q = &m->tq;
    a->out = &m->to;
    if (c->page > 0) {
        m->k = view_of(c, c->k, c->size);
        m->v = view_of(c, c->v, c->size_v);
        a->k_cache = &m->k;
        a->v_cache = &m->v;
    } else {
        m->tk = tensor_of(c, 2, c->k, c->keys, c->kv_heads, c->size);
        m->tv = tensor_of(c, 3, c->v, c->keys, c->kv_heads, c->size_v);
        a->k = &m->tk;
        a->v = &m->tv;
    }
    if (c->lse != NULL) { /* [Hq, T] */
        m->tl = tensor_of(c, 4, c->lse, c->q_heads, b->num_tokens, 1);
        m->tl.ndim = 2;
        m->tl.dtype.code = ATTN_CODE_FLOAT;
        m->tl.dtype.bits = 32;
        a->lse = &m->tl;
    }
    const struct attn_prepare_args prepare_args = {.struct_size = sizeof prepare_args,
                                                   .instance = instance,
                                                   .layer = &m->layer,
                                                   .params = &m->params,
                                                   .k_cache = a->k_cache,
                                                   .v_cache = a->v_cache};
    attn_status status = kernels->prepare(&prepare_args, &a->prepared, &m->error);
    m->limits = (struct attn_limits){.struct_size = sizeof m->limits,
                                     .max_num_reqs = b->num_reqs,
                                     .max_num_tokens = b->num_tokens,
                                     .max_query_len = b->max_query_len,
                                     .max_seq_len = b->max_seq_len,
                                     .max_blocks_per_req = (int32_t)c->table_stride};
    struct attn_schedule_size size = {.struct_size = sizeof size};
    if (status == ATTN_OK) {
        const struct attn_schedule_size_args sized = {.struct_size = sizeof sized,
                                                      .instance = instance,
                                                      .prepared = a->prepared,
                                                      .limits = &m->limits};
        status = kernels->schedule_size(&sized, &size, &m->error);
    }
    a->limits = &m->limits;
    a->workspace_bytes = (size.device_bytes + 255) / 256 * 256;
    a->scratch_bytes = size.scratch_bytes * (size_t)c->scratch_percent / 100;
    c->bytes = (int64_t)(a->workspace_bytes + size.scratch_bytes);
    m->plan = calloc(1, size.host_bytes + 1);
    a->schedule_host = m->plan;
    return failed("size", status, &m->error);
}

int cell_plan(struct cell *c, void *workspace, void *stream)
{
    struct cell_made *m = c->made;
    m->args.workspace = workspace;
    m->args.scratch = (char *)workspace + m->args.workspace_bytes;
    m->args.stream = stream;
    return failed("plan", kernels->schedule(&m->args, ATTN_PLAN_EAGER, &m->error), &m->error);
}

int cell_run(struct cell *c, void *stream)
{
    struct cell_made *m = c->made;
    m->args.stream = stream;
    return failed("attend", kernels->attend(&m->args, &m->error), &m->error);
}

void cell_close(struct cell *c)
{
    kernels->release(instance, c->made->args.prepared);
    free(c->made->plan);
    free(c->made);
}
