#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ATTN_RECORD and attn-run --capsule: a step is kept, run again on other backends, and a wrong result is found in it.
set -u
models=$1 run=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

. "$(dirname "$0")/expect.sh"

# record WHERE MODEL [OPTION]: the second of two layers
record() {
    ATTN_RECORD=$1 "$run" --model "$models/$2.json" --layers 2 --steps 4 --scale 0.2 ${3:-}
}

# A step that is recorded is right as ever.
expect 0 'all right' record "$folder/verified:layer=1,step=1" llama-3.1-8b --verify

for model in llama-3.1-8b gemma-2-9b gpt-oss-20b bloom-7b1 deepseek-v3; do
    expect 0 "$model/layer-1-step-2-[0-9]*.capsule has been written, with statistics" record "$folder/$model:layer=1,step=2" $model
    expect 0 "which are users' data" record "$folder/$model-real:layer=1,step=2,contents=real" $model
    for capsule in "$folder/$model"*/*.capsule; do
        [ "$(stat -c %a "$capsule")" = 600 ] || { echo "mode of $capsule"; failed=1; }
        for backend in cpu_ref cpu_simd cpu_simd@scalar; do
            expect 0 "^$backend.*: largest error 0.*of the bound\$" "$run" --capsule "$capsule" --backend $backend
        done
    done
    expect 0 '^the recorded output: largest error 0' "$run" --capsule "$folder/$model-real/"*.capsule
    expect 0 '"contents": "random"' "$run" --capsule "$folder/$model/"*.capsule --json
    # what was recorded as random has no tensor: the head alone, whatever the step's size
    [ "$(tail -n 1 "$folder/$model/"*.capsule)" = end ] || { echo "contents in $model"; failed=1; }
done

# The last number of the recorded output is wrong: found, and where.
real=$(ls "$folder/llama-3.1-8b-real/"*.capsule)
size=$(stat -c %s "$real")
cp "$real" "$folder/wrong"
printf '\100\102' | dd of="$folder/wrong" bs=1 seek=$((size - 2)) conv=notrunc status=none
expect 1 'the recorded output: .*OFF in 1 elements, most in request [0-9]*, query [0-9]*, head 31, dim 127: 48, not ' "$run" --capsule "$folder/wrong"
expect 1 '"elements_off": 1,' "$run" --capsule "$folder/wrong" --json

# Damaged and hostile files.
head -c $((size - 1)) "$real" >"$folder/cut"
expect 1 "cut: data is '[0-9]* bytes'; as many as the tensors' shapes say" "$run" --capsule "$folder/cut"
head -c 300 "$real" >"$folder/cut"
expect 1 "is 'missing'; it is the next line" "$run" --capsule "$folder/cut"
sed 's/^num_q_heads .*/num_q_heads 1000000/' "$real" >"$folder/hostile"
expect 1 "num_q_heads is '1000000'; 1 to 1024 is allowed" "$run" --capsule "$folder/hostile"
sed "s/^layer .*/layer $(printf '\033')[2J/" "$real" >"$folder/hostile"
expect 1 "layer is '?\[2J'; clean text" "$run" --capsule "$folder/hostile"
expect 1 'is no capsule: not a regular file' "$run" --capsule /dev/zero
expect 1 'No such file' "$run" --capsule "$folder/absent"
expect 1 "did you mean 'cpu_ref'" "$run" --capsule "$real" --backend cpu_rfe
expect 2 'usage' "$run" --capsule "$real" --model "$models/llama-3.1-8b.json"
expect 2 'usage' "$run" --model "$models/llama-3.1-8b.json" --backend cpu_ref

# What cannot be recorded or written is said, and the run goes on.
expect 0 'no capsule is written: layer: .* has another kind' record "$folder/none:layer=0,step=0" qwen3-next-80b-a3b
expect 0 'no capsule is written: layer: .* has lists of keys' record "$folder/none:layer=1,step=0" deepseek-v3.2
expect 0 'no capsule is written: ATTN_RECORD: /proc/none/' record "/proc/none:layer=1,step=2" llama-3.1-8b
expect 0 'no capsule is written: ATTN_RECORD: .*File too large' sh -c 'ulimit -f 1; ATTN_RECORD="$1" "$2" --model "$3" --layers 2 --steps 4 --scale 0.2' \
    - "$folder/none:layer=1,step=2,contents=real" "$run" "$models/llama-3.1-8b.json"
expect 1 "ATTN_RECORD: 'none:layer=1,step=2' is not an absolute folder" record "none:layer=1,step=2" llama-3.1-8b
[ ! -e "$folder/none" ] || [ -z "$(ls -A "$folder/none")" ] || { ls -A "$folder/none"; failed=1; }
exit $failed
