/* SPDX-License-Identifier: Apache-2.0 */
/* Which values of a case may stand together. */
#include "cases/cases.h"
#include "support/number.h"

/* Factors that fall back to their first values where something holds. */
#define OFF_IF(holds, c, ...)                                                                      \
    off(holds, c, (const int32_t[]){__VA_ARGS__},                                                  \
        sizeof((const int32_t[]){__VA_ARGS__}) / sizeof(int32_t))
static void off(bool holds, struct attend_case *c, const int32_t *factors, size_t count)
{
    for (size_t i = 0; i < count && holds; i++) {
        c->index[factors[i]] = 0;
    }
}

#define VALUE(factor) case_value(space, c, factor)

bool case_set(const struct case_space *space, struct attend_case *c, int32_t factor, int32_t a)
{
    for (int32_t i = 0; i < space->factors[factor].count; i++) {
        if (space->factors[factor].values[i].a == a) {
            c->index[factor] = i;
            return true;
        }
    }
    return false;
}

/* What a cache is and how it is scaled. A 16- or 32-bit cache is that of the activations; only
 * quantized ones combine freely. */
static void drop_cache_conflicts(const struct case_space *space, struct attend_case *c)
{
    int32_t dtype = VALUE(FACTOR_DTYPE).a;
    bool paged = shape_is_paged(VALUE(FACTOR_SHAPE).a);
    OFF_IF(paged, c, FACTOR_ENCODER);
    OFF_IF(!paged, c, FACTOR_TABLE_ROW, FACTOR_BLOCK_SIZE, FACTOR_LAYOUT, FACTOR_WRITE,
           FACTOR_FAST_PREFILL);
    if (!paged || VALUE(FACTOR_KV_DTYPE).a <= ATTN_KV_F32) {
        case_set(space, c, FACTOR_KV_DTYPE, dtype);
    }
    int32_t kv = VALUE(FACTOR_KV_DTYPE).a;
    int32_t kv_v = VALUE(FACTOR_KV_DTYPE).b;
    kv_v = kv_v != 0 ? kv_v : kv;
    const bool fp8 = kv_is_fp8(kv) || kv_is_fp8(kv_v);
    OFF_IF(!fp8, c, FACTOR_SCALES);
    OFF_IF(!kv_is_fp8(kv_v), c, FACTOR_P_SCALE);
    if (kv == ATTN_KV_INT8_KV || kv == ATTN_KV_INT8_K ||
        VALUE(FACTOR_LAYOUT).a == ATTN_KV_LAYOUT_PACKED_K) {
        case_set(space, c, FACTOR_SCALE_PLACE, SCALES_APART); /* planes of their own */
    }
    OFF_IF((kv_is_turboquant(kv) || kv_is_blocks(kv) || kv_is_blocks(kv_v)) &&
               VALUE(FACTOR_LAYOUT).a == ATTN_KV_LAYOUT_PACKED_K,
           c, FACTOR_LAYOUT); /* a row is in one piece */
    bool scaled = fp8 || kv == ATTN_KV_NVFP4 || VALUE(FACTOR_QUERY).a != 0;
    OFF_IF(!kv_has_row_scales(kv), c, FACTOR_SCALE_PLACE);
    OFF_IF(!scaled, c, FACTOR_SCALE_SOURCE);
    OFF_IF(dtype == ATTN_DTYPE_F16 || kv > ATTN_KV_F32 || VALUE(FACTOR_QUERY).a != 0, c,
           FACTOR_HUGE); /* formats that do not have such numbers, or nothing next to them */
    OFF_IF(VALUE(FACTOR_HUGE).a != HUGE_NONE, c, FACTOR_NAN);
}

static void drop_terms_conflicts(const struct case_space *space, struct attend_case *c)
{
    int32_t shape = VALUE(FACTOR_SHAPE).a;
    int32_t causal = VALUE(FACTOR_CAUSAL).a;
    if (shape == SHAPE_CROSS) { /* positions of the keys have nothing to do with the queries' */
        if (!case_set(space, c, FACTOR_CAUSAL, CAUSAL_NO)) {
            case_set(space, c, FACTOR_SHAPE, SHAPE_EXTEND);
        }
        OFF_IF(true, c, FACTOR_WINDOW, FACTOR_ALIBI, FACTOR_STATIC_SINK, FACTOR_WRITE,
               FACTOR_FAST_PREFILL);
        shape = VALUE(FACTOR_SHAPE).a;
        causal = VALUE(FACTOR_CAUSAL).a;
    }
    OFF_IF(VALUE(FACTOR_WINDOW).b != 0 && causal != CAUSAL_NO, c, FACTOR_WINDOW);
    OFF_IF(causal != CAUSAL_YES || shape == SHAPE_CROSS_KEYS, c, FACTOR_SPANS, FACTOR_TREE,
           FACTOR_CHUNK);
    OFF_IF(VALUE(FACTOR_WINDOW).a != 0, c, FACTOR_CHUNK);
    OFF_IF(shape_is_decode(shape) || shape >= SHAPE_CONTIGUOUS, c, FACTOR_FAST_PREFILL);
    OFF_IF(shape >= SHAPE_CONTIGUOUS && VALUE(FACTOR_LENGTHS).a >= LENGTHS_DEVICE, c,
           FACTOR_LENGTHS);
    OFF_IF(VALUE(FACTOR_WRITE).a || VALUE(FACTOR_FAST_PREFILL).a, c,
           FACTOR_FIRST_ROW); /* a view of a batch comes without them */
    OFF_IF(VALUE(FACTOR_FAST_PREFILL).a, c, FACTOR_WRITE); /* in layers that write no cache */
}

