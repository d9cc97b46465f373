# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# Sourced by tools/device.sh and tools/device_pack.sh.

# The programs that check cuda_flash by itself, in BUILD as cuda_flash_NAME: cuda_programs ROOT BUILD, of tests/cuda_flash/context.c
# and prefill_cell.c.
cuda_programs() {
    root=$1 into=$2
    [ -x "$into/cuda_flash_context" ] ||
        cc -std=c11 -D_POSIX_C_SOURCE=200809L -I "$root/abi" "$root/tests/cuda_flash/context.c" -o "$into/cuda_flash_context" -ldl ||
        return 1
    [ -f "$into/cuda_flash_cell.so" ] ||
        cc -std=c11 -O2 -D_POSIX_C_SOURCE=200809L -shared -fPIC -I "$root/abi" -I "$root/plugins" \
            "$root/tests/cuda_flash/prefill_cell.c" -o "$into/cuda_flash_cell.so" -ldl
}
