/* SPDX-License-Identifier: Apache-2.0 */
/* The producer warps, which copy queries and latent rows. */
#ifndef CUDA_FLASH_SM90_LATENT_PRODUCER_CUH
#define CUDA_FLASH_SM90_LATENT_PRODUCER_CUH

#include "sm90_latent_convert.cuh"

/* Each of 8 threads of a row copies chunk t % 8 of column c. NARROWS: from bf16 to f16. */
template <bool NARROWS>
GPU_INLINE void copy_chunk(const char *latent, const char *rope, bool real, bool wide,
                           const void *any, uint32_t to, int row, int c)
{
    const int chunk = threadIdx.x & 7;
    uint32_t place = to + c * LATENT_COLUMN_BYTES + place_in_column(row, chunk);
    const char *x = (c < LATENT_ROPE ? latent + c * 128 : rope) + chunk * 16;
    if (NARROWS) {
        uint4 y = make_uint4(0, 0, 0, 0);
        if (real) {
            y = wide ? __ldg((const uint4 *)x) : read_slowly(x);
        }
        store16(place, halves_of_bf16(y));
    } else if (wide) {
        copy16(place, real ? x : any, real ? 16 : 0);
    } else {
        store16(place, real ? read_slowly(x) : make_uint4(0, 0, 0, 0));
    }
}

/* Announces this thread's chunks, whose copies may still be in flight. */
GPU_INLINE void arrive_chunks(bool wide, uint64_t &barrier)
{
    if (wide) {
        barrier_arrive_copies(shared_address(&barrier));
    } else {
        fence_async_proxy();
        barrier_arrive(shared_address(&barrier));
    }
}

/* Copies an item's query rows by THREADS threads. */
template <int THREADS, bool NARROWS, bool ROPE>
GPU_INLINE void copy_query_rows(const sm90_latent_params &a, const gpu_row_tile &item,
                                latent_shared &smem)
{
    constexpr int COLUMNS = key_columns<ROPE>, UNROLLED = NARROWS ? 1 : COLUMNS;
    const gpu_params &p = a.p.attend;
#pragma unroll 1
    for (int row = (threadIdx.x & (THREADS - 1)) >> 3; row < SM90_LATENT_ROWS; row += THREADS / 8) {
        int32_t at = item.first_row + row, index = at / p.problem.group;
        int64_t token = item.query_start + index, head = at - index * p.problem.group;
        const char *latent = p.q.data + token * p.q.row + head * p.q.head;
        const char *rope = a.p.q_rope.data + token * a.p.q_rope.row + head * a.p.q_rope.head;
        if (NARROWS && a.wide_queries && row < item.num_rows) { /* all reads at once */
            uint4 x[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const char *from = c < LATENT_ROPE ? latent + c * 128 : rope;
                x[c] = __ldg((const uint4 *)from + (threadIdx.x & 7));
            }
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                store16(shared_address(smem.q[c]) + place_in_column(row, threadIdx.x & 7),
                        halves_of_bf16(x[c]));
            }
            continue;
        }
#pragma unroll(UNROLLED)
        for (int c = 0; c < COLUMNS; c++) {
            copy_chunk<NARROWS>(latent, rope, row < item.num_rows, a.wide_queries, p.q.data,
                                shared_address(smem.q), row, c);
        }
    }
    arrive_chunks(a.wide_queries && !NARROWS, smem.q_full);
}

/* Copies an item's queries by TMA; one thread calls. */
template <bool ROPE>
GPU_INLINE void copy_query_boxes(const sm90_latent_params &a, const gpu_row_tile &item,
                                 latent_shared &smem)
{
    const int32_t group = a.p.attend.problem.group, index = item.first_row / group;
    const int32_t head = item.first_row - index * group, token = item.query_start + index;
    const uint32_t full = shared_address(&smem.q_full);
    barrier_arrive_expect(full, key_columns<ROPE> * a.q_rows * 128);
#pragma unroll 1
    for (int c = 0; c < LATENT_ROPE; c++) {
        copy_box(shared_address(smem.q[c]), &a.q_maps[0], c * 64, head, token, 0, full);
    }
    if (ROPE) {
        copy_box(shared_address(smem.q[LATENT_ROPE]), &a.q_maps[1], 0, head, token, 0, full);
    }
}

/* Copies an item's queries; the last THREADS producer threads call. Queries that TMA cannot copy
 * for converting warps are copied by the consumers, who have registers for many reads at once. */
