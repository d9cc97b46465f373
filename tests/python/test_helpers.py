# SPDX-License-Identifier: Apache-2.0
"""What engines hand in besides the plain step: parts of a batch, views, quantized caches and outputs, rotary
embeddings, the scheduler's helpers. Held against attention as it is defined."""
import json
import os
import pathlib
import subprocess
import sys
import threading
import unittest
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

import libattn
import libattn.torch.ranks
from common import BACKENDS, attention, bound_layer, causal, one_layer, peaked, planned, worst, worst_of
from libattn import extensions

HQ, HK, D, BLOCK = 4, 2, 64, 16


def desc(**fields: object) -> libattn.LayerDesc:
    return libattn.LayerDesc("a", HQ, HK, D, **{"block_size": BLOCK, **fields})


def prompt(length: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (peaked(length, HQ, D, generator=generator), peaked(length, HK, D, generator=generator),
            torch.randn(length, HK, D, generator=generator))


def one_request(length: int, **fields: object) -> libattn.Batch:
    blocks = -(-length // BLOCK)
    return libattn.Batch([0, length], [length], [list(range(blocks))], list(range(length)), **fields)


def attended(rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], batch: libattn.Batch, extensions: Sequence[Any] = (),
             backend: str = "cpu_ref", **fields: object) -> torch.Tensor:
    """A step of a layer of these fields, over two blocks."""
    model, layer = bound_layer(desc(**fields), backend, 2)
    out = torch.empty_like(rows[0])
    planned(model, batch).run(layer, *rows, out, extensions=extensions)
    return out


class Workspace(unittest.TestCase):
    def test_gaps_are_refused(self) -> None:
        """Its bytes are those of the tensor's elements, which then lie side by side."""
        model, _ = bound_layer(desc(), "cpu_ref", 4)
        plan = model.plan(0, max_num_reqs=1, max_num_tokens=8)
        room = torch.zeros(2 * plan.workspace_bytes + 512, dtype=torch.uint8)
        for memory in (room[::2], room.numpy()[::2], room.view(2, -1).t()):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, "workspace: .* contiguous memory is needed"):
                plan.bind_workspace(memory)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "bytes"):
            plan.bind_workspace(libattn.allocate(256)[:plan.workspace_bytes - 1])

    def test_limits_decide_its_size(self) -> None:
        """The figures of docs/engine.md, in MB."""
        model, layer = one_layer(libattn.LayerDesc("a", 32, 8, 128, block_size=BLOCK), "cpu_simd", num_threads=2)
        layer.bind_kv(libattn.allocate(layer.kv_spec.padded_page_bytes), 1)
        for reqs, tokens, length, least, most in ((4, 4, 1024, 1, 1.5), (4, 64, 1024, 2, 2.6), (4, 4096, 1024, 3, 3.8),
                                                  (256, 8192, 32768, 34, 41)):
            plan = model.plan(0, max_num_reqs=reqs, max_num_tokens=tokens, max_seq_len=length)
            self.assertTrue(least < plan.workspace_bytes / 1e6 < most, (reqs, tokens, plan.workspace_bytes))
            self.assertLess(plan.workspace_bytes - plan.scratch_bytes, 2048)
            plan.close()


