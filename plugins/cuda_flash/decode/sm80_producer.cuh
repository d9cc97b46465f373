/* SPDX-License-Identifier: Apache-2.0 */
/* The last two warps of an attend CTA: both walk the CTA's segments and copy into shared memory,
 * some stages ahead of the four warps that compute, one the queries and keys, the other the values;
 * or one that copies all. */
#ifndef CUDA_FLASH_SM80_PRODUCER_CUH
#define CUDA_FLASH_SM80_PRODUCER_CUH

#include "cuda_flash/ptx/ptx.cuh"
#include "gpu/device/rows.h"
#include "gpu/device/softmax.h"
#include "gpu/device/visible.h"
#include "sm80_attend.h"

#define NO_RUN (-1)
#define SM80_AHEAD 2 /* tiles of a segment that are to be copied when the next is drawn */

/* The tiles of one item in one segment: what the four warps compute without looking up. */
struct gpu_run {
    gpu_row_tile row_tile;
    int32_t head, tile, count;    /* tiles tile .. tile + count - 1 of the item */
    int32_t segment, first, last; /* segments that share the item */
    int32_t item, reserved;       /* item: row_tile x KV heads + head */
};

template <int KIND, int D, bool SPLIT> struct shape {
    static constexpr bool bytes = KIND >= KIND_E4M3 && KIND <= KIND_INT8;
    static constexpr bool packed = KIND >= KIND_INT4;
    static constexpr bool prepared = KIND >= KIND_INT8; /* queries have terms: sm80_query.cuh */
    static constexpr bool turned = KIND == KIND_INT4 || KIND == KIND_LEVELS; /* keys are */
    static constexpr bool wide = D > 256; /* warps share out a value's dims: sm80_head512.cuh */
    static constexpr int element = bytes ? 1 : KIND == KIND_F32 ? 4 : 2;
    static constexpr int q_element = KIND == KIND_F32 ? 4 : 2;
    static constexpr bool steps = KIND >= KIND_LEVELS; /* TurboQuant's values */
    /* bytes of a key or value, of KIND_K8V4 on average */
    static constexpr int row = KIND == KIND_K8V4 ? D * 3 / 4 : packed ? D / 2 : D * element;
    static constexpr int chunks = row / 16; /* 16-byte pieces of it */
    static constexpr int tile = wide && !bytes                             ? SM80_WIDE_TILE
                                : SPLIT && (packed || (bytes && D <= 128)) ? SM80_NARROW_TILE
                                                                           : SM80_TILE;
    static constexpr int half = tile * row;
    /* of a 4-bit row; two of them fit into the tail */
    static constexpr int scale_bytes = KIND == KIND_NVFP4 ? D / 16 : 4;
    /* rows' scales, and what is before a row in its first piece; later 4 warps' m and l */
    static constexpr int scales = KIND == KIND_LEVELS ? SM80_LEVELS_ROOM * tile
                                  : KIND == KIND_K8V4 ? SM80_K8V4_ROOM * tile
                                  : packed            ? 2 * tile * scale_bytes
                                                      : 1024;
    static constexpr int tail = (SPLIT && !wide) || bytes ? (scales > 1024 ? scales : 1024) : 0;
    static constexpr int stage = 2 * half + tail;
    static constexpr int rows = SPLIT ? 16 : 64;
    static constexpr int q_bytes = rows * D * q_element;
    static constexpr int q_buffers = SPLIT && !wide ? 2 : 1;
    /* what rounding leaves of turned queries stands behind the terms, and so do two tiles' scores
     * that warps show each other */
    static constexpr int fixed = SM80_FIXED_SMEM + (bytes || packed ? SM80_TERMS_SMEM : 0) +
                                 (turned ? q_bytes : 0) + (wide ? SM80_SCORES_SMEM(tile) : 0);
    /* of a CTA: 4 warps that compute and those that copy. One copies KIND_NVFP4 and KIND_LEVELS,
     * whose tiles are a few spans, so that three CTAs of up to 8 rows have the registers of a
     * multiprocessor. */
    static constexpr bool alone = (KIND == KIND_NVFP4 || KIND == KIND_LEVELS) && D <= 128;
    static constexpr int threads = 128 + (alone ? 32 : 64);
    /* of a multiprocessor, for the registers; few_ctas: of up to 8 rows */
    static constexpr int ctas = D > 128 || KIND == KIND_F32 ? 1 : 2;
    static constexpr int few_ctas = alone ? 3 : ctas;
};

