# SPDX-License-Identifier: Apache-2.0
"""Writes the table of docs/choices.md from what `attn-bench --tune --model` printed.

usage: choices.py ON FILE...

ON is the machine. Rows of the table that stand in FILEs replace those of the same machine, model, layers and phase; what was
not measured gets no row.
"""
from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "choices.md"
BEGIN, END = "<!-- choices.py: begin -->", "<!-- choices.py: end -->"
HEADER = ["on", "model", "layers", "phase", "declared: us", "measured: us", "buckets", "gain", "note"]
KEY = 4  # columns that name a row


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its header."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in rows if "declared: us" not in row]


def merged(old: list[list[str]], on: str, texts: list[str]) -> list[list[str]]:
    """Old rows and new ones, by machine."""
    rows = {tuple(row[:KEY]): row for row in old}
    for text in texts:
        for row in rows_of(text):
            if len(row) == len(HEADER) - 1 and row[5] != "0":
                rows[(on, *row[:KEY - 1])] = [on, *row]
    return sorted(rows.values(), key=lambda row: row[0])


def main(arguments: list[str]) -> int:
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    before, rest = PAGE.read_text().split(BEGIN)
    table, after = rest.split(END)
    rows = merged(rows_of(table), arguments[0], [Path(name).read_text() for name in arguments[1:]])
    lines = [f"| {' | '.join(row)} |" for row in [HEADER, ["---"] * len(HEADER), *rows]]
    PAGE.write_text("\n".join([before + BEGIN, *lines, END]) + after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
