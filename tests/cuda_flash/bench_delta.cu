/* SPDX-License-Identifier: Apache-2.0 */
/* Times gated delta of cuda_flash through the plugin ABI, and holds long sequences to a recurrence
 * in float64: random ones, gates that forget nothing, gates that forget all now and then, and keys
 * that are all alike. usage: bench_delta PLUGIN.so [check|time|once [REQUESTS TOKENS]] */
#include "bench_plugin.cuh"

#include <attn/recurrent.h>

#define CONV 4
#define CHECKED_ROWS 8 /* of S of each head */

struct shape {
    int reqs, tokens, key_heads, value_heads, dim_k, dim_v;
    __host__ __device__ int channels() const
    {
        return 2 * key_heads * dim_k + value_heads * dim_v;
    }
};

enum content { RANDOM, KEEPING, FORGETTING, ALIKE, CONTENT_COUNT };
static const char *const contents[] = {"random", "keeping", "forgetting", "alike"};

static __device__ float noise(size_t i, unsigned seed)
{
    unsigned x = (unsigned)i * 2654435761u + seed * 40503u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13, x *= 3266489917u, x ^= x >> 16;
    return (float)(x >> 8) / 8388608.0f - 1.0f;
}

static __global__ void fill_rows(__nv_bfloat16 *mixed, __nv_bfloat16 *gates, shape s, int what,
                                 unsigned seed)
{
    int channels = s.channels(), keys = 2 * s.key_heads * s.dim_k, width = 2 * s.value_heads;
    size_t rows = (size_t)s.reqs * s.tokens, step = (size_t)gridDim.x * blockDim.x;
    size_t first = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (size_t i = first; i < rows * channels; i += step) {
        size_t of = what == ALIKE && (int)(i % channels) < keys ? i % channels : i;
        mixed[i] = __float2bfloat16(1.7f * noise(of, seed));
    }
    for (size_t i = first; i < rows * width; i += step) {
        size_t t = i / width;
        float x = 2.0f * noise(i, seed + 1);
        if ((int)(i % width) < s.value_heads) {
            x = what == KEEPING || what == ALIKE    ? -12.0f
                : what == FORGETTING && t % 37 == 5 ? 300.0f
                                                    : x;
        } else if (what == ALIKE) {
            x = 6.0f;
        }
        gates[i] = __float2bfloat16(x);
    }
}

static __global__ void fill_floats(float *to, size_t count, float least, float most, unsigned seed)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        to[i] = least + (most - least) * (0.5f + 0.5f * noise(i, seed));
    }
}

static __device__ double block_sum(double x, double *part)
{
    for (int d = 16; d > 0; d >>= 1) {
        x += __shfl_xor_sync(0xffffffffu, x, d);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) {
        part[threadIdx.x / 32] = x;
    }
    __syncthreads();
    return part[0] + part[1] + part[2] + part[3];
}

static __device__ double convolved(const __nv_bfloat16 *mixed, const __nv_bfloat16 *weights,
                                   const __nv_bfloat16 *window, int channels, long first, int t,
                                   int c)
{
    double y = 0;
    for (int i = 0; i < CONV; i++) {
        int at = t - (CONV - 1) + i;
        double x = at < 0 ? __bfloat162float(window[c * (CONV - 1) + CONV - 1 + at])
                          : __bfloat162float(mixed[(first + at) * channels + c]);
        y += (double)__bfloat162float(weights[c * CONV + i]) * x;
    }
    return y / (1 + exp(-y));
}

/* The recurrence in float64, a block of 128 threads for a row of S. Squares of errors and of
 * outputs, then the same of the final state. */
