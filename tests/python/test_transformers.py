# SPDX-License-Identifier: Apache-2.0
"""What Transformers can ask of an attention implementation, one by one, held against eager."""
import copy
import importlib
import inspect
import logging
import os
import sys
import types
import unittest
from typing import Any
from unittest import mock

import torch
import transformers
from torch import library
from transformers import GenerationConfig, masking_utils
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import families
import libattn
import libattn.integrations.transformers as integration
import libattn.torch
from common import BACKENDS
from libattn.integrations.transformers import forward, hooks
from libattn.torch import dense

torch.set_num_threads(1)
logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
BOUND = 1e-4
DEVICE = torch.device(os.environ.get("ATTN_TEST_DEVICE", "cpu"))  # device.py asks for a GPU: continuous batching
CHOSEN = BACKENDS if DEVICE.type == "cpu" else (None,)  # there libattn chooses


def model_of(name: str, **values: Any) -> Any:
    family = next(f for f in families.DECODERS if f.name == name)
    return families.Family(name, family.config, family.model, {**family.values, **values}, family.kinds).make()


def served_model(name: str, **values: Any) -> Any:
    """The same, by libattn."""
    integration.register()
    model = model_of(name, **values)
    model.set_attn_implementation("libattn")
    return model


def ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, families.VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def table() -> list[tuple[int, str]]:
    return [(row.index, row.decode.split("@")[0]) for row in integration.table()]


