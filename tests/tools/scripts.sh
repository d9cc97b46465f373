#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tools/demo.sh and tools/test.sh where something is missing or fails: a PATH of their own in a copy whose name has spaces, with a
# meson and a ninja that build nothing. And which GPUs tools/lib/gpus.sh finds in a tree that stands for /.
# usage: scripts.sh ROOT
set -eu
root=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
copy="$work/a copy" bin="$work/bin"
mkdir -p "$copy/tools" "$copy/tests" "$copy/plugins/level_zero" "$bin"
cp -r "$root"/tools/*.sh "$root/tools/lib" "$copy/tools/"
cp "$root/meson_options.txt" "$copy/"
cp "$root/tests/requirements.txt" "$copy/tests/"
cp "$root/plugins/level_zero/sysfs.c" "$copy/plugins/level_zero/"
for program in awk basename cat chmod cmp cp cut date dirname env grep head jq mkdir mktemp paste rm sed sh sleep sort tail touch tr; do
    ln -s "$(command -v $program)" "$bin/$program"
done
failed=0

# fake NAME BODY: a program of that name
fake() {
    printf '#!/bin/sh\n%s\n' "$2" >"$bin/$1"
    chmod +x "$bin/$1"
}

# expect STATUS PATTERN SCRIPT [arguments]: what the script ends with, and says
expect() {
    status=$1 pattern=$2
    shift 2
    got=0
    (cd / && PATH=$bin OUT="$work" sh "$copy/tools/$1" ${2:+"$2"}) >"$work/said" 2>&1 || got=$?
    if [ $got -ne "$status" ] || ! grep -q -- "$pattern" "$work/said"; then
        echo "$*: status $got, not $status, or without '$pattern':"
        cat "$work/said"
        failed=1
    fi
}

fake uname 'case ${1:-} in -s) echo Linux ;; *) echo x86_64 ;; esac'
fake id 'echo 1000'
fake sudo 'exit 1'
fake cc 'read -r line; case $line in *cJSON*) [ ! -e "$OUT/no_json" ] ;; esac'
fake python3 '[ "$1" = -c ]' # which has no venv
fake pkg-config ''
fake nvcc ''
fake c++ ''
fake meson 'case $1 in
setup)
    shift
    [ "$1" != --reconfigure ] || { shift; again=" again"; }
    mkdir -p "$1" && : >"$1/build.ninja"
    echo "$*${again:-}" >>"$OUT/configured" ;;
test)
    case "$*" in *build-asan*) result=FAIL ;; *--suite\ fuzz*) result=TIMEOUT ;; *) result=OK ;; esac
    mkdir -p "$3/meson-logs"
    printf "{\"name\": \"libattn:core / one\", \"result\": \"%s\", \"duration\": 1.5, \"stdout\": \"%s\", \"stderr\": \"%s\"}\n" $result \
        "$(printf "line %s\\\\n" 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16)" "why in $3\\n" >"$3/meson-logs/$5.json"
    echo "what meson says"
    [ $result = OK ] ;;
esac'
fake ninja 'echo "[1/1] building"
[ $2 != build-tsan ] || { echo "a program did not link"; exit 1; }
mkdir -p $2/tools
for name in info check; do
    printf "#!/bin/sh\necho \"  cpu_simd@avx2 served\"\n" >$2/tools/attn-$name
    chmod +x $2/tools/attn-$name
done'

# Not root, no sudo; Linux with other packages, and without any that is known.
fake apt-get 'echo "apt-get $*" >>"$OUT/asked"; echo "no network"; exit 1'
mv "$bin/cc" "$work/cc"
expect 3 'run: sudo apt-get install -y --no-install-recommends.* gcc' demo.sh
rm "$bin/apt-get"
for manager in dnf zypper; do
    fake $manager 'exit 1'
    expect 3 "run: sudo $manager install -y gcc glibc-devel cjson-devel\|run: sudo $manager install -y gcc glibc-devel cJSON-devel" demo.sh
    rm "$bin/$manager"
done
fake pacman 'exit 1'
expect 3 'run: sudo pacman -S --needed gcc cjson' demo.sh
rm "$bin/pacman"
fake apk 'exit 1'
expect 3 'run: sudo apk add build-base cjson-dev' demo.sh
rm "$bin/apk"
fake brew 'exit 1'
expect 3 'not by brew' demo.sh
fake uname 'echo Darwin'
expect 3 'libattn is for Linux; this is Darwin' demo.sh
fake uname 'case ${1:-} in -s) echo Linux ;; *) echo x86_64 ;; esac'
rm "$bin/brew"
[ ! -e "$work/asked" ] || { echo "apt-get was run without being root"; failed=1; }

# What it can do without: JSON. The second time nothing is configured again; a library that appears is asked for.
mv "$work/cc" "$bin/cc"
: >"$work/no_json"
fake apt-get 'echo "apt-get $*" >>"$OUT/asked"; echo "no network"; exit 1'
expect 0 'goes on without libcjson-dev' demo.sh
grep -q 'held to the reference' "$work/said" && grep -q 'all right; what to try next' "$work/said" || { cat "$work/said"; failed=1; }
fake id 'echo 0'
expect 0 'that failed; run: sudo apt-get install -y --no-install-recommends libcjson-dev$' demo.sh
grep -q 'no network' "$work/said" && grep -q '^apt-get update' "$work/asked" || { cat "$work/said"; failed=1; }
asked=$(cat "$work/asked")
expect 0 'that failed before (build/.without); run: sudo apt-get install' demo.sh
[ "$(cat "$work/asked")" = "$asked" ] || { echo "apt-get was run again"; failed=1; }
[ "$(grep -c . "$work/configured")" -eq 1 ] || { cat "$work/configured"; failed=1; }
grep -q -- '^build -Dtests=disabled -Dmpi=disabled -Dnccl=disabled -Dcuda-flash=disabled -Dcudnn=disabled -Dhip=disabled -Dlevel-zero=disabled$' "$work/configured" ||
    { cat "$work/configured"; failed=1; }
rm "$work/no_json"
expect 0 'configuring again' demo.sh
expect 2 "unknown argument '--al'" demo.sh --al

# Every stage is counted, those in the background too; the end says what failed, with the last lines of its log.
expect 2 "unknown argument '--al'" test.sh --al
expect 2 'usage' test.sh --filter
expect 0 '^2 passed, 0 failed, 0 skipped$' test.sh
[ "$(tail -n 1 "$work/configured")" = 'build -Dtests=auto again' ] || { cat "$work/configured"; failed=1; }
expect 3 'run: sudo apt-get' test.sh --all # packages
rm "$bin/apt-get"
fake pacman ''
echo cuda-flash=sm_90a >>"$copy/build/.has" # kernels for a GPU stay: unoptimized ones do not take their place
expect 1 '^4 passed, 4 failed, 0 skipped$' test.sh --all
! grep -q unoptimized "$work/configured" || { cat "$work/configured"; failed=1; }
grep -q '^what meson says$' "$work/said" || { cat "$work/said"; failed=1; }
grep -q '^\[.*\] end, [0-9]* s of CPU$' "$work/said" || { cat "$work/said"; failed=1; }
sed '1,/^failed:$/d' "$work/said" >"$work/end"
for line in '  address sanitizer: core/one FAIL' '    line 2' '    line 16' '    why in build-asan' '  fuzzing: core/one TIMEOUT' \
    '  build-tsan: not built' '    a program did not link' '  nvcc is there, but cuda_flash was not built'; do
    grep -q -- "^$line\$" "$work/end" || { echo "no '$line' at the end of:"; cat "$work/said"; failed=1; }
done
! grep -q 'line 1$' "$work/end" || { echo "more than 15 lines of a log:"; cat "$work/end"; failed=1; }
rm -r "$copy/build"
: >"$copy/build"
expect 1 'a copy/build cannot be written' demo.sh
expect 1 'a copy/build cannot be written' test.sh

# finds VALUE FUNCTION: what it prints, or its status
finds() {
    found=$(cd "$copy" && PATH=$bin:$PATH ATTN_TEST_ROOT=$work/machine sh -euc ". ./tools/lib/gpus.sh; $2") || found=none
    [ "$found" = "$1" ] || { echo "$2: '$found', not '$1'"; failed=1; }
}
finds none has_nvidia
finds none has_intel
finds '' hip_archs
mkdir -p "$work/machine/dev" "$work/machine/sys/class/drm/card0/device" "$work/machine/sys/class/kfd/kfd/topology/nodes/0" "$work/machine/sys/class/kfd/kfd/topology/nodes/1"
: >"$work/machine/dev/nvidia0"
fake nvidia-smi 'printf "9.0\n12.0\n9.0\n7.5\n"'
fake nvcc 'printf "sm_80\nsm_90\nsm_120\n"'
finds '' has_nvidia
finds sm_120,sm_90a nvidia_targets
fake nvcc 'printf "sm_80\nsm_90\n"'
finds compute_80,sm_90a nvidia_targets
rm "$copy/build" # a file
ATTN_TEST_ROOT=$work/machine expect 0 'Float16 prompts .* -Dcuda-archs=compute_80,sm_90a ' demo.sh
grep -q -- '-Dcuda-flash=auto -Dcuda-archs=compute_80,sm_90a,bf16 ' "$work/configured" || { cat "$work/configured"; failed=1; }
fake nvidia-smi 'exit 9'
finds '' nvidia_targets
echo 'gfx_target_version 0' >"$work/machine/sys/class/kfd/kfd/topology/nodes/0/properties"
echo 'gfx_target_version 90402' >"$work/machine/sys/class/kfd/kfd/topology/nodes/1/properties"
finds gfx942 hip_archs
echo 0x8086 >"$work/machine/sys/class/drm/card0/device/vendor"
echo 0x9a49 >"$work/machine/sys/class/drm/card0/device/device"
finds none has_intel
echo 0x0bd5 >"$work/machine/sys/class/drm/card0/device/device"
finds '' has_intel
exit $failed
