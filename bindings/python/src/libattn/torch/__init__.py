# SPDX-License-Identifier: Apache-2.0
"""libattn for torch models: attention over padded batches and over an engine's pages.

    out = libattn.torch.attend(q, k, v, mask, scale=0.125, causal=True)     # [B, S, Hq, Dv]
    libattn.torch.configure(backend="cpu_ref")                              # in place of ATTN_BACKEND
    for row in libattn.torch.table(): print(row)                            # who served which layer

Under ``torch.compile`` the same is ``torch.ops.libattn.attend``; `libattn.torch.op` has the others. Forward only: there is no
backward.
"""
from __future__ import annotations

from typing import Any

import torch
from torch.torch_version import TorchVersion

if TorchVersion(torch.__version__) < (2, 8):
    raise ImportError(f"libattn.torch: torch {torch.__version__}; 2.8 or later is needed")

from .dense import attend
from . import op as _op  # noqa: F401  registers torch.ops.libattn
from .paged import attend_packed, attend_pages
from .sdpa import activate_sdpa
from .store import Row, store

__all__ = ["Row", "activate_sdpa", "attend", "attend_packed", "attend_pages", "configure", "table"]


def configure(**options: Any) -> None:
    """Start again with a runtime of these options, see `libattn.Runtime`; the environment is read again."""
    store.configure(**options)


def table() -> list[Row]:
    """The layers that have run: index, kind and the backend of each phase."""
    return store.table
