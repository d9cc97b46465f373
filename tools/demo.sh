#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds what this machine can use, and shows the main job: backends chosen for a model's layers, their outputs verified.
# usage: tools/demo.sh [--all]
# --all: every GPU plugin that has its compiler, not only those for the GPUs that are here
tool=demo.sh all=''
case ${1:-}$# in
0) ;;
--all1) all=1 ;;
--help1) sed -n 's/^# //p' "$0" && exit 0 ;;
*) echo "demo.sh: unknown argument '$1'; usage: demo.sh [--all]" >&2 && exit 2 ;;
esac
echo "libattn: from sources to a verified model; a minute without packages, seconds the next time"
cd "$(dirname "$0")/.."
. tools/lib/setup.sh
. tools/lib/gpus.sh
. tools/lib/demo.sh
ensure_writable
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_LOCK ATTN_RECORD ATTN_VALIDATE

# What to build: a feature of build_release for each GPU, and the rows of packages that it needs.
find_nvcc
features='' rows=demo nvidia='' amd='' intel=''
if has_nvidia; then
    nvidia=$(nvidia_targets)
    if [ -z "$nvidia" ]; then
        say "an NVIDIA GPU, but its driver names none that cuda_flash serves (sm_80 and later)"
    elif ! command -v nvcc >/dev/null; then
        say "an NVIDIA GPU ($nvidia), but no nvcc: CUDA's toolkit compiles cuda_flash; the CPU serves"
    else
        say "an NVIDIA GPU: cuda_flash is built for $nvidia"
        features="cuda-flash=$nvidia"
        case $nvidia in *sm_90a*)
            features="$features,bf16"
            say "without its kernels for prompts in float16, which are a quarter of the compiler's time" ;;
        esac
    fi
fi
amd=$(hip_archs)
if [ -n "$amd" ]; then
    say "an AMD GPU: hip is built for $amd"
    features="$features hip=$amd" rows="$rows hip"
fi
if has_intel; then
    say "an Intel GPU: level_zero is built"
    features="$features level-zero" rows="$rows level_zero"
fi
[ -n "$features" ] || say "no GPU that a plugin can be built for: core, CPU backends and tools"
[ -z "$all" ] || features="cuda-flash cudnn hip level-zero"
essential="gcc libc6-dev meson ninja-build"
# shellcheck disable=SC2086
ensure_packages $rows
targets=product status=0
# shellcheck disable=SC2086
build_release $features || status=$?
if [ $status -eq 2 ] && [ -n "$features" ]; then
    say "goes on without GPU plugins"
    features='' status=0
    build_release || status=$?
fi
[ $status -eq 0 ] || exit 1
for plugin in cuda_flash hip level_zero; do
    case " $features" in *" $(echo $plugin | tr _ -)"*)
        [ -e build/plugins/$plugin/attn_$plugin.so ] || say "$plugin was not built: its compiler is not here (README.md, Dependencies)" ;;
    esac
done

failed=''
show() {
    echo
    say "$1"
    shift
    echo "\$ $*"
    "$@" || { failed=1; echo "$tool: that failed" >&2; }
}
demo_commands show build
echo
say "${failed:+NOT }all right; what to try next:"
cat <<'NEXT'
  build/tools/attn-info --model models/gemma-2-9b.json --explain           why these backends and no others
  ATTN_BACKEND=sliding=cpu_ref build/tools/attn-info --model models/gemma-2-9b.json      an operator's order
  build/tools/attn-bench                                                  how fast, next to what the machine can do
  sh tools/test.sh                                                        the tests of this build
Engines: docs/engine.md. Kernels: docs/writing-a-backend.md. Operators: README.md.
NEXT
case $features in *,bf16*)
    echo "Float16 prompts as fast as bfloat16: meson configure build -Dcuda-archs=$nvidia && ninja -C build" ;;
esac
[ -x build/tools/attn-run ] ||
    echo "Models and recordings need libcjson-dev and pkg-config; then run this again."
[ -z "$failed" ]
