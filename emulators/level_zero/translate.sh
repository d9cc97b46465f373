#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a library of the host from a module of SPIR-V: its kernels, unchanged, over builtins.c, for ze_driver.c.
# usage: translate.sh LLVM_SPIRV CLANG BUILTINS.c IN.spv OUT.so
set -eu
llvm_spirv=$1
clang=$2
builtins=$3
spirv=$4
out=$5
"$llvm_spirv" -r --spirv-target-env=CL2.0 "$spirv" -o "$out.bc"
# The host's calling convention; parameters come as an address, as a GPU's driver passes them.
"$clang" -w -S -emit-llvm -Xclang -disable-llvm-passes "$out.bc" -o - |
    sed -e 's/\bspir_func \|\bspir_kernel //g' -e '/^define/s/byval([^)]*)//g' >"$out.ll"
# Kernels say how many lanes their subgroups have: !intel_reqd_sub_group_size !N, and !N = !{i32 LANES}
size=$(sed -n 's/.*!intel_reqd_sub_group_size \(![0-9]*\).*/\1/p' "$out.ll" | head -n 1)
lanes=$(sed -n "s/^$size = !{i32 \([0-9]*\)}/\1/p" "$out.ll")
flags="-w -O2 -fPIC -ffp-contract=off -mf16c"
# shellcheck disable=SC2086 # flags are words
"$clang" $flags -c "$out.ll" -o "$out.o"
# shellcheck disable=SC2086
"$clang" $flags "-DLANES=$lanes" -fvisibility=hidden -shared -Wl,-z,defs "$builtins" "$out.o" -o "$out" -lm
