# SPDX-License-Identifier: Apache-2.0
"""Memory from torch at the alignment that caches and workspaces need."""
from __future__ import annotations

from typing import Any


def allocate(nbytes: int, device: Any = "cpu", alignment: int = 256, zero: bool = False) -> Any:
    """A one-dimensional uint8 torch tensor whose address is a multiple of `alignment`.

    Parameters
    ----------
    nbytes : int
        How long it is.
    device : torch.device or str
        Where it lies.
    zero : bool
        Zeros rather than whatever was there.
    """
    import torch

    make = torch.zeros if zero else torch.empty
    memory = make(nbytes + alignment, dtype=torch.uint8, device=device)
    first = -memory.data_ptr() % alignment
    return memory[first:first + nbytes]
