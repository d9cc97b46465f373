/* SPDX-License-Identifier: Apache-2.0 */
/* Times MLA's decode of several builds of cuda_flash through the plugin ABI, in turns, so that they
 * share the clock that power leaves, and compares their outputs with the first build's. Inputs are
 * drawn on the device. usage: bench_latent ROUNDS PLUGIN.so... */
#include "bench_plugin.cuh"

#include <attn/mla.h>
#include <cmath>

#define RANK 512
#define ROPE 64
#define BLOCK 64

struct shape {
    int reqs, length, heads, queries, topk, form;
    bool writes = false; /* its own row to the cache first */
    float size = 1; /* of queries: with 60 a row's largest score is far above those of most tiles */
};

static __global__ void scale_bf16(__nv_bfloat16 *data, size_t count, float by)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        data[i] = __float2bfloat16(__bfloat162float(data[i]) * by);
    }
}

/* Rows of a cache: numbers of -1 .. 1, or bytes of e4m3 of at most 2. */
static __global__ void fill_cache(char *data, size_t rows, int form)
{
    const int bytes = form == ATTN_KV_FP8_DS_MLA ? 656
                      : form == ATTN_KV_FP8_E4M3 ? RANK + ROPE
                                                 : (RANK + ROPE) * 2;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < rows * bytes / 2;
         i += (size_t)gridDim.x * blockDim.x) {
        const int at = (int)(i % (bytes / 2)) * 2;
        unsigned x = (unsigned)i * 2654435761u;
        x ^= x >> 15;
        x *= 2246822519u;
        const bool codes = form != ATTN_KV_BF16 && at < (form == ATTN_KV_FP8_DS_MLA ? 512 : 576);
        uint16_t two = (uint16_t)(x >> 7 & 0xbfbf);
        if (!codes) {
            __nv_bfloat16 y = __float2bfloat16((float)(x >> 8) / 8388608.0f - 1.0f);
            two = *(uint16_t *)&y;
        }
        if (form == ATTN_KV_FP8_DS_MLA && at >= 512 && at < 528) {
            two = at % 4 == 0 ? 0 : 0x3f40; /* a scale of 0.75 */
        }
        ((uint16_t *)data)[i] = two;
    }
}

static __global__ void compare(const __nv_bfloat16 *x, const __nv_bfloat16 *y, size_t count,
                               float *worst)
{
    float far = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        float d = fabsf(__bfloat162float(x[i]) - __bfloat162float(y[i]));
        far = d <= 1e30f ? fmaxf(far, d) : 1e30f;
    }
    atomicMax((int *)worst, __float_as_int(far));
}

static void *reserve(size_t bytes)
{
    void *p;
    MUST(cudaMalloc(&p, bytes));
    return p;
}

/* One layer's call on `caches` sets of latent rows, those of a shape that fits the L2. */
struct subject {
    shape s;
    int tokens, pages, caches, blocks, row_bytes;
    size_t used, numbers;
    char *cache;
    __nv_bfloat16 *q, *rope, *out;
    int *table, *top;
    int64_t *slots;
    std::vector<int> starts, lens;
    struct attn_mla_desc desc;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_limits limits;
    struct attn_kv_view view;

