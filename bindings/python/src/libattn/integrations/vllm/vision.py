# SPDX-License-Identifier: Apache-2.0
"""vLLM's layer of vision towers. vLLM never asks a registered backend about towers; it takes another class for the layer."""
from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ... import torch as ours
from ..._declarations import Status
from ...errors import make
from ...torch.dense import describe as describe_tower
from .backend import reasons
from .describe import config
from .layers import index_of


def _is_asked() -> bool:
    """Whether the engine that is being made runs ``CUSTOM``, and its operator chose no other backend for towers."""
    attention = getattr(config(), "attention_config", None)
    towers = getattr(getattr(config(), "model_config", None), "multimodal_config", None)
    return getattr(attention, "backend", None) is AttentionBackendEnum.CUSTOM and getattr(
        towers, "mm_encoder_attn_backend", None) is None


class LibattnTowerAttention(MMEncoderAttention):  # type: ignore[misc]
    """vLLM's own layer, unless the engine runs ``CUSTOM``: then libattn's kind ``mm_encoder``, or a refusal."""

    serves: bool = False  #: of a layer; of the class: the layers that were made last, for vLLM's questions to the class

    def __init__(self, num_heads: int, head_size: int, scale: float | None = None, num_kv_heads: int | None = None,
                 *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        self.serves = type(self).serves = _is_asked()
        if not self.serves:
            return
        if getattr(self, "fp8_enabled", False):
            raise make(Status.UNSUPPORTED, "mm_encoder_attn_dtype", "fp8; supported: auto")
        self.scale = float(scale) if scale is not None else head_size**-0.5
        against = reasons(describe_tower("mm_encoder", num_heads, num_kv_heads or num_heads, head_size, head_size,
                                         torch.get_default_dtype(), self.scale, False, None, 0.0, False, 0))
        if against:
            raise make(Status.UNSUPPORTED, "MMEncoderAttention", "\n".join(against))

    # Backends of vLLM's own change what an engine hands over as lengths and as starts.
    @classmethod
    def maybe_compute_seq_lens(cls, attn_backend: Any, cu_seqlens: Any, device: Any) -> Any:
        return None if cls.serves else super().maybe_compute_seq_lens(attn_backend, cu_seqlens, device)

    @classmethod
    def maybe_recompute_cu_seqlens(cls, attn_backend: Any, cu_seqlens: Any, *args: Any, **kwargs: Any) -> Any:
        if not cls.serves:
            return super().maybe_recompute_cu_seqlens(attn_backend, cu_seqlens, *args, **kwargs)
        device = kwargs["device"] if "device" in kwargs else args[2]
        return torch.as_tensor(cu_seqlens).to(device, torch.int32)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor | None = None,
                *args: Any, **kwargs: Any) -> torch.Tensor:
        """Images of `cu_seqlens`, or one of each entry of the batch: [B, S, heads * head_size] or with heads apart."""
        if not self.serves:
            return super().forward(query, key, value, cu_seqlens, *args, **kwargs)
        q, k, v = (t.view(*t.shape[:2], -1, self.head_size).transpose(1, 2) for t in (query, key, value))
        index = index_of(self.layer_name)
        if cu_seqlens is None:
            out = ours.attend(q, k, v, scale=self.scale, causal=False, kind="mm_encoder", index=index)
        else:  # starts count the rows of all entries
            q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (q, k, v))
            out = ours.attend_packed(q, k, v, cu_seqlens, cu_seqlens, scale=self.scale, causal=False, kind="mm_encoder",
                                     index=index)
        return out.view(query.shape)


def register() -> None:
    """Have towers made of this class, unless another plugin has put its own there."""
    if MMEncoderAttention.__name__ not in op_registry_oot:
        CustomOp.register_oot(LibattnTowerAttention, name=MMEncoderAttention.__name__)


__all__ = ["LibattnTowerAttention", "register"]
