# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# The commands of demo.sh, which tools/device.sh runs, too: demo_commands RUNNER BUILD calls RUNNER with a title and a command
# for each. Sourced; run from the root.
demo_commands() {
    runner=$1 tools=$2/tools
    gpu=$("$tools/attn-info" | sed -n 's/^  \(cuda_flash\|hip\|level_zero\)[ @].*/\1/p' | head -n 1)
    if [ -x "$tools/attn-run" ]; then
        $runner "Gemma 2 9B: which backend serves which layer" "$tools/attn-info" --model models/gemma-2-9b.json
        set -- "$tools/attn-run" --model models/llama-3.1-8b.json --layers 4 --steps 4 --verify
        $runner "Llama 3.1 8B: four layers in continuous batches, each output held to float64" "$@"
        [ -z "$gpu" ] || $runner "the same on the CPU" env 'ATTN_BACKEND=cpu_*' "$@"
        $runner "all-MiniLM-L6-v2: recorded activations" \
            "$tools/attn-run" --qkv tests/data/minilm/attention.safetensors --verify
        $runner "SmolLM2-135M while it writes: recorded activations, a growing cache" \
            "$tools/attn-run" --qkv tests/data/smollm2/attention.safetensors --verify
    else # no JSON is read, no model and no recording
        $runner "the backends of this machine" "$tools/attn-info" --devices
        $runner "decode and mixed batches, each output held to the reference" \
            "$tools/attn-check" "${gpu:-cpu_simd}" --quick --filter 'attend.[dm]*bf16.bf16*'
    fi
    [ -z "$gpu" ] || $runner "the time of a decode: 8 requests of 4096 tokens" \
        "$tools/attn-bench" --backend "$gpu" --shape decode
}
