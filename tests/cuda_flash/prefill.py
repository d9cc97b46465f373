# SPDX-License-Identifier: Apache-2.0
"""Prefill of cuda_flash, checked against float64 on the GPU: longer batches than a CPU's reference has time for.

usage: PYTHONPATH=bindings/python/src:tests/python prefill.py [--check] [--alone] [--seed N] [--backend NAME] [--device NAME]
"""
import argparse
import itertools
import math
import random
import sys

import torch

import libattn
from common import attention

BOUND = {torch.bfloat16: 0.06, torch.float16: 0.02}  # largest error of an element over its row's RMS
ALIBI = ("none", "linear", "sqrt")
BACKEND, DEVICE = "cuda_flash", "cuda"
RUNTIME = libattn.Runtime()


class Problem:
    """queries[r] queries of requests with keys[r] keys, the queries last. Without pages a layer of an encoder, whose batch may be
    causal. `given`: q, keys, values, sinks and slopes in place of random ones."""

    def __init__(self, queries, keys=None, heads=(32, 8), size=(128, 128), dtype=torch.bfloat16, causal=True, page=0, nhd=False,
                 window=None, chunk=0, cap=0.0, alibi=0, sinks=False, invariant=0, lse=False, spread=1.0, fp8=0, slopes=(0.0, 0.1),
                 given=None):
        keys = keys or queries
        self.queries, self.keys, self.heads, self.dtype, self.causal = queries, keys, heads, dtype, causal
        self.window, self.chunk, self.cap, self.alibi, self.scale = window or (-1, -1), chunk, cap, alibi, 1 / math.sqrt(size[0])
        tokens, total, low, high = sum(queries), sum(keys), *slopes
        new = lambda *shape: torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)
        self.q, self.rows_k, self.rows_v, self.sinks, self.slopes = given or (
            (new(tokens, heads[0], size[0]) * spread).to(dtype), new(total, heads[1], size[0]), new(total, heads[1], size[1]),
            torch.randn(heads[0], device=DEVICE) if sinks else None,
            low + torch.rand(heads[0], device=DEVICE) * (high - low) if alibi else None)
        narrow_q = self.q.to(torch.float8_e4m3fn) if fp8 == 2 else self.q
        self.q = narrow_q.to(dtype)
        self.out = torch.full((tokens, heads[0], size[1]), float("nan"), device=DEVICE, dtype=dtype)
        self.lse = torch.full((heads[0], tokens), float("nan"), device=DEVICE) if lse else None
        self.key_starts = [sum(keys[:r]) for r in range(len(keys) + 1)]
        self.query_starts = [sum(queries[:r]) for r in range(len(queries) + 1)]
        desc = libattn.LayerDesc(
            "prefill", *heads, size[0], scale=self.scale, kind="decoder" if page else "encoder_only", dtype=str(dtype)[6:].replace("float", "f"),
            kv_dtype="fp8_e4m3" if fp8 else "auto", head_size_v=size[1], causal=causal if page else None, window=window, soft_cap=cap,
            has_sinks=sinks, alibi=ALIBI[alibi], chunk_size=chunk, block_size=page, batch_invariant=invariant,
            **({"q_scale_form": "per_tensor", "q_dtype": "fp8_e4m3"} if fp8 == 2 else {}))
        self.model = RUNTIME.bind(RUNTIME.select([desc], backend=BACKEND, device=None if DEVICE == "cpu" else DEVICE))
        layer, self.tensors = self.model.layers[0], [narrow_q, self.rows_k, self.rows_v, self.out, self.lse]
        host, lengths, starts = (torch.tensor(x, dtype=torch.int32) for x in (self.query_starts, keys, self.key_starts))
        at = {"query_start_loc_host": host, "causal": causal}
        if page:
            table, views = self.pages(page, nhd, fp8)
            layer.bind_kv_views(*views)
            self.tensors[1:3] = None, None
            at.update(seq_lens=lengths.to(DEVICE), seq_lens_host=lengths, block_table=table)
        else:
            at.update(key_start_loc=starts.to(DEVICE), key_start_loc_host=starts)
        scales = {"q_scale": 1.0} if fp8 == 2 else {}
        layer.bind_params(sinks=self.sinks, alibi_slopes=self.slopes, **scales)
        self.plan = self.model.plan(0, max_num_reqs=len(keys), max_num_tokens=tokens, max_query_len=max(queries), max_seq_len=max(keys))
        if self.plan.workspace_bytes:
            self.plan.bind_workspace(libattn.allocate(self.plan.workspace_bytes, device=DEVICE))
        self.plan.update(libattn.Batch(host.to(DEVICE), **at), stream())

    def pages(self, page, nhd, fp8):
        """A block table, and the keys and values in pages; what is in none is NaN."""
        counts = [-(-k // page) for k in self.keys]
        order, at = torch.randperm(sum(counts)), 0
        table = torch.full((len(counts), max(counts)), 2**30, dtype=torch.int32)
        where = torch.empty(sum(self.keys), dtype=torch.int64)
        for r, count in enumerate(counts):
            table[r, :count] = order[at:at + count].int()
            j = torch.arange(self.keys[r])
            where[self.key_starts[r]:self.key_starts[r + 1]] = table[r, j // page].long() * page + j % page
            at += count
        views = []
        for rows in (self.rows_k, self.rows_v):
            stored = rows.to(torch.float8_e4m3fn) if fp8 else rows
            flat = torch.full((sum(counts) * page, *rows.shape[1:]), float("nan"), device=DEVICE, dtype=self.dtype).to(stored.dtype)
            flat.view(torch.uint8 if fp8 else torch.int16)[where.to(DEVICE)] = stored.view(torch.uint8 if fp8 else torch.int16)
            pages = flat.view(sum(counts), page, *rows.shape[1:])
            views.append(pages if nhd else pages.transpose(1, 2).contiguous().transpose(1, 2))
            if fp8:
                rows.copy_(stored.to(self.dtype))
        return table.to(DEVICE), views

    def run(self):
        self.plan.run(self.model.layers[0], *self.tensors, stream(), libattn.NO_WRITE if self.tensors[1] is None else 0)

    def close(self):
        self.plan.close()
        self.model.close()

    def visible(self, r, rows):
        p = rows[:, None] + self.keys[r] - self.queries[r]
        j = torch.arange(self.keys[r], device=DEVICE)[None, :]
        sees = (j <= p) if self.causal else torch.ones_like(p * j, dtype=torch.bool)
        if self.window[0] >= 0:
            sees &= j >= p - self.window[0]
        if self.window[1] >= 0:
            sees &= j <= p + self.window[1]
        if self.chunk:
            sees &= j // self.chunk == torch.div(p, self.chunk, rounding_mode="floor")
        return sees, (p - j).abs() if self.alibi == 1 else (p - j).clamp(min=0).double().sqrt()

    def error(self, samples=96):
        """Largest error of an element over its row's RMS, on some rows of each request and some heads."""
        errors, group = [torch.zeros(1, device=DEVICE)], self.heads[0] // self.heads[1]
        step = 2.0 ** -25 if self.dtype == torch.float16 else 0.0  # half of what lies between f16's smallest numbers
        for r in random.sample(range(len(self.queries)), min(6, len(self.queries))):
            n, own = self.queries[r], slice(self.key_starts[r], self.key_starts[r + 1])
            picked = set(random.sample(range(n), min(samples, n))) | {0, n - 1} | {x for x in (31, 32, 127, 128) if x < n}
            rows = torch.tensor(sorted(picked), device=DEVICE)
            sees, distance = self.visible(r, rows)
            at = self.query_starts[r] + rows
            for h in random.sample(range(self.heads[0]), min(3, self.heads[0])):
                of_k = slice(h // group, h // group + 1)
                want, lse = attention(self.q[at, h:h + 1], self.rows_k[own, of_k], self.rows_v[own, of_k], self.scale, sees, self.cap,
                                      None if self.sinks is None else self.sinks[h:h + 1],
                                      -self.slopes[h].double() * distance if self.alibi else None)
                rms = want.square().mean(-1, keepdim=True).sqrt() + 1e-6
                errors.append((((self.out[at, h:h + 1].double() - want).abs() - step).clamp(min=0) / rms).flatten())
                if self.lse is not None:
                    errors.append((self.lse[h, at].double() - lse[0]).abs())
        return torch.cat([e.float() for e in errors]).nan_to_num(1e9).max().item()


def stream():
    return torch.cuda.current_stream() if DEVICE == "cuda" else None


def wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


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
                         dict(alibi=1), dict(alibi=2), dict(alibi=1, causal=False), dict(sinks=True), dict(invariant=1),
                         dict(window=(130, 0), cap=30.0, sinks=True, alibi=1)):
                yield dict(base, page=page, size=size, **term) | ({"page": 64} if "chunk" in term else {})
    for size in ((64, 64), (96, 96), (128, 128), (256, 256)):
        for page in (16, 64, 24):
            for term in (dict(), dict(causal=False), dict(window=(300, 0)), dict(cap=20.0), dict(alibi=1), dict(sinks=True)):
                yield dict(base, fp8=random.randint(1, 2), page=page, size=size, nhd=page == 64, **term)
    for cap, spread in ((20.0, 4.0), (20.0, 40.0), (50.0, 10.0), (1.0, 1.0), (5000.0, 1.0)):  # tanh's two ways, by warp and tile
        for size in ((64, 64), (128, 128), (256, 256)):
            for page in (0, 16):
                yield dict(queries=[700, 129, 1, 300], keys=[1500, 129, 900, 2300], lse=True, cap=cap, spread=spread, page=page, size=size)
    # copies of some heads at a time: all have more than 160 MiB
    yield dict(queries=[1500, 700, 9], keys=[60000, 30000, 25000], lse=True, page=16, fp8=random.randint(1, 2))
    for dtype in (torch.bfloat16, torch.float16):
        for spread in (12.0, 100.0):  # scores that grow past what a row's base leaves room for
            for term in (dict(), dict(causal=False), dict(alibi=1), dict(sinks=True, size=(64, 64)), dict(size=(512, 512))):
                yield dict(base, dtype=dtype, spread=spread, **term)
    for dtype in (torch.bfloat16, torch.float16):  # items of 192 rows
        for heads in ((32, 8), (8, 8), (8, 1), (14, 2), (40, 8)):
            for term in (dict(), dict(causal=False), dict(window=(100, 0)), dict(sinks=True, spread=12.0)):
                yield dict(base | term, dtype=dtype, size=random.choice([(64, 64), (40, 40)]), heads=heads, page=random.choice([0, 16, 64]),
                           invariant=1)
    for page in (0, 16, 24, 64):  # with sm_80's kernel items of 64 rows
        for term in (dict(), dict(window=(33, 0)), dict(sinks=True), dict(size=(96, 96))):
            yield dict(queries=[some(90) for _ in range(3)], keys=[some(300) + 90 for _ in range(3)], heads=(14, 2), page=page, lse=True) | term
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


def used_memory():
    """Bytes of the device in use after 100 plans of one batch."""
    for _ in range(100):
        problem = Problem(queries=[100, 1], page=16)
        problem.run()
        problem.close()
    wait()
    del problem
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def check():
    used = [used_memory() for _ in range(3)]
    more = min(after - before for before, after in itertools.pairwise(used))  # what comes once is a cache's
    if more > 0:
        print(f"FAILED 100 plans leave {more} bytes of the device in use", flush=True)
    failed = done = int(more > 0)
    for settings in checks():
        problem = Problem(**settings)
        problem.run()
        wait()
        worst = problem.error()
        once = problem.out.clone()
        problem.out.fill_(float("nan"))
        problem.run()
        wait()
        moved = not torch.equal(once.view(torch.int16), problem.out.view(torch.int16))
        done += 1
        if worst > BOUND[problem.dtype] or moved:
            failed += 1
            if failed < 40:
                print(f"FAILED {worst:.4f}{' and moves' if moved else ''}: {settings}", flush=True)
        problem.close()
    print(f"checked {done}, failed {failed}", flush=True)
    return failed


def part_of(whole, r, first, end, settings):
    """Whether queries first .. end - 1 of a request of `whole`, alone, over the keys up to theirs, give its bits."""
    end_key = end + whole.keys[r] - whole.queries[r]
    rows = slice(whole.query_starts[r] + first, whole.query_starts[r] + end)
    own = slice(whole.key_starts[r], whole.key_starts[r] + end_key)
    one = Problem(queries=[end - first], keys=[end_key], **settings,
                  given=(whole.q[rows], whole.rows_k[own], whole.rows_v[own], whole.sinks, whole.slopes))
    one.run()
    wait()
    same = torch.equal(one.out.view(torch.int16), whole.out[rows].view(torch.int16)) and torch.equal(
        one.lse.view(torch.int32), whole.lse[:, rows].contiguous().view(torch.int32))
    one.close()
    return same


def check_bits(what, layers, lengths, requests, cuts):
    """Parts of requests give the bits that they have in a batch of all; `cuts` of a number of queries."""
    failed = done = 0
    for settings in layers:
        queries = lengths()
        keys = [n + random.choice([0, random.randint(1, 2000)]) for n in queries]
        whole = Problem(queries=queries, keys=keys, **settings)
        whole.run()
        wait()
        for r in requests(queries):
            ends = cuts(queries[r])
            for first, end in zip(ends, ends[1:]):
                same = part_of(whole, r, first, end, settings)
                done += 1
                failed += not same
                if not same:
                    print(f"FAILED {what}: queries {first} to {end} of {queries[r]} over {keys[r]} keys, {settings}", flush=True)
        whole.close()
    print(f"checked {done} {what}, failed {failed}", flush=True)
    return failed


def check_alone():
    """Batch-invariant layers: requests alone, in a batch of more items than multiprocessors. Of level 2: prompts in steps of any number
    of tokens."""
    some = lambda most: random.randint(1, most)
    alone = (dict(), dict(causal=False), dict(cap=20.0), dict(cap=20.0, spread=4.0), dict(alibi=1), dict(alibi=2),
             dict(window=(300, 0), page=16), dict(chunk=96, page=64), dict(sinks=True), dict(size=(64, 64)), dict(size=(192, 128)),
             dict(size=(256, 256)), dict(dtype=torch.float16, heads=(14, 2)), dict(size=(64, 64), cap=8.0, causal=False),
             dict(size=(256, 256), alibi=1, window=(12, 1), causal=False),
             dict(size=(224, 224), cap=8.0, alibi=2, window=(20, 0), dtype=torch.float16, page=64))
    steps = (dict(), dict(cap=20.0), dict(alibi=1), dict(alibi=2), dict(window=(300, 0)), dict(chunk=96), dict(sinks=True),
             dict(size=(64, 64)), dict(size=(192, 128)), dict(size=(256, 256)), dict(dtype=torch.float16, heads=(14, 2)),
             dict(spread=12.0), dict(size=(80, 80), sinks=True, cap=8.0), dict(size=(512, 512), heads=(16, 4)),
             dict(dtype=torch.float16, spread=12.0, heads=(8, 8)), dict(dtype=torch.float16, size=(64, 64), window=(100, 0)))
    return check_bits("alone", [dict(x, lse=True, invariant=1) for x in alone], lambda: [some(1500) for _ in range(20)] + [1, 2, 9, 33],
                      lambda queries: random.sample(range(20), 5) + [20, 21, 22, 23], lambda n: [0, n]) + check_bits(
        "parts", [dict(dict(page=16) | x, lse=True, invariant=2) for x in steps], lambda: [some(1500) for _ in range(4)] + [5, 1],
        lambda queries: range(len(queries)), lambda n: sorted({0, n, n - 1, *(random.randint(0, n) for _ in range(4))}))


def main():
    global BACKEND, DEVICE
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--backend", default=BACKEND)
    parser.add_argument("--device", default=DEVICE)
    args = parser.parse_args()
    BACKEND, DEVICE = args.backend, args.device
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(2**31)
    print(f"seed {seed}", flush=True)
    random.seed(seed)
    torch.manual_seed(seed)
    sys.exit(((check() if args.check else 0) + (check_alone() if args.alone else 0)) != 0)


if __name__ == "__main__":
    main()
