#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Intel's compiler makes machine code of modules of SPIR-V, with the plugin's options, and spills no register; attends
# have matrix instructions.
# usage: ocloc.sh OCLOC DEVICE MODULE.spv...
set -eu
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
    */attend_*)
        if ! cat "$root"/dump/*.asm | grep -q dpas; then
            echo "$module for $device: no dpas" >&2
            exit 1
        fi
        ;;
    esac
    rm -rf "$root/dump"
done
