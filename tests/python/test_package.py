# SPDX-License-Identifier: Apache-2.0
"""Runtime, selection, binding and steps through the package, held against attention as it is defined."""
import contextlib
import ctypes
import dataclasses
import gc
import itertools
import os
import threading
import time
import types
import unittest
import unittest.mock

import numpy as np
import torch

import libattn
import libattn.torch
from common import BACKENDS, attention, bound_layer, causal, peaked, planned, worst

HQ, HK, D, BLOCK = 8, 2, 64, 16


def paged_batch(lengths: list[tuple[int, int]], blocks_per_request: int) -> tuple[libattn.Batch, list[list[int]]]:
    """A batch of (queries, keys) whose pages lie in reverse order."""
    starts, tables, slots = [0], [], []
    total = len(lengths) * blocks_per_request
    for r, (queries, keys) in enumerate(lengths):
        table = [total - 1 - (r * blocks_per_request + i) for i in range(blocks_per_request)]
        slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(keys - queries, keys)]
        starts.append(starts[-1] + queries)
        tables.append(table)
    return libattn.Batch(starts, [keys for _, keys in lengths], tables, slots), tables


class Describing(unittest.TestCase):
    def setUp(self) -> None:
        self.runtime = libattn.Runtime(ignore_environment=True)

    def test_uninstalled_library_is_found_without_a_variable(self) -> None:
        self.assertEqual(os.path.realpath(self.runtime.api.path),
                         os.path.realpath(os.path.join(os.environ["ATTN_TEST_BUILD"], "core", "libattn.so.1")))
        self.assertTrue({"cpu_ref", "cpu_simd"} <= {p.name for p in self.runtime.plugins if p.status == 0})

    def test_a_library_that_is_not_there_or_another_one(self) -> None:
        for path in ("/nowhere/libattn.so.1", "/etc/passwd", "libm.so.6"):
            with self.assertRaisesRegex(libattn.AttnError, f"libattn.so.1: .*{os.path.basename(path)}.*; install .* or name the file"):
                libattn.Runtime(library=path)

    def test_devices_and_backends(self) -> None:
        self.assertIn((libattn.DeviceType.CPU, 0), [d.device for d in self.runtime.devices])
        names = [b.full_name for b in self.runtime.backends]
        self.assertIn("cpu_ref", names)
        self.assertTrue(any(n.startswith("cpu_simd@") for n in names))

    def test_reasons_name_field_value_and_support(self) -> None:
        """A cache type of other layers, which no backend serves here: every one of them says why."""
        found = self.runtime.select([libattn.LayerDesc("a", HQ, HK, D, kv_dtype="fp8_ds_mla")], keep_unserved=True)
        for phase in ("prefill", "decode"):
            verdicts = [v for v in found.verdicts(0, phase) if v.verdict != "other_device"]
            self.assertGreaterEqual(len(verdicts), 2)
            for verdict in verdicts:
                self.assertEqual(verdict.verdict, "unsupported")
                reason = next(r for r in verdict.reasons if r.field == "kv_dtype")
                self.assertIn("fp8_ds_mla", reason.asked)
                self.assertNotEqual(reason.supported, "")
            self.assertEqual(found.choice(0, phase).backend, "")
        self.assertIn("kv_dtype is fp8_ds_mla, supported: ", found.explain(0))

    def test_forced_backend_is_refused_with_the_c_text(self) -> None:
        layer = libattn.LayerDesc("layers.0", HQ, HK, D, q_scale_form=1)  # without a q_dtype
        with self.assertRaises(libattn.UnsupportedError) as caught:
            self.runtime.select([layer], backend="cpu_simd")
        self.assertEqual(caught.exception.status, libattn.Status.REFUSED)
        self.assertIn("layers.0", str(caught.exception))
        self.assertIn("q_dtype", str(caught.exception))

    def test_a_device_that_no_plugin_found_has_their_reasons(self) -> None:
        plugins = [types.SimpleNamespace(file=f"attn_{name}.so", reason=reason)
                   for name, reason in (("cpu_ref", ""), ("cuda_flash", "driver 525.60 is older than CUDA 13.0"))]
        with unittest.mock.patch.object(libattn.Runtime, "plugins", plugins), self.assertRaisesRegex(
                libattn.InvalidArgumentError, "there is no cuda:7 here; .*\n  attn_cuda_flash.so: driver 525.60 is older than CUDA 13.0$"):
            self.runtime.select([libattn.LayerDesc("layers.0", HQ, HK, D)], device=("cuda", 7))

    def test_a_vendors_code_is_refused_by_its_number(self) -> None:
        layer = libattn.LayerDesc("a", 2, 1, 64, block_size=16, kv_dtype=0x10007, kv_row_bytes=80, kv_row_bytes_v=72,
                                  kv_scale_bytes=2)
        with self.assertRaisesRegex(libattn.UnsupportedError, "kv_dtype 0x10007"):
            libattn.Runtime(ignore_environment=True, num_threads=1).select([layer])
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "kv_row_bytes is 80, .* the dtype is f16"):
            libattn.Runtime(ignore_environment=True, num_threads=1).select([dataclasses.replace(layer, kv_dtype="f16")])

    def test_unknown_backend_and_bad_values(self) -> None:
        with self.assertRaises(libattn.AttnError):
            self.runtime.select([libattn.LayerDesc("a", HQ, HK, D)], backend="no_such_backend")
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "head_size.*60"):
            self.runtime.select([libattn.LayerDesc("a", HQ, HK, 60)])
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "kv_dtype.*'fp9'.*fp8_e4m3"):
            self.runtime.select([libattn.LayerDesc("a", HQ, HK, D, kv_dtype="fp9")])

    def test_values_that_a_field_cannot_hold(self) -> None:
        """ctypes cuts them without a word."""
        layer = libattn.LayerDesc("a", HQ, HK, D)
        for change, text in ({"num_q_heads": 2**32 + HQ}, f"num_q_heads: {2**32 + HQ}"), ({"name": "a\0b"}, "name: b'a"):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, text):
                self.runtime.select([dataclasses.replace(layer, **change)])
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "backend: b'cpu_ref"):
            self.runtime.select([layer], backend="cpu_ref\0;")
        found = self.runtime.select([layer])
        for number in (2**32, -1, 1):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, f"layer: layer {number}; the assignment has 1"):
                found.choice(number)
            with self.assertRaisesRegex(libattn.InvalidArgumentError, f"layer: layer {number}; the assignment has 1"):
                found.verdicts(number)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "phase: 2; allowed are prefill, decode"):
            found.choice(0, 2)

    def test_export_and_import(self) -> None:
        layers = [libattn.LayerDesc(f"layers.{i}", HQ, HK, D) for i in range(3)]
        first = self.runtime.select(layers, backend="layers.0=cpu_simd;layers.1-2=cpu_ref")
        again = self.runtime.select(layers, import_text=first.export())
        self.assertEqual([first.choice(i).backend for i in range(3)], [again.choice(i).backend for i in range(3)])
        self.assertEqual([first.choice(i).backend.split("@")[0] for i in range(3)], ["cpu_simd", "cpu_ref", "cpu_ref"])
        self.assertEqual(first.choice(1).rule, "layers.1-2=cpu_ref")

    def test_order_of_calls(self) -> None:
        model, layer = bound_layer(libattn.LayerDesc("a", HQ, HK, D, block_size=BLOCK), "cpu_ref", 8)
        plan = model.plan(0, max_num_reqs=1, max_num_tokens=1)
        q = torch.zeros(1, HQ, D)
        with self.assertRaises(libattn.OrderError):
            plan.run(layer, q, q[:, :HK], q[:, :HK], q.clone())
        plan.close()
        model.close()
        with self.assertRaises(libattn.OrderError):
            layer.kv_spec


