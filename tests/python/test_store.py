# SPDX-License-Identifier: Apache-2.0
"""Bound layers outlive the tensors of a call: what is known by an address must not meet another tensor there."""
import ctypes
import gc
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import libattn.torch
from common import BACKENDS, attention, causal, each_backend, worst, worst_of_batch
from libattn import tensors
from libattn.torch import call as in_c
from libattn.torch import dense

store_module = importlib.import_module("libattn.torch.store")  # its `store` has the module's name
PACKAGE = Path(__file__).resolve().parents[2] / "bindings" / "python"
HEADS = 512  # a parameter of this size gets the address of the one that was freed before


def attended(sinks: torch.Tensor) -> float:
    """The error of a call with these sinks."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, HEADS, rows, 8, generator=generator) for rows in (1, 3, 3))
    out = libattn.torch.attend(q, k, v, scale=0.5, causal=True, sinks=sinks)
    return worst_of_batch(out, q, k, v, causal(1, 3), 0.5, sinks=sinks)


class Parameters(unittest.TestCase):
    def test_another_model_at_the_address_of_a_freed_one(self) -> None:
        for backend in each_backend():
            for i in range(8):
                sinks = torch.full((HEADS,), i - 4.0, dtype=torch.bfloat16)
                self.assertLess(attended(sinks), 2e-5, (backend, i))
                del sinks

    def test_weights_loaded_again(self) -> None:
        """In place, as loaders do: ``data`` has a version of its own."""
        for backend in BACKENDS:
            for dtype in (torch.bfloat16, torch.float32):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                sinks = torch.nn.Parameter(torch.zeros(HEADS, dtype=dtype))
                for value in (0.0, 5.0, -3.0):
                    sinks.data.fill_(value)
                    self.assertLess(attended(sinks.detach()), 2e-5, (backend, dtype, value))

    def test_starts_at_the_address_of_freed_ones(self) -> None:
        """Starts of packed queries are read again next to keys whose starts stay."""
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.randn(1, 2, HEADS + 1, 8), torch.randn(1, 2, 2 * HEADS, 8)
        keys = torch.arange(0, 2 * HEADS + 1, 2).int()
        for longer in range(8):
            starts = torch.arange(HEADS + 1).int()
            starts[longer + 1:] += 1
            found, wanted = (libattn.torch.attend_packed(q, k, k, starts, ends, scale=0.5) for ends in (keys, keys.clone()))
            self.assertTrue(torch.equal(found, wanted), longer)
            del starts

    def test_states_are_the_callers(self) -> None:
        """An operator keeps no state's memory after its call."""
        libattn.torch.configure(ignore_environment=True)
        rows, gates, starts = torch.zeros(2, 2, 16), torch.zeros(2, 2), torch.tensor([0, 2]).int()
        kept = []
        for _ in range(3):
            state = torch.zeros(3, 2, 16, 16)
            kept.append(StorageWeakRef(state.untyped_storage()))
            torch.ops.libattn.recurrent(rows, rows, rows, gates, gates, state, starts[:1], starts, starts[1:], 1.0, True, 0)
            del state
        self.assertTrue(all(storage.expired() for storage in kept))


def plans() -> tuple[list[int], Any]:
    """A list that grows with each plan of a batch, and the patch that makes it."""
    made: list[int] = []
    update = libattn.Plan.update

    def counted(plan: libattn.Plan, *args: Any, **kwargs: Any) -> None:
        made.append(1)
        update(plan, *args, **kwargs)

    return made, unittest.mock.patch.object(libattn.Plan, "update", counted)


