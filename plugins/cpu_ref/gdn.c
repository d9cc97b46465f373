/* SPDX-License-Identifier: Apache-2.0 */
/* gated_delta: S <- e^g S; r = beta (v - S k); S <- S + r k^T; o = S q, a token at a time. Rows of
 * S do not depend on each other and are worked on in tiles, which fit in a thread's stack. */
#include "gdn.h"

#include "common/number.h"
#include "common/tensors.h"

struct tile {
    const struct gdn *gdn;
    const struct gdn_request *request;
    int32_t head, first_row, num_rows;
    double s[GDN_TILE][GDN_MAX_HEAD_SIZE]; /* [num_rows, Dk] */
};

static double dot(const double *a, const double *b, int32_t count)
{
    double sum = 0;
    for (int32_t i = 0; i < count; i++) {
        sum += a[i] * b[i];
    }
    return sum;
}

static float *state_rows(const struct tile *tile, int64_t slot)
{
    float *state = view_row(tile->gdn->args->k_cache, slot, 0, tile->head);
    return state + (int64_t)tile->first_row * tile->gdn->desc->head_size_k;
}

static void load_state(struct tile *tile)
{
    int32_t dk = tile->gdn->desc->head_size_k;
    const float *state = state_rows(tile, tile->request->state_from);
    for (int32_t d = 0; d < tile->num_rows; d++) {
        for (int32_t i = 0; i < dk; i++) {
            tile->s[d][i] = tile->request->has_state ? state[d * dk + i] : 0;
        }
    }
}

static void store_state(const struct tile *tile, int64_t slot)
{
    int32_t dk = tile->gdn->desc->head_size_k;
    float *state = state_rows(tile, slot);
    for (int32_t d = 0; d < tile->num_rows; d++) {
        for (int32_t i = 0; i < dk; i++) {
            state[d * dk + i] = (float)tile->s[d][i];
        }
    }
}

static void store_out(const struct tile *tile, int64_t t, const double *o)
{
    const struct attn_tensor *out = tile->gdn->args->out;
    uint8_t *row = tensor_row(out, tile->request->first_row + t, tile->head);
    number_store_row(row + (int64_t)tile->first_row * (out->dtype.bits / 8), o,
                     number_dtype_name(out->dtype), tile->num_rows);
}

/* The recurrence, token by token. */
static void run_steps(struct tile *tile)
{
    double q[GDN_MAX_HEAD_SIZE], k[GDN_MAX_HEAD_SIZE], v[GDN_TILE], o[GDN_TILE], decay, beta;
    const struct gdn_request *request = tile->request;
    /* where no bit may tell a step's end, each token leaves the state as it is stored */
    const bool stored = tile->gdn->args->layer->batch_invariant >= 2;
    int32_t dk = tile->gdn->desc->head_size_k;
    for (int64_t t = 0; t < request->num_tokens; t++) {
        gdn_load_qk(tile->gdn, request, t, tile->head, q, k);
        gdn_load_v(tile->gdn, request, t, tile->head, tile->first_row, tile->num_rows, v);
        gdn_load_gates(tile->gdn, request, t, tile->head, &decay, &beta);
        for (int32_t d = 0; d < tile->num_rows; d++) {
            double *s = tile->s[d];
            for (int32_t i = 0; i < dk; i++) {
                s[i] *= decay;
            }
            double r = beta * (v[d] - dot(s, k, dk));
            for (int32_t i = 0; i < dk; i++) {
                s[i] += r * k[i];
                s[i] = stored ? (float)s[i] : s[i];
            }
            o[d] = dot(s, q, dk);
        }
        store_out(tile, t, o);
        if (request->keeps_all && request->slots[t] >= 0) {
            store_state(tile, request->slots[t]);
        }
        int32_t checkpoint = gdn_checkpoint_slot(tile->gdn, request, t + 1);
        if (checkpoint >= 0) {
            store_state(tile, checkpoint);
        }
    }
    if (!request->keeps_all) {
        store_state(tile, request->slots[0]);
    }
}

/* Items are (request, value head). */
static void delta_items(void *argument, int64_t begin, int64_t end, int32_t worker)
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

/* Behind the delta rule, since several value heads read one window. Items are (request, channel).
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

attn_status ref_gated_delta(const struct attn_attend_args *args, struct attn_error *error)
{
    struct gdn gdn = gdn_of(args);
    attn_status status = gdn_check_slots(&gdn, error); /* read when the step runs */
    if (status != ATTN_OK) {
        return status;
    }
    const struct attn_host *host = args->instance->host;
    int64_t requests = args->batch->num_reqs;
    host->parallel_for(host->user, requests * gdn.desc->num_v_heads, 1, delta_items, &gdn);
    if (gdn.desc->conv_width > 1) {
        host->parallel_for(host->user, requests * gdn.num_channels, 64, roll_items, &gdn);
    }
    return ATTN_OK;
}
