# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers against code that is not ours: Transformers' layers with random weights, whose rule libattn computes between
their own projections and norms, and fla-core's naive recurrences over random inputs and states. States of 16 bits are attn-check's, held
to the recurrence by tests/cpu_ref/checked/delta.c."""
from __future__ import annotations

import importlib.machinery
import itertools
import runpy
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional

import libattn
from common import BACKENDS, one_layer, planned, worst
from libattn import extensions

HIDDEN = 64
#: Tokens of each step of two requests: prompts, single tokens, a longer piece over earlier context.
STEPS = ([70, 9], [1, 1], [1, 1], [5, 67])


@dataclass
class Subject:
    """A layer of Transformers and how libattn describes it."""

    module: torch.nn.Module
    #: of hidden [T, HIDDEN]: mixed_qkv or (q, k, v), a, b
    inputs: Callable[[torch.Tensor], tuple[Any, Any, Any]]
    #: of the rule's output [T, Hv, Dv] and hidden: the layer's output
    finish: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    gdn: libattn.GdnDesc
    rule: libattn.RecurrentRule | None
    weights: list[Any]
    scale: float = 0.0
    #: what libattn does of `finish`: the norm, its weight, the gate of hidden and what follows
    norm: tuple[libattn.RecurrentNorm, torch.Tensor, Callable[[torch.Tensor], torch.Tensor], torch.nn.Module] | None = None


def layer_of(family: str, name: str, config: str, index: int = 0, **settings: Any) -> torch.nn.Module:
    """A layer with random weights, parameters that are not matrices included."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config)(
        hidden_size=HIDDEN, **settings)
    torch.manual_seed(5)
    module = getattr(modeling, name)(made, index).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.7)
    return module


