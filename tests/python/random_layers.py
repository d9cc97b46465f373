# SPDX-License-Identifier: Apache-2.0
"""Decoder and recurrent layers of random shapes, terms and batches against float64, on any backend:

    random_layers.py SEED SECONDS [BACKEND [DEVICE]]

as `random_layers.py 1 30 cuda_flash cuda`. A line for each layer that is wrong, then one that counts; the exit status is 1 if
one was wrong. What a backend refuses is counted and is no error.
"""
from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as functional

import libattn
from common import attention
from libattn import extensions

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
#: What an element may be off by, over its row's root mean square: a wrong term or key is off by one and more.
BOUNDS = {"f32": 3e-4, "f16": 1.5e-2, "bf16": 0.1}


class Place:
    """A backend and the device that its tensors are on, with a generator of numbers."""

    def __init__(self, backend: str, device: str, seed: int) -> None:
        self.backend, self.device, self.random = backend, device, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def up(self, x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.to(self.device)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype)

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def bind(self, desc: libattn.LayerDesc) -> libattn.Model:
        runtime = libattn.Runtime(ignore_environment=True, validate=True)
        return runtime.bind(runtime.select([desc], backend=self.backend, device=None if self.device == "cpu" else self.device))

    def run(self, model: libattn.Model, starts: list[int], lengths: list[int], inputs: Iterable[torch.Tensor | None], *,
            table: list[list[int]] | None = None, slots: list[int] | None = None, made: tuple[Any, ...] = (),
            batch: tuple[Any, ...] = (), flags: int = 0, **more: Any) -> None:
        """A plan, a batch and a run of the model's layer; the tensors of `inputs` are where they are needed."""
        first, keys = (torch.tensor(x, dtype=torch.int32) for x in (starts, lengths))
        plan = model.plan(0, max_num_reqs=len(lengths) + self.random.choice((0, 3)), max_num_tokens=starts[-1],
                          max_seq_len=max(lengths) + self.random.choice((0, 700)))
        if plan.workspace_bytes:
            plan.bind_workspace(libattn.allocate(plan.workspace_bytes, device=self.device))
        if "spans" in more:
            ends = torch.tensor([span for request in more["spans"] for span in request], dtype=torch.int32).view(-1, 2)
            counts = itertools.accumulate((len(request) for request in more["spans"]), initial=0)
            more["spans"] = (self.up(ends), self.up(torch.tensor(list(counts), dtype=torch.int32)))
        plan.update(libattn.Batch(self.up(first), self.up(keys), self.up(torch.tensor(table, dtype=torch.int32)) if table else None,
                                  self.up(torch.tensor(slots)) if slots else None, query_start_loc_host=first, seq_lens_host=keys,
                                  extensions=batch, **more))
        plan.run(model.layers[0], *inputs, extensions=made, flags=flags)


def apart(found: torch.Tensor, expected: torch.Tensor, least: float) -> float:
    """The largest error of an element over its row's root mean square, which is at least `least`; huge for a NaN."""
    rms = expected.pow(2).mean(-1, keepdim=True).sqrt() + least
    return float(((found.cpu().double() - expected).abs() / rms).nan_to_num(9e9).max())