class SharedPlans(unittest.TestCase):
    def test_layers_that_differ_in_their_sinks(self) -> None:
        """A prompt and single queries: one plan each, and each layer's own sinks; in inference mode and after it."""
        generator = torch.Generator().manual_seed(6)
        sinks = [torch.randn(4, generator=generator).to(dtype) for dtype in (torch.float32, torch.bfloat16) for _ in range(3)]
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        for backend, dtype in zip(BACKENDS, (torch.float32, torch.bfloat16)):  # a loader's default is its weights'
            libattn.torch.configure(ignore_environment=True, backend=backend)
            torch.set_default_dtype(dtype)
            for rows, length, inference in ((20, 20, True), (1, 21, False), (1, 22, True), (1, 22, False)):
                q, k = (torch.randn(1, *size, 16, generator=generator, dtype=torch.float32) for size in ((4, rows), (2, length)))
                made, counting = plans()
                with counting, torch.inference_mode(inference):
                    for index, values in enumerate(sinks):
                        out = libattn.torch.attend(q, k, k, scale=0.25, causal=True, sinks=values, index=index)
                        error = worst_of_batch(out, q, k, k, causal(rows, length), sinks=values)
                        self.assertLess(error, 2e-5, (backend, rows, index))
                self.assertLessEqual(len(made), 1, (backend, rows, length))

    def test_sinks_of_other_heads(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 4, 16)
        for shape in ((4,), (1,), (4, 1), (8,)):
            if shape == (4,):
                libattn.torch.attend(q, k, k, scale=0.25, causal=True, sinks=torch.zeros(shape))
                continue
            with self.assertRaisesRegex(libattn.InvalidArgumentError, r"sinks: .* \[4\], is needed"):
                libattn.torch.attend(q, k, k, scale=0.25, causal=True, sinks=torch.zeros(shape))

    def test_sinks_that_are_missing(self) -> None:
        """A layer that is described with sinks and given none is refused: only `attend`'s own plans have them apart."""
        desc = dense.describe("decoder", 4, 2, 16, 16, torch.float32, 0.25, True, None, 0.0, True, 16)
        for backend in each_backend():
            store = libattn.torch.store
            for bound in (store.bound(desc, lambda: desc, 0, torch.device("cpu")),
                          store.group([(desc, 0, ())], torch.device("cpu"))[0][0]):
                self.assertIsNone(bound.sinks)
                with self.assertRaisesRegex(libattn.AttnError, "sinks"):
                    bound.reserve(1)
                    bound.model.plan(0, max_num_reqs=1, max_num_tokens=1, max_seq_len=16)

    def test_layers_whose_lengths_take_turns(self) -> None:
        """Full and sliding layers: a token has a plan for layers whose length grows, and none for those whose window is full."""
        generator = torch.Generator().manual_seed(7)
        for backend in each_backend():
            for token in range(4):
                made, counting = plans()
                with counting:
                    for index in range(6):
                        length = 9 if index % 2 else 30 + token
                        q, k = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(1, 2, length, 16, generator=generator)
                        out = libattn.torch.attend(q, k, k, scale=0.25, causal=True, index=index)
                        self.assertLess(worst_of_batch(out, q, k, k, causal(1, length)), 2e-5, (backend, token, index))
                self.assertEqual(len(made), 1 if token else 2, (backend, token))


class Configured(unittest.TestCase):
    def test_by_another_thread_while_a_layer_is_bound(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        select = libattn.Runtime.select

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            libattn.torch.configure(ignore_environment=True)
            return select(*args, **kwargs)

        with unittest.mock.patch.object(libattn.Runtime, "select", interrupted):
            self.assertLess(attended(torch.zeros(HEADS)), 2e-5)


class Shapes(unittest.TestCase):
    def test_of_keys_that_are_not_the_queries(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.zeros(2, 4, 3, 64), torch.zeros(2, 2, 5, 64)
        for given in ((q, k, k[:, :, :3]), (q, k, k[:, :1]), (q, k[..., :32], k), (q, k[:1], k[:1])):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, r"k: q \[2, 4, 3, 64\], k .*are needed"):
                libattn.torch.attend(*given, scale=0.125, causal=True)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "attention_mask: torch.int64"):
            libattn.torch.attend(q, k, k, torch.ones(2, 1, 3, 5).long(), scale=0.125, causal=True)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, r"window: \(3,\); \(left, right\) is needed"):
            libattn.torch.attend(q, k, k, scale=0.125, causal=True, window=(3,))
        for given in ((q, k.double(), k.double()), (q, k, k.bfloat16())):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, "k: q torch.float32 on cpu, k .*one dtype and one device are needed"):
                libattn.torch.attend(*given, scale=0.125, causal=True)

    def test_without_queries_or_keys(self) -> None:
        for backend in each_backend():
            for queries, keys, causal in itertools.product((0, 3), (0, 5), (False, True)):
                q, k = torch.ones(2, 4, queries, 16), torch.ones(2, 2, keys, 16)
                out = libattn.torch.attend(q, k, k, scale=0.25, causal=causal)
                wanted = torch.ones(2, queries, 4, 16) * (keys > 0)
                self.assertTrue(torch.equal(out, wanted), (backend, queries, keys, causal))

    def test_of_packed_rows(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.zeros(1, 4, 4, 16), torch.zeros(1, 2, 8, 16)
        for starts, ends, text in (([0, 1, 4], [0, 4], r"key_start_loc: \[0, 4\]; 3 numbers"),
                                   ([0, 3, 1, 4], [0, 4, 6, 8], r"query_start_loc: \[0, 3, 1, 4\]; 4 numbers"),
                                   ([0, 1, 4], [-2, 4, 8], "key_start_loc: .*none below 0"), ([], [], "query_start_loc: .*1 numbers"),
                                   ([0.0, 4.0], [0, 8], "query_start_loc: torch.float32"), ([[0, 4]], [0, 8], "query_start_loc: .*of 1 dimen")):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, text):
                libattn.torch.attend_packed(q, k, k, *(torch.tensor(x, dtype=None if x else torch.int32) for x in (starts, ends)), scale=0.25)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, r"q: \[2, 4, 4, 16\]; \[1, Hq, T, D\] is needed"):
            libattn.torch.attend_packed(*(torch.cat([t, t]) for t in (q, k, k)), *[torch.tensor([0, 4]).int()] * 2, scale=0.25)

    def test_a_causal_mask_of_a_cross_layer(self) -> None:
        generator = torch.Generator().manual_seed(6)
        q, k, v = (torch.randn(1, 2, rows, 16, generator=generator) for rows in (9, 12, 12))
        mask = torch.ones(9, 12, dtype=torch.bool).tril(3)
        for backend in each_backend():
            out = libattn.torch.attend(q, k, v, mask[None, None], scale=0.25, causal=False, kind="cross")
            self.assertLess(worst_of_batch(out, q, k, v, mask), 2e-5, backend)


