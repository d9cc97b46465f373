/* SPDX-License-Identifier: Apache-2.0 */
/* The inverse (I + A)^-1 of a chunk, for rules with a delta. */
#ifndef CUDA_FLASH_SM80_DELTA_INVERSE_CUH
#define CUDA_FLASH_SM80_DELTA_INVERSE_CUH

#include "sm80_delta_keys.cuh"

/* Inverts block BLOCKS - 1 - warp of I + A on the diagonal, of value head `of_pair`. Each half of
 * the warp has a value head and each lane a column; a half that is not `real` stores nothing. */
GPU_INLINE void invert_blocks(prepare_a &a, int32_t of_pair, bool real)
{
    int32_t column = lane_again() & 15, block = BLOCKS - 1 - prepare_warp();
    float x[BLOCK];
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
        x[i] = i == column ? 1.0f : 0.0f;
        float other = 0.0f;
        float row[BLOCK];
#pragma unroll
        for (int j = 0; j < i; j += 4) {
            float4 four = *(const float4 *)&a.diagonal[of_pair].blocks[block][i][j];
            row[j] = four.x, row[j + 1] = four.y, row[j + 2] = four.z, row[j + 3] = four.w;
        }
#pragma unroll
        for (int j = 0; j < i; j++) { /* two sums, so that the newest x is needed last */
            float &sum = j % 2 == i % 2 ? other : x[i];
            sum = fmaf(-row[j], x[j], sum);
        }
        x[i] += other;
    }
    if (real) {
        char *own = (char *)a.blocks[of_pair][number_of_block(block, block)];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            uint32_t out[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                out[i] = pack2<KIND_F16>(x[part * 8 + 2 * i], x[part * 8 + 2 * i + 1]);
            }
            *(uint4 *)(own + block_place(column, part)) =
                make_uint4(out[0], out[1], out[2], out[3]);
        }
    }
}

/* Packs a transposed block of the inverse as a left operand. */
GPU_INLINE void pack_block(uint32_t (&left)[4], const float (&block)[2][4], float factor)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float *two = &block[i >> 1][(i & 1) * 2];
        left[i] = pack2<KIND_F16>(two[0] * factor, two[1] * factor);
    }
}

/* Stores a transposed block of the inverse, times beta. */
GPU_INLINE void store_inverse(chunk_tile &to, int32_t row, int32_t column, const float (&beta)[2],
                              const float (&block)[2][4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int n = i >> 1, half = i & 1;
        *(uint32_t *)((char *)to + place16<CHUNK / 8>(row + half * 8, column * 2 + n) +
                      (lane_again() & 3) * 4) =
            pack2<KIND_F16>(block[n][2 * half] * beta[half], block[n][2 * half + 1] * beta[half]);
    }
}

/* One column of blocks of the inverse T, transposed: T_ij = -T_ii sum_k A_ik T_kj below the
 * diagonal. Blocks on it are rounded to f16 twice, before and after the product with beta. */
GPU_INLINE void invert_column(const prepare_a &a, int32_t of_pair, const float *betas,
                              int32_t column, chunk_tile &to)
{
    int32_t lane = lane_again(), row = column * BLOCK + (lane >> 2);
    constexpr uint32_t apart = sizeof a.blocks[0][0];
    uint32_t blocks = shared_address(a.blocks[of_pair]);
    uint32_t swizzled = blocks + block_place(lane & 15, lane >> 4);
    uint32_t plain = blocks + block_place((lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    uint32_t left[BLOCKS][4];
    float beta[2] = {betas[row], betas[row + 8]}, block[2][4];
    load4(left[0], swizzled + number_of_block(column, column) * apart);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 two = two_floats<KIND_F16>(left[0][i]);
        block[i >> 1][(i & 1) * 2] = two.x, block[i >> 1][(i & 1) * 2 + 1] = two.y;
    }
    store_inverse(to, row, column, beta, block);
#pragma unroll
    for (int m = 1; m < BLOCKS; m++) {
        int32_t at = column + m;
#pragma unroll
        /* cleared even if unused; otherwise it stays live from the start */
        for (int i = 0; i < 4; i++) {
            left[m][i] = 0;
        }
        if (at >= BLOCKS) {
            continue;
        }
        float sum[2][4] = {};
        uint32_t right[4], minus[4];
#pragma unroll
        for (int k = 0; k < m; k++) {
            load4(right, plain + number_of_block(at, column + k) * apart);
            multiply<KIND_F16>(sum[0], left[k], right[0], right[1]);
            multiply<KIND_F16>(sum[1], left[k], right[2], right[3]);
        }
        pack_block(minus, sum, -1.0f);
        load4_transposed(right, swizzled + number_of_block(at, at) * apart);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            block[i / 4][i % 4] = 0.0f;
        }
        multiply<KIND_F16>(block[0], minus, right[0], right[1]);
        multiply<KIND_F16>(block[1], minus, right[2], right[3]);
        pack_block(left[m], block, 1.0f);
        store_inverse(to, row, at, beta, block);
    }
}

#endif
