/* SPDX-License-Identifier: Apache-2.0 */
/* The attend kernel: persistent CTAs of 4 warps walk equal shares of all (request, row tile, head,
 * key tile)s; the last CTA to finish an item that several share merges its parts. Rows of one item
 * are (query, head of the group) pairs of one KV head.
 *   SPLIT: 16 rows; each warp takes 16 keys of a tile by itself and no barrier stands in the loop.
 *   else:  64 rows; each warp takes 16 rows and all keys of a tile. */
#ifndef CUDA_FLASH_ATTEND_CUH
#define CUDA_FLASH_ATTEND_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "visible.cuh"

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f

enum flash_kind { KIND_BF16, KIND_F16, KIND_FP8 };

template <int KIND, int D, bool SPLIT> struct shape {
    static constexpr int element = KIND == KIND_FP8 ? 1 : 2;
    static constexpr int chunks = D * element / 16; /* 16-byte pieces of a key's row */
    static constexpr int half = FLASH_TILE * D * element;
    static constexpr int stage = 2 * half;
    static constexpr int stages = stage >= 65536 ? 2 : 98304 / stage > 6 ? 6 : 98304 / stage;
    static constexpr int rows = SPLIT ? 16 : 64;
    static constexpr int q_bytes = rows * D * 2;
    static constexpr int merge_bytes = SPLIT ? 16 * D * 4 + 2 * 4 * 16 * 4 : 0;
    static constexpr int smem = stages * stage + q_bytes + merge_bytes;
};

/* Neighbouring rows put the same chunk into different banks. */
template <int CHUNKS> static __device__ __forceinline__ int swizzle(int row, int chunk)
{
    return CHUNKS >= 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
}

static __device__ __forceinline__ void load4(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

static __device__ __forceinline__ void load4_transposed(uint32_t (&r)[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

template <int KIND>
static __device__ __forceinline__ void multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1)
{
    if constexpr (KIND == KIND_BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
                     "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

template <int KIND> static __device__ __forceinline__ uint32_t pack2(float a, float b)
{
    uint32_t r;
    if constexpr (KIND == KIND_BF16) {
        __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
        r = *(uint32_t *)&v;
    } else {
        __half2 v = __floats2half2_rn(a, b);
        r = *(uint32_t *)&v;
    }
    return r;
}

static __device__ __forceinline__ uint32_t widen(uint32_t two, bool e5m2)
{
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)two, e5m2 ? __NV_E5M2
                                                                              : __NV_E4M3);
    return (uint32_t)h.x | (uint32_t)h.y << 16;
}

static __device__ __forceinline__ float load_number(const char *row, int32_t dtype, int32_t d)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        return __half2float(((const __half *)row)[d]);
    case ATTN_DTYPE_BF16:
        return __bfloat162float(((const __nv_bfloat16 *)row)[d]);
    default:
        return ((const float *)row)[d];
    }
}

static __device__ __forceinline__ void store_number(char *row, int32_t dtype, int32_t d, float x)
{
    switch (dtype) {
    case ATTN_DTYPE_F16:
        ((__half *)row)[d] = __float2half_rn(x);
        break;
    case ATTN_DTYPE_BF16:
        ((__nv_bfloat16 *)row)[d] = __float2bfloat16_rn(x);
        break;
    default:
        ((float *)row)[d] = x;
        break;
    }
}

/* One place of the walk: a (request, row tile), a KV head of it and a key tile of that. */
struct cursor {
    int32_t t, pair, pair_start, pair_end, head, tile, num_tiles, k0, k1;
    flash_request q;
    int32_t first_row, num_rows;
};

static __device__ __forceinline__ void enter_pair(const flash_params &p, cursor &c)
{
    c.pair_start = p.pair_start[c.pair];
    c.pair_end = p.pair_start[c.pair + 1];
    c.q = load_request(p, p.pair_req[c.pair]);
    c.first_row = (c.pair - p.tile_start[c.q.r]) * p.row_tile;
    c.num_rows = min(p.row_tile, c.q.query_len * p.group - c.first_row);
    key_range(p, c.q, c.first_row, c.first_row + c.num_rows, &c.k0, &c.k1);
    c.num_tiles = (c.pair_end - c.pair_start) / p.num_kv_heads;
    c.head = (c.t - c.pair_start) / c.num_tiles;
    c.tile = (c.t - c.pair_start) - c.head * c.num_tiles;
}

