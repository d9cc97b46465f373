/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of this folder: X(name, its parameters, threads of a group); the entry is
 * kernel_<name>. The number of threads is a multiple of 64, so that warps of 32 and of 64 lanes
 * divide it. */
#ifndef GPU_KERNELS_LIST_H
#define GPU_KERNELS_LIST_H

#define GPU_KERNELS(X)                                                                             \
    X(plan, gpu_plan_params, 1024)                                                                 \
    X(plain, gpu_params, 512)                                                                      \
    X(plain_nibbles, gpu_params, 512)                                                              \
    X(widen, gpu_widen_params, 128)                                                                \
    X(write_copy, gpu_write_params, 256)                                                           \
    X(write_copy_far, gpu_write_params, 256)                                                       \
    X(write_fp8, gpu_write_params, 256)                                                            \
    X(write_fp8_far, gpu_write_params, 256)                                                        \
    X(write_scaled_8, gpu_write_params, 256)                                                       \
    X(write_scaled_16, gpu_write_params, 256)                                                      \
    X(write_scaled_32, gpu_write_params, 256)                                                      \
    X(write_rows, gpu_write_params, 128)                                                           \
    X(rope_write, gpu_write_params, 128)                                                           \
    X(gather, gpu_gather_params, 128)                                                              \
    X(gather_nibbles, gpu_gather_params, 128)                                                      \
    X(make_table, gpu_table_params, 128)                                                           \
    X(copy_runs, gpu_copy_params, 128)                                                             \
    X(merge_states, gpu_merge_params, 128)                                                         \
    X(rotate_output, gpu_rotate_params, 256)                                                       \
    X(quantize_static, gpu_quantize_params, 256)                                                   \
    X(quantize_groups, gpu_quantize_params, 128)                                                   \
    X(quantize_nvfp4, gpu_quantize_params, 128)                                                    \
    X(amax, gpu_amax_params, 128)                                                                  \
    X(amax_keep, gpu_amax_params, 64)                                                              \
    X(index_scores, gpu_index_params, 256)                                                         \
    X(index_top_k, gpu_index_params, 1024)                                                         \
    X(index_top_k_short, gpu_index_params, 256)                                                    \
    X(list_keys, gpu_list_params, 128)                                                             \
    X(compress, gpu_compressor_params, 512)                                                        \
    X(latent, gpu_latent_params, 512)                                                              \
    X(latent_sparse, gpu_latent_params, 512)                                                       \
    X(latent_write, gpu_latent_write_params, 128)                                                  \
    X(latent_gather, gpu_latent_gather_params, 128)                                                \
    X(gemm, gpu_gemm_params, 256)                                                                  \
    X(gemm_few, gpu_gemm_params, 64)                                                               \
    X(delta_128, gpu_delta_params, 256)                                                            \
    X(delta_512, gpu_delta_params, 256)                                                            \
    X(delta_step, gpu_delta_params, 256)                                                           \
    X(rule_128, gpu_delta_params, 256)                                                             \
    X(rule_512, gpu_delta_params, 256)                                                             \
    X(ring_128, gpu_ring_params, 256)                                                              \
    X(ring_512, gpu_ring_params, 512)                                                              \
    X(delta_roll, gpu_delta_params, 256)                                                           \
    X(delta_norm, gpu_delta_norm_params, 256)                                                      \
    X(index_write, gpu_index_write_params, 128)

#define GPU_KERNEL_NUMBER(name, params, threads) GPU_KERNEL_##name,
enum gpu_kernel { GPU_KERNELS(GPU_KERNEL_NUMBER) GPU_KERNEL_COUNT };
#undef GPU_KERNEL_NUMBER

#define GPU_KERNEL_THREADS(name, params, threads) GPU_THREADS_##name = threads,
enum gpu_kernel_threads { GPU_KERNELS(GPU_KERNEL_THREADS) GPU_THREADS_END };
#undef GPU_KERNEL_THREADS

#endif
