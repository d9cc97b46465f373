/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers in chunks, host side: which layers and tensors it serves, and the numbering of
 * chunks. */
#include "sm80_gated_delta.h"

#include "common/recurrent.h"
#include "gpu/host/schedule.h"

bool sm80_delta_fits(const struct gpu_device *device);

/* Requests with fewer tokens run token by token. */
#define CHUNKED_FROM 32

static bool has_sm90(const struct gpu_device *device)
{
#ifdef CUDA_FLASH_SM90
    return device->major == 9;
#else
    return false;
#endif
}

/* Bytes of a chunk's keys and queries. */
static int64_t key_bytes(int32_t num_k_heads, int32_t num_v_heads, bool by_channel)
{
    return by_channel ? num_v_heads * (int64_t)sizeof(struct chunk_channels)
                      : num_k_heads * (int64_t)sizeof(struct chunk_keys);
}

/* Bytes of a chunk's intermediates; 0 if the layer is not served. Scores and the inverse are f16:
 * the inverse is bounded only if q and k are normalized, and their error exceeds the bound of f16
 * layers. Only rules without a delta add a skip, and with a delta β must not exceed 1. */
static int64_t chunk_bytes(const struct gpu_device *device, const struct attn_layer_desc *layer)
{
    const struct attn_recurrent_desc *g = ext_of(layer->next, ATTN_EXT_RECURRENT_DESC);
    const struct attn_recurrent_rule *rule = ext_of(layer->next, ATTN_EXT_DRAFT_RECURRENT_RULE);
    bool additive = rule != NULL && rule->rule == ATTN_RULE_ADDITIVE;
    bool by_channel = rule != NULL && rule->gate_per_channel;
    bool plain = rule == NULL || (!rule->has_skip && rule->write_gate != ATTN_WRITE_GATE_STEP);
    bool served = sm80_delta_fits(device) && ((g->qk_l2norm && plain) || additive) &&
                  (!by_channel || (!additive && has_sm90(device))) &&
                  g->head_size_k <= CHUNK_DIMS && g->conv_width <= CHUNK_TAPS &&
                  layer->dtype == ATTN_DTYPE_BF16;
    return served ? key_bytes(g->num_k_heads, g->num_v_heads, by_channel) +
                        g->num_v_heads * (int64_t)sizeof(struct chunk_head) +
                        sm80_delta_flag_bytes(g->num_k_heads)
                  : 0;
}

/* Chunks are numbered without prefix sums over the requests, in one of two ways. A request of n
 * tokens that begins at token s has ceil(n / 64) chunks; they fit between floor(s / 64) + r and
 * floor((s + n) / 64) + r + 1, and, with at least 32 tokens, between floor(s / 32) and floor((s +
 * n) / 32). */
static int64_t count_chunks(int64_t reqs, int64_t tokens)
{
    int64_t by_request = tokens / CHUNK + reqs, by_tokens = tokens / CHUNKED_FROM;
    return (by_request < by_tokens ? by_request : by_tokens) + 1;
}

/* Memory is taken for as many; the last ones have the ends of segments. */
static int64_t num_chunks(int64_t reqs, int64_t tokens)
{
    return count_chunks(reqs, tokens) + SPARE_CHUNKS;
}

/* Whether all inputs and convolution weights have out's type, and checkpoints are at chunk
 * boundaries. */
static bool takes(const struct gpu_delta_params *p)
{
    int32_t dtype = p->out.dtype;
    const struct gpu_matrix *bias = &p->conv_bias;
    if (p->checkpoint_interval % CHUNK != 0) {
        return false;
    }
    if (p->conv_width == 0) {
        return dtype == ATTN_DTYPE_BF16 && p->q.dtype == dtype && p->k.dtype == dtype &&
               p->v.dtype == dtype;
    }
    return dtype == ATTN_DTYPE_BF16 && p->mixed.dtype == dtype && p->window_dtype == dtype &&
           p->conv_weight.dtype == dtype && (bias->data == NULL || bias->dtype == dtype);
}

/* Gates per head as the gated delta rule has them. */
static bool usual_gates(const struct gpu_delta_rule *rule)
{
    return rule->gates == 1 && rule->gate == ATTN_GATE_SOFTPLUS && !rule->additive &&
           rule->write_gate == ATTN_WRITE_GATE_SIGMOID && rule->dt_min == 0 && rule->dt_max == 0;
}