static __device__ __forceinline__ void enter(const flash_params &p, cursor &c, int32_t t)
{
    int32_t low = 0, high = p.header[1] - 1;
    while (low < high) {
        int32_t middle = (low + high + 1) >> 1;
        if (p.pair_start[middle] <= t) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    c.t = t;
    c.pair = low;
    enter_pair(p, c);
}

static __device__ __forceinline__ void advance(const flash_params &p, cursor &c)
{
    c.t++;
    if (++c.tile < c.num_tiles) {
        return;
    }
    c.tile = 0;
    if (++c.head < p.num_kv_heads) {
        return;
    }
    if (c.pair + 1 < p.header[1]) {
        c.pair++;
        enter_pair(p, c);
    }
}

/* Lane l < 16 finds key l of its warp's 16: offsets of its K and V rows in 16-byte units. */
static __device__ __forceinline__ void locate(const flash_params &p, const cursor &c, int warp,
                                              int lane, int32_t &k_offset, int32_t &v_offset)
{
    int32_t j = (c.k0 & ~(FLASH_TILE - 1)) + c.tile * FLASH_TILE + warp * 16 + (lane & 15);
    k_offset = v_offset = -1;
    if (j < c.k0 || j >= c.k1) {
        return;
    }
    int64_t block = c.q.key_start + j, slot = 0;
    if (p.paged) {
        int32_t row = p.block_table_row != nullptr ? p.block_table_row[c.q.r] : c.q.r;
        int32_t index = j / p.block_size;
        slot = j - index * p.block_size;
        block = p.block_table[row * p.block_table_stride + index];
    }
    k_offset = (int32_t)((block * p.k.block + slot * p.k.slot) >> 4);
    v_offset = (int32_t)((block * p.v.block + slot * p.v.slot) >> 4);
}

static __device__ __forceinline__ void copy16(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes));
}

template <int KIND, int D>
static __device__ __forceinline__ void load_half(const flash_cache &cache, int32_t head_size,
                                                 int32_t head, int32_t offset, uint32_t to,
                                                 int warp, int lane)
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
    const char *base = cache.data + head * cache.head;
    int bytes = head_size * shape<KIND, D, true>::element;
#pragma unroll
    for (int i = 0; i < 16 * chunks / 32; i++) {
        int index = i * 32 + lane, row = index / chunks, chunk = index % chunks;
        int32_t at = __shfl_sync(0xffffffffu, offset, row);
        bool real = at >= 0 && chunk * 16 < bytes;
        const char *from = base + (real ? ((int64_t)at << 4) + chunk * 16 : 0);
        int key = warp * 16 + row;
        copy16(to + (key * chunks + swizzle<chunks>(key, chunk)) * 16, from, real ? 16 : 0);
    }
}

/* fp8 keys are read 4 neighbouring dims at a time, so the query's dims stand in that order. */
template <int KIND> static __device__ __forceinline__ int query_dim(int d)
{
    if constexpr (KIND != KIND_FP8) {
        return d;
    }
    int t = (d >> 2) & 3, e = d & 3;
    return (d & ~15) | (e < 2 ? t * 2 + e : 8 + t * 2 + e - 2);
}

template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ void load_query(const flash_params &p, const cursor &c, char *sq)
{
    constexpr int rows = shape<KIND, D, SPLIT>::rows;
    for (int i = threadIdx.x; i < rows * D / 8; i += 128) {
        int row = i / (D / 8), chunk = i % (D / 8);
        bool real = row < c.num_rows && chunk * 8 < p.head_size;
        int32_t at = c.first_row + row;
        const char *from = p.q.data + (int64_t)(c.q.query_start + at / p.group) * p.q.row +
                           (int64_t)(c.head * p.group + at % p.group) * p.q.head;
        if (KIND != KIND_FP8) {
            uint4 x = real ? *(const uint4 *)(from + chunk * 16) : make_uint4(0, 0, 0, 0);
            *(uint4 *)(sq + (row * (D / 8) + swizzle<D / 8>(row, chunk)) * 16) = x;
        } else {
            for (int e = 0; e < 8; e++) {
                int d = query_dim<KIND>(chunk * 8 + e);
                float x = real ? load_number(from, p.q.dtype, chunk * 8 + e) : 0.0f;
                x = fminf(fmaxf(x, -65504.0f), 65504.0f);
                ((__half *)sq)[(row * (D / 8) + swizzle<D / 8>(row, d / 8)) * 8 + d % 8] =
                    __float2half_rn(x);
            }
        }
    }
}

