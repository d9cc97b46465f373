#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and tests everything; the last line counts. From a fresh clone on a bare Debian 12.
# usage: tools/test.sh [--quick [--filter SUITE]]
# --quick: layout of the sources, a release build without CUDA in build-quick/, and the core's tests, in minutes;
# --filter: the tests of that suite instead (tools, cpu_ref, hostile ...; meson test --list names them).
quick='' suite=core
while [ $# -gt 0 ]; do
    case $1 in
    --quick) quick=1 ;;
    --filter)
        [ $# -ge 2 ] || { echo "test.sh: --filter: needs the name of a suite" >&2; exit 2; }
        suite=$2
        shift
        ;;
    *)
        echo "test.sh: unknown argument '$1'; usage: test.sh [--quick [--filter SUITE]]" >&2
        exit 2
        ;;
    esac
    shift
done
if [ -z "$quick" ] && [ "$suite" != core ]; then
    echo "test.sh: --filter goes with --quick" >&2
    exit 2
fi
cd "$(dirname "$0")/.."
. tools/lib/setup.sh

ATTN_CACHE_DIR=$PWD/build/cache
export ATTN_CACHE_DIR
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_VALIDATE ATTN_NUM_THREADS
passed=0 failed=0 skipped=0 failures=''
started=$(date +%s)

stage() {
    echo "== $1 (at $(($(date +%s) - started)) s)"
}

# Counts one failure; the end names it once more.
fail() {
    failed=$((failed + 1))
    failures="$failures  $1
"
}

# Runs Meson tests and adds up the results in their log. Arguments: folder, a name for the log, then meson test's.
count_tests() {
    folder=$1 name=$2
    shift 2
    rm -f "$folder/meson-logs/$name"*.json
    meson test -C "$folder" --logbase "$name" --print-errorlogs "$@" 2>&1 | sed '/^ninja: /d; /^$/d; /^Full log/d' || true
    results=$(cat "$folder/meson-logs/$name"*.json 2>/dev/null | jq -r '"\(.result) \(.name | gsub(" "; ""))"' || true)
    if [ -z "$results" ]; then
        fail "$name: no test ran in $folder"
    fi
    while read -r result test; do
        case $result in
        '') ;;
        OK | EXPECTEDFAIL) passed=$((passed + 1)) ;;
        SKIP) skipped=$((skipped + 1)) ;;
        *) fail "$name: $test ($result)" ;;
        esac
    done <<RESULTS
$results
RESULTS
}

finish() {
    stage "end"
    [ -z "$failures" ] || printf 'failed:\n%s' "$failures"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

if [ -n "$quick" ]; then
    stage "packages"
    ensure_packages
    stage "release build without CUDA"
    build_folder build-quick -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled -Dnccl=disabled
    stage "format"
    count_tests build-quick format format
    stage "$suite"
    count_tests build-quick quick --suite "$suite"
    finish
fi

stage "packages"
PACKAGES="$PACKAGES clang libclang-rt-14-dev" # fuzzing's; a demonstration does without
ensure_packages
stage "release build"
build_release
if [ "$toolchains" != none ] && [ ! -e build/plugins/cuda_flash/attn_cuda_flash.so ]; then
    fail "nvcc is there ($toolchains), but cuda_flash was not built"
fi
if [ ! -e build/plugins/hip/attn_hip.so ]; then
    fail "clang-19 and lld-19 are there, but hip was not built"
fi
if [ "$(uname -m)" = x86_64 ] && [ ! -e build/plugins/level_zero/attn_level_zero.so ]; then
    fail "clang-15, llvm-spirv-15 and libze-dev are there, but level_zero was not built"
fi
ensure_venv >build/venv.log 2>&1 & # the C tests never wait for it
venv=$!
stage "tests"
count_tests build release --no-suite python

# Device code and SIMD intrinsics are left out: the sanitizers are for what walks pointers, locks and strings.
sanitizer_options="-Db_lundef=false -Dbuildtype=debugoptimized -Dcpu-simd=disabled -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled"

stage "address and undefined-behaviour sanitizers"
# shellcheck disable=SC2086
build_folder build-asan -Db_sanitize=address,undefined $sanitizer_options
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS UBSAN_OPTIONS
count_tests build-asan asan --suite core --suite tools --suite cpu_ref --suite hostile --timeout-multiplier 6

stage "fuzzing"
build_fuzz
count_tests build-fuzz fuzz --suite fuzz

stage "thread sanitizer"
# shellcheck disable=SC2086
build_folder build-tsan -Db_sanitize=thread $sanitizer_options
TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:second_deadlock_stack=1
export TSAN_OPTIONS
# It cannot map its shadow where the kernel spreads addresses over more bits than it knows.
fixed_addresses=""
setarch -R true 2>/dev/null && fixed_addresses="--wrap=setarch -R"
count_tests build-tsan tsan ${fixed_addresses:+"$fixed_addresses"} --suite core --timeout-multiplier 6

stage "valgrind"
count_tests build valgrind --setup valgrind --suite core

if [ "$(uname -m)" = x86_64 ]; then
    stage "AArch64, emulated"
    build_folder build-aarch64 --cross-file tools/lib/aarch64.ini
    count_tests build-aarch64 emulated
fi

stage "python"
wait "$venv" || true
[ ! -s build/venv.log ] || cat build/venv.log
count_tests build python --suite python

finish
