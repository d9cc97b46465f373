# SPDX-License-Identifier: Apache-2.0
"""Runs attn-bench and prints rows for docs/performance/results.md: one that names the run, and one for each cell.

usage: results.py KEY COMMAND...

KEY names the run in the table, COMMAND is attn-bench with its arguments, without --json. Where COMMAND has several
backends, the first one's rows are printed, each with the fastest other backend as its peer. The exit status is 1 where
a measurement failed; it gets no row.
"""
from __future__ import annotations

import datetime
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def defaults(tool: str) -> dict[str, dict[str, str]]:
    """The parameters of each shape as `tool --help` prints them."""
    text = subprocess.run([tool, "--help"], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^  (\w+) +\S.*\n +((?:\w+=\S+ ?)+)$", text, re.MULTILINE)
    return {name: dict(item.split("=") for item in values.split()) for name, values in found}


def cell(result: dict[str, Any], usual: dict[str, str]) -> str:
    """The shape as --shape takes it, without what is the default anyway."""
    given = [f"{name}={value}" for name, value in result["parameters"].items() if usual[name] != str(value)]
    name = result["shape"] + (":" + ",".join(given) if given else "")
    return f"`{name}`, {result['dtype']}" + (f", cache {result['kv_dtype']}" if result["kv_dtype"] != result["dtype"] else "")


def row(result: dict[str, Any], peers: list[dict[str, Any]], usual: dict[str, str], key: str) -> str:
    rate = f"{result['gb_s']:.3g} GB/s" if result["bound"] == "bytes" else f"{result['tflop_s']:.3g} TFLOP/s"
    best = min(peers, key=lambda peer: peer["time_us"], default=None)
    peer = f"{best['time_us'] / result['time_us']:.2f} ({best['backend']})" if best else ""
    return f"| {cell(result, usual)} | {result['time_us']:.4g} | {rate} | {result['ratio_to_floor']:.2f} | {peer} | {key} |"


def main(key: str, command: list[str]) -> int:
    run = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True)
    if not run.stdout:
        return run.returncode or 1
    results = json.loads(run.stdout)["results"]
    usual = defaults(command[0])
    spelled = shlex.join([Path(command[0]).name, *command[1:]])
    print(f"| {key} | {datetime.date.today()} | `{spelled}` |")
    measured = [result for result in results if "error" not in result and not result["failed"]]
    cells: dict[str, list[dict[str, Any]]] = {}
    for result in measured:
        cells.setdefault(cell(result, usual[result["shape"]]), []).append(result)
    for same in cells.values():
        print(row(same[0], same[1:], usual[same[0]["shape"]], key))
    return 0 if run.returncode == 0 and len(measured) == len(results) else 1


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: results.py KEY COMMAND...")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