class Lifetimes(unittest.TestCase):
    def test_any_order(self) -> None:
        """Closed by hand in the wrong order, or dropped in a cycle: each handle outlives what was made of it."""
        for by_hand in (True, False):
            model, layer = bound_layer(libattn.LayerDesc("a", HQ, HK, D, block_size=BLOCK), "cpu_simd", 8)
            batch, _ = paged_batch([(4, 4)], 2)
            plan = planned(model, batch)
            q = torch.randn(4, HQ, D)
            if by_hand:
                model.runtime.close()
                model.close()
                plan.run(layer, q, q[:, :HK], q[:, :HK], q.clone())
                plan.close()
                with self.assertRaises(libattn.OrderError):
                    plan.run(layer, q, q[:, :HK], q[:, :HK], q.clone())
            model.cycle = [plan, model.runtime, model]
            del model, layer, plan
            gc.collect()


class Tensors(unittest.TestCase):
    def test_nothing_is_copied(self) -> None:
        for source in (torch.randn(4, 3, 8), np.zeros((4, 3, 8), np.float32), torch.randn(3, 4, 8).transpose(0, 1)):
            t = libattn.Tensor(source)
            data = source.data_ptr() if hasattr(source, "data_ptr") else source.ctypes.data
            self.assertEqual((t.data, t.shape, t.dtype, t.device), (data, (4, 3, 8), "f32", ("cpu", 0)))
        self.assertEqual(libattn.Tensor(torch.zeros(2, dtype=torch.bfloat16)).dtype, "bf16")
        self.assertEqual(libattn.Tensor(torch.randn(3, 4, 8).transpose(0, 1)).strides, (8, 32, 1))

    def test_owner_lives_as_long_as_the_view(self) -> None:
        view = libattn.Tensor(torch.full((1 << 16,), 3.0))
        torch.zeros(1 << 16)  # what would land in freed memory
        self.assertEqual(list((ctypes.c_float * 4).from_address(view.data)), [3.0] * 4)

    def test_read_only_numpy(self) -> None:
        source = np.zeros(4, np.float32)
        source.flags.writeable = False
        self.assertEqual(libattn.Tensor(source).data, source.ctypes.data)
        model, layer = bound_layer(libattn.LayerDesc("e", HQ, HQ, D, kind="encoder_only"), "cpu_ref")
        plan = planned(model, libattn.Batch([0, 3]))
        rows, out = np.ones((3, HQ, D), np.float32), np.zeros((3, HQ, D), np.float32)
        for given, error in ((rows, None), (out, "out: .*read-only")):
            given.flags.writeable = False
            with self.assertRaisesRegex(libattn.InvalidArgumentError, error) if error else contextlib.nullcontext():
                plan.run(layer, rows, rows, rows, out)
        self.assertTrue((out == 0).sum() == 0, "written while that was allowed, and not again")
        memory = np.zeros(1 << 16, np.uint8)
        memory.flags.writeable = False
        model, layer = bound_layer(libattn.LayerDesc("a", HQ, HK, D, block_size=BLOCK), "cpu_ref", 1)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "memory: .*read-only"):
            layer.bind_kv(memory, 1)

    def test_wrong_dtype_names_the_tensor(self) -> None:
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "slot_mapping.*int32.*int64"):
            libattn.Batch([0, 1], [1], [[0]], torch.zeros(1, dtype=torch.int32))


