# SPDX-License-Identifier: Apache-2.0
"""Handles that are destroyed in the right order, whatever order Python drops their owners in.

The garbage collector may finalise a runtime before the models of it when both are unreachable at once, and a thread may close
what another one is using. So a destruction waits until everything made of the handle has been destroyed and no call uses it.
"""
from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref, c_void_p
from typing import Any, NoReturn, TypeVar

from ._declarations import Status
from ._library import Library
from .errors import make

# Re-entrant: a collection that starts inside may finalise other handles in the same thread.
_lock = threading.RLock()


class Unique:
    """An object of which there is one: it is neither copied nor pickled."""

    __slots__ = ()

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__module__.split('.')[0]}.{type(self).__name__} owns something of the C library and "
                        "cannot be copied or pickled")


class Handle(Unique):
    """One opaque C handle. ``with handle as value:`` keeps it from being destroyed during a call.

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
    kept : object
        What it points at.
    """

    __slots__ = ("what", "_kept", "_value", "_destroy", "_parent", "_children", "_closed", "_calls", "__weakref__")

    def __init__(self, what: str, value: int | None, destroy: Callable[[int], None],
                 parent: Handle | None = None, kept: Any = None) -> None:
        self.what = what
        self._kept = kept
        self._value = value or 0
        self._destroy = destroy
        self._parent = parent
        self._children = 0
        self._closed = False
        self._calls: list[None] = []  # one for each call; a list, since its methods are atomic
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

    def __enter__(self) -> int:
        self._calls.append(None)
        if self._closed:  # looked at after the line above: `close` looks at the calls after it has set this
            self.__exit__()
            return self.value
        return self._value

    def __exit__(self, *_: object) -> None:
        self._calls.pop()
        if self._closed:
            with _lock:
                self._finish()

    def close(self) -> None:
        """Give it up. Destroyed now, or when the last call of it and the last handle made of it are done."""
        with _lock:
            if not self._closed:
                self._closed = True
                self._finish()

    def _finish(self) -> None:
        if self._closed and self._children == 0 and not self._calls and self._value:
            value, self._value = self._value, 0
            self._destroy(value)
            if self._parent is not None:
                self._parent._children -= 1
                self._parent._finish()

    def __del__(self) -> None:
        self.close()


_Self = TypeVar("_Self", bound="Owned")


class Owned(Unique):
    """An object with one `Handle`, its ``owner``; a context manager that closes it."""

    owner: Handle
    api: Library

    @property
    def handle(self) -> int:
        """The C handle; raises once it is closed."""
        return self.owner.value

    def call(self, function: str, *args: Any) -> None:
        """A function of the table on this handle; raises what it reports."""
        with self.owner as handle:
            self.api.call(function, handle, *args)

    def make(self, what: str, function: str, destroy: str, *args: Any, kept: Any = None,
             before: tuple[int, ...] | None = None) -> Handle:
        """What a function of the table makes of this handle: it writes the new handle to its last argument.

        This handle lives until the new one is registered as made of it, even if another thread closes it in between. With
        `before` the destruction takes this handle and those values first.
        """
        created = c_void_p()
        function_of = getattr(self.api, destroy)
        with self.owner as handle:
            self.api.call(function, handle, *args, byref(created))
            end = function_of if before is None else lambda value: function_of(handle, *before, value)
            return Handle(what, created.value, end, self.owner, kept)

    def ask(self, function: str, *args: Any) -> Any:
        """Call a function that cannot fail and return its result."""
        with self.owner as handle:
            return getattr(self.api, function)(handle, *args)

    def close(self) -> None:
        """Give it up; it is destroyed with the last object made of it."""
        self.owner.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
