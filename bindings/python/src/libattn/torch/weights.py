# SPDX-License-Identifier: Apache-2.0
"""What an engine does with weights once they are loaded."""
from __future__ import annotations

from ctypes import Structure

import torch

from ..extensions import mla_weights

_LARGEST = torch.finfo(torch.float8_e4m3fn).max


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 [Hq, ...] and a scale for each head."""
    scale = weight.abs().amax((1, 2)).clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
    return (weight / scale[:, None, None]).to(torch.float8_e4m3fn), scale


def fp8_mla_weights(kv_b_proj: torch.Tensor, num_heads: int, qk_nope_head_dim: int) -> Structure:
    """For `Layer.bind_params` of a layer whose `MlaDesc` has ``weight_dtype="fp8_e4m3"``: W_UK and W_UV, split and quantized.

    Parameters
    ----------
    kv_b_proj : [Hq (nope + v), rank]
        As the checkpoint has it; not needed afterwards.
    """
    split = kv_b_proj.detach().float().view(num_heads, -1, kv_b_proj.shape[-1])
    w_uk, w_uk_scale = _quantized(split[:, :qk_nope_head_dim])
    w_uv, w_uv_scale = _quantized(split[:, qk_nope_head_dim:].transpose(1, 2).contiguous())
    return mla_weights(w_uk=w_uk, w_uv=w_uv, w_uk_scale=w_uk_scale, w_uv_scale=w_uv_scale)


__all__ = ["fp8_mla_weights"]
