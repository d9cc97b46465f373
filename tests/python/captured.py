# SPDX-License-Identifier: Apache-2.0
"""What the engines' tests on a device share: a line per check, and captured graphs."""
from __future__ import annotations

import sys
from collections.abc import Callable

import torch

import libattn

DEVICE = torch.device("cpu" if "cpu" in sys.argv[1:] else "cuda")
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
failed = 0


def report(what: str, check: Callable[[], float], bound: float, unit: str = " of a row") -> None:
    """One line; a failure counts."""
    global failed
    try:
        error = check()
        good, detail = error < bound, f"worst {error:.1e}{unit}, bound {bound:.0e}"
    except (libattn.AttnError, RuntimeError, AssertionError) as failure:
        good, detail = False, f"{type(failure).__name__}: {failure}"
    failed += not good
    print(f"{'ok  ' if good else 'FAIL'} {what}: {detail}", flush=True)


def finish() -> int:
    """What served the last layers; the exit status."""
    for row in libattn.torch.table():
        print(f"last served: layer {row.index} {row.kind}: {row.prefill}, {row.decode}")
    return failed > 0


class Graph:
    """A captured call; on a CPU a replay is the call again."""

    def __init__(self, call: Callable[[], None], device: torch.device = DEVICE) -> None:
        self._call = call
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                call()

    def replay(self) -> None:
        if self.graph is None:
            self._call()
        else:
            self.graph.replay()
            torch.cuda.synchronize()

    def microseconds(self, repeats: int = 20) -> float:
        """The time of a replay on the GPU."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.graph.replay()
        begin.record()
        for _ in range(repeats):
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end) / repeats
