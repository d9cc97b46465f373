#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# clang-tidy finds nothing in the core, the compositions, formats, isolation, observers, operators, the plugins, the libraries next to the core, the tools, the examples and the tests. Arguments:
# clang-tidy, a build folder. Loops of cpu_simd, attn-check and attn-bench count in int inside a tile or a case:
# there findings about widened products would be noise, and so in tests, whose sizes are small. The interpreter of AMD's
# machine code and its tests are left out: their tables of branches are meant to be alike.
set -eu
failed=0
# tidy FILES CHECKS: many files in a process, whose start takes as long as a file
tidy() {
    status=0
    found=$(grep -P "$1" "$build/files" | xargs -P "$(nproc)" -n 25 "$run" -quiet -p "$build" -checks="$2" 2>&1) || status=$?
    if [ $status -ne 0 ]; then
        printf '%s\n' "$found" | grep -A3 'error:' || printf '%s\n' "$found"
        failed=1
    fi
}
run=$1 build=$(mktemp -d) root=$(cd "$(dirname "$0")/../.." && pwd)
trap 'rm -rf "$build"' EXIT
# A source that several programs have is looked at once for each set of macros that it is compiled with.
jq 'unique_by([.file, (.command | [scan("-D[A-Za-z0-9_]+")] | unique)])' "$2/compile_commands.json" >"$build/compile_commands.json"
jq -r '.[] | .directory + "/" + .file' "$build/compile_commands.json" | xargs realpath -m | sort -u >"$build/files"
tidy "^$root/(core|compositions|formats|isolation|observers|operators|collectives|layout|plugins/(cpu_ref|gpu|cuda_flash|cudnn|hip|level_zero)|tools/(common|info|run|scan))/.*\.c\$" ''
tidy "^$root/(plugins/cpu_simd|tools/(bench|check|support)|examples)/.*\.c\$" \
    '-bugprone-implicit-widening-of-multiplication-result,-bugprone-misplaced-widening-cast'
tidy "^$root/(tests/(?!hip/)|emulators/(?!amd/)).*\.c\$" '-bugprone-implicit-widening-of-multiplication-result'
exit $failed
