# SPDX-License-Identifier: Apache-2.0
"""Two caches under one softmax against code that is not ours, DeepSeek-V4's attention of Transformers with random weights, and
against the formula in float64. Projections, norms and rotations of queries and own keys, and the lists are its own modules'; the
pooled rows, the attention and the rotation of its output are libattn's, in steps over paged caches."""
from __future__ import annotations

import unittest
from dataclasses import dataclass, replace

import torch
from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

import libattn
from common import attention, causal, one_layer, planned, worst
from libattn import extensions

HIDDEN, HEADS, SIZE, ROTARY, WINDOW, TOPK = 64, 4, 32, 16, 16, 5
#: Tokens in a block of the layer's own cache, rows in one of the second.
BLOCK, ROWS = 16, 8
#: Tokens of each step of two requests: prompts, single tokens, pieces over earlier context, one without queries.
STEPS = ([70, 3], [1, 1], [1, 6], [5, 67], [9, 0], [2, 1])
LENGTHS = [sum(step[r] for step in STEPS) for r in range(2)]


@dataclass
class Given:
    """What the model's code makes of one request's hidden states."""

    q: torch.Tensor  # [S, H, D]
    own: torch.Tensor  # [S, D]
    rows: torch.Tensor  # [S / ratio, D]
    lists: torch.Tensor | None  # [S, TOPK], -1 padded
    out: torch.Tensor  # [S, H, D], rotated back
    sinks: torch.Tensor
    cos_sin: torch.Tensor | None  # [S, ROTARY]: cos and sin of that; None: it is not
    states: torch.Tensor | None = None  # [S, 2 (1 + overlaps), D]: what the compressor pools
    bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None


def given(kind: str, ratio: int, hidden: torch.Tensor) -> Given:
    """`kind`: a layer type of the model."""
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8, kind: ratio}
    config = configuration_deepseek_v4.DeepseekV4Config(
        hidden_size=HIDDEN, num_attention_heads=HEADS, head_dim=SIZE, q_lora_rank=32, sliding_window=WINDOW, index_topk=TOPK,
        index_n_heads=4, index_head_dim=SIZE, o_groups=2, o_lora_rank=16, num_hidden_layers=1, layer_types=[kind],
        mlp_layer_types=["moe"], compress_rates=rates, partial_rotary_factor=0.5)
    config._attn_implementation = "eager"
    torch.manual_seed(6)
    module = modeling_deepseek_v4.DeepseekV4Attention(config, 0).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0, 0.3 if parameter.dim() > 1 else 1.5)
    eager, caught = modeling_deepseek_v4.eager_attention_forward, {}

    def catch(module, q, k, v, mask, **settings):  # type: ignore[no-untyped-def]
        caught.update(q=q, k=k)
        return eager(module, q, k, v, mask, **settings)

    length = len(hidden)
    mask = torch.zeros(length, length).masked_fill(~causal(length, length, WINDOW), float("-inf"))
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
    positions = torch.arange(length)[None]
    for name in ("kv_proj", "gate_proj"):
        getattr(module.compressor, name).register_forward_hook(lambda _, __, out, name=name: caught.update({name: out[0]}))
    if kind == "compressed_sparse_attention":
        module.compressor.indexer.register_forward_hook(lambda _, __, lists: caught.update(lists=lists[0]))
    module.o_a_proj.register_forward_pre_hook(lambda _, grouped: caught.update(out=grouped[0][0].reshape(length, HEADS, SIZE)))
    angles = rotary(hidden[None], positions, "compress")
    modeling_deepseek_v4.eager_attention_forward = catch
    try:
        module(hidden[None], {"compress": angles}, positions, mask[None, None])
    finally:
        modeling_deepseek_v4.eager_attention_forward = eager
    lists = torch.full((length, TOPK), -1)
    if "lists" in caught:
        lists[:, :caught["lists"].shape[1]] = caught["lists"]
    return Given(caught["q"][0].transpose(0, 1), caught["k"][0, 0, :length], caught["k"][0, 0, length:],
                 lists.int() if "lists" in caught else None, caught["out"], module.sinks, torch.cat(angles, dim=-1)[0],
                 torch.cat([caught["kv_proj"], caught["gate_proj"]], dim=1).view(length, -1, SIZE), module.compressor.position_bias,
                 module.compressor.kv_norm.weight)


