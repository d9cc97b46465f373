# SPDX-License-Identifier: Apache-2.0
"""``python -m libattn.info``: attn-info of the library that this package would open, with its arguments."""
from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from ._library import find


def tool(name: str) -> str | None:
    """A tool next to the library (a wheel's ``bin``, a build tree's ``tools``), or on the PATH."""
    folder = Path(find()).parent
    for candidate in (Path(__file__).parent / "bin" / name, folder.parent / "tools" / name):
        if candidate.is_file():
            return str(candidate)
    return shutil.which(name)


def main() -> int:
    """Become attn-info."""
    path = tool("attn-info")
    if path is None:
        print("libattn.info: attn-info: not next to the library and not on the PATH", file=sys.stderr)
        return 1
    os.execv(path, [path, *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
