# SPDX-License-Identifier: Apache-2.0
"""``bindings/python/call.c``: planned calls of `libattn.torch.attend` without Python. The package may have been built without it, the one
next to the library may be another release's, and an older torch has no exchange table of DLPack: `c` is then empty, and all calls are
Python's."""
from __future__ import annotations

import sysconfig
from ctypes import addressof
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch

from .._library import find_extension
from ..tensors import exchange_table

_NAME = "libattn_call"
_REVISION = 2  # as in call.c


def _load() -> Any:
    path, table = find_extension(_NAME), exchange_table(torch.Tensor)
    without_lock = sysconfig.get_config_var("Py_GIL_DISABLED")  # the interpreter's, which protects the module's state
    if path is None or table is None or not table.stream or without_lock:
        return None
    try:
        spec = spec_from_file_location(_NAME, path, loader=ExtensionFileLoader(_NAME, str(path)))
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError:  # a Python without the stable ABI
        return None
    if getattr(module, "REVISION", 1) != _REVISION:  # next to a library of another release
        return None
    module.setup(torch.Tensor, addressof(table))
    return module


c = _load()
