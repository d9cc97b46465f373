# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# The GPUs of this machine by what their drivers' files say, and what the plugins' compilers call them. Sourced; run from the root.
# ATTN_TEST_ROOT stands for / in tests, ATTN_TEST_KFD for /sys/class/kfd.

has_nvidia() {
    for device in "${ATTN_TEST_ROOT:-}"/dev/nvidia[0-9]* "${ATTN_TEST_ROOT:-}"/dev/dxg; do
        case $device in
        */dxg) [ -e "$device" ] && command -v nvidia-smi >/dev/null && return 0 ;; # Windows' kernel
        *) [ ! -e "$device" ] || return 0 ;;
        esac
    done
    return 1
}

# Compute capabilities, one a line (9.0): nvidia-smi's, or the driver's where that is not installed.
nvidia_capabilities() {
    if command -v nvidia-smi >/dev/null; then
        nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    else
        python3 -c '
import ctypes
cuda, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
cuda.cuInit(0)
def ask(call, *arguments):
    return value.value if call(ctypes.byref(value), *arguments) == 0 else 0
for device in range(ask(cuda.cuDeviceGetCount)):
    print("%d.%d" % tuple(ask(cuda.cuDeviceGetAttribute, which, device) for which in (75, 76)))'
    fi 2>/dev/null | grep '^[1-9][0-9]*\.[0-9]$' | sort -u
}

# cuda_flash's targets for these GPUs, as sm_90a,sm_120; none for a GPU that is older than sm_80. What nvcc does not know yet
# runs from the PTX.
nvidia_targets() {
    known=$(nvcc --list-gpu-code 2>/dev/null || true)
    nvidia_capabilities | tr -d . | while read -r capability; do
        case $capability in
        [1-7]?) continue ;;
        90 | 10?) target=sm_${capability}a ;;
        *) target=sm_$capability ;;
        esac
        case "$known" in '' | *"sm_$capability"*) ;; *) target=compute_80 ;; esac
        echo "$target"
    done | sort -u | paste -sd, -
}

# hip's targets by the driver's topology: 90402 is gfx942, 90010 gfx90a, 110000 gfx1100.
hip_archs() {
    sed -n 's/^gfx_target_version \([1-9][0-9]*\)$/\1/p' "${ATTN_TEST_KFD:-${ATTN_TEST_ROOT:-}/sys/class/kfd}"/kfd/topology/nodes/*/properties 2>/dev/null |
        sort -u | while read -r version; do
            printf 'gfx%d%x%x\n' $((version / 10000)) $((version / 100 % 100)) $((version % 100))
        done | paste -sd, -
}

# A card of Intel's whose PCI id is in level_zero's own table.
has_intel() {
    for card in "${ATTN_TEST_ROOT:-}"/sys/class/drm/card[0-9] "${ATTN_TEST_ROOT:-}"/sys/class/drm/card[0-9][0-9]; do
        [ "$(cat "$card/device/vendor" 2>/dev/null)" = 0x8086 ] || continue
        id=$(cat "$card/device/device")
        sed -n 's/^    {\(0x[0-9a-f]*\), \(0x[0-9a-f]*\), "[a-z]*", .*/\1 \2/p' plugins/level_zero/sysfs.c | while read -r first last; do
            [ $((id)) -lt $((first)) ] || [ $((id)) -gt $((last)) ] || echo found
        done | grep -q found && return 0
    done
    return 1
}
