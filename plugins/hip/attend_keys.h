/* SPDX-License-Identifier: Apache-2.0 */
/* Queries, keys and values on their way into the matrix units' registers. Each lane loads 16 bytes
 * where it can: the depth of a product may have any order as long as both sides have the same, so
 * dims and keys come in the order in which wide loads bring them. */
#ifndef HIP_ATTEND_KEYS_H
#define HIP_ATTEND_KEYS_H

#include "gpu/device/items.h"
#include "gpu/device/visible.h"
#include "attend_list.h"
#include "matrix.h"

#if defined(MATRIX_DEPTH)

/* What follows from a lane's number is computed where it is used: hoisted out of the loop over
 * runs, it would take registers from the products. */
GPU_INLINE int32_t this_lane()
{
    int32_t lane = lane_index();
    asm volatile("" : HIP_REGISTER(lane));
    return lane;
}

GPU_INLINE int32_t this_thread()
{
    int32_t thread = (int32_t)thread_index();
    asm volatile("" : HIP_REGISTER(thread));
    return thread;
}

/* Row warps have 16 rows each and read the same keys. The warps of the same rows have other keys of
 * a tile (splits) or other dims of the output (dim warps, who make the same scores): the sums of a
 * head over 128 are half of RDNA's registers. */
template <int KIND_, int D_, int ROW_WARPS_, int WARPS_> struct shape {
    static constexpr int kind = KIND_, size = D_, row_warps = ROW_WARPS_, warps = WARPS_;
#if defined(MATRIX_CDNA)
    static constexpr int dim_warps = 1;
#else
    static constexpr int dim_warps = size > 128 ? 2 : 1;
#endif
    static constexpr int splits = warps / row_warps / dim_warps, threads = warps * GPU_LANES;
    static constexpr int rows = 16 * row_warps;
    static constexpr bool bytes = kind >= KIND_E4M3; /* 8-bit elements, which become f16 */
    static constexpr int element = bytes ? 1 : 2;
    static constexpr int row_bytes = size * element, chunks = row_bytes / 16;
    static constexpr bool staged = row_warps > 1;           /* keys go through LDS */
    static constexpr int tile = HIP_STAGED_TILE(row_bytes); /* keys in LDS */
    static constexpr int out_size = size / dim_warps;       /* dims of a warp's output */
    static constexpr int steps = out_size / 16;             /* tiles of it */
    static constexpr bool codes = kind == KIND_FP8;
#if defined(MATRIX_CODES)
    static constexpr int products = size / (codes ? MATRIX_CODES : 16); /* that a score takes */
    static constexpr float product_scale = codes ? MATRIX_CODES_SCALE : 1.0f;
#else
    static constexpr int products = size / 16;
    static constexpr float product_scale = 1.0f;
#endif
#if defined(MATRIX_CDNA)
    static constexpr int raw = chunks / 4; /* 16-byte pieces of a key in a lane */
    static constexpr int parts = 1;        /* parts of a key, one after the other in registers */
    static constexpr int pass = out_size < 128 ? out_size : 128; /* dims of values in a pass */
#elif defined(MATRIX_RDNA4)
    static constexpr int raw = chunks / 2, parts = size / out_size, pass = out_size;
#else
    static constexpr int raw = chunks, parts = raw > 8 ? raw / 8 : 1, pass = 64;
#endif
#if defined(MATRIX_RDNA3) /* queries stay in LDS: registers hold sums and values */
    static constexpr int query_bytes = rows * size * 2;
#else
    static constexpr int query_bytes = 0;
#endif
    static constexpr int pieces = raw / parts, part_products = products / parts;
    static constexpr int passes = out_size / pass, pass_steps = pass / 16;
    static constexpr int per = pass / 16; /* neighbouring values of a lane in a pass */
    static_assert(splits * row_warps * dim_warps == warps, "each warp has its part");
    static_assert(raw * 16 * MATRIX_GROUPS >= row_bytes, "all dims are loaded");
    static_assert(MATRIX_DEPTH == 16 || raw * MATRIX_GROUPS == chunks, "each of them once");
};

/* What a warp does of a run. */
struct warp_part {
    int32_t row, split, dim; /* first of its 16 rows; which keys; first dim of its output */
};

