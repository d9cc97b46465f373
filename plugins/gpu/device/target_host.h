/* SPDX-License-Identifier: Apache-2.0 */
/* target.h by a C++ compiler of the host, for tests: a group is a fibre per thread, and they take
 * turns at barriers and where lanes exchange values. One group runs at a time. GPU_LANES may be set
 * before. */
#ifndef GPU_DEVICE_TARGET_HOST_H
#define GPU_DEVICE_TARGET_HOST_H

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef __x86_64__
#include <ucontext.h>
#endif

#ifndef GPU_LANES
#define GPU_LANES 32
#endif

#define GPU_DEVICE static inline
#define GPU_INLINE static inline
#define GPU_CALL static inline
#define GPU_SHARED static
#define GPU_KERNEL(name, params) extern "C" void kernel_##name(const params &p)
#define GPU_HOST_THREADS 1024
#define GPU_HOST_STACK ((size_t)128 * 1024)

struct uint2 {
    uint32_t x, y;
};

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};

GPU_INLINE uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

GPU_INLINE uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

/* `generation` counts how often all of `size` threads have arrived; `line` of `file` is where the
 * first of them waits, and so must the others. */
struct host_barrier {
    uint32_t arrived, generation;
    const char *file;
    int line;
};

#ifdef __x86_64__
/* A fibre's stack while another one runs. ucontext, elsewhere, asks the kernel at every turn. */
typedef void *host_fibre;

extern "C" void host_switch_stack(void **save, void *next);
__asm__(".text\n"
        "host_switch_stack:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n");

static inline void host_switch(host_fibre *from, host_fibre *to)
{
    host_switch_stack(from, *to);
}

static inline void host_make_fibre(host_fibre *fibre, char *stack, size_t bytes, void (*enter)())
{
    /* 6 registers, where to, and a place that keeps the stack aligned as after a call */
    void **top = (void **)(stack + bytes) - 8;
    memset(top, 0, 8 * sizeof *top);
    top[6] = (void *)enter;
    *fibre = top;
}
#else
typedef ucontext_t host_fibre;

static inline void host_switch(host_fibre *from, host_fibre *to)
{
    swapcontext(from, to);
}

static inline void host_make_fibre(host_fibre *fibre, char *stack, size_t bytes, void (*enter)())
{
    getcontext(fibre);
    fibre->uc_stack.ss_sp = stack;
    fibre->uc_stack.ss_size = bytes;
    fibre->uc_link = nullptr;
    makecontext(fibre, enter, 0);
}
#endif

inline struct host_group {
    uint32_t threads, current, running, waiting, index, count;
    host_barrier all, warps[GPU_HOST_THREADS / GPU_LANES];
    uint64_t exchange[GPU_HOST_THREADS];
    bool done[GPU_HOST_THREADS];
    host_fibre fibres[GPU_HOST_THREADS], outside;
    char *stacks;
    const host_barrier *last; /* at which a thread began to wait */
    void (*body)(void *);
    void *argument;
} host;

static inline void host_next_thread()
{
    uint32_t before = host.current;
    do {
        host.current = (host.current + 1) % host.threads;
    } while (host.done[host.current]);
    if (host.current != before) {
        host_switch(&host.fibres[before], &host.fibres[host.current]);
    }
}

/* What no GPU can be asked for: a defect of the kernel, which ends the process. */
[[noreturn]] static inline void host_fail(const char *what, const host_barrier *barrier)
{
    fprintf(stderr, "thread %u of group %u: %s, %s:%d\n", host.current, host.index, what,
            barrier->file, barrier->line);
    abort();
}

static inline void host_check_progress(const host_barrier *barrier)
{
    if (host.running > 0 && host.waiting == host.running) {
        host_fail("a barrier that some threads never reach", barrier);
    }
}

static inline void host_wait(host_barrier *barrier, uint32_t size, const char *file, int line)
{
    uint32_t generation = barrier->generation;
    if (barrier->arrived > 0 && (barrier->line != line || strcmp(barrier->file, file) != 0)) {
        host_fail("a barrier while others wait at another one", barrier);
    }
    barrier->file = file;
    barrier->line = line;
    host.last = barrier;
    host.waiting++;
    if (++barrier->arrived == size) {
        barrier->arrived = 0;
        barrier->generation++;
        host.waiting -= size;
    }
    host_check_progress(barrier);
    while (barrier->generation == generation) {
        host_next_thread();
    }
}

static inline void host_enter_thread()
{
    host.body(host.argument);
    uint32_t own = host.current, next = own;
    host.done[own] = true;
    if (--host.running == 0) {
        host_switch(&host.fibres[own], &host.outside);
    }
    host_check_progress(host.last);
    while (host.done[next]) {
        next = (next + 1) % host.threads;
    }
    host.current = next;
    host_switch(&host.fibres[own], &host.fibres[next]);
}

