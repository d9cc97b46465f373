/* SPDX-License-Identifier: Apache-2.0 */
/* Shared memory of the prepare kernel, and its first phase: keys and queries of a chunk after
 * convolution and norm. */
#ifndef CUDA_FLASH_SM80_DELTA_KEYS_CUH
#define CUDA_FLASH_SM80_DELTA_KEYS_CUH

#include "sm80_delta_inputs.cuh"

#define PREPARE_THREADS 128
#define PREPARE_WARPS (PREPARE_THREADS / GPU_LANES)
#define BLOCK 16 /* rows and columns of a block of the inverse */
#define BLOCKS (CHUNK / BLOCK)
#define KEY_BITS 3 /* exponent bound of rows without a norm; their products are below 2^15 */

/* Gates of a value head. The decay between tokens of different blocks is a product of two factors
 * below 1; within a block it is the exponential of a difference of sums. */
struct prepare_gates {
    float sums[CHUNK];         /* sums of log2 of the decays from the block's start */
    float to_block_end[CHUNK]; /* decay after the token up to its block's end */
    /* decay from a block's end up to a token of a later block */
    float from_block[BLOCKS - 1][CHUNK];
    float beta[CHUNK];
};

/* A of two value heads: its blocks on the diagonal in float32, later in their place the inverses,
 * and all blocks below as f16 operands; those on the diagonal hold the transposed inverses. Rows of
 * `diagonal` are padded by 8 floats against bank conflicts; for the others see block_place. */
typedef uint16_t chunk_tile[CHUNK][CHUNK];
struct prepare_diagonal {
    float blocks[BLOCKS][BLOCK][BLOCK + 8];
    float padding[4]; /* both heads' rows are read at once */
};

struct prepare_a {
    union {
        prepare_diagonal diagonal[2];
        chunk_tile inverse[2];
    };
    uint4 blocks[2][BLOCKS * (BLOCKS + 1) / 2][BLOCK * 2];
};

/* The number of a block on or below the diagonal. */
GPU_INLINE int32_t number_of_block(int32_t row, int32_t column)
{
    return row * (row + 1) / 2 + column;
}

/* The offset of 16 bytes of a block's row; eight rows have them in different banks. */
GPU_INLINE uint32_t block_place(int32_t row, int32_t half)
{
    return (uint32_t)(row * 32 + ((half ^ row >> 2) & 1) * 16);
}

/* The work item of the prepare kernel: a key head of a chunk. */
struct prepare_item {
    delta_request request;
    int32_t first; /* first token of the chunk */
    int32_t index, key_head;
    bool is_there;
    char *chunk;
    chunk_head *heads; /* the key head's value heads */
};

/* Inputs of a chunk's tokens and of the tokens before them (raw_key_place). */
#define RAW_KEY_ROWS (CHUNK + CHUNK_TAPS)
typedef char prepare_raw[RAW_KEY_ROWS * CHUNK_DIMS * 2];

/* What is prepared from gates per channel. */
struct channel_gates {
    float beta[CHUNK];
    float bias[CHUNK_DIMS];
    float past[BLOCKS][CHUNK_DIMS]; /* decays of blocks */
};

struct alignas(256) prepare_memory { /* aligned so that xor finds the columns of tiles */
    union { /* k and q overwrite their inputs, scores overwrite k, and A overwrites q */
        uint16_t k[CHUNK][CHUNK_DIMS];
        prepare_raw raw_k;
        chunk_tile scores[2];
    };
    union {
        struct prepare_gates gates[2];
        struct channel_gates channels;
    };
    struct prepare_item item, next; /* kept here instead of in registers */
    union alignas(256) {
        uint16_t q[CHUNK][CHUNK_DIMS];
        struct {
            prepare_raw raw_q;
            uint2 weights[2][CHUNK_DIMS]; /* weights of channels of k and q, four taps in bf16 */
            float bias[2][CHUNK_DIMS];
        } inputs;
        struct prepare_a a;
    };
};

/* For gates of any rule; scales: what rows of k and q without a norm were divided by. */
struct alignas(256) rule_memory : prepare_memory {
    float scales[2][CHUNK];
};
static_assert(sizeof(rule_memory) <= 50176,
              "two CTAs share a multiprocessor with 100 KB, 1 KB of which each needs besides");

