# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# Sourced by tools/device.sh and tools/device_pack.sh.

# The program that checks cuda_flash's contexts, in BUILD as cuda_flash_context: cuda_program ROOT BUILD.
cuda_program() {
    [ -x "$2/cuda_flash_context" ] ||
        cc -std=c11 -D_POSIX_C_SOURCE=200809L -I "$1/abi" "$1/tests/cuda_flash/context.c" -o "$2/cuda_flash_context" -ldl
}