template <class S> GPU_INLINE warp_part part_of_warp(int32_t warp)
{
    int32_t rest = warp / S::row_warps;
    return {warp % S::row_warps * 16, rest % S::splits, rest / S::splits * S::out_size};
}

/* First dim of a lane's elements of product m; the order of key_chunk. */
template <class S> GPU_INLINE int32_t dim_of_step(int m, int g)
{
#if defined(MATRIX_CODES)
    if constexpr (S::codes) {
        return 2 * MATRIX_CODES * (m / 2) + 16 * g + 8 * (m & 1);
    }
#endif
#if defined(MATRIX_CDNA)
    return S::bytes ? 64 * (m / 4) + 16 * g + 4 * (m & 3) : 32 * (m / 2) + 8 * g + 4 * (m & 1);
#elif defined(MATRIX_RDNA4)
    return S::bytes ? 32 * (m / 2) + 16 * g + 8 * (m & 1) : 16 * m + 8 * g;
#else
    (void)g;
    return 16 * m;
#endif
}

/* Which 16 bytes of a key's row are a lane's r-th. */
GPU_INLINE int32_t key_chunk(int r, int g)
{
#if defined(MATRIX_CDNA)
    return 4 * r + g;
#elif defined(MATRIX_RDNA4)
    return 2 * r + g;
#else
    (void)g;
    return r;
#endif
}

template <int KIND> GPU_INLINE uint32_t query_pair(const char *at, bool from_bf16)
{
    uint32_t x = *(const uint32_t *)at;
    if (KIND >= KIND_E4M3 && from_bf16) {
        float low = bits_float(x << 16), high = bits_float(x & 0xffff0000u);
        low = isnan(low) ? low : fminf(fmaxf(low, -65504.0f), 65504.0f);
        high = isnan(high) ? high : fminf(fmaxf(high, -65504.0f), 65504.0f);
        return pack_pair<KIND_F16>(low, high);
    }
    return x;
}

/* Where 16 bytes of a row stand in LDS: neighbouring rows put the same chunk into other banks. */
template <int CHUNKS> GPU_INLINE int32_t swizzled(int32_t row, int32_t chunk)
{
    constexpr int most = CHUNKS >= 8 ? 7 : CHUNKS - 1;
    return (row * CHUNKS + (chunk ^ ((CHUNKS >= 8 ? row : row >> 1) & most))) * 16;
}

/* Loads COUNT words of a query from dim d on, 16-bit elements or codes; zeros where there is no
 * query or no such dim. */
template <class S, int COUNT>
GPU_INLINE void load_dims(const gpu_params &p, const char *from, bool real, int32_t d, uint32_t *to)
{
    bool from_bf16 = p.q.dtype == ATTN_DTYPE_BF16;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        to[i] = 0;
    }
    if (real && d < p.problem.head_size) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
#if defined(MATRIX_CODES)
            if constexpr (S::codes) {
                to[i] = own_codes(((const uint32_t *)(from + d))[i]);
                continue;
            }
#endif
            to[i] = query_pair<S::kind>(from + (d + 2 * i) * 2, from_bf16);
        }
    }
}

/* The queries that a warp multiplies keys with: those of a lane's column, or where they all are. */
template <class S> struct lane_query {
#if defined(MATRIX_RDNA3)
    const char *rows;
#else
    matrix_part parts[S::products]; /* parts of codes are two words each */
#endif
};

/* `row` of the item is the lane's; `staged`: where the item's queries go if they go through LDS,
 * which one of those who have it does. */