def decoder(place: Place) -> tuple[float, str, libattn.LayerDesc]:
    """Prompts, pieces and decodes over earlier keys of shuffled blocks: windows, chunks, ALiBi, sinks, soft cap, prefixes."""
    pick, chance = place.random.choice, place.chance
    kv_heads, size, block = pick((1, 2, 3, 4)), pick((8, 16, 32, 64, 80, 96, 128, 192, 256)), pick((4, 8, 16, 48, 64))
    heads, dtype, terms = kv_heads * pick((1, 1, 2, 3, 4, 8, 16)), pick(tuple(DTYPES)), dict[str, Any]()
    if chance(0.3):
        terms["window"] = (pick((0, 3, 50, 130)), pick((0, 0, 7)))
    elif chance(0.2):
        terms.update(chunk_size=pick((16, 64, 100)), chunk_lookback=pick((0, 1, 2)))
    for name, value in (("soft_cap", pick((5.0, 30.0))), ("has_sinks", True), ("alibi", pick(("linear", "sqrt"))),
                        ("prefix_lm", True), ("batch_invariant", pick((1, 2))), ("num_speculative_tokens", pick((1, 3)))):
        if chance(0.2):
            terms[name] = value
    desc = libattn.LayerDesc("layer", heads, kv_heads, size, head_size_v=size if chance(0.7) else pick((8, 32, 128)), dtype=dtype,
                             block_size=block, **terms)
    queries = [pick((1, 1, 2, 4, 33, place.random.randint(1, 90))) for _ in range(pick((1, 2, 5, 9)))]
    if "batch_invariant" in terms:  # decodes come first
        queries.sort(key=lambda n: n > 1 + terms.get("num_speculative_tokens", 0))
    common = pick((0, 1, 4)) * block
    lengths = [n + common + pick((0, 1, 17, place.random.randint(0, 400))) for n in queries]
    model, of = place.bind(desc), DTYPES[dtype]
    layer = model.layers[0]
    blocks = [-(-n // block) for n in lengths]
    free = iter(place.random.sample(range(sum(blocks) + 3), sum(blocks)))
    table = [[next(free) for _ in range(n)] for n in blocks]
    for row in table[1:]:
        row[:common // block] = table[0][:common // block]
    rows = [row + [pick((-1, 2**30))] * (max(blocks) - len(row)) for row in table]
    layer.bind_kv(libattn.allocate((sum(blocks) + 3) * layer.kv_spec.padded_page_bytes, device=place.device), sum(blocks) + 3)
    sinks = 2 * place.normal(heads) if "has_sinks" in terms else None
    slopes = 0.3 * place.normal(heads).abs() if "alibi" in terms else None
    if sinks is not None or slopes is not None:
        layer.bind_params(sinks=place.up(sinks), alibi_slopes=place.up(slopes))
    keys = [2 * place.normal(n, kv_heads, size, dtype=of) for n in lengths]
    values = [place.normal(n, kv_heads, desc.head_size_v, dtype=of) for n in lengths]
    for mine, others in ((keys[0], keys[1:]), (values[0], values[1:])):
        for other in others:
            other[:common] = mine[:common]

    def slots(r: int, begin: int, end: int) -> list[int]:
        return [table[r][j // block] * block + j % block for j in range(begin, end)]

    before, spans = [n - q for n, q in zip(lengths, queries)], [[] for _ in queries] if "prefix_lm" in terms else None
    context = [r for r, n in enumerate(before) if n > 0]
    context.sort(key=lambda r: before[r] > 1 + terms.get("num_speculative_tokens", 0))
    if context:
        wanted = [[-1] * (common if i else 0) + slots(r, common if i else 0, before[r]) for i, r in enumerate(context)]
        place.run(model, list(itertools.accumulate([before[r] for r in context], initial=0)), [before[r] for r in context],
                  (None, *(place.up(torch.cat([x[r][:before[r]] for r in context])) for x in (keys, values)), None),
                  table=[rows[r] for r in context], slots=sum(wanted, []),
                  flags=libattn.NO_ATTEND, **({} if spans is None else {"spans": [[] for _ in context]}))
    if spans is not None:
        for r, n in enumerate(lengths):
            begin = place.random.randrange(n)
            spans[r] = [(begin, place.random.randint(begin, n - 1))]
    q = place.normal(sum(queries), heads, size, dtype=of)
    out = torch.full((sum(queries), heads, desc.head_size_v), float("nan"), dtype=of, device=place.device)
    starts = list(itertools.accumulate(queries, initial=0))
    new = (place.up(torch.cat([x[r][n:] for r, n in enumerate(before)])) for x in (keys, values))
    place.run(model, starts, lengths, (place.up(q), *new, out), table=rows,
              slots=sum((slots(r, before[r], n) for r, n in enumerate(lengths)), []),
              **({} if spans is None else {"spans": spans}),
              **({"common_prefix_len": common} if common and chance(0.7) else {}))
    off = 0.0
    for r, (n, length) in enumerate(zip(queries, lengths)):
        p, j = torch.arange(n)[:, None] + length - n, torch.arange(length)[None]
        visible = j <= p
        if desc.window is not None:
            visible &= (j >= p - desc.window[0]) & (j <= p + desc.window[1])
        if desc.chunk_size:
            visible &= p // desc.chunk_size - j // desc.chunk_size <= desc.chunk_lookback
        for begin, end in spans[r] if spans else ():
            visible = visible | ((p >= begin) & (p <= end) & (j >= begin) & (j <= end))
        bias = None if slopes is None else -slopes.double()[:, None, None] * (
            (p - j).abs() if desc.alibi == "linear" else (p - j).clamp(min=0).sqrt())
        expected = attention(q[starts[r]:starts[r + 1]], keys[r], values[r], size**-0.5, visible, desc.soft_cap, sinks, bias)[0]
        expected = torch.where(visible.any(-1)[:, None, None], expected, 0.0)
        off = max(off, apart(out[starts[r]:starts[r + 1]], expected, 0.02))
    return off, f"queries {queries}, keys {lengths}, {common} common", desc


def recurrent(place: Place) -> tuple[float, str, libattn.LayerDesc]:
    """Any rule with any gates, over steps of prompts and single tokens: convolution, skip, norms, states of 16 bits."""
    pick, chance = place.random.choice, place.chance
    heads, dk, dv, dtype = pick((1, 2, 3)), pick((16, 24, 64, 96, 128, 256)), pick((16, 24, 64, 96, 128)), pick(tuple(DTYPES))
    kind, conv, state = pick(("gated_delta", "additive")), pick((0, 0, 2, 4)), pick(("f32", "f32", "bf16", "f16"))
    gate = pick(("softplus", "bounded", "given", "constant"))
    by_channel = gate != "constant" and chance(0.35)
    step = kind == "additive" and gate == "softplus" and not by_channel and chance(0.5)
    limits = (0.05, 1.2) if gate == "softplus" and chance(0.3) else (0.0, 0.0)
    rule = libattn.RecurrentRule(kind, gate, by_channel, "step" if step else pick(("sigmoid", "none")), conv > 0 and chance(0.3),
                                 chance(0.3), -5.0 if gate == "bounded" else 0.0, *limits)
    gdn = libattn.GdnDesc(heads, heads * pick((1, 2, 3)), dk, dv, conv, conv > 0 and chance(0.8),
                          kind == "gated_delta" or chance(0.5), state_dtype=state)
    groups, hv = pick((0, 0, 1)), gdn.num_v_heads
    norm = libattn.RecurrentNorm(1e-5, pick(("silu", "sigmoid")), chance(0.5), groups) if chance(0.3) else None
    desc = libattn.LayerDesc("layer", heads, heads, dk, kind="recurrent", head_size_v=dv, gdn=gdn, rule=rule, norm=norm,
                             dtype=dtype, scale=dk**-0.5 if gdn.qk_l2norm else 1.0 / dk)
    model, of, count = place.bind(desc), DTYPES[dtype], pick((1, 2, 4))
    layer, channels, gates = model.layers[0], 2 * heads * dk + hv * dv, hv * (dk if by_channel else 1)
    slots = place.random.sample(range(count + 3), count)
    memory = torch.full((count + 3, hv, dv, dk), 7.0, dtype=DTYPES[state], device=place.device)
    layer.bind_state(memory, torch.full((count + 3, channels, conv - 1), 3.0, dtype=of, device=place.device) if conv else None)
    a_log, dt_bias, skip = place.normal(hv) - 1, place.normal(gates) - 1, place.normal(hv)
    taps, bias = (0.5 * place.normal(channels, conv, dtype=of), 0.3 * place.normal(channels, dtype=of)) if conv else (None, None)
    weight = place.normal(hv * dv if groups else dv)
    layer.bind_params(extensions=[
        extensions.gdn_weights(None if gate == "given" else place.up(a_log),
                               None if gate in ("given", "constant") else place.up(dt_bias), place.up(taps), place.up(bias)),
        *([extensions.recurrent_skip(place.up(skip))] if rule.has_skip else []),
        *([extensions.recurrent_norm_weight(place.up(weight))] if norm else [])])
    steps = [[pick((1, 2, 63, 65, place.random.randint(1, 150))) if chance(0.6) else 1 for _ in slots]
             for _ in range(pick((1, 2, 4)))]
    states, history = torch.zeros(count, hv, dv, dk).double(), [torch.zeros(max(conv - 1, 0), channels).double() for _ in slots]
    off, lengths, rate = 0.0, [0] * count, a_log.double().exp()[:, None]
    for queries in steps:
        total, lengths = sum(queries), [n + m for n, m in zip(lengths, queries)]
        starts = list(itertools.accumulate(queries, initial=0))
        a = None if gate == "constant" else place.normal(total, gates, dtype=of)
        a = -a.abs() if a is not None and gate == "given" else a
        b = place.normal(total, hv, dtype=of) if rule.write_gate == "sigmoid" else None
        z = place.normal(total, hv, dv, dtype=of) if norm else None
        mixed = place.normal(total, channels, dtype=of)
        parts = (hv * dv, heads * dk, heads * dk) if rule.values_first else (heads * dk, heads * dk, hv * dv)
        if not conv and not gdn.qk_l2norm:  # else sums grow from token to token
            mixed[:, heads * dk:2 * heads * dk] *= dk**-0.5
        plain = [None] * 3 if conv else [place.up(x.reshape(total, -1, d).contiguous())
                                         for x, d in zip(mixed.split(parts, 1), (dk, dk, dv))]
        out = torch.full((total, hv, dv), float("nan"), dtype=of, device=place.device)
        place.run(model, starts, lengths, (*plain, out),
                  batch=(extensions.gdn_batch(place.up(torch.tensor(slots, dtype=torch.int32))),),
                  made=(extensions.gdn_io(place.up(a), place.up(b), place.up(mixed) if conv else None),
                        *([extensions.recurrent_gate(place.up(z))] if norm else [])))
        for r, slot in enumerate(slots):
            here = slice(starts[r], starts[r + 1])
            rows = mixed[here].double()
            if conv:
                rows = torch.cat([history[r], rows])
                history[r] = rows[len(rows) - conv + 1:]
                rows = sum(rows[i:i + queries[r]] * taps[:, i].double() for i in range(conv)) + bias.double()
                rows = functional.silu(rows) if gdn.conv_silu else rows
            split = rows.split(parts, 1)
            v, k, q = split if rule.values_first else (split[2], split[1], split[0])
            q, k, v = (x.reshape(queries[r], -1, d) for x, d in ((q, dk), (k, dk), (v, dv)))
            if gdn.qk_l2norm:
                q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (x.repeat_interleave(hv // heads, 1) for x in (desc.scale * q, k))
            x = torch.zeros(queries[r], gates).double() if a is None else a[here].double()
            x = (x if gate == "given" else x + dt_bias.double()).view(-1, hv, gates // hv)
            dt = functional.softplus(x)
            dt = dt.clamp(rule.dt_min, rule.dt_max) if rule.dt_max else dt
            decay = {"softplus": -rate * dt, "bounded": -5.0 * torch.sigmoid(rate * x), "given": x,
                     "constant": (-rate).expand(len(x), hv, 1)}[gate].exp()
            write = torch.sigmoid(b[here].double()) if b is not None else dt[..., 0] if step else torch.ones(len(x), hv).double()
            expected, s = [], states[r]
            for t in range(queries[r]):
                s = s * decay[t][:, None]  # [hv, 1, dk or 1]
                rest = v[t] - torch.einsum("hdk,hk->hd", s, k[t]) if kind == "gated_delta" else v[t]
                s = s + torch.einsum("hd,hk->hdk", write[t][:, None] * rest, k[t])
                expected.append(torch.einsum("hdk,hk->hd", s, q[t]) + (skip.double()[:, None] * v[t] if rule.has_skip else 0))
            o = torch.stack(expected)
            if norm:
                g = z[here].double()
                g = functional.silu(g) if norm.gate_activation == "silu" else torch.sigmoid(g)
                o = o * g if norm.gate_first else o
                mean = o.pow(2).mean((-2, -1) if groups else -1, keepdim=True)
                o = o / (mean + norm.epsilon).sqrt() * (weight.double().view(hv, dv) if groups else weight.double())
                o = o if norm.gate_first else o * g
            off = max(off, apart(out[here], o, 0.05 * float(o.pow(2).mean().sqrt()) + 1e-3) / (3 if norm else 1) * (
                1 if state == "f32" else BOUNDS[dtype] / max(BOUNDS[dtype], 0.05)))
            states[r] = memory[slot].cpu().double() if state != "f32" or dtype != "f32" else s
    return off, f"steps {steps}", desc


def main(seed: int, seconds: float, backend: str = "cpu_simd", device: str = "cpu") -> int:
    counts, end = {"right": 0, "refused": 0, "wrong": 0}, time.monotonic() + seconds
    while time.monotonic() < end:
        kind = (decoder, recurrent)[seed % 2]
        try:
            off, said, desc = kind(Place(backend, device, seed))
        except libattn.UnsupportedError:
            counts["refused"] += 1
        else:
            right = off <= BOUNDS[str(desc.dtype)]
            counts["right" if right else "wrong"] += 1
            if not right:
                print(f"seed {seed}: {off:.3g} of a row's root mean square, {said}, {desc}", flush=True)
        seed += 1
    print(f"{backend}: {counts['right']} right, {counts['refused']} refused, {counts['wrong']} wrong")
    return min(counts["wrong"], 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:5]))
