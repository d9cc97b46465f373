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
import types
from typing import Any

import torch

import libattn.torch
import test_vllm as recorded
from captured import BOUNDS, DEVICE, Graph, finish, report
from common import attention, causal, peaked, worst
from libattn.integrations.vllm.backend import LibattnMetadataBuilder
from libattn.integrations.vllm.layers import LatentImpl, LibattnImpl

HQ, HK, D, BLOCK, BLOCKS = 8, 2, 64, 16, 40
HEADS, NOPE, ROPE, RANK, WIDTH = 16, 128, 64, 512, 128


class Engine:
    """Two layers of a builder, their caches, and what three requests have in them."""

    def __init__(self, dtype: torch.dtype, latent: bool, graphs: bool, kv: str = "auto", **terms: Any) -> None:
        libattn.torch.configure(ignore_environment=True)
        self.dtype, self.latent, self.eighth, self.terms = dtype, latent, kv == "fp8", terms
        self.generator = g = torch.Generator().manual_seed(5)
        cache_dtype = torch.uint8 if self.eighth else dtype
        self.context: dict[str, Any] = {}
        self.rows: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.weights: list[torch.Tensor] = []
        for i in range(2):
            name = f"model.layers.{i}.self_attn.attn"
            if latent:
                weight = (torch.randn(HEADS * (NOPE + WIDTH), RANK, generator=g) * RANK**-0.5).to(dtype)
                impl: Any = LatentImpl(HEADS, RANK + ROPE, (NOPE + ROPE)**-0.5, kv_lora_rank=RANK, qk_nope_head_dim=NOPE,
                                       qk_rope_head_dim=ROPE, v_head_dim=WIDTH, kv_cache_dtype=kv,
                                       kv_b_proj=types.SimpleNamespace(prefix=name))
                impl.projection = weight.to(DEVICE)
                self.weights.append(weight.view(HEADS, NOPE + WIDTH, RANK).double())
                cache = torch.zeros(BLOCKS, BLOCK, RANK + ROPE, dtype=cache_dtype, device=DEVICE)
                rows = torch.randn(3, 160, RANK, generator=g), peaked(3, 160, ROPE, generator=g)
            else:
                impl = LibattnImpl(HQ, D, D**-0.5, HK, kv_cache_dtype=kv, **terms)
                cache = torch.zeros(BLOCKS, HK, BLOCK, 2 * D, dtype=cache_dtype, device=DEVICE)
                rows = peaked(3, 160, HK, D, generator=g), torch.randn(3, 160, HK, D, generator=g)
            self.rows.append((rows[0].to(dtype), rows[1].to(dtype)))
            self.context[name] = types.SimpleNamespace(impl=impl, kv_cache=cache, layer_name=name, _k_scale_float=0.5,
                                                       _v_scale_float=0.25, _k_scale=torch.tensor([0.5]))
        mode = types.SimpleNamespace(has_full_cudagraphs=lambda: True) if graphs else None
        config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(static_forward_context=self.context, cudagraph_mode=mode),
            model_config=types.SimpleNamespace(dtype=dtype, max_model_len=160))
        self.builder = LibattnMetadataBuilder(None, list(self.context), config, DEVICE)
        self.tables = torch.randperm(BLOCKS, generator=g)[:30].reshape(3, 10).int()

    def batch(self, queries: list[int], lengths: list[int], requests: list[int] | None = None) -> Any:
        """vLLM's metadata, its arrays on the device; of the first requests by default."""
        m = recorded.metadata(queries, lengths, self.tables[requests if requests is not None else slice(len(queries))])
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(m, name, getattr(m, name).to(DEVICE))
        m.max_seq_len = 160
        return m

    def inputs(self, queries: list[int], lengths: list[int], padding: int = 0) -> list[list[torch.Tensor]]:
        """q and the step's new rows of each layer, on the CPU."""
        count = sum(queries) + padding
        heads, width = (HEADS, NOPE + ROPE) if self.latent else (HQ, D)
        return [[peaked(count, heads, width, generator=self.generator).to(self.dtype)] +
                [torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))] + [t[0, :padding]])
                 for t in rows] for rows in self.rows]

    def forward(self, inputs: list[list[torch.Tensor]], m: Any) -> list[torch.Tensor]:
        """All layers; allocates the outputs."""
        outputs = []
        for (q, *new), layer in zip(inputs, self.context.values()):
            out = torch.full((len(q), HEADS * WIDTH if self.latent else HQ * D), 7.0, dtype=self.dtype, device=DEVICE)
            if self.latent:
                layer.impl.forward_mha(q, new[0], new[1][:, None], layer.kv_cache, m, layer._k_scale, out)
            else:
                layer.impl.forward(layer, q, *new, layer.kv_cache, m, out)
            outputs.append(out)
        return outputs

    def error(self, inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor], queries: list[int],
              lengths: list[int]) -> float:
        """The worst of all layers, requests and elements, from float64."""
        def stored(x: torch.Tensor, scale: float) -> torch.Tensor:
            return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale if self.eighth else x

        found = 0.0
        for i, ((q, *_), out) in enumerate(zip(inputs, outputs)):
            out, at = out.cpu().view(len(q), q.shape[1], -1), 0
            for r, (c, n) in enumerate(zip(queries, lengths)):
                k, v = (t[r, :n] for t in self.rows[i])
                if self.latent:
                    k, rotated = k.double(), v
                    k, v = (torch.einsum("hdc,tc->thd", part, k) for part in self.weights[i].split([NOPE, WIDTH], dim=1))
                    k = torch.cat([k, rotated[:, None].double().expand(-1, HEADS, -1)], dim=-1)
                else:
                    k, v = stored(k, 0.5), stored(v, 0.25)
                window = self.terms.get("sliding_window") or 0
                expected, _ = attention(q[at:at + c], k, v, (NOPE + ROPE if self.latent else D)**-0.5, causal(c, n, window),
                                        self.terms.get("logits_soft_cap") or 0.0, self.terms.get("sinks"))
                got = out[at:at + c].double()
                if self.dtype == torch.float16:  # a sink far above the scores leaves rows under its least normal number
                    got = torch.where((got - expected).abs() <= 2**-24, expected, got)
                found = max(found, worst(got, expected))
                if not bool(out[at:at + c].isfinite().all()):
                    return float("inf")
                at += c
        return found


