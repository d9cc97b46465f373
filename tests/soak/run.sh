#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A few of the soak's engines; tools/soak.sh lets them live for hours. usage: run.sh SOAK CORE [SEED ROUNDS]
set -eu
soak=$1 core=$(realpath "$2") seed=${3:-1} rounds=${4:-24}
plugins=$(echo "$(dirname "$core")"/../plugins/*/attn_*.so | sed 's/ /:/g')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# A cancelled thread leaves its frames poisoned, which AddressSanitizer's own clean-up of signal stacks then runs into.
ASAN_OPTIONS=${ASAN_OPTIONS:+$ASAN_OPTIONS:}use_sigaltstack=0
export ASAN_OPTIONS
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_CACHE_DIR ATTN_LOG ATTN_LOCK ATTN_RECORD ATTN_VALIDATE ATTN_NUM_THREADS
"$soak" "$core" "$plugins" "$folder" "$seed" "$rounds"
