/* SPDX-License-Identifier: Apache-2.0 */
/* A layer's parameters as the core keeps them: the structs that the engine filled, its extensions
 * and tensors' shapes are copied, so that only the memory they point at is borrowed. */
#ifndef CORE_BIND_LAYER_PARAMS_COPY_H
#define CORE_BIND_LAYER_PARAMS_COPY_H

#include <attn/layer.h>
#include <attn/status.h>

#include "util/structs.h"
#include "util/tensor.h"

#define LAYER_PARAMS_MAX_TENSORS 16

/* Must not move while `params` is used. */
struct layer_params_copy {
    struct attn_layer_params params; /* points into this struct only, and at the engine's memory */
    struct ext_room extensions;
    struct own_tensor tensors[LAYER_PARAMS_MAX_TENSORS];
    int32_t num_tensors;
};

/* `given` is zero-extended, its extensions checked. A tensor that cannot be one is refused under
 * its name. */
attn_status layer_params_copy_take(struct layer_params_copy *own,
                                   const struct attn_layer_params *given, struct attn_error *error);

#endif
