/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of the CUDA ceilings as PTX, which the driver compiles: this tool builds without a
 * CUDA toolkit. Memory is walked in 16-byte words, eight (copies: four) a thread in flight, a grid
 * apart; arithmetic stays in registers, in independent chains. */
#ifndef BENCH_METER_CUDA_PTX_H
#define BENCH_METER_CUDA_PTX_H

/* PTX, laid out as PTX: */
/* clang-format off */
#define PTX_INDEX                                                                                  \
    "mov.u32 %r0, %ctaid.x;\n mov.u32 %r1, %ntid.x;\n mov.u32 %r2, %tid.x;\n"                      \
    "mad.lo.u32 %r3, %r0, %r1, %r2;\n cvt.u64.u32 %d0, %r3;\n"                                     \
    "mov.u32 %r4, %nctaid.x;\n mul.lo.u32 %r4, %r4, %r1;\n cvt.u64.u32 %d1, %r4;\n"                \
    "shl.b64 %d2, %d0, 4;\n shl.b64 %d3, %d1, 4;\n" /* bytes: own offset, distance of words */

#define PTX_LOAD(a, b, c, d)                                                                       \
    "ld.global.cs.v4.u32 {%r" #a ", %r" #b ", %r" #c ", %r" #d "}, [%d5];\n"                       \
    "add.u64 %d5, %d5, %d3;\n"
#define PTX_STORE(a, b, c, d)                                                                      \
    "st.global.cs.v4.u32 [%d6], {%r" #a ", %r" #b ", %r" #c ", %r" #d "};\n"                       \
    "add.u64 %d6, %d6, %d3;\n"
#define PTX_FOLD(a, b, c, d)                                                                       \
    "xor.b32 %r5, %r5, %r" #a ";\n xor.b32 %r5, %r5, %r" #b ";\n xor.b32 %r5, %r5, %r" #c ";\n"    \
    "xor.b32 %r5, %r5, %r" #d ";\n"

/* 32 chains of a fused multiply-add each; PTX_ALL names their registers. */
#define PTX_ALL(X)                                                                                 \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)          \
    X(16) X(17) X(18) X(19) X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31)
#define PTX_SET(i) "add.f32 %f" #i ", %f32, 0f3f800000;\n mov.f32 %f32, %f" #i ";\n"
#define PTX_FMA(i) "fma.rn.f32 %f" #i ", %f" #i ", %f33, %f34;\n"
#define PTX_SUM(i) "add.f32 %f35, %f35, %f" #i ";\n"
/* One m16n8k16 product into four of the sums. */
#define PTX_MMA(a, b, c, d)                                                                        \
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f" #a ", %f" #b ", %f" #c ", %f" #d     \
    "}, {%r6, %r7, %r8, %r9}, {%r10, %r11}, {%f" #a ", %f" #b ", %f" #c ", %f" #d "};\n"

/* A value that is never reached keeps the work alive. */
#define PTX_KEEP_FLOAT                                                                             \
    "mov.f32 %f35, 0f00000000;\n", PTX_ALL(PTX_SUM), "setp.eq.f32 %p1, %f35, 0f7149f2ca;\n"          \
    "@%p1 st.global.f32 [%d4], %f35;\n ret;\n"

