#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Whole engines on threads of 128 KiB, as musl gives them: what a backend's step may take of an engine's stack (attn/host.h).
# Arguments: the folder of models, attn-run.
set -eu
models=$1 run=$2
ulimit -s 128 # of the main thread, and what glibc gives every other
for model in gpt-oss-20b qwen3-next-80b-a3b whisper-large-v3; do
    for backend in cpu_ref 'cpu_simd?'; do
        ATTN_BACKEND=$backend "$run" --model "$models/$model.json" --layers 1 --steps 2 --verify
    done
done
