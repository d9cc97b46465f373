#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vLLM's engine on a GPU through libattn: agreement with Transformers and vLLM's own backends, speed and memory next to
# FLASH_ATTN. What it found is in docs/engines.md and docs/performance/results.md.
# `pack`, where the network is: what vLLM 0.26.0 needs on a machine with a Hopper GPU, Python 3.12, torch 2.11 and Transformers 5
# but no network; 42 MB in FOLDER. Structured outputs are not in it: xgrammar is a stand-in.
# `run`, there, in a checkout with a build of cuda_flash in build/: five rounds take about six minutes. After SECONDS no further
# round begins. ATTN_VLLM=DIRECTORY: an unpacked set, or a whole installation's site-packages.
# usage: tools/device_vllm.sh pack FOLDER
#        tools/device_vllm.sh run FOLDER [ROUNDS [SECONDS]]
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
if [ $# -lt 2 ]; then
    sed -n 's/^# usage: /usage: /p' "$0" >&2
    exit 2
fi
what=$1 folder=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheels() {
    python3 -m pip "$@" --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 \
        --abi none --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64
}

case $what in
pack)
    mkdir -p "$folder"
    wheels download -d "$work" vllm==0.26.0
    python3 "$here/integrations/vllm/slim.py" "$work"/vllm-*.whl "$work/vllm"
    rm -f "$work"/vllm/*.dist-info/RECORD
    tar cf - -C "$work/vllm" . | xz -T0 -4 >"$folder/vllm.tar.xz"
    wheels install --target "$work/packages" annotated-types astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf==0.20.0 \
        dill distro 'fastapi<0.137' gguf httpx2 ijson jiter jmespath jsonschema jsonschema-specifications lark==1.2.2 llguidance \
        loguru mistral_common model-hosting-container-standards msgspec openai openai-harmony partial-json-parser \
        prometheus-fastapi-instrumentator pybase64 pycountry pydantic==2.12.5 pydantic-core==2.41.5 pydantic-extra-types \
        python-json-logger python-multipart pyzmq referencing rpds-py setproctitle sniffio starlette supervisor \
        typing-inspection uvicorn watchfiles
    mkdir "$work/packages/xgrammar"
    cat >"$work/packages/xgrammar/__init__.py" <<'PYTHON'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
PYTHON
    (cd "$work/packages" && rm -rf bin pycountry/locales mistral_common/data/* && find . -name '*.pyi' -delete)
    tar cf - -C "$work/packages" . | xz -T0 -4 >"$folder/packages.tar.xz"
    du -h "$folder"/*.tar.xz
    ;;
run)
    if [ ! -d "${ATTN_VLLM:-}" ]; then
        ATTN_VLLM=$work/site
        mkdir "$ATTN_VLLM"
        for part in vllm packages; do
            tar xJf "$folder/$part.tar.xz" -C "$ATTN_VLLM"
        done
    fi
    [ -f "$here/build/core/libattn.so.1" ] || {
        echo "device_vllm: no build/core/libattn.so.1: meson setup build -Dcuda-flash=enabled && ninja -C build" >&2
        exit 77
    }
    PYTHONPATH=$ATTN_VLLM:$here/bindings/python/src:$here/integrations/vllm${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    logs=$folder/logs
    mkdir -p "$logs"
    status=0
    (cd "$logs" && exec python3 "$here/integrations/vllm/device.py" all "$work/models" "${3:-5}" "${4:-3600}") || status=$?
    [ $status = 0 ] || for log in "$logs"/*.log; do echo "== $log"; tail -n 5 "$log" | cut -c 1-400; done
    exit $status
    ;;
*) sed -n 's/^# usage: /usage: /p' "$0" >&2 && exit 2 ;;
esac