static const char *run(const struct gpu_device *device, const struct gpu_delta_params *p,
                       int64_t bytes, char *memory, void *stream)
{
    int64_t chunks = count_chunks(p->num_reqs, p->num_tokens);
    bool by_request = p->num_tokens / CHUNK + p->num_reqs < p->num_tokens / CHUNKED_FROM;
    uint64_t keys = gpu_tensor_bits(&p->q) | gpu_tensor_bits(&p->k),
             values = gpu_tensor_bits(&p->v);
    if (p->conv_width > 0) {
        keys = values = gpu_tensor_bits(&p->mixed);
    }
    struct sm80_delta_params a = {
        .p = *p,
        .memory = memory,
        .chunk_bytes = bytes,
        .heads_at = key_bytes(p->num_k_heads, p->num_v_heads, p->rule.gates > 1),
        .num_chunks = (int32_t)chunks,
        .group = p->num_v_heads / p->num_k_heads,
        .tokens_apart = by_request ? CHUNK : CHUNKED_FROM,
        .requests_apart = by_request,
        .wide_keys = p->head_size_k % 8 == 0 && keys % 16 == 0,
        .wide_values = p->head_size_v % 2 == 0 && values % 4 == 0,
        .wide_out =
            p->head_size_v % 4 == 0 && gpu_tensor_bits(&p->out) % 8 == 0 ? WIDE_OUT_FOUR : 1,
    };
    a.usual_gates = usual_gates(&p->rule);
    a.state_on_sm90 = has_sm90(device);
#ifdef CUDA_FLASH_SM90
    if (a.state_on_sm90) {
        return sm90_delta_state(device, &a, stream);
    }
#endif
    return sm80_delta_launch(device, &a, stream);
}

/* Whether the one-token kernel serves the call. It uses bulk copies, clusters and strides of 32
 * bits: state rows of 128 numbers aligned to 16 bytes, at most eight CTAs for each key head, and
 * grids by key head and request. */
static bool takes_steps(const struct gpu_device *device, const struct gpu_delta_params *p)
{
    uint64_t state =
        (uint64_t)(uintptr_t)p->state | (uint64_t)p->state_slot | (uint64_t)p->state_head;
    const uint64_t strides = (uint64_t)p->mixed.row | (uint64_t)p->window_channel |
                             (uint64_t)p->conv_weight.row | (uint64_t)p->a.row |
                             (uint64_t)p->b.row | (uint64_t)p->a.column | (uint64_t)p->b.column;
    return has_sm90(device) && takes(p) && p->conv_width == CHUNK_TAPS &&
           p->head_size_k == CHUNK_DIMS && p->head_size_v <= CHUNK_DIMS &&
           p->num_v_heads / p->num_k_heads <= 8 && state % 16 == 0 && strides <= INT32_MAX / 2 &&
           p->num_reqs <= UINT16_MAX && p->num_k_heads <= UINT16_MAX;
}

static const char *run_steps(const struct gpu_device *device, const struct gpu_delta_params *p,
                             void *stream)
{
#ifdef CUDA_FLASH_SM90
    struct sm80_delta_params a = {.p = *p};
    return sm90_delta_launch(device, &a, stream);
#else
    return NULL;
#endif
}

/* Rings of bf16 whose rows can be read 16 bytes at a time. */
static bool takes_rings(const struct gpu_device *device, const struct gpu_ring_params *p)
{
    uint64_t ring = (uint64_t)(uintptr_t)p->ring | (uint64_t)p->ring_slot | (uint64_t)p->ring_row |
                    (uint64_t)p->ring_head;
    return takes_steps(device, &p->delta) && p->dtype == ATTN_DTYPE_BF16 &&
           p->rows - p->delta.num_drafted <= RING_DRAFTED && p->ring_row <= INT32_MAX &&
           p->delta.head_size_v % 8 == 0 && ring % 16 == 0;
}

static const char *run_rings(const struct gpu_device *device, const struct gpu_ring_params *p,
                             void *stream)
{
#ifdef CUDA_FLASH_SM90
    struct sm90_ring_params a = {.ring = *p};
    return sm90_ring_launch(device, &a, stream);
#else
    return NULL;
#endif
}

static const char *load(const struct gpu_device *device)
{
    const char *cause = sm80_delta_launch(device, NULL, NULL);
#ifdef CUDA_FLASH_SM90
    if (cause == NULL && has_sm90(device)) {
        cause = sm90_delta_launch(device, NULL, NULL);
        cause = cause ? cause : sm90_ring_launch(device, NULL, NULL);
        cause = cause ? cause : sm90_delta_state(device, NULL, NULL);
    }
#endif
    return cause;
}

const struct gpu_delta_chunks sm80_delta_chunks = {
    .tokens = CHUNKED_FROM,
    .load = load,
    .chunk_bytes = chunk_bytes,
    .num_chunks = num_chunks,
    .takes = takes,
    .takes_steps = takes_steps,
    .run_steps = run_steps,
    .ring_tokens = RING_TOKENS,
    .takes_rings = takes_rings,
    .run_rings = run_rings,
    .rolls = has_sm90, /* its state kernels do */
    .run = run,
};
