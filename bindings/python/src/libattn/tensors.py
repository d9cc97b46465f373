# SPDX-License-Identifier: Apache-2.0
"""Tensors of any library, without a copy: ``struct attn_tensor`` is DLPack's ``DLTensor``."""
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

from ._declarations import DeviceType, DtypeCode, DtypeId, Status, attn_device, attn_dtype, attn_tensor
from .errors import make


class _Managed(Structure):
    """``DLManagedTensor`` (DLPack 0.x)."""

    _fields_ = [("dl_tensor", attn_tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


class _ManagedVersioned(Structure):
    """``DLManagedTensorVersioned`` (DLPack 1.x)."""

    _fields_ = [("major", c_uint32), ("minor", c_uint32), ("manager_ctx", c_void_p), ("deleter", c_void_p),
                ("flags", c_uint64), ("dl_tensor", attn_tensor)]


_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = c_void_p, [ctypes.py_object, c_char_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = c_int32, [ctypes.py_object, c_char_p]

#: Text, code and bits of the element types that a layer may have.
DTYPES: dict[str, tuple[int, int]] = {
    "f16": (DtypeCode.FLOAT, 16), "bf16": (DtypeCode.BFLOAT, 16), "f32": (DtypeCode.FLOAT, 32),
    "fp8_e4m3": (DtypeCode.FLOAT8_E4M3FN, 8), "fp8_e5m2": (DtypeCode.FLOAT8_E5M2, 8), "int8": (DtypeCode.INT, 8),
    "int32": (DtypeCode.INT, 32), "int64": (DtypeCode.INT, 64), "uint8": (DtypeCode.UINT, 8),
}
_NAMES = {pair: name for name, pair in DTYPES.items()}
_KINDS = {DtypeCode.INT: "int", DtypeCode.UINT: "uint", DtypeCode.FLOAT: "float", DtypeCode.BOOL: "bool"}
#: The small codes of activations, by text.
ACTIVATIONS = {"f16": DtypeId.F16, "bf16": DtypeId.BF16, "f32": DtypeId.F32}
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

    __slots__ = ("_capsule", "_struct", "shape", "strides", "pointer", "read_only")

    def __init__(self, source: Any) -> None:
        if not hasattr(source, "__dlpack__"):
            raise make(Status.INVALID_ARGUMENT, "tensor", f"{type(source).__name__}; a tensor that speaks DLPack is needed")
        if getattr(source, "requires_grad", False):
            raise make(Status.UNSUPPORTED, "tensor", "requires a gradient, which libattn does not compute; pass its detach()")
        device_type = source.__dlpack_device__()[0]
        keywords = {} if device_type == DeviceType.CPU else {"stream": -1}
        try:
            self._capsule = source.__dlpack__(max_version=(1, 0), **keywords)
        except TypeError:
            self._capsule = source.__dlpack__(**keywords)
        if _is_valid(self._capsule, b"dltensor_versioned"):
            address = _get_pointer(self._capsule, b"dltensor_versioned")
            managed = ctypes.cast(address, POINTER(_ManagedVersioned)).contents
            self._struct, self.read_only = managed.dl_tensor, bool(managed.flags & _READ_ONLY)
        elif _is_valid(self._capsule, b"dltensor"):
            address = _get_pointer(self._capsule, b"dltensor")
            self._struct, self.read_only = ctypes.cast(address, POINTER(_Managed)).contents.dl_tensor, False
        else:
            raise make(Status.INVALID_ARGUMENT, "tensor", f"{type(source).__name__}.__dlpack__ gave no DLPack capsule")
        self._describe()

    def _describe(self) -> None:
        struct = self._struct
        self.pointer = ctypes.addressof(struct)
        array = ctypes.cast(struct.shape, POINTER(c_int64))
        self.shape = tuple(array[i] for i in range(struct.ndim))
        if struct.strides and 0 in self.shape:  # NumPy's strides of an empty array are 0
            self._struct = struct = type(struct).from_buffer_copy(struct)
            struct.strides = None
            self.pointer = ctypes.addressof(struct)
        if struct.strides:
            array = ctypes.cast(struct.strides, POINTER(c_int64))
            self.strides = tuple(array[i] for i in range(struct.ndim))
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


class Rows:
    """A descriptor that is made once and refilled every step: rank 3, or 2 with `rank`.

    Filling it costs a fraction of what a new DLPack capsule costs; engines that know their addresses use it.
    """

    __slots__ = ("struct", "pointer", "_data", "_sizes")

    def __init__(self, dtype: str, device: tuple[int, int] = (DeviceType.CPU, 0), rank: int = 3) -> None:
        code, bits = DTYPES[dtype]
        self._sizes = (c_int64 * (2 * rank))()  # the shape, then the strides
        shape = ctypes.addressof(self._sizes)
        self.struct = attn_tensor(device=attn_device(*device), ndim=rank, dtype=attn_dtype(code, bits, 1),
                                  shape=shape, strides=shape + rank * ctypes.sizeof(c_int64))
        self.pointer = ctypes.addressof(self.struct)
        self._data = c_uint64.from_buffer(self.struct, attn_tensor.data.offset)  # without the checks of a field

    def fill(self, data: int, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Set address, shape and strides (in elements); returns the ``struct attn_tensor *``."""
        self._data.value = data
        self._sizes[:] = (*shape, *strides)
        return self.pointer
