# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention on the shapes of tools/device.sh, over contiguous caches: rows for the same table.

Each setting runs in a captured graph over caches of more than twice the L2. A backend that refuses a shape says so.
"""
import statistics

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FA2": SDPBackend.FLASH_ATTENTION}
DECODE = [(64, 8192), (8, 32768), (8, 8192), (64, 1024), (256, 1024), (1, 1024), (1, 8192), (1, 32768)]
PREFILL = [(8, 2048), (1, 16384)]
HEADS, KV_HEADS, SIZE = 32, 8, 128


def random(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def median_us(copies, launch):
    for i in range(copies):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            launch(i)
    times = []
    for i in range(13):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / copies)
    return statistics.median(times[3:])


def decode(backend, reqs, length):
    bytes_read = reqs * length * KV_HEADS * SIZE * 4
    copies = max(2, min(50, int(3e9 // bytes_read)))
    caches = [(random(reqs, KV_HEADS, length, SIZE), random(reqs, KV_HEADS, length, SIZE)) for _ in range(copies)]
    query = random(reqs, KV_HEADS, HEADS // KV_HEADS, SIZE)  # the group's heads as rows: no key is read twice
    us = median_us(copies, lambda i: torch.nn.functional.scaled_dot_product_attention(query, *caches[i]))
    return f"{us:.1f} us | {bytes_read / us / 1e3:.0f} GB/s"


def prefill(backend, reqs, length):
    q = random(reqs, HEADS, length, SIZE)
    k, v = random(reqs, KV_HEADS, length, SIZE), random(reqs, KV_HEADS, length, SIZE)
    us = median_us(2, lambda i: torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True))
    flop = 2 * HEADS * SIZE * reqs * length * (length + 1)
    return f"{us:.1f} us | {flop / us / 1e6:.0f} TFLOP/s causal"


def main():
    for what, shapes in ((decode, DECODE), (prefill, PREFILL)):
        for name, backend in BACKENDS.items():
            for reqs, length in shapes:
                label = f"{name} (PyTorch {torch.__version__}), {what.__name__}, R {reqs}, L {length}"
                try:
                    with sdpa_kernel(backend):
                        print(f"| {label} | {what(backend, reqs, length)} | |", flush=True)
                except RuntimeError as error:
                    print(f"| {label} | refused: {str(error).splitlines()[0]} | | |", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
