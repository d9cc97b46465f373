# SPDX-License-Identifier: Apache-2.0
"""The SGLang adapter against SGLang's recorded interface. Inside the engine it runs by tools/test_engines.sh."""
import collections
import sys
import tempfile
import types
import unittest
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import published
import libattn
import libattn.torch
from captured import Graph
from common import attention, causal, each_backend, peaked, worst, worst_of

registered: dict[str, Any] = {}
handlers: dict[str, Any] = {}
hooks: dict[str, Any] = {}
CHOICES = ["triton"]

RECORDED = published.install("sglang-0.5.23", {
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": lambda name: lambda create: registered.update({name: create})},
    "sglang.srt.plugins.hook_registry": {
        "HookRegistry": types.SimpleNamespace(register=lambda target, hook, kind: hooks.update({target: hook})),
        "HookType": types.SimpleNamespace(BEFORE="before", AROUND="around")},
    "sglang.srt.runtime_context": {"get_parallel": lambda: types.SimpleNamespace(attn_tp_size=2)},
    "sglang.srt.utils.common": {"is_cpu": lambda: True, "cpu_has_amx_support": lambda: False},
    "sglang": {"__version__": "0.5.16.post1"},
    "sglang.srt.arg_groups.choices": {"ATTENTION_BACKEND_CHOICES": CHOICES}})

from libattn.integrations import sglang as adapter  # noqa: E402
from libattn.integrations.sglang.backend import LibattnBackend  # noqa: E402
from libattn.torch.store import Bound  # noqa: E402

MODES = RECORDED["modules"]["sglang.srt.model_executor.forward_batch_info"]
HQ, HK, D = 8, 2, 64
#: A model with multi-head latent attention.
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 48}