template <class S>
GPU_INLINE void load_query(const gpu_params &p, const gpu_run &r, int32_t row, int g, bool stages,
                           char *staged, lane_query<S> &q)
{
    bool real = row < r.row_tile.num_rows;
    int32_t at = r.row_tile.first_row + (real ? row : 0), token = at / p.problem.group;
    const char *from =
        p.q.data + (int64_t)(r.row_tile.query_start + token) * p.q.row +
        (int64_t)(r.head * p.problem.group + at - token * p.problem.group) * p.q.head;
#if defined(MATRIX_RDNA3)
    q.rows = staged;
    if (stages) {
#pragma unroll 2
        for (int i = 0; i < S::size / 16; i++) {
            uint32_t x[4];
            load_dims<S, 4>(p, from, real, 16 * i + 8 * g, x);
            *(uint4 *)(staged + swizzled<S::size / 8>(row, 2 * i + g)) = {x[0], x[1], x[2], x[3]};
        }
    }
#else
    (void)stages, (void)staged;
#pragma unroll
    for (int m = 0; m < S::products; m++) {
        constexpr int words = S::codes ? 2 : MATRIX_DEPTH / 2;
        uint32_t x[words];
        load_dims<S, words>(p, from, real, dim_of_step<S>(m, g), x);
#pragma unroll
        for (int i = 0; i < words; i++) {
            q.parts[m][i] = x[i];
        }
    }
#endif
}

