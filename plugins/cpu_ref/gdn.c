/* SPDX-License-Identifier: Apache-2.0 */
/* Recurrent layers, a token at a time: S <- G S; r = beta (v - S k), or beta v; S <- S + r k^T;
 * o = S q + skip v. Rows of S do not depend on each other and are worked on in tiles, which fit in
 * a thread's stack. With a ring, the tokens in it come first. */
#include "gdn.h"

#include <math.h>
#include <string.h>

#include "common/number.h"
#include "common/tensors.h"

struct tile {
    const struct gdn *gdn;
    const struct gdn_request *request;
    int32_t head, first_row, num_rows;
    double s[GDN_TILE][GDN_MAX_HEAD_SIZE]; /* [num_rows, Dk] */
};

/* Row `d` of the tile in a slot's state. */
static uint8_t *state_row(const struct tile *tile, int64_t slot, int32_t d)
{
    const struct attn_recurrent_desc *desc = tile->gdn->desc;
    uint8_t *state = view_row(tile->gdn->args->k_cache, slot, 0, tile->head);
    return state + (int64_t)(tile->first_row + d) * desc->head_size_k *
                       (int64_t)number_bytes(desc->state_dtype);
}

static void load_state(struct tile *tile)
{
    const struct attn_recurrent_desc *desc = tile->gdn->desc;
    for (int32_t d = 0; d < tile->num_rows; d++) {
        if (tile->request->has_state) {
            number_load_row(tile->s[d], state_row(tile, tile->request->state_from, d),
                            desc->state_dtype, desc->head_size_k);
        } else {
            memset(tile->s[d], 0, (size_t)desc->head_size_k * sizeof(double));
        }
    }
}

static void store_state(const struct tile *tile, int64_t slot)
{
    const struct attn_recurrent_desc *desc = tile->gdn->desc;
    for (int32_t d = 0; d < tile->num_rows; d++) {
        number_store_row(state_row(tile, slot, d), tile->s[d], desc->state_dtype,
                         desc->head_size_k);
    }
}

/* Bits of a number of 16 that x becomes by r (attn_recurrent_rounding). */
static uint16_t round_by(double x, int32_t dtype, uint32_t r)
{
    const bool f16 = dtype == ATTN_DTYPE_F16;
    const int32_t mantissa = f16 ? 10 : 7, bias = f16 ? 15 : 127;
    if (!(fabs(x) <= (f16 ? 65504 : 0x1.fep127))) {
        return f16 ? number_to_f16(x) : number_to_bf16(x);
    }
    const int32_t exponent = x != 0 && ilogb(x) > 1 - bias ? ilogb(x) : 1 - bias;
    const uint64_t parts = (uint64_t)ldexp(fabs(x), mantissa + 16 - exponent); /* 2^16 of a unit */
    const uint64_t bits = ((uint64_t)(exponent + bias - 1) << mantissa) + ((parts + r) >> 16);
    return (uint16_t)(bits | (signbit(x) ? 0x8000 : 0));
}

static void round_row(const struct tile *tile, int32_t d, int64_t tokens, uint16_t *to)
{
    uint32_t r[8];
    for (int32_t i = 0; i < tile->gdn->desc->head_size_k; i++) {
        if (i % 8 == 0) {
            gdn_random(tile->gdn, tile->head, tile->first_row + d, tokens, i, r);
        }
        to[i] = round_by(tile->s[d][i], tile->gdn->desc->state_dtype, r[i % 8]);
    }
}

/* The numbers that a slot would hold after `tokens` tokens of the request. */
static void round_state(struct tile *tile, int64_t tokens)
{
    const struct attn_recurrent_desc *desc = tile->gdn->desc;
    float row[GDN_MAX_HEAD_SIZE]; /* the widest */
    for (int32_t d = 0; d < tile->num_rows; d++) {
        if (tile->gdn->rounding != NULL) {
            round_row(tile, d, tokens, (uint16_t *)row);
            number_load_row(tile->s[d], row, desc->state_dtype, desc->head_size_k);
            continue;
        }
        number_store_row(row, tile->s[d], desc->state_dtype, desc->head_size_k);
        number_load_row(tile->s[d], row, desc->state_dtype, desc->head_size_k);
    }
}

static void store_out(const struct tile *tile, int64_t t, const double *o)
{
    const struct attn_tensor *out = tile->gdn->args->out;
    uint8_t *row = tensor_row(out, tile->request->first_row + t, tile->head);
    number_store_row(row + (int64_t)tile->first_row * (out->dtype.bits / 8), o,
                     number_dtype_name(out->dtype), tile->num_rows);
}

/* What a token does to the tile's rows: S <- e^g S + u k^T. */
struct change {
    double k[GDN_MAX_HEAD_SIZE], g[GDN_MAX_HEAD_SIZE], u[GDN_TILE];
};

