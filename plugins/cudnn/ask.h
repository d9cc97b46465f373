/* SPDX-License-Identifier: Apache-2.0 */
/* What cuDNN's heuristics say of a layer before there is an instance. */
#ifndef CUDNN_ASK_H
#define CUDNN_ASK_H

#include <attn/plugin.h>

#include "cudnn/graph.h"

/* Whether cuDNN has an engine for the layer's attends on the backend's device; false with the
 * reason in `cause`. Starts no CUDA. Of layers that are alike the first alone is asked about. Safe
 * from many threads. */
int cudnn_has_engine(const struct attn_supports_args *args, char cause[GRAPH_CAUSE_BYTES]);

#endif