/* The two rows of a lane: g and g + 8 of its warp's 16. */
struct lane_rows {
    int32_t first[2], last[2], position[2], index[2];
    float slope[2];
};

static __device__ __forceinline__ lane_rows enter_rows(const flash_params &p, const cursor &c,
                                                       int row)
{
    lane_rows v;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int32_t at = c.first_row + row + 8 * i;
        bool real = row + 8 * i < c.num_rows;
        v.index[i] = real ? at / p.group : 0;
        flash_interval s = interval_of(p, c.q, v.index[i]);
        v.first[i] = real ? s.first : 1;
        v.last[i] = real ? s.last : 0;
        v.position[i] = s.position;
        v.slope[i] =
            real && p.slopes != nullptr ? p.slopes[c.head * p.group + at % p.group] : 0.0f;
    }
    return v;
}

template <int N>
static __device__ __forceinline__ void score_tile(const flash_params &p, const cursor &c,
                                                  const lane_rows &rows, float scale, bool slow,
                                                  int32_t first_key, float (&s)[N][4])
{
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            int i = e >> 1;
            int32_t j = first_key + n * 8 + (e & 1);
            bool sees = j >= rows.first[i] && j <= rows.last[i];
            float x = s[n][e] * scale;
            if (slow) {
                x = cap_score(x, p.soft_cap);
                bool real = rows.first[i] != 1 || rows.last[i] != 0;
                if ((p.spans != nullptr || p.tree != nullptr) && real) {
                    sees = sees_slow(p, c.q, rows.index[i], rows.position[i], j, sees);
                }
                if (sees && (p.alibi != 0 || p.tree != nullptr)) {
                    x += bias_of(p, c.q, rows.index[i], rows.position[i], rows.slope[i], j);
                }
                x *= LOG2E;
            }
            s[n][e] = sees ? x : -INFINITY;
        }
    }
}

/* Online softmax of one tile; s becomes weights, o and l shrink to the new maximum. */
template <int N, int ND>
static __device__ __forceinline__ void soften(float (&s)[N][4], float (&m)[2], float (&l)[2],
                                              float (&o)[ND][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float high = m[i];
#pragma unroll
        for (int n = 0; n < N; n++) {
            high = fmaxf(high, fmaxf(s[n][2 * i], s[n][2 * i + 1]));
        }
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        float base = high == -INFINITY ? 0.0f : high;
        float shrink = exp2f(m[i] - base), sum = 0.0f;
        m[i] = high;
#pragma unroll
        for (int n = 0; n < N; n++) {
            s[n][2 * i] = exp2f(s[n][2 * i] - base);
            s[n][2 * i + 1] = exp2f(s[n][2 * i + 1] - base);
            sum += s[n][2 * i] + s[n][2 * i + 1];
        }
        l[i] = l[i] * shrink + sum;
#pragma unroll
        for (int n = 0; n < ND; n++) {
            o[n][2 * i] *= shrink;
            o[n][2 * i + 1] *= shrink;
        }
    }
}

/* 16 rows against 16 * SUBS keys from key `first` of a stage on. */
template <int KIND, int D, int SUBS>
static __device__ __forceinline__ void dot_keys(uint32_t sq, int q_row, const char *stage,
                                                uint32_t sk, int first, int lane, bool e5m2,
                                                float (&s)[2 * SUBS][4])
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
#pragma unroll
    for (int n = 0; n < 2 * SUBS; n++) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
    }