/* B's part of product m. */
template <class S> GPU_INLINE matrix_part query_part(const lane_query<S> &q, int32_t row, int m)
{
#if defined(MATRIX_RDNA3)
    const uint4 x = *(const uint4 *)(q.rows + swizzled<S::size / 8>(row, 2 * m));
    const uint4 y = *(const uint4 *)(q.rows + swizzled<S::size / 8>(row, 2 * m + 1));
    return matrix_part{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
#else
    (void)row;
    return q.parts[m];
#endif
}

struct key_finder {
    int32_t shift, block_size; /* shift -1: no power of two */
};

GPU_INLINE key_finder make_finder(const gpu_params &p)
{
    int32_t size = p.problem.block_size;
    return {(size & (size - 1)) == 0 ? 31 - __builtin_clz((uint32_t)size) : -1, size};
}

/* With scales only where they are wanted. A key that no query sees has the place of the nearest one
 * that is seen: its weights are 0. */
GPU_INLINE key_place find_key(const gpu_params &p, const key_finder &finder, const gpu_run &r,
                              int32_t key, bool scales)
{
    key = min(max(key, r.row_tile.k0), r.row_tile.k1 - 1);
    int64_t block = r.row_tile.key_start + key, slot = 0;
    if (p.problem.units != nullptr) {
        find_listed(p.problem, r.row_tile.table, key, block, slot);
    } else if (p.problem.paged) {
        int32_t index = finder.shift >= 0 ? key >> finder.shift : key / finder.block_size;
        block = p.problem.block_table[r.row_tile.table + index];
        slot = key - index * finder.block_size;
    }
    return place_of_key(p, r.head, block, slot, scales);
}

/* 16 bytes of a row, zero where it has fewer. */
GPU_INLINE uint4 load_chunk(const char *base, int32_t place, int32_t chunk, int32_t bytes)
{
    uint4 x = {0, 0, 0, 0};
    if (chunk * 16 < bytes) {
        x = *(const uint4 *)(base + ((int64_t)place << 4) + chunk * 16);
    }
    return x;
}

/* A's part of product m of those whose pieces these are. */
template <class S> GPU_INLINE matrix_part key_part(const uint4 (&raw)[S::pieces], int m)
{
    matrix_part part;
    uint32_t two[2];
#if defined(MATRIX_CODES)
    if constexpr (S::codes) {
        part[0] = own_codes((m & 1) == 0 ? raw[m / 2].x : raw[m / 2].z);
        part[1] = own_codes((m & 1) == 0 ? raw[m / 2].y : raw[m / 2].w);
        return part;
    }
#endif
#if defined(MATRIX_CDNA)
    if constexpr (S::bytes) {
        const uint4 &x = raw[m / 4];
        widen_bytes<S::kind>((m & 3) == 0   ? x.x
                             : (m & 3) == 1 ? x.y
                             : (m & 3) == 2 ? x.z
                                            : x.w,
                             two);
        part = matrix_part{two[0], two[1]};
    } else {
        const uint4 &x = raw[m / 2];
        part = (m & 1) == 0 ? matrix_part{x.x, x.y} : matrix_part{x.z, x.w};
    }
#elif defined(MATRIX_RDNA4)
    if constexpr (S::bytes) {
        const uint4 &x = raw[m / 2];
        widen_bytes<S::kind>((m & 1) == 0 ? x.x : x.z, two);
        part[0] = two[0], part[1] = two[1];
        widen_bytes<S::kind>((m & 1) == 0 ? x.y : x.w, two);
        part[2] = two[0], part[3] = two[1];
    } else {
        part = matrix_part{raw[m].x, raw[m].y, raw[m].z, raw[m].w};
    }
#else
    if constexpr (S::bytes) {
        const uint32_t words[4] = {raw[m].x, raw[m].y, raw[m].z, raw[m].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            widen_bytes<S::kind>(words[i], two);
            part[2 * i] = two[0], part[2 * i + 1] = two[1];
        }
    } else {
        const uint4 &x = raw[2 * m], &y = raw[2 * m + 1];
        part = matrix_part{x.x, x.y, x.z, x.w, y.x, y.y, y.z, y.w};
    }
#endif
    return part;
}

/* The values of a lane in a pass: `per` neighbouring dims from its first + column * per on, of the
 * keys that depth_of_part gives it; 16-bit elements. */
template <class S> struct lane_values {
    uint32_t rows[MATRIX_DEPTH][S::per / 2];
};

template <class S>
GPU_INLINE void load_values(const gpu_params &p, const char *base, const key_place &at,
                            int32_t column, int g, int32_t first, lane_values<S> &to)
{
    constexpr int bytes = S::per * S::element; /* 4, 8 or 16 */
    const int32_t d = first + column * S::per;
    const uint32_t at_d = d < p.problem.head_size_v ? (uint32_t)(d * S::element) : 0;
    (void)g;
    uint32_t raw[MATRIX_DEPTH][bytes / 4];
#pragma unroll
    for (int e = 0; e < MATRIX_DEPTH; e++) {
#if defined(MATRIX_RDNA3) /* the same in all lanes: a scalar address */
        int32_t place = __builtin_amdgcn_readlane(at.v, depth_of_part(e, 0));
#else
        int32_t place = lane_read(at.v, depth_of_part(e, g));
#endif
        const char *row = base + ((int64_t)place << 4);
        __builtin_memcpy(raw[e], __builtin_assume_aligned(row + at_d, bytes), bytes);
    }
#pragma unroll
    for (int e = 0; e < MATRIX_DEPTH; e++) {
#pragma unroll
        for (int i = 0; i < S::per / 2; i++) {
            if constexpr (S::bytes) {
                uint32_t two[2];
                widen_bytes<S::kind>(raw[e][i / 2], two);
                to.rows[e][i] = two[i & 1];
            } else {
                to.rows[e][i] = raw[e][i];
            }
        }
    }
}

/* A's part of a pass's output tile t: dim column * per + t of all keys. */
template <class S> GPU_INLINE matrix_part value_part(const lane_values<S> &v, int t)
{
    matrix_part part;
#pragma unroll
    for (int i = 0; i < MATRIX_DEPTH / 2; i++) {
        part[i] = __builtin_amdgcn_perm(v.rows[2 * i + 1][t / 2], v.rows[2 * i][t / 2],
                                        (t & 1) != 0 ? 0x07060302u : 0x05040100u);
    }
    return part;
}

template <class S> GPU_INLINE bool values_odd(const lane_values<S> &v)
{
    uint32_t odd = 0;
#pragma unroll
    for (int e = 0; e < MATRIX_DEPTH; e++) {
#pragma unroll
        for (int i = 0; i < S::per / 2; i++) {
            odd |= odd_of_pair < S::kind == KIND_BF16 ? KIND_BF16 : KIND_F16 > (v.rows[e][i]);
        }
    }
    return any_lane(odd != 0);
}

/* Rows that have their own scale. f16 holds fp8 and int8 codes times it as nvidia's kernels do. */
template <class S> GPU_INLINE void scale_values(const key_place &at, int g, lane_values<S> &v)
{
#pragma unroll
    for (int e = 0; e < MATRIX_DEPTH; e++) {
        _Float16 f = (_Float16)lane_read(at.v_scale, depth_of_part(e, g));
        half_pair scale = {f, f};
#pragma unroll
        for (int i = 0; i < S::per / 2; i++) {
            v.rows[e][i] =
                __builtin_bit_cast(uint32_t, __builtin_bit_cast(half_pair, v.rows[e][i]) * scale);
        }
    }
}

#endif
#endif
