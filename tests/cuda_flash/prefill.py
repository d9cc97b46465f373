# SPDX-License-Identifier: Apache-2.0
"""Prefill of cuda_flash, checked against float64 on the GPU: longer batches than a CPU's reference has time for.

usage: prefill.py CELL.so PLUGIN.so [--check] [--alone] [--seed N]        CELL.so is prefill_cell.c
"""
import argparse
import ctypes
import math
import random
import sys

import torch

INT, REAL, POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p
BOUND = {torch.bfloat16: 0.06, torch.float16: 0.02}  # largest error of an element over its row's RMS


class Cell(ctypes.Structure):
    _fields_ = [(name, INT) for name in (
        "bf16 fp8 reqs q_heads kv_heads size size_v page nhd blocks keys causal window_left window_right chunk alibi "
        "invariant max_query max_keys scratch_percent").split()]
    _fields_ += [("scale", REAL), ("soft_cap", REAL)]
    _fields_ += [(name, POINTER) for name in "query_start_host seq_lens_host query_start key_start seq_lens table sinks slopes".split()]
    _fields_ += [("table_stride", INT)]
    _fields_ += [(name, POINTER) for name in "q k v out lse".split()]
    _fields_ += [("bytes", INT), ("made", POINTER)]


def ints(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class Problem:
    """queries[r] queries of requests with keys[r] keys, the queries last."""

    def __init__(self, library, queries, keys=None, heads=(32, 8), size=(128, 128), dtype=torch.bfloat16, causal=True, page=0, nhd=False,
                 window=(-1, -1), chunk=0, cap=0.0, alibi=0, sinks=False, invariant=False, lse=False, spread=1.0, fp8=False,
                 scratch_percent=100, slopes=(0.0, 0.1)):
        keys = keys or queries
        self.calls = library
        self.queries, self.keys, self.heads, self.size, self.dtype, self.causal = queries, keys, heads, size, dtype, causal
        self.window, self.chunk, self.cap, self.alibi = window, chunk, cap, alibi
        tokens, total = sum(queries), sum(keys)
        new = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)
        self.q = (new(tokens, heads[0], size[0]) * spread).to(dtype)
        self.narrow_q = self.q.to(torch.float8_e4m3fn) if fp8 == 2 else self.q
        self.q = self.narrow_q.to(dtype)
        self.out = torch.full((tokens, heads[0], size[1]), float("nan"), device="cuda", dtype=dtype)
        self.lse = torch.full((heads[0], tokens), float("nan"), device="cuda") if lse else None
        self.rows_k, self.rows_v = new(total, heads[1], size[0]), new(total, heads[1], size[1])
        self.sinks = torch.randn(heads[0], device="cuda") if sinks else None
        low, high = slopes
        self.slopes = low + torch.rand(heads[0], device="cuda") * (high - low) if alibi else None
        self.key_starts = [sum(keys[:r]) for r in range(len(keys) + 1)]
        self.query_starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
        c = self.cell = Cell()
        c.bf16, c.reqs, c.q_heads, c.kv_heads, c.size, c.size_v = dtype == torch.bfloat16, len(queries), *heads, *size
        c.page, c.nhd, c.causal, c.window_left, c.window_right, c.chunk = page, nhd, causal, *window, chunk
        c.alibi, c.invariant, c.max_query, c.max_keys, c.keys = alibi, invariant, max(queries), max(keys), total
        c.scale, c.soft_cap = 1 / math.sqrt(size[0]), cap
        self.kept = [torch.tensor(self.query_starts, dtype=torch.int64), torch.tensor(keys, dtype=torch.int32),
                     ints(self.query_starts), ints(self.key_starts), ints(keys)]
        c.query_start_host, c.seq_lens_host, c.query_start, c.key_start, c.seq_lens = (x.data_ptr() for x in self.kept)
        self.k, self.v = self.rows_k, self.rows_v
        if page:
            self.fill_pages(page, nhd, fp8)
        c.fp8, c.scratch_percent = fp8, scratch_percent
        c.q, c.k, c.v, c.out = (x.data_ptr() for x in (self.narrow_q, self.k, self.v, self.out))
        c.lse = self.lse.data_ptr() if lse else None
        c.sinks = self.sinks.data_ptr() if sinks else None
        c.slopes = self.slopes.data_ptr() if alibi else None
        assert library.cell_size(ctypes.byref(c)) == 0
        self.workspace = torch.empty(max(c.bytes, 1), dtype=torch.uint8, device="cuda")
        assert library.cell_plan(ctypes.byref(c), POINTER(self.workspace.data_ptr()), stream()) == 0
        torch.cuda.synchronize()

    def fill_pages(self, page, nhd, fp8):
        counts = [-(-k // page) for k in self.keys]
        order = torch.randperm(sum(counts))
        stride = max(counts)
        table = torch.full((len(counts), stride), 2**30, dtype=torch.int32)
        where = torch.empty(sum(self.keys), dtype=torch.int64)
        at = 0
        for r, count in enumerate(counts):
            table[r, :count] = order[at:at + count].int()
            j = torch.arange(self.keys[r])
            where[self.key_starts[r]:self.key_starts[r + 1]] = table[r, j // page].long() * page + j % page
            at += count
        where = where.cuda()
        blocks = sum(counts)
        made = []
        for rows in (self.rows_k, self.rows_v):
            stored = rows.to(torch.float8_e4m3fn) if fp8 else rows
            flat = torch.full((blocks * page, *rows.shape[1:]), float("nan"), device="cuda", dtype=self.dtype)
            flat = flat.to(stored.dtype)
            flat.view(torch.uint8 if fp8 else torch.int16)[where] = stored.view(torch.uint8 if fp8 else torch.int16)
            pages = flat.view(blocks, page, *rows.shape[1:])
            made.append(pages if nhd else pages.transpose(1, 2).contiguous())
            if fp8:
                rows.copy_(stored.to(self.dtype))
        self.k, self.v = made
        self.table = table.cuda()
        self.cell.table, self.cell.table_stride, self.cell.blocks = self.table.data_ptr(), stride, blocks

    def run(self):
        assert self.calls.cell_run(ctypes.byref(self.cell), stream()) == 0

    def close(self):
        self.calls.cell_close(ctypes.byref(self.cell))

    def visible(self, r, rows):
        p = rows[:, None] + self.keys[r] - self.queries[r]
        j = torch.arange(self.keys[r], device="cuda")[None, :]
        sees = (j <= p) if self.causal else torch.ones_like(p * j, dtype=torch.bool)
        if self.window[0] >= 0:
            sees &= j >= p - self.window[0]
        if self.window[1] >= 0:
            sees &= j <= p + self.window[1]
        if self.chunk:
            sees &= j // self.chunk == torch.div(p, self.chunk, rounding_mode="floor")
        return sees, p, j

    def error(self, samples=96):
        """Largest error of an element over its row's RMS, on some rows of each request and some heads."""
        worst, group, out = 0.0, self.heads[0] // self.heads[1], self.out
        step = 2.0 ** -25 if self.dtype == torch.float16 else 0.0  # half of what lies between f16's smallest numbers
        for r in random.sample(range(len(self.queries)), min(6, len(self.queries))):
            n = self.queries[r]
            picked = set(random.sample(range(n), min(samples, n))) | {0, n - 1} | {x for x in (31, 32, 127, 128) if x < n}
            rows = torch.tensor(sorted(picked), device="cuda")
            for h in random.sample(range(self.heads[0]), min(3, self.heads[0])):
                q = self.q[self.query_starts[r] + rows, h].double()
                k = self.rows_k[self.key_starts[r]:self.key_starts[r + 1], h // group].double()
                v = self.rows_v[self.key_starts[r]:self.key_starts[r + 1], h // group].double()
                s = q @ k.T * self.cell.scale
                if self.cap:
                    s = self.cap * torch.tanh(s / self.cap)
                sees, p, j = self.visible(r, rows)
                if self.alibi == 1:
                    s = s - self.slopes[h].double() * (p - j).abs()
                if self.alibi == 2:
                    s = s - self.slopes[h].double() * (p - j).clamp(min=0).double().sqrt()
                s = s.masked_fill(~sees, -math.inf)
                if self.sinks is not None:
                    s = torch.cat([s, self.sinks[h].double().expand(len(rows), 1)], 1)
                lse = torch.logsumexp(s, 1)
                w = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[:, None])[:, :v.shape[0]]
                want = w @ v
                got = out[self.query_starts[r] + rows, h].double()
                rms = want.square().mean(1, keepdim=True).sqrt() + 1e-6
                e = (((got - want).abs() - step).clamp(min=0) / rms).max().item()
                worst = max(worst, e if e == e else 1e9)
                if self.lse is not None:
                    e = (self.lse[h, self.query_starts[r] + rows].double() - lse).abs().max().item()
                    worst = max(worst, e if e == e else 1e9)
        return worst


def stream():
    return POINTER(torch.cuda.current_stream().cuda_stream)


def checks():
    some = lambda most: random.randint(1, most)
    lengths = [some(700) for _ in range(5)] + [1, 128, 129]
    more = [n + random.choice([0, some(900)]) for n in lengths]
    base = dict(queries=lengths, keys=more, lse=True, spread=2.0)
    for dtype in (torch.bfloat16, torch.float16):
        for size in ((64, 64), (128, 128), (192, 128), (256, 256), (96, 96), (80, 80), (40, 40), (512, 512), (320, 264)):
            for causal in (True, False):
                for page in (0, 16, 64, 24, 256, 1, 12):
                    yield dict(base, dtype=dtype, size=size, causal=causal, page=page, nhd=page == 64)
    for group in ((8, 8), (8, 1), (14, 2), (40, 8), (32, 2), (64, 2), (128, 1)):
        yield dict(base, heads=group, page=16)
        yield dict(base, heads=group)
    for page in (0, 16):
        for size in ((128, 128), (256, 256), (512, 512)):
            for term in (dict(window=(100, 0)), dict(window=(190, 0)), dict(window=(33, 33), causal=False), dict(chunk=96), dict(cap=20.0),
                         dict(alibi=1), dict(alibi=2), dict(alibi=1, causal=False), dict(sinks=True), dict(invariant=True),
                         dict(window=(130, 0), cap=30.0, sinks=True, alibi=1)):
                yield dict(base, page=page, size=size, **term)
    for size in ((64, 64), (96, 96), (128, 128), (256, 256)):
        for page in (16, 64, 24):
            for term in (dict(), dict(causal=False), dict(window=(300, 0)), dict(cap=20.0), dict(alibi=1), dict(sinks=True)):
                yield dict(base, fp8=random.randint(1, 2), page=page, size=size, nhd=page == 64, **term)
    for percent in (40, 20, 8):  # copies of some heads at a time
        yield dict(queries=[1500, 700, 9], keys=[3000, 700, 2500], lse=True, page=16, fp8=random.randint(1, 2),
                   scratch_percent=percent)
    for dtype in (torch.bfloat16, torch.float16):
        for spread in (12.0, 100.0):  # scores that grow past what a row's base leaves room for
            for term in (dict(), dict(causal=False), dict(alibi=1), dict(sinks=True, size=(64, 64)), dict(size=(512, 512))):
                yield dict(base, dtype=dtype, spread=spread, **term)
    for dtype in (torch.bfloat16, torch.float16):  # items of 192 rows
        for heads in ((32, 8), (8, 8), (8, 1), (14, 2), (40, 8)):
            for term in (dict(), dict(causal=False), dict(window=(100, 0)), dict(sinks=True, spread=12.0)):
                yield dict(base | term, dtype=dtype, size=random.choice([(64, 64), (40, 40)]), heads=heads, page=random.choice([0, 16, 64]),
                           invariant=True)
    few = dict(queries=[random.randint(33, 200)], keys=[random.randint(3000, 6000)], lse=True, spread=2.0)  # items are cut into parts
    for term in (dict(), dict(causal=False), dict(sinks=True), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(2500, 0)),
                 dict(dtype=torch.float16), dict(size=(64, 64)), dict(size=(192, 128), heads=(16, 16)), dict(size=(80, 80)),
                 dict(heads=(14, 2), sinks=True, cap=20.0), dict(spread=12.0), dict(size=(256, 256))):
        for page in (0, 16, 64):
            yield dict(few, page=page, nhd=page == 64, **term)
    for term in (dict(), dict(sinks=True), dict(cap=20.0), dict(size=(64, 64)), dict(size=(256, 256))):
        yield dict(few, page=16, fp8=random.randint(1, 2), **term)
    yield dict(queries=[33, 100, 9], keys=[9000, 2100, 100], page=16, lse=True)
    for dtype in (torch.bfloat16, torch.float16):
        for size in ((64, 64), (128, 128), (192, 128), (256, 256)):
            for slopes in ((0.0, 1.0), (-0.02, 0.05)):  # steep ones; of both signs
                yield dict(base, dtype=dtype, size=size, alibi=1, slopes=slopes, heads=random.choice([(32, 8), (14, 2), (8, 8)]))
    yield dict(queries=[4096], lse=True)
    yield dict(queries=[8191 + some(400)], heads=(2, 1), size=random.choice([(64, 64), (128, 128)]), page=64, lse=True)
    yield dict(queries=[2048] * 3, causal=False, lse=True)
    yield dict(queries=[2048] * 3, size=(64, 64), lse=True)
    yield dict(queries=[2048, 700], keys=[2048, 9000], size=(512, 512), heads=(16, 4), page=16, lse=True)
    yield dict(queries=[300, 5000], keys=[20000, 5000], page=16, lse=True)


def used_memory(library):
    """Bytes of the device in use after 100 plans of one batch."""
    for _ in range(100):
        problem = Problem(library, queries=[100, 1], page=16)
        problem.run()
        problem.close()
    torch.cuda.synchronize()
    del problem
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check(library):
    used = used_memory(library)
    more = used_memory(library) - used
    if more > 0:
        print(f"FAILED 100 plans leave {more} bytes of the device in use", flush=True)
    failed = done = int(more > 0)
    for settings in checks():
        problem = Problem(library, **settings)
        problem.run()
        torch.cuda.synchronize()
        worst = problem.error()
        once = problem.out.clone()
        problem.out.fill_(float("nan"))
        problem.run()
        torch.cuda.synchronize()
        moved = not torch.equal(once.view(torch.int16), problem.out.view(torch.int16))
        done += 1
        if worst > BOUND[problem.dtype] or moved:
            failed += 1
            if failed < 40:
                print(f"FAILED {worst:.4f}{' and moves' if moved else ''}: {settings}", flush=True)
        problem.close()
    print(f"checked {done}, failed {failed}", flush=True)
    return failed


def part_of(library, whole, r, first, end, settings):
    """Queries first .. end - 1 of a request of `whole`, alone, over the keys up to theirs."""
    end_key = end + whole.keys[r] - whole.queries[r]
    one = Problem(library, queries=[end - first], keys=[end_key], **settings)
    rows = slice(whole.query_starts[r] + first, whole.query_starts[r] + end)
    own = slice(whole.key_starts[r], whole.key_starts[r] + end_key)
    one.q.copy_(whole.q[rows])
    one.rows_k.copy_(whole.rows_k[own])
    one.rows_v.copy_(whole.rows_v[own])
    for mine, theirs in ((one.sinks, whole.sinks), (one.slopes, whole.slopes)):
        if mine is not None:
            mine.copy_(theirs)
    one.run()
    torch.cuda.synchronize()
    same = torch.equal(one.out.view(torch.int16), whole.out[rows].view(torch.int16)) and torch.equal(
        one.lse.view(torch.int32), whole.lse[:, rows].contiguous().view(torch.int32))
    one.close()
    return same


def check_parts(library):
    """Layers of batch_invariant 2: prompts in steps of any number of tokens give the bits that they have at once."""
    failed = done = 0
    for settings in (dict(), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(300, 0)), dict(chunk=96), dict(sinks=True),
                     dict(size=(64, 64)), dict(size=(192, 128)), dict(size=(256, 256)), dict(dtype=torch.float16, heads=(14, 2)),
                     dict(spread=12.0), dict(size=(80, 80), sinks=True, cap=8.0), dict(size=(512, 512), heads=(16, 4)),
                     dict(dtype=torch.float16, spread=12.0, heads=(8, 8)), dict(dtype=torch.float16, size=(64, 64), window=(100, 0))):
        queries = [random.randint(1, 1500) for _ in range(4)] + [5, 1]
        keys = [n + random.choice([0, random.randint(1, 2000)]) for n in queries]
        settings = dict(settings, lse=True, invariant=2)
        whole = Problem(library, queries=queries, keys=keys, **settings)
        whole.run()
        torch.cuda.synchronize()
        for r, n in enumerate(queries):
            cuts = sorted({0, n, n - 1, *(random.randint(0, n) for _ in range(4))})
            for first, end in zip(cuts, cuts[1:]):
                same = part_of(library, whole, r, first, end, settings)
                done += 1
                failed += not same
                if not same:
                    print(f"FAILED parts: queries {first} to {end} of {n} over {keys[r]} keys, {settings}", flush=True)
        whole.close()
    print(f"checked {done} parts, failed {failed}", flush=True)
    return failed


def check_alone(library):
    """Batch-invariant layers: requests alone give the bits that they have in a batch of more items than multiprocessors."""
    failed = done = 0
    for settings in (dict(), dict(causal=False), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(300, 0)), dict(sinks=True),
                     dict(size=(64, 64)), dict(size=(192, 128)), dict(size=(256, 256)), dict(dtype=torch.float16, heads=(14, 2)),
                     dict(size=(64, 64), cap=8.0, causal=False), dict(size=(256, 256), alibi=1, window=(12, 1), causal=False),
                     dict(size=(224, 224), cap=8.0, alibi=2, window=(20, 0), dtype=torch.float16)):
        queries = [random.randint(1, 1500) for _ in range(20)] + [1, 2, 9, 33]
        keys = [n + random.choice([0, random.randint(1, 2000)]) for n in queries]
        settings = dict(settings, lse=True, invariant=True)
        whole = Problem(library, queries=queries, keys=keys, **settings)
        whole.run()
        torch.cuda.synchronize()
        for r in random.sample(range(20), 5) + [20, 21, 22, 23]:
            same = part_of(library, whole, r, 0, queries[r], settings)
            done += 1
            failed += not same
            if not same:
                print(f"FAILED alone: {queries[r]} queries over {keys[r]} keys, {settings}", flush=True)
        whole.close()
    print(f"checked {done} alone, failed {failed}", flush=True)
    return failed


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("cell")
    parser.add_argument("plugin")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    print(f"seed {seed}", flush=True)
    random.seed(seed)
    torch.manual_seed(seed)
    library = ctypes.CDLL(args.cell)
    assert library.cell_open(args.plugin.encode()) == 0
    sys.exit(((check(library) if args.check else 0) + (check_alone(library) + check_parts(library) if args.alone else 0)) != 0)


if __name__ == "__main__":
    main()
