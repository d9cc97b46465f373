/* SPDX-License-Identifier: Apache-2.0 */
/* A chunk's tokens in groups that pass over the state, where the variant can: 6 D^2 FLOPs a token
 * and head like the recurrence, of which a part stays in L1 for all groups, and next to nothing
 * between tokens. Within a group the equations are those of gdn_chunk.c. */
#include "gdn.h"

/* A state's memory is multiplied where less than this would be left of what it is multiplied by. */
#define LEAST_SCALE 0x1p-20f

bool gdn_walks(const struct gdn *gdn)
{
    const struct variant *variant = gdn_variant(gdn);
    return variant->delta->walk != NULL && variant->split_products == NULL;
}

void gdn_walk_keys(const struct gdn *gdn, int32_t count, struct gdn_scratch *s)
{
    const struct delta_kernels *delta = gdn_variant(gdn)->delta;
    const int64_t end = (int64_t)round_up(count, WALK_TOKENS) * s->depth;
    const size_t unused = (size_t)(end - (int64_t)count * s->depth) * sizeof(float);
    memset(s->q + (int64_t)count * s->depth, 0, unused);
    memset(s->k + (int64_t)count * s->depth, 0, unused);
    for (int32_t first = 0; first < count; first += WALK_TOKENS) {
        const float *q = s->q + (int64_t)first * s->depth, *k = s->k + (int64_t)first * s->depth;
        delta->group_products(s->group_kk + first, k, k, s->depth);
        delta->group_products(s->group_qk + first, q, k, s->depth);
    }
}

/* Prepares tokens first .. first + tokens - 1 of a head; memory holds its state over `scale`.
 * Returns the scale after them, 1 after the last of a chunk. */
static float group_of(const struct gdn_scratch *s, int32_t first, int32_t tokens, bool last,
                      float scale, struct walk_group *group)
{
    float between[WALK_TOKENS] = {0}; /* decay from after each token of the group */
    float e = scale;
    *group = (struct walk_group){.tokens = tokens, .keep = 1.0f};
    for (int32_t t = 0; t < tokens; t++) {
        const float decay = s->decay[first + t], beta = s->beta[first + t];
        const float *kk = s->group_kk[first + t], *qk = s->group_qk[first + t];
        e *= decay;
        group->e[t] = e;
        group->beta[t] = beta;
        group->by_state[t] = -beta * e;
        for (int32_t j = 0; j < t; j++) {
            between[j] *= decay;
            group->by_r[t][j] = -beta * between[j] * kk[j];
            group->by_q[t][j] = between[j] * qk[j];
        }
        between[t] = 1.0f;
        group->by_q[t][t] = qk[t];
    }
    if (!last && e >= LEAST_SCALE) {
        for (int32_t t = 0; t < tokens; t++) {
            group->left[t] = 1.0f / group->e[t];
        }
        return e;
    }
    memcpy(group->left, between, sizeof between);
    group->keep = e;
    return 1.0f;
}

void gdn_walk(const struct gdn *gdn, const struct gdn_request *request, int64_t first,
              int32_t count, int32_t head, float *state, struct gdn_scratch *s)
{
    const struct attn_tensor *out = gdn->args->out;
    const bool apart = gdn->desc->head_size_v < s->width || gdn->skip != NULL;
    const int32_t element = apart ? ELEMENT_F32 : element_of_any(out);
    const int64_t bytes = element_bytes[element];
    char *o = apart ? (char *)s->o : tensor_row(out, request->first_row + first, head);
    struct walk_group groups[GDN_CHUNK / WALK_TOKENS];
    int32_t num_groups = 0;
    float scale = 1.0f;
    for (int32_t t = 0; t < count; t += WALK_TOKENS) {
        int32_t tokens = min_i32(WALK_TOKENS, count - t);
        scale = group_of(s, t, tokens, t + tokens == count, scale, &groups[num_groups++]);
    }
    for (int32_t column = 0; column < s->width; column += WALK_COLUMNS) {
        const struct walk_args args = {.state = state + (int64_t)column * s->depth,
                                       .q = s->q,
                                       .k = s->k,
                                       .v = s->v + column,
                                       .o = o + column * bytes,
                                       .stride = s->width,
                                       .o_bytes =
                                           (apart ? s->width : tensor_stride(out, 0)) * bytes,
                                       .element = element,
                                       .depth = s->depth,
                                       .additive = gdn->rule->rule == ATTN_RULE_ADDITIVE,
                                       .count = num_groups,
                                       .groups = groups};
        gdn_variant(gdn)->delta->walk(&args);
    }
    for (int32_t i = 0; gdn->skip != NULL && i < count * s->width; i++) {
        s->o[i] += gdn->skip[head] * s->v[i];
    }
    if (apart) {
        gdn_store_rows(gdn, request->first_row + first, count, head, s->o, s->width);
    }
}