def eager(dtype: torch.dtype, latent: bool, **terms: Any) -> float:
    """A prefill, a chunk next to decodes, decodes, drafts."""
    engine, lengths, found = Engine(dtype, latent, False, **terms), [0, 0, 0], 0.0
    for queries in ([20, 7, 100], [1, 30, 1], [1, 1, 1], [3, 1, 2]):
        lengths = [a + b for a, b in zip(lengths, queries)]
        inputs = engine.inputs(queries, lengths)
        there = [[t.to(DEVICE) for t in layer] for layer in inputs]
        found = max(found, engine.error(inputs, engine.forward(there, engine.builder.build(0, engine.batch(queries, lengths))),
                                        queries, lengths))
    return found


def captured(dtype: torch.dtype, latent: bool, count: int, **terms: Any) -> float:
    """Prefills, then three replays of one graph of batches with `count` queries each; in the second a request is padding."""
    engine = Engine(dtype, latent, True, **terms)
    lengths = [40, 7, 100]
    inputs = engine.inputs(lengths, lengths)
    there = [[t.to(DEVICE) for t in layer] for layer in inputs]
    found = engine.error(inputs, engine.forward(there, engine.builder.build(0, engine.batch(lengths, lengths))), lengths,
                         lengths)
    static = [[t.to(DEVICE) for t in layer] for layer in engine.inputs([count] * 3, [n + count for n in lengths])]
    given = engine.batch([count] * 3, [count] * 3)
    given.slot_mapping.fill_(-1)
    m = engine.builder.build_for_cudagraph_capture(given)
    outputs: list[torch.Tensor] = []
    graph = Graph(lambda: outputs.__setitem__(slice(None), engine.forward(static, m)))
    for requests in (3, 2, 3):
        queries, lengths = [count] * requests, [n + count for n in lengths[:requests]] + lengths[requests:]
        padding = count * (3 - requests)
        inputs = engine.inputs(queries, lengths, padding)
        for kept, new in zip(static, inputs):
            for a, b in zip(kept, new):
                a.copy_(b)
        now = engine.batch(queries, lengths[:requests])
        given.query_start_loc.copy_(torch.cat([now.query_start_loc, now.query_start_loc[-1:].expand(3 - requests)]))
        given.query_start_loc_cpu = given.query_start_loc.cpu()
        given.seq_lens.zero_()[:requests] = now.seq_lens
        given.slot_mapping.fill_(-1)[:count * requests] = now.slot_mapping
        assert engine.builder.build(0, given).captured == (3, 3 * count, count)
        graph.replay()
        found = max(found, engine.error(inputs, outputs, queries, lengths))
    return found


