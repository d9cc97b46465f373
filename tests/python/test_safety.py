# SPDX-License-Identifier: Apache-2.0
"""What Python's callers can get wrong ends in an error that names it, and never in memory of someone else."""
import contextlib
import copy
import ctypes
import gc
import io
import os
import pickle
import subprocess
import sys
import threading
import unittest
import unittest.mock
import weakref

import numpy as np
import torch

import libattn
import libattn.torch
import random_layers
from common import BACKENDS, attention, bound_layer, causal, planned, worst
from libattn import abi, check, extensions, tensors

HQ, HK, D, BLOCK = 4, 2, 32, 16
Invalid = libattn.InvalidArgumentError


def desc(name: str = "a", **fields: object) -> libattn.LayerDesc:
    return libattn.LayerDesc(name, HQ, HK, D, **{"block_size": BLOCK, **fields})


class Lifetimes(unittest.TestCase):
    def test_a_derived_plan_keeps_what_its_source_read(self) -> None:
        """The arrays of the first batch are the plan's own as long as it may run."""
        runtime = libattn.Runtime(ignore_environment=True)
        descs = [desc("a"), desc("b", window=(31, 0))]
        model = runtime.bind(runtime.select(descs, backend="cpu_ref"))
        for layer in model.layers:
            layer.bind_kv(libattn.allocate(4 * layer.kv_spec.padded_page_bytes, zero=True), 4)
        self.assertEqual(len(model.groups), 2)
        plans = [model.plan(group, max_num_reqs=4, max_num_tokens=64) for group in range(2)]
        for plan in plans:
            plan.bind_workspace(libattn.allocate(plan.workspace_bytes))
        starts, lens = (np.array(x, np.int32) for x in ([0, 20], [20]))
        alive = [weakref.ref(starts), weakref.ref(lens)]
        slots = list(range(20))
        plans[0].update(libattn.Batch(starts, lens, [[0, 1]], slots))
        plans[1].update_block_table(plans[0], libattn.Batch(starts.copy(), lens.copy(), [[2, 3]], [s + 32 for s in slots]))
        plans[0].update(libattn.Batch([0, 1], [1], [[0]], [0]))
        del starts, lens
        gc.collect()
        self.assertTrue(all(ref() is not None for ref in alive))
        q, k, v = (torch.randn(20, heads, D) for heads in (HQ, HK, HK))
        out = torch.empty_like(q)
        plans[1].run(model.layers[1], q, k, v, out)
        self.assertLess(worst(out, attention(q, k, v, D**-0.5, causal(20, 20, 32))[0]), 2e-5)
        plans[1].update(libattn.Batch([0, 1], [1], [[0]], [0]))
        gc.collect()
        self.assertTrue(all(ref() is None for ref in alive))

    def test_a_descriptor_keeps_the_memory_of_its_tensor(self) -> None:
        """By the exchange table or a capsule; the tensor itself may get other memory, as a loader's parameters do."""
        for table in (tensors.exchange(torch.Tensor), None):
            with unittest.mock.patch.dict(tensors._exchanges, {torch.Tensor: table}):
                array = np.full(6, 7, np.int32)
                source, alive = torch.from_numpy(array).view(2, 3).mT, weakref.ref(array)
                found = libattn.Tensor(source)
                source.data = torch.zeros(5, dtype=torch.int32)
                del array
                gc.collect()
                self.assertIsNotNone(alive())
                self.assertEqual((found.shape, found.strides, found.dtype, found.read_only), ((3, 2), (1, 3), "int32", False))
                self.assertEqual(ctypes.c_int32.from_address(found.data + 20).value, 7)
                del found, source  # a view holds its base
                gc.collect()
                self.assertIsNone(alive())

    def test_owners_are_not_copied(self) -> None:
        model, layer = bound_layer(desc(), "cpu_ref", 2)
        assignment = model.runtime.select([desc()])
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        device = model.runtime.open()
        for owner in (model.runtime, assignment, model, layer, plan, plan.owner, device, device.stream()):
            for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, type(owner).__name__):
                    duplicate(owner)
        gc.collect()
        plan.update(libattn.Batch([0, 1], [1], [[0]], [0]))

    def test_closed_twice_and_used_after_it(self) -> None:
        model, layer = bound_layer(desc(), "cpu_ref", 2)
        runtime, memory = model.runtime, model.runtime.open().allocate(256)
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        assignment = runtime.select([desc()])
        for owned in (runtime, assignment, model, plan):
            owned.close()
            owned.close()
        uses = (lambda: runtime.plugins, lambda: runtime.best_device(), lambda: runtime.open(), lambda: assignment.choice(0),
                lambda: assignment.export(), lambda: model.plan(0, max_num_reqs=1, max_num_tokens=1), lambda: model.groups,
                lambda: layer.kv_spec, lambda: layer.caches, lambda: layer.group, lambda: plan.workspace_bytes,
                lambda: plan.graph_level, lambda: plan.split, lambda: plan.update(libattn.Batch([0])),
                lambda: plan.run(layer, None, None, None, None))
        for use in uses:
            with self.assertRaisesRegex(libattn.OrderError, "is closed"):
                use()
        self.assertEqual(memory.nbytes, 256)  # the runtime lives as long as it
        ctypes.memset(memory.data, 1, 256)

    def test_a_layer_of_another_model(self) -> None:
        (model, _), (_, other) = (bound_layer(desc(), "cpu_ref", 2) for _ in range(2))
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        other.model.close()
        with self.assertRaisesRegex(Invalid, "layer: .*another model"):
            plan.run(other, *(torch.zeros(1, n, D) for n in (HQ, HK, HK, HQ)))

    def test_closed_while_threads_use_it(self) -> None:
        """A call that has begun ends well; a later one is refused."""
        for _ in range(20):
            runtime = libattn.Runtime(ignore_environment=True)
            refused = []

            def use(runtime: libattn.Runtime = runtime, refused: list[int] = refused) -> None:
                try:
                    while True:
                        runtime.select([desc()]).choice(0)
                except libattn.OrderError as error:
                    refused.append(error.status)

            threads = [threading.Thread(target=use) for _ in range(3)]
            for thread in threads:
                thread.start()
            runtime.close()
            for thread in threads:
                thread.join()
            self.assertEqual(refused, [libattn.Status.ORDER] * 3)


