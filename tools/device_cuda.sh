#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a machine with a GPU: builds cuda_flash, holds it to cpu_ref with fresh random inputs, times it and, where it is
# installed, PyTorch. One table on stdout, everything else on stderr. Exit 0 only if all that was checked held.
# usage: tools/device_cuda.sh [BUILD_DIR] [--quick|--full] [SECONDS_OF_SOAK]
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$here/build-cuda}
how=${2:---full}
seconds=${3:-10}
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
case $arch in 90) target=90a ;; *) target=$arch ;; esac
[ -f "$build/build.ninja" ] ||
    meson setup "$build" "$here" -Dcuda-flash=enabled "-Dcuda-archs=sm_$target" >&2 || exit 1
ninja -C "$build" core/libattn.so.1.0.0 tools/attn-check plugins/cpu_ref/attn_cpu_ref.so \
    plugins/cuda_flash/attn_cuda_flash.so >&2 || exit 1
for tool in bench soak; do
    nvcc -std=c++17 -O2 -I "$here/abi" -I "$here/plugins" "-gencode=arch=compute_$arch,code=sm_$arch" \
        "$here/tests/cuda_flash/$tool.cu" -o "$build/cuda_flash_$tool" -ldl || exit 1
done
cc -std=c11 -D_POSIX_C_SOURCE=200809L -I "$here/abi" "$here/tests/cuda_flash/context.c" -o "$build/cuda_flash_context" \
    -ldl || exit 1
LD_LIBRARY_PATH=$build/core
ATTN_PLUGIN_PATH=$build/plugins/cpu_ref:$build/plugins/cuda_flash
export LD_LIBRARY_PATH ATTN_PLUGIN_PATH
plugin=$build/plugins/cuda_flash/attn_cuda_flash.so
seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
failed=0
"$build/cuda_flash_context" "$plugin" >&2 || failed=1
"$build/tools/attn-check" cuda_flash "$how" --seed "$seed" >&2 || failed=1
"$build/cuda_flash_soak" "$plugin" "$build/plugins/cpu_ref/attn_cpu_ref.so" "$seconds" "$seed" >&2 || failed=1
"$build/cuda_flash_bench" "$plugin" || exit 1
if python3 -c 'import torch' 2>/dev/null; then
    python3 "$here/tests/cuda_flash/peers.py" || failed=1
fi
exit $failed
