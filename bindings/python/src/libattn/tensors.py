# SPDX-License-Identifier: Apache-2.0
"""Tensors of any library, without a copy: ``struct attn_tensor`` is DLPack's ``DLTensor``."""
from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from ._declarations import DeviceType, DtypeCode, Status, attn_device, attn_dtype, attn_tensor
from .errors import make


class _Managed(Structure):
    """``DLManagedTensor`` (DLPack 0.x)."""

    _fields_ = [("dl_tensor", attn_tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(Structure):
    """``DLManagedTensorVersioned`` (DLPack 1.x)."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("dl_tensor", attn_tensor)]


class _Exchange(Structure):
    """``DLPackExchangeAPI`` (DLPack 1.3): a library's tensors without objects of Python."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("previous", c_void_p), ("allocate", c_void_p), ("take", c_void_p),
                ("give", c_void_p), ("view", c_void_p), ("stream", c_void_p)]


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = c_int32, [ctypes.py_object, c_char_p]

_Call = Callable[[Any, int], int]
_exchanges: dict[type, tuple[_Call, _Call] | None] = {}
_deleters: dict[int, Callable[[int], None]] = {}


def exchange_table(kind: type) -> _Exchange | None:
    """The table of a tensor type's library; None: the library is older."""
    capsule = getattr(kind, "__dlpack_c_exchange_api__", None)
    if not _is_valid(capsule, b"dlpack_exchange_api"):
        return None
    table = _Exchange.from_address(_get_pointer(capsule, b"dlpack_exchange_api"))
    return table if table.major == 1 and table.view else None


def exchange(kind: type) -> tuple[_Call, _Call] | None:
    """Two functions of a tensor type's library. Both take a tensor and an address: one writes the address of a
    ``DLManagedTensorVersioned`` there, the other a ``DLTensor`` that holds nothing. None: the library is older."""
    if kind not in _exchanges:
        table, found = exchange_table(kind), None
        if table is not None:
            call = ctypes.PYFUNCTYPE(c_int32, ctypes.py_object, c_void_p)  # raises what the library raises
            found = call(table.take), call(table.view)
        _exchanges[kind] = found
    return _exchanges[kind]


class _Taken:
    """A ``DLManagedTensorVersioned`` that is given back with this object."""

    __slots__ = ("address", "deleter")

    def __init__(self, take: _Call, source: Any) -> None:
        self.deleter = None
        place = c_void_p()
        take(source, ctypes.addressof(place))
        self.address = place.value
        deleter = _ManagedVersioned.from_address(place.value).deleter
        self.deleter = _deleters.get(deleter)
        if self.deleter is None:
            self.deleter = _deleters[deleter] = ctypes.PYFUNCTYPE(None, c_void_p)(deleter)

    def __del__(self) -> None:
        if self.deleter is not None:
            self.deleter(self.address)


#: Text, code and bits of the element types that a layer may have.
DTYPES: dict[str, tuple[int, int]] = {
    "f16": (DtypeCode.FLOAT, 16), "bf16": (DtypeCode.BFLOAT, 16), "f32": (DtypeCode.FLOAT, 32),
    "fp8_e4m3": (DtypeCode.FLOAT8_E4M3FN, 8), "fp8_e5m2": (DtypeCode.FLOAT8_E5M2, 8), "int8": (DtypeCode.INT, 8),
    "int32": (DtypeCode.INT, 32), "int64": (DtypeCode.INT, 64), "uint8": (DtypeCode.UINT, 8),
}
_NAMES = {pair: name for name, pair in DTYPES.items()}
_KINDS = {DtypeCode.INT: "int", DtypeCode.UINT: "uint", DtypeCode.FLOAT: "float", DtypeCode.BOOL: "bool"}
_DEVICES = {DeviceType.CPU: "cpu", DeviceType.CUDA: "cuda", DeviceType.CUDA_HOST: "cpu", DeviceType.ROCM: "rocm",
            DeviceType.CUDA_MANAGED: "cuda", DeviceType.ONEAPI: "xpu"}


class Tensor:
    """A borrowed view of someone's memory. Keeps the owner alive; nothing is copied.

    Parameters
    ----------
    source : object with ``__dlpack__``
        A torch, NumPy, JAX or CuPy array. A device's array is taken without synchronisation: order the work on
        the stream that is passed to the step.
    """

    __slots__ = ("_owner", "_struct", "shape", "strides", "pointer", "read_only")

    def __init__(self, source: Any) -> None:
        if not hasattr(source, "__dlpack__"):
            raise make(Status.INVALID_ARGUMENT, "tensor", f"{type(source).__name__}; a tensor that speaks DLPack is needed")
        if getattr(source, "requires_grad", False):
            raise make(Status.UNSUPPORTED, "tensor", "requires a gradient, which libattn does not compute; pass its detach()")
        kind = type(source)
        table = exchange(kind)
        managed: _Managed | _ManagedVersioned
        if table is not None:
            self._owner = _Taken(table[0], source)
            managed = _ManagedVersioned.from_address(self._owner.address)
        else:
            keywords = {} if source.__dlpack_device__()[0] == DeviceType.CPU else {"stream": -1}
            try:
                self._owner = source.__dlpack__(max_version=(1, 0), **keywords)
            except TypeError:
                self._owner = source.__dlpack__(**keywords)
            if _is_valid(self._owner, b"dltensor_versioned"):
                managed = _ManagedVersioned.from_address(_get_pointer(self._owner, b"dltensor_versioned"))
            elif _is_valid(self._owner, b"dltensor"):
                managed = _Managed.from_address(_get_pointer(self._owner, b"dltensor"))
            else:
                raise make(Status.INVALID_ARGUMENT, "tensor", f"{kind.__name__}.__dlpack__ gave no DLPack capsule")
        self._struct = managed.dl_tensor
        self.read_only = isinstance(managed, _ManagedVersioned) and bool(managed.flags & _READ_ONLY)
        self._describe()

    def _describe(self) -> None:
        struct = self._struct
        sizes = c_int64 * struct.ndim
        self.shape = tuple(sizes.from_address(struct.shape)) if struct.ndim else ()
        if struct.strides and 0 in self.shape:  # NumPy's strides of an empty array are 0
            self._struct = struct = type(struct).from_buffer_copy(struct)
            struct.strides = None
        self.pointer = ctypes.addressof(struct)
        if struct.strides and struct.ndim:
            self.strides = tuple(sizes.from_address(struct.strides))
        else:
            strides, step = [], 1
            for size in reversed(self.shape):
                strides.append(step)
                step *= size
            self.strides = tuple(reversed(strides))

    @property
    def data(self) -> int:
        """Address of the first element."""
        return (self._struct.data or 0) + self._struct.byte_offset

    @property
    def dtype(self) -> str:
        """``f16``, ``bf16``, ``f32``, ``int32``, …"""
        dtype = self._struct.dtype
        lanes = f" in lanes of {dtype.lanes}" if dtype.lanes != 1 else ""
        return _NAMES.get((dtype.code, dtype.bits),
                          f"{_KINDS.get(dtype.code, f'DLPack code {dtype.code}, ')}{dtype.bits}") + lanes

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self._struct.dtype.bits // 8

    @property
    def device(self) -> tuple[str, int]:
        """``("cpu", 0)``, ``("cuda", 1)``, …"""
        device = self._struct.device
        return _DEVICES.get(device.type, f"device type {device.type}"), device.id

    @property
    def device_struct(self) -> attn_device:
        """``struct attn_device``."""
        return attn_device(self._struct.device.type, self._struct.device.id)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        return (1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides))) * self.itemsize

    def is_contiguous(self) -> bool:
        """Compact and row-major?"""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def __repr__(self) -> str:
        return f"Tensor({list(self.shape)}, {self.dtype}, {self.device[0]}:{self.device[1]})"


