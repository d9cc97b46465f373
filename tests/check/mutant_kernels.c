/* SPDX-License-Identifier: Apache-2.0 */
/* Mistakes of the kernels around attend. */
#include <math.h>
#include <string.h>

#include "mutants.h"

static void skip_ignored(struct attn_write_kv_args *args)
{
    static _Thread_local int64_t slots[MAX_TOKENS];
    for (int64_t t = 0; t < args->num_slots && t < MAX_TOKENS; t++) {
        slots[t] = args->slot_mapping[t] < 0 ? 0 : args->slot_mapping[t];
    }
    args->slot_mapping = slots;
}

static void last_row_dropped(struct attn_write_kv_args *args)
{
    while (args->num_slots > 0 && args->slot_mapping[args->num_slots - 1] < 0) {
        args->num_slots--;
    }
    args->num_slots -= args->num_slots > 0;
}

/* Weights both sides alike whatever their lse. */
static void merge_ignores_empty(struct attn_merge_states_args *args)
{
    args->num_rows_with_prefix = args->num_rows;
}

/* The suffix as it is, as if no row had a prefix. */
static void suffix_alone(struct attn_merge_states_args *args)
{
    args->num_rows_with_prefix = 0;
}

/* What was written of one slot and head. */
static uint8_t *row_of(const struct attn_kv_view *view, int64_t slot, int64_t head)
{
    return (uint8_t *)view->data + slot / view->block_size * view->stride_block +
           slot % view->block_size * view->stride_slot + head * view->stride_head;
}

static uint8_t *scale_of(const struct attn_kv_view *view, int64_t slot, int64_t head)
{
    return (uint8_t *)view->scale + slot / view->block_size * view->scale_stride_block +
           slot % view->block_size * view->scale_stride_slot + head * view->scale_stride_head;
}

static void zero_point_off(const struct attn_write_kv_args *args, int64_t t, int64_t slot,
                           int64_t head)
{
    uint32_t bits;
    if (args->layer->kv_dtype == ATTN_KV_INT4_PER_TOKEN_HEAD) {
        memcpy(&bits, scale_of(args->k_cache, slot, head), sizeof bits);
        bits = (bits & ~15u) | ((bits + 1) & 15u);
        memcpy(scale_of(args->k_cache, slot, head), &bits, sizeof bits);
    }
}

static void nibbles_swapped(const struct attn_write_kv_args *args, int64_t t, int64_t slot,
                            int64_t head)
{
    int32_t kv = args->layer->kv_dtype;
    uint8_t *row = row_of(args->k_cache, slot, head);
    if ((kv == ATTN_KV_INT4_PER_TOKEN_HEAD || kv == ATTN_KV_NVFP4) && args->k_cache->pack == 0) {
        for (int32_t i = 0; i < args->k_cache->head_size / 2; i++) {
            row[i] = (uint8_t)(row[i] << 4 | row[i] >> 4);
        }
    }
}

static void written_by_number(const struct attn_write_kv_args *args, int64_t t, int64_t slot,
                              int64_t head)
{
    if (args->layer->batch_invariant && args->num_slots < 3) {
        row_of(args->k_cache, slot, head)[0] ^= 1;
    }
}

/* Halves of a step go to the even code, not away from zero. */
static void ties_to_even(const struct attn_write_kv_args *args, int64_t t, int64_t slot,
                         int64_t head)
{
    int32_t kv = args->layer->kv_dtype;
    float scale;
    if ((kv != ATTN_KV_INT8_PER_TOKEN_HEAD && kv != ATTN_KV_INT8_KV && kv != ATTN_KV_INT8_K) ||
        args->k->dtype.bits != 32 || args->k_cache->pack > 0) {
        return;
    }
    memcpy(&scale, scale_of(args->k_cache, slot, head), sizeof scale);
    int8_t *row = (int8_t *)row_of(args->k_cache, slot, head);
    const float *x =
        (const float *)args->k->data + t * args->k->strides[0] + head * args->k->strides[1];
    for (int32_t d = 0; d < args->k_cache->head_size; d++) {
        float code = x[d] / scale;
        row[d] = isnan(code) ? 0 : (int8_t)nearbyintf(code);
    }
}

/* Right: a NaN scale already makes the row NaN. */
static void cleared_behind_nan(const struct attn_write_kv_args *args, int64_t t, int64_t slot,
                               int64_t head)
{
    int32_t kv = args->layer->kv_dtype;
    float scale;
    if ((kv != ATTN_KV_INT8_PER_TOKEN_HEAD && kv != ATTN_KV_FP8_PER_TOKEN_HEAD) ||
        args->k_cache->pack > 0) {
        return;
    }
    memcpy(&scale, scale_of(args->k_cache, slot, head), sizeof scale);
    if (isnan(scale)) {
        memset(row_of(args->k_cache, slot, head), 1, (size_t)args->k_cache->head_size);
    }
}

static void rope_of_the_other_form(struct attn_write_kv_args *args, struct attn_io_rope *rope)
{
    rope->form = ATTN_ROPE_NEOX;
}

static void rope_without_norm(struct attn_write_kv_args *args, struct attn_io_rope *rope)
{
    rope->k_norm_weight = NULL;
}

/* Every row at the first one's. */
static void rope_one_position(struct attn_write_kv_args *args, struct attn_io_rope *rope)
{
    static _Thread_local int64_t positions[MAX_TOKENS];
    for (int64_t t = 0; t < args->num_slots && t < MAX_TOKENS; t++) {
        positions[t] = rope->positions[0];
    }
    rope->positions = positions;
}

static void gather_from_the_start(struct attn_gather_kv_args *args)
{
    args->first_key = NULL;
}

static void gemm_one_scale(struct attn_batched_gemm_args *args)
{
    args->w_scale_count = args->w_scale_count > 0;
}