class Lengths(unittest.TestCase):
    def test_block_tables_that_are_too_narrow(self) -> None:
        """One request or several, a list, a tensor, or columns of a wider tensor."""
        for backend in BACKENDS:
            model, layer = bound_layer(desc(), backend, 8)
            q = torch.zeros(1, HQ, D)
            for table in ([[0]], np.zeros((1, 1), np.int32), torch.zeros(1, 9).int()[:, :2], torch.zeros(9, 1).int().T[:, :2]):
                with self.assertRaisesRegex(Invalid, "block_table"):
                    planned(model, libattn.Batch([0, 1], [100], table, [0]))
            wide = torch.zeros(3, 9).int()
            for rows in (1, 3):
                with self.assertRaisesRegex(Invalid, "block_table: rows of 2 entries|block_table_stride: rows of 2 entries"):
                    planned(model, libattn.Batch(list(range(rows + 1)), [100] * rows, wide[:rows, :2], [0] * rows))
                planned(model, libattn.Batch(list(range(rows + 1)), [20] * rows, wide[:rows, :2], [0] * rows))
            planned(model, libattn.Batch([0, 1], [20], [[0, 1]], [19])).run(layer, q, q[:, :HK], q[:, :HK], q.clone())

    def test_parameters(self) -> None:
        cases = [(desc(has_sinks=True), {"sinks": torch.zeros(HQ - 1)}, "sinks: 3 numbers"),
                 (desc(alibi="linear"), {"alibi_slopes": [1.0]}, "alibi_slopes: 1 numbers"),
                 (desc(kv_dtype="fp8_e4m3", k_scale_form="per_head", v_scale_form="per_head"),
                  {"k_scale": torch.ones(1), "v_scale": torch.ones(HK)}, "k_scale: 1 numbers; layer 'a' needs 2"),
                 (desc(kv_dtype="int8_kv"), {"extensions": [extensions.kv_quant_params(v_channel_scale=torch.ones(HK, D - 1))]},
                  "v_channel_scale: 62 numbers; layer 'a' needs 64"),
                 (desc(kv_dtype="int4_per_token_head"),
                  {"extensions": [extensions.kv_quant_params(torch.ones(D), torch.ones(1))]}, "hadamard_signs_v: 1 numbers")]
        for layer_desc, params, text in cases:
            _, layer = bound_layer(layer_desc, "cpu_ref", 2)
            with self.assertRaisesRegex(Invalid, text):
                layer.bind_params(**params)
        gdn = libattn.LayerDesc("g", 2, 2, 16, kind="gdn", head_size_v=16, gdn=libattn.GdnDesc(2, 4, 16, 16))
        model = libattn.Runtime(ignore_environment=True)
        layer = model.bind(model.select([gdn])).layers[0]
        for weights in ((torch.ones(3), torch.ones(4)), (torch.ones(4), torch.ones(3))):
            with self.assertRaisesRegex(Invalid, "(a_log|dt_bias): 3 numbers; layer 'g' needs 4"):
                layer.bind_params(extensions=[extensions.gdn_weights(*weights)])

    def test_batches_and_runs(self) -> None:
        short = torch.zeros(1).int()
        for extension, text in ((extensions.gdn_batch(short), "state_slots: 1 numbers; the batch needs 2"),
                                (extensions.gdn_batch(torch.zeros(2).int(), initial_slots=short), "initial_slots: 1 numbers"),
                                (extensions.gdn_batch(torch.zeros(2).int(), num_accepted_tokens=short), "num_accepted_tokens"),
                                (extensions.context_parallel_batch(short), "local_seq_lens: 1 numbers; the batch needs 2")):
            with self.assertRaisesRegex(Invalid, text):
                libattn.Batch([0, 1, 2], [1, 1], extensions=[extension])
        model, layer = bound_layer(desc(rope="neox"), "cpu_ref", 2)
        plan = planned(model, libattn.Batch([0, 4], [4], [[0]], [0, 1, 2, 3]))
        rope = extensions.rope_io(torch.arange(3), torch.ones(4, D))
        with self.assertRaisesRegex(Invalid, "positions: 3 numbers; the batch needs 4"):
            plan.run(layer, *(torch.zeros(4, n, D) for n in (HQ, HK, HK, HQ)), extensions=[rope])


