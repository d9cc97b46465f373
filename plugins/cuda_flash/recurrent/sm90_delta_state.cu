/* SPDX-License-Identifier: Apache-2.0 */
#include <cuda.h>

#include "sm90_delta_overlap.cuh"
#include "sm90_delta_state128.cuh"
#include "sm90_delta_state32.cuh"
#include "sm90_launch.cuh"

/* Long requests are prepared next to their walks: at most so many fifths of all multiprocessors
 * walk, and for each of all there are so many parts to prepare. */
#define MOST_WALKS 3
#define LEAST_PARTS 4
#define WIDE_ROWS (WIDE_TEAMS * GROUP_ROWS)
#define NARROW_LENGTH 8192 /* tokens of a request: longer ones walk by 64 rows, see is_narrow */

constexpr int wide_size = sizeof(wide_memory) + (WIDE_STAGES - 1) * sizeof(chunk_stage);
constexpr int prepare_size = PREPARE_GROUPS * sizeof(prepare_memory);
static_assert(wide_size <= 227 * 1024 && prepare_size <= 227 * 1024, "shared memory of a CTA");
static_assert(FIRST_GROUPS <= LEAST_PARTS, "the first parts are there");
constexpr int whole_size = sizeof(whole_memory);
static_assert(whole_size <= 227 * 1024, "shared memory of a CTA");
constexpr int narrow_size = sizeof(narrow_memory);
static_assert(narrow_size <= 227 * 1024 - sizeof(walk_item), "shared memory of a CTA");
static_assert(prepare_size > 114 * 1024, "two CTAs that prepare would share a multiprocessor");

