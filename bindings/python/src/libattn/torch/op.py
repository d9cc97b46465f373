# SPDX-License-Identifier: Apache-2.0
"""`attend` as an operator of torch: ``torch.ops.libattn.attend``.

``torch.compile`` and ``torch.export`` see one opaque operator with a known output shape; selection, planning and the
reading of masks happen inside it, at run time.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import library

from . import dense


@library.custom_op("libattn::attend", mutates_args=())
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
           scale: float, causal: bool, window: Sequence[int] | None, soft_cap: float, kind: str,
           index: int) -> torch.Tensor:
    """See `libattn.torch.attend`; `window` has two elements or is None."""
    return dense.attend(q, k, v, mask, scale=scale, causal=causal, soft_cap=soft_cap, sinks=sinks, kind=kind,
                        window=None if window is None else (window[0], window[1]), index=index)


@attend.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None,
      scale: float, causal: bool, window: Sequence[int] | None, soft_cap: float, kind: str,
      index: int) -> torch.Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))