/* The gates that a kernel prepares: those of the gated delta rule, of any rule per head, of delta
 * rules per channel. */
enum { GATES_USUAL, GATES_OF_HEADS, GATES_OF_CHANNELS };

/* The warp's index in its group; a CTA may have several groups. Recomputed at each use, as
 * lane_again. */
GPU_INLINE int32_t prepare_warp()
{
    int32_t warp = warp_index() % PREPARE_WARPS;
    asm volatile("mov.b32 %0, %0;" : "+r"(warp));
    return warp;
}

/* A barrier of the group. */
GPU_INLINE void sync_preparers()
{
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warp_index() / PREPARE_WARPS), "n"(PREPARE_THREADS)
                 : "memory");
}

/* The offset of 16 bytes of a row of inputs; eight rows have them in different banks. */
GPU_INLINE uint32_t raw_key_place(int32_t row, int32_t piece)
{
    return (uint32_t)(row * CHUNK_DIMS * 2 + (piece ^ (row & 7)) * 16);
}

/* Loads weights and bias of a thread's channel; the weights' copy may be in flight on return. */
GPU_INLINE void load_key_weights(const gpu_delta_params &p, const delta_source<2> &source,
                                 uint2 &to, float &bias)
{
    const uint16_t *row =
        (const uint16_t *)p.conv_weight.data + source.first_channel * p.conv_weight.row;
    bool is_real = source.real > 0;
    bias = 0.0f;
    if (is_real && p.conv_bias.data != nullptr) {
        bias = matrix_number(p.conv_bias, 0, source.first_channel);
    }
    if (p.conv_width == CHUNK_TAPS && p.conv_weight.row == CHUNK_TAPS &&
        p.conv_weight.column == 1 && (uint64_t)p.conv_weight.data % 8 == 0) {
        copy8(shared_address(&to), row, is_real ? 8 : 0);
        return;
    }
    uint32_t taps[CHUNK_TAPS] = {};
    int32_t first = CHUNK_TAPS - p.conv_width;
#pragma unroll
    for (int i = 0; i < CHUNK_TAPS; i++) {
        if (is_real && i >= first) {
            taps[i] = row[(i - first) * p.conv_weight.column];
        }
    }
    to = make_uint2(taps[0] | taps[1] << 16, taps[2] | taps[3] << 16);
}

/* Copies inputs of k and q, with those of the three previous tokens, to shared memory, and zeros
 * past the last token and channel. Uses cp.async of 16 bytes where possible; otherwise, and for
 * inputs in the window, each thread copies one channel. */
GPU_INLINE void fetch_keys(const sm80_delta_params &a, prepare_memory &m)
{
    const gpu_delta_params &p = a.p;
    const prepare_item &item = m.item;
    int32_t thread = prepare_warp() * GPU_LANES + lane_index();
    int32_t before = item.first - (CHUNK_TAPS - 1); /* the token of the first row */
    int64_t channel = (int64_t)item.key_head * p.head_size_k;
#pragma unroll 1
    for (int32_t is_q = 0; is_q < 2; is_q++) {
        char *raw = is_q ? m.inputs.raw_q : m.raw_k;
        delta_source<2> source(p, item.request, is_q ? p.q : p.k, item.key_head,
                               (is_q ? p.first_q : p.first_k) + channel, p.head_size_k, thread);
        if (p.conv_width > 0) {
            load_key_weights(p, source, m.inputs.weights[is_q][thread],
                             m.inputs.bias[is_q][thread]);
        }
        const char *head = source.rows - (source.real > 0 ? thread * 2 : 0);
        int32_t piece = thread % 16, row = thread / 16;
        int32_t singly = a.wide_keys ? max(-before, 0) : RAW_KEY_ROWS;
        uint32_t to = shared_address(raw) + raw_key_place(row, piece);
        if (before >= 0 && before + RAW_KEY_ROWS <= source.num_tokens &&
            p.head_size_k == CHUNK_DIMS && a.wide_keys) {
            const char *from = head + (before + row) * source.row + piece * 16;
#pragma unroll
            for (int i = 0; i < RAW_KEY_ROWS; i += 8) {
                if (i + 8 <= RAW_KEY_ROWS || row < RAW_KEY_ROWS - i) {
                    copy16(to + i * CHUNK_DIMS * 2, from, 16);
                }
                from += 8 * source.row;
            }
            continue;
        }
#pragma unroll 1
        for (int i = 0; a.wide_keys && row + i < RAW_KEY_ROWS; i += 8) {
            int32_t t = before + row + i;
            bool is_there = t < source.num_tokens && piece * 8 < p.head_size_k;
            if (t >= 0) {
                copy16(to + i * CHUNK_DIMS * 2,
                       is_there ? head + t * source.row + piece * 16 : head, is_there ? 16 : 0);
            }
        }
#pragma unroll 1
        for (int32_t row = 0; row < singly; row++) {
            int32_t t = before + row;
            bool is_there = t >= source.oldest && t < source.num_tokens && source.real > 0;
            const char *at = t < 0 ? source.window + (int64_t)(source.entry + t) * 2
                                   : source.rows + t * source.row;
            *(uint16_t *)(raw + raw_key_place(row, thread / 8) + thread % 8 * 2) =
                is_there ? *(const uint16_t *)at : 0;
        }
    }
}