class Again(unittest.TestCase):
    """Calls in C where the package has them."""

    def test_calls_that_were_made_before(self) -> None:
        """Calls by turns: of several shapes, layers, windows and masks, with sinks that change, into new tensors and given ones."""
        generator = torch.Generator().manual_seed(8)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        sinks, mask = normal(4).bfloat16(), torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
        mask[1, :, :, :2] = False  # padded on the left
        shown = torch.stack([causal(3, 7), causal(3, 7) & (torch.arange(7) >= 2)])
        for backend in each_backend():
            for turn in range(4):
                sinks.copy_(normal(4))
                for queries, keys, window, given, index in (
                        (1, 5, 0, None, 0), (1, 5, 0, None, 1), (1, 6, 0, None, 0), (1, 5, 3, None, 2), (3, 7, 0, None, 0),
                        (3, 7, 0, mask, 1), (1, 5, 0, sinks, 3)):
                    q, k, v = normal(2, 4, queries, 16), normal(2, 2, keys, 16), normal(2, 2, keys, 16)
                    out = torch.full((2, queries, 4, 16), torch.nan) if turn % 2 else None
                    masked = given is mask
                    found = libattn.torch.attend(q, k, v, mask if masked else None, scale=0.25, causal=True, index=index,
                                                 out=out, window=(window - 1, 0) if window else None,
                                                 sinks=sinks if given is sinks else None)
                    self.assertTrue(out is None or found is out)
                    error = worst_of_batch(found, q, k, v, shown if masked else causal(queries, keys, window),
                                           sinks=sinks if given is sinks else None)
                    self.assertLess(error, 2e-5, (backend, turn, queries, keys, window, index))
                for wrong in (torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 16).double()):
                    with self.assertRaisesRegex(libattn.InvalidArgumentError, "out: .* is needed"):
                        libattn.torch.attend(normal(2, 4, 1, 16), *(normal(2, 2, 5, 16) for _ in range(2)), scale=0.25,
                                             causal=True, out=wrong)

    def test_another_choice_for_one_layer(self) -> None:
        """Layer 1 is asked for by a rule: what was chosen for layer 0 is not taken for it."""
        libattn.torch.configure(ignore_environment=True, backend="layers.0=cpu_ref;layers.1=cpu_simd")
        q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 4, 16)
        for index in (0, 1, 0, 1):
            libattn.torch.attend(q, k, k, scale=0.25, causal=True, index=index)
        self.assertEqual([row.decode.split("@")[0] for row in libattn.torch.table()], ["cpu_ref", "cpu_simd"])

    def test_lengths_that_grow(self) -> None:
        """A batch is filled again where only lengths of keys differ: of two kinds of layers by turns, whose batches stay apart, and with
        padding in front of a request or none."""
        generator = torch.Generator().manual_seed(12)
        for backend in each_backend():
            for length in (5, 6, 9, 7, 40, 41):
                for window in (None, (3, 0)):
                    for padded in (0, 2) if length != 7 else (0,):
                        keys = length if window is None else length + 1
                        q, k, v = (torch.randn(3, heads, rows, 16, generator=generator) for heads, rows in ((4, 1), (2, keys), (2, keys)))
                        seen = torch.stack([causal(1, keys, window[0] + 1 if window else 0)] * 3)
                        seen[1, :, :padded] = False
                        out = libattn.torch.attend(q, k, v, seen[:, None] if padded else None, scale=0.25, causal=True, window=window)
                        self.assertLess(worst_of_batch(out, q, k, v, seen), 2e-5, (backend, length, window, padded))

    def test_a_batch_is_filled_again_in_another_mode(self) -> None:
        """Its arrays are copies, as on a GPU, and were made in inference mode."""
        bound: Any = types.SimpleNamespace(contiguous=None, device=types.SimpleNamespace(type="cuda"))
        made = set()
        with unittest.mock.patch.object(dense, "_on", lambda device, values: torch.from_numpy(values).clone()):
            for keys, inference in ((4, True), (5, False), (6, True), (7, False)):
                with torch.inference_mode(inference), torch.no_grad():
                    made.add(dense._contiguous_batch(bound, dense.whole(1, 1, keys, True, None), 1, keys, None))
                self.assertEqual((len(made), bound.contiguous[3].tolist()), (1, [[0, 1], [0, keys]]))

    def test_keys_are_read_in_place(self) -> None:
        """No page is written, next to padding neither; a backend that refuses has pages. The table says what the layer is."""
        generator = torch.Generator().manual_seed(9)
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        mask[1, :, :, :3] = False
        bind, reserve, blocks = libattn.torch.store._bind, store_module.Bound.reserve, []

        def refusing(descs: Any, *args: Any) -> Any:
            if descs[0].kind == "encoder_only":
                raise libattn.UnsupportedError(libattn.abi.Status.UNSUPPORTED, "kind", "refused")
            return bind(descs, *args)

        for backend in BACKENDS:
            for queries, window, given, refused, in_place in (
                    (1, None, None, False, True), (1, (8, 0), mask, False, True), (1, (7, 0), None, False, True),
                    (1, (-1, 0), None, False, True), (2, None, None, False, True), (9, (3, 0), None, False, True),
                    (1, None, mask, True, False), (4, None, None, True, False)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                q, k, v = (torch.randn(2, heads, rows, 16, generator=generator) for heads, rows in ((4, queries), (2, 9), (2, 9)))
                blocks.clear()
                with unittest.mock.patch.object(libattn.torch.store, "_bind", refusing if refused else bind), \
                        unittest.mock.patch.object(store_module.Bound, "reserve", lambda bound, n: (blocks.append(n), reserve(bound, n))):
                    out = libattn.torch.attend(q, k, v, given, scale=0.25, causal=True, window=window)
                self.assertEqual(not blocks, in_place, (backend, queries, window, refused))
                seen = causal(queries, 9, window[0] + 1 if window else 0) if given is None else given[:, 0]
                self.assertLess(worst_of_batch(out, q, k, v, seen), 2e-5, (backend, queries, window, refused))
                self.assertEqual([(row.kind, row.decode.split("@")[0]) for row in libattn.torch.table()],
                                 [("sliding" if window else "full", backend)])

    def test_one_key_of_any_strides(self) -> None:
        """A dimension of one element may have any stride, which contiguous() keeps."""
        for backend in each_backend():
            q, v = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
            for k in (torch.randn(2, 1, 2, 16).transpose(1, 2), torch.randn(1, 2, 2, 16).permute(1, 2, 0, 3), torch.randn(2, 2, 1, 16)):
                for value in (v, v.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)):
                    found = libattn.torch.attend(q, k, value, scale=0.25, causal=True)
                    torch.testing.assert_close(found, v.repeat_interleave(2, dim=1).transpose(1, 2), atol=1e-5, rtol=1e-5)

    def test_keys_and_values_of_different_strides(self) -> None:
        """Keys head by head and values token by token, as DeepSeek's are: large ones entry by entry, by one plan and without a copy;
        small ones, and those of a mask that differs by entry, are copied."""
        generator = torch.Generator().manual_seed(10)
        padded, alike = torch.ones(3, 1, 1, 9, dtype=torch.bool), torch.ones(3, 1, 1, 9, dtype=torch.bool)
        padded[1, :, :, :3], alike[:, :, :, :2] = False, False
        copy, copies = dense._copied, []

        def copied(t: torch.Tensor) -> torch.Tensor:
            copies.append(1)
            return copy(t)

        for backend in BACKENDS:
            for queries, given, window, large, in_place in (
                    (1, None, None, True, True), (9, None, None, True, True), (4, None, (2, 0), True, True), (1, alike, None, True, True),
                    (1, padded, None, True, False), (9, None, None, False, False)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                q, k = (torch.randn(3, heads, rows, 24, generator=generator) for heads, rows in ((4, queries), (2, 9)))
                v = torch.randn(3, 9, 2, 32, generator=generator)[..., 16:].transpose(1, 2)
                sinks = torch.randn(4, generator=generator)
                made, counting = plans()
                copies.clear()
                with counting, unittest.mock.patch.object(dense, "_copied", copied), \
                        unittest.mock.patch.object(dense, "_LARGE_ENTRY", 0 if large else 1 << 30):
                    for _ in range(2):
                        out = libattn.torch.attend(q, k, v, given, scale=0.25, causal=True, window=window, sinks=sinks)
                self.assertEqual((not copies, len(made)), (in_place, 1), (backend, queries, large))
                seen = causal(queries, 9, window[0] + 1 if window else 0) if given is None else given[:, 0]
                self.assertLess(worst_of_batch(out, q, k, v, seen, sinks=sinks), 2e-5, (backend, queries, large))

    def test_prompts_go_to_their_own_backend(self) -> None:
        """Prompts and single queries over keys in place, each by the backend of its phase."""
        libattn.torch.configure(ignore_environment=True, backend="prefill=cpu_ref;decode=cpu_simd")
        bind, bound = libattn.torch.store._bind, []
        with unittest.mock.patch.object(libattn.torch.store, "_bind", lambda *args: (bound.append(args[1:3]), bind(*args))[1]):
            for queries in (1, 4):
                q, k = torch.zeros(1, 2, queries, 16), torch.zeros(1, 2, 4, 16)
                libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        self.assertEqual([tuple(name.split("@")[0] for name in pair) for pair in dict.fromkeys(bound)],
                         [("cpu_simd", "cpu_simd"), ("cpu_ref", "cpu_ref")])

    def test_a_capture_is_refused(self) -> None:
        """Calls that were made before, in whose plan a replay would find the next batch's, and new ones; a function stands in for the
        GPU that captures, about which calls in C ask on a GPU alone."""
        libattn.torch.configure(ignore_environment=True)
        self.enterContext(unittest.mock.patch.object(dense, "_again", None))
        q, k, starts = torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 4, 16), torch.tensor([0, 2]).int()
        mask, pages, step = torch.ones(1, 1, 2, 4, dtype=torch.bool), torch.zeros(2, 2, 16, 2, 16), object()
        rows, latent = torch.zeros(2, 2, 16), torch.zeros(2, 16)
        calls: list[Any] = [
            lambda: libattn.torch.attend(q, k, k, scale=0.25, causal=True),
            lambda: libattn.torch.attend(q, k, k, mask, scale=0.25, causal=True),
            lambda: torch.ops.libattn.attend(q, k, k, None, None, 0.25, True, None, 0.0, "decoder", 0),
            lambda: libattn.torch.attend_packed(q, k[:, :, :2], k[:, :, :2], starts, starts, scale=0.25),
            lambda: libattn.torch.attend_pages(rows, rows, rows, *pages, torch.tensor([[0], [1]]), starts.new_tensor([3, 4]), scale=0.25,
                                               step=step),
            lambda: torch.ops.libattn.attend_mla(torch.zeros(2, 2, 24), latent, latent[:, :8], torch.zeros(2, 16, 24), starts[None, :1],
                                                 torch.arange(2), starts, starts[1:], torch.zeros(2 * 32, 16), 0.25, 0)]
        for call in calls:
            for turn in range(2):
                if turn:
                    call()
                with unittest.mock.patch.object(store_module, "capturing", lambda device: True), \
                        unittest.mock.patch.object(torch.Tensor, "is_cuda", True), \
                        self.assertRaisesRegex(libattn.UnsupportedError, "capture: .*; supported: calls outside of CUDA graphs"):
                    call()
            call()
        tags = {str(tag).split(".")[-1] for tag in torch.ops.libattn.attend.default.tags}
        self.assertEqual("cudagraph_unsafe" in tags, hasattr(torch.Tag, "cudagraph_unsafe"))

    def test_a_capture_is_asked_for_on_the_tensors_device(self) -> None:
        """Stand-ins for torch.cuda and torch.xpu, of which the stream of device 1 captures."""
        for kind in ("cuda", "xpu"):
            current, switched = [0], []

            class Device:
                def __init__(self, device: torch.device) -> None:
                    self.index = device.index

                def __enter__(self) -> None:
                    switched.append(self.index)
                    self.outer, current[0] = current[0], self.index

                def __exit__(self, *_: object) -> None:
                    current[0] = self.outer

            module = types.SimpleNamespace(device=Device, current_device=lambda: current[0],
                                           is_current_stream_capturing=lambda: current[0] == 1)
            with self.subTest(kind), unittest.mock.patch.object(torch, kind, module):
                answers = [store_module.capturing(torch.device(name)) for name in (kind, f"{kind}:0", f"{kind}:1", "cpu")]
                self.assertEqual((answers, switched, current), ([False, False, True, False], [1], [0]))
                del module.is_current_stream_capturing
                self.assertFalse(store_module.capturing(torch.device(kind, 1)))

    def test_a_gradient_is_refused_after_calls_without(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 4, 16)
        libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        with self.assertRaisesRegex(libattn.UnsupportedError, "q: requires a gradient"):
            libattn.torch.attend(q.requires_grad_(), k, k, scale=0.25, causal=True)


