/* SPDX-License-Identifier: Apache-2.0 */
/* A draft (abi/README.md, Drafts): lists of the keys that a query may see, chosen by the engine for
 * each token and group of heads (DeepSeek-V3.2's top-k, blocks of MSA, MoBA, QSA). A list is one
 * more term of visibility: key j is seen if floor(j / granularity) is an entry and every term of
 * the layer (causality, window, chunks, spans, trees) allows it. Rows of a static sink are no keys
 * of the request and always seen. docs/semantics.md, section 1, has the whole of it.
 *
 * What a kernel sees. attend and attend_mla_sparse: attn_index_lists on the layer (granularity
 * never 0, groups the least that say the same), attn_io_index_lists on the arguments. Of an MLA
 * layer attn_mla_desc.topk is max_entries. MLA's plain lists (granularity 1, one list for all
 * heads, positions, no lengths) reach kernels as attn_mla_desc.topk and attn_io_mla.topk_indices
 * alone, so that every backend with attend_mla_sparse serves them. */
#ifndef ATTN_DRAFT_INDEX_LISTS_H
#define ATTN_DRAFT_INDEX_LISTS_H

#include "../version.h"

#define ATTN_EXT_DRAFT_INDEX_LISTS 0x810u      /* struct attn_index_lists, of a layer */
#define ATTN_EXT_DRAFT_IO_INDEX_LISTS 0x811u   /* struct attn_io_index_lists, of a run */
#define ATTN_EXT_DRAFT_INDEX_LISTS_CAPS 0x812u /* struct attn_index_lists_caps, of a backend */

/* Which query heads have a list of their own: G lists for each token. */
enum attn_list_groups {
    ATTN_LISTS_SHARED = 0,      /* G = 1 */
    ATTN_LISTS_PER_KV_HEAD = 1, /* G = num_kv_heads */
    ATTN_LISTS_PER_Q_HEAD = 2   /* G = num_q_heads */
};

struct attn_index_lists { /* on attn_layer_desc, of kind decoder or MLA (whose topk is then 0) */
    struct attn_ext ext;  /* id ATTN_EXT_DRAFT_INDEX_LISTS */
    int32_t max_entries;  /* k, entries of a list; 1 to 2^20 */
    int32_t granularity;  /* keys of an entry: 1, 4, 16, 64 or 128; 0 reads as 1 */
    int32_t groups;       /* enum attn_list_groups */
    /* 0: entry e is positions e granularity .. + granularity - 1 of the request. 1: slots of the
     * cache, as slot_mapping counts them: key j is in entry floor(slot(j) / granularity) */
    int32_t physical_slots;
    int32_t has_lengths; /* 1: runs bring the length of each list; 0: all are max_entries long */
    int32_t reserved;    /* 0 */
};

/* On attn_step_io, of every run of such a layer that attends. Each token has lists of its own,
 * drafted ones too. A negative entry, one past the request's last key, or a slot of another request
 * lists nothing. An entry stands in its list once; a second one is an error, found under
 * ATTN_VALIDATE=1 on a CPU, and undefined without. A list without visible keys is an empty row. */
struct attn_io_index_lists {
    struct attn_ext ext;    /* id ATTN_EXT_DRAFT_IO_INDEX_LISTS */
    const int32_t *indices; /* device [T, G, max_entries], in any order */
    int64_t token_stride;   /* elements between tokens, max_entries or more */
    int64_t group_stride;   /* elements between lists of a token; max_entries or more where G > 1 */
    const int32_t *lengths; /* device [T, G]: entries that count, 0 to max_entries; or NULL */
    int64_t length_stride;  /* elements between tokens, G or more */
};

struct attn_index_lists_caps { /* on attn_backend_caps */
    struct attn_ext ext;       /* id ATTN_EXT_DRAFT_INDEX_LISTS_CAPS */
    int32_t attend;            /* 1: attend takes lists */
    int32_t attend_mla_sparse; /* 1: attend_mla_sparse takes lists that are not plain */
    uint32_t granularities;    /* the sum of those that it takes: 1 + 4 + 16 + 64 + 128 */
    uint32_t groups;           /* mask of 1 << enum attn_list_groups; 0: shared alone */
    int32_t physical_slots;    /* 1: takes them */
    int32_t max_entries;       /* 0: any */
    int32_t entries_multiple;  /* max_entries of a layer is a multiple; 0 or 1: any */
    int32_t reserved;
};

#endif
