/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's parameters as the core keeps them: the structs that the engine filled, its extensions
 * and tensors' shapes are copied, so that only the memory they point at is borrowed. */
#ifndef CORE_BIND_KEPT_H
#define CORE_BIND_KEPT_H

#include <attn/recurrent.h>
#include <attn/draft/mm_encoder.h>
#include <attn/layer.h>
#include <attn/mla.h>
#include <attn/status.h>

#include "util/tensor.h"

#define KEPT_MAX_TENSORS 9 /* sink_k, sink_v, five of MLA, two of GDN */

/* Must not move while `params` is used. */
struct kept_params {
    struct attn_layer_params params; /* points into this struct only, and at the engine's memory */
    struct attn_kv_quant_params kv_quant;
    struct attn_mla_weights mla;
    struct attn_recurrent_weights gdn;
    struct attn_mm_encoder_state encoder;
    struct own_tensor tensors[KEPT_MAX_TENSORS];
    int32_t num_tensors;
};

/* `given` is zero-extended, its extensions checked. A tensor that cannot be one is refused under
 * its name. */
attn_status kept_params_take(struct kept_params *kept, const struct attn_layer_params *given,
                             struct attn_error *error);

#endif