class Scratch(unittest.TestCase):
    def test_one_for_all_plans_of_a_stream(self) -> None:
        """Plans of different layers, the largest first; a smaller one takes no memory of its own for it."""
        taken: list[int] = []
        bind = libattn.Plan.bind_workspace

        def watched(plan: libattn.Plan, memory: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
            assert scratch is not None
            taken.append(scratch.data_ptr())
            self.assertGreaterEqual(scratch.numel(), plan.scratch_bytes)
            self.assertGreaterEqual(memory.numel(), plan.workspace_bytes - plan.scratch_bytes)
            bind(plan, memory, scratch)

        libattn.torch.configure(ignore_environment=True, backend="cpu_simd")
        generator = torch.Generator().manual_seed(5)
        with unittest.mock.patch.object(libattn.Plan, "bind_workspace", watched):
            for heads, rows in ((8, 300), (4, 70), (2, 7)):
                q, k, v = (torch.randn(1, heads, rows, 64, generator=generator) for _ in range(3))
                out = libattn.torch.attend(q, k, v, scale=0.125, causal=True)
                self.assertLess(worst_of_batch(out, q, k, v, causal(rows, rows), 0.125), 2e-5)
        self.assertEqual(len(taken), 3)
        self.assertEqual(len(set(taken)), 1)


class Pages(unittest.TestCase):
    def test_two_layouts_of_one_memory(self) -> None:
        generator = torch.Generator().manual_seed(4)
        memory = torch.zeros(2, 4 * 2 * 8 * 16)
        shape = (4, 8, 2, 16)
        for backend in each_backend():
            for order in ((0, 1, 2), (0, 2, 1), (0, 1, 2)):  # slots before heads, heads before slots
                pages = [part.view(*(shape[i] for i in order), 16).permute(*order, 3) for part in memory]
                k, v = (torch.randn(6, 2, 16, generator=generator) for _ in range(2))
                for part, rows in zip(pages, (k, v)):
                    part[1, :5] = rows[:5]
                q = torch.randn(1, 2, 16, generator=generator)
                out = libattn.torch.attend_pages(q, k[5:], v[5:], *pages, torch.tensor([[1]]).int(),
                                                 torch.tensor([6]).int(), scale=0.25)
                self.assertLess(worst(out, attention(q, k, v, 0.25, causal(1, 6))[0]), 2e-5, (backend, order))

    def test_pages_that_do_not_fit(self) -> None:
        """After pages that do, at other addresses and at theirs."""
        libattn.torch.configure(ignore_environment=True)
        rows, pages, table, lengths = torch.zeros(2, 2, 16), torch.zeros(2, 4, 8, 2, 16), torch.tensor([[0], [1]]), torch.tensor([3, 4])
        good = {"k_pages": pages[0], "v_pages": pages[1], "block_table": table, "seq_lens": lengths}
        libattn.torch.attend_pages(rows, rows, rows, **good, scale=0.25)
        for wrong, text in (({"k_pages": pages[0].bfloat16()}, "view: .*bf16.*; the layer's cache has f32"),
                            ({"v_pages": pages[1].double()}, "view: .*float64.*; the layer's cache has f32"),
                            ({"k_pages": pages[0, :, :, :1]}, "num_heads: .*1 heads of 16"),
                            ({"k_pages": pages[0, ..., :8]}, "num_heads: .*2 heads of 8"),
                            ({"k_pages": torch.zeros(4, 8, 2, 32)[..., ::2]}, "view: .*contiguous last dimension is needed"),
                            ({"seq_lens": lengths[:1]}, r"seq_lens: \[1\]; one for each row of q, \[2\], is needed"),
                            ({"block_table": table.float()}, r"block_table: torch.float32 \[2, 1\]; int32 of 2 dimensions is needed"),
                            ({"seq_lens": lengths.float()}, r"seq_lens: torch.float32 \[2\]; int32 of 1 dimensions is needed"),
                            ({"block_table": table[:1]}, r"block_table: \[1, 1\] in pages of 8; a row for each of 2 requests"),
                            ({"seq_lens": lengths + 5}, r"block_table: \[2, 1\] in pages of 8; .*of up to 9 keys, is needed")):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, text):
                libattn.torch.attend_pages(rows, rows, rows, **{**good, **wrong}, scale=0.25)


