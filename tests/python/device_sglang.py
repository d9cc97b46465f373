# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter on a GPU, where SGLang itself is not: its class over the stand-ins of test_sglang, in eager steps and
in captured CUDA graphs, which are replayed as SGLang replays them, with nothing but metadata in between.

Not part of CI: it needs a GPU and torch. From the root, with a build in build/ (and after python3 bindings/python/generate.py
where another machine built it):

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device_sglang.py [cpu]

A line per check; exit 1 if one failed. On a CPU a replay is the captured call again.
"""
from __future__ import annotations

import sys
from typing import Any

import torch

import libattn.torch
import test_sglang as recorded
from captured import BOUNDS, DEVICE, finish, report
from libattn.integrations.sglang.drafts import DraftSteps


def engine(page: int, dtype: torch.dtype, **terms: Any) -> recorded.Engine:
    libattn.torch.configure(ignore_environment=True)
    recorded.adapter.register()
    return recorded.Engine(page, dtype, layers=2, device=DEVICE, **terms)


def eager(page: int, dtype: torch.dtype, **terms: Any) -> float:
    """A prefill, a chunk next to decodes, decodes."""
    made = engine(page, dtype, **terms)
    return max(made.step(mode, queries) for mode, queries in (
        ("extend", [20, 7, 100]), ("extend", [1, 30, 1]), ("target_verify", [made.drafts] * 3) if made.drafts else ("decode", [1, 1, 1])))


def captured(page: int, dtype: torch.dtype, **terms: Any) -> float:
    """Graphs of three and of two decodes, or verifications of drafts, captured before any step; prefills, then replays with and without padding, and
    an eager step between them."""
    made = engine(page, dtype, **terms)
    made.backend.init_cuda_graph_state(3, 3 * max(made.drafts, 1))
    graphs = {size: recorded.Decodes(made, size) for size in (3, 2)}
    found = made.step("extend", [40, 7, 100])
    for size, requests in ((3, 3), (3, 2), (2, 2), (2, 1)):
        found = max(found, graphs[size].replay(requests))
    return max(found, made.step("extend", [1, 5, 30]), graphs[3].replay(3))


def branches(page: int, dtype: torch.dtype, topk: int, captured: bool) -> float:
    """Three tokens of each branch that a model drafts, after a prefill; as graphs of three and of two requests, with eager steps between
    their replays."""
    made = engine(page, dtype, drafts=6)
    drafts = DraftSteps(made.backend, topk, 4)
    if captured:
        drafts.init_cuda_graph_state(3, 3 * topk)
    graphs = {size: recorded.Branches(made, drafts, size if captured else 0) for size in (3, 2)}
    found = made.step("extend", [40, 7, 100])
    for size, requests in ((3, 3), (3, 2), (2, 1)):
        found = max(found, graphs[size].step(requests), made.step("extend", [2, 1, 3]))
    return found


def main() -> int:
    sinks = torch.linspace(-2, 5, recorded.HQ).to(DEVICE)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name, bound = str(dtype)[6:], BOUNDS[dtype]
        for what, terms in (("", {}), (" window", {"window": 30}), (" chunks", {"chunk": 32, "use_irope": True}),
                            (" soft cap", {"logit_cap": 20.0}), (" sinks", {"sinks": sinks}),
                            (" fp8 pool", {"kv_dtype": torch.float8_e4m3fn}), (" drafts", {"drafts": 6})):
            for page in (1, 16):
                report(f"{name}{what}, pages of {page}, eager steps", lambda: eager(page, dtype, **terms), bound)
                report(f"{name}{what}, pages of {page}, replays", lambda: captured(page, dtype, **terms), bound)
        for page, topk in ((1, 1), (16, 1), (1, 3)):
            for what, replays in (("eager steps", False), ("replays", True)):
                report(f"{name} drafts of a model, {topk} branches, pages of {page}, {what}",
                       lambda: branches(page, dtype, topk, replays), bound)
    return finish()


if __name__ == "__main__":
    sys.exit(main())