class Steps(unittest.TestCase):
    def compare(self, backend: str, desc: libattn.LayerDesc, window: int = 0, **params: torch.Tensor) -> None:
        """Prefill, then a mixed batch whose requests go on; every element of both."""
        generator = torch.Generator().manual_seed(7)
        per_request = 4
        model, layer = bound_layer(desc, backend, 3 * per_request, **params)
        keys = [peaked(per_request * BLOCK, HK, D, generator=generator) for _ in range(3)]
        values = [torch.randn(per_request * BLOCK, HK, D, generator=generator) for _ in range(3)]
        for lengths in ([(17, 17), (30, 30), (1, 1)], [(1, 18), (20, 50), (2, 3)]):
            batch, _ = paged_batch(lengths, per_request)
            plan = planned(model, batch)
            q = torch.cat([peaked(n, HQ, D, generator=generator) for n, _ in lengths])
            k = torch.cat([keys[r][n - m:n] for r, (m, n) in enumerate(lengths)])
            v = torch.cat([values[r][n - m:n] for r, (m, n) in enumerate(lengths)])
            out, lse = torch.empty_like(q), torch.empty(HQ, len(q))
            plan.run(layer, q, k, v, out, lse)
            at = 0
            for r, (queries, length) in enumerate(lengths):
                expected, expected_lse = attention(q[at:at + queries], keys[r][:length], values[r][:length], D**-0.5,
                                                   causal(queries, length, window), desc.soft_cap, params.get("sinks"))
                self.assertLess(worst(out[at:at + queries], expected), 2e-5, (backend, lengths, r))
                self.assertLess(float((lse[:, at:at + queries] - expected_lse).abs().max()), 2e-5)
                at += queries

    def test_paged(self) -> None:
        for backend in BACKENDS:
            for extra in ({}, {"window": (9, 0)}, {"soft_cap": 5.0}, {"has_sinks": True}):
                with self.subTest(backend=backend, **extra):
                    desc = libattn.LayerDesc("a", HQ, HK, D, block_size=BLOCK, needs_lse=True, **extra)
                    self.compare(backend, desc, 10 if "window" in extra else 0,
                                 **{"sinks": torch.linspace(-3, 6, HQ)} if "has_sinks" in extra else {})

    def test_longest_requests(self) -> None:
        """The last tokens that an int32 counts, over a table whose entries before the window are read by none."""
        generator, block, window, length = torch.Generator().manual_seed(6), 1024, 100, 2**31 - 1
        for backend, queries, dtype in itertools.product(BACKENDS, (1, 70), ("f32", "bf16")):
            model, layer = bound_layer(libattn.LayerDesc("l", HQ, HK, D, block_size=block, dtype=dtype, window=(window - 1, 0)), backend, 1)
            keys = queries + window - 1
            table = torch.full((1, -(-length // block)), -1, dtype=torch.int32)
            table[0, -1] = 0
            kind = getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[dtype])
            q, k = (peaked(keys, heads, D, generator=generator).to(kind) for heads in (HQ, HK))
            v = torch.randn(keys, HK, D, generator=generator).to(kind)
            slots = torch.arange(length - keys, length) % block
            plan = planned(model, libattn.Batch([0, keys], [length], table, slots), max_seq_len=length)
            plan.run(layer, None, k, v, None, flags=libattn.NO_ATTEND)
            plan.update(libattn.Batch([0, queries], [length], table))
            out = torch.empty_like(q[:queries])
            plan.run(layer, q[:queries], None, None, out)
            expected, _ = attention(q[:queries], k, v, D**-0.5, causal(queries, keys, window))
            self.assertLess(worst(out, expected), 2e-5 if dtype == "f32" else 5e-2, f"{backend}, {queries} queries in {dtype}")

    def test_error_of_a_run_names_the_tensor(self) -> None:
        model, layer = bound_layer(libattn.LayerDesc("e", HQ, HQ, D, kind="encoder_only"), "cpu_ref")
        plan = planned(model, libattn.Batch([0, 4]))
        q = torch.zeros(4, HQ, D)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "^INVALID_ARGUMENT: k: "):
            plan.run(layer, q, q.half(), q, q.clone())

    def test_other_threads_run_during_a_step(self) -> None:
        """A step releases the interpreter's lock: a Python thread counts while a slow one runs."""
        model, layer = bound_layer(libattn.LayerDesc("e", HQ, HQ, D, kind="encoder_only"), "cpu_ref")
        rows = 700
        plan = planned(model, libattn.Batch([0, rows]))
        q, out = torch.randn(rows, HQ, D), torch.empty(rows, HQ, D)
        ticks, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.0005)

        thread = threading.Thread(target=count)
        thread.start()
        begin = ticks[0]
        plan.run(layer, q, q, q, out)
        during = ticks[0] - begin
        stop.set()
        thread.join()
        self.assertGreater(during, 20)

    def test_overhead_of_a_step(self) -> None:
        """Plan and run with descriptors made once, and torch's calls of a step that is planned; docs/engines.md states them."""
        model, layer = bound_layer(libattn.LayerDesc("a", 1, 1, 8, block_size=BLOCK), "cpu_simd", 2)
        batch, _ = paged_batch([(1, 1)], 2)
        plan = planned(model, batch)
        q, out = libattn.Tensor(torch.zeros(1, 1, 8)), libattn.Tensor(torch.zeros(1, 1, 8))
        libattn.torch.configure(ignore_environment=True, backend="cpu_simd")
        t = torch.zeros(1, 1, 1, 8)
        calls = {"plan": lambda: plan.update(batch), "run": lambda: plan.run(layer, q, q, q, out),
                 "attend": lambda: libattn.torch.attend(t, t, t, scale=1.0, causal=True),
                 "operator": lambda: torch.ops.libattn.attend(t, t, t, None, None, 1.0, True, None, 0.0, "decoder", 0),
                 "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(t, t, t)}
        times = dict.fromkeys(calls, float("inf"))
        for _ in range(50):
            for name, call in calls.items():
                begin = time.perf_counter()
                for _ in range(50):
                    call()
                times[name] = min(times[name], (time.perf_counter() - begin) / 50)
        print(", ".join(f"{name} {seconds * 1e6:.1f} us" for name, seconds in times.items()), end=" ")
        self.assertLess(times["run"], 200e-6)
