#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Consumer GPUs run the kernels of sm_80, and no machine with one runs the tests: nvcc compiles them for one architecture, and
# no kernel spills more bytes than the list says, which is CUDA 13's. What spills are a call's registers or addresses that
# a loop keeps. Of bf16 kernels, registers (in units of 8) and threads leave room for two CTAs of a multiprocessor where
# the rooms' READMEs count on two: heads up to 128 dims in prefill, up to 64 in decode. 77: nvcc does not know the
# architecture.
# usage: spills.sh NVCC SOURCE_ROOT ARCH [KIND...]
set -eu
nvcc=$1
root=$2
arch=$3
shift 3
"$nvcc" --list-gpu-code | grep -qx "$arch" || {
    echo "spills.sh: this nvcc knows no $arch" >&2
    exit 77
}
[ $# -gt 0 ] || set -- prefill_bf16 prefill_f16 prefill_e4m3 prefill_e5m2 bf16 f16 f32 e4m3 e5m2 int8 int4 nvfp4 k8v4 levels
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for kind; do
    case $arch-$kind in
    sm_120-int8) most=72 ;;
    sm_120-levels) most=64 ;;
    sm_86-levels | sm_89-levels) most=52 ;;
    sm_120-int4) most=48 ;;
    sm_120-nvfp4 | sm_86-prefill_e?m? | sm_89-prefill_e?m?) most=16 ;;
    sm_120-e4m3 | sm_120-e5m2 | sm_120-f32) most=4 ;;
    *) most=0 ;;
    esac
    unit=ATTEND
    source=decode/sm80_attend.cu
    case $kind in
    prefill_*)
        unit=PREFILL
        source=prefill/sm80_prefill.cu
        ;;
    esac
    upper=$(echo "${kind#prefill_}" | tr '[:lower:]' '[:upper:]')
    "$nvcc" -x cu -std=c++17 -O3 -I "$root/abi" -I "$root/plugins" -arch="$arch" -cubin -Xptxas -v \
        --keep --keep-dir "$work" "-D${unit}_KIND=KIND_$upper" "-D${unit}_LAUNCH=launch_$kind" -o "$work/cubin" \
        "$root/plugins/cuda_flash/$source" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
    # A function's bytes stand in the line after its name; functions that kernels call have mangled names with _ZN. PTX has
    # the threads.
    awk -v most=$most -v what="$arch $kind" '/[.]entry/ { entry = $3; sub(/[(].*/, "", entry) }
        $1 == ".maxntid" { threads[entry] = $2 + 0 }
        /Function properties for/ { name = $NF }
        /bytes spill stores/ && name ~ /^_Z(6attend|7prefill)/ { kernels++
            if ($5 + 0 > most) { print what ": " name " spills " $5 " bytes, " most " are known"; bad = 1 } }
        / Used [0-9]+ registers/ && what ~ /bf16$/ && name ~ /^_Z(6attend|7prefill)I/ {
            ctas = name ~ /shapeILi(64|128)E|attendILi[0-9]+ELi64E/ ? 2 : 1
            if (!threads[name] || int(($5 + 7) / 8) * 8 * threads[name] * ctas > 65536) {
                print what ": " name " has " $5 " registers, too many for " ctas " x " threads[name] " threads"; bad = 1 } }
        END { if (!kernels) { print what ": no kernels"; bad = 1 } exit bad }' "$work"/sm80_*.ptx "$work/log" >&2 || failed=1
done
exit $failed