class Selection(unittest.TestCase):
    def run_with(self, text: str | None) -> list[tuple[int, str]]:
        with mock.patch.dict(os.environ, {} if text is None else {"ATTN_BACKEND": text}):
            integration.register()
            model = model_of("gemma2")
            model.set_attn_implementation("libattn")
            with torch.no_grad():
                model(ids(1, 5))
        return table()

    def test_rank_decides_without_the_variable(self) -> None:
        self.assertEqual(self.run_with(None), [(i, "cpu_simd") for i in range(4)])

    def test_variable_chooses_by_layer_and_kind(self) -> None:
        self.assertEqual(self.run_with("cpu_ref;layers.1-2=cpu_simd"),
                         [(0, "cpu_ref"), (1, "cpu_simd"), (2, "cpu_simd"), (3, "cpu_ref")])
        self.assertEqual(self.run_with("sliding=cpu_ref"), [(0, "cpu_ref"), (1, "cpu_simd"), (2, "cpu_ref"),
                                                            (3, "cpu_simd")])

    def test_phases(self) -> None:
        self.run_with("prefill=cpu_ref;decode=cpu_simd")
        self.assertTrue(all(r.prefill == "cpu_ref" and r.decode.startswith("cpu_simd") for r in integration.table()))

    def test_order_that_cannot_be_met_is_an_error_with_reasons(self) -> None:
        with self.assertRaises(libattn.AttnError) as caught:
            self.run_with("layers.1=no_such_backend")
        self.assertIn("no_such_backend", str(caught.exception))

    def test_what_no_backend_can_do_is_an_error_with_reasons(self) -> None:
        integration.register()
        model = model_of("llama", head_dim=520)
        with self.assertRaisesRegex(libattn.AttnError, "head_size.*520.*512.*\n  layers of LlamaForCausalLM; set attn_impl.*'sdpa'"):
            model.set_attn_implementation("libattn")
        model = model_of("deepseek-v3", v_head_dim=520)
        with self.assertRaisesRegex(libattn.AttnError, "head_size_v.*520.*\n  layers of Deepseek.*; set attn_impl.*'sdpa'"):
            type(model)._from_config(model.config, attn_implementation="libattn")
        model = served_model("llama")
        with torch.no_grad(), self.assertRaisesRegex(
                libattn.AttnError, "dtype: torch.float64.*\n  layer 0, a LlamaAttention; set attn_implementation to .*'sdpa'"):
            model.double()(ids(1, 4))

    def test_models_that_only_a_call_can_judge_are_made(self) -> None:
        """Sizes that differ by layer, several text models, heads that are padded, a codec with a head of 1024, other dtypes of the
        first parameter."""
        integration.register()
        emu3 = transformers.Emu3Config(vocabulary_map={"<image>": 5, "<|extra_200|>": 7, "<|visual token 000000|>": 8})
        emu3.text_config.num_hidden_layers = 1
        small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        made = [
            (transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(
                **small, vocab_size=32, intermediate_size=32, num_key_value_heads=2, head_dim=16, global_head_dim=32,
                layer_types=["full_attention"], vocab_size_per_layer_input=32, hidden_size_per_layer_input=0, num_kv_shared_layers=0)),
            (transformers.MoonshineForConditionalGeneration, transformers.MoonshineConfig(
                vocab_size=32, hidden_size=288, intermediate_size=32, encoder_num_hidden_layers=1, decoder_num_hidden_layers=1,
                pad_head_dim_to_multiple_of=8)),
            (transformers.MusicgenForConditionalGeneration, transformers.MusicgenConfig(
                text_encoder=transformers.T5Config(num_layers=1, d_model=32, d_ff=32, num_heads=2, d_kv=16).to_dict(),
                audio_encoder=transformers.EncodecConfig().to_dict(),
                decoder=transformers.MusicgenDecoderConfig(**small, ffn_dim=32).to_dict())),
            (transformers.Emu3ForConditionalGeneration, emu3)]
        for model, config in made:
            with self.subTest(model.__name__), torch.device("meta"):
                model._from_config(copy.deepcopy(config), attn_implementation="libattn")
                model._from_config(copy.deepcopy(config)).set_attn_implementation("libattn")
        for dtype in (torch.int8, torch.float8_e4m3fn, torch.float64):
            model = model_of("llama")
            model.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(families.VOCABULARY, 64).to(dtype), requires_grad=False)
            model.set_attn_implementation("libattn")

    def test_sizes_that_the_model_does_not_read_are_not_judged(self) -> None:
        integration.register()
        small = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        for kind in ("StableLm", "GPTNeoX"):
            config = getattr(transformers, f"{kind}Config")(**small, head_dim=20)
            with torch.device("meta"):
                getattr(transformers, f"{kind}ForCausalLM")._from_config(config, attn_implementation="libattn")

    def test_heads_of_the_configuration(self) -> None:
        integration.register()
        with mock.patch.object(dense, "describe", wraps=dense.describe) as describe:
            model_of("llama").set_attn_implementation("libattn")
            self.assertEqual({call.args[:5] for call in describe.call_args_list}, {("decoder", 8, 2, 16, 16)})

    def test_a_refusal_leaves_all_parts_as_they_were(self) -> None:
        integration.register()
        small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**small, image_size=32, patch_size=16),
            text_config=transformers.LlamaConfig(**small, vocab_size=32, head_dim=520), attn_implementation="eager")
        with torch.device("meta"):
            model = transformers.LlavaForConditionalGeneration(config)
        with self.assertRaisesRegex(libattn.AttnError, "head_size.*520.*\n  layers of Llama"):
            model.set_attn_implementation("libattn")
        parts = (model.config, model.config.vision_config, model.config.text_config)
        self.assertEqual([part._attn_implementation for part in parts], ["eager"] * 3)

    def test_by_keyword(self) -> None:
        integration.register()
        model = model_of("llama")
        for name in ("libattn", "sdpa"):
            model.set_attn_implementation(attn_implementation=name)
            self.assertEqual(model.config._attn_implementation, name)
        with self.assertRaisesRegex(libattn.AttnError, "head_size.*520"):
            model_of("llama", head_dim=520).set_attn_implementation(attn_implementation="libattn")

    def test_releases_that_are_too_old(self) -> None:
        with mock.patch.object(torch, "__version__", "2.7.1+cu126"), \
                self.assertRaisesRegex(ImportError, "torch 2.7.1.cu126; 2.8 or later is needed"):
            importlib.reload(libattn.torch)
        with mock.patch.dict(sys.modules, {"transformers": types.SimpleNamespace(__version__="4.40.2")}), \
                self.assertRaisesRegex(ImportError, "Transformers 4.40.2 has no .*4.53 or later is needed"):
            integration.register()


