/* SPDX-License-Identifier: Apache-2.0 */
/* Scaled dot-product attention over pages as an operation graph of cuDNN, and its execution plan.
 */
#ifndef CUDNN_GRAPH_H
#define CUDNN_GRAPH_H

#include "cudnn/library.h"

/* Tensors of a graph that are memory, and numbers of the host: their unique ids, and their places
 * in what graph_execute takes. */
enum graph_tensor {
    GRAPH_Q,
    GRAPH_K,
    GRAPH_V,
    GRAPH_OUT,
    GRAPH_LSE,
    GRAPH_Q_START, /* int64 [B + 1]: first elements of each request's rows */
    GRAPH_OUT_START,
    GRAPH_LSE_START,
    GRAPH_QUERY_LENS,     /* int32 [B] */
    GRAPH_KEY_LENS,       /* int32 [B] */
    GRAPH_TABLE,          /* int32 [B, columns] */
    GRAPH_SCALE,          /* float, host */
    GRAPH_HIDDEN_PADDING, /* float, host: -inf, as the next two */
    GRAPH_HIDDEN_CAUSAL,
    GRAPH_HIDDEN_WINDOW,
    GRAPH_WINDOW, /* int32, host, as the next */
    GRAPH_RIGHT,
    GRAPH_SOFT_CAP, /* float, host */
    GRAPH_SINKS,    /* float [Hq] */
    GRAPH_K_START,  /* as GRAPH_Q_START, of keys and values that are rows */
    GRAPH_V_START,
    GRAPH_TENSORS
};

/* One of K or V as a container of pages; strides in elements. */
struct graph_cache {
    int64_t num_blocks, stride_block, stride_head, stride_slot;
};

#define GRAPH_HAS_ROWS 1u /* keys and values are compact rows, [Tk, Hk, D], and no pages */
#define GRAPH_HAS_SOFT_CAP 2u
#define GRAPH_HAS_SINKS 4u

/* What a plan is made for. Rows of q, out and lse are compact: [T, Hq, D], [T, Hq, Dv], [T, Hq]. */
struct graph_shape {
    cudnnDataType_t dtype;
    uint32_t has;   /* GRAPH_HAS_* */
    int32_t window; /* keys up to its own that a query sees, its own included; 0: all */
    int32_t right;  /* keys after its own that it sees; 0: causal; -1: all */
    int64_t num_reqs, query_len, columns, block_size; /* upper bounds; keys: columns pages */
    int64_t num_q_heads, num_kv_heads, head_size, head_size_v;
    struct graph_cache k, v;
}; /* without padding: shapes are compared as bytes */

#define GRAPH_DESCRIPTORS 224

struct graph_plan {
    struct graph_shape shape;
    cudnnBackendDescriptor_t plan;
    int64_t workspace_bytes;
    cudnnBackendDescriptor_t made[GRAPH_DESCRIPTORS]; /* all of it; they live as long as the plan */
    int32_t num_made;
};

#define GRAPH_CAUSE_BYTES 480

/* Makes the plan that cuDNN's heuristics like best; the device's context is current. False, with
 * what cuDNN says in `cause`, where no engine takes the shape; the plan is empty then. */
int graph_make(const struct cudnn_library *library, cudnnHandle_t handle,
               const struct graph_shape *shape, struct graph_plan *plan,
               char cause[GRAPH_CAUSE_BYTES]);
/* Whether the heuristics name an engine for the shape on a device that is described as
 * CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION wants it. Calls nothing of CUDA and compiles nothing.
 * False with what cuDNN says in `cause`; true where it does not take the description. */
int graph_has_engine(const struct cudnn_library *library, const char *device,
                     const struct graph_shape *shape, char cause[GRAPH_CAUSE_BYTES]);
void graph_free(const struct cudnn_library *library, struct graph_plan *plan);

/* Launches a plan on the handle's stream; `data` by enum graph_tensor. */
cudnnStatus_t graph_execute(const struct cudnn_library *library, cudnnHandle_t handle,
                            const struct graph_plan *plan, void *const data[GRAPH_TENSORS],
                            void *workspace);

#endif
