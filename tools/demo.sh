#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds, and shows the main job: backends chosen for a model's layers, and their outputs verified.
cd "$(dirname "$0")/.."
. tools/lib/setup.sh
ensure_packages
build_release
echo; echo "== which backend serves which layer of Gemma 2, and why no other"
build/tools/attn-info --model models/gemma-2-9b.json --explain
echo; echo "== the same with an order"
ATTN_BACKEND='sliding=cpu_ref' build/tools/attn-info --model models/gemma-2-9b.json | tail -n 4
echo; echo "== four layers of Llama 3.1 8B, served in continuous batches and verified"
build/tools/attn-run --model models/llama-3.1-8b.json --layers 4 --steps 4 --verify
echo; echo "== real activations of all-MiniLM-L6-v2"
build/tools/attn-run --qkv tests/data/minilm/attention.safetensors --verify
echo; echo "== real activations of SmolLM2-135M while it writes, with a growing cache"
build/tools/attn-run --qkv tests/data/smollm2/attention.safetensors --verify
