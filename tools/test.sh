#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and tests from a fresh clone on a bare Debian 12; the last line counts.
# usage: tools/test.sh [--all | --quick [--filter SUITE]]
# Without an argument: all that a user's build is made of (core, CPU backends, hostile plugins, tools, examples, the vendor's
# guide, Python), in 8 minutes of two cores. --all: GPU plugins under emulation, sanitizers, fuzzing, valgrind, mutants, AArch64,
# collectives, adapters for engines, packages and the layout of the sources as well. --quick: that layout, a release build without CUDA in
# build-quick/, and the core's tests, in minutes; --filter: the tests of that suite instead (meson test --list names them).
tool=test.sh mode=user suite=core
usage() {
    echo "test.sh: $1; usage: test.sh [--all | --quick [--filter SUITE]]" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --all | --quick)
        [ "$mode" = user ] || usage "--$mode and $1: one of the two"
        mode=${1#--}
        ;;
    --filter)
        [ $# -ge 2 ] || usage "--filter: needs the name of a suite"
        suite=$2
        shift
        ;;
    --help) sed -n '4,8s/^# //p' "$0" && exit 0 ;;
    *) usage "unknown argument '$1'" ;;
    esac
    shift
done
[ "$mode" = quick ] || [ "$suite" = core ] || usage "--filter goes with --quick"
echo "libattn: tests ($mode)"
cd "$(dirname "$0")/.."
. tools/lib/setup.sh
tick=20
essential="gcc libc6-dev meson ninja-build pkg-config libcjson-dev libcmocka-dev jq"

ATTN_CACHE_DIR=$PWD/build/cache
export ATTN_CACHE_DIR
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_VALIDATE ATTN_NUM_THREADS
ensure_writable
results=$(mktemp -d) # a file for each stage: a line for each result, and below a failure the end of its log, indented
trap 'rm -rf "$results"' EXIT
trap 'trap - INT; kill 0' INT # what runs in the background, too

# Counts one failure; the end of the run names it once more. Arguments: what failed, the last lines of its log if there is one.
fail() {
    say "failed: $1"
    printf 'failed %s\n%s' "$1" "$(printf '%s\n' "${2:-}" | sed -n 's/^./    &/p')
" >>"$results/stages"
}

