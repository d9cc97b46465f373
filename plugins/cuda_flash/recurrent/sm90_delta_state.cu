/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/cuda/launch.cuh"
#include "sm90_delta_overlap.cuh"
#include "sm90_delta_state128.cuh"
#include "sm90_delta_state32.cuh"

/* Limits for overlapping both kernels: CTAs of the state kernel on at most MOST_STATE_FIFTHS fifths
 * of the multiprocessors, and at least LEAST_PARTS parts to prepare for each multiprocessor. */
#define MOST_STATE_FIFTHS 3
#define LEAST_PARTS 4
/* The time to prepare a part with gates per channel, or two value heads of one with gates per head,
 * in chunks of the state kernel. */
#define CHANNEL_PART 7
#define HEADS_PART 3
#define STATE64_ROWS (STATE64_TEAMS * GROUP_ROWS)
#define STATE32_LENGTH 8192 /* tokens of a request; longer ones use 64 rows, see takes_state32 */
/* Requests are cut into at most so many segments, if walks become shorter by so many tokens. A
 * further wave of CTAs takes the time of WAVE_TOKENS. */
#define MOST_SEGMENTS 8
#define LEAST_TOKENS_SAVED 1024
#define WAVE_TOKENS 256

constexpr int state64_bytes = sizeof(state64_memory) + (STATE64_STAGES - 1) * sizeof(chunk_stage);
static_assert(state64_bytes <= 227 * 1024, "shared memory of a CTA");
static_assert(FIRST_GROUPS <= LEAST_PARTS, "the first parts are there");
constexpr int state128_bytes = sizeof(state128_memory);
static_assert(state128_bytes <= 227 * 1024, "shared memory of a CTA");
constexpr int state32_bytes = sizeof(state32_memory);
static_assert(state32_bytes <= 227 * 1024 - sizeof(segment_item), "shared memory of a CTA");

