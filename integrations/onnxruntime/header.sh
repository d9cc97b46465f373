#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# ONNX Runtime's C header: prints the folder where onnxruntime_c_api.h lies. PyPI's wheels and Debian 12 do not have it; Debian 13's
# libonnxruntime-dev does, which apt-get fetches by a list of its own and which is unpacked below FOLDER. Nothing is installed.
# usage: header.sh FOLDER [fetch]      without `fetch` only what is there counts; ONNXRUNTIME_INCLUDE names another folder
set -eu
folder=$1 kept=$1/usr/include/onnxruntime
for include in "${ONNXRUNTIME_INCLUDE:-}" /usr/include/onnxruntime "$kept"; do
    [ ! -f "$include/onnxruntime_c_api.h" ] || { echo "$include" && exit 0; }
done
stop() {
    echo "onnxruntime: no onnxruntime_c_api.h: $1; apt install libonnxruntime-dev (Debian 13), or set ONNXRUNTIME_INCLUDE" >&2
    exit 77
}
[ "${2:-}" = fetch ] || stop "not in /usr/include/onnxruntime, and $0 did not fetch it into $folder"
# shellcheck disable=SC2016
debian=$(apt-get indextargets --format '$(REPO_URI)' 'Origin: Debian' 2>/dev/null | head -n 1) || true
[ -n "$debian" ] || stop "apt-get knows no archive of Debian"
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $debian trixie main" >"$folder/sources.list"
cd "$folder"
set -- -qq -o "Dir::Etc::SourceList=$PWD/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$PWD/lists" \
    -o "Dir::Cache=$PWD/cache" -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::Retries=1
{ apt-get "$@" update && apt-get "$@" download libonnxruntime-dev; } >fetch.log 2>&1 || stop "Debian 13's archive does not answer ($PWD/fetch.log)"
dpkg-deb -x libonnxruntime-dev_*.deb .
rm -rf lists cache libonnxruntime-dev_*.deb
echo "$kept"
