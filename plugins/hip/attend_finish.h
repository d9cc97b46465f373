/* SPDX-License-Identifier: Apache-2.0 */
/* The end of a run: the splits' shares of each row are joined in LDS, and written out or left as a
 * part of the item. */
#ifndef HIP_ATTEND_FINISH_H
#define HIP_ATTEND_FINISH_H

#include "attend_keys.h"

#if defined(MATRIX_DEPTH)

/* Keys of two tiles and what else a run reads, or a share of the sums with each row's row_max and
 * row_sum of all splits: a compute unit of CDNA holds two groups, as does a pair of RDNA's. */
template <class S> struct attend_memory {
    static constexpr int rounds = S::staged && S::out_size >= 128 ? S::out_size / 64 : 1;
    static constexpr int round = S::steps / rounds; /* output tiles of a warp in a round */
    static constexpr int columns = 16 * round * S::dim_warps;
    static constexpr int pitch = columns + 4; /* floats; rows lie in other banks */
    static constexpr int key_bytes = S::staged ? 2 * S::tile * S::row_bytes : 0;
    static constexpr int input_bytes = key_bytes + S::query_bytes;
    union {
        alignas(16) char input[input_bytes > 0 ? input_bytes : 16]; /* keys, then queries */
        struct {
            alignas(16) float acc_o[S::rows][pitch];
            float row_max[S::splits][S::rows], row_sum[S::splits][S::rows];
            int32_t number;
        };
    };

    /* First of the dims at `column` of a round. */
    GPU_INLINE int32_t dim_of(int32_t of_round, int32_t column)
    {
        int32_t warp = column / (16 * round), of_warp = column % (16 * round);
        int32_t t = of_round * round + of_warp % round; /* output tile */
        return warp * S::out_size + t / S::per * S::pass + of_warp / round * S::per + t % S::per;
    }
};

template <class S>
GPU_INLINE void finish_run(const gpu_params &p, const gpu_run &r, const warp_part &warp,
                           float row_max, float row_sum, const matrix_sum (&acc_o)[S::steps],
                           attend_memory<S> &memory)
{
    using M = attend_memory<S>;
    static_assert(sizeof(M) <= (GPU_LANES == 32 ? 65536 : 32768), "two groups have room");
    static_assert(M::round % 4 == 0 && S::per % 4 == 0, "4 neighbouring dims");
    const int32_t lane = this_lane(), column = lane & 15, row = warp.row + column;
    const int g = lane >> 4;
    sync_group(); /* no wave reads keys any more */
    if (g == 0 && warp.dim == 0) {
        memory.row_max[warp.split][row] = row_max;
        memory.row_sum[warp.split][row] = row_sum;
    }
    sync_group(); /* all shares are there */
    float high = memory.row_max[0][row];
#pragma unroll
    for (int s = 1; s < S::splits; s++) {
        high = fmaxf(high, memory.row_max[s][row]);
    }
    const float weight = exp2f(row_max - softmax_base(high));
    const int32_t first = warp.dim / S::out_size * 16 * M::round; /* the warp's first column */
#pragma unroll
    for (int round = 0; round < M::rounds; round++) {
#pragma unroll
        for (int s = 0; s < S::splits; s++) {
            if (warp.split == s) {
#pragma unroll
                for (int t = 0; t < M::round; t++) {
#pragma unroll
                    for (int e = 0; e < MATRIX_ROWS; e++) {
                        float *to = &memory.acc_o[row][first + row_of_sum(e, g) * M::round + t];
                        float x = weight * acc_o[round * M::round + t][e];
                        *to = s == 0 ? x : *to + x;
                    }
                }
            }
            sync_group(); /* a split's share is there */
        }
        write_round<S>(p, r, round, this_thread(), memory);
        if (round + 1 < M::rounds) {
            sync_group(); /* the memory is used again */
        }
    }
    finish_item<S>(p, r, this_thread(), memory);
}

#endif
#endif
