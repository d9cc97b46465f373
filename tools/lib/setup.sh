# SPDX-License-Identifier: Apache-2.0
# What demo.sh and test.sh have in common: the packages, and the release build in build/. Sourced from the root.
set -eu

PACKAGES="gcc g++ meson ninja-build pkg-config libcmocka-dev libcjson-dev libdlpack-dev valgrind"

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

# nvcc where it stands.
find_toolchains() {
    for folder in "${CUDA_HOME:-}/bin" /usr/local/cuda/bin; do
        if ! command -v nvcc >/dev/null 2>&1 && [ -x "$folder/nvcc" ]; then
            PATH="$folder:$PATH"
            export PATH
        fi
    done
    command -v nvcc 2>/dev/null || echo none
}

# build/ is the release build; configured anew when a toolchain appears or goes.
build_release() {
    toolchains=$(find_toolchains)
    if [ ! -f build/build.ninja ]; then
        meson setup build >build.log.tmp 2>&1 || { cat build.log.tmp; rm -f build.log.tmp; exit 1; }
        rm -f build.log.tmp
    elif [ "$(cat build/.toolchains 2>/dev/null)" != "$toolchains" ]; then
        meson setup --reconfigure build >/dev/null
    fi
    echo "$toolchains" >build/.toolchains
    ninja -C build | tail -n 1
}
