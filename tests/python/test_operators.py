# SPDX-License-Identifier: Apache-2.0
"""The operators of torch next to float64: eager, compiled, exported and by AOTInductor, into tensors of their own and the
caller's."""
from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
from torch import library

import libattn.torch
from common import attention, causal, worst

RANK, NOPE, ROPE, WIDTH, HEADS, PAGE = 32, 16, 8, 24, 4, 16


def attend_arguments() -> tuple[Any, ...]:
    """Two requests, one padded on the left; a window and sinks."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 4, 9, 32), torch.randn(2, 2, 21, 32), torch.randn(2, 2, 21, 16)
    place = torch.arange(21)
    mask = (place <= (torch.arange(9) + 12)[:, None]) & (place >= torch.tensor([0, 15])[:, None, None])
    return q, k, v, mask[:, None], torch.randn(4), 0.4, True, None, 0.0, "decoder", 0


def attend_expected(q: Any, k: Any, v: Any, mask: Any, sinks: Any, scale: float, *_: Any) -> torch.Tensor:
    return torch.stack([attention(*(t.transpose(0, 1) for t in rows), scale, mine[0], sinks=sinks)[0] for *rows, mine in zip(q, k, v, mask)])


def mla_arguments() -> tuple[Any, ...]:
    """A prompt of 19 tokens and a decode over 33 that lie in pages."""
    torch.manual_seed(2)
    pages = torch.randn(8, PAGE, RANK + ROPE)
    table = torch.tensor([[5, 2, 0], [7, 1, 4]], dtype=torch.int32)
    slots = torch.tensor([int(table[0, i // PAGE]) * PAGE + i % PAGE for i in range(19)] + [4 * PAGE + 1])
    return (torch.randn(20, HEADS, NOPE + ROPE), torch.randn(20, RANK), torch.randn(20, ROPE), pages, table, slots,
            torch.tensor([0, 19, 20], dtype=torch.int32), torch.tensor([19, 34], dtype=torch.int32),
            torch.randn(HEADS * (NOPE + WIDTH), RANK) / 4, 0.3, 0)


def mla_expected(q: Any, kv_c: Any, k_pe: Any, pages: Any, table: Any, slots: Any, starts: Any, lengths: Any, proj: Any,
                 scale: float, *_: Any) -> torch.Tensor:
    """Writes the pages, too."""
    pages.view(-1, RANK + ROPE)[slots] = torch.cat([kv_c, k_pe], -1)
    rows, w = [], proj.double().view(HEADS, NOPE + WIDTH, RANK)
    for r, length in enumerate(lengths.tolist()):
        latent = pages[table[r].long()].reshape(-1, RANK + ROPE)[:length].double()
        keys, values = (torch.einsum("lr,hnr->lhn", latent[:, :RANK], part) for part in (w[:, :NOPE], w[:, NOPE:]))
        keys = torch.cat([keys, latent[:, None, RANK:].expand(-1, HEADS, -1)], -1)
        queries = q[starts[r]:starts[r + 1]]
        rows.append(attention(queries, keys, values, scale, causal(len(queries), length))[0])
    return torch.cat(rows)


def recurrent_arguments() -> tuple[Any, ...]:
    """A new request of 13 tokens in slot 2, and one token over the state of slot 0."""
    torch.manual_seed(3)
    return (torch.randn(14, 2, 16), torch.randn(14, 2, 16), torch.randn(14, 4, 24), -torch.rand(14, 4),
            torch.randn(14, 4), torch.randn(3, 4, 24, 16), torch.tensor([2, 0], dtype=torch.int32),
            torch.tensor([0, 13, 14], dtype=torch.int32), torch.tensor([13, 8], dtype=torch.int32), 0.25, True, 0)


def recurrent_expected(q: Any, k: Any, v: Any, a: Any, b: Any, state: Any, slots: Any, starts: Any, lengths: Any,
                       scale: float, *_: Any) -> torch.Tensor:
    """Writes the states, too."""
    q, k = (torch.nn.functional.normalize(x.double(), dim=-1).repeat_interleave(2, 1) for x in (q, k))
    out = torch.empty(v.shape, dtype=torch.float64)
    for r, slot in enumerate(slots.tolist()):
        first, end = int(starts[r]), int(starts[r + 1])
        s = state[slot].double() * (int(lengths[r]) > end - first)
        for t in range(first, end):
            s = s * a[t].double().exp()[:, None, None]
            rest = torch.sigmoid(b[t].double())[:, None] * (v[t].double() - torch.einsum("hdk,hk->hd", s, k[t]))
            s = s + torch.einsum("hd,hk->hdk", rest, k[t])
            out[t] = torch.einsum("hdk,hk->hd", s, q[t]) * scale
        state[slot] = s.float()
    return out


#: Name, arguments, what is expected, and which argument is written.
CASES = (("attend", attend_arguments, attend_expected, None), ("attend_mla", mla_arguments, mla_expected, 3),
         ("recurrent", recurrent_arguments, recurrent_expected, 5))


class Model(torch.nn.Module):
    """Every operator, and every one that writes into a tensor of the model's, between two of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.tensors, self.checks = [], [], []
        for name, make, expect, written in CASES:
            for into in (False, True):
                given, wanted = make(), make()
                count = next(i for i, x in enumerate(given) if not isinstance(x, torch.Tensor))
                self.calls.append((name, into, count, given[count:], expect(*make()).shape))
                self.tensors += given[:count]
                self.checks.append((name, given, wanted, expect, written))

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        results, at = [], 0
        for name, into, count, constants, shape in self.calls:
            first, *rest = tensors[at:at + count]
            if into:
                out = first.new_empty(shape)
                getattr(torch.ops.libattn, f"{name}_out")(out, first * 1.0, *rest, *constants)
            else:
                out = getattr(torch.ops.libattn, name)(first * 1.0, *rest, *constants)
            results.append(out + 1)
            at += count
        return results


