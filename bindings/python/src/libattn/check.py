# SPDX-License-Identifier: Apache-2.0
"""Attention on every backend of this machine next to float64, with Python's standard library alone.

Each backend that serves a decoder in float32 or float16 prefills two requests over pages and decodes a step; every element is
held against the definition. `attn-check` is the whole conformance suite; this says whether an installation computes.
"""
from __future__ import annotations

import argparse
import array
import math
import random
import struct
import time
from collections.abc import Sequence

from .device import Device, Memory, host_array
from .errors import AttnError, UnsupportedError
from .layers import LayerDesc
from .runtime import Runtime
from .step import Batch

HQ, HK, D, BLOCK = 4, 2, 64, 16
#: Largest error of an element, relative to the root mean square of its row.
BOUNDS = {"f32": 2e-4, "f16": 2e-2}
_CODES = {"f32": "f", "f16": "e"}
#: Queries and keys of the requests of each step.
STEPS = (((37, 37), (21, 21)), ((1, 38), (1, 22)))
CASES: tuple[tuple[str, dict[str, object]], ...] = (("full", {}), ("window", {"window": (9, 0)}),
                                                    ("soft cap", {"soft_cap": 5.0}))


class _Uploads:
    """Tensors on a device."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.stream()

    def put(self, dtype: str, code: str, values: Sequence[float], *shape: int) -> Memory:
        data = struct.pack(f"{len(values)}{code}", *values)
        near = self.device.allocate(len(data), "host")
        host_array(near)[:] = data
        far = self.device.allocate(len(data))
        self.device.copy(far, near, self.stream)
        self.device.synchronize(self.stream)
        return far.view(dtype, *shape)

    def get(self, t: Memory, code: str) -> list[float]:
        near = self.device.allocate(t.nbytes, "host")
        self.device.copy(near.view(t.dtype, *t.shape), t, self.stream)
        self.device.synchronize(self.stream)
        return [x for (x,) in struct.iter_unpack(code, bytes(host_array(near)))]


def _attend(q: Sequence[float], keys: list[Sequence[float]], values: list[Sequence[float]], desc: LayerDesc) -> list[float]:
    """One row of one head in float64."""
    scores = [sum(a * b for a, b in zip(q, k)) * D**-0.5 for k in keys]
    if desc.soft_cap:
        scores = [desc.soft_cap * math.tanh(s / desc.soft_cap) for s in scores]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    return [math.fsum(w * v[d] for w, v in zip(weights, values)) / total for d in range(D)]


def _case(runtime: Runtime, backend: str, place: tuple[int, int], dtype: str, extra: dict[str, object]) -> float:
    """The largest error."""
    desc = LayerDesc("layers.0", HQ, HK, D, dtype=dtype, block_size=BLOCK, **extra)  # type: ignore[arg-type]
    model = runtime.bind(runtime.select([desc], backend=backend, device=place))
    layer, code, numbers = model.layers[0], _CODES[dtype], random.Random(7)
    far = _Uploads(runtime.open(place))
    blocks, tables = 8, [[5, 0, 6, 0], [2, 7, 4, 0]]
    layer.bind_kv(far.device.allocate(blocks * layer.kv_spec.padded_page_bytes), blocks)
    plan = model.plan(0, max_num_reqs=2, max_num_tokens=64, max_seq_len=64)
    plan.bind_workspace(far.device.allocate(plan.workspace_bytes))
    past: list[list[list[list[float]]]] = [[[], []], [[], []]]
    worst = 0.0
    for step in STEPS:
        starts = [0, step[0][0], step[0][0] + step[1][0]]
        slots = [tables[r][p // BLOCK] * BLOCK + p % BLOCK for r, (n, m) in enumerate(step) for p in range(m - n, m)]

        def rows(heads: int, scale: float, count: int = starts[-1]) -> list[float]:
            made = [numbers.gauss(0, scale) for _ in range(count * heads * D)]
            return [x for (x,) in struct.iter_unpack(code, struct.pack(f"{len(made)}{code}", *made))]

        q, k, v = rows(HQ, 2.0), rows(HK, 2.0), rows(HK, 1.0)
        for r in range(2):
            for kept, new in zip(past[r], (k, v)):
                kept += [new[t * HK * D:(t + 1) * HK * D] for t in range(starts[r], starts[r + 1])]
        host, lens = array.array("i", starts), array.array("i", [m for _, m in step])
        batch = Batch(far.put("int32", "i", starts, 3), far.put("int32", "i", list(lens), 2),
                      far.put("int32", "i", [b for row in tables for b in row], 2, 4),
                      far.put("int64", "q", slots, len(slots)), query_start_loc_host=host, seq_lens_host=lens)
        plan.update(batch, far.stream.ptr)
        out = far.put(dtype, code, [0.0] * len(q), starts[-1], HQ, D)
        plan.run(layer, far.put(dtype, code, q, starts[-1], HQ, D), far.put(dtype, code, k, starts[-1], HK, D),
                 far.put(dtype, code, v, starts[-1], HK, D), out, stream=far.stream.ptr)
        found = far.get(out, code)
        for r, (queries, keys) in enumerate(step):
            for t in range(queries):
                last = keys - queries + t
                first = max(0, last - desc.window[0]) if desc.window else 0
                for h in range(HQ):
                    at, kv = ((starts[r] + t) * HQ + h) * D, slice(h * HK // HQ * D, (h * HK // HQ + 1) * D)
                    wanted = _attend(q[at:at + D], [row[kv] for row in past[r][0][first:last + 1]],
                                     [row[kv] for row in past[r][1][first:last + 1]], desc)
                    rms = math.sqrt(math.fsum(x * x for x in wanted) / D)
                    errors = [abs(a - b) / rms for a, b in zip(found[at:at + D], wanted)]
                    worst = math.inf if any(math.isnan(e) for e in errors) else max(worst, *errors)
    return worst


def main(arguments: Sequence[str]) -> int:
    """A line for each backend and case, and a verdict; 0: all agree, 1: one does not, 2: nothing was checked."""
    parser = argparse.ArgumentParser(prog="python -m libattn check", description=__doc__)
    parser.add_argument("backend", nargs="*", help="names as attn-info prints them; by default all")
    asked = parser.parse_args(arguments).backend
    begin, counts = time.monotonic(), {"agree": 0, "differ": 0, "skipped": 0}
    with Runtime(backend="") as runtime:
        found = [b for b in runtime.backends if not asked or b.full_name in asked or b.name in asked]
        for backend in found:
            for dtype in BOUNDS:
                for name, extra in CASES:
                    try:
                        error = _case(runtime, backend.full_name, backend.device, dtype, extra)
                        verdict = "agree" if error <= BOUNDS[dtype] else "differ"
                        text = f"{error:.1e}, {BOUNDS[dtype]:.0e} allowed"
                    except UnsupportedError as why:
                        verdict, text = "skipped", str(why).splitlines()[0]
                    except AttnError as why:
                        verdict, text = "differ", str(why)
                    counts[verdict] += 1
                    print(f"{verdict:8} {backend.full_name:24} {dtype} {name:9} {text}", flush=True)
    result = 1 if counts["differ"] else 0 if counts["agree"] else 2
    print(f"{('good', 'bad', 'nothing was checked')[result]}: {counts['agree']} agree with float64, {counts['differ']} differ, "
          f"{counts['skipped']} not served; {time.monotonic() - begin:.0f} s")
    return result
