# SPDX-License-Identifier: Apache-2.0
"""vLLM's indexer through the adapter: its function is replaced in its operator and where models have imported it, and lists over its
cache are held against float64. On a GPU where `device_index.py` asks for it, captured graphs too."""
import ast
import inspect
import os
import types
import unittest
from typing import Any
from unittest import mock

import torch
from torch import library

import libattn
import common
import libattn.torch
import published
import test_vllm as recorded
from captured import Graph
from libattn.integrations.vllm import describe
from libattn.integrations.vllm.indexer import IndexBuilder, backend_over, over, rows_of
from libattn.integrations.vllm.layers import LatentImpl

from vllm.model_executor.layers import sparse_attn_indexer as module
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum

DEVICE = torch.device(os.environ.get("ATTN_TEST_DEVICE", "cpu"))
BACKENDS = common.BACKENDS if DEVICE.type == "cpu" else ("cuda_flash",)
HEADS, SIZE, BLOCK, BLOCKS, LONGEST = 4 if DEVICE.type == "cpu" else 64, 128, 64, 9, 160
RECORDED = recorded.RECORDED["modules"]
SIGNATURE = published.Method.parse(RECORDED["vllm.model_executor.layers.sparse_attn_indexer"]["sparse_attn_indexer"])
TYPES = {"k_cache_prefix": "str", "dense_mha_metadata_layer_name": "str", "topk_backend": "str", "scale_fmt": "str | None",
         "q_scale": "T | None", "k": "T | None", "candidate_blocks": "T | None", "topk_indices_buffer": "T", **{
             name: "T" for name in ("hidden_states", "kv_cache", "q_quant", "weights")}, **{
             name: "bool" for name in ("skip_k_cache_insert", "use_pcp", "pcp_shard_decode_requests", "use_fp4_cache",
                                       "skip_topk_buffer_clear", "candidate_write")}}
calls: list[Any] = []


def _vllms_own() -> Any:
    """A function of the recorded parameters."""
    names, defaults = SIGNATURE.positional(), SIGNATURE.arguments.defaults
    values = [""] * (len(names) - len(defaults)) + [f" = {ast.unparse(value)}" for value in defaults]
    parameters = ", ".join(f"{name}: {TYPES.get(name, 'int')}{value}" for name, value in zip(names, values))
    scope: dict[str, Any] = {"T": torch.Tensor, "calls": calls}
    exec(f"def f({parameters}) -> T:\n calls.append(k_cache_prefix)\n return topk_indices_buffer", scope)
    return scope["f"]


