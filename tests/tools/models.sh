#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Models at their published head counts and lengths; two layers, more where there are more kinds: a kind is verified once.
set -eu
models=$1 run=$2
shift 2
for model in "$@"; do
    echo "== $model"
    ATTN_BACKEND=cpu_ref "$run" --model "$models/$model.json" --layers 2 --steps 4 --verify
done
