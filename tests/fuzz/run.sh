#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Fuzzes one target. Arguments: the program (build-fuzz/tests/fuzz/fuzz_NAME), seconds, and, to go on from run to run, a
# folder for the inputs that were found interesting; without one they are forgotten. What fails is left next to the program.
set -eu
program=$1 seconds=$2 corpus=${3:-}
name=$(basename "$program")
name=${name#fuzz_}
here=$(cd "$(dirname "$0")" && pwd)

forgotten=""
if [ -z "$corpus" ]; then
    corpus=$(mktemp -d)
    forgotten=$corpus
fi
trap '[ -z "$forgotten" ] || rm -rf "$forgotten"' EXIT
mkdir -p "$corpus"
dictionary=""
[ ! -f "$here/seeds/$name.dict" ] || dictionary=-dict=$here/seeds/$name.dict

ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=1:allocator_may_return_null=0
UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export ASAN_OPTIONS UBSAN_OPTIONS
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_CACHE_DIR ATTN_LOG ATTN_LOCK ATTN_RECORD ATTN_VALIDATE ATTN_NUM_THREADS
# its own exit code for a finding is 77, which Meson takes for a test that was skipped
"$program" -seed=1 -error_exitcode=1 -max_total_time="$seconds" -timeout=10 -rss_limit_mb=1024 -print_final_stats=1 \
    -artifact_prefix="$(dirname "$program")/$name-" ${dictionary:+"$dictionary"} "$corpus" "$here/seeds/$name"