template <int KIND, bool ROPE, int THREADS, bool CONVERTS = false>
GPU_INLINE void copy_queries(const sm90_latent_params &a, const gpu_row_tile &item,
                             latent_shared &smem)
{
    if (a.q_mapped) {
        if ((threadIdx.x & (THREADS - 1)) < 32 && elected()) {
            copy_query_boxes<ROPE>(a, item, smem);
        }
        __syncwarp();
    } else if (CONVERTS) {
        return;
    } else if (KIND == KIND_F16 && a.p.attend.q.dtype == ATTN_DTYPE_BF16) {
        copy_query_rows<THREADS, true, ROPE>(a, item, smem);
    } else {
        copy_query_rows<THREADS, false, ROPE>(a, item, smem);
    }
}

/* The consumers copy an item's queries for converting warps, unless TMA copies them. Both have read
 * the previous run's. */
template <bool ROPE>
GPU_INLINE void copy_own_queries(const sm90_latent_params &a, latent_shared &smem,
                                 const gpu_row_tile &item, int phase)
{
    if (a.q_mapped) {
        return;
    }
    barrier_wait(shared_address(&smem.q_empty), phase ^ 1);
    if (a.p.attend.q.dtype == ATTN_DTYPE_BF16) {
        copy_query_rows<256, true, ROPE>(a, item, smem);
    } else {
        copy_query_rows<256, false, ROPE>(a, item, smem);
    }
}

/* With both caches a consumer warp has TMA copy the queries, while the producers look up keys. */
GPU_INLINE void copy_mapped_queries(const sm90_latent_params &a, latent_shared &smem,
                                    const gpu_row_tile &item, int phase)
{
    if (a.q_mapped && threadIdx.x >= blockDim.x - 32) {
        barrier_wait(shared_address(&smem.q_empty), phase ^ 1);
        if (elected()) {
            copy_query_boxes<false>(a, item, smem);
        }
        __syncwarp();
    }
}

/* Copies half `half` of the columns of a tile of 16-bit rows by cp.async, the SECOND one with the
 * rope column. */
template <bool SECOND, bool ROPE>
GPU_INLINE void copy_half(const sm90_latent_params &a, latent_shared &smem, int b, int32_t t,
                          int half)
{
    const int chunk = threadIdx.x & 7;
    const uint32_t to = shared_address(smem.k[b][half * 4]) +
                        place_in_column(copied_row<LATENT_COPY_WARPS>(0), chunk);
    const uint32_t to_rope = to + (LATENT_ROPE - half * 4) * LATENT_COLUMN_BYTES;
#pragma unroll
    for (int i = 0; i < LATENT_COPY_ROWS; i++) {
        const char *row = row_of_thread<LATENT_COPY_WARPS>(smem, t, i);
        const int bytes = row != nullptr ? 16 : 0;
        const char *from = (row != nullptr ? row : a.p.attend.k.data) + half * 512 + chunk * 16;
        const int further = i * (LATENT_COPY_WARPS * 4) * 128;
#pragma unroll
        for (int c = 0; c < 4; c++) {
            copy16(to + further + c * LATENT_COLUMN_BYTES, from + c * 128, bytes);
        }
        if (SECOND && ROPE) {
            copy16(to_rope + further, from + (LATENT_ROPE - half * 4) * 128, bytes);
        }
    }
    barrier_arrive_copies(shared_address(&smem.full[b][SECOND]));
}

/* Copies a tile of rows of any form and alignment. */
template <bool ROPE>
GPU_INLINE void copy_tile_slowly(const sm90_latent_params &a, latent_shared &smem, int phase,
                                 int32_t t)
{
    const int b = t & 1, chunk = threadIdx.x & 7;
    barrier_wait(shared_address(&smem.empty[b][0]), phase);
    barrier_wait(shared_address(&smem.empty[b][1]), phase);
#pragma unroll 1
    for (int n = 0; n < LATENT_COPY_ROWS * key_columns<ROPE>; n++) {
        const int c = n >> 2, i = n & 3;
        const char *row = row_of_thread<LATENT_COPY_WARPS>(smem, t, i);
        const int at = copied_row<LATENT_COPY_WARPS>(i);
        uint4 x = make_uint4(0, 0, 0, 0);
        if (row != nullptr) {
            x = read_chunk_slowly(row, a.form, c, chunk);
        }
        store16(shared_address(smem.k[b][c]) + place_in_column(at, chunk), x);
    }
    fence_async_proxy();
    barrier_arrive(shared_address(&smem.full[b][0]));
    barrier_arrive(shared_address(&smem.full[b][1]));
}

