# SPDX-License-Identifier: Apache-2.0
"""The vLLM adapter on a GPU, where vLLM itself is not: its classes over the stand-ins of test_vllm, in eager steps and in
captured CUDA graphs, which are replayed as vLLM replays them, with nothing but `build` in between.

Not part of CI: it needs a GPU and torch. From the root, with a build in build/ (and after python3 bindings/python/generate.py
where another machine built it):

    PYTHONPATH=bindings/python/src:tests/python python3 tests/python/device_vllm.py [cpu]

A line per check; exit 1 if one failed. On a CPU a replay is the captured call again.
"""
from __future__ import annotations

import sys
from typing import Any

import torch

import libattn.torch
import test_vllm as recorded
from captured import BOUNDS, DEVICE, Graph, finish, report

SIZES = recorded.Latent(16, 128, 64, 512, 128)


def engine(dtype: torch.dtype, latent: bool, graphs: bool = False, **terms: Any) -> recorded.Engine:
    libattn.torch.configure(ignore_environment=True)
    return recorded.Engine(dtype, SIZES if latent else None, graphs, device=DEVICE, **terms)


def differing(dtype: torch.dtype, latent: bool) -> float:
    """Rows of a batch-invariant request whose bits are not those of the request alone, for each layer: in other pieces, next to others,
    and in captured decodes."""
    made = engine(dtype, latent, True)
    for layer in made.context.values():
        layer.impl.batch_invariant = 2
    drawn = [qkv[0].view(3, 160, *qkv[0].shape[1:]) for qkv in made.inputs([160] * 3, [160] * 3)]

    def inputs(pieces: list[tuple[int, int, int]]) -> list[list[torch.Tensor]]:
        """What pieces (request, first, count) bring."""
        return [[torch.cat([t[r, first:first + count] for r, first, count in pieces]).to(DEVICE) for t in (q, *rows)]
                for q, rows in zip(drawn, made.rows)]

    def batch(pieces: list[tuple[int, int, int]]) -> Any:
        return made.batch([count for *_, count in pieces], [first + count for _, first, count in pieces], [r for r, *_ in pieces])

    def steps(batches: list[list[tuple[int, int, int]]]) -> list[torch.Tensor]:
        """Request 0's rows, of each layer."""
        found: list[list[torch.Tensor]] = [[] for _ in drawn]
        for pieces in batches:
            outputs, at = made.forward(inputs(pieces), made.builder.build(0, batch(pieces))), 0
            for r, _, count in pieces:
                for rows, out in zip(found, outputs if r == 0 else []):
                    rows.append(out[at:at + count])
                at += count
        return [torch.cat(rows) for rows in found]

    decodes = [[(0, n, 1)] for n in range(150, 153)]
    alone = steps([[(0, 0, 150)], *decodes])
    tried = ([*([(0, n, 1)] for n in range(153))], [[(0, 0, 128)], [(0, 128, 22)], *decodes],
             [[(1, 0, 90), (0, 0, 33)], [(1, 90, 1), (0, 33, 90), (2, 0, 60)], [(1, 91, 1), (2, 60, 1), (0, 123, 27)],
              *([(1, n - 58, 1), (0, n, 1), (2, n - 89, 1)] for n in range(150, 153))],
             [[(2, 0, 130)], [(0, 0, 150)], *([(2, n - 20, 1), (0, n, 1), (1, 0, 40)] for n in range(150, 153))])
    count = sum(int((got != right).any(1).sum()) for batches in tried for got, right in zip(steps(list(batches)), alone))

    steps([[(0, 0, 150), (1, 0, 90)]])
    given, static = batch([(r, 0, 1) for r in range(3)]), inputs([(r, 0, 1) for r in range(3)])
    given.slot_mapping.fill_(-1)
    m = made.builder.build_for_cudagraph_capture(given)
    outputs: list[torch.Tensor] = []
    graph = Graph(lambda: outputs.__setitem__(slice(None), made.forward(static, m)))
    for n in range(150, 153):  # the third request is padding
        pieces = [(1, n - 60, 1), (0, n, 1)]
        now = batch(pieces)
        for kept, new in zip(static, inputs(pieces)):
            for a, b in zip(kept, new):
                a[:2].copy_(b)
        for name in ("seq_lens", "block_table_tensor"):
            getattr(given, name).zero_()[:2] = getattr(now, name)
        given.slot_mapping.fill_(-1)[:2] = now.slot_mapping
        given.query_start_loc.copy_(torch.tensor([0, 1, 2, 2]))
        given.query_start_loc_cpu = given.query_start_loc.cpu()
        assert made.builder.build(0, given).captured == (3, 3, 1)
        graph.replay()
        count += sum(int((out[1] != right[n]).any()) for out, right in zip(outputs, alone))
    return float(count)


def main() -> int:
    sinks = torch.linspace(-2, 5, recorded.HQ)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name, bound = str(dtype)[6:], BOUNDS[dtype]
        for what, terms in (("", {}), (" window", {"sliding_window": 30}), (" soft cap", {"logits_soft_cap": 20.0}),
                            (" sinks", {"sinks": sinks}), (" fp8 cache", {"kv": "fp8"})):
            report(f"{name}{what}, eager steps", lambda: recorded.eager(engine(dtype, False, **terms)), bound)
            for count in (1, 3):
                report(f"{name}{what}, replays of {count} queries a request",
                       lambda: recorded.replayed(engine(dtype, False, True, **terms), count), bound)
        report(f"{name} MLA, eager steps", lambda: recorded.eager(engine(dtype, True)), 2 * bound)
        report(f"{name} MLA, replays of 1 query a request", lambda: recorded.replayed(engine(dtype, True, True), 1), 2 * bound)
        for what, latent in (("", False), (" MLA", True)):
            report(f"{name}{what}, rows with other bits than alone", lambda: differing(dtype, latent), 1, " rows")
    return finish()


if __name__ == "__main__":
    sys.exit(main())
