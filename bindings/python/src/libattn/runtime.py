# SPDX-License-Identifier: Apache-2.0
"""A runtime: what was found on this machine."""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from ctypes import POINTER, addressof, byref, c_void_p
from typing import TYPE_CHECKING, Any

from ._declarations import (ATTN_SELECT_KEEP_UNSERVED, DeviceType, LogLevel, Status, attn_backend_caps,
                            attn_backend_info, attn_device, attn_device_info, attn_head_size_range, attn_index_lists_caps,
                            attn_indexer_caps, attn_mla_caps, attn_plugin_info, attn_range, attn_recurrent_caps,
                            attn_recurrent_rule_caps, attn_refused_combination, attn_runtime_options, attn_select_options)
from ._library import Library, open_library
from .device import Device
from .errors import InvalidArgumentError, make
from .handles import Handle, Owned
from .layers import code_of
from .model import Model
from .selection import Assignment
from .structs import Record, values

if TYPE_CHECKING:
    from .layers import LayerDesc

DEVICE_TYPES = {"cpu": DeviceType.CPU, "cuda": DeviceType.CUDA, "rocm": DeviceType.ROCM, "xpu": DeviceType.ONEAPI}


def device_of(device: Any) -> attn_device:
    """``struct attn_device`` of ``"cuda:1"``, ``("cuda", 1)``, a ``torch.device`` or None, which is the CPU."""
    if device is None:
        return attn_device()
    kind, number = device, 0
    if isinstance(device, (tuple, list)) and len(device) == 2:
        kind, number = device
    elif hasattr(device, "type") and hasattr(device, "index"):
        kind, number = device.type, device.index or 0
        torch = sys.modules.get("torch")
        if kind == "cuda" and torch is not None and torch.version.hip:  # torch's own name for AMD's
            kind = "rocm"
    elif isinstance(device, str) and ":" in device:
        kind, _, text = device.partition(":")
        number = int(text) if text.isascii() and text.isdigit() else -1
    code = DEVICE_TYPES.get(kind) if isinstance(kind, str) else kind
    if not isinstance(code, int) or not isinstance(number, int) or number < 0:
        raise make(Status.INVALID_ARGUMENT, "device", f"{device!r}; allowed are {', '.join(DEVICE_TYPES)}, with a number as in "
                   "'cuda:1' or ('cuda', 1)")
    return attn_device(code, number)


class PluginInfo(Record):
    """One file that was considered; `reason` says why it was not taken."""

    file: str
    name: str
    version: str
    vendor: str
    status: int
    num_backends: int
    reason: str


class DeviceInfo(Record):
    """A device as a backend's probe reports it."""

    device: tuple[int, int]
    name: str
    arch: str
    isa: str
    compute_capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int
    #: whose numbers `device` has; empty where its driver numbers it (CPU, CUDA, ROCm, oneAPI)
    device_namespace: str
    #: as the vendor's tools write it; empty: not known without its driver
    uuid: str


class BackendInfo(Record):
    """One backend on one device in one variant: ``struct attn_backend_caps``, masks as there.

    `head_sizes`, `block_sizes`, `refused` and `extensions` are tuples of what the declaration lists; `mla`, `recurrent`,
    `recurrent_rule`, `indexer` and `index_lists` the fields of its extensions, or None.
    """

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
    head_sizes: tuple[Any, ...]
    block_sizes: tuple[Any, ...]

    @property
    def full_name(self) -> str:
        """``name`` or ``name@variant``, as ``ATTN_BACKEND`` takes it."""
        return f"{self.name}@{self.variant}" if self.variant else self.name


