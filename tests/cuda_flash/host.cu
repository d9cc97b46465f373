/* SPDX-License-Identifier: Apache-2.0 */
/* Times what plan and attend of cuda_flash cost the host, through the plugin ABI: what attn-bench
 * does not tell apart from the device's time. Before that, once in a process, the plugin's start:
 * dlopen and an instance (which loads all kernels), the first attend, the first captured graph.
 * usage: host PLUGIN.so */
#include "bench_plugin.cuh"

#include "gpu/params.h"

/* A launch costs the host more while kernels before it run, so the kernel of a bare launch runs for
 * a while as well. */
struct bare_params {
    struct gpu_params as_many;
    long long clocks;
};
static __global__ void bare(const __grid_constant__ bare_params p)
{
    long long begin = clock64();
    while (blockIdx.x == 0 && clock64() - begin < p.clocks) {
    }
}

/* Median ns of the host for one call; so few between waits that no queue is full. */
static double host_ns(const std::function<void()> &call)
{
    std::vector<double> times;
    for (int i = 0; i < 220; i++) {
        MUST(cudaStreamSynchronize(stream));
        auto begin = std::chrono::steady_clock::now();
        for (int k = 0; k < 20; k++) {
            call();
        }
        std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
        if (i >= 20) {
            times.push_back(spent.count() / 20);
        }
    }
    MUST(cudaStreamSynchronize(stream));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

/* Milliseconds of a call and what it launches. */
static double once_ms(const std::function<void()> &call)
{
    auto begin = std::chrono::steady_clock::now();
    call();
    MUST(cudaStreamSynchronize(stream));
    std::chrono::duration<double, std::milli> spent = std::chrono::steady_clock::now() - begin;
    return spent.count();
}

static void time_start(const std::function<void()> &step)
{
    double first = once_ms(step);
    double captured = once_ms([&] {
        cudaGraph_t graph;
        cudaGraphExec_t exec;
        MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        step();
        MUST(cudaStreamEndCapture(stream, &graph));
        MUST(cudaGraphInstantiate(&exec, graph, 0));
        MUST(cudaGraphLaunch(exec, stream));
    });
    printf("| start: the first step; the first captured one | %.2f, %.2f ms | | |\n", first,
           captured);
}

/* The host's share of a plan of 256 mixed requests, and of an attend next to a bare launch with as
 * many CTAs, shared memory and parameters and the same attributes: a step of a layer, no graph. */
static void time_host()
{
    const int reqs = 256, block = 64, heads = 8, dim = 128;
    std::vector<int> lens(reqs), starts(reqs + 1), table;
    int longest = 0, longest_query = 0;
    for (int r = 0; r < reqs; r++) { /* a quarter prefills of 16 to 128 tokens, the others decode */
        int query = r % 4 == 3 ? 16 << r / 4 % 4 : 1;
        lens[r] = query + r * 37 % 2000;
        starts[r + 1] = starts[r] + query;
        longest = std::max(longest, lens[r]);
        longest_query = std::max(longest_query, query);
    }
    int per_req = (longest + block - 1) / block, tokens = starts[reqs];
    for (int i = 0; i < reqs * per_req; i++) {
        table.push_back(i);
    }
    int64_t shape[3] = {tokens, 4 * heads, dim},
            half = (int64_t)reqs * per_req * block * heads * dim * 2;
    __nv_bfloat16 *q, *out;
    MUST(cudaMalloc(&q, (size_t)tokens * 4 * heads * dim * 2));
    MUST(cudaMalloc(&out, (size_t)tokens * 4 * heads * dim * 2));
    struct attn_layer_desc layer = {sizeof layer};
    layer.name = "host";
    layer.dtype = ATTN_DTYPE_BF16, layer.kv_dtype = ATTN_KV_BF16;
    layer.num_q_heads = 4 * heads, layer.num_kv_heads = heads;
    layer.head_size = layer.head_size_v = dim;
    layer.scale = 0.088388f, layer.causal = 1, layer.block_size = block;
    layer.window_left = layer.window_right = -1;
    struct attn_layer_params params = {sizeof params};
    struct attn_batch batch = {sizeof batch};
    batch.num_reqs = reqs, batch.num_tokens = batch.num_actual_tokens = tokens;
    batch.max_query_len = longest_query, batch.max_seq_len = longest;
    batch.query_start_loc = upload(starts), batch.query_start_loc_host = starts.data();
    batch.seq_lens = upload(lens), batch.block_table = upload(table);
    batch.block_table_stride = per_req, batch.block_table_rows = reqs;
    struct attn_limits limits = {sizeof limits, nullptr, reqs,    tokens,
                                 longest_query, longest, per_req, 0};
    struct attn_prepare_args prepare = {sizeof prepare};
    prepare.instance = instance, prepare.layer = &layer, prepare.params = &params;
    struct attn_schedule_size_args sized = {sizeof sized};
    sized.instance = instance, sized.limits = &limits;
    struct attn_schedule_size size = {sizeof size};
    attn_prepared *prepared;
    MUST(kernels->prepare(&prepare, &prepared, nullptr));
    sized.prepared = prepared;
    MUST(kernels->schedule_size(&sized, &size, nullptr));
    std::vector<char> plan(size.host_bytes);
    void *workspace;
    MUST(cudaMalloc(&workspace, size.device_bytes));
    struct attn_kv_view views[2];
    for (int i = 0; i < 2; i++) {
        views[i] = {sizeof views[i]};
        views[i].data = pool + i * half;
        views[i].num_blocks = reqs * per_req, views[i].block_size = block;
        views[i].num_heads = heads, views[i].head_size = dim;
        views[i].stride_head = (int64_t)block * dim * 2, views[i].stride_slot = dim * 2;
        views[i].stride_block = views[i].stride_head * heads;
    }
    struct attn_tensor tq = tensor(q, shape, ATTN_CODE_BFLOAT, 16);
    struct attn_tensor to = tensor(out, shape, ATTN_CODE_BFLOAT, 16);
    struct attn_attend_args args = {sizeof args};
    args.instance = instance, args.prepared = prepared, args.layer = &layer, args.params = &params;
    args.batch = &batch, args.schedule_host = plan.data(), args.workspace = workspace;
    args.stream = stream, args.q = &tq, args.out = &to;
    args.k_cache = &views[0], args.v_cache = &views[1];
    time_start([&] {
        MUST(kernels->schedule(&args, ATTN_PLAN_EAGER, nullptr));
        MUST(kernels->attend(&args, nullptr));
    });
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(264), config.blockDim = dim3(192), config.stream = stream;
    config.attrs = &attribute, config.numAttrs = 1, config.dynamicSmemBytes = 76 * 1024;
    MUST(cudaFuncSetAttribute(bare, cudaFuncAttributeMaxDynamicSharedMemorySize, 76 * 1024));
    bare_params params_of_bare = {};
    auto launch_bare = [&] { MUST(cudaLaunchKernelEx(&config, bare, params_of_bare)); };
    double empty = host_ns(launch_bare);
    params_of_bare.clocks = 500000;
    double launch = host_ns(launch_bare);
    double planned = host_ns([&] { MUST(kernels->schedule(&args, ATTN_PLAN_EAGER, nullptr)); });
    double attended = host_ns([&] { MUST(kernels->attend(&args, nullptr)); });
    printf("| host: a bare launch, of a kernel of about 0.3 ms | %.2f us | | |\n", launch * 1e-3);
    printf("| host: a bare launch, of an empty kernel | %.2f us | | |\n", empty * 1e-3);
    printf("| host: plan, 256 mixed requests | %.2f us | | |\n", planned * 1e-3);
    printf("| host: attend, 256 mixed requests | %.2f us | %.2f, %.2f us beyond those | |\n",
           attended * 1e-3, (attended - launch) * 1e-3, (attended - empty) * 1e-3);
    kernels->release(instance, prepared);
    cudaFree(workspace), cudaFree(q), cudaFree(out);
}

int main(int argc, char **argv)
{
    pool_bytes = 4ull << 30;
    MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    MUST(cudaMalloc(&pool, pool_bytes));
    random_bf16<<<4096, 256, 0, stream>>>((__nv_bfloat16 *)pool, pool_bytes / 2);
    MUST(cudaStreamSynchronize(stream)); /* the context is there: what follows is the plugin's */
    double opened = once_ms([&] { open_plugin(argc > 1 ? argv[1] : ""); });
    printf("| start: dlopen and an instance | %.1f ms | | |\n", opened);
    time_host();
    plugin->destroy(instance);
    return 0;
}
