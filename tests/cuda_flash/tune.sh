#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# For a while: decode's variants beside each other on a machine with a GPU.
set -u
here=$(cd "$(dirname "$0")/../.." && pwd)
build=$here/build-tune
export NVCC_APPEND_FLAGS=-DFLASH_TUNE CFLAGS=-DFLASH_TUNE
begin=$(date +%s)
say() { echo "== $(($(date +%s) - begin)) s: $*"; }
[ -f "$build/build.ninja" ] ||
    meson setup "$build" "$here" -Dcuda-flash=enabled -Dcuda-archs=sm_90a -Dtests=disabled >"$OUT/setup.log" 2>&1 ||
    { tail -5 "$OUT/setup.log"; exit 1; }
for tool in bench soak; do
    nvcc -std=c++17 -O2 -I "$here/abi" -gencode=arch=compute_90,code=sm_90 \
        "$here/tests/cuda_flash/$tool.cu" -o "$build/cuda_flash_$tool" -ldl &
done
ninja -C "$build" core/libattn.so.1.0.0 tools/attn-check tools/attn-bench plugins/cpu_ref/attn_cpu_ref.so \
    plugins/cuda_flash/attn_cuda_flash.so >"$OUT/ninja.log" 2>&1 || { tail -20 "$OUT/ninja.log"; exit 1; }
wait
say built
export LD_LIBRARY_PATH=$build/core ATTN_PLUGIN_PATH=$build/plugins/cpu_ref:$build/plugins/cuda_flash
plugin=$build/plugins/cuda_flash/attn_cuda_flash.so ref=$build/plugins/cpu_ref/attn_cpu_ref.so
seed=$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')
timeout 60 "$build/cuda_flash_soak" "$plugin" "$ref" 25 "$seed" >"$OUT/soak1" 2>&1 &
one=$!
ATTN_FLASH_TUNE=${CHECK_TUNE:-} timeout 60 "$build/cuda_flash_soak" "$plugin" "$ref" 25 "$((seed / 2))" >"$OUT/soak2" 2>&1 &
two=$!
timeout "${CHECK_SECONDS:-50}" "$build/tools/attn-check" cuda_flash --quick --seed "$seed" >"$OUT/check" 2>&1
say "attn-check --quick, seed $seed: $? $(tail -2 "$OUT/check")"
wait $one
say "soak: $? $(tail -2 "$OUT/soak1")"
wait $two
say "soak, varied: $? $(tail -2 "$OUT/soak2")"
BENCH_VARIANTS=${VARIANTS:-} timeout "${BENCH_SECONDS:-150}" "$build/cuda_flash_bench" "$plugin" "${ONLY:-}" >"$OUT/table" 2>&1
say "bench: $?"
BENCH_CLOCKS=1 BENCH_VARIANTS=${CLOCK_VARIANTS:-} timeout 40 "$build/cuda_flash_bench" "$plugin" "${ONLY:-}" >"$OUT/clocks" 2>&1
say "clocks: $?"
grep clocks "$OUT/clocks"
[ -z "${MORE:-}" ] || sh -c "$MORE"
python3 - "$OUT/table" <<'P'
import sys
rows, names, order = {}, [], []
for line in open(sys.argv[1]):
    part = [x.strip() for x in line.strip().strip('|').split('|')]
    if len(part) < 3 or ' us' not in part[1]:
        print(line.strip())
        continue
    name, _, variant = part[0].partition(' @')
    variant = variant.strip()
    if name not in order:
        order.append(name)
    if variant not in names:
        names.append(variant)
    rows[name, variant] = part[1].split()[0]
print('| what | ' + ' | '.join(n or '-' for n in names) + ' |')
for name in order:
    print('| ' + name + ' | ' + ' | '.join(rows.get((name, n), '') for n in names) + ' |')
P
[ -z "${LAST:-}" ] || sh -c "$LAST"
say end