#pragma unroll
    for (int kk = 0; kk < D / 16; kk++) {
        uint32_t a[4], b[4];
        int row = q_row + (lane & 15);
        load4(a, sq + (row * (D / 8) + swizzle<D / 8>(row, kk * 2 + (lane >> 4))) * 16);
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            if constexpr (KIND != KIND_FP8) {
                int key = first + sub * 16 + (lane & 7) + (lane >> 4) * 8;
                int chunk = kk * 2 + ((lane >> 3) & 1);
                load4(b, sk + (key * chunks + swizzle<chunks>(key, chunk)) * 16);
            } else {
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int key = first + sub * 16 + h * 8 + (lane >> 2);
                    uint32_t x = *(const uint32_t *)(stage +
                                                     (key * chunks + swizzle<chunks>(key, kk)) * 16 +
                                                     (lane & 3) * 4);
                    b[2 * h] = widen(x & 0xffff, e5m2);
                    b[2 * h + 1] = widen(x >> 16, e5m2);
                }
            }
            multiply<KIND>(s[2 * sub], a, b[0], b[1]);
            multiply<KIND>(s[2 * sub + 1], a, b[2], b[3]);
        }
    }
}

template <int KIND, int D, int SUBS>
static __device__ __forceinline__ void add_values(uint32_t sv, int first, int lane, bool e5m2,
                                                  const float (&s)[2 * SUBS][4], float (&o)[D / 8][4])
{
    constexpr int chunks = shape<KIND, D, true>::chunks;
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++) {
        uint32_t a[4] = {pack2<KIND>(s[2 * sub][0], s[2 * sub][1]),
                         pack2<KIND>(s[2 * sub][2], s[2 * sub][3]),
                         pack2<KIND>(s[2 * sub + 1][0], s[2 * sub + 1][1]),
                         pack2<KIND>(s[2 * sub + 1][2], s[2 * sub + 1][3])};
        int key = first + sub * 16 + (lane & 15);
#pragma unroll
        for (int c = 0; c < chunks / 2; c++) {
            uint32_t b[4];
            load4_transposed(b, sv + (key * chunks + swizzle<chunks>(key, 2 * c + (lane >> 4))) * 16);
            if constexpr (KIND != KIND_FP8) {
                multiply<KIND>(o[2 * c], a, b[0], b[1]);
                multiply<KIND>(o[2 * c + 1], a, b[2], b[3]);
            } else { /* bytes of even dims to the first of two column tiles, odd to the second */
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    uint32_t x = __byte_perm(b[2 * h], 0, 0x3120);
                    uint32_t y = __byte_perm(b[2 * h + 1], 0, 0x3120);
                    multiply<KIND>(o[4 * c + 2 * h], a, widen(x & 0xffff, e5m2),
                                   widen(y & 0xffff, e5m2));
                    multiply<KIND>(o[4 * c + 2 * h + 1], a, widen(x >> 16, e5m2),
                                   widen(y >> 16, e5m2));
                }
            }
        }
    }
}

/* Dim of element e (0 or 1) of column tile n in a lane. */
template <int KIND> static __device__ __forceinline__ int value_dim(int n, int lane, int e)
{
    if constexpr (KIND == KIND_FP8) {
        return (n >> 1) * 16 + (lane & 3) * 4 + 2 * e + (n & 1);
    }
    return n * 8 + (lane & 3) * 2 + e;
}

struct out_row {
    char *data;
    float *lse;
    float sink; /* base 2; -inf: none */
};

static __device__ __forceinline__ out_row out_row_of(const flash_params &p, const cursor &c, int row)
{
    int32_t at = c.first_row + row;
    int64_t token = c.q.query_start + at / p.group;
    int32_t head = c.head * p.group + at % p.group;
    out_row v;
    v.data = p.out.data + token * p.out.row + head * p.out.head;
    v.lse = p.lse != nullptr ? p.lse + head * p.lse_head + token * p.lse_row : nullptr;
    v.sink = p.sinks != nullptr ? p.sinks[head] * LOG2E : -INFINITY;
    return v;
}

/* Factor from o to out; the sink joins the denominator here. */
static __device__ __forceinline__ float finish_row(float sink, float m, float l, float *lse)
{
    float high = fmaxf(m, sink);
    float base = high == -INFINITY ? 0.0f : high;
    float shrink = exp2f(m - base);
    float sum = l * shrink + exp2f(sink - base);
    if (lse != nullptr) {
        *lse = sum == 0.0f ? -INFINITY : base * LN2 + logf(sum);
    }
    return sum == 0.0f ? 0.0f : shrink / sum;
}

