#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Every model at its published head counts and lengths, as TOOLS promises it: --layers 4 --steps 4 --verify.
set -eu
models=$1 run=$2
shift 2
for model in "$@"; do
    echo "== $model"
    ATTN_BACKEND=cpu_ref "$run" --model "$models/$model.json" --layers 4 --steps 4 --verify
done
