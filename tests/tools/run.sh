#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# attn-run verifies models on cpu_ref; long windows are shortened here, and MLA and recurrent layers come in models.sh.
set -eu
# Arguments: the models' folder, attn-run, a scale of their lengths, models.
models=$1 run=$2 scale=$3
shift 3
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for model; do
    echo "== $model"
    ATTN_BACKEND=cpu_ref ATTN_VALIDATE=1 "$run" --model "$models/$model.json" --layers 2 --steps 3 --scale "$scale" --verify
done
"$run" --model "$models/llama-3.1-8b.json" --layers 1 --json --verify | grep -q '"verified":[[:space:]]*true'
printf '[{"prompt": 5, "output": 3}, {"arrival": 1, "prompt": 40, "output": 2, "preempt_at": 2}]' >"$folder/requests.json"
ATTN_BACKEND=cpu_ref "$run" --model "$models/llama-3.1-8b.json" --layers 1 --steps 6 --requests "$folder/requests.json" --verify
# MLA, indexers and recurrent layers with a shared prefix, a late request and one that is swapped out and in.
printf '[{"prompt": 70, "output": 6}, {"arrival": 1, "prompt": 1, "output": 5, "preempt_at": 2}' >"$folder/requests.json"
printf ', {"arrival": 2, "prompt": 75, "output": 4, "shares": 0, "shared": 66, "preempt_at": 4}]' >>"$folder/requests.json"
# Mamba2's states have 16 bits here.
sed 's/"mamba_ssm_cache_dtype": "float32"/"mamba_ssm_cache_dtype": "bfloat16"/' "$models/nemotron-3.json" >"$folder/mamba2.json"
# Compressors and their rows, of 4 tokens with lists shorter than the requests and of 16; outputs are rotated back.
sed 's/_heads": 64/_heads": 8/; s/"index_topk": 512/"index_topk": 8/; s/window": 128/window": 24/; s/"num_hidden_layers": 43/"num_hidden_layers": 4/; s/"compress_ratios": .0, 0, 4, 128,/"compress_ratios": [0, 0, 4, 16,/' "$models/deepseek-v4.json" >"$folder/compressed.json"
# Fewer heads: all have the same code.
sed 's/_heads": 128/_heads": 16/' "$models/deepseek-v3.json" >"$folder/mla.json"
sed 's/_heads": 32/_heads": 8/; s/key_heads": 16/key_heads": 4/' "$models/qwen3-next-80b-a3b.json" >"$folder/gdn.json"
sed 's/_heads": 32/_heads": 8/' "$models/kimi-linear-48b.json" >"$folder/kda.json"
# Six layers that read the caches of six before them: a windowed one's and, with heads of 512, a full one's.
sed '/"vision_config"/d; s/_layers": 60/_layers": 12/; s/shared_layers": 0/shared_layers": 6/; s/_heads": 32/_heads": 8/; s/"num_key_value_heads": 16/"num_key_value_heads": 4/; s/window": 1024/window": 24/' "$models/gemma-4.json" >"$folder/sharing.json"
# Lists shorter than the requests: of tokens (keys with a Hadamard transform and without), of blocks by KV head next to layers
# without lists, of 4 and of 16 tokens.
sed 's/"index_topk": 2048/"index_topk": 20/; s/_heads": 128/_heads": 8/; s/n_heads": 64/n_heads": 8/' "$models/deepseek-v3.2.json" >"$folder/dsa.json"
sed 's/"index_topk": 2048/"index_topk": 20/; s/_heads": 64/_heads": 8/; s/n_heads": 32/n_heads": 8/' "$models/glm-5.json" >"$folder/indexer.json"
sed '/"vision_config"/d; s/"sparse_topk_blocks": 16/"sparse_topk_blocks": 2/; s/"sparse_block_size": 128/"sparse_block_size": 16/' "$models/minimax-m3.json" >"$folder/msa.json"
sed 's/"indexer_budget": 2048/"indexer_budget": 16/; s/"linear_num_value_heads": 48/"linear_num_value_heads": 16/' "$models/qwen3.8-flash-next.json" >"$folder/qsa.json"
sed '/"vision_config"/d; s/"index_topk": 2048/"index_topk": 32/; s/_heads": 64/_heads": 8/' "$models/glm-5.3-flash.json" >"$folder/kpool.json"
for model in mla dsa indexer msa qsa kpool compressed gdn kda mamba2 sharing; do
    echo "== $model"
    ATTN_BACKEND=cpu_ref ATTN_VALIDATE=1 "$run" --model "$folder/$model.json" --layers 1 --steps 7 \
        --requests "$folder/requests.json" --verify
done
for model in dsa msa qsa compressed sharing; do
    ATTN_BACKEND='cpu_simd?' "$run" --model "$folder/$model.json" --layers 1 --steps 7 --requests "$folder/requests.json" --verify
done
# A prefix that nine requests share, so that a cascade pays; one leaves its blocks and comes back to others.
printf '[{"prompt": 300, "output": 6}' >"$folder/requests.json"
for prompt in 289 290 300 310 330 352 353; do
    printf ', {"arrival": 2, "prompt": %s, "output": 4, "shares": 0, "shared": 288}' $prompt >>"$folder/requests.json"
