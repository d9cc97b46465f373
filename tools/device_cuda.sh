#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a machine with a GPU: builds cuda_flash, holds it to cpu_ref, times it. One table on stdout.
# usage: tools/device_cuda.sh [BUILD_DIR] [--quick|--full]
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$here/build-cuda}
how=${2:---full}
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
case $arch in 90) target=90a ;; *) target=$arch ;; esac
[ -f "$build/build.ninja" ] ||
    meson setup "$build" "$here" -Dcuda-flash=enabled "-Dcuda-archs=sm_$target" >&2 || exit 1
ninja -C "$build" >&2 || exit 1
nvcc -std=c++17 -O2 -I "$here/abi" "-gencode=arch=compute_$arch,code=sm_$arch" \
    "$here/tests/cuda_flash/bench.cu" -o "$build/cuda_flash_bench" -ldl || exit 1
LD_LIBRARY_PATH=$build/core
ATTN_PLUGIN_PATH=$build/plugins/cpu_ref:$build/plugins/cuda_flash
export LD_LIBRARY_PATH ATTN_PLUGIN_PATH
"$build/tools/attn-check" cuda_flash "$how"
checked=$?
"$build/cuda_flash_bench" "$build/plugins/cuda_flash/attn_cuda_flash.so" || exit 1
exit $checked