static cudaError_t allow(void (*kernel)(sm80_delta_params), int bytes)
{
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

static cudaError_t make_ready()
{
    cudaError_t error = allow(delta_state64<false, false>, state64_bytes);
    error = error ? error : allow(delta_state64<true, false>, state64_bytes);
    error = error ? error : allow(delta_state64<false, true>, state64_bytes);
    error = error ? error : allow(delta_state64<true, true>, state64_bytes);
    error = error ? error : allow(delta_state32<false, false>, state32_bytes);
    error = error ? error : allow(delta_state32<true, false>, state32_bytes);
    error = error ? error : allow(delta_state32<true, true>, state32_bytes);
    error = error ? error : allow(delta_state128<false>, state128_bytes);
    error = error ? error : allow(delta_state128<true>, state128_bytes);
    error = error ? error : launch_prepare<GATES_USUAL>(nullptr, 0, 0, 0);
    error = error ? error : launch_prepare<GATES_OF_HEADS>(nullptr, 0, 0, 0);
    return error ? error : launch_prepare<GATES_OF_CHANNELS>(nullptr, 0, 0, 0);
}

/* Whether kernels need what KEEPS adds: states at checkpoints, or states that a seed rounds. */
static bool keeps_states(const struct gpu_delta_params &p)
{
    return p.checkpoint_interval > 0 || p.rule.rounds > 0;
}

/* Whether the 128-row kernel serves the layer; its warps read 16 bytes of inputs at a time. */
static bool takes_state128(const struct gpu_delta_params &p)
{
    const struct gpu_matrix &w = p.conv_weight;
    bool convolves = p.conv_width > 0;
    const struct gpu_tensor &from = convolves ? p.mixed : p.v;
    uint64_t inputs =
        (uint64_t)(uintptr_t)from.data | (uint64_t)from.row | (convolves ? 0 : (uint64_t)from.head);
    if (p.rule.additive || p.head_size_v != STATE128_TEAMS * GROUP_ROWS || inputs % 16 != 0) {
        return false;
    }
    return !convolves ||
           (p.conv_width == CHUNK_TAPS && p.conv_silu && p.num_k_heads * p.head_size_k % 4 == 0 &&
            w.row == CHUNK_TAPS && w.column == 1 && (uint64_t)(uintptr_t)w.data % 8 == 0);
}

static cudaError_t launch_state128(sm80_delta_params &a, cudaStream_t stream)
{
    a.slices = 1;
    auto kernel = keeps_states(a.p) ? delta_state128<true> : delta_state128<false>;
    return launch_kernel(kernel, a, (unsigned)sm80_delta_most_requests(&a) * a.p.num_v_heads,
                         STATE128_THREADS, state128_bytes, stream);
}

static cudaError_t launch_state64(const sm80_delta_params &a, unsigned num_ctas,
                                  cudaStream_t stream)
{
    bool keeps = keeps_states(a.p);
    auto kernel = a.p.rule.additive
                      ? (keeps ? delta_state64<true, true> : delta_state64<false, true>)
                      : (keeps ? delta_state64<true, false> : delta_state64<false, false>);
    return launch_kernel(kernel, a, num_ctas, STATE64_THREADS, state64_bytes, stream);
}

/* Concurrent prepare CTAs leave no pairs of free multiprocessors, so there is no cluster then. */
static cudaError_t launch_state32(const sm80_delta_params &a, unsigned num_ctas,
                                  cudaStream_t stream)
{
    auto kernel = a.p.rule.gates > 1  ? delta_state32<true, true>
                  : keeps_states(a.p) ? delta_state32<true, false>
                                      : delta_state32<false, false>;
    bool apart = a.prepare_ctas > 0 || a.slices % STATE32_CLUSTER != 0;
    return launch_kernel(kernel, a, num_ctas, STATE32_THREADS, state32_bytes, stream, true,
                         apart ? 1 : STATE32_CLUSTER);
}

static int32_t slices_of(const sm80_delta_params &a, int32_t rows)
{
    return (a.p.head_size_v + rows - 1) / rows;
}

static cudaError_t launch_few(const sm80_delta_params &a, unsigned num_ctas, bool state32,
                              cudaStream_t stream)
{
    return state32 ? launch_state32(a, num_ctas, stream) : launch_state64(a, num_ctas, stream);
}

/* Chooses the segments that requests are cut into, and their pieces. The first launch has waves of
 * CTAs, the second one has one wave, and there is memory for all ends. Of several requests only one
 * may be long. Whole walks overlap preparation, which may save as much. */
static void choose_segments(const struct gpu_device *device, sm80_delta_params &a)
{
    const int64_t reqs = sm80_delta_most_requests(&a), heads = reqs * a.p.num_v_heads;
    const int64_t ctas = heads * slices_of(a, STATE32_ROWS);
    const int32_t at_once = ctas > 0 ? (int32_t)(device->num_sms / ctas) : 0;
    const int64_t memory = SPARE_CHUNKS * a.chunk_bytes / (int64_t)sizeof(segment_state);
    const bool is_whole = a.p.head_size_k == CHUNK_DIMS && a.p.head_size_v == CHUNK_DIMS &&
                          !a.p.invariant && !a.p.rule.additive && a.p.checkpoint_interval == 0;
    const int64_t parts = a.p.rule.gates > 1 ? a.p.num_v_heads * CHANNEL_PART
                                             : a.p.num_k_heads * ((a.group + 1) / 2) * HEADS_PART;
    const int64_t preparation = a.p.num_tokens * parts / device->num_sms;
    const int32_t chunks =
        (a.p.num_tokens + CHUNK - 1) / CHUNK; /* the longest request's, at most */
    sm80_delta_params best = a;
    int64_t most_saved = preparation;
    best.segments = 0;
    for (a.segments = 3; is_whole && at_once > 1 && a.segments <= MOST_SEGMENTS; a.segments++) {
        for (a.pieces = 1; ends_between(a) < at_once; a.pieces++) {
            const int32_t waves = (2 * (a.segments - 2) + at_once - 2) / (at_once - 1);
            a.first_pieces = waves * a.pieces;
            const int64_t saved = (int64_t)a.p.num_tokens * ends_between(a) / pieces_of(a) -
                                  (waves - 1) * WAVE_TOKENS;
            const int64_t least = (waves > 1 || reqs == 1 ? reqs : 2) * LEAST_TOKENS_SAVED;
            if (saved > most_saved && saved >= least && is_cut(a, chunks) &&
                heads * (ENDS_APART * ends_between(a) + 1) <= memory) {
                most_saved = saved, best = a;
            }
        }
    }
    a = best;
}

/* Walks segments at once, see sm90_delta_segments.cuh. */
static cudaError_t launch_segments(sm80_delta_params &a, unsigned num_ctas, cudaStream_t stream)
{
    int64_t heads = sm80_delta_most_requests(&a) * a.p.num_v_heads;
    a.segment_ends = a.memory + a.num_chunks * a.chunk_bytes;
    a.launched = 2 * a.segments - 3;
    cudaError_t error = launch_state32(a, num_ctas * (unsigned)a.launched, stream);
    error = error ? error
                  : launch_kernel(delta_join, a, (unsigned)(heads * CHUNK_DIMS / JOIN_ROWS),
                                  JOIN_THREADS, 0, stream);
    a.launched = ends_between(a) + 1, a.joined = 1;
    return error ? error : launch_state32(a, num_ctas * (unsigned)a.launched, stream);
}

static cudaError_t launch_overlapped(const struct gpu_device *device, sm80_delta_params &a,
                                     unsigned num_ctas, bool state32, cudaStream_t stream)
{
    int64_t parts = (int64_t)a.num_chunks * a.p.num_k_heads;
    a.prepare_ctas = device->num_sms - (int32_t)num_ctas;
    delta_clear<<<(unsigned)((parts + CLEAR_THREADS - 1) / CLEAR_THREADS), CLEAR_THREADS, 0,
                  stream>>>(a);
    cudaError_t error = cudaGetLastError();
    a.end_part = FIRST_GROUPS * device->num_sms;
    /* With gates per channel, the other CTAs may be too few for all further parts. */
    int64_t later = a.p.rule.gates > 1
                        ? (int64_t)a.num_chunks * a.prepare_ctas / (CHANNEL_PART * a.group)
                        : parts;
    int groups = FIRST_GROUPS;
    if (parts - later > a.end_part) {
        a.end_part = (int32_t)(parts - later), groups = PREPARE_GROUPS;
    }
    error = error ? error : launch_prepare(a, (unsigned)device->num_sms, groups, stream);
    a.first_part = a.end_part, a.end_part = (int32_t)parts;
    error = error ? error : launch_prepare(a, (unsigned)a.prepare_ctas, PREPARE_GROUPS, stream);
    return error ? error : launch_few(a, num_ctas, state32, stream);
}

/* Prepares all chunks before the state kernel. */
static cudaError_t launch_channels(const struct gpu_device *device, sm80_delta_params &a,
                                   unsigned num_ctas, cudaStream_t stream)
{
    a.end_part = a.num_chunks * a.p.num_k_heads;
    cudaError_t error = launch_prepare(a, (unsigned)device->num_sms, PREPARE_GROUPS, stream);
    return error            ? error
           : a.segments > 0 ? launch_segments(a, num_ctas, stream)
                            : launch_state32(a, num_ctas, stream);
}

static bool is_overlapped(const struct gpu_device *device, const sm80_delta_params &a,
                          int64_t num_ctas)
{
    return num_ctas * 5 <= (int64_t)device->num_sms * MOST_STATE_FIFTHS &&
           (int64_t)a.num_chunks * a.p.num_k_heads >= (int64_t)device->num_sms * LEAST_PARTS;
}

/* Whether to use 32 rows for each CTA: not without a delta; for gates per channel, for states of 16
 * bits, which the kernel of 64 rows has not been run with where there is a delta, and if all CTAs
 * run at once, unless requests are so long that overlapping preparation with half as many CTAs is
 * faster. The kernels differ in bits, so that batch-invariant layers have the one of 64 rows. */
static bool takes_state32(const struct gpu_device *device, const sm80_delta_params &a)
{
    int64_t reqs = sm80_delta_most_requests(&a), heads = reqs * a.p.num_v_heads;
    int64_t num_ctas = heads * slices_of(a, STATE32_ROWS);
    if (a.p.rule.additive) {
        return false;
    }
    if (a.p.rule.gates > 1 || a.p.rule.state_dtype != ATTN_DTYPE_F32) {
        return true;
    }
    if (num_ctas > device->num_sms || a.p.invariant) {
        return false;
    }
    return a.p.num_tokens <= reqs * STATE32_LENGTH || is_overlapped(device, a, num_ctas) ||
           !is_overlapped(device, a, heads * slices_of(a, STATE64_ROWS));
}

extern "C" const char *sm90_delta_state(const struct gpu_device *device,
                                        struct sm80_delta_params *params, void *stream)
{
    unsigned num_ctas = 0;
    bool overlapped = false, state128 = false, state32 = false, channels = false;
    if (params != nullptr) {
        choose_segments(device, *params), params->launched = 1;
        state32 = params->segments > 0 || takes_state32(device, *params);
        params->stages = STATE64_STAGES;
        params->slices = slices_of(*params, state32 ? STATE32_ROWS : STATE64_ROWS);
        num_ctas =
            (unsigned)(sm80_delta_most_requests(params) * params->p.num_v_heads * params->slices);
        if (num_ctas == 0) {
            return NULL;
        }
        channels = params->p.rule.gates > 1;
        overlapped = params->segments == 0 && is_overlapped(device, *params, num_ctas);
        state128 = num_ctas > (unsigned)device->num_sms && takes_state128(params->p) &&
                   !params->p.invariant;
        const char *cause =
            overlapped || channels ? NULL : sm80_delta_launch(device, params, stream);
        if (cause != NULL) {
            return cause;
        }
    }
    device_scope inside(device);
    cudaError_t error =
        params == nullptr ? make_ready()
        : overlapped ? launch_overlapped(device, *params, num_ctas, state32, (cudaStream_t)stream)
        : channels   ? launch_channels(device, *params, num_ctas, (cudaStream_t)stream)
        : params->segments > 0 ? launch_segments(*params, num_ctas, (cudaStream_t)stream)
        : state128             ? launch_state128(*params, (cudaStream_t)stream)
                               : launch_few(*params, num_ctas, state32, (cudaStream_t)stream);
    return cause_of(error);
}