class Masks(unittest.TestCase):
    def compare(self, model: Any, keep: torch.Tensor | None = None, **inputs: Any) -> None:
        with torch.no_grad():
            model.set_attn_implementation("eager")
            expected = model(**inputs).logits
            for backend in BACKENDS:
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                error = (model(**inputs).logits - expected).abs()
                self.assertLess(float((error if keep is None else error[keep]).max()), BOUND, backend)

    def test_padding_on_the_right(self) -> None:
        mask = (torch.arange(20)[None] < torch.tensor([20, 11])[:, None]).long()
        for name in ("llama", "gemma2"):
            self.compare(model_of(name), mask.bool(), input_ids=ids(2, 20), attention_mask=mask)

    def test_padded_prompts_under_validation(self) -> None:
        """Keys in place, and in pages, where a batch has more slots of padding than its scratch cache has slots."""
        model = model_of("llama")
        prompt = ids(3, 60)
        mask = (torch.arange(60)[None] >= torch.tensor([59, 57, 58])[:, None]).long()
        with torch.no_grad():
            expected = model(prompt, attention_mask=mask).logits[mask.bool()]
            for backend in BACKENDS:
                for in_place in (libattn.torch.store.in_place, lambda *args: None):
                    integration.register(backend=backend, validate=True)
                    model.set_attn_implementation("libattn")
                    with mock.patch.object(libattn.torch.store, "in_place", in_place):
                        found = model(prompt, attention_mask=mask).logits[mask.bool()]
                    self.assertLess(float((found - expected).abs().max()), BOUND, backend)

    def test_packed_documents(self) -> None:
        positions = torch.cat([torch.arange(n) for n in (7, 12, 4)])[None]
        for name in ("llama", "gemma3"):
            self.compare(model_of(name), input_ids=ids(1, 23), position_ids=positions, use_cache=False)

    def test_own_four_dimensional_mask(self) -> None:
        """Booleans and what is added: a prefix that sees itself in both directions."""
        seen = torch.ones(9, 9, dtype=torch.bool).tril()
        seen[:4, :4] = True
        added = torch.zeros(1, 1, 9, 9).masked_fill(~seen, torch.finfo(torch.float32).min)
        self.compare(model_of("llama"), input_ids=ids(1, 9), attention_mask=added)

    def test_mask_with_gaps_is_refused(self) -> None:
        model = served_model("llama")
        seen = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
        seen[0, 0, 5, 2] = False
        with torch.no_grad(), self.assertRaisesRegex(libattn.UnsupportedError, "row 5 .* not one run"):
            model(ids(1, 6), attention_mask=seen)

    def test_bias_is_refused(self) -> None:
        model = served_model("llama")
        with torch.no_grad(), self.assertRaisesRegex(libattn.UnsupportedError, "other than 0"):
            model(ids(1, 3), attention_mask=torch.full((1, 1, 3, 3), -1.5))

    def test_mask_changed_in_place_is_read_again(self) -> None:
        integration.register()
        model = model_of("llama")
        seen = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()
        results = []
        for implementation in ("libattn", "eager"):
            model.set_attn_implementation(implementation)
            mask = seen.clone() if implementation == "libattn" else torch.zeros(seen.shape).masked_fill(~seen, -1e38)
            with torch.no_grad():
                first = model(ids(1, 8), attention_mask=mask).logits
                mask[..., 1:, 0] = False if mask.dtype == torch.bool else -1e38
                results.append((first, model(ids(1, 8), attention_mask=mask).logits))
        for ours, eager in zip(*results):
            self.assertLess(float((ours - eager).abs().max()), BOUND)

    def test_bidirectional_images(self) -> None:
        """Gemma 3's images see themselves in both directions, in sliding layers too."""
        self.compare(model_of("gemma3", use_bidirectional_attention=True), input_ids=ids(1, 24), use_cache=False)


class Caches(unittest.TestCase):
    def generate(self, name: str, **options: Any) -> None:
        model = model_of(name)
        prompt = ids(3, 22)
        mask = (torch.arange(22)[None] >= torch.tensor([9, 0, 4])[:, None]).long()
        options = {"max_new_tokens": 24, "do_sample": False, **options}
        with torch.no_grad():
            expected = model.generate(prompt, attention_mask=mask, **options)
            for backend in BACKENDS:
                integration.register(backend=backend)
                model.set_attn_implementation("libattn")
                self.assertTrue(torch.equal(model.generate(prompt, attention_mask=mask, **options), expected), backend)
            model.set_attn_implementation("eager")

    def test_static(self) -> None:
        for name in ("llama", "gemma2", "gpt-oss"):
            self.generate(name, cache_implementation="static")

    def test_beams_reorder_the_cache(self) -> None:
        self.generate("llama", num_beams=3)

    def test_without_cache(self) -> None:
        self.generate("mistral", use_cache=False, max_new_tokens=6)

    def test_prefill_in_chunks(self) -> None:
        self.generate("llama", prefill_chunk_size=8)

    def hold_masks(self, model: Any, prompt: torch.Tensor, count: int, masks: int) -> None:
        """Eager's tokens, by so many masks that were read."""
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count, "do_sample": False}
        expected = model.generate(prompt, **options)
        integration.register()
        model.set_attn_implementation("libattn")
        with mock.patch.object(dense, "of_mask", wraps=dense.of_mask) as read:
            self.assertTrue(torch.equal(model.generate(prompt, **options), expected))
        self.assertEqual(read.call_count, masks)

    def test_a_token_of_a_full_window_has_no_mask(self) -> None:
        """Without padding; a chunk's token has one, since it sees the part of the cache that is its chunk's."""
        for name, masks in (("mistral", 1), ("gemma3", 1), ("llama-4", 9)):
            with self.subTest(name):
                self.hold_masks(model_of(name), ids(1, 30), 9, masks)

    def test_a_prompt_as_long_as_the_window_has_no_mask(self) -> None:
        """Without padding; one that is longer by a token has."""
        for longer in (0, 1):
            model = model_of("gemma3")
            self.hold_masks(model, ids(1, model.config.sliding_window + longer), 4, longer)

    def test_a_mask_without_a_configuration(self) -> None:
        """Layers that may be chunked keep their mask."""
        given = {"q_length": 1, "kv_length": 8, "local_size": 8, "allow_is_causal_skip": True}
        for config, kept in ((None, True), (model_of("mistral").config, False), (model_of("llama-4").config, True)):
            with mock.patch.object(masking_utils, "sdpa_mask") as made:
                forward.attention_mask(config=config, **given)
            self.assertEqual(made.call_args.kwargs["local_size"], 8 if kept else None)