static __global__ void hold(shape s, const __nv_bfloat16 *mixed, const __nv_bfloat16 *gates,
                            const __nv_bfloat16 *weights, const __nv_bfloat16 *window,
                            const float *a_log, const float *dt_bias, const float *before,
                            const float *after, const __nv_bfloat16 *out, double *sums)
{
    __shared__ double part[4];
    int row = blockIdx.x % CHECKED_ROWS * (s.dim_v / CHECKED_ROWS) + blockIdx.x % 7;
    int head = blockIdx.x / CHECKED_ROWS % s.value_heads;
    int r = blockIdx.x / CHECKED_ROWS / s.value_heads, d = threadIdx.x, channels = s.channels();
    int key_head = head / (s.value_heads / s.key_heads), keys = s.key_heads * s.dim_k;
    size_t at = (((size_t)r * s.value_heads + head) * s.dim_v + row) * s.dim_k + d;
    long first = (long)r * s.tokens;
    double state = before[at], error = 0, size = 0;
    window += (size_t)r * channels * (CONV - 1);
    for (int t = 0; t < s.tokens; t++) {
        double q = convolved(mixed, weights, window, channels, first, t, key_head * s.dim_k + d);
        double k =
            convolved(mixed, weights, window, channels, first, t, keys + key_head * s.dim_k + d);
        double v =
            convolved(mixed, weights, window, channels, first, t, 2 * keys + head * s.dim_v + row);
        q /= sqrt(block_sum(q * q, part) + 1e-6) * sqrt((double)s.dim_k);
        k /= sqrt(block_sum(k * k, part) + 1e-6);
        const __nv_bfloat16 *gate = gates + (first + t) * 2 * s.value_heads;
        double x = (double)__bfloat162float(gate[head]) + dt_bias[head];
        double soft = x > 20 ? x : log1p(exp(x));
        double beta = 1 / (1 + exp(-(double)__bfloat162float(gate[s.value_heads + head])));
        state *= exp(-exp((double)a_log[head]) * soft);
        state += beta * (v - block_sum(state * k, part)) * k;
        double o = block_sum(state * q, part);
        double is = __bfloat162float(out[((first + t) * s.value_heads + head) * s.dim_v + row]);
        error += (is - o) * (is - o), size += o * o;
    }
    double wrong = block_sum((after[at] - state) * (after[at] - state), part);
    double whole = block_sum(state * state, part);
    if (d == 0) {
        atomicAdd(&sums[0], error), atomicAdd(&sums[1], size);
        atomicAdd(&sums[2], wrong), atomicAdd(&sums[3], whole);
    }
}

/* Whether the windows are the last inputs: how many numbers are not. */
static __global__ void hold_windows(shape s, const uint16_t *mixed, const uint16_t *window,
                                    int *wrong)
{
    size_t channels = s.channels(), all = s.reqs * channels * (CONV - 1);
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < all;
         i += (size_t)gridDim.x * blockDim.x) {
        size_t entry = i % (CONV - 1), c = i / (CONV - 1) % channels, r = i / (CONV - 1) / channels;
        size_t row = (r + 1) * s.tokens - (CONV - 1) + entry;
        if (window[i] != mixed[row * channels + c]) {
            atomicAdd(wrong, 1);
        }
    }
}

template <class T> static T *reserve(size_t count)
{
    T *p;
    MUST(cudaMalloc(&p, count * sizeof(T)));
    return p;
}

/* One layer's call on `copies` sets of inputs, states among them. */
struct subject {
    shape s;
    int copies;
    size_t state_size, window_size;
    __nv_bfloat16 *mixed, *gates, *out, *weights, *window;
    float *state, *a_log, *dt_bias;
    std::vector<int> starts, lens, slots;
    struct attn_recurrent_desc desc;
    struct attn_recurrent_weights weights_ext;
    struct attn_batch_recurrent states;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_limits limits;
    struct attn_schedule_size size;
    attn_prepared *prepared;
    std::vector<char> plan;
    void *workspace;