static void decay_rows(struct tile *tile, const struct change *c)
{
    const int32_t dk = tile->gdn->desc->head_size_k, gates = gdn_num_gates(tile->gdn);
    double decay = 1;
    for (int32_t i = 0; i < dk; i++) {
        decay = i < gates ? exp(c->g[i]) : decay;
        for (int32_t d = 0; d < tile->num_rows; d++) {
            tile->s[d][i] *= decay;
        }
    }
}

static void add_rows(struct tile *tile, const struct change *c)
{
    for (int32_t d = 0; d < tile->num_rows; d++) {
        for (int32_t i = 0; i < tile->gdn->desc->head_size_k; i++) {
            tile->s[d][i] += c->u[d] * c->k[i];
        }
    }
}

/* The tokens that the state misses. */
static void replay(struct tile *tile)
{
    const struct gdn *gdn = tile->gdn;
    const int32_t dtype = gdn->args->layer->dtype;
    const int64_t bytes = (int64_t)number_bytes(dtype);
    struct change c;
    for (int64_t t = -tile->request->replayed; t < 0; t++) {
        const struct gdn_ring_row row =
            gdn_ring_row(gdn, tile->request, tile->request->state_from, t, tile->head);
        number_load_row(c.k, row.k, dtype, gdn->desc->head_size_k);
        number_load_row(c.u, row.u + tile->first_row * bytes, dtype, tile->num_rows);
        number_load_row(c.g, row.g, ATTN_DTYPE_F32, gdn_num_gates(gdn));
        decay_rows(tile, &c);
        add_rows(tile, &c);
    }
}

/* Stores `count` numbers and reads them back; `row` NULL: leaves them as they are. */
static void keep(double *x, uint8_t *row, int32_t dtype, int64_t count)
{
    if (row != NULL) {
        number_store_row(row, x, dtype, count);
        number_load_row(x, row, dtype, count);
    }
}

/* One token on the rows of the tile. What the ring takes is used as it is stored there. */
static void run_token(struct tile *tile, int64_t t)
{
    double q[GDN_MAX_HEAD_SIZE], v[GDN_TILE], o[GDN_TILE], beta;
    struct change c;
    double others[GDN_MAX_HEAD_SIZE]; /* in place of k's row, which the first head stores */
    struct gdn_ring_row row = {NULL, NULL, NULL};
    const struct gdn *gdn = tile->gdn;
    const bool delta = gdn->rule->rule == ATTN_RULE_GATED_DELTA;
    const double skip = gdn->skip != NULL ? gdn->skip[tile->head] : 0;
    const int32_t dk = gdn->desc->head_size_k, dtype = gdn->args->layer->dtype;
    const int32_t group = gdn->desc->num_v_heads / gdn->desc->num_k_heads;
    if (gdn->ring != NULL && t >= tile->request->written) {
        row = gdn_ring_row(gdn, tile->request, tile->request->slots[0], t, tile->head);
        row.u += (int64_t)tile->first_row * (int64_t)number_bytes(dtype);
        row.k = tile->head % group == 0 ? row.k : (uint8_t *)others;
    }
    gdn_load_qk(gdn, tile->request, t, tile->head, q, c.k);
    gdn_load_v(gdn, tile->request, t, tile->head, tile->first_row, tile->num_rows, v);
    gdn_load_gates(gdn, tile->request, t, tile->head, c.g, &beta);
    keep(c.k, row.k, dtype, dk);
    keep(c.g, row.g, ATTN_DTYPE_F32, gdn_num_gates(gdn));
    decay_rows(tile, &c);
    for (int32_t d = 0; d < tile->num_rows; d++) {
        c.u[d] = beta * (delta ? v[d] - dot(tile->s[d], c.k, dk) : v[d]);
    }
    keep(c.u, row.u, dtype, tile->num_rows);
    add_rows(tile, &c);
    for (int32_t d = 0; d < tile->num_rows; d++) {
        o[d] = dot(tile->s[d], q, dk);
        o[d] = gdn->skip != NULL ? o[d] + skip * v[d] : o[d];
    }
    store_out(tile, t, o);
}

static void run_steps(struct tile *tile)
{
    const struct gdn_request *request = tile->request;
    /* where no bit may tell a step's end, each token leaves the state as it is stored */
    const bool stored = tile->gdn->args->layer->batch_invariant >= 2;
    replay(tile);
    for (int64_t t = 0; t < request->num_tokens; t++) {
        const int32_t own = gdn_own_slot(tile->gdn, request, t);
        const int32_t checkpoint = gdn_checkpoint_slot(tile->gdn, request, t + 1);
        run_token(tile, t);
        if (stored || own >= 0 || checkpoint >= 0) {
            round_state(tile, request->context + t + 1);
        }
        if (own >= 0) {
            store_state(tile, own);
        }
        if (checkpoint >= 0) {
            store_state(tile, checkpoint);
        }
    }
}

