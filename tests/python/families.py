# SPDX-License-Identifier: Apache-2.0
"""Real model families, shrunk, with seeded random weights."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

VOCABULARY = 97
_TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Family:
    """One family: its classes, what its configuration keeps of the real one, and the kinds of its layers."""

    name: str
    config: str
    model: str
    values: dict[str, Any]
    kinds: frozenset[str]

    def make(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """The model in eager attention, with weights that make its logits differ by more than noise."""
        values = dict(self.values)
        for key, value in values.items():
            if callable(value):
                values[key] = value()
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**values)
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model)(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1 or "sinks" in name:
                    spread = 1.0 if "sinks" in name else 1.5 * parameter.shape[-1]**-0.5
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))
        return model.to(dtype)


def _family(name: str, config: str, model: str, kinds: set[str], base: dict[str, Any] | None = None,
            **values: Any) -> Family:
    return Family(name, config, model, {**(_TEXT if base is None else base), **values}, frozenset(kinds))


_SPEECH = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1}

#: Families that generate from a padded prompt.
DECODERS = [
    _family("llama", "LlamaConfig", "LlamaForCausalLM", {"full"}),
    _family("qwen3", "Qwen3Config", "Qwen3ForCausalLM", {"full"}),
    _family("mistral", "MistralConfig", "MistralForCausalLM", {"sliding"}, sliding_window=9),
    _family("gemma2", "Gemma2Config", "Gemma2ForCausalLM", {"full", "sliding"}, sliding_window=9,
            attn_logit_softcapping=5.0, final_logit_softcapping=30.0, query_pre_attn_scalar=16),
    _family("gemma3", "Gemma3TextConfig", "Gemma3ForCausalLM", {"full", "sliding"}, sliding_window=9,
            num_hidden_layers=6, query_pre_attn_scalar=16),
    _family("gpt-oss", "GptOssConfig", "GptOssForCausalLM", {"full", "sliding"}, sliding_window=9,
            num_local_experts=4, num_experts_per_tok=2),
    _family("deepseek-v3", "DeepseekV3Config", "DeepseekV3ForCausalLM", {"full"}, head_dim=8, num_key_value_heads=8,
            q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
            moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
            first_k_dense_replace=1),
    _family("qwen3-next", "Qwen3NextConfig", "Qwen3NextForCausalLM", {"full"}, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32),
    _family("llama-4", "Llama4TextConfig", "Llama4ForCausalLM", {"full"}, attention_chunk_size=16,
            intermediate_size_mlp=96, num_local_experts=2, num_experts_per_tok=1, moe_layers=[1, 3],
            attn_temperature_tuning=False),
]

#: Encoder-decoders: (family, input of the encoder as a function of the batch size).
CROSS: list[tuple[Family, Callable[[int], dict[str, torch.Tensor]]]] = [
    (_family("whisper", "WhisperConfig", "WhisperForConditionalGeneration", {"mm_encoder", "full", "cross"}, _SPEECH,
             num_mel_bins=16, max_source_positions=40, max_target_positions=128, suppress_tokens=None,
             begin_suppress_tokens=None),
     lambda batch: {"input_features": torch.randn(batch, 16, 80, generator=torch.Generator().manual_seed(1))}),
    (_family("bart", "BartConfig", "BartForConditionalGeneration", {"encoder", "full", "cross"}, _SPEECH,
             max_position_embeddings=128, forced_eos_token_id=None),
     lambda batch: {"input_ids": torch.randint(2, VOCABULARY, (batch, 21), generator=torch.Generator().manual_seed(1)),
                    "attention_mask": (torch.arange(21)[None] < torch.tensor([21, 13, 9])[:batch, None]).long()}),
]


def _vision() -> dict[str, Any]:
    return {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8}


#: Encoders: (family, inputs, name of the output to compare).
ENCODERS: list[tuple[Family, Callable[[], dict[str, torch.Tensor]], str]] = [
    (_family("vit", "ViTConfig", "ViTModel", {"mm_encoder"}, _vision()),
     lambda: {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))},
     "last_hidden_state"),
    (_family("clip", "CLIPConfig", "CLIPModel", {"mm_encoder", "full"}, {
        "text_config": {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
                        "eos_token_id": 2},
        "vision_config": _vision(), "projection_dim": 32}),
     lambda: {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
              # The largest id ends a text, and the texts are pooled there.
              "input_ids": torch.randint(3, VOCABULARY - 1, (3, 11), generator=torch.Generator().manual_seed(2))
                  .scatter(1, torch.tensor([[10], [6], [3]]), VOCABULARY - 1),
              "attention_mask": (torch.arange(11)[None] < torch.tensor([11, 7, 4])[:, None]).long()},
     "logits_per_image"),
    (_family("modernbert", "ModernBertConfig", "ModernBertModel", {"encoder_only"}, {
        **{k: v for k, v in _TEXT.items() if k not in ("num_key_value_heads", "head_dim")}, "eos_token_id": 2,
        "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8, "global_attn_every_n_layers": 3}),
     lambda: {"input_ids": torch.randint(3, VOCABULARY, (3, 33), generator=torch.Generator().manual_seed(2)),
              "attention_mask": (torch.arange(33)[None] < torch.tensor([33, 20, 6])[:, None]).long()},
     "last_hidden_state"),
]
