/* SPDX-License-Identifier: Apache-2.0 */
/* The prepare kernel of gated delta: the part of a chunk that does not depend on earlier chunks,
 * that is, q and k after convolution and norm, decays, scores and the inverse. With g the prefix
 * sums of log decays in a chunk,
 *     A_ij = beta_i e^(g_i - g_j) k_i k_j   for j < i
 *     R = (I + A)^-1 beta (V - e^g K S^T)   what the tokens add: S <- e^g S + R^T (decays) K
 * A group of four warps processes a key head of a chunk, and its value heads in pairs, without
 * a delta four at a time. */
#ifndef CUDA_FLASH_SM80_DELTA_PREPARE_CUH
#define CUDA_FLASH_SM80_DELTA_PREPARE_CUH

#include "sm80_delta_inverse.cuh"

#define LOG2_OF_E 1.4426950408889634f
/* exp of it is 0 in float32, and errors of sums of BLOCK such values are below those of f16. */
#define LEAST_LOG_DECAY -150.0f

/* Finds request and first token of chunk `index`; false if there is no such chunk. All lanes of a
 * warp call. */
static __device__ bool find_chunk(const sm80_delta_params &a, int32_t index, delta_request &request,
                                  int32_t &first)
{
    const gpu_delta_params &p = a.p;
    int32_t low = 0, high = p.num_reqs; /* the last request that begins at or before the chunk */
    while (high - low > 1) {
        int32_t step = (high - low + GPU_LANES - 1) / GPU_LANES, r = low + lane_index() * step;
        bool before = r < high && p.query_start[r] / a.tokens_apart + r * a.requests_apart <= index;
        int32_t count = __popc(__ballot_sync(GPU_ALL_LANES, before));
        if (count == 0) {
            return false;
        }
        low += (count - 1) * step;
        high = min(high, low + step);
    }
    int32_t number = index - p.query_start[low] / a.tokens_apart - low * a.requests_apart;
    first = number * CHUNK;
    return number >= 0 && enter_request(p, low, request) && goes_in_chunks(p, request) &&
           first < request.num_tokens;
}

/* Clears the warp's blocks that are always zero, which nothing else writes. */
enum { LEFT_OF_DIAGONAL /* the transposed inverse */, RIGHT_OF_DIAGONAL /* scores */ };
template <int SIDE> GPU_INLINE void clear_blocks(chunk_tile &tile)
{
    int32_t lane = lane_again(), warp = prepare_warp(), row = warp * BLOCK + (lane >> 1);
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        if (SIDE == LEFT_OF_DIAGONAL ? i < warp : i > warp) {
            *(uint4 *)((char *)tile + place16<CHUNK / 8>(row, i * 2 + (lane & 1))) =
                make_uint4(0, 0, 0, 0);
        }
    }
}

/* Inputs of the gates of tokens t and t + 1: elements of a and b, not yet converted, so that the
 * loads may be in flight. */
struct gate_inputs {
    uint32_t bits[2][2];
    float a_log, bias;

    GPU_INLINE bool are_narrow(const gpu_delta_params &p)
    {
        return p.a.dtype == ATTN_DTYPE_BF16 && p.b.dtype == ATTN_DTYPE_BF16;
    }

    __device__ __forceinline__ void load(const gpu_delta_params &p, const delta_request &request,
                                         int32_t t, int32_t head)
    {
        a_log = p.a_log[head], bias = p.dt_bias[head];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* tokens past the end read the last */
            int64_t row = request.first_row + min(t + i, request.num_tokens - 1);
            if (are_narrow(p)) {
                bits[i][0] = ((const uint16_t *)p.a.data)[row * p.a.row + head * p.a.column];
                bits[i][1] = ((const uint16_t *)p.b.data)[row * p.b.row + head * p.b.column];
            } else {
                bits[i][0] = float_bits(matrix_number(p.a, row, head));
                bits[i][1] = float_bits(matrix_number(p.b, row, head));
            }
        }
    }
};

/* The gates of a value head are made by two warps, which share what is made of the sums, without a
 * delta by one. */
#define GATE_WARPS 2