@unittest.skipUnless(hooks.allow_continuous_batching("libattn"), "this release takes its own implementations alone")
class ContinuousBatching(unittest.TestCase):
    def run_family(self, name: str, pages: int) -> int:
        """Mixed lengths in small batches: the tokens of each prompt as when it is generated alone."""
        model = model_of(name).to(DEVICE)
        prompts = [ids(n, seed=n).tolist() for n in (3, 31, 17, 1, 24)]
        expected = []
        with torch.no_grad():
            for prompt in prompts:
                row = torch.tensor([prompt], device=DEVICE)
                expected.append(model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=20,
                                               do_sample=False)[0, len(prompt):].tolist())
        known = inspect.signature(ContinuousBatchingConfig).parameters
        config = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=24, max_blocks_per_request=pages, **{
            "page_size" if "page_size" in known else "block_size": 16})  # renamed between releases
        calls = 0
        for backend in CHOSEN:
            integration.register(backend=backend)
            model.set_attn_implementation("libattn")
            with mock.patch("libattn.integrations.transformers.forward.attend_pages",
                            side_effect=libattn.torch.attend_pages) as over_pages:
                answers = model.generate_batch(
                    prompts, generation_config=GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=0,
                                                                eos_token_id=-1),
                    continuous_batching_config=config, progress_bar=False)
            found = {tuple(a.prompt_ids): a.generated_tokens for a in answers.values()}
            self.assertEqual([found[tuple(p)] for p in prompts], expected, backend)
            calls += over_pages.call_count
        return calls

    def test_gathered_keys(self) -> None:
        for name in ("llama", "gemma3", "gpt-oss", "mistral"):
            with self.subTest(name):
                self.assertEqual(self.run_family(name, 0), 0)

    def test_block_tables(self) -> None:
        for name in ("llama", "qwen3"):
            with self.subTest(name):
                self.assertGreater(self.run_family(name, 8), 50 * len(CHOSEN))

    def test_paged_prefix(self) -> None:
        integration.register()
        model = model_of("llama")
        with self.assertWarns(FutureWarning):
            model.set_attn_implementation("paged|libattn")
        self.assertEqual(model.config._attn_implementation, "libattn")

    def test_other_names_are_left_alone(self) -> None:
        integration.register()
        model = model_of("llama")
        model.config._attn_implementation = "flex_attention"
        with self.assertRaisesRegex(ValueError, "not supported for continuous batching"):
            model.generate_batch([[1, 2]], generation_config=GenerationConfig(max_new_tokens=1), progress_bar=False)


class Refusals(unittest.TestCase):
    def setUp(self) -> None:
        self.model = served_model("llama")

    def test_no_backward(self) -> None:
        loss = self.model(ids(1, 4)).logits.sum()
        with self.assertRaisesRegex(libattn.UnsupportedError, r"backward: a gradient, .*\n  layer \d+, a LlamaAttention; set attn"):
            loss.backward()

    def test_dropout_and_weights(self) -> None:
        with torch.no_grad():
            self.model.config.attention_dropout = 0.5
            trained = type(self.model)(self.model.config).train()
            trained.set_attn_implementation("libattn")
            with self.assertRaisesRegex(libattn.UnsupportedError, "dropout.*0.5"):
                trained(ids(1, 4))


class Compiled(unittest.TestCase):
    def test_operator(self) -> None:
        integration.register(backend="cpu_simd")
        q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 5, 16)
        arguments = (q, k, v, None, None, 0.25, True, None, 0.0, "decoder", 0)
        library.opcheck(torch.ops.libattn.attend.default, arguments,
                        test_utils=("test_schema", "test_faketensor"))

    def test_model(self) -> None:
        """One graph, no break; other lengths run too."""
        integration.register(backend="cpu_simd")
        model = model_of("gemma2", num_hidden_layers=2)
        graphs: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        with torch.no_grad():
            expected = [model(ids(2, n), use_cache=False).logits for n in (14, 19)]
            model.set_attn_implementation("libattn")
            compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
            for n, logits in zip((14, 19), expected):
                self.assertLess(float((compiled(ids(2, n), use_cache=False).logits - logits).abs().max()), BOUND)
        calls = [node for graph in graphs for node in graph.graph.nodes if "libattn" in str(node.target)]
        self.assertGreaterEqual(len(calls), 2)