    explicit subject(const shape &of) : s(of)
    {
        tokens = s.reqs * s.queries, pages = (s.length + BLOCK - 1) / BLOCK;
        row_bytes = s.form == ATTN_KV_FP8_DS_MLA ? 656
                    : s.form == ATTN_KV_BF16     ? (RANK + ROPE) * 2
                                                 : RANK + ROPE;
        used = (size_t)s.reqs * pages * BLOCK * row_bytes;
        caches = used > 200000000 ? 1 : (int)std::min<size_t>(400000000 / used + 1, 64);
        blocks = s.reqs * pages * caches, numbers = (size_t)tokens * s.heads * RANK;
        cache = (char *)reserve((size_t)blocks * BLOCK * row_bytes);
        q = (__nv_bfloat16 *)reserve(numbers * 2), out = (__nv_bfloat16 *)reserve(numbers * 2);
        rope = (__nv_bfloat16 *)reserve((size_t)tokens * s.heads * ROPE * 2);
        fill_cache<<<1024, 256, 0, stream>>>(cache, (size_t)blocks * BLOCK, s.form);
        random_bf16<<<1024, 256, 0, stream>>>(q, numbers);
        scale_bf16<<<1024, 256, 0, stream>>>(q, numbers, s.size);
        random_bf16<<<1024, 256, 0, stream>>>(rope, (size_t)tokens * s.heads * ROPE);
        std::vector<int> order(blocks), keys;
        for (int i = 0; i < blocks; i++) {
            order[i] = (int)((long long)i * 7919 % blocks);
        }
        for (int i = 0; i < tokens * s.topk; i++) {
            keys.push_back((int)((unsigned)(i % s.topk * 1237 + i / s.topk * 31) %
                                 (s.length - s.queries + 1))); /* which all queries see */
        }
        slots = upload(std::vector<int64_t>(1, (int64_t)order[pages - 1] * BLOCK +
                                                   (s.length - 1) % BLOCK)); /* the last row */
        table = upload(order), top = s.topk > 0 ? upload(keys) : nullptr;
        describe();
    }

    void describe()
    {
        desc = {{ATTN_EXT_MLA_DESC, 0, sizeof desc, nullptr}};
        desc.kv_lora_rank = RANK, desc.qk_rope_head_dim = ROPE;
        desc.qk_nope_head_dim = desc.v_head_dim = 128, desc.topk = s.topk;
        layer = {sizeof layer};
        layer.next = &desc.ext, layer.name = "latent", layer.kind = ATTN_LAYER_MLA;
        layer.dtype = ATTN_DTYPE_BF16, layer.num_q_heads = s.heads, layer.num_kv_heads = 1;
        layer.head_size = RANK + ROPE, layer.head_size_v = RANK, layer.causal = 1;
        layer.scale = 1 / sqrtf(192.0f), layer.kv_dtype = s.form, layer.block_size = BLOCK;
        layer.window_left = layer.window_right = -1;
        if (s.form == ATTN_KV_FP8_E4M3) {
            layer.k_scale_form = layer.v_scale_form = ATTN_SCALE_PER_TENSOR;
        }
        params = {sizeof params};
        for (int r = 0; r <= s.reqs; r++) {
            starts.push_back(r * s.queries);
            lens.push_back(s.length);
        }
        batch = {sizeof batch};
        batch.num_reqs = s.reqs, batch.num_tokens = batch.num_actual_tokens = tokens;
        batch.max_query_len = s.queries, batch.max_seq_len = s.length;
        batch.query_start_loc = upload(starts), batch.query_start_loc_host = starts.data();
        batch.seq_lens = upload(lens), batch.seq_lens_host = lens.data();
        batch.block_table_stride = pages;
        limits = {sizeof limits, nullptr, s.reqs, tokens, s.queries, s.length, 0, 0};
        view = {sizeof view};
        view.data = cache, view.num_blocks = blocks, view.block_size = BLOCK, view.num_heads = 1;
        view.head_size = RANK + ROPE, view.stride_slot = view.stride_head = row_bytes;
        view.stride_block = (int64_t)row_bytes * BLOCK;
    }

    ~subject()
    {
        for (void *p :
             {(void *)cache, (void *)q, (void *)rope, (void *)out, (void *)table, (void *)top,
              (void *)slots, (void *)batch.query_start_loc, (void *)batch.seq_lens}) {
            cudaFree(p);
        }
    }
};

struct build {
    const struct attn_kernels *kernels;
    attn_instance *instance;
    attn_prepared *prepared;
    struct attn_schedule_size size;
    std::vector<char> plan;
    void *workspace;
    cudaGraphExec_t graph;
    std::vector<double> times;

