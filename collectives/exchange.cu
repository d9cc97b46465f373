// SPDX-License-Identifier: Apache-2.0
#include "exchange.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

static constexpr size_t PART_PACKETS = EXCHANGE_MAX_BYTES / EXCHANGE_UNIT;

struct alignas(16) packet {
    uint64_t content, exchange;
};

extern "C" size_t exchange_window_bytes(int32_t ranks)
{
    return 2 * (size_t)ranks * PART_PACKETS * sizeof(packet);
}

/* Where rank `from` writes in the window of rank `to`. */
static __device__ __forceinline__ packet *part(const exchange_window &w, int32_t to, int32_t from,
                                               uint64_t exchange)
{
    return (packet *)w.of_rank[to] + ((exchange & 1) * w.ranks + from) * PART_PACKETS;
}

static __device__ __forceinline__ void send(packet *to, uint64_t content, uint64_t exchange)
{
    asm volatile("{\n\t.reg .b128 p;\n\tmov.b128 p, {%1, %2};\n\t"
                 "st.relaxed.sys.global.b128 [%0], p;\n\t}" ::"l"(to),
                 "l"(content), "l"(exchange)
                 : "memory");
}

static __device__ __forceinline__ packet look(const packet *at)
{
    packet found;
    asm volatile("{\n\t.reg .b128 p;\n\tld.relaxed.sys.global.b128 p, [%2];\n\t"
                 "mov.b128 {%0, %1}, p;\n\t}"
                 : "=l"(found.content), "=l"(found.exchange)
                 : "l"(at)
                 : "memory");
    return found;
}

static __device__ __forceinline__ uint64_t nanoseconds()
{
    uint64_t now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

/* The contents of two packets of a rank. */
struct contents {
    uint64_t first, second;
};

/* Waits for two packets. A rank that does not come ends the kernel, and with it the context: the
 * host reads which one it was. */
static __device__ __forceinline__ contents receive(const exchange_window &w, const packet *at,
                                                   const packet *next, int32_t from,
                                                   uint64_t exchange)
{
    packet x = look(at), y = look(next);
    uint64_t begin = 0;
    for (uint32_t i = 1; x.exchange != exchange || y.exchange != exchange; i++) {
        x = look(at), y = look(next);
        if (i % 4096 != 0) {
            continue;
        }
        const uint64_t now = nanoseconds();
        begin = begin == 0 ? now : begin;
        if (now - begin > w.patience) {
            *(volatile int32_t *)w.missing = from + 1;
            __threadfence_system();
            __trap();
        }
    }
    return {x.content, y.content};
}

/* The number of this exchange; after it, what earlier kernels wrote can be read. */
static __device__ __forceinline__ uint64_t begin_exchange(const exchange_window &w)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
    return *(volatile unsigned long long *)&w.done[blockIdx.x] + 1;
}

static __device__ __forceinline__ void end_exchange(const exchange_window &w, uint64_t exchange)
{
    __syncthreads();
    if (threadIdx.x == 0) {
        w.done[blockIdx.x] = exchange;
    }
}

/* The row [heads of all ranks] of rank `rank` for its own row [heads]. */
static __device__ __forceinline__ uint32_t place(const exchange_sizes &s, uint32_t row,
                                                 uint32_t rank, uint32_t ranks)
{
    const uint32_t group = row / s.group; /* over all tokens: Hk groups each */
    return (group * ranks + rank) * s.group + (row - group * s.group);
}

static __device__ __forceinline__ uint8_t *
unit_at(const exchange_rows &rows, const exchange_sizes &s, uint32_t row, uint32_t unit)
{
    const uint32_t t = row / s.heads, h = row - t * s.heads;
    return rows.data + t * rows.row + h * rows.head + (size_t)unit * EXCHANGE_UNIT;
}

static __device__ __forceinline__ uint64_t load_unit(const uint8_t *at, int32_t unaligned,
                                                     int32_t element)
{
    if (!unaligned) {
        return *(const uint64_t *)at;
    }
    if (element == 4) {
        return *(const uint32_t *)at | (uint64_t) * (const uint32_t *)(at + 4) << 32;
    }
    uint64_t unit = 0;
    for (int32_t i = 0; i < 4; i++) {
        unit |= (uint64_t)((const uint16_t *)at)[i] << 16 * i;
    }
    return unit;
}

