/* SPDX-License-Identifier: Apache-2.0 */
/* Times cuda_flash through the plugin ABI against ceilings of the same run: inside a captured
 * graph, over rotating caches of more than twice the L2, medians. usage: bench PLUGIN.so [PART OF A
 * NAME]... */
#include "bench_plugin.cuh"
#include "bench_host.cuh"

static __global__ void read_all(const uint4 *data, size_t count, unsigned *out)
{
    unsigned sum = 0;
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < count; i += 8 * step) {
        uint4 x[8];
#pragma unroll
        for (int k = 0; k < 8; k++) {
            x[k] = __ldcs(data + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
            sum += x[k].x ^ x[k].y ^ x[k].z ^ x[k].w;
        }
    }
    if (sum == 0x12345678u) {
        *out = sum;
    }
}

static __global__ void copy_all(const uint4 *from, uint4 *to, size_t count)
{
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < count; i += 4 * step) {
        uint4 x[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            x[k] = __ldcs(from + i + k * step);
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            __stcs(to + i + k * step, x[k]);
        }
    }
}

struct setting {
    const char *name;
    int reqs, length, block, heads, kv_heads, dim, fp8, queries, skew, window, sinks, cap, prefill,
        step;
};

static void time_setting(const setting &s, double read_rate)
{
    int q_len = s.prefill ? s.length : s.queries, element = s.fp8 ? 1 : 2;
    std::vector<int> lens(s.reqs, s.length), starts(s.reqs + 1);
    if (s.skew) { /* one of them 64 times longer, as many keys in all */
        int other = (int)((long)s.length * s.reqs / (s.reqs + 63));
        std::fill(lens.begin(), lens.end(), other);
        lens[s.reqs / 2] = other * 64;
    }
    int longest = *std::max_element(lens.begin(), lens.end());
    int per_req = (longest + s.block - 1) / s.block;
    long blocks = 0;
    for (int r = 0; r < s.reqs; r++) {
        starts[r + 1] = starts[r] + q_len;
        blocks += (lens[r] + s.block - 1) / s.block;
    }
    std::vector<int> order(blocks), table((size_t)s.reqs * per_req);
    for (long i = 0; i < blocks; i++) {
        order[i] = (int)i;
    }
    srand(1);
    for (long i = blocks - 1; i > 0; i--) {
        std::swap(order[i], order[rand() % (i + 1)]);
    }
    long next = 0;
    for (int r = 0; r < s.reqs; r++) {
        for (int b = 0; b < (lens[r] + s.block - 1) / s.block; b++) {
            table[(size_t)r * per_req + b] = order[next++];
        }
    }
    int64_t half = (int64_t)blocks * s.block * s.kv_heads * s.dim * element;
    int copies = (int)std::max<int64_t>(1, std::min<int64_t>(200, pool_bytes / (2 * half)));
    copies = std::min<int>(copies, (int)std::max<int64_t>(2, 3000000000ll / (2 * half)));
    int64_t shape[3] = {starts[s.reqs], s.heads, s.dim};
    size_t rows = (size_t)starts[s.reqs] * s.heads * s.dim;
    __nv_bfloat16 *q, *out;
    MUST(cudaMalloc(&q, rows * 2));
    MUST(cudaMalloc(&out, rows * 2));
    random_bf16<<<1024, 256, 0, stream>>>(q, rows);
    struct attn_layer_desc layer = {sizeof layer};
    layer.name = "bench";
    layer.dtype = ATTN_DTYPE_BF16;
    layer.kv_dtype = s.fp8 ? ATTN_KV_FP8_E4M3 : ATTN_KV_BF16;
    layer.num_q_heads = s.heads, layer.num_kv_heads = s.kv_heads;
    layer.head_size = layer.head_size_v = s.dim;
    layer.scale = 0.088388f, layer.causal = 1, layer.block_size = s.block;
    layer.has_window = s.window > 0, layer.window_left = s.window - 1;
    layer.has_sinks = s.sinks, layer.soft_cap = s.cap ? 50.0f : 0.0f;
    struct attn_layer_params params = {sizeof params};
    params.sinks = upload(std::vector<float>(s.heads, 0.5f));
    struct attn_batch batch = {sizeof batch};
    batch.num_reqs = s.reqs, batch.num_tokens = batch.num_actual_tokens = starts[s.reqs];
    batch.max_query_len = q_len, batch.max_seq_len = longest;
    batch.query_start_loc = upload(starts), batch.query_start_loc_host = starts.data();
    batch.seq_lens = upload(lens), batch.block_table = upload(table);
    batch.block_table_stride = per_req, batch.block_table_rows = s.reqs;
    struct attn_limits limits = {sizeof limits, nullptr, s.reqs,  starts[s.reqs],
                                 q_len,         longest, per_req, 0};
    struct attn_prepare_args prepared = {sizeof prepared};
    prepared.instance = instance, prepared.layer = &layer, prepared.params = &params;
    prepared.phase = s.prefill ? 0 : 1;
    struct attn_schedule_size_args sized = {sizeof sized};
    sized.instance = instance, sized.limits = &limits;
    struct attn_schedule_size size = {sizeof size};
    MUST(kernels->prepare(&prepared, &sized.prepared, nullptr));
    MUST(kernels->schedule_size(&sized, &size, nullptr));
    std::vector<char> plan(size.host_bytes);
    void *workspace;
    MUST(cudaMalloc(&workspace, size.device_bytes));
    std::vector<struct attn_kv_view> views(2 * copies);
    struct attn_tensor tq = tensor(q, shape, ATTN_CODE_BFLOAT, 16);
    struct attn_tensor to = tensor(out, shape, ATTN_CODE_BFLOAT, 16);
    struct attn_attend_args args = {sizeof args};
    args.instance = instance, args.prepared = sized.prepared;
    args.layer = &layer, args.params = &params;
    args.batch = &batch, args.schedule_host = plan.data(), args.workspace = workspace;
    args.stream = stream, args.phase = s.prefill ? 0 : 1, args.q = &tq, args.out = &to;
    for (int i = 0; i < 2 * copies; i++) {
        struct attn_kv_view v = {sizeof v};
        v.data = pool + i * half;
        v.num_blocks = blocks, v.block_size = s.block, v.num_heads = s.kv_heads;
        v.head_size = s.dim, v.stride_head = (int64_t)s.block * s.dim * element;
        v.stride_slot = s.dim * element, v.stride_block = v.stride_head * s.kv_heads;
        views[i] = v;
    }
    args.k_cache = &views[0], args.v_cache = &views[1];
    std::vector<int64_t> last(s.reqs); /* slots of the requests' last keys */
    for (int r = 0; r < s.reqs; r++) {
        int at = lens[r] - 1;
        last[r] = (int64_t)table[(size_t)r * per_req + at / s.block] * s.block + at % s.block;
    }
    int64_t new_shape[3] = {s.reqs, s.kv_heads, s.dim};
    struct attn_tensor row = tensor(q, new_shape, ATTN_CODE_BFLOAT, 16);
    struct attn_write_kv_args write = {sizeof write};
    write.instance = instance, write.layer = &layer, write.params = &params;
    write.slot_mapping = upload(last), write.num_slots = s.reqs, write.stream = stream;
    write.k = write.v = &row;
    MUST(kernels->schedule(&args, ATTN_PLAN_EAGER, nullptr));
    double us = median_us(copies, [&](int i) {
        args.k_cache = &views[2 * i], args.v_cache = &views[2 * i + 1];
        write.k_cache = args.k_cache, write.v_cache = args.v_cache;
        if (s.step) {
            MUST(kernels->write_kv(&write, nullptr));
        }
        MUST(kernels->attend(&args, nullptr));
    });
    if (s.prefill) {
        double flop = 4.0 * s.heads * s.dim * s.reqs * s.length * (s.length + 1.0) / 2;
        printf("| %s | %.1f us | %.0f TFLOP/s causal | |\n", s.name, us, flop / us / 1e6);
    } else {
        double keys = 0;
        for (int r = 0; r < s.reqs; r++) {
            keys += s.window > 0 ? std::min(lens[r], s.window) : lens[r];
        }
        double bytes = keys * s.kv_heads * s.dim * element * 2.0;
        printf("| %s | %.1f us | %.0f GB/s | %.3f of read |\n", s.name, us, bytes / us / 1e3,
               bytes / us / 1e3 / read_rate);
    }
    fflush(stdout);
    kernels->release(instance, sized.prepared);
    cudaFree(workspace), cudaFree(q), cudaFree(out);
}

