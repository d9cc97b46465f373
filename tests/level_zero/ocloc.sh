#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Intel's compiler makes machine code of modules of SPIR-V, with the plugin's options, and spills no register. Attends have
# matrix instructions and 16 lanes, the others 32 lanes.
# usage: ocloc.sh OCLOC DEVICE MODULE.spv...
set -eu
unset MALLOC_PERTURB_ # Meson's: the compiler reads memory that it has not set, and aborts now and then
ocloc=$1
device=$2
shift 2
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
for module; do
    status=0
    # The compiler's own dumps show the instructions; its disassembler needs a library that Debian lacks.
    IGC_ShaderDumpEnable=1 IGC_DumpToCustomDir="$root/dump" "$ocloc" compile -spirv_input -file "$module" \
        -device "$device" -64 -options -ze-opt-large-register-file -out_dir "$root" >"$root/log" 2>&1 || status=$?
    if [ $status -ne 0 ] || grep -qi spill "$root/log"; then
        echo "$module for $device:" >&2
        head -20 "$root/log" >&2
        exit 1
    fi
    case $module in
    */attend_*) lanes=16 wanted=dpas ;;
    *) lanes=32 wanted=. ;;
    esac
    for code in "$root"/dump/*.asm; do
        case $code in
        *_simd${lanes}_*) grep -q "$wanted" "$code" && continue ;;
        esac
        echo "$module for $device: $(basename "$code") has not $lanes lanes, or no $wanted" >&2
        exit 1
    done
    rm -rf "$root/dump"
done
