# SPDX-License-Identifier: Apache-2.0
"""``torch.nn.functional.scaled_dot_product_attention`` of any model by libattn, for inference.

    import libattn.torch
    torch.nn.attention.activate_flash_attention_impl("libattn")      # torch 2.11 and later
    libattn.torch.activate_sdpa()                                    # any torch; the same

From then on torch's fused operators (flash, memory-efficient and cuDNN attention) are libattn's on every device that it serves, in
eager and compiled models. What they are not called for stays torch's: attention in float64 and by the math backend. Nothing
falls back in silence: a dropout, a mask with other values than 0 and minus infinity, a mask per head and a backward raise.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library

from .._declarations import Status
from ..errors import make
from . import dense
from .dense import attend_segments
from .segments import Segments, of_mask

NAME = "libattn"

#: Operator, and whether it is of CPUs.
_FORWARD = {"_scaled_dot_product_flash_attention_for_cpu": True, "_scaled_dot_product_flash_attention": False,
            "_scaled_dot_product_efficient_attention": False, "_scaled_dot_product_cudnn_attention": False}


def _segments(q: torch.Tensor, keys: int, mask: torch.Tensor | None, causal: bool) -> Segments:
    """Requests of a call."""
    batch, _, queries, _ = q.shape
    if mask is not None:
        if causal:
            raise make(Status.UNSUPPORTED, "is_causal", "True next to attn_mask; supported: one of the two")
        shape = mask.expand(batch, 1 if mask.dim() < 3 else mask.shape[-3], queries, mask.shape[-1])
        return of_mask(dense.visible_of(shape, batch, queries, keys), False, None, False)
    return dense.segments_of(None, batch, queries, keys, causal, None, True)


def _as_torch_has_it(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """An output with the strides of the queries, where it has their shape."""
    like = torch.empty_like(q, device="meta")
    return out if out.shape != like.shape or out.stride() == like.stride() else torch.empty_like(q).copy_(out)


def _attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, dropout: float, causal: bool,
              scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [B, Hq, S, Dv], with the strides that torch expects, and room for a log-sum-exp that only a backward reads."""
    if dropout:
        raise make(Status.UNSUPPORTED, "dropout_p", f"{dropout}; supported: 0, libattn does not train")
    queries, keys = q.shape[2], k.shape[2]
    if causal and queries < keys:  # row i sees keys 0 to i
        k, v = k[:, :, :queries], v[:, :, :queries]
    if causal and queries > keys:
        parts = [_attended(q[:, :, rows], k, v, mask, dropout, rows.stop == keys, scale)[0]
                 for rows in (slice(0, keys), slice(keys, queries))]
        return _as_torch_has_it(torch.cat(parts, 2), q), q.new_empty(q.shape[:3], dtype=torch.float32)
    kind = "decoder" if causal else "cross" if mask is not None and queries > keys else "mm_encoder"
    with torch.no_grad():
        out = attend_segments(q, k, v, _segments(q, k.shape[2], mask, causal), q.shape[3] ** -0.5 if scale is None else scale,
                              causal, None, 0.0, None, kind, 0).transpose(1, 2)
    return _as_torch_has_it(out, q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _for_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
             attn_mask: torch.Tensor | None = None, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return _attended(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _unseeded(q: torch.Tensor) -> torch.Tensor:
    """The random state that torch expects in the result; without a dropout nothing reads it."""
    return torch.zeros(2, dtype=torch.int64, device=q.device)


def _flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0, is_causal: bool = False,
           return_debug_mask: bool = False, *, scale: float | None = None) -> tuple[Any, ...]:
    out, lse = _attended(query, key, value, None, dropout_p, is_causal, scale)
    seed = _unseeded(query)
    return out, lse, None, None, query.shape[2], key.shape[2], seed, seed[:0], query.new_empty(0)


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None,
               compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, *,
               scale: float | None = None) -> tuple[Any, ...]:
    out, lse = _attended(query, key, value, attn_bias, dropout_p, is_causal, scale)
    seed = _unseeded(query)
    return out, lse if compute_log_sumexp else lse[:, :, :0], seed[0], seed[1]


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_bias: torch.Tensor | None,
           compute_log_sumexp: bool, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
           scale: float | None = None) -> tuple[Any, ...]:
    out, lse = _attended(query, key, value, attn_bias, dropout_p, is_causal, scale)
    seed = _unseeded(query)
    return out, lse, None, None, query.shape[2], key.shape[2], seed[0], seed[1], query.new_empty(0)


def _refused(name: str) -> Callable[..., Any]:
    def backward(*_: Any, **__: Any) -> Any:
        raise make(Status.UNSUPPORTED, name, "a gradient, which libattn does not compute; run under torch.inference_mode(), or "
                   "torch.nn.attention.restore_flash_attention_impl() before training")
    return backward


class Active:
    """libattn's kernels in torch's dispatcher, until `remove`."""

    def __init__(self) -> None:
        self._kernels = library.Library("aten", "IMPL")
        for (name, on_cpu), kernel in zip(_FORWARD.items(), (_for_cpu, _flash, _efficient, _cudnn)):
            for full, function in ((name, kernel), (f"{name}_backward", _refused(f"{name}_backward"))):
                if hasattr(torch.ops.aten, full):
                    self._kernels.impl(full, function, "CPU" if on_cpu else "CUDA", allow_override=True)

    def remove(self) -> None:
        """Torch's own kernels again."""
        self._kernels._destroy()


_active: Active | None = None


def activate_sdpa() -> Active:
    """Put libattn's kernels into torch's dispatcher; `Active.remove` takes them out."""
    global _active
    if _active is not None:
        _active.remove()
    _active = Active()
    return _active


if hasattr(torch.nn, "attention") and hasattr(torch.nn.attention, "register_flash_attention_impl"):
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=activate_sdpa)

__all__ = ["Active", "activate_sdpa"]