/* An attend writes in every step, or in decodes of some caches only. */
static void drop_write_conflicts(const struct case_space *space, struct attend_case *c)
{
    bool decode = shape_is_decode(VALUE(FACTOR_SHAPE).a);
    int32_t kv = VALUE(FACTOR_KV_DTYPE).a;
    OFF_IF(!(space->caps.features & ATTN_FEATURE_FUSED_WRITE) &&
               !(decode && space->caps.decode_write_kv_dtypes >> kv & 1 &&
                 VALUE(FACTOR_KV_DTYPE).b == 0),
           c, FACTOR_WRITE);
}

void case_drop_conflicts(const struct case_space *space, struct attend_case *c)
{
    drop_terms_conflicts(space, c);
    drop_cache_conflicts(space, c);
    drop_write_conflicts(space, c);
}

/* Rows that do not lie at the declared alignment are no case of this backend's. */
static bool misaligned(const struct case_space *space, const struct factor_value *v)
{
    const struct attn_backend_caps *caps = &space->caps;
    if (caps->io_alignment > 1) {
        int64_t e = (int64_t)number_bytes(v[FACTOR_DTYPE].a);
        int64_t q = v[FACTOR_QUERY].a ? 1 : e;
        if (v[FACTOR_HEAD_SIZE].a * q % caps->io_alignment != 0 ||
            v[FACTOR_HEAD_SIZE].a * e % caps->io_alignment != 0 ||
            v[FACTOR_HEAD_SIZE].b * e % caps->io_alignment != 0) {
            return true;
        }
    }
    return shape_is_paged(v[FACTOR_SHAPE].a) && caps->kv_alignment > 1 &&
           !views_aligned(v, caps->kv_alignment);
}

static bool is_of(uint64_t mask, int32_t code)
{
    return mask == 0 || mask >> code & 1;
}

bool case_refused(const struct case_space *space, const struct attend_case *c)
{
    struct factor_value v[FACTOR_COUNT];
    case_values(space, c, v);
    uint64_t terms, features;
    case_needs(v, &terms, &features);
    struct attn_layer_desc layer;
    case_layer(v, &layer);
    for (int32_t i = 0; i < space->caps.num_refused; i++) {
        const struct attn_refused_combination *r =
            (const void *)((const char *)space->caps.refused +
                           (size_t)i * (size_t)space->caps.refused_stride);
        if ((terms & r->terms) == r->terms && (features & r->features) == r->features &&
            (is_of(r->kv_dtypes, case_kv(v, false)) || is_of(r->kv_dtypes, case_kv(v, true))) &&
            is_of(r->dtypes, layer.dtype) && is_of(r->layer_kinds, layer.kind) &&
            is_of(r->phases, case_phase(v)) &&
            (r->head_size.max == 0 || range_has(&r->head_size, layer.head_size))) {
            return true;
        }
    }
    return misaligned(space, v) || (space->serves != NULL && !space->serves(space->user, v));
}

bool case_of_cache(const struct case_space *space, int32_t dtype, int32_t kv_dtype,
                   struct attend_case *c)
{
    *c = (struct attend_case){{0}};
    bool there = (case_set(space, c, FACTOR_SHAPE, SHAPE_EXTEND) ||
                  case_set(space, c, FACTOR_SHAPE, SHAPE_DECODE)) &&
                 case_set(space, c, FACTOR_DTYPE, dtype) &&
                 case_set(space, c, FACTOR_KV_DTYPE, kv_dtype);
    case_set(space, c, FACTOR_CAUSAL, CAUSAL_YES);
    for (int32_t size = 0; there && size < space->factors[FACTOR_HEAD_SIZE].count; size++) {
        for (int32_t block = 0; block < space->factors[FACTOR_BLOCK_SIZE].count; block++) {
            c->index[FACTOR_HEAD_SIZE] = size;
            c->index[FACTOR_BLOCK_SIZE] = block;
            case_drop_conflicts(space, c);
            bool same = VALUE(FACTOR_KV_DTYPE).a == kv_dtype && VALUE(FACTOR_KV_DTYPE).b == 0;
            if (same && VALUE(FACTOR_HEAD_SIZE).a >= 64 && !case_refused(space, c)) {
                return true;
            }
        }
    }
    return false;
}

bool case_of_any_cache(const struct case_space *space, struct attend_case *c)
{
    return case_of_cache(space, ATTN_DTYPE_F16, ATTN_DTYPE_F16, c) ||
           case_of_cache(space, ATTN_DTYPE_BF16, ATTN_DTYPE_BF16, c) ||
           case_of_cache(space, ATTN_DTYPE_F32, ATTN_DTYPE_F32, c);
}