/* The convolution of keys or queries for the warp's 16 tokens, on the tensor cores: rows lane / 4
 * and that + 8, columns (lane & 3) * 2 and the next of each 8. For 8 channels, inputs at two taps
 * [token, channel of either tap] are multiplied by a matrix with the weights on the diagonals of 8
 * x 8. A non-finite input thus reaches the 7 neighbouring channels, which the norm would do in any
 * case. */
template <bool HAS_BIAS>
GPU_INLINE void multiply_taps(const prepare_memory &m, const char *raw, int32_t is_q,
                              float (&y)[CHUNK_DIMS / 8][4])
{
    int32_t lane = lane_again(), of_eight = lane >> 2, pair = (lane & 3) * 2;
    int32_t row = prepare_warp() * BLOCK + (lane & 15) + (lane >> 4);
    bool on_diagonal = of_eight >> 1 == (lane & 3);
    /* Selects the first and second tap of two for the diagonal. */
    uint32_t first = !on_diagonal ? 0x4444 : lane & 4 ? 0x1044 : 0x4410;
    uint32_t second = !on_diagonal ? 0x4444 : lane & 4 ? 0x3244 : 0x4432;
    const uint2 *weights = m.inputs.weights[is_q] + of_eight;
    const float *bias = m.inputs.bias[is_q] + pair;
    uint32_t at = shared_address(raw);
#pragma unroll
    for (int c = 0; c < CHUNK_DIMS / 8; c++) {
        uint2 four = weights[c * 8];
        uint32_t left[4];
        float2 two = make_float2(0.0f, 0.0f);
        if constexpr (HAS_BIAS) {
            two = *(const float2 *)&bias[c * 8];
        }
        y[c][0] = y[c][2] = two.x, y[c][1] = y[c][3] = two.y;
        load4(left, at + raw_key_place(row, c));
        multiply<KIND_BF16>(y[c], left, __byte_perm(four.x, 0, first),
                            __byte_perm(four.x, 0, second));
        load4(left, at + raw_key_place(row + 2, c));
        multiply<KIND_BF16>(y[c], left, __byte_perm(four.y, 0, first),
                            __byte_perm(four.y, 0, second));
    }
}

/* As multiply_taps, of layers without a convolution. */
GPU_INLINE void take_rows(const char *raw, float (&y)[CHUNK_DIMS / 8][4])
{
    int32_t lane = lane_again(), row = prepare_warp() * BLOCK + (lane >> 2) + CHUNK_TAPS - 1;
    const char *at = raw + (lane & 3) * 4;
#pragma unroll
    for (int c = 0; c < CHUNK_DIMS / 8; c++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float2 two =
                two_floats<KIND_BF16>(*(const uint32_t *)(at + raw_key_place(row + half * 8, c)));
            y[c][2 * half] = two.x, y[c][2 * half + 1] = two.y;
        }
    }
}

/* The factors of the lane's two rows without a norm: powers of two that make products of rows f16
 * numbers. Stores their inverses. */