static __device__ __forceinline__ void store_unit(uint8_t *at, uint64_t unit, int32_t unaligned,
                                                  int32_t element)
{
    if (!unaligned) {
        *(uint64_t *)at = unit;
    } else if (element == 4) {
        ((uint32_t *)at)[0] = (uint32_t)unit;
        ((uint32_t *)at)[1] = (uint32_t)(unit >> 32);
    } else {
        for (int32_t i = 0; i < 4; i++) {
            ((uint16_t *)at)[i] = (uint16_t)(unit >> 16 * i);
        }
    }
}

/* A thread's units. */
#define UNITS_OF_THREAD(i, count)                                                                  \
    for (uint32_t i = blockIdx.x * EXCHANGE_THREADS + threadIdx.x; i < (count);                    \
         i += EXCHANGE_BLOCKS * EXCHANGE_THREADS)

/* Loops over ranks are not unrolled: a thread runs them once, and each instruction is a miss. */
static __global__ void __launch_bounds__(EXCHANGE_THREADS)
    gather_heads(const __grid_constant__ exchange_gather a)
{
    const exchange_window &w = a.window;
    const exchange_sizes &s = a.sizes;
    const uint64_t exchange = begin_exchange(w);
    const uint32_t per_row = s.units[0] + s.units[1], count = s.tokens * s.heads * per_row;
    const auto keep = [&](uint32_t row, uint32_t unit, int32_t rank, uint64_t content) {
        const int32_t which = unit >= s.units[0];
        const uint32_t to = place(s, row, rank, w.ranks);
        ((uint64_t *)a.all[which])[(size_t)to * s.units[which] + unit - which * s.units[0]] =
            content;
    };
    UNITS_OF_THREAD(i, count)
    {
        const uint32_t row = i / per_row, unit = i - row * per_row;
        const int32_t which = unit >= s.units[0];
        const uint64_t content = load_unit(unit_at(a.own[which], s, row, unit - which * s.units[0]),
                                           s.unaligned[which], s.element);
#pragma unroll 1
        for (int32_t rank = 0; rank < w.ranks; rank++) {
            if (rank != w.rank) {
                send(part(w, rank, w.rank, exchange) + i, content, exchange);
            }
        }
        keep(row, unit, w.rank, content);
    }
    UNITS_OF_THREAD(i, count)
    {
        const uint32_t row = i / per_row, unit = i - row * per_row;
#pragma unroll 1
        for (int32_t rank = 0; rank < w.ranks; rank++) {
            if (rank != w.rank) {
                const packet *at = part(w, w.rank, rank, exchange) + i;
                keep(row, unit, rank, receive(w, at, at, rank, exchange).first);
            }
        }
    }
    end_exchange(w, exchange);
}

/* The numbers of a unit. */
template <int KIND> struct numbers {
    static constexpr int count = KIND == EXCHANGE_F32 ? 2 : 4;
    float x[count];

    __device__ __forceinline__ void read(uint64_t unit)
    {
        for (int i = 0; i < count; i++) {
            if constexpr (KIND == EXCHANGE_F32) {
                x[i] = __uint_as_float((uint32_t)(unit >> 32 * i));
            } else if constexpr (KIND == EXCHANGE_BF16) {
                x[i] = __uint_as_float((uint32_t)(unit >> 16 * i) << 16);
            } else {
                x[i] = __half2float(__ushort_as_half((uint16_t)(unit >> 16 * i)));
            }
        }
    }

    __device__ __forceinline__ uint64_t written() const
    {
        uint64_t unit = 0;
        for (int i = 0; i < count; i++) {
            if constexpr (KIND == EXCHANGE_F32) {
                unit |= (uint64_t)__float_as_uint(x[i]) << 32 * i;
            } else if constexpr (KIND == EXCHANGE_BF16) {
                unit |= (uint64_t)__bfloat16_as_ushort(__float2bfloat16(x[i])) << 16 * i;
            } else {
                unit |= (uint64_t)__half_as_ushort(__float2half(x[i])) << 16 * i;
            }
        }
        return unit;
    }
};

/* What was merged so far: sum of w x, sum of w, under the largest log-sum-exp. */
template <int KIND> struct merged {
    numbers<KIND> sum = {};
    float weight = 0, most = -INFINITY;

    /* An empty part counts nothing, whatever its output; a NaN of lse makes NaN of all. */
    __device__ __forceinline__ void add(uint64_t unit, float lse)
    {
        if (isinf(lse)) {
            return;
        }
        const float next = fmaxf(most, lse), before = expf(most - next), now = expf(lse - next);
        numbers<KIND> other;
        other.read(unit);
        for (int i = 0; i < numbers<KIND>::count; i++) {
            sum.x[i] = sum.x[i] * before + other.x[i] * now;
        }
        weight = weight * before + now;
        most = next;
    }

    __device__ __forceinline__ uint64_t result() const
    {
        numbers<KIND> mean;
        for (int i = 0; i < numbers<KIND>::count; i++) {
            mean.x[i] = weight == 0 ? 0 : sum.x[i] / weight;
        }
        return mean.written();
    }
};

