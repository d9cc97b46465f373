#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Packages of this checkout, each tried after it was made: a wheel with library, plugins and tools inside, a kernel, Debian packages
# (library, layouts, one for each plugin, dev, tools), and a source archive from which the core builds and passes its tests.
# The version is meson.build's. Everything lies under build/package ($PACKAGE_WORK); what was made is printed last. The tests
# package_deb and python_wheel run it with --build; dist is for releases.
# cuda_flash is made for the GPUs of a release, where nvcc is and -Dcuda-archs names no others: no other stage builds these.
# A wheel is tried with build/venv's Python and with those that $PACKAGE_PYTHONS names. It needs auditwheel next to that Python.
# A kernel is what the wheel has, as Hugging Face's `kernels` loads it from a folder or from the Hub; torch 2.8 or later.
# --build takes what that build folder has, and compiles nothing: CI does so with its release build.
# usage: tools/package.sh wheel|kernel|deb|dist [meson options, such as -Dcuda-flash=disabled], or wheel|kernel|deb --build FOLDER
set -eu
caller=$PWD
cd "$(dirname "$0")/.."
source=$PWD work=${PACKAGE_WORK:-$PWD/build/package}
what=${1:-}
case $what in wheel | kernel | deb | dist) shift ;; *) sed -n 's/^# usage: //p' "$0" >&2; exit 2 ;; esac
version=$(meson introspect meson.build --projectinfo 2>/dev/null | sed 's/.*"version": "\([^"]*\)".*/\1/')
folder=$work/$what stage=$work/$what/stage

fail() {
    echo "package: $1" >&2
    exit 1
}

given=''
if [ "${1:-}" = --build ]; then
    case ${2:-} in '' | /*) given=${2:-} ;; *) given=$caller/$2 ;; esac
    [ $# -eq 2 ] && [ "$what" != dist ] && [ -f "$given/build.ninja" ] ||
        fail "--build: '$what $*': of wheel, kernel and deb, the folder of a build and nothing else"
    shift 2
fi
rm -rf "$folder"
mkdir -p "$folder" "$work/built"

# The GPUs that a release's cuda_flash has code for, and its kernels as small as nvcc makes them. What the caller says comes later.
release_cuda='-Dcuda-archs=sm_80,sm_90a,sm_100a,sm_120,compute_80 -Dcuda-compress=size'

# staged [meson options]: a release build, or that of --build, installed under $stage with the prefix /usr; $libdir is where its libraries
# are under that. Other options begin the build again, since Meson's reconfiguration lets --buildtype reset what stands after it.
staged() {
    if [ -n "$given" ]; then
        built=$given
    else
        built=$work/built/$what
        [ "$(cat "$built/.options" 2>/dev/null)" = "$*" ] || rm -rf "$built"
        # shellcheck disable=SC2086 # two options
        [ -f "$built/build.ninja" ] || meson setup "$built" --prefix=/usr --buildtype=release -Dtests=disabled $release_cuda "$@" >"$folder/setup.log" ||
            { tail -5 "$folder/setup.log"; fail 'meson setup failed'; }
        echo "$*" >"$built/.options"
        meson compile -C "$built" >"$folder/compile.log" || { tail -20 "$folder/compile.log"; fail 'the build failed'; }
    fi
    DESTDIR=$stage meson install -C "$built" --no-rebuild >/dev/null
    meson introspect --buildoptions "$built" >"$folder/options.json"
    prefix=$(option prefix) libdir=$(option libdir)
    [ -n "$prefix" ] && [ -n "$libdir" ] || fail "$built: Meson names no prefix or libdir: '$prefix', '$libdir'"
    if [ "$prefix" != /usr ]; then
        mv "$stage$prefix" "$folder/usr"
        rm -rf "$stage"
        mkdir "$stage"
        mv "$folder/usr" "$stage/usr"
        find "$stage" -name '*.pc' -exec sed -i 's|^prefix=.*|prefix=/usr|' {} +
    fi
}

# option NAME: its value in $built
option() {
    sed -n 's/.*"name": "'"$1"'", "value": "\([^"]*\)".*/\1/p' "$folder/options.json"
}

