#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tools on a device whose memory the host cannot touch: every model, both recordings, swaps, and what goes wrong.
# Arguments: the models' folder, attn-run, attn-info, attn-bench, the engine's example, libattn.so.1, a scale of the models'
# lengths, models or '*' for all.
set -eu
models=$1 run=$2 info=$3 bench=$4 engine=$5 core=$6 scale=$7
shift 7
data=$models/../tests/data
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export ATTN_CACHE_DIR=''

# Runs a command that has to end with STATUS and say TEXT, with nothing left allocated.
expect() {
    status=$1 text=$2
    shift 2
    found=0
    "$@" >"$work/out" 2>&1 || found=$?
    if [ $found -ne "$status" ] || ! grep -q -- "$text" "$work/out" || grep -q LEAKED "$work/out"; then
        echo "$*: status $found, not $status, or without '$text', or memory is left:"
        cat "$work/out"
        exit 1
    fi
}

[ "$1" != '*' ] || set -- $(cd "$models" && ls -- *.json)
for model; do
    echo "== $model"
    if [ "${model%.json}" = deepseek-v4.1 ]; then
        expect 1 'which no layer kind describes' "$run" --model "$models/deepseek-v4.1.json" --verify
        continue
    fi
    expect 0 'all right' "$run" --model "$models/${model%.json}.json" --layers 1 --steps 2 --scale "$scale" --verify
    grep -q '^on extension:0 (protected pages)$' "$work/out"
done
for recording in minilm smollm2; do
    expect 0 'all right' "$run" --qkv "$data/$recording/attention.safetensors" --verify
done
# Shared blocks, a cascade and a request that is swapped out and in; states of GDN, too.
printf '[{"prompt": 120, "output": 6}, {"arrival": 1, "prompt": 90, "output": 5, "shares": 0, "shared": 80}' >"$work/requests"
printf ', {"arrival": 2, "prompt": 75, "output": 4, "preempt_at": 3}]' >>"$work/requests"
sed 's/_heads": 32/_heads": 8/; s/key_heads": 16/key_heads": 4/' "$models/qwen3-next-80b-a3b.json" >"$work/gdn.json"
for model in "$models/gpt-oss-20b.json" "$work/gdn.json"; do
    ATTN_VALIDATE=1 expect 0 'all right' "$run" --model "$model" --layers 1 --steps 7 \
        --requests "$work/requests" --verify
done
# Index keys that their write norms, rotates and transforms; where no backend declares such writes (bit 22) attn-run does so before
# the write. Lists are shorter than the requests.
sed 's/"index_topk": 2048/"index_topk": 20/; s/_heads": 128/_heads": 8/; s/n_heads": 64/n_heads": 8/' "$models/deepseek-v3.2.json" >"$work/dsa.json"
sed 's/"index_topk": 2048/"index_topk": 20/; s/_heads": 64/_heads": 8/; s/n_heads": 32/n_heads": 8/' "$models/glm-5.json" >"$work/glm.json"
sed '/"vision_config"/d; s/"sparse_topk_blocks": 16/"sparse_topk_blocks": 2/; s/"sparse_block_size": 128/"sparse_block_size": 16/' "$models/minimax-m3.json" >"$work/msa.json"
sed 's/"indexer_budget": 2048/"indexer_budget": 16/; s/"linear_num_value_heads": 48/"linear_num_value_heads": 16/' "$models/qwen3.8-flash-next.json" >"$work/qsa.json"
for model in dsa glm msa qsa; do
    ATTN_VALIDATE=1 expect 0 'all right' "$run" --model "$work/$model.json" --layers 1 --steps 7 --requests "$work/requests" --verify
    ! grep -q 'before their write' "$work/out" || exit 1
    ATTN_VALIDATE=1 FAKE_DEVICE_WITHOUT=0x400000 expect 0 'before their write: .*attn_index_write.*not declared' \
        "$run" --model "$work/$model.json" --layers 1 --steps 7 --requests "$work/requests" --verify
    grep -q 'indexer  *fake_device' "$work/out"
    grep -q 'all right' "$work/out"
done
expect 0 '"device": *"extension:0"' "$run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 1 --scale 0.05 --json
expect 0 '^layers on extension:0$' "$info" --model "$models/llama-3.1-8b.json"

# A lock has the drivers' line, layouts are those of the device's memory.
expect 0 'layout [0-9a-f]\{32\}$' "$info" --model "$models/llama-3.1-8b.json" --layouts --lock "$work/lock"
grep -q '^drivers versions=' "$work/lock"
# A step is recorded from the device, and run again there and on the CPU.
for contents in random real; do
    ATTN_RECORD="$work/$contents:layer=0,step=2,contents=$contents" expect 0 'capsule has been written' "$run" \
        --model "$models/gpt-oss-20b.json" --layers 2 --steps 4 --scale 0.05 --verify
    expect 0 '^fake_device: largest error 0' "$run" --capsule "$work/$contents/"*.capsule
    expect 0 '^cpu_ref: largest error 0' "$run" --capsule "$work/$contents/"*.capsule --backend cpu_ref
done
expect 0 '^the recorded output: largest error 0' "$run" --capsule "$work/real/"*.capsule

# A tool goes to the device that it is given; an engine whose memory is the CPU's stays there.
ATTN_BACKEND=cpu_ref expect 0 '^on cpu:0' "$run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 1 --scale 0.05 --verify
expect 0 'was served by cpu_' "$engine" "$core"
ATTN_BACKEND=fake_device expect 1 'device cpu:0' "$engine" "$core"

# Memory that runs out: at once, in the middle, and in a step; the message has what and how much.
for bytes in 4096 1000000 3000000 5000000 6000000; do
    FAKE_DEVICE_BYTES=$bytes expect 1 'MiB of extension:0: fake_device: .* bytes; .* are free' \
        "$run" --model "$models/qwen2.5-vl-7b.json" --layers 2 --steps 2 --scale 0.1 --verify
done
# A driver without a device is no device; a layer that the device's backend does not serve says why.
FAKE_DEVICE_ABSENT=1 expect 0 '^on cpu:0' "$run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 1 --scale 0.05 --verify
FAKE_DEVICE_LAYERS=1 expect 1 "layer 'layers.0', prefill: no backend can serve it.*fake_device: layer_kind mla" \
    "$run" --model "$models/deepseek-v3.json" --layers 1 --steps 1 --scale 0.05 --verify
# Work that fails after the call returned: reported by some later call, and under validation with its layer and step.
FAKE_DEVICE_FAILS=3 expect 1 'illegal memory access' \
    "$run" --model "$models/llama-3.1-8b.json" --layers 2 --steps 2 --scale 0.05 --verify
ATTN_VALIDATE=1 FAKE_DEVICE_FAILS=3 expect 1 "layer 'layers.0', fake_device: step [0-9]*: .*illegal memory access" \
    "$run" --model "$models/llama-3.1-8b.json" --layers 2 --steps 2 --scale 0.05 --verify
# Every pointer of attn-bench's calls.
expect 0 'added_ns' "$bench" --shape dispatch:write=0+1
