/* SPDX-License-Identifier: Apache-2.0 */
/* Malformed layers, views and workspaces, before any step. */
#include "core/malformed.h"
#include "support/client.h"

static attn_status workspace_small(struct malformed_step *s)
{
    const struct engine *e = s->engine;
    const struct engine_plan *p = &e->plans[0];
    return client_bind_workspace(e->core->api, p->plan, p->workspace, p->bytes - 1, &s->error);
}

static attn_status workspace_null(struct malformed_step *s)
{
    const struct engine *e = s->engine;
    return client_bind_workspace(e->core->api, e->plans[0].plan, NULL, e->plans[0].bytes,
                                 &s->error);
}

static attn_status workspace_odd(struct malformed_step *s)
{
    const struct engine *e = s->engine;
    const struct engine_plan *p = &e->plans[0];
    return client_bind_workspace(e->core->api, p->plan, p->workspace + 8, p->bytes, &s->error);
}

static attn_status bind(struct malformed_step *s, const struct attn_kv_view *k)
{
    const struct engine *e = s->engine;
    return e->core->api->layer_bind_kv(e->layer, k, &s->side->binding.v_cache, &s->error);
}

static attn_status view_null(struct malformed_step *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.data = NULL;
    return bind(s, &k);
}

static attn_status view_heads(struct malformed_step *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.num_heads++;
    return bind(s, &k);
}

static attn_status view_overlaps(struct malformed_step *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.stride_slot = k.stride_head = 4;
    return bind(s, &k);
}

static attn_status view_pack(struct malformed_step *s)
{
    struct attn_kv_view k = s->side->binding.k_cache;
    k.pack = k.head_size - 1;
    return bind(s, &k);
}

static attn_status limits_zero(struct malformed_step *s)
{
    const struct engine *e = s->engine;
    const struct attn_limits limits = {.struct_size = sizeof limits};
    const struct attn_plan_options options = {.struct_size = sizeof options, .limits = &limits};
    attn_plan *made = NULL;
    return e->core->api->plan_create(e->model, 0, &options, &made, &s->error);
}

static attn_status select_layer(struct malformed_step *s, const struct attn_layer_desc *layer)
{
    attn_assignment *assignment = NULL;
    attn_status status = core_select(s->engine->core, layer, &assignment, &s->error);
    s->engine->core->api->assignment_destroy(assignment);
    return status;
}

static attn_status heads_ragged(struct malformed_step *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.num_kv_heads = layer.num_q_heads + 1;
    return select_layer(s, &layer);
}

static attn_status scale_zero(struct malformed_step *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.scale = 0;
    return select_layer(s, &layer);
}

static attn_status kind_unknown(struct malformed_step *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.kind = 99;
    return select_layer(s, &layer);
}

static attn_status name_empty(struct malformed_step *s)
{
    struct attn_layer_desc layer = s->side->binding.layer;
    layer.name = "";
    return select_layer(s, &layer);
}

static const struct malformed malformed[] = {
    {"workspace_too_small", workspace_small, "bytes"},
    {"workspace_null", workspace_null, "workspace"},
    {"workspace_misaligned", workspace_odd, "workspace"},
    {"view_null", view_null, "data"},
    {"view_heads", view_heads, "num_heads"},
    {"view_overlaps", view_overlaps, "stride_slot"},
    {"view_pack", view_pack, "pack"},
    {"limits_zero", limits_zero, "max_num_reqs"},
    {"heads_ragged", heads_ragged, "num_q_heads"},
    {"scale_zero", scale_zero, "scale"},
    {"kind_unknown", kind_unknown, "kind"},
    {"name_empty", name_empty, "name"},
};
const struct malformed_list malformed_binds = {malformed, sizeof malformed / sizeof *malformed};
