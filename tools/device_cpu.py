#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A CPU backend next to PyTorch's SDPA in one run, in turn: time, TFLOP/s, GB/s, floor, and who is faster.

usage: tools/device_cpu.py ATTN_BENCH [--backend cpu_simd] [--threads N] [--rounds R]

PyTorch gets what suits it best: for prefill keys repeated to all query heads beforehand, for decode the heads of a group
as rows (its enable_gqa is slower); contiguous caches, of which it walks several copies as attn-bench does.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
ROTATED_BYTES = 1 << 30
ATTEMPTS = 5


def rotating(shapes, dtype=torch.bfloat16):
    """Copies of the tensors, more than any cache holds."""
    element = torch.empty((), dtype=dtype).element_size()
    size = sum(torch.Size(shape).numel() for shape in shapes) * element
    copies = max(2, ROTATED_BYTES // size + 1)
    return [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(min(copies, 24))]


def prefill_inputs(tokens):
    shape = (1, HEADS, tokens, HEAD_SIZE)
    return rotating([shape] * 3), {"is_causal": True}


def decode_inputs(requests, length):
    group = HEADS // KV_HEADS
    cache = (requests, KV_HEADS, length, HEAD_SIZE)
    return rotating([(requests, KV_HEADS, group, HEAD_SIZE), cache, cache]), {}


def time_torch(inputs, options, seconds=1.0):
    """Median time of a call."""
    for q, k, v in inputs[:3]:
        F.scaled_dot_product_attention(q, k, v, **options)
    times, begin, i = [], time.perf_counter(), 0
    while time.perf_counter() - begin < seconds or len(times) < 5:
        q, k, v = inputs[i % len(inputs)]
        i += 1
        start = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, **options)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def time_ours(arguments, shape):
    command = [arguments.attn_bench, "--backend", arguments.backend, "--threads", str(arguments.threads), "--shape", shape, "--json"]
    for _ in range(ATTEMPTS):  # ceilings that others disturbed make a result that does not count
        done = subprocess.run(command, stdout=subprocess.PIPE)
        if done.returncode == 0:
            return json.loads(done.stdout)["results"][0]
    sys.exit(f"{' '.join(command)}: failed {ATTEMPTS} times")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("attn_bench")
    parser.add_argument("--backend", default="cpu_simd")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    shapes = {
        "prefill:s=2048": prefill_inputs(2048),
        "decode:r=8,l=4096": decode_inputs(8, 4096),
    }
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds in turn")
    print(f"{'shape':20} {'round':>5} {'backend':22} {'ours us':>10} {'of floor':>8} {'TFLOP/s':>8} {'GB/s':>7} {'torch us':>10} {'faster':>7}")
    for shape, (inputs, options) in shapes.items():
        ratios = []
        for i in range(arguments.rounds):
            theirs = time_torch(inputs, options)
            ours = time_ours(arguments, shape)
            ratios.append(theirs * 1e6 / ours["time_us"])
            print(f"{shape:20} {i:5} {ours['backend']:22} {ours['time_us']:10.1f} {ours['ratio_to_floor']:8.2f} {ours['tflop_s']:8.2f} "
                  f"{ours['gb_s']:7.1f} {theirs * 1e6:10.1f} {ratios[-1]:7.2f}", flush=True)
        print(f"{shape:20} median: {statistics.median(ratios):.2f} times as fast as torch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
