/* SPDX-License-Identifier: Apache-2.0 */
/* What a step of a layer reads and writes: the sizes of each tensor by its role, and the
 * attn_step_io of tensors that the caller has on a device. */
#ifndef SUPPORT_LAYER_IO_H
#define SUPPORT_LAYER_IO_H

#include <attn/draft/index_lists.h>
#include <attn/indexer.h>
#include <attn/io.h>
#include <attn/layer.h>
#include <attn/mla.h>
#include <attn/recurrent.h>

enum layer_role {
    ROLE_Q,
    ROLE_K,
    ROLE_V,
    ROLE_Q_NOPE, /* MLA */
    ROLE_Q_PE,
    ROLE_KV_C,
    ROLE_K_PE,
    ROLE_MIXED_QKV, /* recurrent, where it has a convolution; else q, k and v */
    ROLE_A,
    ROLE_B,
    ROLE_WEIGHTS, /* indexers */
    ROLE_OUT,
    LAYER_ROLES
};

/* Sizes of one token's part of a tensor. */
struct layer_rows {
    int32_t heads; /* 0: the tensor is [tokens, dims] */
    int32_t dims;  /* 0: such a layer has none */
    int32_t dtype; /* enum attn_dtype_id; an indexer's out has 32-bit integers, as wide as floats */
};

struct layer_rows layer_rows(const struct attn_layer_desc *layer, enum layer_role role);
/* Elements of a token. */
static inline int64_t layer_row_size(struct layer_rows rows)
{
    return (int64_t)(rows.heads > 0 ? rows.heads : 1) * rows.dims;
}

/* The extension of a layer by its id, or NULL. */
const void *layer_extension(const struct attn_layer_desc *layer, uint32_t id);
/* Gates of a token of a recurrent layer: one a head, or one a channel. */
int32_t layer_gates(const struct attn_layer_desc *layer);

struct layer_io {
    struct attn_step_io io;
    const struct attn_layer_desc *layer;
    struct attn_tensor tensors[LAYER_ROLES];
    int64_t shapes[LAYER_ROLES][3], strides[LAYER_ROLES][3];
    struct attn_io_mla mla;
    struct attn_io_recurrent recurrent;
    struct attn_io_indexer indexer;
    struct attn_io_index_lists lists;
};

/* Without tensors; `layer` lives as long. Must not move from here on. */
void layer_io_init(struct layer_io *io, const struct attn_layer_desc *layer, void *stream);
/* A tensor of `tokens` tokens. `head_stride`: elements from a head to the next, or from a token to
 * the next where there are no heads; 0: compact. */
void layer_io_set(struct layer_io *io, enum layer_role role, struct layer_rows rows, int64_t tokens,
                  struct attn_device device, void *data, int64_t head_stride);
/* Lists of keys [tokens, per_token, entries] on the device. */
void layer_io_lists(struct layer_io *io, const int32_t *indices, int32_t per_token,
                    int32_t entries);

#endif