def _backend(info: attn_backend_info) -> BackendInfo:
    c = ctypes.cast(info.caps, POINTER(attn_backend_caps)).contents

    def listed(field: str, count: int, element: type, size: int = 0) -> tuple[Any, ...]:
        address, size = getattr(c, field) or 0, size or ctypes.sizeof(element)
        return tuple(element.from_address(address + i * size) for i in range(count))

    found: dict[str, Any] = {"mla": None, "recurrent": None, "recurrent_rule": None, "indexer": None, "index_lists": None}
    at = c.next
    for struct, name in ((attn_mla_caps, "mla"), (attn_recurrent_caps, "recurrent"),
                         (attn_recurrent_rule_caps, "recurrent_rule"), (attn_indexer_caps, "indexer"),
                         (attn_index_lists_caps, "index_lists")):
        step = at
        while step:
            header = struct.from_address(step).ext
            if header.id == struct._ext_:
                copy = struct()
                ctypes.memmove(addressof(copy), step, min(header.struct_size, ctypes.sizeof(struct)))
                found[name] = {k: v for k, v in values(copy).items() if k != "ext"}
            step = header.next
    return BackendInfo(
        c, plugin=info.plugin, **found,
        head_sizes=tuple(values(s) for s in listed("head_sizes", c.num_head_sizes, attn_head_size_range)),
        block_sizes=tuple(values(s) for s in listed("block_sizes", c.num_block_sizes, attn_range)),
        refused=tuple(values(s) for s in listed("refused", c.num_refused, attn_refused_combination, c.refused_stride)),
        extensions=tuple(n.value for n in listed("extensions", c.num_extensions, ctypes.c_uint32)))


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
    options
        Further fields of ``struct attn_runtime_options``: ``isolation``, ``probe_deadline_ms``, ``host``.
    """

    def __init__(self, backend: str | None = None, plugin_path: str | None = None, cache_dir: str | None = None,
                 num_threads: int = 0, log_level: str | None = None, validate: bool | None = None,
                 ignore_environment: bool = False, no_default_plugins: bool = False,
                 library: str | None = None, **options: Any) -> None:
        self.api: Library = open_library(library)
        given = attn_runtime_options(
            backend=backend, plugin_path=plugin_path, cache_dir=cache_dir, num_threads=num_threads,
            log_level=0 if log_level is None else 1 + code_of("log_level", log_level, LogLevel),
            validate=0 if validate is None else 1 if validate else -1, ignore_environment=bool(ignore_environment),
            no_default_plugins=bool(no_default_plugins), **options)
        created = c_void_p()
        self.api.call("runtime_create", byref(given), byref(created))
        self.owner = Handle("runtime", created.value, self.api.runtime_destroy, kept=given)

    def _all(self, kind: str, struct: type) -> list[Any]:
        found = [struct() for _ in range(self.ask(f"{kind}_count"))]
        for i, info in enumerate(found):
            self.call(f"{kind}_info", i, byref(info))
        return found

    @property
    def plugins(self) -> list[PluginInfo]:
        """Every file that was considered, with the reason if it was not taken."""
        return [PluginInfo(p) for p in self._all("plugin", attn_plugin_info)]

    @property
    def devices(self) -> list[DeviceInfo]:
        """Every device that a backend reported."""
        return [DeviceInfo(d, compute_capability=(d.compute_capability_major, d.compute_capability_minor))
                for d in self._all("device", attn_device_info)]

    @property
    def backends(self) -> list[BackendInfo]:
        """Every backend, in the order of the indices that verdicts use."""
        return [_backend(info) for info in self._all("backend", attn_backend_info)]

    def best_device(self, backend: str | None = None) -> tuple[int, int]:
        """The device that an engine without memory of its own may take, as (type, number): accelerators first.

        Parameters
        ----------
        backend : str, optional
            In place of the runtime's text (``ATTN_BACKEND``): what it orders has to be there.
        """
        found = attn_device()
        self.call("best_device", None if backend is None else backend.encode(), byref(found))
        return found.type, found.id

    def open(self, device: Any = None) -> Device:
        """Memory, streams and graphs of a device, for engines that have none of their own."""
        return Device(self, attn_device(DeviceType.CPU, 0) if device is None else device_of(device))

    def select(self, layers: Sequence[LayerDesc], backend: str | None = None, device: Any = None,
               import_text: str | None = None, block_sizes: Sequence[int] = (),
               keep_unserved: bool = False, device_namespace: str | None = None) -> Assignment:
        """Choose a backend for every layer and phase.

        Parameters
        ----------
        layers : sequence of LayerDesc
            The whole model, in order.
        backend : str, optional
            In place of the runtime's text (``ATTN_BACKEND``); ``""`` forces nothing.
        device : str, (str, int) or torch.device, optional
            ``"cuda:1"``, ``("cuda", 1)``: where the tensors are; by default the CPU.
        import_text : str, optional
            What `Assignment.export` gave on another rank: taken as it is or refused.
        block_sizes : sequence of int
            Candidates, best first, for layers that leave theirs open.
        keep_unserved : bool
            Succeed even if a layer has no backend, so that the reasons can be read.
        device_namespace : str, optional
            `DeviceInfo.device_namespace`, where devices of several namespaces have this type and id.

        Raises
        ------
        UnsupportedError
            No backend can serve a layer, or the ordered one cannot. The message has the reasons.
        """
        kept = [layer.to_struct() for layer in layers]
        pointers = (c_void_p * max(1, len(kept)))(*[addressof(struct) for struct, _ in kept])
        options = attn_select_options(
            device=device_of(device), backend=backend, import_text=import_text, block_sizes=block_sizes or None,
            device_namespace=device_namespace,
            flags=ATTN_SELECT_KEEP_UNSERVED if keep_unserved else 0)
        try:
            owner = self.make("assignment", "select", "assignment_destroy", byref(options), pointers, len(kept))
        except InvalidArgumentError as error:
            if error.status != Status.NOT_FOUND or error.field != "device":
                raise
            # No plugin has found it: a driver that does not fit, a build without GPUs.
            reasons = [f"{plugin.file}: {plugin.reason}" for plugin in self.plugins if plugin.reason]
            raise make(error.status, error.field, "\n  ".join([error.message, *reasons])) from None
        return Assignment(self, owner, layers)

    def bind(self, assignment: Assignment, **options: Any) -> Model:
        """Create the layers of an assignment; loads what the backends need. For the options see `Model`."""
        return Model(self, assignment, **options)


__all__ = ["BackendInfo", "DeviceInfo", "PluginInfo", "Runtime", "device_of"]
