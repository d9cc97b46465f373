# SPDX-License-Identifier: Apache-2.0
"""Scales of multimodal encoders in fp8: a layer's, and the file in which an engine keeps them for a later process."""
from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from .._declarations import Status
from ..errors import make

#: Steps whose largest values make a scale.
HISTORY = 16


@dataclass(frozen=True, eq=False)
class EncoderScales:
    """One layer's scales of q, k and v, float32 [3]. With a history, [3, HISTORY], every run writes both."""

    scales: torch.Tensor
    history: torch.Tensor | None = None

    @staticmethod
    def following(device: torch.device) -> EncoderScales:
        return EncoderScales(torch.ones(3, device=device), torch.zeros(3, HISTORY, device=device))


def read_scales(path: str | Path, device: torch.device) -> dict[str, EncoderScales]:
    """A file of layers by their names: ``{"visual.blocks.0.attn": {"q": 0.5, "k": 0.25, "v": 0.125}, ...}``."""
    found = {}
    for name, given in json.loads(Path(path).read_text()).items():
        values = [given.get(x, given.get(f"{x}_scale")) for x in "qkv"] if isinstance(given, dict) else [None]
        if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in values):
            raise make(Status.INVALID_ARGUMENT, name, f"{given} in {path}; positive numbers q, k and v are needed")
        found[name] = EncoderScales(torch.tensor(values, dtype=torch.float32, device=device))
    return found


def save_scales(path: str | Path, layers: Mapping[str, EncoderScales], margin: float = 1.0) -> None:
    """`margin` times the layers' scales, for `read_scales`. Waits for their devices."""
    if not margin > 0:
        raise make(Status.INVALID_ARGUMENT, "margin", f"{margin}; a positive factor is needed")
    values = {name: (layer.scales.double() * margin).tolist() for name, layer in layers.items()}
    whole = Path(f"{path}.{os.getpid()}")  # other processes may save to the same place
    whole.write_text(json.dumps({name: dict(zip("qkv", scales)) for name, scales in values.items()}, indent=1))
    whole.replace(path)


__all__ = ["HISTORY", "EncoderScales", "read_scales", "save_scales"]