/* Parts of one text, each as long as a compiler must take a string. */
static const char *const meter_ptx[] = {
    ".version 7.0\n.target sm_80\n.address_size 64\n"
    ".visible .entry read_all(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".reg .b32 %r<64>;\n.reg .b64 %d<12>;\n.reg .pred %p<3>;\n" PTX_INDEX
    "ld.param.u64 %d4, [from];\n ld.param.u64 %d7, [amount];\n ld.param.u64 %d9, [to];\n"
    "add.u64 %d8, %d4, %d7;\n add.u64 %d4, %d4, %d2;\n mov.u32 %r5, 0;\n"
    "shl.b64 %d10, %d3, 3;\n"
    "READ:\n mov.u64 %d5, %d4;\n" /* the amount is a multiple of eight grids of words */
    PTX_LOAD(16, 17, 18, 19) PTX_LOAD(20, 21, 22, 23) PTX_LOAD(24, 25, 26, 27)
    PTX_LOAD(28, 29, 30, 31) PTX_LOAD(32, 33, 34, 35) PTX_LOAD(36, 37, 38, 39)
    PTX_LOAD(40, 41, 42, 43) PTX_LOAD(44, 45, 46, 47)
    PTX_FOLD(16, 17, 18, 19) PTX_FOLD(20, 21, 22, 23) PTX_FOLD(24, 25, 26, 27)
    PTX_FOLD(28, 29, 30, 31) PTX_FOLD(32, 33, 34, 35) PTX_FOLD(36, 37, 38, 39)
    PTX_FOLD(40, 41, 42, 43) PTX_FOLD(44, 45, 46, 47)
    "add.u64 %d4, %d4, %d10;\n setp.lt.u64 %p0, %d4, %d8;\n @%p0 bra READ;\n"
    "setp.eq.u32 %p1, %r5, 0x12345678;\n @%p1 st.global.u32 [%d9], %r5;\n ret;\n}\n",

    ".visible .entry copy_all(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".reg .b32 %r<64>;\n.reg .b64 %d<12>;\n.reg .pred %p<3>;\n" PTX_INDEX
    "ld.param.u64 %d4, [from];\n ld.param.u64 %d7, [amount];\n ld.param.u64 %d9, [to];\n"
    "add.u64 %d8, %d4, %d7;\n add.u64 %d4, %d4, %d2;\n add.u64 %d9, %d9, %d2;\n"
    "shl.b64 %d10, %d3, 2;\n"
    "COPY:\n mov.u64 %d5, %d4;\n mov.u64 %d6, %d9;\n"
    PTX_LOAD(16, 17, 18, 19) PTX_LOAD(20, 21, 22, 23) PTX_LOAD(24, 25, 26, 27)
    PTX_LOAD(28, 29, 30, 31)
    PTX_STORE(16, 17, 18, 19) PTX_STORE(20, 21, 22, 23) PTX_STORE(24, 25, 26, 27)
    PTX_STORE(28, 29, 30, 31)
    "add.u64 %d4, %d4, %d10;\n add.u64 %d9, %d9, %d10;\n"
    "setp.lt.u64 %p0, %d4, %d8;\n @%p0 bra COPY;\n ret;\n}\n",

    ".visible .entry fma_all(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".reg .b32 %r<16>;\n.reg .b64 %d<12>;\n.reg .f32 %f<36>;\n.reg .pred %p<3>;\n"
    "ld.param.u64 %d4, [to];\n ld.param.u64 %d7, [amount];\n"
    "mov.u32 %r2, %tid.x;\n cvt.rn.f32.u32 %f32, %r2;\n" 
    PTX_ALL(PTX_SET),
    "mov.f32 %f33, 0f3f000000;\n mov.f32 %f34, 0f3a83126f;\n"
    "FMA:\n",
    PTX_ALL(PTX_FMA), PTX_ALL(PTX_FMA),
    "sub.u64 %d7, %d7, 1;\n setp.ne.u64 %p0, %d7, 0;\n @%p0 bra FMA;\n" PTX_KEEP_FLOAT "}\n",

    ".visible .entry mma_all(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".reg .b32 %r<16>;\n.reg .b64 %d<12>;\n.reg .f32 %f<36>;\n.reg .pred %p<3>;\n"
    "ld.param.u64 %d4, [to];\n ld.param.u64 %d7, [amount];\n"
    "mov.u32 %r2, %tid.x;\n cvt.rn.f32.u32 %f32, %r2;\n" 
    PTX_ALL(PTX_SET),
    "mov.u32 %r6, 0x3f003e80;\n mov.u32 %r7, 0xbf003e80;\n mov.u32 %r8, 0x3f00be80;\n"
    "mov.u32 %r9, 0x3e803e80;\n mov.u32 %r10, 0x3f80bf00;\n mov.u32 %r11, 0xbf803f00;\n"
    "MMA:\n"
    PTX_MMA(0, 1, 2, 3) PTX_MMA(4, 5, 6, 7) PTX_MMA(8, 9, 10, 11) PTX_MMA(12, 13, 14, 15)
    PTX_MMA(16, 17, 18, 19) PTX_MMA(20, 21, 22, 23) PTX_MMA(24, 25, 26, 27)
    PTX_MMA(28, 29, 30, 31)
    "sub.u64 %d7, %d7, 1;\n setp.ne.u64 %p0, %d7, 0;\n @%p0 bra MMA;\n" PTX_KEEP_FLOAT "}\n"};
/* clang-format on */

#endif
