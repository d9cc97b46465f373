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
    "sub.u64 %d7, %d7, 1;\n setp.ne.u64 %p0, %d7, 0;\n @%p0 bra MMA;\n" PTX_KEEP_FLOAT "}\n",
    NULL};

/* One m64n256k16 product of a warp group into 128 sums. */
#define PTX_EIGHT(i)                                                                               \
    "%s" #i "_0, %s" #i "_1, %s" #i "_2, %s" #i "_3, %s" #i "_4, %s" #i "_5, %s" #i "_6, %s" #i "_7"
#define PTX_WGMMA                                                                                  \
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" PTX_EIGHT(0) ", " PTX_EIGHT(1) ", "  \
    PTX_EIGHT(2) ", " PTX_EIGHT(3) ", " PTX_EIGHT(4) ", " PTX_EIGHT(5) ", " PTX_EIGHT(6) ", "      \
    PTX_EIGHT(7) ", " PTX_EIGHT(8) ", " PTX_EIGHT(9) ", " PTX_EIGHT(10) ", " PTX_EIGHT(11) ", "    \
    PTX_EIGHT(12) ", " PTX_EIGHT(13) ", " PTX_EIGHT(14) ", " PTX_EIGHT(15) "}, %d5, %d6, %p1, 1, " \
    "1, 0, 0;\n add.u64 %d5, %d5, 2;\n add.u64 %d6, %d6, 2;\n setp.eq.u32 %p1, 0, 0;\n"
#define PTX_SUMS(i) ".reg .f32 %s" #i "_<8>;\n"

/* Begins a bulk copy of the next 8 KiB into a slot, if any are left. */
#define PTX_BULK                                                                                   \
    "setp.lt.u64 %p0, %d4, %d8;\n"                                                                 \
    "@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 8192;\n"                                  \
    "@%p0 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [%d4], 8192, "  \
    "[%r4];\n add.u64 %d4, %d4, %d3;\n"
#define PTX_NEXT_SLOT "add.u32 %r3, %r3, 8192;\n add.u32 %r4, %r4, 8;\n"
#define PTX_FIRST_SLOT "mov.u32 %r3, slots;\n mov.u32 %r4, arrived;\n"
#define PTX_FIRST_BULK                                                                             \
    "mbarrier.init.shared.b64 [%r4], 1;\n fence.proxy.async;\n" PTX_BULK PTX_NEXT_SLOT

/* Compute capability 9.0. wgmma_all: 64 and 256 rows of 64 numbers with a swizzle of 128 bytes (8
 * KiB and 32 KiB of random numbers), whose products every warp group sums again and again.
 * read_bulk: a thread copies 8 KiB at a time into five slots. */
static const char *const meter_sm90_ptx[] = {
    ".version 8.0\n.target sm_90a\n.address_size 64\n"
    ".visible .entry wgmma_all(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".shared .align 1024 .b8 tiles[40960];\n"
    ".reg .b32 %r<16>;\n.reg .b64 %d<12>;\n.reg .pred %p<3>;\n"
    PTX_SUMS(0) PTX_SUMS(1) PTX_SUMS(2) PTX_SUMS(3) PTX_SUMS(4) PTX_SUMS(5) PTX_SUMS(6) PTX_SUMS(7)
    PTX_SUMS(8) PTX_SUMS(9) PTX_SUMS(10) PTX_SUMS(11) PTX_SUMS(12) PTX_SUMS(13) PTX_SUMS(14)
    PTX_SUMS(15)
    "ld.param.u64 %d0, [from];\n ld.param.u64 %d4, [to];\n ld.param.u64 %d7, [amount];\n"
    "mov.u32 %r2, %tid.x;\n shl.b32 %r2, %r2, 4;\n cvt.u64.u32 %d1, %r2;\n"
    "add.u64 %d0, %d0, %d1;\n mov.u32 %r3, tiles;\n add.u32 %r4, %r3, %r2;\n mov.u32 %r5, 10;\n"
    "FILL:\n ld.global.v4.u32 {%r8, %r9, %r10, %r11}, [%d0];\n"
    "st.shared.v4.u32 [%r4], {%r8, %r9, %r10, %r11};\n add.u64 %d0, %d0, 4096;\n"
    "add.u32 %r4, %r4, 4096;\n sub.u32 %r5, %r5, 1;\n setp.ne.u32 %p0, %r5, 0;\n"
    "@%p0 bra FILL;\n fence.proxy.async;\n bar.sync 0;\n"
    /* descriptors: address, 1024 bytes between groups of eight rows, the swizzle */
    "shr.u32 %r3, %r3, 4;\n cvt.u64.u32 %d2, %r3;\n or.b64 %d2, %d2, 0x4000004000010000;\n"
    "add.u64 %d3, %d2, 512;\n setp.ne.u32 %p1, 0, 0;\n",
    "WGMMA:\n mov.u64 %d5, %d2;\n mov.u64 %d6, %d3;\n wgmma.fence.sync.aligned;\n",
    PTX_WGMMA, PTX_WGMMA, PTX_WGMMA, PTX_WGMMA,
    "wgmma.commit_group.sync.aligned;\n wgmma.wait_group.sync.aligned 0;\n"
    "sub.u64 %d7, %d7, 1;\n setp.ne.u64 %p0, %d7, 0;\n @%p0 bra WGMMA;\n"
    "setp.eq.f32 %p2, %s0_0, 0f7149f2ca;\n @%p2 st.global.f32 [%d4], %s0_0;\n ret;\n}\n",

    ".visible .entry read_bulk(.param .u64 from, .param .u64 to, .param .u64 amount) {\n"
    ".shared .align 128 .b8 slots[40960];\n.shared .align 8 .b64 arrived[5];\n"
    ".reg .b32 %r<16>;\n.reg .b64 %d<12>;\n.reg .pred %p<3>;\n"
    "mov.u32 %r2, %tid.x;\n setp.ne.u32 %p0, %r2, 0;\n @%p0 ret;\n"
    "ld.param.u64 %d4, [from];\n ld.param.u64 %d7, [amount];\n add.u64 %d8, %d4, %d7;\n"
    "mov.u32 %r0, %ctaid.x;\n mul.wide.u32 %d2, %r0, 8192;\n add.u64 %d4, %d4, %d2;\n"
    "mov.u32 %r0, %nctaid.x;\n mul.wide.u32 %d3, %r0, 8192;\n mov.u64 %d5, %d4;\n" PTX_FIRST_SLOT
    PTX_FIRST_BULK PTX_FIRST_BULK PTX_FIRST_BULK PTX_FIRST_BULK PTX_FIRST_BULK,
    PTX_FIRST_SLOT "mov.u32 %r5, 0;\n mov.u32 %r6, 0;\n" /* slot, phase */
    "WAIT:\n setp.ge.u64 %p0, %d5, %d8;\n @%p0 ret;\n"
    "TRY:\n mbarrier.try_wait.parity.shared.b64 %p1, [%r4], %r6;\n @!%p1 bra TRY;\n" PTX_BULK
    "add.u64 %d5, %d5, %d3;\n" PTX_NEXT_SLOT "add.u32 %r5, %r5, 1;\n"
    "setp.lt.u32 %p0, %r5, 5;\n @%p0 bra WAIT;\n" PTX_FIRST_SLOT
    "mov.u32 %r5, 0;\n xor.b32 %r6, %r6, 1;\n bra WAIT;\n}\n",
    NULL};
/* clang-format on */

#endif
