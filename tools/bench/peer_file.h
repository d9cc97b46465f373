/* SPDX-License-Identifier: Apache-2.0 */
/* What --peer names: a file of peer.h's functions, and its calls over what was measured. */
#ifndef BENCH_PEER_FILE_H
#define BENCH_PEER_FILE_H

#include "measured.h"

struct peer_file {
    const char *(*name)(void);
    void *(*create)(const struct attn_layer_desc *, const struct attn_layer_params *,
                    const struct attn_batch *, char *);
    int (*bind)(void *, const struct attn_kv_view *, const struct attn_kv_view *,
                const struct attn_step_io *);
    int (*run)(void *, int32_t);
    void (*destroy)(void *);
};

struct peer {
    const struct peer_file *file;
    void *state;
    struct work work; /* as much of it as of the backend's */
};

attn_status peer_file_open(struct peer_file *file, const char *path, struct attn_error *error);
/* The peer on what `measured` holds, which outlives it. On failure nothing is left to finish. */
attn_status peer_init(struct peer *peer, const struct peer_file *file,
                      const struct measured *measured, struct attn_error *error);
void peer_finish(struct peer *peer);

#endif