/* The query's terms, its rest and the stages follow it in memory. */
template <int KIND, int D, bool SPLIT> struct shared {
    using S = shape<KIND, D, SPLIT>;
    alignas(128) char q[S::q_buffers][S::q_bytes];
    gpu_run runs[SM80_MAX_STAGES + 1]; /* a stage holds a tile of one run */
    uint64_t full[SM80_MAX_STAGES], empty[SM80_MAX_STAGES], q_empty[S::q_buffers];
    int32_t run_of_stage[SM80_MAX_STAGES];
    int2 all_see[4]; /* of each warp that computes: keys that all rows of its run see */
    int32_t last_one, taken[2];
};

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ char *stage_at(shared<KIND, D, SPLIT> &mine, int stage)
{
    using S = shape<KIND, D, SPLIT>;
    static_assert(sizeof mine <= S::q_buffers * S::q_bytes + SM80_FIXED_SMEM, "room for it");
    return (char *)&mine + S::q_buffers * S::q_bytes + S::fixed + stage * S::stage;
}

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ float *terms_of(shared<KIND, D, SPLIT> &mine)
{
    using S = shape<KIND, D, SPLIT>;
    static_assert(2 * S::rows * 4 <= SM80_TERMS_SMEM, "two of each row");
    return (float *)((char *)&mine + S::q_buffers * S::q_bytes + SM80_FIXED_SMEM);
}

/* Neighbouring rows put the same chunk into different banks. */
template <int CHUNKS> static __device__ __forceinline__ int swizzle(int row, int chunk)
{
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

/* Byte of a chunk of a tile: columns of 128 bytes, as TMA swizzles them. */
template <int CHUNKS, int TILE> static __device__ __forceinline__ int place_of(int row, int chunk)
{
    return CHUNKS >= 8 ? (chunk >> 3) * TILE * 128 + row * 128 + ((chunk & 7) ^ (row & 7)) * 16
                       : row * CHUNKS * 16 + swizzle<CHUNKS>(row, chunk) * 16;
}

/* Where a tile's keys lie: in `block` from `slot` on, for the box of this lane or for each of its
 * keys lane, lane + 32 and so on. */
template <int TILE> struct tile_place {
    int32_t block[TILE / 32], slot[TILE / 32];
    int32_t low, high; /* keys of the tile that are read: low .. high - 1 */
};

/* The keys of a tile that are read. */
template <int TILE>
static __device__ __forceinline__ tile_place<TILE> enter_tile(const gpu_run &run, int32_t base)
{
    tile_place<TILE> at;
    at.low = run.row_tile.k0 - base;
    at.high = run.row_tile.k1 - base;
    return at;
}

/* Block and slot of a key in the request's row of the table. */
static __device__ __forceinline__ void find_slot(const gpu_problem &p, const gpu_run &run,
                                                 int32_t key, int32_t &block, int32_t &slot)
{
    int32_t index = p.paged ? key / p.block_size : 0;
    slot = key - index * p.block_size + run.row_tile.key_start;
    block = p.paged ? p.block_table[run.row_tile.table + index] : 0;
}

/* By boxes. The entries are used a tile later, so that they are not waited for here. */
template <int TILE>
static __device__ __forceinline__ tile_place<TILE>
place_boxes(const sm80_params &a, const gpu_run &run, int32_t tile, int lane, int boxes_of_page)
{
    int32_t base = (run.row_tile.k0 & ~(TILE - 1)) + tile * TILE;
    tile_place<TILE> at = enter_tile<TILE>(run, base);
    int32_t rows = a.box_rows, key = lane / boxes_of_page * rows;
    at.block[0] = -1;
    at.slot[0] = 0;
    if (key < TILE && key < at.high && key + rows > at.low) {
        find_slot(a.p.problem, run, base + key, at.block[0], at.slot[0]);
    }
    return at;
}

/* By keys, likewise. `together`: slots whose scales lie among each other's, 1 or 4; those next to
 * one that is read are read. */
template <int TILE>
static __device__ __forceinline__ tile_place<TILE>
place_keys(const gpu_problem &p, const gpu_run &run, int32_t tile, int lane, int together)
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
            find_slot(p, run, base + key, at.block[i], at.slot[i]);
        }
    }
    return at;
}

