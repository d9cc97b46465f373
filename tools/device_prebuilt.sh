#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks and times cuda_flash in less than 150 s on a machine that has a GPU and Python's torch but no compiler.
# usage: tools/device_prebuilt.sh pack BUILD_DIR FOLDER     where it was built: FOLDER gets all that is needed
#        tools/device_prebuilt.sh run FOLDER [SEED]         there; logs go to $OUT, or to a folder under /tmp
# The first part is attn-check in two processes: batch-invariant layers (the way `alone`) and --quick; then prefill against float32, requests alone against their batch, and times. A line for each on stdout.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
verb=${1:-} folder=${2:-}

if [ "$verb" = pack ] && [ $# -eq 3 ]; then
    build=$2 folder=$3
    mkdir -p "$folder/attn" || exit 1
    cc -std=c11 -O2 -D_POSIX_C_SOURCE=200809L -shared -fPIC -I "$here/abi" -I "$here/plugins" \
        "$here/tests/cuda_flash/prefill_cell.c" -o "$folder/cell.so" -ldl || exit 1
    cp "$build/plugins/cuda_flash/attn_cuda_flash.so" "$build/plugins/cpu_ref/attn_cpu_ref.so" "$build/tools/attn-check" \
        "$build/tools/attn-bench" "$folder" || exit 1
    cp "$build/core/libattn.so.1" "$folder/libattn.so.1" || exit 1
    cp "$build/tools/attn-scan" "$folder/attn/attn-scan" || exit 1
    strip "$folder"/*.so "$folder"/libattn.so.1 "$folder"/attn-check "$folder"/attn-bench "$folder"/attn/attn-scan
    du -sh "$folder"
    exit 0
fi
if [ "$verb" != run ] || [ ! -f "$folder/attn_cuda_flash.so" ]; then
    sed -n '4,5p' "$0" >&2
    exit 2
fi

folder=$(cd "$folder" && pwd)
seed=${3:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}
out=${OUT:-$(mktemp -d)}
plugin=$folder/attn_cuda_flash.so
LD_LIBRARY_PATH=$folder
ATTN_PLUGIN_PATH=$folder/attn_cpu_ref.so:$plugin
ATTN_CACHE_DIR=$(mktemp -d)
export LD_LIBRARY_PATH ATTN_PLUGIN_PATH ATTN_CACHE_DIR
unset ATTN_BACKEND ATTN_VALIDATE
failed=0

# A command's last line and whether it ended well, its output in a log: step NAME SECONDS COMMAND...
step() {
    name=$1 limit=$2
    shift 2
    timeout "$limit" "$@" >"$out/$name.txt" 2>&1
    status=$?
    [ $status -eq 0 ] && word=pass || word="FAIL (status $status)"
    echo "$word  $name: $(grep -v '^$' "$out/$name.txt" | tail -n 1)"
    return $status
}

cd "$here" || exit 1
echo "seed $seed, logs in $out"
step alone 70 "$folder/attn-check" cuda_flash --full --seed "$seed" --filter 'attend.*.alone' &
alone=$!
step quick 75 "$folder/attn-check" cuda_flash --quick --seed "$seed" &
quick=$!
for process in $alone $quick; do
    wait "$process" || failed=$((failed + 1))
done
# step NAME SECONDS of prefill.py with OPTIONS...
prefill() {
    name=$1 limit=$2
    shift 2
    step "$name" "$limit" python3 tests/cuda_flash/prefill.py "$folder/cell.so" "$plugin" --seed "$seed" "$@" ||
        failed=$((failed + 1))
}
prefill prefill_alone 25 --alone
prefill prefill_check 25 --check
prefill prefill_times 20 --rounds 3 --time "causal 8192+invariant, causal 8192+soft cap, causal 8192+ALiBi, causal 8192"
grep '^|' "$out/prefill_times.txt"
for kv in nvfp4 int4_per_token_head; do
    step "bench_$kv" 12 "$folder/attn-bench" --backend cuda_flash --kv-dtype $kv --shape decode:r=8,l=4096 --csv ||
        failed=$((failed + 1))
done
echo "$failed failed"
[ $failed -eq 0 ]
