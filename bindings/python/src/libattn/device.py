# SPDX-License-Identifier: Apache-2.0
"""A device's memory, streams and graphs, for engines that have none of their own (``attn/device_services.h``)."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int64
from typing import TYPE_CHECKING, Any

from ._declarations import CopyKind, DeviceType, MemoryKind, attn_copy_args, attn_device, attn_dtype, attn_fill_args, attn_tensor
from .handles import Handle, Owned
from .layers import code_of
from .structs import refused
from .tensors import DTYPES, Tensor

if TYPE_CHECKING:
    from .runtime import Runtime


class Memory(Tensor):
    """A contiguous tensor in memory of a `Device`; freed with the last of its views."""

    __slots__ = ("owner", "_strides", "_shape")

    def __init__(self, owner: Handle, device: attn_device, address: int, dtype: str, shape: Sequence[int]) -> None:
        self.owner, self.read_only, self._owner = owner, False, None
        self._shape = (c_int64 * max(1, len(shape)))(*shape)
        self._struct = attn_tensor(data=address, device=device, ndim=len(shape), dtype=attn_dtype(*DTYPES[dtype], 1),
                                   shape=addressof(self._shape))
        self._describe()

    def view(self, dtype: str, *shape: int, offset: int = 0) -> Memory:
        """The same memory as a tensor of another type and shape, from a byte on."""
        if dtype not in DTYPES:
            raise refused("dtype", f"'{dtype}'; allowed are {', '.join(DTYPES)}")
        if offset < 0 or any(n < 0 for n in shape):
            raise refused("shape", f"{shape} from byte {offset} on; 0 or above")
        made = Memory(self.owner, self.device_struct, self.data + offset, dtype, shape)
        if offset + made.nbytes > self.nbytes:
            raise refused("shape", f"{made} from byte {offset} on; there are {self.nbytes} bytes")
        return made


class Stream(Owned):
    """A stream of a `Device`, for `Plan.update`, `Plan.run` and its own functions; the CPU's does its work at once."""

    def __init__(self, device: Device) -> None:
        self.api = device.api
        self.owner = device.make("stream", "device_create_stream", "device_destroy_stream", before=())

    @property
    def ptr(self) -> int | None:
        """The native stream."""
        return self.owner.value or None


class Device(Owned):
    """An open device of a runtime."""

    def __init__(self, runtime: Runtime, device: attn_device) -> None:
        self.api, self.device = runtime.api, device
        self.owner = runtime.make("device", "device_open", "device_close", device)

    def allocate(self, nbytes: int, kind: str = "device") -> Memory:
        """Memory of the device, or with ``host`` page-locked memory of the host; at a multiple of 256 bytes."""
        code = code_of("kind", kind, MemoryKind)
        owner = self.make("memory", "device_allocate", "device_free", code, nbytes, before=(code,))
        place = self.device
        if code == MemoryKind.HOST:
            place = attn_device(DeviceType.CPU, 0)
        return Memory(owner, place, owner.value, "uint8", (nbytes,))

    def copy(self, destination: Tensor, source: Tensor, stream: Stream | int | None = None) -> None:
        """Copy contiguous memory, in the order of a stream: host memory stays as it is until that is done."""
        for name, t in (("destination", destination), ("source", source)):
            if not isinstance(t, Tensor) or not t.is_contiguous() or t.nbytes != destination.nbytes:
                raise refused(name, f"{t!r}; contiguous tensors of the same bytes are needed")
        if destination.read_only:
            raise refused("destination", f"{destination} is read-only")
        host = [t.device[0] == "cpu" and self.device.type != DeviceType.CPU for t in (source, destination)]
        kind = (CopyKind.HOST_TO_DEVICE if host[0] else CopyKind.DEVICE_TO_HOST if host[1] else CopyKind.DEVICE_TO_DEVICE)
        args = attn_copy_args(destination=destination.data, source=source.data, bytes=destination.nbytes, kind=kind,
                              stream=_native(stream))
        self.call("device_copy", byref(args))

    def fill(self, destination: Tensor, value: int = 0, stream: Stream | int | None = None) -> None:
        """Set each byte of contiguous memory."""
        if not destination.is_contiguous() or destination.read_only:
            raise refused("destination", f"{destination}; contiguous memory that may be written is needed")
        args = attn_fill_args(destination=destination.data, row_bytes=destination.nbytes, stride=destination.nbytes, rows=1,
                              value=value, stream=_native(stream))
        self.call("device_fill", byref(args))

    def of_address(self, address: int) -> tuple[int, int]:
        """Whose memory lies at an address, as (type, number)."""
        found = attn_device()
        self.call("device_of_address", address, byref(found))
        return found.type, found.id

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def synchronize(self, stream: Stream | int | None = None) -> None:
        """Wait for a stream, or for everything on the device; raises the error that the work has met."""
        self.call("device_synchronize", _native(stream))

    def capture(self, stream: Stream | int, work: Callable[[], None]) -> Graph:
        """The graph of what `work` puts onto a stream."""
        self.call("device_begin_capture", _native(stream))
        try:
            work()
        except BaseException:
            self.make("graph", "device_end_capture", "device_destroy_graph", _native(stream), before=()).close()
            raise
        return Graph(self, self.make("graph", "device_end_capture", "device_destroy_graph", _native(stream), before=()))


class Graph(Owned):
    """A captured graph."""

    def __init__(self, device: Device, owner: Handle) -> None:
        self.device, self.api, self.owner = device, device.api, owner

    def launch(self, stream: Stream | int) -> None:
        """Run it on a stream."""
        with self.owner as graph:
            self.device.call("device_launch_graph", graph, _native(stream))


def _native(stream: Any) -> int | None:
    return stream.ptr if isinstance(stream, Stream) else stream


def host_array(tensor: Tensor) -> ctypes.Array[ctypes.c_uint8]:
    """The bytes of contiguous host memory, without a copy."""
    if tensor.device[0] != "cpu" or not tensor.is_contiguous():
        raise refused("tensor", f"{tensor}; contiguous host memory is needed")
    array = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data)
    array._owner = tensor  # type: ignore[attr-defined]
    return array


__all__ = ["Device", "Graph", "Memory", "Stream", "host_array"]
