#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# An unmodified llama.cpp (the copy inside the sdist of llama-cpp-python) over libattn's ggml backend: the same tokens, and
# the speed of both. Called by tools/test_engines.sh with the folder to work in and libattn.so.1. Needs CMake and a C++
# compiler; about three minutes on two cores, 700 MB. With a third argument, server: llama-server in place of it all, whose build
# takes six minutes more.
set -eu
work=$1 core=$2 target=llama
[ "${3:-}" != server ] || target=llama-server
cd "$(dirname "$0")/../.."
llama=$work/llama/llama_cpp_python-0.3.36/vendor/llama.cpp

stop() {
    echo "ggml: $1" >&2
    exit 77
}

command -v cmake >/dev/null || stop "cmake is not there"
ls "$work"/llama/llama_cpp_python-0.3.36.tar* >/dev/null 2>&1 ||
    python3 -m pip download --quiet --no-deps -d "$work/llama" llama-cpp-python==0.3.36 '--no-binary=:all:' ||
    stop "llama-cpp-python cannot be downloaded"
[ -d "$llama" ] || tar xzf "$work"/llama/llama_cpp_python-0.3.36.tar.gz -C "$work/llama" llama_cpp_python-0.3.36/vendor/llama.cpp

launcher=$(command -v ccache || true)
cmake -S "$llama" -B "$work/llama/build" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DGGML_OPENMP=OFF -DGGML_CCACHE=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF \
    ${launcher:+-DCMAKE_C_COMPILER_LAUNCHER="$launcher" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"} >"$work/cmake.log" 2>&1 ||
    { tail -5 "$work/cmake.log"; exit 1; }
cmake --build "$work/llama/build" --target $target -j 2 >"$work/build.log" 2>&1 || { tail -5 "$work/build.log"; exit 1; }
libraries=$work/llama/build/bin
sh integrations/ggml/build.sh "$llama" "$libraries" "$work/libggml-attn.so"
${CC:-cc} -std=c11 -D_GNU_SOURCE -O1 -I "$llama/include" -I "$llama/ggml/include" integrations/ggml/generate.c -L"$libraries" -lllama \
    -lggml -lggml-base "-Wl,-rpath,$libraries" -o "$work/generate"
${CC:-cc} -std=c11 -D_GNU_SOURCE -O1 -I "$llama/ggml/include" -I "$llama/ggml/src" integrations/ggml/operators.c -L"$libraries" \
    -lggml -lggml-base -lggml-cpu -ldl -lm "-Wl,-rpath,$libraries" -o "$work/operators"
[ -f "$work/f32.gguf" ] || "$work/generate" --float32 "$work/llama/model.gguf" "$work/f32.gguf" >"$work/convert.log" 2>&1

if [ $target = llama-server ]; then
    for setting in 'f16 f16' 'q8_0 f16' 'f16 q4_0 --kv-unified'; do
        # shellcheck disable=SC2086 # the types, and an option
        python3 integrations/ggml/server.py "$libraries/llama-server" "$work/f32.gguf" "$work/libggml-attn.so" "$core" $setting
    done
    exit
fi
passed=0
# run WHOSE MODEL CACHE THREADS TOKENS REPEATS
run() {
    whose=$1
    shift
    case $whose in
    ours) GGML_BACKEND_PATH=$work/libggml-attn.so ATTN_LIBRARY=$core ATTN_CACHE_DIR='' "$work/generate" "$@" >"$work/ours" 2>"$work/ours.err" ;;
    *) "$work/generate" "$@" >"$work/theirs" 2>"$work/theirs.err" ;;
    esac || { cat "$work/$whose.err"; exit 1; }
}
same() { # name, then the arguments of generate: equal tokens, and nothing stayed with ggml
    name=$1
    shift
    run theirs "$@"
    ATTN_VALIDATE=1 run ours "$@"
    if ! cmp "$work/theirs" "$work/ours" || grep libattn: "$work/ours.err"; then
        echo "FAILED $name"
        exit 1
    fi
    passed=$((passed + 1))
    echo "$name: equal"
}
for backend in '' cpu_ref; do
    ATTN_VALIDATE=1 ATTN_BACKEND=$backend ATTN_LIBRARY=$core ATTN_CACHE_DIR='' "$work/operators" "$work/libggml-attn.so" 500 || exit 1
    passed=$((passed + 1))
done
same 'float32 weights, f32 cache, one batch' "$work/f32.gguf" f32 1 32 1
same 'float32 weights, f16 cache, three batches' "$work/f32.gguf" f16 2 64 14
ATTN_BACKEND=cpu_ref same 'the same on cpu_ref' "$work/f32.gguf" f16 2 16 2
ATTN_BACKEND=cpu_ref same 'q8_0 cache, cpu_ref' "$work/f32.gguf" q8_0 1 24 2
same 'q8_0 cache' "$work/f32.gguf" q8_0 2 24 2
# Few tokens: ggml rounds queries to 8 bits here, and a 4-bit code that flips moves a key by a sixteenth of its range.
same 'q4_0 cache' "$work/f32.gguf" q4_0 1 6 1
same 'K q8_0, V f16' "$work/f32.gguf" q8_0,f16 2 24 2
same 'K f16, V q4_0' "$work/f32.gguf" f16,q4_0 2 24 2
same 'six requests in three slots' "$work/f32.gguf" f16 2 12 12 slots
same 'six requests in three slots, one cache' "$work/f32.gguf" f16 2 12 12 unified
same 'the same, K q8_0, V f16' "$work/f32.gguf" q8_0,f16 2 12 12 unified
for types in q5_0,q5_0 q5_1,f16 f16,iq4_nl; do
    run ours "$work/f32.gguf" $types 1 2 1
    grep -q "cache types ${types%,*} and ${types#*,}, .* stays ggml.s: f16, bf16, f32, q8_0 and q4_0" "$work/ours.err" ||
        { echo "FAILED: a cache of $types is not reported"; exit 1; }
done
passed=$((passed + 1))
# A short step runs on its caller's thread, next to ggml's two; the first long one starts a second thread of libattn's.
for expected in '1 2' '14 3'; do
    run ours "$work/f32.gguf" f16 2 2 "${expected% *}"
    grep -q "^threads at the end: ${expected#* }\$" "$work/ours.err" ||
        { tail -1 "$work/ours.err"; echo "FAILED: ${expected#* } threads expected"; exit 1; }
done
passed=$((passed + 1))
# One machine at one time: read them as ratios within a line's cache and threads.
for setting in 'f16 1' 'f16 2' 'q8_0 1' 'q4_0 1'; do
    for round in 1 2 3; do
        for whose in theirs ours; do
            # shellcheck disable=SC2086 # two words: the cache's type and threads
            run "$whose" "$work/llama/model.gguf" $setting 24 14
            echo "$setting threads, round $round, $whose: $(sed -n 's/^\(prompt: .*\|a token: .*\)/\1;/p' "$work/$whose.err" | tr '\n' ' ')"
        done
    done
done
echo "ggml: $passed passed"