def differing(dtype: torch.dtype, latent: bool) -> float:
    """Rows of a batch-invariant request whose bits are not those of the request alone, for each layer: in other pieces, next to others,
    and in captured decodes."""
    engine = Engine(dtype, latent, True)
    for layer in engine.context.values():
        layer.impl.batch_invariant = 2
    drawn = [peaked(3, 160, HEADS if latent else HQ, NOPE + ROPE if latent else D, generator=engine.generator).to(dtype)
             for _ in engine.rows]

    def inputs(pieces: list[tuple[int, int, int]]) -> list[list[torch.Tensor]]:
        """What pieces (request, first, count) bring."""
        return [[torch.cat([t[r, first:first + count] for r, first, count in pieces]).to(DEVICE) for t in (q, *rows)]
                for q, rows in zip(drawn, engine.rows)]

    def batch(pieces: list[tuple[int, int, int]]) -> Any:
        return engine.batch([count for *_, count in pieces], [first + count for _, first, count in pieces], [r for r, *_ in pieces])

    def steps(batches: list[list[tuple[int, int, int]]]) -> list[torch.Tensor]:
        """Request 0's rows, of each layer."""
        found: list[list[torch.Tensor]] = [[] for _ in drawn]
        for pieces in batches:
            outputs, at = engine.forward(inputs(pieces), engine.builder.build(0, batch(pieces))), 0
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
    m = engine.builder.build_for_cudagraph_capture(given)
    outputs: list[torch.Tensor] = []
    graph = Graph(lambda: outputs.__setitem__(slice(None), engine.forward(static, m)))
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
        assert engine.builder.build(0, given).captured == (3, 3, 1)
        graph.replay()
        count += sum(int((out[1] != right[n]).any()) for out, right in zip(outputs, alone))
    return float(count)


def main() -> int:
    sinks = torch.linspace(-2, 5, HQ)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        name, bound = str(dtype)[6:], BOUNDS[dtype]
        for what, terms in (("", {}), (" window", {"sliding_window": 30}), (" soft cap", {"logits_soft_cap": 20.0}),
                            (" sinks", {"sinks": sinks}), (" fp8 cache", {"kv": "fp8"})):
            report(f"{name}{what}, eager steps", lambda: eager(dtype, False, **terms), bound)
            for count in (1, 3):
                report(f"{name}{what}, replays of {count} queries a request", lambda: captured(dtype, False, count, **terms),
                       bound)
        report(f"{name} MLA, eager steps", lambda: eager(dtype, True), 2 * bound)
        report(f"{name} MLA, replays of 1 query a request", lambda: captured(dtype, True, 1), 2 * bound)
        for what, latent in (("", False), (" MLA", True)):
            report(f"{name}{what}, rows with other bits than alone", lambda: differing(dtype, latent), 1, " rows")
    return finish()


if __name__ == "__main__":
    sys.exit(main())