def as_tensor(source: Any) -> Tensor:
    """A `Tensor` of anything that speaks DLPack; a `Tensor` is taken as it is."""
    return source if isinstance(source, Tensor) else Tensor(source)


def as_writable(name: str, source: Any) -> Tensor:
    """`as_tensor` of what the library writes; memory that may not be written, such as a file's mapping, is refused."""
    t = as_tensor(source)
    if t.read_only:
        raise make(Status.INVALID_ARGUMENT, name, f"{t} is read-only; memory that may be written is needed")
    return t


@cache
def _described(dtype: str, device_type: int, device: int, rank: int) -> attn_tensor:
    return attn_tensor(device=attn_device(device_type, device), ndim=rank, dtype=attn_dtype(*DTYPES[dtype], 1))


class Rows:
    """A descriptor that is made once and refilled every step: rank 3, or 2 with `rank`.

    Filling it costs a fraction of what a new DLPack capsule costs; engines that know their addresses use it.
    """

    __slots__ = ("struct", "pointer", "data", "_sizes")

    def __init__(self, dtype: str, device: tuple[int, int] = (DeviceType.CPU, 0), rank: int = 3) -> None:
        self._sizes = (c_int64 * (2 * rank))()  # the shape, then the strides
        shape = ctypes.addressof(self._sizes)
        self.struct = attn_tensor.from_buffer_copy(_described(dtype, *device, rank))
        (c_uint64 * 2).from_buffer(self.struct, attn_tensor.shape.offset)[:] = shape, shape + rank * ctypes.sizeof(c_int64)
        self.pointer = ctypes.addressof(self.struct)
        #: The address, to be set where all else stays.
        self.data = c_uint64.from_buffer(self.struct, attn_tensor.data.offset)  # without the checks of a field

    def fill(self, data: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Set address, shape and strides (in elements); returns the ``struct attn_tensor *``."""
        self.data.value = data
        self._sizes[:] = (*shape, *strides)
        return self.pointer
