/* SPDX-License-Identifier: Apache-2.0 */
/* Small kernels for test_isa.c: arithmetic whose exact results are known, and one defect each that
 * the interpreter has to catch. */
#define DEVICE __attribute__((device))
#define KERNEL                                                                                     \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(128, 128))) void
#define SHARED static __attribute__((shared))

struct params {
    const float *a, *b;
    float *out;
    int count;
};

static DEVICE int thread()
{
    return __builtin_amdgcn_workitem_id_x();
}

static DEVICE void barrier()
{
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

KERNEL divide(params p)
{
    int i = thread() + 128 * __builtin_amdgcn_workgroup_id_x();
    if (i < p.count) {
        p.out[i] = p.a[i] / p.b[i];
        p.out[p.count + i] = (float)((double)p.a[i] / (double)p.b[i]);
        p.out[2 * p.count + i] = __builtin_sqrtf(p.b[i]);
        p.out[3 * p.count + i] = (float)((long)(p.a[i] * 1e6f) / (long)(i + 1));
        p.out[4 * p.count + i] = (float)((int)(p.a[i] * 1e6f) % (i + 1));
        p.out[5 * p.count + i] = (float)(_Float16)p.a[i];
    }
}

/* 3 a + b and a b + 3 by the instructions with a literal. */
KERNEL literals(params p)
{
    int t = thread();
    float a = p.a[t], b = p.b[t], x, y;
#ifdef __gfx90a__
    asm volatile("v_madmk_f32 %0, %1, 0x40400000, %2" : "=v"(x) : "v"(a), "v"(b));
    asm volatile("v_madak_f32 %0, %1, %2, 0x40400000" : "=v"(y) : "v"(a), "v"(b));
#else
    asm volatile("v_fmamk_f32 %0, %1, 0x40400000, %2" : "=v"(x) : "v"(a), "v"(b));
    asm volatile("v_fmaak_f32 %0, %1, %2, 0x40400000" : "=v"(y) : "v"(a), "v"(b));
#endif
    p.out[t] = x;
    p.out[128 + t] = y;
}

#if defined(__gfx90a__) || defined(__gfx942__)
typedef float two __attribute__((ext_vector_type(2)));

/* b of the first pair, a of the second; then a and b. */
KERNEL words(params p)
{
    int t = thread();
    two x = {p.a[t], p.b[t]}, y = {p.a[t] + 1.0f, p.b[t] + 1.0f}, crossed, straight;
    asm volatile("v_pk_mov_b32 %0, %1, %2 op_sel:[1,0]" : "=v"(crossed) : "v"(x), "v"(y));
    asm volatile("v_pk_mov_b32 %0, %1, %2 op_sel:[0,1]" : "=v"(straight) : "v"(x), "v"(y));
    p.out[t] = crossed.x;
    p.out[128 + t] = crossed.y;
    p.out[256 + t] = straight.x;
    p.out[384 + t] = straight.y;
}
#endif

/* Sums of a wave by its neighbours, and a tile through LDS. */
KERNEL exchange(params p)
{
    SHARED float tile[128];
    int t = thread();
    float x = p.a[t];
    for (int d = 1; d < 32; d <<= 1) {
        x += __builtin_bit_cast(
            float, __builtin_amdgcn_ds_bpermute((t ^ d) << 2, __builtin_bit_cast(int, x)));
    }
    tile[t] = x;
    barrier();
    p.out[t] = tile[127 - t] + p.b[t];
}

KERNEL out_of_bounds(params p)
{
    p.out[thread() * 6] = 1.0f;
}

KERNEL race(params p)
{
    SHARED float tile[128];
    int t = thread();
    tile[t] = p.a[t];
    barrier();
    float x = tile[127 - t];
    tile[t] = x + p.b[t]; /* another wave may not have read it */
    barrier();
    p.out[t] = tile[t];
}

KERNEL never_written(params p)
{
    SHARED float tile[128];
    int t = thread();
    if (t < 100) {
        tile[t] = p.a[t];
    }
    barrier();
    p.out[t] = tile[t];
}

KERNEL beyond_lds(params p)
{
    SHARED float tile[128];
    int t = thread();
    tile[t + p.count] = p.a[t];
    barrier();
    p.out[t] = tile[t];
}

KERNEL reads_out_of_bounds(params p)
{
    p.out[thread()] = p.a[thread() + 65536];
}

KERNEL writes_to_read_only(params p)
{
    ((float *)p.a)[thread()] = 1.0f;
}

KERNEL race_of_writes(params p)
{
    SHARED float tile[64];
    int t = thread();
    tile[t & 31] = p.a[t];
    barrier();
    p.out[t] = tile[t & 31];
}

/* Registers that nothing has written. */
KERNEL unset_value(params p)
{
    float x;
    asm volatile("" : "=v"(x));
    p.out[thread()] = x;
}

KERNEL unset_address(params p)
{
    int x;
    asm volatile("" : "=v"(x));
    p.out[x & 127] = (float)thread(); /* whose register is not taken for x */
}

KERNEL unset_condition(params p)
{
    int x;
    asm volatile("" : "=s"(x));
    if (x > 3) {
        asm volatile("s_nop 0"); /* a branch, not a choice */
        p.out[thread()] = (float)__builtin_amdgcn_workgroup_id_x();
    }
}

KERNEL unset_lanes(params p)
{
    float x;
    asm volatile("" : "=v"(x));
    if (x > 3.0f) {
        p.out[thread()] = 1.0f;
    }
}

#ifdef WITH_SCRATCH
KERNEL scratch(params p)
{
    volatile float stack[2048];
    for (int i = 0; i < 2048; i++) {
        stack[i] = p.a[i];
    }
    p.out[thread()] = stack[p.count & 2047];
}
#endif
