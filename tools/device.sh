#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# On a machine with a GPU: builds a backend and runs there what a newcomer would (demo.sh's commands), every model and
# recording, the examples, the Python client and attn-bench, what goes wrong, and attn-check with fresh random inputs;
# then it times the kernels. A line for each check on stdout, and the end of the output of those that failed on stderr.
# The last line counts: `N passed, N failed, N skipped`. Exit 0 only if none failed.
# usage: tools/device.sh BACKEND [BUILD_DIR] [--quick|--full|--newcomer|--kernels|--smoke]
#   --newcomer leaves attn-check and the timing out; --kernels runs only these, attn-check --quick and batch-invariant
#   layers, each request alone and among others; --smoke is one small check of each kind
# BUILD_DIR may be what tools/device_pack.sh made on another machine. Logs of all checks are kept in $OUT, where that is set.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
usage='usage: tools/device.sh BACKEND [BUILD_DIR] [--quick|--full|--newcomer|--kernels|--smoke]'
backend=${1:?$usage}
shift
build=$here/build-$backend
case ${1:---} in
--*) ;;
*)
    build=$(realpath -m "$1")
    shift
    ;;
esac
how=${1:---full}
case $how in
--quick | --full | --newcomer | --kernels | --smoke) ;;
*)
    echo "$usage" >&2
    exit 2
    ;;
esac
seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$here" || exit 1
. tools/lib/demo.sh
. tools/lib/gpus.sh
passed=0 failed=0 skipped=0

# Counts one result: pass|fail|skip NAME [LOG]
count() {
    case $1 in
    pass) passed=$((passed + 1)) ;;
    skip) skipped=$((skipped + 1)) ;;
    *)
        failed=$((failed + 1))
        echo "---- $2" >&2
        tail -n 25 "$3" >&2
        ;;
    esac
    echo "$1  $2"
}

# keep NAME: the last check's output
keep() {
    [ -z "${OUT:-}" ] || { echo "== $1"; cat "$work/log"; } >>"$OUT/device.txt"
}

# A command that has to succeed: check NAME COMMAND...
check() {
    name=$1
    shift
    status=0
    "$@" >"$work/log" 2>&1 || status=$?
    keep "$name"
    case $status in 0) count pass "$name" ;; 77) count skip "$name" ;; *) count fail "$name (status $status)" "$work/log" ;; esac
}

# One that has to end with STATUS and say TEXT: refuses NAME STATUS TEXT COMMAND...
refuses() {
    name=$1 wanted=$2 text=$3
    shift 3
    status=0
    "$@" >"$work/log" 2>&1 || status=$?
    keep "$name"
    if [ $status -eq "$wanted" ] && grep -q -- "$text" "$work/log"; then
        count pass "$name"
    else
        count fail "$name (status $status, or without '$text')" "$work/log"
    fi
}

prepare_cuda_flash() {
    device=cuda
    hide=CUDA_VISIBLE_DEVICES= # a process with this sees no device
    [ -f "$build/build.ninja" ] ||
        meson setup "$build" "$here" -Dcuda-flash=enabled "-Dcuda-archs=$(nvidia_targets)" >&2 || exit 1
}

kernels_cuda_flash() {
    if ! command -v python3 >/dev/null; then
        count skip "contexts and prefill against float64: no python3"
        return
    fi
    python3 bindings/python/generate.py || exit 1 # a prebuilt folder brings none of the checkout's files
    set -- env "PYTHONPATH=bindings/python/src:tests/python" "LD_LIBRARY_PATH=$build/core" "ATTN_PLUGIN_PATH=$plugin" python3
    check "contexts" "$@" tests/cuda_flash/context.py
    if python3 -c 'import torch' 2>/dev/null; then
        for what in alone check; do
            check "prefill.py --$what" "$@" tests/cuda_flash/prefill.py --seed "$seed" "--$what"
        done
    else
        count skip "prefill against float64: PyTorch computes it"
    fi
}