/* Parts of an item that CTAs first .. last share, in their order: the same bits every time. */
template <int D>
static __device__ void merge_parts(const flash_params &p, const cursor &c, int32_t item_start,
                                   int32_t first, int32_t last, int64_t total, int32_t ctas,
                                   float v_scale)
{
    int64_t size = (int64_t)p.row_tile * (D + 2);
    int32_t first_slot = 2 * first + (item_start > (int32_t)(first * total / ctas));
    for (int i = threadIdx.x; i < c.num_rows * (D / 4); i += 128) {
        int row = i / (D / 4), d = i % (D / 4) * 4;
        float m = -INFINITY, l = 0.0f;
        float4 o = make_float4(0, 0, 0, 0);
        for (int32_t part = first; part <= last; part++) {
            const float *at = p.parts + (part == first ? first_slot : 2 * part) * size;
            m = fmaxf(m, __ldcg(at + p.row_tile * D + row));
        }
        float base = m == -INFINITY ? 0.0f : m;
#pragma unroll 4
        for (int32_t part = first; part <= last; part++) {
            const float *at = p.parts + (part == first ? first_slot : 2 * part) * size;
            float w = exp2f(__ldcg(at + p.row_tile * D + row) - base);
            float4 x = __ldcg((const float4 *)(at + row * D + d));
            l += w * __ldcg(at + p.row_tile * (D + 1) + row);
            o.x += w * x.x, o.y += w * x.y, o.z += w * x.z, o.w += w * x.w;
        }
        out_row out = out_row_of(p, c, row);
        float factor = finish_row(out.sink, m, l, d == 0 ? out.lse : nullptr) * v_scale;
        const float values[4] = {o.x, o.y, o.z, o.w};
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (d + e < p.head_size_v) {
                store_number(out.data, p.out.dtype, d + e, values[e] * factor);
            }
        }
    }
}

/* The 4 warps' shares of 16 rows, added in turn into shared memory. */
template <int KIND, int D>
static __device__ __forceinline__ void join_warps(float *so, float *sm, float *sl, int warp,
                                                  int lane, int num_rows, float (&m)[2],
                                                  float (&l)[2], float (&o)[D / 8][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = (lane >> 2) + 8 * i;
        if ((lane & 3) == 0) {
            sm[warp * 16 + row] = m[i];
            sl[warp * 16 + row] = l[i];
        }
    }
    __syncthreads();
    for (int turn = 0; turn < 4; turn++) {
        if (turn == warp) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = (lane >> 2) + 8 * i;
                float high = fmaxf(fmaxf(sm[row], sm[16 + row]), fmaxf(sm[32 + row], sm[48 + row]));
                float w = exp2f(m[i] - (high == -INFINITY ? 0.0f : high));
                if (row < num_rows) {
#pragma unroll
                    for (int n = 0; n < D / 8; n++) {
#pragma unroll
                        for (int e = 0; e < 2; e++) {
                            float *at = so + row * D + value_dim<KIND>(n, lane, e);
                            *at = (turn == 0 ? 0.0f : *at) + w * o[n][2 * i + e];
                        }
                    }
                }
            }
        }
        __syncthreads();
    }
}

