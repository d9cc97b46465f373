/* SPDX-License-Identifier: Apache-2.0 */
/* The producer warps of an attend CTA: they walk the CTA's segments and copy tiles into shared
 * memory, some stages ahead of the four consumer warps. One copies queries and keys and the other
 * values, or a single one copies everything. */
#ifndef CUDA_FLASH_SM80_PRODUCER_CUH
#define CUDA_FLASH_SM80_PRODUCER_CUH

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/run.h"
#include "gpu/device/visible.h"
#include "sm80_lists.cuh"

#define NO_RUN (-1)
#define SM80_AHEAD 2 /* tiles of a segment still to copy when the next segment is drawn */

/* Shared memory of a multiprocessor; consumer GPUs have 100 KB. */
#if defined(__CUDA_ARCH__) &&                                                                      \
    (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define SM80_SMEM_OF_SM (100 << 10)
#else
#define SM80_SMEM_OF_SM (228 << 10)
#endif

template <int KIND, int D> struct decode_shape {
    static constexpr bool bytes = KIND >= KIND_E4M3 && KIND <= KIND_INT8;
    static constexpr bool packed = KIND >= KIND_INT4;
    static constexpr bool prepared = KIND >= KIND_INT8; /* queries have terms (sm80_query.cuh) */
    /* keys are Hadamard-transformed */
    static constexpr bool hadamard = KIND == KIND_INT4 || KIND == KIND_LEVELS;
    static constexpr bool large_head = D > 256; /* warps split V's dims (sm80_head512.cuh) */
    static constexpr int element = bytes ? 1 : KIND == KIND_F32 ? 4 : 2;
    static constexpr int q_element = KIND == KIND_F32 ? 4 : 2;
    static constexpr bool steps = KIND >= KIND_LEVELS; /* values of TurboQuant */
    /* bytes of a key or value; of KIND_K8V4 on average */
    static constexpr int row = KIND == KIND_K8V4 ? D * 3 / 4 : packed ? D / 2 : D * element;
    static constexpr int chunks = row / 16; /* 16-byte chunks of a row */
    static constexpr int tile = large_head && !bytes            ? SM80_LARGE_HEAD_TILE
                                : packed || (bytes && D <= 128) ? SM80_NARROW_TILE
                                                                : SM80_TILE;
    static constexpr int half = tile * row;
    /* bytes of scales of a 4-bit row; those of K and V fit into the tail */
    static constexpr int scale_bytes = KIND == KIND_NVFP4 ? D / 16 : 4;
    /* the rows' scales, and the bytes before a row in its first piece; in the epilogue row_max and
     * row_sum of 4 warps */
    static constexpr int scales = KIND == KIND_LEVELS ? SM80_LEVELS_ROOM * tile
                                  : KIND == KIND_K8V4 ? SM80_K8V4_ROOM * tile
                                  : packed            ? 2 * tile * scale_bytes
                                                      : 1024;
    static constexpr int tail = large_head && !bytes ? 0 : scales > 1024 ? scales : 1024;
    static constexpr int stage = 2 * half + tail;
    static constexpr int q_bytes = SM80_ROWS * D * q_element;
    static constexpr int q_buffers = large_head ? 1 : 2;
    /* The terms are followed by the rounding errors of Hadamard-transformed queries, and by two
     * tiles' scores that warps exchange. */
    static constexpr int before_levels = SM80_FIXED_SMEM + (bytes || packed ? SM80_TERMS_SMEM : 0) +
                                         (hadamard ? q_bytes : 0) +
                                         (large_head ? SM80_SCORES_SMEM(tile) : 0);
    /* whether a table has the levels (sm80_turboquant.cuh); with D 64 it would cost CTAs */
    static constexpr bool table = KIND == KIND_LEVELS && D == 128;
    static constexpr int levels = SM80_LEVELS_AT(q_buffers * q_bytes + before_levels);
    static constexpr int fixed =
        table ? levels + SM80_LEVELS_TABLE - q_buffers * q_bytes : before_levels;
    /* 4 consumer warps and the producers. One producer suffices for KIND_NVFP4 and KIND_LEVELS,
     * whose tiles are a few spans; this leaves registers for three CTAs with swapped operands. */
    static constexpr bool alone = (KIND == KIND_NVFP4 || KIND == KIND_LEVELS) && D <= 128;
    static constexpr int threads = 128 + (alone ? 32 : 64);
    /* CTAs of a multiprocessor, limited by registers; swap_ctas with swapped operands. Those that
     * do not fit into shared memory with two stages need no registers. */
    static constexpr int fitting =
        SM80_SMEM_OF_SM / (q_buffers * q_bytes + fixed + 2 * stage + 1024);
    static constexpr int most_ctas = fitting > 1 ? fitting : 1;
    static constexpr int wanted = D > 128 || KIND == KIND_F32 ? 1 : 2;
    static constexpr int ctas = wanted < most_ctas ? wanted : most_ctas;
    static constexpr int swap_ctas = !alone ? ctas : most_ctas < 3 ? most_ctas : 3;
};

/* Followed by the query's terms, its rounding errors and the stages. */
template <int KIND, int D> struct shared_storage {
    using S = decode_shape<KIND, D>;
    alignas(128) char q[S::q_buffers][S::q_bytes];
    gpu_run runs[SM80_MAX_STAGES + 1]; /* each stage belongs to one run */
    uint64_t full[SM80_MAX_STAGES], empty[SM80_MAX_STAGES], q_empty[S::q_buffers];
    int32_t run_of_stage[SM80_MAX_STAGES];
    int2 all_see[4]; /* for each consumer warp: the keys that all rows of its run see */
    int32_t last_one, taken[2];
};

template <int KIND, int D> GPU_INLINE char *stage_at(shared_storage<KIND, D> &smem, int stage)
{
    using S = decode_shape<KIND, D>;
    static_assert(sizeof smem <= S::q_buffers * S::q_bytes + SM80_FIXED_SMEM, "room for it");
    return (char *)&smem + S::q_buffers * S::q_bytes + S::fixed + stage * S::stage;
}

/* The shared address of the table of levels. */
template <int KIND, int D> GPU_INLINE uint32_t levels_at(shared_storage<KIND, D> &smem)
{
    return shared_address(&smem) + decode_shape<KIND, D>::levels;
}

template <int KIND, int D> GPU_INLINE float *terms_of(shared_storage<KIND, D> &smem)
{
    using S = decode_shape<KIND, D>;
    static_assert(2 * SM80_ROWS * 4 <= SM80_TERMS_SMEM, "two of each row");
    return (float *)((char *)&smem + S::q_buffers * S::q_bytes + SM80_FIXED_SMEM);
}

/* The chunk's place in its row, so that neighbouring rows have the same chunk in different banks.
 */
template <int CHUNKS> GPU_INLINE int swizzle(int row, int chunk)
{
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

/* The byte offset of a chunk in a tile: columns of 128 bytes, as TMA swizzles them. */
template <int CHUNKS, int TILE> GPU_INLINE int place_of(int row, int chunk)
{
    return CHUNKS >= 8 ? (chunk >> 3) * TILE * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16
                       : row * CHUNKS * 16 + swizzle<CHUNKS>(row, chunk) * 16;
}

/* The location of a tile's keys: block and slot of the lane's box, or of each of its keys lane,
 * lane + 32 etc. */
template <int TILE> struct tile_place {
    int32_t block[TILE / 32], slot[TILE / 32];
    int32_t low, high; /* keys of the tile to read: low .. high - 1 */
};

/* The range of a tile's keys to read. */
template <int TILE> GPU_INLINE tile_place<TILE> enter_tile(const gpu_run &run, int32_t base)
{
    tile_place<TILE> at;
    at.low = run.row_tile.k0 - base;
    at.high = run.row_tile.k1 - base;
    return at;
}

/* Finds block and slot of a key in the request's row of the block table; of a listed key, its unit
 * and itself, of which resolve_place makes both. */
GPU_INLINE void find_slot(const gpu_problem &p, const gpu_run &run, const int32_t *units,
                          int32_t key, int32_t &block, int32_t &slot)
{
    if (units != nullptr) {
        block = units[key >> p.unit_shift];
        slot = key;
        return;
    }
    int32_t index = p.paged ? key / p.block_size : 0;
    slot = key - index * p.block_size + run.row_tile.key_start;
    block = p.paged ? p.block_table[run.row_tile.table + index] : 0;
}

/* Locates a tile's boxes. The entries are used one tile later, so this does not wait for them. */
template <int TILE>
GPU_INLINE tile_place<TILE> place_boxes(const sm80_params &a, const gpu_run &run,
                                        const int32_t *units, int32_t tile, int lane,
                                        int boxes_of_page)
{
    int32_t base = (run.row_tile.k0 & ~(TILE - 1)) + tile * TILE;
    tile_place<TILE> at = enter_tile<TILE>(run, base);
    int32_t rows = a.box_rows, key = lane / boxes_of_page * rows;
    at.block[0] = -1;
    at.slot[0] = 0;
    if (key < TILE && key < at.high && key + rows > at.low) {
        find_slot(a.p.problem, run, units, base + key, at.block[0], at.slot[0]);
    }
    return at;
}

/* Locates a tile's keys, one by one, also one tile ahead. `together` is the number of slots (1 or
 * 4) whose scales are interleaved; they are read together. */
template <int TILE>
GPU_INLINE tile_place<TILE> place_keys(const gpu_problem &p, const gpu_run &run,
                                       const int32_t *units, int32_t tile, int lane, int together)
{
    int32_t base = (run.row_tile.k0 & ~(TILE - 1)) + tile * TILE;
    tile_place<TILE> at = enter_tile<TILE>(run, base);
    at.low &= -together;
    at.high = (at.high + together - 1) & -together;
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int32_t key = lane + 32 * i;
        at.block[i] = at.slot[i] = 0;
        if (!p.paged) {
            at.block[i] = run.row_tile.key_start + base + key;
        } else if (key >= at.low && key < at.high) {
            find_slot(p, run, units, base + key, at.block[i], at.slot[i]);
        }
    }
    return at;
}

/* Makes blocks and slots of COUNT units, one tile after these were loaded. */
template <int COUNT, int TILE>
GPU_INLINE void resolve_place(const gpu_problem &p, tile_place<TILE> &at)
{
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        if (at.block[i] >= 0) {
            find_in_unit(p, at.block[i], at.slot[i], at.block[i], at.slot[i]);
        }
    }
}

