/* SPDX-License-Identifier: Apache-2.0 */
/* The least that one call has to move and compute, whatever the kernel does. */
#include <unistd.h>

#include "support/layer.h"
#include "support/number.h"
#include "measured.h"

/* Where the system does not know, as in virtual machines: larger than most. */
#define LEAST_CACHE_BYTES (64.0 * (1 << 20))
#define MAX_COPIES 512

int32_t work_copies(double bytes)
{
    double cache = (double)sysconf(_SC_LEVEL3_CACHE_SIZE);
    double wanted = 2 * (cache > LEAST_CACHE_BYTES ? cache : LEAST_CACHE_BYTES);
    double copies = bytes > 0 ? wanted / bytes + 1 : MAX_COPIES;
    return copies < 2 ? 2 : copies > MAX_COPIES ? MAX_COPIES : (int32_t)copies;
}

static double element_bytes(const struct measured *measured)
{
    return (double)number_bytes(measured->layer.desc.dtype);
}

/* K and V of one token, scales included, as the cache holds them. */
static double slot_bytes(const struct measured *measured)
{
    const struct attn_cache_spec *spec = &measured->spec;
    return (double)spec->page_bytes / (double)spec->block_size;
}

static double new_row_bytes(const struct measured *measured)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    int32_t dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    return (double)desc->num_kv_heads * (desc->head_size + dv) * element_bytes(measured);
}

/* Pairs of a query and a key of its list of `most` keys (0: every key), and the rows that a request
 * reads: tokens of one request may choose the same, so those of one token. */
static struct visible listed_keys(const struct measured *measured, double most)
{
    const struct requests *requests = &measured->requests;
    struct visible listed = {0, 0};
    for (int32_t r = 0; r < requests->count; r++) {
        double keys = requests->seq_lens[r];
        listed.rows += most > 0 && most < keys ? most : keys;
        for (int32_t i = 0; i < requests->query_lens[r]; i++) {
            double seen = keys - requests->query_lens[r] + i + 1;
            listed.pairs += most > 0 && most < seen ? most : seen;
        }
    }
    return listed;
}

/* The own rows of the window and the compressed ones. */
static struct visible compressed_keys(const struct measured *measured)
{
    const struct attn_mla_desc *mla = &measured->layer.mla;
    const struct requests *requests = &measured->requests;
    struct visible seen = requests_visible(requests, &measured->shape);
    for (int32_t r = 0; r < requests->count; r++) {
        int32_t rows = 0;
        for (int32_t i = 1; i <= requests->query_lens[r]; i++) {
            rows = (requests->seq_lens[r] - requests->query_lens[r] + i) /
                   measured->layer.cache.tokens_per_row;
            rows = mla->topk > 0 && mla->topk < rows ? mla->topk : rows;
            seen.pairs += rows;
        }
        seen.rows += rows;
    }
    return seen;
}

static void count_index(const struct measured *measured, struct work *work)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    const struct attn_indexer_desc *x = &measured->layer.indexer;
    const struct visible seen = listed_keys(measured, 0);
    const double tokens = (double)measured->requests.num_tokens, heads = desc->num_q_heads;
    work->bytes_read =
        seen.rows / x->tokens_per_row * slot_bytes(measured) +
        tokens * heads * (desc->head_size + x->has_weights) * element_bytes(measured);
    if (measured->shape.kind == SHAPE_TOP_K) { /* a score for each entry of a list */
        work->bytes_read += seen.pairs / x->tokens_per_row / x->rows_per_entry * x->num_groups *
                            (double)sizeof(float);
    }
    work->bytes_written = tokens * x->num_groups * layer_list_room(x) * (double)sizeof(int32_t);
    work->operations = 2 * seen.pairs / x->tokens_per_row * heads * desc->head_size;
    work->narrow = desc->q_scale_form != ATTN_SCALE_NONE ? work->operations : 0;
}

static void count_decoder(const struct measured *measured, struct work *work)
{
    const struct attn_layer_desc *desc = &measured->layer.desc;
    double tokens = (double)measured->requests.num_tokens;
    double dv = desc->head_size_v > 0 ? desc->head_size_v : desc->head_size;
    struct visible visible = requests_visible(&measured->requests, &measured->shape);
    if (measured->layer.lists.max_entries > 0) {
        visible = listed_keys(measured, (double)measured->layer.lists.max_entries *
                                            measured->layer.lists.granularity);
    }
    if (measured->shape.kind == SHAPE_WRITE || measured->shape.value[PARAMETER_WRITE] != 0) {
        work->bytes_read += tokens * new_row_bytes(measured);
        work->bytes_written += tokens * slot_bytes(measured);
    }
    if (measured->shape.kind == SHAPE_WRITE) {
        return;
    }
    const bool narrow = desc->q_scale_form != ATTN_SCALE_NONE; /* probabilities have 16 bits */
    work->bytes_read +=
        visible.rows * slot_bytes(measured) +
        tokens * desc->num_q_heads * desc->head_size * (narrow ? 1 : element_bytes(measured));
    work->bytes_written += tokens * desc->num_q_heads * dv * element_bytes(measured);
    work->operations += 2 * visible.pairs * desc->num_q_heads * (desc->head_size + dv);
    work->narrow = narrow ? 2 * visible.pairs * desc->num_q_heads * desc->head_size : 0;
}