/* Stores sums of log decays and what is made of them; a lane has two tokens. */
GPU_INLINE void store_gates(const float (&log_decay)[2], const float (&beta)[2], bool is_alone,
                            prepare_gates &gates, chunk_head &to)
{
    constexpr int lanes = BLOCK / 2; /* lanes of a block */
    int32_t lane = lane_index(), of_block = lane % lanes, own = lane / lanes;
    float sum = log_decay[0] + log_decay[1];
#pragma unroll
    for (int distance = 1; distance < lanes; distance *= 2) {
        float before = lane_up(sum, distance);
        sum += of_block >= distance ? before : 0.0f;
    }
    float before = lane_up(sum, 1), sums[2] = {log_decay[0], 0.0f};
    sums[0] += of_block > 0 ? before : 0.0f;
    sums[1] = sums[0] + log_decay[1];
    /* the sums of the blocks between a block and the lane's, and of those after the lane's */
    float past[BLOCKS], after = 0.0f, own_end = lane_read(sums[1], lane | (lanes - 1));
    past[BLOCKS - 1] = 0.0f;
#pragma unroll
    for (int block = BLOCKS - 1; block >= 0; block--) {
        float end = lane_read(sums[1], block * lanes + lanes - 1);
        if (block > 0) {
            past[block - 1] = past[block] + (block < own ? end : 0.0f);
        } else {
            past[BLOCKS - 1] = past[0] + (own > 0 ? end : 0.0f);
        }
        after += block > own ? end : 0.0f;
    }
    bool is_first = prepare_warp() < GATE_WARPS;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t row = 2 * lane + i;
        if (is_first || is_alone) {
            gates.sums[row] = sums[i];
            gates.beta[row] = beta[i];
            gates.to_block_end[row] = fast_exp2(own_end - sums[i]);
            gates.from_block[0][row] = fast_exp2(sums[i] + past[0]);
        }
        if (!is_first || is_alone) {
            gates.from_block[1][row] = fast_exp2(sums[i] + past[1]);
            gates.from_block[2][row] = fast_exp2(sums[i] + past[2]);
            to.from_start[row] = fast_exp2(sums[i] + past[BLOCKS - 1]);
            to.to_end[row] = fast_exp2((own_end - sums[i]) + after);
        }
    }
}

/* Makes the gates of a value head and their sums; a lane has two tokens. */
static __device__ __noinline__ void make_gates(const gpu_delta_params &p, gate_inputs from,
                                               int32_t num_tokens, prepare_gates &gates,
                                               chunk_head &to)
{
    int32_t lane = lane_index(), shift = gate_inputs::are_narrow(p) ? 16 : 0;
    float beta[2], log_decay[2], factor = -expf(from.a_log);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        bool is_there = 2 * lane + i < num_tokens;
        /* softplus, as in gpu/device/delta.h */
        float x = bits_float(from.bits[i][0] << shift) + from.bias;
        float e = fast_exp2(fminf(x, SOFTPLUS_LINEAR) * LOG2_OF_E), u = 1.0f + e;
        float small = u == 1.0f ? e : logf(u) * (e * fast_reciprocal(u - 1.0f));
        float g = factor * (x <= SOFTPLUS_LINEAR ? small : x);
        log_decay[i] = is_there ? (g < LEAST_LOG_DECAY ? LEAST_LOG_DECAY : g) * LOG2_OF_E : 0.0f;
        float b = bits_float(from.bits[i][1] << shift);
        beta[i] = is_there ? fast_reciprocal(1.0f + fast_exp2(b * -LOG2_OF_E)) : 0.0f;
    }
    store_gates(log_decay, beta, false, gates, to);
}

/* As make_gates, for gates per head of any rule. Rules without a delta get factors of values and
 * queries instead of an inverse. */
static __device__ __noinline__ void make_any_gates(const gpu_delta_params &p,
                                                   const prepare_item &item, int32_t head,
                                                   rule_memory &m, prepare_gates &gates,
                                                   chunk_head &to)
{
    int32_t num_tokens = item.request.num_tokens - item.first;
    float beta[2], sums[2], most = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t t = 2 * lane_index() + i;
        int64_t row = item.request.first_row + item.first + min(t, num_tokens - 1);
        float step = 0.0f, g = log_decay(p, row, head, head, &step);
        bool is_there = t < num_tokens;
        sums[i] = is_there ? (g < LEAST_LOG_DECAY ? LEAST_LOG_DECAY : g) * LOG2_OF_E : 0.0f;
        beta[i] = is_there ? write_gate(p, row, head, step) : 0.0f;
        if (p.rule.additive) {
            float factor = beta[i] * (p.l2norm ? 1.0f : m.scales[0][t]);
            to.factors.value[t] = factor;
            to.factors.query[t] = p.l2norm ? 1.0f : m.scales[1][t];
            most = fmaxf(most, fabsf(factor) * (p.l2norm ? 1.0f : 2 << KEY_BITS));
        }
    }
    if (p.rule.additive) {
#pragma unroll
        for (int distance = 1; distance < GPU_LANES; distance *= 2) {
            most = fmaxf(most, lane_xor(most, distance));
        }
        to.factors.most[0] = most;
    }
    store_gates(sums, beta, p.rule.additive != 0, gates, to);
}

