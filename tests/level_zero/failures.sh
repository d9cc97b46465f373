#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What is wrong with a machine is said: in attn-info, where a probe can see it, else when the backend is bound.
# usage: failures.sh TOOLS_FOLDER DRM_FOLDER MODELS_FOLDER OLD_LOADER.c COMPILER...
set -eu
tools=$1
drm=$2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
export ATTN_CACHE_DIR="$root/cache" ATTN_TEST_DRM="$drm/pvc"
failed=0
old="$root/old"
models=$3
old_source=$4
shift 4
mkdir "$root/broken" "$old"
LD_PRELOAD="" "$@" -shared -fPIC "$old_source" -o "$old/libze_loader.so.1"
echo "no library" >"$root/broken/libze_loader.so.1"

# expect STATUS TEXT COMMAND...: the command ends with the status, having said the text.
expect() {
    wanted=$1
    text=$2
    shift 2
    rm -rf "$root/cache"
    status=0
    "$@" >"$root/out" 2>&1 || status=$?
    if [ "$status" -ne "$wanted" ] || ! grep -q "$text" "$root/out"; then
        echo "failures: '$*' ended with $status, not $wanted, or did not say '$text':" >&2
        tail -5 "$root/out" >&2
        failed=1
    fi
}

info="$tools/attn-info"
check="$tools/attn-check level_zero --quick --filter merge_states.f32*"
run="env ATTN_BACKEND=level_zero $tools/attn-run --model $models/llama-3.1-8b.json --layers 1 --steps 1"
# shellcheck disable=SC2086
{
    expect 0 'no Level Zero loader: ' env LD_LIBRARY_PATH="$root/broken" "$info"
    expect 0 'has no zeDriverGet: Level Zero 1.4 or later' env LD_LIBRARY_PATH="$old" "$info"
    expect 0 'no graphics driver: /sys/class/drm' env ATTN_TEST_DRM=/nowhere "$info"
    expect 0 'no Intel GPU in ' env ATTN_TEST_DRM="$drm" "$info"
    expect 0 'Intel GPU 9a49 is of no family that is served' env ATTN_TEST_DRM="$drm/unknown" "$info"
    expect 0 'ZE_AFFINITY_MASK hides every Intel GPU' env ZE_AFFINITY_MASK=3 "$info"
    expect 0 'level_zero 0.1.0' env ZE_AFFINITY_MASK=0.1 "$info"
    expect 1 'no Level Zero driver is installed' env ATTN_TEST_ZE=no_driver $check
    expect 1 'the device has no double' env ATTN_TEST_ZE=no_double $check
    expect 1 'groups of 512 threads; the kernels need 1024' env ATTN_TEST_ZE=small_groups $check
    expect 1 'MODULE_BUILD_FAILURE: spilled beyond what there is' env ATTN_TEST_ZE=broken_module $check
    expect 1 'ERROR_DEVICE_LOST: the device hung, was reset or removed' env ATTN_TEST_ZE=lost $run
    expect 1 'of the memory of device 0; ' env ATTN_TEST_ZE=little_memory $run
    expect 0 ' 0 failed, 0 skipped' env ATTN_TEST_ZE=no_half $check # which the kernels do without
}
exit $failed
