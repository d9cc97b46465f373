# SPDX-License-Identifier: Apache-2.0
"""Errors of the C side as exceptions that carry its text."""
from __future__ import annotations

from ._declarations import Status


class AttnError(RuntimeError):
    """A call that did not return ``ATTN_OK``.

    Attributes
    ----------
    status : int
        The code, see ``Status``.
    field : str
        The field at fault; empty if no single one is.
    message : str
        The line that the library wrote: the value, and what was allowed.
    """

    def __init__(self, status: int, field: str = "", message: str = "") -> None:
        self.status = status
        self.field = field
        self.message = message
        name = Status(status).name if status in Status._value2member_map_ else f"status {status}"
        super().__init__(f"{name}: {field + ': ' if field else ''}{message}")


class InvalidArgumentError(AttnError, ValueError):
    """A value that is not allowed, or text that cannot be read."""


class UnsupportedError(AttnError, NotImplementedError):
    """No backend can do it, or the ordered one cannot; the message has the reasons."""


class OutOfMemoryError(AttnError, MemoryError):
    """No memory."""


class OrderError(AttnError):
    """A call before the one that it needs."""


class AbsentError(AttnError):
    """Hardware, a driver or a library is not there."""


_CLASSES: dict[int, type[AttnError]] = {
    Status.INVALID_ARGUMENT: InvalidArgumentError,
    Status.STRUCT_SIZE: InvalidArgumentError,
    Status.EXTENSION: InvalidArgumentError,
    Status.SYNTAX: InvalidArgumentError,
    Status.LIMIT: InvalidArgumentError,
    Status.WORKSPACE: InvalidArgumentError,
    Status.NOT_FOUND: InvalidArgumentError,
    Status.UNSUPPORTED: UnsupportedError,
    Status.NO_BACKEND: UnsupportedError,
    Status.REFUSED: UnsupportedError,
    Status.OUT_OF_MEMORY: OutOfMemoryError,
    Status.ORDER: OrderError,
    Status.ABSENT: AbsentError,
}


def make(status: int, field: str = "", message: str = "") -> AttnError:
    """The exception of a status."""
    return _CLASSES.get(status, AttnError)(status, field, message)
