# SPDX-License-Identifier: Apache-2.0
"""A runtime: what was found on this machine."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int32, c_void_p, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._declarations import (ATTN_SELECT_KEEP_UNSERVED, DeviceType, LogLevel, Status, attn_backend_caps,
                            attn_backend_info, attn_device, attn_device_info, attn_plugin_info,
                            attn_runtime_options, attn_select_options)
from ._library import Library, open_library
from .errors import make
from .handles import Handle, Owned
from .model import Model
from .selection import Assignment
from .structs import filled

if TYPE_CHECKING:
    from .layers import LayerDesc

DEVICE_TYPES = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA, "rocm": DeviceType.ROCM, "xpu": DeviceType.ONEAPI}


def _text(value: bytes | None) -> str:
    return value.decode(errors="replace") if value else ""


def _encoded(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


@dataclass(frozen=True)
class PluginInfo:
    """One file that was considered; `reason` says why it was not taken."""

    file: str
    name: str
    version: str
    vendor: str
    status: int
    num_backends: int
    reason: str


@dataclass(frozen=True)
class DeviceInfo:
    """A device as a backend's probe reports it."""

    device: tuple[int, int]
    name: str
    arch: str
    isa: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int


@dataclass(frozen=True)
class BackendInfo:
    """One backend on one device in one variant; masks as in ``struct attn_backend_caps``."""

    name: str
    variant: str
    version: str
    vendor: str
    device: tuple[int, int]
    layer_kinds: int
    terms: int
    features: int
    dtypes: int
    kv_dtypes: int
    graph_level: int
    rank: tuple[int, int]
    plugin: int

    @property
    def full_name(self) -> str:
        """``name`` or ``name@variant``, as ``ATTN_BACKEND`` takes it."""
        return f"{self.name}@{self.variant}" if self.variant else self.name