/* Copies K or V of a tile by TMA: each lane has a box of one block and one column of 128 bytes.
 * Unseen slots of a block are copied too, blocks without visible slots are not. */
template <int KIND, int D, int TILE>
GPU_INLINE void copy_boxes(const sm80_params &a, const tensor_map &map, int32_t head,
                           const tile_place<TILE> &at, uint32_t to, uint32_t barrier, int lane)
{
    using S = decode_shape<KIND, D>;
    constexpr int columns = S::chunks >= 8 ? S::chunks / 8 : 1;
    constexpr int row_bytes = S::chunks >= 8 ? 128 : S::chunks * 16;
    int32_t rows = a.box_rows, page = lane / columns, column = lane - page * columns;
    bool has_box = at.block[0] >= 0;
    int count = __popc(__ballot_sync(0xffffffffu, has_box));
    if (lane == 0) {
        barrier_expect(barrier, count * rows * row_bytes);
    }
    __syncwarp();
    if (has_box) {
        copy_box(to + column * TILE * row_bytes + page * rows * row_bytes, &map,
                 column * row_bytes / S::element, at.slot[0], head, at.block[0], barrier);
    }
}

/* Copies a whole tile in stretches of ROWS rows at a constant stride. offset: of the lane's rows,
 * in 16 bytes. */
