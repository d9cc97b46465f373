# SPDX-License-Identifier: Apache-2.0
"""The commands ``attn-info``, ``attn-run``, ``attn-check`` and ``attn-bench`` of an environment into which the package was
installed: each becomes the program next to the library that the package opens."""
from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ._library import find


def tool(name: str) -> str | None:
    """A tool next to the library (a wheel's ``bin``, a build tree's ``tools``), or on the PATH; never this script itself."""
    folder = Path(find()).parent
    for candidate in (Path(__file__).parent / "bin" / name, folder.parent / "tools" / name):
        if candidate.is_file():
            return str(candidate)
    own = Path(sys.argv[0]).resolve().parent
    return shutil.which(name, path=os.pathsep.join(
        entry for entry in os.environ.get("PATH", os.defpath).split(os.pathsep) if entry and Path(entry).resolve() != own))


def become(name: str, *arguments: str) -> int:
    """Replace this process by the tool, or return 1 with a line that says where it was looked for."""
    path = tool(name)
    if path is None:
        print(f"{name}: not in the package, not next to the library and not elsewhere on the PATH", file=sys.stderr)
        return 1
    os.execv(path, [path, *arguments])


def main() -> int:
    """The tool after which this script is named."""
    return become(Path(sys.argv[0]).name, *sys.argv[1:])
