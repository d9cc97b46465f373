#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds, and shows the main job: backends chosen for a model's layers, and their outputs verified.
cd "$(dirname "$0")/.."
. tools/lib/setup.sh
. tools/lib/demo.sh
ensure_packages
build_release
show() {
    echo; echo "== $1"
    shift
    "$@"
}
demo_commands show build