/* Items are (request, value head). */
static void state_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn *gdn = argument;
    struct gdn_request request;
    struct tile tile;
    for (int64_t item = begin; item < end; item++) {
        if (!gdn_request_of(gdn, (int32_t)(item / gdn->desc->num_v_heads), &request) ||
            request.state_from < 0) {
            continue;
        }
        tile.gdn = gdn;
        tile.request = &request;
        tile.head = (int32_t)(item % gdn->desc->num_v_heads);
        for (int32_t row = 0; row < gdn->desc->head_size_v; row += GDN_TILE) {
            int32_t left = gdn->desc->head_size_v - row;
            tile.first_row = row;
            tile.num_rows = left < GDN_TILE ? left : GDN_TILE;
            load_state(&tile);
            run_steps(&tile);
        }
    }
}

/* After the recurrence, since several value heads read one window. Items are (request, channel).
 */
static void roll_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    const struct gdn *gdn = argument;
    struct gdn_request request;
    for (int64_t item = begin; item < end; item++) {
        if (gdn_request_of(gdn, (int32_t)(item / gdn->num_channels), &request) &&
            request.state_from >= 0) {
            gdn_roll_window(gdn, &request, item % gdn->num_channels);
        }
    }
}

/* A head's output as the norm takes it, and what it is multiplied with after that. */
static void load_gated(const struct gdn *gdn, int64_t row, int32_t head, double *x, double *gate)
{
    const struct attn_tensor *out = gdn->args->out, *z = gdn->output_gate;
    const int32_t dv = gdn->desc->head_size_v;
    number_load_row(x, tensor_row(out, row, head), number_dtype_name(out->dtype), dv);
    number_load_row(gate, tensor_row(z, row, head), number_dtype_name(z->dtype), dv);
    for (int32_t d = 0; d < dv; d++) {
        const double sigmoid = 1 / (1 + exp(-gate[d]));
        gate[d] = gdn->norm->gate_activation == ATTN_OUTPUT_GATE_SILU ? gate[d] * sigmoid : sigmoid;
        x[d] *= gdn->norm->gate_first ? gate[d] : 1;
        gate[d] = gdn->norm->gate_first ? 1 : gate[d];
    }
}

/* A token's outputs of the heads with one mean, in place. */
static void norm_heads(const struct gdn *gdn, int64_t row, int32_t first_head, int32_t num_heads)
{
    const struct attn_tensor *out = gdn->args->out;
    const int32_t dv = gdn->desc->head_size_v, end = first_head + num_heads;
    double x[GDN_MAX_HEAD_SIZE], gate[GDN_MAX_HEAD_SIZE], weight[GDN_MAX_HEAD_SIZE], sum = 0;
    for (int32_t h = first_head; h < end; h++) {
        load_gated(gdn, row, h, x, gate);
        sum += dot(x, x, dv);
    }
    const double mean = sum / ((double)num_heads * dv);
    /* divided by infinity, the other outputs would be zeros */
    const double rms = isfinite(mean) ? sqrt(mean + gdn->norm->epsilon) : NAN;
    for (int32_t h = first_head; h < end; h++) {
        load_gated(gdn, row, h, x, gate);
        number_load_row(weight, gdn_norm_weight(gdn, h), number_dtype_name(gdn->norm_weight->dtype),
                        dv);
        for (int32_t d = 0; d < dv; d++) {
            x[d] *= weight[d] / rms * gate[d];
        }
        number_store_row(tensor_row(out, row, h), x, number_dtype_name(out->dtype), dv);
    }
}

static void norm_items(void *argument, int64_t begin, int64_t end, int32_t worker)
{
    gdn_each_norm(argument, begin, end, norm_heads);
}

attn_status ref_recurrent(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gdn gdn = gdn_of(args);
    attn_status status = gdn_check_slots(&gdn, error); /* read when the step runs */
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_host *host = args->instance->host;
    int64_t requests = args->batch->num_reqs;
    host->parallel_for(host->user, requests * gdn.desc->num_v_heads, 1, state_items, &gdn);
    if (gdn.desc->conv_width > 1) {
        host->parallel_for(host->user, requests * gdn.num_channels, 64, roll_items, &gdn);
    }
    if (gdn.norm != NULL) {
        host->parallel_for(host->user, requests * (gdn.desc->num_v_heads / gdn_norm_size(&gdn)), 1,
                           norm_items, &gdn);
    }
    return ATTN_OK;
}
