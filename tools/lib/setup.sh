# shellcheck shell=sh
# SPDX-License-Identifier: Apache-2.0
# What demo.sh and test.sh have in common: the lines that say how far they are, the packages, and the release build in build/.
# Sourced from the root, with `tool` the name of the script.
set -eu

begun=$(date +%s)
tick=5 # seconds between lines about a command that runs

# One line with the seconds since the start.
say() {
    printf '[%3d s] %s\n' $(($(date +%s) - begun)) "$*"
}

die() {
    echo "$tool: $1" >&2
    exit "${2:-1}"
}

# Sets $cpu to the processor seconds of all commands that this shell has waited for, theirs included.
read_cpu() {
    times >"$1"
    cpu=$(awk 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f", 60 * $1 + $2 + 60 * $3 + $4 }' "$1")
}

# Runs a command and says now and then how long it has run and what its last line was, and at the end what it took if that was
# long. Shows its output only if it fails, and keeps the last lines of it in $watched_end. Ninja on a terminal shows its own
# progress. Arguments: what it is called, the command. Gives the command's status.
watched() {
    watched_what=$1
    shift
    say "$watched_what"
    watched_status=0 watched_end=''
    if [ -t 1 ] && [ "$1" = ninja ]; then
        "$@" || watched_status=$?
        return $watched_status
    fi
    watched_log=$(mktemp)
    read_cpu "$watched_log"
    watched_cpu=$cpu watched_begun=$(date +%s)
    (
        while sleep "$tick" </dev/null >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
            say "  $watched_what: $(tail -n 1 "$watched_log" | tr -d '\r' | cut -c 1-90)"
        done
    ) &
    watcher=$!
    "$@" >"$watched_log" 2>&1 || watched_status=$?
    kill $watcher 2>/dev/null || true
    wait $watcher 2>/dev/null || true
    if [ $watched_status -ne 0 ]; then
        say "failed: $watched_what"
        cat "$watched_log"
        watched_end=$(tail -n 15 "$watched_log")
    fi
    read_cpu "$watched_log"
    watched_seconds=$(($(date +%s) - watched_begun))
    [ $watched_seconds -lt "$tick" ] || say "  $watched_what: took $watched_seconds s, $((cpu - watched_cpu)) s of CPU"
    rm -f "$watched_log"
    return $watched_status
}

# What is needed for what: Debian's package, and what shows that it is there: a program, a header, a file, or a module of Python.
# Then its names for dnf, pacman, zypper and apk; - where another package has it or the name is not known.
packages() {
    cat <<'TABLE'
demo gcc cc gcc gcc gcc build-base
demo libc6-dev stdio.h glibc-devel - glibc-devel -
demo meson meson meson meson meson meson
demo ninja-build ninja ninja-build ninja ninja samurai
demo pkg-config pkg-config pkgconf-pkg-config pkgconf pkgconf-pkg-config pkgconf
demo libcjson-dev cjson/cJSON.h cjson-devel cjson cJSON-devel cjson-dev
tests g++ c++ gcc-c++ - gcc-c++ -
tests libcmocka-dev cmocka.h libcmocka-devel cmocka libcmocka-devel cmocka-dev
tests libdlpack-dev dlpack/dlpack.h dlpack-devel - - -
tests jq jq jq jq jq jq
tests python3-venv ensurepip.py python3 python python3 python3
style clang-format-14 clang-format-14 - - - -
style clang-tidy-14 clang-tidy-14 - - - -
hip clang-19 clang++-19 - - - -
hip clang-tools-19 clang-offload-bundler-19 - - - -
hip lld-19 ld.lld-19 - - - -
level_zero clang-15 clang-15 - - - -
level_zero llvm-spirv-15 llvm-spirv-15 - - - -
level_zero spirv-tools spirv-val - - - -
level_zero libze-dev level_zero/ze_api.h - - - -
all libopenmpi-dev mpicc - - - -
all openmpi-bin mpirun - - - -
all gnuplot-nox gnuplot - - - -
all valgrind valgrind - - - -
all dpkg-dev dpkg-shlibdeps - - - -
all clang clang - - - -
all libclang-rt-14-dev /usr/lib/llvm-14/lib/clang/14.0.6/lib/linux - - - -
all llvm-19 llvm-objdump-19 - - - -
x86_64 gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc - - - -
x86_64 libc6-dev-arm64-cross /usr/aarch64-linux-gnu/include/stdio.h - - - -
x86_64 qemu-user qemu-aarch64 - - - -
x86_64 libze1 /usr/lib/x86_64-linux-gnu/libze_loader.so.1 - - - -
x86_64 intel-opencl-icd ocloc - - - -
TABLE
}

# Whether it is there: program, header.h, module.py or /file
there() {
    case $1 in
    /*) [ -e "$1" ] ;;
    *.h) echo "#include <$1>" | cc -E - ;;
    *.py) python3 -c "import ${1%.py}" ;;
    *) command -v "$1" ;;
    esac >/dev/null 2>&1
}

# Installs what is missing of the given rows of the table, as root or through sudo. Where it may not, or knows no apt-get, it
# prints the one line to run and ends with 3. A demonstration, or what runs where there is no apt-get, goes on if what it cannot do
# without ($essential, in Debian's names) is there; what could not be installed then is not tried again.
ensure_packages() {
    [ "$(uname -s)" = Linux ] || die "libattn is for Linux; this is $(uname -s)" 3
    manager='' column=2
    for candidate in apt-get dnf pacman zypper apk; do
        if [ -z "$manager" ] && command -v "$candidate" >/dev/null 2>&1; then
            manager=$candidate
        fi
    done
    case $manager in dnf) column=4 ;; pacman) column=5 ;; zypper) column=6 ;; apk) column=7 ;; esac
    missing='' names='' stops=''
    for package in $(packages | awk -v rows=" $* " 'index(rows, " " $1 " ") { print $2 }'); do
        row=$(packages | grep " $package ")
        if ! there "$(echo "$row" | cut -d ' ' -f 3)"; then
            missing="$missing $package"
            name=$(echo "$row" | cut -d ' ' -f $column)
            [ "$name" = - ] || names="$names $name"
            case " $essential " in *" $package "*) stops=1 ;; esac
        fi
    done
    [ -n "$missing" ] || return 0
    as_root='' root='' how="installed by apt-get alone"
    [ "$manager" != apt-get ] || how="neither root nor sudo without a password"
    if [ "$(id -u)" -eq 0 ]; then
        root=1
    elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
        root=1 as_root="sudo -n"
    fi
    if [ "$manager" = apt-get ] && [ -n "$root" ]; then
        if [ -z "$stops" ] && [ "$(cat build/.without 2>/dev/null)" = "$missing" ]; then
            how="that failed before (build/.without)"
        else
            # shellcheck disable=SC2086
            if watched "packages: the list" $as_root apt-get update -o Acquire::Retries=1 &&
                watched "packages:$missing" $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing; then
                return 0
            fi
            how="that failed"
            { mkdir -p build && echo "$missing" >build/.without; } 2>/dev/null || true
        fi
    fi
    case $manager in
    apt-get) line="sudo apt-get install -y --no-install-recommends$missing" ;;
    dnf | zypper) line="sudo $manager install -y${names:- ...}" ;;
    pacman) line="sudo pacman -S --needed${names:- ...}" ;;
    apk) line="sudo apk add${names:- ...}" ;;
    *)
        line="by this system's package manager what Debian calls$missing"
        ! command -v brew >/dev/null 2>&1 ||
            line="$line (not by brew: its compiler and libraries have a prefix and a C library of their own, which engines do not load)"
        ;;
    esac
    echo "$tool: missing:$missing; $how; run: $line" >&2
    [ -z "$stops" ] && { [ "$manager" != apt-get ] || [ "$tool" = demo.sh ]; } || exit 3
    say "goes on without$missing"
}

# Ends the script where nothing can be built.
ensure_writable() {
    if ! { mkdir -p build && : >build/.writable; } 2>/dev/null; then
        die "$PWD/build cannot be written, and all is built there; copy the sources to a folder of yours and run it there"
    fi
}

# Puts nvcc on the PATH where CUDA's toolkit stands in its usual folder.
find_nvcc() {
    for folder in ${CUDA_HOME:+"$CUDA_HOME/bin"} /usr/local/cuda/bin; do
        if ! command -v nvcc >/dev/null 2>&1 && [ -x "$folder/nvcc" ]; then
            PATH=$folder:$PATH
            export PATH
        fi
    done
}

# Configures a folder if it is new, and builds what has changed. Arguments: what it is called, folder, then meson setup's. With
# `targets` set, these alone.
build_folder() {
    build_name=$1 build_into=$2
    shift 2
    if [ ! -f "$build_into/build.ninja" ]; then
        watched "$build_name: configuring" meson setup "$build_into" "$@" || return 1
    fi
    # shellcheck disable=SC2086
    watched "$build_name: building" ninja -C "$build_into" ${targets:-}
}

# word_of NAME WORD...: the one that is NAME or NAME=TARGETS
word_of() {
    wanted_word=$1
    shift
    for word; do
        case $word in "$wanted_word" | "$wanted_word"=*) echo "$word" ;; esac
    done
}

# build/ is the release build. Arguments say what it shall have next to core, CPU backends and tools: tests, collectives,
# cuda-flash, cudnn, hip, level-zero, or cuda-flash=TARGETS, hip=TARGETS for these targets alone. What it had before it keeps; it is
# configured again when more is asked for, or when something of the table comes or goes. Status 2: it does not configure.
build_release() {
    find_nvcc
    found="found: $(command -v nvcc || true)" # and what of the table is there
    for sign in $(packages | cut -d ' ' -f 3); do
        ! there "$sign" || found="$found $sign"
    done
    had=$(sed '/^found:/d' build/.has 2>/dev/null || true)
    has='' options=''
    for feature in tests collectives cuda-flash cudnn hip level-zero; do
        # shellcheck disable=SC2086
        old=$(word_of "$feature" $had) asked=$(word_of "$feature" "$@")
        value=auto archs=''
        case $asked in
        '')
            asked=$old value=''
            [ -f build/build.ninja ] || value=disabled
            ;;
        "$old") value='' ;;
        *,unoptimized) # for tests: a build for GPUs keeps its kernels
            case $old in '' | *,unoptimized) archs=${asked#*=} ;; *) asked=$old value='' ;; esac
            ;;
        *=*) if [ "$old" = "$feature" ]; then asked=$old value=''; else archs=${asked#*=}; fi ;;
        *) archs=$(sed -n "s/^option('${feature%-flash}-archs'.* value : \[\([^]]*\)\].*/\1/p" meson_options.txt | tr -d "' ") ;;
        esac
        if [ -n "$value" ] && [ "$feature" = collectives ]; then
            options="$options -Dmpi=$value -Dnccl=$value"
        elif [ -n "$value" ]; then
            options="$options -D$feature=$value"
        fi
        [ -z "$archs" ] || options="$options -D${feature%-flash}-archs=$archs"
        has="$has$asked
"
    done
    if [ ! -f build/build.ninja ]; then
        # shellcheck disable=SC2086
        watched "release build: configuring" meson setup build $options || return 2
    elif [ -n "$options" ] || ! grep -qxF "$found" build/.has 2>/dev/null; then
        # shellcheck disable=SC2086
        watched "release build: configuring again" meson setup --reconfigure build $options || return 2
    fi
    printf '%s%s\n' "$has" "$found" >build/.has
    build_folder "release build" build
}

# build-fuzz/: the libFuzzer targets and the core under them, nothing else.
build_fuzz() {
    CC=clang targets=fuzz build_folder "fuzzing" build-fuzz -Dfuzz=enabled -Db_sanitize=address,undefined -Db_lundef=false \
        -Dbuildtype=debugoptimized -Dtests=disabled -Dcpu-simd=disabled -Dcuda-flash=disabled -Dhip=disabled -Dlevel-zero=disabled \
        -Dmpi=disabled -Dnccl=disabled
}

# build/venv, the one Python environment, as tests/requirements.txt pins it; made again when that changes. Where nothing can
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
