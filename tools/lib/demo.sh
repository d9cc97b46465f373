# SPDX-License-Identifier: Apache-2.0
# The commands of demo.sh, which a machine with a GPU runs, too: demo_commands RUNNER BUILD calls RUNNER with a title and
# a command for each. Sourced; run from the root.
demo_commands() {
    runner=$1 tools=$2/tools
    $runner "which backend serves which layer of Gemma 2, and why no other" \
        "$tools/attn-info" --model models/gemma-2-9b.json --explain
    $runner "the same with an order" \
        env 'ATTN_BACKEND=sliding=cpu_ref' "$tools/attn-info" --model models/gemma-2-9b.json
    $runner "four layers of Llama 3.1 8B, served in continuous batches and verified" \
        "$tools/attn-run" --model models/llama-3.1-8b.json --layers 4 --steps 4 --verify
    $runner "real activations of all-MiniLM-L6-v2" \
        "$tools/attn-run" --qkv tests/data/minilm/attention.safetensors --verify
    $runner "real activations of SmolLM2-135M while it writes, with a growing cache" \
        "$tools/attn-run" --qkv tests/data/smollm2/attention.safetensors --verify
}