# Runs Meson tests but those of the suite `more`, adds up the results in their log, and says them for each suite, with the seconds that its tests took
# together. The last lines that a failed test wrote are kept for the end. Arguments: folder, a name for the log, then meson test's.
count_tests() {
    folder=$1 name=$2
    shift 2
    rm -f "$folder/meson-logs/$name"*.json
    watched "$name: tests" meson test -C "$folder" --logbase "$name" --print-errorlogs --no-suite more "$@" || true
    counted=$(cat "$folder/meson-logs/$name"*.json 2>/dev/null | jq -r --arg name "$name" '
        (.name | sub("^[^:]*:"; "") | split(" / ") | if length == 1 then [$name] + . else . end) as [$suites, $test] | ($suites | split("+")[0]) as $suite |
        (if .result == "OK" or .result == "EXPECTEDFAIL" then "passed" elif .result == "SKIP" then "skipped" else "failed" end) as $how |
        "\($how) \($name): \($suite)/\($test) \(.result) \(.duration)",
        if $how == "failed" then .stdout, .stderr | (. // "") / "\n" | map(select(. != ""))[-15:][] | "    " + .[:160] else empty end' || true)
    [ -n "$counted" ] || fail "$name: no test ran in $folder"
    printf '%s\n' "$counted" | awk -v file="$results/$name" '
        /^    / { print >>file; next }
        NF { suite = $0; sub(/.*: /, "", suite); sub(/\/.*/, "", suite); count[suite, $1]++; seconds[suite] += $NF; name = $0
             sub(/ [^ ]*$/, "", name); print name >>file }
        END { for (suite in seconds)
            printf "%s: %d passed, %d failed, %d skipped, %.0f s together\n", suite, count[suite, "passed"], count[suite, "failed"],
                count[suite, "skipped"], seconds[suite] }' | sort | while read -r line; do say "$name: $line"; done
}

# Ends with what failed, the last lines of its log, and the line that counts.
finish() {
    failed=$(cat "$results"/* | grep -c '^failed ' || true)
    passed=$(cat "$results"/* | grep -c '^passed ' || true)
    skipped=$(cat "$results"/* | grep -c '^skipped ' || true)
    read_cpu "$results/cpu"
    say "end, $cpu s of CPU"
    [ "$failed" -eq 0 ] || { echo "failed:" && cat "$results"/* | sed -n 's/^failed /  /p; /^    /p'; }
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

if [ $mode = quick ]; then
    ensure_packages demo tests style
    if build_folder "release build without GPUs" build-quick -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled -Dnccl=disabled; then
        count_tests build-quick format format
        count_tests build-quick "$suite" --suite "$suite"
    else
        fail "build-quick: not built" "$watched_end"
    fi
    finish
fi

# build/venv, and for --all ONNX Runtime's header, in the background: only the last tests wait for them.
start_venv() {
    {
        ensure_venv
        [ $mode != all ] || sh integrations/onnxruntime/header.sh build/onnxruntime fetch >/dev/null || true
    } >build/venv.log 2>&1 &
    venv=$!
}

await_venv() {
    [ -n "$venv" ] || return 0
    watched "build/venv: numpy, torch, transformers" wait "$venv" || true
    venv=''
    [ ! -s build/venv.log ] || cat build/venv.log
}

# Tests of the release build: Python's run one after the other, next to the others, of which $suites can name some. Arguments:
# meson test's.
release_tests() {
    # shellcheck disable=SC2086
    count_tests build release ${suites:-} --no-suite python "$@" &
    others=$!
    await_venv
    count_tests build python --no-rebuild --suite python "$@"
    wait $others || fail "the other tests ended early (status $?)"
}

if [ $mode = user ]; then
    ensure_packages demo tests
    start_venv
    if targets="product examples/attn_example.so" build_release tests; then # meson test builds what else its tests need
        suites="--suite core --suite cpu_ref --suite cpu_simd --suite hostile --suite tools"
        release_tests --no-suite long
    else
        fail "build: not built" "$watched_end"
    fi
    finish
fi

# A build of its own and tests of it, counted as one failure if it does not build: stage NAME FOLDER "MESON'S OPTIONS" TARGETS
# meson test's... TARGETS are what the tests need without saying so; what they declare is built before them, and nothing else.
stage() {
    stage_name=$1 stage_folder=$2 stage_options=$3 stage_targets=$4
    shift 4
    # shellcheck disable=SC2086
    if targets=$stage_targets build_folder "$stage_name" "$stage_folder" $stage_options; then
        count_tests "$stage_folder" "$stage_name" "$@"
    else
        fail "$stage_folder: not built" "$watched_end"
    fi
}

# What needs nothing of the release build. Device code and SIMD intrinsics are left out of the sanitizers' builds: they are for
# what walks pointers, locks and strings.
other_builds() {
    options="-Db_lundef=false -Doptimization=1 -Ddebug=true -Dcpu-simd=disabled -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled -Dmpi=disabled -Dnccl=disabled"
    ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
    export ASAN_OPTIONS UBSAN_OPTIONS
    stage "address sanitizer" build-asan "-Db_sanitize=address,undefined $options" tools/attn-scan \
        --suite core --suite tools --suite cpu_ref --suite hostile --no-suite native --timeout-multiplier 10
    if build_fuzz; then
        count_tests build-fuzz "fuzzing" --suite fuzz
    else
        fail "build-fuzz: not built" "$watched_end"
    fi
    TSAN_OPTIONS=halt_on_error=1:die_after_fork=0:second_deadlock_stack=1
    export TSAN_OPTIONS
    # It cannot map its shadow where the kernel spreads addresses over more bits than it knows.
    fixed_addresses=""
    ! setarch -R true 2>/dev/null || fixed_addresses="--wrap=setarch -R"
    stage "thread sanitizer" build-tsan "-Db_sanitize=thread $options" tools/attn-scan ${fixed_addresses:+"$fixed_addresses"} --suite core \
        --no-suite native --timeout-multiplier 10
    [ "$(uname -m)" != x86_64 ] || stage "AArch64" build-aarch64 "--cross-file tools/lib/aarch64.ini" tools/attn-check --timeout-multiplier 2
}

ensure_packages demo tests style hip level_zero all "$(uname -m)"
start_venv
other_builds &
other=$!
# No kernel of cuda_flash runs here: the compiler takes each, and does not optimize it. hip's run in an interpreter; gfx90a's, the
# source of gfx942's but for products of fp8 codes, pass the compiler's front end alone (test hip_gfx90a).
if build_release tests collectives cuda-flash=sm_80,hopper,unoptimized cudnn hip=gfx942,gfx1030,gfx1100,gfx1201 level-zero; then
    for plugin in cuda_flash hip level_zero; do
        case $plugin in
        cuda_flash) compiler=nvcc ;;
        hip) compiler=clang++-19 ;;
        *) compiler=llvm-spirv-15 ;;
        esac
        if command -v $compiler >/dev/null && [ ! -e build/plugins/$plugin/attn_$plugin.so ]; then
            fail "$compiler is there, but $plugin was not built"
        fi
    done
    await_venv
    release_tests --timeout-multiplier 2
    count_tests build valgrind --setup valgrind --suite core --no-suite native
else
    fail "build: not built" "$watched_end"
fi
wait $other || fail "the builds next to the release build ended early (status $?)"
finish