/* One of K and V of a tile by TMA: a box per block and column of 128 bytes, each from a lane. Slots
 * of a block that no query sees come along; blocks of them do not. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void copy_boxes(const sm80_params &a, const tensor_map &map,
                                                  int32_t head, const tile_place<TILE> &at,
                                                  uint32_t to, uint32_t barrier, int lane)
{
    using S = shape<KIND, D, true>;
    constexpr int columns = S::chunks >= 8 ? S::chunks / 8 : 1;
    constexpr int row_bytes = S::chunks >= 8 ? 128 : S::chunks * 16;
    int32_t rows = a.box_rows, page = lane / columns, column = lane - page * columns;
    bool mine = at.block[0] >= 0;
    int count = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) {
        barrier_expect(barrier, count * rows * row_bytes);
    }
    __syncwarp();
    if (mine) {
        copy_box(to + column * TILE * row_bytes + page * rows * row_bytes, &map,
                 column * row_bytes / S::element, at.slot[0], head, at.block[0], barrier);
    }
}

/* One of K and V of a tile. Rows that no query sees, and dims past the head size, become zero. A
 * stretch is 16 rows that lie one stride apart: all block sizes that 16 divides. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void copy_half(const gpu_params &p, const gpu_cache &cache,
                                                 int32_t head_size, int32_t head,
                                                 const tile_place<TILE> &at, uint32_t to, int lane)
{
    using S = shape<KIND, D, true>;
    constexpr int rows = S::chunks > 32 ? 1 : 32 / S::chunks;  /* that one instruction copies */
    constexpr int turns = S::chunks > 32 ? S::chunks / 32 : 1; /* or a share of a row */
    const char *base = cache.data + head * cache.head;
    const int hi = lane / S::chunks, chunk = lane % S::chunks;
    int bytes = head_size * S::element;
    int32_t offset[TILE / 32]; /* in 16 bytes */
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        offset[i] = (int32_t)((at.block[i] * cache.block + at.slot[i] * cache.slot) >> 4);
    }
    bool straight = !p.problem.paged || p.problem.block_size % 16 == 0;
    if (straight && at.low <= 0 && at.high >= TILE && bytes == D * S::element) {
        int64_t step = p.problem.paged ? cache.slot : cache.block;
        base += hi * step + chunk * 16;
#pragma unroll
        for (int stretch = 0; stretch < TILE / 16; stretch++) {
            int32_t found = __shfl_sync(0xffffffffu, offset[stretch / 2], (stretch & 1) * 16);
            const char *from = base + ((int64_t)found << 4);
#pragma unroll
            for (int i = 0; i < 16 / rows * turns; i++) {
                int row = i / turns * rows, further = i % turns * 32;
                copy16(to + place_of<S::chunks, TILE>(stretch * 16 + row + hi, chunk + further),
                       from + row * step + further * 16, 16);
            }
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

/* Rows' scales of 4 bytes; those of rows that no query sees become zero. */
template <int TILE>
static __device__ __forceinline__ void
copy_scales(const gpu_cache &cache, int32_t head, const tile_place<TILE> &at, uint32_t to, int lane)
{
#pragma unroll
    for (int i = 0; i < TILE / 32; i++) {
        int32_t key = lane + 32 * i;
        bool real = key >= at.low && key < at.high;
        copy4(to + key * 4, row_scale_at(cache, at.block[i], at.slot[i], head), real ? 4 : 0);
    }
}

/* `bytes` of each row in pieces of `unit` (4, 8 or 16), of which a power of two up to 32 makes a
 * row. */
template <int TILE>
static __device__ __forceinline__ void copy_pieces(const char *from, int64_t block, int64_t slot,
                                                   const tile_place<TILE> &at, int bytes, int unit,
                                                   uint32_t to, int pitch, int lane)
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

/* The largest unit of a copy that divides them all. */
static __device__ __forceinline__ int unit_of(uint64_t bits)
{
    return (bits & 15) == 0 ? 16 : (bits & 7) == 0 ? 8 : 4;
}

/* Spans of the blocks of a tile, a block from a lane: `bytes` each, next to each other. */
template <int TILE>
static __device__ __forceinline__ void copy_spans(const char *from, int64_t block, int64_t slot,
                                                  const tile_place<TILE> &at, int bytes,
                                                  uint32_t to, uint32_t barrier, int lane)
{
    bool mine = at.block[0] >= 0;
    int count = __popc(__ballot_sync(0xffffffffu, mine));
    if (lane == 0) {
        barrier_expect(barrier, count * bytes);
    }
    __syncwarp();
    if (mine) {
        copy_span(to + lane * bytes, from + at.block[0] * block + at.slot[0] * slot, bytes,
                  barrier);
    }
}

/* Bytes of the first piece of a row of a head that are not the row's. */
static __device__ __forceinline__ int bytes_before(const sm80_params &a, const gpu_cache &cache,
                                                   int32_t head)
{
    return (int)((uintptr_t)cache.data + head * cache.head) & (a.unit - 1);
}

/* Rows of `bytes` at any address in pieces of a.unit, `pitch` apart in the stage; what is behind a
 * row is not read. */
template <int TILE>
static __device__ __forceinline__ void copy_odd_rows(const sm80_params &a, const gpu_cache &cache,
                                                     int32_t head, const tile_place<TILE> &at,
                                                     int bytes, uint32_t to, int pitch, int lane)
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

/* Rows' scales that lie together in a block, `bytes` each. */
template <int TILE>
static __device__ __forceinline__ void
copy_scale_spans(const sm80_params &a, const gpu_cache &cache, int32_t head,
                 const tile_place<TILE> &at, int bytes, uint32_t to, uint32_t barrier, int lane)
{
    copy_spans<TILE>(cache.row_scale + head * cache.row_scale_head, cache.row_scale_block,
                     cache.row_scale_slot, at, a.box_rows * bytes, to, barrier, lane);
}

/* Codes of K or V, and scales that stand behind them. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void
copy_codes(const sm80_params &a, const gpu_cache &cache, const sm80_plane &plane, int32_t head,
           const tile_place<TILE> &at, uint32_t to, uint32_t barrier, int lane)
{
    using S = shape<KIND, D, true>;
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
        copy_odd_rows<TILE>(a, cache, head, at, bytes, to + plane.at, plane.pitch, lane);
        return;
    }
    int unit = unit_of((uint64_t)from | cache.block | cache.slot | plane.pitch);
    copy_pieces<TILE>(from, cache.block, cache.slot, at, S::row, unit, to + plane.at, plane.pitch,
                      lane);
}

/* Scales of codes that come by themselves, row by row. */
template <int KIND, int D, int TILE>
static __device__ __forceinline__ void
copy_code_scales(const gpu_cache &cache, const sm80_plane &plane, int32_t head,
                 const tile_place<TILE> &at, uint32_t to, int lane)
{
    using S = shape<KIND, D, true>;
    const char *from = cache.row_scale + head * cache.row_scale_head;
    int unit = S::scale_bytes == 4
                   ? 4
                   : unit_of((uint64_t)from | cache.row_scale_block | cache.row_scale_slot |
                             plane.scale_at | plane.scale_pitch | S::scale_bytes);
    copy_pieces<TILE>(from, cache.row_scale_block, cache.row_scale_slot, at, S::scale_bytes, unit,
                      to + plane.scale_at, plane.scale_pitch, lane);
}

/* Raw queries of a run, elements of BYTES; rows past the last become zero. */
template <int D, int ROWS, int BYTES>
static __device__ __forceinline__ void copy_query(const gpu_params &p, const gpu_run &run,
                                                  uint32_t to, int lane)
{
    constexpr int chunks = D * BYTES / 16;
#pragma unroll 4
    for (int i = lane; i < ROWS * chunks; i += 32) {
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

template <int KIND, int D, bool SPLIT> struct producer {
    using S = shape<KIND, D, SPLIT>;
    const sm80_params &a;
    const gpu_params &p;
    shared<KIND, D, SPLIT> &mine;
    const bool values; /* which of the two warps this is; false where there is one */
    const int lane;
    int stage = 0, phase = 0, run_slot = 0, q_slot = 0, q_phase = 0;
    int32_t taken = 0;      /* the number drawn last, in the first lane of the warp that draws */
    int32_t until_draw = 0; /* tiles of the segment that are copied before the next is drawn */

    __device__ producer(const sm80_params &params, shared<KIND, D, SPLIT> &memory, int thread)
        : a(params), p(params.p), mine(memory), values(!S::alone && thread >= 32), lane(thread & 31)
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

    /* All lanes' copies and the first's ordinary stores: an arrival more than lanes. */
    __device__ __forceinline__ void commit(int32_t run)
    {
        if (!values && lane == 0) {
            mine.run_of_stage[stage] = run;
            barrier_arrive(shared_address(&mine.full[stage]));
        }
        barrier_arrive_copies(shared_address(&mine.full[stage]));
        next_stage();
    }

    /* Where a tile lies: by boxes, or if not by keys; the latter also where scales are so copied.
     */
    __device__ __forceinline__ void place(const gpu_run &run, int32_t tile,
                                          tile_place<S::tile> &boxes, tile_place<S::tile> &keys)
    {
        constexpr int columns = S::chunks >= 8 && !S::packed ? S::chunks / 8 : 1;
        if (a.mapped) {
            boxes = place_boxes<S::tile>(a, run, tile, lane, columns);
        }
        if (!a.mapped || (S::packed && !a.scale_spans) ||
            (S::bytes && !a.scale_spans && (values ? p.v : p.k).form == GPU_ROW_SCALED)) {
            keys = place_keys<S::tile>(p.problem, run, tile, lane, KIND == KIND_NVFP4 ? 4 : 1);
        }
    }

    /* K or V of a tile of 4-bit kinds, not all of it in spans. */
    __device__ __forceinline__ void copy_plane(bool of_values, int32_t head,
                                               const tile_place<S::tile> &boxes,
                                               const tile_place<S::tile> &keys)
    {
        const gpu_cache &cache = of_values ? p.v : p.k;
        const sm80_plane &plane = a.planes[of_values];
        uint32_t to = shared_address(stage_at(mine, stage));
        uint32_t barrier = shared_address(&mine.full[stage]);
        if (!a.scale_spans) {
            copy_code_scales<KIND, D, S::tile>(cache, plane, head, keys, to, lane);
        }
        if (!of_values || !a.together) {
            copy_codes<KIND, D, S::tile>(a, cache, plane, head, a.mapped ? boxes : keys, to,
                                         barrier, lane);
        }
    }

    /* What the warp copies of a tile: one of K and V, or both. */
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
        uint32_t to = shared_address(stage_at(mine, stage));
        uint32_t barrier = shared_address(&mine.full[stage]);
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

    /* A number of a segment. One warp draws, and tells the other in work(). */
    __device__ __forceinline__ void draw()
    {
        if (!values && lane == 0) {
            taken = atomicAdd(&p.schedule.header->taken, 1);
        }
    }

    /* The query of a run: the keys' warp copies it with the first tile. */
    __device__ __forceinline__ void begin_run(const gpu_run &run)
    {
        if (lane == 0) {
            mine.runs[run_slot] = run; /* a stage is free, so this run's place is */
        }
        barrier_wait(shared_address(&mine.q_empty[q_slot]), q_phase ^ 1);
        copy_query<D, S::rows, S::q_element>(p, run, shared_address(mine.q[q_slot]), lane);
        q_slot++;
        if (q_slot == S::q_buffers) {
            q_slot = 0;
            q_phase ^= 1;
        }
    }

    /* Block (-1: not read) and slot of the lane's box of 32, from a tile's first on. */
    __device__ __forceinline__ void find_box(const gpu_run &run, int32_t tile, int32_t &block,
                                             int32_t &slot)
    {
        const int32_t base = run.row_tile.k0 & ~(S::tile - 1);
        const int32_t key = base + tile * S::tile + lane * a.box_rows;
        const int32_t end = min(run.row_tile.k1, base + (run.tile + run.count) * S::tile);
        block = -1;
        slot = 0;
        if (key < end && key + a.box_rows > run.row_tile.k0) {
            find_slot(p.problem, run, key, block, slot);
        }
    }

    /* Rows of K or V of a head, and scales that stand by themselves: where they begin, bytes of
     * both in a box (0: others bring them along), and where a stage has them. */
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

    static __device__ __forceinline__ void copy_box_spans(const spans &box, uint32_t to,
                                                          int32_t index, uint32_t barrier)
    {
        if (box.row_bytes > 0) {
            copy_span(to + box.rows_at + index * box.row_bytes, box.rows, box.row_bytes, barrier);
        }
        if (box.scale_bytes > 0) {
            copy_span(to + box.scales_at + index * box.scale_bytes, box.scales, box.scale_bytes,
                      barrier);
        }
    }

    /* A run whose rows and scales come in spans. Looking up a tile's boxes takes as long as a tile
     * may, so lanes look up 32 of them together, while those before are copied. */
    __device__ __forceinline__ void copy_run_spans(const gpu_run &run)
    {
        constexpr int planes = S::alone ? 2 : 1;
        const int32_t boxes = S::tile / a.box_rows, batch = 32 / boxes; /* tiles of 32 boxes */
        const int32_t own_tile = lane / boxes, own_box = lane - own_tile * boxes;
        spans from[planes], own[planes]; /* of the head, of the lane's box */
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
                const uint32_t to = shared_address(stage_at(mine, stage));
                const uint32_t barrier = shared_address(&mine.full[stage]);
                const uint32_t of_tile = all_real >> t * boxes & (0xffffffffu >> (32 - boxes));
                barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
                if (until_draw-- == 0) {
                    draw();
                }
                if (lane == 0 && box_bytes > 0) {
                    barrier_expect(barrier, __popc(of_tile) * box_bytes);
                }
                __syncwarp(); /* what is to come is counted */
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
            barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
            if (until_draw-- == 0) {
                draw();
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
            run.first = run.tile > 0 ? segment.first : segment.index;
            run.last = run.tile + run.count < run.row_tile.num_tiles ? segment.last : segment.index;
            copy_run(run);
            t += run.count;
        }
    }

    /* The first segment is the CTA's own, but of late ones; further ones are taken as CTAs become
     * free, since not all multiprocessors read equally fast. A segment is drawn when SM80_AHEAD
     * tiles of the one before are to be copied: as early as that one begins, the last ones would
     * wait for CTAs that are busy while others are free. Who draws the last number puts the counter
     * back. */
    __device__ __forceinline__ void work()
    {
        gpu_segment segment =
            p.schedule.segments[blockIdx.x]; /* there is room for one of each CTA */
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
                mine.taken[turn] = taken;
                if (taken == segments + a.late - 1) {
                    p.schedule.header->taken = 0;
                }
            }
            if (S::alone) {
                __syncwarp(); /* the number is there */
            } else {
                barrier_producers();
            }
            index = given + mine.taken[turn];
            turn ^= 1; /* read by both before it is written again: a barrier lies between */
            if (index >= segments) {
                break;
            }
            segment = p.schedule.segments[index];
        }
        barrier_wait(shared_address(&mine.empty[stage]), phase ^ 1);
        commit(NO_RUN);
    }
};

#endif