/* Every block has the first one's power of two. */
static void gemm_one_block_scale(struct attn_batched_gemm_args *args)
{
    static _Thread_local struct attn_tensor scales;
    static _Thread_local int64_t strides[3];
    if (args->w_block_scale != NULL) {
        scales = *args->w_block_scale;
        for (int32_t i = 0; i < 3; i++) {
            strides[i] = scales.shape[i] == args->w->shape[i] ? scales.strides[i] : 0;
        }
        scales.strides = strides;
        args->w_block_scale = &scales;
    }
}

static void quantize_row_major(struct attn_quantize_args *args)
{
    static _Thread_local struct attn_tensor scales;
    static _Thread_local int64_t shape[2];
    if (args->scale_column_major) {
        scales = *args->block_scales;
        shape[0] = scales.shape[1];
        shape[1] = scales.shape[0];
        scales.shape = shape;
        scales.strides = NULL;
        args->block_scales = &scales;
        args->scale_column_major = 0;
    }
}

static void quantize_any_scale(struct attn_quantize_args *args)
{
    args->scale_pow2 = 0;
}

static void quantize_by_number(struct attn_quantize_args *args)
{
    args->scale_pow2 ^= args->x->shape[0] == 1;
}

static void amax_afresh(struct attn_amax_args *args)
{
    args->accumulate = 0;
}

static void amax_forgets(struct attn_amax_args *args)
{
    args->history += args->history_len - 1;
    args->history_len = args->history_len > 0;
}

static void copies_backwards(struct attn_copy_blocks_args *args)
{
    static _Thread_local int64_t pairs[64];
    for (int64_t i = 0; i < args->num_pairs && i < 32; i++) {
        pairs[2 * i] = args->pairs[2 * i + 1];
        pairs[2 * i + 1] = args->pairs[2 * i];
    }
    args->pairs = pairs;
}

/* The first plane only: the values, or the scales, stay behind. */
static void copies_first_plane(struct attn_copy_blocks_args *args)
{
    args->num_copies = args->num_copies > 0;
}

/* As if blocks lay equally far apart in both memories. */
static void copies_by_one_stride(struct attn_copy_blocks_args *args)
{
    static _Thread_local struct attn_block_copy copies[8];
    for (int32_t i = 0; i < args->num_copies && i < 8; i++) {
        memcpy(&copies[i], (const char *)args->copies + (size_t)i * (size_t)args->copy_stride,
               sizeof copies[i]);
        bool nearer = copies[i].source_stride < copies[i].destination_stride;
        int64_t stride = nearer ? copies[i].source_stride : copies[i].destination_stride;
        copies[i].source_stride = copies[i].destination_stride = stride;
    }
    args->copies = copies;
    args->copy_stride = sizeof *copies;
}

/* Rows stand one behind the other, whatever the stride says. */
static void fills_densely(struct attn_fill_args *args)
{
    args->stride = args->row_bytes;
}

/* What is zeroed is zeroed with the gaps between its rows. */
static void fills_gaps(struct attn_fill_args *args)
{
    args->row_bytes = args->stride;
}

static void merge_in_base_two(const struct attn_merge_states_args *args)
{
    for (int64_t h = 0; args->lse != NULL && h < args->lse->shape[0]; h++) {
        for (int64_t t = args->first_row; t < args->first_row + args->num_rows; t++) {
            ((float *)args->lse->data)[h * args->lse->strides[0] + t * args->lse->strides[1]] *=
                1.4426950408889634f;
        }
    }
}

static const struct mutant mutants[] = {
    {.name = "mutant_skip_ignored", .write = skip_ignored},
    {.name = "mutant_last_row_dropped", .write = last_row_dropped},
    {.name = "mutant_merge_ignores_empty", .merge = merge_ignores_empty},
    {.name = "mutant_zero_point_off", .written = zero_point_off},
    {.name = "mutant_nibbles_swapped", .written = nibbles_swapped},
    {.name = "mutant_written_by_number", .written = written_by_number},
    {.name = "mutant_ties_to_even", .written = ties_to_even},
    {.name = "control_cleared_behind_nan", .written = cleared_behind_nan},
    {.name = "mutant_rope_form", .rope = rope_of_the_other_form},
    {.name = "mutant_rope_norm_missing", .rope = rope_without_norm},
    {.name = "mutant_rope_one_position", .rope = rope_one_position},
    {.name = "mutant_gather_from_the_start", .gather = gather_from_the_start},
    {.name = "mutant_gemm_one_scale", .gemm = gemm_one_scale},
    {.name = "mutant_gemm_one_block_scale", .gemm = gemm_one_block_scale},
    {.name = "mutant_quantize_row_major", .quantize = quantize_row_major},
    {.name = "mutant_quantize_by_number", .quantize = quantize_by_number},
    {.name = "mutant_quantize_any_scale", .quantize = quantize_any_scale},
    {.name = "mutant_amax_afresh", .amax = amax_afresh},
    {.name = "mutant_amax_forgets", .amax = amax_forgets},
    {.name = "mutant_copies_backwards", .copy_blocks = copies_backwards},
    {.name = "mutant_copies_first_plane", .copy_blocks = copies_first_plane},
    {.name = "mutant_copies_by_one_stride", .copy_blocks = copies_by_one_stride},
    {.name = "mutant_fills_densely", .fill = fills_densely},
    {.name = "mutant_fills_gaps", .fill = fills_gaps},
    {.name = "mutant_cascade_suffix_alone", .merge = suffix_alone},
    {.name = "mutant_merge_in_base_two", .merged = merge_in_base_two},
};
const struct mutant_list kernel_mutants = {mutants, sizeof mutants / sizeof *mutants};