template <int KIND, int D, int TILE, int ROWS>
GPU_INLINE void copy_stretches(const char *base, int64_t step, const int32_t (&offset)[TILE / 32],
                               uint32_t to, int lane)
{
    using S = decode_shape<KIND, D>;
    constexpr int rows = S::chunks > 32 ? 1 : 32 / S::chunks;  /* rows of one instruction */
    constexpr int turns = S::chunks > 32 ? S::chunks / 32 : 1; /* instructions of one row */
    const int hi = lane / S::chunks, chunk = lane % S::chunks;
    base += hi * step + chunk * 16;
#pragma unroll
    for (int first = 0; first < TILE; first += ROWS) {
        const int32_t found = __shfl_sync(0xffffffffu, offset[first / 32], first % 32);
        const char *from = base + ((int64_t)found << 4);
#pragma unroll
        for (int i = 0; i < ROWS / rows * turns; i++) {
            const int row = i / turns * rows, further = i % turns * 32;
            copy16(to + place_of<S::chunks, TILE>(first + row + hi, chunk + further),
                   from + row * step + further * 16, 16);
        }
    }
}

/* Copies K or V of a tile with cp.async. Rows that no query sees and dims past the head size become
 * zero. Stretches of 16 rows hold for all block sizes that 16 divides, those of 4 for short units
 * of listed keys and, in bf16, for pages of 4, 12, 20 and so on. */
template <int KIND, int D, int TILE>
GPU_INLINE void copy_half(const gpu_params &p, const gpu_cache &cache, int32_t head_size,
                          int32_t head, const tile_place<TILE> &at, uint32_t to, int lane)
{
    using S = decode_shape<KIND, D>;
    constexpr int rows = S::chunks > 32 ? 1 : 32 / S::chunks;  /* rows of one instruction */
    constexpr int turns = S::chunks > 32 ? S::chunks / 32 : 1; /* instructions of one row */
    const char *base = cache.data + head * cache.head;
    const int hi = lane / S::chunks, chunk = lane % S::chunks;
    int bytes = head_size * S::element;
    int32_t offset[TILE / 32]; /* in 16 bytes */
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        offset[i] = (int32_t)((at.block[i] * cache.block + at.slot[i] * cache.slot) >> 4);
    }
    const int32_t together =
        p.problem.listed > 0 ? 1 << p.problem.unit_shift : p.problem.block_size;
    /* short units of listed keys were measured in bf16 alone */
    constexpr int least = KIND == KIND_BF16 && rows <= 4 ? 4 : 16;
    if ((!p.problem.paged || together % least == 0) && at.low <= 0 && at.high >= TILE &&
        bytes == D * S::element) {
        const int64_t step = p.problem.paged ? cache.slot : cache.block;
        if (least == 16 || !p.problem.paged || together % 16 == 0) {
            copy_stretches<KIND, D, TILE, 16>(base, step, offset, to, lane);
        } else {
            copy_stretches<KIND, D, TILE, least>(base, step, offset, to, lane);
        }
        return;
    }