GPU_INLINE void scale_keys(const float (&y)[CHUNK_DIMS / 8][4], int32_t num_tokens,
                           float (&factors)[2], float *scales)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float largest = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNK_DIMS / 8; c++) {
            largest = fmaxf(largest, fmaxf(fabsf(y[c][2 * half]), fabsf(y[c][2 * half + 1])));
        }
        largest = fmaxf(largest, lane_xor(largest, 1));
        largest = fmaxf(largest, lane_xor(largest, 2));
        row_scale scale = scale_of(largest, KEY_BITS);
        int32_t row = prepare_warp() * BLOCK + (lane_again() >> 2) + half * 8;
        factors[half] = row < num_tokens ? scale.inverse : 0.0f;
        if ((lane_again() & 3) == 0) {
            scales[row] = isinf(largest) ? largest : scale.scale; /* all that it reaches shows it */
        }
    }
}

/* Convolution, SiLU and norm. GATES_OF_HEADS: the norm is p's, else there is one.
 */
template <int GATES>
GPU_INLINE void convolve_keys(const gpu_delta_params &p, const prepare_memory &m, const char *raw,
                              int32_t is_q, int32_t num_tokens, float *scales,
                              uint32_t (&out)[CHUNK_DIMS / 8][2])
{
    int32_t of_eight = lane_again() >> 2;
    float y[CHUNK_DIMS / 8][4], squares[2] = {0.0f, 0.0f};
    if (p.conv_width == 0) {
        take_rows(raw, y);
    } else if (p.conv_bias.data != nullptr) {
        multiply_taps<true>(m, raw, is_q, y);
    } else {
        multiply_taps<false>(m, raw, is_q, y);
    }
    if (p.conv_width > 0 && p.conv_silu) {
#pragma unroll
        for (int i = 0; i < CHUNK_DIMS / 2; i++) {
            y[i / 4][i % 4] = fast_silu(y[i / 4][i % 4]);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNK_DIMS / 8; c++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            squares[i >> 1] = fmaf(y[c][i], y[c][i], squares[i >> 1]);
        }
    }
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        squares[half] += lane_xor(squares[half], 1);
        squares[half] += lane_xor(squares[half], 2);
        bool is_there = prepare_warp() * BLOCK + of_eight + half * 8 < num_tokens;
        factors[half] = is_there ? rsqrtf(squares[half] + L2_EPSILON) : 0.0f;
    }
    if constexpr (GATES == GATES_OF_HEADS) {
        if (!p.l2norm) {
            scale_keys(y, num_tokens, factors, scales);
        }
    }
#pragma unroll
    for (int c = 0; c < CHUNK_DIMS / 8; c++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            out[c][half] =
                pack2<KIND_F16>(y[c][2 * half] * factors[half], y[c][2 * half + 1] * factors[half]);
        }
    }
}

/* Computes k, then q, in place of their inputs. The loop is not unrolled, since code that runs once
 * is fetched once for each warp. */
template <int GATES> GPU_INLINE void make_keys(const sm80_delta_params &a, prepare_memory &m)
{
    const prepare_item &item = m.item;
    int32_t num_tokens = item.request.num_tokens - item.first;
#pragma unroll 1
    for (int32_t is_q = 0; is_q < 2; is_q++) {
        char *tile = is_q ? m.inputs.raw_q : m.raw_k;
        uint32_t out[CHUNK_DIMS / 8][2];
        float *scales = GATES == GATES_OF_HEADS ? ((rule_memory &)m).scales[is_q] : nullptr;
        convolve_keys<GATES>(a.p, m, tile, is_q, num_tokens, scales, out);
        sync_preparers(); /* all warps have read the inputs */
        int32_t lane = lane_again(), row = prepare_warp() * BLOCK + (lane >> 2);
#pragma unroll
        for (int c = 0; c < CHUNK_DIMS / 8; c++) {
            char *to = tile + place16<CHUNK_DIMS / 8>(row, c) + (lane & 3) * 4;
            *(uint32_t *)to = out[c][0];
            *(uint32_t *)(to + 8 * 128) = out[c][1];
        }
    }
}

/* Blocks of q k^T in block row `warp` and of k k^T in block row BLOCKS - 1 - warp, on and below the
 * diagonal: BLOCKS + 1 for each warp. Slots up to `warp` are q k^T, from the diagonal to the left;
 * the others are k k^T, up to the diagonal. */
