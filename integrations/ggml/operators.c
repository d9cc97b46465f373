/* SPDX-License-Identifier: Apache-2.0 */
/* Random attention operators of ggml through this backend, next to attention as it is defined, in
 * float64 from the cache's own rows: caches that are no whole blocks, more queries than keys,
 * masks of every kind that is served. What supports_op takes has to run, and be right.
 *
 *     operators libggml-attn.so NUM_CASES */
#include <dlfcn.h>
#include <ggml-alloc.h>
#include <ggml-backend-impl.h>
#include <ggml-cpu.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_SIZE = 256, MAX_KEYS = 300 };

enum visible { ALL, CAUSAL, PADDED, HOLES, WINDOW, PREFIX, NUM_VISIBLE };

static uint64_t state;

static uint32_t draw(uint32_t below)
{
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(state >> 33) % below;
}

#define ONE_OF(...)                                                                                \
    ((const int32_t[]){__VA_ARGS__})[draw(sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))]

static bool is_visible(enum visible visible, int64_t row, int64_t rows, int64_t key, int64_t keys)
{
    const int64_t place = keys - rows + row;
    switch (visible) {
    case CAUSAL:
        return key <= place || key == 0;
    case PADDED:
        return key < (keys + 1) / 2;
    case HOLES:
        return (key % 3 != 1 && key <= place) || key == 0;
    case WINDOW: /* rows without a key, too */
        return key <= place && key > place - 9;
    case PREFIX:
        return key < keys - 2 || row > rows / 2 || key == 0;
    default:
        return true;
    }
}

static void fill(struct ggml_tensor *t)
{
    const int64_t count = ggml_nelements(t);
    float *values = malloc((size_t)count * sizeof *values);
    for (int64_t i = 0; i < count; i++) {
        values[i] = (float)draw(1 << 20) / (1 << 18) - 2;
    }
    ggml_quantize_chunk(t->type, values, t->data, 0, count / t->ne[0], t->ne[0], NULL);
    free(values);
}

static void read_row(const struct ggml_tensor *t, int64_t row, int64_t head, int64_t stream,
                     float *values)
{
    const char *at = (const char *)t->data + row * (int64_t)t->nb[1] + head * (int64_t)t->nb[2] +
                     stream * (int64_t)t->nb[3];
    if (t->type == GGML_TYPE_F32) {
        memcpy(values, at, (size_t)t->ne[0] * sizeof *values);
    } else {
        ggml_get_type_traits(t->type)->to_float(at, values, t->ne[0]);
    }
}

/* The largest difference of one row of one head. */
static double row_error(const struct ggml_tensor *op, float cap, enum visible visible, int64_t row,
                        int64_t head, int64_t stream)
{
    const struct ggml_tensor *q = op->src[0], *k = op->src[1], *v = op->src[2], *s = op->src[4];
    const int64_t size = q->ne[0], keys = k->ne[1], of = head / (q->ne[2] / k->ne[2]);
    double weights[MAX_KEYS], out[MAX_SIZE] = {0}, sum = 0, error = 0;
    double top = s != NULL ? ((const float *)s->data)[head] : -INFINITY;
    float a[MAX_SIZE], b[MAX_SIZE];
    read_row(q, row, head, stream, a);
    for (int64_t j = 0; j < keys; j++) {
        double score = 0;
        read_row(k, j, of, stream, b);
        for (int64_t d = 0; d < size; d++) {
            score += (double)a[d] * b[d];
        }
        score /= sqrt((double)size);
        score = cap > 0 ? cap * tanh(score / cap) : score;
        weights[j] = is_visible(visible, row, q->ne[1], j, keys) ? score : -INFINITY;
        top = fmax(top, weights[j]);
    }
    sum = s != NULL ? exp(((const float *)s->data)[head] - top) : 0;
    for (int64_t j = 0; j < keys && top > -INFINITY; j++) {
        weights[j] = exp(weights[j] - top);
        sum += weights[j];
        read_row(v, j, of, stream, b);
        for (int64_t d = 0; d < size; d++) {
            out[d] += weights[j] * b[d];
        }
    }
    const float *got =
        (const float *)op->data + ((stream * q->ne[1] + row) * q->ne[2] + head) * size;
    for (int64_t d = 0; d < size; d++) {
        double difference = fabs(got[d] - (sum > 0 ? out[d] / sum : 0));
        error = difference <= error ? error : isnan(difference) ? INFINITY : difference;
    }
    return error;
}

/* A cache of whole rows, and its first keys as the operator takes them. */
static struct ggml_tensor *cache(struct ggml_context *c, enum ggml_type type, int64_t size,
                                 int64_t heads, int64_t keys, int64_t cells, int64_t streams)
{
    struct ggml_tensor *t = ggml_new_tensor_3d(c, type, size * heads, cells, streams);
    return ggml_permute(c,
                        ggml_view_4d(c, t, size, heads, keys, streams, ggml_row_size(type, size),
                                     t->nb[1], t->nb[2], 0),
                        0, 2, 1, 3);
}