#pragma unroll
    for (int part = 0; part < TILE / 32; part++) {
#pragma unroll 4
        for (int i = 0; i < 32 / rows * turns; i++) {
            int row = part * 32 + i / turns * rows + hi, own = chunk + i % turns * 32;
            int32_t found = __shfl_sync(0xffffffffu, offset[part], row & 31);
            bool real = row >= at.low && row < at.high && own * 16 < bytes;
            const char *from = base + (real ? ((int64_t)found << 4) + own * 16 : 0);
            copy16(to + place_of<S::chunks, TILE>(row, own), from, real ? 16 : 0);
        }
    }
}

/* Copies row scales of 4 bytes; scales of rows that no query sees become zero. */
template <int TILE>
GPU_INLINE void copy_scales(const gpu_cache &cache, int32_t head, const tile_place<TILE> &at,
                            uint32_t to, int lane)
{
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int32_t key = lane + 32 * i;
        bool real = key >= at.low && key < at.high;
        copy4(to + key * 4, row_scale_at(cache, at.block[i], at.slot[i], head), real ? 4 : 0);
    }
}

/* Copies `bytes` of each row in pieces of `unit` (4, 8 or 16) bytes; a row has a power of two of
 * pieces, at most 32. */
template <int TILE>
GPU_INLINE void copy_pieces(const char *from, int64_t block, int64_t slot,
                            const tile_place<TILE> &at, int bytes, int unit, uint32_t to, int pitch,
                            int lane)
{
    int pieces = bytes / unit, rows = 32 / pieces, hi = lane / pieces;
    int within = (lane - hi * pieces) * unit;
#pragma unroll
    for (int part = 0; part < TILE / 32; part++) {
        int64_t offset = at.block[part] * block + at.slot[part] * slot;
#pragma unroll 1
        for (int first = 0; first < 32; first += rows) {
            int row = part * 32 + first + hi;
            int64_t found = __shfl_sync(0xffffffffu, offset, row & 31);
            bool real = row >= at.low && row < at.high;
            const char *source = from + (real ? found : 0) + within;
            uint32_t target = to + row * pitch + within;
            if (unit == 16) {
                copy16(target, source, real ? 16 : 0);
            } else if (unit == 8) {
                copy8(target, source, real ? 8 : 0);
            } else {
                copy4(target, source, real ? 4 : 0);
            }
        }
    }
}

/* The largest piece that divides all offsets. */
GPU_INLINE int unit_of(uint64_t bits)
{
    return (bits & 15) == 0 ? 16 : (bits & 7) == 0 ? 8 : 4;
}

/* Copies contiguous spans of a tile's blocks, `bytes` each, one block for each lane. */
template <int TILE>
GPU_INLINE void copy_spans(const char *from, int64_t block, int64_t slot,
                           const tile_place<TILE> &at, int bytes, uint32_t to, uint32_t barrier,
                           int lane)
{
    bool has_box = at.block[0] >= 0;
    int count = __popc(__ballot_sync(0xffffffffu, has_box));
    if (lane == 0) {
        barrier_expect(barrier, count * bytes);
    }
    __syncwarp();
    if (has_box) {
        copy_span(to + lane * bytes, from + at.block[0] * block + at.slot[0] * slot, bytes,
                  barrier);
    }
}

/* Bytes in a row's first aligned piece that precede the row. */
GPU_INLINE int bytes_before(const sm80_params &a, const gpu_cache &cache, int32_t head)
{
    return (int)((uintptr_t)cache.data + head * cache.head) & (a.unit - 1);
}

/* Copies rows of `bytes` at unaligned addresses in aligned pieces of a.unit bytes, to rows `pitch`
 * apart. Bytes after a row's end are not read. */
