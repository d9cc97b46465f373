/* SPDX-License-Identifier: Apache-2.0 */
/* Times MLA's products with weights by several builds of cuda_flash through the plugin ABI, in
 * turns, and compares their outputs with the first build's; 0 of its rows are other bits than those
 * of the same rows alone, where a build is batch invariant. usage: bench_gemm ROUNDS PLUGIN.so...
 */
#include "bench_plugin.cuh"

#include <cmath>

struct shape {
    int heads, rows, inner, columns;
    bool transposed; /* weights of a column lie side by side */
    bool shared;     /* all heads multiply the same rows */
};

static __global__ void compare(const __nv_bfloat16 *x, const __nv_bfloat16 *y, size_t count,
                               int *worst)
{
    float far = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (size_t)gridDim.x * blockDim.x) {
        float d = fabsf(__bfloat162float(x[i]) - __bfloat162float(y[i]));
        far = d <= 1e30f ? fmaxf(far, d) : 1e30f;
    }
    atomicMax(worst, __float_as_int(far));
}

static __nv_bfloat16 *reserve(size_t numbers)
{
    void *p;
    MUST(cudaMalloc(&p, numbers * 2));
    return (__nv_bfloat16 *)p;
}

/* Weights of several layers, so that none lie in the L2. */
struct subject {
    shape s;
    int layers;
    size_t a_numbers, w_numbers, out_numbers;
    __nv_bfloat16 *a, *w, *out;

    explicit subject(const shape &of) : s(of)
    {
        const size_t heads = s.heads;
        a_numbers = (s.shared ? 1 : heads) * s.rows * s.inner;
        w_numbers = heads * s.inner * s.columns, out_numbers = heads * s.rows * s.columns;
        layers = (int)(150000000 / (w_numbers * 2)) + 1;
        a = reserve(a_numbers), w = reserve(w_numbers * layers), out = reserve(out_numbers);
        random_bf16<<<1024, 256, 0, stream>>>(a, a_numbers);
        random_bf16<<<1024, 256, 0, stream>>>(w, w_numbers * layers);
    }

    ~subject()
    {
        cudaFree(a), cudaFree(w), cudaFree(out);
    }

    /* Rows first .. first + rows - 1 with a layer's weights. */
    void multiply(const struct attn_kernels *kernels, attn_instance *instance, int layer, int first,
                  int rows)
    {
        const int64_t inner = s.inner, columns = s.columns, heads = s.heads;
        int64_t a_shape[] = {heads, rows, inner}, w_shape[] = {heads, inner, columns};
        int64_t out_shape[] = {heads, rows, columns}, a_strides[] = {inner, heads * inner, 1};
        int64_t w_strides[] = {inner * columns, columns, 1};
        int64_t out_strides[] = {columns, heads * columns, 1};
        if (s.shared) {
            a_strides[0] = 0, a_strides[1] = inner;
        }
        if (s.transposed) {
            w_strides[1] = 1, w_strides[2] = inner;
        }
        struct attn_tensor x = tensor(a + first * a_strides[1], a_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor y = tensor(w + w_numbers * layer, w_shape, ATTN_CODE_BFLOAT, 16);
        struct attn_tensor z =
            tensor(out + first * out_strides[1], out_shape, ATTN_CODE_BFLOAT, 16);
        x.strides = a_strides, y.strides = w_strides, z.strides = out_strides;
        struct attn_batched_gemm_args args = {sizeof args};
        args.instance = instance, args.stream = stream, args.a = &x, args.w = &y, args.out = &z;
        MUST(kernels->batched_gemm(&args, nullptr));
    }
};

struct build {
    const struct attn_kernels *kernels;
    attn_instance *instance;
    cudaGraphExec_t graph;
    std::vector<double> times;