time_cuda_flash() {
    set -- "$build/tools/attn-bench" --backend cuda_flash
    "$@" --shape decode:r=64,l=8192,block=16+64 --shape decode:r=128,l=16384,block=64 --shape decode:r=8,l=32768,block=64 \
        --shape decode:r=2+4+8,l=8192,block=64 --shape decode:r=64+256,l=1024,block=64 \
        --shape decode:r=1,l=1024+8192+32768,block=64,write=0+1 --shape decode:r=8+64,l=8192,block=64,write=1 \
        --shape decode:r=64,l=8192,block=64,hq=64 --shape decode:r=256,l=8192,block=64,window=1024 \
        --shape decode:r=1+64,l=8192,block=64,sinks=1 --shape decode:r=1+64,l=8192,block=64,softcap=50 \
        --shape decode:r=1+64,l=8192,block=64,s=4 --shape decode:r=1,l=8192,block=64,d=64 \
        --shape decode:r=2+64,l=8192,block=64,skew=1 --shape prefill:r=8,s=2048,block=64 --shape prefill:r=1,s=16384,block=64 \
        --shape prefill:r=2,s=8192,causal=0+1 --shape prefill:r=2,s=8192,d=64+256 \
        --shape prefill:r=2,s=8192,softcap=50 --shape prefill:r=2,s=8192,alibi=1 --shape prefill:r=2,s=8192,invariant=1 \
        --shape prefill:r=1,s=64+512,l=8704,block=16 \
        --shape mla:r=1+32,l=4096+32768,hq=16+128,block=64 --shape mla:r=128,l=4096,hq=128,s=1+2,block=64,absorb=1 \
        --shape mla_sparse:r=1+128,l=4096,hq=128,block=64 --shape gdn:r=8,s=1+4096 --shape gdn:r=1,s=8192 \
        --shape dispatch:r=256,l=1024,hq=32,hkv=8,d=128 --shape write:s=65536,block=64 || count fail "timing" /dev/null
    "$@" --kv-dtype fp8_e4m3 --shape decode:r=1+64,l=8192,block=64 --shape decode:r=256,l=32768,block=64 \
        --shape prefill:r=2,s=8192,block=64 --shape write:s=65536,block=64 || count fail "timing over fp8" /dev/null
}

prepare_hip() {
    device=rocm
    hide=HIP_VISIBLE_DEVICES=
    [ -f "$build/build.ninja" ] ||
        meson setup "$build" "$here" -Dhip=enabled "-Dhip-archs=$(hip_archs)" >&2 || exit 1 # none: no GPU
}

kernels_hip() {
    check "probe and selection" "$build/tools/attn-info" --devices --explain --model models/llama-3.1-8b.json
}

# Next to the memory's and the matrix units' rates, measured in the same run.
time_hip() {
    "$build/tools/attn-bench" --backend hip --shape decode:r=1+8+64,l=1024+8192 --shape prefill:r=1,s=2048+8192 \
        --shape decode:d=64 --shape write --shape merge || count fail "timing" /dev/null
    "$build/tools/attn-bench" --backend hip --kv-dtype fp8_e4m3 --shape decode:r=64,l=8192 || count fail "timing, fp8" /dev/null
}

case $backend in
cuda_flash) prepare_cuda_flash ;;
hip) prepare_hip ;;
*)
    echo "device.sh: $backend: known are cuda_flash and hip" >&2
    exit 2
    ;;
esac
if [ -s "$build/build.ninja" ] || [ ! -f "$build/build.ninja" ]; then
    ninja -C "$build" >"$work/build" 2>&1 || { tail -n 30 "$work/build" >&2; exit 1; }
else # packed
    LD_LIBRARY_PATH=$build/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
fi
plugin=$build/plugins/$backend/attn_$backend.so
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_VALIDATE
ATTN_CACHE_DIR=$work/cache
export ATTN_CACHE_DIR
run=$build/tools/attn-run