# The package is tried without what this shell has set, and from a folder of its own.
clean() {
    (cd "$folder" && env -i PATH=/usr/bin:/bin HOME="$folder" ATTN_CACHE_DIR= "$@")
}

# licence FILE NAME FOLDER: a licence of what a package carries, into that folder
licence() {
    mkdir -p "$3"
    [ -s "$1" ] || fail "no licence of $2: $1 is not there"
    cp "$1" "$3/$2.txt"
}

# The licence of the CUDA runtime that is linked into what nvcc compiles: in the toolkit's folder or in a package's metadata.
cuda_licence() {
    toolkit=$(nvcc --dryrun -x cu -c /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    find -L "$toolkit" -maxdepth 5 \( -name EULA.txt -o -path '*cuda_runtime*' -name License.txt \) 2>/dev/null | head -n 1
}

wheel() {
    python=${PACKAGE_PYTHON:-$source/build/venv/bin/python}
    if [ ! -x "$python" ]; then
        python3 -m venv "$work/venv"
        python=$work/venv/bin/python
        "$python" -m pip install --quiet 'setuptools>=70.1' auditwheel
    fi
    # The same commit makes the same bytes, wherever it is built: dates are the commit's, paths are left out.
    SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || stat -c %Y NEWS)}
    export SOURCE_DATE_EPOCH
    staged --libdir=lib -Dmpi=disabled -Dnccl=disabled \
        "-Dc_args=-ffile-prefix-map=$source=. -ffile-prefix-map=$work/built/$what=." "$@"
    cp -r bindings/python "$folder/source"
    rm -rf "$folder/source/src/libattn.egg-info"
    tree=$folder/source/src/libattn
    mkdir "$tree/lib"
    cp "$stage/usr/$libdir/libattn.so.1" "$stage/usr/$libdir/libattn_layout.so.0" "$tree/lib/"
    cp -r "$stage/usr/$libdir/attn" "$tree/lib/attn"
    # Calls in C, where Python's headers were.
    [ ! -f "$built/bindings/libattn_call.abi3.so" ] || cp "$built/bindings/libattn_call.abi3.so" "$tree/lib/"
    cp -r "$stage/usr/bin" "$tree/bin"
    licence LICENSE libattn "$tree/licenses"
    case $(ls "$tree/lib/attn") in *attn_cuda_flash* | *attn_cudnn*) licence "$(cuda_licence)" cuda-runtime "$tree/licenses" ;; esac
    # Next to the C library only cJSON is taken along, for the tools that read JSON.
    cjson=$(ldd "$tree/bin/attn-info" | sed -n 's/.*libcjson\.so\.1 => \([^ ]*\) .*/\1/p')
    if [ -n "$cjson" ]; then
        cp -L "$cjson" "$tree/lib/libcjson.so.1"
        licence /usr/share/doc/libcjson1/copyright cjson "$tree/licenses"
    fi
    objects=$(find "$tree" -type f | while read -r file; do [ "$(head -c 4 "$file" | tail -c 3)" != ELF ] || echo "$file"; done)
    echo "$objects" | while read -r object; do
        strip --strip-unneeded "$object"
        objdump -p "$object" | sed -n 's/^ *NEEDED *//p' | grep -v -x -e 'lib\(c\|m\|dl\|rt\|pthread\|gcc_s\|stdc++\|cjson\)\.so\.[0-9]*' -e 'ld-linux.*' &&
            fail "$object needs a library that is not on every machine"
        ! strings "$object" | grep -F "$source" || fail "$object names the folder it was built in"
    done
    glibc=$(echo "$objects" | while read -r object; do objdump -T "$object"; done | sed -n 's/.*(*GLIBC_2\.\([0-9]*\).*/\1/p' | sort -n | tail -1)
    tag=manylinux_2_${glibc}_$(uname -m)
    "$python" -m pip wheel --quiet --no-deps --no-build-isolation --no-index -w "$folder" \
        --config-settings="--build-option=--plat-name=$tag" "$folder/source" >"$folder/wheel.log" 2>&1 || { cat "$folder/wheel.log"; fail 'pip wheel failed'; }
    made=$folder/libattn-$version-py3-none-$tag.whl
    [ -f "$made" ] || fail "not $made: $(ls "$folder"/*.whl)"
    size=$(stat -c %s "$made")
    [ "$size" -lt 100000000 ] || fail "$made has $size bytes; an index takes 100 MB"
    "$python" -m auditwheel show "$made" >"$folder/audit.log" 2>&1 || { cat "$folder/audit.log"; fail 'auditwheel show failed'; }
    grep -q "\"$tag\"" "$folder/audit.log" || { cat "$folder/audit.log"; fail "auditwheel finds another tag than $tag"; }

    for interpreter in "$python" ${PACKAGE_PYTHONS:-}; do
        try_wheel "$interpreter"
    done
}

