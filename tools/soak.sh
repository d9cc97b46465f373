#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Random engines on this machine until the time is over: all backends that are built (without a sanitizer GPU backends,
# too, under their interpreters), random layers, batches, settings and configurations, and faults: allocations and files
# that fail, forks, cancelled threads, jumps of the clock, killed scanners, damaged caches. The first failure ends it with
# the seed that repeats it.
#
#     tools/soak.sh [--minutes N] [--seed S] [--sanitize address|thread|none] [--build FOLDER]
set -eu
cd "$(dirname "$0")/.."
minutes=10 seed=$(date +%s) sanitize=none build=""
while [ $# -gt 0 ]; do
    case $1 in
    --minutes) minutes=$2 ;;
    --seed) seed=$2 ;;
    --sanitize) sanitize=$2 ;;
    --build) build=$2 ;;
    *) sed -n 's/^#     //p' "$0" >&2 && exit 2 ;;
    esac
    shift 2 || exit 2
done
build=${build:-build-soak-$sanitize}
# Frames and checks of a sanitizer in hot loops take what optimisation gives.
options="-Dbuildtype=debugoptimized -Db_lundef=false -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled -Dnccl=disabled -Dmpi=disabled"
case $sanitize in
address) options="$options -Db_sanitize=address,undefined" ;;
thread) options="$options -Db_sanitize=thread" ;;
none) options="-Dnccl=disabled -Dmpi=disabled" ;;
*) echo "soak.sh: --sanitize: $sanitize; address, thread or none" >&2 && exit 2 ;;
esac
# shellcheck disable=SC2086
[ -e "$build/build.ninja" ] || meson setup "$build" $options >&2
plugins=$(ninja -C "$build" -t targets all | sed -n 's|^\(plugins/[a-z_]*/attn_[a-z_]*\.so\):.*|\1|p')
# shellcheck disable=SC2086
ninja -C "$build" core/libattn.so.1.0.0 tools/attn-scan tools/attn-run tools/attn-check tests/soak/soak $plugins >&2
# A cancelled thread leaves its frames poisoned, on which the alternate stack would trip.
export ASAN_OPTIONS=detect_leaks=1:use_sigaltstack=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:second_deadlock_stack=1
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_LOCK ATTN_RECORD ATTN_VALIDATE ATTN_NUM_THREADS
fixed=""
[ "$sanitize" != thread ] || ! setarch -R true 2>/dev/null || fixed="setarch -R" # TSan's shadow needs usual addresses
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export ATTN_CACHE_DIR="$folder/tools"
# GPU backends under their interpreters, as the tests run them; sanitizers' builds have none.
emulated=$(meson test -C "$build" --list 2>/dev/null | grep -o 'attn_check_\(hip\|level_zero\)_[a-z0-9_]*' || true)

# act NAME COMMAND...: one part of a turn, which ends by itself or fails.
act() {
    name=$1
    shift
    status=0
    # shellcheck disable=SC2086
    timeout -k 10 900 $fixed "$@" >"$folder/out" 2>&1 || status=$?
    if [ $status -ne 0 ]; then
        cat "$folder/out"
        echo "soak.sh: turn $turn ($name) failed with status $status: $*"
        echo "soak.sh: repeat it with --seed $seed --sanitize $sanitize; $turns turns were right before"
        exit 1
    fi
}

# pick WORDS...: one of them, by the turn.
pick() {
    shift $((turn / 7 % $#))
    echo "$1"
}

echo "soak.sh: $minutes minutes, seed $seed, sanitizer $sanitize"
end=$(($(date +%s) + 60 * minutes)) turns=0 turn=$seed
while [ "$(date +%s)" -lt $end ]; do
    act engines tests/soak/run.sh "$build/tests/soak/soak" "$PWD/$build/core/libattn.so.1" $((turn * 1000)) 12
    case $((turn % 6)) in
    1 | 4)
        model=$(pick llama-3.1-8b gemma-2-9b gpt-oss-20b mixtral-8x7b bloom-7b1 llama-4-scout whisper-large-v3 \
            qwen2.5-vl-7b all-minilm-l6-v2 gemma-3-27b deepseek-v3 qwen3-next-80b-a3b)
        act "$model" env ATTN_VALIDATE=1 ATTN_NUM_THREADS=$((1 + turn % 3)) ATTN_BACKEND="$(pick cpu_ref 'cpu_simd?' '')" \
            "$build/tools/attn-run" --model "models/$model.json" --layers 1 --steps 3 --scale 0.05 --seed "$turn" --verify
        ;;
    2) act check "$build/tools/attn-check" "$(pick cpu_ref cpu_simd)" --seed "$turn" \
        --filter "$(pick 'engine.decode*' 'engine.mixed*' 'calls.*' 'idle.*' 'merge*' 'blocks.*' 'gated*' 'batched*' \
            'attend.shared*' 'attend_mla*')" ;;
    5)
        # shellcheck disable=SC2086
        [ -z "$emulated" ] || act emulated meson test -C "$build" --print-errorlogs --test-args "--seed $turn" "$(pick $emulated)"
        ;;
    esac
    turn=$((turn + 1)) turns=$((turns + 1))
done
echo "soak.sh: $turns turns from seed $seed were right ($((turns * 12)) engines and more, sanitizer $sanitize)"