def formula(x: Given, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64 from the definition."""
    length, count = len(x.q), len(x.rows)
    seen = torch.arange(count)[None] < ((torch.arange(length) + 1) // ratio)[:, None]
    if x.lists is not None:
        seen &= (x.lists[:, :, None] == torch.arange(count)).any(dim=1)
    keys = torch.cat([x.own, x.rows])[:, None]
    out, lse = attention(x.q, keys, keys, SIZE**-0.5, torch.cat([causal(length, length, WINDOW), seen], dim=1), sinks=x.sinks)
    if x.cos_sin is not None:
        cos, sin = (part[:, None] for part in x.cos_sin.double().chunk(2, dim=-1))
        a, b = out[..., -ROTARY::2], out[..., -ROTARY + 1::2]
        out = torch.cat([out[..., :-ROTARY], torch.stack([a * cos + b * sin, b * cos - a * sin], dim=-1).flatten(-2)], dim=-1)
    return out, lse


def pooled_rows(x: Given, ratio: int) -> torch.Tensor:
    """What the compressor makes of the states, in float64 from the definition."""
    states, parts = x.states.double(), x.states.shape[1] // 2
    bias, rows = x.bias.double().view(ratio, parts, SIZE), []
    for first in range(0, len(states) // ratio * ratio, ratio):
        tokens = [(t, 0) for t in range(max(first - ratio, 0), first) if parts == 2] + [(first + i, parts - 1) for i in range(ratio)]
        gates = torch.stack([states[t, parts + part] + bias[t % ratio, part] for t, part in tokens])
        row = (gates.softmax(dim=0) * torch.stack([states[t, part] for t, part in tokens])).sum(dim=0)
        row = row / (row.pow(2).mean() + 1e-6).sqrt() * x.norm
        cos, sin = x.cos_sin[first].double().chunk(2)
        a, b = row[-ROTARY::2].clone(), row[-ROTARY + 1::2].clone()
        row[-ROTARY::2], row[-ROTARY + 1::2] = a * cos - b * sin, b * cos + a * sin
        rows.append(row)
    return torch.stack(rows) if rows else x.rows.double()


def desc(ratio: int, topk: int, dtype: str = "f32", kv_dtype: str | None = None, size: int = SIZE,
         rotates: bool = True) -> libattn.LayerDesc:
    kv_dtype = kv_dtype or dtype
    cache = libattn.abi.attn_cache_desc(role=libattn.abi.CacheRole.COMPRESSED, table=1, num_heads=1, head_size=size,
                                        kv_dtype=libattn.KvDtype[kv_dtype.upper()], block_size=ROWS, tokens_per_row=ratio)
    return libattn.LayerDesc(
        "layer", HEADS, 1, size, scale=SIZE**-0.5, kind="mla", dtype=dtype, kv_dtype=kv_dtype, head_size_v=size,
        window=(WINDOW - 1, 0), has_sinks=True, block_size=BLOCK, mla=libattn.MlaDesc(size, size, 0, size, topk=topk),
        extensions=(extensions.layer_caches([cache]), libattn.abi.attn_compressed_rows(),
                    *([libattn.abi.attn_output_rope(form=libattn.abi.Rope.GPTJ, rotary_dim=ROTARY)] if rotates else [])))


class Compressor:
    """A compressor over a paged cache of states."""

    def __init__(self, backend: str, dtype: str, ratio: int, x: Given, table: torch.Tensor) -> None:
        heads = x.states.shape[1]
        desc = libattn.LayerDesc("compressor", heads, heads, SIZE, kind="compressor", dtype=dtype, kv_dtype="f32", block_size=BLOCK,
                                 extensions=(libattn.abi.attn_compressor_desc(tokens_per_row=ratio, overlaps=heads // 2 - 1,
                                                                              rope=libattn.abi.Rope.GPTJ, rotary_dim=ROTARY),))
        self.model, self.layer = one_layer(desc, backend)
        self.x, self.table, blocks = x, table, table.numel()
        spec = self.layer.caches[0]
        assert (spec.page_bytes, spec.sliding_window) == (BLOCK * heads * SIZE * 4, heads // 2 * ratio), spec
        self.memory = libattn.allocate(blocks * spec.page_bytes)
        self.layer.bind_memory(self.memory, blocks)

    def rows(self, states: torch.Tensor, places: list[list[int]]) -> torch.Tensor:
        """Those that a step of tokens at `places` of each request finishes, [T, 1, D]; NaN where a token finishes none."""
        starts = [0, len(places[0]), len(places[0]) + len(places[1])]
        plan = planned(self.model, libattn.Batch(
            starts, [at[-1] + 1 if at else 0 for at in places], self.table,
            torch.tensor([s for r in range(2) for s in slots(self.table, r, places[r], BLOCK)])))
        out = torch.full((len(states), 1, SIZE), float("nan"), dtype=states.dtype)
        plan.run(self.layer, None, states, None, out, extensions=[libattn.abi.attn_io_compressor(
            position_bias=self.x.bias, norm_weight=self.x.norm, cos_sin=self.x.cos_sin, norm_eps=1e-6)])
        return out


def stored(rows: torch.Tensor) -> torch.Tensor:
    """Rows as caches of fp8_ds_v4 hold them: 448 e4m3 with powers of two for 64 each, and 64 bf16."""
    tiles = rows[:, :448].reshape(len(rows), 7, 64)
    scale = torch.exp2(torch.ceil(torch.log2(tiles.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    tiles = (tiles / scale).to(torch.float8_e4m3fn).float() * scale
    return torch.cat([tiles.view(len(rows), 448), rows[:, 448:].bfloat16().float()], dim=1)


def tables(length: int, size: int) -> torch.Tensor:
    """Blocks of two requests, one with the odd ones."""
    per = length // size + 1
    return torch.tensor([[2 * i + 1 for i in range(per)], [2 * i for i in range(per)]], dtype=torch.int32)


def slots(table: torch.Tensor, r: int, places: list[int], size: int) -> list[int]:
    """Those of a request's places; -1 stays."""
    return [int(table[r, p // size]) * size + p % size if p >= 0 else -1 for p in places]


class Compressed(unittest.TestCase):
    def hold(self, kind: str, ratio: int, topk: int) -> None:
        generator = torch.Generator().manual_seed(3)
        requests = [given(kind, ratio, torch.randn(n, HIDDEN, generator=generator)) for n in LENGTHS]
        for x in requests:
            self.assertLess(worst(x.out, formula(x, ratio)[0]), 1e-4)
            self.assertLess(worst(x.rows, pooled_rows(x, ratio)), 1e-4)
        for dtype in ("f32", "bf16"):
            kept = getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[dtype])
            rounded = [replace(x, q=x.q.to(kept), own=x.own.to(kept), states=x.states.to(kept)) for x in requests]
            rounded = [replace(x, rows=pooled_rows(x, ratio).to(kept)) for x in rounded]
            for backend in ("cpu_ref", "cpu_simd"):
                with self.subTest(backend, dtype=dtype):
                    self.hold_backend(backend, dtype, rounded, ratio, topk)

    def hold_backend(self, backend: str, dtype: str, requests: list[Given], ratio: int, topk: int) -> None:
        kept, expected = requests[0].q.dtype, [formula(x, ratio) for x in requests]
        model, layer = one_layer(desc(ratio, topk, dtype), backend)
        longest = max(requests, key=lambda x: len(x.q))
        own, rows = tables(max(LENGTHS), BLOCK), tables(max(LENGTHS) // ratio, ROWS)
        caches = [torch.full((table.numel(), size, 1, SIZE), float("nan"), dtype=kept)
                  for table, size in ((own, BLOCK), (rows, ROWS))]
        layer.bind_caches(caches)
        layer.bind_params(sinks=requests[0].sinks)
        compressor = Compressor(backend, dtype, ratio, longest, own)
        lengths = [0, 0]
        for queries in STEPS:
            places = [list(range(n, n + m)) for n, m in zip(lengths, queries)]
            lengths = [n + m for n, m in zip(lengths, queries)]
            finished = [[(p + 1) // ratio - 1 if (p + 1) % ratio == 0 else -1 for p in each] for each in places]
            q, new = (torch.cat([getattr(x, name)[at] for x, at in zip(requests, places)]) for name in ("q", "own"))
            drafted = [[n for n in range(at[0], at[0] + 5) if n < most] if at else [] for at, most in zip(places, LENGTHS)]
            compressor.rows(torch.randn(len(sum(drafted, [])), *requests[0].states.shape[1:], dtype=kept), drafted)  # and rejected
            pooled = compressor.rows(torch.cat([x.states[at] for x, at in zip(requests, places)]), places)
            for x, at, got in zip(requests, finished, pooled[:, 0].split(queries)):
                self.assertEqual([row < 0 for row in at], got.isnan().all(dim=1).tolist())
                at = [row for row in at if row >= 0]
                self.assertLess(worst(got[~got.isnan().all(dim=1)], x.rows[at]) if at else 0, 1e-4 if dtype == "f32" else 2e-2)
            lists = torch.cat([x.lists[at] for x, at in zip(requests, places)]) if topk else None
            second = extensions.table(rows, torch.tensor([s for r in range(2) for s in slots(rows, r, finished[r], ROWS)]),
                                      seq_lens=torch.tensor([n // ratio for n in lengths], dtype=torch.int32))
            plan = planned(model, libattn.Batch(
                [0, queries[0], sum(queries)], lengths, own,
                torch.tensor([s for r in range(2) for s in slots(own, r, places[r], BLOCK)]), tables=[second]))
            out = torch.full((sum(queries), HEADS, SIZE), float("nan"), dtype=kept)
            lse = torch.zeros(HEADS, sum(queries))
            plan.run(layer, None, None, None, out, lse=lse, extensions=[
                extensions.mla_io(q, None, new, None, topk_indices=lists), extensions.caches_io([pooled]),
                libattn.abi.attn_io_output_rope(positions=torch.tensor(sum(places, [])), cos_sin=longest.cos_sin)])
            wanted = torch.cat([e[0][at] for e, at in zip(expected, places)])
            of_rms, of_itself = (4e-5, 2e-5) if dtype == "f32" else (2e-2, 1.2e-2)
            rms = wanted.pow(2).mean(-1, keepdim=True).sqrt()
            self.assertLess(float((out - wanted).abs().sub(of_rms * rms + of_itself * wanted.abs()).max()), 0)
            wanted = torch.cat([e[1][:, at] for e, at in zip(expected, places)], dim=1)
            self.assertLess(float((lse - wanted).abs().max()), 2**-12 if dtype == "f32" else 2**-7)

    def test_published_rows(self) -> None:
        """Rows of 584 bytes in both caches."""
        for backend in ("cpu_ref", "cpu_simd"):
            with self.subTest(backend):
                self.hold_published(backend)

    def hold_published(self, backend: str) -> None:
        ratio, size, length = 4, 512, 37
        generator = torch.Generator().manual_seed(4)
        q, own, rows = (torch.randn(n, size, generator=generator) * 2**torch.randint(-3, 3, (n, 1), generator=generator)
                        for n in (length * HEADS, length, length // ratio))
        q = q.view(length, HEADS, size) * 0.5
        model, layer = one_layer(desc(ratio, 0, kv_dtype="fp8_ds_v4", size=size, rotates=False), backend)
        blocks = length // BLOCK + 1
        pages = [spec.page_bytes for spec in layer.caches]
        self.assertEqual(pages, [BLOCK * 584, ROWS * 584])
        memory = [libattn.allocate(n * page) for n, page in zip((blocks, 2), pages)]
        layer.bind_memory(memory[0], blocks, [memory[1]], [2])
        layer.bind_params(sinks=torch.ones(HEADS))
        finished = [(p + 1) // ratio - 1 if (p + 1) % ratio == 0 else -1 for p in range(length)]
        second = extensions.table(torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([(s + ROWS) % (2 * ROWS) if s >= 0 else s
                                  for s in finished]), seq_lens=torch.tensor([length // ratio], dtype=torch.int32))
        plan = planned(model, libattn.Batch([0, length], [length], torch.arange(blocks, dtype=torch.int32)[None],
                                            torch.arange(length), tables=[second]))
        out = torch.zeros(length, HEADS, size)
        plan.run(layer, None, None, None, out, extensions=[extensions.mla_io(q, None, own, None),
                                                           extensions.caches_io([rows[finished][:, None].contiguous()])])
        wanted, _ = formula(Given(q, stored(own), stored(rows), None, out, torch.ones(HEADS), None), ratio)
        self.assertLess(worst(out, wanted), 1e-4)

    def test_listed_rows(self) -> None:
        self.hold("compressed_sparse_attention", 4, TOPK)

    def test_all_rows(self) -> None:
        self.hold("heavily_compressed_attention", 8, 0)
