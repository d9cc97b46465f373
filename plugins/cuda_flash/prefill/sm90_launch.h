/* SPDX-License-Identifier: Apache-2.0 */
/* Launchers of prefill by element type and head size. With params NULL they only load their
 * kernels. */
#ifndef CUDA_FLASH_SM90_LAUNCH_H
#define CUDA_FLASH_SM90_LAUNCH_H

#include <cuda_runtime.h>

#include "sm90_prefill.h"

typedef cudaError_t prefill_launcher(const struct prefill_params *params, int32_t num_sms,
                                     cudaStream_t stream);

prefill_launcher launch_prefill_head64, launch_widen;
prefill_launcher launch_prefill_bf16_64, launch_prefill_bf16_128, launch_prefill_bf16_192,
    launch_prefill_bf16_256, launch_prefill_bf16_512;
prefill_launcher launch_prefill_f16_64, launch_prefill_f16_128, launch_prefill_f16_192,
    launch_prefill_f16_256, launch_prefill_f16_512;
/* over copies of narrow keys and values; there is none for head sizes 192 and 512 */
prefill_launcher launch_copies_bf16_64, launch_copies_bf16_128, launch_copies_bf16_256;
prefill_launcher launch_copies_f16_64, launch_copies_f16_128, launch_copies_f16_256;
/* whose bits do not depend on the rows of an item, of all sizes */
prefill_launcher launch_exact_bf16, launch_exact_f16;

/* With the target bf16 (meson_options.txt) float16 has no kernels here. */
#ifdef CUDA_FLASH_BF16_ALONE
#define F16_LAUNCHER(launch) nullptr
#else
#define F16_LAUNCHER(launch) launch
#endif

/* Head sizes are 64, 128, 192, 256 and 512. */
static inline int prefill_size_index(int32_t size)
{
    return size > 256 ? 4 : size / 64 - 1;
}

#endif