class Operators(unittest.TestCase):
    def hold(self, name: str, out: torch.Tensor, given: Any, wanted: Any, expect: Any, written: int | None) -> None:
        """`out` is what `expect` gives, and `given` is left as that leaves `wanted`."""
        self.assertLess(worst(out, expect(*wanted)), 1e-4, name)
        for i, (x, y) in enumerate(zip(given, wanted)):
            if i == written:
                self.assertLess(worst(x, y), 1e-4, name)
            elif isinstance(x, torch.Tensor):
                self.assertTrue(torch.equal(x, y), f"{name}, argument {i}")

    @torch.no_grad()
    def test_eager(self) -> None:
        for name, make, expect, written in CASES:
            given = make()
            self.hold(name, getattr(torch.ops.libattn, name)(*given), given, make(), expect, written)

    @torch.no_grad()
    def test_the_callers_output(self) -> None:
        for name, make, expect, written in CASES:
            run, given = getattr(torch.ops.libattn, f"{name}_out"), make()
            out = torch.full(expect(*make()).shape, torch.nan)
            self.assertIsNone(run(out, *given))
            self.hold(name, out, given, make(), expect, written)
            for wrong in (out[1:], out.double(), out.mT.contiguous().mT):
                with self.assertRaisesRegex(libattn.InvalidArgumentError, "out: .* is needed"):
                    run(wrong, *make())

    def test_gradients(self) -> None:
        """Refused, eager and in a compiled graph, which would drop them: of any tensor, the written ones too."""
        for name, make, expect, written in CASES:
            given, out = make(), torch.zeros(expect(*make()).shape)
            for run, tensors in ((getattr(torch.ops.libattn, name), given), (getattr(torch.ops.libattn, f"{name}_out"), (out, *given))):
                for i, t in enumerate(tensors):
                    if isinstance(t, torch.Tensor) and t.is_floating_point():
                        asked = [*tensors[:i], t.clone().requires_grad_(), *tensors[i + 1:]]
                        with self.assertRaisesRegex(libattn.UnsupportedError, "requires a gradient"):
                            run(*asked)
        q, *rest = attend_arguments()
        with self.assertRaisesRegex(Exception, "requires a gradient"):
            torch.compile(lambda x: torch.ops.libattn.attend(x * 2, *rest).sum())(q.requires_grad_())

    def test_rules_of_torch(self) -> None:
        """Schemas, fake outputs and functionalization, by torch's own check."""
        for name, make, expect, _ in CASES:
            for op, given in ((name, make()), (f"{name}_out", (torch.zeros(expect(*make()).shape), *make()))):
                library.opcheck(getattr(torch.ops.libattn, op).default, given, test_utils=("test_schema", "test_faketensor"))

    def hold_model(self, compile: Any) -> None:
        """What `compile` makes of the model and its inputs computes and writes what is expected."""
        model = Model()
        results = compile(model, tuple(x.clone() for x in model.tensors))(*model.tensors)
        for out, (name, *check) in zip(results, model.checks):
            self.hold(name, out - 1, *check)

    @torch.no_grad()
    def test_compiled(self) -> None:
        for backend in ("aot_eager", "inductor") if shutil.which("c++") else ("aot_eager",):
            torch.compiler.reset()
            self.hold_model(lambda model, _, backend=backend: torch.compile(model, fullgraph=True, backend=backend))

    @unittest.skipUnless(shutil.which("c++"), "no C++ compiler")
    @torch.no_grad()
    def test_aot_inductor(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            def compile(model: Model, tensors: Any) -> Any:
                program = torch.export.export(model, tensors)
                return torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(
                    program, package_path=str(Path(folder) / "model.pt2")))

            self.hold_model(compile)