template <int KIND>
static __global__ void __launch_bounds__(EXCHANGE_THREADS)
    merge_heads(const __grid_constant__ exchange_merge a)
{
    const exchange_window &w = a.window;
    const exchange_sizes &s = a.sizes;
    const uint64_t exchange = begin_exchange(w);
    const uint32_t units = s.units[0], per_row = units + 1, rows = s.tokens * s.heads;
    const auto unit_of = [&](uint32_t row, uint32_t unit, int32_t rank) {
        return ((const uint64_t *)a.all)[(size_t)place(s, row, rank, w.ranks) * units + unit];
    };
    const auto lse_of = [&](uint32_t row, int32_t rank) {
        const uint32_t t = row / s.heads, head = place(s, row - t * s.heads, rank, w.ranks);
        return a.all_lse[(size_t)head * s.tokens + t];
    };
    UNITS_OF_THREAD(i, rows * per_row)
    {
        const uint32_t row = i / per_row, unit = i - row * per_row;
#pragma unroll 1
        for (int32_t rank = 0; rank < w.ranks; rank++) {
            if (rank != w.rank) {
                send(part(w, rank, w.rank, exchange) + i,
                     unit < units ? unit_of(row, unit, rank) : __float_as_uint(lse_of(row, rank)),
                     exchange);
            }
        }
    }
    UNITS_OF_THREAD(i, rows * units)
    {
        const uint32_t row = i / units, unit = i - row * units;
        const uint32_t t = row / s.heads, h = row - t * s.heads;
        /* what is here is read before others' parts are waited for */
        const uint64_t here = unit_of(row, unit, w.rank);
        const float here_lse = lse_of(row, w.rank);
        uint64_t own = 0;
        float own_lse = -INFINITY;
        if (a.own.data != nullptr) {
            own = load_unit(unit_at(a.own, s, row, unit), s.unaligned[0], s.element);
            own_lse = a.own_lse.data[h * a.own_lse.head + t * a.own_lse.row];
        }
        merged<KIND> m;
#pragma unroll 1
        for (int32_t rank = 0; rank < w.ranks; rank++) {
            contents x = {here, __float_as_uint(here_lse)};
            if (rank != w.rank) {
                const packet *from = part(w, w.rank, rank, exchange) + (size_t)row * per_row;
                x = receive(w, from + unit, from + units, rank, exchange);
            }
            m.add(x.first, __uint_as_float((uint32_t)x.second));
        }
        m.add(own, own_lse);
        store_unit(unit_at(a.out, s, row, unit), m.result(), s.unaligned[1], s.element);
        if (unit == 0 && a.lse.data != nullptr) {
            a.lse.data[h * a.lse.head + t * a.lse.row] =
                m.weight == 0 ? -INFINITY : m.most + logf(m.weight);
        }
    }
    end_exchange(w, exchange);
}

template <class T> static cudaError_t launch(void (*kernel)(T), const T *a, cudaStream_t stream)
{
    cudaLaunchAttribute attribute;
    cudaLaunchConfig_t config = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.gridDim = dim3(EXCHANGE_BLOCKS);
    config.blockDim = dim3(EXCHANGE_THREADS);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = a->window.overlaps ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, *a);
}

typedef void merge_kernel(exchange_merge);

static merge_kernel *const merges[EXCHANGE_KINDS] = {
    merge_heads<EXCHANGE_F32>, merge_heads<EXCHANGE_BF16>, merge_heads<EXCHANGE_F16>};

extern "C" cudaError_t exchange_load()
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, gather_heads);
    for (int32_t i = 0; i < EXCHANGE_KINDS && error == cudaSuccess; i++) {
        error = cudaFuncGetAttributes(&attributes, merges[i]);
    }
    return error;
}

extern "C" cudaError_t exchange_launch_gather(const exchange_gather *a, cudaStream_t stream)
{
    return launch(gather_heads, a, stream);
}

extern "C" cudaError_t exchange_launch_merge(const exchange_merge *a, cudaStream_t stream)
{
    return launch(merges[a->kind], a, stream);
}
