# SPDX-License-Identifier: Apache-2.0
"""Structs of the C library from Python's values."""
from __future__ import annotations

from ctypes import Structure
from typing import Any, TypeVar

from ._declarations import Status
from .errors import make

S = TypeVar("S", bound=Structure)


def filled(struct_type: type[S], /, **values: Any) -> S:
    """A struct of these values. ctypes cuts a number to its field's bits and a text at its first NUL: both are refused."""
    struct = struct_type(**values)
    for name, value in values.items():
        kept = getattr(struct, name)
        if (isinstance(value, int) and not isinstance(kept, float) and (kept or 0) != value) or (
                isinstance(value, bytes) and (kept or b"") != value):
            raise make(Status.INVALID_ARGUMENT, name,
                       f"{value!r}; its field in struct {struct_type.__name__} holds {kept!r} of it")
    return struct


__all__ = ["filled"]
