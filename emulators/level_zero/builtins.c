/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels of SPIR-V call, with subgroups of LANES, for one group at a time on the host: a
 * fibre per thread. A thread runs up to where its subgroup exchanges or its group waits; then the
 * subgroup's next one does, and at a barrier of the group its next subgroup. So every thread
 * arrives once in each turn, and a thread that is called again finds what the others have left.
 * Threads that do not all come the same way, which a GPU would not forgive, are found and end the
 * launch. */
#include <immintrin.h>
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#ifndef LANES
#define LANES 32
#endif
#define MAX_THREADS 1024
#define STACK_BYTES ((size_t)256 * 1024)
#define EXPORTED __attribute__((visibility("default")))

struct fibre {
    void *stack; /* its pointer while another one runs */
    uint32_t exchanges, barriers;
    int32_t done;
};

static struct fibre fibres[MAX_THREADS];
static void *outside;
static char *stacks;
static uint32_t num_threads, current, num_done, group, num_groups;
static int32_t values[2][MAX_THREADS]; /* two exchanges use them in turn */
static void (*kernel)(const void *);
static const void *arguments;
static const char *defect;

void switch_stack(void **save, void *next);
__asm__(".text\n"
        "switch_stack:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n"
        "    pushq %r15\n"
        "    movq %rsp, (%rdi)\n    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n");

static void go_to(uint32_t next)
{
    uint32_t before = current;
    current = next;
    if (next != before) {
        switch_stack(&fibres[before].stack, fibres[next].stack);
    }
}

static uint32_t next_subgroup(void)
{
    return (current / LANES + 1) * LANES % num_threads;
}

/* Ends the launch: the other fibres are left as they are. */
static void give_up(const char *text)
{
    void *unused;
    defect = text;
    switch_stack(&unused, outside);
}

static void enter(void)
{
    kernel(arguments);
    fibres[current].done = 1;
    if (++num_done == num_threads) {
        give_up(NULL);
    }
    uint32_t next = current % LANES != LANES - 1 ? current + 1 : next_subgroup();
    if (fibres[next].done) {
        give_up("some threads have ended, others wait for them");
    }
    go_to(next);
}