/* Copies queries and keys of all runs by whole warp groups, for any block size, list and form of
 * rows. FORM: of rows that can be read 16 bytes at a time; -1: any form and alignment. */
template <int KIND, int FORM, bool ROPE, bool BOTH>
GPU_INLINE void copy_runs_of_rows(const sm90_latent_params &a, latent_shared &smem)
{
    constexpr bool NARROW = FORM > LATENT_FORM_OWN, IS_V4 = FORM == LATENT_FORM_V4;
    constexpr int WARPS = NARROW ? LATENT_CONVERT_WARPS : LATENT_COPY_WARPS;
    constexpr int AT_ONCE = WARPS / 2; /* tiles that a warp looks up at once */
    /* bits 0 and 1: phases of the buffers; bit 2: of the queries; bit 3: parity of the run */
    int phases = 7;
    latent_narrow<FORM> narrow;
    /* b is t & 1, as a constant. */
    auto copy_tile = [&](int b, int32_t t) {
        const int phase = phases >> b & 1;
        if constexpr (FORM == LATENT_FORM_OWN) {
            barrier_wait(shared_address(&smem.empty[b][b]), phase);
            copy_half<false, ROPE>(a, smem, b, t, b);
            barrier_wait(shared_address(&smem.empty[b][b ^ 1]), phase);
            copy_half<true, ROPE>(a, smem, b, t, b ^ 1);
        } else if constexpr (NARROW) {
            convert_tile<FORM>(smem, b, phase, t, narrow);
        } else {
            copy_tile_slowly<ROPE>(a, smem, phase, t);
        }
        phases ^= 1 << b;
        asm volatile("" : "+r"(phases)); /* otherwise the old phases are kept and spilled */
        arrive_warp(smem.full[b][1]);    /* the terms are written and the rows have been read */
    };
#pragma unroll 1
    /* Rarely used fields of a run are loaded again instead of kept. */
    for (int32_t s = first_run<BOTH>(a); s >= 0;) {
        latent_run run = run_of<BOTH>(a, s);
        key_lookup &lookup = smem.lookup[threadIdx.x >> 5];
        __syncwarp(); /* the previous run's lookup is not read any more */
        if ((threadIdx.x & 31) == 0) {
            lookup = lookup_of<BOTH>(a, run, s);
            if constexpr (BOTH) {
                smem.second[threadIdx.x >> 5] = lookup_of_second(a, run);
            }
        }
        __syncwarp(); /* the lookup is written */
        int32_t key = entry_of_lane<WARPS, BOTH>(smem, lookup, 0);
        int32_t entry = entry_of_lane<WARPS, BOTH>(smem, lookup, AT_ONCE); /* to look up next */
        key = key_of_entry<WARPS, BOTH>(smem, lookup, 0, key);
        int32_t block = block_of_lane<BOTH>(a, smem, lookup, key);
        /* Both consumers are in the previous run or past its products: the terms and the item of
         * the run before it are free. */
        barrier_wait(shared_address(&smem.q_empty), phases >> 2 & 1);
        if (BOTH && threadIdx.x == 0) {
            smem.items[phases >> 3] = smem.second[0].item;
            barrier_arrive(shared_address(&smem.item_full));
        }
        if (!BOTH || !a.q_mapped) {
            copy_queries<KIND, ROPE, WARPS * 32, NARROW>(a, item_of<BOTH>(a, smem, s), smem);
        }
        publish_row<WARPS, IS_V4, BOTH>(a, smem, lookup, phases >> 3, 0, key, block);
        __syncwarp(); /* the rows' addresses are written */
        if constexpr (NARROW) {
            begin_convert<FORM>(smem, narrow);
        }
        if (BOTH) { /* other CTAs' parts of the previous run have been read from the buffers */
            barrier_wait(shared_address(&smem.parts_read), (phases >> 3 & 1) ^ 1);
        }
#pragma unroll 1
        for (int32_t t = 0; t < lookup.count; t += 2) {
            auto entry_ahead = [&] {
                const int32_t at = t + 2 + AT_ONCE;
                return at < lookup.count ? entry_of_lane<WARPS, BOTH>(smem, lookup, at) : -1;
            };
            const bool publishes = AT_ONCE == 2 || (t & 2) != 0;
            auto find_block = [&](bool here) {
                if (here && (AT_ONCE == 2 || !publishes)) {
                    key = key_of_entry<WARPS, BOTH>(smem, lookup, t + AT_ONCE, entry);
                    block = block_of_lane<BOTH>(a, smem, lookup, key);
                }
            };
            /* With both caches the first copies do not wait for the list. */
            const bool early = !BOTH || (!NARROW && t > 0);
            find_block(early);
            const int32_t later = NARROW ? 0 : entry_ahead();
            copy_tile(0, t);
            if (NARROW && publishes) { /* before the next tile, since rows are read ahead */
                publish_row<WARPS, IS_V4, BOTH>(a, smem, lookup, phases >> 3, t + 2, key, block);
                entry = entry_ahead();
                __syncwarp(); /* the addresses are written */
            }
            if (t + 1 < lookup.count) {
                copy_tile(1, t + 1);
            }
            find_block(!early);
            if (!NARROW) { /* now, since no buffer becomes free for a while */
                publish_row<WARPS, IS_V4, BOTH>(a, smem, lookup, phases >> 3, t + 2, key, block);
                entry = later;
                __syncwarp(); /* the addresses are written */
            }
        }
        phases ^= 12;
        if constexpr (BOTH) {
            s = smem.second[threadIdx.x >> 5].item.next;
        } else {
            s = load_run(a.p.attend.schedule, lookup.segment).next;
        }
    }
    wait_for_copies(); /* no copy may outlive the CTA */
}