template <int TILE>
GPU_INLINE void copy_unaligned_rows(const sm80_params &a, const gpu_cache &cache, int32_t head,
                                    const tile_place<TILE> &at, int bytes, uint32_t to, int pitch,
                                    int lane)
{
    const int before = bytes_before(a, cache, head), unit = a.unit, end = before + bytes;
    const int pieces = (end + unit - 1) / unit, inverse = (1 << 20) / pieces + 1;
    const char *from = cache.data + head * cache.head - before;
#pragma unroll
    for (int part = 0; part < TILE / 32; part++) {
        int64_t offset = at.block[part] * cache.block + at.slot[part] * cache.slot;
#pragma unroll 1
        for (int i = lane; i < 32 * pieces; i += 32) {
            int row = i * inverse >> 20, piece = i - row * pieces, key = part * 32 + row;
            int64_t found = __shfl_sync(0xffffffffu, offset, row);
            bool real = key >= at.low && key < at.high;
            const char *source = from + (real ? found + piece * unit : before);
            uint32_t target = to + key * pitch + piece * unit;
            int count = real ? min(unit, end - piece * unit) : 0;
            if (unit == 16) {
                copy16(target, source, count);
            } else if (unit == 8) {
                copy8(target, source, count);
            } else {
                copy4(target, source, count);
            }
        }
    }
}

/* Copies row scales that are contiguous in a block, `bytes` each. */
template <int TILE>
GPU_INLINE void copy_scale_spans(const sm80_params &a, const gpu_cache &cache, int32_t head,
                                 const tile_place<TILE> &at, int bytes, uint32_t to,
                                 uint32_t barrier, int lane)
{
    copy_spans<TILE>(cache.row_scale + head * cache.row_scale_head, cache.row_scale_block,
                     cache.row_scale_slot, at, a.box_rows * bytes, to, barrier, lane);
}

/* Copies codes of K or V, and the scales that follow them in memory. */
template <int KIND, int D, int TILE>
GPU_INLINE void copy_codes(const sm80_params &a, const gpu_cache &cache, const sm80_plane &plane,
                           int32_t head, const tile_place<TILE> &at, uint32_t to, uint32_t barrier,
                           int lane)
{
    using S = decode_shape<KIND, D>;
    const char *from = cache.data + head * cache.head;
    if (a.mapped) {
        copy_spans<TILE>(from, cache.block, cache.slot, at, a.box_rows * plane.pitch, to + plane.at,
                         barrier, lane);
        return;
    }
    if constexpr (S::steps) {
        const sm80_plane &last = a.planes[a.together || &plane == &a.planes[1]];
        int bytes = last.scale_at - plane.at +
                    (&last == &a.planes[1] ? 4
                     : KIND == KIND_LEVELS ? 2
                                           : 0);
        copy_unaligned_rows<TILE>(a, cache, head, at, bytes, to + plane.at, plane.pitch, lane);
        return;
    }
    int unit = unit_of((uint64_t)from | cache.block | cache.slot | plane.pitch);
    copy_pieces<TILE>(from, cache.block, cache.slot, at, S::row, unit, to + plane.at, plane.pitch,
                      lane);
}

/* Copies scales that are stored apart from their codes, row by row. */
template <int KIND, int D, int TILE>
GPU_INLINE void copy_code_scales(const gpu_cache &cache, const sm80_plane &plane, int32_t head,
                                 const tile_place<TILE> &at, uint32_t to, int lane)
{
    using S = decode_shape<KIND, D>;
    const char *from = cache.row_scale + head * cache.row_scale_head;
    int unit = S::scale_bytes == 4
                   ? 4
                   : unit_of((uint64_t)from | cache.row_scale_block | cache.row_scale_slot |
                             plane.scale_at | plane.scale_pitch | S::scale_bytes);
    copy_pieces<TILE>(from, cache.row_scale_block, cache.row_scale_slot, at, S::scale_bytes, unit,
                      to + plane.scale_at, plane.scale_pitch, lane);
}

/* Copies the queries of a run, elements of BYTES bytes, with a warp; rows past the last become
 * zero.
 */
template <int D, int BYTES>
GPU_INLINE void copy_query(const gpu_params &p, const gpu_run &run, uint32_t to, int lane)
{
    constexpr int chunks = D * BYTES / 16;
#pragma unroll 4
    for (int i = lane; i < SM80_ROWS * chunks; i += 32) {
        int row = i / chunks, chunk = i % chunks;
        bool real = row < run.row_tile.num_rows && chunk * (16 / BYTES) < p.problem.head_size;
        int32_t at = run.row_tile.first_row + (real ? row : 0), token = at / p.problem.group;
        const char *from =
            p.q.data + (int64_t)(run.row_tile.query_start + token) * p.q.row +
            (int64_t)(run.head * p.problem.group + at - token * p.problem.group) * p.q.head;
        copy16(to + (row * chunks + swizzle<chunks>(row, chunk)) * 16,
               from + (real ? chunk * 16 : 0), real ? 16 : 0);
    }
}

