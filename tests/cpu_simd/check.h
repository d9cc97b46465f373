/* SPDX-License-Identifier: Apache-2.0 */
/* A checker of cpu_simd against cpu_ref: both are opened as plugins, given the same batches, and
 * compared element by element. */
#ifndef TESTS_CPU_SIMD_CHECK_H
#define TESTS_CPU_SIMD_CHECK_H

#include <attn/plugin.h>
#include <stdbool.h>

#define MAX_VARIANTS 8
#define MAX_REQUESTS 12
#define MAX_THREADS 3

/* One backend of a plugin, made for use. */
struct backend {
    const struct attn_plugin *plugin;
    const struct attn_kernels *kernels;
    attn_instance *instance;
    char name[64];
    char variant[64];
};

/* host.c */
extern const struct attn_host test_host;
bool backend_open(const char *file, const char *name, const char *variant, struct backend *backend);
void backend_close(struct backend *backend);
int list_variants(const char *file, char names[MAX_VARIANTS][64]);
void random_seed(uint64_t seed);
uint64_t random_bits(void);
int32_t random_int(int32_t low, int32_t high); /* both inclusive */
float random_normal(void);

/* What one case asks for; zero is the plain choice everywhere. */
struct test_case {
    const char *name;
    int32_t dtype;
    int32_t kv_dtype;
    int32_t q_heads;
    int32_t kv_heads;
    int32_t depth;
    int32_t width; /* 0: depth */
    int32_t num_reqs;
    int32_t queries[2]; /* range of query lengths */
    int32_t context[2]; /* range of keys before the queries */
    int32_t block_size; /* 0: contiguous keys */
    int32_t layout;     /* enum attn_kv_layout */
    int32_t pack;
    int32_t not_causal;
    int32_t window;    /* decoder window of so many tokens */
    int32_t symmetric; /* window on both sides */
    int32_t chunk;
    int32_t lookback;
    float soft_cap;
    int32_t alibi;
    int32_t sinks;
    int32_t spans;
    int32_t span_window;
    int32_t tree;
    int32_t per_request_causal;
    int32_t scale_form;
    int32_t table_rows;  /* tables are indexed by block_table_row */
    int32_t first_row;   /* query_start_loc[0] */
    int32_t longer_keys; /* contiguous keys with a key_start_loc of their own */
    int32_t nan_key;     /* a NaN in the last key and value of each request */
    int32_t idle;        /* every third request has no query */
    int32_t least_code;  /* int8 rows hold -128, which no writer of ours makes */
    int32_t batch_invariant;
    float bound; /* 0: by dtype */
};

/* cases.c */
extern const struct test_case test_cases[];
extern const size_t num_test_cases;

/* batch.c: memory and arguments of a case, filled from the random generator */
struct test_data {
    const struct test_case *test;
    struct attn_layer_desc layer;
    struct attn_layer_params params;
    struct attn_batch batch;
    struct attn_kv_view k_view, v_view;
    struct attn_tensor q, k, v, out, lse;
    int64_t q_shape[3], k_shape[3], v_shape[3], out_shape[3], lse_shape[2];
    int64_t q_strides[3], out_strides[3], lse_strides[2];
    int32_t query_start[MAX_REQUESTS + 1], key_start[MAX_REQUESTS + 1], lengths[MAX_REQUESTS];
    int32_t table_row[MAX_REQUESTS], span_start[MAX_REQUESTS + 1];
    uint8_t causal[MAX_REQUESTS];
    int32_t num_rows, rows_allocated, num_keys;
    int32_t *table, *spans;
    int64_t *slots;
    int64_t num_slots;
    void *tree;
    float *sinks, *slopes, *scales, *channel_scales, *signs;
    struct attn_kv_quant_params quant;
    float *keys_f32, *values_f32; /* all keys of all requests before rounding */
    void *cache;
    size_t cache_bytes, row_bytes; /* rows stand before their scales */
};
void data_make(struct test_data *data, const struct test_case *test, const struct backend *writer);
void data_free(struct test_data *data);
void *filled(size_t bytes, int byte); /* never NULL */
int32_t dtype_bytes(int32_t dtype);
float element_value(const struct attn_tensor *tensor, int64_t index);
/* runs prepare, plan_size, plan (where there are) and attend into fresh outputs, which the caller
 * frees. Rows that must not be written hold a pattern. */
attn_status run_attend(const struct backend *backend, struct test_data *data, void **out,
                       float **lse, struct attn_error *error);

/* cache.c */
void make_cache(struct test_data *data);
void write_cache(struct test_data *data, const struct backend *writer);

#endif
