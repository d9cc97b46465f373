# SPDX-License-Identifier: Apache-2.0
"""Two functions of Qwen3-Next that SGLang has in Triton alone where a CPU has no AMX, by operators of torch: the norm after a gated
delta layer, and the gate of an expert that all tokens share. Imported before SGLang's models are."""
from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.attention.fla import fused_norm_gate
from sglang.kernels.ops.layernorm import elementwise


def rms_norm_gated(x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: None, activation: str = "swish", *, eps: float,
                   **_: Any) -> torch.Tensor:
    assert bias is None and activation in ("swish", "silu")
    normed = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (normed * torch.nn.functional.silu(g.float())).to(x.dtype)


def fused_gate_sigmoid_mul_add(hidden_states: torch.Tensor, gate_weight: torch.Tensor, shared_output: torch.Tensor,
                               final_hidden_states: torch.Tensor) -> None:
    final_hidden_states += (hidden_states @ gate_weight).sigmoid()[:, None] * shared_output

fused_norm_gate.rms_norm_gated = rms_norm_gated
elementwise.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add
