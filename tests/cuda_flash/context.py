# SPDX-License-Identifier: Apache-2.0
"""On a machine with a GPU: a probe leaves CUDA alone, so that a child forked after it has the GPU; and every call leaves the caller's
current context as it was, one of the caller's own or none.

usage: PYTHONPATH=bindings/python/src context.py      ATTN_PLUGIN_PATH names the plugin; exit 77 where no GPU is
"""
import ctypes
import os
import struct
import sys
from collections.abc import Callable

import libattn
from libattn.device import Device, host_array

COUNT, NOT_INITIALIZED = 1024, 3  # CUDA_ERROR_NOT_INITIALIZED
failures = 0


def require(condition: bool, what: str) -> None:
    global failures
    if not condition:
        failures += 1
        print(f"{what}: not so", flush=True)


def written(function: str, *arguments: object) -> int | None:
    """What a function of the driver writes to its first argument."""
    found = ctypes.c_void_p()
    require(getattr(cuda, function)(ctypes.byref(found), *arguments) == 0, function)
    return found.value


def leaves(mine: int | None, what: str, call: Callable[[], object], refused: libattn.Status | None = None) -> object:
    """The call, after which `mine` is current still; `refused`: with which status."""
    result = None
    try:
        result = call()
        require(refused is None, f"{what} is refused")
    except libattn.AttnError as error:
        require(refused == error.status, f"{what}: {error}")
    require(written("cuCtxGetCurrent") == mine, f"{what} leaves the context")
    return result


def step(device: Device, layer: libattn.Layer, mine: int | None) -> None:
    """The calls of an engine's step, with `mine` current."""
    memory = leaves(mine, "device memory", lambda: device.allocate(4 * (COUNT + 1)))
    host = leaves(mine, "page-locked memory", lambda: device.allocate(16, "host"))
    ctypes.memmove(host_array(host), struct.pack("4f", 1, -3, 2, 0.5), 16)
    rows, largest = memory.view("f32", 1, 1, COUNT), memory.view("f32", 1, offset=4 * COUNT)
    leaves(mine, "fill", lambda: device.fill(rows))
    leaves(mine, "copy", lambda: device.copy(memory.view("uint8", 16), host))
    leaves(mine, "a kernel", lambda: layer.amax(rows, largest))
    leaves(mine, "more memory than there is", lambda: device.allocate(1 << 50), libattn.Status.OUT_OF_MEMORY)
    leaves(mine, "copy back", lambda: device.copy(host.view("f32", 1), largest))
    leaves(mine, "synchronize", device.synchronize)
    require(struct.unpack("f", bytes(host_array(host)[:4])) == (3,), "amax finds 3")


def main() -> None:
    runtime = libattn.Runtime(isolation=-1, cache_dir="")  # probes in this process
    if not any(backend.name == "cuda_flash" for backend in runtime.backends):
        sys.exit(77)
    require(cuda.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == NOT_INITIALIZED, "the probe initialises no driver")
    child = os.fork()
    if child == 0:
        os._exit(not (cuda.cuInit(0) == 0 and written("cuDevicePrimaryCtxRetain", 0) is not None))
    require(os.waitpid(child, 0)[1] == 0, "a child that is forked after the probe has the GPU")
    require(cuda.cuInit(0) == 0, "cuInit")
    mine = written("cuCtxCreate_v2", 0, 0)
    device = leaves(mine, "open", lambda: runtime.open("cuda"))
    desc = libattn.LayerDesc("layer", 8, 2, 64, dtype="bf16", block_size=16)
    model = leaves(mine, "bind", lambda: runtime.bind(runtime.select([desc], backend="cuda_flash", device="cuda")))
    for context in (mine, None):
        cuda.cuCtxSetCurrent(ctypes.c_void_p(context))
        step(device, model.layers[0], context)
    for owner in (model, device, runtime):
        leaves(None, "close", owner.close)
    cuda.cuCtxDestroy_v2(ctypes.c_void_p(mine))
    print("contexts: FAILED" if failures else "contexts: all as found")
    sys.exit(failures > 0)


if __name__ == "__main__":
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        sys.exit(77)
    main()
