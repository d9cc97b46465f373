#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The examples do what they say: the engine decodes, right in every step, its threads are lent where they stand, and the small plugin passes attn-check and serves decoder,
# encoder and chunked layers of real models. tests/step has its cross, static sink and cascade steps.
set -eu
models=$1 engine=$2 core=$3 plugin=$4 check=$5 run=$6 spmd=$7 part=$8
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# says FILE PATTERN: prints what a program wrote, which has the pattern
says() {
    cat "$1"
    grep -q -- "$2" "$1"
}

for backend in '' cpu_ref; do
    ATTN_VALIDATE=1 ATTN_BACKEND=$backend "$engine" "$core" >"$folder/out"
    says "$folder/out" "layer full was served by ${backend:-cpu_}"
    grep -q "layer sliding was served by ${backend:-cpu_}" "$folder/out"
    grep -q '^50 tokens in 4 blocks, largest difference' "$folder/out"
    ATTN_VALIDATE=1 ATTN_BACKEND=$backend "$spmd" "$core" >"$folder/out"
    says "$folder/out" '^3 threads, 20 steps: out\[0, 0\] = 1.5'
done

ATTN_PLUGIN_PATH=$plugin
export ATTN_PLUGIN_PATH
"$check" example --part "$part"
ATTN_BACKEND=example "$engine" "$core" >"$folder/out"
says "$folder/out" 'served by example'

# float32 versions of real models, on the small plugin: chunks and encoders are composed for it.
verify() {
    sed 's/"bfloat16"/"float32"/; s/"float16"/"float32"/' "$models/$1.json" >"$folder/small.json"
    ATTN_BACKEND=$2 "$run" --model "$folder/small.json" --layers 2 --steps 2 --scale 0.05 --verify
}
verify llama-3.1-8b example
verify all-minilm-l6-v2 example
verify llama-4-scout 'full=example;chunked=example'
