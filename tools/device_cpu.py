#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A CPU backend next to PyTorch's SDPA in one run, in turn: time, TFLOP/s, GB/s, floor, and who is faster.

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


def rotating(*shapes):
    """Copies of the tensors, more than any cache holds."""
    copies = ROTATED_BYTES // (2 * sum(torch.Size(shape).numel() for shape in shapes)) + 1
    return [[torch.randn(shape).to(torch.bfloat16) for shape in shapes] for _ in range(min(max(2, copies), 24))]


def time_torch(inputs, options, seconds=1.0):
    """Median time of a call in microseconds, after three that do not count."""
    times, begin = [], time.perf_counter()
    while time.perf_counter() - begin < seconds or len(times) < 8:
        start = time.perf_counter()
        F.scaled_dot_product_attention(*inputs[len(times) % len(inputs)], **options)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


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
    prompt, cache = (1, HEADS, 2048, HEAD_SIZE), (8, KV_HEADS, 4096, HEAD_SIZE)
    shapes = {"prefill:s=2048": (rotating(prompt, prompt, prompt), {"is_causal": True}),
              "decode:r=8,l=4096": (rotating((8, KV_HEADS, HEADS // KV_HEADS, HEAD_SIZE), cache, cache), {})}
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds in turn")
    print(f"{'shape':20} {'round':>5} {'backend':22} {'ours us':>10} {'of floor':>8} {'TFLOP/s':>8} {'GB/s':>7} {'torch us':>10} {'faster':>7}")
    for shape, (inputs, options) in shapes.items():
        ratios = []
        for i in range(arguments.rounds):
            theirs, ours = time_torch(inputs, options), time_ours(arguments, shape)
            ratios.append(theirs / ours["time_us"])
            print(f"{shape:20} {i:5} {ours['backend']:22} {ours['time_us']:10.1f} {ours['ratio_to_floor']:8.2f} {ours['tflop_s']:8.2f} "
                  f"{ours['gb_s']:7.1f} {theirs:10.1f} {ratios[-1]:7.2f}", flush=True)
        print(f"{shape:20} median: {statistics.median(ratios):.2f} times as fast as torch")


if __name__ == "__main__":
    main()
