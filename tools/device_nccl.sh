#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a machine with two GPUs or more: libattn_nccl's table, then layers of cuda_flash spread over the GPUs next to the
# same layers on one, and the time of a long request's decode both ways. First the kernels of its windows, on one GPU.
# NCCL is taken from NCCL_HOME, else where Python's nvidia-nccl package has it, else the system's.
# Exit 0 if all held, 77 where there are fewer GPUs.
# usage: tools/device_nccl.sh [BUILD_DIR] [RANKS]    a build with core/ and plugins/cuda_flash; made if it is not there
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
build=${1:-$here/build-cuda}
ranks=${2:-2}
if [ ! -f "$build/core/libattn.so.1" ]; then
    arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 | tr -d .)
    case $arch in 90) target=90a ;; *) target=$arch ;; esac
    meson setup "$build" "$here" -Dcuda-flash=enabled "-Dcuda-archs=sm_$target" -Dtests=disabled >&2 &&
        ninja -C "$build" core/libattn.so.1.0.0 plugins/cuda_flash/attn_cuda_flash.so >&2 || exit 1
fi
build=$(cd "$build" && pwd)
nccl=${NCCL_HOME:-$(python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2>/dev/null)}
cuda=${CUDA_HOME:-$(dirname "$(dirname "$(realpath "$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)")")")}
[ -f "$cuda/include/cuda_runtime.h" ] || cuda=/usr/local/cuda
library=-lnccl
[ -f "$nccl/lib/libnccl.so.2" ] && library=$nccl/lib/libnccl.so.2
set -- -std=c11 -D_GNU_SOURCE -O2 -Wall -Wextra -Wno-unused-parameter -I "$here/abi" -I "$here/tools" -isystem "$cuda/include" ${nccl:+-isystem "$nccl/include"}
cudart="-L $cuda/lib64 -lcudart_static -ldl -lrt -lpthread -lm"
tests=$here/tests/collectives
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086
"$cuda/bin/nvcc" -std=c++17 -O3 -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics -arch=native \
    -c "$here/collectives/exchange.cu" -o "$work/exchange.o" &&
    cc "$@" -DCOLLECTIVES_PEER_MEMORY -fPIC -shared -fvisibility=hidden "$here/collectives/nccl.c" "$here/collectives/peer_memory.c" \
        "$work/exchange.o" -o "$work/libattn_nccl.so.0" "$library" $cudart &&
    cc "$@" "$tests/nccl_exchange.c" "$here/tools/support/number.c" "$work/exchange.o" -o "$work/nccl_exchange" $cudart &&
    cc "$@" "$tests/nccl_ranks.c" "$tests/nccl_layer.c" "$tests/nccl_spread.c" "$tests/nccl_speed.c" "$here/tools/support/client.c" \
        -o "$work/nccl_ranks" "$work/libattn_nccl.so.0" "$library" $cudart || exit 1
LD_LIBRARY_PATH=$work${nccl:+:$nccl/lib}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0}
export LD_LIBRARY_PATH NCCL_NVLS_ENABLE
"$work/nccl_exchange" && "$work/nccl_ranks" "$ranks" "$build/core/libattn.so.1" "$build/plugins/cuda_flash"