theirs = _vllms_own()
vllm_lib = library.Library("vllm", "FRAGMENT")
vllm_lib.define("sparse_attn_indexer" + library.infer_schema(theirs, mutates_args=["topk_indices_buffer"]))
vllm_lib.impl("sparse_attn_indexer", theirs, dispatch_key=DEVICE.type.upper())
published.put({
    "vllm.model_executor.layers.sparse_attn_indexer": {"sparse_attn_indexer": theirs},
    "vllm.models.deepseek_v32.attention": {"sparse_attn_indexer": theirs},
    "vllm.utils.torch_utils": {"vllm_lib": vllm_lib, "_resolve_layer_name": lambda name: name},
    "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda function: function},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(dispatch_key=DEVICE.type.upper())}})

from vllm.models.deepseek_v32 import attention as model  # noqa: E402


def codes_of(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM's kernels quantize: scales are powers of two."""
    scales = torch.exp2((rows.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448).log2().ceil())
    return (rows / scales).to(torch.float8_e4m3fn), scales


def metadata(queries: list[int], lengths: list[int], tables: torch.Tensor) -> Any:
    """vLLM's, its arrays on the device."""
    m = recorded.metadata(queries, lengths, tables)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
        setattr(m, name, getattr(m, name).to(DEVICE))
    return m


class Indexers(unittest.TestCase):
    def setUp(self) -> None:
        self.addCleanup(recorded.current.__setitem__, 0, None)
        self.addCleanup(recorded.step_metadata.__setitem__, 0, None)
        patch = mock.patch.object(recorded, "BLOCK", BLOCK)
        patch.start()
        self.addCleanup(patch.stop)
        libattn.torch.configure(ignore_environment=True)
        calls.clear()

    def configure(self, topk: int, **additional: Any) -> Any:
        text = types.SimpleNamespace(index_n_heads=HEADS, index_head_dim=SIZE, index_topk=topk)
        model_config = types.SimpleNamespace(dtype=torch.bfloat16, max_model_len=LONGEST, hf_text_config=text)
        recorded.current[0] = types.SimpleNamespace(
            attention_config=types.SimpleNamespace(backend=AttentionBackendEnum.CUSTOM), model_config=model_config,
            additional_config={"libattn": additional}, parallel_config=types.SimpleNamespace(),
            scheduler_config=types.SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
            compilation_config=types.SimpleNamespace(
                static_forward_context={}, cudagraph_mode=types.SimpleNamespace(has_full_cudagraphs=lambda: True)))
        return recorded.current[0]

    def indexer(self, topk: int, at: int = 0, **values: Any) -> Any:
        """vLLM's as far as the adapter meets it, and the layer that attends by its lists."""
        k_cache = DeepseekV32IndexerCache(SIZE + 4, torch.uint8, "", None)
        k_cache.prefix, k_cache.kv_cache = f"model.layers.{at}.self_attn.indexer.k_cache", torch.tensor([])
        k_cache.get_attn_backend = lambda: DeepseekV32IndexerBackend
        lists = torch.full((256, topk + 3), 7, device=DEVICE).int()
        made = types.SimpleNamespace(**{
            "n_head": HEADS, "head_dim": SIZE, "topk_tokens": topk, "quant_block_size": SIZE, "k_cache": k_cache,
            "topk_indices_buffer": lists, "indexer_op": types.SimpleNamespace(use_fp4_cache=False)} | values)
        recorded.current[0].compilation_config.static_forward_context[k_cache.prefix] = k_cache
        LatentImpl(16, 576, 0.1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, indexer=made,
                   topk_indices_buffer=lists, kv_b_proj=types.SimpleNamespace(weight=torch.zeros(16 * 256, 512)))
        return made

    def served(self, topk: int, count: int = 2) -> tuple[list[Any], IndexBuilder]:
        """Indexers with their caches, pages as vLLM has them, and their builder."""
        config = self.configure(topk, indexer=True)
        indexers = [self.indexer(topk, at) for at in range(count)]
        for one in indexers:
            pages = torch.full((BLOCKS, BLOCK * (SIZE + 4) + 64), 255, device=DEVICE).byte()  # padded, as pages next to others are
            one.k_cache.kv_cache = pages[:, :BLOCK * (SIZE + 4)].view(BLOCKS, BLOCK, SIZE + 4)
        backend = indexers[0].k_cache.get_attn_backend()
        self.assertIs(backend, backend_over(DeepseekV32IndexerBackend))
        spec = types.SimpleNamespace(block_size=BLOCK, num_kv_heads=1, head_size=SIZE + 4)
        self.assertIs(backend.get_builder_cls().get_cudagraph_support(config, spec), AttentionCGSupport.UNIFORM_BATCH)
        return indexers, backend.get_builder_cls()(spec, [one.k_cache.prefix for one in indexers], config, DEVICE)

    def call(self, function: Any, indexer: Any, q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor | None,
             writes: bool = True) -> torch.Tensor:
        """As vLLM calls its operator and its models the function, with all parameters."""
        values: dict[str, Any] = {name: 0 if kind == "int" else False if kind == "bool" else "" if kind == "str" else None
                                  for name in SIGNATURE.positional() for kind in [TYPES.get(name, "int")]}
        values |= {"hidden_states": torch.zeros(len(q), 8, device=DEVICE).bfloat16(), "k_cache_prefix": indexer.k_cache.prefix, "q_quant": q,
                   "kv_cache": indexer.k_cache.kv_cache, "k": k, "weights": weights, "quant_block_size": SIZE, "scale_fmt": "ue8m0",
                   "topk_tokens": indexer.topk_tokens, "head_dim": SIZE, "topk_indices_buffer": indexer.topk_indices_buffer,
                   "skip_k_cache_insert": not writes}
        if function is model.sparse_attn_indexer:  # models name what comes after the buffer
            names = list(values)
            cut = names.index("skip_k_cache_insert")
            return function(*[values[name] for name in names[:cut]], **{name: values[name] for name in names[cut:]})
        return function(*values.values())

    def inputs(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries of e4m3 and weights, negative ones too."""
        codes, scales = codes_of(torch.randn(count, HEADS, SIZE, generator=generator))
        return codes.to(DEVICE), (torch.randn(count, HEADS, generator=generator) * scales[..., 0] * 0.05).to(DEVICE)

    def write(self, indexer: Any, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """What vLLM's fused kernels do before the indexer."""
        view = rows_of(indexer.k_cache.kv_cache, SIZE)
        slots, (codes, scales) = slots.to(DEVICE), codes_of(rows.to(DEVICE))
        view.data[slots // BLOCK, slots % BLOCK, 0] = codes.view(torch.uint8)
        view.scale[slots // BLOCK, slots % BLOCK, 0] = scales[:, 0]

    def keys(self, indexer: Any, table: torch.Tensor) -> torch.Tensor:
        """A request's keys, by bytes: of a block all codes, then all scales."""
        pages = indexer.k_cache.kv_cache[table.long().to(DEVICE)].flatten(1).cpu()
        codes, scales = pages[:, :BLOCK * SIZE].contiguous(), pages[:, BLOCK * SIZE:].contiguous()
        return codes.view(torch.float8_e4m3fn).double().view(-1, SIZE) * scales.view(torch.float32).double().view(-1, 1)

    def hold(self, indexer: Any, at: int, place: int, table: torch.Tensor, q: torch.Tensor, weights: torch.Tensor) -> None:
        """One token's list, in row `at` of the buffer; scores that float32 cannot tell apart may change places."""
        topk, row = indexer.topk_tokens, indexer.topk_indices_buffer[at]
        self.assertEqual(row[topk:].tolist(), [7] * 3, "what is next to the lists")
        count = min(topk, place + 1)
        found = row[:count].tolist()
        self.assertEqual((found, row[count:topk].tolist()), (sorted(set(found)), [-1] * (topk - count)))
        dots, weight = (self.keys(indexer, table)[:place + 1] @ q[at].cpu().double().T).relu(), weights[at].cpu().double()
        scores = dots @ weight
        listed = torch.zeros(place + 1, dtype=torch.bool)
        listed[found] = True
        if not bool(listed.all()):
            slack = 1e-5 * float((dots @ weight.abs()).max())
            self.assertGreaterEqual(float(scores[listed].min()), float(scores[~listed].max()) - slack, (at, place))

    def test_steps(self) -> None:
        """Prompts, a chunk over earlier context next to a decode, decodes, rows of padding; fewer keys than a list has places, and
        more; keys that libattn writes, through vLLM's operator, and keys that vLLM has written, from a model's module."""
        for backend in BACKENDS:
            for topk, writes in ((9, True), (9, False), (512, True)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                indexers, builder = self.served(topk)
                generator = torch.Generator().manual_seed(3)
                given = torch.randn(2, 2, LONGEST, SIZE, generator=generator).bfloat16()
                tables, lengths = torch.tensor([[5, 2, 8], [7, 0, 3]]).int(), [0, 0]
                for queries in ([70, 9], [1, 1], [5, 67], [1, 2], [1, 1]):
                    lengths = [n + c for n, c in zip(lengths, queries)]
                    m = builder.build(0, metadata(queries, lengths, tables))
                    recorded.step_metadata[0] = {one.k_cache.prefix: m for one in indexers}
                    rows = sum(queries)
                    for one, keys in zip(indexers, given):
                        new = torch.cat([keys[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))])
                        q, weights = self.inputs(rows + 3, generator)
                        one.topk_indices_buffer.fill_(7)
                        new, padding = new.to(DEVICE), torch.full((3, SIZE), float("nan"), device=DEVICE).bfloat16()
                        if writes:
                            out = self.call(torch.ops.vllm.sparse_attn_indexer, one, q, weights, torch.cat([new, padding]))
                        else:
                            self.write(one, m.slot_mapping, new.float())
                            out = self.call(model.sparse_attn_indexer, one, q, weights, None if rows > 3 else padding, False)
                        self.assertEqual(out.data_ptr(), one.topk_indices_buffer.data_ptr())
                        self.assertTrue(bool((one.topk_indices_buffer[rows + 3:] == 7).all()))
                        places = [(r, n - c + i) for r, (c, n) in enumerate(zip(queries, lengths)) for i in range(c)]
                        for t, (r, place) in enumerate(places):
                            self.hold(one, t, place, tables[r], q, weights)
                        for r, n in enumerate(lengths):
                            error = (self.keys(one, tables[r])[:n] - keys[r, :n].double()).abs()
                            self.assertLess(float(error.max()), 0.0625 * float(keys.abs().max()))
                self.assertEqual(len({id(builder.steps._places[id(one.k_cache.states)].bound) for one in indexers}), 1)
                row = libattn.torch.table()[-1]
                self.assertEqual((row.kind, row.decode.split("@")[0]), ("indexer", backend))
        self.assertEqual(calls, [])

    def test_captured_steps(self) -> None:
        """`build` alone brings a captured graph's plan to the next batch, whose last request may be padding."""
        for backend in BACKENDS:
            libattn.torch.configure(ignore_environment=True, backend=backend)
            (one, ), builder = self.served(16, 1)
            generator = torch.Generator().manual_seed(5)
            given = torch.randn(2, LONGEST, SIZE, generator=generator).bfloat16()
            tables = torch.tensor([[5, 2, 8], [7, 0, 3], [0, 0, 0]]).int()
            for r in range(2):
                places = torch.arange(90)
                self.write(one, tables[r, places // BLOCK].long() * BLOCK + places % BLOCK, given[r, :90].float())
            q, weights = self.inputs(3, generator)
            new = given[0, :3].to(DEVICE)

            def step(m: Any) -> None:
                recorded.step_metadata[0] = {one.k_cache.prefix: m}
                self.call(torch.ops.vllm.sparse_attn_indexer, one, q, weights, new)

            step(builder.build(0, metadata([3], [3], tables[:1])))  # as vLLM's first steps, which load kernels
            batch = metadata([1, 1, 1], [1, 1, 1], tables)
            batch.max_seq_len = LONGEST
            persistent = batch.query_start_loc, batch.seq_lens, batch.slot_mapping
            batch.slot_mapping.fill_(-1)
            captured = builder.build_for_cudagraph_capture(batch)
            self.assertEqual(captured.captured, (3, 3, 1))
            graph = Graph(lambda: step(captured), DEVICE)
            for lengths in ([80, 7], [81, 90], [82]):
                padding = 3 - len(lengths)
                slots = [int(tables[r, (n - 1) // BLOCK]) * BLOCK + (n - 1) % BLOCK for r, n in enumerate(lengths)]
                for buffer, now in zip(persistent, (torch.tensor([0, 1, 2, 3]).clamp(max=len(lengths)),
                                                    torch.tensor([*lengths] + [0] * padding), torch.tensor([*slots] + [-1] * padding))):
                    buffer.copy_(now)
                batch.query_start_loc_cpu = batch.query_start_loc.cpu()
                for kept, now in zip((q, weights), self.inputs(3, generator)):
                    kept.copy_(now)
                new.copy_(torch.stack([given[r, n - 1] for r, n in enumerate(lengths)] + [given[0, 0]] * padding))
                self.assertEqual(builder.build(0, batch).captured, (3, 3, 1))
                graph.replay()
                for r, n in enumerate(lengths):
                    self.hold(one, r, n - 1, tables[r], q, weights)

    def test_left_to_vllm(self) -> None:
        """Without the option, and other indexers of a process in which libattn serves some."""
        self.served(9)
        self.assertIsNot(module.sparse_attn_indexer, theirs)
        self.assertIs(module.sparse_attn_indexer, model.sparse_attn_indexer)
        for additional in ({}, {"indexer": False}):
            self.configure(9, **additional)
            one = self.indexer(9)
            self.assertIs(one.k_cache.get_attn_backend(), DeepseekV32IndexerBackend)
            q, weights = self.inputs(3, torch.Generator())
            for function in (torch.ops.vllm.sparse_attn_indexer, model.sparse_attn_indexer):
                calls.clear()
                self.assertEqual(self.call(function, one, q, weights, None, False).shape, one.topk_indices_buffer.shape)
                self.assertEqual(calls, [one.k_cache.prefix])

    def test_a_run_that_measures_memory(self) -> None:
        indexers, _ = self.served(9)
        q, weights = self.inputs(3, torch.Generator())
        self.call(torch.ops.vllm.sparse_attn_indexer, indexers[0], q, weights, torch.zeros(3, SIZE, device=DEVICE).bfloat16())
        self.assertTrue(bool((indexers[0].topk_indices_buffer == 7).all()))
        self.assertEqual(calls, [])

    def test_every_call_of_the_engine_fits(self) -> None:
        """Those of every release that is served: by position, and from models, which name what comes after the buffer."""
        for release in ("0.26.0", "0.32.0", "0.33.0"):
            modules = published.read(f"vllm-{release}")["modules"]
            asked = published.Method.parse(modules["vllm.model_executor.layers.sparse_attn_indexer"]["sparse_attn_indexer"])
            ours, names = inspect.signature(over(theirs), follow_wrapped=False), asked.positional()
            cut = names.index("skip_k_cache_insert")
            ours.bind(*[None] * len(names))
            bound = ours.bind(*[None] * cut, **dict.fromkeys(names[cut:])).arguments
            self.assertEqual([name for name in bound if name != "more"], names[:cut + 1], release)
            for kind, path in (("AttentionBackend", "vllm.v1.attention.backend"),
                               ("DeepseekV32IndexerBackend", "vllm.v1.attention.backends.mla.indexer")):
                self.assertEqual(published.mismatches(backend_over(DeepseekV32IndexerBackend), modules[path][kind]), [], release)
            self.assertEqual(published.mismatches(IndexBuilder, modules["vllm.v1.attention.backend"]["AttentionMetadataBuilder"]), [])

    def test_refusals(self) -> None:
        """By name, with what to do, when the model makes the layer."""
        Other = type("Glm5NextIndexerBackend", (DeepseekV32IndexerBackend,), {})
        cache = types.SimpleNamespace(prefix="", get_attn_backend=lambda: Other)
        for values, parallel, text in (
                ({"indexer_op": types.SimpleNamespace(use_fp4_cache=True)}, {}, "indexer_kv_dtype: mxfp4"),
                ({"head_dim": 64}, {}, "index_head_dim: 64, with scales of 128"), ({"k_cache": cache}, {}, "Glm5NextIndexerBackend"),
                ({}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size: 2"),
                ({}, {"prefill_context_parallel_size": 4}, "prefill_context_parallel_size: 4")):
            self.configure(9, indexer=True).parallel_config = types.SimpleNamespace(**parallel)
            with self.assertRaisesRegex(libattn.AttnError, f"{text}.*supported: no; .*leave the option indexer out"):
                self.indexer(9, **values)
        with mock.patch.object(describe, "device", lambda: ("rocm", 0)), mock.patch.object(LatentImpl, "_describe"), \
                mock.patch.object(describe, "refuse_unserved"), self.assertRaisesRegex(libattn.AttnError, "device: rocm, where vLLM has"):
            self.configure(9, indexer=True)
            self.indexer(9)
        for pages in (torch.zeros(3, BLOCK, SIZE + 8).byte(), torch.zeros(3, BLOCK, SIZE + 8).byte()[..., :SIZE + 4],
                      torch.zeros(3, BLOCK * (SIZE + 4) + 2).byte()[:, :BLOCK * (SIZE + 4)].unflatten(1, (BLOCK, SIZE + 4))):
            with self.assertRaisesRegex(libattn.AttnError, "kv_cache: .*index keys of 128 bytes"):
                rows_of(pages, SIZE)
