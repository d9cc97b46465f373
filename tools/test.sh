#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and tests everything; the last line counts. From a fresh clone on a bare Debian 12.
cd "$(dirname "$0")/.."
. tools/lib/setup.sh

ATTN_CACHE_DIR=$PWD/build/cache
export ATTN_CACHE_DIR
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_VALIDATE ATTN_NUM_THREADS
passed=0 failed=0 skipped=0
started=$(date +%s)

stage() {
    now=$(date +%s)
    echo "== $1 ($((now - started)) s)"
}

# Runs Meson tests and adds what they counted. Arguments: build folder, then meson test's.
count_tests() {
    folder=$1
    shift
    log=$folder/test-output.txt
    meson test -C "$folder" --no-rebuild --print-errorlogs "$@" >"$log" 2>&1 || true
    cat "$log"
    ok=$(sed -n 's/^Ok: *\([0-9]*\).*/\1/p' "$log" | tail -n 1)
    if [ -z "$ok" ]; then
        failed=$((failed + 1))
        return
    fi
    for word in 'Fail' 'Timeout' 'Unexpected Pass'; do
        n=$(sed -n "s/^$word: *\([0-9]*\).*/\1/p" "$log" | tail -n 1)
        failed=$((failed + ${n:-0}))
    done
    n=$(sed -n 's/^Skipped: *\([0-9]*\).*/\1/p' "$log" | tail -n 1)
    skipped=$((skipped + ${n:-0}))
    passed=$((passed + ok))
}

stage "packages"
ensure_packages
stage "release build"
build_release
stage "tests"
count_tests build

stage "address and undefined-behaviour sanitizers"
[ -f build-asan/build.ninja ] ||
    meson setup build-asan -Db_sanitize=address,undefined -Db_lundef=false -Dbuildtype=debugoptimized \
        -Dcpu-simd=disabled -Dcuda-flash=disabled >/dev/null
ninja -C build-asan | tail -n 1
ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export ASAN_OPTIONS UBSAN_OPTIONS
count_tests build-asan --suite core --suite tools --timeout-multiplier 4

stage "end"
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