class Numbers(unittest.TestCase):
    def test_no_number_wraps(self) -> None:
        """Batches, plans, runs, descriptions, transfers, options and arguments of functions."""
        model, layer = bound_layer(desc(), "cpu_ref", 2)
        runtime, big = model.runtime, 2**32 + 8
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        tensors = [torch.zeros(1, n, D) for n in (HQ, HK, HK, HQ)]
        batch = libattn.Batch([0, 1], [1], [[0]], [0])
        calls = {
            "num_tokens": lambda: libattn.Batch([0, 8], num_tokens=big), "max_seq_len": lambda: libattn.Batch([0], max_seq_len=big),
            "flags": lambda: libattn.Batch([0], flags=big), "seq_lens": lambda: libattn.Batch([0, 1], [big]),
            "block_table": lambda: libattn.Batch([0, 1], [1], [[big]]),
            "slot_mapping": lambda: libattn.Batch([0, 1], [1], [[0]], [2**64]),
            "max_num_reqs": lambda: model.plan(0, max_num_reqs=big, max_num_tokens=8),
            "plan_create": lambda: model.plan(big, max_num_reqs=8, max_num_tokens=8),
            "flags ": lambda: plan.run(layer, *tensors, flags=big), "stream": lambda: plan.run(layer, *tensors, stream=2**64 + 8),
            "head_size_v": lambda: runtime.select([desc(head_size_v=big)]), "num_threads": lambda: libattn.Runtime(num_threads=big),
            "block_sizes": lambda: runtime.select([desc()], block_sizes=[big]),
            "kv_lora_rank": lambda: libattn.MlaDesc(big, 1, 1, 1).to_struct(),
            "id": lambda: runtime.select([desc()], device=("cuda", big)), "rotary_dim":
                lambda: extensions.rope_io(torch.arange(3), torch.ones(4, D), rotary_dim=big),
            "pairs": lambda: model.copy_blocks([(2**64, 0)]), "group": lambda: model.copy_blocks([(0, 1)], group=big),
            "num_actual_tokens": lambda: setattr(batch.struct, "num_actual_tokens", big),
            "soft_cap": lambda: runtime.select([desc(soft_cap=1e39)]),
            "layer_cache_spec": lambda: layer.call("layer_cache_spec", 2**32, None)}
        for field, call in calls.items():
            with self.assertRaisesRegex(Invalid, f"^INVALID_ARGUMENT: {field.strip()}: ", msg=field):
                call()
        self.assertEqual(batch.struct.num_actual_tokens, 1)
        with self.assertRaisesRegex(Invalid, "no_such: .*no such field"):
            batch.struct.no_such = 1
        self.assertEqual(libattn.Rows("int8").struct.dtype.code, abi.DtypeCode.INT)  # 0, as an enumeration
        self.assertEqual(libattn.Batch(np.array([0, 4]).astype(np.int32), num_tokens=np.int64(4)).struct.num_tokens, 4)