    subject(const shape &of, int number) : s(of), copies(number)
    {
        size_t rows = (size_t)s.reqs * s.tokens;
        state_size = (size_t)s.reqs * s.value_heads * s.dim_v * s.dim_k;
        window_size = (size_t)s.reqs * s.channels() * (CONV - 1);
        mixed = reserve<__nv_bfloat16>(copies * rows * s.channels());
        gates = reserve<__nv_bfloat16>(rows * 2 * s.value_heads);
        out = reserve<__nv_bfloat16>(rows * s.value_heads * s.dim_v);
        weights = reserve<__nv_bfloat16>((size_t)s.channels() * CONV);
        window = reserve<__nv_bfloat16>(window_size);
        state = reserve<float>(copies * state_size);
        a_log = reserve<float>(s.value_heads), dt_bias = reserve<float>(s.value_heads);
        random_bf16<<<1024, 256, 0, stream>>>(weights, (size_t)s.channels() * CONV);
        random_bf16<<<1024, 256, 0, stream>>>(window, window_size);
        fill_floats<<<1024, 256, 0, stream>>>(state, copies * state_size, -1, 1, 3);
        fill_floats<<<1, 64, 0, stream>>>(a_log, s.value_heads, -4, 1, 4);
        fill_floats<<<1, 64, 0, stream>>>(dt_bias, s.value_heads, -1, 1, 5);
        fill(RANDOM, 6);
        for (int c = 1; c < copies; c++) {
            MUST(cudaMemcpyAsync(mixed + c * rows * s.channels(), mixed, rows * s.channels() * 2,
                                 cudaMemcpyDeviceToDevice, stream));
        }
        describe();
    }

    void fill(int what, unsigned seed)
    {
        fill_rows<<<2048, 256, 0, stream>>>(mixed, gates, s, what, seed);
    }

    void describe()
    {
        desc = {{ATTN_EXT_RECURRENT_DESC, 0, sizeof desc, nullptr}};
        desc.num_k_heads = s.key_heads, desc.num_v_heads = s.value_heads;
        desc.head_size_k = s.dim_k, desc.head_size_v = s.dim_v;
        desc.conv_width = CONV, desc.conv_silu = 1, desc.qk_l2norm = 1;
        layer = {sizeof layer};
        layer.next = &desc.ext, layer.name = "delta", layer.kind = ATTN_LAYER_RECURRENT;
        layer.dtype = ATTN_DTYPE_BF16, layer.num_q_heads = layer.num_kv_heads = s.key_heads;
        layer.head_size = s.dim_k, layer.head_size_v = s.dim_v, layer.causal = 1;
        layer.scale = 1 / sqrtf((float)s.dim_k);
        weights_ext = {{ATTN_EXT_RECURRENT_WEIGHTS, 0, sizeof weights_ext, nullptr}};
        weights_ext.a_log = a_log, weights_ext.dt_bias = dt_bias;
        params = {sizeof params};
        params.next = &weights_ext.ext;
        for (int r = 0; r <= s.reqs; r++) {
            starts.push_back(r * s.tokens);
            lens.push_back(s.tokens + 5);
            slots.push_back(r);
        }
        states = {{ATTN_EXT_BATCH_RECURRENT, 0, sizeof states, nullptr}};
        states.state_slots = upload(slots);
        batch = {sizeof batch};
        batch.next = &states.ext, batch.num_reqs = s.reqs;
        batch.num_tokens = batch.num_actual_tokens = s.reqs * s.tokens;
        batch.max_query_len = s.tokens, batch.max_seq_len = s.tokens + 5;
        batch.query_start_loc = upload(starts), batch.query_start_loc_host = starts.data();
        batch.seq_lens = upload(lens), batch.seq_lens_host = lens.data();
        limits = {sizeof limits, nullptr, s.reqs, s.reqs * s.tokens, s.tokens, s.tokens + 5, 0, 0};
        struct attn_prepare_args args = {sizeof args};
        args.instance = instance, args.layer = &layer, args.params = &params;
        MUST(kernels->prepare(&args, &prepared, nullptr));
        struct attn_schedule_size_args sized = {sizeof sized};
        sized.instance = instance, sized.limits = &limits, sized.prepared = prepared;
        size = {sizeof size};
        MUST(kernels->schedule_size(&sized, &size, nullptr));
        plan.resize(size.host_bytes);
        workspace = reserve<char>(size.device_bytes + 256);
    }

