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
old="$root/old"
models=$3
old_source=$4
shift 4
mkdir "$root/broken" "$old"
LD_PRELOAD="" "$@" -shared -fPIC "$old_source" -o "$old/libze_loader.so.1"
echo "no library" >"$root/broken/libze_loader.so.1"

. "$(dirname "$0")/../tools/expect.sh"

# says STATUS TEXT COMMAND...: with an empty cache
says() {
    rm -rf "$root/cache"
    expect "$@"
}

info="$tools/attn-info"
check="$tools/attn-check level_zero --quick --filter merge_states.f32*"
run="env ATTN_BACKEND=level_zero $tools/attn-run --model $models/llama-3.1-8b.json --layers 1 --steps 1"
# shellcheck disable=SC2086
{
    says 0 'no Level Zero loader: ' env LD_LIBRARY_PATH="$root/broken" "$info"
    says 0 'has no zeDriverGet: Level Zero 1.4 or later' env LD_LIBRARY_PATH="$old" "$info"
    says 0 'no graphics driver: /sys/class/drm' env ATTN_TEST_DRM=/nowhere "$info"
    says 0 'no Intel GPU in ' env ATTN_TEST_DRM="$drm" "$info"
    says 0 'Intel GPU 9a49 is of no family that is served' env ATTN_TEST_DRM="$drm/unknown" "$info"
    says 0 'ZE_AFFINITY_MASK hides every Intel GPU' env ZE_AFFINITY_MASK=3 "$info"
    says 0 'level_zero 0.1.0' env ZE_AFFINITY_MASK=0.1 "$info"
    says 1 'no Level Zero driver is installed' env ATTN_TEST_ZE=no_driver $check
    says 1 'the device has no double' env ATTN_TEST_ZE=no_double $check
    says 1 'groups of 512 threads; the kernels need 1024' env ATTN_TEST_ZE=small_groups $check
    says 1 'MODULE_BUILD_FAILURE: spilled beyond what there is' env ATTN_TEST_ZE=broken_module $check
    says 1 'ERROR_DEVICE_LOST: the device hung, was reset or removed' env ATTN_TEST_ZE=lost $run
    says 1 'of the memory of device 0; ' env ATTN_TEST_ZE=little_memory $run
    says 0 ' 0 failed, 0 skipped' env ATTN_TEST_ZE=no_half $check # which the kernels do without
    says 0 '^ *[0-9.]*[1-9][0-9.]* us  merge_states.f32.plain.d72$' $check --bench
}
exit $failed