/* Writes an item's share: out if the CTA had all of it, else a part, and then perhaps the merge. */
template <int KIND, int D, bool SPLIT>
static __device__ __forceinline__ void finish_item(const flash_params &p, const cursor &c,
                                                   int32_t begin, int32_t total, int32_t ctas,
                                                   float *so, float (&m)[2], float (&l)[2],
                                                   float (&o)[D / 8][4])
{
    __shared__ int32_t last_one;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int32_t item_start = c.pair_start + c.head * c.num_tiles, item_end = item_start + c.num_tiles;
    bool whole = item_start >= begin && c.t + 1 == item_end;
    int32_t slot = 2 * blockIdx.x + (item_start > begin);
    float *part = p.parts + (int64_t)slot * p.row_tile * (D + 2);
    float v_scale = KIND == KIND_FP8 ? cache_scale(p.v, c.head) : 1.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        l[i] += __shfl_xor_sync(0xffffffffu, l[i], 1);
        l[i] += __shfl_xor_sync(0xffffffffu, l[i], 2);
    }
    if constexpr (SPLIT) {
        float *sm = so + 16 * D, *sl = sm + 64;
        join_warps<KIND, D>(so, sm, sl, warp, lane, c.num_rows, m, l, o);
        for (int i = threadIdx.x; i < c.num_rows * D; i += 128) {
            int row = i / D, d = i % D;
            float high = fmaxf(fmaxf(sm[row], sm[16 + row]), fmaxf(sm[32 + row], sm[48 + row]));
            float base = high == -INFINITY ? 0.0f : high, sum = 0.0f;
            for (int w = 0; w < 4; w++) {
                sum += sl[w * 16 + row] * exp2f(sm[w * 16 + row] - base);
            }
            if (!whole) {
                part[i] = so[i];
                if (d == 0) {
                    part[16 * D + row] = high;
                    part[16 * (D + 1) + row] = sum;
                }
            } else if (d < p.head_size_v) {
                out_row out = out_row_of(p, c, row);
                float factor = finish_row(out.sink, high, sum, d == 0 ? out.lse : nullptr);
                store_number(out.data, p.out.dtype, d, so[i] * factor * v_scale);
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = warp * 16 + (lane >> 2) + 8 * i;
            if (row < c.num_rows) {
                out_row out = out_row_of(p, c, row);
                float factor = 1.0f;
                if (whole) {
                    factor = finish_row(out.sink, m[i], l[i], (lane & 3) == 0 ? out.lse : nullptr);
                    factor *= v_scale;
                } else if ((lane & 3) == 0) {
                    part[64 * D + row] = m[i];
                    part[64 * (D + 1) + row] = l[i];
                }
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        int d = value_dim<KIND>(n, lane, e);
                        if (!whole) {
                            part[row * D + d] = o[n][2 * i + e];
                        } else if (d < p.head_size_v) {
                            store_number(out.data, p.out.dtype, d, o[n][2 * i + e] * factor);
                        }
                    }
                }
            }
        }
    }
    if (!whole) {
        /* CTA b has the tiles b * total / ctas .. (b + 1) * total / ctas - 1 */
        int32_t first = (int32_t)((((int64_t)item_start + 1) * ctas - 1) / total);
        int32_t last = (int32_t)(((int64_t)item_end * ctas - 1) / total);
        int32_t *arrived = p.arrived + (int64_t)c.pair * p.num_kv_heads + c.head;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) {
            last_one = atomicAdd(arrived, 1) == last - first;
        }
        __syncthreads();
        if (last_one) {
            __threadfence();
            merge_parts<D>(p, c, item_start, first, last, total, ctas, v_scale);
            if (threadIdx.x == 0) {
                *arrived = 0; /* for the next run of this plan */
            }
        }
    }
    __syncthreads();
}