class Runtime(Owned):
    """Plugins, devices and backends of this process. Safe to use from many threads.

    Parameters
    ----------
    backend : str, optional
        In place of ``ATTN_BACKEND``.
    plugin_path : str, optional
        In place of ``ATTN_PLUGIN_PATH``: absolute files or directories, ``:`` between them.
    cache_dir : str, optional
        In place of ``ATTN_CACHE_DIR``.
    num_threads : int, optional
        In place of ``ATTN_NUM_THREADS``.
    log_level : str, optional
        In place of ``ATTN_LOG``: ``error``, ``warn``, ``info``, ``debug`` or ``trace``.
    validate : bool, optional
        In place of ``ATTN_VALIDATE``.
    ignore_environment : bool
        Read no variable at all.
    no_default_plugins : bool
        Only those of `plugin_path`.
    library : str, optional
        The file ``libattn.so.1``; by default the installed one, or the checkout's.
    """

    def __init__(self, backend: str | None = None, plugin_path: str | None = None, cache_dir: str | None = None,
                 num_threads: int = 0, log_level: str | None = None, validate: bool | None = None,
                 ignore_environment: bool = False, no_default_plugins: bool = False,
                 library: str | None = None) -> None:
        self.api: Library = open_library(library)
        if log_level is not None and log_level.upper() not in LogLevel.__members__:
            raise make(Status.INVALID_ARGUMENT, "log_level",
                       f"'{log_level}'; allowed are {', '.join(LogLevel.__members__).lower()}")
        options = filled(
            attn_runtime_options, struct_size=sizeof(attn_runtime_options), backend=_encoded(backend),
            plugin_path=_encoded(plugin_path),
            cache_dir=_encoded(cache_dir), num_threads=num_threads,
            log_level=0 if log_level is None else 1 + LogLevel[log_level.upper()],
            validate=0 if validate is None else 1 if validate else -1,
            ignore_environment=int(ignore_environment), no_default_plugins=int(no_default_plugins))
        created = c_void_p()
        self.api.check(self.api.runtime_create(byref(options), byref(created), self.api.error_ref()))
        self.owner = Handle("runtime", created.value, self.api.runtime_destroy)

    @property
    def plugins(self) -> list[PluginInfo]:
        """Every file that was considered, with the reason if it was not taken."""
        result = []
        for i in range(self.api.plugin_count(self.handle)):
            p = attn_plugin_info(struct_size=sizeof(attn_plugin_info))
            self.api.check(self.api.plugin_info(self.handle, i, byref(p)))
            result.append(PluginInfo(_text(p.file), _text(p.name), _text(p.version), _text(p.vendor), p.status,
                                     p.num_backends, _text(p.reason)))
        return result

    @property
    def devices(self) -> list[DeviceInfo]:
        """Every device that a backend reported."""
        result = []
        for i in range(self.api.device_count(self.handle)):
            d = attn_device_info(struct_size=sizeof(attn_device_info))
            self.api.check(self.api.device_info(self.handle, i, byref(d)))
            result.append(DeviceInfo((d.device.type, d.device.id), _text(d.name), _text(d.arch), _text(d.isa),
                                     (d.compute_capability_major, d.compute_capability_minor),
                                     d.num_multiprocessors, d.memory_bytes))
        return result

    @property
    def backends(self) -> list[BackendInfo]:
        """Every backend, in the order of the indices that verdicts use."""
        result = []
        for i in range(self.api.backend_count(self.handle)):
            info = attn_backend_info(struct_size=sizeof(attn_backend_info))
            self.api.check(self.api.backend_info(self.handle, i, byref(info)))
            c = ctypes.cast(info.caps, POINTER(attn_backend_caps)).contents
            result.append(BackendInfo(_text(c.name), _text(c.variant), _text(c.version), _text(c.vendor),
                                      (c.device.type, c.device.id), c.layer_kinds, c.terms, c.features, c.dtypes,
                                      c.kv_dtypes, c.graph_level, (c.rank[0], c.rank[1]), info.plugin))
        return result

    def select(self, layers: Sequence[LayerDesc], backend: str | None = None, device: tuple[str, int] | None = None,
               import_text: str | None = None, block_sizes: Sequence[int] = (),
               keep_unserved: bool = False) -> Assignment:
        """Choose a backend for every layer and phase.

        Parameters
        ----------
        layers : sequence of LayerDesc
            The whole model, in order.
        backend : str, optional
            In place of the runtime's text (``ATTN_BACKEND``); ``""`` forces nothing.
        device : (str, int), optional
            ``("cpu", 0)``, ``("cuda", 1)``: where the tensors are; by default the CPU.
        import_text : str, optional
            What `Assignment.export` gave on another rank: taken as it is or refused.
        block_sizes : sequence of int
            Candidates, best first, for layers that leave theirs open.
        keep_unserved : bool
            Succeed even if a layer has no backend, so that the reasons can be read.

        Raises
        ------
        UnsupportedError
            No backend can serve a layer, or the ordered one cannot. The message has the reasons.
        """
        kept = [layer.to_struct() for layer in layers]
        pointers = (c_void_p * max(1, len(kept)))(*[ctypes.addressof(struct) for struct, _ in kept])
        sizes = (c_int32 * max(1, len(block_sizes)))(*block_sizes)
        if device is not None and device[0] not in DEVICE_TYPES:
            raise make(Status.INVALID_ARGUMENT, "device", f"'{device[0]}'; allowed are {', '.join(DEVICE_TYPES)}")
        options = filled(
            attn_select_options, struct_size=sizeof(attn_select_options),
            device=attn_device(0, 0) if device is None else attn_device(DEVICE_TYPES[device[0]], device[1]),
            backend=_encoded(backend), import_text=_encoded(import_text),
            block_sizes=ctypes.addressof(sizes) if block_sizes else None, num_block_sizes=len(block_sizes),
            flags=ATTN_SELECT_KEEP_UNSERVED if keep_unserved else 0)
        handle = c_void_p()
        self.api.check(self.api.select(self.handle, byref(options), pointers, len(kept), byref(handle),
                                       self.api.error_ref()))
        return Assignment(self, handle, layers)

    def bind(self, assignment: Assignment) -> Model:
        """Create the layers of an assignment; loads what the backends need."""
        return Model(self, assignment)


__all__ = ["BackendInfo", "DeviceInfo", "PluginInfo", "Runtime"]