static void time_write(double copy_rate, int tokens, int fp8)
{
    int heads = 8, dim = 128, block = 64, element = fp8 ? 1 : 2;
    std::vector<int64_t> slots(tokens);
    for (int i = 0; i < tokens; i++) {
        slots[i] = (int64_t)(i * 7919ll % tokens);
    }
    int64_t *device_slots = upload(slots), shape[3] = {tokens, heads, dim};
    size_t rows = (size_t)tokens * heads * dim;
    struct attn_layer_desc layer = {sizeof layer};
    struct attn_layer_params params = {sizeof params};
    layer.kv_dtype = fp8 ? ATTN_KV_FP8_E4M3 : ATTN_KV_BF16;
    layer.num_q_heads = 32, layer.num_kv_heads = heads;
    layer.head_size = layer.head_size_v = dim;
    layer.k_scale_form = layer.v_scale_form = fp8 ? ATTN_SCALE_PER_TENSOR : ATTN_SCALE_NONE;
    size_t set = rows * 4 + rows * 2 * element;
    int copies = (int)std::max<size_t>(2, std::min<size_t>(100, 1500000000ull / set));
    double us = median_us(copies, [&](int i) {
        char *at = pool + i * set;
        struct attn_kv_view k = {sizeof k}, v;
        k.data = at + rows * 4;
        k.num_blocks = (tokens + block - 1) / block, k.block_size = block, k.num_heads = heads;
        k.head_size = dim, k.stride_slot = (int64_t)heads * dim * element;
        k.stride_head = dim * element, k.stride_block = k.stride_slot * block;
        v = k;
        v.data = (char *)k.data + rows * element;
        struct attn_tensor tk = tensor(at, shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor tv = tensor(at + rows * 2, shape, ATTN_CODE_BFLOAT, 16);
        struct attn_write_kv_args args = {sizeof args};
        args.instance = instance, args.layer = &layer, args.params = &params;
        args.k_cache = &k, args.v_cache = &v, args.slot_mapping = device_slots;
        args.num_slots = tokens, args.stream = stream, args.k = &tk, args.v = &tv;
        MUST(kernels->write_kv(&args, nullptr));
    });
    double rate = (rows * 4 + rows * 2.0 * element) / us / 1e3;
    printf("| KV write %s, %d tokens | %.1f us | %.0f GB/s | %.3f of copy |\n",
           fp8 ? "bf16 to fp8" : "bf16", tokens, us, rate, rate / copy_rate);
}

int main(int argc, char **argv)
{
    void *library = dlopen(argc > 1 ? argv[1] : "", RTLD_NOW);
    if (library == nullptr) {
        printf("%s\n", dlerror());
        return 2;
    }
    auto entry = (attn_plugin_entry_fn *)dlsym(library, ATTN_PLUGIN_ENTRY_SYMBOL);
    struct attn_error error = ATTN_ERROR_INIT;
    MUST(entry(ATTN_ABI_VERSION, ATTN_ABI_VERSION, &plugin, &error));
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    attn_create_args create = {};
    create.struct_size = sizeof create, create.host = &host, create.backend = "cuda_flash";
    create.variant = "", create.device = {ATTN_DEVICE_CUDA, 0};
    MUST(plugin->create(&create, &instance, &kernels, &error));
    pool_bytes = 40ull << 30;
    MUST(cudaMalloc(&pool, pool_bytes));
    random_bf16<<<4096, 256, 0, stream>>>((__nv_bfloat16 *)pool, pool_bytes / 2);
    unsigned *sink;
    MUST(cudaMalloc(&sink, 4));
    size_t gib8 = 8ull << 30;
    double read_rate = 0;
    for (int ctas : {132 * 4, 132 * 8, 132 * 16}) {
        double us = median_us(1, [&](int) {
            read_all<<<ctas, 256, 0, stream>>>((const uint4 *)pool, gib8 / 16, sink);
        });
        read_rate = std::max(read_rate, gib8 / us / 1e3);
    }
    double copy_rate = 0;
    for (int ctas : {132 * 4, 132 * 8, 132 * 16}) {
        double us = median_us(1, [&](int) {
            copy_all<<<ctas, 256, 0, stream>>>((const uint4 *)pool, (uint4 *)(pool + gib8),
                                               gib8 / 16);
        });
        copy_rate = std::max(copy_rate, 2.0 * gib8 / us / 1e3);
    }
    printf("| what | median | rate | ratio |\n| --- | --- | --- | --- |\n");
    printf("| read ceiling, 8 GiB | | %.0f GB/s | |\n| copy ceiling, 8 GiB | | %.0f GB/s | |\n",
           read_rate, copy_rate);
    const setting settings[] = {
        {"R 64, L 8192, paged 64", 64, 8192, 64, 32, 8, 128, 0, 1},
        {"R 64, L 8192, paged 16", 64, 8192, 16, 32, 8, 128, 0, 1},
        {"R 128, L 16384, paged 64", 128, 16384, 64, 32, 8, 128, 0, 1},
        {"R 8, L 32768", 8, 32768, 64, 32, 8, 128, 0, 1},
        {"R 8, L 8192", 8, 8192, 64, 32, 8, 128, 0, 1},
        {"R 2, L 8192", 2, 8192, 64, 32, 8, 128, 0, 1},
        {"R 4, L 8192", 4, 8192, 64, 32, 8, 128, 0, 1},
        {"R 64, L 1024", 64, 1024, 64, 32, 8, 128, 0, 1},
        {"R 256, L 1024", 256, 1024, 64, 32, 8, 128, 0, 1},
        {"R 1, L 1024", 1, 1024, 64, 32, 8, 128, 0, 1},
        {"R 1, L 8192", 1, 8192, 64, 32, 8, 128, 0, 1},
        {"R 1, L 32768", 1, 32768, 64, 32, 8, 128, 0, 1},
        {"fp8 R 256, L 32768", 256, 32768, 64, 32, 8, 128, 1, 1},
        {"fp8 R 64, L 8192", 64, 8192, 64, 32, 8, 128, 1, 1},
        {"64/8 heads, R 64, L 8192", 64, 8192, 64, 64, 8, 128, 0, 1},
        {"window 1024, R 256, L 8192", 256, 8192, 64, 32, 8, 128, 0, 1, 0, 1024},
        {"sinks, R 64, L 8192", 64, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 1},
        {"soft cap, R 64, L 8192", 64, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 0, 1},
        {"sinks, R 1, L 8192", 1, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 1},
        {"soft cap, R 1, L 8192", 1, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 0, 1},
        {"fp8 R 1, L 8192", 1, 8192, 64, 32, 8, 128, 1, 1},
        {"D 64, R 1, L 8192", 1, 8192, 64, 32, 8, 64, 0, 1},
        {"4 queries, R 1, L 8192", 1, 8192, 64, 32, 8, 128, 0, 4},
        {"skewed, R 2, mean L 8192", 2, 8192, 64, 32, 8, 128, 0, 1, 1},
        {"skewed, R 64, mean L 8192", 64, 8192, 64, 32, 8, 128, 0, 1, 1},
        {"4 queries, R 64, L 8192", 64, 8192, 64, 32, 8, 128, 0, 4},
        {"step of R 1, L 1024", 1, 1024, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 0, 1},
        {"step of R 1, L 8192", 1, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 0, 1},
        {"step of R 1, L 32768", 1, 32768, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 0, 1},
        {"step of R 8, L 8192", 8, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 0, 1},
        {"step of R 64, L 8192", 64, 8192, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 0, 1},
        {"prefill 8 x 2048 causal", 8, 2048, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 1},
        {"prefill 1 x 16384 causal", 1, 16384, 64, 32, 8, 128, 0, 1, 0, 0, 0, 0, 1},
    };
    auto is_asked = [&](const char *name) {
        bool asked = argc <= 2;
        for (int i = 2; i < argc; i++) {
            asked |= strstr(name, argv[i]) != nullptr;
        }
        return asked;
    };
    for (const setting &s : settings) {
        if (is_asked(s.name)) {
            time_setting(s, read_rate);
        }
    }
    for (int fp8 = 0; fp8 < 2 && is_asked("KV write"); fp8++) {
        time_write(copy_rate, 65536, fp8);
    }
    if (is_asked("host")) {
        time_host();
    }
    plugin->destroy(instance);
    return 0;
}