class Batches(unittest.TestCase):
    def test_empty_numpy_arrays(self) -> None:
        model, layer = bound_layer(desc(), "cpu_simd", 2)
        q, kv = np.empty((0, HQ, D), np.float32), np.empty((0, HK, D), np.float32)
        self.assertEqual(libattn.Tensor(q).strides, (HQ * D, D, 1))
        planned(model, libattn.Batch([0, 0], [5], [[0]], [])).run(layer, q, kv, kv, np.empty_like(q))

    def test_spans(self) -> None:
        q, k, v = prompt(30)
        visible = causal(30, 30)
        visible[4:10, 4:10] = visible[15:21, 15:21] = True
        tensors = (torch.tensor([[4, 9], [15, 20]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32))
        for spans in ([[(4, 9), (15, 20)]], tensors):
            out = attended((q, k, v), one_request(30, spans=spans), prefix_lm=True)
            self.assertLess(worst(out, attention(q, k, v, D**-0.5, visible)[0]), 2e-5)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "spans.*2 lists; 1 request"):
            one_request(30, spans=[[], []])

    def test_causal_per_request(self) -> None:
        q, k, v = prompt(20)
        batch = libattn.Batch([0, 10, 20], [10, 10], [[0], [1]], [*range(10), *range(16, 26)],
                              causal_per_request=[1, 0])
        out = attended((q, k, v), batch, causal_per_request=True)
        error = worst_of(out, q, k.split(10), v.split(10), [10, 10], [10, 10], D**-0.5, lambda r, n, _: causal(n, n) | bool(r))
        self.assertLess(error, 2e-5)

    def test_padding_and_logits_indices(self) -> None:
        q, k, v = prompt(20)
        expected = attention(q, k, v, D**-0.5, causal(20, 20))[0]
        model, layer = bound_layer(desc(), "cpu_simd", 2)
        padded, out = torch.full((24, HQ, D), float("nan")), torch.full((24, HQ, D), 7.0)
        padded[:20] = q
        planned(model, one_request(20, num_tokens=24, num_actual_tokens=20)).run(layer, padded, k, v, out)
        self.assertLess(worst(out[:20], expected), 2e-5)
        self.assertTrue(bool((out[20:] == 7.0).all()))
        runtime = libattn.Runtime(ignore_environment=True)
        second = libattn.LayerDesc("b", HQ, HK, D, block_size=BLOCK, kv_sharing_target="a", fast_prefill=True)
        model = runtime.bind(runtime.select([desc(), second], backend="cpu_ref"))
        spec = model.layers[0].kv_spec
        model.layers[0].bind_kv(libattn.allocate(2 * spec.padded_page_bytes), 2)
        plan = planned(model, one_request(20, logits_indices=[19]))
        plan.run(model.layers[0], q, k, v, torch.empty_like(q))
        out = torch.full_like(q, 7.0)
        plan.run(model.layers[1], q, None, None, out)
        self.assertLess(worst(out[19:], expected[19:]), 2e-5)

    def test_arrays_that_are_too_short(self) -> None:
        """Never read past their end, whoever gives them."""
        given = {"query_start_loc": [0, 1, 2], "seq_lens": [1, 1], "block_table": [[0], [1]], "slot_mapping": [0, 16]}
        short = torch.zeros(1).int()
        for name in ("seq_lens", "seq_lens_host", "key_start_loc", "key_start_loc_host", "encoder_seq_lens",
                     "encoder_seq_lens_host", "block_table_row"):
            pair = {"key_start_loc": [0, 1, 2], "encoder_seq_lens": [1, 1]} if name.endswith("_host") else {}
            for value in ([1], short):
                with self.assertRaisesRegex(libattn.InvalidArgumentError, f"{name}: 1 numbers; the batch needs [23]"):
                    libattn.Batch(**{**given, **pair, name: value})
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "causal_per_request: 1 numbers"):
            libattn.Batch(**given, causal_per_request=[1])
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "span_start_loc: 1 numbers; the batch needs 3"):
            libattn.Batch(**given, spans=(torch.zeros(1, 2).int(), short))
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "spans: 3 numbers; the batch needs 6"):
            libattn.Batch(**given, spans=(torch.zeros(3).int(), torch.zeros(3).int()))
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "query_start_loc: no number"):
            libattn.Batch([])
        model, _ = bound_layer(desc(), "cpu_ref", 2)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "block_table_rows: 1 rows and 2 requests"):
            planned(model, libattn.Batch(**{**given, "block_table": [[0]]}))
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "sinks: 1 numbers; layer 'a' needs 4"):
            bound_layer(desc(has_sinks=True), "cpu_ref", 2, sinks=torch.zeros(1))


