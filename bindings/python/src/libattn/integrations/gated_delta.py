# SPDX-License-Identifier: Apache-2.0
"""Gated delta layers (Qwen3-Next, Qwen3.5) as engines have them: a convolution of four inputs, SiLU, normed q and k."""
from __future__ import annotations

from typing import Any

import torch

from .._declarations import Status
from ..errors import make
from ..layers import GdnDesc, LayerDesc
from ..torch.store import DTYPES


def describe(num_k_heads: int, num_v_heads: int, head_size_k: int, head_size_v: int, conv_width: int, num_speculative_tokens: int,
             dtype: torch.dtype, state_dtype: torch.dtype, checkpoint_interval: int = 0, **terms: Any) -> LayerDesc:
    """Describe a gated delta layer."""
    if dtype not in DTYPES or state_dtype not in DTYPES:
        raise make(Status.UNSUPPORTED, "dtype", f"{dtype} with states of {state_dtype}; supported: {', '.join(map(str, DTYPES))}")
    sizes = GdnDesc(num_k_heads, num_v_heads, head_size_k, head_size_v, conv_width, conv_silu=True, qk_l2norm=True,
                    num_speculative_tokens=num_speculative_tokens, state_dtype=DTYPES[state_dtype],
                    checkpoint_interval=checkpoint_interval)
    return LayerDesc("layers.0", num_k_heads, num_k_heads, head_size_k, head_size_k**-0.5, "recurrent", DTYPES[dtype],
                     head_size_v=head_size_v, gdn=sizes, **terms)