newcomer() {
    demo_commands check "$build"
    # All models at once: what is compared is computed on the CPU.
    for model in models/*.json; do
        name=$(basename "$model" .json)
        (
            status=0
            "$run" --model "$model" --layers 2 --steps 3 --seed "$seed" --verify >"$work/$name" 2>&1 || status=$?
            echo $status >"$work/$name.status"
        ) &
    done
    wait
    for model in models/*.json; do
        name=$(basename "$model" .json)
        if [ "$(cat "$work/$name.status")" -eq 0 ] && grep -q "^on $device:0" "$work/$name"; then
            count pass "$name: $(tail -n 1 "$work/$name")"
        elif grep -q 'no layer kind describes' "$work/$name"; then
            count skip "$name is refused: $(tail -n 1 "$work/$name")"
        elif grep -q "no backend can serve it.*$backend: " "$work/$name"; then
            count skip "$name is not served: $(grep -o "$backend: [^;]*" "$work/$name" | head -n 1)"
            check "$name on the CPU by ATTN_BACKEND" env 'ATTN_BACKEND=cpu_*' "$run" --model "$model" --layers 1 \
                --steps 2 --scale 0.1 --verify
        else
            count fail "$name" "$work/$name"
        fi
    done
    check "validated" env ATTN_VALIDATE=1 "$run" --model models/gpt-oss-20b.json --layers 2 --steps 3 --scale 0.2 --verify
    refuses "ATTN_BACKEND moves attn-run to the CPU" 0 '^on cpu:0' env ATTN_BACKEND=cpu_simd "$run" \
        --model models/llama-3.1-8b.json --layers 1 --steps 2 --scale 0.1 --verify
    check "examples/engine" "$build/examples/engine" "$build/core/libattn.so.1"
    check "examples/spmd" "$build/examples/spmd" "$build/core/libattn.so.1"
    refuses "examples/plugin" 0 'served by example' env "ATTN_PLUGIN_PATH=$build/examples/attn_example.so" \
        ATTN_BACKEND=example "$build/examples/engine" "$build/core/libattn.so.1"
    refuses "an engine on the CPU is not moved" 1 'device cpu:0' env "ATTN_BACKEND=$backend" "$build/examples/engine" \
        "$build/core/libattn.so.1"
}

smoke() {
    check "probe and selection" "$build/tools/attn-info" --devices --explain --model models/llama-3.1-8b.json
    refuses "a layer of Llama 3.1 8B on the device" 0 "^on $device:0" "$run" --model models/llama-3.1-8b.json --layers 1 \
        --steps 2 --scale 0.02 --verify
    check "attn-check: merges" "$build/tools/attn-check" "$backend" --quick --filter 'merge_states*' --part 1/6 --seed "$seed"
    check "attn-bench: a short decode" "$build/tools/attn-bench" --backend "$backend" --shape decode:r=1,l=64,hq=4,hkv=1,d=64
    echo "$passed passed, $failed failed, $skipped skipped"
    exit $((failed > 0))
}

# Memory that another process has taken, all but 300 MB.
fill_device() {
    python3 -c '
import sys, time, torch
free = torch.cuda.mem_get_info()[0]
torch.empty(max(0, free - (300 << 20)), dtype=torch.uint8, device="cuda")
print("full", flush=True)
time.sleep(120)' >"$work/filler" 2>&1 &
    filler=$!
    for _ in $(seq 60); do
        grep -q full "$work/filler" && break
        sleep 0.5
    done
}

wrong() {
    refuses "no device" 0 '^on cpu:0' env "$hide" "$run" --model models/llama-3.1-8b.json --layers 1 --steps 1 --scale 0.05 --verify
    refuses "a backend without its device" 1 "$backend" env "$hide" "ATTN_BACKEND=$backend" "$run" \
        --model models/llama-3.1-8b.json --layers 1 --steps 1 --scale 0.05
    if python3 -c 'import torch; assert torch.cuda.is_available()' 2>/dev/null; then
        fill_device
        refuses "a full device" 1 'attn-run: .*memory' "$run" --model models/llama-3.1-8b.json --verify
        kill "$filler" 2>/dev/null
        wait "$filler" 2>/dev/null
    else
        count skip "a full device: PyTorch fills it"
    fi
}

clients() {
    if python3 -c 'import torch, transformers; assert torch.cuda.is_available()' 2>/dev/null; then
        python3 bindings/python/generate.py # a prebuilt folder brings none of the checkout's files
        check "Python: model families on the device" env "PYTHONPATH=bindings/python/src:tests/python" \
            "ATTN_TEST_BUILD=$build" "LD_LIBRARY_PATH=$build/core" \
            "ATTN_PLUGIN_PATH=$build/plugins/cpu_ref:$plugin" python3 tests/python/device.py
        cp "$work/log" "${OUT:-$work}/python_device.txt"
    else
        count skip "Python: torch with a device, and transformers"
    fi
    check "attn-bench" "$build/tools/attn-bench" --backend "$backend"
    cp "$work/log" "${OUT:-$work}/attn_bench.txt"
}

# attn-check's own way to ask whether a request's bits depend on its neighbours, next to all else
kernels() {
    "$build/tools/attn-check" "$backend" --full --seed "$seed" --filter 'attend.*.alone' >"$work/alone" 2>&1 &
    alone=$!
    check "attn-check --quick --seed $seed" "$build/tools/attn-check" "$backend" --quick --seed "$seed"
    status=0
    wait $alone || status=$?
    check "attn-check --full --filter 'attend.*.alone' --seed $seed" sh -c "cat '$work/alone'; exit $status"
    "kernels_$backend"
    "time_$backend"
}

case $how in
--smoke) smoke ;;
--kernels)
    kernels
    echo "$passed passed, $failed failed, $skipped skipped"
    exit $((failed > 0))
    ;;
esac
if [ -x "$run" ]; then
    newcomer
    wrong
else
    count skip "attn-run: the build has no JSON reader (libcjson-dev)"
fi
clients
if [ "$how" != --newcomer ]; then
    check "attn-check $how --seed $seed" "$build/tools/attn-check" "$backend" "$how" --seed "$seed"
    "kernels_$backend"
    "time_$backend"
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