# try_wheel PYTHON: installs the wheel into a bare environment of that Python, and uses library, module and tools there
try_wheel() {
    rm -rf "$folder/try"
    "$1" -m venv --without-pip "$folder/try"
    "$python" -m pip --python "$folder/try/bin/python" install --quiet --no-deps --no-index "$made"
    site=$(echo "$folder"/try/lib/python3*/site-packages)
    tried attn-info --json >"$folder/info.json"
    grep -q "\"file\":[[:space:]]*\"$site/libattn/lib/attn/attn_cpu_ref.so\"" "$folder/info.json" || fail 'the wheel finds other plugins than its own'
    tried python -m libattn --json | cmp - "$folder/info.json" || fail 'python -m libattn prints something else than attn-info'
    tried python -c "
import sys, libattn
runtime = libattn.Runtime()
assert libattn.__version__ == '$version', libattn.__version__
assert runtime.api.path.startswith('$site'), runtime.api.path
served = runtime.select([libattn.LayerDesc('a', 8, 2, 64, dtype='bf16')]).choice(0).backend
assert runtime.api.companion('libattn_layout.so.0', 'layout').attn_layout_id
print(f'Python {sys.version_info[0]}.{sys.version_info[1]}: {served} serves a layer')"
    tried python -m libattn check >"$folder/check.log" || { cat "$folder/check.log"; fail 'python -m libattn check finds a backend that differs'; }
    tail -n 1 "$folder/check.log"
    tried attn-check cpu_ref --filter 'merge_states.f32*' | tail -n 1
    tried attn-run --model "$source/models/llama-3.1-8b.json" --layers 1 --steps 1 --verify | tail -n 1
    tried attn-bench --backend cpu_ref --shape decode:r=1,l=64,hq=4,hkv=1,d=64 --csv | tail -n 1
}

# A command of the environment, on its PATH
tried() {
    clean PATH="$folder/try/bin:/usr/bin:/bin" "$@"
}

# variant BACKEND JSON: the kernel for torch 2.8 or later with that backend; metadata for `kernels`
variant() {
    variant=$folder/libattn/build/torch-stable-abi28-$1-$(uname -m)-linux
    mkdir -p "$variant"
    cp -rl "$folder/unpacked/libattn/." "$variant"
    cat >"$variant/metadata.json" <<END
{"name": "libattn", "id": "_libattn_$1", "version": 1, "license": "Apache-2.0", "python-depends": [], "backend": $2}
END
}

