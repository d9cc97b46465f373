/* SPDX-License-Identifier: Apache-2.0 */
#include "host/measurement.h"

#include <attn/draft/recurrent.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "util/hash.h"

bool measurement_parse(struct measurement *m, const char *line)
{
    int end = 0;
    return sscanf(line,
                  "%63s %159s %15s %31s %159s %" SCNd64 " %" SCNd32 " %" SCNx64 " %" SCNx64
                  " %31s %15s %n",
                  m->device, m->shape, m->phase, m->bucket, m->backend, &m->nanoseconds, &m->spread,
                  &m->file, &m->drivers, m->version, m->date, &end) == 11 &&
           line[end] == '\0' && m->nanoseconds > 0 && m->spread >= 0;
}

bool measurement_text(const struct measurement *m, char *text, size_t size)
{
    return (size_t)snprintf(text, size,
                            "%s %s %s %s %s %" PRId64 " %" PRId32 " %016" PRIx64 " %016" PRIx64
                            " %s %s\n",
                            m->device, m->shape, m->phase, m->bucket, m->backend, m->nanoseconds,
                            m->spread, m->file, m->drivers, m->version, m->date) < size;
}

bool measurement_is_of(const struct measurement *m, const char *device, const char *shape,
                       const char *phase, const char *backend)
{
    return strcmp(m->phase, phase) == 0 && strcmp(m->shape, shape) == 0 &&
           strcmp(m->backend, backend) == 0 && strcmp(m->device, device) == 0;
}

const char *measurement_stale(const struct measurement *m, uint64_t file, uint64_t drivers)
{
    return m->file != file ? "another plugin file" : m->drivers != drivers ? "other drivers" : NULL;
}

void measurement_device(const struct attn_device_info *device, char text[MEASUREMENT_DEVICE_SIZE])
{
    uint64_t hash = HASH_INIT;
    text[0] = '\0';
    if (device != NULL) {
        hash = hash_string(hash_string(hash, device->name), device->isa);
        hash = hash_bytes(hash, &device->num_multiprocessors, sizeof device->num_multiprocessors);
        snprintf(text, MEASUREMENT_DEVICE_SIZE, "%.40s:%08" PRIx32, device->arch,
                 (uint32_t)(hash ^ hash >> 32));
    }
}

static const void *find(const struct attn_ext *ext, uint32_t id)
{
    while (ext != NULL && ext->id != id) {
        ext = ext->next;
    }
    return ext;
}

static int shape_of_recurrent(const struct attn_recurrent_desc *r, const char *dtype, char *text)
{
    const struct attn_recurrent_rule *rule = find(r->ext.next, ATTN_EXT_DRAFT_RECURRENT_RULE);
    return snprintf(text, MEASUREMENT_SHAPE_SIZE,
                    "recurrent%d/%dx%dx%d.%.16s.state%d.conv%d.rule%d%d%d%d", r->num_k_heads,
                    r->num_v_heads, r->head_size_k, r->head_size_v, dtype,
                    r->state_dtype == 0 ? ATTN_DTYPE_F32 : r->state_dtype, r->conv_width,
                    rule != NULL ? rule->rule : 0, rule != NULL ? rule->gate : 0,
                    rule != NULL ? rule->gate_per_channel : 0, rule != NULL ? rule->write_gate : 0);
}

void measurement_shape(const struct attn_layer_desc *layer, const char *dtype, const char *kv_dtype,
                       char text[MEASUREMENT_SHAPE_SIZE])
{
    const struct attn_recurrent_desc *recurrent = find(layer->next, ATTN_EXT_RECURRENT_DESC);
    const struct attn_mla_desc *mla = find(layer->next, ATTN_EXT_MLA_DESC);
    if (recurrent != NULL) {
        shape_of_recurrent(recurrent, dtype, text);
        return;
    }
    int used =
        snprintf(text, MEASUREMENT_SHAPE_SIZE, "%d/%dx%dx%d.%.16s.%.40s", layer->num_q_heads,
                 layer->num_kv_heads, layer->head_size,
                 layer->head_size_v > 0 ? layer->head_size_v : layer->head_size, dtype, kv_dtype);
    const struct {
        const char *name;
        int32_t value; /* 0: not in the text */
    } terms[] = {
        {"kind", layer->kind == ATTN_LAYER_DECODER ? 0 : layer->kind},
        {"topk", mla != NULL ? mla->topk : 0},
        {"window", layer->has_window && layer->window_left >= 0 ? layer->window_left + 1 : 0},
        {"chunk", layer->chunk_size},
        {"softcap", layer->soft_cap > 0},
        {"sinks", layer->has_sinks},
        {"alibi", layer->alibi},
        {"noncausal", layer->kind == ATTN_LAYER_DECODER && layer->causal == ATTN_CAUSAL_NO},
        {"output", layer->output_form},
        {"invariant", layer->batch_invariant},
    };
    for (size_t i = 0; i < sizeof terms / sizeof *terms; i++) {
        if (terms[i].value != 0 && used < MEASUREMENT_SHAPE_SIZE) {
            used += snprintf(text + used, (size_t)(MEASUREMENT_SHAPE_SIZE - used), ".%s%d",
                             terms[i].name, terms[i].value);
        }
    }
}
