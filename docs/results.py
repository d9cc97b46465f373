# SPDX-License-Identifier: Apache-2.0
"""Times the cells of docs/performance/results.md again and writes the values into the page.

usage: results.py [--only REGEX] PAGE SECTION KEY COMMAND...

SECTION is a heading of PAGE with two tables under it: one names the runs, the other has a row for each cell, which begins
with a shape as attn-bench takes it: `decode:r=1,l=1024`, f32, cache fp8_e4m3 (any words). COMMAND is attn-bench with its
arguments but for --shape, --dtype, --kv-dtype and --json. It runs once for each pair of dtypes. Where it names several
backends, the first one's values are written, with the fastest other one as best peer. A new row needs its cell only.
--only leaves out cells that REGEX does not match. The run is entered as KEY, and runs that no table of the section names are
dropped. A measurement that failed keeps its old row, is named, and makes the exit status 1.
"""
from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

CELL = re.compile(r"`(\w+(?::[^`;]*)?)`(?:, (f32|f16|bf16))?(?:, cache (\w+))?(?: \([^|]*\))?")
FLOORS = {"read_gb_s": "{:.0f} GB/s read", "copy_gb_s": "{:.0f} GB/s copied", "bf16_tflop_s": "{:.3g} TFLOP/s in bf16"}


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []


class Table:
    """The rows from `first` on of a page's lines, by the names of their columns."""

    def __init__(self, lines: list[str], first: int) -> None:
        self.columns = cells_of(lines[first])
        end = first + 2
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        self.span = range(first + 2, end)
        for line in lines[first + 2 : end]:
            if len(cells_of(line)) != len(self.columns):
                sys.exit(f"results.py: the row has {len(cells_of(line))} columns, its table {len(self.columns)}: {line}")
        self.rows = [dict(zip(self.columns, cells_of(line), strict=True)) for line in lines[first + 2 : end]]

    def lines(self) -> list[str]:
        return ["| " + " | ".join(row[column] for column in self.columns) + " |" for row in self.rows]


def tables(lines: list[str], section: str) -> tuple[Table, Table]:
    """The section's runs and its cells."""
    try:
        begin = lines.index(f"## {section}")
    except ValueError:
        sys.exit(f"results.py: the page has no section '{section}'")
    found: dict[str, Table] = {}
    for at in range(begin + 1, len(lines)):
        if lines[at].startswith("## "):
            break
        name = (cells_of(lines[at]) or [""])[0]
        if name in ("run", "cell") and name not in found:
            found[name] = Table(lines, at)
    if len(found) < 2:
        sys.exit(f"results.py: section '{section}' has no table of runs and cells")
    return found["run"], found["cell"]


def measure(command: list[str], dtype: str, kv_dtype: str, shapes: list[str]) -> dict[str, Any]:
    arguments = [argument for shape in shapes for argument in ("--shape", shape)]
    run = subprocess.run([*command, "--json", "--dtype", dtype, "--kv-dtype", kv_dtype, *arguments], stdout=subprocess.PIPE, text=True)
    if not run.stdout:
        sys.exit(f"results.py: {command[0]} exits with {run.returncode}")
    document: dict[str, Any] = json.loads(run.stdout)
    if len(document["results"]) % len(shapes) != 0:
        sys.exit(f"results.py: {len(document['results'])} results of {len(shapes)} shapes; give each cell one shape")
    return document


def digits(value: float, count: int = 3) -> str:
    """These digits, or all before the point: no exponents."""
    text = f"{value:.{count}g}"
    return f"{value:.0f}" if "e+" in text else text


def enter(row: dict[str, str], results: list[dict[str, Any]], key: str) -> bool:
    """The first backend's values, and the fastest of the others; False: the first one failed."""
    own, others = results[0], [peer for peer in results[1:] if "error" not in peer and not peer["failed"]]
    if "error" in own or own["failed"]:
        print(f"{row['cell']}: {own.get('error', 'the measurement failed')}", file=sys.stderr)
        return False
    bytes_limit = own["bound"] == "bytes"
    row["us"] = digits(own["time_us"], 4)
    row["rate"] = f"{digits(own['gb_s'])} GB/s" if bytes_limit else f"{digits(own['tflop_s'])} TFLOP/s"
    row["over the floor"] = f"{own['ratio_to_floor']:.2f}"
    row["run"] = key
    if others:
        best = min(others, key=lambda peer: float(peer["time_us"]))
        row["best peer"], row["its run"] = f"{best['time_us'] / own['time_us']:.2f} {best['backend']}", key
    return True


def main() -> int:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").split("usage: ")[1].split("\n")[0])
    parser.add_argument("--only", type=re.compile, default=re.compile(""))
    parser.add_argument("page", type=Path)
    parser.add_argument("section")
    parser.add_argument("key")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    lines = given.page.read_text().split("\n")
    runs, cells = tables(lines, given.section)
    groups: dict[tuple[str, str], list[tuple[dict[str, str], str]]] = {}
    for row in cells.rows:
        match = CELL.fullmatch(row["cell"])
        if match and given.only.search(row["cell"]):
            groups.setdefault((match[2] or "bf16", match[3] or "auto"), []).append((row, match[1]))
    good, floors = True, ""
    for (dtype, kv_dtype), members in groups.items():
        document = measure(given.command, dtype, kv_dtype, [shape for _, shape in members])
        results, ceilings = document["results"], document["ceilings"]
        each = len(results) // len(members)
        for at, (row, _) in enumerate(members):
            good &= enter(row, results[at * each : (at + 1) * each], given.key)
        floors = floors or ", ".join(text.format(ceilings[name]) for name, text in FLOORS.items() if ceilings.get(name))
    spelled = shlex.join([Path(given.command[0]).name, *given.command[1:]])
    later = next((at for at in range(cells.span.stop, len(lines)) if lines[at].startswith("## ")), len(lines))
    rest = [cells_of(line) for line in [*cells.lines(), *lines[cells.span.stop : later]]]
    named = {key for row in rest for cell in row[1:] for key in cell.split(", ")}
    entry = {"run": given.key, "date": str(datetime.date.today()), "command": f"`{spelled}`; floors of {floors}"}
    runs.rows = [row for row in runs.rows if row["run"] in named - {given.key}] + ([entry] if given.key in named else [])
    for table in sorted((runs, cells), key=lambda table: -table.span.start):
        lines[table.span.start : table.span.stop] = table.lines()
    given.page.write_text("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