template <int KIND, bool ROPE, bool BOTH>
GPU_INLINE void copy_rows(const sm90_latent_params &a, latent_shared &smem)
{
    if (BOTH || (a.form == LATENT_FORM_OWN && a.wide_keys)) {
        copy_runs_of_rows<KIND, LATENT_FORM_OWN, ROPE, BOTH>(a, smem);
    } else {
        copy_runs_of_rows<KIND, -1, ROPE, false>(a, smem);
    }
}

/* Converts 8-bit rows to f16. */
template <bool ROPE, bool BOTH>
GPU_INLINE void convert_rows(const sm90_latent_params &a, latent_shared &smem)
{
    if constexpr (!ROPE) {
        copy_runs_of_rows<KIND_F16, LATENT_FORM_V4, ROPE, BOTH>(a, smem);
    } else if (a.form == LATENT_FORM_E4M3) {
        copy_runs_of_rows<KIND_F16, LATENT_FORM_E4M3, ROPE, false>(a, smem);
    } else if (a.form == LATENT_FORM_E5M2) {
        copy_runs_of_rows<KIND_F16, LATENT_FORM_E5M2, ROPE, false>(a, smem);
    } else {
        copy_runs_of_rows<KIND_F16, LATENT_FORM_DS, ROPE, false>(a, smem);
    }
}

/* The end of the keys to copy: those that some row sees. */
GPU_INLINE int32_t end_of_keys(const gpu_row_tile &item)
{
    return min(item.k1, item.length);
}

/* The pages of a run for TMA: each lane has one of 32 consecutive pages. */
struct latent_pages {
    int32_t block, slot; /* block -1: no visible key */
};

GPU_INLINE latent_pages pages_of_lane(const sm90_latent_params &a, const latent_run &run,
                                      int32_t first)
{
    const gpu_problem &p = a.p.attend.problem;
    int32_t key = run.base + (first + (int32_t)(threadIdx.x & 31)) * a.box_rows;
    bool real = key < run.base + run.count * GPU_TILE && key < end_of_keys(run.item) &&
                key + a.box_rows > run.item.k0;
    int32_t block = block_of_key(a, key);
    return {real ? p.block_table[run.item.table + block] : -1, key - block * p.block_size};
}

GPU_INLINE latent_pages page_of_warp(const latent_pages &pages, int32_t n)
{
    return {__shfl_sync(0xffffffffu, pages.block, n & 31),
            __shfl_sync(0xffffffffu, pages.slot, n & 31)};
}

