# SPDX-License-Identifier: Apache-2.0
"""Random shapes, dtypes, strides, slots and lengths of everything that a step takes: fuzz.py SEED SECONDS. What is wrong is
refused with an error of libattn's or of Python's; the process ends well. ``ATTN_VALIDATE`` is on, as contents are wrong, too."""
import random
import sys
import time

import torch

import libattn
from libattn import extensions

HQ, HK, D, BLOCK, BLOCKS = 4, 2, 16, 16, 8
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)


def main(seed: int, seconds: float) -> None:
    numbers, begin, refused, done = random.Random(seed), time.monotonic(), 0, 0
    torch.manual_seed(seed)
    runtime = libattn.Runtime(ignore_environment=True, validate=True)

    def odd(*shape: int) -> torch.Tensor:
        """Most often what was asked for; else another shape, dtype or order."""
        choice = numbers.randrange(12)
        if choice == 0:
            shape = tuple(max(0, n + numbers.choice((-1, 1))) if numbers.random() < 0.5 else n for n in shape)
        if choice == 1:
            shape = shape[:-1] if numbers.random() < 0.5 else (*shape, 1)
        t = torch.zeros(shape, dtype=numbers.choice(DTYPES) if choice == 2 else torch.float32)
        if choice == 3 and t.dim() > 1:
            t = t.transpose(0, 1)
        return t.expand(*t.shape) if choice != 4 or t.dim() == 0 else t[:1].expand(*t.shape)

    def whole(count: int, low: int, high: int, dtype: torch.dtype = torch.int32) -> object:
        choice = numbers.randrange(14)
        count = max(0, count - 1) if choice == 0 else count
        values = [numbers.randint(low, high) for _ in range(count)]
        if choice == 1 and values:
            values[numbers.randrange(count)] = numbers.choice((-1, -2**31, 2**31 - 1, 2**32 + 1, 10**6))
        if choice == 2:
            return torch.zeros(count, dtype=numbers.choice(DTYPES))
        return values if numbers.random() < 0.5 else torch.tensor(values).to(dtype)

    while time.monotonic() < begin + seconds:
        try:
            layers = [libattn.LayerDesc(f"l{i}", HQ, HK, D, block_size=BLOCK, window=numbers.choice((None, (7, 0))),
                                        has_sinks=numbers.random() < 0.2, rope=numbers.choice(("none", "none", "neox")))
                      for i in range(2)]
            model = runtime.bind(runtime.select(layers, backend=numbers.choice(("cpu_ref", "cpu_simd"))))
            for layer in model.layers:
                layer.bind_kv(libattn.allocate(BLOCKS * layer.kv_spec.padded_page_bytes, zero=True), BLOCKS)
                if layer.desc.has_sinks:
                    layer.bind_params(sinks=odd(HQ))
            plans = [model.plan(g, max_num_reqs=4, max_num_tokens=64) for g in range(len(model.groups))]
            for plan in plans:
                plan.bind_workspace(libattn.allocate(plan.workspace_bytes))
        except (libattn.AttnError, TypeError, ValueError):
            refused += 1
            continue
        for _ in range(20):
            try:
                lens = [numbers.randint(1, 20) for _ in range(numbers.randint(1, 3))]
                starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
                rows, wide = starts[-1], numbers.randint(1, 4)
                table = torch.randint(0, BLOCKS, (len(lens), wide), dtype=torch.int32)
                batch = libattn.Batch(
                    starts if numbers.random() < 0.8 else whole(len(starts), 0, rows),
                    lens if numbers.random() < 0.6 else whole(len(lens), 0, 40),
                    table if numbers.random() < 0.5 else table[:, :numbers.randint(0, wide)],
                    whole(rows, -1, BLOCKS * BLOCK - 1, torch.int64),  # aliases among them
                    max_seq_len=numbers.choice((0, 0, 0, 5)), common_prefix_len=numbers.choice((0, 0, 16)))
                plans[0].update(batch)
                if len(plans) > 1:
                    plans[1].update_block_table(plans[0], batch)
                for at, layer in enumerate(model.layers):
                    exts = [] if layer.desc.rope == "none" and numbers.random() < 0.9 else [
                        extensions.rope_io(whole(rows, 0, 30, torch.int64), odd(32, D))]
                    plans[numbers.randrange(len(plans))].run(
                        layer, odd(rows, HQ, D), odd(rows, HK, D), odd(rows, HK, D), odd(rows, HQ, D),
                        numbers.choice((None, None, odd(HQ, rows))), flags=numbers.choice((0, 0, 1, 2, 3, 2**40)),
                        extensions=exts)
                done += 1
            except (libattn.AttnError, TypeError, ValueError):
                refused += 1
    print(f"seed {seed}: {done} steps, {refused} refusals")
    assert done > 0 and refused > 0


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