/* Applies decays to a block on the diagonal and clears elements with fewer than `least` tokens
 * between row and column: rows of_block and of_block + 8, columns j and the next of each 8. */
GPU_INLINE void decay_diagonal(const prepare_gates &gates, int32_t block, int32_t of_block,
                               int32_t j, int32_t least, const float (&sums)[2][4],
                               float (&out)[2][4])
{
    int32_t i = block * BLOCK + of_block, first = block * BLOCK + j;
    float rows[2] = {gates.sums[i], gates.sums[i + 8]};
#pragma unroll
    for (int n = 0; n < 2; n++) {
        float2 columns = *(const float2 *)&gates.sums[first + n * 8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float x = fast_exp2(rows[half] - columns.x);
            float y = fast_exp2(rows[half] - columns.y);
            int32_t between = of_block + half * 8 - (j + n * 8);
            out[n][2 * half] = between >= least ? sums[n][2 * half] * x : 0.0f;
            out[n][2 * half + 1] = between > least ? sums[n][2 * half + 1] * y : 0.0f;
        }
    }
}

/* Makes the decayed scores and, where there is a delta, A of a value head, in the warp's blocks. */
GPU_INLINE void decay_slots(const prepare_gates &gates, bool has_delta, const slot_sums &sums,
                            chunk_tile &tile, prepare_a &a, int32_t of_pair)
{
    int32_t lane = lane_again(), warp = prepare_warp(), of_block = lane >> 2, j = (lane & 3) * 2;
    int32_t of_a = BLOCKS - 1 - warp;
    float beta[2], decayed[2][4];
    char *scores = (char *)tile + (warp * BLOCK + of_block) * 128 + j * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        beta[half] = gates.beta[of_a * BLOCK + of_block + half * 8];
    }
    decay_diagonal(gates, warp, of_block, j, 0, sums[0], decayed);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int n = i >> 1, half = i & 1;
        uint32_t swizzled = (uint32_t)(warp * 2 ^ of_block) * 16; /* the swizzle of place16 */
        *(uint32_t *)(scores + (swizzled ^ n * 16) + half * 8 * 128) =
            pack2<KIND_F16>(decayed[n][2 * half], decayed[n][2 * half + 1]);
    }
    if (has_delta) {
        decay_diagonal(gates, of_a, of_block, j, 1, sums[SLOTS - 1], decayed);
    }
#pragma unroll
    for (int i = 0; i < 4 && has_delta; i++) {
        int n = i >> 1, half = i & 1;
        *(float2 *)&a.diagonal[of_pair].blocks[of_a][of_block + half * 8][n * 8 + j] =
            make_float2(beta[half] * decayed[n][2 * half], beta[half] * decayed[n][2 * half + 1]);
    }
#pragma unroll
    for (int slot = 1; slot < SLOTS - 1; slot++) {
        bool scored = is_score(slot, warp);
        if (!has_delta && !scored) {
            continue;
        }
        int32_t column = column_of_slot(slot, warp);
        const float *of_rows = &gates.from_block[column][(scored ? warp : of_a) * BLOCK + of_block];
        float rows[2] = {of_rows[0], of_rows[8]};
        if (!scored) {
            rows[0] *= beta[0], rows[1] *= beta[1];
        }
        uint32_t bits[2][2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            float2 columns = *(const float2 *)&gates.to_block_end[column * BLOCK + j + n * 8];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                bits[n][half] =
                    pack2<KIND_F16>(sums[slot][n][2 * half] * (rows[half] * columns.x),
                                    sums[slot][n][2 * half + 1] * (rows[half] * columns.y));
            }
        }
        if (scored) {
            char *to = scores + (uint32_t)(column * 2 ^ of_block) * 16;
            char *next = scores + ((uint32_t)(column * 2 ^ of_block) * 16 ^ 16);
            *(uint32_t *)to = bits[0][0], *(uint32_t *)(to + 8 * 128) = bits[0][1];
            *(uint32_t *)next = bits[1][0], *(uint32_t *)(next + 8 * 128) = bits[1][1];
        } else {
            char *to = (char *)a.blocks[of_pair][number_of_block(of_a, column)] + j * 2;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                *(uint32_t *)(to + block_place(of_block + (i & 1) * 8, i >> 1)) =
                    bits[i >> 1][i & 1];
            }
        }
    }
}