static bool run_case(int32_t number, ggml_backend_t ours, ggml_backend_t cpu, int32_t *ran)
{
    state = (uint64_t)(number + 1) * UINT64_C(0x9e3779b97f4a7c15);
    draw(2);
    const int32_t size = ONE_OF(64, 96, 128, 256), kv_heads = ONE_OF(1, 2, 3, 4);
    const int32_t heads = kv_heads * ONE_OF(1, 2, 4), rows = ONE_OF(1, 2, 7, 33, 100);
    const int32_t keys = ONE_OF(1, 5, 32, 64, 77, 256, MAX_KEYS), streams = ONE_OF(1, 1, 1, 2);
    const int32_t cells = keys + ONE_OF(0, 32, 64);
    const enum visible visible = draw(NUM_VISIBLE);
    const enum ggml_type types[] = {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0};
    const enum ggml_type type = types[draw(4)], type_v = draw(2) == 0 ? type : types[draw(4)];
    const float cap = (float)ONE_OF(0, 0, 8);
    struct ggml_context *c = ggml_init(
        (struct ggml_init_params){ggml_tensor_overhead() * 32 + ggml_graph_overhead(), NULL, true});
    struct ggml_tensor *mask =
        visible == ALL
            ? NULL
            : ggml_new_tensor_4d(c, GGML_TYPE_F16, keys, (rows + 63) / 64 * 64, 1, streams);
    struct ggml_tensor *q = ggml_new_tensor_4d(c, GGML_TYPE_F32, size, heads, rows, streams);
    struct ggml_tensor *k = cache(c, type, size, kv_heads, keys, cells, streams);
    struct ggml_tensor *v = cache(c, type_v, size, kv_heads, keys, cells, streams);
    struct ggml_tensor *op = ggml_flash_attn_ext(c, ggml_permute(c, q, 0, 2, 1, 3), k, v, mask,
                                                 1 / sqrtf((float)size), 0, cap);
    struct ggml_tensor *sinks = draw(4) == 0 ? ggml_new_tensor_1d(c, GGML_TYPE_F32, heads) : NULL;
    ggml_flash_attn_ext_add_sinks(op, sinks);
    struct ggml_cgraph *graph = ggml_new_graph(c);
    ggml_build_forward_expand(graph, op);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(c, cpu);
    double error = 0;
    bool done = true;
    fill(q), fill(k->view_src), fill(v->view_src);
    if (sinks != NULL) {
        fill(sinks);
    }
    for (int64_t i = 0; mask != NULL && i < ggml_nelements(mask); i++) {
        bool seen = is_visible(visible, i / keys % mask->ne[1], rows, i % keys, keys);
        ((uint16_t *)mask->data)[i] = seen ? 0 : 0xfc00;
    }
    if (ggml_backend_supports_op(ours, op)) {
        done = ggml_backend_graph_compute(ours, graph) == GGML_STATUS_SUCCESS;
        for (int64_t i = 0; done && i < (int64_t)streams * rows * heads; i++) {
            error = fmax(
                error, row_error(op, cap, visible, i / heads % rows, i % heads, i / heads / rows));
        }
        ++*ran;
    }
    done &= error < (type == GGML_TYPE_F32 && type_v == GGML_TYPE_F32     ? 1e-4
                     : type == GGML_TYPE_Q8_0 || type_v == GGML_TYPE_Q8_0 ? 5e-2
                                                                          : 2e-2);
    if (!done) {
        printf("case %d: error %g: %d rows, %d keys of %d cells, heads of %d, mask %d, caches %s, "
               "%s\n",
               number, error, rows, keys, cells, size, visible, ggml_type_name(type),
               ggml_type_name(type_v));
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(c);
    return done;
}

int main(int argc, char **argv)
{
    ggml_backend_reg_t (*init)(void) = NULL;
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (library == NULL || (*(void **)&init = dlsym(library, "ggml_backend_init")) == NULL) {
        fprintf(stderr, "operators: %s\n", argc == 3 ? dlerror() : "libggml-attn.so NUM_CASES");
        return 2;
    }
    ggml_backend_t ours = ggml_backend_dev_init(ggml_backend_reg_dev_get(init(), 0), NULL);
    ggml_backend_t cpu = ggml_backend_cpu_init();
    int32_t wrong = 0, ran = 0;
    for (int32_t i = 0; i < atoi(argv[2]); i++) {
        wrong += !run_case(i, ours, cpu, &ran);
    }
    printf("%d operators, %d wrong\n", ran, wrong);
    ggml_backend_free(ours);
    ggml_backend_free(cpu);
    return wrong > 0 || ran == 0;
}