/* Copies a page of half a tile, 4 columns, and of the rope column with the half it belongs to. */
template <bool ROPE>
GPU_INLINE void copy_page(const sm90_latent_params &a, latent_shared &smem, int b, int half,
                          int page, latent_pages of)
{
    const uint32_t to = shared_address(smem.k[b][half * 4]) + page * a.box_rows * 128;
    const uint32_t full = shared_address(&smem.full[b][half * 4]);
#pragma unroll
    for (int c = 0; c < 4; c++) {
        copy_box(to + c * LATENT_COLUMN_BYTES, &a.k_map, half * 256 + c * 64, of.slot, 0, of.block,
                 full + c * 8);
    }
    if (ROPE && b != half) {
        copy_box(shared_address(smem.k[b][LATENT_ROPE]) + page * a.box_rows * 128, &a.k_map,
                 LATENT_MAX_RANK, of.slot, 0, of.block, shared_address(&smem.full[b][LATENT_ROPE]));
    }
}

template <bool ROPE>
GPU_INLINE void fetch_page(const sm90_latent_params &a, int half, latent_pages of)
{
#pragma unroll
    for (int c = 0; c < 4; c++) {
        fetch_box(&a.k_map, half * 256 + c * 64, of.slot, 0, of.block);
    }
    if (ROPE && half == 1) {
        fetch_box(&a.k_map, LATENT_MAX_RANK, of.slot, 0, of.block);
    }
}

/* One warp copies one half of all tiles by TMA. If several CTAs walk the same keys, each fetches
 * one half into the L2, LATENT_AHEAD tiles ahead. This does not pay if each CTA has its own keys or
 * other queries' CTAs fetch them. */
template <bool ROPE>
GPU_INLINE void copy_boxes(const sm90_latent_params &a, latent_shared &smem, int half)
{
    const gpu_params &p = a.p.attend;
    const int pages = GPU_TILE / a.box_rows, lane = threadIdx.x & 31;
    int phases = 3; /* phases of the buffers */
#pragma unroll 1
    for (int32_t s = first_segment(p.schedule); s >= 0;) {
        latent_run run = load_run(p.schedule, s);
        s = run.next;
        const bool fetches = p.schedule.concurrent > 1 && run.item.query_len == 1 &&
                             (int)(blockIdx.x % p.schedule.concurrent) == half;
        latent_pages here = pages_of_lane(a, run, 0), behind = pages_of_lane(a, run, 32);
#pragma unroll 1
        for (int32_t t = 0; t < run.count; t++) {
            const int b = t & 1;
            const int32_t first = t * pages;
            if (first > 0 && (first & 31) == 0) {
                here = behind;
                behind = pages_of_lane(a, run, first + 32);
            }
            uint32_t real = __ballot_sync(0xffffffffu, here.block >= 0) >> (first & 31);
            const int bytes = __popc(real & ((1u << pages) - 1)) * a.box_rows * 128;
            barrier_wait(shared_address(&smem.empty[b][half]), phases >> b & 1);
            phases ^= 1 << b;
            if (lane < 4 || (ROPE && lane == 4 && b != half)) {
                barrier_arrive_expect(
                    shared_address(&smem.full[b][lane < 4 ? half * 4 + lane : LATENT_ROPE]), bytes);
            }
            __syncwarp();
#pragma unroll 1
            for (int page = 0; page < pages; page++) {
                latent_pages of = page_of_warp(here, first + page);
                if (of.block >= 0 && elected()) {
                    copy_page<ROPE>(a, smem, b, half, page, of);
                }
            }
            if (!fetches) {
                continue;
            }
#pragma unroll 1
            for (int page = 0; page < pages; page++) {
                int32_t n = first + LATENT_AHEAD * pages + page;
                const bool near = ((n ^ first) & ~31) == 0;
                latent_pages of = page_of_warp(
                    {near ? here.block : behind.block, near ? here.slot : behind.slot}, n);
                if (of.block >= 0 && elected()) {
                    fetch_page<ROPE>(a, half, of);
                }
            }
        }
    }
}

template <int KIND, bool ROPE>
GPU_INLINE void copy_all_queries(const sm90_latent_params &a, latent_shared &smem)
{
    const gpu_schedule &plan = a.p.attend.schedule;
    int phase = 0;
#pragma unroll 1
    for (int32_t s = first_segment(plan); s >= 0; phase ^= 1) {
        latent_run run = load_run(plan, s);
        s = run.next;
        barrier_wait(shared_address(&smem.q_empty), phase ^ 1);
        copy_queries<KIND, ROPE, 64>(a, run.item, smem);
    }
    wait_for_copies();
}

#endif