#define SLOTS (BLOCKS + 1)
typedef float slot_sums[SLOTS][2][4];

GPU_INLINE bool is_score(int32_t slot, int32_t warp)
{
    return slot <= warp;
}

GPU_INLINE int32_t column_of_slot(int32_t slot, int32_t warp)
{
    return is_score(slot, warp) ? warp - slot : slot - warp - 1;
}

/* As load4, if all lanes say so; else r stays. */
GPU_INLINE void load4_if(bool loads, uint32_t (&r)[4], uint32_t address)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
                 "@p ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n}"
                 : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])
                 : "r"(address), "r"((int32_t)loads));
}

/* Slots of one product share their left operand, and slots `warp` and warp + 1 the right one.
 * Without a delta only q k^T is made. */
GPU_INLINE void multiply_slots(const prepare_memory &m, bool has_delta, slot_sums &sums)
{
    int32_t lane = lane_again(), warp = prepare_warp();
    uint32_t keys = shared_address(m.k), right_at[SLOTS];
    uint32_t row = place16<CHUNK_DIMS / 8>(lane & 15, lane >> 4);
    uint32_t column = place16<CHUNK_DIMS / 8>((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    uint32_t of_scores = shared_address(m.q) + row + warp * BLOCK * 128;
    uint32_t of_a = keys + row + (BLOCKS - 1 - warp) * BLOCK * 128;
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
        right_at[i] = keys + column + column_of_slot(i, warp) * BLOCK * 128;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            sums[i][k / 4][k % 4] = 0.0f;
        }
    }
#pragma unroll 4
    for (int step = 0; step < CHUNK_DIMS / 16; step++) {
        uint32_t further = step / 4 * CHUNK * 128, swizzled = step % 4 * 32;
        uint32_t left[4], right[4];
        load4(left, (of_scores ^ swizzled) + further);
#pragma unroll
        for (int i = 0; i < SLOTS; i++) {
            if (!has_delta && !is_score(i, warp)) {
                continue;
            }
            if (i == 0) {
                load4(right, (right_at[i] ^ swizzled) + further);
            } else {
                load4_if(i == warp + 1, left, (of_a ^ swizzled) + further);
                load4_if(i != warp + 1, right, (right_at[i] ^ swizzled) + further);
            }
            multiply<KIND_F16>(sums[i][0], left, right[0], right[1]);
            multiply<KIND_F16>(sums[i][1], left, right[2], right[3]);
        }
    }
}

/* Makes tiles that the thread has written visible to store_tile after a barrier. */
GPU_INLINE void finish_tile()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* Copies a tile of a chunk to global memory, from sm_90 on by a bulk copy of the first thread,
 * which the tile has to outlast (wait_for_tiles). */
template <int BYTES> GPU_INLINE void store_tile(const void *tile, void *to)
{
    int32_t thread = prepare_warp() * GPU_LANES + lane_again();
#if __CUDA_ARCH__ >= 900
    if (thread == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                     "cp.async.bulk.commit_group;" ::"l"(to),
                     "r"(shared_address(tile)), "n"(BYTES)
                     : "memory");
    }
#else
    const uint4 *from = (const uint4 *)tile + thread;
    uint4 *at = (uint4 *)to + thread;
#pragma unroll
    for (int i = 0; i < BYTES / (int)sizeof *at; i += PREPARE_THREADS) {
        at[i] = from[i];
    }
#endif
}

/* Waits until tiles have been read, or with ARE_WRITTEN until they have been written. */
template <bool ARE_WRITTEN = false> GPU_INLINE void wait_for_tiles()
{
#if __CUDA_ARCH__ >= 900
    if constexpr (ARE_WRITTEN) {
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    } else {
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
#endif
}

/* Stores k and q in the same layout. */
GPU_INLINE void store_keys(const prepare_memory &m)
{
    static_assert(sizeof(chunk_keys) == 2 * sizeof m.k, "k, then q");
    chunk_keys &to = ((chunk_keys *)m.item.chunk)[m.item.key_head];
    store_tile<sizeof m.k>(m.k, to.k);
    store_tile<sizeof m.k>(m.q, to.q);
}

#endif
