# SPDX-License-Identifier: Apache-2.0
"""Indexers against code that is not ours: those of Transformers with random weights. What they project, norm, rotate and pool
before the scores is taken from their own modules; the lists are libattn's, in steps over a paged cache."""
from __future__ import annotations

import importlib
import unittest
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import libattn
from common import bound_layer, one_layer, planned
from libattn import abi, extensions

HIDDEN, LATENT, ROPE, BLOCK = 64, 32, 16, 32
#: Tokens of each step of two requests: prompts, single tokens, a longer piece over earlier context.
STEPS = ([70, 9], [1, 1], [1, 1], [5, 67], [1, 2])
LENGTHS = [sum(step[r] for step in STEPS) for r in range(2)]


@dataclass
class Written:
    """What the write of keys is to do, in place of the model's own code."""

    desc: Any
    norm: torch.nn.Module | None
    #: a token's key before norm and rotation [S, D]
    keys: Callable[[torch.Tensor], torch.Tensor]
    #: what it adds to the norm's weight
    one: float = 0.0
    #: dims of the cosines and sines
    rotary: int = ROPE
    #: queries in the order of dims that the write leaves
    queries: Callable[[torch.Tensor], torch.Tensor] = lambda q: q

    def io(self, positions: torch.Tensor) -> Any:
        norm = {"norm_weight": self.norm.weight.detach() + self.one, "norm_eps": self.norm.eps} if self.norm is not None else {}
        if getattr(self.norm, "bias", None) is not None:
            norm["norm_bias"] = self.norm.bias.detach()
        cos, sin = (t[0, :, :self.rotary // 2] for t in angles(max(LENGTHS), self.rotary))
        return abi.attn_io_index_write(positions=positions, cos_sin=torch.cat([cos, sin], dim=-1).contiguous(), **norm)


@dataclass
class Subject:
    """An indexer of Transformers: what of a request's hidden states [S, HIDDEN] it scores, and the tokens that it chooses."""

    desc: libattn.IndexerDesc
    heads: int
    size: int
    #: q [S, H, D], a row of index keys for each token [S, D], weights [S, H] or None
    inputs: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    #: for each token and list the set of tokens that it chooses
    chosen: Callable[[torch.Tensor], list[list[set[int]]]]
    kv_dtype: str = "auto"
    written: Written | None = None


def make(family: str, name: str, config: str, **settings: Any) -> tuple[Any, torch.nn.Module]:
    """The model's code, and a module with random weights, parameters that are not matrices included."""
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    made = getattr(importlib.import_module(f"transformers.models.{family}.configuration_{family}"), config)(
        hidden_size=HIDDEN, **settings)
    torch.manual_seed(6)
    module = getattr(modeling, name)(*((made,) if family == "deepseek_v4" else (made, 0))).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.7)
    return modeling, module


def angles(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [1, S, size], halves alike."""
    theta = torch.arange(length)[:, None] * 100.0**(-torch.arange(size // 2) / (size // 2))
    theta = torch.cat([theta, theta], dim=-1)[None]
    return theta.cos(), theta.sin()


def seen(rows: torch.Tensor) -> list[list[set[int]]]:
    """The indices of [S, k] or [S, G, k] that are neither padding nor a later token."""
    rows = rows[:, None] if rows.dim() == 2 else rows
    return [[{j for j in one.tolist() if 0 <= j <= t} for one in lists] for t, lists in enumerate(rows)]


def below(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()[None]


def dsa(family: str, name: str, config: str, rotate: str) -> Subject:
    """DeepSeek-V3.2's and GLM-5's, which differ in how a head is rotated."""
    heads, size, topk = 8, 32, 12
    modeling, m = make(family, name, config, q_lora_rank=LATENT, qk_rope_head_dim=ROPE, index_topk=topk, index_head_dim=size,
                       index_n_heads=heads)
    down = torch.randn(HIDDEN, LATENT, generator=torch.Generator().manual_seed(1)) * 0.3

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, k = m.wq_b(x @ down).view(1, -1, heads, size), m.k_norm(m.wk(x))[None, :, None]
        turned = getattr(modeling, rotate)(q[..., :ROPE], k[..., :ROPE], *angles(len(x), ROPE), unsqueeze_dim=2)
        q, k = (torch.cat([a, b[..., ROPE:]], dim=-1) for a, b in zip(turned, (q, k)))
        return q[0], k[0, :, 0], m.weights_proj(x) * heads**-0.5

    pairs = rotate.endswith("interleave")  # which Transformers' code takes apart, and the write leaves where they are

    def queries(q: torch.Tensor) -> torch.Tensor:
        return torch.cat([q[..., :ROPE].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2), q[..., ROPE:]], dim=-1) if pairs else q

    written = Written(abi.attn_index_write(norm=abi.KeyNorm.LAYER, rope=abi.Rope.GPTJ if pairs else abi.Rope.NEOX, rotary_dim=ROPE),
                      m.k_norm, m.wk, queries=queries)
    return Subject(libattn.IndexerDesc(topk, activation="relu", has_weights=True), heads, size, inputs,
                   lambda x: seen(m(x[None], (x @ down)[None], angles(len(x), ROPE), below(len(x)),
                                    torch.arange(len(x))[None])[0]), written=written)


def msa() -> Subject:
    """MiniMax-M3's: a list of blocks for each KV head."""
    heads, size, block, topk = 4, 32, 8, 5
    modeling, m = make("minimax_m3_vl", "MiniMaxM3VLIndexer", "MiniMaxM3VLTextConfig", index_n_heads=heads,
                       index_head_dim=size, index_block_size=block, index_topk_blocks=topk, index_local_blocks=2)

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q = m.q_norm(m.q_proj(x).view(1, -1, heads, size)).transpose(1, 2)
        k = m.k_norm(m.k_proj(x).view(1, -1, 1, size)).transpose(1, 2)
        q, k = modeling.apply_rotary_pos_emb(q, k, *angles(len(x), size))
        return q[0].transpose(0, 1), k[0, 0], None

    def chosen(x: torch.Tensor) -> list[list[set[int]]]:
        lists = m(x[None], angles(len(x), size), None, torch.arange(len(x))[None])[0].transpose(0, 1)
        return [[{b * block + i for b in one.tolist() if b >= 0 for i in range(block) if b * block + i <= t}
                 for one in token] for t, token in enumerate(lists)]

    written = Written(abi.attn_index_write(norm=abi.KeyNorm.RMS, rope=abi.Rope.NEOX, rotary_dim=size), m.k_norm, m.k_proj, one=1.0,
                      rotary=size)
    return Subject(libattn.IndexerDesc(topk, heads, rows_per_entry=block, last_entries=2), heads, size, inputs, chosen,
                   written=written)


def spread(rows: torch.Tensor, tokens: int, length: int) -> torch.Tensor:
    """Rows of several tokens, each at the last of them; what no row is made of is NaN."""
    keys = torch.full((length, rows.shape[-1]), float("nan"))
    keys[tokens - 1:len(rows) * tokens:tokens] = rows
    return keys


def qsa() -> Subject:
    """Qwen4-Exp's: means of 4 keys, and the tokens after the last of them."""
    heads, size, tokens, budget = 8, 32, 4, 24
    modeling, m = make("qwen4_exp", "Qwen4ExpTextQSAIndexer", "Qwen4ExpTextConfig", indexer_n_heads=heads, indexer_kv_heads=1,
                       indexer_head_dim=size, indexer_budget=budget, indexer_compress_ratio=tokens, head_dim=size)

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        q, k = m.index_qk_proj(x).split([heads * size, size], dim=-1)
        cos, sin = angles(len(x), ROPE)
        rows = m.k_layernorm(k[:len(x) // tokens * tokens].view(-1, tokens, size).mean(dim=1))[None, :, None]
        starts = slice(0, len(x) // tokens * tokens, tokens)
        rows = modeling.apply_rotary_pos_emb(rows, cos=cos[:, starts], sin=sin[:, starts], unsqueeze_dim=2)
        q = modeling.apply_rotary_pos_emb(m.q_layernorm(q.view(1, -1, heads, size)), cos=cos, sin=sin, unsqueeze_dim=2)
        return q[0], spread(rows[0, :, 0], tokens, len(x)), None

    def means(x: torch.Tensor) -> torch.Tensor:
        k = m.index_qk_proj(x)[:len(x) // tokens * tokens, heads * size:]
        return spread(k.view(-1, tokens, size).mean(dim=1), tokens, len(x))

    def chosen(x: torch.Tensor) -> list[list[set[int]]]:
        mask = m(x[None], angles(len(x), ROPE), below(len(x))[None], None)[0, 0]
        return [[set(row.nonzero().flatten().tolist())] for row in mask]

    written = Written(abi.attn_index_write(norm=abi.KeyNorm.RMS, rope=abi.Rope.NEOX, rotary_dim=ROPE), m.k_layernorm, means, one=1.0)
    return Subject(libattn.IndexerDesc(budget // tokens, activation="relu", tokens_per_row=tokens, tail=True,
                                       forced_on_top=True), heads, size, inputs, chosen, written=written)


def glm5_next() -> Subject:
    """GLM-5.3-Flash's: keys pooled with learned weights."""
    heads, size, tokens, topk = 8, 32, 8, 32
    _, m = make("glm5_next", "Glm5NextTextIndexer", "Glm5NextTextConfig", q_lora_rank=LATENT, index_topk=topk,
                index_head_dim=size, index_n_heads=heads, index_kpool=tokens)
    down = torch.randn(HIDDEN, LATENT, generator=torch.Generator().manual_seed(1)) * 0.3

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        gates = torch.nn.functional.linear(x, m.index_kpool_compress_gate)
        packed = torch.cat([m.k_norm(m.wk(x)), gates, torch.ones(len(x), 1)], dim=-1)
        rows = m.get_pooled_states(packed[None])[0][0]
        return (m.wq_b(x @ down).view(-1, heads, size), spread(rows, tokens, len(x)), m.weights_proj(x) * heads**-0.5)

    return Subject(libattn.IndexerDesc(topk // tokens, activation="relu", has_weights=True, tokens_per_row=tokens, tail=True,
                                       forced_on_top=True), heads, size, inputs,
                   lambda x: seen(m(x[None], (x @ down)[None], torch.ones(1, len(x), dtype=torch.bool), None)[0]))


def deepseek_v4() -> Subject:
    """DeepSeek-V4's: overlapping compressed rows, and no tail, which its window has."""
    heads, size, tokens, topk = 8, 32, 4, 7
    _, m = make("deepseek_v4", "DeepseekV4Indexer", "DeepseekV4Config", q_lora_rank=LATENT, index_topk=topk, index_head_dim=size,
                index_n_heads=heads, head_dim=size, num_hidden_layers=4)
    down = torch.randn(HIDDEN, LATENT, generator=torch.Generator().manual_seed(1)) * 0.3
    scored: list[Any] = []
    m.scorer.register_forward_pre_hook(lambda _, given: scored.append(given))

    def lists(x: torch.Tensor) -> torch.Tensor:
        return m(x[None], (x @ down)[None], torch.arange(len(x))[None], None, 0)[0]

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        lists(x)
        q, rows, _ = scored[-1]
        return q[0], spread(rows[0], tokens, len(x)), m.scorer.weights_proj(x) * m.scorer.weights_scaling

    def chosen(x: torch.Tensor) -> list[list[set[int]]]:
        return [[{row * tokens + i for row in one.tolist() if row >= 0 for i in range(tokens)}] for one in lists(x)]

    return Subject(libattn.IndexerDesc(topk, activation="relu", has_weights=True, tokens_per_row=tokens), heads, size, inputs,
                   chosen)


def in_mxfp4(rows: torch.Tensor) -> torch.Tensor:
    """As a cache of mxfp4 holds them: 32 elements share the least power of two that brings them to 6 at most."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    blocks = rows.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)))
    nearest = grid[((blocks / scale).abs()[..., None] - grid).abs().argmin(-1)]  # no number lies between two
    return (nearest * blocks.sign() * scale).flatten(-2)


def mxfp4() -> Subject:
    """DeepSeek-V4's scores over keys in mxfp4; no code of Transformers has these."""
    heads, size, topk = 8, 64, 12
    generator = torch.Generator().manual_seed(6)
    to_q, to_k, to_w = (0.3 * torch.randn(HIDDEN, n, generator=generator) for n in (heads * size, size, heads))

    def inputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return (x @ to_q).view(-1, heads, size), x @ to_k, x @ to_w

    def chosen(x: torch.Tensor) -> list[list[set[int]]]:
        q, k, w = inputs(x)
        scores = torch.einsum("th,ths->ts", w.double(), (q.double() @ in_mxfp4(k).T).relu())
        best = [scores[t, :t + 1].sort(descending=True, stable=True).indices for t in range(len(x))]
        return [[set(indices[:topk].tolist())] for indices in best]

    return Subject(libattn.IndexerDesc(topk, activation="relu", has_weights=True), heads, size, inputs, chosen, "mxfp4")


def hadamard(rows: torch.Tensor) -> torch.Tensor:
    """Sylvester's matrix times 1 / sqrt(D), as Kronecker's powers of 2 x 2."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < rows.shape[-1]:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return (rows.double() @ matrix * len(matrix)**-0.5).to(rows.dtype)


class Indexers(unittest.TestCase):
    def hold(self, subject: Subject, backends: tuple[str, ...] = ("cpu_ref", "cpu_simd")) -> None:
        for backend in backends:
            for written in (None, subject.written)[:1 + (subject.written is not None)]:
                with self.subTest(backend, written=written is not None):
                    self.hold_backend(subject, backend, written)

    def hold_backend(self, subject: Subject, backend: str, written: Written | None = None) -> None:
        x = subject.desc
        desc = libattn.LayerDesc("indexer", subject.heads, 1, subject.size, kind="indexer", block_size=BLOCK, indexer=x,
                                 kv_dtype=subject.kv_dtype, extensions=(written.desc,) if written is not None else ())
        per = max(LENGTHS) // BLOCK + 1
        model, layer = bound_layer(desc, backend, 2 * per)
        table = torch.tensor([[2 * i + 1 for i in range(per)], [2 * i for i in range(per)]], dtype=torch.int32)
        generator = torch.Generator().manual_seed(3)
        hidden = [torch.randn(n, HIDDEN, generator=generator) for n in LENGTHS]
        given, expected = [subject.inputs(h) for h in hidden], [subject.chosen(h) for h in hidden]
        if written is not None:
            given = [(written.queries(q), written.keys(h), w) for h, (q, _, w) in zip(hidden, given)]
        lengths = [0, 0]
        for queries in STEPS:
            places = [range(n, n + m) for n, m in zip(lengths, queries)]
            lengths = [n + m for n, m in zip(lengths, queries)]
            slots = torch.tensor([int(table[r, p // BLOCK]) * BLOCK + p % BLOCK for r in range(2) for p in places[r]])
            q, k, w = (None if given[0][i] is None else torch.cat([given[r][i][list(places[r])] for r in range(2)]).contiguous()
                       for i in range(3))
            out = torch.zeros(sum(queries), x.num_groups, x.room, dtype=torch.int32)
            counts = torch.zeros(sum(queries), x.num_groups, dtype=torch.int32)
            plan = planned(model, libattn.Batch([0, queries[0], sum(queries)], lengths, table, slots))
            positions = torch.tensor([p - p % x.tokens_per_row for at in places for p in at])
            more = [written.io(positions)] if written is not None else []
            with self.assertRaisesRegex(libattn.AttnError, "lengths"):
                plan.run(layer, q, k[:, None], None, out, extensions=[extensions.indexer_io(w, counts[1:]), *more])
            plan.run(layer, q, k[:, None], None, out, extensions=[extensions.indexer_io(w, counts), *more])
            for row, (r, t) in enumerate((r, t) for r in range(2) for t in places[r]):
                for g in range(x.num_groups):
                    entries = out[row, g, :int(counts[row, g])].tolist()
                    self.assertEqual(entries, sorted(set(entries)))
                    span = x.tokens_per_row * x.rows_per_entry
                    tokens = {e * span + i for e in entries for i in range(span) if e * span + i <= t}
                    self.assertEqual(tokens, expected[r][t][g], f"request {r}, token {t}, list {g}")

    def test_mxfp4(self) -> None:
        self.hold(mxfp4())
        with self.assertRaisesRegex(libattn.UnsupportedError, "multiples of 32"):
            bound_layer(libattn.LayerDesc("indexer", 8, 1, 48, kind="indexer", block_size=BLOCK, kv_dtype="mxfp4",
                                          indexer=libattn.IndexerDesc(12)), "cpu_ref", 2)
        with self.assertRaisesRegex(libattn.UnsupportedError, "in indexers only"):
            bound_layer(libattn.LayerDesc("decoder", 8, 1, 64, block_size=BLOCK, kv_dtype="mxfp4"), "cpu_ref", 2)

    def test_written_rows(self) -> None:
        """Keys of DeepSeek-V3.2 as inference/model.py writes them: layer norm, halves rotated, Hadamard transform, 8 or 4 bits."""
        for backend in ("cpu_ref", "cpu_simd"):
            for kv_dtype in ("f32", "fp8_per_token_head", "mxfp4"):
                with self.subTest(backend, kv_dtype=kv_dtype):
                    self.hold_rows(backend, kv_dtype)

    def hold_rows(self, backend: str, kv_dtype: str) -> None:
        size, rotary, tokens = 128, 64, 50
        generator = torch.Generator().manual_seed(8)
        k, weight, bias = (1 + torch.randn(n, size, generator=generator) for n in (tokens, 1, 1))
        positions = torch.randint(0, 1000, (tokens,), generator=generator)
        theta = positions[:, None] * 10000.0**(-torch.arange(rotary // 2, dtype=torch.float64) / (rotary // 2))
        x = torch.nn.functional.layer_norm(k.double(), (size,), weight[0].double(), bias[0].double(), 1e-6)
        turned = torch.view_as_complex(torch.stack(x[:, :rotary].chunk(2, dim=-1), dim=-1)) * torch.polar(torch.ones_like(theta), theta)
        expected = hadamard(torch.cat([turned.real, turned.imag, x[:, rotary:]], dim=-1))
        model, layer = one_layer(libattn.LayerDesc(
            "indexer", 4, 1, size, kind="indexer", block_size=BLOCK, indexer=libattn.IndexerDesc(8), kv_dtype=kv_dtype,
            extensions=(abi.attn_index_write(norm=abi.KeyNorm.LAYER, rope=abi.Rope.NEOX, rotary_dim=rotary, hadamard=1),)), backend)
        memory = libattn.allocate(2 * layer.kv_spec.padded_page_bytes)
        layer.bind_kv(memory, 2)
        angles = torch.arange(1000)[:, None] * 10000.0**(-torch.arange(rotary // 2, dtype=torch.float64) / (rotary // 2))
        io = abi.attn_io_index_write(positions=positions, cos_sin=torch.cat([angles.cos(), angles.sin()], dim=-1).float(),
                                     norm_weight=weight[0], norm_bias=bias[0], norm_eps=1e-6)
        plan = planned(model, libattn.Batch([0, tokens], [tokens], torch.tensor([[0, 1]], dtype=torch.int32), torch.arange(tokens)))
        before = k.clone()
        plan.run(layer, None, k[:, None], None, None, flags=abi.ATTN_RUN_NO_ATTEND, extensions=[io])
        self.assertTrue(torch.equal(k, before))
        bytes_of_row = {"f32": 4 * size, "fp8_per_token_head": size, "mxfp4": size // 2}[kv_dtype]
        memory = memory.view(2, -1)
        rows = memory[:, :BLOCK * bytes_of_row].reshape(2 * BLOCK, -1)[:tokens]
        apart = memory[:, BLOCK * bytes_of_row:].reshape(2 * BLOCK, -1)[:tokens].contiguous()
        if kv_dtype == "f32":
            self.assertLess(float((rows.view(torch.float32) - expected).abs().max()), 1e-5)
        elif kv_dtype == "mxfp4":
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
            codes = torch.stack([rows & 15, rows >> 4], dim=-1).flatten(-2).long()
            found = grid[codes] * torch.exp2(apart.double() - 127).repeat_interleave(32, dim=-1)
            self.assertLess(float((found != in_mxfp4(expected)).double().mean()), 1e-3)
        else:
            scale = expected.abs().amax(-1, keepdim=True) / 448
            self.assertLess(float((apart.view(torch.float32) / scale - 1).abs().max()), 1e-5)
            codes = (expected / scale).float().to(torch.float8_e4m3fn).view(torch.uint8)
            self.assertLess(float((rows != codes).double().mean()), 1e-3)

    def test_writes_refused(self) -> None:
        def desc(size: int = 32, **write: int) -> libattn.LayerDesc:
            return libattn.LayerDesc("indexer", 4, 1, size, kind="indexer", block_size=BLOCK, indexer=libattn.IndexerDesc(8),
                                     extensions=(abi.attn_index_write(**write),))
        for field, layer in (("hadamard", desc(40, hadamard=1)), ("rotary_dim", desc(rope=1)), ("rotary_dim", desc(rotary_dim=8)),
                             ("rotary_dim", desc(rope=1, rotary_dim=7)), ("rotary_first", desc(rope=1, rotary_dim=8, rotary_first=25)),
                             ("rotary_first is 1", desc(rotary_first=1)), ("norm", desc(norm=3)), ("has neither", desc())):
            with self.assertRaisesRegex(libattn.AttnError, field):
                bound_layer(layer, "cpu_ref", 2)


def _add(name: str, make: Callable[..., Subject], *given: str) -> None:
    setattr(Indexers, f"test_{name}", lambda self: self.hold(make(*given)))


_add("deepseek_v32", dsa, "deepseek_v32", "DeepseekV32Indexer", "DeepseekV32Config", "apply_rotary_pos_emb")
_add("glm_moe_dsa", dsa, "glm_moe_dsa", "GlmMoeDsaIndexer", "GlmMoeDsaConfig", "apply_rotary_pos_emb_interleave")
for _name, _make in (("minimax_m3", msa), ("qwen4_exp", qsa), ("glm5_next", glm5_next), ("deepseek_v4", deepseek_v4)):
    _add(_name, _make)