    void capture(subject &x)
    {
        cudaGraph_t captured;
        times.clear();
        MUST(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
        for (int i = 0; i < x.layers; i++) {
            x.multiply(kernels, instance, i, 0, x.s.rows);
        }
        MUST(cudaStreamEndCapture(stream, &captured));
        MUST(cudaGraphInstantiate(&graph, captured, 0));
        cudaGraphDestroy(captured);
    }
};

static float difference(const __nv_bfloat16 *x, const __nv_bfloat16 *y, size_t count)
{
    static int *worst;
    float far;
    if (worst == nullptr) {
        MUST(cudaMalloc(&worst, sizeof *worst));
    }
    MUST(cudaMemsetAsync(worst, 0, sizeof *worst, stream));
    compare<<<256, 256, 0, stream>>>(x, y, count, worst);
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaMemcpy(&far, worst, sizeof far, cudaMemcpyDeviceToHost));
    return far;
}

static bool check_outputs(subject &x, build &b, __nv_bfloat16 *first, int number)
{
    __nv_bfloat16 *whole = reserve(x.out_numbers);
    MUST(cudaMemsetAsync(x.out, 0xff, x.out_numbers * 2, stream));
    x.multiply(b.kernels, b.instance, 0, 0, x.s.rows);
    MUST(cudaMemcpyAsync(whole, x.out, x.out_numbers * 2, cudaMemcpyDeviceToDevice, stream));
    if (number == 0) {
        MUST(cudaMemcpyAsync(first, x.out, x.out_numbers * 2, cudaMemcpyDeviceToDevice, stream));
    }
    float far = difference(first, x.out, x.out_numbers);
    const float most = 0.01f * sqrtf((float)x.s.inner); /* sums of numbers of -1 .. 1 in bf16 */
    if (!(far <= most)) {
        printf("build %d differs by %g\n", number, far);
    }
    const int cuts[] = {0, 1, 6, 23, 100}; /* other tiles than the whole's */
    for (int i = 0; i < 5 && cuts[i] < x.s.rows; i++) {
        const int end = i < 4 && cuts[i + 1] < x.s.rows ? cuts[i + 1] : x.s.rows;
        x.multiply(b.kernels, b.instance, 0, cuts[i], end - cuts[i]);
    }
    const float alone = difference(whole, x.out, x.out_numbers);
    if (alone != 0) {
        printf("build %d: rows alone differ by %g\n", number, alone);
    }
    cudaFree(whole);
    return far <= most && alone == 0;
}

static bool time_shape(const shape &s, std::vector<build> &builds, int rounds)
{
    subject x(s);
    bool right = true;
    __nv_bfloat16 *first = reserve(x.out_numbers);
    for (build &b : builds) {
        right = check_outputs(x, b, first, (int)(&b - &builds[0])) && right;
        b.capture(x);
    }
    for (int round = 0; round < rounds; round++) {
        for (size_t turn = 0; turn < builds.size(); turn++) { /* none is always the coolest */
            build &b = builds[(turn + (size_t)round) % builds.size()];
            time_graph(b.graph, x.layers, 1, 2, b.times);
        }
    }
    printf("%d heads, %d x %d x %d%s%s:", s.heads, s.rows, s.inner, s.columns,
           s.transposed ? " transposed" : "", s.shared ? " shared" : "");
    for (build &b : builds) {
        std::sort(b.times.begin(), b.times.end());
        printf("  %.1f", b.times[b.times.size() / 2]);
        cudaGraphExecDestroy(b.graph);
    }
    const double us = builds.back().times[builds.back().times.size() / 2];
    const double bytes = 2.0 * (x.a_numbers + x.w_numbers + x.out_numbers);
    printf(" us; the last one %.0f TFLOP/s, %.0f GB/s\n",
           2.0 * s.heads * s.rows * s.inner * s.columns / us / 1e6, bytes / us / 1e3);
    cudaFree(first);
    return right;
}

int main(int argc, char **argv)
{
    const int rounds = atoi(argv[1]);
    std::vector<build> builds(argc - 2);
    for (int i = 2; i < argc; i++) {
        open_plugin(argv[i]);
        builds[i - 2].instance = instance, builds[i - 2].kernels = kernels;
    }
    MUST(cudaStreamCreate(&stream));
    bool right = true;
    for (int rows : {1, 4, 5, 16, 64, 128, 256, 512}) { /* queries absorbed, outputs projected up */
        right = time_shape({128, rows, 128, 512, false, false}, builds, rounds) && right;
        right = time_shape({128, rows, 512, 128, false, false}, builds, rounds) && right;
    }
    for (bool transposed : {true, false}) { /* keys and values of a chunk */
        right = time_shape({128, 8192, 512, 128, transposed, true}, builds, rounds) && right;
    }
    return right ? 0 : 1;
}