/* One warp finds item `number`; items are in the order of chunks. All lanes write the same. */
static __device__ __noinline__ void find_item(const sm80_delta_params &a, int32_t number,
                                              prepare_item &to)
{
    to.index = number / a.p.num_k_heads, to.key_head = number % a.p.num_k_heads;
    to.is_there = find_chunk(a, to.index, to.request, to.first);
}

/* Copies m.next to m.item; all threads of the group call. */
GPU_INLINE void enter_next(const sm80_delta_params &a, prepare_memory &m)
{
    if (prepare_warp() == 0 && lane_index() == 0) {
        m.item = m.next;
        m.item.chunk = a.memory + m.item.index * a.chunk_bytes;
        m.item.heads = (chunk_head *)(m.item.chunk + a.heads_at) + m.item.key_head * a.group;
    }
    sync_preparers();
}

/* The gates of value heads `pair` and pair + 1 of a group. */
struct pair_gates {
    gate_inputs inputs;

    GPU_INLINE int32_t of_pair()
    {
        return prepare_warp() % GATE_WARPS;
    }

    GPU_INLINE bool are_made(const sm80_delta_params &a, int32_t pair)
    {
        return pair + of_pair() < a.group;
    }

    template <int GATES>
    __device__ __forceinline__ void load(const sm80_delta_params &a, int32_t pair,
                                         const prepare_memory &m)
    {
        if (GATES == GATES_USUAL && are_made(a, pair)) {
            inputs.load(a.p, m.item.request, m.item.first + 2 * lane_index(),
                        m.item.key_head * a.group + pair + of_pair());
        }
    }

    template <int GATES>
    __device__ __forceinline__ void make(const sm80_delta_params &a, int32_t pair,
                                         prepare_memory &m) const
    {
        int32_t i = of_pair();
        if (GATES == GATES_OF_HEADS && are_made(a, pair)) {
            make_any_gates(a.p, m.item, m.item.key_head * a.group + pair + i, (rule_memory &)m,
                           m.gates[i], m.item.heads[pair + i]);
        } else if (are_made(a, pair)) {
            make_gates(a.p, inputs, m.item.request.num_tokens - m.item.first, m.gates[i],
                       m.item.heads[pair + i]);
        }
    }
};

/* A warp without gates looks up m.next, item number `next`. */
GPU_INLINE void find_next(const sm80_delta_params &a, int32_t next, prepare_memory &m)
{
    if (prepare_warp() == PREPARE_WARPS - 1 && next < a.end_part) {
        find_item(a, next, m.next);
    }
}

/* Gates and scores of value head i of four without a delta; the memory of A has those of the last
 * two. */
GPU_INLINE prepare_gates &gates_of(prepare_memory &m, int32_t i)
{
    static_assert(sizeof m.a.blocks >= 2 * sizeof *m.gates, "gates of two heads");
    return i < 2 ? m.gates[i] : ((prepare_gates *)m.a.blocks)[i - 2];
}

GPU_INLINE chunk_tile &scores_of(prepare_memory &m, int32_t i)
{
    return i < 2 ? m.scores[i] : m.a.inverse[i - 2];
}

/* The rest of a chunk without a delta: each warp makes the gates of one of four value heads, then
 * all make their scores. */
GPU_INLINE void prepare_scores(const sm80_delta_params &a, const slot_sums &sums, rule_memory &m)
{
#pragma unroll 1
    for (int32_t first = 0; first < a.group; first += PREPARE_WARPS) {
        int32_t warp = prepare_warp(), count = min(PREPARE_WARPS, a.group - first);
        chunk_head *heads = m.item.heads + first;
        if (warp < count) {
            make_any_gates(a.p, m.item, m.item.key_head * a.group + first + warp, m,
                           gates_of(m, warp), heads[warp]);
        }
        sync_preparers(); /* the gates are written */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            if (first == 0) {
                clear_blocks<RIGHT_OF_DIAGONAL>(scores_of(m, i));
            }
            decay_slots(gates_of(m, i), false, sums, scores_of(m, i), m.a, i);
        }
        finish_tile();
        sync_preparers(); /* the scores are written */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            store_tile<sizeof(chunk_tile)>(scores_of(m, i), heads[i].scores);
        }
        wait_for_tiles();
        if (first + PREPARE_WARPS < a.group) {
            sync_preparers(); /* all warps have read gates and tiles */
        }
    }
}