class AgainInPython(Again):
    """The same without them."""

    def setUp(self) -> None:
        self.enterContext(unittest.mock.patch.object(dense, "_again", None))


@unittest.skipIf(dense._again is None, "built without Python's headers, or torch has no exchange table")
class CallsInC(unittest.TestCase):
    def test_which_calls(self) -> None:
        """Those that differ from an earlier one in addresses alone, while its batch is planned and its thread runs."""
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 5, 16)
        given: dict[str, Any] = {"scale": 0.25, "causal": True}

        def in_c(q: Any = q, k: Any = k, v: Any = None, *, scale: Any = 0.25, causal: Any = True, window: Any = None, soft_cap: Any = 0.0,
                 kind: Any = "decoder", index: Any = 0) -> Any:
            return dense._again(q, k, k if v is None else v, scale, causal, window, soft_cap, kind, index)

        self.assertIsNone(in_c())
        wanted = libattn.torch.attend(q, k, k, **given)
        self.assertTrue(torch.equal(in_c(), wanted))
        self.assertTrue(torch.equal(in_c(q.clone(), k.clone(), k.clone()), wanted))
        strided = torch.randn(2, 5, 2, 16).transpose(1, 2).copy_(k)
        for other in ({"q": q[:, :2]}, {"k": k[:, :, :4]}, {"k": strided}, {"k": strided, "v": strided}, {"q": q.double()}, {"q": q.numpy()},
                      {"q": torch.nn.Parameter(q)}, {"q": q[0]}, {"scale": 0.5}, {"causal": False}, {"window": (2, 0)}, {"soft_cap": 1.0},
                      {"kind": "encoder_only"}, {"index": 1}, {"window": torch.zeros(2)}):
            self.assertIsNone(in_c(**other), list(other))
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(in_c()))
        thread.start()
        thread.join()
        self.assertEqual(found, [None])
        libattn.torch.attend(q, k[:, :, :3], k[:, :, :3], **given)  # takes the other place
        self.assertIsNotNone(in_c())
        libattn.torch.attend(q, k[:, :, :4], k[:, :, :4], **given)
        libattn.torch.attend(q, k[:, :, :3], k[:, :, :3], **given)
        self.assertIsNone(in_c())
        self.assertTrue(torch.equal(libattn.torch.attend(q, k, k, **given), wanted))
        libattn.torch.configure(ignore_environment=True)
        self.assertIsNone(in_c())

    def test_what_is_kept_is_dropped(self) -> None:
        libattn.torch.configure(ignore_environment=True)
        q = torch.randn(1, 2, 1, 16)
        for length in range(1, 30):  # more than are kept
            k = torch.randn(1, 2, length, 16)
            for _ in range(3):
                libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        bounds = [weakref.ref(call.bound) for call in libattn.torch.store.here().calls.values()]
        out = weakref.ref(libattn.torch.attend(q, k, k, scale=0.25, causal=True))
        self.assertIsNone(out())
        libattn.torch.configure(ignore_environment=True)
        libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        gc.collect()
        self.assertEqual([bound() for bound in bounds], [None] * len(bounds))

    def test_a_thread_that_ends(self) -> None:
        """Its plans end with it, next to those of threads that run."""
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 4, 16)
        wanted = libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        bounds: list[Any] = []

        def work() -> None:
            for length in (1, 2, 3):
                k = torch.randn(1, 2, length, 16)
                for _ in range(2):
                    libattn.torch.attend(q, k, k, scale=0.25, causal=True)
            bounds.extend(weakref.ref(call.bound) for call in libattn.torch.store.here().calls.values())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        gc.collect()
        self.assertEqual((len(bounds), [bound() for bound in bounds if bound() is not None]), (3, []))
        self.assertTrue(torch.equal(dense._again(q, k, k, 0.25, True, None, 0.0, "decoder", 0), wanted))

    def test_another_thread_configures(self) -> None:
        """While a call is being kept: it is not."""
        libattn.torch.configure(ignore_environment=True)
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 4, 16)
        keep = dense._Call.keep

        def late(call: Any, *args: Any) -> None:
            thread = threading.Thread(target=libattn.torch.configure, kwargs={"ignore_environment": True})
            thread.start()
            thread.join()
            keep(call, *args)

        for kept in (late, keep):
            with unittest.mock.patch.object(dense._Call, "keep", kept):
                libattn.torch.attend(q, k, k, scale=0.25, causal=True)
            self.assertEqual(dense._again(q, k, k, 0.25, True, None, 0.0, "decoder", 0) is None, kept is late)

    def test_a_capture_is_refused(self) -> None:
        """In C, with a stand-in for the GPU: an exchange table that says so of a CPU's tensors."""
        libattn.torch.configure(ignore_environment=True)
        real = tensors.exchange_table(torch.Tensor)
        view = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)

        def there(tensor: Any, address: int) -> int:
            found = view(real.view)(tensor, address)
            libattn.abi.attn_tensor.from_address(address).device.type = int(libattn.DeviceType.CUDA)
            return found

        def stream(kind: int, number: int, address: int) -> int:
            ctypes.c_void_p.from_address(address).value = None
            return 0

        fake = type(real).from_buffer_copy(real)
        calls = view(there), ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)(stream)
        fake.view, fake.stream = (ctypes.cast(call, ctypes.c_void_p).value for call in calls)
        self.addCleanup(in_c.c.setup, torch.Tensor, ctypes.addressof(real))
        in_c.c.setup(torch.Tensor, ctypes.addressof(fake))
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 4, 16)
        wanted = libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        given = q, k, k, 0.25, True, None, 0.0, "decoder", 0
        self.assertTrue(torch.equal(dense._again(*given), wanted))
        with unittest.mock.patch.object(store_module, "capturing", lambda device: True), \
                self.assertRaisesRegex(libattn.UnsupportedError, "capture: a call that plans its batch when it runs"):
            dense._again(*given)
        self.assertTrue(torch.equal(dense._again(*given), wanted))

    @unittest.skipIf(shutil.which("cc") is None or importlib.util.find_spec("setuptools") is None, "no compiler or no setuptools")
    def test_an_installation_of_the_folder(self) -> None:
        """What pip installs from a checkout has them, too."""
        with tempfile.TemporaryDirectory() as folder:
            def run(*arguments: str, **variables: str) -> str:
                return subprocess.run([sys.executable, *arguments], cwd=PACKAGE, env={**os.environ, **variables}, check=True, text=True,
                                      capture_output=True).stdout

            run("setup.py", "--quiet", "build", "--build-base", f"{folder}/build", "--build-lib", f"{folder}/site")
            self.assertEqual([file.name for file in Path(folder, "site/libattn").glob("*.so")], ["libattn_call.abi3.so"])
            library = Path(os.environ["ATTN_TEST_BUILD"], "core")
            self.assertEqual(run("-c", "from libattn.torch import call; print(call.c.__file__)", PYTHONPATH=f"{folder}/site",
                                 LD_LIBRARY_PATH=str(library)).strip(), f"{folder}/site/libattn/libattn_call.abi3.so")
            # A Python without the interpreter's lock, which setuptools refuses such modules for.
            run("-c", "import runpy, sysconfig; given = sysconfig.get_config_var; sysconfig.get_config_var = lambda name: "
                "1 if name == 'Py_GIL_DISABLED' else given(name); runpy.run_path('setup.py')", "--quiet", "bdist_wheel", "--bdist-dir",
                f"{folder}/wheel", "--dist-dir", folder, "build", "--build-base", f"{folder}/other")
            self.assertEqual(len(list(Path(folder).glob("*-none-any.whl"))), 1)

    def test_one_of_another_release(self) -> None:
        """Next to the library: it is not taken."""
        with unittest.mock.patch.object(in_c, "_REVISION", 1):
            self.assertIsNone(in_c._load())

    def test_a_run_that_fails(self) -> None:
        """NaN in a query, under validation: the second call is C's, and Python finds the reason."""
        self.addCleanup(libattn.torch.configure, ignore_environment=True)
        self.enterContext(unittest.mock.patch.dict(os.environ, {"ATTN_VALIDATE": "1"}))
        libattn.torch.configure()
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 4, 16)
        libattn.torch.attend(q, k, k, scale=0.25, causal=True)
        q[0, 1, 0, 3] = torch.nan
        with self.assertRaisesRegex(libattn.AttnError, r"q\[0, 1, 3\] is NaN"):
            libattn.torch.attend(q, k, k, scale=0.25, causal=True)

    def test_many_threads(self) -> None:
        libattn.torch.configure(ignore_environment=True, num_threads=1)
        failed: list[Any] = []

        def work(seed: int) -> None:
            generator = torch.Generator().manual_seed(seed)
            for turn in range(300):
                length = turn % 3 + 4
                q, k = torch.randn(1, 4, 1, 16, generator=generator), torch.randn(1, 2, length, 16, generator=generator)
                out = libattn.torch.attend(q, k, k, scale=0.25, causal=True)
                error = worst_of_batch(out, q, k, k, causal(1, length))
                if not error < 2e-5:
                    failed.append((seed, turn, error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
