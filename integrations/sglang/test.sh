#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SGLang's own engine over libattn on a CPU, unmodified but for stand-ins of sglang-kernel and torchvision: the same tokens as with
# SGLang's torch_native or, for kinds of layers that it lacks, Transformers', its radix cache, and refusals before weights are loaded.
# Called by tools/test_engines.sh with the folder to work in and libattn.so.1; 3 GB there with PyTorch's build for CPUs, more with PyPI's, the network once. On two quiet cores about
# ten minutes. The CPU must have no AMX: with it SGLang calls kernels that are not there.
set -eu
work=$1/sglang core=$2
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
python=$work/venv/bin/python
version=0.5.16
if grep -qw amx_tile /proc/cpuinfo 2>/dev/null; then
    echo "sglang: this CPU has AMX, for which SGLang calls kernels that PyPI does not have" >&2
    exit 77
fi

install() {
    python3 -m venv "$work/venv" && "$python" -m pip install --quiet --no-deps sglang==$version || return 1
    "$python" -m pip install --quiet torch==2.13.0 triton numpy setuptools transformers==5.12.1 'kernels<0.15' apache-tvm-ffi==0.1.11 \
        'fastapi<0.137' 'starlette<1' pydantic==2.12.5 openai==2.6.1 xgrammar==0.2.1 aiohttp compressed-tensors dill einops gguf \
        interegular IPython loguru msgspec ninja numba nvidia-ml-py orjson pandas partial-json-parser pillow prometheus-client psutil \
        pybase64 python-multipart pyzmq requests scipy sentencepiece setproctitle tiktoken uvicorn uvloop || return 1
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    # Any name of torchvision is a class whose attributes are their names: no vision model runs here.
    mkdir -p "$site/torchvision/transforms/v2" "$site/torchvision-0.28.0.dist-info"
    printf 'Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n' >"$site/torchvision-0.28.0.dist-info/METADATA"
    echo torchvision >"$site/torchvision-0.28.0.dist-info/top_level.txt"
    for module in __init__ io transforms/__init__ transforms/functional transforms/v2/__init__ transforms/v2/functional; do
        cat >"$site/torchvision/$module.py" <<'PYTHON'
class _Any(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Any(name, (), {})
PYTHON
    done
}

mkdir -p "$work/models"
if [ ! -f "$work/venv/complete" ]; then
    install >"$work/install.log" 2>&1 || { echo "sglang: $version cannot be installed: see $work/install.log" >&2 && exit 77; }
    touch "$work/venv/complete"
fi
rm -rf "$work/package" # a copy, since setuptools writes next to what it packs
cp -r "$source/bindings/python" "$work/package"
"$python" -m pip install --quiet --no-deps --no-build-isolation "$work/package" >>"$work/install.log" 2>&1 || { tail -5 "$work/install.log" && exit 1; }
"$python" "$here/../models.py" "$work/models" >"$work/models.log" 2>&1 || { tail -5 "$work/models.log"; exit 1; }

LD_LIBRARY_PATH=$(dirname "$core")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
PYTHONPATH=$here/stand_in
CXX="${CXX:-c++} -include cstddef" # its n-grams in C++ take size_t without a header
export CXX LD_LIBRARY_PATH PYTHONPATH HF_HUB_OFFLINE=1 ATTN_VALIDATE=1 SGLANG_USE_CPU_ENGINE=1 TORCHDYNAMO_DISABLE=1
passed=0
# generate OUTPUT MODEL BACKEND [KIND...], as generate.py has them
generate() {
    output=$1 model=$2 named=$3
    shift 3
    "$python" "$here/generate.py" "$work/models/$model" "$named" "$@" >"$work/$output.log" 2>&1 || return 1
    sed -n 's/.*\({"tokens".*\)/\1/p' "$work/$output.log" >"$work/$output.json"
}
generate theirs multi-query torch_native || { tail -5 "$work/theirs.log"; echo "FAILED multi-query with torch_native"; exit 1; }
grep -q 'loading shards' "$work/theirs.log" || { echo "FAILED: SGLang's line for weights, 'loading shards', is another one now"; exit 1; }
for run in cpu_simd cpu_ref 'cpu_simd ngram' 'cpu_ref ngram'; do
    backend=${run% *} drafts=$(expr "$run" : '.* \(.*\)') || true
    ATTN_BACKEND=$backend generate ours multi-query libattn $drafts || { tail -5 "$work/ours.log"; echo "FAILED on $backend"; exit 1; }
    "$python" - "$work/theirs.json" "$work/ours.json" $drafts <<'PYTHON' || { echo "FAILED on $backend"; exit 1; }
import json, sys
theirs, ours = (json.load(open(name)) for name in sys.argv[1:3])
assert theirs["tokens"] == ours["tokens"], "other tokens"
assert len({tuple(row) for row in ours["tokens"][0]}) > 1, "all prompts gave the same tokens"
assert (ours["a step"] > 3) == (len(sys.argv) > 3), ours
assert ours["cached"] > 200 and ours["apart"] < 1e-3, ours
print(f"sglang: log-probabilities from Transformers' {ours['apart']:.1e}, torch_native's {theirs['apart']:.1e}")
PYTHON
    passed=$((passed + 1))
    echo "sglang: multi-query in float32 on $backend${drafts:+, drafts of n-grams}: equal"
done
# like_transformers NAME MODEL LARGEST [KIND...]: on both backends Transformers' tokens, log-probabilities LARGEST from its at most.
like_transformers() {
    name=$1 made=$2 largest=$3
    shift 3
    for backend in cpu_simd cpu_ref; do
        SGLANG_MAMBA_CONV_DTYPE=float32 ATTN_BACKEND=$backend generate own "$made" libattn "$@" || { tail -5 "$work/own.log"; echo "FAILED $name on $backend"; exit 1; }
        "$python" - "$work/own.json" "$largest" "$@" <<'PYTHON' || { echo "FAILED $name on $backend"; exit 1; }
import json, sys
ours, kinds = json.load(open(sys.argv[1])), sys.argv[3:]
assert ours["alike"] and ours["cached"] > 150 and ours["apart"] < float(sys.argv[2]), ours
assert (ours["a step"] > 1) == any(kind not in ("states", "replays") for kind in kinds), ours
assert "replays" not in kinds or ours["beyond"] == 5, ours  # one request's text is shorter than a state's interval
print(f"sglang: log-probabilities from Transformers' {ours['apart']:.1e}, {ours['a step']:.1f} tokens a step")
PYTHON
        passed=$((passed + 1))
        echo "sglang: $name in float32 on $backend: Transformers' tokens"
    done
}
# SGLang's own backends for a CPU without AMX have neither of these layers. With experts some probabilities differ by more.
like_transformers 'gated delta layers (Qwen3-Next)' qwen3-next-experts 5e-3 states
like_transformers 'gated delta layers, replays of whose decodes write the states of the prefix cache' qwen3-next-all-experts 5e-3 replays
like_transformers 'multi-head latent attention (DeepSeek-V3)' deepseek-v3-yarn 1e-3
like_transformers 'multi-head latent attention, drafts of n-grams' deepseek-v3-yarn 1e-3 ngram
like_transformers 'multi-head latent attention, drafts of another model' deepseek-v3-yarn 1e-3 drafts
like_transformers "drafts of a model's own layer (MTP, DeepSeek-V3)" deepseek-v3-mtp 1e-3 mtp
like_transformers 'drafts of a model' multi-query 1e-3 drafts
like_transformers 'drafts of EAGLE' multi-query 1e-3 eagle
like_transformers 'trees of EAGLE' multi-query 1e-3 eagle tree
like_transformers 'trees of EAGLE3' multi-query 1e-3 eagle3 tree
# refused NAME MODEL TEXT [states]: no engine, and the reason with its values before weights are loaded.
refused() {
    if generate refused "$2" libattn ${4:+"$4"} || ! grep -q "$3.*leave out --attention-backend libattn" "$work/refused.log" ||
        grep -q 'loading shards' "$work/refused.log"; then
        tail -5 "$work/refused.log"
        echo "FAILED $1: not refused with '$3'"
        exit 1
    fi
    passed=$((passed + 1))
    echo "sglang: $1: refused before weights"
}
refused 'heads of 60' refused 'head_size is 60; multiples of 8'
refused 'windows of another type' qwen3-next-experts 'gated delta layers: windows of torch.bfloat16' states
echo "sglang: $passed passed"