template <int KIND, int D, bool SPLIT>
__global__ void __launch_bounds__(128, D <= 128 ? 2 : 1) attend(const __grid_constant__ flash_params p)
{
    using S = shape<KIND, D, SPLIT>;
    constexpr int subs = SPLIT ? 1 : 4;
    extern __shared__ __align__(128) char smem[];
    char *sq = smem + S::stages * S::stage;
    float *so = (float *)(sq + S::q_bytes);
    const uint32_t base = (uint32_t)__cvta_generic_to_shared(smem);
    const uint32_t base_q = base + S::stages * S::stage;
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    int32_t total = p.header[0];
    int32_t ctas = min((int32_t)gridDim.x, total);
    if ((int32_t)blockIdx.x >= ctas) {
        return;
    }
    int32_t begin = (int32_t)((int64_t)blockIdx.x * total / ctas);
    int32_t end = (int32_t)((int64_t)(blockIdx.x + 1) * total / ctas);
    bool e5m2 = p.kv_dtype == ATTN_KV_FP8_E5M2;
    bool slow = p.soft_cap > 0.0f || p.spans != nullptr || p.tree != nullptr || p.alibi != 0;
    cursor c, ahead;
    int32_t k_offset, v_offset;
    enter(p, c, begin);
    ahead = c;
    locate(p, ahead, warp, lane, k_offset, v_offset);
    auto issue = [&](int stage) {
        if (ahead.t < end) {
            uint32_t to = base + stage * S::stage;
            load_half<KIND, D>(p.k, p.head_size, ahead.head, k_offset, to, warp, lane);
            load_half<KIND, D>(p.v, p.head_size_v, ahead.head, v_offset, to + S::half, warp, lane);
            advance(p, ahead);
            if (ahead.t < end) {
                locate(p, ahead, warp, lane, k_offset, v_offset);
            }
        }
        asm volatile("cp.async.commit_group;");
    };
#pragma unroll 1
    for (int i = 0; i < S::stages - 1; i++) {
        issue(i);
    }
    float o[D / 8][4], m[2], l[2];
    lane_rows rows;
    float scale = 0.0f;
    int stage = 0, free_stage = S::stages - 1;
    bool fresh = true;
#pragma unroll 1
    while (c.t < end) {
        if (fresh) {
            fresh = false;
            load_query<KIND, D, SPLIT>(p, c, sq);
            rows = enter_rows(p, c, (SPLIT ? 0 : warp * 16) + (lane >> 2));
            scale = p.scale * (KIND == KIND_FP8 ? cache_scale(p.k, c.head) : 1.0f);
            scale *= slow ? 1.0f : LOG2E;
            m[0] = m[1] = -INFINITY;
            l[0] = l[1] = 0.0f;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[n][0] = o[n][1] = o[n][2] = o[n][3] = 0.0f;
            }
            __syncthreads();
        }
        asm volatile("cp.async.wait_group %0;" ::"n"(S::stages - 2));
        if (SPLIT) {
            __syncwarp();
        } else {
            __syncthreads();
        }
        issue(free_stage);
        const char *at = smem + stage * S::stage;
        uint32_t sk = base + stage * S::stage;
        int first = SPLIT ? warp * 16 : 0;
        int32_t key = (c.k0 & ~(FLASH_TILE - 1)) + c.tile * FLASH_TILE + first + (lane & 3) * 2;
        float s[2 * subs][4];
        dot_keys<KIND, D, subs>(base_q, SPLIT ? 0 : warp * 16, at, sk, first, lane, e5m2, s);
        score_tile(p, c, rows, scale, slow, key, s);
        soften(s, m, l, o);
        add_values<KIND, D, subs>(sk + S::half, first, lane, e5m2, s, o);
        stage = stage + 1 == S::stages ? 0 : stage + 1;
        free_stage = free_stage + 1 == S::stages ? 0 : free_stage + 1;
        if (c.tile + 1 == c.num_tiles || c.t + 1 == end) {
            finish_item<KIND, D, SPLIT>(p, c, begin, total, ctas, so, m, l, o);
            fresh = true;
        }
        advance(p, c);
    }
    asm volatile("cp.async.wait_group 0;");
}

template <int KIND, int D, bool SPLIT>
static cudaError_t launch(const flash_params *p, int32_t num_sms, cudaStream_t stream)
{
    using S = shape<KIND, D, SPLIT>;
    static_assert(S::smem <= 163 * 1024, "a CTA's shared memory on sm_80");
    cudaError_t error = cudaFuncSetAttribute(
        attend<KIND, D, SPLIT>, cudaFuncAttributeMaxDynamicSharedMemorySize, S::smem);
    if (error == cudaSuccess && p != nullptr) {
        int32_t per_sm = D <= 128 ? 2 : 1;
        attend<KIND, D, SPLIT><<<num_sms * per_sm, 128, S::smem, stream>>>(*p);
        error = cudaGetLastError();
    }
    return error;
}

/* p NULL: only loads the kernels, so that no step does. */
template <int KIND>
static cudaError_t launch_kind(const flash_params *p, int32_t num_sms, cudaStream_t stream)
{
    cudaError_t error = cudaSuccess;
    int32_t d = p == nullptr ? 0 : max(p->head_size, p->head_size_v);
    bool split = p == nullptr || p->row_tile == 16, rows = p == nullptr || p->row_tile != 16;
    if (d <= 64) {
        error = split ? launch<KIND, 64, true>(p, num_sms, stream) : error;
        error = rows && !error ? launch<KIND, 64, false>(p, num_sms, stream) : error;
    }
    if (!error && (p == nullptr || (d > 64 && d <= 128))) {
        error = split ? launch<KIND, 128, true>(p, num_sms, stream) : error;
        error = rows && !error ? launch<KIND, 128, false>(p, num_sms, stream) : error;
    }
    if (!error && (p == nullptr || d > 128)) {
        error = split ? launch<KIND, 256, true>(p, num_sms, stream) : error;
        error = rows && !error ? launch<KIND, 256, false>(p, num_sms, stream) : error;
    }
    return error;
}

#endif
