/* SPDX-License-Identifier: Apache-2.0 */
/* Attends to both caches of a layer under one softmax: an item is a token's heads, or up to 64 of
 * them, and its tiles are those of the window and then those of the second cache. A cluster has an
 * item, whose CTAs have equal parts of the tiles and merge their sums: without a schedule, parts in
 * memory or a second launch. */
#define LATENT_CALLS_CLAMP false
#include "sm90_latent.cuh"

/* A cluster pays for its merge if its longest part is shorter than the item by so many tiles. */
#define LEAST_SAVED 5

/* The CTAs of an item's cluster. All clusters should be resident at once: of an H200's 132
 * multiprocessors, clusters of 8 and of 4 use 120, those of 2 all. */
static unsigned choose_cluster(int32_t num_sms, int64_t items, int32_t tiles)
{
    for (int32_t cluster = LATENT_CLUSTER; cluster > 1; cluster /= 2) {
        const int64_t most = cluster > 2 ? num_sms - num_sms / 11 : num_sms;
        if (items * cluster <= most && tiles - (tiles + cluster - 1) / cluster >= LEAST_SAVED) {
            return (unsigned)cluster;
        }
    }
    return 1;
}

template <int KIND, int PRODUCER>
static cudaError_t launch_both(const sm90_latent_params *a, int32_t num_sms, int64_t items,
                               int32_t tiles, void *stream)
{
    static_assert(sizeof(latent_shared) <= 227 * 1024, "shared memory of a CTA");
    if (a == nullptr) {
        return allow_memory<KIND, PRODUCER, false, true>();
    }
    const unsigned cluster = choose_cluster(num_sms, items, tiles);
    const int64_t clusters = items < num_sms / cluster ? items : num_sms / cluster;
    return launch_kernel(attend_latent<KIND, PRODUCER, false, true>, *a,
                         (unsigned)clusters * cluster, latent_threads<PRODUCER>::threads,
                         sizeof(latent_shared), (cudaStream_t)stream, true, cluster);
}

extern "C" const char *sm90_latent_both_launch(const struct gpu_device *device,
                                               const struct sm90_latent_params *params,
                                               int64_t items, int32_t tiles, void *stream)
{
    device_scope inside(device);
    cudaError_t error = cudaSuccess;
    if (params == nullptr || params->form == LATENT_FORM_OWN) {
        error =
            launch_both<KIND_BF16, LATENT_BY_ROWS>(params, device->num_sms, items, tiles, stream);
    }
    if (error == cudaSuccess && (params == nullptr || params->form == LATENT_FORM_V4)) {
        error =
            launch_both<KIND_F16, LATENT_BY_CODES>(params, device->num_sms, items, tiles, stream);
    }
    return cause_of(error);
}
