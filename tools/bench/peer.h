/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of another library next to a backend's, over the same tensors: attn-bench --peer
 * FILE.so calls these five functions of the file. A file includes this header and defines them. */
#ifndef BENCH_PEER_H
#define BENCH_PEER_H

#include <attn/batch.h>
#include <attn/io.h>
#include <attn/kv_cache.h>
#include <attn/layer.h>

/* The library's name and version, for the table. */
ATTN_EXPORT const char *peer_name(void);
/* Takes layers like this one and the batch of all calls, or gives NULL and says in `why` (256
 * bytes) what it does not take. Everything that is passed lives until peer_destroy. */
ATTN_EXPORT void *peer_create(const struct attn_layer_desc *layer,
                              const struct attn_layer_params *params,
                              const struct attn_batch *batch, char *why);
/* The next of several equal layers, which are called in turn so that no cache of the processor
 * holds them: its KV cache (layout=nhd asks for vLLM's) and its tensors; MLA and recurrent layers
 * have theirs in io->next. What is planned for a batch is done here. Zero succeeds. */
ATTN_EXPORT int peer_bind(void *peer, const struct attn_kv_view *k, const struct attn_kv_view *v,
                          const struct attn_step_io *io);
/* Enqueues the call of layer `index` on its io->stream, also while that is captured. Writes
 * io->out. Zero succeeds. */
ATTN_EXPORT int peer_run(void *peer, int32_t index);
ATTN_EXPORT void peer_destroy(void *peer);

#endif
