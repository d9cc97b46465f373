/* SPDX-License-Identifier: Apache-2.0 */
/* All compositions. A new one is its file and its line here. */
#ifndef COMPOSITIONS_COMPOSITIONS_H
#define COMPOSITIONS_COMPOSITIONS_H

#include "select/composition.h"

/* In the order in which they are called. */
#define COMPOSITIONS(X)                                                                            \
    X(CASCADE, composition_cascade)                                                                \
    X(CONTEXT_PARALLEL, composition_context_parallel)                                              \
    X(CHUNKED, composition_chunked)                                                                \
    X(MLA, composition_mla)                                                                        \
    X(COMPRESSED, composition_compressed) /* after MLA, whose program is a part of its own */      \
    X(RECURRENT, composition_recurrent)                                                            \
    X(INDEXER, composition_indexer)                                                                \
    X(COMPRESSOR, composition_compressor)                                                          \
    X(SINK, composition_sink)                                                                      \
    X(ENCODER, composition_encoder)                                                                \
    X(OUTPUT_ROPE, composition_output_rope)   /* around what attends */                            \
    X(OUTPUT_QUANT, composition_output_quant) /* after all others that choose a program */         \
    X(LISTS, composition_lists)               /* after all others that compose a step */

#define COMPOSITION_ID(id, table) COMPOSITION_##id,
enum composition_id { COMPOSITIONS(COMPOSITION_ID) NUM_COMPOSITIONS };
#undef COMPOSITION_ID
_Static_assert(NUM_COMPOSITIONS <= MAX_COMPOSITIONS, "a list ends with NULL");

#define COMPOSITION_TABLE(id, table) extern const struct composition table;
COMPOSITIONS(COMPOSITION_TABLE)
#undef COMPOSITION_TABLE

#endif
