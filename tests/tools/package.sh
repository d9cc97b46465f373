#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# tools/package.sh makes its packages of what this build has, and tries them. The source archive is not made here: it is what
# git has, which CI builds.
# usage: package.sh BUILD wheel|kernel|deb
set -eu
build=$1 what=$2
cd "$(dirname "$0")/../.."
if [ "$what" != deb ]; then
    [ -e "$build/venv/.complete" ] || { echo "skipped: $build/venv is not there; tools/test.sh makes it"; exit 77; }
elif ! command -v dpkg-shlibdeps >/dev/null; then
    echo "skipped: no dpkg-dev"
    exit 77
fi
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_LOCK ATTN_RECORD ATTN_VALIDATE
export DPKG_DEB_COMPRESSOR_LEVEL=0 XZ_OPT=-0
PACKAGE_WORK=$build/package PACKAGE_PYTHON=$build/venv/bin/python exec sh tools/package.sh "$what" --build "$build"
