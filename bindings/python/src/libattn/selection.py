# SPDX-License-Identifier: Apache-2.0
"""Which backend serves which layer and phase, and why no other does."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._declarations import Phase, Status, VerdictCode, attn_choice, attn_reason
from .errors import make
from .handles import Handle, Owned
from .layers import LayerDesc, code_of
from .structs import Record, values

if TYPE_CHECKING:
    from .runtime import Runtime

_VERDICTS = {code: code.name.lower() for code in VerdictCode}


class Reason(Record):
    """One reason against a backend."""

    field: str
    asked: str
    supported: str

    def __str__(self) -> str:
        return f"{self.field} is {self.asked}, supported: {self.supported}"


class Choice(Record):
    """What serves one layer in one phase, ``struct attn_choice``; `backend` is its name, empty if nothing does."""

    backend: str
    backend_index: int
    forced: bool
    rule: str
    rank: int
    measured: bool
    kv_dtype: int
    block_size: int
    kernel_block_size: int
    layout: int
    composed: int
    graph_level: int
    status: int
    bound_of_row_rms: float
    bound_of_element: float
    bound_of_lse: float


@dataclass(frozen=True)
class Verdict:
    """What became of one backend for one layer and phase."""

    backend: str
    verdict: str
    reasons: tuple[Reason, ...]


def _phase(phase: str | int) -> int:
    number = code_of("phase", phase, Phase)
    if number not in iter(Phase):
        raise make(Status.INVALID_ARGUMENT, "phase", f"{phase}; allowed are prefill, decode")
    return number


class Assignment(Owned):
    """Immutable; made by `Runtime.select`."""

    def __init__(self, runtime: Runtime, owner: Handle, layers: Sequence[LayerDesc]) -> None:
        self.runtime, self.api = runtime, runtime.api
        self.layers = tuple(layers)
        self.owner = owner

    def __len__(self) -> int:
        return self.ask("assignment_num_layers")

    def _place(self, layer: int) -> int:
        if not 0 <= layer < len(self):  # ctypes would cut it
            raise make(Status.INVALID_ARGUMENT, "layer", f"layer {layer}; the assignment has {len(self)}")
        return layer

    def choice(self, layer: int, phase: str | int = "prefill") -> Choice:
        """What serves a layer in a phase (``"prefill"`` or ``"decode"``)."""
        c = attn_choice()
        self.call("assignment_choice", self._place(layer), _phase(phase), byref(c))
        return Choice(c, backend=values(c)["name"], backend_index=c.backend, forced=bool(c.forced), measured=bool(c.measured))

    def verdicts(self, layer: int, phase: str | int = "prefill") -> list[Verdict]:
        """What became of every backend, with all reasons, in the order of `Runtime.backends`."""
        number = _phase(phase)
        result = []
        for index, backend in enumerate(self.runtime.backends):
            verdict, count = c_int32(), c_int32()
            self.call("assignment_verdict", self._place(layer), number, index, byref(verdict), byref(count))
            reasons = []
            for i in range(count.value):
                r = attn_reason()
                self.call("assignment_reason", layer, number, index, i, byref(r))
                reasons.append(Reason(r))
            result.append(Verdict(backend.full_name, _VERDICTS.get(verdict.value, str(verdict.value)), tuple(reasons)))
        return result

    def explain(self, layer: int, phase: str | int = "prefill") -> str:
        """One line per backend: its verdict and the reasons against it."""
        return "\n".join(f"{v.backend}: {v.verdict}{': ' if v.reasons else ''}{'; '.join(map(str, v.reasons))}"
                         for v in self.verdicts(layer, phase))

    def export(self) -> str:
        """Text that `Runtime.select` takes on another rank as ``import_text``."""
        needed = c_size_t()
        self.call("assignment_export", None, 0, byref(needed))
        buffer = ctypes.create_string_buffer(needed.value)
        self.call("assignment_export", buffer, needed.value, byref(needed))
        return buffer.value.decode()
