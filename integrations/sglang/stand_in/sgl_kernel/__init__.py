# SPDX-License-Identifier: Apache-2.0
"""What SGLang's engine calls of sglang-kernel's build for CPUs, which PyPI does not have, where the CPU has no AMX; any other
name raises when it is called."""
from __future__ import annotations

from typing import Any, NoReturn

import torch


def assign_req_to_token_pool_cpu(req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
                                 end_offset: torch.Tensor, out_cache_loc: torch.Tensor, *_: Any) -> None:
    at = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[at:at + end - start].to(req_to_token.dtype)
        at += end - start


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
