# SPDX-License-Identifier: Apache-2.0
"""Which backend serves which layer and phase, and why no other does."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t, c_void_p, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._declarations import Phase, Status, VerdictCode, attn_choice, attn_reason
from .errors import make
from .handles import Handle, Owned
from .layers import LayerDesc, code_of

if TYPE_CHECKING:
    from .runtime import Runtime

_VERDICTS = {code: code.name.lower() for code in VerdictCode}


@dataclass(frozen=True)
class Reason:
    """One reason against a backend."""

    field: str
    asked: str
    supported: str

    def __str__(self) -> str:
        return f"{self.field} is {self.asked}, supported: {self.supported}"


@dataclass(frozen=True)
class Choice:
    """What serves one layer in one phase; `backend` is empty if nothing does."""

    backend: str
    backend_index: int
    forced: bool
    rule: str
    rank: int
    measured: bool
    kv_dtype: int
    block_size: int
    layout: int
    composed: int
    graph_level: int
    status: int


@dataclass(frozen=True)
class Verdict:
    """What became of one backend for one layer and phase."""

    backend: str
    verdict: str
    reasons: tuple[Reason, ...]


def _text(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else ""


def _phase(phase: str | int) -> int:
    number = code_of("phase", phase, Phase)
    if number not in iter(Phase):
        raise make(Status.INVALID_ARGUMENT, "phase", f"{phase}; allowed are prefill, decode")
    return number


class Assignment(Owned):
    """Immutable; made by `Runtime.select`."""

    def __init__(self, runtime: Runtime, handle: c_void_p, layers: Sequence[LayerDesc]) -> None:
        self.runtime = runtime
        self.layers = tuple(layers)
        self.owner = Handle("assignment", handle.value, runtime.api.assignment_destroy, runtime.owner)

    def __len__(self) -> int:
        return self.runtime.api.assignment_num_layers(self.handle)

    def _place(self, layer: int) -> int:
        if not 0 <= layer < len(self):  # ctypes would cut it
            raise make(Status.INVALID_ARGUMENT, "layer", f"layer {layer}; the assignment has {len(self)}")
        return layer

    def choice(self, layer: int, phase: str | int = "prefill") -> Choice:
        """What serves a layer in a phase (``"prefill"`` or ``"decode"``)."""
        c = attn_choice(struct_size=sizeof(attn_choice))
        api = self.runtime.api
        api.check(api.assignment_choice(self.handle, self._place(layer), _phase(phase), byref(c)))
        return Choice(_text(c.name), c.backend, bool(c.forced), _text(c.rule), c.rank, bool(c.measured), c.kv_dtype,
                      c.block_size, c.layout, c.composed, c.graph_level, c.status)

    def verdicts(self, layer: int, phase: str | int = "prefill") -> list[Verdict]:
        """What became of every backend, with all reasons, in the order of `Runtime.backends`."""
        api, number = self.runtime.api, _phase(phase)
        result = []
        for index, backend in enumerate(self.runtime.backends):
            verdict, count = c_int32(), c_int32()
            api.check(api.assignment_verdict(self.handle, self._place(layer), number, index, byref(verdict), byref(count)))
            reasons = []
            for i in range(count.value):
                r = attn_reason(struct_size=sizeof(attn_reason))
                api.check(api.assignment_reason(self.handle, layer, number, index, i, byref(r)))
                reasons.append(Reason(_text(r.field), _text(r.asked), _text(r.supported)))
            result.append(Verdict(backend.full_name, _VERDICTS.get(verdict.value, str(verdict.value)), tuple(reasons)))
        return result

    def explain(self, layer: int, phase: str | int = "prefill") -> str:
        """One line per backend: its verdict and the reasons against it."""
        return "\n".join(f"{v.backend}: {v.verdict}{': ' if v.reasons else ''}{'; '.join(map(str, v.reasons))}"
                         for v in self.verdicts(layer, phase))

    def export(self) -> str:
        """Text that `Runtime.select` takes on another rank as ``import_text``."""
        api, needed = self.runtime.api, c_size_t()
        api.check(api.assignment_export(self.handle, None, 0, byref(needed), api.error_ref()))
        buffer = ctypes.create_string_buffer(needed.value)
        api.check(api.assignment_export(self.handle, buffer, needed.value, byref(needed), api.error_ref()))
        return buffer.value.decode()
