# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers with a ring of inputs, over many steps, against the recurrence in float64, which knows no ring: drafts
rejected at each position, slots copied, forks, checkpoints; and 16-bit states next to those of plain steps."""
from __future__ import annotations

import unittest
from dataclasses import dataclass, field

import torch

import libattn
from common import one_layer, planned, worst
from libattn import abi, extensions

HK, HV, DK, DV, SLOTS, LENGTH = 2, 4, 16, 24, 12, 160
GATED_DELTA, MAMBA2 = None, libattn.RecurrentRule("additive", write_gate="step", has_skip=True)
LIGHTNING = libattn.RecurrentRule("additive", gate="constant", write_gate="none")
KDA = libattn.RecurrentRule(gate_per_channel=True)
BOUNDED = libattn.RecurrentRule(gate="bounded", gate_per_channel=True, gate_bound=-5.0)
GIVEN = libattn.RecurrentRule(gate="given")
RULES = {"gated delta": GATED_DELTA, "kda": KDA, "bounded": BOUNDED, "given": GIVEN, "mamba2": MAMBA2, "lightning": LIGHTNING}
#: Those that declare a ring.
BACKENDS = ("cpu_ref", "cpu_simd")


class Tokens:
    """The inputs of a layer's tokens, and what the rule makes of them in float64."""

    def __init__(self, rule: libattn.RecurrentRule | None, seed: int, dtype: torch.dtype = torch.float32) -> None:
        r = self.rule = rule or libattn.RecurrentRule()
        generator = torch.Generator().manual_seed(seed)
        gates = HV * (DK if r.gate_per_channel else 1)
        self.a_log, self.dt_bias, self.skip = (torch.randn(n, generator=generator) - 1 for n in (HV, gates, HV))
        self.q, self.k = (torch.randn(LENGTH, HK, DK, generator=generator).to(dtype) for _ in range(2))
        self.v = torch.randn(LENGTH, HV, DV, generator=generator).to(dtype)
        self.a, self.b = (torch.randn(LENGTH, n, generator=generator).to(dtype) for n in (gates, HV))
        if r.gate == "given":
            self.a = -self.a.abs()
        norm = [x.double() / (x.double().pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (self.q, self.k)]
        query, self.key = (x.repeat_interleave(HV // HK, 1) for x in norm)
        self.query = query * DK**-0.5
        rate = self.a_log.double().exp()[:, None]
        x = (self.a.double() + self.dt_bias.double()).view(LENGTH, HV, -1)
        step = torch.nn.functional.softplus(x)
        self.g = {"softplus": lambda: -rate * step, "bounded": lambda: r.gate_bound * torch.sigmoid(rate * x),
                  "given": lambda: self.a.double().view(LENGTH, HV, -1),
                  "constant": lambda: (-rate).expand(LENGTH, HV, 1)}[str(r.gate)]()
        self.beta = {"sigmoid": lambda: torch.sigmoid(self.b.double()), "none": lambda: torch.ones(LENGTH, HV).double(),
                     "step": lambda: step[..., 0]}[str(r.write_gate)]()

    def change(self, state: torch.Tensor, t: int) -> tuple[torch.Tensor, torch.Tensor]:
        """S after token t, and u."""
        state, rest = state * self.g[t].exp()[:, None], self.v[t].double()
        if self.rule.rule == "gated_delta":
            rest = rest - torch.einsum("hdk,hk->hd", state, self.key[t])
        u = self.beta[t][:, None] * rest
        return state + torch.einsum("hd,hk->hdk", u, self.key[t]), u

    def out(self, state: torch.Tensor, t: int) -> torch.Tensor:
        o = torch.einsum("hdk,hk->hd", state, self.query[t])
        return o + self.skip.double()[:, None] * self.v[t].double() if self.rule.has_skip else o


@dataclass
class Request:
    """A request's place in an engine, and the state after its accepted tokens."""

    tokens: Tokens
    slot: int
    accepted: int = 1
    ring: int = 0
    length: int = 0
    state: torch.Tensor = field(default_factory=lambda: torch.zeros(HV, DV, DK).double())


class Engine:
    """A layer with a ring, requests in slots, and the cursor as the draft says."""

    def __init__(self, backend: str, rule: libattn.RecurrentRule | None, weights: Tokens, replay: int, drafted: int = 0,
                 interval: int = 0, state: str = "f32", dtype: str = "f32", ring: bool = True) -> None:
        gdn = libattn.GdnDesc(HK, HV, DK, DV, qk_l2norm=True, num_speculative_tokens=drafted, state_dtype=state,
                              has_initial_slots=True, checkpoint_interval=interval)
        self.rule, self.replay, self.drafted, self.interval, self.dtype = rule, replay, drafted, interval, dtype
        per_channel = rule is not None and bool(rule.gate_per_channel)
        cache = extensions.replay_cache(gdn, dtype, replay, per_channel)
        desc = libattn.LayerDesc("layer", HK, HK, DK, kind="recurrent", head_size_v=DV, gdn=gdn, rule=rule, scale=DK**-0.5,
                                 dtype=dtype, num_speculative_tokens=drafted, extensions=[cache] if ring else [])
        self.model, self.layer = one_layer(desc, backend, validate=True)
        types = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
        self.state = torch.full((SLOTS, HV, DV, DK), float("nan"), dtype=types[state])
        self.ring = None
        if ring:
            spec = self.layer.caches[-1]
            self.ring = torch.full((SLOTS, spec.block_size, HK, spec.head_size), float("nan"), dtype=types[dtype])
        self.layer.bind_state(self.state, None, self.ring)
        r = rule or libattn.RecurrentRule()
        given = r.gate == "given"
        self.layer.bind_params(extensions=[
            extensions.gdn_weights(None if given else weights.a_log, None if given or r.gate == "constant" else weights.dt_bias),
            *([extensions.recurrent_skip(weights.skip)] if r.has_skip else [])])

    def step(self, requests: list[Request], queries: list[int], accepted: list[int], initial: dict[int, int] | None = None,
             checkpoints: dict[int, int] | None = None) -> list[torch.Tensor]:
        """Runs so many tokens of each request, of which so many are accepted. `initial`: slots of requests that start from
        others; `checkpoints`: where those of requests go."""
        rows = [(r.tokens, range(r.length, r.length + n)) for r, n in zip(requests, queries)]
        q, k, v, a, b = (torch.cat([getattr(t, name)[at.start:at.stop] for t, at in rows]) for name in "qkvab")
        rule = self.rule or libattn.RecurrentRule()
        slots = [[r.slot] for r in requests]
        froms = [[(initial or {}).get(i, r.slot)] for i, r in enumerate(requests)]
        wide = 1 if self.ring is not None else 1 + self.drafted
        slots, froms = ([row + [-1] * (wide - 1) for row in x] for x in (slots, froms))
        starts = [0]
        for n in queries:
            starts.append(starts[-1] + n)
        made = [extensions.gdn_batch(
            torch.tensor(slots, dtype=torch.int32),
            num_accepted_tokens=torch.tensor([r.accepted for r in requests], dtype=torch.int32) if self.drafted else None,
            initial_slots=torch.tensor(froms, dtype=torch.int32) if initial else None,
            checkpoint_slots=torch.tensor([[(checkpoints or {}).get(i, -1)] for i in range(len(requests))], dtype=torch.int32)
            if self.interval else None)]
        if self.ring is not None:
            made.append(extensions.replay_batch(torch.tensor([r.ring for r in requests], dtype=torch.int32)))
        out = torch.empty(starts[-1], HV, DV, dtype=v.dtype)
        batch = libattn.Batch(starts, [r.length + n for r, n in zip(requests, queries)], extensions=made)
        planned(self.model, batch).run(self.layer, q, k, v, out, extensions=[extensions.gdn_io(
            None if rule.gate == "constant" else a, b if rule.write_gate == "sigmoid" else None)])
        for i, (r, n, took) in enumerate(zip(requests, queries, accepted)):
            fresh = r.length == 0 or i in (initial or {}) or r.ring >= self.replay - 1
            r.ring = 0 if n > 1 + self.drafted else took - 1 if fresh else r.ring + took
            r.accepted = took if n <= 1 + self.drafted else 1
            r.length += took
        return list(out.split(queries))


class Steps(unittest.TestCase):
    def walk(self, request: Request, count: int, took: int, found: torch.Tensor) -> None:
        """Holds the outputs of `count` tokens to the recurrence, which goes on with those that were accepted."""
        state = request.state
        for i in range(count):
            t = request.length - took + i
            state, _ = request.tokens.change(state, t)
            self.assertLess(worst(found[i], request.tokens.out(state, t)), 2e-5, t)
            request.state = state if i < took else request.state

    def hold(self, engine: Engine, requests: list[Request], queries: list[int], accepted: list[int],
             initial: dict[int, int] | None = None, checkpoints: dict[int, int] | None = None) -> None:
        for r, n, took, out in zip(requests, queries, accepted,
                                   engine.step(requests, queries, accepted, initial, checkpoints)):
            self.walk(r, n, took, out)

    def each(self, drafted: int, replay: int, interval: int = 0) -> list[tuple[Engine, list[Request]]]:
        made = []
        for name, rule in RULES.items():
            for backend in BACKENDS:
                with self.subTest(f"{name}, {backend}"):
                    tokens = Tokens(rule, 3)
                    made.append((Engine(backend, rule, tokens, replay, drafted, interval),
                                 [Request(tokens, 3), Request(tokens, 1)]))
        return made

    def test_single_tokens(self) -> None:
        """Rings wrap; prompts over a ring with tokens; a slot is copied, ring and cursor with it."""
        for engine, requests in self.each(0, 8):
            self.hold(engine, requests, [5, 9], [5, 9])
            for _ in range(11):
                self.hold(engine, requests, [1, 1], [1, 1])
            self.hold(engine, requests, [13, 2], [13, 2])
            for _ in range(6):
                self.hold(engine, requests, [1, 1], [1, 1])
            first = requests[0]
            engine.model.copy_blocks([(first.slot, 7)])
            requests.append(Request(first.tokens, 7, 1, first.ring, first.length, first.state))
            for _ in range(20):
                self.hold(engine, requests, [1, 1, 1], [1, 1, 1])

    def test_rejected_drafts(self) -> None:
        """Drafts of 3 tokens are rejected at each position, over rings at each cursor."""
        for engine, requests in self.each(3, 8):
            self.hold(engine, requests, [6, 1], [6, 1])
            for i in range(24):
                self.hold(engine, requests, [4, 4 - i % 3 % 2], [1 + i % 4, 1 + (i // 2 + i // 8) % 3])

    def test_forks_and_checkpoints(self) -> None:
        """A fork reads another slot's ring; a checkpoint in the middle of a ring is a whole state."""
        for engine, requests in self.each(3, 8, 10):
            self.hold(engine, requests, [6, 7], [6, 7])
            for i in range(3):
                self.hold(engine, requests, [4, 4], [1 + i % 2, 1], checkpoints={0: 8, 1: 9})
            first = requests[0]
            self.assertEqual((first.length, requests[1].length), (10, 10))
            # the first request wrote it when its draft passed 10, and again when it got there
            other = Request(first.tokens, 5, 1, 0, 10, first.state)
            self.hold(engine, [other], [2], [1], initial={0: 8})
            fork = Request(first.tokens, 6, first.accepted, first.ring, first.length, first.state)
            self.hold(engine, [fork], [4], [2], initial={0: first.slot})
            for i in range(9):
                self.hold(engine, [first, other, fork], [4, 4, 1], [1 + i % 4, 1 + i % 3, 1])


class Refused(unittest.TestCase):
    def test_cursor(self) -> None:
        tokens = Tokens(None, 1)
        engine = Engine("cpu_ref", None, tokens, 8)
        request = Request(tokens, 2)
        engine.step([request], [3], [3])
        for ring in (-1, 4, 8):
            request.ring = ring
            with self.assertRaisesRegex(libattn.AttnError, f"ring_tokens.*request 0: {ring}; 0 to"):
                engine.step([request], [1], [1])

    def test_cache(self) -> None:
        gdn = libattn.GdnDesc(HK, HV, DK, DV, num_speculative_tokens=2)
        good = {"role": abi.CacheRole.REPLAY, "kv_dtype": abi.DtypeId.F32, "num_heads": HK, "head_size": DK + 2 * DV + 8,
                "block_size": 12}
        runtime = libattn.Runtime(ignore_environment=True)

        def select(**fields: int) -> None:
            cache = extensions.layer_caches([abi.attn_cache_desc(**{**good, **fields})])
            runtime.select([libattn.LayerDesc("layer", HK, HK, DK, kind="recurrent", head_size_v=DV, gdn=gdn, extensions=[cache],
                                              num_speculative_tokens=2)], backend="cpu_ref")

        select()
        for fields in ({"kv_dtype": abi.DtypeId.BF16}, {"num_heads": HV}, {"head_size": DK + 2 * DV}, {"block_size": 4},
                       {"table": 1}):
            with self.assertRaisesRegex(libattn.AttnError, "caches.*a ring for replay is the only one"):
                select(**fields)
        with self.assertRaisesRegex(libattn.AttnError, "role.*replay .11. alone"):
            select(role=abi.CacheRole.EXTRA)


class Rounding(unittest.TestCase):
    """States of 16 bits: rows that replay and plain steps leave differ by no more than docs/semantics.md says."""

    def hold(self, rule: libattn.RecurrentRule | None, dtype: str, backend: str) -> None:
        count, replay = 96, 16
        tokens = Tokens(rule, 7, getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[dtype]))
        engines = [Engine(backend, rule, tokens, replay, state=dtype, dtype=dtype, ring=ring) for ring in (True, False)]
        requests = [Request(tokens, 2), Request(tokens, 2)]
        unit = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
        exact, bound = torch.zeros(HV, DV, DK).double(), torch.zeros(HV, DV).double()
        differs = False
        for t in range(count):
            outs = [engine.step([r], [1], [1])[0] for engine, r in zip(engines, requests)]
            exact, u = tokens.change(exact, t)
            u, row, key = u.abs(), exact.norm(dim=-1), tokens.key[t].norm(dim=-1)[:, None]
            added = (2 * row + 2 * u * key if tokens.rule.rule == "additive" else 3 * row + 2 * u) * unit
            bound = tokens.g[t].amax(-1, keepdim=True).exp() * bound + added
            error = (outs[0][0].double() - outs[1][0].double()).abs()
            limit = 1.1 * bound * tokens.query[t].norm(dim=-1)[:, None] + 2 * unit * outs[1][0].double().abs() + 1e-7
            self.assertTrue(bool((error <= limit).all()), (dtype, t))
            if requests[0].ring == 0:  # written: the slots hold the states after the same tokens
                rows = (engines[0].state[2].double() - engines[1].state[2].double()).norm(dim=-1)
                self.assertTrue(bool((rows <= 1.1 * bound).all()), (dtype, t))
                differs |= bool((rows > 0).any())
        self.assertTrue(differs)

    def test_bound(self) -> None:
        for name, rule in RULES.items():
            for dtype in ("bf16", "f16"):
                for backend in BACKENDS:
                    with self.subTest(f"{name}, {dtype}, {backend}"):
                        self.hold(rule, dtype, backend)