template <int KIND, int D> struct producer {
    using S = decode_shape<KIND, D>;
    const sm80_params &a;
    const gpu_params &p;
    shared_storage<KIND, D> &smem;
    const bool values; /* true for the producer warp of values; false for a single producer */
    const int lane;
    int stage = 0, phase = 0, run_slot = 0, q_slot = 0, q_phase = 0;
    int32_t taken = 0;              /* the last number drawn, in lane 0 of the warp that draws */
    int32_t until_draw = 0;         /* tiles of the segment to copy before the next draw */
    const int32_t *units = nullptr; /* the units of the item's list; NULL: it has none */

    __device__ producer(const sm80_params &params, shared_storage<KIND, D> &memory, int thread)
        : a(params), p(params.p), smem(memory), values(!S::alone && thread >= 32), lane(thread & 31)
    {
    }

    __device__ __forceinline__ void next_stage()
    {
        stage++;
        if (stage == a.stages) {
            stage = 0;
            phase ^= 1;
        }
    }

    /* Completes a stage: an arrival by the copies of each lane, and one by lane 0 for its ordinary
     * stores. */
    __device__ __forceinline__ void commit(int32_t run)
    {
        if (!values && lane == 0) {
            smem.run_of_stage[stage] = run;
            barrier_arrive(shared_address(&smem.full[stage]));
        }
        barrier_arrive_copies(shared_address(&smem.full[stage]));
        next_stage();
    }

    /* Whether keys are located one by one, also for scales that are copied row by row. */
    __device__ __forceinline__ bool by_keys() const
    {
        return !a.mapped || (S::packed && !a.scale_spans) ||
               (S::bytes && !a.scale_spans && (values ? p.v : p.k).form == GPU_ROW_SCALED);
    }

    /* Locates a tile, by boxes or by keys. */
    __device__ __forceinline__ void place(const gpu_run &run, int32_t tile,
                                          tile_place<S::tile> &boxes, tile_place<S::tile> &keys)
    {
        constexpr int columns = S::chunks >= 8 && !S::packed ? S::chunks / 8 : 1;
        if (a.mapped) {
            boxes = place_boxes<S::tile>(a, run, units, tile, lane, columns);
        }
        if (by_keys()) {
            keys =
                place_keys<S::tile>(p.problem, run, units, tile, lane, KIND == KIND_NVFP4 ? 4 : 1);
        }
    }

    /* Copies K or V of a tile of a 4-bit kind, if not all of it comes in spans. */
    __device__ __forceinline__ void copy_plane(bool of_values, int32_t head,
                                               const tile_place<S::tile> &boxes,
                                               const tile_place<S::tile> &keys)
    {
        const gpu_cache &cache = of_values ? p.v : p.k;
        const sm80_plane &plane = a.planes[of_values];
        uint32_t to = shared_address(stage_at(smem, stage));
        uint32_t barrier = shared_address(&smem.full[stage]);
        if (!a.scale_spans) {
            copy_code_scales<KIND, D, S::tile>(cache, plane, head, keys, to, lane);
        }
        if (!of_values || !a.together) {
            copy_codes<KIND, D, S::tile>(a, cache, plane, head, a.mapped ? boxes : keys, to,
                                         barrier, lane);
        }
    }

    /* Copies the warp's part of a tile: K, V, or both. */
    __device__ __forceinline__ void copy_tile(int32_t head, const tile_place<S::tile> &boxes,
                                              const tile_place<S::tile> &keys)
    {
        if constexpr (S::packed) {
#pragma unroll 1
            for (int i = values; i < (S::alone ? 2 : values + 1); i++) {
                copy_plane(i != 0, head, boxes, keys);
            }
            return;
        }
        const gpu_cache &cache = values ? p.v : p.k;
        uint32_t to = shared_address(stage_at(smem, stage));
        uint32_t barrier = shared_address(&smem.full[stage]);
        if (S::bytes && cache.form == GPU_ROW_SCALED) {
            uint32_t scales = to + 2 * S::half + (values ? S::tile * 4 : 0);
            if (a.scale_spans) {
                copy_scale_spans<S::tile>(a, cache, head, boxes, 4, scales, barrier, lane);
            } else {
                copy_scales<S::tile>(cache, head, keys, scales, lane);
            }
        }
        to += values ? S::half : 0;
        if (a.mapped) {
            copy_boxes<KIND, D, S::tile>(a, values ? a.v_map : a.k_map, head, boxes, to, barrier,
                                         lane);
        } else {
            copy_half<KIND, D, S::tile>(p, cache,
                                        values ? p.problem.head_size_v : p.problem.head_size, head,
                                        keys, to, lane);
        }
    }

    /* Draws the number of a segment. Only one warp draws; the other gets the number in work(). */
    __device__ __forceinline__ void draw()
    {
        if (!values && lane == 0) {
            taken = atomicAdd(&p.schedule.header->taken, 1);
        }
    }

    /* Starts a run: the producer of keys copies its queries with the first tile. */
    __device__ __forceinline__ void begin_run(const gpu_run &run)
    {
        if (lane == 0) {
            smem.runs[run_slot] = run; /* the wait for a free stage implies a free slot */
        }
        barrier_wait(shared_address(&smem.q_empty[q_slot]), q_phase ^ 1);
        copy_query<D, S::q_element>(p, run, shared_address(smem.q[q_slot]), lane);
        q_slot++;
        if (q_slot == S::q_buffers) {
            q_slot = 0;
            q_phase ^= 1;
        }
    }

    /* Finds block (-1: not read) and slot of the lane's box among 32, starting with the boxes of
     * `tile`. */
    __device__ __forceinline__ void find_box(const gpu_run &run, int32_t tile, int32_t &block,
                                             int32_t &slot)
    {
        const int32_t base = run.row_tile.k0 & ~(S::tile - 1);
        const int32_t key = base + tile * S::tile + lane * a.box_rows;
        const int32_t end = min(run.row_tile.k1, base + (run.tile + run.count) * S::tile);
        block = -1;
        slot = 0;
        if (key < end && key + a.box_rows > run.row_tile.k0) { /* codes have no lists */
            find_slot(p.problem, run, nullptr, key, block, slot);
        }
    }

    /* Rows of K or V of a head, and scales in planes of their own: their addresses, bytes of a box
     * (0: copied together with others) and offsets in a stage. */
    struct spans {
        const char *rows, *scales;
        int32_t row_bytes, scale_bytes, rows_at, scales_at;
    };

    __device__ __forceinline__ spans spans_of(bool of_values, int32_t head)
    {
        const gpu_cache &cache = of_values ? p.v : p.k;
        const sm80_plane &plane = a.planes[of_values];
        bool alone = plane.scale_pitch != plane.pitch, brought = of_values && a.together;
        return {cache.data + head * cache.head,
                cache.row_scale + head * cache.row_scale_head,
                brought ? 0 : a.box_rows * plane.pitch,
                alone ? a.box_rows * S::scale_bytes : 0,
                plane.at,
                plane.scale_at};
    }

    GPU_INLINE void copy_box_spans(const spans &box, uint32_t to, int32_t index, uint32_t barrier)
    {
        if (box.row_bytes > 0) {
            copy_span(to + box.rows_at + index * box.row_bytes, box.rows, box.row_bytes, barrier);
        }
        if (box.scale_bytes > 0) {
            copy_span(to + box.scales_at + index * box.scale_bytes, box.scales, box.scale_bytes,
                      barrier);
        }
    }

    /* Copies a run in spans. The block lookups of one tile would take as long as the tile's copy,
     * so the lanes look up 32 boxes at once while the previous ones are copied. */
    __device__ __forceinline__ void copy_run_spans(const gpu_run &run)
    {
        constexpr int planes = S::alone ? 2 : 1;
        const int32_t boxes = S::tile / a.box_rows, batch = 32 / boxes; /* tiles of 32 boxes */
        const int32_t own_tile = lane / boxes, own_box = lane - own_tile * boxes;
        spans from[planes], own[planes]; /* for the head; for the lane's box */
        int32_t box_bytes = 0, block, slot;
#pragma unroll
        for (int n = 0; n < planes; n++) {
            own[n] = from[n] = spans_of(S::alone ? n != 0 : values, run.head);
            box_bytes += from[n].row_bytes + from[n].scale_bytes;
        }
        find_box(run, run.tile, block, slot);
        for (int32_t i = 0; i < run.count; i += batch) {
            const bool real = block >= 0;
            const uint32_t all_real = __ballot_sync(0xffffffffu, real);
#pragma unroll
            for (int n = 0; n < planes; n++) {
                const gpu_cache &cache = (S::alone ? n != 0 : values) ? p.v : p.k;
                own[n].rows = from[n].rows + block * cache.block + slot * cache.slot;
                own[n].scales =
                    from[n].scales + block * cache.row_scale_block + slot * cache.row_scale_slot;
            }
            find_box(run, run.tile + i + batch, block, slot);
            for (int32_t t = 0; t < min(batch, run.count - i); t++) {
                const uint32_t to = shared_address(stage_at(smem, stage));
                const uint32_t barrier = shared_address(&smem.full[stage]);
                const uint32_t of_tile = all_real >> t * boxes & (0xffffffffu >> (32 - boxes));
                barrier_wait(shared_address(&smem.empty[stage]), phase ^ 1);
                if (until_draw-- == 0) {
                    draw();
                }
                if (lane == 0 && box_bytes > 0) {
                    barrier_expect(barrier, __popc(of_tile) * box_bytes);
                }
                __syncwarp(); /* the expected bytes are announced before any copy */
                if (real && own_tile == t) {
#pragma unroll
                    for (int n = 0; n < planes; n++) {
                        copy_box_spans(own[n], to, own_box, barrier);
                    }
                }
                if (i + t == 0 && !values) {
                    begin_run(run);
                }
                commit(run_slot);
            }
        }
        run_slot = run_slot == SM80_MAX_STAGES ? 0 : run_slot + 1;
    }

    __device__ __forceinline__ void copy_run(const gpu_run &run)
    {
        if constexpr (S::packed) {
            if (a.mapped && a.scale_spans) {
                copy_run_spans(run);
                return;
            }
        }
        tile_place<S::tile> boxes, keys;
        place(run, run.tile, boxes, keys);
        for (int32_t i = 0; i < run.count; i++) {
            if (units != nullptr && a.mapped) { /* the stage is waited for anyway */
                resolve_place<1>(p.problem, boxes);
            }
            barrier_wait(shared_address(&smem.empty[stage]), phase ^ 1);
            if (until_draw-- == 0) {
                draw();
            }
            if (units != nullptr && by_keys()) {
                resolve_place<S::tile / 32>(p.problem, keys);
            }
            copy_tile(run.head, boxes, keys);
            if (i == 0 && !values) {
                begin_run(run);
            }
            commit(run_slot);
            if (i + 1 < run.count) {
                place(run, run.tile + i + 1, boxes, keys);
            }
        }
        run_slot = run_slot == SM80_MAX_STAGES ? 0 : run_slot + 1;
    }

    /* Finds the list of the run's item, if it has one. */
    __device__ __forceinline__ void enter_item(gpu_run &run)
    {
        if (p.problem.units != nullptr) {
            enter_list(p.problem, run.row_tile, run.head);
            units = p.problem.units + run.row_tile.table;
        } else if (!S::packed && a.lists.entries != nullptr) {
            int32_t *own = (int32_t *)stage_at(smem, a.stages) + values * SM80_LIST_UNITS;
            run.row_tile.k1 = run.row_tile.length =
                make_units(a, run.row_tile, p.problem.lists > 1 ? run.head : 0, own, lane);
            units = own;
        }
    }

    __device__ __forceinline__ void copy_segment(const gpu_segment &segment)
    {
        int32_t row_tile = segment.row_tile_index, t = segment.begin;
        gpu_run run;
        run.row_tile = segment.row_tile;
        run.segment = segment.index;
        while (t < segment.end) {
            int32_t within = t - run.row_tile.start;
            if (within >= run.row_tile.num_tiles * p.problem.num_kv_heads) {
                row_tile++;
                run.row_tile = p.schedule.row_tiles[row_tile];
                continue;
            }
            run.head = within / run.row_tile.num_tiles;
            run.tile = within - run.head * run.row_tile.num_tiles;
            run.count = min(run.row_tile.num_tiles - run.tile, segment.end - t);
            run.item = row_tile * p.problem.num_kv_heads + run.head;
            enter_item(run);
            run.first = run.tile > 0 ? segment.first : segment.index;
            run.last = run.tile + run.count < run.row_tile.num_tiles ? segment.last : segment.index;
            copy_run(run);
            t += run.count;
        }
    }

    /* Copies all segments of the CTA. The first is its own, except for late CTAs; it draws further
     * ones, since multiprocessors do not read equally fast. The next segment is drawn when
     * SM80_AHEAD tiles of the current one remain; drawn earlier, the last segments would wait for
     * busy CTAs while others are idle. The CTA that draws the last number resets the counter. */
    __device__ __forceinline__ void work()
    {
        gpu_segment segment = p.schedule.segments[blockIdx.x]; /* has an entry for each CTA */
        const int32_t given = p.schedule.ctas;
        int32_t segments = p.schedule.header->segments, index = blockIdx.x, turn = 0;
        bool shares = segments > given, own = index < min(given, segments);
        if (shares && !own) {
            draw();
        }
        while (own || shares) {
            if (own) {
                until_draw = shares ? max(segment.end - segment.begin - SM80_AHEAD, 0) : -1;
                copy_segment(segment);
            }
            own = true;
            if (!shares) {
                break;
            }
            if (!values && lane == 0) {
                smem.taken[turn] = taken;
                if (taken == segments + a.late - 1) {
                    p.schedule.header->taken = 0;
                }
            }
            if (S::alone) {
                __syncwarp(); /* the number is written */
            } else {
                barrier_producers();
            }
            index = given + smem.taken[turn];
            turn ^= 1; /* a barrier separates both warps' reads from the next write */
            if (index >= segments) {
                break;
            }
            segment = p.schedule.segments[index];
        }
        barrier_wait(shared_address(&smem.empty[stage]), phase ^ 1);
        commit(NO_RUN);
    }
};

#endif