class Check(unittest.TestCase):
    def run_check(self, *arguments: str, **patched: object) -> tuple[int, str]:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), unittest.mock.patch.multiple(check, **patched) if patched else (
                contextlib.nullcontext()):
            return check.main(arguments), text.getvalue()

    def test_verdicts(self) -> None:
        """Good; bad where a backend computes something else; and nothing at all."""
        status, text = self.run_check("cpu_ref", CASES=check.CASES[1:2])
        self.assertEqual((status, text.splitlines()[-1][:29]), (0, "good: 2 agree with float64, 0"))
        wrong = check._attend
        status, text = self.run_check("cpu_ref", CASES=check.CASES[:1],
                                      _attend=lambda q, *rest: [x * 1.03 for x in wrong(q, *rest)])
        self.assertEqual((status, text.splitlines()[-1][:4]), (1, "bad:"))
        self.assertEqual(self.run_check("nothing")[0], 2)


class Fuzz(unittest.TestCase):
    def test_no_input_ends_the_interpreter(self) -> None:
        """``ATTN_FUZZ_SECONDS`` for longer."""
        seconds = os.environ.get("ATTN_FUZZ_SECONDS", "2")
        for seed in range(2):
            ran = subprocess.run([sys.executable, "fuzz.py", str(seed), seconds], capture_output=True, text=True)
            self.assertEqual(ran.returncode, 0, f"seed {seed}: {ran.stderr[-2000:]}")

    def test_random_layers_are_right(self) -> None:
        for seed, backend in enumerate(BACKENDS):
            self.assertEqual(random_layers.main(2 * seed + 1, float(os.environ.get("ATTN_FUZZ_SECONDS", "3")), backend), 0, backend)


