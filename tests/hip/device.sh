#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tools/device.sh hip --smoke as on a machine with an MI300X, whose driver is a folder and whose runtime is the tests':
# the GPU's target is found and asked for, the script's checks run on it, and a failing one is counted.
# usage: device.sh ROOT BUILD TARGET, in the environment of the other tests of hip
set -eu
root=$1 real=$2 target=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/bin"

# The build stands already: it is what the script would have set up.
cat >"$work/bin/meson" <<END
#!/bin/sh
echo "\$@" >"$work/asked"
ln -s "$real" "\$2"
END
printf '#!/bin/sh\nexit 0\n' >"$work/bin/ninja"
chmod +x "$work/bin/meson" "$work/bin/ninja"

if ! env "PATH=$work/bin:$PATH" sh "$root/tools/device.sh" hip "$work/build" --smoke >"$work/out" 2>&1; then
    cat "$work/out"
    exit 1
fi
cat "$work/asked" "$work/out"
grep -q -- "-Dhip=enabled -Dhip-archs=$target\$" "$work/asked"
grep -q '^4 passed, 0 failed, 0 skipped$' "$work/out"

# A GPU that the build has no kernels for.
rm "$work/build"
cp -r "$ATTN_TEST_KFD" "$work/kfd"
sed -i 's/^gfx_target_version [1-9].*/gfx_target_version 90006/' "$work"/kfd/kfd/topology/nodes/1/properties
if env "PATH=$work/bin:$PATH" "ATTN_TEST_KFD=$work/kfd" ATTN_TEST_HIP_TARGET=gfx906 sh "$root/tools/device.sh" hip "$work/build" --smoke >"$work/out" 2>&1; then
    echo "a GPU without kernels passed:"
    cat "$work/out"
    exit 1
fi
grep -q -- '-Dhip-archs=gfx906$' "$work/asked"
grep -q '^fail  a layer of Llama 3.1 8B on the device' "$work/out"
