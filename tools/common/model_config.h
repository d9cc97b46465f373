/* SPDX-License-Identifier: Apache-2.0 */
/* A model's attention layers from its configuration, as Hugging Face's config.json has it. */
#ifndef TOOLS_COMMON_MODEL_CONFIG_H
#define TOOLS_COMMON_MODEL_CONFIG_H

#include <attn/api.h>
#include <attn/draft/compressed.h>
#include <attn/draft/compressor.h>
#include <attn/draft/index_lists.h>
#include <attn/draft/index_write.h>
#include <attn/indexer.h>
#include <attn/draft/output_rope.h>
#include <attn/draft/recurrent.h>
#include <attn/layer.h>
#include <attn/mla.h>
#include <attn/status.h>
#include <stdbool.h>

#define MAX_LAYERS 1024 /* layers of a model */

struct model_layer {
    struct attn_layer_desc desc;
    struct attn_mla_desc mla;         /* linked from desc.next where the kind is MLA */
    struct attn_indexer_desc indexer; /* linked where the kind is an indexer */
    /* linked from indexer.ext.next where the model `fuses_index_write`; ext.id 0: an index key is
     * stored as it comes */
    struct attn_index_write index_write;
    /* linked, from mla.ext.next where the kind is MLA, of a decoder or MLA layer whose keys an
     * indexer before it chooses; else max_entries is 0 */
    struct attn_index_lists lists;
    /* linked from mla.ext.next of a layer with compressed rows, whose lists (mla.topk) are of
     * these; else cache.tokens_per_row is 0. A ring of a recurrent layer: cache.role says so */
    struct attn_cache_desc cache;
    struct attn_layer_caches caches;
    struct attn_compressed_rows compressed;
    struct attn_compressor_desc compressor; /* linked where the kind is a compressor */
    struct attn_output_rope output_rope;    /* linked of MLA layers, where the model `rotates` */
    struct attn_recurrent_desc gdn;
    struct attn_recurrent_rule rule; /* linked from gdn.ext.next where it is not gated delta */
    struct attn_recurrent_rounding rounding; /* linked before the rule where its ext.id is not 0 */
    bool shares_cache;                       /* has none, and reads that of model_cache_owner */
    char name[64];
    int32_t tower; /* 0 decoder or the only one, 1 encoder or vision */
};

struct model_config {
    char model_type[64];
    struct model_layer *layers;
    int32_t num_layers;
    bool guessed;           /* model_type is unknown: read as a plain causal decoder */
    bool rotates;           /* the core rotates outputs, where the model does; set before linking */
    bool fuses_index_write; /* write_kv norms, rotates and transforms index keys, where the model
                             * does; set before linking */
};

/* `tool: file: model_type 'x' is not known …` on stderr where it was guessed. */
void model_config_warn(const struct model_config *config, const char *tool, const char *file);

/* On failure nothing is left to finish, and the error names the field, its value and what is
 * allowed. */
attn_status model_config_read(struct model_config *config, const char *file,
                              struct attn_error *error);
void model_config_finish(struct model_config *config);

/* Sets what a layer points to, in itself, where it is now: its extensions by its kind, with the
 * rotation of its output and the change of index keys where these are done. */
void model_layer_link(struct model_layer *layer, bool rotates, bool fuses_index_write);
void model_config_link(struct model_config *config);
/* The last layer before layer `index` that is of its sort and has a cache; NULL: no such layer. */
const struct model_layer *model_cache_owner(const struct model_config *config, int32_t index);

/* Makes an attention layer MLA over own rows of `size` elements, which are key and value, and where
 * `ratio` is above 0 over compressed rows of so many tokens each, of which lists of `topk` choose
 * (0: all are seen), in blocks of `block_size`. */
void model_layer_compress(struct model_layer *layer, int32_t size, int32_t topk, int32_t ratio,
                          int32_t block_size);
/* Gives a recurrent layer a ring of so many tokens' inputs. */
void model_layer_replay(struct model_layer *layer, int32_t tokens);

/* Gives each recurrent layer a ring of so many tokens' inputs; how many there are. */
int32_t model_config_replay(struct model_config *config, int32_t tokens);

/* Keeps at most `count` layers of each tower, but at least one of every kind and window, and of
 * those with and without a cache of their own. */
void model_config_keep(struct model_config *config, int32_t count);

/* Leaves layers of that kind out; how many there were. */
int32_t model_config_drop(struct model_config *config, int32_t kind);

/* api->select of all layers. */
attn_status model_config_select(const struct model_config *config, const struct attn_api *api,
                                attn_runtime *runtime, const struct attn_select_options *options,
                                attn_assignment **assignment, struct attn_error *error);

/* ALiBi slopes as BLOOM has them (Press et al. 2022): powers of 2^(-8/n), n the next lower power of
 * two. */
void model_alibi_slopes(float *slopes, int32_t num_heads);

#endif