    void run(int copy)
    {
        int64_t rows = s.reqs * (int64_t)s.tokens;
        int64_t mixed_shape[] = {rows, s.channels()}, gate_shape[] = {rows, s.value_heads};
        int64_t gate_strides[] = {2 * s.value_heads, 1}, weight_shape[] = {s.channels(), CONV};
        int64_t out_shape[] = {rows, s.value_heads, s.dim_v};
        struct attn_tensor all =
            tensor(mixed + copy * rows * s.channels(), mixed_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor a = tensor(gates, gate_shape, ATTN_CODE_BFLOAT, 16), b = a;
        struct attn_tensor w = tensor(weights, weight_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor o = tensor(out, out_shape, ATTN_CODE_BFLOAT, 16);
        all.ndim = a.ndim = b.ndim = w.ndim = 2;
        a.strides = b.strides = gate_strides;
        b.data = gates + s.value_heads;
        weights_ext.conv_weight = &w;
        struct attn_kv_view views[2] = {{sizeof views[0]}, {sizeof views[1]}};
        views[0].data = state + copy * state_size, views[0].num_blocks = s.reqs;
        views[0].num_heads = s.value_heads, views[0].head_size = s.dim_v * s.dim_k;
        views[0].stride_head = (int64_t)s.dim_v * s.dim_k * 4;
        views[0].stride_block = views[0].stride_head * s.value_heads;
        views[1].data = window, views[1].num_blocks = s.reqs;
        views[1].num_heads = s.channels(), views[1].head_size = CONV - 1;
        views[1].stride_head = (CONV - 1) * 2;
        views[1].stride_block = views[1].stride_head * s.channels();
        struct attn_io_recurrent io = {{ATTN_EXT_IO_RECURRENT, 0, sizeof io, nullptr}};
        io.mixed_qkv = &all, io.a = &a, io.b = &b;
        struct attn_attend_args args = {sizeof args};
        args.next = &io.ext, args.instance = instance, args.prepared = prepared;
        args.layer = &layer, args.params = &params, args.batch = &batch;
        args.k_cache = &views[0], args.v_cache = &views[1];
        args.schedule_host = plan.data(), args.schedule_host_bytes = size.host_bytes;
        args.workspace = workspace, args.workspace_bytes = size.device_bytes;
        args.limits = &limits, args.stream = stream, args.out = &o;
        MUST(kernels->schedule(&args, ATTN_PLAN_EAGER, nullptr));
        MUST(kernels->recurrent(&args, nullptr));
    }

    ~subject()
    {
        kernels->release(instance, prepared);
        for (void *p :
             {(void *)mixed, (void *)gates, (void *)out, (void *)weights, (void *)window,
              (void *)state, (void *)a_log, (void *)dt_bias, workspace, (void *)states.state_slots,
              (void *)batch.query_start_loc, (void *)batch.seq_lens}) {
            cudaFree(p);
        }
    }
};

/* Relative errors of outputs and final states; true: both below a bound of bf16's outputs, and the
 * windows are the last inputs. */
static bool check(const shape &s, int what)
{
    subject x(s, 1);
    float *before = reserve<float>(x.state_size);
    __nv_bfloat16 *window = reserve<__nv_bfloat16>(x.window_size);
    double *sums = reserve<double>(4), found[4];
    int *wrong = reserve<int>(1), windows;
    MUST(cudaMemset(sums, 0, sizeof found));
    MUST(cudaMemset(wrong, 0, sizeof windows));
    MUST(cudaMemset(x.out, 0xff, (size_t)s.reqs * s.tokens * s.value_heads * s.dim_v * 2));
    x.fill(what, 11 + what);
    MUST(cudaMemcpyAsync(before, x.state, x.state_size * 4, cudaMemcpyDeviceToDevice, stream));
    MUST(cudaMemcpyAsync(window, x.window, x.window_size * 2, cudaMemcpyDeviceToDevice, stream));
    x.run(0);
    hold<<<s.reqs * s.value_heads * CHECKED_ROWS, 128, 0, stream>>>(
        s, x.mixed, x.gates, x.weights, window, x.a_log, x.dt_bias, before, x.state, x.out, sums);
    hold_windows<<<256, 256, 0, stream>>>(s, (const uint16_t *)x.mixed, (const uint16_t *)x.window,
                                          wrong);
    MUST(cudaGetLastError());
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaMemcpy(found, sums, sizeof found, cudaMemcpyDeviceToHost));
    MUST(cudaMemcpy(&windows, wrong, sizeof windows, cudaMemcpyDeviceToHost));
    double out = sqrt(found[0] / found[1] / s.dim_k * s.dim_k), state = sqrt(found[2] / found[3]);
    bool good = out < 4e-3 && state < 2e-3 && windows == 0;
    printf("%-4s %d x %d, %d/%d heads, %d, %d, %-10s out %.2e state %.2e, %d wrong in windows\n",
           good ? "ok" : "FAIL", s.reqs, s.tokens, s.key_heads, s.value_heads, s.dim_k, s.dim_v,
           contents[what], out, state, windows);
    cudaFree(before), cudaFree(window), cudaFree(sums), cudaFree(wrong);
    return good;
}

static void time_shape(const shape &s)
{
    size_t bytes = (size_t)s.reqs * s.tokens * s.channels() * 2 +
                   (size_t)s.reqs * s.value_heads * s.dim_v * s.dim_k * 4;
    int copies = (int)std::min<size_t>(std::max<size_t>((size_t)150000000 / bytes + 1, 2), 64);
    subject x(s, copies);
    double us = median_us(copies, [&](int copy) { x.run(copy); });
    double state = (double)s.reqs * s.value_heads * s.dim_v * s.dim_k * 8;
    printf("%d x %d, %d/%d heads: %.1f us, %.0f GB/s of states, workspace %.0f MB\n", s.reqs,
           s.tokens, s.key_heads, s.value_heads, us, state / us / 1e3, x.size.device_bytes / 1e6);
}

int main(int argc, char **argv)
{
    bool all = argc < 3, good = true;
    open_plugin(argv[1]);
    MUST(cudaStreamCreate(&stream));
    if (all || strcmp(argv[2], "check") == 0) {
        for (int what = 0; what < CONTENT_COUNT; what++) {
            good &= check({2, 2100, 4, 8, 128, 128}, what);
        }
        /* long enough to be prepared next to the walks, which attn-check's cases are not */
        good &= check({1, 8192, 16, 32, 128, 128}, RANDOM);
        good &= check({1, 8192, 16, 32, 128, 128}, KEEPING);
        good &= check({2, 9000, 16, 16, 128, 64}, RANDOM);
        /* too many for 32 rows of S a CTA, too few to be walked whole */
        good &= check({2, 1100, 16, 32, 128, 128}, RANDOM);
        good &= check({2, 1100, 16, 32, 128, 128}, KEEPING);
        /* with more heads than multiprocessors, which are walked whole */
        for (int what = 0; what < CONTENT_COUNT; what++) {
            good &= check({9, 1100, 16, 32, 128, 128}, what);
        }
        good &= check({70, 35, 2, 8, 128, 128}, RANDOM);
    }
    if (all || strcmp(argv[2], "time") == 0) {
        for (const shape &s : {shape{1, 2048, 16, 32, 128, 128}, shape{1, 8192, 16, 32, 128, 128},
                               shape{1, 32768, 16, 32, 128, 128}, shape{8, 4096, 16, 32, 128, 128},
                               shape{1, 64, 16, 32, 128, 128}, shape{1, 32, 16, 32, 128, 128},
                               shape{1, 31, 16, 32, 128, 128}, shape{1, 512, 16, 32, 128, 128},
                               shape{1, 8192, 2, 4, 128, 128}, shape{64, 1, 16, 32, 128, 128},
                               shape{256, 1, 16, 32, 128, 128}, shape{1, 1, 16, 32, 128, 128}}) {
            time_shape(s);
        }
    }
    if (!all && strcmp(argv[2], "once") == 0) { /* for a profiler */
        int reqs = argc > 4 ? atoi(argv[3]) : 1, tokens = argc > 4 ? atoi(argv[4]) : 8192;
        subject one({reqs, tokens, 16, 32, 128, 128}, 2);
        one.run(0), one.run(1);
        MUST(cudaStreamSynchronize(stream));
    }
    plugin->destroy(instance);
    return good ? 0 : 1;
}