/* body(argument) in each thread of group `index` of `count`; threads: a multiple of GPU_LANES. */
static inline void host_run_group(uint32_t threads, uint32_t index, uint32_t count,
                                  void (*body)(void *), void *argument)
{
    if (host.stacks == nullptr) {
        host.stacks = (char *)malloc(GPU_HOST_THREADS * GPU_HOST_STACK);
    }
    host.threads = host.running = threads;
    host.current = host.waiting = 0;
    host.index = index;
    host.count = count;
    host.body = body;
    host.argument = argument;
    for (uint32_t i = 0; i < threads; i++) {
        host.done[i] = false;
        host_make_fibre(&host.fibres[i], host.stacks + i * GPU_HOST_STACK, GPU_HOST_STACK,
                        host_enter_thread);
    }
    host_switch(&host.outside, &host.fibres[0]);
}

GPU_INLINE uint32_t thread_index()
{
    return host.current;
}

GPU_INLINE uint32_t group_index()
{
    return host.index;
}

GPU_INLINE uint32_t group_count()
{
    return host.count;
}

GPU_INLINE void sync_group(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    host_wait(&host.all, host.threads, file, line);
}

GPU_INLINE void sync_lanes(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    host_wait(&host.warps[host.current / GPU_LANES], GPU_LANES, file, line);
}

template <class T> GPU_INLINE T lane_read(T x, int32_t lane)
{
    uint32_t own = host.current, first = own & ~(uint32_t)(GPU_LANES - 1);
    memcpy(&host.exchange[own], &x, sizeof x);
    sync_lanes();
    T other;
    memcpy(&other, &host.exchange[first + ((uint32_t)lane & (GPU_LANES - 1))], sizeof other);
    sync_lanes();
    return other;
}

GPU_INLINE int32_t own_lane()
{
    return (int32_t)(host.current & (GPU_LANES - 1));
}

template <class T> GPU_INLINE T lane_xor(T x, int32_t distance)
{
    return lane_read(x, own_lane() ^ distance);
}

template <class T> GPU_INLINE T lane_up(T x, int32_t distance)
{
    return lane_read(x, own_lane() >= distance ? own_lane() - distance : own_lane());
}

template <class T> GPU_INLINE T lane_down(T x, int32_t distance)
{
    return lane_read(x, own_lane() + distance < GPU_LANES ? own_lane() + distance : own_lane());
}

GPU_INLINE bool any_lane(bool x)
{
    int32_t any = x;
    for (int32_t d = GPU_LANES / 2; d > 0; d >>= 1) {
        any |= lane_xor(any, d);
    }
    return any != 0;
}

GPU_INLINE int32_t atomic_add(int32_t *at, int32_t x)
{
    int32_t before = *at;
    *at += x;
    return before;
}

GPU_INLINE int32_t atomic_add_shared(int32_t *at, int32_t x)
{
    return atomic_add(at, x);
}

GPU_INLINE int32_t atomic_max(int32_t *at, int32_t x)
{
    int32_t before = *at;
    *at = before > x ? before : x;
    return before;
}

GPU_INLINE int32_t add_and_publish(int32_t *counter, int32_t x)
{
    return atomic_add(counter, x);
}

template <class T> GPU_INLINE T same_in_lanes(const T &from)
{
    return from;
}

GPU_INLINE void release_stores()
{
}

GPU_INLINE void acquire_loads()
{
}

template <class TO, class FROM> GPU_INLINE TO host_bits(FROM x)
{
    static_assert(sizeof(TO) == sizeof(FROM), "the same bits");
    TO to;
    memcpy(&to, &x, sizeof to);
    return to;
}

GPU_INLINE uint32_t float_bits(float x)
{
    return host_bits<uint32_t>(x);
}

GPU_INLINE float bits_float(uint32_t x)
{
    return host_bits<float>(x);
}

GPU_INLINE uint64_t double_bits(double x)
{
    return host_bits<uint64_t>(x);
}

GPU_INLINE uint16_t half_of(float x)
{
    uint32_t bits = float_bits(x), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
    if (size >= 0x47800000) { /* 65536 and more, NaN */
        return (uint16_t)(sign | (size > 0x7f800000 ? 0x7e00 : 0x7c00));
    }
    if (size < 0x38800000) { /* multiples of 2^-24, which adding 0.5 rounds to */
        return (uint16_t)(sign | (float_bits(bits_float(size) + 0.5f) - float_bits(0.5f)));
    }
    size += 0xfff + (size >> 13 & 1);
    return (uint16_t)(sign | ((size >> 13) - (112u << 10)));
}

GPU_INLINE float float_of_half_bits(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, size = bits & 0x7fff;
    if (size >= 0x7c00) {
        return bits_float(sign | 0x7f800000u | (size & 0x3ff) << 13);
    }
    float x = size < 0x400 ? (float)size * 0x1p-24f : bits_float((size << 13) + (112u << 23));
    return sign != 0 ? -x : x;
}

#endif