/* NULL, or how the threads of a group went apart. */
EXPORTED const char *run_kernel(void (*entry)(const void *), const void *params, uint32_t threads,
                                uint32_t groups)
{
    if (stacks == NULL) {
        stacks = mmap(NULL, MAX_THREADS * STACK_BYTES, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (stacks == MAP_FAILED || threads > MAX_THREADS || threads % LANES != 0) {
        return "no stacks for so many threads";
    }
    kernel = entry;
    arguments = params;
    num_threads = threads;
    num_groups = groups;
    for (group = 0; group < groups; group++) {
        for (uint32_t t = 0; t < threads; t++) {
            /* 6 registers, where to, and a place that keeps the stack aligned as after a call */
            void **top = (void **)(stacks + (t + 1) * STACK_BYTES) - 8;
            memset(top, 0, 8 * sizeof *top);
            top[6] = (void *)enter;
            fibres[t] = (struct fibre){.stack = top};
        }
        num_done = current = 0;
        switch_stack(&outside, fibres[0].stack);
        if (defect != NULL) {
            const char *text = defect;
            defect = NULL;
            return text;
        }
    }
    return NULL;
}

/* All lanes have written their values when this returns. */
static void exchange(int32_t value)
{
    struct fibre *own = &fibres[current];
    uint32_t first = current / LANES * LANES, number = own->exchanges++;
    values[number & 1][current] = value;
    go_to(first + (current + 1) % LANES);
    uint32_t last = fibres[first + (current + LANES - 1) % LANES].exchanges;
    if (last != number + 1 && last != number + 2) {
        give_up("lanes of a subgroup do not exchange together");
    }
}

int32_t _Z23intel_sub_group_shuffleij(int32_t value, uint32_t lane)
{
    uint32_t number = fibres[current].exchanges;
    exchange(value);
    return values[number & 1][current / LANES * LANES + lane % LANES];
}

int32_t _Z13sub_group_anyi(int32_t value)
{
    uint32_t number = fibres[current].exchanges, first = current / LANES * LANES;
    int32_t any = 0;
    exchange(value);
    for (uint32_t lane = 0; lane < LANES; lane++) {
        any |= values[number & 1][first + lane] != 0;
    }
    return any;
}

#if LANES == 16
/* D [8, 16] += A [8, 16] B [16, 16] of cl_intel_subgroup_matrix_multiply_accumulate: lane l has
 * column l of A (an element a row), of B (rows 2 i and 2 i + 1 in its i-th int) and of D. */
typedef short short8 __attribute__((ext_vector_type(8)));
typedef int int8 __attribute__((ext_vector_type(8)));
typedef float float8 __attribute__((ext_vector_type(8)));

static short8 parts[2][MAX_THREADS]; /* parts of A; two products use them in turn */

static float number_of(uint16_t bits, int is_bf16)
{
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return is_bf16 ? x : _cvtsh_ss(bits);
}

static float8 multiply(short8 a, int8 b, float8 d, int is_bf16)
{
    uint32_t number = fibres[current].exchanges, first = current / LANES * LANES;
    parts[number & 1][current] = a;
    exchange(0);
    for (uint32_t k = 0; k < 16; k++) {
        short8 column = parts[number & 1][first + k];
        float x = number_of((uint16_t)((uint32_t)b[k / 2] >> k % 2 * 16), is_bf16);
        for (int row = 0; row < 8; row++) {
            d[row] += number_of((uint16_t)column[row], is_bf16) * x;
        }
    }
    return d;
}

float8 _Z40intel_sub_group_bf16_bf16_matrix_mad_k16Dv8_sDv8_iDv8_f(short8 a, int8 b, float8 d)
{
    return multiply(a, b, d, 1);
}

float8 _Z38intel_sub_group_f16_f16_matrix_mad_k16Dv8_sDv8_iDv8_f(short8 a, int8 b, float8 d)
{
    return multiply(a, b, d, 0);
}
#endif

void _Z17sub_group_barrierj12memory_scope(uint32_t flags, uint32_t scope)
{
    exchange(0);
}

void _Z18work_group_barrierj12memory_scope(uint32_t flags, uint32_t scope)
{
    uint32_t number = fibres[current].barriers++;
    go_to(current % LANES != LANES - 1 ? current + 1 : next_subgroup());
    for (uint32_t t = 0; t < num_threads; t += LANES) {
        if (fibres[t].barriers != number + 1 && fibres[t].barriers != number + 2) {
            give_up("threads of a group wait at different barriers");
        }
    }
}

int32_t _Z25atomic_fetch_add_explicitPU3AS4VU7_Atomicii12memory_order12memory_scope(
    _Atomic int32_t *at, int32_t x, int32_t o, int32_t s)
{
    return atomic_fetch_add(at, x);
}

int32_t _Z25atomic_fetch_max_explicitPU3AS4VU7_Atomicii12memory_order12memory_scope(
    _Atomic int32_t *at, int32_t x, int32_t o, int32_t s)
{
    int32_t before = atomic_load(at);
    while (before < x && !atomic_compare_exchange_weak(at, &before, x)) {
    }
    return before;
}

void _Z22atomic_work_item_fencej12memory_order12memory_scope(uint32_t flags, int32_t order,
                                                             int32_t scope)
{
}

void _Z15vstore_half_rtefmPU3AS4Dh(float x, uint64_t offset, uint16_t *to)
{
    to[offset] = _cvtss_sh(x, 0);
}

/* Builtins that are one expression. */
#define VALUE(result, symbol, parameters, value)                                                   \
    result symbol parameters                                                                       \
    {                                                                                              \
        return value;                                                                              \
    }
VALUE(double, _Z4fabsd, (double x), fabs(x))
VALUE(double, _Z4sqrtd, (double x), sqrt(x))
VALUE(double, _Z5floord, (double x), floor(x))
VALUE(double, _Z5roundd, (double x), round(x))
VALUE(double, _Z4fmaxdd, (double x, double y), fmax(x, y))
VALUE(double, _Z4fmindd, (double x, double y), fmin(x, y))
VALUE(float, _Z3expf, (float x), expf(x))
VALUE(float, _Z4exp2f, (float x), exp2f(x))
VALUE(float, _Z11native_exp2f, (float x), exp2f(x))
VALUE(float, _Z3logf, (float x), logf(x))
VALUE(float, _Z4fabsf, (float x), fabsf(x))
VALUE(float, _Z5floorf, (float x), floorf(x))
VALUE(float, _Z4rintf, (float x), rintf(x))
VALUE(float, _Z4sqrtf, (float x), sqrtf(x))
VALUE(float, _Z4tanhf, (float x), tanhf(x))
VALUE(float, _Z5roundf, (float x), roundf(x))
VALUE(float, _Z4fmaxff, (float x, float y), fmaxf(x, y))
VALUE(float, _Z4fminff, (float x, float y), fminf(x, y))
VALUE(float, _Z3fmafff, (float a, float b, float c), fmaf(a, b, c))
VALUE(int32_t, _Z3absi, (int32_t x), x < 0 ? -x : x)
VALUE(int32_t, _Z3maxii, (int32_t a, int32_t b), a > b ? a : b)
VALUE(int32_t, _Z3minii, (int32_t a, int32_t b), a < b ? a : b)
VALUE(int32_t, _Z5isinff, (float x), isinf(x) != 0)
VALUE(int32_t, _Z5isnand, (double x), isnan(x) != 0)
VALUE(int32_t, _Z5isnanf, (float x), isnan(x) != 0)
VALUE(int32_t, _Z7signbitd, (double x), signbit(x) != 0)
VALUE(int32_t, _Z7signbitf, (float x), signbit(x) != 0)
VALUE(int32_t, _Z8isfinited, (double x), isfinite(x) != 0)
VALUE(int32_t, _Z8isfinitef, (float x), isfinite(x) != 0)
VALUE(uint64_t, _Z12get_local_idj, (uint32_t dimension), dimension == 0 ? current : 0)
VALUE(uint64_t, _Z12get_group_idj, (uint32_t dimension), dimension == 0 ? group : 0)
VALUE(uint64_t, _Z14get_num_groupsj, (uint32_t dimension), dimension == 0 ? num_groups : 1)
VALUE(float, _Z10vload_halfmPU3AS4KDh, (uint64_t offset, const uint16_t *from),
      _cvtsh_ss(from[offset]))