/* In latent space. */
static void count_mla(const struct measured *measured, struct work *work)
{
    const struct attn_mla_desc *mla = &measured->layer.mla;
    const struct visible listed = measured->layer.cache.tokens_per_row > 0
                                      ? compressed_keys(measured)
                                      : listed_keys(measured, mla->topk);
    double heads = measured->layer.desc.num_q_heads, tokens = (double)measured->requests.num_tokens;
    double q_dims = mla->absorb_in_core ? mla->qk_nope_head_dim : mla->kv_lora_rank;
    double out_dims = mla->absorb_in_core ? mla->v_head_dim : mla->kv_lora_rank;
    work->bytes_read = listed.rows * slot_bytes(measured) +
                       tokens * heads * (q_dims + mla->qk_rope_head_dim) * element_bytes(measured);
    work->bytes_written = tokens * heads * out_dims * element_bytes(measured);
    work->operations = 2 * listed.pairs * heads * (2 * mla->kv_lora_rank + mla->qk_rope_head_dim);
    if (mla->absorb_in_core) {
        double weights = heads * (mla->qk_nope_head_dim + mla->v_head_dim) * mla->kv_lora_rank;
        work->bytes_read += weights * element_bytes(measured);
        work->operations += 2 * tokens * weights;
    }
}

/* The recurrence: decay, S k, S + r k^T, S q. A chunked form computes more, and faster. */
static void count_gdn(const struct measured *measured, struct work *work)
{
    const struct attn_recurrent_desc *gdn = &measured->layer.gdn;
    double tokens = (double)measured->requests.num_tokens;
    double state = (double)gdn->num_v_heads * gdn->head_size_v * gdn->head_size_k;
    double values = (double)gdn->num_v_heads * gdn->head_size_v;
    double channels = (double)layer_channels(gdn);
    double width = gdn->conv_width > 0 ? gdn->conv_width - 1 : 0;
    double windows = measured->requests.count * channels * width * element_bytes(measured);
    double states = measured->requests.count * (double)number_bytes(gdn->state_dtype) * state;
    const struct attn_recurrent_rule *rule = &measured->layer.rule;
    double gates =
        rule->gate != ATTN_GATE_CONSTANT ? (double)layer_gates(&measured->layer.desc) : 0;
    gates += rule->write_gate == ATTN_WRITE_GATE_SIGMOID ? gdn->num_v_heads : 0;
    work->bytes_read = states + windows + tokens * (channels + gates) * element_bytes(measured);
    work->bytes_written = states + windows + tokens * values * element_bytes(measured);
    const double of_request = states / measured->requests.count;
    for (int32_t r = 0; r < measured->requests.count; r++) {
        const double row = (double)layer_ring_view(&measured->layer.cache, 1).stride_slot;
        const int32_t query = measured->requests.query_lens[r];
        const int32_t in_ring = measured_ring_tokens(measured, r);
        const bool keeps = query <= 1 + gdn->num_speculative_tokens;
        /* the window in slot 0 has the inputs of each draft, too */
        if (keeps && gdn->conv_width > 0) {
            work->bytes_written += (query - 1) * channels * element_bytes(measured);
        }
        if (row > 0) {
            const bool left = keeps && in_ring + 1 < shape_int(&measured->shape, PARAMETER_REPLAY);
            work->bytes_read += in_ring * row;
            work->bytes_written += (keeps ? (query - !left) * row : 0) - (left ? of_request : 0);
        } else {
            work->bytes_written += keeps ? (query - 1) * of_request : 0;
        }
    }
    work->operations = tokens * (6 * state + 2 * channels * gdn->conv_width);
}

void measured_count(struct measured *measured)
{
    struct work *work = &measured->work;
    work->bytes_read = work->bytes_written = work->operations = 0;
    work->arithmetic = measured->layer.desc.dtype == ATTN_DTYPE_BF16 ? CEILING_BF16 : CEILING_F32;
    if (measured->session->device.device.type != ATTN_DEVICE_CPU &&
        measured->layer.desc.dtype == ATTN_DTYPE_F16) {
        work->arithmetic = CEILING_BF16; /* a GPU's f16 products run at the rate of bf16's */
    }
    if (measured->layer.desc.kind == ATTN_LAYER_RECURRENT) {
        count_gdn(measured, work);
    } else if (measured->layer.indexer.topk > 0) {
        count_index(measured, work);
    } else if (measured->layer.mla.kv_lora_rank > 0) {
        count_mla(measured, work);
    } else {
        count_decoder(measured, work);
    }
}
