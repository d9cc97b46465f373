# SPDX-License-Identifier: Apache-2.0
"""Keys chosen by lists, held against PyTorch's own attention, dense and in float64 under the mask that the lists make."""
from __future__ import annotations

import itertools
import unittest

import torch
from torch.nn.functional import scaled_dot_product_attention

import libattn
from common import causal, one_layer, peaked, planned, worst
from libattn import extensions

HQ, HK, BLOCK = 6, 2, 16
#: Requests of a mixed step: queries, keys. Last blocks of every granularity are partly filled.
QUERIES, LENGTHS = (1, 1, 4, 37), (201, 130, 150, 37)
TABLES = ([9, 4, 22, 30, 1, 12, 27, 3, 19, 8, 33, 14, 40], [2, 25, 0, 16, 7, 38, 11, 29, 20],
          [5, 35, 18, 10, 31, 6, 23, 13, 37, 26], [21, 34, 17])
BLOCKS = 41
GROUPS = {"shared": 1, "per_kv_head": HK, "per_q_head": HQ}


def slots_of(request: int) -> torch.Tensor:
    """Where each key of a request lies."""
    key = torch.arange(LENGTHS[request])
    return torch.tensor(TABLES[request])[key // BLOCK] * BLOCK + key % BLOCK


def draw(lists: libattn.IndexLists, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists of every token: unique entries of its request and of others, some -1, some empty; lengths that cut them."""
    entries, counts = [], []
    for request, queries in enumerate(QUERIES):
        span = BLOCKS * BLOCK if lists.physical_slots else LENGTHS[request] + 2 * lists.granularity
        for _ in range(queries * GROUPS[str(lists.groups)]):
            own = slots_of(request) if lists.physical_slots else torch.arange(LENGTHS[request])
            candidates = torch.cat([own, torch.randint(0, span, (40,), generator=generator)]) // lists.granularity
            unique = candidates.unique()
            chosen = unique[torch.randperm(len(unique), generator=generator)][:lists.max_entries]
            chosen = torch.where(torch.rand(len(chosen), generator=generator) < 0.2, -1, chosen)
            row = torch.full((lists.max_entries,), -1)
            row[:len(chosen)] = chosen
            entries.append(row)
            counts.append(int(torch.randint(0, lists.max_entries + 1, (1,), generator=generator)))
    shape = (sum(QUERIES), GROUPS[str(lists.groups)])
    return torch.stack(entries).view(*shape, -1).int(), torch.tensor(counts).view(shape).int()


def mask(lists: libattn.IndexLists, request: int, rows: slice, indices: torch.Tensor, lengths: torch.Tensor,
         heads: int) -> torch.Tensor:
    """[heads, queries, keys]: what the lists allow."""
    at = (slots_of(request) if lists.physical_slots else torch.arange(LENGTHS[request])) // lists.granularity
    listed = indices[rows]
    if lists.has_lengths:
        listed = torch.where(torch.arange(listed.shape[-1]) < lengths[rows][..., None], listed, -1)
    allowed = (listed[..., None, :] == at[:, None]).any(-1).transpose(0, 1)
    return allowed.repeat_interleave(heads // allowed.shape[0], 0)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """PyTorch's attention of [T, Hq, D] over [L, Hk, D]; rows that see nothing are zero."""
    q, k, v = (t.double().transpose(0, 1)[None] for t in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, visible[None], scale=scale, enable_gqa=True)
    return torch.where(visible.any(-1)[None, ..., None], out, 0.0)[0].transpose(0, 1)


class Lists(unittest.TestCase):
    def starts(self, counts: tuple[int, ...] = QUERIES) -> list[int]:
        return list(itertools.accumulate(counts, initial=0))

    def batch(self) -> libattn.Batch:
        width = max(map(len, TABLES))
        tables = [[*table, *[0] * (width - len(table))] for table in TABLES]
        slots = torch.cat([slots_of(r)[-n:] for r, n in enumerate(QUERIES)])
        return libattn.Batch(self.starts(), list(LENGTHS), tables, slots)

    def forms(self) -> list[libattn.IndexLists]:
        return [libattn.IndexLists({1: 60, 4: 17, 16: 7, 64: 3, 128: 2}[g], g, groups, slots, lengths)
                for (g, groups), (slots, lengths) in zip(itertools.product((1, 4, 16, 64, 128), GROUPS),
                                                         itertools.cycle(itertools.product((False, True), repeat=2)))]

    def test_decoder(self) -> None:
        """GQA: single tokens, drafts and a prompt in one step, with and without a window."""
        d, dv, starts = 32, 24, self.starts()
        for lists, window in itertools.product(self.forms(), (0, 50)):
            generator = torch.Generator().manual_seed(lists.max_entries + window)
            desc = libattn.LayerDesc("l", HQ, HK, d, head_size_v=dv, window=(window - 1, 0) if window else None,
                                     block_size=BLOCK, lists=lists)
            model, layer = one_layer(desc, "cpu_ref", validate=True)
            k_cache, v_cache = (torch.zeros(BLOCKS, BLOCK, HK, n) for n in (d, dv))
            keys = [peaked(n, HK, d, generator=generator) for n in LENGTHS]
            values = [torch.randn(n, HK, dv, generator=generator) for n in LENGTHS]
            for r, n in enumerate(QUERIES):
                k_cache.view(-1, HK, d)[slots_of(r)[:-n]] = keys[r][:-n]
                v_cache.view(-1, HK, dv)[slots_of(r)[:-n]] = values[r][:-n]
            layer.bind_kv_views(k_cache, v_cache)
            indices, lengths = draw(lists, generator)
            q = peaked(starts[-1], HQ, d, generator=generator)
            out = torch.empty(starts[-1], HQ, dv)
            plan = planned(model, self.batch())
            new_k, new_v = (torch.cat([x[-n:] for x, n in zip(t, QUERIES)]) for t in (keys, values))
            plan.run(layer, q, new_k, new_v, out,
                     extensions=[extensions.index_lists_io(indices, lengths if lists.has_lengths else None)])
            for r, n in enumerate(QUERIES):
                rows = slice(starts[r], starts[r + 1])
                visible = causal(n, LENGTHS[r], window) & mask(lists, r, rows, indices, lengths, HQ)
                self.assertLess(worst(out[rows], expected(q[rows], keys[r], values[r], visible, d**-0.5)), 1e-4,
                                (lists, window, r))

    def test_latent(self) -> None:
        """MLA in latent space; the plain form on cpu_simd too, whose top k it becomes."""
        rank, rope, starts, scale = 32, 8, self.starts(), 0.2
        for lists, backend in [(form, "cpu_ref") for form in self.forms()] + [(libattn.IndexLists(60), "cpu_simd")]:
            generator = torch.Generator().manual_seed(lists.max_entries)
            if lists.groups == "per_kv_head":
                continue  # there is one
            desc = libattn.LayerDesc("l", HQ, 1, rank + rope, scale, "mla", head_size_v=rank, block_size=BLOCK,
                                     mla=libattn.MlaDesc(rank, 16, rope, rank), lists=lists)
            model, layer = one_layer(desc, backend, validate=True)
            layer.bind_kv(libattn.allocate(BLOCKS * layer.kv_spec.padded_page_bytes), BLOCKS)
            rows_of = [peaked(n, rank + rope, generator=generator) for n in LENGTHS]
            context = libattn.Batch(self.starts(LENGTHS), list(LENGTHS), [[0] * 13] * 4,
                                    torch.cat([slots_of(r) for r in range(len(LENGTHS))]))
            plan = planned(model, context)
            every = torch.cat(rows_of)
            plan.run(layer, None, None, None, None, flags=libattn.NO_ATTEND, extensions=[extensions.mla_io(
                every[:0], every[:0], every[:, :rank].contiguous(), every[:, rank:].contiguous())])
            indices, lengths = draw(lists, generator)
            q = peaked(starts[-1], HQ, rank + rope, generator=generator)
            out = torch.empty(starts[-1], HQ, rank)
            plan.update(self.batch())
            plan.run(layer, None, None, None, out, flags=libattn.NO_WRITE, extensions=[
                extensions.mla_io(q[..., :rank], q[..., rank:]),
                extensions.index_lists_io(indices, lengths if lists.has_lengths else None)])
            for r, n in enumerate(QUERIES):
                rows = slice(starts[r], starts[r + 1])
                visible = causal(n, LENGTHS[r]) & mask(lists, r, rows, indices, lengths, HQ)
                keys = rows_of[r][:, None]
                self.assertLess(worst(out[rows], expected(q[rows], keys, keys[..., :rank], visible, scale)), 1e-4,
                                (lists, backend, r))

    def test_shapes(self) -> None:
        """What is no list is refused before the library reads it."""
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "indices.*T, G, max_entries"):
            extensions.index_lists_io(torch.zeros(3, 4, dtype=torch.int32))
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "lengths.*3, 1"):
            extensions.index_lists_io(torch.zeros(3, 1, 4, dtype=torch.int32), torch.zeros(3, 2, dtype=torch.int32))