done
printf ', {"arrival": 2, "prompt": 320, "output": 9, "shares": 0, "shared": 272, "preempt_at": 4}]' >>"$folder/requests.json"
for model in llama-3.1-8b gpt-oss-20b; do # gpt-oss: with a window and without
    "$run" --model "$models/$model.json" --layers $([ $model = llama-3.1-8b ] && echo 1 || echo 2) --steps 8 --requests "$folder/requests.json" --verify
done
printf '[{"prompt": 5}, {"prompt": 9, "shares": 0, "shared": 6}]' >"$folder/requests.json"
status=0
"$run" --model "$models/llama-3.1-8b.json" --layers 1 --requests "$folder/requests.json" 2>/dev/null || status=$?
[ $status -eq 1 ]
for wrong in '[{"prompt": 5}, 7]' '[{"promt": 5}]'; do # not a default in its place
    printf '%s' "$wrong" >"$folder/requests.json"
    status=0
    "$run" --model "$models/llama-3.1-8b.json" --layers 1 --requests "$folder/requests.json" 2>"$folder/found" || status=$?
    [ $status -eq 1 ]
    grep -q 'is no JSON object\|promt: is no field' "$folder/found"
done
status=0
"$run" --model "$models/deepseek-v4.1.json" --layers 1 2>"$folder/found" || status=$?
[ $status -eq 1 ]
grep -q 'candidate_source_layer_id: 20; layers.20 .*which no layer kind describes$' "$folder/found"
status=0
"$run" --model "$models/llama-3.1-8b.json" --layers 1 --replay 4 2>"$folder/found" || status=$?
[ $status -eq 1 ]
grep -q 'replay: is 4; the model has no recurrent layer' "$folder/found"
status=0
"$run" --model "$models/llama-3.1-8b.json" --steps none 2>/dev/null || status=$?
[ $status -eq 2 ]

# Real activations, and files that are none.
data=$models/../tests/data
for recording in minilm smollm2; do
    ATTN_BACKEND=cpu_ref "$run" --qkv "$data/$recording/attention.safetensors" --verify
    # One wrong float among the recorded ones has to be seen.
    cp "$data/$recording/attention.safetensors" "$folder/cut.safetensors"
    printf '\000\000\200\077' | dd of="$folder/cut.safetensors" bs=1 seek=1000000 conv=notrunc status=none
    status=0
    ATTN_BACKEND=cpu_ref "$run" --qkv "$folder/cut.safetensors" --verify || status=$?
    [ $status -eq 1 ]
done
head -c 1000 "$data/minilm/attention.safetensors" >"$folder/cut.safetensors"
status=0
"$run" --qkv "$folder/cut.safetensors" --verify 2>/dev/null || status=$?
[ $status -eq 1 ]

# A recording of one encoder layer in which k has the shape that is named: q is [4, 2, 8], or has $4 rows.
record() {
    rows=${4:-4} k_bytes=$(($1 * $2 * $3 * 4))
    header='{"__metadata__":{"kind":"encoder_only","num_layers":"1"},"query_start_loc":{"dtype":"I32","shape":[2],'
    header=$header'"data_offsets":[0,8]}'
    at=8
    for part in "q $rows,2,8 $((rows * 64))" "out $rows,2,8 $((rows * 64))" "k $1,$2,$3 $k_bytes" "v $1,$2,$3 $k_bytes"; do
        set -- $part
        header=$header',"layer.0.'$1'":{"dtype":"F32","shape":['$2'],"data_offsets":['$at','$((at + $3))']}'
        at=$((at + $3))
    done
    header=$header'}'
    while [ $((${#header} % 8)) -ne 0 ]; do header="$header "; done
    {
        printf "\\$(printf %o $((${#header} % 256)))\\$(printf %o $((${#header} / 256)))\\0\\0\\0\\0\\0\\0"
        printf %s "$header"
        printf "\\0\\0\\0\\0\\$(printf %o $((rows % 256)))\\$(printf %o $((rows / 256)))\\0\\0"
        head -c $((at - 8)) /dev/zero
    } >"$folder/cut.safetensors"
}
record 4 1 8
ATTN_BACKEND=cpu_ref "$run" --qkv "$folder/cut.safetensors" --verify
for shape in "3 2 8" "1 1 8" "4 2 4" "4 1 64"; do
    record $shape
    status=0
    ATTN_BACKEND=cpu_ref "$run" --qkv "$folder/cut.safetensors" --verify 2>"$folder/found" || status=$?
    [ $status -eq 1 ]
    grep -q 'layer.0.k: layer.0.k is \[' "$folder/found"
done
# An encoder's rows are one step.
record 4097 1 8 4097
status=0
ATTN_BACKEND=cpu_ref "$run" --qkv "$folder/cut.safetensors" --verify 2>"$folder/found" || status=$?
[ $status -eq 1 ]
grep -q 'layer.0.q: has 4097 rows; ' "$folder/found"
