# SPDX-License-Identifier: Apache-2.0
"""Finding and opening ``libattn.so.1``.

``ctypes`` releases the interpreter's lock around every call of the table, so other Python threads run while a
kernel does. No Python function is handed to the library, so its threads never enter the interpreter; the one exception is
`libattn.torch.ranks.GroupTable`.
"""
from __future__ import annotations

import ctypes
import threading
from ctypes import byref
from pathlib import Path
from typing import Any

from . import errors
from ._declarations import (ATTN_ABI_VERSION, ATTN_ABI_VERSION_MIN, ATTN_ERROR_FIELD_SIZE, ATTN_ERROR_MESSAGE_SIZE,
                            Status, attn_api, attn_device_services, attn_error)

SONAME = "libattn.so.1"


class _ErrorStorage(threading.local):
    """One ``attn_error`` per thread, written by the library on failure only."""

    def __init__(self) -> None:
        self.struct = attn_error(struct_size=ctypes.sizeof(attn_error))
        self.ref = byref(self.struct)


_storage = _ErrorStorage()


def find() -> str:
    """Where the library lies.

    Returns
    -------
    str
        In this package (a wheel's ``lib``), in the checkout's ``build/core``, or the bare name for the loader.
    """
    here = Path(__file__).resolve().parent
    candidates = [*here.glob(f"lib/**/{SONAME}"), here / SONAME]
    if len(here.parents) > 3:  # <root>/bindings/python/src/libattn
        candidates.append(here.parents[3] / "build" / "core" / SONAME)
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate)
    return SONAME


def find_extension(name: str) -> Path | None:
    """Where a compiled module of this package lies: next to the library, in the folder ``bindings`` of its build, or in the package."""
    library, file = Path(find()), f"{name}.abi3.so"
    folders = [library.parent, library.parent.parent / "bindings"] if library.is_absolute() else []
    return next((folder / file for folder in (*folders, Path(__file__).resolve().parent) if (folder / file).is_file()), None)


class Library:
    """An opened library: its functions, by their names in ``struct attn_api``, and those of its table of devices as
    ``device_`` and theirs.

    Parameters
    ----------
    path : str, optional
        The file; by default what `find` says.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path or find()
        try:
            self._dll = ctypes.CDLL(self.path, mode=0)  # RTLD_LOCAL
            get_api = self._dll.attn_get_api
        except (OSError, AttributeError) as error:  # no file, or one that is something else
            raise errors.make(Status.NOT_FOUND, SONAME, f"{error}; install libattn where the loader looks, give its folder in LD_LIBRARY_PATH, "
                              "or name the file: Runtime(library=...), libattn.torch.configure(library=...)") from None
        table = ctypes.c_void_p()
        get_api.restype = ctypes.c_int32
        get_api.argtypes = [ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
        self.check(get_api(ATTN_ABI_VERSION_MIN, ATTN_ABI_VERSION, byref(table), _storage.ref))
        self.table = table.value
        api = ctypes.cast(table, ctypes.POINTER(attn_api)).contents
        self.version: str = api.version.decode()
        self.abi_version: int = api.abi_version
        # A library of the same version may end earlier than these declarations: what it lacks is not offered.
        for name, _ in attn_api._fields_:
            offset = getattr(attn_api, name).offset
            if offset < api.struct_size and name not in ("struct_size", "next", "version", "abi_version", "reserved", "device"):
                setattr(self, name, getattr(api, name))
        devices = ctypes.cast(api.device, ctypes.POINTER(attn_device_services)).contents
        for name, _ in attn_device_services._fields_[2:]:
            if getattr(attn_device_services, name).offset < devices.struct_size:
                setattr(self, f"device_{name}", getattr(devices, name))
        self._failing = attn_api._failing_ | {f"device_{name}" for name in attn_device_services._failing_}

    def __getattr__(self, name: str) -> Any:
        # Only what was not set: a function that this library ends before.
        raise errors.make(Status.UNSUPPORTED, name, f"{self.__dict__.get('path')}, version "
                          f"{self.__dict__.get('version')}, has no such function")

    def companion(self, name: str, room: str) -> ctypes.CDLL:
        """A library that lies next to this one or in its own folder of the checkout's build; else the loader's."""
        folder = Path(self.path).parent
        near = [path for path in (folder / name, folder.parent / room / name) if "/" in self.path and path.is_file()]
        try:
            return ctypes.CDLL(str(near[0]) if near else name)
        except OSError as error:
            raise errors.make(Status.NOT_FOUND, name, str(error)) from None

    def check(self, status: int) -> None:
        """Raise the exception of a status that is not ``ATTN_OK``, with this thread's error text."""
        if status != 0:
            raise self.error(status)

    def call(self, name: str, *args: Any) -> None:
        """A function that reports a status, which is raised unless it is ``ATTN_OK``. Numbers that its parameters would cut
        are refused."""
        function = getattr(self, name)
        for place, (kind, value) in enumerate(zip(function.argtypes, args)):
            if isinstance(value, int) and (kind(value).value or 0) != value:
                raise errors.make(Status.INVALID_ARGUMENT, name, f"argument {place} is {value}; {kind.__name__} cannot hold it")
        status = function(*args, _storage.ref) if name in self._failing else function(*args)
        if status != 0:
            raise self.error(status)

    @staticmethod
    def error(status: int) -> errors.AttnError:
        """The exception of a status, with the text that the last call of this thread wrote."""
        struct = _storage.struct
        field, message = struct.field.decode(errors="replace"), struct.message.decode(errors="replace")
        # The library writes on failure only; an older error must not be reported for another call.
        ctypes.memset(ctypes.addressof(struct) + attn_error.field.offset, 0,
                      ATTN_ERROR_FIELD_SIZE + ATTN_ERROR_MESSAGE_SIZE)
        return errors.make(status, field, message)

    @staticmethod
    def error_ref() -> Any:
        """This thread's ``struct attn_error *``."""
        return _storage.ref


_opened: dict[str, Library] = {}
_lock = threading.Lock()


def open_library(path: str | None = None) -> Library:
    """Open the library once per path and process.

    Parameters
    ----------
    path : str, optional
        The file; by default what `find` says.
    """
    with _lock:
        key = path or find()
        if key not in _opened:
            _opened[key] = Library(key)
        return _opened[key]
