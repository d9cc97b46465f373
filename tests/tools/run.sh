#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn-run verifies every model that needs neither MLA nor GDN, on cpu_ref; long windows are shortened here.
set -eu
models=$1 run=$2
for model in llama-3.1-8b gemma-2-9b gemma-3-27b gpt-oss-20b mixtral-8x7b bloom-7b1 llama-4-scout whisper-large-v3 \
    qwen2.5-vl-7b all-minilm-l6-v2; do
    echo "== $model"
    ATTN_BACKEND=cpu_ref ATTN_VALIDATE=1 "$run" --model "$models/$model.json" --layers 2 --steps 3 --scale 0.1 --verify
done
"$run" --model "$models/llama-3.1-8b.json" --layers 1 --json --verify | grep -q '"verified":[[:space:]]*true'
printf '[{"prompt": 5, "output": 3}, {"arrival": 1, "prompt": 40, "output": 2, "preempt_at": 2}]' >requests.json
ATTN_BACKEND=cpu_ref "$run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 6 --requests requests.json --verify
rm requests.json
status=0
"$run" --model "$models/llama-3.1-8b.json" --steps none 2>/dev/null || status=$?
[ $status -eq 2 ]

# Real activations, and files that are none.
ATTN_BACKEND=cpu_ref "$run" --qkv "$models/../tests/data/minilm/attention.safetensors" --verify
head -c 1000 "$models/../tests/data/minilm/attention.safetensors" >cut.safetensors
status=0
"$run" --qkv cut.safetensors --verify 2>/dev/null || status=$?
[ $status -eq 1 ]
rm cut.safetensors
