#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vLLM's or SGLang's engine on a GPU through libattn: agreement with Transformers and the engine's own backends, speed and memory
# next to FLASH_ATTN or fa3. What it found is in docs/engines.md and docs/performance/results.md.
# `pack`, where the network is: what vLLM 0.26.0 or SGLang 0.5.16 needs on a machine with a Hopper GPU, Python 3.12, torch 2.11 and
# Transformers 5 but no network; 29 to 42 MB in FOLDER. Structured outputs are not in it: xgrammar is a stand-in. SGLang's has
# FlashAttention-3 for heads of 128 and 256 in bfloat16, the model files that integrations/slim.py names, and no FlashInfer; it compiles
# kernels there (nvcc).
# `run`, there, in a checkout with a build of cuda_flash in build/: all models and rows of integrations/device.py, or those that are
# named.
# After SECONDS no further round begins.
# `tests`, there: vLLM's own test of batch invariance for models of integrations/device.py, from the unpacked sdist of its release.
# ATTN_ENGINE=DIRECTORY: an unpacked set, or a whole installation's site-packages.
# usage: tools/device_engines.sh pack vllm|sglang FOLDER
#        tools/device_engines.sh run vllm|sglang FOLDER [ROUNDS [SECONDS [NAME...]]]
#        tools/device_engines.sh tests vllm FOLDER SDIST [MODEL...]
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
usage() {
    sed -n 's/^# usage: /usage: /p; s/^#        tools/       tools/p' "$0" >&2
    exit 2
}
[ $# -ge 3 ] || usage
what=$1 engine=$2 folder=$3
shift 3
case $engine in vllm | sglang) ;; *) usage ;; esac
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheels() {
    python3 -m pip "$@" --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
        --abi none --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64
}

# stand_in MODULE: any name of it is an empty class, of which SGLang makes a field of its requests.
stand_in() {
    mkdir -p "$work/packages/$(dirname "$1")"
    cat >"$work/packages/$1.py" <<'PYTHON'
import pydantic


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (pydantic.BaseModel,), {})
PYTHON
}

case $what in
pack)
    mkdir -p "$folder"
    common='annotated-types distro einops gguf jiter loguru msgspec openai partial-json-parser pybase64 pydantic==2.12.5
        pydantic-core==2.41.5 python-multipart pyzmq setproctitle sniffio starlette<1 fastapi<0.137 typing-inspection uvicorn dill'
    case $engine in
    vllm)
        wheels download -d "$work" vllm==0.26.0
        packages='astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0 httpx2 ijson jmespath jsonschema
            jsonschema-specifications lark==1.2.2 llguidance mistral_common model-hosting-container-standards openai-harmony
            prometheus-fastapi-instrumentator pycountry pydantic-extra-types python-json-logger referencing rpds-py supervisor watchfiles'
        ;;
    sglang)
        wheels download -d "$work" sglang==0.5.16 sglang-kernel==0.4.5
        packages='apache-tvm-ffi==0.1.11 compressed-tensors interegular kernels<0.15 openai==2.6.1 orjson tokenizers==0.22.2 transformers==5.12.1'
        common=$(echo "$common" | sed 's/ openai / /')
        ;;
    esac
    for wheel in "$work"/*.whl; do
        python3 "$here/integrations/slim.py" "$wheel" "$work/$engine"
    done
    rm -f "$work/$engine"/*.dist-info/RECORD
    tar -I 'xz -T0 -4' --sparse --hole-detection=raw -cf "$folder/$engine.tar.xz" -C "$work/$engine" .
    # shellcheck disable=SC2086
    (set -f && wheels install --target "$work/packages" $common $packages)
    stand_in xgrammar/__init__
    [ $engine = vllm ] || for module in deep_gemm/__init__ flashinfer/__init__ flashinfer/sampling IPython/__init__ IPython/display; do stand_in $module; done
    (cd "$work/packages" && rm -rf bin pycountry/locales mistral_common/data/* && find . \( -name '*.pyi' -o -name '*.pyc' \) -delete)
    tar -I 'xz -T0 -4' -cf "$folder/$engine-packages.tar.xz" -C "$work/packages" .
    du -h "$folder/$engine"*.tar.xz
    ;;
run | tests)
    if [ -n "${ATTN_ENGINE:-}" ]; then
        [ -d "$ATTN_ENGINE" ] || { echo "device_engines: ATTN_ENGINE is '$ATTN_ENGINE'; a directory is needed" >&2 && exit 2; }
        ATTN_ENGINE=$(cd "$ATTN_ENGINE" && pwd)
    else
        ATTN_ENGINE=$work/site
        mkdir "$ATTN_ENGINE"
        for part in $engine $engine-packages; do
            tar xJf "$folder/$part.tar.xz" -C "$ATTN_ENGINE"
        done
    fi
    [ -f "$here/build/core/libattn.so.1" ] || {
        echo "device_engines: no build/core/libattn.so.1: meson setup build -Dcuda-flash=enabled && ninja -C build" >&2
        exit 77
    }
    # The entry points, by which engines find the package in all their processes.
    python3 "$here/bindings/python/generate.py"
    cp -r "$here/bindings/python" "$work/package"
    python3 -m pip install --quiet --no-deps --no-index --no-build-isolation --target "$work/libattn" "$work/package"
    export PYTHONPATH="$ATTN_ENGINE:$work/libattn:$here/integrations:$here/integrations/$engine${PYTHONPATH:+:$PYTHONPATH}"
    export LD_LIBRARY_PATH="$here/build/core${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    logs=$folder/logs
    mkdir -p "$logs"
    status=0
    if [ "$what" = tests ]; then
        [ -d "${1:-}/tests/v1/determinism" ] || usage
        sdist=$(cd "$1" && pwd)
        shift
        for model in ${*:-llama deepseek-v3 qwen3-next}; do
            python3 "$here/integrations/vllm/invariance_tests.py" "$sdist" "$work/models" "$model" libattn >"$logs/tests-$model.log" 2>&1 &
            running="${running:-} $model=$!"
        done
        for test in $running; do
            wait "${test#*=}" || status=1
            log=$logs/tests-${test%=*}.log
            echo "vLLM's test_batch_invariance, ${test%=*}: $(grep -E '^[0-9]+ (passed|failed)' "$log" || tail -n 1 "$log")"
        done
        exit $status
    fi
    (cd "$logs" && exec python3 "$here/integrations/device.py" all "$work/models" "$@") || status=$?
    [ $status = 0 ] || for log in "$logs"/*.log; do echo "== $log"; tail -n 5 "$log" | cut -c 1-400; done
    exit $status
    ;;
*) usage ;;
esac
