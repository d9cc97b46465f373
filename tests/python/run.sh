#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs test files in one process: run.sh BUILD any|venv FILE... 77 where build/venv is not there or not complete: it is never replaced
# by another environment.
set -eu
build=$1 needs=$2
shift 2
root=$(cd "$(dirname "$0")/../.." && pwd)
python=$build/venv/bin/python
if [ "$needs" = any ] && [ ! -x "$python" ]; then
    python=$(command -v python3) || exit 77
elif [ ! -e "$build/venv/.complete" ]; then
    echo "skipped: $build/venv is not there; tools/test.sh makes it from tests/requirements.txt"
    exit 77
fi
unset ATTN_BACKEND ATTN_PLUGIN_PATH ATTN_LOG ATTN_VALIDATE ATTN_LOCK ATTN_RECORD ATTN_TEST_DEVICE
export ATTN_CACHE_DIR="$build/cache" HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$root/bindings/python/src:$root/tests/python" ATTN_TEST_BUILD="$build"
cd "$root/tests/python"
for file; do
    set -- "$@" "$(basename "$file" .py)"
    shift
done
exec "$python" -W error::SyntaxWarning -m unittest -v "$@"