kernel() {
    wheel "$@"
    "$python" -m zipfile -e "$made" "$folder/unpacked"
    chmod +x "$folder"/unpacked/libattn/bin/* "$folder/unpacked/libattn/lib/attn/attn-scan"
    variant cpu '{"type": "cpu"}'
    [ ! -e "$tree/lib/attn/attn_cuda_flash.so" ] || variant cu130 '{"type": "cuda", "archs": ["8.0", "9.0a", "10.0a", "12.0"]}'
    clean HF_HUB_OFFLINE=1 "$python" -c "
import importlib, pathlib, kernels, torch
layers = importlib.import_module(kernels.get_local_kernel(pathlib.Path('libattn'), backend='cpu').__name__ + '.torch')
q, k, v = (torch.randn(2, heads, 40, 64) for heads in (8, 2, 2))
out = layers.attend(q, k, v, scale=0.125, causal=True).transpose(1, 2)
right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
assert torch.dist(out, right) < 1e-4, torch.dist(out, right)
assert layers.call.c or not list(pathlib.Path(layers.__file__).parents[1].glob('lib/libattn_call*')), 'its calls in C do not load'
print('kernel:', *layers.table())"
    tar cJf "$folder/libattn-$version-kernel.tar.xz" -C "$folder" libattn
}

# package NAME DESCRIPTION DEPENDS PATTERN...: moves the files out of $stage and makes the package
package() {
    name=$1 description=$2 depends=$3
    root=$folder/$1
    shift 3
    mkdir -p "$root/DEBIAN" "$root/usr/share/doc/$name"
    for pattern; do
        (cd "$stage" && find . -path "./$pattern" \( -type f -o -type l \)) | while read -r file; do
            mkdir -p "$root/$(dirname "$file")"
            mv "$stage/$file" "$root/$file"
        done
    done
    objects=$(find "$root" -type f \( -name '*.so*' -o -path '*/bin/*' -o -name attn-scan \))
    if [ -n "$objects" ]; then
        # shellcheck disable=SC2086 # a list of files without spaces
        found=$(cd "$folder" && dpkg-shlibdeps -O --ignore-missing-info -l"$folder/libattn1/usr/lib/$multiarch" $objects 2>>"$folder/shlibdeps.log" |
            sed -n 's/^shlibs:Depends=//p')
        depends=$depends${depends:+${found:+, }}$found
    fi
    sed 's/^/ /' "$source/LICENSE" | sed '1i Files: *\nCopyright: the authors of libattn\nLicense: Apache-2.0' >"$root/usr/share/doc/$name/copyright"
    # An error's name shows the CUDA runtime inside of a plugin or of the collectives over NCCL.
    # shellcheck disable=SC2086
    if [ -n "$objects" ] && grep -q cudaErrorInsufficientDriver $objects; then
        licence "$(cuda_licence)" cuda-runtime "$root/usr/share/doc/$name"
        printf '\nThe CUDA runtime is inside; its licence is in cuda-runtime.txt.\n' >>"$root/usr/share/doc/$name/copyright"
    fi
    gzip -9 -n -c "$source/NEWS" >"$root/usr/share/doc/$name/changelog.gz"
    case $name in libattn1 | libattn-layout0 | libattn-mpi0 | libattn-nccl0) echo 'activate-noawait ldconfig' >"$root/DEBIAN/triggers" ;; esac
    [ "$name" != libattn1 ] || echo "libattn 1 libattn1 (>= $version)" >"$root/DEBIAN/shlibs"
    cat >"$root/DEBIAN/control" <<END
Package: $name
Source: libattn
Version: $version-1
Architecture: $architecture
Maintainer: ${DEBFULLNAME:-The authors of libattn} <${DEBEMAIL:-libattn@example.org}>
Section: $(case $name in *-dev) echo libdevel ;; libattn*) echo libs ;; *) echo utils ;; esac)
Priority: optional
${depends:+Depends: $depends
}Description: $description
 libattn puts one stable C ABI between engines that serve language models and the
 kernels that compute their attention.
END
    dpkg-deb --root-owner-group --build "$root" "$folder/${name}_$version-1_$architecture.deb" >/dev/null
}

deb() {
    multiarch=$(dpkg-architecture -qDEB_HOST_MULTIARCH) architecture=$(dpkg --print-architecture)
    staged --libdir="lib/$multiarch" "$@"
    [ "$libdir" = "lib/$multiarch" ] || fail "$built has -Dlibdir=$libdir; Debian's is lib/$multiarch"
    lib=usr/$libdir
    (cd "$stage" && find . -type f -o -type l) | sort >"$folder/installed"
    mkdir "$folder/debian" # which dpkg-shlibdeps looks for
    printf 'Source: libattn\n\nPackage: libattn1\nArchitecture: any\n' >"$folder/debian/control"
    package libattn1 'attention for language models: the library' '' "$lib/libattn.so.*" "$lib/attn/attn-scan"
    package libattn-layout0 'attention for language models: ids and conversion of cache layouts' '' "$lib/libattn_layout.so.*"
    for file in "$stage/$lib"/attn/attn_*.so; do
        plugin=$(basename "$file" .so)
        package "libattn-plugin-$(echo "${plugin#attn_}" | tr _ -)" "attention for language models: the backend ${plugin#attn_}" \
            "libattn1 (>= $version)" "$lib/attn/$plugin.so"
    done
    for collectives in mpi nccl; do
        [ ! -e "$stage/$lib/libattn_$collectives.so.0" ] ||
            package "libattn-${collectives}0" "attention for language models: collectives over $collectives" '' "$lib/libattn_$collectives.so.*"
    done
    package attn-tools 'attention for language models: attn-info, attn-run, attn-check, attn-bench' \
        "libattn1 (>= $version), libattn-plugin-cpu-ref" 'usr/bin/*' 'usr/share/man/*'
    package libattn-dev 'attention for language models: headers, examples and manuals' "libattn1 (= $version-1), libattn-layout0 (= $version-1)" 'usr/*'

    try=$folder/try # a system of its own that has nothing but these packages
    mkdir -p "$try/var/lib/dpkg/info" "$try/var/lib/dpkg/updates"
    : >"$try/var/lib/dpkg/status"
    dpkg --root="$try" --force-not-root --force-depends --log=/dev/null -i "$folder"/*.deb >"$folder/dpkg.log" 2>&1 || { cat "$folder/dpkg.log"; fail 'dpkg refuses a package'; }
    (cd "$try" && find ./usr -type f -o -type l) | sort >"$folder/got"
    comm -23 "$folder/installed" "$folder/got" | grep . && fail 'files that no package has'
    for root in "$folder"/*/DEBIAN; do
        (cd "$root/.." && find ./usr -type f -o -type l)
    done | sort | uniq -d | grep . && fail 'files that two packages have'
    clean "$try/usr/bin/attn-info" --json >"$folder/info.json"
    grep -q "\"file\":[[:space:]]*\"$try/$lib/attn/attn_cpu_ref.so\"" "$folder/info.json" || fail 'the installed tools find no installed plugin'
    clean "$try/usr/bin/attn-check" cpu_ref --filter 'merge_states.f32*' | tail -n 1
    installed=$(dpkg-query --admindir="$try/var/lib/dpkg" -W -f '${Package} ')
    # shellcheck disable=SC2086 # a list of names
    dpkg --root="$try" --force-not-root --force-depends --log=/dev/null --purge $installed >>"$folder/dpkg.log" 2>&1 ||
        { cat "$folder/dpkg.log"; fail 'dpkg does not remove the packages'; }
    ! find "$try" -path '*/usr/*' \( -type f -o -type l \) | grep . || fail 'files that stay after the packages are removed'
}