class Mode:
    """The questions of ForwardMode that a backend is asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, question: str) -> Any:
        if question not in MODES["ForwardMode"]["methods"]:
            raise AttributeError(question)
        return lambda *_, **__: question == f"is_{self.name}"


class Pool:
    """A token pool: a row per slot of each layer; those of the first page are of padding."""

    def __init__(self, slots: int, page: int, dtype: torch.dtype = torch.float32, layers: int = 1,
                 device: torch.device | str = "cpu", heads: int = HK, size: int = D) -> None:
        shape = (layers, slots + page, heads, size)
        self.k, self.v = (torch.zeros(shape, device=device).to(dtype) if dtype.itemsize == 1 else
                          torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2))

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self.k[layer_id - 5]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self.v[layer_id - 5]


def layer(**values: Any) -> Any:
    """A RadixAttention, with the defaults that are recorded."""
    found = RECORDED["modules"]["sglang.srt.layers.radix_attention"]["RadixAttention"]["methods"]["__init__"]
    assert {"sliding_window_size", "logit_cap", "is_cross_attention"} <= set(found.names())
    return types.SimpleNamespace(**{
        "tp_q_head_num": HQ, "tp_k_head_num": HK, "tp_v_head_num": HK, "qk_head_dim": D, "v_head_dim": D,
        "scaling": D**-0.5, "layer_id": 5, "logit_cap": 0.0, "sliding_window_size": -1, "is_cross_attention": False,
        "attn_type": "decoder", "xai_temperature_len": -1, "use_irope": False, "pos_encoding_mode": "NONE",
        "logit_capping_method": "tanh", "k_scale_float": None, "v_scale_float": None, **values})


class Engine:
    """Layers 5 and up of a runner, its pool, and what three requests have in it. Of `latent` ones queries come in latent space, their
    rotary parts apart, and outputs leave in it."""

    def __init__(self, page: int, dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None, layers: int = 1,
                 device: torch.device | str = "cpu", window: int = 0, chunk: int = 0, sinks: torch.Tensor | None = None,
                 drafts: int = 0, latent: bool = False, **values: Any) -> None:
        self.dtype, self.kv_dtype, self.device = dtype, kv_dtype or dtype, device
        self.window, self.chunk, self.sinks, self.drafts = window, chunk, sinks, drafts
        self.trees: torch.Tensor | None = None  # [requests, drafts, drafts] of the last batch, if it verifies
        self.cap, self.encodes = values.get("logit_cap", 0.0), values.get("attn_type") == "encoder_only"
        self.generator = g = torch.Generator().manual_seed(5)
        self.heads, kv_heads, self.size, self.size_v, self.scale = HQ, HK, D, D, D**-0.5
        self.latent = latent
        if latent:
            self.size_v = LATENT["kv_lora_rank"]
            self.heads, kv_heads, self.size, self.scale = 4, 1, self.size_v + LATENT["qk_rope_head_dim"], 0.1
            values |= {"tp_q_head_num": self.heads, "tp_k_head_num": 1, "tp_v_head_num": 1, "qk_head_dim": self.size,
                       "v_head_dim": self.size_v, "scaling": self.scale}
        room = 160
        self.table = torch.zeros(9, room, dtype=torch.int32)
        self.indices = torch.tensor([7, 2, 4])
        blocks = 1 + torch.randperm(3 * room // page, generator=g).reshape(3, -1)
        self.table[self.indices] = (blocks[..., None] * page + torch.arange(page)).flatten(1).int()
        self.backend = registered["libattn"](types.SimpleNamespace(**{
            "req_to_token_pool": types.SimpleNamespace(req_to_token=self.table.to(device)), "page_size": page,
            "token_to_kv_pool": Pool(3 * room, page, self.kv_dtype, layers, device, kv_heads, self.size), "use_mla_backend": latent,
            "model_config": types.SimpleNamespace(dtype=dtype, **LATENT), "kv_cache_dtype": self.kv_dtype,
            "attention_chunk_size": chunk or None, "server_args": types.SimpleNamespace(
                speculative_algorithm="NGRAM" if drafts else None, speculative_num_draft_tokens=drafts or None)}))
        if self.kv_dtype.itemsize == 1:
            values |= {"k_scale_float": 0.5, "v_scale_float": 0.25}
        self.layers = [layer(layer_id=5 + i, sliding_window_size=window - 1 if window else -1, **values)
                       for i in range(layers)]
        self.keys = [[t.to(dtype) for t in (peaked(3, room, kv_heads, self.size, generator=g, scale=0.15 if latent else 1.0),
                                            torch.randn(3, room, kv_heads, self.size_v, generator=g))] for _ in range(layers)]
        for keys in self.keys if latent else ():
            keys[1] = keys[0][..., :self.size_v]
        self.lengths = [0, 0, 0]

    def batch(self, mode: str, queries: list[int]) -> Any:
        """The next tokens of the first requests, as SGLang's `ForwardBatch`."""
        self.lengths = [a + b for a, b in zip(self.lengths, queries)] + self.lengths[len(queries):]
        lengths, spec_info = torch.tensor(self.lengths[:len(queries)]), None
        self.trees = None
        if mode == "target_verify":
            self.trees = torch.stack([self.tree() for _ in queries])
            lengths -= self.drafts
            spec_info = types.SimpleNamespace(draft_token_num=self.drafts, custom_mask=torch.cat([
                torch.cat([tree.new_ones(self.drafts, 0 if torch.device(self.device).type == "cpu" else n), tree], 1).flatten()
                for tree, n in zip(self.trees, lengths.tolist())]).to(self.device))
        loc = torch.cat([self.table[i, n - c:n] for i, c, n in zip(self.indices.tolist(), queries, self.lengths)])
        return types.SimpleNamespace(
            forward_mode=Mode(mode), batch_size=len(queries), req_pool_indices=self.indices[:len(queries)].to(self.device),
            seq_lens=lengths.to(self.device), seq_lens_cpu=lengths, out_cache_loc=loc.long().to(self.device),
            spec_info=spec_info, encoder_lens=None, extend_seq_lens=torch.tensor(queries), extend_seq_lens_cpu=list(queries))

    def tree(self) -> torch.Tensor:
        """Drafts that see themselves and those between them and the first; parents come before children."""
        seen = torch.eye(self.drafts, dtype=torch.bool)
        for i in range(1, self.drafts):
            seen[i] |= seen[int(torch.randint(i, (1,), generator=self.generator))]
        return seen

    def padded(self, batch: Any, size: int) -> Any:
        """A decode or a verification as SGLang hands it over for a replay of a graph of `size` requests: all but the slots and the
        mask padded."""
        def longer(values: torch.Tensor, fill: int) -> torch.Tensor:
            return torch.cat([values, values.new_full((size - len(values),), fill)])

        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        return types.SimpleNamespace(
            forward_mode=batch.forward_mode, batch_size=size, req_pool_indices=longer(batch.req_pool_indices, 0),
            seq_lens=longer(batch.seq_lens, fill), seq_lens_cpu=longer(batch.seq_lens_cpu, fill),
            out_cache_loc=batch.out_cache_loc, spec_info=batch.spec_info, encoder_lens=None)

    def inputs(self, queries: list[int], padding: int = 0) -> list[list[torch.Tensor]]:
        """q, k and v of each layer, on the CPU."""
        rows = sum(queries) + padding
        return [[peaked(rows, self.heads * self.size, generator=self.generator).to(self.dtype)] +
                [torch.cat([t[r, n - c:n] for r, (c, n) in enumerate(zip(queries, self.lengths))] + [t[0, :padding]])
                 .flatten(1) for t in keys] for keys in self.keys]

    def forward(self, inputs: list[list[torch.Tensor]], batch: Any) -> list[torch.Tensor]:
        """All layers."""
        run = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        if self.latent:
            split = [[t.view(len(t), -1, self.size).split([self.size_v, self.size - self.size_v], -1) for t in qkv[:2]] for qkv in inputs]
            return [run(q.contiguous(), k, k, this, batch, q_rope=q_rope, k_rope=k_rope)
                    for ((q, q_rope), (k, k_rope)), this in zip(split, self.layers)]
        sinks = {} if self.sinks is None else {"sinks": self.sinks}
        return [run(*qkv, this, batch, save_kv_cache=True, **sinks) for qkv, this in zip(inputs, self.layers)]

    def error(self, inputs: list[list[torch.Tensor]], outputs: list[torch.Tensor], queries: list[int]) -> float:
        """The worst of all layers, requests and elements, from float64."""
        def stored(x: torch.Tensor, scale: float) -> torch.Tensor:
            return (x.float() / scale).to(self.kv_dtype).float() * scale if self.kv_dtype.itemsize == 1 else x

        def visible(r: int, count: int, length: int) -> torch.Tensor:
            seen, rows = causal(count, length, self.window) | self.encodes, torch.arange(length - count, length)[:, None]
            if self.trees is not None:
                seen[:, length - count:] &= self.trees[r]
            return seen & (rows // self.chunk == torch.arange(length) // self.chunk) if self.chunk else seen

        found = []
        for (q, *_), keys, out in zip(inputs, self.keys, outputs):
            assert out.shape == (len(q), self.heads * self.size_v), (out.shape, q.shape)
            # In float16 a sink far above the scores leaves rows under its least normal number.
            found.append(worst_of(
                out.cpu().view(-1, self.heads, self.size_v), q.view(-1, self.heads, self.size), stored(keys[0], 0.5), stored(keys[1], 0.25),
                queries, self.lengths, self.scale, visible, least=2**-24 if self.dtype == torch.float16 else 0.0, soft_cap=self.cap,
                sinks=None if self.sinks is None else self.sinks.cpu()))
        return max(found)

    def there(self, inputs: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [[t.to(self.device) for t in qkv] for qkv in inputs]

    def step(self, mode: str, queries: list[int]) -> float:
        """An eager step; its error."""
        batch = self.batch(mode, queries)
        inputs = self.inputs(queries)
        self.backend.init_forward_metadata(batch)
        return self.error(inputs, self.forward(self.there(inputs), batch), queries)


class Branches:
    """A draft model's steps between verifications as SGLang's worker runs them: each branch of a request, one token after the other;
    eager or, with `size`, as a graph of so many requests."""

    def __init__(self, engine: Engine, drafts: Any, size: int = 0) -> None:
        self.engine, self.drafts, self.topk, self.steps, self.size = engine, drafts, drafts.topk, drafts.steps, size
        self.outputs: list[torch.Tensor] = []
        self.graph: Graph | None = None
        if size:
            self.batch, self.static = self.metadata(0, size, in_capture=True), engine.there(self.inputs(size))
            for _ in range(2):
                self.capture()
            device = torch.device(engine.device)
            self.graph = Graph(self.forward if device.type == "cpu" else self.capture, device)

    def metadata(self, requests: int, size: int, in_capture: bool = False) -> Any:
        """That of the next drafts; its batch, padded to `size` requests."""
        engine, each = self.engine, self.topk * self.steps
        lengths, indices = torch.tensor(engine.lengths[:requests], dtype=torch.int64), engine.indices[:requests]
        slots = torch.cat([engine.table[i, n:n + each] for i, n in zip(indices.tolist(), lengths.tolist())] or
                          [torch.zeros(size * each, dtype=torch.int32)])
        batch = types.SimpleNamespace(forward_mode=Mode("decode"), batch_size=requests, req_pool_indices=indices.to(engine.device),
                                      seq_lens=lengths.to(engine.device), seq_lens_cpu=lengths,
                                      out_cache_loc=slots.long().to(engine.device), spec_info=None)
        if size:
            batch = engine.padded(batch, size)
            self.drafts.init_forward_metadata_out_graph(batch, in_capture=in_capture)
        else:
            self.drafts.init_forward_metadata(batch)
        return batch

    def capture(self) -> None:
        self.drafts.init_forward_metadata_in_graph(self.batch)
        self.forward()

    def inputs(self, requests: int) -> list[list[torch.Tensor]]:
        """q, k and v of each step, on the CPU."""
        def rows(heads: int) -> list[torch.Tensor]:
            return [requests * self.topk, heads * D]

        g, dtype = self.engine.generator, self.engine.dtype
        return [[t.to(dtype) for t in (peaked(*rows(HQ), generator=g), peaked(*rows(HK), generator=g), torch.randn(*rows(HK), generator=g))]
                for _ in range(self.steps - 1)]

    def forward(self) -> None:
        self.outputs[:] = [step.forward_decode(*qkv, self.engine.layers[0], None)
                           for step, qkv in zip(self.drafts.attn_backends, self.static)]

    def step(self, requests: int) -> float:
        """All steps of the first requests; the error from float64."""
        engine, inputs = self.engine, self.inputs(self.size or requests)
        self.metadata(requests, self.size)
        if self.graph is None:
            self.static = engine.there(inputs)
            self.forward()
        else:
            for kept, new in zip(self.static, inputs):
                for a, b in zip(kept, new):
                    a.copy_(b)
            self.graph.replay()
        found = []
        for i, out in enumerate(self.outputs):
            for row in range(requests * self.topk):
                n = engine.lengths[row // self.topk]
                k, v = (torch.cat([engine.keys[0][at][row // self.topk, :n], *(qkv[1 + at][row].view(1, HK, D) for qkv in inputs[:i + 1])])
                        for at in range(2))
                expected, _ = attention(inputs[i][0][row].view(1, HQ, D), k, v, D**-0.5, causal(1, n + i + 1))
                found.append(worst(out[row].view(1, HQ, D).cpu().double(), expected))
        return max(found)


def recorded(capture: Callable[[], None]) -> None:
    """The call that a graph captures; on a CPU, where a replay is that call again, nothing else knows that it is one."""
    with unittest.mock.patch("libattn.integrations.sglang.gathered.capturing", lambda device: True):
        capture()


class Decodes:
    """A graph of `size` decodes, or verifications if the engine speculates, captured as SGLang captures it: metadata, two warm-ups,
    and the forward."""

    def __init__(self, engine: Engine, size: int) -> None:
        self.engine, self.size, self.each = engine, size, engine.drafts or 1
        self.mode = "target_verify" if engine.drafts else "decode"
        mask = torch.ones(size * self.each * (self.each + 1), dtype=torch.bool, device=engine.device)
        none = types.SimpleNamespace(forward_mode=Mode(self.mode), req_pool_indices=torch.zeros(0, dtype=torch.int64, device=engine.device),
                                     seq_lens=torch.zeros(0, dtype=torch.int64, device=engine.device), batch_size=0,
                                     seq_lens_cpu=torch.zeros(0, dtype=torch.int64),
                                     out_cache_loc=torch.zeros(size * self.each, dtype=torch.int64, device=engine.device),
                                     spec_info=types.SimpleNamespace(
                                         draft_token_num=self.each, custom_mask=mask) if engine.drafts else None)
        self.batch, self.static = engine.padded(none, size), engine.there(engine.inputs([], size * self.each))
        self.outputs: list[torch.Tensor] = []
        self.metadata(self.batch, in_capture=True)
        for _ in range(2):
            self.capture()
        self.graph = Graph(lambda: recorded(self.capture), torch.device(engine.device))

    def metadata(self, batch: Any, in_capture: bool = False) -> None:
        if not in_capture:  # into SGLang's arrays, which graphs of decodes read
            self.batch.seq_lens.copy_(batch.seq_lens)
            self.batch.out_cache_loc.zero_()[:len(batch.out_cache_loc)].copy_(batch.out_cache_loc)
        self.engine.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)

    def capture(self) -> None:
        self.engine.backend.init_forward_metadata_in_graph(self.batch)
        self.forward()

    def forward(self) -> None:
        self.outputs[:] = self.engine.forward(self.static, self.batch)

    def replay(self, requests: int) -> float:
        """A token, or the drafts, of each of the first requests, with nothing but metadata in between; the error."""
        engine, queries = self.engine, [self.each] * requests
        batch = engine.batch(self.mode, queries)
        inputs = engine.inputs(queries, (self.size - requests) * self.each)
        for kept, new in zip(self.static, inputs):
            for a, b in zip(kept, new):
                a.copy_(b)
        self.metadata(engine.padded(batch, self.size))
        self.graph.replay()
        return engine.error(inputs, self.outputs, queries)


class Interface(unittest.TestCase):
    def test_entry_point(self) -> None:
        adapter.register()
        adapter.register()
        self.assertEqual(CHOICES, ["triton", "libattn"])
        self.assertIn("libattn", registered)
        supports = hooks["sglang.srt.utils.common.support_triton"]
        self.assertIs(supports(lambda backend: True, "libattn"), False)
        self.assertIs(supports(lambda backend: True, "triton"), True)

    def test_before_weights(self) -> None:
        """What is refused there: one sentence with the reasons and the way out."""
        adapter.register()
        libattn.torch.configure(ignore_environment=True)
        check = hooks["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]
        arguments = {"attention_backend": "libattn", "prefill_attention_backend": None, "decode_attention_backend": None,
                     "speculative_algorithm": None, "disable_hybrid_swa_memory": False, "kv_cache_dtype": "auto",
                     "speculative_draft_attention_backend": None, "disable_cuda_graph": False, "speculative_eagle_topk": None,
                     "cuda_graph_config": None, "speculative_num_steps": None, "speculative_adaptive": False,
                     "enable_multi_layer_eagle": False}
        model = {"dtype": torch.float32, "num_attention_heads": 8, "get_num_kv_heads": lambda ranks: 2 // ranks, "head_dim": 64, "model_path": "",
                 "hf_config": types.SimpleNamespace(architectures=["DeepseekV3ForCausalLM"]), **LATENT}
        runner = {"is_draft_worker": False, "use_mla_backend": False, "is_hybrid_swa": False, "device": "cpu", "gpu_id": 0, "page_size": 16}

        def load(**values: Any) -> None:
            parts = [types.SimpleNamespace(**{k: values.get(k, v) for k, v in part.items()}) for part in (arguments, model, runner)]
            parts[2].server_args, parts[2].model_config = parts[:2]
            check(parts[2])

        load()
        load(kv_cache_dtype="fp8_e4m3")
        load(attention_backend="triton", speculative_algorithm="EAGLE")
        load(speculative_algorithm="NGRAM")
        load(use_mla_backend=True)
        other = {"speculative_draft_attention_backend": "triton"}
        full, disabled = (types.SimpleNamespace(decode=types.SimpleNamespace(backend=name)) for name in ("full", "disabled"))
        load(speculative_algorithm="EAGLE", **other)
        load(speculative_algorithm="EAGLE3", is_draft_worker=True)
        load(speculative_algorithm="STANDALONE", is_draft_worker=True, head_dim=60, **other)
        adaptive = {"speculative_algorithm": "EAGLE", "device": "cuda", "speculative_adaptive": True}
        for text, values in (("speculative_algorithm: EAGLE, whose drafts of any number of steps would be captured; supported: "
                              ".*disable-cuda-graph", adaptive),
                             ("speculative_algorithm: EAGLE, whose drafts of any number of steps would be captured",
                              adaptive | {"disable_cuda_graph": True, "cuda_graph_config": full}),
                             ("speculative_algorithm: EAGLE, whose draft extends would be captured",
                              {"speculative_algorithm": "EAGLE", "device": "cuda", "enable_multi_layer_eagle": True}),
                             ("speculative_eagle_topk: 3 with pages of 16 tokens; supported: 1, or a page_size of 1",
                              {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 3}),
                             ("head_size is 60", {"speculative_algorithm": "EAGLE", "is_draft_worker": True, "head_dim": 60}),
                             ("speculative_algorithm: DFLASH", {"speculative_algorithm": "DFLASH", **other}),
                             ("model: multi-head latent attention over lists; supported: latent attention of all keys",
                              {"use_mla_backend": True, "hf_config": types.SimpleNamespace(
                                  architectures=["DeepseekV32ForCausalLM"], index_topk=64)}),
                             ("model: MiniCPM3ForCausalLM; supported: latent attention by SGLang's DeepseekV2AttentionMLA",
                              {"use_mla_backend": True, "hf_config": types.SimpleNamespace(architectures=["MiniCPM3ForCausalLM"])}),
                             ("kv_cache_dtype: fp8_e4m3; supported: auto, next to multi-head latent attention",
                              {"use_mla_backend": True, "kv_cache_dtype": "fp8_e4m3"}),
                             ("disable_hybrid_swa_memory: False.*--disable-hybrid-swa-memory", {"is_hybrid_swa": True}),
                             ("kv_cache_dtype: nvfp4; supported: auto, bf16", {"kv_cache_dtype": "nvfp4"}),
                             ("dtype: torch.float64", {"dtype": torch.float64}), ("head_size is 60", {"head_dim": 60})):
            with self.assertRaisesRegex(libattn.AttnError, f"{text}.*leave out --attention-backend libattn"):
                load(attention_backend="triton", decode_attention_backend="libattn", **values)
        self.caches_of_checkpoints(load)
        for values in (adaptive | {"cuda_graph_config": disabled}, {"speculative_eagle_topk": 3, "page_size": 1}):
            with self.assertRaisesRegex(libattn.AttnError, "dtype: torch.float64") as refused:
                load(**adaptive | {"speculative_adaptive": False, "cuda_graph_config": full, "dtype": torch.float64} | values)
            self.assertNotIn("captured", str(refused.exception))
        load(speculative_algorithm="EAGLE", speculative_eagle_topk=3, **other)
        load(is_hybrid_swa=True, disable_hybrid_swa_memory=True)
        module = sys.modules["sglang"]
        try:
            module.__version__ = "0.6.0"  # type: ignore[attr-defined]
            with self.assertRaisesRegex(libattn.UnsupportedError, "sglang: 0.6.0; supported: 0.5.16, 0.5.23.*ANY_VERSION"):
                load()
            with unittest.mock.patch.dict("os.environ", {"ATTN_SGLANG_ANY_VERSION": "1"}):
                load()
        finally:
            module.__version__ = "0.5.16"  # type: ignore[attr-defined]

    def caches_of_checkpoints(self, load: Callable[..., None]) -> None:
        """Which of them SGLang makes fp8 under `auto`, as its configurations of quantizations read them."""
        def latent(text: str, **values: Any) -> None:
            values = {"use_mla_backend": True, "dtype": torch.bfloat16, **values}
            if not text:
                load(**values)
                return
            with self.assertRaisesRegex(libattn.AttnError, f"kv_cache_dtype: auto, .*checkpoint makes fp8_e4m3; supported: {text}.*leave out"):
                load(**values)

        def config(**found: Any) -> Any:
            return types.SimpleNamespace(architectures=["DeepseekV3ForCausalLM"], quantization_config=found)

        scheme, bf16 = {"type": "float", "num_bits": 8, "dynamic": False}, "torch.bfloat16, next to.*--kv-cache-dtype bfloat16"
        whole, compressed = {"strategy": "tensor", **scheme}, "compressed-tensors"
        latent(bf16, hf_config=config(quant_method="modelopt", kv_cache_scheme=scheme))
        latent(bf16, hf_config=config(quant_method="modelopt_fp4", kv_cache_quant_algo="FP8"))
        latent(bf16, hf_config=config(quantization={"quant_algo": "NVFP4", "kv_cache_quant_algo": "fp8"}))
        latent(bf16, hf_config=types.SimpleNamespace(
            architectures=["KimiK25ForConditionalGeneration"], text_config=config(quant_method="modelopt", kv_cache_scheme="FP8")))
        for found in ({"quant_method": "modelopt"}, {"quant_method": "fp8"}, {"quant_method": compressed, "kv_cache_scheme": whole},
                      {"quant_method": "modelopt", "kv_cache_scheme": {**scheme, "num_bits": 4}}, {"kv_cache_quant_algo": None}):
            latent("", hf_config=config(**found))
        latent("", hf_config=config(quant_method="modelopt", kv_cache_scheme=scheme), kv_cache_dtype="bfloat16")
        load(hf_config=config(quant_method="modelopt", kv_cache_scheme=scheme))
        with tempfile.TemporaryDirectory() as folder:
            latent("", model_path=folder)
            Path(folder, "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}')
            latent(bf16, model_path=folder)
        with unittest.mock.patch("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere"):
            for path in ("nvidia/of-a-hub", "/nowhere/model.gguf", "s3://bucket/model"):
                latent("", model_path=path)
        with unittest.mock.patch.object(sys.modules["sglang"], "__version__", "0.5.23"):
            latent(bf16, hf_config=config(quant_method=compressed, kv_cache_scheme=whole))
            latent("", hf_config=config(quant_method=compressed, kv_cache_scheme=scheme))

    def test_every_call_of_the_engine_fits(self) -> None:
        base = RECORDED["modules"]["sglang.srt.layers.attention.base_attn_backend"]["AttentionBackend"]
        self.assertEqual(published.mismatches(LibattnBackend, base), [])
        raising = {"forward_extend", "forward_decode", "forward_mixed", "init_cuda_graph_state",
                   "get_cuda_graph_seq_len_fill_value"}
        ours = [kind for kind in LibattnBackend.__mro__ if kind.__module__.startswith("libattn")]
        self.assertEqual(raising - {name for kind in ours for name in vars(kind)}, set())


class Steps(unittest.TestCase):
    def setUp(self) -> None:
        adapter.register()

    def run_steps(self, backend: str, page: int, bound: float = 2e-5, **values: Any) -> None:
        """Extend, mixed extend with prefixes, decode; each element."""
        libattn.torch.configure(ignore_environment=True, backend=backend)
        engine = Engine(page, **values)
        for mode, queries in (("extend", [6, 19, 1]), ("extend", [1, 8, 20]), ("decode", [1, 1, 1])):
            self.assertLess(engine.step(mode, queries), bound, (backend, page, mode))
        found = libattn.torch.table()[0]
        self.assertEqual((found.index, found.decode.split("@")[0]), (5, backend))

    def test_page_sizes(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            for page in (1, 16):
                self.run_steps(backend, page)

    def test_terms(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, 1, window=9)
            self.run_steps(backend, 16, logit_cap=4.0)
            for page in (1, 16):
                self.run_steps(backend, page, chunk=16, use_irope=True)
            self.run_steps(backend, 16, sinks=torch.linspace(-1, 4, HQ))

    def test_latent(self) -> None:
        """Latent rows: eager steps and replays."""
        parts = {f"sglang.srt.models.deepseek_common.{name}": items for name, items in (
            ("attention_backend_handler", {"AttentionBackendRegistry": types.SimpleNamespace(register=handlers.__setitem__)}),
            ("utils", {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ["fa3"]}),
            ("attention_forward_methods.forward_methods", {"AttnForwardMethod": types.SimpleNamespace(MLA="absorbed")}))}
        published.put(parts)
        with self.assertRaisesRegex(libattn.UnsupportedError, "kv_cache_dtype: torch.float8_e4m3fn; supported: torch.bfloat16, next to"):
            Engine(1, torch.bfloat16, torch.float8_e4m3fn, latent=True)
        for backend in each_backend():
            for page in (1, 16):
                engine = Engine(page, latent=True)
                self.assertEqual(handlers["libattn"](None, None), "absorbed")
                self.assertIn("libattn", sys.modules["sglang.srt.models.deepseek_common.utils"].FORWARD_ABSORB_CORE_ATTENTION_BACKENDS)
                with self.assertRaisesRegex(libattn.UnsupportedError, "q_rope: None; supported: queries in latent space"):
                    engine.backend.forward_extend(*engine.keys[0], None, engine.layers[0], None)
                for mode, queries in (("extend", [6, 19, 1]), ("extend", [1, 8, 20]), ("decode", [1, 1, 1])):
                    self.assertLess(engine.step(mode, queries), 2e-5, (backend, page, mode))
                engine.backend.init_cuda_graph_state(3, 3)
                graph = Decodes(engine, 3)
                for requests in (3, 2):
                    self.assertLess(graph.replay(requests), 2e-5, (backend, page, requests))

    def test_drafts(self) -> None:
        """Verifications in eager steps: each request's drafts are a tree of their own."""
        for backend in ("cpu_ref", "cpu_simd"):
            for page, drafts in ((1, 4), (16, 40)):  # words of a row: 1, 2
                libattn.torch.configure(ignore_environment=True, backend=backend)
                engine = Engine(page, drafts=drafts)
                for mode, queries in (("extend", [6, 19, 1]), ("target_verify", [drafts] * 3), ("target_verify", [drafts] * 2)):
                    self.assertLess(engine.step(mode, queries), 2e-5, (backend, page, mode))

    def test_steps_of_a_draft_model(self) -> None:
        """The steps between verifications: each branch of a request, one token after the other, sees the context and itself."""
        adapter.register()
        made = {phase: hooks[f"sglang.srt.speculative.draft_utils.DraftBackendFactory.create_{phase}_backend"]
                for phase in ("decode", "draft_extend")}
        for backend in ("cpu_ref", "cpu_simd"):
            for page, topk, steps in ((1, 1, 3), (16, 1, 4), (1, 3, 4)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                engine = Engine(page, drafts=4)
                arguments = types.SimpleNamespace(attention_backend="libattn", speculative_draft_attention_backend=None)
                runner = types.SimpleNamespace(attn_backend=engine.backend, server_args=arguments)
                factory = types.SimpleNamespace(draft_model_runner=runner, topk=topk, speculative_num_steps=steps)
                self.assertIs(made["draft_extend"](None, factory), engine.backend)
                drafts = made["decode"](None, factory)
                self.assertEqual(len(drafts.attn_backends), steps - 1)
                eager = Branches(engine, drafts)
                for queries in ([20, 7, 100], [3, 1, 2]):
                    self.assertLess(engine.step("extend", queries), 2e-5)
                    self.assertLess(eager.step(3), 2e-5, (backend, page, topk))
                drafts.init_cuda_graph_state(3, 3 * topk)
                graphs = {size: Branches(engine, drafts, size) for size in (3, 1)}
                for size, requests in ((3, 3), (1, 1), (3, 2)):
                    first = engine.backend.token_to_kv_pool.k[:, int(engine.table[0, 0])].clone()
                    self.assertLess(graphs[size].step(requests), 2e-5, (backend, page, topk, size, requests))
                    self.assertTrue(torch.equal(  # padding, of request 0, is not written
                        first.nan_to_num(), engine.backend.token_to_kv_pool.k[:, int(engine.table[0, 0])].nan_to_num()))
                    self.assertLess(engine.step("extend", [2, 1, 3]), 2e-5)
                with self.assertRaisesRegex(libattn.OrderError, f"replay of {2 * topk} requests or branches; so many were not captured"):
                    graphs[3].metadata(2, 2)
                other = made["decode"](None, types.SimpleNamespace(draft_model_runner=runner, topk=topk, speculative_num_steps=steps + 1))
                with self.assertRaisesRegex(libattn.UnsupportedError, "speculative_adaptive: a second set of captured drafts"):
                    other.init_cuda_graph_state(3, 3 * topk)
                self.assertLess(graphs[3].step(3), 2e-5)
                factory.speculative_num_steps = 1
                self.assertIs(made["decode"](None, factory), None)
                arguments.speculative_draft_attention_backend = "triton"
                self.assertEqual(made["draft_extend"](lambda factory: "SGLang's own", factory), "SGLang's own")

    def test_encoder_only(self) -> None:
        """Every query sees every key of its request, over the pool as well."""
        for backend in each_backend():
            self.assertLess(Engine(16, attn_type="encoder_only").step("extend", [6, 19, 1]), 2e-5)

    def test_fp8_pool(self) -> None:
        for backend in ("cpu_ref", "cpu_simd"):
            self.run_steps(backend, 16, 1e-4, kv_dtype=torch.float8_e4m3fn)

    def test_one_plan_a_step(self) -> None:
        """For all layers of a kind, once they ran; parameters are copied again once a step, too."""
        calls: collections.Counter[str] = collections.Counter()
        update, refresh = libattn.Plan.update, Bound.refresh
        libattn.Plan.update = lambda *a, **k: (calls.update(["update"]), update(*a, **k))[1]  # type: ignore[method-assign]
        Bound.refresh = lambda *a: (calls.update(["refresh"]), refresh(*a))[1]  # type: ignore[method-assign]
        try:
            for kinds in (1, 2):  # full; sliding and full
                libattn.torch.configure(ignore_environment=True)
                sinks = torch.zeros(HQ, dtype=torch.bfloat16)
                engine = Engine(16, layers=4, sinks=sinks)
                for this in engine.layers[:4:2] if kinds == 2 else []:
                    this.sliding_window_size = 100  # more than there is
                engine.step("extend", [3, 1, 2])
                calls.clear()
                for value in (1.0, -1.0, 4.0):
                    sinks.data.fill_(value)
                    self.assertLess(engine.step("decode", [1, 1, 1]), 2e-5)
                self.assertEqual(calls, {"update": 3 * kinds, "refresh": 3 * kinds})
        finally:
            libattn.Plan.update, Bound.refresh = update, refresh  # type: ignore[method-assign]

    def test_captured_decodes(self) -> None:
        """Graphs of two sizes, whose plans metadata alone brings to the next batch, with eager steps in between. The replay
        of a graph is played: Python runs its calls again."""
        for backend in ("cpu_ref", "cpu_simd"):
            for page, drafts in ((1, 0), (16, 0), (1, 5), (16, 5)):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                sinks = torch.zeros(HQ, dtype=torch.bfloat16)
                engine = Engine(page, layers=2, sinks=sinks, drafts=drafts)
                engine.backend.init_cuda_graph_state(max_bs=3, max_num_tokens=3 * max(drafts, 1))
                graphs = {size: Decodes(engine, size) for size in (3, 1)}
                self.assertLess(engine.step("extend", [20, 7, 100]), 2e-5)
                for size, requests in ((3, 3), (1, 1), (3, 2), (3, 3)):
                    sinks.data.add_(1.0)
                    first = engine.backend.token_to_kv_pool.k[:, int(engine.table[0, 0])].clone()
                    self.assertLess(graphs[size].replay(requests), 2e-5, (backend, page, drafts, size, requests))
                    self.assertTrue(torch.equal(  # padding, of request 0, is not written
                        first.nan_to_num(), engine.backend.token_to_kv_pool.k[:, int(engine.table[0, 0])].nan_to_num()))
                self.assertLess(engine.step("extend", [2, 1, 9]), 2e-5)
                self.assertLess(graphs[3].replay(3), 2e-5)
                with self.assertRaisesRegex(libattn.OrderError, "replay of 2 requests or branches; so many were not captured"):
                    engine.backend.init_forward_metadata_out_graph(engine.padded(engine.batch(graphs[1].mode, [drafts or 1]), 2))
                engine.backend.token_to_kv_pool = Pool(480, page, layers=2)  # another pool: other addresses
                engine.step("decode", [1, 1, 1])
                with self.assertRaisesRegex(libattn.OrderError, "bound again since"):
                    graphs[3].replay(3)

    def test_a_layer_after_captures(self) -> None:
        """One that no decode has: it is bound alone, and graphs stay."""
        libattn.torch.configure(ignore_environment=True)
        engine = Engine(16, layers=2)
        engine.backend.init_cuda_graph_state(3, 3)
        last, engine.layers = engine.layers[1:], engine.layers[:1]
        graph = Decodes(engine, 3)
        engine.layers += last
        for queries in ([20, 7, 30], [1, 3, 2]):
            self.assertLess(engine.step("extend", queries), 2e-5)
        del engine.layers[1]
        self.assertLess(graph.replay(2), 2e-5)

    def engine(self, **values: Any) -> LibattnBackend:
        return registered["libattn"](types.SimpleNamespace(**{
            "req_to_token_pool": types.SimpleNamespace(req_to_token=torch.zeros(1, 8).int()),
            "token_to_kv_pool": Pool(8, 1), "page_size": 1, "use_mla_backend": False, **values}))

    def test_refusals(self) -> None:
        with self.assertRaisesRegex(libattn.UnsupportedError, "hybrid pool"):
            self.engine(token_to_kv_pool=types.SimpleNamespace(swa_layer_nums=3))
        engine = self.engine()
        with self.assertRaisesRegex(libattn.UnsupportedError, "max_num_tokens: 12 of 4.*disable-cuda-graph"):
            engine.init_cuda_graph_state(max_bs=4, max_num_tokens=12)
        with self.assertRaisesRegex(libattn.UnsupportedError, "forward_mode: a captured extend.*disable-prefill-cuda-graph"):
            engine.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=Mode("extend")), in_capture=True)
        with self.assertRaisesRegex(libattn.OrderError, "init_cuda_graph_state"):
            engine.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=Mode("decode")), in_capture=True)
        with self.assertRaisesRegex(libattn.UnsupportedError, "forward_mode: a captured target_verify; supported: captured DECODE"):
            engine.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=Mode("target_verify")), in_capture=True)
        with self.assertRaisesRegex(libattn.UnsupportedError, "spec_info: object; .*without --speculative-algorithm"):
            engine.init_forward_metadata(types.SimpleNamespace(forward_mode=Mode("extend"), spec_info=object()))
        drafts = self.engine(server_args=types.SimpleNamespace(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4))
        with self.assertRaisesRegex(libattn.UnsupportedError, "max_num_tokens: 4 of 4 requests; supported: 4 a request"):
            drafts.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
        with self.assertRaisesRegex(libattn.UnsupportedError, "forward_mode: a captured decode; supported: captured TARGET_VERIFY"):
            drafts.init_forward_metadata_out_graph(types.SimpleNamespace(forward_mode=Mode("decode")), in_capture=True)
        with self.assertRaisesRegex(libattn.UnsupportedError, r"draft_token_num: 3; supported: speculative_num_draft_tokens \(4\)"):
            drafts.init_forward_metadata(types.SimpleNamespace(
                forward_mode=Mode("target_verify"), seq_lens=torch.ones(1), spec_info=types.SimpleNamespace(draft_token_num=3)))
        engine.forward_metadata = types.SimpleNamespace(captured=None)  # type: ignore[assignment]
        for field, values in (("attn_type", {"attn_type": "decoder_bidirectional"}),
                              ("attn_type", {"is_cross_attention": True}),
                              ("sliding_window_size", {"attn_type": "encoder_only", "sliding_window_size": 4}),
                              ("pos_encoding_mode", {"pos_encoding_mode": "ALIBI"}),
                              ("xai_temperature_len", {"xai_temperature_len": 8}),
                              ("logit_capping_method", {"logit_cap": 3.0, "logit_capping_method": "clip"})):
            with self.assertRaisesRegex(libattn.UnsupportedError, f"{field}: "):
                engine.forward_decode(torch.zeros(1, HQ * D), None, None, layer(**values), None)
        engine.forward_metadata = None
        with self.assertRaises(libattn.OrderError):
            engine.forward_decode(torch.zeros(1, HQ * D), None, None, layer(), None)

    def test_idle(self) -> None:
        engine = self.engine()
        engine.init_forward_metadata(types.SimpleNamespace(forward_mode=Mode("idle")))
        self.assertIsNone(engine.forward_metadata)
