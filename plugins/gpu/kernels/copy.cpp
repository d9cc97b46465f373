/* SPDX-License-Identifier: Apache-2.0 */
/* copy_blocks within a device: a group for each piece of a row. The limit is memory bandwidth, or
 * the launch. */
#include "gpu/device/target.h"
#include "gpu/params.h"

#define COPY_PIECE (GPU_THREADS_copy_runs * 64) /* bytes: four 16-byte loads of a thread */

GPU_INLINE int64_t piece_count(const gpu_copy_run &run)
{
    return run.rows * ((run.bytes + COPY_PIECE - 1) / COPY_PIECE);
}

template <typename NUMBER> GPU_INLINE void copy_numbers(const char *from, char *to, int64_t bytes)
{
    const int64_t count = bytes / (int64_t)sizeof(NUMBER);
    for (int64_t i = thread_index(); i < count; i += GPU_THREADS_copy_runs) {
        ((NUMBER *)to)[i] = ((const NUMBER *)from)[i];
    }
}

GPU_KERNEL(copy_runs, gpu_copy_params)
{
    int64_t before = 0; /* pieces of earlier runs */
    int32_t r = 0;
    for (int64_t item = group_index();; item += group_count()) {
        while (r < p.count && item - before >= piece_count(p.runs[r])) {
            before += piece_count(p.runs[r]);
            r++;
        }
        if (r == p.count) {
            return;
        }
        const gpu_copy_run &run = p.runs[r];
        const int64_t pieces = (run.bytes + COPY_PIECE - 1) / COPY_PIECE;
        const int64_t row = (item - before) / pieces;
        const int64_t at = (item - before - row * pieces) * COPY_PIECE;
        const int64_t bytes = run.bytes - at < COPY_PIECE ? run.bytes - at : COPY_PIECE;
        const char *from = run.from + row * run.from_stride + at;
        char *to = run.to + row * run.to_stride + at;
        const uint64_t odd = (uint64_t)from | (uint64_t)to | (uint64_t)bytes;
        if (odd % sizeof(uint4) == 0) {
            copy_numbers<uint4>(from, to, bytes);
        } else if (odd % sizeof(uint32_t) == 0) {
            copy_numbers<uint32_t>(from, to, bytes);
        } else {
            copy_numbers<char>(from, to, bytes);
        }
    }
}