class Caches(unittest.TestCase):
    def run_with(self, layer: libattn.Layer, model: libattn.Model) -> torch.Tensor:
        q, k, v = prompt(40)
        out = torch.empty_like(q)
        planned(model, one_request(40)).run(layer, q, k, v, out)
        return out

    def test_packed_keys(self) -> None:
        """[N, Hk, D / 8, B, 8], as x-packed kernels have it."""
        model, layer = bound_layer(desc(), "cpu_ref", 3)
        expected = self.run_with(layer, model)
        k, v = torch.zeros(3, HK, D // 8, BLOCK, 8), torch.zeros(3, BLOCK, HK, D)
        layer.bind_kv_views(libattn.KvView(k.permute(0, 3, 1, 2, 4)), v)
        self.assertTrue(torch.equal(self.run_with(layer, model), expected))
        self.assertTrue(torch.equal(k[1, 1, 3, 5], prompt(40)[1][BLOCK + 5, 1, 24:32]))

    def test_scales_apart(self) -> None:
        """int8 rows with scales in planes of their own give what the backend's own layout gives."""
        for backend in BACKENDS:
            model, layer = bound_layer(desc(kv_dtype="int8_per_token_head"), backend, 3)
            expected = self.run_with(layer, model)
            planes, scales = torch.zeros(2, 3, BLOCK, HK, D, dtype=torch.int8), torch.zeros(2, 3, BLOCK, HK)
            layer.bind_kv_views(*(libattn.KvView(planes[i], scales[i]) for i in range(2)))
            self.assertTrue(torch.equal(self.run_with(layer, model), expected), backend)
            k = prompt(40)[1]
            self.assertAlmostEqual(float(scales[0, 1, 5, 1]), float(k[BLOCK + 5, 1].abs().max()) / 127, places=6)
        for wrong in (scales[0, :, :4], scales[0].half()):
            with self.assertRaisesRegex(libattn.InvalidArgumentError, "scale.*f32 .*16, 2"):
                layer.bind_kv_views(libattn.KvView(planes[0], wrong), planes[1])

    def test_quantization_parameters(self) -> None:
        q, k, v = prompt(40)
        expected = attention(q, k, v, D**-0.5, causal(40, 40))[0]
        signs = torch.where(torch.rand(D, generator=torch.Generator().manual_seed(2)) < 0.5, -1.0, 1.0)
        channel = v.abs().amax(0) / 127
        rotations = {"hadamard_signs_k": signs, "hadamard_signs_v": signs}
        for kv_dtype, given, bound in (("int4_per_token_head", rotations, 0.25), ("int8_kv", {"v_channel_scale": channel}, 0.03)):
            model, layer = bound_layer(desc(kv_dtype=kv_dtype), "cpu_ref", 3,
                                       extensions=[extensions.kv_quant_params(**given)])
            error = (self.run_with(layer, model) - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
            print(f"{kv_dtype} {float(error):.3f}", end=" ")
            self.assertLess(float(error), bound, kv_dtype)

    def test_blocks_move(self) -> None:
        model, layer = bound_layer(desc(), "cpu_ref", 6)
        expected = self.run_with(layer, model)
        q, k, v = prompt(40)
        host = libattn.allocate(6 * layer.kv_spec.padded_page_bytes)
        model.copy_blocks([(0, 4), (1, 0), (2, 2)], kind="device_to_host", other=[host])
        model.copy_blocks([(4, 5), (0, 3)], kind="host_to_device", other=[host])
        model.copy_blocks([(2, 1)])
        out = torch.empty_like(q)
        planned(model, libattn.Batch([0, 40], [40], [[5, 3, 1]])).run(layer, q, None, None, out, flags=libattn.NO_WRITE)
        self.assertTrue(torch.equal(out, expected))
        for pair, kind in (((0, 6), "device_to_host"), ((6, 0), "host_to_device")):
            for other, text in (([host], "contiguous memory of 7 blocks"), ([], "0 tensors; the group has 1 layers")):
                with self.assertRaisesRegex(libattn.InvalidArgumentError, f"other: .*{text}"):
                    model.copy_blocks([pair], kind=kind, other=other)


class Fused(unittest.TestCase):
    def test_rope(self) -> None:
        q, k, v = prompt(20)
        angle = torch.arange(20)[:, None] * 10000.0**(-torch.arange(D // 2) / (D // 2))
        table = torch.cat([angle.cos(), angle.sin()], dim=1)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            a, b = x.split(D // 2, dim=-1)
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        expected = attention(rotated(q), rotated(k), v, D**-0.5, causal(20, 20))[0]
        out = attended((q.clone(), k, v), one_request(20), [extensions.rope_io(torch.arange(20), table)], rope="neox")
        self.assertLess(worst(out, expected), 1e-4)
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "form.*'yarn'.*neox, gptj"):
            extensions.rope_io(torch.arange(20), table, "yarn")

    def test_output_quant(self) -> None:
        q, k, v = prompt(20)
        expected = attention(q, k, v, D**-0.5, causal(20, 20))[0]
        model, layer = bound_layer(desc(output_form="fp8_group_64"), "cpu_ref", 2)
        out, scales = torch.empty(20, HQ, D, dtype=torch.float8_e4m3fn), torch.empty(20, HQ)
        rows = libattn.Rows("fp8_e4m3")
        rows.fill(out.data_ptr(), out.shape, out.stride())
        planned(model, one_request(20)).run(layer, q, k, v, rows,
                                            extensions=[extensions.output_quant(block_scales=scales)])
        self.assertLess(worst(out.float() * scales[:, :, None], expected), 0.2)
        self.assertLess(float((scales * 448 - expected.abs().amax(-1)).abs().max()), 1e-4)


class Layouts(unittest.TestCase):
    def test_needed_view_forms(self) -> None:
        runtime = libattn.Runtime(ignore_environment=True)
        layer = desc(needed_view_forms=("nhd", "packed"))
        self.assertEqual(runtime.select([layer], backend="cpu_ref").choice(0).backend, "cpu_ref")
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "needed_view_forms.*'rows'.*nhd, hnd"):
            desc(needed_view_forms=("rows",)).to_struct()


class Scheduling(unittest.TestCase):
    def test_batch_order(self) -> None:
        queries, lens, prompts = [100, 1, 1, 10], [100, 51, 101, 60], [100, 100, 100, 100]
        self.assertEqual(libattn.batch_order(queries, lens, prompts), [2, 1, 3, 0])
        self.assertEqual(libattn.batch_order(queries, lens), [1, 2, 3, 0])
        self.assertEqual(libattn.batch_order([], []), [])
        with self.assertRaisesRegex(ValueError, "4 query_lens, 1 seq_lens"):
            libattn.batch_order(queries, [1])

    def test_context_parallel(self) -> None:
        lengths = [libattn.context_parallel_length(37, rank, 2, 4) for rank in range(2)]
        self.assertEqual((sum(lengths), lengths[0]), (37, 20))
        slots = [libattn.context_parallel_slots(range(37), [3, 1], 16, rank, 2, 4) for rank in range(2)]
        self.assertEqual([sum(s >= 0 for s in each) for each in slots], lengths)
        self.assertTrue(all((a < 0) != (b < 0) for a, b in zip(*slots)))
        with self.assertRaisesRegex(ValueError, "position 64; 2 blocks on each of 2 ranks hold 64"):
            libattn.context_parallel_slots([64], [3, 1], 16, 0, 2, 4)
        struct = libattn.ContextParallel(decode=64, interleave=4, all_to_all=True).to_struct()
        self.assertEqual((struct.decode, struct.prefill, struct.interleave, struct.reduce), (64, None, 4, 1))
        batch = extensions.context_parallel_batch(torch.tensor([5], dtype=torch.int32), max_local_seq_len=9)
        self.assertEqual((batch.ext.id, batch.max_local_seq_len), (6, 9))

    def test_amax(self) -> None:
        """The maximum of a tensor, of heads over two batches, and of channels."""
        _, layer = one_layer(libattn.LayerDesc("a", 4, 2, 32, block_size=BLOCK), "cpu_ref", num_threads=2)
        first, second = torch.randn(5, 2, 32), torch.randn(7, 2, 32)
        out, heads, channels = torch.full((1,), 9.0), torch.zeros(2), torch.zeros(64)
        layer.amax(first, out)
        self.assertEqual(out[0], first.abs().max())
        for batch in (first, second):
            layer.amax(batch, heads, per_head=True, accumulate=True)
        self.assertTrue(torch.equal(heads, torch.cat((first, second)).abs().amax((0, 2))))
        layer.amax(second.view(7, 64, 1), channels, per_head=True)
        self.assertTrue(torch.equal(channels, second.view(7, 64).abs().amax(0)))
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "out: 1 numbers; layer 'a' needs 2"):
            layer.amax(first, out, per_head=True)

    def test_no_communicator(self) -> None:
        """Refused by libattn_nccl, or said to be missing."""
        with self.assertRaisesRegex(libattn.InvalidArgumentError, "communicator|libattn_nccl.so.0"):
            libattn.torch.ranks.nccl(0)

    def test_scale_of_mla(self) -> None:
        mla = libattn.MlaDesc(512, 128, 64, 128)
        struct, _ = libattn.LayerDesc("m", 4, 1, 576, kind="mla", mla=mla).to_struct()
        self.assertAlmostEqual(struct.scale, 192**-0.5, places=7)
        self.assertEqual(mla.to_struct().weight_dtype, 0)


class Info(unittest.TestCase):
    def test_module(self) -> None:
        ran = subprocess.run([sys.executable, "-m", "libattn", "--json"], capture_output=True, text=True, check=True)
        self.assertIn('"cpu_simd"', ran.stdout)


class LayoutId(unittest.TestCase):
    """One id for the same bytes in a block, another for whatever lies otherwise."""

    def test_as_the_tool_says(self) -> None:
        """A decoder and a recurrent layer of a published model."""
        config = pathlib.Path(__file__).parents[2] / "models/qwen3-next-80b-a3b.json"
        info = pathlib.Path(os.environ["ATTN_TEST_BUILD"]) / "tools/attn-info"
        ran = subprocess.run([info, "--model", config, "--layouts", "--json"], capture_output=True, text=True, check=True,
                             env={**os.environ, "ATTN_BACKEND": "cpu_simd"})
        layers = json.loads(ran.stdout)["layers"]
        gdn = libattn.GdnDesc(16, 32, 128, 128, conv_width=4)
        descs = [libattn.LayerDesc("a", 16, 16, 128, kind="gdn", gdn=gdn, dtype="bf16"),
                 libattn.LayerDesc("a", 16, 2, 256, dtype="bf16")]
        for desc, layer in zip(descs, [layers[0], layers[3]]):
            bound = bound_layer(desc, "cpu_simd", 3)[1]
            self.assertEqual(libattn.layout_text(bound).splitlines(), layer["layout"])
            self.assertEqual(libattn.layout_id(bound), layer["layout_id"])

    @staticmethod
    def id_of(k: Any, v: Any, **fields: object) -> str:
        _, layer = one_layer(desc(**{"dtype": "bf16", **fields}), "cpu_ref")
        layer.bind_kv_views(k, v)
        return libattn.layout_id(layer)

    def test_what_counts(self) -> None:
        def nhd(blocks: int, dtype: torch.dtype = torch.bfloat16, heads: int = HK) -> torch.Tensor:
            return torch.zeros(2, blocks, BLOCK, heads, D, dtype=dtype)

        hnd = torch.zeros(2, 3, HK, BLOCK, D, dtype=torch.bfloat16).transpose(2, 3)
        inner = torch.zeros(3, 2, BLOCK, HK, D, dtype=torch.bfloat16)
        padded = torch.zeros(3, 3, BLOCK, HK, D, dtype=torch.bfloat16)
        int8 = torch.zeros(2, 3, BLOCK, HK, D + 4, dtype=torch.int8)  # a row, and its scale
        scales = [torch.zeros(3, BLOCK, HK) for _ in range(2)]
        rows, per_token = int8[..., :D], {"kv_dtype": "int8_per_token_head"}
        behind = int8.view(torch.float32)[..., D // 4]
        ids = [self.id_of(*nhd(3)), self.id_of(*hnd), self.id_of(inner[:, 0], inner[:, 1]),
               self.id_of(inner[:, 1], inner[:, 0]), self.id_of(*nhd(3, torch.float32), kv_dtype="f32"),
               self.id_of(*nhd(3), rope="neox"), self.id_of(*nhd(3, torch.float16), kv_dtype="f16", dtype="f16"),
               self.id_of(*(libattn.KvView(r, s) for r, s in zip(rows, scales)), **per_token),
               self.id_of(*(libattn.KvView(r, s) for r, s in zip(rows, behind)), **per_token)]
        self.assertEqual(len(set(ids)), len(ids))
        self.assertEqual(ids[0], self.id_of(*nhd(5)))  # neither the number of blocks nor where they lie
        self.assertEqual(ids[2], self.id_of(padded[:, 0], padded[:, 1]))  # nor the padding after one
        self.assertEqual(ids[0], "af3fd0c2f279bf67d820246d0020d0b9")  # the same in every release


class LayoutConvert(unittest.TestCase):
    """Tokens in another engine's cache, by its own layout."""

    TOKENS, BLOCKS = 150, {16: [3, 0, 7, 5, 11, 2, 9, 4, 8, 1], 64: [1, 2, 0]}

    @staticmethod
    def layer(backend: str, block: int, cache: torch.Tensor, hnd: bool, **fields: Any) -> libattn.Layer:
        runtime = libattn.Runtime(ignore_environment=True, backend=backend)
        layer = runtime.bind(runtime.select([desc(**{"dtype": "bf16", "block_size": block, **fields})])).layers[0]
        layer.bind_kv_views(*(cache.transpose(2, 3) if hnd else cache))
        return layer

    def rows(self, cache: torch.Tensor, block: int, hnd: bool) -> torch.Tensor:
        """[2, tokens, heads, head_size]"""
        blocks = cache[:, self.BLOCKS[block]].float()
        blocks = blocks.transpose(2, 3) if hnd else blocks
        return blocks.flatten(1, 2)[:, :self.TOKENS]

    def test_scales_of_params(self) -> None:
        """To 8 bits by the scales that the target's params have."""
        for backend in BACKENDS:
            bits = torch.randn(2, 12, 16, HK, D).bfloat16()
            eight = torch.zeros(2, 3, HK, 64, D, dtype=torch.float8_e4m3fn)
            source = self.layer(backend, 16, bits, False)
            target = self.layer(backend, 64, eight, True, kv_dtype="fp8_e4m3", k_scale_form="per_tensor", v_scale_form="per_tensor")
            target.bind_params(k_scale=0.25, v_scale=0.5)
            libattn.layout_convert(source, target, self.BLOCKS[16], self.BLOCKS[64], self.TOKENS)
            scaled = self.rows(bits, 16, False) / torch.tensor([0.25, 0.5])[:, None, None, None]
            self.assertTrue(torch.equal(self.rows(eight, 64, True), scaled.to(torch.float8_e4m3fn).float()))

    def test_rows_with_scales(self) -> None:
        """From 8 bits with a scale for each token and head, as the backend lays them out."""
        for backend in BACKENDS:
            model, source = bound_layer(desc(dtype="bf16", kv_dtype="int8_per_token_head"), backend, 12)
            k, v = torch.randn(2, self.TOKENS, HK, D).bfloat16()
            slots = [self.BLOCKS[16][t // 16] * 16 + t % 16 for t in range(self.TOKENS)]
            batch = libattn.Batch([0, self.TOKENS], [self.TOKENS], [self.BLOCKS[16]], slots)
            planned(model, batch).run(source, None, k, v, None, flags=libattn.NO_ATTEND)
            cache = torch.zeros(2, 3, HK, 64, D, dtype=torch.bfloat16)
            libattn.layout_convert(source, self.layer(backend, 64, cache, True), self.BLOCKS[16], self.BLOCKS[64], self.TOKENS)
            for rows, given in zip(self.rows(cache, 64, True), (k, v)):
                step = given.float().abs().amax(-1, keepdim=True) / 127
                self.assertLess(float(((rows - given.float()).abs() / step).max()), 1.1, backend)  # half a step, and bf16's

    def test_refused(self) -> None:
        cache = torch.zeros(2, 12, 16, HK, D, dtype=torch.bfloat16)
        other = torch.zeros(2, 3, HK, 64, D, dtype=torch.bfloat16)
        source, target = self.layer("cpu_ref", 16, cache, False), self.layer("cpu_ref", 64, other, True)
        for field, tables, tokens in (("source_blocks", ([12], [0]), 5), ("source_blocks", ([1, 1], [0]), 20),
                                      ("target_blocks", ([1, 2], [3]), 20), ("target_blocks", ([1, 2, 3, 4, 5], [0]), 65)):
            with self.assertRaises(libattn.InvalidArgumentError) as caught:
                libattn.layout_convert(source, target, *tables, tokens)
            self.assertEqual(caught.exception.field, field)
        mla = libattn.MlaDesc(512, 128, 64, 128)
        latent = bound_layer(libattn.LayerDesc("m", 4, 1, 576, kind="mla", mla=mla, dtype="bf16"), "cpu_ref", 3)[1]
        for field, layer in (("caches", latent), ("rope", self.layer("cpu_ref", 64, other, True, rope="neox"))):
            with self.assertRaises(libattn.AttnError) as caught:
                libattn.layout_convert(source, layer, [1], [0], 5)
            self.assertEqual(caught.exception.field, field)


class Meeting:
    """Ranks that are threads: parts are laid on a table between two barriers."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[bytes] = [b""] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def table(self, me: int) -> libattn.Collectives:
        def all_parts(send: memoryview) -> list[bytes]:
            self.parts[me] = bytes(send)
            self.barrier.wait()
            parts = list(self.parts)
            self.barrier.wait()
            return parts

        def mine(parts: list[bytes]) -> list[bytes]:
            size = len(parts[0]) // len(parts)
            return [part[me * size:(me + 1) * size] for part in parts]

        def floats(parts: list[bytes]) -> np.ndarray:
            return np.stack([np.frombuffer(part, np.float32) for part in parts])

        def all_gather(send: memoryview, receive: memoryview) -> None:
            receive[:] = b"".join(all_parts(send))

        def all_to_all(send: memoryview, receive: memoryview) -> None:
            receive[:] = b"".join(mine(all_parts(send)))

        def reduce_scatter(send: memoryview, receive: memoryview) -> None:
            receive[:] = floats(mine(all_parts(send))).sum(0).tobytes()

        def all_reduce_max(send: memoryview, receive: memoryview) -> None:
            receive[:] = floats(all_parts(send)).max(0).tobytes()

        return libattn.Collectives(me, len(self.parts), all_gather, all_to_all, reduce_scatter, all_reduce_max)


class OwnCollectives(unittest.TestCase):
    """Layers spread over ranks that no library of Python's connects."""

    def spread(self, table: libattn.Collectives, all_to_all: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
               me: int) -> torch.Tensor:
        """The last token of a prompt whose keys lie on two ranks, each with query heads of its own."""
        length, blocks = len(q), -(-len(q) // (2 * BLOCK))
        model, layer = bound_layer(desc(context_parallel=libattn.ContextParallel(decode=table.address, all_to_all=all_to_all)),
                                   "cpu_ref", blocks)
        slots = libattn.context_parallel_slots(range(length), list(range(blocks)), BLOCK, me, 2)
        plan, out = None, torch.full_like(q, float("nan"))
        for first, end in ((0, length - 1), (length - 1, length)):
            local = torch.tensor([libattn.context_parallel_length(first, me, 2)], dtype=torch.int32)
            batch = libattn.Batch([0, end - first], [end], [list(range(blocks))], slots[first:end], extensions=[
                extensions.context_parallel_batch(local, local_seq_lens_host=local, max_local_seq_len=int(local[0]))])
            plan = planned(model, batch) if plan is None else plan
            plan.update(batch)
            plan.run(layer, q[first:end], k[first:end], v[first:end], out[first:end])
        return out

    def test_threads_as_ranks(self) -> None:
        for all_to_all in (False, True):
            meeting, outs = Meeting(2), [torch.empty(0)] * 2
            tables = [meeting.table(me) for me in range(2)]
            (q0, k, v), (q1, _, _) = prompt(41), prompt(41, seed=2)

            def rank(me: int) -> None:
                outs[me] = self.spread(tables[me], all_to_all, (q0, q1)[me], k, v, me)

            threads = [threading.Thread(target=rank, args=(me,)) for me in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for out, q in zip(outs, (q0, q1)):
                self.assertLess(worst(out, attention(q, k, v, D**-0.5, causal(41, 41))[0]), 1e-4)

    def test_what_is_raised_fails_the_run(self) -> None:
        def broken(send: memoryview, receive: memoryview) -> None:
            raise OSError("the other rank is gone")

        table = libattn.Collectives(0, 2, broken, broken, broken, broken)
        with self.assertRaisesRegex(libattn.AttnError, "the other rank is gone"):
            self.spread(table, True, *prompt(9), 0)
