# SPDX-License-Identifier: Apache-2.0
"""vLLM's layer of vision towers. vLLM never asks a registered backend about towers; it takes another class for the layer."""
from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.custom_op import CustomOp, op_registry_oot
from vllm.model_executor.layers.attention.mm_encoder_attention import MMEncoderAttention

from ... import torch as ours
from ..._declarations import Status
from ...errors import make
from ...torch.dense import describe as describe_tower
from ...torch.encoder_scales import HISTORY, EncoderScales, read_scales, save_scales
from ...torch.store import capturing
from .describe import config, is_asked, refuse_unserved, torch_device
from .layers import index_of


def _is_asked() -> bool:
    """Whether the engine that is being made runs ``CUSTOM``, and its operator chose no other backend for towers."""
    return is_asked() and getattr(_towers(), "mm_encoder_attn_backend", None) is None


def _towers() -> Any:
    """What the operator says of towers."""
    return getattr(getattr(config(), "model_config", None), "multimodal_config", None)


class LibattnTowerAttention(MMEncoderAttention):  # type: ignore[misc]
    """vLLM's own layer, unless the engine runs ``CUSTOM``: then libattn's kind ``mm_encoder``, or a refusal."""

    serves: bool = False  #: of a layer; of the class: the layers that were made last, for vLLM's questions to the class
    fp8: EncoderScales | None = None
    _following: ClassVar[dict[str, dict[str, EncoderScales]]] = {}  #: layers by the file that their scales are to go to

    def __init__(self, num_heads: int, head_size: int, scale: float | None = None, num_kv_heads: int | None = None,
                 *args: Any, **kwargs: Any) -> None:
        super().__init__(num_heads, head_size, scale, num_kv_heads, *args, **kwargs)
        self.serves = type(self).serves = _is_asked()
        if not self.serves:
            return
        self.scale = float(scale) if scale is not None else head_size**-0.5
        self.runs, self.save_path = 0, None
        if getattr(_towers(), "mm_encoder_attn_dtype", None) == "fp8":
            self._quantize(str(kwargs.get("prefix") or getattr(self, "layer_name", "")))
        history = None if self.fp8 is None else 0 if self.fp8.history is None else HISTORY
        refuse_unserved(describe_tower("mm_encoder", num_heads, num_kv_heads or num_heads, head_size, head_size,
                                       torch.get_default_dtype(), self.scale, False, None, 0.0, False, 0, history))

    def _init_fp8_state(self) -> None:
        """vLLM's own state, which asks for FlashInfer."""
        if _is_asked():
            self.fp8_enabled = False
        else:
            super()._init_fp8_state()

    def _quantize(self, name: str) -> None:
        """Scales of the operator's file; without one they follow the inputs, on the device."""
        path, self.save_path = (getattr(_towers(), f"mm_encoder_fp8_scale_{word}", None) for word in ("path", "save_path"))
        if path is None:
            self.fp8 = EncoderScales.following(torch_device())
        else:
            given = read_scales(path, torch_device())
            if name not in given:
                raise make(Status.INVALID_ARGUMENT, "mm_encoder_fp8_scale_path", f"{path} has no '{name}'")
            self.fp8 = given[name]
        if self.save_path is not None and self.fp8.history is not None:
            self.margin = float(getattr(_towers(), "mm_encoder_fp8_scale_save_margin", 1.0))
            self._following.setdefault(self.save_path, {})[name] = self.fp8

    def _save(self) -> None:
        """Once, after the model's last layer has seen as many steps as scales follow."""
        if self.save_path is None or capturing(self.fp8.scales.device):
            return
        self.runs += 1
        layers = self._following.get(self.save_path, {})
        if self.runs == HISTORY and layers and self.fp8 is list(layers.values())[-1]:
            save_scales(self.save_path, layers, self.margin)

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
            out = ours.attend(q, k, v, scale=self.scale, causal=False, kind="mm_encoder", index=index, fp8=self.fp8)
        else:  # starts count the rows of all entries
            q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (q, k, v))
            out = ours.attend_packed(q, k, v, cu_seqlens, cu_seqlens, scale=self.scale, causal=False, kind="mm_encoder",
                                     index=index, fp8=self.fp8)
        self._save()
        return out.view(query.shape)


def register() -> None:
    """Have towers made of this class, unless another plugin has put its own there."""
    if MMEncoderAttention.__name__ not in op_registry_oot:
        CustomOp.register_oot(LibattnTowerAttention, name=MMEncoderAttention.__name__)


__all__ = ["LibattnTowerAttention", "register"]