    void enter(subject &x)
    {
        struct attn_prepare_args args = {sizeof args};
        args.instance = instance, args.layer = &x.layer, args.params = &x.params;
        args.k_cache = &x.view;
        MUST(kernels->prepare(&args, &prepared, nullptr));
        struct attn_schedule_size_args sized = {sizeof sized};
        sized.instance = instance, sized.limits = &x.limits, sized.prepared = prepared;
        size = {sizeof size};
        MUST(kernels->schedule_size(&sized, &size, nullptr));
        plan.resize(size.host_bytes);
        workspace = reserve(size.device_bytes + 256);
        times.clear();
        call(x, 0, true);
    }

    void write(subject &x)
    {
        int64_t c_shape[] = {1, 1, RANK}, rope_shape[] = {1, 1, ROPE};
        struct attn_tensor c = tensor(x.q, c_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor rope = tensor(x.rope, rope_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_io_mla io = {{ATTN_EXT_IO_MLA, 0, sizeof io, nullptr}};
        io.kv_c = &c, io.k_pe = &rope;
        struct attn_write_kv_args args = {sizeof args};
        args.next = &io.ext, args.instance = instance, args.layer = &x.layer;
        args.params = &x.params, args.k_cache = &x.view, args.slot_mapping = x.slots;
        args.num_slots = 1, args.stream = stream;
        MUST(kernels->write_kv(&args, nullptr));
    }

    /* One attend; plans: behind its schedule. */
    void call(subject &x, int copy, bool plans)
    {
        int64_t q_shape[] = {x.tokens, x.s.heads, RANK}, rope_shape[] = {x.tokens, x.s.heads, ROPE};
        struct attn_tensor q = tensor(x.q, q_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor rope = tensor(x.rope, rope_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor out = tensor(x.out, q_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_io_mla io = {{ATTN_EXT_IO_MLA, 0, sizeof io, nullptr}};
        io.q_nope = &q, io.q_pe = &rope, io.topk_indices = x.top, io.topk_stride = x.s.topk;
        x.batch.block_table = x.table + (size_t)(copy % x.caches) * x.s.reqs * x.pages;
        struct attn_attend_args args = {sizeof args};
        args.next = &io.ext, args.instance = instance, args.prepared = prepared;
        args.layer = &x.layer, args.params = &x.params, args.batch = &x.batch;
        args.k_cache = &x.view;
        args.schedule_host = plan.data(), args.schedule_host_bytes = size.host_bytes;
        args.workspace = workspace, args.workspace_bytes = size.device_bytes;
        args.limits = &x.limits, args.stream = stream, args.out = &out;
        if (plans) {
            MUST(kernels->schedule(&args, ATTN_PLAN_EAGER, nullptr));
        }
        if (x.s.writes) {
            write(x);
        }
        struct attn_error error = ATTN_ERROR_INIT;
        auto *attend = x.s.topk > 0 ? kernels->attend_mla_sparse : kernels->attend_mla;
        if (attend(&args, &error) != ATTN_OK) {
            printf("%s: %s\n", error.field, error.message);
            exit(1);
        }
    }

    void capture(subject &x, int launches)
    {
        cudaGraph_t captured;
        MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        for (int i = 0; i < launches; i++) {
            call(x, i, false);
        }
        MUST(cudaStreamEndCapture(stream, &captured));
        MUST(cudaGraphInstantiate(&graph, captured, 0));
        cudaGraphDestroy(captured);
    }

    void leave()
    {
        cudaGraphExecDestroy(graph);
        kernels->release(instance, prepared);
        cudaFree(workspace);
    }
};

/* Its output against the first build's. */
static void compare_outputs(subject &x, const __nv_bfloat16 *first, float *worst, int number)
{
    float far = 0;
    MUST(cudaMemsetAsync(worst, 0, sizeof far, stream));
    compare<<<256, 256, 0, stream>>>(first, x.out, x.numbers, worst);
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaMemcpy(&far, worst, sizeof far, cudaMemcpyDeviceToHost));
    if (!(far < 0.02f)) {
        printf("build %d differs by %g\n", number, far);
    }
}

static void time_shape(const shape &s, std::vector<build> &builds, int rounds)
{
    subject x(s);
    const int launches = std::max(x.caches, 4);
    float *worst = (float *)reserve(sizeof *worst);
    __nv_bfloat16 *first = (__nv_bfloat16 *)reserve(x.numbers * 2);
    for (build &b : builds) {
        MUST(cudaMemsetAsync(x.out, 0xff, x.numbers * 2, stream));
        b.enter(x);
        if (&b == &builds[0]) {
            MUST(cudaMemcpyAsync(first, x.out, x.numbers * 2, cudaMemcpyDeviceToDevice, stream));
        }
        compare_outputs(x, first, worst, (int)(&b - &builds[0]));
        b.capture(x, launches);
    }
    for (int round = 0; round < rounds; round++) {
        for (size_t turn = 0; turn < builds.size(); turn++) { /* none is always the coolest */
            build &b = builds[(turn + (size_t)round) % builds.size()];
            time_graph(b.graph, launches, 1, 3, b.times);
        }
    }
    const double keys = s.topk > 0 ? s.topk : s.length;
    const double flops = 2.0 * x.tokens * s.heads * keys * (2 * RANK + ROPE);
    printf("R %d L %d, %d heads, %d queries of %g, top %d, rows %d:", s.reqs, s.length, s.heads,
           s.queries, s.size, s.topk, x.row_bytes);
    for (build &b : builds) {
        std::sort(b.times.begin(), b.times.end());
        printf("  %.1f (%.1f)", b.times[b.times.size() / 2], b.times[0]);
        b.leave();
    }
    const double us = builds.back().times[builds.back().times.size() / 2];
    printf(" us; the last one %.0f TFLOP/s, %.0f GB/s\n", flops / us / 1e6, x.used / us / 1e3);
    cudaFree(worst), cudaFree(first);
}

int main(int argc, char **argv)
{
    const int rounds = atoi(argv[1]);
    std::vector<build> builds(argc - 2);
    for (int i = 2; i < argc; i++) {
        build &b = builds[i - 2];
        open_plugin(argv[i]);
        b.instance = instance, b.kernels = kernels;
    }
    MUST(cudaStreamCreate(&stream));
    const int bf16 = ATTN_KV_BF16, ds = ATTN_KV_FP8_DS_MLA, e4m3 = ATTN_KV_FP8_E4M3;
    /* requests, keys, heads, queries of each, keys listed, rows */
    for (const shape &s :
         {shape{128, 4096, 128, 1, 0, bf16}, shape{32, 32768, 128, 1, 0, bf16},
          shape{32, 8192, 128, 2, 0, bf16}, shape{1, 4096, 128, 1, 0, bf16},
          shape{64, 8192, 16, 1, 0, bf16}, shape{64, 8192, 16, 2, 0, bf16},
          shape{64, 8192, 16, 4, 0, bf16}, shape{128, 4096, 128, 1, 2048, bf16},
          shape{2, 16384, 128, 1024, 2048, bf16}, shape{5, 5000, 128, 1, 0, bf16, false, 60},
          shape{1, 4096, 128, 1, 2048, bf16}, shape{128, 4096, 128, 1, 2048, ds},
          shape{128, 4096, 128, 1, 0, e4m3}, shape{64, 8192, 16, 1, 0, e4m3},
          shape{1, 131072, 128, 1, 0, bf16, true}, shape{1, 1048576, 128, 1, 0, bf16, true},
          shape{1, 131072, 32, 1, 0, bf16, true}, shape{1, 1048576, 32, 1, 0, bf16, true}}) {
        time_shape(s, builds, rounds);
    }
    return 0;
}
