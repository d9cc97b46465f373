# SPDX-License-Identifier: Apache-2.0
"""Handles that are destroyed in the right order, whatever order Python drops their owners in.

The garbage collector may finalise a runtime before the models of it when both are unreachable at once. So a
destruction waits until everything made of the handle has been destroyed.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ._declarations import Status
from .errors import make

# Re-entrant: a collection that starts inside may finalise other handles in the same thread.
_lock = threading.RLock()


class Handle:
    """One opaque C handle.

    Parameters
    ----------
    what : str
        For the error of a use after `close`.
    value : int
        The handle.
    destroy : callable
        Takes the handle.
    parent : Handle, optional
        What it was made of; outlives it.
    """

    __slots__ = ("what", "_value", "_destroy", "_parent", "_children", "_closed", "__weakref__")

    def __init__(self, what: str, value: int | None, destroy: Callable[[int], None],
                 parent: Handle | None = None) -> None:
        self.what = what
        self._value = value or 0
        self._destroy = destroy
        self._parent = parent
        self._children = 0
        self._closed = False
        if parent is not None:
            with _lock:
                parent._children += 1

    @property
    def closed(self) -> bool:
        """Has `close` been called?"""
        return self._closed

    @property
    def value(self) -> int:
        """The C handle."""
        if self._closed:
            raise make(Status.ORDER, self.what, f"the {self.what} is closed")
        return self._value

    def close(self) -> None:
        """Give it up. Destroyed now, or when the last handle made of it is."""
        with _lock:
            if not self._closed:
                self._closed = True
                self._finish()

    def _finish(self) -> None:
        if self._closed and self._children == 0 and self._value:
            value, self._value = self._value, 0
            self._destroy(value)
            if self._parent is not None:
                self._parent._children -= 1
                self._parent._finish()

    def __del__(self) -> None:
        self.close()


_Self = TypeVar("_Self", bound="Owned")


class Owned:
    """An object with one `Handle`, its ``owner``; a context manager that closes it."""

    owner: Handle

    @property
    def handle(self) -> int:
        """The C handle; raises once it is closed."""
        return self.owner.value

    def close(self) -> None:
        """Give it up; it is destroyed with the last object made of it."""
        self.owner.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
