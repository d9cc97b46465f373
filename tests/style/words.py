#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Words and sizes that may become fewer, never more: counts in words.txt.
usage: words.py [--write]      --write puts today's counts into words.txt

A row is a count and a pattern, which is looked for in the comments of C, C++, CUDA and Python files, whatever its case; or a
count and one of the names in FILES, which counts files in C, C++ and CUDA. A count that has grown does not say which places
are new: read the comments of the change."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TABLE = pathlib.Path(__file__).with_name("words.txt")
ROOMS = ["abi", "bindings", "collectives", "compositions", "core", "emulators", "examples", "formats", "integrations", "isolation", "layout", "observers", "operators", "plugins", "tests", "tools"]
KINDS = {".c", ".h", ".cpp", ".cu", ".cuh", ".py"}
COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"|/\*(.*?)\*/|//([^\n]*)', re.S)
PYTHON = re.compile(r'"""(.*?)"""|"(?:[^"\\\n]|\\.)*"|#([^\n]*)', re.S)
FILES = {
    "file of more than 600 lines": lambda path, text: text.count("\n") > 600,
    # after the SPDX line; a header's comment is its source's, too
    "file without an opening comment": lambda path, text: not (
        text.split("\n", 1)[-1].lstrip().startswith(("/*", "//")) or path.suffix != ".h" and path.with_suffix(".h").exists()),
}


def main():
    rows = [line.split(None, 1) for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    counts = {name: 0 for _, name in rows}
    patterns = {name: re.compile(name, re.I) for name in counts if name not in FILES}
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*")):
        if path.suffix in KINDS and "abi_versions" not in path.parts and path.is_file():
            text = path.read_text()
            found = (PYTHON if path.suffix == ".py" else COMMENT).finditer(text)
            comments = [re.sub(r"\s*\n[\s*]*", " ", match[1] or match[2] or "").strip() for match in found]
            for name, pattern in patterns.items():
                counts[name] += sum(len(pattern.findall(comment)) for comment in comments)
            for name in FILES.keys() & counts.keys() if path.suffix != ".py" else ():
                counts[name] += FILES[name](path, text)
    grown = [f"'{name}': {counts[name]}, of {limit} at most" for limit, name in rows if counts[name] > int(limit)]
    fewer = [f"'{name}': {counts[name]} of {limit}" for limit, name in rows if counts[name] < int(limit)]
    if "--write" in sys.argv[1:]:
        head = [line for line in TABLE.read_text().splitlines() if line.startswith("#")]
        TABLE.write_text("\n".join(head + [f"{counts[name]:5} {name}" for _, name in rows]) + "\n")
    elif grown or fewer:
        print("\n".join(grown) if grown else "fewer, lower words.txt with words.py --write: " + "; ".join(fewer))
        return len(grown) > 0
    return False


sys.exit(main())
