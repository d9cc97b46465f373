# SPDX-License-Identifier: Apache-2.0
"""What a machine with one kind of GPU needs of a CUDA wheel of vLLM, SGLang or sglang-kernel, in a small folder.

usage: slim.py WHEEL FOLDER [ARCHITECTURE]     sglang-kernel needs the command zstd

Of shared objects stay the engine's operators, FlashAttention-3 (of sglang-kernel's 500 MB only heads of 128 and 256 in bfloat16) and
vLLM's FlashMLA, with the device code of ARCHITECTURE (90) alone: the rest
of it is filled with zeros in place, which pack to nothing. The driver reads the header of each image and then only what fits
the GPU, so kernels without an image for ARCHITECTURE (Marlin's) fail where they are launched.
"""
from __future__ import annotations

import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

#: Parts of paths that an engine with one GPU does without: other GPUs' kernels, compilers' headers, servers in Rust, tuning tables,
#: diffusion.
LEFT_OUT = ("_vllm_fa2_C", "_qutlass_C", "_rust_tool_parser", "vllm-rs", "third_party/fmha_sm100",
            "third_party/tml_fa4", "/E=", "/static/", "/benchmarks/", "sglang/benchmark/", "jit_kernel/benchmark/", "multimodal_gen/",
            "sglang/test/", "jit_kernel/tests/",
            "srt/grpc/_core", "srt/multimodal/_core", "sm100/", "infllm_ops", "flashmla_ops")
#: These compile kernels where they run, so all files stay (of DeepGEMM, an indexer's, what Python 3.12 loads).
COMPILED = ("jit_kernel/", "third_party/deep_gemm/")
#: SGLang imports all models at its start; these stay.
MODELS = {"__init__", "registry", "utils", "llama", "llama_eagle", "llama_eagle3", "qwen2", "qwen2_moe", "qwen3", "qwen3_next", "gemma2",
          "gpt_oss", "deepseek_v2", "deepseek_nextn"}
_CONTAINER = struct.pack("<IHH", 0xBA55ED50, 1, 16)
_MACHINE_CODE = 2


def images(data: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """The images of device code in a shared object: kind, architecture, where each begins and its bytes."""
    at = data.find(_CONTAINER)
    while at >= 0:
        end = at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
        at += 16
        while at < end <= len(data):
            kind, _, header, size = struct.unpack_from("<HHIQ", data, at)
            yield kind, struct.unpack_from("<I", data, at + 28)[0], at + header, size
            at += header + size
        at = data.find(_CONTAINER, at)


def small_heads(image: bytes) -> bool:
    """Whether an image is FlashAttention-3 for heads of 128 or 256 in bfloat16, or what all of it needs."""
    if image.startswith(b"\x28\xb5\x2f\xfd"):
        image = subprocess.run(["zstd", "-dc"], input=image, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    tiles = re.findall(rb"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleIJ\w*?ENS6_IJ(\w*?)EEELi(\d+)ENS_(\w+?)fNS_4arch", image)
    if tiles:
        return any(value in (b"128", b"256") and dtype.startswith(b"10bfloat16") and re.findall(rb"Li(\d+)", tile)[-1] == value
                   for tile, value, dtype in tiles)
    return b"FlashAttnFwdSm" not in image


def thinned(data: bytes, architecture: int, is_wanted: Callable[[bytes], bool] | None = None) -> bytearray:
    """The shared object with all other device code zero."""
    thin = bytearray(data)
    for kind, found, start, size in images(data):
        if kind != _MACHINE_CODE or found != architecture or is_wanted and not is_wanted(data[start:start + size]):
            thin[start:start + size] = bytes(size)
    return thin


def main() -> None:
    wheel, folder = Path(sys.argv[1]), Path(sys.argv[2])
    architecture = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith("/") or any(part in name for part in LEFT_OUT) or not (
                    ".dist-info/" in name or name.endswith((".py", ".so", ".json", ".jinja")) or any(part in name for part in COMPILED)):
                continue
            if "deep_gemm/_C.cpython-3" in name and "-312-" not in name:
                continue
            if "sglang/srt/models/" in name and name.count("/") == 3 and Path(name).stem not in MODELS:
                continue
            to = folder / name
            to.parent.mkdir(parents=True, exist_ok=True)
            data = files.read(name)
            to.write_bytes(thinned(data, architecture, small_heads if "flash_ops" in name else None) if name.endswith(".so") else data)


if __name__ == "__main__":
    main()