dist() {
    [ -z "$(git status --porcelain)" ] || fail 'the working tree has changes, which a source archive would not have'
    meson setup "$folder/from" -Dtests=disabled -Dcuda-flash=disabled -Dhip=disabled -Dnccl=disabled -Dcpu-simd=disabled >"$folder/setup.log"
    meson dist -C "$folder/from" --no-tests --formats xztar >"$folder/dist.log" 2>&1 || { cat "$folder/dist.log"; fail 'meson dist failed'; }
    made=$folder/libattn-$version.tar.xz
    cp "$folder/from/meson-dist/libattn-$version.tar.xz"* "$folder/"
    tar xJf "$made" -C "$folder"
    (cd "$folder/libattn-$version" && find . -type f -o -type l) | sed 's|^\./||' | sort >"$folder/got"
    git ls-files | sort | comm -23 - "$folder/got" | grep . && fail 'tracked files that the archive lacks'
    cd "$folder/libattn-$version"
    meson setup build "$@" >"$folder/setup.log" || { tail -5 "$folder/setup.log"; fail 'the archive does not configure'; }
    meson compile -C build >"$folder/compile.log" || { tail -20 "$folder/compile.log"; fail 'the archive does not build'; }
    meson test -C build --suite core --no-rebuild | sed -n '/^Ok:/,/^Timeout:/p'
}

"$what" "$@"
find "$folder" -maxdepth 1 \( -name "*.whl" -o -name "*.deb" -o -name "*.tar.xz" \) -printf "%s %p\n" | sort -k 2