/* Prepares m.item for all of its value heads, and looks up m.next, item number `next`. The whole
 * group calls; a barrier must follow before the memory is reused. GATES_OF_HEADS: m is a
 * rule_memory. */
template <int GATES>
GPU_INLINE void prepare_chunk(const sm80_delta_params &a, int32_t next, prepare_memory &m)
{
    bool has_delta = GATES != GATES_OF_HEADS || !a.p.rule.additive;
    slot_sums sums;
    pair_gates gates;
    gates.load<GATES>(a, 0, m);
    fetch_keys(a, m);
    if constexpr (GATES == GATES_USUAL) {
        gates.make<GATES>(a, 0, m);
    }
    find_next(a, next, m);
    wait_for_copies();
    sync_preparers(); /* all inputs are written */
    make_keys<GATES>(a, m);
    finish_tile();
    sync_preparers(); /* gates and keys are written */
    store_keys(m);
    if (GATES == GATES_OF_HEADS && has_delta) {
        gates.make<GATES>(a, 0, m);
    }
    multiply_slots(m, has_delta, sums);
    wait_for_tiles();
    sync_preparers(); /* all warps have read k and q */
    if (!has_delta) {
        prepare_scores(a, sums, (rule_memory &)m);
        return;
    }
#pragma unroll 1
    for (int32_t pair = 0; pair < a.group; pair += 2) {
        int32_t count = min(2, a.group - pair);
        if (pair > 0) {
            gates.load<GATES>(a, pair, m);
            gates.make<GATES>(a, pair, m);
            sync_preparers();
        }
        chunk_head *heads = m.item.heads + pair;
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            clear_blocks<RIGHT_OF_DIAGONAL>(m.scores[i]);
            decay_slots(m.gates[i], true, sums, m.scores[i], m.a, i);
        }
        sync_lanes();
        int32_t half = lane_again() / 16;
        invert_blocks(m.a, min(half, count - 1), half < count);
        finish_tile();
        sync_preparers(); /* scores, A and the blocks on the diagonal are written */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            store_tile<sizeof(chunk_tile)>(m.scores[i], heads[i].scores);
            int32_t warp = prepare_warp();
            clear_blocks<LEFT_OF_DIAGONAL>(m.a.inverse[i]);
            invert_column(m.a, i, m.gates[i].beta, i == 0 ? warp : PREPARE_WARPS - 1 - warp,
                          m.a.inverse[i]);
        }
        finish_tile();
        sync_preparers(); /* the inverses are written */
#pragma unroll 1
        for (int32_t i = 0; i < count; i++) {
            store_tile<sizeof(chunk_tile)>(m.a.inverse[i], heads[i].inverse);
        }
        wait_for_tiles();
        if (pair + 2 < a.group) {
            sync_preparers(); /* all warps have read gates and tiles */
        }
    }
}

/* Prepares items a.first_part .. a.end_part - 1, one in every so many groups of the launch;
 * `number` is this group's index. FLAGS: sets the flag of each prepared part. */
template <bool FLAGS, int GATES>
GPU_INLINE void prepare_items(const sm80_delta_params &a, int32_t number, prepare_memory &m)
{
    if (a.first_part + number >= a.end_part) {
        return;
    }
    if (prepare_warp() == 0) {
        find_item(a, a.first_part + number, m.next);
        sync_lanes();
    }
#pragma unroll 1
    for (;;) {
        enter_next(a, m);
        int32_t next = m.item.index * a.p.num_k_heads + m.item.key_head +
                       (int32_t)(gridDim.x * blockDim.x / PREPARE_THREADS);
        if (m.item.is_there) {
            prepare_chunk<GATES>(a, next, m);
        } else {
            find_next(a, next, m);
        }
        if constexpr (FLAGS) {
            wait_for_tiles<true>();
            /* the state kernel reads it by bulk copies */
            asm volatile("fence.proxy.async;" ::: "memory");
        }
        sync_preparers();
        if (FLAGS && prepare_warp() == 0 && lane_again() == 0 && m.item.is_there) {
            __threadfence();
            asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(
                             flag_of(a, m.item.index, m.item.key_head))
                         : "memory");
        }
        if (next >= a.end_part) {
            return;
        }
    }
}

#endif