def kda(family: str, name: str, config: str, rule: libattn.RecurrentRule, **settings: Any) -> Subject:
    heads, size = 3, 32
    m = layer_of(family, name, config, linear_num_heads=heads, linear_head_dim=size, linear_conv_kernel_dim=4, **settings)
    gate = m.forget_gate

    def inputs(x: torch.Tensor) -> tuple[Any, Any, Any]:
        a = gate.f_b_proj(gate.f_a_proj(x)) if hasattr(gate, "f_b_proj") else gate.f_proj(x)
        return torch.cat([m.q_proj(x), m.k_proj(x), m.v_proj(x)], dim=-1), a, m.b_proj(x)

    def output_gate(x: torch.Tensor) -> torch.Tensor:
        return m.g_b_proj(m.g_a_proj(x)) if hasattr(m, "g_b_proj") else m.g_proj(x)

    def finish(o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return m.o_proj(m.o_norm(o, output_gate(x).view(-1, heads, size)).reshape(len(x), -1))

    return Subject(m, inputs, finish, libattn.GdnDesc(heads, heads, size, size, 4, True, True), rule,
                   [extensions.gdn_weights(gate.A_log.reshape(-1), gate.dt_bias, m.conv1d.weight.squeeze(1))],
                   norm=(libattn.RecurrentNorm(m.o_norm.variance_epsilon, "sigmoid"), m.o_norm.weight, output_gate, m.o_proj))


def kimi_linear() -> Subject:
    return kda("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig", libattn.RecurrentRule(gate_per_channel=True))


def ring() -> Subject:
    """Ring's KDA, whose gate has a lower bound."""
    return kda("bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig",
               libattn.RecurrentRule(gate="bounded", gate_per_channel=True, gate_bound=-5.0),
               kda_safe_gate=True, kda_lower_bound=-5.0)


def qwen3_5() -> Subject:
    m = layer_of("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", linear_num_key_heads=2, linear_num_value_heads=4,
                 linear_key_head_dim=16, linear_value_head_dim=24)
    return Subject(m, lambda x: (m.in_proj_qkv(x), m.in_proj_a(x), m.in_proj_b(x)),
                   lambda o, x: m.out_proj(m.norm(o.reshape(-1, 24), m.in_proj_z(x).view(-1, 24)).view(len(x), -1)),
                   libattn.GdnDesc(2, 4, 16, 24, 4, True, True), None,
                   [extensions.gdn_weights(m.A_log, m.dt_bias, m.conv1d.weight.squeeze(1))],
                   norm=(libattn.RecurrentNorm(m.norm.variance_epsilon), m.norm.weight, m.in_proj_z, m.out_proj))


def mamba2(family: str, name: str, config: str, dt_min: float = 0.0, dt_max: float = 0.0, **settings: Any) -> Subject:
    heads, size, state, groups = 8, 16, 32, 2
    m = layer_of(family, name, config, **settings)
    width = m.conv1d.in_channels
    if not hasattr(m, "mup_vector"):
        m.mup_vector = torch.ones(m.in_proj.out_features)

    def split(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return m.in_proj(x).split([heads * size, width, heads], dim=-1)

    def inputs(x: torch.Tensor) -> tuple[Any, Any, Any]:
        _, mixed, dt = split(x)
        return mixed, dt, None

    def finish(o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        z, o = split(x)[0], o.reshape(len(x), -1)
        return m.out_proj(o * functional.silu(z) if isinstance(m.norm, torch.nn.Identity) else m.norm(o, z))

    return Subject(m, inputs, finish, libattn.GdnDesc(groups, heads, state, size, 4, True),
                   libattn.RecurrentRule("additive", write_gate="step", values_first=True, has_skip=True, dt_min=dt_min,
                                         dt_max=dt_max),
                   [extensions.gdn_weights(m.A_log, m.dt_bias, m.conv1d.weight.squeeze(1), m.conv1d.bias),
                    extensions.recurrent_skip(m.D)], 1.0,
                   None if isinstance(m.norm, torch.nn.Identity) else
                   (libattn.RecurrentNorm(m.norm.variance_epsilon, gate_first=True, num_groups=heads * size // m.norm.group_size), m.norm.weight,
                    lambda x: split(x)[0], m.out_proj))


def mamba2_mixer() -> Subject:
    return mamba2("mamba2", "Mamba2Mixer", "Mamba2Config", 0.25, 1.5, num_heads=8, head_dim=16, state_size=32, n_groups=2,
                  expand=2, time_step_limit=(0.25, 1.5), chunk_size=32)


def nemotron_h() -> Subject:
    return mamba2("nemotron_h", "NemotronHMamba2Mixer", "NemotronHConfig", 0.001, mamba_num_heads=8, mamba_head_dim=16,
                  ssm_state_size=32, n_groups=2, chunk_size=32)


def falcon_h1() -> Subject:
    return mamba2("falcon_h1", "FalconH1Mixer", "FalconH1Config", mamba_n_heads=8, mamba_d_head=16, mamba_d_state=32,
                  mamba_n_groups=2, mamba_d_ssm=128, mamba_chunk_size=32)


def minimax() -> Subject:
    """Lightning attention: a constant decay of each head, no scale."""
    heads, size = 4, 16
    m = layer_of("minimax", "MiniMaxLightningAttention", "MiniMaxConfig", 1, num_attention_heads=heads, head_dim=size,
                 num_hidden_layers=4, block_size=32)

    def inputs(x: torch.Tensor) -> tuple[Any, Any, Any]:
        return m.act_fn(m.qkv_proj(x)).view(len(x), heads, 3 * size).split(size, dim=-1), None, None

    def finish(o: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return m.out_proj(torch.sigmoid(m.output_gate(x)) * m.norm(o.reshape(len(x), -1)))

    return Subject(m, inputs, finish, libattn.GdnDesc(heads, heads, size, size),
                   libattn.RecurrentRule("additive", gate="constant", write_gate="none"),
                   [extensions.gdn_weights(m.slope_rate.flatten().log(), None)], 1.0,
                   (libattn.RecurrentNorm(m.norm.variance_epsilon, "sigmoid", num_groups=1), m.norm.weight, m.output_gate,
                    m.out_proj))


class Served:
    """A recurrent layer of libattn with two requests in slots 3 and 1."""

    def __init__(self, gdn: libattn.GdnDesc, rule: libattn.RecurrentRule | None, weights: list[Any], scale: float,
                 state: torch.Tensor, backend: str = "cpu_ref", norm: libattn.RecurrentNorm | None = None) -> None:
        self.gdn = gdn
        desc = libattn.LayerDesc("layer", gdn.num_k_heads, gdn.num_k_heads, gdn.head_size_k, kind="recurrent",
                                 head_size_v=gdn.head_size_v, gdn=gdn, rule=rule, norm=norm, scale=scale)
        self.model, self.layer = one_layer(desc, backend)
        self.state = state
        channels = 2 * gdn.num_k_heads * gdn.head_size_k + gdn.num_v_heads * gdn.head_size_v
        self.layer.bind_state(state, torch.zeros(5, channels, gdn.conv_width - 1) if gdn.conv_width else None)
        self.layer.bind_params(extensions=weights)
        self.lengths = [0, 0]

    def step(self, queries: list[int], rows: Any, a: torch.Tensor | None, b: torch.Tensor | None,
             gate: torch.Tensor | None = None) -> torch.Tensor:
        self.lengths = [n + m for n, m in zip(self.lengths, queries)]
        slots = torch.tensor([3, 1], dtype=torch.int32)
        batch = libattn.Batch([0, queries[0], sum(queries)], self.lengths, extensions=[extensions.gdn_batch(slots)])
        out = torch.empty(sum(queries), self.gdn.num_v_heads, self.gdn.head_size_v)
        q, k, v = (None, None, None) if self.gdn.conv_width else (x.contiguous() for x in rows)
        planned(self.model, batch).run(self.layer, q, k, v, out, extensions=[
            extensions.gdn_io(a, b, rows if self.gdn.conv_width else None),
            *([] if gate is None else [extensions.recurrent_gate(gate.reshape(out.shape))])])
        return out


def worst_of_steps(subject: Subject, step: Callable[[list[int], list[int], torch.Tensor], torch.Tensor]) -> float:
    """The largest error of two requests that come in `STEPS`: `step` takes each one's tokens and length, with them, and the hidden rows,
    and gives the layer's output. The layer itself has a request in one piece."""
    generator = torch.Generator().manual_seed(3)
    hidden = [torch.randn(sum(step[r] for step in STEPS), HIDDEN, generator=generator) for r in range(2)]
    found: list[list[torch.Tensor]] = [[], []]
    lengths = [0, 0]
    for queries in STEPS:
        x = torch.cat([hidden[r][lengths[r]:][:queries[r]] for r in range(2)])
        lengths = [n + c for n, c in zip(lengths, queries)]
        for r, rows in enumerate(step(queries, lengths, x).split(queries)):
            found[r].append(rows)
    more = (None, None) if "Lightning" in type(subject.module).__name__ else ()
    expected = [subject.module(x[None], *more) for x in hidden]
    return max(worst(torch.cat(rows), (out[0] if isinstance(out, tuple) else out)[0]) for rows, out in zip(found, expected))


class Layers(unittest.TestCase):
    """A layer's output over a request in one piece, and libattn's in steps."""

    def hold(self, subject: Subject) -> None:
        for backend in BACKENDS:
            for normed in (False, True)[:1 + (subject.norm is not None)]:
                with self.subTest(backend, normed=normed):
                    self.hold_backend(subject, backend, normed)

    def hold_backend(self, subject: Subject, backend: str, normed: bool) -> None:
        gdn, (norm, weight, gate, last) = subject.gdn, subject.norm if normed and subject.norm else (None,) * 4
        weights = [*subject.weights, *([extensions.recurrent_norm_weight(weight)] if normed else [])]
        served = Served(gdn, subject.rule, weights, subject.scale,
                        torch.zeros(5, gdn.num_v_heads, gdn.head_size_v, gdn.head_size_k), backend, norm)

        def step(queries: list[int], lengths: list[int], x: torch.Tensor) -> torch.Tensor:
            out = served.step(queries, *subject.inputs(x), gate(x) if gate else None)
            return last(out.reshape(len(x), -1)) if last else subject.finish(out, x)

        self.assertLess(worst_of_steps(subject, step), 1e-3)


def _add(make: Callable[[], Subject]) -> None:
    setattr(Layers, f"test_{make.__name__}", lambda self: self.hold(make()))


for _make in (qwen3_5, kimi_linear, ring, mamba2_mixer, nemotron_h, falcon_h1, minimax):
    _add(_make)


def naive(name: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """fla-core's recurrence of that name, from its file: the package needs Triton, and `common` hides it."""
    spec = importlib.machinery.PathFinder.find_spec("fla")
    assert spec and spec.submodule_search_locations, "no fla-core; tests/requirements.txt has it"
    module = runpy.run_path(f"{spec.submodule_search_locations[0]}/ops/{name}/naive.py")
    return module[f"naive_recurrent_{name}"]


@dataclass
class Gates:
    """One request of T tokens: what libattn is given, and what of it the recurrence takes."""

    a: torch.Tensor | None
    b: torch.Tensor | None
    #: g [T, Hv] or [T, Hv, Dk]; beta [T, Hv] where the rule has it
    theirs: dict[str, torch.Tensor]
    #: [T, Hv, 1], that v is times where libattn makes the write gate of a
    step: torch.Tensor | float = 1.0


class Recurrences(unittest.TestCase):
    """Outputs and the states left, of two requests in steps and of each in one piece. One starts from zeros, one from a given state."""

    HEADS = ((1, 1), (3, 3), (2, 6))  # Hk, Hv
    SIZE_K, SIZE_V = 16, 24
    STARTS = (0, 11)

    def hold(self, name: str, rule: libattn.RecurrentRule, gates: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Gates],
             scale: float = 0.0) -> None:
        """`gates` of normal x [T, Hv] or [T, Hv, Dk] and y [T, Hv], and of what the layer holds for each head [3, Hv]: logarithms of rates,
        biases of steps, skips."""
        for heads, backend in itertools.product(self.HEADS, BACKENDS):
            with self.subTest(backend, heads=heads):
                self.hold_heads(naive(name), rule, gates, scale, backend, *heads)

    def hold_heads(self, run: Callable[..., tuple[torch.Tensor, torch.Tensor]], rule: libattn.RecurrentRule,
                   gates: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Gates], scale: float, backend: str, hk: int,
                   hv: int) -> None:
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        steps = ([150, 9], *STEPS[1:])  # over several chunks of 64
        held, state = normal(3, hv), normal(5, hv, self.SIZE_V, self.SIZE_K)
        given, expected = [], []
        for request, (slot, start) in enumerate(zip((3, 1), self.STARTS)):
            count = sum(step[request] for step in steps)
            q, k = (functional.normalize(normal(count, hk, self.SIZE_K), dim=-1) for _ in "qk")
            v = normal(count, hv, self.SIZE_V)
            made = gates(normal(count, hv, *[self.SIZE_K] * rule.gate_per_channel), normal(count, hv), held)
            given.append((q, k, v, made.a, made.b))
            inputs = {name: x.repeat_interleave(hv // hk, 1) for name, x in (("q", q), ("k", k))} | {"v": v * made.step} | made.theirs
            first = state[slot].transpose(1, 2)[None] if start else None
            out, left = run(**{name: x[None] for name, x in inputs.items()}, scale=scale or None, initial_state=first,
                            output_final_state=True)
            expected.append((out[0] + held[2][:, None] * v if rule.has_skip else out[0], left[0].transpose(1, 2)))
        rates, biases = (held[0] if rule.gate != "given" else None), (held[1] if rule.gate == "softplus" else None)
        weights = [extensions.gdn_weights(rates, biases), *([extensions.recurrent_skip(held[2])] if rule.has_skip else [])]
        served = Served(libattn.GdnDesc(hk, hv, self.SIZE_K, self.SIZE_V), rule, weights, scale, state, backend)
        served.lengths = list(self.STARTS)
        found: list[list[torch.Tensor]] = [[], []]
        for queries in steps:
            taken = [n - start for n, start in zip(served.lengths, self.STARTS)]
            q, k, v, a, b = (None if rows[0] is None else torch.cat([x[at:at + n] for x, at, n in zip(rows, taken, queries)])
                             for rows in zip(*given))
            out = served.step(queries, (q, k, v), None if a is None else a.flatten(1), b)
            for r, rows in enumerate(out.split(queries)):
                found[r].append(rows)
        for slot, rows, (outs, left) in zip((3, 1), found, expected):
            self.assertLess(worst(torch.cat(rows), outs), 3e-4)
            self.assertLess(worst(state[slot], left), 3e-4)

    def test_gated_delta(self) -> None:
        self.hold("gated_delta_rule", libattn.RecurrentRule(gate="given"), lambda x, y, held: Gates(
            g := -functional.softplus(x), y, {"g": g, "beta": y.sigmoid()}))

    def test_kda(self) -> None:
        self.hold("kda", libattn.RecurrentRule(gate="given", gate_per_channel=True), lambda x, y, held: Gates(
            g := -functional.softplus(x), y, {"g": g, "beta": y.sigmoid()}))

    def test_simple_gla(self) -> None:
        self.hold("simple_gla", libattn.RecurrentRule("additive", gate="given", write_gate="none"), lambda x, y, held: Gates(
            g := -functional.softplus(x), None, {"g": g}))

    def test_lightning(self) -> None:
        """A constant decay of each head."""
        self.hold("simple_gla", libattn.RecurrentRule("additive", gate="constant", write_gate="none"), lambda x, y, held: Gates(
            None, None, {"g": (-held[0].exp()).expand_as(y)}))

    def test_mamba2(self) -> None:
        """SSD: q = C, k = B, v = x, and the step is the write gate."""
        self.hold("simple_gla", libattn.RecurrentRule("additive", write_gate="step", has_skip=True), lambda x, y, held: Gates(
            x, None, {"g": -held[0].exp() * (dt := functional.softplus(x + held[1]))}, dt[..., None]), 1.0)


class Norm(unittest.TestCase):
    """What a norm of the output needs, refused by name."""

    def test_needs(self) -> None:
        gdn, norm = libattn.GdnDesc(2, 2, 16, 16), libattn.RecurrentNorm(1e-6, num_groups=1)
        weights, weight = extensions.gdn_weights(torch.zeros(2), torch.zeros(2)), torch.ones(32)
        for given in ([weights], [weights, extensions.recurrent_norm_weight(weight[:16])]):
            with self.assertRaisesRegex(libattn.AttnError, "attn_recurrent_norm_weight is .*; .32. f16, bf16 or f32"):
                Served(gdn, None, given, 1.0, torch.zeros(5, 2, 16, 16), norm=norm)
        served = Served(gdn, None, [weights, extensions.recurrent_norm_weight(weight)], 1.0, torch.zeros(5, 2, 16, 16), norm=norm)
        rows, gates = [torch.zeros(2, 2, 16)] * 3, torch.zeros(2, 2)
        with self.assertRaisesRegex(libattn.AttnError, "attn_io_recurrent_gate.*is NULL; .*f16, bf16 or f32"):
            served.step([1, 1], rows, gates, gates)