class Extensions(unittest.TestCase):
    def test_one_object_in_two_batches(self) -> None:
        """Each batch has its own chain."""
        first, second = extensions.gdn_batch(torch.zeros(1).int()), extensions.context_parallel_batch()

        def chain(batch: libattn.Batch) -> list[int]:
            found, at = [], batch.struct.next
            while at:
                header = abi.attn_ext.from_address(at)
                found.append(header.id)
                at = header.next
            return found

        batches = [libattn.Batch([0, 1], extensions=given) for given in ([first, second], [first], [second, first])]
        gc.collect()
        ids = abi.ExtId.BATCH_RECURRENT, abi.ExtId.BATCH_CONTEXT
        self.assertEqual([chain(batch) for batch in batches], [[*ids], [ids[0]], [*reversed(ids)]])
        with self.assertRaisesRegex(Invalid, "extensions: "):
            libattn.Batch([0, 1], extensions=[torch.zeros(1)])


class Errors(unittest.TestCase):
    """Texts that a person understands."""

    def test_gradients_are_refused(self) -> None:
        q, k = torch.zeros(1, HQ, 3, D, requires_grad=True), torch.zeros(1, HK, 3, D)
        sinks = torch.zeros(HQ, requires_grad=True)
        for given, more in (((q, k, k), {}), ((q.detach(), k, k), {"sinks": sinks})):
            with self.assertRaisesRegex(libattn.UnsupportedError, "gradient.*no_grad"):
                libattn.torch.attend(*given, scale=1.0, causal=True, **more)
            with torch.no_grad():
                libattn.torch.attend(*given, scale=1.0, causal=True, **more)
        model, layer = bound_layer(desc(), "cpu_ref", 2)
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        rows = [torch.zeros(1, n, D) for n in (HQ, HK, HK, HQ)]
        with self.assertRaisesRegex(libattn.UnsupportedError, "gradient.*detach"):
            plan.run(layer, rows[0].requires_grad_(), *rows[1:])

    def test_ranks_and_types(self) -> None:
        q, k = torch.zeros(HQ, 3, D), torch.zeros(HK, 3, D)
        with self.assertRaisesRegex(Invalid, r"q: \[4, 3, 32\]; \[B, Hq, S, D\] is needed"):
            libattn.torch.attend(q, k, k, scale=1.0, causal=True)
        model, layer = bound_layer(desc(), "cpu_ref", 2)
        plan = planned(model, libattn.Batch([0, 1], [1], [[0]], [0]))
        with self.assertRaisesRegex(Invalid, r"^INVALID_ARGUMENT: q: .*q is \[1, 4, 32\] float64; \[1 or more, 4, 32\] float32, the last dimension contiguous, is needed$"):
            plan.run(layer, *(torch.zeros(1, n, D).double() for n in (HQ, HK, HK, HQ)))
        for what in ([1.0], object(), "q"):
            with self.assertRaisesRegex(Invalid, "tensor: .*DLPack"):
                libattn.Tensor(what)
        with self.assertRaisesRegex(Invalid, "sinks: .*float64.*f32 is needed"):
            bound_layer(desc(has_sinks=True), "cpu_ref", 2, sinks=torch.zeros(HQ).double())

    def test_devices(self) -> None:
        runtime = libattn.Runtime(ignore_environment=True)
        for device in ("cpu", "cpu:0", ("cpu", 0), torch.device("cpu"), None):
            self.assertEqual(runtime.select([desc()], device=device).choice(0).status, 0)
        for device in ("cuda:x", "gpu", "cuda:-1", ("cuda", -1), 7.5, ("cuda", "0")):
            with self.assertRaisesRegex(Invalid, "device: .*allowed are cpu, cuda, rocm, xpu"):
                runtime.select([desc()], device=device)
        for hip, name in ((None, "cuda"), ("6.4", "rocm")):  # torch calls both cuda
            with unittest.mock.patch.object(torch.version, "hip", hip), self.assertRaisesRegex(libattn.AttnError, f"no {name}:0"):
                runtime.select([desc()], device=torch.device("cuda", 0))
