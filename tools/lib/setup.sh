# SPDX-License-Identifier: Apache-2.0
# What demo.sh and test.sh have in common: the packages, and the release build in build/. Sourced from the root.
set -eu

PACKAGES="gcc g++ clang-format-14 clang-tidy-14 meson ninja-build pkg-config jq libcmocka-dev libcjson-dev libdlpack-dev libopenmpi-dev openmpi-bin gnuplot-nox valgrind clang-19 clang-tools-19 lld-19 llvm-19 python3-venv"
[ "$(uname -m)" != x86_64 ] || PACKAGES="$PACKAGES gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user clang-15 llvm-spirv-15 spirv-tools libze-dev libze1 intel-opencl-icd"

# Installs what is missing, as root or through sudo; else prints the one line to run and ends with 3.
ensure_packages() {
    missing=""
    for package in $PACKAGES; do
        if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || return 0
    if [ "$(id -u)" -eq 0 ]; then
        as_root=""
    elif sudo -n true 2>/dev/null; then
        as_root="sudo -n"
    else
        echo "missing packages; run: sudo apt-get install -y$missing" >&2
        exit 3
    fi
    $as_root apt-get update -qq
    # shellcheck disable=SC2086
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null
}

# Sets `toolchains` to what is there next to the C compiler: nvcc where it stands, or none.
find_toolchains() {
    for folder in ${CUDA_HOME:+"$CUDA_HOME/bin"} /usr/local/cuda/bin; do
        if ! command -v nvcc >/dev/null 2>&1 && [ -x "$folder/nvcc" ]; then
            PATH=$folder:$PATH
            export PATH
        fi
    done
    toolchains=$(command -v nvcc || echo none)
}

# Runs a command and shows what it says only if it fails, which ends the script.
quietly() {
    quiet_log=$(mktemp)
    quiet_status=0
    "$@" >"$quiet_log" 2>&1 || quiet_status=$?
    [ $quiet_status -eq 0 ] || cat "$quiet_log" >&2
    rm -f "$quiet_log"
    [ $quiet_status -eq 0 ] || exit 1
}

# Configures a folder if it is new, and builds what has changed. Arguments: folder, then meson setup's.
build_folder() {
    build_into=$1
    shift
    [ -f "$build_into/build.ninja" ] || quietly meson setup "$build_into" "$@"
    quietly ninja -C "$build_into"
}

# build/ is the release build; configured anew when a toolchain appears or goes.
build_release() {
    find_toolchains
    if [ -f build/build.ninja ] && [ "$(cat build/.toolchains 2>/dev/null)" != "$toolchains" ]; then
        quietly meson setup --reconfigure build
    fi
    build_folder build
    echo "$toolchains" >build/.toolchains
}

# build-fuzz/: the libFuzzer targets and the core under them, nothing else.
build_fuzz() {
    [ -f build-fuzz/build.ninja ] ||
        CC=clang quietly meson setup build-fuzz -Dfuzz=enabled -Db_sanitize=address,undefined -Db_lundef=false \
            -Dbuildtype=debugoptimized -Dcpu-simd=disabled -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled -Dmpi=disabled -Dnccl=disabled
    quietly ninja -C build-fuzz fuzz
}

# build/venv, the one Python environment, as tests/requirements.txt pins it; made anew when that changes. Where nothing can
# be downloaded it stays incomplete: the Python tests then count as skipped.
ensure_venv() {
    cmp -s tests/requirements.txt build/venv/.complete && return 0
    rm -f build/venv/.complete
    if python3 -m venv build/venv && build/venv/bin/pip install --quiet --disable-pip-version-check -r tests/requirements.txt; then
        cp tests/requirements.txt build/venv/.complete
    else
        echo "build/venv could not be made from tests/requirements.txt" >&2
    fi
}
