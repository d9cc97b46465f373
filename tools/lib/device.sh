# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# Sourced by tools/device.sh and tools/device_pack.sh.

# The programs that check and time cuda_flash by itself, in BUILD: cuda_programs ROOT BUILD. PTX of the oldest GPU that
# the plugin serves, which every newer one takes.
cuda_programs() {
    for tool in host soak; do
        [ -x "$2/cuda_flash_$tool" ] ||
            nvcc -std=c++17 -O2 -I "$1/abi" -I "$1/plugins" -gencode=arch=compute_80,code=compute_80 \
                "$1/tests/cuda_flash/$tool.cu" -o "$2/cuda_flash_$tool" -ldl || return 1
    done
    [ -x "$2/cuda_flash_context" ] ||
        cc -std=c11 -D_POSIX_C_SOURCE=200809L -I "$1/abi" "$1/tests/cuda_flash/context.c" -o "$2/cuda_flash_context" -ldl ||
        return 1
    [ -f "$2/cuda_flash_cell.so" ] ||
        cc -std=c11 -O2 -D_POSIX_C_SOURCE=200809L -shared -fPIC -I "$1/abi" -I "$1/plugins" \
            "$1/tests/cuda_flash/prefill_cell.c" -o "$2/cuda_flash_cell.so" -ldl
}
