# SPDX-License-Identifier: Apache-2.0
"""SGLang's gated delta layers through the adapter, over stand-ins of its pools: steps, checkpoints for the prefix cache and replays are
held against Transformers' layer. Inside the engine it runs by tools/test_engines.sh."""
import types
import unittest
import unittest.mock
from typing import Any

import torch

import libattn
import libattn.torch
import published
import test_sglang as recorded
from captured import Graph
from common import each_backend, worst
from test_recurrent import HIDDEN, Subject, qwen3_5, worst_of_steps


class Hybrid:
    """SGLang's backend of both kinds of layers, as far as the adapter makes it."""

    def __init__(self, full: Any, states: Any, layers: list[int]) -> None:
        self.full_attn_backend, self.linear_attn_backend, self.layers = full, states, layers


published.put({"sglang.srt.layers.attention.hybrid_linear_attn_backend": {"HybridLinearAttnBackend": Hybrid}})
from libattn.integrations import sglang as adapter  # noqa: E402
from libattn.integrations.sglang.gdn import LibattnGdnBackend  # noqa: E402

SLOTS, CHUNK = 9, 16
WRAPPER = "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper"


class Pool:
    """A state and a window in each slot of each layer; requests have the slots that `where` says."""

    def __init__(self, subject: Subject, where: list[int]) -> None:
        gdn, channels = subject.gdn, subject.module.conv1d.weight.shape[0]
        self.req_to_token, self.where = torch.zeros(4, 160, dtype=torch.int32), torch.tensor(where)
        self.state = torch.full((SLOTS, gdn.num_v_heads, gdn.head_size_v, gdn.head_size_k), float("nan"))
        self.window = torch.full((SLOTS, channels, gdn.conv_width - 1), float("nan"))

    def get_mamba_indices(self, requests: torch.Tensor) -> torch.Tensor:
        return self.where[requests].int()

    def translate_mamba_indices(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    def mamba2_layer_cache(self, layer_id: int) -> Any:
        return types.SimpleNamespace(conv=[self.window], temporal=self.state)


def arguments(chunks: bool = True, **values: Any) -> Any:
    return types.SimpleNamespace(**{
        "enable_mamba_extra_buffer": lambda: chunks, "mamba_cache_chunk_size": CHUNK, "speculative_algorithm": None,
        "linear_attn_backend": "triton", "linear_attn_prefill_backend": None, "linear_attn_decode_backend": None,
        "enable_linear_replayssm": False, "enable_unified_memory": False, "enable_page_major_kv_layout": False, "attention_backend": "libattn",
        "prefill_attention_backend": None, "decode_attention_backend": None, "disable_hybrid_swa_memory": False,
        "kv_cache_dtype": "auto", **values})


class Engine:
    """A layer, its backend and a pool."""

    def __init__(self, where: list[int], chunks: bool = True) -> None:
        self.subject = qwen3_5()
        gdn, module = self.subject.gdn, self.subject.module
        self.pool, given = Pool(self.subject, where), arguments(chunks)
        self.backend = LibattnGdnBackend(types.SimpleNamespace(req_to_token_pool=self.pool, server_args=given))
        self.layer = types.SimpleNamespace(
            layer_id=2, num_k_heads=gdn.num_k_heads, num_v_heads=gdn.num_v_heads, head_k_dim=gdn.head_size_k, head_v_dim=gdn.head_size_v,
            conv_weights=module.conv1d.weight.squeeze(1), A_log=module.A_log, dt_bias=module.dt_bias)

    def batch(self, mode: str, requests: list[int], queries: list[int], lengths: list[int], **values: Any) -> Any:
        """A step of the named requests, whose lengths hold its tokens."""
        counts, total = torch.tensor(queries), torch.tensor(lengths)
        return types.SimpleNamespace(
            forward_mode=recorded.Mode(mode), batch_size=len(requests), req_pool_indices=torch.tensor(requests), seq_lens=total,
            extend_seq_lens=counts, extend_seq_lens_cpu=queries, extend_prefix_lens=total - counts, spec_info=None,
            **{"mamba_track_mask": None, "mamba_track_indices": None, "mamba_track_seqlens": None, **values})

    def run(self, batch: Any, x: torch.Tensor) -> torch.Tensor:
        mixed, a, b = self.subject.inputs(x)
        run = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        return self.subject.finish(run(layer=self.layer, forward_batch=batch, q=None, k=None, v=None, save_kv_cache=True,
                                       mixed_qkv=mixed, a=a, b=b), x)

    def step(self, batch: Any, x: torch.Tensor) -> torch.Tensor:
        self.backend.init_forward_metadata(batch)
        return self.run(batch, x)

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        return self.subject.module(x[None])[0]


class GatedDelta(unittest.TestCase):
    def setUp(self) -> None:
        adapter.register()
        libattn.torch.configure(ignore_environment=True)
        self.hidden = torch.randn(2, 160, HIDDEN, generator=torch.Generator().manual_seed(3))

    def test_steps(self) -> None:
        """Prompts, single tokens, a longer piece over earlier context; with a prefix cache that keeps states inside of steps or not."""
        for backend in ("cpu_ref", "cpu_simd"):
            for chunks in (False, True):
                libattn.torch.configure(ignore_environment=True, backend=backend)
                engine = Engine([3, 7], chunks)

                def step(queries: list[int], lengths: list[int], x: torch.Tensor, engine: Engine = engine) -> torch.Tensor:
                    return engine.step(engine.batch("decode" if max(queries) == 1 else "extend", [0, 1], queries, lengths), x)

                self.assertLess(worst_of_steps(engine.subject, step), 1e-3, (backend, chunks))
                row = libattn.torch.table()[-1]
                self.assertEqual((row.index, row.kind, row.decode.split("@")[0]), (2, "recurrent", backend))

    def test_parameters_that_moved(self) -> None:
        """A layer whose decay is another tensor now, and a step of padding alone, which writes no state."""
        engine = Engine([3, 7])
        for _ in range(4):
            out = engine.step(engine.batch("extend", [0], [5], [5]), self.hidden[0, :5])
            self.assertLess(worst(out, engine.expected(self.hidden[0, :5])), 1e-3)
            for name in ("A_log", "dt_bias"):
                moved = torch.nn.Parameter(getattr(engine.layer, name).detach() + 0.5)
                setattr(engine.layer, name, moved)
                setattr(engine.subject.module, name, moved)
        state = engine.pool.state.clone()
        engine.step(engine.batch("decode", [0], [1], [6], _original_batch_size=0), self.hidden[0, 5:6])
        torch.testing.assert_close(engine.pool.state, state, rtol=0, atol=0, equal_nan=True)

    def test_checkpoints(self) -> None:
        """What a tracked step leaves in another slot is the state at the last chunk of its tokens, or at the token of a decode: a
        request that goes on from there has the right output."""
        for backend in each_backend():
            engine = Engine([3, 7, 1])
            mask, where = torch.tensor([True, False]), torch.tensor([1, 5])

            def goes_on(request: int, at: int, engine: Engine = engine) -> float:
                x = self.hidden[request, at:at + 5]
                out = engine.step(engine.batch("extend", [2], [5], [at + 5]), x)
                return worst(out, engine.expected(self.hidden[request, :at + 5])[at:])

            for queries, lengths, at in (([37, 20], [37, 20], 32), ([40, 9], [77, 29], 69), ([48, 8], [125, 37], 125)):
                x = torch.cat([self.hidden[r, n - c:n] for r, (c, n) in enumerate(zip(queries, lengths))])
                # As SGLang says it: chunks are counted from the step's first token.
                engine.step(engine.batch("extend", [0, 1], queries, lengths, mamba_track_mask=mask, mamba_track_indices=where,
                                         mamba_track_seqlens=torch.tensor([lengths[0], -1])), x)
                self.assertLess(goes_on(0, at), 1e-3, (backend, at))
            self.assertTrue(bool(engine.pool.state[5].isnan().all()), "a request that is not tracked")
            for lengths, masks in (([126, 38], [False, False]), ([127, 39], [False, True])):
                x = torch.stack([self.hidden[r, lengths[r] - 1] for r in range(2)])
                engine.step(engine.batch("decode", [0, 1], [1, 1], lengths, mamba_track_mask=torch.tensor(masks),
                                         mamba_track_indices=torch.tensor([5, 1])), x)
            self.assertLess(goes_on(1, 39), 1e-3, backend)
            self.assertTrue(bool(engine.pool.state[5].isnan().all()), "a request that is not tracked")

    def test_captured_decodes(self) -> None:
        """Replays of three requests, of which one is padding and one is tracked, as SGLang says in an array that captures alone are
        given; a later capture leaves states as they are."""
        engine = Engine([4, 6, 1])
        engine.step(engine.batch("extend", [0, 1], [9, 9], [9, 9]), self.hidden[:, :9].flatten(0, 1))
        backend = engine.backend
        backend.init_cuda_graph_state(3, 3)
        static, mask = torch.zeros(3, HIDDEN), torch.zeros(3, dtype=torch.bool)
        none = engine.batch("decode", [0, 0, 0], [1, 1, 1], [1, 1, 1], mamba_track_mask=mask,
                            mamba_track_indices=torch.zeros(3, dtype=torch.int64))
        outputs: list[torch.Tensor] = []

        def once() -> None:
            backend.init_forward_metadata_in_graph(none)
            outputs[:] = [engine.run(none, static)]

        def capture() -> Graph:
            states = engine.pool.state.clone(), engine.pool.window.clone()
            none.seq_lens.fill_(backend.get_cuda_graph_seq_len_fill_value())
            backend.init_forward_metadata_out_graph(none, in_capture=True)
            for _ in range(2):
                once()
            for before, after in zip(states, (engine.pool.state, engine.pool.window)):
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
            return Graph(lambda: recorded.recorded(once), torch.device("cpu"))

        graph = capture()
        for t in (9, 10, 11):
            static.copy_(torch.stack([self.hidden[1, t], self.hidden[0, t], self.hidden[0, 0]]))
            batch = engine.batch("decode", [1, 0, 0], [1, 1, 1], [t + 1, t + 1, 1],
                                 mamba_track_indices=torch.tensor([2, 1, 0]))
            for array in ("seq_lens", "mamba_track_indices"):
                getattr(none, array).copy_(getattr(batch, array))
            del batch.mamba_track_mask, batch.mamba_track_seqlens
            mask[1] = t == 10
            backend.init_forward_metadata_out_graph(batch)
            graph.replay()
            for r, row in ((1, outputs[0][0]), (0, outputs[0][1])):
                self.assertLess(worst(row, engine.expected(self.hidden[r, :t + 1])[-1]), 1e-3, (t, r))
            self.assertTrue(bool(outputs[0].isfinite().all()))
            if t == 10:
                static.zero_()
                graph = capture()
        out = engine.step(engine.batch("extend", [2], [4], [15]), self.hidden[0, 11:15])
        self.assertLess(worst(out, engine.expected(self.hidden[0, :15])[11:]), 1e-3)
        self.assertTrue(bool(engine.pool.state[2].isnan().all()), "a request that is not tracked")
        with self.assertRaisesRegex(libattn.UnsupportedError, "captured extend; supported: captured DECODE"):
            backend.init_forward_metadata_out_graph(engine.batch("extend", [0], [3], [3]))
        with self.assertRaisesRegex(libattn.UnsupportedError, "max_num_tokens: 12 of 3 requests"):
            backend.init_cuda_graph_state(3, 12)
        with self.assertRaisesRegex(libattn.UnsupportedError, "forward_mode: target_verify; supported: steps without drafts"):
            backend.init_forward_metadata(engine.batch("target_verify", [0], [3], [3]))

    def test_whose_they_are(self) -> None:
        """libattn's, or left to SGLang with the reason in the log; on a CPU, where SGLang has none, refused before weights."""
        class Qwen3NextConfig:
            linear_num_key_heads, linear_num_value_heads, linear_key_head_dim, linear_value_head_dim = 2, 4, 16, 24
            linear_conv_kernel_dim, linear_layer_ids, full_attention_layer_ids = 4, [0, 1, 2], [3]
            mamba2_cache_params = types.SimpleNamespace(dtype=types.SimpleNamespace(conv=torch.float32, temporal=torch.float32))

            def get_text_config(self) -> Any:
                return self

        class OtherConfig(Qwen3NextConfig):
            pass

        def runner(device: str = "cpu", config: Any = Qwen3NextConfig, **values: Any) -> Any:
            given = arguments(False, **values)
            model = types.SimpleNamespace(hf_config=config(), dtype=torch.float32, num_attention_heads=8, head_dim=64,
                                          get_num_kv_heads=lambda ranks: 2 // ranks)
            return types.SimpleNamespace(server_args=given, model_config=model, device=device, gpu_id=0, page_size=1,
                                         use_mla_backend=False, is_hybrid_swa=False, req_to_token_pool=Pool(qwen3_5(), [3]))

        wrap, check = recorded.hooks[WRAPPER], recorded.hooks["sglang.srt.model_executor.model_runner.ModelRunner.load_model"]
        theirs = Hybrid("attention", "SGLang's", [3])
        made = wrap(lambda *_: theirs, runner(), "attention")
        self.assertEqual((made.full_attn_backend, type(made.linear_attn_backend), made.layers), ("attention", LibattnGdnBackend, [3]))
        check(runner())
        for values, reason in (({"speculative_algorithm": "NGRAM"}, "speculative_algorithm"), ({"config": OtherConfig}, "OtherConfig's"),
                               ({"linear_attn_decode_backend": "triton"}, "--linear-attn-backend"),
                               ({"linear_attn_backend": "flashinfer"}, "--linear-attn-backend"),
                               ({"enable_linear_replayssm": True}, "--enable-linear-replayssm"),
                               ({"enable_mamba_cache_stochastic_rounding": True}, "--enable-mamba-cache-stochastic-rounding")):
            with self.assertLogs("libattn.integrations.sglang.check", "WARNING") as logs:
                self.assertEqual(wrap(lambda *_: theirs, runner("cuda", **values), "attention"), theirs)
            self.assertRegex(logs.output[0], f"leaves gated delta layers to SGLang's own backend: {reason}")
            with self.assertRaisesRegex(libattn.UnsupportedError, f"gated delta layers: {reason}.*leave out --attention-backend"):
                check(runner(**values))
        with unittest.mock.patch("libattn.integrations.sglang.check.cpu_has_amx_support", lambda: True):
            with self.assertNoLogs():
                check(runner())
            with self.assertLogs() as logs:
                self.assertEqual(wrap(lambda *_: theirs, runner(), "attention"), theirs)
            self.assertEqual((len(logs.output), "a CPU with AMX" in logs.output[0]), (1, True))
        self.assertEqual(wrap(lambda *_: theirs, runner(attention_backend="triton"), "attention"), theirs)
        self.assertEqual(wrap(lambda _, full: full, runner(config=types.SimpleNamespace), "attention"), "attention")

    def test_layers_of_others(self) -> None:
        """SGLang's backends in libattn's place are named, once; nothing is logged of models whose layers are all libattn's, of drafts,
        whose layers of their own all attend, and where libattn is not asked."""
        from libattn.integrations.sglang import check

        self.addCleanup(check._warn.cache_clear)
        wrap = recorded.hooks[WRAPPER]
        Mamba2AttnBackend, MiniMaxHybridAttnBackend = (type(name, (), {}) for name in ("Mamba2AttnBackend", "MiniMaxHybridAttnBackend"))

        def made(model: str, other: Any = None, **values: Any) -> Any:
            def original(runner: Any, full: Any) -> Any:
                if other is None:
                    return full
                return other() if values.get("replaces") else Hybrid(full, other(), [])

            config = types.SimpleNamespace(architectures=[model], **values.pop("config", {}))
            runner = types.SimpleNamespace(server_args=arguments(False, **{k: v for k, v in values.items() if k == "attention_backend"}),
                                           model_config=types.SimpleNamespace(hf_config=config, dtype=torch.float32), device="cuda",
                                           is_draft_worker=values.get("is_draft_worker", False))
            return wrap(original, runner, "attention")

        with self.assertLogs("libattn.integrations.sglang.check", "WARNING") as logs:
            for _ in range(2):
                self.assertEqual(made("NemotronHForCausalLM", Mamba2AttnBackend).full_attn_backend, "attention")
                made("MiniMaxM3ForCausalLM", MiniMaxHybridAttnBackend, replaces=True)
        self.assertEqual(len(logs.output), 2)
        for line, (name, model) in zip(logs.output, (("Mamba2AttnBackend", "NemotronHForCausalLM"),
                                                     ("MiniMaxHybridAttnBackend", "MiniMaxM3ForCausalLM"))):
            self.assertRegex(line, f"SGLang's own {name}, not libattn, serves layers of {model}; .*gated delta layers of Qwen3-Next and Qwen3.5")
        check._warn.cache_clear()
        with self.assertNoLogs():
            self.assertEqual(made("LlamaForCausalLM"), "attention")
            made("NemotronHForCausalLM", Mamba2AttnBackend, attention_backend="triton")
            made("Qwen3NextForCausalLMMTP", Mamba2AttnBackend, is_draft_worker=True,
                 config={"linear_num_value_heads": 4, "linear_layer_ids": [0]})


if __name__ == "__main__":
    unittest.main()