static cudaError_t allow(void (*kernel)(sm80_delta_params), int bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

static cudaError_t make_ready()
{
    cudaError_t error = allow(delta_walk_wide<false>, wide_size);
    error = error ? error : allow(delta_walk_wide<true>, wide_size);
    error = error ? error : allow(delta_walk_narrow<false>, narrow_size);
    error = error ? error : allow(delta_walk_narrow<true>, narrow_size);
    error = error ? error : allow(delta_walk_whole<false>, whole_size);
    error = error ? error : allow(delta_walk_whole<true>, whole_size);
    return error ? error : allow(delta_prepare_abreast, prepare_size);
}

/* Whether a whole value head can be walked in a CTA, whose warps read 16 bytes of inputs at a time:
 * the usual layer's. */
static bool takes_whole(const struct gpu_delta_params &p)
{
    const struct gpu_matrix &w = p.conv_weight;
    uint64_t inputs = (uint64_t)(uintptr_t)p.mixed.data | (uint64_t)p.mixed.row;
    return p.conv_width == CHUNK_TAPS && p.conv_silu && p.head_size_v == WHOLE_TEAMS * GROUP_ROWS &&
           p.num_k_heads * p.head_size_k % 4 == 0 && inputs % 16 == 0 && w.row == CHUNK_TAPS &&
           w.column == 1 && (uint64_t)(uintptr_t)w.data % 8 == 0;
}

static cudaError_t launch_whole(sm80_delta_params &a, cudaStream_t stream)
{
    a.slices = 1;
    auto kernel = a.p.checkpoint_interval > 0 ? delta_walk_whole<true> : delta_walk_whole<false>;
    return launch_behind(kernel, a, (unsigned)sm80_delta_most_requests(&a) * a.p.num_v_heads,
                         WHOLE_THREADS, whole_size, stream);
}

static cudaError_t launch_wide(const sm80_delta_params &a, unsigned walks, cudaStream_t stream)
{
    auto kernel = a.p.checkpoint_interval > 0 ? delta_walk_wide<true> : delta_walk_wide<false>;
    return launch_behind(kernel, a, walks, WIDE_THREADS, wide_size, stream);
}

/* Next to CTAs that prepare, multiprocessors are not free in pairs. */
static cudaError_t launch_narrow(const sm80_delta_params &a, unsigned walks, cudaStream_t stream)
{
    auto kernel = a.p.checkpoint_interval > 0 ? delta_walk_narrow<true> : delta_walk_narrow<false>;
    bool apart = a.preparers > 0 || a.slices % NARROW_CLUSTER != 0;
    return launch_behind(kernel, a, walks, NARROW_THREADS, narrow_size, stream,
                         apart ? 1 : NARROW_CLUSTER);
}

static int32_t slices_of(const sm80_delta_params &a, int32_t rows)
{
    return (a.p.head_size_v + rows - 1) / rows;
}

static cudaError_t launch_few(const sm80_delta_params &a, unsigned walks, bool narrow,
                              cudaStream_t stream)
{
    return narrow ? launch_narrow(a, walks, stream) : launch_wide(a, walks, stream);
}

static cudaError_t launch_abreast(const struct gpu_device *device, sm80_delta_params &a,
                                  unsigned walks, bool narrow, cudaStream_t stream)
{
    int64_t parts = (int64_t)a.num_chunks * a.p.num_k_heads;
    a.preparers = device->num_sms - (int32_t)walks;
    delta_clear<<<(unsigned)((parts + CLEAR_THREADS - 1) / CLEAR_THREADS), CLEAR_THREADS, 0,
                  stream>>>(a);
    cudaError_t error = cudaGetLastError();
    a.end_part = FIRST_GROUPS * device->num_sms;
    error = error ? error
                  : launch_behind(delta_prepare_abreast, a, (unsigned)device->num_sms,
                                  FIRST_GROUPS * PREPARE_THREADS,
                                  FIRST_GROUPS * (int)sizeof(prepare_memory), stream);
    a.first_part = a.end_part, a.end_part = (int32_t)parts;
    error = error ? error
                  : launch_behind(delta_prepare_abreast, a, (unsigned)a.preparers, WIDE_THREADS,
                                  prepare_size, stream);
    return error ? error : launch_few(a, walks, narrow, stream);
}

static bool is_abreast(const struct gpu_device *device, const sm80_delta_params &a, int64_t walks)
{
    return walks * 5 <= (int64_t)device->num_sms * MOST_WALKS &&
           (int64_t)a.num_chunks * a.p.num_k_heads >= (int64_t)device->num_sms * LEAST_PARTS;
}

/* By 32 rows of S a CTA: all at once, and not so long that it is better to walk on half as many
 * multiprocessors and to prepare on the others meanwhile. */
static bool is_narrow(const struct gpu_device *device, const sm80_delta_params &a)
{
    int64_t reqs = sm80_delta_most_requests(&a), heads = reqs * a.p.num_v_heads;
    int64_t walks = heads * slices_of(a, NARROW_ROWS);
    if (walks > device->num_sms) {
        return false;
    }
    return a.p.num_tokens <= reqs * NARROW_LENGTH || is_abreast(device, a, walks) ||
           !is_abreast(device, a, heads * slices_of(a, WIDE_ROWS));
}

typedef CUresult CUDAAPI push_fn(CUcontext);
typedef CUresult CUDAAPI pop_fn(CUcontext *);

extern "C" const char *sm90_delta_walk(const struct gpu_device *device,
                                       struct sm80_delta_params *params, void *stream)
{
    CUcontext popped;
    unsigned walks = 0;
    bool abreast = false, whole = false, narrow = false;
    if (params != nullptr) {
        narrow = is_narrow(device, *params);
        params->stages = WIDE_STAGES;
        params->slices = slices_of(*params, narrow ? NARROW_ROWS : WIDE_ROWS);
        walks =
            (unsigned)(sm80_delta_most_requests(params) * params->p.num_v_heads * params->slices);
        if (walks == 0) {
            return NULL;
        }
        abreast = is_abreast(device, *params, walks);
        whole = walks > (unsigned)device->num_sms && takes_whole(params->p);
        const char *cause = abreast ? NULL : sm80_delta_launch(device, params, stream);
        if (cause != NULL) {
            return cause;
        }
    }
    ((push_fn *)device->push)((CUcontext)device->context);
    cudaError_t error = params == nullptr ? make_ready()
                        : abreast
                            ? launch_abreast(device, *params, walks, narrow, (cudaStream_t)stream)
                        : whole ? launch_whole(*params, (cudaStream_t)stream)
                                : launch_few(*params, walks, narrow, (cudaStream_t)stream);
    if (error != cudaSuccess) { /* the runtime would keep it for the next launch */
        (void)cudaGetLastError();
    }
    ((pop_fn *)device->pop)(&popped);
    return error == cudaSuccess ? NULL : cudaGetErrorString(error);
}
